"""A denoiser as plain float64 numpy loops over one row: the judge of the torch reference (F9).

No cache, no chunks, no batch: a whole sequence at once, whose last block may be the frontier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fixedstate.plugins import reference
from fixedstate.ports import Array
from fixedstate.spec import AttentionSizes, LayerSpec, LinearAttentionSizes, ModelSpec

Weights = Mapping[str, Array]
Rotated = AttentionSizes | LinearAttentionSizes
Direction = Callable[[LayerSpec, Weights, Array, Array, Array], tuple[Array, Array, Array]]
"""``(layer, weights, x, conv, ssm) -> (y, conv, ssm)``: one Mamba pass over one row."""


def rotary_frequency(s: Rotated, pair: int) -> float:
    """Radians per position of one rotated pair, by the definitions of the scalings."""
    plain = s.rope_theta ** (-2 * pair / s.rotary_dim)
    scaling = s.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        longest = scaling.original_length / scaling.low_freq_factor
        shortest = scaling.original_length / scaling.high_freq_factor
        if wavelength > longest:
            return plain / scaling.factor
        if wavelength < shortest:
            return plain
        smooth = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * plain / scaling.factor + smooth * plain

    def pair_that_turns(count: float) -> float:
        """theta^(2 pair / d) = length / (2 pi count), solved for the pair."""
        return (
            s.rotary_dim
            * math.log(scaling.original_length / (2 * math.pi * count))
            / (2 * math.log(s.rope_theta))
        )

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), s.rotary_dim - 1)
    ramp = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def turned(x: Array, positions: Array, s: Rotated) -> Array:
    """[S, heads, head_dim] rotated at one position each."""
    half, out = s.rotary_dim // 2, x.copy()
    grows = s.rope_scaling.attention_factor if getattr(s.rope_scaling, "kind", "") == "yarn" else 1
    for j in range(half):
        angle = (positions * rotary_frequency(s, j))[:, None]
        a, b = x[:, :, j], x[:, :, j + half]
        out[:, :, j] = grows * (a * np.cos(angle) - b * np.sin(angle))
        out[:, :, j + half] = grows * (b * np.cos(angle) + a * np.sin(angle))
    return out


def held(kept: Array, s: AttentionSizes) -> Array:
    """What the port of a layer holds of [T, kv_heads, head_dim] committed tokens.

    A windowed port from its reset: sinks, then the last W tokens, newest last, zeros before them.
    """
    if s.window is None:
        return kept.transpose(1, 0, 2)
    port = np.zeros((s.sinks + s.window, *kept.shape[1:]))
    port[: min(s.sinks, len(kept))] = kept[: s.sinks]
    last = kept[-s.window :]
    port[len(port) - len(last) :] = last
    return port.transpose(1, 0, 2)


def _gelu(x: Array) -> Array:
    """x times the normal distribution's share below x."""
    return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


