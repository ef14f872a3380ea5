"""Rounding to half numbers where nothing computes in them.

ONNX Runtime's CPU provider has no bfloat16 kernels, and computes neighbouring float16 operators in
float32 without rounding between them: what passes 65504 there, or loses its last bits, is not seen.
A cast to half and back that stands in the graph is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.calib.apply import MULTIPLIED, has_four_bit_floats
from fixedstate.calib.trial import LARGEST
from fixedstate.errors import BackendError
from fixedstate.export.passes import IR_VERSION, is_weight, name_values
from fixedstate.export.precisionplan import MOVING, NUMPY_HALVES, scale_of
from fixedstate.plugins.schema import OPSET
from fixedstate.ports import Array


def emulate_half(model: ir.Model, kept: Collection[str] = ()) -> ir.Model:
    """The float32 graph that rounds where a float16 or bfloat16 graph does, in place.

    Operators compute in float32 and their results are cast to half and back, as a tensor core does
    that adds up in float32. Weights stay half in the file; ports are float32.

    Args:
        model: What :func:`fixedstate.export.precision.convert` made, function bodies included.
        kept: Ports that are half whatever the graph computes in: stored states and scales.
    """
    graph = model.graph
    nodes = list(graph)
    for value in list(graph.initializers.values()):
        if value.dtype in NUMPY_HALVES:
            _read_as_float(graph, value, nodes[0])
    for value in graph.inputs:
        if value.dtype in NUMPY_HALVES and value.name not in kept:
            _round(graph, value, nodes[0])
    stored = {value for value in graph.outputs if value.name in kept}
    for node in nodes:
        for value in node.outputs:
            if value.dtype not in NUMPY_HALVES or value in stored:
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


def rounds_activations(model: ir.Model) -> bool:
    """Whether a graph quantises activations: its results then jump with their smallest change."""
    return any(node.op_type == "QuantizeLinear" for node in model.graph)


def skip_activation_rounding(model: ir.Model) -> ir.Model:
    """The graph with every quantised activation as it was before, in place; weights stay."""
    for node in list(model.graph):
        given = node.inputs[0] if scale_of(node) is not None else None
        down = None if given is None else given.producer()
        if down is not None and down.op_type == "QuantizeLinear":
            assert down.inputs[0] is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], down.inputs[0])
    common.RemoveUnusedNodesPass()(model)
    return model


def multiply_out(model: ir.Model) -> ir.Model:
    """The graph with weights in four-bit floats as the float32 numbers they stand for, in place.

    ONNX Runtime's CPU provider reads none of these. The graph then holds the numbers itself.

    Raises:
        BackendError: where they are more than a graph holds.
    """
    if not has_four_bit_floats(model):
        return model
    size = 0
    for node in list(model.graph):
        weight, scales = node.inputs[0] if node.inputs else None, scale_of(node)
        if scales is None or weight is None or weight.dtype != ir.DataType.FLOAT4E2M1:
            continue
        array = _numbers(weight) * np.repeat(
            _numbers(scales), node.attributes["block_size"].as_int(), 0
        )
        size += array.nbytes
        if size > LARGEST:
            raise BackendError(
                f"weights in four-bit floats take more than {LARGEST:,} bytes in float32, and "
                "nothing here computes with them as they are: build at --precision fp32, where "
                "nothing is converted"
            )
        name = f"{weight.name}{MULTIPLIED}"
        held = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(held.dtype), const_value=held)
        value.shape = ir.Shape(array.shape)
        model.graph.register_initializer(value)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
    common.RemoveUnusedNodesPass()(model)
    model.ir_version = IR_VERSION
    for imports in (model.opset_imports, *(f.opset_imports for f in model.functions.values())):
        imports[""] = OPSET
    return model


def _numbers(value: ir.Value) -> Array:
    """A constant in float32, or what comes out of its DequantizeLinear."""
    maker = value.producer()
    if maker is not None:
        (one, two) = maker.inputs[:2]
        assert one is not None
        assert two is not None
        return _numbers(one) * _numbers(two)
    assert value.const_value is not None
    found: Array = value.const_value.numpy().astype(np.float32)
    return found


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
