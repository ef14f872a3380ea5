"""Block decoding: lengths, alignment, limits, stopping (cases BG, SE-12, SE-13)."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import MASK, STOP, VOCAB, ScriptedEngine, decode, decode_all, one_hot, small_spec

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import CapacityError, UsageError
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import Request, Settings


@pytest.mark.parametrize("place", range(13))
def test_BG_01_prompt_eos_does_not_stop(engine, place):
    """Only newly generated positions can stop decoding, wherever the prompt holds a stop id."""
    prompt = [1] * 13
    prompt[place] = STOP
    result = decode(engine, prompt, max_new_tokens=16)
    assert result.token_ids == tuple(i % 30 for i in range(13, 29))
    assert result.finish_reason == "length"


def test_BG_01_eos_in_the_remainder_next_to_new_tokens(engine):
    """The remainder shares the first active block with the new tokens."""
    result = decode(engine, [1] * 12 + [STOP], max_new_tokens=3)
    assert (result.token_ids, result.finish_reason) == ((13, 14, 15), "length")


@pytest.mark.parametrize("new", [1, 3, 8, 19, 20, 21, 40])
@pytest.mark.parametrize("prompt_len", [0, 1, 7, 8, 13, 16])
def test_BG_03_never_more_tokens_than_asked(engine, prompt_len, new):
    """Blocks are rounded up inside; what comes back is not."""
    stream = Stream(engine, [Request([2] * prompt_len, Settings(max_new_tokens=new))])
    events = list(stream)
    result = stream.results[0]
    streamed = [token for event in events for token in event.token_ids]
    assert streamed == list(result.token_ids)
    assert result.token_ids == tuple(i % 30 for i in range(prompt_len, prompt_len + new))
    assert result.blocks == len(events) == -(-(prompt_len % 8 + new) // 8)
    assert result.tokens_per_pass == pytest.approx(new / result.denoise_passes)


@pytest.mark.parametrize("limit", range(32, 42))
def test_BG_04_limit_is_checked_with_block_rounding(spec, limit):
    """13 + 20 tokens take 40 slots: decided before any forward."""
    engine = ScriptedEngine(spec, limit=limit)
    if limit >= 40:
        assert len(decode(engine, [1] * 13, max_new_tokens=20).token_ids) == 20
        return
    with pytest.raises(CapacityError, match=rf"prompt 13 \+ 20 new .* = 40 tokens; .* {limit}"):
        decode(engine, [1] * 13, max_new_tokens=20)
    assert engine.denoised == engine.commits == 0


@pytest.mark.parametrize("steps", [1, 3, 8, 20])
def test_BG_08_steps_are_per_block(engine, steps):
    """Every mask is filled by the last step; steps beyond the block are harmless."""
    canvases = []
    result = decode(
        engine, max_new_tokens=24, steps=steps, on_pass=lambda e: canvases.append(e.canvases[0])
    )
    assert result.token_ids == tuple(range(24))
    assert result.denoise_passes == engine.denoised == 3 * min(steps, 8)
    assert sum((canvas != MASK).all() for canvas in canvases) == 3


def test_BG_09_empty_prompt(engine):
    """Length 0 starts from the state before any token: one all-mask block."""
    assert decode(engine, [], max_new_tokens=5).token_ids == (0, 1, 2, 3, 4)
    assert engine.log[0][0][0] == 0
    assert decode(engine, np.zeros(0), max_new_tokens=1).token_ids == (0,)


def test_BG_09_only_the_begin_token():
    """With a begin id the prompt is that one token."""
    engine = ScriptedEngine(small_spec(bos_id=1))
    assert decode(engine, [1], max_new_tokens=3).token_ids == (1, 2, 3)


def stops_at(spec, places, *, late=()):
    """Stop ids at positions of the whole text; those in `late` are revealed last."""

    def table(history, ids):
        slots = len(history) + np.arange(spec.block_len)
        out = one_hot(spec, [STOP if p in places else p % 30 for p in slots])
        out[np.isin(slots, late)] *= 0.1
        return out

    return table


@pytest.mark.parametrize("places", [{3}, {3, 6}, {7}, {0}, {11}, {15, 12}])
def test_SE_12_cut_after_the_first_stop(spec, places):
    """Later slots are dropped from text, stream and counts."""
    engine = ScriptedEngine(spec, stops_at(spec, places))
    stream = Stream(engine, [Request([], Settings(max_new_tokens=40))])
    streamed = [token for event in stream for token in event.token_ids]
    result = stream.results[0]
    first = min(places)
    assert result.token_ids == (*range(first), STOP) == tuple(streamed)
    assert (result.finish_reason, result.blocks) == ("stop", first // 8 + 1)
    assert engine.commits == first // 8  # the last block is not committed


def test_SE_12_stop_behind_open_slots_waits(spec):
    """A stop token filled early does not stop while slots before it are open."""
    engine = ScriptedEngine(spec, stops_at(spec, {5}, late=(0, 1, 2, 3, 4)))
    result = decode(engine, max_new_tokens=40)
    assert result.token_ids == (0, 1, 2, 3, 4, STOP)
    assert engine.denoised == 8


def test_stop_beyond_the_limit_is_not_seen(spec):
    """Slots past the limit are not part of the answer, so a stop there is none."""
    result = decode(ScriptedEngine(spec, stops_at(spec, {6})), max_new_tokens=5)
    assert (result.token_ids, result.finish_reason) == ((0, 1, 2, 3, 4), "length")


@pytest.mark.parametrize(("least", "count"), [(0, 1), (1, 2), (5, 6), (9, 10)])
def test_SE_13_stop_everywhere_and_a_minimum(spec, least, count):
    """All stop ids give an empty answer; a minimum keeps them out of the first slots."""
    engine = ScriptedEngine(spec, lambda history, ids: one_hot(spec, [STOP] * 8))
    result = decode(engine, [1] * 3, max_new_tokens=20, min_new_tokens=least)
    assert result.finish_reason == "stop"
    assert len(result.token_ids) == count
    assert result.token_ids.index(STOP) == least


def test_settings_stop_ids_replace_the_models(spec):
    """A request may stop at other ids, or at none."""
    engine = ScriptedEngine(spec, stops_at(spec, {3}))
    assert decode(engine, max_new_tokens=8, stop_ids=()).finish_reason == "length"
    assert decode(engine, max_new_tokens=8, stop_ids=(2,)).token_ids == (0, 1, 2)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_several_prompts_of_unequal_length(spec, slots):
    """More requests than slots, prompts from 0 to 40 tokens: each as if it were alone."""
    lengths = (0, 1, 7, 8, 9, 16, 33, 40)
    requests = [Request([3] * n, Settings(max_new_tokens=5 + 3 * i)) for i, n in enumerate(lengths)]
    results = decode_all(ScriptedEngine(spec, slots=slots), requests)
    for i, n in enumerate(lengths):
        assert results[i].token_ids == tuple(p % 30 for p in range(n, n + 5 + 3 * i))


class Slices(ScriptedEngine):
    """Notes (tokens before, tokens) of every row of every commit call."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []

    def commit(self, ids, commit_length, first=0):
        past = self.past_length[first : first + len(ids)]
        self.calls.append([(int(p), int(c)) for p, c in zip(past, commit_length, strict=True)])
        super().commit(ids, commit_length, first)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_prefill_slices_are_counted_from_the_rows_first_token(spec, slots):
    """A row's slices never depend on its neighbours, and no call is larger than a slice."""
    engine = Slices(spec, slots=slots)
    requests = [Request([i] * n, Settings(1)) for i, n in enumerate((43, 12, 40, 3, 32))]
    decode_all(engine, requests, defaults=DecodeDefaults(prefill_blocks=2))
    seen = sorted(row for call in engine.calls for row in call)
    assert seen == sorted([(0, 16), (16, 16), (32, 8)] * 2 + [(0, 8)] + [(0, 16), (16, 16)])
    assert all(sum(count for _, count in call) <= 16 for call in engine.calls)


