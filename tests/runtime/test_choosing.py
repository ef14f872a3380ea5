"""Choosing and locking tokens (cases SE)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scripted import (
    MASK,
    STOP,
    VOCAB,
    ScriptedEngine,
    decode,
    decode_all,
    noise_table,
    one_hot,
)

from fixedstate.errors import UsageError
from fixedstate.runtime.policies import FixedQuota, PassView, Threshold, quota, ranks
from fixedstate.runtime.requests import Request, Settings
from fixedstate.runtime.sampling import Scorer, Scores, draw, uniforms, unit_interval

ALL = np.ones((1, 4), np.bool_)


def score(logits, temperature=0.0, u=None, **options):
    """Scores of one row of four slots over five ids, id 4 being the mask."""
    scorer = Scorer(5, np.asarray(logits).shape[-1], [4])
    u = None if u is None else np.full((1, 4), u)
    array = np.asarray(logits, np.float32)[None]
    return scorer(array, ALL, np.array([temperature]), u, **options)


def flat(confidence):
    """(8, 40) logits whose best token has that confidence over 36 allowed ids."""
    out = np.zeros((8, 40), np.float32)
    out[np.arange(8), np.arange(8)] = np.log(confidence * 35 / (1 - confidence))
    return out


def test_SE_01_mask_is_removed_before_choice_and_confidence(spec):
    """A mask logit of +100 everywhere changes neither the token nor its confidence."""

    def table(history, ids):
        out = flat(0.5)
        out[:, MASK] = 100
        out[:, VOCAB:] = 100
        return out

    result = decode(ScriptedEngine(spec, table), max_new_tokens=16)
    assert result.token_ids == (*range(8), *range(8))
    scores = Scorer(VOCAB, 40, [MASK])(
        table((), ())[None], np.ones((1, 8), np.bool_), np.zeros(1), None
    )
    assert scores.confidence == pytest.approx(0.5)


def test_SE_02_step_cap_fills_the_rest_and_counts_it(spec):
    """Two passes, threshold 0.99, all confidences 0.5: one slot, then seven of which six forced."""
    engine = ScriptedEngine(spec, lambda history, ids: flat(0.5))
    result = decode(engine, max_new_tokens=16, steps=2, threshold=0.99)
    assert result.token_ids == (*range(8), *range(8))
    assert (result.denoise_passes, result.forced_slots) == (4, 12)


def test_SE_02_quota_forces_nothing(spec):
    """Without a threshold there is nothing to fall short of."""
    engine = ScriptedEngine(spec, lambda history, ids: flat(0.5))
    assert decode(engine, max_new_tokens=8, steps=2).forced_slots == 0


@pytest.mark.parametrize("policy", [FixedQuota(4), Threshold(0.5, 4)])
def test_SE_03_rows_without_open_slots_are_skipped(policy):
    """A full row asks for the top 0 values; so do both at once."""
    canvas = np.array([[1, 2, 3, 4], [MASK, MASK, 5, 6]])
    scores = Scores(np.full((2, 4), 9), np.array([[-1.0] * 4, [0.2, 0.9, -1, -1]]), np.ones(2))
    after = policy.reveal(PassView(canvas, MASK, scores, np.array([3, 0]))).canvas
    assert after.tolist() == [[1, 2, 3, 4], [MASK, 9, 5, 6]]
    done = np.array([[1, 2, 3, 4]] * 2)
    assert (
        policy.reveal(PassView(done, MASK, scores, np.array([0, 3]))).canvas.tolist()
        == [[1, 2, 3, 4]] * 2
    )


def test_SE_03_rows_that_finish_at_different_passes(spec):
    """One row is sure of everything, the other of nothing."""

    def table(history, ids):
        return flat(0.99 if history[:1] == [1] else 0.2)

    requests = [Request([token] * 8, Settings(16, threshold=0.9)) for token in (1, 2)]
    sure, unsure = decode_all(ScriptedEngine(spec, table), requests)
    assert (sure.denoise_passes, unsure.denoise_passes) == (2, 16)
    assert sure.token_ids == unsure.token_ids == (*range(8), *range(8))


def test_SE_05_large_scores_and_a_tiny_temperature():
    """Scores of 1e4 and both ends of u give the better token."""
    for pair in ([95, 100], [1e4 - 5, 1e4], [-1e4, -1e4 + 5]):
        logits = [[*pair, -3e4, -3e4, 0]] * 4
        for u in (2.0**-54, 0.5, 1 - 2.0**-53):
            assert score(logits, 1e-9, u).tokens.tolist() == [[1] * 4]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
def test_SE_06_confidence_is_of_the_distribution_chosen_from(temperature):
    """The tempered probability of the token drawn, against float64."""
    logits = np.array([0.3, -1.2, 2.0, 1.9])
    p = np.exp(logits / temperature)
    p /= p.sum()
    for u in (0.001, 0.3, 0.6, 0.999):
        found = score([[*logits, 50]] * 4, temperature, u)
        token = int(np.searchsorted(np.cumsum(p), u))
        assert found.tokens.tolist() == [[token] * 4]
        assert found.confidence == pytest.approx(p[token], rel=1e-6)


def test_SE_06_temperature_0_uses_the_plain_softmax():
    """The golden value of the greedy rule."""
    logits = np.array([0.3, -1.2, 2.0, 1.9])
    p = np.exp(logits) / np.exp(logits).sum()
    assert score([[*logits, 50]] * 4).confidence == pytest.approx(p[2], rel=1e-6)


def test_SE_07_temperature_0_is_argmax(spec):
    """No division, no draw, no seed: plain argmax, which tiny temperatures choose as well."""
    engine = ScriptedEngine(spec, noise_table(spec))
    settings = [{}, {"temperature": 0, "seed": 1}, {"temperature": 0.0, "seed": 2}]
    texts = {decode(engine, max_new_tokens=24, **given).token_ids for given in settings}
    assert len(texts) == 1
    # At 1e-9 every confidence is 1, so only the order of slots differs: fill them in one pass.
    settings = [{"temperature": heat, "seed": 3} for heat in (0.0, 1e-9, 1e-300, 5e-324)]
    texts = {decode(engine, max_new_tokens=24, steps=1, **given).token_ids for given in settings}
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e100, 1.7e308])
def test_SE_07_huge_temperatures_choose_any_token_but_the_mask(temperature):
    """1 / temperature is 0 in float32 there, and 0 times the mask's -inf is no number."""
    for u, token in ((0.001, 0), (0.26, 1), (0.51, 2), (0.999, 3)):
        found = score([[1.0, 90.0, -90.0, 50.0, 99.0]] * 4, temperature, u)
        assert found.finite.all()
        assert (found.tokens == token).all()
        np.testing.assert_allclose(found.confidence, 1 / 4, rtol=1e-6)


