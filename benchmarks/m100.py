"""The models that benchmarks speak of, random weights."""

from __future__ import annotations

from fixedstate.spec import LayerSpec, Mamba2Sizes, ModelSpec


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
