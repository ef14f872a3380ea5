"""ONNX against PyTorch, port by port: no graph counts as exported before it passed this.

Two kinds of trial. *Single passes*: random tokens on states that random tokens made, several batch
sizes, block counts and ragged commit lengths, a past length per row and garbage behind it.
*Trajectories*: both sides carry their own state over several blocks of real tokens, and denoise
half-masked canvases in between.

Where a precision itself has no more digits (a sharp softmax, a scan state of some hundreds), the
two differ by more than the tolerance though neither is wrong. Such a port is judged by PyTorch in
float64: ONNX passes if it is not further from it than PyTorch at the bundle's own precision, times
a small factor.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fixedstate.bundle import PARITY, Bundle
from fixedstate.errors import ParityError, SpecError, UsageError
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.custom import build_reference
from fixedstate.export.denoiser import BlockModel, Denoiser, RoleGraph
from fixedstate.export.stored import as_stored
from fixedstate.ports import Array, Port
from fixedstate.runtime import laws
from fixedstate.runtime.compare import (
    NOT_FINITE,
    Comparison,
    PortDifference,
    Tolerance,
    compare,
    draw_inputs,
)
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.session import Session
from fixedstate.spec import AttentionSizes, ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports, split_role

BATCHES = (1, 2, 5)
BLOCKS = (1, 2, 7)
TRAJECTORY_BLOCKS = 4
CAPACITY = 256
"""Columns of the key and value buffers in single passes, per block of history."""

_SMALL = 20_000_000  # weights

SAMPLE = (
    "set arm_3 17\nbattery low\nmove base_2\nget arm_3\n"
    "The state that is carried from block to block has a fixed size.\n"
    '{"name": "sample", "values": [1, 2, 3]}\n'
)
"""Real text for trajectories, encoded by the checkpoint's own tokenizer."""


JUDGE_FACTOR = 4.0
"""How much further from float64 than PyTorch at the same precision a port may be: another order of
sums. The relative tolerance is stretched by the same factor, or taken of the port's largest value,
and not more."""

Side = dict[str, Array]
"""Arrays by port name."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One comparison, and float64's word where the two sides differ by more than the tolerance.

    Attributes:
        name: What was run.
        result: The comparison of both float32 sides.
        judged: By port: error of the candidate and of PyTorch against float64, and the verdict.
    """

    name: str
    result: Comparison
    judged: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def failed(self) -> list[PortDifference]:
        """Ports that neither the tolerance nor float64 lets pass."""
        return [
            port
            for port in self.result.ports
            if not port.passed and not self.judged.get(port.name, {}).get("passed", False)
        ]

    @property
    def worst(self) -> PortDifference:
        """The failed port if any, else the one that differs most."""
        ports = self.failed or list(self.result.ports)
        return max(ports, key=lambda port: (bool(port.problem), port.max_abs))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        out = {"trial": self.name, "passed": not self.failed, "worst": self.worst.to_dict()}
        return {**out, "judged_by_float64": self.judged} if self.judged else out


def judge(result: Comparison, exact: Side, peer: Side, candidate: Side) -> Trial:
    """A trial whose ports beyond the tolerance are judged by float64.

    Args:
        result: The comparison of reference and candidate; its candidate label names the trial.
        exact: PyTorch in float64.
        peer: PyTorch at the bundle's precision.
        candidate: The exported graph.
    """
    judged = {}
    for port in result.ports:
        if port.passed or port.problem or candidate[port.name].dtype.kind != "f":
            continue
        truth = exact[port.name].astype(np.float64)
        ours = float(np.abs(candidate[port.name] - truth).max())
        theirs = float(np.abs(peer[port.name].astype(np.float64) - truth).max())
        # a port of few large elements among many small ones has a deviation far below the large
        peak = float(np.abs(truth).max())
        relative = result.tolerance.relative
        within = port.max_rel <= JUDGE_FACTOR * relative or ours <= relative * peak
        close = within and ours <= JUDGE_FACTOR * theirs
        judged[port.name] = {"candidate": ours, "pytorch": theirs, "passed": close}
    return Trial(result.candidate, result, judged)


