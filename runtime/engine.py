"""The passes of a model over its state: what the decode loop drives, on any back end.

This module mutates, through :class:`fixedstate.runtime.buffers.StateBuffers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fixedstate.errors import BackendError, UsageError
from fixedstate.ports import Array, numpy_dtype
from fixedstate.runtime.buffers import StateBuffers
from fixedstate.runtime.session import Binding, Session
from fixedstate.spec import ModelSpec
from fixedstate.state import StateSpec


class Engine(Protocol):
    """State of some rows and the two passes over it; rows of a call are slots 0..k-1."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        ...

    @property
    def slots(self) -> int:
        """Rows at most."""
        ...

    @property
    def limit(self) -> int | None:
        """Committed tokens per row at most; None for no limit."""
        ...

    @property
    def past_length(self) -> Array:
        """(slots,) int64, committed tokens per row; not to be written."""
        ...

    @property
    def provider(self) -> str:
        """What the passes really run on."""
        ...

    @property
    def last_logits(self) -> Array:
        """(slots, V) float32 logits of each row's last committed token, zeros before the first.

        Only of a model with a logit shift; it has V = 0 elsewhere. Not to be written.
        """
        ...

    def denoise(self, ids: Array) -> Array:
        """Logits of a block behind each row's committed tokens; commits nothing.

        State of scope ``step`` goes from pass to pass and starts anew after a commit or a reset.

        Args:
            ids: (k, L) integers, mask ids where a slot is open.

        Returns:
            (k, L, V) float32, valid until the next pass.
        """
        ...

    def commit(self, ids: Array, commit_length: Array) -> None:
        """Carry clean tokens into each row's state.

        Args:
            ids: (k, nL) integers.
            commit_length: (k,), the real tokens of each row; 0 leaves it as it is.
        """
        ...

    def reset(self, row: int) -> None:
        """Give a row the state it has before its first token."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        ...

    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        ...

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        ...


class ReadableEngine(Engine, Protocol):
    """An engine whose state can be looked at, as the laws do."""

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's state by port suffix; keys and values of committed tokens only."""
        ...

    def begin_block(self, row: int) -> None:
        """Forget what earlier denoise passes left in the state of scope ``step``."""
        ...


def check_denoise(spec: ModelSpec, slots: int, ids: Array) -> Array:
    """The ids of a denoise pass, or a refusal of a wrong shape or an id outside the embedding.

    Raises:
        UsageError: with what was given and what was expected.
    """
    if ids.ndim != 2 or ids.shape[1] != spec.block_len or not 1 <= ids.shape[0] <= slots:
        raise UsageError(
            f"denoise takes ids of shape [1..{slots}, {spec.block_len}]; got {list(ids.shape)}"
        )
    return _check_range(spec, ids)


def check_commit(
    spec: ModelSpec, slots: int, ids: Array, commit_length: Array
) -> tuple[Array, Array]:
    """Ids and lengths of a commit pass, or a refusal before the pass.

    A length inside a block is exact only where nothing in the pass looks ahead; elsewhere it is
    refused.

    Raises:
        UsageError: with what was given and what was expected.
    """
    length = spec.block_len
    if ids.ndim != 2 or not 1 <= ids.shape[0] <= slots or ids.shape[1] % length or ids.size == 0:
        raise UsageError(
            f"commit takes ids of shape [1..{slots}, n x {length}]; got {list(ids.shape)}"
        )
    lengths = np.asarray(commit_length)
    if lengths.shape != ids.shape[:1] or lengths.dtype.kind not in "iu":
        raise UsageError(
            f"commit_length must be {ids.shape[0]} whole numbers; got {lengths.tolist()}"
        )
    if (lengths < 0).any() or (lengths > ids.shape[1]).any():
        raise UsageError(
            f"commit_length must be between 0 and {ids.shape[1]}; got {lengths.tolist()}"
        )
    if (lengths % length).any() and not spec.causal_commit:
        raise UsageError(
            f"commit_length {lengths.tolist()} ends inside a block of {length} tokens, but this "
            "model's commit pass looks ahead inside the block: commit whole blocks"
        )
    return _check_range(spec, ids), lengths.astype(np.int64)