@pytest.mark.parametrize("temperature", [-1, -1e-9, float("nan"), float("inf")])
def test_SE_07_wrong_temperatures_are_refused(temperature):
    """A temperature below 0 or not a number has no meaning."""
    with pytest.raises(UsageError, match="temperature must be 0 or more and finite"):
        Settings(temperature=temperature)


def test_SE_08_ties_go_to_the_lowest_position_and_id(spec):
    """All scores equal: id 0, left to right, in each of 20 runs."""
    engine = ScriptedEngine(spec, lambda history, ids: np.zeros((8, 40)))
    orders = set()
    for _ in range(20):
        canvases = []
        result = decode(
            engine, max_new_tokens=8, on_pass=lambda e, c=canvases: c.append(e.canvases[0])
        )
        assert result.token_ids == (0,) * 8
        orders.add(tuple(int((canvas != MASK).sum()) for canvas in canvases))
        for i, canvas in enumerate(canvases):
            assert canvas.tolist() == [0] * (i + 1) + [MASK] * (7 - i)
    assert orders == {tuple(range(1, 9))}
    assert ranks(np.array([[0.5, 0.7, 0.7, 0.5]])).tolist() == [[2, 0, 1, 3]]


def test_SE_09_temperature_acts(spec):
    """Flat scores: fifty seeds give more than one text."""
    engine = ScriptedEngine(spec, lambda history, ids: np.zeros((8, 40)))
    texts = {
        decode(engine, max_new_tokens=8, temperature=1.0, seed=seed).token_ids for seed in range(50)
    }
    assert len(texts) > 40  # some stop at once
    assert all(token < VOCAB and token != MASK for text in texts for token in text)


