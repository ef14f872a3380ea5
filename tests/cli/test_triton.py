"""`fixedstate triton` and `fixedstate client` without a server; with one: tests/triton."""

from __future__ import annotations

import socket
import sys

import pytest


def test_repository_is_written_and_named(run, bundle, tmp_path):
    """The folder on standard output; the options stand in the configuration."""
    out = tmp_path / "repository"
    options = ("--name", "log", "--slots", 3, "--queue", 5, "--threads", 2, "--generate-facade")
    done = run("triton", bundle, "-o", out, *options)
    assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
    config = (out / "log" / "config.pbtxt").read_text()
    for name, value in (("slots", 3), ("queue", 5), ("threads", 2)):
        assert f'key: "{name}" value {{ string_value: "{value}" }}' in config
    assert (out / "log_generate" / "config.pbtxt").is_file()


def test_repository_as_json(run, bundle, tmp_path):
    found = run("triton", bundle, "-o", tmp_path / "r", "--installed", "--json").json
    assert found["models"] == ["fixedstate"]
    assert found["record"]["limits"]["slots"] == "16"
    assert not [file for file in found["files"] if file.endswith(".whl")]


@pytest.mark.parametrize("verb", ["triton", "client"])
def test_missing_package_is_named(run, bundle, tmp_path, monkeypatch, verb):
    """Someone who only decodes has no tritonclient."""

    class Absent:
        @staticmethod
        def find_spec(name, *_):
            if name == "tritonclient":
                raise ModuleNotFoundError("No module named 'tritonclient'", name=name)

    for name in [name for name in sys.modules if name.split(".")[0] == "tritonclient"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    words = ("triton", bundle, "-o", tmp_path / "r")
    done = run(*(words if verb == "triton" else ("client", "localhost:1", "--prompt", "a")))
    assert done.code == 1
    assert "pip install 'fixedstate[triton]'" in done.err
    assert not (tmp_path / "r").exists()


def test_no_server_is_one_line(run):
    """Nobody listens there: an error, not a wait."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("client", address, "--prompt", "a", "--deadline", 20)
    assert (done.code, done.out, len(done.lines)) == (1, "", 1)
    assert address in done.err
