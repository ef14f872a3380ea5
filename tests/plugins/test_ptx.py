"""The shipped PTX texts: complete, launchable, of this source, and within what a GPU has.

One text per operator is compiled anew and assembled for seven GPU generations; the rest stand by
their hashes. `make ptx` compiles and assembles all of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixedstate.errors import BackendError
from fixedstate.plugins import compile as maker
from fixedstate.plugins import ptx
from fixedstate.plugins.compile import Text
from fixedstate.plugins.schema import KERNEL_IO, OPS, KernelSpec, Tile

FOLDER = Path(str(resources.files("fixedstate.plugins"))) / "ptx"
JOBS = maker.jobs()
EVERY = [pytest.param(*job, id=ptx.file_name(*job).removesuffix(".ptx")) for job in JOBS]

# one per operator, of either dtype; of Mamba-2 both forms of one chunk and a loop
SAMPLE = [
    ptx.file_name(spec, spec.tiles[place % 3 % len(spec.tiles)], KERNEL_IO[place % 2])
    for place, spec in enumerate(OPS.values())
]


def shipped(spec: KernelSpec, tile: Tile, io: str) -> Text:
    """A text of the package as the compiler would give it."""
    found = ptx.load(spec, tile, io)
    name = ptx.file_name(spec, tile, io)
    return Text(name, found.entry, found.threads, found.shared, found.text, 0.0)


# --- the folder ----------------------------------------------------------------------------------


def test_folder_holds_every_text_and_no_other() -> None:
    names = {ptx.file_name(*job) for job in JOBS}
    assert len(names) == sum(len(spec.tiles) for spec in OPS.values()) * len(KERNEL_IO)
    assert set(ptx.index()["texts"]) == names
    assert {path.name for path in FOLDER.iterdir()} == names | {"index.json"}
    assert ptx.index()["triton"] == maker.TRITON
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8 << 20


def test_index_is_what_the_texts_say() -> None:
    written = (FOLDER / "index.json").read_bytes()
    assert written == maker.listing([shipped(*job) for job in JOBS]).encode()
    for name, entry in ptx.index()["texts"].items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize(("spec", "tile", "io"), EVERY)
def test_text_can_be_launched(spec: KernelSpec, tile: Tile, io: str) -> None:
    """By a plugin: its parameters, its block, its shared memory; on any driver of CUDA 12."""
    text = shipped(spec, tile, io)
    maker.examine(text.ptx, text.entry, maker.signature(spec, io), tile, text.shared, text.name)
    assert text.entry == spec.torch_name
    assert text.threads == tile.threads
    (listed,) = re.findall(r"\.entry \w+\((.*?)\)", text.ptx, re.S)
    kinds = re.findall(r"\.param \.(u64|u32)", listed)
    assert kinds == (
        ["u64"] * len(spec.inputs)
        + ["u32"] * len(spec.argument_names)
        + ["u64"] * len(spec.outputs)
    )
    assert text.ptx.startswith(".version 8.0\n.target sm_80\n")
    # every argument is used, or it stands for nothing
    unused = [
        place
        for place in range(len(kinds))
        if len(re.findall(rf"\b{text.entry}_param_{place}\b", text.ptx)) < 2
    ]
    assert not unused, [
        (*spec.input_names, *spec.argument_names, *spec.output_names)[place] for place in unused
    ]


@pytest.mark.parametrize(("spec", "tile", "io"), EVERY)
def test_text_rounds_to_nearest(spec: KernelSpec, tile: Tile, io: str) -> None:
    """Which the interpreter cannot show for bfloat16."""
    text = shipped(spec, tile, io).ptx
    assert f"cvt.rn.{'bf16' if io == 'bfloat16' else 'f16'}" in text
    assert not re.search(r"cvt\.r[zmp]\.(b?f16|f32)", text)


@pytest.mark.parametrize(("spec", "tile", "io"), EVERY)
def test_text_says_nothing_of_its_making(spec: KernelSpec, tile: Tile, io: str) -> None:
    """No path, no line, no name of a person or a program."""
    text = shipped(spec, tile, io).ptx
    assert not re.search(r"[/\\~@](?!%|!)|\.loc|\.file|\.section|\.pragma|triton|python", text)
    assert text.isascii()
    assert text.endswith("}\n")


# --- what the compiler's exit refuses ------------------------------------------------------------


SPEC = OPS["SelectiveScanCommit"]
TEXT = shipped(SPEC, SPEC.tiles[0], "float16")
PARAMETERS = maker.signature(SPEC, "float16")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".version 8.0", ".version 8.8", r"\.version is 8.8, expected 8.0"),
        (".target sm_80", ".target sm_90a", r"\.target is sm_90a, expected sm_80"),
        (".reqntid 32", ".reqntid 64", r"\.reqntid is 64, expected 32"),
        (".reqntid 32", ".reqntid 32\n.maxnreg 64", r"\.maxnreg is 64, expected None"),
        (".entry scan_commit(", ".entry other(", "entries are"),
        (".param .u32 scan_commit_param_7", ".param .u64 scan_commit_param_7", "parameters are"),
        ("ret;", ".loc 1 2 3\nret;", r"contains '\.loc'"),
        ("ret;", '.file 1 "/home/someone/kernels.py"\nret;', "contains '/'"),
    ],
)
def test_text_that_a_plugin_cannot_launch_is_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT.ptx
    text = TEXT.ptx.replace(old, new, 1)
    with pytest.raises(BackendError, match=message) as caught:
        maker.examine(text, "scan_commit", PARAMETERS, SPEC.tiles[0], 0, TEXT.name)
    assert TEXT.name in str(caught.value)


def test_shared_memory_above_48_kib_is_refused() -> None:
    maker.examine(TEXT.ptx, "scan_commit", PARAMETERS, SPEC.tiles[0], 48 * 1024, TEXT.name)
    with pytest.raises(BackendError, match="49153 bytes of shared memory, at most 49152"):
        maker.examine(TEXT.ptx, "scan_commit", PARAMETERS, SPEC.tiles[0], 48 * 1024 + 1, TEXT.name)


def with_scratch(text: str) -> str:
    """A text as Triton writes it, with comments and two more pointers."""
    last = "\t.param .u64 .ptr .global .align 1 scan_commit_param_11"
    assert text.count(last) == 1
    more = [last.replace("_11", f"_{place}") for place in (12, 13)]
    return "// made in /somewhere\n\n" + text.replace(last, ",\n".join([last, *more]))


def test_scratch_pointers_and_comments_are_stripped() -> None:
    raw = with_scratch(TEXT.ptx)
    assert maker.clean(raw, "scan_commit", PARAMETERS, TEXT.name) == TEXT.ptx


def test_used_scratch_is_refused() -> None:
    raw = with_scratch(TEXT.ptx).replace("ret;", "ld.param.b64 %rd1, [scan_commit_param_13];\nret;")
    with pytest.raises(BackendError, match="the kernel uses scan_commit_param_13"):
        maker.clean(raw, "scan_commit", PARAMETERS, TEXT.name)


def test_text_without_scratch_pointers_is_refused() -> None:
    with pytest.raises(BackendError, match="12 parameters; expected 12 and Triton's two"):
        maker.clean(TEXT.ptx, "scan_commit", PARAMETERS, TEXT.name)


def test_other_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both versions."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    with pytest.raises(BackendError, match=r"Triton 3\.7\.1 is installed.*made with 3\.8\.0"):
        maker.build(*JOBS[0])


# --- writing and comparing -----------------------------------------------------------------------


def test_folder_is_written_whole_and_compared(tmp_path: Path) -> None:
    """Stale texts go; a changed byte, a missing text, one too many and another index are found."""
    texts = [shipped(*job) for job in JOBS[:3]]
    folder = tmp_path / "ptx"
    assert len(maker.differences(texts, folder, whole=True)) >= 3
    folder.mkdir()
    (folder / "stale.ptx").write_text("old")
    maker.write(texts, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [text.name for text in texts] + ["index.json"]
    )
    assert not maker.differences(texts, folder, whole=True)
    assert not maker.differences(texts[:1], folder, whole=False)
    assert maker.differences(texts[:2], folder, whole=True)

    other = dataclasses.replace(texts[0], ptx=texts[0].ptx + "\n")
    found = maker.differences([other, *texts[1:]], folder, whole=True)
    assert f"{other.name} differs" in found
    assert f"index.json: {other.name}" in found
    (folder / texts[1].name).unlink()
    assert f"{texts[1].name} is missing" in maker.differences(texts, folder, whole=True)
    (folder / "index.json").write_text(json.dumps({"triton": "3.7.1", "texts": {}}))
    assert "index.json is of Triton 3.7.1, not 3.8.0" in maker.differences(
        texts, folder, whole=True
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "no text is called 'nothing', e.g. 'conv_denoise"),
        (["--only", "conv"], "--only makes an incomplete folder"),
    ],
)
def test_command_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert maker.main(arguments) == 1
    assert message in capsys.readouterr().err


# --- compiled anew -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One text per operator, by the command, in a process of its own: folder and report."""
    folder = tmp_path_factory.mktemp("texts")
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "fixedstate.plugins.compile", "--out", folder / "ptx"]
        + ["--json", report, "--only", *SAMPLE],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(name.removesuffix(".ptx") in done.stdout for name in SAMPLE)
    return folder / "ptx", json.loads(report.read_text(encoding="utf-8"))


