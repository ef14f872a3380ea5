"""A checkpoint folder as a ModelSpec and float32 tensors of the own names.

Nothing is guessed and nothing is skipped: every tensor the model needs comes from the folder, every
tensor in the folder is used, and what config and weights both state must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fixedstate.bundle import DecodeDefaults, Source, sha256_of
from fixedstate.errors import CheckpointError, SpecError
from fixedstate.export import checkpoint_files as disk
from fixedstate.export.adaln import Folded
from fixedstate.export.checkpoint_writer import save_checkpoint
from fixedstate.export.names import canonical_names, conv_shape_of, sample
from fixedstate.export.published import (
    BD3LM,
    DIMAMBA,
    MAMBA_SSM,
    OWN,
    TRANSFORMERS,
    Piece,
    Plan,
    pieces_of,
    shown,
    style_of,
)
from fixedstate.export.published_bd3lm import plan_of as bd3lm_plan
from fixedstate.export.published_dimamba import plan_of as dimamba_plan
from fixedstate.export.published_sizes import spec_of
from fixedstate.export.weights import Shape, random_tensors, tensor_shapes
from fixedstate.spec import BLOCK_LEN_RANGE, ModelSpec

__all__ = [
    "Checkpoint",
    "load_checkpoint",
    "random_tensors",
    "save_checkpoint",
    "shipped_names",
    "tensor_shapes",
]

Note = Callable[[str], None]

_OWN_KEYS = ("format", "model", "decode")
_OWN_EXTRAS = ("_name_or_path", "_commit_hash")
_PUBLISHED_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
# Folders that training scripts write to: such a name is a local path, not a published one.
_LOCAL = re.compile(
    r"^(checkpoint|ckpt|exp|experiment|log|model|out|output|result|run|save|tmp|work)s?/"
    r"|/checkpoint-\d+$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model that was read whole.

    Attributes:
        spec: What the model is.
        tensors: float32, one for each name of :func:`tensor_shapes`, in that order; each is read
            from its file when it is asked for.
        decode: How it decodes unless told otherwise.
        tokenizer_files: Its tokenizer files by name.
        licence_files: Its LICENSE and NOTICE files by name.
        source: Published or shipped name, revision, licence, sha256 of the files that were read.
    """

    spec: ModelSpec
    tensors: Mapping[str, torch.Tensor]
    decode: DecodeDefaults = field(default_factory=DecodeDefaults)
    tokenizer_files: dict[str, Path] = field(default_factory=dict)
    licence_files: dict[str, Path] = field(default_factory=dict)
    source: Source = field(default_factory=Source)


def shipped_names() -> tuple[str, ...]:
    """Names of the models that come with the package."""
    root = _models()
    return tuple(sorted(x.name for x in root.glob("*") if (x / disk.CONFIG).is_file()))


def _models() -> Path:
    return Path(str(resources.files("fixedstate.export"))) / "models"


def load_checkpoint(
    source: str | Path,
    *,
    block_len: int | None = None,
    mask_id: int | None = None,
    stop_ids: tuple[int, ...] | None = None,
    objective: str | None = None,
    conv_layout: str | None = None,
    allow_unexpected: bool = False,
    notes: Note | None = None,
) -> Checkpoint:
    """Read a checkpoint whole, or raise.

    Args:
        source: Name of a shipped model (a bare string), or a folder with config.json and
            model.safetensors, or shards with model.safetensors.index.json.
        block_len: L in tokens, where the checkpoint does not state it.
        mask_id: Id of the mask, for published formats; None makes Mamba models ``causal``.
        stop_ids: Ids that end a text; None for what the checkpoint states.
        objective: ``block``, ``full`` or ``causal``; None for what checkpoint and mask id imply.
        conv_layout: ``d1k``, ``dk`` or ``dk1``, where the shapes of convolution weights leave two
            readings; elsewhere they must agree with it.
        allow_unexpected: Leave out tensors that the model does not have, with a note.
        notes: Told, one line each, what was removed, left out or decided.

    Raises:
        CheckpointError: where anything is missing, damaged, contradictory or not supported; one
            line that says what was given, what was expected and what to do.
    """
    note = notes or (lambda _: None)
    folder, name = _resolve(source, note)
    overrides = {
        "block_len": block_len,
        "mask_id": mask_id,
        "stop_ids": stop_ids,
        "objective": objective,
    }
    try:
        return _load(folder, name, overrides, conv_layout, allow_unexpected, note)
    except (SpecError, CheckpointError) as err:
        where = "" if str(folder) in str(err) else f"{folder}: "
        remedy = "; correct config.json or the option" if isinstance(err, SpecError) else ""
        raise CheckpointError(f"{where}{err}{remedy}") from err


