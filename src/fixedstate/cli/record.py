"""The options of a flight recording, which verbs that decode share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import POSITIVE, F
from fixedstate.cli.output import note
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.runtime import Decoder
    from fixedstate.runtime.scheduler import Watcher


def record_options(function: F) -> F:
    """Add ``--record``, ``--record-every`` and ``--record-length``; the verb has ``--force``."""
    for option in reversed(
        (
            click.option(
                "--record",
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Keep a flight recording there, for `replay`.",
            ),
            click.option(
                "--record-every",
                type=POSITIVE,
                metavar="N",
                help="Blocks between two saved states [default: 64].",
            ),
            click.option(
                "--record-length",
                type=click.IntRange(min=1 << 12),
                metavar="N",
                help="Passes and commits that are kept [default: 65536].",
            ),
        )
    ):
        function = option(function)
    return function


def check_record(options: dict[str, Any]) -> None:
    """Refuse what cannot be recorded, before the bundle is opened.

    Raises:
        UsageError: where the folder is there already.
        click.UsageError: for options of a recording without one.
    """
    if options["record"] is not None:
        from fixedstate.runtime.recorder import check_folder

        check_folder(options["record"], options["force"])
    elif options["record_every"] or options["record_length"]:
        raise click.UsageError("--record-every and --record-length need --record")


@contextlib.contextmanager
def recorder(decoder: Decoder, bundle: Path, options: dict[str, Any]) -> Iterator[Watcher | None]:
    """What watches the decoding, where a recording was asked for.

    Args:
        decoder: What decodes.
        bundle: Its folder, as it was given.
        options: Of the command line; see :func:`check_record`.
    """
    folder = options["record"]
    if folder is None:
        yield None
        return
    names = ("record_every", "record_length")
    given = {name.removeprefix("record_"): options[name] for name in names if options[name]}
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.recorder import Recorder

    if not isinstance(decoder.bundle, Bundle):
        raise UsageError(
            f"--record takes a bundle, {bundle} is an engine: a recording names graphs, which a "
            "replay runs on ONNX Runtime; leave it out, or record the bundle"
        )
    with Recorder.start(
        folder,
        decoder.engine,
        decoder.bundle,
        name=str(bundle),
        threads=options["threads"],
        force=options["force"],
        **given,
    ) as started:
        yield started
    if started.header.unsaved:
        note(f"states were not saved in {folder}: {started.header.unsaved}")
