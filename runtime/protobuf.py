"""Changing a text inside a protobuf message without a package that knows its format."""

from __future__ import annotations


def replaced(message: bytes, path: tuple[int, ...], old: bytes, new: bytes) -> bytes:
    """A protobuf message with another text in the fields at `path` that hold `old`."""
    out = bytearray()
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 2:  # length and bytes
            size, at = _varint(message, at)
            at += size
            if key >> 3 == path[0]:
                body = message[at - size : at]
                if len(path) > 1:
                    body = replaced(body, path[1:], old, new)
                elif body == old:
                    body = new
                out += _as_varint(key) + _as_varint(len(body)) + body
                continue
        elif kind == 0:
            _, at = _varint(message, at)
        else:
            at += {1: 8, 5: 4}[kind]
        out += message[start:at]
    return bytes(out)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of a protobuf message, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
