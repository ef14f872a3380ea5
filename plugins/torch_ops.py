"""The block operators as torch functions: plain tensor code, and one node each while tracing.

:data:`PLAIN` computes with ordinary tensor operations (the reference denoiser, eager or
compiled); :data:`TRACED` has the same functions as custom operators with fake kernels, so that
``torch.export`` keeps each as one node of domain ``fixedstate``.

Matrix form of the recurrence (Mamba-2, arXiv 2405.21060, section 6): inside a chunk of at most
64 tokens the decay matrix is made of segment sums, never of differences of prefix sums, so that
no exponent is ever positive; between chunks one small decay matrix acts on stacked chunk states.

Mamba-1 has a decay per state and channel, for which the matrix form would need [L, L, N, E]: its
scan goes token by token (arXiv 2312.00752). A block length of 0 makes the whole sequence one block.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from fixedstate.plugins.schema import CHUNK


def wide(x: Tensor) -> Tensor:
    """The value in float32, or as it is where it is float64: what float32 islands compute in."""
    return x if x.dtype == torch.float64 else x.float()


class BlockOps(Protocol):
    """The nine operators; shapes as in :mod:`fixedstate.plugins.reference`."""

    def conv_denoise(self, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        """Convolution with SiLU from a window; the window is not moved."""
        ...

    def conv_commit(
        self, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Convolution with SiLU, and the window after ``length`` tokens of each row."""
        ...

    def conv_reverse(self, x: Tensor, weight: Tensor, bias: Tensor, block_len: int) -> Tensor:
        """Right-to-left convolution with SiLU inside each block."""
        ...

    def ssd_denoise(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor,
        block_len: int,
    ) -> Tensor:
        """Mamba-2 over one block from a state that is only read."""
        ...

    def ssd_commit(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor,
        block_len: int,
    ) -> tuple[Tensor, Tensor]:
        """Mamba-2 over n blocks, and the state after them."""
        ...

    def ssd_reverse(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        block_len: int,
    ) -> Tensor:
        """Right-to-left Mamba-2 inside each block, from zero at its right edge."""
        ...

    def scan_denoise(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
    ) -> Tensor:
        """Mamba-1 from a state that is only read."""
        ...

    def scan_commit(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mamba-1 over any number of tokens, and the state after them."""
        ...

    def scan_reverse(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, block_len: int
    ) -> Tensor:
        """Right-to-left Mamba-1 inside each block, from zero at its right edge."""
        ...


def chunk_len(block_len: int) -> int:
    """Tokens per chunk for a block length."""
    return min(block_len, CHUNK)


def segment_decay(a: Tensor, reverse: bool = False) -> Tensor:
    """exp of the sum of log decays between two tokens of a chunk.

    Args:
        a: [..., c] log decays, <= 0.
        reverse: Tokens act on earlier ones instead of later ones.

    Returns:
        [..., c, c]: entry (t, s) is what is left at t of what token s wrote; 0 where s is after t
        (before t for ``reverse``).
    """
    size = a.shape[-1]
    reach = torch.ones(size, size, dtype=torch.bool, device=a.device).tril()  # r <= t
    later = torch.ones(size, size, dtype=a.dtype, device=a.device).tril(-1)  # r > s
    if reverse:
        reach, later = reach.T, later.T
    seg = (a[..., None, :] * reach.to(a.dtype)) @ later
    return torch.where(reach, seg.exp(), 0.0)


def prefix_decay(a: Tensor, reverse: bool = False) -> Tensor:
    """exp of the log decays summed up to and including each token, [..., c]."""
    total = a.flip(-1).cumsum(-1).flip(-1) if reverse else a.cumsum(-1)
    return total.exp()


def _chunks(v: Tensor, block_len: int) -> Tensor:
    """[B, n*L, ...] -> [B, K, c, ...]; the last chunk of each block is padded with zeros."""
    size = chunk_len(block_len)
    pad = -block_len % size
    if pad == 0:
        return v.reshape(v.shape[0], -1, size, *v.shape[2:])
    v = v.reshape(v.shape[0], -1, block_len, *v.shape[2:])
    v = functional.pad(v, (0, 0) * (v.ndim - 3) + (0, pad))
    return v.reshape(v.shape[0], -1, size, *v.shape[3:])


def _unchunk(y: Tensor, block_len: int) -> Tensor:
    """[B, K, c, ...] -> [B, n*L, ...], padding cut."""
    size = chunk_len(block_len)
    pad = -block_len % size
    if pad == 0:
        return y.reshape(y.shape[0], -1, *y.shape[3:])
    y = y.reshape(y.shape[0], -1, block_len + pad, *y.shape[3:])[:, :, :block_len]
    return y.reshape(y.shape[0], -1, *y.shape[3:])


def _per_head(v: Tensor, heads: int) -> Tensor:
    """[B, K, G, ...] -> [B, K, H, ...]: head h reads group h // (H / G)."""
    groups = v.shape[2]
    return v if groups == heads else v.repeat_interleave(heads // groups, 2)


def _ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None,
    block_len: int,
    reverse: bool = False,
    want_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The matrix form over chunks; float32 inside whatever the io dtype."""
    heads = x.shape[2]
    block_len = block_len or x.shape[1]
    skip = d if d.ndim == 2 else d[:, None]
    xf, bf, cf = wide(x), wide(b), wide(c)
    v = _chunks(xf * dt[..., None], block_len).transpose(2, 3)  # [B, K, H, c, P]
    log_decay = _chunks(dt * a, block_len).transpose(2, 3)  # [B, K, H, c]
    bk = _chunks(bf, block_len).transpose(2, 3)  # [B, K, G, c, N]
    ck = _chunks(cf, block_len).transpose(2, 3)
    decay = segment_decay(log_decay, reverse)  # [B, K, H, c, c]
    mix = _per_head(ck @ bk.transpose(3, 4), heads) * decay
    y = mix @ v  # [B, K, H, c, P]
    one_chunk = block_len <= CHUNK
    if reverse and one_chunk:
        return _finish(y, xf, skip, x, block_len), None
    if not reverse and one_chunk and not want_state:
        entering, final = state[:, None], None  # type: ignore[index]
    else:
        edge = decay[..., 0 if reverse else -1, :]  # [B, K, H, c]: what reaches the far edge
        local = (_per_head(bk, heads) * edge[..., None]).transpose(3, 4) @ v  # [B, K, H, N, P]
        total = log_decay.sum(-1).transpose(1, 2)  # [B, H, K]
        if reverse:
            per_block = -(-block_len // CHUNK)
            entering, final = _carry_reverse(local, total, per_block), None
        else:
            entering, final = _carry(local, total, state)
    grown = prefix_decay(log_decay, reverse)  # [B, K, H, c]
    y = y + grown[..., None] * (_per_head(ck, heads) @ entering)
    return _finish(y, xf, skip, x, block_len), final


def _finish(y: Tensor, xf: Tensor, skip: Tensor, x: Tensor, block_len: int) -> Tensor:
    out: Tensor = _unchunk(y.transpose(2, 3), block_len) + skip * xf
    return out.to(x.dtype)


def _carry(local: Tensor, total: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """States at the left edge of every chunk, and after the last one.

    Args:
        local: [B, K, H, N, P] what each chunk adds.
        total: [B, H, K] log decay of each whole chunk.
        state: [B, H, N, P] before the first chunk; None for zero.
    """
    rows, count, heads, width, head_dim = local.shape
    first = local.new_zeros(rows, heads, width, head_dim) if state is None else state
    stacked = torch.cat([first[:, None], local], 1)  # [B, K+1, H, N, P]
    flat = stacked.transpose(1, 2).reshape(rows, heads, count + 1, width * head_dim)
    decay = segment_decay(functional.pad(total, (1, 0)))  # [B, H, K+1, K+1]
    states = (decay @ flat).reshape(rows, heads, count + 1, width, head_dim).transpose(1, 2)
    return states[:, :-1], states[:, -1]


def _carry_reverse(local: Tensor, total: Tensor, per_block: int) -> Tensor:
    """States at the right edge of every chunk, zero at the right edge of each block."""
    rows, count, heads, width, head_dim = local.shape
    flat = local.reshape(rows, -1, per_block, heads, width * head_dim).transpose(2, 3)
    sums = total.transpose(1, 2).reshape(rows, -1, per_block, heads).transpose(2, 3)
    # chunk k receives from chunks j > k, decayed by the whole chunks between them
    decay = segment_decay(sums, reverse=True)  # (k, j): sum over k <= r < j
    shifted = functional.pad(decay[..., 1:, :], (0, 0, 0, 1))  # row k: sum over k+1 <= r < j
    states = (shifted @ flat).reshape(rows, -1, heads, per_block, width, head_dim)
    return states.transpose(2, 3).reshape(rows, count, heads, width, head_dim)


def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba-1 token by token, decays and inputs of a chunk at once; float32 inside."""
    xf, bf, cf, h = wide(x), wide(b), wide(c), wide(state)
    v = dt * xf
    parts = []
    for start in range(0, x.shape[1], CHUNK):
        cut = slice(start, start + CHUNK)
        decay = torch.exp(dt[:, cut, None] * a).unbind(1)  # each [B, N, E]
        added = (bf[:, cut, :, None] * v[:, cut, None]).unbind(1)
        states = []
        for kept, new in zip(decay, added, strict=True):
            h = torch.addcmul(new, kept, h)
            states.append(h)
        parts.append((cf[:, cut, None] @ torch.stack(states, 1)).squeeze(2))
    y = torch.cat(parts, 1) + d * xf
    return y.to(x.dtype), h


class PlainOps:
    """The operators as ordinary tensor code: traces, compiles, runs anywhere."""

    def conv_denoise(self, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
        """See :class:`BlockOps`."""
        full = torch.cat([state, x.transpose(1, 2)], 2)
        y = functional.conv1d(full, weight[:, None], bias, groups=weight.shape[0])
        return functional.silu(y).transpose(1, 2)

    def conv_commit(
        self, x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`BlockOps`."""
        full = torch.cat([state, x.transpose(1, 2)], 2)
        y = functional.conv1d(full, weight[:, None], bias, groups=weight.shape[0])
        columns = length[:, None] + torch.arange(weight.shape[1] - 1, device=x.device)
        window = full.gather(2, columns[:, None].expand(-1, full.shape[1], -1))
        return functional.silu(y).transpose(1, 2), window

    def conv_reverse(self, x: Tensor, weight: Tensor, bias: Tensor, block_len: int) -> Tensor:
        """See :class:`BlockOps`."""
        blocks = x.reshape(-1, block_len or x.shape[1], x.shape[2]).transpose(1, 2)
        full = functional.pad(blocks, (0, weight.shape[1] - 1))
        y = functional.conv1d(full, weight.flip(1)[:, None], bias, groups=weight.shape[0])
        return functional.silu(y).transpose(1, 2).reshape(x.shape)

    def ssd_denoise(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor,
        block_len: int,
    ) -> Tensor:
        """See :class:`BlockOps`."""
        return _ssd(x, dt, a, b, c, d, state, block_len, want_state=False)[0]

    def ssd_commit(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor,
        block_len: int,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`BlockOps`."""
        y, final = _ssd(x, dt, a, b, c, d, state, block_len)
        assert final is not None
        return y, final

    def ssd_reverse(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        block_len: int,
    ) -> Tensor:
        """See :class:`BlockOps`."""
        return _ssd(x, dt, a, b, c, d, None, block_len, reverse=True)[0]

    def scan_denoise(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
    ) -> Tensor:
        """See :class:`BlockOps`."""
        return _scan(x, dt, a, b, c, d, state)[0]

    def scan_commit(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`BlockOps`."""
        return _scan(x, dt, a, b, c, d, state)

    def scan_reverse(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, block_len: int
    ) -> Tensor:
        """See :class:`BlockOps`."""
        size = block_len or x.shape[1]
        xr, dtr, br, cr = (v.reshape(-1, size, v.shape[2]).flip(1) for v in (x, dt, b, c))
        zero = dt.new_zeros(xr.shape[0], *a.shape)
        return _scan(xr, dtr, a, br, cr, d, zero)[0].flip(1).reshape(x.shape)


PLAIN = PlainOps()


@torch.library.custom_op("fixedstate::conv_denoise", mutates_args=())
def _conv_denoise(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
    return PLAIN.conv_denoise(x, weight, bias, state).contiguous()


@_conv_denoise.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fixedstate::conv_commit", mutates_args=())
def _conv_commit(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    y, window = PLAIN.conv_commit(x, weight, bias, state, length)
    return y.contiguous(), window.contiguous()


@_conv_commit.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op("fixedstate::conv_reverse", mutates_args=())
def _conv_reverse(x: Tensor, weight: Tensor, bias: Tensor, block_len: int) -> Tensor:
    return PLAIN.conv_reverse(x, weight, bias, block_len).contiguous()


@_conv_reverse.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, block_len: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fixedstate::ssd_denoise", mutates_args=())
def _ssd_denoise(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    block_len: int,
) -> Tensor:
    return PLAIN.ssd_denoise(x, dt, a, b, c, d, state, block_len).contiguous()


@_ssd_denoise.register_fake
def _(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    block_len: int,
) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fixedstate::ssd_commit", mutates_args=())
def _ssd_commit(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    block_len: int,
) -> tuple[Tensor, Tensor]:
    y, final = PLAIN.ssd_commit(x, dt, a, b, c, d, state, block_len)
    return y.contiguous(), final.contiguous()


@_ssd_commit.register_fake
def _(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    block_len: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op("fixedstate::ssd_reverse", mutates_args=())
def _ssd_reverse(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, block_len: int
) -> Tensor:
    return PLAIN.ssd_reverse(x, dt, a, b, c, d, block_len).contiguous()


@_ssd_reverse.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, block_len: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fixedstate::scan_denoise", mutates_args=())
def _scan_denoise(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> Tensor:
    return PLAIN.scan_denoise(x, dt, a, b, c, d, state).contiguous()


@_scan_denoise.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fixedstate::scan_commit", mutates_args=())
def _scan_commit(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    y, final = PLAIN.scan_commit(x, dt, a, b, c, d, state)
    return y.contiguous(), final.contiguous()


@_scan_commit.register_fake
def _(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@torch.library.custom_op("fixedstate::scan_reverse", mutates_args=())
def _scan_reverse(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, block_len: int
) -> Tensor:
    return PLAIN.scan_reverse(x, dt, a, b, c, d, block_len).contiguous()


@_scan_reverse.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, block_len: int) -> Tensor:
    return torch.empty_like(x)


class TracedOps:
    """The operators as custom ops: each stays one node while a graph is traced."""

    conv_denoise = staticmethod(_conv_denoise)
    conv_commit = staticmethod(_conv_commit)
    conv_reverse = staticmethod(_conv_reverse)
    ssd_denoise = staticmethod(_ssd_denoise)
    ssd_commit = staticmethod(_ssd_commit)
    ssd_reverse = staticmethod(_ssd_reverse)
    scan_denoise = staticmethod(_scan_denoise)
    scan_commit = staticmethod(_scan_commit)
    scan_reverse = staticmethod(_scan_reverse)


TRACED: BlockOps = TracedOps()
