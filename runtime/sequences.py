"""The graph ``full`` bound to rows of one length, for as many shapes as are kept.

This module mutates: :class:`Sequences` owns the memory that ids and logits of a call lie in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fixedstate.errors import CapacityError
from fixedstate.ports import Array
from fixedstate.runtime.session import Binding, Session

KEPT_BINDINGS = 32
"""Shapes last used; lengths differ by request, so there is no end of them."""

_NONE: Array = np.zeros(0, np.int64)


class BoundSequences(Protocol):
    """The graph on k rows of T tokens."""

    @property
    def ids(self) -> Array:
        """(k, T) int64, to be written before each run."""
        ...

    def run(self, spans: Sequence[tuple[int, int]]) -> list[Array]:
        """Run it.

        Args:
            spans: First position and end of what is wanted of each row.

        Returns:
            Logits of each row, (end - first, V) float32, valid until the next run.
        """
        ...

    def close(self) -> None:
        """Let go of it; nothing may still run."""
        ...


class Sequences(ABC):
    """Whole sequences through one graph, in calls of rows of one length.

    All shapes lie in the memory of the largest call so far, and the shapes last used stay bound.
    """

    def __init__(self) -> None:
        self._bound: OrderedDict[tuple[int, int], BoundSequences] = OrderedDict()
        self._size = 0

    @property
    @abstractmethod
    def provider(self) -> str:
        """What it really runs on."""

    def check(self, length: int) -> None:  # noqa: B027  # a graph takes any
        """Refuse sequences of a length that it does not take.

        Raises:
            CapacityError: with what it takes and what to do.
        """

    def bind(self, rows: int, length: int) -> BoundSequences:
        """The graph on that many rows of that many tokens.

        Raises:
            CapacityError: where there is no memory for it.
        """
        key = (rows, length)
        bound = self._bound.get(key)
        if bound is not None:
            self._bound.move_to_end(key)
            return bound
        if (size := self._rows(rows) * length) > self._size:
            self.forget()  # they hold the memory that is let go of now
            self._size = 0
            self._allocate(rows, length)
            self._size = size
        if len(self._bound) >= KEPT_BINDINGS:
            self._bound.popitem(last=False)[1].close()
        made = self._bound[key] = self._make(rows, length)
        return made

    def forget(self) -> None:
        """Let go of all shapes; their memory stays."""
        while self._bound:
            self._bound.popitem()[1].close()

    def close(self) -> None:
        """Let go of everything."""
        self.forget()

    def _rows(self, rows: int) -> int:
        """Rows that a call with so many really has."""
        return rows

    @abstractmethod
    def _allocate(self, rows: int, length: int) -> None:
        """Memory of a call, in place of the smaller one."""

    @abstractmethod
    def _make(self, rows: int, length: int) -> BoundSequences:
        """The graph bound to the beginning of that memory."""


@dataclass(frozen=True, slots=True)
class _HostBound:
    """A session's graph on host memory, whose logits lie there whole."""

    binding: Binding
    ids: Array
    logits: Array

    def run(self, spans: Sequence[tuple[int, int]]) -> list[Array]:
        self.binding.run()
        return [self.logits[row, first:end] for row, (first, end) in enumerate(spans)]

    def close(self) -> None:
        """Nothing but the arrays is held."""


class HostSequences(Sequences):
    """Whole sequences through a session, on arrays.

    Args:
        session: The graph ``full``.
        width: V, scores of a position.
    """

    def __init__(self, session: Session, width: int) -> None:
        super().__init__()
        self._session = session
        self._width = width
        self._ids = self._logits = _NONE

    @property
    def provider(self) -> str:
        """What it really runs on."""
        return self._session.provider

    def _allocate(self, rows: int, length: int) -> None:
        self._ids = self._logits = _NONE
        count = rows * length
        try:
            self._ids = np.zeros(count, np.int64)
            self._logits = np.zeros(count * self._width, np.float32)
        except MemoryError as err:
            raise CapacityError(no_memory(rows, length, self._width)) from err

    def _make(self, rows: int, length: int) -> BoundSequences:
        count = rows * length
        ids = self._ids[:count].reshape(rows, length)
        logits = self._logits[: count * self._width].reshape(rows, length, self._width)
        return _HostBound(
            self._session.bind({"input_ids": ids}, {"logits": logits}), ids=ids, logits=logits
        )


def no_memory(rows: int, length: int, width: int, where: str = "", why: object = "") -> str:
    """What is said where a call does not fit: `where` is of which memory, `why` the reason."""
    return (
        f"no {where}memory for the logits of {rows} sequences of {length} tokens "
        f"({4 * rows * length * width} bytes){why and f': {why}'}: use fewer slots or ask for "
        "fewer new tokens"
    )
