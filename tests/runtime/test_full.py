"""Models that see the whole sequence: no cache, a canvas per row, exact (case BG-07)."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scripted import MASK, STOP, decode, decode_all, small_spec
from variants import VARIANTS

from fixedstate.bundle import Bundle
from fixedstate.cli import cli
from fixedstate.errors import BackendError, CapacityError, UsageError
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.weights import random_tensors
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.laws import check_bundle
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.prefix import make_prefix
from fixedstate.runtime.sequences import KEPT_BINDINGS
from fixedstate.runtime.session import check_binding, check_names
from fixedstate.state import StateSpec, graph_ports

FULL = VARIANTS["Whole sequence (objective full)"]
LENGTH = 8


# --- the published sampler, written from its rule -------------------------------------------------


def published(forward, spec, prompt, new, steps):
    """Blocks from left to right over one canvas; each step keeps the surest guesses, T = 0.

    `forward` gives the logits [T, V] of a canvas [T]; the answer is cut to `new` tokens.
    """
    length, start = spec.block_len, len(prompt)
    canvas = torch.full((start + -(-new // length) * length,), spec.mask_id)
    canvas[:start] = torch.tensor(prompt, dtype=torch.int64)
    for left in range(start, len(canvas), length):
        right = left + length
        masked = int((canvas[left:right] == spec.mask_id).sum())
        for step in range(steps):
            logits = forward(canvas)
            if spec.logit_shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            logits = logits[:, : spec.vocab_size].double()
            logits[:, spec.mask_id] = -torch.inf
            best, guess = torch.softmax(logits, -1).max(-1)
            best[canvas != spec.mask_id] = -torch.inf
            best[right:] = -torch.inf
            keep = best.topk(masked // steps + (step < masked % steps)).indices
            canvas[keep] = guess[keep]
    return tuple(canvas[start : start + new].tolist())


def forward_of(denoiser):
    """Logits of one canvas, run alone."""

    def forward(canvas):
        with torch.inference_mode():
            return denoiser.passes("full", canvas[None], {}).logits[0].clone()

    return forward


# --- graphs without ONNX Runtime ------------------------------------------------------------------


class Graph:
    """The graph `full` of any function from ids [k, T] to logits [k, T, V]; calls are kept."""

    provider = "scripted"

    def __init__(self, spec, run):
        self.inputs, self.outputs = graph_ports(spec, StateSpec.of(spec), "full")
        self.calls = []
        self.bindings = weakref.WeakSet()
        self.fail_at = None
        self._run = run

    def bind(self, inputs, outputs):
        check_names(self.inputs, inputs, "input")
        check_names(self.outputs, outputs, "output")
        check_binding(inputs, outputs)
        binding = GraphBinding(self, inputs["input_ids"], outputs["logits"])
        self.bindings.add(binding)
        return binding

    def run(self, feeds):
        return {"logits": self._run(feeds["input_ids"])}


class GraphBinding:
    def __init__(self, graph, ids, logits):
        self.graph, self.ids, self.logits = graph, ids, logits

    def run(self):
        self.graph.calls.append(self.ids.copy())
        if len(self.graph.calls) == self.graph.fail_at:
            raise KeyboardInterrupt
        self.logits[:] = self.graph.run({"input_ids": self.ids})["logits"]


def torch_engine(spec, denoiser, **options):
    """A FullEngine on the PyTorch denoiser."""

    def run(ids):
        with torch.inference_mode():
            return denoiser.passes("full", torch.from_numpy(ids), {}).logits.numpy()

    return FullEngine(spec, {"full": Graph(spec, run)}, **options)


def scripted_engine(table, *, slots=4, limit=None, **changes):
    """A FullEngine on a table from a canvas [T] to its logits [T, V], and its graph."""
    spec = full_spec(**changes)
    graph = Graph(spec, lambda ids: np.stack([table(canvas) for canvas in ids]))
    return FullEngine(spec, {"full": graph}, slots=slots, limit=limit), graph


def full_spec(**changes):
    return small_spec(objective="full", **changes)


def says(tokens):
    """(T, V) logits whose best token of each position is given."""
    out = np.zeros((len(tokens), 40), np.float32)
    out[np.arange(len(tokens)), tokens] = 10.0
    return out


def position(canvas):
    """Each position names itself, modulo 30."""
    return says(np.arange(len(canvas)) % 30)


def noise(canvas):
    """Random logits that depend on every id of the canvas and on its length."""
    rng = np.random.default_rng(np.array([len(canvas), *canvas], np.uint64))
    return (rng.standard_normal((len(canvas), 40)) * 3).astype(np.float32)


# --- exact ----------------------------------------------------------------------------------------

PROMPTS = (1, 5, 8, 19, 3, 8)
NEW = (24, 9, 16, 8, 1, 11)
STEPS = (8, 3, 1, 5, 20, 2)


def requests_of(spec, **settings):
    """Rows of unlike lengths and steps; the third and the last have one length."""
    rng = np.random.default_rng(3)
    return [
        Request(
            rng.integers(0, spec.mask_id, count).tolist(),
            Settings(max_new_tokens=new, steps=steps, stop_ids=(), seed=i, **settings),
        )
        for i, (count, new, steps) in enumerate(zip(PROMPTS, NEW, STEPS, strict=True))
    ]


def expected(forward, spec, requests):
    return [
        published(
            forward,
            spec,
            request.prompt_ids,
            request.settings.max_new_tokens,
            request.settings.steps,
        )
        for request in requests
    ]


@pytest.mark.parametrize(("length", "shift"), [(4, True), (8, False), (16, True)])
@pytest.mark.parametrize("name", FULL)
def test_tokens_are_those_of_the_published_sampler(name, length, shift):
    """Any prompt, block length and number of steps, rows together: token for token."""
    spec = replace(FULL[name], block_len=length, logit_shift=shift)
    denoiser = Denoiser(spec, random_tensors(spec, seed=5))
    requests = requests_of(spec)
    results = decode_all(torch_engine(spec, denoiser, slots=4), requests)
    wanted = expected(forward_of(denoiser), spec, requests)
    assert [result.token_ids for result in results] == wanted
    assert len({token for row in wanted for token in row}) > 4  # not one token over and over


@pytest.fixture(scope="module")
def hybrid(whole):
    """A bundle of Mamba-2 and attention, and its PyTorch denoiser."""
    return whole, Denoiser(whole.spec, random_tensors(whole.spec, seed=5))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_bundle_decodes_as_the_published_sampler(hybrid, slots):
    """Loaded and run as any other model; nothing is carried."""
    bundle, denoiser = hybrid
    requests = requests_of(bundle.spec)
    with load(bundle.path, threads=1, slots=slots) as decoder:
        results = decoder.generate(requests)
    wanted = expected(forward_of(denoiser), bundle.spec, requests)
    assert [result.token_ids for result in results] == wanted
    assert {(result.state_bytes, result.kv_bytes) for result in results} == {(0, 0)}
    assert {result.provider for result in results} == {"cpu"}


def test_a_bundle_with_a_logit_shift_decodes_as_the_published_sampler(hybrid):
    """The graph is the same; each slot takes the logits of the position before it."""
    bundle, denoiser = hybrid
    spec = replace(bundle.spec, logit_shift=True)
    engine = FullEngine(spec, open_sessions(bundle, ("full",), threads=1), slots=3)
    requests = requests_of(spec)
    wanted = expected(forward_of(denoiser), spec, requests)
    assert [result.token_ids for result in decode_all(engine, requests)] == wanted


@pytest.mark.parametrize("room", [19, 24, 300])
def test_a_row_alone_has_the_bytes_it_has_in_a_batch(hybrid, room):
    """Beside rows of its length and of others, on one thread."""
    bundle, _ = hybrid
    sessions = open_sessions(bundle, ("full",), threads=1)
    engine, alone = FullEngine(bundle.spec, sessions, slots=5), FullEngine(bundle.spec, sessions)
    rng = np.random.default_rng(0)
    canvas = np.where(rng.random((5, LENGTH)) < 0.5, MASK, rng.integers(0, MASK, (5, LENGTH)))
    ids = rng.integers(0, MASK, (5, 11))
    lengths = np.array([11, 3, 11, 0, 7])
    for row, own in enumerate((room, 40, room, room, 15)):
        engine.reset(row, own)
    engine.commit(ids, lengths)
    together = engine.denoise(canvas).copy()
    for row in (0, 2, 3):
        alone.reset(0, room)
        alone.commit(ids[row : row + 1], lengths[row : row + 1])
        assert alone.denoise(canvas[row : row + 1])[0].tobytes() == together[row].tobytes()
    tail = engine.denoise(canvas[1:4], first=1)
    assert tail.tobytes() == together[1:4].tobytes()


@given(st.data())
def test_rows_do_not_depend_on_one_another(data):
    """Tokens are those of a row alone, whatever runs beside it, in any number of slots."""
    few = st.integers(0, 9)
    requests = [
        Request(
            [i + 1] * data.draw(few),
            Settings(
                max_new_tokens=data.draw(st.integers(1, 20)),
                steps=data.draw(st.integers(1, 9)),
                temperature=data.draw(st.sampled_from([0.0, 0.7])),
                seed=data.draw(few),
            ),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]
    engine, _ = scripted_engine(noise, slots=data.draw(st.integers(1, 4)))
    together = decode_all(engine, requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = decode_all(scripted_engine(noise, slots=1)[0], [request])
        assert (alone.token_ids, alone.denoise_passes) == (result.token_ids, result.denoise_passes)


# --- what a pass sees -----------------------------------------------------------------------------


def test_a_pass_sees_prompt_answer_block_and_masks():
    """Blocks begin right behind the prompt, and the canvas has one length from first to last."""
    engine, graph = scripted_engine(position)
    result = decode(engine, [33, 34, 33], max_new_tokens=13, steps=2)
    assert result.token_ids == tuple(range(3, 16))
    assert (result.blocks, result.denoise_passes) == (2, 4)
    assert {canvas.shape for canvas in graph.calls} == {(1, 3 + 16)}
    first, _, third, last = (canvas[0].tolist() for canvas in graph.calls)
    assert first == [33, 34, 33] + [MASK] * 16
    assert third == [33, 34, 33, *range(3, 11)] + [MASK] * 8
    assert last == [33, 34, 33, *range(3, 15)] + [MASK] * 4


def test_rows_of_one_length_run_in_one_call():
    """Rows of another length run in a call of their own: none is padded to its neighbours."""
    engine, graph = scripted_engine(noise)
    prompts = ([1, 2, 3], [4], [5, 6, 7], [8, 9])
    for row, (prompt, room) in enumerate(zip(prompts, (19, 17, 19, 10), strict=True)):
        engine.reset(row, room)
        engine.commit(np.array([prompt]), np.array([len(prompt)]), first=row)
    logits = engine.denoise(np.full((4, LENGTH), MASK))
    assert [canvas.tolist() for canvas in graph.calls] == [
        [[8, 9] + [MASK] * 8],
        [[4] + [MASK] * 16],
        [[1, 2, 3] + [MASK] * 16, [5, 6, 7] + [MASK] * 16],
    ]
    for row, (prompt, room) in enumerate(zip(prompts, (19, 17, 19, 10), strict=True)):
        canvas = np.array(prompt + [MASK] * (room - len(prompt)))
        seen = noise(canvas)[len(prompt) : len(prompt) + LENGTH]
        np.testing.assert_array_equal(logits[row], seen)


def test_rows_of_many_lengths_decode_together():
    """Every row finishes its own canvas, with the prompt behind which its blocks begin."""
    engine, graph = scripted_engine(position)
    requests = [
        Request([1] * prompt, Settings(max_new_tokens=new, steps=2))
        for prompt, new in ((3, 8), (9, 2), (3, 5), (1, 9))
    ]
    results = decode_all(engine, requests)
    assert [result.token_ids for result in results] == [
        tuple(range(3, 11)),
        (9, 10),
        tuple(range(3, 8)),
        tuple(range(1, 10)),
    ]
    assert {canvas.shape[1] for canvas in graph.calls} == {11, 17}
    assert sum(len(canvas) for canvas in graph.calls) == 2 * (1 + 1 + 1 + 2)


@pytest.mark.parametrize("new", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("prompt_len", [0, 1, 8, 13])
def test_never_more_tokens_than_asked(prompt_len, new):
    """Blocks are counted from the end of the prompt and rounded up inside."""
    engine, _ = scripted_engine(position)
    result = decode(engine, [2] * prompt_len, max_new_tokens=new)
    assert result.token_ids == tuple(i % 30 for i in range(prompt_len, prompt_len + new))
    assert (result.finish_reason, result.blocks) == ("length", -(-new // LENGTH))


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 12])
def test_a_shifted_slot_takes_the_logits_before_it(prompt_len):
    """Across the left edge of every block too."""

    def next_position(canvas):
        return says((1 + np.arange(len(canvas))) % 30)

    engine, _ = scripted_engine(next_position, logit_shift=True)
    result = decode(engine, [2] * prompt_len, max_new_tokens=17, steps=3)
    assert result.token_ids == tuple(i % 30 for i in range(prompt_len, prompt_len + 17))
    with pytest.raises(UsageError, match="predicts the next position"):
        decode(engine, [], max_new_tokens=4)


def test_last_logits_are_those_of_this_pass():
    """Of the position before the block, under the canvas that was run; zeros before any token."""
    engine, _ = scripted_engine(noise, logit_shift=True)
    masks = np.full((2, LENGTH), MASK)
    engine.reset(0, 20)
    engine.reset(1, 16)
    engine.denoise(masks)
    assert not engine.last_logits.any()
    engine.commit(np.array([[4, 5, 6]]), np.array([3]))
    engine.denoise(masks)
    canvas = np.array([4, 5, 6] + [MASK] * 17)
    np.testing.assert_array_equal(engine.last_logits[0], noise(canvas)[2])
    engine.move(0, 2)
    np.testing.assert_array_equal(engine.last_logits[2], noise(canvas)[2])
    filled = np.array([[7] * 3 + [MASK] * 5])
    engine.denoise(filled, first=2)
    np.testing.assert_array_equal(engine.last_logits[0], noise(canvas)[2])
    canvas[3:6] = 7
    np.testing.assert_array_equal(engine.last_logits[2], noise(canvas)[2])
    engine.reset(0, 20)
    assert not engine.last_logits[0].any()


# --- ends -----------------------------------------------------------------------------------------


def stops_at(*places):
    return lambda canvas: says([STOP if i in places else i % 30 for i in range(len(canvas))])


def test_a_stop_ends_the_answer():
    """Cut behind the first stop id; one in the prompt or before the minimum does not count."""
    engine, graph = scripted_engine(stops_at(4, 12))
    result = decode(engine, [STOP, 1], max_new_tokens=40)
    assert (result.token_ids, result.finish_reason) == ((2, 3, STOP), "stop")
    assert (result.blocks, len(graph.calls)) == (1, 8)
    result = decode(engine, [STOP, 1], max_new_tokens=40, min_new_tokens=4)
    assert (len(result.token_ids), result.token_ids[-1], result.blocks) == (11, STOP, 2)


def test_ctrl_c_keeps_finished_blocks():
    """The answer so far comes back, and the engine can be used again."""
    engine, graph = scripted_engine(position, slots=1)
    graph.fail_at = 11
    stream = Stream(engine, [Request([9], Settings(max_new_tokens=n)) for n in (32, 4)])
    assert [event.finish_reason for event in stream] == [None, "cancelled", "cancelled"]
    assert [result.token_ids for result in stream.results] == [tuple(range(1, 9)), ()]
    assert decode(engine, [9], max_new_tokens=3).token_ids == (1, 2, 3)


def test_closing_a_stream_keeps_finished_blocks():
    engine, _ = scripted_engine(position)
    with Stream(engine, [Request([9], Settings(max_new_tokens=99))]) as stream:
        next(stream)
    assert stream.results[0].token_ids == tuple(range(1, 9))
    assert stream.results[0].finish_reason == "cancelled"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_end_that_row_alone(bad):
    """Only scores of open slots count; those of the row's other positions do not."""

    def table(canvas):
        out = position(canvas)
        out[-1] = bad  # the last block's last slot
        return out if canvas[0] == 5 else position(canvas)

    engine, _ = scripted_engine(table)
    requests = [Request([token], Settings(max_new_tokens=16)) for token in (5, 6)]
    results = decode_all(engine, requests)
    assert [result.finish_reason for result in results] == ["error", "length"]
    assert "not finite in block 1" in results[0].error
    assert results[0].token_ids == tuple(range(1, 9))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [20, 21, 24])
