"""Engines at run time, without a card: a stand-in that enforces the contract, real numbers."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sample_engine import AOT, LIBRARY, edit
from sample_models import attention_layer, mamba_layer, model

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, BundleError, CapacityError, UsageError
from fixedstate.plugins import driver
from fixedstate.runtime import Request, Settings, Snapshot, load, trt
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.devicebuffers import DeviceBuffers
from fixedstate.runtime.deviceengine import DeviceEngine, _in_place
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.runtime.identity import PluginUse
from fixedstate.runtime.laws import check_engine
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.ort import open_sessions

sys.path.append(str(Path(__file__).parent))

import trt_runtime_stand_in as stand_in

TINY = ("tiny-attention", "tiny-mamba", "tiny-hybrid")
ROLES = ("denoise", "commit", "commit_denoise")


@pytest.fixture
def bench():
    """Everything on the device has to be given back."""
    with stand_in.Bench() as made:
        yield made


@pytest.fixture(scope="session")
def engine_path(bundle_path, tmp_path_factory):
    """Folder of a stand-in engine, made once: ``engine_path("F2", ("denoise", "commit"))``."""
    made = {}
    root = tmp_path_factory.mktemp("engines")

    def folder(name, roles=ROLES, head="logits", **options):
        key = name, roles, head, tuple(sorted(options.items()))
        if key not in made:
            made[key] = root / f"{len(made)}.engine"
            source = bundle_path(name, fused=True, head=head)
            bundle = Bundle.open(source, verify_weights=False)
            stand_in.write_stand_in_engine(made[key], bundle, roles, **options)
        return made[key]

    return folder


def requests(spec, count=5, greedy=False):
    """Of mixed lengths, greedy and sampled; prompts and answers of more than two blocks."""
    rng = np.random.default_rng(3)
    vocab = min(spec.vocab_size, spec.mask_id)
    length = spec.block_len
    heats = ({}, {"temperature": 1.0}, {"steps": 3}, {"threshold": 0.2}, {"temperature": 0.6})
    return [
        Request(
            rng.integers(0, vocab, (1, 3, length, 2 * length + 3, 3 * length)[i % 5]),
            Settings(2 * length + 5 - i, seed=i, stop_ids=(), **({} if greedy else heats[i % 5])),
        )
        for i in range(count)
    ]


def in_place(bundle):
    """Aliases of a commit plan that updates all it carries where it lies."""
    read = {given.name for given in bundle.graphs["commit"].inputs}
    pairs = ((port.present.name, port.past.name) for port in bundle.state.committed)
    return {"commit": {present: past for present, past in pairs if past in read}}


def reference(path, roles, slots):
    """The same bundle on ONNX Runtime, by the same graphs."""
    bundle = Bundle.open(path, verify_weights=False)
    sessions = open_sessions(bundle, roles, threads=1)
    return SessionEngine(bundle.spec, bundle.state, sessions, slots=slots, weights=bundle.weights)


def decoded(engine):
    stream = Stream(engine, requests(engine.spec, greedy=engine.head != "logits"))
    list(stream)
    assert [result.error for result in stream.results] == [None] * 5
    return [result.token_ids for result in stream.results]


def states(engine):
    """Bytes of every row, and its length."""
    return [
        (int(engine.past_length[row]), {k: v.tobytes() for k, v in engine.read(row).items()})
        for row in range(engine.slots)
    ]


# --- the same tokens, the same state --------------------------------------------------------------

WAYS = {
    "apart": (("denoise", "commit"), "fast"),
    "beside the fused plan": (("denoise", "commit_denoise"), "fast"),
    "one plan": (("commit_denoise",), "lean"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TINY)
def test_tokens_and_state_are_those_of_onnx_runtime(bench, bundle_path, engine_path, name, way):
    """Greedy and sampled, several rows, twice over the same slots; state byte for byte."""
    roles, memory = WAYS[way]
    engine = bench.open(engine_path(name, roles), slots=3, memory=memory)
    expected = reference(bundle_path(name, fused=True), roles, 3)
    assert engine.roles == expected.roles
    assert engine.fuses == expected.fuses
    for _ in range(2):
        assert decoded(engine) == decoded(expected)
        assert states(engine) == states(expected)
    assert bench.cuda.captures >= len(engine.captured) > 2
    assert not engine.uncaptured


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["F2", "F3", "F4"])
def test_an_engine_of_a_fixed_batch_decodes_fewer_rows(bench, bundle_path, engine_path, name, way):
    """Other rows fill its passes up; they are in no slot and change nothing."""
    roles, memory = WAYS[way]
    folder = engine_path(name, roles, least_rows=4)
    expected = reference(bundle_path(name, fused=True), roles, 3)
    engine = bench.open(folder, slots=3, memory=memory)
    for _ in range(2):
        assert decoded(engine) == decoded(expected)
        assert states(engine) == states(expected)
    alone = bench.open(folder, slots=1, memory=memory)
    assert decoded(alone) == decoded(expected)
    alone.warm_up()
    assert not alone.uncaptured


@pytest.mark.parametrize("name", ["F2", "F4"])
def test_rows_that_fill_up_go_with_pairs_in_place(bench, bundle_path, tmp_path, name):
    """What such a row would write stands in no slot, even after a long row stood there."""
    source = bundle_path(name, fused=True)
    bundle = Bundle.open(source, verify_weights=False)
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", bundle, ("denoise", "commit"), aliases=in_place(bundle), least_rows=3
    )
    engine = bench.open(folder, slots=4)
    expected = reference(source, ("denoise", "commit"), 4)
    assert decoded(engine) == decoded(expected)
    assert states(engine) == states(expected)


def test_weights_are_on_the_device_once_where_one_plan_serves(bench, engine_path):
    """`lean` loads one plan for every pass."""
    bench.open(engine_path("tiny-mamba"), memory="lean").denoise(np.zeros((1, 16), np.int64))
    assert bench.product.events == ["deserialize"]
    bench.open(engine_path("tiny-mamba"), memory="fast")
    assert bench.product.events == ["deserialize"] * 3


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_reduced_heads(bench, bundle_path, engine_path, memory):
    """Tokens of the head, and kilobytes to the host instead of all scores."""
    roles = (
        ("denoise_top_k", "commit_denoise_top_k") if memory == "fast" else ("commit_denoise_top_k",)
    )
    all_roles = (*ROLES, "denoise_top_k", "commit_denoise_top_k")
    path = engine_path("F2", all_roles, "top_k")
    engine = bench.open(path, slots=2, head="top_k", memory=memory)
    expected = reference(bundle_path("F2", fused=True, head="top_k"), roles, 2)
    assert (engine.head, engine.top_k) == (expected.head, expected.top_k)
    assert decoded(engine) == decoded(expected)
    assert states(engine) == states(expected)
    with pytest.raises(BackendError, match="give top_k, not all scores"):
        engine.denoise(np.zeros((1, engine.spec.block_len), np.int64))


@pytest.mark.parametrize(
    ("name", "way"), [("F2", "apart"), ("F3", "apart"), ("F3", "one plan"), ("F4", "one plan")]
)
def test_laws(bench, engine_path, name, way):
    """1 to 4, 6 and 7 along trajectories; 9 blocks go in slices of the 8 that the profile takes."""
    roles, memory = WAYS[way]
    path = engine_path(name, roles)

    def candidate(slots):
        return bench.open(path, slots=slots, memory=memory)

    results = check_engine(candidate, block_counts=(1, 2, 9))
    assert [result.law for result in results] == [1, 2, 3, 4, 6, 7]
    assert [(result.law, result.where) for result in results if not result.passed] == []


def test_law_5(bench, bundle_path, engine_path):
    """The engine against ONNX Runtime along ragged rows: nothing differs."""
    bundle = Bundle.open(bundle_path("F3", fused=True), verify_weights=False)
    (result,) = check_engine(
        lambda slots: bench.open(engine_path("F3"), slots=slots, memory="fast"),
        reference=lambda slots: open_engine(bundle, threads=1, slots=slots, memory="fast"),
        only=(5,),
    )
    assert (result.passed, result.worst) == (True, 0.0)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """A bundle with a logit shift and self-conditioning: last_logits and ports of scope step."""
    from fixedstate.export.checkpoint import random_tensors, save_checkpoint
    from fixedstate.export.pipeline import export_bundle

    folder = tmp_path_factory.mktemp("shifted")
    layers = (mamba_layer("forward"), attention_layer("forward"))
    spec = model(*layers, logit_shift=True, self_conditioning_width=24)
    save_checkpoint(folder / "checkpoint", spec, random_tensors(spec, seed=3))
    export_bundle(folder / "checkpoint", folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize("way", WAYS)
def test_shift_and_self_conditioning(bench, shifted, tmp_path, way):
    """What a pass leaves for the next one, and the logits of last tokens, survive like the rest."""
    roles, memory = WAYS[way]
    bundle = Bundle.open(shifted)
    folder = stand_in.write_stand_in_engine(tmp_path / "e", bundle, roles)
    engine = bench.open(folder, slots=3, memory=memory)
    expected = reference(shifted, roles, 3)
    assert decoded(engine) == decoded(expected)
    assert states(engine) == states(expected)
    assert engine.last_logits.tobytes() == expected.last_logits.tobytes()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_state_goes_on_from_a_file(bench, bundle_path, tmp_path, precision):
    """Saved, loaded into another slot and another engine: the same tokens."""
    source = (
        bundle_path("F3", precision="fp16")
        if precision == "fp16"
        else bundle_path("F3", fused=True)
    )
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", Bundle.open(source), ("denoise", "commit"), precision=precision
    )
    engine = bench.open(folder, slots=2)
    ids = np.arange(3 * engine.spec.block_len).reshape(1, -1) % 30
    engine.commit(ids, np.array([ids.shape[1]]), 1)
    saved = Snapshot.from_bytes(Snapshot.take(engine, 1, (4, 5), seed=9).to_bytes())
    half = {"fp16": np.float16, "bf16": np.uint16}[precision]
    assert {array.dtype.type for array in saved.arrays.values()} == {half, np.float32}
    other = bench.open(folder, slots=1)
    saved.restore(other, 0)
    assert states(other)[0] == states(engine)[1]
    request = Request([1, 2], Settings(20, stop_ids=()), saved)
    answers = []
    for one in (engine, other):
        stream = Stream(one, [request])
        list(stream)
        answers.append(stream.results[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 20


# --- rows, slots, room ----------------------------------------------------------------------------


def test_rows_are_reset_moved_and_swapped(bench, bundle_path, engine_path):
    """As on the host, whatever side a row is live in, and with other rows left alone."""
    engine = bench.open(engine_path("F3"), slots=4, memory="fast")
    expected = reference(bundle_path("F3", fused=True), ("denoise", "commit_denoise"), 4)
    rng = np.random.default_rng(5)
    length = engine.spec.block_len
    for _ in range(25):
        kind, a, b = rng.integers(4), int(rng.integers(4)), int(rng.integers(4))
        ids = rng.integers(0, 30, (1, length * int(rng.integers(1, 3))))
        for one in (engine, expected):
            if kind == 0:
                one.reset(a)
            elif kind == 1:
                one.move(a, b)
            elif kind == 2:
                one.swap(a, b)
            else:
                one.commit(ids, np.array([ids.shape[1]]), a)
        assert states(engine) == states(expected)
        canvas = rng.integers(0, 30, (4 - a, length))
        assert engine.denoise(canvas, a).tobytes() == expected.denoise(canvas, a).tobytes()


def test_what_was_no_number_is_gone_with_its_request(bench, bundle_path, engine_path):
    """NaN among a row's keys does not reach the row that comes there next, on either side."""
    engine = bench.open(engine_path("F3"), slots=2, memory="fast")
    expected = reference(bundle_path("F3", fused=True), ("denoise", "commit_denoise"), 2)
    rng = np.random.default_rng(6)
    length = engine.spec.block_len
    ids = rng.integers(0, 30, (2, 2 * length))
    canvas = rng.integers(0, 30, (2, length))
    for one in (engine, expected):
        one.commit(ids, np.array([2 * length, length]))
        arrays = one.read(0)
        keys = [name for name in arrays if name.startswith(("key", "value"))]
        for name in keys:
            arrays[name][:] = np.nan
        one.write(0, arrays, 2 * length)
        assert keys
        assert np.isnan(one.denoise(canvas)[0]).all()
        one.move(1, 0)
    given = [one.denoise(canvas).copy() for one in (engine, expected)]
    assert np.isfinite(given[0]).all()
    assert given[0].tobytes() == given[1].tobytes()