def test_SE_11_same_seed_same_text(spec):
    """Other draws in between come from other sources and change nothing."""
    engine = ScriptedEngine(spec, noise_table(spec))
    first = decode(engine, [4] * 5, max_new_tokens=24, temperature=1.5, seed=7)
    np.random.default_rng().standard_normal(5)
    np.random.seed(random.randrange(99))  # noqa: NPY002 - the global source is the point
    np.random.rand(3)  # noqa: NPY002
    again = decode(engine, [4] * 5, max_new_tokens=24, temperature=1.5, seed=7)
    assert first.token_ids == again.token_ids
    other = decode(engine, [4] * 5, max_new_tokens=24, temperature=1.5, seed=8)
    assert other.token_ids != first.token_ids


@pytest.mark.parametrize("settings", [{}, {"threshold": 0.3}, {"temperature": 1.0}, {"steps": 3}])
def test_SE_14_filled_slots_never_change(spec, settings):
    """The best token of a filled slot is another one in each pass."""
    engine = ScriptedEngine(spec, noise_table(spec))
    canvases = []
    decode(
        engine,
        [1, 2, 3],
        max_new_tokens=29,
        stop_ids=(),
        on_pass=lambda e: canvases.append((e.blocks[0], e.canvases[0])),
        **settings,
    )
    assert (canvases[0][1][:3] == [1, 2, 3]).all()
    for (block, before), (after_block, after) in itertools.pairwise(canvases):
        if block == after_block:
            filled = before != MASK
            assert (before[filled] == after[filled]).all()


@pytest.mark.parametrize(("threshold", "passes"), [(0.0, 1), (0.1, 1), (0.5, 8), (1.0, 8)])
def test_SE_16_at_least_the_best_slot_is_filled(spec, threshold, passes):
    """Confidence 0.2: above it every pass fills one slot."""
    engine = ScriptedEngine(spec, lambda history, ids: flat(0.2))
    result = decode(engine, max_new_tokens=8, threshold=threshold)
    assert result.denoise_passes == passes
    assert (result.token_ids, result.forced_slots) == (tuple(range(8)), 0)


@pytest.mark.parametrize("threshold", [1.1, -0.1, float("nan"), float("inf")])
def test_SE_16_thresholds_outside_the_unit_interval_are_refused(threshold):
    """A confidence is a probability."""
    for make in (lambda: Settings(threshold=threshold), lambda: Threshold(threshold, 8)):
        with pytest.raises(UsageError, match="threshold must be between 0 and 1"):
            make()


def test_threshold_needs_the_surest_slot_first(spec):
    """Fast-dLLM's rule: rank one always, the others by the threshold alone."""
    confidence = np.array([[0.3, 0.95, 0.9, 0.89, -1.0]])
    canvas = np.array([[MASK, MASK, MASK, MASK, 7]])
    scores = Scores(np.full((1, 5), 1), confidence, np.ones(1))
    after = Threshold(0.9, 8).reveal(PassView(canvas, MASK, scores, np.array([0])))
    assert after.canvas.tolist() == [[MASK, 1, 1, MASK, 7]]
    last = Threshold(0.9, 8).reveal(PassView(canvas, MASK, scores, np.array([7])))
    assert last.canvas.tolist() == [[1, 1, 1, 1, 7]]
    assert last.forced.tolist() == [2]


