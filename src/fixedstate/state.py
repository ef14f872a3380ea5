"""What is carried between blocks: StateSpec, the only place where port names are made.

The exporter, the runtime, the engine builder and the Triton generator agree on nothing but this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fixedstate.errors import SpecError, require_keys
from fixedstate.ports import Dim, Port, check_dtype
from fixedstate.spec import ModelSpec

HEADS = ("logits", "confidence", "entropy", "top_k")
"""What a denoise pass gives: the scores of all tokens at every slot, or of the slots that are asked
for the best token and its confidence, these and the entropy, these and the k best tokens."""

_PASSES = ("denoise", "commit", "commit_denoise", "full")
ROLES = (
    *_PASSES,
    *(f"{name}_{head}" for name in ("denoise", "commit_denoise") for head in HEADS[1:]),
)
"""Graph roles; a target-specific copy is ``role@target``."""

TOP_K = 8
"""Tokens that a ``top_k`` head gives, unless an export says otherwise."""

_PREFIXES = {"committed": ("past_", "present_"), "step": ("step_in_", "step_out_")}
_CACHE_KINDS = tuple(
    f"{kind}{part}" for kind in ("key", "value") for part in ("", "_scale", "_recent")
)
_KINDS = ("conv", "ssm", "ssm_scale", "norm", *_CACHE_KINDS, "soft_embedding")
_UPDATES = ("swap", "append")

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Io dtype of each precision."""

_SHORT = {dtype: name for name, dtype in PRECISIONS.items()}

STATE_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8row": "int8",
}
"""Dtype in which each format stores a scan state. ``int8row`` has float32 scales in a port beside
it: one for every row of d_state values (of a head and channel)."""

KV_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "float8_e4m3fn": "float8_e4m3fn",
    "kivi4": "uint8",
    "kivi2": "uint8",
}
"""Dtype in which each format stores keys and values; see :class:`KvFormat`."""

KV_RECENT = 2
"""Blocks that ``kivi4`` and ``kivi2`` also keep in full precision, unless they say otherwise."""