def _load(
    folder: Path,
    name: str,
    overrides: Mapping[str, Any],
    conv_layout: str | None,
    allow_unexpected: bool,
    note: Note,
) -> Checkpoint:
    config = disk.read_config(folder)
    style = style_of(config)
    if style in (MAMBA_SSM, TRANSFORMERS) and overrides["block_len"] is None:
        low, high = BLOCK_LEN_RANGE
        raise CheckpointError(
            f"a {style} checkpoint states no block length, expected --block-len: give one from "
            f"{low} to {high} tokens"
        )
    entries, files = disk.weight_entries(folder)
    names = canonical_names(entries, style, note)
    layouts = {
        key: conv_shape_of(raw, entries[raw].shape, conv_layout)
        for key, raw in names.items()
        if key.endswith("conv1d.weight")
    }
    shapes = {key: layouts.get(key, entries[raw].shape) for key, raw in names.items()}
    if style == OWN:
        plan = _own_plan(config)
        _check_overrides(plan.spec, overrides)
    else:
        generation = folder / disk.GENERATION
        if overrides["stop_ids"] is None:
            overrides = {**overrides, "stop_ids": _stop_ids(config, generation)}
        if generation.exists():
            files.append(generation)
        plan = _published_plan(config, style, shapes, note, overrides)
    spec = _usable_vocabulary(plan.spec, disk.tokenizer_size(folder), note)
    pieces, twins = _match(plan, names, style, allow_unexpected, note)
    _check_shapes(plan, pieces, shapes, entries, names)
    tensors = _Tensors(pieces, names, entries, layouts)
    _check_values(tensors, pieces, twins, names, entries)
    return Checkpoint(
        spec=spec,
        tensors=tensors,
        decode=plan.decode,
        tokenizer_files=disk.tokenizer_files(folder),
        licence_files=disk.licence_files(folder),
        source=Source(
            name=name or _published_name(config),
            revision=str(config.get("_commit_hash") or ""),
            licence=disk.licence_name(folder),
            files={file.name: sha256_of(file) for file in [folder / disk.CONFIG, *files]},
        ),
    )


def _resolve(source: str | Path, note: Note) -> tuple[Path, str]:
    """The folder, and the shipped model's name where it is one."""
    shipped = shipped_names()
    if isinstance(source, str) and source in shipped:
        if Path(source).exists():
            note(f"{source} is the shipped model; for the folder beside you give ./{source}")
        return _models() / source, source
    folder = Path(source)
    if not folder.exists():
        raise CheckpointError(
            f"{source} does not exist: give a checkpoint folder with {disk.CONFIG} and "
            f"{disk.WEIGHTS}, or a shipped model ({', '.join(shipped) or 'none is installed'})"
        )
    return folder, ""


def _published_name(config: Mapping[str, Any]) -> str:
    name = config.get("_name_or_path")
    if not isinstance(name, str) or not _PUBLISHED_NAME.match(name):
        return ""
    return "" if _LOCAL.search(name) else name


def _published_plan(
    config: Mapping[str, Any],
    style: str,
    shapes: Mapping[str, Shape],
    note: Note,
    overrides: Mapping[str, Any],
) -> Plan:
    readers = {BD3LM: bd3lm_plan, DIMAMBA: dimamba_plan}
    if style in readers:
        plan = readers[style](config, shapes, note, **overrides)
        return replace(plan, pieces={name: plan.pieces[name] for name in tensor_shapes(plan.spec)})
    spec = spec_of(config, style, shapes, note, **overrides)
    return Plan(spec, pieces_of(spec))


