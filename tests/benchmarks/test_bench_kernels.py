"""The benchmark of the SSD forms: they agree, a wrong one is not timed, bytes are counted right."""

from __future__ import annotations

import json

import bench_kernels
import harness
import numpy as np
import pytest

SMALL = bench_kernels.Shape(tokens=8, heads=4, head_dim=8, d_state=16)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """The suite itself loads the machine."""
    monkeypatch.setattr(harness, "load_average", lambda: 0.0)


def test_every_form_gives_the_same_y():
    """All but the compiled one, which takes a compiler and half a minute."""
    names = [name for name in bench_kernels.FORMS if name != "compile"]
    calls, errors, refused = bench_kernels.subjects(SMALL, names)
    assert not refused
    assert list(calls) == list(errors) == names
    assert max(errors.values()) < 1e-6


def test_wrong_form_is_not_timed(monkeypatch):
    """Being fast is easy for what computes something else."""

    def wrong(inputs):
        return lambda: None, np.zeros_like(inputs["x"])

    monkeypatch.setitem(bench_kernels.FORMS, "linear", wrong)
    with pytest.raises(SystemExit, match=r"linear is wrong by 1\.0e\+00"):
        bench_kernels.subjects(SMALL, ["body", "linear"])


def test_output_that_is_never_written_is_wrong(monkeypatch):
    """NaN compares as false both ways."""

    def silent(inputs):
        return lambda: None, bench_kernels.empty_y(inputs)

    monkeypatch.setitem(bench_kernels.FORMS, "linear", silent)
    with pytest.raises(SystemExit, match="linear is wrong by nan"):
        bench_kernels.subjects(SMALL, ["linear"])


def test_refused_form_is_named_and_an_own_one_is_an_error(monkeypatch):
    """Another ONNX Runtime may lack an operator; our own forms run everywhere."""

    def refusing(inputs):
        raise RuntimeError("no such operator")

    monkeypatch.setitem(bench_kernels.FORMS, "onnx", refusing)
    calls, _, refused = bench_kernels.subjects(SMALL, ["body", "onnx"])
    assert list(calls) == ["body"]
    assert refused == {"onnx": "RuntimeError: no such operator"}
    monkeypatch.setitem(bench_kernels.FORMS, "body", refusing)
    with pytest.raises(RuntimeError, match="no such operator"):
        bench_kernels.subjects(SMALL, ["body"])


def test_verdict_names_the_fastest_of_the_same_work():
    """An operator alone does less, and wins nothing."""

    def report(**seconds):
        sample = {name: (harness.Sample(value, value),) for name, value in seconds.items()}
        series = tuple(harness.Series(name.replace("_", "-"), 1, s) for name, s in sample.items())
        return harness.Report("callables", series, 1, 0.0, 0.0, 2)

    assert bench_kernels.verdict(report(body=2.0, linear=3.0, linear_op=1.0)) == "fastest: ours"
    assert bench_kernels.verdict(report(body=2.0, linear=1.5)) == "fastest: linear, NOT ours"


def test_command_line_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "out.json"
    sizes = ["--tokens", "8", "--heads", "4", "--head-dim", "8", "--d-state", "16"]
    options = ["--forms", "linear,linear-op", "--runs", "1", "--json", str(file)]
    bench_kernels.main([*sizes, *options])
    shown = capsys.readouterr().out
    assert "L=8, 4 heads x 8, d_state 16" in shown
    assert "| linear-op |" in shown
    assert [subject["name"] for subject in json.loads(file.read_text())["subjects"]] == [
        "body",
        "linear",
        "linear-op",
    ]
    with pytest.raises(SystemExit):
        bench_kernels.main(["--forms", "magic"])


def test_bytes_of_one_pass_by_hand():
    """Mamba-2 of the paper, one row, 32 tokens: the new state is what the denoise form saves."""
    family, sizes = bench_kernels.PAPER[1]
    x = y = 32 * 80 * 64 * 2
    b = c = 32 * 128 * 2
    dt, a, d = 32 * 80 * 4, 80 * 4, 80 * 4
    state = 80 * 128 * 64 * 4
    one = x + dt + a + b + c + d + state + y
    assert bench_kernels.moved(family, sizes, 1, 32) == (one, one + state)


def test_bytes_option_times_nothing(capsys, monkeypatch):
    monkeypatch.setattr(bench_kernels, "interleave", None)
    bench_kernels.main(["--bytes"])
    shown = capsys.readouterr().out
    assert "| SsdBlock | 1 | 32 | 3.151 | 5.651 | 44.2% |" in shown
    assert shown.count("| Mamba-1 |") == 6
