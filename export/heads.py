"""Reduced heads: what a policy needs of a slot, computed in the graph from all its scores.

The rule is that of :mod:`fixedstate.runtime.sampling` at temperature 0: ids that must not be
chosen are taken out first, then the most likely token is taken, the lowest id of equals, and its
confidence is its probability. A slot with a score that is not finite has NaN in its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fixedstate.export.layers import LANES
from fixedstate.spec import ModelSpec
from fixedstate.state import top_count

_LOWEST = -3.4028234663852886e38
"""Score of an id that must not be chosen: the lowest number of float32."""

_NOTHING = -200.0
"""Differences of scores below it have no share: exp gives 0, and 0 times it is 0."""


def head_values(head: str, logits: Tensor, spec: ModelSpec, top_k: int) -> dict[str, Tensor]:
    """What a head gives of some slots, by port name.

    Args:
        head: ``confidence``, ``entropy`` or ``top_k``.
        logits: [B, R, vocab_rows] float32.
        spec: The model.
        top_k: k of the head ``top_k``; see :func:`fixedstate.state.top_count`.

    Returns:
        ``tokens`` [B, R] int64 and ``confidence`` [B, R]; ``entropy`` [B, R] in nats of the same
        distribution; ``top_tokens`` and ``top_confidence`` [B, R, k], the most likely first.
    """
    scores = _choosable(logits, spec)
    top, ids = scores.topk(top_count(spec, top_k) if head == "top_k" else 1, -1)
    # the best score is the one at the token: where a NaN hides from the choice, it shows in a sum
    best, chosen = top[..., :1], ids[..., :1]
    below = scores - best
    # one is added at the end: beside it the shares of a sure token's rivals would be rounded away
    others = below.exp().scatter(-1, chosen, 0.0)
    rest = _sum(others) + 0.0 * best + 0.0 * scores.amin(-1, keepdim=True)
    total = 1.0 + rest
    one = total.new_ones(1)  # a quotient is rounded alike everywhere, a reciprocal is not
    out = {"tokens": chosen[..., 0], "confidence": (one / total)[..., 0]}
    if head == "entropy":
        spread = _sum(others * below.clamp(min=_NOTHING))
        out["entropy"] = (_log(total) - spread / total)[..., 0]
    if head == "top_k":
        out["top_tokens"] = ids
        out["top_confidence"] = (top - best).exp() / total
    return out


def _choosable(logits: Tensor, spec: ModelSpec) -> Tensor:
    """Scores [B, R, V] of the ids below V, the mask's out of the way.

    Ids are cut off or written over: to select them takes longer than everything else here.
    """
    count, mask = spec.vocab_size, spec.mask_id
    if mask == count - 1:
        count, mask = mask, None
    scores = logits[..., :count] if count < spec.vocab_rows else logits
    if mask is None or mask >= count:
        return scores
    place = torch.full((*scores.shape[:-1], 1), mask)
    return scores.scatter(-1, place, _LOWEST)


def _log(x: Tensor) -> Tensor:
    """Logarithm of [B, R, 1], the same bytes for a row alone: whole vectors have one form of it."""
    return x.expand(*x.shape[:-1], LANES).log()[..., :1]


def _sum(x: Tensor) -> Tensor:
    """Sum over the vocabulary [B, R, 1], as a product: the same bytes for a row alone."""
    return x @ x.new_ones(x.shape[-1], 1)
