"""``fixedstate triton``: a bundle or engine becomes a model repository of Triton's server."""

from __future__ import annotations

from pathlib import Path

import click

from fixedstate.cli.options import (
    NATURAL,
    POSITIVE,
    bundle_argument,
    debug_option,
    force_option,
    json_option,
    threads_option,
)
from fixedstate.cli.output import echo_json


@click.command("triton", short_help="Write a model repository of Triton Inference Server.")
@bundle_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder to write: what `tritonserver --model-repository` takes.",
)
@click.option("--name", default="fixedstate", show_default=True, help="Of the model.")
@click.option(
    "--slots",
    type=POSITIVE,
    metavar="N",
    help="Requests that run together [default: 16, or the rows of the engine].",
)
@click.option(
    "--queue",
    type=NATURAL,
    metavar="N",
    default=64,
    show_default=True,
    help="Requests that may wait; more are refused as unavailable.",
)
@click.option(
    "--max-prompt-tokens",
    type=POSITIVE,
    metavar="N",
    default=4096,
    show_default=True,
    help="Tokens of a prompt at most.",
)
@click.option(
    "--max-new-tokens",
    type=POSITIVE,
    metavar="N",
    default=1024,
    show_default=True,
    help="Tokens of an answer at most.",
)
@click.option(
    "--max-state-bytes",
    type=NATURAL,
    metavar="N",
    default=0,
    help="Take saved states of that many bytes [default: none].",
)
@threads_option
@click.option("--generate-facade", is_flag=True, help="Add a model for `/generate`: whole answers.")
@click.option(
    "--step-model",
    is_flag=True,
    help="Add a model of single passes with the server's implicit state; see its README.",
)
@click.option(
    "--vendor-wheel/--installed",
    "vendored",
    default=True,
    help="Put this package into the repository, or expect it there [default: vendor-wheel].",
)
@click.option(
    "--target-version",
    metavar="YY.MM",
    default="24.10",
    show_default=True,
    help="Release of the server.",
)
@force_option
@json_option
@debug_option
def command(
    bundle: Path,
    output: Path,
    name: str,
    slots: int | None,
    threads: int | None,
    generate_facade: bool,
    step_model: bool,
    vendored: bool,
    force: bool,
    as_json: bool,
    **limits: object,
) -> None:
    """Write a model repository from BUNDLE, which may be an engine, and print its folder.

    It holds the bundle, this package, a script that starts and watches a server, and a README. All
    hashes are checked, also when a server loads it.
    """
    from fixedstate.export import tritonrepo
    from fixedstate.serve.tritonmodel import ModelSetup

    slots = slots or tritonrepo.usual_slots(bundle)
    setup = ModelSetup("", slots, threads=threads or 0, **limits)  # type: ignore[arg-type]
    request = tritonrepo.RepositoryRequest(
        name, setup, facade=generate_facade, step=step_model, installed=not vendored
    )
    made = tritonrepo.write(bundle, output, request, force=force)
    if as_json:
        echo_json(made.to_dict())
    else:
        click.echo(str(made.path))