_KIVI = re.compile(r"kivi([24])(?:r(\d{1,3}))?")
_VALUE_GROUP = 32  # channels of a value that share a scale, where heads are a multiple of it


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How keys and values are stored; :meth:`named` reads ``int8``, ``kivi4`` or ``kivi4r1``.

    ``int8`` and ``float8_e4m3fn`` have one float32 scale per token and head in a port beside them.
    ``kivi4`` and ``kivi2`` are packed whole numbers of 4 and 2 bits between a minimum and a
    maximum: of a channel over one block of tokens for keys, of a token over some channels for
    values. ``kivi4rN`` keeps the newest N blocks in float too, which attention reads in their
    place; N is :data:`KV_RECENT` where it is not given.

    Source of ``kivi``: KIVI (arXiv 2402.02750), with groups of one block.

    Attributes:
        name: A key of :data:`KV_DTYPES`.
        bits: Of a packed number; 0 where nothing is packed.
        recent: Blocks that are kept in float too.
    """

    name: str
    bits: int = 0
    recent: int = 0

    @classmethod
    def named(cls, name: str) -> KvFormat:
        """The format of that name.

        Raises:
            SpecError: for a name that is none.
        """
        match = _KIVI.fullmatch(name)
        if match:
            recent = KV_RECENT if match[2] is None else int(match[2])
            return cls(f"kivi{match[1]}", int(match[1]), recent)
        if name not in KV_DTYPES:
            raise SpecError(
                f"kv format {name!r} is unknown; use one of {', '.join(KV_DTYPES)} (or kivi4rN, "
                "kivi2rN with N blocks kept in float)"
            )
        return cls(name)

    @property
    def dtype(self) -> str:
        """Of the port."""
        return KV_DTYPES[self.name]

    @property
    def quantised(self) -> bool:
        """Whether numbers and scales are stored rather than the floats themselves."""
        return self.name not in _SHORT

    def value_group(self, head_dim: int) -> int:
        """Channels of a value that share scale and minimum."""
        return head_dim if head_dim % _VALUE_GROUP else _VALUE_GROUP

    def scale_width(self, kind: str, head_dim: int, block_len: int) -> int:
        """Last dimension of the scale port of ``key`` or ``value``.

        A block's scales and minima, two per channel, are spread over the rows of its tokens, so
        that they are appended as the tokens are.
        """
        if not self.bits:
            return 1
        if kind == "key":
            return -(-2 * head_dim // block_len)
        return 2 * (head_dim // self.value_group(head_dim))


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a bundle: ``io`` for activations, ``state`` for scan state, ``kv`` for keys.

    ``kv`` is the name of a :class:`KvFormat`. ``state`` is one of :data:`STATE_DTYPES`; sums and
    mixtures that are carried beside a scan state (``norm_state``, ``soft_embedding``) are float32
    whatever it is.
    """

    io: str = "float32"
    state: str = "float32"
    kv: str = "float32"

    def __post_init__(self) -> None:
        check_dtype(self.io)
        KvFormat.named(self.kv)
        if self.state not in STATE_DTYPES:
            raise SpecError(
                f"state format {self.state!r} is unknown; use one of {', '.join(STATE_DTYPES)}"
            )
        if self.io not in _SHORT:
            raise SpecError(f"io dtype {self.io!r} is none of {', '.join(_SHORT)}")

    @classmethod
    def named(cls, name: str) -> Precision:
        """``fp32`` or ``fp16``: io and kv in that dtype, scan state float32 whatever it is."""
        dtypes = {"fp32": "float32", "fp16": "float16"}
        if name not in dtypes:
            raise SpecError(f"precision {name!r} is unknown; use one of {', '.join(dtypes)}")
        return cls(io=dtypes[name], state="float32", kv=dtypes[name])

    def at(self, io: str) -> Precision:
        """The same with activations in another dtype; keys follow where they are kept as those."""
        kv = self.kv if KvFormat.named(self.kv).quantised else io
        return Precision(io=io, state=self.state, kv=kv)

    @property
    def name(self) -> str:
        """Short name of the io dtype: fp32, fp16 or bf16."""
        return _SHORT[self.io]

    @property
    def names(self) -> tuple[str, str, str]:
        """What io, state and kv are kept in: ``fp32``, ``int8row states``, ``kivi4 keys``."""
        form = KvFormat.named(self.kv)
        state, kv = (_SHORT.get(name, name) for name in (self.state, form.name))
        return (
            self.name,
            state if state == "fp32" else f"{state} states",
            f"{kv} keys" if form.quantised else kv,
        )

    def __str__(self) -> str:
        """For a report: ``fp32``, or ``fp32 with int8row states``."""
        _, state, kv = self.names
        beside = [state] if state != "fp32" else []
        beside += [f"{self.kv} keys and values"] if kv != self.name else []
        return f"{self.name} with {' and '.join(beside)}" if beside else self.name

    def to_dict(self) -> dict[str, str]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {"io": self.io, "state": self.state, "kv": self.kv}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Precision:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, ("io", "state", "kv"), "Precision")
        return cls(data["io"], data["state"], data["kv"])


