"""The order of the stages: model, graphs, weights, comparison, bundle."""

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
    DecodeDefaults,
    Graph,
    Source,
    check_target,
    sha256_of,
    staged_folder,
    write_atomic,
)
from fixedstate.errors import UsageError
from fixedstate.export import parity
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.custom import BuildReference, build_reference, load_module, refuse_options
from fixedstate.export.customlaws import check_module
from fixedstate.export.denoiser import BlockModel, Denoiser, check_supported
from fixedstate.export.layerwise import WHOLE_UP_TO, compare_layers
from fixedstate.export.passes import MIN_ONNXRUNTIME, finish, serialised
from fixedstate.export.stored import ModuleWeights, StoredWeights, WeightSource, as_stored
from fixedstate.export.trace import trace, without_weights
from fixedstate.export.weightfile import point_at_weights, write_weights
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.spec import ModelSpec
from fixedstate.state import HEADS, TOP_K, Precision, head_role

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
    fused: bool = True,
    head: str = "logits",
    top_k: int = TOP_K,
    force: bool = False,
    allow_unexpected: bool = False,
    conv_layout: str | None = None,
    whole_up_to: int = WHOLE_UP_TO,
    notes: Say | None = None,
    progress: Say | None = None,
) -> ExportReport:
    """Turn a checkpoint into a bundle, or into nothing.

    Args:
        checkpoint: Name of a shipped model, a checkpoint folder, or ``pkg.module:build``, a
            callable that gives a module of your own: its code is run.
        out: The bundle folder to make.
        block_len: L, where the checkpoint does not say.
        mask_id: Id of the mask, where the checkpoint does not say.
        stop_ids: Ids that end a text, where the checkpoint does not say.
        precision: ``fp32`` or ``fp16``.
        fused: Add the role ``commit_denoise``, which commits a block and denoises the next in one
            pass. A model of objective ``full`` and a custom module have none.
        head: Add graphs that give less than all scores, of the slots that are asked for:
            ``confidence``, ``entropy`` or ``top_k``; ``logits`` adds none.
        top_k: Tokens that the head ``top_k`` gives for a slot.
        force: Replace what stands at ``out``.
        allow_unexpected: Leave out tensors that the model does not have.
        conv_layout: See :func:`fixedstate.export.checkpoint.load_checkpoint`.
        whole_up_to: Bytes of weights up to which whole graphs are compared with PyTorch; above,
            layer by layer, so that no more than a layer or two are in memory.
        notes: Told what was decided on the way.
        progress: Told what is being done.

    Raises:
        FixedStateError: for everything that can go wrong; nothing is left at ``out`` then.
    """
    say = progress or (lambda _: None)
    target = Path(out)
    check_target(target, force)
    chosen = Precision.named(precision)
    reference = build_reference(checkpoint)
    if reference is not None:
        if head != "logits":
            raise UsageError(
                f"{reference}: --head {head} was given, but a custom module has no graphs beside "
                "denoise and commit: leave the option out"
            )
        refuse_options(
            reference,
            precision,
            block_len=block_len,
            mask_id=mask_id,
            stop_ids=stop_ids,
            allow_unexpected=allow_unexpected,
            conv_layout=conv_layout,
        )
        return _export_module(reference, target, force, notes or (lambda _: None), say)
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
    roles = _roles(loaded.spec, fused, head, top_k)
    with staged_folder(target, force=force) as folder:
        bundle = write_bundle(
            folder,
            without_weights(
                loaded.spec, lambda given: Denoiser(loaded.spec, given, chosen, TRACED, top_k)
            ),
            StoredWeights(loaded.tensors, chosen),
            roles,
            say,
            decode=loaded.decode,
            files={**loaded.tokenizer_files, **loaded.licence_files},
            source=loaded.source,
        )
        if (folder / WEIGHTS).stat().st_size <= whole_up_to:
            right = Denoiser(loaded.spec, as_stored(loaded.tensors, chosen), top_k=top_k)
            report = parity.compare_graphs(bundle, right, progress=say)
        else:
            report = compare_layers(bundle, loaded.tensors, progress=say)
        _accept(bundle, report)
    return ExportReport(Bundle.open(target), report)


