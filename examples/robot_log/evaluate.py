"""Measure a trained denoiser as it is shipped: masked-token loss, and recall against log length.

    python evaluate.py models/tiny-hybrid --items 200 > tiny-hybrid.json

Recall is exact match of the whole answer, decoded block by block: whole blocks of the prompt are
committed, the remainder stands unmasked in the first active block, and every block is denoised in
eight passes of equal quota, most confident tokens first, greedily. A wrong answer, a missing end
mark and anything else in front of it count as wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from artefact import load
from denoiser import Denoiser, State
from generate import END, MASK, build_tokenizer, dense_log, line_counter, recall_item
from torch import Tensor
from train import TRAIN_LENGTH

PASSES = 8
SLICE = 16  # blocks of a prompt that are committed at once
ANSWER_BLOCKS = 2  # six tokens of answer behind at most fifteen of prompt


def masked_loss(model: Denoiser, length: int, logs: int, seed: int) -> dict[str, float]:
    """Measure the masked-token loss, mask share uniform per block, and the unigram entropy.

    Returns:
        `loss` averages over all masked tokens, `nelbo` weights each block by one over its masked
        share, `unigram_entropy` is that of the same logs; all in nats per token.
    """
    tokenizer, rng = build_tokenizer(), random.Random(seed)
    count, block_len = line_counter(tokenizer), model.sizes.block_len
    generator = torch.Generator().manual_seed(seed)
    mask_id = tokenizer.token_to_id(MASK)
    total = weighted = 0.0
    tokens = blocks = 0
    histogram = torch.zeros(model.sizes.vocab, dtype=torch.float64)
    for _ in range(0, logs, 8):
        texts = [dense_log(rng, count, length) for _ in range(8)]
        ids = torch.tensor([tokenizer.encode(text).ids[:length] for text in texts])
        histogram += torch.bincount(ids.flatten(), minlength=len(histogram))
        clean = ids.unflatten(1, (-1, block_len))
        share = torch.rand(*clean.shape[:2], 1, generator=generator)
        masked = torch.rand(clean.shape, generator=generator) < share
        start = (torch.arange(clean.shape[1]) * block_len).expand(8, -1)
        hidden = model(clean, clean.masked_fill(masked, mask_id), start)
        each = F.cross_entropy(
            model.logits(hidden).flatten(0, 2), clean.flatten(), reduction="none"
        ).view(clean.shape)
        each = each * masked
        total += each.sum().item()
        tokens += int(masked.sum())
        weighted += (each / share).mean(-1).sum().item()
        blocks += masked.shape[0] * masked.shape[1]
    p = histogram[histogram > 0] / histogram.sum()
    return {
        "loss": total / tokens,
        "nelbo": weighted / blocks,
        "unigram_entropy": -(p * p.log()).sum().item(),
    }


def reveal(model: Denoiser, canvas: Tensor, past: State, committed: int, mask_id: int) -> Tensor:
    """Denoise the open slots of one block [B, L] in `PASSES` passes of equal quota."""
    quota = ((canvas == mask_id).sum(1) + PASSES - 1) // PASSES
    while (canvas == mask_id).any():
        logits = model.denoise(canvas, past, committed)
        logits[..., mask_id] = -math.inf
        best, tokens = logits.softmax(-1).max(-1)
        best = best.masked_fill(canvas != mask_id, -1)
        rank = best.argsort(stable=True, dim=1, descending=True).argsort(1)
        shown = (rank < quota[:, None]) & (canvas == mask_id)
        canvas = torch.where(shown, tokens, canvas)
    return canvas


def recall(model: Denoiser, length: int, items: int, seed: int, rows: int) -> float:
    """Return the share of right answers for prompts just below `length` tokens."""
    tokenizer, rng = build_tokenizer(), random.Random(seed)
    count, block_len = line_counter(tokenizer), model.sizes.block_len
    mask_id, end = tokenizer.token_to_id(MASK), tokenizer.token_to_id(END)
    blocks = length // block_len - ANSWER_BLOCKS
    right = 0
    for first in range(0, items, rows):
        batch = min(rows, items - first)
        # The prompts of a batch share their number of whole blocks, not their remainder.
        drawn = [
            recall_item(rng, count, blocks * block_len + rng.randint(2, block_len - 1))
            for _ in range(batch)
        ]
        prompts = [tokenizer.encode(prompt).ids for prompt, _ in drawn]
        whole = torch.tensor([ids[: blocks * block_len] for ids in prompts])
        past = model.empty(batch)
        for index, part in enumerate(whole.split(SLICE * block_len, 1)):
            past = model.commit(part, past, index * SLICE * block_len)
        text: list[list[int]] = [[] for _ in range(batch)]
        rests = [ids[blocks * block_len :] for ids in prompts]
        for block in range(ANSWER_BLOCKS):
            canvas = torch.full((batch, block_len), mask_id)
            if block == 0:
                for row, rest in zip(canvas, rests, strict=True):
                    row[: len(rest)] = torch.tensor(rest)
            committed = (blocks + block) * block_len
            canvas = reveal(model, canvas, past, committed, mask_id)
            past = model.commit(canvas, past, committed)
            for got, row, rest in zip(text, canvas.tolist(), rests, strict=True):
                got += row[len(rest) if block == 0 else 0 :]
        for got, (_, expected) in zip(text, drawn, strict=True):
            answer = got[: got.index(end)] if end in got else []
            right += tokenizer.decode(answer) == expected
    return right / items


def main(argv: list[str] | None = None) -> int:
    """Run the command line: JSON on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--logs", type=int, default=200, help="logs for the loss")
    parser.add_argument("--rows", type=int, default=20, help="prompts decoded at once")
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    model = load(args.folder)
    length = TRAIN_LENGTH
    report: dict[str, object] = {
        "model": args.folder.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "items": args.items,
    }
    accuracy: dict[str, float] = {}
    with torch.inference_mode():
        report |= masked_loss(model, length, args.logs, args.seed)
        for factor in args.factors:
            accuracy[f"{factor}x"] = recall(
                model, factor * length, args.items, args.seed + factor, args.rows
            )
            print(f"{args.folder.name} {factor}x {accuracy[f'{factor}x']:.3f}", file=sys.stderr)
    print(json.dumps(report | {"accuracy": accuracy}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
