"""``fixedstate generate``: prompts in, text out, block by block as it is finished."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.interrupt import INTERRUPTED
from fixedstate.cli.opening import (
    check_file,
    document,
    engine_options,
    given_settings,
    open_decoder,
    open_prefix,
    open_text,
    prefix_option,
    settings_options,
    tokens_of,
)
from fixedstate.cli.options import (
    POSITIVE,
    bundle_argument,
    debug_option,
    json_option,
    prompt_file,
    prompt_text,
    token_ids,
)
from fixedstate.cli.output import echo_json, note, progress
from fixedstate.cli.record import check_record, record_options, recorder
from fixedstate.cli.trace import check_trace, trace_options, traced

if TYPE_CHECKING:
    from fixedstate.runtime import Decoder, Request, Result
    from fixedstate.runtime.scheduler import Watcher
    from fixedstate.runtime.snapshot import Snapshot
    from fixedstate.runtime.text import Text


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
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines, a prompt each; needs -o.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the answers to --prompts go, as JSON lines.",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Throw away what an interrupted --prompts has finished.",
)
@click.option(
    "--prefix-cache",
    type=POSITIVE,
    metavar="BYTES",
    help="Keep states of beginnings that --prompts share.",
)
@prefix_option
@click.option(
    "--save-state",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the state behind the answer (one prompt).",
)
@click.option("--force", is_flag=True, help="Replace what is at -o and at other files to write.")
@click.option(
    "--samples",
    type=POSITIVE,
    metavar="N",
    default=1,
    help="Answers to each prompt, with seeds SEED, SEED + 1, ... [default: 1].",
)
@click.option(
    "--slots",
    type=POSITIVE,
    metavar="N",
    default=16,
    help="Answers decoded at once [default: 16].",
)
@settings_options
@engine_options
@click.option(
    "--stream/--no-stream",
    default=True,
    help="Print text as blocks finish (one prompt) [default: stream].",
)
@click.option("--watch", is_flag=True, help="Show the slots being filled, on the terminal.")
@record_options
@trace_options
@json_option
@debug_option
@click.pass_context
def command(context: click.Context, /, bundle: Path, as_json: bool, **options: Any) -> None:
    """Decode one or more prompts with BUNDLE.

    An empty prompt is allowed. Prompts are answered in the order --prompt, --prompt-ids,
    --prompt-file, several at once; each is decoded as if it were alone. Ctrl-C keeps the finished
    blocks and exits with 130; where a prompt fails the others are printed and the exit code is 1.

    With --prompts the answers are kept in OUT.partial as they are finished; the same command takes
    up what is missing after any interruption, and OUT appears once all are there.
    """
    check_record(options)
    check_trace(options)
    if options["prompts_file"] is not None:
        from fixedstate.cli.batch import run_batch

        with traced(options) as watch:
            code = run_batch(bundle, options, as_json, watch)
        context.exit(code)
    with traced(options) as watch:
        job = _prepare(bundle, options, watch)
        shown = job.stream_here(as_json)
        with recorder(job.decoder, bundle, options) as watcher:
            results = job.run(shown, watcher)
    if options["save_state"] is not None:
        _save(options["save_state"], results[0])
    if as_json:
        documents = [job.document(index, result) for index, result in enumerate(results)]
        echo_json(documents[0] if len(documents) == 1 else documents)
    elif not shown:
        job.echo(results)
    context.exit(job.report(results))


def _prepare(bundle: Path, options: dict[str, Any], watch: Callable[[Decoder], Decoder]) -> Job:
    """Check what was asked, open the bundle, encode the prompts and commit what is shared."""
    prompts = [*options["prompts"], *options["prompt_ids"], *options["prompt_files"]]
    _check(options, len(prompts))
    from fixedstate import runtime

    samples, given = options["samples"], given_settings(options)
    seed = given.pop("seed", 0)
    settings = [runtime.Settings(**given, seed=seed + sample) for sample in range(samples)]
    slots = min(len(prompts) * samples, options["slots"])
    decoder = watch(open_decoder(bundle, options, slots))
    prefix = open_prefix(options["prefix"], decoder)
    text = open_text(decoder.bundle, any(isinstance(prompt, str) for prompt in prompts))
    goes_on = tokens_of(prefix) > 0
    ids = [
        text.encode(row, goes_on=goes_on) if text and isinstance(row, str) else row
        for row in prompts
    ]
    keep = options["save_state"] is not None
    requests = [runtime.Request(row, one, prefix, keep) for row in ids for one in settings]
    if samples > 1:
        requests = _fork(decoder, requests, samples)
    return Job(
        decoder,
        text,
        requests,
        [len(row) for row in ids],
        prefix,
        watch=options["watch"],
        stream=options["stream"],
    )


def _check(options: dict[str, Any], prompts: int) -> None:
    """Refuse options that do not go together."""
    if not prompts:
        raise click.UsageError("no prompt: give --prompt, --prompt-ids, --prompt-file or --prompts")
    for name, option in (
        ("output", "-o"),
        ("restart", "--restart"),
        ("prefix_cache", "--prefix-cache"),
    ):
        if options[name]:
            raise click.UsageError(f"{option} goes with --prompts FILE")
    if options["save_state"] is not None:
        if prompts * options["samples"] > 1:
            raise click.UsageError("--save-state takes one prompt and one sample: one state")
        check_file(options["save_state"], options["force"])


def _fork(decoder: Decoder, requests: list[Request], samples: int) -> list[Request]:
    """The same requests going on from their prompts' states, each prompt committed once."""
    if not decoder.engine.whole_blocks:
        return requests  # no state: a prompt is part of every pass
    with decoder.scheduler() as scheduler:
        for request in requests:
            scheduler.check(request)  # all of them before the first pass
    forked = []
    with progress("committing the prompts"):
        for first in range(0, len(requests), samples):
            one = requests[first]
            state = decoder.prefill(one.prompt_ids, prefix=one.prefix)
            forked += [
                replace(request, prompt_ids=(), prefix=state)
                for request in requests[first : first + samples]
            ]
    return forked


