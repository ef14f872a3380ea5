"""The torch denoiser equals the float64 loops, cached or not, alone or in a ragged batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_model import ReferenceModel
from sample_models import (
    MAMBA,
    MODELS,
    attention_layer,
    mamba_layer,
    model,
    selective_layer,
)

from fixedstate.export.denoiser import Denoiser
from fixedstate.export.weights import random_tensors
from fixedstate.spec import LayerSpec, Mamba1Sizes, Mamba2Sizes, ModelSpec

TOLERANCE = 1e-4

SIDECAR = selective_layer("reverse", norm="layer", norm_place="after", output_gate=True)

VARIANTS: dict[str, ModelSpec] = {
    **MODELS,
    "commit-forward-only": model(mamba_layer(), mamba_layer(), commit_reverse=False),
    "commit-causal": model(
        mamba_layer(), attention_layer(), commit_reverse=False, commit_mask="causal"
    ),
    "reverse-layer": model(mamba_layer("forward"), mamba_layer("reverse"), attention_layer()),
    "mlp-only": model(LayerSpec("none", None, mlp="gated", mlp_width=16), mamba_layer()),
    "one-tap": model(mamba_layer(sizes=Mamba2Sizes(64, 8, 8, 8, 1, 1))),
    "eight-taps": model(mamba_layer(sizes=Mamba2Sizes(64, 4, 16, 4, 4, 8))),
    "chunks": model(mamba_layer(), attention_layer(), mamba_layer(), block_len=80),
    "biased-commit-forward-only": model(
        mamba_layer(sizes=replace(MAMBA, bias=True)),
        mamba_layer(sizes=replace(MAMBA, bias=True), tied="projections"),
        mamba_layer("forward"),
        commit_reverse=False,
    ),
    "mamba1-untied": model(selective_layer(), selective_layer()),
    "mamba1-tied": model(selective_layer(tied="all"), selective_layer(tied="projections")),
    "mamba1-one-tap": model(
        selective_layer(sizes=Mamba1Sizes(24, 3, 5, 1, bias=True)),
        selective_layer("reverse", Mamba1Sizes(24, 3, 5, 1)),
        selective_layer("forward", Mamba1Sizes(33, 1, 2, 8, conv_bias=False)),
    ),
    "mamba1-commit-forward-only": model(
        selective_layer(sizes=Mamba1Sizes(16, 16, 2, 2, bias=True)),
        selective_layer("forward"),
        commit_reverse=False,
    ),
    "two-mambas": model(selective_layer(), mamba_layer(), selective_layer("forward")),
    "sidecar": model(
        attention_layer("forward"), SIDECAR, attention_layer("forward"), commit_mask="causal"
    ),
    "sidecar-left-out": model(
        attention_layer("forward"),
        SIDECAR,
        attention_layer("forward"),
        commit_reverse=False,
        commit_mask="causal",
    ),
    "causal-attention": model(attention_layer("forward"), attention_layer("forward")),
}


def rows_of(spec: ModelSpec, lengths: list[int], tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ids, the mask id among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, spec.vocab_size, (len(lengths), tokens), generator=generator)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_pass_and_cached_passes_equal_the_loops(name: str) -> None:
    """A frontier block over cached states gives the logits of a whole uncached sequence."""
    spec = VARIANTS[name]
    length = spec.block_len
    tensors = random_tensors(spec, seed=3)
    denoiser = Denoiser(spec, tensors)
    judge = ReferenceModel(spec, tensors)
    blocks = [0, 1, 3]
    capacity = 4 * length
    for count in blocks:
        ids = rows_of(spec, [0], (count + 1) * length, seed=count)
        expected, states = judge.run(ids[0].numpy(), clean=count * length)
        logits = denoiser.recompute(ids)[0]
        np.testing.assert_allclose(logits, expected[-length:], atol=TOLERANCE)
        state = denoiser.zero_state(1, capacity)
        past = torch.zeros(1, dtype=torch.int64)
        for block in range(count):
            part = ids[:, block * length : (block + 1) * length]
            made = denoiser.commit(part, state, past, torch.tensor([length]))
            state = advance(denoiser, state, made, past)
            past = past + length
        cached = denoiser.denoise(ids[:, -length:], state, past)[0]
        np.testing.assert_allclose(cached, expected[-length:], atol=TOLERANCE)
        for suffix, value in states.items():
            got = state[suffix][0]
            if suffix.startswith(("key", "value")):
                got = got[:, : count * length]
            np.testing.assert_allclose(got, value, atol=TOLERANCE, err_msg=suffix)


def advance(
    denoiser: Denoiser,
    state: dict[str, torch.Tensor],
    made: dict[str, torch.Tensor],
    past: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Swap what is swapped, write the new columns of what is appended (one row)."""
    state = dict(state)
    for port in denoiser.state_spec.ports:
        if port.update == "swap":
            state[port.suffix] = made[port.suffix]
            continue
        new = made[port.suffix]
        start = int(past[0])
        buffer = state[port.suffix].clone()
        buffer[:, :, start : start + new.shape[2]] = new
        state[port.suffix] = buffer
    return state


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_commit_equals_each_row_alone(name: str) -> None:
    """commit_length per row: the state is that after the row's own last token; 0 keeps bytes."""
    spec = VARIANTS[name]
    length = spec.block_len
    tensors = random_tensors(spec, seed=4)
    denoiser, judge = Denoiser(spec, tensors), ReferenceModel(spec, tensors)
    lengths = [0, length, 3 * length, 2 * length]
    if spec.causal_commit:
        lengths += [1, length + 3, 2]
    ids = rows_of(spec, lengths, 3 * length)
    generator = torch.Generator().manual_seed(1)
    state = {
        k: torch.randn(v.shape, generator=generator)
        for k, v in denoiser.zero_state(len(lengths), 2 * length).items()
    }
    # rows other than the first start from zero so that the judge, which has no past, applies
    for value in state.values():
        value[1:] = 0
    past = torch.zeros(len(lengths), dtype=torch.int64)
    made = denoiser.commit(ids, state, past, torch.tensor(lengths))
    for row, count in enumerate(lengths):
        if count == 0:
            for port in denoiser.state_spec.swapped:
                assert torch.equal(made[port.suffix][row], state[port.suffix][row]), port.suffix
            continue
        _, states = judge.run(ids[row, :count].numpy(), clean=count)
        for suffix, value in states.items():
            got = made[suffix][row]
            if suffix.startswith(("key", "value")):
                got = got[:, :count]
            np.testing.assert_allclose(got, value, atol=TOLERANCE, err_msg=f"{suffix} row {row}")


