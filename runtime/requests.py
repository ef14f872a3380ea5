"""What is asked of a decoder and what it answers: plain values, checked where they are born."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import CapacityError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.policies import FixedQuota, Policy, Threshold
from fixedstate.runtime.sampling import serves
from fixedstate.spec import ModelSpec

if TYPE_CHECKING:
    from fixedstate.runtime.snapshot import Snapshot

FINISH_REASONS = ("stop", "length", "cancelled", "error")
PHASES = ("load", "prefill", "denoise", "policy", "commit", "total")


@dataclass(frozen=True, slots=True)
class Settings:
    """How one request is decoded; None takes the bundle's default.

    Attributes:
        max_new_tokens: Tokens that come back at most. The last block may hold more slots; those
            beyond this number are denoised with it and not returned.
        min_new_tokens: No stop id stands in the first that many new positions.
        steps: S, denoise passes per block at most (not in total); None in the bundle too means
            one pass per slot.
        threshold: Confidence at which a slot is filled early; None in the bundle too means the
            fixed quota.
        temperature: 0 for the most likely token.
        seed: Of this request alone, 0 to 2**64 - 1.
        stop_ids: Ids that end the answer; the first one is its last id.
        policy: A rule of your own for filling slots, instead of steps and threshold.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    steps: int | None = None
    threshold: float | None = None
    temperature: float | None = None
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        new = _whole(self.max_new_tokens, "max_new_tokens", 1)
        if _whole(self.min_new_tokens, "min_new_tokens", 0) > new:
            raise UsageError(
                f"min_new_tokens {self.min_new_tokens} must not exceed max_new_tokens {new}"
            )
        if self.steps is not None:
            _whole(self.steps, "steps", 1)
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold must be between 0 and 1; got {self.threshold}")
        if self.temperature is not None:
            _temperature(self.temperature)
        if _whole(self.seed, "seed", 0) >= 2**64:
            raise UsageError(f"seed must be below 2**64; got {self.seed}")
        if self.policy is not None and (self.steps, self.threshold) != (None, None):
            raise UsageError("give a policy, or steps and threshold: a policy has its own")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt (any length, 0 included) and how to go on from it.

    Attributes:
        prompt_ids: Token ids.
        settings: How it is decoded.
        prefix: A saved state that the prompt goes on from; it is read, so many requests may
            share one.
        keep_state: Whether the result holds the state at the end of the answer.
        keep_tokens: False for answers without end: their tokens come with the block events and
            are not kept for the result.
    """

    prompt_ids: Sequence[int] | Array
    settings: Settings = field(default_factory=Settings)
    prefix: Snapshot | None = None
    keep_state: bool = False
    keep_tokens: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, those of the saved state among them."""
        before = 0 if self.prefix is None else self.prefix.past_length + len(self.prefix.pending)
        return before + len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Rules:
    """A request's settings with every default filled in."""

    policy: Policy
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A finished block of one request.

    Attributes:
        row: Index of the request.
        block: Index of the generated block, from 0.
        token_ids: The new tokens, cut at the first stop id and at the limit.
        finish_reason: Why the request ended with this block; None where it goes on.
    """

    row: int
    block: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class PassEvent:
    """The canvases after one denoise pass, for a live view.

    Attributes:
        rows: Indices of the requests in this pass.
        canvases: (k, L) int64, the mask id where a slot is open; a copy.
        blocks: Index of the generated block of each, from 0.
        steps: The pass inside its block, from 0.
        past_lengths: Committed tokens of each.
    """

    rows: tuple[int, ...]
    canvases: Array
    blocks: tuple[int, ...]
    steps: tuple[int, ...]
    past_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one request.

    Attributes:
        token_ids: The new tokens; a stop id that ended the answer is the last of them. Empty
            where the request did not keep them.
        new_tokens: How many new tokens there were.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        error: What went wrong, where the reason is ``error``.
        blocks: Generated blocks, the last, shorter one included.
        denoise_passes: Passes this request took part in.
        forced_slots: Slots filled below the threshold because the steps were used up.
        state_bytes: Bytes of this row's constant-size state.
        kv_bytes: Bytes of keys and values of this row's committed tokens.
        seconds: By phase, of the passes this request took part in (shared with the other rows
            of those passes). ``total`` is from the start of the call to this request's end, the
            rest of the loop included and ``load`` left out. A pass that also commits the block
            before counts as ``denoise``.
        provider: What the passes really ran on.
        state: The state behind the answer, where the request asked to keep it.
    """

    token_ids: tuple[int, ...]
    new_tokens: int
    finish_reason: str
    error: str | None
    blocks: int
    denoise_passes: int
    forced_slots: int
    state_bytes: int
    kv_bytes: int
    seconds: dict[str, float]
    provider: str
    state: Snapshot | None = field(default=None, repr=False)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per denoise pass; 0 before the first pass."""
        return self.new_tokens / self.denoise_passes if self.denoise_passes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "token_ids": list(self.token_ids),
            "new_tokens": self.new_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "blocks": self.blocks,
            "denoise_passes": self.denoise_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "forced_slots": self.forced_slots,
            "state_bytes": self.state_bytes,
            "kv_bytes": self.kv_bytes,
            "seconds": dict(self.seconds),
            "provider": self.provider,
        }


def check_decodable(spec: ModelSpec) -> None:
    """Refuse to decode with a model that fills no masks.

    Raises:
        UsageError: with the reason.
    """
    if spec.objective == "causal":
        raise UsageError(
            "this model is autoregressive (objective 'causal', no mask id): it can be checked, "
            "not decoded block by block; export it with --mask-id if it was trained with a mask"
        )
    if spec.mask_id is None:
        raise UsageError(
            f"this model (objective {spec.objective!r}) has no mask id, so there is nothing to "
            "denoise: export it with --mask-id"
        )


def resolve_settings(settings: Settings, spec: ModelSpec, defaults: DecodeDefaults) -> Rules:
    """Fill in the bundle's defaults and check the ids against the model.

    Raises:
        UsageError: for a stop id that is no token of the vocabulary, or is the mask.
    """
    steps = settings.steps if settings.steps is not None else defaults.steps
    steps = steps if steps is not None else spec.block_len
    threshold = settings.threshold if settings.threshold is not None else defaults.threshold
    heat = settings.temperature if settings.temperature is not None else defaults.temperature
    stop_ids = spec.stop_ids if settings.stop_ids is None else settings.stop_ids
    policy = settings.policy
    if policy is None:
        policy = FixedQuota(steps) if threshold is None else Threshold(float(threshold), steps)
    return Rules(
        policy=policy,
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens,
        temperature=_temperature(heat),
        seed=settings.seed,
        stop_ids=tuple(int(token) for token in check_tokens(stop_ids, spec, "stop ids")),
    )


def check_head(head: str, rules: Rules) -> None:
    """Refuse a request that needs more of a pass than the loaded graphs give.

    Raises:
        UsageError: naming what it needs.
    """
    if head == "logits":
        return
    what = ""
    if rules.temperature > 0:
        what = f"temperature {rules.temperature:g} draws from all scores"
    elif rules.min_new_tokens > 0 and rules.stop_ids:
        what = f"min_new_tokens {rules.min_new_tokens} takes stop ids out of all scores"
    elif not serves(head, rules.policy.needs):
        what = f"{rules.policy} needs {rules.policy.needs}"
    if what:
        raise UsageError(
            f"{what}, but the loaded graphs give {head} only: load the bundle without a head"
        )


def check_tokens(ids: Sequence[int] | Array, spec: ModelSpec, what: str) -> Array:
    """The ids as an int64 array, each a token of the vocabulary and none the mask.

    Args:
        ids: Any sequence of ints or integer array of one dimension.
        spec: The model.
        what: The name of the ids in the message.

    Raises:
        UsageError: naming the first id that is not allowed.
    """
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(f"{what} must be a flat list of whole numbers; got {_short(ids)}")
    wrong = np.flatnonzero((array < 0) | (array >= spec.vocab_size))
    if wrong.size:
        raise UsageError(
            f"{what}: id {array[wrong[0]]} at place {wrong[0]} is outside the vocabulary "
            f"0..{spec.vocab_size - 1}"
        )
    masks = np.flatnonzero(array == spec.mask_id)
    if spec.mask_id is not None and masks.size:
        raise UsageError(f"{what}: id {spec.mask_id} at place {masks[0]} is the mask, not a token")
    return np.ascontiguousarray(array, np.int64)


def check_prompt(prompt_len: int, spec: ModelSpec, what: str) -> None:
    """Refuse an empty prompt where nothing predicts the first position.

    Raises:
        UsageError: naming an id to begin with, where the model has one.
    """
    if spec.logit_shift and not prompt_len:
        begin = "" if spec.bos_id is None else f", such as its begin id {spec.bos_id}"
        raise UsageError(
            f"{what} are empty, but this model predicts the next position (logit_shift): nothing "
            f"predicts the first one; give at least one token{begin}"
        )


def check_room(
    prompt_len: int,
    max_new_tokens: int,
    block_len: int,
    limit: int | None,
    *,
    whole_blocks: bool = True,
) -> int:
    """Tokens a request can come to, or a refusal where they pass the context limit.

    Args:
        prompt_len: Tokens before the first new one, a saved prefix included.
        max_new_tokens: New tokens at most.
        block_len: L.
        limit: Tokens at most; None for no limit.
        whole_blocks: Whether blocks are cut from token 0; else they begin behind the prompt.

    Raises:
        CapacityError: with the numbers, block rounding included.
    """
    if whole_blocks:
        blocks = math.ceil((prompt_len + max_new_tokens) / block_len)
        room = blocks * block_len
        what = f"take {blocks} blocks of {block_len} = {room} tokens"
    else:
        blocks = math.ceil(max_new_tokens / block_len)
        room = prompt_len + blocks * block_len
        what = f"({blocks} blocks of {block_len}) take {room} tokens"
    if limit is not None and room > limit:
        raise CapacityError(
            f"prompt {prompt_len} + {max_new_tokens} new tokens {what}; the limit is {limit}: "
            "ask for fewer new tokens, shorten the prompt or raise the limit"
        )
    return room


def _whole(value: int, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise UsageError(f"{name} must be a whole number, {least} or more; got {value!r}")
    return number


def _temperature(value: float) -> float:
    if not 0 <= value < math.inf:
        raise UsageError(f"temperature must be 0 or more and finite; got {value}")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
