"""A stand-in for TensorRT's runtime, and for the CUDA driver under it, that enforces the contract.

A plan of it is a line of JSON that names a bundle's graph, which ONNX Runtime computes, so that
numbers are real. Device memory is host memory of :mod:`cuda_stand_in`. It is stricter than the
real ones where they would be silent:

- work of a stream happens when somebody waits for it, not when it is put in;
- while a stream is captured nothing may allocate, wait or copy at once;
- a context runs only with every address and shape set, each inside the profile and aligned, and
  none of them may ever be set to something else;
- the first run after shapes were set cannot be captured, as TensorRT then does what it put off;
- no output may lie over an input or another output, but where the plan declares it;
- a context is used by one thread at a time, and its inner memory holds garbage after every run.

It cannot show what TensorRT really computes, how long that takes, or what a card does.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_stand_in
import numpy as np
import trt_plan_stand_in
from cuda_stand_in import Fault, from_bits, to_bits
from sample_engine import CHECK, identity_of, precision_of

from fixedstate.bundle import Bundle
from fixedstate.ports import DTYPES, Port, numpy_dtype
from fixedstate.runtime import devicememory, trt
from fixedstate.runtime.enginefile import EngineFolder, Plan, plan_ports, write_engine
from fixedstate.runtime.identity import os_text
from fixedstate.runtime.ort import open_graph
from fixedstate.state import StateSpec

INNER = 4096
"""Bytes that a context takes inside."""

CAPABILITY = "12.0"
CARD = "a stand-in without a card"
VERSION = "1.7.1.116"


class Broken(AssertionError):
    """What the runtime's contract forbids was done."""


# --- the driver ----------------------------------------------------------------------------------


