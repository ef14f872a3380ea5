"""Bundles on disk: damage is found and named, a golden one opens for ever, outputs appear whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedstate.bundle import (
    MANIFEST,
    PARITY,
    SCHEMA,
    WEIGHTS,
    Bundle,
    check_target,
    sha256_of,
    staged_folder,
    write_atomic,
)
from fixedstate.errors import BundleError, UsageError

GOLDEN = Path(__file__).parent / "data" / "golden"
SCHEMAS = sorted(GOLDEN.glob("schema-*"))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def bundle(tmp_path) -> Path:
    """A copy of the golden bundle of the schema that is written now, to be damaged."""
    folder = tmp_path / "my.bundle"
    shutil.copytree(GOLDEN / f"schema-{SCHEMA}" / "bundle", folder)
    return folder


def refusal(folder: Path, **options) -> str:
    """What opening says: one sentence."""
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def sealed(data: dict) -> bytes:
    """A manifest with a right seal, as a writer of another version would leave it."""
    data = {key: value for key, value in data.items() if key != "sha256"}
    body = json.dumps(data, indent=1).encode()[:-2]
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest and seal it again."""
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_bytes(sealed(data))


# --- damage ---------------------------------------------------------------------------------------


def test_an_untouched_copy_opens(bundle):
    """What makes the tests below say something; sealing it again changes nothing."""
    opened = Bundle.open(bundle)
    assert opened.digest == sha256_of(bundle / MANIFEST)
    assert opened.manifest() == (bundle / MANIFEST).read_bytes()
    edit(bundle, lambda data: None)
    assert Bundle.open(bundle) == opened
    assert set(opened.hashes()) | {MANIFEST, PARITY} == set(os.listdir(bundle))


@pytest.mark.parametrize(
    "name", ["commit.onnx", "denoise.onnx", WEIGHTS, "tokenizer.json", "LICENSE"]
)
def test_one_changed_byte_is_refused(bundle, name):
    """In every file: first, last and middle byte."""
    good = (bundle / name).read_bytes()
    for place in (0, len(good) // 2, len(good) - 1):
        changed = bytearray(good)
        changed[place] ^= 1
        (bundle / name).write_bytes(changed)
        text = refusal(bundle)
        assert text.startswith(f"{bundle / name} was changed after the export: sha256 ")
        assert "copy the bundle again or export again" in text
    for cut in (good[:-1], good + b"\0", b""):
        (bundle / name).write_bytes(cut)
        assert "was changed after the export" in refusal(bundle)


@settings(max_examples=150)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_changed_byte_of_the_manifest_is_refused(place, bit):
    """Wherever it is: a number, a name, a space, the seal itself."""
    source = GOLDEN / f"schema-{SCHEMA}" / "bundle"
    raw = bytearray((source / MANIFEST).read_bytes())
    raw[place % len(raw)] ^= 1 << bit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fixedstate.bundle._read_manifest", lambda folder: bytes(raw))
        assert MANIFEST in refusal(source) or "schema" in refusal(source)


def test_a_value_changed_in_the_manifest_is_refused(bundle):
    """A number that would still make sense: another threshold, another norm."""
    text = (bundle / MANIFEST).read_text()
    for old, new in (('"temperature": 0.0', '"temperature": 0.5'), ("1e-05", "1e-06")):
        (bundle / MANIFEST).write_text(text.replace(old, new, 1))
        assert "its last entry is not the sha256 of the rest" in refusal(bundle)


def test_parity_is_outside_the_hash(bundle):
    """A report may be made again, or left out."""
    digest = Bundle.open(bundle).digest
    (bundle / PARITY).unlink()
    assert Bundle.open(bundle).digest == digest


@pytest.mark.parametrize("name", ["commit.onnx", "denoise.onnx", WEIGHTS, "tokenizer.json"])
def test_missing_files_are_named(bundle, name):
    """Also where weights are not read, and where a folder has the file's name."""
    (bundle / name).unlink()
    assert f"{bundle / name} is missing: the bundle is incomplete" in refusal(bundle)
    assert "is missing" in refusal(bundle, verify_weights=False)
    (bundle / name).mkdir()
    assert "is missing" in refusal(bundle)


def test_weights_can_be_skipped_by_choice(bundle):
    """The slow hash only, never another one."""
    raw = bytearray((bundle / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (bundle / WEIGHTS).write_bytes(raw)
    assert WEIGHTS in refusal(bundle)
    Bundle.open(bundle, verify_weights=False)
    (bundle / "denoise.onnx").write_bytes(b"x")
    assert "denoise.onnx was changed" in refusal(bundle, verify_weights=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged (0 bytes, not JSON)"),
        (b"{", "is damaged (1 bytes, not JSON)"),
        (b"\xff\xfe", "is damaged (2 bytes, not JSON)"),
        (b"[]", "names no schema"),
        (b"{}", "names no schema"),
        (b'{"schema": "1"}', "names no schema"),
        (b'{"schema": true}', "names no schema"),
        (b'{"schema": 0}', "names no schema"),
        (b'{"schema": -1}', "names no schema"),
        (b'{"schema": 1}', "lacks the keys ['model', "),
    ],
)
def test_manifests_that_are_none(bundle, content, words):
    """Truncated, of another kind, or of no schema."""
    (bundle / MANIFEST).write_bytes(content)
    assert words in refusal(bundle)


def test_a_newer_schema_names_both_numbers(bundle):
    """Whatever else a newer version writes."""
    edit(bundle, lambda data: data.update(schema=SCHEMA + 6, anything="else"))
    text = refusal(bundle)
    assert f"has schema {SCHEMA + 6}, this version reads up to {SCHEMA}: install a newer" in text


def inner(*keys: object) -> Callable[[dict], object]:
    def change(data: dict) -> None:
        for key in keys:
            data = data[key]
        data["colour"] = 1

    return change


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("model",),
        ("model", "layers", 0),
        ("model", "layers", 0, "sizes"),
        ("precision",),
        ("state", 0),
        ("state", 0, "past"),
        ("graphs", "denoise"),
        ("graphs", "denoise", "inputs", 0),
        ("decode",),
        ("source",),
    ],
)
def test_unknown_keys_are_refused_at_every_depth(bundle, keys):
    """What this version does not know it must not ignore."""
    edit(bundle, inner(*keys))
    assert "holds unknown keys ['colour']" in refusal(bundle)