def test_capacity_grows_inside_the_profile(bench, bundle_path, engine_path):
    """By powers of two up to what the engine takes; then a refusal before the pass."""
    engine = bench.open(engine_path("F4"), slots=2, memory="fast")
    expected = reference(bundle_path("F4", fused=True), ("denoise", "commit_denoise"), 2)
    length, seen = engine.spec.block_len, []
    assert engine.limit == 4096
    ids = np.arange(8 * length).reshape(1, -1) % 30
    canvas = np.full((1, length), engine.spec.mask_id)
    for step in range(10):
        for one in (engine, expected):
            one.commit(ids, np.array([8 * length]), 1)
        assert engine.denoise(canvas, 1).tobytes() == expected.denoise(canvas, 1).tobytes(), step
        assert states(engine) == states(expected)
        seen.append(engine.buffers.capacity)
    assert seen == [256] * 4 + [512] * 4 + [1024] * 2
    engine.past_length[1] = 4096
    before = engine.past_length.tolist()
    with pytest.raises(CapacityError, match="need room for 4104; the limit is 4096"):
        engine.commit(ids[:, :length], np.array([length]), 1)
    assert engine.past_length.tolist() == before


def test_what_the_profiles_do_not_take_is_refused(bench, engine_path):
    """Slots when it is opened, shapes before the pass."""
    with pytest.raises(UsageError, match=r"5 slots were asked for; .*plan takes 4 rows at most"):
        bench.open(engine_path("F4"), slots=5)
    with pytest.raises(UsageError, match="head 'entropy'"):
        bench.open(engine_path("F4"), head="entropy")
    with pytest.raises(UsageError, match="has no head"):
        bench.open(engine_path("F4"), head="confidence")
    path = engine_path("F4", ("denoise", "commit"), columns=(256, 256, 256))
    assert bench.open(path, limit=1000).limit == 256
    with pytest.raises(UsageError, match="memory 'lean' runs on the plan 'commit_denoise'"):
        bench.open(path, memory="lean")


