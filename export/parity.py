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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fixedstate.bundle import Bundle
from fixedstate.errors import ParityError, SpecError, UsageError
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.denoiser import Denoiser, RoleGraph, as_stored
from fixedstate.ports import Array
from fixedstate.runtime import laws
from fixedstate.runtime.compare import (
    Comparison,
    PortDifference,
    Tolerance,
    compare,
    draw_inputs,
)
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.session import Session
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision

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
sums. The relative tolerance is stretched by the same factor and not more."""

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
        if port.passed or port.problem:
            continue
        truth = exact[port.name].astype(np.float64)
        ours = float(np.abs(candidate[port.name] - truth).max())
        theirs = float(np.abs(peer[port.name].astype(np.float64) - truth).max())
        within = port.max_rel <= JUDGE_FACTOR * result.tolerance.relative
        close = within and ours <= JUDGE_FACTOR * theirs
        judged[port.name] = {"candidate": ours, "pytorch": theirs, "passed": close}
    return Trial(result.candidate, result, judged)


def compare_graphs(
    bundle: Bundle,
    denoiser: Denoiser,
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
    with _few_threads(denoiser):
        return _compare_graphs(bundle, denoiser, seed, progress)


def _is_small(denoiser: Denoiser) -> bool:
    return sum(tensor.numel() for tensor in denoiser.buffers()) < _SMALL


@contextlib.contextmanager
def _few_threads(denoiser: Denoiser) -> Iterator[None]:
    """One PyTorch thread for a small model: more wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if _is_small(denoiser) else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_graphs(
    bundle: Bundle, denoiser: Denoiser, seed: int, progress: Callable[[str], None] | None
) -> dict[str, Any]:
    sessions = open_sessions(bundle, tuple(bundle.graphs), threads=1)
    ids, kind = _real_tokens(bundle)
    trials: list[Trial] = []
    for role, session in sessions.items():
        if progress is not None:
            progress(f"comparing {role} with PyTorch")
        rng = np.random.default_rng(seed)
        trials += _single_passes(bundle.spec, role, session, denoiser, rng, bundle.precision)
    if {"denoise", "commit"} <= set(sessions):
        if progress is not None:
            progress("comparing a trajectory with PyTorch")
        trials += _trajectory(sessions, denoiser, ids, bundle.precision)
    return _report(bundle, trials, kind)


def _report(bundle: Bundle, trials: list[Trial], kind: str) -> dict[str, Any]:
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
    raise ParityError(
        f"the exported graphs differ from PyTorch in {failed} of {len(report['trials'])} trials, "
        f"worst at {worst['trial']}, port {worst['name']}: {what} (allowed at "
        f"{limit['precision']}: absolute {limit['absolute']}, relative {limit['relative']}); no "
        "bundle was written, please report this model"
    )


def _real_tokens(bundle: Bundle) -> tuple[Array, str]:
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
    if role == "commit_denoise":
        return rng.integers(blocks - 1, blocks + 1, rows) * length
    if spec.causal_commit:
        return rng.integers(0, blocks * length + 1, rows)
    return rng.integers(0, blocks + 1, rows) * length


def _single_passes(
    spec: ModelSpec,
    role: str,
    session: Session,
    denoiser: Denoiser,
    rng: np.random.Generator,
    precision: Precision,
) -> Iterator[Trial]:
    tolerance = Tolerance.of(precision.name)
    graph = RoleGraph(denoiser, role.partition("@")[0])
    for rows in BATCHES:
        for blocks in BLOCKS if role.startswith("commit") else (1,):
            commit_length = _lengths(spec, role, rows, blocks, rng)
            state, past_length = _made_state(denoiser, rows, rng)
            feeds = draw_inputs(
                session.inputs,
                rng,
                vocab=spec.vocab_rows,
                past_length=past_length,
                commit_length=commit_length,
                B=rows,
                n=blocks,
                m=blocks,
                C=CAPACITY * _HISTORY,
            )
            for port in denoiser.state_spec.ports:
                if port.past.name in feeds:
                    dtype = feeds[port.past.name].dtype
                    feeds[port.past.name] = state[port.suffix].numpy().astype(dtype)
            place = f"{role} B={rows}"
            if role.startswith("commit"):
                place += f" n={blocks} commit_length={commit_length.tolist()}"
            expected, found = run_torch(graph, feeds), session.run(feeds)
            _cut(expected, found, commit_length)
            result = compare(expected, found, tolerance, labels=("PyTorch", place))
            exact: Side = {}
            peer: Side = {}
            if not result.passed:
                wide = RoleGraph(_in_float64(denoiser), graph.role)
                exact = run_torch(wide, feeds, np.float64)
                peer = run_torch(RoleGraph(denoiser.at(precision), graph.role), feeds, None)
                _cut(exact, peer, commit_length)
            yield judge(result, exact, peer, found)


