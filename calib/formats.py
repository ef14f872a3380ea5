"""Number formats of quantised weights and activations, and what each target takes of them.

All are symmetric, with zero point 0: nothing else is taken by TensorRT-RTX. A weight is [K, N], as
its MatMul has it: a scale per column n, or per column and block of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fixedstate.errors import CalibrationError
from fixedstate.ports import Array

SMALLEST_SCALE = 2.0**-24
"""No scale is smaller: float16 has it still, and TensorRT takes none that is 0."""

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_INT4 = np.dtype(ml_dtypes.int4)
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Format:
    """How the weights of a product, and maybe what they are multiplied with, are stored.

    Attributes:
        name: As commands and plans spell it, such as ``int4:32``.
        dtype: Of the stored weights.
        top: Largest magnitude of that dtype; a scale is the largest weight over it.
        bits: Of a stored weight.
        block: Rows that share a scale; 0 for a scale per column.
        activations: Whether the other operand is quantised too, with one static scale.
        scale_dtype: What scales are rounded to: float32, E4M3 under one float32 scale of the whole
            weight, or E8M0, which is powers of two.
    """

    name: str
    dtype: np.dtype[Any]
    top: float
    bits: int
    block: int = 0
    activations: bool = False
    scale_dtype: np.dtype[Any] = _FLOAT32

    @property
    def integer(self) -> bool:
        """Whether values are whole numbers."""
        return self.dtype in (np.dtype(np.int8), _INT4)

    @property
    def has_powers(self) -> bool:
        """Whether scales are powers of two."""
        return bool(self.scale_dtype == _E8M0)

    @property
    def stored_scale_dtype(self) -> np.dtype[Any]:
        """What scales are stored in: powers of two as float32, as TensorRT reads no E8M0."""
        return _FLOAT32 if self.has_powers else self.scale_dtype

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the scales have one of their own."""
        return bool(self.scale_dtype == _E4M3)

    @property
    def is_on_cpu(self) -> bool:
        """Whether ONNX Runtime's CPU provider reads it; else the weight is tried multiplied out."""
        return bool(self.dtype != _E2M1)

    def nbytes(self, rows: int, columns: int) -> int:
        """Stored bytes of a weight [rows, columns], scales included."""
        scales = columns * (-(-rows // self.block) if self.block else 1)
        size = rows * columns * self.bits // 8 + scales * self.stored_scale_dtype.itemsize
        return size + (4 if self.has_tensor_scale else 0)

    def refusal(self, rows: int, columns: int) -> str:
        """Why a weight of that size cannot have this format; empty where it can.

        The rule of rows that are no multiple of the block: the weight stays as it is.
        """
        if self.block and rows % self.block:
            return f"K = {rows} is no multiple of the block of {self.block}"
        if self.bits == 4 and columns % 2:
            return f"N = {columns} is odd: two values of 4 bits share a byte"
        return ""


INT8 = Format("int8", np.dtype(np.int8), 127.0, 8, activations=True)
INT8_WEIGHTS = Format("int8-weights", np.dtype(np.int8), 127.0, 8)
INT4_32 = Format("int4:32", _INT4, 7.0, 4, 32)
INT4_64 = Format("int4:64", _INT4, 7.0, 4, 64)
INT4_128 = Format("int4:128", _INT4, 7.0, 4, 128)
FP8 = Format("fp8", _E4M3, 448.0, 8, activations=True)
NVFP4 = Format("nvfp4", _E2M1, 6.0, 4, 16, scale_dtype=_E4M3)
MXFP8 = Format("mxfp8", _E4M3, 448.0, 8, 32, scale_dtype=_E8M0)

FORMATS = {
    one.name: one for one in (INT8, INT8_WEIGHTS, INT4_32, INT4_64, INT4_128, FP8, NVFP4, MXFP8)
}
"""Every format by name."""

FLOAT = "float"
"""The name of what is not quantised, in plans."""

TARGETS = {
    "ort-cpu": ("int8", "int8-weights", "int4:32", "int4:64", "int4:128", "fp8", "mxfp8"),
    "sm75": (),
    "sm80": ("int8", "int8-weights", "int4:32", "int4:64", "int4:128"),
    "sm86": ("int8", "int8-weights", "int4:32", "int4:64", "int4:128"),
    "sm89": ("int8", "int8-weights", "int4:32", "int4:64", "int4:128", "fp8", "mxfp8"),
    "sm120": tuple(FORMATS),
    "sm121": tuple(FORMATS),
}
"""Formats that each target takes; those of TensorRT-RTX by compute capability, measured with its
builder. It multiplies no float32 matrices for 7.5, as every scan does. On ONNX Runtime's CPU, fp8
and mxfp8 run by converting and are for checking only."""


def format_named(name: str) -> Format:
    """A format by its name.

    Raises:
        CalibrationError: ``FORMAT``, with the names there are.
    """
    if name not in FORMATS:
        raise CalibrationError(
            "FORMAT", f"format {name!r} is unknown; use one of {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def check_targets(formats: tuple[str, ...], targets: tuple[str, ...]) -> None:
    """Refuse formats that a target does not take, before any work starts.

    Raises:
        CalibrationError: ``UNSUPPORTED_TARGET``, naming format, target and what it takes.
    """
    for target in targets:
        if target not in TARGETS:
            raise CalibrationError(
                "UNSUPPORTED_TARGET",
                f"target {target!r} is unknown; use one of {', '.join(TARGETS)}",
            )
        for name in formats:
            if format_named(name).name not in TARGETS[target]:
                raise CalibrationError(
                    "UNSUPPORTED_TARGET",
                    f"{target} has no {name}; it takes {', '.join(TARGETS[target]) or 'none'}: "
                    "choose another format, or leave the target out",
                )


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised weight.

    Attributes:
        format: How.
        values: [K, N] of the format's dtype.
        scales: [N] where the format has no blocks, else [K / block, N], of its scale dtype.
        scale: What the scales themselves are multiplied with; 1 unless they are E4M3.
    """

    format: Format
    values: Array
    scales: Array
    scale: float = 1.0

    def steps(self) -> Array:
        """float32 scale of every value, in a shape that goes with :attr:`values`."""
        scales = self.scales.astype(np.float32) * np.float32(self.scale)
        return np.repeat(scales, self.format.block, 0) if self.format.block else scales

    def dequantized(self) -> Array:
        """float32 [K, N]."""
        found: Array = self.values.astype(np.float32) * self.steps()
        return found

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.format.nbytes(*self.values.shape)


def quantize(weight: Array, chosen: Format, shrink: Array | float = 1.0) -> Quantized:
    """Quantise a weight, to the nearest value of the format and to even in the middle.

    Args:
        weight: (K, N) floats.
        chosen: The format.
        shrink: What the range is multiplied with, per scale or for all; below 1 the largest
            weights are clipped. At 1 no value is further away than half a step.

    Raises:
        CalibrationError: ``BLOCK_INDIVISIBLE`` for a size that it does not take, ``NONFINITE`` for
            weights that are no numbers.
    """
    array = np.asarray(weight, np.float32)
    if array.ndim != 2:
        raise ValueError(f"a weight has two dimensions; got {list(array.shape)}")
    if reason := chosen.refusal(*array.shape):
        raise CalibrationError("BLOCK_INDIVISIBLE", f"{chosen.name}: {reason}: leave it as it is")
    if not np.isfinite(array).all():
        raise CalibrationError("NONFINITE", "the weight holds NaN or infinity: repair the model")
    amax = np.abs(_blocked(array, chosen)).max(-2) * shrink
    scale = 1.0
    if chosen.scale_dtype == _E4M3:  # NVFP4: scales of blocks are E4M3 under one of the tensor
        scale = max(float(amax.max(initial=0.0)) / (chosen.top * 448.0), SMALLEST_SCALE)
        scales = np.maximum(amax / (chosen.top * scale), 2.0**-9).astype(_E4M3)
    elif chosen.scale_dtype == _E8M0:  # MXFP8: a power of two, none of whose values overflows
        powers = np.ceil(np.log2(np.maximum(amax / chosen.top, SMALLEST_SCALE)))
        scales = np.exp2(powers).astype(np.float32).astype(_E8M0)
    else:
        scales = np.maximum(amax / np.float32(chosen.top), SMALLEST_SCALE).astype(np.float32)
    steps = scales.astype(np.float32) * np.float32(scale)
    wide = np.repeat(steps, chosen.block, 0) if chosen.block else steps
    values = np.clip(array / wide, -chosen.top, chosen.top)
    if chosen.integer:
        values = np.rint(values)
    return Quantized(chosen, values.astype(chosen.dtype), scales, scale)


def _blocked(array: Array, chosen: Format) -> Array:
    """[blocks, rows of one, N], or the array itself where a scale is one of a column."""
    return array.reshape(-1, chosen.block, array.shape[1]) if chosen.block else array


def search_shrink(weight: Array, chosen: Format, trials: int = 11) -> Array:
    """The shrink of each scale with the least squared error, of steps from 1 down to 0.8.

    Args:
        weight: (K, N) floats.
        chosen: The format.
        trials: Steps.

    Returns:
        Factors of the shape of the scales, for :func:`quantize`. A tie goes to the larger one.
    """
    array = np.asarray(weight, np.float32)
    best: Array = np.ones(np.abs(_blocked(array, chosen)).max(-2).shape, np.float32)
    least = np.full(best.shape, np.inf)
    for factor in np.linspace(1.0, 0.8, trials, dtype=np.float32):
        off = quantize(array, chosen, float(factor)).dequantized() - array
        error = (_blocked(off, chosen).astype(np.float64) ** 2).sum(-2)
        better = error < least
        best[better], least[better] = factor, error[better]
    return best


def activation_scale(limit: float, chosen: Format) -> float:
    """The static scale of an activation whose magnitudes are clipped at `limit`."""
    return max(limit / chosen.top, SMALLEST_SCALE)


def rounded(values: Array, scale: float, chosen: Format) -> Array:
    """float32 activations as they are after a static scale: quantised and multiplied out."""
    clipped = np.clip(np.asarray(values, np.float32) / np.float32(scale), -chosen.top, chosen.top)
    if chosen.integer:
        clipped = np.rint(clipped)
    found: Array = clipped.astype(chosen.dtype).astype(np.float32) * np.float32(scale)
    return found
