"""Mamba-1 block step: ``(x, conv, ssm) -> (y, conv, ssm)``, forward and block-reverse.

Source of the module: Mamba (arXiv 2312.00752) and state-spaces/mamba ``Mamba``; directions:
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
from fixedstate.export.layers import linear, softplus
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps, wide
from fixedstate.spec import LayerSpec, Mamba1Sizes


def mamba1(
    layer: LayerSpec,
    weights: Weights,
    x: Tensor,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One Mamba-1 mixer; ``ssm`` is [B, N, E], the rest as in ``run_directions``."""
    recurrence = _Mamba1(layer.mamba1, token_multiple(info))
    return run_directions(layer, recurrence, weights, x, states, info, ops)


@dataclass(frozen=True, slots=True)
class _Mamba1:
    """Steps, B and C come from the convolved x through x_proj; A is [N, E]; no norm."""

    sizes: Mamba1Sizes
    tokens: int  # tokens of a pass are a multiple of it

    def project(self, weights: Weights, x: Tensor) -> Projected:
        """Rows of in_proj are [x, z]."""
        y = linear(x, weights["in_proj.weight"], weights.get("in_proj.bias"))
        raw, z = torch.split(y, [self.sizes.d_inner, self.sizes.d_inner], -1)
        return Projected(functional.silu(wide(z)), raw, None)

    def scan_inputs(self, weights: Weights, mixed: Tensor, dt: Tensor | None) -> ScanInputs:
        """x [B, T, E] is the columns themselves; B and C [B, T, N]."""
        assert dt is None
        sizes = self.sizes
        low, b, c = torch.split(
            linear(mixed, weights["x_proj.weight"]),
            [sizes.dt_rank, sizes.d_state, sizes.d_state],
            -1,
        )
        raised = wide(linear(low, weights["dt_proj.weight"])) + weights["dt_proj.bias"]
        step = softplus(raised, self.tokens)
        return ScanInputs(mixed, step, weights["A"], b, c, weights["D"])

    def gated(self, weights: Weights, y: Tensor, gate: Tensor) -> Tensor:
        """y * silu(z)."""
        del weights
        return (wide(y) * gate).to(y.dtype)

    def zero_state(self, scan: ScanInputs) -> Tensor:
        """[B, N, E]."""
        return scan.dt.new_zeros(scan.dt.shape[0], self.sizes.d_state, self.sizes.d_inner)

    def denoise(self, ops: BlockOps, scan: ScanInputs, state: Tensor, block_len: int) -> Tensor:
        """[B, T, E]."""
        del block_len
        return ops.scan_denoise(*scan, state)

    def commit(
        self, ops: BlockOps, scan: ScanInputs, state: Tensor, block_len: int
    ) -> tuple[Tensor, Tensor]:
        """[B, T, E] and [B, N, E]."""
        del block_len
        return ops.scan_commit(*scan, state)

    def reverse(self, ops: BlockOps, scan: ScanInputs, block_len: int) -> Tensor:
        """[B, T, E]."""
        return ops.scan_reverse(*scan, block_len)
