"""`prefix`: a text becomes a file that says what it is, or nothing appears."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fixedstate.bundle import Bundle
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.snapshot import FORMAT, Snapshot

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
TEXT = "set arm 3 17 " * 5


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "system.txt"
    file.write_text(TEXT)
    return file


def test_make_prints_the_path_and_says_what_it_took(run, tmp_path, text):
    """The file holds the whole blocks of the text as a state, and the rest as ids."""
    out = tmp_path / "system.state"
    done = run("prefix", "make", GOLDEN, "--text", text, "-o", out, "--threads", 1)
    assert (done.code, done.out) == (0, f"{out}\n")
    (line,) = done.lines
    assert line.startswith("20 tokens (4 pending), 6,400 bytes of state, ")
    assert line.endswith(" ms")
    state = Snapshot.load(out)
    assert (state.past_length, len(state.pending), state.seed) == (16, 4, 0)
    engine = open_engine(Bundle.open(GOLDEN), threads=1)
    ids = [4, 5, 9, 23] * 5
    engine.commit(np.array([ids[:16]]), np.array([16]))
    assert state.to_bytes() == Snapshot.take(engine, 0, tuple(ids[16:])).to_bytes()


def test_ids_and_standard_input_are_taken(run, tmp_path):
    """The same tokens give the same bytes, however they come in."""
    files = [tmp_path / name for name in ("ids", "text")]
    ids = ",".join(["4,5,9,23"] * 5)
    assert run("prefix", "make", GOLDEN, "--ids", ids, "-o", files[0]).code == 0
    assert run("prefix", "make", GOLDEN, "--text", "-", "-o", files[1], input=TEXT).code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_show_and_json_describe_the_same_state(run, tmp_path):
    """Metadata for scripts; what it took stands beside it where it was made."""
    out = tmp_path / "system.state"
    made = run("prefix", "make", GOLDEN, "--ids", "3,4,5,6,7,8,9,10,11", "-o", out, "--json")
    assert (made.code, made.err) == (0, "")
    shown = run("prefix", "show", out)
    assert (shown.code, shown.err) == (0, "")
    assert made.json.pop("seconds") > 0
    data = shown.json
    assert data == {key: value for key, value in made.json.items() if key != "seconds"}
    assert data["format"] == FORMAT
    assert data["weights"] == Bundle.open(GOLDEN).weights
    assert (data["past_length"], data["pending"], data["block_len"]) == (8, [11], 8)
    assert data["bytes"] == sum(port["bytes"] for port in data["tensors"])
    assert [port["name"] for port in data["tensors"]][:2] == ["conv_state_000", "ssm_state_000"]
    assert data["tensors"][1] == {
        "name": "ssm_state_000",
        "shape": [8, 8, 8],
        "dtype": "float32",
        "bytes": 2048,
    }


def test_what_exists_is_kept_without_force(run, tmp_path, text):
    """A state took its time to make."""
    out = tmp_path / "system.state"
    out.write_text("mine")
    make = ("prefix", "make", GOLDEN, "--text", text, "-o", out)
    done = run(*make)
    assert (done.code, done.out) == (2, "")
    assert "system.state exists" in done.err
    assert out.read_text() == "mine"
    assert run(*make, "--force").code == 0
    assert Snapshot.load(out).past_length == 16
    done = run(*make[:-1], tmp_path, "--force")
    assert done.code == 2
    assert "is a folder" in done.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ((), 2, "give --text or --ids: one of them"),
        (("--ids", "1", "--text", "-"), 2, "give --text or --ids: one of them"),
        (("--ids", ""), 2, "the prefix is empty"),
        (("--ids", "1,99"), 2, "prefix ids: id 99 at place 1 is outside the vocabulary"),
        (("--ids", "1,36"), 2, "id 36 at place 1 is the mask"),
        (("--ids", "x"), 2, "'x' is not a token id"),
        (("--text", "/nowhere"), 2, "cannot be read"),
    ],
)
def test_wrong_requests_leave_nothing(run, tmp_path, options, code, words):
    done = run("prefix", "make", GOLDEN, *options, "-o", tmp_path / "x.state", input="")
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert os.listdir(tmp_path) == []


def test_show_refuses_what_is_no_state(run, tmp_path, text):
    """One line, exit 1."""
    done = run("prefix", "show", text)
    assert (done.code, done.out) == (1, "")
    assert "is no saved state" in done.err
    assert len(done.lines) == 1


def test_prefix_alone_is_a_usage_error(run):
    done = run("prefix")
    assert (done.code, done.out) == (2, "")
    assert done.lines == ["error: Missing command. (see fixedstate prefix --help)"]
