"""The flight recorder: the same bytes again, or the first pass, layer and port that differ."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import MASK, ScriptedEngine, noise_table, small_spec
from toy_bundle import write_toy_bundle

from fixedstate.bundle import MANIFEST, WEIGHTS, Bundle
from fixedstate.errors import CapacityError, StateError, UsageError
from fixedstate.runtime import Request, Settings
from fixedstate.runtime.decoder import Decoder
from fixedstate.runtime.decoder import open_engine as open_decoding
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.policies import Reveal
from fixedstate.runtime.recorder import Recorder
from fixedstate.runtime.recording import (
    HEADER,
    RING,
    Begun,
    Commit,
    Ended,
    Layout,
    Pass,
    Recording,
    hash_policy,
)
from fixedstate.runtime.replay import incomparable, open_engine, replay, replay_bundle
from fixedstate.runtime.ring import OVERHEAD, Ring, read_ring
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.state import Precision

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
MAMBA = Bundle.open(GOLDEN)
COLD = Settings(40, steps=4, stop_ids=())
HOT = Settings(40, steps=4, stop_ids=(), temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """Attention and Mamba-2 with the fused graph."""
    folder = tmp_path_factory.mktemp("fused") / "toy.bundle"
    roles = ("denoise", "commit", "commit_denoise")
    return Bundle.open(write_toy_bundle(folder, roles=roles))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "recording"


def prompt(count, seed=0):
    return np.random.default_rng(seed).integers(3, 30, count)


def requests(*settings):
    """Prompts of different lengths, one for each of the settings."""
    return [Request(prompt(3 + 9 * i, i), each) for i, each in enumerate(settings)]


def record(folder, bundle, asked, *, slots=2, every=2, engine=None, **options):
    """Decode and record; returns the results."""
    engine = engine or open_decoding(bundle, threads=1, slots=slots)
    started = Recorder.start(folder, engine, bundle, threads=1, every=every, **options)
    with started, Decoder(bundle, engine) as decoder:
        return decoder.generate(asked, watcher=started)


def repeat(folder, bundle, **options):
    return replay_bundle(Recording.open(folder), bundle, **options)


def found(report):
    """What and where of the first difference."""
    first = report.difference
    return first.request, first.block, first.step, first.what


# --- the ring ------------------------------------------------------------------------------------


@given(
    events=st.lists(st.binary(max_size=40), max_size=30),
    payload=st.integers(1, 12),
    length=st.integers(41, 60),
)
def test_ring_gives_back_the_newest_events(tmp_path_factory, events, payload, length):
    """In order and whole; the file has its size from the start."""
    path = tmp_path_factory.mktemp("ring") / "ring"
    ring = Ring(path, payload, length)
    size = path.stat().st_size
    numbers = [ring.append(event) for event in events]
    ring.close()
    assert path.stat().st_size == size == (payload + OVERHEAD) * length
    log = read_ring(path, payload, length)
    count = len(log.events)
    assert log.events == tuple(zip(numbers, events, strict=True))[len(events) - count :]
    kept = [number for number in numbers if number >= ring.next - length]
    assert [number for number, _ in log.events] == kept
    assert (log.end, log.lost) == (ring.next, 0)


@pytest.mark.parametrize("events", [5, 12, 13, 40])
def test_torn_last_cell_is_dropped(tmp_path, events):
    """Half of the last cell was written when the process was killed."""
    ring = Ring(tmp_path / "ring", 8, 12)
    for number in range(events):
        ring.append(b"event%03d" % number)
    ring.close()
    data = bytearray((tmp_path / "ring").read_bytes())
    cell = 8 + OVERHEAD
    start = (events - 1) % 12 * cell
    data[start + 20 : start + cell] = bytes(cell - 20)
    (tmp_path / "ring").write_bytes(data)
    log = read_ring(tmp_path / "ring", 8, 12)
    first = max(0, events - 12)
    assert [number for number, _ in log.events] == list(range(first, events - 1))
    assert log.lost == 0


def test_damage_in_the_middle_leaves_the_longest_stretch(tmp_path):
    """What is cut off is counted; events that lack a cell are not read."""
    ring = Ring(tmp_path / "ring", 4, 20)
    for number in range(8):
        ring.append(b"%08d" % number)  # two cells each
    ring.close()
    data = bytearray((tmp_path / "ring").read_bytes())
    data[5 * (4 + OVERHEAD) + 17] ^= 1
    (tmp_path / "ring").write_bytes(data)
    log = read_ring(tmp_path / "ring", 4, 20)
    assert [event for _, event in log.events] == [b"%08d" % number for number in range(3, 8)]
    assert (log.begin, log.end, log.lost) == (6, 16, 5)


def test_ring_refuses_what_does_not_fit(tmp_path):
    """An event that would write over its own beginning; a file of another size."""
    ring = Ring(tmp_path / "ring", 4, 3)
    with pytest.raises(CapacityError, match="13 bytes does not fit a ring of 3 cells of 4"):
        ring.append(bytes(13))
    ring.close()
    with pytest.raises(StateError, match="expected 4 cells"):
        read_ring(tmp_path / "ring", 4, 4)
    with pytest.raises(StateError, match="cannot be made"):
        Ring(tmp_path / "ring", 4, 3)


def test_events_come_back_as_they_were():
    """Every field of every kind, through bytes."""
    layout = Layout(8, 3)
    before, after = np.arange(8, dtype=np.int32), np.arange(8, 16, dtype=np.int32)
    passed = {"block": 7, "step": 3, "past_length": 2**40, "seed": 2**64 - 1, "made": 9, "fixed": 2}
    data = layout.pack_pass(
        5, 70000, b"text", again=True, before=before, after=after,
        logits=bytes(range(16)), policy=bytes(16), **passed,
    )  # fmt: skip
    event = layout.unpack(11, data)
    assert isinstance(event, Pass)
    assert {name: getattr(event, name) for name in passed} == passed
    assert (event.number, event.request, event.again) == (11, 70000, True)
    assert (event.logits, event.policy, event.policy_text) == (bytes(range(16)), bytes(16), b"text")
    assert event.before.tolist() == before.tolist()
    assert event.after.tolist() == after.tolist()
    ids, hashes = np.array([4, 5, 31999]), bytes(range(48))
    data = layout.pack_commit(
        1, 2, block=3, past_length=8, fused=True, ids=ids, ports=hashes, last_logits=b"x" * 16
    )
    event = layout.unpack(0, data)
    assert isinstance(event, Commit)
    assert (event.request, event.block, event.past_length, event.fused) == (2, 3, 8, True)
    assert event.ports == (hashes[:16], hashes[16:32], hashes[32:])
    assert (event.ids.tolist(), event.last_logits) == ([4, 5, 31999], b"x" * 16)
    event = layout.unpack(
        0, layout.pack_ended(1, 2, {"reason": "stop", "error": None, "tokens": 3})
    )
    assert event == Ended(0, 2, "stop", None, 3)


# --- the same again ------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["two graphs", "fused", "one graph", "hybrid"])
def test_replay_is_identical_byte_for_byte(folder, bundle_path, fused, name, slots):
    """Greedy and sampled, alone and side by side, whichever graphs commit."""
    bundle = MAMBA if name == "two graphs" else fused
    if name == "hybrid":
        bundle = Bundle.open(bundle_path("F3", fused=True))
    memory = "lean" if name == "one graph" else None
    engine = open_decoding(bundle, threads=1, slots=slots, memory=memory)
    results = record(folder, bundle, requests(COLD, HOT, COLD, HOT), slots=slots, engine=engine)
    recording = Recording.open(folder)
    commits = [event for event in recording.events if isinstance(event, Commit)]
    assert any(event.fused for event in commits) == (name != "two graphs")
    report = repeat(folder, bundle)
    assert (report.passed, report.compared, report.reasons) == (True, "bytes", ())
    assert [each.start for each in report.requests] == ["the beginning"] * 4
    assert report.total("passes") == sum(result.denoise_passes for result in results)
    assert report.total("commits") == len(commits)
    assert report.total("states") >= 4


def test_recording_changes_no_token(folder, fused):
    """A watcher only looks."""
    asked = requests(COLD, HOT, HOT)
    with Decoder(fused, open_decoding(fused, threads=1, slots=2)) as decoder:
        plain = decoder.generate(asked)
    watched = record(folder, fused, asked)
    assert [result.token_ids for result in watched] == [result.token_ids for result in plain]


@pytest.mark.parametrize(("block", "start"), [(0, None), (1, None), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_replay_begins_at_the_state_before_a_block(folder, fused, block, start):
    """The last one that lies before it; the beginning where none does."""
    record(folder, fused, requests(HOT, HOT), every=2)
    report = repeat(folder, fused, from_block=block, request=1)
    assert report.passed
    (only,) = report.requests
    assert only.start == (f"block {start}" if start else "the beginning")
    events = [e for e in Recording.open(folder).of(1) if isinstance(e, Pass)]
    assert only.passes == sum(event.block >= (start or 0) for event in events)


def test_requests_that_go_on_from_a_state_are_repeated_from_it(folder, fused):
    """A saved prefix is kept with the request; the state behind an answer is checked too."""
    with Decoder(fused, open_decoding(fused, threads=1)) as decoder:
        prefix = decoder.prefill(prompt(21))
    asked = [Request(prompt(6, 1), HOT, prefix=prefix, keep_state=True)]
    (result,) = record(folder, fused, asked)
    recording = Recording.open(folder)
    begun = recording.events[0]
    assert isinstance(begun, Begun)
    assert (begun.past_length, begun.prompt) == (16, 11)
    assert recording.states[0].load().arrays.keys() == prefix.arrays.keys()
    last = [event for event in recording.events if isinstance(event, Commit)][-1]
    assert last.past_length + len(last.ids) == result.state.past_length
    assert repeat(folder, fused).passed


def test_requests_that_share_a_beginning_share_its_saved_state(folder, fused):
    """Ten of them need one file; a beginning that was written over is saved again."""
    with Decoder(fused, open_decoding(fused, threads=1)) as decoder:
        prefixes = [decoder.prefill(prompt(16, seed)) for seed in range(6)]
    short = Settings(8, steps=2, stop_ids=())
    order = [0] * 10 + [1, 2, 3, 4, 0]
    asked = [Request(prompt(3, i), short, prefix=prefixes[which]) for i, which in enumerate(order)]
    record(folder, fused, asked, slots=1, every=64)
    recording = Recording.open(folder)
    assert len({state.key for state in recording.states}) == len(recording.states) == 4
    starts = {each.request: each.start for each in repeat(folder, fused).requests}
    assert {number for number, start in starts.items() if not start} == {10}
    assert repeat(folder, fused, request=3).passed


def test_passes_that_were_not_run_again_are_known(folder):
    """A canvas that stayed as it was keeps its logits."""
    spec = small_spec()
    engine = Visible(spec, noise_table(spec), slots=1)
    asked = [Request((1, 2, 3), Settings(16, policy=Waits(4), stop_ids=()))]
    record(folder, fake_bundle(spec), asked, engine=engine)
    recording = Recording.open(folder)
    passes = [event for event in recording.events if isinstance(event, Pass)]
    assert [event.again for event in passes[:4]] == [False, True, True, True]
    report = replay(recording, Visible(spec, noise_table(spec)), policies={0: Waits(4)})
    assert report.passed
    (only,) = report.requests
    assert (only.passes, only.note) == (len(passes), "")
    (only,) = replay(recording, Visible(spec, noise_table(spec))).requests
    assert only.note == "choices were not compared: the policy Waits is not known here"


@pytest.mark.parametrize("shift", [False, True])
def test_shifted_logits_and_minimum_lengths_are_repeated(folder, shift):
    """What the policy saw is hashed, not what the pass gave."""
    spec = small_spec(logit_shift=shift)
    asked = [Request(prompt(11), Settings(20, 9, steps=3, temperature=1.0, seed=4))]
    record(folder, fake_bundle(spec), asked, engine=Visible(spec, noise_table(spec), slots=2))
    report = replay(Recording.open(folder), Visible(spec, noise_table(spec)))
    assert report.passed
    assert report.total("passes") > 3


def test_rows_that_end_with_an_error_are_repeated(folder):
    """Scores that are not finite fill nothing, then and now; the rest of the requests goes on."""

    def table(history, ids):
        out = noise_table(spec)(history, ids)
        return out * np.nan if len(history) == 16 and history[0] == 3 else out

    spec = small_spec()
    asked = [Request((3, 4), COLD), Request((5, 4), COLD)]
    results = record(folder, fake_bundle(spec), asked, engine=Visible(spec, table, slots=2))
    assert [result.finish_reason for result in results] == ["error", "length"]
    recording = Recording.open(folder)
    ended = [event for event in recording.events if isinstance(event, Ended)]
    assert [(event.request, event.reason) for event in ended] == [(0, "error"), (1, "length")]
    assert "scores are not finite in block 2" in ended[0].error
    assert replay(recording, Visible(spec, table)).passed


def test_answers_that_are_not_kept_are_repeated(folder):
    """Where a token may stand depends on their number alone."""
    settings = Settings(20, 15, steps=3, temperature=1.0, seed=4)
    spec = small_spec()
    engine = Visible(spec, noise_table(spec), slots=1)
    asked = [Request(prompt(11), settings, keep_tokens=False)]
    (result,) = record(folder, fake_bundle(spec), asked, engine=engine)
    assert result.token_ids == ()
    assert replay(Recording.open(folder), Visible(spec, noise_table(spec))).passed


def test_whole_sequences_are_repeated_from_their_prompts(folder):
    """Objective full: prompts of any length in one commit, no state to save or to hash."""
    spec = small_spec(objective="full")
    engine = FullEngine(spec, {"full": WholeGraph(spec)}, slots=2)
    record(folder, fake_bundle(spec), requests(COLD, HOT, COLD), engine=engine, every=1)
    recording = Recording.open(folder)
    assert (recording.header.states, recording.header.unsaved) == (0, "")
    report = replay(recording, FullEngine(spec, {"full": WholeGraph(spec)}), from_block=2)
    assert report.passed
    assert [each.start for each in report.requests] == ["the beginning"] * 3
    assert min(each.commits for each in report.requests) >= 5


def test_a_policy_that_reads_all_scores_has_all_of_them_hashed(folder):
    """A score of a filled slot counts for it, and for no other policy."""
    spec = small_spec()

    def changed(history, ids):
        out = noise_table(spec)(history, ids)
        out[0] += (ids[0] != MASK) * (len(history) == 8)
        return out

    asked = [Request((1,), Settings(16, policy=Reads(4), stop_ids=())), Request((1,), COLD)]
    record(folder, fake_bundle(spec), asked, engine=Visible(spec, noise_table(spec)))
    recording = Recording.open(folder)
    assert replay(recording, Visible(spec, noise_table(spec)), policies={0: Reads(4)}).passed
    report = replay(recording, Visible(spec, changed), policies={0: Reads(4)})
    assert [each.difference is None for each in report.requests] == [False, True]
    assert report.difference.what == "logits"


def test_killed_process_leaves_a_recording(tmp_path):
    """Everything up to the kill can be repeated."""
    program = (
        "import sys\n"
        "from fixedstate.bundle import Bundle\n"
        "from fixedstate.runtime import Request, Settings\n"
        "from fixedstate.runtime.decoder import Decoder, open_engine\n"
        "from fixedstate.runtime.recorder import Recorder\n"
        f"bundle = Bundle.open({str(GOLDEN)!r})\n"
        "engine = open_engine(bundle, threads=1)\n"
        "recorder = Recorder.start(__import__('pathlib').Path('rec'), engine, bundle, threads=1)\n"
        "request = Request([3, 4], Settings(10**6, steps=2, stop_ids=()))\n"
        "for event in Decoder(bundle, engine).stream([request], watcher=recorder):\n"
        "    print(event.block, flush=True)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as child:
        blocks = [int(child.stdout.readline()) for _ in range(200)]
        os.kill(child.pid, signal.SIGKILL)
    recording = Recording.open(tmp_path / "rec")
    assert (recording.lost, recording.damaged) == (0, ())
    last = [event for event in recording.events if isinstance(event, Pass)][-1]
    assert last.block >= blocks[-1]
    assert not any(isinstance(event, Ended) for event in recording.events)
    report = replay_bundle(recording, MAMBA, from_block=150)
    assert report.passed
    assert report.requests[0].start == "block 128"


def test_snapshot_of_a_recording_is_a_snapshot(folder):
    """It can be gone on from like any other."""
    record(folder, MAMBA, [Request((3, 4), COLD)])
    saved = Recording.open(folder).states[-1]
    taken = saved.load()
    assert isinstance(taken, Snapshot)
    assert (taken.past_length, taken.weights) == (8 * saved.block, MAMBA.weights)


# --- bounds --------------------------------------------------------------------------------------


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_bytes_stay_constant_over_two_thousand_blocks(folder):
    """Ring and saved states are written over; what is left can be repeated from a saved state."""
    engine = open_decoding(MAMBA, threads=1, slots=2)
    options = {"every": 25, "length": 1 << 12}
    settings = Settings(8000, steps=2, stop_ids=(), temperature=1.0)
    blocks, seen = 0, {}
    with Recorder.start(folder, engine, MAMBA, threads=1, **options) as started:
        scheduler = Scheduler(engine, MAMBA.decode, watcher=started)
        for seed in (1, 2):
            scheduler.submit(Request((5, 6), replace(settings, seed=seed)))
        while not scheduler.idle:
            blocks += len(scheduler.tick())
            if blocks % 100 == 0:
                seen[blocks] = sizes(folder)
    assert blocks == 2002
    assert set(seen) == set(range(0, 2001, 100))
    assert all(seen[count] == seen[200] for count in range(200, 2001, 100))
    assert sizes(folder) == seen[200]
    recording = Recording.open(folder)
    assert len(recording.states) == 8
    assert not any(isinstance(event, Begun) for event in recording.events)
    report = replay_bundle(recording, MAMBA)
    assert report.passed
    assert [each.start for each in report.requests] == ["block 925", "block 925"]


def test_a_state_beyond_the_budget_is_not_saved(folder, fused):
    """The header says so, decoding goes on, and the beginning serves while the ring holds it."""
    record(folder, fused, requests(COLD), slots=1, state_bytes=4 * 70000)
    header = Recording.open(folder).header
    assert (header.states, header.unsaved) == (4, "")
    record(folder, fused, requests(COLD), force=True, state_bytes=60000)
    recording = Recording.open(folder)
    assert (recording.header.states, recording.states) == (0, ())
    assert "more than the 60000 of all states" in recording.header.unsaved
    assert replay_bundle(recording, fused, from_block=4).requests[0].start == "the beginning"


def test_states_that_outgrow_their_file_are_not_saved(folder, fused):
    """Keys and values grow with the context, the budget does not."""
    engine = open_decoding(fused, threads=1)
    budget = 4 * (engine.state_bytes() + (1 << 16))
    settings = Settings(8 * 640, steps=1, stop_ids=())
    record(folder, fused, [Request((5,), settings)], engine=engine, every=4, state_bytes=budget)
    recording = Recording.open(folder)
    assert "bytes, more than the" in recording.header.unsaved
    assert 0 < len(recording.states) <= 4
    assert sum(path.stat().st_size for path in folder.glob("state-*")) <= budget


def test_what_left_the_ring_is_said(folder):
    """A request without a beginning and without a state cannot be repeated."""
    asked = [Request((5,), Settings(8 * 4200, steps=1, stop_ids=()))]
    spec = small_spec()
    record(folder, fake_bundle(spec), asked, engine=Visible(spec), length=1 << 12, state_bytes=0)
    with pytest.raises(StateError, match="its beginning has left the ring"):
        replay(Recording.open(folder), Visible(spec))


# --- faults, located -----------------------------------------------------------------------------


def flipped(tmp_path, name, element, bit):
    """A copy of the golden bundle in which one bit of one weight is another one."""
    copy = tmp_path / "flipped.bundle"
    copy.mkdir()
    for file in GOLDEN.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = bytearray((copy / WEIGHTS).read_bytes())
    (size,) = struct.unpack_from("<Q", data)
    entry = json.loads(data[8 : 8 + size])[name]
    data[8 + size + entry["data_offsets"][0] + 4 * element + bit // 8] ^= 1 << bit % 8
    (copy / WEIGHTS).write_bytes(data)
    bundle = replace(MAMBA, path=copy, weights=hashlib.sha256(data).hexdigest())
    (copy / MANIFEST).write_bytes(bundle.manifest())
    return Bundle.open(copy)


@pytest.mark.parametrize("layer", [0, 1])
def test_one_bit_of_one_weight_is_located(folder, tmp_path, layer):
    """The first pass whose logits differ, then the layer whose weight it is."""
    name = f"layers.{layer}.mixer.in_proj.weight.1"
    record(folder, MAMBA, [Request((3, 4), COLD)], slots=1)
    other = flipped(tmp_path, name, 700, 22)
    report = repeat(folder, other)
    assert (report.passed, report.compared) == (False, "bytes")
    assert report.reasons == ("the weights are others than those that were recorded",)
    assert found(report) == (0, 0, 0, "logits")
    behind = report.difference.behind
    assert (behind.what, behind.layer, behind.step) == ("state", layer, None)
    assert behind.port == f"conv_state_{layer:03d}"
    assert repeat(folder, MAMBA).passed


def test_a_weight_behind_the_last_state_shows_in_no_port(folder, tmp_path):
    """The report says where it must be then."""
    record(folder, MAMBA, [Request((3, 4), COLD)], slots=1)
    report = repeat(folder, flipped(tmp_path, "layers.1.mixer.out_proj.weight", 5, 22))
    assert found(report) == (0, 0, 0, "logits")
    assert report.difference.behind is None
    assert "the cause lies behind the last state" in report.difference.text


@pytest.mark.parametrize("name", ["two graphs", "fused"])
def test_one_swapped_port_is_located(folder, tmp_path, bundle_path, name):
    """The commit at which it was swapped, and the first of the two layers."""
    bundle = MAMBA if name == "two graphs" else Bundle.open(bundle_path("F2", fused=True))
    engine = open_decoding(bundle, threads=1, slots=2)
    inner = engine.buffers.commit
    calls = []

    def commit(rows, commit_length, columns, last_logits=None, first=0):
        inner(rows, commit_length, columns, last_logits, first)
        calls.append(first)
        if len(calls) == 3:
            views = engine.views(first)
            kept = views["ssm_state_000"].copy()
            views["ssm_state_000"][:] = views["ssm_state_001"]
            views["ssm_state_001"][:] = kept

    engine.buffers.commit = commit
    record(folder, bundle, [Request((3, 4), COLD)], engine=engine)
    report = repeat(folder, bundle)
    first = report.difference
    assert (first.what, first.layer, first.port) == ("state", 0, "ssm_state_000")
    assert (first.request, first.block, first.step, first.past_length) == (0, 3, None, 16)
    assert "commit behind 16 tokens" in str(first)
    # a state that was saved behind the fault holds it, so from there on all is as recorded
    assert repeat(folder, bundle, from_block=4).passed


def test_a_changed_column_of_keys_is_located(folder, fused):
    """Of keys and values the columns that a commit adds are hashed."""
    engine = open_decoding(fused, threads=1)
    inner = engine.buffers.commit

    def commit(rows, commit_length, columns, last_logits=None, first=0):
        if engine.past_length[first] == 24:
            columns["key_000"][0, 0, 3] += 1
        inner(rows, commit_length, columns, last_logits, first)

    engine.buffers.commit = commit
    record(folder, fused, [Request((3, 4), COLD)], engine=engine)
    first = repeat(folder, fused).difference
    assert (first.what, first.layer, first.port, first.past_length) == ("state", 0, "key_000", 24)


def test_a_changed_seed_is_located(folder, monkeypatch):
    """The first pass where a choice differs although the logits are equal."""
    from fixedstate.runtime import scheduler

    inner = scheduler.uniforms

    def uniforms(seed, past_length, step, length):
        return inner(seed + (past_length >= 24), past_length, step, length)

    monkeypatch.setattr(scheduler, "uniforms", uniforms)
    record(folder, MAMBA, requests(COLD, replace(HOT, temperature=3.0)))
    report = repeat(folder, MAMBA)
    first = report.difference
    assert found(report)[0::3] == (1, "choice")
    assert first.past_length == 24
    assert first.step == 0
    assert "the logits are equal: seed or policy differ" in first.text


def test_a_seed_that_is_not_the_requests_is_named(folder, monkeypatch):
    """Both stand in the recording: the one of the request, and that of every pass."""
    from fixedstate.runtime import recorder

    inner = recorder.rules_to_dict
    monkeypatch.setattr(recorder, "rules_to_dict", lambda rules: {**inner(rules), "seed": 6})
    record(folder, MAMBA, [Request((3,), HOT)])
    report = repeat(folder, MAMBA)
    assert found(report) == (0, 0, 0, "seed")
    assert "ran with seed 5, the request has seed 6" in report.difference.text


def test_a_canvas_changed_between_passes_is_located(folder):
    """Nothing but the policy may write it."""
    engine = open_decoding(MAMBA, threads=1)
    started = Recorder.start(folder, engine, MAMBA, threads=1)
    scheduler = Scheduler(engine, MAMBA.decode, watcher=started)
    scheduler.submit(Request((3, 4), COLD))
    for _ in range(6):
        scheduler.tick()
    scheduler._canvas[0, np.flatnonzero(scheduler._canvas[0] != MASK)[0]] = 9
    while not scheduler.idle:
        scheduler.tick()
    started.close()
    report = repeat(folder, MAMBA)
    assert found(report) == (0, 1, 2, "canvas")


def test_the_first_difference_is_the_one_recorded_first(folder, monkeypatch):
    """Of several requests, whatever their numbers."""
    from fixedstate.runtime import scheduler

    inner = scheduler.uniforms

    def uniforms(seed, past_length, step, length):
        late = 32 if seed == 5 else 8
        return inner(seed + (past_length >= late), past_length, step, length)

    monkeypatch.setattr(scheduler, "uniforms", uniforms)
    hot = replace(HOT, temperature=3.0)
    record(folder, MAMBA, [Request((3,), hot), Request((3,), replace(hot, seed=9))])
    report = repeat(folder, MAMBA)
    assert [each.difference.past_length for each in report.requests] == [32, 8]
    assert report.difference.request == 1


# --- other back ends -----------------------------------------------------------------------------


def test_more_threads_compare_tokens_and_states(folder):
    """Bytes need not be equal there; the report says why."""
    record(folder, MAMBA, requests(COLD, HOT))
    report = repeat(folder, MAMBA, threads=2)
    assert (report.passed, report.compared) == (True, "numbers")
    assert report.reasons == ("threads 2, recorded 1",)
    assert report.total("states") >= 2


def test_what_makes_bytes_incomparable_is_named(folder):
    """Everything they depend on but the weights, whose faults are looked for."""
    record(folder, MAMBA, [Request((3,), COLD)], slots=1)
    header = Recording.open(folder).header
    assert incomparable(header, replace(MAMBA, weights="other"), "cpu") == []
    half = Precision.named("fp16")
    for changes, words in (
        ({"provider": "cuda"}, "provider cpu, recorded cuda"),
        ({"graphs": {**header.graphs, "denoise": "0"}}, "graph denoise is another one"),
        ({"precision": half}, "precision fp32, recorded fp16"),
        ({"threads": None, "cores": 1000}, "processor cores, recorded 1000"),
        ({"versions": {**header.versions, "numpy": "1.0"}}, "recorded 1.0"),
    ):
        (reason,) = incomparable(replace(header, **changes), MAMBA, "cpu")
        assert words in reason
    several = replace(header, precision=half, slots=2)
    assert "several rows" in incomparable(several, MAMBA, "cpu")[-1]
    assert (
        "several rows" in incomparable(replace(header, provider="cuda", slots=2), MAMBA, "cuda")[0]
    )


def test_a_difference_behind_several_threads_and_rows_is_doubted(folder, tmp_path):
    """There a row alone need not have the same bytes; the report says what to do."""
    engine = open_decoding(MAMBA, threads=2, slots=2)
    with Recorder.start(folder, engine, MAMBA, threads=2) as started:
        Decoder(MAMBA, engine).generate(requests(COLD, COLD), watcher=started)
    assert repeat(folder, MAMBA).reasons == ()
    other = flipped(tmp_path, "layers.0.mixer.in_proj.weight.1", 700, 22)
    assert "more than one thread" in repeat(folder, other).reasons[-1]


def test_numbers_find_what_is_outside_the_tolerance(folder, tmp_path):
    """A saved state names the port; a token the pass."""
    record(folder, MAMBA, [Request((3, 4), COLD)])
    other = flipped(tmp_path, "layers.0.mixer.in_proj.weight.1", 700, 29)
    report = repeat(folder, other, compared="numbers")
    assert report.difference.what in ("choice", "saved state")


def test_another_precision_is_compared_from_the_beginning(folder, bundle_path):
    """Its states cannot be put into a recording's, nor the other way round."""
    full = Bundle.open(bundle_path("F2"))
    half = Bundle.open(bundle_path("F2", precision="fp16"))
    record(folder, full, [Request((3, 4), replace(COLD, max_new_tokens=24))])
    report = repeat(folder, half)
    assert report.compared == "numbers"
    assert "precision fp16, recorded fp32" in report.reasons
    assert report.requests[0].start == "the beginning"
    with pytest.raises(StateError, match="another precision"):
        repeat(folder, half, from_block=2)


