"""What a denoiser is: ModelSpec and its LayerSpecs, plain values without torch or ONNX.

Glossary, used by every module: B rows, L block length in tokens, n blocks, V vocabulary, D model
width, E inner width of a Mamba mixer, H heads, P head width, N state width, G groups of B and C,
K taps of the causal convolution, R rank of the Mamba-1 step projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fixedstate.errors import SpecError, require_keys

MIXERS = ("attention", "mamba1", "mamba2", "none")
MLPS = ("gated", "plain", "none")
DIRECTIONS = ("forward", "block", "reverse")
TIES = ("none", "projections", "all")
OBJECTIVES = ("block", "full", "causal")
COMMIT_MASKS = ("block", "causal")
NORMS = ("rms", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
GATED_NORMS = ("after", "before", "none")

BLOCK_LEN_RANGE = (4, 256)
D_CONV_RANGE = (1, 8)


def _one_of(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise SpecError(f"{what} {value!r} is unknown; use one of {', '.join(allowed)}")


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{type(owner).__name__}.{name} must be a positive int; got {value!r}")


def _to_dict(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        out[field.name] = list(item) if isinstance(item, tuple) else item
    return out


def _from_dict(cls: type[Any], data: Mapping[str, Any]) -> Any:
    known = tuple(field.name for field in fields(cls))
    require_keys(data, known, cls.__name__)
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of an attention mixer (MHA, GQA or MQA by the two head counts)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # leading elements of a head that are rotated; 0 for none
    rope_theta: float = 10000.0
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None  # W: newest committed tokens a query sees; None for all
    sinks: int = 0  # first tokens kept for ever beside a window
    keys_rotated: bool = True  # cached keys are kept after rotary embedding

    def __post_init__(self) -> None:
        _positive(self, "heads", "kv_heads", "head_dim")
        if self.heads % self.kv_heads:
            raise SpecError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise SpecError(
                f"rotary_dim {self.rotary_dim} must be even and between 0 and "
                f"head_dim {self.head_dim}"
            )
        if self.rope_theta <= 0:
            raise SpecError(f"rope_theta must be positive; got {self.rope_theta}")
        if self.window is not None and self.window < 1:
            raise SpecError(f"window must be at least 1 token; got {self.window}")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise SpecError(f"sinks {self.sinks} must be >= 0 and need a window")


@dataclass(frozen=True, slots=True)
class Mamba1Sizes:
    """Sizes of a Mamba-1 mixer (selective scan, A is [E, N])."""

    d_inner: int  # E
    d_state: int  # N
    dt_rank: int  # R
    d_conv: int  # K
    bias: bool = False
    conv_bias: bool = True

    def __post_init__(self) -> None:
        _positive(self, "d_inner", "d_state", "dt_rank", "d_conv")
        _check_d_conv(self.d_conv)

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: E."""
        return self.d_inner


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Sizes of a Mamba-2 mixer (SSD, one decay per head)."""

    d_inner: int  # E = H * P
    heads: int  # H
    head_dim: int  # P
    d_state: int  # N
    groups: int  # G
    d_conv: int  # K
    bias: bool = False
    conv_bias: bool = True
    d_has_hdim: bool = False  # D is [E] rather than [H]
    dt_min: float = 0.0
    dt_max: float | None = None  # None for no upper limit
    gated_norm: str = "after"  # RMSNorm(y * silu(z)); "before": RMSNorm(y) * silu(z); "none"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive(self, "d_inner", "heads", "head_dim", "d_state", "groups", "d_conv")
        _check_d_conv(self.d_conv)
        if self.heads * self.head_dim != self.d_inner:
            raise SpecError(
                f"d_inner {self.d_inner} must be heads x head_dim = "
                f"{self.heads} x {self.head_dim} = {self.heads * self.head_dim}"
            )
        if self.heads % self.groups:
            raise SpecError(f"heads {self.heads} must be a multiple of groups {self.groups}")
        if self.dt_max is not None and not 0 <= self.dt_min <= self.dt_max:
            raise SpecError(f"dt limits must satisfy 0 <= {self.dt_min} <= {self.dt_max}")
        _one_of(self.gated_norm, GATED_NORMS, "gated_norm")

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution over [x, B, C]: E + 2 G N."""
        return self.d_inner + 2 * self.groups * self.d_state

    @property
    def in_proj_rows(self) -> int:
        """Rows of in_proj, order [z, x, B, C, dt]: 2 E + 2 G N + H."""
        return self.d_inner + self.conv_dim + self.heads


