"""Bundle -> engine: plan, convert, compare, parse, build, write; all of it or nothing.

The plan comes first and refuses what cannot work (:mod:`fixedstate.export.profiles`). A graph whose
precision is asked for is converted, and compared with the float32 one in ONNX Runtime before
TensorRT sees it (:mod:`fixedstate.export.precisioncheck`). Each graph is parsed and built in a
process of its own (:mod:`fixedstate.export.engineprocess`), and what came out is compared with the
plan: ports, number of plugins. The folder appears when all roles are done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate import __version__
from fixedstate.bundle import (
    PARITY,
    WEIGHTS,
    Bundle,
    check_target,
    readable_sha256,
    staged_folder,
    write_atomic,
)
from fixedstate.errors import BackendError, BundleError, UsageError
from fixedstate.export import engineprocess, graphfacts
from fixedstate.export.activations import tokens_of
from fixedstate.export.builderflags import BuilderFlags
from fixedstate.export.cards import first_card
from fixedstate.export.enginecache import EngineCache
from fixedstate.export.passes import serialised
from fixedstate.export.pluginuse import judge
from fixedstate.export.precisioncheck import check_precision, require_precision
from fixedstate.export.precisionfiles import convert_bundle
from fixedstate.export.profiles import BuildPlan, BuildRequest, RolePlan, plan, symbol_ranges
from fixedstate.export.targets import ENTERPRISE, RTX
from fixedstate.plugins import ptx
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.ports import Port
from fixedstate.runtime.enginefile import EngineFolder, Plan, refit_graph, write_engine
from fixedstate.runtime.identity import Card, Identity, PluginUse, os_text

LAYERS = "layers.json"
"""File of an engine: by role, what its network and its plan consist of."""

Progress = Callable[[str, float], None]
"""Told what is being done, and which part of the whole is done, 0 to 1."""

_DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "int8": "INT8",
    "uint8": "UINT8",
    "int64": "INT64",
}
_KEPT = ".kept"  # marks the domain of calls that are not inlined
_PREPARED = 0.2  # part of the work before the first build, where a precision is converted


@dataclass(frozen=True, slots=True)
class RoleBuild:
    """How the build of one role went.

    Attributes:
        parse_seconds: In the parser.
        build_seconds: In the builder.
        seconds: From the start of its process to the end.
        peak_bytes: Largest resident size of that process, mapped files included.
        plan_bytes: Size of the plan.
        weight_bytes: Of the weights that the graph reads, at the engine's precision.
        layers: How many layers of each type the parsed network has.
        plugins: Names of its plugin layers.
        steps: How many steps of each kind the engine has, where its text tells.
        warnings: What TensorRT said.
    """

    parse_seconds: float
    build_seconds: float
    seconds: float
    peak_bytes: int
    plan_bytes: int
    weight_bytes: int
    layers: Mapping[str, int]
    plugins: tuple[str, ...]
    steps: Mapping[str, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a build gave.

    Attributes:
        engine: The opened engine.
        plan: What was planned.
        builds: By role; empty where the engine was in the cache already.
    """

    engine: EngineFolder
    plan: BuildPlan
    builds: Mapping[str, RoleBuild]

    @property
    def path(self) -> Path:
        """The engine's folder."""
        return self.engine.path

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "path": str(self.path),
            "digest": self.engine.digest,
            "key": self.engine.identity.key,
            "cached": not self.builds,
            "check": self.engine.check,
            "builds": {role: asdict(one) for role, one in self.builds.items()},
            "plan": self.plan.to_dict(),
        }