def test_a_request_beyond_the_limit_runs_nothing(limit):
    """5 + 9 tokens take 5 + 16: blocks begin behind the prompt."""
    engine, graph = scripted_engine(position, limit=limit)
    if limit >= 21:
        assert len(decode(engine, [1] * 5, max_new_tokens=9).token_ids) == 9
        return
    with pytest.raises(
        CapacityError, match=rf"prompt 5 \+ 9 new .* 21 tokens; .* limit is {limit}"
    ):
        decode(engine, [1] * 5, max_new_tokens=9)
    with pytest.raises(CapacityError, match="row 1 needs room for 21 tokens; the limit is 20"):
        engine.reset(1, 21)
    assert graph.calls == []


def test_what_does_not_fit_a_row_changes_nothing():
    """Neither a commit nor a pass goes past the room that the row was reset with."""
    engine, graph = scripted_engine(position, slots=2)
    engine.reset(0, 12)
    engine.reset(1, 30)
    ids = np.ones((2, 5), np.int64)
    engine.commit(ids, np.array([4, 5]))
    engine.denoise(np.full((2, LENGTH), MASK))
    with pytest.raises(CapacityError, match="row 0 holds 4 .* room for 12; 9 more do not fit"):
        engine.commit(np.ones((2, 9), np.int64), np.array([9, 1]))
    assert engine.past_length.tolist() == [4, 5]
    engine.commit(ids[:1], np.array([1]))
    calls = len(graph.calls)
    with pytest.raises(CapacityError, match="row 0 holds 5 .* room for 12; 8 more"):
        engine.denoise(np.full((2, LENGTH), MASK))
    assert len(graph.calls) == calls
    engine.reset(1)
    with pytest.raises(CapacityError, match="row 1 holds 0 .* room for 0; 8 more"):
        engine.denoise(np.full((1, LENGTH), MASK), first=1)


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([1, 2], [1], "commit takes ids of shape"),
        ([[1]] * 5, [1] * 5, "commit takes ids of shape"),
        ([[1, 2]], [1, 1], "commit_length must be 1 whole numbers"),
        ([[1, 2]], [1.0], "commit_length must be 1 whole numbers"),
        ([[1, 2]], [3], "commit_length must be between 0 and 2"),
        ([[1, 2]], [-1], "commit_length must be between 0 and 2"),
        ([[1, 40]], [2], r"whole numbers 0..39; got \[1, 40\]"),
        ([[1.0]], [1], "ids to commit must be whole numbers"),
    ],
)
def test_a_wrong_commit_is_refused(ids, lengths, message):
    """With what was given, before anything is written."""
    engine, _ = scripted_engine(position)
    engine.reset(0, 20)
    with pytest.raises(UsageError, match=message):
        engine.commit(np.array(ids), np.array(lengths))
    assert engine.past_length.tolist() == [0] * 4
    engine.commit(np.array([[1, 40]]), np.array([1]))  # what is behind the length does not count