@pytest.mark.timeout(900)
def test_recordings_travel_between_environments(runtime310, tmp_path):
    """Written by an older ONNX Runtime and numpy and repeated there; here numbers are compared."""
    words = ("--prompt-ids", "3,4,5", "--max-new-tokens", "40", "--min-new-tokens", "40")
    words = (*words, "--threads", "1", "--record-every", "2", "--record", "rec")
    run = {"cwd": tmp_path}
    runtime310.run("-m", "fixedstate", "generate", GOLDEN, *words, **run)
    said = runtime310.run("-m", "fixedstate", "replay", "rec", **run).stdout
    assert said.startswith("identical: requests 1, passes ")
    report = repeat(tmp_path / "rec", MAMBA)
    assert (report.passed, report.compared) == (True, "numbers")
    assert any(reason.startswith("onnxruntime") for reason in report.reasons)
    assert report.total("states") >= 2


def test_another_model_is_refused(folder, fused):
    record(folder, MAMBA, [Request((3,), COLD)])
    with pytest.raises(StateError, match="another model than the one that was recorded"):
        repeat(folder, fused)


def test_a_bundle_without_the_graph_is_refused(folder, tmp_path, fused):
    record(folder, fused, [Request((3,), COLD)])
    other = Bundle.open(write_toy_bundle(tmp_path / "less.bundle"))
    with pytest.raises(StateError, match="has no graph commit_denoise"):
        open_engine(Recording.open(folder).header, other)


