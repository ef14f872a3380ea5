"""The law checker: true bundles pass, and each kind of fault is found and named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sample_models import attention_layer, mamba_layer, model

from fixedstate.bundle import Bundle
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.laws import check_bundle, check_engine


@pytest.fixture
def toy_bundle(toy):
    return Bundle.open(toy)


def test_laws_hold(tiny):
    """Every tiny bundle keeps laws 1 to 4, 6 and 7."""
    results = check_bundle(tiny)
    assert [result.law for result in results] == [1, 2, 3, 4, 6, 7]
    assert [result.where for result in results if not result.passed] == []
    json.dumps([result.to_dict() for result in results], allow_nan=False)


def test_another_back_end_and_a_recomputation_can_be_given(toy_bundle):
    """Law 5 appears with a reference; law 1 then has nothing it did not run."""

    def other(slots):
        return open_engine(toy_bundle, slots=slots, optimization="none")

    results = {r.law: r for r in check_bundle(toy_bundle, recompute=other, reference=other)}
    assert list(results) == [1, 2, 3, 4, 5, 6, 7]
    assert all(result.passed for result in results.values())
    assert "not run" not in results[1].note
    assert "33 blocks" in results[5].note


class Faulty(SessionEngine):
    """An engine with one fault, chosen by name."""

    fault = ""

    def commit(self, ids, commit_length, first=0):
        blocks = ids.shape[1] // self.spec.block_len
        super().commit(ids, commit_length, first)
        side = self.buffers.align(1)
        port = self.buffers.state.swapped[1]
        if self.fault == "long commits" and blocks > 2:
            self.buffers.past(port, side, 1)[0] += 1
        if self.fault == "batch" and ids.shape[0] > 2:
            self.buffers.past(port, side, 1)[0] *= 1 + 1e-6
        if self.fault == "growth":
            pair = self.buffers._pairs[port.suffix]
            self.buffers._pairs[port.suffix] = tuple(np.concatenate([a, a[:1]]) for a in pair)
            self._bound.clear()

    def denoise(self, ids, first=0):
        if self.fault == "leak" and self.past_length[0]:
            self.buffers.past(self.buffers.state.appended[0], 0, 1)[0, 0, 0, 0] += 1
        out = super().denoise(ids, first)
        if self.fault == "behind":
            key = self.buffers.past(self.buffers.state.appended[0], 0, ids.shape[0], first)
            out += key[:, :, -1:, 0] * 1e-3
        return out

    def read(self, row):
        out = super().read(row)
        if self.fault == "saved zero":
            out["ssm_state_001"][:] = 0
        if self.fault == "saved NaN":
            out["value_000"][:] = np.nan
        return out

    def write(self, row, arrays, past_length, last_logits=None):
        arrays = dict(arrays)
        if self.fault == "restored zero" or (self.fault == "elsewhere" and self.slots == 2):
            arrays["conv_state_001"] = np.zeros_like(arrays["conv_state_001"])
        super().write(row, arrays, past_length, last_logits)
        if self.fault == "length":
            self.past_length[row] -= self.spec.block_len

    def reset(self, row, room=0):
        length = self.past_length[row]
        super().reset(row, room)
        if self.fault == "reset" and length:
            port = self.buffers.state.swapped[1]
            self.buffers._pairs[port.suffix][self.buffers._side[row]][row] = 1


@pytest.mark.parametrize(
    ("fault", "law", "where"),
    [
        ("long commits", 1, "generation 1, block 3, remainder 0, logits"),
        ("long commits", 3, "block 3, row 0, ssm_state_001"),
        ("leak", 2, "block 1, key_000"),
        ("batch", 4, "rows [0, 1, 2, 3], row 0, block "),
        ("behind", 4, "row 0, block 0, logits: bytes differ"),
        ("growth", 6, "ssm_state_001: "),
        ("reset", 4, "ssm_state_001: bytes differ"),
        ("saved zero", 7, "block 1 + 1, slot 3, logits of pass 1: bytes differ"),
        ("saved NaN", 7, "block 1: state 'value_000' holds NaN or infinity after 8 tokens"),
        ("restored zero", 7, "block 1, slot 3, conv_state_001: bytes differ"),
        ("elsewhere", 7, "block 1, another engine, conv_state_001: bytes differ"),
        ("length", 7, "block 1, slot 3, key_000: bytes differ"),
    ],
)
def test_faults_are_found(toy_bundle, fault, law, where):
    """The law that a fault breaks fails, and names block and port of the first divergence."""

    def candidate(slots):
        whole = open_engine(toy_bundle, threads=1, slots=slots)
        parts = toy_bundle.spec, toy_bundle.state, whole._sessions
        made = Faulty(*parts, slots=slots, weights=toy_bundle.weights)
        made.fault = fault
        return made

    found = {result.law: result for result in check_engine(candidate, block_counts=(1, 3))}
    assert not found[law].passed
    assert where in found[law].where
    if law in (1, 3):
        assert found[law].worst > 0


def test_a_reference_that_differs_is_named(toy_bundle):
    """Law 5 says where two back ends part."""

    class Other(Faulty):
        fault = "behind"

        def denoise(self, ids, first=0):
            return super().denoise(ids, first) + (self.past_length[0] >= 16)

    def reference(slots):
        whole = open_engine(toy_bundle, slots=slots)
        return Other(toy_bundle.spec, toy_bundle.state, whole._sessions, slots=slots)

    result = check_bundle(toy_bundle, reference=reference)[4]
    assert (result.law, result.passed) == (5, False)
    assert result.where.startswith("block 2, logits: differs by 1")


def test_shifted_and_self_conditioned_rows_go_on_from_saved_states(tmp_path):
    """`last_logits` are part of a saved state; what passes leave for one another is not."""
    spec = model(
        mamba_layer("forward"), attention_layer(), logit_shift=True, self_conditioning_width=24
    )
    save_checkpoint(tmp_path / "checkpoint", spec, random_tensors(spec, seed=3))
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", fused=False)
    (result,) = check_bundle(Bundle.open(tmp_path / "bundle"), only=(7,), block_counts=(1, 2))
    assert (result.passed, result.where) == (True, "")
