"""What the Mamba mixers share: their directions, their convolution, and what a pass may see.

A ``block`` layer adds the outputs of a forward pass from the cached state and of a reverse pass
confined to each block ("Fixed State, Long Reach", arXiv 2609.11998; BDLM Mamba-H, arXiv
2607.02805); a ``reverse`` layer has the second alone (the sidecar of R2LM, arXiv 2606.27732).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.export.layers import linear
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import BlockOps
from fixedstate.spec import LayerSpec

Weights = dict[str, Tensor]


class Projected(NamedTuple):
    """What in_proj gives.

    Attributes:
        gate: silu(z) [B, T, E] float32.
        raw: Columns before the convolution [B, T, conv_dim].
        dt: Steps before their bias, where in_proj gives them.
    """

    gate: Tensor
    raw: Tensor
    dt: Tensor | None


class ScanInputs(NamedTuple):
    """The inputs of a scan operator, without state; ``dt`` float32 after softplus."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor

    def where(self, seen: Tensor) -> ScanInputs:
        """Steps of 0 for the tokens [B, T] that are not seen: they leave the state alone."""
        return self._replace(dt=torch.where(_like(seen, self.dt), self.dt, 0.0))

    def last(self, tokens: int) -> ScanInputs:
        """The last tokens alone."""
        x, dt, b, c = (v[:, -tokens:] for v in (self.x, self.dt, self.b, self.c))
        return ScanInputs(x, dt, self.a, b, c, self.d)


class Recurrence(Protocol):
    """What tells one Mamba from another; shapes as in :mod:`fixedstate.plugins.reference`."""

    def project(self, weights: Weights, x: Tensor) -> Projected:
        """What in_proj makes of the normed input [B, T, D]."""
        ...

    def scan_inputs(self, weights: Weights, mixed: Tensor, dt: Tensor | None) -> ScanInputs:
        """The scan's inputs from convolved columns [B, T, conv_dim]."""
        ...

    def gated(self, weights: Weights, y: Tensor, gate: Tensor) -> Tensor:
        """What out_proj reads [B, T, E], from the scan's output and the gate."""
        ...

    def zero_state(self, scan: ScanInputs) -> Tensor:
        """The scan's state before the first token."""
        ...

    def denoise(self, ops: BlockOps, scan: ScanInputs, state: Tensor, block_len: int) -> Tensor:
        """Outputs of one block; the state is only read."""
        ...

    def commit(
        self, ops: BlockOps, scan: ScanInputs, state: Tensor, block_len: int
    ) -> tuple[Tensor, Tensor]:
        """Outputs of n blocks, and the state after them."""
        ...

    def reverse(self, ops: BlockOps, scan: ScanInputs, block_len: int) -> Tensor:
        """Outputs of the pass from the right edge of each block."""
        ...


