"""The operators as ONNX function bodies in standard ops of opset 21: one body per op and model.

Sizes come from Shape and from the block length, so one body serves layers of different sizes.
The math is that of :mod:`fixedstate.plugins.torch_ops`, written a second time by hand: a graph
that uses these bodies is compared with the torch code, not derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from fixedstate.plugins.schema import ATTRIBUTES, CHUNK, DOMAIN, OPS, OPSET

_OPEN_END = np.iinfo(np.int32).max
_IO = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


class _Nodes:
    """Nodes under construction: every method adds some and gives a value."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.nodes: list[ir.Node] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """One node with one output."""
        return self.ops(op_type, 1, *inputs, **attributes)[0]

    def ops(
        self, op_type: str, outputs: int, *inputs: ir.Value, **attributes: object
    ) -> Sequence[ir.Value]:
        """One node with several outputs."""
        attrs = ir.convenience.convert_attributes(attributes)  # type: ignore[arg-type]
        node = ir.Node("", op_type, list(inputs), attrs, num_outputs=outputs)
        for index, value in enumerate(node.outputs):
            value.name = f"{self.prefix}{op_type.lower()}_{len(self.nodes)}_{index}"
        self.nodes.append(node)
        return node.outputs

    def const(self, array: object, dtype: type[np.generic] = np.int64) -> ir.Value:
        """A constant, made once."""
        data = np.asarray(array, dtype)
        key = (data.dtype.str, data.shape, data.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=ir.tensor(data))
        return self._constants[key]

    def transpose(self, value: ir.Value, *perm: int) -> ir.Value:
        """Axes in another order."""
        return self.op("Transpose", value, perm=list(perm))

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """New axes of size 1."""
        return self.op("Unsqueeze", value, self.const(list(axes)))

    def slice(
        self, value: ir.Value, axis: int, start: int | ir.Value, end: int | ir.Value
    ) -> ir.Value:
        """One axis cut; bounds are ints or 1-D values."""
        first, last = (v if isinstance(v, ir.Value) else self.const([v]) for v in (start, end))
        return self.op("Slice", value, first, last, self.const([axis]))

    def dims(self, value: ir.Value, start: int, end: int) -> ir.Value:
        """Part of a shape as a 1-D int64 value."""
        return self.op("Shape", value, start=start, end=end)

    def reshape(self, value: ir.Value, *shape: int | ir.Value) -> ir.Value:
        """Another shape from ints (0 keeps, -1 infers) and 1-D values.

        Sizes that come from a subtraction go to :meth:`reshape_to` instead: a builder cannot know
        that they are not 0, which would keep a size here.
        """
        if all(isinstance(part, int) for part in shape):
            return self.op("Reshape", value, self.const(list(shape)))
        parts = [part if isinstance(part, ir.Value) else self.const([part]) for part in shape]
        return self.op("Reshape", value, self.op("Concat", *parts, axis=0))

    def reshape_to(self, value: ir.Value, shape: ir.Value) -> ir.Value:
        """The given shape, in which 0 keeps nothing; no size is 0, and -1 infers."""
        return self.op("Reshape", value, shape, allowzero=1)


class _Body(_Nodes):
    """The body of one operator."""

    def __init__(self, name: str, io: str) -> None:
        super().__init__()
        self.schema = OPS[name]
        self.io = _IO[io]
        self.inputs = {n: ir.Value(name=n) for n in self.schema.input_names}

    def float(self, value: ir.Value) -> ir.Value:
        """The value in float32."""
        if self.io == ir.DataType.FLOAT:
            return value
        return self.op("Cast", value, to=int(ir.DataType.FLOAT))

    def to_io(self, value: ir.Value) -> ir.Value:
        """The value in the io dtype."""
        if self.io == ir.DataType.FLOAT:
            return value
        return self.op("Cast", value, to=int(self.io))

    def function(self, outputs: Sequence[ir.Value]) -> ir.Function:
        """The finished function."""
        for value, name in zip(outputs, self.schema.output_names, strict=True):
            value.name = name
        graph = ir.Graph(
            list(self.inputs.values()),
            list(outputs),
            nodes=self.nodes,
            opset_imports={"": OPSET},
            name=self.schema.name,
        )
        attributes = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in ATTRIBUTES]
        return ir.Function(DOMAIN, self.schema.name, "", graph=graph, attributes=attributes)


def function_body(
    name: str,
    block_len: int,
    io: str,
    taps: Sequence[int] = (),
    wide_skip: bool = False,
    one_group: bool = False,
    channels: int | None = None,
) -> ir.Function:
    """The model-local function of one operator.

    Args:
        name: A key of :data:`fixedstate.plugins.schema.OPS`.
        block_len: L of the model, in tokens; 0 where the whole sequence is one block.
        io: ``float32``, ``float16`` or ``bfloat16``, the dtype of activations.
        taps: The different K of the model's convolutions.
        wide_skip: Whether any layer's D has one weight per channel, [H, P], rather than per head.
        one_group: Whether every layer's B and C are shared by all of its heads.
        channels: Channels of every convolution of the model; None where they differ.

    Returns:
        A function whose nodes are standard ops of opset 21.
    """
    body = _Body(name, io)
    if name.startswith("CausalConv"):
        return _conv(body, block_len, sorted(set(taps)), channels)
    if name.startswith("SelectiveScan"):
        return _scan(body, block_len)
    return _ssd(body, block_len, wide_skip, one_group)


# --- causal convolution -----------------------------------------------------------------------


def _conv(body: _Body, block_len: int, taps: Sequence[int], channels: int | None) -> ir.Function:
    """One grouped Conv where all layers have as many channels and taps, else K shifted products.

    The tokens stay [B, T, C]: transposes around a four-dimensional depthwise Conv vanish into the
    blocked layout that ONNX Runtime gives it, less than half the time of the shifted products.
    """
    most = taps[-1]
    x = body.inputs["x"]
    if body.schema.name == "CausalConvReverse":
        blocks = _blocks(body, x, block_len)
        full = body.op("Pad", blocks, body.const([0, 0, 0, 0, most - 1, 0]))
        width = block_len or body.dims(x, 1, 2)
        y = _convolved(body, full, most, width, channels, len(taps) > 1, reverse=True)
        return body.function([body.op("Reshape", y, body.op("Shape", x))])
    mixed = len(taps) > 1
    state = body.inputs["state"]
    window = _widen(body, state, most - 1) if mixed else state
    full = body.op("Concat", body.transpose(window, 0, 2, 1), x, axis=1)  # [B, K-1+T, C]
    denoise = body.schema.name == "CausalConvDenoise"
    tokens = (block_len if denoise else 0) or body.dims(x, 1, 2)
    y = _convolved(body, full, most, tokens, channels, mixed)
    return body.function([y] if denoise else [y, _window(body, full, most, mixed)])


def _convolved(
    body: _Body,
    full: ir.Value,
    most: int,
    tokens: int | ir.Value,
    channels: int | None,
    mixed: bool,
    reverse: bool = False,
) -> ir.Value:
    """silu(bias + sum over k of tap_k * full[:, k:k+tokens]); ``reverse`` turns the taps round."""
    weight, bias = body.inputs["weight"], body.float(body.inputs["bias"])
    rows = body.float(_widen(body, weight, most) if mixed else weight)  # [C, K]
    full = body.float(full)
    if channels is None or mixed:
        tap = body.ops("Split", most, body.transpose(rows, 1, 0), axis=0, num_outputs=most)
        y = _taps(body, full, list(reversed(tap)) if reverse else tap, bias, tokens)
    else:
        if reverse:
            turned = body.const(np.arange(most)[::-1])
            rows = body.op("Gather", rows, turned, axis=1)
        kernel = body.unsqueeze(rows, 1, 2)  # [C, 1, 1, K]
        image = body.transpose(body.unsqueeze(full, 1), 0, 3, 1, 2)  # [B, C, 1, T]
        y = body.op("Conv", image, kernel, bias, group=channels, kernel_shape=[1, most])
        y = body.op("Squeeze", body.transpose(y, 0, 2, 3, 1), body.const([1]))
    return body.to_io(body.op("Mul", y, body.op("Sigmoid", y)))


def _widen(body: _Body, value: ir.Value, columns: int) -> ir.Value:
    """Zeros before the last axis up to a number of columns (layers with fewer taps)."""
    lead = 2 if value.name == "state" else 1
    missing = body.op("Sub", body.const([columns]), body.dims(value, lead, lead + 1))
    pads = body.op("Concat", body.const([0] * lead), missing, body.const([0] * (lead + 1)), axis=0)
    return body.op("Pad", value, pads)


def _blocks(body: _Body, x: ir.Value, block_len: int) -> ir.Value:
    """[B, n*L, C] -> [B*n, L, C]; as it is where the whole sequence is one block."""
    return body.reshape(x, -1, block_len, body.dims(x, 2, 3)) if block_len else x


def _taps(
    body: _Body,
    full: ir.Value,
    tap: Sequence[ir.Value],
    bias: ir.Value,
    tokens: int | ir.Value,
) -> ir.Value:
    """Bias + sum over k of tap_k * full[:, k:k+tokens]."""
    total = bias
    for k, one in enumerate(tap):
        end = k + tokens if isinstance(tokens, int) else body.op("Add", tokens, body.const([k]))
        total = body.op("Add", body.op("Mul", body.slice(full, 1, k, end), one), total)
    return total


def _window(body: _Body, full: ir.Value, most: int, mixed: bool) -> ir.Value:
    """Raw columns [length, length + K - 1) of each row: [B, C, K-1]."""
    length = body.unsqueeze(body.inputs["length"], 1)  # [B, 1]
    if mixed:
        width = body.op("Squeeze", body.dims(body.inputs["state"], 2, 3))
        steps = body.op("Range", body.const(0), width, body.const(1))
        skipped = body.op("Sub", body.const(most - 1), width)
        index = body.op("Add", length, body.op("Add", steps, skipped))
    else:
        index = body.op("Add", length, body.const(np.arange(most - 1)))
    rows = body.op("GatherND", full, body.unsqueeze(index, 2), batch_dims=1)  # [B, K-1, C]
    return body.transpose(rows, 0, 2, 1)


# --- Mamba-2 ------------------------------------------------------------------------------------


def _ssd(body: _Body, block_len: int, wide_skip: bool, one_group: bool) -> ir.Function:
    """The matrix form; see :func:`fixedstate.plugins.torch_ops._ssd`.

    Inside, B' is B for the forward forms and B*n for the reverse one; K chunks of c tokens stand
    behind the heads, so that nothing as large as the state is ever transposed. Where the whole
    sequence is one block, K is only known at run time and ``per_block`` is None.
    """
    name = body.schema.name
    size = min(block_len or CHUNK, CHUNK)
    per_block = -(-block_len // size) or None
    reverse, commit = name == "SsdBlockReverse", name == "SsdBlockCommit"
    x = body.float(body.inputs["x"])
    b, c = (body.float(body.inputs[n]) for n in ("b", "c"))
    dt = body.inputs["dt"]
    flat = per_block == 1 and not commit
    cut = _Cut(body, block_len, size, flat, one_group)
    per_head = (-1, 1, 1) if flat else (-1, 1, 1, 1)
    v = cut.heads(x)  # [B', H, K, c, P]
    step = body.unsqueeze(cut.steps(dt), -2)  # [B', H, K, 1, c]
    log_decay = body.op("Mul", step, body.reshape(body.inputs["a"], *per_head))
    bk, ck = cut.columns(b), cut.heads(c)  # [B', G, K, N, c] and [B', G, K, c, N]
    # unmasked: a token that does not reach another has an empty sum, and the score is 0 there
    upto, sums = _segment_sums(body, log_decay, size, reverse)
    decay = body.op("Exp", sums)  # [B', H, K, c, c]
    reach = np.tri(size, dtype=np.float32)
    reached = body.const(reach.T if reverse else reach, np.float32)
    score = body.op("MatMul", ck, bk)  # [B', G, K, c, c]
    score = body.op("Mul", score, reached)
    # dt and the skip go into the matrix: [c, c] per head is smaller than [c, P]
    weighted = body.op("Mul", decay, step)
    mix = cut.by_head(body.op("Mul", cut.by_group(weighted), cut.spread(score)))
    if not wide_skip:
        eye = body.const(np.eye(size), np.float32)
        skip = body.op("Mul", body.reshape(body.inputs["d"], *per_head), eye)
        mix = body.op("Add", mix, skip)
    y = body.op("MatMul", mix, v)
    read, final = None, None
    if not flat:
        total = _row_sums(body, log_decay, size)  # [B', H, K, 1, 1]
        left = _chunk_decay(body, total, None if commit else per_block, reverse)
        last = (0, 1) if reverse else (-1, _OPEN_END)
        edge = body.reshape(body.slice(weighted, 3, *last), 0, 0, 0, -1, 1)
        chunks = _Chunks(bk, ck, v, edge, per_block in (1, None))
        read = _between(body, cut, chunks, left, reverse)
        if not reverse:
            read = body.op("Add", _of_past(body, cut, chunks, left, y), read)
        if commit:
            final = _final(body, cut, chunks, left)
    elif not reverse:
        past = cut.by_group(body.inputs["state"])
        read = cut.by_head(body.op("MatMul", cut.spread(ck), past))
    if read is not None:
        # of what the segment sums were made of: log decays up to each token
        grown = body.op("Exp", _row_sums(body, upto, size))  # [B', H, K, c, 1]
        y = body.op("Add", y, body.op("Mul", grown, read))
    y = cut.join(y, body.inputs["x"])
    if wide_skip:
        heads = body.dims(body.inputs["a"], 0, 1)
        skip = body.reshape(body.inputs["d"], heads, -1)  # [H, 1] or [H, P]
        y = body.op("Add", y, body.op("Mul", x, skip))
    y = body.to_io(y)
    return body.function([y] if final is None else [y, final])


class _Cut:
    """Tokens cut into chunks: [B', T, ...] to [B', H, K, c, ...] and back.

    ``flat`` leaves the chunk axis out where every row is one chunk; with ``one_group`` B and C
    have a head axis of 1, which meets all heads by broadcasting, and nothing is regrouped.
    """

    def __init__(self, body: _Body, block_len: int, size: int, flat: bool, one_group: bool) -> None:
        self.body, self.block_len, self.size, self.flat = body, block_len, size, flat
        name = body.schema.name
        self.lead = -1 if name == "SsdBlockReverse" and block_len else 0
        self.one_block = name == "SsdBlockDenoise" or not block_len
        self.pad = -block_len % size
        self.one_group = one_group
        if not one_group:
            self._groups = body.dims(body.inputs["b"], 2, 3)
            self._heads = body.dims(body.inputs["a"], 0, 1)
            self._per_group = body.op("Div", self._heads, self._groups)
        self._missing: ir.Value | None = None

    def _whole_chunks(self, value: ir.Value, rank: int) -> ir.Value:
        """[B, T, ...] with zeros behind the last token up to a multiple of the chunk."""
        body = self.body
        if self._missing is None:
            # the remainder of a division by a positive number is never negative
            short = body.op("Neg", body.dims(value, 1, 2))
            self._missing = body.op("Mod", short, body.const([self.size]))
        before, after = body.const([0] * (rank + 1)), body.const([0] * (rank - 2))
        pads = body.op("Concat", before, self._missing, after, axis=0)
        return body.op("Pad", value, pads)

    def _chunks(self, value: ir.Value, rank: int) -> ir.Value:
        body = self.body
        if self.flat and self.lead == 0:
            return value
        tail = [body.dims(value, 2, rank)]
        if self.flat:
            return body.reshape(value, -1, self.block_len, *tail)
        if not self.block_len:
            value = self._whole_chunks(value, rank)
        elif self.pad and self.one_block:
            pads = [0] * (rank + 1) + [self.pad] + [0] * (rank - 2)
            value = body.op("Pad", value, body.const(pads))
        elif self.pad:
            lead = (0, -1) if self.lead == 0 else (-1,)
            value = body.reshape(value, *lead, self.block_len, *tail)
            axes = len(lead) + rank - 1
            after = [self.pad if axis == len(lead) else 0 for axis in range(axes)]
            value = body.op("Pad", value, body.const([0] * axes + after))
        if self.lead == 0:
            return body.reshape(value, 0, -1, self.size, *tail)
        return body.reshape(value, -1, -(-self.block_len // self.size), self.size, *tail)

    def heads(self, value: ir.Value) -> ir.Value:
        """[B, T, H, P] -> [B', H, K, c, P]."""
        chunks = self._chunks(value, 4)
        perm = (0, 2, 1, 3) if self.flat else (0, 3, 1, 2, 4)
        return self.body.transpose(chunks, *perm)

    def steps(self, value: ir.Value) -> ir.Value:
        """[B, T, H] -> [B', H, K, c]."""
        chunks = self._chunks(value, 3)
        return self.body.transpose(chunks, *((0, 2, 1) if self.flat else (0, 3, 1, 2)))

    def columns(self, value: ir.Value) -> ir.Value:
        """[B, T, G, N] -> [B', G, K, N, c]."""
        chunks = self._chunks(value, 4)
        return self.body.transpose(chunks, *((0, 2, 3, 1) if self.flat else (0, 3, 1, 4, 2)))

    def by_group(self, value: ir.Value) -> ir.Value:
        """[B', H, ...] -> [B', G, H/G, ...]."""
        if self.one_group:
            return value
        rest = self.body.op("Shape", value, start=2)
        rows = self.body.const([-1])
        shape = self.body.op("Concat", rows, self._groups, self._per_group, rest, axis=0)
        return self.body.reshape_to(value, shape)

    def by_head(self, value: ir.Value) -> ir.Value:
        """[B', G, H/G, ...] -> [B', H, ...]."""
        if self.one_group:
            return value
        rest = self.body.op("Shape", value, start=3)
        shape = self.body.op("Concat", self.body.const([-1]), self._heads, rest, axis=0)
        return self.body.reshape_to(value, shape)

    def spread(self, value: ir.Value) -> ir.Value:
        """[B', G, ...] -> [B', G, 1, ...]: one for all heads of a group."""
        if self.one_group:
            return value
        return self.body.unsqueeze(value, 2)

    def join(self, value: ir.Value, x: ir.Value) -> ir.Value:
        """[B', H, K, c, P] -> [B, T, H, P], the shape of x."""
        body = self.body
        value = body.transpose(value, *((0, 2, 1, 3) if self.flat else (0, 2, 3, 1, 4)))
        if self.flat and self.lead == 0:
            return value
        if self.one_block and (self.pad or not self.block_len):
            value = body.reshape(value, 0, -1, body.dims(x, 2, 4))
            return body.slice(value, 1, 0, body.dims(x, 1, 2))
        if self.pad:
            tail = body.dims(x, 2, 4)
            value = body.reshape(value, 0, -1, self.block_len + self.pad, tail)
            value = body.slice(value, 2, 0, self.block_len)
        return body.op("Reshape", value, body.op("Shape", x))


def _segment_sums(
    body: _Body, log_decay: ir.Value, size: int, reverse: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Log decays between tokens, [..., 1, c] -> [..., c, c]; 0 where one does not reach another.

    Also gives, first, what they are sums of: row t holds the log decays up to token t.

    Sums of the steps in between by one product with a triangular matrix, never differences of
    prefix sums: no sum is ever positive.
    """
    tri = np.tri(size, dtype=np.float32)  # (t, r): r <= t
    after = np.tri(size, k=-1, dtype=np.float32)  # (r, s): r > s
    if reverse:
        tri, after = tri.T, after.T
    spread = body.op("Mul", log_decay, body.const(tri, np.float32))
    return spread, body.op("MatMul", spread, body.const(after, np.float32))


def _row_sums(body: _Body, value: ir.Value, size: int) -> ir.Value:
    """Sums over the last axis, [..., size] -> [..., 1].

    Not by ReduceSum: its order of sums depends on where a row stands in memory.
    """
    return body.op("MatMul", value, body.const(np.ones((size, 1)), np.float32))


def _chunk_decay(
    body: _Body, total: ir.Value, count: int | None, reverse: bool = False
) -> ir.Value:
    """What is left of each chunk at each later one, [B', H, K+1, K+1], zero elsewhere.

    Before the first chunk (behind the last for ``reverse``) stands one of no tokens.

    Args:
        body: The body.
        total: Log decay of each whole chunk, [B', H, K, 1, 1].
        count: K, or None where it is only known at run time.
        reverse: Chunks act on earlier ones.
    """
    row = body.reshape(total, 0, 0, 1, -1)  # [B', H, 1, K]
    padded = body.op("Pad", row, body.const([0] * 7 + [1] if reverse else [0, 0, 0, 1] + [0] * 4))
    if count is not None:
        _, sums = _segment_sums(body, padded, count + 1, reverse)
        reach = np.tri(count + 1, dtype=np.float32)
        reached = body.const(reach.T if reverse else reach, np.float32)
    else:
        size = body.op("Squeeze", body.dims(padded, 3, 4))
        steps = body.op("Range", body.const(0), size, body.const(1))
        at, of = body.unsqueeze(steps, 1), steps
        if reverse:
            at, of = of, at
        reached = body.op("Cast", body.op("LessOrEqual", of, at), to=int(ir.DataType.FLOAT))
        after = body.op("Cast", body.op("Greater", at, of), to=int(ir.DataType.FLOAT))
        sums = body.op("MatMul", body.op("Mul", padded, reached), after)
    return body.op("Mul", body.op("Exp", sums), reached)


class _Chunks(NamedTuple):
    """What chunks give to each other and take from each other.

    Attributes:
        keys: B by chunks, [B', G, K, N, c].
        queries: C by chunks, [B', G, K, c, N].
        values: x by chunks, [B', H, K, c, P].
        edge: dt of each token times what is left of it at the far edge, [B', H, K, c, 1].
        single: Whether K may be 1.
    """

    keys: ir.Value
    queries: ir.Value
    values: ir.Value
    edge: ir.Value
    single: bool


def _of_past(body: _Body, cut: _Cut, chunks: _Chunks, decay: ir.Value, y: ir.Value) -> ir.Value:
    """What is left of the past in each chunk, as its tokens read it: [B, H, K, c, P], as y.

    All tokens read the past in one product: it is never stacked with what chunks add to it.
    """
    past = cut.by_group(body.inputs["state"])
    queries = body.reshape(chunks.queries, 0, 0, -1, body.dims(chunks.queries, 4, 5))
    read = body.op("MatMul", cut.spread(queries), past)  # [B, G, H/G, K * c, P]
    read = body.op("Reshape", read, body.op("Shape", y))
    left = body.slice(body.slice(decay, 2, 0, -1), 3, 0, 1)  # [B, H, K, 1]
    return body.op("Mul", read, body.unsqueeze(left, 4))


def _final(body: _Body, cut: _Cut, chunks: _Chunks, decay: ir.Value) -> ir.Value:
    """The state after the last chunk, [B, H, N, P]: all tokens write to it in one product."""
    last = body.slice(decay, 2, -1, _OPEN_END)  # [B, H, 1, K+1]
    left = body.reshape(body.slice(last, 3, 1, _OPEN_END), 0, 0, -1, 1, 1)
    values = body.op("Mul", chunks.values, body.op("Mul", chunks.edge, left))
    values = body.reshape(values, 0, 0, -1, body.dims(values, 4, 5))  # [B, H, K * c, P]
    keys = body.reshape(body.transpose(chunks.keys, 0, 1, 3, 2, 4), 0, 0, 0, -1)
    added = cut.by_head(body.op("MatMul", cut.spread(keys), cut.by_group(values)))
    return body.op("Add", body.op("Mul", body.inputs["state"], body.slice(last, 3, 0, 1)), added)


def _between(
    body: _Body, cut: _Cut, chunks: _Chunks, decay: ir.Value, reverse: bool = False
) -> ir.Value:
    """What other chunks of the pass add to each, as its tokens read it, [B', H, K, c, P].

    Only K - 1 chunks give something to others, and K - 1 take. Where K is 1 that one chunk stands
    in, since no tensor may be empty: it gives one column of its state, times 0.
    """
    keys, queries = chunks.keys, chunks.queries
    begin: int | ir.Value = 1
    end: int | ir.Value = -1
    past_end = end
    if chunks.single:
        one, count, width = body.const([1]), body.dims(keys, 2, 3), body.dims(keys, 3, 4)
        begin = body.op("Min", one, body.op("Sub", count, one))  # [1]: 0 or 1
        end = body.op("Sub", count, begin)  # [1]: K - 1, or 1
        past_end = body.op("Add", end, one)
        width = body.op("Min", width, body.op("Add", body.op("Mul", width, begin), one))
        keys, queries = body.slice(keys, 3, 0, width), body.slice(queries, 4, 0, width)
    values = body.op("Mul", chunks.values, chunks.edge)
    if reverse:
        keys, values = (body.slice(v, 2, begin, _OPEN_END) for v in (keys, values))
        queries = body.slice(queries, 2, 0, end)
        left = body.slice(body.slice(decay, 2, 1, past_end), 3, begin, -1)
    else:
        keys, values = (body.slice(v, 2, 0, end) for v in (keys, values))
        queries = body.slice(queries, 2, begin, _OPEN_END)
        left = body.slice(body.slice(decay, 2, begin, -1), 3, 1, past_end)
    added = body.op("MatMul", cut.spread(keys), cut.by_group(values))  # [B', G, H/G, K-1, N, P]
    rows = body.op("Concat", body.dims(left, 0, 3), body.const([-1]), axis=0)
    states = body.reshape_to(added, rows)  # [B', H, K-1, N * P]
    entering = body.reshape_to(body.op("MatMul", left, states), body.op("Shape", added))
    read = cut.by_head(body.op("MatMul", cut.spread(queries), entering))
    before, after = [0, 0], [0] * 7
    if reverse:
        before, after = after, before
    if isinstance(begin, int):
        return body.op("Pad", read, body.const([*before, begin, *after]))
    pads = body.op("Concat", body.const(before), begin, body.const(after), axis=0)
    return body.op("Pad", read, pads)


# --- Mamba-1 ------------------------------------------------------------------------------------


def _scan(body: _Body, block_len: int) -> ir.Function:
    """One Scan over the tokens whose state is [B', N, E]; B' is B*n for the reverse form.

    Decays are made inside: an [B', T, N, E] tensor outside costs more than it saves.
    """
    name = body.schema.name
    reverse = name == "SelectiveScanReverse"
    x = body.float(body.inputs["x"])
    b, c = (body.float(body.inputs[n]) for n in ("b", "c"))
    dt, a = body.inputs["dt"], body.inputs["a"]
    v = body.op("Mul", x, dt)
    if reverse:
        v, dt, b, c = (_blocks(body, value, block_len) for value in (v, dt, b, c))
        shape = body.op("Concat", body.dims(v, 0, 1), body.dims(a, 0, 2), axis=0)
        state = body.op("Expand", body.const(0.0, np.float32), shape)
    else:
        state = body.inputs["state"]
    # per token: dt [B', 1, E], B [B', N, 1], dt x [B', 1, E], C [B', 1, N]
    tokens = [body.unsqueeze(dt, 2), body.unsqueeze(b, 3), body.unsqueeze(v, 2)]
    tokens.append(body.unsqueeze(c, 2))
    turned = [int(reverse)]
    final, read = body.ops(
        "Scan",
        2,
        state,
        *tokens,
        body=_step(a),
        num_scan_inputs=len(tokens),
        scan_input_axes=[1] * len(tokens),
        scan_output_axes=[1],
        scan_input_directions=turned * len(tokens),
        scan_output_directions=turned,
    )
    y = body.op("Squeeze", read, body.const([2]))  # [B', T, E]
    if reverse and block_len:
        y = body.op("Reshape", y, body.op("Shape", x))
    y = body.to_io(body.op("Add", y, body.op("Mul", x, body.inputs["d"])))
    return body.function([y, final] if name == "SelectiveScanCommit" else [y])


def _step(a: ir.Value) -> ir.Graph:
    """One token: h = exp(dt A) h + B (dt x), y = C h; A is the value outside.

    B (dt x) is a product of a column and a row: a MatMul of one term, faster than a broadcast.
    """
    step = _Nodes("step_")
    kind = ir.TensorType(ir.DataType.FLOAT)
    names = ("before", "dt", "b", "v", "c")
    inputs = [ir.Value(name=f"step_{name}", type=kind) for name in names]
    before, dt, b, v, c = inputs
    decay = step.op("Exp", step.op("Mul", dt, a))
    after = step.op("Add", step.op("Mul", decay, before), step.op("MatMul", b, v))
    read = step.op("MatMul", c, after)
    for value in (after, read):
        value.type = kind
    return ir.Graph(inputs, [after, read], nodes=step.nodes, name="step")
