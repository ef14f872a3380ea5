"""Mamba-2 block step: ``(x, conv, ssm) -> (y, conv, ssm)``, forward and block-reverse.

Source of the module: Mamba-2 (arXiv 2405.21060) and state-spaces/mamba ``Mamba2``; the reverse
pass confined to a block follows "Fixed State, Long Reach" (arXiv 2609.11998) and BDLM Mamba-H
(arXiv 2607.02805): outputs of the two directions are added.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.export.layers import linear, rms_norm
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps, wide
from fixedstate.spec import LayerSpec, Mamba2Sizes

Weights = dict[str, Tensor]


def mamba2(
    layer: LayerSpec,
    weights: Weights,
    x: Tensor,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One Mamba-2 mixer.

    Args:
        layer: The layer.
        weights: Its tensors; ``reverse.*`` holds what the reverse pass does not share.
        x: [B, T, D] normed input.
        states: ``conv`` [B, conv_dim, K-1], raw columns before the first token (none at K = 1),
            and ``ssm`` [B, H, N, P] float32; neither for a ``reverse`` layer.
        info: What pass this is.
        ops: Plain or traced operators.

    Returns:
        y [B, T, D] and the new ``conv`` and ``ssm`` states, where the pass makes them.
    """
    sizes = layer.mamba2
    own_reverse = {k.removeprefix("reverse."): v for k, v in weights.items() if "reverse." in k}
    reverse_weights = {**weights, **own_reverse}
    parts: list[tuple[Tensor, Weights]] = []
    made: dict[str, Tensor] = {}
    projected = None
    if layer.direction != "reverse":
        projected = _project(sizes, weights, x)
        y, made = _forward(sizes, weights, projected, states, info, ops)
        parts.append((y, weights))
    if _runs_reverse(layer, info):
        if projected is None or "in_proj.weight" in own_reverse:
            projected = _project(sizes, reverse_weights, x)
        parts.append((_reverse(sizes, reverse_weights, projected, info, ops), reverse_weights))
    if not parts:  # a reverse layer in a commit pass that leaves reverse passes out
        return torch.zeros_like(x), {}
    return _join(parts), made


def _runs_reverse(layer: LayerSpec, info: PassInfo) -> bool:
    if layer.direction == "forward":
        return False
    return info.role != "commit" or info.spec.commit_reverse


def _join(parts: list[tuple[Tensor, Weights]]) -> Tensor:
    """Sum of the projected directions; a shared out_proj is applied once."""
    if len(parts) == 2 and parts[0][1]["out_proj.weight"] is parts[1][1]["out_proj.weight"]:
        parts = [(parts[0][0] + parts[1][0], parts[0][1])]
        shared_bias = parts[0][1].get("out_proj.bias")
        y = linear(parts[0][0], parts[0][1]["out_proj.weight"])
        return y if shared_bias is None else y + 2 * shared_bias
    outs = [linear(y, w["out_proj.weight"], w.get("out_proj.bias")) for y, w in parts]
    return outs[0] if len(outs) == 1 else outs[0] + outs[1]