def _own_plan(config: Mapping[str, Any]) -> Plan:
    unknown = sorted(set(config) - {*_OWN_KEYS, *_OWN_EXTRAS})
    missing = [key for key in _OWN_KEYS if key not in config]
    if unknown or missing:
        raise CheckpointError(
            f"config.json has unknown keys {unknown} and lacks {missing}, expected "
            f"{', '.join(_OWN_KEYS)}: write it as docs/checkpoints.md says"
        )
    try:
        spec = ModelSpec.from_dict(config["model"])
        decode = DecodeDefaults.from_dict(config["decode"])
    except (TypeError, KeyError, AttributeError, ValueError) as err:
        raise CheckpointError(
            f"config.json describes no model ({type(err).__name__}: {err}): write it as "
            "docs/checkpoints.md says"
        ) from err
    return Plan(spec, {key: Piece(key) for key in tensor_shapes(spec)}, decode=decode)


def _check_overrides(spec: ModelSpec, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        stated = getattr(spec, key)
        if value is not None and value != stated:
            raise CheckpointError(
                f"config.json says {key} {stated}, {value} was given: leave the option out, the "
                "model was trained with its own"
            )


def _stop_ids(config: Mapping[str, Any], generation: Path) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json where it says, else config.json."""
    stated = None
    if generation.exists():
        stated = disk.read_json(generation).get("eos_token_id")
    if stated is None:
        stated = config.get("eos_token_id")
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise CheckpointError(
            f"eos_token_id is {stated!r}, expected an id or a list of ids: correct the config"
        )
    return tuple(ids)


def _usable_vocabulary(spec: ModelSpec, tokenizer: int | None, note: Note) -> ModelSpec:
    if tokenizer is not None and tokenizer > spec.vocab_rows:
        raise CheckpointError(
            f"the tokenizer has ids up to {tokenizer - 1}, the embedding has {spec.vocab_rows} "
            "rows: use the tokenizer that belongs to the weights"
        )
    if tokenizer is not None and tokenizer < spec.vocab_size:
        note(f"usable vocabulary: {tokenizer} ids of the tokenizer, {spec.vocab_rows} rows")
        return replace(spec, vocab_size=tokenizer)
    return spec


def _match(
    plan: Plan,
    names: Mapping[str, str],
    style: str,
    allow_unexpected: bool,
    note: Note,
) -> tuple[dict[str, Piece | Folded], dict[str, str]]:
    """Pieces that are all there, and second copies with what they must be equal to."""
    pieces, spec = dict(plan.pieces), plan.spec
    head = "head.weight" if style == OWN else "lm_head.weight"
    twins = {key: of for key, of in plan.twins.items() if key in names}
    if spec.tied_embeddings and head in names:
        if "embedding.weight" in names:
            twins[head] = "embedding.weight"
        else:
            note(f"embedding and head are tied, stored once as {names[head]}")
            pieces["embedding.weight"] = Piece(head)
    needed = list(dict.fromkeys(key for piece in pieces.values() for key in piece.keys))
    used = {*needed, *twins}
    missing = [key for key in needed if key not in names]
    unexpected = [raw for key, raw in names.items() if key not in used]
    if missing:
        tie = ""
        if set(missing) & {"embedding.weight", head} and not spec.tied_embeddings:
            tie = "; embedding and head are not tied, so both must be there"
        others = f"; it holds {sample(unexpected)} instead" if unexpected else ""
        raise CheckpointError(
            f"the checkpoint lacks {sample([shown(key, style) for key in missing])}, required by "
            f"config.json{tie}{others}: fetch or save it again, whole"
        )
    if unexpected and not allow_unexpected:
        raise CheckpointError(
            f"the checkpoint holds {sample(unexpected)}, which the model of config.json does not "
            "have: correct the config, or add --allow-unexpected to leave them out"
        )
    for raw in unexpected:
        note(f"left out the unexpected tensor {raw}")
    return pieces, twins


def _check_shapes(
    plan: Plan,
    pieces: Mapping[str, Piece | Folded],
    shapes: Mapping[str, Shape],
    entries: Mapping[str, disk.Entry],
    names: Mapping[str, str],
) -> None:
    expected: dict[str, Shape] = dict(plan.shapes) or _shapes_of_pieces(plan.spec, pieces)
    wrong = [key for key, shape in expected.items() if shapes[key] != shape]
    if wrong:
        key = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        raise CheckpointError(
            f"tensor {names[key]} of {entries[names[key]].file.name} has shape {shapes[key]}, "
            f"config.json asks for {expected[key]}{more}: correct the config or use the weights "
            "that belong to it"
        )


def _shapes_of_pieces(spec: ModelSpec, pieces: Mapping[str, Piece | Folded]) -> dict[str, Shape]:
    """Shape of each tensor of the file whose rows are those of the own layout."""
    expected: dict[str, Shape] = {}
    for name, shape in tensor_shapes(spec).items():
        piece = pieces[name]
        assert isinstance(piece, Piece)
        rows = shape[0] if piece.stop is None else max(expected.get(piece.key, (0,))[0], piece.stop)
        expected[piece.key] = (rows, *shape[1:])
    return expected


class _Tensors(Mapping[str, torch.Tensor]):
    """float32 tensors of the own layout, each read from its file when it is asked for."""

    def __init__(
        self,
        pieces: Mapping[str, Piece | Folded],
        names: Mapping[str, str],
        entries: Mapping[str, disk.Entry],
        layouts: Mapping[str, Shape],
    ) -> None:
        self._pieces = pieces
        self._names = names
        self._entries = entries
        self._layouts = layouts

    def __getitem__(self, name: str) -> torch.Tensor:
        piece = self._pieces[name]
        if isinstance(piece, Folded):
            return piece.make({key: self._read(Piece(key)) for key in piece.keys})
        return self._read(piece)

    def _read(self, piece: Piece) -> torch.Tensor:
        raw = self._names[piece.key]
        tensor = disk.read_tensor(raw, self._entries[raw], piece.start, piece.stop)
        if piece.key in self._layouts:
            tensor = tensor.reshape(-1, *self._layouts[piece.key][1:])
        return disk.widen(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


_ROWS = 1 << 12
"""Rows of two tensors that are compared at a time."""


def _check_values(
    tensors: Mapping[str, torch.Tensor],
    pieces: Mapping[str, Piece | Folded],
    twins: Mapping[str, str],
    names: Mapping[str, str],
    entries: Mapping[str, disk.Entry],
) -> None:
    """Look at every value once, one tensor at a time: finite, and second copies equal."""
    keys = {key for piece in pieces.values() for key in piece.keys} | set(twins)
    used = sorted((names[key] for key in keys), key=lambda raw: entries[raw].offset)
    for raw in sorted(used, key=lambda raw: entries[raw].file):
        disk.check_dtype(raw, entries[raw])
    for raw in sorted(used, key=lambda raw: entries[raw].file):
        disk.check_finite(raw, entries[raw])
    for name, piece in pieces.items():
        if isinstance(piece, Folded):  # may overflow where its parts do not
            tensors[name]
    for twin, key in twins.items():
        if not _equal(names[twin], names[key], entries):
            raise CheckpointError(
                f"{names[twin]} and {names[key]} differ, config.json says they are tied: set the "
                "tie flag to false, or remove the one that is not meant"
            )


def _equal(one: str, other: str, entries: Mapping[str, disk.Entry]) -> bool:
    """Whether two tensors have equal values, compared in pieces."""
    shape = entries[one].shape
    if shape != entries[other].shape:
        return False
    rows = shape[0] if shape else 1
    for start in range(0, rows, _ROWS):
        cut = (start, min(start + _ROWS, rows)) if shape else (0, None)
        pair = [disk.widen(disk.read_tensor(raw, entries[raw], *cut)) for raw in (one, other)]
        if not torch.equal(*pair):
            return False
    return True
