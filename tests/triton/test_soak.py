"""A minute of 32 streams with random cancels against a real server (`make nightly`)."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from fixedstate.errors import FixedStateError
from fixedstate.export import tritonrepo
from fixedstate.runtime import BlockEvent, Decoder, Request, Settings, load
from fixedstate.serve.tritonmodel import ModelSetup
from fixedstate.serve.tritonstream import Block, TritonClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
STREAMS = 32
PROMPTS = [[41 + i % 7, 47, 40 + i] for i in range(64)]
NEW = 32
CANCELLED = 0.25  # share of streams that are left behind their first block


def settings(i: int) -> Settings:
    return Settings(max_new_tokens=NEW, seed=i, temperature=1.0, stop_ids=())


def resident(pids: list[int]) -> int:
    """Bytes of memory that these processes hold for themselves."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def in_process(bundle: Path, slots: int, seconds: float) -> tuple[list[list[int]], float]:
    """Answers, and blocks a second of the same load."""
    with load(bundle, threads=1, slots=slots) as decoder:
        results = decoder.generate([Request(p, settings(i)) for i, p in enumerate(PROMPTS)])
        blocks = streams_on(decoder, seconds)
    answers = [list(result.token_ids) for result in results]
    return answers, blocks / seconds


def streams_on(decoder: Decoder, seconds: float) -> int:
    """Blocks that streams like those of the test get from the scheduler itself."""
    draws = [random.Random(number) for number in range(STREAMS)]
    blocks = 0
    with decoder.scheduler() as scheduler:
        open_streams: dict[int, tuple[int, bool]] = {}

        def ask(stream: int) -> None:
            i, cancel = draws[stream].randrange(len(PROMPTS)), draws[stream].random() < CANCELLED
            open_streams[scheduler.submit(Request(PROMPTS[i], settings(i)))] = (stream, cancel)

        for stream in range(STREAMS):
            ask(stream)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for event in scheduler.tick():
                blocks += 1
                stream, cancel = open_streams[event.row]
                if cancel and event.finish_reason is None:
                    scheduler.cancel(event.row)
                if cancel or event.finish_reason is not None:
                    scheduler.result(event.row)
                    del open_streams[event.row]
                    ask(stream)
        scheduler.cancel_all()
    return blocks


def test_a_minute_of_streams_with_random_cancels(bundle, start_server, tmp_path):
    """No answer differs from the one alone, nothing fails, and memory stays as it is."""
    expected, blocks_per_second = in_process(bundle, STREAMS, min(SECONDS, 10.0))
    setup = ModelSetup("", slots=STREAMS, queue=STREAMS, threads=1)
    repository = tritonrepo.write(bundle, tmp_path / "r", tritonrepo.RepositoryRequest(setup=setup))
    wrong: list[str] = []
    counts = {"whole": 0, "cancelled": 0, "blocks": 0}
    firsts: list[float] = []
    lock = threading.Lock()

    def work(url: str, number: int, end: float) -> None:
        draw = random.Random(number)
        with TritonClient(url) as client:
            while time.monotonic() < end:
                i = draw.randrange(len(PROMPTS))
                cancel = draw.random() < CANCELLED
                start = time.perf_counter()
                got: list[int] = []
                blocks = 0
                given = {"seed": i, "temperature": 1.0, "max_new_tokens": NEW, "stop_ids": ""}
                answer = client.stream(ids=PROMPTS[i], parameters=given)
                try:
                    for block in answer:
                        blocks += 1
                        if blocks == 1:
                            first = time.perf_counter() - start
                        got += block.token_ids
                        if cancel:
                            answer.close()
                            break
                except FixedStateError as err:
                    wrong.append(f"request {i}: {err}")
                    continue
                with lock:
                    counts["cancelled" if cancel else "whole"] += 1
                    counts["blocks"] += blocks
                    firsts.append(first)
                if got != expected[i][: len(got)] or not (cancel or len(got) == NEW):
                    wrong.append(f"request {i}: {got} is not {expected[i]}")

    def run(url: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=work, args=(url, n, end)) for n in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with start_server(repository.path, "--no-supervise") as server:
        run(server.url, 5.0)  # shared memory and arenas reach their size
        pids = [server.pid, *server.stubs()]
        before = resident(pids)
        counts.update(whole=0, cancelled=0, blocks=0)
        firsts.clear()
        start = time.monotonic()
        run(server.url, SECONDS)
        seconds = time.monotonic() - start
        grown = resident(pids) - before
    figures = {
        **counts,
        "seconds": round(seconds, 1),
        "blocks_per_second": round(counts["blocks"] / seconds),
        "blocks_per_second_in_process": round(blocks_per_second),
        "first_block_ms_median": round(1e3 * statistics.median(firsts), 1),
        "grown_mb": round(grown / 1e6, 1),
        "differences_and_errors": len(wrong),
    }
    print(json.dumps(figures))
    assert wrong == []
    assert counts["whole"]
    assert counts["cancelled"]
    assert grown < 20e6, figures
    assert server.code == 0


def test_what_the_server_adds_to_a_stream_alone(bundle, start_server, tmp_path):
    """The same stream here and there in turn: time to the first block, and between blocks."""
    setup = ModelSetup("", slots=4, threads=1, max_new_tokens=256)
    repository = tritonrepo.write(bundle, tmp_path / "r", tritonrepo.RepositoryRequest(setup=setup))
    first: dict[str, list[float]] = {"here": [], "there": []}
    later: dict[str, list[float]] = {"here": [], "there": []}
    given = {"max_new_tokens": 160, "temperature": 1.0, "stop_ids": ""}

    def take(where: str, blocks: Iterable[Block | BlockEvent]) -> list[int]:
        tokens: list[int] = []
        moments = [time.perf_counter()]
        for block in blocks:
            moments.append(time.perf_counter())
            tokens += block.token_ids
        first[where].append(moments[1] - moments[0])
        later[where] += [b - a for a, b in itertools.pairwise(moments[1:])]
        return tokens

    with (
        load(bundle, threads=1, slots=4) as decoder,
        start_server(repository.path, "--no-supervise") as server,
        TritonClient(server.url) as client,
    ):
        for i in range(20):
            asked = Request(PROMPTS[i], Settings(160, seed=i, temperature=1.0, stop_ids=()))
            there = take("there", client.stream(ids=PROMPTS[i], parameters={**given, "seed": i}))
            with decoder.stream([asked]) as stream:
                assert take("here", stream) == there
    figures = {
        f"{name}_ms_{where}": round(1e3 * statistics.median(values[where]), 2)
        for name, values in (("first_block", first), ("later_block", later))
        for where in values
    }
    print(json.dumps(figures))
    assert len(later["there"]) == len(later["here"]) > 100
    assert server.code == 0
