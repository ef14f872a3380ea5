"""``fixedstate calibrate plan``: which format each weight gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.calibrate_common import (
    Verb,
    batch_option,
    kinds_of,
    kinds_option,
    output_option,
    pairs_of,
    records_option,
    rounding_options,
    targets_option,
)
from fixedstate.cli.opening import check_file
from fixedstate.cli.options import (
    POSITIVE,
    bundle_argument,
    debug_option,
    force_option,
    json_option,
    real,
)
from fixedstate.cli.output import echo_json, note, progress

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import Data
    from fixedstate.calib.plan import Plan
    from fixedstate.calib.score import Sensitivity
    from fixedstate.calib.sites import Site
    from fixedstate.calib.table import Table


@click.command("plan", cls=Verb, short_help="Choose the format of every weight.")
@bundle_argument
@click.option(
    "--table",
    "table_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ranges (`fixedstate calibrate collect`).",
)
@output_option
@click.option(
    "--format",
    "chosen",
    metavar="NAME",
    help="One format for all weights that take it; float leaves them.",
)
@click.option(
    "--scores",
    "scores_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Search among what was scored (`fixedstate calibrate score`).",
)
@click.option(
    "--data",
    "data_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Token sequences, for --max-kl.",
)
@click.option(
    "--max-kl", type=real(0), metavar="X", help="Fewest bytes within this mean divergence, in nats."
)
@click.option(
    "--max-bytes",
    type=POSITIVE,
    metavar="N",
    help="Least divergence within these bytes of weights.",
)
@targets_option
@kinds_option
@rounding_options
@records_option
@batch_option
@force_option
@json_option
@debug_option
def plan(
    bundle: Path,
    table_file: Path,
    output: Path,
    chosen: str | None,
    scores_file: Path | None,
    data_file: Path | None,
    max_kl: float | None,
    max_bytes: int | None,
    targets: tuple[str, ...],
    kinds: tuple[str, ...],
    records: int | None,
    batch: int,
    force: bool,
    as_json: bool,
    **rounding: Any,
) -> None:
    """Choose the format of every weight of BUNDLE: one for all (--format), or by a search.

    A search needs --scores and one bound. With --max-kl the plan is measured as a whole, on half of
    the held-out sequences; reports are then made on the other half.
    """
    _check_choice(chosen, scores_file, data_file, max_kl, max_bytes)
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import read_data
    from fixedstate.calib.score import Sensitivity
    from fixedstate.calib.table import Table

    request = Request.of(targets, kinds, **rounding)
    check_file(output, force)
    if chosen is not None:
        request.check((chosen,))
    with progress("opening the bundle") as tell:
        opened = Bundle.open(bundle)
        maker = Maker(opened, Table.load(table_file), request, tell)
        if chosen is not None:
            made, measured = maker.uniform(chosen), None
        else:
            assert scores_file is not None
            made, measured = maker.searched(
                Sensitivity.load(scores_file),
                read_data(data_file, opened) if data_file else None,
                max_kl=max_kl,
                max_bytes=max_bytes,
                records=records,
                batch=batch,
            )
    made.save(output)
    summary = {"path": str(output), **maker.describe(made), "measured_kl": measured}
    if as_json:
        echo_json(summary)
        return
    maker.tell_pins()
    click.echo(plan_line(summary), err=True)
    click.echo(str(output))


def _check_choice(
    chosen: str | None,
    scores_file: Path | None,
    data_file: Path | None,
    max_kl: float | None,
    max_bytes: int | None,
) -> None:
    """Refuse what makes no sense together.

    Raises:
        UsageError: naming it.
    """
    if (chosen is None) == (scores_file is None):
        raise click.UsageError("give --format or --scores: one of them")
    if chosen is not None and (max_kl is not None or max_bytes is not None):
        raise click.UsageError(
            "--max-kl and --max-bytes bound a search: give --scores, no --format"
        )
    if chosen is None and (max_kl is None) == (max_bytes is None):
        raise click.UsageError("a search needs --max-kl or --max-bytes: one of them")
    if max_kl is not None and data_file is None:
        raise click.UsageError("--max-kl is measured on sequences: give --data")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a plan, beside the formats themselves.

    Attributes:
        targets: Where it has to run.
        kinds: Of products that are quantised.
        pins: Patterns of names and their formats.
        rule: How activations are clipped.
        clip: Whether weights are.
        state: What scan states are kept in.
        kv: What keys and values are kept in.
    """

    targets: tuple[str, ...]
    kinds: tuple[str, ...]
    pins: tuple[tuple[str, str], ...]
    rule: str
    clip: bool
    state: str
    kv: str

    @classmethod
    def of(
        cls,
        targets: tuple[str, ...],
        kinds: tuple[str, ...],
        *,
        pins: tuple[str, ...],
        rule: str,
        clip: bool,
        state: str,
        kv: str,
    ) -> Request:
        """Read options.

        Raises:
            UsageError: for a kind that there is not, or a pin that is none.
        """
        return cls(targets, kinds_of(kinds), tuple(pairs_of(pins)), rule, clip, state, kv)

    def check(self, formats: Sequence[str]) -> None:
        """Refuse formats that a target lacks, before any work starts.

        Raises:
            CalibrationError: ``FORMAT``, ``UNSUPPORTED_TARGET``.
        """
        from fixedstate.calib.formats import FLOAT, check_targets, format_named

        named = (*formats, *(name for _, name in self.pins))
        asked = [name for name in named if name != FLOAT]
        for name in asked:
            format_named(name)
        check_targets(tuple(asked), self.targets)


