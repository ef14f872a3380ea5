"""The reference denoiser in PyTorch: pure tensor code that traces, and runs on a CPU.

One object, three passes over the same layers: ``denoise`` reads the state, ``commit`` makes the
next one, ``commit_denoise`` does both. Layers are functions ``(x, state) -> (y, state)``; no
state is kept between calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fixedstate.errors import ExportError
from fixedstate.export.attention import attention
from fixedstate.export.heads import head_values
from fixedstate.export.islands import is_island
from fixedstate.export.layers import ACTIVATIONS, layer_norm, linear, rms_norm
from fixedstate.export.linear_attention import linear_attention
from fixedstate.export.mamba1 import mamba1
from fixedstate.export.mamba2 import mamba2
from fixedstate.export.passinfo import PassInfo, tokens_at
from fixedstate.export.stored import TORCH_DTYPES, stored
from fixedstate.plugins.torch_ops import PLAIN, BlockOps, wide
from fixedstate.ports import Port
from fixedstate.spec import LayerSpec, ModelSpec
from fixedstate.state import (
    TOP_K,
    Precision,
    StateSpec,
    graph_ports,
    last_stateful,
    split_role,
)

State = Mapping[str, Tensor]
"""Carried tensors by suffix, e.g. ``ssm_state_003``."""

Mixer = Callable[
    [LayerSpec, dict[str, Tensor], Tensor, dict[str, Tensor], PassInfo, BlockOps],
    tuple[Tensor | None, dict[str, Tensor]],
]
"""``(layer, weights, x [B, T, D], states by kind, info, operators) -> (y, new states by kind)``;
y is None where only the new states are wanted."""

_MIXERS: dict[str, Mixer] = {
    "attention": attention,
    "linear_attention": linear_attention,
    "mamba1": mamba1,
    "mamba2": mamba2,
}


def check_supported(spec: ModelSpec) -> None:
    """Refuse what this denoiser does not compute, by name.

    Raises:
        ExportError: naming layer and feature.
    """
    if spec.objective != "full" and not any(layer.stateful for layer in spec.layers):
        raise ExportError(
            "no layer carries anything from block to block (all are of direction 'reverse' or "
            "without a mixer), so there is nothing to commit: a block-causal model needs one that "
            "does"
        )
    check_layers(spec)


def check_layers(spec: ModelSpec) -> None:
    """The same for the layers alone: a part of a model may carry nothing.

    Raises:
        ExportError: naming layer and feature.
    """
    for index, layer in enumerate(spec.layers):
        what = _unsupported(spec, layer)
        if what:
            raise ExportError(f"layer {index}: {what}")


def _unsupported(spec: ModelSpec, layer: LayerSpec) -> str:
    """What of a layer is not computed, and what is; empty where everything is."""
    if layer.mixer not in (*_MIXERS, "none"):
        return f"mixer {layer.mixer!r} is not supported; use one of {', '.join(_MIXERS)}"
    if layer.mixer.endswith("attention") and layer.direction == "reverse":
        return f"{layer.mixer} of direction 'reverse' is not supported; use 'block' or 'forward'"
    if spec.objective != "full":
        return ""
    carried = ""
    if layer.mixer == "linear_attention":
        carried = "linear_attention"
    elif layer.mixer == "attention" and layer.attention.window is not None:
        carried = f"a sliding window of {layer.attention.window} tokens"
    if carried:
        return (
            f"{carried} is a state carried from block to block, and objective 'full' (the whole "
            "sequence at once) has no blocks: use attention without a window"
        )
    return ""


@dataclass(slots=True)
class Passed:
    """What a pass gives.

    Attributes:
        states: New states by suffix.
        logits: [B, L, vocab_rows] float32, where the role has them.
        last_logits: [B, vocab_rows] float32, where a commit pass of the model has them.
        hidden: [B, T, D] what leaves the last layer, of a part of a model that ends there.
        reduced: What a reduced head gives of the slots asked for, by port name.
    """

    states: dict[str, Tensor]
    logits: Tensor | None = None
    last_logits: Tensor | None = None
    hidden: Tensor | None = None
    reduced: dict[str, Tensor] = field(default_factory=dict)


class BlockModel(nn.Module):
    """What graphs, comparison and laws ask of a model; subclasses run the passes.

    Attributes:
        spec: The model.
        precision: Dtypes of its ports.
        state_spec: What it carries at that precision.
        top_k: Tokens that its ``top_k`` head gives.
    """

    spec: ModelSpec
    precision: Precision
    state_spec: StateSpec
    top_k: int = TOP_K

    @property
    def dtype(self) -> torch.dtype:
        """What its activations are computed in."""
        raise NotImplementedError

    def at(self, precision: Precision) -> BlockModel:
        """This model at a precision; itself where that is its own."""
        raise NotImplementedError

    def ports(self, role: str) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Inputs and outputs of the graph of a role, in order: what enters comes first."""
        return graph_ports(self.spec, self.state_spec, role, self.top_k)

    def passes(self, role: str, ids: Tensor, state: State, **lengths: Tensor | None) -> Passed:
        """One pass of any role; see :meth:`denoise` and :meth:`commit`."""
        raise NotImplementedError

    def denoise(self, ids: Tensor, state: State, past_length: Tensor | None = None) -> Tensor:
        """Logits of one block on top of a committed state, which is only read.

        Args:
            ids: [B, L] int64.
            state: Carried tensors by suffix.
            past_length: [B] int64 committed tokens per row, where the model has attention.

        Returns:
            [B, L, vocab_rows] float32.
        """
        logits = self.passes("denoise", ids, state, past_length=past_length).logits
        assert logits is not None
        return logits

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
        lengths = {"past_length": past_length, "commit_length": commit_length}
        return self.passes("commit", ids, state, **lengths).states

    def zero_state(self, rows: int, capacity: int = 0) -> dict[str, Tensor]:
        """The state before the first block: zeros, by suffix; float64 where the weights are."""
        exact = self.dtype == torch.float64
        return {
            port.suffix: torch.zeros(
                port.past.resolve(B=rows, C=capacity),
                dtype=torch.float64 if exact else TORCH_DTYPES[port.past.dtype],
            )
            for port in self.state_spec.ports
        }

    def recompute(self, ids: Tensor) -> Tensor:
        """Logits of the last block of a whole sequence, every block before it clean.

        Args:
            ids: [B, m*L] int64.

        Returns:
            [B, L, vocab_rows] float32.
        """
        rows, clean = ids.shape[0], ids.shape[1] - self.spec.block_len
        state, past = self.zero_state(rows), torch.zeros(rows, dtype=torch.int64)
        length = past + clean
        if clean:
            state |= self.commit(ids[:, :clean], state, past, length)
        return self.denoise(ids[:, clean:], state, length)


