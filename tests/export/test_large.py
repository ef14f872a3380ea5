"""Large checkpoints: weights go through one at a time, parts are compared in place of graphs."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.numpy import load_file
from sample_models import MODELS, attention_layer, mamba_layer, model

from fixedstate.bundle import PARITY, WEIGHTS, Bundle, sha256_of
from fixedstate.errors import CheckpointError, ExportError, ParityError
from fixedstate.export import layerwise, passes
from fixedstate.export import trace as tracing
from fixedstate.export.checkpoint import load_checkpoint, random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.layerwise import compare_layers
from fixedstate.export.parity import require
from fixedstate.export.parts import parts_of
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.stored import StoredWeights
from fixedstate.export.trace import trace, without_weights
from fixedstate.export.weightfile import write_weights
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.spec import (
    AttentionSizes,
    LayerSpec,
    LinearAttentionSizes,
    Mamba1Sizes,
    ModelSpec,
)
from fixedstate.state import Precision

ROOT = Path(__file__).resolve().parents[2]
NAME = "F2-forward"
"""Two alike layers and a tied head."""


# --- the comparison by parts ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces() -> dict:
    """Graphs of parts, traced once for this file: the faults lie in weights and places."""
    return {}


@pytest.fixture
def compared(monkeypatch, traces, bundle_path, checkpoint_path, tmp_path) -> Callable[..., dict]:
    """The report on a copy of a bundle, changed, against its checkpoint."""
    real = layerwise._trace

    def once(part, bundle, role):
        if (part.key, role) not in traces:
            traces[part.key, role] = real(part, bundle, role)
        return traces[part.key, role]

    monkeypatch.setattr(layerwise, "_trace", once)

    def run(change: Callable[[Path], object] = lambda _: None) -> dict:
        folder = tmp_path / "b"
        shutil.copytree(bundle_path(NAME), folder)
        bundle = Bundle.open(folder)
        change(folder)
        return compare_layers(bundle, load_checkpoint(checkpoint_path(NAME)).tensors)

    return run


def weight_bytes(folder: Path, name: str) -> np.memmap:
    """The bytes of a weight in a bundle's file, to be changed in place."""
    for tensor in onnx.load(folder / "denoise.onnx", load_external_data=False).graph.initializer:
        if tensor.name == name:
            at = {entry.key: int(entry.value) for entry in tensor.external_data[1:]}
            place = {"offset": at["offset"], "shape": (at["length"],)}
            return np.memmap(folder / WEIGHTS, np.uint8, "r+", **place)
    raise AssertionError(name)


def swap(folder: Path) -> None:
    one, two = (weight_bytes(folder, f"layers.{i}.mixer.out_proj.weight") for i in (0, 1))
    one[:], two[:] = np.array(two), np.array(one)


def unturned(folder: Path) -> None:
    raw = weight_bytes(folder, "layers.1.mixer.out_proj.weight")
    width = MODELS[NAME].width
    raw[:] = raw.view(np.float32).reshape(-1, width).T.copy().reshape(-1).view(np.uint8)


def wrong_sign(folder: Path) -> None:
    raw = weight_bytes(folder, "layers.1.mixer.A").view(np.float32)
    raw[:] = -raw


def other_columns(folder: Path) -> None:
    raw = weight_bytes(folder, "layers.0.mixer.in_proj.weight.0").view(np.float32)
    raw[:] = np.roll(raw.reshape(MODELS[NAME].width, -1), 1, axis=1).reshape(-1)


def moved(folder: Path, roles: tuple[str, ...] = ("denoise", "commit"), by: int = 4) -> None:
    """Let graphs read one weight from another place."""
    for role in roles:
        graph = onnx.load(folder / f"{role}.onnx", load_external_data=False)
        for tensor in graph.graph.initializer:
            if tensor.name == "layers.0.mixer.conv1d.weight":
                for entry in tensor.external_data:
                    if entry.key == "offset":
                        entry.value = str(int(entry.value) + by)
        onnx.save(graph, folder / f"{role}.onnx")


