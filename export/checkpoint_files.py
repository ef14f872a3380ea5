"""What a checkpoint folder holds: config, weight files and their tensors, read without guessing.

Nothing here knows a model. Files are opened by the plain names that the folder or its index gives;
a file that is missing, cut, or not what its name says is an error naming it.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from fixedstate.errors import CheckpointError
from fixedstate.export.stored import nonfinite

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_LICENCE = re.compile(r"^(LICEN[CS]E|NOTICE|COPYING)([.-][\w.-]*)?$", re.IGNORECASE)
_LICENCE_TITLES = {
    "Apache-2.0": ("apache license", "version 2.0"),
    "MIT": ("mit license", "permission is hereby granted"),
}
_POINTER = b"version https://git-lfs"
_PICKLE = (b"PK\x03\x04", b"\x80")  # a zip of torch.save, a bare pickle
_AGAIN = "download or copy it again"
_WIDENED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor stands and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, ...
    offset: int = 0  # first byte in the file
    stamp: tuple[int, int, int] = (0, 0, 0)  # of the file when its header was read


def read_json(file: Path) -> dict[str, Any]:
    """The mapping a JSON file holds.

    Raises:
        CheckpointError: where the file is missing, unreadable or not a JSON mapping.
    """
    try:
        raw = file.read_bytes()
    except OSError as err:
        raise CheckpointError(f"{file} cannot be read: {err.strerror or err}") from err
    try:
        data = json.loads(raw)
    except ValueError as err:
        raise CheckpointError(
            f"{file} is damaged ({len(raw)} bytes, {_looks_like(raw)}not JSON): {_AGAIN}"
        ) from err
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{file} holds a JSON {type(data).__name__}, expected a mapping: {_AGAIN}"
        )
    return data


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        CheckpointError: where the folder or the file is missing or damaged.
    """
    if not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist: give a checkpoint folder with {CONFIG} and {WEIGHTS}, "
            "or the name of a shipped model"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file, expected a checkpoint folder with {CONFIG} and {WEIGHTS}: "
            "give the folder that holds it"
        )
    if not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder} holds no {CONFIG}, expected a checkpoint folder with {CONFIG} and "
            f"{WEIGHTS}: add the config that belongs to the weights"
        )
    return read_json(folder / CONFIG)


def weight_entries(folder: Path) -> tuple[dict[str, Entry], list[Path]]:
    """Every tensor of the folder's weight files by its name in the file, and those files.

    Raises:
        CheckpointError: where a file is missing, damaged, or holds what the index says otherwise.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if not index.exists():
        if single.exists():
            return _header(single), [single]
        raise _no_weights(folder)
    placed = _weight_map(index)
    shards = sorted(set(placed.values()))
    if single.exists() and WEIGHTS not in shards:
        raise CheckpointError(
            f"{folder} holds both {WEIGHTS} and {INDEX}, which names {', '.join(shards[:3])}: "
            "remove the one that is not meant"
        )
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{INDEX} names {', '.join(absent)}, not in {folder} ({len(absent)} of {len(shards)} "
            "files absent): the download may be incomplete, fetch the checkpoint again"
        )
    entries: dict[str, Entry] = {}
    for shard in shards:
        for name, entry in _header(folder / shard).items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {name} stands in {entries[name].file.name} and in {shard}, expected "
                    "once: fetch the checkpoint again or write its index anew"
                )
            entries[name] = entry
    _check_placed(placed, entries)
    return entries, [index, *(folder / shard for shard in shards)]


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} has no weight_map of tensor to file: {_AGAIN}")
    for name, shard in placed.items():
        plain = isinstance(shard, str) and "\\" not in shard and Path(shard).name == shard
        if not plain or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {name} in {shard!r}, expected the plain name of a .safetensors "
                "file beside it: use an index whose files stand in the folder"
            )
    return placed


def _check_placed(placed: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for name, shard in placed.items():
        if name not in entries:
            raise CheckpointError(
                f"{INDEX} places tensor {name} in {shard}, which does not hold it: the download "
                "may be incomplete or mixed from two versions, fetch the checkpoint again"
            )
    for name, entry in entries.items():
        if placed.get(name) != entry.file.name:
            raise CheckpointError(
                f"tensor {name} stands in {entry.file.name}, {INDEX} says "
                f"{placed.get(name, 'nothing about it')}: fetch the checkpoint again"
            )


def _no_weights(folder: Path) -> CheckpointError:
    for file in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*")):
        head = _head(file)
        if not head.startswith(_PICKLE):
            return CheckpointError(
                f"{file} is damaged ({file.stat().st_size} bytes, {_looks_like(head)}not a weight "
                f"file): {_AGAIN}, as safetensors"
            )
        return CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is a pickle, which can run code and is never "
            f"loaded; expected {WEIGHTS}: convert to safetensors"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if any("-of-" in name for name in others):
        return CheckpointError(
            f"{folder} holds {others[0]} but no {INDEX}: the download may be incomplete, fetch "
            "the checkpoint again"
        )
    found = f"{', '.join(others[:3])}: rename it" if others else "no weights: add the file"
    return CheckpointError(f"{folder} needs {WEIGHTS} or {INDEX}, it holds {found}")


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(64)
    except OSError as err:
        raise CheckpointError(f"{file} cannot be read: {err.strerror or err}") from err


def _looks_like(head: bytes) -> str:
    if not head:
        return "empty, "
    if head.startswith(_POINTER):
        return "a git-lfs pointer in place of the file, "
    if head.lstrip()[:1] in (b"<",):
        return "a web page in place of the file, "
    return ""


def _header(file: Path) -> dict[str, Entry]:
    head = _head(file)
    size = file.stat().st_size
    try:
        with safetensors.safe_open(file, framework="pt") as stream:  # refuses what is not whole
            slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118
            said = {
                name: (tuple(piece.get_shape()), str(piece.get_dtype()))
                for name, piece in slices.items()
            }
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
        return {
            name: Entry(
                file, *said[name], 8 + length + header[name]["data_offsets"][0], _stamp(file)
            )
            for name in said
        }
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as err:
        what = _looks_like(head) or "not a whole safetensors file, "
        raise CheckpointError(
            f"{file} is damaged ({size} bytes, {what.rstrip(', ')}): {_AGAIN}"
        ) from err


def _stamp(file: Path) -> tuple[int, int, int]:
    """What changes where somebody writes another file in this place."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy of a float32, float16 or bfloat16 tensor: every value is kept as it is."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()


