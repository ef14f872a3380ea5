"""The memory of the carried state on a device: what StateBuffers are on the host.

This module mutates: :class:`DeviceBuffers` owns every address that lives from pass to pass. Rows,
sides and lengths follow the rules of :class:`fixedstate.runtime.buffers.StateBuffers`; lengths and
the logits of last tokens stay on the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping

import numpy as np

from fixedstate.errors import BackendError, CapacityError
from fixedstate.plugins.driver import Memory, Stream
from fixedstate.ports import DTYPES, Array, numpy_dtype
from fixedstate.runtime.buffers import RowBuffers, columns_for, garbage
from fixedstate.runtime.devicememory import ALIGNMENT, DeviceDriver
from fixedstate.state import StatePort, StateSpec


class DeviceBuffers(RowBuffers):
    """State of `slots` rows in device memory, allocated once; only keys and values grow.

    All copies are put into one stream, in which the passes run as well; what comes to the host has
    been waited for.

    Args:
        driver: The driver.
        stream: Of the passes.
        state: What is carried.
        slots: Rows.
        block_len: L, in tokens.
        capacity: Columns of append ports at first; rounded up to a power of two.
        limit: Committed tokens per row at most; None for no limit.
        last_logits: Width of the logits of each row's last committed token; 0 for none.
        in_place: Suffixes of ports that passes update where they lie: these have one buffer.
        columns: Least and most columns that the engine's profiles take.

    Attributes:
        on_move: Called before memory of keys and values is given back for larger one.

    Raises:
        CapacityError: where the device's memory is too small.
    """

    def __init__(
        self,
        driver: DeviceDriver,
        stream: Stream,
        state: StateSpec,
        slots: int,
        block_len: int,
        capacity: int = 0,
        limit: int | None = None,
        last_logits: int = 0,
        *,
        in_place: Collection[str] = (),
        columns: tuple[int, int] = (1, 2**31 - 1),
    ) -> None:
        self._driver = driver
        self._stream = stream
        super().__init__(state, slots, block_len, limit, last_logits)
        self._bounds = columns
        self.on_move: Callable[[], None] = lambda: None
        self._all: list[Memory] = []
        try:
            if state.appended:
                self.capacity = self._capacity_for(capacity)
            self._pairs = {
                port.suffix: self._allocate_pair(port, port.suffix in in_place)
                for port in (*state.swapped, *state.stepped)
            }
            self._columns = {
                port.suffix: self._allocate(port, self.capacity) for port in state.appended
            }
            largest = max((port.nbytes(1) for port in (*state.swapped, *state.stepped)), default=1)
            self._spare = self._take(largest, "a row on its way to another")
            self._spare_columns: Memory | None = None
        except CapacityError:
            self.free()
            raise

    # --- memory

    def _take(self, nbytes: int, what: str) -> Memory:
        try:
            memory = self._driver.allocate(max(nbytes, ALIGNMENT))
        except BackendError as err:
            raise CapacityError(
                f"no device memory for {what} ({nbytes} bytes): {err}: use fewer slots or less room"
            ) from err
        self._all.append(memory)
        return memory

    def _drop(self, memory: Memory) -> None:
        self._all.remove(memory)
        memory.free()

    def _allocate(self, port: StatePort, capacity: int = 0) -> Memory:
        """Memory of all rows at the reset value."""
        nbytes = port.nbytes(self.slots, capacity)
        memory = self._take(nbytes, f"{port.past.name} of {self.slots} slots")
        self._driver.set_bytes(memory.address, 0, memory.nbytes, self._stream)
        if port.reset:
            for row in range(self.slots):
                self._fill_row(port, memory, row, capacity)
        return memory

    def _allocate_pair(self, port: StatePort, in_place: bool) -> tuple[Memory, Memory]:
        memory = self._allocate(port)
        return memory, memory if in_place else self._allocate(port)

    def _fill_row(self, port: StatePort, memory: Memory, row: int, capacity: int = 0) -> None:
        nbytes = port.nbytes(1, capacity)
        if not port.reset:
            self._driver.set_bytes(memory.address + row * nbytes, 0, nbytes, self._stream)
            return
        if port.past.dtype == "bfloat16":
            value = np.float32(port.reset).view(np.uint32) >> 16
        else:
            value = port.reset
        count = nbytes // DTYPES[port.past.dtype]
        self._stream.synchronize()
        memory.write(np.full(count, value, numpy_dtype(port.past.dtype)), row * nbytes)

    def free(self) -> None:
        """Give all device memory back."""
        held, self._all = self._all, []
        for memory in held:
            memory.free()

    def _capacity_for(self, need: int) -> int:
        """Columns to allocate for rows of that many tokens, inside what the engine takes.

        Raises:
            CapacityError: where it takes fewer.
        """
        least, most = self._bounds
        if need > most:
            raise CapacityError(
                f"{need} tokens need as many columns of keys and values; the engine takes {most} "
                "at most: ask for less, or build it with a larger --capacity"
            )
        whole, length = self.state.whole_blocks, self._block_len
        columns = min(max(columns_for(need, length, self.limit, whole), least), most)
        if whole and columns % length:
            raise CapacityError(
                f"the engine takes {least} to {most} columns of keys and values, which have to be "
                f"whole blocks of {length}: build it with a --capacity of such"
            )
        return columns

    # --- what a pass reads and writes

    def align(self, rows: int, first: int = 0) -> int:
        """Bring rows first..first+rows-1 into one buffer of each pair; returns which, 0 or 1."""
        return self._align(self.state.swapped, self._side, rows, first)

    def align_step(self, rows: int, first: int = 0) -> int:
        """The same for the pairs of scope ``step``."""
        return self._align(self.state.stepped, self._step_side, rows, first)

    def _align(self, ports: tuple[StatePort, ...], sides: Array, rows: int, first: int) -> int:
        if not ports:
            return 0  # so that one pass serves, whatever the side
        here = sides[first : first + rows]
        count = int(here.sum())
        side = int(2 * count > rows)
        if count not in (0, rows):
            for row in (first + np.flatnonzero(here != side)).tolist():
                for port in ports:
                    self._copy_row(port, (1 - side, row), (side, row))
            here[:] = side
        return side

    def _copy_row(self, port: StatePort, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy a row of a pair, from (side, row) to (side, row)."""
        come, go = (self._row(port, *place) for place in (source, target))
        if come != go:
            self._driver.copy(go, come, port.nbytes(1), self._stream.handle)

    def _row(self, port: StatePort, side: int, row: int) -> int:
        return self._pairs[port.suffix][side].address + row * port.nbytes(1)

    def past(self, port: StatePort, side: int, first: int = 0) -> int:
        """Address of the rows that enter a pass; the same for as long as capacity stays."""
        if port.update == "append":
            return self._columns[port.suffix].address + first * port.nbytes(1, self.capacity)
        return self._row(port, side, first)

    def present(self, port: StatePort, side: int, first: int = 0) -> int:
        """Address of the same rows in the other buffer of a pair, which a pass writes."""
        return self._row(port, 1 - side, first)

    def aligned(self, first: int) -> bool:
        """Whether rows from that one on begin where TensorRT can read every port."""
        return all(
            first * port.nbytes(1, self.capacity) % ALIGNMENT == 0 for port in self.state.ports
        )

    def copy_rows(self, port: StatePort, target: int, source: int, rows: int) -> None:
        """Copy whole rows of a port from address to address."""
        nbytes = port.nbytes(rows, self.capacity)
        self._driver.copy(target, source, nbytes, self._stream.handle)

    def flip(self, rows: int) -> None:
        """Copy rows 0..rows-1 into the other buffer of each pair, which becomes the live one."""
        for ports, sides in self._groups():
            for row in range(rows):
                side = int(sides[row])
                for port in ports:
                    self._copy_row(port, (side, row), (1 - side, row))
                sides[row] = 1 - side

    def begin_block(self, row: int) -> None:
        """Give the ports of scope ``step`` the value they have before a block's first pass."""
        for port in self.state.stepped:
            self._fill_row(port, self._pairs[port.suffix][int(self._step_side[row])], row)

    # --- a commit

    def _grow(self, capacity: int) -> None:
        """All or nothing: a failed allocation leaves every buffer as it was."""
        grown: dict[str, Memory] = {}
        try:
            for port in self.state.appended:
                grown[port.suffix] = self._allocate(port, capacity)
        except CapacityError:
            for memory in grown.values():
                self._drop(memory)
            raise
        for port in self.state.appended:
            heads, column = _heads(port), _column_bytes(port)
            self._driver.copy_lines(
                grown[port.suffix].address,
                capacity * column,
                self._columns[port.suffix].address,
                self.capacity * column,
                self.capacity * column,
                self.slots * heads,
                self._stream,
            )
        self._stream.synchronize()
        self.on_move()
        old, self._columns, self.capacity = self._columns, grown, capacity
        for memory in old.values():
            self._drop(memory)
        if self._spare_columns is not None:
            self._drop(self._spare_columns)
            self._spare_columns = None

    def append(
        self, port: StatePort, new: int, width: int, commit_length: Array, first: int
    ) -> None:
        """Write the first commit_length columns of a pass behind each row's own.

        Args:
            port: An append port.
            new: Address of (k, kv_heads, width, head_dim).
            width: Columns of a row there.
            commit_length: (k,) columns to take.
            first: The first row.
        """
        heads, column = _heads(port), _column_bytes(port)
        for row in np.flatnonzero(commit_length).tolist():
            start = int(self.past_length[first + row]) * column
            self._driver.copy_lines(
                self.past(port, 0, first + row) + start,
                self.capacity * column,
                new + row * heads * width * column,
                width * column,
                int(commit_length[row]) * column,
                heads,
                self._stream,
            )

    def commit(
        self, rows: int, commit_length: Array, last_logits: Array | None = None, first: int = 0
    ) -> None:
        """Take over what a commit pass wrote: swap pairs, move past_length.

        Rows that committed anything begin a new block; the others keep their ``last_logits``.
        """
        self._advance(rows, commit_length, last_logits, first)

    # --- rows

    def _clear(self, row: int) -> None:
        for port in self.state.swapped:
            self._fill_row(port, self._pairs[port.suffix][int(self._side[row])], row)

    def _drop_columns(self, row: int, kept: int) -> None:
        count = int(self.past_length[row]) - kept
        for port in self.state.appended if count > 0 else ():
            column = _column_bytes(port)
            start = self.past(port, 0, row) + kept * column
            for head in range(_heads(port)):
                line = start + head * self.capacity * column
                self._driver.set_bytes(line, 0, count * column, self._stream)

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        if source == target:
            return
        for ports, sides in self._groups():
            side = int(sides[source])
            sides[target] = side
            for port in ports:
                self._copy_row(port, (side, source), (side, target))
        self.last_logits[target] = self.last_logits[source]
        used = int(self.past_length[source])
        self._drop_columns(target, used)
        for port in self.state.appended:
            self._copy_columns(port, self.past(port, 0, target), self.past(port, 0, source), used)
        self.past_length[target] = used

    def swap(self, row: int, other: int) -> None:
        """Exchange the states of two rows."""
        if row == other:
            return
        for ports, sides in self._groups():
            for port in ports:
                one, two = (self._row(port, int(sides[r]), r) for r in (row, other))
                self._exchange(one, two, self._spare.address, port.nbytes(1))
        self.last_logits[[row, other]] = self.last_logits[[other, row]]
        used = int(max(self.past_length[row], self.past_length[other]))
        for port in self.state.appended:
            one, two = (self.past(port, 0, r) for r in (row, other))
            spare = self._columns_spare()
            self._copy_columns(port, spare, one, used)
            self._copy_columns(port, one, two, used)
            self._copy_columns(port, two, spare, used)
        self.past_length[[row, other]] = self.past_length[[other, row]]

    def _groups(self) -> tuple[tuple[tuple[StatePort, ...], Array], ...]:
        return (self.state.swapped, self._side), (self.state.stepped, self._step_side)

    def _exchange(self, one: int, two: int, spare: int, nbytes: int) -> None:
        for target, source in ((spare, one), (one, two), (two, spare)):
            self._driver.copy(target, source, nbytes, self._stream.handle)

    def _copy_columns(self, port: StatePort, target: int, source: int, used: int) -> None:
        """Copy the first columns of one row, both laid out for the whole capacity."""
        pitch, width = self.capacity * _column_bytes(port), used * _column_bytes(port)
        heads = _heads(port)
        self._driver.copy_lines(target, pitch, source, pitch, width, heads, self._stream)

    def _columns_spare(self) -> int:
        if self._spare_columns is None:
            largest = max(port.nbytes(1, self.capacity) for port in self.state.appended)
            self._spare_columns = self._take(largest, "a row's columns on their way to another")
        return self._spare_columns.address

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's committed state by suffix; append ports hold their used columns."""
        self._stream.synchronize()
        used = int(self.past_length[row])
        return {port.suffix: self._read(port, row, used) for port in self.state.committed}

    def _read(self, port: StatePort, row: int, used: int) -> Array:
        shape = port.past.resolve(B=1, C=used)[1:]
        found = np.empty(shape, numpy_dtype(port.past.dtype))
        if port.update == "append":
            column = _column_bytes(port)
            source, width = self.past(port, 0, row), used * column
            self._driver.read_lines(found, source, self.capacity * column, width, self._stream)
        else:
            nbytes = port.nbytes(1)
            source = self._row(port, int(self._side[row]), row)
            self._driver.read_lines(found, source, nbytes, nbytes, self._stream)
        self._stream.synchronize()
        return found

    def _put_row(self, row: int, arrays: Mapping[str, Array], past_length: int) -> None:
        for port in self.state.committed:
            self._put(port, row, arrays[port.suffix], past_length)

    def _put(self, port: StatePort, row: int, values: Array, used: int, side: int = -1) -> None:
        """Write a row from the host; in append ports its first columns."""
        array = np.ascontiguousarray(values)
        if port.update == "append":
            column = _column_bytes(port)
            pitch, width, lines = self.capacity * column, used * column, _heads(port)
            target = self.past(port, 0, row)
        else:
            pitch = width = port.nbytes(1)
            lines = 1
            sides = self._step_side if port.scope == "step" else self._side
            target = self._row(port, int(sides[row]) if side < 0 else side, row)
        self._driver.copy_lines(target, pitch, array, width, width, lines, self._stream)
        self._stream.synchronize()  # the array may be gone when this returns

    def scribble(self, row: int, rng: np.random.Generator, *, behind: bool) -> None:
        """Fill a row with finite garbage; with `behind`, only the columns no token was put in."""
        for port in self.state.ports:
            shape = port.past.resolve(B=1, C=self.capacity)[1:]
            noise = garbage(rng, shape, port.past.dtype)
            if port.update != "append":
                for side in () if behind else (0, 1):
                    self._put(port, row, noise, 0, side)
                continue
            if behind:
                used = int(self.past_length[row])
                noise[:, :used] = self._read(port, row, used)
            self._put(port, row, noise, self.capacity)

    # --- reports

    @property
    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by suffix, both buffers of a pair included."""
        out = {}
        for suffix, pair in self._pairs.items():
            out[suffix] = sum(memory.nbytes for memory in set(pair))
        return out | {suffix: memory.nbytes for suffix, memory in self._columns.items()}

    def hash(self) -> dict[str, str]:
        """A digest of every live committed byte by suffix, and of past_length, over all rows."""
        self._stream.synchronize()
        out = {}
        for port in self.state.committed:
            digest = hashlib.blake2b(digest_size=16)
            used = self.capacity if port.update == "append" else 0
            for row in range(self.slots):
                digest.update(self._read(port, row, used).tobytes())
            out[port.suffix] = digest.hexdigest()
        out["past_length"] = hashlib.blake2b(self.past_length.tobytes(), digest_size=16).hexdigest()
        return out


def _heads(port: StatePort) -> int:
    """Pieces of one row whose columns follow one another."""
    return port.past.resolve(B=1, C=1)[1]


def _column_bytes(port: StatePort) -> int:
    """Bytes of one column of one head."""
    return port.past.resolve(B=1, C=1)[3] * DTYPES[port.past.dtype]
