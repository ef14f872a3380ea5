"""The plan of an engine before TensorRT is called: profiles, state, kernels, bytes, refusals. Pure.

From a bundle and a request, :func:`plan` makes the optimization profiles of every role out of the
manifest's own ports, decides per operator between kernel and function body, adds up memory, and
refuses what cannot work, saying what to change. What is asked of a card is judged by the card that
the engine is for, never by the machine that builds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from fixedstate.bundle import Bundle, Graph
from fixedstate.errors import BackendError, FixedStateError, UsageError
from fixedstate.export.activations import activation_bytes, inner_tensors, tokens_of
from fixedstate.export.islands import is_island
from fixedstate.export.pluginuse import MODES, PluginNeed, Verdict, judge, need
from fixedstate.export.targets import (
    CAPABILITIES,
    FLAGS,
    RTX,
    TARGETS,
    capabilities_of,
    capability_refusals,
    flag_refusals,
    version_key,
    well_formed,
)
from fixedstate.ports import DTYPES, Port
from fixedstate.runtime import memory
from fixedstate.spec import ModelSpec
from fixedstate.state import PRECISIONS, Precision, StateSpec, graph_ports, split_role

if TYPE_CHECKING:
    from fixedstate.export.graphfacts import GraphFacts, Weight

LARGEST = 2**31 - 1
"""Largest size of an axis, and most elements of one tensor: TensorRT counts them in int32."""

_RANGE = re.compile(r"([0-9]{1,20})(?::([0-9]{1,20}):([0-9]{1,20}))?", re.ASCII)
_OPTIONS = {"B": "--batch", "n": "--blocks", "m": "--blocks", "C": "--capacity", "T": "--capacity"}

_NARROW = {"float8e4m3fn": 8, "float8e5m2": 8, "int4": 4, "uint4": 4, "float4e2m1": 4}  # bits

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Least, usual and largest shape of every dynamic input, by name."""


