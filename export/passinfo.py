"""What one pass is: its role, lengths, positions and masks, computed once for all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fixedstate.export.layers import rotary_angles
from fixedstate.spec import ModelSpec


class PassInfo:
    """Lengths, positions and masks of one pass; masks are made once and shared by the layers.

    Args:
        spec: The model.
        role: ``denoise``, ``commit``, ``commit_denoise`` or ``full``.
        tokens: T, new tokens per row.
        past_length: [B] int64 committed tokens per row, where a layer needs them.
        commit_length: [B] int64 clean tokens per row among the T, for the commit roles.
    """

    def __init__(
        self,
        spec: ModelSpec,
        role: str,
        tokens: int,
        past_length: Tensor | None = None,
        commit_length: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.role = role
        self.tokens = tokens
        self.past_length = past_length
        self.commit_length = commit_length
        self._tensors: dict[object, Tensor] = {}
        self._angles: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}

    def _once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]

    @property
    def commits(self) -> bool:
        """Whether the pass gives new states."""
        return self.role.startswith("commit")

    @property
    def steps(self) -> Tensor:
        """[T] 0, 1, 2, ... int64."""
        return self._once("steps", lambda: torch.arange(self.tokens))

    @property
    def clean(self) -> Tensor:
        """[B, T] bool: the tokens that are committed."""
        assert self.commit_length is not None
        length = self.commit_length
        return self._once("clean", lambda: self.steps < length[:, None])

    def keep(self, new: Tensor, past: Tensor) -> Tensor:
        """``new`` for rows that commit anything, the very bytes of ``past`` for the others."""
        assert self.commit_length is not None
        some = (self.commit_length > 0).reshape(-1, *(1,) * (new.ndim - 1))
        return torch.where(some, new, past)

    def rotary(self, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
        """Cosine and sine at the positions of the new tokens."""
        assert self.past_length is not None
        past = self.past_length
        positions = self._once("positions", lambda: past[:, None] + self.steps)
        key = (rotary_dim, theta)
        if key not in self._angles:
            self._angles[key] = rotary_angles(positions, rotary_dim, theta)
        return self._angles[key]

    def cache_mask(self, capacity: int) -> Tensor:
        """[B, 1, 1, C] bool: the cached columns that hold committed tokens."""
        assert self.past_length is not None
        length = self.past_length
        return self._once(
            "cache", lambda: (torch.arange(capacity) < length[:, None])[:, None, None]
        )

    def fresh_mask(self, direction: str) -> Tensor | None:
        """[B or 1, 1, T, T] bool: which new token (last axis) each new token sees.

        None where every new token sees every other: a denoise pass inside one block.
        """
        if self.role == "denoise":
            if direction == "block":
                return None
            return self._once(("fresh", direction), lambda: self._causal()[None, None])
        return self._once(("fresh", direction), lambda: self._commit_mask(direction))

    def _causal(self) -> Tensor:
        return self.steps[None, :] <= self.steps[:, None]

    def _commit_mask(self, direction: str) -> Tensor:
        length = self.spec.block_len
        blocks = self.steps // length
        own_block = blocks[None, :] <= blocks[:, None]
        causal = self._causal()
        whole = direction == "block" and self.spec.commit_mask == "block"
        commit = (own_block if whole else causal)[None] & self.clean[:, None, :]
        if self.role == "commit":
            return commit[:, None]
        noisy = (own_block if direction == "block" else causal)[None]
        clean = self.clean[:, :, None]
        # not torch.where: ONNX Runtime's Where has no kernel for bool
        return ((clean & commit) | (~clean & noisy))[:, None]