def _check_d_conv(d_conv: int) -> None:
    low, high = D_CONV_RANGE
    if not low <= d_conv <= high:
        raise SpecError(f"d_conv must be {low} to {high} taps; got {d_conv}")


MixerSizes = AttentionSizes | Mamba1Sizes | Mamba2Sizes | None
_SIZES: dict[str, type[Any] | None] = {
    "attention": AttentionSizes,
    "mamba1": Mamba1Sizes,
    "mamba2": Mamba2Sizes,
    "none": None,
}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer, an MLP, their norms, sizes and direction.

    Attributes:
        mixer: ``attention``, ``mamba1``, ``mamba2`` or ``none``.
        sizes: The sizes that belong to the mixer; None for ``none``.
        direction: ``forward`` is causal inside the block; ``block`` adds a reverse pass confined
            to the block (attention: bidirectional inside the block); ``reverse`` is confined to
            the block and carries no state.
        tied: Which parameters the reverse pass of a ``block`` Mamba layer shares with the
            forward pass: ``none``, ``projections`` (in_proj and out_proj) or ``all``.
        mlp: ``gated``, ``plain`` or ``none``.
        mlp_width: Inner width of the MLP; 0 without one.
    """

    mixer: str
    sizes: MixerSizes
    direction: str = "block"
    tied: str = "none"
    mlp: str = "none"
    mlp_width: int = 0
    mlp_bias: bool = False
    mlp_activation: str = "silu"
    norm: str = "rms"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _one_of(self.mixer, MIXERS, "mixer")
        _one_of(self.direction, DIRECTIONS, "direction")
        _one_of(self.tied, TIES, "tied")
        _one_of(self.mlp, MLPS, "mlp")
        _one_of(self.norm, NORMS, "norm")
        _one_of(self.mlp_activation, ACTIVATIONS, "mlp_activation")
        expected = _SIZES[self.mixer]
        if expected is None:
            if self.sizes is not None:
                raise SpecError(f"a layer without a mixer has no sizes; got {self.sizes!r}")
        elif not isinstance(self.sizes, expected):
            raise SpecError(f"mixer {self.mixer!r} needs {expected.__name__}; got {self.sizes!r}")
        if (self.mlp == "none") != (self.mlp_width == 0):
            raise SpecError(f"mlp {self.mlp!r} does not go with mlp_width {self.mlp_width}")
        if self.mlp != "none":
            _positive(self, "mlp_width")
        if self.norm_eps <= 0:
            raise SpecError(f"norm_eps must be positive; got {self.norm_eps}")

    @property
    def attention(self) -> AttentionSizes:
        """The sizes, where the mixer is attention."""
        assert isinstance(self.sizes, AttentionSizes)
        return self.sizes

    @property
    def mamba2(self) -> Mamba2Sizes:
        """The sizes, where the mixer is Mamba-2."""
        assert isinstance(self.sizes, Mamba2Sizes)
        return self.sizes

    @property
    def mamba1(self) -> Mamba1Sizes:
        """The sizes, where the mixer is Mamba-1."""
        assert isinstance(self.sizes, Mamba1Sizes)
        return self.sizes

    @property
    def stateful(self) -> bool:
        """Whether the layer carries anything from block to block."""
        return self.mixer != "none" and self.direction != "reverse"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        out = _to_dict(self)
        out["sizes"] = None if self.sizes is None else _to_dict(self.sizes)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerSpec:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, tuple(field.name for field in fields(cls)), "LayerSpec")
        _one_of(data["mixer"], MIXERS, "mixer")
        kind = _SIZES[data["mixer"]]
        sizes = data["sizes"]
        if kind is not None:
            sizes = _from_dict(kind, sizes)
        return cls(**{**data, "sizes": sizes})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the denoiser is; every size and rule that graph, state and decoding depend on.

    Attributes:
        vocab_size: Ids that stand for text; ids at or above it are never produced.
        vocab_rows: Rows of the embedding and of the logits, padding included.
        width: D.
        layers: One LayerSpec per layer, in order.
        block_len: L, in tokens.
        mask_id: Id of the mask; None where the objective needs none.
        stop_ids: Ids that end a text.
        bos_id: Id that begins a text, where the tokenizer adds one.
        logit_shift: Logits at a position predict the next one (the first needs last_logits).
        tied_embeddings: The head is the embedding.
        commit_reverse: A commit pass runs the reverse passes of ``block`` layers.
        commit_mask: Attention of a commit pass sees its own block in full (``block``) or only
            earlier tokens (``causal``).
        objective: ``block`` (block-causal: an exact cache exists), ``full`` (bidirectional: none
            exists) or ``causal`` (autoregressive, for checking only).
        residual_fp32: The residual stream is float32 whatever the io dtype.
    """

    vocab_size: int
    vocab_rows: int
    width: int
    layers: tuple[LayerSpec, ...]
    block_len: int
    mask_id: int | None
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    logit_shift: bool = False
    tied_embeddings: bool = False
    commit_reverse: bool = True
    commit_mask: str = "block"
    objective: str = "block"
    residual_fp32: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "vocab_rows", "width", "block_len")
        _one_of(self.objective, OBJECTIVES, "objective")
        _one_of(self.commit_mask, COMMIT_MASKS, "commit_mask")
        _one_of(self.norm, NORMS, "norm")
        if self.vocab_size > self.vocab_rows:
            raise SpecError(
                f"vocab_size {self.vocab_size} cannot exceed vocab_rows {self.vocab_rows}"
            )
        if not self.layers:
            raise SpecError("a model needs at least one layer; got none")
        low, high = BLOCK_LEN_RANGE
        if not low <= self.block_len <= high:
            raise SpecError(
                f"block_len must be {low} to {high} tokens; got {self.block_len}: "
                "choose a block length in that range"
            )
        for index, layer in enumerate(self.layers):
            taps = getattr(layer.sizes, "d_conv", 1)
            if taps - 1 > self.block_len:
                raise SpecError(
                    f"layer {index}: d_conv {taps} needs block_len >= {taps - 1}; "
                    f"got {self.block_len}"
                )
        if self.objective == "block" and self.mask_id is None:
            raise SpecError("objective 'block' needs a mask id; give --mask-id")
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab_rows:
            raise SpecError(f"mask_id {self.mask_id} is outside 0..{self.vocab_rows - 1}")
        if self.objective == "causal" and any(x.direction != "forward" for x in self.layers):
            raise SpecError("objective 'causal' needs forward layers only")
        for name, ids in (("stop_ids", self.stop_ids), ("bos_id", (self.bos_id,))):
            for token in ids:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise SpecError(f"{name} {token} is outside 0..{self.vocab_size - 1}")
        if self.mask_id is not None and self.mask_id in self.stop_ids:
            raise SpecError(
                f"mask_id {self.mask_id} is also a stop id {self.stop_ids}: "
                "mask and end cannot be told apart"
            )

    @property
    def conv_layers(self) -> bool:
        """Whether any layer convolves."""
        return any(getattr(layer.sizes, "d_conv", 1) > 1 for layer in self.layers)

    @property
    def has_attention(self) -> bool:
        """Whether any layer keeps keys and values."""
        return any(x.mixer == "attention" and x.stateful for x in self.layers)

    @property
    def causal_commit(self) -> bool:
        """Whether a commit inside a block is exact: nothing in the pass looks ahead."""
        for layer in self.layers:
            if layer.direction == "reverse" and layer.mixer != "none" and self.commit_reverse:
                return False
            if layer.direction == "block":
                if layer.mixer == "attention" and self.commit_mask == "block":
                    return False
                if layer.mixer.startswith("mamba") and self.commit_reverse:
                    return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        out = _to_dict(self)
        out["layers"] = [layer.to_dict() for layer in self.layers]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, tuple(field.name for field in fields(cls)), "ModelSpec")
        layers = tuple(LayerSpec.from_dict(layer) for layer in data["layers"])
        return cls(**{**data, "layers": layers, "stop_ids": tuple(data["stop_ids"])})