@dataclass(frozen=True, slots=True)
class Range:
    """What one size can be: 1 <= least <= usual <= most.

    Example:
        >>> Range.parse("1:4:8"), Range.parse("8")
        (Range(least=1, usual=4, most=8), Range(least=8, usual=8, most=8))
    """

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        sizes = (self.least, self.usual, self.most)
        if any(type(size) is not int for size in sizes):
            raise UsageError(f"a range takes three whole numbers; got {sizes}")
        if not 1 <= self.least <= self.usual <= self.most:
            raise UsageError(
                f"the range {self} does not satisfy 1 <= least <= usual <= most: write it as "
                "least:usual:most, such as 1:1:8"
            )
        if self.most > LARGEST:
            raise UsageError(
                f"the range {self} goes beyond {LARGEST}, the largest size TensorRT can count: "
                "lower it"
            )

    @classmethod
    def parse(cls, text: str, what: str = "range") -> Range:
        """Read ``least:usual:most``, or one number for a fixed size.

        Args:
            text: As given on the command line.
            what: Its name, for messages.

        Raises:
            UsageError: quoting what was given.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{what} {text!r} is neither least:usual:most, such as 1:1:8, nor one whole number "
                "for a fixed size"
            )
        first = int(match[1])
        try:
            return cls(first, *(first if one is None else int(one) for one in match.groups()[1:]))
        except UsageError as err:
            raise UsageError(f"{what} {text!r}: {err}") from None

    def __str__(self) -> str:
        return f"{self.least}:{self.usual}:{self.most}"


ONE = Range(1, 1, 1)
TWO = Range(2, 2, 2)

CAPACITY = Range(256, 1024, 4096)
"""Tokens of a row where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What is asked of a build.

    Attributes:
        target: ``tensorrt-rtx`` (RTX cards) or ``tensorrt`` (data centre, Jetson).
        precision: ``fp32``, ``fp16`` or ``bf16``: the io dtype; scan states stay as they are.
        batch: Rows of a pass.
        blocks: Whole blocks that one commit pass takes.
        capacity: Columns of key and value buffers, tokens per row; of a model of objective
            ``full``, the length of its sequences, which then begins at one block unless it is
            given. Not used where neither is there.
        capabilities: Compute capabilities of the cards it is for, such as ``("8.9", "12.0")``.
        plugins: ``auto`` (where they are the better choice), ``none``, or ``required``.
        roles: Graphs to build; empty for those that decoding opens by default.
        fp32_layers: Layers that stay float32 in a half engine.
        builder_flags: TensorRT names of builder flags, of :data:`fixedstate.export.targets.FLAGS`.
        timing_cache: File of a timing cache; None for none.

    Raises:
        UsageError: for a value that is none, quoting it.
    """

    target: str = RTX
    precision: str = "fp16"
    batch: Range = ONE
    blocks: Range = Range(1, 1, 16)
    capacity: Range = CAPACITY
    capabilities: tuple[str, ...] = ("8.6", "8.9", "12.0")
    plugins: str = "auto"
    roles: tuple[str, ...] = ()
    fp32_layers: tuple[int, ...] = ()
    builder_flags: tuple[str, ...] = ()
    timing_cache: str | None = None

    def __post_init__(self) -> None:
        _one_of("target", self.target, TARGETS)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("plugins", self.plugins, MODES)
        for name in ("batch", "blocks", "capacity"):
            if not isinstance(getattr(self, name), Range):
                raise UsageError(f"{name} must be a Range; got {getattr(self, name)!r}")
        if not self.capabilities:
            raise UsageError(
                f"no compute capability is given; {self.target} builds for "
                f"{', '.join(capabilities_of(self.target))}"
            )
        for given in self.capabilities:
            if not well_formed(given):
                raise UsageError(
                    f"compute capability {given!r} is not of the form 8.9; known: "
                    f"{', '.join(CAPABILITIES)}"
                )
        named = ("capabilities", "roles", "fp32_layers", "builder_flags")
        for name in named:
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise UsageError(f"{name} {list(values)} names one twice")
        for role in self.roles:
            if "@" in role:
                raise UsageError(
                    f"role {role!r}: name it without its target; a copy for {self.target} is taken "
                    "where the bundle has one"
                )
        if self.fp32_layers and self.precision == "fp32":
            raise UsageError(
                f"fp32_layers {list(self.fp32_layers)}: every layer is float32 at precision fp32; "
                "leave them out, or choose fp16 or bf16"
            )
        for layer in self.fp32_layers:
            if type(layer) is not int or layer < 0:
                raise UsageError(f"fp32_layers holds {layer!r}; expected indices of layers")

    @property
    def io(self) -> str:
        """Dtype of activations."""
        return PRECISIONS[self.precision]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "target": self.target,
            "precision": self.precision,
            "batch": str(self.batch),
            "blocks": str(self.blocks),
            "capacity": str(self.capacity),
            "capabilities": list(self.capabilities),
            "plugins": self.plugins,
            "roles": list(self.roles),
            "fp32_layers": list(self.fp32_layers),
            "builder_flags": list(self.builder_flags),
            "timing_cache": self.timing_cache,
        }


def _one_of(what: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is unknown; use one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The plan of one role.

    Attributes:
        role: Its name.
        file: The graph it is built from.
        inputs: Ports at the engine's precision.
        outputs: Likewise.
        names: What each profile is for: ``denoise``, ``block``, ``fused``, ``prefill``, ``full``.
        profiles: Per name, least, usual and largest shape of every dynamic input.
        kernels: Operator, number of nodes, and ``plugin: tiles`` or ``body: reason``.
        needs: Plugins that have to be registered, one per operator.
        weights: Bytes of the weights this graph reads, at the engine's precision.
        io: Bytes of inputs and outputs that are no state, at the largest shapes.
        activations: Estimate of what a pass takes inside, at the largest shapes.
    """

    role: str
    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    names: tuple[str, ...]
    profiles: tuple[Profile, ...]
    kernels: tuple[tuple[str, int, str], ...]
    needs: tuple[PluginNeed, ...]
    weights: int
    io: int
    activations: int

    @property
    def ports(self) -> tuple[Port, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "file": self.file,
            "inputs": [port.to_dict() for port in self.inputs],
            "outputs": [port.to_dict() for port in self.outputs],
            "profiles": {
                name: {port: [list(shape) for shape in shapes] for port, shapes in one.items()}
                for name, one in zip(self.names, self.profiles, strict=True)
            },
            "kernels": [list(row) for row in self.kernels],
            "plugins": [one.to_dict() for one in self.needs],
            "bytes": {"weights": self.weights, "io": self.io, "activations": self.activations},
        }


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What will be built.

    Attributes:
        request: What was asked.
        roles: By name.
        precision: Dtypes of the engine's ports.
        state: What is carried, at that precision.
        flags: Builder flags by TensorRT name, and whether the network is strongly typed.
        state_bytes: Constant-size state of all rows, both buffers of every pair.
        kv_bytes: Keys and values of all rows at the largest capacity.
        notes: What a person should know.
    """

    request: BuildRequest
    roles: dict[str, RolePlan]
    precision: Precision
    state: StateSpec
    flags: dict[str, bool]
    state_bytes: int
    kv_bytes: int
    notes: tuple[str, ...] = field(default=())

    @property
    def weights(self) -> int:
        """Bytes of weights; every plan holds those that it reads."""
        return sum(role.weights for role in self.roles.values())

    @property
    def activations(self) -> int:
        """Estimate of what passes take inside; they run one after the other."""
        return max(role.activations + role.io for role in self.roles.values())

    @property
    def total(self) -> int:
        """All of it, on the device."""
        return self.weights + self.state_bytes + self.kv_bytes + self.activations

    @property
    def needs(self) -> tuple[PluginNeed, ...]:
        """Plugins of all roles, each once."""
        found = {one.name: one for role in self.roles.values() for one in role.needs}
        return tuple(found.values())

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "request": self.request.to_dict(),
            "precision": self.precision.to_dict(),
            "flags": dict(self.flags),
            "roles": {name: role.to_dict() for name, role in self.roles.items()},
            "state": self.state.to_dict(),
            "bytes": {
                "weights": self.weights,
                "state": self.state_bytes,
                "kv": self.kv_bytes,
                "activations": self.activations,
                "total": self.total,
            },
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """The plan as a person reads it, several lines."""
        asked = self.request
        cards = ", ".join(f"{one} ({CAPABILITIES[one][0]})" for one in asked.capabilities)
        flags = [name for name, on in self.flags.items() if on]
        lines = _fields(
            ("target", asked.target),
            ("cards", cards),
            ("precision", ", ".join(f"{k} {v}" for k, v in self.precision.to_dict().items())),
            ("float32 layers", ", ".join(map(str, asked.fp32_layers))),
            ("plugins", asked.plugins),
            ("flags", ", ".join(flags)),
            ("timing cache", asked.timing_cache),
        )
        rows = [
            (role.role, name, port, *("x".join(map(str, shape)) for shape in shapes))
            for role in self.roles.values()
            for name, profile in zip(role.names, role.profiles, strict=True)
            for port, shapes in _representative(profile).items()
        ]
        lines += _table("Profiles", ("role", "profile", "input", "least", "usual", "most"), rows)
        kernels = [(role.role, *row) for role in self.roles.values() for row in role.kernels]
        if kernels:
            lines += _table("Operators", ("role", "operator", "nodes>", "as"), kernels)
        parts = [(f"weights, {role.role}", role.weights) for role in self.roles.values()]
        parts += [
            ("state, both buffers", self.state_bytes),
            ("keys and values", self.kv_bytes),
            ("activations (estimate), inputs and outputs", self.activations),
            ("total", self.total),
        ]
        lines += _table(
            f"Memory of {asked.batch.most} rows on the device",
            ("what", "bytes>", "MB>"),
            [(name, f"{count:,}", f"{count / 1e6:,.1f}") for name, count in parts if count],
        )
        lines += [f"note: {one}" for one in self.notes]
        return "\n".join(lines)


def plan(
    bundle: Bundle, request: BuildRequest, graphs: Mapping[str, GraphFacts] | None = None
) -> BuildPlan:
    """The plan of an engine; nothing is built and no weight is read.

    Args:
        bundle: The opened bundle.
        request: What is asked.
        graphs: Facts of the graphs by role; those that are missing are read
            (:func:`fixedstate.export.graphfacts.read`).

    Raises:
        UsageError: for sizes that contradict the model, or roles it does not have.
        BundleError: where the bundle lacks a graph.
        BackendError: for what the product or the cards cannot do, all reasons in one text.
    """
    spec = bundle.spec
    if spec.objective == "full" and request.capacity is CAPACITY:  # nobody asked for it
        request = replace(request, capacity=replace(CAPACITY, least=spec.block_len))
    chosen = {role: bundle.graph(role, request.target) for role in _roles(bundle, request)}
    precision = _precision(bundle, request)
    state = StateSpec.of(spec, precision)
    _check_layers(spec, request)
    _check_sizes(spec, state, chosen, request)
    graphs = {**_read(bundle, request, set(chosen) - set(graphs or {})), **(graphs or {})}
    problems = [f"{role}: {one}" for role in chosen for one in graphs[role].problems]
    problems += _target_refusals(bundle, request, [graphs[role] for role in chosen])
    problems += _too_large(spec, state, chosen, request)
    if problems:
        raise BackendError("; ".join(dict.fromkeys(problems)))
    roles = {
        role: _role_plan(spec, state, graph, request, graphs[role])
        for role, graph in chosen.items()
    }
    _check_required(request, roles)
    rows = request.batch.most
    steps = sum(port.nbytes(rows) for port in state.stepped)
    return BuildPlan(
        request=request,
        roles=roles,
        precision=precision,
        state=state,
        flags={"STRONGLY_TYPED": True, "TF32": False, **dict.fromkeys(request.builder_flags, True)},
        state_bytes=2 * (state.state_bytes(rows) + steps),
        kv_bytes=rows * request.capacity.most * state.kv_bytes_per_token(),
        notes=tuple(_notes(spec, state, request, roles)),
    )


# --- what is built ------------------------------------------------------------------------------


def _roles(bundle: Bundle, request: BuildRequest) -> tuple[str, ...]:
    if request.roles:
        return request.roles
    return memory.roles(bundle, memory.choose(bundle))


def _precision(bundle: Bundle, request: BuildRequest) -> Precision:
    """Dtypes of the engine's ports.

    Raises:
        BackendError: where the bundle's graphs cannot be given that precision.
    """
    has = bundle.precision
    if has.io == request.io:
        if request.fp32_layers:
            raise BackendError(
                f"fp32_layers {list(request.fp32_layers)}: the graphs of {bundle.path} are "
                f"{has.name} already, and what was rounded does not come back: build from an fp32 "
                "bundle"
            )
        return has
    if has.io != "float32":
        raise BackendError(
            f"{bundle.path} is {has.name} and cannot be built as {request.precision}: build it as "
            f"{has.name}, or export it as fp32, which can be built as "
            f"{', '.join(PRECISIONS)}"
        )
    return has.at(request.io)


def _read(bundle: Bundle, request: BuildRequest, roles: Iterable[str]) -> dict[str, GraphFacts]:
    from fixedstate.export import graphfacts  # needs onnx_ir, which a plan from facts does not

    return {role: graphfacts.read(bundle, role, request.target) for role in roles}


# --- profiles -----------------------------------------------------------------------------------


def symbol_ranges(spec: ModelSpec, role: str, request: BuildRequest) -> dict[str, dict[str, Range]]:
    """What every symbol of a role's ports can be, one set per profile, by the profile's name.

    A commit takes the blocks of a prompt; since a finished block is committed alone, one block has
    a profile of its own where the range begins above it. The fused graph has one for each way it
    is used: a denoise pass (m = 1), the fused pass (m = 2), a prompt.
    """
    common = {
        "B": request.batch,
        "C": request.capacity,
        "T": request.capacity,
        "R": Range(1, spec.block_len, spec.block_len),
    }
    base = split_role(role)[0]
    if base == "commit":
        wanted = {"block": ONE, "prefill": request.blocks}
        if request.blocks.least == 1:
            del wanted["block"]
    elif base == "commit_denoise":
        wanted = {"denoise": ONE, "fused": TWO, "prefill": request.blocks}
        if request.blocks in (ONE, TWO):
            del wanted["prefill"]
    else:
        return {base: common}
    return {name: {**common, "n": blocks, "m": blocks} for name, blocks in wanted.items()}


def profile_of(inputs: Iterable[Port], ranges: Mapping[str, Range]) -> Profile:
    """Least, usual and largest shape of every input whose shape holds a symbol."""
    bounds = ("least", "usual", "most")
    sizes = [{key: getattr(one, bound) for key, one in ranges.items()} for bound in bounds]
    found: Profile = {}
    for port in inputs:
        if any(isinstance(dim, str) for dim in port.shape):
            least, usual, most = (port.resolve(**one) for one in sizes)
            found[port.name] = (least, usual, most)
    return found


def _largest(sets: Mapping[str, Mapping[str, Range]]) -> dict[str, int]:
    """The largest size of every symbol over all profiles of a role."""
    found: dict[str, int] = {}
    for ranges in sets.values():
        for key, one in ranges.items():
            found[key] = max(found.get(key, 0), one.most)
    return found


def set_profiles(builder: Any, config: Any, role: RolePlan) -> None:
    """Give a builder configuration the profiles of a role, in their order.

    Args:
        builder: ``IBuilder`` of either product.
        config: Its ``IBuilderConfig``.
        role: The plan.

    Raises:
        BackendError: where TensorRT does not take one, naming it.
    """
    for index, (name, profile) in enumerate(zip(role.names, role.profiles, strict=True)):
        made = builder.create_optimization_profile()
        for port, shapes in profile.items():
            try:
                made.set_shape(port, *shapes)
            except (RuntimeError, ValueError) as err:
                raise BackendError(
                    f"{role.role}: TensorRT took no shapes {shapes} for input {port!r}: {err}"
                ) from err
        if config.add_optimization_profile(made) != index:
            raise BackendError(
                f"{role.role}: TensorRT did not take the optimization profile {name!r}; expected "
                f"number {index}: please report this model"
            )


# --- refusals -----------------------------------------------------------------------------------


def _check_layers(spec: ModelSpec, request: BuildRequest) -> None:
    for layer in request.fp32_layers:
        if layer >= len(spec.layers):
            raise UsageError(
                f"fp32_layers names layer {layer}; the model has layers 0 to {len(spec.layers) - 1}"
            )


def _check_sizes(
    spec: ModelSpec, state: StateSpec, chosen: Mapping[str, Graph], request: BuildRequest
) -> None:
    """Sizes that contradict the model, whatever runs it."""
    length, columns = spec.block_len, request.capacity.most
    full = spec.objective == "full"
    if (state.appended or full) and columns < length:
        what = "sequences" if full else "key and value buffers"
        raise UsageError(
            f"--capacity {request.capacity}: {what} of at most {columns} tokens hold no block of "
            f"{length}: raise it to {length} or more"
        )
    sizes = (request.capacity.least, request.capacity.usual, columns)
    if state.whole_blocks and any(size % length for size in sizes):
        raise UsageError(
            f"--capacity {request.capacity}: keys are stored with scales of whole blocks, and not "
            f"all of these are multiples of {length}: give such"
        )
    commits = any(split_role(role)[0] in ("commit", "commit_denoise") for role in chosen)
    if state.appended and commits and request.blocks.most * length > columns:
        raise UsageError(
            f"--blocks {request.blocks}: a commit of {request.blocks.most} blocks of {length} "
            f"tokens never fits --capacity {request.capacity}: lower --blocks to "
            f"{columns // length} or raise --capacity to {request.blocks.most * length}"
        )


def _target_refusals(
    bundle: Bundle, request: BuildRequest, graphs: Sequence[GraphFacts]
) -> list[str]:
    dtypes = {dtype for one in graphs for dtype in one.dtypes}
    dtypes |= {request.io} if request.io != "float32" else set()
    products = any(one.float32_products for one in graphs)
    found = capability_refusals(request.target, request.capabilities, dtypes, products)
    if products and bundle.precision.io == "float32" and request.io == "float16":
        # the islands of the converted graph are not known yet
        hint = "whether any are left in fp16 shows when it is exported with --precision fp16"
        found = [f"{one} ({hint})" if "multiplies no" in one else one for one in found]
    return found + flag_refusals(request.target, request.builder_flags, request.timing_cache)


def _too_large(
    spec: ModelSpec, state: StateSpec, chosen: Mapping[str, Graph], request: BuildRequest
) -> Iterator[str]:
    """Per role, the largest tensor of more elements than TensorRT counts, and what to lower."""
    for role, graph in chosen.items():
        most = _largest(symbol_ranges(spec, role, request))
        inputs, outputs = graph_ports(spec, state, role, graph.top_k)
        found = []
        for port in (*inputs, *outputs):
            symbols = "".join(dim[-1] for dim in port.shape if isinstance(dim, str))
            written = ", ".join(map(str, port.shape))
            found.append((f"port {port.name!r} [{written}]", port.resolve(**most), symbols))
        for inner in inner_tensors(spec, state, role, most, request.io):
            found.append((inner.where, inner.shape, inner.symbols))
        found = [one for one in found if prod(one[1]) > LARGEST]
        if not found:
            continue
        what, shape, _ = max(found, key=lambda one: prod(one[1]))
        symbols = "".join(one[2] for one in found)
        options = list(dict.fromkeys(_OPTIONS[one] for one in symbols if one in _OPTIONS))
        more = f" ({len(found) - 1} more are too large)" if len(found) > 1 else ""
        yield (
            f"{role}: {what} would have {' x '.join(map(str, shape))} = {prod(shape):,} elements"
            f"{more}; TensorRT counts at most {LARGEST:,} in one tensor: lower "
            f"{' or '.join(options)}"
        )


def _check_required(request: BuildRequest, roles: Mapping[str, RolePlan]) -> None:
    if request.plugins != "required":
        return
    reasons = [
        f"{role.role}: {count} x {op}: {verdict.removeprefix('body: ')}"
        for role in roles.values()
        for op, count, verdict in role.kernels
        if not verdict.startswith("plugin")
    ]
    if reasons:
        raise BackendError(
            f"plugins are required and not every node can be one: {'; '.join(reasons)}. Build with "
            "plugins 'auto' or 'none': the function body takes every size and dtype"
        )


# --- one role -----------------------------------------------------------------------------------


def _role_plan(
    spec: ModelSpec,
    state: StateSpec,
    graph: Graph,
    request: BuildRequest,
    facts: GraphFacts,
) -> RolePlan:
    role = graph.role.partition("@")[0]
    sets = symbol_ranges(spec, role, request)
    most = _largest(sets)
    inputs, outputs = graph_ports(spec, state, role, graph.top_k)
    carried = {port.past.name for port in state.ports}
    carried |= {port.present.name for port in state.ports if port.update == "swap"}
    kernels, needs = _kernels(spec, role, most, request, facts)
    return RolePlan(
        role=role,
        file=graph.file,
        inputs=inputs,
        outputs=outputs,
        names=tuple(sets),
        profiles=tuple(profile_of(inputs, ranges) for ranges in sets.values()),
        kernels=kernels,
        needs=needs,
        weights=sum(_weight_bytes(one, request) for one in facts.weights),
        io=sum(port.nbytes(**most) for port in (*inputs, *outputs) if port.name not in carried),
        activations=activation_bytes(inner_tensors(spec, state, role, most, request.io)),
    )


def _kernels(
    spec: ModelSpec,
    role: str,
    most: Mapping[str, int],
    request: BuildRequest,
    facts: GraphFacts,
) -> tuple[tuple[tuple[str, int, str], ...], tuple[PluginNeed, ...]]:
    """What becomes of every operator, and what has to be registered for it."""
    counts: dict[tuple[str, str], int] = {}
    tiles: dict[str, dict[str, Any]] = {}
    tokens = tokens_of(role, spec.block_len, most)
    for node in facts.nodes:
        io = "float32" if node.layer in request.fp32_layers else request.io
        verdict = _verdict(request)
        if verdict is None:
            try:
                verdict = judge(node, io, most, tokens, request.capabilities)
            except FixedStateError as err:
                raise BackendError(f"{role}: {err}") from err
        if request.target == RTX:
            verdict = Verdict(verdict.tiles[:1], verdict.reasons)  # it has no tactics to time
        key = (node.op, verdict.text)
        counts[key] = counts.get(key, 0) + 1
        for tile in verdict.tiles:
            tiles.setdefault(node.op, {})[tile.label] = tile
    rows = tuple((op, count, text) for (op, text), count in counts.items())
    specs = {node.op: node.spec for node in facts.nodes}
    needs = tuple(need(specs[op], request.io, used.values()) for op, used in tiles.items())
    return rows, needs


def _verdict(request: BuildRequest) -> Verdict | None:
    """A decision that no node can change; None where each is looked at."""
    if request.plugins == "none":
        return Verdict((), ("plugins are off",))
    if request.plugins == "auto" and request.target == RTX:  # they need Python where it runs
        return Verdict(
            (),
            (f"no plugins on {RTX} unless they are required",),
        )
    return None


def _weight_bytes(weight: Weight, request: BuildRequest) -> int:
    """At the engine's precision, which islands do not follow."""
    dtype = weight.dtype
    island = is_island(weight.name) or weight.layer in request.fp32_layers
    if dtype == "float32" and not island:
        dtype = request.io
    return stored_bytes(replace(weight, dtype=dtype))


