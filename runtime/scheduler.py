"""Requests that join and leave at block boundaries, over a fixed number of slots.

This module mutates: a :class:`Scheduler` owns the canvases and drives the engine's state. One tick
seats waiting requests, commits at most one slice of prompts, and runs one denoise pass of every
row that can change. Rows are independent: nothing a row's passes compute with depends on the
other rows, so neither do its tokens.

The slots in use are, in order: rows that denoise, rows whose logits are still those of their last
pass, rows whose finished block is committed together with the first pass of the next, and rows
whose prompt is being committed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import (
    CapacityError,
    DecodeError,
    FixedStateError,
    StateError,
    UsageError,
)
from fixedstate.ports import Array
from fixedstate.runtime.engine import Engine, HeadEngine
from fixedstate.runtime.policies import PassView, Policy
from fixedstate.runtime.prefix import PrefixStore
from fixedstate.runtime.requests import (
    BlockEvent,
    PassEvent,
    Request,
    Result,
    check_decodable,
    check_head,
    check_prompt,
    check_room,
    check_tokens,
    resolve_settings,
)
from fixedstate.runtime.rows import Row
from fixedstate.runtime.sampling import (
    Scorer,
    Scores,
    places_of,
    scores_from_head,
    uniforms,
    with_first_slot,
)
from fixedstate.runtime.snapshot import Snapshot, stateful
from fixedstate.state import TOP_K

OnPass = Callable[[PassEvent], None]
"""Called after every tick that denoised."""


class Watcher(Protocol):
    """Told what happens to each row, as it happens; it must not change anything."""

    def begun(self, row: Row, slot: int) -> None:
        """A request was seated: its state is the one before its prompt."""
        ...

    def committed(self, row: Row, slot: int, ids: Array, *, fused: bool) -> None:
        """A row's state now holds these tokens more; `fused` by the pass that began a block."""
        ...

    def scored(self, row: Row, slot: int, canvas: Array, logits: Array) -> None:
        """A pass gave logits (L, V) for a canvas (L,); both are only valid during the call."""
        ...

    def revealed(self, row: Row, slot: int, canvas: Array) -> None:
        """The policy filled slots of the canvas (L,)."""
        ...

    def ended(self, row: Row) -> None:
        """The row has its last token."""
        ...


