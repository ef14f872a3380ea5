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


def hybrid(width: int, heads: int, kv_heads: int, mlp: int, layers: int, period: int) -> ModelSpec:
    """Mamba-2 layers, forward, and one of attention in every `period`; all with a gated MLP.

    Args:
        width: Of the model; the scans are twice as wide.
        heads: Of attention, 64 wide.
        kv_heads: Of its keys and values.
        mlp: Inner width of the MLPs.
        layers: Of both kinds.
        period: Layers from one of attention to the next.
    """
    inner = 2 * width
    sizes = Mamba2Sizes(
        d_inner=inner, heads=inner // 64, head_dim=64, d_state=128, groups=1, d_conv=4
    )
    mamba = LayerSpec("mamba2", sizes, "forward", mlp="gated", mlp_width=mlp)
    scores = AttentionSizes(heads=heads, kv_heads=kv_heads, head_dim=64, rotary_dim=64)
    attention = LayerSpec("attention", scores, "block", mlp="gated", mlp_width=mlp)
    return ModelSpec(
        vocab_size=32000,
        vocab_rows=32000,
        width=width,
        layers=tuple(attention if i % period == period // 2 else mamba for i in range(layers)),
        block_len=32,
        mask_id=31999,
        tied_embeddings=True,
    )


def hybrid100() -> ModelSpec:
    """Hybrid100: 101 million parameters, 11 Mamba-2 layers and 3 of attention, gated MLPs."""
    return hybrid(width=640, heads=10, kv_heads=10, mlp=1728, layers=14, period=5)


def hybrid1b() -> ModelSpec:
    """Hybrid1B: 1.0 billion parameters, 14 Mamba-2 layers and 2 of attention, gated MLPs."""
    return hybrid(width=2048, heads=32, kv_heads=8, mlp=5632, layers=16, period=8)


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
