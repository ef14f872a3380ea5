"""BD3-LM checkpoints (arXiv 2503.09573, ``model_type`` bd3lm) as block-causal attention models.

A stack of attention and MLP with weight-only LayerNorm, modulated by a conditioning that inference
holds constant. Source: kuleshov-group/bd3lms, models/hf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fixedstate.bundle import DecodeDefaults
from fixedstate.errors import CheckpointError
from fixedstate.export import adaln
from fixedstate.export.adaln import Folded, Modulation
from fixedstate.export.published import BD3LM, Piece, Plan
from fixedstate.export.published_diffusion import DiffusionConfig, Note
from fixedstate.export.weights import Shape
from fixedstate.spec import AttentionSizes, LayerSpec, ModelSpec

_EPS = 1e-5  # of its norms; its config cannot state another
_MLP_FACTOR = 4
_KEYS = {
    "width": "hidden_dim",
    "n_layer": "n_blocks",
    "cond": "cond_dim",
    "time": "time_conditioning",
}


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
    """How a BD3-LM checkpoint is read.

    Args:
        config: config.json.
        shapes: Shapes by published name without ``backbone.``.
        note: Told what was folded and decided.
        block_len: L in tokens, where the config states no ``block_size``.
        mask_id: None for the last id of the vocabulary.
        stop_ids: Ids that end a text.
        objective: None for ``block``, or ``full`` where the config has no block-causal mask.

    Raises:
        CheckpointError: where config and weights disagree, or a feature is not supported.
    """
    return _Reader(config, BD3LM, shapes, note).plan(block_len, mask_id, stop_ids, objective)


class _Reader(DiffusionConfig):
    """The values of a plan, each read once."""

    def _kind(self) -> str:
        return "attention"

    def _keys(self) -> Mapping[str, str]:
        return _KEYS

    def plan(
        self,
        block_len: int | None,
        mask_id: int | None,
        stop_ids: tuple[int, ...],
        objective: str | None,
    ) -> Plan:
        rows, width = self.shape("vocab_embed.embedding", 2)
        self.agree("width", width, "vocab_embed.embedding")
        stated = self.count("vocab_size")
        if stated is not None and stated != rows:
            raise self.conflict("vocab_size", stated, f"{rows} rows", "vocab_embed.embedding")
        modulated = self.flag("adaln", True)
        cond = 0
        if modulated:
            self.constant_timestep()
            cond = self.embedder()
        if self.flag("causal", False):
            raise self.refused("causal", True, "false")
        objective = self._objective(objective)
        layers, pieces = self._layers(width, cond)
        if modulated:
            self.note(
                "folded the constant conditioning (timestep 0) into norms, out projections and "
                f"MLPs of {len(layers)} layers and into the last norm"
            )
        if mask_id is None:
            mask_id = rows - 1
            self.note(f"mask id {mask_id}, the last of the vocabulary")
        spec = ModelSpec(
            vocab_size=rows - 1 if mask_id == rows - 1 else rows,
            vocab_rows=rows,
            width=width,
            layers=layers,
            block_len=self._block_len(block_len),
            mask_id=mask_id,
            stop_ids=stop_ids,
            objective=objective,
            residual_fp32=True,
            norm="layer",
            norm_eps=_EPS,
            head_bias=True,
        )
        pieces["embedding.weight"] = self.piece("vocab_embed.embedding", rows, width)
        pieces |= self._head(rows, width, cond)
        decode = DecodeDefaults(train_length=self.count("model_length"))
        return Plan(spec, pieces, self.needed, decode=decode)

    def _objective(self, given: str | None) -> str:
        has = "block" if self.flag("cross_attn", True) else "full"
        if given not in (None, has):
            raise CheckpointError(
                f"objective {given!r} was given, expected {has!r}: config.json has cross_attn "
                f"{has == 'block'}".replace("True", "true").replace("False", "false")
            )
        return has

    def _block_len(self, given: int | None) -> int:
        stated = self.count("block_size")
        whole = not self.flag("cross_attn", True)  # then the config's block is the whole text
        if stated is not None and not whole:
            if given not in (None, stated):
                raise CheckpointError(
                    f"config.json says block_size {stated}, a block length of {given} was given: "
                    "leave the option out, the model was trained with its own"
                )
            return stated
        if given is None:
            raise CheckpointError(
                "config.json states no block_size, expected --block-len: give the block length "
                "that the model was trained with"
            )
        return given

    def _layers(
        self, width: int, cond: int
    ) -> tuple[tuple[LayerSpec, ...], dict[str, Piece | Folded]]:
        heads = self.count("n_heads")
        if heads is None or width % heads:
            raise self.refused("n_heads", heads, f"a divisor of the width {width}")
        sizes = AttentionSizes(heads, heads, width // heads, rotary_dim=width // heads)
        inner, _ = self.shape("blocks.0.mlp.0.weight", 2)
        if inner != _MLP_FACTOR * width:
            raise self.conflict(
                self.keys["width"], width, f"an MLP of {inner}", "blocks.0.mlp.0.weight"
            )
        layer = LayerSpec(
            "attention",
            sizes,
            "block",
            mlp="plain",
            mlp_width=inner,
            mlp_bias=True,
            mlp_activation="gelu_tanh",
            norm="layer",
            norm_eps=_EPS,
        )
        pieces: dict[str, Piece | Folded] = {}
        count = self.layer_count("blocks.0.norm1.weight")
        for index in range(count):
            own = self._layer(f"blocks.{index}", width, inner, cond)
            pieces |= {f"layers.{index}.{name}": piece for name, piece in own.items()}
        return (layer,) * count, pieces

    def _layer(self, at: str, width: int, inner: int, cond: int) -> dict[str, Piece | Folded]:
        """Own names of one layer's tensors, without the layer, and where they come from."""
        attention, mlp = self._places(f"{at}.adaLN_modulation", 2, width, cond)
        packed = self.piece(f"{at}.attn_qkv.weight", 3 * width, width).key
        parts = {
            f"mixer.{name}_proj.weight": Piece(packed, i * width, (i + 1) * width)
            for i, name in enumerate("qkv")
        }
        out = self.piece(f"{at}.attn_out.weight", width, width)
        down = self.piece(f"{at}.mlp.2.weight", width, inner)
        down_bias = self.piece(f"{at}.mlp.2.bias", width)
        return {
            **self._norm("norm", f"{at}.norm1.weight", width, attention),
            **parts,
            "mixer.o_proj.weight": adaln.gated(out.key, attention) if attention else out,
            **self._norm("mlp_norm", f"{at}.norm2.weight", width, mlp),
            "mlp.up_proj.weight": self.piece(f"{at}.mlp.0.weight", inner, width),
            "mlp.up_proj.bias": self.piece(f"{at}.mlp.0.bias", inner),
            "mlp.down_proj.weight": adaln.gated(down.key, mlp) if mlp else down,
            "mlp.down_proj.bias": adaln.gated(down_bias.key, mlp) if mlp else down_bias,
        }

    def _places(self, at: str, count: int, width: int, cond: int) -> tuple[Modulation | None, ...]:
        """The modulated places of one linear map; None each in a model without modulation."""
        if not cond:
            return (None,) * count
        return self.modulations(at, 3 * count if count > 1 else 2, width, cond)

    def _norm(
        self, name: str, key: str, width: int, place: Modulation | None
    ) -> dict[str, Piece | Folded]:
        weight = self.piece(key, width)
        if place is None:
            return {f"{name}.weight": weight, f"{name}.bias": adaln.zeros(width)}
        return {
            f"{name}.weight": adaln.norm_weight(key, place),
            f"{name}.bias": adaln.norm_bias(None, place),
        }

    def _head(self, rows: int, width: int, cond: int) -> dict[str, Piece | Folded]:
        at = "output_layer"
        (place,) = self._places(f"{at}.adaLN_modulation", 1, width, cond)
        return {
            **self._norm("norm", f"{at}.norm_final.weight", width, place),
            "head.weight": self.piece(f"{at}.linear.weight", rows, width),
            "head.bias": self.piece(f"{at}.linear.bias", rows),
        }
