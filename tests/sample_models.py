"""The small models the tests share: F1 (Mamba-1), F2 (Mamba-2), F3 (hybrid), F4 (attention)."""

from __future__ import annotations

from fixedstate.spec import AttentionSizes, LayerSpec, Mamba1Sizes, Mamba2Sizes, ModelSpec

SELECTIVE = Mamba1Sizes(d_inner=32, d_state=4, dt_rank=1, d_conv=4)
MAMBA = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=4)
ATTENTION = AttentionSizes(heads=4, kv_heads=2, head_dim=8, rotary_dim=8)
FULL_HEADS = AttentionSizes(heads=2, kv_heads=2, head_dim=16, rotary_dim=16)


def mamba_layer(
    direction: str = "block", sizes: Mamba2Sizes = MAMBA, tied: str = "none"
) -> LayerSpec:
    """A Mamba-2 layer without MLP."""
    return LayerSpec("mamba2", sizes, direction, tied)


def selective_layer(
    direction: str = "block", sizes: Mamba1Sizes = SELECTIVE, **changes: object
) -> LayerSpec:
    """A Mamba-1 layer without MLP."""
    return LayerSpec("mamba1", sizes, direction, **changes)  # type: ignore[arg-type]


def attention_layer(direction: str = "block", sizes: AttentionSizes = ATTENTION) -> LayerSpec:
    """An attention layer with a gated MLP."""
    return LayerSpec("attention", sizes, direction, mlp="gated", mlp_width=48)


def model(*layers: LayerSpec, **changes: object) -> ModelSpec:
    """A model of width 32, vocabulary 37 in 40 rows, block length 8, mask 36."""
    settings: dict[str, object] = {
        "vocab_size": 37,
        "vocab_rows": 40,
        "width": 32,
        "layers": layers,
        "block_len": 8,
        "mask_id": 36,
        "stop_ids": (2,),
    }
    return ModelSpec(**{**settings, **changes})  # type: ignore[arg-type]


MODELS: dict[str, ModelSpec] = {
    # blocks of 64, so that a case's length is a commit_length inside one block
    "F1": model(*(selective_layer("forward"),) * 2, width=16, block_len=64),
    "F2": model(mamba_layer(), mamba_layer(tied="all")),
    "F2-forward": model(mamba_layer("forward"), mamba_layer("forward"), tied_embeddings=True),
    "F3": model(mamba_layer(), attention_layer(), mamba_layer(tied="projections")),
    "F4": model(attention_layer(sizes=FULL_HEADS), attention_layer()),
}
"""Fixtures by the names of the case list."""
