"""Times of other kernels for the same shapes, where they are installed; nothing here judges ours.

``mamba_ssm`` and ``causal_conv1d`` are the published kernels, ``torch`` this package's own tensor
operations run eagerly. Each is captured into a CUDA graph of many launches where it allows that,
and timed in a stream otherwise. Their tensors are the same ones every time and stay in the cache:
that is in their favour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from card import Card, decode, values
from card_errors import family, paper

from fixedstate.plugins.schema import OPS, KernelSpec

DEVICE = "cuda"
LAUNCHES = 20

CLOSE = 2e-2
"""Largest difference from the reference relative to its largest element: is it the same sum?"""

Call = Callable[[], Any]


def _tensors(spec: KernelSpec, rows: int, length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs as torch tensors on the card, and as numbers."""
    stored = values(spec, "float16", paper(spec, length, rows), 3)
    numbers = {name: decode(array, str(array.dtype)) for name, array in stored.items()}
    return {name: torch.from_numpy(array).to(DEVICE) for name, array in stored.items()}, numbers


def _eager(spec: KernelSpec, t: dict[str, Any], length: int) -> Call:
    from fixedstate.plugins.torch_ops import PLAIN

    call = getattr(PLAIN, spec.torch_name)
    block = spec.reverse or family(spec) == "ssd"
    arguments = [t[name] for name in spec.input_names] + ([length] if block else [])
    return lambda: call(*arguments)


def _published(spec: KernelSpec, t: dict[str, Any], length: int) -> Call | None:
    """A kernel of mamba_ssm or causal_conv1d that gives the same y; None if there is none."""
    if not spec.name.endswith("Commit"):
        return None
    if family(spec) == "ssd":
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        initial = t["state"].transpose(2, 3).contiguous()  # theirs is [B, H, P, N]
        x, dt, a, b, c = (t[name] for name in ("x", "dt", "a", "b", "c"))
        chunk = 1 << (length - 1).bit_length()
        return lambda: mamba_chunk_scan_combined(
            x, dt, a, b, c, chunk, D=t["d"], initial_states=initial, return_final_states=True
        )
    if family(spec) == "scan":
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        x, dt, b, c = (t[name].transpose(1, 2).contiguous() for name in ("x", "dt", "b", "c"))
        a = t["a"].T.contiguous()
        # it starts from zero: the comparison of numbers below is made without a state
        return lambda: selective_scan_fn(x, dt.to(x.dtype), a, b, c, t["d"], return_last_state=True)
    from causal_conv1d import causal_conv1d_fn

    x = t["x"].contiguous().transpose(1, 2)  # channels last, which an initial state needs
    initial = t["state"].transpose(1, 2).contiguous().transpose(1, 2)
    return lambda: causal_conv1d_fn(
        x,
        t["weight"],
        t["bias"],
        initial_states=initial,
        return_final_states=True,
        activation="silu",
    )


def _time(call: Call) -> tuple[float, str]:
    """Microseconds per call and how they were taken."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, tunes and allocates
            call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                call()
        run, how = graph.replay, "graph"
    except Exception:
        torch.cuda.synchronize()

        def run() -> None:
            for _ in range(LAUNCHES):
                call()

        how = "stream"
    times = []
    for number in range(13):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        if number >= 3:
            times.append(first.elapsed_time(last))
    return 1e3 * float(np.median(times)) / LAUNCHES, how


def _far(spec: KernelSpec, numbers: dict[str, Any], length: int, peer: str, got: Any) -> float:
    """Difference of a peer's y from the reference."""
    numbers = dict(numbers)
    if peer == "published" and family(spec) == "scan":
        numbers["state"] = np.zeros_like(numbers["state"])
    y = got[0] if isinstance(got, tuple) else got
    if peer == "published" and family(spec) != "ssd":
        y = y.transpose(1, 2)
    reference = spec.reference(numbers, length)[0]
    return float(np.abs(y.double().cpu().numpy() - reference).max() / np.abs(reference).max())


def measure(card: Card) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows (op, rows, tokens, peer, us, how) and notes on what is absent or failed."""
    if not torch.cuda.is_available():
        return [], [f"other kernels: PyTorch {torch.__version__} sees no card"]
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for length, rows in ((32, 1), (32, 8), (16, 1), (16, 8), (64, 1), (64, 8)):
        for spec in OPS.values():
            if card.left() < 0:
                notes.append(f"other kernels: {spec.name} {rows} x {length} and more: no time left")
                return found, notes
            for peer, make in (("published", _published), ("torch", _eager)):
                try:
                    t, numbers = _tensors(spec, rows, length)
                    call = make(spec, t, length)
                    if call is None:
                        continue
                    if rows == 1 and (far := _far(spec, numbers, length, peer, call())) > CLOSE:
                        notes.append(f"{peer}, {spec.name}: differs by {far:.2g}: not the same sum")
                        continue
                    microseconds, how = _time(call)
                except ImportError as error:
                    note = f"{peer} kernels for {family(spec)}: absent ({error})"
                except Exception as error:
                    note = f"{peer}, {spec.name}: {type(error).__name__}: {str(error)[:200]}"
                else:
                    entry = {"op": spec.name, "rows": rows, "tokens": length, "peer": peer}
                    found.append({**entry, "us": microseconds, "how": how})
                    continue
                if note not in notes:
                    notes.append(note)
    return found, notes
