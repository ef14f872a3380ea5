"""Resident memory and time per block of the memory modes lean and fast.

    python benchmarks/bench_memory.py                      # exports M100 first
    python benchmarks/bench_memory.py --bundle m100.bundle --json out.json

Memory is read in a fresh process for each mode: after loading, after some blocks of one row with
random ids, and after rounds of 1 to 8 rows. `resident` holds every mapped page, also those of the
weights file and of libraries, which the system can take back; `own` (anonymous) cannot be taken
back. The ratio is resident memory over weights and state (both buffers of all slots). Time is that
of a block of S = 8 passes, the first of which commits the block before; modes take turns in one
process.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import interleave

from fixedstate.bundle import Bundle
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.memory import MODES, plan

STEPS = 8
BLOCKS = 3
ROWS = 8


def resident() -> dict[str, int]:
    """Bytes of this process: resident, of them its own, and the most that was resident."""
    found = {}
    for file, names in (
        ("smaps_rollup", {"Rss": "resident", "Anonymous": "own"}),
        ("status", {"VmHWM": "peak"}),
    ):
        for line in Path("/proc/self", file).read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) * 1024
    return found


class Blocks:
    """Blocks of random ids through an engine, one after another."""

    def __init__(self, engine: SessionEngine, rows: int = 1) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(0)
        self.rows = rows
        self._begun = False

    def __call__(self) -> None:
        """One block: commit the one before with the first pass, then the other passes."""
        if self._begun:
            self.engine.commit_denoise(self._ids(2))
        else:
            self.engine.denoise(self._ids(1))
            self._begun = True
        for _ in range(STEPS - 1):
            self.engine.denoise(self._ids(1))

    def _ids(self, blocks: int) -> Any:
        spec = self.engine.spec
        return self.rng.integers(0, spec.vocab_size - 1, (self.rows, blocks * spec.block_len))


def measure(path: Path, mode: str, slots: int, rounds: int) -> dict[str, Any]:
    """What one mode takes, in this process, which should be a fresh one."""
    bundle = Bundle.open(path, verify_weights=False)
    expected = plan(bundle, mode, slots=slots)
    start = resident()
    engine = open_engine(bundle, memory=mode, slots=slots, threads=1)
    out: dict[str, Any] = {"plan": expected.to_dict(), "start": start, "loaded": resident()}
    blocks = Blocks(engine)
    for _ in range(BLOCKS):
        blocks()
    out["blocks"] = resident()
    varied = []
    for turn in range(rounds):
        blocks.rows = int(blocks.rng.integers(1, slots + 1))
        engine.denoise(blocks._ids(1))
        engine.commit_denoise(blocks._ids(2))
        if turn in (rounds // 4, rounds // 2, rounds - 1):
            varied.append(resident()["resident"])
    out["varied"] = varied
    basis = (path / "weights.safetensors").stat().st_size + expected.state
    out["ratio"] = {
        stage: {name: size / basis for name, size in out[stage].items()}
        for stage in ("loaded", "blocks")
    }
    return out


def in_fresh_process(path: Path, mode: str, slots: int, rounds: int) -> dict[str, Any]:
    """The same from another process."""
    command = [sys.executable, __file__, "--child", mode, "--bundle", str(path)]
    options = ["--slots", str(slots), "--rounds", str(rounds)]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def times(path: Path, runs: int, allow_busy: bool) -> Any:
    """A block of each mode in turn."""
    bundle = Bundle.open(path, verify_weights=False)
    subjects: dict[str, Callable[[], object]] = {
        mode: Blocks(open_engine(bundle, memory=mode, threads=1)) for mode in reversed(MODES)
    }
    gc.collect()
    return interleave(subjects, runs=runs, threads=1, allow_busy=allow_busy)


def export_m100(folder: Path) -> Path:
    """A bundle of M100 with random weights."""
    from m100 import m100

    from fixedstate.export.checkpoint import random_tensors, save_checkpoint
    from fixedstate.export.pipeline import export_bundle

    save_checkpoint(folder / "m100", m100(), random_tensors(m100(), seed=0))
    export_bundle(folder / "m100", folder / "m100.bundle")
    return folder / "m100.bundle"


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of varied rows, 8 slots")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.bundle, given.child, given.slots, given.rounds)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = given.bundle or export_m100(Path(scratch))
        report: dict[str, Any] = {}
        print("| mode | loaded, MB | peak | after blocks | own | resident / (weights + state) |")
        print("|---|---|---|---|---|---|")
        for mode in MODES:
            report[mode] = found = in_fresh_process(path, mode, given.slots, 0)
            loaded, after = found["loaded"], found["blocks"]
            cells = (loaded["resident"], after["peak"], after["resident"], after["own"])
            columns = " | ".join(f"{size / 1e6:.1f}" for size in cells)
            print(
                f"| {mode} | {columns} | {found['ratio']['blocks']['resident']:.2f} |", flush=True
            )
        for mode in MODES if given.rounds else ():
            found = report[f"{mode}, 1 to {ROWS} rows"] = in_fresh_process(
                path, mode, ROWS, given.rounds
            )
            sizes = ", ".join(f"{size / 1e6:.1f}" for size in found["varied"])
            print(f"{mode}, 1 to {ROWS} rows: {sizes} MB after 1/4, 1/2, all rounds", flush=True)
        timed = times(path, given.runs, given.allow_busy)
        print(timed.table())
        report["time"] = timed.to_dict()
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
