"""A recording, repeated: the same bytes again, or the first thing that differs.

Every request is repeated alone, from its beginning or from a saved state. Each pass is given the
recorded canvas and each commit the recorded tokens, so what differs once does not hide what comes
after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from fixedstate.bundle import Bundle
from fixedstate.errors import StateError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.compare import Tolerance, coarsest, compare, decoded
from fixedstate.runtime.engine import Engine, SessionEngine
from fixedstate.runtime.full import FullEngine
from fixedstate.runtime.policies import PassView, Policy
from fixedstate.runtime.recorder import VisibleEngine, cores, versions
from fixedstate.runtime.recording import (
    HASH,
    Begun,
    Commit,
    Event,
    Header,
    Pass,
    Recording,
    SavedState,
    hash_array,
    hash_policy,
    hash_ports,
    hash_scores,
    model_hash,
    policy_from_dict,
)
from fixedstate.runtime.sampling import Scorer, uniforms
from fixedstate.runtime.snapshot import stateful

COMPARED = ("bytes", "numbers")
"""How a replay is compared: every hash, or chosen tokens and saved states within the tolerance."""

_NAMED = 8  # slots that a text names at most
_NO_PORT = (
    "; every port is equal at the next commit, so the cause lies behind the last state: in what "
    "comes after it in its layer, in later layers or in the head"
)
_THREADS = (
    "several rows were recorded together with more than one thread, where a row alone need not "
    "have the same bytes: compare numbers, or record with one thread"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing of a request that is not as it was recorded.

    Attributes:
        request: Which, in the order they began.
        number: Cell of the event.
        block: Of the answer; for a commit the number of blocks finished by then.
        step: The pass inside the block; None for a commit or a saved state.
        past_length: Committed tokens before it.
        what: ``logits``, ``choice``, ``policy state``, ``seed``, ``canvas``, ``tokens``, ``state``,
            ``last_logits`` or ``saved state``.
        text: The same in words.
        layer: Of the first port that differs.
        port: Its suffix.
        behind: For logits: what differs at the next commit.
    """

    request: int
    number: int
    block: int
    step: int | None
    past_length: int
    what: str
    text: str
    layer: int | None = None
    port: str | None = None
    behind: Difference | None = None

    def __str__(self) -> str:
        """One line for a report."""
        place = f"request {self.request}, block {self.block}"
        if self.step is not None:
            place += f", pass {self.step}"
        elif self.what != "saved state":
            place = f"request {self.request}, the commit behind {self.past_length} tokens"
        return f"{place}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return {**out, "behind": None if self.behind is None else self.behind.to_dict()}


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of one request.

    Attributes:
        request: Which, in the order they began.
        start: Where it was repeated from; empty where it could not be.
        passes: Passes that were compared.
        commits: Commits that were compared.
        states: Saved states that were compared.
        difference: The first one; None where there is none.
        note: Why it was not repeated, or what was not compared.
    """

    request: int
    start: str
    passes: int = 0
    commits: int = 0
    states: int = 0
    difference: Difference | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return {**out, "difference": self.difference.to_dict() if self.difference else None}


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a replay.

    Attributes:
        compared: One of :data:`COMPARED`.
        reasons: Why bytes cannot be compared; what else is not as it was recorded.
        requests: In order.
    """

    compared: str
    reasons: tuple[str, ...]
    requests: tuple[Replayed, ...]

    @property
    def difference(self) -> Difference | None:
        """The one that was recorded first."""
        found = [each.difference for each in self.requests if each.difference is not None]
        return min(found, key=lambda difference: difference.number, default=None)

    @property
    def passed(self) -> bool:
        """Whether something was repeated and nothing differs."""
        return any(each.start for each in self.requests) and self.difference is None

    def total(self, name: str) -> int:
        """All passes, commits or states that were compared."""
        return sum(getattr(each, name) for each in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "passed": self.passed,
            "compared": self.compared,
            "reasons": list(self.reasons),
            **{name: self.total(name) for name in ("passes", "commits", "states")},
            "difference": None if self.difference is None else self.difference.to_dict(),
            "requests": [each.to_dict() for each in self.requests],
        }