def test_a_long_prompt_stalls_nobody(spec):
    """Between two passes of a row that decodes, one slice of prompts is committed at most."""
    engine = Slices(spec, slots=3)
    happened = []
    passes, commits = engine.denoise, engine.commit
    engine.denoise = lambda *a: (happened.append("pass"), passes(*a))[1]
    engine.commit = lambda ids, n, first: (happened.append("commit"), commits(ids, n, first))[1]
    requests = [Request([1], Settings(7)), Request([2] * 400, Settings(1)), Request([3] * 16)]
    decode_all(engine, requests, defaults=DecodeDefaults(prefill_blocks=1))
    begun = happened.index("pass")
    assert "pass" in happened[begun + 1 :]
    first = "".join("p" if word == "pass" else "c" for word in happened)[:16]
    assert "cc" not in first
    assert [call[0][0] for call in engine.calls[:4]] == [0, 0, 8, 8]  # long and short take turns


def test_ctrl_c_keeps_finished_blocks(spec):
    """The answer so far comes back with the reason; requests not begun are cancelled too."""
    engine = ScriptedEngine(spec, slots=1)
    engine.fail_at = 11
    requests = [Request([], Settings(max_new_tokens=n)) for n in (32, 4)]
    stream = Stream(engine, requests)
    events = list(stream)
    assert [event.finish_reason for event in events] == [None, "cancelled", "cancelled"]
    assert stream.results[0].token_ids == tuple(range(8))
    assert stream.results[1].token_ids == ()
    assert {result.finish_reason for result in stream.results} == {"cancelled"}
    engine.fail_at = None
    assert decode(engine, max_new_tokens=3).token_ids == (0, 1, 2)


