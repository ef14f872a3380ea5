"""``fixedstate check``: the laws of a bundle along whole trajectories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import bundle_argument, debug_option, json_option
from fixedstate.cli.output import echo_json, echo_table, progress

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.laws import LawResult


_QUICK = (1, 2, 3)  # block counts of --quick; the full check goes to 33


@click.command("check", short_help="Check the laws of a bundle; exit 1 where one fails.")
@bundle_argument
@click.option("--checkpoint", help="Checkpoint it came from: adds the comparison with PyTorch.")
@click.option("--quick", is_flag=True, help="Short trajectories only.")
@json_option
@debug_option
@click.pass_context
def command(
    context: click.Context, bundle: Path, checkpoint: str | None, quick: bool, as_json: bool
) -> None:
    """Check that BUNDLE keeps the laws of cached decoding; exit 1 where it does not.

    Runs with one thread, where rows agree byte for byte. Without --checkpoint the comparison with
    PyTorch is not run, and the report says so.
    """
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.laws import check_bundle

    counts: dict[str, Any] = {"block_counts": _QUICK} if quick else {}
    with progress("checking") as tell:
        opened = Bundle.open(bundle)
        beside = _pytorch_side(opened, checkpoint, tell, counts) if checkpoint is not None else []
        rest = (2, 3, 4, 6, 7) if beside else ()  # laws 1 and 5 were proved against PyTorch
        laws = check_bundle(opened, progress=tell, only=rest, **counts)
    results = sorted([*laws, *beside], key=lambda result: result.law)
    passed = bool(results) and all(result.passed for result in results)
    if as_json:
        echo_json({"passed": passed, "laws": [result.to_dict() for result in results]})
    else:
        _print(passed, results)
    context.exit(0 if passed else 1)


def _pytorch_side(
    bundle: Bundle, checkpoint: str, tell: Callable[[str], None], counts: dict[str, Any]
) -> list[LawResult]:
    """Run first: a checkpoint that is not there is found before minutes of laws."""
    from fixedstate.export.parity import check_against_checkpoint

    return list(check_against_checkpoint(bundle, checkpoint, progress=tell, **counts))


def _print(passed: bool, results: list[LawResult]) -> None:
    rows: list[tuple[Any, ...]] = [
        (r.law, r.title, "passed" if r.passed else "FAILED", _worst(r), r.where, r.note)
        for r in results
    ]
    echo_table("Laws", ("law", "what", "result", "worst>", "where", "note"), rows)
    click.echo("passed" if passed else "failed")


def _worst(result: LawResult) -> str | None:
    return None if result.worst is None else f"{result.worst:.1e}"
