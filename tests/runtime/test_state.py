"""State across blocks, rows and requests, on real graphs (cases ST-07, ST-08, CB)."""

from __future__ import annotations

import numpy as np
import pytest

from fixedstate.errors import UsageError
from fixedstate.runtime.decoder import Decoder
from fixedstate.runtime.requests import Request, Settings

FREE = {"stop_ids": ()}


def prompt(spec, length, seed=0):
    ids = np.random.default_rng(seed).integers(0, spec.vocab_size, length)
    return np.where(ids == spec.mask_id, 0, ids).tolist()


def texts(decoder, *requests):
    return [result.token_ids for result in decoder.generate(requests)]


@pytest.fixture
def decoder(tiny, tiny_engine):
    return Decoder(tiny, tiny_engine)


def test_ST_07_state_moves_once_per_block(tiny, tiny_engine, decoder):
    """After a block it is that of one clean pass over the final tokens, whatever was tried."""
    spec, length = tiny.spec, tiny.spec.block_len
    given = prompt(spec, length + 3)
    for steps in (1, 4):
        # the last block of an answer is not committed: one token more keeps the row in slot 0
        states = []
        result = decoder.generate(
            [Request(given, Settings(3 * length - 2, steps=steps, **FREE))],
            on_pass=lambda event, s=states: s.append((event.past_lengths[0], tiny_engine.read(0))),
        )[0]
        whole = np.array(given + list(result.token_ids))
        for past, state in states:
            tiny_engine.reset(1)
            tiny_engine.reset(0)
            for first in range(0, past, length):
                tiny_engine.commit(whole[None, first : first + length], np.array([length]))
            clean = tiny_engine.read(0)
            for name in clean:
                np.testing.assert_allclose(state[name], clean[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("half_way", [False, True])
def test_ST_08_a_request_does_not_change_the_next(tiny, decoder, half_way):
    """A, B, A: the first and third answers are the same, after a failed one too."""
    spec = tiny.spec
    a = Request(prompt(spec, 3 * spec.block_len + 5, 1), Settings(20, **FREE))
    b = Request(prompt(spec, 50, 2), Settings(45, temperature=1.0, seed=3, **FREE))
    first = texts(decoder, a)
    if half_way:
        calls = []

        def stop(event):
            calls.append(event)
            if len(calls) == 5:
                raise KeyboardInterrupt

        assert decoder.generate([b, b], on_pass=stop)[0].finish_reason == "cancelled"
    else:
        decoder.generate([b])
    assert texts(decoder, a) == first


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_CB_01_a_batch_equals_its_rows_alone(tiny, decoder, rows):
    """Positions of rows are never mixed, in denoise, commit and the cache."""
    spec = tiny.spec
    requests = [
        Request(
            prompt(spec, 7 + 13 * row, row),
            Settings(30 + row, temperature=0.7, seed=row, threshold=0.5, **FREE),
        )
        for row in range(rows)
    ]
    alone = [texts(decoder, request)[0] for request in requests]
    assert texts(decoder, *requests) == alone
    assert texts(decoder, *reversed(requests)) == alone[::-1]


def test_CB_02_the_cache_is_exact(tiny, tiny_engine):
    """Three blocks with a cache and without: the same logits and the same tokens."""
    spec, length = tiny.spec, tiny.spec.block_len
    ids = np.array(prompt(spec, 3 * length))[None]
    canvas = np.full((1, length), spec.mask_id)
    for blocks in range(4):
        tiny_engine.reset(0)
        for block in range(blocks):
            piece = ids[:, block * length : (block + 1) * length]
            tiny_engine.commit(piece, np.array([length]))
        cached = tiny_engine.denoise(canvas).copy()
        tiny_engine.reset(0)
        if blocks:
            tiny_engine.commit(ids[:, : blocks * length], np.array([blocks * length]))
        again = tiny_engine.denoise(canvas)
        np.testing.assert_allclose(again, cached, atol=1e-5)
        assert (again.argmax(-1) == cached.argmax(-1)).all()


@pytest.mark.parametrize("pad", [0, 1, 36])
def test_CB_05_pads_are_never_seen(tiny, tiny_engine, pad):
    """Behind a row's commit_length any id may stand."""
    spec, length = tiny.spec, tiny.spec.block_len
    ids = np.array([prompt(spec, 3 * length, row) for row in range(2)])
    lengths = np.array([length, 3 * length])
    found = []
    for filler in (5, pad):
        tiny_engine.reset(0)
        tiny_engine.reset(1)
        padded = ids.copy()
        padded[0, length:] = filler
        tiny_engine.commit(padded, lengths)
        logits = tiny_engine.denoise(ids[:, :length]).copy()
        found.append({"logits": logits, **tiny_engine.read(0)})
    for name, array in found[0].items():
        assert array.tobytes() == found[1][name].tobytes(), name


def test_CB_07_rows_with_nothing_to_attend_to_are_finite(tiny, tiny_engine):
    """Block 0 with an empty past, a row that commits nothing, garbage behind past_length."""
    spec, length = tiny.spec, tiny.spec.block_len
    rng = np.random.default_rng(0)
    for row in range(2):
        tiny_engine.reset(row)
        tiny_engine.buffers.scribble(row, rng, behind=True)
    canvas = np.full((2, length), spec.mask_id)
    assert np.isfinite(tiny_engine.denoise(canvas)).all()
    ids = np.array([prompt(spec, 2 * length)] * 2)
    tiny_engine.commit(ids, np.array([0, length]))
    assert tiny_engine.past_length[:2].tolist() == [0, length]
    assert np.isfinite(tiny_engine.denoise(canvas)).all()
    for row in range(2):
        assert all(np.isfinite(array).all() for array in tiny_engine.read(row).values())
    assert all((array == 0).all() for array in tiny_engine.read(0).values())


def test_CB_08_positions_are_committed_tokens(tiny, tiny_engine, decoder):
    """A prompt of one block, then four blocks: they start at L, 2L, 3L, 4L, on every pass."""
    length = tiny.spec.block_len
    seen = []
    decoder.generate(
        [Request(prompt(tiny.spec, length), Settings(4 * length, steps=4, **FREE))],
        on_pass=lambda event: seen.append((event.past_lengths[0], tiny_engine.past_length[0])),
    )
    assert seen == [(n * length, n * length) for n in (1, 2, 3, 4) for _ in range(4)]


def test_state_bytes_do_not_depend_on_the_answer(tiny, decoder):
    """The constant part is one number; keys and values grow by committed tokens."""
    length = tiny.spec.block_len
    short, long = (decoder.generate([Request([], Settings(n * length, **FREE))])[0] for n in (1, 5))
    assert short.state_bytes == long.state_bytes == tiny.state.state_bytes()
    assert short.kv_bytes == 0
    assert long.kv_bytes == 4 * length * tiny.state.kv_bytes_per_token()


def test_seconds_cover_every_phase(tiny, decoder):
    """The phases add up to no more than the total."""
    result = decoder.generate([Request(prompt(tiny.spec, 40), Settings(40, **FREE))])[0]
    parts = {k: v for k, v in result.seconds.items() if k not in ("load", "total")}
    assert set(parts) == {"prefill", "denoise", "policy", "commit"}
    assert all(value > 0 for value in parts.values())
    assert sum(parts.values()) <= result.seconds["total"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, L: e.denoise(np.zeros((5, L), int)), r"shape \[1..4, \d+\]; got \[5, \d+\]"),
        (lambda e, L: e.denoise(np.zeros((1, L + 1), int)), "denoise takes ids of shape"),
        (lambda e, L: e.denoise(np.full((1, L), 10**6)), "id 1000000 is outside the embedding"),
        (lambda e, L: e.denoise(np.full((1, L), -1)), "id -1 is outside the embedding 0..39"),
        (lambda e, L: e.denoise(np.zeros((1, L))), "ids must be whole numbers; got float64"),
        (lambda e, L: e.commit(np.zeros((1, L + 1), int), np.array([1])), "commit takes ids"),
        (lambda e, L: e.commit(np.zeros((1, L), int), np.array([L + 1])), "between 0 and"),
        (lambda e, L: e.commit(np.zeros((1, L), int), np.array([-1])), "between 0 and"),
        (lambda e, L: e.commit(np.zeros((2, L), int), np.array([L])), "2 whole numbers"),
    ],
)
def test_wrong_passes_are_refused(tiny, tiny_engine, call, message):
    """Before anything runs, with the numbers."""
    before = tiny_engine.buffers.hash()
    with pytest.raises(UsageError, match=message):
        call(tiny_engine, tiny.spec.block_len)
    assert tiny_engine.buffers.hash() == before