def test_short_limits_stay_inside_the_profile(bench, engine_path):
    """A limit below the least capacity does not make smaller buffers than the engine takes."""
    engine = bench.open(engine_path("F4"), slots=1, limit=24, memory="fast")
    assert (engine.limit, engine.buffers.capacity) == (24, 256)
    assert decoded_with(engine, 16) == 16


def decoded_with(engine, count):
    stream = Stream(engine, [Request([1], Settings(count, stop_ids=()))])
    list(stream)
    return len(stream.results[0].token_ids)


def test_no_memory_is_a_clear_error_and_leaves_nothing(bench, engine_path):
    """Of the first allocation that is refused, and of growth."""
    engine = bench.open(engine_path("F4"), slots=2, memory="fast")
    length = engine.spec.block_len
    ids = np.zeros((1, 8 * length), np.int64)
    for _ in range(4):
        engine.commit(ids, np.array([8 * length]))
    kept = states(engine)
    bench.cuda.total = 1 << 12
    with pytest.raises(CapacityError, match="no device memory for past_key_000 of 2 slots"):
        engine.commit(ids, np.array([8 * length]))
    assert states(engine) == kept
    with pytest.raises(CapacityError, match="use fewer slots or less room"):
        bench.open(engine_path("F4"), slots=2, memory="fast")


