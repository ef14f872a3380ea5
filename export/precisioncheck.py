"""Graphs converted to another precision beside the float32 ones, along trajectories."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir

from fixedstate.bundle import WEIGHTS, Bundle, Graph, write_atomic
from fixedstate.calib.apply import has_four_bit_floats
from fixedstate.errors import ParityError, UsageError
from fixedstate.export.precisionplan import HALVES
from fixedstate.export.precisionrounding import (
    emulate_half,
    multiply_out,
    rounds_activations,
    skip_activation_rounding,
)
from fixedstate.ports import Array, numpy_dtype
from fixedstate.runtime.against import measure_head
from fixedstate.runtime.compare import (
    PortDifference,
    Spread,
    Tolerance,
    decoded,
    draw_inputs,
    spread_difference,
)
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.ort import OrtSession, open_sessions
from fixedstate.spec import ModelSpec
from fixedstate.state import KvFormat, StateSpec, graph_ports, split_role

CHECKED_BLOCKS = 4
"""Blocks along which :func:`check_precision` compares."""

SAMPLE = (
    "set lamp_2 on\nset lamp_7 off\nread sensor_4\nsensor_4 is 21.5\nmove arm_1 to 40 12\n"
    "Once the state has a fixed size, a long text costs as much memory as a short one.\n"
    '{"arm": 1, "place": [40, 12], "lamps": {"2": true, "7": false}}\n'
    "for name in names:\n    print(name, count[name] + 1)\n"
)
"""Text along which models with a tokenizer are compared."""

_STEPS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "int8row": 1 / 127,
    "int8": 1 / 127,
    "float8_e4m3fn": 32 / 448,
}
_CHECKED_ROWS = 3
_ROUNDED = ".rounded.onnx"  # how the files end that are run in place of half graphs


@dataclass(frozen=True, slots=True)
class _Found:
    """How far one port of a converted graph is from float32, and what was allowed.

    Attributes:
        place: Where on the way.
        port: Its name, and the row where it is a state.
        max_abs: Largest difference.
        max_rel: The same as a share of the port's deviation.
        rms_rel: Root mean square of the difference, as such a share.
        peak_rel: Largest difference as a share of the port's largest value.
        allowed: Share that was allowed.
        passed: Whether that is allowed.
        problem: What is wrong beside the size of the difference.
    """

    place: str
    port: str
    max_abs: float
    max_rel: float
    rms_rel: float
    peak_rel: float
    allowed: float
    passed: bool
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; numbers that have no meaning are None."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return {
            k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in out.items()
        }


def check_precision(
    bundle: Bundle,
    converted: Bundle,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare converted graphs with the float32 ones along trajectories, in ONNX Runtime.

    Each side carries its own state over :data:`CHECKED_BLOCKS` blocks of :data:`SAMPLE`, of random
    tokens where the bundle has no tokenizer, and denoises blocks of which half is masked. Half
    graphs run in float32 as :mod:`fixedstate.export.precisionrounding` rounds them.
    One graph at a time is loaded, since each holds all weights: states go from a graph that
    commits to one that denoises as arrays. Where no graph commits, a graph that denoises reads the
    states of the float32 side.

    A port passes if the root mean square of the difference is within the tolerance's share of its
    deviation and the largest difference within that share of its largest value, or if all of it is
    below the tolerance's floor. The largest difference as a share of the deviation stands in the
    report and does not decide: it is the size of one value among some thousands, and a scan state
    of few large values among many small ones has a deviation far below the large. Tokens of a
    reduced head may be others if float32 scores them as high within twice the tolerance.

    Where activations are quantised, a value near the middle of two steps goes to the other one for
    the smallest change, in half as in another order of summation. So graphs are compared twice:
    without those roundings on either side, which the tolerance is for, and as they are, where a
    port may differ by twice as much more as the roundings change it in the float32 graph: once for
    each side. States, keys and values that are stored in fewer bits are compared as the numbers
    that they stand for, and may differ by one step of their format beside.

    Args:
        bundle: The float32 bundle, its weights quantised or not.
        converted: What :func:`fixedstate.export.precisionfiles.convert_bundle` made of it, of any
            of its roles.
        seed: Of masks and random tokens.
        threads: Of a pass; None for ONNX Runtime's choice.
        progress: Told what is compared.

    Returns:
        ``kind`` (how it was run), ``reference``, ``passed``, ``graphs``, ``tokens``, ``blocks``,
        ``comparisons``, ``worst`` (place, port and sizes), ``largest`` (each size at its worst over
        all logits and states), ``beyond_deviation`` (of these, arrays whose largest difference is
        more than the tolerance's share of the deviation) and ``tolerance``. Where activations are
        quantised these are of graphs without; ``activations`` holds ``passed``, ``worst`` and
        ``largest`` of the graphs as they are, and ``rounding``, the most that was allowed for it.
        :func:`require_precision` raises where it failed.

    Raises:
        BackendError: where ONNX Runtime cannot run a graph.
    """
    say = progress or (lambda _: None)
    name = converted.precision.name
    tolerance = Tolerance.of(name)
    roles = list(converted.graphs)
    found: list[_Found] = []
    reduced: list[_Found] = []
    rounded: list[_Found] = []
    ids = _tokens(bundle)
    way = _Way.of(bundle.spec, ids, seed)
    with contextlib.ExitStack() as stack:
        runnable = stack.enter_context(_runnable(converted))
        if _any_graph(bundle, has_four_bit_floats):
            bundle = stack.enter_context(_variant(bundle, multiply_out))
        right, given, quantized = bundle, runnable, _any_graph(runnable, rounds_activations)
        if quantized:
            right = stack.enter_context(_variant(bundle, skip_activation_rounding))
            given = stack.enter_context(_variant(runnable, skip_activation_rounding))
        for group in _groups(roles):
            say(f"comparing {', '.join(group)} at {name} with float32")
            if split_role(group[0])[1] != "logits":
                reduced += _head_differences(right, given, group[0], seed, threads, tolerance)
                continue
            found += _differences(right, given, group, way, threads, tolerance)
            if quantized:
                say(f"comparing {', '.join(group)} at {name} with its activations quantised")
                effect = _differences(right, bundle, group, way, threads, tolerance)
                more = _allowances(effect)
                rounded += _differences(bundle, runnable, group, way, threads, tolerance, more)
    report = {
        "kind": f"{name} graphs in ONNX Runtime on the CPU, in float32 rounded by pairs of casts"
        + (", activations not quantised" if quantized else ""),
        "reference": "the bundle's float32 graphs in ONNX Runtime on the CPU",
        "passed": all(one.passed for one in (*found, *reduced, *rounded)),
        "graphs": roles,
        "tokens": "random" if ids is None else "text",
        "blocks": CHECKED_BLOCKS,
        "comparisons": len(found) + len(reduced),
        "worst": _worst([*found, *reduced]).to_dict(),
        "largest": _largest(found),
        "beyond_deviation": sum(
            not tolerance.allows(one.max_abs, one.max_rel) for one in found if not one.problem
        ),
        "tolerance": tolerance.to_dict(),
    }
    if quantized and rounded:
        report["activations"] = {
            "passed": all(one.passed for one in rounded),
            "comparisons": len(rounded),
            "worst": _worst(rounded).to_dict(),
            "largest": _largest(rounded),
            "rounding": max(one.allowed for one in rounded) - tolerance.relative,
        }
    return report