def build(
    bundle: Bundle,
    request: BuildRequest,
    out: Path | None = None,
    *,
    force: bool = False,
    flags: BuilderFlags | None = None,
    progress: Progress | None = None,
    notes: Callable[[str], None] | None = None,
    cache: EngineCache | None = None,
    timeout: float | None = None,
) -> EngineReport:
    """Build an engine.

    Args:
        bundle: The opened bundle.
        request: What is asked.
        out: Folder to write; None for the user's cache, where an engine of the same identity is
            found again.
        force: Replace what is at ``out``.
        flags: How the builder is set beside what the request says.
        progress: Told how far it is.
        notes: Told what a person should know.
        cache: The cache; None for the user's.
        timeout: Seconds that the build of one role may take; None for any number.

    Raises:
        UsageError: see :func:`fixedstate.export.profiles.plan`; for an ``out`` that cannot be
            written.
        BackendError: for what the product cannot do, before or while it builds; one sentence.
        ParityError: where a converted precision is too far from float32.
        BundleError: for a damaged bundle, or where a file cannot be written.
    """
    say = notes or (lambda _: None)
    if out is not None:
        check_target(out, force)
    elif force:
        raise UsageError("--force replaces what is at -o, and no -o is given")
    card = first_card()
    planned = planned_build(bundle, request, flags, card)
    settings = _settings(request, flags)
    with tempfile.TemporaryDirectory(prefix="fixedstate.") as folder:
        version = _version(request.target, Path(folder))
    identity = identity_of(bundle, planned, settings, version, card)
    work = _Build(bundle, planned, settings, identity, progress or (lambda *_: None), timeout)
    if out is not None:
        with staged_folder(out, force=force) as folder_:
            work.into(folder_)
        return EngineReport(EngineFolder.open(out, verify=False), planned, work.builds)
    held = cache or EngineCache(notes=say)
    with held.held(identity, work.into) as engine:
        return EngineReport(engine, planned, work.builds)


def planned_build(
    bundle: Bundle,
    request: BuildRequest,
    flags: BuilderFlags | None = None,
    card: Card | None = None,
) -> BuildPlan:
    """The plan of a build on this machine; see :func:`fixedstate.export.profiles.plan`.

    Args:
        bundle: The opened bundle.
        request: What is asked.
        flags: How the builder is set beside what the request says.
        card: The card of this machine; None where there is none.

    Raises:
        UsageError: for what the model does not have.
        BackendError: for what the product cannot do, for the cards or on this machine.
    """
    planned = plan(bundle, request)
    settings = _settings(request, flags)
    if reasons := settings.refusals(request.target, cards=card is not None):
        raise BackendError("; ".join(reasons))
    _check_card(request, settings, card)
    return planned


def _settings(request: BuildRequest, flags: BuilderFlags | None) -> BuilderFlags:
    return replace(flags or BuilderFlags(), more=request.builder_flags)


def identity_of(
    bundle: Bundle, planned: BuildPlan, flags: BuilderFlags, version: str, card: Card | None = None
) -> Identity:
    """What an engine is made of, known before it is built.

    Args:
        bundle: The bundle.
        planned: Its plan.
        flags: How the builder is set.
        version: Of the product.
        card: The card that builds.
    """
    request = planned.request
    kind = "python" if request.target == RTX else "aot"
    return Identity(
        product=request.target,
        version=version,
        package=__version__,
        os=os_text(),
        capabilities=request.capabilities,
        bundle=bundle.digest,
        weights=bundle.weights,
        graphs={role: bundle.graph(role, request.target).sha256 for role in planned.roles},
        precision=planned.precision.name,
        fp32_layers=request.fp32_layers,
        flags=flags.identity(
            request.target, request.timing_cache is not None, card.name if card else ""
        ),
        profiles={role: one.profiles for role, one in planned.roles.items()},
        plugins=tuple(
            PluginUse(
                need.name,
                need.namespace,
                need.version,
                kind,
                texts={
                    f"{OPS[need.name].torch_name}.{request.io}.{label}.ptx": digest
                    for label, digest in need.texts.items()
                },
            )
            for need in planned.needs
        ),
    )


def timing_cache(file: Path, version: str) -> Path:
    """Where a timing cache really is: beside the file named, one per TensorRT and set of kernels.

    TensorRT times plugins by name and types: timings of other kernels would be taken for theirs.

    Args:
        file: As asked for.
        version: Of TensorRT.
    """
    kernels = json.dumps(ptx.index(), sort_keys=True)
    key = hashlib.sha256(f"{version} {kernels}".encode()).hexdigest()[:16]
    return file.with_name(f"{file.stem}-{key}{file.suffix}")


