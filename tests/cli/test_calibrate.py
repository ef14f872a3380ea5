"""`calibrate`: each step by its file, all of them at once, and refusals by their codes."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from sample_engine import edit, fill_engine, identity_of

from fixedstate.bundle import QUANTIZATION, Bundle
from fixedstate.calib.data import read_data
from fixedstate.calib.formats import TARGETS
from fixedstate.calib.plan import Plan
from fixedstate.calib.score import Sensitivity, choices
from fixedstate.calib.sites import Site
from fixedstate.calib.table import Table
from fixedstate.cli import cli
from fixedstate.cli.calibrate_common import FORMATS
from fixedstate.cli.calibrate_plan import risks
from fixedstate.export.engine import LAYERS
from fixedstate.export.realized import Realized
from fixedstate.state import KV_DTYPES, STATE_DTYPES, KvFormat

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
PASSES = ("--masks", "1,0.5", "--blocks", 2)
FEW = ("--formats", "int8,int8-weights")
NEAR = ("--max-kl", 0.5, "--max-p99", 5, "--min-agree", 0)
"""Bounds for random weights, whose scores lie close together."""


def words(count: int) -> str:
    """A text of the golden tokenizer's words."""
    draw = random.Random(0)
    heads = ("set arm", "get arm", "set", "arm")
    return " ".join(
        f"{draw.choice(heads)} {draw.randrange(10)} {draw.randrange(30)}" for _ in range(count)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrate")


@pytest.fixture(scope="module")
def data(run, folder: Path) -> Path:
    """Sequences of two blocks."""
    (folder / "text.txt").write_text(words(160))
    done = run(
        *("calibrate", "data", GOLDEN, "--text", folder / "text.txt", "--tokens", 16),
        *("-o", folder / "data.jsonl"),
    )
    assert (done.code, done.out) == (0, f"{folder / 'data.jsonl'}\n")
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def table(run, folder: Path, data: Path) -> Path:
    done = run("calibrate", "collect", GOLDEN, "--data", data, "-o", folder / "table.json", *PASSES)
    assert (done.code, done.out) == (0, f"{folder / 'table.json'}\n")
    return folder / "table.json"


@pytest.fixture(scope="module")
def scores(run, folder: Path, data: Path, table: Path) -> Path:
    out = folder / "scores.json"
    options = ("--data", data, "--table", table, *FEW, "--records", 2)
    done = run("calibrate", "score", GOLDEN, *options, "-o", out)
    assert (done.code, done.out) == (0, f"{out}\n")
    return out


@pytest.fixture(scope="module")
def plan(run, folder: Path, table: Path) -> Path:
    """int8 for every product that takes it."""
    out = folder / "plan.json"
    done = run("calibrate", "plan", GOLDEN, "--table", table, "--format", "int8", "-o", out)
    assert (done.code, done.out) == (0, f"{out}\n")
    assert "in float32" in done.err
    return out


@pytest.fixture(scope="module")
def quantized(run, folder: Path, data: Path, table: Path, plan: Path) -> Path:
    out = folder / "q.bundle"
    done = run(
        *("calibrate", "apply", GOLDEN, "--plan", plan, "--table", table, "--data", data),
        *("-o", out, *NEAR, "--report", folder / "report.md", "--plot", folder / "report.png"),
    )
    assert (done.code, done.out) == (0, f"{out}\n")
    assert "nats away" in done.err
    return out


def code_of(done) -> str:
    """The code of a refusal; its sentence stands on standard error too."""
    assert done.code == 1, done
    error = done.json["error"]
    assert sorted(error) == ["code", "message"]
    assert done.lines[-1] == f"error: {' '.join(error['message'].split())}"
    return error["code"]


# --- data


def test_a_text_is_cut_and_its_end_is_left_out(run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(20))
    options = ("--text", tmp_path / "a.txt", "--tokens", 16, "-o", tmp_path / "d", "--json")
    found = run("calibrate", "data", GOLDEN, *options).json
    made = read_data(tmp_path / "d", Bundle.open(GOLDEN))
    lengths = [len(record.ids) for record in made.records]
    assert (
        found["sequences"] == len(lengths) == sum(s["sequences"] for s in found["splits"].values())
    )
    assert found["tokens"] == sum(lengths)
    assert all(8 <= length <= 16 for length in lengths)
    assert found["dropped"] == {"tokens": found["dropped"]["tokens"], "short": 0, "repeated": 0}
    assert 0 <= found["dropped"]["tokens"] < 8


def test_samples_keep_their_prompts(run, tmp_path: Path) -> None:
    """A sample without a whole block behind its prompt is of no use, and is said to be left out."""
    lines = [
        {"prompt": "set arm 1 2 set arm 3", "completion": " 4 get arm 5 6 7 8 9 10 11 12"},
        {"ids": [4, 5, 6, 7, 8, 9, 10, 11, 12], "prompt_len": 3},
        {"ids": [4, 5, 6, 7, 8, 9, 10, 11, 12], "prompt_len": 8},
        {"ids": [4, 5, 6, 7, 8, 9, 10, 11, 12], "prompt_len": 3},
    ]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    options = ("--samples", tmp_path / "s.jsonl", "-o", tmp_path / "d")
    done = run("calibrate", "data", GOLDEN, *options)
    assert done.code == 0
    made = read_data(tmp_path / "d", Bundle.open(GOLDEN))
    assert sorted((len(one.ids), one.prompt_len) for one in made.records) == [(9, 3), (18, 7)]
    assert "note: left out: 1 sequences have no whole block behind their prompt" in done.lines
    assert "note: left out: 1 sequences were there twice" in done.lines


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "line 1 is no JSON"),
        ('{"prompt": "a"}', "line 1 must be an object"),
        ('{"prompt": "a", "completion": 3}', "line 1 must be an object"),
        ("[1]", "line 1 must be an object"),
        ('{"ids": [4], "prompt_len": "0"}', "line 1 must be an object"),
        ('{"ids": 4, "prompt_len": 0}', "line 1 must be an object"),
        ('{"ids": [4], "prompt_len": 0}', "none of 1 sequences has a whole block of 8 tokens"),
    ],
)
def test_wrong_samples_are_refused(run, tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "s.jsonl").write_text(content)
    options = ("--samples", tmp_path / "s.jsonl", "-o", tmp_path / "d")
    done = run("calibrate", "data", GOLDEN, *options)
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert says in done.err
    assert not (tmp_path / "d").exists()


