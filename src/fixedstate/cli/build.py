"""``fixedstate build``: a bundle becomes a TensorRT engine, planned before anything is built."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import (
    POSITIVE,
    bundle_argument,
    debug_option,
    force_option,
    json_option,
)
from fixedstate.cli.output import console, echo_json, note

if TYPE_CHECKING:
    from fixedstate.export.engine import Progress
    from fixedstate.export.profiles import BuildRequest

_RANGE = "MIN:USUAL:MAX"
_COMMA = re.compile(r"[,\s]+")


def words(context: click.Context, option: click.Parameter, values: Any) -> tuple[str, ...]:
    """Words of an option that may be repeated and may hold several: ``8.9,12.0``."""
    given = (values,) if isinstance(values, str) else values or ()
    return tuple(word for value in given for word in _COMMA.split(value) if word)


@click.command("build", short_help="Build TensorRT engines of a bundle; no card is needed for RTX.")
@bundle_argument
@click.option(
    "--target",
    required=True,
    type=click.Choice(["tensorrt-rtx", "tensorrt"]),
    help="tensorrt-rtx: GeForce and RTX cards; tensorrt: data-centre cards and Jetson.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder to write [default: the user's cache, by what the engine is made of].",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    default="fp16",
    show_default=True,
    help="Numbers of the engine, compared with the float32 graphs first; scan state stays float32.",
)
@click.option(
    "--fp32-layers",
    metavar="N,N",
    multiple=True,
    callback=words,
    help="Layers that stay float32 as a whole.",
)
@click.option("--batch", metavar=_RANGE, help="Rows of a pass [default: 1:1:1].")
@click.option("--blocks", metavar=_RANGE, help="Blocks of one commit pass [default: 1:1:16].")
@click.option(
    "--capacity",
    metavar=_RANGE,
    help="Tokens of keys and values [default: 256:1024:4096; whole sequences from one block].",
)
@click.option(
    "--compute-capability",
    "capabilities",
    metavar="X.Y",
    multiple=True,
    callback=words,
    help="Cards it is for (repeatable) [default: 8.6, 8.9, 12.0; with tensorrt the one here].",
)
@click.option(
    "--plugins",
    type=click.Choice(["auto", "none", "required"]),
    default="auto",
    show_default=True,
    help="Compiled kernels for scans: where they are better, never, or for every node.",
)
@click.option(
    "--roles",
    metavar="NAME,NAME",
    multiple=True,
    callback=words,
    help="Graphs to build [default: those that decoding opens].",
)
@click.option(
    "--builder-flag",
    "builder_flags",
    metavar="NAME",
    multiple=True,
    callback=words,
    help="REFIT, STRIP_PLAN, STRICT_NANS or WEIGHT_STREAMING (repeatable).",
)
@click.option(
    "--optimization-level",
    type=click.IntRange(0, 5),
    default=3,
    show_default=True,
    help="How long to look for fast kernels (tensorrt only).",
)
@click.option(
    "--hardware-compatibility",
    type=click.Choice(["none", "same", "ampere+"]),
    default="none",
    show_default=True,
    help="Other cards it runs on (tensorrt only).",
)
@click.option("--version-compatible", is_flag=True, help="Newer versions run it (tensorrt only).")
@click.option(
    "--timing-cache",
    type=click.Path(),
    help="File that measured times are kept in (tensorrt only).",
)
@click.option(
    "--timeout", type=POSITIVE, metavar="SECONDS", help="End a graph's build that takes longer."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and build nothing.")
@force_option
@json_option
@debug_option
def command(
    bundle: Path,
    output: Path | None,
    force: bool,
    dry_run: bool,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Build a TensorRT engine of BUNDLE and print its folder.

    The plan is checked first: ranges, sizes, dtypes and plugins, by the cards that the engine is
    for. TensorRT-RTX builds on any machine, TensorRT on the card it builds for. The folder appears
    whole or not at all, and runs without the bundle.
    """
    from fixedstate.bundle import Bundle
    from fixedstate.export import engine
    from fixedstate.export.builderflags import BuilderFlags
    from fixedstate.export.cards import first_card

    flags = BuilderFlags(
        optimization_level=options.pop("optimization_level"),
        hardware=options.pop("hardware_compatibility"),
        version_compatible=options.pop("version_compatible"),
    )
    request = request_of(**options)
    if dry_run:
        opened = Bundle.open(bundle, verify_weights=False)
        plan = engine.planned_build(opened, request, flags, first_card())
        if as_json:
            echo_json(plan.to_dict())
        else:
            click.echo(plan.text())
        return
    with _bar() as tell:
        tell("checking the bundle", 0.0)
        report = engine.build(
            Bundle.open(bundle),
            request,
            output,
            force=force,
            flags=flags,
            progress=tell,
            notes=note,
            timeout=timeout,
        )
    for text in report.plan.notes:
        note(text)
    if as_json:
        echo_json(report.to_dict())
    else:
        click.echo(str(report.path))


def request_of(
    *,
    target: str,
    batch: str | None,
    blocks: str | None,
    capacity: str | None,
    capabilities: tuple[str, ...],
    fp32_layers: tuple[str, ...],
    **options: Any,
) -> BuildRequest:
    """What the options ask for.

    Raises:
        UsageError: for a value that is none, quoting it.
    """
    from fixedstate.export.profiles import BuildRequest, Range

    ranges = {"batch": batch, "blocks": blocks, "capacity": capacity}
    given: dict[str, Any] = {
        name: Range.parse(text, f"--{name}") for name, text in ranges.items() if text is not None
    }
    if capabilities or target == "tensorrt":
        given["capabilities"] = capabilities or _here()
    layers = tuple(_layer(word) for word in fp32_layers)
    return BuildRequest(target=target, fp32_layers=layers, **given, **options)


def _layer(word: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise click.BadParameter(
            f"{word!r} is no index of a layer: give indices such as 0,3.",
            param_hint="--fp32-layers",
        )
    return int(word)


def _here() -> tuple[str, ...]:
    """Compute capability of the card of this machine.

    Raises:
        UsageError: where there is none.
    """
    from fixedstate.errors import UsageError
    from fixedstate.export.cards import first_card

    card = first_card()
    if card is None:
        raise UsageError(
            "tensorrt builds for the card of the machine it runs on, and here is no NVIDIA card "
            "with a driver: build where the engine is to run, or name the card with "
            "--compute-capability to see the plan (--dry-run)"
        )
    return (card.capability,)


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text, share: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        tell: Callable[[str, float], None] = lambda text, share: bar.update(  # noqa: E731
            task, description=text, completed=share
        )
        yield tell
