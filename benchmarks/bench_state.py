"""What a saved state costs and saves: resuming a long prompt, moving a stream between processes.

    python benchmarks/bench_state.py                      # tiny-mamba
    python benchmarks/bench_state.py --model m100 --tokens 32768

A prompt of that many tokens is committed once and its state saved. Then the request is answered
from the prompt, and from the file in a process of its own (load the file, restore, decode).
Milliseconds of loading and restoring are measured inside that process, the answers are compared
token by token. Last, an answer is stopped after half of its blocks, its state written to a file,
and another process goes on; the two halves are compared with the answer in one go.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from served import bundle_of

from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.snapshot import Snapshot

NEW_BLOCKS = 4
GO_ON = """
import json, sys, time
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.snapshot import Snapshot
bundle, file, new, steps, threads, seed, heat = sys.argv[1:]
decoder = load(bundle, threads=int(threads), verify_weights=False)
times = []
for _ in range(15):
    start = time.perf_counter()
    state = Snapshot.load(file)
    loaded = time.perf_counter()
    state.restore(decoder.engine, 0)
    times.append((loaded - start, time.perf_counter() - loaded))
how = {"steps": int(steps), "seed": int(seed), "temperature": float(heat)}
settings = Settings(int(new), stop_ids=(), **how)
result = decoder.generate([Request([7, 8, 9][: 3 * (not int(seed))], settings, prefix=state)])[0]
print(json.dumps({"tokens": result.token_ids, "times": times}))
"""


def elsewhere(*words: object) -> dict[str, list]:
    """Go on from a file in another process."""
    command = [sys.executable, "-c", GO_ON, *map(str, words)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-mamba", help="tiny-mamba or m100 (%(default)s)")
    parser.add_argument("--bundle", help="a bundle exported before")
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of the prompt (%(default)s)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    bundle = bundle_of(options.model, options.bundle)
    spec = bundle.spec
    tokens = np.setdiff1d(np.arange(spec.vocab_size), [spec.mask_id, *spec.stop_ids])
    prompt = np.random.default_rng(0).choice(tokens, options.tokens).tolist()
    new = NEW_BLOCKS * spec.block_len
    settings = Settings(new, steps=8, stop_ids=())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompt.state")
        with load(bundle.path, threads=options.threads) as decoder:
            decoder.prefill(prompt).save(file)
            reruns, answers = [], []
            for _ in range(options.runs):
                result = decoder.generate([Request([*prompt, 7, 8, 9], settings)])[0]
                reruns.append(result.seconds["prefill"])
                answers.append(result.token_ids)
            moved = Settings(new, steps=8, stop_ids=(), seed=5, temperature=1.0)
            whole = decoder.generate([Request(prompt[:100], moved)])[0].token_ids
            stream = decoder.stream([Request(prompt[:100], moved)])
            first: list[int] = []
            for event in stream:
                first += event.token_ids
                if event.block == NEW_BLOCKS // 2 - 1:
                    stream.snapshot().save(Path(folder, "moved.state"))
                    break
            stream.close()
        resumed = elsewhere(bundle.path, file, new, 8, options.threads, 0, 0.0)
        rest = new - len(first)
        second = elsewhere(
            bundle.path, Path(folder, "moved.state"), rest, 8, options.threads, 5, 1.0
        )
        load_ms, restore_ms = np.median(np.array(resumed["times"]), axis=0) * 1e3
        out = {
            "model": options.model,
            "prompt tokens": options.tokens,
            "file bytes": file.stat().st_size,
            "state bytes": Snapshot.load(file).nbytes,
            "load ms": load_ms,
            "restore ms": restore_ms,
            "prompt ms": float(np.median(reruns)) * 1e3,
            "prompt / (load + restore)": float(np.median(reruns)) * 1e3 / (load_ms + restore_ms),
            "tokens identical": all(tuple(resumed["tokens"]) == answer for answer in answers),
            "moved stream identical": (*first, *second["tokens"]) == whole,
            "threads": options.threads,
        }
    print(json.dumps(out, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(out, indent=1) + "\n")
    if not (out["tokens identical"] and out["moved stream identical"]):
        raise SystemExit("a restored state answers otherwise")


if __name__ == "__main__":
    main()