def compare_graphs(
    bundle: Bundle,
    denoiser: BlockModel,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare every graph of a bundle with the PyTorch denoiser.

    Args:
        bundle: An opened bundle, or one that is being staged.
        denoiser: The float32 denoiser with plain operators: what is right.
        seed: Of ids and states.
        progress: Told what is compared.

    Returns:
        The content of parity.json: verdict, tolerance, worst port, every trial.
    """
    with few_threads(denoiser):
        return _compare_graphs(bundle, denoiser, seed, progress)


def _is_small(denoiser: BlockModel) -> bool:
    weights = [*denoiser.parameters(), *denoiser.buffers()]
    return sum(tensor.numel() for tensor in weights) < _SMALL


@contextlib.contextmanager
def few_threads(denoiser: BlockModel) -> Iterator[None]:
    """One PyTorch thread for a small model: more wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if _is_small(denoiser) else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_graphs(
    bundle: Bundle, denoiser: BlockModel, seed: int, progress: Callable[[str], None] | None
) -> dict[str, Any]:
    sessions = open_sessions(bundle, tuple(bundle.graphs), threads=1)
    ids, kind = real_tokens(bundle)
    sides = Held(denoiser)
    trials: list[Trial] = []
    for role, session in sessions.items():
        if progress is not None:
            progress(f"comparing {role} with PyTorch")
        rng = np.random.default_rng(seed)
        for drawn in draw_passes(denoiser, role, session.inputs, rng, BATCHES, BLOCKS):
            found = session.run(drawn.feeds)
            trials += settle([drawn], [found], role, sides, bundle.precision)
    if {"denoise", "commit"} <= set(sessions):
        if progress is not None:
            progress("comparing a trajectory with PyTorch")
        trials += trajectory(sessions, sides, ids, bundle.precision)
    return report_of(bundle, trials, kind, "whole graphs", sorted(sessions))


def report_of(
    bundle: Bundle, trials: list[Trial], kind: str, scope: str, parts: list[str]
) -> dict[str, Any]:
    """The content of parity.json.

    Args:
        bundle: What was compared.
        trials: Every one, of at least one.
        kind: Where the tokens came from.
        scope: ``whole graphs``, or ``layers`` where parts stood for them.
        parts: What was compared, by name.
    """
    worst = max(trials, key=lambda t: (bool(t.failed), bool(t.worst.problem), t.worst.max_abs))
    by_graph: dict[str, float | None] = {}  # None where a number has no meaning: NaN, a shape
    for trial in trials:
        graph, found = trial.name.partition(" ")[0], trial.worst.max_abs
        so_far = by_graph.get(graph, 0.0)
        meaningless = so_far is None or not np.isfinite(found)
        by_graph[graph] = None if meaningless else max(so_far or 0.0, found)
    return {
        "passed": not any(trial.failed for trial in trials),
        "precision": bundle.precision.name,
        "reference": "PyTorch float32 on cpu, with the weights as the bundle stores them",
        "candidate": "ONNX Runtime, provider cpu, 1 thread, all optimisations",
        "tolerance": Tolerance.of(bundle.precision.name).to_dict(),
        "scope": scope,
        "parts": parts,
        "tokens": kind,
        "comparisons": sum(len(trial.result.ports) for trial in trials),
        "judged_by_float64": sum(len(trial.judged) for trial in trials),
        "worst": {"trial": worst.name, **worst.worst.to_dict()},
        "max_abs_by_graph": by_graph,
        "trials": [trial.to_dict() for trial in trials],
    }


def require(report: Mapping[str, Any]) -> None:
    """Raise where a report did not pass.

    Raises:
        ParityError: naming trial, port, size and tolerance.
    """
    if report["passed"]:
        return
    worst, limit = report["worst"], report["tolerance"]
    failed = sum(not trial["passed"] for trial in report["trials"])
    what = worst.get("problem") or f"differs by {worst['max_abs']:.3g}"
    if limit["precision"] == "fp16" and worst.get("problem") == NOT_FINITE:
        raise ParityError(
            f"the fp16 graphs give NaN or infinity in {failed} of {len(report['trials'])} trials "
            f"(first at {worst['trial']}, port {worst['name']}) where PyTorch in float32 does "
            "not: values of this model leave the range of float16 (65504); no bundle was written, "
            "export it in fp32"
        )
    raise ParityError(
        f"the exported graphs differ from PyTorch in {failed} of {len(report['trials'])} trials, "
        f"worst at {worst['trial']}, port {worst['name']}: {what} (allowed at "
        f"{limit['precision']}: absolute {limit['absolute']}, relative {limit['relative']}); no "
        "bundle was written, please report this model"
    )


def real_tokens(bundle: Bundle) -> tuple[Array, str]:
    """(blocks * L,) ids for a trajectory, and where they came from."""
    need = TRAJECTORY_BLOCKS * bundle.spec.block_len
    try:
        from fixedstate.runtime.text import Text

        ids = Text.open(bundle).encode(SAMPLE)
    except UsageError:
        rng = np.random.default_rng(1)
        return rng.integers(0, bundle.spec.vocab_size, need), "random (no tokenizer)"
    if not ids:
        raise ParityError("the checkpoint's tokenizer gives no ids for plain text: check it")
    repeated = (ids * (need // len(ids) + 1))[:need]
    return np.asarray(repeated, np.int64), "random and real"


def _lengths(spec: ModelSpec, role: str, rows: int, blocks: int, rng: np.random.Generator) -> Array:
    """Ragged commit lengths that the role defines: whole blocks, any length where exact."""
    length = spec.block_len
    if split_role(role)[0] == "commit_denoise":
        return rng.integers(blocks - 1, blocks + 1, rows) * length
    if spec.causal_commit:
        return rng.integers(0, blocks * length + 1, rows)
    return rng.integers(0, blocks + 1, rows) * length


@dataclass(frozen=True, slots=True)
class Drawn:
    """One pass: what goes in, and what PyTorch makes of it.

    Attributes:
        place: What is run.
        feeds: Inputs by port name.
        lengths: (B,) tokens of each row that are committed.
        columns: Outputs whose columns behind a row's length the runtime never takes over.
        expected: Outputs by port name.
        scores: (B, R, V) logits at the open slots, -inf where an id must not be chosen, of a
            graph that gives tokens; else None.
    """

    place: str
    feeds: Side
    lengths: Array
    columns: frozenset[str]
    expected: Side
    scores: Array | None = None


class Sides(Protocol):
    """The PyTorch sides of a comparison; one is asked for where it is needed."""

    def plain(self) -> BlockModel:
        """In float32, with the weights as the bundle stores them: what is right."""
        ...

    def exact(self) -> BlockModel:
        """The same in float64."""
        ...

    def peer(self, precision: Precision) -> BlockModel:
        """The same at the bundle's own precision."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """The sides of a model that is in memory."""

    model: BlockModel

    def plain(self) -> BlockModel:
        """The model."""
        return self.model

    def exact(self) -> BlockModel:
        """A copy in float64."""
        return copy.deepcopy(self.model).double()

    def peer(self, precision: Precision) -> BlockModel:
        """The model at a precision."""
        return self.model.at(precision)


def draw_passes(
    model: BlockModel,
    role: str,
    ports: tuple[Port, ...],
    rng: np.random.Generator,
    batches: tuple[int, ...],
    blocks: tuple[int, ...],
) -> Iterator[Drawn]:
    """Single passes: random tokens on states that random tokens made.

    Args:
        model: Float32, with plain operators.
        role: Of the graph, ``role@target`` included.
        ports: The graph's inputs.
        rng: Source of the numbers.
        batches: Rows of the passes.
        blocks: Blocks of the passes, for roles that commit.
    """
    spec = model.spec
    graph = RoleGraph(model, role.partition("@")[0])
    base, head = split_role(graph.role)
    columns = frozenset(port.present.name for port in model.state_spec.appended)
    if graph.role == "full":
        yield from _draw_sequences(graph, ports, rng, batches)
        return
    for rows in batches:
        for count in blocks if role.startswith("commit") else (1,):
            commit_length = _lengths(spec, role, rows, count, rng)
            state, past_length = _made_state(model, rows, rng)
            feeds = draw_inputs(
                ports,
                rng,
                vocab=spec.vocab_rows,
                past_length=past_length,
                commit_length=commit_length,
                B=rows,
                n=count,
                m=count,
                C=_capacity(spec),
                R=int(rng.integers(1, spec.block_len + 1)),
            )
            if "open_slots" in feeds:
                feeds["open_slots"] %= spec.block_len
            for port in model.state_spec.committed:
                if port.past.name in feeds:
                    dtype = feeds[port.past.name].dtype
                    feeds[port.past.name] = state[port.suffix].numpy().astype(dtype)
            place = f"{role} B={rows}"
            if role.startswith("commit"):
                place += f" n={count} commit_length={commit_length.tolist()}"
            expected = run_torch(graph, feeds)
            scores = None
            if head != "logits":
                place += f" R={feeds['open_slots'].shape[1]}"
                logits = run_torch(RoleGraph(model, base), feeds)["logits"]
                scores = _choosable(logits, feeds["open_slots"], spec)
            yield Drawn(place, feeds, commit_length, columns, expected, scores)


def _choosable(logits: Array, slots: Array, spec: ModelSpec) -> Array:
    """Logits (B, R, V) at some slots, -inf where an id must not be chosen."""
    scores = np.take_along_axis(logits, slots[..., None], axis=1)
    scores[..., spec.vocab_size :] = -np.inf
    if spec.mask_id is not None:
        scores[..., spec.mask_id] = -np.inf
    return scores


def _as_chosen(one: Drawn, found: Side, tolerance: Tolerance) -> Side:
    """What is expected, with the candidate's own tokens where they are as good.

    A token may stand in the place of another if their logits differ by no more than what the two
    logits together may be off by.
    """
    if one.scores is None:
        return one.expected
    finite = one.scores[np.isfinite(one.scores)]
    deviation = float(finite.std())
    limit = tolerance.relative * deviation
    if tolerance.absolute is not None:
        limit = min(limit, tolerance.absolute * max(1.0, deviation))
    limit = 2 * max(limit, tolerance.floor)
    expected = dict(one.expected)
    for name in ("tokens", "top_tokens"):
        right, other = expected.get(name), found.get(name)
        if right is None or other is None or other.shape != right.shape:
            continue
        wide = (*right.shape, 1)[:3]
        chosen = np.clip(other.reshape(wide), 0, one.scores.shape[2] - 1)
        gap = np.take_along_axis(one.scores, right.reshape(wide), 2) - np.take_along_axis(
            one.scores, chosen, 2
        )
        distinct = (np.diff(np.sort(chosen, -1), axis=-1) > 0).all(-1, keepdims=True)
        as_good = ((np.abs(gap) <= limit) & distinct).reshape(right.shape)
        expected[name] = np.where(as_good, other, right)
    return expected


def _draw_sequences(
    graph: RoleGraph, ports: tuple[Port, ...], rng: np.random.Generator, batches: tuple[int, ...]
) -> Iterator[Drawn]:
    """Whole sequences of one token, of a block, and of what is no multiple of one."""
    spec = graph.denoiser.spec
    for rows in batches:
        for tokens in (1, 7, spec.block_len, 3 * spec.block_len + 5):
            none = np.zeros(rows, np.int64)
            feeds = draw_inputs(
                ports, rng, vocab=spec.vocab_rows, past_length=none, B=rows, T=tokens
            )
            place = f"full B={rows} T={tokens}"
            yield Drawn(place, feeds, none, frozenset(), run_torch(graph, feeds))


def settle(
    drawn: Sequence[Drawn],
    found: Sequence[Side],
    role: str,
    sides: Sides,
    precision: Precision,
    label: str = "",
) -> list[Trial]:
    """Compare what the two sides made of single passes; float64 judges what differs by more.

    Args:
        drawn: The passes.
        found: What the graph made of each.
        role: Of the graph.
        sides: Give float64 and the peer, where they are needed.
        precision: Of the bundle.
        label: What the names of the trials begin with.
    """
    tolerance = Tolerance.of(precision.name)
    role = role.partition("@")[0]
    results = []
    for one, other in zip(drawn, found, strict=True):
        _cut(one.expected, other, one.columns, one.lengths)
        labels = ("PyTorch", label + one.place)
        expected = _as_chosen(one, other, tolerance)
        results.append(compare(expected, other, tolerance, labels=labels))
    doubtful = [index for index, result in enumerate(results) if not result.passed]
    exact = _again(sides.exact, drawn, doubtful, role, np.float64)
    peer = _again(lambda: sides.peer(precision), drawn, doubtful, role, None)
    return [
        judge(result, exact.get(index, {}), peer.get(index, {}), other)
        for index, (result, other) in enumerate(zip(results, found, strict=True))
    ]


def _again(
    make: Callable[[], BlockModel],
    drawn: Sequence[Drawn],
    places: list[int],
    role: str,
    dtype: Any | None,
) -> dict[int, Side]:
    """Some of the passes on another side, which is made only if there are any."""
    if not places:
        return {}
    graph = RoleGraph(make(), role)
    out = {}
    for place in places:
        out[place] = run_torch(graph, drawn[place].feeds, dtype)
        _cut(out[place], {}, drawn[place].columns, drawn[place].lengths)
    return out


_HISTORY = 3
"""Blocks of random tokens, at most, behind the states of single passes, beside no window."""

_LONGEST_HISTORY = 16
"""The same beside windows, which are filled where that many blocks fill them."""


def _history(spec: ModelSpec) -> int:
    """Blocks of random tokens, at most, behind the states of single passes."""
    layers = [layer.attention for layer in spec.layers if layer.mixer == "attention"]
    room = max((sizes.sinks + sizes.window for sizes in layers if sizes.window), default=0)
    return max(_HISTORY, min(-(-room // spec.block_len) + 1, _LONGEST_HISTORY))


def _capacity(spec: ModelSpec) -> int:
    """Columns of growing keys and values in single passes."""
    return max(CAPACITY * _HISTORY, _history(spec) * spec.block_len)


def _made_state(
    denoiser: BlockModel, rows: int, rng: np.random.Generator
) -> tuple[dict[str, torch.Tensor], Array]:
    """States as a model makes them, one history per row, and garbage behind each row's tokens."""
    spec = denoiser.spec
    history = _history(spec)
    blocks = rng.integers(0, history + 1, rows)
    ids = _entering(denoiser, rng, rows, history * spec.block_len)
    length = torch.from_numpy(blocks * spec.block_len)
    state = denoiser.zero_state(rows, _capacity(spec))
    with torch.inference_mode():
        made = denoiser.commit(ids, state, torch.zeros(rows, dtype=torch.int64), length)
    for port in denoiser.state_spec.committed:
        new = made[port.suffix]
        if port.update == "swap" and port.kind not in ("key", "value"):
            state[port.suffix] = new
            continue
        garbage = rng.standard_normal(tuple(state[port.suffix].shape))
        buffer = torch.from_numpy(garbage.astype(np.float32))
        if port.update == "swap":
            unfilled = _unfilled(spec.layers[port.layer].attention, length)
            state[port.suffix] = torch.where(unfilled, buffer, new)
            continue
        for row, count in enumerate(length.tolist()):
            buffer[row, :, :count] = new[row, :, :count]
        state[port.suffix] = buffer
    return state, length.numpy()


def _entering(model: BlockModel, rng: np.random.Generator, rows: int, tokens: int) -> torch.Tensor:
    """Random ids [rows, tokens]; hidden values [rows, tokens, D] for a part that takes those."""
    spec = model.spec
    if model.ports("commit")[0][0].dtype == "int64":
        return torch.from_numpy(rng.integers(0, spec.vocab_rows, (rows, tokens)))
    drawn = rng.standard_normal((rows, tokens, spec.width))
    return torch.from_numpy(drawn.astype(np.float32))


def _unfilled(sizes: AttentionSizes, past: torch.Tensor) -> torch.Tensor:
    """[B, 1, sinks + W, 1] bool: columns of a windowed port that no token fills yet."""
    assert sizes.window is not None
    room, past = sizes.sinks + sizes.window, past[:, None]
    column = torch.arange(room)
    of_window = past + column - room < sizes.sinks
    unfilled = torch.where(column < sizes.sinks, column >= past, of_window)
    return unfilled[:, None, :, None]


def _cut(expected: Side, found: Side, columns: frozenset[str], lengths: Array) -> None:
    """Zero the new columns behind each row's length: the runtime never takes them over."""
    for arrays in (expected, found):
        for name in columns & arrays.keys():
            array = np.array(arrays[name])
            for row, count in enumerate(lengths):
                array[row, :, count:] = 0
            arrays[name] = array


def run_torch(graph: RoleGraph, feeds: Mapping[str, Array], dtype: Any | None = np.float32) -> Side:
    """The outputs of a role in PyTorch, by port name.

    Args:
        graph: The role.
        feeds: Its inputs in any float dtype.
        dtype: What float inputs are cast to; None for each port's own.
    """
    tensors = []
    for port in graph.inputs:
        array = feeds[port.name]
        if array.dtype.kind == "f":
            array = array.astype(port.dtype if dtype is None else dtype)
        tensors.append(torch.from_numpy(np.ascontiguousarray(array)))
    with torch.inference_mode():
        results = graph(*tensors)
    return {port.name: result.numpy() for port, result in zip(graph.outputs, results, strict=True)}


def trajectory(
    sessions: Mapping[str, Session], sides: Sides, ids: Array, precision: Precision
) -> list[Trial]:
    """Every side carries its own state over blocks of real tokens.

    Args:
        sessions: ``denoise`` and ``commit``.
        sides: The PyTorch sides.
        ids: (blocks * L,) tokens.
        precision: Of the bundle.
    """
    tolerance = Tolerance.of(precision.name)
    right = _TorchSide(sides.plain())
    spec, state = right.spec, right.state_spec
    expected = right.walk(ids)
    del right
    found = _SessionSide(spec, state, sessions).walk(ids)
    results = {
        place: compare(expected[place], found[place], tolerance, labels=("PyTorch", place))
        for place in expected
    }
    exact: dict[str, Side] = {}
    peer: dict[str, Side] = {}
    if not all(result.passed for result in results.values()):
        exact = _TorchSide(sides.exact(), np.float64).walk(ids)
        peer = _TorchSide(sides.peer(precision), None).walk(ids)
    return [
        judge(result, exact.get(place, {}), peer.get(place, {}), found[place])
        for place, result in results.items()
    ]


class _Carried:
    """One row's state carried by one back end; subclasses run the passes."""

    def __init__(self, spec: ModelSpec, state: StateSpec, dtype: Any | None = np.float32) -> None:
        self.spec = spec
        self.state_spec = state
        self.dtype = dtype
        kept = np.float64 if dtype == np.float64 else np.float32
        self.past = 0
        columns = TRAJECTORY_BLOCKS * spec.block_len
        self.state = {
            port.suffix: np.zeros(port.past.resolve(B=1, C=columns), kept) for port in state.ports
        }

    def walk(self, ids: Array) -> dict[str, Side]:
        """Denoise a half-masked canvas and commit the tokens, block by block: outputs by place."""
        spec, length = self.spec, self.spec.block_len
        made = {}
        for block in range(TRAJECTORY_BLOCKS):
            piece = ids[None, block * length : (block + 1) * length]
            canvas = piece.copy()
            canvas[:, length // 2 :] = spec.mask_id if spec.mask_id is not None else 0
            made[f"trajectory block {block} denoise"] = self.denoise(canvas)
            made[f"trajectory block {block} commit"] = self.commit(piece)
        return made

    def run(self, role: str, feeds: Mapping[str, Array]) -> Side:
        """One pass."""
        raise NotImplementedError

    def _feeds(self, role: str, ids: Array) -> Side:
        known: Side = {
            "input_ids": ids,
            "past_length": np.array([self.past]),
            "commit_length": np.array([ids.shape[1]]),
        }
        for port in self.state_spec.ports:
            known[port.past.name] = self.state[port.suffix]
        inputs, _ = graph_ports(self.spec, self.state_spec, role)
        return {port.name: known[port.name] for port in inputs}

    def denoise(self, ids: Array) -> Side:
        """Logits of a block, and the state that goes to the block's next pass."""
        made = self.run("denoise", self._feeds("denoise", ids))
        for port in self.state_spec.stepped:
            self.state[port.suffix] = made[port.present.name].astype(self.state[port.suffix].dtype)
        return made

    def commit(self, ids: Array) -> Side:
        """Carry a block into the state; give what the pass made."""
        made = self.run("commit", self._feeds("commit", ids))
        for port in self.state_spec.stepped:
            self.state[port.suffix][:] = port.reset
        for port in self.state_spec.committed:
            new = made[port.present.name].astype(self.state[port.suffix].dtype)
            if port.update == "swap":
                self.state[port.suffix] = new
            else:
                self.state[port.suffix][:, :, self.past : self.past + new.shape[2]] = new
        self.past += ids.shape[1]
        return made


class _TorchSide(_Carried):
    def __init__(self, model: BlockModel, dtype: Any | None = np.float32) -> None:
        super().__init__(model.spec, model.state_spec, dtype)
        self.model = model

    def run(self, role: str, feeds: Mapping[str, Array]) -> Side:
        return run_torch(RoleGraph(self.model, role), feeds, self.dtype)


class _SessionSide(_Carried):
    def __init__(self, spec: ModelSpec, state: StateSpec, sessions: Mapping[str, Session]) -> None:
        super().__init__(spec, state)
        self.sessions = sessions

    def run(self, role: str, feeds: Mapping[str, Array]) -> Side:
        session = self.sessions[role]
        dtypes = {port.name: port.dtype for port in session.inputs}
        cast = {
            name: array.astype(dtypes[name]) if array.dtype.kind == "f" else array
            for name, array in feeds.items()
        }
        return session.run(cast)


# --- the PyTorch side of `check` ------------------------------------------------------------------


class TorchEngine:
    """A PyTorch denoiser behind the engine protocol of the laws.

    Args:
        denoiser: What is right.
        slots: Rows.
        stateless: Keep only the tokens and recompute the whole sequence at every pass.
    """

    def __init__(self, denoiser: BlockModel, slots: int, *, stateless: bool = False) -> None:
        self._denoiser = denoiser
        self._slots = slots
        self._stateless = stateless
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._rows: list[dict[str, torch.Tensor]] = [
            denoiser.zero_state(1, 0) for _ in range(slots)
        ]
        width = denoiser.spec.vocab_rows if denoiser.spec.logit_shift else 0
        self.last_logits: Array = np.zeros((slots, width))

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._denoiser.spec

    @property
    def slots(self) -> int:
        """Rows at most."""
        return self._slots

    @property
    def limit(self) -> int | None:
        """No limit."""
        return None

    @property
    def provider(self) -> str:
        """Where the passes run."""
        return f"PyTorch cpu {str(self._denoiser.dtype)[6:]}"

    @property
    def past_length(self) -> Array:
        """(slots,) committed tokens per row."""
        return np.array([len(row) for row in self._tokens], np.int64)

    def denoise(self, ids: Array) -> Array:
        """Logits of a block behind each row's tokens."""
        with torch.inference_mode():
            return np.concatenate([self._row(row, ids[row]) for row in range(len(ids))])

    def _row(self, row: int, ids: Array) -> Array:
        block = torch.from_numpy(np.asarray(ids, np.int64))[None]
        if self._stateless:
            past = torch.tensor([self._tokens[row]], dtype=torch.int64)
            return self._denoiser.recompute(torch.cat([past, block], 1)).numpy()
        length = torch.tensor([len(self._tokens[row])])
        state = self._rows[row]
        passed = self._denoiser.passes("denoise", block, state, past_length=length)
        for port in self._denoiser.state_spec.stepped:
            state[port.suffix] = passed.states[port.suffix]
        assert passed.logits is not None
        return passed.logits.numpy()

    def commit(self, ids: Array, commit_length: Array) -> None:
        """Carry clean tokens into each row, one row at a time."""
        for row, count in enumerate(int(v) for v in commit_length):
            if count:
                self._commit_row(row, np.asarray(ids[row], np.int64), count)

    def _commit_row(self, row: int, ids: Array, count: int) -> None:
        past = len(self._tokens[row])
        self._tokens[row] += ids[:count].tolist()
        if self._stateless:
            return
        denoiser = self._denoiser
        state = self._rows[row]
        with torch.inference_mode():
            passed = denoiser.passes(
                "commit",
                torch.from_numpy(ids)[None],
                state,
                past_length=torch.tensor([past]),
                commit_length=torch.tensor([count]),
            )
        made = passed.states
        if passed.last_logits is not None:
            self.last_logits[row] = passed.last_logits[0].numpy()
        self.begin_block(row)
        for port in denoiser.state_spec.committed:
            new = made[port.suffix]
            if port.update == "append":
                new = torch.cat([state[port.suffix], new[:, :, :count]], 2)
            state[port.suffix] = new

    def begin_block(self, row: int) -> None:
        """Forget what earlier denoise passes left in the state of scope ``step``."""
        zero = self._denoiser.zero_state(1, 0)
        for port in self._denoiser.state_spec.stepped:
            self._rows[row][port.suffix] = zero[port.suffix]

    def reset(self, row: int) -> None:
        """Give a row the state it has before its first token."""
        self._tokens[row] = []
        self.last_logits[row] = 0
        self._rows[row] = self._denoiser.zero_state(1, 0)

    def move(self, source: int, target: int) -> None:
        """Copy a row over another."""
        self._tokens[target] = list(self._tokens[source])
        self.last_logits[target] = self.last_logits[source]
        self._rows[target] = dict(self._rows[source])

    def state_bytes(self) -> int:
        """Bytes of constant-size state per row."""
        return self._denoiser.state_spec.state_bytes()

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of keys and values per row."""
        return past_length * self._denoiser.state_spec.kv_bytes_per_token()

    @property
    def state(self) -> StateSpec:
        """What is carried."""
        return self._denoiser.state_spec

    def read(self, row: int) -> dict[str, Array]:
        """The carried tensors of one row, by suffix."""
        suffixes = [port.suffix for port in self.state.committed]
        return {suffix: self._rows[row][suffix][0].numpy() for suffix in suffixes}


def check_against_checkpoint(
    bundle: Bundle,
    checkpoint: str | Path,
    *,
    block_counts: tuple[int, ...] = laws.BLOCK_COUNTS,
    progress: Callable[[str], None] | None = None,
) -> list[laws.LawResult]:
    """Laws 1 and 5 of a bundle against the PyTorch denoiser of its checkpoint.

    Args:
        bundle: The opened bundle.
        checkpoint: Name of a shipped model or a folder.
        block_counts: Committed blocks at which law 1 compares; law 5 goes to the last.
        progress: Told the title of each law.

    Raises:
        CheckpointError: where the checkpoint cannot be read.
        SpecError: where it is not the checkpoint of this bundle.
        UsageError: where bundle or checkpoint is a custom module.
    """
    _refuse_module(bundle, checkpoint)
    spec = bundle.spec
    published = {
        "block_len": spec.block_len,
        "mask_id": spec.mask_id,
        "stop_ids": spec.stop_ids,
    }
    loaded = load_checkpoint(checkpoint, **published)  # type: ignore[arg-type]
    changed = sorted(
        name
        for name, digest in bundle.source.files.items()
        if loaded.source.files.get(name) != digest
    )
    if loaded.spec != spec or changed:
        what = f"the files {', '.join(changed)}" if changed else "their models"
        raise SpecError(
            f"{checkpoint} is not the checkpoint of {bundle.path}: {what} differ; give the "
            "checkpoint the bundle was exported from, or export again"
        )
    denoiser = Denoiser(spec, as_stored(loaded.tensors, bundle.precision))
    small = _is_small(denoiser)
    # what a float32 reference rounds itself would count against the bundle
    right = Held(denoiser).exact() if small else denoiser
    sides: dict[str, Any] = {
        "recompute": lambda slots: TorchEngine(right, slots, stateless=True),
        "reference": lambda slots: TorchEngine(right, slots),
        "block_counts": block_counts,
        "only": (1, 5),
    }
    with few_threads(denoiser):
        results = laws.check_bundle(bundle, progress=progress, **sides)
        # a peer in PyTorch rounds as float dtypes do, not as quantised products and states do
        is_float = Tolerance.of(laws.tolerance_name(bundle)).kl is None
        if small and is_float and not all(result.passed for result in results):
            results = _judged(results, denoiser.at(bundle.precision), bundle.precision, sides)
    return results


def _refuse_module(bundle: Bundle, checkpoint: str | Path) -> None:
    """A custom module is compared when it is exported, a checkpoint here.

    Raises:
        UsageError: saying what to give instead.
    """
    made_by = [name for name in bundle.source.files if name.endswith(".py")]
    if made_by:
        raise UsageError(
            f"{bundle.path} was exported from the module in {made_by[0]}, not from a checkpoint: "
            f"leave --checkpoint {checkpoint} out; {PARITY} in the bundle is the comparison with "
            "the module"
        )
    if build_reference(checkpoint) is not None:
        raise UsageError(
            f"--checkpoint {checkpoint} is a module, but {bundle.path} was exported from a "
            "checkpoint: give that one"
        )


def _judged(
    results: list[laws.LawResult], peer: BlockModel, precision: Precision, sides: dict[str, Any]
) -> list[laws.LawResult]:
    """Judge a broken law by how far PyTorch at the same precision is from float64.

    Where a model has no more digits than that, the bundle may be a small factor further away.
    """
    own = laws.check_engine(
        lambda slots: TorchEngine(peer, slots),  # type: ignore[arg-type, return-value]
        precision=precision.name,
        **sides,
    )
    judged = []
    for result, other in zip(results, own, strict=True):
        # law 1 has one port; elsewhere another port's large error must not cover for this one
        applies = result.law == 1 or not other.passed
        if not result.passed and applies and result.worst and other.worst:
            note = (
                f"{result.note}; PyTorch at {precision.name} is {other.worst:.1e} from float64 "
                "itself: judged by that"
            )
            close = result.worst <= JUDGE_FACTOR * other.worst
            result = replace(result, passed=close, note=note)
        judged.append(result)
    return judged
