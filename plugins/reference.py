"""The block operators as plain float64 loops: the judge of every kernel and every lowering.

Symbols as in :mod:`fixedstate.spec`. One token at a time, one formula per line:

    conv   y_t = silu(b + sum_k w_k u_{t-K+1+k})
    SSD    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T,   y_t = C_t S_t + D x_t
           (Mamba-2, arXiv 2405.21060, eq. 2 and section 6)
    scan   h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,     y_t = C_t h_t + D x_t
           (Mamba-1, arXiv 2312.00752, eq. 2 and 4; A is a matrix, one decay per state and channel)

The reverse forms run the same recurrence from the right edge of each block, from zero; a block
length of 0 makes the whole sequence one block.
"""

from __future__ import annotations

import numpy as np

from fixedstate.ports import Array


def silu(x: Array) -> Array:
    """X * sigmoid(x), in float64, finite for every finite x."""
    x = np.asarray(x, np.float64)
    return np.asarray(x * np.exp(-np.logaddexp(0.0, -x)))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) in float64 without overflow."""
    return np.asarray(np.logaddexp(0.0, np.asarray(x, np.float64)))


def causal_conv(
    x: Array, weight: Array, bias: Array, state: Array, length: Array | None = None
) -> tuple[Array, Array]:
    """Depthwise causal convolution with SiLU, from a window of earlier raw columns.

    Args:
        x: [B, T, C] raw columns.
        weight: [C, K]; the last tap meets the current token.
        bias: [C].
        state: [B, C, K-1] raw columns before the first token, oldest first.
        length: [B] real tokens per row; all T if None.

    Returns:
        y [B, T, C] and the window after ``length`` tokens [B, C, K-1].
    """
    x, weight, bias, state = (np.asarray(v, np.float64) for v in (x, weight, bias, state))
    rows, tokens, _ = x.shape
    taps = weight.shape[1]
    length = np.full(rows, tokens) if length is None else np.asarray(length)
    full = np.concatenate([state.transpose(0, 2, 1), x], axis=1)
    y = np.zeros_like(x)
    for t in range(tokens):
        for k in range(taps):
            y[:, t] += weight[:, k] * full[:, t + k]
        y[:, t] = silu(y[:, t] + bias)
    window = np.stack([full[b, length[b] : length[b] + taps - 1].T for b in range(rows)])
    return y, window


def causal_conv_reverse(x: Array, weight: Array, bias: Array, block_len: int) -> Array:
    """The convolution run right to left inside each block, from zero at its right edge.

    Args:
        x: [B, n*block_len, C].
        weight: [C, K].
        bias: [C].
        block_len: Tokens per block; 0 for one block of all tokens.
    """
    x = np.asarray(x, np.float64)
    y = np.zeros_like(x)
    zero = np.zeros((x.shape[0], x.shape[2], np.asarray(weight).shape[1] - 1))
    for cut in _blocks(x, block_len):
        y[:, cut] = causal_conv(x[:, cut][:, ::-1], weight, bias, zero)[0][:, ::-1]
    return y


def _blocks(x: Array, block_len: int) -> list[slice]:
    """The tokens of each block, [B, n*block_len, ...]."""
    size = block_len or x.shape[1]
    return [slice(start, start + size) for start in range(0, x.shape[1], size)]


def ssd(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, state: Array
) -> tuple[Array, Array]:
    """Mamba-2 recurrence over T tokens from a given state.

    Args:
        x: [B, T, H, P].
        dt: [B, T, H] step sizes, after softplus; 0 leaves the state alone.
        a: [H], negative.
        b: [B, T, G, N].
        c: [B, T, G, N].
        d: [H] or [H, P] skip weights.
        state: [B, H, N, P].

    Returns:
        y [B, T, H, P] and the state after the last token [B, H, N, P].
    """
    x, dt, a, b, c, d, state = (np.asarray(v, np.float64) for v in (x, dt, a, b, c, d, state))
    heads = x.shape[2]
    b, c = (np.repeat(v, heads // v.shape[2], axis=2) for v in (b, c))
    skip = d if d.ndim == 2 else d[:, None]
    y = np.zeros_like(x)
    s = state.copy()
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t] * a)[:, :, None, None]
        s = decay * s + (dt[:, t, :, None] * b[:, t])[..., None] * x[:, t, :, None, :]
        y[:, t] = np.einsum("bhn,bhnp->bhp", c[:, t], s) + skip * x[:, t]
    return y, s


def ssd_reverse(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, block_len: int
) -> Array:
    """The recurrence run right to left inside each block, from zero at its right edge."""
    x, dt, b, c = (np.asarray(v, np.float64) for v in (x, dt, b, c))
    zero = np.zeros((x.shape[0], x.shape[2], b.shape[3], x.shape[3]))
    y = np.zeros_like(x)
    for cut in _blocks(x, block_len):
        xr, dtr, br, cr = (v[:, cut][:, ::-1] for v in (x, dt, b, c))
        y[:, cut] = ssd(xr, dtr, a, br, cr, d, zero)[0][:, ::-1]
    return y


def selective_scan(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, state: Array
) -> tuple[Array, Array]:
    """Mamba-1 recurrence over T tokens from a given state.

    Args:
        x: [B, T, E].
        dt: [B, T, E] step sizes, after softplus; 0 leaves the state alone.
        a: [N, E], negative; the transpose of the published A.
        b: [B, T, N].
        c: [B, T, N].
        d: [E] skip weights.
        state: [B, N, E].

    Returns:
        y [B, T, E] and the state after the last token [B, N, E].
    """
    x, dt, a, b, c, d, state = (np.asarray(v, np.float64) for v in (x, dt, a, b, c, d, state))
    y = np.zeros_like(x)
    h = state.copy()
    for t in range(x.shape[1]):
        decay = np.exp(dt[:, t, None] * a)
        h = decay * h + b[:, t, :, None] * (dt[:, t] * x[:, t])[:, None]
        y[:, t] = np.einsum("bn,bne->be", c[:, t], h) + d * x[:, t]
    return y, h


def selective_scan_reverse(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, block_len: int
) -> Array:
    """The recurrence run right to left inside each block, from zero at its right edge."""
    x, dt, b, c = (np.asarray(v, np.float64) for v in (x, dt, b, c))
    zero = np.zeros((x.shape[0], b.shape[2], x.shape[2]))
    y = np.zeros_like(x)
    for cut in _blocks(x, block_len):
        xr, dtr, br, cr = (v[:, cut][:, ::-1] for v in (x, dt, b, c))
        y[:, cut] = selective_scan(xr, dtr, a, br, cr, d, zero)[0][:, ::-1]
    return y
