"""NVIDIA's ``tensorrt.plugin`` package, three versions of it, takes every operator as it is meant.

Each version runs once, in a process of its own (`quick_contract.py`, on `trt_stand_in.py`), and
prints what the plugins handed over; the tests compare that with KernelSpec on plain ints and with
the PTX texts.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fixedstate.errors import BackendError
from fixedstate.plugins import ptx
from fixedstate.plugins.quick import register
from fixedstate.plugins.schema import DOMAIN, KERNEL_IO, OPS, VERSION, KernelSpec, Tile

VERSIONS = ("10.9", "10.13", "11.4")
"""The first with ahead-of-time plugins, the last before the broken 10.14, and the newest."""

TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64"}


@functools.cache
def run_contract(version: str) -> dict[str, Any] | str:
    """What the program printed, or why it failed: it is not run again for every test."""
    folder = Path(sys.prefix) / "plugin-packages" / version
    if not (folder / "tensorrt_bindings" / "plugin").is_dir():
        return f"TensorRT's plugin package {version} is not in {folder}; run `make setup`"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("quick_contract.py")), folder, version],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stderr if done.returncode else dict(json.loads(done.stdout))


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def facts(version: str) -> dict[str, Any]:
    found = run_contract(version)
    if isinstance(found, str):
        pytest.fail(found)
    return found


def tile_of(spec: KernelSpec, tactic: int) -> Tile:
    return spec.tiles[tactic - 1]


def tactics(facts: dict[str, Any]) -> Iterator[tuple[KernelSpec, dict[str, Any], dict[str, Any]]]:
    for build in facts["builds"]:
        for tactic in build["tactics"]:
            yield OPS[build["op"]], build, tactic


def parameters(text: str) -> tuple[str, list[str]]:
    """Entry name and kinds of parameters of a PTX text."""
    (found,) = re.findall(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)", text)
    kinds = {".u64": "pointer", ".b64": "pointer", ".u32": "int32", ".b32": "int32"}
    kinds[".s32"] = "int32"
    entry, listed = found
    return entry, [kinds[one] for one in re.findall(r"\.param\s+(\.[usb](?:32|64))\b", listed)]


def test_the_real_package_ran(version: str, facts: dict[str, Any]) -> None:
    """NVIDIA's files, the older ones with the numpy they work with."""
    assert facts["package"] == "tensorrt_bindings/plugin/__init__.py"
    if version == "11.4":
        assert facts["numpy"] == np.__version__
    else:
        assert tuple(map(int, facts["numpy"].split(".")[:2])) < (2, 4)


def test_every_operator_is_registered_once(facts: dict[str, Any]) -> None:
    names = [f"{DOMAIN}::{name}" for name in OPS]
    assert facts["registered"] == facts["again"] == names
    assert facts["creators"] == [[name, str(VERSION), DOMAIN] for name in OPS]
    assert facts["fields"] == {name: ["block_len"] for name in OPS}


def test_exactly_the_fitting_tactics_are_offered(facts: dict[str, Any]) -> None:
    """Autotune knows sizes and attribute, so TensorRT never times a form that does not fit."""
    offered = set()
    for build in facts["builds"]:
        spec, sizes, label = OPS[build["op"]], build["sizes"][1], str(build["sizes"])
        found = [one["tactic"] for one in build["tactics"]]
        fitting = spec.tiles_for(sizes, build["block_len"])
        assert sorted(found) == sorted(spec.tactic(tile) for tile in fitting), label
        offered |= {(spec.name, build["io"], tactic) for tactic in found}
    every = {
        (spec.name, io, spec.tactic(tile))
        for spec in OPS.values()
        for io in KERNEL_IO
        for tile in spec.tiles
    }
    assert offered == every


