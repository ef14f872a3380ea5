"""Random tokens to calibrate with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fixedstate.bundle import Bundle
from fixedstate.calib.data import Data, write_data


def random_data(bundle: Bundle, folder: Path, count: int = 30, blocks: int = 2) -> Data:
    """Sequences of that many blocks without a prompt; the same ones each time."""
    rng = np.random.default_rng(5)
    tokens = [token for token in range(bundle.spec.vocab_size) if token != bundle.spec.mask_id]
    size = blocks * bundle.spec.block_len
    given = [(rng.choice(tokens, size).tolist(), 0) for _ in range(count)]
    return write_data(folder / "data.jsonl", bundle, given)
