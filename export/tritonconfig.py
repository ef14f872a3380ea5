"""``config.pbtxt`` of Triton Inference Server: written from values, read back by its own schema.

The values are a tree as the schema's JSON form has it; enums are :class:`Word`. The text is read
back with the message ``ModelConfig`` of tritonclient and compared with the tree, so that a slip of
the writer, or a field that the schema does not have, never reaches a server.

Source of the schema: ``model_config.proto`` of triton-inference-server/common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fixedstate.errors import ExportError
from fixedstate.ports import Port

Tree = dict[str, Any]
"""Fields by name: texts, whole numbers, flags, words, trees, and lists of these."""


class Word(str):
    """A name of an enum, which stands without quotation marks."""

    __slots__ = ()


TYPES: dict[str, Word] = {
    "float32": Word("TYPE_FP32"),
    "float16": Word("TYPE_FP16"),
    "bfloat16": Word("TYPE_BF16"),
    "int8": Word("TYPE_INT8"),
    "uint8": Word("TYPE_UINT8"),
    "int64": Word("TYPE_INT64"),
    "bool": Word("TYPE_BOOL"),
}
"""Triton's name of a port's dtype; float8 has none."""


def data_type(port: Port) -> Word:
    """Triton's name of a port's dtype.

    Raises:
        ExportError: for one that it does not have.
    """
    if port.dtype not in TYPES:
        raise ExportError(
            f"port {port.name!r} is {port.dtype}, which Triton has no type for: export the bundle "
            "with another format of keys and states"
        )
    return TYPES[port.dtype]


def tensor(name: str, dtype: str, dims: Sequence[int], **more: Any) -> Tree:
    """An input or output."""
    return {"name": name, "data_type": Word(dtype), "dims": list(dims), **more}


def parameters(values: Mapping[str, str]) -> Tree:
    """The map of free texts that a model reads when it is loaded."""
    return {name: {"string_value": value} for name, value in sorted(values.items())}


def text_of(tree: Tree) -> str:
    """The tree as protobuf text, read back and compared.

    Raises:
        ExportError: where the schema reads something else, which is an error of this package.
    """
    text = "".join(f"{line}\n" for line in _lines(tree))
    if parsed(text) != _message(tree):
        raise ExportError("config.pbtxt reads back as something else than what was written")
    return text


def parsed(text: str) -> Any:
    """The message ``ModelConfig`` of a text.

    Raises:
        ExportError: with line and column, where it is none.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as err:
        raise ExportError(f"config.pbtxt is no model configuration: {err}") from err


def _message(tree: Tree) -> Any:
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    try:
        return json_format.ParseDict(tree, model_config_pb2.ModelConfig())
    except json_format.ParseError as err:
        raise ExportError(f"config.pbtxt would hold what its schema does not know: {err}") from err


def _lines(tree: Tree, indent: str = "") -> list[str]:
    lines = []
    for name, value in tree.items():
        if name == "parameters":  # a map: pairs of key and value
            for key, entry in value.items():
                pair = {"key": key, "value": entry}
                lines.append(f"{indent}parameters {{ {' '.join(_inline(pair))} }}")
        elif isinstance(value, dict):
            lines += [f"{indent}{name} {{", *_lines(value, f"{indent}  "), f"{indent}}}"]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                lines += [f"{indent}{name} {{", *_lines(entry, f"{indent}  "), f"{indent}}}"]
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}")
    return lines


def _inline(tree: Tree) -> list[str]:
    return [
        f"{name} {{ {' '.join(_inline(value))} }}"
        if isinstance(value, dict)
        else f"{name}: {_scalar(value)}"
        for name, value in tree.items()
    ]


def _scalar(value: Any) -> str:
    if isinstance(value, list):
        return f"[ {', '.join(map(_scalar, value))} ]" if value else "[ ]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (Word, int)):
        return str(value)
    return json.dumps(value)  # the same escapes, for the ASCII that stands here
