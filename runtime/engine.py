"""The passes of a model over its state: what the decode loop drives, on any back end.

This module mutates, through :class:`fixedstate.runtime.buffers.StateBuffers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from fixedstate.errors import BackendError, UsageError
from fixedstate.ports import Array, numpy_dtype
from fixedstate.runtime.buffers import RowBuffers, StateBuffers
from fixedstate.runtime.session import Binding, Session
from fixedstate.spec import ModelSpec
from fixedstate.state import StateSpec, head_ports, head_role, split_role, top_k_of

P = TypeVar("P")
"""What serves a role."""

KEPT_BINDINGS = 256  # passes of one shape over the same slots; each keeps some kilobytes


class Engine(Protocol):
    """State of some rows and the passes over it; rows of a call are slots first..first+k-1."""

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

    @property
    def fuses(self) -> bool:
        """Whether :meth:`commit_denoise` can be called: then it is, wherever a block is finished.

        Its bytes may differ from those of two passes, so which way a row takes must not depend on
        what runs beside it.
        """
        ...

    @property
    def whole_blocks(self) -> bool:
        """Whether blocks are cut from a row's first token; else they begin behind its prompt.

        Where they are, prompts are committed in whole blocks and the rest of a prompt stands in
        the first block that is decoded. Where not, any number of tokens can be committed.
        """
        ...

    @property
    def head(self) -> str:
        """What the passes give, one of :data:`fixedstate.state.HEADS`.

        Where that is less than ``logits`` it is a :class:`HeadEngine`, whose two passes take the
        place of :meth:`denoise` and :meth:`commit_denoise`.
        """
        ...

    def denoise(self, ids: Array, first: int = 0) -> Array:
        """Logits of a block behind each row's committed tokens; commits nothing.

        State of scope ``step`` goes from pass to pass and starts anew after a commit or a reset.

        Args:
            ids: (k, L) integers, mask ids where a slot is open.
            first: Slot of the first row.

        Returns:
            (k, L, V) float32, valid until the next pass.
        """
        ...

    def commit(self, ids: Array, commit_length: Array, first: int = 0) -> None:
        """Carry clean tokens into each row's state.

        Args:
            ids: (k, nL) integers.
            commit_length: (k,), the real tokens of each row; 0 leaves it as it is.
            first: Slot of the first row.
        """
        ...

    def commit_denoise(self, ids: Array, first: int = 0) -> Array:
        """Commit a finished block of each row and give the logits of the next one, in one pass.

        Args:
            ids: (k, 2L) integers: L clean tokens, then a block with mask ids in it.
            first: Slot of the first row.

        Returns:
            (k, L, V) float32 of the second half, valid until the next pass.
        """
        ...

    def reset(self, row: int, room: int = 0) -> None:
        """Give a row the state it has before its first token.

        Args:
            row: The slot.
            room: Tokens its request can come to, for engines that must know before.
        """
        ...

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        ...

    def swap(self, row: int, other: int) -> None:
        """Exchange the states of two rows."""
        ...

    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        ...

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        ...


class HeadEngine(Engine, Protocol):
    """An engine whose passes give what a reduced head gives of the positions asked for."""

    @property
    def top_k(self) -> int:
        """Tokens that the head ``top_k`` gives."""
        ...

    def denoise_at(self, ids: Array, places: Array, first: int = 0) -> Mapping[str, Array]:
        """What ``denoise`` would predict at some positions of the block.

        Args:
            ids: (k, L) integers, mask ids where a slot is open.
            places: (k, R) integers in 0..L-1; a row may name one more than once.
            first: Slot of the first row.

        Returns:
            By port name (:func:`fixedstate.state.head_ports`), valid until the next pass.
        """
        ...

    def commit_denoise_at(self, ids: Array, places: Array, first: int = 0) -> Mapping[str, Array]:
        """The same of ``commit_denoise``: positions are those of the second block."""
        ...


class ReadableEngine(Engine, Protocol):
    """An engine whose state can be looked at, as the laws do."""

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's state by port suffix; keys and values of committed tokens only."""
        ...

    def begin_block(self, row: int) -> None:
        """Forget what earlier denoise passes left in the state of scope ``step``."""
        ...


def check_denoise(
    spec: ModelSpec, slots: int, ids: Array, first: int = 0, *, blocks: int = 1
) -> Array:
    """The ids of a pass that gives logits, or a refusal of a wrong shape, slot or id.

    Args:
        spec: The model.
        slots: Rows at most.
        ids: (k, blocks * L).
        first: Slot of the first row.
        blocks: 1 for ``denoise``, 2 for ``commit_denoise``.

    Raises:
        UsageError: with what was given and what was expected.
    """
    name = "denoise" if blocks == 1 else "commit_denoise"
    width = blocks * spec.block_len
    if ids.ndim != 2 or ids.shape[1] != width or not 1 <= ids.shape[0] <= slots:
        raise UsageError(f"{name} takes ids of shape [1..{slots}, {width}]; got {list(ids.shape)}")
    _check_first(slots, first, ids.shape[0])
    return _check_range(spec, ids)


