"""``fixedstate serve`` as a process: its lines, its signals, its exit codes, its files."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from fixedstate.cli import main

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"


class Process:
    """A server process; its port from the line that says it is ready."""

    def __init__(self, folder, *options, **environment):
        self.log = folder / "log"
        command = [sys.executable, "-m", "fixedstate", "serve", str(GOLDEN), "--port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--threads", "1", *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
            )

    def url(self):
        while not (found := re.search(r"ready: (\S+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
        return found[1]

    def client(self, **options):
        return httpx.Client(
            base_url=self.url(), trust_env=False, verify=False, timeout=60, **options
        )

    def end(self, number=signal.SIGTERM):
        """The exit code, and the lines on standard error."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=60)
        assert out == b""
        return self.process.returncode, self.log.read_text().splitlines()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def test_sigterm_drains_and_every_line_is_json_with_the_id(tmp_path):
    """An open stream runs to its end, the files appear, the exit code is 0."""
    trace, profile = tmp_path / "trace.json", tmp_path / "profile.json"
    token = {"Authorization": "Bearer from-the-environment"}
    options = ("--log-json", "--slots", "2", "--trace", str(trace), "--profile-json", str(profile))
    body = {"prompt": "get arm", "max_tokens": 800, "stop_ids": [], "stream": True}
    with Process(tmp_path, *options, FIXEDSTATE_TOKEN="from-the-environment") as server:
        with server.client(headers=token) as client:
            headers = {"X-Request-Id": "the-stream"}
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                lines = response.iter_lines()
                first = next(lines)
                server.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert response.status_code == 200
        code, log = server.process.wait(60), server.log.read_text().splitlines()
    assert code == 0
    chunks = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
    assert rest[-1] == "data: [DONE]"
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 800
    ready, *others = log
    assert ready.startswith("ready: http://127.0.0.1:")
    entries = [json.loads(line) for line in others]
    assert {entry["message"] for entry in entries} == {"draining", "request"}
    (entry,) = [entry for entry in entries if entry["message"] == "request"]
    assert entry["request_id"] == "the-stream"
    assert (entry["status"], entry["new_tokens"], entry["finish_reason"]) == (200, 800, "length")
    assert all("request_id" in entry for entry in entries)
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {"denoise", "commit", "block 0", "block 99"} <= {span["name"] for span in spans}
    numbers = json.loads(profile.read_text())
    assert numbers["new_tokens"] >= 800
    assert numbers["finish_reasons"]["length"] == 2  # the first pass is a request as well


@pytest.mark.parametrize("batch", [False, True])
def test_generate_writes_the_same_files(tmp_path, batch, capsys):
    """Of one prompt and of a file of them; `--force` replaces."""
    trace, profile = tmp_path / "trace.json", tmp_path / "profile.json"
    trace.touch()
    prompts = ["--prompt-ids", "3,5", "--prompt-ids", "3"]
    if batch:
        (tmp_path / "prompts").write_text('{"prompt_ids": [3, 5]}\n{"prompt_ids": [3]}\n')
        prompts = ["--prompts", str(tmp_path / "prompts"), "-o", str(tmp_path / "out")]
    files = ["--trace", str(trace), "--profile-json", str(profile), "--force"]
    assert main(["generate", str(GOLDEN), *prompts, *files, "--max-new-tokens", "20"]) == 0
    numbers = json.loads(profile.read_text())
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert numbers["requests"] == 2
    assert {"denoise", "request 0", "request 1", "block 0"} <= names


def test_ctrl_c_exits_with_130(tmp_path):
    """As every verb does; lines are text unless asked otherwise."""
    with Process(tmp_path) as server:
        with server.client() as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "bundle"
        code, log = server.end(signal.SIGINT)
    assert code == 130
    # the end may be told before the request that was just answered
    line = r"\S+Z info \S+ request method=GET path=/v1/models status=200 \S+"
    assert [one for one in log if re.fullmatch(line, one)]


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "fixedstate", "serve", str(tmp_path), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"127.0.0.1:{port} cannot be bound" in done.stderr


@pytest.mark.parametrize("level", [(), ("--token-file", "token")])
def test_an_open_address_without_a_token_is_noted(tmp_path, level):
    """Binding elsewhere is a choice; nobody should make it by accident."""
    (tmp_path / "token").write_text("a-token\n")
    options = [str(tmp_path / word) if word == "token" else word for word in level]
    with Process(tmp_path, "--host", "0.0.0.0", *options) as server:
        server.url()
        code, log = server.end()
    assert code == 0
    assert any("no token is asked for" in line for line in log) == (not level)