_HISTORY = 3
"""Blocks of random tokens, at most, behind the states of single passes."""


def _made_state(
    denoiser: Denoiser, rows: int, rng: np.random.Generator
) -> tuple[dict[str, torch.Tensor], Array]:
    """States as a model makes them, one history per row, and garbage behind each row's tokens."""
    spec = denoiser.spec
    blocks = rng.integers(0, _HISTORY + 1, rows)
    ids = torch.from_numpy(rng.integers(0, spec.vocab_rows, (rows, _HISTORY * spec.block_len)))
    length = torch.from_numpy(blocks * spec.block_len)
    state = denoiser.zero_state(rows, CAPACITY * _HISTORY)
    with torch.inference_mode():
        made = denoiser.commit(ids, state, torch.zeros(rows, dtype=torch.int64), length)
    for port in denoiser.state_spec.ports:
        new = made[port.suffix]
        if port.update == "swap":
            state[port.suffix] = new
            continue
        garbage = rng.standard_normal(tuple(state[port.suffix].shape))
        buffer = torch.from_numpy(garbage.astype(np.float32))
        for row, count in enumerate(length.tolist()):
            buffer[row, :, :count] = new[row, :, :count]
        state[port.suffix] = buffer
    return state, length.numpy()


def _in_float64(denoiser: Denoiser) -> Denoiser:
    """The same denoiser computing in float64."""
    return copy.deepcopy(denoiser).double()


def _cut(expected: Side, found: Side, lengths: Array) -> None:
    """Zero the columns behind each row's length: the runtime never takes them over."""
    for arrays in (expected, found):
        for name, array in arrays.items():
            if name.startswith(("present_key", "present_value")):
                array = np.array(array)
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