def check_places(spec: ModelSpec, rows: int, places: Array) -> Array:
    """The positions that a reduced head is asked for, or a refusal.

    Raises:
        UsageError: with what was given and what was expected.
    """
    length = spec.block_len
    fits = places.ndim == 2 and places.shape[0] == rows and 1 <= places.shape[1] <= length
    if not fits or places.dtype.kind not in "iu":
        raise UsageError(
            f"places must be whole numbers of shape [{rows}, 1..{length}]; got {places.dtype} "
            f"{list(places.shape)}"
        )
    if places.min() < 0 or places.max() >= length:
        raise UsageError(f"places must be between 0 and {length - 1}; got {places.tolist()}")
    return places


def _check_first(slots: int, first: int, rows: int) -> None:
    if not 0 <= first <= slots - rows:
        raise UsageError(f"{rows} rows from slot {first} on do not lie in slots 0..{slots - 1}")


def check_commit(
    spec: ModelSpec, slots: int, ids: Array, commit_length: Array, first: int = 0
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
    _check_first(slots, first, ids.shape[0])
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
    places: Array | None
    given: dict[str, Array]
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


class PassEngine(ABC):
    """What engines of one graph per role share, wherever their state lies.

    Args:
        spec: The model.
        slots: Rows at most.
        weights: Hash of the weights, which saved states are held against.

    Attributes:
        spec: The model.
        weights: Hash of the weights.
        roles: Roles that are loaded, sorted.
        head: What the passes give; see :class:`Engine`.
        fuses: Whether :meth:`commit_denoise` can be called.
        buffers: The carried state.
    """

    whole_blocks = True
    """Blocks are cut from a row's first token."""

    roles: tuple[str, ...]
    head: str
    fuses: bool
    buffers: RowBuffers

    _part: ClassVar[str]
    """What serves a role, in messages."""
    _holder: ClassVar[str]
    """What holds the parts."""
    _verb: ClassVar[str]
    """What has to be done again where a part is missing."""
    _fusing: ClassVar[str]
    """What has to be done for the fused part."""

    def __init__(self, spec: ModelSpec, slots: int, weights: str) -> None:
        if slots < 1:
            raise UsageError(f"slots must be 1 or more; got {slots}")
        self.spec = spec
        self.weights = weights

    def _serve(self, parts: Mapping[str, P]) -> dict[str, P]:
        """The part that serves each pass, from those that are loaded by role.

        ``commit_denoise`` takes the place of ``denoise`` or ``commit`` where one is missing.

        Raises:
            BackendError: for more than one head, or where a pass has no part.
        """
        self.roles = tuple(sorted(parts))
        heads = sorted({split_role(role)[1] for role in parts} - {"logits"})
        if len(heads) > 1:
            raise BackendError(f"the heads {' and '.join(heads)} are both loaded: load one of them")
        self.head = heads[0] if heads else "logits"
        fused = head_role("commit_denoise", self.head)
        serving: dict[str, P] = {}
        for role in ("denoise", "commit"):
            own = role if role == "commit" else head_role(role, self.head)
            name = own if own in parts else fused
            if name not in parts:
                raise BackendError(
                    f"the {self._holder} has no {self._part} {own!r} (it has "
                    f"{', '.join(self.roles) or 'none'}): {self._verb} it again with that role"
                )
            serving[role] = parts[name]
        self.fuses = fused in parts
        if self.fuses:
            serving["commit_denoise"] = parts[fused]
        return serving

    # --- what it is

    @property
    def state(self) -> StateSpec:
        """What is carried."""
        return self.buffers.state

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

    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        return self.buffers.state_bytes

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        return self.buffers.kv_bytes(past_length)

    # --- passes

    @abstractmethod
    def _denoise(self, ids: Array, places: Array | None, first: int) -> dict[str, Array]:
        """A denoise pass; what it gives by port name."""

    @abstractmethod
    def _commit_denoise(self, ids: Array, places: Array | None, first: int) -> dict[str, Array]:
        """A fused pass; what it gives by port name."""

    def denoise(self, ids: Array, first: int = 0) -> Array:
        """Logits of a block behind each row's committed tokens; see :class:`Engine`.

        Raises:
            BackendError: where what is loaded gives less than that, or the back end fails.
        """
        self._require_logits()
        return self._denoise(ids, None, first)["logits"]

    def denoise_at(self, ids: Array, places: Array, first: int = 0) -> dict[str, Array]:
        """What a reduced head predicts at some positions; see :class:`HeadEngine`."""
        return self._denoise(ids, places, first)

    def commit_denoise(self, ids: Array, first: int = 0) -> Array:
        """Commit a block and give the logits of the next, in one pass; see :class:`Engine`.

        Raises:
            BackendError: where the fused part is not loaded, or gives less than logits.
        """
        self._require_logits()
        self._require_fused()
        return self._commit_denoise(ids, None, first)["logits"]

    def commit_denoise_at(self, ids: Array, places: Array, first: int = 0) -> dict[str, Array]:
        """The same with what a reduced head predicts; see :class:`HeadEngine`."""
        self._require_fused()
        return self._commit_denoise(ids, places, first)

    def _require_logits(self) -> None:
        if self.head != "logits":
            raise BackendError(
                f"the {self._part}s that are loaded give {self.head}, not all scores: load the "
                f"{self._holder} without a head"
            )

    def _require_fused(self) -> None:
        if not self.fuses:
            raise BackendError(
                f"the {self._part} commit_denoise is not loaded: {self._fusing}, or commit and "
                "denoise in two passes"
            )

    def _checked(self, rows: int, places: Array | None) -> Array | None:
        """Places for what is loaded; BackendError where that takes none."""
        if places is None:
            return None
        if self.head == "logits":
            raise BackendError(
                f"the {self._part}s that are loaded give all scores: load the {self._holder} with "
                "a head to ask for less"
            )
        return check_places(self.spec, rows, places)


class SessionEngine(PassEngine):
    """The passes as sessions of a back end, on memory bound once per shape.

    Bindings are made per role, rows, blocks n, capacity and side of the pairs, and the last
    :data:`KEPT_BINDINGS` used are kept: a pass writes its ids into bound memory, runs, and swaps.

    Args:
        spec: The model.
        state: What is carried.
        sessions: By role; `commit_denoise` takes the place of `denoise` or `commit` where one is
            missing, and with it blocks are committed and the next ones begun in one pass. With a
            role of a reduced head, the roles of that head alone denoise.
        slots: Rows at most.
        limit: Committed tokens per row at most; None for no limit.
        capacity: Columns of keys and values at first.
        weights: Hash of the weights, which saved states are held against.

    Attributes:
        roles: Roles of the sessions, sorted.

    Raises:
        BackendError: where a role is missing or a session's ports are not those of the state.
    """

    buffers: StateBuffers
    _part, _holder, _verb = "graph", "bundle", "export"
    _fusing = "export the bundle with the fused graph"

    def __init__(
        self,
        spec: ModelSpec,
        state: StateSpec,
        sessions: Mapping[str, Session],
        *,
        slots: int = 1,
        limit: int | None = None,
        capacity: int = 0,
        weights: str = "",
    ) -> None:
        super().__init__(spec, slots, weights)
        self._sessions = self._serve(sessions)
        width = spec.vocab_rows if spec.logit_shift else 0
        self.buffers = StateBuffers(state, slots, spec.block_len, capacity, limit, width)
        self._scratch = _Scratch()
        self._bound: OrderedDict[tuple[Any, ...], _Bound] = OrderedDict()
        self._ports = {port.past.name: port for port in state.ports}
        self._presents = {port.present.name: port for port in state.ports}
        self._given = [port.name for port in head_ports(spec, self.head)]

    @property
    def provider(self) -> str:
        """What the passes really run on."""
        return self._sessions["denoise"].provider

    @property
    def top_k(self) -> int:
        """Tokens that the head ``top_k`` gives; see :class:`HeadEngine`."""
        return top_k_of(self._sessions["denoise"].outputs)

    def _denoise(self, ids: Array, places: Array | None, first: int) -> dict[str, Array]:
        ids = check_denoise(self.spec, self.slots, ids, first)
        rows = ids.shape[0]
        bound = self._run("denoise", ids, first, 0, self._checked(rows, places))
        self.buffers.advance_step(rows, first)
        return bound.given

    def commit(self, ids: Array, commit_length: Array, first: int = 0) -> None:
        """Carry clean tokens into each row's state; see :class:`Engine`."""
        ids, lengths = check_commit(self.spec, self.slots, ids, commit_length, first)
        rows = ids.shape[0]
        self._reserve(rows, lengths, first)
        bound = self._run("commit", ids, first, lengths)
        self.buffers.commit(rows, lengths, bound.columns, bound.last_logits, first)

    def _commit_denoise(self, ids: Array, places: Array | None, first: int) -> dict[str, Array]:
        ids = check_denoise(self.spec, self.slots, ids, first, blocks=2)
        rows = ids.shape[0]
        lengths = np.full(rows, self.spec.block_len, np.int64)
        self._reserve(rows, lengths, first)
        for row in range(first, first + rows):
            self.buffers.begin_block(row)  # the pass reads what the new block begins with
        bound = self._run("commit_denoise", ids, first, lengths, self._checked(rows, places))
        self.buffers.commit(rows, lengths, bound.columns, bound.last_logits, first)
        self.buffers.advance_step(rows, first)
        return bound.given

    def _reserve(self, rows: int, lengths: Array, first: int) -> None:
        if self.buffers.reserve(rows, lengths, first):
            self._bound.clear()

    def _run(
        self,
        role: str,
        ids: Array,
        first: int,
        commit_length: Array | int,
        places: Array | None = None,
    ) -> _Bound:
        """Run one pass on slots first..; what it wrote is not taken over yet."""
        asked = 1 if places is None else places.shape[1]
        bound = self._bind(role, first, ids.shape[0], ids.shape[1] // self.spec.block_len, asked)
        np.copyto(bound.ids, ids)
        if bound.commit_length is not None:
            bound.commit_length[:] = commit_length
        if bound.places is not None:
            bound.places[:] = 0 if places is None else places
        bound.binding.run()
        return bound

    def begin_block(self, row: int) -> None:
        """Forget what earlier denoise passes left in the state of scope ``step``."""
        self.buffers.begin_block(row)

    def reset(self, row: int, room: int = 0) -> None:
        """Give a row the state it has before its first token."""
        self.buffers.reset(row)

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        self.buffers.move(source, target)

    def swap(self, row: int, other: int) -> None:
        """Exchange the states of two rows."""
        self.buffers.swap(row, other)

    def views(self, row: int) -> dict[str, Array]:
        """A row's state by port suffix, where it lies: read it before the next pass."""
        return self.buffers.views(row)

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's state by port suffix; keys and values of committed tokens only."""
        return self.buffers.read(row)

    def write(
        self,
        row: int,
        arrays: Mapping[str, Array],
        past_length: int,
        last_logits: Array | None = None,
    ) -> None:
        """Give a row a state that :meth:`read` returned, from here or elsewhere.

        `last_logits` (V,) belong to it where the model predicts the next position.
        """
        capacity = self.buffers.capacity
        self.buffers.write(row, arrays, past_length, last_logits)
        if self.buffers.capacity != capacity:
            self._bound.clear()

    def _bind(self, role: str, first: int, rows: int, blocks: int, asked: int) -> _Bound:
        sides = self.buffers.align(rows, first), self.buffers.align_step(rows, first)
        key = (role, first, rows, blocks, asked, sides)
        bound = self._bound.get(key)
        if bound is None:
            self._scratch.grown = False
            bound = self._make(role, slice(first, first + rows), blocks, asked, *sides)
            if self._scratch.grown:  # older bindings hold the memory that was replaced
                self._bound.clear()
            elif len(self._bound) >= KEPT_BINDINGS:
                self._bound.popitem(last=False)
            self._bound[key] = bound
        else:
            self._bound.move_to_end(key)
        return bound

    def _make(
        self, role: str, rows: slice, blocks: int, asked: int, side: int, step_side: int
    ) -> _Bound:
        session = self._sessions[role]
        first, count = rows.start, rows.stop - rows.start
        sizes = {"B": count, "n": blocks, "m": blocks, "C": self.buffers.capacity, "R": asked}
        inputs: dict[str, Array] = {}
        for port in session.inputs:
            if port.name in self._ports:
                pair = self._ports[port.name]
                which = step_side if pair.scope == "step" else side
                inputs[port.name] = self.buffers.past(pair, which, count, first)
            elif port.name == "past_length":
                inputs[port.name] = self.buffers.past_length[rows]
            else:
                shape = port.resolve(**sizes)
                inputs[port.name] = self._scratch.view(port.name, port.dtype, shape)
        outputs: dict[str, Array] = {}
        columns: dict[str, Array] = {}
        for port in session.outputs:
            leaves = self._presents.get(port.name)
            if leaves is not None and leaves.update == "swap":
                which = step_side if leaves.scope == "step" else side
                outputs[port.name] = self.buffers.present(leaves, which, count, first)
                continue
            outputs[port.name] = self._scratch.view(port.name, port.dtype, port.resolve(**sizes))
            if leaves is not None:
                columns[leaves.suffix] = outputs[port.name]
        return _Bound(
            binding=session.bind(inputs, outputs),
            ids=inputs["input_ids"],
            commit_length=inputs.get("commit_length"),
            places=inputs.get("open_slots"),
            given={name: outputs[name] for name in self._given if name in outputs},
            last_logits=outputs.get("last_logits"),
            columns=columns,
        )
