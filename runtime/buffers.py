"""The memory of the carried state: allocated once, rows in slots, written here and nowhere else.

This module mutates: :class:`StateBuffers` owns every array that lives from pass to pass.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from fixedstate.errors import CapacityError, StateError, UsageError
from fixedstate.ports import Array, numpy_dtype
from fixedstate.state import StatePort, StateSpec

LEAST_CAPACITY = 256  # columns of a key or value buffer at first


class RowBuffers(ABC):
    """What is kept of rows beside the memory of their state, wherever that lies.

    A row is live in one of the two buffers of each pair; ports of scope ``step`` have pairs of
    their own, which trade places at every denoise pass and start anew with every block.

    Args:
        state: What is carried.
        slots: Rows.
        block_len: L, in tokens.
        limit: Committed tokens per row at most; None for no limit.
        last_logits: Width of the logits of each row's last committed token, where the model
            predicts the next position; 0 where it does not.
    """

    def __init__(
        self, state: StateSpec, slots: int, block_len: int, limit: int | None, last_logits: int
    ) -> None:
        self.state = state
        self.slots = slots
        self.limit = limit
        self.capacity = 0
        self.past_length: Array = np.zeros(slots, np.int64)
        self.last_logits: Array = np.zeros((slots, last_logits), np.float32)
        self._block_len = block_len
        self._side: Array = np.zeros(slots, np.int64)
        self._step_side: Array = np.zeros(slots, np.int64)

    @abstractmethod
    def _capacity_for(self, need: int) -> int:
        """Columns to allocate for rows of that many tokens."""

    @abstractmethod
    def _grow(self, capacity: int) -> None:
        """All or nothing: a failed allocation leaves every buffer as it was."""

    @abstractmethod
    def _clear(self, row: int) -> None:
        """Give the swap ports of a row their reset value."""

    @abstractmethod
    def _drop_columns(self, row: int, kept: int) -> None:
        """Zero the columns of a row's tokens behind the first `kept`.

        A value that is no number among them would reach whoever comes into this row next, through
        a weight of 0: a failing request never disturbs another.
        """

    @abstractmethod
    def _put_row(self, row: int, arrays: Mapping[str, Array], past_length: int) -> None:
        """Write every committed port of a row, in append ports its first columns."""

    @abstractmethod
    def begin_block(self, row: int) -> None:
        """Give the ports of scope ``step`` the value they have before a block's first pass."""

    # --- passes

    def advance_step(self, rows: int, first: int = 0) -> None:
        """Take over what a denoise pass wrote to the ports of scope ``step``."""
        ran = slice(first, first + rows)
        self._step_side[ran] = 1 - self._step_side[ran]

    def reserve(self, rows: int, commit_length: Array, first: int = 0, width: int = 0) -> bool:
        """Make room for a commit, before its pass; True where buffers moved.

        Args:
            rows: k.
            commit_length: (k,) tokens that come to each row.
            first: The first row.
            width: Tokens of the pass, where it writes all of them behind each row.

        Raises:
            CapacityError: with capacity and need; nothing was changed.
            UsageError: where a block would be committed in part, and is stored as a whole.
        """
        if self.state.whole_blocks and (commit_length % self._block_len).any():
            raise UsageError(
                f"commit_length {commit_length.tolist()} ends inside a block of {self._block_len} "
                "tokens, but keys are stored with scales of whole blocks: commit whole blocks"
            )
        past = self.past_length[first : first + rows]
        needs = past + commit_length
        need = int(needs.max())
        if self.limit is not None and need > self.limit:
            row = int(needs.argmax())
            raise CapacityError(
                f"row {first + row} holds {past[row]} committed tokens and {commit_length[row]} "
                f"more need room for {need}; the limit is {self.limit}"
            )
        return self._make_room(max(need, int(past.max()) + width))

    def _make_room(self, need: int) -> bool:
        if not self.state.appended or need <= self.capacity:
            return False
        self._grow(self._capacity_for(need))
        return True

    def _advance(
        self, rows: int, commit_length: Array, last_logits: Array | None, first: int
    ) -> None:
        """Swap the pairs of rows that ran and move past_length.

        Rows that committed anything begin a new block; the others keep their ``last_logits``.
        """
        for row in np.flatnonzero(commit_length).tolist():
            self.begin_block(first + row)
            if last_logits is not None:
                self.last_logits[first + row] = last_logits[row]
        ran = slice(first, first + rows)
        self._side[ran] = 1 - self._side[ran]
        self.past_length[ran] += commit_length

    # --- rows

    def reset(self, row: int) -> None:
        """Give a row the state it has before its first token."""
        self._clear(row)
        self._drop_columns(row, 0)
        self.begin_block(row)
        self.last_logits[row] = 0
        self.past_length[row] = 0

    def write(
        self,
        row: int,
        arrays: Mapping[str, Array],
        past_length: int,
        last_logits: Array | None = None,
    ) -> None:
        """Give a row a state that ``read`` returned, from here or elsewhere; a block begins.

        Args:
            row: The slot.
            arrays: Every committed port by suffix.
            past_length: Its committed tokens.
            last_logits: (V,) float32 of the last of them, where the model predicts the next
                position; zeros if not given before the first token.

        Raises:
            StateError: where names, shapes or dtypes do not fit; nothing was changed.
            CapacityError: where it does not fit the limit; nothing was changed.
        """
        check_arrays(self.state, arrays, past_length)
        if self.state.whole_blocks and past_length % self._block_len:
            raise StateError(
                f"the state ends inside a block ({past_length} tokens, blocks of "
                f"{self._block_len}), where keys are stored with scales of whole blocks"
            )
        self._check_last_logits(past_length, last_logits)
        if self.limit is not None and past_length > self.limit:
            raise CapacityError(
                f"row {row} needs room for {past_length} tokens; the limit is {self.limit}"
            )
        self._make_room(past_length)
        self._drop_columns(row, past_length)
        self._put_row(row, arrays, past_length)
        self.last_logits[row] = 0 if last_logits is None else last_logits
        self.begin_block(row)
        self.past_length[row] = past_length

    def _check_last_logits(self, past_length: int, last_logits: Array | None) -> None:
        width = self.last_logits.shape[1]
        if last_logits is None:
            fits = not (width and past_length)
        else:
            fits = last_logits.shape == (width,) and last_logits.dtype == np.float32
        if not fits:
            given = "no" if last_logits is None else f"{last_logits.dtype} {last_logits.shape}"
            raise StateError(
                f"{given} last_logits of {past_length} tokens; expected float32 {(width,)}: take "
                "them with the state"
            )

    # --- reports

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        return self.state.state_bytes()

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        return self.state.kv_bytes_per_token() * past_length


