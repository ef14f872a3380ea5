"""Scales held against those of another toolkit, NVIDIA's Model Optimizer.

It wants an environment of its own (other versions of onnx and ONNX Runtime), so that it is asked in
another interpreter: the one that FIXEDSTATE_MODELOPT_PYTHON names, with `nvidia-modelopt[onnx]`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from fixedstate.calib.formats import INT8, activation_scale, quantize
from fixedstate.calib.histogram import Histogram
from fixedstate.calib.scales import limit_of

PYTHON = os.environ.get("FIXEDSTATE_MODELOPT_PYTHON", "")

ASKED = """
import json, sys
import numpy as np, onnx
from onnx import numpy_helper
from modelopt.onnx.quantization import quantize

graph, feeds, out = sys.argv[1:]
quantize(graph, quantize_mode="int8", calibration_data={"x": np.load(feeds)},
         calibration_method="max", op_types_to_quantize=["MatMul"], output_path=out,
         high_precision_dtype="fp32", calibration_eps=["cpu"])
model = onnx.load(out)
held = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
for node in model.graph.node:
    if node.op_type == "Constant":
        held[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
found = {}
for node in model.graph.node:
    if node.op_type == "QuantizeLinear" and node.input[0] in ("x", "h", "w1", "w2"):
        found[node.input[0]] = np.atleast_1d(held[node.input[1]]).tolist()
    if node.op_type == "DequantizeLinear" and node.input[0].startswith(("w1", "w2")):
        found[node.input[0][:2]] = np.atleast_1d(held[node.input[1]]).tolist()
json.dump(found, open(out + ".json", "w"))
"""


@pytest.mark.slow  # `make nightly`: `make test` makes no environment for it
@pytest.mark.skipif(
    not PYTHON, reason="FIXEDSTATE_MODELOPT_PYTHON names no interpreter with nvidia-modelopt[onnx]"
)
def test_scales_are_those_of_model_optimizer(tmp_path: Path) -> None:
    """Largest magnitudes over 127: of each column of a weight, and of all of an activation."""
    rng = np.random.default_rng(0)
    feeds = rng.standard_normal((64, 16, 64)).astype(np.float32)
    weights = [
        rng.standard_normal((64, 128)).astype(np.float32),
        rng.standard_normal((128, 64)).astype(np.float32),
    ]
    hidden = np.maximum(feeds @ weights[0], 0)
    float32 = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=float32, shape=ir.Shape(["N", 16, 64]))
    held = [
        ir.Value(name=name, type=float32, const_value=ir.tensor(weight, name=name))
        for name, weight in zip(("w1", "w2"), weights, strict=True)
    ]
    first = ir.node("MatMul", [x, held[0]])
    middle = ir.node("Relu", first.outputs)
    last = ir.node("MatMul", [middle.outputs[0], held[1]])
    for node, name in ((first, "a"), (middle, "h"), (last, "y")):
        node.outputs[0].name = name
    last.outputs[0].type, last.outputs[0].shape = float32, x.shape
    graph = ir.Graph(
        [x],
        last.outputs,
        nodes=[first, middle, last],
        initializers=held,
        opset_imports={"": 17},
        name="two",
    )
    file, out = tmp_path / "two.onnx", tmp_path / "out.onnx"
    ir.save(ir.Model(graph, ir_version=8), file)
    np.save(tmp_path / "feeds.npy", feeds)
    command = [PYTHON, "-c", ASKED, str(file), str(tmp_path / "feeds.npy"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(Path(f"{out}.json").read_bytes())
    for name, weight in zip(("w1", "w2"), weights, strict=True):
        np.testing.assert_allclose(found[name], quantize(weight, INT8).scales, rtol=1e-6)
    for name, values in (("x", feeds), ("h", hidden)):
        seen = Histogram()
        seen.add(values)
        scale = activation_scale(limit_of(seen, INT8, "max"), INT8)
        np.testing.assert_allclose(found[name], [scale], rtol=1e-5)
