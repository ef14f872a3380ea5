"""The only door to ONNX Runtime: opens graph files, picks the provider, binds memory."""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from fixedstate.bundle import WEIGHTS, Bundle, Graph
from fixedstate.errors import BackendError, BundleError, UsageError
from fixedstate.ports import Array, Port, numpy_dtype
from fixedstate.runtime.ortplaces import CPU, RECORD, check_places, places
from fixedstate.runtime.protobuf import replaced
from fixedstate.runtime.session import check_binding, check_names

PROVIDERS = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
}
"""ONNX Runtime's name of every provider that can be asked for."""

INSTALL = {
    "cuda": "install onnxruntime-gpu in place of onnxruntime",
    "tensorrt": "install onnxruntime-gpu in place of onnxruntime, and TensorRT",
    "tensorrt-rtx": "install onnxruntime-ep-nv-tensorrt-rtx-cu13 beside onnxruntime",
}
"""What brings a provider."""

OPTIMIZATIONS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""Levels of graph optimisation."""

EMBEDDING = "embedding.weight"
"""The weight whose rows graphs look up, in the weights file and in every graph."""

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}
_AS_BITS = {"bfloat16": 16, "float8_e4m3fn": 17}
"""Dtypes that numpy has no numbers of, and their TensorProto.DataType: arrays hold their bits."""

_TARGETS = {"cpu": "ort-cpu", "cuda": "ort-cuda"}
_SETTINGS = {
    # products in full float32, as elsewhere: prefix sums of the scans are products; and one choice
    # of kernels for a shape, made without timing them
    "cuda": {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"},
}
_SHARED = ("device_id", "has_user_compute_stream", "user_compute_stream")  # by all providers
_PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"  # module of the TensorRT-RTX provider's package
_STORED = {"F32": "float32", "F16": "float16"}
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_LOCATION = (7, 5, 13, 2)  # fields: graph, initializer, external_data, value
_ERRORS_ONLY = 3  # severity: warnings about providers are made into errors here

# The first session sets flush-to-zero for its thread, after which numpy finds no subnormals and
# warns when it first describes a float type: describe them before.
for _kind in (np.float16, np.float32, np.float64):
    np.finfo(_kind)


class OrtSession:
    """One graph in ONNX Runtime; see :class:`fixedstate.runtime.session.Session`."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: tuple[Port, ...],
        outputs: tuple[Port, ...],
        provider: str,
        embedding: ort.OrtValue | None = None,
    ) -> None:
        self._session = session
        self.inputs = inputs
        self.outputs = outputs
        self.provider = provider
        self._embedding = embedding  # the session reads it, and holds no reference

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> OrtBinding:
        """Bind arrays to every port, once; they are kept alive and read and written in place.

        On a device they are copied at every run: what stays there is bound by
        :mod:`fixedstate.runtime.ortdevice`.

        Raises:
            BackendError: for wrong names or dtypes, strided arrays, or shared memory.
        """
        check_names(self.inputs, inputs, "input")
        check_names(self.outputs, outputs, "output")
        check_binding(inputs, outputs)
        ports = (self.inputs, self.outputs)
        if self.provider == "cpu":
            return OrtBinding(self._session, inputs, outputs, ports, self._embedding)
        return OrtCopies(self._session, inputs, outputs, ports)

    @property
    def native(self) -> ort.InferenceSession:
        """ONNX Runtime's own session."""
        return self._session

    @property
    def places(self) -> dict[str, dict[str, int]]:
        """How often each operator runs on each provider, by ONNX Runtime's name of it.

        Empty for the CPU, and where this ONNX Runtime does not tell.
        """
        return {} if self.provider == "cpu" else places(self._session)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once on any arrays; strided ones are copied.

        Raises:
            BackendError: for wrong names or dtypes, or where the run fails.
        """
        check_names(self.inputs, feeds, "input")
        whole = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        return _run_once(self._session, whole, self.inputs, self.outputs)


def _run_once(
    session: ort.InferenceSession,
    feeds: Mapping[str, Array],
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
) -> dict[str, Array]:
    """Run on arrays, and give new ones.

    Raises:
        BackendError: where the run fails.
    """
    names = [port.name for port in outputs]
    try:
        if not any(port.dtype in _AS_BITS for port in (*inputs, *outputs)):
            return dict(zip(names, session.run(names, feeds), strict=True))
        values = {port.name: _on_array(feeds[port.name], port) for port in inputs}
        made = session.run_with_ort_values(names, values)
    except failures() as err:
        raise BackendError(f"ONNX Runtime failed in a run: {first_line(err)}") from err
    return {port.name: _copied(value, port) for port, value in zip(outputs, made, strict=True)}


def _on_array(array: Array, port: Port) -> ort.OrtValue:
    """An array as ONNX Runtime takes it, where it lies."""
    if port.dtype in _AS_BITS:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _AS_BITS[port.dtype])
    return ort.OrtValue.ortvalue_from_numpy(array)


def _copied(value: ort.OrtValue, port: Port) -> Array:
    """A value on the CPU as an array of its own."""
    if port.dtype not in _AS_BITS:
        array: Array = value.numpy()
        return array
    array = np.empty(value.shape(), numpy_dtype(port.dtype))
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


class OrtBinding:
    """Arrays bound to a session on the CPU: a run reads and writes them where they are."""

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        ports: tuple[tuple[Port, ...], tuple[Port, ...]],
        embedding: ort.OrtValue | None = None,
    ) -> None:
        self._session = session
        # alive as long as they are bound
        self._arrays = (dict(inputs), dict(outputs))
        self._embedding = embedding
        self._binding = session.io_binding()
        for port in ports[0]:
            self._binding.bind_ortvalue_input(port.name, _on_array(inputs[port.name], port))
        for port in ports[1]:
            self._binding.bind_ortvalue_output(port.name, _on_array(outputs[port.name], port))

    def run(self) -> None:
        """Run the graph on the bound arrays."""
        try:
            self._session.run_with_iobinding(self._binding)
        except failures() as err:
            raise BackendError(f"ONNX Runtime failed in a run: {first_line(err)}") from err


class OrtCopies(OrtBinding):
    """The same for a device: inputs travel there and outputs back at every run.

    For passes without state, where that is all there is to travel.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        ports: tuple[tuple[Port, ...], tuple[Port, ...]],
    ) -> None:
        self._session = session
        self._arrays = (dict(inputs), dict(outputs))
        self._ports = ports

    def run(self) -> None:
        """Run the graph and copy what comes out into the bound arrays."""
        inputs, outputs = self._arrays
        for name, value in _run_once(self._session, inputs, *self._ports).items():
            np.copyto(outputs[name], value)


