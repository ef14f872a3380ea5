"""From what was seen to one static scale per activation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fixedstate.calib.formats import Format, activation_scale
from fixedstate.calib.histogram import Histogram
from fixedstate.calib.table import Table
from fixedstate.errors import CalibrationError

RULES = ("mse", "max", "percentile")
"""How a range is chosen: the least squared error, the largest magnitude, or a share of all."""

LEAST_SHARE = 0.9999
"""Below it a percentile cuts off what a model cannot do without: 0.999 is several times worse."""

_TRIALS = 100


def limit_of(seen: Histogram, chosen: Format, rule: str = "mse", share: float = 0.99999) -> float:
    """The magnitude at which an activation is clipped.

    Args:
        seen: Its values.
        chosen: The format; one of floats is never clipped below the largest magnitude, since small
            values keep their digits there.
        rule: One of :data:`RULES`.
        share: Of magnitudes below the limit, for ``percentile``.

    Raises:
        CalibrationError: ``RULE`` for another rule, or a share below :data:`LEAST_SHARE`.
    """
    if rule not in RULES:
        raise CalibrationError("RULE", f"rule {rule!r} is unknown; use one of {', '.join(RULES)}")
    if rule == "percentile":
        if not LEAST_SHARE <= share <= 1.0:
            raise CalibrationError(
                "RULE", f"a percentile must be {LEAST_SHARE} to 1; got {share}: less clips too much"
            )
        return seen.percentile(share)
    if rule == "max" or not chosen.integer:
        return seen.amax
    return _least_squares(seen, chosen)


def _least_squares(seen: Histogram, chosen: Format) -> float:
    """The limit with the least squared error of what was seen, a bin's values taken at its middle.

    A tie goes to the larger one.
    """
    filled = np.flatnonzero(seen.counts)
    counts = seen.counts[filled].astype(np.float64)
    middles = (filled + 0.5) * seen.width
    best, least = seen.amax, np.inf
    for limit in seen.amax * np.linspace(1.0, 1.0 / _TRIALS, _TRIALS):
        step = limit / chosen.top
        # inside a bin values are spread evenly; where it is wider than a step, all of what
        # rounding can leave comes in it
        off = middles - np.rint(middles / step) * step
        rounding = off**2 + seen.width**2 / 12 if seen.width < step else step**2 / 12
        error = np.where(middles <= limit, rounding, (middles - limit) ** 2)
        total = float((counts * error).sum())
        if total < least:
            best, least = float(limit), total
    return best


def input_scales(
    table: Table, formats: Mapping[str, Format], rule: str = "mse", share: float = 0.99999
) -> dict[str, float]:
    """The static scale of every activation that is quantised.

    Args:
        table: What was seen.
        formats: By activation.
        rule: See :func:`limit_of`.
        share: Likewise.

    Raises:
        CalibrationError: ``UNVISITED`` for an activation that no pass had.
    """
    table.check_complete()
    if missing := [name for name in formats if name in table.unvisited()]:
        raise CalibrationError(
            "UNVISITED",
            f"{len(missing)} activations were never seen ({', '.join(missing[:3])}): collect with "
            "the passes that visit them, or leave their products as they are",
        )
    return {
        name: activation_scale(limit_of(table.inputs[name].histogram, chosen, rule, share), chosen)
        for name, chosen in formats.items()
    }