def replay_bundle(
    recording: Recording,
    bundle: Bundle,
    *,
    threads: int | None = None,
    provider: str | None = None,
    compared: str | None = None,
    **options: Any,
) -> Report:
    """Repeat a recording on a bundle; see :func:`replay` for `options`.

    Args:
        recording: What was recorded.
        bundle: Of the same model.
        threads: Of a pass; None for those of the recording.
        provider: None for the recording's.
        compared: One of :data:`COMPARED`; None for bytes wherever they have to be equal.
        **options: Of :func:`replay`.

    Raises:
        StateError: for a bundle of another model, or where nothing can be repeated.
        UsageError: for a setting out of range.
        BackendError: where the back end cannot do what was asked.
    """
    header = recording.header
    engine = open_engine(header, bundle, threads=threads, provider=provider)
    reasons = incomparable(header, bundle, engine.provider, threads)
    how = compared or ("numbers" if reasons else "bytes")
    if bundle.weights != header.weights:
        reasons.append("the weights are others than those that were recorded")
    report = replay(
        recording,
        engine,
        compared=how,
        reasons=reasons,
        tolerance=Tolerance.of(coarsest(bundle.precision, header.precision)),
        **options,
    )
    if how == "bytes" and report.difference and header.slots > 1 and header.threads != 1:
        return replace(report, reasons=(*report.reasons, _THREADS))
    return report


def open_engine(
    header: Header,
    bundle: Bundle,
    *,
    threads: int | None = None,
    provider: str | None = None,
) -> SessionEngine | FullEngine:
    """An engine that runs the graphs that the recorded one ran.

    Args:
        header: Of the recording.
        bundle: To run it on.
        threads: Of a pass; None for those of the recording.
        provider: None for the recording's.

    Raises:
        StateError: for a bundle of another model, or one without a graph that ran.
        BackendError: where the back end cannot do what was asked.
    """
    from fixedstate.runtime import ort

    if model_hash(bundle) != header.model:
        raise StateError(
            f"{bundle.path} holds another model than the one that was recorded (bundle "
            f"{header.digest[:16]}...): give a bundle of the same model"
        )
    missing = sorted(set(header.roles) - bundle.graphs.keys())
    if missing:
        raise StateError(
            f"{bundle.path} has no graph {', '.join(missing)}, which the recording ran: export it "
            "again with that graph"
        )
    sessions = ort.open_sessions(
        bundle,
        header.roles,
        provider=provider or header.provider,
        threads=threads or header.threads,
        optimization=header.optimization,
    )
    if header.objective == "full":
        return FullEngine(bundle.spec, sessions)
    return SessionEngine(bundle.spec, bundle.state, sessions, weights=bundle.weights)


def incomparable(
    header: Header, bundle: Bundle, provider: str, threads: int | None = None
) -> list[str]:
    """Why the bytes of a replay need not be those that were recorded; empty where they must be.

    Other weights are no such reason: where they are, is what a replay then finds.

    Args:
        header: Of the recording.
        bundle: To run it on.
        provider: What the replay really runs on.
        threads: Of a pass, as asked for; None for those of the recording.
    """
    reasons = []
    if bundle.precision != header.precision:
        reasons.append(f"precision {bundle.precision}, recorded {header.precision}")
    for role, digest in header.graphs.items():
        if role not in bundle.graphs or bundle.graphs[role].sha256 != digest:
            reasons.append(f"graph {role} is another one")
    if provider != header.provider:
        reasons.append(f"provider {provider}, recorded {header.provider}")
    asked = threads or header.threads
    if asked != header.threads:
        reasons.append(f"threads {asked}, recorded {header.threads or 'the default'}")
    if asked is None and cores() != header.cores:
        reasons.append(f"{cores()} processor cores, recorded {header.cores}")
    if header.slots > 1 and (header.provider != "cpu" or header.precision.name != "fp32"):
        reasons.append(
            "several rows were recorded together, and only fp32 on the CPU gives a row alone the "
            "same bytes"
        )
    found = versions()
    for name in sorted((found.keys() | header.versions.keys()) - {"fixedstate"}):
        pair = found.get(name), header.versions.get(name)
        if pair[0] != pair[1]:
            reasons.append(f"{name} {pair[0] or 'is missing'}, recorded {pair[1] or 'none'}")
    return reasons