# --- refusals ------------------------------------------------------------------------------------


def test_folders_are_not_written_over(folder, tmp_path):
    """Only a recording is replaced, and only if that is wanted."""
    asked = [Request((3,), Settings(8, stop_ids=()))]
    record(folder, MAMBA, asked)
    with pytest.raises(UsageError, match="exists: choose another name or add --force"):
        record(folder, MAMBA, asked)
    record(folder, MAMBA, asked, force=True)
    with pytest.raises(UsageError, match="is no recording, so it is not replaced"):
        record(tmp_path, MAMBA, asked, force=True)
    with pytest.raises(UsageError, match="is no folder that can be written"):
        record(tmp_path / "no" / "where", MAMBA, asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be 1 block or more"),
        ({"length": 100}, "a recording needs 4096 cells or more; got 100"),
        ({"state_bytes": -1}, "state_bytes must be 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(folder, options, words):
    with pytest.raises(UsageError, match=words):
        record(folder, MAMBA, [], **options)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request": 7}, "request 7 is not in the recording, which holds 0-1"),
        ({"from_block": -1}, "from_block must be 0 or more"),
        ({"compared": "tokens"}, "compared must be one of bytes, numbers"),
    ],
)
def test_replay_refuses_what_it_cannot_do(folder, options, words):
    record(folder, MAMBA, requests(COLD, COLD))
    with pytest.raises(UsageError, match=words):
        repeat(folder, MAMBA, **options)