def test_every_part_is_compared_and_the_report_says_so(compared, tmp_path):
    """Embedding, each layer, head, two layers from end to end; nothing is left behind."""
    report = compared()
    assert report["passed"]
    assert report["scope"] == "layers"
    assert report["parts"] == ["embedding", "layers.0", "layers.1", "head", "ends+layers.0+1"]
    assert set(report["max_abs_by_graph"]) == {*report["parts"], "trajectory"}
    named = [trial["trial"] for trial in report["trials"]]
    for part in ("layers.0", "layers.1", "ends+layers.0+1"):
        for rows in (1, 3):
            assert f"{part} denoise B={rows}" in named
            for blocks in (1, 3):
                assert [t for t in named if t.startswith(f"{part} commit B={rows} n={blocks} ")]
    assert report["worst"]["max_abs"] <= 1e-4
    assert not [file.name for file in (tmp_path / "b").iterdir() if "part" in file.name]


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "two layers swapped": (swap, "layers.[01] "),
    "not turned": (unturned, "layers.1 "),
    "sign of A": (wrong_sign, "layers.1 "),
    "columns shifted": (other_columns, "layers.0 "),
    "wrong offset": (moved, "layers.0 "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_weight_is_found_in_its_layer(compared, fault):
    """The file or a place in it is wrong: the layer's own trials fail."""
    change, where = FAULTS[fault]
    report = compared(change)
    assert not report["passed"]
    failed = {trial["trial"].partition(" ")[0] for trial in report["trials"] if not trial["passed"]}
    layers = {part for part in failed if part.startswith("layers.")}
    assert layers == ({"layers.0", "layers.1"} if "[01]" in where else {where.strip()})
    with pytest.raises(ParityError, match="differ from PyTorch"):
        require(report)


def test_graphs_that_read_one_weight_from_two_places_are_refused(compared):
    """What was compared would stand for one of them only."""
    with pytest.raises(ParityError, match=r"reads weight 'layers.0.mixer.conv1d.weight' from"):
        compared(lambda folder: moved(folder, roles=("commit",)))


def test_a_weight_that_no_part_has_is_refused(compared, monkeypatch):
    """Everything that the bundle's graphs read was compared, or there is no bundle."""
    monkeypatch.setattr(
        layerwise,
        "parts_of",
        lambda *given: [p for p in parts_of(*given) if p.name != "layers.1"][:2],
    )
    with pytest.raises(ParityError, match=r"which no compared part has"):
        compared()


def test_an_export_by_parts_gives_the_same_bundle(bundle_path, checkpoint_path, tmp_path):
    """How it is compared changes parity.json and nothing else."""
    whole = Bundle.open(bundle_path("F2", precision="fp16"))
    said: list[str] = []
    found = export_bundle(
        checkpoint_path("F2"),
        tmp_path / "b",
        precision="fp16",
        fused=False,
        whole_up_to=0,
        progress=said.append,
    )
    assert found.bundle.digest == whole.digest
    assert json.loads((whole.path / PARITY).read_text())["scope"] == "whole graphs"
    assert found.parity["scope"] == "layers"
    assert found.parity["passed"]
    assert "comparing layers.1 with PyTorch (3 of 5)" in said


HYBRIDS = {
    "neighbours of two kinds": (("mamba2", "mamba2", "attention", "mamba2"), (1, 2)),
    "apart": (("mamba2", "none", "attention"), (0, 2)),
    "one kind": (("attention", "attention"), (0, 1)),
    "one layer": (("mamba2",), (0,)),
}


@pytest.mark.parametrize("case", HYBRIDS)
def test_two_kinds_of_mixer_meet_from_end_to_end(case):
    """The pair has both kinds where the model has both, as near as can be."""
    mixers, expected = HYBRIDS[case]
    kinds = {
        "mamba2": mamba_layer(),
        "attention": attention_layer(),
        "none": LayerSpec("none", None, mlp="plain", mlp_width=8),
    }
    assert parts_of(model(*(kinds[mixer] for mixer in mixers)))[-1].layers == expected


# --- weights go through one at a time -------------------------------------------------------------


def outline(spec: ModelSpec, precision: Precision) -> Denoiser:
    return without_weights(spec, lambda given: Denoiser(spec, given, precision, TRACED))


class Counted(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint; counts what is read, and what is still held."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.read: list[str] = []
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].clone()
        self._alive.add(tensor)
        self.read.append(name)
        self.most = max(self.most, len(self._alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_file_is_written_tensor_by_tensor(tmp_path, precision):
    """Each is read once and dropped; the file is safetensors and its hash is right."""
    spec, chosen = MODELS["F3"], Precision.named(precision)
    graphs = []
    for role in ("denoise", "commit"):
        graphs.append(passes.finish(trace(outline(spec, chosen), role), spec, chosen, role))
    tensors = Counted(random_tensors(spec, seed=1))
    places, digest = write_weights(graphs, StoredWeights(tensors, chosen), tmp_path / WEIGHTS)
    assert sorted(tensors.read) == sorted(tensors)
    assert tensors.most <= 2
    assert digest == sha256_of(tmp_path / WEIGHTS)
    held = Denoiser(spec, dict(tensors.items()), chosen)
    content = load_file(tmp_path / WEIGHTS)
    assert content.keys() == places.keys()
    seen: dict[str, int] = {}
    for name in sorted(content):
        assert places[name].offset % content[name].itemsize == 0
        whole, _, part = name.rpartition(".")
        right = held.weight(whole if part.isdigit() else name).numpy()
        if part.isdigit():
            first = seen.get(whole, 0)
            seen[whole] = first + content[name].shape[1]
            right = right[:, first : seen[whole]]
        assert content[name].dtype == right.dtype
        assert np.array_equal(content[name], right), name
    for whole, columns in seen.items():
        assert columns == held.weight(whole).shape[1]


def test_a_weight_beyond_half_precision_is_refused_by_name(tmp_path):
    """It would be infinite in the file."""
    spec = MODELS[NAME]
    tensors = random_tensors(spec, seed=1)
    tensors["layers.1.mixer.out_proj.weight"][2, 3] = 1e5
    save_checkpoint(tmp_path / "c", spec, tensors)
    with pytest.raises(ExportError, match=r"out_proj.weight holds values up to 1e\+05, which do"):
        export_bundle(tmp_path / "c", tmp_path / "b", precision="fp16")
    assert not (tmp_path / "b").exists()


def test_passes_cannot_ask_for_values():
    """A graph is traced without weights; a pass that looks at one says which."""
    spec = MODELS[NAME]
    graph = trace(outline(spec, Precision()), "denoise")
    held = graph.graph.initializers["denoiser.embedding__weight"].const_value
    with pytest.raises(ExportError, match="asked for the values of weight"):
        held.numpy()


def test_a_checkpoint_that_changes_under_way_is_refused(tmp_path):
    """Tensors are read when they are asked for, of the file that was checked."""
    spec = MODELS[NAME]
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=1), shards=2)
    loaded = load_checkpoint(tmp_path / "c")
    assert torch.equal(loaded.tensors["norm.weight"], random_tensors(spec, seed=1)["norm.weight"])
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=2), shards=2, force=True)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        loaded.tensors["norm.weight"]


