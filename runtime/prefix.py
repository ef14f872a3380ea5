"""States of beginnings of prompts: made once, kept in a bounded store, gone on from.

This module mutates: :class:`PrefixStore` counts and forgets. It is used by one thread, the one that
decodes.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from fixedstate.errors import CapacityError, StateError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.engine import Engine
from fixedstate.runtime.requests import check_tokens
from fixedstate.runtime.rows import slice_end
from fixedstate.runtime.snapshot import Snapshot, stateful


def make_prefix(
    engine: Engine,
    ids: Sequence[int] | Array,
    prefill_blocks: int,
    seed: int = 0,
    prefix: Snapshot | None = None,
) -> Snapshot:
    """The state behind some tokens: whole blocks committed, the rest pending.

    Commits in slices of `prefill_blocks` blocks from the first token, as a request does, so the
    bytes are those of a request with the same beginning. What was in slot 0 is lost.

    Args:
        engine: Where the passes run.
        ids: Any number of tokens, none included.
        prefill_blocks: Whole blocks committed per pass; the bundle's.
        seed: Of the row.
        prefix: A saved state that the tokens go on from.

    Raises:
        UsageError: for ids that are no tokens, or an engine without state.
        StateError: where the prefix does not fit the model.
        CapacityError: where they do not fit the engine's limit; nothing was run.
    """
    stateful(engine)
    tokens = check_tokens(ids, engine.spec, "prefix ids")
    base = 0
    if prefix is not None:
        prefix.check(engine)
        base = prefix.past_length
        tokens = np.concatenate([np.array(prefix.pending, np.int64), tokens])
    length = engine.spec.block_len
    whole = len(tokens) // length * length
    if engine.limit is not None and base + whole > engine.limit:
        raise CapacityError(
            f"the prefix has {base + whole} tokens in whole blocks; the limit is {engine.limit}: "
            "shorten it or raise the limit"
        )
    engine.reset(0)
    if prefix is not None:
        prefix.restore(engine, 0)
    commit_slices(engine, tokens[:whole], prefill_blocks, base=base)
    return Snapshot.take(engine, 0, pending=tuple(tokens[whole:].tolist()), seed=seed)


def commit_slices(
    engine: Engine, tokens: Array, prefill_blocks: int, row: int = 0, base: int = 0
) -> None:
    """Commit whole blocks of one row in the slices that a request would be committed in.

    Args:
        engine: Where the passes run.
        tokens: Of whole blocks.
        prefill_blocks: Whole blocks committed per pass; the bundle's.
        row: The slot.
        base: Tokens that the row holds already.
    """
    step, first = max(1, prefill_blocks) * engine.spec.block_len, 0
    while first < len(tokens):
        end = slice_end(first, len(tokens), step, base)
        engine.commit(tokens[None, first:end], np.array([end - first]), row)
        first = end


class PrefixStore:
    """States of whole committed blocks by their tokens; the least recently used ones go first.

    One store serves one model, and one thread. Its states must come from commits in slices of
    `prefill_blocks` blocks from the first token: then an answer is the same with and without it.

    Args:
        max_bytes: Bytes that all states together may have.

    Attributes:
        max_bytes: As given.
        bytes: What the states have now.
        hits: Look-ups that found a state.
        misses: Look-ups that did not.
        evictions: States that went to make room.
        refused: States that were larger than the whole store.
        tokens_saved: Tokens that hits made it needless to commit.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise UsageError(f"max_bytes must be 0 or more; got {max_bytes}")
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.refused = 0
        self.tokens_saved = 0
        self._states: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._lengths: Counter[int] = Counter()  # states by their number of tokens

    def __len__(self) -> int:
        return len(self._states)

    def find(
        self, ids: Sequence[int] | Array, block_len: int, prefill_blocks: int
    ) -> tuple[int, Snapshot] | None:
        """The longest stored beginning of a prompt that its own slices would come by.

        A state of n blocks serves where n is a multiple of `prefill_blocks`, or all whole blocks
        of the prompt: the slices behind it are then those of a run without the store.

        Args:
            ids: The prompt.
            block_len: L.
            prefill_blocks: Whole blocks committed per pass.

        Returns:
            Blocks and their state; None where no stored state serves.
        """
        tokens = _tokens(ids)
        whole = len(tokens) // block_len
        step = max(1, prefill_blocks)
        lengths = [
            length
            for length in sorted(self._lengths)
            if length % block_len == 0
            and length <= whole * block_len
            and (length // block_len % step == 0 or length == whole * block_len)
        ]
        found = None
        for length, key in _keys(tokens, lengths):
            if key in self._states:
                found = length, key
        if found is None:
            self.misses += 1
            return None
        length, key = found
        self.hits += 1
        self.tokens_saved += length
        self._states.move_to_end(key)
        return length // block_len, self._states[key]

    def put(self, ids: Sequence[int] | Array, snapshot: Snapshot) -> None:
        """Keep a state; one of the same tokens is replaced.

        Args:
            ids: The tokens that it has committed: at least one block, and whole blocks only.
            snapshot: Their state, without pending ids.

        Raises:
            UsageError: where ids and state do not belong together.
            StateError: where the store holds states of another model.
        """
        tokens = _tokens(ids)
        length = len(tokens)
        if not length or length % snapshot.block_len or snapshot.pending:
            raise UsageError(
                f"{length} tokens and {len(snapshot.pending)} pending ones: a store keeps states "
                f"of whole blocks of {snapshot.block_len}, without pending ids"
            )
        if snapshot.past_length != length:
            raise UsageError(f"the state is that of {snapshot.past_length} tokens, not {length}")
        self._check_model(snapshot)
        ((_, key),) = _keys(tokens, [length])
        self._drop(key)
        if snapshot.nbytes > self.max_bytes:
            self.refused += 1
            return
        while self.bytes + snapshot.nbytes > self.max_bytes:
            self._drop(next(iter(self._states)))
            self.evictions += 1
        self._states[key] = snapshot
        self._lengths[length] += 1
        self.bytes += snapshot.nbytes

    def clear(self) -> None:
        """Forget every state; the counters stay."""
        self._states.clear()
        self._lengths.clear()
        self.bytes = 0

    def _drop(self, key: bytes) -> None:
        old = self._states.pop(key, None)
        if old is None:
            return
        self.bytes -= old.nbytes
        self._lengths[old.past_length] -= 1
        self._lengths += Counter()  # leave out what is at zero

    def _check_model(self, snapshot: Snapshot) -> None:
        for kept in self._states.values():
            if (kept.weights, kept.state) != (snapshot.weights, snapshot.state):
                raise StateError(
                    "the store holds states of another model or precision: use a store for each"
                )
            return


def _tokens(ids: Sequence[int] | Array) -> Array:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"token ids must be a flat list of whole numbers; got {array.dtype}")
    return np.ascontiguousarray(array, np.int64)


def _keys(tokens: Array, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The hash of each beginning of the tokens, lengths rising."""
    digest = hashlib.blake2b(digest_size=32)
    done = 0
    for length in lengths:
        digest.update(tokens[done:length].tobytes())
        done = length
        yield length, digest.digest()