def target_of(provider: str) -> str:
    """Which ``role@target`` copies of graphs are for a provider; empty where none are."""
    return _TARGETS.get(provider, "")


def open_sessions(
    bundle: Bundle,
    roles: tuple[str, ...],
    *,
    provider: str = "cpu",
    allow_fallback: bool = False,
    threads: int | None = None,
    optimization: str = "all",
    settings: Mapping[str, Mapping[str, str]] | None = None,
    device: int = 0,
) -> dict[str, OrtSession]:
    """Open the graphs of a bundle on one provider.

    Args:
        bundle: The bundle.
        roles: Roles to open; ``role@target`` copies are taken where the bundle has them.
        provider: A key of :data:`PROVIDERS`.
        allow_fallback: Take the CPU, for all of them, where the provider cannot be used.
        threads: Of a single pass; None for ONNX Runtime's choice.
        optimization: A key of :data:`OPTIMIZATIONS`.
        settings: Options of the provider by role, as it names them.
        device: Number of the card.

    Raises:
        BackendError: where provider, version or dtype cannot be served.
    """
    used = choose_provider(provider, allow_fallback)
    if used != "cpu":
        try:
            return {
                role: _open_role(
                    bundle,
                    role,
                    provider=used,
                    threads=threads,
                    optimization=optimization,
                    settings=(settings or {}).get(role, {}),
                    device=device,
                )
                for role in roles
            }
        except BackendError:
            if not allow_fallback:
                raise
    embedding = map_embedding(bundle.path / WEIGHTS)
    return {
        role: _open_role(
            bundle, role, threads=threads, optimization=optimization, embedding=embedding
        )
        for role in roles
    }


