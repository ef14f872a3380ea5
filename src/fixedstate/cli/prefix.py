"""``fixedstate prefix``: the state behind a long beginning, made once and kept in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.opening import check_file
from fixedstate.cli.options import (
    bundle_argument,
    debug_option,
    force_option,
    json_option,
    prompt_file,
    threads_option,
    token_ids,
)
from fixedstate.cli.output import echo_json, progress

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.enginefile import EngineFolder
    from fixedstate.runtime.snapshot import Snapshot


@click.group(
    "prefix", short_help="Save the state behind a prompt's beginning.", no_args_is_help=False
)
@debug_option
def command() -> None:
    """Save the state behind a beginning that many prompts share, and look at saved states."""


@command.command("make", short_help="Commit a text and save the state behind it.")
@bundle_argument
@click.option("--text", type=prompt_file, metavar="FILE", help="UTF-8 file; - is stdin.")
@click.option("--ids", type=token_ids, metavar="IDS", help="Token ids such as 1,2,3.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write."
)
@threads_option
@force_option
@json_option
@debug_option
def make(
    bundle: Path,
    text: str | None,
    ids: tuple[int, ...] | None,
    output: Path,
    threads: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Commit a text with BUNDLE and save the state behind it.

    Prompts go on from the file with the same bundle, wherever both are copied. The file grows with
    the text only where attention looks at the whole prefix.
    """
    if (text is None) == (ids is None):
        raise click.UsageError("give --text or --ids: one of them")
    from fixedstate import runtime

    check_file(output, force)

    with progress("opening the bundle") as tell, runtime.load(bundle, threads=threads) as decoder:
        tokens = _tokens(decoder.bundle, text) if text is not None else ids
        if not tokens:
            raise click.UsageError("the prefix is empty: there is nothing to save")
        tell(f"committing {len(tokens)} tokens")
        start = time.perf_counter()
        state = decoder.prefill(tokens)
        seconds = time.perf_counter() - start
        state.save(output)
    if as_json:
        echo_json({"path": str(output), **describe(state), "seconds": seconds})
        return
    click.echo(
        f"{len(tokens):,} tokens ({len(state.pending)} pending), {state.nbytes:,} bytes of state, "
        f"{seconds * 1e3:.0f} ms",
        err=True,
    )
    click.echo(str(output))


@command.command("show", short_help="Print what a saved state holds, as JSON.")
@click.argument("file", type=click.Path(path_type=Path))
@debug_option
def show(file: Path) -> None:
    """Check FILE and print what it holds and belongs to as one JSON document."""
    from fixedstate.runtime.snapshot import Snapshot

    echo_json({"path": str(file), **describe(Snapshot.load(file))})


def describe(state: Snapshot) -> dict[str, Any]:
    """Everything ``prefix show`` says about a saved state, ready for JSON.

    Args:
        state: A saved state.

    Returns:
        Format, hash of the weights, tokens, seed, bytes, and the tensors with shape and dtype.
    """
    from fixedstate.runtime.snapshot import FORMAT

    return {
        "format": FORMAT,
        "weights": state.weights,
        "block_len": state.block_len,
        "past_length": state.past_length,
        "pending": list(state.pending),
        "seed": state.seed,
        "last_logits": state.last_logits is not None,
        "bytes": state.nbytes,
        "tensors": [
            {
                "name": port.suffix,
                "shape": list(state.arrays[port.suffix].shape),
                "dtype": port.past.dtype,
                "bytes": state.arrays[port.suffix].nbytes,
            }
            for port in state.state.committed
        ],
    }


def _tokens(bundle: Bundle | EngineFolder, text: str) -> list[int]:
    from fixedstate.runtime.text import Text

    return Text.open(bundle).encode(text)
