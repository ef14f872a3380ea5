"""Which nodes of a graph become plugins, and what has to be registered for them. Pure.

A node of domain ``fixedstate`` is a plugin where one is registered, and its function body
everywhere else. What a kernel takes is said by :class:`fixedstate.plugins.schema.KernelSpec`; here
it is asked for the nodes of one graph, before any TensorRT is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fixedstate.errors import BackendError, SpecError
from fixedstate.export.targets import KERNEL_CAPABILITY, version_key
from fixedstate.plugins import ptx
from fixedstate.plugins.schema import (
    ATTRIBUTES,
    DOMAIN,
    KERNEL_IO,
    OPS,
    VERSION,
    KernelSpec,
    Tile,
)
from fixedstate.ports import Dim, resolve_dim

FIELDS = ("block_len",)
"""Attributes of a node that are fields of its plugin; the parser keeps the others to itself."""

MODES = ("auto", "none", "required")
"""Whether plugins are used: where they are the better choice, never, or for every node."""

INT32 = 2**31 - 1
"""Largest run-time argument of a kernel, and most thread blocks along x."""

_IO = (*KERNEL_IO, "float32")  # dtypes of activations that a function body takes


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node of domain ``fixedstate`` in a graph.

    Attributes:
        op: Its operator.
        name: Its name.
        attributes: By name, as they stand in the graph.
        shapes: One per input: ints, symbols such as ``8n``, None where nothing is known.
        types: Dtypes of the inputs.
        layer: Index of the LayerSpec that it belongs to; None where nothing tells.
    """

    op: str
    name: str
    attributes: Mapping[str, Any]
    shapes: tuple[tuple[Dim | None, ...], ...]
    types: tuple[str, ...]
    layer: int | None = None

    @property
    def spec(self) -> KernelSpec:
        """Its operator's rules.

        Raises:
            SpecError: for an operator that is none of ours.
        """
        if self.op not in OPS:
            raise SpecError(
                f"node {self.name!r}: {DOMAIN}::{self.op} is no operator of this version (known: "
                f"{', '.join(OPS)}): install a newer fixedstate or export again"
            )
        return OPS[self.op]


@dataclass(frozen=True, slots=True)
class PluginNeed:
    """A plugin that a graph needs, as a registry and a parser look for it.

    Attributes:
        name: Its name: the operator.
        version: Always a text.
        namespace: Where it is registered.
        fields: Attributes that reach it.
        types: Dtype of each port, inputs first.
        texts: Compiled kernels it may launch: tile label to sha256 of the PTX.
    """

    name: str
    version: str
    namespace: str
    fields: tuple[str, ...]
    types: Mapping[str, str]
    texts: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "name": self.name,
            "version": self.version,
            "namespace": self.namespace,
            "fields": list(self.fields),
            "types": dict(self.types),
            "texts": dict(self.texts),
        }


