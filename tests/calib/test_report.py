"""Reports: every number is one of the comparison's, and gates let nothing through in silence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fixedstate.calib.drift import Drift
from fixedstate.calib.histogram import Histogram
from fixedstate.calib.measure import Comparison, Tokens
from fixedstate.calib.plan import Plan
from fixedstate.calib.report import Gates, Report
from fixedstate.calib.sites import Site
from fixedstate.calib.table import COMMIT, Policy, Seen, Table
from fixedstate.errors import CalibrationError

SITES = {
    name: Site(name, kind, 0, rows, 64, name)
    for name, kind, rows in (("a", "up", 64), ("b", "up", 40), ("c", "", 64))
}


def comparison(off: float = 0.0) -> Comparison:
    """Of scores that differ by so much in one token of three."""
    rng = np.random.default_rng(0)
    right = rng.standard_normal((50, 3))
    found = right.copy()
    found[:, 1] += off
    made = Comparison(state={1: 0.01, 10: 0.012})
    for share in (1.0, 0.5):
        made.shares[share] = Tokens()
        made.shares[share].add(right, found, np.zeros(50, np.int64))
        made.sequences[str(share)] = float(made.shares[share].kl[0].mean())
    made.buckets[1] = made.total
    return made


def table() -> Table:
    made = Table({}, {}, Policy(), {"r"}, {name: Seen(Histogram()) for name in SITES})
    made.add("a", COMMIT, np.array([1.0]))
    made.add("a", "1", np.array([2.5]))
    made.add("b", COMMIT, np.array([1.0]))
    return made


def report(off: float = 0.0, **changes) -> Report:
    ranges = table()
    plan = Plan("w" * 64, ranges.sha256, ("sm86",), {"a": "int4:32"}, {}, expected_kl=1e-3)
    return Report.of(plan, ranges, SITES, comparison(off), "d" * 64, **changes)


def drifted(*errors: float) -> Drift:
    made = comparison()
    made.state = dict(zip((1, 10, 100, 1000), errors, strict=True))
    return Drift("int8row", made, 100, 400)


def test_bytes_and_reasons() -> None:
    made = report()
    assert made.nbytes == {"int4:32": 64 * 32 + 2 * 64 * 4, "float": 4 * 64 * (40 + 64)}
    assert made.float_bytes == 4 * 64 * (64 + 40 + 64)
    assert made.left == {"b": "K = 40 is no multiple of the block of 32", "c": "unknown kind"}
    assert made.unvisited == ("c",)
    assert made.uneven == {"a": 2.5}


def test_a_model_that_is_near_passes_and_one_that_is_not_says_by_how_much() -> None:
    gates = Gates()
    assert report(1e-3).breaches(gates) == []
    assert report(1e-3).markdown(gates).rstrip().endswith("PASSED")
    far = report(3.0)
    found = far.breaches(gates)
    assert [one.split()[0] for one in found] == ["kl_mean", "kl_p99", "agree"]
    assert all("allowed is" in one or "is asked for" in one for one in found)
    assert far.markdown(gates).rstrip().endswith("FAILED")
    nan = dict.fromkeys(("kl_mean", "kl_p99", "agree"), float("nan"))
    assert len(gates.breaches(nan)) == 3


def test_a_state_that_drifts_away_is_a_breach() -> None:
    still, away = drifted(0.01, 0.02, 0.03, 0.031), drifted(0.01, 0.02, 0.05, 0.2)
    assert report(drifts=[still]).breaches(Gates()) == []
    assert report(drifts=[away]).breaches(Gates()) == [
        "the state in int8row still drifts away after 1000 blocks"
    ]
    text = report(drifts=[still, away]).markdown()
    assert "saturated" in text
    assert "still growing" in text


def test_everything_is_in_the_json_and_in_the_text() -> None:
    made = report(0.5, drifts=[drifted(0.1, 0.1, 0.1, 0.1)])
    data = json.loads(json.dumps(made.to_dict()))
    assert data["comparison"]["all"]["tokens"] == 100
    assert data["bytes"]["by_format"]["int4:32"] == 64 * 32 + 512
    assert data["state"][0]["growing"] is False
    text = made.markdown(Gates())
    for part in ("| 0.5 | 50 |", "| 1 | 100 |", "| int4:32 | 2,560 |", "b (K = 40 is no multiple"):
        assert part in text
    summary = made.comparison.total.summary()
    assert f"Divergence {summary['kl_mean']:.3g} nats" in text


def test_formats_that_no_provider_computes_are_called_simulated() -> None:
    """QU-10: an fp8 file that ran by converting was never checked on a card."""
    ranges = table()
    plan = Plan("w" * 64, ranges.sha256, ("sm89",), {"a": "fp8"}, {"a": 0.1})
    made = Report.of(plan, ranges, SITES, comparison(), "d" * 64)
    assert made.simulated == ("fp8",)
    assert "fp8: computed by converting; no card has been asked." in made.markdown()
    assert report().simulated == ()


def test_a_table_of_something_else_is_refused() -> None:
    plan = Plan("w" * 64, "0" * 64, (), {}, {})
    with pytest.raises(CalibrationError, match="the plan was made with table") as caught:
        Report.of(plan, table(), SITES, comparison(), "")
    assert caught.value.code == "STALE"
