"""How verbs speak: JSON and tables on standard output, notes and progress on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

_FLAT_LIST = re.compile(r"(?<=\[)\n[^\[\]{}]+(?=\])")
_LINE_BREAK = re.compile(r"\n\s*")
_WIDE = 140  # columns of a table that goes into a file or a pipe


def echo_json(data: Any) -> None:
    """Print one JSON document; numbers that JSON lacks (NaN, infinity) become null."""
    text = json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)
    # Lists of ids and shapes on one line; inside a JSON string there is no line break to find.
    click.echo(_FLAT_LIST.sub(lambda found: _LINE_BREAK.sub(" ", found[0]).strip(), text))


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: _finite(item) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(item) for item in data]
    return data


def note(text: str) -> None:
    """Say one line to the person at the terminal."""
    click.echo(f"note: {text}", err=True)


def console(*, stderr: bool = False) -> Console:
    """A plain rich console: no markup, emoji or highlighting in names that come from files."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else _WIDE
    return Console(file=stream, width=wide, markup=False, emoji=False, highlight=False)


def echo_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; columns whose name ends in a space-less ``>`` are set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.removesuffix(">"), justify="right" if right else "left")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console().print(table)


def echo_fields(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one pair a line, values aligned."""
    lines = [(name, value) for name, value in pairs if value not in (None, "")]
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        click.echo(f"{name:<{width}}  {value}")


def byte_text(count: int) -> str:
    """Bytes as a person reads them: ``1,536 (1.5 KiB)``."""
    size, unit = float(count), ""
    for unit in ("", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count:,} B" if not unit else f"{count:,} B ({size:.1f} {unit})"


@contextlib.contextmanager
def progress(start: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done, on a terminal only; yields the function that changes the text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with console(stderr=True).status(start) as status:
        yield status.update
