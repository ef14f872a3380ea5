"""The reference denoiser in PyTorch: pure tensor code that traces, and runs on a CPU.

One object, three passes over the same layers: ``denoise`` reads the state, ``commit`` makes the
next one, ``commit_denoise`` does both. Layers are functions ``(x, state) -> (y, state)``; no
state is kept between calls.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fixedstate.errors import ExportError
from fixedstate.export.attention import attention
from fixedstate.export.layers import ACTIVATIONS, layer_norm, linear, rms_norm
from fixedstate.export.mamba2 import mamba2
from fixedstate.export.passinfo import PassInfo
from fixedstate.plugins.torch_ops import PLAIN, BlockOps, wide
from fixedstate.spec import LayerSpec, ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ISLANDS = ("norm.weight", "norm.bias", "dt_bias", "A", "D")
_PROJECTIONS = ("_proj.weight",)

State = Mapping[str, Tensor]
"""Carried tensors by suffix, e.g. ``ssm_state_003``."""


def check_supported(spec: ModelSpec) -> None:
    """Refuse what this denoiser does not compute, by name.

    Raises:
        ExportError: naming layer and feature.
    """
    for index, layer in enumerate(spec.layers):
        what = None
        if layer.mixer == "mamba1":
            what = "mixer 'mamba1'"
        elif layer.mixer == "attention" and layer.direction == "reverse":
            what = "attention of direction 'reverse'"
        elif layer.mixer == "attention" and layer.attention.window is not None:
            what = f"a sliding window of {layer.attention.window} tokens"
        elif layer.mixer == "attention" and not layer.attention.keys_rotated:
            what = "keys cached before rotary embedding"
        if what:
            raise ExportError(
                f"layer {index}: {what} is not supported yet; supported mixers are Mamba-2 and "
                "attention over the whole prefix"
            )
    if spec.logit_shift:
        raise ExportError(
            "logit_shift (logits that predict the next position) is not supported yet"
        )
    if spec.objective == "full":
        raise ExportError(
            "objective 'full' (bidirectional over the whole sequence, no exact cache) is not "
            "supported yet: export a model trained block-causally"
        )


def as_stored(tensors: Mapping[str, Tensor], precision: Precision) -> dict[str, Tensor]:
    """The weights a bundle of that precision holds, back in float32: what its graphs compute with.

    Args:
        tensors: Own checkpoint layout.
        precision: Of the bundle; its float32 islands are not rounded.
    """
    dtype = _TORCH[precision.io]
    return {
        name: tensor.float() if _is_island(name) else tensor.to(dtype).float()
        for name, tensor in tensors.items()
    }


def _is_island(name: str) -> bool:
    """Whether a tensor stays float32 whatever the io dtype."""
    return name.endswith((*_ISLANDS, "A_log"))


class Denoiser(nn.Module):
    """A denoiser with given weights.

    Args:
        spec: The model.
        tensors: Every tensor of the documented own layout (docs/checkpoints.md), float32.
        precision: Dtypes of activations and ports; norms, steps, decays, softmax and scan stay
            float32.
        ops: Plain operators, or traced ones while a graph is made.

    Raises:
        ExportError: for a model with parts this denoiser does not compute.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        precision: Precision | None = None,
        ops: BlockOps = PLAIN,
    ) -> None:
        super().__init__()
        check_supported(spec)
        self.spec = spec
        self.precision = precision or Precision()
        self.state_spec = StateSpec.of(spec, self.precision)
        self.ops = ops
        self._last_stateful = max((port.layer for port in self.state_spec.ports), default=-1)
        self._names: dict[str, str] = {}
        for name, tensor in tensors.items():
            self._register(name, tensor)
        self._layers = [self._layer_weights(i) for i in range(len(spec.layers))]
        self.eval().requires_grad_(False)

    def _register(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor under a module attribute: [in, out], A folded, islands in float32."""
        if name.endswith("A_log"):
            name, tensor = name.removesuffix("_log"), -torch.exp(tensor.float())
        tensor = tensor.to(torch.float32 if _is_island(name) else _TORCH[self.precision.io])
        if name.endswith(_PROJECTIONS) or name == "head.weight":
            tensor = tensor.T
        elif name.endswith("conv1d.weight"):
            tensor = tensor.reshape(tensor.shape[0], -1)
            bias = name.removesuffix("weight") + "bias"
            if bias not in self._names:
                # a convolution without bias is one with a zero bias: one operator, no options
                self._store(bias, torch.zeros(tensor.shape[0], dtype=tensor.dtype))
        self._store(name, tensor.contiguous())

    def _store(self, name: str, tensor: Tensor) -> None:
        attribute = name.replace(".", "__")
        if name in self._names:
            delattr(self, attribute)
        self.register_buffer(attribute, tensor, persistent=False)
        self._names[name] = attribute

    def at(self, precision: Precision) -> Denoiser:
        """This denoiser at a precision, its islands in float32; a copy where that is another."""
        if precision == self.precision:
            return self
        other = copy.deepcopy(self)
        other.precision = precision
        other.state_spec = StateSpec.of(self.spec, precision)
        for name, attribute in self._names.items():
            if not _is_island(name):
                buffer: Tensor = getattr(self, attribute)
                setattr(other, attribute, buffer.to(_TORCH[precision.io]))
        return other

    def weight(self, name: str) -> Tensor:
        """A stored tensor by its layout name."""
        tensor: Tensor = getattr(self, self._names[name])
        return tensor

    def _layer_weights(self, index: int) -> dict[str, str]:
        prefix = f"layers.{index}."
        return {n.removeprefix(prefix): n for n in self._names if n.startswith(prefix)}

    def _group(self, index: int, prefix: str) -> dict[str, Tensor]:
        names = self._layers[index]
        return {
            short.removeprefix(prefix): self.weight(name)
            for short, name in names.items()
            if short.startswith(prefix)
        }

    def _norm(self, kind: str, eps: float, name: str, x: Tensor) -> Tensor:
        if kind == "layer":
            return layer_norm(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), eps)
        return rms_norm(x, self.weight(f"{name}.weight"), eps)

    def _mlp(self, layer: LayerSpec, index: int, x: Tensor) -> Tensor:
        w = self._group(index, "mlp.")
        act = ACTIVATIONS[layer.mlp_activation]
        up = linear(x, w["up_proj.weight"], w.get("up_proj.bias"))
        if layer.mlp == "gated":
            up = act(linear(x, w["gate_proj.weight"], w.get("gate_proj.bias"))) * up
        else:
            up = act(up)
        return linear(up, w["down_proj.weight"], w.get("down_proj.bias"))

    def _mixer(
        self, index: int, x: Tensor, state: State, info: PassInfo
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """One mixer: its output and the states it makes, by suffix."""
        layer = self.spec.layers[index]
        weights = self._group(index, "mixer.")
        ports = {kind: port.suffix for kind, port in self.state_spec.layer(index).items()}
        if layer.mixer == "attention":
            keys, values = (state.get(ports[kind]) for kind in ("key", "value"))
            y, k, v = attention(layer, weights, x, keys, values, info)
            return y, {ports["key"]: k, ports["value"]: v}
        conv = state[ports["conv"]] if "conv" in ports else None
        ssm = state[ports["ssm"]] if "ssm" in ports else None
        y, new_conv, new_ssm = mamba2(layer, weights, x, conv, ssm, info, self.ops)
        made: dict[str, Tensor] = {}
        if new_conv is not None:
            made[ports["conv"]] = new_conv
        if new_ssm is not None:
            made[ports["ssm"]] = new_ssm
        return y, made

    def _run(self, ids: Tensor, state: State, info: PassInfo) -> tuple[Tensor, dict[str, Tensor]]:
        """All layers: last hidden values [B, T, D] and the states made."""
        spec = self.spec
        io = self.weight("embedding.weight").dtype
        x = torch.nn.functional.embedding(ids, self.weight("embedding.weight"))
        if spec.residual_fp32:
            x = wide(x)
        made: dict[str, Tensor] = {}
        for index, layer in enumerate(spec.layers):
            if layer.mixer != "none":
                normed = self._norm(layer.norm, layer.norm_eps, f"layers.{index}.norm", x)
                y, new = self._mixer(index, normed.to(io), state, info)
                made |= new
                if y is None or (info.role == "commit" and index == self._last_stateful):
                    break  # nothing after it is carried
                x = x + y
            if layer.mlp != "none":
                name = f"layers.{index}.mlp_norm"
                normed = self._norm(layer.norm, layer.norm_eps, name, x)
                x = x + self._mlp(layer, index, normed.to(io))
        return x, made

    def _logits(self, x: Tensor) -> Tensor:
        """[B, T, vocab_rows] float32."""
        normed = self._norm(self.spec.norm, self.spec.norm_eps, "norm", x)
        normed = normed.to(self.weight("embedding.weight").dtype)
        if self.spec.tied_embeddings:
            return wide(torch.nn.functional.linear(normed, self.weight("embedding.weight")))
        return wide(linear(normed, self.weight("head.weight")))

    def denoise(self, ids: Tensor, state: State, past_length: Tensor | None = None) -> Tensor:
        """Logits of one block on top of a committed state, which is only read.

        Args:
            ids: [B, L] int64.
            state: Carried tensors by suffix.
            past_length: [B] int64 committed tokens per row, where the model has attention.

        Returns:
            [B, L, vocab_rows] float32.
        """
        info = PassInfo(self.spec, "denoise", ids.shape[1], past_length, None)
        return self._logits(self._run(ids, state, info)[0])

    def commit(
        self, ids: Tensor, state: State, past_length: Tensor | None, commit_length: Tensor
    ) -> dict[str, Tensor]:
        """The state after ``commit_length`` clean tokens of each row.

        Args:
            ids: [B, n*L] int64.
            state: Carried tensors by suffix.
            past_length: [B] int64 committed tokens per row, where the model has attention.
            commit_length: [B] int64, 0 to n*L.

        Returns:
            New states by suffix; keys and values hold the new columns only.
        """
        info = PassInfo(self.spec, "commit", ids.shape[1], past_length, commit_length)
        return self._run(ids, state, info)[1]

    def commit_denoise(
        self, ids: Tensor, state: State, past_length: Tensor | None, commit_length: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Commit ``commit_length`` tokens and give the logits of the last block in one pass.

        Args:
            ids: [B, m*L] int64.
            state: Carried tensors by suffix.
            past_length: [B] int64 committed tokens per row, where the model has attention.
            commit_length: [B] int64; logits are defined where it is at least (m-1)*L.

        Returns:
            New states by suffix, and logits [B, L, vocab_rows] float32.
        """
        info = PassInfo(self.spec, "commit_denoise", ids.shape[1], past_length, commit_length)
        x, made = self._run(ids, state, info)
        return made, self._logits(x[:, -self.spec.block_len :])

    def zero_state(self, rows: int, capacity: int = 0) -> dict[str, Tensor]:
        """The state before the first block: zeros, by suffix; float64 where the weights are."""
        exact = self.weight("embedding.weight").dtype == torch.float64
        return {
            port.suffix: torch.zeros(
                port.past.resolve(B=rows, C=capacity),
                dtype=torch.float64 if exact else _TORCH[port.past.dtype],
            )
            for port in self.state_spec.ports
        }

    def recompute(self, ids: Tensor) -> Tensor:
        """Logits of the last block of a whole sequence, without any cache.

        Every block but the last is clean, the last is the frontier.

        Args:
            ids: [B, m*L] int64.

        Returns:
            [B, L, vocab_rows] float32.
        """
        rows, tokens = ids.shape
        clean = torch.full((rows,), tokens - self.spec.block_len, dtype=torch.int64)
        past = torch.zeros(rows, dtype=torch.int64)
        return self.commit_denoise(ids, self.zero_state(rows), past, clean)[1]


class RoleGraph(nn.Module):
    """One graph role as a module whose arguments and results are the ports, in order."""

    def __init__(self, denoiser: Denoiser, role: str) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.role = role
        self.inputs, self.outputs = graph_ports(denoiser.spec, denoiser.state_spec, role)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take the input ports in order, give the output ports in order."""
        given = dict(zip((port.name for port in self.inputs), tensors, strict=True))
        ids, past = given["input_ids"], given.get("past_length")
        denoiser = self.denoiser
        state = {
            port.suffix: given[port.past.name]
            for port in denoiser.state_spec.ports
            if port.past.name in given
        }
        if self.role == "denoise":
            return (denoiser.denoise(ids, state, past),)
        commit_length = given.get("commit_length")
        if commit_length is None:
            commit_length = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64)
        if past is None:
            past = ids.new_zeros(ids.shape[0])
        if self.role == "commit":
            made, logits = denoiser.commit(ids, state, past, commit_length), None
        else:
            made, logits = denoiser.commit_denoise(ids, state, past, commit_length)
        results = [made[port.suffix] for port in denoiser.state_spec.ports]
        if logits is not None:
            results.append(logits)
        return tuple(results)
