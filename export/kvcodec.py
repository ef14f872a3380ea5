"""Quantisers of keys and values as nodes of a graph, and the layouts of what they store."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fixedstate.export.graphwriter import GraphWriter
from fixedstate.spec import AttentionSizes
from fixedstate.state import KvFormat, StatePort

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the largest value of a token and head becomes."""

LEAST_STEP = 2.0**-14
"""Least step between packed numbers: the smallest normal float16, as scales are float16."""


class Stored(NamedTuple):
    """Quantised keys or values.

    Attributes:
        codes: The numbers, as the port holds them.
        plain: The numbers in float, where each stands for one value.
        scales: As the port holds them.
        back: What reading them gives.
    """

    codes: ir.Value
    plain: ir.Value
    scales: ir.Value
    back: ir.Value


class Codec:
    """Numbers of one float32 scale per token and head: ``int8`` and ``float8_e4m3fn``."""

    def __init__(self, make: GraphWriter, dtype: str = "") -> None:
        self._make = make
        self._dtype = dtype

    def read(self, codes: ir.Value, scales: ir.Value) -> ir.Value:
        """What is stored, in float."""
        return self._make.node("Mul", self.plain(codes), scales)

    def write(self, x: ir.Value) -> Stored:
        """[B, kv_heads, S, head_dim] quantised; nothing depends on an order of summation."""
        make, largest = self._make, self._make.floats(LARGEST[self._dtype])
        step = make.node("ReduceMax", make.node("Abs", x), make.ints(-1), keepdims=1)
        step = make.node("Div", step, largest)
        above = make.node("Greater", step, make.floats(0.0), dtype=ir.DataType.BOOL)
        scaled = make.node("Div", x, make.node("Where", above, step, make.floats(1.0)))
        step = _none_if_strange(make, step, x, -1)
        if self._dtype == "int8":
            low = make.floats(-LARGEST[self._dtype])
            plain = make.node("Clip", make.node("Round", scaled), low, largest)
            codes = self.pack(plain)
        else:
            codes = self.pack(scaled)
            plain = self.plain(codes)
        return Stored(codes, plain, step, make.node("Mul", plain, step))

    def plain(self, codes: ir.Value) -> ir.Value:
        """The numbers of a port in float."""
        if self._dtype == "int8":
            return self._make.node("Cast", codes)
        return self._make.node("DequantizeLinear", codes, *self._eight_bits())

    def pack(self, plain: ir.Value) -> ir.Value:
        """Numbers in float as the port holds them."""
        if self._dtype == "int8":
            return self._make.node("Cast", plain, dtype=ir.DataType.INT8)
        kind = ir.DataType.FLOAT8E4M3FN
        return self._make.node("QuantizeLinear", plain, *self._eight_bits(), dtype=kind)

    def _eight_bits(self) -> tuple[ir.Value, ir.Value]:
        """Scale 1 and zero point 0: TensorRT takes eight-bit floats from no other operator."""
        zero = np.zeros((), ml_dtypes.float8_e4m3fn)
        return self._make.floats(1.0), self._make.constant(zero)


