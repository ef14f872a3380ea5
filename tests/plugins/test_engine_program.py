"""The program for a machine with TensorRT (tests/gpu/engine.py), as far as it goes without one.

Its building half runs on TensorRT-RTX's real builder, which needs no card. Its running half meets
a stand-in for the runtime, whose "engine" is a numpy function over the memory of the driver's
stand-in; the names it uses are looked up in the real package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cuda_stand_in import StandIn

from fixedstate.bundle import Graph
from fixedstate.plugins import driver as door
from fixedstate.plugins import library as plugin_library
from fixedstate.ports import Port

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

import engine

rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX")
pytestmark = pytest.mark.trt

GRAPH = Graph(
    "commit",
    "commit.onnx",
    "",
    "1.23",
    (
        Port("input_ids", "int64", ("B", "4n")),
        Port("past_a", "float16", ("B", 6)),
        Port("past_length", "int64", ("B",)),
        Port("commit_length", "int64", ("B",)),
    ),
    (Port("present_a", "float16", ("B", 6)), Port("last_logits", "float16", ("B", 4))),
)


def computed(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the graph of this test computes."""
    return {
        "present_a": (inputs["past_a"] + inputs["commit_length"][:, None]).astype(np.float16),
        "last_logits": (inputs["input_ids"][:, :4] / 7).astype(np.float16),
    }


