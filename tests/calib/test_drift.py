"""States in fewer bits: the error of one rounding, and of many blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixedstate.bundle import Bundle
from fixedstate.calib.data import Record
from fixedstate.calib.drift import STATE_FORMATS, drift, rounded_engine, rounded_state
from fixedstate.errors import CalibrationError

STEPS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8row": 0.5 / 127}


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    return Bundle.open(bundle_path("F3"))


def sequence(bundle: Bundle, blocks: int) -> list[Record]:
    rng = np.random.default_rng(9)
    tokens = [token for token in range(bundle.spec.vocab_size) if token != bundle.spec.mask_id]
    return [Record("long", tuple(rng.choice(tokens, blocks * bundle.spec.block_len).tolist()))]


@pytest.mark.parametrize("name", STATE_FORMATS)
@given(seed=st.integers(0, 2**32 - 1), power=st.integers(-3, 3))
def test_one_rounding_is_within_half_a_step(name: str, seed: int, power: int) -> None:
    rng = np.random.default_rng(seed)
    state = (rng.standard_normal((2, 16, 4)) * 10.0**power).astype(np.float32)
    state[0, :, 1] = 0.0
    found = rounded_state(state, name)
    if name == "int8row":
        allowed = STEPS[name] * np.abs(state).max(1, keepdims=True)
    else:
        allowed = STEPS[name] * np.abs(state) + 2.0**-25
    assert (np.abs(found - state) <= allowed * (1 + 1e-5)).all()
    assert not found[0, :, 1].any()
    # what is rounded stays as it is
    again = rounded_state(found, name)
    assert np.abs(again - found).max() <= 1e-6 * np.abs(found).max()


def test_rows_have_scales_of_their_own() -> None:
    """A channel with small values keeps them beside one with large ones."""
    state = np.ones((1, 8, 2), np.float32)
    state[..., 1] = 1e-4
    assert np.allclose(rounded_state(state, "int8row"), state, rtol=1e-6)


def test_what_a_format_does_not_have_is_refused() -> None:
    with pytest.raises(CalibrationError, match="values up to 1e\\+05, which fp16") as caught:
        rounded_state(np.full((2, 2), 1e5), "fp16")
    assert caught.value.code == "NONFINITE"
    with pytest.raises(CalibrationError) as caught:
        rounded_state(np.zeros((2, 2)), "int4")
    assert caught.value.code == "STATE_FORMAT"


def test_a_state_is_rounded_once_a_commit_and_never_by_a_denoise(bundle: Bundle) -> None:
    engine = rounded_engine(bundle, "int8row", 2)
    length = bundle.spec.block_len
    for row in (0, 1):
        engine.reset(row)
    engine.commit(np.full((2, length), 5), np.array([length, 0]))
    states = {name: a for name, a in engine.read(0).items() if name.startswith("ssm_state")}
    assert states
    for state in states.values():
        assert np.abs(rounded_state(state, "int8row") - state).max() <= 1e-6 * np.abs(state).max()
    assert not any(a.any() for name, a in engine.read(1).items() if name.startswith("ssm_state"))
    before = engine.buffers.hash()
    engine.denoise(np.full((2, length), bundle.spec.mask_id))
    assert engine.buffers.hash() == before


def test_drift_over_many_blocks_is_bounded_and_ordered(bundle: Bundle) -> None:
    records = sequence(bundle, 60)
    found = {name: drift(bundle, name, records, at=(1, 10, 30, 60)) for name in STATE_FORMATS}
    for name, one in found.items():
        errors = one.comparison.state
        assert set(errors) == {1, 10, 30, 60}
        assert 0.0 < errors[60] < 20 * STEPS[name]
        assert one.comparison.kl < 1e-2
        assert set(one.to_dict()["by_block"]) == {"1", "10", "100"}
    assert found["fp16"].comparison.state[60] < found["bf16"].comparison.state[60]
    assert found["fp16"].state_bytes * 2 == found["fp16"].float_bytes
    assert found["int8row"].state_bytes < found["int8row"].float_bytes / 2


def test_a_model_without_a_scan_state_is_refused(bundle_path: Callable[..., Path]) -> None:
    attention = Bundle.open(bundle_path("F4"))
    if any(port.kind == "ssm" for port in attention.state.committed):
        pytest.fail("F4 is meant to be attention alone")
    with pytest.raises(CalibrationError, match="has no scan state") as caught:
        drift(attention, "fp16", sequence(attention, 2))
    assert caught.value.code == "MODEL"