# --- collect, merge, score


def test_two_parts_of_a_table_are_the_whole(run, tmp_path: Path, data: Path, table: Path) -> None:
    """Resumed, the file is the same to the byte; merged with itself it is refused."""
    options = ("calibrate", "collect", GOLDEN, "--data", data, *PASSES)
    first = tmp_path / "first.json"
    assert run(*options, "-o", first, "--records", 3).code == 0
    part = Table.load(first)
    assert len(part.records) == 3
    done = run(*options, "-o", first, "--resume", "--json")
    assert done.json["records"] == len(Table.load(table).records)
    assert first.read_bytes() == table.read_bytes()
    done = run("calibrate", "merge", table, first, "-o", tmp_path / "twice.json", "--json")
    assert code_of(done) == "TWICE"


def test_tables_of_other_sequences_are_merged(run, tmp_path: Path, data: Path, table: Path) -> None:
    import fixedstate.calib.collect as collector

    bundle = Bundle.open(GOLDEN)
    given = read_data(data, bundle)
    whole = Table.load(table)
    names = sorted(whole.records)
    files = []
    for part in (names[:4], names[4:]):
        left = type(given)(tuple(one for one in given.records if one.id in part), given.sha256)
        files.append(tmp_path / f"{len(files)}.json")
        collector.collect(bundle, left, whole.policy).save(files[-1])
    done = run("calibrate", "merge", *files, "-o", tmp_path / "whole.json")
    assert (done.code, done.out) == (0, f"{tmp_path / 'whole.json'}\n")
    assert (tmp_path / "whole.json").read_bytes() == table.read_bytes()


