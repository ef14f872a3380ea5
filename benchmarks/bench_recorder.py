"""What a flight recording costs, and that its bytes stay what they are.

    python benchmarks/bench_recorder.py                          # tiny-mamba, 100,000 blocks
    python benchmarks/bench_recorder.py --model m100 --blocks 0  # the cost alone

`plain` and `recorded` decode the same requests, in turn, in the same process; both include the
scheduler and the passes. The cost of a tick is the difference of processor seconds, by ticks.
Then one long request per slot is recorded to the end, and the bytes of the folder are read every
hundredth of the way; at the end its last stretch is repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness import interleave
from served import bundle_of

from fixedstate.bundle import Bundle
from fixedstate.runtime import Request, Settings
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.recorder import Recorder
from fixedstate.runtime.recording import Recording
from fixedstate.runtime.replay import replay_bundle
from fixedstate.runtime.scheduler import Scheduler

STEPS = 8


def decode(
    engine: SessionEngine, bundle: Bundle, settings: Settings, recorder: Recorder | None
) -> tuple[int, int]:
    """One request per slot to its end; returns ticks and blocks."""
    scheduler = Scheduler(engine, bundle.decode, watcher=recorder)
    for seed in range(engine.slots):
        scheduler.submit(Request((5, 6, 7 + seed), settings))
    ticks = blocks = 0
    while not scheduler.idle:
        blocks += len(scheduler.tick())
        ticks += 1
    return ticks, blocks


def cost(bundle: Bundle, slots: int, given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Time of a tick with and without a recording."""
    engine = open_engine(bundle, threads=1, slots=slots, memory="fast")
    settings = Settings(given.timed * bundle.spec.block_len, steps=STEPS, stop_ids=())
    with Recorder.start(folder, engine, bundle, threads=1, every=given.every) as recorder:
        ticks, _ = decode(engine, bundle, settings, None)
        subjects: dict[str, Callable[[], object]] = {
            "plain": lambda: decode(engine, bundle, settings, None),
            "recorded": lambda: decode(engine, bundle, settings, recorder),
        }
        report = interleave(
            subjects, runs=given.runs, calls=1, threads=1, allow_busy=given.allow_busy
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
    cpu = {name: report[name].cpu.median / ticks * 1e6 for name in subjects}
    ratio = report.ratio("recorded").of_pairs
    print(
        f"| {slots} | {cpu['plain']:.0f} | {cpu['recorded']:.0f} | "
        f"{cpu['recorded'] - cpu['plain']:.0f} | {ratio:.3f} | {size:,} |",
        flush=True,
    )
    return {"slots": slots, "ticks": ticks, "bytes": size, **report.to_dict()}


def endurance(bundle: Bundle, given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Bytes of the folder along many blocks, and a replay of what is left."""
    engine = open_engine(bundle, threads=1, slots=given.slots, memory="fast")
    length, each = bundle.spec.block_len, given.blocks // given.slots
    settings = Settings(each * length - 3, steps=1, stop_ids=(), temperature=1.0)
    sizes: list[int] = []
    blocks = 0
    start = time.perf_counter()
    with Recorder.start(folder, engine, bundle, threads=1, every=given.every) as recorder:
        scheduler = Scheduler(engine, bundle.decode, watcher=recorder)
        for seed in range(given.slots):
            scheduler.submit(Request((5, 6, 7), replace(settings, seed=seed)))
        mark = 0
        while not scheduler.idle:
            blocks += len(scheduler.tick())
            if blocks >= mark:
                mark += max(1, given.blocks // 100)
                sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
    seconds = time.perf_counter() - start
    warm = sizes[len(sizes) // 10 :]
    print(
        f"{blocks:,} blocks in {seconds:.0f} s: {min(warm):,} to {max(warm):,} bytes after the "
        "first tenth"
    )
    report = replay_bundle(Recording.open(folder), bundle)
    print(
        f"replay of the last stretch: {'identical' if report.passed else report.difference}, "
        f"{report.total('passes'):,} passes, {report.total('commits'):,} commits, "
        f"{report.total('states')} saved states"
    )
    return {"blocks": blocks, "seconds": seconds, "bytes": sizes, "replay": report.to_dict()}


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="tiny-mamba")
    parser.add_argument("--bundle", help="one that exists, instead of an export")
    parser.add_argument("--blocks", type=int, default=100_000, help="of all slots; 0 for none")
    parser.add_argument("--slots", type=int, default=4, help="of the long run")
    parser.add_argument("--timed", type=int, default=64, help="blocks of a row in a timed run")
    parser.add_argument("--every", type=int, default=64, help="blocks between two saved states")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    bundle = bundle_of(given.model, given.bundle)
    out: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if given.runs:
            print("| slots | plain, us of CPU a tick | recorded | difference | ratio | bytes |")
            print("|---|---|---|---|---|---|")
            out["cost"] = [
                cost(bundle, slots, given, Path(scratch, f"cost{slots}")) for slots in (1, 4)
            ]
        if given.blocks:
            out["endurance"] = endurance(bundle, given, Path(scratch, "long"))
    if given.json:
        given.json.write_text(json.dumps(out, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