def _check_range(spec: ModelSpec, ids: Array) -> Array:
    if ids.dtype.kind not in "iu":
        raise UsageError(f"ids must be whole numbers; got {ids.dtype}")
    low, high = ids.min(), ids.max()
    if low < 0 or high >= spec.vocab_rows:
        wrong = low if low < 0 else high
        raise UsageError(f"id {wrong} is outside the embedding 0..{spec.vocab_rows - 1}")
    return ids


@dataclass(frozen=True, slots=True)
class _Bound:
    """One pass with its memory: write ids (and lengths), run, read what came out."""

    binding: Binding
    ids: Array
    commit_length: Array | None
    logits: Array | None
    last_logits: Array | None
    columns: dict[str, Array]


class _Scratch:
    """Memory that passes write before it is taken over; grown, never shrunk."""

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}
        self.grown = False

    def view(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        """A contiguous array of that shape at the start of the memory called `name`."""
        count = int(np.prod(shape))
        flat = self._flat.get(name)
        if flat is None or flat.size < count:
            self._flat[name] = flat = np.zeros(count, numpy_dtype(dtype))
            self.grown = True
        return flat[:count].reshape(shape)


class SessionEngine:
    """The passes as sessions of a back end, on memory bound once per shape.

    Bindings are made per role, batch k, blocks n, capacity and side of the pairs, and kept: a pass
    writes its ids into bound memory, runs, and swaps.

    Args:
        spec: The model.
        state: What is carried.
        sessions: By role: `denoise` and `commit`, or `commit_denoise` for either.
        slots: Rows at most.
        limit: Committed tokens per row at most; None for no limit.
        capacity: Columns of keys and values at first.

    Raises:
        BackendError: where a role is missing or a session's ports are not those of the state.
    """

    def __init__(
        self,
        spec: ModelSpec,
        state: StateSpec,
        sessions: Mapping[str, Session],
        *,
        slots: int = 1,
        limit: int | None = None,
        capacity: int = 0,
    ) -> None:
        if slots < 1:
            raise UsageError(f"slots must be 1 or more; got {slots}")
        self._spec = spec
        self._sessions = {role: _pick(sessions, role) for role in ("denoise", "commit")}
        width = spec.vocab_rows if spec.logit_shift else 0
        self.buffers = StateBuffers(state, slots, spec.block_len, capacity, limit, width)
        self._scratch = _Scratch()
        self._bound: dict[tuple[Any, ...], _Bound] = {}
        self._ports = {port.past.name: port for port in state.ports}
        self._presents = {port.present.name: port for port in state.ports}

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._spec

    @property
    def slots(self) -> int:
        """Rows at most."""
        return self.buffers.slots

    @property
    def limit(self) -> int | None:
        """Committed tokens per row at most; None for no limit."""
        return self.buffers.limit

    @property
    def past_length(self) -> Array:
        """(slots,) int64, committed tokens per row; not to be written."""
        return self.buffers.past_length

    @property
    def last_logits(self) -> Array:
        """(slots, V) float32 logits of each row's last committed token; see :class:`Engine`."""
        return self.buffers.last_logits

    @property
    def provider(self) -> str:
        """What the passes really run on."""
        return self._sessions["denoise"].provider

    def denoise(self, ids: Array) -> Array:
        """Logits of a block behind each row's committed tokens; see :class:`Engine`."""
        ids = check_denoise(self._spec, self.slots, ids)
        bound = self._bind("denoise", ids.shape[0], 1)
        np.copyto(bound.ids, ids)
        if bound.commit_length is not None:
            bound.commit_length[:] = 0
        bound.binding.run()
        self.buffers.advance_step(ids.shape[0])
        assert bound.logits is not None
        return bound.logits

    def commit(self, ids: Array, commit_length: Array) -> None:
        """Carry clean tokens into each row's state; see :class:`Engine`."""
        ids, lengths = check_commit(self._spec, self.slots, ids, commit_length)
        rows = ids.shape[0]
        if self.buffers.reserve(rows, lengths):
            self._bound.clear()
        bound = self._bind("commit", rows, ids.shape[1] // self._spec.block_len)
        np.copyto(bound.ids, ids)
        if bound.commit_length is not None:
            bound.commit_length[:] = lengths
        bound.binding.run()
        self.buffers.commit(rows, lengths, bound.columns, bound.last_logits)

    def begin_block(self, row: int) -> None:
        """Forget what earlier denoise passes left in the state of scope ``step``."""
        self.buffers.begin_block(row)

    def reset(self, row: int) -> None:
        """Give a row the state it has before its first token."""
        self.buffers.reset(row)

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        self.buffers.move(source, target)

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's state by port suffix; keys and values of committed tokens only."""
        return self.buffers.read(row)

    def write(self, row: int, arrays: Mapping[str, Array], past_length: int) -> None:
        """Give a row a state that :meth:`read` returned, from here or elsewhere."""
        capacity = self.buffers.capacity
        self.buffers.write(row, arrays, past_length)
        if self.buffers.capacity != capacity:
            self._bound.clear()

    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        return self.buffers.state_bytes

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        return self.buffers.kv_bytes(past_length)

    def _bind(self, role: str, rows: int, blocks: int) -> _Bound:
        sides = self.buffers.align(rows), self.buffers.align_step(rows)
        key = (role, rows, blocks, sides)
        bound = self._bound.get(key)
        if bound is None:
            self._scratch.grown = False
            bound = self._make(role, rows, blocks, *sides)
            if self._scratch.grown:  # older bindings hold the memory that was replaced
                self._bound.clear()
            self._bound[key] = bound
        return bound

    def _make(self, role: str, rows: int, blocks: int, side: int, step_side: int) -> _Bound:
        session = self._sessions[role]
        sizes = {"B": rows, "n": blocks, "m": blocks, "C": self.buffers.capacity}
        inputs: dict[str, Array] = {}
        for port in session.inputs:
            if port.name in self._ports:
                pair = self._ports[port.name]
                which = step_side if pair.scope == "step" else side
                inputs[port.name] = self.buffers.past(pair, which, rows)
            elif port.name == "past_length":
                inputs[port.name] = self.buffers.past_length[:rows]
            else:
                shape = port.resolve(**sizes)
                inputs[port.name] = self._scratch.view(port.name, port.dtype, shape)
        outputs: dict[str, Array] = {}
        columns: dict[str, Array] = {}
        for port in session.outputs:
            leaves = self._presents.get(port.name)
            if leaves is not None and leaves.update == "swap":
                which = step_side if leaves.scope == "step" else side
                outputs[port.name] = self.buffers.present(leaves, which, rows)
                continue
            outputs[port.name] = self._scratch.view(port.name, port.dtype, port.resolve(**sizes))
            if leaves is not None:
                columns[leaves.suffix] = outputs[port.name]
        return _Bound(
            binding=session.bind(inputs, outputs),
            ids=inputs["input_ids"],
            commit_length=inputs.get("commit_length"),
            logits=outputs.get("logits"),
            last_logits=outputs.get("last_logits"),
            columns=columns,
        )


def _pick(sessions: Mapping[str, Session], role: str) -> Session:
    for name in (role, "commit_denoise"):
        if name in sessions:
            return sessions[name]
    raise BackendError(
        f"the bundle has no graph {role!r} (it has {', '.join(sorted(sessions)) or 'none'}): "
        "export it again with that role"
    )
