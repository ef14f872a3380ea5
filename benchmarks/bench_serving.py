"""Committed tokens per second of many requests at once, and what a block and a tick cost.

    python benchmarks/bench_serving.py                       # tiny-mamba
    python benchmarks/bench_serving.py --model m100 --slots 1,4,16 --runs 3

Requests have prompts of 0 to 300 tokens and answers of 1 to 8 blocks; S = 8 passes, greedy.
The same ones are decoded

- `alone`: one after another, in one slot;
- `static`: in batches of `slots` rows; the next batch begins when the slowest row has ended. A row
  that ends is computed on until then, as where a batch has a fixed shape;
- `leaving`: the same batches, but a row that ends leaves and makes the others faster;
- `slots`: by the scheduler: a waiting request takes the slot of one that ended.

`two graphs` is the scheduler without the fused graph. All give the same tokens, which is counted.
Then: passes and time of a block with and without the fused graph, one row; and the scheduler's own
time in a tick (CPU, microseconds), on an engine that costs nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import interleave
from served import NullEngine, bundle_of, without_scoring

from fixedstate.bundle import Bundle
from fixedstate.runtime import Request, Result, Settings, ort
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.scheduler import Scheduler

STEPS = 8
GRAPHS = {"fused": ("denoise", "commit_denoise"), "two": ("denoise", "commit")}


def engine_of(bundle: Bundle, graphs: str, slots: int, threads: int) -> SessionEngine:
    """The passes of a bundle by the fused graph or by two."""
    sessions = ort.open_sessions(bundle, GRAPHS[graphs], threads=threads)
    return SessionEngine(bundle.spec, bundle.state, sessions, slots=slots, weights=bundle.weights)


def requests_of(bundle: Bundle, count: int) -> list[Request]:
    """Prompts and answers of mixed lengths; the same for a count."""
    rng = np.random.default_rng(count)
    spec, out = bundle.spec, []
    tokens = np.setdiff1d(np.arange(spec.vocab_size), [spec.mask_id, *spec.stop_ids])
    for seed in range(count):
        blocks = int(rng.choice([1, 1, 2, 2, 3, 4, 6, 8]))
        settings = Settings(blocks * spec.block_len, steps=STEPS, stop_ids=(), seed=seed)
        out.append(Request(rng.choice(tokens, int(rng.integers(0, 301))), settings))
    return out


def decode(engine: SessionEngine, requests: list[Request], bundle: Bundle) -> list[Result]:
    """All of them at once."""
    stream = Stream(engine, requests, bundle.decode)
    for _ in stream:
        pass
    return stream.results


def static(
    engine: SessionEngine, requests: list[Request], bundle: Bundle, *, padded: bool
) -> list[Result]:
    """In batches that wait for their slowest row; padded: every row is computed as long as it."""
    out = []
    for first in range(0, len(requests), engine.slots):
        batch = requests[first : first + engine.slots]
        if padded:
            longest = max(request.settings.max_new_tokens for request in batch)
            settings = [replace(r.settings, max_new_tokens=longest) for r in batch]
            batch = [Request(r.prompt_ids, s) for r, s in zip(batch, settings, strict=True)]
        out += decode(engine, batch, bundle)
    return out


def throughput(
    bundle: Bundle, slots: int, count: int, threads: int, runs: int, busy: bool
) -> dict[str, object]:
    """Tokens per second of every way, interleaved; every timed run's answers are compared."""
    requests = requests_of(bundle, count)
    tokens = sum(request.settings.max_new_tokens for request in requests)
    one = engine_of(bundle, "fused", 1, threads)
    many = engine_of(bundle, "fused", slots, threads)
    two = engine_of(bundle, "two", slots, threads)
    ways: dict[str, Callable[[], list[Result]]] = {
        "slots": lambda: decode(many, requests, bundle),
        "alone": lambda: decode(one, requests, bundle),
        "static": lambda: static(many, requests, bundle, padded=True),
        "leaving": lambda: static(many, requests, bundle, padded=False),
        "two graphs": lambda: decode(two, requests, bundle),
    }
    answers: dict[str, list[Result]] = {}

    def timed(name: str) -> Callable[[], object]:
        return lambda: answers.__setitem__(name, ways[name]())

    report = interleave(
        {name: timed(name) for name in ways},
        runs=runs,
        warmup=0,
        calls=1,
        threads=threads,
        allow_busy=busy,
    )
    expected = [result.token_ids for result in answers["alone"]]
    wrong = {
        name: sum(r.token_ids[: len(e)] != e for r, e in zip(found, expected, strict=True))
        for name, found in answers.items()
    }
    return {
        "slots": slots,
        "requests": len(requests),
        "tokens": tokens,
        "tokens per second": {name: tokens / report[name].wall.median for name in ways},
        "times as long as slots": {
            name: report.ratio(name, "slots").of_pairs for name in ways if name != "slots"
        },
        "answers that differ from alone": wrong,
        "busy": report.busy,
    }