# --- capture and warm-up --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("name", ["F2", "F3", "F4"])
def test_warm_up_leaves_live_state(bench, bundle_path, engine_path, name, memory):
    """Not a byte of it changes; both sides are captured, and later passes capture nothing more."""
    engine = bench.open(engine_path(name), slots=3, memory=memory)
    length = engine.spec.block_len
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 30, (3, 2 * length))
    engine.commit(ids, np.array([2 * length, length, 0]))
    kept, digest, live = states(engine), engine.buffers.hash(), engine.past_length.tolist()
    engine.warm_up(rows=2, blocks=1)
    assert states(engine) == kept
    assert engine.past_length.tolist() == live
    if not engine.state.appended:  # columns behind a row's own are nobody's
        assert engine.buffers.hash() == digest
    assert engine.returned_bytes == 0
    captures = bench.cuda.captures
    assert captures == (4 if engine.state.swapped else 2)  # with pairs: on both sides
    for block in range(3):
        engine.denoise(ids[:2, :length])
        engine.commit(ids[:2, :length], np.full(2, length))
        assert bench.cuda.captures == captures, block
    expected = reference(bundle_path(name, fused=True), WAYS["one plan"][0], 3)
    expected.commit(ids, np.array([2 * length, length, 0]))
    for _ in range(3):
        expected.commit(ids[:2, :length], np.full(2, length))
    assert states(engine) == states(expected)


def test_reduced_heads_of_a_fixed_batch(bench, bundle_path, engine_path):
    roles = ("denoise_top_k", "commit")
    engine = bench.open(engine_path("F2", roles, head="top_k", least_rows=4), head="top_k")
    expected = reference(bundle_path("F2", fused=True, head="top_k"), roles, 1)
    ids, places = np.full((1, engine.spec.block_len), 3), np.array([[0, 2]])
    found, right = (one.denoise_at(ids, places) for one in (engine, expected))
    assert found.keys() == right.keys()
    assert all(np.array_equal(found[name], right[name]) for name in right)


def test_a_pass_runs_once_before_it_is_captured(bench, engine_path):
    """Never inside a capture, never bound anew: the stand-in refuses both."""
    engine = bench.open(engine_path("F3"), slots=2, memory="fast")
    ids = np.zeros((2, engine.spec.block_len), np.int64)
    engine.denoise(ids)
    assert (bench.cuda.captures, engine.captured) == (0, {})
    first = engine.denoise(ids).copy()
    assert bench.cuda.captures == 1
    assert engine.denoise(ids).tobytes() == first.tobytes()
    assert bench.cuda.captures == 1
    assert [context.runs for context in bench.product.contexts] == [2]
    for _ in range(3):
        engine.commit(ids, np.full(2, ids.shape[1]))  # ping, pong, ping
    assert [context.runs for context in bench.product.contexts] == [2, 2, 1]
    places = [set(context.addresses.items()) for context in bench.product.contexts[1:]]
    assert places[0] != places[1]


def test_what_cannot_be_captured_runs_as_it_is(bench, engine_path):
    """And says why; the numbers are the same."""
    plain = bench.open(engine_path("F2"), slots=1, graphs=False)
    ids = np.zeros((1, plain.spec.block_len), np.int64)
    right = [plain.denoise(ids).copy() for _ in range(3)]
    assert (bench.cuda.captures, plain.uncaptured) == (0, {})
    bench.product.capturable = False
    engine = bench.open(engine_path("F2"), slots=1)
    assert [engine.denoise(ids).tobytes() for _ in range(3)] == [a.tobytes() for a in right]
    assert list(engine.uncaptured.values()) == ["TensorRT says that it cannot be captured"]
    assert bench.cuda.captures == 0


def test_a_pass_that_fails_takes_nothing_over(bench, engine_path):
    """The error is TensorRT's own; the row can go on once it works again."""
    engine = bench.open(engine_path("F3"), slots=1, memory="fast")
    ids = np.ones((1, engine.spec.block_len), np.int64)
    engine.commit(ids, np.array([ids.shape[1]]))
    kept = states(engine)
    bench.product.fails = True
    with pytest.raises(BackendError, match=r"plan did not run: CUDA failure 700"):
        engine.commit(ids, np.array([ids.shape[1]]))
    assert states(engine) == kept
    bench.product.fails = False
    engine.commit(ids, np.array([ids.shape[1]]))
    assert engine.past_length.tolist() == [2 * ids.shape[1]]


def test_passes_kept_are_few(bench, engine_path, monkeypatch):
    """The oldest goes with its graph; a closed engine refuses."""
    monkeypatch.setattr("fixedstate.runtime.deviceengine.KEPT_PASSES", 2)
    engine = bench.open(engine_path("F2"), slots=4)
    right = {}
    for _ in range(3):
        for rows in (1, 2, 3, 4):
            ids = np.full((rows, engine.spec.block_len), 3)
            found = engine.denoise(ids)[0].tobytes()
            assert right.setdefault(rows, found) == found
    assert len(engine._passes) == 2
    engine.close()
    with pytest.raises(UsageError, match="this engine is closed"):
        engine.denoise(np.full((1, engine.spec.block_len), 3))


# --- in place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F2", "F4"])
def test_declared_pairs_are_updated_in_place(bench, bundle_path, tmp_path, name):
    """One buffer for scan states, no copies for keys and values; the same tokens."""
    source = bundle_path(name, fused=True)
    bundle = Bundle.open(source, verify_weights=False)
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", bundle, ("denoise", "commit"), aliases=in_place(bundle)
    )
    engine = bench.open(folder, slots=3)
    expected = reference(source, ("denoise", "commit"), 3)
    assert decoded(engine) == decoded(expected)
    assert states(engine) == states(expected)
    both = sum(2 * port.nbytes(3) for port in bundle.state.swapped)
    large = {port.suffix for port in bundle.state.swapped if port.nbytes(3) >= 256}
    held = engine.buffers.nbytes
    assert sum(held[suffix] for suffix in large) <= both / 2


