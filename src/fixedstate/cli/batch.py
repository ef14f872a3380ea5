"""``generate --prompts``: a file of prompts, answered as slots get free, resumed after any end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.interrupt import INTERRUPTED, held_interrupt
from fixedstate.cli.journal import Journal
from fixedstate.cli.opening import (
    check_file,
    document,
    given_settings,
    open_decoder,
    open_prefix,
    open_text,
    tokens_of,
)
from fixedstate.cli.output import echo_json, note, progress
from fixedstate.cli.promptfile import Prompt, PromptFile, scan
from fixedstate.cli.record import recorder
from fixedstate.errors import FixedStateError, UsageError

if TYPE_CHECKING:
    from fixedstate.runtime import Decoder, Result
    from fixedstate.runtime.scheduler import Scheduler, Watcher

_ERRORS = 5  # wrong lines that are named at once


def run_batch(
    bundle: Path,
    options: dict[str, Any],
    as_json: bool,
    watch: Callable[[Decoder], Decoder],
) -> int:
    """Answer a file of prompts, or the rest of it; returns the exit code.

    Args:
        bundle: The bundle's folder.
        options: Of `generate`.
        as_json: Whether a summary is printed instead of the path.
        watch: What the decoder goes through once it is open.
    """
    _check(options)
    source, out = options["prompts_file"], options["output"]
    start = time.perf_counter()
    digest, count = scan(source)
    decoder = watch(open_decoder(bundle, options, min(count, options["slots"])))
    prefix = open_prefix(options["prefix"], decoder)
    given = given_settings(options)
    if options["prefix_cache"]:
        keep_prefixes(decoder, options["prefix_cache"])
    identity = {
        "bundle": decoder.bundle.digest,
        "prompts": digest,
        "settings": given,
        "prefix": None if prefix is None else hashlib.sha256(prefix.to_bytes()).hexdigest(),
        "provider": options["provider"],
    }
    prompts = PromptFile(source, given, open_text(decoder.bundle, False), prefix)
    with progress("checking the prompts"):
        _check_all(prompts, decoder)
    with Journal(Path(f"{out}.partial"), identity, restart=options["restart"]) as journal:
        if resumed := len(journal):
            note(f"{resumed} of {count} prompts were finished before; going on with the others")
        with recorder(decoder, bundle, options) as watcher:
            batch = _Batch(decoder, prompts, journal, count)
            whole = batch.run(watcher)
        if not whole:
            note(
                f"interrupted; {len(journal)} of {count} prompts are finished and kept in "
                f"{journal.path}: the same command goes on with the others"
            )
            return INTERRUPTED
        if scan(source)[0] != digest:
            raise UsageError(
                f"{source} changed while it was decoded: put it back, or add --restart"
            )
        failed = journal.failed
        journal.finish(out, count)
    summary = {
        "path": str(out),
        "prompts": count,
        "resumed": resumed,
        "failed": failed,
        "seconds": time.perf_counter() - start,
        "prefix_cache": _counters(decoder),
    }
    if as_json:
        echo_json(summary)
    else:
        click.echo(str(out))
    if failed:
        some = ", ".join(str(index) for index in failed[:_ERRORS])
        more = ", ..." if len(failed) > _ERRORS else ""
        click.echo(
            f"error: {len(failed)} of {count} prompts failed (index {some}{more}): see `error` "
            f"in {out}",
            err=True,
        )
    return int(bool(failed))


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that do not go with a file of prompts."""
    for name, option, why in (
        ("prompts", "--prompt", "put it into the file"),
        ("prompt_ids", "--prompt-ids", "put them into the file"),
        ("prompt_files", "--prompt-file", "put it into the file"),
        ("save_state", "--save-state", "it takes one prompt"),
        ("watch", "--watch", "it shows a few prompts"),
    ):
        if options[name]:
            raise click.UsageError(f"{option} does not go with --prompts: {why}")
    if options["samples"] > 1:
        raise click.UsageError(
            "--samples does not go with --prompts: write a line for each seed; --prefix-cache "
            "keeps their prompt from being committed again"
        )
    if options["prefix_cache"] and options["prefix"] is not None:
        raise click.UsageError(
            "--prefix-cache does not go with --prefix: it keeps beginnings from the first token on"
        )
    if options["output"] is None:
        raise click.UsageError("--prompts needs -o OUT: where the answers go")
    check_file(options["output"], options["force"])


def keep_prefixes(decoder: Decoder, size: int) -> None:
    """Keep the states of beginnings, up to that many bytes.

    Raises:
        UsageError: for a model without state.
    """
    from fixedstate.runtime.prefix import PrefixStore
    from fixedstate.runtime.snapshot import stateful

    stateful(decoder.engine)
    decoder.prefixes = PrefixStore(size)


def _counters(decoder: Decoder) -> dict[str, int] | None:
    store = decoder.prefixes
    if store is None:
        return None
    names = ("hits", "misses", "evictions", "refused", "tokens_saved", "bytes", "max_bytes")
    return {name: getattr(store, name) for name in names}


def _check_all(prompts: PromptFile, decoder: Decoder) -> None:
    """Refuse the file where a line is wrong, naming the first few.

    Raises:
        UsageError: with line numbers and reasons.
    """
    wrong: list[str] = []
    with decoder.scheduler() as scheduler:
        for line in prompts.lines():
            try:
                scheduler.check(prompts.read(line).request)
            except FixedStateError as err:
                wrong.append(f"line {line.number}: {err}")
            if len(wrong) == _ERRORS:
                wrong.append("there may be more")
                break
    if wrong:
        raise UsageError(f"{prompts.path}: {'; '.join(wrong)}")


@dataclass
class _Batch:
    """The prompts on their way: few wait, as many as there are slots run, the rest is on disk."""

    decoder: Decoder
    prompts: PromptFile
    journal: Journal
    count: int

    def run(self, watcher: Watcher | None) -> bool:
        """Answer what the journal lacks; False where Ctrl-C ended it."""
        missing = self._missing()
        running: dict[int, Prompt] = {}
        with (
            progress("decoding") as tell,
            held_interrupt() as interrupt,
            self.decoder.scheduler(watcher=watcher) as scheduler,
        ):
            while not interrupt.asked:
                # As many wait as may get a slot in the next tick.
                for prompt in islice(missing, scheduler.slots - scheduler.waiting):
                    running[scheduler.submit(prompt.request)] = prompt
                if not running:
                    return True
                scheduler.tick()
                self._collect(scheduler, running)
                tell(f"decoding: {len(self.journal)} of {self.count} prompts are finished")
        return False

    def _missing(self) -> Iterator[Prompt]:
        for line in self.prompts.lines():
            if line.index not in self.journal:
                yield self.prompts.read(line)

    def _collect(self, scheduler: Scheduler, running: dict[int, Prompt]) -> None:
        for number in [n for n in running if scheduler.ended(n)]:
            prompt, result = running.pop(number), scheduler.result(number)
            self.journal.append(self._document(prompt, result))

    def _document(self, prompt: Prompt, result: Result) -> dict[str, Any]:
        request = prompt.request
        return {
            "index": prompt.line.index,
            "id": prompt.id,
            **document(
                result,
                self.prompts.text,
                seed=request.settings.seed,
                prompt_tokens=len(request.prompt_ids),
                prefix_tokens=tokens_of(request.prefix),
            ),
        }
