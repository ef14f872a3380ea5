"""The HTTP front with a real Triton server behind it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from fixedstate.runtime import Request, Settings, load

pytestmark = pytest.mark.timeout(900)  # the first use installs two environments

PROMPT = "set arm_3 17\nget arm_3\n"


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    """``fixedstate serve --triton`` in front of the server."""
    log = tmp_path_factory.mktemp("front") / "log"
    command = [sys.executable, "-m", "fixedstate", "serve", "--triton", server.url, "--port", "0"]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, env=dict(os.environ))
    try:
        while not (found := re.search(r"ready: (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
        with httpx.Client(base_url=found[1], trust_env=False, verify=False, timeout=60) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    assert code == 0, log.read_text()


@pytest.fixture(scope="module")
def decoder(bundle):
    return load(bundle, threads=1)


def chunks_of(response):
    assert response.status_code == 200, response.text
    *chunks, last = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_the_front_gives_what_the_decoder_gives(front, decoder):
    """Whole and in blocks, with a seed, through two servers."""
    settings = Settings(40, temperature=1.0, seed=2**64 - 1, stop_ids=())
    ids = [10, 11, 12]
    result = decoder.generate([Request(ids, settings)])[0]
    expected = list(result.token_ids)
    body = {"prompt": ids, "max_tokens": 40, "temperature": 1, "seed": 2**64 - 1, "stop_ids": []}
    answer = front.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 40,
        "total_tokens": 43,
        "denoise_passes": result.denoise_passes,
    }
    chunks = chunks_of(front.post("/v1/completions", json={**body, "stream": True}))
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == expected
    assert len(chunks) == 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_text_and_stop_texts(front):
    body = {"prompt": PROMPT, "max_tokens": 64}
    whole = front.post("/v1/completions", json=body).json()["choices"][0]
    assert whole["text"] == '{"arm_3": 17}'
    cut = front.post("/v1/completions", json={**body, "stop": ["17", "}"]}).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ('{"arm_3": ', "stop")


def test_a_state_goes_through_both(front, decoder):
    settings = Settings(11, temperature=1.0, seed=5, stop_ids=())
    first = decoder.generate([Request([10, 11, 12], settings, keep_state=True)])[0]
    common = {"temperature": 1, "seed": 5, "stop_ids": [], "max_tokens": 11}
    body = {"prompt": [10, 11, 12], **common, "return_state": True}
    made = front.post("/v1/completions", json=body).json()
    assert base64.b64decode(made["state"]) == first.state.to_bytes()
    expected = decoder.generate([Request([13], settings, prefix=first.state)])[0]
    body = {"prompt": [13], **common, "state": made["state"]}
    answer = front.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [10**6]}, 400),
        ({"prompt": [1] * 300}, 400),  # the front would take it, the model does not
        ({"prompt": [1], "top_p": 0.5}, 400),
    ],
)
def test_refusals_of_either_are_refusals(front, body, status):
    response = front.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_good_and_bad_at_once(front, decoder):
    """Some servers fail under this; what is refused must not disturb what is not."""
    settings = Settings(20, temperature=1.0, seed=3, stop_ids=())
    expected = list(decoder.generate([Request([10, 11], settings)])[0].token_ids)
    good = {"prompt": [10, 11], "max_tokens": 20, "temperature": 1, "seed": 3, "stop_ids": []}
    bodies = [good, {"prompt": [10] * 300}, {"prompt": [10**6]}] * 8

    async def main():
        async with httpx.AsyncClient(
            base_url=front.base_url, trust_env=False, verify=False, timeout=60
        ) as client:
            asked = (client.post("/v1/completions", json=body) for body in bodies)
            return await asyncio.gather(*asked)

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 400, 400] * 8
    for answer in answers[::3]:
        assert answer.json()["choices"][0]["token_ids"] == expected


def test_a_client_that_leaves_frees_the_slot_behind_both(front, server):
    body = {"prompt": [1], "max_tokens": 1000, "stop_ids": [], "stream": True}
    with front.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
    done = front.post("/v1/completions", json={"prompt": [1], "max_tokens": 4})
    assert done.status_code == 200
    assert server.metrics()["fixedstate_active_slots"] == 0