def risks(made: Plan, sites: Mapping[str, Site]) -> list[str]:
    """What a plan does that is off by default: errors in a scan's steps and state add up.

    Source: state-spaces/mamba issue 133, vLLM issue 55196.
    """
    from fixedstate.calib.sites import DEFAULT_KINDS

    found = []
    steps = [name for name in made.formats if sites[name].kind not in DEFAULT_KINDS]
    if steps:
        found.append(
            f"{len(steps)} weights make the steps of scans ({', '.join(steps[:2])}): their errors "
            "add up along a sequence; look at `calibrate report --long 1000`"
        )
    if made.state != "float32":
        found.append(
            f"scan states are kept in {made.state}: errors add up along a sequence; look at "
            "`calibrate report --long 1000`"
        )
    return found


class Maker:
    """Plans of a bundle.

    Args:
        bundle: The float32 bundle.
        table: Its ranges.
        request: What is asked.
        tell: Told what is being done.

    Raises:
        CalibrationError: ``STALE`` for a table of something else, or as
            :func:`fixedstate.calib.plan.pinned`.
    """

    def __init__(
        self, bundle: Bundle, table: Table, request: Request, tell: Callable[[str], None]
    ) -> None:
        from fixedstate.calib.plan import pinned
        from fixedstate.calib.sites import find_sites, load_graphs

        table.check(bundle)
        self.bundle, self.table, self.request = bundle, table, request
        self.graphs = load_graphs(bundle)
        self.sites: Mapping[str, Site] = find_sites(self.graphs)
        request.check(())
        self.pins = pinned(self.sites, request.pins)
        self._tell = tell

    def uniform(self, name: str) -> Plan:
        """One format for all weights that take it; with ``float`` they stay as they are."""
        from fixedstate.calib.formats import FLOAT
        from fixedstate.calib.plan import uniform
        from fixedstate.calib.score import choices

        able = choices(self.sites, (name,), self.request.kinds) if name != FLOAT else ()
        made = uniform(
            self.bundle,
            self.table,
            self.sites,
            {**dict.fromkeys(able, name), **self.pins},
            self.request.targets,
            rule=self.request.rule,
            search=self.request.clip,
        )
        return self._carried(made)

    def searched(
        self,
        found: Sensitivity,
        data: Data | None,
        names: Sequence[str] | None = None,
        *,
        max_kl: float | None,
        max_bytes: int | None,
        records: int | None,
        batch: int,
    ) -> tuple[Plan, float | None]:
        """The plan of a search, and how far away it is as a whole, where that was measured."""
        from fixedstate.calib.plan import search_plan
        from fixedstate.calib.score import choices, divergence, opened_once
        from fixedstate.errors import CalibrationError

        if found.table != self.table.sha256:
            raise CalibrationError(
                "STALE", "the formats were scored with another table: score them again"
            )
        offered = names or sorted({name for one in found.kl.values() for name in one})
        found = found.among(choices(self.sites, offered, self.request.kinds))
        policy, length = self.table.policy, self.bundle.spec.block_len
        given = () if data is None else data.split("verify", length, policy.blocks)[:records]
        if max_bytes is not None:
            max_bytes = self._left_of(max_bytes, found)
        measured: list[float] = []
        reference = opened_once(self.bundle)

        def verify(plan: Plan) -> float:
            self._tell(f"measuring a plan of {sum(plan.nbytes(self.sites).values()):,} bytes")
            far = divergence(
                self.bundle,
                self.graphs,
                self.sites,
                plan.chosen(),
                plan.scales,
                given,
                policy,
                batch=batch,
                search=plan.search,
                reference=reference,
            )
            measured.append(far)
            return far

        made = search_plan(
            self.bundle,
            self.table,
            self.sites,
            found,
            self.request.targets,
            verify,
            max_kl=max_kl,
            max_bytes=max_bytes,
            rule=self.request.rule,
            search=self.request.clip,
            pins=self.pins,
        )
        return self._carried(made), measured[-1] if measured else None

    def _left_of(self, max_bytes: int, found: Sensitivity) -> int:
        """What is left for the weights that were scored; the others stay as they are."""
        from fixedstate.errors import CalibrationError

        others = [site for name, site in self.sites.items() if name not in found.kl]
        taken = sum(4 * site.rows * site.columns for site in others)
        if taken >= max_bytes:
            raise CalibrationError(
                "INFEASIBLE",
                f"{len(others)} weights that were not scored take {taken:,} bytes, allowed are "
                f"{max_bytes:,}: score them too (--kinds, --formats), or allow more",
            )
        return max_bytes - taken

    def _carried(self, made: Plan) -> Plan:
        """The plan with the formats of what is carried.

        Raises:
            CalibrationError: ``INFEASIBLE`` for a plan that changes nothing, ``STATE_FORMAT`` for
                one of what the model does not carry.
        """
        from fixedstate.errors import CalibrationError

        made = replace(made, state=self.request.state, kv=self.request.kv)
        if not made.formats and made.state == made.kv == "float32":
            raise CalibrationError(
                "INFEASIBLE",
                "no weight would be quantised: allow more, or offer other formats",
            )
        made.check(self.bundle)
        for text in risks(made, self.sites):
            note(text)
        return made

    def describe(self, made: Plan) -> dict[str, Any]:
        """What is said about a plan, ready for JSON."""
        nbytes = made.nbytes(self.sites)
        return {
            "sha256": made.sha256,
            "targets": list(made.targets),
            "weights": len(made.formats),
            "left": len(self.sites) - len(made.formats),
            "bytes": nbytes,
            "total_bytes": sum(nbytes.values()),
            "float32_bytes": sum(4 * site.rows * site.columns for site in self.sites.values()),
            "expected_kl": made.expected_kl,
            "state": made.state,
            "kv": made.kv,
            "pins": self._pin_counts(),
        }

    def _pin_counts(self) -> dict[str, int]:
        from fixedstate.calib.plan import pinned

        return {
            f"{pattern}={name}": len(pinned(self.sites, ((pattern, name),)))
            for pattern, name in self.request.pins
        }

    def tell_pins(self) -> None:
        """Say how many weights each pattern has matched."""
        for pin, count in self._pin_counts().items():
            click.echo(f"{pin}: {count} of {len(self.sites)} weights", err=True)


def plan_line(summary: Mapping[str, Any]) -> str:
    """A plan in one line."""
    total, whole = summary["total_bytes"], summary["float32_bytes"]
    parts = [f"{name} {size:,}" for name, size in sorted(summary["bytes"].items())]
    line = f"{total:,} bytes ({', '.join(parts)}), in float32 {whole:,}: {whole / total:.2f} x"
    if summary.get("measured_kl") is not None:
        line += f"; {summary['measured_kl']:.3g} nats away"
    return line