def _trajectory(
    sessions: Mapping[str, Session], denoiser: Denoiser, ids: Array, precision: Precision
) -> Iterator[Trial]:
    """Every side carries its own state over blocks of real tokens."""
    tolerance = Tolerance.of(precision.name)
    spec = denoiser.spec
    length = spec.block_len
    exact = _TorchSide(_in_float64(denoiser), np.float64)
    sides: list[_Carried] = [_TorchSide(denoiser), _SessionSide(denoiser, sessions), exact]
    if precision != denoiser.precision:  # else PyTorch's float32 side is the peer itself
        sides.append(_TorchSide(denoiser.at(precision), None))
    for block in range(TRAJECTORY_BLOCKS):
        piece = ids[None, block * length : (block + 1) * length]
        canvas = piece.copy()
        canvas[:, length // 2 :] = spec.mask_id if spec.mask_id is not None else 0
        for step, run in (("denoise", _Carried.denoise), ("commit", _Carried.commit)):
            tokens = canvas if step == "denoise" else piece
            torch32, found, torch64, *other = (run(side, tokens) for side in sides)
            place = f"trajectory block {block} {step}"
            result = compare(torch32, found, tolerance, labels=("PyTorch", place))
            yield judge(result, torch64, other[0] if other else torch32, found)


class _Carried:
    """One row's state carried by one back end; subclasses run the passes."""

    def __init__(self, denoiser: Denoiser, dtype: Any | None = np.float32) -> None:
        self.denoiser = denoiser
        self.dtype = dtype
        kept = np.float64 if dtype == np.float64 else np.float32
        self.past = 0
        columns = TRAJECTORY_BLOCKS * denoiser.spec.block_len
        self.state = {
            port.suffix: np.zeros(port.past.resolve(B=1, C=columns), kept)
            for port in denoiser.state_spec.ports
        }

    def run(self, role: str, feeds: Mapping[str, Array]) -> Side:
        """One pass."""
        raise NotImplementedError

    def _feeds(self, role: str, ids: Array) -> Side:
        known: Side = {
            "input_ids": ids,
            "past_length": np.array([self.past]),
            "commit_length": np.array([ids.shape[1]]),
        }
        for port in self.denoiser.state_spec.ports:
            known[port.past.name] = self.state[port.suffix]
        return {port.name: known[port.name] for port in RoleGraph(self.denoiser, role).inputs}

    def denoise(self, ids: Array) -> Side:
        """Logits of a block."""
        return self.run("denoise", self._feeds("denoise", ids))

    def commit(self, ids: Array) -> Side:
        """Carry a block into the state; give what the pass made."""
        made = self.run("commit", self._feeds("commit", ids))
        for port in self.denoiser.state_spec.ports:
            new = made[port.present.name].astype(self.state[port.suffix].dtype)
            if port.update == "swap":
                self.state[port.suffix] = new
            else:
                self.state[port.suffix][:, :, self.past : self.past + new.shape[2]] = new
        self.past += ids.shape[1]
        return made


class _TorchSide(_Carried):
    def run(self, role: str, feeds: Mapping[str, Array]) -> Side:
        return run_torch(RoleGraph(self.denoiser, role), feeds, self.dtype)


class _SessionSide(_Carried):
    def __init__(self, denoiser: Denoiser, sessions: Mapping[str, Session]) -> None:
        super().__init__(denoiser)
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

    def __init__(self, denoiser: Denoiser, slots: int, *, stateless: bool = False) -> None:
        self._denoiser = denoiser
        self._slots = slots
        self._stateless = stateless
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._rows: list[dict[str, torch.Tensor]] = [
            denoiser.zero_state(1, 0) for _ in range(slots)
        ]

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
        return f"PyTorch cpu {str(self._denoiser.weight('embedding.weight').dtype)[6:]}"

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
        return self._denoiser.denoise(block, self._rows[row], length).numpy()

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
            made = denoiser.commit(
                torch.from_numpy(ids)[None], state, torch.tensor([past]), torch.tensor([count])
            )
        for port in denoiser.state_spec.ports:
            new = made[port.suffix]
            if port.update == "append":
                new = torch.cat([state[port.suffix], new[:, :, :count]], 2)
            state[port.suffix] = new

    def reset(self, row: int) -> None:
        """Give a row the state it has before its first token."""
        self._tokens[row] = []
        self._rows[row] = self._denoiser.zero_state(1, 0)

    def move(self, source: int, target: int) -> None:
        """Copy a row over another."""
        self._tokens[target] = list(self._tokens[source])
        self._rows[target] = dict(self._rows[source])

    def state_bytes(self) -> int:
        """Bytes of constant-size state per row."""
        return self._denoiser.state_spec.state_bytes()

    def kv_bytes(self, past_length: int) -> int:
        """Bytes of keys and values per row."""
        return past_length * self._denoiser.state_spec.kv_bytes_per_token()

    def read(self, row: int) -> dict[str, Array]:
        """The carried tensors of one row, by suffix."""
        return {name: value[0].numpy() for name, value in self._rows[row].items()}


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
    """
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
    right = _in_float64(denoiser) if small else denoiser
    sides: dict[str, Any] = {
        "recompute": lambda slots: TorchEngine(right, slots, stateless=True),
        "reference": lambda slots: TorchEngine(right, slots),
        "block_counts": block_counts,
        "only": (1, 5),
    }
    with _few_threads(denoiser):
        results = laws.check_bundle(bundle, progress=progress, **sides)
        if small and not all(result.passed for result in results):
            results = _judged(results, denoiser.at(bundle.precision), bundle.precision, sides)
    return results


def _judged(
    results: list[laws.LawResult], peer: Denoiser, precision: Precision, sides: dict[str, Any]
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
