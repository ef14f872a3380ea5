"""Who answers: a decoder in this process, or whatever else keeps to the same protocol.

The front (:mod:`fixedstate.serve.app`) knows only :class:`Answers` and :class:`Answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from fixedstate.errors import (
    BusyError,
    CapacityError,
    DecodeError,
    StateError,
    UsageError,
)
from fixedstate.runtime.aio import AsyncAnswer, AsyncDecoder, Load
from fixedstate.runtime.decoder import Decoder
from fixedstate.runtime.requests import Request, Result, Settings
from fixedstate.serve.asked import Asked, Limits
from fixedstate.serve.stops import StopTexts

if TYPE_CHECKING:
    from fixedstate.runtime.text import Text

_LONG = 1 << 14  # characters from which a text is encoded beside the event loop


@dataclass(frozen=True, slots=True)
class Piece:
    """A finished block as it is sent.

    Attributes:
        token_ids: Its new tokens.
        text: The text that they complete, up to a stop text; empty without a tokenizer.
    """

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended.

    Attributes:
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        error: What went wrong, where the reason is ``error``.
        new_tokens: Tokens of the answer.
        denoise_passes: Passes that they took; None where it is not known, as of a Triton server
            whose answer was cut here.
        state: The bytes of the state behind the answer, where it was asked for.
    """

    finish_reason: str
    error: str | None
    new_tokens: int
    denoise_passes: int | None
    state: bytes | None = None


class Answer(Protocol):
    """One request on its way; iterated piece by piece, the last one with the ending known."""

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, those of a saved state among them; None where not known yet."""
        ...

    @property
    def ending(self) -> Ending | None:
        """How it ended; None before its last piece."""
        ...

    async def next(self) -> Piece | None:
        """The next piece; None behind the last.

        Raises:
            UsageError, CapacityError, StateError: for a request that is wrong.
            BusyError: where there is no place for it.
            FixedStateError: where it cannot go on.
        """
        ...

    def cancel(self) -> None:
        """End it before the next pass; nothing if it has ended."""
        ...


class Answers(Protocol):
    """What answers requests; used by ``async with``."""

    @property
    def slots(self) -> int:
        """Requests that run together."""
        ...

    @property
    def load(self) -> Load | None:
        """What it is busy with; None where it is not known here."""
        ...

    @property
    def broken(self) -> str:
        """Why nothing can be answered any more; empty while all is well."""
        ...

    async def warm(self) -> None:
        """Answer one short request, so that the first real one finds everything in place."""
        ...

    async def ask(self, asked: Asked) -> Answer:
        """Begin to answer.

        Raises:
            BusyError: where too many requests wait.
            UsageError, CapacityError: for a request that is wrong or does not fit.
        """
        ...

    def cancel_all(self) -> None:
        """End every open request before the next pass."""
        ...

    async def __aenter__(self) -> Answers: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class LocalAnswers:
    """Answers of a decoder in this process.

    Args:
        decoder: Its slots are the requests that run together.
        text: Its tokenizer; None where it has none.
        limits: Of the server.
    """

    def __init__(self, decoder: Decoder, text: Text | None, limits: Limits) -> None:
        self._decoder, self._text, self._limits = decoder, text, limits
        self._front = AsyncDecoder(decoder, queue_limit=limits.queue)
        self._open: set[LocalAnswer] = set()
        self._broken = ""

    @property
    def slots(self) -> int:
        """Requests that run together."""
        return self._decoder.engine.slots

    @property
    def load(self) -> Load:
        """What the decoder was busy with after its last pass."""
        return self._front.load

    @property
    def broken(self) -> str:
        """What ended the thread that decodes; empty while it lives."""
        return self._broken

    async def __aenter__(self) -> LocalAnswers:
        await self._front.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._front.__aexit__(kind, error, trace)

    async def warm(self) -> None:
        """Commit a block and denoise two, or what the context limit leaves room for.

        Raises:
            FixedStateError: where not even one token can be answered.
        """
        spec = self._decoder.spec
        length = spec.block_len
        try:
            result = await self._warmed(Request([spec.any_token] * length, _quick(length + 1)))
        except CapacityError:
            result = await self._warmed(Request([spec.any_token], _quick(1)))
        if result.finish_reason == "error":
            raise DecodeError(f"the first answer failed: {result.error}")

    async def _warmed(self, request: Request) -> Result:
        try:
            return await self._front.generate(request)
        except CapacityError:
            raise
        except Exception as err:
            self._broken = str(err)
            raise

    async def ask(self, asked: Asked) -> LocalAnswer:
        """Begin to answer; as :meth:`Answers.ask`."""
        if asked.text is not None and len(asked.text) > _LONG:
            request = await asyncio.to_thread(asked.request, self._text, self._limits)
        else:
            request = asked.request(self._text, self._limits)
        try:
            events = self._front.stream(request)
        except CapacityError as err:
            raise BusyError(str(err)) from err
        except UsageError as err:  # closed: nothing about the request
            raise BusyError(str(err)) from err
        except Exception as err:
            self._broken = str(err)
            raise
        answer = LocalAnswer(self, events, request, self._text, asked.stop)
        self._open.add(answer)
        return answer

    def cancel_all(self) -> None:
        """End every open request before the next pass."""
        for answer in list(self._open):
            answer.cancel()

    def over(self, answer: LocalAnswer, error: Exception | None = None) -> None:
        """An answer has ended; by an error that is not the request's, all of them have."""
        self._open.discard(answer)
        if error is not None and not isinstance(error, (UsageError, CapacityError, StateError)):
            self._broken = str(error)


