"""Softmax inside the block, a sum of outer products before it: ``(x, S, z) -> (y, S, z)``.

The form of ARL2 (arXiv 2605.16579): attend locally, remember linearly (arXiv 2006.16236). A token
reads from S what the blocks before its own wrote; a pass over several blocks adds what its
earlier blocks write by one masked product, so that no step goes from token to token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.export.attention import (
    Look,
    asked_angles,
    attend,
    by_key_head,
    join_heads,
    of_asked,
    project_heads,
    select,
    turn,
)
from fixedstate.export.layers import linear
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps, wide
from fixedstate.spec import LayerSpec

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: functional.elu(x) + 1.0,
    "relu": functional.relu,
    "identity": lambda x: x,
}

EPSILON = 1e-6
"""Added to phi(q) z: before the first block nothing has been written, and the read is 0."""


def linear_attention(
    layer: LayerSpec,
    weights: dict[str, Tensor],
    x: Tensor,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One linear attention mixer.

    Args:
        layer: The layer.
        weights: Its mixer's tensors, projections [in, out], ``state_gate`` [heads] float32.
        x: [B, T, D] normed input.
        states: ``ssm`` [B, kv_heads, head_dim, head_dim], the sum of phi(k) v^T, and ``norm``
            [B, kv_heads, head_dim], that of phi(k), where the reads are normalised.
        info: What pass this is.
        ops: Not used.

    Returns:
        y [B, T, D] of the tokens asked for, and the new ``ssm`` and ``norm``, where the pass makes
        them.
    """
    del ops
    sizes = layer.linear_attention
    q = project_heads(layer, weights, "q", info.asked(x))
    k, v = (project_heads(layer, weights, name, x) for name in ("k", "v"))
    read, made = _read(layer, q, k, v, states, info)
    turned_q, turned_k = q * sizes.head_dim**-0.5, k
    if sizes.rotary_dim:
        inside = info.once("inside", lambda: info.steps - info.starts)
        angles = info.angles(sizes, "inside", inside[None])
        turned_q = turn(turned_q, asked_angles(angles, info))
        turned_k = turn(turned_k, angles)
    near = attend(of_asked([Look(turned_q, turned_k, v, _own_block(layer, info))], info))
    y = wide(near) + weights["state_gate"][:, None, None] * read
    y = join_heads(y.to(x.dtype))
    return linear(y, weights["o_proj.weight"], weights.get("o_proj.bias")), made


def _own_block(layer: LayerSpec, info: PassInfo) -> Tensor | None:
    """[B or 1, 1, 1, T, T] bool: which tokens of its own block each token sees."""
    mask = info.fresh_mask(layer.direction)
    if mask is None or not info.commits:
        return mask
    return info.once(
        ("own block", layer.direction), lambda: mask & (info.steps >= info.starts[:, None])
    )


def _read(
    layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, states: dict[str, Tensor], info: PassInfo
) -> tuple[Tensor, dict[str, Tensor]]:
    """What each token reads [B, heads, T, head_dim] float32, and the states after the pass.

    Where the reads are normalised, z stands beside S as one more column, and a one beside v.
    """
    sizes = layer.linear_attention
    phi, width = FEATURE_MAPS[sizes.feature_map], sizes.head_dim
    queries, keys, values = by_key_head(phi(wide(q)), sizes.kv_heads), phi(wide(k)), wide(v)
    state = states["ssm"]
    if sizes.normalised:
        state = torch.cat([state, states["norm"][..., None]], -1)
        values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    read = queries @ state
    made: dict[str, Tensor] = {}
    if info.commits:
        keys = torch.where(info.clean[:, None, :, None], keys, 0.0)
        earlier = info.once("earlier", lambda: info.steps < info.starts[:, None])
        before = info.asked(earlier[None])[:, None, None]
        written = select(queries @ keys.transpose(2, 3), before, sizes.heads, 0.0)
        read = read + written @ values
        new = state + keys.transpose(2, 3) @ values
        made["ssm"] = info.keep(new[..., :width], states["ssm"])
        if sizes.normalised:
            made["norm"] = info.keep(new[..., width], states["norm"])
    if sizes.normalised:
        read = read[..., :width] / (read[..., width:] + EPSILON)
    return read.reshape(q.shape), made
