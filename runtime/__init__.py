"""Block decoding on a bundle: numpy and one back end, no PyTorch, no ONNX package.

Example:
    >>> from fixedstate.runtime import Request, Settings
    >>> Request([1, 2, 3], Settings(max_new_tokens=16)).settings.seed
    0
"""

from fixedstate.runtime.decoder import Decoder, load
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import BlockEvent, PassEvent, Request, Result, Settings

__all__ = [
    "BlockEvent",
    "Decoder",
    "PassEvent",
    "Request",
    "Result",
    "Settings",
    "Stream",
    "load",
]
