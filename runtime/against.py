"""Two engines of one model beside one another, along the trajectories that decoding takes.

Law 5 of :mod:`fixedstate.runtime.laws` for any two back ends: the decode loop itself drives both.
It sees what the reference gives, so both sides get the same canvases and the same commits, pass by
pass, and every difference is the candidate's own. Then each side decodes the same prompts alone.

Models of objective ``full`` carry nothing: their passes are compared on sequences as short, usual
and long as an engine was built for.

An absolute and a relative error are judged, by the table of :mod:`fixedstate.runtime.compare`. The
cosine is reported and decides nothing: it cannot see a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from fixedstate.bundle import Bundle, DecodeDefaults
from fixedstate.errors import CapacityError, DecodeError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.compare import (
    NOT_FINITE,
    TOLERANCES,
    PortDifference,
    Tolerance,
    coarsest,
    decoded,
    spread_difference,
)
from fixedstate.runtime.engine import HeadEngine, ReadableEngine
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.identity import listed, other_model, short
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import Request, Settings, check_decodable
from fixedstate.runtime.snapshot import stateful
from fixedstate.spec import ModelSpec
from fixedstate.state import HEADS, StateSpec, split_role

Comparable = ReadableEngine | FullEngine
"""What is compared: passes over a state that can be looked at, or over whole sequences."""

MARGIN = 0.1
"""Gap between a slot's two best scores above which both sides should choose the same token."""

SLOTS = 3
"""Rows that decode together, or as many as an engine takes."""

GENERATIONS = 2
"""How often all requests are decoded, on the same slots."""

PREFILL_BLOCKS = 2
"""Blocks of a prompt that are committed at once: longer prompts come in slices."""

# Per request: whole blocks of its prompt and of its answer, denoise passes of a block at most. With
# passes of other numbers rows finish their blocks now together and now apart.
_SIZES = ((3, 2, 4), (0, 3, 3), (1, 2, 2), (2, 2, 4))
_QUICK = ((3, 1, 2), (0, 2, 2))
# The same of a model that sees the whole sequence: which of three lengths (the shortest, the usual
# one, the longest, which may be thousands of tokens), blocks of its answer, passes of a block.
_WHOLE = ((1, 3, 2), (1, 2, 4), (0, 2, 3), (2, 1, 1))
_WHOLE_QUICK = ((1, 1, 2), (0, 1, 2), (2, 1, 1))
_WHOLE_BLOCKS = (2, 4, 6)  # those lengths where a graph takes any


# --- what is said --------------------------------------------------------------------------------


