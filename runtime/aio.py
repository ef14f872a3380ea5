"""Serving from asyncio: one thread decodes, any number of tasks wait for their blocks.

Example:
    async with AsyncDecoder(load("log.bundle", slots=8), queue_limit=100) as front:
        async with front.stream(request) as answer:
            async for event in answer:
                print(event.token_ids)

This module mutates. What is shared with the thread that decodes is the list of orders, under a
condition; everything else belongs to that thread, or to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from fixedstate.errors import CapacityError, DecodeError, UsageError
from fixedstate.runtime.decoder import Decoder
from fixedstate.runtime.requests import BlockEvent, Request, Result
from fixedstate.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Load:
    """What a decoder was busy with after its last pass.

    Attributes:
        running: Requests in a slot.
        waiting: Requests without one.
        state_bytes: Bytes of the constant-size states of those in a slot.
        kv_bytes: Bytes of the keys and values of what they have committed.
    """

    running: int = 0
    waiting: int = 0
    state_bytes: int = 0
    kv_bytes: int = 0


class AsyncDecoder:
    """A decoder that many tasks of one event loop ask at once; used by ``async with``.

    One thread runs a pass of all open requests after another and sleeps while there are none. The
    decoder belongs to it until the end of the block: other calls of that decoder wait. Leaving the
    block waits for the open requests; leaving it by an exception cancels them.

    Args:
        decoder: Its slots are the requests that run together.
        queue_limit: Requests that may wait for a slot; None for any number.

    Raises:
        UsageError: for a negative `queue_limit`.
    """

    def __init__(self, decoder: Decoder, *, queue_limit: int | None = None) -> None:
        if queue_limit is not None and queue_limit < 0:
            raise UsageError(f"queue_limit must be 0 or more; got {queue_limit}")
        self._decoder = decoder
        self._queue_limit = queue_limit
        self._slots = 0
        self._load = Load()  # replaced as a whole by the thread
        # Of the event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None]
        self._over: asyncio.Future[None]
        self._thread: threading.Thread
        self._open: set[_Job] = set()
        self._failure: _Failure | None = None
        # Shared with the thread, under the condition:
        self._wake = threading.Condition()
        self._orders: list[tuple[_Job, bool]] = []  # a request, or (True) its end
        self._closing = False
        self._abandon = False

    async def __aenter__(self) -> AsyncDecoder:
        if self._loop is not None:
            raise UsageError("an AsyncDecoder is opened once: make another one")
        self._slots = self._decoder.engine.slots
        self._decoder.refuse_reentry()
        self._loop = asyncio.get_running_loop()
        self._ready, self._over = self._loop.create_future(), self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="fixedstate", daemon=True)
        self._thread.start()
        try:
            await self._ready
        except BaseException:
            self._order_close(cancel=True)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(cancel=kind is not None)

    def stream(self, request: Request) -> AsyncAnswer:
        """Ask; the answer is iterated block by block.

        The request counts as asked from now on, whether or not its blocks are waited for.

        Args:
            request: As for :meth:`Decoder.stream`; what is wrong with it is raised by the answer.

        Raises:
            CapacityError: at once, where too many requests wait.
            UsageError: outside of the ``async with`` block, or from another event loop.
        """
        self._check_loop()
        if self._failure is not None:
            self._failure.raise_again()
        if self._closing:
            raise UsageError("this AsyncDecoder is closed: nothing more can be asked")
        limit = self._queue_limit
        if limit is not None and len(self._open) >= self._slots + limit:
            raise CapacityError(
                f"{len(self._open)} requests are open, {self._slots} slots and {limit} places in "
                "the queue are taken: try again once one has ended"
            )
        job = _Job(request)
        self._open.add(job)
        self._order(job)
        return AsyncAnswer(self, job)

    @property
    def load(self) -> Load:
        """What it was busy with after its last pass."""
        return self._load

    async def generate(self, request: Request) -> Result:
        """Ask and wait for the whole answer; cancelling the task cancels the request.

        Raises:
            CapacityError: where too many requests wait, or this one does not fit.
            UsageError: for a request that is wrong; and as :meth:`stream`.
        """
        async with self.stream(request) as answer:
            async for _ in answer:
                pass
        return answer.result

    async def close(self, *, cancel: bool = False) -> None:
        """Take no more requests and wait for the end of those that are open.

        Cancelling the task that waits here cancels them.

        Args:
            cancel: Whether they are cancelled, before the next pass.
        """
        self._check_loop()
        self._order_close(cancel)
        interrupted = False
        while not self._over.done():
            try:
                await asyncio.shield(self._over)
            except asyncio.CancelledError:
                interrupted = True
                self._order_close(cancel=True)
        self._thread.join()
        if interrupted:
            raise asyncio.CancelledError

    # --- in the event loop

    def _check_loop(self) -> None:
        if self._loop is None:
            raise UsageError("this AsyncDecoder is not open: use `async with`")
        here = None
        with contextlib.suppress(RuntimeError):
            here = asyncio.get_running_loop()
        if here is not self._loop:
            raise UsageError(
                "this AsyncDecoder was opened in another event loop and answers only there: hand "
                "the request to that loop (asyncio.run_coroutine_threadsafe)"
            )

    def _deliver(self, news: list[tuple[_Job, _News]]) -> None:
        for job, item in news:
            if not isinstance(item, BlockEvent):
                self._open.discard(job)
            job.news.put_nowait(item)

    def _end(self, failure: Exception | None) -> None:
        """The thread has ended: nobody may wait for it any longer."""
        if failure is not None:
            self._failure = _Failure(failure)
            self._deliver([(job, self._failure) for job in self._open])
        if not self._ready.done():
            if failure is not None:
                self._ready.set_exception(failure)
            else:
                self._ready.cancel()
        self._over.set_result(None)

    # --- from any thread

    def _order(self, job: _Job, *, cancel: bool = False) -> None:
        with self._wake:
            self._orders.append((job, cancel))
            self._wake.notify()

    def _order_close(self, cancel: bool) -> None:
        with self._wake:
            self._closing = True
            self._abandon = self._abandon or cancel
            self._wake.notify()

    # --- in the thread that decodes

    def _work(self) -> None:
        failure: Exception | None = None
        try:
            with self._decoder.scheduler() as scheduler:
                self._call(self._begin)
                self._serve(scheduler)
        except Exception as err:
            failure = err
        except BaseException as err:  # one that would end the event loop of those who wait
            failure = DecodeError(f"the thread that decodes was ended by {err!r}")
            failure.__cause__ = err
        with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
            self._call(self._end, failure)

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)

    def _begin(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _serve(self, scheduler: Scheduler) -> None:
        """Carry out orders and run passes until it is closed and nothing is open."""
        running: dict[int, _Job] = {}
        while True:
            orders, over = self._wait(scheduler.idle)
            news: list[tuple[_Job, _News]] = []
            for job, cancel in orders:
                if not cancel:
                    self._submit(scheduler, job, running, news)
                elif job.number in running:
                    scheduler.cancel(job.number)
            if self._abandon:
                scheduler.cancel_all()
            if not scheduler.idle:
                news += [(running[event.row], event) for event in scheduler.tick()]
            for number in [n for n in running if scheduler.ended(n)]:
                job, result = running.pop(number), scheduler.result(number)
                if result.finish_reason == "cancelled":
                    news.append((job, BlockEvent(number, result.blocks, (), "cancelled")))
                news.append((job, result))
            self._load = Load(
                scheduler.running, scheduler.waiting, scheduler.state_bytes, scheduler.kv_bytes
            )
            if news:
                self._call(self._deliver, news)
            if over and scheduler.idle:
                return

    def _wait(self, idle: bool) -> tuple[list[tuple[_Job, bool]], bool]:
        """The orders since the last call, and whether no more will come; sleeps while idle."""
        with self._wake:
            while idle and not (self._orders or self._closing):
                self._wake.wait()
            orders, self._orders = self._orders, []
            return orders, self._closing

    def _submit(
        self,
        scheduler: Scheduler,
        job: _Job,
        running: dict[int, _Job],
        news: list[tuple[_Job, _News]],
    ) -> None:
        try:
            job.number = scheduler.submit(job.request)
        except Exception as err:  # a wrong request concerns the one who asked
            news.append((job, _Failure(err)))
        else:
            running[job.number] = job


class AsyncAnswer:
    """One request on its way: iterate over its finished blocks, then read `result`.

    The request is cancelled before the next pass when the task that waits for a block is
    cancelled, when the ``async with`` block is left early, and when the answer is dropped. Blocks
    that nobody takes wait here and hold up nobody; there are never more than the request's
    `max_new_tokens` have room for.

    Iterating raises what is wrong with the request (`UsageError`, `CapacityError`, `StateError`),
    or what ended the thread that decodes.
    """

    def __init__(self, front: AsyncDecoder, job: _Job) -> None:
        self._front, self._job = front, job
        self._result: Result | None = None

    def __aiter__(self) -> AsyncAnswer:
        return self

    async def __anext__(self) -> BlockEvent:
        self._front._check_loop()
        news = self._job.news
        try:
            item = await news.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, BlockEvent):
            return item
        news.put_nowait(item)  # the end stays the end, however often it is asked for
        self._job.over = True
        if isinstance(item, _Failure):
            item.raise_again()
        self._result = item
        raise StopAsyncIteration

    async def __aenter__(self) -> AsyncAnswer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request as ``cancelled`` before the next pass; nothing if it has ended.

        Its finished blocks, a last event and its result still come.
        """
        if not self._job.over:
            self._job.over = True
            self._front._order(self._job, cancel=True)

    @property
    def result(self) -> Result:
        """What came of the request.

        Raises:
            UsageError: before its last block was taken.
        """
        if self._result is None:
            raise UsageError("the result is there once the answer has been iterated to its end")
        return self._result


class _Failure:
    """An exception that several tasks raise, each without the frames of the others."""

    def __init__(self, error: Exception) -> None:
        self._error, self._trace = error, error.__traceback__

    def raise_again(self) -> NoReturn:
        raise self._error.with_traceback(self._trace)


_News = BlockEvent | Result | _Failure


class _Job:
    """A request, where it stands in the scheduler, and what has not been taken of its answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.number = -1  # none yet
        self.news: asyncio.Queue[_News] = asyncio.Queue()
        self.over = False  # ended, or told to
