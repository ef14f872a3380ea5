"""ONNX against PyTorch, port by port: no graph counts as exported before it passed this.

Two kinds of trial. *Single passes*: random ids on random states, several batch sizes, block
counts and ragged commit lengths, one random past length per row. *Trajectories*: both sides carry
their own state over several blocks of real tokens, and denoise half-masked canvases in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
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
from fixedstate.runtime.compare import Comparison, Tolerance, compare, draw_inputs
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.session import Session
from fixedstate.spec import ModelSpec

BATCHES = (1, 2, 5)
BLOCKS = (1, 2, 7)
TRAJECTORY_BLOCKS = 4
CAPACITY = 256
"""Columns of the key and value buffers in single passes."""

_SMALL = 20_000_000  # weights

SAMPLE = (
    "set arm_3 17\nbattery low\nmove base_2\nget arm_3\n"
    "The state that is carried from block to block has a fixed size.\n"
    '{"name": "sample", "values": [1, 2, 3]}\n'
)
"""Real text for trajectories, encoded by the checkpoint's own tokenizer."""


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


def _compare_graphs(
    bundle: Bundle, denoiser: Denoiser, seed: int, progress: Callable[[str], None] | None
) -> dict[str, Any]:
    tolerance = Tolerance.of(bundle.precision.name)
    sessions = open_sessions(bundle, tuple(bundle.graphs), threads=1)
    ids, kind = _real_tokens(bundle)
    trials: list[tuple[str, Comparison]] = []
    for role, session in sessions.items():
        if progress is not None:
            progress(f"comparing {role} with PyTorch")
        rng = np.random.default_rng(seed)
        trials += _single_passes(bundle.spec, role, session, denoiser, rng, tolerance)
    if {"denoise", "commit"} <= set(sessions):
        if progress is not None:
            progress("comparing a trajectory with PyTorch")
        trials += _trajectory(sessions, denoiser, ids, tolerance)
    return _report(bundle, trials, tolerance, kind)


@contextlib.contextmanager
def _few_threads(denoiser: Denoiser) -> Iterator[None]:
    """One PyTorch thread for a small model: more wait for one another longer than they compute."""
    before = torch.get_num_threads()
    small = sum(tensor.numel() for tensor in denoiser.buffers()) < _SMALL
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(
    bundle: Bundle, trials: list[tuple[str, Comparison]], tolerance: Tolerance, kind: str
) -> dict[str, Any]:
    place, worst = max(
        trials,
        key=lambda trial: (not trial[1].passed, trial[1].worst.max_abs if trial[1].worst else 0.0),
    )
    port = worst.worst
    by_role: dict[str, float | None] = {}  # None where a number has no meaning: NaN, a shape
    for name, result in trials:
        role = name.partition(" ")[0]
        found = result.worst.max_abs if result.worst else float("nan")
        so_far = by_role.get(role, 0.0)
        meaningless = so_far is None or not np.isfinite(found)
        by_role[role] = None if meaningless else max(so_far or 0.0, found)
    return {
        "passed": all(result.passed for _, result in trials),
        "precision": bundle.precision.name,
        "reference": "PyTorch float32 on cpu, with the weights as the bundle stores them",
        "candidate": "ONNX Runtime, provider cpu, 1 thread, all optimisations",
        "tolerance": tolerance.to_dict(),
        "tokens": kind,
        "comparisons": sum(len(result.ports) for _, result in trials),
        "worst": {"trial": place, **(port.to_dict() if port is not None else {})},
        "max_abs_by_graph": by_role,
        "trials": [
            {
                "trial": name,
                "passed": result.passed,
                "worst": result.worst.to_dict() if result.worst else None,
            }
            for name, result in trials
        ],
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
    tolerance: Tolerance,
) -> Iterator[tuple[str, Comparison]]:
    graph = RoleGraph(denoiser, role.partition("@")[0])
    for rows in BATCHES:
        for blocks in BLOCKS if role.startswith("commit") else (1,):
            commit_length = _lengths(spec, role, rows, blocks, rng)
            feeds = draw_inputs(
                session.inputs,
                rng,
                vocab=spec.vocab_rows,
                past_length=rng.integers(0, CAPACITY + 1, rows),
                commit_length=commit_length,
                B=rows,
                n=blocks,
                m=blocks,
                C=CAPACITY,
            )
            place = f"{role} B={rows}"
            if role.startswith("commit"):
                place += f" n={blocks} commit_length={commit_length.tolist()}"
            expected = run_torch(graph, feeds)
            found = session.run(feeds)
            _cut(expected, found, commit_length, spec)
            yield place, compare(expected, found, tolerance, labels=("PyTorch", place))


