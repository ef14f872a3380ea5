"""``fixedstate generate``: prompts in, text out, block by block as it is finished."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import (
    NATURAL,
    POSITIVE,
    SEED,
    bundle_argument,
    debug_option,
    json_option,
    prompt_file,
    prompt_text,
    real,
    threads_option,
    token_ids,
)
from fixedstate.cli.output import echo_json, note, progress
from fixedstate.cli.record import record_options, recorder

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.runtime import Decoder, Request, Result
    from fixedstate.runtime.scheduler import Watcher
    from fixedstate.runtime.text import Text

_SLOTS = 16  # prompts decoded at once; further ones wait for the next wave
_CANCELLED = 130


@click.command("generate", short_help="Decode prompts with a bundle.")
@bundle_argument
@click.option(
    "--prompt",
    "prompts",
    type=prompt_text,
    metavar="TEXT",
    multiple=True,
    help="Text to go on from.",
)
@click.option(
    "--prompt-ids", type=token_ids, metavar="IDS", multiple=True, help="Token ids such as 1,2,3."
)
@click.option(
    "--prompt-file",
    "prompt_files",
    type=prompt_file,
    metavar="FILE",
    multiple=True,
    help="UTF-8 file; - is stdin.",
)
@click.option(
    "--max-new-tokens",
    type=POSITIVE,
    metavar="N",
    help="Tokens that come back at most [default: 128].",
)
@click.option(
    "--min-new-tokens",
    type=NATURAL,
    metavar="N",
    help="Tokens before a stop id may stand [default: 0].",
)
@click.option(
    "--steps",
    type=POSITIVE,
    metavar="N",
    help="Denoise passes per block at most [default: the bundle's].",
)
@click.option(
    "--threshold",
    type=real(0, 1),
    metavar="P",
    help="Confidence that fills a slot early [default: the bundle's].",
)
@click.option(
    "--temperature",
    type=real(0),
    metavar="T",
    help="0 takes the likeliest token [default: the bundle's].",
)
@click.option(
    "--seed", type=SEED, metavar="N", help="Of every prompt, for temperatures above 0 [default: 0]."
)
@click.option(
    "--max-context",
    type=POSITIVE,
    metavar="N",
    help="Refuse prompts that need more tokens than this.",
)
@threads_option
@click.option(
    "--provider",
    default="cpu",
    show_default=True,
    help="Where the graphs run: cpu, cuda, tensorrt or tensorrt-rtx.",
)
@click.option("--allow-fallback", is_flag=True, help="Run on the CPU where the provider cannot.")
@click.option(
    "--stream/--no-stream",
    default=True,
    help="Print text as blocks finish (one prompt) [default: stream].",
)
@click.option("--watch", is_flag=True, help="Show the slots being filled, on the terminal.")
@record_options
@json_option
@debug_option
@click.pass_context
def command(context: click.Context, /, bundle: Path, as_json: bool, **options: Any) -> None:
    """Decode one or more prompts with BUNDLE.

    An empty prompt is allowed. Prompts are answered in the order --prompt, --prompt-ids,
    --prompt-file, several at once; each is decoded as if it were alone. Ctrl-C keeps the finished
    blocks and exits with 130; where a prompt fails the others are printed and the exit code is 1.
    """
    job = _prepare(bundle, options)
    shown = job.stream_here(as_json)
    with recorder(job.decoder, bundle, options) as job.watcher:
        results = job.run(shown)
    if as_json:
        documents = [job.document(index, result) for index, result in enumerate(results)]
        echo_json(documents[0] if len(documents) == 1 else documents)
    elif not shown:
        job.echo(results)
    context.exit(_report(results))


def _prepare(bundle: Path, options: dict[str, Any]) -> Job:
    """Check what was asked, open the bundle and encode the prompts."""
    prompts = [*options["prompts"], *options["prompt_ids"], *options["prompt_files"]]
    if not prompts:
        raise click.UsageError("no prompt: give --prompt, --prompt-ids or --prompt-file")
    from fixedstate import runtime

    names = ("max_new_tokens", "min_new_tokens", "steps", "threshold", "temperature", "seed")
    given = {name: options[name] for name in names if options[name] is not None}
    settings = runtime.Settings(**given)
    with progress("opening the bundle"):
        decoder = runtime.load(
            bundle,
            threads=options["threads"],
            provider=options["provider"],
            allow_fallback=options["allow_fallback"],
            slots=min(len(prompts), _SLOTS),
            limit=options["max_context"],
        )
    text = _text(decoder.bundle, any(isinstance(prompt, str) for prompt in prompts))
    ids = [text.encode(row) if text and isinstance(row, str) else row for row in prompts]
    requests = [runtime.Request(row, settings) for row in ids]
    return Job(decoder, text, requests, watch=options["watch"], stream=options["stream"])


def _text(bundle: Bundle, needed: bool) -> Text | None:
    """The bundle's tokenizer; None where it has none and every prompt is given as ids."""
    from fixedstate.runtime.text import TOKENIZER, Text

    return Text.open(bundle) if needed or TOKENIZER in bundle.files else None


