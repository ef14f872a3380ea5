"""Number 3 of the engines: requests and engines that cannot work, each with its one sentence.

Run with `-s` to read them; docs/engines.md shows the same list.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trt_builder_stand_in as stand_in
from click.testing import CliRunner
from sample_engine import fill_engine, identity_of, write_placeholder_bundle

from fixedstate.bundle import Bundle
from fixedstate.cli import cli
from fixedstate.errors import BackendError
from fixedstate.export import engine, engineprocess
from fixedstate.export.profiles import BuildRequest
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.runtime.identity import Card, Here, other_model

RTX = ("--target", "tensorrt-rtx")
TRT = ("--target", "tensorrt", "--compute-capability", "9.0", "--plugins", "none")
HUGE = "1:1:2000000000"

REQUESTS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "a range that falls": (
        (*RTX, "--batch", "8:1:1"),
        2,
        "--batch '8:1:1': the range 8:1:1 does not satisfy 1 <= least <= usual <= most",
    ),
    "a size of zero": ((*RTX, "--blocks", "0:1:8"), 2, "--blocks '0:1:8': the range 0:1:8 does"),
    "no range": ((*RTX, "--capacity", "1:8"), 2, "--capacity '1:8' is neither least:usual:most"),
    "more elements than TensorRT counts": (
        (*RTX, "--batch", HUGE),
        1,
        "TensorRT counts at most 2,147,483,647 in one tensor: lower --batch",
    ),
    "more blocks than the cache holds": (
        (*RTX, "--blocks", "1:1:1000", "--capacity", "8:64:512"),
        2,
        "of 8 tokens never fits --capacity 8:64:512: lower --blocks to 64 or raise --capacity to",
    ),
    "a card of the other product": (
        (*RTX, "--compute-capability", "9.0"),
        1,
        "capability 9.0: tensorrt-rtx builds for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1; build it with --t",
    ),
    "bfloat16 on a card that has none": (
        (*RTX, "--compute-capability", "7.5", "--precision", "bf16"),
        1,
        "compute capability 7.5 has no bfloat16 in tensorrt-rtx (8.0 and newer have)",
    ),
    "plugins that float32 cannot have": (
        (*RTX, "--plugins", "required", "--precision", "fp32"),
        1,
        "plugins are required and not every node can be one",
    ),
    "a role that is not there": (
        (*RTX, "--roles", "denoise,prefill"),
        1,
        "has no graph 'prefill' (it has commit, denoise): export it again with that role",
    ),
    "a layer that is not there": (
        (*RTX, "--fp32-layers", "0,7"),
        2,
        "fp32_layers names layer 7; the model has layers 0 to 2",
    ),
    "a precision as a flag": (
        (*RTX, "--builder-flag", "FP16"),
        1,
        "builder flag FP16: the network is strongly typed and takes none; choose --precision",
    ),
    "stripped weights without a card": (
        (*RTX, "--builder-flag", "STRIP_PLAN"),
        1,
        "builder flag STRIP_PLAN: the builder runs a kernel on a card for it, and here is no",
    ),
    "a timing cache of TensorRT-RTX": (
        (*RTX, "--timing-cache", "times"),
        1,
        "timing cache times: tensorrt-rtx has none: it times nothing when it builds",
    ),
    "newer versions with TensorRT-RTX": (
        (*RTX, "--version-compatible"),
        1,
        "version compatibility: tensorrt-rtx has none; its engines name their compute",
    ),
    "several cards with TensorRT": (
        (*TRT, "--compute-capability", "8.7"),
        1,
        "2 compute capabilities (9.0, 8.7): tensorrt builds for the one card of the machine",
    ),
    "no TensorRT": (TRT, 1, "TensorRT is not installed (no module 'tensorrt'); install"),
}


@pytest.fixture(scope="session")
def bundle(bundle_path: Callable[..., Path]) -> Path:
    return bundle_path("F3")


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands here holds for a machine without one."""
    monkeypatch.setattr(engine, "first_card", lambda: None)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_cannot_work(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One sentence on standard error, 1 for what cannot be done, 2 for what makes no sense."""
    words, code, said = REQUESTS[name]
    if name != "no TensorRT":
        monkeypatch.setattr(engineprocess, "run", lambda *a, **k: pytest.fail("TensorRT was asked"))
    target = tmp_path / "my.engine"
    done = CliRunner().invoke(
        cli, ["build", str(bundle), "-o", str(target), *words], prog_name="fixedstate"
    )
    print(f"{name}: fixedstate build BUNDLE {' '.join(words)}\n    {done.stderr}", end="")
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there(bundle: Path, tmp_path: Path) -> None:
    """Refused before anything is planned."""
    done = CliRunner().invoke(cli, ["build", str(bundle), "-o", str(tmp_path), *RTX])
    assert done.exit_code == 2
    assert "exists: choose another name or add --force" in done.stderr


def test_a_damaged_graph(bundle: Path, tmp_path: Path) -> None:
    """Found by its hash, before a parser sees it."""
    broken = tmp_path / "broken.bundle"
    shutil.copytree(bundle, broken)
    (broken / "denoise.onnx").write_bytes((broken / "denoise.onnx").read_bytes()[:-7])
    done = CliRunner().invoke(cli, ["build", str(broken), "-o", str(tmp_path / "e"), *RTX])
    assert done.exit_code == 1
    assert "denoise.onnx was changed after the export" in done.stderr


def test_a_missing_plugin(bundle_path, tmp_path: Path, monkeypatch) -> None:
    """A TensorRT in which the plugins are of another version."""
    stand_in.install(monkeypatch, tmp_path, registry={"version": "2"})
    request = BuildRequest(target="tensorrt", capabilities=("9.0",), roles=("denoise",))
    with pytest.raises(BackendError) as info:
        engine.build(Bundle.open(bundle_path("F3")), request, tmp_path / "e")
    print(info.value)
    assert "it is registered in version '2', not '1'" in str(info.value)


# --- engines -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> EngineFolder:
    """An engine of stand-in plans, for 8.9 and 12.0."""
    source = write_placeholder_bundle(tmp_path / "my.bundle")
    (tmp_path / "my.engine").mkdir()
    return fill_engine(tmp_path / "my.engine", source, identity_of(source))


def test_an_edited_plan(folder: EngineFolder) -> None:
    (folder.path / "denoise.plan").write_bytes(b"another plan")
    done = CliRunner().invoke(cli, ["inspect", str(folder.path)])
    assert done.exit_code == 1
    assert "denoise.plan was changed after the build: sha256 " in done.stderr
    print(done.stderr)


def test_a_newer_schema(folder: EngineFolder) -> None:
    file = folder.path / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 99}))
    done = CliRunner().invoke(cli, ["inspect", str(folder.path)])
    assert done.exit_code == 1
    assert "has schema 99, this version reads up to 1" in done.stderr
    print(done.stderr)


def test_another_version_card_and_system(folder: EngineFolder) -> None:
    """All that differs, both sides, and the command that builds it again."""
    identity = folder.identity
    here = Here(identity.product, "9.9.9", "windows-x86_64", (Card("7.5", "RTX 2080"),))
    text = folder.refusal(here)
    assert text is not None
    print(text)
    assert identity.version in text
    assert "here is TensorRT" in text
    assert "9.9.9" in text
    assert "windows-x86_64" in text
    assert "has 7.5" in text
    assert "fixedstate build BUNDLE --target" in text


def test_another_graph(folder: EngineFolder, tmp_path: Path) -> None:
    """The engine of another export of the model."""
    other = write_placeholder_bundle(tmp_path / "other.bundle", graphs="another graph")
    text = other_model(folder.identity, other)
    assert text is not None
    print(text)
    assert "its denoise was built from graph" in text
    assert "build it again" in text
