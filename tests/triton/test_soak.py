"""A minute of 32 streams with random cancels against a real server (`make nightly`)."""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from pathlib import Path

import pytest

from fixedstate.errors import FixedStateError
from fixedstate.export import tritonrepo
from fixedstate.runtime import Request, Settings, load
from fixedstate.serve.tritonmodel import ModelSetup
from fixedstate.serve.tritonstream import TritonClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
STREAMS = 32
PROMPTS = [[41 + i % 7, 47, 40 + i] for i in range(64)]
NEW = 32


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


def in_process(bundle: Path, slots: int) -> tuple[list[list[int]], float, float]:
    """Answers, blocks a second with all slots taken, and seconds of a first block alone."""
    with load(bundle, threads=1, slots=slots) as decoder:
        first = []
        for i in range(8):
            start = time.perf_counter()
            with decoder.stream([Request(PROMPTS[i], settings(i))]) as stream:
                next(stream)
                first.append(time.perf_counter() - start)
        start = time.perf_counter()
        results = decoder.generate([Request(p, settings(i)) for i, p in enumerate(PROMPTS)])
        seconds = time.perf_counter() - start
    answers = [list(result.token_ids) for result in results]
    return answers, sum(r.blocks for r in results) / seconds, statistics.median(first)


def test_a_minute_of_streams_with_random_cancels(bundle, start_server, tmp_path):
    """No answer differs from the one alone, nothing fails, and memory stays as it is."""
    expected, blocks_per_second, first_alone = in_process(bundle, STREAMS)
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
                cancel = draw.random() < 0.25
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

    def run(url: str, seconds: float, streams: int = STREAMS) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=work, args=(url, n, end)) for n in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with start_server(repository.path, "--no-supervise") as server:
        run(server.url, 1.0, 1)
        alone = statistics.median(firsts)
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
        "first_block_ms_alone": round(1e3 * alone, 1),
        "first_block_ms_in_process": round(1e3 * first_alone, 1),
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
