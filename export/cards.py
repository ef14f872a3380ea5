"""The NVIDIA cards of this machine, by the driver; none where there is no driver."""

from __future__ import annotations

from fixedstate.errors import BackendError
from fixedstate.runtime.identity import Card


def first_card() -> Card | None:
    """The first card, which is the one that TensorRT builds on; None where there is none."""
    from fixedstate.plugins.driver import Driver

    try:
        with Driver() as driver:
            major, minor = driver.compute_capability
            return Card(f"{major}.{minor}", driver.name)
    except BackendError:
        return None
