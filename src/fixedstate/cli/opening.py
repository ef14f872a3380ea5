"""What the verbs that decode have in common: their options, and what is opened before a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import NATURAL, POSITIVE, SEED, F, real, threads_option
from fixedstate.cli.output import progress

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.runtime import Decoder, Result
    from fixedstate.runtime.snapshot import Snapshot
    from fixedstate.runtime.text import Text

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


def open_decoder(bundle: Path, options: Mapping[str, Any], slots: int) -> Decoder:
    """Load a bundle as the options say.

    Raises:
        BundleError, BackendError, UsageError: as `fixedstate.runtime.load`.
    """
    from fixedstate import runtime

    with progress("opening the bundle"):
        return runtime.load(
            bundle,
            threads=options["threads"],
            provider=options["provider"],
            allow_fallback=options["allow_fallback"],
            slots=slots,
            limit=options["max_context"],
        )


def open_text(bundle: Bundle, needed: bool) -> Text | None:
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
