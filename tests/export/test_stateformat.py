"""Scan states stored in 16 or 8 bits: ports, rounding, what commits and what does not, engines."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rtx_build import build
from sample_models import MAMBA, attention_layer, mamba_layer, model, selective_layer
from stored_bundles import stored

from fixedstate.bundle import Bundle
from fixedstate.calib.drift import rounded_engine, rounded_state
from fixedstate.errors import ExportError, SpecError, StateError
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.passes import serialised
from fixedstate.export.stateformat import fuses, store_state
from fixedstate.ports import Port
from fixedstate.runtime.compare import TOLERANCES, coarsest, decoded
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.laws import check_bundle
from fixedstate.runtime.ort import OrtSession, open_graph, open_sessions
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.spec import LayerSpec, LinearAttentionSizes
from fixedstate.state import STATE_DTYPES, Precision, StateSpec

sys.path.append(str(Path(__file__).resolve().parent))

from test_precision import written

FORMATS = {"float16": "fp16", "bfloat16": "bf16", "int8row": "int8row"}
"""Formats, and what :mod:`fixedstate.calib.drift` calls them."""

NAMES = ("mamba1", "hybrid", "tiny-mamba")
ALL = pytest.mark.parametrize("name", NAMES)
EACH = pytest.mark.parametrize("form", FORMATS)

LINEAR = model(LayerSpec("linear_attention", LinearAttentionSizes(4, 2, 8, 8)))
MODELS = {
    "mamba1": model(selective_layer("forward"), selective_layer()),
    "hybrid": model(mamba_layer(), attention_layer()),
    "linear": LINEAR,
}
BLOCKS = 30


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """A float32 bundle by name; its graphs were not compared with anything."""

    @functools.cache
    def made(name: str) -> Bundle:
        folder = tmp_path_factory.mktemp("plain") / name
        roles = ["denoise", "commit"]
        if name in MODELS:
            roles += ["commit_denoise"] if name == "hybrid" else []
            return written(folder, MODELS[name], Precision(), roles=roles)
        loaded = load_checkpoint(name)
        tensors = loaded.tensors
        return written(folder, loaded.spec, Precision(), lambda own: own.update(tensors), roles)

    return made


@pytest.fixture(scope="module")
def small(
    plain: Callable[[str], Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Bundle]:
    """The same with its scan states in a format."""

    @functools.cache
    def made(name: str, form: str) -> Bundle:
        return stored(plain(name), tmp_path_factory.mktemp("stored"), state=form)

    return made


def engine_of(bundle: Bundle, *roles: str, slots: int = 2) -> SessionEngine:
    """The passes of some roles, one thread."""
    sessions = open_sessions(bundle, roles or ("denoise", "commit"), threads=1)
    return SessionEngine(bundle.spec, bundle.state, sessions, slots=slots, weights=bundle.weights)


def text(bundle: Bundle, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Tokens (rows, blocks * L) without the mask."""
    spec = bundle.spec
    tokens = [token for token in range(spec.vocab_size) if token != spec.mask_id]
    return np.random.default_rng(seed).choice(tokens, (rows, blocks * spec.block_len))


def masked(bundle: Bundle, ids: np.ndarray) -> np.ndarray:
    return np.where(np.arange(ids.shape[1]) % 2, bundle.spec.mask_id, ids)


def scans(bundle: Bundle, engine: SessionEngine, row: int) -> dict[str, np.ndarray]:
    """A row's scan states as numbers."""
    arrays = decoded(bundle.state, engine.read(row))
    return {name: array for name, array in arrays.items() if name.startswith("ssm_state")}


# --- what is carried ------------------------------------------------------------------------------


def test_scales_stand_behind_their_states() -> None:
    spec = model(mamba_layer(), attention_layer(), selective_layer("forward"))
    state = StateSpec.of(spec, Precision(state="int8row"))
    assert [port.suffix for port in state.ports] == [
        *("conv_state_000", "ssm_state_000", "ssm_state_scale_000"),
        *("key_001", "value_001"),
        *("conv_state_002", "ssm_state_002", "ssm_state_scale_002"),
    ]
    first, third = state.layer(0), state.layer(2)
    assert first["ssm"].past == Port("past_ssm_state_000", "int8", ("B", 8, 8, 8))
    assert first["ssm_scale"].past == Port("past_ssm_state_scale_000", "float32", ("B", 8, 1, 8))
    assert third["ssm"].present == Port("present_ssm_state_002", "int8", ("B", 4, 32))
    assert third["ssm_scale"].present.shape == ("B", 1, 32)
    assert {port.update for port in (*first.values(), *third.values())} == {"swap"}
    assert {port.reset for port in state.ports} == {0.0}
    assert StateSpec.from_dict(state.to_dict()) == state