def test_plans_that_update_in_different_ways_are_refused(bench, bundle_path, tmp_path):
    """A buffer cannot be one and two."""
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    pair = {"present_ssm_state_000": "past_ssm_state_000"}
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", bundle, ROLES, aliases={"commit_denoise": pair}
    )
    bench.open(folder, memory="lean")
    with pytest.raises(BackendError, match="some plans update past_ssm_state_000 in place"):
        _in_place([folder.plan("commit"), folder.plan("commit_denoise")], bundle.state)


# --- what the stand-in notices --------------------------------------------------------------------


def _patched(owner, name):
    """A function that puts `make(old)` in the place of a method."""
    return lambda patch, make: patch.setattr(owner, name, make(getattr(owner, name)))


def _one_more(old):
    def append(buffers, *given):
        buffers.past_length += 1
        old(buffers, *given)
        buffers.past_length -= 1

    return append


def _no_flip(old):
    def commit(buffers, rows, lengths, last_logits=None, first=0):
        sides = buffers._side.copy()
        old(buffers, rows, lengths, last_logits, first)
        buffers._side[:] = sides

    return commit


def _allocate(buffers, port, capacity=0):
    return buffers._take(port.nbytes(buffers.slots, capacity), port.suffix)


FAULTS = {
    "a pass writes what it reads": (
        _patched(DeviceBuffers, "present"),
        lambda old: lambda buffers, port, side, first=0: buffers.past(port, side, first),
    ),
    "pairs do not trade places": (_patched(DeviceBuffers, "commit"), _no_flip),
    "columns one too far": (_patched(DeviceBuffers, "append"), _one_more),
    "columns are lost": (_patched(DeviceBuffers, "append"), lambda old: lambda *given: None),
    "rows are not brought to one side": (
        _patched(DeviceBuffers, "align"),
        lambda old: lambda buffers, rows, first=0: 0,
    ),
    "memory is not zeroed": (_patched(DeviceBuffers, "_allocate"), lambda old: _allocate),
    "slots are taken for aligned": (
        _patched(DeviceBuffers, "aligned"),
        lambda old: lambda buffers, first: True,
    ),
    "rows do not enter": (
        _patched(DeviceEngine, "_make"),
        lambda old: lambda engine, *key: replace(old(engine, *key), enter=()),
    ),
    "rows do not leave": (
        _patched(DeviceEngine, "_make"),
        lambda old: lambda engine, *key: replace(old(engine, *key), leave=()),
    ),
    "the pass of other slots runs": (
        _patched(DeviceEngine, "_bind"),
        lambda old: lambda engine, role, first, *rest: old(engine, role, 0, *rest),
    ),
    "nobody waits": (
        _patched(driver.Stream, "synchronize"),
        lambda old: lambda stream: None,
    ),
}


@pytest.fixture(scope="module")
def right(bundle_path):
    engine = reference(bundle_path("F3", fused=True), ("denoise", "commit"), 3)
    return decoded(engine), states(engine)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_adapter_do_not_pass(engine_path, monkeypatch, right, fault):
    """Each one gives other tokens or state here, or breaks the contract."""
    own = stand_in.Bench()
    where, make = FAULTS[fault]
    where(monkeypatch, make)
    try:
        engine = own.open(engine_path("F3", ("denoise", "commit")), slots=3)
        found = decoded(engine), states(engine)
    except (AssertionError, BackendError):
        return
    assert found != right


def test_a_first_run_is_not_captured(engine_path, monkeypatch, right):
    """Where one is, TensorRT refuses the capture: the pass says so and runs as it is."""
    own = stand_in.Bench()
    run = trt.TrtPass.run

    def at_once(work, graphs=True):
        work._ran = True
        run(work, graphs)

    monkeypatch.setattr(trt.TrtPass, "run", at_once)
    engine = own.open(engine_path("F3", ("denoise", "commit")), slots=3)
    assert (decoded(engine), states(engine)) == right
    assert {why.partition(": ")[2] for why in engine.uncaptured.values()} == {
        "deferred updates in a capture"
    }


# --- may it run here ------------------------------------------------------------------------------


def refused(bench, folder, **options):
    with pytest.raises(BackendError) as caught:
        bench.open(folder, **options)
    return str(caught.value)


def test_another_machine_is_refused_before_anything_is_loaded(bench, bundle_path, tmp_path):
    """Version, system, card, product: both sides, and the command that builds it again."""
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    cases = {
        "version": ({"version": "1.6.0.1"}, "built by TensorRT-RTX 1.6.0.1, here is .* 1.7.1.116"),
        "os": ({"os": "windows-x86_64"}, "built for windows-x86_64, here is "),
        "card": ({"capabilities": ("8.9",)}, "compute capability 8.9, card 0 has 12.0"),
    }
    for name, (changes, text) in cases.items():
        folder = stand_in.write_stand_in_engine(
            tmp_path / name, bundle, ("denoise", "commit"), **changes
        )
        message = refused(bench, folder)
        assert re.search(text, message), message
        assert "fixedstate build BUNDLE --target tensorrt-rtx" in message
    assert bench.product.events == []