class Cuda(cuda_stand_in.StandIn):
    """The stand-in of the driver with late streams, pinned memory and 2-D copies.

    Attributes:
        to_host: Bytes that copies brought to the host.
        to_device: Bytes that copies brought to the device.
        captures: Captures that ended well.
        pinned: Pinned memory by address.
    """

    def __init__(self, capability: tuple[int, int] = (12, 0)) -> None:
        self.capability = capability
        self.to_host = self.to_device = self.captures = 0
        self.pinned: dict[int, Any] = {}
        self._queue: list[Callable[[], None]] = []
        self._running = threading.RLock()
        super().__init__()
        for name, types in devicememory.SIGNATURES.items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, prototype(self._answered(getattr(self, f"_{name}"))))

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        out[0] = {38: 1 << 16, 16: 2, 75: self.capability[0], 76: self.capability[1]}[attribute]

    def _put(self, stream: int | None, action: Callable[[], None]) -> None:
        if not stream:
            raise Fault(1)  # an engine puts nothing into the default stream
        self._get(stream, list)
        if stream in self._capturing:
            self._capturing[stream].append(action)
        else:
            self._queue.append(action)

    def put(self, stream: int, action: Callable[[], None]) -> bool:
        """Put work into a stream; whether it is being captured."""
        self._put(stream, action)
        return stream in self._capturing

    def flush(self) -> None:
        """Do everything that was put in so far."""
        if self._capturing:
            raise Fault(900)
        with self._running:
            while self._queue:
                self._queue.pop(0)()

    def _cuGraphLaunch(self, executable: int, stream: int | None) -> None:
        kind, actions, _ = self._get(executable, tuple)
        if kind != "executable" or stream in self._capturing:
            raise Fault(400)
        self._queue += actions

    def _cuStreamEndCapture(self, stream: int, out: Any) -> None:
        super()._cuStreamEndCapture(stream, out)
        self.captures += 1

    def _cuStreamSynchronize(self, stream: int | None) -> None:
        self.flush()

    def _cuCtxSynchronize(self) -> None:
        self.flush()

    def _cuMemAlloc_v2(self, out: Any, nbytes: int) -> None:
        if self._capturing:
            raise Fault(900)
        super()._cuMemAlloc_v2(out, nbytes)
        self.view(out[0], nbytes)[:] = 0xFF  # nobody may count on zeros

    def _cuMemFree_v2(self, address: int) -> None:
        if self._capturing or self._queue:
            raise Fault(900)  # something may still read it
        super()._cuMemFree_v2(address)

    def _cuMemcpyHtoD_v2(self, target: int, source: int, nbytes: int) -> None:
        self.flush()
        super()._cuMemcpyHtoD_v2(target, source, nbytes)

    def _cuMemcpyDtoH_v2(self, target: int, source: int, nbytes: int) -> None:
        self.flush()
        super()._cuMemcpyDtoH_v2(target, source, nbytes)

    def _cuMemsetD8_v2(self, address: int, byte: int, nbytes: int) -> None:
        self.flush()
        super()._cuMemsetD8_v2(address, byte, nbytes)

    def _cuMemHostAlloc(self, out: Any, nbytes: int, flags: int) -> None:
        if self._capturing:
            raise Fault(900)
        block = (ctypes.c_ubyte * nbytes)()
        self.pinned[ctypes.addressof(block)] = block
        out[0] = ctypes.addressof(block)

    def _cuMemFreeHost(self, address: int) -> None:
        if self._queue or self.pinned.pop(address, None) is None:
            raise Fault(1)

    def _is_pinned(self, address: int, nbytes: int) -> None:
        if not any(a <= address and address + nbytes <= a + len(b) for a, b in self.pinned.items()):
            raise Fault(700)

    def _cuMemcpyHtoDAsync_v2(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._is_pinned(source, nbytes)
        self.to_device += nbytes
        self._put(stream, lambda: ctypes.memmove(self._at(target, nbytes), source, nbytes))

    def _cuMemcpyDtoHAsync_v2(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._is_pinned(target, nbytes)
        self.to_host += nbytes
        self._put(stream, lambda: ctypes.memmove(target, self._at(source, nbytes), nbytes))

    def _cuMemsetD8Async(self, address: int, byte: int, nbytes: int, stream: Any) -> None:
        self._put(stream, lambda: self.view(address, nbytes).__setitem__(slice(None), byte))

    def _at(self, address: int, nbytes: int) -> int:
        """An address, once it is known to be inside one allocation."""
        self.view(address, nbytes)
        return address

    def _cuMemcpy2DAsync_v2(self, order: Any, stream: Any) -> None:
        one = order[0]
        places, width, lines = [], one.WidthInBytes, one.Height
        for side in ("src", "dst"):
            on_host = getattr(one, f"{side}MemoryType") == 1
            pitch = getattr(one, f"{side}Pitch")
            if pitch < width:
                raise Fault(1)
            base = getattr(one, f"{side}Host" if on_host else f"{side}Device")
            if not on_host:
                self._at(base, (lines - 1) * pitch + width)
            places.append((base, pitch))
        (source, come), (target, go) = places

        def copy() -> None:
            for line in range(lines):
                ctypes.memmove(target + line * go, source + line * come, width)

        self._put(stream, copy)


# --- the runtime ---------------------------------------------------------------------------------


class Mode(Enum):
    INPUT = 1
    OUTPUT = 2


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        pass


DataType = Enum("DataType", ["FLOAT", "HALF", "BF16", "INT8", "UINT8", "INT32", "INT64", "BOOL"])
Location = Enum("Location", ["DEVICE", "HOST"])
Strategy = Enum("Strategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])
Specialization = Enum("Specialization", ["LAZY", "EAGER", "NONE"])
TYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "bfloat16": DataType.BF16,
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int64": DataType.INT64,
    "bool": DataType.BOOL,
}


class Registry:
    """Where plugins are registered."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.all_creators: list[Any] = []
        self.brings: dict[str, list[Any]] = {}

    def load_library(self, path: str) -> object | None:
        self._product.events.append(f"library {Path(path).name}")
        if Path(path).name not in self.brings:
            return None
        self.all_creators += self.brings[Path(path).name]
        return object()


def creator(name: str, version: str = "1", namespace: str = "fixedstate") -> Any:
    return SimpleNamespace(name=name, plugin_version=version, plugin_namespace=namespace)


class Product:
    """The Python module.

    Attributes:
        events: What was loaded, in order.
        alter: Changes the content of a plan as it is loaded.
        contexts: Every execution context that was made.
        slow: Seconds that a run takes, for threads to meet.
        capturable: What contexts say about it.
        fails: Whether runs are refused.
    """

    ILogger = ILogger
    ExecutionContextAllocationStrategy = Strategy
    DynamicShapesKernelSpecializationStrategy = Specialization
    Refitter = trt_plan_stand_in.Refitter
    OnnxParserRefitter = trt_plan_stand_in.OnnxParserRefitter

    def __init__(self, cuda: Cuda, version: str = VERSION) -> None:
        self.cuda = cuda
        self.__version__ = version
        self.events: list[str] = []
        self.contexts: list[Context] = []
        self.alter: Callable[[dict[str, Any]], None] = lambda plan: None
        self.slow = 0.0
        self.capturable = True
        self.fails = False
        self.registry = Registry(self)

    def get_plugin_registry(self) -> Registry:
        return self.registry

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self, logger)


class Runtime:
    def __init__(self, product: Product, logger: Any) -> None:
        self._product, self._logger = product, logger

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        self._product.events.append("deserialize")
        try:
            plan = json.loads(content)
        except ValueError:
            self._logger.log(Severity.ERROR, "the plan's magic tag does not match")
            return None
        self._product.alter(plan)
        return Engine(self._product, self._logger, plan)


class Config:
    """RuntimeConfig of TensorRT-RTX."""

    def __init__(self) -> None:
        self.strategy: Any = Strategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy: Any = Specialization.LAZY
        self.cache: Cache | None = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True


class Cache:
    def __init__(self) -> None:
        self.content = b"nothing"

    def deserialize(self, content: bytes) -> bool:
        self.content = content
        return True

    def serialize(self) -> bytes:
        return self.content + b"+"


class Engine:
    device_memory_size_v2 = INNER

    def __init__(self, product: Product, logger: Any, plan: dict[str, Any]) -> None:
        self.product, self.logger, self.plan = product, logger, plan
        self.inputs = tuple(map(Port.from_dict, plan["inputs"]))
        self.outputs = tuple(map(Port.from_dict, plan["outputs"]))
        self.ports = {port.name: port for port in (*self.inputs, *self.outputs)}
        self.profiles = plan["profiles"]
        self.aliases = plan["aliases"]
        self.graph_ports = self.ports
        if "model" in plan:  # of the builder's stand-in
            self.session = trt_plan_stand_in.session_of(plan, None)
            return
        graph = [tuple(map(Port.from_dict, plan[f"graph_{kind}"])) for kind in ("in", "out")]
        self.graph_ports = {port.name: port for ports in graph for port in ports}
        self.session = open_graph(plan["graph"], *graph, threads=1)

    @property
    def num_io_tensors(self) -> int:
        return len(self.ports)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.ports)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if self.ports[name] in self.inputs else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return TYPES[self.ports[name].dtype]

    def get_tensor_location(self, name: str) -> Any:
        return Location[self.plan.get("locations", {}).get(name, "DEVICE")]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(dim, str) else dim for dim in self.ports[name].shape)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[Sequence[int]]:
        return list(self.profiles[index][name])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, how: Any) -> Context:
        made = Context(self, how.strategy if isinstance(how, Config) else how)
        self.product.contexts.append(made)
        return made


class Context:
    """One execution context, as it has to be used."""

    def __init__(self, engine: Engine, strategy: Any) -> None:
        self.engine = engine
        self.strategy = strategy
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.profile = -1
        self.runs = 0
        self._inner = (0, 0)
        self._used = threading.Lock()

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % 256 or size < INNER:
            raise Broken(f"inner memory {memory:#x} of {size} bytes")
        self._inner = (memory, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if self.shapes:
            raise Broken("the profile was changed after shapes were set")
        self.profile = index
        return 0 <= index < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        shape = tuple(shape)
        if self.shapes.setdefault(name, shape) != shape:
            raise Broken(f"{name} got another shape")
        if name not in self.engine.profiles[self.profile]:
            return shape == self.engine.ports[name].shape
        least, _, most = self.engine.profiles[self.profile][name]
        return all(a <= size <= b for a, size, b in zip(least, shape, most, strict=True))

    def infer_shapes(self) -> list[str]:
        return [port.name for port in self.engine.inputs if port.name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.shapes:
            return self.shapes[name]
        return self.engine.ports[name].resolve(**self._sizes())

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for port in self.engine.inputs:
            for dim, size in zip(port.shape, self.shapes[port.name], strict=True):
                if isinstance(dim, str):
                    found = size // int(dim[:-1] or 1)
                    if sizes.setdefault(dim[-1], found) != found:
                        raise Broken(f"{dim[-1]} is {found} and {sizes[dim[-1]]}")
        return sizes

    def set_tensor_address(self, name: str, address: int) -> bool:
        if self.addresses.setdefault(name, address) != address:
            raise Broken(f"{name} was bound to another address")
        return name in self.engine.ports and address % 256 == 0 and address > 0

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.product.capturable

    def execute_async_v3(self, stream: int) -> bool:
        if not self._used.acquire(blocking=False):
            raise Broken("two threads use one execution context")
        try:
            time.sleep(self.engine.product.slow)
            return self._execute(stream)
        finally:
            self._used.release()

    def _execute(self, stream: int) -> bool:
        engine = self.engine
        if engine.product.fails:
            engine.logger.log(Severity.ERROR, "CUDA failure 700: an illegal memory access")
            return False
        if engine.session is None:
            raise Broken("a run of a plan that has no weights")
        unset = [name for name in engine.ports if name not in self.addresses]
        if unset or self.infer_shapes():
            raise Broken(f"a run without {unset or self.infer_shapes()}")
        if self.strategy is Strategy.USER_MANAGED and not self._inner[0]:
            raise Broken("a run without inner memory")
        self._check_overlaps()
        captured = engine.product.cuda.put(stream, self._compute)
        if captured and not self.runs:
            engine.logger.log(Severity.ERROR, "deferred updates in a capture")
            return False
        self.runs += 1
        return True

    def _spans(self, ports: Sequence[Port]) -> list[tuple[str, int, int]]:
        found = []
        for port in ports:
            size = prod(self.get_tensor_shape(port.name)) * DTYPES[port.dtype]
            found.append((port.name, self.addresses[port.name], self.addresses[port.name] + size))
        return found

    def _check_overlaps(self) -> None:
        outputs = self._spans(self.engine.outputs)
        for name, begin, end in outputs:
            for other, first, last in (*self._spans(self.engine.inputs), *outputs):
                declared = self.engine.aliases.get(name) == other
                if other != name and not declared and begin < last and first < end:
                    raise Broken(f"output {name} lies over {other}")
                if declared and begin != first:
                    raise Broken(f"{name} is to update {other} and lies elsewhere")

    def _array(self, port: Port) -> np.ndarray:
        shape = self.get_tensor_shape(port.name)
        dtype = numpy_dtype(port.dtype)
        nbytes = prod(shape) * dtype.itemsize
        raw = self.engine.product.cuda.view(self.addresses[port.name], nbytes)
        return raw.view(dtype).reshape(shape)

    def _compute(self) -> None:
        engine = self.engine
        feeds = {}
        for port in engine.inputs:
            wanted = engine.graph_ports[port.name].dtype
            values = from_bits(self._array(port), port.dtype)
            feeds[port.name] = np.array(values, numpy_dtype(wanted))
        with np.errstate(all="ignore"):
            found = engine.session.run(feeds)
        for port in engine.outputs:
            made = to_bits(found[port.name], port.dtype)
            target = self._array(port)
            if made.shape == target.shape:
                target[...] = made
                continue
            width = made.shape[2]  # columns that are written where they belong
            for row, start in enumerate(feeds["past_length"].tolist()):
                target[row, :, start : start + width] = made[row]
        if self._inner[0]:
            engine.product.cuda.view(*self._inner)[:] = 0xFF


# --- a card that is none --------------------------------------------------------------------------


class Bench:
    """Opens engines on a card of its own; in the end everything on it has to be given back.

    Attributes:
        cuda: The driver.
        product: The Python module.
        opened: What :meth:`open` gave.
    """

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.product = Product(self.cuda)
        self.opened: list[Any] = []

    def open(self, engine: EngineFolder | Path, **options: Any) -> Any:
        """An engine; it is closed in the end, if it was not before."""
        made = trt.open_engine(engine, module=self.product, cuda=self.cuda, **options)
        self.opened.append(made)
        return made

    def use(self, monkeypatch: Any) -> None:
        """Let the package find this card; what it opens it has to close."""
        opened = trt.open_engine
        sides = {"module": self.product, "cuda": self.cuda}
        monkeypatch.setattr(trt, "open_engine", lambda folder, **o: opened(folder, **sides, **o))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for engine in self.opened:
            engine.close()
            engine.close()  # does nothing
        if error is None:
            assert not self.cuda.allocations
            assert not self.cuda.pinned


# --- engines of it -------------------------------------------------------------------------------


def write_stand_in_engine(
    folder: Path,
    bundle: Bundle,
    roles: Sequence[str],
    *,
    precision: str = "fp32",
    rows: int = 4,
    least_rows: int = 1,
    blocks: int = 8,
    columns: tuple[int, int, int] = (256, 512, 4096),
    aliases: Mapping[str, Mapping[str, str]] | None = None,
    **changes: Any,
) -> EngineFolder:
    """An engine folder with plans that :class:`Product` loads.

    Args:
        folder: To be made.
        bundle: What it is of; its graphs compute the plans.
        roles: Of the plans.
        precision: Of the ports; bf16 is rounded between fp32 graphs.
        rows: Most rows.
        least_rows: Fewest and usual rows.
        blocks: Most blocks of a commit.
        columns: Least, usual and most columns of keys and values, or tokens of whole sequences.
        aliases: Pairs that share memory, by role.
        changes: Of the identity.
    """
    folder.mkdir(parents=True)
    length = bundle.spec.block_len
    state = StateSpec.of(bundle.spec, precision_of(precision))
    plans, profiles = [], {}
    for role in roles:
        graph = bundle.graph(role, "ort-cpu")
        pairs = dict((aliases or {}).get(role, {}))
        inputs, outputs = plan_ports(bundle.spec, state, role, pairs, graph.top_k)
        fused = role.startswith("commit_denoise")
        spans = ((1, 1), (2, 2), (1, blocks)) if fused else ((1, blocks),)
        sizes = [
            [
                {"B": b, "n": n, "m": n, "C": c, "R": r, "T": c}
                for b, n, c, r in zip(
                    (least_rows, least_rows, rows),
                    (low, low, high),
                    columns,
                    (1, 1, length),
                    strict=True,
                )
            ]
            for low, high in spans
        ]
        profiles[role] = tuple(
            {
                port.name: tuple(port.resolve(**level) for level in levels)
                for port in inputs
                if any(isinstance(dim, str) for dim in port.shape)
            }
            for levels in sizes
        )
        plans.append(Plan(role, f"{role}.plan", "", inputs, outputs, aliases=pairs))
        content = {
            "graph": str(bundle.path / graph.file),
            "graph_in": [port.to_dict() for port in graph.inputs],
            "graph_out": [port.to_dict() for port in graph.outputs],
            "inputs": [port.to_dict() for port in inputs],
            "outputs": [port.to_dict() for port in outputs],
            "profiles": profiles[role],
            "aliases": pairs,
        }
        (folder / f"{role}.plan").write_text(json.dumps(content))
    identity = identity_of(
        bundle,
        roles,
        **{
            "version": VERSION,
            "os": os_text(),
            "capabilities": (CAPABILITY,),
            "precision": precision,
            "profiles": profiles,
            "flags": {},
            **changes,
        },
    )
    check = CHECK if precision != "fp32" else {}
    libraries = []
    for plugin in identity.plugins:
        if plugin.library:
            libraries.append(folder.parent / plugin.library)
            libraries[-1].write_bytes(b"stand-in library")
    return write_engine(
        folder,
        bundle,
        identity,
        precision_of(precision),
        plans,
        check=check,
        libraries=libraries,
    )
