"""Quantised bundles beside the float32 one: quality on the shipped models, speed on M100.

    python benchmarks/bench_quantized.py quality                    # the three shipped models
    python benchmarks/bench_quantized.py speed --threads 1,2        # M100; scores for some minutes
    python benchmarks/bench_quantized.py drift                      # state formats, 1,000 blocks
    python benchmarks/bench_quantized.py memory                     # M100, ranges of 512 feeds

`quality` compares on held-out logs of examples/robot_log: mean divergence in nats and its 99th
percentile over masked tokens, the share of the same best token, the share of right answers to 100
questions (the task of `recall.py`), and bytes. `speed` times a block, 8 denoise passes and a commit
at B=1, in turn: our bundles on ONNX Runtime, and PyTorch's own denoiser in float32 and with dynamic
int8 (`torch.ops.quantized.linear_dynamic`, what `quantize_dynamic` makes of a layer). M100 has
random weights: what it says means nothing, how long it takes does.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_denoise import bundle_of
from harness import interleave
from recall import recall

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "robot_log"))
from generate import build_tokenizer, dense_log, line_counter

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.calib.collect import collect
from fixedstate.calib.data import Data, Record, write_data
from fixedstate.calib.drift import STATE_FORMATS, drift
from fixedstate.calib.plan import Plan, search_plan, uniform
from fixedstate.calib.report import Report
from fixedstate.calib.score import choices, score
from fixedstate.calib.sites import Site, find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.export import attention, denoiser, layers, mamba1, mamba2
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.quantized import quantize_bundle
from fixedstate.runtime import load
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.text import Text

MODELS = ("tiny-attention", "tiny-mamba", "tiny-hybrid")
UNIFORM = ("int8", "int4:32")
SEARCHED = ("int8", "int4:32", "int4:128")
TARGET = ("ort-cpu",)
STEPS = 8


# --- data ----------------------------------------------------------------------------------------


def log_data(bundle: Bundle, folder: Path, count: int, tokens: int) -> Data:
    """Logs of the task, cut at that many tokens."""
    text, rng = Text.open(bundle), random.Random(7)
    lines = line_counter(build_tokenizer())
    logs = [text.encode(dense_log(rng, lines, tokens + 8))[:tokens] for _ in range(count)]
    return write_data(folder / "data.jsonl", bundle, [(log, 0) for log in logs])


def random_data(bundle: Bundle, folder: Path, count: int, blocks: int) -> Data:
    """Random tokens, for weights that are random too."""
    rng = np.random.default_rng(0)
    size = (count, blocks * bundle.spec.block_len)
    ids = rng.integers(0, bundle.spec.vocab_size - 1, size)  # the mask id is the last one
    return write_data(folder / "data.jsonl", bundle, [(row, 0) for row in ids.tolist()])


# --- variants ------------------------------------------------------------------------------------


def written(
    bundle: Bundle, plan: Plan, table: Table, data: Data, target: Path, records: int | None
) -> tuple[Bundle, Report]:
    """The bundle of a plan, written whatever the gates say of it."""
    return quantize_bundle(
        bundle, plan, table, data, target, keep_failed=True, force=True, records=records
    )


def searched(
    bundle: Bundle,
    table: Table,
    sites: Mapping[str, Site],
    data: Data,
    folder: Path,
    bound: Mapping[str, Any],
    records: int,
) -> Plan:
    """The plan that the search finds; verified on the sequences that were scored."""
    scored = score(bundle, table, data, SEARCHED, records=records)

    def verify(plan: Plan) -> float:
        _, report = written(bundle, plan, table, data, folder / "verified", records)
        return report.comparison.kl

    return search_plan(bundle, table, sites, scored, TARGET, verify, **bound)


def variants(
    bundle: Bundle,
    table: Table,
    data: Data,
    folder: Path,
    bound: Mapping[str, Any],
    records: int | None,
    scored: int,
) -> dict[str, tuple[Bundle, Report]]:
    """Every quantised bundle by name, and how far it is."""
    sites = find_sites(load_graphs(bundle))
    found = {}
    for name in UNIFORM:
        formats = dict.fromkeys(choices(sites, (name,)), name)
        plan = uniform(bundle, table, sites, formats, TARGET)
        found[name] = written(bundle, plan, table, data, folder / name.replace(":", "-"), records)
    mix = searched(bundle, table, sites, data, folder, bound, scored)
    found["searched"] = written(bundle, mix, table, data, folder / "searched", records)
    return found


def file_bytes(bundle: Bundle) -> int:
    """Of the weights file."""
    return (bundle.path / WEIGHTS).stat().st_size


# --- quality -------------------------------------------------------------------------------------


def quality(given: argparse.Namespace) -> dict[str, Any]:
    """A table per shipped model."""
    out: dict[str, Any] = {}
    for model in given.model or MODELS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            bundle = export_bundle(model, folder / "bundle").bundle
            data = log_data(bundle, folder, 120, 256)
            table = collect(bundle, data, Policy())
            made = variants(bundle, table, data, folder, {"max_kl": given.max_kl}, None, 8)
            print(f"\n{model}\n\n| | bytes | KL mean | KL p99 | agree | answers |")
            print("|---|---|---|---|---|---|")
            print(f"| fp32 | {file_bytes(bundle):,} | | | | {answers(bundle):.0%} |", flush=True)
            out[model] = {"fp32": {"bytes": file_bytes(bundle), "answers": answers(bundle)}}
            for variant, (one, report) in made.items():
                whole = report.comparison.total.summary()
                share = answers(one)
                print(
                    f"| {variant} | {file_bytes(one):,} | {whole['kl_mean']:.2e} | "
                    f"{whole['kl_p99']:.2e} | {whole['agree']:.2%} | {share:.0%} |",
                    flush=True,
                )
                out[model][variant] = {
                    "bytes": file_bytes(one),
                    "answers": share,
                    "formats": report.nbytes,
                    **whole,
                }
    return out


def answers(bundle: Bundle) -> float:
    """Share of right answers behind logs of 256 tokens."""
    with load(bundle.path, slots=20) as decoder:
        return recall(decoder, 256, 100, 1_000_004)


# --- speed ---------------------------------------------------------------------------------------


def speed(given: argparse.Namespace) -> dict[str, Any]:
    """Blocks of every variant in turn, for each number of threads."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        bundle, model = bundle_of("m100", folder)
        kept = {one: folder / one.replace(":", "-") for one in (*UNIFORM, "searched")}
        if not all(path.is_dir() for path in kept.values()):
            data = random_data(bundle, Path(name), 40, 2)
            table = collect(bundle, data, Policy(masks=(1.0, 0.5), blocks=2), records=8)
            half = {"max_bytes": given.max_bytes}
            for variant, (_, report) in variants(bundle, table, data, folder, half, 1, 1).items():
                print(f"{variant}: {report.nbytes}", flush=True)
        every = {"fp32": bundle} | {variant: Bundle.open(path) for variant, path in kept.items()}
        for variant, one in every.items():
            print(f"{variant}: weights file {file_bytes(one):,} bytes", flush=True)
        if given.prepare:
            return out
        for threads in map(int, given.threads.split(",")):
            torch.set_num_threads(threads)
            subjects: dict[str, Callable[[], object]] = {
                variant: block(one, threads) for variant, one in every.items()
            }
            subjects["torch fp32"] = torch_block(bundle, model, {})
            subjects["torch dynamic int8"] = torch_block(bundle, model, packed(model))
            report = interleave(
                subjects, runs=given.runs, calls=1, threads=threads, allow_busy=given.allow_busy
            )
            print(report.table())
            length = bundle.spec.block_len
            for series in report.series:
                print(f"{series.name}: {length / series.wall.median:.1f} tokens/s")
            for base in ("fp32", "torch dynamic int8"):
                ratio = report.ratio(base, "int8")
                print(f"int8 is {ratio.of_pairs:.2f} x as fast as {base} by pairs", flush=True)
            out[str(threads)] = report.to_dict()
    return out


