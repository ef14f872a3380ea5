"""What TensorRT-RTX builds of quantised bundles, without a card: bytes by format and capability.

    python benchmarks/bench_quantized_engines.py log.bundle
    python benchmarks/bench_quantized_engines.py log.bundle --precisions fp16 --unchecked

Every product of a float32 bundle is given one format, and the denoise pass is built for each
compute capability. Ranges come from random tokens: bytes do not depend on them, and no quality is
measured here. The table has one row per format and precision, one column per capability: bytes of
the plan, and bytes of the plan for each weight of a quantised product, which kernels are part of,
so that small models show little but kernels. `stored` is what a weight takes in the bundle, scales
included. A build that is refused says so below the table, in the words of the refusal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import load_average, machine

from fixedstate.bundle import Bundle
from fixedstate.calib.collect import collect
from fixedstate.calib.data import Data, write_data
from fixedstate.calib.formats import FLOAT, FORMATS, TARGETS
from fixedstate.calib.plan import Plan, uniform
from fixedstate.calib.score import choices
from fixedstate.calib.sites import Site, find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.errors import FixedStateError
from fixedstate.export import engine
from fixedstate.export.profiles import BuildRequest, Range
from fixedstate.export.quantized import quantize_bundle

CAPABILITIES = ("7.5", "8.6", "8.9", "12.0")
ROLE = "denoise"
POLICY = Policy(masks=(1.0,), blocks=1)
_SEQUENCES = 20


def random_data(bundle: Bundle, folder: Path) -> Data:
    """Random tokens."""
    rng = np.random.default_rng(0)
    tokens = [token for token in range(bundle.spec.vocab_size) if token != bundle.spec.mask_id]
    given = [(rng.choice(tokens, bundle.spec.block_len).tolist(), 0) for _ in range(_SEQUENCES)]
    return write_data(folder / "data.jsonl", bundle, given)


def quantized(
    bundle: Bundle, name: str, table: Table, data: Data, sites: dict[str, Site], folder: Path
) -> tuple[Bundle, Plan]:
    """The bundle with every product that can have a format in it."""
    formats = dict.fromkeys(choices(sites, (name,)), name)
    target = next(key for key in reversed(TARGETS) if name in TARGETS[key])
    plan = uniform(bundle, table, sites, formats, (target,))
    made, _ = quantize_bundle(bundle, plan, table, data, folder, keep_failed=True, records=1)
    return made, plan


def rows_of(
    bundle: Bundle, plan: Plan | None, sites: dict[str, Site], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Build one bundle for every capability and precision, and remove the engines."""
    chosen = {} if plan is None else plan.chosen()
    counted = [site for name, site in sites.items() if plan is None or name in chosen]
    count = sum(site.rows * site.columns for site in counted)
    stored = sum(
        chosen[site.name].nbytes(site.rows, site.columns)
        if chosen
        else 4 * site.rows * site.columns
        for site in counted
    )
    name = FLOAT if plan is None else next(iter(plan.formats.values()))
    for precision in options.precisions:
        for capability in options.capabilities:
            row = {
                "format": name,
                "precision": precision,
                "capability": capability,
                "weights": count,
                "stored_per_weight": stored / count,
            }
            request = BuildRequest(
                precision=precision,
                roles=(ROLE,),
                capabilities=(capability,),
                batch=Range(1, 1, 8),
                plugins="none",
            )
            with tempfile.TemporaryDirectory(dir=options.folder) as made:
                try:
                    built = engine.build(bundle, request, Path(made) / "engine").builds[ROLE]
                except FixedStateError as err:
                    yield row | {"refused": str(err)}
                    continue
            plain = built.weight_bytes - stored if chosen else 0
            yield row | {
                "build_seconds": built.parse_seconds + built.build_seconds,
                "plan_bytes": built.plan_bytes,
                "weight_bytes": built.weight_bytes,
                "plan_per_weight": (built.plan_bytes - max(0, plain)) / count,
                "steps": dict(built.steps),
            }


def table_of(rows: Sequence[dict[str, Any]], capabilities: Sequence[str]) -> str:
    """A Markdown table, and what was refused below it."""
    lines = [
        f"| format | precision | stored B/weight | {' | '.join(capabilities)} |",
        "|---|---|---|" + "---|" * len(capabilities),
    ]
    reasons: dict[str, str] = {}
    keys = dict.fromkeys((row["format"], row["precision"]) for row in rows)
    for name, precision in keys:
        cells = []
        for capability in capabilities:
            (row,) = (
                one
                for one in rows
                if (one["format"], one["precision"], one["capability"])
                == (name, precision, capability)
            )
            if "refused" in row:
                for reason in row["refused"].split("; "):
                    reasons.setdefault(reason, str(len(reasons) + 1))
                numbers = ", ".join(reasons[one] for one in row["refused"].split("; "))
                cells.append(f"refused ({numbers})")
            else:
                cells.append(f"{row['plan_bytes'] / 1e6:.2f} MB, {row['plan_per_weight']:.3f}")
        stored = f"{row['stored_per_weight']:.3f}"
        lines.append(f"| {name} | {precision} | {stored} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines)


def keep(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Write what is known so far: large models take long."""
    if file is not None:
        file.write_text(json.dumps(rows, indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path, help="a float32 bundle")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "fp16"])
    parser.add_argument("--capabilities", nargs="+", default=[*CAPABILITIES])
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="do not compare half graphs with float32: random weights are too far off",
    )
    parser.add_argument("--folder", type=Path, help="where to work; needs room for three models")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    if options.unchecked:
        engine.check_precision = lambda *_, **__: {"kind": "not compared", "passed": True}
        engine.require_precision = lambda *_: None
    print(machine(), f"load {load_average()}")
    bundle = Bundle.open(options.bundle)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        data = random_data(bundle, work)
        table = collect(bundle, data, POLICY, records=2)
        sites = find_sites(load_graphs(bundle))
        rows += rows_of(bundle, None, sites, options)
        keep(rows, options.json)
        for one in options.formats:
            made, plan = quantized(bundle, one, table, data, sites, work / "quantised")
            rows += rows_of(made, plan, sites, options)
            for file in made.path.iterdir():
                file.unlink()
            made.path.rmdir()
            keep(rows, options.json)
    print(table_of(rows, options.capabilities))


if __name__ == "__main__":
    main()