def test_mamba_sizes_of_the_fixture() -> None:
    """ST-11: the convolution covers x, B and C."""
    assert MAMBA.conv_dim == 64 + 2 * 2 * 8


@pytest.mark.parametrize("name", [name for name in VARIANTS if "F" not in name])
def test_commit_and_denoise_in_one_pass_equal_two(name: str) -> None:
    """commit_denoise over ragged lengths gives the states of commit and the logits of denoise."""
    spec = VARIANTS[name]
    length = spec.block_len
    denoiser = Denoiser(spec, random_tensors(spec, seed=6))
    lengths = [length, length, 2 * length] if not spec.causal_commit else [length, length + 3, 13]
    for row, count in enumerate(lengths):
        tokens = -(-count // length) * length + (length if count % length == 0 else 0)
        ids = rows_of(spec, [0], tokens, seed=row)
        state, past = denoiser.zero_state(1, tokens), torch.zeros(1, dtype=torch.int64)
        clean = torch.tensor([count])
        made, logits = denoiser.commit_denoise(ids, state, past, clean)
        alone = denoiser.commit(ids, state, past, clean)
        for suffix, value in alone.items():
            got = made[suffix]
            if suffix.startswith(("key", "value")):
                got, value = got[:, :, :count], value[:, :, :count]
            np.testing.assert_allclose(got, value, atol=TOLERANCE, err_msg=suffix)
        if count % length == 0:
            after = advance(denoiser, state, alone, past)
            expected = denoiser.denoise(ids[:, -length:], after, clean)
            np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 130])
def test_whole_sequences_equal_the_loops(tokens: int) -> None:
    """Objective full: every direction runs over the whole sequence, whatever its length."""
    layers = (
        mamba_layer(),
        selective_layer(),
        attention_layer(),
        mamba_layer("forward"),
        selective_layer("reverse"),
        mamba_layer("reverse", sizes=Mamba2Sizes(64, 8, 8, 8, 1, 1)),
        selective_layer(tied="projections", sizes=Mamba1Sizes(24, 3, 5, 1, bias=True)),
    )
    spec = model(*layers, objective="full", mask_id=None)
    tensors = random_tensors(spec, seed=8)
    ids = rows_of(spec, [0, 0], tokens)
    found = Denoiser(spec, tensors).passes("full", ids, {}).logits
    judge = ReferenceModel(spec, tensors)
    for row in range(2):
        expected, _ = judge.run(ids[row].numpy(), clean=0)
        np.testing.assert_allclose(found[row], expected, atol=TOLERANCE)
