"""A live view of the slots of a block being filled, drawn on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from fixedstate.cli.output import console

if TYPE_CHECKING:
    from fixedstate.runtime import BlockEvent, PassEvent
    from fixedstate.spec import ModelSpec

_OPEN = "░"
_TAIL = 400  # characters of finished text shown per row


class CanvasView:
    """Finished text, then the current block slot by slot: open, filled, filled just now.

    Args:
        spec: The model; its mask id marks the open slots.
        decode: Text of some ids.
        prompts: Prompt ids of every request.
    """

    def __init__(
        self, spec: ModelSpec, decode: Callable[[Sequence[int]], str], prompts: Sequence[Any]
    ) -> None:
        self._spec, self._decode = spec, decode
        self._done: list[list[int]] = [[] for _ in prompts]
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        self._canvas: dict[int, list[int]] = {}
        self._fresh: dict[int, set[int]] = {}
        self._given: dict[int, int] = {}
        self._live = Live(console=console(stderr=True), transient=True, auto_refresh=False)

    def __enter__(self) -> CanvasView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def on_pass(self, event: PassEvent) -> None:
        """Draw the canvases after a denoise pass."""
        mask = self._spec.mask_id
        for row, canvas, block, step in zip(
            event.rows, event.canvases.tolist(), event.blocks, event.steps, strict=True
        ):
            before = self._canvas.get(row) if step else None
            whole = self._spec.objective == "full"  # blocks begin behind the prompt
            given = 0 if block or whole else self._prompt_lengths[row] % len(canvas)
            self._given[row] = given
            self._fresh[row] = {
                slot
                for slot, token in enumerate(canvas)
                if token != mask and slot >= given and (before is None or before[slot] == mask)
            }
            self._canvas[row] = canvas
        self._draw()

    def on_block(self, event: BlockEvent) -> None:
        """Move a finished block into the text."""
        self._done[event.row] += event.token_ids
        if event.finish_reason is not None:
            self._canvas.pop(event.row, None)
            self._draw()

    def _draw(self) -> None:
        self._live.update(self.render(), refresh=True)

    def render(self) -> Text:
        """The picture as styled text."""
        out = Text()
        for row, done in enumerate(self._done):
            if len(self._done) > 1:
                out.append(f"{row + 1} ", style="bold")
            out.append(self._decode(done)[-_TAIL:])
            for slot, token in enumerate(self._canvas.get(row, [])):
                out.append_text(self._slot(row, slot, token))
            out.append("\n")
        return out

    def _slot(self, row: int, slot: int, token: int) -> Text:
        if token == self._spec.mask_id:
            return Text(_OPEN, style="dim")
        if slot in self._fresh[row]:
            style = "bold reverse"
        else:
            style = "dim" if slot < self._given[row] else ""
        # A control character would move the cursor and tear the picture.
        shown = self._decode([token]).replace("\n", "⏎")
        return Text("".join(c if c.isprintable() else "·" for c in shown) or "·", style=style)
