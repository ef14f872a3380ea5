"""The process of a server: a socket, a first pass, and an end that lets open answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from fixedstate.errors import FixedStateError, UsageError
from fixedstate.serve.answers import Answers
from fixedstate.serve.app import Service, make_app
from fixedstate.serve.logs import log

INTERRUPTED = 130
_LINGER = 2  # seconds for connections whose answers are sent already
_STEP = 0.02


def bind(host: str, port: int) -> socket.socket:
    """A socket of an address, not listening yet: the port is there before anything is loaded.

    Raises:
        UsageError: where it cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as err:
        raise UsageError(f"--host {host} is no address here: {err.strerror or err}") from err
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as err:
        sock.close()
        raise UsageError(
            f"{host}:{port} cannot be bound ({err.strerror or err}): choose another --port"
        ) from err
    return sock


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signals: a signal here first lets answers finish."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One server in the running event loop.

    Args:
        service: What is served.
        sock: From :func:`bind`; closed at the end.
        drain_seconds: In which open answers have to finish once it was told to end.
        on_ready: Called after the first pass.
    """

    def __init__(
        self,
        service: Service,
        sock: socket.socket,
        *,
        drain_seconds: float = 30.0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._service, self._sock = service, sock
        self._drain_seconds, self._on_ready = drain_seconds, on_ready
        config = uvicorn.Config(
            make_app(service),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_LINGER,
        )
        self._uvicorn = _Uvicorn(config)
        self._ending: asyncio.Task[None] | None = None
        self._code = 0

    async def run(self, *, signals: bool = True) -> int:
        """Serve until it is told to end; returns the exit code.

        Args:
            signals: Whether SIGTERM and SIGINT tell it.

        Raises:
            FixedStateError: where the first pass fails.
        """
        if signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
        async with self._service.answers as answers:
            serving = asyncio.create_task(self._uvicorn.serve([self._sock]))
            warming = asyncio.create_task(self._warm(answers))
            try:
                await asyncio.wait((serving, warming), return_when=asyncio.FIRST_COMPLETED)
                if warming.done():
                    warming.result()  # or its error
                await serving
            finally:
                self._uvicorn.should_exit = True
                warming.cancel()
                for task in (serving, warming, self._ending):
                    if task is not None:
                        with contextlib.suppress(asyncio.CancelledError, FixedStateError):
                            await task
        return self._code

    async def _warm(self, answers: Answers) -> None:
        await answers.warm()
        while not self._uvicorn.started:
            await asyncio.sleep(_STEP)
        self._service.warm = True
        self._on_ready()

    def _signalled(self, number: int) -> None:
        if number == signal.SIGINT:
            self._code = INTERRUPTED
        self.end()

    def end(self) -> None:
        """Take no more requests and end once the open ones have; the second time, cancel them."""
        if self._ending is None:
            self._service.draining = True
            self._ending = asyncio.ensure_future(self._drain())
        else:
            self._service.answers.cancel_all()

    async def _drain(self) -> None:
        service = self._service
        log("draining", open=service.open)
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._drain_seconds
        while service.open and loop.time() < limit:
            await asyncio.sleep(_STEP)
        if service.open:
            log("cancelling what is still open", level=logging.WARNING, open=service.open)
            service.answers.cancel_all()
        self._uvicorn.should_exit = True
