"""Writing a checkpoint of the own format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fixedstate.bundle import DecodeDefaults, staged_folder
from fixedstate.errors import CheckpointError
from fixedstate.export import checkpoint_files as disk
from fixedstate.export.names import sample
from fixedstate.export.published import OWN
from fixedstate.export.stored import nonfinite
from fixedstate.export.weights import Shape, tensor_shapes
from fixedstate.spec import ModelSpec

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def save_checkpoint(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    decode: DecodeDefaults | None = None,
    tokenizer: str | Path | None = None,
    shards: int = 1,
    dtype: str | None = None,
    force: bool = False,
) -> None:
    """Write a checkpoint of the own format; the folder appears whole or not at all.

    Args:
        folder: Where; refused if it exists, unless ``force``.
        spec: The model.
        tensors: One for each name of :func:`tensor_shapes`; asked for once, and held for as long
            as their weight file is written.
        decode: How it decodes unless told otherwise.
        tokenizer: A tokenizer.json to put beside it, or a folder of tokenizer files.
        shards: Number of weight files.
        dtype: ``float32``, ``float16`` or ``bfloat16``; None keeps the tensors' own.
        force: Replace a folder that is there.

    Raises:
        CheckpointError: where a tensor is missing, unknown, misshapen, or not finite in ``dtype``.
        UsageError: where the folder exists or cannot be written.
    """
    shapes = _checked(spec, tensors, dtype)
    decode = decode or DecodeDefaults()
    if not 1 <= shards <= len(shapes):
        raise CheckpointError(f"shards is {shards}, expected 1 to {len(shapes)}, the tensors")
    config = {"format": OWN, "model": spec.to_dict(), "decode": decode.to_dict()}
    with staged_folder(Path(folder), force=force) as staging:
        _write_json(staging / disk.CONFIG, config)
        _write_weights(staging, tensors, shapes, dtype, shards)
        for name, file in _tokenizer_sources(tokenizer).items():
            shutil.copyfile(file, staging / name)


def _checked(
    spec: ModelSpec, tensors: Mapping[str, torch.Tensor], dtype: str | None
) -> dict[str, Shape]:
    """The shapes that the tensors must have, where their names and the dtype are right."""
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype!r} was given, expected one of {', '.join(_DTYPES)}")
    shapes = tensor_shapes(spec)
    odd = sorted(set(tensors) ^ set(shapes))
    if odd:
        raise CheckpointError(
            f"tensors missing or unknown: {sample(odd)}; expected the names of tensor_shapes(spec)"
        )
    return shapes


def _ready(name: str, tensor: torch.Tensor, shape: Shape, dtype: str | None) -> torch.Tensor:
    """A tensor as it is written: an own copy, since shared parameters would share memory."""
    kept = tensor.dtype if dtype is None else _DTYPES[dtype]
    tensor = tensor.detach().to("cpu", kept, copy=True).contiguous()
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"tensor {name} has shape {tuple(tensor.shape)}, the model needs {shape}"
        )
    if nonfinite(tensor):
        raise CheckpointError(
            f"tensor {name} holds NaN or Inf as {tensor.dtype}: save it in a wider dtype"
        )
    return tensor


def _tokenizer_sources(tokenizer: str | Path | None) -> dict[str, Path]:
    if tokenizer is None:
        return {}
    path = Path(tokenizer)
    found = disk.tokenizer_files(path) if path.is_dir() else {"tokenizer.json": path}
    if not found or not all(file.is_file() for file in found.values()):
        raise CheckpointError(f"{path} holds no tokenizer files: give a tokenizer.json or folder")
    return found


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Shape],
    dtype: str | None,
    shards: int,
) -> None:
    names = list(shapes)
    placed = {}
    size = 0
    for index in range(shards):
        mine = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors" if shards > 1 else disk.WEIGHTS
        ready = {name: _ready(name, tensors[name], shapes[name], dtype) for name in mine}
        save_file(ready, folder / file, {"format": "pt"})
        placed.update(dict.fromkeys(mine, file))
        size += sum(tensor.nbytes for tensor in ready.values())
        del ready  # before the next ones are made
    if shards > 1:
        _write_json(folder / disk.INDEX, {"metadata": {"total_size": size}, "weight_map": placed})
