"""`chat`: a conversation is one sequence of tokens, whose state is kept from turn to turn."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from fixedstate.bundle import Bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.runtime.text import Detokenizer, Text

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
FIRST, SECOND = "set arm 3 17 set arm 4 9 get arm", "get arm 3 1"


@pytest.fixture
def chat(run):
    """`chat(options, "line", "line")`: the outcome, and the answers as documents with --json."""

    def talk(options, *lines, bundle=GOLDEN):
        text = "".join(f"{line}\n" for line in lines)
        done = run("chat", bundle, "--max-new-tokens", 21, *options, input=text)
        return done, [json.loads(line) for line in done.out.splitlines()] if options else []

    return talk


def encode(text, **options):
    return Text.open(Bundle.open(GOLDEN)).encode(text, **options)


def generate(prompt, new=21, **settings):
    with load(GOLDEN) as decoder:
        return decoder.generate([Request(prompt, Settings(new, **settings))])[0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_turns_are_one_sequence(chat, temperature):
    """The second answer is that of one prompt of everything before it, token for token."""
    heat = ("--temperature", temperature, "--seed", 3)
    done, (one, two) = chat(("--json", *heat), FIRST, SECOND)
    assert done.code == 0
    settings = {"temperature": temperature, "seed": 3}
    first = generate(encode(FIRST), **settings)
    assert one["token_ids"] == list(first.token_ids)
    whole = [*encode(FIRST), *first.token_ids, *encode(SECOND)]
    assert two["token_ids"] == list(generate(whole, **settings).token_ids)
    assert (one["prefix_tokens"], two["prefix_tokens"]) == (0, len(encode(FIRST)) + 21)
    assert two["prompt_tokens"] == len(encode(SECOND))


def test_nothing_is_computed_again(chat, monkeypatch):
    """The tokens of a turn are committed once: the engine sees no more than the sequence."""
    from fixedstate.runtime.engine import SessionEngine

    seen = []
    commit = SessionEngine.commit

    def counted(self, ids, lengths, first=0):
        seen.append(int(lengths.sum()))
        return commit(self, ids, lengths, first)

    monkeypatch.setattr(SessionEngine, "commit", counted)
    _, answers = chat(("--json",), *[FIRST] * 4)
    total = 4 * (len(encode(FIRST)) + 21)
    assert sum(seen) == total // 8 * 8
    assert answers[-1]["prefix_tokens"] == total // 4 * 3


def test_answers_are_text_and_numbers_are_notes(chat):
    done, _ = chat((), FIRST, "", "  ", SECOND)
    one = generate(encode(FIRST))
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    assert done.out.splitlines()[0] == Text.open(Bundle.open(GOLDEN)).decode(one.token_ids)
    assert [line.split(":")[0] for line in done.lines] == ["note"] * 2
    assert f"context {len(encode(FIRST)) + 21} tokens" in done.lines[0]
    assert "21 tokens (length)" in done.lines[1]


def test_undo_forgets_a_turn(chat):
    """The same question then gets the same answer, as often as one likes."""
    done, answers = chat(
        ("--json",), FIRST, SECOND, "/undo", SECOND, "/undo", "/undo", FIRST, "/undo", "/undo"
    )
    tokens = [answer["token_ids"] for answer in answers]
    assert tokens[1] == tokens[2]
    assert tokens[0] == tokens[3]
    assert tokens[0] != tokens[1]
    assert done.code == 1
    assert done.lines[-1] == "error: no turn to take back (the last 16 are kept)"
    assert "the last turn is forgotten; context 0 tokens" in done.err


def test_saved_and_gone_on_from(chat, tmp_path):
    """--save at the end, /save in the middle, --prefix in another process: one conversation."""
    middle, end = tmp_path / "middle.state", tmp_path / "end.state"
    done, (_, second) = chat(("--json", "--save", end), FIRST, f"/save {middle}", SECOND, "/quit")
    assert done.code == 0
    assert Snapshot.load(end).past_length > Snapshot.load(middle).past_length
    done, (again,) = chat(("--json", "--prefix", middle), SECOND)
    assert again["token_ids"] == second["token_ids"]
    done, _ = chat(("--json",), FIRST, f"/save {middle}", f"/save {tmp_path}/no/x")
    assert done.code == 1
    assert [line.split(" ")[0] for line in done.lines] == ["note:", "error:", "error:"]
    assert "middle.state exists" in done.lines[1]
    refused = [("--json", "--save", end), ("--json", "--force", "--save", tmp_path)]
    for options, words in zip(refused, ["exists", "is a folder"], strict=True):
        done, _ = chat(options, FIRST)
        assert (done.code, done.out) == (2, "")
        assert words in done.err


def test_nothing_said_saves_nothing(chat, tmp_path):
    done, _ = chat(("--json", "--save", tmp_path / "x.state"), "/save y.state")
    assert done.code == 0
    assert done.err.count("nothing was said") == 2
    assert os.listdir(tmp_path) == []


def test_the_turn_is_a_template(chat):
    """The line stands in its place, with line breaks where they are written; // is a /."""
    turn = "set arm 3 {text}\\nget"
    _, (one,) = chat(("--json", "--turn", turn), "//17")
    assert one["prompt_tokens"] == len(encode("set arm 3 /17\nget"))
    assert one["token_ids"] == list(generate(encode("set arm 3 /17\nget")).token_ids)
    done, _ = chat(("--turn", "no place"))
    assert (done.code, done.out) == (2, "")
    assert "write {text}" in done.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("set arm mask", "is the mask"),
        ("/what", "no command '/what'"),
        ("/undo 2", "no command '/undo 2'"),
        ("/save", "no command '/save'"),
        (b"\xff", "the line is not UTF-8"),
        ("get " * 60, "the limit is 64"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(run, line, words):
    """The chat goes on from where it was; the exit code says that something failed."""
    raw = line if isinstance(line, bytes) else line.encode()
    options = ("--json", "--max-new-tokens", 8, "--max-context", 64)
    good, after = FIRST.encode(), SECOND.encode()
    done = run("chat", GOLDEN, *options, input=b"\n".join([good, raw, after]))
    alone = run("chat", GOLDEN, *options, input=b"\n".join([good, after]))
    assert (done.code, alone.code) == (1, 0)
    (error,) = [line for line in done.lines if line.startswith("error: ")]
    assert words in error
    got, expected = (
        [json.loads(line)["token_ids"] for line in each.out.splitlines()] for each in (done, alone)
    )
    assert got == expected
    assert len(got) == 2


def interrupt_at(monkeypatch, *calls):
    """Ctrl-C when the blocks of these numbers are printed."""
    push, count = Detokenizer.push, []

    def pressing(self, ids):
        count.append(1)
        if len(count) in calls:
            os.kill(os.getpid(), signal.SIGINT)
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", pressing)


def test_interrupt_keeps_finished_blocks_and_the_chat(run, monkeypatch, tmp_path):
    """Ctrl-C in the second answer: one block of it stays, the next turn goes on behind it."""
    first, second = generate(encode("set arm 3")).token_ids, encode("set arm 4")
    known = [*encode("set arm 3"), *first, *second]
    kept = generate(known).token_ids[:5]  # 24 tokens, 3 of the prompt: 5 slots of a block
    interrupt_at(monkeypatch, 4)
    out = tmp_path / "x.state"
    done = run(
        *("chat", GOLDEN, "--max-new-tokens", 21, "--save", out),
        input="set arm 3\nset arm 4\nget arm\n",
    )
    assert done.code == 0, done.err
    assert "21 tokens (length)" in done.lines[0]
    assert "5 tokens (cancelled)" in done.lines[1]
    assert "21 tokens (length)" in done.lines[2]
    state = Snapshot.load(out)
    whole = [*known, *kept, *encode("get arm")]
    last = generate(whole).token_ids
    assert done.out.splitlines()[2] == Text.open(Bundle.open(GOLDEN)).decode(last)
    with load(GOLDEN) as decoder:
        expected = decoder.prefill([*whole, *last])
    assert (state.past_length, state.pending) == (expected.past_length, expected.pending)
    for name, array in expected.arrays.items():  # committed in other pieces: not byte for byte
        np.testing.assert_allclose(state.arrays[name], array, rtol=1e-4, atol=1e-5)


def test_a_second_interrupt_ends_the_chat(run, monkeypatch, tmp_path):
    """The state before the turn is saved, and the exit code is 130."""
    before = signal.getsignal(signal.SIGINT)  # a job in the background ignores it
    interrupt_at(monkeypatch, 4)
    monkeypatch.setattr(
        "fixedstate.runtime.scheduler.Scheduler.cancel",
        lambda self, number: os.kill(os.getpid(), signal.SIGINT),
    )
    out = tmp_path / "x.state"
    done = run(
        *("chat", GOLDEN, "--max-new-tokens", 21, "--save", out),
        input="set arm 3\nset arm 4\nget arm\n",
    )
    assert done.code == 130
    assert "note: interrupted" in done.lines
    state = Snapshot.load(out)
    assert state.past_length + len(state.pending) == 24
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_devices_are_never_replaced(run, tmp_path, force):
    """The file would stand where the device was; a pipe stands for one here."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (
        ("chat", GOLDEN, "--save"),
        ("generate", GOLDEN, "--prompt", "1", "--save-state"),
    ):
        done = run(*words, pipe, *force)
        assert (done.code, done.out) == (2, "")
        assert ("is no regular file" if force else "exists") in done.err
    assert pipe.is_fifo()


def test_models_without_state_are_refused_with_the_reason(run, monkeypatch):
    """Nothing could be kept from turn to turn."""
    import fixedstate.runtime

    class Whole:
        whole_blocks = False

    class Full:
        engine = Whole()

    monkeypatch.setattr(fixedstate.runtime, "load", lambda path, **options: Full())
    done = run("chat", GOLDEN, input="get arm\n")
    assert (done.code, done.out) == (2, "")
    assert "looks at the whole sequence in every pass (objective 'full')" in done.lines[0]


def test_bundles_without_a_tokenizer_are_refused(run, make_bundle, scripted):
    """There is no text to talk in."""
    folder = make_bundle("bare.bundle", tokenizer=False)
    done = run("chat", folder, input="get arm\n")
    assert (done.code, done.out) == (2, "")
    assert "has no tokenizer" in done.lines[0]
