"""What a scan state kept in fewer bits comes to over many blocks.

The state is rounded once for every committed block, as it would be on its way to memory, and both
models go along the same tokens. No graph has to be changed to know the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fixedstate.bundle import Bundle
from fixedstate.calib.data import Record
from fixedstate.calib.measure import Comparison, compare
from fixedstate.calib.table import Policy
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array
from fixedstate.runtime import ort
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine

STATE_FORMATS = {"fp16": 2.0, "bf16": 2.0, "int8row": 1.0}
"""Bytes of an element in each format, the scales of rows apart."""

_STATE = "ssm_state"
_BLOCKS = (1, 10, 100, 1000)


def rounded_state(state: Array, name: str) -> Array:
    """A row's scan state as it is after it was kept in a format, float32 again.

    Args:
        state: Mamba-2 (heads, d_state, head_dim) or Mamba-1 (d_state, d_inner), without the row
            axis.
        name: One of :data:`STATE_FORMATS`; ``int8row`` has a scale of its own for every head and
            channel, over d_state.

    Raises:
        CalibrationError: ``STATE_FORMAT`` for another name, or ``NONFINITE`` where a value does not
            fit.
    """
    if name not in STATE_FORMATS:
        raise CalibrationError(
            "STATE_FORMAT",
            f"state format {name!r} is unknown; use one of {', '.join(STATE_FORMATS)}",
        )
    wide = np.asarray(state, np.float32)
    if name == "int8row":
        scale = np.abs(wide).max(-2, keepdims=True) / np.float32(127.0)
        scale = np.where(scale > 0, scale, np.float32(1.0))
        found: Array = np.clip(np.rint(wide / scale), -127, 127) * scale
        return found.astype(np.float32)
    kind = np.dtype(np.float16 if name == "fp16" else ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        found = wide.astype(kind).astype(np.float32)
    if not np.isfinite(found).all():
        raise CalibrationError(
            "NONFINITE",
            f"the state holds values up to {float(np.abs(wide).max()):.3g}, which {name} does not "
            "have: keep it in float32, or try bf16",
        )
    return found


class RoundedEngine(SessionEngine):
    """Passes whose scan states are rounded behind every commit; made by :func:`rounded_engine`."""

    state_format: str

    def commit(self, ids: Array, commit_length: Array, first: int = 0) -> None:
        """Commit, then round the scan states of the rows that took anything over."""
        super().commit(ids, commit_length, first)
        for row in np.flatnonzero(np.asarray(commit_length)).tolist():
            for name, view in self.views(first + row).items():
                if name.startswith(_STATE):
                    view[...] = rounded_state(view, self.state_format)


def rounded_engine(bundle: Bundle, name: str, slots: int) -> RoundedEngine:
    """An engine of a bundle on the CPU, one thread, whose scan states are kept in a format."""
    sessions = ort.open_sessions(bundle, ("denoise", "commit"), threads=1)
    made = RoundedEngine(bundle.spec, bundle.state, sessions, slots=slots, weights=bundle.weights)
    made.state_format = name
    return made


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a model whose state is rounded is from the model as it is.

    Attributes:
        name: The format.
        comparison: Divergence by block, and the error of the state at some of them.
        state_bytes: Of one row's scan states in that format, scales included.
        float_bytes: Of the same in float32.
    """

    name: str
    comparison: Comparison
    state_bytes: int
    float_bytes: int

    @property
    def is_growing(self) -> bool:
        """Whether the error of the state still grew by more than a tenth over the last step."""
        errors = [error for _, error in sorted(self.comparison.state.items())]
        return len(errors) > 1 and errors[-1] > 1.1 * errors[-2]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "format": self.name,
            "state_bytes": self.state_bytes,
            "float_bytes": self.float_bytes,
            "growing": self.is_growing,
            **self.comparison.to_dict(),
        }


def drift(
    bundle: Bundle,
    name: str,
    records: Sequence[Record],
    *,
    at: Sequence[int] = _BLOCKS,
    masks: Sequence[float] = (0.5,),
    progress: Callable[[str], None] | None = None,
) -> Drift:
    """Measure a state format along sequences of many blocks.

    Args:
        bundle: An fp32 bundle of a model with scan states.
        name: One of :data:`STATE_FORMATS`.
        records: Long sequences of whole blocks.
        at: Committed blocks at which the states are compared.
        masks: Shares of masks at which scores are compared in every block.
        progress: Told how far it is.

    Raises:
        CalibrationError: ``MODEL`` for a model without a scan state, or as :func:`rounded_state`.
    """
    ports = [port for port in bundle.state.committed if port.kind == "ssm"]
    if not ports:
        raise CalibrationError(
            "MODEL", f"{bundle.path} has no scan state: there is nothing to keep in fewer bits"
        )
    rounded_state(np.zeros((1, 1), np.float32), name)
    longest = max(len(record.ids) for record in records) // bundle.spec.block_len
    policy = Policy(masks=tuple(masks), blocks=longest)
    found = compare(
        bundle,
        lambda slots: open_engine(bundle, threads=1, slots=slots, memory="fast"),
        lambda slots: rounded_engine(bundle, name, slots),
        records,
        policy,
        state_at=at,
        progress=progress,
    )
    elements = [port.nbytes(1) // 4 for port in ports]
    scales = [
        4 * count // port.past.resolve(B=1)[-2] if name == "int8row" else 0
        for port, count in zip(ports, elements, strict=True)
    ]
    nbytes = int(sum(elements) * STATE_FORMATS[name]) + sum(scales)
    return Drift(name, found, nbytes, 4 * sum(elements))
