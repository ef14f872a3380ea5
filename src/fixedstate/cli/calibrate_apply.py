"""``fixedstate calibrate apply``: a quantised bundle by a plan, compared before it appears."""

from __future__ import annotations

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
    plot_option,
    records_option,
    write_report,
)
from fixedstate.cli.calibrate_report import report_line, reported_split, verdict
from fixedstate.cli.options import (
    bundle_argument,
    debug_option,
    force_option,
    json_option,
)
from fixedstate.cli.output import echo_json, progress

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import Data
    from fixedstate.calib.plan import Plan
    from fixedstate.calib.report import Report
    from fixedstate.calib.table import Table

folder_option = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write."
)
keep_option = click.option(
    "--keep-failed",
    is_flag=True,
    help="Keep the bundle even where it fails; the exit code stays 1.",
)
report_option = click.option(
    "--report",
    "markdown",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the report as Markdown.",
)


@click.command("apply", cls=Verb, short_help="Write a quantised bundle by a plan, and compare it.")
@bundle_argument
@click.option(
    "--plan",
    "plan_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What is quantised (`fixedstate calibrate plan`).",
)
@click.option(
    "--table",
    "table_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The ranges that it was made with.",
)
@data_option
@folder_option
@gates_options
@keep_option
@records_option
@batch_option
@report_option
@plot_option
@force_option
@json_option
@debug_option
@click.pass_context
def apply(
    context: click.Context,
    /,
    bundle: Path,
    plan_file: Path,
    table_file: Path,
    data_file: Path,
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Write BUNDLE quantised by a plan, and compare both on held-out sequences.

    The folder appears whole, after the comparison; where that fails it does not (exit 1).
    """
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import read_data
    from fixedstate.calib.plan import Plan
    from fixedstate.calib.table import Table

    writer = Writer(output, **options)
    with progress("opening the bundle") as tell:
        opened = Bundle.open(bundle)
        writer.write(
            opened,
            Plan.load(plan_file),
            Table.load(table_file),
            read_data(data_file, opened),
            tell,
        )
    context.exit(writer.finish(as_json, {}))


class Writer:
    """A quantised bundle on its way, with all that is made of its comparison.

    Everything that is to be written is checked at once, before any work starts.

    Raises:
        UsageError: for a file or folder that cannot be written.
    """

    report: Report

    def __init__(
        self,
        output: Path,
        *,
        max_kl: float,
        max_p99: float,
        min_agree: float,
        keep_failed: bool,
        records: int | None,
        batch: int,
        markdown: Path | None,
        plot: Path | None,
        force: bool,
    ) -> None:
        from fixedstate.bundle import check_target

        check_target(output, force)
        check_reports(markdown, plot, force)
        self.output, self.records, self.batch = output, records, batch
        self.gates = gates_of(max_kl, max_p99, min_agree)
        self._keep_failed, self._force = keep_failed, force
        self._files = markdown, plot
        self._split = ""

    def write(
        self, bundle: Bundle, plan: Plan, table: Table, data: Data, tell: Callable[[str], None]
    ) -> None:
        """Write the folder, then what was asked for of its report.

        Raises:
            CalibrationError: as :func:`fixedstate.export.quantized.quantize_bundle`.
        """
        from fixedstate.export.quantized import quantize_bundle

        self._split = reported_split(plan)
        _, self.report = quantize_bundle(
            bundle,
            plan,
            table,
            data,
            self.output,
            split=self._split,
            gates=self.gates,
            keep_failed=self._keep_failed,
            force=self._force,
            batch=self.batch,
            records=self.records,
            progress=tell,
        )
        write_report(self.report, self.gates, *self._files)

    def finish(self, as_json: bool, more: dict[str, Any]) -> int:
        """Print what came out; the exit code."""
        document = verdict(self.report, self.gates, self._split)
        broken = document["breaches"]
        if as_json:
            echo_json({"path": str(self.output), **document, **more})
        else:
            click.echo(report_line(self.report), err=True)
            if broken:
                click.echo(f"error: kept, and too far away: {'; '.join(broken)}", err=True)
            click.echo(str(self.output))
        return int(bool(broken))
