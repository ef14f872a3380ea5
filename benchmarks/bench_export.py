"""What `fixedstate export` of a large checkpoint takes: peak memory, bytes on disk, minutes.

    python benchmarks/bench_export.py                            # B3 at fp16, 3.0 billion weights
    python benchmarks/bench_export.py --model m100 --precision fp32 --folder /data --json out.json

Random weights are written as half-precision shards; then the command runs in a process of its own,
comparison included. `peak` is the largest resident size that process reached, mapped files
included. `bundle` counts every file of the bundle. The files are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from harness import load_average, machine
from m100 import b3, hybrid1b, hybrid100, m100

from fixedstate.bundle import PARITY, WEIGHTS
from fixedstate.export.checkpoint import save_checkpoint, tensor_shapes
from fixedstate.export.weights import random_tensor
from fixedstate.spec import ModelSpec

MODELS = {"b3": b3, "m100": m100, "hybrid100": hybrid100, "hybrid1b": hybrid1b}
SHARDS = 8


class RandomTensors(Mapping[str, torch.Tensor]):
    """The tensors of a model, drawn when they are asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = tensor_shapes(spec)
        self._generator = torch.Generator().manual_seed(0)

    def __getitem__(self, name: str) -> torch.Tensor:
        return random_tensor(name, self._shapes[name], self._generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def size_of(folder: Path, pattern: str = "*") -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


def run(command: list[str]) -> tuple[float, int]:
    """Minutes, and bytes of the largest resident size, of a command that ends well.

    Raises:
        SystemExit: with the command's own words, where it does not.
    """
    start = time.perf_counter()
    with subprocess.Popen(command) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {child.returncode}")
    return (time.perf_counter() - start) / 60, usage.ru_maxrss * 1024


def measure(name: str, precision: str, folder: Path) -> dict[str, Any]:
    """Export a random model once."""
    spec = MODELS[name]()
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    save_checkpoint(checkpoint, spec, RandomTensors(spec), shards=SHARDS, dtype="float16")
    load = load_average()
    arguments = ["export", str(checkpoint), "-o", str(bundle), "--precision", precision]
    minutes, peak = run([sys.executable, "-m", "fixedstate", *arguments])
    report = json.loads((bundle / PARITY).read_text())
    weights = size_of(checkpoint, "*.safetensors")
    return {
        "model": name,
        "precision": precision,
        "parameters": sum(torch.Size(shape).numel() for shape in tensor_shapes(spec).values()),
        "checkpoint_bytes": weights,
        "bundle_bytes": size_of(bundle),
        "weights_bytes": (bundle / WEIGHTS).stat().st_size,
        "peak_bytes": peak,
        "peak_over_checkpoint": peak / weights,
        "bundle_over_weights": size_of(bundle) / (bundle / WEIGHTS).stat().st_size,
        "minutes": minutes,
        "scope": report["scope"],
        "comparisons": report["comparisons"],
        "judged_by_float64": report["judged_by_float64"],
        "worst": report["worst"],
        "load_at_start": load,
        "machine": machine(),
    }


def main() -> None:
    """Measure, print a table, write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="b3")
    parser.add_argument("--precision", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--folder", type=Path, help="where to write; needs twice the checkpoint")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-export-", dir=options.folder))
    try:
        found = measure(options.model, options.precision, folder)
    finally:
        shutil.rmtree(folder)
    gib = 1 << 30
    print(f"{found['model']} {found['precision']}: {found['parameters'] / 1e9:.2f}e9 parameters")
    print(f"checkpoint  {found['checkpoint_bytes'] / gib:7.2f} GiB")
    print(
        f"peak        {found['peak_bytes'] / gib:7.2f} GiB  {found['peak_over_checkpoint']:.3f} x"
    )
    print(
        f"bundle      {found['bundle_bytes'] / gib:7.2f} GiB  {found['bundle_over_weights']:.5f} x"
    )
    print(
        f"time        {found['minutes']:7.1f} min, load {found['load_at_start']:.1f} at the start"
    )
    print(f"comparison  {found['scope']}, {found['comparisons']} ports, worst {found['worst']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