@dataclass(slots=True)
class PortRecord:
    """All comparisons of one port.

    Attributes:
        name: ``logits``, ``last_logits``, or the suffix of a carried tensor.
        layer: Of a carried tensor; else None.
        compared: How often.
        max_abs: Largest difference.
        max_rel: Largest difference as a share of the deviation of the reference, at its worst.
        rms_rel: Root mean square of the difference as such a share, at its worst.
        cosine: Of the angle between both sides, at its worst; 1 where both are zero, NaN of what a
            reduced head gives, which is compared by probabilities.
        where: Of the worst one.
        failed: How many were beyond the tolerance, or no numbers.
    """

    name: str
    layer: int | None
    compared: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    rms_rel: float = 0.0
    cosine: float = 1.0
    where: str = ""
    failed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Choices:
    """Slots at which both sides were asked for the likeliest token.

    Attributes:
        margin: Gap between a slot's two best scores above which it counts.
        slots: All of them that were open.
        sure: Those at which the reference's two best scores differ by more than the margin.
        agreed: Those of the sure ones at which the candidate's best token is the same.
    """

    margin: float = MARGIN
    slots: int = 0
    sure: int = 0
    agreed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Tokens:
    """What each side decoded on its own.

    Attributes:
        tokens: Of the reference's answers.
        equal: Those that the candidate gave at the same place.
        first: Tokens of each answer before the first that differs; its length where none does.
    """

    tokens: int
    equal: int
    first: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {"tokens": self.tokens, "equal": self.equal, "until_first": list(self.first)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict over a candidate.

    Attributes:
        reference: What the reference ran on.
        candidate: What the candidate ran on.
        tolerance: What was allowed.
        rows: That decoded together.
        passes: Denoise passes compared.
        commits: Commits compared, those inside a fused pass too.
        ports: One record per port.
        choices: Likeliest tokens along the reference's trajectory.
        tokens: What each side decoded on its own.
        head: What the candidate's passes gave, one of :data:`fixedstate.state.HEADS`.
        carries: Whether the model carries a state that commits change.
        first: The first divergence; empty where there is none.
        first_port: Its port; empty likewise.
        first_layer: Its layer; None for none, and for scores.
    """

    reference: str
    candidate: str
    tolerance: Tolerance
    rows: int
    passes: int
    commits: int
    ports: tuple[PortRecord, ...]
    choices: Choices
    tokens: Tokens
    head: str = "logits"
    carries: bool = True
    first: str = ""
    first_port: str = ""
    first_layer: int | None = None

    @property
    def passed(self) -> bool:
        """Whether something was compared and all of it was within the tolerance."""
        compared = self.passes and (self.commits or not self.carries)
        return bool(compared) and not self.first

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; numbers that have no meaning may be NaN."""
        first = {"where": self.first, "port": self.first_port, "layer": self.first_layer}
        return {
            "passed": self.passed,
            "head": self.head,
            "reference": self.reference,
            "candidate": self.candidate,
            "tolerance": self.tolerance.to_dict(),
            "rows": self.rows,
            "passes": self.passes,
            "commits": self.commits,
            "ports": [port.to_dict() for port in self.ports],
            "top1": self.choices.to_dict(),
            "tokens": self.tokens.to_dict(),
            "first_divergence": first if self.first else None,
        }


# --- numbers -------------------------------------------------------------------------------------


def cosine(a: Array, b: Array) -> float:
    """Of the angle between two arrays of one shape; 1 where both are zero, 0 where one is."""
    a, b = (side.astype(np.float64).ravel() for side in (a, b))
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if not lengths:
        return float(not a.any() and not b.any())
    return float(a @ b) / lengths


def measure(
    name: str, reference: Array | None, candidate: Array | None, tolerance: Tolerance
) -> tuple[PortDifference, float, float]:
    """How one port differs, its root mean square as a share of the deviation, and its cosine."""
    found, spread = spread_difference(name, reference, candidate, tolerance)
    if found.problem or reference is None or candidate is None:
        return found, 0.0, float("nan")
    return found, spread.rms_rel, cosine(reference, candidate) if reference.size else 1.0


class _Log:
    """Everything that was compared, in the order in which it was."""

    def __init__(self, spec: ModelSpec, tolerance: Tolerance, layers: Mapping[str, int]) -> None:
        self.spec = spec
        self.tolerance = tolerance
        self.layers = layers
        self.ports: dict[str, PortRecord] = {}
        self.choices = Choices()
        self.generation = 0
        self.passes = self.commits = 0
        self.first = self.first_port = ""

    def add(self, place: str, name: str, reference: Array | None, candidate: Array | None) -> bool:
        """Compare one port; whether both sides hold numbers."""
        return self.take(place, *measure(name, reference, candidate, self.tolerance))

    def take(self, place: str, found: PortDifference, rms_rel: float, angle: float) -> bool:
        """Take over a comparison of one port; whether both sides hold numbers."""
        name = found.name
        record = self.ports.setdefault(name, PortRecord(name, self.layers.get(name)))
        where = f"generation {self.generation}, {place}"
        # NaN is worse than any number, and stays
        worse = np.isnan(found.max_abs) or found.max_abs > record.max_abs
        if not record.where or (worse and not np.isnan(record.max_abs)):
            record.max_abs, record.where = found.max_abs, where
        record.max_rel = _worse(record.max_rel, found.max_rel)
        record.rms_rel = _worse(record.rms_rel, rms_rel)
        record.cosine = -_worse(-record.cosine, -angle)
        record.compared += 1
        record.failed += not found.passed
        if not found.passed:
            self.fail(f"{where}, {found}", name)
        return not found.problem

    def fail(self, where: str, port: str = "") -> None:
        """Note a divergence; the first one is reported."""
        if not self.first:
            self.first, self.first_port = where, port

    def choose(self, ids: Array, reference: Array, chosen: Array) -> None:
        """Compare the likeliest tokens of the open slots of one row.

        Args:
            ids: (L,) the canvas.
            reference: (L, V) scores, all of them numbers.
            chosen: (L,) the candidate's tokens.
        """
        known, mask = choosable(self.spec), ids == self.spec.mask_id
        right = reference[mask][:, known]
        if not right.size or len(known) < 2:
            return
        best = np.sort(np.partition(right, -2, axis=-1)[:, -2:], axis=-1)
        sure = best[:, 1] - best[:, 0] > self.choices.margin
        same = known[right.argmax(-1)] == chosen[mask]
        self.choices.slots += len(right)
        self.choices.sure += int(sure.sum())
        self.choices.agreed += int((sure & same).sum())


def choosable(spec: ModelSpec) -> Array:
    """Ids that a slot may be filled with: all real tokens but the mask."""
    return np.flatnonzero(np.arange(spec.vocab_size) != spec.mask_id)


def best_tokens(spec: ModelSpec, logits: Array) -> Array:
    """(L,) the likeliest id of each slot, by (L, V) scores."""
    known = choosable(spec)
    best: Array = known[logits[:, known].argmax(-1)]
    return best


def measure_head(
    spec: ModelSpec, logits: Array, given: Mapping[str, Array], tolerance: Tolerance
) -> list[PortDifference]:
    """How what a reduced head gives differs from what the scores of the reference say.

    Scores that are off by e at most change the logarithm of a probability by 2e at most. So a token
    may be another one if the reference scores it as high within that; probabilities are compared by
    their logarithms.

    Args:
        spec: The model.
        logits: (L, V) of the reference.
        given: What the head gives of all L positions of a row, by port name.
        tolerance: What scores may differ by.
    """
    known = choosable(spec)
    scores = np.full(logits.shape, -np.inf)
    scores[:, known] = logits[:, known]
    deviation = float(scores[:, known].std())
    limit = tolerance.relative * deviation
    if tolerance.absolute is not None:
        limit = min(limit, tolerance.absolute * max(1.0, deviation))
    limit = 2 * max(limit, tolerance.floor)
    shares = scores - scores.max(-1, keepdims=True)
    shares -= np.log(np.exp(shares).sum(-1, keepdims=True))
    ranked = -np.sort(-shares, -1)
    found = []

    def judge(name: str, gaps: Array, allowed: float, broken: str = NOT_FINITE) -> None:
        gap = float(np.abs(gaps).max())
        problem = "" if np.isfinite(gap) else broken
        share = gap / deviation if deviation else gap
        passed = gap <= allowed and not problem
        found.append(PortDifference(name, gap, share, deviation, passed, problem))

    for tokens, confidence in (("tokens", "confidence"), ("top_tokens", "top_confidence")):
        if tokens not in given:
            continue
        chosen = given[tokens].reshape(len(logits), -1)
        inside = np.where((chosen >= 0) & (chosen < spec.vocab_size), chosen, spec.vocab_rows)
        ends = np.concatenate([shares, np.full((len(shares), 1), -np.inf)], -1)
        right = np.take_along_axis(ends, inside, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            best = ranked[:, : chosen.shape[1]]
            judge(tokens, best - right, limit, "the candidate names ids that no slot may hold")
            odds = np.log(given[confidence].reshape(chosen.shape).astype(np.float64))
            judge(confidence, odds - right, limit)
    if "entropy" in given:
        sure = np.where(np.isfinite(shares), shares, 0.0)
        entropy = -(np.exp(shares) * sure).sum(-1)
        judge("entropy", given["entropy"] - entropy, limit * float(np.log(len(known))))
    return found


def _worse(a: float, b: float) -> float:
    """The larger one; NaN where one of them is."""
    return float(np.maximum(a, b))


# --- two engines as one --------------------------------------------------------------------------


class Pair:
    """Two engines behind the protocol of one: what the loop asks of it is asked of both.

    The answers are the reference's; the candidate's are compared with them and forgotten. Passes
    are fused where the candidate fuses them, so that it runs as it does alone. A candidate with a
    reduced head is asked for every position of the block.

    Args:
        reference: What is right.
        candidate: What is judged.
        log: Told every comparison.
    """

    head = "logits"

    def __init__(self, reference: Comparable, candidate: Comparable, log: _Log) -> None:
        self._reference, self._candidate, self._log = reference, candidate, log
        self._steps = [0] * min(reference.slots, candidate.slots)
        self.provider = f"{reference.provider} and {candidate.provider}"
        self._whole = reference.spec.objective == "full"

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._reference.spec

    @property
    def slots(self) -> int:
        """Rows that both sides have."""
        return len(self._steps)

    @property
    def limit(self) -> int | None:
        """Committed tokens per row that both sides take."""
        limits = [side.limit for side in self._sides if side.limit is not None]
        return min(limits, default=None)

    @property
    def _sides(self) -> tuple[Comparable, Comparable]:
        return self._reference, self._candidate

    @property
    def past_length(self) -> Array:
        """(slots,) int64, committed tokens per row."""
        return self._reference.past_length

    @property
    def last_logits(self) -> Array:
        """(slots, V) of the reference."""
        return self._reference.last_logits

    @property
    def fuses(self) -> bool:
        """Whether the candidate does."""
        return self._candidate.fuses

    @property
    def whole_blocks(self) -> bool:
        """Whether blocks are cut from a row's first token."""
        return self._reference.whole_blocks

    def denoise(self, ids: Array, first: int = 0) -> Array:
        """Logits of the reference, compared."""
        right = self._reference.denoise(ids, first)
        if self._candidate.head == "logits":
            self._scores(ids, first, right, {"logits": self._candidate.denoise(ids, first)})
        else:
            asks = cast(HeadEngine, self._candidate)
            self._scores(ids, first, right, asks.denoise_at(ids, self._places(len(ids)), first))
        return right

    def _places(self, rows: int) -> Array:
        return np.tile(np.arange(self.spec.block_len), (rows, 1))

    def commit(self, ids: Array, commit_length: Array, first: int = 0) -> None:
        """Commit on both sides and compare what each carries then."""
        for side in self._sides:
            side.commit(ids, commit_length, first)
        self._states(first, len(ids))

    def commit_denoise(self, ids: Array, first: int = 0) -> Array:
        """The fused pass of the candidate; a reference that has none takes two."""
        length = self.spec.block_len
        if self._reference.fuses:
            right = self._reference.commit_denoise(ids, first)
        else:
            whole = np.full(len(ids), length, np.int64)
            self._reference.commit(ids[:, :length], whole, first)
            right = self._reference.denoise(ids[:, length:], first)
        given: Mapping[str, Array]
        if self._candidate.head == "logits":
            given = {"logits": self._candidate.commit_denoise(ids, first)}
        else:
            asks = cast(HeadEngine, self._candidate)
            given = asks.commit_denoise_at(ids, self._places(len(ids)), first)
        self._states(first, len(ids))
        self._scores(ids[:, length:], first, right, given)
        return right

    def _scores(self, ids: Array, first: int, right: Array, given: Mapping[str, Array]) -> None:
        log, spec = self._log, self.spec
        log.passes += 1
        for row in range(len(ids)):
            slot = first + row
            self._steps[slot] += 1
            place = f"slot {slot}, {self._behind(slot)}, pass {self._steps[slot]}"
            if "logits" in given:
                other = given["logits"][row]
                if log.add(place, "logits", right[row], other):
                    log.choose(ids[row], right[row], best_tokens(spec, other))
                if self._whole and spec.logit_shift:  # of this pass, where others commit them
                    sides = (side.last_logits[slot] for side in self._sides)
                    log.add(place, "last_logits", *sides)
                continue
            if not np.isfinite(right[row]).all():
                log.add(place, "logits", right[row], right[row])  # which says what is wrong
                continue
            own = {name: array[row] for name, array in given.items()}
            for found in measure_head(spec, right[row], own, log.tolerance):
                log.take(place, found, 0.0, float("nan"))
            log.choose(ids[row], right[row], own["tokens"])

    def _states(self, first: int, rows: int) -> None:
        self._steps[first : first + rows] = [0] * rows
        if self._whole:
            return  # a commit runs no graph, and leaves nothing but tokens
        self._log.commits += 1
        for slot in range(first, first + rows):
            place = f"slot {slot}, {self._blocks(slot)} blocks committed"
            right, given = (_carried(cast(ReadableEngine, side), slot) for side in self._sides)
            for name in {**right, **given}:
                self._log.add(place, name, right.get(name), given.get(name))

    def _behind(self, slot: int) -> str:
        """Where a row's canvas stands, for a message; whole sequences have no grid of blocks."""
        if self._whole:
            return f"behind {self._reference.past_length[slot]} tokens"
        return f"block {self._blocks(slot)}"

    def _blocks(self, slot: int) -> int:
        """Blocks that a row has committed."""
        return int(self._reference.past_length[slot]) // self.spec.block_len

    def reset(self, row: int, room: int = 0) -> None:
        """Give a row the state it has before its first token."""
        self._steps[row] = 0
        for side in self._sides:
            side.reset(row, room)

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        self._steps[target] = self._steps[source]
        for side in self._sides:
            side.move(source, target)

    def swap(self, row: int, other: int) -> None:
        """Exchange the states of two rows."""
        steps = self._steps
        steps[row], steps[other] = steps[other], steps[row]
        for side in self._sides:
            side.swap(row, other)

    def state_bytes(self) -> int:
        """Bytes of one row's constant-size state."""
        return self._reference.state_bytes()

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of the keys and values of that many committed tokens of one row."""
        return self._reference.kv_bytes(past_length)


def _carried(engine: ReadableEngine, slot: int) -> dict[str, Array]:
    """All that a row carries, as numbers, and its length."""
    out = decoded(stateful(engine).state, engine.read(slot), engine.spec)
    if engine.spec.logit_shift:
        out["last_logits"] = engine.last_logits[slot].copy()
    out["past_length"] = np.array([engine.past_length[slot]])
    return out


# --- the trial -----------------------------------------------------------------------------------


def compare_engines(
    reference: Comparable,
    candidate: Comparable,
    tolerance: Tolerance,
    *,
    quick: bool = False,
    seed: int = 0,
    defaults: DecodeDefaults | None = None,
    lengths: tuple[int, int, int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Drive two engines along the same trajectories and compare all that they give and carry.

    More requests than slots are decoded, twice on the same slots: prompts that are prefilled in
    slices, empty ones and some that end inside a block, answers of several blocks of two to four
    passes each. Compared are the logits of every denoise pass, or what a reduced head makes of
    them, and every carried tensor of every row after each commit; then each side decodes the same
    requests alone.

    Of a model of objective ``full`` the scores of every pass are compared, on sequences of several
    lengths, two of one length together; there is nothing else.

    Args:
        reference: What is right; it gives all scores.
        candidate: What is judged; slots, limit and head may be other ones.
        tolerance: What may differ.
        quick: Two short requests only.
        seed: Of the prompts.
        defaults: How the model decodes; its threshold is used.
        lengths: Of a model of objective ``full``, the fewest, usual and most tokens of a sequence;
            two, four and six blocks where none are given.
        progress: Told what is done.

    Returns:
        What was found; :attr:`Comparison.passed` is the verdict.

    Raises:
        UsageError: for two models, or one that cannot be decoded.
        CapacityError: where a block does not fit an engine.
        BackendError: where an engine fails.
    """
    say = progress or (lambda _: None)
    if reference.spec != candidate.spec:
        raise UsageError("reference and candidate are of two models: give engines of one model")
    if reference.head != "logits":
        raise UsageError(
            f"the reference gives {reference.head}, not all scores: open it without a head"
        )
    spec = reference.spec
    check_decodable(spec)
    whole = spec.objective == "full"
    layers = {port.suffix: port.layer for port in StateSpec.of(spec).committed}
    log = _Log(spec, tolerance, layers)
    pair = Pair(reference, candidate, log)
    how = replace(defaults or DecodeDefaults(), prefill_blocks=PREFILL_BLOCKS)
    if whole:
        sequences = lengths or tuple(blocks * spec.block_len for blocks in _WHOLE_BLOCKS)
        sizes = _WHOLE_QUICK if quick else _WHOLE
        requests = _whole_requests(spec, pair.limit, sequences, sizes, seed)
    else:
        requests = _requests(spec, pair.limit, _QUICK if quick else _SIZES, seed)
    for log.generation in range(1, GENERATIONS + 1):
        say(f"comparing along trajectories ({log.generation} of {GENERATIONS})")
        _decode(pair, requests, how)
    say("decoding with each alone")
    right = _decode(reference, requests, how)
    try:
        given = _decode(candidate, requests, how)
    except (DecodeError, UsageError) as err:  # what it names is no token
        log.fail(f"decoding alone: {err}")
        given = [()] * len(right)
    tokens = _agreement(right, given)
    return Comparison(
        reference=reference.provider,
        candidate=candidate.provider,
        tolerance=tolerance,
        rows=pair.slots,
        passes=log.passes,
        commits=log.commits,
        ports=tuple(log.ports.values()),
        choices=log.choices,
        tokens=tokens,
        head=candidate.head,
        carries=not whole,
        first=log.first,
        first_port=log.first_port,
        first_layer=layers.get(log.first_port),
    )


def _requests(
    spec: ModelSpec, limit: int | None, sizes: Sequence[tuple[int, int, int]], seed: int
) -> list[Request]:
    """Prompts of real ids and greedy settings, as long as there is room for.

    Raises:
        CapacityError: where there is none for a block.
    """
    length, rng, known = spec.block_len, np.random.default_rng(seed), choosable(spec)
    room = (
        limit // length if limit is not None else max(before + after for before, after, _ in sizes)
    )
    if room < 1:
        raise CapacityError(
            f"a row takes {limit} tokens and a block has {length}: build it with more --capacity"
        )
    made = []
    for index, (before, after, passes) in enumerate(sizes):
        new = min(after, room)
        whole = min(before, room - new)
        # where each token is predicted by the one before it, something has to come first
        rest = length // 2 if before else int(spec.logit_shift)
        ids = rng.choice(known, whole * length + rest)
        count = max(1, new * length - rest)  # up to the end of a block
        steps = min(passes, length)
        settings = Settings(count, steps=steps, temperature=0, seed=index, stop_ids=())
        made.append(Request(ids, settings))
    return made


def _whole_requests(
    spec: ModelSpec,
    limit: int | None,
    lengths: Sequence[int],
    sizes: Sequence[tuple[int, int, int]],
    seed: int,
) -> list[Request]:
    """The same for whole sequences, each as long as one of the lengths says.

    Raises:
        CapacityError: where the longest has no room for a block.
    """
    length, rng, known = spec.block_len, np.random.default_rng(seed), choosable(spec)
    # where each token is predicted by the one before it, something has to come first
    least = length + int(spec.logit_shift)
    most = lengths[-1] if limit is None else min(limit, lengths[-1])
    if most < least:
        raise CapacityError(
            f"a row takes {most} tokens and a block needs {least}: build it with more --capacity"
        )
    made = []
    for index, (which, blocks, passes) in enumerate(sizes):
        tokens = min(max(lengths[which], least), most)
        new = min(blocks, (tokens + length - least) // length) * length
        ids = rng.choice(known, tokens - new)
        settings = Settings(new, steps=min(passes, length), temperature=0, seed=index, stop_ids=())
        made.append(Request(ids, settings))
    return made


def _decode(
    engine: Any, requests: Sequence[Request], defaults: DecodeDefaults
) -> list[tuple[int, ...]]:
    """The tokens of every answer; one that went wrong is shorter."""
    stream = Stream(engine, requests, defaults)
    for _ in stream:
        pass
    return [tuple(result.token_ids) for result in stream.results]


def _agreement(reference: Sequence[Sequence[int]], candidate: Sequence[Sequence[int]]) -> Tokens:
    equal, first = 0, []
    for right, given in zip(reference, candidate, strict=True):
        same = [a == b for a, b in zip(right, given, strict=False)]
        equal += sum(same)
        first.append(same.index(False) if False in same else len(same))
    return Tokens(sum(map(len, reference)), equal, tuple(first))


# --- what is compared with what ------------------------------------------------------------------


def other_bundle(bundle: Bundle, other: Bundle) -> str | None:
    """Why two bundles are not of one model, both sides named; None where they are.

    Weights may be stored in another precision, and graphs may be others: then the checkpoint's
    files have to be the same.
    """
    if bundle.spec != other.spec:
        return (
            f"{other.path} is of another model than {bundle.path}: give an engine or a bundle of "
            "the same model"
        )
    if bundle.weights == other.weights:
        return None
    ours, theirs = bundle.source.files, other.source.files
    wrong = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    if wrong or not ours:
        what = (
            f"their checkpoints differ in {', '.join(wrong)}"
            if wrong
            else ("neither says of which checkpoint it is")
        )
        return (
            f"{other.path} has weights {short(other.weights)}, {bundle.path} has "
            f"{short(bundle.weights)}, and {what}: give one that was exported from the same "
            "checkpoint"
        )
    return None


def require_same_model(bundle: Bundle, candidate: EngineFolder | Bundle) -> None:
    """Refuse an engine or a bundle of another model.

    Raises:
        UsageError: with both sides and what to do.
    """
    if isinstance(candidate, Bundle):
        reason = other_bundle(bundle, candidate)
    else:
        reason = other_model(candidate.identity, bundle)
    if reason is not None:
        raise UsageError(reason)


def tolerance_between(
    bundle: Bundle, candidate: EngineFolder | Bundle, chosen: float | None = None
) -> Tolerance:
    """The tolerance of the coarser of two precisions.

    Args:
        bundle: The reference.
        candidate: What is judged.
        chosen: Share of a port's deviation that may differ instead of the table's, and, where the
            table has an absolute bound, that bound too; recorded as an override.
    """
    sides = (bundle, candidate)
    quantized = any(isinstance(side, Bundle) and side.is_quantized for side in sides)
    name = coarsest(bundle.precision, candidate.precision, quantized=quantized)
    if chosen is None:
        return Tolerance.of(name)
    bounded = TOLERANCES[name].absolute is not None
    return Tolerance.of(name, absolute=chosen if bounded else None, relative=chosen)


def most_rows(engine: EngineFolder) -> int:
    """Rows that every plan of an engine takes."""
    profiles = [profile for plan in engine.plans.values() for profile in plan.profiles]
    return min((profile["input_ids"][2][0] for profile in profiles), default=1)


def whole_lengths(engine: EngineFolder) -> tuple[int, int, int]:
    """Fewest, usual and most tokens of a sequence of an engine of objective ``full``."""
    levels = [
        [shape[1] for shape in profile["input_ids"]] for profile in engine.plan("full").profiles
    ]
    shortest, usual, longest = zip(*levels, strict=True)
    return min(shortest), usual[0], max(longest)


def compare_bundles(
    bundle: Bundle,
    candidate: EngineFolder | Bundle,
    tolerance: Tolerance,
    *,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[Comparison, ...]:
    """Run a bundle on ONNX Runtime and an engine, or another bundle, beside it.

    Args:
        bundle: The reference; its graphs run on the CPU with one thread.
        candidate: An engine, which runs on the first card, or a bundle, which runs like the first.
        tolerance: What may differ.
        quick: See :func:`compare_engines`.
        progress: See :func:`compare_engines`.

    Returns:
        One comparison for each head that the candidate has: all scores first, where it gives them,
        then short ones of its reduced heads.

    Raises:
        UsageError: for two models, or one that cannot be decoded.
        BackendError, CapacityError: where one of them cannot run.
    """
    require_same_model(bundle, candidate)
    found: list[Comparison] = []
    for head in _heads(candidate):
        short_one = quick or bool(found)
        found.append(_compare_head(bundle, candidate, tolerance, head, short_one, progress))
    return tuple(found)


def _heads(candidate: EngineFolder | Bundle) -> list[str]:
    """What passes of a candidate can give, all scores first.

    Raises:
        UsageError: where no pass gives anything.
    """
    roles = candidate.graphs if isinstance(candidate, Bundle) else candidate.plans
    split = [split_role(role) for role in roles]
    has = {head for role, head in split if role in ("denoise", "commit_denoise", "full")}
    if not has:
        raise UsageError(
            f"{candidate.path} has {listed(roles)}, none of which denoises: build it with the role "
            "denoise or commit_denoise too"
        )
    return [head for head in HEADS if head in has]


def _compare_head(
    bundle: Bundle,
    candidate: EngineFolder | Bundle,
    tolerance: Tolerance,
    head: str,
    quick: bool,
    progress: Callable[[str], None] | None,
) -> Comparison:
    from fixedstate.runtime import decoder, trt

    whole = bundle.spec.objective == "full"
    with ExitStack() as stack:
        other: Any
        if isinstance(candidate, Bundle) and whole:
            other = decoder.open_full(candidate, threads=1, slots=SLOTS)
        elif isinstance(candidate, Bundle):
            other = decoder.open_engine(candidate, threads=1, slots=SLOTS, head=head)
        else:
            other = trt.open_engine(candidate, slots=min(SLOTS, most_rows(candidate)), head=head)
            stack.callback(other.close)
        opens: Any = decoder.open_full if whole else decoder.open_engine
        reference = opens(bundle, threads=1, slots=other.slots, limit=other.limit)
        lengths = None
        if whole and isinstance(candidate, EngineFolder):
            lengths = whole_lengths(candidate)
        return compare_engines(
            reference,
            other,
            tolerance,
            quick=quick,
            defaults=bundle.decode,
            lengths=lengths,
            progress=progress,
        )
