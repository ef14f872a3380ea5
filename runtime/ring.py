"""A log of bounded size in one file: cells of one size, the oldest of which are written over.

Every cell carries its number and a hash of its own, so what a killed process left half written is
found and dropped. An event is any bytes; it takes as many cells as it needs.

This module mutates: :class:`Ring` writes a mapped file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fixedstate.errors import CapacityError, StateError

_HEAD = struct.Struct("<QHHI")  # number of the cell, part, parts, bytes of the payload
_CHECK = 8  # bytes of the hash over head and payload
_CHUNK = 1 << 20
OVERHEAD = _HEAD.size + _CHECK
"""Bytes of a cell that are not payload."""


class Ring:
    """A new ring, being written.

    The whole file is written at the start: a full disk is found then, not in the middle.

    Args:
        path: The file; it must not exist.
        payload: Bytes of an event that one cell holds.
        length: Cells.

    Raises:
        StateError: where the file cannot be made.
    """

    def __init__(self, path: Path, payload: int, length: int) -> None:
        self.payload, self.length = payload, length
        self.next = 0
        self._cell = payload + OVERHEAD
        try:
            with path.open("xb") as file:
                _fill(file.fileno(), self._cell * length)
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), self._cell * length)
        except OSError as err:
            raise StateError(f"{path} cannot be made: {err.strerror or err}") from err

    def append(self, event: bytes) -> int:
        """Write an event over the oldest cells; returns the number of its first cell.

        Raises:
            CapacityError: for an event that would write over its own beginning.
        """
        size = self.payload
        parts = max(1, -(-len(event) // size))
        if parts > min(self.length, 0xFFFF):
            raise CapacityError(
                f"an event of {len(event)} bytes does not fit a ring of {self.length} cells of "
                f"{size} bytes: make the ring longer"
            )
        first = self.next
        for part in range(parts):
            piece = event[part * size : (part + 1) * size]
            cell = _HEAD.pack(self.next, part, parts, len(piece)) + piece
            cell += hashlib.blake2b(cell, digest_size=_CHECK).digest()
            start = self.next % self.length * self._cell
            self._map[start : start + len(cell)] = cell
            self.next += 1
        return first

    def flush(self) -> None:
        """Bring what was written to the disk, so that it outlives a power cut too."""
        self._map.flush()

    def close(self) -> None:
        """Flush and let go of the file."""
        if not self._map.closed:
            self._map.flush()
            self._map.close()


@dataclass(frozen=True, slots=True)
class Log:
    """What a ring holds.

    Attributes:
        events: Number of the first cell and bytes of every whole event, oldest first.
        begin: Number of the first cell of the stretch they stand in.
        end: Number of the cell that would be written next.
        lost: Whole cells outside that stretch, cut off from it by damage.
    """

    events: tuple[tuple[int, bytes], ...]
    begin: int
    end: int
    lost: int


def read_ring(path: Path, payload: int, length: int) -> Log:
    """Read a ring, also one that is being written or whose process was killed.

    Where cells in the middle are damaged the longest unbroken stretch counts, the newest of equals.

    Raises:
        StateError: where the file is missing or of another size.
    """
    try:
        data = path.read_bytes()
    except OSError as err:
        raise StateError(f"{path} cannot be read: {err.strerror or err}") from err
    cell = payload + OVERHEAD
    if len(data) != cell * length:
        raise StateError(
            f"{path} has {len(data)} bytes, expected {length} cells of {cell}: it is damaged; "
            "record again"
        )
    cells = dict(_whole_cells(data, cell, length))
    stretch = _longest_stretch(sorted(cells))
    events: list[tuple[int, bytes]] = []
    pieces: list[bytes] = []
    for number in stretch:
        part, parts, piece = cells[number]
        if part != len(pieces):  # the beginning of this event was written over
            pieces = []
            continue
        pieces.append(piece)
        if len(pieces) == parts:
            events.append((number - part, b"".join(pieces)))
            pieces = []
    return Log(tuple(events), stretch.start, stretch.stop, len(cells) - len(stretch))


def _whole_cells(
    data: bytes, cell: int, length: int
) -> Iterator[tuple[int, tuple[int, int, bytes]]]:
    """Number, part, parts and payload of every cell that is as it was written."""
    for index in range(length):
        start = index * cell
        number, part, parts, size = _HEAD.unpack_from(data, start)
        end = start + _HEAD.size + size
        if size > cell - OVERHEAD or not parts or number % length != index:
            continue
        digest = hashlib.blake2b(data[start:end], digest_size=_CHECK).digest()
        if digest == data[end : end + _CHECK]:
            yield number, (part, parts, data[start + _HEAD.size : end])


def _longest_stretch(numbers: list[int]) -> range:
    """The longest run of neighbouring numbers, the last of equals."""
    best = range(0)
    begin = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            run = range(numbers[begin], numbers[index - 1] + 1)
            best = run if len(run) >= len(best) else best
            begin = index
    return best


def _fill(file: int, size: int) -> None:
    zeros = bytes(min(size, _CHUNK))
    while size:
        size -= os.write(file, zeros[: min(size, _CHUNK)])