def _project(sizes: Mamba2Sizes, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(z) [B, T, E] float32, raw columns [B, T, conv_dim], dt before its bias [B, T, H]."""
    y = linear(x, weights["in_proj.weight"], weights.get("in_proj.bias"))
    z, raw, dt = torch.split(y, [sizes.d_inner, sizes.conv_dim, sizes.heads], -1)
    return functional.silu(wide(z)), raw, dt


def _step_size(sizes: Mamba2Sizes, weights: Weights, dt: Tensor) -> Tensor:
    """clamp(softplus(dt + bias), limits), float32."""
    step = functional.softplus(wide(dt) + weights["dt_bias"])
    if sizes.dt_min > 0 or sizes.dt_max is not None:
        step = step.clamp(min=sizes.dt_min, max=sizes.dt_max)
    return step


def _columns(sizes: Mamba2Sizes, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved columns as x [B, T, H, P], B and C [B, T, G, N]."""
    rows, tokens = y.shape[0], y.shape[1]
    wide = sizes.groups * sizes.d_state
    x, b, c = torch.split(y, [sizes.d_inner, wide, wide], -1)
    per_group = (rows, tokens, sizes.groups, sizes.d_state)
    return (
        x.reshape(rows, tokens, sizes.heads, sizes.head_dim),
        b.reshape(per_group),
        c.reshape(per_group),
    )


def _gated(sizes: Mamba2Sizes, weights: Weights, y: Tensor, gate: Tensor) -> Tensor:
    """Gate and norm, per group: RMSNorm(y * silu(z)), or the norm before the gate, or none."""
    io = y.dtype
    y = wide(y.reshape(gate.shape))
    if sizes.gated_norm == "none":
        return (y * gate).to(io)
    weight, eps = weights["norm.weight"], sizes.norm_eps
    if sizes.gated_norm == "before":
        return (rms_norm(y, weight, eps, sizes.groups) * gate).to(io)
    return rms_norm(y * gate, weight, eps, sizes.groups).to(io)


def _skip(sizes: Mamba2Sizes, weights: Weights) -> Tensor:
    d = weights["D"]
    return d.reshape(sizes.heads, sizes.head_dim) if sizes.d_has_hdim else d


def _pointwise_conv(weights: Weights, raw: Tensor) -> Tensor:
    return functional.silu(raw * weights["conv1d.weight"][:, 0] + weights["conv1d.bias"])


def _forward(
    sizes: Mamba2Sizes,
    weights: Weights,
    projected: tuple[Tensor, Tensor, Tensor],
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    gate, raw, dt = projected
    conv, ssm = states.get("conv"), states["ssm"]
    step = _step_size(sizes, weights, dt)
    taps = (weights["conv1d.weight"], weights["conv1d.bias"])
    length = info.spec.block_len
    a, d = weights["A"], _skip(sizes, weights)
    if not info.commits:
        mixed = (
            _pointwise_conv(weights, raw) if conv is None else ops.conv_denoise(raw, *taps, conv)
        )
        x, b, c = _columns(sizes, mixed)
        y = ops.ssd_denoise(x, step, a, b, c, d, ssm, length)
        return _gated(sizes, weights, y, gate), {}
    made: dict[str, Tensor] = {}
    if conv is None:
        mixed = _pointwise_conv(weights, raw)
    else:
        mixed, new_conv = ops.conv_commit(raw, *taps, conv, info.commit_length)  # type: ignore[arg-type]
        made["conv"] = info.keep(new_conv, conv)
    x, b, c = _columns(sizes, mixed)
    clean = info.clean[..., None]
    y, new_ssm = ops.ssd_commit(x, torch.where(clean, step, 0.0), a, b, c, d, ssm, length)
    made["ssm"] = new_ssm = info.keep(new_ssm, ssm)
    if info.role == "commit_denoise":
        # the block being denoised starts from the state that was just made
        noisy = torch.where(clean, 0.0, step)
        tail = [v[:, -length:] for v in (x, noisy, b, c)]
        over = ops.ssd_denoise(tail[0], tail[1], a, tail[2], tail[3], d, new_ssm, length)
        tail_clean = info.clean[:, -length:, None, None]
        y = torch.cat([y[:, :-length], torch.where(tail_clean, y[:, -length:], over)], 1)
    return _gated(sizes, weights, y, gate), made


def _reverse(
    sizes: Mamba2Sizes,
    weights: Weights,
    projected: tuple[Tensor, Tensor, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> Tensor:
    """The pass from right to left inside each block, from zero at its right edge."""
    gate, raw, dt = projected
    step = _step_size(sizes, weights, dt)
    length = info.spec.block_len
    if info.role == "commit":
        # what is not committed must not be seen by what is
        clean = info.clean[..., None]
        raw, step = torch.where(clean, raw, 0.0), torch.where(clean, step, 0.0)
    if weights["conv1d.weight"].shape[1] == 1:
        mixed = _pointwise_conv(weights, raw)
    else:
        mixed = ops.conv_reverse(raw, weights["conv1d.weight"], weights["conv1d.bias"], length)
    x, b, c = _columns(sizes, mixed)
    y = ops.ssd_reverse(x, step, weights["A"], b, c, _skip(sizes, weights), length)
    gated = _gated(sizes, weights, y, gate)
    if info.role == "commit_denoise" and not info.spec.commit_reverse:
        gated = torch.where(info.clean[..., None], 0.0, gated)
    return gated
