"""The tiny block-diffusion denoisers, in the form they are trained in.

A block of L tokens is denoised with all earlier blocks clean. Training runs two streams side by
side: stream 0 holds the clean sequence and yields what the cache would hold in front of every block
(conv window, scan state, keys and values); stream 1 holds a noisy copy, each block of which is the
frontier of its own clean prefix. One pass therefore trains every block of a sequence as inference
sees it. With a single stream the same code is inference: several blocks are a commit, one block is
a denoise pass.

Shapes: S streams, B rows, n blocks, L tokens of a block, D model width, E inner width, H heads,
P head width, N state width, K convolution taps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one denoiser; `layers` has one letter per layer, m for Mamba-2, a for attention."""

    layers: str
    vocab: int = 256
    width: int = 128
    block_len: int = 16
    inner: int = 256
    ssm_head_dim: int = 32
    d_state: int = 64
    conv_taps: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    mlp_attention: int = 256
    mlp_mamba: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    slowest: float = 5e-4  # where the slowest decay A starts; training only

    def mlp(self, kind: str) -> int:
        """Return the MLP width of a layer kind, 0 for none."""
        return self.mlp_attention if kind == "a" else self.mlp_mamba

    def to_dict(self) -> dict[str, object]:
        """Return the sizes as plain values."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Mamba2(nn.Module):
    """Mamba-2 mixer: a forward scan from the carried state plus a reverse scan inside the block.

    Both directions share every parameter. The reverse direction starts from zero at the right edge
    of the block, convolution and scan alike; written without flips (flipped taps, suffix sums).
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner, state = sizes.inner, sizes.d_state
        self.sizes = sizes
        self.n_heads = inner // sizes.ssm_head_dim
        self.channels = inner + 2 * state
        self.in_proj = nn.Linear(sizes.width, inner + self.channels + self.n_heads, bias=False)
        self.conv1d = nn.Conv1d(
            self.channels, self.channels, sizes.conv_taps, groups=self.channels, bias=True
        )
        # From no decay to speak of to almost none kept: A hardly moves in a short training, while
        # the gate dt is learned soon, so recall reaches as far as the slowest head starts out.
        self.A_log = nn.Parameter(
            torch.linspace(math.log(sizes.slowest), math.log(4.0), self.n_heads)
        )
        dt = torch.exp(torch.empty(self.n_heads).uniform_(math.log(0.03), math.log(0.3)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = RMSNorm(inner, sizes.norm_eps)
        self.out_proj = nn.Linear(inner, sizes.width, bias=False)
        keep = torch.ones(sizes.block_len, sizes.block_len, dtype=torch.bool).tril()
        self.register_buffer("drop", ~torch.stack([keep, keep.T]), persistent=False)

    def empty(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the state of an empty prefix: conv window [B, K-1, C], scan state [B, N, H*P]."""
        window = self.A_log.new_zeros(rows, self.sizes.conv_taps - 1, self.channels)
        return window, self.A_log.new_zeros(rows, self.sizes.d_state, self.sizes.inner)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor], start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Mix x [S, B, n, L, D]; return the result and the state behind stream 0."""
        del start  # positions matter to attention only
        sizes, heads = self.sizes, self.n_heads
        streams, rows, blocks, length, _ = x.shape
        taps, inner, n_state, dim = (
            sizes.conv_taps, sizes.inner, sizes.d_state, sizes.ssm_head_dim
        )  # fmt: skip
        z, raw, dt = self.in_proj(x).split([inner, self.channels, heads], -1)

        edge = raw[0, :, :, length - taps + 1 :]
        windows = torch.cat([past[0][:, None], edge], 1)
        before = windows[:, :-1].expand(streams, -1, -1, -1, -1)
        left, right = torch.cat([before, raw], 3), F.pad(raw, (0, 0, 0, taps - 1))
        weight = self.conv1d.weight[:, 0].T
        ahead = behind = self.conv1d.bias
        for k in range(taps):
            ahead = ahead + left[..., k : k + length, :] * weight[k]
            behind = behind + right[..., k : k + length, :] * weight[taps - 1 - k]
        u = F.silu(torch.stack([ahead, behind]))  # [2, S, B, n, L, C]
        values, b, c = u.split([inner, n_state, n_state], -1)
        values = values.unflatten(-1, (heads, dim))

        dt = F.softplus(dt + self.dt_bias).transpose(-1, -2)  # [S, B, n, H, L]
        a = dt * -torch.exp(self.A_log)[:, None]
        prefix = a.cumsum(-1)
        total = prefix[..., -1:]
        sums = torch.stack([prefix, total - prefix + a])
        drop = self.drop.view(2, 1, 1, 1, 1, length, length)
        decay = (sums[..., None] - sums[..., None, :]).masked_fill(drop, -1e30).exp()
        scores = (c @ b.transpose(-1, -2))[..., None, :, :] * decay * dt[..., None, :]
        y = (scores @ values.transpose(-2, -3)).transpose(-2, -3)
        y = y + self.D[:, None] * values  # [2, S, B, n, L, H, P]

        # Carried state: what each clean block adds, then one decay matrix over blocks.
        gate = ((total - prefix).exp() * dt)[0].transpose(-1, -2)[..., None]
        added = b[0, 0].transpose(-1, -2) @ (gate * values[0, 0]).flatten(-2)  # [B, n, N, H*P]
        chunks = torch.cat([past[1][:, None], added], 1).unflatten(-1, (heads, dim))
        clock = F.pad(total[0, ..., 0], (0, 0, 1, 0)).cumsum(1).transpose(1, 2)  # [B, H, n+1]
        late = torch.ones(blocks + 1, blocks + 1, dtype=torch.bool, device=x.device).triu(1)
        carry = (clock[..., None] - clock[..., None, :]).masked_fill(late, -1e30).exp()
        flat = chunks.permute(0, 3, 1, 2, 4).flatten(-2)  # [B, H, n+1, N*P]
        states = (carry @ flat).unflatten(-1, (n_state, dim)).permute(0, 2, 3, 1, 4).flatten(-2)

        query = c[0].permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, n, S*L, N]
        carried = (query @ states[:, :-1]).unflatten(2, (streams, length)).permute(2, 0, 1, 3, 4)
        carried = carried.unflatten(-1, (heads, dim)) * prefix.exp().transpose(-1, -2)[..., None]
        y = torch.stack([y[0] + carried, y[1]]).flatten(-2)
        y = self.norm(y * F.silu(z)).sum(0)
        return self.out_proj(y), (windows[:, -1], states[:, -1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [..., head_dim], halves not interleaved."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Grouped-query attention: every earlier clean block, and the own block in full."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, queries, bias=False)
        self.k_proj = nn.Linear(sizes.width, keys, bias=False)
        self.v_proj = nn.Linear(sizes.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.width, bias=False)
        half = sizes.head_dim // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        self.register_buffer("rates", (sizes.rope_theta**-powers).float(), persistent=False)

    @torch.no_grad()
    def look_alike(self) -> None:
        """Start every head as a copy of what looks alike, wherever it stands.

        Queries equal keys, mostly in the slow rotations, and the output is the transposed value
        projection, scaled to the embedding. Recall in a short training needs such a start.
        """
        if self.sizes.heads != self.sizes.kv_heads:
            return
        for proj in (self.q_proj, self.v_proj):
            nn.init.orthogonal_(proj.weight)
        slow = torch.where(self.rates < 1 / 64, 3.0, 0.3).repeat(2 * self.sizes.heads)
        self.q_proj.weight *= slow[:, None]
        self.k_proj.weight.copy_(self.q_proj.weight)
        self.o_proj.weight.copy_(0.3 * self.v_proj.weight.T)

    @torch.no_grad()
    def look_back(self, offsets: tuple[int, ...], gain: float = 10.0) -> None:
        """Start one head per offset as a look at the token that far back, all with the same output.

        Mamba-2 has a convolution for its neighbours; a first attention layer would spend most of a
        short training on finding them.
        """
        sizes = self.sizes
        for proj in (self.q_proj, self.k_proj):
            nn.init.normal_(proj.weight, std=sizes.width**-0.5)
        for head in range(1, len(offsets)):
            rows = slice(head * sizes.head_dim, (head + 1) * sizes.head_dim)
            self.v_proj.weight[rows] = self.v_proj.weight[: sizes.head_dim]
            self.o_proj.weight[:, rows] = self.o_proj.weight[:, : sizes.head_dim]
        size = (gain * sizes.head_dim**0.5) ** 0.5 * 2**0.5 / sizes.width
        for head, offset in enumerate(offsets):
            rows = slice(head * sizes.head_dim, (head + 1) * sizes.head_dim)
            ones, turn = torch.ones_like(self.rates), offset * self.rates
            for proj, angle in ((self.q_proj, 0 * turn), (self.k_proj, turn)):
                position = size * torch.cat([ones * angle.cos(), angle.sin()])[:, None]
                proj.weight[rows] = 0.1 * proj.weight[rows] + position

    def empty(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the cache of an empty prefix: keys and values [B, kv_heads, 0, head_dim]."""
        nothing = self.q_proj.weight.new_zeros(rows, self.sizes.kv_heads, 0, self.sizes.head_dim)
        return nothing, nothing

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor], start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Mix x [S, B, n, L, D] whose blocks start at positions `start` [B, n]."""
        sizes = self.sizes
        streams, rows, blocks, length, _ = x.shape
        dim, groups = sizes.head_dim, sizes.heads // sizes.kv_heads
        angles = (start[..., None] + torch.arange(length)).float()[..., None] * self.rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [B, 1, n, L, dim/2]

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, dim)).permute(0, 1, 4, 2, 3, 5)

        q = rotate(heads(self.q_proj(x)), cos, sin) * dim**-0.5
        own_k, own_v = rotate(heads(self.k_proj(x)), cos, sin), heads(self.v_proj(x))
        k = torch.cat([past[0], own_k[0].flatten(2, 3)], 2)  # [B, G, T, dim]
        v = torch.cat([past[1], own_v[0].flatten(2, 3)], 2)
        own_k, own_v = (t.repeat_interleave(groups, 2) for t in (own_k, own_v))
        wide_k, wide_v = (t.repeat_interleave(groups, 1) for t in (k, v))

        # A query sees the clean tokens in front of its block, and its block in its own stream.
        old = past[0].shape[2]
        limit = old + torch.arange(blocks, device=x.device) * length
        hidden = torch.arange(k.shape[2], device=x.device) >= limit[:, None]  # [n, T]
        cached = (q.flatten(3, 4) @ wide_k.transpose(-1, -2)).unflatten(3, (blocks, length))
        cached = cached.masked_fill(hidden[:, None], -1e30)
        weights = torch.cat([cached, q @ own_k.transpose(-1, -2)], -1).softmax(-1)
        far, near = weights.split([k.shape[2], length], -1)
        y = (far.flatten(3, 4) @ wide_v).unflatten(3, (blocks, length)) + near @ own_v
        return self.o_proj(y.permute(0, 1, 3, 4, 2, 5).flatten(-2)), (k, v)


class GatedMLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last axis."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm mixer and, where the sizes say so, pre-norm MLP."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.mixer = Attention(sizes) if kind == "a" else Mamba2(sizes)
        hidden = sizes.mlp(kind)
        if hidden:
            self.mlp_norm = RMSNorm(sizes.width, sizes.norm_eps)
            self.mlp = GatedMLP(sizes.width, hidden)
        self.has_mlp = bool(hidden)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor], start: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Apply the layer to x [S, B, n, L, D]; return the result and the layer's new state."""
        mixed, present = self.mixer(self.norm(x), past, start)
        x = x + mixed
        if self.has_mlp:
            x = x + self.mlp(self.mlp_norm(x))
        return x, present


class Denoiser(nn.Module):
    """Embedding, layers, norm, and logits from the embedding again."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, kind) for kind in sizes.layers)
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        nn.init.normal_(self.embedding.weight, std=0.06)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith(("out_proj", "o_proj", "down_proj"))
                scale = math.sqrt(2 * len(sizes.layers)) if last else 1.0
                nn.init.normal_(module.weight, std=module.in_features**-0.5 / scale)
        if sizes.layers.startswith("a"):
            # One direction that all tokens share: it cancels in the logits, and attention can read
            # position from it alone.
            with torch.no_grad():
                self.embedding.weight += 0.06
            for layer in self.layers:
                layer.mixer.look_alike()
            self.layers[0].mixer.look_back((1, 2, 5))

    def empty(self, rows: int) -> State:
        """Return the state of an empty prefix for `rows` rows."""
        return [layer.mixer.empty(rows) for layer in self.layers]

    def run(self, ids: Tensor, past: State, start: Tensor) -> tuple[Tensor, State]:
        """Run ids [S, B, n, L]; return the hidden vectors of the last stream and the new state."""
        x, present = self.embedding(ids), []
        for layer, state in zip(self.layers, past, strict=True):
            x, state = layer(x, state, start)
            present.append(state)
        return x[-1], present

    def forward(self, clean: Tensor, noisy: Tensor, start: Tensor) -> Tensor:
        """Return the hidden vectors of the noisy stream, each block behind its clean prefix.

        Args:
            clean: Token ids [B, n, L].
            noisy: The same with some tokens masked.
            start: Position of the first token of every block [B, n].
        """
        return self.run(torch.stack([clean, noisy]), self.empty(len(clean)), start)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden vectors into logits."""
        return F.linear(self.norm(hidden), self.embedding.weight)

    def _start(self, rows: int, blocks: int, committed: int) -> Tensor:
        return (committed + torch.arange(blocks) * self.sizes.block_len).expand(rows, -1)

    def commit(self, ids: Tensor, past: State, committed: int) -> State:
        """Return the state after the whole blocks ids [B, n*L], `committed` tokens before."""
        blocks = ids.unflatten(1, (-1, self.sizes.block_len))
        start = self._start(len(ids), blocks.shape[1], committed)
        return self.run(blocks[None], past, start)[1]

    def denoise(self, ids: Tensor, past: State, committed: int) -> Tensor:
        """Return the logits of one block ids [B, L] behind the committed tokens."""
        start = self._start(len(ids), 1, committed)
        return self.logits(self.run(ids[None, :, None], past, start)[0][:, 0])


PRESETS = {
    "attention": Sizes("aaaa"),
    "mamba": Sizes("mmmmmm", inner=128, slowest=0.02),
    "hybrid": Sizes("mmmamm", inner=128),
}
