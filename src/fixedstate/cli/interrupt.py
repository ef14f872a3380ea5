"""Ctrl-C that waits for the end of a pass, so that states and files stay whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


class Interrupt:
    """Whether Ctrl-C was pressed.

    Attributes:
        asked: True from the first Ctrl-C on.
    """

    def __init__(self) -> None:
        self.asked = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def held_interrupt() -> Iterator[Interrupt]:
    """Inside the block the first Ctrl-C is only noted; a second one interrupts at once.

    In a thread that gets no signals Ctrl-C stays with the thread that does.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt._take)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
