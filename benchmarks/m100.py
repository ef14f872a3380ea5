"""The models that benchmarks speak of, random weights."""

from __future__ import annotations

from fixedstate.spec import AttentionSizes, LayerSpec, Mamba2Sizes, ModelSpec


def m100(layers: int = 24) -> ModelSpec:
    """M100: 24 Mamba-2 layers, forward, no MLP, tied head, 115M parameters."""
    sizes = Mamba2Sizes(d_inner=1536, heads=24, head_dim=64, d_state=128, groups=1, d_conv=4)
    layer = LayerSpec("mamba2", sizes, "forward")
    return ModelSpec(
        vocab_size=32000,
        vocab_rows=32000,
        width=768,
        layers=(layer,) * layers,
        block_len=32,
        mask_id=31999,
        tied_embeddings=True,
    )


def b3() -> ModelSpec:
    """B3: 3.0 billion parameters, 23 Mamba-2 layers of two untied directions and 5 of attention."""
    sizes = Mamba2Sizes(d_inner=5120, heads=80, head_dim=64, d_state=128, groups=1, d_conv=4)
    mamba = LayerSpec("mamba2", sizes, "block", "none", mlp="plain", mlp_width=5120)
    heads = AttentionSizes(heads=40, kv_heads=40, head_dim=64, rotary_dim=64)
    attention = LayerSpec("attention", heads, "block", mlp="plain", mlp_width=5120)
    return ModelSpec(
        vocab_size=50257,
        vocab_rows=50304,
        width=2560,
        layers=tuple(attention if index % 6 == 3 else mamba for index in range(28)),
        block_len=32,
        mask_id=50256,
    )
