"""What a quantised model costs and saves: as a value, as Markdown, and held against gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fixedstate.calib.drift import Drift
from fixedstate.calib.measure import Comparison
from fixedstate.calib.plan import Plan
from fixedstate.calib.sites import Site
from fixedstate.calib.table import Table
from fixedstate.errors import CalibrationError

PASS_RATIO = 2.0
"""Between the largest magnitudes of two passes of one activation: above it the report says so."""


@dataclass(frozen=True, slots=True)
class Gates:
    """Bounds that a quantised model has to keep on held-out sequences.

    Attributes:
        kl_mean: Mean divergence in nats.
        kl_p99: Of all but one token in a hundred.
        agree: Share of tokens with the same best token.
    """

    kl_mean: float = 2e-3
    kl_p99: float = 5e-2
    agree: float = 0.97

    def to_dict(self) -> dict[str, float]:
        """A JSON-ready mapping."""
        return asdict(self)

    def breaches(self, summary: Mapping[str, float]) -> list[str]:
        """What does not hold, each with both numbers; empty where all does."""
        found = [
            f"{name} is {summary[name]:.3g}, allowed is {limit:g}"
            for name, limit in (("kl_mean", self.kl_mean), ("kl_p99", self.kl_p99))
            if not summary[name] <= limit
        ]
        if not summary["agree"] >= self.agree:
            found.append(f"agree is {summary['agree']:.4g}, at least {self.agree:g} is asked for")
        return found


@dataclass(frozen=True, slots=True)
class Report:
    """A quantised model beside the one it was made of.

    Attributes:
        plan: What was quantised.
        data: sha256 of the sequences that were compared.
        comparison: How far it is.
        nbytes: Stored bytes of all products by format.
        float_bytes: Of the same in float32.
        unvisited: Activations that no pass had.
        uneven: Activations whose largest magnitude in one pass is more than :data:`PASS_RATIO`
            times that in another, with the ratio.
        left: Weights that stay as they are although their kind is quantised, with the reason.
        drifts: State formats that were measured beside it.
        simulated: Formats that no provider here computes as the target does.
    """

    plan: Plan
    data: str
    comparison: Comparison
    nbytes: dict[str, int]
    float_bytes: int
    unvisited: tuple[str, ...]
    uneven: dict[str, float]
    left: dict[str, str]
    drifts: tuple[Drift, ...] = ()
    simulated: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        table: Table,
        sites: Mapping[str, Site],
        comparison: Comparison,
        data: str,
        *,
        drifts: Iterable[Drift] = (),
    ) -> Report:
        """A report of a plan that was measured.

        Args:
            plan: The plan.
            table: The ranges that it was made with.
            sites: The bundle's sites by weight.
            comparison: Of held-out sequences.
            data: sha256 of the data that they are from.
            drifts: State formats that were measured.

        Raises:
            CalibrationError: ``STALE`` for a table that the plan was not made with.
        """
        if table.sha256 != plan.table:
            raise CalibrationError(
                "STALE",
                f"the plan was made with table {plan.table[:16]}..., this one is "
                f"{table.sha256[:16]}...: give that one, or plan again",
            )
        uneven = {}
        for name, seen in table.inputs.items():
            sizes = [size for size in seen.passes.values() if size > 0]
            if sizes and max(sizes) > PASS_RATIO * min(sizes):
                uneven[name] = max(sizes) / min(sizes)
        seen_of = {"unvisited": table.unvisited(), "uneven": uneven}
        return cls.again(plan, seen_of, sites, comparison, data, drifts=drifts)

    @classmethod
    def again(
        cls,
        plan: Plan,
        record: Mapping[str, Any],
        sites: Mapping[str, Site],
        comparison: Comparison,
        data: str,
        *,
        drifts: Iterable[Drift] = (),
    ) -> Report:
        """A report of a plan that was measured again, without the table that it was made with.

        Args:
            plan: The plan.
            record: What :meth:`to_dict` gave of an earlier report: what it says of the table is
                taken over.
            sites: The bundle's sites by weight.
            comparison: Of held-out sequences.
            data: sha256 of the data that they are from.
            drifts: State formats that were measured.
        """
        chosen = plan.chosen()
        left = {
            name: _reason(site, chosen.values())
            for name, site in sites.items()
            if name not in chosen
        }
        simulated = sorted(
            {one for one in plan.formats.values() if one in ("fp8", "mxfp8", "nvfp4")}
        )
        return cls(
            plan=plan,
            data=data,
            comparison=comparison,
            nbytes=plan.nbytes(sites),
            float_bytes=sum(4 * site.rows * site.columns for site in sites.values()),
            unvisited=tuple(record["unvisited"]),
            uneven=dict(record["uneven"]),
            left=left,
            drifts=tuple(drifts),
            simulated=tuple(simulated),
        )

    def breaches(self, gates: Gates) -> list[str]:
        """What the gates do not let pass, growing states included."""
        found = gates.breaches(self.comparison.total.summary())
        found += [
            f"the state in {one.name} still drifts away after {max(one.comparison.state)} blocks"
            for one in self.drifts
            if one.is_growing
        ]
        return found

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "plan": self.plan.sha256,
            "table": self.plan.table,
            "weights": self.plan.weights,
            "data": self.data,
            "targets": list(self.plan.targets),
            "comparison": self.comparison.to_dict(),
            "expected_kl": self.plan.expected_kl,
            "bytes": {"by_format": self.nbytes, "float32": self.float_bytes},
            "unvisited": list(self.unvisited),
            "uneven": self.uneven,
            "left": self.left,
            "state": [one.to_dict() for one in self.drifts],
            "simulated": list(self.simulated),
        }

    def markdown(self, gates: Gates | None = None) -> str:
        """The same to be read."""
        data = self.comparison.to_dict()
        whole = data["all"]
        stored = sum(self.nbytes.values())
        names = (self.plan.weights, self.plan.table, self.plan.sha256, self.data)
        weights, table, plan, given = (f"`{name[:16]}`" for name in names)
        origin = (
            f"Weights {weights}, table {table}, plan {plan}, data {given}; targets "
            f"{', '.join(self.plan.targets) or 'none named'}."
        )
        found = (
            f"Divergence {whole['kl_mean']:.3g} nats ({whole['kl_low']:.3g} to "
            f"{whole['kl_high']:.3g} by sequences), p99 {whole['kl_p99']:.3g}; the same best token "
            f"for {whole['agree']:.2%} of {whole['tokens']:,} masked tokens; likelihood of the "
            f"true token {whole['nll_delta']:+.3g} nats. Products take {stored:,} bytes, in "
            f"float32 {self.float_bytes:,} ({self.float_bytes / stored:.2f} x)."
        )
        lines = [
            "# Quantised model",
            "",
            origin,
            "",
            found,
            "",
            *_table("masked", data["by_masks"]),
            *_table("blocks up to", data["by_block"]),
            "| format | bytes |",
            "|---|---|",
            *(f"| {name} | {size:,} |" for name, size in sorted(self.nbytes.items())),
            "",
        ]
        if data["state_error"]:
            lines += ["| committed blocks | relative error of the state |", "|---|---|"]
            lines += [f"| {block} | {error:.3g} |" for block, error in data["state_error"].items()]
            lines.append("")
        for one in self.drifts:
            curve = ", ".join(f"{e:.3g} at {b}" for b, e in sorted(one.comparison.state.items()))
            lines.append(
                f"State in {one.name}: {one.state_bytes:,} bytes a row for {one.float_bytes:,}; "
                f"error {curve}; {'still growing' if one.is_growing else 'saturated'}."
            )
        for title, listed in (
            ("Never visited", self.unvisited),
            ("Uneven between passes", [f"{n} ({r:.1f} x)" for n, r in self.uneven.items()]),
            ("Left as they are", [f"{n} ({why})" for n, why in self.left.items()]),
        ):
            if listed:
                lines += ["", f"{title}: {', '.join(listed)}."]
        if self.simulated:
            lines += [
                "",
                f"{', '.join(self.simulated)}: computed by converting; no card has been asked.",
            ]
        if gates is not None:
            broken = self.breaches(gates)
            lines += ["", *(f"- {one}" for one in broken), f"{'FAILED' if broken else 'PASSED'}"]
        return "\n".join(lines) + "\n"


def _reason(site: Site, formats: Iterable[Any]) -> str:
    reasons = {one.refusal(site.rows, site.columns) for one in formats} - {""}
    return next(iter(sorted(reasons)), "not chosen" if site.kind else "unknown kind")


def _table(title: str, parts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One line per part."""
    lines = [
        f"| {title} | tokens | KL mean | KL p99 | agree | likelihood |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {one['tokens']:,} | {one['kl_mean']:.3g} | {one['kl_p99']:.3g} | "
        f"{one['agree']:.2%} | {one['nll_delta']:+.3g} |"
        for name, one in parts.items()
    ]
    return [*lines, ""]
