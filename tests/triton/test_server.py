"""A real Triton server on a generated repository: server 2.51.0, its Python back end, on a CPU."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from triton_stand_in import until

from fixedstate.cli import cli
from fixedstate.errors import BackendError, BusyError, UsageError
from fixedstate.export import tritonconfig
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.text import Text
from fixedstate.serve.tritonstream import TritonClient

pytestmark = pytest.mark.timeout(900)  # the first use installs two environments

QUESTION = "set arm_3 17\nget arm_3\n"
ENDLESS = {"max_new_tokens": 100_000, "stop_ids": ""}
PATH = "/v2/models/fixedstate/generate_stream"
LOCK = "boost::interprocess::lock_exception"


@pytest.fixture(scope="module")
def alone(bundle):
    """Answers of the bundle itself."""
    with load(bundle, threads=1) as decoder:

        def answer(prompt, **settings):
            return list(decoder.generate([Request(prompt, Settings(**settings))])[0].token_ids)

        yield answer


def ask(server, ids=None, text=None, deadline=60.0, **parameters):
    """All blocks of one answer."""
    with TritonClient(server.url, deadline=deadline) as client:
        return list(client.stream(ids=ids, text=text, parameters=parameters))


def tokens(blocks):
    return [token for block in blocks for token in block.token_ids]


# --- what is loaded ------------------------------------------------------------------------------


def test_server_reports_the_configuration_that_was_written(server, repository):
    """Every field of the file, with its value; the server only adds defaults."""
    from tritonclient import grpc

    with contextlib.closing(grpc.InferenceServerClient(server.url)) as client:
        for name in repository.models:
            written = tritonconfig.parsed((repository.path / name / "config.pbtxt").read_text())
            found = client.get_model_config(name).config
            for field, value in written.ListFields():
                if field.name == "instance_group":  # the server numbers them
                    assert [(g.kind, g.count) for g in found.instance_group] == [
                        (g.kind, g.count) for g in value
                    ]
                else:
                    assert getattr(found, field.name) == value, field.name


def test_server_sees_no_other_models(server, repository):
    """Files beside the models, and folders in them, are taken for none."""
    code, body = server.post("/v2/repository/index", {})
    assert code == 200
    found = {entry["name"]: entry.get("state") for entry in json.loads(body)}
    assert found == dict.fromkeys(repository.models, "READY")


# --- answers -------------------------------------------------------------------------------------


def test_blocks_come_in_order_with_names_and_types(server, bundle, alone):
    """The server checks neither dtype nor name of an output: both are asserted here."""
    import queue

    from tritonclient import grpc

    prompt = Text.open(bundle).encode(QUESTION)
    arrived: queue.Queue = queue.Queue()
    client = grpc.InferenceServerClient(server.url)
    client.start_stream(lambda result, error: arrived.put((result, error)))
    tensor = grpc.InferInput("input_ids", [len(prompt)], "INT64")
    tensor.set_data_from_numpy(np.array(prompt, np.int64))
    client.async_stream_infer(
        "fixedstate",
        [tensor],
        parameters={"max_new_tokens": 40, "stop_ids": ""},
        enable_empty_final_response=True,
    )
    found = []
    while True:
        result, error = arrived.get(timeout=60)
        assert error is None
        response = result.get_response()
        found.append(
            (
                {entry.name: entry.datatype for entry in response.outputs},
                result.as_numpy("block_index").tolist(),
                result.as_numpy("token_ids").tolist(),
                result.as_numpy("finish_reason").tolist(),
                response.parameters["triton_final_response"].bool_param,
            )
        )
        if found[-1][-1]:
            break
    client.stop_stream()
    client.close()
    types = {
        "text_output": "BYTES",
        "token_ids": "INT64",
        "block_index": "INT32",
        "finish_reason": "BYTES",
        "prompt_tokens": "INT64",
    }
    assert [entry[0] for entry in found] == [types, types, types | {"denoise_passes": "INT64"}]
    assert [entry[1] for entry in found] == [[0], [1], [2]]
    expected = alone(prompt, max_new_tokens=40, stop_ids=())
    first = 16 - len(prompt) % 16  # beside the end of the prompt
    second = first + 16
    cut = [expected[:first], expected[first:second], expected[second:]]
    assert [entry[2] for entry in found] == cut
    assert [entry[3] for entry in found] == [[b""], [b""], [b"length"]]
    assert [entry[4] for entry in found] == [False, False, True]


def test_text_is_that_of_the_ids(server, bundle, alone):
    """The question's answer is known to the model."""
    tokenizer = Text.open(bundle)
    blocks = ask(server, text=QUESTION, max_new_tokens=24)
    assert tokens(blocks) == alone(tokenizer.encode(QUESTION), max_new_tokens=24)
    assert "".join(block.text for block in blocks) == tokenizer.decode(tokens(blocks))
    assert '"arm_3": 17' in blocks[0].text
    assert blocks[-1].finish_reason == "stop"


