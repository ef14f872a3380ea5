"""What running an engine needs of the CUDA driver beyond kernels: ordered copies and host memory.

An extension of the one door, :mod:`fixedstate.plugins.driver`. Everything here is put into a
stream and returns before it has happened, unless it says otherwise.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from fixedstate.errors import BackendError, UsageError
from fixedstate.plugins.driver import LIBRARY, Driver, Memory, Stream
from fixedstate.ports import Array

ALIGNMENT = 256
"""Bytes to which TensorRT wants every tensor's address aligned (``setTensorAddress``)."""

_P = ctypes.c_void_p
_ADDRESS = ctypes.c_ulonglong
_SIZE = ctypes.c_size_t
_HOST, _DEVICE = 1, 2  # CUmemorytype
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


class Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of cuda.h, whose fields stand in this order."""

    _fields_ = (
        ("srcXInBytes", _SIZE),
        ("srcY", _SIZE),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", _P),
        ("srcDevice", _ADDRESS),
        ("srcArray", _P),
        ("srcPitch", _SIZE),
        ("dstXInBytes", _SIZE),
        ("dstY", _SIZE),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", _P),
        ("dstDevice", _ADDRESS),
        ("dstArray", _P),
        ("dstPitch", _SIZE),
        ("WidthInBytes", _SIZE),
        ("Height", _SIZE),
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemHostAlloc": (ctypes.POINTER(_P), _SIZE, ctypes.c_uint),
    "cuMemFreeHost": (_P,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _P, _SIZE, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _ADDRESS, _SIZE, _P),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(Copy2D), _P),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _SIZE, _P),
}
"""Argument types of the functions used here beside those of the door."""


class DeviceDriver(Driver):
    """The door with ordered copies, pinned host memory and a list of the cards.

    Args:
        device: Number of the card.
        library: Stands in for the driver's library; it also has the functions of
            :data:`SIGNATURES`.

    Raises:
        BackendError: as :class:`fixedstate.plugins.driver.Driver`.
    """

    def __init__(self, device: int = 0, *, library: Any = None) -> None:
        super().__init__(device, library=library)
        opened = ctypes.CDLL(LIBRARY) if library is None else library
        for name, types in SIGNATURES.items():
            function = getattr(opened, name, None)
            if function is None:
                self.close(quiet=True)
                raise BackendError(
                    f"the CUDA driver has no {name}; install a driver of CUDA 12.0 or newer"
                )
            function.argtypes, function.restype = types, ctypes.c_int
            self._functions[name] = function

    def cards(self) -> list[tuple[str, str]]:
        """Compute capability, such as ``8.9``, and name of every card, in the driver's order."""
        found = []
        for number in range(self._int("cuDeviceGetCount")):
            card = self._int("cuDeviceGet", number)
            name = ctypes.create_string_buffer(256)
            self.call("cuDeviceGetName", name, len(name), card)
            parts = (self._int("cuDeviceGetAttribute", part, card) for part in (_MAJOR, _MINOR))
            found.append((".".join(map(str, parts)), name.value.decode("utf-8", "replace")))
        return found

    def host(self, nbytes: int) -> HostMemory:
        """Pinned host memory, which copies to and from the device need not wait for."""
        return HostMemory(self, self._handle("cuMemHostAlloc", nbytes, 0), nbytes)

    def to_device(self, target: int, source: Array, stream: Stream) -> None:
        """Copy an array of pinned memory to an address; it stays as it is until that happened."""
        self.call("cuMemcpyHtoDAsync_v2", target, source.ctypes.data, source.nbytes, stream.handle)

    def to_host(self, target: Array, source: int, stream: Stream) -> None:
        """Copy from an address into an array of pinned memory."""
        self.call("cuMemcpyDtoHAsync_v2", target.ctypes.data, source, target.nbytes, stream.handle)

    def set_bytes(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Set every byte of some device memory."""
        self.call("cuMemsetD8Async", address, byte, nbytes, stream.handle)

    def copy_lines(
        self,
        target: int,
        target_pitch: int,
        source: int | Array,
        source_pitch: int,
        width: int,
        lines: int,
        stream: Stream,
    ) -> None:
        """One 2-D copy: `lines` pieces of `width` bytes, from pitch to pitch.

        Args:
            target: Device address of the first piece.
            target_pitch: Bytes from one piece to the next.
            source: Device address, or a contiguous host array.
            source_pitch: Likewise.
            width: Bytes of a piece.
            lines: Pieces.
            stream: That it is put in.
        """
        self._lines(stream, width, lines, dst=(target, target_pitch), src=(source, source_pitch))

    def read_lines(
        self, target: Array, source: int, source_pitch: int, width: int, stream: Stream
    ) -> None:
        """The same into a contiguous host array, whose pieces follow one another."""
        if width:
            lines = target.nbytes // width
            self._lines(stream, width, lines, dst=(target, width), src=(source, source_pitch))

    def _lines(
        self,
        stream: Stream,
        width: int,
        lines: int,
        *,
        dst: tuple[int | Array, int],
        src: tuple[int | Array, int],
    ) -> None:
        if not width or not lines:
            return
        order = Copy2D(WidthInBytes=width, Height=lines)
        for side, (place, pitch) in (("src", src), ("dst", dst)):
            if isinstance(place, int):
                setattr(order, f"{side}MemoryType", _DEVICE)
                setattr(order, f"{side}Device", place)
            else:
                setattr(order, f"{side}MemoryType", _HOST)
                setattr(order, f"{side}Host", place.ctypes.data)
            setattr(order, f"{side}Pitch", pitch)
        self.call("cuMemcpy2DAsync_v2", ctypes.byref(order), stream.handle)


class HostMemory:
    """Pinned memory of the host.

    Attributes:
        address: Where it is; 0 once freed.
        nbytes: How large.
    """

    def __init__(self, driver: DeviceDriver, address: int, nbytes: int) -> None:
        self._driver = driver
        self.address = address
        self.nbytes = nbytes

    def array(self, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
        """An array over its first bytes; not to be used once it is freed."""
        size = math.prod(shape) * dtype.itemsize
        if size > self.nbytes or not self.address:
            raise BackendError(f"{size} bytes were asked of {self.nbytes} of pinned memory")
        raw = (ctypes.c_ubyte * size).from_address(self.address)
        found: Array = np.ndarray(tuple(shape), dtype, memoryview(raw))
        return found

    def free(self) -> None:
        """Give it back; a second call does nothing."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFreeHost", address)


