"""`check`: the reports of the laws and of an engine beside its bundle, and their exit codes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from sample_engine import AOT, fill_engine, identity_of
from toy_bundle import write_toy_bundle

from fixedstate.bundle import Bundle
from fixedstate.runtime import against, trt


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A bundle that runs."""
    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "toy.bundle")


@pytest.fixture
def engine(toy, tmp_path) -> Path:
    """An engine of it that nothing could run."""
    folder = tmp_path / "toy.engine"
    folder.mkdir()
    bundle = Bundle.open(toy)
    fill_engine(folder, bundle, identity_of(bundle))
    return folder


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
    assert done.out.splitlines()[-1] == "FAILED"
    (line,) = [line for line in done.out.splitlines()[:-1] if "FAILED" in line]
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


def test_the_last_line_is_the_verdict(run, bundle, laws):
    assert run("check", bundle).out.splitlines()[-1] == "PASSED"


# --- beside an engine ----------------------------------------------------------------------------


def test_against_compares_along_trajectories(run, toy):
    """Sides, tolerance, every kind of port, tokens, and the verdict last."""
    done = run("check", toy, "--against", toy, "--quick")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"reference  {toy} on cpu"
    assert lines[1] == f"candidate  {toy} on cpu"
    assert lines[2] == "tolerance  fp32: 0.01 of a port's deviation, 0.0001 at a deviation up to 1"
    assert lines[3].startswith("because    two orders of summation")
    for kind in ("key", "value", "conv_state", "ssm_state", "logits"):
        assert len([line for line in lines if line.split()[:1] == [kind]]) == 1
    assert any(line.startswith("top-1   ") for line in lines)
    assert any(line.startswith("tokens  ") for line in lines)
    assert lines[-1] == "PASSED"


def test_against_as_json(run, toy):
    done = run("check", toy, "--against", toy, "--quick", "--json")
    assert (done.json["passed"], done.json["ran"]) == (True, True)
    (data,) = done.json["comparisons"]
    assert (data["passed"], data["head"], data["first_divergence"]) == (True, "logits", None)
    assert data["tolerance"]["precision"] == "fp32"
    assert data["tolerance"]["overridden"] is False
    assert {port["name"]: port["layer"] for port in data["ports"]} == {
        "key_000": 0,
        "value_000": 0,
        "conv_state_001": 1,
        "ssm_state_001": 1,
        "past_length": None,
        "logits": None,
    }
    assert data["top1"]["agreed"] == data["top1"]["sure"] > 0
    assert data["tokens"]["equal"] == data["tokens"]["tokens"] > 0


@pytest.fixture
def altered(monkeypatch):
    """Changes what a comparison found before the command sees it."""
    real = against.compare_bundles

    def change(**values):
        def compared(*args, **options):
            return tuple(replace(one, **values) for one in real(*args, **options))

        monkeypatch.setattr(against, "compare_bundles", compared)

    return change


def test_VE_01_a_divergence_fails_and_is_named(run, toy, altered):
    place = "generation 1, slot 0, block 3, pass 2, logits: differs by 0.3"
    record = against.PortRecord("logits", None, 5, math.nan, math.nan, 0.1, math.nan, "there", 2)
    altered(first=place, first_port="logits", ports=(record,))
    done = run("check", toy, "--against", toy, "--quick")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[-2] == f"first divergence  {place}"
    assert lines[-1] == "FAILED"
    (row,) = [line for line in lines[:-1] if "FAILED" in line]
    assert row.split()[:2] == ["logits", "1"]
    done = run("check", toy, "--against", toy, "--quick", "--json")
    assert done.code == 1
    assert done.json["passed"] is False
    assert done.json["comparisons"][0]["ports"][0]["max_abs"] is None
    assert done.json["comparisons"][0]["first_divergence"] == {
        "where": place,
        "port": "logits",
        "layer": None,
    }


def test_nothing_compared_is_no_success(run, toy, altered):
    altered(passes=0)
    assert run("check", toy, "--against", toy, "--quick").code == 1


def test_VE_05_a_chosen_tolerance_is_said(run, toy):
    words = ("check", toy, "--against", toy, "--quick", "--tolerance", "0.5")
    assert "(chosen, not the default)" in run(*words).out
    assert run(*words, "--json").json["comparisons"][0]["tolerance"]["relative"] == 0.5


