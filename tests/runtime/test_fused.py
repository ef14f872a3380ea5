"""The fused graph: a finished block's commit and the next block's first pass in one."""

from __future__ import annotations

import numpy as np
import pytest
from sample_models import mamba_layer, model
from variants import VARIANTS

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime import Request, Settings, ort
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.loop import Stream

NAMES = ("F1", "F2", "F2-forward", "F3", "F4")


def engines(path, slots):
    """The same bundle by the fused graph and by two graphs, one thread."""
    bundle = Bundle.open(path, verify_weights=False)
    sessions = ort.open_sessions(bundle, ("denoise", "commit", "commit_denoise"), threads=1)
    pairs = (("denoise", "commit_denoise"), ("denoise", "commit"), ("commit_denoise",))
    return [
        SessionEngine(
            bundle.spec, bundle.state, {role: sessions[role] for role in roles}, slots=slots
        )
        for roles in pairs
    ]


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """A bundle of linear attention and self-conditioning beside a Mamba-2 layer."""
    folder = tmp_path_factory.mktemp("linear")
    layers = (*VARIANTS["Linear attention"]["elu, normalised"].layers[:1], mamba_layer())
    spec = model(*layers, self_conditioning_width=16)
    save_checkpoint(folder / "checkpoint", spec, random_tensors(spec, seed=4))
    export_bundle(folder / "checkpoint", folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [*NAMES, "linear"])
def test_fused_equals_commit_then_denoise(request, bundle_path, name, rows):
    """State byte for byte; logits too but where sums are made in another order."""
    if name == "linear":
        path = request.getfixturevalue("linear")
    else:
        path = bundle_path(name, fused=True)
    fused, plain, _ = engines(path, rows + 1)
    spec, length = fused.spec, fused.spec.block_len
    rounds = spec.tied_embeddings or any(layer.mixer.endswith("attention") for layer in spec.layers)
    rng = np.random.default_rng(0)
    whole = np.full(rows, length)
    for block in range(4):
        ids = rng.integers(0, spec.vocab_size, (rows, 2 * length))
        first = block % 2  # rows 0.. and rows 1..: the state of the others must not move
        beside = fused.read(0 if first else rows)
        logits = fused.commit_denoise(ids, first).copy()
        plain.commit(ids[:, :length], whole, first)
        expected = plain.denoise(ids[:, length:], first)
        if rounds:
            assert np.abs(logits - expected).max() < 1e-4
        else:
            assert (logits == expected).all()
        for row in range(rows + 1):
            one, other = fused.read(row), plain.read(row)
            assert all((one[port] == other[port]).all() for port in one)
        after = fused.read(0 if first else rows)
        assert all((beside[port] == after[port]).all() for port in beside)
        assert fused.past_length.tolist() == plain.past_length.tolist()


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_all_ways_give_the_same_tokens(bundle_path, name, slots):
    """Fused, in two graphs, and all in one graph, greedy and sampled."""
    texts = []
    for engine in engines(bundle_path(name, fused=True), slots):
        length = engine.spec.block_len
        requests = [
            Request([i + 1] * (length // 2 * i), Settings(3 * length - i, seed=i, **heat))
            for i, heat in enumerate([{}, {"temperature": 1.0}, {"steps": 3}, {"threshold": 0.2}])
        ]
        stream = Stream(engine, requests)
        list(stream)
        texts.append([result.token_ids for result in stream.results])
    assert texts[0] == texts[1] == texts[2]


def test_the_fused_pass_needs_its_graph(bundle_path):
    """Without it the engine says so, and the scheduler commits apart."""
    fused, plain, single = engines(bundle_path("F2", fused=True), 2)
    assert (fused.fuses, plain.fuses, single.fuses) == (True, False, True)
    with pytest.raises(BackendError, match="commit_denoise is not loaded"):
        plain.commit_denoise(np.zeros((1, 2 * plain.spec.block_len), np.int64))