def run_directions(
    layer: LayerSpec,
    recurrence: Recurrence,
    weights: Weights,
    x: Tensor,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One Mamba mixer in the directions of its layer.

    Args:
        layer: The layer.
        recurrence: Its kind of Mamba.
        weights: Its tensors; ``reverse.*`` holds what the reverse pass does not share.
        x: [B, T, D] normed input.
        states: ``conv`` [B, conv_dim, K-1], raw columns before the first token (none at K = 1),
            and ``ssm`` float32; neither for a ``reverse`` layer, nor where the whole sequence is
            one pass.
        info: What pass this is.
        ops: Plain or traced operators.

    Returns:
        y [B, T, D] of the tokens asked for, and the new ``conv`` and ``ssm`` states, where the
        pass makes them.
    """
    own_reverse = {k.removeprefix("reverse."): v for k, v in weights.items() if "reverse." in k}
    reverse_weights = {**weights, **own_reverse}
    parts: list[_Part] = []
    made: dict[str, Tensor] = {}
    projected = None
    if layer.direction != "reverse":
        projected = recurrence.project(weights, x)
        y, made = _forward(recurrence, weights, projected, states, info, ops)
        parts.append(_Part(y, weights["out_proj.weight"], weights.get("out_proj.bias")))
    if _runs_reverse(layer, info):
        if projected is None or "in_proj.weight" in own_reverse:
            projected = recurrence.project(reverse_weights, x)
        y = _reverse(recurrence, reverse_weights, projected, info, ops)
        bias = reverse_weights.get("out_proj.bias")
        if info.role == "commit_denoise" and not info.spec.commit_reverse:
            # committed tokens are those of a pass without it
            clean = info.asked(info.clean)[..., None]
            y = torch.where(clean, 0.0, y)
            bias = None if bias is None else torch.where(clean, 0.0, bias)
        parts.append(_Part(y, reverse_weights["out_proj.weight"], bias))
    if not parts:  # a reverse layer in a commit pass that leaves reverse passes out
        return torch.zeros_like(x), {}
    return _join(parts), made


def _runs_reverse(layer: LayerSpec, info: PassInfo) -> bool:
    if layer.direction == "forward":
        return False
    return info.role != "commit" or info.spec.commit_reverse


class _Part(NamedTuple):
    """One direction before out_proj [B, T, E], and its out_proj."""

    y: Tensor
    weight: Tensor
    bias: Tensor | None


def _join(parts: list[_Part]) -> Tensor:
    """Sum of the projected directions; a shared out_proj is applied once."""
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) == 2 and parts[0].weight is parts[1].weight:
        outs = [linear(parts[0].y + parts[1].y, parts[0].weight)]
    else:
        outs = [linear(part.y, part.weight) for part in parts]
    terms = outs + biases
    y = terms[0]
    for term in terms[1:]:
        y = y + term
    return y


def _like(seen: Tensor, value: Tensor) -> Tensor:
    """[B, T] with as many axes as the value [B, T, ...]."""
    return seen.reshape(*seen.shape, *(1,) * (value.ndim - 2))


def _block_len(info: PassInfo) -> int:
    """L for the operators: 0 where the whole sequence is one block."""
    return 0 if info.role == "full" else info.spec.block_len


def token_multiple(info: PassInfo) -> int:
    """What the tokens of a pass are a multiple of."""
    return 1 if info.role == "full" else info.spec.block_len


def _pointwise_conv(weights: Weights, raw: Tensor) -> Tensor:
    return functional.silu(raw * weights["conv1d.weight"][:, 0] + weights["conv1d.bias"])


def _zero_window(raw: Tensor, weight: Tensor) -> Tensor:
    """The convolution's state before the first token [B, conv_dim, K-1]."""
    return raw.new_zeros(raw.shape[0], raw.shape[2], weight.shape[1] - 1)


def _forward(
    recurrence: Recurrence,
    weights: Weights,
    projected: Projected,
    states: dict[str, Tensor],
    info: PassInfo,
    ops: BlockOps,
) -> tuple[Tensor, dict[str, Tensor]]:
    gate, raw, dt = projected
    weight, bias = weights["conv1d.weight"], weights["conv1d.bias"]
    one_tap = weight.shape[1] == 1
    length = _block_len(info)
    if not info.commits:
        if one_tap:
            mixed = _pointwise_conv(weights, raw)
        else:
            conv = states["conv"] if "conv" in states else _zero_window(raw, weight)
            mixed = ops.conv_denoise(raw, weight, bias, conv)
        scan = recurrence.scan_inputs(weights, mixed, dt)
        ssm = states["ssm"] if "ssm" in states else recurrence.zero_state(scan)
        y = recurrence.denoise(ops, scan, ssm, length)
        return recurrence.gated(weights, info.asked(y), info.asked(gate)), {}
    made: dict[str, Tensor] = {}
    if one_tap:
        mixed = _pointwise_conv(weights, raw)
    else:
        conv = states["conv"]
        mixed, window = ops.conv_commit(raw, weight, bias, conv, info.commit_length)  # type: ignore[arg-type]
        made["conv"] = info.keep(window, conv)
    scan, ssm, clean = recurrence.scan_inputs(weights, mixed, dt), states["ssm"], info.clean
    y, new = recurrence.commit(ops, scan.where(clean), ssm, length)
    made["ssm"] = new = info.keep(new, ssm)
    if info.role == "commit_denoise":
        # the block being denoised starts from the state that was just made
        over = recurrence.denoise(ops, scan.where(~clean).last(length), new, length)
        tail = torch.where(_like(clean[:, -length:], over), y[:, -length:], over)
        y = torch.cat([y[:, :-length], tail], 1)
    return recurrence.gated(weights, info.asked(y), info.asked(gate)), made


def _reverse(
    recurrence: Recurrence,
    weights: Weights,
    projected: Projected,
    info: PassInfo,
    ops: BlockOps,
) -> Tensor:
    """The pass from right to left inside each block, from zero at its right edge."""
    gate, raw, dt = projected
    weight, bias = weights["conv1d.weight"], weights["conv1d.bias"]
    length = _block_len(info)
    if info.role == "commit":
        # what is not committed must not be seen by what is
        raw = torch.where(info.clean[..., None], raw, 0.0)
    if weight.shape[1] == 1:
        mixed = _pointwise_conv(weights, raw)
    else:
        mixed = ops.conv_reverse(raw, weight, bias, length)
    scan = recurrence.scan_inputs(weights, mixed, dt)
    if info.role == "commit":
        scan = scan.where(info.clean)
    y = recurrence.reverse(ops, scan, length)
    return recurrence.gated(weights, info.asked(y), info.asked(gate))
