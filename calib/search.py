"""Which format each weight gets: the least bytes within a divergence, or the reverse.

Divergences of weights measured one at a time add up, so that this is a knapsack, solved exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fixedstate.calib.formats import FLOAT
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array


@dataclass(frozen=True, slots=True)
class Option:
    """One format of a weight.

    Attributes:
        nbytes: What the weight then takes.
        kl: Mean divergence that it alone causes; below 0 counts as 0.
    """

    nbytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A format for every weight.

    Attributes:
        formats: By weight; :data:`fixedstate.calib.formats.FLOAT` where it stays as it is.
        nbytes: Of all of them.
        kl: Sum of what each alone causes: what is expected.
    """

    formats: dict[str, str]
    nbytes: int
    kl: float


def choose(
    options: Mapping[str, Mapping[str, Option]],
    *,
    max_kl: float | None = None,
    max_bytes: int | None = None,
) -> Choice:
    """Pick one option of every weight.

    Args:
        options: By weight and format; each weight can stay as it is.
        max_kl: Bound of the divergence, under which bytes are least.
        max_bytes: Bound of the bytes, under which the divergence is least.

    Raises:
        CalibrationError: ``INFEASIBLE``, with the best there is.
        ValueError: for both bounds or none.
    """
    if (max_kl is None) == (max_bytes is None):
        raise ValueError("give max_kl or max_bytes: one of them")
    names = [(site, name) for site, one in options.items() for name in one]
    nbytes = np.array([options[site][name].nbytes for site, name in names], np.float64)
    kl = np.array([max(0.0, options[site][name].kl) for site, name in names])
    cost, load, bound = (
        (nbytes, kl, max_kl) if max_bytes is None else (kl, nbytes, float(max_bytes))
    )
    assert bound is not None
    least = sum(
        min(_load(one, max_bytes is None) for one in of_site.values())
        for of_site in options.values()
    )
    if least > bound:
        what = f"{least:.3g} nats" if max_bytes is None else f"{least:,.0f} bytes"
        raise CalibrationError(
            "INFEASIBLE",
            f"no choice stays within {bound:g}: the least there is takes {what}; allow more, or "
            "offer other formats",
        )
    picked = _solve(names, list(options), cost, load, bound)
    formats = {site: name for (site, name), is_in in zip(names, picked, strict=True) if is_in}
    return Choice(
        formats,
        int(nbytes[picked].sum()),
        float(kl[picked].sum()),
    )


def _load(option: Option, is_kl: bool) -> float:
    return max(0.0, option.kl) if is_kl else float(option.nbytes)


def _solve(
    names: list[tuple[str, str]],
    sites: list[str],
    cost: Array,
    load: Array,
    bound: float,
) -> Array:
    """Whether each option is picked; one of each site.

    Costs and loads are scaled to numbers near 1, which the solver's tolerances are made for.
    """
    from scipy import optimize, sparse

    places = {site: place for place, site in enumerate(sites)}
    rows = [places[site] for site, _ in names]
    one_each = sparse.csr_array(
        (np.ones(len(names)), (rows, range(len(names)))), shape=(len(sites), len(names))
    )
    scale = bound if bound > 0 else 1.0
    within = optimize.LinearConstraint(load[None] / scale, -np.inf, bound / scale)
    found = optimize.milp(
        cost / max(float(cost.max()), 1e-300),
        integrality=np.ones(len(names)),
        bounds=optimize.Bounds(0, 1),
        constraints=[optimize.LinearConstraint(one_each, 1, 1), within],
    )
    if found.x is None:
        raise CalibrationError("INFEASIBLE", f"the solver found no choice: {found.message}")
    picked = found.x > 0.5
    return np.asarray(picked)


def expected(options: Mapping[str, Mapping[str, Option]], formats: Mapping[str, str]) -> Choice:
    """Bytes and divergence of a given choice; a weight without a format stays as it is."""
    whole = {site: formats.get(site, FLOAT) for site in options}
    picked = [options[site][name] for site, name in whole.items()]
    return Choice(whole, sum(one.nbytes for one in picked), sum(max(0.0, one.kl) for one in picked))
