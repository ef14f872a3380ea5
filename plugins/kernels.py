"""The nine operators in the Triton language, compiled to PTX by :mod:`fixedstate.plugins.compile`.

An entry kernel bears the operator's ``torch_name``. Its parameters are the pointers of all inputs,
the int32 arguments and the pointers of all outputs as :mod:`fixedstate.plugins.schema` lists them,
then what is fixed in a text: the sizes of a tile (BLOCK_..., and STAGES, slices of a pipelined loop
that are on their way or in use), and

* ``ONE_CHUNK``: the tokens of a block fit one chunk, so that no state has to leave it;
* ``SPLIT``: a float32 matrix enters a product in two tf32 halves (see :func:`_dot_left`);
* ``UPCAST``: C and B are multiplied in float32. Only for Triton's interpreter, which multiplies
  bfloat16 by its bits and says nothing.

Whatever the io dtype, everything between a load and a store is float32. Decays are powers of two
of segment sums: sums of dt*a over just the tokens between two others, never differences of prefix
sums, so that no exponent is positive and none has lost its digits.

A kernel that runs right to left reads its tokens in that order: ``STEP`` is -1 instead of 1, and
the token that it starts from is the last of the block. All else is the same code.

The first token of a program is an int64 index into [B*T]; offsets inside a tile are int32.

Sources: Mamba-2, arXiv 2405.21060, section 6 (matrix form in chunks); Mamba-1, arXiv 2312.00752,
eq. 2 and 4.
"""

# mypy: disable-error-code="assignment"
# (tuples of tensors grow in unrolled loops, which Triton takes without an annotation only)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2E: Any = tl.constexpr(1.4426950408889634)


@triton.jit
def _silu(v):
    """V * sigmoid(v); the exponential is of a number that is never positive."""
    small = tl.exp2(-tl.abs(v) * LOG2E)
    return v * (tl.where(v >= 0, 1.0, small) / (1.0 + small))


# --- causal convolution ---------------------------------------------------------------------------


@triton.jit
def _conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    T,
    C,
    K,
    y_ptr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Y of one tile of tokens and channels, from the window before token 0."""
    first = tl.program_id(1) * BLOCK_T
    row = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = channel < C
    base = (row * T + first) * C
    window_ptr = state_ptr + row * C * (K - 1)
    y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for k in range(K):
        shift = k - (K - 1)
        token = first + i + shift
        value = tl.load(
            x_ptr + base + ((i + shift)[:, None] * C + channel[None, :]),
            mask=((token >= 0) & (token < T))[:, None] & live[None, :],
            other=0.0,
        ).to(tl.float32)
        if first + shift < 0:  # a branch: the window lies across, and costs the way it is read
            value += tl.load(
                window_ptr + (channel[None, :] * (K - 1) + (token + (K - 1))[:, None]),
                mask=(token < 0)[:, None] & live[None, :],
                other=0.0,
            ).to(tl.float32)
        tap = tl.load(weight_ptr + channel * K + k, mask=live, other=0.0).to(tl.float32)
        y += tap[None, :] * value
    y = _silu(y + tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)[None, :])
    tl.store(
        y_ptr + base + (i[:, None] * C + channel[None, :]),
        y.to(y_ptr.dtype.element_ty),
        mask=(first + i < T)[:, None] & live[None, :],
    )


@triton.jit
def conv_denoise(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    T,
    C,
    K,
    y_ptr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The convolution from a window that stays as it is."""
    _conv(x_ptr, weight_ptr, bias_ptr, state_ptr, T, C, K, y_ptr, BLOCK_T, BLOCK_C)


