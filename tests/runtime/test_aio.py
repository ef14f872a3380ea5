"""The asyncio front: same tokens, refusals to the one who asked, ends that reach everybody."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, noise_table, small_spec

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import BackendError, CapacityError, DecodeError, UsageError
from fixedstate.runtime import AsyncDecoder, Decoder, Request, Settings
from fixedstate.runtime.scheduler import Scheduler

SPEC = small_spec(block_len=4)
GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"


class GatedEngine(ScriptedEngine):
    """Every denoise pass waits for a permit, so that a test says how far the thread may go."""

    def __init__(self, *, slots, fuses=False):
        super().__init__(SPEC, noise_table(SPEC), slots=slots, fuses=fuses)
        self.gate = threading.Semaphore(0)

    def denoise(self, ids, first=0):
        assert self.gate.acquire(timeout=60)
        return super().denoise(ids, first)

    def open(self):
        self.gate.release(1_000_000)


def decoder(slots=2, engine=None):
    bundle = SimpleNamespace(spec=SPEC, decode=DecodeDefaults())
    return Decoder(
        bundle, engine or ScriptedEngine(SPEC, noise_table(SPEC), slots=slots, fuses=True)
    )


def gated(slots=1):
    engine = GatedEngine(slots=slots)
    return engine, decoder(engine=engine)


def ask(new=9, prompt=(), **settings):
    return Request(list(prompt), Settings(new, stop_ids=(), **settings))


@pytest.fixture(autouse=True)
def quiet(caplog):
    """In debug mode asyncio logs what was forgotten; nothing ever is."""
    yield
    gc.collect()
    assert [r for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR] == []


def play(scene):
    """Run a coroutine function in a loop of its own, in debug mode."""

    async def main():
        asyncio.get_running_loop().slow_callback_duration = 60.0  # the machine may be busy
        return await asyncio.wait_for(scene(), 60)

    return asyncio.run(main(), debug=True)


async def collect(answer):
    return [event async for event in answer]


def tokens(events):
    return tuple(token for event in events for token in event.token_ids)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 14), st.integers(0, 9)), max_size=7),
    st.integers(1, 4),
)
def test_answers_are_those_of_generate(jobs, slots):
    """Same tokens and passes for any number of requests at once, streamed or whole."""
    asked = [
        ask(new, range(prompt), seed=seed, temperature=float(seed % 2), steps=1 + seed % 4)
        for prompt, new, seed in jobs
    ]

    async def scene():
        async with AsyncDecoder(decoder(slots)) as front:
            answers = [front.stream(one) for one in asked]
            whole = await asyncio.gather(*(front.generate(one) for one in asked))
            streamed = await asyncio.gather(*map(collect, answers))
            return whole, streamed, [answer.result for answer in answers]

    whole, streamed, results = play(scene)
    expected = decoder(slots).generate(asked)
    for got in (whole, results):
        assert [r.token_ids for r in got] == [r.token_ids for r in expected]
        assert [r.denoise_passes for r in got] == [r.denoise_passes for r in expected]
    assert [tokens(events) for events in streamed] == [r.token_ids for r in expected]
    assert [events[-1].finish_reason for events in streamed] == ["length"] * len(asked)


def test_blocks_arrive_while_the_request_goes_on():
    """A block that is finished is handed over before the next pass is allowed to run."""
    engine, deep = gated()

    async def scene():
        async with AsyncDecoder(deep) as front, front.stream(ask(12, steps=2)) as answer:
            engine.gate.release(2)
            first = await anext(answer)
            assert (first.block, first.finish_reason, engine.denoised) == (0, None, 2)
            with pytest.raises(UsageError, match="iterated to its end"):
                _ = answer.result
            engine.open()
            assert [event.block for event in await collect(answer)] == [1, 2]
            assert await collect(answer) == []  # the end stays the end
            return answer.result

    assert play(scene).token_ids == decoder().generate([ask(12, steps=2)])[0].token_ids


def test_a_slow_consumer_holds_up_nobody():
    """Blocks that nobody takes wait with their answer; the other request ends."""

    async def scene():
        async with AsyncDecoder(decoder(1)) as front:
            slow = front.stream(ask(40))
            other = await front.generate(ask(8, seed=1))
            return await collect(slow), other

    events, other = play(scene)
    assert (len(events), other.new_tokens) == (10, 8)


@pytest.mark.parametrize("way", ["task", "leave", "drop", "cancel"])
def test_an_end_before_time_leaves_the_others_alone(way):
    """Cancelled after its first block: the row leaves, its neighbour's tokens stay the same."""
    engine, deep = gated(2)
    long, other = ask(400, steps=2, seed=3, temperature=1.0), ask(24, steps=2)

    async def scene():
        async with AsyncDecoder(deep) as front:
            neighbour = asyncio.ensure_future(front.generate(other))
            answer = front.stream(long)
            engine.gate.release(2)
            assert (await anext(answer)).block == 0
            if way == "task":
                task = asyncio.ensure_future(collect(answer))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "leave":
                async with answer:
                    pass
            elif way == "cancel":
                answer.cancel()
            if way == "drop":
                del answer
                gc.collect()
                engine.open()
                return await neighbour, None
            engine.open()
            rest = await collect(answer)
            assert rest[-1].finish_reason == "cancelled"
            return await neighbour, answer.result

    neighbour, result = play(scene)
    assert neighbour.token_ids == decoder().generate([other])[0].token_ids
    assert engine.denoised < 60  # the long one was never decoded to its end: 200 passes
    if result is not None:
        assert (result.finish_reason, result.new_tokens % 4) == ("cancelled", 0)
        whole = decoder().generate([long])[0].token_ids
        assert result.token_ids == whole[: result.new_tokens]


