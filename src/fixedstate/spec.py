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

MIXERS = ("attention", "linear_attention", "mamba1", "mamba2", "none")
MLPS = ("gated", "plain", "none")
DIRECTIONS = ("forward", "block", "reverse")
TIES = ("none", "projections", "all")
OBJECTIVES = ("block", "full", "causal")
COMMIT_MASKS = ("block", "causal")
NORMS = ("rms", "layer")
NORM_PLACES = ("before", "after", "both")
FEATURE_MAPS = ("elu", "relu", "identity")
ROPE_SCALINGS = ("linear", "llama3", "yarn")
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
        if isinstance(item, RopeScaling):
            item = _to_dict(item)
        out[field.name] = list(item) if isinstance(item, tuple) else item
    return out


SINCE_SCHEMA_2: dict[str, tuple[str, ...]] = {
    "AttentionSizes": ("rope_scaling", "score_softcap", "scale"),
    "LayerSpec": ("norm_place", "output_gate"),
    "ModelSpec": ("logit_softcap", "head_bias", "self_conditioning_width"),
}
"""Fields that values of schema 1 lack; their defaults say what schema 1 meant."""


def _from_dict(cls: type[Any], data: Mapping[str, Any]) -> Any:
    known = tuple(field.name for field in fields(cls))
    require_keys(data, known, cls.__name__, SINCE_SCHEMA_2.get(cls.__name__, ()))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = _from_dict(RopeScaling, data["rope_scaling"])
    return cls(**values)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts, by the names of the field.

    ``linear`` divides every frequency by ``factor``. ``llama3`` (Llama 3.1) divides those whose
    wavelength exceeds ``original_length / low_freq_factor``, keeps those below
    ``original_length / high_freq_factor`` and blends in between. ``yarn`` (arXiv 2309.00071)
    blends between the rotations ``beta_fast`` and ``beta_slow`` and multiplies cosine and sine by
    ``attention_factor``. Forms that depend on the length of the text (dynamic, longrope) have no
    cache that stays right, and are refused.
    """

    kind: str
    factor: float
    original_length: int = 0  # tokens of the training context; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise SpecError(
                f"rope scaling {self.kind!r} is unknown or depends on the length of the text, so "
                f"that cached keys would go stale; use one of {', '.join(ROPE_SCALINGS)}"
            )
        if self.factor < 1:
            raise SpecError(f"rope scaling factor must be at least 1; got {self.factor}")
        if self.kind != "linear" and self.original_length < 1:
            raise SpecError(
                f"rope scaling {self.kind!r} needs original_length, the tokens of the training "
                f"context; got {self.original_length}"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise SpecError(
                "rope scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor; got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise SpecError(
                "rope scaling 'yarn' needs 0 < beta_slow < beta_fast; got "
                f"{self.beta_slow} and {self.beta_fast}"
            )
        if self.attention_factor <= 0:
            raise SpecError(f"attention_factor must be positive; got {self.attention_factor}")


class _RotatedHeads:
    """Checks that attention and linear attention share."""

    __slots__ = ()

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None

    def _check_heads(self) -> None:
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
        if self.rope_scaling and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise SpecError(f"rope scaling 'yarn' needs rope_theta above 1; got {self.rope_theta}")


@dataclass(frozen=True, slots=True)
class AttentionSizes(_RotatedHeads):
    """Sizes of an attention mixer (MHA, GQA or MQA by the two head counts).

    With a window W, a query at position t sees the key at position u < t of an earlier block if
    ``t - u <= W`` or ``u < sinks``; inside its own block the direction decides alone, except that
    causal passes (``forward`` layers, and commits with a causal ``commit_mask``) see W tokens back
    there too. Keys kept before rotary embedding beside a
    window are rotated at in-cache positions: what lies between sinks and window takes no room, so
    that no position exceeds ``sinks + W + L``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # leading elements of a head that are rotated; 0 for none
    rope_theta: float = 10000.0
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None  # W: tokens before itself that a query sees; None for all
    sinks: int = 0  # first tokens kept for ever beside a window
    keys_rotated: bool = True  # cached keys are kept after rotary embedding
    rope_scaling: RopeScaling | None = None
    score_softcap: float = 0.0  # c tanh(score / c) before the mask; 0 for none
    scale: float | None = None  # of the scores; None for head_dim ** -0.5

    def __post_init__(self) -> None:
        self._check_heads()
        if self.score_softcap < 0:
            raise SpecError(f"score_softcap must be 0 (none) or positive; got {self.score_softcap}")
        if self.scale is not None and self.scale <= 0:
            raise SpecError(f"scale must be positive; got {self.scale}")
        if self.window is not None and self.window < 1:
            raise SpecError(f"window must be at least 1 token; got {self.window}")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise SpecError(f"sinks {self.sinks} must be >= 0 and need a window")


