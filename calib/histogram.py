"""Histograms of magnitudes whose content depends on nothing but the values that were seen.

The range is the smallest power of two above every magnitude, and grows by merging neighbouring
bins, so that any order, batch size, split or resumption of the same values ends in the same bytes.
A range taken from the first batch would not.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fixedstate.errors import CalibrationError, require_keys
from fixedstate.ports import Array

BINS = 2048
"""Bins of a histogram; a power of two."""

_LOWEST = -64  # exponent of the smallest range: anything smaller is in its first bin
_PIECE = 1 << 20  # values looked at in one go, which bounds what an addition takes in memory
_KEYS = ("exponent", "amax", "low", "high", "seen", "nonfinite", "counts")


class Histogram:
    """Counts of |x| in equal bins over [0, 2^exponent), with exact extremes.

    Args:
        bins: A power of two.

    Attributes:
        counts: (bins,) int64.
        exponent: Of the range; None before the first value that is not zero.
        amax: Largest magnitude.
        low: Smallest value.
        high: Largest value.
        seen: Finite values, zeros included.
        nonfinite: Values that were NaN or infinite; they are in no bin.
    """

    __slots__ = ("amax", "counts", "exponent", "high", "low", "nonfinite", "seen")

    def __init__(self, bins: int = BINS) -> None:
        if bins < 2 or bins & (bins - 1):
            raise ValueError(f"bins must be a power of two above 1; got {bins}")
        self.counts: Array = np.zeros(bins, np.int64)
        self.exponent: int | None = None
        self.amax = 0.0
        self.low = np.inf
        self.high = -np.inf
        self.seen = 0
        self.nonfinite = 0

    @property
    def bins(self) -> int:
        """How many there are."""
        return int(self.counts.size)

    @property
    def range(self) -> float:
        """Upper edge of the last bin; every magnitude is below it. 0 where all were zero."""
        return 0.0 if self.exponent is None else float(2.0**self.exponent)

    @property
    def width(self) -> float:
        """Of a bin."""
        return self.range / self.bins

    def add(self, values: Array) -> None:
        """Count the values of an array of any shape and float dtype."""
        flat = np.asarray(values).reshape(-1)
        for start in range(0, flat.size, _PIECE):
            self._add(flat[start : start + _PIECE].astype(np.float64))

    def _add(self, values: Array) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            self.nonfinite += int(values.size - np.count_nonzero(finite))
            values = values[finite]
        if not values.size:
            return
        self.seen += int(values.size)
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        magnitudes = np.abs(values)
        largest = float(magnitudes.max())
        self.amax = max(self.amax, largest)
        if largest > 0.0:
            self._grow(max(int(np.frexp(largest)[1]), _LOWEST))
        if self.exponent is None:
            self.counts[0] += values.size
            return
        # a product with a power of two is exact, so that a value is in the bin it would be in
        # had the range been this one from the beginning
        places = (magnitudes * (self.bins / self.range)).astype(np.int64)
        self.counts += np.bincount(places, minlength=self.bins)

    def _grow(self, exponent: int) -> None:
        """Widen the range to 2^exponent, merging neighbours."""
        if self.exponent is None or exponent <= self.exponent:
            self.exponent = exponent if self.exponent is None else self.exponent
            return
        doublings = min(exponent - self.exponent, self.bins.bit_length() - 1)
        merged = self.counts.reshape(-1, 1 << doublings).sum(1)
        self.counts = np.zeros(self.bins, np.int64)
        self.counts[: merged.size] = merged
        self.exponent = exponent

    def merge(self, other: Histogram) -> None:
        """Take in what another one counted; the same as adding its values.

        Raises:
            ValueError: for another number of bins.
        """
        if other.bins != self.bins:
            raise ValueError(f"histograms of {self.bins} and {other.bins} bins do not merge")
        theirs = other.copy()
        if theirs.exponent is not None:
            self._grow(theirs.exponent)
        if self.exponent is not None:
            theirs._grow(self.exponent)
        self.counts += theirs.counts
        self.amax = max(self.amax, theirs.amax)
        self.low, self.high = min(self.low, theirs.low), max(self.high, theirs.high)
        self.seen += theirs.seen
        self.nonfinite += theirs.nonfinite

    def copy(self) -> Histogram:
        """Another one with the same content."""
        made = Histogram(self.bins)
        made.counts = self.counts.copy()
        for name in ("exponent", "amax", "low", "high", "seen", "nonfinite"):
            setattr(made, name, getattr(self, name))
        return made

    def percentile(self, share: float) -> float:
        """Upper edge of the bin in which that share of all magnitudes is reached.

        Args:
            share: Above 0, at most 1; 1 gives the largest magnitude itself.
        """
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1; got {share}")
        if share == 1.0 or not self.seen:
            return self.amax
        reached = np.cumsum(self.counts)
        place = int(np.searchsorted(reached, share * self.seen))
        return min(float((place + 1) * self.width), self.amax)

    def clipped(self, limit: float) -> float:
        """Share of the magnitudes above a limit, by whole bins."""
        if not self.seen or limit >= self.amax:
            return 0.0
        first = int(np.ceil(limit / self.width))
        return float(self.counts[first:].sum() / self.seen)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        packed = zlib.compress(self.counts.astype("<i8").tobytes(), 9)
        return {
            "exponent": self.exponent,
            "amax": self.amax,
            "low": self.low if self.seen else None,
            "high": self.high if self.seen else None,
            "seen": self.seen,
            "nonfinite": self.nonfinite,
            "counts": base64.b64encode(packed).decode("ascii"),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """Read what :meth:`to_dict` wrote.

        Raises:
            CalibrationError: ``DAMAGED``, where counts, extremes and numbers contradict.
            SpecError: for unknown or missing keys.
        """
        require_keys(data, _KEYS, "Histogram")
        try:
            raw = zlib.decompress(base64.b64decode(data["counts"], validate=True))
            made = cls(len(raw) // 8)
            made.counts = np.frombuffer(raw, "<i8").astype(np.int64)
            made.exponent = None if data["exponent"] is None else int(data["exponent"])
            made.amax = float(data["amax"])
            made.seen, made.nonfinite = int(data["seen"]), int(data["nonfinite"])
            if made.seen:
                made.low, made.high = float(data["low"]), float(data["high"])
        except (ValueError, TypeError, zlib.error, binascii.Error) as err:
            raise CalibrationError("DAMAGED", f"a histogram cannot be read: {err}") from err
        fits = (
            made.counts.min() >= 0
            and int(made.counts.sum()) == made.seen
            and made.amax == (max(abs(made.low), abs(made.high)) if made.seen else 0.0)
            and (made.amax < made.range or made.amax == 0.0)
        )
        if not fits:
            raise CalibrationError(
                "DAMAGED", "a histogram contradicts itself: collect the ranges again"
            )
        return made
