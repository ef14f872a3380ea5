"""Two engines along one trajectory: what is compared, what fails, and where that is said to be.

Engines run on the stand-in of TensorRT's runtime, so that their numbers are real.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scripted import ScriptedEngine, small_spec
from toy_bundle import write_toy_bundle

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.errors import CapacityError, UsageError
from fixedstate.runtime import against, trt
from fixedstate.runtime.against import compare_bundles, compare_engines, tolerance_between
from fixedstate.runtime.compare import TOLERANCES, Tolerance
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.ort import open_sessions
from fixedstate.state import Precision, StateSpec

sys.path.append(str(Path(__file__).parent))

import trt_runtime_stand_in as stand_in

WAYS = {
    "apart": ("denoise", "commit"),
    "beside the fused plan": ("denoise", "commit_denoise"),
    "one plan": ("commit_denoise",),
}
FP32 = Tolerance.of("fp32")


@pytest.fixture
def run_engine():
    """Opens engines on the stand-in; all they took has to be given back."""
    cuda = stand_in.Cuda()
    product = stand_in.Product(cuda)
    opened = []

    def made(folder, **options):
        opened.append(trt.open_engine(folder, module=product, cuda=cuda, **options))
        return opened[-1]

    made.cuda, made.product = cuda, product
    yield made
    for engine in opened:
        engine.close()
    assert not cuda.allocations


@pytest.fixture
def on_stand_in(run_engine, monkeypatch):
    """Engines that the package opens itself run on the stand-in too."""
    real = trt.open_engine
    sides = {"module": run_engine.product, "cuda": run_engine.cuda}
    monkeypatch.setattr(trt, "open_engine", lambda folder, **o: real(folder, **sides, **o))
    return run_engine


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Whole numbers, exact: what differs was changed by the test."""
    roles = ("denoise", "commit", "commit_denoise")
    return Bundle.open(write_toy_bundle(tmp_path_factory.mktemp("toy") / "b", roles=roles))


@pytest.fixture(scope="module")
def hybrid(bundle_path):
    """Random weights of a Mamba-2, an attention and another Mamba-2 layer."""
    return Bundle.open(bundle_path("F3", fused=True), verify_weights=False)


def on_ort(bundle, slots=3, **options):
    return open_engine(bundle, threads=1, slots=slots, **options)


class Altered:
    """An engine whose answers are changed on their way."""

    def __init__(self, engine, scores=lambda logits: logits, state=lambda arrays: arrays):
        self._engine, self._scores, self._state = engine, scores, state

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def denoise(self, ids, first=0):
        return self._scores(self._engine.denoise(ids, first).copy())

    def commit_denoise(self, ids, first=0):
        return self._scores(self._engine.commit_denoise(ids, first).copy())

    def read(self, row):
        return self._state(self._engine.read(row))


# --- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_with_the_same_numbers_passes(run_engine, toy, tmp_path, way):
    """Every port of the state and the logits, fused or not, byte for byte on both sides."""
    folder = stand_in.write_stand_in_engine(tmp_path / "e", toy, WAYS[way])
    engine = run_engine(folder, slots=3)
    found = compare_engines(on_ort(toy), engine, FP32)
    assert found.passed
    assert found.first == ""
    committed = {port.suffix: port.layer for port in StateSpec.of(toy.spec).committed}
    records = {port.name: port for port in found.ports}
    assert set(records) == {*committed, "logits", "past_length"}
    assert {name: records[name].layer for name in committed} == committed
    assert {(port.max_abs, port.max_rel, port.failed) for port in found.ports} == {(0.0, 0.0, 0)}
    assert all(port.compared >= found.commits for port in found.ports)
    assert found.choices.agreed == found.choices.sure > 100
    assert found.tokens.equal == found.tokens.tokens == sum(found.tokens.first) > 0
    assert found.candidate.startswith("tensorrt-rtx 1.7.1.116 on ")
    assert found.reference == "cpu"


