"""Train one tiny denoiser on the robot log: one core, at most twenty minutes.

    python train.py attention --out run-attention # again with --resume after an interruption
    python train.py mamba --selfcheck             # training form against step-by-step inference

Every block of a sequence is trained as the frontier of its own clean prefix. Half of the blocks are
masked at random, half are masked behind a clean beginning, which is how the first active block of a
prompt looks. The loss is cross entropy on masked positions, weighted by one over the masked share
(clipped), so that blocks count alike however much of them is masked.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from denoiser import PRESETS, Attention, Denoiser, Mamba2
from generate import END, MASK, build_tokenizer, dense_log, line_counter
from torch import Tensor

TRAIN_LENGTH = 256
LONGEST = 4096  # positions that stretched training sequences reach
# Copying a value is learned first, where hardly anything else is set; which value belongs to which
# device is then learned in a jump. Per level: fewest and most devices, largest share of filler, and
# the running recall that ends the level.
LEVELS = (((1, 2), 0.0, 0.5), ((1, 6), 0.1, 0.75), ((2, 8), 0.4, 0.85), ((4, 8), 0.7, 2.0))
# Sequences per step and learning rate. Attention needs the calmer pair to form its lookup.
RECIPES = {"attention": (6, 1.5e-3), "mamba": (4, 4e-3), "hybrid": (4, 4e-3)}


@dataclass(frozen=True)
class Batch:
    """One training batch; every tensor is [B, n, L] except `start` [B, n].

    `recalled` marks masked values of answers whose device is seen; progress counts them.
    """

    clean: Tensor
    noisy: Tensor
    weight: Tensor
    start: Tensor
    recalled: Tensor


class Sampler:
    """Seeded source of training batches."""

    def __init__(self, seed: int, rows: int, block_len: int, stretch: bool) -> None:
        self.rng = random.Random(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.rows, self.block_len, self.stretch = rows, block_len, stretch
        self.level = 0
        tokenizer = build_tokenizer()
        self.count = line_counter(tokenizer)
        self.encode = cache(lambda line: tuple(tokenizer.encode(line).ids))
        self.mask_id, self.colon, self.end = map(tokenizer.token_to_id, (MASK, '":', END))
        self.quote = tokenizer.token_to_id('{"')

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.torch_rng)

    def _log(self) -> list[int]:
        keys, share, _ = LEVELS[self.level]
        log = dense_log(self.rng, self.count, TRAIN_LENGTH, keys, (0.0, share))
        return [i for line in log.splitlines(True) for i in self.encode(line)][:TRAIN_LENGTH]

    def _masked(self, blocks: int) -> Tensor:
        rows, length = self.rows, self.block_len
        # Stratified over the batch: every mask share occurs in every batch.
        order = torch.randperm(rows * blocks, generator=self.torch_rng).view(rows, blocks, 1)
        share = (order + self._rand(rows, blocks, 1)) / (rows * blocks)
        fixed = (self._rand(rows, blocks, 1) * length).long()
        tail = self._rand(rows, blocks, 1)
        tail = torch.where(tail < 0.5, torch.ones(()), tail)
        behind = (torch.arange(length) >= fixed) & (self._rand(rows, blocks, length) < tail)
        anywhere = self._rand(rows, blocks, length) < share
        masked = torch.where(self._rand(rows, blocks, 1) < 0.5, behind, anywhere)
        one = (self._rand(rows, blocks, 1) * length).long() == torch.arange(length)
        return torch.where(masked.any(-1, keepdim=True), masked, one)

    def _start(self, blocks: int) -> Tensor:
        start = (torch.arange(blocks) * self.block_len).repeat(self.rows, 1)
        if not self.stretch or self.level < 2:
            return start
        # Gaps between blocks: attention meets far positions although sequences stay short.
        for row in start:
            if self.rng.random() < 0.5:
                room = LONGEST - TRAIN_LENGTH
                for _ in range(self.rng.randint(1, 4)):
                    gap = int(room ** self.rng.random())
                    row[self.rng.randrange(blocks) :] += gap
                    room -= gap
        return start

    def batch(self) -> Batch:
        """Draw the next batch."""
        clean = torch.tensor([self._log() for _ in range(self.rows)])
        before = F.pad(clean, (1, 0))[:, :-1]
        after_quote = F.pad((clean == self.quote).cumsum(1) - (clean == self.end).cumsum(1), (1, 0))
        in_answer = (after_quote[:, :-1] > 0) | (clean == self.quote)
        clean, recalled, in_answer = (
            t.unflatten(1, (-1, self.block_len)) for t in (clean, before == self.colon, in_answer)
        )
        masked = self._masked(clean.shape[1])
        # Values are the last tokens to be revealed, and what there is to learn: mask them more.
        masked |= recalled & (self._rand(self.rows, clean.shape[1], 1) < 0.5)
        share = masked.float().mean(-1, keepdim=True)
        # Recall proper is a value whose device, two tokens before it, can be seen; decoding reveals
        # the device first. Lines other than answers are mostly noise: they count less.
        inside = torch.arange(TRAIN_LENGTH) % self.block_len
        device_seen = (inside < 2) | ~F.pad(masked.flatten(1), (2, 0))[:, :-2]
        recalled &= device_seen.view_as(masked)
        worth = torch.where(recalled, 2.0, torch.where(in_answer, 0.5, 0.15))
        weight = masked * worth / share.clamp(min=0.25)
        noisy = clean.masked_fill(masked, self.mask_id)
        recalled[:, :2] = False  # what is asked there is often set behind a mask of the same block
        return Batch(clean, noisy, weight, self._start(clean.shape[1]), recalled & masked)


def selfcheck(kind: str, tolerance: float = 1e-4) -> float:
    """Compare the two-stream form with step-by-step inference and with plain recurrences.

    Args:
        kind: Preset name.
        tolerance: Largest difference allowed.

    Returns:
        The largest difference found, over logits, carried states and single mixers.
    """
    torch.manual_seed(0)
    model = Denoiser(PRESETS[kind]).eval()
    rows, blocks, length = 2, 5, model.sizes.block_len
    clean = torch.randint(4, model.sizes.vocab, (rows, blocks, length))
    noisy = clean.masked_fill(torch.rand(clean.shape) < 0.5, 2)
    start = (torch.arange(blocks) * length).expand(rows, -1)
    worst = 0.0
    with torch.no_grad():
        trained, past = model.logits(model(clean, noisy, start)), model.empty(rows)
        for block in range(blocks):
            stepped = model.denoise(noisy[:, block], past, block * length)
            worst = max(worst, (stepped - trained[:, block]).abs().max().item())
            past = model.commit(clean[:, block], past, block * length)
        whole = model.commit(clean.flatten(1), model.empty(rows), 0)
        for one, other in zip(whole, past, strict=True):
            for a, b in zip(one, other, strict=True):
                worst = max(worst, (a - b).abs().max().item())
        for layer in model.layers:
            x = torch.randn(1, blocks * length, model.sizes.width)
            fast = layer.mixer(
                x.unflatten(1, (blocks, length))[None], layer.mixer.empty(1), start[:1]
            )[0].flatten(0, 3)
            plain = plain_mamba if isinstance(layer.mixer, Mamba2) else plain_attention
            worst = max(worst, (plain(layer.mixer, x[0]) - fast).abs().max().item())
    if not worst < tolerance:
        raise SystemExit(f"{kind}: training form and inference differ by {worst:.2e}")
    return worst


def plain_mamba(mixer: Mamba2, x: Tensor) -> Tensor:
    """Apply the Mamba-2 mixer to x [T, D] token by token, as the definition reads."""
    sizes, heads = mixer.sizes, mixer.n_heads

    def scan(z: Tensor, raw: Tensor, dt: Tensor) -> Tensor:
        padded = F.pad(raw, (0, 0, sizes.conv_taps - 1, 0))
        u = F.silu(F.conv1d(padded.T[None], mixer.conv1d.weight, mixer.conv1d.bias,
                            groups=mixer.channels)[0].T)  # fmt: skip
        values, b, c = u.split([sizes.inner, sizes.d_state, sizes.d_state], -1)
        values, dt = values.unflatten(-1, (heads, -1)), F.softplus(dt + mixer.dt_bias)
        state, out = torch.zeros(heads, sizes.d_state, sizes.ssm_head_dim), []
        for t in range(len(u)):
            state = torch.exp(dt[t] * -mixer.A_log.exp())[:, None, None] * state
            state = state + dt[t, :, None, None] * b[t, :, None] * values[t, :, None]
            out.append(c[t] @ state + mixer.D[:, None] * values[t])
        return mixer.norm(torch.stack(out).flatten(1) * F.silu(z))

    parts = mixer.in_proj(x).split([sizes.inner, mixer.channels, heads], -1)
    ahead, behind = scan(*parts), []
    for block in zip(*(p.split(sizes.block_len) for p in parts), strict=True):
        behind.append(scan(*(p.flip(0) for p in block)).flip(0))
    return mixer.out_proj(ahead + torch.cat(behind))


def plain_attention(mixer: Attention, x: Tensor) -> Tensor:
    """Apply block-causal attention to x [T, D] with complex rotations and one dense mask."""
    sizes, length = mixer.sizes, len(x)

    def heads(projected: Tensor, rope: bool) -> Tensor:
        y = projected.unflatten(-1, (-1, sizes.head_dim)).transpose(0, 1)
        if rope:
            pairs = torch.complex(*y.chunk(2, -1))
            pairs = pairs * torch.exp(1j * torch.arange(length)[:, None] * mixer.rates)
            y = torch.cat([pairs.real, pairs.imag], -1)
        return y.repeat_interleave(sizes.heads // len(y), 0)

    q, k = heads(mixer.q_proj(x), True), heads(mixer.k_proj(x), True)
    block = torch.arange(length) // sizes.block_len
    seen = block[None] <= block[:, None]
    y = F.scaled_dot_product_attention(q, k, heads(mixer.v_proj(x), False), attn_mask=seen)
    return mixer.o_proj(y.transpose(0, 1).flatten(1))


def optimizers(model: Denoiser, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for everything else."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=5 * lr, weight_decay=0.01)
    # The embedding moves slowly: copying a value is learned against its rows.
    groups = [
        {"params": [p for p in others if p.ndim != 2]},
        {"params": [p for p in others if p.ndim == 2], "lr": lr / 4},
    ]
    return [muon, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def train(args: argparse.Namespace) -> bool:
    """Train until the step or time budget is spent; a checkpoint is written on the way.

    Returns:
        Whether the training is finished; interrupted, it goes on with ``--resume``.
    """
    torch.set_num_threads(1)
    os.nice(10)
    # Large blocks from the heap, not fresh pages for every tensor: twice as fast on a CPU.
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, 1 << 30)
    sizes = PRESETS[args.kind]
    torch.manual_seed(args.seed)
    model = Denoiser(sizes)
    sampler = Sampler(args.seed, args.rows, sizes.block_len, stretch="a" in sizes.layers)
    opts = optimizers(model, args.lr)
    base = [group["lr"] for opt in opts for group in opt.param_groups]
    step, spent, running = 0, 0.0, 0.0
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "checkpoint.pt"
    if args.resume and path.exists():
        saved = torch.load(path, weights_only=True)  # noqa: TID251  own file, data only
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["optimizers"], strict=True):
            opt.load_state_dict(state)
        sampler.torch_rng.set_state(saved["torch_rng"])
        version, words, gauss = saved["rng"]
        sampler.rng.setstate((version, tuple(words), gauss))
        step, spent, running = saved["step"], saved["spent"], saved["running"]
        sampler.level = saved["level"]

    def save() -> None:
        version, words, gauss = sampler.rng.getstate()
        state = {
            "model": model.state_dict(), "optimizers": [opt.state_dict() for opt in opts],
            "torch_rng": sampler.torch_rng.get_state(), "rng": (version, list(words), gauss),
            "step": step, "spent": spent, "level": sampler.level, "running": running,
        }  # fmt: skip
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    forward = torch.compile(model) if args.compile else model
    mark, saved_at, budget = time.monotonic(), spent, args.minutes * 60
    seen = torch.zeros(5)
    stopped: list[int] = []  # Ctrl-C takes effect between steps, so that nothing is half done
    signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    while step < args.steps and spent < budget and not stopped:
        done = max(step / args.steps, spent / budget)
        scale = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * min(1.0, (1 - done) / 0.6))
        for group, lr in zip((g for opt in opts for g in opt.param_groups), base, strict=True):
            group["lr"] = lr * scale
        batch = sampler.batch()
        chosen = batch.weight > 0
        hidden = forward(batch.clean, batch.noisy, batch.start)[chosen]
        logits, target = model.logits(hidden), batch.clean[chosen]
        each = F.cross_entropy(logits, target, reduction="none")
        loss = (each * batch.weight[chosen]).sum() / batch.weight.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        step += 1
        with torch.no_grad():
            recalled = batch.recalled[chosen]
            right = (logits.argmax(-1) == target) & recalled
            seen += torch.tensor(
                [loss.item(), each.mean().item(), 1.0, right.sum(), recalled.sum()]
            )
            running += 0.05 * ((right.sum() / recalled.sum().clamp(min=1)).item() - running)
        if running > LEVELS[sampler.level][2]:
            sampler.level, running = sampler.level + 1, 0.0
        now = time.monotonic()
        spent, mark = spent + now - mark, now
        if step % args.report == 0:
            print(
                f"{args.kind} step {step} {spent:.0f}s loss {seen[0] / seen[2]:.3f} "
                f"nats/token {seen[1] / seen[2]:.3f} recall {seen[3] / seen[4]:.3f} "
                f"level {sampler.level}",
                file=sys.stderr,
                flush=True,
            )
            seen.zero_()
        if spent - saved_at > 60:
            save()
            saved_at = spent
    save()
    print(f"{args.kind}: {step} steps, {spent / 60:.1f} minutes", file=sys.stderr)
    return not stopped


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=PRESETS)
    parser.add_argument("--out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=19.0, help="wall-clock limit")
    parser.add_argument("--steps", type=int, default=6000, help="step limit")
    parser.add_argument("--rows", type=int, help="sequences per step")
    parser.add_argument("--lr", type=float, help="of AdamW; Muon takes five times as much")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; faster")
    parser.add_argument("--selfcheck", action="store_true", help="check the training form and stop")
    args = parser.parse_args(argv)
    if args.selfcheck:
        print(f"{args.kind}: largest difference {selfcheck(args.kind):.2e}", file=sys.stderr)
        return 0
    if args.out is None:
        parser.error("--out is required")
    rows, lr = RECIPES[args.kind]
    args.rows, args.lr = args.rows or rows, args.lr or lr
    return 0 if train(args) else 130


if __name__ == "__main__":
    sys.exit(main())
