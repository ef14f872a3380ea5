#!/usr/bin/env python3
"""Start Triton Inference Server on the model repository that this file lies in, and watch over it.

    python launch.py                         # tritonserver of the PATH, as in NVIDIA's container
    python launch.py --pytriton FOLDER       # the server inside of the package nvidia-pytriton

It checks what can be checked before (libraries of the Python stub, shared memory, numpy), ends a
start that hangs, asks a real question every few seconds, and starts a server anew that does not
answer: a stub that died is never restarted by the server itself, which goes on to say it is ready.
SIGTERM and SIGINT are passed on; open streams run to their end.

This file needs Python 3.10 and nothing else. `fixedstate triton` copies it beside the models.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = "repository.json"
STUB = "triton_python_backend_stub"
SHARED_MEMORY = Path("/dev/shm")
REGION = "triton_python_backend_shm_region"

FATAL = (
    "error while loading shared libraries",
    "triton_python_backend_stub is not found",
)
"""What a stub says that cannot start, and for which old servers wait for ever."""

UNREACHABLE = (OSError, http.client.HTTPException)
"""What a request meets where the server is not there, or goes away."""

BUSY = "try again once one has ended"
"""What the model says to a request that finds no place; over HTTP it has no code of its own."""

MOST_RESTARTS = 5
RESTART_WINDOW = 600.0
FAILED_PROBES = 2
_ASKED = "import json,sys,sysconfig;print(json.dumps([sysconfig.get_config_var('LIBDIR') or '',"
_ASKED += "'%d.%d'%sys.version_info[:2]]));import numpy;print(numpy.__version__)"


class LaunchError(Exception):
    """The server cannot be started; the text says why and what to do."""


def say(text: str) -> None:
    """Say one line to the person at the terminal."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


# --- before the start ----------------------------------------------------------------------------


