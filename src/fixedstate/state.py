"""What is carried between blocks: StateSpec, the only place where port names are made.

The exporter, the runtime, the engine builder and the Triton generator agree on nothing but this.
"""

from __future__ import annotations

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
_KINDS = ("conv", "ssm", "norm", "key", "value", "soft_embedding")
_UPDATES = ("swap", "append")

PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Io dtype of each precision."""

_SHORT = {dtype: name for name, dtype in PRECISIONS.items()}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a bundle: ``io`` for activations, ``state`` for scan state, ``kv`` for keys."""

    io: str = "float32"
    state: str = "float32"
    kv: str = "float32"

    def __post_init__(self) -> None:
        for name in (self.io, self.state, self.kv):
            check_dtype(name)
        if self.io not in _SHORT:
            raise SpecError(f"io dtype {self.io!r} is none of {', '.join(_SHORT)}")

    @classmethod
    def named(cls, name: str) -> Precision:
        """``fp32`` or ``fp16``: io and kv in that dtype, scan state float32 whatever it is."""
        dtypes = {"fp32": "float32", "fp16": "float16"}
        if name not in dtypes:
            raise SpecError(f"precision {name!r} is unknown; use one of {', '.join(dtypes)}")
        return cls(io=dtypes[name], state="float32", kv=dtypes[name])

    @property
    def name(self) -> str:
        """Short name of the io dtype: fp32, fp16 or bf16."""
        return _SHORT[self.io]

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
            ``soft_embedding`` (of self-conditioning).
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
            for index in range(len(spec.layers)):
                ports += _layer_ports(spec, index, precision)
            if spec.self_conditioning_width:
                ports.append(_soft_embedding(spec, precision))
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
        made = [_pair(index, "ssm", "ssm_state", precision.state, both, both, "swap")]
        if linear.normalised:
            made.append(_pair(index, "norm", "norm_state", precision.state, sums, sums, "swap"))
        return made
    if layer.mixer == "attention":
        sizes = layer.attention
        lead: tuple[Dim, ...] = ("B", sizes.kv_heads)
        if sizes.window is None:
            past: tuple[Dim, ...] = (*lead, "C", sizes.head_dim)
            present: tuple[Dim, ...] = (*lead, f"{spec.block_len}n", sizes.head_dim)
            update = "append"
        else:
            past = present = (*lead, sizes.sinks + sizes.window, sizes.head_dim)
            update = "swap"
        return [
            _pair(index, kind, kind, precision.kv, past, present, update)
            for kind in ("key", "value")
        ]
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
    ports.append(_pair(index, "ssm", "ssm_state", precision.state, ssm, ssm, "swap"))
    return ports


def _soft_embedding(spec: ModelSpec, precision: Precision) -> StatePort:
    """What the pass before predicted, as a mixture of embeddings per slot; zero at first."""
    shape: tuple[Dim, ...] = ("B", spec.block_len, spec.width)
    return _pair(
        0, "soft_embedding", "soft_embedding", precision.state, shape, shape, "swap", "step"
    )


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
