"""Engine folders: what ``fixedstate build`` writes, opened and checked without TensorRT.

Whether an engine may run here is the business of :mod:`fixedstate.runtime.identity`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fixedstate.bundle import MANIFEST as BUNDLE_MANIFEST
from fixedstate.bundle import (
    WEIGHTS,
    Bundle,
    DecodeDefaults,
    Source,
    manifest_data,
    readable_sha256,
    verify_files,
)
from fixedstate.errors import BackendError, BundleError, CapacityError, SpecError, require_keys
from fixedstate.ports import SYMBOLS, Port, resolve_dim
from fixedstate.runtime.identity import (
    SCHEMA,
    Bounds,
    Here,
    Identity,
    Profile,
    check_file_name,
    check_hashes,
    either,
    listed,
    other_model,
    refusal,
    short,
)
from fixedstate.spec import ModelSpec
from fixedstate.state import ROLES, Precision, StateSpec, graph_ports, top_k_of

MANIFEST = "engine.json"

_KEYS = (
    "schema",
    "identity",
    "model",
    "precision",
    "state",
    "plans",
    "check",
    "decode",
    "files",
    "source",
    "sha256",
)


# --- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """One serialized engine: its file and the ports it really has.

    Attributes:
        role: One of :data:`fixedstate.state.ROLES`.
        file: Its name, ``<role>.plan``.
        sha256: Of the file; :func:`write_engine` fills it in.
        inputs: In order, with the engine's dtypes.
        outputs: In order, likewise. One that shares its memory with an input is as large as it.
        profiles: Bounds of every dynamic input, per profile.
        aliases: The input whose memory an output updates, by output; no other pair may share it.
    """

    role: str
    file: str
    sha256: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    profiles: tuple[Profile, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def top_k(self) -> int:
        """Tokens that its ``top_k`` head gives for a slot."""
        return top_k_of(self.outputs)

    def profile_for(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Index of the first profile that takes these shapes.

        Args:
            shapes: Of every dynamic input; those of others are not looked at.

        Raises:
            CapacityError: where no profile does, naming the inputs and their bounds.
        """
        names = [port.name for port in self.inputs if _dynamic(port)]
        missing = [name for name in names if name not in shapes]
        if missing:
            raise CapacityError(f"{self.role}: no shape is given for {', '.join(missing)}")
        for index, profile in enumerate(self.profiles):
            if all(_inside(shapes[name], profile[name]) for name in names):
                return index
        if not self.profiles and not names:
            return 0
        wrong = [
            name
            for name in names
            if not any(_inside(shapes[name], profile[name]) for profile in self.profiles)
        ]
        said = "; ".join(
            f"{name} is {list(shapes[name])}, profiles take "
            + " or ".join(f"{list(p[name][0])} to {list(p[name][2])}" for p in self.profiles)
            for name in wrong or names
        )
        raise CapacityError(
            f"no profile of {self.file} takes these shapes: {said}: ask for less, or build with "
            "wider --batch, --blocks or --capacity"
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; profiles stand in the identity. See :meth:`from_dict`."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "inputs": [port.to_dict() for port in self.inputs],
            "outputs": [port.to_dict() for port in self.outputs],
            "aliases": dict(sorted(self.aliases.items())),
        }

    @classmethod
    def from_dict(
        cls, role: str, data: Mapping[str, Any], profiles: Sequence[Profile] = ()
    ) -> Plan:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, ("file", "sha256", "inputs", "outputs", "aliases"), "plan")
        return cls(
            role,
            data["file"],
            data["sha256"],
            tuple(Port.from_dict(port) for port in data["inputs"]),
            tuple(Port.from_dict(port) for port in data["outputs"]),
            tuple(profiles),
            _mapping(data, "aliases"),
        )


def refit_graph(role: str) -> str:
    """File name of the graph that the plan of a role is refitted from, where it has no weights."""
    return f"{role}.onnx"


def plan_ports(
    spec: ModelSpec, state: StateSpec, role: str, aliases: Mapping[str, str], top_k: int
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs and outputs that the plan of a role must have.

    Those of :func:`fixedstate.state.graph_ports`, but an output that updates an input's memory is
    that input's whole buffer.

    Raises:
        SpecError: for a role that the model does not have, or an alias between two ports that are
            no pair of the state.
    """
    inputs, outputs = graph_ports(spec, state, role, top_k)
    pairs = {port.present.name: port.past.name for port in state.ports}
    entering = {port.name: port for port in inputs}
    leaving = {port.name for port in outputs}
    for output, name in aliases.items():
        if output not in leaving or name not in entering:
            absent = f"output {output!r}" if output not in leaving else f"input {name!r}"
            raise SpecError(f"{role}: {output!r} is to update {name!r}, but it has no {absent}")
        if pairs.get(output) != name:
            raise SpecError(
                f"{role}: {output!r} is to update {name!r}, which is not its pair "
                f"({pairs.get(output)!r})"
            )
    return inputs, tuple(
        replace(port, shape=entering[aliases[port.name]].shape) if port.name in aliases else port
        for port in outputs
    )


def check_aliases(role: str, declared: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Refuse a loaded engine that updates other memory in place than engine.json says.

    An alias that is not declared lets two runs share memory that the runtime thinks apart; one that
    is declared only lets an update go to a copy that nobody reads.

    Args:
        role: Of the plan.
        declared: Input by output, of engine.json.
        found: Input by output, of the engine.

    Raises:
        BackendError: naming every pair that differs.
    """
    lines = [
        f"{output} updates {found.get(output, 'no input')} in place, {MANIFEST} says "
        f"{declared.get(output, 'none')}"
        for output in sorted({**declared, **found})
        if declared.get(output) != found.get(output)
    ]
    if lines:
        raise BackendError(f"{role}: {'; '.join(lines)}: build the engine again")


# --- folders -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """An opened engine: values only; plans stay on disk until a back end loads them.

    It holds all that decoding needs; the bundle it was built from is not needed.

    Attributes:
        path: Its folder.
        identity: What it was made of.
        spec: The model.
        precision: Dtypes of its ports, which may differ from the bundle's.
        state: Its carried tensors at that precision.
        plans: By role.
        check: How its precision was checked against the bundle, and how well that went.
        decode: How it decodes unless told otherwise.
        files: sha256 of the other files (tokenizer, licence, plugin libraries, and what plans
            without weights are refitted from), by name.
        source: Where the weights came from.
        digest: sha256 of engine.json.
    """

    path: Path
    identity: Identity
    spec: ModelSpec
    precision: Precision
    state: StateSpec
    plans: dict[str, Plan]
    check: dict[str, Any]
    decode: DecodeDefaults
    files: dict[str, str]
    source: Source
    digest: str = ""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> EngineFolder:
        """Open an engine folder and check everything in it but whether it runs here.

        Args:
            path: The folder.
            verify: False skips the hashes of plans and weights, the slow ones.

        Raises:
            BundleError: for a missing, damaged, changed or newer engine, naming file, both values
                and remedy.
        """
        folder = Path(path)
        raw = _read_manifest(folder)
        data = manifest_data(
            folder / MANIFEST,
            raw,
            SCHEMA,
            foreign="it is not of an engine",
            damaged="build it again",
            newer="build the engine again",
        )
        try:
            engine = cls._from_data(folder, data, hashlib.sha256(raw).hexdigest())
            whole = _sealed({key: value for key, value in data.items() if key != "sha256"})
        except (SpecError, KeyError, TypeError, AttributeError, ValueError) as err:
            raise BundleError(
                f"{folder / MANIFEST} is damaged: {err}; build the engine again"
            ) from err
        if whole != raw:
            raise BundleError(
                f"{folder / MANIFEST} was changed after the build: its last entry is not the "
                "sha256 of the rest: copy the engine again or build it again"
            )
        engine._verify(verify)
        return engine

    @classmethod
    def _from_data(cls, folder: Path, data: Mapping[str, Any], digest: str) -> EngineFolder:
        require_keys(data, _KEYS, MANIFEST)
        identity = Identity.from_dict(data["identity"])
        engine = cls(
            path=folder,
            identity=identity,
            spec=ModelSpec.from_dict(data["model"]),
            precision=Precision.from_dict(data["precision"]),
            state=StateSpec.from_dict(data["state"]),
            plans={
                role: Plan.from_dict(role, plan, identity.profiles.get(role, ()))
                for role, plan in data["plans"].items()
            },
            check=_mapping(data, "check"),
            decode=DecodeDefaults.from_dict(data["decode"]),
            files=_mapping(data, "files"),
            source=Source.from_dict(data["source"]),
            digest=digest,
        )
        engine._check()
        return engine

    def _check(self) -> None:
        """Refuse parts that contradict one another.

        Raises:
            SpecError: naming them.
        """
        identity = self.identity
        if self.precision.name != identity.precision:
            raise SpecError(
                f"its ports are {self.precision.name}, its identity says {identity.precision}"
            )
        if StateSpec.of(self.spec, self.precision) != self.state:
            raise SpecError(f"its state is not that of the model in {self.precision.name}")
        if identity.precision != "fp32" and not self.check:
            raise SpecError(f"it does not say how its {identity.precision} was checked")
        if not self.plans or set(self.plans) != set(identity.graphs):
            raise SpecError(
                f"it has plans for {listed(self.plans)} and was built from graphs for "
                f"{listed(identity.graphs)}"
            )
        layers = len(self.spec.layers)
        if identity.fp32_layers and identity.fp32_layers[-1] >= layers:
            raise SpecError(
                f"layer {identity.fp32_layers[-1]} is to stay float32; the model has {layers}"
            )
        for plan in self.plans.values():
            self._check_plan(plan)
        for plugin in identity.plugins:
            if plugin.library and plugin.library not in self.files:
                raise SpecError(
                    f"library {plugin.library!r} of plugin {plugin.id} is none of its files"
                )
        absent = self._refit_files() - set(self.files)
        if self._refit_files() & set(self.files) and absent:
            raise SpecError(
                f"its plans hold no weights, and of what they are refitted from {listed(absent)} "
                "is none of its files"
            )
        names = [plan.file for plan in self.plans.values()] + list(self.files)
        for name in names:
            check_file_name(name)
        if len(set(names)) < len(names) or MANIFEST in names:
            raise SpecError(f"a file is named twice: {', '.join(sorted(names))}")
        check_hashes(self.hashes(), "files")

    def _check_plan(self, plan: Plan) -> None:
        role = plan.role
        if role not in ROLES:
            raise SpecError(f"plan {role!r} is of no role; expected {either(ROLES)}")
        if plan.file != f"{role}.plan":
            raise SpecError(f"the plan of {role} is {plan.file!r}; expected '{role}.plan'")
        expected = plan_ports(self.spec, self.state, role, plan.aliases, plan.top_k)
        for kind, ours, theirs in zip(
            ("input", "output"), (plan.inputs, plan.outputs), expected, strict=True
        ):
            if ours != theirs:
                raise SpecError(f"plan {role} does not fit the model: {_odd(kind, ours, theirs)}")
        if not plan.profiles and any(_dynamic(port) for port in plan.inputs):
            raise SpecError(f"plan {role} has dynamic inputs and no profile")
        for index, profile in enumerate(plan.profiles):
            _check_profile(profile, plan.inputs, f"profile {index} of {role}")

    def _refit_files(self) -> set[str]:
        """Files that plans without weights are refitted from; none where plans hold theirs."""
        if not self.identity.is_stripped:
            return set()
        return {refit_graph(role) for role in self.plans} | {WEIGHTS}

    @property
    def refits(self) -> bool:
        """Whether it holds what its plans, which hold no weights, are refitted from."""
        wanted = self._refit_files()
        return bool(wanted) and wanted <= set(self.files)

    def loaded_bytes(self, role: str) -> int:
        """Bytes of a plan with its weights; where it is refitted, all weights that lie beside it.

        Raises:
            BundleError: where the engine has no such plan, or a file is missing.
        """
        files = [self.plan(role).file] + [WEIGHTS] * self.refits
        try:
            return sum((self.path / name).stat().st_size for name in files)
        except OSError as err:
            raise BundleError(f"{self.path} is incomplete ({err.strerror or err})") from err

    def hashes(self) -> dict[str, str]:
        """sha256 by file name, for every file of the engine but engine.json."""
        return {**{plan.file: plan.sha256 for plan in self.plans.values()}, **self.files}

    def _verify(self, verify: bool) -> None:
        verify_files(
            self.path,
            self.hashes(),
            unread=() if verify else {WEIGHTS, *(plan.file for plan in self.plans.values())},
            noun="engine",
            event="build",
            remedy="build it again",
        )

    def plan(self, role: str) -> Plan:
        """The plan of a role.

        Raises:
            BundleError: where the engine has none.
        """
        if role not in self.plans:
            raise BundleError(
                f"{self.path} has no plan {role!r} (it has {listed(self.plans)}): build it again "
                "with that role"
            )
        return self.plans[role]

    def refusal(self, here: Here) -> str | None:
        """Why it cannot run here, see :func:`refusal`."""
        return refusal(self.identity, here, self.path, refits=self.refits)

    def manifest(self) -> bytes:
        """The bytes of engine.json: without time, host or path; sealed by their hash."""
        return _sealed(
            {
                "schema": SCHEMA,
                "identity": self.identity.to_dict(),
                "model": self.spec.to_dict(),
                "precision": self.precision.to_dict(),
                "state": self.state.to_dict(),
                "plans": {role: plan.to_dict() for role, plan in sorted(self.plans.items())},
                "check": self.check,
                "decode": self.decode.to_dict(),
                "files": dict(sorted(self.files.items())),
                "source": self.source.to_dict(),
            }
        )


def write_engine(
    folder: Path,
    bundle: Bundle,
    identity: Identity,
    precision: Precision,
    plans: Iterable[Plan],
    *,
    check: Mapping[str, Any],
    libraries: Iterable[Path] = (),
) -> EngineFolder:
    """Make an engine of a folder with finished plans: copy the bundle's files, write engine.json.

    Meant for the inside of :func:`fixedstate.bundle.staged_folder`. The same values and plans give
    the same bytes.

    Args:
        folder: Where ``<role>.plan`` of every plan stands already.
        bundle: What they were built from.
        identity: What they were made of.
        precision: Dtypes of their ports.
        plans: Their ports and aliases; hashes and profiles are filled in here.
        check: How the precision was checked, JSON values; may be empty for fp32.
        libraries: Plugin libraries and other files to be copied along, those that stand in the
            folder already aside; for plans without weights what they are refitted from, too.

    Returns:
        The engine, as :meth:`EngineFolder.open` would give it.

    Raises:
        BundleError: where a plan is missing, a file cannot be copied or has changed.
        BackendError: where the parts contradict one another or are not of the bundle.
    """
    if reason := other_model(identity, bundle):
        raise BackendError(reason)
    if identity.bundle != bundle.digest:
        raise BackendError(
            f"the identity is that of bundle {short(identity.bundle)}, {bundle.path} is "
            f"{short(bundle.digest)}: open it again and plan again"
        )
    found = {}
    for plan in plans:
        file = folder / plan.file
        if not file.is_file():
            raise BundleError(f"{file} is missing: the build of {plan.role} left no plan")
        profiles = identity.profiles.get(plan.role, ())
        found[plan.role] = replace(plan, sha256=readable_sha256(file), profiles=profiles)
    files = {}
    try:
        for source in (*(bundle.path / name for name in bundle.files), *libraries):
            if source.parent != folder:
                shutil.copyfile(source, folder / source.name)
            files[source.name] = readable_sha256(folder / source.name)
    except OSError as err:
        raise BundleError(f"{source} cannot be copied: {err.strerror or err}") from err
    for name, digest in bundle.files.items():
        if files[name] != digest:
            raise BundleError(
                f"{bundle.path / name} was changed since the bundle was opened: sha256 "
                f"{short(files[name])}, expected {short(digest)}: export it again"
            )
    try:
        said = json.loads(json.dumps(check, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as err:
        raise BackendError(f"the check of the precision cannot be written: {err}") from err
    engine = EngineFolder(
        path=folder,
        identity=identity,
        spec=bundle.spec,
        precision=precision,
        state=StateSpec.of(bundle.spec, precision),
        plans=dict(sorted(found.items())),
        check=said,
        decode=bundle.decode,
        files=dict(sorted(files.items())),
        source=bundle.source,
    )
    try:
        engine._check()
        content = engine.manifest()
    except (SpecError, TypeError, ValueError) as err:
        raise BackendError(f"what was built is no engine: {err}") from err
    (folder / MANIFEST).write_bytes(content)
    return replace(engine, digest=hashlib.sha256(content).hexdigest())


def _sealed(values: Mapping[str, Any]) -> bytes:
    """A manifest of these values, their hash as the last entry."""
    body = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**values, "sha256": digest}, indent=1, ensure_ascii=False) + "\n").encode()


def _read_manifest(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except NotADirectoryError as err:
        raise BundleError(
            f"{folder} is not a folder: an engine is one that `fixedstate build` wrote"
        ) from err
    except FileNotFoundError as err:
        if (folder / BUNDLE_MANIFEST).exists():
            raise BundleError(
                f"{folder} is a bundle, not an engine: make one with `fixedstate build {folder}`"
            ) from err
        if folder.is_dir():
            raise BundleError(
                f"{folder} holds no {MANIFEST}: it is not an engine; make one with "
                "`fixedstate build`"
            ) from err
        raise BundleError(
            f"{folder} does not exist: give the folder that `fixedstate build` wrote"
        ) from err
    except OSError as err:
        raise BundleError(f"{folder / MANIFEST} cannot be read: {err.strerror or err}") from err


# --- checks of values ----------------------------------------------------------------------------


def _mapping(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data[name]
    if not isinstance(value, dict):
        raise SpecError(f"{name} are {value!r}; expected values by name")
    return value


def _dynamic(port: Port) -> bool:
    return any(isinstance(dim, str) for dim in port.shape)


def _inside(shape: Sequence[int], bounds: Bounds) -> bool:
    least, _, most = bounds
    return len(shape) == len(least) and all(
        low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
    )


def _check_profile(profile: Profile, inputs: Sequence[Port], what: str) -> None:
    """Refuse a profile whose shapes are not those of the dynamic inputs at three sets of sizes."""
    dynamic = {port.name: port for port in inputs if _dynamic(port)}
    for name in sorted(set(dynamic) ^ set(profile)):
        where = "lacks the dynamic input" if name in dynamic else "names no dynamic input:"
        raise SpecError(f"{what} {where} {name!r}")
    for level in range(3):
        sizes: dict[str, int] = {}
        for name, port in dynamic.items():
            shape = profile[name][level]
            if len(shape) != len(port.shape) or not all(type(size) is int for size in shape):
                raise SpecError(f"{what}: {name!r} is {list(shape)}; expected {list(port.shape)}")
            for dim, size in zip(port.shape, shape, strict=True):
                factor = resolve_dim(dim, dict.fromkeys(SYMBOLS, 1))
                symbol = dim[-1] if isinstance(dim, str) else ""
                count, rest = divmod(size, factor) if factor else (1, size)
                known = sizes.setdefault(symbol, count) if symbol else 1
                if rest or count < 1 or count != known:
                    raise SpecError(
                        f"{what}: {name!r} is {list(shape)}, which is no {list(port.shape)}"
                        + (f" with {symbol} = {known}" if symbol and not rest and count > 0 else "")
                    )
    for name, (least, usual, most) in profile.items():
        if any(not a <= b <= c for a, b, c in zip(least, usual, most, strict=True)):
            raise SpecError(
                f"{what}: {name!r} goes from {list(least)} by {list(usual)} to {list(most)}; "
                "expected rising sizes"
            )


def _odd(kind: str, ours: Sequence[Port], theirs: Sequence[Port]) -> str:
    """The first port that is not as expected."""
    for index in range(max(len(ours), len(theirs))):
        has, wants = (
            _port(side[index]) if index < len(side) else "none" for side in (ours, theirs)
        )
        if has != wants:
            return f"{kind} {index} is {has}, expected {wants}"
    return f"{kind}s differ"


def _port(port: Port) -> str:
    return f"{port.name} {port.dtype} [{', '.join(map(str, port.shape))}]"