def test_an_interrupted_run_leaves_what_it_has_beside_the_file(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path, table: Path
) -> None:
    """No half table stands under the name that was asked for."""
    out, saved = tmp_path / "t.json", Table.save

    def save(self: Table, file: Path) -> None:
        saved(self, file)
        if len(self.records) >= 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Table, "save", save)
    options = ("calibrate", "collect", GOLDEN, "--data", data, *PASSES, "--batch", 2, "-o", out)
    assert run(*options).code == 130
    assert [file.name for file in tmp_path.iterdir()] == ["t.json.partial"]
    assert len(Table.load(tmp_path / "t.json.partial").records) == 4
    monkeypatch.undo()
    assert run(*options, "--resume").code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    assert out.read_bytes() == table.read_bytes()


def test_scores_go_on_where_they_were_stopped(
    run, tmp_path: Path, data: Path, table: Path, scores: Path
) -> None:
    left = json.loads(scores.read_text())
    name = sorted(left["kl"])[0]
    del left["kl"][name]["int8"]
    out = tmp_path / "scores.json"
    Path(f"{out}.partial").write_text(json.dumps(left))
    options = ("--data", data, "--table", table, *FEW, "--records", 2)
    done = run("calibrate", "score", GOLDEN, *options, "-o", out, "--resume", "--json")
    assert sorted(done.json["kl"]) == ["int8", "int8-weights"]
    assert out.read_bytes() == scores.read_bytes()
    assert not Path(f"{out}.partial").exists()


def test_what_is_there_is_kept_without_force(run, data: Path, table: Path) -> None:
    """Collecting takes its time."""
    before = table.read_bytes()
    done = run("calibrate", "collect", GOLDEN, "--data", data, "-o", table, *PASSES)
    assert (done.code, done.out) == (2, "")
    assert "exists" in done.err
    assert table.read_bytes() == before


# --- plan


def test_pins_are_counted_and_kept(run, tmp_path: Path, table: Path) -> None:
    options = ("--table", table, "--format", "int8", "-o", tmp_path / "p")
    pins = ("--pin", "*.in_proj.*=float", "--pin", "layers.0.*out_proj*=int8-weights")
    done = run("calibrate", "plan", GOLDEN, *options, *pins, "--state", "float16", "--json")
    assert done.code == 0
    refused = run("calibrate", "plan", GOLDEN, *options, "--kv", "int8", "--force", "--json")
    assert code_of(refused) == "STATE_FORMAT"
    done = run("calibrate", "plan", GOLDEN, *options, *pins, "--state", "float16", "--force")
    assert done.lines[1:3] == [
        "*.in_proj.*=float: 4 of 7 weights",
        "layers.0.*out_proj*=int8-weights: 1 of 7 weights",
    ]
    made = Plan.load(tmp_path / "p")
    assert not any("in_proj" in name for name in made.formats)
    assert made.formats["layers.0.mixer.out_proj.weight"] == "int8-weights"
    assert set(made.formats.values()) == {"int8", "int8-weights"}
    assert (made.state, made.kv) == ("float16", "float32")


def test_QU_09_what_adds_up_along_a_sequence_is_warned_of(run, tmp_path: Path, table: Path) -> None:
    options = ("--table", table, "--format", "int8", "-o", tmp_path / "p", "--force")
    quiet = run("calibrate", "plan", GOLDEN, *options)
    assert "add up along a sequence" not in quiet.err
    made = Plan.load(tmp_path / "p")
    assert (made.state, made.kv) == ("float32", "float32")
    said = run("calibrate", "plan", GOLDEN, *options, "--state", "int8row")
    assert said.code == 0
    assert "note: scan states are kept in int8row: errors add up" in said.err


