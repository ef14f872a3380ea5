"""One operator of domain ``fixedstate`` by its ONNX function body, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime

from fixedstate.plugins.bodies import function_body
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.ports import Array


def run_op(
    name: str, inputs: Mapping[str, Array], block_len: int, io: str = "float32", **model: object
) -> list[Array]:
    """One operator as a graph of one node, in ONNX Runtime; every dimension is dynamic."""
    schema = OPS[name]
    body = function_body(name, block_len, io, **model)  # type: ignore[arg-type]
    values = []
    for key in schema.input_names:
        array = inputs[key]
        kind = ir.DataType.from_numpy(array.dtype)
        shape = ir.Shape([f"{key}{axis}" for axis in range(array.ndim)])
        values.append(ir.Value(name=key, type=ir.TensorType(kind), shape=shape))
    attributes = {"block_len": block_len, "plugin_namespace": DOMAIN, "plugin_version": "1"}
    node = ir.node(
        name, values, attributes=attributes, domain=DOMAIN, num_outputs=len(schema.output_names)
    )
    for value, key in zip(node.outputs, schema.output_names, strict=True):
        value.name = key
        float_state = key == "new_state" and not name.startswith("CausalConv")
        kind = ir.DataType.FLOAT if float_state or io == "float32" else ir.DataType.FLOAT16
        value.type = ir.TensorType(kind)
    imports = {"": 21, DOMAIN: 1}
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports=imports, name="one")
    model_ = ir.Model(graph, ir_version=10, functions=[body])
    session = onnxruntime.InferenceSession(ir.to_proto(model_).SerializeToString())
    return session.run(list(schema.output_names), {key: inputs[key] for key in schema.input_names})


def single(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """float32 copies."""
    return {key: value.astype(np.float32) for key, value in inputs.items()}
