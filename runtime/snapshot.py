"""The state of one row as a value: taken, put back, saved, loaded.

A file is a safetensors file: one tensor per port, without the axis of rows, and `last_logits`
where the model predicts the next position. Its metadata say which weights and which StateSpec it
belongs to, and hold the hash of every tensor and of themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from fixedstate.bundle import write_atomic
from fixedstate.errors import BundleError, CapacityError, SpecError, StateError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.buffers import check_arrays
from fixedstate.runtime.engine import Engine, ReadableEngine
from fixedstate.runtime.requests import check_tokens
from fixedstate.state import StatePort, StateSpec

FORMAT = 1
"""Number of the file format this code writes; every older one loads, a newer one is refused."""

_MARK = "fixedstate_state"  # the one metadata key, so that equal states have equal files
_KEYS = (
    *("format", "weights", "state", "past_length", "pending", "seed", "block_len"),
    *("last_logits", "tensors", "sha256"),
)
_LAST = "last_logits"
_KINDS = {
    **dict.fromkeys(("past_length", "seed", "block_len"), int),
    "weights": str,
    "pending": list,
    _LAST: bool,
    "tensors": dict,
    "state": list,
}
_HASH = re.compile(r"[0-9a-f]{64}")
_FLOAT8_NAN = np.uint8(0x7F)  # all bits but the sign; it has no infinity
_BFLOAT16_EXPONENT = np.uint16(0x7F80)  # all ones: NaN or infinity


class StatefulEngine(ReadableEngine, Protocol):
    """An engine whose rows can be saved and put back."""

    @property
    def state(self) -> StateSpec:
        """What is carried."""
        ...

    @property
    def weights(self) -> str:
        """sha256 of the weights; empty where it is not known."""
        ...

    def write(
        self,
        row: int,
        arrays: Mapping[str, Array],
        past_length: int,
        last_logits: Array | None = None,
    ) -> None:
        """Give a row a state that `read` returned, from here or elsewhere, all ports or nothing."""
        ...


def stateful(engine: Engine) -> StatefulEngine:
    """The engine as one whose rows can be saved.

    Raises:
        UsageError: where it carries no state.
    """
    if not engine.whole_blocks:
        raise UsageError(
            "this model looks at the whole sequence in every pass (objective 'full'): it carries "
            "no state that could be saved or gone on from"
        )
    return cast(StatefulEngine, engine)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One row between two blocks: all it needs to go on, in this process or in another one.

    It loads wherever weights and StateSpec agree, whatever runs the passes, and into any slot.
    Ports of scope ``step`` are not part of it: between blocks they have their reset value.

    Attributes:
        arrays: By port suffix, without the axis of rows; keys and values of committed tokens
            only; bfloat16 as uint16, float8_e4m3fn as uint8. Read-only.
        past_length: Committed tokens.
        pending: Tokens behind them that make no whole block yet, 0 to L-1.
        seed: Of the row.
        last_logits: (V,) float32 of the last committed token, where the model predicts the next
            position; None elsewhere.
        weights: sha256 of the weights; empty where the engine does not know.
        state: What is carried, and at which precision.
        block_len: L.

    Raises:
        StateError: where the parts contradict one another, or a value is NaN or infinite.
    """

    arrays: Mapping[str, Array] = field(repr=False)
    past_length: int
    pending: tuple[int, ...]
    seed: int
    last_logits: Array | None = field(repr=False)
    weights: str
    state: StateSpec = field(repr=False)
    block_len: int

    def __post_init__(self) -> None:
        if self.block_len < 1 or self.past_length < 0 or not 0 <= self.seed < 2**64:
            raise StateError(
                f"a state cannot have {self.past_length} committed tokens, blocks of "
                f"{self.block_len} and seed {self.seed}"
            )
        if len(self.pending) >= self.block_len:
            raise StateError(
                f"a state has {len(self.pending)} pending tokens in blocks of {self.block_len}: "
                "whole blocks have to be committed first"
            )
        check_arrays(self.state, self.arrays, self.past_length)
        if self.last_logits is not None and (
            self.last_logits.ndim != 1 or self.last_logits.dtype != np.float32
        ):
            raise StateError(
                f"last_logits are {self.last_logits.dtype} {list(self.last_logits.shape)}; "
                "expected float32 of one dimension"
            )
        dtypes = {port.suffix: port.past.dtype for port in self.state.committed}
        for name, array in self._tensors().items():
            if not _finite(array, dtypes.get(name, "")):
                raise StateError(
                    f"state {name!r} holds NaN or infinity after {self.past_length} tokens: "
                    "nothing can go on from it"
                )
        ports = [
            port.suffix for port in self.state.committed
        ]  # in their order, whatever the file's
        frozen = {name: _frozen(self.arrays[name]) for name in ports}
        object.__setattr__(self, "arrays", frozen)
        if self.last_logits is not None:
            object.__setattr__(self, "last_logits", _frozen(self.last_logits))

    # --- from and to an engine

    @classmethod
    def take(
        cls, engine: Engine, row: int, pending: tuple[int, ...] = (), seed: int = 0
    ) -> Snapshot:
        """A copy of a row's state; take it between two blocks.

        Args:
            engine: Where the row is.
            row: Its slot.
            pending: Ids behind the committed tokens, 0 to L-1.
            seed: Of the row.

        Raises:
            StateError: where the state is not finite, or too many ids are pending.
            UsageError: for a slot that the engine does not have, or an engine without state.
        """
        holder = stateful(engine)
        _check_row(engine, row)
        last = engine.last_logits[row].copy() if engine.spec.logit_shift else None
        return cls(
            arrays=holder.read(row),
            past_length=int(engine.past_length[row]),
            pending=tuple(int(token) for token in pending),
            seed=int(seed),
            last_logits=last,
            weights=holder.weights,
            state=holder.state,
            block_len=engine.spec.block_len,
        )

    def restore(self, engine: Engine, row: int) -> None:
        """Put the state into a row, all ports or nothing; pending ids and seed are the caller's.

        Raises:
            StateError: where it does not fit the model (:meth:`check`).
            CapacityError: where it does not fit the limit or the memory.
            UsageError: for a slot that the engine does not have, or an engine without state.
        """
        _check_row(engine, row)
        self.check(engine)
        stateful(engine).write(row, self.arrays, self.past_length, self.last_logits)

    def check(self, engine: Engine) -> None:
        """Refuse an engine that this state cannot go on in.

        Raises:
            StateError: for other weights, another StateSpec, block length or vocabulary.
            CapacityError: where the engine's limit is below the committed tokens.
            UsageError: for an engine without state.
        """
        holder, spec = stateful(engine), engine.spec
        if self.weights != holder.weights:
            raise StateError(
                f"the state was made with weights {_short(self.weights)}, this model has "
                f"{_short(holder.weights)}: use the bundle it was made with, or make it again"
            )
        for ours, theirs in zip_longest(self.state.ports, holder.state.ports):
            if ours != theirs:
                raise StateError(
                    f"the state holds {_port(ours)}, this model wants {_port(theirs)}: use a "
                    "bundle of the same model and precision, or make the state again"
                )
        if self.block_len != spec.block_len:
            raise StateError(
                f"the state was made for blocks of {self.block_len} tokens, this model has blocks "
                f"of {spec.block_len}"
            )
        if self.past_length % spec.block_len and not spec.causal_commit:
            raise StateError(
                f"the state ends inside a block ({self.past_length} tokens, blocks of "
                f"{spec.block_len}), where this model's commit pass cannot"
            )
        found = None if self.last_logits is None else len(self.last_logits)
        wanted = spec.vocab_rows if spec.logit_shift else None
        if found != wanted:
            raise StateError(
                f"the state has {found or 'no'} last_logits, this model wants {wanted or 'none'}"
            )
        try:
            check_tokens(self.pending, spec, "pending ids of the state")
        except UsageError as err:
            raise StateError(str(err)) from err
        if engine.limit is not None and self.past_length > engine.limit:
            raise CapacityError(
                f"the state holds {self.past_length} committed tokens; the limit is {engine.limit}"
            )

    # --- from and to bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._tensors().values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all; one that is there is replaced.

        Raises:
            StateError: where the engine's weights are not known, or the disk is full.
        """
        try:
            write_atomic(Path(path), self.to_bytes())
        except BundleError as err:
            raise StateError(str(err)) from err

    def to_bytes(self) -> bytes:
        """The bytes of the file that :meth:`save` writes.

        Raises:
            StateError: where the engine's weights are not known.
        """
        from safetensors.numpy import save

        if not _HASH.fullmatch(self.weights):
            raise StateError(
                f"the weights of this state are not known ({self.weights!r} is no sha256): it "
                "could be loaded into any model, so it is not saved"
            )
        tensors = self._tensors()
        values = {
            "format": FORMAT,
            "weights": self.weights,
            "state": self.state.to_dict(),
            "past_length": self.past_length,
            "pending": list(self.pending),
            "seed": self.seed,
            "block_len": self.block_len,
            _LAST: self.last_logits is not None,
            "tensors": {name: _digest(tensors[name]) for name in sorted(tensors)},
        }
        sealed = json.dumps({**values, "sha256": _seal(values)})
        return bytes(save(tensors, {_MARK: sealed}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a file that :meth:`save` wrote and check every hash in it.

        Raises:
            StateError: for a file that is missing, damaged, newer or no saved state.
        """
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as err:
            raise StateError(
                f"{path} does not exist: make it with `fixedstate prefix make`"
            ) from err
        except OSError as err:
            raise StateError(f"{path} cannot be read: {err.strerror or err}") from err
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "the saved state") -> Snapshot:
        """Read what :meth:`to_bytes` gave.

        Args:
            data: The content of a file.
            what: Its name, for messages.

        Raises:
            StateError: for bytes that are damaged, newer or no saved state.
        """
        tensors, metadata = _read(data, what)
        values = _values(metadata, what)
        hashes = values.pop("tensors")
        for name in sorted(hashes.keys() ^ tensors.keys()):
            has = "lacks" if name in hashes else "holds an unknown"
            raise StateError(f"{what} is damaged: it {has} tensor {name!r}")
        for name, array in tensors.items():
            if _digest(array) != hashes[name]:
                raise StateError(
                    f"{what} is damaged in {name!r}: its bytes are not those that were saved; "
                    "copy it again or make it again"
                )
        last = tensors.pop(_LAST, None)
        if (last is not None) != values.pop(_LAST):
            raise StateError(f"{what} is damaged: last_logits contradict its metadata")
        try:
            return cls(arrays=tensors, last_logits=last, **values)
        except StateError as err:
            raise StateError(f"{what}: {err}") from err

    def _tensors(self) -> dict[str, Array]:
        """Everything that has bytes, by name."""
        last = {} if self.last_logits is None else {_LAST: self.last_logits}
        return {**self.arrays, **last}


