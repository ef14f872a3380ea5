"""Block attention over a cache that is only read: ``(x, keys, values) -> (y, new keys, values)``.

Joint softmax over cache and new tokens, then two products with V: one product over their
concatenation would make the bytes depend on the cache's capacity. Masks select scores, they are
never added: garbage behind ``past_length`` would leak through an addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fixedstate.export.layers import linear, rms_norm, rotate
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps, wide
from fixedstate.spec import LayerSpec

MASKED = -1e30
"""Score of a masked position; finite, so that a row without any valid key stays finite."""


def attention(
    layer: LayerSpec,
    weights: dict[str, Tensor],
    x: Tensor,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """One attention mixer over new tokens and the committed cache.

    Args:
        layer: The layer.
        weights: Its mixer's tensors, projections [in, out].
        x: [B, T, D] normed input.
        states: ``key`` and ``value`` [B, kv_heads, C, head_dim], valid up to ``past_length`` of
            each row; neither where only the new keys and values are wanted.
        info: What pass this is: positions, lengths and masks.
        ops: Not used.

    Returns:
        y [B, T, D] (None without a cache), and the new tokens' ``key`` and ``value``
        [B, kv_heads, T, head_dim].
    """
    del ops
    sizes = layer.attention
    rows, tokens = x.shape[0], x.shape[1]
    repeat = sizes.heads // sizes.kv_heads

    def project(name: str, heads: int) -> Tensor:
        y = linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        return y.reshape(rows, tokens, heads, sizes.head_dim).transpose(1, 2)

    k = project("k_proj", sizes.kv_heads)
    v = project("v_proj", sizes.kv_heads)
    if sizes.qk_norm:
        k = rms_norm(k, weights["k_norm.weight"], layer.norm_eps)
    if sizes.rotary_dim:
        k = rotate(k, *info.rotary(sizes.rotary_dim, sizes.rope_theta))
    made = {"key": k, "value": v}
    if "key" not in states:
        return None, made
    keys, values = states["key"], states["value"]
    q = project("q_proj", sizes.heads)
    if sizes.qk_norm:
        q = rms_norm(q, weights["q_norm.weight"], layer.norm_eps)
    if sizes.rotary_dim:
        q = rotate(q, *info.rotary(sizes.rotary_dim, sizes.rope_theta))
    q = q * sizes.head_dim**-0.5
    grouped = q.reshape(rows, sizes.kv_heads, repeat * tokens, sizes.head_dim)
    cached = wide(grouped @ keys.transpose(2, 3))
    cached = torch.where(info.cache_mask(keys.shape[2]), cached, MASKED)
    fresh = wide(grouped @ k.transpose(2, 3))
    mask = info.fresh_mask(layer.direction)
    if mask is not None:
        shape = (rows, sizes.kv_heads, repeat, tokens, tokens)
        fresh = torch.where(mask[:, None], fresh.reshape(shape), MASKED)
        fresh = fresh.reshape(rows, sizes.kv_heads, repeat * tokens, tokens)
    shares = torch.cat([cached, fresh], -1).softmax(-1).to(x.dtype)
    capacity = keys.shape[2]
    y = shares[..., :capacity] @ values + shares[..., capacity:] @ v
    y = y.reshape(rows, sizes.heads, tokens, sizes.head_dim).transpose(1, 2)
    y = y.reshape(rows, tokens, sizes.heads * sizes.head_dim)
    return linear(y, weights["o_proj.weight"], weights.get("o_proj.bias")), made