def test_damaged_and_newer_recordings_are_refused(folder):
    """By the file that is wrong; a damaged saved state is left out and named."""
    with pytest.raises(StateError, match="holds no recording.json"):
        Recording.open(folder)
    record(folder, MAMBA, requests(HOT, HOT))
    state = sorted(folder.glob("state-*"))[0]
    data = bytearray(state.read_bytes())
    state.write_bytes(data[:60] + b"\0" + data[61:])
    assert Recording.open(folder).damaged == (state.name,)
    _, note, size = struct.unpack_from("<8sQQ", data)
    data[56 + note + size - 1] ^= 1  # the last byte of the last tensor
    state.write_bytes(data)
    with pytest.raises(StateError, match="is damaged in"):
        repeat(folder, MAMBA, request=0)
    header = (folder / HEADER).read_bytes()
    for content, words in (
        (header[:-20], "it is not JSON"),
        (b"{}", "names no format"),
        (
            header.replace(b'"format": 1', b'"format": 2'),
            "has format 2, this version reads up to 1",
        ),
        (header.replace(b'"slots"', b'"slotz"'), "unknown keys"),
    ):
        (folder / HEADER).write_bytes(content)
        with pytest.raises(StateError, match=words):
            Recording.open(folder)
    (folder / HEADER).write_bytes(header)
    (folder / RING).write_bytes(b"")
    with pytest.raises(StateError, match="it is damaged; record again"):
        Recording.open(folder)