def replay(
    recording: Recording,
    engine: Engine,
    *,
    compared: str = "bytes",
    reasons: Sequence[str] = (),
    tolerance: Tolerance | None = None,
    request: int | None = None,
    from_block: int | None = None,
    policies: Mapping[int, Policy] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Repeat a recording.

    Args:
        recording: What was recorded.
        engine: Of one slot or more; what stands in slot 0 is lost.
        compared: One of :data:`COMPARED`.
        reasons: For the report.
        tolerance: Of saved states, where numbers are compared; None for that of the precision.
        request: Only this one, in the order they began.
        from_block: Begin at the last saved state that lies before this block of the answer; None
            for as early as can be.
        policies: Policies of your own by request, which a recording cannot hold.
        progress: Told what is being done.

    Raises:
        UsageError: for a request that the recording does not hold, or a block below 0.
        StateError: where no request can be repeated.
    """
    if compared not in COMPARED:
        raise UsageError(f"compared must be one of {', '.join(COMPARED)}; got {compared!r}")
    if from_block is not None and from_block < 0:
        raise UsageError(f"from_block must be 0 or more; got {from_block}")
    limit = tolerance or Tolerance.of(coarsest(recording.header.precision))
    known = recording.requests
    if request is not None and request not in known:
        raise UsageError(
            f"request {request} is not in the recording, which holds {_spans(known) or 'none'}"
        )
    done = []
    for number in known if request is None else (request,):
        if progress is not None:
            progress(f"request {number}")
        policy = (policies or {}).get(number)
        done.append(_repeat(recording, engine, number, from_block, compared, limit, policy))
    if not any(each.start for each in done):
        why = done[0].note if done else "its ring holds no event"
        raise StateError(f"nothing of the recording can be repeated: {why}")
    return Report(compared, tuple(reasons), tuple(done))


def _repeat(
    recording: Recording,
    engine: Engine,
    request: int,
    from_block: int | None,
    compared: str,
    tolerance: Tolerance,
    policy: Policy | None,
) -> Replayed:
    """Repeat one request up to its first difference."""
    events = recording.of(request)
    states = [state for state in recording.states if state.begun.request == request]
    states = [state for state in states if not state.key]
    start = _choose_start(recording, events, states, from_block)
    if start is None:
        return Replayed(request, "", note=_no_start(recording.header, events))
    begun, state = start
    usable = stateful(engine).state == recording.header.state if state is not None else True
    if not usable:
        return Replayed(request, "", note="its saved state has another precision than the bundle")
    walk = _Walk(recording.header, engine, begun, compared, tolerance, policy)
    walk.begin(state)
    behind = state.next if state is not None and not state.key else begun.number + 1
    checked = [other for other in states if other is not state and other.next >= behind]
    difference = walk.run([event for event in events if event.number >= behind], checked)
    where = "the beginning" if state is None or state.key else f"block {state.block + 1}"
    return Replayed(
        request, where, walk.passes, walk.commits, walk.states, difference, walk.unchecked
    )


def _choose_start(
    recording: Recording,
    events: Sequence[Event],
    states: Sequence[SavedState],
    from_block: int | None,
) -> tuple[Begun, SavedState | None] | None:
    """Where a request can begin: its beginning, or a saved state; None for nowhere."""
    starts: list[tuple[Begun, SavedState | None]] = []
    first = events[0]
    if isinstance(first, Begun):
        of_key = [state for state in recording.states if state.key == first.state]
        if not first.past_length:
            starts.append((first, None))
        elif of_key:
            starts.append((first, of_key[-1]))
    last = max((event.number for event in events if isinstance(event, Pass)), default=-1)
    starts += [(state.begun, state) for state in states if state.next <= last]
    if from_block is None:
        return starts[0] if starts else None
    before = [start for start in starts if start[1] is None or start[1].block < from_block]
    return before[-1] if before else None


def _no_start(header: Header, events: Sequence[Event]) -> str:
    if isinstance(events[0], Begun):
        why = "the state that it went on from was not saved, or was written over"
    else:
        why = "its beginning has left the ring and no saved state is left of it in time"
    return f"{why} ({header.unsaved})" if header.unsaved else why


@dataclass
class _Walk:
    """One request on its way through slot 0."""

    header: Header
    engine: Engine
    begun: Begun
    compared: str
    tolerance: Tolerance
    policy: Policy | None
    passes: int = 0
    commits: int = 0
    states: int = 0
    unchecked: str = ""
    _logits: Array | None = None  # by slot, of the last pass
    _fused: bool = False  # whether they come from a commit
    _after: Array | None = None  # the last canvas
    _policy_state: Any = None
    _full: deque[bytes] = field(default_factory=lambda: deque(maxlen=2))

    def __post_init__(self) -> None:
        spec = self.engine.spec
        assert spec.mask_id is not None
        self._mask: int = spec.mask_id
        self._scorer = Scorer(spec.vocab_size, spec.vocab_rows, [self._mask])
        self._exact = self.compared == "bytes"
        self.policy = self.policy or policy_from_dict(self.begun.rules)
        if self.policy is None:
            name = self.begun.rules["policy"]["name"]
            self.unchecked = f"choices were not compared: the policy {name} is not known here"

    def begin(self, state: SavedState | None) -> None:
        """Give slot 0 the state that the events go on from."""
        self.engine.reset(0, self.begun.room)
        if state is not None:
            # Whatever the weights are: where the recorded state leads with them is the question.
            taken = replace(state.load(), weights=stateful(self.engine).weights)
            taken.restore(self.engine, 0)

    def run(self, events: Sequence[Event], states: Sequence[SavedState]) -> Difference | None:
        """Repeat events up to the first difference, and for logits up to the commit behind it."""
        waiting = deque(states)
        first: Difference | None = None
        for event in events:
            while waiting and waiting[0].next <= event.number:
                found = self._state(waiting.popleft())
                if found is not None:
                    return first or found
            found = self._event(event, quiet=first is not None)
            if first is None and found is not None:
                if found.what != "logits":
                    return found
                first = found
            elif first is not None and isinstance(event, Commit):
                return replace(first, behind=found, text=first.text + ("" if found else _NO_PORT))
        for state in waiting:
            found = self._state(state)
            if found is not None and first is None:
                return found
        return first

    def _event(self, event: Event, *, quiet: bool) -> Difference | None:
        if isinstance(event, Pass):
            self.passes += not quiet
            return self._pass(event)
        if isinstance(event, Commit):
            self.commits += not quiet
            return self._commit(event)
        return None

    # --- passes

    def _pass(self, event: Pass) -> Difference | None:
        wrong = self._misplaced(event)
        if wrong is not None:
            return wrong
        self._after = event.after
        if event.step == 0:
            self._policy_state = None
        if not (event.again or self._fused):
            self._take(self.engine.denoise(event.before[None].astype(np.int64)))
        self._fused = False
        logits = self._logits
        if logits is None:
            raise StateError(
                f"the recording is damaged: pass {event.step} of block {event.block} of request "
                f"{event.request} has no logits to repeat"
            )
        canvas, text = self._chosen(event, logits)
        if not (event.after == self._mask).any():
            self._full.append(event.after.astype(np.int64).tobytes())
        if self._exact and self._hash(event, logits) != event.logits:
            return self._differ(event, "logits", f"the logits differ; {text or 'choices do not'}")
        if event.seed != self.begun.rules["seed"]:
            asked = self.begun.rules["seed"]
            return self._differ(
                event, "seed", f"it ran with seed {event.seed}, the request has seed {asked}"
            )
        if canvas is None:
            return None
        if text:
            equal = "the logits are equal: seed or policy differ" if self._exact else ""
            return self._differ(event, "choice", "; ".join(filter(None, (text, equal))))
        if self._exact and hash_policy(self._policy_state)[0] != event.policy:
            return self._differ(event, "policy state", "the policy keeps another state")
        return None

    def _misplaced(self, event: Pass) -> Difference | None:
        """A canvas or a place that does not follow from the events before."""
        past = int(self.engine.past_length[0])
        if past != event.past_length:
            return self._differ(
                event,
                "tokens",
                f"it ran behind {event.past_length} tokens, the replay is at {past}",
            )
        if event.step == 0:
            wrong = np.flatnonzero(event.before[event.fixed :] != self._mask) + event.fixed
        elif self._after is not None:
            wrong = np.flatnonzero(event.before != self._after)
        else:
            return None
        if not wrong.size:
            return None
        return self._differ(
            event, "canvas", f"{_slots(wrong)} changed between two passes, by no policy"
        )

    def _take(self, logits: Array) -> None:
        """Keep the logits of a pass, by slot."""
        kept = logits[0].copy()
        if self.engine.spec.logit_shift:
            kept[1:] = logits[0, :-1]
            kept[0] = self.engine.last_logits[0]
        self._logits = kept

    def _hash(self, event: Pass, logits: Array) -> bytes:
        looked = event.before == self._mask
        if self.policy is not None and self.policy.needs == "logits":
            looked = np.ones_like(looked)
        return hash_scores(logits, np.flatnonzero(looked), self.engine.spec.vocab_size)

    def _chosen(self, event: Pass, logits: Array) -> tuple[Array | None, str]:
        """The canvas after the policy, and where it is not the recorded one."""
        if self.policy is None:
            return None, ""
        rules, length = self.begun.rules, self.header.block_len
        canvas = event.before[None].astype(np.int64)
        heat, u, v = np.array([rules["temperature"]]), None, None
        if rules["temperature"]:
            both = uniforms(rules["seed"], event.past_length, event.step, length)
            u, v = (each[None] for each in both)
        banned = []
        if rules["stop_ids"] and event.made < rules["min_new_tokens"]:
            new = np.arange(length) - event.fixed + event.made
            banned = [(new < rules["min_new_tokens"], tuple(rules["stop_ids"]))]
        needs = {self.policy.needs}
        scores = self._scorer(logits[None], canvas == self._mask, heat, u, banned, needs)
        if scores.finite[0]:
            view = PassView(
                canvas=canvas,
                mask_id=self._mask,
                scores=scores,
                step=np.array([event.step]),
                v=v,
                state=None if self._policy_state is None else [self._policy_state],
                logits=logits[None] if self.policy.needs == "logits" else None,
            )
            reveal = self.policy.reveal(view)
            canvas = reveal.canvas
            self._policy_state = None if reveal.state is None else reveal.state[0]
        wrong = np.flatnonzero(canvas[0] != event.after)
        if not wrong.size:
            return canvas, ""
        said, found = event.after[wrong].tolist(), canvas[0, wrong].tolist()
        return canvas, f"{_slots(wrong)} recorded {_ids(said)}, replayed {_ids(found)}"

    # --- commits

    def _commit(self, event: Commit) -> Difference | None:
        engine, length = self.engine, self.header.block_len
        past = int(engine.past_length[0])
        if past != event.past_length:
            return self._differ(
                event, "tokens", f"it stood behind {event.past_length} tokens, the replay at {past}"
            )
        last = event.ids[-length:].tobytes()
        known = event.block == 0 or not self._full or last in self._full
        if event.fused:
            opened = np.full(length, self._mask, np.int64)
            logits = engine.commit_denoise(np.concatenate([event.ids, opened])[None])
            self._take(logits)
            self._fused = True
        else:
            engine.commit(event.ids[None], np.array([len(event.ids)]))
        if not known:
            return self._differ(event, "tokens", "its tokens are not those of a finished block")
        return self._compare(event, past) if self._exact else None

    def _compare(self, event: Commit, past: int) -> Difference | None:
        """The first port, in the order of layers, whose hash is another one."""
        state = self.header.state
        if state.committed:
            hashes = hash_ports(state, _views(self.engine), past)
            for index, port in enumerate(state.committed):
                if hashes[index * HASH : (index + 1) * HASH] != event.ports[index]:
                    text = f"layer {port.layer}, {port.kind} state ({port.suffix}) differs"
                    return self._differ(event, "state", text, port.layer, port.suffix)
        if self.engine.spec.logit_shift:
            if hash_array(self.engine.last_logits[0]) != event.last_logits:
                return self._differ(event, "last_logits", "the last logits differ")
        return None

    # --- saved states

    def _state(self, saved: SavedState) -> Difference | None:
        """Compare a state that was saved on the way."""
        self.states += 1
        taken = saved.load()
        views = _views(self.engine)
        mine = {**views, **_last(self.engine)}
        other = dict(taken.arrays)
        if taken.last_logits is not None:
            other["last_logits"] = taken.last_logits
        name = None
        if self._exact:
            names = [name for name in other if other[name].tobytes() != mine[name].tobytes()]
            name, words = (names[0], "differs") if names else (None, "")
        else:
            own = stateful(self.engine).state
            spec = self.engine.spec
            mine, other = decoded(own, mine, spec), decoded(taken.state, other, spec)
            for port in compare(other, mine, self.tolerance).ports:
                if not port.passed:
                    name, words = port.name, str(port).partition(": ")[2]
                    break
        if name is None:
            return None
        layers = {port.suffix: port.layer for port in taken.state.committed}
        layer = layers.get(name)
        where = f"layer {layer}, {name}" if layer is not None else name
        return Difference(
            request=self.begun.request,
            number=saved.next,
            block=saved.block,
            step=None,
            past_length=taken.past_length,
            what="saved state",
            text=f"the saved state of {taken.past_length} tokens: {where} {words}",
            layer=layer,
            port=name,
        )

    def _differ(
        self,
        event: Pass | Commit,
        what: str,
        text: str,
        layer: int | None = None,
        port: str | None = None,
    ) -> Difference:
        return Difference(
            request=event.request,
            number=event.number,
            block=event.block,
            step=event.step if isinstance(event, Pass) else None,
            past_length=event.past_length,
            what=what,
            text=text,
            layer=layer,
            port=port,
        )


def _views(engine: Engine) -> dict[str, Array]:
    return cast(VisibleEngine, engine).views(0)


def _last(engine: Engine) -> dict[str, Array]:
    return {"last_logits": engine.last_logits[0]} if engine.spec.logit_shift else {}


# --- words ---------------------------------------------------------------------------------------


def _slots(slots: Array) -> str:
    return ("slot " if slots.size == 1 else "slots ") + _ids(slots.tolist())


def _ids(ids: Sequence[int]) -> str:
    more = ", ..." if len(ids) > _NAMED else ""
    return ", ".join(map(str, ids[:_NAMED])) + more


def _spans(numbers: Sequence[int]) -> str:
    """Numbers in order, runs of them as first to last."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][-1] + 1:
            out[-1] = [out[-1][0], number]
        else:
            out.append([number])
    return ", ".join("-".join(map(str, run)) for run in out)
