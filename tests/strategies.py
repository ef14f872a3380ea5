"""Hypothesis strategies for every legal model, its weights, and what is decoded with it.

:func:`model_specs` draws small models of every mixer, direction and variant; :func:`stresses` and
:func:`trials` draw what one exported graph is tried on. Sizes are small, shapes are odd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from fixedstate.export.weights import random_tensors
from fixedstate.spec import (
    ACTIVATIONS,
    FEATURE_MAPS,
    GATED_NORMS,
    NORM_PLACES,
    NORMS,
    TIES,
    AttentionSizes,
    LayerSpec,
    LinearAttentionSizes,
    Mamba1Sizes,
    Mamba2Sizes,
    ModelSpec,
    RopeScaling,
)

BLOCK_LENS = (4, 5, 6, 7, 8, 12, 16, 31, 32, 33, 48, 64, 65, 100, 128, 256)
"""Odd and even, at and around the 64 tokens of a chunk."""

THEMES = (
    "mamba1",
    "mamba2",
    "attention",
    "hybrid",
    "window",
    "linear_attention",
    "sidecar",
    "mamba2-groups",
    "mamba1-hybrid",
    "full",
    "shift",
    "step",
)
"""What a drawn model is made of; specs take the themes in turn, so that few cover all."""


def _one(*values: object) -> st.SearchStrategy:
    return st.sampled_from(values)


@st.composite
def mamba2_sizes(draw: st.DrawFn, grouped: bool = False) -> Mamba2Sizes:
    """Heads that are no powers of two, several groups, any head width, state and taps."""
    heads = draw(_one(2, 3, 4, 5, 6, 7, 8) if not grouped else _one(4, 6, 8, 9))
    groups = draw(_one(*[g for g in range(2 if grouped else 1, heads + 1) if heads % g == 0]))
    head_dim = draw(_one(1, 4, 5, 8, 16, 32, 64))
    limited = draw(st.booleans())
    low = draw(_one(0.0, 0.001, 0.02)) if limited else 0.0
    return Mamba2Sizes(
        d_inner=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        d_state=draw(_one(1, 4, 6, 8, 16, 64, 128, 256)),
        groups=groups,
        d_conv=draw(st.integers(1, 8)),
        bias=draw(st.booleans()),
        conv_bias=draw(st.booleans()),
        d_has_hdim=draw(st.booleans()),
        dt_min=low,
        dt_max=draw(_one(0.05, 0.1, 1.0)) if limited else None,
        gated_norm=draw(_one(*GATED_NORMS)),
        norm_eps=draw(_one(1e-5, 1e-6)),
    )


@st.composite
def mamba1_sizes(draw: st.DrawFn, width: int) -> Mamba1Sizes:
    """Any expansion, state, rank and taps."""
    return Mamba1Sizes(
        d_inner=width * draw(st.integers(1, 4)) if draw(st.booleans()) else draw(_one(5, 24, 40)),
        d_state=draw(_one(1, 3, 4, 8, 16, 64)),
        dt_rank=draw(_one(1, 2, 3, 8)),
        d_conv=draw(st.integers(1, 8)),
        bias=draw(st.booleans()),
        conv_bias=draw(st.booleans()),
    )


@st.composite
def rope_scalings(draw: st.DrawFn) -> RopeScaling | None:
    """None, or any form that does not depend on the length of the text."""
    kind = draw(_one(None, None, "linear", "llama3", "yarn"))
    if kind is None:
        return None
    factor = draw(_one(1.0, 2.0, 8.0))
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "llama3":
        return RopeScaling(kind, factor, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    return RopeScaling(kind, factor, 64, attention_factor=draw(_one(1.0, 1.1)))


def _heads(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(_one(1, 2, 3))
    head_dim = draw(_one(2, 4, 6, 8, 16))
    return {
        "heads": kv_heads * draw(_one(1, 2, 3)),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": 2 * draw(st.integers(0, head_dim // 2)),
        "rope_theta": draw(_one(10000.0, 500.0, 1e6)),
        "rope_scaling": draw(rope_scalings()),
        "qk_norm": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "out_bias": draw(st.booleans()),
    }


@st.composite
def attention_sizes(draw: st.DrawFn, windowed: bool = False) -> AttentionSizes:
    """MHA, GQA and MQA with every option; with a window, sinks or none."""
    return AttentionSizes(
        **_heads(draw),
        window=draw(_one(1, 3, 8, 16, 40)) if windowed else None,
        sinks=draw(_one(0, 1, 4, 11)) if windowed else 0,
        keys_rotated=draw(st.booleans()),
        score_softcap=draw(_one(0.0, 0.0, 5.0)),
        scale=draw(_one(None, None, 0.3)),
    )


@st.composite
def linear_attention_sizes(draw: st.DrawFn) -> LinearAttentionSizes:
    """Every feature map, normalised where that is defined."""
    phi = draw(_one(*FEATURE_MAPS))
    normalised = phi != "identity" and draw(st.booleans())
    return LinearAttentionSizes(**_heads(draw), feature_map=phi, normalised=normalised)


@st.composite
def layers(draw: st.DrawFn, mixer: str, width: int, direction: str | None = None) -> LayerSpec:
    """One layer of a mixer, or of what a theme calls one."""
    kind = {"window": "attention", "sidecar": "mamba1", "mamba2-groups": "mamba2"}.get(mixer, mixer)
    sizes = {
        "mamba1": lambda: mamba1_sizes(width),
        "sidecar": lambda: mamba1_sizes(width),
        "mamba2": mamba2_sizes,
        "mamba2-groups": lambda: mamba2_sizes(grouped=True),
        "attention": attention_sizes,
        "window": lambda: attention_sizes(windowed=True),
        "linear_attention": linear_attention_sizes,
    }
    ways = ("forward", "block", "reverse") if kind.startswith("mamba") else ("forward", "block")
    mlp = draw(_one("none", "gated", "plain")) if mixer != "none" else draw(_one("gated", "plain"))
    values: dict[str, object] = {
        "mlp": mlp,
        "mlp_width": draw(_one(8, 20, 33)) if mlp != "none" else 0,
        "mlp_bias": draw(st.booleans()),
        "mlp_activation": draw(_one(*ACTIVATIONS)),
        "norm": draw(_one(*NORMS)),
        "norm_eps": draw(_one(1e-5, 1e-6)),
    }
    if mixer == "none":
        return LayerSpec("none", None, **values)
    if mixer == "sidecar":
        return LayerSpec(
            "mamba1",
            draw(mamba1_sizes(width)),
            "reverse",
            norm="layer",
            norm_place="after",
            output_gate=True,
        )
    return LayerSpec(
        kind,
        draw(sizes[mixer]()),
        direction or draw(_one(*ways)),
        draw(_one(*TIES)) if kind.startswith("mamba") else "none",
        **values,
        norm_place=draw(_one("before", "before", *NORM_PLACES)),
        output_gate=draw(_one(False, False, True)),
    )


_PARTS = {
    "mamba1": ("mamba1",),
    "mamba2": ("mamba2",),
    "attention": ("attention",),
    "hybrid": ("mamba2", "attention", "none"),
    "window": ("window", "mamba2"),
    "linear_attention": ("linear_attention",),
    "mamba2-groups": ("mamba2-groups",),
    "mamba1-hybrid": ("mamba1", "mamba2", "attention"),
    "full": ("mamba2", "mamba1", "attention"),
    "shift": ("attention", "mamba2", "window"),
    "step": ("mamba2", "attention", "mamba1"),
}


@st.composite
def model_specs(draw: st.DrawFn, theme: str | None = None) -> ModelSpec:
    """Any model of a theme: one to three layers, any block length and model-level option."""
    theme = theme or draw(_one(*THEMES))
    width = draw(_one(8, 12, 20, 24))
    parts = _PARTS.get(theme, ())
    if theme == "sidecar":  # causal attention, a reverse pass over the active block behind it
        stack = [draw(layers("attention", width, "forward")), draw(layers("sidecar", width))]
        stack += [draw(layers("attention", width, "forward"))] if draw(st.booleans()) else []
    else:
        count = draw(st.integers(1, 2)) if len(parts) == 1 else len(parts) - draw(st.integers(0, 1))
        chosen = draw(st.permutations(parts * 2))[:count]
        stack = [draw(layers(part, width)) for part in chosen]
    if theme != "full" and not any(layer.stateful for layer in stack):
        stack.append(draw(layers(parts[0], width, "block")))
    taps = max((getattr(layer.sizes, "d_conv", 1) for layer in stack), default=1)
    lengths = [length for length in BLOCK_LENS if length >= taps - 1]
    padded = draw(_one(0, 3, 8))
    mask = draw(_one(36, 5, 0)) if padded == 0 or draw(st.booleans()) else 37
    return ModelSpec(
        vocab_size=37,
        vocab_rows=37 + padded,
        width=width,
        layers=tuple(stack),
        block_len=draw(_one(*lengths[:10]) if draw(st.booleans()) else _one(*lengths)),
        mask_id=mask,
        stop_ids=(2,),
        logit_shift=theme == "shift",
        tied_embeddings=draw(st.booleans()),
        commit_reverse=draw(st.booleans()),
        commit_mask=draw(_one("block", "causal")),
        objective="full" if theme == "full" else "block",
        residual_fp32=draw(st.booleans()),
        norm=draw(_one(*NORMS)),
        logit_softcap=draw(_one(0.0, 0.0, 3.0)),
        head_bias=draw(st.booleans()),
        self_conditioning_width=draw(_one(8, 17)) if theme == "step" else 0,
    )


@dataclass(frozen=True)
class Stress:
    """Random weights, pushed to where arithmetic is hard.

    Attributes:
        seed: Of the weights.
        scale: Of projections, embedding and head.
        decay: Factor on A.
        step: Added to the bias of dt.
    """

    seed: int
    scale: float
    decay: float
    step: float

    def tensors(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        """The weights of a model."""
        made = random_tensors(spec, self.seed, self.scale)
        for name, tensor in made.items():
            if name.endswith("A_log"):
                made[name] = tensor + math.log(self.decay)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                made[name] = tensor + self.step
        return made


@st.composite
def stresses(draw: st.DrawFn) -> Stress:
    """Mostly weights as training leaves them, sometimes extreme decays and steps."""
    return Stress(
        seed=draw(st.integers(0, 2**31 - 1)),
        scale=draw(_one(1.0, 1.0, 0.3)),
        decay=draw(_one(1.0, 1.0, 1e-3, 100.0, 1e6)),
        step=draw(_one(0.0, 0.0, -6.0, 6.0)),
    )


@dataclass(frozen=True)
class Trial:
    """What a model is tried on: per row a prompt, cut into commits, and the canvases between.

    Attributes:
        blocks: Whole blocks per row, one entry per row.
        partial: Tokens of one more, incomplete commit per row; 0 where that is not exact.
        remainder: Fixed tokens at the start of every canvas.
        seed: Of the ids.
    """

    blocks: tuple[int, ...]
    partial: tuple[int, ...]
    remainder: int
    seed: int

    def ids(self, spec: ModelSpec) -> np.ndarray:
        """(rows, most blocks + 1, L) ids, any row of the embedding."""
        shape = (len(self.blocks), max(self.blocks) + 1, spec.block_len)
        return np.random.default_rng(self.seed).integers(0, spec.vocab_rows, shape)


@st.composite
def trials(draw: st.DrawFn, spec: ModelSpec) -> Trial:
    """Ragged rows of 0 to 5 blocks (fewer where blocks are long)."""
    most = 5 if spec.block_len <= 16 else 3 if spec.block_len <= 64 else 2
    rows = draw(st.integers(1, 3))
    blocks = tuple(draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows)))
    inside = st.integers(0, spec.block_len - 1) if spec.causal_commit else st.just(0)
    return Trial(
        blocks=blocks if max(blocks) else (1, *blocks[1:]),
        partial=tuple(draw(st.lists(inside, min_size=rows, max_size=rows))),
        remainder=draw(st.integers(0, spec.block_len - 1)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )
