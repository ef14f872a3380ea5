"""The scheduler: joining and leaving, cancelling, queue, saved states, passes that are not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, decode_all, noise_table, small_spec

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import CapacityError, StateError, UsageError
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.policies import FixedQuota, Reveal
from fixedstate.runtime.prefix import PrefixStore
from fixedstate.runtime.requests import Request, Settings
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.runtime.snapshot import Snapshot

SPEC = small_spec(block_len=4)


def engine(slots=3, fuses=True, spec=SPEC):
    return ScriptedEngine(spec, noise_table(spec), slots=slots, fuses=fuses)


def run(scheduler, until=lambda events: False):
    """Tick until nothing is open or a condition on the events holds; returns all events."""
    out = []
    while not scheduler.idle:
        events = scheduler.tick()
        out += events
        if until(events):
            break
    return out


def request(new, seed=0, prompt=(), **settings):
    return Request(list(prompt), Settings(new, seed=seed, stop_ids=(), **settings))


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 14), st.integers(0, 9)), max_size=9),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_rows_that_come_and_go_have_the_tokens_they_have_alone(jobs, slots, fuses, data):
    """Requests join between any two ticks, some are cancelled: the others never notice."""
    asked = [
        request(new, seed, range(prompt), temperature=float(seed % 2), steps=1 + seed % 4)
        for prompt, new, seed in jobs
    ]
    scheduler = Scheduler(engine(slots, fuses))
    cancelled, numbers = set(), {}
    for one in asked:
        numbers[scheduler.submit(one)] = one
        for _ in range(data.draw(st.integers(0, 4))):
            scheduler.tick()
        victim = data.draw(st.sampled_from([None, *numbers]))
        if victim is not None and scheduler.cancel(victim):
            cancelled.add(victim)
    run(scheduler)
    for number, one in numbers.items():
        result = scheduler.result(number)
        (alone,) = decode_all(engine(1, False), [one])
        if number in cancelled:
            assert result.finish_reason == "cancelled"
            assert result.token_ids == alone.token_ids[: len(result.token_ids)]
        else:
            assert result.token_ids == alone.token_ids
            assert result.denoise_passes == alone.denoise_passes


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("prompt", [0, 3, 9])
def test_a_block_of_s_steps_costs_s_passes(steps, prompt):
    """With the fused graph; without it one commit more for every block but the last."""
    one = [request(20 - prompt % 4, prompt=range(prompt), steps=steps)]
    fused, plain = engine(1), engine(1, False)
    assert decode_all(fused, one)[0].token_ids == decode_all(plain, one)[0].token_ids
    prefills = int(prompt >= 4)
    passes = sum(min(steps, 4 - prompt % 4 * (block == 0)) for block in range(5))
    assert (fused.denoised + fused.fused, fused.commits) == (passes, prefills)
    assert (plain.denoised, plain.commits) == (passes, prefills + 4)


def test_finished_rows_are_gathered_into_one_commit():
    """Rows that close their block in the same pass share a call, wherever their slots are."""
    e = engine(6, fuses=False)
    jobs = [request(12, steps=2 + 2 * (i % 2)) for i in range(6)]
    decode_all(e, jobs)
    # Rows of 2 steps close after passes 2, 4 (and end at 6), rows of 4 steps after 4, 8 (12).
    assert e.commits == 3
    assert e.denoised == 12


def test_the_queue_has_a_limit():
    """A request too many is refused with the numbers; one that ended makes room."""
    scheduler = Scheduler(engine(2), queue_limit=1)
    for _ in range(3):
        scheduler.submit(request(4))
    with pytest.raises(CapacityError, match=r"3 requests wait .* 0 of 2 slots .* holds 1"):
        scheduler.submit(request(4))
    scheduler.tick()
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    with pytest.raises(CapacityError, match=r"1 requests wait already and 2 of 2 slots"):
        scheduler.submit(request(4))
    scheduler.cancel(0)
    assert scheduler.submit(request(4)) == 3
    run(scheduler)
    assert [scheduler.result(n).finish_reason for n in range(4)] == [
        *("cancelled", "length", "length", "length")
    ]
    with pytest.raises(UsageError, match="queue_limit must be 0 or more"):
        Scheduler(engine(), queue_limit=-1)


def test_what_is_checked_is_what_is_submitted():
    """A request that would be refused is refused, and nothing is queued."""
    e = engine(2)
    e.limit = 16
    scheduler = Scheduler(e, queue_limit=0)
    scheduler.check(request(16))
    for wrong, error in ((request(17), CapacityError), (request(4, prompt=[99]), UsageError)):
        for take in (scheduler.check, scheduler.submit):
            with pytest.raises(error):
                take(wrong)
    assert scheduler.idle
    assert scheduler.submit(request(16)) == 0


def test_first_come_first_served():
    """Requests are seated in the order they came, whatever their lengths."""
    scheduler = Scheduler(engine(2))
    for new in (40, 4, 4, 4, 4):
        scheduler.submit(request(new))
    ended = [event.row for event in run(scheduler) if event.finish_reason]
    assert ended == [1, 2, 3, 4, 0]


def test_results_are_handed_over_once():
    """A scheduler that runs for weeks keeps nothing of what has ended."""
    scheduler = Scheduler(engine())
    number = scheduler.submit(request(4))
    with pytest.raises(UsageError, match="still open"):
        scheduler.result(number)
    run(scheduler)
    assert scheduler.ended(number)
    assert len(scheduler.result(number).token_ids) == 4
    with pytest.raises(UsageError, match="handed over"):
        scheduler.result(number)
    with pytest.raises(UsageError, match="no request has number 7"):
        scheduler.cancel(7)


@pytest.mark.parametrize("when", range(7))
def test_cancelling_keeps_finished_blocks(when):
    """While it waits, while its prompt is committed, inside a block, between blocks."""
    scheduler = Scheduler(engine(1), DecodeDefaults(prefill_blocks=1))
    number = scheduler.submit(request(40, prompt=range(8), steps=2))
    for _ in range(when):
        scheduler.tick()
    assert scheduler.cancel(number)
    assert scheduler.idle
    result = scheduler.result(number)
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) == 4 * max(0, (when - 1) // 2)


# --- states


def tiny(bundle_path, slots=2, **options):
    from fixedstate.runtime import load

    return load(bundle_path("F3"), slots=slots, threads=1, **options)


def prompt_of(decoder, count, seed=0):
    ids = np.random.default_rng(seed).integers(0, decoder.spec.vocab_size, count)
    return ids[ids != decoder.spec.mask_id].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_stream_moves_to_another_engine(bundle_path, at, temperature):
    """Saved after a block event, it goes on elsewhere, token for token."""
    settings = {"temperature": temperature, "seed": 5, "stop_ids": ()}
    with tiny(bundle_path) as here, tiny(bundle_path, slots=1) as there:
        prompt = prompt_of(here, 13)
        whole = here.generate([Request(prompt, Settings(40, **settings))])[0].token_ids
        stream = here.stream([Request(prompt, Settings(40, **settings)), Request([1])])
        seen = []
        for event in stream:
            if event.row == 0:
                seen += event.token_ids
                if event.block == at - 1:
                    state = Snapshot.from_bytes(stream.snapshot(0).to_bytes())
                    break
        rest = Request([], Settings(40 - len(seen), **settings), prefix=state)
        assert (*seen, *there.generate([rest])[0].token_ids) == whole
        for event in stream:  # saving has not disturbed it
            seen += event.token_ids if event.row == 0 else ()
        assert tuple(seen) == whole


@pytest.mark.parametrize("new", [1, 4, 11, 24])
@pytest.mark.parametrize("count", [0, 3, 8, 21])
def test_the_state_behind_an_answer(bundle_path, count, new):
    """Going on from it equals one prompt of both, for every remainder."""
    with tiny(bundle_path) as decoder:
        prompt, more = prompt_of(decoder, count), prompt_of(decoder, 9, seed=1)
        first = Request(prompt, Settings(new, stop_ids=()), keep_state=True)
        answer, other = decoder.generate([first, Request(more)])
        assert answer.state is not None
        assert other.state is None
        tokens = answer.state.past_length + len(answer.state.pending)
        assert tokens == len(prompt) + new
        went_on = decoder.generate([Request(more, Settings(12), prefix=answer.state)])[0]
        whole = decoder.generate([Request([*prompt, *answer.token_ids, *more], Settings(12))])[0]
        assert went_on.token_ids == whole.token_ids


def test_states_are_taken_between_blocks(bundle_path):
    """Inside a block, before the prompt is in, or without a slot there is none."""
    with tiny(bundle_path, slots=1) as decoder, decoder.scheduler() as scheduler:
        numbers = [scheduler.submit(request(40, prompt=[1] * 9)) for _ in range(2)]
        with pytest.raises(UsageError, match="holds no slot"):
            scheduler.snapshot(numbers[0])
        scheduler.tick()
        with pytest.raises(UsageError, match="inside a block"):
            scheduler.snapshot(numbers[0])
        with pytest.raises(UsageError, match="holds no slot"):
            scheduler.snapshot(numbers[1])


@pytest.mark.parametrize("count", [8, 16, 40, 41, 43])
def test_known_prompts_are_not_committed_again(bundle_path, count):
    """With a store the second request commits less and answers the same."""
    with tiny(bundle_path, slots=1) as decoder:
        prompt = prompt_of(decoder, 50)[:count]
        once = Request(prompt, Settings(9))
        expected = decoder.generate([once])[0].token_ids
        decoder.prefixes = PrefixStore(1 << 20)
        assert decoder.generate([once, once])[1].token_ids == expected
        store = decoder.prefixes
        assert (store.hits, store.misses) == (1, 1)
        assert store.tokens_saved == count // decoder.spec.block_len * decoder.spec.block_len


# --- passes that are not run


@dataclass(frozen=True)
class Hesitant:
    """Fills nothing in the first passes of a block, then everything: no monotone policy."""

    wait: int
    steps: int = 6
    monotone: ClassVar[bool] = False
    needs: ClassVar[str] = "confidence"

    def reveal(self, view):
        go = view.step >= self.wait
        return Reveal(view.fill(view.open & go[:, None]), np.zeros(len(go), np.int64))


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("wait", [0, 1, 3])
def test_a_row_whose_canvas_did_not_change_is_not_run_again(wait, fuses):
    """Its logits would be the same; rows beside it run on, and all have the tokens they have
    alone."""
    e = engine(3, fuses)
    slow = Request([1], Settings(7, stop_ids=(), policy=Hesitant(wait)))
    fast = request(16, steps=4)
    results = decode_all(e, [slow, fast, slow])
    ran = sum(len(call) for call in e.log)
    assert [result.denoise_passes for result in results] == [2, 16, 2]
    assert ran == 20
    for one, result in zip([slow, fast, slow], results, strict=True):
        assert decode_all(engine(1, False), [one])[0].token_ids == result.token_ids


def test_logits_that_a_pass_itself_changes_are_made_again():
    """With self-conditioning the same canvas gives other logits in the next pass."""
    spec = small_spec(block_len=4, self_conditioning_width=8)
    e = engine(1, False, spec)
    slow = Request([1], Settings(3, stop_ids=(), policy=Hesitant(3)))
    assert decode_all(e, [slow])[0].denoise_passes == 4


def test_a_policy_stands_instead_of_steps_and_threshold():
    """Both would contradict each other."""
    for given_too in ({"steps": 3}, {"threshold": 0.5}):
        with pytest.raises(UsageError, match="a policy has its own"):
            Settings(policy=FixedQuota(2), **given_too)
    same = [Request([1], Settings(9, policy=FixedQuota(2))), Request([1], Settings(9, steps=2))]
    one, two = decode_all(engine(), same)
    assert one.token_ids == two.token_ids


def test_one_row_can_be_cancelled_in_a_stream():
    """The others go on; its result is there with the rest."""
    stream = Stream(engine(2), [request(40), request(12)])
    next(stream)
    assert stream.cancel(0)
    assert not stream.cancel(0)
    for _ in stream:
        pass
    assert [result.finish_reason for result in stream.results] == ["cancelled", "length"]


def test_a_state_that_cannot_be_kept_is_an_error_of_that_row(bundle_path, monkeypatch):
    """The answer comes back whole, with the reason; the rows beside it go on."""
    with tiny(bundle_path) as decoder:
        wanted = Request([1, 2], Settings(9, stop_ids=()), keep_state=True)
        other = Request([3], Settings(20, stop_ids=()))
        expected = [result.token_ids for result in decoder.generate([wanted, other])]

        def refuse(*args, **options):
            raise StateError("state 'ssm_state_000' holds NaN")

        monkeypatch.setattr(Snapshot, "take", refuse)
        stream = decoder.stream([wanted, other])
        reasons = {event.row: event.finish_reason for event in stream if event.finish_reason}
        one, two = stream.results
        assert reasons == {0: "error", 1: "length"}
        assert (one.finish_reason, two.finish_reason) == ("error", "length")
        assert [one.token_ids, two.token_ids] == expected
        assert "the answer is whole, but its state cannot be kept: state 'ssm" in one.error
        assert one.state is None


def test_a_request_that_finds_no_memory_ends_with_an_error():
    """In its slot's place the next one begins."""
    e = engine(1)
    reset = e.reset

    def short_of_memory(row, room=0):
        if room > 12:
            raise CapacityError("no memory for past_key_000")
        reset(row, room)

    e.reset = short_of_memory
    results = decode_all(e, [request(4), request(16), request(8)])
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].error == "no memory for past_key_000"
