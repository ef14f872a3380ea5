"""What is to be quantised and how: a value that says all of it, tied to what it was made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fixedstate.bundle import Bundle, write_atomic
from fixedstate.calib.formats import FLOAT, Format, check_targets, format_named
from fixedstate.calib.scales import input_scales
from fixedstate.calib.score import Sensitivity
from fixedstate.calib.search import Choice, Option, choose
from fixedstate.calib.sites import Site
from fixedstate.calib.table import Table, digest
from fixedstate.errors import CalibrationError, FixedStateError, SpecError, require_keys
from fixedstate.state import Precision, StateSpec

FORMAT = 1
"""Number of the format, under ``quantization_plan`` in the file."""

TIGHTENINGS = 5
"""How often the bound of the search is lowered where the whole is further away than its parts."""

_KEYS = (
    "quantization_plan",
    "weights",
    "table",
    "targets",
    "formats",
    "scales",
    "rule",
    "search",
    "expected_kl",
    "state",
    "kv",
    "sha256",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Formats and scales of a bundle's products.

    Attributes:
        weights: sha256 of the weights that it is for.
        table: sha256 of the table of ranges.
        targets: What it has to run on.
        formats: By weight; those without one stay as they are.
        scales: By activation, of those that are quantised.
        rule: How activations are clipped.
        search: Whether weights are clipped to the least squared error.
        expected_kl: Sum of what each format alone changed; None where nothing was scored.
        state: What scan states are kept in between blocks, as
            :class:`fixedstate.state.Precision` spells it.
        kv: What keys and values are kept in, likewise.
    """

    weights: str
    table: str
    targets: tuple[str, ...]
    formats: dict[str, str]
    scales: dict[str, float]
    rule: str = "mse"
    search: bool = False
    expected_kl: float | None = None
    state: str = "float32"
    kv: str = "float32"

    def check(self, bundle: Bundle) -> None:
        """Refuse a plan for other weights, or for something that the model does not carry.

        Raises:
            CalibrationError: ``STALE``, or ``STATE_FORMAT``.
        """
        kinds = {port.kind for port in bundle.state.committed}
        for option, name, kind, what in (
            ("--state", self.state, "ssm", "scan states"),
            ("--kv", self.kv, "key", "keys and values"),
        ):
            if name != "float32" and kind not in kinds:
                raise CalibrationError(
                    "STATE_FORMAT",
                    f"{option} {name}: {bundle.path} carries no {what}; leave the option out",
                )
        try:
            StateSpec.of(bundle.spec, Precision(state=self.state, kv=self.kv))
        except SpecError as err:
            raise CalibrationError("STATE_FORMAT", f"{bundle.path}: {err}") from err
        if self.weights != bundle.weights:
            raise CalibrationError(
                "STALE",
                f"the plan is for weights {self.weights[:16]}..., {bundle.path} has "
                f"{bundle.weights[:16]}...: plan again",
            )

    def chosen(self) -> dict[str, Format]:
        """The formats themselves, by weight."""
        return {name: format_named(one) for name, one in self.formats.items()}

    def nbytes(self, sites: Mapping[str, Site]) -> dict[str, int]:
        """Stored bytes of all products by format."""
        found: dict[str, int] = {}
        for name, site in sites.items():
            one = self.formats.get(name, FLOAT)
            size = (
                4 * site.rows * site.columns
                if one == FLOAT
                else format_named(one).nbytes(site.rows, site.columns)
            )
            found[one] = found.get(one, 0) + size
        return found

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        data = {
            "quantization_plan": FORMAT,
            **asdict(self),
            "targets": list(self.targets),
            "formats": dict(sorted(self.formats.items())),
            "scales": dict(sorted(self.scales.items())),
        }
        return {**data, "sha256": digest(data)}

    @property
    def sha256(self) -> str:
        """Of its content."""
        return str(self.to_dict()["sha256"])

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write it; the file appears whole or not at all."""
        write_atomic(Path(file), (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_dict` wrote.

        Raises:
            CalibrationError: ``DAMAGED`` where it was changed or is none.
        """
        try:
            require_keys(data, _KEYS, "a plan")
            rest = {key: value for key, value in data.items() if key != "sha256"}
            if data["sha256"] != digest(rest):
                raise CalibrationError("DAMAGED", "the plan was changed after it was made")
            del rest["quantization_plan"]
            return cls(**{**rest, "targets": tuple(data["targets"])})
        except CalibrationError:
            raise
        except (FixedStateError, KeyError, TypeError) as err:
            raise CalibrationError("DAMAGED", f"this is no plan: {err}") from err

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Plan:
        """Read a plan's file.

        Raises:
            CalibrationError: ``DAMAGED``.
        """
        try:
            return cls.from_dict(json.loads(Path(file).read_bytes()))
        except (OSError, ValueError) as err:
            raise CalibrationError("DAMAGED", f"{file} is no plan: {err}") from err


