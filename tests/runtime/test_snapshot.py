"""Saved states: the same bytes again, in any slot and process, or a refusal that names the port."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from holder import Holder
from hypothesis import given
from hypothesis import strategies as st
from sample_models import attention_layer, mamba_layer, model, selective_layer

from fixedstate.bundle import Bundle
from fixedstate.errors import CapacityError, StateError, UsageError
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.snapshot import FORMAT, Snapshot
from fixedstate.spec import AttentionSizes, LayerSpec, LinearAttentionSizes, Mamba2Sizes
from fixedstate.state import Precision

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
WINDOW = AttentionSizes(heads=4, kv_heads=2, head_dim=8, rotary_dim=8, window=16, sinks=2)
ONE_TAP = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=1)
LINEAR = LinearAttentionSizes(heads=4, kv_heads=2, head_dim=8)
MODELS = {
    "hybrid": model(mamba_layer(), attention_layer()),
    "mamba1": model(selective_layer(), mamba_layer(sizes=ONE_TAP)),
    "window": model(attention_layer(sizes=WINDOW), attention_layer()),
    "linear": model(LayerSpec("linear_attention", LINEAR)),
    "shift": model(mamba_layer(), logit_shift=True),
    "step": model(mamba_layer(), self_conditioning_width=24),
    "stateless": model(mamba_layer("reverse")),
}
PRECISIONS = {
    "fp32": Precision(),
    "fp16": Precision.named("fp16"),
    "bf16": Precision(io="bfloat16", state="float32", kv="bfloat16"),
}


def hybrid(**options):
    return Holder(MODELS["hybrid"], **options)


def taken(tokens=16, pending=(1, 2, 3), seed=7):
    """The state of a hybrid after some tokens."""
    return Snapshot.take(hybrid().fill(1, tokens), 1, pending, seed)


def assert_same(found, expected):
    """Bytes of every array, and all the rest."""
    assert {name: array.tobytes() for name, array in found.arrays.items()} == {
        name: array.tobytes() for name, array in expected.arrays.items()
    }
    names = ("past_length", "pending", "seed", "weights", "state", "block_len")
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]
    assert (found.last_logits is None) == (expected.last_logits is None)
    if found.last_logits is not None:
        assert found.last_logits.tobytes() == expected.last_logits.tobytes()


# --- the same again -------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(MODELS)),
    precision=st.sampled_from(sorted(PRECISIONS)),
    blocks=st.integers(0, 40),
    pending=st.lists(st.integers(0, 35), max_size=7),
    seed=st.integers(0, 2**64 - 1),
)
def test_bytes_come_back_as_they_were(name, precision, blocks, pending, seed):
    """Every kind of port at every precision, through bytes, into another slot and engine."""
    one, two = (Holder(MODELS[name], PRECISIONS[precision]) for _ in range(2))
    one.fill(2, 8 * blocks, seed % 1000)
    state = Snapshot.take(one, 2, tuple(pending), seed)
    found = Snapshot.from_bytes(state.to_bytes())
    assert_same(found, state)
    assert found.to_bytes() == state.to_bytes()
    two.fill(0, 24)
    found.restore(two, 0)
    assert_same(Snapshot.take(two, 0, tuple(pending), seed), state)


def test_a_file_holds_the_same_bytes(tmp_path):
    """What is loaded is what was saved; a file that is there is replaced."""
    file = tmp_path / "my.state"
    taken(8).save(file)
    taken().save(file)
    assert file.read_bytes() == taken().to_bytes()
    assert_same(Snapshot.load(file), taken())
    assert os.listdir(tmp_path) == ["my.state"]


def test_other_tools_read_and_write_the_file(tmp_path):
    """It is an ordinary safetensors file, whatever the order of its tensors."""
    file, copy = tmp_path / "my.state", tmp_path / "copy.state"
    state = Snapshot.take(Holder(MODELS["shift"], PRECISIONS["bf16"]).fill(0, 8), 0)
    state.save(file)
    tensors = safetensors.numpy.load_file(file)
    assert sorted(tensors) == ["conv_state_000", "last_logits", "ssm_state_000"]
    assert tensors["conv_state_000"].dtype == np.uint16
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["fixedstate_state"])["past_length"] == 8
    safetensors.numpy.save_file(dict(reversed(tensors.items())), copy, metadata)
    assert_same(Snapshot.load(copy), state)


def test_only_used_columns_are_kept():
    """Size follows from the tokens; what stands behind them is not seen."""
    holder = hybrid().fill(0, 40)
    before = Snapshot.take(holder, 0)
    holder.buffers.scribble(0, np.random.default_rng(0), behind=True)
    after = Snapshot.take(holder, 0)
    assert before.to_bytes() == after.to_bytes()
    spec = holder.state
    assert before.nbytes == spec.state_bytes() + 40 * spec.kv_bytes_per_token()
    assert before.arrays["key_001"].shape == (2, 40, 8)


def test_a_state_is_a_value():
    """Later passes do not change it, and nobody else can."""
    holder = hybrid().fill(0, 16)
    state = Snapshot.take(holder, 0)
    before = state.to_bytes()
    holder.fill(0, 24, seed=1)
    assert state.to_bytes() == before
    for found in (state, Snapshot.from_bytes(before)):
        with pytest.raises(ValueError, match="read-only"):
            found.arrays["ssm_state_000"][0] = 0


def test_step_state_begins_anew():
    """What a denoise pass left for the next one belongs to its block alone."""
    holder = Holder(MODELS["step"]).fill(0, 8)
    state = Snapshot.take(holder, 0)
    assert sorted(state.arrays) == ["conv_state_000", "ssm_state_000"]
    holder.buffers.scribble(1, np.random.default_rng(0), behind=False)
    state.restore(holder, 1)
    (port,) = holder.state.stepped
    assert (holder.buffers.past(port, holder.buffers.align_step(2), 2)[1] == port.reset).all()


def test_large_states_take_no_more_than_a_copy_or_two(tmp_path):
    """While they are saved and loaded; afterwards the arrays alone are held."""
    state = Snapshot.take(hybrid(slots=1).fill(0, 2**16), 0)
    assert state.nbytes > 8_000_000
    file = tmp_path / "large.state"
    tracemalloc.start()
    try:
        state.save(file)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        loaded = Snapshot.load(file)
        loading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saving < 2.2 * state.nbytes  # the library's pieces and their whole
    assert loading < 2.4 * state.nbytes  # the file, the arrays, a mask of finite values
    assert_same(loaded, state)


# --- on a real model ------------------------------------------------------------------------------

GO_ON = """
import hashlib, sys
from pathlib import Path
import numpy as np
from fixedstate.bundle import Bundle
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.snapshot import Snapshot