def block_costs(bundle: Bundle, threads: int, runs: int, busy: bool) -> dict[str, object]:
    """Passes and time per block, fused against two graphs, one row."""
    blocks = 12
    request = Request(
        [5] * (2 * bundle.spec.block_len),
        Settings(blocks * bundle.spec.block_len, steps=STEPS, stop_ids=()),
    )
    ways, passes, texts = {}, {}, set()
    for graphs in GRAPHS:
        engine = engine_of(bundle, graphs, 1, threads)
        calls = Counted(engine)
        result = decode(calls, [request], bundle)[0]  # type: ignore[arg-type]
        texts.add(result.token_ids)
        # The last block is not committed; the prompt's commit is not a block's.
        passes[graphs] = calls.passes / blocks
        ways[graphs] = lambda engine=engine: decode(engine, [request], bundle)
    if len(texts) != 1:
        raise SystemExit("fused and plain commits give different tokens")
    report = interleave(ways, runs=runs, calls=1, threads=threads, allow_busy=busy)
    return {
        "passes per block": passes,
        "milliseconds per block": {g: report[g].wall.median / blocks * 1e3 for g in GRAPHS},
        "two / fused": report.ratio("two", "fused").of_pairs,
        "busy": report.busy,
    }


class Counted:
    """An engine that counts the calls of its sessions."""

    def __init__(self, engine: SessionEngine) -> None:
        self._engine = engine
        self.passes = -1  # the commit of the prompt

    def __getattr__(self, name: str) -> object:
        if name in ("denoise", "commit", "commit_denoise"):
            self.passes += 1
        return getattr(self._engine, name)


def tick_costs() -> dict[int, float]:
    """CPU microseconds of a tick without the passes and without scoring."""
    out = {}
    for slots in (1, 4, 16, 64):
        samples = []
        for _ in range(5):
            engine = NullEngine(slots)
            scheduler = without_scoring(Scheduler(engine), slots, engine.spec.block_len)
            for i in range(3 * slots):
                settings = Settings(50 + i % 70, steps=4 + i % 5, stop_ids=())
                scheduler.submit(Request([1] * (i % 40), settings))
            start, ticks = time.process_time(), 0
            while not scheduler.idle:
                scheduler.tick()
                ticks += 1
            samples.append((time.process_time() - start) / ticks * 1e6)
        out[slots] = float(np.median(samples))
    return out


def main() -> None:
    """Print the tables, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-mamba", help="tiny-mamba or m100 (%(default)s)")
    parser.add_argument("--bundle", help="a bundle exported before")
    parser.add_argument("--slots", default="1,4,16,64", help="(%(default)s)")
    parser.add_argument("--per-slot", type=float, default=3, help="requests per slot (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--allow-busy", action="store_true")
    options = parser.parse_args()
    bundle = bundle_of(options.model, options.bundle)
    out: dict[str, object] = {"model": options.model, "threads": options.threads}
    out["tick"] = tick_costs()
    print("scheduler, us per tick by slots:", out["tick"], flush=True)
    out["block"] = block_costs(bundle, options.threads, 2 * options.runs + 1, options.allow_busy)
    print("one row:", out["block"], flush=True)
    served = []
    for slots in map(int, options.slots.split(",")):
        count = max(8, round(options.per_slot * slots))
        served.append(
            throughput(bundle, slots, count, options.threads, options.runs, options.allow_busy)
        )
        print(json.dumps(served[-1]), flush=True)
    out["served"] = served
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