# --- without a run -------------------------------------------------------------------------------


def test_an_engine_that_cannot_run_is_compared_without(run, toy, engine, monkeypatch):
    """It says so, and `PASSED` alone is never its last line."""
    monkeypatch.setattr(trt, "why_not_here", lambda folder: "there is no card")
    done = run("check", toy, "--against", engine)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[-2] == "the run itself was not possible: no numbers were compared"
    assert lines[-1] == "PASSED static checks only, not run: there is no card"
    data = run("check", toy, "--against", engine, "--json").json
    assert (data["passed"], data["ran"], data["reason"]) == (True, False, "there is no card")
    assert {"denoise", "commit"} <= {check["role"] for check in data["checks"]}


def test_require_run_fails_where_there_was_none(run, toy, engine, monkeypatch):
    monkeypatch.setattr(trt, "why_not_here", lambda folder: "there is no card")
    done = run("check", toy, "--against", engine, "--require-run")
    assert done.code == 1
    assert done.out.splitlines()[-1] == "FAILED static checks only, not run: there is no card"
    assert run("check", toy, "--against", engine, "--require-run", "--json").code == 1


def test_static_checks_that_fail_are_named(run, toy, engine, monkeypatch):
    from fixedstate.export import against as static

    found = [static.Finding("denoise", "MatMul, MATRIX_MULTIPLY", "9", "8", False)]
    monkeypatch.setattr(trt, "why_not_here", lambda folder: "there is no card")
    monkeypatch.setattr(static, "compare_unrun", lambda bundle, folder: found)
    done = run("check", toy, "--against", engine)
    assert done.code == 1
    assert done.out.splitlines()[-1] == "FAILED static checks, not run: there is no card"
    assert "MATRIX_MULTIPLY" in [line for line in done.out.splitlines() if "FAILED" in line][0]


def test_the_reason_here_is_the_real_one(run, toy, tmp_path):
    """Nobody has a card of this capability."""
    bundle = Bundle.open(toy)
    (tmp_path / "e").mkdir()
    fill_engine(tmp_path / "e", bundle, identity_of(bundle, capabilities=("99.0",), plugins=(AOT,)))
    done = run("check", toy, "--against", tmp_path / "e")
    assert done.code == 0
    last = done.out.splitlines()[-1]
    assert last.startswith("PASSED static checks only, not run: the engine ")
    assert "compute capability 99.0" in last


# --- requests that make no sense -----------------------------------------------------------------


def test_an_engine_of_another_model_is_refused(run, toy, tmp_path):
    other = write_toy_bundle(tmp_path / "other.bundle", norm_eps=1e-3)
    done = run("check", toy, "--against", other)
    assert (done.code, done.out) == (2, "")
    assert "is of another model than" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tolerance", "0.1"), "--tolerance is about an engine"),
        (("--require-run",), "--require-run is about an engine"),
        (("--against", "b", "--checkpoint", "c"), "give one of them"),
        (("--save-inputs", "x", "--save-outputs", "x"), "give two folders"),
        (("--save-inputs", "absent/x"), "is not a folder"),
        (("--save-outputs", "."), "exists: choose another name"),
        (("--against", "b", "--tolerance", "nan"), "out of range"),
    ],
)
def test_options_that_make_no_sense_are_refused(run, tmp_path, monkeypatch, options, words):
    """Before the bundle is opened."""
    monkeypatch.chdir(tmp_path)
    done = run("check", "absent.bundle", *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_saved_passes_are_named(run, laws, toy, tmp_path):
    """Beside the laws; the files are what `polygraphy run` takes, see tests/export."""
    folders = tmp_path / "in", tmp_path / "out"
    done = run("check", toy, "--save-inputs", folders[0], "--save-outputs", folders[1])
    assert done.code == 0, done
    files = [folder / f"{role}.json" for folder in folders for role in ("commit", "denoise")]
    assert done.lines == [f"note: wrote {file}" for file in files]
    assert all(file.is_file() for file in files)
    assert done.out.splitlines()[-1] == "PASSED"