def _save(file: Path, result: Result) -> None:
    if result.state is None:
        note(f"{file} was not written: no state stands behind this answer")
    else:
        result.state.save(file)


class Job:
    """Some prompts on their way through a decoder.

    Args:
        decoder: The decoder.
        text: The bundle's tokenizer, if it has one.
        requests: Every sample of the first prompt, then of the second, and so on.
        prompt_tokens: Tokens of each prompt.
        prefix: The saved state that all go on from.
        watch: Whether the slots are shown being filled.
        stream: Whether text may be printed while it is made.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: Text | None,
        requests: list[Request],
        prompt_tokens: list[int],
        prefix: Snapshot | None = None,
        *,
        watch: bool = False,
        stream: bool = True,
    ) -> None:
        self.decoder, self.text, self.requests = decoder, text, requests
        self._prompt_tokens = prompt_tokens
        self._prefix_tokens = tokens_of(prefix)
        self._samples = len(requests) // len(prompt_tokens)
        self._stream = stream
        self._watch = watch and sys.stderr.isatty()
        if watch and not self._watch:
            note("--watch needs a terminal on standard error; decoding goes on without it")

    def stream_here(self, as_json: bool) -> bool:
        """Whether text is printed while it is made."""
        alone = len(self.requests) == 1 and self.text is not None
        return alone and self._stream and not (as_json or self._watch)

    def run(self, shown: bool, watcher: Watcher | None = None) -> list[Result]:
        """Decode all prompts; Ctrl-C ends the open ones as cancelled."""
        pieces = self.text.incremental() if self.text else None
        with self._view(shown) as view:
            stream = self.decoder.stream(
                self.requests, on_pass=view.on_pass if view else None, watcher=watcher
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

    def _shown(self, ids: Sequence[int]) -> str:
        """Text, or the ids themselves where the bundle has no tokenizer."""
        return self.text.decode(ids) if self.text else ",".join(map(str, ids))

    @contextlib.contextmanager
    def _view(self, shown: bool) -> Iterator[Any]:
        if self._watch:
            from fixedstate.cli.canvas import CanvasView

            prompts = [
                [*(request.prefix.pending if request.prefix else ()), *request.prompt_ids]
                for request in self.requests
            ]
            with CanvasView(self.decoder.spec, self._shown, prompts) as view:
                yield view
        elif shown:
            yield None
        else:
            with progress("decoding"):
                yield None

    def document(self, index: int, result: Result) -> dict[str, Any]:
        """What ``--json`` says about one answer."""
        return document(
            result,
            self.text,
            seed=self.requests[index].settings.seed,
            prompt_tokens=self._prompt_tokens[index // self._samples],
            prefix_tokens=self._prefix_tokens,
        )

    def echo(self, results: list[Result]) -> None:
        """Print every text; with several, each behind a line that numbers it."""
        for index, result in enumerate(results):
            if len(results) > 1:
                click.echo(f"=== {self._name(index)}")
            click.echo(self._shown(result.token_ids))

    def report(self, results: list[Result]) -> int:
        """Say how it went, and return the exit code."""
        for index, result in enumerate(results):
            if result.finish_reason == "error":
                click.echo(f"error: prompt {self._name(index)}: {result.error}", err=True)
            elif sys.stderr.isatty():
                click.echo(f"prompt {self._name(index)}: {_line(result)}", err=True)
        reasons = {result.finish_reason for result in results}
        if "cancelled" in reasons:
            note("interrupted; finished blocks were kept")
        return INTERRUPTED if "cancelled" in reasons else int("error" in reasons)

    def _name(self, index: int) -> str:
        prompt = str(index // self._samples + 1)
        if self._samples == 1:
            return prompt
        return f"{prompt}, seed {self.requests[index].settings.seed}"


def _line(result: Result) -> str:
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
    return ", ".join(filter(None, parts))
