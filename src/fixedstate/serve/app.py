"""The HTTP front: OpenAI's completions, health and measurements over whatever answers.

:func:`make_app` gives an ASGI application. Every request goes through :class:`Front`, which names
it, lets it in or refuses it, reads its body within limits, and cancels what is done for a client
that has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from fixedstate.errors import FixedStateError
from fixedstate.serve import openai
from fixedstate.serve.answers import Answer, Answers, Piece
from fixedstate.serve.asked import Limits, read_json
from fixedstate.serve.logs import log, request_id
from fixedstate.serve.metrics import CONTENT_TYPE, Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_RETRY = "1"  # seconds; blocks are finished faster than that, so slots get free
_BODY_SECONDS = 30.0  # in which a client has to send its body
_SPILL = (
    4 << 20
)  # bytes behind the limit that are read and thrown away, so that the refusal arrives
_LONG = 1 << 16  # bytes of a body from which it is read beside the event loop
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GONE = 499  # in logs and measurements, as proxies write it

# What the log line of a request says beside the usual; a mapping of its own for each.
_line: ContextVar[dict[str, Any]] = ContextVar("line")


@dataclass(slots=True)
class Service:
    """What a server is at the moment; this object mutates.

    Attributes:
        answers: What answers.
        limits: Of requests.
        model: The name of the model.
        turn: What a message of a chat becomes; see :func:`fixedstate.serve.openai.read_call`.
        token: What clients have to know; empty for nothing.
        access_log: Whether every request makes a log line; else only failures do.
        created: Seconds since 1970 when it began.
        warm: Whether the first pass is done.
        draining: Whether no new requests are taken.
        open: Requests under ``/v1`` that are being answered.
        metrics: Its measurements.
    """

    answers: Answers
    limits: Limits
    model: str
    turn: str = "{text}\n"
    token: str = ""
    access_log: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    warm: bool = False
    draining: bool = False
    open: int = 0
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.answers, self.model)

    @property
    def unready(self) -> str:
        """Why no request is taken now; empty where they are."""
        if self.answers.broken:
            return f"decoding has ended: {self.answers.broken}; restart the server"
        if self.draining:
            return "the server is ending: ask another one"
        return "" if self.warm else "the server is starting: its first pass is not done"


_READ = ["GET", "HEAD"]  # monitors ask for the head alone


def make_app(service: Service) -> Front:
    """The ASGI application of a server."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    api = _Api(service)
    app.add_api_route("/v1/models", api.models, methods=_READ)
    app.add_api_route("/v1/models/{name:path}", api.model, methods=_READ)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_api_route("/health/live", api.live, methods=_READ)
    app.add_api_route("/health/ready", api.ready, methods=_READ)
    app.add_api_route("/metrics", api.metrics, methods=_READ)
    app.add_exception_handler(FixedStateError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _failed)
    return Front(app, service)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, FixedStateError)
    _line.get().update(error=str(error))
    status = openai.status_of(error)
    headers = {"Retry-After": _RETRY} if status in (429, 503) else {}
    return JSONResponse(openai.error_body(error), status, headers)


async def _failed(_: Request, error: Exception) -> Response:
    """A fault of ours; the one who asked learns no more than that."""
    return JSONResponse(openai.problem("internal error; the log says more", "server_error"), 500)


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = openai.problem(error.detail, "invalid_request_error")
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


class _Api:
    """The routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def live(self) -> Response:
        """Whether restarting would not help: 200, or 503 once nothing can be answered."""
        broken = self._service.answers.broken
        return JSONResponse({"live": not broken, "reason": broken or None}, 503 if broken else 200)

    async def ready(self) -> Response:
        """Whether requests are taken: 200 or 503."""
        reason = self._service.unready
        headers = {"Retry-After": _RETRY} if reason else {}
        status = 503 if reason else 200
        return JSONResponse({"ready": not reason, "reason": reason or None}, status, headers)

    async def metrics(self) -> Response:
        """Measurements for Prometheus."""
        return Response(self._service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self) -> Response:
        """The model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """The model by its name."""
        if name != self._service.model:
            raise openai.unknown_model(name, self._service.model)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        created = self._service.created
        return {
            "id": self._service.model,
            "object": "model",
            "created": created,
            "owned_by": "fixedstate",
        }

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        return await self._complete(request, "text_completion", None)

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        return await self._complete(request, "chat", self._service.turn)

    async def _complete(self, request: Request, operation: str, turn: str | None) -> Response:
        run = _Run(self._service, operation)
        try:
            call = await self._read(await request.body(), turn)
            answer = await self._service.answers.ask(call.asked)
        except BaseException as err:
            run.failed(err)
            raise
        run.begin(call, answer)
        try:
            first = await run.next()  # what is wrong with the request is known with its first block
            if call.stream and first is not None:
                return _Stream(run, first)
            pieces = []
            while first is not None:
                pieces.append(first)
                first = await run.next()
            return run.whole(pieces)
        except BaseException as err:
            run.failed(err)
            raise

    async def _read(self, body: bytes, turn: str | None) -> openai.Call:
        service = self._service

        def read() -> openai.Call:
            return openai.read_call(read_json(body), service.limits, model=service.model, turn=turn)

        return await asyncio.to_thread(read) if len(body) > _LONG else read()


