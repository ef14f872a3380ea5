"""Whether an engine keeps weights as narrow as a quantised bundle has them.

A builder may take a graph with quantised weights, compute with floats and say nothing: the plan is
then several times as large as it should be, and that is how it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fixedstate.bundle import Bundle
from fixedstate.calib.plan import Plan
from fixedstate.calib.sites import find_sites, load_graphs
from fixedstate.errors import BundleError, CalibrationError
from fixedstate.export.against import layer_record
from fixedstate.runtime.enginefile import EngineFolder

ALLOWED = 1.3
"""Times the planned bytes that quantised weights may take in a plan."""

KERNELS = 48 << 20
"""Bytes of a plan for each compute capability that may be other than weights: kernels, of which
small plans mostly consist. Those of TensorRT-RTX 1.7 for six layers take up to 33 MB."""


@dataclass(frozen=True, slots=True)
class Realized:
    """The quantised weights of one plan.

    Attributes:
        role: Of the plan.
        weights: Quantised weights that its graph reads.
        planned: Their bytes as the bundle has them.
        others: Bytes of everything else that the graph reads.
        plan_bytes: Size of the engine's plan.
        capabilities: Compute capabilities that it has kernels for.
    """

    role: str
    weights: int
    planned: int
    others: int
    plan_bytes: int
    capabilities: int

    @property
    def per_weight(self) -> float:
        """Bytes of the plan for each quantised weight; what kernels take is among them."""
        return max(0, self.plan_bytes - self.others) / max(self.weights, 1)

    @property
    def passed(self) -> bool | None:
        """Whether the size fits; None where float16 weights would fit as well: too small to say."""
        most = ALLOWED * self.planned + self.others + KERNELS * self.capabilities
        if self.plan_bytes > most:
            return False
        return None if 2 * self.weights + self.others <= most else True

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "role": self.role,
            "weights": self.weights,
            "planned_per_weight": self.planned / max(self.weights, 1),
            "realized_per_weight": self.per_weight,
            "plan_bytes": self.plan_bytes,
            "passed": self.passed,
        }


def realized(bundle: Bundle, quantized: Bundle, plan: Plan, engine: EngineFolder) -> list[Realized]:
    """Bytes of the quantised weights in every plan of an engine.

    Args:
        bundle: The float32 bundle.
        quantized: The bundle that was made of it.
        plan: By which it was made.
        engine: Built of the quantised bundle.

    Raises:
        CalibrationError: ``STALE`` for an engine of another bundle, ``NOT_REALIZED`` where a plan
            is larger than its quantised weights allow.
        BundleError: for an engine without a record of its weights.
    """
    if engine.identity.weights != quantized.weights:
        raise CalibrationError(
            "STALE",
            f"{engine.path} is of weights {engine.identity.weights[:16]}..., {quantized.path} has "
            f"{quantized.weights[:16]}...: build the engine of that bundle",
        )
    if engine.identity.is_stripped:
        raise BundleError(f"the plans of {engine.path} hold no weights: build without STRIP_PLAN")
    record, graphs = layer_record(engine), load_graphs(bundle)
    chosen = plan.chosen()
    found = []
    for role, one in engine.plans.items():
        if role not in record:
            raise BundleError(
                f"{engine.path} has no record of the weights of {role}: build it again"
            )
        sites = [site for name, site in find_sites({role: graphs[role]}).items() if name in chosen]
        planned = sum(chosen[site.name].nbytes(site.rows, site.columns) for site in sites)
        others = max(0, int(record[role]["weight_bytes"]) - planned)
        count = sum(site.rows * site.columns for site in sites)
        size = (engine.path / one.file).stat().st_size
        cards = len(engine.identity.capabilities)
        found.append(Realized(role, count, planned, others, size, cards))
    for made in found:
        if made.passed is False:
            raise CalibrationError(
                "NOT_REALIZED",
                f"{made.role}: {made.per_weight:.3f} bytes for each quantised weight in the plan, "
                f"planned are {made.planned / made.weights:.3f}: the builder did not keep them "
                "quantised; use another format for this target, and report this model",
            )
    return found