def _version(target: str, folder: Path) -> str:
    finished = engineprocess.run({"action": "probe", "target": target}, folder)
    result = engineprocess.require(finished, target, "", f"looking for {target}")
    return str(result["version"])


def _check_card(request: BuildRequest, flags: BuilderFlags, card: Card | None) -> None:
    """TensorRT builds for the card it runs on.

    Raises:
        BackendError: where another one is asked for.
    """
    if request.target != ENTERPRISE or card is None or flags.hardware == "ampere+":
        return
    if request.capabilities != (card.capability,):
        raise BackendError(
            f"compute capability {', '.join(request.capabilities)}: {ENTERPRISE} builds for the "
            f"card of this machine, {card.name} with {card.capability}: ask for that one, or build "
            "on a machine with the card that the engine is for"
        )


class _Build:
    """One build: makes an engine in the folder it is given.

    Attributes:
        builds: How each role went.
    """

    def __init__(
        self,
        bundle: Bundle,
        planned: BuildPlan,
        flags: BuilderFlags,
        identity: Identity,
        progress: Progress,
        timeout: float | None,
    ) -> None:
        self._bundle, self._plan, self._flags = bundle, planned, flags
        self._identity, self._progress, self._timeout = identity, progress, timeout
        self.builds: dict[str, RoleBuild] = {}

    def into(self, folder: Path) -> None:
        """Build every role into a folder and write engine.json."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".work.") as made:
            work = Path(made)
            source, check = self._source(work)
            if self._flags.is_stripped:
                _copy_weights(source, folder)
            begin = _PREPARED if source is not self._bundle else 0.0
            for index, role in enumerate(self._plan.roles.values()):
                done = begin + (1 - begin) * index / len(self._plan.roles)
                part = (1 - begin) / len(self._plan.roles)
                text = f"building {role.role} ({index + 1} of {len(self._plan.roles)})"
                self._progress(text, done)
                with _shares(self._progress, text, done, part) as share:
                    self._role(role, source, work, folder, share)
            self._progress("writing the engine", 1.0)
            write_atomic(work / LAYERS, self._layers())
            refits = [refit_graph(role) for role in self._plan.roles] + [WEIGHTS]
            write_engine(
                folder,
                self._bundle,
                self._identity,
                self._plan.precision,
                [_plan_of(role) for role in self._plan.roles.values()],
                check=check,
                libraries=[
                    work / LAYERS,
                    *(folder / name for name in refits if self._flags.is_stripped),
                ],
            )

    def _source(self, work: Path) -> tuple[Bundle, dict[str, Any]]:
        """The bundle at the engine's precision, and how that was compared."""
        bundle, request = self._bundle, self._plan.request
        if bundle.precision == self._plan.precision:
            return bundle, _exported(bundle) if request.precision != "fp32" else {}
        for role in self._plan.roles:
            name = bundle.graph(role, request.target).role
            if "@" in name:
                raise BackendError(
                    f"{name} is a copy for one target and cannot be converted to "
                    f"{request.precision}: export the bundle at that precision, or without the copy"
                )

        def tell(text: str) -> None:
            self._progress(text, 0.0)

        made = work / "converted"
        made.mkdir()
        # all graphs: a comparison along a trajectory needs one to commit and one to denoise
        converted = convert_bundle(
            bundle, request.precision, made, fp32_layers=request.fp32_layers, progress=tell
        )
        for role in self._plan.roles:
            model = ir.load(converted.path / converted.graph(role, request.target).file)
            if problems := graphfacts.facts(model, values=True).problems:
                raise BackendError(
                    f"{role} converted to {request.precision}: {'; '.join(problems)}: keep the "
                    "layers concerned with --fp32-layers, or report this model"
                )
        check = check_precision(bundle, converted, progress=tell)
        require_precision(check, request.fp32_layers)
        return converted, check

    def _role(
        self,
        role: RolePlan,
        source: Bundle,
        work: Path,
        folder: Path,
        share: engineprocess.Share,
    ) -> None:
        """Build one plan and compare it with what was planned."""
        request, target = self._plan.request, self._plan.request.target
        version = self._identity.version
        graph = source.path / source.graph(role.role, target).file
        if role.needs:
            graph = self._without_refused(role, graph, source, work)
        if self._flags.is_stripped:
            graph = _refittable(graph, folder / refit_graph(role.role), role)
        cache = None
        if request.timing_cache is not None:
            cache = str(timing_cache(Path(request.timing_cache).absolute(), version))
        finished = engineprocess.run(
            {
                "action": "build",
                "target": target,
                "role": role.role,
                "graph": str(graph.absolute()),
                "plan": str((folder / f"{role.role}.plan").absolute()),
                "names": list(role.names),
                "profiles": list(role.profiles),
                "capabilities": list(request.capabilities),
                "flags": self._flags.to_dict(),
                "needs": [need.to_dict() for need in role.needs],
                "timing_cache": cache,
            },
            work,
            share=share,
            timeout=self._timeout,
        )
        result = engineprocess.require(finished, target, version, role.role)
        problems = [*_port_problems(role, result["ports"]), *_plugin_problems(role, result)]
        if problems:
            raise BackendError(
                f"{role.role}: what {target} {version} read is not what was planned: "
                f"{'; '.join(problems)}: report this model"
            )
        self.builds[role.role] = RoleBuild(
            parse_seconds=result["parse_seconds"],
            build_seconds=result["build_seconds"],
            seconds=finished.seconds,
            peak_bytes=finished.peak_bytes,
            plan_bytes=result["bytes"],
            weight_bytes=role.weights,
            layers=result["layers"],
            plugins=tuple(result["plugins"]),
            steps=result["steps"],
            warnings=tuple(result["warnings"]),
        )

    def _without_refused(self, role: RolePlan, graph: Path, source: Bundle, work: Path) -> Path:
        """The graph, where nodes that no kernel takes are left to their function bodies.

        Raises:
            BackendError: where the number of plugins is not that of the plan.
        """
        request = self._plan.request
        model = ir.load(graph)
        sets = symbol_ranges(source.spec, role.role, request)
        most: dict[str, int] = {}
        for ranges in sets.values():
            for symbol, one in ranges.items():
                most[symbol] = max(most.get(symbol, 0), one.most)
        tokens = tokens_of(role.role, source.spec.block_len, most)
        refused = set()
        for use in graphfacts.facts(model).nodes:
            if judge(use, use.types[0], most, tokens, request.capabilities).reasons:
                refused.add(use.name)
        nodes = [node for node in model.graph.all_nodes() if node.domain == DOMAIN]
        plugins = sum(node.name not in refused for node in nodes)
        if plugins != planned_plugins(role):
            raise BackendError(
                f"{role.role}: {plugins} nodes can be plugins, {planned_plugins(role)} were "
                "planned: report this model"
            )
        if not refused:
            return graph
        for node in nodes:
            if node.name in refused:
                del node.attributes["plugin_namespace"]
        made = work / f"{role.role}.plugins"
        made.mkdir()
        (made / WEIGHTS).symlink_to((graph.parent / WEIGHTS).resolve())
        write_atomic(made / graph.name, serialised(model))
        return made / graph.name

    def _layers(self) -> bytes:
        """What :data:`LAYERS` holds: the same for the same engine."""
        values = {
            role: {
                "layers": dict(sorted(one.layers.items())),
                "plugins": list(one.plugins),
                "kernels": [list(row) for row in self._plan.roles[role].kernels],
                "profiles": list(self._plan.roles[role].names),
                "steps": dict(sorted(one.steps.items())),
                "plan_bytes": one.plan_bytes,
                "weight_bytes": one.weight_bytes,
            }
            for role, one in sorted(self.builds.items())
        }
        return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def _copy_weights(source: Bundle, folder: Path) -> None:
    """Put the weights where plans are parsed and refitted from: the same file for all of them.

    Raises:
        BundleError: where they cannot be copied, or are not those of the bundle any more.
    """
    try:
        shutil.copyfile(source.path / WEIGHTS, folder / WEIGHTS)
    except OSError as err:
        raise BundleError(
            f"{source.path / WEIGHTS} cannot be copied: {err.strerror or err}"
        ) from err
    if readable_sha256(folder / WEIGHTS) != source.weights:
        raise BundleError(
            f"{source.path / WEIGHTS} was changed since the bundle was opened: export it again"
        )


