"""A published config beside the shapes of its weights, and the errors where the two differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from fixedstate.errors import CheckpointError
from fixedstate.export.published import MAMBA_SSM, TRANSFORMERS, shown
from fixedstate.export.weights import Shape
from fixedstate.spec import Mamba1Sizes

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


class PublishedConfig:
    """One published config beside its weights; every method raises where the two disagree.

    Attributes:
        config: config.json.
        style: One of the published styles.
        shapes: Shapes by published name without ``backbone.``, conv weights as (C, 1, K).
        note: Told what was decided where the config leaves room.
        kind: The mixer: ``mamba1``, ``mamba2`` or ``attention``.
        keys: Config key of each size.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        style: str,
        shapes: Mapping[str, Shape],
        note: Callable[[str], None],
    ) -> None:
        self.config, self.style, self.shapes, self.note = config, style, shapes, note
        if style == MAMBA_SSM:
            self.known("", _TOP_KEYS)
            self.known("ssm_cfg", _SSM_KEYS)
            self.known("attn_cfg", _ATTN_KEYS)
        self.kind = self._kind()
        self.keys = self._keys()

    # What the config says.

    def get(self, key: str) -> Any:
        """The value of a key, ``outer.inner`` for a nested one; None where unstated."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def known(self, outer: str, known: tuple[str, ...]) -> None:
        """Refuse keys of the config, or of a mapping in it, that are not known."""
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
        stated = self.get(label)
        if stated is not None and (not isinstance(stated, str) or stated not in said):
            raise self.refused(label, stated, " or ".join(said))
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

    def _keys(self) -> Mapping[str, str]:
        return _KEYS[self.style, self.kind]

    def count(self, key: str) -> int | None:
        """A positive int, or None where unstated."""
        value = self.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.refused(key, value, "a positive int")
        if value is not None and value < 1:
            raise self.refused(key, value, "a positive int")
        return value

    def size(self, name: str) -> int | None:
        """A size by its own name, or None where unstated."""
        return self.count(self.keys[name]) if name in self.keys else None

    def flag(self, key: str, default: bool) -> bool:
        """A truth value, or the default where unstated."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(key, value, "true or false")
        return value

    def switch(self, name: str, default: bool) -> bool:
        """Likewise, by its own name."""
        return self.flag(self.keys[name], default)

    def number(self, key: str, default: float) -> float:
        """A number, or the default where unstated."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
            raise self.refused(key, value, "a number")
        return float(value)

    def refused(self, key: str, value: Any, expected: str) -> CheckpointError:
        """An error for a value that is not supported."""
        return CheckpointError(
            f"config.json has {key} {value!r}, expected {expected}: such a checkpoint is not "
            "supported"
        )

    # What the weights say.

    def shape(self, key: str, rank: int) -> Shape:
        """Shape of a required tensor, which has ``rank`` dimensions."""
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

    def conflict(self, key: str, stated: Any, found: Any, tensor: str) -> CheckpointError:
        """An error for a stated value that the weights contradict."""
        shape = self.shapes.get(tensor)
        where = f" ({shown(tensor, self.style)} has shape {shape})" if shape else ""
        return CheckpointError(
            f"config.json says {key} {stated}, the weights say {found}{where}: correct the config "
            "or use the weights that belong to it"
        )

    def agree(self, name: str, found: int, tensor: str) -> int:
        """The size found in the weights; what the config states about it must be equal."""
        stated = self.size(name)
        if stated is not None and stated != found:
            raise self.conflict(self.keys[name], stated, found, tensor)
        return found

    def mamba1_sizes(self, at: str, inner: int) -> Mamba1Sizes:
        """Sizes of the Mamba-1 mixer whose tensors are called ``at...``; E is known already."""
        decay, step, conv = f"{at}A_log", f"{at}dt_proj.weight", f"{at}conv1d.weight"
        _, state = self.shape(decay, 2)
        self.agree("d_state", state, decay)
        _, rank = self.shape(step, 2)
        if self.get(self.keys["dt_rank"]) not in (None, "auto"):
            self.agree("dt_rank", rank, step)
        _, _, taps = self.shape(conv, 3)
        self.agree("d_conv", taps, conv)
        return Mamba1Sizes(
            d_inner=inner,
            d_state=state,
            dt_rank=rank,
            d_conv=taps,
            bias=self.switch("bias", False),
            conv_bias=self.switch("conv_bias", True),
        )
