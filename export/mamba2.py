"""Mamba-2 block step: ``(x, conv, ssm) -> (y, conv, ssm)``, forward and block-reverse.

Source of the module: Mamba-2 (arXiv 2405.21060) and state-spaces/mamba ``Mamba2``; directions:
:mod:`fixedstate.export.directions`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.export.directions import (
    Projected,
    ScanInputs,
    Weights,
    run_directions,
    token_multiple,
)
from fixedstate.export.layers import linear, rms_norm, softplus
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps, wide
from fixedstate.spec import LayerSpec, Mamba2Sizes


def mamba2(
    layer: LayerSpec,
    weights: Weights,
    x: Tensor,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One Mamba-2 mixer; ``ssm`` is [B, H, N, P], the rest as in ``run_directions``."""
    recurrence = _Mamba2(layer.mamba2, token_multiple(info))
    return run_directions(layer, recurrence, weights, x, states, info, ops)


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """Steps, B and C come from in_proj; one decay per head; gate and norm per group."""

    sizes: Mamba2Sizes
    tokens: int  # tokens of a pass are a multiple of it

    def project(self, weights: Weights, x: Tensor) -> Projected:
        """Rows of in_proj are [z, x, B, C, dt]; dt is [B, T, H] before its bias."""
        sizes = self.sizes
        y = linear(x, weights["in_proj.weight"], weights.get("in_proj.bias"))
        z, raw, dt = torch.split(y, [sizes.d_inner, sizes.conv_dim, sizes.heads], -1)
        return Projected(functional.silu(wide(z)), raw, dt)

    def scan_inputs(self, weights: Weights, mixed: Tensor, dt: Tensor | None) -> ScanInputs:
        """Convolved columns are x [B, T, H, P], B and C [B, T, G, N]."""
        assert dt is not None
        sizes = self.sizes
        rows, tokens = mixed.shape[0], mixed.shape[1]
        shared = sizes.groups * sizes.d_state
        x, b, c = torch.split(mixed, [sizes.d_inner, shared, shared], -1)
        per_group = (rows, tokens, sizes.groups, sizes.d_state)
        d = weights["D"]
        return ScanInputs(
            x.reshape(rows, tokens, sizes.heads, sizes.head_dim),
            self._step(weights, dt),
            weights["A"],
            b.reshape(per_group),
            c.reshape(per_group),
            d.reshape(sizes.heads, sizes.head_dim) if sizes.d_has_hdim else d,
        )

    def _step(self, weights: Weights, dt: Tensor) -> Tensor:
        """clamp(softplus(dt + bias), limits), float32."""
        step = softplus(wide(dt) + weights["dt_bias"], self.tokens)
        if self.sizes.dt_min > 0 or self.sizes.dt_max is not None:
            step = step.clamp(min=self.sizes.dt_min, max=self.sizes.dt_max)
        return step

    def gated(self, weights: Weights, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and norm, per group: RMSNorm(y * silu(z)), or the norm first, or none."""
        sizes, io = self.sizes, y.dtype
        y = wide(y.reshape(gate.shape))
        if sizes.gated_norm == "none":
            return (y * gate).to(io)
        weight, eps = weights["norm.weight"], sizes.norm_eps
        if sizes.gated_norm == "before":
            return (rms_norm(y, weight, eps, sizes.groups) * gate).to(io)
        return rms_norm(y * gate, weight, eps, sizes.groups).to(io)

    def zero_state(self, scan: ScanInputs) -> Tensor:
        """[B, H, N, P]."""
        sizes = self.sizes
        shape = (scan.dt.shape[0], sizes.heads, sizes.d_state, sizes.head_dim)
        return scan.dt.new_zeros(shape)

    def denoise(self, ops: BlockOps, scan: ScanInputs, state: Tensor, block_len: int) -> Tensor:
        """[B, T, H, P]."""
        return ops.ssd_denoise(*scan, state, block_len)

    def commit(
        self, ops: BlockOps, scan: ScanInputs, state: Tensor, block_len: int
    ) -> tuple[Tensor, Tensor]:
        """[B, T, H, P] and [B, H, N, P]."""
        return ops.ssd_commit(*scan, state, block_len)

    def reverse(self, ops: BlockOps, scan: ScanInputs, block_len: int) -> Tensor:
        """[B, T, H, P]."""
        return ops.ssd_reverse(*scan, block_len)
