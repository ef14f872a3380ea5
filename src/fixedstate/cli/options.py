"""Arguments and option types that several verbs share, checked before any work starts."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)
SEED = click.IntRange(0, 2**64 - 1)


@dataclass
class Session:
    """What holds for one run of the command line, whichever verb it is."""

    debug: bool = False


def real(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A finite number within limits; NaN, which no comparison refuses, is refused here."""

    def convert(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a number.") from None
        if not (math.isfinite(number) and low <= number <= high):
            wanted = f"{low:g} or more" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise click.BadParameter(f"{value!r} is out of range: give a number {wanted}.")
        return number

    return convert


def token_ids(value: str) -> tuple[int, ...]:
    """Token ids such as ``1,2,3``; an empty text is the empty prompt."""
    words = [word for word in re.split(r"[,\s]+", value.strip()) if word]
    for word in words:
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise click.BadParameter(f"{word!r} is not a token id: give ids such as 1,2,3.")
    return tuple(int(word) for word in words)


def prompt_text(value: str) -> str:
    """A text that can be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("the text is not UTF-8.") from None
    return value


def prompt_file(value: str) -> str:
    """The whole text of a UTF-8 file, or of standard input for ``-``."""
    try:
        raw = sys.stdin.buffer.read() if value == "-" else Path(value).read_bytes()
        return raw.decode("utf-8")
    except OSError as err:
        raise click.BadParameter(f"{value!r} cannot be read: {err.strerror}.") from None
    except UnicodeDecodeError:
        raise click.BadParameter(f"{value!r} is not a UTF-8 text.") from None


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

threads_option = click.option(
    "--threads",
    type=POSITIVE,
    metavar="N",
    help="Threads within an operator [default: ONNX Runtime's choice].",
)

force_option = click.option(
    "--force", is_flag=True, help="Replace what is at -o; it stays until the new one is whole."
)


def debug_option(function: F) -> F:
    """Add ``--debug``, which is taken before and after the verb."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            context.ensure_object(Session).debug = True

    return click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of an error.",
    )(function)