def test_the_queue_is_bounded():
    """One request too many is refused at once; one that ended makes room."""
    engine, deep = gated(1)

    async def scene():
        async with AsyncDecoder(deep, queue_limit=1) as front:
            tasks = [asyncio.ensure_future(front.generate(ask(4))) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match=r"2 requests are open, 1 slots and 1 places"):
                front.stream(ask(4))
            with pytest.raises(CapacityError):
                await front.generate(ask(4))
            engine.open()
            await tasks[0]
            assert (await front.generate(ask(4))).new_tokens == 4
            await tasks[1]

    play(scene)
    with pytest.raises(UsageError, match="queue_limit must be 0 or more"):
        AsyncDecoder(deep, queue_limit=-1)


def test_first_come_first_served():
    """Requests are answered in the order they were asked, where their lengths are equal."""
    ended = []

    async def one(front, number):
        await front.generate(ask(4))
        ended.append(number)

    async def scene():
        async with AsyncDecoder(decoder(1)) as front:
            await asyncio.gather(*(one(front, number) for number in range(6)))

    play(scene)
    assert ended == list(range(6))


def test_a_wrong_request_is_the_business_of_its_caller():
    """Ids outside the vocabulary, a prompt that does not fit, nonsense: the others go on."""
    deep = decoder(2)
    deep.engine.limit = 64

    async def scene():
        async with AsyncDecoder(deep) as front:
            good = asyncio.ensure_future(front.generate(ask(9)))
            with pytest.raises(UsageError, match="id 99 at place 0"):
                await front.generate(ask(9, [99]))
            with pytest.raises(CapacityError, match="the limit is 64"):
                await front.generate(ask(65))
            with pytest.raises((TypeError, ValueError)):
                await front.generate(Request([[1], [2, 3]]))
            return await good

    assert play(scene).new_tokens == 9


@pytest.mark.parametrize("error", [BackendError("the card is gone"), MemoryError(), SystemExit(3)])
def test_what_ends_the_thread_reaches_everybody(error):
    """Those who wait, those whose request waits, and those who come later; closing still works."""
    engine, deep = gated(1)

    def fail(history, ids):
        raise error

    async def scene():
        async with AsyncDecoder(deep) as front:
            tasks = [asyncio.ensure_future(front.generate(ask(9))) for _ in range(3)]
            await asyncio.sleep(0)
            engine.table = fail
            engine.open()
            kind = type(error) if isinstance(error, Exception) else DecodeError
            for task in tasks:
                with pytest.raises(kind) as caught:
                    await task
                assert error in (caught.value, caught.value.__cause__)
            depths = []
            for _ in range(3):
                with pytest.raises(kind) as caught:
                    front.stream(ask(9))
                depths.append(len(caught.traceback))
            assert depths[0] == depths[2]  # the frames of one caller do not stay for the next

    play(scene)
    assert deep.generate([]) == []  # the decoder is free again