class StateBuffers(RowBuffers):
    """State of `slots` rows; rows 0..k-1 are the leading slice that a batch of k runs on.

    Swap ports have two buffers that trade places at a commit. Append ports have one, whose
    capacity in columns is a power of two and grows by one copy. Everything starts at its reset
    value, so it never holds anything but finite values.

    A row is live in one of the two buffers; :meth:`align` brings the rows of a batch into the
    same one. That costs nothing as long as the same rows run together. Ports of scope ``step``
    have pairs of their own, which trade places at every denoise pass and start anew with every
    block.

    Args:
        state: What is carried.
        slots: Rows.
        block_len: L, in tokens.
        capacity: Columns of append ports at first; rounded up to a power of two.
        limit: Committed tokens per row at most; None for no limit.
        last_logits: Width of the logits of each row's last committed token, where the model
            predicts the next position; 0 where it does not.
    """

    def __init__(
        self,
        state: StateSpec,
        slots: int,
        block_len: int,
        capacity: int = 0,
        limit: int | None = None,
        last_logits: int = 0,
    ) -> None:
        super().__init__(state, slots, block_len, limit, last_logits)
        if state.appended:
            self.capacity = self._capacity_for(capacity)
        self._pairs = {port.suffix: self._allocate_pair(port) for port in state.swapped}
        self._steps = {port.suffix: self._allocate_pair(port) for port in state.stepped}
        self._columns = {port.suffix: self._allocate(port) for port in state.appended}

    def _allocate(self, port: StatePort) -> Array:
        shape = port.past.resolve(B=self.slots, C=self.capacity)
        try:
            if port.reset == 0.0:
                return np.zeros(shape, numpy_dtype(port.past.dtype))
            return np.full(shape, port.reset, numpy_dtype(port.past.dtype))
        except MemoryError as err:
            raise CapacityError(
                f"no memory for {port.past.name} {list(shape)} "
                f"({port.nbytes(self.slots, self.capacity)} bytes): use fewer slots or less room"
            ) from err

    def _allocate_pair(self, port: StatePort) -> tuple[Array, Array]:
        return self._allocate(port), self._allocate(port)

    def _capacity_for(self, need: int) -> int:
        return columns_for(need, self._block_len, self.limit, self.state.whole_blocks)

    # --- what a pass reads and writes

    def align(self, rows: int, first: int = 0) -> int:
        """Bring rows first..first+rows-1 into one buffer of each pair; returns which, 0 or 1."""
        return _align(self._pairs, self._side, slice(first, first + rows))

    def align_step(self, rows: int, first: int = 0) -> int:
        """The same for the pairs of scope ``step``."""
        return _align(self._steps, self._step_side, slice(first, first + rows))

    def past(self, port: StatePort, side: int, rows: int, first: int = 0) -> Array:
        """The slice of rows that enters a pass; one memory for as long as capacity stays."""
        if port.update == "append":
            return self._columns[port.suffix][first : first + rows]
        return self._pairs_of(port)[port.suffix][side][first : first + rows]

    def present(self, port: StatePort, side: int, rows: int, first: int = 0) -> Array:
        """The same rows of the other buffer of a swap port, which a pass writes."""
        return self._pairs_of(port)[port.suffix][1 - side][first : first + rows]

    def _pairs_of(self, port: StatePort) -> dict[str, tuple[Array, Array]]:
        return self._steps if port.scope == "step" else self._pairs

    # --- a denoise pass

    def begin_block(self, row: int) -> None:
        """Give the ports of scope ``step`` the value they have before a block's first pass."""
        for port in self.state.stepped:
            self._steps[port.suffix][self._step_side[row]][row] = port.reset

    # --- a commit

    def _grow(self, capacity: int) -> None:
        """All or nothing: a failed allocation leaves every buffer as it was."""
        old, self.capacity = self.capacity, capacity
        try:
            grown = {port.suffix: self._allocate(port) for port in self.state.appended}
        except CapacityError:
            self.capacity = old
            raise
        for suffix, array in grown.items():
            array[:, :, :old] = self._columns[suffix]
        self._columns = grown

    def commit(
        self,
        rows: int,
        commit_length: Array,
        columns: Mapping[str, Array],
        last_logits: Array | None = None,
        first: int = 0,
    ) -> None:
        """Take over what a commit pass wrote: swap pairs, append columns, move past_length.

        Rows that committed anything begin a new block; the others keep their ``last_logits``.

        Args:
            rows: k, the rows that ran: first..first+k-1.
            commit_length: (k,) int64, the real tokens of each.
            columns: For each append port, by suffix, (k, kv_heads, nL, head_dim).
            last_logits: (k, V) of each row's last committed token, where the pass gives them.
            first: The first row.
        """
        moved = np.flatnonzero(commit_length).tolist()
        for suffix, new in columns.items():
            target = self._columns[suffix]
            for row in moved:
                start, count = self.past_length[first + row], commit_length[row]
                target[first + row, :, start : start + count] = new[row, :, :count]
        self._advance(rows, commit_length, last_logits, first)

    # --- rows

    def _clear(self, row: int) -> None:
        for port in self.state.swapped:
            self._pairs[port.suffix][self._side[row]][row] = port.reset

    def _drop_columns(self, row: int, kept: int) -> None:
        for array in self._columns.values():
            array[row, :, kept : self.past_length[row]] = 0

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        if source == target:
            return
        for pairs, sides in ((self._pairs, self._side), (self._steps, self._step_side)):
            side = sides[target] = sides[source]
            for pair in pairs.values():
                pair[side][target] = pair[side][source]
        self.last_logits[target] = self.last_logits[source]
        used = int(self.past_length[source])
        self._drop_columns(target, used)
        for array in self._columns.values():
            array[target, :, :used] = array[source, :, :used]
        self.past_length[target] = used

    def swap(self, row: int, other: int) -> None:
        """Exchange the states of two rows."""
        if row == other:
            return
        for pairs, sides in ((self._pairs, self._side), (self._steps, self._step_side)):
            for pair in pairs.values():
                kept = pair[sides[row]][row].copy()
                pair[sides[row]][row] = pair[sides[other]][other]
                pair[sides[other]][other] = kept
        self.last_logits[[row, other]] = self.last_logits[[other, row]]
        used = int(max(self.past_length[row], self.past_length[other]))
        for array in self._columns.values():
            array[[row, other], :, :used] = array[[other, row], :, :used]
        self.past_length[[row, other]] = self.past_length[[other, row]]

    def views(self, row: int) -> dict[str, Array]:
        """A row's committed state by suffix, where it lies: read it before the next pass."""
        out = {suffix: pair[self._side[row]][row] for suffix, pair in self._pairs.items()}
        used = self.past_length[row]
        out |= {suffix: array[row, :, :used] for suffix, array in self._columns.items()}
        return {port.suffix: out[port.suffix] for port in self.state.committed}

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's committed state by suffix; append ports hold their used columns."""
        return {suffix: array.copy() for suffix, array in self.views(row).items()}

    def _put_row(self, row: int, arrays: Mapping[str, Array], past_length: int) -> None:
        for suffix, pair in self._pairs.items():
            pair[self._side[row]][row] = arrays[suffix]
        for suffix, array in self._columns.items():
            array[row, :, :past_length] = arrays[suffix]

    def scribble(self, row: int, rng: np.random.Generator, *, behind: bool) -> None:
        """Fill a row with finite garbage; with `behind`, only the columns no token was put in."""
        if not behind:
            for port in (*self.state.swapped, *self.state.stepped):
                for buffer in self._pairs_of(port)[port.suffix]:
                    buffer[row] = garbage(rng, buffer[row].shape, port.past.dtype)
        start = self.past_length[row] if behind else 0
        for port in self.state.appended:
            columns = self._columns[port.suffix][row, :, start:]
            columns[...] = garbage(rng, columns.shape, port.past.dtype)

    # --- reports

    @property
    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by suffix, both buffers of a pair included."""
        pairs = {**self._pairs, **self._steps}
        out = {suffix: pair[0].nbytes + pair[1].nbytes for suffix, pair in pairs.items()}
        return out | {suffix: array.nbytes for suffix, array in self._columns.items()}

    def hash(self) -> dict[str, str]:
        """A digest of every live committed byte by suffix, and of past_length, over all rows."""
        out = {}
        for suffix, pair in self._pairs.items():
            digest = hashlib.blake2b(digest_size=16)
            for row in range(self.slots):
                digest.update(pair[self._side[row]][row].tobytes())
            out[suffix] = digest.hexdigest()
        for suffix, array in self._columns.items():
            out[suffix] = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        out["past_length"] = hashlib.blake2b(self.past_length.tobytes(), digest_size=16).hexdigest()
        return out


def check_arrays(state: StateSpec, arrays: Mapping[str, Array], past_length: int) -> None:
    """Refuse arrays that are not one row's committed state after that many tokens.

    Args:
        state: What is carried.
        arrays: By suffix, without the axis of rows; append ports with `past_length` columns.
        past_length: Committed tokens.

    Raises:
        StateError: naming the first port that is missing, unknown or of another shape or dtype.
    """
    ports = {port.suffix: port.past for port in state.committed}
    for suffix in [*(name for name in ports if name not in arrays), *(arrays.keys() - ports)]:
        what = "missing" if suffix in ports else "unknown"
        raise StateError(f"state {suffix!r} is {what}; the ports are {', '.join(ports) or 'none'}")
    for suffix, port in ports.items():
        found, wanted = arrays[suffix], port.resolve(B=1, C=past_length)[1:]
        if found.shape != wanted or found.dtype != numpy_dtype(port.dtype):
            raise StateError(
                f"state {suffix!r} has shape {list(found.shape)} and dtype {found.dtype}; expected "
                f"{list(wanted)} {port.dtype} after {past_length} tokens"
            )


def columns_for(need: int, block_len: int, limit: int | None, whole: bool = False) -> int:
    """Columns of keys and values that are allocated where a row needs room for `need` tokens.

    Args:
        need: Tokens.
        block_len: L.
        limit: Tokens at most; None for no limit.
        whole: Whether they have to be whole blocks (:attr:`StateSpec.whole_blocks`), even beyond
            the limit.
    """
    columns = max(LEAST_CAPACITY, block_len)
    while columns < need:
        columns *= 2
    columns = columns if limit is None else min(columns, max(limit, 1))
    return -(-columns // block_len) * block_len if whole else columns


def _align(pairs: Mapping[str, tuple[Array, Array]], sides: Array, rows: slice) -> int:
    """Copy rows into the buffer that most of them are live in, where they are in the other one."""
    here = sides[rows]
    count = int(here.sum())
    side = int(2 * count > len(here))
    if count not in (0, len(here)):
        for row in (rows.start + np.flatnonzero(here != side)).tolist():
            for pair in pairs.values():
                pair[side][row] = pair[1 - side][row]
        here[:] = side
    return side


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Finite garbage as a port of that dtype holds it."""
    if dtype in ("int8", "uint8"):
        return rng.integers(0, 256, shape, np.uint8).view(dtype)
    if dtype == "float8_e4m3fn":
        return _finite_float8(rng.integers(0, 256, shape, np.uint8))
    made: Array = rng.standard_normal(shape, np.float32) * np.float32(1e3)
    if dtype == "bfloat16":
        return (made.view(np.uint32) >> 16).astype(np.uint16)
    return made.astype(dtype)


def _finite_float8(made: Array) -> Array:
    """Bits of float8_e4m3fn without those whose exponent a NaN has."""
    finite: Array = made & np.uint8(0xBF)
    return finite
