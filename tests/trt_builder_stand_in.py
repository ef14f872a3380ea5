"""F6: a stand-in for TensorRT's builder, as a module `tensorrt` that a build's own process imports.

It records every call and fails as it is told to. It reads the graph with onnx_ir, so that names and
types of ports and the number of plugin nodes are true; its plan is one of
:mod:`trt_plan_stand_in`, which the stand-in of the runtime computes.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trt_plan_stand_in import plan_of

VARIABLE = "TENSORRT_STAND_IN"
"""Environment variable that holds its settings as JSON; see :func:`install`."""


def install(monkeypatch: Any, folder: Path, **settings: Any) -> Path:
    """Make child processes import the stand-in as `tensorrt`; gives the file of its records.

    Args:
        monkeypatch: Pytest's.
        folder: Gets the module and the records.
        settings: `version`; `fail`, one of the failures in this file; `registry`, changes of what
            is registered.
    """
    package = folder / "packages" / "tensorrt"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(
        "import sys, trt_builder_stand_in as f6\nf6.fill(sys.modules[__name__])\n"
    )
    (package / "plugin.py").write_text(
        "import sys, trt_builder_stand_in as f6\nf6.fill_plugin(sys.modules[__name__])\n"
    )
    record = folder / "calls.jsonl"
    record.unlink(missing_ok=True)
    paths = [str(package.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(VARIABLE, json.dumps({"record": str(record), **settings}))
    return record


def calls(record: Path) -> list[tuple[str, Any]]:
    """Every call in order: its name and what was given."""
    return [tuple(json.loads(line)) for line in record.read_text().splitlines()]


# --- inside the child process --------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    return json.loads(os.environ[VARIABLE])


def _record(name: str, value: Any = None) -> None:
    with open(_settings()["record"], "a") as file:
        file.write(json.dumps([name, value]) + "\n")


def _fails(kind: str) -> bool:
    return _settings().get("fail") == kind


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3


class ILogger:
    Severity = Severity


class IProgressMonitor:
    pass


Flags = enum.IntEnum(
    "Flags", "TF32 STRICT_NANS REFIT REFIT_IDENTICAL STRIP_PLAN VERSION_COMPATIBLE"
)
Levels = enum.IntEnum("Levels", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
Types = enum.IntEnum("Types", "FLOAT HALF BF16 INT64")
_TYPES = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16", "INT64": "INT64"}

REGISTRY: list[Any] = []


class Builder:
    def __init__(self, log: ILogger) -> None:
        self.log = log
        _record("Builder")
        if _fails("no card"):
            log.log(Severity.ERROR, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")

    def create_network(self, flags: int) -> Network:
        _record("create_network", flags)
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        _record("build_serialized_network")
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        assert monitor.step_complete("Building engine", 0)
        if _fails("abort"):
            print("terminate called without an active exception", file=sys.stderr, flush=True)
            os.abort()
        if _fails("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if _fails("hang"):
            time.sleep(60)
        if _fails("memory"):
            raise MemoryError
        if _fails("exit"):
            os._exit(3)
        if _fails("builder"):
            self.log.log(Severity.ERROR, "Error Code 10: no implementation for node MatMul_7.")
            return None
        if _fails("silent"):
            return None
        if _fails("lean"):
            self.log.log(Severity.ERROR, "Unable to load library: libnvinfer_lean.so.11: no file")
            return None
        monitor.phase_finish("Building engine")
        if "STRIP_PLAN" in config.flags and not {"REFIT", "REFIT_IDENTICAL"} & config.flags:
            raise AssertionError("STRIP_PLAN without a way of refitting")
        return plan_of(network.model, config.profiles, "STRIP_PLAN" in config.flags)


class Network:
    def __init__(self) -> None:
        self.model: Any = None
        self.layers: list[Any] = []
        self.ports: dict[str, list[Any]] = {"input": [], "output": []}

    num_layers = property(lambda self: len(self.layers))
    num_inputs = property(lambda self: len(self.ports["input"]))
    num_outputs = property(lambda self: len(self.ports["output"]))

    def get_layer(self, index: int) -> Any:
        return self.layers[index]

    def get_input(self, index: int) -> Any:
        return self._port("input", index)

    def get_output(self, index: int) -> Any:
        return self._port("output", index)

    def _port(self, kind: str, index: int) -> Any:
        name, dtype, shape = self.ports[kind][index]
        return SimpleNamespace(name=name, dtype=Types[dtype], shape=tuple(shape))


class OnnxParser:
    def __init__(self, network: Network, log: ILogger) -> None:
        self.network, self.errors = network, []

    num_errors = property(lambda self: len(self.errors))

    def get_error(self, index: int) -> Any:
        return self.errors[index]

    def parse_from_file(self, path: str) -> bool:
        import onnx_ir as ir

        _record("parse_from_file", path)
        if _fails("parser"):
            self.errors = [
                _error("layers.0.scan", "Scan", "Assertion failed: scan axis must be 0"),
                _error("layers.1.pad", "Pad", "INVALID_NODE: pads are not constant"),
            ]
            return False
        if _fails("parser, no word"):
            return False
        self.network.model = model = ir.load(path)
        for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
            for value in values:
                shape = [dim if isinstance(dim, int) else -1 for dim in value.shape or ()]
                dtype = "FLOAT" if _fails("dtype") else _TYPES[value.dtype.name]
                self.network.ports[kind].append([value.name, dtype, shape])
        known = {one.name for one in REGISTRY}
        for node in model.graph:
            plugin = "plugin_namespace" in node.attributes and node.op_type in known
            kind = "PLUGIN_V3" if plugin and not _fails("passed over") else node.op_type.upper()
            self.network.layers.append(
                SimpleNamespace(name=node.name, type=SimpleNamespace(name=kind))
            )
        return True


def _error(node: str, op: str, text: str) -> Any:
    return SimpleNamespace(node_name=lambda: node, node_operator=lambda: op, desc=lambda: text)


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: Any) -> None:
        assert name not in self.shapes
        self.shapes[name] = shapes


class Config:
    progress_monitor: Any = None

    def __init__(self) -> None:
        self.profiles: list[Any] = []
        self.flags: set[str] = set()
        self.cache: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("profiles", "flags", "cache", "progress_monitor"):
            _record(name, getattr(value, "name", value))
        object.__setattr__(self, name, value)

    def set_flag(self, flag: Any) -> None:
        _record("set_flag", flag.name)
        self.flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        _record("clear_flag", flag.name)

    def add_optimization_profile(self, profile: Profile) -> int:
        _record("add_optimization_profile", profile.shapes)
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> Any:
        _record("create_timing_cache", len(data))
        return SimpleNamespace(serialize=lambda: data + b"times")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> None:
        _record("set_timing_cache", ignore_mismatch)
        self.cache = cache

    def get_timing_cache(self) -> Any:
        return self.cache


def fill(module: types.ModuleType) -> None:
    """Put into the module `tensorrt` what a build touches."""
    vars(module).update(
        __version__=_settings().get("version", "11.4.0.106"),
        ILogger=ILogger,
        IProgressMonitor=IProgressMonitor,
        Builder=Builder,
        OnnxParser=OnnxParser,
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
        BuilderFlag=Flags,
        ProfilingVerbosity=SimpleNamespace(DETAILED=SimpleNamespace(name="DETAILED")),
        HardwareCompatibilityLevel=Levels,
        DataType=Types,
        get_plugin_registry=lambda: SimpleNamespace(all_creators=list(REGISTRY)),
    )


def fill_plugin(module: types.ModuleType) -> None:
    """Put into the module `tensorrt.plugin` what registration touches."""

    def register(identity: str) -> Any:
        namespace, _, name = identity.partition("::")
        changes = _settings().get("registry", {})
        if changes.get("lacks") != name:
            REGISTRY.append(
                SimpleNamespace(
                    name=name,
                    plugin_version=changes.get("version", "1"),
                    plugin_namespace=changes.get("namespace", namespace),
                    field_names=[
                        SimpleNamespace(name=one) for one in changes.get("fields", ["block_len"])
                    ],
                )
            )
        return lambda function: function

    vars(module).update(
        op=SimpleNamespace(),
        register=register,
        autotune=lambda identity: lambda function: function,
        aot_impl=lambda identity: lambda function: function,
        KernelLaunchParams=object,
        TensorDesc=object,
        AutoTuneCombination=object,
        SymIntExprs=object,
    )