def test_policy_states_have_equal_hashes_where_they_are_equal():
    """Plain values, arrays and dataclasses; anything else has none."""
    values = [1, 1.0, "1", b"1", True, [1], (1, 2), {"a": 1}, np.ones(3), np.ones(3, np.float32)]
    hashes = [hash_policy(value)[0] for value in values]
    assert len(set(hashes)) == len(values)
    assert hash_policy(np.ones(3))[0] == hash_policy(np.ones(3))[0]
    assert hash_policy(None) == hash_policy(object()) == (bytes(16), b"")
    assert hash_policy("x" * 100)[1] == b"'" + b"x" * 63


# --- stand-ins -----------------------------------------------------------------------------------


class Visible(ScriptedEngine):
    """The scripted engine as a recorder sees one; it has no state to hash."""

    roles = ("denoise", "commit")
    weights = MAMBA.weights

    def views(self, row):
        return {}


def fake_bundle(spec):
    """A bundle of a scripted model."""
    return replace(MAMBA, spec=spec, state=ScriptedEngine.state)


@dataclass(frozen=True)
class Waits:
    """Fills nothing until its last pass; its state counts the passes."""

    steps: int
    monotone: ClassVar[bool] = False
    needs: ClassVar[str] = "confidence"

    def reveal(self, view):
        last = (view.step == self.steps - 1)[:, None]
        states = [0] * len(last) if view.state is None else [state + 1 for state in view.state]
        return Reveal(view.fill(view.open & last), np.zeros(len(last), np.int64), states)


@dataclass(frozen=True)
class Reads(Waits):
    """Fills the slots whose scores are smallest in sum, two a pass; looks at filled ones too."""

    needs: ClassVar[str] = "logits"

    def reveal(self, view):
        total = np.where(view.open, view.logits.sum(axis=2), np.inf)
        rank = np.argsort(np.argsort(total, axis=1, kind="stable"), axis=1, kind="stable")
        accept = view.open & (rank < 2)
        return Reveal(view.fill(accept), np.zeros(len(accept), np.int64))


class WholeGraph:
    """Random scores of a whole sequence that depend on its ids alone."""

    provider = "scripted"

    def __init__(self, spec):
        self.spec = spec

    def bind(self, inputs, outputs):
        return WholeBinding(inputs["input_ids"], outputs["logits"])


@dataclass
class WholeBinding:
    ids: np.ndarray
    logits: np.ndarray

    def run(self):
        for row, ids in enumerate(self.ids):
            rng = np.random.default_rng(ids.astype(np.uint64))
            self.logits[row] = rng.standard_normal(self.logits.shape[1:])
