"""The decode loop: from prompts to tokens, block by block, on any engine.

A :class:`Stream` is the plain way in: requests that are all known at the start, decoded by a
:class:`fixedstate.runtime.scheduler.Scheduler`.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import UsageError
from fixedstate.runtime.engine import Engine
from fixedstate.runtime.prefix import PrefixStore
from fixedstate.runtime.requests import BlockEvent, Request, Result
from fixedstate.runtime.scheduler import OnPass, Scheduler, Watcher
from fixedstate.runtime.snapshot import Snapshot


class Stream:
    """The decoding of some requests: iterate over finished blocks, then read `results`.

    At most `slots` requests are decoded at once; a waiting one takes the slot of one that ended,
    at once. Ctrl-C inside a pass ends every open request as ``cancelled`` and keeps its finished
    blocks; so does :meth:`close`.

    Args:
        engine: Where the passes run; used by one stream at a time.
        requests: What to decode; all are checked before the first pass.
        defaults: The bundle's decode defaults.
        on_pass: Called after every round of denoise passes.
        prefixes: States of prompts seen before, looked up and added to.
        watcher: Told everything that happens to each row.
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
        prefixes: PrefixStore | None = None,
        watcher: Watcher | None = None,
        lock: ExclusiveUse | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self._scheduler = Scheduler(
            engine,
            defaults,
            on_pass=on_pass,
            prefixes=prefixes,
            watcher=watcher,
            load_seconds=load_seconds,
        )
        for request in requests:
            self._scheduler.submit(request)
        self._open = dict.fromkeys(range(len(requests)))  # in order
        self._results: list[Result | None] = [None] * len(requests)
        self._lock = lock or ExclusiveUse()
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
        done = [result for result in self._results if result is not None]
        if len(done) < len(self._results):
            raise UsageError("results are there once the stream has ended: iterate it or close it")
        return done

    def snapshot(self, request: int = 0) -> Snapshot:
        """The state of an open request between two of its blocks: right after its block event.

        Raises:
            UsageError: where it is inside a block, or holds no slot.
        """
        return self._scheduler.snapshot(request)

    def cancel(self, request: int) -> bool:
        """End one request as ``cancelled``; False if it has ended."""
        ended = self._scheduler.cancel(request) if request in self._open else False
        self._collect()
        return ended

    def _collect(self) -> None:
        """Take over the results of requests that ended."""
        for number in [n for n in self._open if self._scheduler.ended(n)]:
            self._results[number] = self._scheduler.result(number)
            del self._open[number]

    def _cancel(self, *, broken: bool = False) -> list[BlockEvent]:
        still = list(self._open)
        self._scheduler.cancel_all(broken=broken)
        self._collect()
        ended = [(number, self._results[number]) for number in still]
        return [BlockEvent(n, result.blocks, (), "cancelled") for n, result in ended if result]

    def _run(self) -> Generator[BlockEvent, None, None]:
        with self._lock:
            try:
                yield from self._ticks()
            except KeyboardInterrupt:
                yield from self._cancel(broken=True)
            finally:
                self._cancel()

    def _ticks(self) -> Iterator[BlockEvent]:
        while not self._scheduler.idle:
            events = self._scheduler.tick()
            self._collect()
            yield from events


class ExclusiveUse:
    """A lock that one decoding holds; a second one in the same thread is refused, not hung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def refuse_reentry(self) -> None:
        """Refuse the thread that holds it: it would wait for itself."""
        if self._owner == threading.get_ident():
            raise UsageError("another stream of this decoder is open: finish or close it first")

    def __enter__(self) -> None:
        self.refuse_reentry()
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._owner = None
        self._lock.release()