def test_leaving_waits_for_what_is_open():
    async def scene():
        async with AsyncDecoder(decoder(1)) as front:
            answers = [front.stream(ask(9)) for _ in range(3)]
        return [await collect(answer) for answer in answers]

    assert [tokens(events) for events in play(scene)] == [
        decoder().generate([ask(9)])[0].token_ids
    ] * 3


def test_leaving_by_an_exception_cancels():
    """So does `close(cancel=True)`, and cancelling the task that waits in the end."""
    engine, deep = gated(1)

    async def left(how):
        async with AsyncDecoder(deep) as front:
            answers = [front.stream(ask(400)) for _ in range(2)]
            if how == "raise":
                engine.open()
                raise LookupError
            if how == "close":
                engine.open()
                await front.close(cancel=True)
                return [await collect(answer) for answer in answers]
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            asyncio.get_running_loop().call_soon(engine.open)
        raise AssertionError("not reached")

    with pytest.raises(LookupError):
        play(lambda: left("raise"))
    events = play(lambda: left("close"))
    assert [answer[-1].finish_reason for answer in events] == ["cancelled"] * 2
    with pytest.raises(asyncio.CancelledError):
        play(lambda: left("task"))
    assert engine.denoised < 1000  # of 1,600 or more


def test_it_answers_only_where_it_was_opened():
    """Not before, not after, not in another loop, and no second time."""
    front = AsyncDecoder(decoder())
    with pytest.raises(UsageError, match="use `async with`"):
        front.stream(ask())

    async def elsewhere():
        with pytest.raises(UsageError, match="opened in another event loop"):
            front.stream(ask())

    async def scene():
        async with front:
            answer = front.stream(ask())
            other = threading.Thread(target=lambda: play(elsewhere))
            other.start()
            await asyncio.to_thread(other.join)
            await collect(answer)
        with pytest.raises(UsageError, match="is closed"):
            front.stream(ask())
        with pytest.raises(UsageError, match="opened once"):
            await front.__aenter__()

    play(scene)
    with pytest.raises(UsageError, match="opened in another event loop"):
        front.stream(ask())


def test_a_stream_of_the_same_thread_is_refused_not_waited_for():
    """The loop would wait for a stream that only it can finish."""
    deep = decoder()

    async def scene():
        stream = deep.stream([ask(40)])
        next(stream)
        with pytest.raises(UsageError, match="another stream of this decoder is open"):
            async with AsyncDecoder(deep):
                pass
        stream.close()
        async with AsyncDecoder(deep) as front:
            assert (await front.generate(ask(5))).new_tokens == 5

    play(scene)


def test_a_second_front_waits_for_the_first():
    """Without holding up the loop; giving up the wait leaves nothing behind."""
    deep = decoder()

    async def scene():
        async with AsyncDecoder(deep) as first:
            second = AsyncDecoder(deep)
            waiting = asyncio.ensure_future(second.__aenter__())
            assert (await first.generate(ask(5))).new_tokens == 5
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await second.close()
        async with AsyncDecoder(deep) as third:
            assert (await third.generate(ask(5))).new_tokens == 5

    play(scene)


def test_the_thread_runs_one_tick_a_pass_and_sleeps_otherwise(monkeypatch):
    """No tick is run for nothing, before, between and after requests."""
    ticks = []
    tick = Scheduler.tick
    monkeypatch.setattr(Scheduler, "tick", lambda self: ticks.append(1) or tick(self))
    deep = decoder(1)

    async def scene():
        async with AsyncDecoder(deep) as front:
            return [await front.generate(ask(8, steps=2)) for _ in range(3)]

    assert [result.denoise_passes for result in play(scene)] == [4] * 3
    assert len(ticks) == 12


def test_states_come_with_the_result():
    """A chat server keeps the state of a conversation and goes on from it."""
    from fixedstate.runtime import load

    prompt = np.random.default_rng(0).integers(0, 30, 11).tolist()
    with load(GOLDEN, slots=2, threads=1) as deep:

        async def scene():
            async with AsyncDecoder(deep) as front:
                first = await front.generate(
                    Request(prompt, Settings(10, stop_ids=()), keep_state=True)
                )
                more = Request([1, 2], Settings(10, stop_ids=()), prefix=first.state)
                return first, await front.generate(more)

        first, second = play(scene)
        whole = [*prompt, *first.token_ids, 1, 2]
        expected = deep.generate([Request(whole, Settings(10, stop_ids=()))])[0]
    assert second.token_ids == expected.token_ids
