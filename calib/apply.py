"""Quantised graphs: stored weights behind DequantizeLinear, activations through one rounding each.

Only what TensorRT-RTX's builder takes, and keeps, is written: weights are stored quantised and
dequantised where they are used (a float weight with a pair behind it would be kept in float), zero
points are 0, four-bit weights are in blocks along K, outputs are never quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from fixedstate.calib.formats import Format, Quantized, quantize, search_shrink
from fixedstate.calib.sites import Product, Site, activation, products
from fixedstate.ports import Array
from fixedstate.runtime.ort import EMBEDDING

VALUES, SCALE, TENSOR_SCALE = ".quantized", ".scale", ".tensor_scale"
"""What the names of a weight's stored values and scales end with, behind its own."""

MULTIPLIED = ".multiplied"
"""Likewise of the float32 weight that stands for a quantised one where nothing reads its format."""

OPSET, IR_VERSION = 23, 11
"""Of graphs with weights in four-bit floats, which older ones have not."""

MIN_ONNXRUNTIME = "1.23.0"
"""The first ONNX Runtime that reads these; its CPU provider computes none of them."""

_ONNX = {
    "float32": ir.DataType.FLOAT,
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "float4_e2m1fn": ir.DataType.FLOAT4E2M1,
}

Valueless = Callable[[ir.DataType, ir.Shape, str], ir.TensorProtocol]
"""Makes what a weight holds until its values stand in a file."""


def quantize_graph(
    model: ir.Model,
    sites: Mapping[str, Site],
    formats: Mapping[str, Format],
    scales: Mapping[str, float],
    valueless: Valueless,
    *,
    simulate: bool = False,
) -> None:
    """Quantise products of a graph in place; the others, and all else, stay as they are.

    Args:
        model: A graph of a bundle.
        sites: The bundle's sites by weight.
        formats: Of the weights that are quantised.
        scales: Of the activations of those whose format has one, by activation.
        valueless: Makes the new weights, whose values :func:`stored` gives.
        simulate: Give weights that ONNX Runtime's CPU provider does not read as the float32 numbers
            that they stand for.
    """
    weights: dict[str, ir.Value] = {}
    for product in list(products(model)):
        chosen = formats.get(product.weight)
        if chosen is None:
            continue
        site = sites[product.weight]
        value = activation(product)
        if chosen.activations:
            value = _round_trip(model, product, value, scales[site.input], chosen)
        if product.weight not in weights:
            made = _multiplied if simulate and not chosen.is_on_cpu else _stored_weight
            weights[product.weight] = made(model, site, chosen, valueless)
        node = ir.node("MatMul", [value, weights[product.weight]], name=product.node.name)
        _replace(model, product, node)
    common.RemoveUnusedNodesPass()(model)
    if has_four_bit_floats(model):
        model.ir_version = max(IR_VERSION, model.ir_version or 0)
        for imports in (model.opset_imports, *(f.opset_imports for f in model.functions.values())):
            imports[""] = max(OPSET, imports.get("", 0))


def has_four_bit_floats(model: ir.Model) -> bool:
    """Whether a graph reads weights in four-bit floats."""
    return any(value.dtype == ir.DataType.FLOAT4E2M1 for value in model.graph.initializers.values())


def _round_trip(
    model: ir.Model, product: Product, value: ir.Value, scale: float, chosen: Format
) -> ir.Value:
    """The activation quantised and dequantised, for one product.

    Where several products share it, each has nodes and a scale of its own: ONNX Runtime fuses none
    that share a pair, and makes one pair of equal ones.
    """
    step = _constant(model, np.float32(scale), product.weight)
    zero = _constant(model, np.zeros((), chosen.dtype))
    down = ir.node("QuantizeLinear", [value, step, zero])
    up = ir.node("DequantizeLinear", [down.outputs[0], step, zero])
    down.outputs[0].dtype, up.outputs[0].dtype = _ONNX[chosen.dtype.name], ir.DataType.FLOAT
    model.graph.insert_before(product.node, [down, up])
    return up.outputs[0]