def test_closing_a_stream_keeps_finished_blocks(engine):
    """A reader that goes away ends its requests, and the next one can begin."""
    with Stream(engine, [Request([], Settings(max_new_tokens=99))]) as stream:
        next(stream)
        with pytest.raises(UsageError, match="once the stream has ended"):
            _ = stream.results
    assert stream.results[0].token_ids == tuple(range(8))
    assert decode(engine, max_new_tokens=3).token_ids == (0, 1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_end_that_row_alone(spec, bad):
    """NaN in one row is an error of that row, with its finished blocks; the others go on."""

    def table(history, ids):
        out = one_hot(spec, (len(history) + np.arange(8)) % 30)
        if history[:1] == [5] and len(history) >= 16:
            out[3, 4] = bad
        return out

    requests = [Request([5] * 8, Settings(max_new_tokens=20)), Request([6], Settings(30))]
    results = decode_all(ScriptedEngine(spec, table), requests)
    assert results[0].finish_reason == "error"
    assert "not finite in block 1" in results[0].error
    assert results[0].token_ids == tuple(range(8, 16))
    assert (results[1].finish_reason, len(results[1].token_ids)) == ("length", 30)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_do_not_count_may_be_anything(spec, bad):
    """Mask and padded rows are taken out before anything is looked at."""

    def table(history, ids):
        out = one_hot(spec, (len(history) + np.arange(8)) % 30)
        out[:, MASK] = bad
        out[:, VOCAB:] = bad
        return out

    assert decode(ScriptedEngine(spec, table), max_new_tokens=9).token_ids == tuple(range(9))


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([1, 37], {}, "id 37 at place 1 is outside the vocabulary 0..36"),
        ([-1], {}, "id -1 at place 0 is outside"),
        ([MASK], {}, "is the mask"),
        ([1.5], {}, "flat list of whole numbers"),
        ([[1]], {}, "flat list of whole numbers"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more; got 0"),
        ([1], {"max_new_tokens": -3}, "1 or more; got -3"),
        ([1], {"max_new_tokens": 2.5}, "1 or more; got 2.5"),
        ([1], {"min_new_tokens": -1}, "min_new_tokens"),
        ([1], {"min_new_tokens": 5, "max_new_tokens": 4}, "must not exceed max_new_tokens 4"),
        ([1], {"steps": 0}, "steps must be a whole number, 1 or more; got 0"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"seed": 2**64}, "below 2"),
        ([1], {"stop_ids": (40,)}, "stop ids: id 40"),
        ([1], {"stop_ids": (MASK,)}, "stop ids: id 36 at place 0 is the mask"),
    ],
)
def test_wrong_requests_are_refused_in_one_sentence(engine, prompt, settings, message):
    """Before any pass, saying what was given."""
    with pytest.raises(UsageError, match=message):
        decode(engine, prompt, **settings)
    assert engine.denoised == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "causal", "mask_id": None}, "autoregressive"),
        ({"objective": "full", "mask_id": None}, "no mask id"),
    ],
)
def test_models_without_block_decoding_are_refused(changes, message):
    """With the reason, before any pass."""
    with pytest.raises(UsageError, match=message):
        decode(ScriptedEngine(small_spec(**changes)), [1])


def test_commit_inside_a_block_needs_a_causal_commit(spec):
    """Elsewhere a prefix commit would see what is not there yet."""
    ids = np.ones((1, 8), np.int64)
    ScriptedEngine(spec).commit(ids, np.array([5]))
    layers = (type(spec.layers[0])("mamba2", spec.layers[0].sizes, direction="block"),)
    ahead = ScriptedEngine(small_spec(layers=layers))
    with pytest.raises(UsageError, match="ends inside a block of 8"):
        ahead.commit(ids, np.array([5]))
    assert ahead.commits == 0


def test_one_stream_at_a_time(engine):
    """A second one in the same thread would wait for itself for ever."""
    lock_holder = Stream(engine, [Request([], Settings(99))])
    next(lock_holder)
    second = Stream(engine, [Request([], Settings(9))], lock=lock_holder._lock)
    with pytest.raises(UsageError, match="another stream"):
        next(second)
    lock_holder.close()
    assert len(list(Stream(engine, [Request([], Settings(9))], lock=lock_holder._lock))) == 2
