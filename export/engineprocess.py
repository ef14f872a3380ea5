"""Start the process that builds, follow it, and say in one sentence what went wrong in it.

TensorRT ends a process on some inputs, keeps much memory until its end, and on Linux finds the
library for plugins only on a search path that was set before it began: so each graph is built in a
process of its own (:mod:`fixedstate.export.enginechild`). It is ended with its parent, and by every
exception in it, Ctrl-C among them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fixedstate
from fixedstate.errors import BackendError
from fixedstate.export.targets import RTX
from fixedstate.plugins import library
from fixedstate.runtime.identity import PRODUCTS

Share = Callable[[float], None]
"""Told which part of the work is done, 0 to 1."""

_CHILD = "fixedstate.export.enginechild"
_LAST_WORDS = 300  # characters of what a dead process said
_TICK = 0.2  # seconds between two looks at a silent process
_TEXTS = 3  # messages in one sentence

_NO_MEMORY = re.compile(r"out ?of ?memory|bad_alloc|cannot allocate|OOM", re.IGNORECASE)
_NO_CARD = re.compile(r"CUDA_SUCCESS|cudaError|no CUDA-capable|CUDA initialization|error: (35|100)")
_NO_LIBRARY = re.compile(r"Unable to load library: ([\w.+-]+)")

_LESS = (
    "lower --batch, --blocks or --capacity, build one role at a time (--roles), or use a machine "
    "with more memory"
)
_REPORT = "report this model with the text above"


@dataclass(frozen=True, slots=True)
class Finished:
    """What a process left.

    Attributes:
        result: Its answer; None where it died.
        status: Exit status; the negative number of a signal that ended it.
        peak_bytes: Largest resident size it reached, mapped files included; 0 if not known.
        seconds: From its start to its end.
        words: The last that it printed.
    """

    result: dict[str, Any] | None
    status: int
    peak_bytes: int
    seconds: float
    words: str


def run(
    request: Mapping[str, Any],
    folder: Path,
    *,
    share: Share | None = None,
    timeout: float | None = None,
) -> Finished:
    """Have a request done in a process of its own.

    Args:
        request: See :mod:`fixedstate.export.enginechild`.
        folder: An existing folder for what it needs meanwhile.
        share: Told how far it is.
        timeout: Seconds; None waits for ever.

    Raises:
        BackendError: where it takes longer, or cannot be started. It is ended first.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".child.") as made:
        scratch = Path(made)
        file = scratch / "request.json"
        file.write_text(json.dumps(request))
        read, write = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, read)
            words = stack.enter_context((scratch / "words").open("w+b"))
            began = time.monotonic()
            try:
                child = subprocess.Popen(
                    [sys.executable, "-m", _CHILD, str(file), str(write)],
                    stdin=subprocess.PIPE,
                    stdout=words,
                    stderr=words,
                    cwd=scratch,  # it is on the child's import path
                    env=_environment(request["target"], scratch),
                    pass_fds=(write,),
                    start_new_session=True,  # Ctrl-C comes here only
                )
            except OSError as err:
                raise BackendError(
                    f"the process that builds cannot be started: {err.strerror or err}; free some "
                    "memory and try again"
                ) from err
            finally:
                os.close(write)
            stack.callback(_end, child)
            result, peak = _follow(child, read, share, began, timeout)
            words.seek(0)
            said = words.read().decode("utf-8", "replace")
            return Finished(
                result=result,
                status=int(child.returncode),
                peak_bytes=peak,
                seconds=time.monotonic() - began,
                words=_last(said),
            )


def _last(said: str) -> str:
    """The last line of what was printed, as far as a sentence can hold it."""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    return lines[-1][-_LAST_WORDS:] if lines else ""


def _environment(target: str, scratch: Path) -> dict[str, str]:
    """Where this copy of the package is found, and TensorRT-RTX's library under both its names."""
    found = dict(os.environ)
    root = str(Path(fixedstate.__file__).resolve().parent.parent)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (root, found.get("PYTHONPATH", ""))))
    if target == RTX and sys.platform == "linux":
        with contextlib.suppress(BackendError):  # no such package: the child says so
            links = str(library.link_rtx(scratch))
            search = filter(None, (links, found.get("LD_LIBRARY_PATH", "")))
            found["LD_LIBRARY_PATH"] = os.pathsep.join(search)
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        child.stdin.close()
    if child.returncode is None:
        child.kill()
        child.wait()


def _follow(
    child: subprocess.Popen[bytes],
    read: int,
    share: Share | None,
    began: float,
    timeout: float | None,
) -> tuple[dict[str, Any] | None, int]:
    """Its result, once it ended, and its largest resident size in bytes."""
    result, peak = None, 0
    for message in _messages(read):
        peak = max(peak, peak_bytes(child.pid))
        _check_time(began, timeout)
        if message is None:
            continue
        if "result" in message:
            result = message["result"]
        elif share is not None:
            share(message["share"])
    while child.poll() is None:
        _check_time(began, timeout)
        time.sleep(0.01)
    return result, max(peak, 0 if result is None else result.get("peak_bytes", 0))


