"""``fixedstate demo``: a shipped model reads a log longer than it was trained on and is asked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import NATURAL, POSITIVE, debug_option, json_option, threads_option
from fixedstate.cli.output import byte_text, echo_fields, echo_json, echo_table, note, progress

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.cli.demo_log import RobotLog
    from fixedstate.runtime import Result

_NEW_TOKENS = 32
_TRAIN_LENGTH = 256  # where a bundle does not say


@click.command("demo", short_help="Export a shipped model and ask it about a robot log.")
@click.option(
    "--model",
    type=click.Choice(["tiny-hybrid", "tiny-mamba", "tiny-attention"]),
    default="tiny-hybrid",
    show_default=True,
    help="Shipped model.",
)
@click.option(
    "--tokens",
    type=POSITIVE,
    metavar="N",
    help="Length of the log [default: twice the training length].",
)
@click.option(
    "--seed", type=NATURAL, metavar="N", default=0, show_default=True, help="Draws the log."
)
@threads_option
@json_option
@debug_option
def command(model: str, tokens: int | None, seed: int, threads: int | None, as_json: bool) -> None:
    """Export a shipped model, let it read a robot log and ask what the log said.

    Answers are right or wrong; which they are is printed, and is no error either way.
    """
    with tempfile.TemporaryDirectory(prefix="fixedstate-") as folder, progress("exporting") as tell:
        bundle = _export(model, Path(folder) / f"{model}.bundle", tell)
        tell("reading the log")
        data = _ask(bundle, tokens, seed, threads)
    if as_json:
        echo_json({"model": model, **data})
    else:
        _print(model, data)


def _export(model: str, folder: Path, tell: Any) -> Bundle:
    from fixedstate.export.pipeline import export_bundle

    report = export_bundle(
        model,
        folder,
        block_len=None,
        mask_id=None,
        stop_ids=None,
        precision="fp32",
        fused=False,
        force=False,
        allow_unexpected=False,
        conv_layout=None,
        notes=note,
        progress=tell,
    )
    return report.bundle


def _ask(bundle: Bundle, tokens: int | None, seed: int, threads: int | None) -> dict[str, Any]:
    """Decode the answers of all questions at once, each behind the whole log."""
    from fixedstate.cli.demo_log import robot_log
    from fixedstate.runtime import Request, Settings, load
    from fixedstate.runtime.text import Text

    text = Text.open(bundle)
    trained = bundle.decode.train_length or _TRAIN_LENGTH
    log = robot_log(tokens or 2 * trained, lambda piece: len(text.encode(piece)), seed=seed)
    settings = Settings(max_new_tokens=_NEW_TOKENS)
    prompts = [text.encode(log.text + question.prompt) for question in log.questions]
    decoder = load(bundle.path, threads=threads, slots=len(prompts))
    results = decoder.generate([Request(prompt, settings) for prompt in prompts])
    answers = [text.decode(result.token_ids).strip() for result in results]
    return {
        "log_tokens": log.tokens,
        "train_length": bundle.decode.train_length,
        **_figures(results),
        "questions": _marked(log, answers),
    }


def _marked(log: RobotLog, answers: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "question": question.prompt.strip(),
            "distance": question.distance,
            "answer": answer,
            "expected": question.answer,
            "right": answer == question.answer,
        }
        for question, answer in zip(log.questions, answers, strict=True)
    ]


def _figures(results: list[Result]) -> dict[str, Any]:
    tokens = sum(len(result.token_ids) for result in results)
    passes = sum(result.denoise_passes for result in results)
    seconds = max(result.seconds["total"] for result in results)
    return {
        "state_bytes": results[0].state_bytes,
        "kv_bytes": results[0].kv_bytes,
        "tokens": tokens,
        "passes_per_token": passes / tokens if tokens else None,
        "tokens_per_second": tokens / seconds if seconds else None,
        "seconds": seconds,
    }


def _print(model: str, data: dict[str, Any]) -> None:
    questions = data["questions"]
    echo_table(
        "",
        ("question", "asked after>", "answer", ""),
        [
            (
                q["question"],
                f"{q['distance']} tokens",
                q["answer"],
                "right" if q["right"] else "wrong",
            )
            for q in questions
        ],
    )
    right = sum(q["right"] for q in questions)
    trained = data["train_length"]
    length = f"{data['log_tokens']:,} tokens"
    per_token, speed = data["passes_per_token"], data["tokens_per_second"]
    echo_fields(
        (
            ("model", model),
            ("log", f"{length} (trained on {trained:,})" if trained else length),
            ("right answers", f"{right} of {len(questions)}"),
            ("state per row", byte_text(data["state_bytes"])),
            ("KV per row", byte_text(data["kv_bytes"])),
            ("passes per token", None if per_token is None else f"{per_token:.2f}"),
            ("tokens per second", None if speed is None else f"{speed:,.0f}"),
        )
    )
