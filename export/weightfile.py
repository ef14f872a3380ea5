"""One weights file for all graphs: safetensors that ONNX reads as external data.

A safetensors file is a header and raw little-endian tensors, so an ONNX initialiser can point at
its bytes by offset and length: no weight stands on disk twice, and other tools read the file. The
header needs names, dtypes and shapes only, which the graphs know, so the values go through one
tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from fixedstate.bundle import WEIGHTS, umask
from fixedstate.errors import ExportError
from fixedstate.export.passes import COLUMNS, is_weight

if TYPE_CHECKING:  # engines are built, and weights laid out, where there is no PyTorch
    import torch

    from fixedstate.export.stored import WeightSource

_SPELLED = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.DOUBLE: "F64",
    ir.DataType.INT64: "I64",
    ir.DataType.INT32: "I32",
    ir.DataType.INT16: "I16",
    ir.DataType.INT8: "I8",
    ir.DataType.UINT8: "U8",
    ir.DataType.BOOL: "BOOL",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.FLOAT8E8M0: "F8_E8M0",
}
"""Dtypes as safetensors spells them; two values of four bits are one U8."""

_TELL = 1 << 28
"""Bytes between two words on how far the file is."""

_ALIGNMENT = 8
"""Bytes that the header's length is a multiple of, so that every tensor lies on its own size."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight stands in the file.

    Attributes:
        offset: First byte, from the start of the file.
        length: Bytes.
        dtype: Of its elements.
        shape: Its dimensions.
    """

    offset: int
    length: int
    dtype: ir.DataType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight that a graph asks for: all of a source's tensor, or some columns of it."""

    name: str
    source: str
    columns: tuple[int, int] | None
    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return byte_count(self.dtype, self.shape)

    @property
    def order(self) -> tuple[float, str, int]:
        """Wide elements first, then by source: each is on its own size and read once."""
        return -self.dtype.itemsize, self.source, self.columns[0] if self.columns else 0


def write_weights(
    models: Iterable[ir.Model],
    source: WeightSource,
    file: Path,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Place], str]:
    """Write the weights of all graphs, each once, and give where each stands.

    Args:
        models: The graphs.
        source: Gives the tensors; each is asked for once and dropped.
        file: Where to.
        say: Told how far it is.

    Returns:
        Place by name, and the sha256 of the file.

    Raises:
        ExportError: where two graphs mean different weights by one name, or a weight is not what
            the graphs expect, or does not fit its dtype.
        OSError: where the file cannot be written.
    """
    weights = _weights(models)
    header, places = layout((weight.name, weight.dtype, weight.shape) for weight in weights)
    return places, write_pieces(header, places, _contents(weights, source), file, say)


