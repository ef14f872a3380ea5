"""``fixedstate calibrate``: quantised bundles, measured along the decoding that they will do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fixedstate.cli.calibrate_apply import apply
from fixedstate.cli.calibrate_auto import auto
from fixedstate.cli.calibrate_collect import (
    collect,
    data,
    describe_scores,
    describe_table,
    merge,
    score,
)
from fixedstate.cli.calibrate_common import Verb
from fixedstate.cli.calibrate_plan import plan
from fixedstate.cli.calibrate_report import report
from fixedstate.cli.options import debug_option
from fixedstate.cli.output import echo_json
from fixedstate.errors import CalibrationError


class _Steps(click.Group):
    """Lists its verbs in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As they were added."""
        return list(self.commands)


@click.group(
    "calibrate",
    cls=_Steps,
    short_help="Quantise a bundle and measure what it costs.",
    no_args_is_help=False,
)
@debug_option
def command() -> None:
    """Quantise a bundle: inputs and weights of its products, in formats that are measured.

    `auto` does all of it; the other verbs are its steps, each with a file between them.
    """


@click.command("show", cls=Verb, short_help="Print what a table, scores or plan hold, as JSON.")
@click.argument("file", type=click.Path(path_type=Path))
@debug_option
def show(file: Path) -> None:
    """Check FILE and print what it holds as one JSON document."""
    echo_json({"path": str(file), **_described(file)})


def _described(file: Path) -> dict[str, Any]:
    """What a file of this command holds.

    Raises:
        CalibrationError: ``DAMAGED`` where it is none, or was changed.
    """
    from fixedstate.calib.plan import Plan
    from fixedstate.calib.score import Sensitivity
    from fixedstate.calib.table import Table

    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as err:
        raise CalibrationError("DAMAGED", f"{file} cannot be read as JSON: {err}") from err
    kinds = set(found) if isinstance(found, dict) else set()
    if "calibration_table" in kinds:
        return {"kind": "table", **describe_table(Table.load(file))}
    if "sensitivity" in kinds:
        scores = Sensitivity.load(file)
        return {"kind": "scores", **describe_scores(scores), "by_weight": scores.kl}
    if "quantization_plan" in kinds:
        return {"kind": "plan", **Plan.load(file).to_dict()}
    raise CalibrationError(
        "DAMAGED", f"{file} is neither a table nor scores nor a plan of `fixedstate calibrate`"
    )


for _verb in (auto, data, collect, merge, score, plan, apply, report, show):
    command.add_command(_verb)