class Denoiser(BlockModel):
    """A denoiser with given weights.

    Args:
        spec: The model.
        tensors: Every tensor of the documented own layout (docs/checkpoints.md), float32.
        precision: Dtypes of activations and ports; norms, steps, decays, softmax and scan stay
            float32.
        ops: Plain operators, or traced ones while a graph is made.
        top_k: Tokens that its ``top_k`` head gives.

    Raises:
        ExportError: for a model with parts this denoiser does not compute.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        precision: Precision | None = None,
        ops: BlockOps = PLAIN,
        top_k: int = TOP_K,
    ) -> None:
        super().__init__()
        check_layers(spec)
        self.top_k = top_k
        mixing = [index for index, layer in enumerate(spec.layers) if layer.mixer != "none"]
        self._last_mixing = mixing[-1] if mixing else -1
        self.spec = spec
        self.precision = precision or Precision()
        self.state_spec = StateSpec.of(spec, self.precision)
        self.ops = ops
        self._last_stateful = last_stateful(self.state_spec)
        self._names: dict[str, str] = {}
        io = TORCH_DTYPES[self.precision.io]
        for name, weight in stored(tensors).items():
            self._store(name, weight.make(tensors[weight.source], io))
        self._layers = [self._layer_weights(i) for i in range(len(spec.layers))]
        self.eval().requires_grad_(False)

    def _store(self, name: str, tensor: Tensor) -> None:
        attribute = name.replace(".", "__")
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
            if not is_island(name):
                buffer: Tensor = getattr(self, attribute)
                setattr(other, attribute, buffer.to(TORCH_DTYPES[precision.io]))
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
        """One mixer with its norms and gate: what it adds, and the states it makes, by suffix."""
        layer = self.spec.layers[index]
        name = f"layers.{index}"
        if layer.norm_place != "after":
            x = self._norm(layer.norm, layer.norm_eps, f"{name}.norm", x)
        x = x.to(self.dtype)
        ports = {kind: port.suffix for kind, port in self.state_spec.layer(index).items()}
        states = {kind: state[suffix] for kind, suffix in ports.items() if suffix in state}
        weights = self._group(index, "mixer.")
        y, new = _MIXERS[layer.mixer](layer, weights, x, states, info, self.ops)
        made = {ports[kind]: tensor for kind, tensor in new.items()}
        if y is not None and layer.norm_place != "before":
            y = self._norm(layer.norm, layer.norm_eps, f"{name}.post_norm", y)
        if y is not None and layer.output_gate:
            y = (wide(y) * torch.tanh(self.weight(f"{name}.output_gate"))).to(y.dtype)
        if layer.direction == "reverse" and info.commits and not self.spec.commit_reverse:
            assert y is not None
            # left out, its norm and bias too
            y = torch.where(info.asked(info.clean)[..., None], 0.0, y)
        return y, made

    @property
    def dtype(self) -> torch.dtype:
        """What its activations are computed in."""
        return self.weight("embedding.weight").dtype

    def _embed(self, ids: Tensor, state: State, info: PassInfo) -> Tensor:
        """[B, T, D]; the noisy block also sees what the pass before it predicted."""
        x = torch.nn.functional.embedding(ids, self.weight("embedding.weight"))
        ports = self.state_spec.stepped
        if ports and info.role != "commit":
            soft = state[ports[0].suffix]
            seen = rms_norm(soft, self.weight("self_conditioning.norm.weight"), self.spec.norm_eps)
            seen = seen.to(self.dtype)
            gate, up, down = (
                self.weight(f"self_conditioning.{name}_proj.weight")
                for name in ("gate", "up", "down")
            )
            seen = linear(ACTIVATIONS["silu"](linear(seen, gate)) * linear(seen, up), down)
            if info.role == "commit_denoise":
                length = self.spec.block_len
                seen = torch.where(info.clean[:, -length:, None], 0.0, seen)
                x = torch.cat([x[:, :-length], x[:, -length:] + seen], 1)
            else:
                x = x + seen
        return wide(x) if self.spec.residual_fp32 else x

    def _soft_embedding(self, logits: Tensor) -> dict[str, Tensor]:
        """What the next pass of this block sees: softmax(logits) E, by suffix."""
        mixture = torch.softmax(logits, -1).to(self.dtype) @ self.weight("embedding.weight")
        return {port.suffix: wide(mixture) for port in self.state_spec.stepped}

    def _run(self, ids: Tensor, state: State, info: PassInfo) -> tuple[Tensor, dict[str, Tensor]]:
        """All layers: last hidden values [B, T, D] and the states made.

        Behind the last mixer a token depends on no other: where slots were asked for, its output
        and everything after it is made for those alone, [B, R, D].
        """
        spec = self.spec
        x = self._embed(ids, state, info)
        made: dict[str, Tensor] = {}
        ends = info.role == "commit" and not spec.logit_shift
        narrow = self._narrows(info)
        if narrow and self._last_mixing < 0:
            info = info.narrowed()
            x = info.asked(x)
        for index, layer in enumerate(spec.layers):
            if layer.mixer != "none":
                if narrow and index == self._last_mixing:
                    info = info.narrowed()
                y, new = self._mixer(index, x, state, info)
                made |= new
                if y is None or (ends and index == self._last_stateful):
                    break  # nothing after it is carried
                x = info.asked(x) + y
            if layer.mlp != "none":
                name = f"layers.{index}.mlp_norm"
                normed = self._norm(layer.norm, layer.norm_eps, name, x)
                x = x + self._mlp(layer, index, normed.to(self.dtype))
        return x, made

    def _narrows(self, info: PassInfo) -> bool:
        """Whether the pass ends with the tokens asked for; self-conditioning needs every slot."""
        return info.open_slots is not None and not self.state_spec.stepped

    def _logits(self, x: Tensor) -> Tensor:
        """[..., vocab_rows] float32."""
        spec = self.spec
        normed = self._norm(spec.norm, spec.norm_eps, "norm", x).to(self.dtype)
        if spec.tied_embeddings:
            logits = torch.nn.functional.linear(normed, self.weight("embedding.weight"))
        else:
            logits = linear(normed, self.weight("head.weight"))
        logits = wide(logits)
        if spec.head_bias:
            logits = logits + self.weight("head.bias")
        if spec.logit_softcap:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def _denoised(self, x: Tensor, info: PassInfo) -> Tensor:
        """The tokens that a pass gives logits of: its last block, or the open slots of that."""
        if info.role == "full":
            return x
        asked = info.open_slots
        if asked is not None and self._narrows(info):
            return x[:, : asked.shape[1]] if info.asks_last else x
        return x[:, -self.spec.block_len :] if info.commits else x

    def _last_logits(self, x: Tensor, info: PassInfo) -> Tensor:
        """Logits of token commit_length - 1 of each row [B, vocab_rows]; zeros where that is 0."""
        length = info.commit_length
        assert length is not None
        if self._narrows(info):
            last = x[:, -1]
        else:
            place = (length - 1).clamp(min=0)
            last = x.gather(1, place[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]
        return torch.where((length > 0)[:, None], self._logits(last), 0.0)

    def passes(self, role: str, ids: Tensor, state: State, **lengths: Tensor | None) -> Passed:
        """One pass of any role; see :meth:`denoise`, :meth:`commit`, :meth:`commit_denoise`.

        The roles of reduced heads take ``open_slots`` [B, R] int64 beside the lengths.
        """
        role, head = split_role(role)
        info = PassInfo(self.spec, role, ids.shape[1], **lengths)
        x, made = self._run(ids, state, info)
        out = Passed(made)
        if role != "commit":
            logits = self._logits(self._denoised(x, info))
            out.states |= self._soft_embedding(logits) if self.state_spec.stepped else {}
            if head == "logits":
                out.logits = logits
            else:
                assert info.open_slots is not None
                of_slots = logits if self._narrows(info) else tokens_at(logits, info.open_slots)
                out.reduced = head_values(head, of_slots, self.spec, self.top_k)
        if info.commits and self.spec.logit_shift:
            out.last_logits = self._last_logits(x, info)
        return out

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
        lengths = {"past_length": past_length, "commit_length": commit_length}
        passed = self.passes("commit_denoise", ids, state, **lengths)
        assert passed.logits is not None
        return passed.states, passed.logits

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

    def __init__(self, denoiser: BlockModel, role: str) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.role = role
        self.inputs, self.outputs = denoiser.ports(role)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take the input ports in order, give the output ports in order."""
        given = dict(zip((port.name for port in self.inputs), tensors, strict=True))
        ids = given[self.inputs[0].name]
        denoiser = self.denoiser
        ports = denoiser.state_spec.ports
        state = {port.suffix: given[port.past.name] for port in ports if port.past.name in given}
        names = ("past_length", "commit_length", "open_slots")
        lengths = {name: given[name] for name in names if name in given}
        if self.role.startswith("commit"):
            if "commit_length" not in lengths:
                lengths["commit_length"] = torch.full((ids.shape[0],), ids.shape[1])
            if "past_length" not in lengths:
                lengths["past_length"] = ids.new_zeros(ids.shape[0])
        passed = denoiser.passes(self.role, ids, state, **lengths)
        made = {port.present.name: passed.states.get(port.suffix) for port in ports}
        made |= {"logits": passed.logits, "last_logits": passed.last_logits, **passed.reduced}
        made["hidden_out"] = passed.hidden
        results = [made[port.name] for port in self.outputs]
        assert all(result is not None for result in results)
        return tuple(results)  # type: ignore[arg-type]