def test_QU_09_steps_of_scans_are_not_quantised_unless_asked() -> None:
    """Mamba-1's projections to dt, B and C are products too."""
    sites = {
        name: Site(name, kind, 0, 32, 32, name)
        for name, kind in (("layers.0.mixer.x_proj.weight", "x_proj"), ("head.weight", "head"))
    }
    assert list(choices(sites, ("int8",))) == ["head.weight"]
    asked = choices(sites, ("int8",), ("x_proj", "head"))
    plan = Plan("w", "t", (), dict.fromkeys(asked, "int8"), {})
    (text,) = risks(plan, sites)
    assert "1 weights make the steps of scans (layers.0.mixer.x_proj.weight)" in text


def test_a_search_is_held_against_sequences_of_its_own(
    run, tmp_path: Path, data: Path, table: Path, scores: Path
) -> None:
    options = ("--table", table, "--scores", scores, "-o", tmp_path / "p", "--json", "--force")
    done = run(
        "calibrate",
        "plan",
        GOLDEN,
        *options,
        "--data",
        data,
        "--max-kl",
        1,
        "--pin",
        "embed*=float",
    )
    assert done.json["measured_kl"] <= 1
    assert done.json["pins"] == {"embed*=float": 1}
    assert set(done.json["bytes"]) <= {"float", "int8", "int8-weights"}
    made = Plan.load(tmp_path / "p")
    assert "embedding.weight" not in made.formats
    assert len(made.formats) == 6
    splits = [read_data(data, Bundle.open(GOLDEN)).split(s, 8) for s in ("verify", "report")]
    assert not {one.id for one in splits[0]} & {one.id for one in splits[1]}

    done = run("calibrate", "plan", GOLDEN, *options, "--max-bytes", 40_000)
    assert done.json["measured_kl"] is None
    done = run("calibrate", "plan", GOLDEN, *options, "--max-bytes", 10)
    assert code_of(done) == "INFEASIBLE"
    done = run("calibrate", "plan", GOLDEN, *options, "--data", data, "--max-kl", 0)
    assert code_of(done) == "INFEASIBLE"
    assert "no weight would be quantised" in done.err
    pin = ("--pin", "embed*=int4:32")
    done = run("calibrate", "plan", GOLDEN, *options, "--max-bytes", 40_000, *pin)
    assert code_of(done) == "UNSCORED"
    done = run("calibrate", "plan", GOLDEN, *options, "--max-bytes", 62_000, "--kinds", "head")
    assert (done.json["weights"], done.json["total_bytes"] <= 62_000) == (1, True)
    done = run("calibrate", "plan", GOLDEN, *options, "--max-bytes", 40_000, "--kinds", "head")
    assert code_of(done) == "INFEASIBLE"
    assert "were not scored" in done.err


def test_weights_may_stay_where_the_state_does_not(run, tmp_path: Path, table: Path) -> None:
    options = ("--table", table, "--format", "float", "-o", tmp_path / "p", "--json")
    assert code_of(run("calibrate", "plan", GOLDEN, *options)) == "INFEASIBLE"
    assert run("calibrate", "plan", GOLDEN, *options, "--state", "int8row").code == 0
    made = Plan.load(tmp_path / "p")
    assert (made.formats, made.state) == ({}, "int8row")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--format", "fp8", "--target", "ort-cpu,sm86"), "UNSUPPORTED_TARGET"),
        (("--format", "int8", "--target", "sm75"), "UNSUPPORTED_TARGET"),
        (("--format", "int8", "--target", "sm1"), "UNSUPPORTED_TARGET"),
        (("--format", "int3"), "FORMAT"),
        (("--format", "int8", "--pin", "*=int3"), "FORMAT"),
        (("--format", "int8", "--pin", "nothing*=int8"), "GLOB_MATCHED_NONE"),
        (("--format", "int8", "--pin", "*=float"), "GLOB_MATCHED_ALL"),
        (("--format", "int8", "--pin", "*=int4:128"), "BLOCK_INDIVISIBLE"),
        (("--format", "int4:128"), "NO_SITES"),
    ],
)
def test_plans_that_cannot_be_are_refused_by_code(
    run, tmp_path: Path, table: Path, options: tuple[str, ...], code: str
) -> None:
    out = tmp_path / "p"
    done = run("calibrate", "plan", GOLDEN, "--table", table, "-o", out, *options, "--json")
    assert code_of(done) == code
    assert not out.exists()


