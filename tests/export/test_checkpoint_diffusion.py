"""Published diffusion checkpoints: constant conditioning folded away, judged unfolded.

The judges below are the published networks with nothing folded, in float64, from their papers'
equations: timestep embedder, modulated norms and gates are computed in every layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu, softplus

from fixedstate.errors import CheckpointError, UsageError
from fixedstate.export.checkpoint import Checkpoint, load_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.laws import check_bundle
from fixedstate.runtime.ort import open_sessions
from fixedstate.spec import AttentionSizes, Mamba1Sizes

Tensors = dict[str, Tensor]
Config = dict[str, Any]

TOLERANCE = 1e-5
WIDTH, COND, ROWS, BLOCK, LAYERS = 12, 6, 23, 4, 2
INNER, STATE, RANK, TAPS = 24, 5, 3, 4

BD3LM: Config = {
    "model_type": "bd3lm",
    "block_size": BLOCK,
    "vocab_size": ROWS,
    "model_length": 64,
    "cross_attn": True,
    "adaln": True,
    "causal": False,
    "hidden_dim": WIDTH,
    "cond_dim": COND,
    "n_blocks": LAYERS,
    "n_heads": 3,
    "time_conditioning": False,
}
HUB: Config = {
    "vocab_size": ROWS,
    "pad_token_id": 0,
    "config": {
        "backbone": "dimamba",
        "time_conditioning": False,
        "model": {
            "type": "dimamba",
            "hidden_size": WIDTH,
            "cond_dim": COND,
            "n_blocks": LAYERS,
            "temb_strategy": "adaln",
            "tie_word_embeddings": False,
        },
    },
}
BIMAMBA: Config = {
    "model_type": "bimamba",
    "d_model": WIDTH,
    "n_layer": LAYERS,
    "vocab_size": ROWS,
    "d_temb": COND,
    "temb_strategy": "adaln",
    "time_conditioning": False,
    "tie_word_embeddings": True,
}


class _Draw:
    """Random tensors that keep activations near 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, centre: float = 0.0) -> Tensor:
        scale = 0.3 if len(shape) == 1 else 1 / math.sqrt(math.prod(shape[1:]))
        return centre + scale * torch.randn(shape, generator=self._generator)


def embedder(draw: _Draw) -> Tensors:
    return {
        "sigma_map.mlp.0.weight": draw(COND, 256),
        "sigma_map.mlp.0.bias": draw(COND),
        "sigma_map.mlp.2.weight": draw(COND, COND),
        "sigma_map.mlp.2.bias": draw(COND),
    }


def conditioning(w: Tensors, prefix: str, timestep: float = 0.0) -> Tensor:
    """silu of the embedded timestep: sinusoids of 128 frequencies, two linear maps."""
    at = f"{prefix}sigma_map.mlp"
    steps = torch.arange(128, dtype=torch.float64)
    angles = timestep * torch.exp(-math.log(10000) * steps / 128)
    waves = torch.cat([angles.cos(), angles.sin()])
    inner = silu(w[f"{at}.0.weight"] @ waves + w[f"{at}.0.bias"])
    return silu(w[f"{at}.2.weight"] @ inner + w[f"{at}.2.bias"])


def modulation(w: Tensors, at: str, c: Tensor, parts: int) -> tuple[Tensor, ...]:
    return (w[f"{at}.weight"] @ c + w[f"{at}.bias"]).chunk(parts)