def pinned(sites: Mapping[str, Site], pins: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The formats that patterns of names ask for, whatever else is chosen.

    Args:
        sites: By weight.
        pins: Pattern, as of a shell, and format; of two that match one weight the later counts.

    Returns:
        Format by weight; :data:`fixedstate.calib.formats.FLOAT` where it is to stay as it is.

    Raises:
        CalibrationError: ``FORMAT`` for an unknown one, ``GLOB_MATCHED_NONE`` for a pattern that
            no weight has, ``GLOB_MATCHED_ALL`` for one that leaves nothing to be quantised,
            ``BLOCK_INDIVISIBLE`` where a weight cannot have the format.
    """
    found: dict[str, str] = {}
    for pattern, name in pins:
        matched = [site for site in sites.values() if fnmatchcase(site.name, pattern)]
        if not matched:
            raise CalibrationError(
                "GLOB_MATCHED_NONE",
                f"no weight of a product has a name like {pattern!r}; there are {len(sites)}, such "
                f"as {', '.join(list(sites)[:3])}: correct the pattern",
            )
        if name == FLOAT and len(matched) == len(sites):
            raise CalibrationError(
                "GLOB_MATCHED_ALL",
                f"{pattern!r} is all {len(sites)} weights, and {FLOAT} leaves them as they are: "
                "nothing would be quantised; use a narrower pattern",
            )
        for site in matched:
            reason = "" if name == FLOAT else format_named(name).refusal(site.rows, site.columns)
            if reason:
                raise CalibrationError(
                    "BLOCK_INDIVISIBLE",
                    f"{site.name} ({pattern!r}) cannot be {name}: {reason}: choose another",
                )
            found[site.name] = name
    return found


def uniform(
    bundle: Bundle,
    table: Table,
    sites: Mapping[str, Site],
    formats: Mapping[str, str],
    targets: tuple[str, ...],
    *,
    rule: str = "mse",
    search: bool = False,
    expected_kl: float | None = None,
) -> Plan:
    """A plan of given formats, its scales taken from the table.

    Args:
        bundle: The fp32 bundle.
        table: Its ranges.
        sites: Its sites by weight.
        formats: By weight; :data:`fixedstate.calib.formats.FLOAT` leaves it as it is.
        targets: Where it has to run.
        rule: How activations are clipped.
        search: Whether weights are clipped to the least squared error.
        expected_kl: What the formats are expected to change.

    Raises:
        CalibrationError: where a target lacks a format, or a range is missing.
    """
    table.check(bundle)
    kept = {name: one for name, one in formats.items() if one != FLOAT}
    check_targets(tuple(dict.fromkeys(kept.values())), targets)
    rounded: dict[str, Format] = {}
    for name, chosen in kept.items():
        one = format_named(chosen)
        if one.activations:
            other = rounded.setdefault(sites[name].input, one)
            if other is not one:
                raise CalibrationError(
                    "TWO_FORMATS",
                    f"{name} wants its activation in {one.name}, another weight that shares it in "
                    f"{other.name}: give both one format",
                )
    scales = input_scales(table, rounded, rule)
    return Plan(bundle.weights, table.sha256, targets, kept, scales, rule, search, expected_kl)


def search_plan(
    bundle: Bundle,
    table: Table,
    sites: Mapping[str, Site],
    sensitivity: Sensitivity,
    targets: tuple[str, ...],
    verify: Callable[[Plan], float],
    *,
    max_kl: float | None = None,
    max_bytes: int | None = None,
    rule: str = "mse",
    search: bool = False,
    pins: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of the fewest bytes whose divergence, measured as a whole, stays within a bound.

    Divergences of single weights add up nearly, not exactly: where the whole is further away, the
    bound of the search is lowered by as much and the search made again.

    Args:
        bundle: The fp32 bundle.
        table: Its ranges.
        sites: Its sites by weight.
        sensitivity: What each format alone changes.
        targets: Where it has to run.
        verify: Measures the divergence of a plan on sequences that nothing was chosen with.
        max_kl: Bound of the divergence.
        max_bytes: Bound of the bytes instead; the divergence is then as small as it gets.
        rule: How activations are clipped.
        search: Whether weights are clipped to the least squared error.
        pins: Formats that are not searched; see :func:`pinned`.

    Raises:
        CalibrationError: ``INFEASIBLE`` with the best that was found, ``UNSCORED`` for a pinned
            format that was not scored, or as :func:`uniform`.
    """
    offered = {name for one in sensitivity.kl.values() for name in one}
    check_targets(tuple(sorted(offered)), targets)
    options = _pinned_options(sensitivity.options(sites), pins or {})

    def made(choice: Choice) -> Plan:
        return uniform(
            bundle,
            table,
            sites,
            choice.formats,
            targets,
            rule=rule,
            search=search,
            expected_kl=choice.kl,
        )

    if max_kl is None:
        return made(choose(options, max_bytes=max_bytes))
    bound, tried = max_kl, []
    for _ in range(1 + TIGHTENINGS):
        choice = choose(options, max_kl=bound)
        plan = made(choice)
        measured = verify(plan)
        tried.append((measured, choice.nbytes))
        if measured <= max_kl:
            return plan
        bound *= max_kl / measured
    best, nbytes = min(tried)
    raise CalibrationError(
        "INFEASIBLE",
        f"no choice stays within {max_kl:g} nats as a whole; the nearest of {len(tried)} has "
        f"{best:.3g} at {nbytes:,} bytes: allow more, or offer other formats",
    )


def _pinned_options(
    options: dict[str, dict[str, Option]], pins: Mapping[str, str]
) -> dict[str, dict[str, Option]]:
    """What is left to choose from where some formats are given."""
    for name, chosen in pins.items():
        if chosen in options.get(name, {}):
            options[name] = {chosen: options[name][chosen]}
        elif chosen != FLOAT:
            raise CalibrationError(
                "UNSCORED",
                f"{name} is to be {chosen}, which was not scored: score it (--formats, --kinds), "
                "or pin another",
            )
    return options