@dataclass(frozen=True, slots=True)
class LinearAttentionSizes(_RotatedHeads):
    """Sizes of linear attention with softmax inside the block (the form of ARL2, arXiv 2605.16579).

    Inside its block a token attends by softmax; everything before the block it reads from the
    state S = sum of phi(k) v^T over all committed tokens, by phi(q) S, divided by phi(q) z + 1e-6
    with z = sum of phi(k) where ``normalised``. The read is multiplied by one trained weight per
    head, ``state_gate``, and added.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int = 0  # rotated inside the block's softmax; positions count from its left edge
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    feature_map: str = "elu"  # phi: elu(x) + 1, relu(x), or x
    normalised: bool = True

    def __post_init__(self) -> None:
        self._check_heads()
        _one_of(self.feature_map, FEATURE_MAPS, "feature_map")
        if self.normalised and self.feature_map == "identity":
            raise SpecError(
                "linear attention with feature_map 'identity' cannot be normalised: phi(q) z may "
                "vanish; set normalised to false or use 'elu' or 'relu'"
            )


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


MixerSizes = AttentionSizes | LinearAttentionSizes | Mamba1Sizes | Mamba2Sizes | None
_SIZES: dict[str, type[Any] | None] = {
    "attention": AttentionSizes,
    "linear_attention": LinearAttentionSizes,
    "mamba1": Mamba1Sizes,
    "mamba2": Mamba2Sizes,
    "none": None,
}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer, an MLP, their norms, sizes and direction.

    Attributes:
        mixer: ``attention``, ``linear_attention``, ``mamba1``, ``mamba2`` or ``none``.
        sizes: The sizes that belong to the mixer; None for ``none``.
        direction: ``forward`` is causal inside the block; ``block`` adds a reverse pass confined
            to the block (attention: bidirectional inside the block); ``reverse`` is confined to
            the block and carries no state.
        tied: Which parameters the reverse pass of a ``block`` Mamba layer shares with the
            forward pass: ``none``, ``projections`` (in_proj and out_proj) or ``all``.
        mlp: ``gated``, ``plain`` or ``none``.
        mlp_width: Inner width of the MLP; 0 without one.
        norm_place: The mixer's norm stands ``before`` it, ``after`` it (on what it gives, before
            the addition), or ``both``.
        output_gate: What the mixer gives is multiplied by tanh of one trained scalar before the
            addition (the sidecar of R2LM, arXiv 2606.27732).
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
    norm_place: str = "before"
    output_gate: bool = False

    def __post_init__(self) -> None:
        _one_of(self.mixer, MIXERS, "mixer")
        _one_of(self.norm_place, NORM_PLACES, "norm_place")
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
        if self.mixer == "none" and (self.output_gate or self.norm_place != "before"):
            raise SpecError("a layer without a mixer has neither output_gate nor norm_place")

    @property
    def attention(self) -> AttentionSizes:
        """The sizes, where the mixer is attention."""
        assert isinstance(self.sizes, AttentionSizes)
        return self.sizes

    @property
    def linear_attention(self) -> LinearAttentionSizes:
        """The sizes, where the mixer is linear attention."""
        assert isinstance(self.sizes, LinearAttentionSizes)
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
        known = tuple(field.name for field in fields(cls))
        require_keys(data, known, "LayerSpec", SINCE_SCHEMA_2.get(cls.__name__, ()))
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
        logit_softcap: Logits are c tanh(logit / c); 0 for none.
        head_bias: The head adds a bias.
        self_conditioning_width: Inner width of the gated MLP through which a denoise pass sees
            what the pass before it predicted (the soft embedding softmax(logits) E of
            DiffusionGemma); 0 for none. Commit passes never see it.
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
    logit_softcap: float = 0.0
    head_bias: bool = False
    self_conditioning_width: int = 0

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
        if self.logit_softcap < 0:
            raise SpecError(f"logit_softcap must be 0 (none) or positive; got {self.logit_softcap}")
        if self.self_conditioning_width < 0:
            raise SpecError(
                "self_conditioning_width must be 0 (none) or positive; got "
                f"{self.self_conditioning_width}"
            )
        if self.self_conditioning_width and self.objective != "block":
            raise SpecError("self-conditioning needs the objective 'block': passes over one block")
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
        if self.mask_id is not None and self.mask_id == self.bos_id:
            raise SpecError(
                f"mask_id {self.mask_id} is also the bos_id: a text that begins with it would "
                "begin with a hole"
            )

    @property
    def conv_layers(self) -> bool:
        """Whether any layer convolves."""
        return any(getattr(layer.sizes, "d_conv", 1) > 1 for layer in self.layers)

    @property
    def has_attention(self) -> bool:
        """Whether any layer keeps keys and values of every token."""
        return any(
            x.mixer == "attention" and x.stateful and x.attention.window is None
            for x in self.layers
        )

    @property
    def any_token(self) -> int:
        """A token that a prompt may hold, where one is needed to try the model out."""
        if self.bos_id is not None:
            return self.bos_id
        return next(token for token in range(self.vocab_size) if token != self.mask_id)

    @property
    def causal_commit(self) -> bool:
        """Whether a commit inside a block is exact: nothing in the pass looks ahead."""
        for layer in self.layers:
            if layer.mixer == "linear_attention":
                return False  # which tokens meet by softmax depends on where blocks begin
            if layer.mixer == "attention":
                sizes = layer.attention
                if sizes.window is not None and sizes.sinks and not sizes.keys_rotated:
                    return False  # in-cache positions likewise
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
        known = tuple(field.name for field in fields(cls))
        require_keys(data, known, "ModelSpec", SINCE_SCHEMA_2.get(cls.__name__, ()))
        layers = tuple(LayerSpec.from_dict(layer) for layer in data["layers"])
        return cls(**{**data, "layers": layers, "stop_ids": tuple(data.get("stop_ids", ()))})
