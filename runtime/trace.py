"""Where the time goes: a span for each pass, commit, block and request, as a trace or as a summary.

A trace is JSON in the form that Perfetto and Chrome read. Its first track holds what the engine
was called for; every request has a track of its own, on which its blocks lie inside of it.

This module mutates: a :class:`Tracer` collects while its decoder works.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fixedstate.bundle import write_atomic
from fixedstate.ports import Array
from fixedstate.runtime.decoder import Decoder
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import Request
from fixedstate.runtime.rows import Row
from fixedstate.runtime.scheduler import OnPass, Scheduler, Watcher

_KINDS = {
    "denoise": "denoise",
    "denoise_at": "denoise",
    "commit": "commit",
    "commit_denoise": "commit_denoise",
    "commit_denoise_at": "commit_denoise",
}
_PASSES = 0  # number of the track of passes; requests have 1 and more
_SAMPLES = 1 << 16  # durations of each kind that percentiles are taken from: the latest


class Tracer:
    """Collects spans of the decoders that it watches.

    Args:
        keep: Spans that a trace holds: the latest. The summary counts all.
    """

    def __init__(self, *, keep: int = 1 << 18) -> None:
        self._spans: deque[tuple[str, int, float, float, dict[str, Any]]] = deque(maxlen=keep)
        self._dropped = 0
        self._origin = time.perf_counter()
        self._calls: dict[str, _Calls] = {}
        self._totals = dict.fromkeys(
            ("requests", "new_tokens", "denoise_passes", "forced_slots"), 0
        )
        self._reasons: dict[str, int] = {}
        self._load_seconds = 0.0
        self._provider = ""
        self._requests = 0
        self._begun: dict[int, _Request] = {}  # by id of the row, which lives as long

    def watch(self, decoder: Decoder) -> Decoder:
        """The decoder with its passes timed; it takes the place of the other one.

        What it decodes is the same. Its graphs have to give all scores.

        Args:
            decoder: Not used beside the one that is returned.
        """
        self._load_seconds += decoder.load_seconds
        self._provider = decoder.engine.provider
        return _TracedDecoder(decoder, self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, whole or not at all; a file that is there is replaced.

        Raises:
            BundleError: where it cannot be written.
        """
        write_atomic(Path(path), json.dumps(self.trace()).encode())

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write the summary, whole or not at all; a file that is there is replaced.

        Raises:
            BundleError: where it cannot be written.
        """
        write_atomic(Path(path), (json.dumps(self.profile(), indent=2) + "\n").encode())

    def trace(self) -> dict[str, Any]:
        """Trace events in the JSON form of Perfetto and Chrome; times in microseconds."""
        spans = list(self._spans)
        tracks = sorted({track for _, track, *_ in spans} | {_PASSES})
        names = [
            _meta(track, "passes" if track == _PASSES else f"request {track - 1}")
            for track in tracks
        ]
        events = [
            {
                "name": name,
                "cat": "pass" if track == _PASSES else "request",
                "ph": "X",
                "ts": (start - self._origin) * 1e6,
                "dur": (end - start) * 1e6,
                "pid": 1,
                "tid": track,
                "args": args,
            }
            for name, track, start, end, args in sorted(spans, key=lambda span: (span[2], -span[3]))
        ]
        return {
            "traceEvents": names + events,
            "displayTimeUnit": "ms",
            "otherData": {"provider": self._provider, "spans_dropped": self._dropped},
        }

    def profile(self) -> dict[str, Any]:
        """The same in numbers: calls of the engine by kind, and what they came to.

        `seconds` of a kind is the sum over its calls, `rows` the sum of the rows in them; the
        percentiles are of its latest calls.
        """
        passes, tokens = self._totals["denoise_passes"], self._totals["new_tokens"]
        return {
            "provider": self._provider,
            "load_seconds": self._load_seconds,
            "wall_seconds": time.perf_counter() - self._origin,
            "engine_seconds": sum(calls.seconds for calls in self._calls.values()),
            **self._totals,
            "finish_reasons": dict(self._reasons),
            "tokens_per_pass": tokens / passes if passes else 0.0,
            "calls": {kind: calls.to_dict() for kind, calls in sorted(self._calls.items())},
        }

    # --- collecting

    def add(self, name: str, track: int, start: float, end: float, **args: Any) -> None:
        """Note a span.

        Args:
            name: What was done.
            track: Where it lies.
            start: By `time.perf_counter`.
            end: Likewise.
            args: What is shown with it.
        """
        self._dropped += len(self._spans) == self._spans.maxlen
        self._spans.append((name, track, start, end, args))

    def call(self, kind: str, start: float, rows: int, tokens: int) -> None:
        """Note a call of the engine that ends now."""
        end = time.perf_counter()
        self._calls.setdefault(kind, _Calls()).add(end - start, rows)
        self.add(kind, _PASSES, start, end, rows=rows, tokens=tokens)

    def watcher(self, mask: int | None, other: Watcher | None) -> Watcher:
        """What is told of the rows, and tells the other one."""
        own = _RequestSpans(self, mask)
        return own if other is None else _Both(own, other)

    def begin(self, row: Row) -> None:
        """A request has its slot."""
        now = time.perf_counter()
        self._requests += 1
        self._begun[id(row)] = _Request(self._requests, now, now)

    def mark(self, row: Row, name: str, **args: Any) -> None:
        """Note what a request did since its last mark."""
        request = self._begun[id(row)]
        now = time.perf_counter()
        self.add(name, request.track, request.mark, now, **args)
        request.mark = now

    def end(self, row: Row) -> None:
        """A request has ended, with or without a slot."""
        self._totals["requests"] += 1
        self._totals["new_tokens"] += row.count
        self._totals["denoise_passes"] += row.passes
        self._totals["forced_slots"] += row.forced
        reason = str(row.reason)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        request = self._begun.pop(id(row), None)
        if request is not None:
            self.add(
                f"request {request.track - 1}",
                request.track,
                request.start,
                time.perf_counter(),
                waited_ms=(request.start - row.started) * 1e3,
                prompt_tokens=len(row.prompt),
                new_tokens=row.count,
                denoise_passes=row.passes,
                finish_reason=row.reason,
            )


class _Request:
    """Where a request's track is, when it began, and up to when its spans reach."""

    def __init__(self, track: int, start: float, mark: float) -> None:
        self.track, self.start, self.mark = track, start, mark


