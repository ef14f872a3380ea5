"""A file of prompts: one JSON object a line, read again whenever it is needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fixedstate.cli.opening import SETTINGS, tokens_of
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.runtime import Request
    from fixedstate.runtime.snapshot import Snapshot
    from fixedstate.runtime.text import Text

KEYS = ("prompt", "prompt_ids", "id", *SETTINGS, "stop_ids")
"""What a line may hold."""

_REAL = ("threshold", "temperature")


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank.

    Attributes:
        index: Of the prompt, from 0.
        number: Of the line, from 1.
        raw: Its bytes.
    """

    index: int
    number: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line that was understood.

    Attributes:
        line: Where it stands.
        id: The name that the user gave it.
        request: What is asked.
    """

    line: Line
    id: str | int | None
    request: Request


def scan(path: Path) -> tuple[str, int]:
    """The sha256 of a file and how many prompts it holds.

    Raises:
        UsageError: for a file that cannot be read or holds none.
    """
    digest, count = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            for raw in file:
                digest.update(raw)
                count += bool(raw.strip())
    except OSError as err:
        raise UsageError(f"{path} cannot be read: {err.strerror or err}") from err
    if not count:
        raise UsageError(f"{path} holds no prompts: write one JSON object a line")
    return digest.hexdigest(), count


class PromptFile:
    """The prompts of a file, in order; only the one that is looked at is in memory.

    Args:
        path: The file.
        given: Settings of the command line; those of a line go before them.
        text: The bundle's tokenizer, if it has one.
        prefix: The saved state that all prompts go on from.
    """

    def __init__(
        self, path: Path, given: Mapping[str, Any], text: Text | None, prefix: Snapshot | None
    ) -> None:
        self.path = path
        self.text = text
        self._given = dict(given)
        self._prefix = prefix

    def lines(self) -> Iterator[Line]:
        """Every line that is not blank."""
        index = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield Line(index, number, raw)
                    index += 1

    def read(self, line: Line) -> Prompt:
        """What a line asks.

        Raises:
            UsageError: for anything else than an object of known keys with values of their kinds.
        """
        from fixedstate.runtime import Request, Settings

        data = _object(line.raw)
        unknown = [key for key in data if key not in KEYS]
        if unknown:
            raise UsageError(f"unknown key {unknown[0]!r}; known keys: {', '.join(KEYS)}")
        name = data.pop("id", None)
        if isinstance(name, bool) or not isinstance(name, str | int | None):
            raise UsageError(f"id must be a text or a whole number; got {name!r}")
        if ("prompt" in data) == ("prompt_ids" in data):
            raise UsageError("give prompt (a text) or prompt_ids (a list): one of them")
        if "prompt" in data:
            ids = self._encode(data.pop("prompt"))
        else:
            ids = _ids(data.pop("prompt_ids"), "prompt_ids")
        if "stop_ids" in data:
            data["stop_ids"] = tuple(_ids(data["stop_ids"], "stop_ids"))
        for key, value in data.items():
            if value is None or (key in _REAL and not _number(value)):
                raise UsageError(f"{key} must be a number; got {json.dumps(value)}")
        return Prompt(line, name, Request(ids, Settings(**{**self._given, **data}), self._prefix))

    def _encode(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            raise UsageError(f"prompt must be a text; got {_short(prompt)}")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UsageError("prompt holds half of a surrogate pair, which is no text") from None
        if self.text is None:
            raise UsageError("the bundle has no tokenizer: give prompt_ids instead of prompt")
        return self.text.encode(prompt, goes_on=tokens_of(self._prefix) > 0)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode(), object_pairs_hook=_pairs, parse_constant=_constant)
    except UnicodeDecodeError:
        raise UsageError("not UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as err:
        raise UsageError(f"not JSON ({err})") from None
    if not isinstance(data, dict):
        raise UsageError(f"not a JSON object: {_short(data)}")
    return data


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise UsageError(f"key {key!r} stands there twice")
        out[key] = value
    return out


def _constant(name: str) -> float:
    raise UsageError(f"{name} is no JSON")


def _ids(value: Any, what: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise UsageError(f"{what} must be a list of whole numbers; got {_short(value)}")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