@pytest.mark.parametrize("role", ["denoise", "commit", "commit_denoise"])
def test_the_graph_is_the_one_of_the_full_decomposition(monkeypatch, role):
    """PyTorch's second run through the graph is left out, and changes nothing."""
    spec, precision = MODELS["F3"], Precision.named("fp16")
    short = passes.finish(trace(outline(spec, precision), role), spec, precision, role)
    asked: list[bool] = []
    real = tracing._decomposable
    monkeypatch.setattr(tracing, "_decomposable", lambda *given: asked.append(real(*given)) or True)
    full = passes.finish(trace(outline(spec, precision), role), spec, precision, role)
    assert asked == [False]
    assert outputs(short) == outputs(full)


def outputs(graph: ir.Model) -> list[str]:
    """How each output is computed, whatever the order of the nodes: a digest."""
    known: dict[ir.Value, str] = {}

    def told(value: ir.Value | None) -> str:
        if value is None or value not in known:
            return "" if value is None else str(value.name)
        return known[value]

    for name, value in graph.graph.initializers.items():
        if not passes.is_weight(name):
            known[value] = str(value.const_value.numpy().tolist())
    for node in graph.graph:
        attributes = sorted((key, str(attr.value)) for key, attr in node.attributes.items())
        text = f"{node.op_type} {attributes} {[told(value) for value in node.inputs]}"
        for place, value in enumerate(node.outputs):
            known[value] = hashlib.sha256(f"{text} {place}".encode()).hexdigest()
    return [known[value] for value in graph.graph.outputs]


# --- slow -----------------------------------------------------------------------------------------

SCAN = Mamba1Sizes(d_inner=32, d_state=4, dt_rank=2, d_conv=4)
WINDOW = AttentionSizes(
    heads=4, kv_heads=2, head_dim=8, rotary_dim=8, window=10, sinks=3, keys_rotated=False
)
EVERY_KIND = {
    "block": model(
        LayerSpec("mamba1", SCAN, "block", "projections"),
        attention_layer(sizes=WINDOW),
        LayerSpec("linear_attention", LinearAttentionSizes(4, 2, 8, rotary_dim=8)),
        LayerSpec("mamba1", SCAN, "reverse", norm_place="after", norm="layer", output_gate=True),
        tied_embeddings=True,
        self_conditioning_width=16,
        logit_shift=True,
        logit_softcap=5.0,
        residual_fp32=True,
    ),
    "full": model(mamba_layer(), attention_layer(), objective="full", head_bias=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_KIND)
def test_parts_of_every_kind_agree(tmp_path, name):
    """Whatever a layer, an embedding or a head can be, it can be a graph of its own."""
    spec = EVERY_KIND[name]
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=3))
    report = export_bundle(tmp_path / "c", tmp_path / "b", precision="fp16", whole_up_to=0).parity
    assert report["passed"]
    assert len(report["parts"]) == len(spec.layers) + 3


# --- as large as it gets --------------------------------------------------------------------------


@pytest.mark.slow
def test_three_billion_weights_fit_a_small_machine(tmp_path):
    """Above the 2 GB of a protobuf: peak memory and bytes on disk of the whole command."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from bench_export import measure

        found = measure("b3", "fp16", tmp_path)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert found["weights_bytes"] > 2 << 30
    assert found["scope"] == "layers"
    assert found["peak_over_checkpoint"] <= 1.3
    assert found["bundle_over_weights"] <= 1.02
