"""A denoiser that is nobody's layer list: retention and plain attention, written as one module.

Retention (RetNet, arXiv 2307.08621) decays what it saw by a fixed factor per head and token, and
carries one [head_dim, head_dim] matrix per head. Here the tokens of a block see one another in
full, and every token sees all earlier blocks: of retention layers through the matrix, of the
attention layer through cached keys and values.

    fixedstate export model:build -o retention.bundle

Shapes: B rows, T new tokens (one block of a denoise pass, whole blocks of a commit pass), H heads,
P head width, C columns of the key and value buffers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixedstate.spec import AttentionSizes, LayerSpec, LinearAttentionSizes, ModelSpec

HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM

# What each layer carries: `linear_attention` without a normaliser is one [P, P] matrix per head.
RETENTION = LayerSpec(
    "linear_attention",
    LinearAttentionSizes(HEADS, HEADS, HEAD_DIM, feature_map="identity", normalised=False),
)
ATTENTION = LayerSpec("attention", AttentionSizes(HEADS, HEADS, HEAD_DIM, rotary_dim=0))

SPEC = ModelSpec(
    vocab_size=256,
    vocab_rows=257,  # bytes, and the mask
    width=WIDTH,
    layers=(RETENTION, ATTENTION, RETENTION),
    block_len=8,
    mask_id=256,
    tied_embeddings=True,
)


class Mixer(nn.Module):
    """Queries, keys and values of either kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, H, T, P]."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for y in (q, k, v))
        return q * HEAD_DIM**-0.5, k, v

    def joined(self, y: Tensor) -> Tensor:
        """[B, H, T, P] -> [B, T, D]."""
        return self.out(y.transpose(1, 2).flatten(2))


class Retention(Mixer):
    """y_t = sum_s g^|t-s| (q_t k_s) v_s + g^(t+1) q_t S, with a decay g per head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("log_decay", torch.log1p(-(2.0 ** -torch.arange(3.0, 3.0 + HEADS))))

    def forward(self, x: Tensor, past: Tensor, length: Tensor, sees: Tensor):
        """New values, and S after the first `length` tokens of each row."""
        q, k, v = self.heads(x)
        steps = torch.arange(x.shape[1])
        rate = self.log_decay[:, None, None]
        apart = torch.exp(rate * (steps[:, None] - steps).abs())
        y = torch.where(sees, q @ k.mT * apart, 0.0) @ v
        y = y + torch.exp(rate * (steps[:, None] + 1)) * (q @ past)
        # Only the tokens in front of `length` enter the state, each decayed up to its end.
        left = (length[:, None] - 1 - steps)[:, None, :, None]
        share = torch.where(left >= 0, torch.exp(rate * left.clamp(min=0)), 0.0)
        whole = length[:, None, None, None]
        new = torch.exp(rate * whole) * past + (k * share).mT @ v
        # A row that commits nothing keeps its bytes.
        return self.joined(y), torch.where(whole > 0, new, past)


class Attention(Mixer):
    """Attention over the cached columns in front of `past_length`, and the new tokens."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, past_length: Tensor, sees: Tensor):
        """New values, and the new tokens' keys and values."""
        q, k, v = self.heads(x)
        columns = keys.shape[2]
        filled = (torch.arange(columns) < past_length[:, None])[:, None, None]
        # Masks select: a mask that is added lets through what stands behind `past_length`.
        cached = torch.where(filled, q @ keys.mT, -1e30)
        fresh = torch.where(sees, q @ k.mT, -1e30)
        weights = torch.softmax(torch.cat([cached, fresh], -1), -1)
        return self.joined(weights[..., :columns] @ values + weights[..., columns:] @ v), k, v


class Model(nn.Module):
    """What `fixedstate export` asks for: `spec`, `denoise` and `commit`."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = SPEC
        self.embedding = nn.Embedding(SPEC.vocab_rows, WIDTH)
        kinds = {"linear_attention": Retention, "attention": Attention}
        self.mixers = nn.ModuleList(kinds[layer.mixer]() for layer in SPEC.layers)
        self.norm = nn.LayerNorm(WIDTH)

    def run(self, ids: Tensor, state: dict[str, Tensor], past_length: Tensor, length: Tensor):
        """All layers over tokens of which the first `length` of each row are there."""
        blocks = torch.arange(ids.shape[1]) // SPEC.block_len
        there = torch.arange(ids.shape[1]) < length[:, None]
        sees = ((blocks <= blocks[:, None]) & there[:, None])[:, None]  # [B, 1, T, T]
        x, made = self.embedding(ids), {}
        for index, mixer in enumerate(self.mixers):
            suffix = f"{index:03d}"
            if isinstance(mixer, Retention):
                name = f"ssm_state_{suffix}"
                y, made[name] = mixer(x, state[name], length, sees)
            else:
                names = f"key_{suffix}", f"value_{suffix}"
                cache = (state[name] for name in names)
                y, made[names[0]], made[names[1]] = mixer(x, *cache, past_length, sees)
            x = x + y
        return x, made

    def denoise(self, input_ids: Tensor, state: dict[str, Tensor], past_length: Tensor) -> Tensor:
        """Logits of one block [B, L, vocab_rows]; every token of the block is there."""
        everything = torch.full_like(past_length, SPEC.block_len)
        x, _ = self.run(input_ids, state, past_length, everything)
        return F.linear(self.norm(x), self.embedding.weight)

    def commit(
        self,
        input_ids: Tensor,
        state: dict[str, Tensor],
        past_length: Tensor,
        commit_length: Tensor,
    ) -> dict[str, Tensor]:
        """The state after the first `commit_length` tokens of each row."""
        return self.run(input_ids, state, past_length, commit_length)[1]


def build() -> Model:
    """A model with random weights; one that was trained would load them here."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()