def test_trajectories_have_slices_passes_blocks_and_rows_of_unequal_length(toy):
    """Two generations on the same slots, more requests than slots, prompts in slices."""

    class Told(Altered):
        def __init__(self, engine):
            super().__init__(engine)
            self.commits, self.denoised, self.resets = [], [], []

        def commit(self, ids, lengths, first=0):
            self.commits.append((len(ids), ids.shape[1]))
            self._engine.commit(ids, lengths, first)

        def denoise(self, ids, first=0):
            self.denoised.append((self.past_length[first : first + len(ids)].tolist(), ids.copy()))
            return super().denoise(ids, first)

        def reset(self, row, room=0):
            self.resets.append(row)
            self._engine.reset(row, room)

    sessions = open_sessions(toy, WAYS["apart"], threads=1)
    told = Told(SessionEngine(toy.spec, toy.state, sessions, slots=3))
    found = compare_engines(on_ort(toy, slots=4), told, FP32)
    assert found.passed
    assert found.rows == 3
    length, mask = toy.spec.block_len, toy.spec.mask_id
    assert (1, 2 * length) in told.commits  # a slice of a prompt
    assert (1, length) in told.commits  # its rest
    assert any(rows == 2 for rows, _ in told.commits)
    # together twice, then alone: each time every request takes a slot anew
    assert len(told.resets) == 3 * 4
    assert any(len(set(pasts)) > 1 for pasts, _ in told.denoised)
    opens = [int((row == mask).sum()) for _, ids in told.denoised for row in ids]
    assert {length, length - length // 2} <= set(opens)
    assert min(opens) < length // 2  # canvases that were partly filled by passes before
    ids = np.concatenate([row for _, ids in told.denoised for row in ids])
    assert 0 <= ids.min() <= ids.max() < toy.spec.vocab_size or ids.max() == mask


@pytest.mark.parametrize("wrong", [False, True])
def test_last_logits_are_compared_where_the_model_shifts(wrong):
    """A row's first slot is predicted by them alone."""

    class Shifted(ScriptedEngine):
        def commit(self, ids, commit_length, first=0):
            super().commit(ids, commit_length, first)
            self.last_logits[first] *= 1 + wrong

    spec = small_spec(logit_shift=True)
    found = compare_engines(ScriptedEngine(spec), Shifted(spec), FP32)
    assert found.passed is not wrong
    assert found.first_port == ("last_logits" if wrong else "")
    assert {port.name for port in found.ports} == {"logits", "last_logits", "past_length"}


def test_one_row_where_the_engine_takes_no_more(on_stand_in, toy, tmp_path):
    folder = stand_in.write_stand_in_engine(tmp_path / "e", toy, WAYS["apart"], rows=1)
    (found,) = compare_bundles(toy, folder, FP32, quick=True)
    assert (found.passed, found.rows) == (True, 1)


def test_short_rows_where_the_engine_has_no_room_for_more(on_stand_in, toy, tmp_path):
    """Two blocks of keys and values: prompts are as long as there is room for."""
    room = 2 * toy.spec.block_len
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", toy, WAYS["apart"], columns=(room, room, room)
    )
    (found,) = compare_bundles(toy, folder, FP32)
    assert found.passed
    assert found.tokens.tokens > 0


def test_no_room_for_a_block_is_said(toy):
    narrow = on_ort(toy, limit=toy.spec.block_len - 1)
    with pytest.raises(CapacityError, match="build it with more --capacity"):
        compare_engines(on_ort(toy), narrow, FP32)


# --- what fails ----------------------------------------------------------------------------------


def test_VE_04_scores_that_are_only_scaled_fail(toy):
    """Cosine 1, every token the same, and wrong."""
    scaled = Altered(on_ort(toy), lambda logits: logits * np.float32(1.87))
    found = compare_engines(on_ort(toy), scaled, TOLERANCES["bf16"], quick=True)
    assert not found.passed
    (logits,) = [port for port in found.ports if port.name == "logits"]
    assert logits.cosine > 0.999999
    assert logits.failed == logits.compared
    assert found.choices.agreed == found.choices.sure > 0
    assert found.tokens.equal == found.tokens.tokens
    assert found.first.startswith("generation 1, slot 0, block 0, pass 1, logits: differs by ")
    assert (found.first_port, found.first_layer) == ("logits", None)