def test_sixteen_seeds_at_once_are_each_as_alone(server, alone):
    """Four slots: rows join and leave while others decode."""
    prompts = [[41 + i % 5, 47, 40 + i] for i in range(16)]

    def one(i):
        return tokens(
            ask(server, prompts[i], max_new_tokens=20 + i, seed=2**63 + i, temperature=1.0)
        )

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(16)))
    for i, answer in enumerate(answers):
        expected = alone(prompts[i], max_new_tokens=20 + i, seed=2**63 + i, temperature=1.0)
        assert answer == expected, i


BAD = {
    "top_p": {"top_p": 0.5},
    "steps": {"steps": 1.5},
    "temperature": {"temperature": -1.5},
    "seed": {"seed": "-1"},
    "threshold": {"threshold": True},
    "max_new_tokens": {"max_new_tokens": 0},
    "max_tokens": {"max_tokens": 100_001},
    "stop_ids": {"stop_ids": "1;2"},
    "state": {"state": base64.b64encode(b"no state").decode()},
}


def test_bad_requests_among_good_ones(server, alone):
    """Each is refused by name with its code; the good ones get their answers.

    Several rounds: a server that reads freed memory behind a refusal dies only now and then.
    """
    good = [[41, 42], [43], [44, 45, 46]]

    def one(what):
        if isinstance(what, list):
            return tokens(ask(server, what, max_new_tokens=48))
        with pytest.raises(UsageError, match=what):
            ask(server, [41], **BAD[what])
        return what

    asked = [*good, *BAD]
    for _ in range(5):
        with ThreadPoolExecutor(6) as pool:
            answers = dict(zip(map(str, asked), pool.map(one, asked), strict=True))
        for prompt in good:
            assert answers[str(prompt)] == alone(prompt, max_new_tokens=48)
    for prompt, words in (([41, 999], "999"), ([-1], "prompt"), ([41] * 257, "257")):
        with pytest.raises(UsageError, match=words):
            ask(server, prompt)


def test_tensors_of_other_types_never_reach_the_model(server):
    """The server refuses them by the configuration."""
    path = "/v2/models/fixedstate/infer"
    for tensor in (
        {"name": "input_ids", "datatype": "INT32", "shape": [1], "data": [1]},
        {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]},
        {"name": "other", "datatype": "INT64", "shape": [1], "data": [1]},
    ):
        code, body = server.post(path, {"inputs": [tensor]})
        assert code in (400, 501), body
        assert "error" in body
    assert server.get("/v2/health/ready")[0] == 200


# --- room ----------------------------------------------------------------------------------------


