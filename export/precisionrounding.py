"""Rounding to half numbers where nothing computes in them.

ONNX Runtime's CPU provider has no bfloat16 kernels, and computes neighbouring float16 operators in
float32 without rounding between them: what passes 65504 there, or loses its last bits, is not seen.
A cast to half and back that stands in the graph is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fixedstate.export.passes import is_weight, name_values
from fixedstate.export.precisionplan import MOVING, NUMPY_HALVES


def emulate_half(model: ir.Model) -> ir.Model:
    """The float32 graph that rounds where a float16 or bfloat16 graph does, in place.

    Operators compute in float32 and their results are cast to half and back, as a tensor core does
    that adds up in float32. Weights stay half in the file; ports are float32.

    Args:
        model: What :func:`fixedstate.export.precision.convert` made, function bodies included.
    """
    graph = model.graph
    nodes = list(graph)
    for value in list(graph.initializers.values()):
        if value.dtype in NUMPY_HALVES:
            _read_as_float(graph, value, nodes[0])
    for value in graph.inputs:
        if value.dtype in NUMPY_HALVES:
            _round(graph, value, nodes[0])
    for node in nodes:
        for value in node.outputs:
            if value.dtype not in NUMPY_HALVES:
                continue
            if node.op_type == "Cast" or _looks_up(node):
                _insert_casts(graph, value, node, ir.DataType.FLOAT)
            elif node.op_type in MOVING:
                value.dtype = ir.DataType.FLOAT
            else:
                _round(graph, value, node)
    for function in model.functions.values():
        for node in function.all_nodes():
            if node.op_type == "Cast" and node.attributes["to"].as_int() in NUMPY_HALVES:
                node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    name_values(model)
    return model


def _round(graph: ir.Graph, value: ir.Value, at: ir.Node) -> None:
    """Make a half value float32 that is rounded to half for all that read it."""
    dtype = value.dtype
    assert dtype is not None
    value.dtype = ir.DataType.FLOAT
    _insert_casts(graph, value, at, dtype, ir.DataType.FLOAT)


def _looks_up(node: ir.Node) -> bool:
    """Whether a node takes rows of a half weight, which ONNX Runtime does on a CPU."""
    table = node.inputs[0] if node.op_type == "Gather" else None
    return table is not None and table.is_initializer() and is_weight(table.name or "")


def _read_as_float(graph: ir.Graph, value: ir.Value, first: ir.Node) -> None:
    """Make a half constant float32, and cast a half weight for all but lookups."""
    if is_weight(value.name or ""):
        uses = [(node, place) for node, place in value.uses() if not _looks_up(node)]
        _insert_casts(graph, value, first, ir.DataType.FLOAT, uses=uses)
        return
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    value.dtype = ir.DataType.FLOAT


def _insert_casts(
    graph: ir.Graph,
    value: ir.Value,
    at: ir.Node,
    *dtypes: ir.DataType,
    uses: Sequence[tuple[ir.Node, int]] | None = None,
) -> None:
    """Put casts one after the other behind a value, for these or for all that read it.

    Args:
        graph: The graph.
        value: The value.
        at: Its producer, or the graph's first node where it has none.
        dtypes: Of the casts.
        uses: Nodes and their inputs that take the last cast; all and the port if None.
    """
    whole = uses is None
    readers = [(node, place) for node, place in (value.uses() if uses is None else uses)]
    last, nodes = value, []
    for dtype in dtypes:
        nodes.append(ir.node("Cast", [last], attributes={"to": int(dtype)}))
        last = nodes[-1].outputs[0]
        last.dtype = dtype
    if value.producer() is None:
        graph.insert_before(at, nodes)
    else:
        graph.insert_after(at, nodes)
    for node, place in readers:
        node.replace_input_with(place, last)
    for place, port in enumerate(list(graph.outputs)):
        if whole and port is value:
            last.name, last.shape = value.name, value.shape
            value.name, value.shape = f"{value.name}_before", None
            graph.outputs[place] = last
