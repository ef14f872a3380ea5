"""A denoiser as plain float64 numpy loops over one row: the judge of the torch reference (F9).

No cache, no chunks, no batch: a whole sequence at once, whose last block may be the frontier.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fixedstate.plugins import reference
from fixedstate.ports import Array
from fixedstate.spec import LayerSpec, ModelSpec

Weights = Mapping[str, Array]


class ReferenceModel:
    """Logits and states of one row by loops.

    Args:
        spec: The model.
        tensors: Own checkpoint layout, any float dtype.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, object]) -> None:
        self.spec = spec
        self.w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def run(self, ids: Array, clean: int) -> tuple[Array, dict[str, Array]]:
        """All logits [T, V] and the states after ``clean`` tokens, by suffix.

        Tokens before ``clean`` are committed ones, the others belong to the frontier block.
        """
        spec, w = self.spec, self.w
        x = w["embedding.weight"][np.asarray(ids)]
        states: dict[str, Array] = {}
        for i, layer in enumerate(spec.layers):
            if layer.mixer != "none":
                normed = self._norm(layer.norm, f"layers.{i}.norm", x, layer.norm_eps)
                part = self._part(i, "mixer.")
                mixer = self._attention if layer.mixer == "attention" else self._mamba2
                x = x + mixer(i, layer, part, normed, clean, states)
            if layer.mlp != "none":
                normed = self._norm(layer.norm, f"layers.{i}.mlp_norm", x, layer.norm_eps)
                x = x + self._mlp(layer, self._part(i, "mlp."), normed)
        x = self._norm(spec.norm, "norm", x, spec.norm_eps)
        head = w["embedding.weight"] if spec.tied_embeddings else w["head.weight"]
        return x @ head.T, states

    def _part(self, index: int, prefix: str) -> dict[str, Array]:
        start = f"layers.{index}.{prefix}"
        return {k.removeprefix(start): v for k, v in self.w.items() if k.startswith(start)}

    def _norm(self, kind: str, name: str, x: Array, eps: float) -> Array:
        weight = self.w[f"{name}.weight"]
        if kind == "layer":
            centred = x - x.mean(-1, keepdims=True)
            scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
            return np.asarray(scaled * weight + self.w[f"{name}.bias"])
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)

    def _linear(self, w: Weights, name: str, x: Array) -> Array:
        y = x @ w[f"{name}.weight"].T
        return np.asarray(y + w.get(f"{name}.bias", 0.0))

    def _mlp(self, layer: LayerSpec, w: Weights, x: Array) -> Array:
        assert layer.mlp_activation == "silu"
        up = self._linear(w, "up_proj", x)
        if layer.mlp == "gated":
            up = reference.silu(self._linear(w, "gate_proj", x)) * up
        else:
            up = reference.silu(up)
        return self._linear(w, "down_proj", up)

    def _sees(self, layer: LayerSpec, query: int, key: int, clean: int) -> bool:
        length = self.spec.block_len
        noisy = query >= clean
        if not noisy and key >= clean:
            return False
        if layer.direction == "forward" or (not noisy and self.spec.commit_mask == "causal"):
            return key <= query
        return key // length <= query // length

    def _attention(
        self, i: int, layer: LayerSpec, w: Weights, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        s = layer.attention
        tokens = len(x)
        q = self._linear(w, "q_proj", x).reshape(tokens, s.heads, s.head_dim)
        k = self._linear(w, "k_proj", x).reshape(tokens, s.kv_heads, s.head_dim)
        v = self._linear(w, "v_proj", x).reshape(tokens, s.kv_heads, s.head_dim)
        if s.qk_norm:
            q = q / np.sqrt((q**2).mean(-1, keepdims=True) + layer.norm_eps) * w["q_norm.weight"]
            k = k / np.sqrt((k**2).mean(-1, keepdims=True) + layer.norm_eps) * w["k_norm.weight"]
        half = s.rotary_dim // 2
        for t in range(tokens):
            for j in range(half):
                angle = t / s.rope_theta ** (2 * j / s.rotary_dim)
                for v_ in (q, k):
                    a, b = v_[t, :, j].copy(), v_[t, :, j + half].copy()
                    v_[t, :, j] = a * np.cos(angle) - b * np.sin(angle)
                    v_[t, :, j + half] = b * np.cos(angle) + a * np.sin(angle)
        states[f"key_{i:03d}"] = k[:clean].transpose(1, 0, 2)
        states[f"value_{i:03d}"] = v[:clean].transpose(1, 0, 2)
        y = np.zeros((tokens, s.heads, s.head_dim))
        for t in range(tokens):
            seen = [u for u in range(tokens) if self._sees(layer, t, u, clean)]
            for h in range(s.heads):
                g = h // (s.heads // s.kv_heads)
                score = k[seen, g] @ q[t, h] * s.head_dim**-0.5
                share = np.exp(score - score.max())
                y[t, h] = share / share.sum() @ v[seen, g]
        return self._linear(w, "o_proj", y.reshape(tokens, s.heads * s.head_dim))

    def _mamba2(
        self, i: int, layer: LayerSpec, w: Weights, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        s, length = layer.mamba2, self.spec.block_len
        own = {k.removeprefix("reverse."): v for k, v in w.items() if k.startswith("reverse.")}
        out = np.zeros_like(x)
        if layer.direction != "reverse":
            conv = np.zeros((1, s.conv_dim, s.d_conv - 1))
            ssm = np.zeros((1, s.heads, s.d_state, s.head_dim))
            y, conv, ssm = self._direction(layer, w, x[:clean], conv, ssm)
            noisy, _, _ = self._direction(layer, w, x[clean:], conv, ssm)
            out += np.concatenate([y, noisy])
            states[f"ssm_state_{i:03d}"] = ssm[0]
            if s.d_conv > 1:
                states[f"conv_state_{i:03d}"] = conv[0]
        if layer.direction != "forward":
            rev = {**w, **own}
            for start in range(0, len(x), length):
                if start < clean and not self.spec.commit_reverse:
                    continue
                block = x[start : start + length][::-1]
                conv = np.zeros((1, s.conv_dim, s.d_conv - 1))
                ssm = np.zeros((1, s.heads, s.d_state, s.head_dim))
                y, _, _ = self._direction(layer, rev, block, conv, ssm)
                out[start : start + length] += y[::-1]
        return out

    def _direction(
        self, layer: LayerSpec, w: Weights, x: Array, conv: Array, ssm: Array
    ) -> tuple[Array, Array, Array]:
        s = layer.mamba2
        p = self._linear(w, "in_proj", x)[None]
        z, raw, dt = np.split(p, [s.d_inner, s.d_inner + s.conv_dim], -1)
        taps = w["conv1d.weight"].reshape(s.conv_dim, s.d_conv)
        bias = w.get("conv1d.bias", np.zeros(s.conv_dim))
        mixed, conv = reference.causal_conv(raw, taps, bias, conv)
        wide = s.groups * s.d_state
        xs, b, c = np.split(mixed, [s.d_inner, s.d_inner + wide], -1)
        t = x.shape[0]
        step = reference.softplus(dt + w["dt_bias"])
        step = np.clip(step, s.dt_min, np.inf if s.dt_max is None else s.dt_max)
        d = w["D"].reshape(s.heads, s.head_dim) if s.d_has_hdim else w["D"]
        y, ssm = reference.ssd(
            xs.reshape(1, t, s.heads, s.head_dim),
            step,
            -np.exp(w["A_log"]),
            b.reshape(1, t, s.groups, s.d_state),
            c.reshape(1, t, s.groups, s.d_state),
            d,
            ssm,
        )
        y = y.reshape(1, t, s.d_inner)
        gate = reference.silu(z)

        def norm(v: Array) -> Array:
            parts = v.reshape(1, t, s.groups, s.d_inner // s.groups)
            parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + s.norm_eps)
            return np.asarray(parts.reshape(v.shape) * w["norm.weight"])

        if s.gated_norm == "after":
            y = norm(y * gate)
        elif s.gated_norm == "before":
            y = norm(y) * gate
        else:
            y = y * gate
        return self._linear(w, "out_proj", y[0]), conv, ssm
