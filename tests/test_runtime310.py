"""The runtime half on Python 3.10, numpy 1.26 and ONNX Runtime 1.23.2, without PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fixedstate.cli import cli
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.runtime.text import Text

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(900)  # the first use installs the environment
def test_old_environment_is_what_it_says(runtime310):
    """Every test that uses the fixture is worth nothing if the versions are others."""
    program = (
        "import sys, numpy, onnxruntime as ort, importlib.util as u\n"
        "print(*sys.version_info[:2], numpy.__version__, ort.__version__, u.find_spec('torch'))"
    )
    assert runtime310.run("-c", program).stdout.split() == ["3", "10", "1.26.4", "1.23.2", "None"]


def test_runtime_imports_on_the_old_environment(runtime310):
    """JetPack 6 has nothing newer."""
    runtime310.run("-W", "error", "-c", "import fixedstate.runtime, fixedstate.cli")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tiny-attention", "tiny-mamba", "tiny-hybrid"])
def test_shipped_models_give_the_same_answers_on_the_old_environment(runtime310, bundle_path, name):
    """The exported graphs are read by an ONNX Runtime nine versions older, to the same tokens."""
    bundle = bundle_path(name)
    # questions whose answers the models know: elsewhere two rounding orders may break a near tie
    prompts = ["set arm_3 17\nbattery low\nget arm_3\n", "set cam_1 5\nmove cam_1\nget cam_1\n"]
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    settings = ["--max-new-tokens", "24", "--seed", "3", "--threads", "1", "--json"]
    command = ["generate", str(bundle), *arguments, *settings]
    old = json.loads(runtime310.run("-m", "fixedstate", *command).stdout)
    new = CliRunner().invoke(cli, command)
    assert new.exit_code == 0, new.stderr
    same = ("text", "token_ids", "finish_reason", "blocks", "denoise_passes", "state_bytes")
    for ours, theirs in zip(json.loads(new.stdout), old, strict=True):
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


@pytest.mark.timeout(900)
def test_saved_states_on_the_old_environment(runtime310):
    """Their own tests, and a state made there is the file that is made here."""
    tests = ("tests/runtime/test_snapshot.py", "tests/runtime/test_prefix.py")
    options = ("-q", "-p", "no:cacheprovider", "-W", "error")
    done = runtime310.run("-m", "pytest", *options, *tests, cwd=ROOT)
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.timeout(900)
def test_saved_states_travel_to_the_old_environment(runtime310, bundle_path, tmp_path):
    """A file made on one side goes on on the other, to the tokens it has at home."""
    bundle = bundle_path("tiny-mamba")
    ids = Text.open(bundle).encode("set arm_3 17\nbattery low\nset cam_1 5\nmove cam_1\n")
    words = ("prefix", "make", bundle, "--ids", ",".join(map(str, ids)), "--threads", "1", "-o")
    runtime310.run("-m", "fixedstate", *words, tmp_path / "old.state")
    new = CliRunner().invoke(cli, [*map(str, words), str(tmp_path / "new.state")])
    assert new.exit_code == 0, new.stderr
    shown = runtime310.run("-m", "fixedstate", "prefix", "show", tmp_path / "new.state").stdout
    state = Snapshot.load(tmp_path / "old.state")
    assert json.loads(shown)["past_length"] == state.past_length
    for name, array in Snapshot.load(tmp_path / "new.state").arrays.items():
        np.testing.assert_allclose(state.arrays[name], array, atol=1e-4, err_msg=name)
    with load(bundle, threads=1) as decoder:
        question = Text.open(bundle).encode("get arm_3\n")
        for name in ("old", "new"):
            prefix = Snapshot.load(tmp_path / f"{name}.state")
            request = Request(question, Settings(24), prefix=prefix)
            answer = decoder.generate([request])[0].token_ids
            assert Text.open(bundle).decode(answer) == '{"arm_3": 17}'
