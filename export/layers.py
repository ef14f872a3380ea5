"""The small parts of a denoiser: norms, rotary embedding, MLP; pure tensor functions.

Norms, rotary angles and softmax are float32 islands: they compute in float32 whatever the dtype
of what enters, and give back the dtype that entered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.plugins.torch_ops import wide

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean taken within each of ``groups``.

    Args:
        x: [..., D].
        weight: [D] float32.
        eps: Added to the mean square.
        groups: Equal parts of the last axis that have a mean square each.
    """
    xf = wide(x)
    if groups > 1:
        parts = xf.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        normed = (parts / torch.sqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).reshape(x.shape)
    else:
        normed = xf / torch.sqrt(xf.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in float32."""
    return functional.layer_norm(wide(x), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def rotary_angles(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary embedding (RoFormer, arXiv 2104.09864).

    Args:
        positions: [B, T] int64.
        rotary_dim: Rotated elements of a head.
        theta: Base of the frequencies.

    Returns:
        Two [B, 1, T, rotary_dim / 2] float32 tensors.
    """
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / theta ** (steps / rotary_dim)
    angles = positions.float()[:, None, :, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading elements of each head, halves not interleaved.

    Args:
        x: [B, heads, T, head_dim].
        cos: [B, 1, T, r/2], with r <= head_dim rotated elements.
        sin: Like ``cos``.
    """
    half = cos.shape[-1]
    xf = wide(x)
    first, second = xf[..., :half], xf[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        parts.append(xf[..., 2 * half :])
    return torch.cat(parts, -1).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ weight (+ bias), the weight stored [in, out] as ONNX MatMul wants it."""
    y = x @ weight
    return y if bias is None else y + bias
