"""Text to ids and back, with the tokenizer that stands in a bundle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fixedstate.bundle import Bundle
from fixedstate.errors import BundleError, UsageError
from fixedstate.spec import ModelSpec

if TYPE_CHECKING:
    from fixedstate.runtime.enginefile import EngineFolder

TOKENIZER = "tokenizer.json"
"""Name of the tokenizer file in a bundle."""


class Text:
    """The tokenizer of a bundle, held to the vocabulary of its model.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        spec: The model; ids at or above its vocab_size are never used.
    """

    def __init__(self, tokenizer: Any, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._drop = {*spec.stop_ids, spec.mask_id, spec.bos_id} - {None}

    @classmethod
    def open(cls, bundle: Bundle | EngineFolder | str | os.PathLike[str]) -> Text:
        """The tokenizer of an opened bundle or engine, or of a bundle's folder.

        Raises:
            UsageError: where the bundle has none.
            BundleError: where the file is damaged.
        """
        if isinstance(bundle, (str, os.PathLike)):
            bundle = Bundle.open(bundle, verify_weights=False)
        path = Path(bundle.path, TOKENIZER)
        if not path.is_file():
            raise UsageError(f"{bundle.path} has no {TOKENIZER}: give --prompt-ids instead of text")
        try:
            from tokenizers import Tokenizer
        except ImportError as err:
            raise UsageError(
                "text needs the package tokenizers: install it, or give --prompt-ids"
            ) from err
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as err:  # the package raises bare Exception
            raise BundleError(f"{path} is damaged ({err}): export the bundle again") from err
        return cls(tokenizer, bundle.spec)

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """The ids of a prompt; one begin token where the tokenizer adds it, never two.

        Args:
            text: The prompt.
            goes_on: Whether other tokens stand before it: the tokenizer then adds nothing around
                the text.

        Raises:
            UsageError: for an id outside the model's vocabulary.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=not goes_on)
        ids: list[int] = list(encoded.ids)
        begin = self._spec.bos_id
        if not goes_on and begin is not None and ids[:2] == [begin, begin]:
            ids = ids[1:]  # the text itself began with it
        wrong = [token for token in ids if token >= self._spec.vocab_size]
        if wrong:
            raise UsageError(
                f"the text holds token {wrong[0]} ({self._tokenizer.id_to_token(wrong[0])!r}), "
                f"outside the model's vocabulary of {self._spec.vocab_size}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without stop ids, mask and special tokens."""
        kept = self._kept(ids)
        return str(self._tokenizer.decode(kept, skip_special_tokens=True)) if kept else ""

    def _kept(self, ids: Sequence[int]) -> list[int]:
        size = self._spec.vocab_size
        return [int(i) for i in ids if i not in self._drop and 0 <= i < size]

    def incremental(self) -> Detokenizer:
        """A detokenizer for ids that arrive block by block."""
        return Detokenizer(self)


class Detokenizer:
    """Text of ids that arrive in pieces; characters are handed over once they are whole."""

    def __init__(self, text: Text) -> None:
        from tokenizers.decoders import DecodeStream

        self._text = text
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        pieces = []
        for token in self._text._kept(ids):
            self._ids.append(token)
            pieces.append(self._stream.step(self._text._tokenizer, token) or "")
        new = "".join(pieces)
        self._sent += new
        return new

    def finish(self) -> str:
        """What is left at the end: a character whose last bytes never came."""
        whole = self._text.decode(self._ids)
        rest = whole[len(self._sent) :] if whole.startswith(self._sent) else ""
        self._sent += rest
        return rest
