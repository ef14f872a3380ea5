"""Exact-match recall of a shipped model against the length of the log, decoded by the runtime.

    python benchmarks/recall.py tiny-mamba --factors 1 2 4 8

The questions are those of `examples/robot_log`; a factor is a multiple of the training length.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "robot_log"))
from generate import build_tokenizer, line_counter, recall_item

from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime import Decoder, Request, Settings, load
from fixedstate.runtime.text import Text

ROWS = 20


def recall(decoder: Decoder, length: int, items: int, seed: int) -> float:
    """Share of right answers behind logs of about that many tokens."""
    text, rng = Text.open(decoder.bundle), random.Random(seed)
    count = line_counter(build_tokenizer())
    settings = Settings(max_new_tokens=16, steps=8)
    right = 0
    for _ in range(items // ROWS):
        drawn = [recall_item(rng, count, length + rng.randint(2, 15)) for _ in range(ROWS)]
        requests = [Request(tuple(text.encode(prompt)), settings) for prompt, _ in drawn]
        for result, (_, expected) in zip(decoder.generate(requests), drawn, strict=True):
            right += text.decode(result.token_ids).strip() == expected.strip()
    return right / items


def main() -> None:
    """Export the model, ask, print one line per length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--items", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = export_bundle(given.model, Path(folder, "model.bundle")).bundle
        with load(bundle.path, slots=ROWS) as decoder:
            trained = bundle.decode.train_length or 256
            for factor in given.factors:
                start = time.perf_counter()
                share = recall(decoder, factor * trained, given.items, 1_000_003 + factor)
                seconds = time.perf_counter() - start
                print(f"{given.model} {factor}x: {share:.0%} of {given.items} in {seconds:.1f} s")


if __name__ == "__main__":
    main()
