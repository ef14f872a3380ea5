"""Forms that the builder refuses, or does not keep quantised: each is refused before it is written.

All graphs are made by hand: x [B, 16, 128] and one product with a weight [128, 32].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from fixedstate.calib.apply import quantize_graph, stored
from fixedstate.calib.formats import FORMATS, TARGETS, quantize
from fixedstate.calib.lint import check_emission
from fixedstate.calib.sites import Site
from fixedstate.calib.trial import _held
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array

K, N = 128, 32
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
WEIGHT = np.random.default_rng(3).standard_normal((K, N)).astype(np.float32)


class Made:
    """A graph in the making."""

    def __init__(self) -> None:
        self.x = self.port("x", ("B", 16, K))
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.outputs: list[ir.Value] = []

    @staticmethod
    def port(name: str, shape: tuple[Any, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def held(self, array: Any, name: str = "") -> ir.Value:
        array = np.asarray(array)
        name = name or f"c{len(self.weights)}"
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
        value.shape = ir.Shape(array.shape)
        self.weights.append(value)
        return value

    def node(self, op: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        made = ir.node(op, list(inputs), attributes=attributes, domain=domain)
        made.name = f"{op.lower()}_{len(self.nodes)}"
        made.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(made)
        return made.outputs[0]

    def model(self, *outputs: ir.Value, inputs: tuple[ir.Value, ...] = ()) -> ir.Model:
        graph = ir.Graph(
            (self.x, *inputs),
            outputs,
            nodes=self.nodes,
            initializers=self.weights,
            opset_imports={"": 21},
        )
        return ir.Model(graph, ir_version=10)


def zero(dtype: Any) -> Array:
    return np.zeros((), dtype)


def int8(made: Made, **attributes: Any) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int8"])
    where = {"axis": 1, **attributes}
    return made.node("DequantizeLinear", made.held(one.values), made.held(one.scales), **where)


def pair(made: Made, x: ir.Value, scale: Any = 0.02, point: Any = None) -> ir.Value:
    step = made.held(np.float32(scale))
    point = made.held(zero(np.int8) if point is None else point)
    return made.node("DequantizeLinear", made.node("QuantizeLinear", x, step, point), step, point)


def refused(model: ir.Model, reason: str, *targets: str) -> None:
    """The graph is refused with a sentence that names a node."""
    with pytest.raises(CalibrationError, match=rf"^node '.*({reason})") as raised:
        check_emission(model, targets)
    assert raised.value.code == "EMISSION"


@pytest.mark.parametrize("name", FORMATS)
def test_what_quantize_graph_writes_passes(name: str) -> None:
    made = Made()
    product = made.node("MatMul", made.x, made.held(WEIGHT, "layers.0.mlp.up_proj.weight"))
    product.shape = ir.Shape(("B", 16, N))
    model = made.model(product)
    site = Site("layers.0.mlp.up_proj.weight", "up", 0, K, N, "layers.0.mlp.up_proj.weight")
    chosen = FORMATS[name]
    values = {site.name: stored(WEIGHT, site, chosen)}
    quantize_graph(
        model,
        {site.name: site},
        {site.name: chosen},
        {site.name: 0.02},
        lambda dtype, shape, part: _held(values, dtype, shape, part),
    )
    able = [target for target, formats in TARGETS.items() if name in formats]
    check_emission(model, able)
    assert able
    refused(model, f"sm75 has no {name}; it takes none", "sm75")
    with pytest.raises(CalibrationError, match="sm42") as raised:
        check_emission(model, ("sm42",))
    assert raised.value.code == "UNSUPPORTED_TARGET"


def float_behind_pair(made: Made) -> ir.Value:
    return made.node("MatMul", made.x, pair(made, made.held(WEIGHT)))


def turned_weight_quantised(made: Made) -> ir.Value:
    turned = made.node("Transpose", made.held(WEIGHT.T.copy()), perm=[1, 0])
    return made.node("MatMul", made.x, pair(made, turned))


def transpose_before_dequantize(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["fp8"])
    turned = made.node("Transpose", made.held(one.values.T.copy()), perm=[1, 0])
    weight = made.node("DequantizeLinear", turned, made.held(one.scales), axis=1)
    return made.node("MatMul", made.x, weight)


def shifted(made: Made) -> ir.Value:
    return made.node("MatMul", pair(made, made.x, point=np.int8(3)), int8(made))


def unsigned(made: Made) -> ir.Value:
    return made.node("MatMul", pair(made, made.x, point=np.uint8(0)), int8(made))


def no_zero_point(made: Made) -> ir.Value:
    step = made.held(np.float32(0.02))
    x = made.node("DequantizeLinear", made.node("QuantizeLinear", made.x, step), step)
    return made.node("MatMul", x, int8(made))


def four_bits_unsigned(made: Made) -> ir.Value:
    values = (quantize(WEIGHT, FORMATS["int4:32"]).values.astype(np.int8) + 8).astype(
        ml_dtypes.uint4
    )
    scales = made.held(np.full((4, N), 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(values), scales, axis=0, block_size=32)
    return made.node("MatMul", made.x, weight)


def two_bits(made: Made) -> ir.Value:
    values = np.ones((K, N), ml_dtypes.int2)
    scales = made.held(np.full((4, N), 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(values), scales, axis=0, block_size=32)
    return made.node("MatMul", made.x, weight)


def int4_per_column(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int4:32"])
    scales = made.held(np.full(N, 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=1)
    return made.node("MatMul", made.x, weight)


def int4_small_blocks(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int4:32"])
    scales = made.held(np.full((8, N), 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=0, block_size=16)
    return made.node("MatMul", made.x, weight)


def int4_turned(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int4:32"])
    values, scales = made.held(one.values.T.copy()), made.held(one.scales.T.copy())
    weight = made.node("DequantizeLinear", values, scales, axis=1, block_size=32)
    return made.node("MatMul", made.x, made.node("Transpose", weight, perm=[1, 0]))


def int4_ragged(made: Made) -> ir.Value:
    values = np.ones((100, N), ml_dtypes.int4)
    scales = made.held(np.full((4, N), 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(values), scales, axis=0, block_size=32)
    return made.node("MatMul", made.x, weight)


def int8_blocked(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int8"])
    scales = made.held(np.full((4, N), 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=0, block_size=32)
    return made.node("MatMul", made.x, weight)


def int8_by_rows(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int8"])
    scales = made.held(np.full(K, 0.1, np.float32))
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=0)
    return made.node("MatMul", made.x, weight)


def output_quantised(made: Made) -> ir.Value:
    return pair(made, made.node("MatMul", made.x, int8(made)))


def softmax_quantised(made: Made) -> ir.Value:
    scores = made.node("Softmax", pair(made, made.x), axis=-1)
    return made.node("MatMul", scores, int8(made))


def two_activations(made: Made) -> ir.Value:
    turned = made.node("Transpose", made.x, perm=[0, 2, 1])
    return made.node("MatMul", pair(made, made.x), turned)


def weight_added(made: Made) -> ir.Value:
    return made.node("Add", made.node("MatMul", made.x, made.held(WEIGHT)), int8(made))


def weight_first(made: Made) -> ir.Value:
    turned = made.node("Transpose", made.x, perm=[0, 2, 1])
    one = quantize(WEIGHT.T.copy(), FORMATS["int8"])
    weight = made.node("DequantizeLinear", made.held(one.values), made.held(one.scales), axis=1)
    return made.node("MatMul", weight, turned)


def with_scale(number: float) -> Callable[[Made], ir.Value]:
    def made_of(made: Made) -> ir.Value:
        scales = quantize(WEIGHT, FORMATS["int8"]).scales.copy()
        scales[5] = number
        values = made.held(quantize(WEIGHT, FORMATS["int8"]).values)
        weight = made.node("DequantizeLinear", values, made.held(scales), axis=1)
        return made.node("MatMul", made.x, weight)

    return made_of


def activation_scale_of_nan(made: Made) -> ir.Value:
    return made.node("MatMul", pair(made, made.x, scale=float("nan")), int8(made))


def scale_at_run_time(made: Made) -> ir.Value:
    largest = made.node("ReduceMax", made.node("Abs", made.x), keepdims=0)
    step, point = made.node("Div", largest, made.held(np.float32(127))), made.held(zero(np.int8))
    x = made.node("DequantizeLinear", made.node("QuantizeLinear", made.x, step, point), step, point)
    return made.node("MatMul", x, int8(made))


def scale_per_channel(made: Made) -> ir.Value:
    step, point = made.held(np.full(K, 0.1, np.float32)), made.held(np.zeros(K, np.int8))
    down = made.node("QuantizeLinear", made.x, step, point, axis=-1)
    x = made.node("DequantizeLinear", down, step, point, axis=-1)
    return made.node("MatMul", x, int8(made))


def scales_of_a_pair_differ(made: Made) -> ir.Value:
    one, two, point = made.held(np.float32(0.02)), made.held(np.float32(0.03)), zero(np.int8)
    down = made.node("QuantizeLinear", made.x, one, made.held(point))
    x = made.node("DequantizeLinear", down, two, made.held(point))
    return made.node("MatMul", x, int8(made))


def integers_multiplied(made: Made) -> ir.Value:
    values = made.held(quantize(WEIGHT, FORMATS["int8"]).values)
    step, point = made.held(np.float32(0.02)), made.held(zero(np.int8))
    return made.node("MatMulInteger", made.node("QuantizeLinear", made.x, step, point), values)


def found_at_run_time(made: Made) -> ir.Value:
    return made.node("DynamicQuantizeLinear", made.x)


def powers_of_two_missing(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["mxfp8"])
    scales = made.held(1.5 * one.scales.astype(np.float32))
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=0, block_size=32)
    return made.node("MatMul", made.x, weight)


def four_bit_floats_of_one_level(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["nvfp4"])
    scales = made.held(one.scales.astype(np.float32) * np.float32(one.scale))
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=0, block_size=16)
    return made.node("MatMul", made.x, weight)


def scales_missing(made: Made) -> ir.Value:
    one = quantize(WEIGHT, FORMATS["int4:32"])
    scales = made.held(one.scales[:1].copy())
    weight = made.node("DequantizeLinear", made.held(one.values), scales, axis=0, block_size=32)
    return made.node("MatMul", made.x, weight)


REFUSED: dict[Callable[[Made], ir.Value], str] = {
    float_behind_pair: r"quantizelinear_0' \(QuantizeLinear\): it quantises a weight, which would",
    turned_weight_quantised: "it quantises a weight, which would be kept in float",
    transpose_before_dequantize: "expected a stored weight with nothing between",
    shifted: "the zero point is not 0",
    unsigned: "UINT8 is no dtype of quantised values",
    no_zero_point: "UINT8 is no dtype of quantised values",
    four_bits_unsigned: "UINT4 is no dtype of quantised values",
    two_bits: "INT2 is no dtype of quantised values",
    int4_per_column: "int4 in no blocks: no kernel multiplies",
    int4_small_blocks: "int4 in blocks of 16: .* use blocks of 32 or blocks of 64 or blocks of 128",
    int4_turned: r"scales are \[32, 4\], expected \[1, 128\]",
    int4_ragged: "K = 100 is no multiple of the block of 32",
    int8_blocked: "int8 in blocks of 32: no kernel multiplies .* a scale per column",
    int8_by_rows: r"scales are \[128\], expected \[32\]",
    output_quantised: "outputs are never quantised",
    softmax_quantised: r"an activation goes into Softmax 'softmax_\d' \(input 0\)",
    two_activations: "is not one with a weight",
    weight_added: "a weight goes into Add",
    weight_first: r"a weight goes into MatMul 'matmul_\d' \(input 0\)",
    activation_scale_of_nan: "a scale is nan",
    scale_at_run_time: "its scale is no constant",
    scale_per_channel: "activations have one scale, here are 128",
    scales_of_a_pair_differ: "it multiplies with 0.03, but what it reads was divided by 0.02",
    integers_multiplied: "what is quantised goes into a DequantizeLinear and nowhere else",
    found_at_run_time: "a scale found at run time makes a row depend on its neighbours",
    powers_of_two_missing: "scales of mxfp8 are powers of two",
    four_bit_floats_of_one_level: "scales have 1 levels, those of nvfp4 have 2",
    scales_missing: r"scales are \[1, 32\], expected \[4, 32\]",
}


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_refused_forms_are_refused(form: Callable[[Made], ir.Value]) -> None:
    made = Made()
    model = made.model(form(made))
    refused(model, REFUSED[form])


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan"), 2.0**-25])
def test_scales_are_finite_and_positive(number: float) -> None:
    made = Made()
    model = made.model(with_scale(number)(made))
    refused(model, "a scale is")
    made = Made()
    check_emission(made.model(with_scale(2.0**-24)(made)))


def test_quantised_state_is_no_activation() -> None:
    """Eight-bit floats of a cache are read and written by the same operators."""
    made = Made()
    past = made.port("past_key", ("B", 2, "C", 8), ir.DataType.FLOAT8E4M3FN)
    one, point = made.held(np.float32(1)), made.held(zero(E4M3))
    keys = made.node("DequantizeLinear", past, one, point)
    new = made.node("QuantizeLinear", made.node("Exp", keys), one, point)
    present = made.node("Concat", past, new, axis=2)
    again = made.node("DequantizeLinear", new, one, point)
    check_emission(made.model(made.node("Exp", again), present, inputs=(past,)))


def test_a_dimension_that_is_not_fixed_is_refused() -> None:
    made = Made()
    x = made.port("loose", ("B", 16, "T"))
    model = made.model(made.node("MatMul", pair(made, x), int8(made)), inputs=(x,))
    refused(model, "the last dimension of loose is not fixed")
