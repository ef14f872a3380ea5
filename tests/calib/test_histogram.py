"""Histograms depend on the values alone: order, batches, merges and files leave no trace."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixedstate.calib.histogram import BINS, Histogram
from fixedstate.errors import CalibrationError

VALUES = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), max_size=60
)


def of(values: list[float], cuts: list[int] | None = None, bins: int = BINS) -> Histogram:
    """The histogram of values that came in pieces."""
    made = Histogram(bins)
    edges = [0, *sorted(cut % (len(values) + 1) for cut in cuts or []), len(values)]
    for start, end in pairwise(edges):
        made.add(np.array(values[start:end], np.float32))
    return made


@given(VALUES, st.lists(st.integers(0, 60), max_size=5), st.randoms())
def test_order_and_pieces_leave_no_trace(values, cuts, random):
    whole = of(values)
    assert of(values, cuts) == whole
    mixed = list(values)
    random.shuffle(mixed)
    assert of(mixed, cuts) == whole


@given(VALUES, VALUES)
def test_a_merge_is_the_histogram_of_both(one, two):
    merged = of(one)
    merged.merge(of(two))
    assert merged == of([*one, *two])
    assert merged.seen == len(one) + len(two)


@given(VALUES)
def test_a_file_gives_it_back(values):
    made = of(values)
    assert Histogram.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@given(VALUES)
def test_counts_are_those_of_numpy(values):
    made = of(values, bins=16)
    magnitudes = np.abs(np.array(values, np.float64))
    assert made.amax == magnitudes.max(initial=0.0)
    if made.exponent is not None:
        assert magnitudes.max() < made.range
        expected, _ = np.histogram(magnitudes, 16, (0.0, made.range))
        assert made.counts.tolist() == expected.tolist()


def test_a_power_of_two_is_counted_alike_before_and_after_growth():
    """With a range that ends at the largest value it would be pushed into the bin below."""
    assert of([1.0, 2.0]) == of([2.0, 1.0])
    assert of([1.0]).range == 2.0


def test_an_outlier_in_the_first_batch_stays():
    """ONNX Runtime's calibrator drops it once its buffer is full."""
    made = Histogram()
    made.add(np.array([100.0], np.float32))
    for seed in range(50):
        made.add(np.random.default_rng(seed).standard_normal(1000).astype(np.float32))
    assert made.amax == made.high == 100.0
    assert made.counts[int(100 / made.width)] == 1
    assert made.percentile(1.0) == 100.0
    assert made.percentile(0.999) < 6.0
    assert made.clipped(50.0) == pytest.approx(1 / 50_001)


def test_values_that_are_none_are_counted_apart():
    made = Histogram()
    made.add(np.array([np.nan, np.inf, -np.inf, 1.0, -3.0]))
    assert (made.nonfinite, made.seen, made.amax, made.low, made.high) == (3, 2, 3.0, -3.0, 1.0)


def test_zeros_alone_have_no_range():
    made = Histogram()
    made.add(np.zeros((3, 4), np.float32))
    assert (made.range, made.amax, made.seen, int(made.counts[0])) == (0.0, 0.0, 12, 12)
    made.add(np.array([0.5], np.float32))
    assert int(made.counts[0]) == 12
    assert made.seen == 13


@pytest.mark.parametrize("key", ["counts", "amax", "seen", "exponent"])
def test_a_changed_file_is_refused(key):
    data = of([1.0, 2.0, 3.0]).to_dict()
    data[key] = {"counts": of([1.0]).to_dict()["counts"], "amax": 2.5, "seen": 4, "exponent": 1}[
        key
    ]
    with pytest.raises(CalibrationError) as caught:
        Histogram.from_dict(data)
    assert caught.value.code == "DAMAGED"


@pytest.mark.parametrize("bins", [0, 1, 3, 2047])
def test_bins_are_a_power_of_two(bins):
    with pytest.raises(ValueError, match="power of two"):
        Histogram(bins)
