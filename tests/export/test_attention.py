"""Attention in all its forms and linear attention equal the float64 loops, cached or not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from reference_model import ReferenceModel, rotary_frequency
from sample_models import mamba_layer, model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fixedstate.errors import ExportError
from fixedstate.export import window
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.layers import rotary_angles, rotary_frequencies
from fixedstate.export.passes import finish
from fixedstate.export.passinfo import PassInfo
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.trace import trace
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.runtime.laws import check_bundle
from fixedstate.spec import (
    AttentionSizes,
    LayerSpec,
    LinearAttentionSizes,
    ModelSpec,
    RopeScaling,
)
from fixedstate.state import graph_ports

TOLERANCE = 1e-4
LENGTH = 4


@pytest.fixture(autouse=True)
def one_thread():
    """Threads wait longer for one another than these models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LLAMA3 = RopeScaling("llama3", 8.0, original_length=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, original_length=64, attention_factor=1.14)
LINEAR = RopeScaling("linear", 4.0)


def attention(*directions: str, layers: int = 2, **changes: object) -> tuple[LayerSpec, ...]:
    """Attention layers without MLP; sizes by name."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "rotary_dim": 8, **changes}
    spread = directions or ("block",) * layers
    return tuple(LayerSpec("attention", AttentionSizes(**sizes), d) for d in spread)


def linear(*directions: str, **changes: object) -> tuple[LayerSpec, ...]:
    """Linear attention layers without MLP; sizes by name."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "rotary_dim": 8, **changes}
    spread = directions or ("block", "block")
    return tuple(LayerSpec("linear_attention", LinearAttentionSizes(**sizes), d) for d in spread)


def small(*layers: LayerSpec, **changes: object) -> ModelSpec:
    """A model of blocks of 4."""
    return model(*layers, **{"block_len": LENGTH, **changes})


PLAIN: dict[str, ModelSpec] = {
    "mha": small(*attention(kv_heads=4)),
    "mqa": small(*attention(kv_heads=1)),
    "qk-norm": small(*attention(qk_norm=True)),
    "biases": small(*attention(qkv_bias=True, out_bias=True)),
    "partial-rotary": small(*attention(rotary_dim=4)),
    "no-rotary": small(*attention(rotary_dim=0)),
    "rope-linear": small(*attention(rope_scaling=LINEAR, rope_theta=100.0)),
    "rope-llama3": small(*attention(rope_scaling=LLAMA3, rope_theta=100.0)),
    "rope-yarn": small(*attention(rope_scaling=YARN, rope_theta=100.0, rotary_dim=6)),
    "softcap": small(*attention(score_softcap=0.5)),
    "scale": small(*attention(scale=0.9)),
    "forward": small(*attention("forward", "forward", score_softcap=2.0)),
    "unrotated": small(*attention(keys_rotated=False)),
    "unrotated-partial": small(*attention(keys_rotated=False, rotary_dim=4, qk_norm=True)),
    "causal-commit": small(*attention(), commit_mask="causal"),
}

WINDOWED: dict[str, ModelSpec] = {
    f"window-{size}-sinks-{sinks}-{'rotated' if rotated else 'in-cache'}": small(
        *attention(window=size, sinks=sinks, keys_rotated=rotated, qk_norm=not rotated)
    )
    for size, sinks, rotated in itertools.product((1, 3, 4, 9), (0, 1, 6), (True, False))
} | {
    "window-forward": small(*attention("forward", "forward", window=3)),
    "window-forward-sinks": small(*attention("forward", "forward", window=5, sinks=2)),
    "window-forward-in-cache": small(
        *attention("forward", "forward", window=3, sinks=5, keys_rotated=False)
    ),
    "window-causal-commit": small(*attention(window=3), commit_mask="causal"),
    "window-causal-in-cache": small(
        *attention(window=2, sinks=3, keys_rotated=False), commit_mask="causal"
    ),
    "window-one-key-head": small(*attention(window=6, sinks=1, kv_heads=1, keys_rotated=False)),
    "window-no-rotary": small(*attention(window=2, sinks=5, rotary_dim=0, keys_rotated=False)),
    "window-softcap": small(*attention(window=3, sinks=1, score_softcap=1.0, rope_scaling=YARN)),
    "window-beside-all": small(
        *attention(layers=1),
        *attention(layers=1, window=3, sinks=2, keys_rotated=False),
        *attention(layers=1, window=5, keys_rotated=False),
        mamba_layer(),
    ),
}

