"""The way through a batch of sequences that ranges are taken from and models are compared along.

Blocks are denoised at several shares of masks and then committed clean, as training did and as
decoding visits them; each engine carries a state of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fixedstate.calib.data import Record
from fixedstate.calib.table import Policy
from fixedstate.ports import Array
from fixedstate.runtime.engine import ReadableEngine
from fixedstate.runtime.prefix import commit_slices
from fixedstate.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Pass:
    """What a denoise pass was given.

    Attributes:
        share: Of the open slots that are masked.
        block: Index of the block.
        rows: Slots of the engine, one after the other.
        tokens: (rows, L) int64, the clean block.
        masked: (rows, L) bool.
    """

    share: float
    block: int
    rows: tuple[int, ...]
    tokens: Array
    masked: Array


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A batch of sequences, longest first.

    Attributes:
        spec: The model.
        policy: Which passes.
        records: The sequences, each of whole blocks.
        prefill_blocks: Blocks of a prompt that one commit takes.
    """

    spec: ModelSpec
    policy: Policy
    records: Sequence[Record]
    prefill_blocks: int

    def drive(
        self,
        engines: Sequence[ReadableEngine],
        before: Callable[[Pass], None] | None = None,
        behind: Callable[[Pass, list[Array]], None] | None = None,
        committed: Callable[[int, tuple[int, ...]], None] | None = None,
    ) -> None:
        """Take every engine through all blocks, pass by pass.

        Args:
            engines: With a slot for each sequence; what they held is lost.
            before: Told of every denoise pass before it is run.
            behind: Told behind it, with the (rows, L, V) logits of each engine, valid until then.
            committed: Told which block was committed in which slots.
        """
        length = self.spec.block_len
        for engine in engines:
            for row, record in enumerate(self.records):
                engine.reset(row)
                whole = record.prompt_len // length * length
                commit_slices(engine, np.array(record.ids[:whole]), self.prefill_blocks, row)
        first = [record.prompt_len // length for record in self.records]
        last = [len(record.ids) // length for record in self.records]
        for block in range(max(last, default=0)):
            active = [row for row in range(len(last)) if first[row] <= block < last[row]]
            for _, run in groupby(enumerate(active), lambda pair: pair[1] - pair[0]):
                rows = tuple(row for _, row in run)
                for one in self._passes(rows, block):
                    if before is not None:
                        before(one)
                    given = [self._denoise(engine, one) for engine in engines]
                    if behind is not None:
                        behind(one, given)
                for engine in engines:
                    engine.commit(self._tokens(rows, block), np.full(len(rows), length), rows[0])
                if committed is not None:
                    committed(block, rows)

    def _passes(self, rows: tuple[int, ...], block: int) -> list[Pass]:
        tokens = self._tokens(rows, block)
        found = []
        for share in self.policy.masks:
            masked = np.zeros(tokens.shape, bool)
            for row, slots in zip(rows, masked, strict=True):
                order = self._order(self.records[row], block)
                slots[order[: max(1, round(share * len(order)))]] = True
            found.append(Pass(share, block, rows, tokens, masked))
        return found

    def _denoise(self, engine: ReadableEngine, one: Pass) -> Array:
        if one.share == self.policy.masks[0]:
            for row in one.rows:
                engine.begin_block(row)
        assert self.spec.mask_id is not None
        canvas = np.where(one.masked, self.spec.mask_id, one.tokens)
        return engine.denoise(canvas, one.rows[0])

    def _tokens(self, rows: tuple[int, ...], block: int) -> Array:
        start, end = block * self.spec.block_len, (block + 1) * self.spec.block_len
        return np.array([self.records[row].ids[start:end] for row in rows], np.int64)

    def _order(self, record: Record, block: int) -> Array:
        """The slots of a block behind the prompt, in the order in which they are masked.

        It is made of the name of the sequence and the block alone, so that nothing else changes it.
        """
        digest = hashlib.sha256(f"{self.policy.seed}:{record.id}:{block}".encode()).digest()
        noise = np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], "<u8")))
        order = np.argsort(noise.random(self.spec.block_len), kind="stable")
        found: Array = order[order >= record.prompt_len - block * self.spec.block_len]
        return found


def longest_first(records: Sequence[Record]) -> list[Record]:
    """In the order in which batches are made: rows of a batch end from the back."""
    return sorted(records, key=lambda record: (-len(record.ids), record.id))