def _check_row(engine: Engine, row: int) -> None:
    if not 0 <= row < engine.slots:
        raise UsageError(f"slot {row} is none of 0..{engine.slots - 1}")


# --- what a file holds ---------------------------------------------------------------------------


def _read(data: bytes, what: str) -> tuple[dict[str, Array], Any]:
    """The tensors of a safetensors file and its metadata."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors: dict[str, Array] = load(data)
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, AttributeError) as err:
        raise StateError(
            f"{what} is no saved state, or damaged: {err}; copy it again or make it again"
        ) from err
    return tensors, metadata


def _values(metadata: Any, what: str) -> dict[str, Any]:
    """The fields of a Snapshot that stand in the metadata, and the hashes of the tensors."""
    if not isinstance(metadata, dict) or _MARK not in metadata:
        raise StateError(
            f"{what} is a safetensors file, but no saved state: make one with "
            "`fixedstate prefix make`"
        )
    try:
        values = json.loads(metadata[_MARK])
        number = values["format"]
    except (ValueError, KeyError, TypeError) as err:
        raise StateError(f"{what} is damaged: its metadata are no JSON object ({err})") from err
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise StateError(f"{what} is damaged: {number!r} is no format number")
    if number > FORMAT:
        raise StateError(
            f"{what} has format {number}, this version reads up to {FORMAT}: install a newer "
            "fixedstate or make the state again"
        )
    if sorted(values) != sorted(_KEYS):
        odd = sorted(set(_KEYS) ^ set(values))
        raise StateError(f"{what} is damaged: its metadata lack or add {', '.join(odd)}")
    if _seal(values) != values["sha256"]:
        raise StateError(
            f"{what} is damaged: its metadata are not those that were saved; copy it again or "
            "make it again"
        )
    for name, kind in _KINDS.items():
        if type(values[name]) is not kind:
            raise StateError(f"{what} is damaged: its {name} is {values[name]!r}")
    try:
        state = StateSpec.from_dict(values["state"])
    except (ValueError, KeyError, TypeError, SpecError) as err:
        raise StateError(f"{what} is damaged: {err}") from err
    kept = {name: values[name] for name in _KEYS if name not in ("format", "sha256")}
    return {**kept, "state": state, "pending": tuple(values["pending"])}


def _seal(values: Mapping[str, Any]) -> str:
    """The hash of the metadata, its own entry left out."""
    rest = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digest(array: Array) -> str:
    return hashlib.sha256(_memory(array)).hexdigest()


def _memory(array: Array) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def _frozen(array: Array) -> Array:
    """A contiguous view that cannot be written."""
    view: Array = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _finite(array: Array, dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool(((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    if dtype == "float8_e4m3fn":
        return bool(((array & _FLOAT8_NAN) != _FLOAT8_NAN).all())
    return bool(np.isfinite(array).all())


# --- words ---------------------------------------------------------------------------------------


def _short(weights: str) -> str:
    return f"{weights[:16]}..." if weights else "unknown"


def _port(port: StatePort | None) -> str:
    if port is None:
        return "no such port"
    shape = ", ".join(map(str, port.past.shape))
    return f"{port.past.name} {port.past.dtype} [{shape}] ({port.update})"
