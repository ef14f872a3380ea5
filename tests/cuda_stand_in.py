"""A stand-in for the CUDA driver's library: host memory, and kernels by the float64 reference.

It has the functions of ``fixedstate.plugins.driver.SIGNATURES`` as real C function pointers, so
that addresses, handles and argument arrays go through ctypes as they do with the driver. A launch
reads ``kernelParams`` by the parameter list of the entry's PTX, takes every size from the int32
arguments and the grid, and writes what thread blocks of that grid would write. It knows shipped
texts by their hash, for the tile.

It says nothing about the kernels, and everything about what is handed to them.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fixedstate.plugins.driver import SIGNATURES
from fixedstate.plugins.schema import KERNEL_IO, OPS, KernelSpec, Tile

NAMES = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    100: "CUDA_ERROR_NO_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    218: "CUDA_ERROR_INVALID_PTX",
    400: "CUDA_ERROR_INVALID_HANDLE",
    500: "CUDA_ERROR_NOT_FOUND",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    999: "CUDA_ERROR_UNKNOWN",
}

CONTEXT = 0xC0


class Fault(Exception):
    """A CUresult other than success."""

    def __init__(self, result: int) -> None:
        super().__init__(NAMES[result])
        self.result = result


class Module:
    """A text with its entries' parameters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        plain = re.sub(r"//.*", "", text)
        self.entries = {
            name: re.findall(r"\.param\s+\.(\w+)", body)
            for name, body in re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", plain)
        }
        found = re.search(r"\.(?:req|max)ntid\s+(\d+)", plain)
        self.threads = int(found[1]) if found else None


