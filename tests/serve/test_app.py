"""The HTTP front against a real server: answers, refusals, cancellation, measurements."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fixedstate.runtime import Request, Settings, Snapshot
from fixedstate.serve.asked import Limits

PROMPT = "get arm"
SAMPLED = {"max_tokens": 40, "temperature": 1.0, "stop_ids": []}


def alone(golden, text, prompt=PROMPT, *, new=40, seed=0, stop_ids=(), **more):
    """What the golden bundle answers to one request by itself."""
    settings = Settings(new, temperature=1.0, seed=seed, stop_ids=stop_ids)
    return golden.generate([Request(text.encode(prompt), settings, **more)])[0]


def events(response):
    """The data of server-sent events, and that they end as they should."""
    found = []
    for block in response.split("\n\n"):
        if block:
            assert block.startswith("data: ")
            found.append(block.removeprefix("data: "))
    return found


def stream(client, body, path="/v1/completions"):
    """The chunks of a stream."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def metrics(client):
    """Samples by name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


# --- answers


def test_completion_is_what_the_decoder_alone_answers(golden_server, golden, text):
    result = alone(golden, text, seed=7)
    with golden_server.client() as client:
        body = {"model": "model", "prompt": PROMPT, "seed": 7, **SAMPLED}
        answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(result.token_ids)
    assert choice["text"] == text.decode(result.token_ids)
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 40,
        "total_tokens": 42,
        "denoise_passes": result.denoise_passes,
    }


def test_ids_are_a_prompt(golden_server, golden, text):
    """Also as a list in a list, as clients of several prompts send one."""
    ids = text.encode(PROMPT)
    with golden_server.client() as client:
        answers = [
            client.post("/v1/completions", json={"prompt": prompt, "seed": 7, **SAMPLED}).json()
            for prompt in (ids, [ids], [PROMPT])
        ]
    expected = list(alone(golden, text, seed=7).token_ids)
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected] * 3


def test_a_stream_has_one_chunk_per_block(golden_server, golden, text):
    """Blocks of 8 behind a prompt of 2: the first chunk holds 6 tokens, the last the rest."""
    with golden_server.client() as client:
        chunks = stream(client, {"prompt": PROMPT, "seed": 7, **SAMPLED})
    result = alone(golden, text, seed=7)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [len(choice["token_ids"]) for choice in choices] == [6, 8, 8, 8, 8, 2]
    assert [t for choice in choices for t in choice["token_ids"]] == list(result.token_ids)
    assert "".join(choice["text"] for choice in choices) == text.decode(result.token_ids)
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_comes_at_the_end_of_a_stream_where_it_is_asked_for(golden_server):
    with golden_server.client() as client:
        options = {"stream_options": {"include_usage": True}}
        *chunks, last = stream(client, {"prompt": PROMPT, **SAMPLED, **options})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 40


def test_running_usage_counts_what_was_sent(golden_server):
    """A client that measures needs it: an event is a block of tokens."""
    with golden_server.client() as client:
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *chunks, last = stream(client, {"prompt": PROMPT, **SAMPLED, **options})
    sent = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert sent == [6, 14, 22, 30, 38, 40]
    prompt = last["usage"]["prompt_tokens"]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [prompt + n for n in sent]
    assert last["usage"]["completion_tokens"] == 40


def test_chat_is_the_conversation_of_the_command(golden_server, golden, text):
    """`fixedstate chat` appends a line break to a line and goes on behind its own answer."""
    messages = [
        {"role": "system", "content": "get"},
        {"role": "user", "content": [{"type": "text", "text": "arm"}]},
        {"role": "assistant", "content": "1 2"},
        {"role": "user", "content": "pad"},
    ]
    result = alone(golden, text, "get\narm\n1 2pad\n", seed=3)
    with golden_server.client() as client:
        body = {"messages": messages, "seed": 3, **SAMPLED}
        answer = client.post("/v1/chat/completions", json=body).json()
        chunks = stream(client, body, "/v1/chat/completions")
    assert answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text.decode(result.token_ids)}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == message["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("as_stream", [False, True])
def test_stop_texts_end_the_answer_and_stand_not_in_it(golden_server, golden, text, as_stream):
    """A text of several tokens, in the middle of a block, while the decoder would go on."""
    whole = text.decode(alone(golden, text, seed=7, new=200).token_ids)
    stop = whole[20:25]
    body = {"prompt": PROMPT, "seed": 7, **SAMPLED, "max_tokens": 200, "stop": [stop, "?!"]}
    with golden_server.client() as client:
        if as_stream:
            choices = [chunk["choices"][0] for chunk in stream(client, body)]
        else:
            choices = client.post("/v1/completions", json=body).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    golden_server.until(lambda: golden_server.service.answers.load.running == 0)


def test_stop_ids_end_the_answer(golden_server, golden, text):
    result = alone(golden, text, seed=7, stop_ids=(8,))
    assert result.finish_reason == "stop"
    with golden_server.client() as client:
        body = {"prompt": PROMPT, "seed": 7, **SAMPLED, "stop_ids": [8]}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == list(result.token_ids)
    assert choice["finish_reason"] == "stop"


def test_32_at_once_are_answered_as_each_alone(golden_server, golden, text):
    """Seeds, lengths and slots mixed; a row depends on nothing but itself."""
    jobs = [(seed, 9 + seed % 30) for seed in range(32)]
    expected = [list(alone(golden, text, seed=seed, new=new).token_ids) for seed, new in jobs]

    async def ask(client, seed, new):
        body = {"prompt": PROMPT, **SAMPLED, "seed": seed, "max_tokens": new, "stream": True}
        response = await client.post("/v1/completions", json=body)
        chunks = [json.loads(data) for data in events(response.text)[:-1]]
        return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]

    async def main():
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(
            base_url=golden_server.url, trust_env=False, verify=False, timeout=60, limits=limits
        ) as client:
            return await asyncio.gather(*(ask(client, *job) for job in jobs))

    assert asyncio.run(main()) == expected


def test_a_state_goes_on_where_it_was_taken(golden_server, golden, text):
    """In and out, over HTTP and in the decoder, token for token."""
    first = alone(golden, text, seed=5, new=11, keep_state=True)
    ids = text.encode("set", goes_on=True)
    settings = Settings(24, temperature=1.0, seed=6, stop_ids=())
    expected = golden.generate([Request(ids, settings, prefix=first.state)])[0]
    with golden_server.client() as client:
        body = {"prompt": PROMPT, **SAMPLED, "seed": 5, "max_tokens": 11, "return_state": True}
        made = client.post("/v1/completions", json=body).json()
        last = stream(client, body)[-1]
        assert made["state"] == last["state"]
        assert base64.b64decode(made["state"]) == first.state.to_bytes()
        body = {"prompt": "set", **SAMPLED, "seed": 6, "max_tokens": 24, "state": made["state"]}
        answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    assert answer["usage"]["prompt_tokens"] == 2 + 11 + 1


def test_states_of_other_models_and_damaged_ones_are_refused(golden_server, golden, text):
    state = alone(golden, text, keep_state=True).state
    other = Snapshot(
        **{name: getattr(state, name) for name in state.__slots__ if name != "weights"},
        weights="0" * 64,
    )
    damaged = bytearray(state.to_bytes())
    damaged[-1] ^= 1
    with golden_server.client() as client:
        for data, words in ((other.to_bytes(), "weights"), (bytes(damaged), "damaged")):
            body = {"prompt": "1", "state": base64.b64encode(data).decode()}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
            assert response.json()["error"]["code"] == "state_refused"


# --- refusals


REFUSED = {
    "no-prompt": ({}, 400, "prompt"),
    "two-prompts": ({"prompt": ["a", "b"]}, 400, "prompt"),
    "prompt-number": ({"prompt": 1}, 400, "prompt"),
    "prompt-bool-ids": ({"prompt": [True]}, 400, "prompt"),
    "prompt-outside": ({"prompt": [99]}, 400, "prompt"),
    "prompt-mask": ({"prompt": [36]}, 400, "prompt"),
    "prompt-long": ({"prompt": "1 " * 65}, 400, "prompt"),
    "prompt-long-ids": ({"prompt": [1] * 65}, 400, "prompt"),
    "new-tokens": ({"prompt": "1", "max_tokens": 257}, 400, "max_tokens"),
    "seed-text": ({"prompt": "1", "seed": "1"}, 400, "seed"),
    "n": ({"prompt": "1", "n": 2}, 400, "n"),
    "n-true": ({"prompt": "1", "n": True}, 400, "n"),
    "best-of": ({"prompt": "1", "best_of": 2}, 400, "best_of"),
    "logprobs": ({"prompt": "1", "logprobs": 0}, 400, "logprobs"),
    "echo": ({"prompt": "1", "echo": True}, 400, "echo"),
    "suffix": ({"prompt": "1", "suffix": "x"}, 400, "suffix"),
    "top_p": ({"prompt": "1", "top_p": 0.9}, 400, "top_p"),
    "penalty": ({"prompt": "1", "presence_penalty": 0.1}, 400, "presence_penalty"),
    "bias": ({"prompt": "1", "logit_bias": {"1": 5}}, 400, "logit_bias"),
    "tools": ({"prompt": "1", "tools": [{}]}, 400, "tools"),
    "format": ({"prompt": "1", "response_format": {"type": "json"}}, 400, "response_format"),
    "stream-number": ({"prompt": "1", "stream": 1}, 400, "stream"),
    "options": ({"prompt": "1", "stream_options": {}, "stream": True, "user": 1}, 400, "user"),
    "options-alone": (
        {"prompt": "1", "stream_options": {"include_usage": True}},
        400,
        "stream_options",
    ),
    "running-usage-alone": (
        {"prompt": "1", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        400,
        None,
    ),
    "unknown": ({"prompt": "1", "top_k": 3}, 400, None),
    "messages": ({"prompt": "1", "messages": []}, 400, None),
    "model": ({"prompt": "1", "model": "other"}, 404, "model"),
    "model-number": ({"prompt": "1", "model": 1}, 404, "model"),
    "state-and-stop": ({"prompt": "1", "return_state": True, "stop": "x"}, 400, "return_state"),
    "temperature": ({"prompt": "1", "temperature": -1}, 400, "temperature"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("as_stream", [False, True])
def test_wrong_requests_are_refused_before_anything_is_sent(golden_server, case, as_stream):
    body, status, field = REFUSED[case]
    with golden_server.client() as client:
        body = {"stream": True, **body} if as_stream and case != "options-alone" else body
        response = client.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"]


HARMLESS = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "top_p": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "suffix": None,
    "user": "someone",
    "seed": None,
}


def test_fields_that_ask_for_nothing_are_taken(golden_server):
    """Clients send their defaults along."""
    with golden_server.client() as client:
        body = {"prompt": "1", "max_tokens": 1, **HARMLESS}
        assert client.post("/v1/completions", json=body).status_code == 200


EXTREMES = {
    "temperature-large": {"temperature": 1e308},
    "temperature-38": {"temperature": 1e38, "threshold": 0.5},
    "temperature-small": {"temperature": 5e-324},
    "threshold-0": {"threshold": 0},
    "threshold-1": {"threshold": 1},
    "steps-large": {"steps": 1 << 16},
    "least-is-most": {"min_new_tokens": 20, "max_tokens": 20},
    "seed-large": {"seed": 2**64 - 1, "temperature": 1},
    "stops": {"stop": ["\u0000", "\U0001f600"], "stop_ids": [0] * 16},
}


@pytest.mark.parametrize("case", EXTREMES)
def test_what_is_allowed_never_ends_the_decoder(golden_server, golden, text, case):
    """One thread decodes for everybody: a request that made it fail would be a way to stop it."""
    with golden_server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 20, **EXTREMES[case]}
        assert client.post("/v1/completions", json=body).status_code == 200
        body = {"prompt": PROMPT, "seed": 7, **SAMPLED}
        answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == list(alone(golden, text, seed=7).token_ids)


MESSAGES = {
    "none": None,
    "empty": [],
    "text": "hi",
    "role": [{"role": "tool", "content": "x"}],
    "role-list": [{"role": [], "content": "x"}],
    "no-content": [{"role": "user"}],
    "content-number": [{"role": "user", "content": 1}],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    "name": [{"role": "user", "content": "x", "name": "me"}],
    "answered": [{"role": "assistant", "content": "x"}],
    "entry": ["x"],
}


@pytest.mark.parametrize("case", MESSAGES)
def test_wrong_conversations_are_refused(golden_server, case):
    with golden_server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": MESSAGES[case]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": NaN}', b"\xff", b"[" * 20_000])
def test_bodies_that_are_no_object_are_refused(golden_server, body):
    with golden_server.client() as client:
        response = client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_what_is_not_there_says_so_in_the_same_form(golden_server, method, path, status):
    with golden_server.client() as client:
        response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("size", "chunked"),
    [(1001, False), (1001, True), (3_000_000, False), (3_000_000, True), (6_000_000, False)],
)
def test_large_bodies_are_refused_and_the_refusal_arrives(serve_stepped, size, chunked):
    """Also when the length was not told, and while the client still sends."""
    limits = Limits(max_body_bytes=1000, max_state_bytes=0)
    running = serve_stepped(limits=limits)

    def parts():
        for _ in range(0, size, 1 << 16):
            yield b" " * (1 << 16)

    with running.client() as client:
        content = parts() if chunked else b" " * size
        response = client.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        assert client.get("/health/ready").status_code == 200


def test_a_body_that_does_not_come_is_given_up(serve_stepped, monkeypatch):
    """A client that sends nothing holds a connection, not for ever."""
    monkeypatch.setattr("fixedstate.serve.app._BODY_SECONDS", 0.1)
    host, port = serve_stepped().url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")


def test_models_are_named(golden_server):
    with golden_server.client() as client:
        data = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in data] == ["model"]
        assert client.get("/v1/models/model").json() == data[0]
        assert client.get("/v1/models/other").status_code == 404


# --- who may ask


def test_a_token_is_asked_for(serve_golden):
    """Everywhere but where probes look."""
    running = serve_golden(token="s3cret-token")
    with running.client() as client:
        for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret-token"}):
            response = client.get("/v1/models", headers=header)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/metrics", headers=header).status_code == 401
            assert client.post("/v1/completions", content=b"{", headers=header).status_code == 401
        assert client.get("/health/ready").status_code == 200
        assert client.get("/health/live").status_code == 200
        good = {"Authorization": "bearer s3cret-token"}
        assert client.get("/v1/models", headers=good).status_code == 200


@pytest.mark.parametrize(("given", "kept"), [("my-id.7", True), ("a b", False), ("x" * 65, False)])
def test_requests_have_an_id(golden_server, given, kept):
    """One that would break a log line is replaced."""
    with golden_server.client() as client:
        response = client.get("/v1/models", headers={"X-Request-Id": given})
    name = response.headers["x-request-id"]
    assert (name == given) == kept
    assert name.isascii()


# --- slots and queue


def open_stream(running, prompt=(1,), new=64):
    """A stream over a plain socket, so that leaving it is only a close."""
    body = json.dumps({"prompt": list(prompt), "max_tokens": new, "stop_ids": [], "stream": True})
    host, port = running.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall((head + body).encode())
    return sock


@pytest.mark.parametrize("after", ["the-first-block", "nothing"])
def test_a_client_that_leaves_frees_its_slot_within_a_pass(serve_stepped, after):
    """Whether or not anything was sent to it."""
    running = serve_stepped(slots=1)
    engine, answers = running.engine, running.service.answers
    sock = open_stream(running)
    running.until(lambda: len(answers._front._open) == 1)
    if after == "the-first-block":
        engine.step(3)  # the three open slots of the first block
        running.until(lambda: engine.denoised > 0 and b"token_ids" in sock.recv(65536))
    sock.close()
    running.until(lambda: not answers._open)  # the order stands before a pass is let through
    before = engine.denoised
    engine.step(1)
    running.until(lambda: answers.load.running == 0 and not answers._front._open)
    assert engine.denoised - before <= 1
    with running.client() as client:
        assert metrics(client)["fixedstate_http_responses_total", ("status", "499")] == 1


def test_a_whole_answer_is_cancelled_as_well(serve_stepped):
    """Nobody reads it, and no stream is there that would notice."""
    running = serve_stepped(slots=1)
    answers = running.service.answers
    with running.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": [1]}, timeout=0.3)
    running.until(lambda: not answers._open)
    running.engine.step(1)
    running.until(lambda: answers.load.running == 0)


def test_a_full_queue_is_said_and_passes(serve_stepped):
    """One runs, one waits, the third is told to come again."""
    running = serve_stepped(slots=1, limits=Limits(queue=1))
    front = running.service.answers._front
    with running.client() as client:
        sockets = []
        for count in (1, 2):
            sockets.append(open_stream(running, new=4))
            running.until(lambda count=count: len(front._open) == count)
        response = client.post("/v1/completions", json={"prompt": [1]})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        running.until(lambda: front.load.running == 1 or running.engine.step(1))
        running.engine.let_go()
        for sock in sockets:
            with sock, sock.makefile("rb") as lines:
                running.until(lambda lines=lines: b"[DONE]" in lines.readline())
        assert client.post("/v1/completions", json={"prompt": [1]}).status_code == 200


def test_load_is_measured_while_it_lasts(serve_golden):
    """Slots, queue and bytes; all of it gone with the requests."""
    running = serve_golden(slots=2)
    answers, engine = running.service.answers, running.service.answers._decoder.engine
    with running.client() as client:
        sockets = [open_stream(running, new=1000) for _ in range(3)]
        running.until(lambda: answers.load.running == 2)
        found = metrics(client)
        assert found[("fixedstate_slots",)] == 2
        assert found[("fixedstate_active_slots",)] == 2
        assert found[("fixedstate_queue",)] == 1
        assert found[("fixedstate_state_bytes",)] == 2 * engine.state_bytes()
        for sock in sockets:
            sock.close()
        running.until(lambda: answers.load.running == 0)
        assert metrics(client)[("fixedstate_state_bytes",)] == 0


# --- health and measurements


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics", "/v1/models"])
def test_the_head_alone_is_that_of_the_whole(golden_server, path):
    """Load generators and monitors look first whether a page is there."""
    with golden_server.client() as client:
        head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_ready_only_after_the_first_pass(serve_stepped):
    running = serve_stepped(held=True)
    with running.client() as client:
        assert client.get("/health/live").status_code == 200
        ready = client.get("/health/ready")
        assert ready.status_code == 503
        assert not ready.json()["ready"]
        early = client.post("/v1/completions", json={"prompt": [1]})
        assert early.status_code == 503
        assert int(early.headers["retry-after"]) >= 1
        running.engine.let_go()
        running.until(lambda: client.get("/health/ready").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": [1]}).status_code == 200


def test_what_broke_is_told_by_live(serve_stepped):
    """Restarting is all that helps: the thread that decodes has ended."""
    running = serve_stepped()

    def broken(ids, first=0):
        raise RuntimeError("the device is gone")

    running.engine.denoise = broken
    with running.client() as client:
        response = client.post("/v1/completions", json={"prompt": [1]})
        assert response.status_code == 500
        assert "device" not in response.text
        for path in ("/health/live", "/health/ready"):
            response = client.get(path)
            assert response.status_code == 503
            assert "device is gone" in response.json()["reason"]
        assert client.post("/v1/completions", json={"prompt": [1]}).status_code == 503


def test_a_row_that_fails_concerns_itself_only(serve_stepped):
    """Scores that are not finite end one answer with an error and leave the other."""
    running = serve_stepped(slots=2)
    table = running.engine.table
    running.engine.table = lambda history, ids: (
        table(history, ids) * (float("nan") if 7 in ids else 1)
    )
    running.engine.let_go()
    with running.client() as client:
        bad = client.post("/v1/completions", json={"prompt": [7], "max_tokens": 9})
        assert bad.status_code == 500
        assert "not finite" in bad.json()["error"]["message"]
        chunk = client.post("/v1/completions", json={"prompt": [7], "stream": True}).text
        assert "not finite" in chunk
        assert "[DONE]" not in chunk
        assert client.post("/v1/completions", json={"prompt": [1]}).status_code == 200
        assert client.get("/health/live").status_code == 200


def test_measurements_are_those_of_the_conventions(serve_golden):
    """The names are what dashboards ask for."""
    running = serve_golden()
    with running.client() as client:
        whole = client.post("/v1/completions", json={"prompt": PROMPT, **SAMPLED}).json()
        stream(client, {"prompt": PROMPT, **SAMPLED})
        client.post("/v1/completions", json={"prompt": 1})
        found = metrics(client)
    labels = (
        ("gen_ai_operation_name", "text_completion"),
        ("gen_ai_provider_name", "fixedstate"),
        ("gen_ai_request_model", "model"),
    )
    for name in ("time_to_first_token", "time_per_output_token"):
        assert found[(f"gen_ai_server_{name}_seconds_count", *labels)] == 2
        assert 0 < found[(f"gen_ai_server_{name}_seconds_sum", *labels)] < 60
    for error, count in (("", 2), ("UsageError", 1)):
        name = "gen_ai_server_request_duration_seconds_count"
        assert found[(name, ("error_type", error), *labels)] == count
    for kind, count in (("input", 4), ("output", 80)):
        assert found[("gen_ai_server_tokens_total", *labels, ("gen_ai_token_type", kind))] == count
    passes = 2 * whole["usage"]["denoise_passes"]
    assert found[("fixedstate_denoise_passes_total",)] == passes
    assert found[("fixedstate_passes_per_token_sum",)] == pytest.approx(passes / 40)
    assert found["fixedstate_answers_total", ("finish_reason", "length")] == 2


# --- the end


def test_drain_lets_open_answers_finish_and_takes_no_more(serve_stepped):
    running = serve_stepped(slots=1)
    sock = open_stream(running, new=8)
    running.until(lambda: running.service.open == 1)
    with running.client() as client:
        running.end()
        running.until(lambda: running.service.draining)
        ready = client.get("/health/ready")
        assert ready.status_code == 503
        refused = client.post("/v1/completions", json={"prompt": [1]})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        running.engine.let_go()
        with sock, sock.makefile("rb") as lines:
            running.until(lambda: b"[DONE]" in lines.readline())
    running.join()
    assert running.codes == [0]


@pytest.mark.parametrize("how", ["time", "again"])
def test_drain_ends_what_does_not_finish(serve_stepped, how):
    """After its time, or at once when it is told a second time."""
    running = serve_stepped(slots=1, drain_seconds=0.2 if how == "time" else 600.0)
    sock = open_stream(running, new=1000)
    running.until(lambda: running.service.open == 1)
    start = time.monotonic()
    running.end()
    if how == "again":
        running.end()
    running.until(
        lambda: running.service.answers._front._orders or not running.service.answers._open
    )
    running.engine.let_go()
    running.join()
    assert time.monotonic() - start < 30
    assert running.codes == [0]
    with sock, sock.makefile("rb") as lines:
        rest = lines.read()
    assert b'"finish_reason": "cancelled"' in rest or b"503" in rest.split(b"\r\n")[0]