def test_formats_have_the_bytes_that_they_say() -> None:
    spec = model(mamba_layer(sizes=replace(MAMBA, d_conv=1)))
    elements = 8 * 8 * 8
    found = {form: StateSpec.of(spec, Precision(state=form)).state_bytes() for form in STATE_DTYPES}
    assert found == {
        "float32": 4 * elements,
        "float16": 2 * elements,
        "bfloat16": 2 * elements,
        "int8row": elements + 4 * elements // 8,
    }


def test_what_is_carried_beside_a_scan_state_stays_float32() -> None:
    spec = replace(LINEAR, self_conditioning_width=24)
    for form in STATE_DTYPES:
        state = StateSpec.of(spec, Precision(state=form))
        rest = [port for port in state.ports if port.kind not in ("ssm", "ssm_scale")]
        assert {port.kind for port in rest} == {"norm", "soft_embedding"}
        assert {port.past.dtype for port in rest} == {"float32"}


def test_precisions_say_what_is_kept_in_fewer_bits() -> None:
    precision = Precision(state="int8row")
    assert Precision.from_dict(precision.to_dict()) == precision
    assert str(precision) == "fp32 with int8row states"
    assert str(Precision("float16", "float32", "float16")) == "fp16"
    assert coarsest(Precision(), precision) == "int8row states"
    assert coarsest(Precision("bfloat16", "float16", "bfloat16")) == "bf16"
    assert all(name in TOLERANCES for form in FORMATS for name in Precision(state=form).names)
    with pytest.raises(SpecError, match="state format 'int8' is unknown; use one of float32"):
        Precision(state="int8")


def test_stored_states_are_compared_as_the_numbers_that_they_stand_for() -> None:
    state = StateSpec.of(model(mamba_layer()), Precision(state="int8row"))
    rng = np.random.default_rng(3)
    numbers = rng.integers(-127, 128, (8, 8, 8)).astype(np.int8)
    scales = rng.random((8, 1, 8)).astype(np.float32)
    given = {"ssm_state_000": numbers, "ssm_state_scale_000": scales, "logits": scales}
    found = decoded(state, given)
    assert set(found) == {"ssm_state_000", "logits"}
    assert np.array_equal(found["ssm_state_000"], numbers * scales)
    assert found["ssm_state_000"].dtype == np.float32
    half = StateSpec.of(model(mamba_layer()), Precision(state="bfloat16"))
    bits = np.asarray([0x3F80, 0xC000], np.uint16)  # 1 and -2
    assert decoded(half, {"ssm_state_000": bits})["ssm_state_000"].tolist() == [1.0, -2.0]
    assert decoded(half, {"ssm_state_000": scales})["ssm_state_000"] is scales  # float32 already


# --- one rounding ---------------------------------------------------------------------------------

HEADS, D_STATE, WIDTH = 2, 4, 3
ALONE = model(
    mamba_layer(sizes=replace(MAMBA, d_inner=6, heads=2, head_dim=3, d_state=4, d_conv=1))
)
"""Its scan state is [B, 2, 4, 3], and all that it carries."""


