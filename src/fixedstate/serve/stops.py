"""Texts that end an answer, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Hands text on up to the first of some texts; holds back what may become one of them.

    The first is the one that is whole first, and the longest of those that end at one place.

    Args:
        stops: Texts of one character or more; none of them lets everything pass.

    Example:
        >>> stops = StopTexts(["END"])
        >>> stops.push("one E"), stops.push("ND two"), stops.found
        ('one ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What may be handed on now; nothing once one was found."""
        if self.found:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            end, length = min(found)  # the first that is whole, however the text was cut
            self.found, self._held = True, ""
            return text[: end + length]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, where no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop text begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
