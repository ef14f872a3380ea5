"""Memory modes: what is planned before loading, what is opened, and that tokens are the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from toy_bundle import write_toy_bundle

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.errors import BundleError, UsageError
from fixedstate.runtime import Request, Settings, load, memory
from fixedstate.runtime import ort as backend
from fixedstate.runtime.decoder import open_engine
from fixedstate.spec import LayerSpec
from fixedstate.state import Precision, StateSpec

ALL = ("denoise", "commit", "commit_denoise")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A toy bundle with every graph, opened."""
    return Bundle.open(write_toy_bundle(tmp_path_factory.mktemp("m") / "all", roles=ALL))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("mode", memory.MODES)
def test_the_plan_is_what_the_buffers_take(whole, mode, slots):
    """State, keys and values, scores: byte for byte what is allocated after a full slice."""
    plan = memory.plan(whole, mode, slots=slots, capacity=300, limit=500)
    engine = open_engine(whole, memory=mode, slots=slots, capacity=300, limit=500)
    blocks, length = whole.decode.prefill_blocks, whole.spec.block_len
    engine.commit(
        np.ones((slots, blocks * length), np.int64), np.full(slots, blocks * length, np.int64)
    )
    engine.denoise(np.ones((slots, length), np.int64))
    held = engine.buffers.nbytes
    appended = {port.suffix for port in whole.state.appended}
    assert plan.kv == sum(held[suffix] for suffix in appended) > 0
    assert plan.state == sum(size for suffix, size in held.items() if suffix not in appended) > 0
    assert plan.capacity == engine.buffers.capacity == 500
    results = {"logits", *(port.present.name for port in whole.state.appended)}
    taken = {name: flat.nbytes for name, flat in engine._scratch._flat.items()}
    assert plan.scratch == sum(taken[name] for name in results)


def test_the_plan_of_an_exported_model_is_what_the_buffers_take(bundle_path):
    """Mamba and attention layers, weights of every size."""
    bundle = Bundle.open(bundle_path("F3", fused=True))
    plan = memory.plan(bundle, slots=2)
    held = open_engine(bundle, slots=2, threads=1).buffers.nbytes
    assert plan.state + plan.kv == sum(held.values())
    file = (bundle.path / WEIGHTS).stat().st_size
    assert plan.weights == file * len(plan.sessions)
    assert plan.total == plan.weights + sum(held.values()) + plan.scratch + plan.process


def test_lean_and_fast_give_the_same_tokens(bundle_path):
    """One graph or two, in batches of rows that end at different times."""
    requests = [
        Request([3, 4, 5] * n, Settings(10 + 7 * n, temperature=1.0, seed=n, stop_ids=()))
        for n in range(4)
    ]
    answers = []
    for mode in memory.MODES:
        with load(bundle_path("F3", fused=True), memory=mode, threads=1, slots=3) as decoder:
            answers.append([result.token_ids for result in decoder.generate(requests)])
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [10, 17, 24, 31]


@pytest.mark.parametrize("mode", memory.MODES)
def test_a_mode_opens_its_graphs_and_no_other(whole, mode):
    """Lean has one session, fast one for denoising beside it."""
    engine = open_engine(whole, memory=mode)
    assert set(engine.roles) == set(memory.plan(whole, mode).sessions)
    assert len(engine.roles) == (1 if mode == "lean" else 2)
    assert engine.fuses


def test_the_default_goes_by_the_size_of_the_weights(whole):
    """Lean above the threshold, fast at it and below."""
    size = (whole.path / WEIGHTS).stat().st_size
    assert memory.choose(whole, lean_above=size) == "fast"
    assert memory.choose(whole, lean_above=size - 1) == "lean"
    assert memory.choose(whole, "fast", lean_above=size - 1) == "fast"
    assert memory.plan(whole, lean_above=size - 1).sessions == ("commit_denoise",)
    assert memory.choose(whole) == "fast"
    assert memory.LEAN_ABOVE == 10**9


@pytest.mark.parametrize(
    ("roles", "mode", "sessions"),
    [
        (("denoise", "commit"), "fast", ("denoise", "commit")),
        (("denoise", "commit_denoise"), "fast", ("denoise", "commit_denoise")),
        (("commit_denoise",), "lean", ("commit_denoise",)),
    ],
)
def test_a_bundle_with_fewer_graphs_has_one_mode(tmp_path, roles, mode, sessions):
    """It is the default whatever the size, unless both modes have their graphs."""
    bundle = Bundle.open(write_toy_bundle(tmp_path / "b", roles=roles))
    assert memory.plan(bundle).memory == mode
    assert memory.plan(bundle).sessions == sessions
    if len(roles) == 1 or "commit" in roles:
        assert memory.choose(bundle, lean_above=0) == mode


@pytest.mark.parametrize(
    ("roles", "mode", "words"),
    [
        (("denoise", "commit"), "lean", "'lean' runs on the graph 'commit_denoise'.* 'fast'"),
        (("commit_denoise",), "fast", "'fast' runs on the graph 'denoise'.* 'lean'"),
        (("denoise", "commit"), "small", "'small' is unknown; use one of lean, fast"),
    ],
)
def test_a_mode_without_its_graphs_is_refused(tmp_path, roles, mode, words):
    """Never another mode in its place."""
    folder = write_toy_bundle(tmp_path / "b", roles=roles)
    with pytest.raises(UsageError, match=words):
        load(folder, memory=mode)
    with pytest.raises(UsageError, match=words):
        memory.plan(Bundle.open(folder), mode)


