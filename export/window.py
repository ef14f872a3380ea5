"""A cache of constant size: the first tokens of the text (sinks) and the last W before the pass.

The port has sinks + W columns. Sinks stand first and are never moved: column j is token j of the
text. Window column c stands for the token at place c - W, so that the newest is last; a commit
shifts it. Window columns of tokens that do not exist, or that are sinks, are not valid.

Source: attention sinks with positions inside the cache, StreamingLLM (arXiv 2309.17453).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fixedstate.export.passinfo import PassInfo
from fixedstate.spec import AttentionSizes


def held_mask(info: PassInfo, window: int, sinks: int) -> Tensor:
    """[B, 1, 1, T, sinks + W] bool: which columns of the cache each new token sees."""

    def make() -> Tensor:
        column = torch.arange(sinks + window)
        place = column - sinks - window  # of window columns
        past = info.past[:, None]
        valid = past + place >= sinks
        near = info.steps[:, None] - place <= window
        if sinks:
            sink = column < sinks
            valid = (sink & (column < past)) | (~sink & valid)
            near = sink | near
        return (valid[:, None] & near)[:, None, None]

    return info.once(("held", window, sinks), make)


def apart_masks(
    info: PassInfo, direction: str, window: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The masks of sinks, window and new tokens where all sinks stand in the sink columns.

    Returns:
        [B, 1, 1, T, sinks] for the columns of :func:`all_sinks`, [B, 1, 1, T, W], and
        [B, 1, 1, T, T] without the new tokens that are sinks.
    """
    places = info.once(("sink places", sinks), lambda: torch.arange(sinks) - info.past[:, None])
    # a sink beyond this pass has a place behind every block of it, and is not seen
    at_sinks = info.once(
        ("sinks", direction, window, sinks),
        lambda: info.seen(direction, places, window, sinks)[:, None, None],
    )
    fresh = info.once(
        ("fresh apart", direction, window, sinks),
        lambda: (
            info.seen(direction, info.steps[None], window, sinks)
            & (info.positions >= sinks)[:, None]
        )[:, None, None],
    )
    return at_sinks, held_mask(info, window, sinks)[..., sinks:], fresh


def all_sinks(info: PassInfo, both: Tensor, window: int, sinks: int) -> Tensor:
    """The sinks with those of this pass, clean or not: [B, heads, sinks, head_dim].

    Args:
        info: The pass.
        both: [B, heads, sinks + W + T, head_dim] the cache's columns, then the new tokens.
        window: W.
        sinks: Sink columns.
    """
    columns = info.once(
        ("all sinks", window, sinks), lambda: _sink_columns(info, window, sinks, None)
    )
    return _take(both, columns)


def next_columns(info: PassInfo, both: Tensor, window: int, sinks: int) -> Tensor:
    """The cache after this pass: [B, heads, sinks + W, head_dim].

    Columns are only copied, so a row that commits nothing keeps its bytes.

    Args:
        info: A commit pass.
        both: [B, heads, sinks + W + T, head_dim] the cache's columns, then the new tokens.
        window: W.
        sinks: Sink columns.
    """
    length = info.commit_length
    assert length is not None

    def make() -> Tensor:
        moved = sinks + torch.arange(window) + length[:, None]
        if not sinks:
            return moved
        return torch.cat([_sink_columns(info, window, sinks, length), moved], 1)

    return _take(both, info.once(("next", window, sinks), make))


def _sink_columns(info: PassInfo, window: int, sinks: int, length: Tensor | None) -> Tensor:
    """[B, sinks] int64: where each sink stands among the cache's columns and the new tokens."""
    column = torch.arange(sinks)
    place = column - info.past[:, None]
    end = info.tokens if length is None else length[:, None]
    arrives = (place >= 0) & (place < end)
    return torch.where(arrives, sinks + window + place, column)


def _take(both: Tensor, columns: Tensor) -> Tensor:
    shape = (-1, both.shape[1], -1, both.shape[3])
    return both.gather(2, columns[:, None, :, None].expand(shape))


# --- positions inside the cache ------------------------------------------------------------------


def left_out(info: PassInfo, sizes: AttentionSizes) -> Tensor:
    """[B, 1] tokens that lie between sinks and window at the first block of the pass."""
    return info.once(("left out", *room(sizes)), lambda: _beyond(info.past[:, None], sizes))


def left_out_at_block(info: PassInfo, sizes: AttentionSizes) -> Tensor:
    """[B, T] the same at each new token's own block."""
    return info.once(
        ("left out at block", *room(sizes)),
        lambda: _beyond(info.past[:, None] + info.starts, sizes),
    )


def column_positions(info: PassInfo, sizes: AttentionSizes) -> Tensor:
    """[B, sinks + W] positions of the cache's columns, those left out taking no room."""
    window, sinks = room(sizes)

    def make() -> Tensor:
        begins = info.past[:, None] - left_out(info, sizes) - window
        window_columns = begins + torch.arange(window)
        if not sinks:
            return window_columns
        first = torch.arange(sinks)[None].expand(window_columns.shape[0], -1)
        return torch.cat([first, window_columns], 1)

    return info.once(("columns", window, sinks), make)


def room(sizes: AttentionSizes) -> tuple[int, int]:
    """W and the sinks of a layer that has a window."""
    assert sizes.window is not None
    return sizes.window, sizes.sinks


def _beyond(tokens: Tensor, sizes: AttentionSizes) -> Tensor:
    return (tokens - sum(room(sizes))).clamp(min=0)
