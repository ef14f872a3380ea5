"""Where ONNX Runtime runs the nodes of a graph: what is on the host though a card was asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from fixedstate.errors import BackendError

CPU = "CPUExecutionProvider"

RECORD = "session.record_ep_graph_assignment_info"
"""Entry of a session's options that has places recorded."""

TELLS_PLACES = "1.24"
"""The first version of ONNX Runtime that records them."""

SHAPE_OPS = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "ConstantOfShape",
        "Div",
        "Equal",
        "Gather",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "Less",
        "LessOrEqual",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Range",
        "ReduceProd",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Unsqueeze",
        "Where",
    }
)
"""Operators that may run on the CPU in a session on a device: with them sizes are computed.

ONNX Runtime keeps what depends on sizes alone where sizes are, on the host
(``GetCpuPreferredNodes`` in its ``fallback_cpu_capability.cc``), and so do all graphs of a bundle.
"""


def places(session: Any) -> dict[str, dict[str, int]]:
    """How often each operator runs on each provider."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    found: dict[str, Counter[str]] = {}
    for part in tell() if tell is not None else ():
        found.setdefault(part.ep_name, Counter()).update(n.op_type for n in part.get_nodes())
    return {name: dict(sorted(counts.items())) for name, counts in sorted(found.items())}


def check_places(path: Path, session: Any, provider: str) -> None:
    """Refuse a session on a device that computes more than sizes on the CPU, or has ports there.

    What is computed there travels at every run. A port there is worse: ONNX Runtime copies an
    input when it is bound, and would read that copy ever after.

    Raises:
        BackendError: naming operators or ports.
    """
    found = places(session)
    if not found:
        raise BackendError(
            f"this ONNX Runtime does not say where it runs the nodes of {path}: install "
            f"{TELLS_PLACES} or newer for provider {provider!r}, or allow the fallback to the CPU"
        )
    wrong = [f"{count} x {op}" for op, count in found.get(CPU, {}).items() if op not in SHAPE_OPS]
    ports = [
        port.name
        for port, memory in (
            *zip(session.get_inputs(), session.get_input_memory_infos(), strict=True),
            *zip(session.get_outputs(), session.get_output_memory_infos(), strict=True),
        )
        if memory.name.lower() == "cpu"
    ]
    if wrong or ports:
        what = ", ".join([*wrong, *(f"port {name}" for name in ports)])
        raise BackendError(
            f"provider {provider!r} does not run all of {path}: on the CPU would be {what}, and "
            "travel at every pass: use another provider or precision, or allow the fallback to "
            "the CPU"
        )
