"""`generate --prompts`: every line is checked, nothing finished is lost, the file appears whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fixedstate.cli.batch import _ERRORS
from fixedstate.cli.journal import Journal
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.runtime.snapshot import Snapshot

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
OPTIONS = ("--max-new-tokens", 12, "--threads", 1, "--slots", 3)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.fixture
def prompts(tmp_path):
    """A file of 14 prompts of many lengths; some with settings of their own."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(14):
        row = {"prompt_ids": rng.integers(3, 35, int(rng.integers(0, 30))).tolist()}
        row |= {"id": f"row-{i}"} if i % 3 else {}
        row |= {"max_new_tokens": 5 + i} if i % 2 else {}
        row |= {"temperature": 1, "seed": i, "stop_ids": []} if i % 4 == 0 else {}
        rows.append(row)
    rows[3] = {"prompt": "set arm 3 17 get arm", "id": 7, "steps": 2}
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.fixture
def batch(run, prompts, tmp_path):
    """`batch("out.jsonl", *options)`: the outcome and the file it was asked to make."""

    def answer(name="out.jsonl", *options, bundle=GOLDEN, source=prompts):
        out = tmp_path / name
        return run("generate", bundle, "--prompts", source, "-o", out, *OPTIONS, *options), out

    return answer


def test_every_prompt_is_answered_in_order(batch, prompts):
    """An answer is what the prompt gets alone, with the settings of its line."""
    done, out = batch()
    assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
    assert sorted(os.listdir(out.parent)) == ["in.jsonl", "out.jsonl"]
    asked, got = lines_of(prompts), lines_of(out)
    assert [row["index"] for row in got] == list(range(14))
    assert [row["id"] for row in got] == [row.get("id") for row in asked]
    with load(GOLDEN, threads=1) as decoder:
        for one, row in zip(asked, got, strict=True):
            ids = one.get("prompt_ids", [4, 5, 9, 23, 3, 5])
            named = {
                key: one[key] for key in ("temperature", "seed", "stop_ids", "steps") if key in one
            }
            new = one.get("max_new_tokens", 12)
            result = decoder.generate([Request(ids, Settings(new, **named))])[0]
            assert row["token_ids"] == list(result.token_ids)
            assert (row["seed"], row["prompt_tokens"]) == (one.get("seed", 0), len(ids))


def test_json_is_a_summary(batch):
    done, out = batch("out.jsonl", "--json", "--prefix-cache", 1 << 20)
    data = done.json
    assert data.pop("seconds") > 0
    cache = data.pop("prefix_cache")
    assert data == {"path": str(out), "prompts": 14, "resumed": 0, "failed": []}
    assert cache["hits"] + cache["misses"] == 14


def test_equal_beginnings_are_committed_once(batch, tmp_path):
    """With --prefix-cache the second line finds the state of the first; same answers."""
    source = tmp_path / "same.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt_ids": [5] * 40, "seed": i}) + "\n" for i in range(4))
    )
    plain, out = batch("a.jsonl", "--temperature", 1, source=source)
    cached, again = batch(
        *("b.jsonl", "--temperature", 1, "--json", "--prefix-cache", 1 << 20, "--slots", 1),
        source=source,
    )
    assert (plain.code, cached.code) == (0, 0)
    assert cached.json["prefix_cache"]["hits"] == 3
    assert cached.json["prefix_cache"]["tokens_saved"] == 120
    assert [r["token_ids"] for r in lines_of(out)] == [r["token_ids"] for r in lines_of(again)]


KILLED = """
import os, signal, sys
from fixedstate.cli import main
from fixedstate.cli.journal import Journal

append, count = Journal.append, int(sys.argv.pop(1))

def killed(self, data):
    append(self, data)
    if len(self) == count:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.append = killed
sys.exit(main(sys.argv[1:]))
"""