def block(bundle: Bundle, threads: int) -> Callable[[], object]:
    """A block of a bundle: its denoise passes and its commit."""
    engine = open_engine(bundle, threads=threads, memory="fast")
    spec = bundle.spec
    canvas = np.full((1, spec.block_len), spec.mask_id)
    clean = np.random.default_rng(0).integers(0, spec.vocab_size - 1, (1, spec.block_len))

    def run() -> None:
        for _ in range(STEPS):
            engine.denoise(canvas)
        engine.commit(clean, np.array([spec.block_len]))

    return run


Packed = Mapping[int, Any]
_MODULES = (attention, denoiser, mamba1, mamba2)


def packed(model: denoiser.Denoiser) -> dict[int, Any]:
    """Weights of products as PyTorch's dynamic int8 takes them, by where the original lies."""
    found = {}
    with torch.inference_mode():
        for attribute, weight in model.named_buffers():
            name = attribute.replace("__", ".")
            if weight.ndim != 2 or not name.endswith(("proj.weight", "embedding.weight")):
                continue
            rows = weight if name == "embedding.weight" else weight.T
            scale = (rows.abs().amax() / 127).clamp_min(1e-12)
            held = torch.quantize_per_tensor(rows.contiguous(), float(scale), 0, torch.qint8)
            found[weight.data_ptr()] = torch.ops.quantized.linear_prepack(held, None)
    return found


