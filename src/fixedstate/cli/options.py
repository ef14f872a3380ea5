"""Arguments and option types that several verbs share, checked before any work starts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)


@dataclass
class Session:
    """What holds for one run of the command line, whichever verb it is."""

    debug: bool = False


class Real(click.ParamType):
    """A finite number within limits; NaN, which no comparison refuses, is refused here."""

    name = "number"

    def __init__(self, low: float, high: float = math.inf) -> None:
        self.low, self.high = low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number a text stands for."""
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number.", param, ctx)
        if not (math.isfinite(number) and self.low <= number <= self.high):
            above = f"{self.low:g} or more" if math.isinf(self.high) else ""
            wanted = above or f"between {self.low:g} and {self.high:g}"
            self.fail(f"{value!r} is out of range: give a number {wanted}.", param, ctx)
        return number


class TokenIds(click.ParamType):
    """Token ids such as ``1,2,3``; an empty text is the empty prompt."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The ids a text stands for."""
        if isinstance(value, tuple):
            return value
        words = [word for word in re.split(r"[,\s]+", value.strip()) if word]
        for word in words:
            if not re.fullmatch(r"[0-9]{1,18}", word):
                self.fail(f"{word!r} is not a token id: give ids such as 1,2,3.", param, ctx)
        return tuple(int(word) for word in words)


bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

threads_option = click.option(
    "--threads", type=POSITIVE, help="Threads within an operator [default: ONNX Runtime's choice]."
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
