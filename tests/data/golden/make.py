"""Make the golden bundle of the schema that this checkout writes; run once per schema.

    PYTHONPATH=tests .venv/bin/python tests/data/golden/make.py

A golden bundle that is there is never replaced: it must open for ever. ``bundle`` is a random
forward Mamba-2 model with a tokenizer and a licence; ``expected.npz`` is what it computed then.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from sample_models import MODELS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fixedstate.bundle import SCHEMA, Bundle
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.decoder import open_engine

PROMPT = "get arm 3 17"


def tokenizer() -> Tokenizer:
    """37 words: what is none of them is the first."""
    words = ["?", "pad", "end", "get", "set", "arm", *map(str, range(30)), "mask"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["end", "mask"])
    return made


def main() -> None:
    """Write ``schema-N/bundle`` and ``schema-N/expected.npz``."""
    folder = Path(__file__).with_name(f"schema-{SCHEMA}")
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, words = Path(scratch, "checkpoint"), Path(scratch, "tokenizer.json")
        tokenizer().save(str(words))
        spec = MODELS["F2-forward"]
        save_checkpoint(checkpoint, spec, random_tensors(spec, seed=11), tokenizer=words)
        (checkpoint / "LICENSE").write_text("Apache License 2.0: random weights of this project.\n")
        export_bundle(checkpoint, folder / "bundle", fused=False)
    bundle = Bundle.open(folder / "bundle")
    engine = open_engine(bundle, threads=1)
    ids = np.random.default_rng(0).integers(0, bundle.spec.vocab_size, (1, 3 * 8))
    engine.commit(ids[:, :16], np.array([13]))
    logits = engine.denoise(ids[:, 16:]).copy()
    with load(folder / "bundle", threads=1) as decoder:
        request = Request([3, 5, 9, 23], Settings(20, steps=4, stop_ids=()))
        answer = decoder.generate([request])[0].token_ids
    np.savez(
        folder / "expected.npz",
        ids=ids,
        logits=logits,
        answer=np.array(answer),
        **{f"state_{name}": array for name, array in engine.read(0).items()},
    )


if __name__ == "__main__":
    main()
