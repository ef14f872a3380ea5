"""Divergence, agreement and state error, against numbers worked out by hand and broken models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixedstate.bundle import Bundle
from fixedstate.calib.data import Record
from fixedstate.calib.measure import Tokens, compare, state_error
from fixedstate.calib.table import Policy
from fixedstate.errors import CalibrationError
from fixedstate.runtime.compare import log_softmax
from fixedstate.runtime.decoder import open_engine

POLICY = Policy(masks=(1.0, 0.5), blocks=4)


class Changed:
    """An engine whose scores are changed on their way."""

    def __init__(self, engine: Any, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self._engine, self._change = engine, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def denoise(self, ids: np.ndarray, first: int = 0) -> np.ndarray:
        return self._change(self._engine.denoise(ids, first).copy())


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    return Bundle.open(bundle_path("F3"))


@pytest.fixture(scope="module")
def records(bundle: Bundle) -> list[Record]:
    rng = np.random.default_rng(3)
    length, mask = bundle.spec.block_len, bundle.spec.mask_id
    tokens = [token for token in range(bundle.spec.vocab_size) if token != mask]
    return [
        Record(str(n), tuple(rng.choice(tokens, (1 + n % 4) * length).tolist()), n % 2)
        for n in range(7)
    ]


def opens(
    bundle: Bundle, change: Callable[[np.ndarray], np.ndarray] = lambda scores: scores
) -> Any:
    return lambda slots: Changed(open_engine(bundle, threads=1, slots=slots), change)


def test_a_model_is_nought_from_itself(bundle: Bundle, records: list[Record]) -> None:
    found = compare(bundle, opens(bundle), opens(bundle), records, POLICY, batch=3, state_at=(1, 3))
    whole = found.total.summary()
    assert (whole["kl_max"], whole["agree"], whole["nll_delta"]) == (0.0, 1.0, 0.0)
    assert found.state == {1: 0.0, 3: 0.0}
    assert set(found.sequences) == {record.id for record in records}
    assert found.interval() == (0.0, 0.0)
    length = bundle.spec.block_len
    blocks = sum(len(record.ids) // length for record in records)
    prompts = sum(record.prompt_len for record in records)
    assert found.shares[1.0].count == blocks * length - prompts
    assert set(found.buckets) == {1, 10}


def test_the_batch_is_no_part_of_the_result(bundle: Bundle, records: list[Record]) -> None:
    noisy = opens(bundle, lambda scores: scores * 1.01)
    one, three = (
        compare(bundle, opens(bundle), noisy, records, POLICY, batch=batch).sequences
        for batch in (1, 3)
    )
    assert one == three


def test_VE_04_scores_of_another_scale_are_another_model(
    bundle: Bundle, records: list[Record]
) -> None:
    """Same best tokens everywhere, and yet far away."""
    found = compare(
        bundle, opens(bundle), opens(bundle, lambda s: s * 1.87), records, POLICY
    ).total.summary()
    assert found["agree"] == 1.0
    assert found["kl_mean"] > 1e-2


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_VE_01_numbers_that_are_none_are_an_error_on_either_side(
    bundle: Bundle, records: list[Record], side: str
) -> None:
    def broken(scores: np.ndarray) -> np.ndarray:
        scores[0, 0, 0] = np.nan
        return scores

    sides = {"reference": opens(bundle), "candidate": opens(bundle), side: opens(bundle, broken)}
    with pytest.raises(CalibrationError, match=f"the {side} gives scores that are no numbers"):
        compare(bundle, sides["reference"], sides["candidate"], records, POLICY)


def test_QU_06_a_model_that_gives_zeros_is_an_error(bundle: Bundle, records: list[Record]) -> None:
    with pytest.raises(CalibrationError) as caught:
        compare(bundle, opens(bundle), opens(bundle, lambda s: s * 0.0), records, POLICY)
    assert caught.value.code == "CONSTANT"


def test_divergence_is_that_of_the_formula() -> None:
    right, found = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.5, 0.25]]) + 7.0
    tokens = Tokens()
    tokens.add(right, found, np.array([1]))
    summary = tokens.summary()
    assert summary["kl_mean"] == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2))
    assert (summary["agree"], summary["agree_decided"], summary["tokens"]) == (0.0, 0.0, 1)
    assert summary["nll_reference"] == pytest.approx(np.log(4))
    assert summary["nll_delta"] == pytest.approx(-np.log(2))
    assert np.exp(log_softmax(found)).sum() == pytest.approx(1.0)


def test_a_tie_of_the_two_best_is_no_decision() -> None:
    tokens = Tokens()
    tokens.add(np.array([[1.0, 1.05, 0.0]]), np.array([[1.05, 1.0, 0.0]]), np.array([0]))
    assert tokens.summary()["agree"] == 0.0
    assert tokens.summary()["agree_decided"] == 1.0


def test_state_error_is_relative_to_the_norm_of_each_port() -> None:
    right = {
        "ssm_state_000": np.full((2, 2), 3.0),
        "ssm_state_001": np.ones(4),
        "key_002": np.ones(2),
    }
    found = {
        "ssm_state_000": np.full((2, 2), 3.3),
        "ssm_state_001": np.ones(4),
        "key_002": np.zeros(2),
    }
    assert state_error(right, found) == pytest.approx(0.1)
    assert state_error({"ssm_state_000": np.zeros(2)}, {"ssm_state_000": np.zeros(2)}) == 0.0
    assert state_error({"ssm_state_000": np.zeros(2)}, {"ssm_state_000": np.ones(2)}) == 1.0
