"""The search is exact: no choice of formats is better, by trying all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixedstate.calib.formats import FLOAT
from fixedstate.calib.search import Choice, Option, choose, expected
from fixedstate.errors import CalibrationError

NAMES = (FLOAT, "int8", "int4:32")


@st.composite
def options(draw: st.DrawFn) -> dict[str, dict[str, Option]]:
    found = {}
    for site in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 1000)) * 1000
        kl = draw(st.floats(0, 1e-3, allow_subnormal=False))
        found[f"w{site}"] = {
            FLOAT: Option(4 * size, 0.0),
            "int8": Option(size, kl),
            "int4:32": Option(size // 2, kl * draw(st.floats(0.5, 100, allow_subnormal=False))),
        }
    return found


def everything(given: dict[str, dict[str, Option]]) -> list[Choice]:
    return [
        expected(given, dict(zip(given, names, strict=True)))
        for names in itertools.product(NAMES, repeat=len(given))
    ]


@given(options(), st.floats(1e-6, 1e-2, allow_subnormal=False))
def test_no_choice_within_the_divergence_has_fewer_bytes(given, bound):
    found = choose(given, max_kl=bound)
    assert found == expected(given, found.formats)
    assert found.kl <= bound * (1 + 1e-6)
    best = min(one.nbytes for one in everything(given) if one.kl <= bound * (1 - 1e-6))
    assert found.nbytes <= best


@given(options(), st.floats(0.126, 1.0, allow_subnormal=False))
def test_no_choice_within_the_bytes_is_nearer(given, share):
    bound = int(share * sum(one[FLOAT].nbytes for one in given.values()))
    found = choose(given, max_bytes=bound)
    assert found.nbytes <= bound
    best = min(one.kl for one in everything(given) if one.nbytes <= bound)
    assert found.kl <= best + 1e-6 * max(
        option.kl for one in given.values() for option in one.values()
    )


def test_a_bound_that_nothing_meets_is_refused_with_the_least_there_is():
    given = {"w": {"int8": Option(100, 0.5), "int4:32": Option(50, 2.0)}}
    with pytest.raises(
        CalibrationError, match=r"within 0\.1: the least there is takes 0\.5 nats"
    ) as caught:
        choose(given, max_kl=0.1)
    assert caught.value.code == "INFEASIBLE"
    with pytest.raises(CalibrationError, match="takes 50 bytes"):
        choose(given, max_bytes=10)


def test_a_divergence_below_zero_is_rounding():
    given = {"w": {"int8": Option(100, -1e-9), FLOAT: Option(400, 0.0)}}
    assert choose(given, max_kl=0.0).formats == {"w": "int8"}


def test_one_bound_has_to_be_given():
    for bounds in ({}, {"max_kl": 1.0, "max_bytes": 1}):
        with pytest.raises(ValueError, match="one of them"):
            choose({"w": {FLOAT: Option(1, 0.0)}}, **bounds)
