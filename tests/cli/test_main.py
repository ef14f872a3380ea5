"""The command itself: help, version, how it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fixedstate import __version__
from fixedstate.cli import VERBS, cli, main
from fixedstate.cli.output import echo_json

HELP = Path(__file__).with_name("help.txt")


def fixedstate(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "fixedstate", *args], text=True, check=False, **options
    )


def commands() -> list[tuple[str, ...]]:
    """Every command as its words: a verb, or a group and then each command in it."""
    out: list[tuple[str, ...]] = []
    for verb in VERBS:
        found = cli.get_command(click.Context(cli), verb)
        out += [(verb,), *((verb, name) for name in getattr(found, "commands", ()))]
    return out


GROUPS = {words[:1] for words in commands() if len(words) > 1}


def test_help_is_as_recorded(run):
    """The words of the command line are an interface: a change of them shows in the diff.

    `UPDATE_HELP=1 pytest tests/cli/test_main.py` records them anew.
    """
    pages = [run("--help").out, *(run(*words, "--help").out for words in commands())]
    text = "\n".join(pages)
    if os.environ.get("UPDATE_HELP") == "1":
        HELP.write_text(text)
    assert text == HELP.read_text()


@pytest.mark.parametrize("words", sorted(set(commands()) - GROUPS), ids=" ".join)
def test_every_command_has_json_and_debug(run, words):
    """JSON by an option, or as the only form there is."""
    text = run(*words, "--help").out
    assert "JSON" in text
    assert "--debug" in text


def test_version(run):
    assert run("--version").out == f"fixedstate {__version__}\n"


def test_no_verb_is_a_usage_error_with_help(run):
    done = run()
    assert (done.code, done.out) == (2, "")
    assert "Commands:" in done.err


def test_main_returns_the_code(capsys):
    """The console script exits with what `main` returns."""
    assert main(["--version"]) == 0
    assert main(["inspect", "/nowhere/at/all"]) == 1
    assert main(["inspect"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_reader_that_leaves_is_no_traceback(tmp_path, bundle):
    """`fixedstate inspect ... | head -1` says nothing on standard error."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = fixedstate("inspect", str(bundle), stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_module_runs_as_the_command():
    done = fixedstate("--version", capture_output=True)
    assert (done.returncode, done.stdout) == (0, f"fixedstate {__version__}\n")


def test_json_keeps_lists_of_numbers_on_one_line(capsys):
    """A thousand ids are a thousand lines otherwise; the document stays the same."""
    data = {"ids": [1, 2, 3], "nested": [[1.5], {"a": [None]}], "text": "[\n 1,\n  2]", "none": []}
    echo_json(data)
    text = capsys.readouterr().out
    assert json.loads(text) == data
    assert '"ids": [1, 2, 3]' in text