@dataclass(frozen=True, slots=True)
class Registered:
    """What a plugin registry says of one creator."""

    name: str
    version: str
    namespace: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one node: a plugin with one of its tiles, or the body for reasons."""

    tiles: tuple[Tile, ...]
    reasons: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """``plugin: l32sp16w4`` or ``body: reason``."""
        if self.reasons:
            return f"body: {'; '.join(self.reasons)}"
        return f"plugin: {', '.join(tile.label for tile in self.tiles)}"


# --- types --------------------------------------------------------------------------------------


def accepted_types() -> dict[str, tuple[dict[str, str], ...]]:
    """Every combination of dtypes that the plugin of an operator takes, by operator and port."""
    return {
        name: tuple({port.name: port.dtype_for(io) for port in spec.ports} for io in KERNEL_IO)
        for name, spec in OPS.items()
    }


def judge_types(op: str, types: Sequence[str]) -> tuple[str, str]:
    """What a node with these dtypes can be.

    Args:
        op: The operator.
        types: Dtypes of its inputs, in order.

    Returns:
        ``("plugin", "")``; ``("body", why)`` where only the function body takes them; or
        ``("refused", why)`` where nothing does, with the Casts that would help.

    Raises:
        SpecError: for an unknown operator or another number of inputs.
    """
    spec = OPS.get(op)
    if spec is None or len(types) != len(spec.inputs):
        raise SpecError(
            f"{DOMAIN}::{op} with {len(types)} inputs is no operator of this version; known: "
            f"{', '.join(OPS)}"
        )
    io = types[0]  # of x, the first input of every operator
    if io not in _IO:
        return "refused", f"activations are {io}; expected {', '.join(_IO)}"
    wrong = [
        f"input {port.name!r} is {given}, expected {port.dtype_for(io)}"
        for port, given in zip(spec.inputs, types, strict=True)
        if given != port.dtype_for(io)
    ]
    if wrong:
        return "refused", f"{'; '.join(wrong)} where activations are {io}: add a Cast there"
    if io not in KERNEL_IO:
        return "body", f"io dtype {io}: the kernels take {' and '.join(KERNEL_IO)}"
    return "plugin", ""


def node_problems(node: NodeUse) -> list[str]:
    """What is wrong with a node itself, so that neither a plugin nor a parser would take it."""
    found = []
    what = f"node {node.name!r} ({DOMAIN}::{node.op})"
    expected = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}
    for name in ATTRIBUTES:
        if name not in node.attributes:
            found.append(f"{what} lacks the attribute {name!r}: export again")
            continue
        value = node.attributes[name]
        if name in expected and value != expected[name]:
            found.append(
                f"{what}: attribute {name!r} is {value!r}; plugins of this version have "
                f"{expected[name]!r}: export again with this version"
            )
        if name in FIELDS and (isinstance(value, bool) or not isinstance(value, int)):
            found.append(f"{what}: attribute {name!r} is {value!r}; expected an int: export again")
    try:
        verdict, why = judge_types(node.op, node.types)
    except SpecError as err:
        return [*found, f"{what}: {err}"]
    return [*found, f"{what}: {why}"] if verdict == "refused" else found


# --- kernels or bodies --------------------------------------------------------------------------


def judge(
    node: NodeUse, io: str, sizes: Mapping[str, int], tokens: int, capabilities: Iterable[str]
) -> Verdict:
    """Whether the compiled kernels take a node at the largest sizes that it will see.

    Args:
        node: The node.
        io: Dtype of its activations in the engine.
        sizes: Largest size of every symbol of its graph.
        tokens: Largest number of tokens per row, where the graph does not tell.
        capabilities: Cards that the engine is for.
    """
    spec = node.spec
    reasons = [
        f"compute capability {given}: the kernels run on {KERNEL_CAPABILITY} and newer"
        for given in capabilities
        if version_key(given) < version_key(KERNEL_CAPABILITY)
    ]
    block_len = node.attributes["block_len"]
    shapes = _shapes(node, sizes, block_len if spec.single_block and block_len else tokens)
    known = spec.sizes(shapes, block_len)
    reasons += spec.refusals(known, block_len, io)
    tiles = spec.tiles_for(known, block_len) if not reasons else ()
    for tile in tiles[:1]:
        launch = spec.launch(known, tile)
        largest = max(*launch.grid, *launch.arguments)
        if largest > INT32:
            reasons.append(f"{largest} in a launch: the kernels take at most {INT32}")
    for tile in tiles:
        name = ptx.file_name(spec, tile, io)
        if name not in ptx.index()["texts"]:
            raise BackendError(
                f"the package lists no compiled kernel {name}: install it again, or build with "
                "plugins 'none'"
            )
    return Verdict(() if reasons else tiles, tuple(reasons))


def _shapes(node: NodeUse, sizes: Mapping[str, int], tokens: int) -> list[list[int]]:
    """Input shapes at those sizes; the number of tokens is the one thing a graph may not tell.

    Raises:
        SpecError: naming the input and axis of which nothing is known.
    """
    spec = node.spec
    shapes: list[list[int]] = []
    for port, shape in zip(spec.inputs, node.shapes, strict=True):
        letters = next((s for s in port.shapes if len(s) == len(shape)), "?" * len(shape))
        resolved = []
        for letter, dim in zip(letters, shape, strict=True):
            size = _size(dim, sizes)
            if size is None and letter in "TB":
                size = tokens if letter == "T" else sizes["B"]
            if size is None:
                raise SpecError(
                    f"node {node.name!r} ({DOMAIN}::{node.op}): the size {letter} of input "
                    f"{port.name!r} is not known from the graph ({list(shape)}): export again"
                )
            resolved.append(size)
        shapes.append(resolved)
    return shapes


def _size(dim: Dim | None, sizes: Mapping[str, int]) -> int | None:
    if dim is None or isinstance(dim, int):
        return dim
    try:
        return resolve_dim(dim, sizes)
    except SpecError:
        return None  # a name that shape inference made up


def need(spec: KernelSpec, io: str, tiles: Iterable[Tile]) -> PluginNeed:
    """What has to be registered for an operator."""
    texts = ptx.index()["texts"]
    return PluginNeed(
        name=spec.name,
        version=str(VERSION),
        namespace=DOMAIN,
        fields=FIELDS,
        types={port.name: port.dtype_for(io) for port in spec.ports},
        texts={tile.label: texts[ptx.file_name(spec, tile, io)]["sha256"] for tile in tiles},
    )


def missing_plugins(needs: Iterable[PluginNeed], registered: Iterable[Registered]) -> list[str]:
    """What a plugin registry lacks, before a parser passes over it in silence.

    Args:
        needs: Of a plan.
        registered: Every creator in the registry.

    Returns:
        One text per plugin, naming what differs: name, namespace, version or fields.
    """
    creators = list(registered)
    found = []
    for one in needs:
        same_name = [creator for creator in creators if creator.name == one.name]
        in_place = [creator for creator in same_name if creator.namespace == one.namespace]
        right = [creator for creator in in_place if creator.version == one.version]
        what = f"plugin {one.namespace}::{one.name} version {one.version}"
        if not same_name:
            problem = "its name is not registered"
        elif not in_place:
            given = ", ".join(sorted({repr(creator.namespace) for creator in same_name}))
            problem = f"it is registered in the namespace {given}, not {one.namespace!r}"
        elif not right:
            given = ", ".join(sorted({repr(creator.version) for creator in in_place}))
            problem = f"it is registered in version {given}, not {one.version!r}"
        else:
            lacking = [name for name in one.fields if name not in right[0].fields]
            if not lacking:
                continue
            problem = f"the registered one has no field {', '.join(map(repr, lacking))}"
        found.append(f"{what}: {problem}; register the plugins of this version, or build without")
    return found
