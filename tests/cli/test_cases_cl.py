"""Cases CL of the case list: exit codes, one-line errors, whole outputs or none."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fixedstate.bundle import MANIFEST, WEIGHTS
from fixedstate.cli import VERBS, cli

# --- CL-01: a failing input gives one line on standard error and a code other than 0


def _edit(folder: Path, **entries) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def _missing(folder: Path) -> None:
    (folder / "denoise.onnx").unlink()


def _one_byte(folder: Path) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[500] ^= 1
    (folder / WEIGHTS).write_bytes(raw)


BAD_BUNDLES = {
    "newer-schema": (lambda folder: _edit(folder, schema=99), "schema 99"),
    "not-json": (lambda folder: (folder / MANIFEST).write_text("{"), "damaged"),
    "unknown-key": (lambda folder: _edit(folder, extra=1), "extra"),
    "graph-missing": (_missing, "denoise.onnx is missing"),
    "one-byte-changed": (_one_byte, "changed after the export"),
    "no-manifest": (lambda folder: (folder / MANIFEST).unlink(), "not a bundle"),
}


def assert_one_line(done, *, words: str, code: int | None = None) -> None:
    assert done.code in ({1, 2} if code is None else {code}), done
    assert done.out == ""
    assert len(done.lines) == 1, done.err
    assert done.lines[0].startswith("error: ")
    assert words in done.lines[0]


@pytest.mark.parametrize("verb", ["generate", "chat", "serve", "inspect", "check"])
@pytest.mark.parametrize("fault", BAD_BUNDLES)
def test_CL_01_failing_bundle_exits_nonzero(run, bundle, verb, fault):
    """A script that goes on with a damaged bundle decodes nonsense."""
    damage, words = BAD_BUNDLES[fault]
    damage(bundle)
    options = {"generate": ["--prompt-ids", "1"], "serve": ["--port", "0"]}.get(verb, [])
    assert_one_line(run(verb, bundle, *options), words=words, code=1)


@pytest.mark.parametrize("verb", ["generate", "chat", "serve", "inspect", "check"])
@pytest.mark.parametrize("what", ["absent", "file", "empty-folder"])
def test_CL_01_no_bundle_exits_nonzero(run, tmp_path, verb, what):
    path = tmp_path / what
    if what == "file":
        path.write_text("x")
    if what == "empty-folder":
        path.mkdir()
    options = {"generate": ["--prompt-ids", "1"], "serve": ["--port", "0"]}.get(verb, [])
    assert_one_line(run(verb, path, *options), words=str(path), code=1)


BAD_OPTIONS = {
    "generate-no-prompt": (("generate", "b"), "no prompt"),
    "generate-ids": (("generate", "b", "--prompt-ids", "1,x"), "'x' is not a token id"),
    "generate-negative-id": (("generate", "b", "--prompt-ids", "-1"), "'-1' is not a token id"),
    "generate-float-id": (("generate", "b", "--prompt-ids", "1.5"), "'1.5' is not a token id"),
    "generate-zero-tokens": (("generate", "b", "--prompt", "", "--max-new-tokens", "0"), "x>=1"),
    "generate-negative-tokens": (("generate", "b", "--prompt", "", "--max-new-tokens=-3"), "-3"),
    "generate-negative-least": (("generate", "b", "--prompt", "", "--min-new-tokens=-1"), "-1"),
    "generate-least-above-most": (
        ("generate", "b", "--prompt", "", "--min-new-tokens", "9", "--max-new-tokens", "8"),
        "min_new_tokens 9 must not exceed max_new_tokens 8",
    ),
    "generate-threshold-high": (("generate", "b", "--prompt", "", "--threshold", "1.1"), "0 and 1"),
    "generate-threshold-low": (("generate", "b", "--prompt", "", "--threshold=-0.1"), "0 and 1"),
    "generate-threshold-nan": (("generate", "b", "--prompt", "", "--threshold", "nan"), "0 and 1"),
    "generate-temperature": (("generate", "b", "--prompt", "", "--temperature=-1"), "0 or more"),
    "generate-temperature-nan": (("generate", "b", "--prompt", "", "--temperature", "nan"), "nan"),
    "generate-temperature-inf": (("generate", "b", "--prompt", "", "--temperature", "inf"), "inf"),
    "generate-steps": (("generate", "b", "--prompt", "", "--steps", "0"), "--steps"),
    "generate-seed": (("generate", "b", "--prompt", "", "--seed", str(2**64)), "--seed"),
    "generate-threads": (("generate", "b", "--prompt", "", "--threads", "0"), "--threads"),
    "generate-context": (("generate", "b", "--prompt", "", "--max-context", "0"), "--max-context"),
    "generate-not-utf8": (("generate", "b", "--prompt", "\udcff"), "not UTF-8"),
    "generate-unknown-option": (("generate", "b", "--top-k", "3"), "--top-k"),
    "generate-samples": (("generate", "b", "--prompt", "", "--samples", "0"), "--samples"),
    "generate-slots": (("generate", "b", "--prompt", "", "--slots", "0"), "--slots"),
    "generate-batch-no-output": (("generate", "b", "--prompts", "x"), "-o OUT"),
    "chat-turn": (("chat", "b", "--turn", "x"), "{text}"),
    "chat-seed": (("chat", "b", "--seed=-1"), "--seed"),
    "chat-two": (("chat", "b", "c"), "c"),
    "serve-nothing": (("serve",), "BUNDLE"),
    "serve-both": (("serve", "b", "--triton", "h:1"), "one of them"),
    "serve-triton-slots": (("serve", "--triton", "h:1", "--slots", "16"), "--slots"),
    "serve-triton-address": (("serve", "--triton", "h", "--port", "0"), "host:port"),
    "serve-host": (("serve", "b", "--host", "no.such.host.invalid", "--port", "0"), "no address"),
    "serve-port": (("serve", "b", "--port", "70000"), "--port"),
    "serve-slots": (("serve", "b", "--slots", "0"), "--slots"),
    "serve-queue": (("serve", "b", "--queue=-1"), "--queue"),
    "serve-body": (("serve", "b", "--max-body-bytes", "0"), "--max-body-bytes"),
    "serve-drain": (("serve", "b", "--drain-seconds", "nan"), "--drain-seconds"),
    "serve-turn": (("serve", "b", "--turn", "x"), "{text}"),
    "serve-trace-head": (("serve", "b", "--trace", "t", "--head", "entropy"), "--head entropy"),
    "generate-trace-head": (
        ("generate", "b", "--prompt", "", "--profile-json", "t", "--head", "top_k"),
        "--head top_k",
    ),
    "export-no-output": (("export", "tiny-mamba"), "--output"),
    "export-block-len": (("export", "c", "-o", "x", "--block-len", "0"), "--block-len"),
    "export-mask-id": (("export", "c", "-o", "x", "--mask-id=-1"), "--mask-id"),
    "export-stop-id": (("export", "c", "-o", "x", "--stop-id", "end"), "--stop-id"),
    "export-precision": (("export", "c", "-o", "x", "--precision", "int3"), "int3"),
    "export-conv-layout": (("export", "c", "-o", "x", "--conv-layout", "kd"), "kd"),
    "prefix-nothing": (("prefix", "make"), "BUNDLE"),
    "prefix-no-output": (("prefix", "make", "b", "--ids", "1"), "--output"),
    "prefix-no-text": (("prefix", "make", "b", "-o", "x"), "--text or --ids"),
    "prefix-ids": (("prefix", "make", "b", "-o", "x", "--ids", "1,x"), "'x' is not a token id"),
    "prefix-no-such": (("prefix", "unmake", "b"), "unmake"),
    "calibrate-nothing": (("calibrate",), "Missing command"),
    "calibrate-no-such": (("calibrate", "guess", "b"), "guess"),
    "calibrate-data-no-text": (("calibrate", "data", "b", "-o", "x"), "--text or --samples"),
    "calibrate-data-no-output": (("calibrate", "data", "b", "--text", "-"), "--output"),
    "calibrate-data-tokens": (("calibrate", "data", "b", "-o", "x", "--tokens", "0"), "--tokens"),
    "calibrate-collect-no-data": (("calibrate", "collect", "b", "-o", "x"), "--data"),
    **{
        f"calibrate-collect-masks-{value}": (
            ("calibrate", "collect", "b", "--data", "d", "-o", "x", "--masks", value),
            value or "''",
        )
        for value in ("", "0", "1.5", "nan", "1,1", "a")
    },
    "calibrate-collect-batch": (
        ("calibrate", "collect", "b", "--data", "d", "-o", "x", "--batch", "0"),
        "--batch",
    ),
    "calibrate-merge-one": (("calibrate", "merge", "t", "-o", "x"), "two tables"),
    "calibrate-score-kinds": (
        ("calibrate", "score", "b", "--data", "d", "--table", "t", "-o", "x", "--kinds", "scan"),
        "'scan' is unknown",
    ),
    "calibrate-plan-neither": (
        ("calibrate", "plan", "b", "--table", "t", "-o", "x"),
        "--format or --scores",
    ),
    "calibrate-plan-both": (
        ("calibrate", "plan", "b", "--table", "t", "-o", "x", "--format", "int8", "--max-kl", "1"),
        "bound a search",
    ),
    "calibrate-plan-no-bound": (
        ("calibrate", "plan", "b", "--table", "t", "-o", "x", "--scores", "s"),
        "--max-kl or --max-bytes",
    ),
    "calibrate-plan-no-data": (
        ("calibrate", "plan", "b", "--table", "t", "-o", "x", "--scores", "s", "--max-kl", "1"),
        "give --data",
    ),
    "calibrate-plan-pin": (
        ("calibrate", "plan", "b", "--table", "t", "-o", "x", "--format", "int8", "--pin", "head"),
        "'head' is not GLOB=FORMAT",
    ),
    "calibrate-apply-gate": (
        ("calibrate", "apply", "b", "--plan", "p", "--table", "t", "--data", "d", "-o", "x")
        + ("--min-agree", "2"),
        "between 0 and 1",
    ),
    "calibrate-report-state": (
        ("calibrate", "report", "b", "q", "--data", "d", "--state", "fp16"),
        "--long",
    ),
    "calibrate-report-plot": (
        ("calibrate", "report", "b", "q", "--data", "d", "--plot", "x.gif"),
        "x.gif",
    ),
    "calibrate-auto-both": (
        ("calibrate", "auto", "b", "--data", "d", "-o", "x", "--format", "int8")
        + ("--max-bytes", "9"),
        "leave --format out",
    ),
    "calibrate-auto-kl": (
        ("calibrate", "auto", "b", "--data", "d", "-o", "x", "--max-kl", "nan"),
        "nan",
    ),
    "triton-nothing": (("triton",), "BUNDLE"),
    "triton-no-output": (("triton", "b"), "--output"),
    "triton-slots": (("triton", "b", "-o", "x", "--slots", "0"), "--slots"),
    "triton-queue": (("triton", "b", "-o", "x", "--queue=-1"), "--queue"),
    "triton-prompt": (("triton", "b", "-o", "x", "--max-prompt-tokens", "0"), "--max-prompt"),
    "triton-name": (("triton", "b", "-o", "x", "--name", "../x"), "model name"),
    "triton-version": (("triton", "b", "-o", "x", "--target-version", "21.12"), "24.10"),
    "client-nothing": (("client",), "HOST:PORT"),
    "client-no-prompt": (("client", "h:1"), "one of them"),
    "client-two-prompts": (("client", "h:1", "--prompt", "", "--prompt-ids", "1"), "one of them"),
    "client-url": (("client", "http://h:1", "--prompt", ""), "gRPC port"),
    "client-deadline": (("client", "h:1", "--prompt", "", "--deadline", "nan"), "nan"),
    "client-ids": (("client", "h:1", "--prompt-ids", "1,x"), "'x' is not a token id"),
    "client-seed": (("client", "h:1", "--prompt", "", "--seed=-1"), "--seed"),
    "replay-nothing": (("replay",), "DIR"),
    "replay-two": (("replay", "a", "b"), "b"),
    "replay-from-block": (("replay", "a", "--from-block=-1"), "--from-block"),
    "replay-request": (("replay", "a", "--request=-1"), "--request"),
    "replay-unknown-option": (("replay", "a", "--slow"), "--slow"),
    "inspect-nothing": (("inspect",), "BUNDLE"),
    "inspect-two": (("inspect", "a", "b"), "b"),
    "build-nothing": (("build",), "BUNDLE"),
    "build-no-target": (("build", "b", "-o", "x"), "--target"),
    "build-target": (("build", "b", "-o", "x", "--target", "npu"), "npu"),
    "build-batch": (
        ("build", "b", "-o", "x", "--target", "tensorrt-rtx", "--batch", "3:2:1"),
        "3:2:1",
    ),
    "build-precision": (("build", "b", "--target", "tensorrt-rtx", "--precision", "int3"), "int3"),
    "build-timeout": (("build", "b", "--target", "tensorrt-rtx", "--timeout", "0"), "--timeout"),
    "check-two": (("check", "a", "b"), "b"),
    "check-unknown-option": (("check", "b", "--slow"), "--slow"),
    "check-no-value": (("check", "b", "--checkpoint"), "--checkpoint"),
    "check-nothing": (("check",), "BUNDLE"),
    "demo-tokens": (("demo", "--tokens", "0"), "--tokens"),
    "demo-seed": (("demo", "--seed=-1"), "--seed"),
    "demo-model": (("demo", "--model", "huge"), "huge"),
    "demo-threads": (("demo", "--threads", "0"), "--threads"),
    "demo-argument": (("demo", "x"), "x"),
    "no-such-verb": (("convert", "x"), "convert"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_CL_01_wrong_option_exits_with_2(run, tmp_path, monkeypatch, name):
    """A wrong request is refused before any file is looked at."""
    monkeypatch.chdir(tmp_path)
    args, words = BAD_OPTIONS[name]
    assert_one_line(run(*args), words=words, code=2)
    assert list(tmp_path.iterdir()) == []


def test_CL_01_every_verb_is_tried_with_five_bad_inputs():
    """A new verb has to bring its own bad inputs."""
    bundles = {verb: len(BAD_BUNDLES) for verb in ("generate", "chat", "serve", "inspect", "check")}
    for verb in VERBS:
        tried = sum(name.startswith(verb) for name in BAD_OPTIONS) + bundles.get(verb, 0)
        assert tried >= 5, verb


def _config(folder: Path, **entries) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))


def _cut_weights(folder: Path) -> None:
    _config(folder, model_type="mamba2", hidden_size=32)
    save_file({"x": np.zeros(100, np.float32)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


BAD_CHECKPOINTS = {
    "absent": (lambda folder: None, "does not exist"),
    "file": (lambda folder: folder.write_text("x"), "is a file"),
    "empty": (lambda folder: folder.mkdir(), "no config.json"),
    "not-json": (
        lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")),
        "damaged",
    ),
    "unknown-format": (lambda folder: _config(folder, nothing=1), "config.json"),
    "no-weights": (
        lambda folder: _config(folder, model_type="mamba2", hidden_size=32),
        "model.safetensors",
    ),
    "cut-weights": (_cut_weights, "damaged"),
}


@pytest.mark.parametrize("fault", BAD_CHECKPOINTS)
def test_CL_01_failing_checkpoint_exits_nonzero(run, tmp_path, fault):
    """Nothing is written for a checkpoint that cannot be read."""
    prepare, words = BAD_CHECKPOINTS[fault]
    folder = tmp_path / "ckpt"
    prepare(folder)
    before = sorted(tmp_path.iterdir())
    done = run("export", folder, "-o", tmp_path / "out.bundle", "--block-len", 8)
    assert_one_line(done, words=words, code=1)
    assert sorted(tmp_path.iterdir()) == before


def test_CL_01_unexpected_error_is_one_line_too(run, bundle, monkeypatch):
    """What nobody foresaw is no reason for a page of source lines."""
    import fixedstate.runtime

    def load(*_, **__):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(fixedstate.runtime, "load", load)
    done = run("generate", bundle, "--prompt", "a")
    assert_one_line(done, words="ZeroDivisionError: division by zero (--debug shows where)", code=1)


@pytest.mark.parametrize("place", ["before", "after"])
def test_CL_01_debug_shows_the_traceback(run, tmp_path, place):
    args = ["inspect", tmp_path / "absent"]
    done = run(*(["--debug", *args] if place == "before" else [*args, "--debug"]))
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.lines[-1].startswith("error: ")


def test_CL_01_missing_package_is_named(run, scripted_export, tmp_path):
    """Someone who only decodes has no PyTorch; the line says what to install."""

    def hook(folder):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    scripted_export["hook"] = hook
    done = run("export", "tiny-mamba", "-o", tmp_path / "x")
    assert_one_line(done, words="pip install 'fixedstate[export]'", code=1)


def test_CL_01_error_leaves_standard_output_empty_with_json(run, tmp_path):
    """A reader of JSON gets a document or nothing."""
    assert_one_line(run("inspect", tmp_path / "absent", "--json"), words="absent", code=1)


# --- CL-02: an output that cannot be written whole is not written


def _tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_CL_02_existing_output_is_refused_before_work(run, bundle, scripted_export):
    before = _tree(bundle)
    done = run("export", "tiny-mamba", "-o", bundle)
    assert_one_line(done, words="--force", code=2)
    assert scripted_export["calls"] == 0
    assert _tree(bundle) == before


def test_CL_02_output_that_is_a_file_is_refused(run, tmp_path, scripted_export):
    target = tmp_path / "out"
    target.write_text("precious")
    assert_one_line(run("export", "tiny-mamba", "-o", target), words="exists", code=2)
    assert target.read_text() == "precious"


def test_CL_02_output_below_a_file_is_refused(run, tmp_path, scripted_export):
    (tmp_path / "file").write_text("x")
    done = run("export", "tiny-mamba", "-o", tmp_path / "file" / "out")
    assert_one_line(done, words="is not a folder", code=2)
    assert scripted_export["calls"] == 0


def test_CL_02_read_only_folder_is_refused(run, tmp_path, scripted_export, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    done = run("export", "tiny-mamba", "-o", tmp_path / "out")
    assert_one_line(done, words="not writable", code=2)
    assert list(tmp_path.iterdir()) == []


FAILURES = {
    "disk-full": (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left"),
    "crash": (RuntimeError("broken half way"), 1, "broken half way"),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("older", [False, True], ids=["new", "over-an-older-one"])
def test_CL_02_failure_half_way_leaves_nothing(
    run, tmp_path, make_bundle, scripted_export, failure, older
):
    """The folder of that name is the old one, or none; no partial folder stays beside it."""
    error, code, words = FAILURES[failure]
    target = tmp_path / "out.bundle"
    before = _tree(make_bundle("out.bundle", "F3")) if older else {}

    def hook(folder):
        raise error

    scripted_export["hook"] = hook
    done = run("export", "tiny-mamba", "-o", target, *(["--force"] if older else []))
    assert (done.code, done.out) == (code, "")
    assert words in done.lines[-1]
    assert _tree(tmp_path) == {f"out.bundle/{name}": data for name, data in before.items()}


def test_CL_02_force_replaces_whole(run, tmp_path, make_bundle, scripted_export):
    target = make_bundle("out.bundle", "F3")
    done = run("export", "tiny-mamba", "-o", target, "--force")
    assert (done.code, done.out) == (0, f"{target}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out.bundle"]
    assert run("inspect", target, "--json").json["model"]["mixers"] == ["mamba2", "mamba2"]


def test_CL_02_bundle_that_never_appeared_is_no_success(
    run, tmp_path, scripted_export, monkeypatch
):
    """An exporter that says it wrote something and did not is caught."""
    import sys

    pipeline = sys.modules["fixedstate.export.pipeline"]
    monkeypatch.setattr(pipeline, "export_bundle", lambda *_, **__: None)
    done = run("export", "tiny-mamba", "-o", tmp_path / "out")
    assert_one_line(done, words="does not exist", code=1)


# --- CL-04: a path that is not there is an error before work starts


def test_CL_04_missing_prompt_file(run, bundle, scripted):
    done = run("generate", bundle, "--prompt-file", bundle / "absent.txt")
    assert_one_line(done, words="absent.txt", code=2)
    assert "loads" not in scripted


@pytest.mark.parametrize("what", ["folder", "binary"])
def test_CL_04_prompt_file_that_holds_no_text(run, bundle, scripted, tmp_path, what):
    path = tmp_path / what
    path.mkdir() if what == "folder" else path.write_bytes(b"\xff\xfe\x00")
    done = run("generate", bundle, "--prompt-file", path)
    assert_one_line(done, words=what, code=2)
    assert "loads" not in scripted


def test_CL_04_missing_checkpoint_of_check(run, bundle, laws, tmp_path):
    """Laws may take minutes: a wrong path is found before them."""
    done = run("check", bundle, "--checkpoint", tmp_path / "absent")
    assert_one_line(done, words="absent", code=1)
    assert laws["calls"] == 0


def test_CL_04_missing_output_folder(run, tmp_path, scripted_export):
    done = run("export", "tiny-mamba", "-o", tmp_path / "absent" / "out")
    assert_one_line(done, words="absent is not a folder", code=2)
    assert scripted_export["calls"] == 0


def test_CL_04_missing_prompts(run, bundle, scripted, tmp_path):
    """Found before the bundle is loaded; nothing is left beside the answers."""
    out = tmp_path / "out"
    done = run("generate", bundle, "--prompts", tmp_path / "absent", "-o", out)
    assert_one_line(done, words="absent cannot be read", code=2)
    assert "loads" not in scripted
    assert not Path(f"{out}.partial").exists()


def test_CL_04_missing_folder_of_answers(run, bundle, scripted, tmp_path):
    source = tmp_path / "in"
    source.write_text('{"prompt": "a"}')
    done = run("generate", bundle, "--prompts", source, "-o", tmp_path / "absent" / "out")
    assert_one_line(done, words="absent is not a folder", code=2)
    assert "loads" not in scripted


def test_CL_04_missing_token_file(run, bundle, scripted, tmp_path):
    """A server that asked for no token after all would be open to everybody."""
    done = run("serve", bundle, "--port", "0", "--token-file", tmp_path / "absent")
    assert_one_line(done, words="absent cannot be read", code=2)
    assert "loads" not in scripted


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff", "schl\u00fcssel".encode()])
def test_CL_04_token_file_that_holds_no_token(run, bundle, scripted, tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    done = run("serve", bundle, "--port", "0", "--token-file", tmp_path / "token")
    assert_one_line(done, words="token", code=2)
    assert "loads" not in scripted


@pytest.mark.parametrize("verb", [("generate", "--prompt-ids", "1"), ("serve", "--port", "0")])
@pytest.mark.parametrize("option", ["--trace", "--profile-json"])
def test_CL_04_missing_folder_of_a_trace(run, bundle, scripted, tmp_path, verb, option):
    """Found before the bundle is loaded, not after an hour of serving; as is a file there."""
    name, *options = verb
    done = run(name, bundle, *options, option, tmp_path / "absent" / "out")
    assert_one_line(done, words="absent is not a folder", code=2)
    (tmp_path / "there").touch()
    done = run(name, bundle, *options, option, tmp_path / "there")
    assert_one_line(done, words="--force", code=2)
    assert "loads" not in scripted


@pytest.fixture
def no_build(monkeypatch):
    """No builder may be called: refused requests never come so far."""
    from fixedstate.export import engine

    monkeypatch.setattr(engine, "plan", lambda *_, **__: pytest.fail("a build was planned"))


def test_CL_04_missing_bundle_of_a_build(run, tmp_path, no_build):
    done = run("build", tmp_path / "absent", "--target", "tensorrt-rtx")
    assert_one_line(done, words="absent", code=1)


def test_CL_04_missing_folder_of_an_engine(run, bundle, tmp_path, no_build):
    """A build takes minutes: a folder that it cannot write to is found before."""
    out = tmp_path / "absent" / "out"
    done = run("build", bundle, "--target", "tensorrt-rtx", "-o", out)
    assert_one_line(done, words="absent is not a folder", code=2)


def test_CL_04_missing_bundle_of_a_repository(run, tmp_path):
    done = run("triton", tmp_path / "absent", "-o", tmp_path / "out")
    assert_one_line(done, words="absent", code=1)
    assert list(tmp_path.iterdir()) == []


def test_CL_04_missing_folder_of_a_repository(run, bundle, tmp_path):
    done = run("triton", bundle, "-o", tmp_path / "absent" / "out")
    assert_one_line(done, words="absent is not a folder", code=2)


def test_CL_04_missing_prompt_file_of_the_client(run, tmp_path):
    """Found before anybody is asked."""
    done = run("client", "localhost:1", "--prompt-file", tmp_path / "absent.txt")
    assert_one_line(done, words="absent.txt", code=2)


def test_CL_04_missing_engine_of_check(run, bundle, laws, tmp_path):
    done = run("check", bundle, "--against", tmp_path / "absent")
    assert_one_line(done, words="absent", code=1)
    assert laws["calls"] == 0


def test_CL_04_every_path_option_has_a_test():
    """A new path option needs its own missing-file test; this list says which there are."""
    found = set()
    for verb in VERBS:
        command = cli.get_command(None, verb)
        names = {param.name for param in command.params}
        found |= {
            (verb, name)
            for name in names
            if name in ("bundle", "checkpoint", "output") or name.endswith(("_file", "_files"))
        }
    assert found == {
        ("export", "checkpoint"),
        ("export", "output"),
        ("generate", "bundle"),
        ("generate", "prompt_files"),
        ("generate", "prompts_file"),
        ("generate", "output"),
        ("chat", "bundle"),
        ("serve", "bundle"),
        ("serve", "token_file"),
        ("inspect", "bundle"),
        ("check", "bundle"),
        ("check", "checkpoint"),
        ("build", "bundle"),
        ("build", "output"),
        ("triton", "bundle"),
        ("triton", "output"),
        ("client", "prompt_file"),
    }


# --- CL-05: exit codes


def test_CL_05_warnings_keep_exit_0(run, tmp_path, scripted_export):
    """Notes are for people; a script sees success."""
    scripted_export["notes"] = ("a tensor was left out", "no tokenizer")
    done = run("export", "tiny-mamba", "-o", tmp_path / "out")
    assert (done.code, done.out) == (0, f"{tmp_path / 'out'}\n")
    assert done.lines == ["note: a tensor was left out", "note: no tokenizer"]


def test_CL_05_python_warnings_keep_exit_0(run, tmp_path, scripted_export):
    scripted_export["hook"] = lambda folder: warnings.warn("old", DeprecationWarning, stacklevel=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run("export", "tiny-mamba", "-o", tmp_path / "out").code == 0


def test_CL_05_one_of_three_prompts_fails(run, bundle, scripted):
    """The two good answers are printed, the failed one is named, and the code is not 0."""
    scripted["faults"]["bad_row_at"] = 1
    done = run(
        *("generate", bundle, "--prompt", "a", "--prompt", "b", "--prompt", "c"),
        *("--max-new-tokens", 3, "--json"),
    )
    assert done.code == 1
    reasons = [row["finish_reason"] for row in done.json]
    assert reasons == ["length", "error", "length"]
    assert [row["text"] for row in done.json] == ["bcd", "", "bcd"]
    assert len(done.lines) == 1
    assert done.lines[0].startswith("error: prompt 2: scores are not finite")


@pytest.mark.parametrize("passed", [True, False])
def test_CL_05_check_exits_1_where_a_law_fails(run, bundle, laws, passed):
    laws["passed"] = passed
    assert run("check", bundle).code == int(not passed)
    assert run("check", bundle, "--json").code == int(not passed)


def test_CL_05_codes_are_documented(run):
    text = " ".join(run("--help").out.split())
    assert "0 done, 1 an error or a failed comparison, 2 a wrong request, 130 Ctrl-C" in text