def write(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def failure(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def ids(tokens: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (2, tokens), generator=generator)


# --- BD3-LM --------------------------------------------------------------------------------------


def bd3lm_tensors(seed: int = 1) -> Tensors:
    draw = _Draw(seed)
    out = {f"backbone.{name}": tensor for name, tensor in embedder(draw).items()}
    out["backbone.vocab_embed.embedding"] = draw(ROWS, WIDTH)
    out["backbone.rotary_emb.inv_freq"] = draw(2)
    for i in range(LAYERS):
        at = f"backbone.blocks.{i}"
        out |= {
            f"{at}.norm1.weight": draw(WIDTH, centre=1.0),
            f"{at}.attn_qkv.weight": draw(3 * WIDTH, WIDTH),
            f"{at}.attn_out.weight": draw(WIDTH, WIDTH),
            f"{at}.norm2.weight": draw(WIDTH, centre=1.0),
            f"{at}.mlp.0.weight": draw(4 * WIDTH, WIDTH),
            f"{at}.mlp.0.bias": draw(4 * WIDTH),
            f"{at}.mlp.2.weight": draw(WIDTH, 4 * WIDTH),
            f"{at}.mlp.2.bias": draw(WIDTH),
            f"{at}.adaLN_modulation.weight": draw(6 * WIDTH, COND),
            f"{at}.adaLN_modulation.bias": draw(6 * WIDTH),
        }
    at = "backbone.output_layer"
    return out | {
        f"{at}.norm_final.weight": draw(WIDTH, centre=1.0),
        f"{at}.linear.weight": draw(ROWS, WIDTH),
        f"{at}.linear.bias": draw(ROWS),
        f"{at}.adaLN_modulation.weight": draw(2 * WIDTH, COND),
        f"{at}.adaLN_modulation.bias": draw(2 * WIDTH),
        "sampling_eps_min": torch.tensor(1e-3),
        "sampling_eps_max": torch.tensor(0.999),
    }


def bd3lm_logits(tensors: Tensors, tokens: Tensor, heads: int, block: int | None) -> Tensor:
    """The network over whole texts; queries see their own block and earlier ones (None: all)."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    c = conditioning(w, "backbone.")
    x = w["backbone.vocab_embed.embedding"][tokens]
    count = tokens.shape[1]
    place = torch.arange(count) // (block or count)
    seen = place[None, :] <= place[:, None]
    size = WIDTH // heads
    turns = torch.arange(count, dtype=torch.float64)[:, None] * 10000.0 ** -(
        torch.arange(0, size, 2, dtype=torch.float64) / size
    )
    cos, sin = turns.cos().repeat(1, 2), turns.sin().repeat(1, 2)

    def norm(h: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        return layer_norm(h, (WIDTH,)) * w[name] * (1 + scale) + shift

    def turned(v: Tensor) -> Tensor:  # [B, T, heads, size]
        swapped = torch.cat([-v[..., size // 2 :], v[..., : size // 2]], -1)
        return v * cos[:, None] + swapped * sin[:, None]

    for i in range(LAYERS):
        at = f"backbone.blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(w, f"{at}.adaLN_modulation", c, 6)
        u = norm(x, f"{at}.norm1.weight", shift1, scale1) @ w[f"{at}.attn_qkv.weight"].T
        q, k, v = u.reshape(*tokens.shape, 3, heads, size).unbind(2)
        score = torch.einsum("bthd,buhd->bhtu", turned(q), turned(k)) / math.sqrt(size)
        share = score.masked_fill(~seen, -torch.inf).softmax(-1)
        y = torch.einsum("bhtu,buhd->bthd", share, v).reshape(*tokens.shape, WIDTH)
        x = x + gate1 * (y @ w[f"{at}.attn_out.weight"].T)
        u = norm(x, f"{at}.norm2.weight", shift2, scale2)
        u = gelu(u @ w[f"{at}.mlp.0.weight"].T + w[f"{at}.mlp.0.bias"], approximate="tanh")
        x = x + gate2 * (u @ w[f"{at}.mlp.2.weight"].T + w[f"{at}.mlp.2.bias"])
    at = "backbone.output_layer"
    x = norm(x, f"{at}.norm_final.weight", *modulation(w, f"{at}.adaLN_modulation", c, 2))
    return x @ w[f"{at}.linear.weight"].T + w[f"{at}.linear.bias"]


def test_bd3lm_equals_the_network_with_nothing_folded(tmp_path: Path) -> None:
    """Logits of the last block of 1 to 3, under the block-causal mask of its sampler."""
    tensors = bd3lm_tensors()
    found = load_checkpoint(write(tmp_path / "c", BD3LM, tensors))
    denoiser = Denoiser(found.spec, found.tensors).double()
    for blocks in (1, 2, 3):
        tokens = ids(blocks * BLOCK)
        expected = bd3lm_logits(tensors, tokens, 3, BLOCK)[:, -BLOCK:]
        assert float(expected.std()) > 0.3
        assert float((denoiser.recompute(tokens) - expected).abs().max()) < TOLERANCE


def test_bd3lm_as_a_bundle(tmp_path: Path) -> None:
    """Exported and run on ONNX Runtime over its cache: the logits of the published network."""
    tensors = bd3lm_tensors()
    report = export_bundle(
        write(tmp_path / "c", BD3LM, tensors), tmp_path / "b.bundle", fused=False
    )
    assert report.bundle.decode.train_length == 64
    engine = open_engine(report.bundle, threads=1, slots=2)
    tokens = ids(4 * BLOCK)
    tokens[tokens == ROWS - 1] = 0  # nothing that is committed is a mask
    engine.commit(tokens[:, : 3 * BLOCK].numpy(), np.array([3 * BLOCK] * 2))
    canvas = torch.cat([tokens[:, -BLOCK:-2], torch.full((2, 2), ROWS - 1)], 1)
    found = engine.denoise(canvas.numpy())
    whole = torch.cat([tokens[:, :-BLOCK], canvas], 1)
    expected = bd3lm_logits(tensors, whole, 3, BLOCK)[:, -BLOCK:]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_bd3lm_as_a_spec(tmp_path: Path) -> None:
    """Block length, mask, sizes and biases as config and weights say; notes say the rest."""
    notes: list[str] = []
    found = load_checkpoint(write(tmp_path / "c", BD3LM, bd3lm_tensors()), notes=notes.append)
    spec = found.spec
    assert (spec.block_len, spec.mask_id, spec.objective) == (BLOCK, ROWS - 1, "block")
    assert (spec.vocab_size, spec.vocab_rows) == (ROWS - 1, ROWS)  # the mask is never produced
    assert spec.head_bias
    assert not spec.tied_embeddings
    assert spec.layers[0].sizes == AttentionSizes(3, 3, 4, rotary_dim=4)
    assert (spec.layers[0].mlp, spec.layers[0].mlp_activation) == ("plain", "gelu_tanh")
    assert found.decode.train_length == 64
    text = "; ".join(notes)
    assert "folded the constant conditioning (timestep 0)" in text
    assert f"mask id {ROWS - 1}, the last" in text
    assert "left out the buffer sampling_eps_min" in text
    assert "left out the buffer backbone.rotary_emb.inv_freq" in text


def test_bd3lm_without_modulation(tmp_path: Path) -> None:
    """``adaln`` false: no embedder, nothing to fold, and norms without a bias."""
    everything = bd3lm_tensors(seed=4)
    tensors = {k: v for k, v in everything.items() if "adaLN" not in k and "sigma_map" not in k}
    found = load_checkpoint(write(tmp_path / "c", {**BD3LM, "adaln": False}, tensors))
    still = {  # shift and scale 0, gate 1: what the absence of modulation means
        key: torch.zeros_like(value) for key, value in everything.items() if "adaLN" in key
    }
    for i in range(LAYERS):
        bias = still[f"backbone.blocks.{i}.adaLN_modulation.bias"].reshape(6, WIDTH)
        bias[2], bias[5] = 1.0, 1.0
    expected = bd3lm_logits({**everything, **still}, ids(2 * BLOCK), 3, BLOCK)[:, -BLOCK:]
    logits = Denoiser(found.spec, found.tensors).double().recompute(ids(2 * BLOCK))
    assert float((logits - expected).abs().max()) < TOLERANCE


def test_bd3lm_without_its_block_mask_sees_the_whole_text(tmp_path: Path) -> None:
    """``cross_attn`` false: every token sees every other, the objective is ``full``."""
    tensors = bd3lm_tensors()
    folder = write(tmp_path / "c", {**BD3LM, "cross_attn": False}, tensors)
    assert "--block-len" in failure(folder)
    found = load_checkpoint(folder, block_len=8)
    assert (found.spec.objective, found.spec.block_len) == ("full", 8)
    assert "expected 'full'" in failure(folder, block_len=8, objective="block")
    for count in (1, 5, 17):
        expected = bd3lm_logits(tensors, ids(count), 3, None)
        assert float((full_logits(found, ids(count)) - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_conditioning": True}, ("time_conditioning true", "expected false", "timestep")),
        ({"causal": True}, ("causal True", "expected false")),
        ({"n_heads": 5}, ("n_heads 5", "divisor of the width 12")),
        ({"n_heads": None}, ("n_heads None",)),
        ({"hidden_dim": 16}, ("hidden_dim 16", "12", "backbone.vocab_embed.embedding")),
        ({"cond_dim": 129}, ("cond_dim 129", "6", "sigma_map.mlp.0.weight")),
        ({"n_blocks": 3}, ("n_blocks 3", "2 layers")),
        ({"vocab_size": 24}, ("vocab_size 24", "23 rows")),
        ({"block_size": 0}, ("block_size 0", "positive int")),
        ({"block_size": 1}, ("block_len must be 4 to 256", "got 1")),
        ({"block_size": 1024}, ("block_len must be 4 to 256", "got 1024")),
        ({"adaln": False}, ("backbone.blocks.0.adaLN_modulation", "does not have")),
    ],
)
def test_bd3lm_config_against_weights(
    tmp_path: Path, changes: Config, words: tuple[str, ...]
) -> None:
    """What cannot be right is refused with the key, its value and what was expected."""
    message = failure(write(tmp_path / "c", {**BD3LM, **changes}, bd3lm_tensors()))
    for word in words:
        assert word in message


def test_the_trained_block_length_is_the_only_one(tmp_path: Path) -> None:
    """The option may repeat what the config says, not contradict it; without either it is asked."""
    folder = write(tmp_path / "c", BD3LM, bd3lm_tensors())
    assert load_checkpoint(folder, block_len=BLOCK).spec.block_len == BLOCK
    message = failure(folder, block_len=8)
    assert "block_size 4" in message
    assert "8 was given" in message
    config = {key: value for key, value in BD3LM.items() if key != "block_size"}
    assert "--block-len" in failure(write(tmp_path / "d", config, bd3lm_tensors()))


def test_a_mask_inside_the_vocabulary_leaves_every_row_usable(tmp_path: Path) -> None:
    """Where the tokenizer had a mask of its own, --mask-id says so."""
    found = load_checkpoint(write(tmp_path / "c", BD3LM, bd3lm_tensors()), mask_id=7)
    assert (found.spec.mask_id, found.spec.vocab_size) == (7, ROWS)


# --- DiMamba -------------------------------------------------------------------------------------


def dimamba_tensors(config: Config, seed: int = 2, layer_bias: bool = False) -> Tensors:
    draw = _Draw(seed)
    tied = config.get("bidirectional_weight_tie", True)
    bias = config.get("ssm_cfg", {}).get("bias", False)
    at = "model.bimamba.backbone"
    out = embedder(draw)
    out[f"{at}.embeddings.word_embeddings.weight"] = draw(ROWS, WIDTH)
    for i in range(LAYERS):
        layer = f"{at}.layers.{i}"
        out[f"{layer}.norm.weight"] = draw(WIDTH, centre=1.0)
        if layer_bias:
            out[f"{layer}.norm.bias"] = draw(WIDTH)
        out[f"{layer}.adaLN_modulation.weight"] = draw(3 * WIDTH, COND)
        out[f"{layer}.adaLN_modulation.bias"] = draw(3 * WIDTH)
        for side in ("mamba_fwd", "mamba_rev"):
            own = {
                "in_proj.weight": draw(2 * INNER, WIDTH),
                "out_proj.weight": draw(WIDTH, INNER),
                "conv1d.weight": draw(INNER, 1, TAPS),
                "conv1d.bias": draw(INNER),
                "x_proj.weight": draw(RANK + 2 * STATE, INNER),
                "dt_proj.weight": draw(INNER, RANK),
                "dt_proj.bias": draw(INNER, centre=-1.0),
                "A_log": draw(INNER, STATE),
                "D": draw(INNER, centre=1.0),
            }
            if bias:
                own |= {"in_proj.bias": draw(2 * INNER), "out_proj.bias": draw(WIDTH)}
            if tied and side == "mamba_rev":
                shared = [name for name in own if name.startswith(("in_proj", "out_proj"))]
                own |= {name: out[f"{layer}.mixer.mamba_fwd.{name}"] for name in shared}
            out |= {f"{layer}.mixer.{side}.{name}": tensor for name, tensor in own.items()}
    out[f"{at}.norm_f.weight"] = draw(WIDTH, centre=1.0)
    if layer_bias:
        out[f"{at}.norm_f.bias"] = draw(WIDTH)
    out[f"{at}.adaLN_modulation_final.weight"] = draw(2 * WIDTH, COND)
    out[f"{at}.adaLN_modulation_final.bias"] = draw(2 * WIDTH)
    if not is_tied(config):
        out["model.lm_head.weight"] = draw(ROWS, WIDTH)
    return out


def is_tied(config: Config) -> bool:
    outer = config.get("config")
    return bool((outer["model"] if outer else config)["tie_word_embeddings"])


def mamba1(x: Tensor, w: Callable[[str], Tensor | None]) -> Tensor:
    """One Mamba-1 pass from the left over [B, T, D], token by token."""
    into, taps = w("in_proj.weight"), w("conv1d.weight")
    assert into is not None
    assert taps is not None
    p = x @ into.T + (0.0 if w("in_proj.bias") is None else w("in_proj.bias"))
    raw, z = p.chunk(2, -1)
    count, rows = raw.shape[1], raw.shape[0]
    padded = torch.cat([raw.new_zeros(rows, TAPS - 1, INNER), raw], 1)
    mixed = sum(padded[:, k : k + count] * taps[:, 0, k] for k in range(TAPS)) + w("conv1d.bias")
    u = silu(mixed)
    low, b, c = (u @ w("x_proj.weight").T).split([RANK, STATE, STATE], -1)
    dt = softplus(low @ w("dt_proj.weight").T + w("dt_proj.bias"))
    a = -w("A_log").exp()
    h = raw.new_zeros(rows, INNER, STATE)
    outs = []
    for t in range(count):
        h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * u[:, t])[..., None] * b[:, t, None]
        outs.append((h * c[:, t, None]).sum(-1) + w("D") * u[:, t])
    y = torch.stack(outs, 1) * silu(z)
    return y @ w("out_proj.weight").T + (0.0 if w("out_proj.bias") is None else w("out_proj.bias"))


def rms(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def dimamba_logits(tensors: Tensors, tokens: Tensor) -> Tensor:
    """The network over whole texts, in both directions, with nothing folded."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    c = conditioning(w, "")
    at = "model.bimamba.backbone"

    def norm(x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        bias = w.get(f"{name}.bias")
        normed = rms(x) if bias is None else layer_norm(x, (WIDTH,))
        y = normed * w[f"{name}.weight"] + (0.0 if bias is None else bias)
        return y * (1 + scale) + shift

    embedding = w[f"{at}.embeddings.word_embeddings.weight"]
    x = embedding[tokens]
    for i in range(LAYERS):
        layer = f"{at}.layers.{i}"
        shift, scale, gate = modulation(w, f"{layer}.adaLN_modulation", c, 3)
        u = norm(x, f"{layer}.norm", shift, scale)
        left = mamba1(u, lambda name, at=layer: w.get(f"{at}.mixer.mamba_fwd.{name}"))
        right = mamba1(u.flip(1), lambda name, at=layer: w.get(f"{at}.mixer.mamba_rev.{name}"))
        x = x + gate * (left + right.flip(1))
    x = norm(x, f"{at}.norm_f", *modulation(w, f"{at}.adaLN_modulation_final", c, 2))
    return x @ w.get("model.lm_head.weight", embedding).T


def full_logits(found: Checkpoint, tokens: Tensor) -> Tensor:
    """The denoiser over whole texts, in float64."""
    logits = Denoiser(found.spec, found.tensors).double().passes("full", tokens, {}).logits
    assert logits is not None
    return logits


OPTIONS: dict[str, Any] = {"block_len": 8, "mask_id": ROWS - 1}


@pytest.mark.parametrize(
    ("config", "layer_bias"),
    [
        (HUB, False),
        (BIMAMBA, False),
        ({**BIMAMBA, "bidirectional_weight_tie": False, "tie_word_embeddings": False}, False),
        ({**BIMAMBA, "ssm_cfg": {"bias": True, "d_state": STATE, "dt_rank": RANK}}, False),
        ({**BIMAMBA, "rms_norm": False}, True),
        ({**BIMAMBA, "rms_norm": False, "ssm_cfg": {"bias": True}}, True),
    ],
    ids=["hub", "inner", "untied", "biases", "layer norm", "layer norm and biases"],
)
def test_dimamba_equals_the_network_with_nothing_folded(
    tmp_path: Path, config: Config, layer_bias: bool
) -> None:
    """An RMSNorm holds no shift: it goes through in_proj and the head as their biases."""
    tensors = dimamba_tensors(config, layer_bias=layer_bias)
    found = load_checkpoint(write(tmp_path / "c", config, tensors), **OPTIONS)
    for count in (1, 5, 17):
        tokens = ids(count)
        expected = dimamba_logits(tensors, tokens)
        assert float(expected.std()) > 0.3
        assert float((full_logits(found, tokens) - expected).abs().max()) < TOLERANCE


def test_dimamba_as_a_bundle(tmp_path: Path) -> None:
    """One graph over whole texts of any length on ONNX Runtime, and tokens without a cache."""
    tensors = dimamba_tensors(HUB)
    bundle = export_bundle(write(tmp_path / "c", HUB, tensors), tmp_path / "b", **OPTIONS).bundle
    assert list(bundle.graphs) == ["full"]
    session = open_sessions(bundle, ("full",), threads=1)["full"]
    for count in (1, 5, 17):
        tokens = ids(count)
        found = session.run({"input_ids": tokens.numpy()})["logits"]
        np.testing.assert_allclose(found, dimamba_logits(tensors, tokens), atol=1e-4)
    with pytest.raises(UsageError, match="looks at the whole sequence"):
        check_bundle(bundle)
    with load(bundle.path) as decoder:
        (result,) = decoder.generate([Request([1, 2], Settings(max_new_tokens=9, stop_ids=()))])
    assert (len(result.token_ids), result.blocks, result.state_bytes) == (9, 2, 0)


def test_dimamba_as_a_spec(tmp_path: Path) -> None:
    """Two Mamba-1 passes over the whole text; tied projections stand once in the own layout."""
    notes: list[str] = []
    folder = write(tmp_path / "c", HUB, dimamba_tensors(HUB))
    found = load_checkpoint(folder, notes=notes.append, **OPTIONS)
    spec, layer = found.spec, found.spec.layers[0]
    assert (spec.objective, spec.block_len, spec.mask_id) == ("full", 8, ROWS - 1)
    assert (spec.vocab_size, spec.vocab_rows) == (ROWS - 1, ROWS)
    assert layer.sizes == Mamba1Sizes(INNER, STATE, RANK, TAPS, bias=True)
    assert (layer.mixer, layer.direction, layer.tied) == ("mamba1", "block", "projections")
    assert (layer.norm, spec.head_bias, spec.residual_fp32) == ("rms", True, True)
    assert "layers.0.mixer.reverse.in_proj.weight" not in found.tensors
    assert "folded the constant conditioning (timestep 0)" in "; ".join(notes)


def test_tied_projections_may_stand_once_or_twice(tmp_path: Path) -> None:
    """A file that shares tensors leaves the second name out; a copy must be equal."""
    tensors = dimamba_tensors(BIMAMBA)
    folder = write(tmp_path / "c", BIMAMBA, tensors)
    whole = dict(load_checkpoint(folder, **OPTIONS).tensors)  # before the file is replaced
    shared = [key for key in tensors if "mamba_rev.in_proj" in key or "mamba_rev.out_proj" in key]
    write(folder, BIMAMBA, {k: v for k, v in tensors.items() if k not in shared})
    once = load_checkpoint(folder, **OPTIONS)
    assert all(torch.equal(once.tensors[name], whole[name]) for name in whole)
    write(folder, BIMAMBA, {**tensors, shared[0]: tensors[shared[0]] + 1})
    message = failure(folder, **OPTIONS)
    assert shared[0] in message
    assert shared[0].replace("_rev", "_fwd") in message
    assert "differ" in message


def outer(**changes: Any) -> Config:
    inside = {**HUB["config"], **{k: v for k, v in changes.items() if k in HUB["config"]}}
    model = {**HUB["config"]["model"], **{k: v for k, v in changes.items() if k not in inside}}
    return {**HUB, "config": {**inside, "model": model}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**BIMAMBA, "bidirectional_strategy": "ew_multiply"},
            ("bidirectional_strategy 'ew_multiply'", "'add'"),
        ),
        ({**BIMAMBA, "bidirectional": False}, ("bidirectional False",)),
        ({**BIMAMBA, "temb_strategy": "concat"}, ("temb_strategy 'concat'", "'adaln'")),
        ({**BIMAMBA, "temb_strategy": None}, ("temb_strategy None", "'adaln'")),
        ({**BIMAMBA, "fused_add_norm": False}, ("fused_add_norm False",)),
        ({**BIMAMBA, "time_conditioning": True}, ("time_conditioning true", "expected false")),
        ({**BIMAMBA, "ssm_cfg": {"d_stat": 4}}, ("unknown keys ['d_stat']", "ssm_cfg")),
        ({**BIMAMBA, "ssm_cfg": {"d_state": 16}}, ("ssm_cfg.d_state 16", "5")),
        ({**BIMAMBA, "ssm_cfg": {"expand": 4}}, ("ssm_cfg.expand 4", "d_inner 24")),
        ({**BIMAMBA, "d_model": 16}, ("d_model 16", "12")),
        ({**BIMAMBA, "vocab_size": 30}, ("vocab_size 30", "23 rows")),
        (outer(time_conditioning=True), ("config.time_conditioning true", "expected false")),
        (outer(temb_strategy="add"), ("config.model.temb_strategy 'add'", "'adaln'")),
        (outer(hidden_size=16), ("config.model.hidden_size 16", "12")),
        (outer(n_blocks=5), ("config.model.n_blocks 5", "2 layers")),
    ],
)
def test_dimamba_config_against_weights(
    tmp_path: Path, config: Config, words: tuple[str, ...]
) -> None:
    """What cannot be right is refused with the key, its value and what was expected."""
    message = failure(write(tmp_path / "c", config, dimamba_tensors(config)), **OPTIONS)
    for word in words:
        assert word in message