def _stored_weight(model: ir.Model, site: Site, chosen: Format, valueless: Valueless) -> ir.Value:
    """The weight as it comes out of its DequantizeLinear, which stands where the graph begins."""
    blocks = site.rows // chosen.block if chosen.block else 0
    shape = (blocks, site.columns) if blocks else (site.columns,)
    values = _weight(
        model, site.name + VALUES, _ONNX[chosen.dtype.name], (site.rows, site.columns), valueless
    )
    kind = _ONNX[chosen.stored_scale_dtype.name]
    scales = _weight(model, site.name + SCALE, kind, shape, valueless)
    how = {"axis": 0, "block_size": chosen.block} if blocks else {"axis": 1}
    nodes = []
    if chosen.has_tensor_scale:
        one = _weight(model, site.name + TENSOR_SCALE, ir.DataType.FLOAT, (), valueless)
        nodes.append(ir.node("DequantizeLinear", [scales, one]))
        scales = nodes[0].outputs[0]
    nodes.append(ir.node("DequantizeLinear", [values, scales], attributes=how))
    for node in nodes:
        node.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.insert_before(model.graph[0], nodes)
    return nodes[-1].outputs[0]


def _multiplied(model: ir.Model, site: Site, chosen: Format, valueless: Valueless) -> ir.Value:
    """The numbers that a quantised weight stands for, as a weight."""
    del chosen
    shape = (site.rows, site.columns)
    return _weight(model, site.name + MULTIPLIED, ir.DataType.FLOAT, shape, valueless)


def _weight(
    model: ir.Model,
    name: str,
    dtype: ir.DataType,
    shape: tuple[int, ...],
    valueless: Valueless,
) -> ir.Value:
    held = valueless(dtype, ir.Shape(shape), name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=held)
    model.graph.register_initializer(value)
    return value


def _constant(model: ir.Model, number: Array | np.generic, owner: str = "") -> ir.Value:
    """A constant; equal ones of one owner are one."""
    array = np.asarray(number)
    name = f"constant_{array.dtype.name}_{float(array)!r}_{owner}"
    if name in model.graph.initializers:
        return model.graph.initializers[name]
    held = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(held.dtype), shape=ir.Shape(()), const_value=held
    )
    model.graph.register_initializer(value)
    return value


def _replace(model: ir.Model, product: Product, node: ir.Node) -> None:
    """Put a product in the place of another; of a turned one in that of the Transpose behind it."""
    old = product.node.outputs[0]
    if product.turned:
        (use,) = old.uses()
        old = use.node.outputs[0]
    node.outputs[0].type, node.outputs[0].shape = old.type, old.shape
    model.graph.insert_before(product.node, [node])
    if old.is_graph_output():
        old.name, node.outputs[0].name = f"replaced_{old.name}", old.name
    ir.convenience.replace_all_uses_with(old, node.outputs[0], replace_graph_outputs=True)


def stored(weight: Array, site: Site, chosen: Format, search: bool = False) -> Quantized:
    """The values that a quantised weight is stored with.

    Args:
        weight: As it stands in the weights file: (K, N), or for a tied head the embedding (N, K).
        site: Its site.
        chosen: The format.
        search: Whether ranges are shrunk to the least squared error; the largest weights may then
            be clipped.
    """
    array = weight.T if site.name == EMBEDDING else weight
    return quantize(array, chosen, search_shrink(array, chosen) if search else 1.0)


def parts_of(one: Quantized) -> dict[str, Array]:
    """What a quantised weight is stored as, by what the names end with behind its own."""
    found = {VALUES: one.values, SCALE: one.scales.astype(one.format.stored_scale_dtype)}
    if one.format.has_tensor_scale:
        found[TENSOR_SCALE] = np.asarray(one.scale, np.float32)
    return found


def part_of(name: str) -> tuple[str, str]:
    """Name of the weight that a stored part is of, and what its own name ends with; "" if none."""
    for ending in (VALUES, SCALE, TENSOR_SCALE, MULTIPLIED):
        if name.endswith(ending):
            return name.removesuffix(ending), ending
    return name, ""
