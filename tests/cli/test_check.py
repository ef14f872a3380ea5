"""`check`: the report of the laws and its exit code."""

from __future__ import annotations

import math


def test_json_lists_the_laws(run, bundle, laws):
    done = run("check", bundle, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["passed"] is True
    assert [set(law) for law in done.json["laws"]] == [
        {"law", "title", "passed", "worst", "where", "note"}
    ] * 2


def test_quick_takes_fewer_blocks(run, bundle, laws):
    run("check", bundle)
    assert "block_counts" not in laws
    run("check", bundle, "--quick")
    assert laws["block_counts"] == (1, 2, 3)


def test_failed_law_is_named(run, bundle, laws):
    laws["passed"] = False
    done = run("check", bundle)
    assert done.code == 1
    assert done.out.rstrip().endswith("failed")
    (line,) = [line for line in done.out.splitlines() if "FAILED" in line]
    assert "denoise writes nothing" in line
    assert "block 3" in line


def test_VE_01_nan_is_a_failure_and_valid_json(run, bundle, laws):
    """NaN is no JSON; a reader gets null and passed false."""
    laws.update(passed=False, worst=math.nan)
    done = run("check", bundle, "--json")
    assert done.code == 1
    assert done.json["passed"] is False
    assert done.json["laws"][1]["worst"] is None


def test_no_law_run_is_no_success(run, bundle, laws, monkeypatch):
    """Nothing checked is not the same as everything kept."""
    monkeypatch.setattr("fixedstate.runtime.laws.check_bundle", lambda *_, **__: [])
    assert run("check", bundle, "--json").code == 1