class Place:
    """Where the server's program is, and what its Python stub runs in.

    Args:
        options: Of the command line.
        scratch: A folder of this run.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.python = Path(options.python or sys.executable).absolute()
        self.library_folders: list[str] = []
        self.backends: Path | None = None
        libraries, self.version, self.numpy = self._interpreter()
        if options.server:
            self.server = Path(options.server)
        elif options.pytriton or not shutil.which("tritonserver"):
            self.server = self._from_package(options.pytriton, scratch)
        else:
            self.server = Path(str(shutil.which("tritonserver")))
        if not self.server.is_file():
            raise LaunchError(f"{self.server} is no program: give --server or --pytriton")
        if libraries:
            self.library_folders.append(libraries)

    def _interpreter(self) -> tuple[str, str, str]:
        """Folder of libpython, version, and numpy's version of the stub's environment."""
        done = subprocess.run(
            [str(self.python), "-c", _ASKED], capture_output=True, text=True, check=False
        )
        lines = done.stdout.splitlines()
        if done.returncode or len(lines) != 2:
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            raise LaunchError(
                f"{self.python} cannot run the model ({last}): install requirements-stub.txt into "
                "an environment and give its interpreter with --python"
            )
        libraries, version = json.loads(lines[0])
        return libraries, version, lines[1]

    def _from_package(self, folder: str | None, scratch: Path) -> Path:
        """The server inside of nvidia-pytriton; its stub is copied beside its back end."""
        if folder:
            root = Path(folder)
        else:
            found = importlib.util.find_spec("pytriton")
            if found is None or not found.submodule_search_locations:
                raise LaunchError(
                    "no tritonserver on the PATH and no package nvidia-pytriton here: run this in "
                    "NVIDIA's container, or give --server or --pytriton"
                )
            root = Path(found.submodule_search_locations[0]).parent
        server = root / "pytriton" / "tritonserver"
        stub = server / "python_backend_stubs" / self.version / STUB
        if not stub.is_file():
            raise LaunchError(f"{server} has no stub for Python {self.version}: give --python")
        self.backends = scratch / "backends"
        target = self.backends / "python"
        target.mkdir(parents=True)
        for file in (server / "backends" / "python").iterdir():
            if file.is_file():
                shutil.copy2(file, target / file.name)
        shutil.copy2(stub, target / STUB)
        for program in (target / STUB, server / "bin" / "tritonserver"):
            if not os.access(program, os.X_OK):
                program.chmod(0o755)
        self.library_folders.append(str(root / "nvidia_pytriton.libs"))
        return server / "bin" / "tritonserver"

    @property
    def environment(self) -> dict[str, str]:
        """The stub takes the first python3 of the PATH and ignores PYTHONPATH."""
        here = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
        here["PATH"] = os.pathsep.join([str(self.python.parent), here.get("PATH", os.defpath)])
        folders = [*self.library_folders, here.get("LD_LIBRARY_PATH", "")]
        here["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
        return here

    @property
    def stub(self) -> Path:
        """The program that runs the model."""
        backends = self.backends or self.server.parent.parent / "backends"
        return backends / "python" / STUB


def check(place: Place, record: Mapping[str, Any]) -> None:
    """Refuse what would hang or fail later without a useful word.

    Raises:
        LaunchError: with what is missing and what to do.
    """
    if place.stub.is_file() and shutil.which("ldd"):
        done = subprocess.run(
            ["ldd", str(place.stub)],
            env=place.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        missing = [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]
        if missing:
            raise LaunchError(
                f"{place.stub} needs {', '.join(missing)}, which no library folder has: install "
                f"the shared libpython{place.version}, or set LD_LIBRARY_PATH"
            )
    if place.numpy.split(".")[0] != "1" and record["target_version"] <= "24.10":
        raise LaunchError(
            f"{place.python} has numpy {place.numpy}, with which tensors of Triton "
            f"{record['target_version']} come out empty: install requirements-stub.txt"
        )
    if SHARED_MEMORY.is_dir():
        room = os.statvfs(SHARED_MEMORY)
        free, needed = room.f_bavail * room.f_frsize, record["shm_bytes"]
        if free < needed:
            raise LaunchError(
                f"{SHARED_MEMORY} has {free >> 20} MiB free, requests may take {needed >> 20} MiB: "
                f"start the container with --shm-size={-(-needed >> 20)}m, or remove leftovers"
            )


# --- one server ----------------------------------------------------------------------------------


class Server:
    """A running tritonserver.

    Args:
        place: Its program and environment.
        options: Of the command line.
        record: Of the repository.
    """

    def __init__(
        self, place: Place, options: argparse.Namespace, record: Mapping[str, Any]
    ) -> None:
        self._options, self._record = options, record
        self._fatal = ""
        self._regions: set[Path] = set()
        self.process = subprocess.Popen(
            _command(place, options, record),
            env=place.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        """Hand the server's log on, and look for what it would wait for in vain."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stderr.write(line)
            if any(text in line for text in FATAL):
                self._fatal = line.strip()

    def wait_ready(self, stopping: threading.Event) -> bool:
        """Whether it became ready; False if told to stop first.

        Raises:
            LaunchError: where it ended, cannot start its stub, or took longer than the deadline.
        """
        end = time.monotonic() + self._options.deadline
        while not stopping.wait(0.05):
            code = self.process.poll()
            if code is not None:
                self._reader.join(2)
                raise LaunchError(f"the server ended with {code} before it was ready; see above")
            if self._fatal:
                raise LaunchError(f"the Python stub cannot start: {self._fatal}")
            if time.monotonic() > end:
                raise LaunchError(f"the server was not ready after {self._options.deadline:g} s")
            with contextlib.suppress(*UNREACHABLE):
                if _get(self._options, "/v2/health/ready", 2.0) == 200:
                    self._check_version()
                    return True
        return False

    def _check_version(self) -> None:
        options = self._options
        url = f"http://{options.address}:{options.http_port}/v2"
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            version = str(json.load(answer)["version"])
        lowest = self._record["lowest_server"]
        if _numbers(version) < _numbers(lowest):
            raise LaunchError(f"this is server {version}; the repository needs {lowest} or newer")

    def note_regions(self) -> None:
        """Remember the shared memory of its stubs: that of one that died is never given back."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self.process.pid}/maps").read_text(errors="replace")
            paths = {Path(line.split()[-1]) for line in maps.splitlines() if REGION in line}
            self._regions |= {path for path in paths if path.parent == SHARED_MEMORY}

    def _remove_regions(self) -> None:
        for path in self._regions:
            path.unlink(missing_ok=True)

    def stop(self) -> int:
        """Let open streams end, then end the server; its exit code."""
        self.note_regions()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(self._options.exit_timeout + 10)
            except subprocess.TimeoutExpired:
                say("the server did not end in time")
                self.kill()
        self._reader.join(2)
        self._remove_regions()
        return self.process.returncode

    def kill(self) -> None:
        """End it at once. Its stubs notice, and take their shared memory with them."""
        self.note_regions()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        end = time.monotonic() + 3
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        self._remove_regions()


def _command(place: Place, options: argparse.Namespace, record: Mapping[str, Any]) -> list[str]:
    command = [
        str(place.server),
        f"--model-repository={options.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in record["models"]),
        "--disable-auto-complete-config",
        f"--http-address={options.address}",
        f"--http-port={options.http_port}",
        f"--grpc-address={options.address}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={options.address}",
        f"--metrics-port={options.metrics_port}",
        f"--exit-timeout-secs={options.exit_timeout}",
    ]
    if place.backends is not None:
        command.append(f"--backend-directory={place.backends}")
    if not record["on_card"]:
        command += ["--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"]
    return [*command, *options.server_options]


def _numbers(version: str) -> list[int]:
    return [int(word) for word in version.split(".") if word.isdigit()]


def _get(options: argparse.Namespace, path: str, timeout: float) -> int:
    url = f"http://{options.address}:{options.http_port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code


def probe(options: argparse.Namespace, record: Mapping[str, Any]) -> str:
    """Ask for one token; why that failed, empty where it did not.

    A server that is too busy to take the question is well.
    """
    request = urllib.request.Request(
        f"http://{options.address}:{options.http_port}/v2/models/{record['model']}/generate_stream",
        json.dumps(record["probe"]).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=options.probe_timeout) as answer:
            text = answer.read(1 << 16).decode(errors="replace")
    except urllib.error.HTTPError as err:
        said = err.read(1000).decode(errors="replace")
        return "" if BUSY in said else f"{err.code} {said}"
    except UNREACHABLE as err:
        return str(err) or type(err).__name__
    return "" if '"token_ids"' in text and '"error"' not in text else text[:500]


# --- watching ------------------------------------------------------------------------------------


def watch(
    server: Server,
    options: argparse.Namespace,
    record: Mapping[str, Any],
    stopping: threading.Event,
) -> str:
    """Wait until it has to be stopped (empty text) or started anew (why)."""
    failed = 0
    asked = time.monotonic()
    while not stopping.wait(0.1):
        code = server.process.poll()
        if code is not None:
            return f"the server ended with {code}"
        if options.no_supervise or time.monotonic() - asked < options.probe_every:
            continue
        why = probe(options, record)
        asked = time.monotonic()
        failed = failed + 1 if why else 0
        if failed >= FAILED_PROBES:
            return f"it does not answer: {why}"
    return ""


def serve(options: argparse.Namespace, record: Mapping[str, Any], scratch: Path) -> int:
    """Run the server until SIGTERM or SIGINT; its exit code."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    place = Place(options, scratch)
    check(place, record)
    if options.check:
        say("all checks passed")
        return 0
    restarts: list[float] = []
    while True:
        server = Server(place, options, record)
        try:
            ready = server.wait_ready(stopping)
        except BaseException:
            server.kill()
            raise
        if ready:
            server.note_regions()
            print(
                f"ready http={options.address}:{options.http_port} "
                f"grpc={options.address}:{options.grpc_port} "
                f"metrics={options.address}:{options.metrics_port} pid={server.process.pid}",
                flush=True,
            )
        why = watch(server, options, record, stopping) if ready else ""
        if stopping.is_set():
            return server.stop()
        say(why)
        server.kill()
        if options.no_supervise:
            return 1
        now = time.monotonic()
        restarts = [moment for moment in restarts if now - moment < RESTART_WINDOW] + [now]
        if len(restarts) > MOST_RESTARTS:
            raise LaunchError(f"{MOST_RESTARTS} restarts in {RESTART_WINDOW:g} s: giving up")
        say(f"starting it anew ({len(restarts)} of {MOST_RESTARTS})")
        stopping.wait(min(2.0 ** (len(restarts) - 1), 10.0) - 1)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--repository", type=Path, default=Path(__file__).resolve().parent)
    made.add_argument("--server", help="tritonserver [default: that of the PATH]")
    made.add_argument("--pytriton", help="folder that the package nvidia-pytriton is in")
    made.add_argument("--python", help="interpreter that the model runs in [default: this one]")
    made.add_argument("--address", default="127.0.0.1", help="what it listens at [127.0.0.1]")
    made.add_argument("--http-port", type=int, default=8000)
    made.add_argument("--grpc-port", type=int, default=8001)
    made.add_argument("--metrics-port", type=int, default=8002)
    made.add_argument("--deadline", type=float, default=300.0, help="seconds of a start at most")
    made.add_argument("--exit-timeout", type=int, default=30, help="seconds that streams have")
    made.add_argument("--probe-every", type=float, default=10.0, help="seconds between questions")
    made.add_argument("--probe-timeout", type=float, default=30.0, help="seconds of a question")
    made.add_argument("--no-supervise", action="store_true", help="ask nothing, restart nothing")
    made.add_argument("--check", action="store_true", help="check and start nothing")
    made.add_argument("server_options", nargs="*", help="further options, behind --")
    return made


def main() -> int:
    """Run the command line; the exit code."""
    options = parser().parse_args()
    try:
        record = json.loads((options.repository / RECORD).read_text())
    except (OSError, ValueError) as err:
        say(f"error: {options.repository / RECORD} cannot be read: {err}")
        return 2
    with tempfile.TemporaryDirectory(prefix="triton-") as scratch:
        try:
            return serve(options, record, Path(scratch))
        except LaunchError as err:
            say(f"error: {err}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
