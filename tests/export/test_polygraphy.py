"""Polygraphy itself on what `check --save-inputs --save-outputs` wrote: users go on with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from toy_bundle import write_toy_bundle

from fixedstate.bundle import Bundle
from fixedstate.cli import cli
from fixedstate.errors import BackendError, UsageError
from fixedstate.export.passfiles import KeptPass, keep_passes, save_passes

TINY = ("tiny-attention", "tiny-mamba", "tiny-hybrid")
ROLES = ("denoise", "commit")


def polygraphy(*words: str | Path) -> subprocess.Popen[str]:
    """The tool, as it is on a user's path; it installs nothing."""
    script = Path(sys.executable).with_name("polygraphy")
    env = {**os.environ, "POLYGRAPHY_AUTOINSTALL_DEPS": "0"}
    return subprocess.Popen(
        [str(script), *map(str, words)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_beside(graph: Path, inputs: Path, outputs: Path) -> subprocess.Popen[str]:
    """Its ONNX Runtime, with its own settings, beside what we saved."""
    loads = ("--load-inputs", inputs, "--load-outputs", outputs, "--atol", "1e-4")
    return polygraphy("run", graph, "--onnxrt", *loads)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    roles = (*ROLES, "commit_denoise")
    return Bundle.open(write_toy_bundle(tmp_path_factory.mktemp("toy") / "b", roles=roles))


@pytest.mark.parametrize("name", TINY)
def test_polygraphy_agrees_on_every_tiny_bundle(bundle_path, tmp_path: Path, name: str) -> None:
    """`polygraphy run` PASSED and `inspect model`, for denoise and commit."""
    folder = bundle_path(name, fused=True)
    saved = {option: tmp_path / option for option in ("inputs", "outputs")}
    words = ["check", str(folder), "--against", str(folder), "--quick"]
    for option, place in saved.items():
        words += [f"--save-{option}", str(place)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "PASSED"
    assert "[I]" not in done.stdout  # Polygraphy's own words
    runs = {
        role: run_beside(
            folder / f"{role}.onnx",
            saved["inputs"] / f"{role}.json",
            saved["outputs"] / f"{role}.json",
        )
        for role in ROLES
    }
    looks = {role: polygraphy("inspect", "model", folder / f"{role}.onnx") for role in ROLES}
    for running in runs.values():
        said = running.communicate()[0]
        assert running.returncode == 0, said
        assert said.rstrip().splitlines()[-1].startswith("[I] PASSED | Runtime: "), said
        assert "Accuracy Comparison | onnxrt-runner-N0" in said
        assert "Pass Rate: 100.00%" in said
    bundle = Bundle.open(folder, verify_weights=False)
    for role, looking in looks.items():
        said = looking.communicate()[0]
        assert looking.returncode == 0, said
        graph = bundle.graph(role)
        assert f"{len(graph.inputs)} Graph Input(s)" in said
        assert f"{len(graph.outputs)} Graph Output(s)" in said
        assert all(port.name in said for port in (*graph.inputs, *graph.outputs))


def test_VE_04_polygraphy_fails_on_scaled_outputs(toy: Bundle, tmp_path: Path) -> None:
    """What was saved is what is compared: other numbers do not pass."""
    kept = keep_passes(toy)
    one = kept["denoise"]
    scaled = {name: array * np.float32(1.87) for name, array in one.outputs.items()}
    save_passes(
        {"denoise": KeptPass(one.inputs, scaled)}, tmp_path / "inputs", tmp_path / "outputs"
    )
    running = run_beside(
        toy.path / "denoise.onnx",
        tmp_path / "inputs" / "denoise.json",
        tmp_path / "outputs" / "denoise.json",
    )
    said = running.communicate()[0]
    assert running.returncode == 1, said
    assert re.search(r"FAILED \| Output: 'logits'", said)


def test_VE_02_saved_passes_are_real_ones(toy: Bundle) -> None:
    """Ids in range, both rows behind their prompt, states that tokens made; not random floats."""
    kept = keep_passes(toy)
    assert set(kept) == {*ROLES, "commit_denoise"}
    spec, length = toy.spec, toy.spec.block_len
    for role, one in kept.items():
        graph = toy.graph(role)
        assert set(one.inputs) == {port.name for port in graph.inputs}
        assert set(one.outputs) == {port.name for port in graph.outputs}
        ids = one.inputs["input_ids"]
        assert len(ids) == 2
        assert ids.min() >= 0
        assert (ids < spec.vocab_size).all() or role != "commit"
        assert (one.inputs["past_length"] >= length).all()
        keys = one.inputs["past_key_000"]
        for row, past in enumerate(one.inputs["past_length"].tolist()):
            tokens = keys[row, 0, :past, 0]  # the toy's keys hold the token
            assert ((tokens >= 0) & (tokens < spec.vocab_size) & (tokens == tokens.round())).all()
    assert spec.mask_id in kept["denoise"].inputs["input_ids"]
    assert (kept["commit"].inputs["commit_length"] == length).all()
    before = kept["commit"].inputs["past_ssm_state_001"]
    after = kept["commit"].outputs["present_ssm_state_001"]
    assert (before != after).any()


def test_folders_appear_whole(toy: Bundle, tmp_path: Path) -> None:
    """One of the two alone, and nothing over what is there."""
    kept = keep_passes(toy)
    files = save_passes(kept, inputs=tmp_path / "a")
    assert sorted(file.name for file in files) == [
        "commit.json",
        "commit_denoise.json",
        "denoise.json",
    ]
    assert sorted((tmp_path / "a").iterdir()) == sorted(files)
    with pytest.raises(UsageError, match="exists"):
        save_passes(kept, outputs=tmp_path / "a")


def test_a_bundle_without_state_is_refused(toy: Bundle) -> None:
    with pytest.raises(UsageError, match="no graphs that carry state"):
        keep_passes(replace(toy, graphs={"denoise": toy.graphs["denoise"]}))


def test_without_the_package_the_remedy_is_said(
    toy: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is run."""
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    words = ["check", str(toy.path), "--save-inputs", str(tmp_path / "a")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 1
    assert "`pip install polygraphy`" in done.stderr
    assert not (tmp_path / "a").exists()
    with pytest.raises(BackendError, match="not installed"):
        save_passes({}, tmp_path / "a")
