"""Answers as they are finished, in a file beside the one that holds them all in the end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from fixedstate.bundle import umask
from fixedstate.errors import UsageError

FORMAT = 1
"""Number of the file format; another one is refused."""

_MARK = "fixedstate_journal"


class Journal:
    """A JSON-lines file: its first line says what the answers in the others belong to.

    A document is written by one call to the system, so that a process that is killed loses none
    that was handed over; what a crash of the machine tore off at the end is dropped when it is
    opened again. One process uses it at a time.

    Args:
        path: The file, made where it is missing.
        identity: What the answers depend on.
        restart: Whether answers of another run are thrown away.

    Attributes:
        path: The file.
        failed: Indices of the answers that say `error`, in order.

    Raises:
        UsageError: where it belongs to another run, is damaged, or is in use.
        click.ClickException: where it cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self._places: dict[int, int] = {}  # by index: where its line begins
        self._failed: set[int] = set()
        with _writing(path):
            self._file = path.open("ab", buffering=0)
        try:
            self._take(identity, restart)
        except BaseException:
            self._file.close()
            raise

    def _take(self, identity: Mapping[str, Any], restart: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is being written by another process: wait for its end, or choose "
                "another -o"
            ) from None
        end = 0 if restart else self._read(identity)
        with _writing(self.path):
            self._file.truncate(end)
        self._end = end
        if not end:
            self._write({_MARK: FORMAT, **identity})

    def _read(self, identity: Mapping[str, Any]) -> int:
        """Find every whole line; returns where the last one ends."""
        end = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break  # torn off in the middle
                data = self._line(raw, number)
                if number == 1:
                    self._compare(data, identity)
                else:
                    self._note(data, end)
                end += len(raw)
        return end

    def _line(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            data = json.loads(raw)
        except ValueError:
            data = None
        if isinstance(data, dict) and (number == 1 or type(data.get("index")) is int):
            return data
        raise UsageError(f"{self.path} is damaged in line {number}: add --restart to begin anew")

    def _compare(self, found: dict[str, Any], identity: Mapping[str, Any]) -> None:
        if found.pop(_MARK, None) != FORMAT:
            raise UsageError(
                f"{self.path} holds no answers of this version: move it away, or add --restart"
            )
        there, here = dict(_flat(found)), dict(_flat(identity))
        differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
        if differing:
            what = "; ".join(
                f"{key} {_short(there.get(key))} there, {_short(here.get(key))} here"
                for key in differing
            )
            raise UsageError(
                f"{self.path} holds answers of another run ({what}): give that command again to "
                "go on with it, add --restart to throw them away, or choose another -o"
            )

    def _note(self, data: Mapping[str, Any], place: int) -> None:
        index = data["index"]
        self._places[index] = place
        if data.get("finish_reason") == "error":
            self._failed.add(index)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, index: int) -> bool:
        return index in self._places

    @property
    def failed(self) -> list[int]:
        """Indices of the answers that say `error`, in order."""
        return sorted(self._failed)

    def append(self, data: Mapping[str, Any]) -> None:
        """Keep an answer; it is there even if the process is killed right after.

        Args:
            data: A JSON-ready mapping with the key `index`.
        """
        place = self._end
        self._write(data)
        self._note(data, place)

    def _write(self, data: Mapping[str, Any]) -> None:
        line = json.dumps(data, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with _writing(self.path):
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._end += len(line)

    def finish(self, out: Path, count: int) -> None:
        """Write all answers in the order of their indices, whole or not at all; the journal goes.

        Args:
            out: The file to make, or replace.
            count: Answers that there are.
        """
        assert len(self) == count
        temporary = None
        try:
            with _writing(out):
                handle, temporary = tempfile.mkstemp(
                    prefix=f".{out.name}.", dir=out.absolute().parent
                )
                with os.fdopen(handle, "wb") as file, self.path.open("rb") as answers:
                    for index in range(count):
                        answers.seek(self._places[index])
                        file.write(answers.readline())
                    file.flush()
                    os.fsync(file.fileno())
                Path(temporary).chmod(0o666 & ~umask())
                Path(temporary).replace(out)
                temporary = None
                self.path.unlink()
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise click.ClickException(
            f"writing {path} failed: {err.strerror or err}; what it holds already is kept"
        ) from err


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 24 else text[:12] + "..."
