"""A robot log with questions whose answers are known: the input of ``fixedstate demo``.

The lines are those the shipped models were trained on (``examples/robot_log``): ``set arm_3 17``
stores a value, ``get arm_3`` asks for it and is answered by ``{"arm_3": 17}``; every other line
stores nothing. The same seed gives the same log on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_DEVICES = tuple(f"{kind}_{unit}" for kind in ("arm", "base", "cam", "grip") for unit in range(8))
_ACTIONS = ("move", "stop", "check")
_STATUS = {
    "battery": ("low", "ok", "full"),
    "temp": ("high", "low", "ok"),
    "door": ("open", "closed"),
    "path": ("clear", "blocked"),
    "link": ("ok", "lost"),
    "lamp": ("on", "off"),
}
_KEYS = 5  # devices that are set, each of which is asked for


@dataclass(frozen=True, slots=True)
class Question:
    """One question about the log.

    Attributes:
        prompt: The line that asks, to be put behind the log.
        answer: The one right answer.
        distance: Tokens between the line that stored the value and the question.
    """

    prompt: str
    answer: str
    distance: int


@dataclass(frozen=True, slots=True)
class RobotLog:
    """A log and what can be asked about it."""

    text: str
    tokens: int
    questions: tuple[Question, ...]


def robot_log(tokens: int, count: Callable[[str], int], *, seed: int = 0) -> RobotLog:
    """Write a log of about that many tokens and the questions it answers.

    Values are stored within the first third; what follows only pushes the questions away.

    Args:
        tokens: Length wanted; reached to within one line.
        count: Tokens of a text.
        seed: Draws devices, values and filler.

    Example:
        >>> log = robot_log(60, lambda text: len(text.split()) + 1, seed=1)
        >>> len(log.questions), log.questions[0].prompt in log.text
        (5, False)
    """
    rng = random.Random(seed)
    values = _draw_values(rng)
    stores = [f"set {device} {value}\n" for device, value in values.items()]
    filler: list[str] = []
    room = tokens - sum(map(count, stores))
    while room > 0:
        filler.append(_filler(rng))
        room -= count(filler[-1])
    every = max(1, len(filler) // (3 * len(stores)))
    lines: list[str] = []
    for index, store in enumerate(stores):
        lines += [store, *filler[index * every : (index + 1) * every]]
    lines += filler[len(stores) * every :]
    text = "".join(lines)
    total = count(text)
    questions = tuple(
        Question(
            f"get {device}\n", json.dumps({device: value}), total - count(text[: text.index(store)])
        )
        for (device, value), store in zip(values.items(), stores, strict=True)
    )
    return RobotLog(text, total, questions)


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    # random() is the one draw whose sequence is the same in every version of Python.
    return items[int(rng.random() * len(items))]


def _draw_values(rng: random.Random) -> dict[str, int]:
    values: dict[str, int] = {}
    while len(values) < _KEYS:
        values.setdefault(_pick(rng, _DEVICES), int(rng.random() * 100))
    return values


def _filler(rng: random.Random) -> str:
    if rng.random() < 0.25:
        return f"{_pick(rng, _ACTIONS)} {_pick(rng, _DEVICES)}\n"
    subject = _pick(rng, tuple(_STATUS))
    return f"{subject} {_pick(rng, _STATUS[subject])}\n"
