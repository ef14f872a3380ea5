"""``fixedstate chat``: a conversation whose state is kept, so that nothing is computed twice."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.interrupt import INTERRUPTED, held_interrupt
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
from fixedstate.cli.options import bundle_argument, debug_option, prompt_text
from fixedstate.cli.output import byte_text, note
from fixedstate.errors import FixedStateError, UsageError

if TYPE_CHECKING:
    from fixedstate.runtime import Decoder, Result, Settings
    from fixedstate.runtime.snapshot import Snapshot
    from fixedstate.runtime.text import Text

_PLACE = "{text}"
_UNDO = 16  # turns that can be taken back
_ESCAPES = (("\\n", "\n"), ("\\t", "\t"))


def _turn(value: str) -> str:
    if _PLACE not in value:
        raise click.BadParameter(f"{value!r} does not say where the line goes: write {_PLACE}.")
    for written, meant in _ESCAPES:
        value = value.replace(written, meant)
    return prompt_text(value)


turn_option = click.option(
    "--turn",
    type=_turn,
    default=_PLACE + "\\n",
    metavar="TEMPLATE",
    help="What a line becomes, {text} in its place, \\n for a line break [default: {text}\\n].",
)


@click.command("chat", short_help="Talk to a bundle, line by line, its state kept.")
@bundle_argument
@prefix_option
@turn_option
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the state there at the end.",
)
@click.option("--force", is_flag=True, help="Replace what is at --save.")
@settings_options
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line per answer.")
@debug_option
@click.pass_context
def command(context: click.Context, /, bundle: Path, as_json: bool, **options: Any) -> None:
    """Answer lines from standard input with BUNDLE, each with all before it in mind.

    The state behind an answer is where the next turn begins: no token is computed twice, and a
    turn costs the same after a thousand others. Blank lines are left out. Lines that begin with /
    are commands: /undo forgets the last turn, /save FILE writes the state (`--prefix` goes on from
    it), /quit ends; // stands for a / of the text. Ctrl-C ends an answer and keeps its finished
    blocks; a second one, or one between two answers, ends with 130. A turn that fails is forgotten,
    and makes the exit code 1.
    """
    if options["save"] is not None:
        check_file(options["save"], options["force"])
    from fixedstate import runtime

    settings = runtime.Settings(**given_settings(options))
    decoder = open_decoder(bundle, options, 1)
    from fixedstate.runtime.snapshot import stateful

    stateful(decoder.engine)
    text = open_text(decoder.bundle, False)
    if text is None:
        raise UsageError(f"{bundle} has no tokenizer, so there is no text to talk in")
    prefix = open_prefix(options["prefix"], decoder)
    chat = Chat(decoder, text, settings, options["turn"], prefix, as_json=as_json)
    try:
        code = chat.run()
    finally:
        if options["save"] is not None:
            chat.save(options["save"])
    context.exit(code)


class Chat:
    """A conversation.

    Args:
        decoder: With one slot.
        text: The bundle's tokenizer.
        settings: Of every answer.
        turn: What a line becomes, ``{text}`` in its place.
        state: The saved state that it goes on from.
        as_json: Whether answers are printed as JSON objects.

    Attributes:
        state: Behind the last answer; None before the first token.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: Text,
        settings: Settings,
        turn: str,
        state: Snapshot | None = None,
        *,
        as_json: bool = False,
    ) -> None:
        self.state = state
        self._decoder, self._text, self._settings = decoder, text, settings
        self._turn = turn
        self._as_json = as_json
        self._before: deque[Snapshot | None] = deque(maxlen=_UNDO)
        self._failed = False

    def run(self) -> int:
        """Answer every line; returns the exit code."""
        try:
            for line in _lines():
                if line.startswith("/") and not line.startswith("//"):
                    if not self._command(line):
                        break
                elif line.strip():
                    self._guarded(line.removeprefix("/") if line.startswith("//") else line)
        except KeyboardInterrupt:
            note("interrupted")
            return INTERRUPTED
        return int(self._failed)

    def _guarded(self, line: str) -> None:
        """Answer a line; what cannot be answered is said, and the chat goes on without it."""
        try:
            self._answer(line)
        except FixedStateError as err:
            self._complain(str(err))

    def _complain(self, words: str) -> None:
        self._failed = True
        click.echo(f"error: {' '.join(words.split())}", err=True)

    # --- a turn

    def _answer(self, line: str) -> None:
        from fixedstate.runtime import Request

        try:
            line.encode()
        except UnicodeEncodeError:
            raise UsageError("the line is not UTF-8") from None
        words = self._turn.replace(_PLACE, line)
        prompt = self._text.encode(words, goes_on=tokens_of(self.state) > 0)
        request = Request(prompt, self._settings, prefix=self.state, keep_state=True)
        pieces = self._text.incremental()
        with held_interrupt() as interrupt, self._decoder.scheduler() as scheduler:
            number = scheduler.submit(request)
            while not scheduler.ended(number):
                if interrupt.asked:
                    scheduler.cancel(number)
                    break
                for event in scheduler.tick():
                    if not self._as_json:
                        click.echo(pieces.push(event.token_ids), nl=False)
            result = scheduler.result(number)
        if self._as_json:
            known = tokens_of(self.state)
            data = document(
                result,
                self._text,
                seed=self._settings.seed,
                prompt_tokens=len(prompt),
                prefix_tokens=known,
            )
            click.echo(json.dumps(data, ensure_ascii=False, allow_nan=False))
        else:
            click.echo(pieces.finish())
        self._keep(result)

    def _keep(self, result: Result) -> None:
        """Go on from the state behind an answer."""
        if result.state is None:
            why = result.error or "it was ended before its prompt was read"
            if result.finish_reason == "cancelled":
                note(f"this turn is forgotten: {why}")
            else:
                self._complain(f"this turn is forgotten: {why}")
            return
        self._before.append(self.state)
        self.state = result.state
        note(
            f"{result.new_tokens} tokens ({result.finish_reason}), {result.denoise_passes} passes; "
            f"context {tokens_of(self.state)} tokens, state {byte_text(self.state.nbytes)}"
        )

    # --- commands

    def _command(self, line: str) -> bool:
        """Carry out a command; False where it ends the chat."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "/quit" and not rest:
            return False
        if word == "/undo" and not rest:
            self._undo()
        elif word == "/save" and rest:
            try:
                check_file(Path(rest), False)
                self.save(Path(rest))
            except FixedStateError as err:
                self._complain(str(err))
        else:
            self._complain(
                f"no command {line.strip()!r}: use /undo, /save FILE or /quit, and // for a text "
                "that begins with /"
            )
        return True

    def _undo(self) -> None:
        if not self._before:
            self._complain(f"no turn to take back (the last {_UNDO} are kept)")
            return
        self.state = self._before.pop()
        note(f"the last turn is forgotten; context {tokens_of(self.state)} tokens")

    def save(self, file: Path) -> None:
        """Write the state; nothing where nothing was said."""
        if self.state is None:
            note(f"{file} was not written: nothing was said")
            return
        self.state.save(file)
        note(f"{file}: {tokens_of(self.state)} tokens, {byte_text(self.state.nbytes)}")


def _lines() -> Iterator[str]:
    """Lines of standard input, without their ends; a prompt sign where a person types them."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines
        with contextlib.suppress(EOFError):
            while True:
                yield input("> ")
        return
    for raw in sys.stdin.buffer:
        yield raw.decode("utf-8", "surrogateescape").rstrip("\r\n")
