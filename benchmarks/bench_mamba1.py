"""Mamba-1, one pass over 32 tokens, B=1, one thread: ours against transformers and its exporter.

    python benchmarks/bench_mamba1.py
    python benchmarks/bench_mamba1.py --runs 31 --json out.json

The model is a random MambaForCausalLM: 4 layers, hidden 256 (d_inner 512, d_state 16), vocabulary
1000. `ours` is the denoise graph of the bundle made from its folder, started from a committed
state; `commit` is our commit graph over as many tokens. `exporter` is the graph that transformers'
own ONNX exporter makes for 32 tokens without a cache (it carries no state in or out, and is frozen
at that length), `exporter-fused` the same with its fusions for ONNX Runtime; both run in the same
ONNX Runtime with one thread. `eager` is transformers' module in PyTorch. All give the same logits
where they start from zero, which is checked first. What counts is `cpu`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from harness import interleave

from fixedstate.bundle import Bundle
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime.decoder import open_engine

TOKENS = 32
VOCAB = 1000


def published(folder: Path) -> torch.nn.Module:
    """A random model of transformers, saved in a folder."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=4, state_size=16)
    model = MambaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def exported(
    model: torch.nn.Module, file: Path, fusions: str | None
) -> onnxruntime.InferenceSession:
    """The graph of transformers' exporter in ONNX Runtime."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    config = OnnxConfig(ort_fusions=fusions)
    made, _ = OnnxExporter().export_program(model, {"input_ids": ids, "use_cache": False}, config)
    ir.save(made, file, external_data=f"{file.name}.data")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    return onnxruntime.InferenceSession(file, options)


def subjects(folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, checked to give the same logits from a state of zeros."""
    torch.set_num_threads(1)
    model = published(folder / "published")
    export_bundle(folder / "published", folder / "ours.bundle", block_len=TOKENS)
    engine = open_engine(Bundle.open(folder / "ours.bundle"), threads=1)
    canvas = np.random.default_rng(0).integers(0, VOCAB, (1, TOKENS))
    ids = torch.from_numpy(canvas)
    whole = np.array([TOKENS])
    sessions = {
        "exporter": exported(model, folder / "exporter.onnx", None),
        "exporter-fused": exported(model, folder / "fused.onnx", "cpu"),
    }

    def eager() -> torch.Tensor:
        with torch.inference_mode():
            return model(ids, use_cache=False).logits

    timed: dict[str, Callable[[], object]] = {}
    expected = np.array(engine.denoise(canvas))
    np.testing.assert_allclose(eager().numpy(), expected, atol=1e-4, err_msg="eager")
    for name, session in sessions.items():
        feeds = {port.name: canvas for port in session.get_inputs()}
        np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=1e-4, err_msg=name)
        binding = session.io_binding()
        for port in session.get_inputs():
            binding.bind_cpu_input(port.name, canvas)
        for port in session.get_outputs():
            binding.bind_output(port.name)
        timed[name] = lambda session=session, binding=binding: session.run_with_iobinding(binding)
    engine.commit(canvas, whole)
    return {
        "ours": lambda: engine.denoise(canvas),
        "commit": lambda: engine.commit(canvas, whole),
        **timed,
        "eager": eager,
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
    with tempfile.TemporaryDirectory() as scratch:
        report = interleave(
            subjects(Path(scratch)), runs=given.runs, threads=1, allow_busy=given.allow_busy
        )
    print(f"Mamba-1, 4 layers, hidden 256, {TOKENS} tokens, B=1, one thread")
    print(report.table())
    ours = report["ours"].cpu.median
    for name in ("exporter", "exporter-fused", "eager"):
        print(f"CPU time: ours is {ours / report[name].cpu.median:.3f} x {name}")
    if given.json:
        given.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
