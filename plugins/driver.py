"""The only door to the CUDA driver: load a PTX text, launch it, time it, capture it into a graph.

Nothing but ctypes and numpy; the driver's library is opened when a :class:`Driver` is made, never
at import. One :class:`Driver` works in the primary context of a device, which PyTorch, the CUDA
runtime and TensorRT use as well, so their pointers and streams are valid here.

    with Driver() as driver, driver.upload(x) as source, driver.allocate(x.nbytes) as target:
        kernel = driver.load(text, "ssd_denoise")
        kernel.launch(grid, block, shared, 0, [("pointer", source.address), ("int32", 32), ...])
        driver.synchronize()
        y = target.read(x.dtype, x.shape)

A kernel's own parameter list is read from its text and every launch is compared with it: the driver
itself would read behind the end of a list that is too short.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from fixedstate.errors import BackendError
from fixedstate.ports import Array

LIBRARY = "libcuda.so.1"
"""What NVIDIA's display driver installs; no CUDA toolkit is needed."""

Argument = tuple[str, int]
"""A kernel argument: ``("pointer", address)`` or ``("int32", value)``."""

_P = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_void_p)
_INT_OUT = ctypes.POINTER(ctypes.c_int)
_TEXT_OUT = ctypes.POINTER(ctypes.c_char_p)
_SIZE_OUT = ctypes.POINTER(ctypes.c_size_t)
_ADDRESS = ctypes.c_ulonglong
_U = ctypes.c_uint

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuGetErrorName": (ctypes.c_int, _TEXT_OUT),
    "cuGetErrorString": (ctypes.c_int, _TEXT_OUT),
    "cuDriverGetVersion": (_INT_OUT,),
    "cuDeviceGetCount": (_INT_OUT,),
    "cuDeviceGet": (_INT_OUT, ctypes.c_int),
    "cuDeviceGetName": (ctypes.POINTER(ctypes.c_char), ctypes.c_int, ctypes.c_int),
    "cuDeviceGetAttribute": (_INT_OUT, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxSynchronize": (),
    "cuModuleLoadDataEx": (_OUT, _P, _U, _INT_OUT, _OUT),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_OUT, _P, ctypes.c_char_p),
    "cuFuncGetAttribute": (_INT_OUT, ctypes.c_int, _P),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _OUT, _OUT),
    "cuMemGetInfo_v2": (_SIZE_OUT, _SIZE_OUT),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyHtoD_v2": (_ADDRESS, _P, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (_P, _ADDRESS, ctypes.c_size_t),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _P),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t),
    "cuStreamCreate": (_OUT, _U),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuStreamBeginCapture_v2": (_P, ctypes.c_int),
    "cuStreamEndCapture": (_P, _OUT),
    "cuGraphGetNodes": (_P, _OUT, _SIZE_OUT),
    "cuGraphInstantiateWithFlags": (_OUT, _P, ctypes.c_ulonglong),
    "cuGraphLaunch": (_P, _P),
    "cuGraphDestroy": (_P,),
    "cuGraphExecDestroy": (_P,),
    "cuEventCreate": (_OUT, _U),
    "cuEventDestroy_v2": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventSynchronize": (_P,),
    "cuEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _P, _P),
}
"""Argument types of the functions used (CUDA driver API, cuda.h); each gives a CUresult."""