bundle, file, slot = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
engine = open_engine(Bundle.open(bundle), threads=1, slots=slot + 1)
state = Snapshot.load(file)
state.restore(engine, slot)
digest = hashlib.sha256()
for block in range(4):
    canvas = np.full((1, 8), 36)
    canvas[0, : len(state.pending)] = state.pending if block == 0 else 36
    digest.update(engine.denoise(canvas, slot).tobytes())
    engine.commit(np.arange(8)[None] * 3 + block, np.array([8]), slot)
digest.update(Snapshot.take(engine, slot).to_bytes())
print(digest.hexdigest())
"""


def go_on(*args, run=None):
    """What comes of a saved state, in this process or in another one."""
    if run is not None:
        return run("-c", GO_ON, *args).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-c", GO_ON, *map(str, args)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_another_process_goes_on_alike(tmp_path):
    """Logits and state four blocks further, byte for byte, from any slot."""
    bundle, file = GOLDEN / "schema-2" / "bundle", tmp_path / "my.state"
    engine = open_engine(Bundle.open(bundle), threads=1, slots=2)
    engine.commit(np.arange(16)[None] + 5, np.array([16]), 1)
    Snapshot.take(engine, 1, pending=(4, 5)).save(file)
    digest = hashlib.sha256()
    for block in range(4):
        canvas = np.array([[4, 5, *[36] * 6] if block == 0 else [36] * 8])
        digest.update(engine.denoise(canvas, 1).tobytes())
        engine.commit(np.arange(8)[None] * 3 + block, np.array([8]), 1)
    digest.update(Snapshot.take(engine, 1).to_bytes())
    assert go_on(bundle, file, 0) == go_on(bundle, file, 2) == digest.hexdigest()


GOLDENS = sorted(GOLDEN.glob("state-*.state"))


def test_every_format_has_its_golden_state():
    """Made once with tests/data/golden/make_state.py when the number goes up, and small."""
    assert [file.name for file in GOLDENS] == [f"state-{n + 1}.state" for n in range(FORMAT)]
    assert all(file.stat().st_size < 50_000 for file in GOLDENS)


@pytest.mark.parametrize("file", GOLDENS, ids=lambda file: file.name)
def test_golden_states_load_and_go_on_as_they_did(file):
    """The same state and the logits that were computed behind it then."""
    expected = dict(np.load(GOLDEN / "schema-2" / "expected.npz"))
    state = Snapshot.load(file)
    assert (state.past_length, state.pending, state.seed) == (13, (3, 5), 9)
    for name, array in state.arrays.items():
        np.testing.assert_allclose(array, expected[f"state_{name}"], atol=1e-5)
    engine = open_engine(Bundle.open(GOLDEN / "schema-2" / "bundle"), threads=1, slots=2)
    state.restore(engine, 1)
    logits = engine.denoise(expected["ids"][:, 16:], 1)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("hybrid", {"weights": "f" * 64}, r"weights 0123456789abcdef\.\.\.,.* has ffffffffffff"),
        ("hybrid", {"weights": ""}, r"weights 0123456789abcdef\.\.\.,.* has unknown"),
        (
            "hybrid",
            {"precision": PRECISIONS["fp16"]},
            r"past_conv_state_000 float32 \[B, 96, 3\] .* past_conv_state_000 float16 \[B, 96, 3\]",
        ),
        ("window", {}, r"holds past_conv_state_000 .* wants past_key_000 float32 \[B, 2, 18, 8\]"),
        ("linear", {}, r"holds past_conv_state_000 .* wants past_ssm_state_000"),
        ("stateless", {}, r"holds past_conv_state_000 .*, this model wants no such port"),
    ],
)
def test_another_model_is_refused(spec, options, words):
    """With both sides shown, and nothing changed."""
    holder = Holder(MODELS[spec], **options).fill(0, 8)
    before = holder.buffers.hash()
    with pytest.raises(StateError, match=words):
        taken().restore(holder, 0)
    assert holder.buffers.hash() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_len": 4, "pending": ()}, "blocks of 4 tokens, this model has blocks of 8"),
        ({"pending": (1, 37)}, r"pending ids of the state: id 37 at place 1 is outside"),
        ({"pending": (36,)}, "pending ids of the state: id 36 at place 0 is the mask"),
        ({"pending": (-1,)}, "pending ids of the state: id -1"),
        ({"last_logits": np.zeros(40, np.float32)}, "has 40 last_logits, this model wants none"),
    ],
)
def test_parts_that_do_not_fit_the_model_are_refused(changes, words):
    """A state is whole: one wrong part and none of it is used."""
    holder = hybrid().fill(0, 8)
    before = holder.buffers.hash()
    with pytest.raises(StateError, match=words):
        replace(taken(), **changes).restore(holder, 0)
    assert holder.buffers.hash() == before


def test_lengths_inside_a_block_are_refused_where_wrong():
    """Only a commit pass that does not look ahead can have stopped there."""
    with pytest.raises(StateError, match=r"inside a block \(13 tokens, blocks of 8\)"):
        taken(13).check(hybrid())
    forward = Holder(model(mamba_layer("forward"))).fill(0, 13)
    Snapshot.take(forward, 0).restore(forward, 1)
    assert forward.past_length.tolist() == [13, 13, 0]


def test_shifted_models_need_their_last_logits():
    """Without them the first slot of the next block would be predicted from nothing."""
    holder = Holder(MODELS["shift"]).fill(0, 8)
    state = Snapshot.take(holder, 0)
    with pytest.raises(StateError, match="has no last_logits, this model wants 40"):
        replace(state, last_logits=None).restore(holder, 1)
    with pytest.raises(StateError, match=r"no last_logits of 8 tokens; expected float32 \(40,\)"):
        holder.write(1, state.arrays, 8)
    state.restore(holder, 1)
    assert (holder.last_logits[1] == holder.last_logits[0]).all()


def test_room_is_checked_before_anything_is_written(monkeypatch):
    """Neither a limit nor a lack of memory leaves half a row."""
    state = taken(264)
    small = hybrid(limit=256).fill(0, 8)
    before = small.buffers.hash()
    with pytest.raises(CapacityError, match="264 committed tokens; the limit is 256"):
        state.restore(small, 1)
    assert small.buffers.hash() == before
    roomy = hybrid().fill(0, 8)
    before = roomy.buffers.hash()

    def full(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", full)
        with pytest.raises(CapacityError, match="no memory for past_key_001"):
            state.restore(roomy, 1)
    assert roomy.buffers.hash() == before
    state.restore(roomy, 1)
    assert (roomy.buffers.capacity, roomy.past_length.tolist()) == (512, [8, 264, 0])


@pytest.mark.parametrize("row", [-1, 3])
def test_slots_that_are_not_there_are_refused(row):
    """numpy would count from the end."""
    with pytest.raises(UsageError, match=rf"slot {row} is none of 0\.\.2"):
        Snapshot.take(hybrid(), row)
    with pytest.raises(UsageError, match=rf"slot {row} is none of 0\.\.2"):
        taken().restore(hybrid(), row)


def test_engines_without_state_are_refused():
    """A model of objective full recomputes everything: there is nothing to save."""
    holder = hybrid()
    holder.whole_blocks = False
    for call in (lambda: Snapshot.take(holder, 0), lambda: taken().check(holder)):
        with pytest.raises(UsageError, match="carries no state that could be saved"):
            call()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_states_are_finite(precision, value):
    """One NaN would be in every later token; the port that holds it is named."""
    holder = Holder(MODELS["hybrid"], PRECISIONS[precision]).fill(1, 16)
    arrays = holder.read(1)
    bits = np.float32(value).view(np.uint32) >> 16  # its bfloat16
    arrays["value_001"][1, 3, 2] = bits if precision == "bf16" else value
    holder.write(1, arrays, 16)
    with pytest.raises(StateError, match="'value_001' holds NaN or infinity after 16 tokens"):
        Snapshot.take(holder, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pending": tuple(range(8))}, "8 pending tokens in blocks of 8"),
        ({"past_length": -1}, "-1 committed tokens"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"past_length": 8}, r"'key_001' has shape \[2, 16, 8\] .* expected \[2, 8, 8\] float32"),
        ({"arrays": {}}, "'conv_state_000' is missing; the ports are conv_state_000, ssm_state"),
        ({"last_logits": np.zeros((1, 40), np.float32)}, r"last_logits are float32 \[1, 40\]"),
    ],
)
def test_contradictions_are_refused_where_a_state_is_made(changes, words):
    """No such value exists, so none can be restored."""
    with pytest.raises(StateError, match=words):
        replace(taken(), **changes)


def test_arrays_of_other_dtypes_and_names_are_refused():
    """A cast would change numbers, and a port that is not carried would be forgotten."""
    arrays = dict(taken().arrays)
    with pytest.raises(StateError, match="'ssm_state_000' has shape .* and dtype float64"):
        replace(taken(), arrays={**arrays, "ssm_state_000": arrays["ssm_state_000"].astype("f8")})
    with pytest.raises(StateError, match="'ssm_state_009' is unknown"):
        replace(taken(), arrays={**arrays, "ssm_state_009": arrays["ssm_state_000"]})


def test_unknown_weights_are_not_saved():
    """In memory such a state may go from row to row; a file could go anywhere."""
    holder = hybrid(weights="").fill(0, 8)
    state = Snapshot.take(holder, 0)
    state.restore(holder, 1)
    with pytest.raises(StateError, match="weights of this state are not known"):
        state.to_bytes()


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    """Whole or not at all, and nothing beside it."""
    file = tmp_path / "my.state"
    taken(8).save(file)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="my.state failed: No space left on device"):
        taken(16).save(file)
    assert file.read_bytes() == taken(8).to_bytes()
    assert os.listdir(tmp_path) == ["my.state"]


# --- damaged files --------------------------------------------------------------------------------


def rewritten(change, *, seal=True):
    """The bytes of a state whose header and tensors `change` has edited, sealed again or not."""
    data = taken().to_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    metadata = json.loads(header["__metadata__"]["fixedstate_state"])
    body = change(header, metadata, body) or body
    if seal:
        rest = {name: value for name, value in metadata.items() if name != "sha256"}
        content = json.dumps(rest, sort_keys=True).encode()
        metadata["sha256"] = hashlib.sha256(content).hexdigest()
    header["__metadata__"] = {"fixedstate_state": json.dumps(metadata)} if metadata else {}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_what_was_not_changed_loads():
    """The editor of these tests makes files that are right but for the change."""
    assert_same(Snapshot.from_bytes(rewritten(lambda header, metadata, body: None)), taken())


@given(st.data())
def test_no_damaged_byte_goes_unseen(data):
    """Any one byte, anywhere: refused, or (a blank in the header) the same state."""
    content = bytearray(taken(8).to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    try:
        found = Snapshot.from_bytes(bytes(content))
    except StateError:
        return
    assert_same(found, taken(8))


@given(st.integers(0, 10**6))
def test_no_missing_end_goes_unseen(cut):
    """A copy that stopped half way is no shorter state."""
    content = taken().to_bytes()
    with pytest.raises(StateError):
        Snapshot.from_bytes(content[: cut % len(content)])
    with pytest.raises(StateError, match="no saved state, or damaged"):
        Snapshot.from_bytes(content + b"\0" * (cut % 9 + 1))


def test_the_damaged_tensor_is_named():
    """So that one knows what it would have done."""

    def flip(header, metadata, body):
        place = header["value_001"]["data_offsets"][0]
        return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]

    with pytest.raises(StateError, match="a copy is damaged in 'value_001'"):
        Snapshot.from_bytes(rewritten(flip), "a copy")


def _set(**values):
    return lambda header, metadata, body: metadata.update(values)


def _drop(name):
    def change(header, metadata, body):
        begin, end = header.pop(name)["data_offsets"]
        for entry in header.values():
            if "data_offsets" in entry and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]
        return body[:begin] + body[end:]

    return change


def _add(header, metadata, body):
    header["more"] = {"dtype": "U8", "shape": [3], "data_offsets": [len(body), len(body) + 3]}
    return body + b"abc"


def _shape(header, metadata, body):
    header["key_001"]["shape"].reverse()


def _nan(header, metadata, body):
    begin, end = header["key_001"]["data_offsets"]
    raw = np.full((end - begin) // 4, np.nan, np.float32).tobytes()
    metadata["tensors"]["key_001"] = hashlib.sha256(raw).hexdigest()
    return body[:begin] + raw + body[end:]


@pytest.mark.parametrize(
    ("change", "seal", "words"),
    [
        (_set(format=FORMAT + 1), True, f"format {FORMAT + 1}, .* up to {FORMAT}:"),
        (_set(format="one"), True, "'one' is no format number"),
        (_set(seed=8), False, "metadata are not those that were saved"),
        (_set(more="x"), True, "its metadata lack or add more"),
        (_set(past_length="sixteen"), True, "damaged: its past_length is 'sixteen'"),
        (_set(past_length=8), True, r"'key_001' has shape \[2, 16, 8\]"),
        (_set(pending=[0, 1, 2, 3, 4, 5, 6, 7]), True, "8 pending tokens in blocks of 8"),
        (_set(state=[{"layer": 0}]), True, "is damaged: StatePort lacks the keys"),
        (_set(state=[]), True, "is unknown"),
        (_set(last_logits=True), True, "last_logits contradict"),
        (lambda header, metadata, body: metadata.clear(), False, "but no saved state"),
        (_drop("key_001"), True, "lacks tensor 'key_001'"),
        (_add, True, "holds an unknown tensor 'more'"),
        (_shape, True, r"'key_001' has shape \[8, 16, 2\]"),
        (_nan, True, "a.state: state 'key_001' holds NaN"),
    ],
)
def test_damage_is_named(change, seal, words):
    """Each with what was found and what to do."""
    with pytest.raises(StateError, match=words):
        Snapshot.from_bytes(rewritten(change, seal=seal), "a.state")


def test_files_that_are_no_states_are_refused(tmp_path):
    """By what they are."""
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3)}, other)
    text = tmp_path / "text"
    text.write_text("a prompt, not a state")
    deep = tmp_path / "deep"
    deep.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5)
    for path, words in (
        (other, "other.safetensors is a safetensors file, but no saved state"),
        (text, "text is no saved state, or damaged"),
        (deep, "deep is no saved state"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "none", "none does not exist: make it with `fixedstate prefix make`"),
    ):
        with pytest.raises(StateError, match=words):
            Snapshot.load(path)