class _Run:
    """One completion on its way: its answer, its form, and what is measured of it."""

    def __init__(self, service: Service, operation: str) -> None:
        self._service, self._operation = service, operation
        self._start = time.perf_counter()
        self._first: float | None = None
        self._first_tokens = 0
        self._told = False
        self.answer: Answer
        self.form: openai.Form

    def begin(self, call: openai.Call, answer: Answer) -> None:
        """The answer was asked for."""
        self.answer = answer
        self.form = openai.Form(call, request_id.get(), self._service.model, int(time.time()))

    async def next(self) -> Piece | None:
        """The next block; the last one ends the measurement."""
        piece = await self.answer.next()
        self.form.prompt_tokens = self.answer.prompt_tokens
        if piece is not None and self._first is None:
            self._first = time.perf_counter()
            self._first_tokens = len(piece.token_ids)
            self._service.metrics.first_block(self._operation, self._first - self._start)
        if self.answer.ending is not None and not self._told:
            self._done()
        return piece

    def whole(self, pieces: list[Piece]) -> Response:
        """The answer in one piece."""
        ending = self.answer.ending
        assert ending is not None
        if ending.finish_reason == "error":
            return JSONResponse(openai.problem(ending.error or "failed", "server_error"), 500)
        if ending.finish_reason == "cancelled":
            body = openai.problem("the server is ending: ask another one", "server_error")
            return JSONResponse(body, 503, {"Retry-After": _RETRY})
        return JSONResponse(self.form.whole(pieces, ending))

    def _done(self) -> None:
        ending, now = self.answer.ending, time.perf_counter()
        assert ending is not None
        assert self._first is not None
        self._told = True
        metrics, name = self._service.metrics, self._operation
        metrics.answer(
            name,
            finish_reason=ending.finish_reason,
            prompt_tokens=self.answer.prompt_tokens,
            new_tokens=ending.new_tokens,
            passes=ending.denoise_passes,
            seconds_behind=now - self._first,
            tokens_behind=ending.new_tokens - self._first_tokens,
        )
        error = ending.finish_reason if ending.finish_reason in ("error", "cancelled") else ""
        metrics.request(name, now - self._start, error)
        _line.get().update(
            prompt_tokens=self.answer.prompt_tokens,
            new_tokens=ending.new_tokens,
            denoise_passes=ending.denoise_passes,
            finish_reason=ending.finish_reason,
            first_block_seconds=round(self._first - self._start, 6),
            error=ending.error,
        )

    def failed(self, error: BaseException) -> None:
        """It ended by an exception; a client that left is one as well."""
        if hasattr(self, "answer"):
            self.answer.cancel()
        if self._told:
            return
        self._told = True
        gone = isinstance(error, asyncio.CancelledError)
        name = "cancelled" if gone else type(error).__name__
        self._service.metrics.request(self._operation, time.perf_counter() - self._start, name)
        if hasattr(self, "answer") and gone:
            _line.get().update(finish_reason="cancelled")


