"""``fixedstate calibrate data``, ``collect``, ``merge`` and ``score``: what plans are made of."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.calibrate_common import (
    FORMATS,
    MIB,
    Verb,
    batch_option,
    begun,
    data_option,
    formats_option,
    kinds_of,
    kinds_option,
    output_option,
    policy_of,
    policy_options,
    records_option,
    resume_option,
    settle,
)
from fixedstate.cli.opening import check_file
from fixedstate.cli.options import (
    POSITIVE,
    bundle_argument,
    debug_option,
    force_option,
    json_option,
    prompt_file,
)
from fixedstate.cli.output import echo_json, note, progress
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.calib.data import Data
    from fixedstate.calib.score import Sensitivity
    from fixedstate.calib.table import Table
    from fixedstate.runtime.text import Text

_BLOCKS = 16  # of a sequence that a text is cut into

Sequence_ = tuple[list[int], int]  # tokens, and how many of them are a prompt


@click.command("data", cls=Verb, short_help="Make a file of token sequences from texts.")
@bundle_argument
@click.option(
    "--text",
    "texts",
    type=prompt_file,
    multiple=True,
    metavar="FILE",
    help="UTF-8 text, which is cut into sequences (repeatable); - is stdin.",
)
@click.option(
    "--samples",
    type=prompt_file,
    multiple=True,
    metavar="FILE",
    help="JSON objects, one a line, with prompt and completion, or ids and prompt_len.",
)
@click.option(
    "--tokens",
    type=POSITIVE,
    metavar="N",
    help=f"Of each sequence of a text [default: {_BLOCKS} blocks].",
)
@output_option
@force_option
@json_option
@debug_option
def data(
    bundle: Path,
    texts: tuple[str, ...],
    samples: tuple[str, ...],
    tokens: int | None,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Make a file of token sequences for BUNDLE from texts like those it will see.

    A sequence is in one of three splits by the hash of its tokens: ranges are collected on the
    first, formats scored on the second, reports made on the third.
    """
    if not texts and not samples:
        raise click.UsageError("give --text or --samples: nothing is there to make sequences of")
    from fixedstate.bundle import Bundle
    from fixedstate.calib.data import write_data
    from fixedstate.runtime.text import Text

    check_file(output, force)
    opened = Bundle.open(bundle, verify_weights=False)
    length = opened.spec.block_len
    if (tokens := tokens or _BLOCKS * length) < length:
        raise UsageError(f"--tokens {tokens} is less than a block of {length}: give more")
    if tokens % length:
        note(f"the last {tokens % length} of every {tokens} tokens are no whole block: not used")
    with progress("reading the tokenizer"):
        text = Text.open(opened)
    encoded = [text.encode(one) for one in texts]
    found = [cut for ids in encoded for cut in _cut(ids, tokens, length)]
    dropped = sum(map(len, encoded)) - sum(len(ids) for ids, _ in found)
    found += [sample for one in samples for sample in _samples(one, text)]
    whole = [one for one in found if len(one[0]) // length * length > one[1]]
    if not whole:
        raise UsageError(
            f"none of {len(found)} sequences has a whole block of {length} tokens behind its "
            "prompt: give longer texts"
        )
    made = write_data(output, opened, whole)
    summary = {
        "path": str(output),
        "sha256": made.sha256,
        **_counts(made),
        "dropped": {
            "tokens": dropped,
            "short": len(found) - len(whole),
            "repeated": len(whole) - len(made.records),
        },
    }
    if as_json:
        echo_json(summary)
        return
    _tell_data(summary, length)
    click.echo(str(output))


def _cut(ids: list[int], tokens: int, length: int) -> Iterator[Sequence_]:
    """Sequences of a text one behind the other; what is left and shorter than a block is not."""
    for start in range(0, len(ids), tokens):
        if len(piece := ids[start : start + tokens]) >= length:
            yield piece, 0


def _samples(content: str, text: Text) -> Iterator[Sequence_]:
    """Sequences of a file of samples.

    Raises:
        UsageError: naming the line.
    """
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except json.JSONDecodeError as err:
            raise UsageError(f"--samples, line {number} is no JSON: {err}") from err
        keys = set(one) if isinstance(one, dict) else set()
        if keys == {"prompt", "completion"} and all(isinstance(v, str) for v in one.values()):
            prompt = text.encode(one["prompt"])
            yield [*prompt, *text.encode(one["completion"], goes_on=True)], len(prompt)
        elif keys == {"ids", "prompt_len"} and (
            isinstance(one["ids"], list) and type(one["prompt_len"]) is int
        ):
            yield one["ids"], one["prompt_len"]
        else:
            raise UsageError(
                f"--samples, line {number} must be an object with the texts prompt and completion, "
                f"or with ids (a list) and prompt_len (a number); got {line[:60]}"
            )


def _counts(made: Data) -> dict[str, Any]:
    from fixedstate.calib.data import SPLITS

    sequences = Counter(record.split for record in made.records)
    tokens: Counter[str] = Counter()
    for record in made.records:
        tokens[record.split] += len(record.ids)
    return {
        "sequences": len(made.records),
        "tokens": sum(tokens.values()),
        "splits": {name: {"sequences": sequences[name], "tokens": tokens[name]} for name in SPLITS},
    }


def _tell_data(summary: dict[str, Any], length: int) -> None:
    for name, part in summary["splits"].items():
        click.echo(f"{name}: {part['sequences']:,} sequences, {part['tokens']:,} tokens", err=True)
        if not part["sequences"]:
            note(f"nothing is in split {name!r}: give more texts, or cut them shorter (--tokens)")
    words = {
        "tokens": f"tokens at the end of a text are less than a block of {length}",
        "short": "sequences have no whole block behind their prompt",
        "repeated": "sequences were there twice",
    }
    for name, count in summary["dropped"].items():
        if count:
            note(f"left out: {count} {words[name]}")


@click.command("collect", cls=Verb, short_help="Collect the ranges of activations.")
@bundle_argument
@data_option
@output_option
@policy_options
@records_option
@batch_option
@click.option(
    "--memory",
    type=POSITIVE,
    default=1024,
    show_default=True,
    metavar="MIB",
    help="Activations in memory at once; more are taken in several runs.",
)
@resume_option
@force_option
@json_option
@debug_option
def collect(
    bundle: Path,
    data_file: Path,
    output: Path,
    records: int | None,
    batch: int,
    memory: int,
    resume: bool,
    force: bool,
    as_json: bool,
    **passes: Any,
) -> None:
    """Collect the ranges of BUNDLE's activations along block decoding of the sequences.

    The table is the same whatever the order, --batch and --memory. An interrupted run leaves what
    it has in FILE.partial.
    """
    from fixedstate.bundle import Bundle
    from fixedstate.calib import collect as collector
    from fixedstate.calib.data import read_data
    from fixedstate.calib.table import Table

    partial, left = begun(output, force=force, resume=resume)
    start = time.perf_counter()
    with progress("opening the bundle") as tell:
        opened = Bundle.open(bundle)
        table = collector.collect(
            opened,
            read_data(data_file, opened),
            policy_of(**passes),
            records=records,
            batch=batch,
            memory=memory * MIB,
            resume=Table.load(left) if left else None,
            save=partial,
            progress=tell,
        )
    table.check_complete()
    settle(table, partial, output)
    _say_table(table, output, time.perf_counter() - start, as_json)


@click.command("merge", cls=Verb, short_help="Make one table of several.")
@click.argument("tables", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option
@force_option
@json_option
@debug_option
def merge(tables: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Make one table of TABLES, which were collected on different sequences of the same data."""
    from fixedstate.calib.table import Table

    if len(tables) < 2:
        raise click.UsageError("give two tables or more: one alone is merged already")
    check_file(output, force)
    start = time.perf_counter()
    whole, *others = map(Table.load, tables)
    for other in others:
        whole.merge(other)
    whole.save(output)
    _say_table(whole, output, time.perf_counter() - start, as_json)


@click.command("score", cls=Verb, short_help="Measure each format of each weight alone.")
@bundle_argument
@data_option
@click.option(
    "--table",
    "table_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ranges (`fixedstate calibrate collect`).",
)
@output_option
@formats_option
@kinds_option
@click.option(
    "--records", type=POSITIVE, default=8, show_default=True, metavar="N", help="Sequences at most."
)
@batch_option
@resume_option
@force_option
@json_option
@debug_option
def score(
    bundle: Path,
    data_file: Path,
    table_file: Path,
    output: Path,
    formats: tuple[str, ...],
    kinds: tuple[str, ...],
    records: int,
    batch: int,
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Measure how far BUNDLE is away with one weight quantised, for every weight and format.

    It takes a run for each. An interrupted one leaves what it has in FILE.partial.
    """
    from fixedstate.bundle import Bundle
    from fixedstate.calib import score as scorer
    from fixedstate.calib.data import read_data
    from fixedstate.calib.formats import format_named
    from fixedstate.calib.score import Sensitivity
    from fixedstate.calib.table import Table

    names = [format_named(name).name for name in formats or FORMATS]
    chosen = kinds_of(kinds)
    partial, left = begun(output, force=force, resume=resume)
    start = time.perf_counter()
    with progress("opening the bundle") as tell:
        opened = Bundle.open(bundle)
        found = scorer.score(
            opened,
            Table.load(table_file),
            read_data(data_file, opened),
            names,
            kinds=chosen,
            records=records,
            batch=batch,
            resume=Sensitivity.load(left) if left else None,
            save=partial,
            progress=tell,
        )
    settle(found, partial, output)
    summary = {
        "path": str(output),
        **describe_scores(found),
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        echo_json(summary)
        return
    for name, total in summary["kl"].items():
        click.echo(f"{name}: {total:.3g} nats, all weights added", err=True)
    click.echo(str(output))


def describe_table(table: Table) -> dict[str, Any]:
    """What ``show`` says about a table, ready for JSON."""
    return {
        "sha256": table.sha256,
        "model": table.model,
        "data": table.data,
        "policy": table.policy.to_dict(),
        "records": len(table.records),
        "unvisited": list(table.unvisited()),
        "activations": {
            name: {
                "values": seen.histogram.seen,
                "largest": seen.histogram.amax,
                "by_pass": dict(sorted(seen.passes.items())),
            }
            for name, seen in sorted(table.inputs.items())
        },
    }


def describe_scores(found: Sensitivity) -> dict[str, Any]:
    """What ``score`` and ``show`` say about sensitivities, ready for JSON."""
    totals: Counter[str] = Counter()
    for by_format in found.kl.values():
        totals.update({name: max(0.0, kl) for name, kl in by_format.items()})
    return {
        "table": found.table,
        "records": len(found.records),
        "weights": len(found.kl),
        "kl": dict(sorted(totals.items())),
    }


def _say_table(table: Table, output: Path, seconds: float, as_json: bool) -> None:
    summary = {
        "path": str(output),
        "sha256": table.sha256,
        "records": len(table.records),
        "activations": len(table.inputs),
        "unvisited": list(table.unvisited()),
        "seconds": seconds,
    }
    if as_json:
        echo_json(summary)
        return
    count = f"{summary['activations']} activations over {summary['records']} sequences"
    click.echo(f"{count}, {seconds:.1f} s", err=True)
    if missing := table.unvisited():
        note(f"{len(missing)} activations were never seen: {', '.join(missing[:3])}")
    click.echo(str(output))