class Scratch:
    """Device memory and pinned host memory by name, at fixed places until one has to grow.

    Args:
        driver: The driver.
    """

    def __init__(self, driver: DeviceDriver) -> None:
        self._driver = driver
        self._device: dict[str, Memory] = {}
        self._host: dict[str, HostMemory] = {}
        self._replaced: list[Memory | HostMemory] = []

    def device(self, name: str, nbytes: int) -> int:
        """Address of at least that many bytes on the device; zeros at first."""
        memory = self._device.get(name)
        if memory is None or memory.nbytes < nbytes:
            made = self._driver.allocate(max(nbytes, ALIGNMENT))
            made.fill(0)
            self._keep(memory)
            self._device[name] = memory = made
        return memory.address

    def host(self, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
        """An array in pinned memory of that name."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._host.get(name)
        if memory is None or memory.nbytes < nbytes:
            made = self._driver.host(max(nbytes, ALIGNMENT))
            self._keep(memory)
            self._host[name] = memory = made
        return memory.array(dtype, shape)

    def _keep(self, memory: Memory | HostMemory | None) -> None:
        """Older addresses may still be in use: they live until :meth:`drop_replaced`."""
        if memory is not None:
            self._replaced.append(memory)

    @property
    def replaced(self) -> set[int]:
        """Addresses that moved: whatever holds one of them has to be made again."""
        return {memory.address for memory in self._replaced}

    def drop_replaced(self) -> None:
        """Free what was replaced, once nothing holds its addresses."""
        replaced, self._replaced = self._replaced, []
        for memory in replaced:
            memory.free()

    def free(self) -> None:
        """Give everything back."""
        self.drop_replaced()
        device, self._device = self._device, {}
        host, self._host = self._host, {}
        for memory in device.values():
            memory.free()
        for pinned in host.values():
            pinned.free()


class OnDevice:
    """What owns things on a device: one call at a time in the device's context, then closed.

    Args:
        driver: The driver.
    """

    def __init__(self, driver: DeviceDriver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._closed = False
        self._after: list[Callable[[], None]] = []

    @contextmanager
    def _held(self) -> Iterator[None]:
        """One call at a time, in the context of the device.

        Raises:
            UsageError: after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise UsageError("this engine is closed: load it again")
            if self._thread != threading.get_ident():
                self._driver.make_current()
                self._thread = threading.get_ident()
            yield

    def on_close(self, function: Callable[[], None]) -> None:
        """Call a function at the end of :meth:`close`."""
        self._after.append(function)

    def close(self) -> None:
        """Give back everything on the device; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            with self._held(), ExitStack() as stack:  # goes on after an error, which then comes out
                self._closed = True
                for function in self._after:
                    stack.callback(function)
                self._give_back(stack)

    def _give_back(self, stack: ExitStack) -> None:
        """Put into the stack what gives everything back; what is put in last goes first."""
