"""Published Mamba checkpoints as forward-only denoisers: their configs, sizes and tensor names.

Two styles are read: ``mamba_ssm`` (``MambaLMHeadModel``) and ``transformers`` (``MambaForCausalLM``,
``Mamba2ForCausalLM``). Sizes come from the weights; what the config states about them must agree.
docs/checkpoints.md lists how each quirk of the two maps onto a ModelSpec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fixedstate.errors import CheckpointError
from fixedstate.export.weights import Shape, tensor_shapes
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba1Sizes, Mamba2Sizes, ModelSpec

OWN, MAMBA_SSM, TRANSFORMERS = "fixedstate", "mamba_ssm", "transformers"
FORMATS = (
    'format "fixedstate" (this package), d_model and n_layer (mamba_ssm), or model_type "mamba" '
    'or "mamba2" (transformers)'
)
_GATED_EPS = 1e-5  # of mamba_ssm's gated norm; its config cannot state another
_BLOCK_EPS = 1e-5  # of its other norms, likewise
_MLP_MULTIPLE = 128  # mamba_ssm rounds d_intermediate up to it

# Config key of each size, by style and kind of mixer; a dot leads into a nested mapping.
_KEYS: dict[tuple[str, str], dict[str, str]] = {
    (TRANSFORMERS, "mamba2"): {
        "width": "hidden_size",
        "n_layer": "num_hidden_layers",
        "d_inner": "intermediate_size",
        "expand": "expand",
        "heads": "num_heads",
        "head_dim": "head_dim",
        "d_state": "state_size",
        "groups": "n_groups",
        "d_conv": "conv_kernel",
        "bias": "use_bias",
        "conv_bias": "use_conv_bias",
        "dt_limit": "time_step_limit",
    },
    (TRANSFORMERS, "mamba1"): {
        "width": "hidden_size",
        "n_layer": "num_hidden_layers",
        "d_inner": "intermediate_size",
        "expand": "expand",
        "d_state": "state_size",
        "dt_rank": "time_step_rank",
        "d_conv": "conv_kernel",
        "bias": "use_bias",
        "conv_bias": "use_conv_bias",
    },
    (MAMBA_SSM, "mamba2"): {
        "width": "d_model",
        "n_layer": "n_layer",
        "d_inner": "ssm_cfg.d_ssm",
        "expand": "ssm_cfg.expand",
        "head_dim": "ssm_cfg.headdim",
        "d_state": "ssm_cfg.d_state",
        "groups": "ssm_cfg.ngroups",
        "d_conv": "ssm_cfg.d_conv",
        "bias": "ssm_cfg.bias",
        "conv_bias": "ssm_cfg.conv_bias",
        "d_has_hdim": "ssm_cfg.D_has_hdim",
        "dt_limit": "ssm_cfg.dt_limit",
    },
    (MAMBA_SSM, "mamba1"): {
        "width": "d_model",
        "n_layer": "n_layer",
        "expand": "ssm_cfg.expand",
        "d_state": "ssm_cfg.d_state",
        "dt_rank": "ssm_cfg.dt_rank",
        "d_conv": "ssm_cfg.d_conv",
        "bias": "ssm_cfg.bias",
        "conv_bias": "ssm_cfg.conv_bias",
    },
}
_SSM_KEYS = (
    *(key.partition(".")[2] for key in _KEYS[MAMBA_SSM, "mamba2"].values() if "." in key),
    *("layer", "dt_rank", "rmsnorm", "norm_before_gate"),
    # Initialisation and kernels only: no influence on what trained weights compute.
    *("conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "dt_init", "dt_scale"),
    *("chunk_size", "use_mem_eff_path", "use_fast_path", "sequence_parallel"),
)
_TOP_KEYS = (
    *("d_model", "d_intermediate", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx"),
    *("attn_cfg", "rms_norm", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple"),
    *("tie_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    # What hub tools add.
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("model_type", "_commit_hash"),
)
_ATTN_KEYS = (
    *("num_heads", "num_heads_kv", "head_dim", "mlp_dim", "qkv_proj_bias", "out_proj_bias"),
    *("softmax_scale", "causal", "d_conv", "rotary_emb_dim", "rotary_emb_base"),
    *("rotary_emb_interleaved",),
)
# The split of groups x state is not in the weights: what the two libraries take where unstated.
_SPLIT = {TRANSFORMERS: (8, 128), MAMBA_SSM: (1, 128)}


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a tensor of the own layout stands in a file: a whole tensor, or some of its rows."""

    key: str
    start: int = 0
    stop: int | None = None  # None for the whole tensor


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
    if "d_model" in config and "n_layer" in config:
        return MAMBA_SSM
    found = f"model_type {model_type!r}" if model_type else f"the keys {sorted(config)[:8]}"
    raise CheckpointError(f"config.json has {found}, expected {FORMATS}: use such a checkpoint")


