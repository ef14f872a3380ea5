"""``fixedstate client``: a prompt for a running Triton server, answered block by block."""

from __future__ import annotations

import base64
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.interrupt import INTERRUPTED
from fixedstate.cli.opening import check_file, given_settings, prefix_option, settings_options
from fixedstate.cli.options import (
    debug_option,
    json_option,
    prompt_file,
    prompt_text,
    real,
    token_ids,
)
from fixedstate.cli.output import echo_json, note

if TYPE_CHECKING:
    from fixedstate.serve.tritonstream import Block


@click.command("client", short_help="Ask a running Triton server.")
@click.argument("url", metavar="HOST:PORT")
@click.option("--prompt", type=prompt_text, metavar="TEXT", help="Text to go on from.")
@click.option("--prompt-ids", type=token_ids, metavar="IDS", help="Token ids such as 1,2,3.")
@click.option("--prompt-file", type=prompt_file, metavar="FILE", help="UTF-8 file; - is stdin.")
@click.option("--model", default="fixedstate", show_default=True, help="Name of the model.")
@click.option(
    "--deadline",
    type=real(0.001),
    metavar="SECONDS",
    default="60",
    show_default=True,
    help="Give up where a block takes longer.",
)
@settings_options
@prefix_option
@click.option(
    "--save-state",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the state behind the answer.",
)
@click.option("--force", is_flag=True, help="Replace what is at --save-state.")
@click.option(
    "--stream/--no-stream",
    default=True,
    help="Print text as blocks finish [default: stream].",
)
@json_option
@debug_option
@click.pass_context
def command(
    context: click.Context,
    /,
    url: str,
    model: str,
    deadline: float,
    stream: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Ask the model of a Triton server at HOST:PORT, its gRPC port, and print the answer.

    Ctrl-C cancels the request, keeps the finished blocks and exits with 130.
    """
    prompts = [options[name] for name in ("prompt", "prompt_ids", "prompt_file")]
    if sum(prompt is not None for prompt in prompts) != 1:
        raise click.UsageError("give --prompt, --prompt-ids or --prompt-file, one of them")
    if options["save_state"] is not None:
        check_file(options["save_state"], options["force"])
    ids = options["prompt_ids"]
    text = None if ids is not None else next(p for p in prompts if p is not None)
    shown = stream and not as_json
    blocks: list[Block] = []
    start = time.perf_counter()
    interrupted = False
    from fixedstate.serve.tritonstream import TritonClient

    with TritonClient(url, model, deadline) as client:
        answer = client.stream(text=text, ids=ids, parameters=_parameters(options))
        with contextlib.closing(answer):  # type: ignore[type-var]
            try:
                for block in answer:
                    blocks.append(block)
                    if shown:
                        click.echo(_shown(block, len(blocks) == 1), nl=False)
            except KeyboardInterrupt:
                interrupted = True
    seconds = time.perf_counter() - start
    if options["save_state"] is not None:
        _save(options["save_state"], blocks)
    if as_json:
        echo_json(_document(blocks, seconds))
    else:
        click.echo("" if shown else "".join(_shown(b, i == 0) for i, b in enumerate(blocks)))
    if interrupted:
        note("interrupted; finished blocks were kept")
        context.exit(INTERRUPTED)


def _parameters(options: dict[str, Any]) -> dict[str, Any]:
    given = given_settings(options)
    if options["prefix"] is not None:
        from fixedstate.runtime.snapshot import Snapshot

        state = Snapshot.load(options["prefix"])  # refused here where it is damaged
        given["state"] = base64.b64encode(state.to_bytes()).decode()
    if options["save_state"] is not None:
        given["return_state"] = True
    return given


def _shown(block: Block, first: bool) -> str:
    """Its text, or its ids where the server has no tokenizer."""
    if block.text or not block.token_ids:
        return block.text
    return ("" if first else ",") + ",".join(map(str, block.token_ids))


def _save(file: Path, blocks: list[Block]) -> None:
    from fixedstate.runtime.snapshot import Snapshot

    if not blocks or not blocks[-1].state:
        note(f"{file} was not written: no state came with the answer")
        return
    data = base64.b64decode(blocks[-1].state)
    Snapshot.from_bytes(data, "the state from the server").save(file)


def _document(blocks: list[Block], seconds: float) -> dict[str, Any]:
    return {
        "text": "".join(block.text for block in blocks),
        "token_ids": [token for block in blocks for token in block.token_ids],
        "finish_reason": blocks[-1].finish_reason or "cancelled" if blocks else "cancelled",
        "blocks": len(blocks),
        "prompt_tokens": blocks[-1].prompt_tokens if blocks else None,
        "denoise_passes": blocks[-1].denoise_passes if blocks else None,
        "seconds": seconds,
    }