def killed_after(count, out, source, *options):
    command = [sys.executable, "-c", KILLED, str(count), "generate", str(GOLDEN)]
    words = ["--prompts", source, "-o", out, *OPTIONS, *options]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_killed_run_is_taken_up(batch, prompts, tmp_path, monkeypatch):
    """SIGKILL twice: the file in the end is that of a run in one go, nothing is decoded twice."""
    _, whole = batch("whole.jsonl")
    out = tmp_path / "out.jsonl"
    killed_after(4, out, prompts)
    partial = tmp_path / "out.jsonl.partial"
    assert len(lines_of(partial)) == 5
    killed_after(9, out, prompts, "--slots", 2)
    assert len(lines_of(partial)) == 10
    with partial.open("ab") as file:
        file.write(b'{"index": 13, "id": null, "te')  # torn off by a crash of the machine
    assert not out.exists()
    kept = [json.loads(line) for line in partial.read_text().splitlines()[1:10]]
    submitted = []
    submit = Scheduler.submit
    monkeypatch.setattr(
        Scheduler, "submit", lambda self, one: submitted.append(one) or submit(self, one)
    )
    done, _ = batch("out.jsonl", "--json")
    assert (done.code, done.json["resumed"], len(submitted)) == (0, 9, 5)
    assert "9 of 14 prompts were finished before" in done.err
    rows = lines_of(out)
    assert without_times(rows) == without_times(lines_of(whole))
    assert all(rows[row["index"]] == row for row in kept)
    assert not partial.exists()


def test_interrupt_keeps_what_is_finished(batch, tmp_path, monkeypatch):
    """Ctrl-C: exit 130, a sentence that says how to go on; the same command does."""
    _, whole = batch("whole.jsonl")
    append = Journal.append

    def pressing(self, data):
        append(self, data)
        if len(self) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Journal, "append", pressing)
    done, out = batch()
    assert (done.code, done.out) == (130, "")
    assert not out.exists()
    (line,) = done.lines
    count = len(lines_of(tmp_path / "out.jsonl.partial")) - 1
    assert count >= 5
    assert f"interrupted; {count} of 14 prompts are finished and kept in" in line
    assert "the same command goes on" in line
    monkeypatch.undo()
    done, _ = batch()
    assert done.code == 0
    assert without_times(lines_of(out)) == without_times(lines_of(whole))


def test_another_command_is_refused_with_what_differs(batch, prompts, tmp_path):
    """Answers of two runs are never mixed; --restart throws the old ones away."""
    out = tmp_path / "out.jsonl"
    killed_after(4, out, prompts)
    state = tmp_path / "some.state"
    with load(GOLDEN) as decoder:
        decoder.prefill([5] * 9).save(state)
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text() + '{"prompt": ""}\n')
    for options, source, words in (
        (("--seed", 3), prompts, "settings.seed not given there, 3 here"),
        (("--max-new-tokens", 13), prompts, "settings.max_new_tokens 12 there, 13 here"),
        (("--prefix", state), prompts, "prefix not given there"),
        ((), other, "prompts "),
    ):
        done, _ = batch("out.jsonl", *options, source=source)
        assert (done.code, done.out) == (2, "")
        assert "holds answers of another run" in done.err
        assert words in done.err
        assert "--restart" in done.err
    done, _ = batch("out.jsonl", "--seed", 3, "--restart", "--json")
    assert (done.code, done.json["resumed"]) == (0, 0)


def test_damage_in_the_middle_is_refused(batch, prompts, tmp_path):
    """Only the end of a file can be torn off; anything else is not what was written."""
    killed_after(4, tmp_path / "out.jsonl", prompts)
    partial = tmp_path / "out.jsonl.partial"
    lines = partial.read_text().splitlines(keepends=True)
    for number, broken in ((2, "{}\n"), (3, "nonsense\n"), (1, '{"fixedstate_journal": 99}\n')):
        partial.write_text("".join([*lines[: number - 1], broken, *lines[number:]]))
        done, _ = batch()
        assert done.code == 2
        assert "--restart" in done.err
    partial.write_text(lines[0][:20])  # nothing was finished: it begins anew
    assert batch()[0].code == 0


