"""Comparison of named arrays (cases VE)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fixedstate.errors import ParityError
from fixedstate.ports import Port
from fixedstate.runtime.compare import (
    TOLERANCES,
    Tolerance,
    compare,
    difference,
    draw_inputs,
    spread_difference,
)

FP32 = Tolerance.of("fp32")
RNG = np.random.default_rng(0)
FINE = RNG.standard_normal((3, 64)).astype(np.float32)
NAN = np.full_like(FINE, np.nan)


@pytest.mark.parametrize(
    ("reference", "candidate", "problem"),
    [
        (FINE, NAN, "the candidate holds NaN"),
        (NAN, FINE, "the reference itself is invalid"),
        (NAN, NAN, "the reference itself is invalid"),
        (FINE, np.where(FINE[1, 5] == FINE, np.inf, FINE), "the candidate holds NaN or infinity"),
        (np.full_like(FINE, np.inf), np.full_like(FINE, np.inf), "the reference itself is invalid"),
    ],
    ids=["candidate", "reference", "both", "one-inf", "both-inf"],
)
def test_VE_01_nan_never_passes(reference, candidate, problem):
    """Comparisons with NaN are never true, so a check on `>` would let it pass."""
    result = compare({"logits": reference}, {"logits": candidate}, FP32)
    assert not result.passed
    with pytest.raises(ParityError, match=problem):
        result.require()
    json.dumps(result.to_dict(), allow_nan=False)


def test_VE_02_all_zero_outputs_pass():
    """0/0 is no error."""
    zero = np.zeros((2, 3), np.float32)
    result = compare({"a": zero}, {"a": zero}, FP32).require()
    assert (result.worst.max_abs, result.worst.max_rel) == (0, 0)
    assert not compare({"a": zero}, {"a": zero + 0.01}, FP32).passed


def test_VE_02_inputs_respect_dtype_and_range():
    """Ids are tokens, lengths are lengths, state is float of the port's dtype."""
    ports = (
        Port("input_ids", "int64", ("B", "8n")),
        Port("past_key_000", "float16", ("B", 1, "C", 2)),
        Port("past_q_000", "int8", ("B", 500)),
        Port("past_length", "int64", ("B",)),
        Port("commit_length", "int64", ("B",)),
    )
    drawn = draw_inputs(
        ports, RNG, vocab=5, past_length=[3, 4], commit_length=[8, 0], B=2, n=100, C=16
    )
    assert drawn["input_ids"].shape == (2, 800)
    assert sorted(set(drawn["input_ids"].flat)) == [0, 1, 2, 3, 4]
    assert drawn["past_key_000"].dtype == np.float16
    assert np.isfinite(drawn["past_key_000"]).all()
    assert drawn["past_q_000"].dtype == np.int8
    assert drawn["past_length"].tolist() == [3, 4]
    assert list(drawn) == [port.name for port in ports]


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_VE_04_a_scaled_output_fails(precision, size):
    """Cosine similarity is 1 for it; absolute and relative error are not."""
    tolerance = Tolerance.of(precision)
    if precision != "fp32" and size < 1:
        size = 1e-2
    scaled = {"y": FINE * np.float32(1.87 * size)}
    assert not compare({"y": FINE * np.float32(size)}, scaled, tolerance).passed


@pytest.mark.parametrize(("precision", "noise"), [("fp32", 5e-5), ("fp16", 1e-2), ("bf16", 5e-2)])
def test_VE_05_tolerance_is_per_precision_and_reported(precision, noise):
    """What passes at one precision does not at a finer one; the report says what was allowed."""
    candidate = {"y": FINE + np.float32(noise)}
    result = compare({"y": FINE}, candidate, Tolerance.of(precision), labels=("torch", "ort cpu"))
    assert result.passed
    report = result.to_dict()
    assert report["tolerance"]["precision"] == precision
    assert report["tolerance"]["overridden"] is False
    assert report["tolerance"]["reason"]
    assert (report["reference"], report["candidate"]) == ("torch", "ort cpu")
    assert report["ports"][0]["max_abs"] == pytest.approx(noise, rel=1e-2)
    finer = {"fp16": "fp32", "bf16": "fp16"}.get(precision)
    assert finer is None or not compare({"y": FINE}, candidate, Tolerance.of(finer)).passed


def test_VE_05_an_override_is_recorded():
    """Other numbers are possible, never in silence."""
    tolerance = Tolerance.of("fp32", absolute=1e-2, relative=1e-1)
    report = compare({"y": FINE}, {"y": FINE + 5e-3}, tolerance).to_dict()
    assert report["passed"]
    assert report["tolerance"]["overridden"] is True
    assert "the default" in report["tolerance"]["reason"]
    with pytest.raises(ParityError, match="no tolerance for precision 'fp8'"):
        Tolerance.of("fp8")


def test_the_worst_port_is_named():
    """Of several, the one to look at first."""
    reference = dict.fromkeys("abc", FINE)
    found = {"a": FINE, "b": FINE + 0.5, "c": FINE + 0.1}
    result = compare(reference, found, FP32)
    assert result.worst.name == "b"
    with pytest.raises(ParityError, match=r"candidate differs from reference: b: differs by 0.5"):
        result.require()


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({}, "missing in the candidate"),
        ({"y": FINE, "z": FINE}, "missing in the reference"),
        ({"y": FINE[:2]}, r"shape \[2, 64\] is not the reference's \[3, 64\]"),
    ],
)
def test_ports_must_be_the_same(found, problem):
    """A port that one side lacks was not compared, which is no pass."""
    with pytest.raises(ParityError, match=problem):
        compare({"y": FINE}, found, FP32).require()


def test_nothing_compared_is_no_pass():
    """An empty list of ports proves nothing."""
    assert not compare({}, {}, FP32).passed


@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_VE_02_anything_but_rounding_noise_differs_from_zeros(precision):
    """They have no spread to take a share of: half precision must not let any number pass."""
    tolerance, zeros = Tolerance.of(precision), np.zeros((2, 3), np.float32)
    for size, passed in ((0.0, True), (0.9 * tolerance.floor, True), (0.5, False), (1e4, False)):
        given = zeros.copy()
        given[1, 1] = size
        found, spread = spread_difference("port", zeros, given, tolerance)
        assert found.passed is passed
        assert difference("port", zeros, given, tolerance).passed is passed
        assert compare({"port": zeros}, {"port": given}, tolerance).passed is passed
        assert (spread.peak_rel == 0.0) is (size == 0.0)
        assert found.to_dict()["max_rel"] == (0.0 if size == 0.0 else None)
