"""Formats: scales, half a step, packing, blocks, and what a target takes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixedstate.calib.formats import (
    FORMATS,
    FP8,
    INT4_32,
    INT8,
    MXFP8,
    NVFP4,
    SMALLEST_SCALE,
    TARGETS,
    Format,
    activation_scale,
    check_targets,
    format_named,
    quantize,
    rounded,
    search_shrink,
)
from fixedstate.errors import CalibrationError

INTEGERS = [one for one in FORMATS.values() if one.integer]
FLOATS = [one for one in FORMATS.values() if not one.integer]


@st.composite
def weights(draw: st.DrawFn, rows: int = 128) -> np.ndarray:
    """Random columns, some of them one-sided, flat, zero, or with one value far outside."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = 2 * draw(st.integers(1, 3))
    array = rng.standard_normal((rows, columns)) * 10.0 ** draw(st.integers(-6, 4))
    for column in range(columns):
        kind = draw(st.sampled_from(["as it is", "zero", "one side", "flat", "outlier"]))
        if kind == "zero":
            array[:, column] = 0.0
        elif kind == "one side":
            array[:, column] = np.abs(array[:, column])
        elif kind == "flat":
            array[:, column] = array[0, column]
        elif kind == "outlier":
            array[draw(st.integers(0, rows - 1)), column] *= 1e3
    return array.astype(np.float32)


@pytest.mark.parametrize("chosen", INTEGERS, ids=lambda one: one.name)
@given(weight=weights())
def test_QU_11_every_value_is_within_half_a_step(chosen: Format, weight: np.ndarray) -> None:
    made = quantize(weight, chosen)
    off = np.abs(made.dequantized().astype(np.float64) - weight)
    assert (off <= 0.5 * made.steps() * (1 + 1e-5)).all()
    assert (np.sign(made.dequantized()) * np.sign(weight) >= 0).all()


@pytest.mark.parametrize("chosen", FLOATS, ids=lambda one: one.name)
@given(weight=weights())
def test_floats_keep_their_digits(chosen: Format, weight: np.ndarray) -> None:
    """E4M3 has three bits behind the point, E2M1 one; small values lose to the smallest step."""
    made = quantize(weight, chosen)
    off = np.abs(made.dequantized().astype(np.float64) - weight)
    digits = {"fp8": 2**-4, "mxfp8": 2**-4, "nvfp4": 2**-2}[chosen.name]
    smallest = {"fp8": 2**-10, "mxfp8": 2**-10, "nvfp4": 0.25}[chosen.name]
    # a scale in E4M3 may be rounded down, so that the largest value of its block is clipped
    clipped = 2**-4 if chosen is NVFP4 else 0.0
    allowed = np.abs(weight) * (digits + clipped) + smallest * made.steps() * (1 + clipped)
    if chosen is NVFP4:  # blocks far below the largest of all have the smallest scale there is
        allowed = np.maximum(allowed, 3.0 * made.steps())
    assert (off <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("chosen", "step"),
    [(INT8, 1 / 127), (INT4_32, 1 / 7), (FP8, 1 / 448)],
    ids=lambda one: str(one),
)
def test_QU_08_each_format_has_its_own_range(chosen: Format, step: float) -> None:
    made = quantize(np.full((32, 2), [[1.0, -1.0]]), chosen)
    assert made.scales.reshape(-1).tolist() == [pytest.approx(step)] * 2
    assert made.values[0].astype(np.float32).tolist() == [chosen.top, -chosen.top]
    assert activation_scale(1.0, chosen) == step


def test_values_go_to_the_nearest_and_to_even() -> None:
    weight = np.array([[127.0], [0.5], [1.5], [-0.5], [2.4], [-126.6]], np.float32)
    assert quantize(weight, INT8).values[:, 0].tolist() == [127, 0, 2, 0, 2, -127]


