"""Every legal variant by name, one small model each, and what is refused.

The table of docs/mixers.md is made of these (benchmarks/mixers.py), and tests compare each with
the float64 loops of reference_model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sample_models import (
    ATTENTION,
    MAMBA,
    SELECTIVE,
    attention_layer,
    mamba_layer,
    model,
    selective_layer,
)

from fixedstate.errors import FixedStateError
from fixedstate.export.denoiser import check_supported
from fixedstate.spec import (
    AttentionSizes,
    LayerSpec,
    LinearAttentionSizes,
    Mamba2Sizes,
    ModelSpec,
    RopeScaling,
)

SIDECAR = selective_layer("reverse", norm="layer", norm_place="after", output_gate=True)
LINEAR = LinearAttentionSizes(heads=4, kv_heads=2, head_dim=8, rotary_dim=8)


def _mamba2(*layers: LayerSpec, **changes: object) -> ModelSpec:
    """Both directions behind one forward layer, whose state the second layer depends on."""
    return model(*(layers or (mamba_layer(),)), **changes)


def _sizes2(**changes: object) -> ModelSpec:
    """Two Mamba-2 layers of other sizes; d_inner follows heads and head_dim."""
    sizes = {f: getattr(MAMBA, f) for f in MAMBA.__slots__} | changes
    sizes["d_inner"] = sizes["heads"] * sizes["head_dim"]
    made = Mamba2Sizes(**sizes)
    return model(mamba_layer(sizes=made), mamba_layer("forward", made))


def _sizes1(**changes: object) -> ModelSpec:
    made = replace(SELECTIVE, **changes)
    return model(selective_layer(sizes=made), selective_layer("forward", made))


def _attention(direction: str = "block", **changes: object) -> ModelSpec:
    made = replace(ATTENTION, **changes)
    return model(attention_layer(direction, made), attention_layer(direction, made))


def _linear(direction: str = "block", **changes: object) -> ModelSpec:
    layer = LayerSpec("linear_attention", replace(LINEAR, **changes), direction)
    return model(layer, layer)


def _mlp(**changes: object) -> ModelSpec:
    layer = LayerSpec("none", None, mlp_width=20, **changes)
    return model(layer, mamba_layer(), layer)


VARIANTS: dict[str, dict[str, ModelSpec]] = {
    "Mamba-1": {
        "forward": model(selective_layer("forward"), selective_layer("forward")),
        "block, untied directions": model(selective_layer(), selective_layer()),
        "block, projections tied": model(*(selective_layer(tied="projections"),) * 2),
        "block, all tied": model(*(selective_layer(tied="all"),) * 2),
        "reverse sidecar: layer norm, tanh gate, causal attention": model(
            attention_layer("forward"), SIDECAR, attention_layer("forward"), commit_mask="causal"
        ),
        "reverse sidecar left out of commit": model(
            attention_layer("forward"), SIDECAR, attention_layer("forward"), commit_reverse=False
        ),
        "d_state 16": _sizes1(d_state=16),
        "d_state 64": _sizes1(d_state=64),
        "d_state 128": _sizes1(d_state=128),
        "d_state 256": _sizes1(d_state=256),
        "dt_rank 5, d_inner 33": _sizes1(dt_rank=5, d_inner=33),
        "expand 4": _sizes1(d_inner=128),
        "bias": _sizes1(bias=True),
        "conv_bias off": _sizes1(conv_bias=False),
        **{f"d_conv {taps}": _sizes1(d_conv=taps) for taps in range(1, 9)},
    },
    "Mamba-2": {
        "forward": model(mamba_layer("forward"), mamba_layer("forward")),
        "block, untied directions": model(mamba_layer(), mamba_layer()),
        "block, projections tied": model(*(mamba_layer(tied="projections"),) * 2),
        "block, all tied": model(*(mamba_layer(tied="all"),) * 2),
        "reverse layer": model(mamba_layer("forward"), mamba_layer("reverse"), mamba_layer()),
        "groups 1": _sizes2(groups=1),
        "groups 4": _sizes2(groups=4),
        "groups = heads": _sizes2(groups=8),
        "heads 3": _sizes2(heads=3, groups=1),
        "heads 6, groups 3": _sizes2(heads=6, groups=3),
        "head_dim 32": _sizes2(heads=2, head_dim=32),
        "head_dim 64": _sizes2(heads=2, head_dim=64),
        "head_dim 128": _sizes2(heads=2, head_dim=128),
        "d_state 16": _sizes2(d_state=16),
        "d_state 64": _sizes2(d_state=64),
        "d_state 128": _sizes2(d_state=128),
        "d_state 256": _sizes2(d_state=256),
        "D_has_hdim": _sizes2(d_has_hdim=True),
        "dt_limit": _sizes2(dt_min=0.01, dt_max=0.05),
        "bias": _sizes2(bias=True),
        "conv_bias off": _sizes2(conv_bias=False),
        "norm_before_gate": _sizes2(gated_norm="before"),
        "rmsnorm off": _sizes2(gated_norm="none"),
        "expand 1": _sizes2(heads=4),
        "expand 3": _sizes2(heads=12),
        "expand 4": _sizes2(heads=16),
        **{f"d_conv {taps}": _sizes2(d_conv=taps) for taps in range(1, 9)},
        **{
            f"block length {length}": model(mamba_layer(), mamba_layer("forward"), block_len=length)
            for length in (4, 16, 64, 65, 100, 128, 256)
        },
    },
    "Attention": {
        "MHA": _attention(heads=4, kv_heads=4),
        "GQA": _attention(heads=4, kv_heads=2),
        "MQA": _attention(heads=4, kv_heads=1),
        "heads 3": _attention(heads=3, kv_heads=1),
        "forward": _attention("forward"),
        "q/k norm": _attention(qk_norm=True),
        "qkv bias": _attention(qkv_bias=True),
        "output bias": _attention(out_bias=True),
        "no rotary embedding": _attention(rotary_dim=0),
        "partial rotary": _attention(rotary_dim=4),
        "rope scaling linear": _attention(rope_scaling=RopeScaling("linear", 4.0)),
        "rope scaling llama3": _attention(rope_scaling=RopeScaling("llama3", 8.0, 16)),
        "rope scaling yarn": _attention(
            rope_scaling=RopeScaling("yarn", 4.0, 64, attention_factor=1.2)
        ),
        "score softcap": _attention(score_softcap=2.0),
        "score scale": _attention(scale=0.5),
        "keys before rotary": _attention(keys_rotated=False),
        "window": _attention(window=12),
        "window, causal": _attention("forward", window=12),
        "sinks and window": _attention(window=12, sinks=3),
        "sinks and window, keys before rotary": _attention(window=12, sinks=3, keys_rotated=False),
        "window of 1": _attention(window=1),
    },
    "Linear attention": {
        "elu, normalised": _linear(),
        "relu, normalised": _linear(feature_map="relu"),
        "identity, not normalised": _linear(feature_map="identity", normalised=False),
        "causal inside the block": _linear("forward"),
        "q/k norm, bias, MQA": _linear(kv_heads=1, qk_norm=True, qkv_bias=True, out_bias=True),
        "no rotary embedding": _linear(rotary_dim=0),
    },
    "Layers": {
        "no mixer, gated MLP": _mlp(mlp="gated"),
        "no mixer, plain MLP, bias": _mlp(mlp="plain", mlp_bias=True),
        **{f"MLP {act}": _mlp(mlp="gated", mlp_activation=act) for act in ("gelu", "gelu_tanh")},
        "MLP relu": _mlp(mlp="plain", mlp_activation="relu"),
        "layer norm": model(replace(mamba_layer(), norm="layer"), attention_layer(), norm="layer"),
        "norm after": model(replace(mamba_layer(), norm_place="after"), attention_layer()),
        "norm before and after": model(*(replace(mamba_layer(), norm_place="both"),) * 2),
        "output gate": model(*(replace(mamba_layer(), output_gate=True),) * 2),
        "hybrid M A M M A M A A": model(
            *(mamba_layer() if kind == "M" else attention_layer() for kind in "MAMMAMAA")
        ),
        "hybrid of both Mambas": model(selective_layer(), mamba_layer(), attention_layer()),
    },
    "Model": {
        "tied embeddings": model(mamba_layer(), tied_embeddings=True),
        "padded vocabulary": model(mamba_layer(), vocab_rows=48),
        "residual in fp32": model(mamba_layer(), attention_layer(), residual_fp32=True),
        "logit shift and last_logits": model(mamba_layer(), attention_layer(), logit_shift=True),
        "soft-capped logits": model(mamba_layer(), logit_softcap=2.0),
        "head bias": model(mamba_layer(), head_bias=True),
        "causal commit, bidirectional denoise": model(
            mamba_layer(), attention_layer(), commit_reverse=False, commit_mask="causal"
        ),
        "commit without reverse passes": model(mamba_layer(), mamba_layer(), commit_reverse=False),
        "step-scope state (self-conditioning)": model(
            mamba_layer(), attention_layer(), self_conditioning_width=24
        ),
    },
    "Whole sequence (objective full)": {
        "Mamba-1, two directions": model(
            selective_layer(tied="projections"), selective_layer(), objective="full"
        ),
        "Mamba-2, two untied directions": model(mamba_layer(), mamba_layer(), objective="full"),
        "Mamba-2 and attention": model(mamba_layer(), attention_layer(), objective="full"),
        "attention": model(attention_layer(), attention_layer("forward"), objective="full"),
    },
}
"""Variants by section."""


def flat_variants() -> dict[str, ModelSpec]:
    """Every variant by ``section: name``."""
    return {
        f"{section}: {name}": spec
        for section, group in VARIANTS.items()
        for name, spec in group.items()
    }


def _supported(*layers: LayerSpec, **changes: object) -> Callable[[], object]:
    return lambda: check_supported(model(*layers, **changes))


REFUSED: dict[str, Callable[[], object]] = {
    "rope scaling that depends on the length (dynamic, longrope)": lambda: RopeScaling(
        "dynamic", 2.0, 64
    ),
    "no layer that carries state": _supported(mamba_layer("reverse")),
    "attention of direction reverse": _supported(mamba_layer(), attention_layer("reverse")),
    "linear attention, identity, normalised": lambda: replace(LINEAR, feature_map="identity"),
    "block length below 4": lambda: model(mamba_layer("forward"), block_len=3),
    "block length above 256": lambda: model(mamba_layer("forward"), block_len=257),
    "d_conv above 8": lambda: replace(MAMBA, d_conv=9),
    "d_conv - 1 above the block length": lambda: model(
        mamba_layer(sizes=replace(MAMBA, d_conv=8)), block_len=4
    ),
    "d_inner that is not heads x head_dim": lambda: replace(MAMBA, d_inner=65),
    "heads that are no multiple of groups": lambda: replace(MAMBA, groups=3),
    "heads that are no multiple of kv_heads": lambda: AttentionSizes(4, 3, 8, 8),
    "odd rotary_dim": lambda: AttentionSizes(4, 2, 8, 3),
    "sinks without a window": lambda: AttentionSizes(4, 2, 8, 8, sinks=2),
    "a window under objective full": _supported(
        attention_layer(sizes=replace(ATTENTION, window=8)), objective="full"
    ),
    "linear attention under objective full": _supported(
        LayerSpec("linear_attention", LINEAR), objective="full"
    ),
    "self-conditioning under objective full": lambda: model(
        mamba_layer(), objective="full", self_conditioning_width=8
    ),
    "mask id that is a stop id": lambda: model(mamba_layer(), mask_id=2),
}
"""What is refused, as a call that raises its sentence."""


def sentence_of(refused: Callable[[], object]) -> str:
    """What the refusal says."""
    try:
        refused()
    except FixedStateError as err:
        return str(err)
    raise AssertionError("was not refused")