def stored_bytes(weight: Weight) -> int:
    """Bytes of a weight as it stands in the file: two numbers of four bits share one."""
    bits = _NARROW.get(weight.dtype) or 8 * DTYPES.get(weight.dtype, 8)
    return ceil(prod(weight.shape) * bits / 8)


def _notes(
    spec: ModelSpec, state: StateSpec, request: BuildRequest, roles: Mapping[str, RolePlan]
) -> Iterator[str]:
    full = spec.objective == "full"
    if not state.appended and not full:
        yield "capacity is not used: no layer keeps keys of every token"
    if full and request.capacity.least > spec.block_len:
        yield (
            f"sequences of fewer than {request.capacity.least} tokens will be refused: give "
            "--capacity a smaller least for short prompts and answers"
        )
    bases = {split_role(role)[0] for role in roles}
    if not full and "commit_denoise" not in bases and bases != {"denoise", "commit"}:
        lacking = "commit" if "commit" not in bases else "denoise"
        yield f"this engine cannot decode: it has no {lacking} pass"
    if request.batch.least > 1:
        yield f"passes need at least {request.batch.least} rows: fewer have to be filled up"
    if request.target == RTX and any(role.needs for role in roles.values()):
        yield "the engine needs this package and Python where it runs, to launch its plugins"
    if (
        request.target == RTX
        and len(request.capabilities) > 1
        and any(version_key(one) < (8, 0) for one in request.capabilities)
    ):
        yield "an engine for 7.5 as well as newer cards is slower on those: build two"
    for flag in request.builder_flags:
        yield f"{flag}: {FLAGS[flag]}"


# --- text ---------------------------------------------------------------------------------------


def _representative(profile: Profile) -> dict[str, tuple[Any, ...]]:
    """Inputs of a profile, those of equal shapes in one line."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for port, shapes in profile.items():
        groups.setdefault(shapes, []).append(port)
    return {
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} alike": shapes
        for shapes, names in groups.items()
    }


def _fields(*pairs: tuple[str, object]) -> list[str]:
    shown = [(name, value) for name, value in pairs if value not in (None, "")]
    width = max(len(name) for name, _ in shown)
    return [f"{name:<{width}}  {value}" for name, value in shown]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; columns whose name ends in ``>`` are set to the right."""
    cells = [[name.removesuffix(">") for name in columns], *([str(c) for c in r] for r in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if name.endswith(">") else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in cells
    ]
    return ["", title, lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]