def test_launches_equal_the_spec_on_ints(facts: dict[str, Any]) -> None:
    """Grid and int32 arguments at three points of the profile, from symbolic expressions."""
    for spec, build, one in tactics(facts):
        tile = tile_of(spec, one["tactic"])
        assert len(build["sizes"]) == len(one["launches"]) == 3
        for sizes, launch in zip(build["sizes"], one["launches"], strict=True):
            full = {**sizes, "L": build["block_len"] or sizes["T"]}
            expected = spec.launch(full, tile)
            assert launch == {
                "grid": list(expected.grid),
                "arguments": list(expected.arguments),
            }, (spec.name, tile.label, sizes)


def test_outputs_have_the_spec_s_shapes_and_types(facts: dict[str, Any]) -> None:
    for build in facts["builds"]:
        spec, io = OPS[build["op"]], build["io"]
        types = [TYPES[port.dtype_for(io)] for port in spec.ports]
        assert build["out_types"] == types[len(spec.inputs) :]
        for sizes, shapes in zip(build["sizes"], build["out_shapes"], strict=True):
            assert shapes == [list(shape) for shape in spec.shapes(sizes)[len(spec.inputs) :]]
        for one in build["tactics"]:
            assert one["types"] == types
        # no output shares memory with an input: state buffers trade places instead
        assert build["aliased"] == [-1] * len(spec.outputs)


def test_kernels_are_the_shipped_texts(facts: dict[str, Any]) -> None:
    """Entry, parameters, threads and shared memory agree with the text that is handed over."""
    seen = set()
    for spec, build, one in tactics(facts):
        tile = tile_of(spec, one["tactic"])
        text = ptx.load(spec, tile, build["io"])
        label = ptx.file_name(spec, tile, build["io"])
        assert one["sha256"] == text.sha256, label
        assert not one["nul"], label
        assert one["aot"], label
        entry, kinds = parameters(text.text)
        assert one["entry"] == entry, label
        wanted = ["pointer"] * len(spec.inputs)
        wanted += ["int32"] * len(one["launches"][0]["arguments"])
        wanted += ["pointer"] * len(build["out_types"])
        assert kinds == wanted, label
        (threads,) = re.findall(r"\.reqntid\s+(\d+)", text.text)
        assert one["block"] == [int(threads), 1, 1], label
        assert one["shared"] == text.shared <= ptx.SHARED_LIMIT, label
        seen.add(label)
    assert seen == {
        ptx.file_name(spec, tile, io)
        for spec in OPS.values()
        for io in KERNEL_IO
        for tile in spec.tiles
    }


def test_sizes_and_profiles_keep_their_kernels_apart(facts: dict[str, Any]) -> None:
    """Two models' sizes of one operator in one network, two profiles each, clones included."""
    spec = OPS["SsdBlockCommit"]
    texts: dict[str, list[str]] = {}
    for name, row in facts["network"].items():
        fitting = [spec.tactic(tile) for tile in spec.tiles_for(row["sizes"][0], 32)]
        assert sorted(one["tactic"] for one in row["tactics"]) == sorted(fitting)
        for one in row["tactics"]:
            tile = tile_of(spec, one["tactic"])
            assert one["sha256"] == ptx.load(spec, tile, "float16").sha256
            for sizes, launch in zip(row["sizes"], one["launches"], strict=True):
                expected = spec.launch({**sizes, "L": 32}, tile)
                assert launch["grid"] == list(expected.grid)
                assert launch["arguments"] == list(expected.arguments)
        texts[name] = [one["sha256"] for one in row["tactics"]]
    assert texts["small 0"] == texts["small 1"]
    assert texts["large 0"] == texts["large 1"]
    assert not set(texts["small 0"]) & set(texts["large 0"])


def test_nodes_need_no_aot_attribute(facts: dict[str, Any]) -> None:
    """Whatever a network prefers, the only implementation is the ahead-of-time one."""
    outcomes = dict(facts["requests"])
    assert "JIT implementation requested, but not defined" in outcomes.pop("STRICT_JIT")
    assert outcomes == dict.fromkeys(("UNKNOWN", "PREFER_JIT", "PREFER_AOT", "STRICT_AOT"), "ok")


