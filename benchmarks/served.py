"""What the benchmarks of the runtime share: bundles by name, and an engine that costs nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from m100 import m100

from fixedstate.bundle import Bundle
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.runtime.sampling import Scores
from fixedstate.runtime.scheduler import Scheduler
from fixedstate.spec import LayerSpec, Mamba2Sizes, ModelSpec


def bundle_of(model: str, path: str | None = None) -> Bundle:
    """A bundle that exists, or one of a shipped model or of M100, exported now."""
    if path is not None:
        return Bundle.open(path)
    folder = Path(tempfile.mkdtemp())
    checkpoint: str | Path = model
    if model == "m100":
        checkpoint = folder / "checkpoint"
        save_checkpoint(checkpoint, m100(), random_tensors(m100(), seed=0))
    return export_bundle(checkpoint, folder / "model.bundle").bundle


class NullEngine:
    """Passes that do nothing; logits are the same random ones for every row."""

    provider = "null"
    fuses = whole_blocks = True
    head = "logits"
    limit = None

    def __init__(self, slots: int, block_len: int = 16) -> None:
        sizes = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=4)
        layer = LayerSpec("mamba2", sizes, direction="forward")
        self.spec = ModelSpec(300, 304, 32, (layer,), block_len=block_len, mask_id=299)
        self.slots = slots
        self.past_length = np.zeros(slots, np.int64)
        self.last_logits = np.zeros((slots, 0), np.float32)
        self._logits = np.zeros((slots, block_len, 304), np.float32)

    def denoise(self, ids: Any, first: int = 0) -> Any:
        """The same logits."""
        return self._logits[: len(ids)]

    def commit_denoise(self, ids: Any, first: int = 0) -> Any:
        """The same logits."""
        return self._logits[: len(ids)]

    def commit(self, ids: Any, commit_length: Any, first: int = 0) -> None:
        """Nothing."""

    def reset(self, row: int, room: int = 0) -> None:
        """Nothing."""

    def move(self, source: int, target: int) -> None:
        """Nothing."""

    def swap(self, row: int, other: int) -> None:
        """Nothing."""

    def state_bytes(self) -> int:
        """None."""
        return 0

    def kv_bytes(self, past_length: int) -> int:
        """None."""
        return 0


def without_scoring(scheduler: Scheduler, slots: int, length: int) -> Scheduler:
    """A scheduler whose scores cost nothing either: what is left is its own work."""
    rng = np.random.default_rng(0)
    tokens = np.ones((slots, length), np.int64)
    confidence, finite = rng.random((slots, length)), np.ones(slots, np.bool_)

    def scores(logits: Any, open_slots: Any, *_: Any) -> Scores:
        rows = len(logits)
        sure = np.where(open_slots, confidence[:rows], -1.0)
        return Scores(tokens[:rows], sure, finite[:rows])

    scheduler._scorer = scores  # type: ignore[assignment]
    return scheduler