@pytest.mark.parametrize(
    ("flags", "runs", "code"),
    [
        ({}, False, False),
        ({"VERSION_COMPATIBLE": True}, True, True),
        ({"VERSION_COMPATIBLE": True, "EXCLUDE_LEAN_RUNTIME": True}, True, False),
        ({"VERSION_COMPATIBLE": True, "STRIP_PLAN": True}, False, False),
    ],
)
def test_TR_02_a_newer_version_loads_what_was_built_for_it(
    bench, bundle_path, tmp_path, flags, runs, code
):
    """The plan's own code is let run only where the plan brings it; none runs without weights."""
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e",
        bundle,
        ("denoise", "commit"),
        product="tensorrt",
        version="11.1.0.3",
        flags={"hardware_compatibility": "same", **flags},
    )
    bench.product.__version__ = "11.4.0.106"
    runtimes = []
    make = bench.product.Runtime
    bench.product.Runtime = lambda logger: runtimes.append(make(logger)) or runtimes[-1]
    if not runs:
        words = "hold no weights" if flags else r"by TensorRT 11.1.0.3, here is TensorRT 11.4.0.106"
        assert re.search(words, refused(bench, folder))
        assert (runtimes, bench.product.events) == ([], [])
        return
    engine = bench.open(folder)
    assert getattr(runtimes[0], "engine_host_code_allowed", False) is code
    ids = np.zeros((1, engine.spec.block_len), np.int64)
    expected = reference(bundle.path, ("denoise", "commit"), 1)
    assert engine.denoise(ids).tobytes() == expected.denoise(ids).tobytes()


def test_no_card_and_no_product(bench, engine_path, monkeypatch):
    """Without a driver, with another number, without the package."""
    folder = engine_path("F2")
    assert "card 3 was asked for and there is card 0 only" in refused(bench, folder, device=3)
    with pytest.raises(BackendError, match="here is no NVIDIA card with a driver"):
        trt.open_engine(folder, module=bench.product, cuda=object())

    def none():
        raise BackendError("TensorRT-RTX is not installed")

    monkeypatch.setattr("fixedstate.plugins.library.tensorrt_rtx", none)
    with pytest.raises(BackendError, match=r"here is no TensorRT-RTX.*install fixedstate\[rtx\]"):
        trt.open_engine(folder, cuda=bench.cuda)


def test_libraries_are_loaded_before_plans(bench, bundle_path, tmp_path):
    """TR-03: then their creators are looked for; each missing piece is named."""
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", bundle, ("denoise", "commit"), plugins=(LIBRARY,)
    )
    registry = bench.product.registry
    assert f"{folder.path / 'libplugins.so'} could not be loaded" in refused(bench, folder)
    registry.brings["libplugins.so"] = []
    message = refused(bench, folder)
    assert f"needs plugin fixedstate::{LIBRARY.name} version 1" in message
    assert "no creator is registered" in message
    registry.brings["libplugins.so"] = [stand_in.creator(LIBRARY.name, "2")]
    assert "here is version 2" in refused(bench, folder)
    assert "deserialize" not in bench.product.events
    registry.all_creators.clear()
    registry.brings["libplugins.so"] = [stand_in.creator(LIBRARY.name)]
    bench.product.events.clear()
    bench.open(folder)
    assert bench.product.events == ["library libplugins.so", "deserialize", "deserialize"]
    (folder.path / "libplugins.so").unlink()
    with pytest.raises(BundleError, match=r"libplugins.so is missing"):
        EngineFolder.open(folder.path)


def test_python_plugins_need_their_creators_and_kernels(bench, bundle_path, tmp_path):
    """Kernels of another version of this package are not those of the engine."""
    from fixedstate.plugins import ptx

    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    file, entry = next(iter(ptx.index()["texts"].items()))
    right = PluginUse("SsdBlockDenoise", "fixedstate", "1", "python", texts={file: entry["sha256"]})
    wrong = replace(right, texts={file: "1" * 64})
    for number, plugin in enumerate((right, wrong)):
        folder = stand_in.write_stand_in_engine(
            tmp_path / str(number), bundle, ("denoise", "commit"), plugins=(plugin,)
        )
        if plugin is right:
            assert "register_rtx" in refused(bench, folder)
            bench.product.registry.all_creators.append(stand_in.creator(plugin.name))
            bench.open(folder)
        else:
            assert f"built with kernel {file}" in refused(bench, folder)


def test_kernels_inside_the_plan_need_nothing(bench, bundle_path, tmp_path):
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e",
        bundle,
        ("denoise", "commit"),
        product="tensorrt",
        plugins=(AOT,),
        version="10.9.0.34",
        flags={"hardware_compatibility": "same"},
    )
    bench.product.__version__ = "10.9.0.34"
    engine = bench.open(folder, slots=2)
    assert engine.provider == "tensorrt 10.9.0.34 on a stand-in without a card"
    assert decoded_with(engine, 20) == 20


