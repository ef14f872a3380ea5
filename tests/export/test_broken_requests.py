"""Number 3 of the engines: requests and engines that cannot work, each with its one sentence.

The table of docs/engines.md shows most of them, word for word: what it says is compared here.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
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
DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"
RTX_VERSION, TRT_VERSION = "1.7.1.116", "11.4.0.106"

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


SHOWN = {
    "a range that falls": "`--batch 8:1:1`",
    "more elements than TensorRT counts": "`--batch 1:1:2000000000`",
    "more blocks than the cache holds": "`--blocks 1:1:1000 --capacity 8:64:512`",
    "a card of the other product": "TensorRT-RTX for 9.0",
    "bfloat16 on a card that has none": "bf16 for 7.5",
    "plugins that float32 cannot have": "plugins required, fp32",
    "a precision as a flag": "`--builder-flag FP16`",
    "stripped weights without a card": "`--builder-flag STRIP_PLAN`, no card",
    "a timing cache of TensorRT-RTX": "a timing cache, TensorRT-RTX",
    "no TensorRT": "TensorRT is not installed",
}
"""Rows of the table in docs/engines.md, by request."""


def _failed(stage: str, *texts: str, **more: object) -> dict[str, object]:
    return {"ok": False, "stage": stage, "texts": list(texts), **more}


def _error(node: str, op: str, text: str) -> dict[str, str]:
    return {"node": node, "op": op, "text": text}


ENDS: dict[str, tuple[str, str, engineprocess.Finished]] = {
    "the parser fails": (
        "tensorrt",
        TRT_VERSION,
        engineprocess.Finished(
            _failed(
                "parse",
                errors=[
                    _error("layers.0.scan", "Scan", "Assertion failed: scan axis must be 0"),
                    _error("layers.1.pad", "Pad", "INVALID_NODE: pads are not constant"),
                ],
            ),
            *(0, 0, 1.0, ""),
        ),
    ),
    "the builder gives nothing": (
        "tensorrt",
        TRT_VERSION,
        engineprocess.Finished(
            _failed("build", "Error Code 10: no implementation for node MatMul_7."),
            *(0, 0, 1.0, ""),
        ),
    ),
    "the builder ends its process": (
        "tensorrt-rtx",
        RTX_VERSION,
        engineprocess.Finished(
            None, -signal.SIGABRT, 0, 1.0, "terminate called without an active exception"
        ),
    ),
    "memory runs out": (
        "tensorrt",
        TRT_VERSION,
        engineprocess.Finished(None, -signal.SIGKILL, 21_400_000_000, 1.0, ""),
    ),
}
"""How the process that builds can end, by row; test_engine.py lets it end so for real."""

OTHERS = {
    "plugins of another version",
    "it takes too long",
    "an edited plan",
    "another version, system or card",
    "plans without weights, nothing beside them",
    "another graph",
}
"""Rows that tests of their own compare."""


def documented() -> dict[str, str]:
    """Message by request, as the table of docs/engines.md has them."""
    section = DOCUMENT.read_text().split("## When it does not work\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return dict(rows[2:])


def assert_documented(row: str, message: str) -> None:
    """Dots in the table stand for anything, and one hash for another."""
    shown = documented()[row]
    hashes = re.compile(r"[0-9a-f]{16}(?=\.\.\.)")
    words = re.escape(hashes.sub("HASH", shown)).replace(re.escape("..."), ".*")
    pattern = words.replace("HASH", "[0-9a-f]{16}")
    assert re.fullmatch(pattern, message), f"{row}:\n  shown: {shown}\n  said:  {message}"


def test_every_row_of_the_table_is_compared() -> None:
    assert set(documented()) == {*SHOWN.values(), *ENDS, *OTHERS}
    assert set(SHOWN) <= set(REQUESTS)


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
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    if name in SHOWN:
        assert_documented(SHOWN[name], done.stderr.removeprefix("error: ").strip())
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
    assert "it is registered in version '2', not '1'" in str(info.value)
    assert_documented("plugins of another version", str(info.value))


@pytest.mark.parametrize("row", ENDS)
def test_a_build_that_ends_badly(row: str) -> None:
    """What is made of how its process ended."""
    target, version, finished = ENDS[row]
    with pytest.raises(BackendError) as info:
        engineprocess.require(finished, target, version, "denoise")
    assert_documented(row, str(info.value))


def test_a_build_that_takes_too_long() -> None:
    with pytest.raises(BackendError) as info:
        engineprocess._check_time(time.monotonic() - 601, 600)
    assert_documented("it takes too long", str(info.value))


# --- engines -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineFolder:
    """An engine of stand-in plans, for 8.9 and 12.0, by a relative path."""
    monkeypatch.chdir(tmp_path)
    source = write_placeholder_bundle(Path("log.bundle"))
    Path("log.engine").mkdir()
    return fill_engine(Path("log.engine"), source, identity_of(source))


def test_an_edited_plan(folder: EngineFolder) -> None:
    (folder.path / "denoise.plan").write_bytes(b"another plan")
    done = CliRunner().invoke(cli, ["inspect", str(folder.path)])
    assert done.exit_code == 1
    assert "denoise.plan was changed after the build: sha256 " in done.stderr
    assert_documented("an edited plan", done.stderr.removeprefix("error: ").strip())


def test_a_newer_schema(folder: EngineFolder) -> None:
    file = folder.path / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema": 99}))
    done = CliRunner().invoke(cli, ["inspect", str(folder.path)])
    assert done.exit_code == 1
    assert "has schema 99, this version reads up to 1" in done.stderr


def test_another_version_card_and_system(folder: EngineFolder) -> None:
    """All that differs, both sides, and the command that builds it again."""
    identity = folder.identity
    here = Here(identity.product, "9.9.9", "windows-x86_64", (Card("7.5", "RTX 2080"),))
    text = folder.refusal(here)
    assert text is not None
    assert identity.version in text
    assert "here is TensorRT" in text
    assert "9.9.9" in text
    assert "windows-x86_64" in text
    assert "has 7.5" in text
    assert "fixedstate build BUNDLE --target" in text
    newer = replace(here, version="1.8.0.5", os=identity.os)
    assert_documented("another version, system or card", folder.refusal(newer) or "")


def test_plans_without_weights(folder: EngineFolder) -> None:
    """Where all else fits, since nothing would say that its passes compute with no weights.

    An engine whose folder holds them is refitted: tests/export/test_refit.py.
    """
    identity = folder.identity
    here = Here(identity.product, identity.version, identity.os, (Card("8.9"),))
    assert folder.refusal(here) is None
    stripped = replace(identity, flags={**identity.flags, "STRIP_PLAN": True})
    text = replace(folder, identity=stripped).refusal(here)
    assert_documented("plans without weights, nothing beside them", text or "")


def test_another_graph(folder: EngineFolder) -> None:
    """The engine of another export of the model."""
    other = write_placeholder_bundle(Path("other.bundle"), graphs="another graph")
    text = other_model(folder.identity, other)
    assert text is not None
    assert "its denoise was built from graph" in text
    assert "build it again" in text
    assert_documented("another graph", text)