class _Calls:
    """Calls of one kind."""

    def __init__(self) -> None:
        self.count = self.rows = 0
        self.seconds = 0.0
        self._latest: deque[float] = deque(maxlen=_SAMPLES)

    def add(self, seconds: float, rows: int) -> None:
        self.count, self.rows = self.count + 1, self.rows + rows
        self.seconds += seconds
        self._latest.append(seconds)

    def to_dict(self) -> dict[str, float]:
        p50, p90, p99, most = np.percentile(list(self._latest), (50, 90, 99, 100)).tolist()
        return {
            "count": self.count,
            "rows": self.rows,
            "seconds": self.seconds,
            "mean_ms": self.seconds / self.count * 1e3,
            "p50_ms": p50 * 1e3,
            "p90_ms": p90 * 1e3,
            "p99_ms": p99 * 1e3,
            "max_ms": most * 1e3,
        }


class _RequestSpans:
    """A watcher that notes requests, their prompts and their blocks."""

    def __init__(self, tracer: Tracer, mask: int | None) -> None:
        self._tracer, self._mask = tracer, mask

    def begun(self, row: Row, slot: int) -> None:
        self._tracer.begin(row)

    def committed(self, row: Row, slot: int, ids: Array, *, fused: bool) -> None:
        if not (row.blocks or fused):
            self._tracer.mark(row, "prompt", tokens=len(ids))

    def scored(self, row: Row, slot: int, canvas: Array, logits: Array) -> None:
        pass

    def revealed(self, row: Row, slot: int, canvas: Array) -> None:
        if not (canvas == self._mask).any():
            self._tracer.mark(row, f"block {row.blocks}", steps=row.step)

    def ended(self, row: Row) -> None:
        self._tracer.end(row)


class _Both:
    """Two watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def begun(self, row: Row, slot: int) -> None:
        for watcher in self._watchers:
            watcher.begun(row, slot)

    def committed(self, row: Row, slot: int, ids: Array, *, fused: bool) -> None:
        for watcher in self._watchers:
            watcher.committed(row, slot, ids, fused=fused)

    def scored(self, row: Row, slot: int, canvas: Array, logits: Array) -> None:
        for watcher in self._watchers:
            watcher.scored(row, slot, canvas, logits)

    def revealed(self, row: Row, slot: int, canvas: Array) -> None:
        for watcher in self._watchers:
            watcher.revealed(row, slot, canvas)

    def ended(self, row: Row) -> None:
        for watcher in self._watchers:
            watcher.ended(row)


class _TimedEngine:
    """An engine whose passes are timed; everything else is that of the other one."""

    def __init__(self, engine: Any, tracer: Tracer) -> None:
        self._engine, self._tracer = engine, tracer
        for name, kind in _KINDS.items():
            if hasattr(engine, name):
                setattr(self, name, self._timed(getattr(engine, name), kind))

    def _timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(ids: Array, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            found = function(ids, *args, **options)
            self._tracer.call(kind, start, *np.shape(ids))
            return found

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _TracedDecoder(Decoder):
    """A decoder that tells a tracer what it does."""

    def __init__(self, decoder: Decoder, tracer: Tracer) -> None:
        engine = cast(SessionEngine, _TimedEngine(decoder.engine, tracer))
        super().__init__(decoder.bundle, engine, decoder.load_seconds, decoder.prefixes)
        self._tracer = tracer

    def stream(
        self,
        requests: Sequence[Request],
        on_pass: OnPass | None = None,
        watcher: Watcher | None = None,
    ) -> Stream:
        return super().stream(requests, on_pass, self._watcher(watcher))

    @contextlib.contextmanager
    def scheduler(
        self,
        *,
        queue_limit: int | None = None,
        on_pass: OnPass | None = None,
        watcher: Watcher | None = None,
    ) -> Iterator[Scheduler]:
        with super().scheduler(
            queue_limit=queue_limit, on_pass=on_pass, watcher=self._watcher(watcher)
        ) as scheduler:
            yield scheduler

    def _watcher(self, other: Watcher | None) -> Watcher:
        return self._tracer.watcher(self.spec.mask_id, other)


def _meta(track: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
