"""Engines of models that see the whole sequence, on the stand-in of TensorRT's runtime."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scripted import decode_all

from fixedstate.cli import cli
from fixedstate.errors import BackendError, CapacityError, UsageError
from fixedstate.plugins import driver
from fixedstate.runtime import Request, Settings, load, sequences, trt
from fixedstate.runtime.against import compare_bundles, compare_engines, whole_lengths
from fixedstate.runtime.compare import TOLERANCES, Tolerance
from fixedstate.runtime.decoder import open_full
from fixedstate.runtime.devicememory import DeviceDriver
from fixedstate.runtime.devicesequences import DeviceSequences
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.ort import open_sessions

sys.path.append(str(Path(__file__).parent))

import trt_runtime_stand_in as stand_in

FP32 = Tolerance.of("fp32")
TOKENS = (9, 24, 64)


@pytest.fixture
def bench():
    """Everything on the device has to be given back."""
    with stand_in.Bench() as made:
        yield made


@pytest.fixture(scope="module")
def engine_path(whole, tmp_path_factory):
    """Folder of an engine of it, made once: ``engine_path(least_rows=4)``."""
    made = {}
    root = tmp_path_factory.mktemp("full-engines")

    def folder(bundle=whole, **options):
        key = bundle.spec.logit_shift, bundle.spec.mask_id, tuple(sorted(options.items()))
        if key not in made:
            made[key] = root / f"{len(made)}.engine"
            options = {"columns": TOKENS, **options}
            stand_in.write_stand_in_engine(made[key], bundle, ("full",), **options)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def shifted(whole):
    """The same graph, of which each slot takes the scores of the position before it."""
    return replace(whole, spec=replace(whole.spec, logit_shift=True))


def requests(spec):
    """Rows of unlike lengths, steps and temperatures; the first two and the last have one."""
    rng = np.random.default_rng(3)
    sizes = ((5, 24, 8, 0.0), (13, 16, 3, 0.7), (8, 9, 1, 0.0), (1, 8, 20, 1.0), (5, 24, 2, 0.0))
    return [
        Request(
            rng.integers(0, spec.mask_id, prompt),
            Settings(new, steps=steps, temperature=heat, stop_ids=(), seed=i),
        )
        for i, (prompt, new, steps, heat) in enumerate(sizes)
    ]


def answers(engine):
    found = decode_all(engine, requests(engine.spec))
    assert [result.error for result in found] == [None] * len(found)
    return [result.token_ids for result in found]


def filled(engine, *rows):
    """Rows of (tokens to commit, room), from slot 0 on, and a canvas for each."""
    length, mask = engine.spec.block_len, engine.spec.mask_id
    rng = np.random.default_rng(7)
    for row, (count, room) in enumerate(rows):
        engine.reset(row, room)
        engine.commit(rng.integers(0, mask, (1, count)), np.array([count]), row)
    ids = rng.integers(0, mask, (len(rows), length))
    return np.where(rng.random(ids.shape) < 0.5, mask, ids)


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"least_rows": 4}], ids=["any batch", "fixed batch"])
@pytest.mark.parametrize("slots", [1, 3])
def test_tokens_are_those_of_onnx_runtime(bench, whole, engine_path, slots, options):
    """Rows of unlike lengths, greedy and sampled, twice over the same slots."""
    engine = bench.open(engine_path(**options), slots=slots)
    expected = open_full(whole, threads=1, slots=slots)
    for _ in range(2):
        assert answers(engine) == answers(expected)
    assert engine.provider == "tensorrt-rtx 1.7.1.116 on a stand-in without a card"
    assert (engine.limit, engine.roles, engine.state_bytes()) == (64, ("full",), 0)
    assert bench.cuda.captures >= len(engine.sequences.captured) > 2
    assert engine.sequences.uncaptured == {}


def test_tokens_with_a_logit_shift_are_those_of_onnx_runtime(bench, whole, shifted, engine_path):
    """The position before a block comes to the host with it."""
    engine = bench.open(engine_path(shifted), slots=3)
    expected = FullEngine(shifted.spec, open_sessions(whole, ("full",), threads=1), slots=3)
    assert answers(engine) == answers(expected)
    assert engine.last_logits.any()
    assert engine.last_logits.tobytes() == expected.last_logits.tobytes()


def test_scores_of_every_row_are_its_own(bench, whole, engine_path):
    """Rows of two lengths, at different places of their canvases: byte for byte, run after run."""
    engine = bench.open(engine_path(), slots=4)
    expected = open_full(whole, threads=1, slots=4)
    rows = ((11, 24), (0, 33), (3, 24), (25, 33))
    canvas = filled(engine, *rows)
    assert np.array_equal(filled(expected, *rows), canvas)
    for _ in range(3):  # a plain run, a captured one, its graph again
        assert engine.denoise(canvas).tobytes() == expected.denoise(canvas).tobytes()
    tail = engine.denoise(canvas[1:3], first=1)
    assert tail.tobytes() == expected.denoise(canvas[1:3], first=1).tobytes()


def test_what_is_not_captured_gives_the_same(bench, engine_path):
    plain = bench.open(engine_path(), slots=3, graphs=False)
    right = answers(plain)
    assert (bench.cuda.captures, plain.sequences.uncaptured) == (0, {})
    bench.product.capturable = False
    engine = bench.open(engine_path(), slots=3)
    assert answers(engine) == right
    assert set(engine.sequences.uncaptured.values()) == {"TensorRT says that it cannot be captured"}


@pytest.mark.parametrize("shift", [False, True])
def test_blocks_come_to_the_host_not_sequences(bench, whole, shifted, engine_path, shift):
    """Of a canvas of T tokens L positions, and the one before them where it is asked for."""
    engine = bench.open(engine_path(shifted if shift else whole), slots=2)
    spec = engine.spec
    canvas = filled(engine, (40, 60), (3, 60))
    for _ in range(3):
        before, driver = engine.sequences.returned_bytes, bench.cuda.to_host
        sent, device = engine.sequences.sent_bytes, bench.cuda.to_device
        engine.denoise(canvas)
        come = 2 * (spec.block_len + shift) * spec.vocab_rows * 4
        assert engine.sequences.returned_bytes - before == bench.cuda.to_host - driver == come
        assert engine.sequences.sent_bytes - sent == bench.cuda.to_device - device == 2 * 60 * 8


FAULTS = {
    "nobody waits": (driver.Stream, "synchronize", lambda old: lambda stream: None),
    "ids do not travel": (DeviceDriver, "to_device", lambda old: lambda *given: None),
    "scores of the position before": (
        DeviceDriver,
        "to_host",
        lambda old: (
            lambda own, target, source, stream: old(own, target, source - target.strides[0], stream)
        ),
    ),
    "one shape serves all": (
        DeviceSequences,
        "_make",
        lambda old: (
            lambda own, rows, length: (
                next(iter(own._bound.values()), None) or old(own, rows, length)
            )
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_adapter_do_not_pass(whole, engine_path, monkeypatch, fault):
    """Each one gives other scores here, or breaks the contract."""
    owner, name, make = FAULTS[fault]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    own, found, right = stand_in.Bench(), [], []
    expected = open_full(whole, threads=1, slots=3)
    small = ((11, 24), (4, 24), (9, 33))
    try:
        engine = own.open(engine_path(), slots=3)
        for rows in (small, ((1, 60), (11, 24), (9, 17)), small):
            canvas = filled(engine, *rows)
            filled(expected, *rows)
            found.append(engine.denoise(canvas).tobytes())
            right.append(expected.denoise(canvas).tobytes())
    except (AssertionError, BackendError, IndexError, ValueError):
        return
    assert found != right


# --- memory ---------------------------------------------------------------------------------------


def graphs_of(cuda):
    """How many graphs that can be launched there are."""
    things = (thing for thing in cuda._objects.values() if isinstance(thing, tuple))
    return sum(thing[0] == "executable" for thing in things)


def test_shapes_that_are_dropped_give_back_contexts_and_graphs(bench, engine_path, monkeypatch):
    """As many stay as are kept; memory is that of the largest call, whatever the shapes."""
    monkeypatch.setattr(sequences, "KEPT_BINDINGS", 3)
    engine = bench.open(engine_path(), slots=2)
    right, contexts = {}, []
    for _ in range(2):
        for room in (64, 9, 24, 33, 40, 17, 12):
            canvas = filled(engine, (1, room))
            for _ in range(2):
                found = engine.denoise(canvas).tobytes()
                assert right.setdefault(room, found) == found
            contexts += map(weakref.ref, bench.product.contexts)
            bench.product.contexts.clear()
            gc.collect()
            assert sum(context() is not None for context in contexts) <= 3
            assert len(bench.cuda.allocations) == 3  # ids, logits, inside a pass
    assert len(contexts) == 14
    assert sum(context() is not None for context in contexts) == 3
    assert graphs_of(bench.cuda) == len(engine.sequences.captured) == 3
    engine.close()
    gc.collect()
    assert not any(context() for context in contexts)
    assert graphs_of(bench.cuda) == 0


def test_a_larger_call_takes_other_memory(bench, whole, engine_path):
    """The smaller one is given back first, with every context that holds its addresses."""
    engine = bench.open(engine_path(), slots=2)
    expected = open_full(whole, threads=1, slots=2)
    held, sizes = [], []
    for rows in (((1, 9),), ((1, 24),), ((1, 24), (2, 24)), ((1, 9),)):
        canvas = filled(engine, *rows)
        filled(expected, *rows)
        for _ in range(2):
            assert engine.denoise(canvas).tobytes() == expected.denoise(canvas).tobytes()
        sizes.append(sum(len(block) for block in bench.cuda.allocations.values()))
        held.append(len(engine.sequences._bound))
    assert held == [1, 1, 1, 2]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]
    vocab = engine.spec.vocab_rows
    need = 2 * 24 * (8 + 4 * vocab)
    assert need <= sizes[-1] - stand_in.INNER - 3 * 256 < need + 2 * 256


def test_no_memory_is_a_clear_error_and_can_be_survived(bench, engine_path):
    """The rows keep their tokens; a call that fits runs again."""
    engine = bench.open(engine_path(), slots=2)
    canvas = filled(engine, (1, 9), (2, 64))
    right = engine.denoise(canvas[:1]).copy()
    bench.cuda.total = 4 * 64 * engine.spec.vocab_rows - 1
    with pytest.raises(
        CapacityError, match=r"no device memory for the logits of 1 sequences of 64"
    ):
        engine.denoise(canvas[1:], first=1)
    assert engine.past_length.tolist() == [1, 2]
    assert engine.denoise(canvas[:1]).tobytes() == right.tobytes()
    bench.cuda.total = 1 << 30
    assert np.isfinite(engine.denoise(canvas)).all()


def test_a_pass_that_fails_says_why(bench, engine_path):
    engine = bench.open(engine_path(), slots=1)
    canvas = filled(engine, (3, 20))
    right = engine.denoise(canvas).copy()
    bench.product.fails = True
    with pytest.raises(BackendError, match=r"full.plan did not run: CUDA failure 700"):
        engine.denoise(filled(engine, (3, 21)))
    bench.product.fails = False
    filled(engine, (3, 20))
    assert engine.denoise(canvas).tobytes() == right.tobytes()


def test_a_closed_engine_says_so(bench, engine_path):
    engine = bench.open(engine_path(), slots=1)
    canvas = filled(engine, (3, 20))
    engine.denoise(canvas)
    engine.close()
    assert not bench.cuda.allocations
    with pytest.raises(UsageError, match="this engine is closed: load it again"):
        engine.denoise(canvas)


# --- what an engine does not take -----------------------------------------------------------------


def test_lengths_outside_the_profiles_are_refused(bench, engine_path):
    """With the range and the option that widens it; nothing was run or changed."""
    engine = bench.open(engine_path(), slots=2)
    engine.reset(0, 24)
    with pytest.raises(
        CapacityError,
        match=r"8 tokens does not fit: full.plan takes 9 to 64: ask for more new tokens, or build "
        "the engine with a --capacity from 8 to 64",
    ):
        engine.reset(0, 8)
    with pytest.raises(CapacityError, match="row 0 needs room for 65 tokens; the limit is 64"):
        engine.reset(0, 65)
    assert engine._room.tolist() == [24, 0]
    with pytest.raises(CapacityError, match="takes 9 to 64: ask for fewer .* from 9 to 65"):
        engine.sequences.bind(1, 65)
    with pytest.raises(CapacityError, match=r"take 69 tokens; the limit is 64"):
        decode_all(engine, [Request([1] * 5, Settings(64))])
    assert bench.open(engine_path(), limit=30).limit == 30
    assert bench.open(engine_path(), limit=99).limit == 64
    assert bench.product.contexts == []


def test_a_request_that_is_too_short_ends_alone(bench, engine_path):
    """Its masks are part of what the model sees: it cannot be padded to the shortest."""
    engine = bench.open(engine_path(columns=(20, 24, 64)), slots=2)
    short, fine = Request([1, 2], Settings(8)), Request([1] * 12, Settings(8, stop_ids=()))
    results = decode_all(engine, [short, fine])
    assert [result.finish_reason for result in results] == ["error", "length"]
    assert "a sequence of 10 tokens does not fit: full.plan takes 20 to 64" in results[0].error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots": 5}, r"5 slots were asked for; full.plan takes 4 rows at most"),
        ({"slots": 0}, "slots must be 1 or more"),
        ({"memory": "lean"}, "memory 'lean' cannot be chosen: an engine of objective 'full' has"),
        ({"memory": "some"}, "memory 'some' is unknown"),
        ({"head": "top_k"}, "has no head 'top_k': models of objective 'full' give all scores"),
        ({"capacity": 256}, "capacity 256 was asked for; .* keeps no keys and values"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bench, engine_path, options, text):
    with pytest.raises(UsageError, match=text):
        bench.open(engine_path(), **options)


def test_a_model_without_a_mask_is_refused_before_a_plan_is_loaded(bench, whole, engine_path):
    maskless = replace(whole, spec=replace(whole.spec, mask_id=None))
    with pytest.raises(UsageError, match="objective 'full'.*no mask id"):
        bench.open(engine_path(maskless))
    assert bench.product.events == []


# --- load, threads and the command line -----------------------------------------------------------


def test_TR_07_threads_take_turns(bench, whole, engine_path, monkeypatch):
    """A decoder serves them one by one, each in the context of the device."""
    bench.use(monkeypatch)
    threads = []
    current = DeviceDriver.make_current

    def make_current(driver):
        threads.append(threading.get_ident())
        current(driver)

    monkeypatch.setattr(DeviceDriver, "make_current", make_current)
    found = {}
    with load(engine_path(), slots=2) as decoder, load(whole.path, threads=1) as other:
        some = requests(decoder.spec)
        right = [one.token_ids for one in other.generate(some)]

        def work(name):
            found[name] = [one.token_ids for one in decoder.generate(some)], threading.get_ident()

        workers = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [found[name][0] for name in "ab"] == [right, right]
    assert {found[name][1] for name in "ab"} <= set(threads)
    assert not bench.cuda.allocations


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_generate_and_its_refusals(bench, whole, engine_path, monkeypatch, tmp_path):
    """The ids of the bundle; what needs a state says that there is none."""
    bench.use(monkeypatch)
    words = ("--prompt-ids", "5,9,2", "--prompt-ids", "7", "--max-new-tokens", 9, "--json")
    here, there = (invoke("generate", path, *words) for path in (engine_path(), whole.path))
    assert (here.exit_code, there.exit_code) == (0, 0), here.stderr + there.stderr
    one, two = (
        [answer["token_ids"] for answer in json.loads(done.stdout)] for done in (here, there)
    )
    assert one == two
    assert not bench.cuda.allocations  # the command line gives everything back
    short = invoke("generate", engine_path(columns=(30, 40, 64)), *words)
    assert short.exit_code == 1
    assert "error: prompt 1: a sequence of 19 tokens does not fit: full.plan takes 30" in (
        short.stderr
    )
    for command, code in (
        (("chat", engine_path()), 2),
        (("prefix", "make", engine_path(), "--ids", "1,2", "-o", tmp_path / "p"), 2),
        (("generate", engine_path(), *words[:2], "--save-state", tmp_path / "s"), 2),
    ):
        done = invoke(*command)
        assert done.exit_code == code
        assert "objective 'full'): it carries no state" in done.stderr, done.stderr
    assert not bench.cuda.allocations


def test_inspect_shows_its_lengths(engine_path):
    done = invoke("inspect", engine_path())
    assert done.exit_code == 0, done.stderr
    assert "4x64" in done.stdout


# --- beside its bundle ----------------------------------------------------------------------------


def test_the_program_for_a_card(bench, whole, engine_path, monkeypatch):
    """tests/gpu/engines/run.py as far as it goes without one; it finds wrong numbers."""
    place = Path(__file__).parents[1] / "gpu" / "engines" / "run.py"
    spec = importlib.util.spec_from_file_location("run_engines", place)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    sides = {"module": bench.product, "cuda": bench.cuda}
    results = {"problems": []}
    program.measure(whole.path, engine_path(), results, **sides)
    assert results["problems"] == []
    assert results["compared"]["passed"]
    assert {(row["way"], row["rows"], row["tokens"]) for row in results["times"]} == {
        (way, rows, tokens) for way in ("graph", "launches") for rows in (1, 4) for tokens in TOKENS
    }
    assert "full 4 x 64" in results["captured"]["graphs"]
    assert "card 99 was asked for" in results["refused"]
    twisted(monkeypatch)
    results = {"problems": []}
    program.measure(whole.path, engine_path(), results, **sides)
    assert any("logits" in problem for problem in results["problems"])


def twisted(monkeypatch):
    """Let plans give scores that are a tenth too large."""
    real = stand_in.to_bits
    larger = np.float32(1.1)
    monkeypatch.setattr(stand_in, "to_bits", lambda found, dtype: real(found * larger, dtype))


class Altered:
    """An engine whose scores are changed on their way."""

    def __init__(self, engine, scores=lambda logits: logits, last=1.0):
        self._engine, self._scores, self._last = engine, scores, last

    def __getattr__(self, name):
        return getattr(self._engine, name)

    @property
    def last_logits(self):
        return self._engine.last_logits * np.float32(self._last)

    def denoise(self, ids, first=0):
        return self._scores(self._engine.denoise(ids, first).copy())


def poison(logits):
    logits[-1, 0, 3] = np.nan
    return logits


def test_an_engine_is_compared_at_every_length_it_was_built_for(
    bench, whole, engine_path, monkeypatch
):
    """Sequences of the fewest, the usual and the most tokens, two of one length in a call."""
    bench.use(monkeypatch)
    folder = EngineFolder.open(engine_path())
    assert whole_lengths(folder) == TOKENS
    (found,) = compare_bundles(whole, folder, FP32)
    assert found.passed, found.first
    assert [port.name for port in found.ports] == ["logits"]
    assert (found.ports[0].max_abs, found.commits, found.rows) == (0.0, 0, 3)
    assert found.choices.agreed == found.choices.sure > 100
    assert found.tokens.equal == found.tokens.tokens == 3 * 8 + 2 * 8 + 8 + 8
    shapes = {context.shapes["input_ids"] for context in bench.product.contexts}
    assert shapes == {(1, 9), (1, 24), (2, 24), (1, 64)}
    (quick,) = compare_bundles(whole, folder, FP32, quick=True)
    assert quick.passed
    assert quick.passes < found.passes


def test_one_row_of_one_block(bench, whole, engine_path, monkeypatch):
    """No prompt has room, so nothing is ever committed; something was compared."""
    bench.use(monkeypatch)
    folder = EngineFolder.open(engine_path(columns=(8, 8, 8), rows=1))
    (found,) = compare_bundles(whole, folder, FP32, quick=True)
    assert (found.passed, found.rows, found.commits) == (True, 1, 0)


def test_an_engine_without_room_for_a_block_is_said(bench, whole, engine_path, monkeypatch):
    bench.use(monkeypatch)
    folder = EngineFolder.open(engine_path(columns=(1, 4, 7)))
    with pytest.raises(CapacityError, match="takes 7 tokens and a block needs 8: build it with mo"):
        compare_bundles(whole, folder, FP32)


def test_a_bundle_beside_itself(whole):
    (found,) = compare_bundles(whole, whole, FP32, quick=True)
    assert found.passed
    assert (found.reference, found.candidate) == ("cpu", "cpu")


def test_VE_04_scores_that_are_only_scaled_fail(whole):
    """The likeliest tokens are the same, and the scores wrong."""
    scaled = Altered(open_full(whole, threads=1, slots=3), lambda logits: logits * np.float32(1.87))
    found = compare_engines(
        open_full(whole, threads=1, slots=3), scaled, TOLERANCES["bf16"], quick=True
    )
    assert (found.passed, found.first_port) == (False, "logits")
    assert found.first.startswith("generation 1, slot 0, behind 24 tokens, pass 1, logits: ")
    assert found.ports[0].cosine > 0.999999
    assert found.choices.agreed == found.choices.sure > 0


@pytest.mark.parametrize("candidate", [False, True])
def test_VE_01_numbers_that_are_none_fail(whole, candidate):
    sides = [open_full(whole, threads=1, slots=3) for _ in range(2)]
    sides[candidate] = Altered(sides[candidate], poison)
    found = compare_engines(*sides, TOLERANCES["bf16"], quick=True)
    assert not found.passed
    said = "candidate holds NaN or infinity" if candidate else "reference itself is invalid"
    assert said in found.first


@pytest.mark.parametrize("last", [1.0, 1.5])
def test_logits_before_a_block_are_compared_where_the_model_shifts(whole, shifted, last):
    """A row's first slot is predicted by them alone."""
    sessions = open_sessions(whole, ("full",), threads=1)
    right, other = (FullEngine(shifted.spec, sessions, slots=3) for _ in range(2))
    found = compare_engines(right, Altered(other, last=last), FP32, quick=True)
    assert found.passed is (last == 1.0)
    assert found.first_port == ("" if last == 1.0 else "last_logits")
    assert {port.name for port in found.ports} == {"logits", "last_logits"}


def test_check_against_an_engine(bench, whole, engine_path, monkeypatch):
    """On a card both are run; without one what the build recorded is compared."""
    unrun = invoke("check", whole.path, "--against", engine_path())
    assert unrun.exit_code == 0, unrun.stderr
    assert unrun.stdout.splitlines()[-1].startswith("PASSED static checks only, not run: ")
    bench.use(monkeypatch)
    monkeypatch.setattr(trt, "why_not_here", lambda engine: None)
    done = invoke("check", whole.path, "--against", engine_path(), "--quick")
    assert done.exit_code == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "PASSED"
    assert "denoise passes" in done.stdout
    twisted(monkeypatch)
    wrong = invoke("check", whole.path, "--against", engine_path(), "--quick")
    assert (wrong.exit_code, wrong.stdout.splitlines()[-1]) == (1, "FAILED")
