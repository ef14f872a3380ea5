"""Published Mamba models as forward-only denoisers: sizes from the weights, rules from the config.

Two styles are read: ``mamba_ssm`` (``MambaLMHeadModel``), and ``transformers``
(``MambaForCausalLM``, ``Mamba2ForCausalLM``). What a config states must agree with the weights.
docs/checkpoints.md lists how each quirk of the two maps onto a ModelSpec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fixedstate.errors import CheckpointError
from fixedstate.export.published import MAMBA_SSM, TRANSFORMERS, shown
from fixedstate.export.published_config import PublishedConfig
from fixedstate.export.weights import Shape
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba1Sizes, Mamba2Sizes, ModelSpec

_GATED_EPS = 1e-5  # of mamba_ssm's gated norm; its config cannot state another
_BLOCK_EPS = 1e-5  # of its other norms, likewise
_MLP_MULTIPLE = 128  # mamba_ssm rounds d_intermediate up to it

# The split of groups x state is not in the weights: what the two libraries take where unstated.
_SPLIT = {TRANSFORMERS: (8, 128), MAMBA_SSM: (1, 128)}


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


class _Reader(PublishedConfig):
    """The values of a ModelSpec, each read once."""

    def spec(
        self, block_len: int, mask_id: int | None, stop_ids: tuple[int, ...], objective: str
    ) -> ModelSpec:
        rows, width = self._embedding()
        layers = self._layers(width)
        norm, eps = self._norm()
        vocab = self.count("vocab_size")
        if vocab is not None and vocab > rows:
            raise self.conflict("vocab_size", vocab, f"{rows} rows", "embedding.weight")
        transformers = self.style == TRANSFORMERS
        tie = "tie_word_embeddings" if transformers else "tie_embeddings"
        # The default of each library: only Mamba2ForCausalLM unties.
        tied = self.flag(tie, not transformers or self.kind == "mamba1")
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
            residual_fp32=self.flag("residual_in_fp32", True),
            norm=norm,
            norm_eps=eps,
        )

    def _embedding(self) -> tuple[int, int]:
        name = "embedding.weight"
        if name not in self.shapes and "lm_head.weight" in self.shapes:
            name = "lm_head.weight"
        rows, width = self.shape(name, 2)
        self.agree("width", width, name)
        if self.style == TRANSFORMERS:  # older configs of this style repeat both spellings
            for key, size in (("d_model", width), ("n_layer", self._layer_count())):
                stated = self.count(key)
                if stated is not None and stated != size:
                    raise self.conflict(key, stated, size, name)
        return rows, width

    def _layer_count(self) -> int:
        indices = {
            int(name.split(".")[1])
            for name in self.shapes
            if name.startswith("layers.") and name.split(".")[1].isdigit()
        }
        count = max(indices, default=-1) + 1
        if not count:
            self.shape("layers.0.norm.weight", 1)
        stated = self.size("n_layer")
        if stated is not None and stated != count:
            raise self.conflict(self.keys["n_layer"], stated, f"{count} layers", "")
        return count

    def _norm(self) -> tuple[str, float]:
        if self.style == TRANSFORMERS:
            return "rms", self.number("layer_norm_epsilon", 1e-5)
        return ("rms" if self.flag("rms_norm", True) else "layer"), _BLOCK_EPS

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
                mamba = self._mamba2 if self.kind == "mamba2" else self._mamba1
                read = self._attention if is_attention else mamba
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
        stated = self.get("attn_layer_idx") if self.style == MAMBA_SSM else None
        stated = stated or []
        if not isinstance(stated, list) or any(
            not isinstance(i, int) or not 0 <= i < count for i in stated
        ):
            raise self.refused("attn_layer_idx", stated, f"layer numbers from 0 to {count - 1}")
        return set(stated)

    def _mlp_width(self) -> int:
        stated = self.get("d_intermediate") if self.style == MAMBA_SSM else 0
        if not stated:
            return 0
        stated = self.count("d_intermediate") or 0
        tensor = "layers.0.mlp.fc1.weight"
        rows, _ = self.shape(tensor, 2)
        if rows != 2 * math.ceil(stated / _MLP_MULTIPLE) * _MLP_MULTIPLE:
            raise self.conflict("d_intermediate", stated, rows // 2, tensor)
        return rows // 2

    def _inner(self, found: int, width: int, tensor: str, heads: int | None) -> None:
        """Inner width: what the config implies in any of its ways must include the weights' E."""
        expand, implied = self.get(self.keys["expand"]), {}
        if expand is not None:
            implied[f"{self.keys['expand']} {expand} x {self.keys['width']} {width}"] = int(
                self.number(self.keys["expand"], 2) * width
            )
        head_dim = self.size("head_dim")
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
        part = self.get("ssm_cfg.d_ssm")
        if part not in (None, found):
            raise self.refused("ssm_cfg.d_ssm", part, f"{found}, the whole inner width")
        self.agree("d_inner", found, tensor)
        if head_dim and found % head_dim:
            raise CheckpointError(
                f"d_inner {found} is not a multiple of {self.keys['head_dim']} {head_dim} "
                f"(config.json): correct {self.keys['head_dim']} or "
                f"{self.keys['expand']}"
            )
        groups = self.size("groups")
        if groups and found % groups:
            raise CheckpointError(
                f"d_inner {found} is not a multiple of {self.keys['groups']} {groups} "
                f"(config.json): correct {self.keys['groups']}"
            )

    def _mamba2(self, at: str, width: int) -> Mamba2Sizes:
        self._features()
        projection, out = f"{at}in_proj.weight", f"{at}out_proj.weight"
        rows, _ = self.shape(projection, 2)
        _, inner = self.shape(out, 2)
        self._inner(inner, width, out, self.size("heads"))
        (heads,) = self.shape(f"{at}dt_bias", 1)
        self.agree("heads", heads, f"{at}dt_bias")
        if inner % heads:
            raise CheckpointError(
                f"the weights have d_inner {inner}, not a multiple of their {heads} heads "
                f"({shown(at, self.style)}dt_bias): the checkpoint is of another format"
            )
        self.agree("head_dim", inner // heads, out)
        groups, state = self._split(rows - 2 * inner - heads, projection)
        _, _, taps = self.shape(f"{at}conv1d.weight", 3)
        self.agree("d_conv", taps, f"{at}conv1d.weight")
        (skip,) = self.shape(f"{at}D", 1)
        low, high = self._dt_limit()
        gated = "before" if self._ssm("norm_before_gate", False) else "after"
        return Mamba2Sizes(
            d_inner=inner,
            heads=heads,
            head_dim=inner // heads,
            d_state=state,
            groups=groups,
            d_conv=taps,
            bias=self.switch("bias", False),
            conv_bias=self.switch("conv_bias", True),
            d_has_hdim=self._d_has_hdim(skip, inner, heads),
            dt_min=low,
            dt_max=high,
            gated_norm=gated if self._ssm("rmsnorm", True) else "none",
            norm_eps=_GATED_EPS if self.style == MAMBA_SSM else self._norm()[1],
        )

    def _ssm(self, key: str, default: bool) -> bool:
        if self.style == MAMBA_SSM:
            return self.flag(f"ssm_cfg.{key}", default)
        return default

    def _d_has_hdim(self, skip: int, inner: int, heads: int) -> bool:
        if self.style == TRANSFORMERS:
            return False
        return self.switch("d_has_hdim", skip == inner and inner != heads)

    def _features(self) -> None:
        if self.style == TRANSFORMERS:
            act = self.get("hidden_act")
            if act not in (None, "silu", "swish"):
                raise self.refused("hidden_act", act, "silu")
            for key, usual in (("norm_before_gate", False), ("rms_norm", True)):
                if self.get(key) not in (None, usual):
                    self.note(f"config.json states {key}, which transformers does not read either")
        chunk = "chunk_size" if self.style == TRANSFORMERS else "ssm_cfg.chunk_size"
        self.count(chunk)

    def _split(self, both: int, tensor: str) -> tuple[int, int]:
        """Groups and state width: their product is in the weights, the split in the config."""
        groups, state = self.size("groups"), self.size("d_state")
        product = both // 2
        if groups is None and state is None:
            groups, state = _SPLIT[self.style]
        elif state is None:
            state = product // (groups or 1)
        elif groups is None:
            groups = product // state
        if groups is None or both < 2 or 2 * groups * state != both:
            raise self.conflict(
                f"{self.keys['groups']} x {self.keys['d_state']}",
                f"{groups} x {state}",
                f"{both / 2:g}",
                tensor,
            )
        return groups, state

    def _dt_limit(self) -> tuple[float, float | None]:
        key = self.keys["dt_limit"]
        stated = self.get(key)
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
            raise self.refused(key, stated, "two numbers, the lowest and the highest dt")
        low, high = float(limits[0]), float(limits[1])
        return max(low, 0.0), None if math.isinf(high) else high  # softplus is never below 0

    def _mamba1(self, at: str, width: int) -> Mamba1Sizes:
        self._features()
        out = f"{at}out_proj.weight"
        _, inner = self.shape(out, 2)
        self._inner(inner, width, out, None)
        return self.mamba1_sizes(at, inner)

    def _attention(self, at: str, width: int) -> AttentionSizes:
        """``mamba_ssm`` MHA, where it is plain causal attention; the rest is refused by name."""
        for key, plain in (("d_conv", 0), ("mlp_dim", 0), ("rotary_emb_interleaved", False)):
            if self.get(f"attn_cfg.{key}") not in (None, plain):
                raise self.refused(f"attn_cfg.{key}", self.get(f"attn_cfg.{key}"), repr(plain))
        if not self.flag("attn_cfg.causal", False):  # MHA's own default is bidirectional
            raise self.refused("attn_cfg.causal", self.get("attn_cfg.causal"), "true")
        heads = self.count("attn_cfg.num_heads")
        if heads is None:
            raise self.refused("attn_cfg.num_heads", None, "a positive int")
        kv_heads = self.count("attn_cfg.num_heads_kv") or heads
        _, columns = self.shape(f"{at}out_proj.weight", 2)
        head_dim = columns // heads
        stated = self.count("attn_cfg.head_dim") or width // heads
        rows, _ = self.shape(f"{at}in_proj.weight", 2)
        if stated * heads != columns or rows != head_dim * (heads + 2 * kv_heads):
            raise self.conflict(
                "attn_cfg num_heads x head_dim, num_heads_kv",
                f"{heads} x {stated}, {kv_heads}",
                f"{columns} columns and {rows} rows",
                f"{at}in_proj.weight",
            )
        unrotated = self.get("attn_cfg.rotary_emb_dim") == 0
        rotary = 0 if unrotated else self.count("attn_cfg.rotary_emb_dim") or 0
        scale = self.number("attn_cfg.softmax_scale", head_dim**-0.5)
        if not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
            raise self.refused("attn_cfg.softmax_scale", scale, f"{head_dim**-0.5:g}")
        return AttentionSizes(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary,
            rope_theta=self.number("attn_cfg.rotary_emb_base", 10000.0),
            qkv_bias=self.flag("attn_cfg.qkv_proj_bias", True),
            out_bias=self.flag("attn_cfg.out_proj_bias", True),
        )