def rename_graph(name: str) -> Callable[[dict], object]:
    return lambda data: data["graphs"]["denoise"].update(file=name)


@pytest.mark.parametrize(
    "name", ["../denoise.onnx", "/etc/passwd", "a/b.onnx", "..", ".", "", "./denoise.onnx"]
)
def test_no_file_name_leaves_the_folder(bundle, name):
    """Graphs and side files: neither up, nor down, nor from the root."""
    good = (bundle / MANIFEST).read_bytes()
    edit(bundle, rename_graph(name))
    assert f"file name {name!r} would leave the bundle's folder" in refusal(bundle)
    (bundle / MANIFEST).write_bytes(good)
    edit(bundle, lambda data: data["files"].update({name: "0" * 64}))
    assert f"file name {name!r} would leave the bundle's folder" in refusal(bundle)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["graphs"]["commit"]["inputs"].reverse(), "ports of graph 'commit' do not fit"),
        (lambda d: d["graphs"]["commit"]["inputs"].pop(), "ports of graph 'commit' do not fit"),
        (lambda d: d["state"].pop(), "do not fit the model"),
        (lambda d: d["model"].update(block_len=512), "block_len must be 4 to 256 tokens; got 512"),
        (lambda d: d["model"].update(block_len="8"), "block_len must be a positive int; got '8'"),
        (lambda d: d["model"].update(layers=[]), "at least one layer"),
        (lambda d: d["model"].update(layers=3), "is damaged"),
        (lambda d: d["graphs"].update(prefill=d["graphs"]["commit"]), "role 'prefill' is unknown"),
        (lambda d: d.update(graphs=[]), "is damaged"),
        (lambda d: d["precision"].update(io="int8"), "io dtype 'int8' is none of"),
    ],
)
def test_values_that_contradict_each_other(bundle, change, words):
    """Even where the seal is right."""
    edit(bundle, change)
    assert words in refusal(bundle)