def test_BG_07_block_caching_of_a_whole_sequence_model_is_refused(hybrid):
    """No exact cache exists: the passes over one, and the laws about one, say so."""
    bundle, _ = hybrid
    assert list(bundle.graphs) == ["full"]
    with pytest.raises(UsageError, match="objective 'full'.*no exact cache exists"):
        open_engine(bundle)
    with pytest.raises(UsageError, match="objective 'full'.*it has none"):
        check_bundle(bundle)
    engine, _ = scripted_engine(position)
    with pytest.raises(BackendError, match="objective 'full' has no fused pass"):
        engine.commit_denoise(np.ones((1, 2 * LENGTH), np.int64))


@pytest.mark.parametrize("wish", [{"keep_state": True}, {"prefix": object()}])
def test_a_state_can_neither_be_kept_nor_begun_from(wish):
    """There is none; the refusal comes before any pass."""
    engine, graph = scripted_engine(position)
    with pytest.raises(UsageError, match="objective 'full'.*carries no state"):
        decode_all(engine, [Request([1], **wish)])
    with pytest.raises(UsageError, match="objective 'full'.*carries no state"):
        make_prefix(engine, [1, 2], 16)
    assert graph.calls == []
    with Stream(engine, [Request([1])]) as stream:
        next(stream)
        with pytest.raises(UsageError, match="objective 'full'.*carries no state"):
            stream.snapshot()


