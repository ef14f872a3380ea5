"""Blocks marked `console` in README.md and docs/ are run and give the output that they show.

A line that starts with `$ ` is a command (`> ` continues it); the lines up to the next command
are its output, standard error included. `...` stands for any text, for a whole run of lines as
well. The commands of a file run one after the other in one folder that holds `examples` and
nothing else; each has to exit with 0. Blocks with another mark (`text`, `python`, none) are not
run.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```console[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    line: int  # in the page, from 1
    command: str
    output: str


def steps_of(text: str) -> list[Step]:
    steps = []
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1)) + 1
        for number, line in enumerate(block.group(1).splitlines(), first):
            if line.startswith("$ "):
                steps.append(Step(number, line[2:], ""))
                continue
            if not steps or steps[-1].line < first:
                raise ValueError(f"line {number}: output before a command")
            last = steps.pop()
            if line.startswith("> ") and not last.output:
                steps.append(Step(last.line, f"{last.command}\n{line[2:]}", ""))
            else:
                steps.append(Step(last.line, last.command, f"{last.output}{line}\n"))
    return steps


def same(shown: str, got: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown, got, flags)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_console_blocks_do_what_they_show(page, tmp_path):
    """A page is wrong as soon as a command in it is."""
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {**os.environ, "PATH": commands, "HOME": str(tmp_path), "COLUMNS": "100", "NO_COLOR": "1"}
    for step in steps_of(page.read_text()):
        done = subprocess.run(
            ["bash", "-c", step.command],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        where = f"{page.name}:{step.line}: $ {step.command}"
        assert done.returncode == 0, f"{where}\nexit {done.returncode}\n{done.stdout}"
        assert same(step.output, done.stdout), (
            f"{where}\nshown:\n{step.output}\ngot:\n{done.stdout}"
        )


def test_readme_opens_with_the_session():
    """A reader sees what it does and what it does not do without scrolling."""
    opening = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    commands = " ".join(step.command for step in steps_of(opening))
    assert "fixedstate export" in commands
    assert "fixedstate generate" in commands
    assert "does not" in opening.lower()


def test_readme_is_finished():
    """A placeholder is not an answer."""
    assert "TODO" not in (ROOT / "README.md").read_text()


def test_steps_are_read_as_written():
    """The reader of the blocks is a parser of its own, so it is tried on known text."""
    page = "x\n```text\n$ no\n```\n```console\n$ a \\\n> b\nout\n  more\n$ c\n```\n"
    assert steps_of(page) == [Step(6, "a \\\nb", "out\n  more\n"), Step(10, "c", "")]


def test_ellipsis_stands_for_any_text():
    assert same("took ... s\n...\nend\n", "took 1.2 s\nx\ny\nend\n")
    assert not same("took ... s\n", "took long\n")
