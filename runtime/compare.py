"""Whether two sets of named arrays agree, by how much they do not, and where it is worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fixedstate.errors import ParityError
from fixedstate.ports import Array, Port, numpy_dtype

NOT_FINITE = "the candidate holds NaN or infinity"
"""Problem of a port whose compared values are not numbers."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What two back ends may differ by at one precision.

    A port passes if its largest difference is at most `absolute` (times the port's standard
    deviation, where that is above 1: a scan state of some hundreds has no digits for less), and at
    most `relative` of the port's standard deviation or within the `floor` below which a difference
    is rounding noise.

    Attributes:
        precision: ``fp32``, ``fp16`` or ``bf16``.
        absolute: Largest difference of a port of deviation up to 1; None where only the relative
            one counts.
        relative: Largest difference as a share of the reference port's standard deviation.
        floor: Differences up to this pass whatever the deviation: zero ports have none.
        reason: Where the numbers come from.
        overridden: Whether somebody chose other numbers than the table's.
    """

    precision: str
    absolute: float | None
    relative: float
    floor: float
    reason: str
    overridden: bool = False

    @classmethod
    def of(
        cls, precision: str, *, absolute: float | None = None, relative: float | None = None
    ) -> Tolerance:
        """The table's tolerance of a precision, with other numbers recorded as such.

        Raises:
            ParityError: for a precision the table does not have.
        """
        if precision not in TOLERANCES:
            raise ParityError(
                f"no tolerance for precision {precision!r}; use one of {', '.join(TOLERANCES)}"
            )
        base = TOLERANCES[precision]
        if absolute is None and relative is None:
            return base
        return cls(
            precision,
            base.absolute if absolute is None else absolute,
            base.relative if relative is None else relative,
            base.floor,
            f"chosen by the caller; the default: {base.reason}",
            overridden=True,
        )

    def allows(self, max_abs: float, max_rel: float, deviation: float = 1.0) -> bool:
        """Whether differences of this size pass; NaN never does."""
        if self.absolute is not None and not max_abs <= self.absolute * max(1.0, deviation):
            return False
        return max_rel <= self.relative or max_abs <= self.floor

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {name: getattr(self, name) for name in self.__slots__}


TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(
        "fp32",
        absolute=1e-4,
        relative=1e-2,
        floor=1e-6,
        reason="two orders of summation in float32 differ by about 1e-6 after a few layers and "
        "4e-5 after 24; a wrong formula by far more than 1e-4 or a hundredth of a small port",
    ),
    "fp16": Tolerance(
        "fp16",
        absolute=None,
        relative=2e-2,
        floor=1e-4,
        reason="activations keep 11 bits (5e-4 each); errors of some tens of roundings add up",
    ),
    "bf16": Tolerance(
        "bf16",
        absolute=None,
        relative=8e-2,
        floor=1e-3,
        reason="activations keep 8 bits (4e-3 each); errors of some tens of roundings add up",
    ),
}
"""Default tolerance by precision; shown in every report."""


@dataclass(frozen=True, slots=True)
class PortDifference:
    """How one port differs.

    Attributes:
        name: The port.
        max_abs: Largest absolute difference; NaN where it has no meaning.
        max_rel: The same as a share of the reference's standard deviation (of its root mean
            square, where that is zero; infinity where the reference is all zero and the other side
            is not).
        deviation: Standard deviation of the reference.
        passed: Whether it is within the tolerance.
        problem: What is wrong beside the size of the difference: shape, NaN, a missing port.
    """

    name: str
    max_abs: float
    max_rel: float
    deviation: float
    passed: bool
    problem: str = ""

    def __str__(self) -> str:
        """One line for a report."""
        text = f"{self.name}: {self.problem or 'differs'}"
        if self.problem:
            return text
        return f"{text} by {self.max_abs:.3g} ({self.max_rel:.3g} of its deviation)"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; numbers that have no meaning are None."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return {
            k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in out.items()
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict over all ports.

    Attributes:
        reference: What was compared against, with its provider.
        candidate: What was compared, with its provider.
        tolerance: What was allowed.
        ports: One entry per port of either side.
    """

    reference: str
    candidate: str
    tolerance: Tolerance
    ports: tuple[PortDifference, ...]

    @property
    def passed(self) -> bool:
        """Whether there is a port at all and every one is within the tolerance."""
        return bool(self.ports) and all(port.passed for port in self.ports)

    @property
    def worst(self) -> PortDifference | None:
        """The failing port if any, else the one that differs most; None without ports."""
        if not self.ports:
            return None
        return max(self.ports, key=lambda port: (not port.passed, bool(port.problem), port.max_abs))

    def require(self) -> Comparison:
        """Itself.

        Raises:
            ParityError: if it did not pass, naming both sides, the worst port and the tolerance.
        """
        if self.passed:
            return self
        worst = self.worst or "no ports were compared"
        limit = self.tolerance
        raise ParityError(
            f"{self.candidate} differs from {self.reference}: {worst}; allowed at "
            f"{limit.precision}: absolute {limit.absolute}, relative {limit.relative}"
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping: what was compared, how well, and what was allowed."""
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "passed": self.passed,
            "worst": None if self.worst is None else self.worst.name,
            "tolerance": self.tolerance.to_dict(),
            "ports": [port.to_dict() for port in self.ports],
        }


def compare(
    reference: Mapping[str, Array],
    candidate: Mapping[str, Array],
    tolerance: Tolerance,
    *,
    labels: tuple[str, str] = ("reference", "candidate"),
) -> Comparison:
    """Compare two sets of arrays port by port.

    Every port must be on both sides with one shape and finite everywhere; the size of the largest
    difference is judged absolutely and against the port's own spread, so an output that is only
    scaled does not pass. Whole numbers have to be equal.

    Args:
        reference: What is right, by port name.
        candidate: What is judged, by port name.
        tolerance: What is allowed.
        labels: Names of both sides with their providers, for the report.
    """
    names = [*reference, *(name for name in candidate if name not in reference)]
    ports = tuple(
        difference(name, reference.get(name), candidate.get(name), tolerance) for name in names
    )
    return Comparison(labels[0], labels[1], tolerance, ports)


def difference(
    name: str, reference: Array | None, candidate: Array | None, tolerance: Tolerance
) -> PortDifference:
    """How one port differs; a missing array, another shape, NaN and infinity are failures."""
    nan = float("nan")
    problem = _problem(reference, candidate)
    if problem or reference is None or candidate is None:
        return PortDifference(name, nan, nan, nan, False, problem)
    if reference.size == 0:
        return PortDifference(name, 0.0, 0.0, 0.0, True)
    right = reference.astype(np.float64)
    max_abs = float(np.abs(candidate.astype(np.float64) - right).max())
    deviation = float(right.std())
    scale = deviation or float(np.sqrt(np.mean(right * right)))
    max_rel = max_abs / scale if scale else (np.inf if max_abs else 0.0)
    whole = reference.dtype.kind in "iub"  # ids are equal or wrong
    passed = max_abs == 0 if whole else tolerance.allows(max_abs, max_rel, deviation)
    return PortDifference(name, max_abs, max_rel, deviation, passed)


@dataclass(frozen=True, slots=True)
class Spread:
    """How the differences of a port lie.

    Attributes:
        rms_rel: Their root mean square, as a share of what ``max_rel`` is a share of.
        peak_rel: The largest one as a share of the reference's largest value.
    """

    rms_rel: float = 0.0
    peak_rel: float = 0.0


def spread_difference(
    name: str, reference: Array | None, candidate: Array | None, tolerance: Tolerance
) -> tuple[PortDifference, Spread]:
    """How one port differs, and how the differences lie.

    A scan state has few large values among many small ones. In half precision it also passes where
    the root mean square of the difference is within the relative tolerance, and the largest one
    within that share of the largest value.
    """
    found = difference(name, reference, candidate, tolerance)
    if found.problem or reference is None or candidate is None or not found.max_abs:
        return found, Spread()
    right = reference.astype(np.float64)
    gap = candidate.astype(np.float64) - right
    rms = float(np.sqrt(np.mean(gap * gap)))
    peak = float(np.abs(right).max())
    spread = Spread(
        rms * found.max_rel / found.max_abs, found.max_abs / peak if peak else float("inf")
    )
    if tolerance.absolute is None and reference.dtype.kind == "f":
        near = max(spread.rms_rel, spread.peak_rel) <= tolerance.relative
        found = replace(found, passed=found.passed or near)
    return found, spread


def _problem(reference: Array | None, candidate: Array | None) -> str:
    """What makes a comparison of numbers meaningless; empty if nothing does."""
    if reference is None or candidate is None:
        return "missing in the " + ("reference" if reference is None else "candidate")
    if reference.shape != candidate.shape:
        return f"shape {list(candidate.shape)} is not the reference's {list(reference.shape)}"
    if not np.isfinite(reference).all():
        return "the reference itself is invalid: it holds NaN or infinity"
    if not np.isfinite(candidate).all():
        return NOT_FINITE
    return ""


def draw_inputs(
    ports: tuple[Port, ...],
    rng: np.random.Generator,
    *,
    vocab: int,
    past_length: Array,
    commit_length: Array | None = None,
    **sizes: int,
) -> dict[str, Array]:
    """Random inputs of a graph that respect every port's dtype and range.

    Args:
        ports: The graph's inputs.
        rng: Source of the numbers.
        vocab: Ids are drawn from 0..vocab-1.
        past_length: (B,) int64.
        commit_length: (B,) int64, for graphs that have it.
        **sizes: Size of every symbol: B, n, C and so on.
    """
    out: dict[str, Array] = {}
    for port in ports:
        shape = port.resolve(**sizes)
        dtype = numpy_dtype(port.dtype)
        if port.name == "past_length":
            out[port.name] = np.asarray(past_length, np.int64)
        elif port.name == "commit_length":
            assert commit_length is not None
            out[port.name] = np.asarray(commit_length, np.int64)
        elif dtype.kind == "f":
            out[port.name] = rng.standard_normal(shape).astype(dtype)
        else:
            high = vocab if port.name == "input_ids" else min(vocab, np.iinfo(dtype).max + 1)
            out[port.name] = rng.integers(0, high, shape).astype(dtype)
    return out
