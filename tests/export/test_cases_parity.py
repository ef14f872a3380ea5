"""Cases VE at the exporter's comparison, and OR on bundles that were really exported."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from fixedstate.bundle import PARITY, WEIGHTS, Bundle
from fixedstate.errors import ParityError, SpecError
from fixedstate.export import parity
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.stored import as_stored
from fixedstate.ports import Array
from fixedstate.runtime import Request, Settings, load, ort
from fixedstate.runtime.compare import NOT_FINITE, Tolerance, compare
from fixedstate.runtime.decoder import open_engine
from fixedstate.state import Precision, StateSpec, graph_ports

FOUR = ("F2", "F3", "F4", "F2-forward")


@pytest.fixture(scope="session")
def denoiser(checkpoint_path) -> Callable[[str], Denoiser]:
    """What is right, by name and precision of the weights."""

    @functools.cache
    def make(name: str, precision: str = "fp32") -> Denoiser:
        loaded = load_checkpoint(checkpoint_path(name))
        stored = as_stored(loaded.tensors, Precision.named(precision))
        return Denoiser(loaded.spec, stored)

    return make


def answer(folder: Path) -> tuple[int, ...]:
    with load(folder, threads=1) as decoder:
        request = Request([1, 2, 3, 4, 5, 6, 7, 8, 9], Settings(20, stop_ids=()))
        return decoder.generate([request])[0].token_ids


# --- VE: a candidate that is wrong in any way fails -----------------------------------------------


class Changed:
    """A session whose outputs go through a function."""

    def __init__(self, session, change: Callable[[str, Array], Array]) -> None:
        self.session = session
        self.inputs, self.outputs = session.inputs, session.outputs
        self.change = change

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self.change(name, v) for name, v in self.session.run(feeds).items()}


def judged(monkeypatch, bundle: Bundle, denoiser: Denoiser, change) -> dict:
    """The report of a comparison whose candidate is changed."""
    real = parity.open_sessions
    monkeypatch.setattr(
        parity,
        "open_sessions",
        lambda *a, **k: {role: Changed(s, change) for role, s in real(*a, **k).items()},
    )
    monkeypatch.setattr(parity, "BATCHES", (1, 2))
    monkeypatch.setattr(parity, "BLOCKS", (1, 2))
    return parity.compare_graphs(bundle, denoiser)


def one_nan(name: str, value: Array) -> Array:
    out = value.copy()
    if name == "present_ssm_state_001":
        out.flat[-1] = np.nan
    return out


BAD: dict[str, tuple[Callable[[str, Array], Array], str]] = {
    "all NaN": (lambda n, v: v * np.nan, "holds NaN or infinity"),
    "one NaN": (one_nan, "present_ssm_state_001: the candidate holds NaN"),
    "infinite": (lambda n, v: v + np.inf, "holds NaN or infinity"),
    "zero": (lambda n, v: v * 0, "differs by"),
    "scaled": (lambda n, v: v * np.float32(1.87), "differs by"),
    "scaled logits": (lambda n, v: v * np.float32(1.01) if n == "logits" else v, "port logits"),
    "one row cut": (lambda n, v: v[:, :1] if n == "logits" else v, "is not the reference's"),
    "a little off": (lambda n, v: v + np.float32(2e-4) * (n == "logits"), "port logits: differs"),
}


@pytest.mark.parametrize("fault", BAD)
def test_VE_01_a_wrong_candidate_fails(monkeypatch, bundle_path, denoiser, fault):
    """NaN, infinity, zeros, a scale, a shape: the report fails, and says which port and why."""
    change, words = BAD[fault]
    report = judged(monkeypatch, Bundle.open(bundle_path("F2")), denoiser("F2"), change)
    assert report["passed"] is False
    with pytest.raises(ParityError, match=words):
        parity.require(report)
    text = json.dumps(report, allow_nan=False)  # what has no number is null, never NaN
    assert "NaN," not in text
    if "NaN" in fault or fault == "infinite":
        assert None in report["max_abs_by_graph"].values()


def test_VE_01_an_invalid_reference_fails(bundle_path, checkpoint_path, tmp_path):
    """Both sides NaN is no agreement."""
    loaded = load_checkpoint(checkpoint_path("F2"))
    tensors = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    tensors["norm.weight"][3] = float("nan")
    bundle = Bundle.open(bundle_path("F2"))
    report = parity.compare_graphs(bundle, Denoiser(loaded.spec, tensors))
    assert not report["passed"]
    with pytest.raises(ParityError, match="the reference itself is invalid"):
        parity.require(report)


def test_VE_02_an_output_that_is_zero_everywhere_passes():
    """A relative error of 0/0 is no number: nothing differs."""
    zero = {"y": np.zeros((2, 3), np.float32)}
    assert compare(zero, zero, Tolerance.of("fp32")).passed


@pytest.mark.parametrize("name", FOUR)
def test_VE_05_the_report_says_what_was_compared(bundle_path, name):
    """Every graph, batch, block count and ragged length; both sides; the tolerance in force."""
    folder = bundle_path(name, fused=True) if name == "F3" else bundle_path(name)
    report = json.loads((folder / PARITY).read_text())
    assert report["passed"]
    assert report["reference"].startswith("PyTorch float32 on cpu")
    assert "provider cpu" in report["candidate"]
    assert report["tolerance"] == Tolerance.of("fp32").to_dict()
    assert report["tolerance"]["overridden"] is False
    assert len(report["tolerance"]["reason"]) > 20
    named = [trial["trial"] for trial in report["trials"]]
    for rows in (1, 2, 5):
        assert f"denoise B={rows}" in named
        for blocks in (1, 2, 7):
            for role in set(Bundle.open(folder).graphs) - {"denoise"}:
                assert [t for t in named if t.startswith(f"{role} B={rows} n={blocks} commit_le")]
    assert [t for t in named if t.startswith("trajectory block 3")]
    assert report["worst"]["max_abs"] <= 1e-4
    assert set(Bundle.open(folder).graphs) <= set(report["max_abs_by_graph"])
    assert report["comparisons"] > len(named)


def test_VE_05_half_precision_has_its_own_tolerance(bundle_path):
    """Shown in the report of that bundle."""
    report = json.loads((bundle_path("F2", precision="fp16") / PARITY).read_text())
    assert report["precision"] == "fp16"
    assert report["tolerance"] == Tolerance.of("fp16").to_dict()


# --- OR on real bundles ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F1", *FOUR])
def test_OR_06_weights_are_in_the_side_file_once(bundle_path, name):
    """Every weight of every graph points into one file, whatever its size; graphs stay small."""
    folder = bundle_path(name, fused=True) if name == "F3" else bundle_path(name)
    stored = load_file(folder / WEIGHTS)
    used = set()
    for file in folder.glob("*.onnx"):
        assert file.stat().st_size < 100_000
        for tensor in onnx.load(file, load_external_data=False).graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert len(tensor.raw_data) <= 1024, tensor.name
                continue
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == WEIGHTS
            used.add(tensor.name)
            start, size = int(entries["offset"]), int(entries["length"])
            content = (folder / WEIGHTS).read_bytes()[start : start + size]
            assert content == stored[tensor.name].tobytes(), tensor.name
        onnx.checker.check_model(str(file))  # by path: the form that has no size limit
    assert used == set(stored)


@pytest.mark.parametrize("name", ["F3", "F2-forward"])
@pytest.mark.parametrize("layout", ["moved", "hub cache", "split stores"])
def test_OR_08_a_bundle_needs_no_other_place(bundle_path, tmp_path, name, layout):
    """Moved away and read-only, or every file a link into a folder of blobs."""
    expected = answer(bundle_path(name))
    first = tmp_path / "a" / "x.bundle"
    shutil.copytree(bundle_path(name), first)
    there = tmp_path / "b" / "c" / "y.bundle"
    there.mkdir(parents=True)
    for place, file in enumerate(sorted(first.iterdir())):
        if layout == "moved":
            shutil.move(file, there / file.name)
            (there / file.name).chmod(0o444)
            continue
        blobs = tmp_path / ("blobs" if layout == "hub cache" else f"blobs{place}")
        blobs.mkdir(exist_ok=True)
        shutil.move(file, blobs / f"{place:040d}")
        (there / file.name).symlink_to(blobs / f"{place:040d}")
    shutil.rmtree(first.parent)
    there.chmod(0o555)
    try:
        assert answer(there) == expected
    finally:
        there.chmod(0o755)


@pytest.mark.parametrize("name", FOUR)
def test_OR_09_half_precision_is_run_and_compared(bundle_path, denoiser, name):
    """The fp16 file loads on the CPU; along three blocks it stays within its tolerance."""
    bundle = Bundle.open(bundle_path(name, precision="fp16"))
    spec = bundle.spec
    assert {port.past.dtype for port in bundle.state.ports if port.kind != "ssm"} == {"float16"}
    assert {p.past.dtype for p in bundle.state.ports if p.kind == "ssm"} <= {"float32"}
    half = open_engine(bundle, threads=1, slots=2)
    right = parity.TorchEngine(denoiser(name, "fp16"), 2)
    rng = np.random.default_rng(0)
    tolerance = Tolerance.of("fp16")
    for block in range(3):
        canvas = rng.integers(0, spec.vocab_size, (2, spec.block_len))
        logits = {"logits": right.denoise(canvas)}, {"logits": half.denoise(canvas)}
        compare(*logits, tolerance).require()
        lengths = np.array([spec.block_len, spec.block_len * (block % 2)])
        half.commit(canvas, lengths)
        right.commit(canvas, lengths)
        for row in range(2):
            compare(right.read(row), half.read(row), tolerance).require()


@pytest.mark.parametrize("name", ["F1", *FOUR])
def test_OR_12_the_spread_over_optimisation_levels(bundle_path, name):
    """Levels none, basic and all: logits and states within 1e-4 of one another."""
    bundle = Bundle.open(bundle_path(name))
    spec = bundle.spec
    ids = np.random.default_rng(2).integers(0, spec.vocab_size, (2, 3 * spec.block_len))
    found: dict[str, list[Array]] = {}
    for level in ort.OPTIMIZATIONS:
        engine = open_engine(bundle, threads=1, slots=2, optimization=level)
        engine.commit(ids, np.array([3, 1]) * spec.block_len)
        arrays = {"logits": engine.denoise(ids[:, : spec.block_len]).copy()}
        arrays |= {f"{k} {row}": v for row in range(2) for k, v in engine.read(row).items()}
        for key, array in arrays.items():
            found.setdefault(key, []).append(array)
    assert all(len(arrays) == 3 for arrays in found.values())
    for key, arrays in found.items():
        spread = np.max(arrays, axis=0) - np.min(arrays, axis=0)
        assert spread.max() <= 1e-4, key


# --- laws against the checkpoint ------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR)
def test_laws_1_and_5_hold_against_pytorch(bundle_path, checkpoint_path, name):
    """Cached passes equal the stateless recompute and the cached PyTorch denoiser."""
    found = parity.check_against_checkpoint(
        Bundle.open(bundle_path(name)), checkpoint_path(name), block_counts=(1, 2, 3)
    )
    assert [(law.law, law.passed) for law in found] == [(1, True), (5, True)], found
    assert all(law.worst is not None and law.worst <= 1e-4 for law in found)
    assert "not run" not in found[0].note


def test_laws_against_another_checkpoint_are_refused(bundle_path, checkpoint_path):
    """Its sizes give it away; nothing is compared."""
    with pytest.raises(SpecError, match="is not the checkpoint of"):
        parity.check_against_checkpoint(Bundle.open(bundle_path("F2")), checkpoint_path("F3"))


def test_ports_of_every_exported_precision(bundle_path):
    """fp16: io and keys in half, scan state float32, lengths int64; the graph agrees."""
    bundle = Bundle.open(bundle_path("F3", precision="fp16"))
    state = StateSpec.of(bundle.spec, bundle.precision)
    assert state == bundle.state
    for role, graph in bundle.graphs.items():
        assert (graph.inputs, graph.outputs) == graph_ports(bundle.spec, state, role)


def test_a_model_beyond_the_range_of_float16_is_told_so():
    """Its logits are NaN in float16 only: another precision helps, a report does not."""
    worst = {"trial": "trajectory block 0 denoise", "name": "logits", "problem": NOT_FINITE}
    report = {
        "passed": False,
        "worst": worst,
        "tolerance": {"precision": "fp16", "absolute": None, "relative": 2e-2},
        "trials": [{"passed": False}, {"passed": True}],
    }
    with pytest.raises(ParityError, match=r"in 1 of 2 trials .* float16 \(65504\)"):
        parity.require(report)
    report["tolerance"] = {"precision": "fp32", "absolute": 1e-4, "relative": 1e-2}
    with pytest.raises(ParityError, match="please report this model"):
        parity.require(report)
