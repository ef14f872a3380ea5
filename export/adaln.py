"""Conditioning on a timestep that never changes, folded into the weights that it modulates.

A denoiser trained without time conditioning may still carry a timestep embedder, always fed with
0: what comes out is one constant vector c, so that every shift, scale and gate made of it is a
constant too (adaptive norms of DiT, arXiv 2212.09748, as in MDLM, arXiv 2406.07524, and BD3-LM,
arXiv 2503.09573). ``norm(x) (1 + scale) + shift`` is a norm of other weights, ``gate * linear(x)``
a linear map of other weights. Everything here computes in float64 and is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from fixedstate.errors import CheckpointError

Tensors = Mapping[str, Tensor]

EMBEDDER = tuple(f"sigma_map.mlp.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias"))
"""Tensors of the timestep embedder: two linear maps around a SiLU."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A tensor of the own layout that is computed from several of a file.

    Attributes:
        keys: Published names of what it is computed from, the tensor it replaces first.
        make: float32 tensors by those names -> the float32 tensor.
    """

    keys: tuple[str, ...]
    make: Callable[[Tensors], Tensor]


@dataclass(frozen=True, slots=True)
class Modulation:
    """Shift, scale and gate of one place: equal parts of what one linear map makes of c.

    Attributes:
        at: Published name of the linear map.
        parts: Equal parts of its rows.
        first: Which part is the shift; the scale and the gate follow.
    """

    at: str
    parts: int
    first: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Every tensor that its values depend on."""
        return f"{self.at}.weight", f"{self.at}.bias", *EMBEDDER

    def shift(self, tensors: Tensors) -> Tensor:
        """What is added behind the norm, float64."""
        return self._part(tensors, 0)

    def factor(self, tensors: Tensors) -> Tensor:
        """1 + scale, float64."""
        return 1 + self._part(tensors, 1)

    def gate(self, tensors: Tensors) -> Tensor:
        """What multiplies the output before it is added to the residual stream, float64."""
        return self._part(tensors, 2)

    def _part(self, tensors: Tensors, offset: int) -> Tensor:
        weight, bias = (tensors[f"{self.at}.{leaf}"].double() for leaf in ("weight", "bias"))
        size = weight.shape[0] // self.parts
        rows = slice((self.first + offset) * size, (self.first + offset + 1) * size)
        return weight[rows] @ condition(tensors) + bias[rows]


def condition(tensors: Tensors) -> Tensor:
    """c = silu(W2 silu(W1 e + b1) + b2) [C] float64, with e the sinusoids of timestep 0.

    e is 1 where a cosine stands, in the first half, and 0 where a sine does.
    """
    w1, b1, w2, b2 = (tensors[name].double() for name in EMBEDDER)
    cosines = w1[:, : w1.shape[1] // 2].sum(1)
    return silu(w2 @ silu(cosines + b1) + b2)


def norm_weight(key: str, place: Modulation) -> Folded:
    """Weight of the norm: w (1 + scale)."""

    def make(tensors: Tensors) -> Tensor:
        return _rounded(key, tensors[key].double() * place.factor(tensors))

    return Folded((key, *place.keys), make)


def norm_bias(key: str | None, place: Modulation) -> Folded:
    """Bias of the norm: shift, and b (1 + scale) where the norm has a bias b of its own."""

    def make(tensors: Tensors) -> Tensor:
        shift = place.shift(tensors)
        if key is None:
            return _rounded(place.at, shift)
        return _rounded(key, tensors[key].double() * place.factor(tensors) + shift)

    return Folded((*([key] if key else ()), *place.keys), make)


def input_bias(weight: str, bias: str | None, place: Modulation) -> Folded:
    """Bias of the linear map W behind a norm that cannot hold the shift: W shift, and its own b."""

    def make(tensors: Tensors) -> Tensor:
        moved = tensors[weight].double() @ place.shift(tensors)
        return _rounded(weight, moved if bias is None else moved + tensors[bias].double())

    return Folded((weight, *([bias] if bias else ()), *place.keys), make)


def gated(key: str, place: Modulation) -> Folded:
    """Weight or bias of a linear map whose output is gated: each row times its gate."""

    def make(tensors: Tensors) -> Tensor:
        tensor = tensors[key].double()
        gate = place.gate(tensors).reshape(-1, *(1,) * (tensor.ndim - 1))
        return _rounded(key, tensor * gate)

    return Folded((key, *place.keys), make)


def zeros(rows: int) -> Folded:
    """A bias that the file has not: zeros."""
    return Folded((), lambda _: torch.zeros(rows))


def _rounded(key: str, tensor: Tensor) -> Tensor:
    out = tensor.float()
    if not bool(torch.isfinite(out).all()):
        raise CheckpointError(
            f"{key} with the constant conditioning folded in exceeds float32: the checkpoint is "
            "broken, use another one"
        )
    return out