def test_a_model_without_a_mask_is_refused():
    """There is nothing to fill the open slots with."""
    spec = full_spec(mask_id=None)
    graph = Graph(spec, position)
    with pytest.raises(UsageError, match="no mask id"):
        FullEngine(spec, {"full": graph})
    with pytest.raises(BackendError, match="has no graph 'full'"):
        FullEngine(full_spec(), {"denoise": graph})
    with pytest.raises(UsageError, match="slots must be 1 or more"):
        FullEngine(full_spec(), {"full": graph}, slots=0)


# --- rows and memory ------------------------------------------------------------------------------


def test_rows_move_and_change_places():
    """Tokens, room and length go along; a commit takes any number of tokens of each row."""
    engine, graph = scripted_engine(position, slots=3)
    for row, room in enumerate((20, 11, 300)):
        engine.reset(row, room)
    engine.commit(np.array([[5, 6, 7], [1, 2, 3]]), np.array([2, 3]))
    engine.commit(np.array([[8]]), np.array([1]), first=2)
    engine.swap(0, 2)
    engine.move(1, 0)
    assert engine.past_length.tolist() == [3, 3, 2]
    engine.denoise(np.full((3, LENGTH), MASK))
    assert [canvas.tolist() for canvas in graph.calls] == [
        [[1, 2, 3] + [MASK] * 8] * 2,
        [[5, 6] + [MASK] * 18],
    ]


