"""Every legal variant against the float64 loops, and every refusal with its sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference_model import ReferenceModel
from variants import REFUSED, flat_variants, sentence_of

from fixedstate.export.denoiser import Denoiser
from fixedstate.export.parity import TorchEngine
from fixedstate.export.weights import random_tensors
from fixedstate.spec import ModelSpec

TOLERANCE = 1e-5  # float64, but for A and rotary angles, which are float32 as in every bundle
VARIANTS = flat_variants()
LONG = {name: spec for name, spec in VARIANTS.items() if spec.block_len > 64}
TABLE = Path(__file__).resolve().parents[2] / "docs" / "mixers.md"


def lengths_of(spec: ModelSpec) -> list[int]:
    """Tokens of the sequence: one, around the block, and many."""
    length = spec.block_len
    return sorted({1, length - 1, length, length + 1, *([] if length > 64 else [3 * length + 5])})


@pytest.fixture(params=VARIANTS)
def variant(request) -> tuple[ModelSpec, Denoiser, ReferenceModel]:
    spec = VARIANTS[request.param]
    tensors = random_tensors(spec, seed=5)
    return spec, Denoiser(spec, tensors).double(), ReferenceModel(spec, tensors)


def test_a_variant_equals_the_loops(variant):
    """Cached and recomputed, at lengths 1, L-1, L, L+1 and 3L+5: logits, states, last_logits."""
    spec, denoiser, judge = variant
    rng = np.random.default_rng(0)
    for tokens in lengths_of(spec):
        ids = rng.integers(0, spec.vocab_size, tokens)
        if spec.objective == "full":
            expected, _ = judge.run(ids, clean=0)
            with torch.inference_mode():
                found = denoiser.passes("full", torch.from_numpy(ids)[None], {}).logits
            np.testing.assert_allclose(found[0], expected, atol=TOLERANCE)
            continue
        check_length(spec, denoiser, judge, ids)


def check_length(spec: ModelSpec, denoiser: Denoiser, judge: ReferenceModel, ids: np.ndarray):
    """Whole blocks are committed, the rest is fixed in the canvas behind them."""
    length = spec.block_len
    clean = len(ids) // length * length
    canvas = np.full(length, spec.mask_id)
    canvas[: len(ids) - clean] = ids[clean:]
    whole = np.concatenate([ids[:clean], canvas])
    expected, states = judge.run(whole, clean)
    engine, at_once = TorchEngine(denoiser, 1), TorchEngine(denoiser, 1, stateless=True)
    for start in range(0, clean, length):
        engine.commit(ids[None, start : start + length], np.array([length]))
    if clean:
        at_once.commit(ids[None, :clean], np.array([clean]))
    for side in (engine, at_once):
        np.testing.assert_allclose(side.denoise(canvas[None])[0], expected[clean:], atol=TOLERANCE)
    if spec.self_conditioning_width:
        soft = judge.soft_embedding(expected[clean:])
        again, _ = judge.run(whole, clean, soft)
        np.testing.assert_allclose(engine.denoise(canvas[None])[0], again[clean:], atol=TOLERANCE)
    found = engine.read(0)
    assert found.keys() == states.keys()
    for suffix, state in states.items():
        np.testing.assert_allclose(found[suffix], state, atol=TOLERANCE, err_msg=suffix)
    if spec.logit_shift:
        last = expected[clean - 1] if clean else np.zeros(spec.vocab_rows)
        np.testing.assert_allclose(engine.last_logits[0], last, atol=TOLERANCE)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_was_given(name):
    """One line with what was given or what would be needed."""
    text = sentence_of(REFUSED[name])
    assert len(text) > 30
    assert "\n" not in text


def test_the_table_lists_every_variant_and_every_refusal():
    """docs/mixers.md is made by benchmarks/mixers.py from the same lists."""
    text = TABLE.read_text(encoding="utf-8")
    for name in VARIANTS:
        section, _, variant = name.partition(": ")
        assert f"## {section}\n" in text, name
        assert f"\n| {variant} | exact |" in text, name
    for name, refused in REFUSED.items():
        assert f"\n| {name} | refused: {sentence_of(refused)} |" in text, name
