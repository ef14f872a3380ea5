"""What the verbs of ``fixedstate calibrate`` share: refusals with codes, options, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.build import words
from fixedstate.cli.opening import check_file
from fixedstate.cli.options import NATURAL, POSITIVE, F, real
from fixedstate.cli.output import echo_json
from fixedstate.errors import CalibrationError, UsageError

if TYPE_CHECKING:
    from fixedstate.calib.report import Gates, Report
    from fixedstate.calib.score import Sensitivity
    from fixedstate.calib.table import Policy, Table

MIB = 1 << 20

FORMATS = ("int8", "int8-weights", "int4:32", "int4:128")
"""What a search chooses from unless told otherwise."""


class Verb(click.Command):
    """A command whose refusals have codes: with ``--json`` they are a document as well."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; print the code of what is refused, and let the sentence go on its way."""
        try:
            return super().invoke(ctx)
        except CalibrationError as err:
            if ctx.params.get("as_json"):
                echo_json({"error": {"code": err.code, "message": str(err)}})
            raise


def shares(value: str) -> tuple[float, ...]:
    """Shares of masks such as ``1,0.5``."""
    convert = real(0, 1)
    found = tuple(convert(word) for word in value.split(",") if word.strip())
    if not found or 0.0 in found or len(set(found)) < len(found):
        raise click.BadParameter(
            f"{value!r} is no list of different shares above 0: give some such as 1,0.5."
        )
    return found


def kv_format(value: str) -> str:
    """What keys and values are kept in: float32, or a format that stores them quantised."""
    from fixedstate.errors import SpecError
    from fixedstate.state import KvFormat

    try:
        if value == "float32" or KvFormat.named(value).quantised:
            return value
    except SpecError:
        pass
    raise click.BadParameter(
        f"{value!r} is none of float32, int8, float8_e4m3fn, kivi4, kivi2 (or kivi4rN, kivi2rN "
        "with N blocks kept in float)."
    )


def some(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which help lists them."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


data_option = click.option(
    "--data",
    "data_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Token sequences (`fixedstate calibrate data`).",
)
output_option = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write."
)
batch_option = click.option(
    "--batch",
    type=POSITIVE,
    default=4,
    show_default=True,
    metavar="N",
    help="Sequences that run together; the result does not depend on it.",
)
records_option = click.option(
    "--records", type=POSITIVE, metavar="N", help="Sequences at most [default: all of the split]."
)
resume_option = click.option(
    "--resume", is_flag=True, help="Go on with what an interrupted run has left beside -o."
)
passes_options = some(
    click.option(
        "--masks",
        type=shares,
        metavar="P,P",
        default="1,0.75,0.5,0.25",
        show_default=True,
        help="Shares of a block that are masked, a pass for each.",
    ),
    click.option(
        "--blocks",
        type=POSITIVE,
        default=16,
        show_default=True,
        metavar="N",
        help="Blocks of a sequence at most.",
    ),
    click.option(
        "--seed",
        type=NATURAL,
        default=0,
        show_default=True,
        metavar="N",
        help="Of the places that are masked.",
    ),
)
policy_options = some(
    passes_options,
    click.option("--no-commit", is_flag=True, help="Leave the passes over clean tokens out."),
    click.option(
        "--sampler",
        type=click.Choice(["masks", "trace"]),
        default="masks",
        show_default=True,
        help="Masks at random places, or those that decoding behind each prompt leaves.",
    ),
)
targets_option = click.option(
    "--target",
    "targets",
    metavar="NAME,NAME",
    multiple=True,
    callback=words,
    help="Where it has to run: ort-cpu, sm80, sm86, sm89, ... (repeatable).",
)
formats_option = click.option(
    "--formats",
    metavar="NAME,NAME",
    multiple=True,
    callback=words,
    help=f"Formats to choose from [default: {', '.join(FORMATS)}].",
)
kinds_option = click.option(
    "--kinds",
    metavar="NAME,NAME",
    multiple=True,
    callback=words,
    help="Products [default: in_proj, out_proj, qkv, o_proj, up, down, head].",
)
rounding_options = some(
    click.option(
        "--pin",
        "pins",
        multiple=True,
        metavar="GLOB=FORMAT",
        help="Format of the weights with such names; float leaves them as they are (repeatable).",
    ),
    click.option(
        "--rule",
        type=click.Choice(["mse", "max", "percentile"]),
        default="mse",
        show_default=True,
        help="Where activations are clipped: the least squared error, nowhere, or at 99.999 %.",
    ),
    click.option("--clip", is_flag=True, help="Clip weights too, to the least squared error."),
    click.option(
        "--state",
        type=click.Choice(["float32", "float16", "bfloat16", "int8row"]),
        default="float32",
        show_default=True,
        help="Scan state between blocks; int8row has a scale per head and channel.",
    ),
    click.option(
        "--kv",
        type=kv_format,
        metavar="NAME",
        default="float32",
        show_default=True,
        help="Keys and values: int8, float8_e4m3fn, kivi4 or kivi2 (4 and 2 bits; kivi4r1 keeps "
        "the newest block in float).",
    ),
)
gates_options = some(
    click.option(
        "--max-kl",
        type=real(0),
        default="2e-3",
        show_default=True,
        metavar="X",
        help="Fail above this mean divergence, in nats.",
    ),
    click.option(
        "--max-p99",
        type=real(0),
        default="5e-2",
        show_default=True,
        metavar="X",
        help="Fail where more than one token in a hundred is further away.",
    ),
    click.option(
        "--min-agree",
        type=real(0, 1),
        default="0.97",
        show_default=True,
        metavar="P",
        help="Fail where fewer tokens have the same best token.",
    ),
)
plot_option = click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the report: .png or .svg.",
)


