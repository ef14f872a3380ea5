"""What a build has to know of a graph: its nodes, its weights, and what TensorRT would get wrong.

Read from the graph with its function bodies inlined, as a parser sees it that knows no plugins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.bundle import Bundle
from fixedstate.errors import BundleError, ExportError
from fixedstate.export.passes import CUSTOM, is_weight
from fixedstate.export.pluginuse import NodeUse, node_problems
from fixedstate.plugins.schema import DOMAIN
from fixedstate.ports import Array, Dim

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""Operators and the inputs of theirs that decide a shape."""

ISLANDS = (
    "Exp",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "LogSoftmax",
    "ReduceL2",
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
    "Softmax",
    "Softplus",
    "Sqrt",
)
"""What norms, softmax, decays and step sizes are made of: float32 whatever the io dtype."""

_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_OPEN_ENDS = {"Slice": (1, 2)}  # what a parser may cut to 32 bits: the slice stays the same
_LAYER = re.compile(r"^layers\.(\d+)\.")
_STATE = re.compile(r"_(\d{3})$")
_NAMES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight that a graph reads, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def layer(self) -> int | None:
        """Index of its layer; None for embedding, head and what a custom module has."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One graph as a build sees it.

    Attributes:
        nodes: Those of domain ``fixedstate``, in order.
        weights: Every one it reads, once.
        dtypes: Of every value in it, function bodies included.
        float32_products: Nodes that multiply matrices of float32.
        problems: What TensorRT would refuse, or get wrong in silence; empty if all is well.
    """

    nodes: tuple[NodeUse, ...]
    weights: tuple[Weight, ...]
    dtypes: frozenset[str]
    float32_products: tuple[str, ...]
    problems: tuple[str, ...]


def read(bundle: Bundle, role: str, target: str = "") -> GraphFacts:
    """The facts of one graph of a bundle; weights are not read.

    Args:
        bundle: The opened bundle.
        role: The graph; its copy for the target where the bundle lists one.
        target: As in ``role@target``.

    Raises:
        BundleError: where there is no such graph, or its file is damaged.
        ExportError: see :func:`facts`.
    """
    file = bundle.path / bundle.graph(role, target).file
    try:
        model = ir.load(file)
    except Exception as err:
        raise BundleError(f"{file} is no ONNX graph ({err}): copy the bundle again") from err
    return facts(model)


def nodes_of(bundle: Bundle, role: str, target: str = "") -> tuple[NodeUse, ...]:
    """The nodes of domain ``fixedstate`` in one graph of a bundle; see :func:`read`."""
    return read(bundle, role, target).nodes


def facts(model: ir.Model, *, values: bool = False) -> GraphFacts:
    """The facts of a graph in memory, which stays as it is.

    Args:
        model: The graph.
        values: Look at the values of weights too, which reads them all.

    Raises:
        ExportError: where types or shapes of the graph cannot be inferred, or a value is asked for
            that is not there.
    """
    flat = model.clone()
    for name, value in flat.graph.initializers.items():
        if is_weight(name) and value.const_value is not None:
            value.dtype = value.const_value.dtype
            value.shape = ir.Shape(value.const_value.shape.numpy())
            value.const_value = None  # a type is enough, and values may not be there yet
    common.InlinePass()(flat)
    _infer(flat)
    known = {value.name: value for value in _values(flat)}
    nodes = tuple(_use(node, known) for node in model.graph.all_nodes() if node.domain == DOMAIN)
    typed = {
        value.dtype
        for node in flat.graph.all_nodes()
        for value in (*node.inputs, *node.outputs)
        if value is not None and value.dtype is not None
    }
    products = tuple(
        f"{node.name} ({node.op_type})"
        for node in flat.graph.all_nodes()
        if node.op_type in _PRODUCTS and _first(node) == ir.DataType.FLOAT
    )
    problems = [problem for node in nodes for problem in node_problems(node)]
    problems += [*shape_problems(flat), *constant_problems(flat)]
    problems += weight_problems(model) if values else []
    if typed & set(HALVES):
        problems += island_problems(flat)
    return GraphFacts(
        nodes=nodes,
        weights=tuple(_weights(model)),
        dtypes=frozenset(_dtype(one) for one in typed),
        float32_products=products,
        problems=tuple(dict.fromkeys(problems)),
    )