class Job:
    """Some prompts on their way through a decoder."""

    def __init__(
        self,
        decoder: Decoder,
        text: Text | None,
        requests: list[Request],
        *,
        watch: bool = False,
        stream: bool = True,
    ) -> None:
        self.decoder, self.text, self.requests = decoder, text, requests
        self.watcher: Watcher | None = None
        self._stream = stream
        self._watch = watch and sys.stderr.isatty()
        if watch and not self._watch:
            note("--watch needs a terminal on standard error; decoding goes on without it")

    def stream_here(self, as_json: bool) -> bool:
        """Whether text is printed while it is made."""
        alone = len(self.requests) == 1 and self.text is not None
        return alone and self._stream and not (as_json or self._watch)

    def run(self, shown: bool) -> list[Result]:
        """Decode all prompts; Ctrl-C ends the open ones as cancelled."""
        pieces = self.text.incremental() if self.text else None
        with self._view(shown) as view:
            stream = self.decoder.stream(
                self.requests, on_pass=view.on_pass if view else None, watcher=self.watcher
            )
            try:
                for event in stream:
                    if shown and pieces:
                        click.echo(pieces.push(event.token_ids), nl=False)
                    if view:
                        view.on_block(event)
            except KeyboardInterrupt:
                pass
            finally:
                stream.close()
        if shown and pieces:
            click.echo(pieces.finish())
        return stream.results

    def _decode(self, ids: Sequence[int]) -> str | None:
        return self.text.decode(ids) if self.text else None

    def _shown(self, ids: Sequence[int]) -> str:
        """Text, or the ids themselves where the bundle has no tokenizer."""
        return self.text.decode(ids) if self.text else ",".join(map(str, ids))

    @contextlib.contextmanager
    def _view(self, shown: bool) -> Iterator[Any]:
        if self._watch:
            from fixedstate.cli.canvas import CanvasView

            prompts = [request.prompt_ids for request in self.requests]
            with CanvasView(self.decoder.spec, self._shown, prompts) as view:
                yield view
        elif shown:
            yield None
        else:
            with progress("decoding"):
                yield None

    def document(self, index: int, result: Result) -> dict[str, Any]:
        """What ``--json`` says about one prompt."""
        request = self.requests[index]
        return {
            "text": self._decode(result.token_ids),
            **result.to_dict(),
            "seed": request.settings.seed,
            "prompt_tokens": len(request.prompt_ids),
        }

    def echo(self, results: list[Result]) -> None:
        """Print every text; with several, each behind a line that numbers it."""
        for index, result in enumerate(results):
            if len(results) > 1:
                click.echo(f"=== {index + 1}")
            click.echo(self._shown(result.token_ids))


def _report(results: list[Result]) -> int:
    """Say how it went, and return the exit code."""
    for index, result in enumerate(results):
        if result.finish_reason == "error":
            click.echo(f"error: prompt {index + 1}: {result.error}", err=True)
        elif sys.stderr.isatty():
            click.echo(_line(index, result), err=True)
    reasons = {result.finish_reason for result in results}
    if "cancelled" in reasons:
        note("interrupted; finished blocks were kept")
    return _CANCELLED if "cancelled" in reasons else int("error" in reasons)


def _line(index: int, result: Result) -> str:
    tokens, seconds = len(result.token_ids), result.seconds["total"]
    parts = (
        f"{tokens} tokens ({result.finish_reason})",
        f"{result.blocks} blocks",
        f"{result.denoise_passes} passes",
        f"{result.tokens_per_pass:.2f} tokens per pass",
        f"{tokens / seconds:.0f} tokens/s" if seconds > 0 else "",
        f"state {result.state_bytes:,} B",
        f"KV {result.kv_bytes:,} B",
        result.provider,
    )
    return f"prompt {index + 1}: {', '.join(filter(None, parts))}"