def choose_provider(name: str, allow_fallback: bool = False) -> str:
    """The provider to use, never another one in silence.

    Raises:
        UsageError: for a name that is none.
        BackendError: where this installation lacks it and no fallback is allowed.
    """
    if name not in PROVIDERS:
        raise UsageError(f"provider {name!r} is unknown; use one of {', '.join(PROVIDERS)}")
    available = ort.get_available_providers()
    if PROVIDERS[name] in available:
        return name
    why, remedy = "", INSTALL.get(name, "install another build")
    if name == "tensorrt-rtx":
        try:
            devices = _plugin_devices()
        except BackendError as err:
            why, remedy = f"; its plugin does not load: {err}", "check its package and the driver"
        else:
            if devices:
                return name
            if devices is not None:
                why, remedy = "; its plugin finds no card that it runs on", "use another provider"
    if allow_fallback:
        return "cpu"
    raise BackendError(
        f"provider {name!r} ({PROVIDERS[name]}) is not in this ONNX Runtime {ort.__version__}, "
        f"which has {', '.join(available)}{why}: {remedy}, or allow the fallback to the CPU"
    )


def _plugin_devices() -> list[Any] | None:
    """Cards that the TensorRT-RTX plugin runs on, registered once a process; None without it.

    Raises:
        BackendError: where its library cannot be loaded.
    """
    name = PROVIDERS["tensorrt-rtx"]
    found = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if found:
        return found
    try:
        plugin = importlib.import_module(_PLUGIN)
    except ImportError:
        return None
    try:
        ort.register_execution_provider_library(name, str(plugin.get_library_path()))
    except failures() as err:
        if "already registered" not in str(err):  # by somebody else, and finds no card
            raise BackendError(first_line(err)) from err
    return [device for device in ort.get_ep_devices() if device.ep_name == name]


def open_graph(
    path: str | os.PathLike[str],
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    *,
    provider: str = "cpu",
    threads: int | None = None,
    optimization: str = "all",
    embedding: ort.OrtValue | None = None,
    settings: Mapping[str, str] | None = None,
    device: int = 0,
    quantized: bool = False,
) -> OrtSession:
    """Open one graph file, its weights beside it, and check its ports.

    Args:
        path: The ONNX file; `weights.safetensors` is looked for in its folder.
        inputs: The ports it must have.
        outputs: The ports it must have.
        provider: A key of :data:`PROVIDERS`.
        threads: Of a single pass; None for ONNX Runtime's choice.
        optimization: A key of :data:`OPTIMIZATIONS`.
        embedding: What :func:`map_embedding` gave, where several sessions are to share it.
        settings: Options of the provider, as it names them.
        device: Number of the card.
        quantized: Whether it is a quantised bundle's.

    Raises:
        BackendError: where the file cannot be loaded as asked, or ONNX Runtime runs a part of it
            elsewhere than asked.
        BundleError: where its ports differ from those given.
    """
    used = choose_provider(provider)
    options = _options(threads, optimization)
    if used == "cpu":
        if embedding is not None:
            options.add_initializer(EMBEDDING, embedding)
        # products of one activation have a scale each: with one for all of them none is fused
        without = {"disabled_optimizers": ["ConstantSharing"]} if quantized else {}
        session = _create(Path(path), used, options, providers=[CPU], **without)
    else:
        options.add_session_config_entry(RECORD, "1")
        given = {"device_id": str(device), **(settings or {})}
        session = _create(Path(path), used, options, **_on_device(used, options, given, device))
        check_places(Path(path), session, used)
    _check_ports(Path(path), session, inputs, outputs)
    return OrtSession(session, inputs, outputs, used, embedding)