REFUSALS = {
    "parse fp32": ("BackendError", "activations are float32", "without plugins"),
    "parse fp32 ssd": ("BackendError", "activations are float32", "without plugins"),
    "parse odd channels": ("BackendError", "C = 50", "multiples of 16", "without plugins"),
    "parse odd head": ("BackendError", "P = 40", "multiples of 16", "without plugins"),
    "parse odd state": ("BackendError", "N = 24", "multiples of 16", "without plugins"),
    "parse wide ssd": ("BackendError", "N = 512", "at most", "without plugins"),
    "parse wide scan": ("BackendError", "N = 1024", "at most", "without plugins"),
    "parse dynamic channels": ("BackendError", "C is dynamic", "without plugins"),
    "parse dynamic taps": ("BackendError", "K is dynamic", "without plugins"),
    "parse dynamic state": ("BackendError", "N is dynamic", "without plugins"),
    "parse dt float16": ("BackendError", "'dt' is float16", "expected float32"),
    "parse state float16": ("BackendError", "'state' is float16", "expected float32"),
    "parse length int32": ("BackendError", "'length' is INT32", "expected int64"),
    "parse mixed io": ("BackendError", "'b' is bfloat16", "expected float16"),
    "parse no attribute": ("BackendError", "lacks the attribute 'block_len'", "export"),
    "parse long block": ("SpecError", "block_len is 257", "1 to 256"),
    "parse too few inputs": ("SpecError", "has 7 inputs", "6 shapes"),
    "parse rank": ("SpecError", "'x' has 2 axes", "[B, T, C]"),
    "parse groups": ("SpecError", "8 heads", "3 groups"),
    "launch many rows": ("BackendError", "65536 thread blocks", "profile's max", "Lower"),
    "launch many rows ssd": ("BackendError", "65536 thread blocks", "profile's max", "Lower"),
    "launch long": ("BackendError", "thread blocks along y", "profile's max", "Lower"),
    "launch half block": ("BackendError", "100 tokens", "profile's max", "Change the profile"),
    "launch half block at least": ("BackendError", "16 tokens", "profile's min", "Change"),
    "launch int32": ("BackendError", "2147483648", "profile's max", "Lower"),
    "launch stale tactic": ("BackendError", "was not offered", "timing cache"),
}


@pytest.mark.parametrize("label", REFUSALS)
def test_what_cannot_be_built_says_so(facts: dict[str, Any], label: str) -> None:
    """Type, cause and way out; all but the profile's own bounds before anything is built."""
    kind, *words = REFUSALS[label]
    text = facts["refusals"][label]
    assert text.startswith(f"{kind}: "), text
    for word in words:
        assert word in text


def test_every_refusal_is_judged_and_collected(facts: dict[str, Any]) -> None:
    """TensorRT shows an error's text on stderr only; a caller reads it from the list."""
    assert set(facts["refusals"]) == set(REFUSALS)
    texts = [text.partition(": ")[2] for text in facts["refusals"].values()]
    assert facts["collected"] == texts


def test_the_package_refuses_what_the_plugins_avoid(facts: dict[str, Any]) -> None:
    """The traps are real in every version, and the stand-in does not hide them."""
    found = dict(facts["traps"])
    assert found.pop("none") == "ok"
    assert "SymInt32" in found.pop("bare int")
    assert found.pop("subset") == "TypeError: 5 arguments for 4 parameters"
    assert "No return annotation" in found.pop("no return type")
    assert "Unexpected attribute 'y'" in found.pop("other name")
    assert not found


def test_a_tensorrt_without_ahead_of_time_plugins_is_refused() -> None:
    old = SimpleNamespace(__version__="10.7.0.23")
    with pytest.raises(BackendError, match=r"10\.7\.0\.23 has no ahead-of-time plugins"):
        register(old, SimpleNamespace())
