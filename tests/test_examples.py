"""The programs in examples/ and the `python` blocks of docs/ do what they say."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fixedstate.bundle import Bundle
from fixedstate.cli.inspect import describe
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.laws import check_bundle
from fixedstate.runtime.sampling import uniforms

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ROOT / "examples" / "plain_onnxruntime.py"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON_PAGES = [
    page for page in sorted((ROOT / "docs").glob("*.md")) if PYTHON_BLOCK.search(page.read_text())
]


def load_program(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- plain_onnxruntime.py ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F2-forward", "F3", "F4"])
@pytest.mark.parametrize("length", [0, 5, 8, 19, 251], ids=lambda n: f"prompt of {n}")
def test_plain_onnxruntime_decodes_the_same_tokens(bundle_path, name, length):
    """The names and rules in docs/bundle.md are enough to decode without this package.

    251 tokens take two slices of prefill, and the answer passes the first 256 columns of keys.
    """
    folder = bundle_path(name)
    about = json.loads(json.dumps(describe(Bundle.open(folder))))
    prompt = np.random.default_rng(length).integers(3, 36, length).tolist()
    plain = load_program(PLAIN)
    found = plain.decode(plain.Row(folder, about), about, prompt, 30)
    with load(folder, threads=1) as decoder:
        (expected,) = decoder.generate([Request(prompt, Settings(max_new_tokens=30))])
    assert found == list(expected.token_ids)


def test_plain_onnxruntime_from_a_shell(bundle_path, tmp_path):
    """As its docstring says: a file that `inspect --json` wrote, ids in, ids out."""
    folder = bundle_path("F3")
    description = tmp_path / "about.json"
    with description.open("w") as file:
        command = [sys.executable, "-m", "fixedstate", "inspect", str(folder), "--json"]
        subprocess.run(command, stdout=file, check=True)
    done = subprocess.run(
        [sys.executable, PLAIN, folder, description, "--prompt-ids", "1,2,3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+(,\d+)*\n", done.stdout)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("model", "objective", "causal"), "objective is causal"),
        (("model", "logit_shift", True), "predict the next position"),
        (("ports", 1, "scope", "step"), "from pass to pass"),
    ],
)
def test_plain_onnxruntime_refuses_what_it_does_not_do(
    bundle_path, tmp_path, capsys, change, words
):
    """A model it would decode wrongly is refused, not decoded."""
    folder = bundle_path("F2")
    about = describe(Bundle.open(folder))
    *path, key, value = change
    place = about
    for step in path:
        place = place[step]
    place[key] = value
    description = tmp_path / "about.json"
    description.write_text(json.dumps(about))
    assert load_program(PLAIN).main([str(folder), str(description)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err


def test_plain_onnxruntime_imports_nothing_of_ours():
    """It shows that the files on disk are enough."""
    names = set()
    for node in ast.walk(ast.parse(PLAIN.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names - sys.stdlib_module_names == {"numpy", "onnxruntime"}


# --- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch, bundle_path):
    """The blocks of a page run one after the other, as one program; log.bundle is tiny-hybrid's."""
    blocks = PYTHON_BLOCK.findall(page.read_text())
    monkeypatch.chdir(tmp_path)
    if any("log.bundle" in block for block in blocks):
        Path("log.bundle").symlink_to(bundle_path("tiny-hybrid"))
    names = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, f"{page.name}: {block.splitlines()[0]}", "exec"), names)


@pytest.mark.parametrize("function", [load, Settings, check_bundle, export_bundle])
def test_every_argument_is_in_the_page(function):
    """docs/python.md is the reference of what can be given."""
    page = (ROOT / "docs" / "python.md").read_text()
    names = inspect.signature(function).parameters
    assert not [name for name in names if not re.search(rf"[`(]{name}\b", page)]


def test_seed_recipe_gives_the_numbers_that_are_drawn():
    """Another implementation can reproduce a sampled answer from docs/decoding.md."""
    names = {}
    for block in PYTHON_BLOCK.findall((ROOT / "docs" / "decoding.md").read_text()):
        exec(block, names)
    u, _ = uniforms(names["seed"], names["past_length"], names["step"], names["L"])
    assert names["u"].tolist() == u.tolist()