def test_two_processes_do_not_share_a_file(batch, tmp_path):
    with Journal(tmp_path / "out.jsonl.partial", {}):
        done, out = batch()
    assert (done.code, done.out) == (2, "")
    assert "is being written by another process" in done.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "max_tokens": 3}', "unknown key 'max_tokens'; known keys: prompt,"),
        ("{}", "give prompt (a text) or prompt_ids (a list): one of them"),
        ('{"prompt": "a", "prompt_ids": []}', "one of them"),
        ('{"prompt": 3}', "prompt must be a text; got 3"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt_ids": [1, 2.0]}', "prompt_ids must be a list of whole numbers"),
        ('{"prompt_ids": [true]}', "prompt_ids must be a list of whole numbers"),
        ('{"prompt_ids": [99]}', "id 99 at place 0 is outside the vocabulary"),
        ('{"prompt_ids": [36]}', "is the mask"),
        ('{"prompt": "mask"}', "is the mask"),
        ('{"prompt": "a", "stop_ids": 2}', "stop_ids must be a list"),
        ('{"prompt": "a", "stop_ids": [77]}', "stop ids: id 77"),
        ('{"prompt": "a", "steps": 0}', "steps must be a whole number, 1 or more"),
        ('{"prompt": "a", "steps": true}', "steps must be a whole number"),
        ('{"prompt": "a", "temperature": "1"}', "temperature must be a number"),
        ('{"prompt": "a", "temperature": true}', "temperature must be a number; got true"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is no JSON"),
        ('{"prompt": "a", "threshold": 2}', "threshold must be between 0 and 1"),
        ('{"prompt": "a", "seed": null}', "seed must be a number; got null"),
        ('{"prompt": "a", "id": 1.5}', "id must be a text or a whole number"),
        ('{"prompt": "a", "id": true}', "id must be a text or a whole number"),
        ('{"prompt": "a", "prompt": "b"}', "key 'prompt' stands there twice"),
        ('{"prompt": "a", "max_new_tokens": 300}', "the limit is 128"),
        ('["a"]', "not a JSON object"),
        ('{"prompt": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\udcff", "not UTF-8"),
    ],
    ids=range(27),
)
def test_wrong_lines_are_refused_before_the_first_pass(batch, tmp_path, monkeypatch, line, words):
    """With the number of the line; nothing is left behind."""
    monkeypatch.setattr(Scheduler, "tick", None)
    source = tmp_path / "wrong.jsonl"
    source.write_bytes(f'\n{{"prompt": "set"}}\n\n{line}\n'.encode("utf-8", "surrogateescape"))
    done, _ = batch("out.jsonl", "--max-context", 128, source=source)
    assert (done.code, done.out) == (2, "")
    assert len(done.lines) == 1
    assert f"{source}: line 4: " in done.err
    assert words in done.err
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "wrong.jsonl"]


def test_the_first_wrong_lines_are_named_at_once(batch, tmp_path):
    """A few of them, so that a file is put right in few rounds."""
    source = tmp_path / "wrong.jsonl"
    source.write_text("3\n" * 9)
    done, _ = batch("out.jsonl", source=source)
    assert [f"line {n}: " in done.err for n in range(1, 8)] == [n <= _ERRORS for n in range(1, 8)]
    assert "there may be more" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt", "a"), "--prompt does not go with --prompts"),
        (("--prompt-ids", ""), "--prompt-ids does not go"),
        (("--watch",), "--watch does not go"),
        (("--save-state", "x"), "--save-state does not go"),
        (("--samples", 2), "--samples does not go"),
        (("--prefix", "x", "--prefix-cache", 9), "--prefix-cache does not go with --prefix"),
    ],
)
def test_options_that_do_not_go_together(batch, options, words):
    done, out = batch("out.jsonl", *options)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert not out.exists()


@pytest.mark.parametrize("option", [("-o", "x"), ("--restart",), ("--prefix-cache", 9)])
def test_options_of_a_file_of_prompts(run, option):
    done = run("generate", GOLDEN, "--prompt", "a", *option)
    assert (done.code, done.out) == (2, "")
    assert f"{option[0]} goes with --prompts FILE" in done.err


def test_files_that_are_not_there_or_empty(run, batch, tmp_path):
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n \n")
    for source, words in ((tmp_path / "none", "cannot be read"), (blank, "holds no prompts")):
        done, _ = batch(source=source)
        assert done.code == 2
        assert words in done.err
    done = run("generate", GOLDEN, "--prompts", blank)
    assert "--prompts needs -o OUT" in done.err
    taken = tmp_path / "taken"
    taken.write_text("mine")
    done, _ = batch("taken")
    assert (done.code, taken.read_text()) == (2, "mine")
    assert batch("taken", "--force")[0].code == 0
    assert len(lines_of(taken)) == 14


