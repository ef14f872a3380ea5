"""The torch operators equal the float64 loops over a grid of shapes that is never cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scan_inputs import scan_inputs, selective_inputs, without_state

from fixedstate.plugins import reference
from fixedstate.plugins.torch_ops import PLAIN, TRACED

TOLERANCE = 2e-5  # float32 sums of up to 256 terms of size 1


def as_torch(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """float32 tensors of the same values."""
    return {name: torch.from_numpy(value).float() for name, value in inputs.items()}


@pytest.mark.parametrize("block_len", [4, 16, 33, 64, 65, 80, 128, 200, 256])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (6, 3), (4, 4)])
def test_ssd_equals_the_loop(block_len: int, blocks: int, heads: int, groups: int) -> None:
    """One matrix form over any number of chunks gives the recurrence's outputs and state."""
    rng = np.random.default_rng(block_len * 10 + blocks)
    inputs = scan_inputs(rng, 2, block_len * blocks, heads, groups)
    tensors = as_torch(inputs)
    expected, final = reference.ssd(**inputs)
    y, state = PLAIN.ssd_commit(**tensors, block_len=block_len)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE * 5)
    np.testing.assert_allclose(state.numpy(), final, atol=TOLERANCE * 5)
    state_free = {k: v for k, v in inputs.items() if k != "state"}
    expected = reference.ssd_reverse(**state_free, block_len=block_len)
    got = PLAIN.ssd_reverse(**as_torch(state_free), block_len=block_len)
    np.testing.assert_allclose(got.numpy(), expected, atol=TOLERANCE * 5)
    if blocks == 1:
        y = PLAIN.ssd_denoise(**tensors, block_len=block_len)
        np.testing.assert_allclose(y.numpy(), reference.ssd(**inputs)[0], atol=TOLERANCE * 5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2, 1e4, 1e6])
def test_ssd_with_any_decay_is_finite_and_right(scale: float) -> None:
    """No exponent is ever positive, whatever the size of the decays."""
    rng = np.random.default_rng(5)
    inputs = scan_inputs(rng, 1, 300, 4, 2, scale)
    y, state = PLAIN.ssd_commit(**as_torch(inputs), block_len=75)
    expected, final = reference.ssd(**inputs)
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-3)
    np.testing.assert_allclose(state.numpy(), final, atol=1e-3)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("block_len", [8, 16])
def test_conv_equals_the_loop(taps: int, block_len: int) -> None:
    """Outputs and the window at each row's own length, for every number of taps."""
    rng = np.random.default_rng(taps)
    x = rng.standard_normal((3, 2 * block_len, 12))
    weight, bias = rng.standard_normal((12, taps)), rng.standard_normal(12)
    state = rng.standard_normal((3, 12, taps - 1))
    length = np.array([0, 5, 2 * block_len])
    x32, w32, b32, s32 = (torch.from_numpy(v).float() for v in (x, weight, bias, state))
    expected, window = reference.causal_conv(x, weight, bias, state, length)
    y, got = PLAIN.conv_commit(x32, w32, b32, s32, torch.from_numpy(length))
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE)
    np.testing.assert_array_equal(got.numpy(), window.astype(np.float32))
    np.testing.assert_allclose(
        PLAIN.conv_denoise(x32, w32, b32, s32).numpy(), expected, atol=TOLERANCE
    )
    np.testing.assert_allclose(
        PLAIN.conv_reverse(x32, w32, b32, block_len).numpy(),
        reference.causal_conv_reverse(x, weight, bias, block_len),
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 130])
@pytest.mark.parametrize(("width", "inner"), [(1, 7), (4, 32), (16, 33), (128, 5)])
def test_selective_scan_equals_the_loop(tokens: int, width: int, inner: int) -> None:
    """Token by token over any length gives the recurrence's outputs and state."""
    inputs = selective_inputs(np.random.default_rng(tokens), 2, tokens, inner, width)
    tensors = as_torch(inputs)
    expected, final = reference.selective_scan(**inputs)
    y, state = PLAIN.scan_commit(**tensors)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE * 5)
    np.testing.assert_allclose(state.numpy(), final, atol=TOLERANCE * 5)
    assert torch.equal(PLAIN.scan_denoise(**tensors), y)


@pytest.mark.parametrize(("blocks", "block_len"), [(1, 32), (3, 32), (2, 65), (5, 4)])
def test_selective_scan_reverse_equals_the_loop(blocks: int, block_len: int) -> None:
    """Right to left inside each block, from zero at its right edge."""
    rng = np.random.default_rng(blocks)
    free = without_state(selective_inputs(rng, 2, blocks * block_len, 9, 4))
    expected = reference.selective_scan_reverse(**free, block_len=block_len)
    found = PLAIN.scan_reverse(**as_torch(free), block_len=block_len)
    np.testing.assert_allclose(found.numpy(), expected, atol=TOLERANCE * 5)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e6])
def test_selective_scan_with_any_decay_is_finite_and_right(scale: float) -> None:
    """Nothing is divided by a decay product."""
    inputs = selective_inputs(np.random.default_rng(5), 1, 100, 8, 4, scale)
    y, state = PLAIN.scan_commit(**as_torch(inputs))
    expected, final = reference.selective_scan(**inputs)
    np.testing.assert_allclose(y.numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(state.numpy(), final, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 65, 200])
def test_block_length_0_is_the_whole_sequence(tokens: int) -> None:
    """Every operator with a block length takes 0 for one block of any length."""
    rng = np.random.default_rng(tokens)
    inputs = scan_inputs(rng, 2, tokens, 4, 2)
    expected, final = reference.ssd(**inputs)
    y, state = PLAIN.ssd_commit(**as_torch(inputs), block_len=0)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE * 5)
    np.testing.assert_allclose(state.numpy(), final, atol=TOLERANCE * 5)
    y = PLAIN.ssd_denoise(**as_torch(inputs), block_len=0)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE * 5)
    free = without_state(inputs)
    y = PLAIN.ssd_reverse(**as_torch(free), block_len=0)
    expected = reference.ssd_reverse(**free, block_len=tokens)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE * 5)
    free = without_state(selective_inputs(rng, 2, tokens, 8, 4))
    y = PLAIN.scan_reverse(**as_torch(free), block_len=0)
    expected = reference.selective_scan_reverse(**free, block_len=tokens)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE * 5)
    x, weight, bias = (rng.standard_normal(shape) for shape in ((2, tokens, 6), (6, 4), 6))
    conv = as_torch({"x": x, "weight": weight, "bias": bias})
    y = PLAIN.conv_reverse(**conv, block_len=0)
    expected = reference.causal_conv_reverse(x, weight, bias, block_len=tokens)
    np.testing.assert_allclose(y.numpy(), expected, atol=TOLERANCE)


def test_traced_operators_have_the_shapes_of_plain_ones() -> None:
    """What a graph is traced with says the right shapes and dtypes before it computes."""
    tensors = as_torch(selective_inputs(np.random.default_rng(0), 2, 12, 6, 4))
    free = {name: value for name, value in tensors.items() if name != "state"}
    checks = (
        (TRACED.scan_denoise, tuple(tensors.values())),
        (TRACED.scan_commit, tuple(tensors.values())),
        (TRACED.scan_reverse, (*free.values(), 6)),
    )
    for operator, arguments in checks:
        torch.library.opcheck(operator, arguments)
