"""What a port is: name, dtype and dimensions of one graph input or output.

Dimensions are ints or one of the symbols ``B`` (rows), ``n`` (blocks), ``m`` (blocks of a fused
pass), ``C`` (columns a key or value buffer can hold), ``T`` (tokens of a full sequence) and ``R``
(slots of a block that are asked for), or a product of a symbol and an int such as ``16n``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fixedstate.errors import SpecError, require_keys

Dim = int | str
"""An int, a symbol (``B``), or a product such as ``16n``."""

DTYPES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "int64": 8,
    "bool": 1,
}
"""Every dtype a port may have, with its bytes per element."""

_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}

SYMBOLS = ("B", "n", "m", "C", "T", "R")
_DIM = re.compile(r"^(\d+)?([BnmCTR])$")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a port's buffer: the same bits where numpy has no such float.

    bfloat16 is kept as uint16, float8_e4m3fn as uint8.

    Raises:
        SpecError: for a dtype no port may have.
    """
    check_dtype(name)
    return np.dtype(_BITS.get(name, name))


def check_dtype(name: str) -> None:
    """Refuse a dtype no port may have."""
    if name not in DTYPES:
        raise SpecError(f"dtype {name!r} is unknown; use one of {', '.join(DTYPES)}")


def resolve_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The number of elements of one dimension for given symbol sizes.

    Args:
        dim: An int, a symbol or a product such as ``16n``.
        sizes: Symbol to size, for every symbol that occurs.

    Raises:
        SpecError: for a dimension that is not well formed or a symbol without a size.
    """
    if isinstance(dim, int):
        return dim
    match = _DIM.match(dim)
    if match is None:
        raise SpecError(f"dimension {dim!r} is neither an int nor a symbol of {SYMBOLS}")
    if match[2] not in sizes:
        raise SpecError(f"dimension {dim!r} needs a size for {match[2]!r}; given: {dict(sizes)}")
    return int(match[1] or 1) * sizes[match[2]]


@dataclass(frozen=True, slots=True)
class Port:
    """One graph input or output.

    Attributes:
        name: The tensor's name in the graph.
        dtype: One of :data:`DTYPES`.
        shape: Dimensions, ints or symbols.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        for dim in self.shape:
            if isinstance(dim, str):
                resolve_dim(dim, dict.fromkeys(SYMBOLS, 1))
            elif dim < 0:
                raise SpecError(f"port {self.name!r} has the negative dimension {dim}")

    def resolve(self, **sizes: int) -> tuple[int, ...]:
        """The shape in elements for given symbol sizes, e.g. ``port.resolve(B=2, C=256)``."""
        return tuple(resolve_dim(dim, sizes) for dim in self.shape)

    def nbytes(self, **sizes: int) -> int:
        """Bytes of the tensor for given symbol sizes."""
        count = 1
        for dim in self.resolve(**sizes):
            count *= dim
        return count * DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Port:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, ("name", "dtype", "shape"), "port")
        return cls(data["name"], data["dtype"], tuple(data["shape"]))


Array = npt.NDArray[Any]
"""Any numpy array."""