def _infer(model: ir.Model) -> None:
    """Find the type and, as far as it is known, the shape of every value.

    Raises:
        ExportError: where a type stays unknown.
    """
    common.ShapeInferencePass()(model)
    unknown = [
        f"node {node.name!r} ({node.domain or 'ai.onnx'}::{node.op_type})"
        for node in model.graph
        if any(value.dtype is None for value in node.outputs)
    ]
    if unknown:
        raise ExportError(
            f"the type of what {unknown[0]} gives cannot be inferred ({len(unknown)} such nodes): "
            "export the model again, or report it"
        )


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs


def _dtype(dtype: ir.DataType | None) -> str:
    """The name that ports use: float32 rather than FLOAT."""
    name = "unknown" if dtype is None else dtype.name.lower()
    return _NAMES.get(name, name)


def _first(node: ir.Node) -> ir.DataType | None:
    value = node.inputs[0] if node.inputs else None
    return None if value is None else value.dtype


def _use(node: ir.Node, known: Mapping[str | None, ir.Value]) -> NodeUse:
    """A node as a plan sees it.

    Args:
        node: In the graph as it is.
        known: By name, the values of the graph whose functions are inlined. Shapes are not inferred
            on the graph as it is: what comes out of a function would depend on whether a schema of
            the same name was registered in this process.
    """
    attributes = {
        name: attr.value
        for name, attr in node.attributes.items()
        if attr.type in (ir.AttributeType.INT, ir.AttributeType.STRING, ir.AttributeType.FLOAT)
    }
    inputs = [known.get(value.name, value) for value in node.inputs if value is not None]
    return NodeUse(
        op=node.op_type,
        name=node.name or "",
        attributes=attributes,
        shapes=tuple(_shape(value) for value in inputs),
        types=tuple(_dtype(value.dtype) for value in inputs),
        layer=_layer_of(value for value in node.inputs if value is not None),
    )


def _shape(value: ir.Value) -> tuple[Dim | None, ...]:
    if value.shape is None:
        return ()
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _layer_of(inputs: Iterable[ir.Value]) -> int | None:
    """Told by the names of weights and states that the node reads, directly or by one step."""
    for value in inputs:
        near = [value]
        producer = value.producer()
        if producer is not None:
            near += [one for one in producer.inputs if one is not None]
        for one in near:
            name = one.name or ""
            match = _LAYER.match(name)
            if match is None and name.startswith(("past_", "present_")):
                match = _STATE.search(name)
            if match is not None:
                return int(match[1])
    return None


def _weights(model: ir.Model) -> Iterator[Weight]:
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if is_weight(name) and tensor is not None:
            yield Weight(name, _dtype(tensor.dtype), tuple(tensor.shape.numpy()))


# --- what TensorRT would get wrong --------------------------------------------------------------


def shape_problems(model: ir.Model) -> list[str]:
    """Graph inputs whose values decide a shape: TensorRT would want ranges of values for them.

    Args:
        model: A graph whose functions are inlined. What comes out of Shape depends on no value.
    """
    found: list[str] = []
    fed: dict[int, str] = {id(value): value.name or "" for value in model.graph.inputs}
    _follow(model.graph, fed, found)
    return found


def _follow(graph: ir.Graph, fed: dict[int, str], found: list[str]) -> None:
    for node in graph:
        reached = [fed.get(id(value)) if value is not None else None for value in node.inputs]
        for place in SHAPE_OPERANDS.get(node.op_type, ()):
            if place < len(reached) and reached[place] is not None:
                found.append(
                    f"graph input {reached[place]!r} decides a shape at node {node.name!r} "
                    f"({node.op_type}, operand {place}): shapes must come from Shape or constants"
                )
        source = next((name for name in reached if name is not None), None)
        if source is None or node.op_type in ("Shape", "Size"):
            continue
        for attr in node.attributes.values():
            if attr.type == ir.AttributeType.GRAPH:
                body = attr.as_graph()
                _follow(body, fed | {id(value): source for value in body.inputs}, found)
        fed.update({id(value): source for value in node.outputs})