@triton.jit
def conv_commit(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    length_ptr,
    T,
    C,
    K,
    y_ptr,
    new_state_ptr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The convolution, and the K-1 raw columns before token ``length`` of each row."""
    _conv(x_ptr, weight_ptr, bias_ptr, state_ptr, T, C, K, y_ptr, BLOCK_T, BLOCK_C)
    if tl.program_id(1) == 0:
        row = tl.program_id(2).to(tl.int64)
        channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        live = channel < C
        length = tl.load(length_ptr + row)
        window = row * C * (K - 1) + channel * (K - 1)
        for k in range(K - 1):
            # column length + k of window and tokens laid side by side; copied, never computed with
            token = length + k - (K - 1) + tl.zeros([BLOCK_C], tl.int64)
            kept = tl.load(
                state_ptr + window + (token + (K - 1)), mask=live & (token < 0), other=0.0
            )
            fresh = tl.load(
                x_ptr + (row * T + token) * C + channel,
                mask=live & (token >= 0) & (token < T),
                other=0.0,
            )
            tl.store(new_state_ptr + window + k, tl.where(token < 0, kept, fresh), mask=live)


@triton.jit
def conv_reverse(
    x_ptr,
    weight_ptr,
    bias_ptr,
    T,
    C,
    K,
    L,
    y_ptr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The convolution with a block's later tokens; beyond its right edge are zeros."""
    first = tl.program_id(1) * BLOCK_T
    row = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BLOCK_T)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = channel < C
    base = (row * T + first) * C
    left = L - (first + i) % L  # tokens up to the edge, this one included
    left = tl.where(first + i < T, left, 0)
    y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for k in range(K):
        value = tl.load(
            x_ptr + base + ((i + k)[:, None] * C + channel[None, :]),
            mask=(left > k)[:, None] & live[None, :],
            other=0.0,
        ).to(tl.float32)
        tap = tl.load(weight_ptr + channel * K + (K - 1 - k), mask=live, other=0.0)
        y += tap.to(tl.float32)[None, :] * value
    y = _silu(y + tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)[None, :])
    tl.store(
        y_ptr + base + (i[:, None] * C + channel[None, :]),
        y.to(y_ptr.dtype.element_ty),
        mask=(left > 0)[:, None] & live[None, :],
    )


# --- Mamba-2 ------------------------------------------------------------------------------------


