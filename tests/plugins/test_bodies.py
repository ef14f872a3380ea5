"""The ONNX function bodies equal the float64 loops, run by ONNX Runtime, over the whole grid."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from scan_inputs import scan_inputs

from fixedstate.plugins import reference
from fixedstate.plugins.bodies import function_body
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.ports import Array

TOLERANCE = 1e-4


def run_op(
    name: str, inputs: Mapping[str, Array], block_len: int, io: str = "float32", **model: object
) -> list[Array]:
    """One operator as a graph of one node, in ONNX Runtime; every dimension is dynamic."""
    schema = OPS[name]
    body = function_body(name, block_len, io, **model)  # type: ignore[arg-type]
    values = []
    for key in schema.inputs:
        array = inputs[key]
        kind = ir.DataType.from_numpy(array.dtype)
        shape = ir.Shape([f"{key}{axis}" for axis in range(array.ndim)])
        values.append(ir.Value(name=key, type=ir.TensorType(kind), shape=shape))
    attributes = {"block_len": block_len, "plugin_namespace": DOMAIN, "plugin_version": "1"}
    node = ir.node(
        name, values, attributes=attributes, domain=DOMAIN, num_outputs=len(schema.outputs)
    )
    for value, key in zip(node.outputs, schema.outputs, strict=True):
        value.name = key
        float_state = key == "new_state" and name.startswith("Ssd")
        kind = ir.DataType.FLOAT if float_state or io == "float32" else ir.DataType.FLOAT16
        value.type = ir.TensorType(kind)
    imports = {"": 21, DOMAIN: 1}
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports=imports, name="one")
    model_ = ir.Model(graph, ir_version=10, functions=[body])
    session = onnxruntime.InferenceSession(ir.to_proto(model_).SerializeToString())
    return session.run(list(schema.outputs), {key: inputs[key] for key in schema.inputs})


def single(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """float32 copies."""
    return {key: value.astype(np.float32) for key, value in inputs.items()}


@pytest.mark.parametrize("block_len", [4, 16, 33, 64, 65, 80, 128, 256])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (6, 3), (3, 3)])
def test_ssd_bodies_equal_the_loop(block_len: int, heads: int, groups: int) -> None:
    """Denoise, commit over 1 to 3 blocks, and reverse, for every cut into chunks."""
    rng = np.random.default_rng(block_len)
    model = {"one_group": groups == 1}
    for blocks in (1, 2, 3):
        inputs = single(scan_inputs(rng, 2, block_len * blocks, heads, groups))
        expected, final = reference.ssd(**inputs)
        y, state = run_op("SsdBlockCommit", inputs, block_len, **model)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        np.testing.assert_allclose(state, final, atol=TOLERANCE)
        free = {key: value for key, value in inputs.items() if key != "state"}
        (y,) = run_op("SsdBlockReverse", inputs, block_len, **model)
        expected = reference.ssd_reverse(**free, block_len=block_len)
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)
        if blocks == 1:
            (y,) = run_op("SsdBlockDenoise", inputs, block_len, **model)
            np.testing.assert_allclose(y, reference.ssd(**inputs)[0], atol=TOLERANCE)


@pytest.mark.parametrize("wide_skip", [False, True])
@pytest.mark.parametrize("name", ["SsdBlockDenoise", "SsdBlockCommit", "SsdBlockReverse"])
def test_skip_per_head_and_per_channel(name: str, wide_skip: bool) -> None:
    """D as [H] and as [H, P]; one body may serve both shapes."""
    inputs = scan_inputs(np.random.default_rng(1), 2, 16, 4, 1)
    shapes = [(4, 8), (4,)] if wide_skip else [(4,)]
    for shape in shapes:
        inputs["d"] = np.random.default_rng(2).standard_normal(shape)
        given = single(inputs)
        y = run_op(name, given, 16, wide_skip=wide_skip)[0]
        if name == "SsdBlockReverse":
            free = {key: value for key, value in given.items() if key != "state"}
            expected = reference.ssd_reverse(**free, block_len=16)
        else:
            expected = reference.ssd(**given)[0]
        np.testing.assert_allclose(y, expected, atol=TOLERANCE)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2, 1e4, 1e6])
def test_any_decay_is_finite_and_right(scale: float) -> None:
    """No exponent is ever positive, whatever the size of the decays."""
    inputs = single(scan_inputs(np.random.default_rng(5), 1, 300, 4, 2, scale))
    y, state = run_op("SsdBlockCommit", inputs, 75)
    expected, final = reference.ssd(**inputs)
    np.testing.assert_allclose(y, expected, atol=1e-3)
    np.testing.assert_allclose(state, final, atol=1e-3)


@pytest.mark.parametrize("taps", [2, 3, 4, 5, 8])
def test_conv_bodies_equal_the_loop(taps: int) -> None:
    """Every number of taps, alone and beside layers that have more."""
    rng = np.random.default_rng(taps)
    inputs = single(
        {
            "x": rng.standard_normal((3, 32, 12)),
            "weight": rng.standard_normal((12, taps)),
            "bias": rng.standard_normal(12),
            "state": rng.standard_normal((3, 12, taps - 1)),
        }
    )
    inputs["length"] = np.array([0, 5, 32])
    expected, window = reference.causal_conv(*inputs.values())
    reverse = reference.causal_conv_reverse(
        inputs["x"], inputs["weight"], inputs["bias"], block_len=16
    )
    for others in ([taps], [taps, 8], [2, taps, 8]):
        for channels in (None, 12):
            model = {"taps": others, "channels": channels}
            y, new = run_op("CausalConvCommit", inputs, 16, **model)
            np.testing.assert_allclose(y, expected, atol=TOLERANCE)
            np.testing.assert_array_equal(new, window.astype(np.float32))
            (y,) = run_op("CausalConvDenoise", inputs, 32, **model)
            np.testing.assert_allclose(y, expected, atol=TOLERANCE)
            (y,) = run_op("CausalConvReverse", inputs, 16, **model)
            np.testing.assert_allclose(y, reverse, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["SsdBlockDenoise", "SsdBlockCommit", "SsdBlockReverse"])
def test_half_precision_computes_in_float32_inside(name: str) -> None:
    """fp16 io: only what enters and leaves is rounded."""
    inputs = single(scan_inputs(np.random.default_rng(8), 2, 16, 4, 2))
    for key in ("x", "b", "c"):
        inputs[key] = inputs[key].astype(np.float16)
    found = run_op(name, inputs, 16, io="float16")
    free = {key: value for key, value in inputs.items() if key != "state"}
    if name == "SsdBlockReverse":
        expected = [reference.ssd_reverse(**free, block_len=16)]
    else:
        expected = list(reference.ssd(**inputs))
    assert found[0].dtype == np.float16
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-3)
    if name == "SsdBlockCommit":
        assert found[1].dtype == np.float32
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)


def test_one_body_serves_layers_of_two_sizes() -> None:
    """Sizes come from Shape: the same function, two widths."""
    for heads, groups in ((4, 2), (6, 1), (2, 2)):
        inputs = single(scan_inputs(np.random.default_rng(heads), 1, 16, heads, groups))
        (y,) = run_op("SsdBlockDenoise", inputs, 16)
        np.testing.assert_allclose(y, reference.ssd(**inputs)[0], atol=TOLERANCE)
