"""DiMamba checkpoints (the bidirectional Mamba-1 denoiser of MDLM, arXiv 2406.07524).

Every layer adds a Mamba-1 pass over the whole text from the left and one from the right; the
conditioning is held constant. Two configs are read: what the hub mixin saves for the class
(``config``, ``vocab_size``), and that of its inner model (``model_type`` bimamba). Source:
kuleshov-group/mdlm, models/dimamba.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fixedstate.errors import CheckpointError
from fixedstate.export import adaln
from fixedstate.export.adaln import Folded, Modulation
from fixedstate.export.published import DIMAMBA, Piece, Plan
from fixedstate.export.published_diffusion import DiffusionConfig, Note
from fixedstate.export.weights import Shape
from fixedstate.spec import LayerSpec, Mamba1Sizes, ModelSpec

_SIZES = {
    "expand": "ssm_cfg.expand",
    "d_state": "ssm_cfg.d_state",
    "dt_rank": "ssm_cfg.dt_rank",
    "d_conv": "ssm_cfg.d_conv",
    "bias": "ssm_cfg.bias",
    "conv_bias": "ssm_cfg.conv_bias",
}
_INNER_KEYS = {
    **_SIZES,
    "width": "d_model",
    "n_layer": "n_layer",
    "cond": "d_temb",
    "tie": "tie_word_embeddings",
    "strategy": "temb_strategy",
    "time": "time_conditioning",
}
_OUTER_KEYS = {
    **_SIZES,  # never in such a config: the class fixes them
    "width": "config.model.hidden_size",
    "n_layer": "config.model.n_blocks",
    "cond": "config.model.cond_dim",
    "tie": "config.model.tie_word_embeddings",
    "strategy": "config.model.temb_strategy",
    "time": "config.time_conditioning",
}
_SSM_KEYS = (
    *(key.partition(".")[2] for key in _SIZES.values()),
    # Initialisation and kernels only: no influence on what trained weights compute.
    *("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path"),
)


def plan_of(
    config: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    note: Note,
    *,
    block_len: int | None,
    mask_id: int | None,
    stop_ids: tuple[int, ...],
    objective: str | None,
) -> Plan:
    """How a DiMamba checkpoint is read.

    Args:
        config: config.json.
        shapes: Shapes by published name without ``model.bimamba.backbone.``.
        note: Told what was folded and decided.
        block_len: L in tokens; the config states none.
        mask_id: Id of the mask; the config states none.
        stop_ids: Ids that end a text.
        objective: None or ``full``.

    Raises:
        CheckpointError: where config and weights disagree, or a feature is not supported.
    """
    if objective not in (None, "full"):
        raise CheckpointError(
            f"objective {objective!r} was given, expected 'full': a DiMamba model sees the whole "
            "text in both directions"
        )
    if block_len is None:
        raise CheckpointError(
            "a dimamba checkpoint states no block length, expected --block-len: give the number "
            "of tokens to decode at a time"
        )
    if mask_id is None:
        raise CheckpointError(
            "a dimamba checkpoint states no mask id, expected --mask-id: it is the tokenizer's, "
            "or the last id of the vocabulary where the tokenizer has none"
        )
    return _Reader(config, DIMAMBA, shapes, note).plan(block_len, mask_id, stop_ids)


class _Reader(DiffusionConfig):
    """The values of a plan, each read once."""

    def _kind(self) -> str:
        return "mamba1"

    def _keys(self) -> Mapping[str, str]:
        return _INNER_KEYS if "d_model" in self.config else _OUTER_KEYS

    def plan(self, block_len: int, mask_id: int, stop_ids: tuple[int, ...]) -> Plan:
        self._features()
        rows, width = self.shape("embedding.weight", 2)
        self.agree("width", width, "embedding.weight")
        vocab = self.count("vocab_size")
        if vocab is not None and vocab > rows:
            raise self.conflict("vocab_size", vocab, f"{rows} rows", "embedding.weight")
        usable = vocab or rows
        cond = self.embedder()
        layers, pieces = self._layers(width, cond)
        (place,) = self.modulations("adaLN_modulation_final", 2, width, cond)
        tied = self.flag(self.keys["tie"], True)
        rms = self.flag("rms_norm", True)
        pieces["embedding.weight"] = self.piece("embedding.weight", rows, width)
        pieces |= self._norm("norm", "norm_f", width, place)
        head = "embedding.weight" if tied else "lm_head.weight"
        if not tied:
            pieces["head.weight"] = self.piece(head, rows, width)
        if rms:
            pieces["head.bias"] = adaln.input_bias(head, None, place)
        self.note(
            "folded the constant conditioning (timestep 0) into norms and projections of "
            f"{len(layers)} layers, into the last norm and {'the head' if rms else 'its bias'}"
        )
        spec = ModelSpec(
            vocab_size=usable - 1 if mask_id == usable - 1 else usable,
            vocab_rows=rows,
            width=width,
            layers=layers,
            block_len=block_len,
            mask_id=mask_id,
            stop_ids=stop_ids,
            tied_embeddings=tied,
            objective="full",
            residual_fp32=self.flag("residual_in_fp32", True),
            norm=layers[0].norm,
            norm_eps=layers[0].norm_eps,
            head_bias=rms,
        )
        return Plan(spec, pieces, self.needed, self._twins(layers, tied))

    def _features(self) -> None:
        self.known("ssm_cfg", _SSM_KEYS)
        strategy = self.keys["strategy"]
        if self.get(strategy) != "adaln":  # the published layers add no residual elsewhere
            raise self.refused(strategy, self.get(strategy), "'adaln'")
        merge = self.get("bidirectional_strategy")
        if merge not in (None, "add"):
            raise self.refused("bidirectional_strategy", merge, "'add'")
        if not self.flag("bidirectional", True):
            raise self.refused("bidirectional", False, "true")
        if not self.flag("fused_add_norm", True):
            raise self.refused("fused_add_norm", False, "true")
        self.constant_timestep()

    def _layers(
        self, width: int, cond: int
    ) -> tuple[tuple[LayerSpec, ...], dict[str, Piece | Folded]]:
        count = self.layer_count("layers.0.norm.weight")
        found = self._mamba("layers.0.mixer.mamba_fwd.", width)
        rms = self.flag("rms_norm", True)
        sizes = replace(found, bias=True) if rms else found
        layer = LayerSpec(
            "mamba1",
            sizes,
            "block",
            tied="projections" if self.flag("bidirectional_weight_tie", True) else "none",
            norm="rms" if rms else "layer",
            norm_eps=self.number("norm_epsilon", 1e-5),
        )
        pieces: dict[str, Piece | Folded] = {}
        for index in range(count):
            at = f"layers.{index}"
            (place,) = self.modulations(f"{at}.adaLN_modulation", 3, width, cond)
            own = self._norm("norm", f"{at}.norm", width, place)
            for name, theirs in (("mixer", "mamba_fwd"), ("mixer.reverse", "mamba_rev")):
                part = self._scan(f"{at}.mixer.{theirs}", found)
                if name == "mixer" or layer.tied == "none":
                    part |= self._projections(f"{at}.mixer.{theirs}", width, found, place, rms)
                own |= {f"{name}.{leaf}": piece for leaf, piece in part.items()}
            pieces |= {f"{at}.{name}": piece for name, piece in own.items()}
        return (layer,) * count, pieces

    def _mamba(self, at: str, width: int) -> Mamba1Sizes:
        out = f"{at}out_proj.weight"
        _, inner = self.shape(out, 2)
        expand = self.get(self.keys["expand"])
        if expand is not None and int(self.number(self.keys["expand"], 2) * width) != inner:
            raise self.conflict(self.keys["expand"], expand, f"d_inner {inner}", out)
        return self.mamba1_sizes(at, inner)

    def _scan(self, at: str, sizes: Mamba1Sizes) -> dict[str, Piece | Folded]:
        """What the two directions never share."""
        inner, state, rank = sizes.d_inner, sizes.d_state, sizes.dt_rank
        shapes: dict[str, Shape] = {
            "conv1d.weight": (inner, 1, sizes.d_conv),
            "x_proj.weight": (rank + 2 * state, inner),
            "dt_proj.weight": (inner, rank),
            "dt_proj.bias": (inner,),
            "A_log": (inner, state),
            "D": (inner,),
        }
        if sizes.conv_bias:
            shapes["conv1d.bias"] = (inner,)
        return {leaf: self.piece(f"{at}.{leaf}", *shape) for leaf, shape in shapes.items()}

    def _projections(
        self, at: str, width: int, sizes: Mamba1Sizes, place: Modulation, rms: bool
    ) -> dict[str, Piece | Folded]:
        """in_proj and out_proj. An RMSNorm holds no shift: in_proj gets it as a bias."""
        into = self.piece(f"{at}.in_proj.weight", 2 * sizes.d_inner, width)
        out = self.piece(f"{at}.out_proj.weight", width, sizes.d_inner)
        own: dict[str, Piece | Folded] = {
            "in_proj.weight": into,
            "out_proj.weight": adaln.gated(out.key, place),
        }
        bias = None
        if sizes.bias:
            bias = self.piece(f"{at}.in_proj.bias", 2 * sizes.d_inner)
            out_bias = self.piece(f"{at}.out_proj.bias", width)
            own |= {"in_proj.bias": bias, "out_proj.bias": adaln.gated(out_bias.key, place)}
        if rms:
            own["in_proj.bias"] = adaln.input_bias(into.key, bias.key if bias else None, place)
            own.setdefault("out_proj.bias", adaln.zeros(width))
        return own

    def _norm(self, name: str, at: str, width: int, place: Modulation) -> dict[str, Piece | Folded]:
        weight = self.piece(f"{at}.weight", width)
        out: dict[str, Piece | Folded] = {f"{name}.weight": adaln.norm_weight(weight.key, place)}
        if not self.flag("rms_norm", True):
            bias = self.piece(f"{at}.bias", width)
            out[f"{name}.bias"] = adaln.norm_bias(bias.key, place)
        return out

    def _twins(self, layers: tuple[LayerSpec, ...], tied: bool) -> dict[str, str]:
        """Second copies that a file may hold of what is shared."""
        twins = {"lm_head.weight": "embedding.weight"} if tied else {}
        for index, layer in enumerate(layers):
            if layer.tied != "projections":
                continue
            for leaf in ("in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"):
                at = f"layers.{index}.mixer"
                twins[f"{at}.mamba_rev.{leaf}"] = f"{at}.mamba_fwd.{leaf}"
        return twins
