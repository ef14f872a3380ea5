"""What one pass is: its role, lengths, positions and masks, computed once for all layers.

Places are counted from the first new token of the pass: 0 is that token, cached tokens have
negative places. A token's position in the text is its place plus ``past_length``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from fixedstate.export.layers import rotary_angles
from fixedstate.spec import AttentionSizes, LinearAttentionSizes, ModelSpec


class PassInfo:
    """Lengths, positions and masks of one pass; masks are made once and shared by the layers.

    Args:
        spec: The model.
        role: ``denoise``, ``commit``, ``commit_denoise`` or ``full``.
        tokens: T, new tokens per row.
        past_length: [B] int64 committed tokens per row, where a layer needs them.
        commit_length: [B] int64 clean tokens per row among the T, for the commit roles.
        open_slots: [B, R] int64 slots of the last block that are asked for; None for every token.
    """

    def __init__(
        self,
        spec: ModelSpec,
        role: str,
        tokens: int,
        past_length: Tensor | None = None,
        commit_length: Tensor | None = None,
        open_slots: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.role = role
        self.tokens = tokens
        self.past_length = past_length
        self.commit_length = commit_length
        self.open_slots = open_slots
        self.narrow = False
        self._tensors: dict[object, Tensor] = {}
        self._angles: dict[object, tuple[Tensor, Tensor]] = {}

    def once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives, made at the first call with that key."""
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]

    @property
    def commits(self) -> bool:
        """Whether the pass gives new states."""
        return self.role.startswith("commit")

    @property
    def past(self) -> Tensor:
        """[B] committed tokens per row."""
        assert self.past_length is not None
        return self.past_length

    @property
    def steps(self) -> Tensor:
        """[T] 0, 1, 2, ... int64: the places of the new tokens."""
        return self.once("steps", lambda: torch.arange(self.tokens))

    @property
    def starts(self) -> Tensor:
        """[T] int64: the place at which each new token's block begins."""
        length = self.spec.block_len
        return self.once("starts", lambda: self.steps // length * length)

    @property
    def clean(self) -> Tensor:
        """[B, T] bool: the tokens that are committed."""
        assert self.commit_length is not None
        length = self.commit_length
        return self.once("clean", lambda: self.steps < length[:, None])

    def keep(self, new: Tensor, past: Tensor) -> Tensor:
        """``new`` for rows that commit anything, the very bytes of ``past`` for the others."""
        assert self.commit_length is not None
        some = (self.commit_length > 0).reshape(-1, *(1,) * (new.ndim - 1))
        return torch.where(some, new, past)

    # --- tokens that are asked for

    def narrowed(self) -> PassInfo:
        """This pass for a layer whose output is needed at the tokens asked for, and nowhere else.

        They are the open slots and, where a commit gives ``last_logits``, the last clean token of
        each row behind them.
        """
        other = copy.copy(self)
        other.narrow = True
        return other

    @property
    def asks_last(self) -> bool:
        """Whether the last clean token of each row is asked for behind the open slots."""
        return self.commits and self.spec.logit_shift

    @property
    def places(self) -> Tensor:
        """[B, R] or [B, R + 1] int64 places of the tokens asked for."""
        assert self.open_slots is not None
        slots = self.open_slots + (self.tokens - self.spec.block_len)
        if not self.asks_last:
            return slots
        assert self.commit_length is not None
        last = (self.commit_length - 1).clamp(min=0)
        return torch.cat([slots, last[:, None]], 1)

    def asked(self, x: Tensor) -> Tensor:
        """Of [B or 1, T, ...] what belongs to the tokens asked for; all in a pass not narrowed."""
        return tokens_at(x, self.once("places", lambda: self.places)) if self.narrow else x

    # --- positions

    @property
    def positions(self) -> Tensor:
        """[B, T] positions of the new tokens in the text; [1, T] in a full pass."""
        if self.role == "full":
            return self.steps[None]
        return self.once("positions", lambda: self.past[:, None] + self.steps)

    def angles(
        self, sizes: AttentionSizes | LinearAttentionSizes, name: object, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine at positions [B or 1, S], shared by layers that rotate alike.

        Args:
            sizes: Whose frequencies.
            name: Stands for the positions: the same name, the same positions.
            positions: int64.
        """
        scheme = (sizes.rotary_dim, sizes.rope_theta, sizes.rope_scaling)
        if (name, scheme) not in self._angles:
            self._angles[name, scheme] = rotary_angles(positions, *scheme)
        return self._angles[name, scheme]

    # --- masks

    def cache_mask(self, capacity: int) -> Tensor:
        """[B, 1, 1, C] bool: the cached columns that hold committed tokens."""
        return self.once(
            "cache", lambda: (torch.arange(capacity) < self.past[:, None])[:, None, None]
        )

    def fresh_mask(
        self, direction: str, window: int | None = None, sinks: int = 0
    ) -> Tensor | None:
        """[B or 1, 1, 1, T, T] bool: which new token (last axis) each new token sees.

        None where every new token sees every other: a block, or a whole text, at once.
        """
        if direction == "block" and not self.commits:
            return None
        return self.once(
            ("fresh", direction, window, sinks),
            lambda: self.seen(direction, self.steps[None], window, sinks)[:, None, None],
        )

    def seen(
        self, direction: str, keys: Tensor, window: int | None = None, sinks: int = 0
    ) -> Tensor:
        """[B or 1, T, S] bool: which keys each new token sees.

        Inside a block that is seen as a whole the window does not count; a clean token sees
        clean tokens only.

        Args:
            direction: ``block`` or ``forward``.
            keys: [B or 1, S] int64 places of the keys.
            window: Tokens before itself that a token sees; None for all.
            sinks: First tokens of the text that are seen from everywhere.
        """
        query, key = self.steps[:, None], keys[:, None, :]
        start = self.starts[:, None]
        causal, whole = key <= query, key < start + self.spec.block_len
        if window is not None:
            near = query - key <= window
            if sinks:
                near = near | (key + self.past[:, None, None] < sinks)
            causal, whole = causal & near, whole & (near | (key >= start))
        noisy = whole if direction == "block" else causal
        if not self.commits:
            return noisy
        assert self.commit_length is not None
        together = direction == "block" and self.spec.commit_mask == "block"
        commit = (whole if together else causal) & (key < self.commit_length[:, None, None])
        if self.role == "commit":
            return commit
        clean = self.clean[:, :, None]
        # not torch.where: ONNX Runtime's Where has no kernel for bool
        return (clean & commit) | (~clean & noisy)


def tokens_at(x: Tensor, places: Tensor) -> Tensor:
    """Of [B or 1, T, ...] the tokens at places [B, R]: [B, R, ...]."""
    rows, rest = places.shape[0], x.shape[2:]
    flat = (places + torch.arange(rows)[:, None] * x.shape[1]).reshape(-1)
    tokens = x.expand(rows, *x.shape[1:]).reshape(-1, *rest)
    return tokens.index_select(0, flat).reshape(rows, -1, *rest)