def _refittable(graph: Path, target: Path, role: RolePlan) -> Path:
    """Write a graph in which every constant that can reach a plan has a name of its own.

    TensorRT's refitter reads initializers and Constant nodes of a graph and of the bodies of its
    loops, and none of local functions (``ModelRefitter.cpp`` of onnx/onnx-tensorrt), so functions
    are inlined. Nodes that become plugins stay calls.

    Args:
        graph: What would be parsed.
        target: Where to write, beside the weights.
        role: What is planned for it.
    """
    model = ir.load(graph)
    functions = dict(model.functions)
    calls = [node for node in model.graph.all_nodes() if node.op_identifier() in functions]
    plugins = [node for node in calls if role.needs and "plugin_namespace" in node.attributes]
    for node in plugins:
        node.domain += _KEPT
    common.InlinePass()(model)
    for node in plugins:
        node.domain = node.domain.removesuffix(_KEPT)
    if plugins:
        model.functions.update(functions)
        common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    else:
        model.opset_imports.pop(DOMAIN, None)
    write_atomic(target, serialised(model))
    return target


def planned_plugins(role: RolePlan) -> int:
    """Number of nodes of a role that are to be plugins."""
    return sum(count for _, count, verdict in role.kernels if verdict.startswith("plugin"))


@contextlib.contextmanager
def _shares(
    progress: Progress, text: str, done: float, part: float
) -> Iterator[engineprocess.Share]:
    """Turns shares of one role into shares of all."""
    yield lambda share: progress(text, done + part * share)


