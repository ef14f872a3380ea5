"""Tensor names and layouts as files spell them: wrappers, synonyms and convolution layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from fixedstate.errors import CheckpointError
from fixedstate.export.published import DIMAMBA, OWN
from fixedstate.export.weights import Shape

CONV_LAYOUTS = ("d1k", "dk", "dk1")
"""Layouts of a depthwise convolution weight: (D, 1, K), (D, K) and (D, K, 1)."""

_WRAPPERS = re.compile(r"^((?:module|_orig_mod|model|backbone)\.)+")
_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|_?cos_cached|_?sin_cached|position_ids|sampling_eps_(min|max))$"
)
_SAMPLE = 3


def sample(names: Sequence[str]) -> str:
    """A few names and how many more there are."""
    rest = len(names) - _SAMPLE
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(names[:_SAMPLE]) + more


def canonical_names(
    raw_names: Iterable[str], style: str, note: Callable[[str], None]
) -> dict[str, str]:
    """Name in the file by name without wrappers, for every tensor but known buffers.

    Published names lose ``backbone.`` and have one spelling of the embedding.

    Raises:
        CheckpointError: where two tensors have the same name, or the names are of another format
            than the config.
    """
    names: dict[str, str] = {}
    removed: dict[str, int] = {}
    for raw in raw_names:
        if _BUFFERS.search(raw):
            note(f"left out the buffer {raw}: it is computed, not trained")
            continue
        match = _WRAPPERS.match(raw)
        prefix = match[0] if match else ""
        name = raw[len(prefix) :]
        if style != OWN:
            prefix = prefix.replace("backbone.", "")  # theirs, not a wrapper's
            if style == DIMAMBA:
                prefix = prefix.replace("model.", "")  # likewise
                name = name.removeprefix("bimamba.backbone.")
            name = re.sub(r"^embeddings\.(word_embeddings\.)?", "embedding.", name)
        if prefix:
            removed[prefix] = removed.get(prefix, 0) + 1
        if name in names:
            raise CheckpointError(
                f"{names[name]} and {raw} are both the tensor {name}, expected one: remove the one "
                "that is not meant"
            )
        names[name] = raw
    for prefix, count in removed.items():
        note(f"removed the wrapper prefix {prefix!r} from {count} tensor names")
    _check_style(names, style)
    return names


def _check_style(names: dict[str, str], style: str) -> None:
    own, published = "norm.weight" in names, "norm_f.weight" in names
    if own != published and own != (style == OWN):
        found = names["norm.weight" if own else "norm_f.weight"]
        whose = "this package's own format" if own else "mamba_ssm or transformers"
        raise CheckpointError(
            f"config.json is of the format {style}, the weights hold {found}, a name of {whose}: "
            "use the config that belongs to the weights"
        )


def conv_shape_of(name: str, shape: Shape, told: str | None) -> Shape:
    """The shape of a convolution weight as (D, 1, K), which holds the same bytes in every layout.

    Args:
        name: The tensor, for messages.
        shape: Its shape in the file.
        told: One of :data:`CONV_LAYOUTS`; None to decide by shape.

    Raises:
        CheckpointError: where the shape leaves two readings or does not fit what was told.
    """
    if told is not None and told not in CONV_LAYOUTS:
        raise CheckpointError(
            f"conv layout {told!r} was given, expected one of {', '.join(CONV_LAYOUTS)}"
        )
    if len(shape) == 3 and shape[1] == 1 and told in (None, "d1k"):
        return shape
    found = {2: "dk", 3: "dk1"}.get(len(shape)) if len(shape) == 2 or shape[2:] == (1,) else None
    if found is None or told not in (None, found):
        wanted = "(D, 1, K), (D, K) or (D, K, 1)" if told is None else f"the layout {told}"
        raise CheckpointError(
            f"tensor {name} has shape {shape}, expected {wanted}: save it in one of the layouts "
            f"{', '.join(CONV_LAYOUTS)}"
        )
    if shape[0] == shape[1] and told is None:
        raise CheckpointError(
            f"tensor {name} has shape {shape}: channels and taps cannot be told apart; say which "
            f"layout it has with --conv-layout {' or '.join(CONV_LAYOUTS)}"
        )
    return shape[0], 1, shape[1]