def _cut(
    expected: dict[str, Array], found: dict[str, Array], lengths: Array, spec: ModelSpec
) -> None:
    """Zero the columns behind each row's length: the runtime never takes them over."""
    del spec
    for arrays in (expected, found):
        for name, array in arrays.items():
            if name.startswith(("present_key", "present_value")):
                array = np.array(array)
                for row, count in enumerate(lengths):
                    array[row, :, count:] = 0
                arrays[name] = array


def run_torch(graph: RoleGraph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a role in PyTorch, by port name, from arrays in any float dtype."""
    tensors = []
    for port in graph.inputs:
        array = feeds[port.name]
        wide = array.astype(np.float32) if array.dtype.kind == "f" else array
        tensors.append(torch.from_numpy(np.ascontiguousarray(wide)))
    with torch.inference_mode():
        results = graph(*tensors)
    return {port.name: result.numpy() for port, result in zip(graph.outputs, results, strict=True)}


def _trajectory(
    sessions: Mapping[str, Session], denoiser: Denoiser, ids: Array, tolerance: Tolerance
) -> Iterator[tuple[str, Comparison]]:
    """Both sides carry their own state over blocks of real tokens."""
    spec = denoiser.spec
    length = spec.block_len
    sides: list[_Side] = [_TorchSide(denoiser), _SessionSide(denoiser, sessions)]
    for block in range(TRAJECTORY_BLOCKS):
        piece = ids[None, block * length : (block + 1) * length]
        canvas = piece.copy()
        canvas[:, length // 2 :] = spec.mask_id if spec.mask_id is not None else 0
        logits = [side.denoise(canvas) for side in sides]
        yield (
            f"trajectory block {block} denoise",
            compare({"logits": logits[0]}, {"logits": logits[1]}, tolerance),
        )
        states = [side.commit(piece) for side in sides]
        yield f"trajectory block {block} commit", compare(states[0], states[1], tolerance)


class _Side:
    """One row's state carried by one back end; subclasses run the passes."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.past = 0
        self.state = {
            port.suffix: np.zeros(port.past.resolve(B=1, C=CAPACITY * 8), np.float32)
            for port in denoiser.state_spec.ports
        }

    def run(self, role: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One pass."""
        raise NotImplementedError

    def _feeds(self, role: str, ids: Array) -> dict[str, Array]:
        known: dict[str, Array] = {
            "input_ids": ids,
            "past_length": np.array([self.past]),
            "commit_length": np.array([ids.shape[1]]),
        }
        for port in self.denoiser.state_spec.ports:
            known[port.past.name] = self.state[port.suffix]
        return {port.name: known[port.name] for port in RoleGraph(self.denoiser, role).inputs}

    def denoise(self, ids: Array) -> Array:
        """Logits of a block."""
        return self.run("denoise", self._feeds("denoise", ids))["logits"]

    def commit(self, ids: Array) -> dict[str, Array]:
        """Carry a block into the state; give what the pass made."""
        made = self.run("commit", self._feeds("commit", ids))
        for port in self.denoiser.state_spec.ports:
            new = made[port.present.name].astype(np.float32)
            if port.update == "swap":
                self.state[port.suffix] = new
            else:
                self.state[port.suffix][:, :, self.past : self.past + new.shape[2]] = new
        self.past += ids.shape[1]
        return made


class _TorchSide(_Side):
    def run(self, role: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return run_torch(RoleGraph(self.denoiser, role), feeds)


class _SessionSide(_Side):
    def __init__(self, denoiser: Denoiser, sessions: Mapping[str, Session]) -> None:
        super().__init__(denoiser)
        self.sessions = sessions

    def run(self, role: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
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
        return "PyTorch cpu"

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
    if loaded.spec != spec:
        raise SpecError(
            f"{checkpoint} is not the checkpoint of {bundle.path}: their models differ; give the "
            "checkpoint the bundle was exported from"
        )
    denoiser = Denoiser(spec, as_stored(loaded.tensors, bundle.precision))
    with _few_threads(denoiser):
        return laws.check_bundle(
            bundle,
            recompute=lambda slots: TorchEngine(denoiser, slots, stateless=True),
            reference=lambda slots: TorchEngine(denoiser, slots),
            block_counts=block_counts,
            progress=progress,
            only=(1, 5),
        )