def test_VE_04_state_that_is_only_scaled_fails_and_names_its_layer(toy):
    def state(arrays):
        return {**arrays, "ssm_state_001": arrays["ssm_state_001"] * np.float32(1.87)}

    found = compare_engines(
        on_ort(toy), Altered(on_ort(toy), state=state), TOLERANCES["bf16"], quick=True
    )
    assert not found.passed
    assert (found.first_port, found.first_layer) == ("ssm_state_001", 1)
    assert found.first.startswith("generation 1, slot 1, 2 blocks committed, ssm_state_001: ")
    assert [port.name for port in found.ports if port.failed] == ["ssm_state_001"]


def poison(logits):
    logits[-1, 0, 3] = np.nan
    return logits


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ((False, True), "the candidate holds NaN or infinity"),
        ((True, False), "the reference itself is invalid"),
        ((True, True), "the reference itself is invalid"),
    ],
    ids=["candidate", "reference", "both"],
)
def test_VE_01_numbers_that_are_none_fail(toy, sides, words):
    """No comparison with NaN is ever true, so none may be needed to fail."""
    engines = [Altered(on_ort(toy), poison) if bad else on_ort(toy) for bad in sides]
    found = compare_engines(*engines, TOLERANCES["bf16"], quick=True)
    assert not found.passed
    assert words in found.first
    (logits,) = [port for port in found.ports if port.name == "logits"]
    assert np.isnan(logits.max_abs)
    assert np.isnan(logits.cosine)
    assert logits.failed


def test_VE_01_infinity_in_a_state_fails(toy):
    def state(arrays):
        arrays["conv_state_001"][0, 0] = np.inf
        return arrays

    found = compare_engines(on_ort(toy), Altered(on_ort(toy), state=state), FP32, quick=True)
    assert (found.passed, found.first_port, found.first_layer) == (False, "conv_state_001", 1)


def test_the_first_layer_whose_weights_differ_is_named(hybrid, tmp_path):
    """Layer 0 agrees; the keys of layer 1 are the first that do not, at the first commit."""
    shutil.copytree(hybrid.path, tmp_path / "b")
    file = tmp_path / "b" / WEIGHTS
    weights = {name: array.copy() for name, array in load_file(file).items()}
    raw = bytearray(file.read_bytes())
    (name,) = [name for name in weights if "layers.1" in name and "k_proj" in name]
    at = raw.index(weights[name].tobytes())
    raw[at : at + weights[name].nbytes] = (weights[name] * np.float32(1.05)).tobytes()
    file.write_bytes(raw)
    other = Bundle.open(tmp_path / "b", verify_weights=False)
    found = compare_engines(on_ort(hybrid), on_ort(other), FP32, quick=True)
    assert (found.passed, found.first_port, found.first_layer) == (False, "key_001", 1)
    assert found.first.startswith("generation 1, slot 1, 2 blocks committed, key_001: differs by")
    agreeing = {port.name for port in found.ports if not port.failed}
    assert agreeing == {"conv_state_000", "ssm_state_000", "value_001", "past_length"}


def test_a_missing_port_fails(toy):
    def state(arrays):
        return {name: array for name, array in arrays.items() if name != "value_000"}

    found = compare_engines(on_ort(toy), Altered(on_ort(toy), state=state), FP32, quick=True)
    assert (found.passed, found.first_port) == (False, "value_000")
    assert "missing in the candidate" in found.first


# --- reduced heads -------------------------------------------------------------------------------


class Reduced(Altered):
    """An engine that gives what the head `entropy` gives, by the words of its definition."""

    head = "entropy"
    scores = staticmethod(lambda logits: logits)

    def denoise_at(self, ids, places, first=0):
        return self.reduce(self._engine.denoise(ids, first), places)

    def commit_denoise_at(self, ids, places, first=0):
        return self.reduce(self._engine.commit_denoise(ids, first), places)

    def reduce(self, logits, places):
        logits = self.scores(np.take_along_axis(logits, places[..., None], 1)).astype(np.float64)
        logits = logits[..., :36]  # neither the mask nor the rows behind the vocabulary
        odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return {
            "tokens": odds.argmax(-1),
            "confidence": odds.max(-1).astype(np.float32),
            "entropy": -(odds * np.log(np.maximum(odds, 1e-300))).sum(-1).astype(np.float32),
        }


