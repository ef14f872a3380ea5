"""Mamba-2 at block lengths 16 to 256: time per token of a denoise and of a commit, one thread.

    python benchmarks/bench_blocks.py
    python benchmarks/bench_blocks.py --runs 31 --json out.json

The model is M100 cut to 4 layers (width 768, d_state 128, vocabulary 32,000), B=1. `eager` is our
PyTorch denoiser under inference_mode with the same thread, timed in turn. `scan` is the share of a
denoise that is not in the model's own projections and head: those are timed alone, in the same
library, at the same row counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bench_denoise import products
from harness import interleave
from m100 import m100

from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime.decoder import open_engine

LENGTHS = (16, 64, 128, 256)
LAYERS = 4


def subjects(length: int, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed at one block length."""
    torch.set_num_threads(1)
    spec = replace(m100(LAYERS), block_len=length)
    tensors = random_tensors(spec, seed=0)
    save_checkpoint(folder / f"{length}", spec, tensors)
    bundle = export_bundle(folder / f"{length}", folder / f"{length}.bundle").bundle
    denoiser = Denoiser(spec, tensors)
    engine = open_engine(bundle, threads=1)
    canvas = np.random.default_rng(0).integers(0, spec.vocab_size, (1, length))
    whole = np.array([length])
    engine.commit(canvas, whole)
    ids = torch.from_numpy(canvas)
    with torch.inference_mode():
        start = torch.zeros(1, dtype=torch.int64)
        state = denoiser.commit(ids, denoiser.zero_state(1), start, torch.tensor([length]))

    def eager() -> object:
        with torch.inference_mode():
            return denoiser.denoise(ids, state)

    return {
        "denoise": lambda: engine.denoise(canvas),
        "commit": lambda: engine.commit(canvas, whole),
        "eager": eager,
        "products": products(spec, 1),
    }


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    reports = {}
    print("| L | denoise, us per token | commit | products alone | eager / denoise | scan |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for length in LENGTHS:
            report = interleave(
                subjects(length, Path(scratch)),
                runs=given.runs,
                threads=1,
                allow_busy=given.allow_busy,
            )
            reports[str(length)] = report.to_dict()
            cpu = {name: report[name].cpu.median for name in ("denoise", "commit", "eager")}
            alone = report["products"].cpu.median
            each = {name: f"{seconds / length * 1e6:.1f}" for name, seconds in cpu.items()}
            print(
                f"| {length} | {each['denoise']} | {each['commit']} | "
                f"{alone / length * 1e6:.1f} | {cpu['eager'] / cpu['denoise']:.2f} | "
                f"{1 - alone / cpu['denoise']:.0%} |",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
