"""`demo`: the log is deterministic, longer than training, and its answers are judged honestly."""

from __future__ import annotations

import hashlib

import pytest

from fixedstate.cli.demo_log import robot_log


def words(text: str) -> int:
    return len(text.split()) + text.count("\n")


def test_log_is_the_same_everywhere():
    """The README shows answers; another Python must ask the same questions."""
    log = robot_log(300, words)
    assert log == robot_log(300, words)
    assert log != robot_log(300, words, seed=1)
    assert hashlib.sha256(log.text.encode()).hexdigest()[:16] == "4aab7949c01c13b6"


@pytest.mark.parametrize("tokens", [1, 20, 300, 2000])
def test_log_answers_its_questions(tokens):
    """Every asked device is set exactly once, so every answer is right or wrong."""
    log = robot_log(tokens, words)
    assert len(log.questions) == 5
    assert log.tokens == words(log.text)
    assert log.tokens >= min(tokens, 15)
    for question in log.questions:
        device = question.prompt.split()[1]
        (line,) = [row for row in log.text.splitlines() if row.startswith(f"set {device} ")]
        assert question.answer == f'{{"{device}": {line.split()[2]}}}'
        assert 0 < question.distance <= log.tokens


def test_questions_are_asked_from_afar():
    """Values stand in the first third, so recall bridges at least the rest."""
    log = robot_log(900, words)
    assert min(question.distance for question in log.questions) > 550


def test_json_reports_answers_and_figures(run, scripted, scripted_export):
    """The scripted model is always wrong; that is said and is no failure."""
    done = run("demo", "--json")
    assert (done.code, done.err) == (0, "")
    data = done.json
    assert data["model"] == "tiny-hybrid"
    assert scripted_export["checkpoint"] == "tiny-hybrid"
    assert data["train_length"] == 40
    assert data["log_tokens"] >= 80
    assert len(data["questions"]) == 5
    assert not any(question["right"] for question in data["questions"])
    for name in ("state_bytes", "kv_bytes", "passes_per_token", "tokens_per_second"):
        assert name in data


def test_table_shows_right_and_wrong(run, scripted, scripted_export):
    done = run("demo", "--tokens", 60)
    assert done.code == 0
    assert done.out.count("wrong") == 5
    assert "right answers      0 of 5" in done.out
    assert "(trained on 40)" in done.out


def test_temporary_folder_goes_away(run, scripted, scripted_export, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("demo")
    assert list(tmp_path.iterdir()) == []