def test_a_reduced_head_is_held_against_all_scores(toy):
    found = compare_engines(on_ort(toy), Reduced(on_ort(toy)), FP32, quick=True)
    assert found.passed, found.first
    assert found.head == "entropy"
    assert {"tokens", "confidence", "entropy", "ssm_state_001"} <= {p.name for p in found.ports}
    assert "logits" not in {port.name for port in found.ports}
    assert found.choices.agreed == found.choices.sure > 0
    assert found.tokens.equal == found.tokens.tokens > 0


@pytest.mark.parametrize(
    ("scores", "port"),
    [
        (lambda logits: logits * np.float32(1.87), "confidence"),
        (lambda logits: np.roll(logits, 1, -1), "tokens"),
    ],
    ids=["scaled", "shifted"],
)
def test_VE_04_a_reduced_head_of_other_scores_fails(toy, scores, port):
    """Scaled scores name the same tokens; their probabilities are others."""
    engine = Reduced(on_ort(toy))
    engine.scores = scores
    found = compare_engines(on_ort(toy), engine, FP32, quick=True)
    assert (found.passed, found.first_port) == (False, port)


@pytest.mark.parametrize("port", ["confidence", "entropy"])
def test_VE_01_a_reduced_head_that_gives_nan_fails(toy, port):
    class Poisoned(Reduced):
        def reduce(self, logits, places):
            given = super().reduce(logits, places)
            return {**given, port: given[port] * np.float32(np.nan)}

    found = compare_engines(on_ort(toy), Poisoned(on_ort(toy)), TOLERANCES["bf16"], quick=True)
    assert (found.passed, found.first_port) == (False, port)
    assert "the candidate holds NaN or infinity" in found.first


def test_ids_that_no_slot_may_hold_fail(toy):
    class Masked(Reduced):
        def reduce(self, logits, places):
            given = super().reduce(logits, places)
            return {**given, "tokens": np.full_like(given["tokens"], self.wrong)}

    for Masked.wrong in (toy.spec.mask_id, toy.spec.vocab_size, -1, 10_000):
        found = compare_engines(on_ort(toy), Masked(on_ort(toy)), TOLERANCES["bf16"], quick=True)
        assert (found.passed, found.first_port) == (False, "tokens")
        assert "ids that no slot may hold" in found.first
        assert found.choices.agreed == 0


def test_VE_01_a_reference_that_holds_nan_fails_beside_a_reduced_head(toy):
    reference = Altered(on_ort(toy), poison)
    found = compare_engines(reference, Reduced(on_ort(toy)), FP32, quick=True)
    assert not found.passed
    assert "the reference itself is invalid" in found.first


def test_every_head_of_an_engine_is_compared(on_stand_in, bundle_path, tmp_path):
    """All scores first, then what passes with the head give."""
    bundle = Bundle.open(bundle_path("F2", fused=True, head="top_k"), verify_weights=False)
    roles = ("denoise", "commit_denoise", "denoise_top_k", "commit_denoise_top_k")
    folder = stand_in.write_stand_in_engine(tmp_path / "e", bundle, roles)
    found = compare_bundles(bundle, folder, FP32, quick=True)
    assert [(one.head, one.passed, one.first) for one in found] == [
        ("logits", True, ""),
        ("top_k", True, ""),
    ]
    assert {"top_tokens", "top_confidence"} <= {port.name for port in found[1].ports}


# --- tolerances ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_VE_05_rounding_passes_at_its_own_precision_only(on_stand_in, hybrid, tmp_path, precision):
    """A half engine is as close as halves are, and no float32."""
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", hybrid, WAYS["apart"], precision=precision
    )
    own = tolerance_between(hybrid, folder)
    assert own == TOLERANCES[precision]
    (found,) = compare_bundles(hybrid, folder, own)
    assert found.passed, found.first
    assert max(port.max_rel for port in found.ports) > 1e-4
    assert found.choices.agreed >= 0.99 * found.choices.sure > 0
    assert not compare_bundles(hybrid, folder, FP32, quick=True)[0].passed


def test_VE_05_an_override_is_recorded(toy):
    chosen = tolerance_between(toy, toy, 0.5)
    assert (chosen.absolute, chosen.relative, chosen.overridden) == (0.5, 0.5, True)
    half = tolerance_between(replace(toy, precision=Precision.named("fp16")), toy, 0.5)
    assert (half.precision, half.absolute, half.relative) == ("fp16", None, 0.5)
    found = compare_engines(on_ort(toy), on_ort(toy), chosen, quick=True)
    assert found.to_dict()["tolerance"]["overridden"] is True


