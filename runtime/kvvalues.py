"""Keys and values as the numbers that they stand for, of every format, in numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fixedstate.errors import StateError
from fixedstate.ports import Array
from fixedstate.spec import ModelSpec
from fixedstate.state import KvFormat, StatePort, StateSpec


def cache_values(
    state: StateSpec, arrays: Mapping[str, Array], spec: ModelSpec | None = None
) -> dict[str, Array]:
    """Carried tensors with quantised keys and values as float32, and their scales left out.

    Args:
        state: What is carried.
        arrays: By suffix, of one row or of several; of packed formats, whole blocks. What is no
            quantised key or value stays as it is.
        spec: The model; for packed formats, whose ports do not tell how wide a head is.

    Raises:
        StateError: for a packed format without the model.
    """
    out = dict(arrays)
    kinds = {(port.layer, port.kind): port.suffix for port in state.committed}
    for port in state.committed:
        scale = kinds.get((port.layer, f"{port.kind}_scale"), "")
        if port.kind not in ("key", "value") or not {port.suffix, scale} <= arrays.keys():
            continue
        codes, scales = arrays[port.suffix], out.pop(scale).astype(np.float32)
        if port.past.dtype == "int8":
            out[port.suffix] = codes.astype(np.float32) * scales
        elif port.past.dtype == "float8_e4m3fn":
            out[port.suffix] = _FLOAT8[codes] * scales
        else:
            out[port.suffix] = _unpacked(port, codes, scales, spec)
    return out


def _unpacked(port: StatePort, codes: Array, scales: Array, spec: ModelSpec | None) -> Array:
    """x = number * step + minimum; layouts: :mod:`fixedstate.export.kvcodec`."""
    if spec is None:
        raise StateError(f"{port.suffix} is packed: its numbers cannot be told without the model")
    head_dim, length = spec.layers[port.layer].attention.head_dim, spec.block_len
    bits = 8 * codes.shape[-1] // head_dim
    parts = [codes >> np.uint8(place) & np.uint8(2**bits - 1) for place in range(0, 8, bits)]
    plain = np.concatenate(parts, -1).astype(np.float32)
    *lead, columns, _ = plain.shape
    if port.kind == "key":
        held = length * scales.shape[-1]
        both = scales.reshape(*lead, columns // length, 1, held)[..., : 2 * head_dim]
        plain = plain.reshape(*lead, columns // length, length, head_dim)
        step, low = np.split(both, 2, -1)
    else:
        group = KvFormat(f"kivi{bits}", bits).value_group(head_dim)
        plain = plain.reshape(*lead, columns, head_dim // group, group)
        step, low = (part[..., None] for part in np.split(scales, 2, -1))
    values: Array = plain * step + low
    return values.reshape(*lead, columns, head_dim)


def _float8_values() -> Array:
    """Of every byte the float8_e4m3fn that it is: 1, 4 and 3 bits, no infinity, one NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(
        exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9)
    )
    size[(byte & 127) == 127] = np.nan
    values: Array = np.where(byte >> 7, -size, size).astype(np.float32)
    return values


_FLOAT8 = _float8_values()
