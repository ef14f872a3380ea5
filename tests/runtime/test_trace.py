"""Spans lie where the work was, inside of each other, and change nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from fixedstate.runtime import AsyncDecoder, Request, Settings, load
from fixedstate.runtime.trace import Tracer

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"


@pytest.fixture
def decoder():
    return load(GOLDEN, threads=1, slots=2)


def requests(count=3, new=20):
    return [
        Request([3, 5] * (4 * number), Settings(new, temperature=1.0, seed=number, stop_ids=()))
        for number in range(count)
    ]


def spans(tracer):
    return [event for event in tracer.trace()["traceEvents"] if event["ph"] == "X"]


def test_tracing_changes_no_token(decoder):
    expected = [result.token_ids for result in decoder.generate(requests())]
    traced = Tracer().watch(decoder)
    assert [result.token_ids for result in traced.generate(requests())] == expected

    async def main():
        async with AsyncDecoder(traced) as front:
            return await asyncio.gather(*(front.generate(request) for request in requests()))

    assert [result.token_ids for result in asyncio.run(main())] == expected


def test_blocks_lie_inside_their_request_and_add_up(decoder):
    tracer = Tracer()
    results = tracer.watch(decoder).generate(requests())
    found = spans(tracer)
    tracks = {event["tid"] for event in found} - {0}
    assert len(tracks) == len(results)
    for number, result in enumerate(results):
        mine = [event for event in found if event["tid"] == number + 1]
        (whole,) = [event for event in mine if event["name"] == f"request {number}"]
        inner = [event for event in mine if event is not whole]
        names = [event["name"] for event in inner]
        assert names == ["prompt"] * (number > 0) + [f"block {i}" for i in range(result.blocks)]
        assert whole["args"]["denoise_passes"] == result.denoise_passes
        end = whole["ts"]
        for event in inner:  # one behind the other, from the beginning to the end of the request
            assert event["ts"] >= end - 1e-3
            end = event["ts"] + event["dur"]
        assert end <= whole["ts"] + whole["dur"] + 1e-3


def test_passes_are_the_calls_of_the_engine(decoder):
    tracer = Tracer()
    results = tracer.watch(decoder).generate(requests())
    passes = [event for event in spans(tracer) if event["tid"] == 0]
    rows = sum(event["args"]["rows"] for event in passes if event["name"] == "denoise")
    assert rows == sum(result.denoise_passes for result in results)
    starts = [event["ts"] for event in passes]
    assert starts == sorted(starts)
    profile = tracer.profile()
    assert profile["calls"]["denoise"]["rows"] == rows
    assert profile["calls"].keys() == {"denoise", "commit"}
    assert profile["denoise_passes"] == rows
    assert profile["new_tokens"] == 60
    assert profile["requests"] == profile["finish_reasons"]["length"] == 3
    assert 0 < profile["engine_seconds"] < profile["wall_seconds"]
    for call in profile["calls"].values():
        assert 0 < call["p50_ms"] <= call["p99_ms"] <= call["max_ms"]


def test_both_are_files_of_json(decoder, tmp_path):
    tracer = Tracer()
    tracer.watch(decoder).generate(requests(1))
    tracer.save_trace(tmp_path / "trace")
    tracer.save_profile(tmp_path / "profile")
    trace = json.loads((tmp_path / "trace").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["passes", "request 0"]
    assert json.loads((tmp_path / "profile").read_text())["provider"] == "cpu"


def test_a_long_run_keeps_the_latest_spans_and_counts_all(decoder):
    """A server may run for months."""
    tracer = Tracer(keep=10)
    tracer.watch(decoder).generate(requests())
    trace = tracer.trace()
    assert len(spans(tracer)) == 10
    assert trace["otherData"]["spans_dropped"] > 10
    assert tracer.profile()["new_tokens"] == 60


def test_another_watcher_is_told_as_well(decoder):
    told = []

    class Watcher:
        def begun(self, row, slot):
            told.append("begun")

        def committed(self, row, slot, ids, *, fused):
            told.append("committed")

        def scored(self, row, slot, canvas, logits):
            told.append("scored")

        def revealed(self, row, slot, canvas):
            told.append("revealed")

        def ended(self, row):
            told.append("ended")

    Tracer().watch(decoder).generate(requests(2), watcher=Watcher())
    assert set(told) == {"begun", "committed", "scored", "revealed", "ended"}
    assert told.count("ended") == 2


def test_nothing_was_decoded(decoder):
    """An empty trace is a trace."""
    tracer = Tracer()
    tracer.watch(decoder)
    assert spans(tracer) == []
    assert tracer.profile()["tokens_per_pass"] == 0
