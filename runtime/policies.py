"""Which open slots of a block a pass fills: pure functions, vectorised over rows.

Steps are per block: S passes at most, the last of which fills every slot that is still open, so
more steps than slots are harmless. A monotone policy fills at least one open slot per pass and
never touches a filled one. Ties go to the lowest position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from fixedstate.errors import UsageError
from fixedstate.ports import Array
from fixedstate.runtime.sampling import Scores


@dataclass(frozen=True, slots=True)
class PassView:
    """What a policy sees of some rows in one pass.

    Attributes:
        canvas: (k, L) int64, the mask id where a slot is open.
        mask_id: The mask id.
        scores: Chosen tokens and confidences of the open slots.
        step: (k,) int64, the pass inside the block, from 0.
        v: (k, L) float64 in (0, 1), for policies that take positions at random; else None.
        logits: (k, L, V) float32 of every slot, for a policy that needs ``logits``; else None.
        state: What the policy itself returned for these rows last time; None at a block's start.
    """

    canvas: Array
    mask_id: int
    scores: Scores
    step: Array
    v: Array | None = None
    state: Any = None
    logits: Array | None = None

    @property
    def open(self) -> Array:
        """(k, L) bool: the slots not filled yet."""
        return np.asarray(self.canvas == self.mask_id)

    def fill(self, accept: Array) -> Array:
        """The canvas with the chosen tokens in the accepted slots."""
        return np.where(accept, self.scores.tokens, self.canvas)


@dataclass(frozen=True, slots=True)
class Reveal:
    """What a policy decided.

    Attributes:
        canvas: (k, L) int64, the new canvas.
        forced: (k,) int64, slots filled by the step cap although the rule alone would not.
        state: Handed back in the next pass of the same block.
    """

    canvas: Array
    forced: Array
    state: Any = None


class Policy(Protocol):
    """A rule for filling slots; a frozen value, so equal policies of many rows run as one.

    Attributes:
        monotone: Whether it fills a slot in every pass and never touches a filled one.
        needs: What it reads of a pass, one of :data:`fixedstate.state.HEADS`: tokens and
            ``confidence``; these and ``entropy``; these and ``top_k``; or all ``logits``.
    """

    monotone: ClassVar[bool]
    needs: ClassVar[str]

    @property
    def steps(self) -> int:
        """S: passes per block at most."""
        ...

    def reveal(self, view: PassView) -> Reveal:
        """The canvas after this pass."""
        ...


def quota(open_slots: Array, steps_left: Array) -> Array:
    """Slots to fill now so that the rest is spread evenly over the passes left.

    From n open slots and S passes this gives n // S per pass and one more in the first n % S.

    Example:
        >>> left, counts = 8, []
        >>> for step in range(3):
        ...     counts.append(int(quota(np.array([left]), np.array([3 - step]))[0]))
        ...     left -= counts[-1]
        >>> counts
        [3, 3, 2]
    """
    out: Array = -(-open_slots // np.maximum(steps_left, 1))
    return out


def ranks(confidence: Array) -> Array:
    """(k, L) int64: 0 for the most confident slot of each row; ties in order of position."""
    order = np.argsort(-confidence, axis=1, kind="stable")
    out = np.empty_like(order)
    np.put_along_axis(out, order, np.arange(order.shape[1])[None, :], axis=1)
    return out


@dataclass(frozen=True, slots=True)
class FixedQuota:
    """Low-confidence remasking: each pass fills its share of slots, the surest first."""

    steps: int

    monotone: ClassVar[bool] = True
    needs: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def reveal(self, view: PassView) -> Reveal:
        """Fill the surest slots, as many as the quota of this pass says."""
        open_slots = view.open
        count = quota(open_slots.sum(axis=1), self.steps - view.step)
        accept = open_slots & (ranks(view.scores.confidence) < count[:, None])
        return Reveal(view.fill(accept), np.zeros(len(accept), np.int64))


@dataclass(frozen=True, slots=True)
class Threshold:
    """Confidence threshold: the surest slot always, every other one iff confidence >= threshold.

    The pass with number S fills whatever is open; slots that it fills below the threshold, other
    than the surest, are counted as forced.
    """

    threshold: float
    steps: int

    monotone: ClassVar[bool] = True
    needs: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold must be between 0 and 1; got {self.threshold}")

    def reveal(self, view: PassView) -> Reveal:
        """Fill every slot the rule allows, or all in the last pass."""
        open_slots = view.open
        confidence = view.scores.confidence
        sure = open_slots & ((confidence >= self.threshold) | (ranks(confidence) == 0))
        last = view.step >= self.steps - 1
        accept = np.where(last[:, None], open_slots, sure)
        return Reveal(view.fill(accept), (accept & ~sure).sum(axis=1))


def check_steps(steps: int) -> None:
    """Refuse a number of passes per block below 1."""
    if steps < 1:
        raise UsageError(
            f"steps must be a whole number of passes per block, 1 or more; got {steps}"
        )
