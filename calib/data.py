"""Token sequences to calibrate with: a JSONL file of tokens alone, in splits that never overlap.

The first line says which model the tokens are of; every other line is one sequence. States are not
stored: they are carried along by the runtime's own loop, which takes a few kilobytes of tokens
where the states would take megabytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fixedstate.bundle import Bundle, write_atomic
from fixedstate.errors import CalibrationError, SpecError, require_keys
from fixedstate.spec import ModelSpec

FORMAT = 1
"""Number of the format, under ``calib_data`` in the first line."""

SPLITS = ("calibrate", "score", "held-out")
"""Ranges are collected on the first, formats compared on the second, reports made on the third."""

HALVES = ("verify", "report")
"""Every other sequence of the split ``held-out``, and the rest: where a search is held against some
of them, the report is about those that it has not seen."""

_SHARES = (6, 8, 10)  # of ten parts, cumulated
_HEADER = ("calib_data", "tokenizer_sha256", "vocab", "mask_id", "block")
_RECORD = ("id", "ids", "prompt_len")
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One sequence.

    Attributes:
        id: Its name, unique in a file.
        ids: Its tokens; none is the mask id.
        prompt_len: Tokens at its beginning that are given and never masked.
    """

    id: str
    ids: tuple[int, ...]
    prompt_len: int = 0

    @property
    def split(self) -> str:
        """The split it is in: by its name, whatever else is in the file."""
        part = int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "big") % 10
        return next(name for name, share in zip(SPLITS, _SHARES, strict=True) if part < share)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {"id": self.id, "ids": list(self.ids), "prompt_len": self.prompt_len}


@dataclass(frozen=True, slots=True)
class Data:
    """A file of sequences.

    Attributes:
        records: In the order of their names.
        sha256: Of the header and the records in that order; lines may stand in any order.
    """

    records: tuple[Record, ...]
    sha256: str

    def split(self, name: str, block_len: int, blocks: int | None = None) -> tuple[Record, ...]:
        """The usable sequences of a split, each cut to whole blocks.

        Args:
            name: One of :data:`SPLITS` or of :data:`HALVES`.
            block_len: L.
            blocks: Blocks of a sequence at most.

        Raises:
            CalibrationError: ``NO_DATA``, where no sequence of it has a block behind its prompt.
        """
        if name in HALVES:
            whole = self.split("held-out", block_len, blocks)
            if len(whole) < len(HALVES):
                raise CalibrationError(
                    "NO_DATA",
                    "split 'held-out' has one sequence with a whole block behind its prompt, and a "
                    "search needs two, one to hold it against and one to report on: give more",
                )
            return whole[HALVES.index(name) :: len(HALVES)]
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is none of {', '.join((*SPLITS, *HALVES))}")
        found = []
        for record in self.records:
            count = len(record.ids) // block_len
            count = count if blocks is None else min(count, blocks)
            if record.split == name and count * block_len > record.prompt_len:
                found.append(Record(record.id, record.ids[: count * block_len], record.prompt_len))
        if not found:
            raise CalibrationError(
                "NO_DATA",
                f"none of the {len(self.records)} sequences is in split {name!r} and has a whole "
                f"block of {block_len} tokens behind its prompt: give more or longer sequences "
                "(a fifth of all is in each of the smaller splits)",
            )
        return tuple(found)


