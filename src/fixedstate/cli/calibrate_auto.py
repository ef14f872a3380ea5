"""``fixedstate calibrate auto``: from token sequences to a quantised bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.calibrate_apply import Writer, folder_option, keep_option, report_option
from fixedstate.cli.calibrate_common import (
    FORMATS,
    Verb,
    batch_option,
    begun,
    data_option,
    formats_option,
    gates_options,
    kinds_option,
    plot_option,
    policy_of,
    policy_options,
    records_option,
    rounding_options,
    settle,
    targets_option,
)
from fixedstate.cli.calibrate_plan import Maker, Request, plan_line
from fixedstate.cli.options import (
    POSITIVE,
    bundle_argument,
    debug_option,
    force_option,
    json_option,
)
from fixedstate.cli.output import progress
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import Data
    from fixedstate.calib.plan import Plan
    from fixedstate.calib.table import Policy, Table

AIM = 0.75
"""Share of the allowed divergence that `auto` searches within: sequences differ, and the ones that
the plan is held against are not those of the report."""


@click.command("auto", cls=Verb, short_help="All of it: from sequences to a quantised bundle.")
@bundle_argument
@data_option
@folder_option
@targets_option
@click.option(
    "--format",
    "chosen",
    metavar="NAME",
    help="One format for all weights that take it, and no search.",
)
@click.option(
    "--max-bytes",
    type=POSITIVE,
    metavar="N",
    help="Least divergence within these bytes, not the fewest bytes within --max-kl.",
)
@formats_option
@kinds_option
@gates_options
@keep_option
@rounding_options
@policy_options
@click.option(
    "--score-records",
    type=POSITIVE,
    default=8,
    show_default=True,
    metavar="N",
    help="Sequences that formats are scored on at most.",
)
@records_option
@batch_option
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Keep table, scores and plan here; a second run goes on with them.",
)
@report_option
@plot_option
@force_option
@json_option
@debug_option
@click.pass_context
def auto(
    context: click.Context,
    /,
    bundle: Path,
    data_file: Path,
    output: Path,
    targets: tuple[str, ...],
    chosen: str | None,
    max_bytes: int | None,
    formats: tuple[str, ...],
    kinds: tuple[str, ...],
    masks: tuple[float, ...],
    no_commit: bool,
    blocks: int,
    seed: int,
    sampler: str,
    pins: tuple[str, ...],
    rule: str,
    clip: bool,
    state: str,
    kv: str,
    score_records: int,
    work: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write BUNDLE quantised: collect ranges, choose formats, apply them, compare.

    Without --format each weight gets the format with which the model takes the fewest bytes and
    stays within --max-kl: int8, int8-weights, int4:32 or int4:128, of these what every --target
    has. The search aims at three quarters of --max-kl, since sequences differ; the report is made
    on sequences that nothing was chosen with. Where it fails, no folder appears (exit 1).
    """
    if chosen is not None and (max_bytes is not None or formats):
        raise click.UsageError("--max-bytes and --formats are of a search: leave --format out")
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import read_data

    request = Request.of(targets, kinds, pins=pins, rule=rule, clip=clip, state=state, kv=kv)
    names = (chosen,) if chosen is not None else formats or _offered(targets)
    request.check(names)
    policy = policy_of(masks, blocks, seed, no_commit, sampler)
    writer = Writer(output, **options)
    steps = _Steps(work, request, policy, names, chosen, max_bytes, score_records)
    with progress("opening the bundle") as tell:
        opened = Bundle.open(bundle)
        data = read_data(data_file, opened)
        with tempfile.TemporaryDirectory() if work is None else nullcontext(work) as folder:
            made, table, summary = steps.plan(opened, data, Path(folder), writer, tell)
        writer.write(opened, made, table, data, tell)
    if not as_json:
        click.echo(plan_line(summary), err=True)
    context.exit(writer.finish(as_json, {"plan": summary}))


def _offered(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Formats that a search chooses from where none are named: those that every target has.

    Raises:
        CalibrationError: ``UNSUPPORTED_TARGET`` where none is left, or for an unknown target.
    """
    from fixedstate.calib.formats import TARGETS, check_targets

    check_targets((), targets)
    left = tuple(name for name in FORMATS if all(name in TARGETS[target] for target in targets))
    if not left:
        check_targets(FORMATS, targets)
    return left


class _Steps:
    """What comes before the bundle is written: table, scores, plan."""

    def __init__(
        self,
        work: Path | None,
        request: Request,
        policy: Policy,
        names: tuple[str, ...],
        chosen: str | None,
        max_bytes: int | None,
        score_records: int,
    ) -> None:
        if work is not None:
            if work.exists() and not work.is_dir():
                raise UsageError(f"{work} is a file: --work is a folder")
            if not work.absolute().parent.is_dir():
                raise UsageError(f"{work.absolute().parent} is not a folder: make it first")
        self._request, self._policy, self._names = request, policy, names
        self._chosen, self._max_bytes, self._records = chosen, max_bytes, score_records

    def plan(
        self,
        bundle: Bundle,
        data: Data,
        work: Path,
        writer: Writer,
        tell: Callable[[str], None],
    ) -> tuple[Plan, Table, dict[str, Any]]:
        """Collect, score and plan; what is in the folder already is gone on with."""
        from fixedstate.calib.collect import collect
        from fixedstate.calib.score import Sensitivity, score
        from fixedstate.calib.table import Table

        length, blocks = bundle.spec.block_len, self._policy.blocks
        needed = ["calibrate"]
        needed += ["held-out"] if self._chosen is not None else ["score", "verify", "report"]
        for split in needed:
            data.split(split, length, blocks)
        work.mkdir(exist_ok=True)
        file = work / "table.json"
        partial, left = begun(file, force=True, resume=True)
        table = collect(
            bundle,
            data,
            self._policy,
            batch=writer.batch,
            resume=Table.load(left) if left else None,
            save=partial,
            progress=lambda text: tell(f"collecting ranges, {text}"),
        )
        settle(table, partial, file)
        maker = Maker(bundle, table, self._request, tell)
        measured = None
        if self._chosen is not None:
            made = maker.uniform(self._chosen)
        else:
            file = work / "scores.json"
            partial, left = begun(file, force=True, resume=True)
            found = score(
                bundle,
                table,
                data,
                self._names,
                kinds=self._request.kinds,
                records=self._records,
                batch=writer.batch,
                resume=Sensitivity.load(left) if left else None,
                save=partial,
                progress=lambda text: tell(f"scoring {text}"),
            )
            settle(found, partial, file)
            made, measured = maker.searched(
                found,
                data,
                self._names,
                max_kl=None if self._max_bytes else AIM * writer.gates.kl_mean,
                max_bytes=self._max_bytes,
                records=writer.records,
                batch=writer.batch,
            )
        made.save(work / "plan.json")
        return made, table, {**maker.describe(made), "measured_kl": measured}