def _plan_of(role: RolePlan) -> Plan:
    return Plan(role.role, f"{role.role}.plan", "", role.inputs, role.outputs)


def _exported(bundle: Bundle) -> dict[str, Any]:
    """How the precision of a bundle that was exported in it was compared."""
    found: dict[str, Any] = {"kind": f"exported at {bundle.precision.name}; nothing was converted"}
    with contextlib.suppress(OSError, ValueError):
        found["parity"] = json.loads((bundle.path / PARITY).read_bytes())
    return found


def _port_problems(role: RolePlan, found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Where the ports of a parsed network are not those of the plan."""
    for kind, ports in (("inputs", role.inputs), ("outputs", role.outputs)):
        read = {one["name"]: one for one in found[kind]}
        wanted = {port.name: port for port in ports}
        for name in sorted(set(read) ^ set(wanted)):
            yield f"{kind} {'lack' if name in wanted else 'also have'} {name!r}"
        for name in sorted(set(read) & set(wanted)):
            has, wants = read[name], _expected(wanted[name])
            if not _agree(has, wants, kind == "outputs"):
                yield (
                    f"{name!r} is {has['dtype']} {has['shape']}, expected {wants['dtype']} "
                    f"{wants['shape']}"
                )


def _expected(port: Port) -> dict[str, Any]:
    shape = [-1 if isinstance(dim, str) else dim for dim in port.shape]
    return {"dtype": _DTYPES.get(port.dtype, port.dtype), "shape": shape}


def _agree(has: Mapping[str, Any], wants: Mapping[str, Any], output: bool) -> bool:
    """Same dtype and shape; of an output the parser may know less than the manifest."""
    sizes = zip(has["shape"], wants["shape"], strict=False)
    return (
        has["dtype"] == wants["dtype"]
        and len(has["shape"]) == len(wants["shape"])
        and all(one == other or (output and one == -1) for one, other in sizes)
    )


def _plugin_problems(role: RolePlan, result: Mapping[str, Any]) -> Iterator[str]:
    """A parser passes over a plugin that it does not find, and takes the function body."""
    planned, found = planned_plugins(role), len(result["plugins"])
    if planned != found:
        yield f"{found} plugin layers, {planned} planned"