def test_a_model_with_one_graph_has_no_choice(tmp_path):
    """Objective full: one copy of the weights, no state."""
    folder = write_toy_bundle(tmp_path / "b", roles=())
    full = full_bundle(Bundle.open(folder))
    assert memory.plan(full).to_dict() | {"weights": 0} == {
        "memory": "full",
        "sessions": ["full"],
        "slots": 1,
        "weights": 0,
        "state": 0,
        "capacity": 0,
        "kv": 0,
        "kv_bytes_per_token": 0,
        "scratch": 8 * 40 * 4,
        "process": memory.PROCESS,
        "total": (folder / WEIGHTS).stat().st_size + 8 * 40 * 4 + memory.PROCESS,
    }
    with pytest.raises(UsageError, match="has one graph and holds its weights once"):
        memory.choose(full, "lean")


def full_bundle(bundle):
    """The same manifest with a model of objective full."""
    layers = tuple(
        LayerSpec(layer.mixer, layer.sizes, direction="block") for layer in bundle.spec.layers
    )
    spec = replace(bundle.spec, objective="full", layers=layers)
    return replace(bundle, spec=spec, state=StateSpec.of(spec))


def test_half_precision_weights_count_twice_on_the_cpu(tmp_path):
    """ONNX Runtime's CPU has no fp16 products: it widens them."""
    bundle = Bundle.open(write_toy_bundle(tmp_path / "b", roles=ALL))
    half = replace(bundle, precision=Precision.named("fp16"))
    size = (bundle.path / WEIGHTS).stat().st_size
    assert memory.plan(half, "lean").weights == 2 * size
    assert memory.plan(half, "lean", provider="cuda").weights == size


def test_a_small_machine_is_told_of_with_both_numbers(whole, tmp_path, monkeypatch):
    """Warned before loading; where the system does not say, nothing is."""
    plan = memory.plan(whole, "fast")
    assert plan.shortage(plan.total) is None
    assert plan.shortage(None) is None
    text = plan.shortage(50_000_000)
    assert text is not None
    for words in ("needs 100.", "has 50.0 MB available", "memory 'lean'"):
        assert words in text
    assert "memory 'lean'" not in str(memory.plan(whole, "lean").shortage(1))
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:      7 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    assert memory.available() == 7 * 1024
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    assert memory.available() is None


def test_the_plan_says_itself_in_one_line(whole):
    """Mode, sum and parts."""
    text = memory.plan(whole, "fast", slots=2).text()
    assert "\n" not in text
    for words in ("memory fast: 100.", "weights 2 times", "state of 2 slots", "at 256 tokens"):
        assert words in text
    assert json.loads(json.dumps(memory.plan(whole).to_dict()))["sessions"][0] == "denoise"


def test_sessions_share_one_embedding(bundle_path):
    """It is mapped once and holds the file's numbers."""
    bundle = Bundle.open(bundle_path("F3", fused=True))
    sessions = backend.open_sessions(bundle, ("denoise", "commit_denoise"))
    first, second = (session._embedding for session in sessions.values())
    assert first is second
    stored = load_file(bundle.path / WEIGHTS)[backend.EMBEDDING]
    np.testing.assert_array_equal(first.numpy(), stored)


def test_a_damaged_weights_file_is_refused(whole, tmp_path):
    """With its name, where the hash is not checked."""
    folder = tmp_path / "b"
    shutil.copytree(whole.path, folder)
    (folder / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(BundleError, match=r"weights.safetensors is damaged .*copy the bundle"):
        load(folder, verify_weights=False)


def test_linked_weights_are_mapped_not_copied(bundle_path, tmp_path, monkeypatch):
    """Blobs of a hub cache lie elsewhere under other names; ONNX Runtime is told where."""
    whole = bundle_path("F3", fused=True)
    folder = tmp_path / "linked"
    folder.mkdir()
    for index, file in enumerate(sorted(whole.iterdir())):
        blob = tmp_path / f"store{index}" / f"blob{index}"
        blob.parent.mkdir()
        shutil.copy(file, blob)
        (folder / file.name).symlink_to(blob)
    ids = np.arange(8)[None] % 30
    results = []
    for path in (whole, folder):
        engine = open_engine(Bundle.open(path), threads=1)
        engine.commit(ids[:, : engine.spec.block_len], np.array([engine.spec.block_len]))
        results.append(engine.denoise(ids[:, : engine.spec.block_len]).copy())
    np.testing.assert_array_equal(*results)
    maps = Path("/proc/self/maps")
    if maps.is_file():  # where the system shows them
        name = f"{tmp_path}/store"
        assert any(name in line for line in maps.read_text().splitlines())


def test_a_name_in_a_graph_can_be_replaced_by_one_of_any_length():
    """Everything else in the message stays byte for byte."""
    import onnx

    model = onnx.ModelProto(ir_version=10, producer_name="weights.safetensors")
    tensor = model.graph.initializer.add(name="weights.safetensors", dims=[2], data_type=1)
    for key, value in (("location", "weights.safetensors"), ("offset", "8")):
        tensor.external_data.add(key=key, value=value)
    model.graph.initializer.add(name="own", dims=[1], data_type=1, raw_data=b"\0" * 4)
    for name in ("a", "b" * 300):
        raw = backend.replaced(
            model.SerializeToString(), backend._LOCATION, WEIGHTS.encode(), name.encode()
        )
        found = onnx.ModelProto.FromString(raw)
        assert found.graph.initializer[0].external_data[0].value == name
        found.graph.initializer[0].external_data[0].value = WEIGHTS
        assert found == model
