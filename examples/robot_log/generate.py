"""Synthetic robot log: a recall task with right answers.

A log is lines of text. ``set arm_3 17`` stores a value, ``get arm_3`` asks for it and is followed
by one JSON line, ``{"arm_3": 17}``, closed by ``<end>``. Every other line (``battery low``,
``move cam_2``) stores nothing and only pushes a question away from what it asks for.

A device is set at most once in a log, so every answer is either right or wrong. The same tokenizer
serves every model: one token per word, device or value, one per printable ASCII character for
everything else.

    python generate.py log --tokens 256 --seed 0
    python generate.py items --tokens 1024 --count 3
    python generate.py tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, UNK, MASK, END = "<pad>", "<unk>", "<mask>", "<end>"
SPECIALS = (PAD, UNK, MASK, END)
KINDS = ("arm", "base", "cam", "grip")
DEVICES = tuple(f"{kind}_{unit}" for kind in KINDS for unit in range(8))
VALUES = tuple(range(100))
ACTIONS = ("move", "stop", "check")
STATUS = {
    "battery": ("low", "ok", "full"),
    "temp": ("high", "low", "ok"),
    "door": ("open", "closed"),
    "path": ("clear", "blocked"),
    "link": ("ok", "lost"),
    "lamp": ("on", "off"),
}


def words() -> list[str]:
    """List the multi-character words of the vocabulary that are neither devices nor values."""
    heads = [f"{head} " for head in ("set", "get", *ACTIONS)]
    tails = sorted({f" {tail}" for tails in STATUS.values() for tail in tails})
    return [*heads, *STATUS, *tails, '{"', '":']


def build_tokenizer() -> Tokenizer:
    """Build the shared word-level tokenizer; decoding gives back printable ASCII exactly."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    pieces = [*SPECIALS, *words(), *DEVICES, *(f" {value}" for value in VALUES), *characters]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=UNK))
    # One alternative per kind of piece, longest first, and any single character last, so that every
    # character belongs to exactly one piece and concatenation is the inverse.
    heads = "|".join(w for w in words() if w.endswith(" "))
    subjects = "|".join(STATUS)
    tails = "|".join(sorted({t for tails in STATUS.values() for t in tails}, reverse=True))
    kinds = "|".join(KINDS)
    pattern = (
        rf"\b(?:{heads})|\b(?:{subjects})\b| (?:{tails})\b|\b(?:{kinds})_[0-7](?![0-9])"
        r"""| (?:0|[1-9][0-9]?)(?![0-9])|\{"|":|[\s\S]"""
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def set_line(device: str, value: int) -> str:
    """Write the line that stores a value."""
    return f"set {device} {value}\n"


def question(device: str) -> str:
    """Write the line that asks for a value."""
    return f"get {device}\n"


def answer(device: str, value: int) -> str:
    """Write the expected answer: one line of JSON, without its end mark."""
    return json.dumps({device: value})


def filler(rng: random.Random) -> str:
    """Draw a line that stores nothing; one in four names a device, to keep recall honest."""
    if rng.random() < 0.25:
        return f"{rng.choice(ACTIONS)} {rng.choice(DEVICES)}\n"
    subject = rng.choice(list(STATUS))
    return f"{subject} {rng.choice(STATUS[subject])}\n"


def dense_log(
    rng: random.Random,
    count: Callable[[str], int],
    tokens: int = 256,
    keys: tuple[int, int] = (4, 8),
    filler_share: tuple[float, float] = (0.0, 0.7),
) -> str:
    """Write a training log of at least `tokens` tokens, dense in questions.

    Args:
        rng: Source of every choice.
        count: Number of tokens of one line.
        tokens: Length to reach.
        keys: Fewest and most devices that are set.
        filler_share: Range of the share of lines that are filler, drawn once per log.

    Returns:
        The log, its last line possibly past `tokens`.
    """
    waiting = rng.sample(DEVICES, rng.randint(*keys))
    share = rng.uniform(*filler_share)
    # One uninterrupted run of filler in some logs: long distances otherwise hardly occur.
    run_at = rng.uniform(0, tokens) if filler_share[1] > 0 and rng.random() < 0.4 else tokens
    set_rate = rng.choice((0.3, 0.6, 0.95))
    values: dict[str, int] = {}
    asked: dict[str, int] = {}
    lines: list[str] = []
    length = 0
    while length < tokens:
        if length >= run_at and values:
            batch = [filler(rng) for _ in range(rng.randint(5, tokens // 5))]
            run_at = tokens
        elif rng.random() < share:
            batch = [filler(rng)]
        elif waiting and (not values or rng.random() < set_rate):
            device = waiting.pop()
            values[device] = rng.choice(VALUES)
            asked[device] = 0
            batch = [set_line(device, values[device])]
        else:
            fewest = min(asked.values())
            fresh = [d for d, times in asked.items() if times == fewest]
            device = rng.choice(fresh if rng.random() < 0.7 else list(values))
            asked[device] += 1
            batch = [question(device), f"{answer(device, values[device])}{END}\n"]
        lines += batch
        length += sum(map(count, batch))
    return "".join(lines)


def recall_item(
    rng: random.Random,
    count: Callable[[str], int],
    tokens: int = 256,
    keys: tuple[int, int] = (4, 8),
) -> tuple[str, str]:
    """Write a log of at most `tokens` tokens that ends with one question, asked nowhere before.

    The asked device is set within the first tenth of the log, so the recall distance is close to
    the length; the other devices are set anywhere, and everything else is filler.

    Args:
        rng: Source of every choice.
        count: Number of tokens of one line.
        tokens: Longest prompt; the prompt is at most two tokens shorter.
        keys: Fewest and most devices that are set.

    Returns:
        The prompt, up to and including the line break of the question, and the expected answer.
    """
    devices = rng.sample(DEVICES, rng.randint(*keys))
    values = {device: rng.choice(VALUES) for device in devices}
    final = question(devices[0])
    sets = [set_line(device, values[device]) for device in devices]
    room = tokens - count(final) - sum(map(count, sets))
    lines: list[str] = []
    while room >= 3:
        lines.append(filler(rng))
        room -= count(lines[-1])
    for line in sets[1:]:
        lines.insert(rng.randint(0, len(lines)), line)
    lines.insert(rng.randint(0, len(lines) // 10), sets[0])
    return "".join([*lines, final]), answer(devices[0], values[devices[0]])


def line_counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Return a function that counts the tokens of a line and remembers the lines it has seen."""

    @cache
    def count(line: str) -> int:
        return len(tokenizer.encode(line).ids)

    return count


def main(argv: list[str] | None = None) -> int:
    """Run the command line: write a log, recall items or the tokenizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("log", "a log dense in questions"), ("items", "recall items, JSON lines")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--tokens", type=int, default=256)
        command.add_argument("--keys", type=int, nargs=2, default=(4, 8), metavar=("MIN", "MAX"))
        command.add_argument("--seed", type=int, default=0)
        if name == "items":
            command.add_argument("--count", type=int, default=10)
    commands.add_parser("tokenizer", help="the tokenizer file").add_argument("path", type=Path)
    args = parser.parse_args(argv)

    tokenizer = build_tokenizer()
    if args.command == "tokenizer":
        tokenizer.save(str(args.path))
        return 0
    rng, count, keys = random.Random(args.seed), line_counter(tokenizer), tuple(args.keys)
    if args.command == "log":
        sys.stdout.write(dense_log(rng, count, args.tokens, keys))
        return 0
    for _ in range(args.count):
        prompt, expected = recall_item(rng, count, args.tokens, keys)
        print(json.dumps({"prompt": prompt, "answer": expected}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
