"""``fixedstate replay``: a flight recording, repeated and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fixedstate.cli.options import NATURAL, POSITIVE, debug_option, json_option
from fixedstate.cli.output import echo_json, note, progress

if TYPE_CHECKING:
    from fixedstate.runtime.recording import Recording
    from fixedstate.runtime.replay import Report


@click.command("replay", short_help="Repeat a flight recording; exit 1 where it differs.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="BUNDLE",
    help="Bundle to run it on [default: the recorded one].",
)
@click.option("--request", type=NATURAL, metavar="N", help="Only this request, from 0.")
@click.option(
    "--from-block",
    type=NATURAL,
    metavar="K",
    help="Begin at the last saved state before this block.",
)
@click.option(
    "--compare",
    "compared",
    type=click.Choice(["bytes", "numbers"]),
    help="Hashes, or tokens and saved states [default: bytes where they must be equal].",
)
@click.option(
    "--threads", type=POSITIVE, metavar="N", help="Threads within an operator [default: recorded]."
)
@click.option("--provider", metavar="NAME", help="Where the graphs run [default: recorded].")
@json_option
@debug_option
@click.pass_context
def command(
    context: click.Context,
    folder: Path,
    against: Path | None,
    request: int | None,
    from_block: int | None,
    compared: str | None,
    threads: int | None,
    provider: str | None,
    as_json: bool,
) -> None:
    """Repeat the recording DIR, which `generate --record` wrote.

    Each request is repeated alone. Exit 0 where everything is as it was recorded; exit 1 with the
    first pass or commit that is not, and the first layer and port whose state differs.
    """
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.recording import Recording
    from fixedstate.runtime.replay import replay_bundle

    with progress("reading the recording") as tell:
        recording = Recording.open(folder)
        bundle = Bundle.open(_bundle(recording, against))
        report = replay_bundle(
            recording,
            bundle,
            threads=threads,
            provider=provider,
            compared=compared,
            request=request,
            from_block=from_block,
            progress=tell,
        )
    if as_json:
        echo_json({**report.to_dict(), "bundle": {"digest": bundle.digest}})
    else:
        _print(recording, report)
    context.exit(0 if report.passed else 1)


def _bundle(recording: Recording, against: Path | None) -> Path:
    """The bundle that was asked for, or the one that was recorded."""
    if against is not None:
        return against
    name = recording.header.bundle
    if not name or not Path(name).exists():
        where = f"is not at {name!r} any more" if name else "is not named in it"
        raise click.UsageError(
            f"the bundle that was recorded {where}: give it as --against (its digest is "
            f"{recording.header.digest[:16]}...)"
        )
    return Path(name)


def _print(recording: Recording, report: Report) -> None:
    for reason in report.reasons:
        note(reason)
    if recording.lost:
        note(f"{recording.lost} cells of the ring are cut off by damage and were left out")
    for name in recording.damaged:
        note(f"{name} is damaged and was left out")
    for each in report.requests:
        if each.note:
            note(f"request {each.request}: {each.note}")
    difference = report.difference
    if difference is not None:
        click.echo(f"differs: {difference}")
        if difference.behind is not None:
            click.echo(f"then: {difference.behind}")
        return
    words = "identical" if report.compared == "bytes" else "equal tokens, states within tolerance"
    requests = sum(bool(each.start) for each in report.requests)
    click.echo(
        f"{words}: requests {requests}, passes {report.total('passes')}, "
        f"commits {report.total('commits')}, saved states {report.total('states')}"
    )
