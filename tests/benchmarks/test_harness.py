"""The timing harness: order, statistics, failure, and that its clocks see what ran."""

from __future__ import annotations

import json
import sys
import time

import harness
import pytest

PYTHON = sys.executable


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """The suite itself loads the machine."""
    monkeypatch.setattr(harness, "load_average", lambda: 0.0)


def spin(seconds):
    """Use `seconds` of this thread's processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def series(name, *walls):
    return harness.Series(name, 1, tuple(harness.Sample(w, w) for w in walls))


def report(*all_series, **changes):
    fields = {"threads": None, "load_start": 0.0, "load_end": 0.0, "cores": 2} | changes
    return harness.Report("callables", all_series, **fields)


def test_subjects_run_in_turn():
    """Neighbouring samples are what makes the ratio robust."""
    order = []
    subjects = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    harness.interleave(subjects, runs=3, warmup=0, calls=1)
    assert order == ["a", "b"] * 3


def test_short_calls_are_repeated_and_reported_per_call():
    """One call of a microsecond cannot be timed alone."""
    counted = []
    result = harness.interleave({"a": lambda: counted.append(1)}, runs=2)
    assert result["a"].calls > 100
    assert result["a"].wall.median < 1e-4


def test_cpu_counts_work_and_not_waiting():
    """`cpu` below `wall` is how a report shows waiting."""
    result = harness.interleave(
        {"sleep": lambda: time.sleep(0.02), "work": lambda: spin(0.02)}, runs=3, warmup=0
    )
    assert result["sleep"].wall.median >= 0.02
    assert result["sleep"].cpu.median < 0.01
    assert result["work"].cpu.median >= 0.02


def test_quartiles_spread_and_medians():
    """Figures as the docstring defines them."""
    wall = series("a", 1.0, 2.0, 3.0, 4.0, 100.0).wall
    assert (wall.min, wall.q1, wall.median, wall.q3, wall.max) == (1.0, 2.0, 3.0, 4.0, 100.0)
    assert wall.spread == pytest.approx(2 / 3)


def test_ratio_of_pairs_survives_drift():
    """The machine gets twice as slow half-way: each pair still says 2."""
    drifting = report(series("a", 1.0, 1.0, 2.0, 2.0, 9.0), series("b", 2.0, 2.0, 4.0, 4.0, 2.0))
    assert drifting.ratio("b").of_pairs == 2.0
    assert drifting.ratio("b").of_medians == 1.0
    assert drifting.ratio("a", "b").of_pairs == 0.5


def test_json_holds_every_sample_and_no_machine_name():
    """A later reader can recompute everything, and learns nothing private."""
    shown = json.loads(json.dumps(report(series("a", 1.0, 3.0), series("b", 2.0, 6.0)).to_dict()))
    assert shown["subjects"][0]["samples"] == [[1.0, 1.0], [3.0, 3.0]]
    assert shown["ratios"][0]["of_pairs"] == 2.0
    assert set(shown["machine"]) == {"cpu", "cores", "system", "python"}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(2.5, "  2.500 s"), (0.25, "250.00 ms"), (2.5e-3, "  2.50 ms"), (2.5e-6, "  2.50 us")],
)
def test_times_are_shown_in_a_readable_unit(seconds, shown):
    assert harness._time(seconds) == shown


def test_busy_machine_is_refused(monkeypatch):
    """A number taken beside a training run is worse than none."""
    monkeypatch.setattr(harness, "load_average", lambda: 1000.0)
    with pytest.raises(harness.BusyMachine, match="load average 1000"):
        harness.interleave({"a": int})
    allowed = harness.interleave({"a": int}, runs=1, calls=1, allow_busy=True)
    assert allowed.busy
    assert "BUSY" in allowed.table()


def test_load_at_the_end_marks_the_report():
    """Work that started meanwhile counts as well."""
    assert report(series("a", 1.0), load_end=2.5).busy
    assert not report(series("a", 1.0), load_end=1.5).busy


def test_each_thread_count_makes_its_own_report():
    """Thread pools are set by the maker, so it is called for each count."""
    seen = []

    def make(threads):
        seen.append(threads)
        return {"a": int}

    reports = harness.interleave_threads(make, threads=(1, 2), runs=1, calls=1)
    assert seen == [1, 2] == [r.threads for r in reports]


@pytest.mark.parametrize(("subjects", "runs"), [({}, 1), ({"a": int}, 0)])
def test_nothing_to_time_is_refused(subjects, runs):
    with pytest.raises(ValueError, match="at least"):
        harness.interleave(subjects, runs=runs)


def test_commands_run_in_turn_with_their_threads(tmp_path):
    """Commands learn the thread count by environment and by argument."""
    log = tmp_path / "log"
    program = (
        "import os, sys\n"
        "words = [*sys.argv[2:], os.environ['OMP_NUM_THREADS']]\n"
        "print(*words, file=open(sys.argv[1], 'a'))"
    )
    subjects = {
        name: [PYTHON, "-S", "-c", program, str(log), name, "{threads}"] for name in ("a", "b")
    }
    result = harness.interleave_commands(subjects, runs=2, warmup=0, threads=2)
    assert log.read_text().splitlines() == ["a 2 2", "b 2 2"] * 2
    assert result["a"].max_rss_bytes > 1_000_000


def test_command_cpu_is_the_childs():
    """The harness's own work is not in the figure."""
    program = "import time\nwhile time.process_time() < 0.2: pass"
    result = harness.interleave_commands(
        {"work": [PYTHON, "-c", program], "wait": [PYTHON, "-c", "import time; time.sleep(0.3)"]},
        runs=1,
        warmup=0,
    )
    assert result["work"].cpu.median >= 0.19
    assert result["wait"].cpu.median < 0.2
    assert result["wait"].wall.median >= 0.3


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([PYTHON, "-c", "raise SystemExit('broken')"], "exit status 1\nbroken"),
        (["no-such-command-anywhere"], "No such file"),
    ],
)
def test_failing_command_is_no_measurement(command, says):
    """A command that dies at once would win every comparison."""
    with pytest.raises(harness.CommandFailed, match=says):
        harness.interleave_commands({"a": command}, runs=1, warmup=0)


def test_command_line_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "out.json"
    command = f"{PYTHON} -S -c pass"
    status = harness.main(
        ["--a", command, "--b", command, "--runs", "2", "--threads", "1,2", "--json", str(file)]
    )
    assert status == 0
    assert capsys.readouterr().out.count("B takes") == 2
    assert [r["threads"] for r in json.loads(file.read_text())] == [1, 2]


def test_command_line_says_what_failed(capsys):
    assert harness.main(["--a", "no-such-command-anywhere"]) == 1
    assert "no-such-command-anywhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        harness.main(["--a", "x", "--threads", "many"])
