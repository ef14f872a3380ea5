"""What a bundle takes of memory in each memory mode, computed from the bundle alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.errors import UsageError
from fixedstate.runtime.buffers import columns_for
from fixedstate.state import HEADS, head_role, split_role

MODES = ("lean", "fast")
"""``lean`` holds the weights once, ``fast`` twice and needs less time for a pass."""

LEAN_ABOVE = 1_000_000_000
"""Bytes of weights above which ``lean`` is taken unless told otherwise."""

PROCESS = 100_000_000
"""Bytes of an interpreter and ONNX Runtime, whatever the model (measured)."""

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What will be in memory, in bytes; activations of a pass come on top.

    Attributes:
        memory: ``lean`` or ``fast``; ``full`` for a model that has one graph and no state.
        sessions: The graphs that are opened, each with its own copy of the weights.
        slots: Rows.
        weights: All copies.
        state: Constant-size state of all slots, both buffers of every pair.
        capacity: Columns of keys and values per slot at first.
        kv: Keys and values of all slots at that capacity.
        kv_bytes_per_token: What one more column of one slot takes.
        scratch: Scores of a pass over all slots, and the columns that one slice of a prompt makes.
        process: The interpreter and ONNX Runtime.
    """

    memory: str
    sessions: tuple[str, ...]
    slots: int
    weights: int
    state: int
    capacity: int
    kv: int
    kv_bytes_per_token: int
    scratch: int
    process: int = PROCESS

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.state + self.kv + self.scratch + self.process

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "sessions": list(self.sessions), "total": self.total}

    def text(self) -> str:
        """The plan in one line."""
        copies = "once" if len(self.sessions) == 1 else f"{len(self.sessions)} times"
        parts = [
            f"weights {copies} {_mb(self.weights)}",
            f"state of {self.slots} slots {_mb(self.state)}" if self.state else "",
            f"keys and values at {self.capacity} tokens {_mb(self.kv)}" if self.kv else "",
            f"scores and columns {_mb(self.scratch)}",
            f"process {_mb(self.process)}",
        ]
        return f"memory {self.memory}: {_mb(self.total)} = {' + '.join(filter(None, parts))}"

    def shortage(self, available: int | None) -> str | None:
        """Why this machine may be too small, or None where it is not or nobody knows."""
        if available is None or self.total <= available:
            return None
        remedy = "use fewer slots"
        if self.memory == "fast" and self.sessions[-1] != "commit":
            remedy += ", or memory 'lean'"
        return (
            f"memory {self.memory} needs {_mb(self.total)}, this machine has {_mb(available)} "
            f"available: {remedy}"
        )


def plan(
    bundle: Bundle,
    memory: str | None = None,
    *,
    slots: int = 1,
    capacity: int = 0,
    limit: int | None = None,
    provider: str = "cpu",
    head: str = "logits",
    lean_above: int = LEAN_ABOVE,
) -> MemoryPlan:
    """What decoding with a bundle will take; nothing is loaded.

    Args:
        bundle: The opened bundle.
        memory: ``lean``, ``fast``, or None for the choice of :func:`choose`.
        slots: Rows.
        capacity: Tokens per row that keys and values have room for at first.
        limit: Committed tokens per row at most; None for no limit.
        provider: What the graphs run on.
        head: What the passes give.
        lean_above: See :func:`choose`.

    Raises:
        UsageError: for a mode that is none, or that the bundle has no graphs for.
    """
    spec, state = bundle.spec, bundle.state
    chosen = choose(bundle, memory, lean_above=lean_above, head=head)
    sessions = roles(bundle, chosen, head)
    columns = 0
    if state.appended:
        columns = columns_for(capacity, spec.block_len, limit, state.whole_blocks)
    per_token = state.kv_bytes_per_token()
    steps = sum(port.nbytes(slots) for port in state.stepped)
    scores = slots * spec.block_len * spec.vocab_rows * 4
    shifted = slots * spec.vocab_rows * 4 if spec.logit_shift else 0
    slices = bundle.decode.prefill_blocks * spec.block_len if state.appended else 0
    return MemoryPlan(
        memory=chosen,
        sessions=sessions,
        slots=slots,
        weights=_weights(bundle, provider) * len(sessions),
        state=2 * (state.state_bytes(slots) + steps),
        capacity=columns,
        kv=slots * columns * per_token,
        kv_bytes_per_token=per_token,
        scratch=scores + 2 * shifted + slots * slices * per_token,
    )