class Scheduler:
    """Decodes requests that come and go, on one engine; :meth:`tick` is one round of passes.

    Args:
        engine: Where the passes run; it belongs to this scheduler until all requests ended.
        defaults: The bundle's decode defaults.
        queue_limit: Requests that may wait for a slot; None for any number.
        prefixes: States of prompts seen before, looked up and added to.
        on_pass: Called after every tick that denoised.
        watcher: Told everything that happens to each row.
        load_seconds: For the reports.

    Raises:
        UsageError: for a model that cannot be decoded.
    """

    def __init__(
        self,
        engine: Engine,
        defaults: DecodeDefaults | None = None,
        *,
        queue_limit: int | None = None,
        prefixes: PrefixStore | None = None,
        on_pass: OnPass | None = None,
        watcher: Watcher | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self._engine = engine
        self._spec = spec = engine.spec
        check_decodable(spec)
        assert spec.mask_id is not None
        if queue_limit is not None and queue_limit < 0:
            raise UsageError(f"queue_limit must be 0 or more; got {queue_limit}")
        if watcher is not None and engine.head != "logits":
            raise UsageError(
                f"a watcher is shown all scores, but the loaded graphs give {engine.head}: load "
                "the bundle without a head"
            )
        self._mask: int = spec.mask_id
        self._asks = cast(HeadEngine, engine) if engine.head != "logits" else None
        self._defaults = defaults or DecodeDefaults()
        self._queue_limit = queue_limit
        self._prefixes = prefixes
        self._on_pass = on_pass
        self._watcher = watcher
        self._load_seconds = load_seconds
        self._waiting: deque[Row] = deque()
        self._seated: list[Row] = []  # by slot
        self._active = 0  # slots 0..: their prompt is committed; behind them it is not yet
        self._turn = 0  # whose prompt is next
        self._submitted = 0
        self._results: dict[int, Result] = {}
        self._events: list[BlockEvent] = []
        length, slots = spec.block_len, engine.slots
        # Finished block and canvas of a row side by side, as the fused pass reads them.
        self._both: Array = np.full((slots, 2 * length), self._mask, np.int64)
        self._canvas: Array = self._both[:, length:]
        self._temperature: Array = np.zeros(slots)
        self._shifted: Array | None = None
        if spec.logit_shift:
            self._shifted = np.empty((slots, length, spec.vocab_rows), np.float32)
        top_k = TOP_K if self._asks is None else self._asks.top_k
        self._scorer = Scorer(spec.vocab_size, spec.vocab_rows, [self._mask], top_k)

    # --- requests

    def submit(self, request: Request) -> int:
        """Take a request, check all of it, and return its number.

        Raises:
            UsageError: for a request that is wrong, or ids outside the vocabulary.
            CapacityError: for a request that does not fit, or where too many wait already.
        """
        free = self.slots - len(self._seated)
        limit = self._queue_limit
        if limit is not None and len(self._waiting) >= limit + free:
            raise CapacityError(
                f"{len(self._waiting)} requests wait already and {len(self._seated)} of "
                f"{self.slots} slots are taken; the queue holds {limit}: try again once one has "
                "ended"
            )
        row = self._row(self._submitted, request)
        self._submitted += 1
        self._waiting.append(row)
        return row.request

    def check(self, request: Request) -> None:
        """Refuse what :meth:`submit` would refuse for itself; nothing is queued.

        Raises:
            UsageError, StateError: for a request that is wrong.
            CapacityError: for a request that does not fit.
        """
        self._row(0, request)

    def cancel(self, number: int) -> bool:
        """End a request as ``cancelled``, keeping its finished blocks; False if it has ended."""
        if number in self._results:
            return False
        for row in self._waiting:
            if row.request == number:
                self._waiting.remove(row)
                self._end(row, "cancelled")
                return True
        slot = self._slot_of(number)
        if slot is not None:
            self._end(self._seated[slot], "cancelled", slot)
            self._free(slot)
            return True
        raise UsageError(f"no request has number {number}: {self._submitted} were submitted")

    def cancel_all(self, *, broken: bool = False) -> None:
        """End every open request as ``cancelled``.

        Args:
            broken: Whether a pass was cut short, so that no state behind an answer can be kept.
        """
        for slot, row in enumerate(self._seated):
            self._end(row, "cancelled", None if broken else slot)
        for row in self._waiting:
            self._end(row, "cancelled")
        self._seated.clear()
        self._waiting.clear()
        self._active = 0

    def ended(self, number: int) -> bool:
        """Whether a request has a result that was not handed over yet."""
        return number in self._results

    def result(self, number: int) -> Result:
        """What came of a request; it is handed over once and forgotten here.

        Raises:
            UsageError: while it is open, and after it was handed over.
        """
        if number not in self._results:
            raise UsageError(f"request {number} is still open, unknown, or was handed over")
        return self._results.pop(number)

    def snapshot(self, number: int) -> Snapshot:
        """The state of a request between two of its blocks; its decoding goes on.

        Raises:
            UsageError: where it is not seated, or inside a block.
        """
        slot = self._slot_of(number)
        if slot is None:
            raise UsageError(f"request {number} holds no slot: it waits or has ended")
        row = self._seated[slot]
        if slot >= self._active or row.step:
            where = "inside a block" if row.step else "its prompt is not committed yet"
            raise UsageError(
                f"request {number} cannot be saved now ({where}): states are taken between blocks, "
                "right after a block event"
            )
        if row.pending:
            self._commit(slice(slot, slot + 1))
        return Snapshot.take(
            self._engine, slot, pending=tuple(row.remainder.tolist()), seed=row.rules.seed
        )

    @property
    def slots(self) -> int:
        """Rows at most."""
        return self._engine.slots

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return not (self._seated or self._waiting)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._seated)

    @property
    def state_bytes(self) -> int:
        """Bytes of the constant-size states of the requests in a slot."""
        return len(self._seated) * self._engine.state_bytes()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of what the requests in a slot have committed."""
        return sum(self._engine.kv_bytes(row.committed) for row in self._seated)

    def _row(self, number: int, request: Request) -> Row:
        engine, spec, settings = self._engine, self._spec, request.settings
        what = "prompt ids" if number == 0 else f"prompt ids of request {number}"
        prompt = check_tokens(request.prompt_ids, spec, what)
        base = 0
        if request.prefix is not None or request.keep_state:
            stateful(engine)
        if request.prefix is not None:
            request.prefix.check(engine)
            base = request.prefix.past_length
            prompt = np.concatenate([np.array(request.prefix.pending, np.int64), prompt])
        check_prompt(base + len(prompt), spec, what)
        whole = engine.whole_blocks
        room = check_room(
            base + len(prompt),
            settings.max_new_tokens,
            spec.block_len,
            engine.limit,
            whole_blocks=whole,
        )
        rules = resolve_settings(settings, spec, self._defaults)
        check_head(engine.head, rules)
        row = Row(number, prompt, rules, spec.block_len, room, base, whole)
        row.prefix, row.keep_state = request.prefix, request.keep_state
        row.keep_tokens = request.keep_tokens
        row.started = time.perf_counter()
        return row

    def _slot_of(self, number: int) -> int | None:
        return next((i for i, row in enumerate(self._seated) if row.request == number), None)

    def _end(
        self, row: Row, reason: str, slot: int | None = None, error: str | None = None
    ) -> None:
        """Note why a row ended and what came of it; its slot is given away by :meth:`_free`."""
        row.reason, row.error = reason, error
        row.seconds["total"] = time.perf_counter() - row.started
        if row.keep_state and slot is not None and error is None:
            try:
                row.state = self._state_behind(slot, row)
            except FixedStateError as err:
                row.reason = reason = "error"
                row.error = f"the answer is whole, but its state cannot be kept: {err}"
        self._results[row.request] = Result(
            token_ids=tuple(row.tokens),
            new_tokens=row.count,
            finish_reason=reason,
            error=row.error,
            blocks=row.blocks,
            denoise_passes=row.passes,
            forced_slots=row.forced,
            state_bytes=self._engine.state_bytes(),
            kv_bytes=self._engine.kv_bytes(row.committed),
            seconds={**row.seconds, "load": self._load_seconds},
            provider=self._engine.provider,
            state=row.state,
        )
        if self._watcher is not None:
            self._watcher.ended(row)

    def _state_behind(self, slot: int, row: Row) -> Snapshot | None:
        """The state behind all tokens of prompt and answer; None while the prompt is not in it."""
        if slot >= self._active:
            return None
        length = self._spec.block_len
        finished = self._both[slot, : length * row.pending]
        tail = np.concatenate([finished, row.remainder, row.last])
        whole = len(tail) // length * length
        if whole:
            self._engine.commit(tail[None, :whole], np.array([whole]), slot)
            row.committed += whole - length * row.pending
            row.pending = False
            self._committed(row, slot, tail[:whole])
        return Snapshot.take(
            self._engine, slot, pending=tuple(tail[whole:].tolist()), seed=row.rules.seed
        )

    # --- one round

    def tick(self) -> list[BlockEvent]:
        """Seat requests, commit a slice of prompts, run one pass; returns the finished blocks."""
        self._seat()
        self._prefill()
        if self._active:
            self._denoise()
        events, self._events = self._events, []
        return events

    def _seat(self) -> None:
        """Give free slots to waiting requests, first come, first served.

        A request whose state cannot be set up (no memory for it) ends with an error.
        """
        while self._waiting and len(self._seated) < self.slots:
            row, slot = self._waiting.popleft(), len(self._seated)
            prefix = row.prefix or self._known(row)
            try:
                self._engine.reset(slot, row.room)
                if prefix is not None:
                    prefix.restore(self._engine, slot)
            except FixedStateError as err:
                self._events.append(BlockEvent(row.request, 0, (), "error"))
                self._end(row, "error", error=str(err))
                continue
            if prefix is not None:
                row.prefilled = prefix.past_length - row.base
            row.committed = row.base + row.prefilled
            self._temperature[slot] = row.rules.temperature
            self._seated.append(row)
            if self._watcher is not None:
                self._watcher.begun(row, slot)
            if row.prefilled == row.to_prefill:
                self._begin(slot)

    def _known(self, row: Row) -> Snapshot | None:
        """The state of a beginning of the prompt that was seen before."""
        store = self._store(row)
        if store is None:
            return None
        found = store.find(row.prompt, self._spec.block_len, self._defaults.prefill_blocks)
        return found[1] if found is not None else None

    def _store(self, row: Row) -> PrefixStore | None:
        """The states of prompts seen before, for a row whose slices are those of its prompt."""
        return self._prefixes if row.prefix is None and row.whole_blocks else None

    def _begin(self, slot: int) -> None:
        """The prompt of a row is committed: it denoises from now on."""
        self._exchange(slot, self._active)
        self._open_block(self._active, self._seated[self._active])
        self._active += 1

    def _prefill(self) -> None:
        """Commit the next slice of one row's prompt, or of some neighbours with an equal one.

        One call a tick, of `prefill_blocks` blocks at most, so nobody's denoising waits longer
        than that; the rows take turns, so a long prompt does not hold up a short one.
        """
        waiting = len(self._seated) - self._active
        if not waiting:
            return
        start = time.perf_counter()
        blocks = self._defaults.prefill_blocks
        first = self._active + self._turn % waiting
        rows = [self._seated[first]]
        size = rows[0].slice_end(blocks) - rows[0].prefilled
        most = max(1, blocks * self._spec.block_len // size)
        for row in self._seated[first + 1 :]:
            if len(rows) == most or row.slice_end(blocks) - row.prefilled != size:
                break
            rows.append(row)
        ids = np.stack([row.prompt[row.prefilled : row.prefilled + size] for row in rows])
        self._engine.commit(ids, np.full(len(rows), size, np.int64), first)
        for i, row in enumerate(rows):
            row.prefilled += size
            row.committed += size
            self._committed(row, first + i, ids[i])
            self._remember(row, first + i)
        self._spent("prefill", start, rows)
        self._turn = first - self._active + len(rows)
        for i, row in enumerate(rows):
            if row.prefilled == row.to_prefill:
                self._begin(first + i)
                self._turn -= 1

    def _remember(self, row: Row, slot: int) -> None:
        """Add the state behind a slice to the store, where other prompts can use it."""
        store = self._store(row)
        if store is None:
            return
        with contextlib.suppress(StateError):  # not finite: the row's own scores will say so
            store.put(row.prompt[: row.prefilled], Snapshot.take(self._engine, slot))

    def _committed(self, row: Row, slot: int, ids: Array, *, fused: bool = False) -> None:
        if self._watcher is not None:
            self._watcher.committed(row, slot, ids, fused=fused)

    def _open_block(self, slot: int, row: Row) -> None:
        row.step, row.policy_state, row.held = 0, None, None
        self._canvas[slot] = self._mask
        self._canvas[slot, : len(row.remainder)] = row.remainder

    # --- a pass of all active rows

    def _denoise(self) -> None:
        """One denoise pass of every active row that can change; closes the blocks it fills."""
        engine, active = self._engine, self._active
        start = time.perf_counter()
        rows = self._seated
        held = self._sort(active, lambda row: row.pending)
        if held < active and not engine.fuses:
            self._commit(slice(held, active))
            start = self._spent("commit", start, rows[held:active])
            held = active
        running = self._sort(held, lambda row: row.held is not None)
        if running:
            found = self._pass(slice(0, running))
            start = self._spent("denoise", start, rows[:running])
            self._reveal(slice(0, running), found)
            start = self._spent("policy", start, rows[:running])
        for slot in range(running, held):
            kept = rows[slot].held
            assert kept is not None
            self._reveal(slice(slot, slot + 1), kept, again=True)
            start = self._spent("policy", start, rows[slot : slot + 1])
        if held < active:
            found = self._pass(slice(held, active), fused=True)
            self._block_committed(slice(held, active), fused=True)
            start = self._spent("denoise", start, rows[held:active])
            self._reveal(slice(held, active), found)
            self._spent("policy", start, rows[held:active])
        self._close_rows()

    def _pass(self, slots: slice, *, fused: bool = False) -> Array | Scores:
        """One pass of some neighbouring rows: logits of each position, or scores of each slot.

        Args:
            slots: Of the rows.
            fused: Whether their finished blocks are committed in it.
        """
        engine, asks, first = self._engine, self._asks, slots.start
        ids = self._both[slots] if fused else self._canvas[slots]
        if asks is None:
            return engine.commit_denoise(ids, first) if fused else engine.denoise(ids, first)
        length, shift = self._spec.block_len, int(self._spec.logit_shift)
        open_slots = self._canvas[slots] == self._mask
        asked = open_slots  # by position: the one before each slot where the model shifts
        if shift:
            asked = np.zeros_like(open_slots)
            asked[:, :-1] = open_slots[:, 1:]
        places = places_of(asked, max(4, length // 4))
        if fused:
            given = asks.commit_denoise_at(ids, places, first)
        else:
            given = asks.denoise_at(ids, places, first)
        scores = scores_from_head(given, places + shift, open_slots)
        if not shift:
            return scores
        needs = {row.rules.policy.needs for row in self._seated[slots]}
        before = engine.last_logits[slots][:, None]
        heat = self._temperature[slots]
        return with_first_slot(scores, self._scorer(before, open_slots[:, :1], heat, needs=needs))

    def _sort(self, count: int, later: Callable[[Row], bool]) -> int:
        """Bring rows behind the others of slots 0..count-1; returns where they begin.

        By as few exchanges as can be: each costs three copies of a row's state.
        """
        rows = self._seated
        begin = count
        for slot in reversed(range(count)):
            if later(rows[slot]):
                begin -= 1
                self._exchange(slot, begin)
        return begin

    def _commit(self, slots: slice) -> None:
        """Commit the finished blocks of some neighbouring rows."""
        length = self._spec.block_len
        blocks = self._both[slots, :length]
        self._engine.commit(blocks, np.full(len(blocks), length, np.int64), slots.start)
        self._block_committed(slots)

    def _block_committed(self, slots: slice, *, fused: bool = False) -> None:
        """The state of some neighbouring rows now holds their finished block."""
        for slot in range(slots.start, slots.stop):
            row = self._seated[slot]
            row.pending = False
            self._committed(row, slot, self._both[slot, : self._spec.block_len], fused=fused)

    def _spent(self, phase: str, start: float, rows: list[Row]) -> float:
        now = time.perf_counter()
        for row in rows:
            row.seconds[phase] += now - start
        return now

    # --- the policy

    def _by_slot(self, slots: slice, logits: Array) -> Array:
        """Logits that predict each slot: of the position before it where the model shifts."""
        if self._shifted is None:
            return logits
        shifted = self._shifted[: len(logits)]
        shifted[:, 0] = self._engine.last_logits[slots]
        shifted[:, 1:] = logits[:, :-1]
        return shifted

    def _reveal(self, slots: slice, found: Array | Scores, *, again: bool = False) -> None:
        """Fill slots of some neighbouring rows; rows with non-finite scores end with an error.

        Args:
            slots: Of the rows.
            found: Logits (k, L, V) of each position, or the scores of each slot.
            again: Whether they are those of an earlier pass, logits by slot already.
        """
        rows = self._seated[slots]
        canvas = self._canvas[slots]
        u, v = self._random(slots)
        if isinstance(found, Scores):
            scores, logits = found, None
        else:
            logits = found if again else self._by_slot(slots, found)
            scores = self._score(slots, logits, u)
        before = canvas.copy()
        groups: dict[Policy, list[int]] = {}
        for i, row in enumerate(rows):
            if scores.finite[i]:
                groups.setdefault(row.rules.policy, []).append(i)
            else:
                row.reason, row.error = "error", _not_finite(row)
        for policy, chosen in groups.items():
            self._apply(policy, rows, canvas, chosen, scores, logits, v)
        same = (before == canvas).all(axis=1)
        for i, row in enumerate(rows):
            row.passes += not again
            row.step += 1
            if self._watcher is not None:
                self._watcher.revealed(row, slots.start + i, canvas[i])
            if not same[i] or self._steps:
                row.held = None
            elif row.held is None:
                one = slice(i, i + 1)
                row.held = scores.of_rows(one) if logits is None else logits[one].copy()

    def _score(self, slots: slice, logits: Array, u: Array | None) -> Scores:
        """Scores of some neighbouring rows from logits (k, L, V) of each slot."""
        rows, canvas = self._seated[slots], self._canvas[slots]
        if self._watcher is not None:
            for i, row in enumerate(rows):
                self._watcher.scored(row, slots.start + i, canvas[i], logits[i])
        banned = [row.banned() for row in rows] if any(row.bans_stops for row in rows) else ()
        needs = {row.rules.policy.needs for row in rows}
        heat = self._temperature[slots]
        return self._scorer(logits, canvas == self._mask, heat, u, banned, needs)

    @property
    def _steps(self) -> bool:
        """Whether a pass over the same canvas may give other logits."""
        return self._spec.self_conditioning_width > 0

    def _random(self, slots: slice) -> tuple[Array | None, Array | None]:
        """u and v of the rows that draw at random; None where no row does."""
        hot = np.flatnonzero(self._temperature[slots])
        if not hot.size:
            return None, None
        rows, length = self._seated[slots], self._spec.block_len
        u = np.full((len(rows), length), 0.5)
        v = np.full((len(rows), length), 0.5)
        for i in hot.tolist():
            row = rows[i]
            u[i], v[i] = uniforms(row.rules.seed, row.committed, row.step, length)
        return u, v

    def _apply(
        self,
        policy: Policy,
        rows: list[Row],
        canvas: Array,
        chosen: list[int],
        scores: Scores,
        logits: Array | None,
        v: Array | None,
    ) -> None:
        whole = len(chosen) == len(rows)
        pick: Any = slice(len(rows)) if whole else np.array(chosen)
        states = [rows[i].policy_state for i in chosen]
        view = PassView(
            canvas=canvas[pick],
            mask_id=self._mask,
            scores=scores if whole else scores.of_rows(pick),
            step=np.array([rows[i].step for i in chosen]),
            v=None if v is None else v[pick],
            state=None if any(state is None for state in states) else states,
            logits=None if logits is None or policy.needs != "logits" else logits[pick],
        )
        reveal = policy.reveal(view)
        canvas[pick] = reveal.canvas
        for k, i in enumerate(chosen):
            rows[i].forced += int(reveal.forced[k])
            rows[i].policy_state = None if reveal.state is None else reveal.state[k]

    # --- the end of a block

    def _close_rows(self) -> None:
        """Take the blocks that are full; rows that end leave."""
        length = self._spec.block_len
        full = (self._canvas[: self._active] != self._mask).all(axis=1)
        if self._on_pass is not None:
            self._on_pass(self._pass_event())
        left = []
        for slot in range(self._active):
            row = self._seated[slot]
            if row.reason == "error":
                self._events.append(BlockEvent(row.request, row.blocks, (), "error"))
                self._end(row, "error", slot, row.error)
                left.append(slot)
            elif full[slot]:
                canvas = self._canvas[slot]
                event = row.close_block(canvas.tolist())
                if row.reason is not None:
                    self._end(row, row.reason, slot)
                    self._events.append(replace(event, finish_reason=row.reason))
                    left.append(slot)
                    continue
                self._events.append(event)
                self._both[slot, :length] = canvas
                row.pending = True
                row.committed += length
                self._open_block(slot, row)
            elif row.step >= row.rules.policy.steps:
                raise DecodeError(
                    f"{row.rules.policy} left slots open after its last pass, number {row.step}"
                )
        for slot in reversed(left):
            self._free(slot)

    def _free(self, slot: int) -> None:
        """Close the gap that an ended row leaves: its slot takes the last row of its kind."""
        if slot < self._active:
            self._active -= 1
            self._take(self._active, slot)
            slot = self._active
        self._take(len(self._seated) - 1, slot)
        self._seated.pop()

    def _take(self, source: int, target: int) -> None:
        if source == target:
            return
        self._engine.move(source, target)
        self._both[target] = self._both[source]
        self._temperature[target] = self._temperature[source]
        self._seated[target] = self._seated[source]

    def _exchange(self, slot: int, other: int) -> None:
        if slot == other:
            return
        self._engine.swap(slot, other)
        for array in (self._both, self._temperature):
            array[[slot, other]] = array[[other, slot]]
        rows = self._seated
        rows[slot], rows[other] = rows[other], rows[slot]

    def _pass_event(self) -> PassEvent:
        rows = self._seated[: self._active]
        return PassEvent(
            rows=tuple(row.request for row in rows),
            canvases=self._canvas[: len(rows)].copy(),
            blocks=tuple(row.blocks for row in rows),
            steps=tuple(row.step - 1 for row in rows),
            past_lengths=tuple(row.committed for row in rows),
        )


def _not_finite(row: Row) -> str:
    return (
        f"scores are not finite in block {row.blocks}, pass {row.step}, after {row.committed} "
        "committed tokens: the model or its state holds NaN or infinity"
    )
