"""Quantised bundles: every graph of a float32 bundle by a plan, compared before the folder appears.

A quantised bundle is a bundle: the same ports, files and roles, with ``quantization.json`` beside
them, which holds the plan and how far the model is from the one it was made of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import onnx_ir as ir

from fixedstate.bundle import (
    MANIFEST,
    QUANTIZATION,
    WEIGHTS,
    Bundle,
    Graph,
    sha256_of,
    staged_folder,
    write_atomic,
)
from fixedstate.calib.apply import (
    MIN_ONNXRUNTIME,
    MULTIPLIED,
    VALUES,
    has_four_bit_floats,
    part_of,
    parts_of,
    quantize_graph,
    stored,
)
from fixedstate.calib.collect import check_collectable
from fixedstate.calib.data import Data, Record
from fixedstate.calib.drift import Drift
from fixedstate.calib.formats import check_targets
from fixedstate.calib.lint import check_emission
from fixedstate.calib.measure import Comparison, compare
from fixedstate.calib.plan import Plan
from fixedstate.calib.report import Gates, Report
from fixedstate.calib.sites import Site, find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.calib.trial import weight_of
from fixedstate.errors import CalibrationError
from fixedstate.export.kvformat import store_kv
from fixedstate.export.passes import is_weight, lint, name_values, serialised, valueless
from fixedstate.export.stateformat import fuses, store_state
from fixedstate.export.weightfile import (
    Place,
    byte_count,
    layout,
    places_in,
    point_at_weights,
    write_pieces,
)
from fixedstate.runtime.decoder import open_engine
from fixedstate.state import Precision, StateSpec, graph_ports, split_role

SCHEMA = 1
"""Number of the format, under ``quantization`` in ``quantization.json``."""

_PIECE = 1 << 24  # bytes copied at once


def quantize_bundle(
    bundle: Bundle,
    plan: Plan,
    table: Table,
    data: Data,
    target: Path,
    *,
    split: str = "held-out",
    gates: Gates | None = None,
    keep_failed: bool = False,
    force: bool = False,
    batch: int = 4,
    records: int | None = None,
    drifts: tuple[Drift, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> tuple[Bundle, Report]:
    """Write a quantised bundle and compare it with the bundle it is made of.

    Args:
        bundle: A float32 bundle of objective ``block``.
        plan: Formats and scales.
        table: The ranges that the plan was made with.
        data: Sequences, on whose `split` both models are compared.
        target: Folder to write; it appears whole, after the comparison.
        split: Of the data; none that ranges or formats were chosen on.
        gates: What the comparison has to keep.
        keep_failed: Write the folder even where it does not.
        force: Replace a folder that is there.
        batch: Sequences that are compared together.
        records: Sequences at most; None for all of the split.
        drifts: State formats that were measured; they go into the report.
        progress: Told what is being done.

    Returns:
        The new bundle, and its report.

    Raises:
        CalibrationError: ``STALE`` for a plan or table of another bundle, ``MODEL``, ``NO_DATA``,
            ``UNSUPPORTED_TARGET``; ``GATES`` where the comparison does not pass.
        UsageError: where `target` cannot be written.
    """
    say = progress or (lambda _: None)
    gates = gates or Gates()
    check_collectable(bundle)
    plan.check(bundle)
    table.check(bundle)
    check_targets(tuple(sorted(set(plan.formats.values()))), plan.targets)
    chosen = data.split(split, bundle.spec.block_len, table.policy.blocks)[:records]
    with staged_folder(target, force=force) as folder:
        graphs = load_graphs(bundle)
        sites = find_sites(graphs)
        made = write_graphs(bundle, plan, graphs, sites, folder, progress=say)
        say("comparing it with the bundle it is made of")
        with _runnable(bundle, plan, sites, made, folder) as judged:
            found = compare_bundles(
                bundle, judged, chosen, table.policy, batch=batch, progress=progress
            )
        report = Report.of(plan, table, sites, found, data.sha256, drifts=drifts)
        broken = report.breaches(gates)
        if broken and not keep_failed:
            raise CalibrationError(
                "GATES",
                f"the quantised model is too far away: {'; '.join(broken)}: choose other formats, "
                "allow more, or keep it all the same (--keep-failed)",
            )
        _write_record(made, plan, report, gates, broken)
        finished = _finish(bundle, made)
    return replace(finished, path=target), report


def compare_bundles(
    bundle: Bundle,
    made: Bundle,
    records: tuple[Record, ...],
    policy: Policy,
    *,
    batch: int = 4,
    state_at: Sequence[int] = (1, 10, 100, 1000),
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """How far a bundle is from another along the same sequences, on ONNX Runtime's CPU.

    Args:
        bundle: What is right.
        made: What is judged.
        records: Sequences of whole blocks.
        policy: Which passes.
        batch: Sequences that run together.
        state_at: Committed blocks at which the states are compared, those beyond the sequences
            left out.
        progress: Told how far it is.
    """
    blocks = max(len(record.ids) for record in records) // bundle.spec.block_len
    return compare(
        bundle,
        lambda slots: open_engine(bundle, threads=1, slots=slots, memory="fast"),
        lambda slots: open_engine(made, threads=1, slots=slots, memory="fast"),
        records,
        policy,
        batch=batch,
        state_at=[block for block in state_at if block <= blocks],
        progress=progress,
    )


def drift_of(
    bundle: Bundle,
    made: Bundle,
    records: tuple[Record, ...],
    *,
    at: Sequence[int],
    masks: tuple[float, ...] = (0.5,),
    progress: Callable[[str], None] | None = None,
) -> Drift:
    """How far a quantised bundle goes away along sequences of many blocks.

    Args:
        bundle: What it was made of.
        made: The quantised bundle.
        records: Long sequences of whole blocks.
        at: Committed blocks at which the states are compared.
        masks: Shares of masks at which scores are compared in every block.
        progress: Told how far it is.
    """
    blocks = max(len(record.ids) for record in records) // bundle.spec.block_len
    found = compare_bundles(
        bundle, made, records, Policy(masks=masks, blocks=blocks), state_at=at, progress=progress
    )
    sizes = made.state.state_bytes(), bundle.state.state_bytes()
    return Drift(str(made.path.name), found, *sizes)


def write_graphs(
    bundle: Bundle,
    plan: Plan,
    graphs: Mapping[str, ir.Model],
    sites: Mapping[str, Site],
    folder: Path,
    *,
    progress: Callable[[str], None] | None = None,
    simulate: bool = False,
) -> Bundle:
    """Write quantised graphs and weights; the manifest is :func:`quantize_bundle`'s.

    The weights go through one at a time, whatever their number.

    Args:
        bundle: A float32 bundle.
        plan: Formats and scales.
        graphs: The bundle's graphs by role; they are changed.
        sites: Its sites by weight.
        folder: An empty folder.
        progress: Told what is being done.
        simulate: Write weights that ONNX Runtime's CPU provider does not read as the float32
            numbers that they stand for.

    Raises:
        CalibrationError: ``GRAPH`` where a graph has a form that is not known, ``EMISSION`` where
            one came out in a form that a target does not take.
        ExportError: where a graph would break a rule of the portable file.
    """
    say = progress or (lambda _: None)
    formats = plan.chosen()
    precision = Precision(state=plan.state, kv=plan.kv)
    state = StateSpec.of(bundle.spec, precision)
    if not fuses(bundle.spec, state):  # decoded in two graphs
        graphs = {r: m for r, m in graphs.items() if split_role(r)[0] != "commit_denoise"}
    stored_at: dict[str, Place] = {}
    for model in graphs.values():
        stored_at |= places_in(model)
    with TemporaryFile(dir=folder) as spool:
        say("quantising the weights")
        quantised = _spooled(plan, graphs, sites, spool, simulate)
        for role, model in graphs.items():
            quantize_graph(model, sites, formats, plan.scales, valueless, simulate=simulate)
            if plan.state != "float32":
                store_state(model, bundle.spec, bundle.state, state, role)
            if plan.kv != "float32":
                store_kv(model, bundle.spec, bundle.state, state, role)
            name_values(model)
        places, digest = _write_weights(
            graphs, stored_at, quantised, bundle.path / WEIGHTS, spool, folder, say
        )
    made: dict[str, Graph] = {}
    for role, model in graphs.items():
        old = bundle.graphs[role]
        inputs, outputs = graph_ports(bundle.spec, state, role, old.top_k)
        lint(model, inputs, outputs)
        point_at_weights(model, places, folder)
        check_emission(model, () if simulate else plan.targets)
        write_atomic(folder / old.file, serialised(model))
        made[role] = replace(
            old,
            sha256=sha256_of(folder / old.file),
            inputs=inputs,
            outputs=outputs,
            min_onnxruntime=MIN_ONNXRUNTIME if has_four_bit_floats(model) else old.min_onnxruntime,
        )
    return replace(
        bundle, path=folder, precision=precision, state=state, graphs=made, weights=digest
    )


@contextmanager
def _runnable(
    bundle: Bundle, plan: Plan, sites: Mapping[str, Site], made: Bundle, folder: Path
) -> Iterator[Bundle]:
    """The quantised bundle as ONNX Runtime's CPU provider runs it.

    Where it lacks a format, these are graphs of their own with the same numbers in float32.
    """
    if all(one.is_on_cpu for one in plan.chosen().values()):
        yield made
        return
    with TemporaryDirectory(dir=folder) as name:
        yield write_graphs(bundle, plan, load_graphs(bundle), sites, Path(name), simulate=True)


_Stored = tuple[dict[str, bytes], tuple[int, int]]
"""Scales by what their names end with, and where the values stand: first byte, bytes."""


def _spooled(
    plan: Plan,
    graphs: Mapping[str, ir.Model],
    sites: Mapping[str, Site],
    spool: IO[bytes],
    simulate: bool,
) -> dict[str, _Stored]:
    """Quantise every weight once; its scales stay in memory, its values go to a file."""
    found = {}
    for name, chosen in sorted(plan.chosen().items()):
        one = stored(weight_of(graphs, name), sites[name], chosen, plan.search)
        parts = {part: ir.tensor(array).tobytes() for part, array in parts_of(one).items()}
        content = parts.pop(VALUES)
        if simulate and not chosen.is_on_cpu:
            content = one.dequantized().tobytes()
        start = spool.tell()
        spool.write(content)
        found[name] = (parts, (start, len(content)))
    return found


def _write_weights(
    graphs: Mapping[str, ir.Model],
    stored_at: Mapping[str, Place],
    quantised: Mapping[str, _Stored],
    source: Path,
    spool: IO[bytes],
    folder: Path,
    say: Callable[[str], None],
) -> tuple[dict[str, Place], str]:
    """Write the weights that the quantised graphs read.

    Returns:
        Place by name, and the sha256 of the file.
    """
    wanted: dict[str, tuple[ir.DataType, tuple[int, ...]]] = {}
    for model in graphs.values():
        for name, value in model.graph.initializers.items():
            if is_weight(name):
                assert value.dtype is not None
                assert value.shape is not None
                wanted[name] = value.dtype, tuple(int(str(size)) for size in value.shape)
    # wide elements first, so that each lies on its own size
    names = sorted(wanted, key=lambda name: (-wanted[name][0].itemsize, name))
    header, places = layout((name, *wanted[name]) for name in names)
    with source.open("rb") as given:
        pieces = _pieces(names, wanted, stored_at, quantised, given, spool)
        return places, write_pieces(header, places, pieces, folder / WEIGHTS, say)


def _pieces(
    names: list[str],
    wanted: Mapping[str, tuple[ir.DataType, tuple[int, ...]]],
    stored_at: Mapping[str, Place],
    quantised: Mapping[str, _Stored],
    given: IO[bytes],
    spool: IO[bytes],
) -> Iterator[bytes]:
    for name in names:
        weight, part = part_of(name)
        if part in (VALUES, MULTIPLIED) and weight in quantised:
            yield from _copied(spool, *quantised[weight][1])
        elif part and weight in quantised:
            yield quantised[weight][0][part]
        else:
            place = stored_at[name]
            assert place.length == byte_count(*wanted[name])
            yield from _copied(given, place.offset, place.length)


def _copied(file: IO[bytes], start: int, length: int) -> Iterator[bytes]:
    file.seek(start)
    while length:
        piece = file.read(min(length, _PIECE))
        if not piece:
            raise CalibrationError(
                "GRAPH", "the weights file ends too early: copy the bundle again"
            )
        length -= len(piece)
        yield piece


def _write_record(
    made: Bundle, plan: Plan, report: Report, gates: Gates, broken: list[str]
) -> None:
    """What ``quantization.json`` holds."""
    record: dict[str, Any] = {
        "quantization": SCHEMA,
        "plan": plan.to_dict(),
        "report": report.to_dict(),
        "gates": gates.to_dict(),
        "breaches": broken,
    }
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomic(made.path / QUANTIZATION, text.encode())


def _finish(bundle: Bundle, made: Bundle) -> Bundle:
    """Copy the other files and write the manifest."""
    for name in bundle.files:
        shutil.copyfile(bundle.path / name, made.path / name)
    files = {**bundle.files, QUANTIZATION: sha256_of(made.path / QUANTIZATION)}
    finished = replace(made, files=files)
    write_atomic(made.path / MANIFEST, finished.manifest())
    return replace(finished, digest=sha256_of(made.path / MANIFEST))
