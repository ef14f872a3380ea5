"""The order of the stages: checkpoint, denoiser, graphs, weights, comparison, bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from fixedstate.bundle import (
    MANIFEST,
    PARITY,
    WEIGHTS,
    Bundle,
    Graph,
    check_target,
    sha256_of,
    staged_folder,
    write_atomic,
)
from fixedstate.errors import ExportError
from fixedstate.export import parity
from fixedstate.export.checkpoint import Checkpoint, load_checkpoint
from fixedstate.export.denoiser import Denoiser, as_stored, check_supported
from fixedstate.export.passes import MIN_ONNXRUNTIME, finish
from fixedstate.export.trace import trace
from fixedstate.export.weightfile import point_at_weights, write_weights
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.state import Precision, StateSpec, graph_ports

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export made.

    Attributes:
        bundle: The bundle, opened and checked.
        parity: The content of its parity.json.
    """

    bundle: Bundle
    parity: dict[str, Any]


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    block_len: int | None = None,
    mask_id: int | None = None,
    stop_ids: tuple[int, ...] | None = None,
    precision: str = "fp32",
    single_graph: bool = False,
    force: bool = False,
    allow_unexpected: bool = False,
    conv_layout: str | None = None,
    notes: Say | None = None,
    progress: Say | None = None,
) -> ExportReport:
    """Turn a checkpoint into a bundle, or into nothing.

    Args:
        checkpoint: Name of a shipped model, or a checkpoint folder.
        out: The bundle folder to make.
        block_len: L, where the checkpoint does not say.
        mask_id: Id of the mask, where the checkpoint does not say.
        stop_ids: Ids that end a text, where the checkpoint does not say.
        precision: ``fp32`` or ``fp16``.
        single_graph: Add the role ``commit_denoise``, one graph for both passes.
        force: Replace what stands at ``out``.
        allow_unexpected: Leave out tensors that the model does not have.
        conv_layout: See :func:`fixedstate.export.checkpoint.load_checkpoint`.
        notes: Told what was decided on the way.
        progress: Told what is being done.

    Raises:
        FixedStateError: for everything that can go wrong; nothing is left at ``out`` then.
    """
    say = progress or (lambda _: None)
    target = Path(out)
    check_target(target, force)
    chosen = Precision.named(precision)
    say("reading the checkpoint")
    loaded = load_checkpoint(
        checkpoint,
        block_len=block_len,
        mask_id=mask_id,
        stop_ids=stop_ids,
        conv_layout=conv_layout,
        allow_unexpected=allow_unexpected,
        notes=notes,
    )
    check_supported(loaded.spec)
    roles = ["denoise", "commit"] + (["commit_denoise"] if single_graph else [])
    with staged_folder(target, force=force) as folder:
        bundle = write_bundle(folder, loaded, chosen, roles, say)
        report = parity.compare_graphs(
            bundle,
            Denoiser(loaded.spec, as_stored(loaded.tensors, chosen)),
            progress=progress,
        )
        parity.require(report)
        write_atomic(folder / PARITY, (json.dumps(report, indent=1) + "\n").encode())
    return ExportReport(Bundle.open(target), report)


def write_bundle(
    folder: Path, checkpoint: Checkpoint, precision: Precision, roles: list[str], say: Say
) -> Bundle:
    """Write everything of a bundle but parity.json into an empty folder."""
    spec = checkpoint.spec
    state = StateSpec.of(spec, precision)
    denoiser = Denoiser(spec, checkpoint.tensors, precision, TRACED)
    models: dict[str, ir.Model] = {}
    for role in roles:
        say(f"tracing {role}")
        models[role] = finish(trace(denoiser, role), spec, precision, role)
    say("writing the weights")
    offsets = write_weights(models.values(), folder / WEIGHTS)
    graphs: dict[str, Graph] = {}
    for role, model in models.items():
        point_at_weights(model, offsets, folder)
        file = f"{role}.onnx"
        write_atomic(folder / file, _serialised(role, model))
        inputs, outputs = graph_ports(spec, state, role)
        graphs[role] = Graph(role, file, sha256_of(folder / file), MIN_ONNXRUNTIME, inputs, outputs)
    files = _copy_files({**checkpoint.tokenizer_files, **checkpoint.licence_files}, folder)
    bundle = Bundle(
        path=folder,
        spec=spec,
        precision=precision,
        state=state,
        graphs=graphs,
        weights=sha256_of(folder / WEIGHTS),
        decode=checkpoint.decode,
        files=files,
        source=checkpoint.source,
    )
    write_atomic(folder / MANIFEST, bundle.manifest())
    return replace(bundle, digest=sha256_of(folder / MANIFEST))


def _serialised(role: str, model: ir.Model) -> bytes:
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    if len(data) > 1 << 30:
        raise ExportError(
            f"graph {role!r} is {len(data)} bytes without its weights: constants of the model "
            "should be weights; please report this model"
        )
    return bytes(data)


def _copy_files(files: Mapping[str, Path], folder: Path) -> dict[str, str]:
    hashes = {}
    for name, source in sorted(files.items()):
        shutil.copyfile(source, folder / name)
        hashes[name] = sha256_of(folder / name)
    return hashes