def _allowances(effect: Iterable[_Found]) -> dict[str, float]:
    """By port, what graphs may differ by that round activations apart: the effect on each side."""
    found: dict[str, float] = {}
    for one in effect:
        port = one.port.partition(",")[0]  # whatever the row
        found[port] = max(found.get(port, 0.0), 2 * one.rms_rel, 2 * one.peak_rel)
    return found


def _worst(found: Iterable[_Found]) -> _Found:
    return max(found, key=lambda one: (not one.passed, bool(one.problem), one.max_rel))


def _largest(found: Iterable[_Found]) -> dict[str, float]:
    """Each size at its worst."""
    sized = [one for one in found if not one.problem]
    sizes = ("max_rel", "rms_rel", "peak_rel")
    return {name: max((getattr(one, name) for one in sized), default=0.0) for name in sizes}


def require_precision(report: Mapping[str, Any], fp32_layers: Collection[int] = ()) -> None:
    """Raise where the graphs of a precision are not close enough to float32.

    Args:
        report: What :func:`check_precision` gave.
        fp32_layers: The layers that stayed float32.

    Raises:
        ParityError: naming place, port, size and tolerance, and what to do.
    """
    if report["passed"]:
        return
    worst, limit = report["worst"], report["tolerance"]
    if worst["passed"]:
        worst = report["activations"]["worst"]
    what = worst["problem"] or (
        f"differs by {worst['max_abs']:.3g}, {worst['max_rel']:.3g} of its deviation "
        f"({worst['rms_rel']:.3g} root mean square), {worst['peak_rel']:.3g} of its largest value"
    )
    also = "more layers" if fp32_layers else "layers"
    other = "bf16 or fp32" if limit["precision"] == "fp16" else "fp32"
    raise ParityError(
        f"{limit['precision']} graphs differ from float32: {worst['place']}, {worst['port']}: "
        f"{what} (allowed: {worst['allowed']:.3g}): build at --precision {other}, or keep {also} "
        "in float32 with --fp32-layers"
    )


