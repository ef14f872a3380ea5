"""Which token stands in each open slot, and how sure the model is of it.

One rule for confidence, everywhere: the probability of the chosen token under the distribution it
was chosen from. With temperature 0 that is the plain softmax of the scores, with temperature T the
softmax of scores / T; in both, ids that must not be chosen are taken out first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fixedstate.ports import Array
from fixedstate.state import TOP_K

_CHUNK = 1 << 17  # elements scored at once: stays in the second-level cache
# 1 / temperature within these: 0 * scale stays finite in float32, and scale itself above 0.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 1e30


def uniforms(seed: int, past_length: int, step: int, length: int) -> tuple[Array, Array]:
    """The random numbers of one row and pass: u chooses tokens, v chooses positions.

    They come from Philox4x64-10 with the row's seed as key and the counter words
    (0, 0, past_length, step), so they depend on nothing but the row and where it stands.

    Args:
        seed: The row's seed, 0 to 2**64 - 1.
        past_length: Committed tokens of the row.
        step: The pass inside the block, from 0.
        length: Slots of a block.

    Returns:
        u and v, each (length,) float64 in (0, 1).

    Example:
        >>> u, v = uniforms(seed=0, past_length=0, step=0, length=2)
        >>> bool(((u > 0) & (u < 1)).all()), u.shape, v.shape
        (True, (2,), (2,))
    """
    counter = np.array([0, 0, past_length, step], np.uint64)
    key = np.array([seed, 0], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(2 * length)
    return unit_interval(raw[:length]), unit_interval(raw[length:])


def unit_interval(raw: Array) -> Array:
    """Floats in (0, 1) from the upper 53 bits of uint64; 0 is moved to 2**-54."""
    out: Array = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    out[out == 0] = 2.0**-54
    return out


def draw(weights: Array, u: float) -> tuple[int, float]:
    """One index by the inverse of the cumulative weights, and its probability.

    An index of weight 0 is never drawn, whatever u is.

    Args:
        weights: (V,) non-negative, not all zero.
        u: In (0, 1).
    """
    cdf = np.cumsum(weights, dtype=np.float64)
    total = cdf[-1]
    index = int(np.searchsorted(cdf, u * total, side="right"))
    if index >= len(cdf):  # u * total was rounded up to the total
        index = int(np.searchsorted(cdf, total, side="left"))
    index = min(index, len(cdf) - 1)
    return index, float(weights[index] / total)


@dataclass(frozen=True, slots=True)
class Scores:
    """What one pass says about every slot.

    Attributes:
        tokens: (k, L) int64, the token chosen for each open slot; 0 elsewhere.
        confidence: (k, L) float64, its probability; -1 where the slot is not open.
        finite: (k,) bool, False for a row with a NaN or infinite score in an open slot.
        entropy: (k, L) float64 in nats, of the distribution the token was chosen from; infinite
            where the slot is not open. None where no policy needs it.
        top_tokens: (k, L, K) int64, the most likely tokens, best first and the lowest id of
            equals first; 0 where the slot is not open. None where no policy needs them.
        top_confidence: (k, L, K) float64, their probabilities; -1 where the slot is not open.
    """

    tokens: Array
    confidence: Array
    finite: Array
    entropy: Array | None = None
    top_tokens: Array | None = None
    top_confidence: Array | None = None

    def of_rows(self, pick: Array | slice) -> Scores:
        """Those of some rows."""
        entropy, ids, shares = (
            None if values is None else values[pick]
            for values in (self.entropy, self.top_tokens, self.top_confidence)
        )
        own = (self.tokens[pick], self.confidence[pick], self.finite[pick])
        return Scores(*own, entropy, ids, shares)


def serves(head: str, needs: str) -> bool:
    """Whether a pass that gives ``head`` gives what a policy needs."""
    return head in ("logits", needs) or needs == "confidence"


class Scorer:
    """Chooses tokens from logits; owns the scratch memory it works in.

    Args:
        vocab_size: Ids at or above it are never chosen.
        vocab_rows: Columns of the logits.
        never: Further ids that are never chosen: the mask.
        top_k: Most likely tokens given of a slot, where they are needed.
    """

    def __init__(
        self, vocab_size: int, vocab_rows: int, never: Sequence[int], top_k: int = TOP_K
    ) -> None:
        self._vocab = vocab_size
        self._never = [token for token in never if token < vocab_size]
        self._rows = max(1, _CHUNK // vocab_rows)
        self._work = np.empty((self._rows, vocab_rows), np.float32)
        self._top_k = min(top_k, vocab_size - len(set(self._never)))

    def __call__(
        self,
        logits: Array,
        open_slots: Array,
        temperature: Array,
        u: Array | None = None,
        banned: Sequence[tuple[Array, tuple[int, ...]]] = (),
        needs: Collection[str] = (),
    ) -> Scores:
        """Score the open slots of some rows.

        Args:
            logits: (k, L, V) float32; not written.
            open_slots: (k, L) bool.
            temperature: (k,) float64; 0 takes the most likely token, lowest id first.
            u: (k, L) float64 in (0, 1); needed where a temperature is above 0.
            banned: For each row a (L,) bool mask of slots and the ids not allowed in them;
                empty where no row has any.
            needs: ``entropy`` and ``top_k`` where a policy needs them.
        """
        rows, length, width = logits.shape
        entropy = np.full(rows * length, np.inf) if "entropy" in needs else None
        count = self._top_k if "top_k" in needs else 0
        top = _no_top(rows * length, count) if count else None
        tokens = np.zeros(rows * length, np.int64)
        confidence = np.full(rows * length, -1.0)
        finite = np.ones(rows * length, np.bool_)
        flat = logits.reshape(rows * length, width)
        scale = _inverse(temperature)
        where = np.flatnonzero(open_slots)
        with np.errstate(all="ignore"):
            for start in range(0, len(where), self._rows):
                slots = where[start : start + self._rows]
                work = self._work[: len(slots)]
                np.take(flat, slots, axis=0, out=work, mode="clip")
                weights = work[:, : self._vocab]
                found = self._choose(weights, slots, length, scale, u, banned, count)
                tokens[slots], confidence[slots] = found.tokens, found.confidence
                finite[slots] = found.finite
                if entropy is not None:
                    entropy[slots] = _entropy(weights, found.total)
                if top is not None:
                    top[0][slots] = found.ids
                    shares = np.take_along_axis(weights, found.ids, axis=1)
                    top[1][slots] = shares / found.total[:, None]
        return Scores(
            tokens.reshape(rows, length),
            confidence.reshape(rows, length),
            np.asarray(finite.reshape(rows, length).all(axis=1)),
            None if entropy is None else entropy.reshape(rows, length),
            None if top is None else top[0].reshape(rows, length, -1),
            None if top is None else top[1].reshape(rows, length, -1),
        )

    def _choose(
        self,
        work: Array,
        slots: Array,
        length: int,
        scale: Array,
        u: Array | None,
        banned: Sequence[tuple[Array, tuple[int, ...]]],
        count: int,
    ) -> _Chosen:
        """Choose for some slots.

        `work` is overwritten by weights that stand in the ratio of the probabilities, the best
        token's being 1.
        """
        for token in self._never:
            work[:, token] = 0.0  # what stands there does not count, not even a NaN
        lowest = work.min(axis=1)
        self._suppress(work, slots, length, banned)
        every = np.arange(len(slots))
        tokens = work.argmax(axis=1)
        top = work[every, tokens]
        ids = _best(work, count)
        finite = np.isfinite(top) & (lowest > -np.inf)
        work -= top[:, None]
        hot = scale[slots // length]
        if u is not None and hot.any():
            work *= np.where(hot > 0, hot, 1.0).astype(np.float32)[:, None]
        np.exp(work, out=work)
        # one is added at the end: beside it the shares of a sure token's rivals would be rounded
        # away, and as a reduced head does it
        work[every, tokens] = 0.0
        total = np.float32(1.0) + work.sum(axis=1)
        work[every, tokens] = 1.0
        confidence = (np.float32(1.0) / total).astype(np.float64)
        if u is not None:
            for i in np.flatnonzero((hot > 0) & finite):
                tokens[i], confidence[i] = draw(work[i], float(u.flat[slots[i]]))
        return _Chosen(tokens, confidence, finite, total.astype(np.float64), ids)

    def _suppress(
        self,
        work: Array,
        slots: Array,
        length: int,
        banned: Sequence[tuple[Array, tuple[int, ...]]],
    ) -> None:
        """Take out what must not be chosen, before the choice and before the confidence."""
        for token in self._never:
            work[:, token] = -np.inf
        if not banned:
            return
        for i, slot in enumerate(slots):
            mask, ids = banned[slot // length]
            if mask[slot % length]:
                work[i, list(ids)] = -np.inf


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What was chosen for some slots; `total` is the sum of the weights that choosing left."""

    tokens: Array
    confidence: Array
    finite: Array
    total: Array
    ids: Array