def test_a_row_that_is_reset_holds_nothing_of_the_one_before():
    """Shorter, longer and wider than what was there."""
    engine, graph = scripted_engine(position, slots=2)
    for room in (40, 12, 600, 9):
        engine.reset(0, room)
        engine.commit(np.ones((1, 1), np.int64), np.array([1]))
        engine.denoise(np.full((1, LENGTH), MASK))
        assert graph.calls[-1].tolist() == [[1] + [MASK] * (room - 1)]
        engine.commit(np.full((1, room - 1), 7), np.array([room - 1]))


def test_memory_does_not_grow_with_the_number_of_lengths():
    """Bindings are bounded, and their memory is that of the largest call."""
    engine, graph = scripted_engine(noise, slots=2)
    canvas = np.full((1, LENGTH), MASK)
    engine.reset(0, 400)
    engine.denoise(canvas)
    memory = {id(binding.logits.base) for binding in graph.bindings}
    for room in range(8, 400, 4):
        engine.reset(0, room)
        found = engine.denoise(canvas)
        np.testing.assert_array_equal(found[0], noise(np.full(room, MASK))[:LENGTH])
    gc.collect()
    assert len(graph.bindings) == KEPT_BINDINGS
    assert {id(binding.logits.base) for binding in graph.bindings} == memory
    engine.reset(0, 401)
    engine.denoise(canvas)
    gc.collect()
    assert len(graph.bindings) == 1  # the others held memory that was let go of