def _open_role(bundle: Bundle, role: str, *, provider: str = "cpu", **rest: Any) -> OrtSession:
    graph = bundle.graph(role, target_of(provider))
    if provider == "cpu" and "bfloat16" in (bundle.precision.io, bundle.precision.kv):
        raise BackendError(
            f"{bundle.path} is bf16 and ONNX Runtime's CPU provider has no bf16 kernels: use an "
            "fp32 bundle on the CPU, or a GPU provider"
        )
    check_version(graph, ort.__version__)
    path = bundle.path / graph.file
    rest["quantized"] = bundle.is_quantized
    return open_graph(path, graph.inputs, graph.outputs, provider=provider, **rest)


def check_version(graph: Graph, installed: str) -> None:
    """Refuse a graph that needs a newer ONNX Runtime than the installed one.

    Raises:
        BackendError: naming both versions and what to change.
    """
    if _numbers(installed) < _numbers(graph.min_onnxruntime):
        raise BackendError(
            f"graph {graph.file} needs ONNX Runtime {graph.min_onnxruntime} or newer, installed is "
            f"{installed}: install onnxruntime>={graph.min_onnxruntime}, or export the bundle "
            "again for the older one"
        )


def _numbers(version: str) -> tuple[int, ...]:
    found = [re.match(r"\d*", part) for part in version.split(".")]
    parts = [int(match[0] or 0) for match in found if match]
    return tuple((parts + [0, 0, 0])[:3])


def _options(threads: int | None, optimization: str) -> ort.SessionOptions:
    if optimization not in OPTIMIZATIONS:
        raise UsageError(
            f"optimization {optimization!r} is unknown; use one of {', '.join(OPTIMIZATIONS)}"
        )
    if threads is not None and (isinstance(threads, bool) or threads < 1):
        raise UsageError(f"threads must be 1 or more; got {threads}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.graph_optimization_level = OPTIMIZATIONS[optimization]
    options.log_severity_level = _ERRORS_ONLY
    # A pattern is memory of its own for every shape that comes, and saves no time here. The arena
    # stays on: without it passes are slower, and memory goes on growing as batches vary.
    options.enable_mem_pattern = False
    # Denormals make a mostly empty cache several times slower. Effective in the calling thread
    # only if the first session of the process asks for it.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    # Between passes the loop computes; spinning threads would take its cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Four-bit weights are multiplied with the activations as they are; by default those would be
    # rounded to eight bits, which nobody asked for.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return options


def _create(
    path: Path, provider: str, options: ort.SessionOptions, **where: Any
) -> ort.InferenceSession:
    """A session on a provider and no other; `where` says so to ONNX Runtime."""
    try:
        # with its fallback it would print, take the CPU and say nothing
        session = ort.InferenceSession(_source(path, options), options, enable_fallback=0, **where)
    except failures() as err:
        raise BackendError(_load_error(path, provider, err)) from err
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise BackendError(
            f"provider {provider!r} ({PROVIDERS[provider]}) could not start and ONNX Runtime "
            f"took {session.get_providers()[0]}: check its libraries, or allow the fallback to "
            "the CPU"
        )
    return session


def _on_device(
    provider: str, options: ort.SessionOptions, settings: dict[str, str], device: int
) -> dict[str, Any]:
    """How a session is told to run on a card; changes the options where that is the way."""
    available = ort.get_available_providers()
    if PROVIDERS[provider] not in available:  # a plugin, chosen by its device
        del settings["device_id"]
        devices = _plugin_devices() or []
        if device >= len(devices):
            raise BackendError(
                f"card {device} was asked for; provider {provider!r} finds {len(devices)} "
                "(numbered from 0)"
            )
        options.add_provider_for_devices([devices[device]], settings)
        return {}
    names: list[Any] = [(PROVIDERS[provider], {**_SETTINGS.get(provider, {}), **settings})]
    if provider == "tensorrt" and PROVIDERS["cuda"] in available:  # for what TensorRT does not take
        shared = {key: settings[key] for key in _SHARED if key in settings}
        names.append((PROVIDERS["cuda"], {**_SETTINGS["cuda"], **shared}))
    return {"providers": [*names, CPU]}


def _source(path: Path, options: ort.SessionOptions) -> str | bytes:
    """The path of the graph, or its bytes where its weights resolve to another place.

    ONNX Runtime maps weights beside the resolved graph file only; links of hub caches and of
    mounted maps lead elsewhere. There it is told the folder and name that they resolve to: handed
    over as memory, they would be copied.
    """
    graph = path.resolve()
    if not graph.is_file():
        raise BundleError(f"{path} is missing: the bundle is incomplete, copy it whole")
    weights = (path.parent / WEIGHTS).resolve()
    if not weights.is_file() or weights == graph.parent / WEIGHTS:
        return str(graph)
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(weights.parent))
    return replaced(graph.read_bytes(), _LOCATION, WEIGHTS.encode(), weights.name.encode())