def test_a_bundle_beside_itself(toy):
    """Another bundle takes the place of an engine; the coarser precision counts."""
    (found,) = compare_bundles(toy, toy, tolerance_between(toy, toy), quick=True)
    assert found.passed
    assert (found.reference, found.candidate) == ("cpu", "cpu")
    half = replace(toy, precision=Precision.named("fp16"))
    assert tolerance_between(toy, half) == tolerance_between(half, toy) == TOLERANCES["fp16"]


def test_VE_02_zeros_on_both_sides_are_equal():
    zero, one = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    port, rms, cosine = against.measure("x", zero, zero.copy(), FP32)
    assert (port.passed, port.max_abs, port.max_rel, rms, cosine) == (True, 0.0, 0.0, 0.0, 1.0)
    assert against.measure("x", zero, one, FP32)[0].passed is False
    assert against.cosine(zero, one) == 0.0
    assert against.cosine(one, -one) == pytest.approx(-1.0)


def test_VE_02_large_values_among_small_ones():
    """In half a scan state is judged by root mean square too; float32 has no such rule."""
    state = np.full(10_000, 0.01)
    state[0] = 100.0  # deviation 1
    found = state.copy()
    found[0] += 1.0
    assert against.measure("x", state, found, TOLERANCES["fp16"])[0].passed
    assert not against.measure("x", state, found, FP32)[0].passed
    assert not against.measure("x", state, found * 1.87, TOLERANCES["bf16"])[0].passed


# --- one model -----------------------------------------------------------------------------------


def test_engines_of_other_models_are_refused(toy, tmp_path):
    folder = stand_in.write_stand_in_engine(tmp_path / "e", toy, WAYS["apart"])
    trained = replace(toy, weights="0" * 64)
    with pytest.raises(UsageError, match=r"not of this bundle: it was built from weights"):
        compare_bundles(trained, folder, FP32)
    other = replace(toy, spec=replace(toy.spec, norm_eps=1e-3))
    with pytest.raises(UsageError, match="is of another model than"):
        compare_bundles(toy, other, FP32)
    with pytest.raises(UsageError, match="are of two models"):
        compare_engines(on_ort(toy), on_ort(other), FP32)


def test_bundles_of_other_checkpoints_are_refused(toy):
    """Same sizes, other weights: the files of the checkpoints tell, or nothing does."""
    files = {"config.json": "1" * 64, "model.safetensors": "2" * 64}
    known = replace(toy, source=replace(toy.source, files=files))
    assert against.other_bundle(known, known) is None
    half = replace(known, weights="0" * 64)
    assert against.other_bundle(known, half) is None
    trained = {**files, "model.safetensors": "3" * 64}
    changed = replace(half, source=replace(toy.source, files=trained))
    assert "differ in model.safetensors: give one" in against.other_bundle(known, changed)
    assert "neither says" in against.other_bundle(toy, replace(toy, weights="0" * 64))


def test_engines_that_cannot_denoise_are_refused(toy, on_stand_in, tmp_path):
    folder = stand_in.write_stand_in_engine(tmp_path / "e", toy, ("commit",))
    with pytest.raises(UsageError, match="none of which denoises"):
        compare_bundles(toy, folder, FP32)
    reduced = Altered(on_ort(toy))
    reduced.head = "top_k"
    with pytest.raises(UsageError, match="reference gives top_k, not all scores"):
        compare_engines(reduced, on_ort(toy), FP32)


def test_why_an_engine_does_not_run_here(run_engine, toy, tmp_path):
    """Known without reading a plan; nothing speaks against it on the stand-in's card."""
    sides = {"module": run_engine.product, "cuda": run_engine.cuda}
    fits = stand_in.write_stand_in_engine(tmp_path / "a", toy, WAYS["apart"])
    assert trt.why_not_here(fits, **sides) is None
    other = stand_in.write_stand_in_engine(
        tmp_path / "b", toy, WAYS["apart"], capabilities=("8.6",)
    )
    assert "built for compute capability 8.6" in trt.why_not_here(other, **sides)
    assert run_engine.product.events == []
    assert not run_engine.cuda.allocations
