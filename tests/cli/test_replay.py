"""`generate --record` and `replay`: identical and exit 0, or the difference and exit 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fixedstate.bundle import Bundle
from fixedstate.runtime.recording import HEADER, Recording

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
PROMPTS = ("--prompt", "get arm 3", "--prompt-ids", "3,5,9,23,7,8,9,10,11")
DECODE = (*PROMPTS, "--max-new-tokens", "40", "--threads", "1", "--temperature", "2", "--seed", "4")


@pytest.fixture
def recorded(run, tmp_path, monkeypatch):
    """A recording of two prompts; the bundle is named as a user would, from its own folder."""
    shutil.copytree(GOLDEN, tmp_path / "my.bundle")
    monkeypatch.chdir(tmp_path)
    done = run("generate", "my.bundle", *DECODE, "--record", "rec", "--record-every", "2")
    assert (done.code, done.err) == (0, "")
    return tmp_path / "rec"


def test_recording_is_repeated_without_further_words(run, recorded):
    """The bundle is found where it was."""
    done = run("replay", "rec")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("identical: requests 2, passes ")
    assert run("replay", "rec", "--request", 1, "--from-block", 2).code == 0


def test_recording_names_no_path_but_the_users_words(recorded):
    """And can be moved to another machine."""
    header = (recorded / HEADER).read_text()
    assert json.loads(header)["bundle"] == "my.bundle"
    assert str(recorded.parent) not in header


def test_same_output_with_and_without_recording(run, recorded):
    """Also of --json."""
    plain = run("generate", "my.bundle", *DECODE, "--json")
    watched = run("generate", "my.bundle", *DECODE, "--json", "--record", "rec", "--force")
    keys = ("token_ids", "blocks", "denoise_passes", "finish_reason")
    for ours, theirs in zip(plain.json, watched.json, strict=True):
        assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}


def test_json_holds_every_request(run, recorded):
    """For scripts."""
    data = run("replay", "rec", "--from-block", 3, "--json").json
    assert (data["passed"], data["compared"], data["difference"]) == (True, "bytes", None)
    assert data["bundle"]["digest"] == Bundle.open(GOLDEN).digest
    assert [each["start"] for each in data["requests"]] == ["block 2", "block 2"]
    assert data["passes"] == sum(each["passes"] for each in data["requests"]) > 0


def test_a_difference_is_named_and_exits_with_1(run, recorded):
    """A seed that is not the one that was used."""
    from fixedstate.runtime.ring import OVERHEAD, Ring, read_ring

    header = Recording.open(recorded).header
    log = read_ring(recorded / "events.ring", header.payload, header.length)
    (recorded / "events.ring").unlink()
    ring = Ring(recorded / "events.ring", header.payload, header.length)
    for _, event in log.events:
        ring.append(event.replace(b'"seed":4', b'"seed":5'))
    ring.close()
    assert (header.payload + OVERHEAD) * header.length == (recorded / "events.ring").stat().st_size
    done = run("replay", "rec", "--request", 0)
    assert done.code == 1
    assert done.out.startswith("differs: request 0, block 0, pass 0: it ran with seed 4, the ")
    assert run("replay", "rec", "--json").json["difference"]["what"] == "seed"


def test_more_threads_are_said_to_compare_numbers(run, recorded):
    done = run("replay", "rec", "--threads", 2)
    assert done.code == 0
    assert done.lines == ["note: threads 2, recorded 1"]
    assert done.out.startswith("equal tokens, states within tolerance: requests 2")


def test_a_bundle_that_has_gone_is_asked_for(run, recorded, tmp_path):
    """With its digest, so that the right one can be found."""
    (tmp_path / "my.bundle").rename(tmp_path / "other.bundle")
    done = run("replay", "rec")
    assert done.code == 2
    assert "the bundle that was recorded is not at 'my.bundle' any more" in done.err
    assert Bundle.open(GOLDEN).digest[:16] in done.err
    assert run("replay", "rec", "--against", "other.bundle").code == 0


def test_folders_that_exist_are_kept_without_force(run, recorded, tmp_path):
    """Found before the bundle is opened; what is no recording is never replaced."""
    before = {path.name: path.read_bytes() for path in recorded.iterdir()}
    done = run("generate", "nowhere.bundle", *DECODE, "--record", "rec")
    assert (done.code, done.out) == (2, "")
    assert "rec exists: choose another name or add --force" in done.err
    assert {path.name: path.read_bytes() for path in recorded.iterdir()} == before
    (tmp_path / "photos").mkdir()
    done = run("generate", "my.bundle", *DECODE, "--record", "photos", "--force")
    assert done.code == 2
    assert "photos is no recording" in done.err
    assert run("generate", "my.bundle", *DECODE, "--record", "rec", "--force").code == 0


@pytest.mark.parametrize("options", [("--record-every", "4"), ("--record-length", "9000")])
def test_options_of_a_recording_need_one(run, options):
    done = run("generate", GOLDEN, *DECODE, *options)
    assert done.code == 2
    assert "need --record" in done.err


def test_what_is_no_recording_is_refused(run, tmp_path):
    done = run("replay", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert "holds no recording.json" in done.err


def test_unsaved_states_are_said_at_the_end(run, tmp_path, monkeypatch):
    """Decoding itself went well."""
    from fixedstate.runtime.recorder import Recorder

    monkeypatch.setattr(Recorder.start.__func__, "__kwdefaults__", {
        **Recorder.start.__func__.__kwdefaults__, "state_bytes": 10
    })  # fmt: skip
    done = run("generate", GOLDEN, *DECODE, "--record", tmp_path / "rec")
    assert done.code == 0
    assert "states were not saved in" in done.err
    assert run("replay", tmp_path / "rec").code == 0
