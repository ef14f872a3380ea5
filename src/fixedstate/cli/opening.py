"""What the verbs that decode have in common: their options, and what is opened before a pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import NATURAL, POSITIVE, SEED, F, real, threads_option
from fixedstate.cli.output import note, progress
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.runtime import Decoder, Result
    from fixedstate.runtime.enginefile import EngineFolder
    from fixedstate.runtime.snapshot import Snapshot
    from fixedstate.runtime.text import Text

ENGINE = "engine.json"
"""What tells an engine's folder from a bundle's."""

SETTINGS = ("max_new_tokens", "min_new_tokens", "steps", "threshold", "temperature", "seed")
"""Fields of `Settings` that have an option."""

_SETTINGS = (
    click.option(
        "--max-new-tokens",
        type=POSITIVE,
        metavar="N",
        help="Tokens that come back at most [default: 128].",
    ),
    click.option(
        "--min-new-tokens",
        type=NATURAL,
        metavar="N",
        help="Tokens before a stop id may stand [default: 0].",
    ),
    click.option(
        "--steps",
        type=POSITIVE,
        metavar="N",
        help="Denoise passes per block at most [default: the bundle's].",
    ),
    click.option(
        "--threshold",
        type=real(0, 1),
        metavar="P",
        help="Confidence that fills a slot early [default: the bundle's].",
    ),
    click.option(
        "--temperature",
        type=real(0),
        metavar="T",
        help="0 takes the likeliest token [default: the bundle's].",
    ),
    click.option(
        "--seed",
        type=SEED,
        metavar="N",
        help="Of every prompt, for temperatures above 0 [default: 0].",
    ),
)
_ENGINE = (
    click.option(
        "--max-context",
        type=POSITIVE,
        metavar="N",
        help="Refuse prompts that need more tokens than this.",
    ),
    click.option(
        "--memory",
        type=click.Choice(["lean", "fast"]),
        help="Weights in memory once, or twice and faster [default: lean above 1 GB].",
    ),
    threads_option,
    click.option(
        "--provider",
        default="cpu",
        show_default=True,
        help="Where the graphs run: cpu, cuda, tensorrt or tensorrt-rtx.",
    ),
    click.option(
        "--allow-fallback", is_flag=True, help="Run on the CPU where the provider cannot."
    ),
    click.option(
        "--engine-cache",
        type=click.Path(file_okay=False),
        metavar="FOLDER",
        help="Keep what tensorrt and tensorrt-rtx compile for this card [default: nowhere].",
    ),
    click.option(
        "--head",
        type=click.Choice(["logits", "confidence", "entropy", "top_k"]),
        default="logits",
        show_default=True,
        help="What passes give of open slots, of what was exported (`export --head`).",
    ),
)

prefix_option = click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Saved state to go on from (`fixedstate prefix make`).",
)


def settings_options(function: F) -> F:
    """Add the options that say how a prompt is decoded."""
    return _with(function, _SETTINGS)


def engine_options(function: F) -> F:
    """Add the options that say where and within which limits passes run."""
    return _with(function, _ENGINE)


def _with(function: F, options: tuple[Callable[[F], F], ...]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the command line names; the bundle's defaults stand for the others."""
    return {name: options[name] for name in SETTINGS if options[name] is not None}


def check_file(file: Path, force: bool) -> None:
    """Refuse a file that cannot be written, before any work starts.

    Args:
        file: What is to be made.
        force: Whether a file that is there may be replaced; nothing else ever is: not a folder,
            and not a device, which the new file would stand in place of.

    Raises:
        UsageError: with the reason.
    """
    from fixedstate.bundle import check_target

    check_target(file, force)
    if file.is_dir():
        raise UsageError(f"{file} is a folder: choose another name")
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is no regular file and would be replaced by one: choose another")


def open_decoder(bundle: Path, options: Mapping[str, Any], slots: int) -> Decoder:
    """Load a bundle or an engine as the options say, and say before what will be in memory.

    Raises:
        BundleError, BackendError, UsageError: as `fixedstate.runtime.load`.
    """
    from fixedstate import runtime

    if (bundle / ENGINE).is_file():
        what, slots = "engine", _rows(bundle, slots)
    else:
        what = "bundle"
        _tell_memory(bundle, options, slots)
    with progress(f"opening the {what}"):
        decoder = runtime.load(
            bundle,
            threads=options["threads"],
            provider=options["provider"],
            allow_fallback=options["allow_fallback"],
            slots=slots,
            limit=options["max_context"],
            memory=options["memory"],
            head=options["head"],
            engine_cache=options["engine_cache"],
        )
    if what == "engine" or options["provider"] != "cpu":
        # before the interpreter ends: what is on the device goes in order
        click.get_current_context().call_on_close(decoder.close)
    return decoder


def _rows(engine: Path, slots: int) -> int:
    """Slots, but no more than an engine was built for: other prompts wait for their turn."""
    from fixedstate.runtime.enginefile import EngineFolder

    plans = EngineFolder.open(engine, verify=False).plans.values()
    rows = [profile["input_ids"][2][0] for plan in plans for profile in plan.profiles]
    return min([slots, *rows])


def _tell_memory(bundle: Path, options: Mapping[str, Any], slots: int) -> None:
    """Say what will be in memory: to a terminal, or where a mode was asked for."""
    from fixedstate.bundle import Bundle
    from fixedstate.runtime import memory

    limit = options["max_context"]
    plan = memory.plan(
        Bundle.open(bundle, verify_weights=False),
        options["memory"],
        slots=slots,
        limit=limit,
        capacity=limit or 0,
        provider=options["provider"],
        head=options["head"],
    )
    if options["memory"] or sys.stderr.isatty():
        note(plan.text())
    shortage = plan.shortage(memory.available())
    if shortage:
        note(shortage)


def open_text(bundle: Bundle | EngineFolder, needed: bool) -> Text | None:
    """The bundle's tokenizer; None where it has none and every prompt is given as ids.

    Raises:
        UsageError: where it is needed and missing.
    """
    from fixedstate.runtime.text import TOKENIZER, Text

    return Text.open(bundle) if needed or TOKENIZER in bundle.files else None


def open_prefix(file: Path | None, decoder: Decoder) -> Snapshot | None:
    """The saved state in a file, checked against the model; None where no file is given.

    Raises:
        StateError: for a file that is missing, damaged or of another model.
        UsageError: for a model without state.
    """
    if file is None:
        return None
    from fixedstate.runtime.snapshot import Snapshot

    state = Snapshot.load(file)
    state.check(decoder.engine)
    return state


def tokens_of(state: Snapshot | None) -> int:
    """Tokens that a saved state stands for, pending ones included."""
    return 0 if state is None else state.past_length + len(state.pending)


def document(
    result: Result, text: Text | None, *, seed: int, prompt_tokens: int, prefix_tokens: int
) -> dict[str, Any]:
    """What ``--json`` says about one answer.

    Args:
        result: What came of the request.
        text: The bundle's tokenizer, if it has one.
        seed: Of the request.
        prompt_tokens: Tokens of its prompt, those of a saved prefix not among them.
        prefix_tokens: Tokens of the saved prefix.
    """
    return {
        "text": text.decode(result.token_ids) if text else None,
        **result.to_dict(),
        "seed": seed,
        "prompt_tokens": prompt_tokens,
        "prefix_tokens": prefix_tokens,
    }