def _best(scores: Array, count: int) -> Array:
    """(n, count) ids of the highest scores, the lowest id of equals first; `scores` stay."""
    every = np.arange(len(scores))
    ids = np.zeros((len(scores), count), np.int64)
    kept = np.zeros((len(scores), count), scores.dtype)
    for place in range(count):
        ids[:, place] = scores.argmax(axis=1)
        kept[:, place] = scores[every, ids[:, place]]
        scores[every, ids[:, place]] = -np.inf
    for place in reversed(range(count)):
        scores[every, ids[:, place]] = kept[:, place]
    return ids


def _entropy(weights: Array, total: Array) -> Array:
    """(n,) float64 in nats, of weights (n, V) and their sums."""
    below = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    below *= weights
    return np.asarray(np.log(total) - below.sum(axis=1).astype(np.float64) / total)


def _no_top(slots: int, count: int) -> tuple[Array, Array]:
    """What stands in the place of the most likely tokens where a slot is not open."""
    return np.zeros((slots, count), np.int64), np.full((slots, count), -1.0)


def places_of(open_slots: Array, multiple: int) -> Array:
    """Which slots a reduced head is asked for: (k, R) int64, each row's open ones in order.

    R is the largest number of them in a row, rounded up to a multiple so that few shapes occur,
    and at most L; a row with fewer repeats its last one, a row with none slot 0.

    Args:
        open_slots: (k, L) bool.
        multiple: Of which R is one.

    Example:
        >>> places_of(np.array([[True, False, True, True], [False, True, False, False]]), 2)
        array([[0, 2, 3, 3],
               [1, 1, 1, 1]])
    """
    length = open_slots.shape[1]
    counts = open_slots.sum(axis=1)
    width = min(max(-(-int(counts.max()) // multiple), 1) * multiple, length)
    order = np.argsort(~open_slots, axis=1, kind="stable")
    order[counts == 0] = 0
    column = np.minimum(np.arange(width), np.maximum(counts, 1)[:, None] - 1)
    return np.take_along_axis(order, column, axis=1)


def scores_from_head(given: Mapping[str, Array], slots: Array, open_slots: Array) -> Scores:
    """The scores of some rows out of what a reduced head gave.

    Args:
        given: ``tokens`` and ``confidence`` (k, R), and what else the head gives, by port name.
        slots: (k, R) int64, the slots that was given of, every open one among them.
        open_slots: (k, L) bool.
    """

    def spread(name: str, otherwise: float, dtype: Any) -> Array:
        values = given[name]
        deep = (1,) * (values.ndim - 2)
        out = np.full((*open_slots.shape, *values.shape[2:]), otherwise, dtype)
        np.put_along_axis(out, slots.reshape(*slots.shape, *deep), values, axis=1)
        out[~open_slots] = otherwise
        return out

    confidence = spread("confidence", -1.0, np.float64)
    top = "top_tokens" in given
    return Scores(
        tokens=spread("tokens", 0, np.int64),
        confidence=confidence,
        finite=np.asarray(np.isfinite(confidence).all(axis=1)),
        entropy=spread("entropy", np.inf, np.float64) if "entropy" in given else None,
        top_tokens=spread("top_tokens", 0, np.int64) if top else None,
        top_confidence=spread("top_confidence", -1.0, np.float64) if top else None,
    )


def with_first_slot(scores: Scores, first: Scores) -> Scores:
    """Scores (k, L) whose slot 0 is that of others (k, 1): with a logit shift it has its own."""

    def put(into: Array | None, column: Array | None) -> Array | None:
        if into is None or column is None:
            return None
        return np.concatenate([column, into[:, 1:]], axis=1)

    return Scores(
        tokens=np.concatenate([first.tokens, scores.tokens[:, 1:]], axis=1),
        confidence=np.concatenate([first.confidence, scores.confidence[:, 1:]], axis=1),
        finite=scores.finite & first.finite,
        entropy=put(scores.entropy, first.entropy),
        top_tokens=put(scores.top_tokens, first.top_tokens),
        top_confidence=put(scores.top_confidence, first.top_confidence),
    )


def _inverse(temperature: Array) -> Array:
    """1 / temperature, bounded; 0 stays 0 and means the most likely token."""
    scale = np.zeros(len(temperature))
    hot = temperature > 0
    with np.errstate(over="ignore", divide="ignore"):
        scale[hot] = np.clip(1.0 / temperature[hot], _SMALLEST_SCALE, _LARGEST_SCALE)
    return scale