def map_embedding(weights: Path) -> ort.OrtValue | None:
    """The embedding where it lies in the weights file, mapped once for any number of sessions.

    ONNX Runtime repacks the weights of products and lets go of what it mapped for them. Rows of
    the embedding are looked up, so that its pages stay: shared, they are in memory once.

    Args:
        weights: The file; safetensors.

    Returns:
        None where the file holds no tensor of that name, or one that numpy has no type for.

    Raises:
        BundleError: where the file is damaged.
    """
    try:
        with weights.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size)).get(EMBEDDING)
            if entry is None or entry["dtype"] not in _STORED:
                return None
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first, end = entry["data_offsets"]
        dtype = np.dtype(_STORED[entry["dtype"]])
        table = np.frombuffer(view, dtype, (end - first) // dtype.itemsize, 8 + size + first)
        return ort.OrtValue.ortvalue_from_numpy(table.reshape(entry["shape"]))
    except (ValueError, KeyError, TypeError, OSError) as err:
        raise BundleError(f"{weights} is damaged ({err}): copy the bundle again") from err


def failures() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises."""
    state = ort.capi.onnxruntime_pybind11_state
    names = (
        "EngineError EPFail Fail InvalidArgument InvalidGraph InvalidProtobuf ModelLoaded "
        "NoModel NoSuchFile NotImplemented RuntimeException"
    )
    found = [getattr(state, name) for name in names.split() if hasattr(state, name)]
    return (*found, RuntimeError, ValueError)


def first_line(err: Exception) -> str:
    """What ONNX Runtime says, without its error code, its source file and the path."""
    text = " ".join(str(err).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from \S* ?failed: ?", "", text)
    return re.sub(r"^\S*:\d+ .*?\) ", "", text)[:300]


def _load_error(path: Path, provider: str, err: Exception) -> str:
    text = first_line(err)
    lower = text.lower()
    remedy = "export the bundle again"
    if "ir version" in lower or "ir_version" in lower or "opset" in lower:
        remedy = (
            "the file is newer than this ONNX Runtime: install a newer onnxruntime, or export the "
            "bundle again with this version of fixedstate (opset 21, IR 10)"
        )
    elif "not_implemented" in lower or "could not find an implementation" in lower:
        remedy = f"provider {provider!r} has no kernel for it: use an fp32 bundle"
    return f"ONNX Runtime {ort.__version__} cannot load {path}: {text}: {remedy}"


def _check_ports(
    path: Path,
    session: ort.InferenceSession,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
) -> None:
    """The manifest and the graph must never disagree about a port."""
    for kind, found, wanted in (
        ("inputs", session.get_inputs(), inputs),
        ("outputs", session.get_outputs(), outputs),
    ):
        has = {item.name: _describe(item) for item in found}
        needs = {port.name: (port.dtype, len(port.shape)) for port in wanted}
        if has != needs:
            wrong = sorted(
                name for name in has.keys() | needs.keys() if has.get(name) != needs.get(name)
            )
            raise BundleError(
                f"{path}: the graph's {kind} differ from bundle.json in {wrong}: export again"
            )


def _describe(item: Any) -> tuple[str, int]:
    return _DTYPES.get(item.type, str(item.type)), len(item.shape)