class LocalAnswer:
    """An answer of a decoder in this process; as :class:`Answer`.

    Args:
        answers: Whose it is.
        events: Its blocks.
        request: As it was submitted.
        text: The tokenizer; None where there is none.
        stop: Texts that end it.
    """

    def __init__(
        self,
        answers: LocalAnswers,
        events: AsyncAnswer,
        request: Request,
        text: Text | None,
        stop: Sequence[str],
    ) -> None:
        self._answers, self._events = answers, events
        self._pieces = text.incremental() if text else None
        self._stop = StopTexts(stop)
        self.prompt_tokens: int | None = request.prompt_tokens
        self.ending: Ending | None = None

    async def next(self) -> Piece | None:
        """The next piece; as :meth:`Answer.next`."""
        if self.ending is not None:
            return None
        try:
            return await self._next()
        except (Exception, asyncio.CancelledError) as err:
            self.cancel()
            self._answers.over(self, err if isinstance(err, Exception) else None)
            raise

    async def _next(self) -> Piece:
        event = await self._events.__anext__()  # the last one bears a reason, so it is never over
        last = event.finish_reason is not None
        text = self._text(event.token_ids, last=last)
        found = self._stop.found
        if found and not last:
            self.cancel()
        if found or last:
            await self._end("stop" if found else None)
        return Piece(event.token_ids, text)

    def _text(self, token_ids: Sequence[int], *, last: bool) -> str:
        """What a block adds to the text, up to a stop text."""
        if self._pieces is None:
            return ""
        text = self._stop.push(self._pieces.push(token_ids))
        if last:
            text += self._stop.push(self._pieces.finish()) + self._stop.finish()
        return text

    async def _end(self, reason: str | None) -> None:
        """Take what is left of the answer and note how it ended."""
        async for _ in self._events:
            pass
        result = self._events.result
        self.ending = Ending(
            finish_reason=reason or result.finish_reason,
            error=None if reason else result.error,
            new_tokens=result.new_tokens,
            denoise_passes=result.denoise_passes,
            state=result.state.to_bytes() if result.state else None,
        )
        self._answers.over(self)

    def cancel(self) -> None:
        """End it before the next pass; nothing if it has ended."""
        self._events.cancel()
        if self.ending is None:
            self._answers.over(self)


def _quick(new: int) -> Settings:
    return Settings(max_new_tokens=new, stop_ids=(), temperature=0.0)