class _Stream(Response):
    """Server-sent events, a block each; whatever ends it early cancels the answer."""

    media_type = "text/event-stream"

    def __init__(self, run: _Run, first: Piece) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run, self._first = run, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, piece = self._run, self._first

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while run.answer.ending is None:
                await write(run.form.piece(piece, None))
                following = await run.next()
                assert following is not None
                piece = following
            ending = run.answer.ending
            if ending.finish_reason == "error":
                failure = openai.problem(ending.error or "failed", "server_error")
                await write(openai.event(failure), False)
            else:
                await write(run.form.piece(piece, ending) + run.form.last(ending), False)
        except FixedStateError as err:
            run.failed(err)
            _line.get().update(error=str(err))
            await write(openai.event(openai.error_body(err)), False)
        except BaseException as err:
            run.failed(err)
            raise


# --- around every request ------------------------------------------------------------------------


class Front:
    """What every request goes through, as an ASGI application around another one.

    Args:
        app: What answers.
        service: What the server is at the moment.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        self._app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = dict(scope["headers"])
        known = headers.get(b"x-request-id", b"").decode("latin-1")
        name = known if _ID.fullmatch(known) else uuid.uuid4().hex
        request_id.set(name)
        line: dict[str, Any] = {}
        _line.set(line)
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", name.encode())],
                }
            await send(message)

        served = scope["path"].startswith("/v1/")
        self.service.open += served
        try:
            await self._admit(scope, headers, receive, named)
        except _Gone:
            status = _GONE
        except Exception as err:
            logging.getLogger("fixedstate.serve").exception("failed")
            line["error"] = type(err).__name__
            if not status:
                await (await _failed(Request(scope), err))(scope, receive, named)
        finally:
            self.service.open -= served
            self._told(scope, status or _GONE, time.perf_counter() - start, line)

    def _told(self, scope: Scope, status: int, seconds: float, line: dict[str, Any]) -> None:
        self.service.metrics.response(status)
        probe = not scope["path"].startswith("/v1/") and status < 400
        if (self.service.access_log and not probe) or status >= 500:
            log(
                "request",
                level=logging.ERROR if status == 500 else logging.INFO,
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(seconds, 6),
                **line,
            )

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        refused = self._refusal(scope, headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        body = await self._body(headers, receive)
        if isinstance(body, Response):
            await body(scope, receive, send)
            return
        await _until_gone(self._app, scope, body, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        """Why a request is not even read."""
        path = scope["path"]
        if path.startswith("/health/"):
            return None
        token = self.service.token
        if token:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(given.strip(), token.encode())
            if kind.lower() != b"bearer" or not same:
                body = openai.problem(
                    "this server wants its token: send `Authorization: Bearer TOKEN`",
                    "authentication_error",
                    "invalid_api_key",
                )
                return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        reason = self.service.unready
        if reason and scope["method"] == "POST":
            body = openai.problem(reason, "server_error", "unavailable")
            return JSONResponse(body, 503, {"Retry-After": _RETRY})
        return None

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | Response:
        """The body of a request, or its refusal."""
        limit = self.service.limits.body_bytes
        too_large = JSONResponse(
            openai.problem(
                f"the body has more than {limit} bytes: send less", "invalid_request_error"
            ),
            413,
            {"Connection": "close"},
        )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit + _SPILL:
            return too_large
        parts, size = [], 0

        async def read() -> None:
            nonlocal size
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                size += len(message.get("body", b""))
                if size <= limit:
                    parts.append(message.get("body", b""))
                if size > limit + _SPILL or not message.get("more_body", False):
                    return

        try:
            await asyncio.wait_for(read(), _BODY_SECONDS)
        except asyncio.TimeoutError:
            return JSONResponse(
                openai.problem(
                    f"the body did not arrive within {_BODY_SECONDS:g} s", "invalid_request_error"
                ),
                408,
                {"Connection": "close"},
            )
        return too_large if size > limit else b"".join(parts)


class _Gone(Exception):
    """The client has closed its connection."""


async def _until_gone(
    app: Callable[..., Awaitable[None]], scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """Run an application on a body that was read; cancel it once its client has gone.

    Raises:
        _Gone: where it was cancelled.
    """
    given = answered = False

    async def replay() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # whether the client has gone is watched here
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def tell(message: Message) -> None:
        nonlocal answered
        await send(message)
        answered = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def work() -> None:
        await app(scope, replay, tell)

    working, watching = asyncio.ensure_future(work()), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if answered:  # then the connection counts as closed as well
            await asyncio.wait((working,))
    finally:
        watching.cancel()
        gone = not working.done()
        if gone:
            working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        with contextlib.suppress(asyncio.CancelledError):
            await working
    if gone:
        raise _Gone