class Packed(Codec):
    """``kivi4`` and ``kivi2``: x = number * step + minimum, several numbers in a byte.

    With w bytes to a head, byte j holds channel j in its lowest bits, above it j + w, j + 2w, ...
    What shares step and minimum is one axis of a view of five dimensions: of keys
    [B, kv_heads, blocks, L, head_dim] the tokens, of values [B, kv_heads, S, groups, channels] the
    channels. Bits are taken apart in float arithmetic, which is exact; TensorRT has no other.
    """

    def __init__(
        self, make: GraphWriter, form: KvFormat, kind: str, head_dim: int, block_len: int
    ) -> None:
        super().__init__(make)
        self._bits, self._levels = form.bits, float(2**form.bits - 1)
        self._by_block, self._width, self._length = kind == "key", head_dim, block_len
        group = form.value_group(head_dim)
        self._view = (block_len, head_dim) if self._by_block else (head_dim // group, group)
        self._scales = head_dim if self._by_block else head_dim // group
        self._held = form.scale_width(kind, head_dim, block_len)

    def read(self, codes: ir.Value, scales: ir.Value) -> ir.Value:
        """What is stored, in float; columns are whole blocks."""
        plain = self._apart(self._make.node("Cast", codes))
        return self._joined(self._viewed(plain), *self._steps(scales))

    def write(self, x: ir.Value) -> Stored:
        """[B, kv_heads, S, head_dim] quantised, S whole blocks."""
        make, viewed = self._make, self._viewed(x)
        axis = 3 if self._by_block else 4
        low, high = (
            make.node(op, viewed, make.ints(axis), keepdims=1) for op in ("ReduceMin", "ReduceMax")
        )
        step = make.node("Div", make.node("Sub", high, low), make.floats(self._levels))
        step = make.node("Max", step, make.floats(LEAST_STEP))
        step = _none_if_strange(make, step, viewed, axis)
        scales = self._held_as(step, low)
        step, low = self._steps(scales)
        whole = make.node("Round", make.node("Div", make.node("Sub", viewed, low), step))
        plain = make.node("Clip", whole, make.floats(0.0), make.floats(self._levels))
        codes = self._together(make.node("Reshape", plain, make.ints(0, 0, -1, self._width)))
        return Stored(codes, plain, scales, self._joined(plain, step, low))

    def _viewed(self, x: ir.Value) -> ir.Value:
        return self._make.node("Reshape", x, self._make.ints(0, 0, -1, *self._view))

    def _joined(self, plain: ir.Value, step: ir.Value, low: ir.Value) -> ir.Value:
        make = self._make
        x = make.node("Add", make.node("Mul", plain, step), low)
        return make.node("Reshape", x, make.ints(0, 0, -1, self._width))

    def _held_as(self, step: ir.Value, low: ir.Value) -> ir.Value:
        """Steps and minima as the scale port holds them: float16, a block's over its tokens."""
        make, rows = self._make, self._length if self._by_block else 1
        both = make.node("Concat", step, low, axis=4 if self._by_block else 3)
        both = make.node("Reshape", both, make.ints(0, 0, -1, 2 * self._scales))
        spare = rows * self._held - 2 * self._scales
        if spare:
            both = make.node("Pad", both, make.ints(0, 0, 0, 0, 0, 0, 0, spare))
        both = make.node("Reshape", both, make.ints(0, 0, -1, self._held))
        return make.node("Cast", both, dtype=ir.DataType.FLOAT16)

    def _steps(self, scales: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Steps and minima in the view of five dimensions."""
        make, rows = self._make, self._length if self._by_block else 1
        both = make.node("Cast", scales)
        both = make.node("Reshape", both, make.ints(0, 0, -1, rows * self._held))
        spare = rows * self._held - 2 * self._scales
        step, low, *_ = make.split(both, [self._scales] * 2 + [spare] * bool(spare))
        shape = (1, self._scales) if self._by_block else (self._scales, 1)
        return (
            make.node("Reshape", step, make.ints(0, 0, -1, *shape)),
            make.node("Reshape", low, make.ints(0, 0, -1, *shape)),
        )

    def _together(self, plain: ir.Value) -> ir.Value:
        """Numbers in float packed into bytes."""
        make, each = self._make, 8 // self._bits
        parts = make.split(plain, [self._width // each] * each)
        packed = parts[0]
        for place, part in enumerate(parts[1:], 1):
            above = make.node("Mul", part, make.floats(2.0 ** (self._bits * place)))
            packed = make.node("Add", packed, above)
        return make.node("Cast", packed, dtype=ir.DataType.UINT8)

    def _apart(self, packed: ir.Value) -> ir.Value:
        """Bytes in float as the numbers packed into them."""
        make, parts = self._make, []
        for place in range(8 // self._bits - 1, 0, -1):
            weight = 2.0 ** (self._bits * place)
            part = make.node("Floor", make.node("Mul", packed, make.floats(1.0 / weight)))
            packed = make.node("Sub", packed, make.node("Mul", part, make.floats(weight)))
            parts.append(part)
        return make.node("Concat", packed, *reversed(parts), axis=-1)


def codec_of(make: GraphWriter, port: StatePort, sizes: AttentionSizes, block_len: int) -> Codec:
    """Of the keys or the values of a layer, by their dtype and the width of their bytes."""
    if port.past.dtype in LARGEST:
        return Codec(make, port.past.dtype)
    width = port.past.shape[3]
    assert isinstance(width, int)
    bits = 8 * width // sizes.head_dim
    return Packed(make, KvFormat(f"kivi{bits}", bits), port.kind, sizes.head_dim, block_len)


def _none_if_strange(make: GraphWriter, step: ir.Value, x: ir.Value, axis: int) -> ir.Value:
    """Infinity or no number where x holds any that is none; a largest value may leave those out."""
    strange = make.node("Cast", make.node("IsNaN", x, dtype=ir.DataType.BOOL))
    strange = make.node("ReduceMax", strange, make.ints(axis), keepdims=1)
    return make.node("Div", step, make.node("Sub", make.floats(1.0), strange))