def write_pieces(
    header: bytes,
    places: Mapping[str, Place],
    pieces: Iterable[bytes | memoryview],
    file: Path,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Write a weights file out of its pieces, and give its sha256.

    Args:
        header: Of :func:`layout`.
        places: Likewise.
        pieces: The weights' bytes in that order, cut anywhere.
        file: Where to.
        say: Told how far it is.

    Raises:
        OSError: where the file cannot be written.
    """
    digest = hashlib.sha256(header)
    total = sum(place.length for place in places.values())
    done = told = 0
    with file.open("wb") as stream:
        stream.write(header)
        for piece in pieces:
            stream.write(piece)
            digest.update(piece)
            done += memoryview(piece).nbytes
            if done - told >= _TELL:
                told = done
                say(f"writing the weights: {100 * done // total} %")
    if done != total:
        raise ExportError(f"{file} got {done} bytes, expected {total}: please report this model")
    file.chmod(0o666 & ~umask())
    return digest.hexdigest()


def _contents(weights: Iterable[_Weight], source: WeightSource) -> Iterator[memoryview]:
    """The bytes of each weight in order; a tensor is dropped before the next one is read."""
    for name, parts in groupby(weights, key=lambda weight: weight.source):
        tensor = source.load(name)
        for weight in parts:
            yield _content(weight, tensor)
        del tensor


def _weights(models: Iterable[ir.Model]) -> list[_Weight]:
    """What the graphs ask for, in the order of the file."""
    found: dict[str, _Weight] = {}
    for model in models:
        for weight in _asked(model):
            if found.setdefault(weight.name, weight) != weight:
                raise ExportError(f"two graphs have different weights named {weight.name!r}")
    whole = [name for name in found if f"{name}.0" in found]
    if whole:
        raise ExportError(f"weights {whole} would stand in the file whole and in parts")
    return sorted(found.values(), key=lambda weight: weight.order)


def _asked(model: ir.Model) -> Iterator[_Weight]:
    for name, value in model.graph.initializers.items():
        if not is_weight(name):
            continue
        held = value.const_value
        assert held is not None
        source, *columns = value.meta.get(COLUMNS, (name,))
        cut = (columns[0], columns[1]) if columns else None
        yield _Weight(name, source, cut, ir.DataType(held.dtype), _shape(held))


def _shape(held: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(str(size)) for size in held.shape)


def layout(
    weights: Iterable[tuple[str, ir.DataType, tuple[int, ...]]],
) -> tuple[bytes, dict[str, Place]]:
    """The header of a weights file, and where each weight is to stand.

    Args:
        weights: Name, dtype and shape of each, in order; wide elements first, so that each lies on
            its own size.

    Raises:
        ExportError: as :func:`byte_count`.
    """
    entries = {}
    places: dict[str, Place] = {}
    end = 0
    for name, dtype, shape in weights:
        length = byte_count(dtype, shape)
        packed = dtype.itemsize < 1
        entries[name] = {
            "dtype": "U8" if packed else _SPELLED[dtype],
            "shape": [*shape[:-1], shape[-1] // 2] if packed else list(shape),
            "data_offsets": [end, end + length],
        }
        places[name] = Place(end, length, dtype, shape)
        end += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {
        name: replace(place, offset=len(header) + place.offset) for name, place in places.items()
    }


def byte_count(dtype: ir.DataType, shape: tuple[int, ...]) -> int:
    """Bytes of a weight in the file.

    Raises:
        ExportError: for an odd number of columns of values that share a byte by twos.
    """
    if dtype.itemsize < 1 and (not shape or shape[-1] % 2):
        raise ExportError(f"{dtype.name} {list(shape)} has no even number of columns")
    return int(math.prod(shape) * dtype.itemsize)


def _content(weight: _Weight, tensor: torch.Tensor) -> memoryview:
    """The bytes of a weight, out of the tensor it is or is cut from.

    Raises:
        ExportError: where the tensor is not what the graphs expect, or not finite.
    """
    import torch

    if weight.columns is not None:
        tensor = tensor[:, weight.columns[0] : weight.columns[1]]
    array = tensor.detach().contiguous()
    if tuple(array.shape) != weight.shape or _dtype(array) != weight.dtype:
        raise ExportError(
            f"weight {weight.name!r} is {_dtype(array).name} {list(array.shape)}, the graphs "
            f"expect {weight.dtype.name} {list(weight.shape)}: please report this model"
        )
    return array.reshape(-1).view(torch.uint8).numpy().data


def _dtype(tensor: torch.Tensor) -> ir.DataType:
    import torch

    if tensor.dtype == torch.bfloat16:
        return ir.DataType.BFLOAT16
    return ir.DataType.from_numpy(tensor.new_empty(0).numpy().dtype)


def point_at_weights(
    model: ir.Model,
    places: Mapping[str, Place],
    folder: Path,
    name_of: Callable[[str], str] = lambda name: name,
) -> list[str]:
    """Make every weight of a graph a reference into the weights file.

    Args:
        model: The graph.
        places: Where weights stand, by name.
        folder: Of the weights file.
        name_of: What the file calls a weight of the graph.

    Returns:
        The names in the file.

    Raises:
        ExportError: for a weight that has no place, or one of another dtype or shape.
    """
    names = []
    for name, value in model.graph.initializers.items():
        if is_weight(name):
            held, place = value.const_value, places.get(name_of(name))
            assert held is not None
            wanted = (ir.DataType(held.dtype), _shape(held))
            if place is None or (place.dtype, place.shape) != wanted:
                raise ExportError(
                    f"weight {name_of(name)!r} stands as {place} in {WEIGHTS}, a graph needs "
                    f"{wanted[0].name} {list(wanted[1])}: please report this model"
                )
            names.append(name_of(name))
            value.const_value = ir.ExternalTensor(
                WEIGHTS,
                place.offset,
                place.length,
                place.dtype,
                shape=ir.Shape(place.shape),
                name=name,
                base_dir=folder,
            )
    return names


def places_in(model: ir.Model) -> dict[str, Place]:
    """Where the weights of a graph that points at a weights file stand there, by name.

    Raises:
        ExportError: for a weight inside the graph.
    """
    places = {}
    for name, value in model.graph.initializers.items():
        if not is_weight(name):
            continue
        held = value.const_value
        if not isinstance(held, ir.ExternalTensor) or held.offset is None or held.length is None:
            raise ExportError(f"weight {name!r} stands in the graph, expected in {WEIGHTS}")
        places[name] = Place(held.offset, held.length, ir.DataType(held.dtype), _shape(held))
    return places