def adding(chooses: bool = True) -> ir.Model:
    """A commit graph whose new state is the old one and what is given.

    Args:
        chooses: Whether rows that commit nothing get their old state, as every exported graph has
            it; one of a custom module may not.
    """
    choice = "Where (flags, new, past_ssm_state_000)" if chooses else "Identity (new)"
    return ir.from_proto(
        onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        adding (float[B, {HEADS}, {D_STATE}, {WIDTH}] past_ssm_state_000, int64[B] commit_length,
                float[B, {HEADS}, {D_STATE}, {WIDTH}] more)
            => (float[B, {HEADS}, {D_STATE}, {WIDTH}] present_ssm_state_000, float[B, 1] seen) {{
          zero = Constant <value_int = 0> ()
          axes = Constant <value_ints = [1, 2, 3]> ()
          some = Greater (commit_length, zero)
          flags = Unsqueeze (some, axes)
          new = Add (past_ssm_state_000, more)
          present_ssm_state_000 = {choice}
          last = Constant <value_ints = [1, 2]> ()
          all = ReduceMax <keepdims = 0> (present_ssm_state_000, last)
          axis = Constant <value_ints = [1]> ()
          seen = ReduceMax (all, axis)
        }}
        """)
    )


@pytest.fixture(scope="module")
def commits(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, np.ndarray]]:
    """Run :func:`adding` with its state stored in a format."""

    @functools.cache
    def session(form: str, chooses: bool) -> OrtSession:
        graph = adding(chooses)
        after = StateSpec.of(ALONE, Precision(state=form))
        store_state(graph, ALONE, StateSpec.of(ALONE), after, "commit")
        path = tmp_path_factory.mktemp("adding") / "commit.onnx"
        path.write_bytes(serialised(graph))
        more = Port("more", "float32", ("B", HEADS, D_STATE, WIDTH))
        length = Port("commit_length", "int64", ("B",))
        inputs = (*(port.past for port in after.ports), length, more)
        outputs = (
            *(port.present for port in after.ports),
            Port("seen", "float32", ("B", 1)),
        )
        return open_graph(path, inputs, outputs, threads=1)

    def run(
        form: str,
        past: dict[str, np.ndarray],
        more: np.ndarray,
        lengths: list[int],
        chooses: bool = True,
    ) -> dict[str, np.ndarray]:
        feeds = {f"past_{name}": array for name, array in past.items()}
        feeds |= {"more": more, "commit_length": np.asarray(lengths, np.int64)}
        return session(form, chooses).run(feeds)

    return run


def resting(form: str, rows: int) -> dict[str, np.ndarray]:
    """The state before the first token."""
    state = StateSpec.of(ALONE, Precision(state=form))
    dtypes = {"float16": np.float16, "bfloat16": np.uint16, "int8": np.int8, "float32": np.float32}
    return {
        port.suffix: np.zeros(port.past.resolve(B=rows), dtypes[port.past.dtype])
        for port in state.ports
    }


def numbers_of(form: str, made: dict[str, np.ndarray]) -> np.ndarray:
    arrays = {
        name.removeprefix("present_"): array
        for name, array in made.items()
        if name.startswith("present_")
    }
    return decoded(StateSpec.of(ALONE, Precision(state=form)), arrays)["ssm_state_000"]


numbers = st.floats(-6e4, 6e4, width=32, allow_subnormal=False)
values = hnp.arrays(np.float32, (1, HEADS, D_STATE, WIDTH), elements=numbers)


@EACH
@settings(max_examples=60)
@given(state=values)
@example(state=np.zeros((1, HEADS, D_STATE, WIDTH), np.float32))
@example(state=np.full((1, HEADS, D_STATE, WIDTH), 63.5, np.float32))
@example(state=np.arange(24, dtype=np.float32).reshape(1, HEADS, D_STATE, WIDTH) - 12)
def test_QU_09_one_rounding_is_that_of_the_drift_report(commits, form, state) -> None:
    state = np.where(np.abs(state) < 1e-30, 0, state)  # scales of less are subnormal
    made = commits(form, resting(form, 1), state, [1])
    found = numbers_of(form, made)
    assert np.array_equal(found, rounded_state(state, FORMATS[form]))
    assert made["seen"].item() == found.max()  # what reads it in the graph reads what is stored


@EACH
@settings(max_examples=30)
@given(past=values, more=values)
def test_rows_that_commit_nothing_keep_their_bytes(commits, form, past, more) -> None:
    """Whatever they hold: also numbers whose largest is not 127, scales of no rounding."""
    rows = resting(form, 2)
    if form == "int8row":
        rows["ssm_state_000"][:] = np.clip(past / 600, -100, 100)
        rows["ssm_state_scale_000"][:] = np.abs(past).max(2, keepdims=True)
    elif form == "float16":
        rows["ssm_state_000"][:] = past
    else:
        rows["ssm_state_000"][:] = past.view(np.uint32) >> 16
    twice = np.concatenate([more, more])
    made = commits(form, rows, twice, [0, 1])
    for name, array in rows.items():
        assert made[f"present_{name}"][0].tobytes() == array[0].tobytes(), name
    alone = commits(form, {name: array[1:] for name, array in rows.items()}, more, [1])
    for name in rows:
        assert made[f"present_{name}"][1].tobytes() == alone[f"present_{name}"][0].tobytes(), name


def test_the_choice_per_row_does_not_depend_on_the_graph_s_own(commits) -> None:
    past = resting("int8row", 2)
    past["ssm_state_000"][:] = np.arange(-12, 12).reshape(1, HEADS, D_STATE, WIDTH)
    past["ssm_state_scale_000"][:] = 0.3
    more = np.random.default_rng(1).standard_normal((2, HEADS, D_STATE, WIDTH), np.float32)
    with_it, without = (
        commits("int8row", past, more, [0, 5], chooses=chooses) for chooses in (True, False)
    )
    for name, array in past.items():
        found = without[f"present_{name}"]
        assert found[0].tobytes() == array[0].tobytes()
        assert found.tobytes() == with_it[f"present_{name}"].tobytes()


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_none_afterwards(commits, form, bad) -> None:
    """Wherever they stand in their row: the largest of values is found beside a NaN too."""
    for place in np.ndindex(HEADS, D_STATE, WIDTH):
        state = np.ones((1, HEADS, D_STATE, WIDTH), np.float32)
        state[(0, *place)] = bad
        found = numbers_of(form, commits(form, resting(form, 1), state, [1]))[0]
        assert not np.isfinite(found[place])
        other = (1 - place[0], *place[1:])
        assert found[other] == 1.0
        # what did not commit is not touched by it
        kept = numbers_of(form, commits(form, resting(form, 1), state, [0]))
        assert not kept.any()


def test_what_passes_the_end_of_float16_is_no_number(commits) -> None:
    state = np.full((1, HEADS, D_STATE, WIDTH), 7e4, np.float32)
    assert np.isinf(
        numbers_of("float16", commits("float16", resting("float16", 1), state, [1]))
    ).all()


# --- decoding -------------------------------------------------------------------------------------


@ALL
@EACH
def test_QU_09_many_blocks_are_those_of_the_drift_report(plain, small, name, form) -> None:
    """Stored states are what the rounding measured by calib leaves, block after block."""
    bundle, whole = small(name, form), plain(name)
    engine, reference = engine_of(bundle), rounded_engine(whole, FORMATS[form], 2)
    length = bundle.spec.block_len
    ids = text(bundle, 2, BLOCKS)
    equal = count = 0
    for block in range(BLOCKS):
        piece = ids[:, block * length : (block + 1) * length]
        canvas = masked(bundle, piece)
        logits, wanted = engine.denoise(canvas), reference.denoise(canvas)
        assert np.abs(logits - wanted).max() <= 1e-3
        lengths = np.asarray([length, length if block % 3 else 0])
        engine.commit(piece, lengths)
        reference.commit(piece, lengths)
        for row in (0, 1):
            right = {n: a for n, a in reference.read(row).items() if n.startswith("ssm_state")}
            found = scans(bundle, engine, row)
            assert found.keys() == right.keys()
            for port, array in right.items():
                largest = np.abs(array).max(-2, keepdims=True)
                step = largest / 127 if form == "int8row" else np.abs(array) * 2.0**-7
                assert (np.abs(found[port] - array) <= 1.01 * step).all()
                equal += int((found[port] == array).sum())
                count += array.size
    assert equal >= 0.999 * count


@EACH
def test_fused_passes_read_what_is_stored(plain, small, form) -> None:
    """State byte for byte that of two passes; logits those of a state that was rounded."""
    bundle = small("hybrid", form)
    two, fused = engine_of(bundle), engine_of(bundle, "commit_denoise")
    unrounded = engine_of(plain("hybrid"))
    length = bundle.spec.block_len
    ids = text(bundle, 2, 6)
    far = 0.0
    for block in range(5):
        piece = ids[:, block * length : (block + 1) * length]
        canvas = masked(bundle, ids[:, (block + 1) * length : (block + 2) * length])
        logits = fused.commit_denoise(np.concatenate([piece, canvas], 1)).copy()
        for engine in (two, unrounded):
            engine.commit(piece, np.full(2, length))
        wanted = two.denoise(canvas)
        tolerance = 2e-5 * max(1.0, float(wanted.std()))
        assert np.abs(logits - wanted).max() <= tolerance
        far = max(far, np.abs(unrounded.denoise(canvas) - wanted).max() / tolerance)
        for row in (0, 1):
            right, found = two.read(row), fused.read(row)
            for port in right:
                if port.startswith("ssm_state"):
                    assert found[port].tobytes() == right[port].tobytes(), port
    assert far > 3  # else nothing was shown


@pytest.mark.parametrize("name", MODELS)
@EACH
def test_the_laws_hold(small, name, form) -> None:
    """Among them: passes that denoise write nothing, rows alone and in batches are the same bytes,
    saved states go on as they were."""
    results = check_bundle(small(name, form), block_counts=(1, 2, 5))
    assert [result.law for result in results] == [1, 2, 3, 4, 6, 7]
    assert [result for result in results if not result.passed] == []
    exact = {result.law for result in results if result.worst is None}
    assert exact >= {4, 7}


@EACH
def test_saved_states_are_of_one_format(plain, small, form) -> None:
    bundle = small("hybrid", form)
    engine = engine_of(bundle)
    length = bundle.spec.block_len
    engine.commit(text(bundle, 1, 2), np.asarray([2 * length]))
    saved = Snapshot.from_bytes(Snapshot.take(engine, 0).to_bytes())
    assert saved.state == bundle.state
    other = engine_of(bundle)
    saved.restore(other, 1)
    for name, array in engine.read(0).items():
        assert other.read(1)[name].tobytes() == array.tobytes()
    with pytest.raises(StateError, match="past_ssm_state_000"):
        saved.restore(engine_of(plain("hybrid")), 0)


def test_no_state_is_saved_whose_scales_are_no_numbers(small) -> None:
    engine = engine_of(small("hybrid", "int8row"))
    arrays = engine.read(0)
    arrays["ssm_state_scale_000"][0, 0, 1] = np.inf
    engine.write(0, arrays, 0)
    with pytest.raises(StateError, match="ssm_state_scale_000"):
        Snapshot.take(engine, 0)
    logits = engine.denoise(np.full((1, engine.spec.block_len), engine.spec.mask_id))
    assert not np.isfinite(logits).all()  # which ends the decoding of a row


def test_stored_states_take_as_many_bytes_as_the_ports_say(small, plain) -> None:
    whole = open_engine(plain("tiny-mamba"), threads=1, slots=3)
    eight = open_engine(small("tiny-mamba", "int8row"), threads=1, slots=3)
    assert sum(eight.buffers.nbytes.values()) == 2 * 3 * eight.state_bytes()
    assert eight.state_bytes() < whole.state_bytes() / 2.5


# --- refused --------------------------------------------------------------------------------------


def test_a_state_is_rounded_once(small) -> None:
    bundle = small("hybrid", "float16")
    after = StateSpec.of(bundle.spec, Precision(state="int8row"))
    graph = ir.load(bundle.path / bundle.graphs["commit"].file)
    with pytest.raises(
        ExportError, match="past_ssm_state_000 is float16 already, expected float32"
    ):
        store_state(graph, bundle.spec, bundle.state, after, "commit")


def test_states_of_another_model_are_refused(plain) -> None:
    bundle = plain("hybrid")
    graph = ir.load(bundle.path / bundle.graphs["commit"].file)
    after = StateSpec.of(MODELS["mamba1"], Precision(state="int8row"))
    with pytest.raises(ExportError, match="are not those of the graph"):
        store_state(graph, bundle.spec, bundle.state, after, "commit")
    three = model(mamba_layer(), attention_layer(), mamba_layer())
    both = (StateSpec.of(three), StateSpec.of(three, Precision(state="int8row")))
    with pytest.raises(ExportError, match="has no port 'past_ssm_state_002'"):
        store_state(graph, three, *both, "commit")
    attention = model(attention_layer())
    both = (StateSpec.of(attention), StateSpec.of(attention, Precision(state="int8row")))
    with pytest.raises(ExportError, match="no scan state: there is nothing to store"):
        store_state(graph, attention, *both, "commit")


def test_a_fused_pass_of_linear_attention_is_refused() -> None:
    both = (StateSpec.of(LINEAR), StateSpec.of(LINEAR, Precision(state="int8row")))
    assert not fuses(LINEAR, both[1])
    assert fuses(LINEAR, both[0])
    assert fuses(
        model(mamba_layer()), StateSpec.of(model(mamba_layer()), Precision(state="int8row"))
    )
    with pytest.raises(ExportError, match="linear attention has no commit_denoise_top_k pass"):
        store_state(adding(), LINEAR, *both, "commit_denoise_top_k")


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bfloat16", "int8row"])
@pytest.mark.trt
def test_tensorrt_rtx_builds_stored_states(small, form) -> None:
    sizes = {"B": (1, 1, 4), "n": (1, 1, 4), "C": (8, 256, 512)}
    result = build(small("hybrid", form).path / "commit.onnx", sizes)
    assert result["ok"], result
    assert result["warnings"] == []
