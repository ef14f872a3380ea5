"""Which weights stay float32 whatever the io dtype: the rule of the exporter and of the planner."""

from __future__ import annotations

_ISLANDS = ("norm.weight", "norm.bias", "dt_bias", "dt_proj.bias", "A", "A_log", "D", "_gate")


def is_island(name: str) -> bool:
    """Whether a tensor stays float32 whatever the io dtype: norms, steps, decays, skips, gates."""
    return name.endswith(_ISLANDS)
