"""Block decoding on a bundle: numpy and one back end, no PyTorch, no ONNX package.

Example:
    >>> from fixedstate.runtime import Request, Settings
    >>> Request([1, 2, 3], Settings(max_new_tokens=16)).settings.seed
    0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fixedstate.runtime.decoder import Decoder, load
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.prefix import PrefixStore
from fixedstate.runtime.requests import BlockEvent, PassEvent, Request, Result, Settings
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.runtime.snapshot import Snapshot

if TYPE_CHECKING:
    from fixedstate.runtime.aio import AsyncAnswer, AsyncDecoder

__all__ = [
    "AsyncAnswer",
    "AsyncDecoder",
    "BlockEvent",
    "Decoder",
    "PassEvent",
    "PrefixStore",
    "Request",
    "Result",
    "Scheduler",
    "Settings",
    "Snapshot",
    "Stream",
    "load",
]


def __getattr__(name: str) -> Any:
    """What needs asyncio, imported on use: it takes a tenth of the time of everything else."""
    if name in ("AsyncAnswer", "AsyncDecoder"):
        from fixedstate.runtime import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
