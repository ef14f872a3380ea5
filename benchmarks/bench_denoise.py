"""One denoise pass, B=1: a bundle on ONNX Runtime against our PyTorch denoiser, eager and compiled.

    python benchmarks/bench_denoise.py                       # tiny-hybrid and M100, 1 and 2 threads
    python benchmarks/bench_denoise.py --model m100 --threads 1 --json out.json

The baseline is the PyTorch denoiser in its one-chunk form under inference_mode with the same
threads, timed in turn with ours. The floor is the sum of the model's own products at their real row
counts, timed alone in the same library (random matrices, one ONNX graph of MatMuls), or the bytes
of the weights over the copy rate, whichever is larger. `loop` is the share of a decode loop's time
that is not spent inside a session.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from harness import Report, interleave
from m100 import m100

from fixedstate.bundle import Bundle
from fixedstate.export.checkpoint import load_checkpoint, random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.ort import OrtBinding
from fixedstate.spec import ModelSpec


def bundle_of(model: str, folder: Path) -> tuple[Bundle, Denoiser]:
    """The bundle of a model, exported into a folder if it is not there, and its denoiser."""
    bundle = folder / f"{model}.bundle"
    source: str | Path = model
    if model == "m100":
        source = folder / "m100"
        if not source.exists():
            save_checkpoint(source, m100(), random_tensors(m100(), seed=0))
    if not bundle.exists():
        export_bundle(source, bundle)
    loaded = load_checkpoint(source)
    return Bundle.open(bundle), Denoiser(loaded.spec, loaded.tensors)


def passes(
    bundle: Bundle, denoiser: Denoiser, threads: int, compiled: bool
) -> dict[str, Callable[[], object]]:
    """The subjects: ours first, then the baselines, on one canvas and one committed state."""
    spec = bundle.spec
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    engine = open_engine(bundle, threads=threads)
    prompt = rng.integers(0, spec.vocab_size, (1, 4 * spec.block_len))
    engine.commit(prompt, np.array([prompt.shape[1]]))
    canvas = np.full((1, spec.block_len), spec.mask_id)
    ids = torch.from_numpy(canvas)
    past = torch.tensor([prompt.shape[1]])
    with torch.inference_mode():
        zero = denoiser.zero_state(1, prompt.shape[1])
        start = torch.zeros(1, dtype=torch.int64)
        state = denoiser.commit(torch.from_numpy(prompt), zero, start, past)

    def eager() -> object:
        with torch.inference_mode():
            return denoiser.denoise(ids, state, past)

    subjects: dict[str, Callable[[], object]] = {"ours": lambda: engine.denoise(canvas)}
    subjects["eager"] = eager
    if compiled:
        fast = torch.compile(denoiser.denoise, dynamic=False, fullgraph=True)

        def compile_pass() -> object:
            with torch.inference_mode():
                return fast(ids, state, past)

        subjects["compile"] = compile_pass
    results = [np.asarray(subject()) for subject in subjects.values()]
    for name, result in zip(subjects, results, strict=True):
        np.testing.assert_allclose(result, results[0], atol=1e-3, err_msg=name)
    subjects["floor"] = products(spec, threads)
    return subjects


def products(spec: ModelSpec, threads: int) -> Callable[[], object]:
    """The model's own products at their real row counts, alone in ONNX Runtime."""
    shapes: list[tuple[int, int]] = []
    width = spec.width
    for layer in spec.layers:
        if layer.mixer == "mamba2":
            sizes = layer.mamba2
            count = 2 if layer.direction == "block" and layer.tied == "none" else 1
            shapes += [(width, sizes.in_proj_rows), (sizes.d_inner, width)] * count
        elif layer.mixer == "attention":
            attn = layer.attention
            wide = attn.heads * attn.head_dim
            narrow = attn.kv_heads * attn.head_dim
            shapes += [(width, wide), (width, narrow), (width, narrow), (wide, width)]
        if layer.mlp != "none":
            shapes += [(width, layer.mlp_width)] * (2 if layer.mlp == "gated" else 1)
            shapes.append((layer.mlp_width, width))
    shapes.append((width, spec.vocab_rows))
    rng = np.random.default_rng(0)
    inputs: dict[int, ir.Value] = {}
    nodes, outputs, weights = [], [], []
    for index, (rows, columns) in enumerate(shapes):
        x = inputs.setdefault(
            rows,
            ir.Value(
                name=f"x{rows}",
                shape=ir.Shape([1, spec.block_len, rows]),
                type=ir.TensorType(ir.DataType.FLOAT),
            ),
        )
        data = ir.tensor(rng.standard_normal((rows, columns)).astype(np.float32), name=f"w{index}")
        weight = ir.Value(name=f"w{index}", const_value=data)
        weights.append(weight)
        node = ir.node("MatMul", [x, weight])
        node.outputs[0].name = f"y{index}"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        nodes.append(node)
        outputs.append(node.outputs[0])
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=nodes,
        initializers=weights,
        opset_imports={"": 21},
        name="floor",
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "floor.onnx")
        ir.save(ir.Model(graph, ir_version=10), file, external_data="floor.data")
        session = onnxruntime.InferenceSession(file, options)
    feeds = {
        value.name: rng.standard_normal((1, spec.block_len, rows)).astype(np.float32)
        for rows, value in inputs.items()
    }
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for value in outputs:
        binding.bind_output(value.name)
    return lambda: session.run_with_iobinding(binding)


def loop_share(bundle: Bundle, threads: int, tokens: int) -> dict[str, float]:
    """Seconds of a greedy decode with quota S = 8, and the share spent outside sessions."""
    inside = 0.0
    run = OrtBinding.run

    def timed(self: OrtBinding) -> None:
        nonlocal inside
        start = time.perf_counter()
        run(self)
        inside += time.perf_counter() - start

    OrtBinding.run = timed  # type: ignore[method-assign]
    try:
        with load(bundle.path, threads=threads, verify_weights=False) as decoder:
            ids = tuple(int(i) for i in np.random.default_rng(0).integers(10, 100, 40))
            settings = Settings(max_new_tokens=tokens, steps=8, stop_ids=())
            decoder.generate([Request(ids, settings)])
            inside = 0.0
            result = decoder.generate([Request(ids, settings)])[0]
    finally:
        OrtBinding.run = run  # type: ignore[method-assign]
    total = result.seconds["total"]
    return {
        "total_s": total,
        "session_s": inside,
        "outside_share": 1 - inside / total,
        "tokens_per_s": len(result.token_ids) / total,
        "passes": result.denoise_passes,
    }


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", action="append", help="a shipped model, or m100")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--folder", type=Path, help="where bundles are kept between runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        for model in given.model or ["tiny-hybrid", "m100"]:
            bundle, denoiser = bundle_of(model, folder)
            for threads in (int(v) for v in given.threads.split(",")):
                subjects = passes(bundle, denoiser, threads, not given.no_compile)
                report: Report = interleave(subjects, runs=given.runs, allow_busy=given.allow_busy)
                loop = loop_share(bundle, threads, 64)
                print(f"\n{model}, {threads} thread(s), one denoise pass, B=1")
                print(report.table())
                print("loop: " + ", ".join(f"{k} {v:.4g}" for k, v in loop.items()))
                out.append({"model": model, "threads": threads, "loop": loop, **report.to_dict()})
    if given.json:
        given.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
