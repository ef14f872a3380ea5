"""The memory of the carried state: allocated once, rows in slots, written here and nowhere else.

This module mutates: :class:`StateBuffers` owns every array that lives from pass to pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from fixedstate.errors import CapacityError, DecodeError
from fixedstate.ports import Array, numpy_dtype
from fixedstate.state import StatePort, StateSpec

LEAST_CAPACITY = 256  # columns of a key or value buffer at first


class StateBuffers:
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
        self.state = state
        self.slots = slots
        self.limit = limit
        self.past_length: Array = np.zeros(slots, np.int64)
        self._base = max(LEAST_CAPACITY, block_len)
        self.capacity = self._capacity_for(capacity) if state.appended else 0
        self._side: Array = np.zeros(slots, np.int64)
        self._step_side: Array = np.zeros(slots, np.int64)
        self.last_logits: Array = np.zeros((slots, last_logits), np.float32)
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
        capacity = self._base
        while capacity < need:
            capacity *= 2
        return capacity if self.limit is None else min(capacity, max(self.limit, 1))

    # --- what a pass reads and writes

    def align(self, rows: int) -> int:
        """Bring rows 0..rows-1 into one buffer of each pair; returns which, 0 or 1."""
        return _align(self._pairs, self._side, rows)

    def align_step(self, rows: int) -> int:
        """The same for the pairs of scope ``step``."""
        return _align(self._steps, self._step_side, rows)

    def past(self, port: StatePort, side: int, rows: int) -> Array:
        """The leading slice that enters a pass; one memory for as long as capacity stays."""
        if port.update == "append":
            return self._columns[port.suffix][:rows]
        return self._pairs_of(port)[port.suffix][side][:rows]

    def present(self, port: StatePort, side: int, rows: int) -> Array:
        """The leading slice of the other buffer of a swap port, which a pass writes."""
        return self._pairs_of(port)[port.suffix][1 - side][:rows]

    def _pairs_of(self, port: StatePort) -> dict[str, tuple[Array, Array]]:
        return self._steps if port.scope == "step" else self._pairs

    # --- a denoise pass

    def advance_step(self, rows: int) -> None:
        """Take over what a denoise pass wrote to the ports of scope ``step``."""
        self._step_side[:rows] = 1 - self._step_side[:rows]

    def begin_block(self, row: int) -> None:
        """Give the ports of scope ``step`` the value they have before a block's first pass."""
        for port in self.state.stepped:
            self._steps[port.suffix][self._step_side[row]][row] = port.reset

    # --- a commit

    def reserve(self, rows: int, commit_length: Array) -> bool:
        """Make room for a commit, before its pass; True where buffers moved.

        Raises:
            CapacityError: with capacity and need; nothing was changed.
        """
        need = int((self.past_length[:rows] + commit_length).max())
        if self.limit is not None and need > self.limit:
            row = int((self.past_length[:rows] + commit_length).argmax())
            raise CapacityError(
                f"row {row} holds {self.past_length[row]} committed tokens and "
                f"{commit_length[row]} more need room for {need}; the limit is {self.limit}"
            )
        if not self._columns or need <= self.capacity:
            return False
        self._grow(self._capacity_for(need))
        return True

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
    ) -> None:
        """Take over what a commit pass wrote: swap pairs, append columns, move past_length.

        Rows that committed anything begin a new block; the others keep their ``last_logits``.

        Args:
            rows: k, the rows that ran.
            commit_length: (k,) int64, the real tokens of each.
            columns: For each append port, by suffix, (k, kv_heads, nL, head_dim).
            last_logits: (k, V) of each row's last committed token, where the pass gives them.
        """
        moved = np.flatnonzero(commit_length).tolist()
        for row in moved:
            self.begin_block(row)
            if last_logits is not None:
                self.last_logits[row] = last_logits[row]
        for suffix, new in columns.items():
            target = self._columns[suffix]
            for row in moved:
                start, count = self.past_length[row], commit_length[row]
                target[row, :, start : start + count] = new[row, :, :count]
        self._side[:rows] = 1 - self._side[:rows]
        self.past_length[:rows] += commit_length

    # --- rows

    def reset(self, row: int) -> None:
        """Give a row the state it has before its first token."""
        for port in self.state.swapped:
            self._pairs[port.suffix][self._side[row]][row] = port.reset
        self.begin_block(row)
        self.last_logits[row] = 0
        self.past_length[row] = 0

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        if source == target:
            return
        for pairs, sides in ((self._pairs, self._side), (self._steps, self._step_side)):
            side = sides[target] = sides[source]
            for pair in pairs.values():
                pair[side][target] = pair[side][source]
        self.last_logits[target] = self.last_logits[source]
        used = self.past_length[source]
        for array in self._columns.values():
            array[target, :, :used] = array[source, :, :used]
        self.past_length[target] = used

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's committed state by suffix; append ports hold their used columns."""
        out = {suffix: pair[self._side[row]][row].copy() for suffix, pair in self._pairs.items()}
        used = self.past_length[row]
        out |= {suffix: array[row, :, :used].copy() for suffix, array in self._columns.items()}
        return {port.suffix: out[port.suffix] for port in self.state.committed}

    def write(self, row: int, arrays: Mapping[str, Array], past_length: int) -> None:
        """Give a row a state that :meth:`read` returned, from here or elsewhere; a block begins.

        Raises:
            DecodeError: where names or shapes do not fit; nothing was changed.
            CapacityError: where it does not fit the limit; nothing was changed.
        """
        for port in self.state.committed:
            found = arrays[port.suffix].shape if port.suffix in arrays else None
            wanted = port.past.resolve(B=1, C=past_length)[1:]
            if found != wanted:
                raise DecodeError(
                    f"state {port.suffix!r} has shape {found}, this model wants {wanted}"
                )
        self._make_room(row, past_length)
        for suffix, pair in self._pairs.items():
            pair[self._side[row]][row] = arrays[suffix]
        for suffix, array in self._columns.items():
            array[row, :, :past_length] = arrays[suffix]
        self.begin_block(row)
        self.past_length[row] = past_length

    def _make_room(self, row: int, need: int) -> None:
        if self.limit is not None and need > self.limit:
            raise CapacityError(
                f"row {row} needs room for {need} tokens; the limit is {self.limit}"
            )
        if self._columns and need > self.capacity:
            self._grow(self._capacity_for(need))

    def scribble(self, row: int, rng: np.random.Generator, *, behind: bool) -> None:
        """Fill a row with finite garbage; with `behind`, only the columns no token was put in."""
        if not behind:
            for pair in (*self._pairs.values(), *self._steps.values()):
                for buffer in pair:
                    buffer[row] = _noise(rng, buffer[row])
        start = self.past_length[row] if behind else 0
        for array in self._columns.values():
            array[row, :, start:] = _noise(rng, array[row, :, start:])

    # --- reports

    @property
    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by suffix, both buffers of a pair included."""
        pairs = {**self._pairs, **self._steps}
        out = {suffix: pair[0].nbytes + pair[1].nbytes for suffix, pair in pairs.items()}
        return out | {suffix: array.nbytes for suffix, array in self._columns.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        return self.state.state_bytes()

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        return self.state.kv_bytes_per_token() * past_length

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


def _align(pairs: Mapping[str, tuple[Array, Array]], sides: Array, rows: int) -> int:
    """Copy rows into the buffer that row 0 is live in, where they are in the other one."""
    side = int(sides[0])
    for row in np.flatnonzero(sides[:rows] != side):
        for pair in pairs.values():
            pair[side][row] = pair[1 - side][row]
        sides[row] = side
    return side


def _noise(rng: np.random.Generator, like: Array) -> Array:
    noise: Array = rng.standard_normal(like.shape, np.float32) * 1e3
    return noise.astype(like.dtype)
