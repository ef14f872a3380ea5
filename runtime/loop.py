"""The decode loop: from prompts to tokens, block by block, on any engine.

This module mutates: a :class:`Stream` owns the canvases and drives the engine's state. Rows are
independent: nothing a row's passes compute with depends on the other rows, so its tokens do not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import DecodeError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.engine import Engine
from fixedstate.runtime.policies import PassView, Policy
from fixedstate.runtime.requests import (
    PHASES,
    BlockEvent,
    PassEvent,
    Request,
    Result,
    Rules,
    check_decodable,
    check_prompt,
    check_room,
    check_tokens,
    resolve_settings,
)
from fixedstate.runtime.sampling import Scorer, Scores, uniforms

OnPass = Callable[[PassEvent], None]
"""Called after every denoise pass."""


@dataclass(slots=True)
class _Row:
    """A request on its way."""

    request: int
    prompt: Array
    rules: Rules
    block_len: int
    tokens: list[int] = field(default_factory=list)
    blocks: int = 0
    step: int = 0
    passes: int = 0
    forced: int = 0
    committed: int = 0
    policy_state: Any = None
    reason: str | None = None
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of the prompt, committed before the first pass."""
        return len(self.prompt) // self.block_len

    @property
    def remainder(self) -> Array:
        """Prompt tokens fixed in the first active block; none in later blocks."""
        return self.prompt[self.prompt_blocks * self.block_len :] if self.blocks == 0 else _NONE

    @property
    def bans_stops(self) -> bool:
        """Whether a slot of the current block lies before min_new_tokens."""
        return bool(self.rules.stop_ids) and len(self.tokens) < self.rules.min_new_tokens

    def banned(self) -> tuple[Array, tuple[int, ...]]:
        """(L,) bool, the slots where a stop id may not stand, and the stop ids."""
        new = np.arange(self.block_len) - len(self.remainder) + len(self.tokens)
        return new < self.rules.min_new_tokens, self.rules.stop_ids


_NONE: Array = np.zeros(0, np.int64)