def _difference(place: str, port: str, right: Array, given: Array, tolerance: Tolerance) -> _Found:
    """How one port differs."""
    found, spread = spread_difference(port, right, given, tolerance)
    return _found(place, found, spread, tolerance)


def _found(place: str, port: PortDifference, spread: Spread, tolerance: Tolerance) -> _Found:
    return _Found(
        place,
        port.name,
        port.max_abs,
        port.max_rel,
        spread.rms_rel,
        spread.peak_rel,
        tolerance.relative,
        port.passed,
        port.problem,
    )


@contextlib.contextmanager
def _runnable(converted: Bundle) -> Iterator[Bundle]:
    """The bundle as float32 graphs that round, which ONNX Runtime's CPU provider runs as told."""
    precision = converted.precision.at("float32")
    state = StateSpec.of(converted.spec, precision)
    kept = {
        port.name
        for pair in state.ports
        for port in (pair.past, pair.present)
        if port.dtype in HALVES
    }
    made: dict[str, Graph] = {}
    try:
        for role, graph in converted.graphs.items():
            model = emulate_half(multiply_out(ir.load(converted.path / graph.file)), kept)
            inputs, outputs = graph_ports(converted.spec, state, role, graph.top_k)
            made[role] = replace(graph, file=role + _ROUNDED, inputs=inputs, outputs=outputs)
            data = ir.to_proto(model).SerializeToString()
            write_atomic(converted.path / made[role].file, data)
        yield replace(converted, precision=precision, state=state, graphs=made)
    finally:
        for graph in made.values():
            (converted.path / graph.file).unlink(missing_ok=True)


def _any_graph(bundle: Bundle, holds: Callable[[ir.Model], bool]) -> bool:
    """Whether something holds for a graph of a bundle."""
    return any(holds(ir.load(bundle.path / graph.file)) for graph in bundle.graphs.values())


@contextlib.contextmanager
def _variant(bundle: Bundle, change: Callable[[ir.Model], ir.Model]) -> Iterator[Bundle]:
    """The bundle with its graphs changed, over the same weights."""
    with TemporaryDirectory(prefix="fixedstate.") as name:
        folder = Path(name)
        (folder / WEIGHTS).symlink_to((bundle.path / WEIGHTS).resolve())
        for graph in bundle.graphs.values():
            model = change(ir.load(bundle.path / graph.file))
            (folder / graph.file).write_bytes(ir.to_proto(model).SerializeToString())
        yield replace(bundle, path=folder)