_L2_BYTES, _MULTIPROCESSORS, _MAJOR, _MINOR = 38, 16, 75, 76  # CUdevice_attribute
_LOCAL, _REGISTERS = 3, 4  # CUfunction_attribute
_INFO_LOG, _INFO_LOG_BYTES, _ERROR_LOG, _ERROR_LOG_BYTES = 3, 4, 5, 6  # CUjit_option
_LOG_BYTES = 16384
_CAPTURE_THREAD_LOCAL = 1  # CUstreamCaptureMode: other threads go on as they were

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+((?:\.\w+\s+)*)[\w$]+(\s*\[)?")
_KINDS = {
    "u64": "pointer",
    "s64": "pointer",
    "b64": "pointer",
    "u32": "int32",
    "s32": "int32",
    "b32": "int32",
}


def parameters(text: str, entry: str) -> tuple[str, ...]:
    """The kinds of a kernel's parameters in order, ``pointer`` or ``int32``, from its PTX.

    Args:
        text: PTX.
        entry: Name of an ``.entry`` in it.

    Raises:
        BackendError: if there is no such entry, or a parameter is neither of 8 nor of 4 bytes.
    """
    plain = _COMMENT.sub("", text)
    found = re.search(rf"\.entry\s+{re.escape(entry)}(?![\w$])\s*(?:\(([^)]*)\))?", plain)
    if found is None:
        names = re.findall(r"\.entry\s+([\w$]+)", plain)
        raise BackendError(
            f"the PTX text has no entry {entry!r}; it has {', '.join(names) or 'none'}"
        )
    kinds = []
    for number, declaration in enumerate(filter(str.strip, (found[1] or "").split(","))):
        match = _PARAMETER.search(declaration)
        modifiers = [word.strip(".") for word in match[1].split()] if match else []
        kind = next((_KINDS[word] for word in modifiers if word in _KINDS), None)
        if match is None or match[2] or kind is None:
            raise BackendError(
                f"parameter {number} of {entry!r} is {declaration.strip()!r}; expected a 64-bit "
                "pointer or a 32-bit integer"
            )
        kinds.append(kind)
    return tuple(kinds)


class Driver:
    """One device's primary context, retained while this object is open.

    Attributes:
        name: The card's name.
        compute_capability: Major and minor, e.g. (9, 0).
        version: CUDA version of the driver, e.g. (13, 0).
        multiprocessors: Number of streaming multiprocessors.
        l2_bytes: Size of the L2 cache.
        allocated: Bytes that :meth:`allocate` gave and that were not freed.

    Args:
        device: Number of the card as the driver counts them.
        library: Stands in for ``libcuda.so.1``: an object with the functions of
            :data:`SIGNATURES` as ctypes function objects.

    Raises:
        BackendError: without a driver, without a card, or if the driver is too old.
    """

    def __init__(self, device: int = 0, *, library: Any = None) -> None:
        self._context = 0
        self._modules: list[int] = []
        self.allocated = 0
        self._functions = _bind(_open() if library is None else library)
        self.call("cuInit", 0)
        self.version = divmod(self._int("cuDriverGetVersion") // 10, 100)
        count = self._int("cuDeviceGetCount")
        if not 0 <= device < count:
            raise BackendError(
                f"CUDA device {device} was asked for; the driver reports {count} (numbered from 0)"
            )
        self._device = self._int("cuDeviceGet", device)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), self._device)
        self.name = name.value.decode("utf-8", "replace")
        self.compute_capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.l2_bytes = self._attribute(_L2_BYTES)
        self._context = self._handle("cuDevicePrimaryCtxRetain", self._device)
        self.make_current()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # after a fault inside a kernel every call fails: the first error is the one to show
        self.close(quiet=error is not None)

    def close(self, quiet: bool = False) -> None:
        """Unload what was loaded and let go of the context; a second call does nothing.

        Args:
            quiet: Ignore errors, because another one is on its way.
        """
        if not self._context:
            return
        modules, self._modules = self._modules, []
        steps: list[tuple[str, int]] = [("cuModuleUnload", module) for module in modules]
        steps.append(("cuDevicePrimaryCtxRelease_v2", self._device))
        self._context = 0
        for name, argument in steps:
            try:
                self.call(name, argument)
            except BackendError:
                if not quiet:
                    raise

    def make_current(self) -> None:
        """Use this context on the calling thread; a thread that did not make it needs that once."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function.

        Raises:
            BackendError: with the name of the CUresult, unless it is CUDA_SUCCESS.
        """
        self._check(name, self._functions[name](*arguments))

    def _check(self, name: str, result: int, more: str = "") -> None:
        if result == 0:
            return
        label, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._functions["cuGetErrorName"](result, ctypes.byref(label))
        self._functions["cuGetErrorString"](result, ctypes.byref(text))
        shown = (label.value or b"an unknown CUresult").decode()
        meaning = f": {text.value.decode()}" if text.value else ""
        raise BackendError(f"{name} failed with {shown} ({result}){meaning}{more}")

    def _int(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def _attribute(self, number: int) -> int:
        return self._int("cuDeviceGetAttribute", number, self._device)

    def _handle(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_void_p()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value or 0

    # --- kernels --------------------------------------------------------------------------------

    def load(self, ptx: bytes | str, entry: str) -> Function:
        """Compile a PTX text for this card and give its kernel.

        Raises:
            BackendError: with the driver's compiler log, if it refuses the text.
        """
        text = ptx if isinstance(ptx, str) else bytes(ptx).decode("utf-8")
        text = text.rstrip("\0")
        kinds = parameters(text, entry)
        image = ctypes.create_string_buffer(text.encode("utf-8"))  # ends in a NUL
        logs = [ctypes.create_string_buffer(_LOG_BYTES) for _ in range(2)]
        info, error = (ctypes.cast(log, ctypes.c_void_p).value for log in logs)
        options = (ctypes.c_int * 4)(_INFO_LOG, _INFO_LOG_BYTES, _ERROR_LOG, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 4)(info, _LOG_BYTES, error, _LOG_BYTES)
        module = ctypes.c_void_p()
        result = self._functions["cuModuleLoadDataEx"](
            ctypes.byref(module), ctypes.cast(image, ctypes.c_void_p), 4, options, values
        )
        if result:
            parts = [log.value.decode("utf-8", "replace").strip() for log in (logs[1], logs[0])]
            log = "; ".join(filter(None, parts)) or "the driver left no log"
            self._check(f"cuModuleLoadDataEx of {entry!r}", result, f"; {log}")
        handle = module.value or 0
        self._modules.append(handle)
        return Function(
            self, handle, self._handle("cuModuleGetFunction", handle, entry.encode()), entry, kinds
        )

    def unload(self, function: Function) -> None:
        """Unload a kernel's module; its launches must have ended."""
        if function.module in self._modules:
            self._modules.remove(function.module)
            self.call("cuModuleUnload", function.module)

    # --- memory ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Memory:
        """Device memory of some bytes, content undefined, freed by ``free`` or ``with``."""
        if nbytes < 1:
            raise BackendError(
                f"{nbytes} bytes of device memory were asked for; expected 1 or more"
            )
        address = ctypes.c_ulonglong()
        self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        self.allocated += nbytes
        return Memory(self, address.value, nbytes)

    def upload(self, array: Array) -> Memory:
        """Device memory that holds an array's bytes in C order."""
        memory = self.allocate(array.nbytes)
        memory.write(array)
        return memory

    def free_bytes(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and all there are."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copy device memory to device memory in a stream's order, between addresses."""
        self.call("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    def synchronize(self) -> None:
        """Wait for everything in this context; a fault inside a kernel is raised here."""
        self.call("cuCtxSynchronize")

    # --- streams and events ---------------------------------------------------------------------

    def stream(self) -> Stream:
        """A new stream, which waits for the default stream and the other way round."""
        return Stream(self, self._handle("cuStreamCreate", 0))

    def event(self) -> Event:
        """A new event with timing."""
        return Event(self, self._handle("cuEventCreate", 0))


class Function:
    """A kernel on this card; it lives until its driver is closed or unloads it.

    Attributes:
        module: Handle of the module that holds it.
        handle: Its CUfunction.
        entry: Its name.
        kinds: Its parameters, ``pointer`` or ``int32``.
        registers: Per thread, as compiled for this card.
        local_bytes: Per thread; above 0 if registers are spilled.
    """

    def __init__(
        self, driver: Driver, module: int, handle: int, entry: str, kinds: tuple[str, ...]
    ) -> None:
        self._driver = driver
        self.module = module
        self.handle = handle
        self.entry = entry
        self.kinds = kinds
        self.registers = driver._int("cuFuncGetAttribute", _REGISTERS, handle)
        self.local_bytes = driver._int("cuFuncGetAttribute", _LOCAL, handle)

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        stream: int | Stream,
        arguments: Sequence[Argument],
    ) -> None:
        """Start the kernel; returns before it has run.

        Args:
            grid: Thread blocks along x, y, z.
            block: Threads along x, y, z.
            shared: Bytes of dynamic shared memory.
            stream: A stream or its raw handle; 0 is the default stream.
            arguments: Every parameter in the kernel's order.

        Raises:
            BackendError: if the arguments are not those of the kernel, or the driver refuses.
        """
        kinds = tuple(kind for kind, _ in arguments)
        if kinds != self.kinds:
            raise BackendError(
                f"kernel {self.entry!r} takes ({', '.join(self.kinds)}); "
                f"({', '.join(kinds)}) was given"
            )
        sizes = (*grid, *block)
        if len(sizes) != 6 or min(sizes) < 1 or max(sizes) >= 2**31 or not 0 <= shared < 2**31:
            raise BackendError(
                f"kernel {self.entry!r}: grid {tuple(grid)}, block {tuple(block)}, shared "
                f"{shared}; expected three positive sizes each, and bytes"
            )
        values = [_argument(self.entry, n, *pair) for n, pair in enumerate(arguments)]
        pointers = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values]
        array = (ctypes.c_void_p * len(values))(*(pointer.value for pointer in pointers))
        handle = stream.handle if isinstance(stream, Stream) else stream
        # the driver copies the values before it returns; until then `values` has to be alive
        self._driver.call("cuLaunchKernel", self.handle, *sizes, shared, handle, array, None)


def _argument(entry: str, number: int, kind: str, value: int) -> Any:
    if kind == "pointer":
        if not 0 < value < 2**64:
            raise BackendError(f"argument {number} of {entry!r} is no address: {value}")
        return ctypes.c_ulonglong(value)
    if not -(2**31) <= value < 2**31:
        raise BackendError(f"argument {number} of {entry!r} is {value}; expected an int32")
    return ctypes.c_int32(value)


class Memory:
    """Some bytes on the device.

    Attributes:
        address: Where they are; 0 once freed.
        nbytes: How many.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int) -> None:
        self._driver = driver
        self.address = address
        self.nbytes = nbytes

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.free()
        except BackendError:
            if error is None:
                raise

    def free(self) -> None:
        """Give the bytes back; a second call does nothing."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.allocated -= self.nbytes
            self._driver.call("cuMemFree_v2", address)

    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array's bytes here, in C order.

        Args:
            array: Any array.
            offset: First byte to write.

        Raises:
            BackendError: if it does not fit.
        """
        data = np.ascontiguousarray(array)
        self._reach(offset, data.nbytes)
        self._driver.call("cuMemcpyHtoD_v2", self.address + offset, data.ctypes.data, data.nbytes)

    def read(self, dtype: Any, shape: Sequence[int], offset: int = 0) -> Array:
        """The bytes as a new array, after everything that was put in the default stream."""
        array = np.empty(tuple(shape), dtype)
        self._reach(offset, array.nbytes)
        self._driver.call("cuMemcpyDtoH_v2", array.ctypes.data, self.address + offset, array.nbytes)
        return array

    def fill(self, byte: int) -> None:
        """Set every byte."""
        self._reach(0, self.nbytes)
        self._driver.call("cuMemsetD8_v2", self.address, byte, self.nbytes)

    def _reach(self, offset: int, nbytes: int) -> None:
        if not self.address:
            raise BackendError("the device memory was freed before this copy")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise BackendError(
                f"bytes {offset} to {offset + nbytes} of device memory of {self.nbytes} bytes"
            )


class Stream:
    """A queue of work on the device.

    Attributes:
        handle: Its CUstream; 0 once destroyed.
    """

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self.handle = handle

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handle, self.handle = self.handle, 0
        try:
            self._driver.call("cuStreamDestroy_v2", handle)
        except BackendError:
            if error is None:
                raise

    def synchronize(self) -> None:
        """Wait for everything put in so far; a fault inside a kernel is raised here."""
        self._driver.call("cuStreamSynchronize", self.handle)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what is put in meanwhile instead of running it.

        The graph that is given can be launched after the ``with`` block. Kernels have to be
        loaded before it.
        """
        graph = Graph(self._driver)
        self._driver.call("cuStreamBeginCapture_v2", self.handle, _CAPTURE_THREAD_LOCAL)
        try:
            yield graph
        except BaseException:
            # ends the capture so that the stream can be used; its own error would hide the first
            dropped = ctypes.c_void_p()
            end = self._driver._functions["cuStreamEndCapture"]
            if end(self.handle, ctypes.byref(dropped)) == 0 and dropped.value:
                self._driver.call("cuGraphDestroy", dropped.value)
            raise
        ended = ctypes.c_void_p()
        self._driver.call("cuStreamEndCapture", self.handle, ctypes.byref(ended))
        graph._instantiate(ended.value or 0)


class Graph:
    """Captured work that runs as one launch.

    Attributes:
        nodes: How many launches and copies it holds.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._executable = 0
        self.nodes = 0

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handle, self._executable = self._executable, 0
        try:
            if handle:
                self._driver.call("cuGraphExecDestroy", handle)
        except BackendError:
            if error is None:
                raise

    def _instantiate(self, graph: int) -> None:
        count = ctypes.c_size_t()
        self._driver.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        self.nodes = count.value
        self._executable = self._driver._handle("cuGraphInstantiateWithFlags", graph, 0)
        self._driver.call("cuGraphDestroy", graph)

    def launch(self, stream: int | Stream) -> None:
        """Run everything it holds, in a stream's order."""
        if not self._executable:
            raise BackendError("this graph was not captured to its end, or was destroyed")
        handle = stream.handle if isinstance(stream, Stream) else stream
        self._driver.call("cuGraphLaunch", self._executable, handle)


class Event:
    """A point in a stream that can be waited for and timed."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self._handle = handle

    def __enter__(self) -> Event:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handle, self._handle = self._handle, 0
        try:
            self._driver.call("cuEventDestroy_v2", handle)
        except BackendError:
            if error is None:
                raise

    def record(self, stream: int | Stream) -> None:
        """Put it into a stream."""
        handle = stream.handle if isinstance(stream, Stream) else stream
        self._driver.call("cuEventRecord", self._handle, handle)

    def synchronize(self) -> None:
        """Wait until the stream has come to it."""
        self._driver.call("cuEventSynchronize", self._handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Time between two events that were both reached."""
        value = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(value), earlier._handle, self._handle)
        return value.value


def _open() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendError(
            f"no CUDA driver: {LIBRARY} cannot be opened ({error}); the compiled kernels need an "
            "NVIDIA card and its driver; without one, run the ONNX files as they are (the function "
            "bodies)"
        ) from None


def _bind(library: Any) -> dict[str, Any]:
    """The functions of a library with their C types.

    Raises:
        BackendError: if one is missing.
    """
    functions = {}
    for name, types in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise BackendError(
                f"the CUDA driver has no {name}; install a driver of CUDA 12.0 or newer"
            ) from None
        function.argtypes = types
        function.restype = ctypes.c_int
        functions[name] = function
    return functions
