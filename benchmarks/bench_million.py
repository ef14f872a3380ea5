"""A million tokens: memory, time per pass and the state at the end.

    python benchmarks/bench_million.py
    python benchmarks/bench_million.py --tokens 1000000 --steps 1

tiny-mamba generates that many tokens in one answer, one row, one thread, sampled at temperature 1,
so that it does not settle into a loop. Shown: resident memory after the first 2 % and at the end;
the median CPU time of a round of passes in the second and in the last 1 %; whether the state is
finite; and law 1 from a snapshot at the end: further blocks committed at once and one by one,
logits and states compared. Then a prompt of as many tokens goes through `commit` in slices.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import psutil
from served import bundle_of

from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.compare import Tolerance, compare
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.snapshot import Snapshot


def resident() -> int:
    """Bytes of this process in memory."""
    return psutil.Process().memory_info().rss


class Clock:
    """CPU seconds between rounds, the first and the last few thousand kept."""

    def __init__(self, rounds: int) -> None:
        self.part = max(100, rounds // 100)
        self.first = np.zeros(self.part)
        self.last = np.zeros(self.part)
        self.count = 0
        self.early = 0
        self._before = time.process_time()

    def __call__(self, _: object) -> None:
        """Note one round."""
        now = time.process_time()
        spent, self._before = now - self._before, now
        if self.count < 2 * self.part:
            if self.count >= self.part:  # the very first ones also bind memory
                self.first[self.count - self.part] = spent
            self.early = resident() if self.count == 2 * self.part - 1 else 0
        self.last[self.count % self.part] = spent
        self.count += 1


def law1(engine: SessionEngine, state: Snapshot, tokens: np.ndarray) -> dict[str, object]:
    """Blocks at once against one by one, from a state: what `compare` says of logits and state."""
    length = engine.spec.block_len
    ids = tokens[None, : 4 * length]
    canvas = np.full((1, length), engine.spec.mask_id)
    found = []
    for step in (4 * length, length):
        state.restore(engine, 0)
        for start in range(0, ids.shape[1], step):
            engine.commit(ids[:, start : start + step], np.array([step]))
        found.append({"logits": engine.denoise(canvas).copy(), **engine.read(0)})
    comparison = compare(*found, Tolerance.of("fp32"))
    worst = comparison.worst
    return {"passed": comparison.passed, "worst": worst and worst.to_dict()}


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", help="a bundle exported before")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="passes per block (%(default)s)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    bundle = bundle_of("tiny-mamba", options.bundle)
    spec = bundle.spec
    tokens = np.setdiff1d(np.arange(spec.vocab_size), [spec.mask_id, *spec.stop_ids])
    rng = np.random.default_rng(0)
    out: dict[str, object] = {"tokens": options.tokens, "steps": options.steps}
    with load(bundle.path, threads=1) as decoder:
        settings = Settings(options.tokens, steps=options.steps, stop_ids=(), temperature=1.0)
        request = Request([7, 8, 9], settings, keep_state=True, keep_tokens=False)
        rounds = options.tokens // spec.block_len * options.steps
        clock = Clock(rounds)
        stream = decoder.stream([request], on_pass=clock)
        made, early = 0, 0
        for event in stream:
            made += len(event.token_ids)
            early = early or clock.early
        grown = resident() - early
        (result,) = stream.results
        state = result.state
        assert state is not None
        engine = decoder.engine
        first, last = float(np.median(clock.first)), float(np.median(clock.last))
        out["generate"] = {
            "tokens": made,
            "resident bytes grown": grown,
            "pass us, first 1 %": first * 1e6,
            "pass us, last 1 %": last * 1e6,
            "last / first": last / first,
            "state finite": all(np.isfinite(array).all() for array in state.arrays.values()),
            "state bytes": state.nbytes,
            "committed tokens": state.past_length,
            "law 1 from the end": law1(engine, state, rng.choice(tokens, 999)),
        }
        print(json.dumps(out["generate"], indent=1), flush=True)
        prompt = rng.choice(tokens, options.tokens)
        size = decoder.bundle.decode.prefill_blocks * spec.block_len
        engine.reset(0)
        sizes, spent = [], []
        for start in range(0, options.tokens // size * size, size):
            before = time.process_time()
            engine.commit(prompt[None, start : start + size], np.array([size]))
            spent.append(time.process_time() - before)
            sizes.append(resident() if start // size % 16 == 0 else sizes[-1])
        part = max(10, len(spent) // 100)
        out["commit"] = {
            "tokens": int(engine.past_length[0]),
            "slices": len(spent),
            "resident bytes grown": sizes[-1] - sizes[part],
            "slice us, first 1 %": float(np.median(spent[part : 2 * part])) * 1e6,
            "slice us, last 1 %": float(np.median(spent[-part:])) * 1e6,
            "state finite": all(np.isfinite(array).all() for array in engine.read(0).values()),
        }
        print(json.dumps(out["commit"], indent=1), flush=True)
    out["peak resident bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