def test_a_target_is_looked_at_before_anything_is_read(run, tmp_path: Path) -> None:
    """Neither bundle nor data is there."""
    options = ("--data", "absent", "-o", tmp_path / "q", "--json")
    done = run("calibrate", "auto", "absent", *options, "--format", "nvfp4", "--target", "sm89")
    assert code_of(done) == "UNSUPPORTED_TARGET"
    done = run("calibrate", "auto", "absent", *options, "--target", "sm75")
    assert code_of(done) == "UNSUPPORTED_TARGET"


def test_the_default_formats_are_those_that_targets_have() -> None:
    for name in ("ort-cpu", "sm80", "sm86", "sm89", "sm120"):
        assert set(FORMATS) <= set(TARGETS[name])


def test_QU_01_a_table_of_something_else_is_refused(
    run, tmp_path: Path, data: Path, table: Path, plan: Path
) -> None:
    """Of other weights, or changed by hand; a plan likewise."""
    raw = json.loads(table.read_text())
    raw.pop("sha256")
    raw["model"]["weights"] = "0" * 64
    raw["sha256"] = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(raw))
    done = run(
        *("calibrate", "plan", GOLDEN, "--table", other, "--format", "int8"),
        *("-o", tmp_path / "p", "--json"),
    )
    assert code_of(done) == "STALE"
    assert "weights" in done.json["error"]["message"]
    raw["policy"]["seed"] = 1
    other.write_text(json.dumps(raw))
    done = run("calibrate", "show", other)
    assert (done.code, done.out) == (1, "")
    assert "was changed after it was written" in done.err
    options = ("--data", data, "-o", table, "--resume", "--json", "--masks", "1")
    assert code_of(run("calibrate", "collect", GOLDEN, *options)) == "STALE"
    made = json.loads(plan.read_text()) | {"weights": "0" * 64}
    other.write_text(json.dumps(made))
    options = ("--plan", other, "--table", table, "--data", data, "-o", tmp_path / "q", "--json")
    assert code_of(run("calibrate", "apply", GOLDEN, *options)) == "DAMAGED"


# --- apply, report


def test_a_quantised_bundle_is_a_bundle_with_its_report(
    run, folder: Path, quantized: Path, plan: Path
) -> None:
    made = Bundle.open(quantized)
    assert made.is_quantized
    record = json.loads((quantized / QUANTIZATION).read_text())
    assert record["plan"] == Plan.load(plan).to_dict()
    text = (folder / "report.md").read_text()
    assert text.startswith("# Quantised model\n")
    assert text.endswith("PASSED\n")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    answer = ("--prompt-ids", "4,5,6", "--max-new-tokens", 8, "--json")
    assert len(run("generate", quantized, *answer).json["token_ids"]) == 8


def test_the_report_made_again_says_the_same(
    run, tmp_path: Path, data: Path, quantized: Path
) -> None:
    options = ("calibrate", "report", GOLDEN, quantized, "--data", data, *PASSES)
    done = run(*options, *NEAR, "--json")
    assert done.code == 0
    record = json.loads((quantized / QUANTIZATION).read_text())
    assert done.json["report"] == record["report"]
    assert done.json["split"] == "held-out"
    files = ("--markdown", tmp_path / "r.md", "--plot", tmp_path / "r.svg")
    done = run(*options, *files, "--max-kl", 0)
    assert done.code == 1
    assert done.out == (tmp_path / "r.md").read_text()
    assert done.out.endswith("FAILED\n")
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_states_in_fewer_bits_are_followed_over_many_blocks(
    run, data: Path, quantized: Path
) -> None:
    options = ("--data", data, *PASSES, *NEAR, "--records", 2, "--json")
    long = ("--long", 12, "--state", "int8row")
    found = run("calibrate", "report", GOLDEN, quantized, *options, *long)
    whole, one = found.json["report"]["state"]
    assert (whole["format"], one["format"]) == (quantized.name, "int8row")
    assert list(whole["state_error"]) == list(one["state_error"]) == ["1", "10", "12"]
    assert whole["all"]["kl_mean"] > 0
    assert found.code == int(whole["growing"] or one["growing"])