def torch_block(bundle: Bundle, model: denoiser.Denoiser, weights: Packed) -> Callable[[], object]:
    """The same block in PyTorch, products with packed weights in dynamic int8."""
    spec = bundle.spec
    own, functional = layers.linear, torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        held = weights.get(weight.data_ptr())
        if held is None:
            return own(x, weight, bias)
        y = torch.ops.quantized.linear_dynamic(x, held)
        return y if bias is None else y + bias

    def head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        held = weights.get(weight.data_ptr())
        if held is None:
            return functional(x, weight, bias)
        return torch.ops.quantized.linear_dynamic(x, held)

    canvas = torch.full((1, spec.block_len), spec.mask_id or 0)
    rng = np.random.default_rng(0)
    clean = torch.from_numpy(rng.integers(0, spec.vocab_size - 1, (1, spec.block_len)))
    length = torch.tensor([spec.block_len])
    with torch.inference_mode():
        state = model.zero_state(1, spec.block_len)
        zero = torch.zeros(1, dtype=torch.int64)

    def run() -> None:
        for module in _MODULES:
            if hasattr(module, "linear"):
                module.linear = linear  # type: ignore[attr-defined]
        torch.nn.functional.linear = head  # type: ignore[assignment]
        try:
            with torch.inference_mode():
                for _ in range(STEPS):
                    model.denoise(canvas, state, zero)
                model.commit(clean, state, zero, length)
        finally:
            for module in _MODULES:
                if hasattr(module, "linear"):
                    module.linear = own  # type: ignore[attr-defined]
            torch.nn.functional.linear = functional

    return run


# --- drift and memory ----------------------------------------------------------------------------


def drifts(given: argparse.Namespace) -> dict[str, Any]:
    """Error of the state and divergence behind 1 to 1,000 committed blocks."""
    out: dict[str, Any] = {}
    for model in given.model or ("tiny-mamba", "tiny-hybrid"):
        with tempfile.TemporaryDirectory() as name:
            bundle = export_bundle(model, Path(name, "bundle")).bundle
            text, rng = Text.open(bundle), random.Random(11)
            lines = line_counter(build_tokenizer())
            tokens = 1000 * bundle.spec.block_len
            log: list[int] = []
            while len(log) < tokens:
                log += text.encode(dense_log(rng, lines, 256))
            records = [Record("long", tuple(log[:tokens]))]
            for kept in STATE_FORMATS:
                found = drift(bundle, kept, records)
                blocks = found.comparison.buckets
                kl = {edge: one.summary()["kl_mean"] for edge, one in sorted(blocks.items())}
                print(
                    f"{model} {kept}: state {found.comparison.state}, KL by block {kl}", flush=True
                )
                out[f"{model} {kept}"] = found.to_dict()
    return out


def memory(given: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of collecting ranges from M100, and whether order and batch matter."""
    with tempfile.TemporaryDirectory() as name:
        kept = given.folder or Path(name)
        if not (kept / "m100.bundle").exists():
            bundle_of("m100", kept)
        bundle = Bundle.open(kept / "m100.bundle")
        data = random_data(bundle, Path(name), 240, 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out: dict[str, Any] = {"before_kb": before}
        for count in (16, 128):  # 4 feeds each: three shares of masks and the commit
            start = time.perf_counter()
            policy = Policy(masks=(1.0, 0.5, 0.25), blocks=1)
            table = collect(bundle, data, policy, records=count, batch=4)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            out[str(4 * count)] = {"peak_kb": peak, "sha256": table.sha256}
            print(
                f"{4 * count} feeds: peak {peak / 1024:,.0f} MiB (before {before / 1024:,.0f}), "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return out


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    works = {"quality": quality, "speed": speed, "drift": drifts, "memory": memory}
    parser.add_argument("what", choices=list(works))
    parser.add_argument("--model", action="append", help="a shipped model (quality, drift)")
    parser.add_argument("--max-kl", type=float, default=1e-3, help="of the search (quality)")
    parser.add_argument("--max-bytes", type=int, default=90_000_000, help="of the search (speed)")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--folder", type=Path, help="where M100's bundles are kept between runs")
    parser.add_argument("--prepare", action="store_true", help="write the bundles, time nothing")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = works[given.what](given)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
