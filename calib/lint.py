"""What a quantised graph may look like: forms that TensorRT-RTX takes, and keeps quantised.

Every rule is a form that its builder refused, or took and made worse than the float graph: a float
weight behind a pair of QuantizeLinear and DequantizeLinear stays float, a rounding behind a product
or in a scan costs accuracy, a scale that is found at run time makes a row depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import onnx_ir as ir

from fixedstate.calib.formats import FORMATS, SMALLEST_SCALE, TARGETS, Format, check_targets
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

_STORED = {
    ir.DataType.INT8: "int8",
    ir.DataType.INT4: "int4",
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
    ir.DataType.FLOAT4E2M1: "float4_e2m1fn",
}
"""Dtypes of quantised values, as formats spell them."""

_NARROW = (
    *_STORED,
    ir.DataType.UINT4,
    ir.DataType.INT2,
    ir.DataType.UINT2,
    ir.DataType.FLOAT8E5M2,
    ir.DataType.FLOAT8E8M0,
)

_REFUSED = {
    "DynamicQuantizeLinear": "a scale found at run time makes a row depend on its neighbours",
    "MatMulInteger": "TensorRT-RTX has no such operator",
    "MatMulNBits": "TensorRT-RTX has it as a plugin that its package lacks",
    "QLinearMatMul": "TensorRT-RTX has no such operator",
}

_MOVING = (
    "Concat",
    "Expand",
    "Gather",
    "GatherElements",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Where",
)
"""What may stand between a port of quantised state and where it becomes numbers."""

_EXACT = 2.0**-7
"""Scales of the two nodes of a pair may differ by this: one may be rounded to bfloat16."""


def check_emission(model: ir.Model, targets: Iterable[str] = ()) -> None:
    """Refuse a quantised graph in a form that the builder does not take, or does not keep.

    Args:
        model: A graph; values of its scales are read, those of its weights are not.
        targets: What it has to run on, of :data:`fixedstate.calib.formats.TARGETS`.

    Raises:
        CalibrationError: ``EMISSION``, naming node and rule; ``UNSUPPORTED_TARGET`` for a target
            that is unknown.
    """
    targets = tuple(targets)
    check_targets((), targets)
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in _REFUSED:
            _refuse(node, _REFUSED[node.op_type])
        elif node.op_type == _QUANTIZE:
            _check_quantize(node)
        elif node.op_type == _DEQUANTIZE:
            _check_dequantize(node, targets)
    for value in model.graph.initializers.values():
        if value.dtype in _NARROW and _rank(value) > 1:
            for node, place in value.uses():
                if node.op_type != _DEQUANTIZE or place != 0:
                    _refuse(node, f"stored weight {value.name} feeds no DequantizeLinear directly")


def _refuse(node: ir.Node, rule: str) -> None:
    raise CalibrationError("EMISSION", f"node {node.name!r} ({node.op_type}): {rule}")


# --- activations --------------------------------------------------------------------------------


def _check_quantize(node: ir.Node) -> None:
    given = node.inputs[0]
    assert given is not None
    if _is_fixed(given):
        _refuse(
            node,
            "it quantises a weight, which would be kept in float: store the weight quantised, "
            "behind a DequantizeLinear alone",
        )
    _check_zero(node)
    scale = _scale(node)
    if scale.size != 1 or _block(node):
        _refuse(node, f"activations have one scale, here are {scale.size}")
    if given.shape is not None and len(given.shape) and not isinstance(given.shape[-1], int):
        _refuse(node, f"the last dimension of {given.name} is not fixed")
    if _is_carried(node.outputs[0]):
        return
    for reader, place in node.outputs[0].uses():
        if reader.op_type != _DEQUANTIZE or place != 0:
            _refuse(node, "what is quantised goes into a DequantizeLinear and nowhere else")
    if not node.outputs[0].uses() or node.outputs[0].is_graph_output():
        _refuse(node, "outputs are never quantised")


def _check_pair(node: ir.Node, down: ir.Node) -> None:
    """A DequantizeLinear behind a QuantizeLinear: of what goes into a product with a weight."""
    one, two = float(_scale(down).flat[0]), _scale(node)
    if two.size != 1 or not np.isclose(one, float(two.flat[0]), rtol=_EXACT, atol=0):
        _refuse(
            node, f"it multiplies with {two.flat[0]:g}, but what it reads was divided by {one:g}"
        )
    _check_readers(node, 0, "an activation")
    for reader, _ in _readers(node.outputs[0]):
        other = reader.inputs[1]
        if other is None or not _is_fixed(other):
            _refuse(node, "the product that it goes into is not one with a weight")


def _is_carried(value: ir.Value) -> bool:
    """Whether quantised values are state: moved from a port of the graph, or to one."""
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.is_graph_input() or one.is_graph_output():
            return True
        maker = one.producer()
        if maker is not None and maker.op_type in _MOVING:
            waiting += [given for given in maker.inputs[: _movers(maker)] if given is not None]
        for reader, place in one.uses():
            if reader.op_type in _MOVING and place < _movers(reader):
                waiting += reader.outputs
    return False


def _movers(node: ir.Node) -> int:
    """How many of the first inputs of a node hold what it moves."""
    return len(node.inputs) if node.op_type in ("Concat", "Where") else 1


# --- weights ------------------------------------------------------------------------------------


def _check_dequantize(node: ir.Node, targets: Collection[str]) -> None:
    given = node.inputs[0]
    assert given is not None
    _check_zero(node)
    if given.is_initializer():
        if _gives_scales(node):
            return  # looked at with the weight that they are of
        _check_weight(node, given, targets)
        return
    maker = given.producer()
    if _is_carried(given):
        _scale(node)
    elif maker is not None and maker.op_type == _QUANTIZE:
        _check_pair(node, maker)
    else:
        _refuse(
            node,
            f"it reads {given.name}, expected a stored weight with nothing between, or what a "
            "QuantizeLinear gives",
        )


def _check_weight(node: ir.Node, weight: ir.Value, targets: Collection[str]) -> None:
    """A stored weight: its layout, its scales, where it goes, and who takes its format."""
    shape = weight.shape
    if shape is None or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        _refuse(node, f"{weight.name} is {shape}, expected two fixed dimensions [K, N]")
    assert shape is not None
    rows, columns = (int(str(size)) for size in shape)
    chosen = _formats(node, weight)
    found = _weight_scales(node, chosen[0])
    block = chosen[0].block
    if block and rows % block:
        _refuse(node, f"K = {rows} is no multiple of the block of {block}")
    wanted = (rows // block, columns) if block else (columns,)
    if found.shape != wanted and (block or found.size != 1):
        _refuse(node, f"scales are {list(found.shape)}, expected {list(wanted)}")
    if found.size > 1 and _axis(node) != (0 if block else 1):
        _refuse(node, f"axis {_axis(node)}: of a weight [K, N] blocks lie along 0, columns along 1")
    _check_readers(node, 1, "a weight")
    for reader, _ in _readers(node.outputs[0]):
        other = reader.inputs[0]
        pair = other.producer() if other is not None else None
        rounded = pair is not None and pair.op_type == _DEQUANTIZE
        for target in targets:
            _check_target(node, chosen, rounded, target)


def _formats(node: ir.Node, weight: ir.Value) -> list[Format]:
    """Formats that store a weight as it is stored here."""
    name = None if weight.dtype is None else _STORED.get(weight.dtype)
    offered = [one for one in FORMATS.values() if one.dtype.name == name]
    found = [one for one in offered if one.block == _block(node)]
    if not found:
        ways = " or ".join(
            f"blocks of {one}" if one else "a scale per column"
            for one in sorted({one.block for one in offered})
        )
        _refuse(
            node,
            f"{name} in {f'blocks of {_block(node)}' if _block(node) else 'no blocks'}: no kernel "
            f"multiplies with that as it is; use {ways}",
        )
    return found


def _weight_scales(node: ir.Node, chosen: Format) -> Array:
    """The scales of a stored weight, of one level or of two."""
    scale = node.inputs[1]
    maker = None if scale is None else scale.producer()
    levels = 1 if maker is None or maker.op_type != _DEQUANTIZE else 2
    if levels != 1 + chosen.has_tensor_scale:
        _refuse(node, f"scales have {levels} levels, those of {chosen.name} have {3 - levels}")
    if maker is None or levels == 1:
        found = _scale(node)
    else:
        if _scale(maker).size != 1:
            _refuse(maker, "the scales of a weight have one scale of their own")
        found = _constant(maker, maker.inputs[0], "scales").astype(np.float32)
        _check_scales(maker, found, 0.0)
    if chosen.has_powers and not (np.frexp(found.astype(np.float32))[0] == 0.5).all():
        _refuse(node, f"scales of {chosen.name} are powers of two")
    return found


def _check_target(node: ir.Node, chosen: list[Format], rounded: bool, target: str) -> None:
    """A target takes the format: of two of one layout, the one with or without a pair."""
    one = next((one for one in chosen if one.activations == rounded), chosen[0])
    if one.name not in TARGETS[target]:
        _refuse(
            node,
            f"{target} has no {one.name}; it takes {', '.join(TARGETS[target]) or 'none'}",
        )


# --- both ---------------------------------------------------------------------------------------


def _check_readers(node: ir.Node, place: int, what: str) -> None:
    """What is dequantised goes into products and nowhere else."""
    value = node.outputs[0]
    for reader, found in _readers(value):
        if reader.op_type != "MatMul" or found != place:
            _refuse(
                node,
                f"{what} goes into {reader.op_type} {reader.name!r} (input {found}): only what "
                "goes into a MatMul with a weight is quantised",
            )
    if value.is_graph_output():
        _refuse(node, f"{what} is an output: outputs are never quantised")


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """What reads a value, past a Cast to the dtype of the product."""
    for reader, place in value.uses():
        if reader.op_type == "Cast":
            yield from _readers(reader.outputs[0])
        else:
            yield reader, place


def _check_zero(node: ir.Node) -> None:
    """Zero points are 0, of a dtype that is taken."""
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    kind = node.inputs[0].dtype if node.op_type == _DEQUANTIZE and node.inputs[0] else None
    if zero is not None:
        kind = zero.dtype
        if np.any(_constant(node, zero, "zero point").astype(np.float32)):
            _refuse(node, "the zero point is not 0")
    elif node.op_type == _QUANTIZE:
        asked = node.attributes.get("output_dtype")
        kind = ir.DataType(asked.as_int()) if asked is not None else ir.DataType.UINT8
    if kind is not None and kind not in _STORED:
        _refuse(node, f"{kind.name} is no dtype of quantised values; use int8, int4, E4M3 or E2M1")


def _scale(node: ir.Node) -> Array:
    """The scales of a node, as they should be.

    Raises:
        CalibrationError: ``EMISSION``, where they are not constant, not finite or too small.
    """
    value = node.inputs[1]
    found = _constant(node, value, "scale")
    _check_scales(node, found, SMALLEST_SCALE)
    return found


def _check_scales(node: ir.Node, found: Array, least: float) -> None:
    numbers = found.astype(np.float32)
    if not (np.isfinite(numbers).all() and (numbers > 0).all() and (numbers >= least).all()):
        worst = numbers[~(np.isfinite(numbers) & (numbers > 0) & (numbers >= least))].flat[0]
        _refuse(node, f"a scale is {worst:g}, expected finite ones above {least:g}")


def _constant(node: ir.Node, value: ir.Value | None, what: str) -> Array:
    if value is None or not value.is_initializer() or value.const_value is None:
        _refuse(node, f"its {what} is no constant: found at run time, rows depend on neighbours")
    assert value is not None
    assert value.const_value is not None
    found: Array = value.const_value.numpy()
    return found


def _gives_scales(node: ir.Node) -> bool:
    """Whether what is dequantised are the scales of a weight."""
    uses = list(node.outputs[0].uses())
    return bool(uses) and all(
        reader.op_type == _DEQUANTIZE and place == 1 for reader, place in uses
    )


def _is_fixed(value: ir.Value) -> bool:
    """Whether a value depends on no input: an initializer, moved or dequantised or not."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one.is_initializer():
            continue
        maker = one.producer()
        if maker is None or maker.op_type not in (*_MOVING, "Cast", _QUANTIZE, _DEQUANTIZE):
            return False
        waiting += [given for given in maker.inputs if given is not None]
    return True


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _block(node: ir.Node) -> int:
    given = node.attributes.get("block_size")
    return 0 if given is None else given.as_int()


def _axis(node: ir.Node) -> int:
    given = node.attributes.get("axis")
    return 1 if given is None else given.as_int()