def read_data(path: str | os.PathLike[str], bundle: Bundle) -> Data:
    """Read sequences for a bundle.

    Args:
        path: The file.
        bundle: What they are to be fed to.

    Raises:
        CalibrationError: ``DATA_MODEL`` where they are of another vocabulary or tokenizer,
            ``DATA`` where a line is damaged, ``SPLIT_OVERLAP`` where two splits hold the same
            tokens.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise CalibrationError("DATA", f"{file} cannot be read as UTF-8 text: {err}") from err
    header = _json(file, 1, lines[0] if lines else "")
    _check_header(file, header, bundle)
    records: dict[str, Record] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        record = _record(file, number, _json(file, number, line), bundle.spec)
        if record.id in records:
            raise CalibrationError(
                "DATA", f"{file}, line {number}: id {record.id!r} stands there twice: rename one"
            )
        records[record.id] = record
    ordered = tuple(records[name] for name in sorted(records))
    _check_overlap(file, ordered)
    return Data(ordered, _digest(header, ordered))


def write_data(
    path: str | os.PathLike[str], bundle: Bundle, sequences: Iterable[tuple[Sequence[int], int]]
) -> Data:
    """Write sequences of a bundle's tokens; the file appears whole or not at all.

    Args:
        path: The file.
        bundle: The model that they are tokens of.
        sequences: Tokens and the length of the prompt of each. A sequence is named by the hash of
            its tokens, so that one that comes again is the same record.

    Raises:
        CalibrationError: as :func:`read_data`.
    """
    header = _header(bundle)
    records: dict[str, Record] = {}
    for ids, prompt_len in sequences:
        name = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
        data = {"id": name, "ids": list(ids), "prompt_len": prompt_len}
        records[name] = _record(Path(path), len(records) + 2, data, bundle.spec)
    ordered = tuple(records[name] for name in sorted(records))
    lines = [header, *(record.to_dict() for record in ordered)]
    write_atomic(Path(path), "".join(json.dumps(line) + "\n" for line in lines).encode())
    return Data(ordered, _digest(header, ordered))


def _header(bundle: Bundle) -> dict[str, Any]:
    return {
        "calib_data": FORMAT,
        "tokenizer_sha256": bundle.files.get(_TOKENIZER),
        "vocab": bundle.spec.vocab_size,
        "mask_id": bundle.spec.mask_id,
        "block": bundle.spec.block_len,
    }


def _check_header(file: Path, header: Mapping[str, Any], bundle: Bundle) -> None:
    if header.get("calib_data") != FORMAT:
        raise CalibrationError(
            "DATA",
            f"{file}: its first line has calib_data {header.get('calib_data')!r}, this version "
            f"reads {FORMAT}: make the file with `fixedstate calibrate data`",
        )
    try:
        require_keys(header, _HEADER, "the first line")
    except SpecError as err:
        raise CalibrationError("DATA", f"{file}: {err}") from err
    for key, wanted in _header(bundle).items():
        if header[key] != wanted and key != "block":  # sequences are cut anew for each model
            raise CalibrationError(
                "DATA_MODEL",
                f"{file} has {key} {header[key]!r}, {bundle.path} has {wanted!r}: the tokens are "
                "of another model; make the file again with this bundle",
            )


def _json(file: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as err:
        raise CalibrationError("DATA", f"{file}, line {number} is no JSON: {err}") from err
    if not isinstance(found, dict):
        raise CalibrationError("DATA", f"{file}, line {number} is no JSON object")
    return found


def _record(file: Path, number: int, data: Mapping[str, Any], spec: ModelSpec) -> Record:
    where = f"{file}, line {number}"
    try:
        require_keys(data, _RECORD, "a record")
    except SpecError as err:
        raise CalibrationError("DATA", f"{where}: {err}") from err
    name, ids, prompt = data["id"], data["ids"], data["prompt_len"]
    if not isinstance(name, str) or not name:
        raise CalibrationError("DATA", f"{where}: id must be a text; got {name!r}")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise CalibrationError("DATA", f"{where}: ids must be a list of whole numbers")
    if type(prompt) is not int or not 0 <= prompt <= len(ids):
        raise CalibrationError(
            "DATA", f"{where}: prompt_len must be between 0 and {len(ids)}; got {prompt!r}"
        )
    for token in ids:
        if not 0 <= token < spec.vocab_size or token == spec.mask_id:
            raise CalibrationError(
                "DATA",
                f"{where}: id {token} is no token of text (0 to {spec.vocab_size - 1} without the "
                f"mask id {spec.mask_id}): masks are put in by the collector",
            )
    return Record(name, tuple(ids), prompt)


def _check_overlap(file: Path, records: Sequence[Record]) -> None:
    """The same tokens in two splits would make a report about data that ranges were made with."""
    seen: dict[tuple[int, ...], Record] = {}
    for record in records:
        other = seen.setdefault(record.ids, record)
        if other.split != record.split:
            raise CalibrationError(
                "SPLIT_OVERLAP",
                f"{file}: {other.id!r} and {record.id!r} hold the same tokens and are in the "
                f"splits {other.split!r} and {record.split!r}: leave one out",
            )


def _digest(header: Mapping[str, Any], records: Sequence[Record]) -> str:
    lines = [header, *(record.to_dict() for record in records)]
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()
