"""What TensorRT-RTX builds of our graphs, without a card: seconds, bytes, memory, layers.

    python benchmarks/bench_engines.py                                  # the shipped models
    python benchmarks/bench_engines.py --models m100 --folder /data --json out.json
    python benchmarks/bench_engines.py --models hybrid1b --precisions fp16 --plugins required

One row per model, precision, plugins and role. `build` is parser and builder, `process` all of the
process they run in; `peak` its largest resident size, mapped files included; `weights` the bytes of
the weights that the graph reads, at that precision; `layers` those of the parsed network, `steps`
those of the engine. A precision that is too far from float32 is refused, as the row then says;
random weights are built nevertheless, and the file of numbers says how far off they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_export import MODELS, RandomTensors
from harness import load_average, machine

from fixedstate.bundle import Bundle, DecodeDefaults, Source
from fixedstate.errors import FixedStateError
from fixedstate.export import engine
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import export_bundle, write_bundle
from fixedstate.export.profiles import BuildRequest, Range
from fixedstate.export.stored import StoredWeights
from fixedstate.export.trace import without_weights
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.state import Precision

SHIPPED = ("tiny-attention", "tiny-mamba", "tiny-hybrid")
ROLES = ("denoise", "commit")
PLUGINS = ("none", "required")


def exported(name: str, folder: Path) -> Bundle:
    """A float32 bundle of a shipped model, or of one with random weights.

    The latter is not compared with PyTorch: bench_export.py does that and says what it takes.
    """
    target = folder / f"{name}.bundle"
    if name not in MODELS:
        export_bundle(name, target, fused=False)
        return Bundle.open(target, verify_weights=False)
    spec, precision = MODELS[name](), Precision()
    target.mkdir()
    return write_bundle(
        target,
        without_weights(spec, lambda given: Denoiser(spec, given, precision, TRACED)),
        StoredWeights(RandomTensors(spec), precision),
        [*ROLES],
        lambda _: None,
        decode=DecodeDefaults(),
        files={},
        source=Source(),
    )


def rows_of(
    name: str, bundle: Bundle, precision: str, plugins: str, roles: Sequence[str], folder: Path
) -> Iterator[dict[str, Any]]:
    """Build one engine and remove it."""
    request = BuildRequest(
        precision=precision,
        plugins=plugins,
        roles=tuple(roles),
        capabilities=("12.0",),
        batch=Range(1, 1, 8),
        blocks=Range(1, 1, 16),
    )
    common = {"model": name, "precision": precision, "plugins": plugins}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        try:
            report = engine.build(bundle, request, Path(made) / "engine")
        except FixedStateError as err:
            yield {**common, "refused": str(err)}
            return
    for role, one in report.builds.items():
        yield {
            **common,
            "role": role,
            "build_seconds": one.parse_seconds + one.build_seconds,
            "process_seconds": one.seconds,
            "peak_bytes": one.peak_bytes,
            "plan_bytes": one.plan_bytes,
            "weight_bytes": one.weight_bytes,
            "layers": sum(one.layers.values()),
            "plugin_layers": len(one.plugins),
            "steps": sum(one.steps.values()),
            "kinds": dict(one.steps),
            "check": report.engine.check,
        }


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    start = f"{row['model']:14} {row['precision']:9} {row['plugins']:8}"
    if "refused" in row:
        return f"{start} refused: {row['refused']}"
    return (
        f"{start} {row['role']:8} {row['build_seconds']:7.1f} {row['process_seconds']:7.1f} "
        f"{row['peak_bytes'] / 1e6:7.0f} {row['plan_bytes'] / 1e6:8.1f} "
        f"{row['weight_bytes'] / 1e6:8.1f} {row['plan_bytes'] / row['weight_bytes']:6.2f} "
        f"{row['layers']:6} {row['plugin_layers']:6} {row['steps']:5}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=[*SHIPPED, *MODELS], default=[*SHIPPED])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "fp16", "bf16"])
    parser.add_argument("--plugins", nargs="+", choices=PLUGINS, default=PLUGINS)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES)
    parser.add_argument("--folder", type=Path, help="where to work; needs room for three models")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    print(machine(), f"load {load_average()}")
    print(
        f"{'model':14} {'precision':9} {'plugins':8} {'role':8} {'build s':>7} {'proc. s':>7} "
        f"{'peak MB':>7} {'plan MB':>8} {'w. MB':>8} {'plan/w':>6} {'layers':>6} {'plugin':>6} "
        f"{'steps':>5}"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        for name in options.models:
            if name in MODELS:  # noise goes through layers that nobody trained to dampen it
                engine.require_precision = lambda *_: None
            bundle = exported(name, Path(work))
            for precision in options.precisions:
                attention = not any(layer.mixer.startswith("mamba") for layer in bundle.spec.layers)
                for plugins in options.plugins:
                    if plugins == "required" and (precision == "fp32" or attention):
                        continue
                    for row in rows_of(name, bundle, precision, plugins, options.roles, Path(work)):
                        found.append(row)
                        print(show(row), flush=True)
                    if options.json is not None:  # a build may take all memory: keep what there is
                        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
