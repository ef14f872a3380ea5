"""What every part uses: the clock, guarded tensors, the argument vector, numbers of 16 bits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from fixedstate.plugins.driver import Argument, Driver, Function, Memory, Stream
from fixedstate.plugins.ptx import Ptx
from fixedstate.plugins.schema import KernelSpec, Launch

GUARD = 272
"""Bytes before and behind every tensor: addresses are multiples of 16 and of no more."""

MARK = 0xFF
"""What fills guards and outputs beforehand: not a number in all three float formats."""


@dataclass
class Card:
    """One device and the time there is.

    Attributes:
        driver: The open door.
        small: Small shapes only.
        seconds: Time for this part.
        real: False where a stand-in takes the place of the driver: then times mean nothing.
    """

    driver: Driver
    small: bool
    seconds: float
    real: bool
    _started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds left for this part."""
        return self.seconds - (time.monotonic() - self._started)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as a port of that dtype holds them, rounded to nearest even; bfloat16 as uint16."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40  # a NaN must not be rounded to infinity
    return np.where(np.isnan(bits.view(np.float32)), quiet, rounded).astype(np.uint16)


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in float64 (int64 stays)."""
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored if dtype == "int64" else stored.astype(np.float64)


def empty(dtype: str, shape: Sequence[int]) -> np.ndarray:
    """An array of a port's dtype, every byte MARK."""
    wide = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
    count = int(np.prod(shape)) * wide.itemsize
    return np.full(count, MARK, np.uint8).view(wide).reshape(tuple(shape))


class Tensor:
    """An array on the device with a guard on each side."""

    def __init__(self, driver: Driver, array: np.ndarray) -> None:
        self._memory: Memory = driver.allocate(array.nbytes + 2 * GUARD)
        self._array = array
        self._memory.fill(MARK)
        self.reset()

    def __enter__(self) -> Tensor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.__exit__(kind, error, trace)

    @property
    def address(self) -> int:
        """Where the first element is."""
        return self._memory.address + GUARD

    def reset(self) -> None:
        """Write again what it held at first."""
        self._memory.write(self._array, GUARD)

    def read(self) -> np.ndarray:
        """What it holds now."""
        return self._memory.read(self._array.dtype, self._array.shape, GUARD)

    def unchanged(self) -> bool:
        """Whether it holds what was written, byte for byte."""
        return self.read().tobytes() == self._array.tobytes()

    def guarded(self) -> bool:
        """Whether both guards are as they were."""
        sides = (0, GUARD + self._array.nbytes)
        return all((self._memory.read(np.uint8, (GUARD,), side) == MARK).all() for side in sides)


def vector(spec: KernelSpec, launch: Launch, address: Mapping[str, int]) -> list[Argument]:
    """The plugin's argument vector: inputs, int32 arguments, outputs."""
    return [
        *(("pointer", address[name]) for name in spec.input_names),
        *(("int32", int(value)) for value in launch.arguments),
        *(("pointer", address[name]) for name in spec.output_names),
    ]


def start(
    kernel: Function,
    text: Ptx,
    spec: KernelSpec,
    launch: Launch,
    address: Mapping[str, int],
    stream: int | Stream = 0,
) -> None:
    """Launch as the plugin does: its grid, block and arguments."""
    arguments = vector(spec, launch, address)
    kernel.launch(launch.grid, (text.threads, 1, 1), text.shared, stream, arguments)


def steps(rng: np.random.Generator, shape: Sequence[int], kind: str = "usual") -> np.ndarray:
    """Step sizes dt.

    Args:
        rng: Source of randomness.
        shape: [B, T, ...].
        kind: ``usual``; ``any`` from decays of almost 1 to decays of 0; ``tail`` with tokens at the
            end of each row that are not there (0).
    """
    if kind == "any":
        return np.exp(rng.uniform(np.log(1e-5), np.log(30.0), tuple(shape)))
    dt = rng.uniform(0.001, 0.1, tuple(shape))
    if kind == "tail":
        for row in range(shape[0]):
            dt[row, shape[1] - (row + 1) * shape[1] // (shape[0] + 1) :] = 0
    return dt


def values(
    spec: KernelSpec, io: str, sizes: Mapping[str, int], seed: int, kind: str = "usual"
) -> dict[str, np.ndarray]:
    """Random inputs by name, as the ports hold them."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for port, shape in zip(spec.inputs, spec.shapes(sizes), strict=False):
        if port.name == "length":
            spread = np.linspace(0, sizes["T"], shape[0]).astype(np.int64)  # none to all
            array: Any = spread if shape[0] > 1 else rng.integers(0, sizes["T"] + 1, 1)
        elif port.name == "dt":
            array = steps(rng, shape, kind)
        elif port.name == "a":
            array = -rng.uniform(0.5, 8.0, shape)
        elif port.name in ("b", "c"):
            array = rng.standard_normal(shape) / np.sqrt(shape[-1])
        else:
            array = rng.standard_normal(shape)
        made[port.name] = encode(array, port.dtype_for(io))
    return made