class Streams:
    """Streams that never end by themselves, each begun and at its first block or waiting."""

    def __init__(self, server, count: int) -> None:
        self.clients = [TritonClient(server.url) for _ in range(count)]
        self.answers = []
        self.threads = []
        self.first = [threading.Event() for _ in range(count)]
        self.left = set(range(count))
        for client, event in zip(self.clients, self.first, strict=True):
            answer = client.stream(ids=[41], parameters=ENDLESS)
            self.answers.append(answer)
            thread = threading.Thread(target=self._next, args=(answer, event), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _next(self, answer, event) -> None:
        with contextlib.suppress(BackendError):  # the test fails at the event
            next(answer)
            event.set()

    def cancel(self, index: int) -> None:
        self.left.discard(index)
        self.threads[index].join(60)
        self.answers[index].close()
        self.clients[index].__exit__(None, None, None)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + 60
        while self.left:  # those in a slot first: they make room for the others
            seated = [i for i in self.left if self.first[i].is_set() or time.monotonic() > end]
            for index in seated:
                self.cancel(index)
            time.sleep(0.01)


def test_cancel_frees_a_slot_and_a_full_queue_is_refused(server):
    """Twenty streams take four slots and sixteen places; a cancelled one makes room at once."""
    before = server.metrics()
    # Left in this order: the waiting ones get slots as the others are cancelled.
    with contextlib.ExitStack() as stack:
        running = Streams(server, 4)
        for event in running.first:
            assert event.wait(60)
        waiting = stack.enter_context(Streams(server, 16))
        stack.enter_context(running)
        until(lambda: server.metrics()["fixedstate_queued_requests"] == 16, 60)
        with pytest.raises(BusyError, match="try again"):
            ask(server, [42], max_new_tokens=1)
        code, body = server.post(PATH, {"input_ids": [42], "max_new_tokens": 1})
        assert (code, "try again" in body) == (400, True)  # HTTP streams have one code for errors
        assert not any(event.is_set() for event in waiting.first)
        running.cancel(0)
        until(lambda: any(event.is_set() for event in waiting.first), 30)
    until(lambda: server.metrics()["fixedstate_active_slots"] == 0, 60)
    after = server.metrics()
    counted = {
        outcome: after[f"fixedstate_requests_total.{outcome}"]
        - before[f"fixedstate_requests_total.{outcome}"]
        for outcome in ("cancelled", "rejected")
    }
    assert counted == {"cancelled": 20, "rejected": 2}
    assert tokens(ask(server, [42], max_new_tokens=4))


def test_client_that_leaves_frees_its_slot(server):
    """A broken HTTP connection counts as a cancel."""
    before = server.metrics()["fixedstate_requests_total.cancelled"]
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    connection.request("POST", PATH, json.dumps({"input_ids": [41], **ENDLESS}))
    answer = connection.getresponse()
    assert answer.read(5) == b"data:"
    connection.sock.shutdown(socket.SHUT_RDWR) if connection.sock else None
    answer.close()
    connection.close()
    until(lambda: server.metrics()["fixedstate_requests_total.cancelled"] == before + 1, 30)
    until(lambda: server.metrics()["fixedstate_active_slots"] == 0, 30)


# --- HTTP ----------------------------------------------------------------------------------------


def test_generate_stream(server, bundle, alone):
    """Server-sent events, one a block; the last one with the reason."""
    code, body = server.post(PATH, {"text_input": QUESTION, "max_new_tokens": 40, "stop_ids": ""})
    events = [json.loads(line[5:]) for line in body.splitlines() if line.startswith("data:")]
    prompt = Text.open(bundle).encode(QUESTION)
    assert code == 200
    assert [event["block_index"] for event in events] == [0, 1, 2]
    found = [token for event in events for token in event["token_ids"]]
    assert found == alone(prompt, max_new_tokens=40, stop_ids=())
    assert events[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [41], "steps": 0}, "steps"),
        ({"input_ids": [41], "text_input": "a"}, "both"),
        ({"max_new_tokens": 1}, "neither"),
        ({"input_ids": [41], "parameters": {"top_k": 1}}, "top_k"),
    ],
)
def test_bad_http_request_is_a_400_with_the_reason(server, body, words):
    code, said = server.post(PATH, body)
    assert code == 400
    assert words in said


