"""``fixedstate export``: a model becomes a bundle, compared with PyTorch before it appears."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import NATURAL, POSITIVE, debug_option, force_option, json_option
from fixedstate.cli.output import echo_json, note, progress

if TYPE_CHECKING:
    from fixedstate.export.pipeline import ExportReport


@click.command("export", short_help="Turn a checkpoint into a bundle, compared with PyTorch.")
@click.argument("checkpoint")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write."
)
@click.option(
    "--block-len",
    type=POSITIVE,
    metavar="N",
    help="Tokens of a block, where the checkpoint is silent.",
)
@click.option(
    "--mask-id", type=NATURAL, metavar="N", help="Id of the mask, where the checkpoint is silent."
)
@click.option(
    "--stop-id",
    "stop_ids",
    type=NATURAL,
    metavar="N",
    multiple=True,
    help="Id that ends a text (repeatable).",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16"]),
    default="fp32",
    show_default=True,
    help="Numbers of the graphs; scan state stays float32. fp16 is for GPUs.",
)
@click.option(
    "--fused/--no-fused",
    default=True,
    show_default=True,
    help="Add the graph that commits a block and denoises the next in one pass.",
)
@click.option(
    "--head",
    type=click.Choice(["logits", "confidence", "entropy", "top_k"]),
    default="logits",
    show_default=True,
    help="Add graphs that give just that of each open slot, for policies that need no more.",
)
@click.option(
    "--top-k",
    type=POSITIVE,
    metavar="N",
    default=8,
    show_default=True,
    help="Tokens that the head top_k gives.",
)
@click.option(
    "--allow-unexpected", is_flag=True, help="Leave out tensors that the model does not use."
)
@click.option(
    "--conv-layout",
    type=click.Choice(["d1k", "dk", "dk1"]),
    help="Axes of convolution weights, where their shapes leave two readings.",
)
@click.option(
    "--names",
    type=click.Choice(["genai", "mobius", "hf"]),
    help="Write graphs with another runtime's port names instead of a bundle (docs/bundle.md).",
)
@force_option
@json_option
@debug_option
def command(
    checkpoint: str,
    output: Path,
    as_json: bool,
    stop_ids: tuple[int, ...],
    names: str | None,
    **options: Any,
) -> None:
    """Export CHECKPOINT, a folder or the name of a shipped model, as a bundle.

    Shipped models: tiny-attention, tiny-mamba, tiny-hybrid. Every graph is compared with PyTorch
    before the bundle appears; a mismatch leaves none and exits with 1.

    CHECKPOINT may also be pkg.module:build or path/to/file.py:build, a callable that gives a torch
    module of your own (docs/custom.md): this runs the code in it, and says so.

    With --names the folder is for the loops of onnxruntime-genai (causal models), Mobius or the
    Hugging Face exporter, and no bundle: the bundle is made and compared first, then its graphs
    get their port names and are compared with it.
    """
    from fixedstate.bundle import check_target

    check_target(output, options["force"])
    if names is not None:
        from fixedstate.export.renamed import export_names

        with progress("reading the checkpoint") as tell:
            made = export_names(
                *(checkpoint, output, names),
                stop_ids=stop_ids or None,
                notes=note,
                progress=tell,
                **options,
            )
        if as_json:
            echo_json({"path": str(made.path), **made.content, "parity": made.parity})
        else:
            click.echo(str(made.path))
        return
    from fixedstate.export.pipeline import export_bundle

    with progress("reading the checkpoint") as tell:
        report = export_bundle(
            checkpoint, output, stop_ids=stop_ids or None, notes=note, progress=tell, **options
        )
    _check_written(output)
    if as_json:
        echo_json(summary(report))
    else:
        click.echo(str(report.bundle.path))


def _check_written(output: Path) -> None:
    from fixedstate.bundle import Bundle

    Bundle.open(output, verify_weights=False)


def summary(report: ExportReport) -> dict[str, Any]:
    """The figures of an export: where it is, what is in it, how far it is from PyTorch."""
    bundle = report.bundle
    return {
        "path": str(bundle.path),
        "digest": bundle.digest,
        "precision": bundle.precision.name,
        "objective": bundle.spec.objective,
        "block_len": bundle.spec.block_len,
        "graphs": sorted(bundle.graphs),
        "parity": report.parity,
    }