@pytest.mark.parametrize("rows", [16, 31, 32, 33, 40])
def test_QU_05_rows_that_are_no_multiple_of_the_block_are_left(rows: int) -> None:
    weight = np.ones((rows, 4), np.float32)
    if rows % 32 == 0:
        assert quantize(weight, INT4_32).scales.shape == (rows // 32, 4)
        return
    assert INT4_32.refusal(rows, 4) == f"K = {rows} is no multiple of the block of 32"
    with pytest.raises(CalibrationError, match=f"K = {rows}") as caught:
        quantize(weight, INT4_32)
    assert caught.value.code == "BLOCK_INDIVISIBLE"


def test_QU_12_four_bits_are_stored_in_four() -> None:
    for name, share in (("int4:32", 5.0 / 32), ("int4:128", 4.25 / 32)):
        assert FORMATS[name].nbytes(1024, 512) == 1024 * 512 * 4 * share
    assert NVFP4.nbytes(1024, 512) == 1024 * 512 // 2 + 64 * 512 + 4
    assert MXFP8.nbytes(1024, 512) == 1024 * 512 + 4 * 32 * 512
    assert quantize(np.ones((64, 4), np.float32), INT4_32).nbytes == 64 * 4 // 2 + 2 * 4 * 4


def test_no_scale_is_zero_or_not_finite() -> None:
    for chosen in FORMATS.values():
        made = quantize(np.zeros((128, 4), np.float32), chosen)
        assert (made.steps() > 0).all()
        assert np.isfinite(made.steps()).all()
        assert not made.dequantized().any()
    assert quantize(np.zeros((128, 4), np.float32), INT8).scales.tolist() == [SMALLEST_SCALE] * 4


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(CalibrationError) as caught:
        quantize(np.array([[1.0, np.nan]]), INT8)
    assert caught.value.code == "NONFINITE"


@pytest.mark.parametrize("chosen", [INT8, INT4_32], ids=lambda one: one.name)
def test_a_searched_range_is_never_worse(chosen: Format) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_t(3, (128, 8)).astype(np.float32)

    def error(shrink: object) -> np.ndarray:
        made = quantize(weight, chosen, shrink)  # type: ignore[arg-type]
        return (made.dequantized().astype(np.float64) - weight) ** 2

    found = search_shrink(weight, chosen)
    assert found.min() < 1.0 or chosen is INT8
    assert error(found).sum() < error(1.0).sum() or (found == 1.0).all()


def test_mxfp8_scales_are_powers_of_two_and_clip_nothing() -> None:
    rng = np.random.default_rng(1)
    made = quantize(rng.standard_normal((64, 6)).astype(np.float32), MXFP8)
    assert made.scales.dtype == ml_dtypes.float8_e8m0fnu
    assert (np.frexp(made.steps())[0] == 0.5).all()
    assert (np.abs(made.values.astype(np.float32)) <= 448).all()


@given(st.floats(-1e3, 1e3, width=32, allow_subnormal=False))
def test_activations_are_rounded_within_half_a_step_or_clipped(value: float) -> None:
    scale = activation_scale(100.0, INT8)
    found = float(rounded(np.array([value]), scale, INT8)[0])
    if abs(value) <= 100.0:
        assert abs(found - value) <= scale / 2 * (1 + 1e-5)
    else:
        assert found == pytest.approx(np.sign(value) * 100.0)


def test_targets_are_asked_before_any_work() -> None:
    check_targets(("int8", "int4:128"), ("sm86", "sm120"))
    with pytest.raises(CalibrationError, match="sm86 has no fp8; it takes int8, ") as caught:
        check_targets(("fp8",), ("sm120", "sm86"))
    assert caught.value.code == "UNSUPPORTED_TARGET"
    with pytest.raises(CalibrationError, match="sm75 has no int8; it takes none"):
        check_targets(("int8",), ("sm75",))
    with pytest.raises(CalibrationError, match="target 'sm1' is unknown"):
        check_targets(("int8",), ("sm1",))
    with pytest.raises(CalibrationError, match="format 'int3' is unknown") as caught:
        format_named("int3")
    assert caught.value.code == "FORMAT"
    assert {name for names in TARGETS.values() for name in names} <= set(FORMATS)
