"""`--memory`: the plan is said before anything is loaded, and the mode is kept to."""

from __future__ import annotations

import pytest
from toy_bundle import write_toy_bundle

from fixedstate.runtime import memory

PROMPT = ("--prompt-ids", "1,2,3", "--max-new-tokens", 12, "--json")


@pytest.fixture
def whole(tmp_path):
    """A toy bundle with every graph."""
    return write_toy_bundle(tmp_path / "whole", roles=("denoise", "commit", "commit_denoise"))


def test_a_mode_asked_for_is_told_and_changes_no_token(run, whole):
    """One line on standard error; without the option and a terminal there is none."""
    plain = run("generate", whole, *PROMPT)
    assert plain.err == ""
    for mode, copies in (("lean", "weights once"), ("fast", "weights 2 times")):
        done = run("generate", whole, *PROMPT, "--memory", mode)
        assert done.json["token_ids"] == plain.json["token_ids"]
        assert done.err.startswith(f"note: memory {mode}: ")
        assert copies in done.err
        assert done.err.count("\n") == 1


def test_a_mode_without_its_graph_is_refused(run, tmp_path):
    """Exit 2, with the graph's name and the other mode."""
    folder = write_toy_bundle(tmp_path / "two", roles=("denoise", "commit"))
    done = run("generate", folder, *PROMPT, "--memory", "lean")
    assert (done.code, done.out) == (2, "")
    assert "runs on the graph 'commit_denoise'" in done.err
    assert "use memory 'fast'" in done.err


def test_a_small_machine_is_warned_of_before_loading(run, whole, monkeypatch):
    """Both numbers; the work goes on."""
    monkeypatch.setattr(memory, "available", lambda: 1_000_000)
    done = run("generate", whole, *PROMPT)
    assert done.code == 0
    assert "note: memory fast needs 100." in done.err
    assert "this machine has 1.0 MB available: use fewer slots, or memory 'lean'" in done.err


def test_inspect_shows_both_plans(run, whole):
    """As JSON and as a table, the default marked."""
    found = run("inspect", whole, "--json").json["memory"]
    assert found["default"] == "fast"
    assert {mode: plan["sessions"] for mode, plan in found["plans"].items()} == {
        "lean": ["commit_denoise"],
        "fast": ["denoise", "commit_denoise"],
    }
    table = run("inspect", whole).out
    assert "fast (default)" in table
    assert f"{found['plans']['lean']['total']:,}" in table