def test_a_failed_comparison_leaves_nothing_unless_asked(
    run, tmp_path: Path, data: Path, table: Path, plan: Path
) -> None:
    out = tmp_path / "q.bundle"
    options = ("--plan", plan, "--table", table, "--data", data, "-o", out, "--json")
    done = run("calibrate", "apply", GOLDEN, *options, "--max-kl", 0, "--records", 1)
    assert code_of(done) == "GATES"
    assert list(tmp_path.iterdir()) == []
    keep = ("--max-kl", 0, "--records", 1, "--keep-failed")
    done = run("calibrate", "apply", GOLDEN, *options, *keep)
    assert done.code == 1
    assert done.json["passed"] is False
    assert done.json["breaches"]
    assert Bundle.open(out).is_quantized


def test_report_wants_a_quantised_bundle(run, data: Path) -> None:
    done = run("calibrate", "report", GOLDEN, GOLDEN, "--data", data)
    assert (done.code, done.out) == (2, "")
    assert "is not quantised" in done.err


def test_an_engine_is_asked_what_it_has_kept(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path, quantized: Path
) -> None:
    """Stand-in plans, whose size alone is looked at."""
    made = Bundle.open(quantized)
    ask = ("calibrate", "report", GOLDEN, quantized, "--data", data, *PASSES, *NEAR, "--json")
    results = {}
    for name, filler in (("small", 0), ("large", 200_000)):
        engine = tmp_path / name
        engine.mkdir()
        fill_engine(engine, made, identity_of(made), filler=filler)
        record = {role: {"weight_bytes": 40_000} for role in made.graphs}
        content = json.dumps(record).encode()
        (engine / LAYERS).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        edit(engine, lambda data, digest=digest: data["files"].update({LAYERS: digest}))
        results[name] = run(*ask, "--records", 1, "--engine", engine)
    monkeypatch.setattr("fixedstate.export.realized.KERNELS", 10_000)
    results["no room"] = run(*ask, "--records", 1, "--engine", tmp_path / "large")
    for name in ("small", "large"):
        assert {one["passed"] for one in results[name].json["engine"]} == {None}
    assert code_of(results["no room"]) == "NOT_REALIZED"


@pytest.mark.parametrize(
    ("plan_bytes", "passed"),
    [
        (1000 << 20, True),
        (1250 << 20, True),
        (1850 << 20, False),  # float16, and kernels on top of it
    ],
)
def test_weights_that_were_kept_quantised_are_told_from_those_that_were_not(
    plan_bytes: int, passed: bool
) -> None:
    one = Realized("denoise", 900 << 20, 910 << 20, 40 << 20, plan_bytes, 1)
    assert one.passed is passed
    assert one.per_weight == ((plan_bytes >> 20) - 40) / 900
    assert replace(one, capabilities=20).passed is None


# --- auto


