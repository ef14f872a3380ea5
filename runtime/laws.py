"""The laws a bundle must keep, proved along whole trajectories, without PyTorch.

Law 1 cached == recomputed, 2 a denoise writes nothing committed, 3 one commit of k blocks == k
commits, 4 a row alone == the row in a batch, 5 another back end agrees, 6 the state's size does
not grow, 7 a row goes on from its saved state as if nothing had happened. Laws 1 and 5 take an
engine of another kind as reference where the caller has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fixedstate.bundle import Bundle
from fixedstate.errors import StateError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.compare import (
    PortDifference,
    Tolerance,
    coarsest,
    decoded,
    spread_difference,
)
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.engine import ReadableEngine, SessionEngine
from fixedstate.runtime.snapshot import Snapshot
from fixedstate.spec import ModelSpec

if TYPE_CHECKING:
    from fixedstate.runtime.deviceengine import DeviceEngine

BLOCK_COUNTS = (1, 2, 3, 33)
"""Blocks committed before the comparison: one, two, three, and across a longer prefill."""

TITLES = {
    1: "cached == recomputed",
    2: "denoise leaves the committed state",
    3: "one commit of k blocks == k commits",
    4: "alone == in a batch",
    5: "reference == this back end",
    6: "state bytes do not grow",
    7: "save, restore, continue == continue",
}

EngineFactory = Callable[[int], ReadableEngine]
"""Opens an engine with that many slots, all rows reset."""


@dataclass(frozen=True, slots=True)
class LawResult:
    """What became of one law.

    Attributes:
        law: Its number.
        title: What it says.
        passed: Whether it held everywhere it was tried.
        worst: Largest absolute difference seen, of scores that are judged by their divergence that
            in nats; None where bytes were compared.
        where: Block and port of the first divergence; of the worst difference where it passed.
        note: What was tried, or why something was not.
    """

    law: int
    title: str
    passed: bool
    worst: float | None
    where: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        worst = self.worst if self.worst is not None and np.isfinite(self.worst) else None
        return {
            "law": self.law,
            "title": self.title,
            "passed": self.passed,
            "worst": worst,
            "where": self.where,
            "note": self.note,
        }


@dataclass(slots=True)
class _Verdict:
    """Collects comparisons of one law, in the order in which they are made."""

    law: int
    tolerance: Tolerance
    worst: float | None = None
    where: str = ""
    first_failure: str = ""
    failure_size: float | None = None
    notes: list[str] = field(default_factory=list)

    def close(self, place: str, reference: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        """Compare within the tolerance."""
        for name in {**reference, **found}:
            arrays = reference.get(name), found.get(name)
            self._add(place, spread_difference(name, *arrays, self.tolerance)[0])

    def equal(self, place: str, reference: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        """Compare byte for byte."""
        for name, array in reference.items():
            if found[name].tobytes() != array.tobytes():
                self.fail(f"{place}, {name}: bytes differ", _gap(array, found[name]))

    def fail(self, where: str, size: float | None = None) -> None:
        """Note a failure; the first one is reported."""
        if not self.first_failure:
            self.first_failure, self.failure_size = where, size

    def _add(self, place: str, port: PortDifference) -> None:
        size = port.max_abs if port.kl is None else port.kl
        if not port.passed:
            self.fail(f"{place}, {port}", size)
        if size >= (self.worst or 0.0):
            self.worst, self.where = size, f"{place}, {port.name}"

    def result(self) -> LawResult:
        failed = bool(self.first_failure)
        worst = self.worst
        if failed and self.failure_size is not None:
            worst = max(self.failure_size, self.worst or 0.0)
        where = self.first_failure or self.where
        note = "; ".join(self.notes)
        return LawResult(self.law, TITLES[self.law], not failed, worst, where, note)


def _gap(a: Array, b: Array) -> float | None:
    if a.shape != b.shape:
        return None
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0))


def check_bundle(
    bundle: Bundle,
    *,
    provider: str = "cpu",
    recompute: EngineFactory | None = None,
    reference: EngineFactory | None = None,
    tolerance: Tolerance | None = None,
    seed: int = 0,
    block_counts: tuple[int, ...] = BLOCK_COUNTS,
    only: tuple[int, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> list[LawResult]:
    """Prove laws 1 to 7 on a bundle, with one thread per pass.

    Args:
        bundle: The opened bundle.
        provider: Where its graphs run.
        recompute: A stateless engine (it keeps the tokens and recomputes everything) for law 1.
        reference: An engine of another back end for law 5.
        tolerance: What may differ; if not given, the default of the coarsest format that the
            bundle keeps anything in.
        seed: Of the tokens.
        block_counts: Committed blocks at which law 1 compares.
        only: The laws to prove; all of them if empty.
        progress: Called with the title of each law before it is tried.

    Returns:
        One result per law that applies, in order.

    Raises:
        UsageError: for a model of objective ``full``, which has no cache.
    """
    if bundle.spec.objective == "full":
        raise UsageError(
            "this bundle's one graph looks at the whole sequence (objective 'full'): the laws are "
            "about a cache, and it has none; how far it is from PyTorch stands in its parity.json"
        )

    def candidate(slots: int) -> SessionEngine | DeviceEngine:
        return open_engine(bundle, threads=1, provider=provider, slots=slots)

    return check_engine(
        candidate,
        precision=bundle.precision.name,
        exact=provider == "cpu",
        recompute=recompute,
        reference=reference,
        tolerance=tolerance or Tolerance.of(tolerance_name(bundle)),
        seed=seed,
        block_counts=block_counts,
        only=only,
        progress=progress,
    )


def tolerance_name(bundle: Bundle) -> str:
    """The entry of the table of tolerances that a bundle is held against."""
    return coarsest(bundle.precision, quantized=bundle.is_quantized)


def check_engine(
    candidate: Callable[[int], SessionEngine | DeviceEngine],
    *,
    precision: str = "fp32",
    exact: bool = True,
    recompute: EngineFactory | None = None,
    reference: EngineFactory | None = None,
    tolerance: Tolerance | None = None,
    seed: int = 0,
    block_counts: tuple[int, ...] = BLOCK_COUNTS,
    only: tuple[int, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> list[LawResult]:
    """Prove laws 1 to 7 on engines that `candidate` opens; see :func:`check_bundle`.

    Args:
        candidate: Opens an engine with that many slots; it knows its weights.
        precision: Of its ports, for the default tolerance.
        exact: Whether its rows must be byte-identical after a restore, and in fp32 alone and in a
            batch.
        recompute: See :func:`check_bundle`.
        reference: See :func:`check_bundle`.
        tolerance: See :func:`check_bundle`.
        seed: See :func:`check_bundle`.
        block_counts: See :func:`check_bundle`.
        only: See :func:`check_bundle`.
        progress: See :func:`check_bundle`.
    """
    trial = _Trial(
        opens=candidate,
        engine=candidate(_SLOTS),
        tolerance=tolerance or Tolerance.of(precision),
        rng=np.random.default_rng(seed),
        exact=exact and precision == "fp32",
        repeatable=exact,
        block_counts=block_counts,
    )
    laws: dict[int, Callable[[], LawResult]] = {
        1: lambda: trial.law1(recompute),
        2: trial.law2,
        3: trial.law3,
        4: trial.law4,
        6: trial.law6,
        7: trial.law7,
    }
    if reference is not None:
        laws[5] = lambda: trial.law5(reference)
    results = []
    for number in sorted(laws):
        if only and number not in only:
            continue
        if progress is not None:
            progress(TITLES[number])
        results.append(laws[number]())
    return results


_SLOTS = 4
_AHEAD = 3  # blocks that a row goes on for from a saved state


_Named = dict[str, Array]


@dataclass(frozen=True, slots=True)
class _Saved:
    """A row as bytes, the tokens it went on with, and what it gave at each block."""

    place: str
    content: bytes
    tokens: Array
    went_on: list[_Named]


@dataclass(slots=True)
class _Trial:
    """One engine of four slots and the tokens it is tried on."""

    opens: Callable[[int], SessionEngine | DeviceEngine]
    engine: SessionEngine | DeviceEngine
    tolerance: Tolerance
    rng: np.random.Generator
    exact: bool
    repeatable: bool
    block_counts: tuple[int, ...]

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def tokens(self, rows: int, blocks: int) -> Array:
        """(rows, blocks * L) real tokens."""
        return self.rng.integers(0, self.spec.vocab_size, (rows, blocks * self.spec.block_len))

    def canvas(self, rows: int, remainder: int) -> Array:
        """(rows, L) ids of which the first `remainder` are real and the rest open."""
        fill = self.spec.mask_id if self.spec.mask_id is not None else 0
        out = np.full((rows, self.spec.block_len), fill, np.int64)
        out[:, :remainder] = self.tokens(rows, 1)[:, :remainder]
        return out

    # --- law 1

    def law1(self, recompute: EngineFactory | None) -> LawResult:
        """Logits behind k committed blocks, for every remainder, two generations in a row."""
        verdict = _Verdict(1, self.tolerance)
        verdict.notes.append(f"blocks {_list(self.block_counts)}, remainders 0..{self._last}")
        other = recompute(1) if recompute is not None else None
        if other is None:
            verdict.notes.append("recompute in PyTorch not run: give --checkpoint")
        for generation in (1, 2):
            for blocks in self.block_counts:
                ids = self.tokens(1, blocks)
                place = f"generation {generation}, block {blocks}"
                self._law1_at(verdict, place, ids, other)
        return verdict.result()

    @property
    def _last(self) -> int:
        return self.spec.block_len - 1

    def _law1_at(
        self, verdict: _Verdict, place: str, ids: Array, other: ReadableEngine | None
    ) -> None:
        canvases = [self.canvas(1, remainder) for remainder in range(self.spec.block_len)]
        self._start(self.engine, ids, whole=True)
        at_once = [_first_pass(self.engine, canvas).copy() for canvas in canvases]
        self._start(self.engine, ids, whole=False)
        if other is not None:
            self._start(other, ids, whole=True)
        for remainder, canvas in enumerate(canvases):
            found = _first_pass(self.engine, canvas)
            where = f"{place}, remainder {remainder}"
            verdict.close(where, {"logits": at_once[remainder]}, {"logits": found})
            if other is not None:
                verdict.close(
                    f"{where}, recomputed",
                    {"logits": _first_pass(other, canvas)},
                    {"logits": found},
                )

    def _start(self, engine: ReadableEngine, ids: Array, *, whole: bool) -> None:
        """Reset row 0 and commit the tokens at once or block by block."""
        engine.reset(0)
        step = ids.shape[1] if whole else self.spec.block_len
        for first in range(0, ids.shape[1], step):
            piece = ids[:, first : first + step]
            engine.commit(piece, np.array([piece.shape[1]]))

    # --- law 2

    def law2(self) -> LawResult:
        """The digest of every committed byte, before and after passes of every batch size."""
        verdict = _Verdict(2, self.tolerance)
        engine = self.engine
        for blocks in range(4):
            if blocks:
                engine.commit(self.tokens(_SLOTS, 1), np.full(_SLOTS, self.spec.block_len))
            else:
                self._reset_all()
            for rows in range(1, _SLOTS + 1):
                before = engine.buffers.hash()
                for remainder in (0, 1, self._last):
                    engine.denoise(self.canvas(rows, remainder))
                after = engine.buffers.hash()
                for name in before:
                    if before[name] != after[name]:
                        verdict.fail(f"block {blocks}, {name}: changed by a pass of {rows} rows")
        verdict.notes.append(f"{_SLOTS} rows, 0 to 3 blocks, byte for byte")
        return verdict.result()

    def _reset_all(self) -> None:
        for row in range(_SLOTS):
            self.engine.reset(row)

    # --- law 3

    def law3(self) -> LawResult:
        """The state after one commit of k blocks and after k commits, each row with its own k."""
        verdict = _Verdict(3, self.tolerance)
        length = self.spec.block_len
        for blocks in self.block_counts:
            ids = self.tokens(_SLOTS, blocks)
            counts = np.array([max(blocks - row, 0) for row in range(_SLOTS)])
            self._reset_all()
            self.engine.commit(ids, counts * length)
            at_once = [self.engine.read(row) for row in range(_SLOTS)]
            self._reset_all()
            for block in range(blocks):
                piece = ids[:, block * length : (block + 1) * length]
                self.engine.commit(piece, np.where(block < counts, length, 0))
            for row in range(_SLOTS):
                self._close(verdict)(
                    f"block {blocks}, row {row}", at_once[row], self.engine.read(row)
                )
        verdict.notes.append(f"k {_list(self.block_counts)}, rows of unequal length")
        return verdict.result()

    # --- law 4

    def law4(self) -> LawResult:
        """A row's trajectory alone, and in batches among garbage, in any order of rows."""
        verdict = _Verdict(4, self.tolerance)
        blocks = 5
        ids = self.tokens(_SLOTS, blocks)
        canvases = [self.canvas(_SLOTS, self.spec.block_len // 2) for _ in range(blocks + 1)]
        alone = [list(self._row_alone(ids[row], canvases, row)) for row in range(_SLOTS)]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 3, 2]):
            self._batch(verdict, order, ids, canvases, alone)
        how = "byte for byte" if self.exact else "within the tolerance"
        verdict.notes.append(f"rows of unequal length in four orders among garbage, {how}")
        if self.exact:
            verdict.worst = None
        return verdict.result()

    def _row_alone(self, ids: Array, canvases: list[Array], row: int) -> Iterator[dict[str, Array]]:
        """At each of the row's blocks the state that enters it and the logits."""
        length = self.spec.block_len
        self.engine.reset(0)
        for block in range(_blocks_of(row) + 1):
            logits = _first_pass(self.engine, canvases[block][row : row + 1])[0].copy()
            yield self.engine.read(0) | {"logits": logits}
            piece = ids[None, block * length : (block + 1) * length]
            if block < _blocks_of(row):
                self.engine.commit(piece, np.array([length]))

    def _batch(
        self,
        verdict: _Verdict,
        order: list[int],
        ids: Array,
        canvases: list[Array],
        alone: list[list[dict[str, Array]]],
    ) -> None:
        """The same rows together; a row that has ended holds garbage from then on."""
        engine, length = self.engine, self.spec.block_len
        for slot in range(_SLOTS):
            engine.buffers.scribble(slot, self.rng, behind=False)
            engine.reset(slot)
        for block in range(max(_blocks_of(row) for row in order) + 1):
            for slot, row in enumerate(order):
                engine.buffers.scribble(slot, self.rng, behind=block <= _blocks_of(row))
            logits = _first_pass(engine, canvases[block][order])
            for slot, row in enumerate(order):
                if block <= _blocks_of(row):
                    found = engine.read(slot) | {"logits": logits[slot]}
                    self._judge(verdict, f"rows {order}, row {row}, block {block}")(
                        alone[row][block], found
                    )
            lengths = np.array([length if block < _blocks_of(row) else 0 for row in order])
            if lengths.any():
                engine.commit(ids[order, block * length : (block + 1) * length], lengths)

    def _judge(
        self, verdict: _Verdict, place: str
    ) -> Callable[[Mapping[str, Array], Mapping[str, Array]], None]:
        compare = verdict.equal if self.exact else self._close(verdict)
        return lambda reference, found: compare(place, reference, found)

    def _close(
        self, verdict: _Verdict
    ) -> Callable[[str, Mapping[str, Array], Mapping[str, Array]], None]:
        """Compares what this engine carries, and logits, within the tolerance."""
        state, spec = self.engine.state, self.spec
        return lambda place, reference, found: verdict.close(
            place, decoded(state, reference, spec), decoded(state, found, spec)
        )

    # --- law 5

    def law5(self, reference: EngineFactory) -> LawResult:
        """Logits and state of two back ends along one trajectory of ragged rows."""
        verdict = _Verdict(5, self.tolerance)
        by_number = self.tolerance.kl is None
        other = reference(_SLOTS)
        length = self.spec.block_len
        self._reset_all()
        for row in range(_SLOTS):
            other.reset(row)
        for block in range(max(self.block_counts)):
            canvas = self.canvas(_SLOTS, block % length)
            place = f"block {block}"
            for step in range(2 if self.spec.self_conditioning_width else 1):
                verdict.close(
                    f"{place}, pass {step + 1}" if step else place,
                    {"logits": other.denoise(canvas)},
                    {"logits": self.engine.denoise(canvas)},
                )
            ids = self.tokens(_SLOTS, 1)
            lengths = np.array([length if block % (row + 1) == 0 else 0 for row in range(_SLOTS)])
            self.engine.commit(ids, lengths)
            other.commit(ids, lengths)
            for row in range(_SLOTS if by_number else 0):
                self._close(verdict)(f"{place}, row {row}", other.read(row), self.engine.read(row))
        what = "logits and state" if by_number else "logits, which the state leads to"
        verdict.notes.append(f"{max(self.block_counts)} blocks, ragged commits, {what}")
        verdict.notes.append(f"reference: {other.provider}")
        return verdict.result()

    # --- law 6

    def law6(self) -> LawResult:
        """Allocated bytes after 1k tokens and with 256k tokens behind the row."""
        verdict = _Verdict(6, self.tolerance)
        buffers, length = self.engine.buffers, self.spec.block_len
        kv = buffers.state.kv_bytes_per_token()
        self._reset_all()
        blocks = max(1, min(8, 1024 // length))
        for _ in range(-(-1024 // (blocks * length))):
            self.engine.commit(self.tokens(1, blocks), np.array([blocks * length]))
        constant = {port.suffix for port in buffers.state.swapped}
        before = {name: size for name, size in buffers.nbytes.items() if name in constant}
        if not kv:
            # No buffer's size depends on how many tokens are behind: the row may as well be there.
            buffers.past_length[0] = 256 * 1024 // length * length
        for _ in range(2):
            self.engine.commit(self.tokens(1, 1), np.array([length]))
        for name, size in before.items():
            if buffers.nbytes[name] != size:
                verdict.fail(f"{name}: {size} bytes became {buffers.nbytes[name]}")
        text = f"{buffers.state_bytes} bytes per row at 1k and at 256k tokens"
        if kv:
            text = f"{buffers.state_bytes} bytes per row constant; attention adds {kv} per token"
        verdict.notes.append(text)
        self.engine.reset(0)
        return verdict.result()

    # --- law 7

    def law7(self) -> LawResult:
        """Rows saved as bytes go on in another slot, and then in another engine, as they did."""
        verdict = _Verdict(7, self.tolerance)
        rows = [row for blocks in self.block_counts if (row := self._save(verdict, blocks))]
        self._restore(verdict, "slot 3", 3, rows)
        del self.engine  # with a second one beside it the weights would be in memory twice
        self.engine = self.opens(2)
        self._restore(verdict, "another engine", 1, rows)
        how = "byte for byte" if self.repeatable else "within the tolerance"
        verdict.notes.append(
            f"saved after {_list(self.block_counts)} blocks, {_AHEAD} blocks further in another "
            f"slot and in another engine, {how}"
        )
        if self.repeatable:
            verdict.worst = None
        return verdict.result()

    def _save(self, verdict: _Verdict, blocks: int) -> _Saved | None:
        """A row of that many blocks as bytes, and how it goes on without them."""
        engine, place = self.engine, f"block {blocks}"
        self._start(engine, self.tokens(1, blocks), whole=True)
        tokens = self.tokens(1, _AHEAD)
        tokens[tokens == self.spec.mask_id] = 0 if self.spec.mask_id else 1  # no token to be saved
        pending = tuple(tokens[0, : self.spec.block_len // 2].tolist())
        try:
            content = Snapshot.take(engine, 0, pending, seed=blocks).to_bytes()
            saved = Snapshot.from_bytes(content)
        except StateError as err:
            verdict.fail(f"{place}: {err}")
            return None
        verdict.equal(f"{place}, saved", engine.read(0), saved.arrays)
        if (saved.past_length, saved.pending, saved.seed) != (
            engine.past_length[0],
            pending,
            blocks,
        ):
            verdict.fail(f"{place}, saved: past_length, pending ids or seed are others")
        return _Saved(place, content, tokens, list(self._go_on(0, pending, tokens)))

    def _restore(self, verdict: _Verdict, where: str, slot: int, rows: list[_Saved]) -> None:
        """Put every row into that slot, over garbage, and let it go on there."""
        compare = verdict.equal if self.repeatable else self._close(verdict)
        for row in rows:
            self.engine.buffers.scribble(slot, self.rng, behind=False)
            saved = Snapshot.from_bytes(row.content)
            try:
                saved.restore(self.engine, slot)
            except StateError as err:
                verdict.fail(f"{row.place}, {where}: {err}")
                continue
            verdict.equal(f"{row.place}, {where}", saved.arrays, self.engine.read(slot))
            again = self._go_on(slot, saved.pending, row.tokens)
            for ahead, (expected, got) in enumerate(zip(row.went_on, again, strict=True), 1):
                compare(f"{row.place} + {ahead}, {where}", expected, got)

    def _go_on(self, slot: int, pending: tuple[int, ...], tokens: Array) -> Iterator[_Named]:
        """The logits of each block, and the state behind the last one."""
        engine, length = self.engine, self.spec.block_len
        for block in range(_AHEAD):
            canvas = self.canvas(1, 0)
            if block == 0:
                canvas[0, : len(pending)] = pending
            found = {}
            for step in range(2 if self.spec.self_conditioning_width else 1):
                found[f"logits of pass {step + 1}"] = engine.denoise(canvas, slot).copy()
            if self.spec.logit_shift:
                found["last_logits"] = engine.last_logits[slot].copy()
            piece = tokens[:, block * length : (block + 1) * length]
            engine.commit(piece, np.array([length]), slot)
            yield found if block < _AHEAD - 1 else found | engine.read(slot)


def _first_pass(engine: ReadableEngine, canvas: Array) -> Array:
    """Logits of a canvas as the first pass of its block, whatever was denoised before."""
    for row in range(len(canvas)):
        engine.begin_block(row)
    return engine.denoise(canvas)


def _blocks_of(row: int) -> int:
    """Blocks of a row in the batch trials: unequal, and one of them ends at once."""
    return (5, 3, 4, 1)[row]


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
