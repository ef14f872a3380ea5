"""Which format a checkpoint has, and what published formats call the tensors of the own layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import CheckpointError
from fixedstate.export.adaln import Folded
from fixedstate.export.weights import Shape, tensor_shapes
from fixedstate.spec import ModelSpec

OWN, MAMBA_SSM, TRANSFORMERS = "fixedstate", "mamba_ssm", "transformers"
BD3LM, DIMAMBA = "bd3lm", "dimamba"
FORMATS = (
    'format "fixedstate" (this package), d_model and n_layer (mamba_ssm), model_type "mamba" or '
    '"mamba2" (transformers), "bd3lm" or "bimamba" (diffusion models)'
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a tensor of the own layout stands in a file: a whole tensor, or some of its rows."""

    key: str
    start: int = 0
    stop: int | None = None  # None for the whole tensor

    @property
    def keys(self) -> tuple[str, ...]:
        """Published names of what it is made of: one."""
        return (self.key,)


@dataclass(frozen=True, slots=True)
class Plan:
    """A published checkpoint as this package reads it.

    Attributes:
        spec: The model.
        pieces: Where each tensor of the own layout comes from.
        shapes: Shape that each tensor of the file must have, by published name; empty where the
            pieces and the spec say it.
        twins: Published names that may hold a second copy, and what they must be equal to.
        decode: How it decodes unless told otherwise.
    """

    spec: ModelSpec
    pieces: Mapping[str, Piece | Folded]
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    twins: Mapping[str, str] = field(default_factory=dict)
    decode: DecodeDefaults = field(default_factory=DecodeDefaults)


def style_of(config: Mapping[str, Any]) -> str:
    """Which format a config belongs to.

    Raises:
        CheckpointError: where its keys fit none, or a model type that is not supported.
    """
    if "format" in config:
        if config["format"] != OWN:
            raise CheckpointError(
                f"config.json has format {config['format']!r}, expected {OWN!r}: this format is "
                "not supported"
            )
        return OWN
    model_type = config.get("model_type")
    if model_type in ("mamba", "mamba2") and "hidden_size" in config:
        return TRANSFORMERS
    if model_type == "bd3lm":
        return BD3LM
    outer = config.get("config")
    if model_type == "bimamba" or (isinstance(outer, dict) and outer.get("backbone") == DIMAMBA):
        return DIMAMBA
    if "d_model" in config and "n_layer" in config:
        return MAMBA_SSM
    found = f"model_type {model_type!r}" if model_type else f"the keys {sorted(config)[:8]}"
    raise CheckpointError(f"config.json has {found}, expected {FORMATS}: use such a checkpoint")


def pieces_of(spec: ModelSpec) -> dict[str, Piece]:
    """Where each tensor of the own layout stands under its published name."""
    return {name: _piece(spec, name) for name in tensor_shapes(spec)}


def shown(key: str, style: str) -> str:
    """A published name as a file would spell it, for messages."""
    if style == DIMAMBA:
        if key.startswith("sigma_map."):
            return key
        if key == "embedding.weight":
            key = "embeddings.word_embeddings.weight"
        return f"model.{key}" if key.startswith("lm_head.") else f"model.bimamba.backbone.{key}"
    if style == OWN or key.startswith("lm_head."):
        return key
    if style == TRANSFORMERS and key == "embedding.weight":
        key = "embeddings.weight"
    return f"backbone.{key}"


def _piece(spec: ModelSpec, name: str) -> Piece:
    if not name.startswith("layers."):
        top = {"norm.weight": "norm_f.weight", "norm.bias": "norm_f.bias"}
        return Piece({**top, "head.weight": "lm_head.weight"}.get(name, name))
    _, index, rest = name.split(".", 2)
    layer = spec.layers[int(index)]
    part, _, leaf = rest.rpartition(".")
    at = f"layers.{index}."
    if part == "mlp_norm":
        return Piece(f"{at}norm2.{leaf}")
    if part == "mlp.down_proj":
        return Piece(f"{at}mlp.fc2.{leaf}")
    if part.startswith("mlp."):  # fc1 holds [up; gate]
        start = 0 if part == "mlp.up_proj" else layer.mlp_width
        return Piece(f"{at}mlp.fc1.{leaf}", start, start + layer.mlp_width)
    if layer.mixer != "attention" or part == "norm":
        return Piece(name)
    if part == "mixer.o_proj":
        return Piece(f"{at}mixer.out_proj.{leaf}")
    sizes = layer.attention  # in_proj holds [q; k; v]
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    start = {"mixer.q_proj": 0, "mixer.k_proj": queries, "mixer.v_proj": queries + keys}[part]
    stop = start + (queries if part == "mixer.q_proj" else keys)
    return Piece(f"{at}mixer.in_proj.{leaf}", start, stop)