WRONG = {
    "a port less": (lambda plan: plan["outputs"].pop(), r"output present_ssm_state_001 is missing"),
    "another name": (
        lambda plan: plan["inputs"][0].update(name="ids"),
        "input input_ids is missing; input ids is unknown",
    ),
    "another dtype": (
        lambda plan: plan["inputs"][1].update(dtype="float16"),
        "past_conv_state_000 is float16, not float32",
    ),
    "another shape": (
        lambda plan: plan["inputs"][1].update(shape=["B", 5, 3]),
        r"past_conv_state_000 has shape \[-1, 5, 3\]",
    ),
    "another profile": (
        lambda plan: plan["profiles"][0]["input_ids"].__setitem__(2, [9, 9]),
        r"profile 0 takes input_ids .*\[9, 9\], not ",
    ),
    "a profile more": (
        lambda plan: plan["profiles"].append(plan["profiles"][0]),
        "it has 2 profiles, not 1",
    ),
    "a shape tensor": (
        lambda plan: plan.update(locations={"commit_length": "HOST"}),
        "commit_length is read on the host",
    ),
    "an alias": (
        lambda plan: plan["aliases"].update(present_ssm_state_000="past_ssm_state_000"),
        "present_ssm_state_000 updates past_ssm_state_000 in place, engine.json says none",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_engine_that_is_not_what_its_manifest_says(bench, engine_path, fault):
    """TB-11 and its like: names, dtypes, shapes, profiles, places and aliases."""
    change, text = WRONG[fault]

    def alter(plan):
        if len(plan["outputs"]) == 4:  # commit
            change(plan)

    bench.product.alter = alter
    with pytest.raises(BackendError, match=text):
        bench.open(engine_path("F2", ("denoise", "commit")))


def test_TB_11_a_declared_alias_that_the_engine_lacks(bench, bundle_path, tmp_path):
    """Its update would go to memory that nobody reads."""
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    pair = {"present_ssm_state_000": "past_ssm_state_000"}
    folder = stand_in.write_stand_in_engine(
        tmp_path / "e", bundle, ("denoise", "commit"), aliases={"commit": pair}
    )
    bench.product.alter = lambda plan: plan["aliases"].clear()
    assert "updates no input in place, engine.json says past_ssm_state_000" in refused(
        bench, folder
    )


def test_a_plan_that_does_not_load(bench, bundle_path, tmp_path):
    """TensorRT gives None, and a reason to its logger."""
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    folder = stand_in.write_stand_in_engine(tmp_path / "e", bundle, ("denoise", "commit"))
    (folder.path / "denoise.plan").write_bytes(b"{")
    message = refused(bench, folder)
    assert "does not load" in message
    assert "the plan's magic tag does not match" in message
    with pytest.raises(BundleError, match="denoise.plan was changed after the build"):
        bench.open(folder.path)


def test_the_runtime_cache_is_kept_beside(bench, engine_path, tmp_path):
    """TR-05: one file per plan and kind of card, written whole, read at the next load."""
    for turn in (1, 2):
        engine = bench.open(engine_path("F2"), runtime_cache=tmp_path / "kept", memory="lean")
        engine.denoise(np.zeros((1, engine.spec.block_len), np.int64))
        engine.close()
        (file,) = (tmp_path / "kept").iterdir()
        assert file.read_bytes() == b"nothing" + b"+" * turn
        assert file.name.endswith("-12.0-commit_denoise.runtime")


# --- threads --------------------------------------------------------------------------------------


def in_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_TR_07_two_threads_get_their_own_results(bench, engine_path):
    """TR-07: 20 passes each on rows of their own, results looked at late, equal to one by one."""
    engine = bench.open(engine_path("F3"), slots=2, memory="fast")
    length = engine.spec.block_len
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 30, (2, 20, 1, length))
    serial = bench.open(engine_path("F3"), slots=2, memory="fast")
    right = [[], []]
    for row in range(2):
        for block in ids[row]:
            right[row].append(serial.denoise(block, row).tobytes())
            serial.commit(block, np.array([length]), row)
    found = [[], []]
    bench.product.slow = 1e-3

    def work(row):
        for block in ids[row]:
            logits = engine.denoise(block, row)
            threading.Event().wait(1e-3)  # the other thread runs passes meanwhile
            found[row].append(logits.tobytes())
            engine.commit(block, np.array([length]), row)

    in_threads(lambda: work(0), lambda: work(1))
    assert found == right
    assert states(engine) == states(serial)


def test_TR_07_a_decoder_on_an_engine_serves_threads_one_by_one(bench, engine_path, monkeypatch):
    """`load` opens the folder; requests of two threads are those of one."""
    bench.use(monkeypatch)
    with load(engine_path("tiny-mamba"), slots=2) as decoder:
        assert decoder.engine.provider.startswith("tensorrt-rtx 1.7.1.116 on ")
        some = requests(decoder.spec)
        right = [one.token_ids for one in decoder.generate(some)]
        found = {}

        def work(name):
            found[name] = [one.token_ids for one in decoder.generate(some)]

        in_threads(lambda: work("a"), lambda: work("b"))
        assert found == {"a": right, "b": right}
    assert not bench.cuda.allocations


# --- load and the command line --------------------------------------------------------------------


def test_load_refuses_settings_of_the_other_back_end(engine_path):
    """Threads, providers, fallbacks and optimization levels."""
    folder = engine_path("tiny-mamba")
    for options, text in (
        ({"threads": 2}, "threads 2"),
        ({"provider": "cuda"}, "provider 'cuda'"),
        ({"allow_fallback": True}, "a fallback to the CPU"),
        ({"optimization": "none"}, "optimization 'none'"),
    ):
        with pytest.raises(UsageError, match=f"{text} was asked for, but an engine"):
            load(folder, **options)


def test_load_keeps_what_is_compiled_where_it_is_told(
    bench, bundle_path, engine_path, monkeypatch, tmp_path
):
    """TensorRT-RTX compiles for the card at load; TensorRT has nothing to keep."""
    bench.use(monkeypatch)
    with load(engine_path("F2"), engine_cache=tmp_path / "kept") as decoder:
        decoder.generate(requests(decoder.spec)[:1])
    assert {file.suffix for file in (tmp_path / "kept").iterdir()} == {".runtime"}
    bundle = Bundle.open(bundle_path("F2", fused=True), verify_weights=False)
    other = stand_in.write_stand_in_engine(
        tmp_path / "e", bundle, ROLES, product="tensorrt", version="10.13.3.9"
    )
    with pytest.raises(UsageError, match="is of TensorRT, whose plans hold all their kernels"):
        load(other.path, engine_cache=tmp_path / "kept")


def test_generate_takes_an_engine(bench, bundle_path, engine_path, monkeypatch):
    """The same text as from the bundle; prompts beyond its rows wait."""
    from click.testing import CliRunner

    from fixedstate.cli import cli

    bench.use(monkeypatch)
    words = ["--prompt", "once", "--prompt", "2 + 2", "--max-new-tokens", "40", "--seed", "4"]
    outputs = []
    for folder in (
        engine_path("tiny-hybrid", rows=1),
        bundle_path("tiny-hybrid", fused=True),
    ):
        done = CliRunner().invoke(cli, ["generate", str(folder), *words])
        assert done.exit_code == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert not bench.cuda.allocations  # the command line gives everything back
    refused_record = CliRunner().invoke(
        cli, ["generate", str(engine_path("tiny-hybrid")), *words, "--record", "r"]
    )
    assert refused_record.exit_code == 2
    assert "--record takes a bundle" in refused_record.stderr


def test_the_runtime_stays_light():
    """Engines are loaded with their first folder."""
    program = (
        "import fixedstate.runtime, sys; print(*sorted(n for n in sys.modules if 'tensorrt' in n "
        "or n.startswith('fixedstate.plugins') or n.endswith(('.trt', '.deviceengine'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


# --- what travels ---------------------------------------------------------------------------------


def returned(spec_rows, length, vocab, head, places=1, top_k=8):
    """Bytes that a denoise pass brings to the host, by the ports' own shapes."""
    if head == "logits":
        return spec_rows * length * vocab * 4
    per = {"confidence": 12, "entropy": 16, "top_k": 12 + 12 * top_k}[head]
    return spec_rows * places * per


@pytest.mark.parametrize("head", ["logits", "top_k"])
def test_bytes_to_the_host_are_those_of_the_formula(bench, engine_path, head):
    """Per pass: logits, or tokens and their measures; no state in between."""
    roles = ("denoise", "commit") + (() if head == "logits" else (f"denoise_{head}",))
    engine = bench.open(engine_path("F2", roles, head), slots=4, head=head)
    spec, length = engine.spec, engine.spec.block_len
    ids = np.full((4, length), spec.mask_id)
    places = np.tile(np.arange(5), (4, 1))
    for _ in range(3):
        before, driver = engine.returned_bytes, bench.cuda.to_host
        if head == "logits":
            engine.denoise(ids)
        else:
            engine.denoise_at(ids, places)
        formula = returned(4, length, spec.vocab_rows, head, 5, engine.top_k)
        assert engine.returned_bytes - before == bench.cuda.to_host - driver == formula
    before = bench.cuda.to_host
    engine.commit(ids % 3, np.full(4, length))
    assert bench.cuda.to_host == before


def test_a_changed_manifest_is_no_engine(engine_path, bench, tmp_path):
    """The folder's own checks come first."""
    shutil.copytree(engine_path("F2"), tmp_path / "e")
    edit(tmp_path / "e", lambda data: data["plans"].pop("commit"))
    with pytest.raises(BundleError, match="has plans for"):
        bench.open(tmp_path / "e")


def test_the_program_for_a_card(bench, bundle_path, engine_path):
    """tests/gpu/engines/run.py as far as it goes without one; it finds wrong numbers."""
    place = Path(__file__).parents[1] / "gpu" / "engines" / "run.py"
    spec = importlib.util.spec_from_file_location("run_engines", place)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    results = {"problems": []}
    stand_ins = {"module": bench.product, "cuda": bench.cuda}
    program.measure(bundle_path("F3", fused=True), engine_path("F3"), results, **stand_ins)
    assert results["problems"] == []
    assert {row["way"] for row in results["times"]} == {"graph", "launches"}
    assert results["compared"]["same_tokens"] == results["compared"]["clear_choices"] > 0
    assert "card 99 was asked for" in results["refused"]
    assert results["captured"]["graphs"]

    real = type(bench.product).Runtime

    def broken(product, logger):
        made = real(product, logger)
        load = made.deserialize_cuda_engine

        def twisted(content):
            engine = load(content)
            run = engine.session.run
            engine.session = type(
                "Twisted", (), {"run": lambda _, feeds: {k: v * 2 for k, v in run(feeds).items()}}
            )()
            return engine

        made.deserialize_cuda_engine = twisted
        return made

    bench.product.Runtime = broken.__get__(bench.product)
    results = {"problems": []}
    program.measure(bundle_path("F3", fused=True), engine_path("F3"), results, **stand_ins)
    assert any("logits" in problem for problem in results["problems"])
