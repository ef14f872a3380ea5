"""The small parts of a denoiser: norms, rotary embedding, MLP; pure tensor functions.

Norms, rotary angles and softmax are float32 islands: they compute in float32 whatever the dtype
of what enters, and give back the dtype that entered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.plugins.torch_ops import wide
from fixedstate.spec import RopeScaling

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


LANES = 16
"""Elements that vectorised code computes at once at most.

ONNX Runtime computes whole vectors and the rest of an array by two forms of Softplus, Sin and Cos
that differ in the last bit, and adds up a row in an order that depends on where in a vector it
begins. A row that fills whole vectors has the same bytes wherever it stands in a batch, so what
these functions take is padded to that.
"""


def _mean(x: Tensor) -> Tensor:
    """Mean over the last axis, which stays; the same bytes for a row alone and in a batch."""
    missing = -x.shape[-1] % LANES
    if not missing:
        return x.mean(-1, keepdim=True)
    return functional.pad(x, (0, missing)).sum(-1, keepdim=True) / x.shape[-1]


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
        normed = (parts / torch.sqrt(_mean(parts.pow(2)) + eps)).reshape(x.shape)
    else:
        normed = xf / torch.sqrt(_mean(xf.pow(2)) + eps)
    return (normed * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, in float32."""
    return functional.layer_norm(wide(x), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def softplus(x: Tensor, tokens: int) -> Tensor:
    """log(1 + exp(x)), the same bytes for a row alone and in a batch.

    Args:
        x: [B, T, C] float32.
        tokens: T is a multiple of it.
    """
    missing = -x.shape[2] % LANES if tokens * x.shape[2] % LANES else 0
    if not missing:
        return functional.softplus(x)
    return functional.softplus(functional.pad(x, (0, missing)))[..., : x.shape[2]]


def rotary_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> list[float]:
    """Radians per position of each rotated pair, rounded from float64 by whoever stores them.

    The scaled forms are those of Llama 3.1 and of YaRN (arXiv 2309.00071).

    Args:
        rotary_dim: Rotated elements of a head.
        theta: Base of the frequencies.
        scaling: How they are stretched; None for not at all.

    Returns:
        rotary_dim / 2 numbers, fastest first.
    """
    pairs = rotary_dim // 2
    plain = [theta ** (-2 * pair / rotary_dim) for pair in range(pairs)]
    if scaling is None:
        return plain
    slow = [frequency / scaling.factor for frequency in plain]
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        turns = [scaling.original_length * frequency / (2 * math.pi) for frequency in plain]
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = [(count - scaling.low_freq_factor) / span for count in turns]
    else:
        first, last = _yarn_ramp(rotary_dim, theta, scaling)
        kept = [(last - pair) / (last - first) for pair in range(pairs)]
    shares = [min(max(share, 0.0), 1.0) for share in kept]
    return [
        share * fast + (1 - share) * stretched
        for share, fast, stretched in zip(shares, plain, slow, strict=True)
    ]


def _yarn_ramp(rotary_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The pairs at which YaRN begins to stretch and from which on it stretches in full."""

    def pair_with(turns: float) -> float:
        """The pair that turns that often over the training context, as a fraction."""
        ratio = scaling.original_length / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), rotary_dim - 1)
    return first, last if last != first else last + 1e-3


def rotary_angles(
    positions: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary embedding (RoFormer, arXiv 2104.09864).

    Args:
        positions: [B, T] int64.
        rotary_dim: Rotated elements of a head.
        theta: Base of the frequencies.
        scaling: How frequencies are stretched; YaRN's attention_factor is in the result.

    Returns:
        Two [B, 1, T, rotary_dim / 2] float32 tensors.
    """
    plain = rotary_frequencies(rotary_dim, theta, scaling)
    padded = [*plain, *[0.0] * (-len(plain) % LANES)]
    frequencies = torch.tensor(padded, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None, :, None] * frequencies
    cos, sin = (turned[..., : len(plain)] for turned in (angles.cos(), angles.sin()))
    if scaling is not None and scaling.kind == "yarn" and scaling.attention_factor != 1.0:
        return cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


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
