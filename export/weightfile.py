"""One weights file for all graphs: safetensors that ONNX reads as external data.

A safetensors file is a header and raw little-endian tensors, so an ONNX initialiser can point at
its bytes by offset and length: no weight stands on disk twice, and other tools read the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from fixedstate.bundle import WEIGHTS, umask
from fixedstate.errors import ExportError
from fixedstate.export.passes import is_weight
from fixedstate.ports import Array

Place = tuple[int, int]
"""Offset and length in bytes."""


def write_weights(models: Iterable[ir.Model], file: Path) -> dict[str, Place]:
    """Write the weights of all graphs, each once, and give where each stands.

    Raises:
        ExportError: where two graphs have different weights of one name.
        OSError: where the file cannot be written.
    """
    arrays: dict[str, Array] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if not is_weight(name):
                continue
            assert value.const_value is not None
            array = np.ascontiguousarray(value.const_value.numpy())
            if name not in arrays:
                arrays[name] = array
            elif arrays[name].tobytes() != array.tobytes():
                raise ExportError(f"two graphs have different weights named {name!r}")
    whole = [name for name in arrays if f"{name}.0" in arrays]
    if whole:
        raise ExportError(f"weights {whole} would stand in the file whole and in parts")
    try:
        save_file(arrays, file)
    except Exception as err:  # safetensors raises its own type for a full disk
        raise OSError(None, f"{file.name}: {err}") from err
    file.chmod(0o666 & ~umask())
    return _places(file)


def _places(file: Path) -> dict[str, Place]:
    """Offset and length of every tensor in a safetensors file."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    start = 8 + size
    places = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            places[name] = (start + first, last - first)
    return places


def point_at_weights(model: ir.Model, places: dict[str, Place], folder: Path) -> None:
    """Make every weight of a graph a reference into the weights file."""
    for name, value in model.graph.initializers.items():
        if not is_weight(name):
            continue
        held = value.const_value
        assert held is not None
        offset, length = places[name]
        value.const_value = ir.ExternalTensor(
            WEIGHTS,
            offset,
            length,
            ir.DataType(held.dtype),
            shape=ir.Shape(held.numpy().shape),
            name=name,
            base_dir=folder,
        )
