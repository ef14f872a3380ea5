"""Block attention over a cache that is only read: ``(x, keys, values) -> (y, new keys, values)``.

Joint softmax over cache and new tokens, then one product with V for each: one product over their
concatenation would make the bytes depend on the cache's capacity. Masks select scores, they are
never added: garbage behind ``past_length`` would leak through an addition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fixedstate.export import window
from fixedstate.export.layers import linear, rms_norm, rotate
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps, wide
from fixedstate.spec import AttentionSizes, LayerSpec, LinearAttentionSizes

MASKED = -1e30
"""Score of a masked position; finite, so that a row without any valid key stays finite."""

Angles = tuple[Tensor, Tensor]


class Look(NamedTuple):
    """Keys that the queries of a pass look at, S of them, and what they find there.

    Attributes:
        query: [B, heads, T, head_dim], scaled.
        keys: [B, kv_heads, S, head_dim].
        values: Like ``keys``.
        mask: [B or 1, 1, 1, T, S] or [B, 1, 1, S] bool, or None where every key is seen.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None


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
            each row, or [B, kv_heads, sinks + W, head_dim] beside a window; neither where only
            the new keys and values are wanted, and in a ``full`` pass.
        info: What pass this is: positions, lengths and masks.
        ops: Not used.

    Returns:
        y [B, T, D] of the tokens asked for (None where only keys and values are wanted), and the
        new tokens' ``key`` and ``value`` [B, kv_heads, T, head_dim], or beside a window the port's
        next content where the pass commits.
    """
    del ops
    sizes = layer.attention
    k = project_heads(layer, weights, "k", x)
    v = project_heads(layer, weights, "v", x)
    if "key" not in states and info.role != "full":
        kept = turn(k, _here(sizes, info)) if sizes.keys_rotated else k
        return None, {"key": kept, "value": v}
    q = project_heads(layer, weights, "q", info.asked(x))
    q = q * (sizes.head_dim**-0.5 if sizes.scale is None else sizes.scale)
    if info.role == "full":
        here = _here(sizes, info)
        looks = [Look(turn(q, here), turn(k, here), v, info.fresh_mask(layer.direction))]
        made: dict[str, Tensor] = {}
    elif sizes.window is None:
        looks, made = _whole_prefix(layer, q, k, v, states, info)
    elif sizes.keys_rotated or not sizes.rotary_dim:
        looks, made = _window(layer, q, k, v, states, info)
    else:
        looks, made = _window_in_cache(layer, q, k, v, states, info)
    y = join_heads(attend(of_asked(looks, info), sizes.score_softcap))
    return linear(y, weights["o_proj.weight"], weights.get("o_proj.bias")), made


def of_asked(looks: list[Look], info: PassInfo) -> list[Look]:
    """The looks with masks of the tokens asked for, as their queries are."""
    if not info.narrow:
        return looks
    return [
        look
        if look.mask is None or look.mask.ndim == 4
        else look._replace(mask=info.asked(look.mask[:, 0, 0])[:, None, None])
        for look in looks
    ]


def asked_angles(angles: Angles | None, info: PassInfo) -> Angles | None:
    """Angles [B or 1, 1, T, r/2] at the tokens asked for."""
    if angles is None or not info.narrow:
        return angles
    cos, sin = (info.asked(angle[:, 0])[:, None] for angle in angles)
    return cos, sin


def project_heads(layer: LayerSpec, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Queries, keys or values by heads, normed where the layer norms them: [B, heads, T, head_dim].

    Args:
        layer: An attention or linear attention layer.
        weights: Its mixer's tensors.
        name: ``q``, ``k`` or ``v``.
        x: [B, T, D].
    """
    sizes = layer.sizes
    assert isinstance(sizes, AttentionSizes | LinearAttentionSizes)
    heads = sizes.heads if name == "q" else sizes.kv_heads
    y = linear(x, weights[f"{name}_proj.weight"], weights.get(f"{name}_proj.bias"))
    y = y.reshape(x.shape[0], x.shape[1], heads, sizes.head_dim).transpose(1, 2)
    if sizes.qk_norm and name != "v":
        y = rms_norm(y, weights[f"{name}_norm.weight"], layer.norm_eps)
    return y


def join_heads(y: Tensor) -> Tensor:
    """[B, heads, T, head_dim] -> [B, T, heads * head_dim]."""
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3])


