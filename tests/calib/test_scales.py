"""One static scale per activation: what is clipped, and that no scale comes out of nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from fixedstate.calib.formats import FP8, INT8, rounded
from fixedstate.calib.histogram import Histogram
from fixedstate.calib.scales import input_scales, limit_of
from fixedstate.calib.table import COMMIT, Policy, Table
from fixedstate.errors import CalibrationError


def seen(values: np.ndarray) -> Histogram:
    made = Histogram()
    made.add(values)
    return made


def squared(values: np.ndarray, limit: float) -> float:
    off = rounded(values, limit / 127, INT8).astype(np.float64) - values
    return float((off**2).sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_has_the_least_squared_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(2 + seed, 20_000).astype(np.float32)
    limit = limit_of(seen(values), INT8)
    found = squared(values, limit)
    best = min(squared(values, np.abs(values).max() * share) for share in np.linspace(0.01, 1, 100))
    assert found <= 1.02 * best
    assert found <= squared(values, np.abs(values).max())
    # the three ways give three scales: entropy's default, which equals the maximum, is no way
    assert limit < limit_of(seen(values), INT8, "max") == np.abs(values).max()
    assert limit_of(seen(values), INT8, "percentile", 0.9999) < np.abs(values).max()


def test_even_values_are_not_clipped() -> None:
    values = np.random.default_rng(0).uniform(-3, 3, 50_000).astype(np.float32)
    assert limit_of(seen(values), INT8) >= 0.98 * np.abs(values).max()


def test_floats_keep_the_largest_value() -> None:
    values = np.array([1e-3, 100.0], np.float32)
    assert limit_of(seen(values), FP8) == 100.0


@pytest.mark.parametrize(("rule", "share"), [("entropy", 1.0), ("percentile", 0.999)])
def test_rules_that_are_known_to_be_bad_are_refused(rule: str, share: float) -> None:
    with pytest.raises(CalibrationError) as caught:
        limit_of(seen(np.ones(3)), INT8, rule, share)
    assert caught.value.code == "RULE"


def test_QU_04_an_activation_that_was_never_seen_gets_no_scale() -> None:
    table = Table({}, {}, Policy(), {"a"})
    table.inputs = {name: table_entry() for name in ("one", "two")}
    table.add("one", COMMIT, np.array([1.27]))
    assert input_scales(table, {"one": INT8}, "max") == {"one": pytest.approx(0.01)}
    with pytest.raises(CalibrationError, match="1 activations were never seen") as caught:
        input_scales(table, {"one": INT8, "two": INT8})
    assert caught.value.code == "UNVISITED"


def table_entry():
    from fixedstate.calib.table import Seen

    return Seen(Histogram())