def test_prompts_go_on_from_a_saved_state(batch, tmp_path):
    """--prefix holds for every line."""
    system = [4, 5, 9, 23] * 5
    with load(GOLDEN, threads=1) as decoder:
        decoder.prefill(system).save(tmp_path / "system.state")
        source = tmp_path / "p.jsonl"
        source.write_text('{"prompt_ids": [3, 5]}\n{"prompt_ids": []}\n')
        done, out = batch("out.jsonl", "--prefix", tmp_path / "system.state", source=source)
        assert done.code == 0
        expected = decoder.generate(
            [Request([*system, *more], Settings(12)) for more in ([3, 5], [])]
        )
    rows = lines_of(out)
    assert [row["token_ids"] for row in rows] == [list(r.token_ids) for r in expected]
    assert [(row["prompt_tokens"], row["prefix_tokens"]) for row in rows] == [(2, 20), (0, 20)]


def test_few_prompts_are_in_memory_at_once(batch, prompts, monkeypatch):
    """No more wait than there are slots."""
    most = []
    tick = Scheduler.tick
    monkeypatch.setattr(
        Scheduler, "tick", lambda self: most.append(self.waiting + self.running) or tick(self)
    )
    assert batch()[0].code == 0
    assert 4 <= max(most) <= 6


def test_rows_that_fail_are_answers_too(batch, monkeypatch, tmp_path):
    """Their document says so; the others are there, and the exit code is 1."""
    from fixedstate.runtime.engine import SessionEngine

    denoise = SessionEngine.denoise

    def broken(self, ids, first=0):
        logits = denoise(self, ids, first)
        logits[(ids[:, :2] == 33).all(axis=1)] = np.nan
        return logits

    monkeypatch.setattr(SessionEngine, "denoise", broken)
    source = tmp_path / "p.jsonl"
    source.write_text("".join(f'{{"prompt_ids": [{n}, {n}]}}\n' for n in (5, 33, 6)))
    done, out = batch("out.jsonl", source=source)
    assert (done.code, done.out) == (1, f"{out}\n")
    assert "error: 1 of 3 prompts failed (index 1)" in done.err
    rows = lines_of(out)
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert "not finite" in rows[1]["error"]


def test_a_file_that_changes_is_noticed(batch, prompts, monkeypatch):
    """Answers belong to the prompts that were there at the start."""
    tick = Scheduler.tick

    def changing(self):
        with prompts.open("a") as file:
            file.write("\n")
        return tick(self)

    monkeypatch.setattr(Scheduler, "tick", changing)
    done, out = batch()
    assert (done.code, done.out) == (2, "")
    assert "changed while it was decoded" in done.err
    assert not out.exists()


def test_a_full_disk_is_a_sentence(batch, monkeypatch):
    """What was finished before is kept."""
    write = Journal._write

    def full(self, data):
        if len(self) == 3:
            import errno

            from fixedstate.cli.journal import _writing

            with _writing(self.path):
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Journal, "_write", full)
    done, out = batch()
    assert (done.code, done.out) == (1, "")
    assert "No space left on device; what it holds already is kept" in done.err
    monkeypatch.undo()
    done, _ = batch("out.jsonl", "--json")
    assert (done.code, done.json["resumed"]) == (0, 3)
    assert len(lines_of(out)) == 14


def test_states_of_another_model_are_refused(batch, tmp_path):
    """Before a line is read."""
    from dataclasses import replace

    with load(GOLDEN) as decoder:
        replace(decoder.prefill([5] * 9), weights="0" * 64).save(tmp_path / "other.state")
    assert Snapshot.load(tmp_path / "other.state").weights == "0" * 64
    done, out = batch("out.jsonl", "--prefix", tmp_path / "other.state")
    assert (done.code, done.out) == (1, "")
    assert "was made with weights" in done.err
    assert not out.exists()