def _roles(spec: ModelSpec, fused: bool, head: str, top_k: int) -> list[str]:
    """The graphs of a model.

    Raises:
        UsageError: for a head that there is not, or that nothing could ask.
    """
    if head not in HEADS:
        raise UsageError(f"head {head!r} is unknown; use one of {', '.join(HEADS)}")
    if top_k < 1:
        raise UsageError(f"top_k must be a number of tokens, 1 or more; got {top_k}")
    if head != "logits" and spec.objective != "block":
        raise UsageError(
            f"--head {head} gives less than all scores to a decode loop that fills blocks, and a "
            f"model of objective {spec.objective!r} has none: leave the option out"
        )
    if spec.objective == "full":
        return ["full"]
    denoising = ["denoise"] + (["commit_denoise"] if fused else [])
    reduced = [] if head == "logits" else [head_role(role, head) for role in denoising]
    return ["denoise", "commit", *denoising[1:], *reduced]


def _export_module(
    reference: BuildReference, target: Path, force: bool, notes: Say, say: Say
) -> ExportReport:
    """A bundle of a user's own module, which is also what its graphs are compared with."""
    say("building the module")
    loaded = load_module(reference, notes)
    say("checking the laws of the module")
    with parity.few_threads(loaded.denoiser):
        check_module(loaded.denoiser)
    with staged_folder(target, force=force) as folder:
        bundle = write_bundle(
            folder,
            loaded.denoiser,
            ModuleWeights(loaded.denoiser),
            ["denoise", "commit"],
            say,
            decode=loaded.decode,
            files=loaded.tokenizer_files,
            source=loaded.source,
        )
        report = parity.compare_graphs(bundle, loaded.denoiser, progress=say)
        _accept(bundle, report)
    return ExportReport(Bundle.open(target), report)


def _accept(bundle: Bundle, report: Mapping[str, Any]) -> None:
    """Write the bundle's parity.json.

    Raises:
        ParityError: where a graph differs.
    """
    parity.require(report)
    write_atomic(bundle.path / PARITY, (json.dumps(report, indent=1) + "\n").encode())


def write_bundle(
    folder: Path,
    model: BlockModel,
    weights: WeightSource,
    roles: list[str],
    say: Say,
    *,
    decode: DecodeDefaults,
    files: Mapping[str, Path],
    source: Source,
) -> Bundle:
    """Write everything of a bundle but parity.json into an empty folder.

    Args:
        folder: Where to.
        model: What is traced, with traced operators; its weights are not looked at.
        weights: Gives the weights of its graphs, one at a time.
        roles: One graph each.
        say: Told what is being done.
        decode: How the bundle decodes unless told otherwise.
        files: Tokenizer and licence files by name, copied.
        source: Where the weights came from.
    """
    spec, precision = model.spec, model.precision
    graphs_by_role: dict[str, ir.Model] = {}
    for role in roles:
        say(f"tracing {role}")
        graphs_by_role[role] = finish(trace(model, role), spec, precision, role, model.top_k)
    say("writing the weights")
    places, digest = write_weights(graphs_by_role.values(), weights, folder / WEIGHTS, say)
    graphs: dict[str, Graph] = {}
    for role, graph in graphs_by_role.items():
        point_at_weights(graph, places, folder)
        file = f"{role}.onnx"
        write_atomic(folder / file, serialised(graph))
        inputs, outputs = model.ports(role)
        graphs[role] = Graph(role, file, sha256_of(folder / file), MIN_ONNXRUNTIME, inputs, outputs)
    bundle = Bundle(
        path=folder,
        spec=spec,
        precision=precision,
        state=model.state_spec,
        graphs=graphs,
        weights=digest,
        decode=decode,
        files=_copy_files(files, folder),
        source=source,
    )
    write_atomic(folder / MANIFEST, bundle.manifest())
    return replace(bundle, digest=sha256_of(folder / MANIFEST))


def _copy_files(files: Mapping[str, Path], folder: Path) -> dict[str, str]:
    hashes = {}
    for name, source in sorted(files.items()):
        shutil.copyfile(source, folder / name)
        hashes[name] = sha256_of(folder / name)
    return hashes
