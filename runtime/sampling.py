"""Which token stands in each open slot, and how sure the model is of it.

One rule for confidence, everywhere: the probability of the chosen token under the distribution it
was chosen from. With temperature 0 that is the plain softmax of the scores, with temperature T the
softmax of scores / T; in both, ids that must not be chosen are taken out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fixedstate.ports import Array

_CHUNK = 1 << 17  # elements scored at once: stays in the second-level cache
_LARGEST_SCALE = 1e30  # 1 / temperature at most: keeps 0 * scale finite in float32


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
    """

    tokens: Array
    confidence: Array
    finite: Array


class Scorer:
    """Chooses tokens from logits; owns the scratch memory it works in.

    Args:
        vocab_size: Ids at or above it are never chosen.
        vocab_rows: Columns of the logits.
        never: Further ids that are never chosen: the mask.
    """

    def __init__(self, vocab_size: int, vocab_rows: int, never: Sequence[int]) -> None:
        self._vocab = vocab_size
        self._never = [token for token in never if token < vocab_size]
        self._rows = max(1, _CHUNK // vocab_rows)
        self._work = np.empty((self._rows, vocab_rows), np.float32)

    def __call__(
        self,
        logits: Array,
        open_slots: Array,
        temperature: Array,
        u: Array | None = None,
        banned: Sequence[tuple[Array, tuple[int, ...]]] = (),
    ) -> Scores:
        """Score the open slots of some rows.

        Args:
            logits: (k, L, V) float32; not written.
            open_slots: (k, L) bool.
            temperature: (k,) float64; 0 takes the most likely token, lowest id first.
            u: (k, L) float64 in (0, 1); needed where a temperature is above 0.
            banned: For each row a (L,) bool mask of slots and the ids not allowed in them;
                empty where no row has any.
        """
        rows, length, width = logits.shape
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
                best, share, good = self._choose(
                    work[:, : self._vocab], slots, length, scale, u, banned
                )
                tokens[slots], confidence[slots], finite[slots] = best, share, good
        return Scores(
            tokens.reshape(rows, length),
            confidence.reshape(rows, length),
            np.asarray(finite.reshape(rows, length).all(axis=1)),
        )

    def _choose(
        self,
        work: Array,
        slots: Array,
        length: int,
        scale: Array,
        u: Array | None,
        banned: Sequence[tuple[Array, tuple[int, ...]]],
    ) -> tuple[Array, Array, Array]:
        """Tokens, confidences and finiteness of some slots; `work` is overwritten."""
        for token in self._never:
            work[:, token] = 0.0  # what stands there does not count, not even a NaN
        lowest = work.min(axis=1)
        self._suppress(work, slots, length, banned)
        tokens = work.argmax(axis=1)
        top = work[np.arange(len(slots)), tokens]
        finite = np.isfinite(top) & (lowest > -np.inf)
        work -= top[:, None]
        hot = scale[slots // length]
        if u is not None and hot.any():
            work *= np.where(hot > 0, hot, 1.0).astype(np.float32)[:, None]
        np.exp(work, out=work)
        confidence = 1.0 / work.sum(axis=1).astype(np.float64)
        if u is not None:
            for i in np.flatnonzero((hot > 0) & finite):
                tokens[i], confidence[i] = draw(work[i], float(u.flat[slots[i]]))
        return tokens, confidence, finite

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


def _inverse(temperature: Array) -> Array:
    """1 / temperature, bounded; 0 stays 0 and means the most likely token."""
    scale = np.zeros(len(temperature))
    hot = temperature > 0
    with np.errstate(over="ignore", divide="ignore"):
        scale[hot] = np.minimum(1.0 / temperature[hot], _LARGEST_SCALE)
    return scale