def choose(
    bundle: Bundle,
    memory: str | None = None,
    *,
    head: str = "logits",
    lean_above: int = LEAN_ABOVE,
) -> str:
    """The memory mode that will be used.

    Args:
        bundle: The opened bundle.
        memory: ``lean`` or ``fast``; None for ``lean`` above `lean_above` bytes of weights, or
            where there is no other graph, and ``fast`` below, or where there is no fused graph.
        head: What the passes give.
        lean_above: Bytes.

    Raises:
        UsageError: for a mode that is none, one for a model that has no choice, or a head that
            the bundle does not have.
    """
    if memory is not None and memory not in MODES:
        raise UsageError(f"memory {memory!r} is unknown; use one of {', '.join(MODES)}")
    check_heads(bundle, head)
    if bundle.spec.objective == "full":
        if memory is None:
            return "full"
        raise UsageError(
            f"memory {memory!r} cannot be chosen: a model of objective 'full' has one graph and "
            "holds its weights once; leave the choice out"
        )
    if memory is not None:
        return memory
    if head_role("commit_denoise", head) not in bundle.graphs:
        return "fast"
    large = _weights_file(bundle) > lean_above
    return "lean" if large or head_role("denoise", head) not in bundle.graphs else "fast"


def roles(bundle: Bundle, memory: str, head: str = "logits") -> tuple[str, ...]:
    """The graphs to open for a mode that :func:`choose` gave.

    Args:
        bundle: The opened bundle.
        memory: ``lean``, ``fast`` or ``full``.
        head: What the passes give, one of :data:`fixedstate.state.HEADS`.

    Raises:
        UsageError: where the bundle has no graphs for it.
    """
    has = bundle.graphs
    denoise, fused = head_role("denoise", head), head_role("commit_denoise", head)
    if memory == "full":
        return ("full",)
    if memory == "lean":
        _require(bundle, memory, fused)
        return (fused,)
    _require(bundle, memory, denoise)
    return (denoise, "commit" if "commit" in has and fused not in has else fused)


def check_heads(bundle: Bundle, head: str) -> None:
    """Refuse a reduced head that a bundle does not have.

    Raises:
        UsageError: naming those it has.
    """
    if head not in HEADS:
        raise UsageError(f"head {head!r} is unknown; use one of {', '.join(HEADS)}")
    has = sorted({split_role(role)[1] for role in bundle.graphs} - {"logits"})
    if head not in ("logits", *has):
        raise UsageError(
            f"{bundle.path} has no head {head!r} (it has {', '.join(has) or 'none'}): export it "
            f"with --head {head}, or load it without a head"
        )


def _require(bundle: Bundle, memory: str, role: str) -> None:
    if role not in bundle.graphs:
        other = "fast" if memory == "lean" else "lean"
        raise UsageError(
            f"memory {memory!r} runs on the graph {role!r}, which {bundle.path} lacks (it has "
            f"{', '.join(sorted(bundle.graphs))}): export it again with that graph, or use memory "
            f"{other!r}"
        )


def available() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _weights_file(bundle: Bundle) -> int:
    return (bundle.path / WEIGHTS).stat().st_size


def _weights(bundle: Bundle, provider: str) -> int:
    """Bytes of one copy: ONNX Runtime's CPU widens fp16 to fp32."""
    wide = provider == "cpu" and bundle.precision.io == "float16"
    return _weights_file(bundle) * (2 if wide else 1)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