def test_auto_does_all_of_it_and_goes_on_with_its_folder(
    run, tmp_path: Path, data: Path, table: Path
) -> None:
    """The steps of a second run are those of the first: nothing is measured twice."""
    work, out = tmp_path / "work", tmp_path / "q.bundle"
    options = ("--data", data, "--work", work, *PASSES, *FEW, *NEAR, "--score-records", 2)
    done = run(
        "calibrate", "auto", GOLDEN, *options, "--target", "ort-cpu,sm86", "-o", out, "--json"
    )
    assert done.code == 0, done
    assert done.json["passed"] is True
    assert done.json["split"] == "report"
    assert done.json["plan"]["measured_kl"] <= 0.75 * 0.5
    assert done.json["plan"]["targets"] == ["ort-cpu", "sm86"]
    assert sorted(file.name for file in work.iterdir()) == [
        "plan.json",
        "scores.json",
        "table.json",
    ]
    assert (work / "table.json").read_bytes() == table.read_bytes()
    found = Sensitivity.load(work / "scores.json")
    assert {name for one in found.kl.values() for name in one} == {"int8", "int8-weights"}
    scored = (work / "scores.json").read_bytes()
    again = tmp_path / "again.bundle"
    done = run("calibrate", "auto", GOLDEN, *options, "--max-bytes", 40_000, "-o", again)
    assert (done.code, done.out) == (0, f"{again}\n")
    assert (work / "scores.json").read_bytes() == scored
    assert sum(Plan.load(work / "plan.json").nbytes(sites_of(GOLDEN)).values()) <= 40_000


def sites_of(path: Path):
    from fixedstate.calib.sites import find_sites, load_graphs

    return find_sites(load_graphs(Bundle.open(path)))


