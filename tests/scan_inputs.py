"""Random inputs of the scan operators, for every test that needs them."""

from __future__ import annotations

import numpy as np


def scan_inputs(
    rng: np.random.Generator, rows: int, tokens: int, heads: int, groups: int, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Random operator inputs; ``scale`` multiplies the decays."""
    head_dim, width = 8, 16
    return {
        "x": rng.standard_normal((rows, tokens, heads, head_dim)),
        "dt": rng.uniform(0.001, 0.5, (rows, tokens, heads)),
        "a": -scale * rng.uniform(0.5, 8, heads),
        "b": rng.standard_normal((rows, tokens, groups, width)),
        "c": rng.standard_normal((rows, tokens, groups, width)),
        "d": rng.standard_normal(heads),
        "state": rng.standard_normal((rows, heads, width, head_dim)),
    }
