"""``fixedstate calibrate report``: a quantised bundle compared again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.calibrate_common import (
    Verb,
    batch_option,
    check_reports,
    data_option,
    gates_of,
    gates_options,
    passes_options,
    plot_option,
    policy_of,
    records_option,
    write_report,
)
from fixedstate.cli.options import (
    POSITIVE,
    bundle_argument,
    debug_option,
    force_option,
    json_option,
)
from fixedstate.cli.output import echo_json, note, progress
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import Data
    from fixedstate.calib.drift import Drift
    from fixedstate.calib.plan import Plan
    from fixedstate.calib.report import Gates, Report
    from fixedstate.export.realized import Realized

_ROWS = 2  # sequences that a state's drift is measured along


@click.command("report", cls=Verb, short_help="Compare a quantised bundle again.")
@bundle_argument
@click.argument("quantized", type=click.Path(path_type=Path))
@data_option
@gates_options
@passes_options
@records_option
@batch_option
@click.option(
    "--long",
    "long",
    type=POSITIVE,
    metavar="N",
    help="Also how far QUANTIZED has drifted away behind N committed blocks.",
)
@click.option(
    "--state",
    "states",
    type=click.Choice(["fp16", "bf16", "int8row"]),
    multiple=True,
    help="With --long: also BUNDLE with its scan states in this format (repeatable).",
)
@click.option(
    "--engine",
    type=click.Path(path_type=Path),
    metavar="ENGINE",
    help="Also whether this engine of QUANTIZED keeps its weights quantised.",
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the report here too.",
)
@plot_option
@force_option
@json_option
@debug_option
@click.pass_context
def report(
    context: click.Context,
    /,
    bundle: Path,
    quantized: Path,
    data_file: Path,
    max_kl: float,
    max_p99: float,
    min_agree: float,
    records: int | None,
    batch: int,
    long: int | None,
    states: tuple[str, ...],
    engine: Path | None,
    markdown: Path | None,
    plot: Path | None,
    force: bool,
    as_json: bool,
    **passes: Any,
) -> None:
    """Compare QUANTIZED with BUNDLE, which it was made of, and print the report.

    The last line is PASSED or FAILED; exit 1 where a bound does not hold. A state that still drifts
    away after --long blocks fails too; 1000 show whether it does.
    """
    if states and long is None:
        raise click.UsageError("--state is about a long run: add --long N")
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import read_data
    from fixedstate.calib.report import Report
    from fixedstate.calib.sites import find_sites, load_graphs
    from fixedstate.export.quantized import compare_bundles

    check_reports(markdown, plot, force)
    gates, policy = gates_of(max_kl, max_p99, min_agree), policy_of(**passes)
    with progress("opening the bundles") as tell:
        opened, made = Bundle.open(bundle), Bundle.open(quantized)
        plan, record = _recorded(made)
        plan.check(opened)
        data = read_data(data_file, opened)
        split = reported_split(plan)
        chosen = data.split(split, opened.spec.block_len, policy.blocks)[:records]
        kept = _realized(opened, made, plan, engine) if engine is not None else None
        compared = compare_bundles(opened, made, chosen, policy, batch=batch, progress=tell)
        drifts = _drifts(opened, made, data, long, states, tell) if long is not None else ()
        sites = find_sites(load_graphs(opened))
        found = Report.again(plan, record, sites, compared, data.sha256, drifts=drifts)
    write_report(found, gates, markdown, plot)
    document = verdict(found, gates, split)
    if as_json:
        more = {} if kept is None else {"engine": [one.to_dict() for one in kept]}
        echo_json({**document, **more})
    else:
        for one in kept or ():
            note(_engine_line(one))
        click.echo(found.markdown(gates), nl=False)
    context.exit(int(not document["passed"]))


def _recorded(made: Bundle) -> tuple[Plan, dict[str, Any]]:
    """The plan and the report that stand in a quantised bundle.

    Raises:
        UsageError: for a bundle that is not quantised.
    """
    from fixedstate.bundle import QUANTIZATION
    from fixedstate.calib.plan import Plan

    if not made.is_quantized:
        raise UsageError(
            f"{made.path} is not quantised: give the bundle that `calibrate apply` has written"
        )
    record = json.loads((made.path / QUANTIZATION).read_bytes())
    return Plan.from_dict(record["plan"]), record["report"]


def _realized(bundle: Bundle, made: Bundle, plan: Plan, engine: Path) -> list[Realized]:
    from fixedstate.export.realized import realized
    from fixedstate.runtime.enginefile import EngineFolder

    return realized(bundle, made, plan, EngineFolder.open(engine))


def _engine_line(one: Realized) -> str:
    planned = one.planned / max(one.weights, 1)
    words = {None: "too small to say, its kernels may be most of it", True: "kept quantised"}
    said = words.get(one.passed, "not kept quantised")
    return (
        f"{one.role}: {one.per_weight:.3f} bytes of the plan for each quantised weight, planned "
        f"are {planned:.3f}: {said}"
    )


def _drifts(
    bundle: Bundle,
    made: Bundle,
    data: Data,
    blocks: int,
    states: tuple[str, ...],
    tell: Callable[[str], None],
) -> tuple[Drift, ...]:
    """The way of a quantised bundle and of state formats along held-out sequences in a row."""
    from fixedstate.calib.data import Record
    from fixedstate.calib.drift import drift
    from fixedstate.export.quantized import drift_of

    length = bundle.spec.block_len
    given = data.split("held-out", length)
    rows = []
    for row in range(min(_ROWS, len(given))):
        ids: list[int] = []
        place = row
        while len(ids) < blocks * length:
            ids += given[place % len(given)].ids
            place += 1
        rows.append(Record(f"long {row}", tuple(ids[: blocks * length])))
    at = sorted({block for block in (1, 10, 100, 1000) if block < blocks} | {blocks})
    tell(f"{blocks:,} blocks of the quantised bundle")
    whole = drift_of(bundle, made, tuple(rows), at=at, progress=tell)
    return whole, *(drift(bundle, name, rows, at=at, progress=tell) for name in states)


def reported_split(plan: Plan) -> str:
    """The sequences that a report is made on: none that the plan was chosen with."""
    return "held-out" if plan.expected_kl is None else "report"


def verdict(found: Report, gates: Gates, split: str) -> dict[str, Any]:
    """A report held against its bounds, ready for JSON."""
    broken = found.breaches(gates)
    return {
        "passed": not broken,
        "breaches": broken,
        "gates": gates.to_dict(),
        "split": split,
        "report": found.to_dict(),
    }


def report_line(found: Report) -> str:
    """A report in one line."""
    whole = found.comparison.total.summary()
    stored = sum(found.nbytes.values())
    return (
        f"{whole['kl_mean']:.3g} nats away (p99 {whole['kl_p99']:.3g}), the same best token for "
        f"{whole['agree']:.2%} of {whole['tokens']:,}; products take {stored:,} bytes, in float32 "
        f"{found.float_bytes:,} ({found.float_bytes / stored:.2f} x)"
    )