def spec_of(
    config: Mapping[str, Any],
    style: str,
    shapes: Mapping[str, Shape],
    note: Callable[[str], None],
    *,
    block_len: int,
    mask_id: int | None,
    stop_ids: tuple[int, ...],
    objective: str | None,
) -> ModelSpec:
    """The forward-only denoiser that a published config and its weights describe.

    Args:
        config: config.json.
        style: ``mamba_ssm`` or ``transformers``.
        shapes: Shapes by published name without ``backbone.``, conv weights as (C, 1, K).
        note: Told what was decided where the config leaves room.
        block_len: L in tokens; published configs state none.
        mask_id: None makes the objective ``causal``.
        stop_ids: Ids that end a text.
        objective: ``block`` or ``causal``; None for what the mask id implies.

    Raises:
        CheckpointError: where config and weights disagree, or a feature is not supported.
    """
    if objective not in (None, "block", "causal"):
        raise CheckpointError(
            f"objective {objective!r} was given, expected block or causal: a published Mamba "
            "model is forward only"
        )
    return _Reader(config, style, shapes, note).spec(
        block_len, mask_id, stop_ids, objective or ("causal" if mask_id is None else "block")
    )


def pieces_of(spec: ModelSpec) -> dict[str, Piece]:
    """Where each tensor of the own layout stands under its published name."""
    return {name: _piece(spec, name) for name in tensor_shapes(spec)}


def shown(key: str, style: str) -> str:
    """A published name as a file would spell it, for messages."""
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


