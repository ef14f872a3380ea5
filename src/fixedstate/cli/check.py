"""``fixedstate check``: the laws of a bundle along whole trajectories."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import bundle_argument, debug_option, json_option, threads_option
from fixedstate.cli.output import echo_json, echo_table, progress

if TYPE_CHECKING:
    from fixedstate.runtime.laws import LawResult


@click.command("check")
@bundle_argument
@click.option("--checkpoint", help="Checkpoint it came from: adds the comparison with PyTorch.")
@click.option("--quick", is_flag=True, help="Shorter trajectories.")
@threads_option
@json_option
@debug_option
@click.pass_context
def command(
    context: click.Context,
    bundle: Path,
    checkpoint: str | None,
    quick: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Check that BUNDLE keeps the laws of cached decoding; exit 1 where it does not.

    Without --checkpoint the comparison with PyTorch is not run, and the report says so.
    """
    from fixedstate.runtime.laws import check_bundle

    with progress("checking") as tell:
        results = list(check_bundle(bundle, quick=quick, threads=threads, progress=tell))
        if checkpoint is not None:
            from fixedstate.export.parity import check_against_checkpoint

            results += check_against_checkpoint(bundle, checkpoint, progress=tell)
    passed = bool(results) and all(result.passed for result in results)
    if as_json:
        echo_json({"passed": passed, "laws": [asdict(result) for result in results]})
    else:
        _print(passed, results)
    context.exit(0 if passed else 1)


def _print(passed: bool, results: list[LawResult]) -> None:
    rows: list[tuple[Any, ...]] = [
        (r.law, r.title, "passed" if r.passed else "FAILED", r.worst, r.where, r.note)
        for r in results
    ]
    echo_table("Laws", ("law", "what", "result", "worst>", "where", "note"), rows)
    click.echo("passed" if passed else "failed")