@dataclass(frozen=True, slots=True)
class StatePort:
    """One carried tensor: where it enters, where it leaves, and how the two meet.

    Attributes:
        layer: Index of the LayerSpec that owns it.
        kind: ``conv``, ``ssm``, ``norm`` (of linear attention), ``key``, ``value``, or
            ``soft_embedding`` (of self-conditioning); scales of a port of some kind are of that
            kind with ``_scale`` behind it, newest tokens that are kept in float too with
            ``_recent``.
        past: The port it enters by.
        present: The port it leaves by.
        update: ``swap`` (two buffers trade places) or ``append`` (new columns only).
        scope: ``committed`` or ``step``.
        reset: The value every element has before the first block.
    """

    layer: int
    kind: str
    past: Port
    present: Port
    update: str
    scope: str = "committed"
    reset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or self.update not in _UPDATES or self.scope not in _PREFIXES:
            raise SpecError(f"state port {self.past.name!r} has an unknown kind, update or scope")
        enter, leave = _PREFIXES[self.scope]
        if self.past.name.removeprefix(enter) != self.present.name.removeprefix(leave):
            raise SpecError(
                f"state ports {self.past.name!r} and {self.present.name!r} must end alike"
            )

    @property
    def suffix(self) -> str:
        """The part of the name both ports share, e.g. ``conv_state_003``."""
        return self.past.name.removeprefix(_PREFIXES[self.scope][0])

    def nbytes(self, rows: int, capacity: int = 0) -> int:
        """Bytes of the buffer for that many rows and, for appended ports, columns."""
        return self.past.nbytes(B=rows, C=capacity)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {
            "layer": self.layer,
            "kind": self.kind,
            "past": self.past.to_dict(),
            "present": self.present.to_dict(),
            "update": self.update,
            "scope": self.scope,
            "reset": self.reset,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StatePort:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        known = ("layer", "kind", "past", "present", "update", "scope", "reset")
        require_keys(data, known, "StatePort")
        ports = {key: Port.from_dict(data[key]) for key in ("past", "present")}
        return cls(**{**data, **ports})


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Every carried tensor of a model, in the fixed order of layer, then kind.

    Example:
        >>> from fixedstate.spec import LayerSpec, Mamba2Sizes, ModelSpec
        >>> sizes = Mamba2Sizes(d_inner=64, heads=8, head_dim=8, d_state=8, groups=2, d_conv=4)
        >>> layer = LayerSpec("mamba2", sizes)
        >>> spec = ModelSpec(37, 40, 32, (layer,), block_len=8, mask_id=36)
        >>> [port.past.name for port in StateSpec.of(spec).ports]
        ['past_conv_state_000', 'past_ssm_state_000']
    """

    ports: tuple[StatePort, ...]

    @classmethod
    def of(cls, spec: ModelSpec, precision: Precision | None = None) -> StateSpec:
        """The state of a model at a precision (float32 if not given)."""
        precision = precision or Precision()
        ports: list[StatePort] = []
        if spec.objective != "full":
            _check_kv(spec, precision)
            for index in range(len(spec.layers)):
                ports += _layer_ports(spec, index, precision)
            if spec.self_conditioning_width:
                ports.append(_soft_embedding(spec))
        return cls(tuple(ports))

    def layer(self, index: int) -> dict[str, StatePort]:
        """The committed ports of one layer by kind."""
        return {port.kind: port for port in self.committed if port.layer == index}

    @property
    def committed(self) -> tuple[StatePort, ...]:
        """Ports that live from block to block."""
        return tuple(port for port in self.ports if port.scope == "committed")

    @property
    def stepped(self) -> tuple[StatePort, ...]:
        """Ports that live from pass to pass inside one block; their two buffers trade places."""
        return tuple(port for port in self.ports if port.scope == "step")

    @property
    def swapped(self) -> tuple[StatePort, ...]:
        """Committed ports whose two buffers trade places at a commit."""
        return tuple(port for port in self.committed if port.update == "swap")

    @property
    def appended(self) -> tuple[StatePort, ...]:
        """Committed ports that grow by the committed columns."""
        return tuple(port for port in self.committed if port.update == "append")

    def state_bytes(self, rows: int = 1) -> int:
        """Bytes of the constant-size state of that many rows (one buffer of each pair)."""
        return sum(port.nbytes(rows) for port in self.swapped)

    @property
    def whole_blocks(self) -> bool:
        """Whether only whole blocks can be committed: keys share scales with their block."""
        return any(port.kind == "key" and port.past.dtype == "uint8" for port in self.appended)

    def kv_bytes_per_token(self) -> int:
        """Bytes that one committed token adds per row to keys and values."""
        return sum(port.nbytes(1, 1) for port in self.appended)

    def to_dict(self) -> list[dict[str, Any]]:
        """A JSON-ready list; the inverse of :meth:`from_dict`."""
        return [port.to_dict() for port in self.ports]

    @classmethod
    def from_dict(cls, data: list[Mapping[str, Any]]) -> StateSpec:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        return cls(tuple(StatePort.from_dict(port) for port in data))


def _layer_ports(spec: ModelSpec, index: int, precision: Precision) -> list[StatePort]:
    """The state ports of one layer; design of names and shapes: one prefix pair, one suffix."""
    layer = spec.layers[index]
    if not layer.stateful:
        return []
    if layer.mixer == "linear_attention":
        linear = layer.linear_attention
        sums: tuple[Dim, ...] = ("B", linear.kv_heads, linear.head_dim)
        both = (*sums, linear.head_dim)
        made = _scan_state(index, precision.state, both)
        if linear.normalised:
            made.append(_pair(index, "norm", "norm_state", "float32", sums, sums, "swap"))
        return made
    if layer.mixer == "attention":
        return _cache_ports(spec, index, precision)
    ports = []
    if layer.mixer == "mamba2":
        two = layer.mamba2
        conv_dim, taps = two.conv_dim, two.d_conv
        ssm: tuple[Dim, ...] = ("B", two.heads, two.d_state, two.head_dim)
    else:
        one = layer.mamba1
        conv_dim, taps = one.conv_dim, one.d_conv
        ssm = ("B", one.d_state, one.d_inner)
    if taps > 1:
        conv: tuple[Dim, ...] = ("B", conv_dim, taps - 1)
        ports.append(_pair(index, "conv", "conv_state", precision.io, conv, conv, "swap"))
    return ports + _scan_state(index, precision.state, ssm)


def _cache_ports(spec: ModelSpec, index: int, precision: Precision) -> list[StatePort]:
    """Keys and values of one layer, each with what its format stores beside it."""
    sizes, form = spec.layers[index].attention, KvFormat.named(precision.kv)
    lead: tuple[Dim, ...] = ("B", sizes.kv_heads)
    update = "append" if sizes.window is None else "swap"
    columns: tuple[Dim, Dim] = ("C", f"{spec.block_len}n")
    if sizes.window is not None:
        columns = (sizes.sinks + sizes.window,) * 2
        if form.bits:  # a window moves by what is committed, and blocks would share no scales
            form = KvFormat.named(precision.io)
    width = sizes.head_dim * form.bits // 8 if form.bits else sizes.head_dim
    ports = []
    for kind in ("key", "value"):
        past, present = ((*lead, column, width) for column in columns)
        ports.append(_pair(index, kind, kind, form.dtype, past, present, update))
        if not form.quantised:
            continue
        scales = form.scale_width(kind, sizes.head_dim, spec.block_len)
        past, present = ((*lead, column, scales) for column in columns)
        dtype = "float16" if form.bits else "float32"
        name = f"{kind}_scale"
        ports.append(_pair(index, name, name, dtype, past, present, update))
        if form.recent:
            name, kept = f"{kind}_recent", form.recent * spec.block_len
            whole = (*lead, kept, sizes.head_dim)
            ports.append(_pair(index, name, name, precision.io, whole, whole, "swap"))
    return ports


def _check_kv(spec: ModelSpec, precision: Precision) -> None:
    """Refuse a packed format that the model's heads or layers do not allow.

    Raises:
        SpecError: naming the layer.
    """
    form = KvFormat.named(precision.kv)
    looking = [index for index, layer in enumerate(spec.layers) if layer.mixer == "attention"]
    whole = [index for index in looking if spec.layers[index].attention.window is None]
    if not form.bits or not looking:
        return
    if not whole:
        raise SpecError(
            f"kv format {precision.kv!r} is for attention over the whole prefix, and every "
            "attention layer of this model has a window: use int8 or float8_e4m3fn"
        )
    for index in whole:
        sizes = spec.layers[index].attention
        if sizes.head_dim * form.bits % 8:
            raise SpecError(
                f"kv format {precision.kv!r} packs {8 // form.bits} channels in a byte, and layer "
                f"{index} has heads of {sizes.head_dim}: use int8"
            )


def _scan_state(index: int, form: str, shape: tuple[Dim, ...]) -> list[StatePort]:
    """A scan state in a format of :data:`STATE_DTYPES`, and its scales where it has any."""
    made = [_pair(index, "ssm", "ssm_state", STATE_DTYPES[form], shape, shape, "swap")]
    if form == "int8row":
        scales = (*shape[:-2], 1, shape[-1])
        made.append(_pair(index, "ssm_scale", "ssm_state_scale", "float32", scales, scales, "swap"))
    return made


def _soft_embedding(spec: ModelSpec) -> StatePort:
    """What the pass before predicted, as a mixture of embeddings per slot; zero at first."""
    shape: tuple[Dim, ...] = ("B", spec.block_len, spec.width)
    return _pair(0, "soft_embedding", "soft_embedding", "float32", shape, shape, "swap", "step")


def _pair(
    index: int,
    kind: str,
    stem: str,
    dtype: str,
    past: tuple[Dim, ...],
    present: tuple[Dim, ...],
    update: str,
    scope: str = "committed",
) -> StatePort:
    enter, leave = _PREFIXES[scope]
    suffix = f"{stem}_{index:03d}"
    return StatePort(
        layer=index,
        kind=kind,
        past=Port(enter + suffix, dtype, past),
        present=Port(leave + suffix, dtype, present),
        update=update,
        scope=scope,
    )


def split_role(role: str) -> tuple[str, str]:
    """The pass that a role runs, and what it gives of a denoised block.

    Example:
        >>> split_role("commit_denoise_top_k"), split_role("denoise@ort-cpu")
        (('commit_denoise', 'top_k'), ('denoise', 'logits'))

    Raises:
        SpecError: for a role that is none.
    """
    role = role.partition("@")[0]
    if role not in ROLES:
        raise SpecError(f"graph role {role!r} is unknown; use one of {', '.join(ROLES)}")
    for head in HEADS[1:]:
        if role.endswith(f"_{head}"):
            return role.removesuffix(f"_{head}"), head
    return role, "logits"


def head_role(role: str, head: str) -> str:
    """The role that runs the same pass and gives what a head gives."""
    return role if head == "logits" else f"{role}_{head}"


def top_count(spec: ModelSpec, top_k: int) -> int:
    """Tokens that a ``top_k`` head gives: no more than the model can choose from."""
    masked = spec.mask_id is not None and spec.mask_id < spec.vocab_size
    return min(top_k, spec.vocab_size - masked)


def top_k_of(outputs: Iterable[Port]) -> int:
    """Tokens that the ``top_k`` head of a graph with these outputs gives for a slot."""
    counts = [port.shape[-1] for port in outputs if port.name == "top_tokens"]
    return counts[0] if counts and isinstance(counts[0], int) else TOP_K


def head_ports(spec: ModelSpec, head: str, top_k: int = TOP_K) -> tuple[Port, ...]:
    """What a graph gives of the slots that it is asked for, in order.

    Args:
        spec: The model.
        head: One of :data:`HEADS`.
        top_k: Tokens of a ``top_k`` head; see :func:`top_count`.
    """
    if head == "logits":
        tokens: Dim = "T" if spec.objective == "full" else spec.block_len
        return (Port("logits", "float32", ("B", tokens, spec.vocab_rows)),)
    ports = [Port("tokens", "int64", ("B", "R")), Port("confidence", "float32", ("B", "R"))]
    if head == "entropy":
        ports.append(Port("entropy", "float32", ("B", "R")))
    if head == "top_k":
        count = top_count(spec, top_k)
        ports.append(Port("top_tokens", "int64", ("B", "R", count)))
        ports.append(Port("top_confidence", "float32", ("B", "R", count)))
    return tuple(ports)


def graph_ports(
    spec: ModelSpec, state: StateSpec, role: str, top_k: int = TOP_K
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs and outputs of the graph of one role, in order.

    Inputs: ``input_ids``, the ``past_*`` and ``step_in_*`` ports in StateSpec order,
    ``past_length``, ``commit_length``, ``open_slots``; outputs: ``present_*`` and ``step_out_*`` in
    StateSpec order, ``logits`` or those of :func:`head_ports`, ``last_logits``. What a graph does
    not use is left out: a commit pass ends at the last stateful layer (unless it gives
    ``last_logits``), so it reads no appended keys and values there; ports of scope ``step`` belong
    to denoise passes.

    Args:
        spec: The model.
        state: Its state at the bundle's precision.
        role: One of :data:`ROLES`; ``role@target`` is the same.
        top_k: Tokens that a ``top_k`` head gives.

    Raises:
        SpecError: for a role that the model's objective does not have.
    """
    asked = role.partition("@")[0]
    role, head = split_role(asked)
    reduced = head != "logits"
    if (role == "full") != (spec.objective == "full") or (reduced and spec.objective != "block"):
        raise SpecError(f"a model of objective {spec.objective!r} has no graph {asked!r}")
    length = spec.block_len
    widths: dict[str, Dim] = {"denoise": length, "commit": f"{length}n", "full": "T"}
    tokens = widths.get(role, f"{length}m")
    inputs = [Port("input_ids", "int64", ("B", tokens))]
    outputs: list[Port] = []
    ended = _ends_at(spec, state, role)
    for port in state.committed:
        if port.layer == ended and port.update == "append":
            continue
        inputs.append(port.past)
    if role != "commit":
        inputs += [port.past for port in state.stepped]
    if _reads_past_length(spec, state, role):
        inputs.append(Port("past_length", "int64", ("B",)))
    if role in ("commit", "commit_denoise"):
        if _reads_commit_length(spec, state, role):
            inputs.append(Port("commit_length", "int64", ("B",)))
        symbol = "n" if role == "commit" else "m"
        for port in state.committed:
            new = f"{length}{symbol}"
            shape = tuple(_renamed(dim, f"{length}n", new) for dim in port.present.shape)
            outputs.append(Port(port.present.name, port.present.dtype, shape))
    if reduced:
        inputs.append(Port("open_slots", "int64", ("B", "R")))
    if role != "commit":
        outputs += [port.present for port in state.stepped]
        outputs += head_ports(spec, head, top_k)
    if role in ("commit", "commit_denoise") and spec.logit_shift:
        outputs.append(Port("last_logits", "float32", ("B", spec.vocab_rows)))
    return tuple(inputs), tuple(outputs)


def last_stateful(state: StateSpec) -> int:
    """Index of the last layer that carries anything; -1 where none does."""
    return max((port.layer for port in state.committed), default=-1)


def _ends_at(spec: ModelSpec, state: StateSpec, role: str) -> int | None:
    """The layer after whose new state a pass of that role ends; None where it goes to the end."""
    return last_stateful(state) if role == "commit" and not spec.logit_shift else None


def _renamed(dim: Dim, old: str, new: str) -> Dim:
    return new if dim == old else dim


def _reads_past_length(spec: ModelSpec, state: StateSpec, role: str) -> bool:
    """Attention needs the row's position: for its mask, its rotary embedding, its sinks."""
    ended = _ends_at(spec, state, role)
    for index in sorted({port.layer for port in state.committed if port.kind == "key"}):
        sizes = spec.layers[index].attention
        if index != ended:
            return True  # the mask of the cache
        if (sizes.rotary_dim and sizes.keys_rotated) or (sizes.window is not None and sizes.sinks):
            return True
    return False


def _reads_commit_length(spec: ModelSpec, state: StateSpec, role: str) -> bool:
    """Only a commit whose one mixer is an appended layer does not: the runtime cuts its columns."""
    ended = _ends_at(spec, state, role)
    if role == "commit_denoise" or ended is None or state.swapped:
        return True
    return any(
        layer.mixer != "none" and (layer.stateful or spec.commit_reverse)
        for layer in spec.layers[: max(ended, 0)]
    )
