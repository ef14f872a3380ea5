"""A plan that holds its graph, for both stand-ins of TensorRT, and what refits it.

The builder's stand-in writes it, the runtime's computes it with ONNX Runtime. A plan of STRIP_PLAN
has the graph and no weight of it, and runs after a refit only. What refits it is as narrow as
TensorRT's: it knows the initializers and the Constant nodes of a graph, none of local functions,
and it wants every weight. Other values than those of the build, on which TensorRT computes
anything, are an error of the test.

It cannot show which constants a real builder keeps in a plan, or how it names them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

ERROR = 1
_DTYPES = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "INT64": "int64"}


class Unlike(AssertionError):
    """A plan was given other weights than those it was built from."""


# --- the builder's side --------------------------------------------------------------------------


def plan_of(model: ir.Model, profiles: list[Any], stripped: bool) -> bytes:
    """The plan of a graph; its weights are those that it reads from another file.

    Args:
        model: As it was parsed.
        profiles: Bounds by input.
        stripped: Whether to leave its weights out.
    """
    common.InlinePass()(model)
    ports = {
        kind: [
            {
                "name": value.name,
                "dtype": _DTYPES[value.dtype.name],
                "shape": [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape],
            }
            for value in values
        ]
        for kind, values in (("inputs", model.graph.inputs), ("outputs", model.graph.outputs))
    }
    weights = _outside(model)
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    plan = {
        "model": _text(ir.to_proto(model).SerializeToString()),
        **ports,
        "profiles": profiles,
        "aliases": {},
        "refittable": {name: _digest(one) for name, one in _constants(model).items()},
        "weights": None if stripped else {n: _text(one.tobytes()) for n, one in arrays.items()},
    }
    return json.dumps(plan).encode()


def _outside(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    return {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }


def _constants(model: ir.Model) -> dict[str, np.ndarray]:
    """What a refit of this graph knows by name: nothing inside functions."""
    found = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    for node in model.graph.all_nodes():
        if node.op_type == "Constant":
            found[node.outputs[0].name] = node.attributes["value"].value.numpy()
    return found


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# --- the runtime's side --------------------------------------------------------------------------


def session_of(plan: Mapping[str, Any], weights: Mapping[str, np.ndarray] | None) -> Any:
    """ONNX Runtime on the graph of a plan; None where it has no weights.

    Args:
        plan: As it was written.
        weights: What it was refitted with.
    """
    from fixedstate.ports import Port
    from fixedstate.runtime.ort import open_graph

    if weights is None and plan["weights"] is None:
        return None
    model = ir.from_proto(_proto(base64.b64decode(plan["model"])))
    for name, stored in _outside(model).items():
        if weights is not None:
            array = weights[name]
        else:
            raw = base64.b64decode(plan["weights"][name])
            array = np.frombuffer(raw, stored.dtype.numpy()).reshape(stored.shape.numpy())
        value = model.graph.initializers[name]
        value.const_value = ir.Tensor(array, name=name)
    ports = (tuple(map(Port.from_dict, plan[kind])) for kind in ("inputs", "outputs"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.onnx"
        ir.save(model, file)
        return open_graph(file, *ports, threads=1)


def _proto(content: bytes) -> Any:
    import onnx

    return onnx.ModelProto.FromString(content)


class Refitter:
    """``tensorrt.Refitter`` on an engine of :func:`plan_of`."""

    def __init__(self, engine: Any, logger: Any) -> None:
        if "refittable" not in engine.plan:
            logger.log(ERROR, "the engine is not refittable")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self.engine, self.logger = engine, logger
        self.given: dict[str, np.ndarray] = {}

    def get_all_weights(self) -> list[str]:
        return list(self.engine.plan["refittable"])

    def get_missing_weights(self) -> list[str]:
        return [name for name in self.get_all_weights() if name not in self.given]

    def refit_cuda_engine(self) -> bool:
        if self.get_missing_weights():
            self.logger.log(ERROR, "not all weights are set")
            return False
        for name, digest in self.engine.plan["refittable"].items():
            if _digest(self.given[name]) != digest:
                raise Unlike(f"{name} is not what the plan was built from")
        self.engine.session = session_of(self.engine.plan, self.given)
        return True


class OnnxParserRefitter:
    """``tensorrt.OnnxParserRefitter``: reads the weights of a graph file."""

    def __init__(self, refitter: Refitter, logger: Any) -> None:
        self.refitter, self.logger = refitter, logger
        self.errors: list[str] = []

    num_errors = property(lambda self: len(self.errors))

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: self.errors[index])

    def refit_from_file(self, path: str) -> bool:
        wanted = self.refitter.get_all_weights()
        found = _constants(ir.load(path))
        self.refitter.given |= {name: found[name] for name in wanted if name in found}
        given = len(self.refitter.given)
        if given < len(wanted):
            self.errors.append(f"Only successfully refitted {given} weights out of {len(wanted)}")
        return given == len(wanted)
