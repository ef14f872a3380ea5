"""The options that say where the time went, which verbs that decode share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.opening import check_file
from fixedstate.cli.options import F
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.runtime import Decoder

_OPTIONS = {"profile_json": "--profile-json", "trace": "--trace"}


def trace_options(function: F) -> F:
    """Add ``--profile-json`` and ``--trace``; the verb has ``--force`` and ``--head``."""
    function = click.option(
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write passes, blocks and requests as a trace for Perfetto.",
    )(function)
    return click.option(
        "--profile-json",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write counts and times of the passes.",
    )(function)


def check_trace(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be written or traced, before the bundle is opened.

    Raises:
        UsageError: with the reason.
    """
    for name, option in _OPTIONS.items():
        if options[name] is None:
            continue
        check_file(options[name], options["force"])
        if options["head"] != "logits":
            raise UsageError(
                f"{option} watches all scores, but --head {options['head']} does not give them: "
                "leave one of them out"
            )


@contextlib.contextmanager
def traced(options: Mapping[str, Any]) -> Iterator[Callable[[Decoder], Decoder]]:
    """Yields what decoders go through; the files are written at the end, not after an error."""
    given = [name for name in _OPTIONS if options[name] is not None]
    if not given:
        yield lambda decoder: decoder
        return
    from fixedstate.runtime.trace import Tracer

    tracer = Tracer()
    yield tracer.watch
    if options["profile_json"] is not None:
        tracer.save_profile(options["profile_json"])
    if options["trace"] is not None:
        tracer.save_trace(options["trace"])
