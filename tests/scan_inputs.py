"""Random inputs of the scan operators, for every test that needs them."""

from __future__ import annotations

from collections.abc import Mapping

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


def selective_inputs(
    rng: np.random.Generator, rows: int, tokens: int, inner: int, width: int, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Random inputs of the Mamba-1 operators; ``scale`` multiplies the decays."""
    return {
        "x": rng.standard_normal((rows, tokens, inner)),
        "dt": rng.uniform(0.001, 0.5, (rows, tokens, inner)),
        "a": -scale * rng.uniform(0.5, 8, (width, inner)),
        "b": rng.standard_normal((rows, tokens, width)),
        "c": rng.standard_normal((rows, tokens, width)),
        "d": rng.standard_normal(inner),
        "state": rng.standard_normal((rows, width, inner)),
    }


def without_state(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a reverse operator, which starts from zero."""
    return {name: value for name, value in inputs.items() if name != "state"}
