"""How far a model is from another along the same trajectories, each carrying its own state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fixedstate.bundle import Bundle
from fixedstate.calib.data import Record
from fixedstate.calib.table import Policy
from fixedstate.calib.trajectory import Pass, Trajectory, longest_first
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array
from fixedstate.runtime.compare import decoded, divergence, log_softmax
from fixedstate.runtime.snapshot import StatefulEngine

MARGIN = 0.1
"""Where the two best scores of the reference are nearer, the best token is decided by a hair."""

BUCKETS = (1, 10, 100, 1000)
"""Blocks behind a sequence's beginning up to which each bucket goes."""

Opens = Callable[[int], StatefulEngine]
"""Opens an engine with that many slots."""


@dataclass(slots=True)
class Tokens:
    """Masked tokens that both models gave scores of.

    Attributes:
        kl: Kullback-Leibler divergence in nats of the candidate from the reference, per token.
        agrees: Whether both have the same best token.
        decided: Whether the reference's two best scores differ by more than :data:`MARGIN`.
        reference: Negative log likelihood of the true token in the reference.
        candidate: The same in the candidate.
    """

    kl: list[Array] = field(default_factory=list)
    agrees: list[Array] = field(default_factory=list)
    decided: list[Array] = field(default_factory=list)
    reference: list[Array] = field(default_factory=list)
    candidate: list[Array] = field(default_factory=list)

    def add(self, reference: Array, candidate: Array, tokens: Array) -> None:
        """Compare scores (n, V) of n masked slots, whose true tokens are `tokens`."""
        right, found = log_softmax(reference), log_softmax(candidate)
        best = np.partition(reference, -2, axis=-1)[:, -2:]
        self.kl.append(divergence(reference, candidate))
        self.agrees.append(reference.argmax(-1) == candidate.argmax(-1))
        self.decided.append(best[:, 1] - best[:, 0] > MARGIN)
        self.reference.append(-right[np.arange(len(tokens)), tokens])
        self.candidate.append(-found[np.arange(len(tokens)), tokens])

    def extend(self, other: Tokens) -> None:
        """Take in what another one holds."""
        for name in ("kl", "agrees", "decided", "reference", "candidate"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def count(self) -> int:
        """How many tokens."""
        return sum(map(len, self.kl))

    def summary(self) -> dict[str, float]:
        """Means over all tokens, ready for JSON."""
        kl = np.concatenate(self.kl)
        agrees, decided = np.concatenate(self.agrees), np.concatenate(self.decided)
        return {
            "tokens": len(kl),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "agree": float(agrees.mean()),
            "agree_decided": float(agrees[decided].mean()) if decided.any() else 1.0,
            "nll_reference": float(np.concatenate(self.reference).mean()),
            "nll_delta": float(
                (np.concatenate(self.candidate) - np.concatenate(self.reference)).mean()
            ),
        }


@dataclass(slots=True)
class Comparison:
    """What was compared.

    Attributes:
        shares: Tokens by share of masks.
        buckets: Tokens by the block that they are in: up to 1, 10, 100 and 1,000.
        sequences: Mean divergence of every sequence.
        state: Largest relative error of any scan state's row norm, by committed blocks.
    """

    shares: dict[float, Tokens] = field(default_factory=dict)
    buckets: dict[int, Tokens] = field(default_factory=dict)
    sequences: dict[str, float] = field(default_factory=dict)
    state: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> Tokens:
        """All tokens."""
        whole = Tokens()
        for one in self.shares.values():
            whole.extend(one)
        return whole

    @property
    def kl(self) -> float:
        """Mean divergence of all tokens."""
        return self.total.summary()["kl_mean"]

    def interval(self, seed: int = 0, draws: int = 1000) -> tuple[float, float]:
        """Bounds of the mean divergence, 95 %, by drawing sequences anew."""
        values = np.array(list(self.sequences.values()))
        rng = np.random.default_rng(seed)
        means = rng.choice(values, (draws, len(values))).mean(1)
        low, high = np.quantile(means, (0.025, 0.975))
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        low, high = self.interval()
        return {
            "all": {**self.total.summary(), "kl_low": low, "kl_high": high},
            "by_masks": {f"{share:g}": one.summary() for share, one in self.shares.items()},
            "by_block": {str(end): one.summary() for end, one in sorted(self.buckets.items())},
            "state_error": {str(block): error for block, error in sorted(self.state.items())},
        }


def compare(
    bundle: Bundle,
    reference: Opens,
    candidate: Opens,
    records: Sequence[Record],
    policy: Policy,
    *,
    batch: int = 4,
    state_at: Iterable[int] = (),
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Drive two models along the same sequences and compare their scores of masked tokens.

    Args:
        bundle: Of the reference.
        reference: Opens what is right.
        candidate: Opens what is judged.
        records: Sequences of whole blocks.
        policy: Which passes.
        batch: Sequences that run together.
        state_at: Committed blocks at which the states are compared.
        progress: Told how far it is.

    Raises:
        CalibrationError: ``NONFINITE``, where either gives a score that is no number, or
            ``CONSTANT`` where the candidate gives the same scores whatever it is given.
    """
    ordered = longest_first(records)
    slots = min(batch, len(ordered))
    judge = _Judge([reference(slots), candidate(slots)], set(state_at))
    for start in range(0, len(ordered), batch):
        if progress is not None:
            progress(f"sequence {start + 1} of {len(ordered)}")
        judge.rows = ordered[start : start + batch]
        Trajectory(bundle.spec, policy, judge.rows, bundle.decode.prefill_blocks).drive(
            judge.engines, behind=judge.denoised, committed=judge.committed
        )
    return judge.verdict()


@dataclass(slots=True)
class _Judge:
    """Two engines on their way, the reference first, and what was found so far."""

    engines: list[StatefulEngine]
    state_at: set[int]
    rows: Sequence[Record] = ()
    found: Comparison = field(default_factory=Comparison)
    sequences: dict[str, list[Array]] = field(default_factory=dict)
    is_constant: bool = True

    def denoised(self, one: Pass, given: list[Array]) -> None:
        """Compare the scores of the masked slots of a pass."""
        for side, scores in zip(("reference", "candidate"), given, strict=True):
            if not np.isfinite(scores).all():
                raise CalibrationError(
                    "NONFINITE",
                    f"the {side} gives scores that are no numbers (block {one.block}, "
                    f"{one.share:g} masked): compare it with a sound model",
                )
        self.is_constant = self.is_constant and float(np.ptp(given[1])) == 0.0
        bucket = next((edge for edge in BUCKETS if one.block < edge), BUCKETS[-1])
        for place, row in enumerate(one.rows):
            masked = one.masked[place]
            tokens = Tokens()
            tokens.add(given[0][place][masked], given[1][place][masked], one.tokens[place][masked])
            self.found.shares.setdefault(one.share, Tokens()).extend(tokens)
            self.found.buckets.setdefault(bucket, Tokens()).extend(tokens)
            self.sequences.setdefault(self.rows[row].id, []).extend(tokens.kl)

    def committed(self, block: int, rows: tuple[int, ...]) -> None:
        """Compare the states behind a block."""
        if block + 1 in self.state_at:
            worst = max(
                state_error(*(decoded(one.state, one.read(row), one.spec) for one in self.engines))
                for row in rows
            )
            self.found.state[block + 1] = max(worst, self.found.state.get(block + 1, 0.0))

    def verdict(self) -> Comparison:
        """All that was found."""
        if self.is_constant:
            raise CalibrationError(
                "CONSTANT",
                "the candidate gives one score for every token of every block: it computes "
                "nothing; build it again, and report this model",
            )
        for name, kl in self.sequences.items():
            self.found.sequences[name] = float(np.concatenate(kl).mean())
        return self.found


def state_error(reference: Mapping[str, Array], candidate: Mapping[str, Array]) -> float:
    """Largest relative error of any port of a scan state: norm of the difference over the norm."""
    worst = 0.0
    for name, right in reference.items():
        if not name.startswith("ssm_state"):
            continue
        wide = right.astype(np.float64)
        norm = float(np.linalg.norm(wide))
        off = float(np.linalg.norm(candidate[name].astype(np.float64) - wide))
        worst = max(worst, off / norm if norm else float(off > 0.0))
    return worst