def _groups(roles: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Roles that are run together: a trajectory needs one to commit and one to denoise."""
    left = dict.fromkeys(roles)
    if "denoise" in left and "commit" in left:
        yield "denoise", "commit"
        del left["denoise"], left["commit"]
    for role in left:
        yield (role,)


def _tokens(bundle: Bundle) -> Array | None:
    """Ids of the sample; None where the bundle has no tokenizer."""
    try:
        from fixedstate.runtime.text import Text

        ids = Text.open(bundle).encode(SAMPLE)
    except UsageError:
        return None
    if not ids:
        raise ParityError("the bundle's tokenizer gives no ids for plain text: check it")
    return np.asarray(ids, np.int64)


# --- along a trajectory --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """The tokens of a trajectory.

    Attributes:
        clean: Blocks (rows, L), one more than are committed.
        masked: The same, half of each masked.
        lengths: How much of a clean block each row commits: the second row skips every other one.
    """

    clean: tuple[Array, ...]
    masked: tuple[Array, ...]
    lengths: tuple[Array, ...]

    @classmethod
    def of(cls, spec: ModelSpec, ids: Array | None, seed: int) -> _Way:
        """Along a text, or along random tokens."""
        rng = np.random.default_rng(seed)
        length, rows = spec.block_len, _CHECKED_ROWS
        count = (CHECKED_BLOCKS + 1) * length
        if ids is None:
            tokens = rng.integers(0, spec.vocab_size, (rows, count))
        else:  # every row begins elsewhere in the text
            starts = np.arange(rows)[:, None] * len(ids) // rows
            tokens = ids[(starts + np.arange(count)) % len(ids)]
        mask = 0 if spec.mask_id is None else spec.mask_id
        clean = tuple(tokens[:, i : i + length] for i in range(0, count, length))
        return cls(
            clean,
            tuple(np.where(rng.random(block.shape) < 0.5, mask, block) for block in clean),
            tuple(
                np.array([0 if row == 1 and index % 2 else length for row in range(rows)])
                for index in range(CHECKED_BLOCKS)
            ),
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """What a row carries from one block to the next: ports by suffix, and what goes with them."""

    arrays: dict[str, Array]
    past_length: int
    last_logits: Array | None

    def at(self, state: StateSpec) -> _Row:
        """The same in the dtypes of another precision."""
        dtypes = {port.suffix: numpy_dtype(port.past.dtype) for port in state.committed}
        arrays = {name: array.astype(dtypes[name]) for name, array in self.arrays.items()}
        return replace(self, arrays=arrays)


_Rows = tuple[_Row, ...]
_Seen = Iterator[tuple[str, dict[str, Array]]]  # place, and arrays by port


def _differences(
    bundle: Bundle,
    half: Bundle,
    roles: Collection[str],
    way: _Way,
    threads: int | None,
    tolerance: Tolerance,
    more: Mapping[str, float] | None = None,
) -> Iterator[_Found]:
    """How the graphs of some roles differ, the float32 side before the other one.

    `more` is what a port may differ by beside the tolerance, by its name. What is stored in fewer
    bits may differ by a step of its format beside: a value near the middle of two steps goes to the
    other one for the smallest change. So that such steps do not add up from block to block, every
    block then begins with the states of the float32 side.
    """
    steps = _steps(bundle)

    def judged(right: _Seen, given: _Seen) -> Iterator[_Found]:
        expected = list(right)  # all of it, so that its graph is closed before the next is loaded
        for (place, wanted), (_, got) in zip(expected, given, strict=True):
            for port in {**wanted, **got}:
                name = port.partition(",")[0]
                extra = (more or {}).get(name, 0.0) + steps.get(name, 0.0)
                limit = replace(tolerance, relative=tolerance.relative + extra)
                yield _difference(place, port, wanted[port], got[port], limit)

    if "full" in roles:
        yield from judged(_whole(bundle, way, threads), _whole(half, way, threads))
    if "commit_denoise" in roles:
        seen: list[_Rows] = []
        right = list(_fused(bundle, way, threads, seen=seen))
        begin = [_at(half, rows) for rows in seen] if steps else None
        yield from judged(iter(right), _fused(half, way, threads, begin=begin))
    if not {"commit", "denoise"} & set(roles):
        return
    # who commits where the converted graphs do not: the states of the float32 side serve both
    carrier = next((role for role in ("commit", "commit_denoise") if role in bundle.graphs), None)
    states = list(_committed(bundle, carrier, way, threads)) if carrier else []
    logits: list[tuple[str, dict[str, Array]]] = []
    if "denoise" in roles:
        logits = list(_denoised(bundle, states, way, threads))
    if "commit" in roles:
        begin = [_at(half, rows) for rows in states] if steps else None
        for index, rows in enumerate(_committed(half, "commit", way, threads, begin)):
            yield from judged(_carried(index, states[index], bundle), _carried(index, rows, half))
            states[index] = _at(half, states[index]) if steps else rows
    else:
        states = [_at(half, rows) for rows in states]
    if "denoise" in roles:
        yield from judged(iter(logits), _denoised(half, states, way, threads))


def _steps(bundle: Bundle) -> dict[str, float]:
    """Largest step between two stored numbers as a share of a port's largest value, by suffix."""
    precision, form = bundle.precision, KvFormat.named(bundle.precision.kv)
    cached = 2 / (2**form.bits - 1) if form.bits else _STEPS.get(form.name, 0.0)
    stored = {port.layer for port in bundle.state.committed if port.kind == "key_scale"}
    found = {}
    for port in bundle.state.committed:
        if port.kind == "ssm" and precision.state != "float32":
            found[port.suffix] = _STEPS[precision.state]
        elif port.layer in stored and port.kind in ("key", "value"):
            found[port.suffix] = cached
    return found


def _session(bundle: Bundle, role: str, threads: int | None) -> OrtSession:
    """One loaded graph.

    Casts of half weights are left to every pass: an optimizer would make float32 copies of all of
    them, and hold those twice while it loads.
    """
    level = "none" if bundle.graph(role).file.endswith(_ROUNDED) else "all"
    return open_sessions(bundle, (role,), threads=threads, optimization=level)[role]


def _engine(bundle: Bundle, role: str, threads: int | None) -> SessionEngine:
    """The passes over one loaded graph; the caller runs those that it serves."""
    session = _session(bundle, role, threads)
    serving = (role,) if role == "commit_denoise" else ("denoise", "commit")
    parts = dict.fromkeys(serving, session)
    return SessionEngine(bundle.spec, bundle.state, parts, slots=_CHECKED_ROWS)


def _rows(engine: SessionEngine) -> _Rows:
    """What every row carries now."""
    shifted = engine.spec.logit_shift
    return tuple(
        _Row(
            engine.read(row),
            int(engine.past_length[row]),
            engine.last_logits[row].copy() if shifted else None,
        )
        for row in range(engine.slots)
    )


def _carried(index: int, rows: _Rows, bundle: Bundle) -> _Seen:
    """States behind a block as the numbers that they stand for, by port and row."""
    arrays = {
        f"{port}, row {i}": array
        for i, row in enumerate(rows)
        for port, array in decoded(bundle.state, row.arrays, bundle.spec).items()
    }
    for i, row in enumerate(rows):
        if row.last_logits is not None:
            arrays[f"last_logits, row {i}"] = row.last_logits
    yield f"block {index}, state", arrays


def _at(bundle: Bundle, rows: _Rows) -> _Rows:
    return tuple(row.at(bundle.state) for row in rows)


def _set(engine: SessionEngine, rows: _Rows) -> None:
    """Let every row carry this."""
    for number, row in enumerate(rows):
        engine.write(number, row.arrays, row.past_length, row.last_logits)


def _committed(
    bundle: Bundle,
    role: str,
    way: _Way,
    threads: int | None,
    begin: Sequence[_Rows] | None = None,
) -> Iterator[_Rows]:
    """States behind every block, by a graph that commits.

    A block begins with what the one before left, or with what `begin` has behind that one.
    """
    engine = _engine(bundle, role, threads)
    for index, (block, lengths) in enumerate(zip(way.clean, way.lengths, strict=False)):
        if begin and index:
            _set(engine, begin[index - 1])
        engine.commit(block, lengths)
        yield _rows(engine)


def _denoised(bundle: Bundle, states: Sequence[_Rows], way: _Way, threads: int | None) -> _Seen:
    """Logits of every block behind the states of those before it."""
    engine = _engine(bundle, "denoise", threads)
    for index, block in enumerate(way.masked[: min(len(states) + 1, CHECKED_BLOCKS)]):
        if index:
            _set(engine, states[index - 1])
        yield from _passes(engine, index, block)


def _passes(engine: SessionEngine, index: int, block: Array) -> _Seen:
    """A denoise pass; with self-conditioning a second one, which reads what the first one left."""
    for step in range(2 if engine.spec.self_conditioning_width else 1):
        yield f"block {index}, denoise pass {step + 1}", {"logits": engine.denoise(block).copy()}


def _fused(
    bundle: Bundle,
    way: _Way,
    threads: int | None,
    *,
    begin: Sequence[_Rows] | None = None,
    seen: list[_Rows] | None = None,
) -> _Seen:
    """Logits and states of the graph that commits and denoises, used in both ways.

    Args:
        bundle: The bundle.
        way: Its tokens.
        threads: Of a pass.
        begin: What every block but the first begins with, in place of what the one before left.
        seen: Gets what is carried behind every block.
    """
    engine = _engine(bundle, "commit_denoise", threads)
    for index in range(CHECKED_BLOCKS):
        if begin and index:
            _set(engine, begin[index - 1])
        yield from _passes(engine, index, way.masked[index])
        both = np.concatenate([way.clean[index], way.masked[index + 1]], 1)
        yield f"block {index}, commit_denoise", {"logits": engine.commit_denoise(both).copy()}
        rows = _rows(engine)
        if seen is not None:
            seen.append(rows)
        yield from _carried(index, rows, bundle)


def _whole(bundle: Bundle, way: _Way, threads: int | None) -> _Seen:
    """Logits of whole sequences."""
    session = _session(bundle, "full", threads)
    tokens, length = np.concatenate(way.clean, 1), bundle.spec.block_len
    for end in (1, length, 3 * length + 1):
        yield f"full, {end} tokens", session.run({"input_ids": tokens[:, :end]})


# --- reduced heads -------------------------------------------------------------------------------


def _head_differences(
    bundle: Bundle,
    converted: Bundle,
    role: str,
    seed: int,
    threads: int | None,
    tolerance: Tolerance,
) -> Iterator[_Found]:
    """How a reduced head differs from what float32 logits say of the tokens that it gives."""
    spec = bundle.spec
    base, _ = split_role(role)
    rng = np.random.default_rng(seed)
    sizes = {"B": _CHECKED_ROWS, "m": 1, "C": 4 * spec.block_len, "R": spec.block_len}
    lengths = np.zeros(_CHECKED_ROWS, np.int64)
    feeds = draw_inputs(
        bundle.graph(role).inputs,
        rng,
        vocab=spec.vocab_size,
        past_length=rng.integers(0, 4, _CHECKED_ROWS) * spec.block_len,
        commit_length=lengths,
        **sizes,
    )
    slots = feeds["open_slots"] = feeds["open_slots"] % spec.block_len
    plain = {port.name: feeds[port.name] for port in bundle.graph(base).inputs}
    whole = _session(bundle, base, threads).run(plain)
    logits = whole["logits"].astype(np.float64)
    session = _session(converted, role, threads)
    given = session.run(
        {port.name: feeds[port.name].astype(numpy_dtype(port.dtype)) for port in session.inputs}
    )
    scores = np.take_along_axis(logits, slots[..., None], 1)
    for row in range(_CHECKED_ROWS):
        one = {name: array[row] for name, array in given.items()}
        for port in measure_head(spec, scores[row], one, tolerance):
            yield _found(f"{role}, one pass, row {row}", port, Spread(port.max_rel), tolerance)