def _messages(read: int) -> Iterator[dict[str, Any] | None]:
    """The messages of a process until it closes its end; None where it says nothing for a while."""
    left = b""
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        while True:
            if not selector.select(_TICK):
                yield None
                continue
            piece = os.read(read, 1 << 16)
            if not piece:
                return
            *lines, left = (left + piece).split(b"\n")
            yield from map(json.loads, lines)


def peak_bytes(process: int | str = "self") -> int:
    """Largest resident size that a process has had; 0 where the system does not tell.

    Not what ``wait4`` says: that counts the process it was forked from as well.
    """
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
        if match := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            return int(match[1]) * 1024
    return 0


def _check_time(began: float, timeout: float | None) -> None:
    if timeout is not None and time.monotonic() - began > timeout:
        raise BackendError(
            f"the build took longer than {timeout:g} seconds and was ended: allow more with "
            "--timeout, or build fewer --roles at a time"
        )


# --- what went wrong -----------------------------------------------------------------------------


def require(finished: Finished, target: str, version: str, what: str) -> dict[str, Any]:
    """The result of a process that did what was asked.

    Args:
        finished: What it left.
        target: The product.
        version: Of the product; empty where not known yet.
        what: What it was to do, e.g. ``denoise``.

    Raises:
        BackendError: one sentence: what failed where, and what to do.
    """
    product = f"{PRODUCTS[target]} {version}".strip()
    result = finished.result
    if result is not None and result["ok"]:
        return result
    if result is None:
        raise BackendError(_death(finished, product, what))
    texts = list(dict.fromkeys(filter(None, map(str, result["texts"]))))
    stage = result["stage"]
    if stage == "package":
        raise BackendError(_joined(texts))
    if stage == "memory":
        raise BackendError(f"{what}: {product} ran out of memory: {_LESS}")
    if stage == "plugins":  # each with what to do
        raise BackendError(f"{what}: {product} took no plugin: {_joined(texts)}")
    if stage == "parse":
        raise BackendError(_parser(result["errors"], texts, product, what))
    does = "could not start" if stage == "start" else "made no engine"
    said = _joined(texts) if texts else "it gave no reason"
    raise BackendError(f"{what}: {product} {does}: {said}: {_remedy(texts, target)}")


def _death(finished: Finished, product: str, what: str) -> str:
    said = f", its last words: {finished.words!r}" if finished.words else ""
    if _NO_MEMORY.search(finished.words):
        return f"{what}: {product} ran out of memory and ended its process{said}: {_LESS}"
    if finished.status >= 0:
        return (
            f"{what}: {product} ended its process with exit status {finished.status}{said}: "
            f"{_REPORT}"
        )
    name = signal.Signals(-finished.status).name
    if -finished.status == signal.SIGKILL:
        return (
            f"{what}: the process that ran {product} was killed ({name}) at "
            f"{finished.peak_bytes / 1e9:.1f} GB, most likely because memory ran out: {_LESS}"
        )
    return (
        f"{what}: {product} ended its process ({name}){said}: build with --plugins none or another "
        f"--precision, or {_REPORT}"
    )


def _parser(
    errors: Sequence[Mapping[str, str]], texts: Sequence[str], product: str, what: str
) -> str:
    """Every error of the parser, each with its node."""
    found = []
    for one in errors[:_TEXTS]:
        where = f"node {one['node']!r}" + (f" ({one['op']})" if one["op"] else "")
        found.append(f"{where}: {one['text']}" if one["node"] or one["op"] else one["text"])
    if len(errors) > _TEXTS:
        found.append(f"and {len(errors) - _TEXTS} more")
    said = "; ".join(found) or _joined(texts) or "it gave no reason"
    return (
        f"{what}: {product} cannot parse the graph: {said}: export the bundle again with this "
        f"version, build with another --target, or {_REPORT}"
    )


def _remedy(texts: Sequence[str], target: str) -> str:
    text = " ".join(texts)
    if match := _NO_LIBRARY.search(text):
        return f"install the package of TensorRT that holds {match[1]}, or leave the option out"
    if _NO_MEMORY.search(text):
        return _LESS
    if _NO_CARD.search(text):
        where = "on a machine with the card that the engine is for"
        rtx = "" if target == RTX else f", or with --target {RTX}, which needs none"
        return f"it needs a card for this: build {where}{rtx}"
    return f"build with --plugins none or another --precision, or {_REPORT}"


def _joined(texts: Sequence[str]) -> str:
    """Errors in one line: the first ones, and how many more there are."""
    shown = [" ".join(text.split()).rstrip(".") for text in texts[:_TEXTS]]
    if len(texts) > _TEXTS:
        shown.append(f"and {len(texts) - _TEXTS} more")
    return "; ".join(shown)
