"""The table of ranges: what was seen at every activation, tied to all that it was seen with.

A table of other weights, graphs, data or rules is refused, naming what differs: reused in silence,
it would give a model that works and is worse.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fixedstate.bundle import Bundle, write_atomic
from fixedstate.calib.data import Data
from fixedstate.calib.histogram import BINS, Histogram
from fixedstate.errors import CalibrationError, FixedStateError, require_keys

FORMAT = 1
"""Number of the format, under ``calibration_table`` in the file."""

COMMIT = "commit"
"""Name of the commit pass among the passes; the others are named by their share of masks."""

_KEYS = ("calibration_table", "model", "data", "policy", "inputs", "sha256")
_POLICY = ("masks", "commit", "blocks", "seed", "sampler")


@dataclass(frozen=True, slots=True)
class Policy:
    """Which passes ranges are taken from.

    Attributes:
        masks: Shares of a block's open slots that are masked, a denoise pass for each.
        commit: Whether commit passes count, which see clean tokens only.
        blocks: Blocks of a sequence at most.
        seed: Of the places that are masked.
        sampler: ``masks``, which puts masks at random places; or ``trace``, where the decode loop
            itself fills blocks behind each prompt, with the masks that it really leaves.
    """

    masks: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    commit: bool = True
    blocks: int = 16
    seed: int = 0
    sampler: str = "masks"

    def __post_init__(self) -> None:
        if not all(0.0 < share <= 1.0 for share in self.masks):
            raise CalibrationError(
                "POLICY", f"masks must be above 0 and at most 1; got {self.masks}"
            )
        if not self.masks and not self.commit:
            raise CalibrationError("POLICY", "without masks and commit passes nothing is seen")
        if self.blocks < 1:
            raise CalibrationError("POLICY", f"blocks must be 1 or more; got {self.blocks}")
        if self.sampler not in ("masks", "trace"):
            raise CalibrationError("POLICY", f"sampler {self.sampler!r} is none of masks, trace")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; the inverse of :meth:`from_dict`."""
        return {**asdict(self), "masks": list(self.masks)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Read what :meth:`to_dict` wrote; unknown keys are refused."""
        require_keys(data, _POLICY, "Policy")
        return cls(**{**data, "masks": tuple(data["masks"])})


@dataclass(slots=True)
class Seen:
    """What was seen of one activation.

    Attributes:
        histogram: Of all passes.
        passes: Largest magnitude by pass: a share of masks such as ``0.75``, or ``commit``.
    """

    histogram: Histogram
    passes: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "histogram": self.histogram.to_dict(),
            "passes": dict(sorted(self.passes.items())),
        }


@dataclass(slots=True)
class Table:
    """Ranges of a bundle's activations.

    Attributes:
        model: sha256 of every graph that was run, and of the weights.
        data: sha256 of the data, and the split.
        policy: Which passes.
        records: Names of the sequences that were seen.
        inputs: What was seen, by activation.
    """

    model: dict[str, str]
    data: dict[str, str]
    policy: Policy
    records: set[str] = field(default_factory=set)
    inputs: dict[str, Seen] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        bundle: Bundle,
        data: Data,
        split: str,
        policy: Policy,
        inputs: tuple[str, ...],
        bins: int = BINS,
    ) -> Table:
        """A table in which nothing was seen yet."""
        return cls(
            model_hashes(bundle),
            {"sha256": data.sha256, "split": split},
            policy,
            inputs={name: Seen(Histogram(bins)) for name in inputs},
        )

    def add(self, name: str, pass_name: str, values: Any) -> None:
        """Count the values of an activation in a pass."""
        seen = self.inputs[name]
        piece = Histogram(seen.histogram.bins)
        piece.add(values)
        seen.histogram.merge(piece)
        seen.passes[pass_name] = max(seen.passes.get(pass_name, 0.0), piece.amax)

    def merge(self, other: Table) -> None:
        """Take in a table of other sequences of the same data.

        Raises:
            CalibrationError: ``STALE`` where they were not made alike, ``TWICE`` where a sequence
                is in both.
        """
        self._same("model", other.model)
        self._same("data", other.data)
        self._same("policy", other.policy.to_dict())
        self._same("inputs", {name: one.histogram.bins for name, one in other.inputs.items()})
        if twice := sorted(self.records & other.records):
            raise CalibrationError(
                "TWICE",
                f"{len(twice)} sequences are in both tables ({twice[0]}, ...): leave one out",
            )
        self.records |= other.records
        for name, theirs in other.inputs.items():
            mine = self.inputs[name]
            mine.histogram.merge(theirs.histogram)
            for pass_name, amax in theirs.passes.items():
                mine.passes[pass_name] = max(mine.passes.get(pass_name, 0.0), amax)

    def check(self, bundle: Bundle, data: Data | None = None, policy: Policy | None = None) -> None:
        """Refuse a table that was not made with these.

        Raises:
            CalibrationError: ``STALE``, naming what differs.
        """
        self._same("model", model_hashes(bundle))
        if data is not None:
            self._same("data", {**self.data, "sha256": data.sha256})
        if policy is not None:
            self._same("policy", policy.to_dict())

    def _same(self, part: str, theirs: Mapping[str, Any]) -> None:
        mine: Mapping[str, Any] = {
            "model": self.model,
            "data": self.data,
            "policy": self.policy.to_dict(),
            "inputs": {name: one.histogram.bins for name, one in self.inputs.items()},
        }[part]
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise CalibrationError(
                    "STALE",
                    f"the table's {part} {key} is {_short(mine.get(key))}, here it is "
                    f"{_short(theirs.get(key))}: collect the ranges again",
                )

    def check_complete(self) -> None:
        """Refuse ranges that would make wrong scales.

        Raises:
            CalibrationError: ``NO_DATA`` without a sequence, ``NONFINITE`` where an activation held
                NaN or infinity, ``ZERO_RANGE`` where it held nothing but zeros. Activations that no
                pass visited are for :meth:`unvisited`.
        """
        if not self.records:
            raise CalibrationError(
                "NO_DATA", "the table has seen no sequence: collect ranges first"
            )
        for name, seen in self.inputs.items():
            held = seen.histogram
            if held.nonfinite:
                raise CalibrationError(
                    "NONFINITE",
                    f"{name}: {held.nonfinite} of its values were NaN or infinite: the model is "
                    "broken on this data, no scale can mend it",
                )
            if held.seen and held.amax == 0.0:
                raise CalibrationError(
                    "ZERO_RANGE", f"{name} was zero in every pass: it was not really reached"
                )

    def unvisited(self) -> tuple[str, ...]:
        """Activations that no pass had: they have no range, and stay as they are."""
        return tuple(name for name, seen in self.inputs.items() if not seen.histogram.seen)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping: a function of what was seen, whatever its order."""
        data = {
            "calibration_table": FORMAT,
            "model": dict(sorted(self.model.items())),
            "data": {**self.data, "records": sorted(self.records)},
            "policy": self.policy.to_dict(),
            "inputs": {name: self.inputs[name].to_dict() for name in sorted(self.inputs)},
        }
        return {**data, "sha256": digest(data)}

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps(self.to_dict(), indent=1) + "\n").encode()

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write it; the file appears whole or not at all."""
        write_atomic(Path(file), self.to_bytes())

    @property
    def sha256(self) -> str:
        """Of its content: what plans note."""
        return str(self.to_dict()["sha256"])

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Table:
        """Read a table.

        Raises:
            CalibrationError: ``DAMAGED`` where it was changed or is none, ``NEWER`` where a later
                version wrote it.
        """
        path = Path(file)
        try:
            data = json.loads(path.read_bytes())
            number = data["calibration_table"]
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise CalibrationError("DAMAGED", f"{path} is no table of ranges: {err}") from err
        if isinstance(number, int) and number > FORMAT:
            raise CalibrationError(
                "NEWER", f"{path} has format {number}, this version reads {FORMAT}: collect again"
            )
        try:
            require_keys(data, _KEYS, str(path))
            if data.pop("sha256") != digest(data):
                raise CalibrationError(
                    "DAMAGED", f"{path} was changed after it was written: collect the ranges again"
                )
            inputs = {
                name: Seen(Histogram.from_dict(one["histogram"]), dict(one["passes"]))
                for name, one in data["inputs"].items()
            }
            records = set(data["data"].pop("records"))
            return cls(
                data["model"], data["data"], Policy.from_dict(data["policy"]), records, inputs
            )
        except CalibrationError:
            raise
        except (FixedStateError, KeyError, TypeError, AttributeError) as err:
            raise CalibrationError("DAMAGED", f"{path} is damaged: {err}") from err


def model_hashes(bundle: Bundle) -> dict[str, str]:
    """sha256 of the graphs that ranges are taken from, and of the weights."""
    graphs = {role: bundle.graph(role).sha256 for role in ("denoise", "commit")}
    return {**graphs, "weights": bundle.weights}


def digest(data: Mapping[str, Any]) -> str:
    """sha256 of a JSON-ready mapping, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    return f"{value[:16]}..." if isinstance(value, str) and len(value) == 64 else repr(value)