class Runtime:
    """A stand-in for the runtime: engines are names of graphs."""

    def __init__(self, log: Any) -> None:
        self.log = log

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        return None if plan == b"bad" else SimpleNamespace(create_execution_context=lambda: self)

    def begin(self, library: StandIn, error: float) -> Any:
        self.library, self.error = library, error
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        return self

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return shape[0] < 9

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def _array(self, port: Port, shape: tuple[int, ...]) -> np.ndarray:
        nbytes = np.dtype(port.dtype).itemsize * int(np.prod(shape))
        view = self.library.view(self.addresses[port.name], nbytes)
        return view.view(port.dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        def work() -> None:
            inputs = {port.name: self._array(port, self.shapes[port.name]) for port in GRAPH.inputs}
            for name, value in computed(inputs).items():
                port = next(port for port in GRAPH.outputs if port.name == name)
                self._array(port, value.shape)[:] = value * np.float16(1 + self.error)

        self.library._put(stream, work)
        return True


def stand_in(library: StandIn, error: float = 0.0) -> Any:
    return SimpleNamespace(
        __version__="0", ILogger=rtx.ILogger, Runtime=lambda log: Runtime(log).begin(library, error)
    )


@pytest.fixture
def library():
    return StandIn()


def test_names_are_those_of_the_package():
    """What the stand-in has, the real runtime has as well."""
    for kind, names in {
        rtx.Runtime: ["deserialize_cuda_engine"],
        rtx.ICudaEngine: ["create_execution_context"],
        rtx.IExecutionContext: ["set_input_shape", "set_tensor_address", "execute_async_v3"],
    }.items():
        assert [name for name in names if not hasattr(kind, name)] == []


def test_inputs_are_one_committed_block():
    made = engine.inputs_of(GRAPH, vocabulary=9, rows=3)
    assert made["input_ids"].shape == (3, 4)
    assert made["input_ids"].max() < 9
    assert (made["commit_length"] == 4).all()
    assert (made["past_length"] == engine.COLUMNS // 2).all()
    assert made["past_a"].dtype == np.float16


def test_run_gives_outputs_and_times(library):
    inputs = engine.inputs_of(GRAPH, 9, 3)
    trt = stand_in(library)
    with door.Driver(library=library) as driver:
        outputs, times = engine.run(trt, None, driver, b"plan", GRAPH, inputs)
        assert driver.allocated == 0
    expected = computed(inputs)
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value)
    assert times["graph_nodes"] == 1
    assert times["graph_us"] > 0
    assert "graph_error" not in times


def test_run_says_what_the_runtime_refused(library):
    trt = stand_in(library)
    with door.Driver(library=library) as driver:
        with pytest.raises(RuntimeError, match="did not open"):
            engine.run(trt, None, driver, b"bad", GRAPH, engine.inputs_of(GRAPH, 9, 3))
        with pytest.raises(RuntimeError, match="refused input_ids of shape"):
            engine.run(trt, None, driver, b"plan", GRAPH, engine.inputs_of(GRAPH, 9, 9))
        library.lost = 0
        inputs = engine.inputs_of(GRAPH, 9, 3)
        _, times = engine.run(trt, None, driver, b"plan", GRAPH, inputs)
        assert times["graph_error"].startswith("as a CUDA graph, ")


def test_difference():
    one = {"a": np.array([1.0, 2.0]), "b": np.array([0.5])}
    assert engine.difference(one, one)[0] == 0.0
    assert engine.difference({**one, "a": np.array([1.0, 2.5])}, one) == (0.25, "a")
    assert engine.difference({**one, "b": np.array([np.nan])}, one) == (float("inf"), "b")


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_whole_program(monkeypatch, tmp_path, library, error, capsys):
    """Engines with and without plugins are compared, and what differs is the exit code."""
    count = iter([0, 0, 3, 3])
    built = []

    def build(trt, log, graph, folder, lean, cardless):
        built.append(trt)
        return b"plan", {"plugin_layers": next(count), "layers": 9}

    bundle = SimpleNamespace(
        precision=SimpleNamespace(io="float16"),
        path=tmp_path,
        spec=SimpleNamespace(vocab_rows=9),
        graph=lambda role: GRAPH,
    )
    engines = iter([0.0, error] * 4)
    trt = stand_in(library)
    trt.Runtime = lambda log: Runtime(log).begin(library, next(engines))
    monkeypatch.setattr(engine, "build", build)
    monkeypatch.setattr(engine, "product", lambda name, plugins: trt)
    monkeypatch.setattr("fixedstate.bundle.Bundle.open", lambda path: bundle)
    monkeypatch.setattr(plugin_library, "refusals", list)
    monkeypatch.setattr(door, "_open", lambda: library)
    out = tmp_path / "engine.json"
    code = engine.main([str(tmp_path), "--out", str(out), "--save", str(tmp_path / "plans")])
    results = json.loads(out.read_text())
    assert results["card"] == "a stand-in without a card"
    assert len(built) == len(results["engines"]) == 4
    assert sorted(file.name for file in (tmp_path / "plans").iterdir()) == [
        f"{role}-{kind}.plan" for role in ("commit", "denoise") for kind in ("bodies", "plugins")
    ]
    assert len(results["runs"]) == 8
    assert len(results["differences"]) == 4
    assert code == (1 if error else 0)
    assert len(results["problems"]) == (4 if error else 0)
    if error:
        assert "denoise, 1 rows: " in results["problems"][0]
        assert "differs by 0.1" in results["problems"][0]
    assert capsys.readouterr().out.startswith("{")


def test_what_is_missing_is_a_problem(tmp_path):
    out = tmp_path / "engine.json"
    assert engine.main([str(tmp_path / "none"), "--out", str(out)]) == 1
    assert "BundleError" in json.loads(out.read_text())["problems"][0]


def test_build_by_the_real_builder(tmp_path):
    """One profile with the symbols' ranges, strongly typed; a graph that is refused says why."""
    ids = ir.Value(
        name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["B", 4])
    )
    node = ir.node("Cast", [ids], attributes={"to": ir.DataType.FLOAT16})
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    model = ir.Model(
        ir.Graph([ids], node.outputs, nodes=[node], opset_imports={"": 21}, name="g"), ir_version=10
    )
    ir.save(model, tmp_path / "denoise.onnx")
    graph = Graph(
        "denoise", "denoise.onnx", "", "1.23", (Port("input_ids", "int64", ("B", 4)),), ()
    )
    messages: list[str] = []
    log = engine.logger(rtx, messages)
    plan, entry = engine.build(rtx, log, graph, tmp_path, False, True)
    assert entry["plugin_layers"] == 0
    assert entry["layers"] >= 1
    assert entry["engine_bytes"] == len(plan) > 0
    (tmp_path / "denoise.onnx").write_bytes(b"no graph")
    with pytest.raises(RuntimeError, match=r"the parser refused denoise\.onnx"):
        engine.build(rtx, log, graph, tmp_path, False, True)
    assert any(text.startswith("ERROR") for text in messages)
