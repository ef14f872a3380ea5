"""The tensors inside a pass, estimated from the ModelSpec alone: for limits and memory plans. Pure.

A builder fuses what it can, so that the sum of a layer's tensors is an upper estimate of what it
takes; what counts against the limit of 32-bit element counts is the largest single one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from fixedstate.plugins.schema import CHUNK
from fixedstate.ports import DTYPES
from fixedstate.spec import LayerSpec, ModelSpec
from fixedstate.state import StateSpec, last_stateful, split_role


@dataclass(frozen=True, slots=True)
class Inner:
    """One tensor inside a pass.

    Attributes:
        layer: Index of its layer; None for what comes before or behind all layers.
        name: What it is.
        shape: In elements.
        dtype: One of :data:`fixedstate.ports.DTYPES`.
        symbols: The symbols that its shape grows with.
    """

    layer: int | None
    name: str
    shape: tuple[int, ...]
    dtype: str
    symbols: str

    @property
    def elements(self) -> int:
        """Their number."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.elements * DTYPES[self.dtype]

    @property
    def where(self) -> str:
        """``layer 3: scores``."""
        return self.name if self.layer is None else f"layer {self.layer}: {self.name}"


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the shapes of a pass are made of."""

    role: str
    rows: int
    tokens: int
    block_len: int
    capacity: int
    io: str
    more: str  # the symbol that tokens grow with

    @property
    def chunks(self) -> int:
        """Pieces that the matrix form of a scan cuts the tokens into."""
        return (self.tokens // self.block_len) * ceil(self.block_len / CHUNK)


def tokens_of(role: str, block_len: int, sizes: Mapping[str, int]) -> int:
    """Tokens of one row in a pass of a role."""
    base = split_role(role)[0]
    if base == "full":
        return sizes["T"]
    symbol = {"commit": "n", "commit_denoise": "m"}.get(base)
    return block_len * (sizes[symbol] if symbol else 1)


def inner_tensors(
    spec: ModelSpec, state: StateSpec, role: str, sizes: Mapping[str, int], io: str
) -> list[Inner]:
    """The large tensors of a pass, layer by layer.

    Args:
        spec: The model.
        state: What it carries.
        role: Of the graph.
        sizes: Size of every symbol of its ports.
        io: Dtype of activations.
    """
    base, head = split_role(role)
    tokens = tokens_of(role, spec.block_len, sizes)
    length = tokens if base == "full" else spec.block_len
    more = {"commit": "n", "commit_denoise": "m", "full": "T"}.get(base, "")
    one = _Pass(base, sizes["B"], tokens, length, sizes.get("C", 0), io, more)
    ends = last_stateful(state) if base == "commit" and not spec.logit_shift else None
    residual = "float32" if spec.residual_fp32 else io
    found = [Inner(None, "residual stream", (one.rows, tokens, spec.width), residual, "B" + more)]
    for index, layer in enumerate(spec.layers):
        if ends is not None and index > ends:
            break  # nothing that is carried comes out behind
        found += _layer(index, layer, one, cut=index == ends)
    if base != "commit":
        slots = sizes["R"] if head != "logits" else length
        shape = (one.rows, slots, spec.vocab_rows)
        found += [Inner(None, name, shape, "float32", "B") for name in ("scores", "logits")]
    return found


def activation_bytes(tensors: list[Inner]) -> int:
    """An upper estimate: what stays, and the layer that takes most."""
    layers: dict[int | None, int] = {}
    for one in tensors:
        layers[one.layer] = layers.get(one.layer, 0) + one.nbytes
    stays = 2 * sum(one.nbytes for one in tensors if one.name == "residual stream")
    behind = layers.pop(None, 0)
    return stays + max([behind, *layers.values()])


def _layer(index: int, layer: LayerSpec, one: _Pass, cut: bool) -> Iterator[Inner]:
    grows = "B" + one.more
    lead = (one.rows, one.tokens)

    def made(name: str, *shape: int, dtype: str = one.io, also: str = "") -> Inner:
        return Inner(index, name, shape, dtype, grows + also)

    if layer.mixer == "mamba2":
        two = layer.mamba2
        size = min(one.block_len, CHUNK)
        yield made("in_proj", *lead, two.in_proj_rows)
        yield made("convolution", *lead, two.conv_dim, dtype="float32")
        mixing = (one.rows, one.chunks, two.heads, size, size)
        yield made("decay inside chunks", *mixing, dtype="float32")
        states = (one.rows, one.chunks + 1, two.heads, two.d_state, two.head_dim)
        yield made("states of chunks", *states, dtype="float32")
        between = (one.rows, two.heads, one.chunks + 1, one.chunks + 1)
        yield made("decay between chunks", *between, dtype="float32")
        yield made("y", *lead, two.d_inner, dtype="float32")
    elif layer.mixer == "mamba1":
        single = layer.mamba1
        yield made("in_proj", *lead, 2 * single.d_inner)
        for name in ("convolution", "dt", "y"):
            yield made(name, *lead, single.d_inner, dtype="float32")
    elif layer.mixer == "attention":
        sizes = layer.attention
        heads = sizes.heads + 2 * sizes.kv_heads
        yield made("queries, keys and values", *lead, heads * sizes.head_dim)
        if not cut:
            kept = one.capacity if sizes.window is None else sizes.sinks + sizes.window
            kept = kept if layer.stateful and one.role != "full" else 0
            also = "C" if kept and sizes.window is None else ""
            scores = (one.rows, sizes.heads, one.tokens, kept + one.tokens)
            yield made("scores", *scores, dtype="float32", also=also)
    elif layer.mixer == "linear_attention":
        linear = layer.linear_attention
        heads = linear.heads + 2 * linear.kv_heads
        yield made("queries, keys and values", *lead, heads * linear.head_dim)
        yield made("scores", one.rows, linear.heads, one.tokens, one.block_len, dtype="float32")
    if layer.mlp != "none" and not cut:
        wide = 2 if layer.mlp == "gated" else 1
        for name in ("mlp, up", "mlp, gate")[:wide]:
            yield made(name, *lead, layer.mlp_width)
