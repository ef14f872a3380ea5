"""A request on its way: what is asked, where it stands and what came of it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fixedstate.ports import Array
from fixedstate.runtime.requests import PHASES, BlockEvent, Rules

if TYPE_CHECKING:
    from fixedstate.runtime.sampling import Scores
    from fixedstate.runtime.snapshot import Snapshot

_NONE: Array = np.zeros(0, np.int64)


@dataclass(slots=True)
class Row:
    """One request: waiting, its prompt being committed, its blocks being denoised, or ended.

    Attributes:
        request: Its number.
        prompt: Ids to go on from, those that a saved prefix left open included.
        rules: Its settings with every default filled in.
        block_len: L.
        room: Tokens it can come to.
        base: Tokens that a saved prefix had committed.
        whole_blocks: Whether blocks are cut from its first token.
        prefix: The saved state it begins with.
        keep_state: Whether the state behind its answer is wanted.
        keep_tokens: Whether the answer is kept here, besides being handed over block by block.
        tokens: The answer so far, where it is kept.
        count: Tokens of the answer so far.
        last: What of prompt and answer stands in the block that ended it.
        blocks: Finished blocks of the answer.
        step: Passes of the current block so far.
        passes: Denoise passes so far.
        forced: Slots that the step cap filled.
        prefilled: Tokens of the prompt that are committed.
        committed: Tokens that the engine holds, or will hold once the finished block is committed.
        pending: Whether its last block is finished and not committed yet.
        held: What the last pass gave, logits or scores, where nothing has changed since.
        policy_state: What its policy keeps inside a block.
        reason: Why it ended; None while it goes on.
        error: What went wrong.
        state: The state behind its answer.
        seconds: By phase.
    """

    request: int
    prompt: Array
    rules: Rules
    block_len: int
    room: int = 0
    base: int = 0
    whole_blocks: bool = True
    prefix: Snapshot | None = None
    keep_state: bool = False
    keep_tokens: bool = True
    tokens: list[int] = field(default_factory=list)
    count: int = 0
    last: Array = field(default_factory=lambda: _NONE)
    blocks: int = 0
    step: int = 0
    passes: int = 0
    forced: int = 0
    prefilled: int = 0
    committed: int = 0
    pending: bool = False
    held: Array | Scores | None = None
    policy_state: Any = None
    reason: str | None = None
    error: str | None = None
    state: Snapshot | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    started: float = 0.0

    @property
    def to_prefill(self) -> int:
        """Tokens of the prompt that are committed before the first pass."""
        if not self.whole_blocks:
            return len(self.prompt)
        return len(self.prompt) // self.block_len * self.block_len

    def slice_end(self, prefill_blocks: int) -> int:
        """Where the next slice of the prompt ends; slices are counted from the row's first token.

        So they are those of a row that began without a saved prefix, as far as possible, and never
        depend on other rows.
        """
        if not self.whole_blocks:
            return self.to_prefill
        size = max(1, prefill_blocks) * self.block_len
        return slice_end(self.prefilled, self.to_prefill, size, self.base)

    @property
    def remainder(self) -> Array:
        """Prompt tokens fixed in the first active block; none in later blocks."""
        return self.prompt[self.to_prefill :] if self.blocks == 0 else _NONE

    @property
    def bans_stops(self) -> bool:
        """Whether a slot of the current block lies before min_new_tokens."""
        return bool(self.rules.stop_ids) and self.count < self.rules.min_new_tokens

    def banned(self) -> tuple[Array, tuple[int, ...]]:
        """(L,) bool, the slots where a stop id may not stand, and the stop ids."""
        new = np.arange(self.block_len) - len(self.remainder) + self.count
        return new < self.rules.min_new_tokens, self.rules.stop_ids

    def close_block(self, canvas: Sequence[int]) -> BlockEvent:
        """Take a full block's new tokens, cut at the first stop id and at the limit.

        Args:
            canvas: (L,) ids, none of them the mask.
        """
        rules, fixed = self.rules, len(self.remainder)
        new = list(canvas[fixed:])[: rules.max_new_tokens - self.count]
        stop = next((i for i, token in enumerate(new) if token in rules.stop_ids), None)
        if stop is not None:
            new = new[: stop + 1]
        self.count += len(new)
        if self.keep_tokens:
            self.tokens += new
        if stop is not None:
            self.reason = "stop"
        elif self.count >= rules.max_new_tokens:
            self.reason = "length"
        if self.reason is not None:
            self.last = np.array(canvas[: fixed + len(new)], np.int64)
        self.blocks += 1
        return BlockEvent(self.request, self.blocks - 1, tuple(new), self.reason)


def slice_end(start: int, end: int, size: int, base: int = 0) -> int:
    """Where a slice of a prompt that begins at `start` ends.

    Slices end at multiples of their size from the row's first token, that of a saved prefix.

    Args:
        start: Tokens of the prompt that are committed.
        end: Those that are to be.
        size: Tokens of a whole slice.
        base: Tokens that a saved prefix had committed before.

    Example:
        >>> slice_end(0, 100, 32), slice_end(0, 100, 32, base=40), slice_end(96, 100, 32)
        (32, 24, 100)
    """
    return min(end, ((base + start) // size + 1) * size - base)
