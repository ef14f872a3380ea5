"""A real Triton server, started by the launch script of a repository, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

STUB = "triton_python_backend_stub"


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for made in sockets:
            made.bind(("127.0.0.1", 0))
        return [made.getsockname()[1] for made in sockets]


class TritonServer:
    """A running launch.py; used by ``with``.

    Args:
        command: Without ports.
        ports: HTTP, gRPC, metrics.
        log: File for what it says.
        server_options: For the server itself.
    """

    def __init__(
        self, command: list[str], ports: list[int], log: Path, server_options: tuple[str, ...] = ()
    ) -> None:
        self.http, self.grpc, self.metrics_port = ports
        self._log = log
        self.code: int | None = None
        self.ready: list[str] = []
        self.regions: set[Path] = set()
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [
                    *command,
                    *("--http-port", str(self.http), "--grpc-port", str(self.grpc)),
                    *("--metrics-port", str(self.metrics_port)),
                    *(("--", *server_options) if server_options else ()),
                ],
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.ready.append(line)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """Of the gRPC port."""
        return f"127.0.0.1:{self.grpc}"

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return int(self.ready[-1].rpartition("pid=")[2])

    def wait_ready(self, times: int = 1, seconds: float = 120.0) -> None:
        """Until it said so that many times."""
        end = time.monotonic() + seconds
        while len(self.ready) < times:
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < end, f"not ready in {seconds} s:\n{self.log[-3000:]}"
            time.sleep(0.02)

    def __enter__(self) -> TritonServer:
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Status and body."""
        return self._ask(urllib.request.Request(f"http://127.0.0.1:{port or self.http}{path}"))

    def post(self, path: str, body: Any, seconds: float = 60.0) -> tuple[int, str]:
        """Status and body of a JSON request; a whole URL is another server's."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = path if path.startswith("http") else f"http://127.0.0.1:{self.http}{path}"
        return self._ask(urllib.request.Request(url, raw), seconds)

    def _ask(self, request: urllib.request.Request, seconds: float = 60.0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read().decode()

    def metrics(self) -> dict[str, float]:
        """Our metrics: name and outcome to value."""
        found = {}
        for line in self.get("/metrics", self.metrics_port)[1].splitlines():
            if line.startswith("fixedstate_"):
                name, _, rest = line.partition("{")
                labels, _, value = rest.rpartition("} ")
                pairs = dict(pair.split("=", 1) for pair in labels.split(","))
                outcome = pairs.get("outcome", "").strip('"')
                found[f"{name}.{outcome}" if outcome else name] = float(value)
        return found

    def stubs(self, model: str = "fixedstate") -> list[int]:
        """Processes of a model's Python, by their command lines; the dead are left out."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if STUB.encode() in words[0] and parent == self.pid:
                    if any(f"/{model}/".encode() in word for word in words):
                        found.append(int(entry.name))
        return found

    def note_regions(self) -> None:
        """Remember the shared memory of the server's stubs, in `regions`."""
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        self.regions |= {Path(line.split()[-1]) for line in maps if "shm_region" in line}
        assert self.regions

    def kill_stub(self, model: str = "fixedstate") -> None:
        """End a model's Python as a crash would."""
        (stub,) = self.stubs(model)
        os.kill(stub, signal.SIGKILL)
