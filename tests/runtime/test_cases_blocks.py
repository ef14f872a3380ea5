"""Cases of block decoding that need a bundle or several ways of caching (BG, CB, SE)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import STOP, ScriptedEngine, decode, decode_all, names_position, one_hot, small_spec
from toy_bundle import toy_spec

from fixedstate.errors import CapacityError, CheckpointError
from fixedstate.export.checkpoint import load_checkpoint, random_tensors, save_checkpoint
from fixedstate.runtime.buffers import StateBuffers
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.requests import Request, Settings
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.state import StateSpec, graph_ports


class Whole:
    """A session of the role ``full`` that answers from the same table as the scripted engine."""

    provider = "scripted"

    def __init__(self, spec, table):
        self.inputs, self.outputs = graph_ports(spec, StateSpec.of(spec), "full")
        self.spec, self.table = spec, table

    def bind(self, inputs, outputs):
        ids, logits, length = inputs["input_ids"], outputs["logits"], self.spec.block_len
        outer = self

        class Bound:
            def run(self):
                for row in range(len(ids)):
                    for start in range(0, ids.shape[1], length):
                        block = ids[row, start : start + length]
                        out = outer.table(ids[row, :start].tolist(), block)
                        logits[row, start : start + length] = out[: len(block)]

        return Bound()


def every_way(table, slots=2):
    """The scripted denoiser with separate commits, with fused ones, and without any cache."""
    spec = small_spec()
    full = small_spec(objective="full")
    yield ScriptedEngine(spec, table, slots=slots)
    yield ScriptedEngine(spec, table, slots=slots, fuses=True)
    yield FullEngine(full, {"full": Whole(full, table)}, slots=slots)


@pytest.mark.parametrize("place", [*range(8, 16), 39])
def test_BG_11_a_stop_ends_every_way_of_caching_alike(place):
    """The same tokens, blocks and passes, wherever in block 2 of 5 the stop stands."""
    spec = small_spec()

    def table(history, ids):
        slots = len(history) + np.arange(8)
        return one_hot(spec, np.where(slots == place, STOP, slots % 30))

    seen = {
        (result.token_ids, result.blocks, result.denoise_passes, result.finish_reason)
        for engine in every_way(table)
        for result in decode_all(engine, [Request([], Settings(40, steps=3))] * 2)
    }
    tokens = (*(p % 30 for p in range(place)), STOP)
    blocks = place // 8 + 1
    assert seen == {(tokens, blocks, 3 * blocks, "stop")}


@pytest.mark.parametrize("trained", [4, 16])
def test_BG_06_another_block_length_than_the_trained_one_is_refused(tmp_path, trained):
    """Naming the trained value; giving that very value is fine."""
    spec = small_spec(block_len=trained)
    save_checkpoint(tmp_path / "model", spec, random_tensors(spec, seed=0))
    with pytest.raises(CheckpointError, match=rf"32.*{trained}|{trained}.*32"):
        load_checkpoint(tmp_path / "model", block_len=32)
    notes = []
    load_checkpoint(tmp_path / "model", block_len=trained, notes=notes.append)
    assert not any("block" in note for note in notes)


@pytest.mark.parametrize("over", [0, 1, 8])
def test_BG_10_a_buffer_is_never_written_past_its_end(over):
    """Room for 32 tokens, 20 in the prompt, 16 new: refused before a pass, nothing touched."""
    spec = toy_spec()
    state = StateSpec.of(spec)
    engine = ScriptedEngine(spec, lambda h, ids: names_position(spec, h), limit=32)
    if over:
        with pytest.raises(CapacityError, match=r"= \d+ tokens; the limit is 32"):
            decode(engine, [1] * 20, max_new_tokens=12 + over)
        assert engine.denoised == engine.commits == 0
    else:
        assert len(decode(engine, [1] * 20, max_new_tokens=12).token_ids) == 12
    buffers = StateBuffers(state, 2, spec.block_len, limit=32)
    buffers.past_length[:] = 24
    before = buffers.hash()
    if over:
        with pytest.raises(CapacityError, match=r"24 committed tokens .* room for .* limit is 32"):
            buffers.reserve(2, np.array([8, 8 + over]))
    else:
        assert not buffers.reserve(2, np.array([8, 8]))
    assert buffers.hash() == before


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 64), st.booleans())
def test_BG_10_what_is_accepted_fits(prompt, new, limit, fuses):
    """Never more committed tokens than the limit, in any slot, at any time."""
    spec = small_spec()
    engine = ScriptedEngine(spec, limit=limit, slots=2, fuses=fuses)
    scheduler = Scheduler(engine)
    request = Request([1] * prompt, Settings(new, stop_ids=()))
    if -(-(prompt + new) // 8) * 8 > limit:
        with pytest.raises(CapacityError):
            scheduler.submit(request)
        return
    numbers = [scheduler.submit(request) for _ in range(3)]
    while not scheduler.idle:
        scheduler.tick()
        assert engine.past_length.max() <= limit
    assert {len(scheduler.result(number).token_ids) for number in numbers} == {new}


def test_SE_18_the_shift_comes_from_the_model_and_is_applied_once():
    """Logits that name their own position, and logits that name the next one, give one text."""
    plain, shifts = small_spec(), small_spec(logit_shift=True)

    def names_next(history, ids):
        return one_hot(shifts, (len(history) + 1 + np.arange(8)) % 30)

    texts = {
        decode(engine, [29] * 13, max_new_tokens=20).token_ids
        for fuses in (False, True)
        for engine in (
            ScriptedEngine(plain, fuses=fuses),
            ScriptedEngine(shifts, names_next, fuses=fuses),
        )
    }
    assert texts == {tuple((13 + i) % 30 for i in range(20))}
    # read off the wrong way, either one is off by one
    wrong = ScriptedEngine(plain, names_next)
    assert decode(wrong, [29] * 13, max_new_tokens=4).token_ids == (14, 15, 16, 17)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["F3", "F4"])
def test_CB_03_cached_keys_are_those_of_a_clean_pass(bundle_path, name, fused):
    """While a block is denoised nothing is cached; when it ends its keys come from final tokens."""
    from fixedstate.runtime import load

    with load(bundle_path(name, fused=True), slots=2, threads=1) as decoder:
        spec, length = decoder.spec, decoder.spec.block_len
        assert isinstance(decoder.engine, SessionEngine)
        request = Request([3, 5, 7], Settings(4 * length, steps=3, temperature=1.0, stop_ids=()))
        stream = decoder.stream([request])
        tokens = [3, 5, 7]
        for event in stream:
            tokens += event.token_ids
            if event.finish_reason is None:
                state = stream.snapshot(0)
                whole = tokens[: len(tokens) // length * length]
                assert state.past_length == len(whole)
                clean = decoder_state(bundle_path(name, fused=fused), whole)
                for port, array in state.arrays.items():
                    assert np.abs(array - clean[port]).max() < 1e-4, port
        assert spec.mask_id not in tokens


def decoder_state(path, tokens):
    """The state behind clean tokens, committed in one pass on an engine of its own."""
    from fixedstate.runtime import load

    with load(path, threads=1) as decoder:
        engine = decoder.engine
        engine.commit(np.array([tokens]), np.array([len(tokens)]))
        return engine.read(0)


def test_CB_06_no_graph_takes_a_mask():
    """Masks are made inside from lengths, so there is no form that a caller could get wrong."""
    spec = toy_spec()
    for role in ("denoise", "commit", "commit_denoise"):
        inputs, _ = graph_ports(spec, StateSpec.of(spec), role)
        assert {port.name for port in inputs if not port.name.startswith("past_")} <= {
            *("input_ids", "commit_length"),
        } | {"past_length"}
        assert all(port.dtype != "bool" for port in inputs)
    full = replace(spec, objective="full")
    (ids,), _ = graph_ports(full, StateSpec.of(full), "full")
    assert ids.name == "input_ids"


def test_SE_03_rows_that_finish_together_or_apart_are_skipped():
    """No policy ever sees a row without an open slot."""
    spec = small_spec()
    seen = Counter()

    class Watching:
        steps, monotone, needs = 8, True, "confidence"

        def reveal(self, view):
            seen[int(view.open.sum(axis=1).min())] += 1
            first = view.open & (view.open.cumsum(axis=1) <= 3)
            from fixedstate.runtime.policies import Reveal

            return Reveal(view.fill(first), np.zeros(len(first), np.int64))

    policy = Watching()
    jobs = [Request([1] * n, Settings(m, policy=policy)) for n, m in ((0, 8), (5, 11), (7, 1))]
    results = decode_all(ScriptedEngine(spec, slots=3), jobs)
    assert [len(result.token_ids) for result in results] == [8, 11, 1]
    assert min(seen) >= 1
