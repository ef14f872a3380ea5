"""Cases ST through exported graphs on ONNX Runtime, judged by float64 loops over one row (F9).

A length of a case is a count of committed tokens: forward models stop anywhere inside a block,
the others at its end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from reference_model import ReferenceModel
from sample_models import mamba_layer, model

from fixedstate.bundle import Bundle
from fixedstate.errors import UsageError
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.weights import tensor_shapes
from fixedstate.runtime.decoder import Decoder, open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.prefix import PrefixStore
from fixedstate.runtime.requests import Request, Settings
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.spec import Mamba2Sizes, ModelSpec
from fixedstate.state import StateSpec, graph_ports

FORWARD = ("F1", "F2-forward")
BLOCKWISE = ("F2", "F3", "F4")
ALL = (*FORWARD, *BLOCKWISE)
SAME = 1e-5  # two orders of float32 sums over tens of tokens
RIGHT = 1e-4  # float32 against float64
SLOTS = 4


@dataclass(frozen=True)
class Subject:
    """A model on ONNX Runtime with four slots, and its judge."""

    bundle: Bundle
    engine: SessionEngine
    judge: ReferenceModel

    @property
    def spec(self) -> ModelSpec:
        return self.bundle.spec

    @property
    def length(self) -> int:
        return self.bundle.spec.block_len

    def ids(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Random real tokens."""
        return np.random.default_rng(seed).integers(0, self.spec.vocab_size, shape)

    def start(self) -> None:
        for row in range(SLOTS):
            self.engine.reset(row)

    def commit(self, *rows: np.ndarray) -> None:
        """Commit each row's tokens in one pass; what stands behind them is noise."""
        blocks = max(1, max(-(-len(row) // self.length) for row in rows))
        ids = self.ids(len(rows), blocks * self.length, seed=99)
        for slot, row in enumerate(rows):
            ids[slot, : len(row)] = row
        self.engine.commit(ids, np.array([len(row) for row in rows]))

    def denoise(self, *canvases: np.ndarray) -> np.ndarray:
        return self.engine.denoise(np.array(canvases)).copy()

    def expected(self, row: np.ndarray, canvas: np.ndarray) -> tuple[dict, np.ndarray]:
        """The judge's states after a row and its logits of the block behind it."""
        logits, states = self.judge.run(np.concatenate([row, canvas]), clean=len(row))
        return states, logits[-self.length :]


@pytest.fixture(scope="session")
def subject(bundle_path, checkpoint_path):
    """One model, opened once: ``subject("F3")``; every call resets its rows."""

    @functools.cache
    def opened(name: str) -> Subject:
        bundle = Bundle.open(bundle_path(name))
        engine = open_engine(bundle, threads=1, slots=SLOTS)
        tensors = load_checkpoint(checkpoint_path(name)).tensors
        return Subject(bundle, engine, ReferenceModel(bundle.spec, tensors))

    def fresh(name: str) -> Subject:
        found = opened(name)
        found.start()
        return found

    return fresh


def assert_close(found: dict, expected: dict, atol: float, where: str = "") -> None:
    """Every part of a state, and nothing else."""
    assert found.keys() == expected.keys()
    for suffix, array in expected.items():
        np.testing.assert_allclose(found[suffix], array, atol=atol, err_msg=f"{suffix} {where}")


def assert_same_bytes(found: dict, expected: dict, where: str = "") -> None:
    assert found.keys() == expected.keys()
    for suffix, array in expected.items():
        assert found[suffix].tobytes() == array.tobytes(), f"{suffix} {where}"


# --- ST-01, ST-02, ST-03: chunks, steps, edges ----------------------------------------------------


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 8, 19])
def test_ST_01_chunks_equal_one_pass(subject, name, cut):
    """Both conv and scan state are taken up where the last pass left them."""
    one = subject(name)
    row, canvas = one.ids(20, seed=cut), one.ids(one.length, seed=1)
    one.commit(row)
    whole, logits = one.engine.read(0), one.denoise(canvas)
    one.start()
    one.commit(row[:cut])
    one.commit(row[cut:])
    assert_close(one.engine.read(0), whole, SAME)
    np.testing.assert_allclose(one.denoise(canvas), logits, atol=SAME)
    states, right = one.expected(row, canvas)
    assert_close(whole, states, RIGHT)
    np.testing.assert_allclose(logits[0], right, atol=RIGHT)


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_ST_01_blocks_equal_one_pass(subject, name, cut):
    """The same where a model commits whole blocks."""
    one = subject(name)
    row, canvas = one.ids(5 * one.length, seed=cut), one.ids(one.length, seed=1)
    one.commit(row)
    whole = one.engine.read(0)
    one.start()
    one.commit(row[: cut * one.length])
    one.commit(row[cut * one.length :])
    assert_close(one.engine.read(0), whole, SAME)
    states, right = one.expected(row, canvas)
    assert_close(whole, states, RIGHT)
    np.testing.assert_allclose(one.denoise(canvas)[0], right, atol=RIGHT)


@pytest.mark.parametrize("name", FORWARD)
def test_ST_02_steps_equal_the_full_pass(subject, name):
    """At every length the states of one pass are those of single tokens, and the judge's."""
    one = subject(name)
    row, canvas = one.ids(64, seed=3), one.ids(one.length)
    lengths = (1, 2, 3, 4, 5, 15, 16, 17, 29, 30, 31, 64)
    for count in range(1, 65):
        one.commit(row[:0], row[count - 1 : count])  # slot 0 waits with commit_length 0
        if count not in lengths:
            continue
        stepped = one.engine.read(1)
        one.engine.reset(0)
        one.commit(row[:count])
        assert_close(one.engine.read(0), stepped, SAME, f"length {count}")
        assert_close(stepped, one.expected(row[:count], canvas)[0], RIGHT, f"length {count}")
        one.engine.reset(0)


@pytest.mark.parametrize("name", FORWARD)
def test_ST_03_convolution_is_causal_and_trimmed(subject, name):
    """Position t uses inputs up to t; the length stays; fewer tokens than taps are fine."""
    one = subject(name)
    canvas = one.ids(one.length, seed=5)
    one.commit(one.ids(3, seed=6))
    before = one.denoise(canvas)[0]
    assert before.shape == (one.length, one.spec.vocab_rows)
    for t in (0, 1, 3, one.length - 1):
        moved = canvas.copy()
        moved[t] = (moved[t] + 1) % one.spec.vocab_size
        after = one.denoise(moved)[0]
        assert (after[:t] == before[:t]).all(), t
        assert (after[t] != before[t]).any(), t
    for count in (1, 2, 10):
        one.start()
        row = one.ids(count, seed=count)
        one.commit(row)
        states = one.engine.read(0)
        assert states["conv_state_000"].shape[1] == 3
        if count < 3:
            assert (states["conv_state_000"][:, : 3 - count] == 0).all()
        assert_close(states, one.expected(row, canvas)[0], RIGHT)


def test_ST_03_blockwise_states_ignore_what_is_open(subject):
    """A block-direction model: changing the canvas moves no committed state."""
    for name in BLOCKWISE:
        one = subject(name)
        one.commit(one.ids(2 * one.length))
        before = one.engine.buffers.hash()
        for seed in range(3):
            one.denoise(one.ids(one.length, seed=seed))
        assert one.engine.buffers.hash() == before


# --- ST-05, ST-06, ST-13: rows of unequal length --------------------------------------------------


def _ragged(one: Subject) -> tuple[int, int]:
    return (10, 15) if one.spec.causal_commit else (one.length, 2 * one.length)


@pytest.mark.parametrize("name", ALL)
def test_ST_05_right_padding_leaves_no_trace(subject, name):
    """Rows of 10 and 15 tokens (or one and two blocks): states and next logits as alone."""
    one = subject(name)
    rows = [one.ids(count, seed=count) for count in _ragged(one)]
    canvas = one.ids(one.length, seed=9)
    one.commit(*rows)
    together = [one.engine.read(slot) for slot in range(2)]
    logits = one.denoise(canvas, canvas)
    for slot, row in enumerate(rows):
        one.start()
        one.commit(row)
        states, right = one.expected(row, canvas)
        if -(-len(row) // one.length) == -(-max(map(len, rows)) // one.length):
            assert_same_bytes(together[slot], one.engine.read(0), f"row {slot}")
        assert_close(together[slot], one.engine.read(0), SAME, f"row {slot}")
        assert_close(together[slot], states, RIGHT, f"row {slot}")
        np.testing.assert_allclose(logits[slot], right, atol=RIGHT)


@pytest.mark.parametrize("name", ALL)
def test_ST_05_a_row_that_commits_nothing_keeps_its_bytes(subject, name):
    """Negative zeros and subnormals included."""
    one = subject(name)
    one.commit(*(one.ids(one.length, seed=seed) for seed in range(2)))
    for port in one.bundle.state.swapped:
        live = one.engine.buffers.past(port, one.engine.buffers.align(2), 2)
        live[0].flat[:2] = -0.0, 1e-42
    before = one.engine.read(0)
    for width in (1, 3):
        one.commit(one.ids(0), one.ids(width * one.length))
        assert_same_bytes(one.engine.read(0), before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("pad", [0, 5, 36])
def test_ST_06_pad_like_ids_are_tokens_like_any_other(subject, name, pad):
    """Prompts have lengths, not pads: rows of 3 and 9 tokens in a batch answer as alone."""
    one = subject(name)
    decoder = Decoder(one.bundle, one.engine)
    if pad == one.spec.mask_id:
        with pytest.raises(UsageError, match=str(pad)):
            decoder.generate([Request([pad, 1, 2], Settings(4, stop_ids=()))])
        return
    prompts = []
    for count in (3, 9, 2 * one.length + 1):
        for places in ((0,), (0, 1), (count - 1,), (count // 2,), range(count)):
            prompt = one.ids(count, seed=count)
            prompt[prompt == one.spec.mask_id] = 7
            prompt[list(places)] = pad
            prompts.append(prompt.tolist())
    requests = [Request(p, Settings(5, steps=2, stop_ids=())) for p in prompts]
    alone = [decoder.generate([request])[0].token_ids for request in requests]
    assert [result.token_ids for result in decoder.generate(requests)] == alone
    assert len({tuple(ids) for ids in alone}) > 1


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_ST_13_each_row_ends_at_its_own_last_token(subject, name, chunk):
    """Two rows of 5 and 11 tokens in chunks that no row's length is a multiple of."""
    one = subject(name)
    rows = [one.ids(count, seed=count) for count in (5, 11)]
    canvas = one.ids(one.length, seed=2)
    for first in range(0, 11, chunk):
        one.commit(*(row[first : first + chunk] for row in rows))
    assert one.engine.past_length[:2].tolist() == [5, 11]
    together, logits = [one.engine.read(slot) for slot in range(2)], one.denoise(canvas, canvas)
    for slot, row in enumerate(rows):
        one.start()
        one.commit(row)
        states, right = one.expected(row, canvas)
        assert_close(together[slot], one.engine.read(0), SAME, f"row {slot}")
        assert_close(together[slot], states, RIGHT, f"row {slot}")
        np.testing.assert_allclose(logits[slot], right, atol=RIGHT)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_ST_13_lengths_inside_a_block_are_refused_where_wrong(subject, name):
    """A commit pass that looks ahead inside a block cannot stop there; nothing is run."""
    one = subject(name)
    before = one.engine.buffers.hash()
    with pytest.raises(UsageError, match=r"\[5, 11\] ends inside a block of 8 tokens"):
        one.commit(one.ids(5), one.ids(11))
    assert one.engine.buffers.hash() == before


# --- ST-07, ST-08, ST-10: trial tokens, requests, restoring ---------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_ST_07_trials_move_nothing_and_the_final_block_moves_all(subject, name):
    """Four denoise passes per block read the state at its start; one commit moves every part."""
    one = subject(name)
    row = one.ids(3 * one.length, seed=4)
    for block in range(3):
        piece = row[block * one.length : (block + 1) * one.length]
        before = one.engine.buffers.hash()
        first = one.denoise(piece)
        for trial in range(4):
            one.denoise(one.ids(one.length, seed=trial))
        assert one.engine.buffers.hash() == before
        assert (one.denoise(piece) == first).all()
        one.commit(piece)
    states, _ = one.expected(row, row[: one.length])
    assert_close(one.engine.read(0), states, RIGHT)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("between", ["a request", "a failed request", "an error"])
def test_ST_08_requests_leave_nothing_behind(subject, name, between, monkeypatch):
    """A, B, A: the first and third answers are the same bytes, whatever became of B."""
    one = subject(name)
    decoder = Decoder(one.bundle, one.engine)
    a = Request(list(range(3, 16)), Settings(20, steps=3, stop_ids=()))
    b = Request([9] * 70, Settings(70, temperature=1.0, seed=1, stop_ids=()))
    first = decoder.generate([a])[0].token_ids
    if between == "a failed request":
        real, calls = one.engine.denoise, []

        def broken(ids: np.ndarray, first: int = 0) -> np.ndarray:
            calls.append(ids)
            logits = real(ids, first)
            return logits * np.nan if len(calls) == 7 else logits

        with monkeypatch.context() as patch:
            patch.setattr(one.engine, "denoise", broken, raising=False)
            assert decoder.generate([b])[0].finish_reason == "error"
    elif between == "an error":

        def stop(event: object) -> None:
            raise RuntimeError("the caller's own")

        with pytest.raises(RuntimeError, match="the caller's own"):
            decoder.generate([b, b], on_pass=stop)
    else:
        assert decoder.generate([b])[0].finish_reason == "length"
    assert decoder.generate([a])[0].token_ids == first


@pytest.mark.parametrize("name", ALL)
def test_ST_10_a_state_that_is_gone_is_not_replaced_by_another(subject, name):
    """Where one state is kept and an older one is asked for there is none, and nothing moves."""
    one = subject(name)
    row, states = one.ids(3 * one.length, seed=6), []
    for block in range(3):
        one.commit(row[block * one.length : (block + 1) * one.length])
        states.append(Snapshot.take(one.engine, 0))
    store = PrefixStore(states[-1].nbytes)
    for state in states:
        store.put(row[: state.past_length], state)
    assert (len(store), store.evictions) == (1, 2)
    before = one.engine.buffers.hash()
    assert store.find(row[: one.length], one.length, 1) is None
    assert store.find(row[: 2 * one.length + 1], one.length, 1) is None
    assert one.engine.buffers.hash() == before
    found = store.find(row, one.length, 1)
    assert found is not None
    blocks, state = found
    assert (blocks, state.past_length) == (3, 3 * one.length)
    state.restore(one.engine, 1)
    assert_same_bytes(one.engine.read(1), one.engine.read(0))


# --- ST-11, ST-12: sizes and one formula ----------------------------------------------------------


@pytest.mark.parametrize(("groups", "d_state"), [(1, 16), (2, 8), (4, 4), (8, 32)])
def test_ST_11_conv_state_covers_x_b_and_c(groups, d_state):
    """Channels of the port, of the manifest and of the weights: inner + 2 * groups * state."""
    sizes = Mamba2Sizes(64, 8, 8, d_state, groups, 4)
    spec = model(mamba_layer(sizes=sizes))
    channels = 64 + 2 * groups * d_state
    port = StateSpec.of(spec).layer(0)["conv"]
    assert port.past.shape == port.present.shape == ("B", channels, 3)
    assert tensor_shapes(spec)["layers.0.mixer.conv1d.weight"][0] == channels


@pytest.mark.parametrize("name", ["F1", "F2", "F2-forward", "F3"])
def test_ST_11_manifest_and_weights_agree(subject, checkpoint_path, name):
    """The same for what was exported."""
    one = subject(name)
    tensors = load_checkpoint(checkpoint_path(name)).tensors
    for role, graph in one.bundle.graphs.items():
        ports = {port.name: port for port in graph.inputs}
        assert (graph.inputs, graph.outputs) == graph_ports(one.spec, one.bundle.state, role)
        for index, layer in enumerate(one.spec.layers):
            if layer.mixer.startswith("mamba"):
                rows = tensors[f"layers.{index}.mixer.conv1d.weight"].shape[0]
                assert ports[f"past_conv_state_{index:03d}"].shape == ("B", rows, 3)


def test_ST_12_one_formula_for_dt(subject, checkpoint_path):
    """Step biases of -4 and +3: six tokens in one pass and in six, in both graphs."""
    one = subject("F1")
    biases = load_checkpoint(checkpoint_path("F1")).tensors["layers.0.mixer.dt_proj.bias"]
    assert {-4.0, 3.0} <= set(biases.tolist())
    row, rest = one.ids(6, seed=8), one.ids(one.length)
    canvas = np.concatenate([row, rest])[: one.length]
    at_once = one.denoise(canvas)[0]
    for t in range(6):
        shifted = np.concatenate([row[t:], rest])[: one.length]
        np.testing.assert_allclose(one.denoise(shifted)[0, 0], at_once[t], atol=SAME)
        one.commit(row[t : t + 1])
        states, _ = one.expected(row[: t + 1], canvas)
        assert_close(one.engine.read(0), states, RIGHT, f"token {t}")
    stepped = one.engine.read(0)
    one.start()
    one.commit(row)
    assert_close(one.engine.read(0), stepped, SAME)


def test_states_are_files_of_the_bundle_only(subject):
    """No state lives in a graph: initialisers are weights and constants."""
    for name in ALL:
        one = subject(name)
        for graph in one.bundle.graphs.values():
            found = onnx.load(Path(one.bundle.path, graph.file), load_external_data=False).graph
            names = [value.name for value in found.initializer]
            assert not [n for n in names if n.startswith(("past_", "present_"))]