def check_dtype(name: str, entry: Entry) -> None:
    """Refuse a dtype that float32 cannot hold exactly.

    Raises:
        CheckpointError: naming the tensor.
    """
    if entry.dtype not in _WIDENED:
        raise CheckpointError(
            f"tensor {name} of {entry.file.name} has dtype {entry.dtype}, expected one of "
            f"{', '.join(_WIDENED)}: save the checkpoint in float32, float16 or bfloat16"
        )


def read_tensor(name: str, entry: Entry, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """A tensor of a weight file, or some of its rows, in the file's own dtype.

    The bytes are read, not mapped: pages of a mapping would count as this process's memory.

    Args:
        name: Its name in the file.
        entry: Where it stands.
        start: First row.
        stop: Behind the last row; None for all.

    Raises:
        CheckpointError: for a dtype that float32 cannot hold exactly, or a file that changed since
            its header was read.
    """
    check_dtype(name, entry)
    shape = entry.shape
    if (start, stop) != (0, None):
        shape = ((shape[0] if stop is None else stop) - start, *shape[1:])
    dtype = _WIDENED[entry.dtype]
    row = math.prod(entry.shape[1:]) * dtype.itemsize
    raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    try:
        if _stamp(entry.file) != entry.stamp:
            raise OSError
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.offset + start * row)
            _fill(stream, raw.numpy().data)
    except OSError as err:
        raise CheckpointError(f"{entry.file} changed while it was read: {_AGAIN}") from err
    return raw.view(dtype).reshape(shape)


def check_finite(name: str, entry: Entry) -> None:
    """Read a tensor and refuse it where a value is not finite.

    Raises:
        CheckpointError: naming tensor and count, or as :func:`read_tensor`.
    """
    tensor = read_tensor(name, entry)
    bad = nonfinite(tensor)
    if bad:
        raise CheckpointError(
            f"tensor {name} of {entry.file.name} holds {bad} NaN or Inf values of "
            f"{tensor.numel()}: the checkpoint is broken, use another one"
        )


def _fill(stream: io.FileIO, target: memoryview) -> None:
    """Read until the target is full: one read gives at most 2 GiB.

    Raises:
        OSError: where the file ends before.
    """
    while target:
        count = stream.readinto(target)
        if not count:
            raise OSError
        target = target[count:]


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The folder's tokenizer files by name."""
    return {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}


def tokenizer_size(folder: Path) -> int | None:
    """Ids the tokenizer can name: its highest id and one; None without tokenizer.json.

    Raises:
        CheckpointError: where tokenizer.json is damaged.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    data = read_json(file)
    try:
        vocabulary = data.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, dict):
            ids = [int(token) for token in vocabulary.values()]
        else:
            ids = list(range(len(vocabulary)))
        ids += [int(token["id"]) for token in data.get("added_tokens") or ()]
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{file} is not a tokenizer (no vocabulary in it): {_AGAIN}") from err
    return max(ids, default=-1) + 1 or None


def licence_files(folder: Path) -> dict[str, Path]:
    """The folder's LICENSE, NOTICE and COPYING files by name."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return {file.name: file for file in files if _LICENCE.match(file.name)}


def licence_name(folder: Path) -> str:
    """The licence the model card or the licence file states; empty where neither is clear."""
    card = folder / "README.md"
    if card.is_file():
        front = re.match(r"---\n(.*?)\n---", card.read_text("utf-8", "replace"), re.DOTALL)
        stated = re.search(r"^license:[ \t]*['\"]?([\w.+-]+)", front[1], re.M) if front else None
        if stated:
            return stated[1]
    for file in licence_files(folder).values():
        text = file.read_text("utf-8", "replace")[:4096].lower()
        for name, words in _LICENCE_TITLES.items():
            if all(word in text for word in words):
                return name
    return ""