# --- the command ----------------------------------------------------------------------------------


def test_generate_decodes_it(hybrid):
    """As any other model; the report says that nothing is carried."""
    bundle, denoiser = hybrid
    args = ["generate", bundle.path, "--prompt-ids", "5,9,2", "--max-new-tokens", 9, "--steps", 4]
    done = CliRunner().invoke(cli, [*map(str, args), "--threads", "1", "--json"])
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    wanted = published(forward_of(denoiser), bundle.spec, [5, 9, 2], 9, 4)
    cut = wanted.index(2) + 1 if 2 in wanted else 9
    assert tuple(answer["token_ids"]) == wanted[:cut]
    assert (answer["state_bytes"], answer["kv_bytes"]) == (0, 0)


def test_a_bundle_without_a_mask_is_refused_when_loaded(hybrid, tmp_path):
    """With the option that gives it one."""
    bundle, _ = hybrid
    manifest = replace(bundle, spec=replace(bundle.spec, mask_id=None)).manifest()
    folder = tmp_path / "maskless"
    folder.mkdir()
    for file in bundle.path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "bundle.json").unlink()
    (folder / "bundle.json").write_bytes(manifest)
    assert Bundle.open(folder).spec.mask_id is None
    with pytest.raises(UsageError, match="objective 'full'.*no mask id.*--mask-id"):
        load(folder)
