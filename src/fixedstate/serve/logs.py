"""Log lines of a server: one line an event, the request's id in each, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

NAME = "fixedstate.serve"
"""The logger of the server."""

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Id of the request that is being answered."""

_OTHERS = ("uvicorn", "uvicorn.error")


def log(words: str, /, *, level: int = logging.INFO, **values: Any) -> None:
    """Log an event.

    Args:
        words: What happened.
        level: Of :mod:`logging`.
        values: What stands in the line beside it.
    """
    logging.getLogger(NAME).log(level, words, extra={"values": values})


def set_up(*, as_json: bool) -> None:
    """Send the lines of the server and of its HTTP library to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(as_json=as_json))
    for name, level in ((NAME, logging.INFO), *((other, logging.WARNING) for other in _OTHERS)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler] if name != "uvicorn.error" else []
        logger.setLevel(level)
        logger.propagate = name == "uvicorn.error"


class _Line(logging.Formatter):
    """One line a record, whatever stands in it; a traceback is one value."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "request_id": request_id.get(),
            "message": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(line, ensure_ascii=True, default=str)
        head = [line.pop(name) for name in ("time", "level", "request_id")]
        message = json.dumps(line.pop("message"))[1:-1]
        rest = [f"{name}={_word(value)}" for name, value in line.items() if value is not None]
        return " ".join([*head, message, *rest])


def _word(value: object) -> str:
    """A value without a blank or a line break outside of quotes."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & {" ", '"', "="}
    return text if plain else json.dumps(text)