def test_dimamba_asks_for_what_its_config_does_not_say(tmp_path: Path) -> None:
    """Block length and mask id are options; the objective can only be ``full``."""
    folder = write(tmp_path / "c", HUB, dimamba_tensors(HUB))
    assert "--block-len" in failure(folder, mask_id=3)
    assert "--mask-id" in failure(folder, block_len=8)
    assert "expected 'full'" in failure(folder, **OPTIONS, objective="block")


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [BD3LM, HUB], ids=["bd3lm", "dimamba"])
def test_every_published_tensor_is_required_and_has_its_shape(
    tmp_path: Path, config: Config
) -> None:
    """Delete, add or reshape one tensor at a time; the message spells names as the file does."""
    bd3lm = config is BD3LM
    tensors = bd3lm_tensors() if bd3lm else dimamba_tensors(config)
    options = {} if bd3lm else OPTIONS
    folder = write(tmp_path / "c", config, tensors)
    stored = load_file(folder / "model.safetensors")
    twins = ("mamba_rev.in_proj", "mamba_rev.out_proj")
    for name, tensor in stored.items():
        if "sampling" in name or "inv_freq" in name:
            continue
        if not any(twin in name for twin in twins):
            write(folder, config, {key: value for key, value in stored.items() if key != name})
            assert name in failure(folder, **options)
        write(folder, config, {**stored, f"{name}_scale": torch.ones(1)})
        assert f"{name}_scale" in failure(folder, **options)
        longer = torch.cat([tensor, tensor[:1]])
        write(folder, config, {**stored, name: longer})
        message = failure(folder, **options)
        assert any(words in message for words in ("has shape", "the weights say", "differ"))


@pytest.mark.parametrize("config", [BD3LM, HUB], ids=["bd3lm", "dimamba"])
def test_a_fold_that_leaves_float32_is_refused(tmp_path: Path, config: Config) -> None:
    """Finite weights whose product is not: named, never stored as infinity."""
    bd3lm = config is BD3LM
    tensors = bd3lm_tensors() if bd3lm else dimamba_tensors(config)
    name = "attn_out.weight" if bd3lm else "mamba_fwd.out_proj.weight"
    for key in [key for key in tensors if key.endswith((name, "adaLN_modulation.bias"))]:
        tensors[key] = tensors[key] * 1e30
    if not bd3lm:
        tensors = {k: v for k, v in tensors.items() if "mamba_rev.out_proj" not in k}
    message = failure(write(tmp_path / "c", config, tensors), **({} if bd3lm else OPTIONS))
    assert "exceeds float32" in message


def test_a_conditioning_that_is_no_constant_would_be_another_model() -> None:
    """The judge sees the timestep: another one gives another vector, so 0 is not any choice."""
    w = {name: tensor.double() for name, tensor in embedder(_Draw(1)).items()}
    gap = conditioning(w, "", timestep=0.7) - conditioning(w, "")
    assert float(gap.abs().max()) > 1e-3