def test_facade_gives_the_whole_answer(server, bundle, alone):
    """One response for clients that take exactly one; errors keep their words."""
    path = "/v2/models/fixedstate_generate/generate"
    code, body = server.post(path, {"text_input": QUESTION, "max_new_tokens": 40, "stop_ids": ""})
    assert code == 200
    answer = json.loads(body)
    prompt = Text.open(bundle).encode(QUESTION)
    assert answer["token_ids"] == alone(prompt, max_new_tokens=40, stop_ids=())
    assert answer["text_output"] == Text.open(bundle).decode(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    code, body = server.post(path, {"text_input": QUESTION, "max_new_tokens": 0})
    assert code >= 400
    assert "max_new_tokens" in body


# --- numbers and states --------------------------------------------------------------------------


def test_metrics_count_what_was_done(server):
    before = server.metrics()
    blocks = ask(server, [41, 42], max_new_tokens=40, stop_ids="")
    after = server.metrics()
    difference = {name: after[name] - before[name] for name in after}
    assert difference["fixedstate_requests_total.ok"] == 1
    assert difference["fixedstate_blocks_total"] == len(blocks) == 3
    assert difference["fixedstate_tokens_total"] == 40
    assert 3 <= difference["fixedstate_passes_total"] <= 48
    assert after["fixedstate_state_bytes"] > 0
    assert after["fixedstate_active_slots"] == 0


def test_a_state_moves_from_here_into_the_server_and_back(server, bundle, tmp_path):
    """Three parts of one answer, the middle one decoded by the server: token for token."""

    def run(*args):
        done = CliRunner().invoke(cli, [str(arg) for arg in args])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    ids = ("--prompt-ids", "41,42,43", "--json", "--seed", 5, "--temperature", 1)
    go_on = ("--prompt-ids", "", "--json", "--seed", 5, "--temperature", 1)
    part = ("--max-new-tokens", 13, "--min-new-tokens", 13)  # up to the end of a block
    new = ("--max-new-tokens", 16, "--min-new-tokens", 16)
    whole = run("generate", bundle, *ids, "--max-new-tokens", 45, "--min-new-tokens", 45)
    a, b = tmp_path / "a", tmp_path / "b"
    first = run("generate", bundle, *ids, *part, "--save-state", a)
    second = run("client", server.url, *go_on, *new, "--prefix", a, "--save-state", b)
    third = run("generate", bundle, *go_on, *new, "--prefix", b)
    assert first["token_ids"] + second["token_ids"] + third["token_ids"] == whole["token_ids"]


def test_client_prints_as_generate_does(server, bundle):
    arguments = ["--prompt", QUESTION, "--max-new-tokens", "24"]
    here = CliRunner().invoke(cli, ["generate", str(bundle), *arguments])
    for options in ([], ["--no-stream"]):
        there = CliRunner().invoke(cli, ["client", server.url, *arguments, *options])
        assert (there.exit_code, there.stdout) == (0, here.stdout)
    refused = CliRunner().invoke(cli, ["client", server.url, "--prompt", "a" * 70_000])
    assert refused.exit_code == 2
    assert "70000 bytes" in refused.stderr
    absent = CliRunner().invoke(cli, ["client", server.url, "--prompt", "a", "--model", "x"])
    assert absent.exit_code == 1
    assert "'x'" in absent.stderr


def test_model_is_unloaded_and_loaded_again(server, alone):
    assert server.post("/v2/repository/models/fixedstate/unload", {})[0] == 200
    until(lambda: server.get("/v2/models/fixedstate/ready")[0] != 200)
    assert server.post("/v2/repository/models/fixedstate/load", {})[0] == 200
    assert tokens(ask(server, [41], max_new_tokens=8)) == alone([41], max_new_tokens=8)


# --- what breaks ---------------------------------------------------------------------------------


def test_dead_stub_is_an_error_within_seconds_and_comes_back(start_server, repository, alone):
    """The server goes on to say it is ready; unloading and loading brings the model back.

    A stub that dies with a lock in its hands takes the server of 24.10 with it, and no other reason
    may end one: that is left to supervision, see the next test.
    """
    with start_server(repository.path, "--no-supervise", "--exit-timeout", "3") as server:
        assert tokens(ask(server, [41], max_new_tokens=8)) == alone([41], max_new_tokens=8)
        server.kill_stub()
        start = time.monotonic()
        with pytest.raises(BackendError) as failed:
            ask(server, [41], max_new_tokens=8)
        assert time.monotonic() - start < 10
        if "not healthy" not in str(failed.value):
            assert server.process.wait(10) == 1
            assert LOCK in server.log
            return
        assert server.get("/v2/health/ready")[0] == 200
        assert server.post("/v2/repository/models/fixedstate/unload", {})[0] == 200
        assert server.post("/v2/repository/models/fixedstate/load", {})[0] == 200
        assert tokens(ask(server, [41], max_new_tokens=8)) == alone([41], max_new_tokens=8)
    assert server.code in (0, 1)  # the dead instance may take the whole time there is


def test_supervised_server_survives_a_dead_stub_and_a_shape_bomb(start_server, repository, alone):
    """launch.py asks real questions: it finds both, and starts the server anew."""
    before = set(Path("/dev/shm").glob("triton_python_backend_shm_region_*"))
    bomb = {"name": "input_ids", "datatype": "INT64", "shape": [2**63 - 1], "data": [1]}
    with start_server(repository.path, "--probe-every", "0.5") as server:
        server.note_regions()
        server.kill_stub()
        server.wait_ready(2)
        assert tokens(ask(server, [41], max_new_tokens=8)) == alone([41], max_new_tokens=8)
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.post("/v2/models/fixedstate_generate/infer", {"inputs": [bomb]}, seconds=10)
        with contextlib.suppress(AssertionError):  # a newer server may refuse it and live
            server.wait_ready(3, seconds=30)
        assert tokens(ask(server, [41], max_new_tokens=8)) == alone([41], max_new_tokens=8)
    assert server.code == 0
    assert "does not answer" in server.log or LOCK in server.log
    left = set(Path("/dev/shm").glob("triton_python_backend_shm_region_*")) - before
    assert not left & server.regions, "shared memory of a dead stub was left behind"


def test_sigterm_lets_open_streams_end(start_server, repository):
    """Ports close at once, a stream runs to its end, the exit code is 0."""
    with start_server(repository.path) as server:
        with TritonClient(server.url) as client:
            answer = client.stream(ids=[41], parameters={"max_new_tokens": 2000, "stop_ids": ""})
            blocks = [next(answer)]
            server.process.send_signal(signal.SIGTERM)
            blocks += answer
        assert len(tokens(blocks)) == 2000
    assert server.code == 0


def test_client_gives_up_at_the_deadline(server):
    """A server may never answer: nobody waits for ever."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        with TritonClient(f"127.0.0.1:{port}", deadline=0.5) as client:
            start = time.monotonic()
            with pytest.raises(BackendError, match=r"within 0\.5 s"):
                list(client.stream(ids=[41]))
            assert time.monotonic() - start < 20


# --- launch.py -----------------------------------------------------------------------------------


def launch(folder, package, python, *options):
    command = [sys.executable, str(folder / "launch.py"), "--pytriton", str(package)]
    return subprocess.run(
        [*command, "--python", str(python), *options], capture_output=True, text=True, check=False
    )


def test_launch_checks_before_it_starts(server_package, runtime310, repository):
    done = launch(repository.path, server_package, runtime310.python, "--check")
    assert (done.returncode, "all checks passed" in done.stderr) == (0, True), done.stderr


def test_TS_08_launch_refuses_too_little_shared_memory(
    server_package, runtime310, repository, tmp_path
):
    """The stub would die without a useful word."""
    import shutil

    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(repository.path / "launch.py", copy)
    record = {**repository.record, "shm_bytes": 1 << 60}
    (copy / "repository.json").write_text(json.dumps(record))
    done = launch(copy, server_package, runtime310.python, "--check")
    assert done.returncode == 1
    assert "--shm-size" in done.stderr


def test_launch_refuses_numpy_2_under_an_old_server(server_package, repository):
    done = launch(repository.path, server_package, sys.executable, "--check")
    assert done.returncode == 1
    assert "come out empty" in done.stderr


def test_launch_ends_a_start_that_takes_too_long(server_package, runtime310, repository):
    done = launch(repository.path, server_package, runtime310.python, "--deadline", "0.01")
    assert done.returncode == 1
    assert "not ready after 0.01 s" in done.stderr