def test_what_is_no_bundle(tmp_path):
    """Nothing there, a file, an empty folder, a folder in the manifest's place."""
    assert "does not exist" in refusal(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "holds no bundle.json" in refusal(tmp_path / "empty")
    (tmp_path / "odd" / MANIFEST).mkdir(parents=True)
    assert "cannot be read" in refusal(tmp_path / "odd")


def test_files_that_cannot_be_read_are_named(bundle, monkeypatch):
    """By permission or by a broken disk."""
    real = Path.open

    def broken(self, *args, **kwargs):
        if self.name == "commit.onnx":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", broken)
    assert "commit.onnx cannot be read: Permission denied" in refusal(bundle)


def test_graphs_by_role_and_target(bundle):
    """A target's own copy where there is one, else the role; a role that is not there is named."""
    opened = Bundle.open(bundle)
    assert opened.graph("commit", "ort-cpu") is opened.graphs["commit"]
    opened.graphs["commit@ort-cpu"] = opened.graphs["commit"]
    assert opened.graph("commit", "ort-cpu") is opened.graphs["commit@ort-cpu"]
    with pytest.raises(BundleError, match=r"has no graph 'commit_denoise' \(it has commit, "):
        opened.graph("commit_denoise")


# --- golden bundles -------------------------------------------------------------------------------

DECODE = """
import json, sys
from pathlib import Path
import numpy as np
from fixedstate.bundle import Bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.text import Text

folder = Path(sys.argv[1])
expected = dict(np.load(folder / "expected.npz"))
bundle = Bundle.open(folder / "bundle")
engine = open_engine(bundle, threads=1)
ids = expected.pop("ids")
engine.commit(ids[:, :16], np.array([13]))
found = {"logits": engine.denoise(ids[:, 16:]).copy()}
found |= {"state_" + name: array for name, array in engine.read(0).items()}
with load(folder / "bundle", threads=1) as decoder:
    request = Request([3, 5, 9, 23], Settings(20, steps=4, stop_ids=()))
    answer = list(map(int, decoder.generate([request])[0].token_ids))
assert answer == expected.pop("answer").tolist(), answer
assert found.keys() == expected.keys()
worst = max(float(np.abs(found[name] - expected[name]).max()) for name in found)
print(json.dumps([worst, Text.open(bundle).encode("get arm 3 17 nothing")]))
"""


def test_every_schema_has_its_golden_bundle():
    """Made once with tests/data/golden/make.py when the schema number goes up, and small."""
    assert [folder.name for folder in SCHEMAS] == [f"schema-{n + 1}" for n in range(SCHEMA)]
    for folder in SCHEMAS:
        assert sum(file.stat().st_size for file in folder.rglob("*")) < 200_000


@pytest.mark.parametrize("golden", SCHEMAS, ids=lambda folder: folder.name)
def test_golden_bundles_open_and_compute_what_they_did(golden, capsys):
    """The same logits, states, tokens and ids of a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["decode", str(golden)])
        exec(compile(DECODE, "decode", "exec"), {})
    worst, ids = json.loads(capsys.readouterr().out)
    assert worst <= 1e-5
    assert ids == [3, 5, 9, 23, 0]


@pytest.mark.timeout(900)  # the first use installs the environment
@pytest.mark.parametrize("golden", SCHEMAS, ids=lambda folder: folder.name)
def test_golden_bundles_on_the_old_runtime(golden, runtime310):
    """Python 3.10, numpy 1.26 and ONNX Runtime 1.23.2, without PyTorch."""
    worst, ids = json.loads(runtime310.run("-W", "error", "-c", DECODE, golden).stdout)
    assert worst <= 1e-5
    assert ids == [3, 5, 9, 23, 0]


# --- folders that appear whole or not at all ------------------------------------------------------


def test_a_folder_appears_whole(tmp_path):
    """Under its name at the end, with the modes a user expects, and nothing beside it."""
    target = tmp_path / "out"
    with staged_folder(target) as staging:
        assert not target.exists()
        assert staging.parent == tmp_path
        (staging / "a").write_text("a")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["a"]
    before = os.umask(0o027)
    try:
        with staged_folder(tmp_path / "other"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_what_exists_is_refused_and_kept(tmp_path, kind):
    """Without force nothing is run; with it the old one stays until the new one is whole."""
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
        (target / "old").touch()
    elif kind == "file":
        target.write_text("old")
    else:
        target.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists: choose another name or add --force"):
        with staged_folder(target):
            raise AssertionError("nothing may be run")
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(ZeroDivisionError), staged_folder(target, force=True):
        _ = 1 / 0
    assert os.path.lexists(target)
    assert target.is_symlink() == ("link" in kind)
    with staged_folder(target, force=True) as staging:
        (staging / "new").touch()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["new"]


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), ValueError("of the caller")])
def test_an_error_inside_leaves_nothing(tmp_path, error):
    """Whatever it is; a failed write is said in one sentence."""
    expected = BundleError if error is FULL else type(error)

    def fail() -> None:
        with staged_folder(tmp_path / "out") as staging:
            (staging / "half").write_bytes(b"x" * 1000)
            raise error

    with pytest.raises(expected) as caught:
        fail()
    if error is FULL:
        assert str(caught.value) == (
            f"writing {tmp_path / 'out'} failed: No space left on device; nothing was left behind"
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("step", "force"),
    [
        ("fsync", False),
        ("fsync", True),
        ("first rename", False),
        ("first rename", True),
        ("second rename", True),
    ],
)
def test_a_failure_at_the_end_leaves_what_was_there(tmp_path, monkeypatch, force, step):
    """The last steps: flushing, moving the old one away, moving the new one in."""
    target = tmp_path / "out"
    if force:
        target.mkdir()
        (target / "old").touch()
    real, calls = Path.rename, []

    def rename(self, other):
        calls.append(self)
        if len(calls) == {"first rename": 1, "second rename": 2}.get(step):
            raise FULL
        return real(self, other)

    def fsync(handle):
        if step == "fsync":
            raise FULL

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BundleError, match="No space left on device"):
        with staged_folder(target, force=force) as staging:
            (staging / "new").touch()
    assert os.listdir(tmp_path) == (["out"] if force else [])
    assert not force or os.listdir(target) == ["old"]


def test_an_old_folder_that_cannot_go_back_is_not_deleted(tmp_path, monkeypatch):
    """Two failures in a row must not cost the user what was there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    real, calls = Path.rename, []

    def rename(self, other):
        calls.append(self)
        if len(calls) > 1:
            raise FULL
        return real(self, other)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(BundleError, match="No space left on device"):
        with staged_folder(tmp_path / "out", force=True):
            pass
    assert [file.name for file in tmp_path.rglob("old")] == ["old", "old"]


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    """Missing, a file, read-only by its mode, read-only by its disk: before any work."""
    with pytest.raises(UsageError, match="is not a folder: make it first"):
        check_target(tmp_path / "none" / "out", False)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder"):
        check_target(tmp_path / "file" / "out", False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UsageError, match="is not writable: choose another -o"):
            check_target(tmp_path / "out", False)
    with monkeypatch.context() as patch:

        def read_only(**options):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        patch.setattr("tempfile.mkdtemp", read_only)
        with pytest.raises(BundleError, match="cannot write beside .*: Read-only file system"):
            with staged_folder(tmp_path / "out"):
                raise AssertionError("nothing may be run")
    assert os.listdir(tmp_path) == ["file"]


def test_a_device_or_pipe_is_never_replaced_by_a_file(tmp_path):
    """Renaming a file over /dev/null would take it from everybody."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for target in (pipe, folder, link):
        with pytest.raises(UsageError, match="is not a regular file"):
            write_atomic(target, b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("step", ["fdopen", "fsync", "replace"])
def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch, step):
    """An older one stays; nothing lies beside it."""
    file = tmp_path / "bundle.json"
    write_atomic(file, b"old")
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(*args, **kwargs):
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(Path if step == "replace" else os, step, full)
        with pytest.raises(BundleError, match=r"bundle.json failed: No space left on device"):
            write_atomic(file, b"new")
    assert os.listdir(tmp_path) == ["bundle.json"]
    assert file.read_bytes() == b"old"
    write_atomic(file, b"new")
    assert file.read_bytes() == b"new"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_digests_of_long_files(tmp_path):
    """Read in pieces, the last of them short."""
    content = np.random.default_rng(0).bytes((1 << 20) * 2 + 17)
    (tmp_path / "x").write_bytes(content)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(content).hexdigest()
