"""A real server on a free port of this machine, over a golden bundle or a scripted model."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from scripted import ScriptedEngine, noise_table, small_spec

from fixedstate.bundle import DecodeDefaults
from fixedstate.runtime import Decoder, load
from fixedstate.runtime.text import Text
from fixedstate.serve.answers import LocalAnswers
from fixedstate.serve.app import Service
from fixedstate.serve.asked import Limits
from fixedstate.serve.server import Server, bind

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"


class SteppedEngine(ScriptedEngine):
    """A scripted engine whose denoise passes each wait for a permit."""

    def __init__(self, *, slots):
        spec = small_spec(block_len=4)
        super().__init__(spec, noise_table(spec), slots=slots)
        self.permits = threading.Semaphore(0)

    def denoise(self, ids, first=0):
        assert self.permits.acquire(timeout=60)
        return super().denoise(ids, first)

    def step(self, passes=1):
        self.permits.release(passes)

    def let_go(self):
        self.step(1_000_000)


@dataclass
class Running:
    """A server in a thread; `end` is what SIGTERM does."""

    service: Service
    url: str
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    engine: SteppedEngine | None = None
    codes: list[int] = field(default_factory=list)

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=60, **options)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.server.end)

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()

    def until(self, condition, seconds=30.0) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit
            time.sleep(0.005)


def start(answers, limits, *, engine=None, drain_seconds=30.0, **service) -> Running:
    service = Service(answers, limits, "model", **service)
    sock, up, found, codes = bind("127.0.0.1", 0), threading.Event(), {}, []

    async def main():
        found["loop"] = asyncio.get_running_loop()
        found["server"] = Server(service, sock, drain_seconds=drain_seconds, on_ready=up.set)
        if engine is not None and not engine.held:
            engine.step(100)  # for the first pass
        return await found["server"].run(signals=False)

    def work():
        with sock:
            codes.append(asyncio.run(main()))

    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    if engine is None or not engine.held:
        assert up.wait(60)
        if engine is not None:
            while engine.permits.acquire(blocking=False):
                pass
    else:
        while "server" not in found or not found["server"]._uvicorn.started:
            time.sleep(0.01)
    return Running(service, url, found["server"], found["loop"], thread, engine, codes)


@pytest.fixture(scope="session")
def golden():
    """The golden bundle for answers of its own, one slot."""
    return load(GOLDEN, threads=1)


@pytest.fixture(scope="session")
def text():
    return Text.open(GOLDEN)


@pytest.fixture
def serve_golden():
    """Start servers over the golden bundle."""
    servers = []

    def begin(*, slots=4, limits=None, **options):
        limits = limits or Limits()
        decoder = load(GOLDEN, threads=1, slots=slots)
        answers = LocalAnswers(decoder, Text.open(decoder.bundle), limits)
        servers.append(start(answers, limits, **options))
        return servers[-1]

    yield begin
    _end(servers)


@pytest.fixture(scope="module")
def golden_server():
    """One server over the golden bundle, whose state no test changes."""
    limits = Limits(max_prompt_tokens=64, max_new_tokens=256, max_body_bytes=20_000, queue=64)
    decoder = load(GOLDEN, threads=1, slots=4)
    running = start(LocalAnswers(decoder, Text.open(decoder.bundle), limits), limits)
    yield running
    _end([running])


@pytest.fixture
def serve_stepped():
    """Start servers over a scripted model without a tokenizer, pass by pass."""
    servers = []

    def begin(*, slots=1, limits=None, held=False, **options):
        limits = limits or Limits()
        engine = SteppedEngine(slots=slots)
        engine.held = held
        bundle = SimpleNamespace(spec=engine.spec, decode=DecodeDefaults())
        answers = LocalAnswers(Decoder(bundle, engine), None, limits)
        servers.append(start(answers, limits, engine=engine, **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.engine.let_go()
    _end(servers)


def _end(servers):
    for server in servers:
        if server.thread.is_alive():
            server.end()
        server.join()
        assert server.codes == [0]