@triton.jit
def _high(v):
    """The part of a float32 that tf32 holds: its upper 19 bits."""
    return (v.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot_left(wide, narrow, SPLIT: tl.constexpr):
    """``wide @ narrow``, where tf32 holds ``narrow`` exactly, as it does float16 and bfloat16.

    A tensor core cuts ``wide`` to tf32 too, an error of 1e-3. With SPLIT its upper bits and the
    rest are multiplied one after the other: the error is that of float32 (2^-22).
    """
    if SPLIT:
        high = _high(wide)
        low = tl.dot(wide - high, narrow, input_precision="tf32")
        return tl.dot(high, narrow, low, input_precision="tf32")
    else:
        return tl.dot(wide, narrow, input_precision="tf32")


@triton.jit
def _dot_right(narrow, wide, to, SPLIT: tl.constexpr):
    """``to + narrow @ wide``, as :func:`_dot_left`."""
    if SPLIT:
        high = _high(wide)
        to = tl.dot(narrow, wide - high, to, input_precision="tf32")
        return tl.dot(narrow, high, to, input_precision="tf32")
    else:
        return tl.dot(narrow, wide, to, input_precision="tf32")


@triton.jit
def _dot_cb(c, b, to, UPCAST: tl.constexpr):
    """``to + c @ b^T``."""
    if UPCAST:
        return tl.dot(c.to(tl.float32), tl.trans(b.to(tl.float32)), to, input_precision="ieee")
    else:
        return tl.dot(c, tl.trans(b), to)


@triton.jit
def _weights(cb, step, dt, i):
    """What token j (column) adds to token i's y: C_i B_j, the decay from j to i, and dt_j."""
    # row i, column j: the sum of steps j+1 to i
    segment = tl.cumsum(tl.where(i[:, None] > i[None, :], step[:, None], 0.0), 0)
    return tl.where(i[:, None] >= i[None, :], cb * tl.exp2(segment) * dt[None, :], 0.0)


@triton.jit
def _ssd_one(
    x_ptr,
    dt_ptr,
    a,
    b_ptr,
    c_ptr,
    d,
    state_ptr,
    y_ptr,
    tokens,
    H,
    P,
    G,
    N,
    p,
    STEP: tl.constexpr,
    FROM_STATE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Y of ``tokens`` <= BLOCK_T tokens, from a state or from zero; the state is not moved.

    Any N: state, B and C pass by in slices of BLOCK_N, some of them under way to shared memory.
    """
    i = tl.arange(0, BLOCK_T)
    live = i < tokens
    x_mask = live[:, None] & (p < P)[None, :]
    x_at = (STEP * i)[:, None] * (H * P) + p[None, :]
    x = tl.load(x_ptr + x_at, mask=x_mask, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + STEP * i * H, mask=live, other=0.0)
    step = dt * a
    cb = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    past = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        n_at = (STEP * i)[:, None] * (G * N) + n[None, :]
        n_mask = live[:, None] & (n < N)[None, :]
        b = tl.load(b_ptr + n_at, mask=n_mask, other=0.0)
        c = tl.load(c_ptr + n_at, mask=n_mask, other=0.0)
        cb = _dot_cb(c, b, cb, UPCAST)
        if FROM_STATE:
            state = tl.load(
                state_ptr + (n[:, None] * P + p[None, :]),
                mask=(n < N)[:, None] & (p < P)[None, :],
                other=0.0,
            )
            past = _dot_right(c.to(tl.float32), state, past, SPLIT)
    y = _dot_left(_weights(cb, step, dt, i), x, SPLIT) + d[None, :] * x
    if FROM_STATE:
        y += tl.exp2(tl.cumsum(step, 0))[:, None] * past
    tl.store(y_ptr + x_at, y.to(y_ptr.dtype.element_ty), mask=x_mask)


@triton.jit
def _ssd_chunk(
    x_ptr,
    dt_ptr,
    a,
    b_ptr,
    c_ptr,
    d,
    state,
    y_ptr,
    left,
    H,
    P,
    G,
    N,
    p,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Y of the next BLOCK_T of ``left`` tokens, and the state after them.

    The state is a tuple of slices of BLOCK_S rows; B and C are read slice by slice, twice: a chunk
    of them and the state do not fit registers together.
    """
    i = tl.arange(0, BLOCK_T)
    live = i < left
    x_mask = live[:, None] & (p < P)[None, :]
    x_at = (STEP * i)[:, None] * (H * P) + p[None, :]
    x = tl.load(x_ptr + x_at, mask=x_mask, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + STEP * i * H, mask=live, other=0.0)  # 0 leaves the state alone
    step = dt * a
    cb = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for start in tl.range(0, N, BLOCK_S, num_stages=1):
        n = start + tl.arange(0, BLOCK_S)
        n_at = (STEP * i)[:, None] * (G * N) + n[None, :]
        n_mask = live[:, None] & (n < N)[None, :]
        b = tl.load(b_ptr + n_at, mask=n_mask, other=0.0)
        c = tl.load(c_ptr + n_at, mask=n_mask, other=0.0)
        cb = _dot_cb(c, b, cb, UPCAST)
    y = _dot_left(_weights(cb, step, dt, i), x, SPLIT) + d[None, :] * x

    # the steps after each token, read anew one token later: a total less a prefix loses digits
    later = (i + 1 < BLOCK_T) & (i + 1 < left)
    after = tl.load(dt_ptr + STEP * (i + 1) * H, mask=later, other=0.0) * a
    value = x * (tl.exp2(tl.cumsum(after, 0, reverse=True)) * dt)[:, None]
    kept = tl.exp2(tl.sum(step, 0))
    past = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    moved = ()
    for k in tl.static_range(BLOCK_N // BLOCK_S):
        n = k * BLOCK_S + tl.arange(0, BLOCK_S)
        n_at = (STEP * i)[:, None] * (G * N) + n[None, :]
        n_mask = live[:, None] & (n < N)[None, :]
        b = tl.load(b_ptr + n_at, mask=n_mask, other=0.0)
        c = tl.load(c_ptr + n_at, mask=n_mask, other=0.0)
        past = _dot_right(c.to(tl.float32), state[k], past, SPLIT)
        bt = tl.trans(b).to(tl.float32)
        moved = moved + (_dot_right(bt, value, kept * state[k], SPLIT),)
    y += tl.exp2(tl.cumsum(step, 0))[:, None] * past
    tl.store(y_ptr + x_at, y.to(y_ptr.dtype.element_ty), mask=x_mask)
    return moved


@triton.jit
def _ssd(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    first,
    tokens,
    part,
    H,
    P,
    G,
    N,
    W,
    y_ptr,
    new_state_ptr,
    STEP: tl.constexpr,
    FROM_STATE: tl.constexpr,
    KEEP_STATE: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The recurrence over ``tokens`` tokens from token ``first`` of [B*T], for one head's part."""
    head = tl.program_id(1)
    group = head // (H // G)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    a = tl.load(a_ptr + head) * LOG2E
    d = tl.load(d_ptr + head * W + tl.minimum(p, W - 1), mask=p < P, other=0.0)
    x_ptr += first * (H * P) + head * P
    y_ptr += first * (H * P) + head * P
    dt_ptr += first * H + head
    b_ptr += first * (G * N) + group * N
    c_ptr += first * (G * N) + group * N
    base = (tl.program_id(2).to(tl.int64) * H + head) * (N * P)

    if ONE_CHUNK:
        tl.static_assert(not KEEP_STATE)
        _ssd_one(
            x_ptr,
            dt_ptr,
            a,
            b_ptr,
            c_ptr,
            d,
            state_ptr + base,
            y_ptr,
            tokens,
            H,
            P,
            G,
            N,
            p,
            STEP,
            FROM_STATE,
            SPLIT,
            UPCAST,
            BLOCK_N,
            BLOCK_T,
            BLOCK_P,
            STAGES,
        )
    else:
        state = ()
        for k in tl.static_range(BLOCK_N // BLOCK_S):
            if FROM_STATE:
                n = k * BLOCK_S + tl.arange(0, BLOCK_S)
                at = n[:, None] * P + p[None, :]
                mask = (n < N)[:, None] & (p < P)[None, :]
                state = state + (tl.load(state_ptr + base + at, mask=mask, other=0.0),)
            else:
                state = state + (tl.zeros([BLOCK_S, BLOCK_P], tl.float32),)
        for start in tl.range(0, tokens, BLOCK_T, num_stages=STAGES):
            state = _ssd_chunk(
                x_ptr,
                dt_ptr,
                a,
                b_ptr,
                c_ptr,
                d,
                state,
                y_ptr,
                tokens - start,
                H,
                P,
                G,
                N,
                p,
                STEP,
                SPLIT,
                UPCAST,
                BLOCK_N,
                BLOCK_S,
                BLOCK_T,
                BLOCK_P,
            )
            x_ptr += STEP * BLOCK_T * (H * P)
            y_ptr += STEP * BLOCK_T * (H * P)
            dt_ptr += STEP * BLOCK_T * H
            b_ptr += STEP * BLOCK_T * (G * N)
            c_ptr += STEP * BLOCK_T * (G * N)
        if KEEP_STATE:
            for k in tl.static_range(BLOCK_N // BLOCK_S):
                n = k * BLOCK_S + tl.arange(0, BLOCK_S)
                at = n[:, None] * P + p[None, :]
                mask = (n < N)[:, None] & (p < P)[None, :]
                tl.store(new_state_ptr + base + at, state[k], mask=mask)


@triton.jit
def ssd_denoise(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    T,
    H,
    P,
    G,
    N,
    W,
    y_ptr,
    ONE_CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One block from a state that is only read."""
    _ssd(
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        state_ptr,
        tl.program_id(2).to(tl.int64) * T,
        T,
        tl.program_id(0),
        H,
        P,
        G,
        N,
        W,
        y_ptr,
        y_ptr,
        1,
        True,
        False,
        ONE_CHUNK,
        SPLIT,
        UPCAST,
        BLOCK_N,
        BLOCK_S,
        BLOCK_T,
        BLOCK_P,
        STAGES,
    )


@triton.jit
def ssd_commit(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    T,
    H,
    P,
    G,
    N,
    W,
    y_ptr,
    new_state_ptr,
    ONE_CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All T tokens, chunks cut from token 0, and the state after them."""
    _ssd(
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        state_ptr,
        tl.program_id(2).to(tl.int64) * T,
        T,
        tl.program_id(0),
        H,
        P,
        G,
        N,
        W,
        y_ptr,
        new_state_ptr,
        1,
        True,
        True,
        ONE_CHUNK,
        SPLIT,
        UPCAST,
        BLOCK_N,
        BLOCK_S,
        BLOCK_T,
        BLOCK_P,
        STAGES,
    )


@triton.jit
def ssd_reverse(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    T,
    H,
    P,
    G,
    N,
    W,
    L,
    y_ptr,
    ONE_CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each block right to left, from zero at its right edge."""
    parts = (P + (BLOCK_P - 1)) // BLOCK_P
    block = tl.program_id(0) // parts
    _ssd(
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        x_ptr,
        tl.program_id(2).to(tl.int64) * T + (block + 1).to(tl.int64) * L - 1,
        L,
        tl.program_id(0) % parts,
        H,
        P,
        G,
        N,
        W,
        y_ptr,
        y_ptr,
        -1,
        False,
        False,
        ONE_CHUNK,
        SPLIT,
        UPCAST,
        BLOCK_N,
        BLOCK_S,
        BLOCK_T,
        BLOCK_P,
        STAGES,
    )


# --- Mamba-1 ------------------------------------------------------------------------------------


@triton.jit
def _scan_load(x_ptr, dt_ptr, b_ptr, c_ptr, left, E, N, e, n):
    """X, dt, B and C of one token; zeros if none is left."""
    some = left + tl.zeros_like(e) > 0
    any_n = left + tl.zeros_like(n) > 0
    x = tl.load(x_ptr + e, mask=(e < E) & some, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + e, mask=(e < E) & some, other=0.0)
    b = tl.load(b_ptr + n, mask=(n < N) & any_n, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + n, mask=(n < N) & any_n, other=0.0).to(tl.float32)
    return x, dt, b, c


@triton.jit
def _scan(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    first,
    tokens,
    E,
    N,
    y_ptr,
    new_state_ptr,
    STEP: tl.constexpr,
    FROM_STATE: tl.constexpr,
    KEEP_STATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The recurrence over ``tokens`` tokens from token ``first`` of [B*T], for some channels.

    BLOCK_T tokens are loaded at once, while those before them are worked on: one token's work is
    shorter than the way to memory.
    """
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    live = e < E
    at = n[:, None] * E + e[None, :]
    mask = (n < N)[:, None] & live[None, :]
    a = tl.load(a_ptr + at, mask=mask, other=0.0) * LOG2E
    d = tl.load(d_ptr + e, mask=live, other=0.0)
    base = tl.program_id(2).to(tl.int64) * N * E
    if FROM_STATE:
        state = tl.load(state_ptr + base + at, mask=mask, other=0.0)
    else:
        state = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    x_ptr += first * E
    dt_ptr += first * E
    y_ptr += first * E
    b_ptr += first * N
    c_ptr += first * N

    ahead = ()
    for k in tl.static_range(BLOCK_T):
        ahead = ahead + (
            _scan_load(
                x_ptr + STEP * k * E,
                dt_ptr + STEP * k * E,
                b_ptr + STEP * k * N,
                c_ptr + STEP * k * N,
                tokens - k,
                E,
                N,
                e,
                n,
            ),
        )
    for start in range(0, tokens, BLOCK_T):
        now = ahead
        x_ptr += STEP * BLOCK_T * E
        dt_ptr += STEP * BLOCK_T * E
        b_ptr += STEP * BLOCK_T * N
        c_ptr += STEP * BLOCK_T * N
        ahead = ()
        for k in tl.static_range(BLOCK_T):
            ahead = ahead + (
                _scan_load(
                    x_ptr + STEP * k * E,
                    dt_ptr + STEP * k * E,
                    b_ptr + STEP * k * N,
                    c_ptr + STEP * k * N,
                    tokens - start - BLOCK_T - k,
                    E,
                    N,
                    e,
                    n,
                ),
            )
        for k in tl.static_range(BLOCK_T):
            x, dt, b, c = now[k]
            state = tl.exp2(dt[None, :] * a) * state + b[:, None] * (dt * x)[None, :]
            y = tl.sum(c[:, None] * state, 0) + d * x
            some = start + k + tl.zeros_like(e) < tokens
            tl.store(y_ptr + STEP * k * E + e, y.to(y_ptr.dtype.element_ty), mask=live & some)
        y_ptr += STEP * BLOCK_T * E

    if KEEP_STATE:
        tl.store(new_state_ptr + base + at, state, mask=mask)


@triton.jit
def scan_denoise(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    T,
    E,
    N,
    y_ptr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One block from a state that is only read."""
    _scan(
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        state_ptr,
        tl.program_id(2).to(tl.int64) * T,
        T,
        E,
        N,
        y_ptr,
        y_ptr,
        1,
        True,
        False,
        BLOCK_N,
        BLOCK_T,
        BLOCK_E,
    )


@triton.jit
def scan_commit(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    T,
    E,
    N,
    y_ptr,
    new_state_ptr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """All T tokens, and the state after them."""
    _scan(
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        state_ptr,
        tl.program_id(2).to(tl.int64) * T,
        T,
        E,
        N,
        y_ptr,
        new_state_ptr,
        1,
        True,
        True,
        BLOCK_N,
        BLOCK_T,
        BLOCK_E,
    )


@triton.jit
def scan_reverse(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    T,
    E,
    N,
    L,
    y_ptr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Each block right to left, from zero at its right edge."""
    block = tl.program_id(1).to(tl.int64)
    _scan(
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        x_ptr,
        tl.program_id(2).to(tl.int64) * T + (block + 1) * L - 1,
        L,
        E,
        N,
        y_ptr,
        y_ptr,
        -1,
        False,
        False,
        BLOCK_N,
        BLOCK_T,
        BLOCK_E,
    )
