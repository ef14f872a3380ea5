"""Whether two sets of named arrays agree, by how much they do not, and where it is worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fixedstate.errors import ParityError
from fixedstate.ports import Array, Port, numpy_dtype
from fixedstate.runtime.kvvalues import cache_values
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision, StateSpec

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
        precision: ``fp32``, ``fp16``, ``bf16``, or what is kept in fewer bits: ``bf16 states``.
        absolute: Largest difference of a port of deviation up to 1; None where only the relative
            one counts.
        relative: Largest difference as a share of the reference port's standard deviation.
        floor: Differences up to this pass whatever the deviation: zero ports have none.
        reason: Where the numbers come from.
        overridden: Whether somebody chose other numbers than the table's.
        kl: Mean Kullback-Leibler divergence in nats that scores may have from the reference's;
            where it is given it alone judges them, for a score that is off by a step of a coarse
            format says little.
    """

    precision: str
    absolute: float | None
    relative: float
    floor: float
    reason: str
    overridden: bool = False
    kl: float | None = None

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
            kl=base.kl,
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
    "int8": Tolerance(
        "int8",
        absolute=None,
        relative=9e-2,
        floor=1e-3,
        kl=2e-3,
        reason="activations are rounded to whole steps: where two orders of summation lie on both "
        "sides of a half one, a product differs by a step, 1/127 of the largest; scores are judged "
        "by their divergence",
    ),
    **{
        f"{name} states": Tolerance(
            f"{name} states",
            absolute=None,
            relative=relative,
            floor=1e-3,
            kl=kl,
            reason=f"a scan state keeps {bits} bits at every commit, so that one commit of k "
            f"blocks and k commits differ: by {seen} of the largest value after 33 blocks of "
            f"random tokens in a small hybrid model, and scores by {nats} nats; a broken graph is "
            "off by several, and what the format costs on text is measured by calibration",
        )
        for name, relative, bits, seen, nats, kl in (
            ("fp16", 5e-2, 11, 5e-3, 3e-4, 2e-3),
            ("bf16", 3e-1, 8, 0.11, 6e-3, 2e-2),
            ("int8row", 7e-1, 7, 0.45, 0.3, 1.0),
        )
    },
    **{
        f"{name} keys": Tolerance(
            f"{name} keys",
            absolute=None,
            relative=relative,
            floor=1e-3,
            kl=kl,
            reason="keys and values are rounded to whole steps: where two orders of summation lie "
            f"on both sides of a half one, they differ by a step, up to {step} of the largest",
        )
        for name, relative, step, kl in (
            ("int8", 2e-2, "1/127", 2e-3),
            ("float8_e4m3fn", 1e-1, "1/14", 2e-3),
            ("kivi4", 2e-1, "2/15", 2e-3),
            ("kivi2", 7e-1, "2/3", 2e-2),
        )
    },
}
TOLERANCES = dict(
    sorted(TOLERANCES.items(), key=lambda item: (item[1].relative, item[1].kl or 0.0))
)
"""Default tolerance by precision or format, the finest first; shown in every report."""


def coarsest(*precisions: Precision, quantized: bool = False) -> str:
    """The entry of :data:`TOLERANCES` that covers whatever these precisions keep.

    Args:
        precisions: Of what is compared.
        quantized: Whether products of any of it are quantised.
    """
    names = {name for precision in precisions for name in precision.names}
    return max({*names, *(["int8"] * quantized)}, key=list(TOLERANCES).index)


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
        kl: Mean divergence in nats, where scores are judged by it.
    """

    name: str
    max_abs: float
    max_rel: float
    deviation: float
    passed: bool
    problem: str = ""
    kl: float | None = None

    def __str__(self) -> str:
        """One line for a report."""
        text = f"{self.name}: {self.problem or 'differs'}"
        if self.problem:
            return text
        if self.kl is not None:
            return f"{text} by {self.kl:.3g} nats"
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
    if tolerance.kl is not None and is_scores(name):
        kl = float(divergence(reference, candidate).mean())
        return PortDifference(name, max_abs, max_rel, deviation, kl <= tolerance.kl, kl=kl)
    passed = max_abs == 0 if whole else tolerance.allows(max_abs, max_rel, deviation)
    return PortDifference(name, max_abs, max_rel, deviation, passed)


def is_scores(name: str) -> bool:
    """Whether a port holds scores of all tokens."""
    return name.startswith(("logits", "last_logits"))


def divergence(reference: Array, candidate: Array) -> Array:
    """Kullback-Leibler divergence in nats of each slot's tokens from the reference's, float64.

    Args:
        reference: Scores [.., V].
        candidate: Likewise.
    """
    right, found = log_softmax(reference), log_softmax(candidate)
    kl: Array = (np.exp(right) * (right - found)).sum(-1)
    return np.maximum(kl, 0.0)  # below 0 by rounding only


def log_softmax(scores: Array) -> Array:
    """float64 logarithms of the softmax over the last axis."""
    wide = scores.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    found: Array = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return found


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
    if tolerance.absolute is None and reference.dtype.kind == "f" and found.kl is None:
        near = max(spread.rms_rel, spread.peak_rel) <= tolerance.relative
        found = replace(found, passed=found.passed or near)
    return found, spread


def decoded(
    state: StateSpec, arrays: Mapping[str, Array], spec: ModelSpec | None = None
) -> dict[str, Array]:
    """Carried tensors as the numbers that they stand for, whatever they are stored in.

    Stored numbers are multiplied by their scales, which are no tensors of their own then; bfloat16,
    which numpy keeps as its bits, becomes float32.

    Args:
        state: What is carried.
        arrays: By suffix, of one row or of several; what is no port of the state, or float32
            already, stays as it is.
        spec: The model; needed where keys and values are packed.

    Raises:
        StateError: for packed keys and values without the model.
    """
    out = cache_values(state, arrays, spec)
    kinds = {(port.layer, port.kind): port.suffix for port in state.committed}
    for port in state.committed:
        if port.suffix not in out:
            continue
        array = out[port.suffix]
        if port.past.dtype == "bfloat16" and array.dtype == np.uint16:
            out[port.suffix] = (array.astype(np.uint32) << 16).view(np.float32)
        scale = kinds.get((port.layer, f"{port.kind}_scale"), "")
        if scale in out and array.dtype == np.int8:
            with np.errstate(invalid="ignore"):  # a scale that is no number: seen by who compares
                out[port.suffix] = array.astype(np.float32) * out.pop(scale)
    return out


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