class _Reader:
    """One published config beside its weights; every method raises where the two disagree."""

    def __init__(
        self,
        config: Mapping[str, Any],
        style: str,
        shapes: Mapping[str, Shape],
        note: Callable[[str], None],
    ) -> None:
        self.config, self.style, self.shapes, self.note = config, style, shapes, note
        if style == MAMBA_SSM:
            self._known("", _TOP_KEYS)
            self._known("ssm_cfg", _SSM_KEYS)
            self._known("attn_cfg", _ATTN_KEYS)
        self.kind = self._kind()
        self.keys = _KEYS[style, self.kind]

    def spec(
        self, block_len: int, mask_id: int | None, stop_ids: tuple[int, ...], objective: str
    ) -> ModelSpec:
        rows, width = self._embedding()
        layers = self._layers(width)
        norm, eps = self._norm()
        vocab = self._count("vocab_size")
        if vocab is not None and vocab > rows:
            raise self._conflict("vocab_size", vocab, f"{rows} rows", "embedding.weight")
        transformers = self.style == TRANSFORMERS
        tie = "tie_word_embeddings" if transformers else "tie_embeddings"
        # The default of each library: only Mamba2ForCausalLM unties.
        tied = self._flag(tie, not transformers or self.kind == "mamba1")
        return ModelSpec(
            vocab_size=vocab or rows,
            vocab_rows=rows,
            width=width,
            layers=layers,
            block_len=block_len,
            mask_id=mask_id,
            stop_ids=stop_ids,
            tied_embeddings=tied,
            objective=objective,
            residual_fp32=self._flag("residual_in_fp32", True),
            norm=norm,
            norm_eps=eps,
        )

    # What the config says.

    def _get(self, key: str) -> Any:
        outer, _, inner = key.partition(".")
        value = self.config.get(outer)
        return (value or {}).get(inner) if inner else value

    def _known(self, outer: str, known: tuple[str, ...]) -> None:
        mapping = self.config.get(outer) or {} if outer else self.config
        if not isinstance(mapping, Mapping):
            raise CheckpointError(
                f"config.json has {outer} {mapping!r}, expected a mapping: correct the config"
            )
        unknown = sorted(set(mapping) - set(known))
        if unknown:
            raise CheckpointError(
                f"config.json holds unknown keys {unknown}{f' in {outer}' if outer else ''}, "
                f"expected some of {', '.join(sorted(known))}: correct or remove them"
            )

    def _kind(self) -> str:
        if self.style == TRANSFORMERS:
            label, said = "model_type", {"mamba": "mamba1", "mamba2": "mamba2"}
        else:
            label, said = "ssm_cfg.layer", {"Mamba1": "mamba1", "Mamba2": "mamba2"}
        stated = self._get(label)
        if stated is not None and stated not in said:
            raise self._refused(label, stated, " or ".join(said))
        names = set(self.shapes)
        found = {
            kind
            for kind, leaf in (("mamba1", "x_proj.weight"), ("mamba2", "dt_bias"))
            if any(name.endswith(f".mixer.{leaf}") for name in names)
        }
        if stated is None:
            return found.pop() if len(found) == 1 else "mamba1"  # the default of mamba_ssm
        if found and found != {said[stated]}:
            raise CheckpointError(
                f"config.json says {label} {stated}, the weights have the tensors of "
                f"{' and '.join(sorted(found))}: use the config that belongs to the weights"
            )
        return said[stated]

    def _count(self, key: str) -> int | None:
        value = self._get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._refused(key, value, "a positive int")
        if value is not None and value < 1:
            raise self._refused(key, value, "a positive int")
        return value

    def _size(self, name: str) -> int | None:
        return self._count(self.keys[name]) if name in self.keys else None

    def _flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._refused(key, value, "true or false")
        return value

    def _switch(self, name: str, default: bool) -> bool:
        return self._flag(self.keys[name], default)

    def _number(self, key: str, default: float) -> float:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._refused(key, value, "a number")
        return float(value)

    def _refused(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"config.json has {key} {value!r}, expected {expected}: this checkpoint is not supported"
        )

    # What the weights say.

    def _shape(self, key: str, rank: int) -> Shape:
        if key not in self.shapes:
            raise CheckpointError(
                f"the weights lack the required tensor {shown(key, self.style)}; names in the "
                f"file look like {', '.join(sorted(self.shapes)[:3]) or 'nothing'}: the checkpoint "
                "is incomplete or of another format"
            )
        shape = self.shapes[key]
        if len(shape) != rank:
            raise CheckpointError(
                f"tensor {shown(key, self.style)} has shape {shape}, expected {rank} dimensions: "
                "the checkpoint is of another format"
            )
        return shape

    def _conflict(self, key: str, stated: Any, found: Any, tensor: str) -> CheckpointError:
        shape = self.shapes.get(tensor)
        where = f" ({shown(tensor, self.style)} has shape {shape})" if shape else ""
        return CheckpointError(
            f"config.json says {key} {stated}, the weights say {found}{where}: correct the config "
            "or use the weights that belong to it"
        )

    def _agree(self, name: str, found: int, tensor: str) -> int:
        stated = self._size(name)
        if stated is not None and stated != found:
            raise self._conflict(self.keys[name], stated, found, tensor)
        return found

    def _embedding(self) -> tuple[int, int]:
        name = "lm_head.weight" if "embedding.weight" not in self.shapes else "embedding.weight"
        rows, width = self._shape(name, 2)
        self._agree("width", width, name)
        if self.style == TRANSFORMERS:  # older configs of this style repeat both spellings
            for key, size in (("d_model", width), ("n_layer", self._layer_count())):
                stated = self._count(key)
                if stated is not None and stated != size:
                    raise self._conflict(key, stated, size, name)
        return rows, width

    def _layer_count(self) -> int:
        indices = {
            int(name.split(".")[1])
            for name in self.shapes
            if name.startswith("layers.") and name.split(".")[1].isdigit()
        }
        count = max(indices, default=-1) + 1
        if not count:
            self._shape("layers.0.norm.weight", 1)
        stated = self._size("n_layer")
        if stated is not None and stated != count:
            raise self._conflict(self.keys["n_layer"], stated, f"{count} layers", "")
        return count

    def _norm(self) -> tuple[str, float]:
        if self.style == TRANSFORMERS:
            return "rms", self._number("layer_norm_epsilon", 1e-5)
        return ("rms" if self._flag("rms_norm", True) else "layer"), _BLOCK_EPS

    def _layers(self, width: int) -> tuple[LayerSpec, ...]:
        count = self._layer_count()
        attention = self._attention_layers(count)
        norm, eps = self._norm()
        mlp_width = self._mlp_width()
        sizes: dict[bool, Any] = {}
        layers = []
        for index in range(count):
            is_attention = index in attention
            if is_attention not in sizes:
                read = self._attention if is_attention else getattr(self, f"_{self.kind}")
                sizes[is_attention] = read(f"layers.{index}.mixer.", width)
            layers.append(
                LayerSpec(
                    mixer="attention" if is_attention else self.kind,
                    sizes=sizes[is_attention],
                    direction="forward",
                    mlp="gated" if mlp_width else "none",
                    mlp_width=mlp_width,
                    norm=norm,
                    norm_eps=eps,
                )
            )
        return tuple(layers)

    def _attention_layers(self, count: int) -> set[int]:
        stated = self._get("attn_layer_idx") if self.style == MAMBA_SSM else None
        stated = stated or []
        if not isinstance(stated, list) or any(
            not isinstance(i, int) or not 0 <= i < count for i in stated
        ):
            raise self._refused("attn_layer_idx", stated, f"layer numbers from 0 to {count - 1}")
        return set(stated)

    def _mlp_width(self) -> int:
        stated = self._get("d_intermediate") if self.style == MAMBA_SSM else 0
        if not stated:
            return 0
        stated = self._count("d_intermediate")
        tensor = "layers.0.mlp.fc1.weight"
        rows, _ = self._shape(tensor, 2)
        if rows != 2 * math.ceil(stated / _MLP_MULTIPLE) * _MLP_MULTIPLE:
            raise self._conflict("d_intermediate", stated, rows // 2, tensor)
        return rows // 2

    def _inner(self, found: int, width: int, tensor: str, heads: int | None) -> None:
        """Inner width: what the config implies in any of its ways must include the weights' E."""
        expand, implied = self._get(self.keys["expand"]), {}
        if expand is not None:
            implied[f"{self.keys['expand']} {expand} x {self.keys['width']} {width}"] = int(
                self._number(self.keys["expand"], 2) * width
            )
        head_dim = self._size("head_dim")
        if heads and head_dim:
            implied[f"{self.keys['heads']} {heads} x {self.keys['head_dim']} {head_dim}"] = (
                heads * head_dim
            )
        ways = " and ".join(f"{way} = {value}" for way, value in implied.items())
        if implied and found not in implied.values():
            raise CheckpointError(
                f"the weights have d_inner {found} ({shown(tensor, self.style)} has shape "
                f"{self.shapes[tensor]}), config.json says {ways}: correct the config or use the "
                "weights that belong to it"
            )
        if any(value != found for value in implied.values()):
            self.note(f"d_inner is {found} as in the weights; config.json says {ways}")
        self._agree("d_inner", found, tensor)
        if head_dim and found % head_dim:
            raise CheckpointError(
                f"d_inner {found} is not a multiple of {self.keys['head_dim']} {head_dim} "
                f"(config.json): correct {self.keys['head_dim']} or "
                f"{self.keys['expand']}"
            )
        groups = self._size("groups")
        if groups and found % groups:
            raise CheckpointError(
                f"d_inner {found} is not a multiple of {self.keys['groups']} {groups} "
                f"(config.json): correct {self.keys['groups']}"
            )

    def _mamba2(self, at: str, width: int) -> Mamba2Sizes:
        self._features()
        projection, out = f"{at}in_proj.weight", f"{at}out_proj.weight"
        rows, _ = self._shape(projection, 2)
        _, inner = self._shape(out, 2)
        self._inner(inner, width, out, self._size("heads"))
        (heads,) = self._shape(f"{at}dt_bias", 1)
        self._agree("heads", heads, f"{at}dt_bias")
        if inner % heads:
            raise CheckpointError(
                f"the weights have d_inner {inner}, not a multiple of their {heads} heads "
                f"({shown(at, self.style)}dt_bias): the checkpoint is of another format"
            )
        self._agree("head_dim", inner // heads, out)
        groups, state = self._split(rows - 2 * inner - heads, projection)
        _, _, taps = self._shape(f"{at}conv1d.weight", 3)
        self._agree("d_conv", taps, f"{at}conv1d.weight")
        (skip,) = self._shape(f"{at}D", 1)
        low, high = self._dt_limit()
        gated = "before" if self._ssm("norm_before_gate", False) else "after"
        return Mamba2Sizes(
            d_inner=inner,
            heads=heads,
            head_dim=inner // heads,
            d_state=state,
            groups=groups,
            d_conv=taps,
            bias=self._switch("bias", False),
            conv_bias=self._switch("conv_bias", True),
            d_has_hdim=self._d_has_hdim(skip, inner, heads),
            dt_min=low,
            dt_max=high,
            gated_norm=gated if self._ssm("rmsnorm", True) else "none",
            norm_eps=_GATED_EPS if self.style == MAMBA_SSM else self._norm()[1],
        )

    def _ssm(self, key: str, default: bool) -> bool:
        if self.style == MAMBA_SSM:
            return self._flag(f"ssm_cfg.{key}", default)
        return default

    def _d_has_hdim(self, skip: int, inner: int, heads: int) -> bool:
        if self.style == TRANSFORMERS:
            return False
        return self._switch("d_has_hdim", skip == inner and inner != heads)

    def _features(self) -> None:
        if self.style == TRANSFORMERS:
            act = self._get("hidden_act")
            if act not in (None, "silu", "swish"):
                raise self._refused("hidden_act", act, "silu")
            for key, usual in (("norm_before_gate", False), ("rms_norm", True)):
                if self._get(key) not in (None, usual):
                    self.note(f"config.json states {key}, which transformers does not read either")
        chunk = "chunk_size" if self.style == TRANSFORMERS else "ssm_cfg.chunk_size"
        self._count(chunk)

    def _split(self, both: int, tensor: str) -> tuple[int, int]:
        """Groups and state width: their product is in the weights, the split in the config."""
        groups, state = self._size("groups"), self._size("d_state")
        product = both // 2
        if groups is None and state is None:
            groups, state = _SPLIT[self.style]
        elif state is None:
            state = product // (groups or 1)
        elif groups is None:
            groups = product // state
        if groups is None or both < 2 or 2 * groups * state != both:
            raise self._conflict(
                f"{self.keys['groups']} x {self.keys['d_state']}",
                f"{groups} x {state}",
                f"{both / 2:g}",
                tensor,
            )
        return groups, state

    def _dt_limit(self) -> tuple[float, float | None]:
        key = self.keys["dt_limit"]
        stated = self._get(key)
        if stated is None:
            return 0.0, None
        # transformers writes infinity as {"__float__": "Infinity"}
        limits = [
            float(item["__float__"]) if isinstance(item, dict) and "__float__" in item else item
            for item in (stated if isinstance(stated, list) else ())
        ]
        if len(limits) != 2 or any(
            not isinstance(item, (int, float)) or math.isnan(item) for item in limits
        ):
            raise self._refused(key, stated, "two numbers, the lowest and the highest dt")
        low, high = float(limits[0]), float(limits[1])
        return max(low, 0.0), None if math.isinf(high) else high  # softplus is never below 0

    def _mamba1(self, at: str, width: int) -> Mamba1Sizes:
        self._features()
        out, decay = f"{at}out_proj.weight", f"{at}A_log"
        _, inner = self._shape(out, 2)
        self._inner(inner, width, out, None)
        _, state = self._shape(decay, 2)
        self._agree("d_state", state, decay)
        _, rank = self._shape(f"{at}dt_proj.weight", 2)
        if self._get(self.keys["dt_rank"]) not in (None, "auto"):
            self._agree("dt_rank", rank, f"{at}dt_proj.weight")
        _, _, taps = self._shape(f"{at}conv1d.weight", 3)
        self._agree("d_conv", taps, f"{at}conv1d.weight")
        return Mamba1Sizes(
            d_inner=inner,
            d_state=state,
            dt_rank=rank,
            d_conv=taps,
            bias=self._switch("bias", False),
            conv_bias=self._switch("conv_bias", True),
        )

    def _attention(self, at: str, width: int) -> AttentionSizes:
        """``mamba_ssm`` MHA, where it is plain causal attention; the rest is refused by name."""
        for key, plain in (("d_conv", 0), ("mlp_dim", 0), ("rotary_emb_interleaved", False)):
            if self._get(f"attn_cfg.{key}") not in (None, plain):
                raise self._refused(f"attn_cfg.{key}", self._get(f"attn_cfg.{key}"), repr(plain))
        if not self._flag("attn_cfg.causal", False):  # MHA's own default is bidirectional
            raise self._refused("attn_cfg.causal", self._get("attn_cfg.causal"), "true")
        heads = self._count("attn_cfg.num_heads")
        if heads is None:
            raise self._refused("attn_cfg.num_heads", None, "a positive int")
        kv_heads = self._count("attn_cfg.num_heads_kv") or heads
        _, columns = self._shape(f"{at}out_proj.weight", 2)
        head_dim = columns // heads
        stated = self._count("attn_cfg.head_dim") or width // heads
        rows, _ = self._shape(f"{at}in_proj.weight", 2)
        if stated * heads != columns or rows != head_dim * (heads + 2 * kv_heads):
            raise self._conflict(
                "attn_cfg num_heads x head_dim, num_heads_kv",
                f"{heads} x {stated}, {kv_heads}",
                f"{columns} columns and {rows} rows",
                f"{at}in_proj.weight",
            )
        scale = self._number("attn_cfg.softmax_scale", head_dim**-0.5)
        if not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
            raise self._refused("attn_cfg.softmax_scale", scale, f"{head_dim**-0.5:g}")
        return AttentionSizes(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=self._get("attn_cfg.rotary_emb_dim") or 0,
            rope_theta=self._number("attn_cfg.rotary_emb_base", 10000.0),
            qkv_bias=self._flag("attn_cfg.qkv_proj_bias", True),
            out_bias=self._flag("attn_cfg.out_proj_bias", True),
        )
