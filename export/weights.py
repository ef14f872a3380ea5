"""Which tensors a model has: names, shapes and orientation of the own checkpoint layout.

Linear weights are (out, in). Letters as in :mod:`fixedstate.spec`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fixedstate.spec import (
    AttentionSizes,
    LayerSpec,
    LinearAttentionSizes,
    Mamba1Sizes,
    Mamba2Sizes,
    ModelSpec,
)

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

_PROJECTIONS = ("in_proj.", "out_proj.")
_DT_RANGE = (1e-3, 0.1)  # the published initialisation of dt
_A_RANGE = (1.0, 16.0)  # likewise of -A


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor a checkpoint of this model holds, with its shape, in order.

    Example:
        >>> from fixedstate.spec import LayerSpec
        >>> layer = LayerSpec("none", None, mlp="plain", mlp_width=8)
        >>> spec = ModelSpec(5, 6, 4, (layer,), block_len=4, mask_id=5, tied_embeddings=True)
        >>> for name, shape in tensor_shapes(spec).items():
        ...     print(name, shape)
        embedding.weight (6, 4)
        layers.0.mlp_norm.weight (4,)
        layers.0.mlp.up_proj.weight (8, 4)
        layers.0.mlp.down_proj.weight (4, 8)
        norm.weight (4,)
    """
    width = spec.width
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab_rows, width)}
    for index, layer in enumerate(spec.layers):
        shapes.update((f"layers.{index}.{name}", shape) for name, shape in _layer(layer, width))
    shapes.update(_norm("norm", spec.norm, width))
    if not spec.tied_embeddings:
        shapes["head.weight"] = (spec.vocab_rows, width)
    if spec.head_bias:
        shapes["head.bias"] = (spec.vocab_rows,)
    if spec.self_conditioning_width:
        part = dict(_self_conditioning(spec))
        shapes.update((f"self_conditioning.{name}", shape) for name, shape in part.items())
    return shapes


def _self_conditioning(spec: ModelSpec) -> Named:
    width, inner = spec.width, spec.self_conditioning_width
    yield "norm.weight", (width,)
    for name in ("gate_proj", "up_proj"):
        yield f"{name}.weight", (inner, width)
    yield "down_proj.weight", (width, inner)


def _layer(layer: LayerSpec, width: int) -> Named:
    if layer.mixer != "none":
        if layer.norm_place != "after":
            yield from _norm("norm", layer.norm, width)
        mixer = dict(_mixer(layer, width))
        yield from ((f"mixer.{name}", shape) for name, shape in mixer.items())
        if layer.mixer.startswith("mamba") and layer.direction == "block" and layer.tied != "all":
            for name, shape in mixer.items():
                if layer.tied == "none" or not name.startswith(_PROJECTIONS):
                    yield f"mixer.reverse.{name}", shape
        if layer.norm_place != "before":
            yield from _norm("post_norm", layer.norm, width)
        if layer.output_gate:
            yield "output_gate", (1,)
    if layer.mlp != "none":
        yield from _norm("mlp_norm", layer.norm, width)
        for name in ("gate_proj", "up_proj") if layer.mlp == "gated" else ("up_proj",):
            yield from _linear(f"mlp.{name}", layer.mlp_width, width, layer.mlp_bias)
        yield from _linear("mlp.down_proj", width, layer.mlp_width, layer.mlp_bias)


def _norm(name: str, kind: str, width: int) -> Named:
    yield f"{name}.weight", (width,)
    if kind == "layer":
        yield f"{name}.bias", (width,)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Named:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _mixer(layer: LayerSpec, width: int) -> Named:
    match layer.sizes:
        case Mamba2Sizes() as sizes:
            return _mamba2(sizes, width)
        case Mamba1Sizes() as sizes:
            return _mamba1(sizes, width)
        case AttentionSizes() as sizes:
            return _attention(sizes, width)
        case LinearAttentionSizes() as sizes:
            return _linear_attention(sizes, width)
        case _:
            return iter(())


def _conv(channels: int, taps: int, bias: bool) -> Named:
    yield "conv1d.weight", (channels, 1, taps)
    if bias:
        yield "conv1d.bias", (channels,)


def _mamba2(sizes: Mamba2Sizes, width: int) -> Named:
    inner, heads = sizes.d_inner, sizes.heads
    yield from _linear("in_proj", sizes.in_proj_rows, width, sizes.bias)
    yield from _conv(sizes.conv_dim, sizes.d_conv, sizes.conv_bias)
    yield "dt_bias", (heads,)
    yield "A_log", (heads,)
    yield "D", (inner if sizes.d_has_hdim else heads,)
    if sizes.gated_norm != "none":
        yield "norm.weight", (inner,)
    yield from _linear("out_proj", width, inner, sizes.bias)


def _mamba1(sizes: Mamba1Sizes, width: int) -> Named:
    inner, state, rank = sizes.d_inner, sizes.d_state, sizes.dt_rank
    yield from _linear("in_proj", 2 * inner, width, sizes.bias)
    yield from _conv(inner, sizes.d_conv, sizes.conv_bias)
    yield "x_proj.weight", (rank + 2 * state, inner)
    yield from _linear("dt_proj", inner, rank, True)
    yield "A_log", (inner, state)
    yield "D", (inner,)
    yield from _linear("out_proj", width, inner, sizes.bias)


def _linear_attention(sizes: LinearAttentionSizes, width: int) -> Named:
    yield from _attention(sizes, width)
    yield "state_gate", (sizes.heads,)


def _attention(sizes: AttentionSizes | LinearAttentionSizes, width: int) -> Named:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    yield from _linear("q_proj", queries, width, sizes.qkv_bias)
    yield from _linear("k_proj", keys, width, sizes.qkv_bias)
    yield from _linear("v_proj", keys, width, sizes.qkv_bias)
    yield from _linear("o_proj", width, queries, sizes.out_bias)
    if sizes.qk_norm:
        yield "q_norm.weight", (sizes.head_dim,)
        yield "k_norm.weight", (sizes.head_dim,)


def random_tensors(spec: ModelSpec, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Random weights of the right shapes that keep activations in a sane range.

    Args:
        spec: The model.
        seed: Same seed, same weights.
        scale: Factor on the projections, embedding and head.

    Returns:
        One float32 tensor for each name of :func:`tensor_shapes`.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_tensor(name, shape, generator, scale)
        for name, shape in tensor_shapes(spec).items()
    }


def random_tensor(
    name: str, shape: Shape, generator: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    """One tensor of :func:`random_tensors`, drawn from the generator."""
    normal = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        low, high = _A_RANGE
        return torch.rand(shape, generator=generator).mul_(high - low).add_(low).log_()
    if name.endswith(("dt_bias", "dt_proj.bias")):
        low, high = (math.log(limit) for limit in _DT_RANGE)
        dt = torch.rand(shape, generator=generator).mul_(high - low).add_(low).exp_()
        return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
    if name.endswith((".D", "norm.weight", "_gate")):
        return 1 + 0.1 * normal
    if name.endswith("bias"):
        return 0.1 * normal
    return scale * normal / math.sqrt(math.prod(shape[1:]))