LINEAR_FORMS: dict[str, ModelSpec] = {
    "linear": small(*linear()),
    "linear-forward": small(*linear("forward", "block")),
    "linear-relu": small(*linear(feature_map="relu", qk_norm=True)),
    "linear-identity": small(*linear(feature_map="identity", normalised=False)),
    "linear-elu-sum": small(*linear(normalised=False, kv_heads=4, rotary_dim=0)),
    "linear-mqa": small(*linear(kv_heads=1, rotary_dim=4, qkv_bias=True, out_bias=True)),
    "linear-rope": small(*linear(rope_scaling=LINEAR)),
    "linear-causal-commit": small(*linear(), commit_mask="causal"),
    "linear-hybrid": small(*linear("block"), mamba_layer(), *attention(layers=1, window=3)),
}

ALL = PLAIN | WINDOWED | LINEAR_FORMS


def ids_of(spec: ModelSpec, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Random ids, the mask id among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, blocks * spec.block_len)
    return torch.randint(0, spec.vocab_size, shape, generator=generator)


def advance(
    denoiser: Denoiser,
    state: dict[str, torch.Tensor],
    made: dict[str, torch.Tensor],
    past: torch.Tensor,
    lengths: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Swap what is swapped, append each row's committed columns."""
    state = dict(state)
    for port in denoiser.state_spec.ports:
        new = made[port.suffix]
        if port.update == "append":
            buffer = state[port.suffix].clone()
            for row, (start, count) in enumerate(zip(past.tolist(), lengths.tolist(), strict=True)):
                buffer[row, :, start : start + count] = new[row, :, :count]
            new = buffer
        state[port.suffix] = new
    return state


def garbage_before_first_token(denoiser: Denoiser, rows: int, capacity: int) -> dict:
    """The reset state with large numbers wherever no token stands yet; zeros are negative."""
    generator = torch.Generator().manual_seed(9)
    state = denoiser.zero_state(rows, capacity)
    for port in denoiser.state_spec.ports:
        if port.kind in ("key", "value"):
            state[port.suffix] = 1e3 * torch.randn(state[port.suffix].shape, generator=generator)
        else:
            state[port.suffix] = -state[port.suffix]
    return state


def same_states(
    denoiser: Denoiser, row: int, past: int, found: dict, expected: dict, place: str
) -> None:
    """Compare the columns that hold tokens, and everything of other states."""
    for port in denoiser.state_spec.ports:
        got, right = found[port.suffix][row].numpy(), expected[port.suffix]
        if port.update == "append":
            got = got[:, :past]
        elif port.kind in ("key", "value"):
            sizes = denoiser.spec.layers[port.layer].attention
            sinks = min(past, sizes.sinks)
            tail = min(max(past - sizes.sinks, 0), sizes.window)
            first = got.shape[1] - tail
            got, right = (np.concatenate([v[:, :sinks], v[:, first:]], 1) for v in (got, right))
        np.testing.assert_allclose(
            got, right, atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"{place} {port.suffix} row {row}"
        )


@pytest.mark.parametrize("name", ALL)
def test_cached_passes_equal_the_loops(name: str) -> None:
    """Recomputed, block by block and all blocks at once: the logits and states of the loops."""
    spec = ALL[name]
    tensors = random_tensors(spec, seed=3)
    denoiser, judge = Denoiser(spec, tensors), ReferenceModel(spec, tensors)
    blocks = 5
    ids = ids_of(spec, 1, blocks + 1)
    ids[:, -2:] = spec.mask_id
    state = garbage_before_first_token(denoiser, 1, (blocks + 1) * LENGTH)
    start, past = state, torch.zeros(1, dtype=torch.int64)
    one = torch.tensor([LENGTH])
    for count in range(blocks + 1):
        text = ids[:, : (count + 1) * LENGTH]
        expected, states = judge.run(text[0].numpy(), clean=count * LENGTH)
        right = expected[-LENGTH:]
        close = {"atol": TOLERANCE, "rtol": 0}
        np.testing.assert_allclose(denoiser.recompute(text)[0], right, **close)
        block = text[:, -LENGTH:]
        np.testing.assert_allclose(denoiser.denoise(block, state, past)[0], right, **close)
        same_states(denoiser, 0, int(past), state, states, f"block {count}")
        if count:
            zero = torch.zeros(1, dtype=torch.int64)
            made = denoiser.commit(text[:, :-LENGTH], start, zero, past)
            at_once = advance(denoiser, start, made, zero, past)
            same_states(denoiser, 0, int(past), at_once, states, f"{count} blocks at once")
        made, fused = denoiser.commit_denoise(block, state, past, torch.tensor([0]))
        np.testing.assert_allclose(fused[0], right, **close)
        made = denoiser.commit(block, state, past, one)
        state, past = advance(denoiser, state, made, past, one), past + LENGTH


@pytest.mark.parametrize("name", ALL)
def test_ragged_rows_equal_each_row_alone(name: str) -> None:
    """Rows of unequal past and commit_length, 0 among them, over garbage behind their tokens."""
    spec = ALL[name]
    tensors = random_tensors(spec, seed=4)
    denoiser, judge = Denoiser(spec, tensors), ReferenceModel(spec, tensors)
    first = torch.tensor([0, 1, 3, 4, 2]) * LENGTH
    second = torch.tensor([2, 3, 0, 1, 2]) * LENGTH
    rows = len(first)
    ids = ids_of(spec, rows, 8, seed=5)
    past = torch.zeros(rows, dtype=torch.int64)
    reset = garbage_before_first_token(denoiser, rows, 8 * LENGTH)
    made = denoiser.commit(ids[:, : 4 * LENGTH], reset, past, first)
    for port in denoiser.state_spec.swapped:
        kept = (side[port.suffix][0].view(torch.int32) for side in (made, reset))
        assert torch.equal(*kept), port.suffix
    state = advance(denoiser, reset, made, past, first)
    piece = torch.stack([ids[row, n : n + 3 * LENGTH] for row, n in enumerate(first.tolist())])
    # also inside a block: what is not committed is not seen, though the runtime refuses most
    lengths = second + torch.tensor([1, -2, 3, 2, 0])
    made = denoiser.commit(piece, state, first, lengths)
    ended = first + lengths
    after = advance(denoiser, state, made, first, lengths)
    for row, count in enumerate(ended.tolist()):
        _, states = judge.run(ids[row, :count].numpy(), clean=count)
        same_states(denoiser, row, count, after, states, "commit")
    made, fused = denoiser.commit_denoise(
        piece[:, : 2 * LENGTH], state, first, torch.tensor([2, 1, 1, 2, 1]) * LENGTH
    )
    for row, count in enumerate(first.tolist()):
        clean = count + (2, 1, 1, 2, 1)[row] * LENGTH
        text = ids[row, : count + 2 * LENGTH].numpy()
        expected, states = judge.run(text, clean=clean)
        np.testing.assert_allclose(fused[row], expected[-LENGTH:], atol=TOLERANCE)
        _, states = judge.run(text[:clean], clean=clean)
        committed = torch.tensor([clean - count])
        alone = {suffix: tensor[row : row + 1] for suffix, tensor in state.items()}
        new = {suffix: tensor[row : row + 1] for suffix, tensor in made.items()}
        ended_here = advance(denoiser, alone, new, first[row : row + 1], committed)
        same_states(denoiser, 0, clean, ended_here, states, f"commit_denoise row {row}")


@pytest.mark.parametrize(
    "layers",
    [attention(), attention("forward", "block", rope_scaling=YARN, score_softcap=1.0)],
    ids=["block", "forward"],
)
@pytest.mark.parametrize("tokens", [1, 3, 4, 11])
def test_a_full_pass_sees_the_whole_text(layers: tuple[LayerSpec, ...], tokens: int) -> None:
    """Objective full: no cache, any length, every token or every earlier one."""
    spec = small(*layers, objective="full")
    tensors = random_tensors(spec, seed=6)
    ids = ids_of(spec, 2, 3)[:, :tokens]
    logits = Denoiser(spec, tensors).passes("full", ids, {}).logits
    assert logits is not None
    for row in range(2):
        expected, _ = ReferenceModel(spec, tensors).run(ids[row].numpy(), clean=0)
        np.testing.assert_allclose(logits[row], expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (small(*attention("reverse")), "layer 0: attention of direction 'reverse'"),
        (small(*linear("reverse")), "layer 0: linear_attention of direction 'reverse'"),
        (small(*attention(window=4), objective="full"), "layer 0: a sliding window of 4 tokens is"),
        (small(*linear(), objective="full"), "layer 0: linear_attention is a state"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(spec: ModelSpec, words: str) -> None:
    """Layer, feature and reason stand in the message."""
    with pytest.raises(ExportError, match=words):
        Denoiser(spec, random_tensors(spec))


# --- rotary frequencies ---------------------------------------------------------------------------

SCALINGS = {
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, original_length=8192),
    "llama3-32": RopeScaling(
        "llama3", 32.0, original_length=4096, low_freq_factor=2.0, high_freq_factor=6.0
    ),
    "yarn": RopeScaling("yarn", 4.0, original_length=32768, attention_factor=1.1386294),
    "yarn-narrow": RopeScaling(
        "yarn", 16.0, original_length=2048, beta_fast=16.0, beta_slow=2.0, attention_factor=0.9
    ),
}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(
    name: str, theta: float, share: float
) -> None:
    """Each scaling, whole and partial rotary, against the library's own tables."""
    scaling = SCALINGS[name]
    rope = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
        "partial_rotary_factor": share,
        "original_max_position_embeddings": scaling.original_length or 2048,
    }
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        rope |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
        }
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1 << 17,
        rope_parameters=rope,
    )
    table, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    width = int(64 * share)
    np.testing.assert_allclose(rotary_frequencies(width, theta, scaling), table, rtol=1e-6)
    cos, sin = rotary_angles(torch.tensor([[0, 7, 300]]), width, theta, scaling)
    angles = torch.tensor([0.0, 7.0, 300.0])[:, None] * table
    np.testing.assert_allclose(cos[0, 0], angles.cos() * factor, atol=1e-4)
    np.testing.assert_allclose(sin[0, 0], angles.sin() * factor, atol=1e-4)
    sizes = AttentionSizes(4, 4, 64, width, rope_theta=theta, rope_scaling=scaling)
    judged = [rotary_frequency(sizes, pair) for pair in range(width // 2)]
    np.testing.assert_allclose(judged, table, rtol=1e-6)


# --- positions inside the cache -------------------------------------------------------------------


def test_positions_in_the_cache_stay_small() -> None:
    """Whatever past_length is, no position exceeds sinks + W + nL."""
    sizes = AttentionSizes(4, 2, 8, 8, window=9, sinks=3, keys_rotated=False)
    spec = small(LayerSpec("attention", sizes))
    blocks = 5
    past = torch.tensor([0, LENGTH, 4 * LENGTH, 10**9 * LENGTH])
    info = PassInfo(spec, "commit", blocks * LENGTH, past, torch.full((4,), blocks * LENGTH))
    highest = 3 + 9 + blocks * LENGTH
    assert int(window.column_positions(info, sizes).max()) < 3 + 9
    assert int((info.positions - window.left_out(info, sizes)).max()) < highest
    own = info.positions - window.left_out_at_block(info, sizes)
    assert int(own.max()) < 3 + 9 + LENGTH


def test_a_window_does_not_know_how_long_the_text_is() -> None:
    """In-cache positions: the same cache gives the same bytes after 10^6 and after 10^9 tokens."""
    spec = WINDOWED["window-9-sinks-6-in-cache"]
    denoiser = Denoiser(spec, random_tensors(spec, seed=8))
    state = garbage_before_first_token(denoiser, 1, 0)
    ids = ids_of(spec, 1, 3)
    lengths = torch.tensor([3 * LENGTH])
    near, far = torch.tensor([10**6 * LENGTH]), torch.tensor([10**9 * LENGTH])
    block = ids[:, :LENGTH]
    assert torch.equal(denoiser.denoise(block, state, near), denoiser.denoise(block, state, far))
    one, other = (denoiser.commit(ids, state, past, lengths) for past in (near, far))
    assert all(torch.equal(one[suffix], other[suffix]) for suffix in one)


# --- exported -------------------------------------------------------------------------------------

EXPORTED = {
    "window": small(
        *attention(layers=1, window=6, sinks=2, keys_rotated=False, rope_scaling=YARN),
        mamba_layer(),
        *attention(layers=1, window=5, score_softcap=2.0),
    ),
    "linear": small(*linear("block", "forward", qk_norm=True)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_models_keep_the_laws(tmp_path, name: str) -> None:
    """The graphs agree with PyTorch and keep every law; windows in the fused graph too."""
    spec = EXPORTED[name]
    save_checkpoint(tmp_path / "checkpoint", spec, random_tensors(spec, seed=2))
    fused = name == "window"
    report = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", fused=fused)
    assert report.parity["passed"]
    results = check_bundle(report.bundle)
    assert {result.law for result in results} == {1, 2, 3, 4, 6, 7}
    assert [str(result) for result in results if not result.passed] == []


@pytest.mark.parametrize(
    ("layer", "role"),
    [
        (attention("forward", window=1500, sinks=3, keys_rotated=False)[0], "denoise"),
        (attention("forward")[0], "denoise"),
        (linear("forward")[0], "commit_denoise"),
    ],
    ids=["wide-window", "causal", "linear"],
)
def test_masks_are_no_constants(layer: LayerSpec, role: str) -> None:
    """Blocks of 256 and wide windows: nothing large stands inside the graph."""
    spec = model(layer, block_len=256)
    denoiser = Denoiser(spec, random_tensors(spec), ops=TRACED)
    made = finish(trace(denoiser, role), spec, denoiser.precision, role)
    assert [v.name for v in made.graph.inputs] == [
        port.name for port in graph_ports(spec, denoiser.state_spec, role)[0]
    ]
