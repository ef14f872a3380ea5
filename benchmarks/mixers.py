"""Make docs/mixers.md: every variant exported and compared with the float64 loops, every refusal.

    PYTHONPATH=benchmarks:tests python benchmarks/mixers.py            # all of it, some minutes
    PYTHONPATH=benchmarks:tests python benchmarks/mixers.py --only "Mamba-1: d_conv 1" --print

Each variant of tests/variants.py is exported with random weights and run by ONNX Runtime on
sequences of 1, L-1, L, L+1 and 3L+5 tokens: whole blocks are committed, one at a time and at once,
what is left over is fixed in the canvas behind them. The error is the largest absolute difference
of any logit or state from tests/reference_model.py.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from reference_model import ReferenceModel
from variants import REFUSED, VARIANTS, flat_variants, sentence_of

from fixedstate.bundle import Bundle
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.ort import open_sessions
from fixedstate.spec import ModelSpec

DOCS = Path(__file__).resolve().parents[1] / "docs" / "mixers.md"
MARK = "<!-- made by benchmarks/mixers.py: what stands below is overwritten -->\n"
COLUMNS = ("1", "L-1", "L", "L+1", "3L+5")


def lengths_of(spec: ModelSpec) -> tuple[int, ...]:
    """Tokens for each of :data:`COLUMNS`."""
    length = spec.block_len
    return 1, length - 1, length, length + 1, 3 * length + 5


def errors_of(spec: ModelSpec) -> list[float]:
    """Largest error of the exported graphs against the loops, by length."""
    tensors = random_tensors(spec, seed=5)
    judge = ReferenceModel(spec, tensors)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        save_checkpoint(Path(scratch, "checkpoint"), spec, tensors)
        bundle = export_bundle(Path(scratch, "checkpoint"), Path(scratch, "bundle")).bundle
        return [
            _error(bundle, judge, rng.integers(0, spec.vocab_size, count))
            for count in lengths_of(spec)
        ]


def _error(bundle: Bundle, judge: ReferenceModel, ids: np.ndarray) -> float:
    spec = bundle.spec
    if spec.objective == "full":
        session = open_sessions(bundle, ("full",), threads=1)["full"]
        return _gap(session.run({"input_ids": ids[None]})["logits"][0], judge.run(ids, 0)[0])
    length = spec.block_len
    clean = len(ids) // length * length
    canvas = np.full(length, spec.mask_id)
    canvas[: len(ids) - clean] = ids[clean:]
    whole = np.concatenate([ids[:clean], canvas])
    expected, states = judge.run(whole, clean)
    gaps = []
    for piece in {length, max(clean, length)}:
        engine = open_engine(bundle, threads=1)
        for start in range(0, clean, piece):
            engine.commit(ids[None, start : start + piece], np.array([piece]))
        gaps.append(_gap(engine.denoise(canvas[None])[0], expected[clean:]))
        if spec.self_conditioning_width:
            again, _ = judge.run(whole, clean, judge.soft_embedding(expected[clean:]))
            gaps.append(_gap(engine.denoise(canvas[None])[0], again[clean:]))
        if spec.logit_shift and clean:
            gaps.append(_gap(engine.last_logits[0], expected[clean - 1]))
        found = engine.read(0)
        gaps += [_gap(found[suffix], state) for suffix, state in states.items()]
    return max(gaps)


def _gap(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found - expected).max(initial=0.0))


def page(errors: dict[str, list[float]]) -> str:
    """The generated part of docs/mixers.md."""
    lines = [MARK]
    for section, group in VARIANTS.items():
        lines += [f"## {section}\n", f"| variant | | {' | '.join(COLUMNS)} |"]
        lines.append(f"|---|---|{'---|' * len(COLUMNS)}")
        for name in group:
            row = " | ".join(f"{error:.1e}" for error in errors[f"{section}: {name}"])
            lines.append(f"| {name} | exact | {row} |")
        lines.append("")
    lines += ["## Refused\n", "| what | |", "|---|---|"]
    lines += [f"| {name} | refused: {sentence_of(call)} |" for name, call in REFUSED.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compute, then write or print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", help="section: name; repeatable")
    parser.add_argument("--print", action="store_true", help="print errors, write nothing")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    chosen = {k: v for k, v in flat_variants().items() if not given.only or k in given.only}
    errors: dict[str, list[float]] = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        found = pool.map(errors_of, chosen.values())
        for name, row in zip(chosen, found, strict=True):
            errors[name] = row
            print(f"{name}: {', '.join(f'{error:.1e}' for error in row)}", flush=True)
    if given.print or given.only:
        return
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(text.partition(MARK)[0] + page(errors), encoding="utf-8")


if __name__ == "__main__":
    main()