def test_auto_with_one_format_keeps_nothing_beside_the_bundle(
    run, tmp_path: Path, data: Path, quantized: Path
) -> None:
    """It is what the steps give, to the byte."""
    out = tmp_path / "q.bundle"
    done = run(
        "calibrate", "auto", GOLDEN, "--data", data, "--format", "int8", *PASSES, *NEAR, "-o", out
    )
    assert (done.code, done.out) == (0, f"{out}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["q.bundle"]
    assert Bundle.open(out).weights == Bundle.open(quantized).weights


def test_too_few_sequences_are_found_before_work(run, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(words(8))
    options = ("--text", tmp_path / "t", "--tokens", 8, "-o", tmp_path / "d")
    done = run("calibrate", "data", GOLDEN, *options)
    assert "nothing is in split" in done.err
    options = ("--data", tmp_path / "d", "-o", tmp_path / "q", "--work", tmp_path / "w", "--json")
    assert code_of(run("calibrate", "auto", GOLDEN, *options)) == "NO_DATA"
    assert not (tmp_path / "w").exists()


# --- show, and what is refused


def test_show_says_what_a_file_is(run, table: Path, scores: Path, plan: Path, data: Path) -> None:
    found = {file: run("calibrate", "show", file).json for file in (table, scores, plan)}
    assert [one["kind"] for one in found.values()] == ["table", "scores", "plan"]
    assert found[table]["records"] == len(Table.load(table).records)
    assert all(one["largest"] > 0 for one in found[table]["activations"].values())
    assert found[scores]["by_weight"] == Sensitivity.load(scores).kl
    assert found[plan]["sha256"] == Plan.load(plan).sha256
    for other in (data, GOLDEN / "bundle.json", GOLDEN / "absent"):
        done = run("calibrate", "show", other)
        assert (done.code, done.out, len(done.lines)) == (1, "", 1)


PATHS = {
    "auto-bundle": (("auto", "absent", "--data", "d", "-o", "x"), 1),
    "auto-data": (("auto", GOLDEN, "--data", "absent", "-o", "x"), 1),
    "auto-output": (("auto", GOLDEN, "--data", "d", "-o", "absent/x"), 2),
    "auto-work": (("auto", GOLDEN, "--data", "d", "-o", "x", "--work", "absent/w"), 2),
    "auto-report": (("auto", GOLDEN, "--data", "d", "-o", "x", "--report", "absent/r"), 2),
    "auto-plot": (("auto", GOLDEN, "--data", "d", "-o", "x", "--plot", "absent/r.png"), 2),
    "data-text": (("data", GOLDEN, "--text", "absent", "-o", "x"), 2),
    "data-output": (("data", GOLDEN, "--text", "-", "-o", "absent/x"), 2),
    "collect-data": (("collect", GOLDEN, "--data", "absent", "-o", "x"), 1),
    "collect-output": (("collect", GOLDEN, "--data", "d", "-o", "absent/x"), 2),
    "merge-table": (("merge", "absent", "absent", "-o", "x"), 1),
    "score-table": (("score", GOLDEN, "--data", "d", "--table", "absent", "-o", "x"), 1),
    "plan-table": (("plan", GOLDEN, "--table", "absent", "--format", "int8", "-o", "x"), 1),
    "apply-plan": (
        ("apply", GOLDEN, "--plan", "absent", "--table", "t", "--data", "d", "-o", "x"),
        1,
    ),
    "apply-output": (
        ("apply", GOLDEN, "--plan", "p", "--table", "t", "--data", "d", "-o", "absent/x"),
        2,
    ),
    "report-quantized": (("report", GOLDEN, "absent", "--data", "d"), 1),
    "report-markdown": (("report", GOLDEN, GOLDEN, "--data", "d", "--markdown", "absent/r"), 2),
}


@pytest.mark.parametrize("name", PATHS)
def test_CL_04_missing_paths_are_found_before_work(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    args, code = PATHS[name]
    done = run("calibrate", *args, input="")
    assert (done.code, done.out, len(done.lines)) == (code, "", 1), done
    assert "absent" in done.err
    assert list(tmp_path.iterdir()) == []


def test_CL_04_every_path_option_is_tried() -> None:
    """A new one needs its own case above."""
    group = cli.get_command(click.Context(cli), "calibrate")
    assert isinstance(group, click.Group)
    found = set()
    for verb, command in group.commands.items():
        for param in command.params:
            if isinstance(param.type, click.Path):
                found.add(f"{verb}-{param.opts[0].lstrip('-')}")
    same = {  # read or written by the same lines as one that is tried
        *("data-bundle", "collect-bundle", "score-bundle", "plan-bundle", "apply-bundle"),
        *("report-bundle", "score-data", "plan-data", "apply-data", "report-data", "plan-scores"),
        *("score-o", "plan-o", "merge-o", "apply-table", "apply-report", "apply-plot"),
        *("report-plot", "report-engine", "show-file"),
    }
    tried = {one.replace("-output", "-o") for one in PATHS} | {"merge-tables"}
    assert found - same <= tried


def test_choices_of_state_and_keys_are_those_that_there_are() -> None:
    group = cli.get_command(click.Context(cli), "calibrate")
    assert isinstance(group, click.Group)
    options = {param.name: param.type for param in group.commands["plan"].params}
    assert list(options["state"].choices) == list(STATE_DTYPES)
    stored = [name for name in KV_DTYPES if KvFormat.named(name).quantised]
    for name in ("float32", *stored, "kivi4r0", "kivi2r1"):
        assert options["kv"].convert(name, None, None) == name
    for name in ("float16", "bfloat16", "int4", "kivi3", "kivi4r"):
        with pytest.raises(click.BadParameter, match="is none of float32, int8"):
            options["kv"].convert(name, None, None)


def test_every_code_is_explained() -> None:
    """Programs rely on codes: one that is raised stands in the page."""
    root = Path(__file__).parent.parent.parent
    page = (root / "docs" / "calibrate.md").read_text()
    found: set[str] = set()
    for stage in ("calib", "export", "src/fixedstate/cli"):
        for file in (root / stage).rglob("*.py"):
            found |= set(re.findall(r'CalibrationError\(\s*"([A-Z_0-9]+)"', file.read_text()))
    assert len(found) > 20
    assert {code for code in found if f"`{code}`" not in page} == set()


def test_a_missing_package_is_named(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    """Pictures need a package that the rest does not."""

    def find_spec(name: str, *_: object) -> None:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    options = ("--data", data, "-o", tmp_path / "q", "--plot", tmp_path / "r.png")
    done = run("calibrate", "auto", GOLDEN, *options)
    assert (done.code, len(done.lines)) == (1, 1)
    assert "pip install 'fixedstate[calib]'" in done.err