@pytest.mark.parametrize("slots", [0, 1, 5, 8, 32])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 40])
def test_quota_is_base_plus_one_in_the_first_passes(slots, steps):
    """n // S per pass, one more in the first n % S."""
    base, more = divmod(slots, steps)
    left, found = slots, []
    for step in range(steps):
        found.append(int(quota(np.array([left]), np.array([steps - step]))[0]))
        left -= found[-1]
    assert found == [base + (step < more) for step in range(steps)]


def test_philox_counters():
    """Golden values: a seed's text must not change with a version of anything."""
    u, v = uniforms(seed=7, past_length=16, step=3, length=2)
    assert u.tolist() == [0.13131026021540282, 0.5673362872702205]
    assert v.tolist() == [0.2174651066582497, 0.6481067050785272]
    whole = np.random.Philox(key=7, counter=[0, 0, 16, 3]).random_raw(4)
    assert np.concatenate([u, v]).tolist() == ((whole >> np.uint64(11)) * 2.0**-53).tolist()
    other = {
        tuple(uniforms(*key, length=2)[0])
        for key in ((8, 16, 3), (7, 17, 3), (7, 16, 4), (7, 3, 16), (2**64 - 1, 16, 3))
    }
    assert len(other) == 5
    assert tuple(u) not in other


def test_unit_interval_holds_neither_0_nor_1():
    """The inverse of a distribution function needs an open interval."""
    found = unit_interval(np.array([0, 1, 2**11, 2**64 - 1], np.uint64))
    assert found.tolist() == [2.0**-54, 2.0**-54, 2.0**-53, 1 - 2.0**-53]


@pytest.mark.parametrize(
    ("weights", "u", "index"),
    [
        ([0, 0, 1, 0], 2.0**-54, 2),
        ([0, 0, 1, 0], 1 - 2.0**-53, 2),
        ([1, 1, 1, 0], 1 - 2.0**-53, 2),
        ([0, 1, 1, 1], 2.0**-54, 1),
        ([0.25, 0.75], 0.25, 1),
        ([0.25, 0.75], 0.2499, 0),
        ([2e-38, 2e-38], 0.75, 1),  # about the smallest normal float32
    ],
)
def test_draw_never_takes_what_has_no_weight(weights, u, index):
    """Near 0 and near 1 rounding could pick an index of probability 0."""
    found, share = draw(np.array(weights, np.float32), u)
    assert found == index
    assert share == pytest.approx(weights[index] / sum(weights))


def test_draw_frequencies():
    """The inverse of the cumulative weights draws each index as often as it weighs."""
    weights = np.array([1, 0, 2, 5], np.float32)
    grid = (np.arange(8000) + 0.5) / 8000
    counts = np.bincount([draw(weights, u)[0] for u in grid], minlength=4)
    assert counts.tolist() == [1000, 0, 2000, 5000]


def test_banned_ids_are_out_before_choice_and_confidence():
    """A stop id that must not stand here does not lower the others' confidence."""
    logits = [[1.0, 1.0, 90.0, 1.0, 99.0]] * 4
    banned = [(np.array([True, False, True, False]), (2,))]
    found = score(logits, banned=banned)
    assert found.tokens.tolist() == [[0, 2, 0, 2]]
    assert found.confidence[0, [0, 2]] == pytest.approx(1 / 3)


def test_stop_ids_in_the_middle_of_min_new_tokens(spec):
    """The minimum counts new tokens, whatever the remainder of the prompt."""
    engine = ScriptedEngine(spec, lambda history, ids: one_hot(spec, [STOP] * 8))
    for prompt_len in range(9):
        result = decode(engine, [1] * prompt_len, max_new_tokens=20, min_new_tokens=4)
        assert result.token_ids.index(STOP) == 4


def test_logits_are_not_written(spec):
    """A back end may hand out memory that it still needs."""
    logits = np.random.default_rng(0).standard_normal((2, 8, 40)).astype(np.float32)
    logits.flags.writeable = False
    before = logits.copy()
    Scorer(VOCAB, 40, [MASK])(
        logits, np.ones((2, 8), np.bool_), np.array([0.0, 1.0]), np.full((2, 8), 0.5)
    )
    assert (logits == before).all()
