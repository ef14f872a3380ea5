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

VALUES, SCALE = ".quantized", ".scale"
"""What the names of a weight's stored values and scales end with, behind its own."""

_ONNX = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
}

Valueless = Callable[[ir.DataType, ir.Shape, str], ir.TensorProtocol]
"""Makes what a weight holds until its values stand in a file."""


def quantize_graph(
    model: ir.Model,
    sites: Mapping[str, Site],
    formats: Mapping[str, Format],
    scales: Mapping[str, float],
    valueless: Valueless,
) -> None:
    """Quantise products of a graph in place; the others, and all else, stay as they are.

    Args:
        model: A graph of a bundle.
        sites: The bundle's sites by weight.
        formats: Of the weights that are quantised.
        scales: Of the activations of those whose format has one, by activation.
        valueless: Makes the new weights, whose values :func:`stored` gives.
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
            weights[product.weight] = _stored_weight(model, site, chosen, valueless)
        node = ir.node("MatMul", [value, weights[product.weight]], name=product.node.name)
        _replace(model, product, node)
    common.RemoveUnusedNodesPass()(model)


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
    model.graph.insert_before(product.node, [down, up])
    return up.outputs[0]


def _stored_weight(model: ir.Model, site: Site, chosen: Format, valueless: Valueless) -> ir.Value:
    """The weight as it comes out of its DequantizeLinear, which stands where the graph begins."""
    blocks = site.rows // chosen.block if chosen.block else 0
    shape = (blocks, site.columns) if blocks else (site.columns,)
    values = _weight(
        model, site.name + VALUES, _ONNX[chosen.dtype.name], (site.rows, site.columns), valueless
    )
    scales = _weight(model, site.name + SCALE, ir.DataType.FLOAT, shape, valueless)
    how = {"axis": 0, "block_size": chosen.block} if blocks else {"axis": 1}
    node = ir.node("DequantizeLinear", [values, scales], attributes=how)
    model.graph.insert_before(model.graph[0], [node])
    return node.outputs[0]


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
