"""The runtime half on Python 3.10, numpy 1.26 and ONNX Runtime 1.23.2, without PyTorch."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fixedstate.cli import cli


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