def to_bits(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest even by halving the step between neighbours, not by adding to the bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            return numbers.astype(dtype)
        single = numbers.astype(np.float32)
        below = (single.view(np.uint32) & 0xFFFF0000).view(np.float32)
        above = ((single.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
        odd = ((below.view(np.uint32) >> 16) & 1).astype(bool)
        left, right = np.abs(single - below), np.abs(above - single)
        chosen = np.where((left > right) | ((left == right) & odd), above, below)
        return (chosen.view(np.uint32) >> 16).astype(np.uint16)


def from_bits(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) * np.uint32(65536)).view(np.float32)
    return stored


class StandIn:
    """The library object. Attributes of ctypes function type are the driver's functions.

    Attributes:
        faults: Entry name to a CUresult that its next launch is answered with.
        alter: Called with (spec, outputs as numbers) before they are written; may change them.
        eager_capture: Launches run although a capture is on, as they must not.
        lost: Number of a captured node that every graph leaves out; None for none.
        launches: Entry names, in order of execution.
    """

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.alter: Callable[[KernelSpec, list[np.ndarray]], None] | None = None
        self.eager_capture = False
        self.lost: int | None = None
        self.launches: list[str] = []
        self.allocations: dict[int, Any] = {}
        self.total = 1 << 30
        self._ready = False
        self._next = 0x1000
        self._objects: dict[int, Any] = {}
        self._capturing: dict[int, list[Callable[[], None]]] = {}
        self._texts: dict[str, tuple[KernelSpec, Tile, str]] = {}
        self._constants: list[Any] = []
        for name, types in SIGNATURES.items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, name, prototype(self._answered(getattr(self, f"_{name}"))))

    def _answered(self, function: Callable[..., None]) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            try:
                function(*arguments)
            except Fault as fault:
                return fault.result
            except Exception as error:  # a C caller cannot be raised to
                print(f"stand-in: {function.__name__}: {error!r}")
                return 999
            return 0

        return answer

    def _new(self, thing: Any) -> int:
        self._next += 0x10
        self._objects[self._next] = thing
        return self._next

    def _get(self, handle: int, kind: type) -> Any:
        thing = self._objects.get(handle)
        if not isinstance(thing, kind):
            raise Fault(400)
        return thing

    # --- device ---------------------------------------------------------------------------------

    def _cuInit(self, flags: int) -> None:
        self._ready = True

    def _text(self, out: Any, text: str | None) -> None:
        self._constants.append(ctypes.c_char_p(None if text is None else text.encode()))
        out[0] = self._constants[-1]

    def _cuGetErrorName(self, result: int, out: Any) -> None:
        self._text(out, NAMES.get(result))
        if result not in NAMES:
            raise Fault(1)

    def _cuGetErrorString(self, result: int, out: Any) -> None:
        self._text(out, f"text of {result}" if result in NAMES else None)

    def _cuDriverGetVersion(self, out: Any) -> None:
        out[0] = 13010

    def _cuDeviceGetCount(self, out: Any) -> None:
        if not self._ready:
            raise Fault(3)
        out[0] = 1

    def _cuDeviceGet(self, out: Any, number: int) -> None:
        out[0] = number

    def _cuDeviceGetName(self, out: Any, size: int, device: int) -> None:
        label = b"a stand-in without a card\0"
        for number, byte in enumerate(label[:size]):
            out[number] = byte

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        out[0] = {38: 1 << 16, 16: 2, 75: 9, 76: 0}[attribute]

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out[0] = CONTEXT

    def _cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        pass

    def _cuCtxSetCurrent(self, context: int) -> None:
        if context != CONTEXT:
            raise Fault(201)

    def _cuCtxSynchronize(self) -> None:
        if self._capturing:
            raise Fault(900)

    # --- memory ---------------------------------------------------------------------------------

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        used = sum(len(block) for block in self.allocations.values())
        free[0], total[0] = self.total - used, self.total

    def _cuMemAlloc_v2(self, out: Any, nbytes: int) -> None:
        if nbytes > self.total:
            raise Fault(2)
        block = (ctypes.c_ubyte * (nbytes + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.allocations[address] = block
        out[0] = address

    def _cuMemFree_v2(self, address: int) -> None:
        if self.allocations.pop(address, None) is None:
            raise Fault(1)

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes of an allocation; a fault where they are not all of one allocation."""
        for start, block in self.allocations.items():
            if start <= address and address + nbytes <= start + len(block) - 256:
                offset = address - ctypes.addressof(block)
                return np.frombuffer(block, np.uint8, nbytes, offset)
        raise Fault(700)

    def _cuMemcpyHtoD_v2(self, target: int, source: int, nbytes: int) -> None:
        self.view(target, nbytes)
        ctypes.memmove(target, source, nbytes)

    def _cuMemcpyDtoH_v2(self, target: int, source: int, nbytes: int) -> None:
        self.view(source, nbytes)
        ctypes.memmove(target, source, nbytes)

    def _cuMemcpyDtoDAsync_v2(
        self, target: int, source: int, nbytes: int, stream: int | None
    ) -> None:
        self._put(stream, lambda: self._copy(target, source, nbytes))

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self.view(target, nbytes)[:] = self.view(source, nbytes)

    def _cuMemsetD8_v2(self, address: int, byte: int, nbytes: int) -> None:
        self.view(address, nbytes)[:] = byte

    # --- streams, events, graphs ----------------------------------------------------------------

    def _put(self, stream: int | None, action: Callable[[], None]) -> None:
        if stream:
            self._get(stream, list)
        if stream in self._capturing:
            self._capturing[stream].append(action)
            if not self.eager_capture:
                return
        action()

    def _cuStreamCreate(self, out: Any, flags: int) -> None:
        out[0] = self._new([])

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        self._get(stream, list)
        del self._objects[stream]

    def _cuStreamSynchronize(self, stream: int | None) -> None:
        if self._capturing:
            raise Fault(900)

    def _cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        self._get(stream, list)
        self._capturing[stream] = []

    def _cuStreamEndCapture(self, stream: int, out: Any) -> None:
        actions = self._capturing.pop(stream)
        kept = [action for number, action in enumerate(actions) if number != self.lost]
        out[0] = self._new(("graph", kept, len(actions)))

    def _cuGraphGetNodes(self, graph: int, nodes: Any, count: Any) -> None:
        count[0] = self._get(graph, tuple)[2]

    def _cuGraphInstantiateWithFlags(self, out: Any, graph: int, flags: int) -> None:
        out[0] = self._new(("executable", *self._get(graph, tuple)[1:]))

    def _cuGraphLaunch(self, executable: int, stream: int | None) -> None:
        kind, actions, _ = self._get(executable, tuple)
        if kind != "executable":
            raise Fault(400)
        for action in actions:
            self._put(stream, action)

    def _cuGraphDestroy(self, graph: int) -> None:
        self._get(graph, tuple)
        del self._objects[graph]

    def _cuGraphExecDestroy(self, executable: int) -> None:
        self._cuGraphDestroy(executable)

    def _cuEventCreate(self, out: Any, flags: int) -> None:
        out[0] = self._new({})

    def _cuEventDestroy_v2(self, event: int) -> None:
        self._get(event, dict)
        del self._objects[event]

    def _cuEventRecord(self, event: int, stream: int | None) -> None:
        self._get(event, dict)["at"] = time.perf_counter()

    def _cuEventSynchronize(self, event: int) -> None:
        self._get(event, dict)

    def _cuEventElapsedTime(self, out: Any, first: int, last: int) -> None:
        out[0] = 1e3 * (self._get(last, dict)["at"] - self._get(first, dict)["at"])

    # --- kernels --------------------------------------------------------------------------------

    def _cuModuleLoadDataEx(
        self, out: Any, image: int, count: int, options: Any, values: Any
    ) -> None:
        text = ctypes.string_at(image).decode()
        module = Module(text)
        given = {options[n]: values[n] for n in range(count)}
        bad = re.search(r"^\s*(no_such_\w+)", text, re.MULTILINE)
        if bad:
            log = f"ptxas error: unknown instruction {bad[1]}\0".encode()
            assert len(log) <= given[6]
            ctypes.memmove(given[5], log, len(log))
            raise Fault(218)
        out[0] = self._new(module)

    def _cuModuleUnload(self, module: int) -> None:
        self._get(module, Module)
        del self._objects[module]

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> None:
        if name.decode() not in self._get(module, Module).entries:
            raise Fault(500)
        out[0] = self._new((module, name.decode()))

    def _cuFuncGetAttribute(self, out: Any, attribute: int, function: int) -> None:
        out[0] = {4: 40, 3: 0}[attribute]

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:
        grid, block, (shared, stream, parameters, _) = rest[:3], rest[3:6], rest[6:]
        module_handle, entry = self._get(function, tuple)
        module = self._get(module_handle, Module)
        if entry in self.faults:
            raise Fault(self.faults.pop(entry))
        if block != (module.threads, 1, 1):
            raise Fault(1)
        spec, tile, io = self.known(module.sha256)
        if shared != spec.text(tile, io).shared:
            raise Fault(1)
        values = []
        for number, kind in enumerate(module.entries[entry]):
            c_type = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32, "s32": ctypes.c_int32}[kind]
            values.append(ctypes.cast(parameters[number], ctypes.POINTER(c_type))[0])
        self._put(stream, lambda: self._run(module, entry, grid, values))

    def known(self, sha256: str) -> tuple[KernelSpec, Tile, str]:
        """What a shipped text was compiled from."""
        if not self._texts:
            for spec in OPS.values():
                for tile in spec.tiles:
                    for io in KERNEL_IO:
                        self._texts[spec.text(tile, io).sha256] = (spec, tile, io)
        return self._texts[sha256]

    def _run(self, module: Module, entry: str, grid: tuple[int, ...], values: list[int]) -> None:
        spec, tile, io = self.known(module.sha256)
        assert entry == spec.torch_name
        self.launches.append(entry)
        first = len(spec.inputs)
        last = first + len(spec.argument_names)
        sizes = dict(zip(spec.argument_names, values[first:last], strict=True))
        sizes["B"] = grid[2]
        sizes.setdefault("L", sizes["T"])
        shapes = spec.shapes(sizes)
        arrays = []
        for address, port, shape in zip(
            values[:first] + values[last:], spec.ports, shapes, strict=True
        ):
            dtype = port.dtype_for(io)
            wide = np.dtype("uint16" if dtype == "bfloat16" else dtype)
            if address % 16:
                raise Fault(716)
            arrays.append(
                self.view(address, wide.itemsize * int(np.prod(shape))).view(wide).reshape(shape)
            )
        inputs = {
            port.name: from_bits(array, port.dtype_for(io))
            for port, array in zip(spec.inputs, arrays, strict=False)
        }
        with np.errstate(all="ignore"):
            whole = sizes["L"] == sizes["T"]
            outputs = list(spec.reference(inputs, 0 if whole else sizes["L"]))
        if self.alter:
            self.alter(spec, outputs)
        for port, array, numbers in zip(spec.outputs, arrays[first:], outputs, strict=True):
            cells = written(port.name, tile, grid, sizes, array.shape)
            array[cells] = to_bits(numbers, port.dtype_for(io))[cells]


def written(
    port: str, tile: Tile, grid: tuple[int, ...], sizes: dict[str, int], shape: tuple[int, ...]
) -> np.ndarray:
    """Which cells of an output thread blocks of a grid write.

    The grids are described in schema.py; rows are not looked at, since the grid gives their number.
    """
    cells = np.zeros(shape, bool)
    constants = tile.constants
    if "BLOCK_C" in constants:
        channels, tokens = grid[0] * constants["BLOCK_C"], grid[1] * constants["BLOCK_T"]
        if port == "y":
            cells[:, :tokens, :channels] = True
        else:
            cells[:, :channels] = True
    elif "BLOCK_P" in constants:
        parts = -(-sizes["P"] // constants["BLOCK_P"])
        whole_blocks, rest = divmod(grid[0], parts)
        for block in range(-(-grid[0] // parts)):
            reach = sizes["P"] if block < whole_blocks else rest * constants["BLOCK_P"]
            if port == "new_state":
                cells[:, : grid[1], :, :reach] = True
            else:
                tokens = slice(block * sizes["L"], (block + 1) * sizes["L"])
                cells[:, tokens, : grid[1], :reach] = True
    else:
        channels = grid[0] * constants["BLOCK_E"]
        if port == "new_state":
            cells[:, :, :channels] = True
        else:
            cells[:, : grid[1] * sizes["L"], :channels] = True
    return cells