def gates_of(max_kl: float, max_p99: float, min_agree: float) -> Gates:
    """The bounds that the options set."""
    from fixedstate.calib.report import Gates

    return Gates(kl_mean=max_kl, kl_p99=max_p99, agree=min_agree)


def policy_of(
    masks: tuple[float, ...],
    blocks: int,
    seed: int,
    no_commit: bool = False,
    sampler: str = "masks",
) -> Policy:
    """The passes that the options name."""
    from fixedstate.calib.table import Policy

    return Policy(masks, not no_commit, blocks, seed, sampler)


def pairs_of(pins: tuple[str, ...]) -> list[tuple[str, str]]:
    """Patterns and formats of ``--pin``.

    Raises:
        BadParameter: for one without both.
    """
    found = []
    for pin in pins:
        pattern, _, name = pin.rpartition("=")
        if not pattern or not name:
            raise click.BadParameter(
                f"{pin!r} is not GLOB=FORMAT: give one such as 'layers.0.*=int8'.",
                param_hint="--pin",
            )
        found.append((pattern, name))
    return found


def begun(output: Path, *, force: bool, resume: bool) -> tuple[Path, Path | None]:
    """Check a file that is written in steps.

    Args:
        output: Where it is to be in the end.
        force: Whether what stands there may be replaced.
        resume: Whether it, or what was left beside it, is gone on with.

    Returns:
        The file to write behind every step, and the one to go on with; None to begin.

    Raises:
        UsageError: where it cannot be written.
    """
    check_file(output, force or resume)
    partial = output.with_name(f"{output.name}.partial")
    check_file(partial, True)
    left = [file for file in (partial, output) if resume and file.is_file()]
    return partial, left[0] if left else None


def kinds_of(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of ``--kinds``, or those that are quantised unless told otherwise.

    Raises:
        UsageError: for one that there is not.
    """
    from fixedstate.calib.sites import DEFAULT_KINDS, KINDS

    for kind in kinds:
        if kind not in KINDS.values():
            known = ", ".join(dict.fromkeys(KINDS.values()))
            raise UsageError(f"--kinds {kind!r} is unknown; use some of {known}")
    return kinds or DEFAULT_KINDS


def settle(made: Table | Sensitivity, partial: Path, output: Path) -> None:
    """Put what is finished where it is to be, in place of what was written on the way."""
    made.save(partial)
    partial.replace(output)


def write_report(report: Report, gates: Gates, markdown: Path | None, plot: Path | None) -> None:
    """Write what was asked for of a report; each file appears whole or not at all."""
    from fixedstate.bundle import write_atomic

    if markdown is not None:
        write_atomic(markdown, report.markdown(gates).encode())
    if plot is not None:
        from fixedstate.calib import plot as drawing

        drawing.plot(report, plot)


def check_reports(markdown: Path | None, plot: Path | None, force: bool) -> None:
    """Refuse files of a report that cannot be written, before any work starts.

    Raises:
        UsageError: naming the first.
    """
    if markdown is not None:
        check_file(markdown, force)
    if plot is not None:
        from fixedstate.calib.plot import check_plot

        check_plot(plot)
        check_file(plot, force)
