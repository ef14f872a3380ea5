"""Laws of the decode loop over random models, prompts and settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import MASK, STOP, VOCAB, ScriptedEngine, decode, decode_all, noise_table, small_spec

from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import Request, Settings

SPEC = small_spec(block_len=4)

settings = st.builds(
    Settings,
    max_new_tokens=st.integers(1, 14),
    steps=st.none() | st.integers(1, 6),
    threshold=st.none() | st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    temperature=st.sampled_from([None, 0.0, 0.5, 2.0]),
    seed=st.integers(0, 2**64 - 1),
)
prompts = st.lists(st.integers(0, STOP), max_size=11)
requests = st.builds(Request, prompts, settings)


def engine(slots=3, gain=3.0, fuses=False):
    return ScriptedEngine(SPEC, noise_table(SPEC, gain), slots=slots, fuses=fuses)


@given(st.lists(requests, min_size=1, max_size=7), st.integers(1, 5), st.booleans())
def test_rows_are_independent(batch, slots, fuses):
    """A row's tokens, passes and reasons are those it has alone, whoever its neighbours are."""
    together = decode_all(engine(slots, fuses=fuses), batch)
    for request, result in zip(batch, together, strict=True):
        alone = decode_all(engine(1), [request])[0]
        for name in ("token_ids", "finish_reason", "blocks", "denoise_passes", "forced_slots"):
            assert getattr(alone, name) == getattr(result, name), name


@given(st.lists(requests, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_order_of_requests_does_not_matter(batch, rng):
    """Any order of rows gives the same texts."""
    order = list(range(len(batch)))
    rng.shuffle(order)
    straight = decode_all(engine(), batch)
    shuffled = decode_all(engine(), [batch[i] for i in order])
    assert [straight[i].token_ids for i in order] == [result.token_ids for result in shuffled]


@given(requests, st.sampled_from([0.0, 1.0, 5.0]))
def test_every_pass_makes_progress_and_ends_in_time(request_, gain):
    """At least one slot per pass, at most S passes per block, never the mask, never too much."""
    seen = []
    stream = Stream(
        engine(1, gain),
        [request_],
        on_pass=lambda e: seen.append((e.blocks[0], e.steps[0], (e.canvases[0] == MASK).sum())),
    )
    events = list(stream)
    result = stream.results[0]
    steps = request_.settings.steps or SPEC.block_len
    previous = {0: SPEC.block_len - len(request_.prompt_ids) % SPEC.block_len}
    for block, step, left in seen:
        assert step < steps
        assert left < previous.get(block, SPEC.block_len)
        previous[block] = left
    assert result.denoise_passes == len(seen)
    assert 1 <= len(result.token_ids) <= request_.settings.max_new_tokens
    assert all(0 <= token < VOCAB and token != MASK for token in result.token_ids)
    assert [t for event in events for t in event.token_ids] == list(result.token_ids)
    assert (result.finish_reason == "stop") == (result.token_ids[-1] == STOP)
    assert STOP not in result.token_ids[:-1]


@given(requests)
def test_the_same_request_gives_the_same_text(request_):
    """On one engine, again and again, and on another one."""
    one = engine(1)
    texts = [decode_all(e, [request_])[0].token_ids for e in (one, one, engine(2))]
    assert texts[0] == texts[1] == texts[2]


@given(prompts, st.integers(0, 2**64 - 1), st.integers(1, 3))
def test_a_seed_belongs_to_its_row(prompt, seed, blocks):
    """More new tokens continue the same text: the draws depend on row, place and pass alone."""
    short = decode(engine(), prompt, max_new_tokens=4 * blocks, temperature=1.0, seed=seed)
    long = decode(engine(), prompt, max_new_tokens=4 * blocks + 9, temperature=1.0, seed=seed)
    assert long.token_ids[: len(short.token_ids)] == short.token_ids


@given(st.lists(requests, min_size=1, max_size=4))
def test_positions_are_committed_tokens(batch):
    """Every pass of a block starts where the row's committed tokens end."""
    e = engine(4)
    decode_all(e, batch)
    for call in e.log:
        for past, _ in call:
            assert past % SPEC.block_len == 0
    lengths = [len(request.prompt_ids) // SPEC.block_len * SPEC.block_len for request in batch]
    assert set(lengths) <= {past for call in e.log for past, _ in call}


@pytest.mark.parametrize("fuses", [False, True])
def test_a_waiting_request_takes_a_free_slot_at_once(fuses):
    """No row waits for the slowest one: with two slots, 16 passes serve 7 blocks."""
    e = ScriptedEngine(SPEC, noise_table(SPEC, 0.0), slots=2, fuses=fuses)
    sizes = (4, 16, 4, 4)
    results = decode_all(e, [Request([], Settings(size, stop_ids=())) for size in sizes])
    assert [len(result.token_ids) for result in results] == list(sizes)
    assert [result.denoise_passes for result in results] == [4, 16, 4, 4]
    rows = [len(call) for call in e.log]
    assert sum(rows) == 28
    if not fuses:
        assert rows == [2] * 12 + [1] * 4
    assert e.fused == (3 if fuses else 0)