def constant_problems(model: ir.Model) -> list[str]:
    """Constants that do not fit: INT64 beyond 32 bits, halves that are not finite or clamped.

    Open ends of slices may be larger than 32 bits: cut to 32 they mean the same.

    Args:
        model: A graph whose functions are inlined.
    """
    found: list[str] = []
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and not is_weight(name):
            found += _constant(f"constant {name!r}", value.const_value, value)
    for node in model.graph.all_nodes():
        for name, attr in node.attributes.items():
            if attr.type == ir.AttributeType.TENSOR:
                tensor = attr.as_tensor()
            elif node.op_type == "Constant" and name in ("value_int", "value_ints"):
                tensor = ir.tensor(np.asarray(attr.value, np.int64))
            else:
                continue
            given = node.outputs[0] if node.op_type == "Constant" else None
            found += _constant(f"node {node.name!r} ({node.op_type}, {name})", tensor, given)
    return found


def weight_problems(model: ir.Model) -> list[str]:
    """The same for weights, all of which are read; none of them is the end of a slice.

    Raises:
        ExportError: for a weight whose values are not there.
    """
    return [
        problem
        for name, value in model.graph.initializers.items()
        if is_weight(name) and value.const_value is not None
        for problem in _constant(f"weight {name!r}", value.const_value, None)
    ]


def _constant(what: str, tensor: ir.TensorProtocol, value: ir.Value | None) -> Iterator[str]:
    if tensor.dtype == ir.DataType.INT64:
        limits = np.iinfo(np.int32)
        data = tensor.numpy()
        outside = data[(data < limits.min) | (data > limits.max)]
        if outside.size and not (value is not None and _only_open_ends(value)):
            yield (
                f"{what} holds {int(outside.flat[0])}, which does not fit 32 bits: TensorRT would "
                "cut it; write it as smaller numbers"
            )
    elif tensor.dtype in HALVES:
        data = tensor.numpy()
        if not np.isfinite(data).all():
            yield f"{what} is not finite in {_dtype(tensor.dtype)}: use a constant that fits"
        elif _at_edge(data):
            yield (
                f"{what} was clamped to the largest {_dtype(tensor.dtype)}: keep it in float32, "
                "or use a constant that fits"
            )


def _at_edge(data: Array) -> bool:
    """Whether an element is the largest finite half: what a mask of -1e12 is clamped to."""
    bits = np.ascontiguousarray(data).view(np.uint16) & 0x7FFF
    largest = 0x7BFF if data.dtype == np.float16 else 0x7F7F
    return bool((bits == largest).any())


def _only_open_ends(value: ir.Value) -> bool:
    uses = list(value.uses())
    return (
        bool(uses)
        and all(use.idx in _OPEN_ENDS.get(use.node.op_type, ()) for use in uses)
        and not value.is_graph_output()
    )


def island_problems(model: ir.Model) -> list[str]:
    """Norms, softmax, decays and carried scan states of a half graph that are no float32 islands.

    A custom module's own layers are its own business.

    Args:
        model: A graph whose functions are inlined.
    """
    if any(name.startswith(CUSTOM) for name in model.graph.initializers):
        return []
    found = []
    for node in model.graph.all_nodes():
        carried: tuple[ir.Value | None, ...] = ()
        if node.op_type in ISLANDS:
            carried = tuple(node.inputs[:1])
        elif node.op_type == "Scan":
            count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
            carried = tuple(node.inputs[:count])
        halves = {_dtype(value.dtype) for value in carried if value and value.dtype in HALVES}
        if halves:
            found.append(
                f"node {node.name!r} ({node.op_type}) runs in {', '.join(sorted(halves))}: norms, "
                "softmax, decays and scan states are float32: put Casts around it"
            )
    return found