def by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, heads, T, P] by the key head used: [B, kv_heads, heads/kv_heads * T, P]."""
    rows, heads, tokens, width = x.shape
    return x.reshape(rows, kv_heads, heads // kv_heads * tokens, width)


def select(scores: Tensor, mask: Tensor, heads: int, otherwise: float) -> Tensor:
    """The scores that the mask selects, another number elsewhere.

    Args:
        scores: [B, kv_heads, heads/kv_heads * T, S].
        mask: [B or 1, 1, 1, T, S] or [B, 1, 1, S] bool.
        heads: Query heads.
        otherwise: What stands where the mask does not select.
    """
    if mask.ndim == 4:
        return torch.where(mask, scores, otherwise)
    rows, kv_heads, queries, keys = scores.shape
    apart = scores.reshape(rows, kv_heads, heads // kv_heads, mask.shape[3], keys)
    return torch.where(mask, apart, otherwise).reshape(rows, kv_heads, queries, keys)


def attend(looks: list[Look], softcap: float = 0.0) -> Tensor:
    """Softmax over the keys of all looks together: [B, heads, T, head_dim].

    Args:
        looks: Where the queries look.
        softcap: c of c tanh(score / c); 0 for none.
    """
    query = looks[0].query
    heads, kv_heads = query.shape[1], looks[0].keys.shape[1]
    scores = []
    for look in looks:
        score = wide(by_key_head(look.query, kv_heads) @ look.keys.transpose(2, 3))
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        scores.append(score if look.mask is None else select(score, look.mask, heads, MASKED))
    io = looks[0].values.dtype
    if len(looks) == 1:
        y = scores[0].softmax(-1).to(io) @ looks[0].values
        return y.reshape(query.shape)
    shares = torch.cat(scores, -1).softmax(-1).to(io)
    start, parts = 0, []
    for look in looks:
        end = start + look.keys.shape[2]
        share = shares[..., start:] if look is looks[-1] else shares[..., start:end]
        parts.append(share @ look.values)
        start = end
    return sum(parts[1:], parts[0]).reshape(query.shape)


def _here(sizes: AttentionSizes, info: PassInfo) -> Angles | None:
    """Angles at the new tokens' positions in the text."""
    return info.angles(sizes, "text", info.positions) if sizes.rotary_dim else None


def turn(x: Tensor, angles: Angles | None) -> Tensor:
    """Rotate the heads [B, heads, T, head_dim]; nothing is done without angles."""
    return x if angles is None else rotate(x, *angles)


Found = tuple[list[Look], dict[str, Tensor]]


def _whole_prefix(
    layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, states: dict[str, Tensor], info: PassInfo
) -> Found:
    """A cache that grows: column c is token c of the text."""
    sizes = layer.attention
    keys, values = states["key"], states["value"]
    capacity = keys.shape[2]
    here = _here(sizes, info)
    turned = turn(k, here)
    if sizes.rotary_dim and not sizes.keys_rotated:
        columns = torch.arange(capacity)[None]
        keys = rotate(keys, *info.angles(sizes, "cache", columns))
    q = turn(q, asked_angles(here, info))
    looks = [
        Look(q, keys, values, info.cache_mask(capacity)),
        Look(q, turned, v, info.fresh_mask(layer.direction)),
    ]
    return looks, {"key": turned if sizes.keys_rotated else k, "value": v}


def _window(
    layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, states: dict[str, Tensor], info: PassInfo
) -> Found:
    """A window whose keys are kept as they are looked at."""
    sizes = layer.attention
    room = window.room(sizes)
    here = _here(sizes, info)
    q, k = turn(q, asked_angles(here, info)), turn(k, here)
    looks = [
        Look(q, states["key"], states["value"], window.held_mask(info, *room)),
        Look(q, k, v, info.fresh_mask(layer.direction, *room)),
    ]
    return looks, _next(states, k, v, info, sizes)


def _window_in_cache(
    layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, states: dict[str, Tensor], info: PassInfo
) -> Found:
    """A window whose keys are rotated at their place in the cache.

    Between a query and a key of the window, or a new one, only the distance counts, so the first
    block's positions serve the whole pass. The distance to a sink depends on the query's own
    block: a pass over several blocks rotates its queries once more for the sinks.

    What is rotated stays float32: rounded to a narrower io dtype, a key would differ from pass to
    pass by where it stands.
    """
    sizes = layer.attention
    size, sinks = room = window.room(sizes)
    columns = info.angles(sizes, ("columns", room), window.column_positions(info, sizes))
    first = info.positions - window.left_out(info, sizes)
    here = info.angles(sizes, ("in cache", room), first)
    wide_q, wide_k, wide_keys = wide(q), wide(k), wide(states["key"])
    near, turned = turn(wide_q, asked_angles(here, info)), rotate(wide_k, *here)
    if not (info.commits and sinks):
        looks = [
            Look(
                near,
                rotate(wide_keys, *columns),
                states["value"],
                window.held_mask(info, *room),
            ),
            Look(near, turned, v, info.fresh_mask(layer.direction, *room)),
        ]
        return looks, _next(states, k, v, info, sizes)
    own = info.positions - window.left_out_at_block(info, sizes)
    at_block = info.angles(sizes, ("at block", room), own)
    far = turn(wide_q, asked_angles(at_block, info))
    held = rotate(wide_keys[:, :, sinks:], *(angle[:, :, sinks:] for angle in columns))
    at_sinks, at_window, at_new = window.apart_masks(info, layer.direction, *room)
    all_keys, all_values = (
        window.all_sinks(info, torch.cat([states[kind], new], 2), *room)
        for kind, new in (("key", k), ("value", v))
    )
    places = info.angles(sizes, ("sinks", sinks), torch.arange(sinks)[None])
    looks = [
        Look(far, rotate(wide(all_keys), *places), all_values, at_sinks),
        Look(near, held, states["value"][:, :, sinks:], at_window),
        Look(near, turned, v, at_new),
    ]
    return looks, _next(states, k, v, info, sizes)


def _next(
    states: dict[str, Tensor], k: Tensor, v: Tensor, info: PassInfo, sizes: AttentionSizes
) -> dict[str, Tensor]:
    """What the windowed port holds after the pass; nothing where the pass commits nothing."""
    if not info.commits:
        return {}
    return {
        kind: window.next_columns(info, torch.cat([states[kind], new], 2), *window.room(sizes))
        for kind, new in (("key", k), ("value", v))
    }