def test_sample_spans_operators_and_dtypes() -> None:
    assert {name.split(".")[0] for name in SAMPLE} == {spec.torch_name for spec in OPS.values()}
    assert {name.split(".")[1] for name in SAMPLE} == set(KERNEL_IO)
    forms = [name.split(".")[2] for name in SAMPLE if name.startswith("ssd")]
    assert sorted(form[:4] for form in forms) == ["l32s", "l64s", "n128"]


@pytest.mark.parametrize("name", SAMPLE)
def test_text_is_what_the_source_compiles_to(
    anew: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    """To the byte, with another cache and another folder."""
    assert (anew[0] / name).read_bytes() == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", SAMPLE)
def test_no_generation_runs_out_of_registers(
    anew: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    (row,) = (row for row in anew[1] if row["name"] == name)
    assert [one["sm"] for one in row["sms"]] == [80, 87, 89, 90, 100, 110, 120]
    for one in row["sms"]:
        assert one["spills"] == 0
        assert 16 <= one["registers"] < 255
        assert one["registers"] * row["threads"] <= 65536
    assert row["bytes"] == (FOLDER / name).stat().st_size
    assert row["shared"] <= 48 * 1024


@pytest.mark.slow
def test_every_text_is_what_the_source_compiles_to() -> None:
    """All of them, to the byte, and assembled for every generation (`make nightly`)."""
    done = subprocess.run(
        [sys.executable, "-m", "fixedstate.plugins.compile", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    count = sum(1 for _ in FOLDER.glob("*.ptx"))
    assert f"{count} texts are what this source compiles to" in done.stdout + done.stderr