def _gelu_tanh(x: Array) -> Array:
    """The approximation by tanh (arXiv 1606.08415)."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": reference.silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def feature_map(name: str, x: Array) -> Array:
    """phi of linear attention."""
    if name == "elu":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    return np.maximum(x, 0) if name == "relu" else x


class ReferenceModel:
    """Logits and states of one row by loops.

    Args:
        spec: The model.
        tensors: Own checkpoint layout, any float dtype.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, object]) -> None:
        self.spec = spec
        self.w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def run(
        self, ids: Array, clean: int, soft: Array | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """All logits [T, V] and the states after ``clean`` tokens, by suffix.

        Tokens before ``clean`` are committed ones, the others belong to the frontier block;
        ``soft`` [L, D] is what that block's pass before this one predicted.
        """
        spec, w = self.spec, self.w
        x = w["embedding.weight"][np.asarray(ids)]
        if soft is not None:
            part = self._weights_under("self_conditioning.")
            seen = self._norm("rms", "self_conditioning.norm", soft, spec.norm_eps)
            gate = reference.silu(self._linear(part, "gate_proj", seen))
            seen = self._linear(part, "down_proj", gate * self._linear(part, "up_proj", seen))
            x = np.concatenate([x[:clean], x[clean:] + seen])
        states: dict[str, Array] = {}
        for i, layer in enumerate(spec.layers):
            if layer.mixer != "none":
                x = x + self._mixer(i, layer, x, clean, states)
            if layer.mlp != "none":
                normed = self._norm(layer.norm, f"layers.{i}.mlp_norm", x, layer.norm_eps)
                x = x + self._mlp(layer, self._part(i, "mlp."), normed)
        x = self._norm(spec.norm, "norm", x, spec.norm_eps)
        head = w["embedding.weight"] if spec.tied_embeddings else w["head.weight"]
        logits = x @ head.T + w.get("head.bias", 0.0)
        if spec.logit_softcap:
            logits = spec.logit_softcap * np.tanh(logits / spec.logit_softcap)
        return np.asarray(logits), states

    def soft_embedding(self, logits: Array) -> Array:
        """softmax(logits) E of one block [L, D]."""
        share = np.exp(logits - logits.max(-1, keepdims=True))
        mixture = share / share.sum(-1, keepdims=True) @ self.w["embedding.weight"]
        return np.asarray(mixture)

    def _mixer(
        self, i: int, layer: LayerSpec, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        """What a mixer adds, norms and gate included."""
        if layer.norm_place != "after":
            x = self._norm(layer.norm, f"layers.{i}.norm", x, layer.norm_eps)
        mixer = getattr(self, f"_{layer.mixer}")
        y = mixer(i, layer, self._part(i, "mixer."), x, clean, states)
        if layer.norm_place != "before":
            y = self._norm(layer.norm, f"layers.{i}.post_norm", y, layer.norm_eps)
        if layer.output_gate:
            y = y * np.tanh(self.w[f"layers.{i}.output_gate"])
        if layer.direction == "reverse" and not self.spec.commit_reverse:
            y[:clean] = 0
        return np.asarray(y)

    def _part(self, index: int, prefix: str) -> dict[str, Array]:
        return self._weights_under(f"layers.{index}.{prefix}")

    def _weights_under(self, start: str) -> dict[str, Array]:
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
        act = ACTIVATIONS[layer.mlp_activation]
        up = self._linear(w, "up_proj", x)
        if layer.mlp == "gated":
            up = act(self._linear(w, "gate_proj", x)) * up
        else:
            up = act(up)
        return self._linear(w, "down_proj", up)

    def _sees(self, layer: LayerSpec, query: int, key: int, clean: int) -> bool:
        length = self.spec.block_len
        if self.spec.objective == "full":
            return layer.direction == "block" or key <= query
        noisy = query >= clean
        if not noisy and key >= clean:
            return False
        near = True
        if layer.mixer == "attention" and layer.attention.window is not None:
            near = query - key <= layer.attention.window or key < layer.attention.sinks
        if layer.direction == "forward" or (not noisy and self.spec.commit_mask == "causal"):
            return key <= query and near
        return key // length == query // length or (key // length < query // length and near)

    def _heads(
        self, layer: LayerSpec, w: Weights, x: Array, name: str, heads: int, width: int
    ) -> Array:
        """[T, heads, width], normed where the layer norms it."""
        y = self._linear(w, f"{name}_proj", x).reshape(len(x), heads, width)
        if f"{name}_norm.weight" in w:
            mean = (y**2).mean(-1, keepdims=True)
            y = y / np.sqrt(mean + layer.norm_eps) * w[f"{name}_norm.weight"]
        return np.asarray(y)

    def _softmax(self, scores: Array, values: Array) -> Array:
        share = np.exp(scores - scores.max())
        return np.asarray(share / share.sum() @ values)

    def _attention(
        self, i: int, layer: LayerSpec, w: Weights, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        s = layer.attention
        tokens, length = len(x), self.spec.block_len
        q = self._heads(layer, w, x, "q", s.heads, s.head_dim)
        k = self._heads(layer, w, x, "k", s.kv_heads, s.head_dim)
        v = self._heads(layer, w, x, "v", s.kv_heads, s.head_dim)
        kept = turned(k, np.arange(tokens), s) if s.keys_rotated else k
        if self.spec.objective != "full":
            states[f"key_{i:03d}"] = held(kept[:clean], s)
            states[f"value_{i:03d}"] = held(v[:clean], s)
        scale = s.head_dim**-0.5 if s.scale is None else s.scale
        y = np.zeros((tokens, s.heads, s.head_dim))
        for t in range(tokens):
            seen = [u for u in range(tokens) if self._sees(layer, t, u, clean)]
            left_out = 0  # tokens between sinks and window that take no room
            if s.window is not None and not s.keys_rotated:
                left_out = max(t // length * length - s.sinks - s.window, 0)
            places = np.array([u if u < s.sinks else u - left_out for u in seen])
            query = turned(q[t][None], np.array([t - left_out]), s)[0]
            keys = turned(k[seen], places, s)
            for h in range(s.heads):
                g = h // (s.heads // s.kv_heads)
                score = keys[:, g] @ query[h] * scale
                if s.score_softcap:
                    score = s.score_softcap * np.tanh(score / s.score_softcap)
                y[t, h] = self._softmax(score, v[seen, g])
        return self._linear(w, "o_proj", y.reshape(tokens, s.heads * s.head_dim))

    def _linear_attention(
        self, i: int, layer: LayerSpec, w: Weights, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        s, length = layer.linear_attention, self.spec.block_len
        tokens = len(x)
        q = self._heads(layer, w, x, "q", s.heads, s.head_dim)
        k = self._heads(layer, w, x, "k", s.kv_heads, s.head_dim)
        v = self._heads(layer, w, x, "v", s.kv_heads, s.head_dim)
        state = np.zeros((s.kv_heads, s.head_dim, s.head_dim))
        norm = np.zeros((s.kv_heads, s.head_dim))
        y = np.zeros((tokens, s.heads, s.head_dim))
        for start in range(0, tokens, length):
            block = range(start, min(start + length, tokens))
            for t in block:
                seen = [u for u in block if self._sees(layer, t, u, clean)]
                query = turned(q[t][None], np.array([t - start]), s)[0]
                keys = turned(k[seen], np.array(seen) - start, s)
                for h in range(s.heads):
                    g = h // (s.heads // s.kv_heads)
                    y[t, h] = self._softmax(keys[:, g] @ query[h] * s.head_dim**-0.5, v[seen, g])
                    features = feature_map(s.feature_map, q[t, h])
                    read = features @ state[g]
                    if s.normalised:
                        read = read / (features @ norm[g] + 1e-6)
                    y[t, h] += w["state_gate"][h] * read
            for u in block:
                if u < clean:
                    for g in range(s.kv_heads):
                        features = feature_map(s.feature_map, k[u, g])
                        state[g] += np.outer(features, v[u, g])
                        norm[g] += features
        states[f"ssm_state_{i:03d}"] = state
        if s.normalised:
            states[f"norm_state_{i:03d}"] = norm
        return self._linear(w, "o_proj", y.reshape(tokens, s.heads * s.head_dim))

    def _mamba1(
        self, i: int, layer: LayerSpec, w: Weights, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        s = layer.mamba1
        zero = np.zeros((1, s.d_state, s.d_inner))
        return self._directions(i, layer, w, x, clean, states, zero, self._direction1)

    def _mamba2(
        self, i: int, layer: LayerSpec, w: Weights, x: Array, clean: int, states: dict[str, Array]
    ) -> Array:
        s = layer.mamba2
        zero = np.zeros((1, s.heads, s.d_state, s.head_dim))
        return self._directions(i, layer, w, x, clean, states, zero, self._direction2)

    def _directions(
        self,
        i: int,
        layer: LayerSpec,
        w: Weights,
        x: Array,
        clean: int,
        states: dict[str, Array],
        ssm: Array,
        direction: Direction,
    ) -> Array:
        s, length = layer.sizes, self.spec.block_len
        if full := self.spec.objective == "full":
            clean = length = len(x)
        own = {k.removeprefix("reverse."): v for k, v in w.items() if k.startswith("reverse.")}
        out = np.zeros_like(x)
        zero = np.zeros((1, s.conv_dim, s.d_conv - 1)), ssm
        if layer.direction != "reverse":
            y, *after = direction(layer, w, x[:clean], *zero)
            noisy, *_ = direction(layer, w, x[clean:], *after)
            out += np.concatenate([y, noisy])
            if not full:
                states[f"ssm_state_{i:03d}"] = after[1][0]
                if s.d_conv > 1:
                    states[f"conv_state_{i:03d}"] = after[0][0]
        if layer.direction != "forward":
            rev = {**w, **own}
            for start in range(0, len(x), length):
                if start < clean and not (self.spec.commit_reverse or full):
                    continue
                block = x[start : start + length][::-1]
                y, *_ = direction(layer, rev, block, *zero)
                out[start : start + length] += y[::-1]
        return out

    def _direction1(
        self, layer: LayerSpec, w: Weights, x: Array, conv: Array, ssm: Array
    ) -> tuple[Array, Array, Array]:
        s = layer.mamba1
        raw, z = np.split(self._linear(w, "in_proj", x)[None], 2, -1)
        taps = w["conv1d.weight"].reshape(s.conv_dim, s.d_conv)
        bias = w.get("conv1d.bias", np.zeros(s.conv_dim))
        mixed, conv = reference.causal_conv(raw, taps, bias, conv)
        low, b, c = np.split(
            self._linear(w, "x_proj", mixed), [s.dt_rank, s.dt_rank + s.d_state], -1
        )
        step = reference.softplus(self._linear(w, "dt_proj", low))
        a = -np.exp(w["A_log"]).T
        y, ssm = reference.selective_scan(mixed, step, a, b, c, w["D"], ssm)
        return self._linear(w, "out_proj", (y * reference.silu(z))[0]), conv, ssm

    def _direction2(
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
