"""The passes of a model that sees its whole sequence at once: a canvas per row instead of a cache.

This module mutates: :class:`FullEngine` owns the committed tokens of every row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fixedstate.errors import BackendError, CapacityError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.engine import check_denoise
from fixedstate.runtime.sequences import HostSequences, Sequences
from fixedstate.runtime.session import Session
from fixedstate.spec import ModelSpec


class FullEngine:
    """The engine of objective ``full``: every pass runs a row's whole sequence.

    A row's sequence is its committed tokens, the current block, and masks up to the room it was
    reset with. The model sees the length of it, so that stays as it is from the first pass to the
    last, rows of one length run in one call, and no row is padded to another's length.

    Args:
        spec: The model.
        sessions: By role: `full`, a session, or what runs whole sequences elsewhere.
        slots: Rows at most.
        limit: Tokens per row at most; None for no limit.

    Attributes:
        sequences: What runs the graph.

    Raises:
        BackendError: where the role is missing.
        UsageError: for slots out of range, or a model without a mask id.
    """

    fuses = False
    whole_blocks = False
    head = "logits"
    roles = ("full",)

    def __init__(
        self,
        spec: ModelSpec,
        sessions: Mapping[str, Session | Sequences],
        *,
        slots: int = 1,
        limit: int | None = None,
    ) -> None:
        if slots < 1:
            raise UsageError(f"slots must be 1 or more; got {slots}")
        if "full" not in sessions:
            raise BackendError(
                f"the bundle has no graph 'full' (it has {', '.join(sorted(sessions)) or 'none'}): "
                "only a model of objective 'full' runs on whole sequences"
            )
        if spec.mask_id is None:
            raise UsageError("the model has no mask id to fill the open slots with")
        self.spec = spec
        self.slots = slots
        self.limit = limit
        self.past_length: Array = np.zeros(slots, np.int64)
        width = spec.vocab_rows if spec.logit_shift else 0
        self.last_logits: Array = np.zeros((slots, width), np.float32)
        given = sessions["full"]
        self.sequences = (
            given if isinstance(given, Sequences) else HostSequences(given, spec.vocab_rows)
        )
        self._mask: int = spec.mask_id
        self._room: Array = np.zeros(slots, np.int64)
        self._tokens: Array = np.full((slots, 0), self._mask, np.int64)
        self._logits: Array = np.zeros((slots, spec.block_len, spec.vocab_rows), np.float32)

    @property
    def provider(self) -> str:
        """What the passes really run on."""
        return self.sequences.provider

    def reset(self, row: int, room: int = 0) -> None:
        """Empty a row and fix the length of its sequence.

        Args:
            row: The slot.
            room: T, the tokens of its prompt and of all blocks that may follow.

        Raises:
            CapacityError: where T passes the limit, where an engine takes no sequence of that
                length, or no memory is left for it; nothing was changed.
        """
        if self.limit is not None and room > self.limit:
            raise CapacityError(
                f"row {row} needs room for {room} tokens; the limit is {self.limit}"
            )
        if room:  # a row of no tokens runs in no pass
            self.sequences.check(room)
        self._reserve(room)
        self._tokens[row] = self._mask
        self._room[row] = room
        self.past_length[row] = 0
        self.last_logits[row] = 0

    def denoise(self, ids: Array, first: int = 0) -> Array:
        """Logits of a block behind each row's committed tokens; see :class:`Engine`.

        Where the model has a logit shift, `last_logits` then holds those of the position before
        the block, as this pass gives them; zeros where the block is the first of the sequence.

        Raises:
            CapacityError: where a row has no room for a block; before any pass.
        """
        ids = check_denoise(self.spec, self.slots, ids, first)
        rows, length = ids.shape
        self._check_room(first, np.full(rows, length))
        rooms = self._room[first : first + rows]
        for room in np.unique(rooms).tolist():
            self._run(ids, first, np.flatnonzero(rooms == room), room)
        return self._logits[:rows]

    def _run(self, ids: Array, first: int, group: Array, room: int) -> None:
        """One call with the rows of one length; `group` are their places in `ids`."""
        bound = self.sequences.bind(len(group), room)
        np.take(self._tokens[:, :room], first + group, axis=0, out=bound.ids, mode="clip")
        starts = self.past_length[first + group].tolist()
        length, shift = self.spec.block_len, self.spec.logit_shift
        for i, start in enumerate(starts):
            bound.ids[i, start : start + length] = ids[group[i]]
        spans = [(start - bool(shift and start), start + length) for start in starts]
        for i, found in enumerate(bound.run(spans)):
            self._logits[group[i]] = found[-length:]
            if shift and starts[i]:
                self.last_logits[first + group[i]] = found[0]

    def commit(self, ids: Array, commit_length: Array, first: int = 0) -> None:
        """Append tokens to each row; see :class:`Engine`. Any number of them, no pass is run.

        Raises:
            UsageError: with what was given and what was expected; nothing was changed.
            CapacityError: where a row has no room for them; nothing was changed.
        """
        lengths = self._check_commit(ids, commit_length, first)
        self._check_room(first, lengths)
        for i, count in enumerate(lengths.tolist()):
            start = self.past_length[first + i]
            self._tokens[first + i, start : start + count] = ids[i, :count]
        self.past_length[first : first + len(ids)] += lengths

    def commit_denoise(self, ids: Array, first: int = 0) -> Array:
        """Refused: a commit runs no pass here, so there is nothing to fuse.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            "a model of objective 'full' has no fused pass: its commits run no graph; commit and "
            "denoise one after the other"
        )

    def move(self, source: int, target: int) -> None:
        """Copy a row over another row."""
        for array in (self._tokens, self._room, self.past_length, self.last_logits):
            array[target] = array[source]

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        for array in (self._tokens, self._room, self.past_length, self.last_logits):
            array[[row, other]] = array[[other, row]]

    def close(self) -> None:
        """Give back what passes run on; a second call does nothing."""
        self.sequences.close()

    def state_bytes(self) -> int:
        """0: nothing is carried but the tokens."""
        return 0

    def kv_bytes(self, past_length: int) -> int:
        """0: no keys or values are kept."""
        return 0

    def _check_commit(self, ids: Array, commit_length: Array, first: int) -> Array:
        """The lengths of a commit, or a refusal."""
        if (
            ids.ndim != 2
            or not 1 <= len(ids) <= self.slots
            or not 0 <= first <= (self.slots - len(ids))
        ):
            raise UsageError(
                f"commit takes ids of shape [rows, tokens] for rows of slots 0..{self.slots - 1}; "
                f"got {list(ids.shape)} from slot {first} on"
            )
        lengths = np.asarray(commit_length)
        if lengths.shape != ids.shape[:1] or lengths.dtype.kind not in "iu":
            raise UsageError(
                f"commit_length must be {len(ids)} whole numbers; got {lengths.tolist()}"
            )
        if (lengths < 0).any() or (lengths > ids.shape[1]).any():
            raise UsageError(
                f"commit_length must be between 0 and {ids.shape[1]}; got {lengths.tolist()}"
            )
        used = ids[np.arange(ids.shape[1]) < lengths[:, None]]
        if ids.dtype.kind not in "iu" or (used < 0).any() or (used >= self.spec.vocab_rows).any():
            raise UsageError(
                f"ids to commit must be whole numbers 0..{self.spec.vocab_rows - 1}; got "
                f"{used.tolist()[:8]}"
            )
        return lengths.astype(np.int64)

    def _check_room(self, first: int, more: Array) -> None:
        past = self.past_length[first : first + len(more)]
        room = self._room[first : first + len(more)]
        full = np.flatnonzero(past + more > room)
        if full.size:
            i = full[0]
            raise CapacityError(
                f"row {first + i} holds {past[i]} committed tokens and has room for {room[i]}; "
                f"{more[i]} more do not fit: reset it with more room"
            )

    def _reserve(self, room: int) -> None:
        """Widen the rows, in powers of two, keeping what they hold."""
        width = self._tokens.shape[1]
        if room <= width:
            return
        wider = max(256, 1 << (room - 1).bit_length())
        try:
            grown = np.full((self.slots, wider), self._mask, np.int64)
        except MemoryError as err:
            raise CapacityError(
                f"no memory for {self.slots} rows of {wider} tokens: use fewer slots or ask for "
                "fewer new tokens"
            ) from err
        grown[:, :width] = self._tokens
        self._tokens = grown