class Stream:
    """The decoding of some requests: iterate over finished blocks, then read `results`.

    Requests run in waves of at most `slots` rows. A row that ends leaves at once; the next wave
    starts when the last row has left. Ctrl-C inside a pass ends every open request as
    ``cancelled`` and keeps its finished blocks; so does :meth:`close`.

    Args:
        engine: Where the passes run; used by one stream at a time.
        requests: What to decode; all are checked before the first pass.
        defaults: The bundle's decode defaults.
        on_pass: Called after every denoise pass.
        lock: Held from the first block to the end.
        load_seconds: For the report.

    Raises:
        UsageError: for a model that cannot be decoded, or ids outside the vocabulary.
        CapacityError: for a request that does not fit the engine's limit.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        defaults: DecodeDefaults | None = None,
        *,
        on_pass: OnPass | None = None,
        lock: ExclusiveUse | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self._engine = engine
        self._spec = engine.spec
        self._defaults = defaults or DecodeDefaults()
        check_decodable(self._spec)
        assert self._spec.mask_id is not None
        self._mask: int = self._spec.mask_id
        self._rows = [self._row(index, request) for index, request in enumerate(requests)]
        self._on_pass = on_pass
        self._lock = lock or ExclusiveUse()
        self._load_seconds = load_seconds
        self._active: list[_Row] = []
        length, slots = self._spec.block_len, engine.slots
        self._canvas: Array = np.full((slots, length), self._mask, np.int64)
        self._temperature: Array = np.zeros(slots)
        self._shifted: Array | None = None
        if self._spec.logit_shift:
            self._shifted = np.empty((slots, length, self._spec.vocab_rows), np.float32)
        self._scorer = Scorer(self._spec.vocab_size, self._spec.vocab_rows, [self._mask])
        self._start = 0.0
        self._events = self._run()

    def __iter__(self) -> Iterator[BlockEvent]:
        return self

    def __next__(self) -> BlockEvent:
        return next(self._events)

    def close(self) -> None:
        """End every open request as ``cancelled``, keeping its finished blocks."""
        self._events.close()
        self._cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def results(self) -> list[Result]:
        """One result per request, in order.

        Raises:
            UsageError: while requests are still open.
        """
        if any(row.reason is None for row in self._rows):
            raise UsageError("results are there once the stream has ended: iterate it or close it")
        return [self._result(row) for row in self._rows]

    # --- requests

    def _row(self, index: int, request: Request) -> _Row:
        spec, settings = self._spec, request.settings
        what = "prompt ids" if index == 0 else f"prompt ids of request {index}"
        prompt = check_tokens(request.prompt_ids, spec, what)
        check_prompt(prompt, spec, what)
        check_room(len(prompt), settings.max_new_tokens, spec.block_len, self._engine.limit)
        rules = resolve_settings(settings, spec, self._defaults)
        return _Row(index, prompt, rules, spec.block_len)

    def _result(self, row: _Row) -> Result:
        assert row.reason is not None
        return Result(
            token_ids=tuple(row.tokens),
            finish_reason=row.reason,
            error=row.error,
            blocks=row.blocks,
            denoise_passes=row.passes,
            forced_slots=row.forced,
            state_bytes=self._engine.state_bytes(),
            kv_bytes=self._engine.kv_bytes(row.committed),
            seconds={**row.seconds, "load": self._load_seconds},
            provider=self._engine.provider,
        )

    def _finish(self, row: _Row, reason: str, error: str | None = None) -> None:
        row.reason, row.error = reason, error
        row.seconds["total"] = time.perf_counter() - self._start if self._start else 0.0

    def _cancel(self) -> list[_Row]:
        rows = [row for row in self._rows if row.reason is None]
        for row in rows:
            self._finish(row, "cancelled")
        return rows

    # --- the run

    def _run(self) -> Generator[BlockEvent, None, None]:
        with self._lock:
            self._start = time.perf_counter()
            try:
                yield from self._waves()
            except KeyboardInterrupt:
                for row in self._cancel():
                    yield BlockEvent(row.request, row.blocks, (), "cancelled")
            finally:
                self._cancel()

    def _waves(self) -> Iterator[BlockEvent]:
        waiting = deque(self._rows)
        while waiting:
            wave = [waiting.popleft() for _ in range(min(self._engine.slots, len(waiting)))]
            self._active = self._prefill(wave)
            while self._active:
                yield from self._pass()

    def _prefill(self, wave: list[_Row]) -> list[_Row]:
        """Commit the prompts' whole blocks and seat the rows in slots 0..k-1.

        Rows with equally many blocks run together, in slots 0.., and are then moved to their
        place from the top. So the slices of a row never depend on its neighbours.
        """
        start = time.perf_counter()
        seated: list[_Row] = []
        place = len(wave)
        counts = sorted({row.prompt_blocks for row in wave}, reverse=True)
        for count in counts:
            group = [row for row in wave if row.prompt_blocks == count]
            self._commit_prompts(group, count)
            place -= len(group)
            for slot in reversed(range(len(group))):
                self._engine.move(slot, place + slot)
            seated = group + seated
        for slot, row in enumerate(seated):
            self._temperature[slot] = row.rules.temperature
            self._open_block(slot, row)
        self._spent("prefill", start, seated)
        return seated

    def _commit_prompts(self, group: list[_Row], blocks: int) -> None:
        engine, length = self._engine, self._spec.block_len
        for slot in range(len(group)):
            engine.reset(slot)
        step = max(1, self._defaults.prefill_blocks)
        for first in range(0, blocks, step):
            tokens = slice(first * length, min(first + step, blocks) * length)
            ids = np.stack([row.prompt[tokens] for row in group])
            engine.commit(ids, np.full(len(group), ids.shape[1], np.int64))
        for row in group:
            row.committed = blocks * length

    def _open_block(self, slot: int, row: _Row) -> None:
        row.step, row.policy_state = 0, None
        self._canvas[slot] = self._mask
        self._canvas[slot, : len(row.remainder)] = row.remainder

    def _pass(self) -> Iterator[BlockEvent]:
        """One denoise pass of all active rows, and the commit of those that finished a block."""
        rows = self._active
        start = time.perf_counter()
        logits = self._engine.denoise(self._canvas[: len(rows)])
        start = self._spent("denoise", start, rows)
        self._reveal(self._by_slot(logits))
        closed = self._close_rows()
        start = self._spent("policy", start, rows)
        if self._on_pass is not None:
            self._on_pass(self._pass_event())
        events = [self._close_block(slot) for slot in closed]
        events += [
            BlockEvent(row.request, row.blocks, (), "error")
            for row in rows
            if row.reason == "error"
        ]
        start = time.perf_counter()
        self._commit(closed)
        self._leave()
        self._spent("commit", start, rows)
        yield from events

    def _spent(self, phase: str, start: float, rows: list[_Row]) -> float:
        now = time.perf_counter()
        for row in rows:
            row.seconds[phase] += now - start
        return now

    # --- the policy

    def _by_slot(self, logits: Array) -> Array:
        """Logits that predict each slot: of the position before it where the model shifts."""
        if self._shifted is None:
            return logits
        rows = len(logits)
        shifted = self._shifted[:rows]
        shifted[:, 0] = self._engine.last_logits[:rows]
        shifted[:, 1:] = logits[:, :-1]
        return shifted

    def _reveal(self, logits: Array) -> None:
        """Fill slots of every active row; rows with non-finite scores end with an error."""
        rows = self._active
        canvas = self._canvas[: len(rows)]
        u, v = self._random()
        banned = [row.banned() for row in rows] if any(row.bans_stops for row in rows) else ()
        scores = self._scorer(
            logits, canvas == self._mask, self._temperature[: len(rows)], u, banned
        )
        groups: dict[Policy, list[int]] = {}
        for slot, row in enumerate(rows):
            if scores.finite[slot]:
                groups.setdefault(row.rules.policy, []).append(slot)
            else:
                self._finish(row, "error", _not_finite(row))
        for policy, slots in groups.items():
            self._apply(policy, slots, scores, v)
        for row in rows:
            row.passes += 1
            row.step += 1

    def _random(self) -> tuple[Array | None, Array | None]:
        """u and v of the rows that draw at random; None where no row does."""
        rows = self._active
        hot = np.flatnonzero(self._temperature[: len(rows)])
        if not hot.size:
            return None, None
        length = self._spec.block_len
        u = np.full((len(rows), length), 0.5)
        v = np.full((len(rows), length), 0.5)
        for slot in hot:
            row = rows[slot]
            u[slot], v[slot] = uniforms(row.rules.seed, row.committed, row.step, length)
        return u, v

    def _apply(self, policy: Policy, slots: list[int], scores: Scores, v: Array | None) -> None:
        rows = self._active
        whole = len(slots) == len(rows)
        pick: Any = slice(len(rows)) if whole else np.array(slots)
        states = [rows[slot].policy_state for slot in slots]
        view = PassView(
            canvas=self._canvas[pick],
            mask_id=self._mask,
            scores=scores
            if whole
            else Scores(scores.tokens[pick], scores.confidence[pick], scores.finite[pick]),
            step=np.array([rows[slot].step for slot in slots]),
            v=None if v is None else v[pick],
            state=None if any(state is None for state in states) else states,
        )
        reveal = policy.reveal(view)
        self._canvas[pick] = reveal.canvas
        for i, slot in enumerate(slots):
            rows[slot].forced += int(reveal.forced[i])
            rows[slot].policy_state = None if reveal.state is None else reveal.state[i]

    def _close_rows(self) -> list[int]:
        """Slots of the rows whose block is full."""
        rows = self._active
        full = (self._canvas[: len(rows)] != self._mask).all(axis=1)
        closed = []
        for slot, row in enumerate(rows):
            if row.reason is not None:
                continue
            if full[slot]:
                closed.append(slot)
            elif row.step >= row.rules.policy.steps:
                raise DecodeError(
                    f"{row.rules.policy} left slots open after its last pass, number {row.step}"
                )
        return closed

    # --- the end of a block

    def _close_block(self, slot: int) -> BlockEvent:
        """Take the block's new tokens, cut at the limit and at the first stop id."""
        row = self._active[slot]
        rules = row.rules
        new = self._canvas[slot, len(row.remainder) :].tolist()
        new = new[: rules.max_new_tokens - len(row.tokens)]
        stop = next((i for i, token in enumerate(new) if token in rules.stop_ids), None)
        if stop is not None:
            new = new[: stop + 1]
        row.tokens += new
        row.blocks += 1
        if stop is not None:
            self._finish(row, "stop")
        elif len(row.tokens) >= rules.max_new_tokens:
            self._finish(row, "length")
        return BlockEvent(row.request, row.blocks - 1, tuple(new), row.reason)

    def _commit(self, closed: list[int]) -> None:
        """Commit the finished blocks of the rows that go on; the others get length 0."""
        rows, length = self._active, self._spec.block_len
        going = [slot for slot in closed if rows[slot].reason is None]
        if not going:
            return
        commit_length = np.zeros(len(rows), np.int64)
        commit_length[going] = length
        self._engine.commit(self._canvas[: len(rows)], commit_length)
        for slot in going:
            rows[slot].committed += length
            self._open_block(slot, rows[slot])

    def _leave(self) -> None:
        """Seat the last active row where a row has ended, until none has."""
        rows = list(self._active)
        for slot in reversed(range(len(rows))):
            if rows[slot].reason is None:
                continue
            last = len(rows) - 1
            if slot != last:
                self._engine.move(last, slot)
                self._canvas[slot] = self._canvas[last]
                self._temperature[slot] = self._temperature[last]
                rows[slot] = rows[last]
            rows.pop()
        self._active = rows

    def _pass_event(self) -> PassEvent:
        rows = self._active
        return PassEvent(
            rows=tuple(row.request for row in rows),
            canvases=self._canvas[: len(rows)].copy(),
            blocks=tuple(row.blocks for row in rows),
            steps=tuple(row.step - 1 for row in rows),
            past_lengths=tuple(row.committed for row in rows),
        )


def _not_finite(row: _Row) -> str:
    return (
        f"scores are not finite in block {row.blocks}, pass {row.step}, after {row.committed} "
        "committed tokens: the model or its state holds NaN or infinity"
    )


class ExclusiveUse:
    """A lock that one decoding holds; a second one in the same thread is refused, not hung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            raise UsageError("another stream of this decoder is open: finish or close it first")
        self._lock.acquire()
        self._owner = me

    def __exit__(self, *exc: object) -> None:
        self._owner = None
        self._lock.release()
