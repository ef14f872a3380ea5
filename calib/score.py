"""How much each format of each weight alone changes what the model says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fixedstate.bundle import Bundle, write_atomic
from fixedstate.calib.data import Data, Record
from fixedstate.calib.formats import FLOAT, Format, format_named
from fixedstate.calib.measure import Opens, compare
from fixedstate.calib.scales import input_scales
from fixedstate.calib.search import Option
from fixedstate.calib.sites import DEFAULT_KINDS, Site, find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.calib.trial import quantized_engine
from fixedstate.errors import CalibrationError, require_keys
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.snapshot import StatefulEngine

FORMAT = 1
_KEYS = ("sensitivity", "table", "records", "kl")


@dataclass(slots=True)
class Sensitivity:
    """Mean divergence that a format of one weight alone causes.

    Attributes:
        table: sha256 of the table of ranges.
        records: Names of the sequences that were scored.
        kl: By weight and format.
    """

    table: str
    records: tuple[str, ...]
    kl: dict[str, dict[str, float]] = field(default_factory=dict)

    def options(self, sites: Mapping[str, Site]) -> dict[str, dict[str, Option]]:
        """What the search picks from: every format that was scored, and the weight as it is."""
        found = {}
        for name, by_format in self.kl.items():
            site = sites[name]
            found[name] = {FLOAT: Option(4 * site.rows * site.columns, 0.0)} | {
                chosen: Option(format_named(chosen).nbytes(site.rows, site.columns), kl)
                for chosen, kl in by_format.items()
            }
        return found

    def among(self, able: Mapping[str, Sequence[Format]]) -> Sensitivity:
        """Only some formats of some weights; see :func:`choices`."""
        kl = {
            name: {one.name: by_format[one.name] for one in able[name] if one.name in by_format}
            for name, by_format in self.kl.items()
            if name in able
        }
        return Sensitivity(self.table, self.records, kl)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write it; the file appears whole or not at all."""
        data = {
            "sensitivity": FORMAT,
            "table": self.table,
            "records": list(self.records),
            "kl": {name: dict(sorted(one.items())) for name, one in sorted(self.kl.items())},
        }
        write_atomic(Path(file), (json.dumps(data, indent=1) + "\n").encode())

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Sensitivity:
        """Read what :meth:`save` wrote.

        Raises:
            CalibrationError: ``DAMAGED`` where it is no such file.
        """
        try:
            data: dict[str, Any] = json.loads(Path(file).read_bytes())
            require_keys(data, _KEYS, str(file))
            return cls(data["table"], tuple(data["records"]), data["kl"])
        except (OSError, ValueError, TypeError, KeyError) as err:
            raise CalibrationError("DAMAGED", f"{file} is no file of sensitivities: {err}") from err


def choices(
    sites: Mapping[str, Site], formats: Iterable[str], kinds: Sequence[str] = DEFAULT_KINDS
) -> dict[str, tuple[Format, ...]]:
    """The formats that each weight can have; weights without one are left out.

    Args:
        sites: By weight.
        formats: Names of formats.
        kinds: Of the products that may be quantised; see :data:`fixedstate.calib.sites.KINDS`.

    Raises:
        CalibrationError: ``NO_SITES`` where nothing is left.
    """
    wanted = [format_named(name) for name in formats]
    found = {}
    for name, site in sites.items():
        if site.kind in kinds:
            able = tuple(one for one in wanted if not one.refusal(site.rows, site.columns))
            if able:
                found[name] = able
    if not found:
        raise CalibrationError(
            "NO_SITES",
            f"no weight of the kinds {', '.join(kinds)} can have any of the formats "
            f"{', '.join(one.name for one in wanted)}: name others",
        )
    return found


def score(
    bundle: Bundle,
    table: Table,
    data: Data,
    formats: Iterable[str],
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    records: int | None = 8,
    policy: Policy | None = None,
    batch: int = 4,
    rule: str = "mse",
    resume: Sensitivity | None = None,
    save: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Sensitivity:
    """Quantise one weight at a time and compare with the model as it is, each with its own state.

    Args:
        bundle: The fp32 bundle.
        table: Its ranges.
        data: The sequences; those of the split ``score`` are used.
        formats: Names of the formats to try.
        kinds: Of the products.
        records: Sequences at most; None for all of the split.
        policy: Which passes; those of the table if not given.
        batch: Sequences that run together.
        rule: How activations are clipped; see :func:`fixedstate.calib.scales.limit_of`.
        resume: What was scored before: it is not run again.
        save: Where to write what was scored, behind every run.
        progress: Told how far it is.

    Raises:
        CalibrationError: ``STALE`` for a table, or `resume`, of something else.
    """
    table.check(bundle)
    policy = policy or table.policy
    graphs = load_graphs(bundle)
    sites = find_sites(graphs)
    chosen = data.split("score", bundle.spec.block_len, policy.blocks)[:records]
    names = tuple(record.id for record in chosen)
    found = resume or Sensitivity(table.sha256, names)
    if (found.table, found.records) != (table.sha256, names):
        raise CalibrationError(
            "STALE",
            "the sensitivities were scored with another table or other sequences: score again",
        )
    runs = [
        (name, one)
        for name, able in choices(sites, formats, kinds).items()
        for one in able
        if one.name not in found.kl.get(name, {})
    ]
    reference = opened_once(bundle)
    for number, (name, one) in enumerate(runs, 1):
        if progress is not None:
            progress(f"{one.name} in {name} ({number} of {len(runs)})")
        scales = input_scales(table, {sites[name].input: one}, rule) if one.activations else {}
        kl = divergence(
            *(bundle, graphs, sites, {name: one}, scales, chosen, policy),
            batch=batch,
            reference=reference,
        )
        found.kl.setdefault(name, {})[one.name] = kl
        if save is not None:
            found.save(save)
    return found


def opened_once(bundle: Bundle) -> Opens:
    """Opens a bundle as it is for any number of comparisons: one engine, begun anew by each."""
    return cache(lambda slots: open_engine(bundle, threads=1, slots=slots, memory="fast"))


def divergence(
    bundle: Bundle,
    graphs: Mapping[str, Any],
    sites: Mapping[str, Site],
    formats: Mapping[str, Format],
    scales: Mapping[str, float],
    records: Sequence[Record],
    policy: Policy,
    *,
    batch: int = 4,
    search: bool = False,
    reference: Opens | None = None,
) -> float:
    """Mean divergence of a bundle with some weights in other formats; nothing is written.

    Args:
        bundle: The fp32 bundle.
        graphs: Its graphs by role.
        sites: Its sites by weight.
        formats: Of the weights that are quantised.
        scales: Of the activations that are.
        records: Sequences of whole blocks.
        policy: Which passes.
        batch: Sequences that run together.
        search: Whether weights are clipped to the least squared error.
        reference: Opens the bundle as it is; :func:`opened_once` where many are compared.

    Raises:
        CalibrationError: as :func:`fixedstate.calib.trial.quantized_engine` and
            :func:`fixedstate.calib.measure.compare`.
    """
    with ExitStack() as stack:

        def candidate(slots: int) -> StatefulEngine:
            return stack.enter_context(
                quantized_engine(bundle, graphs, sites, formats, scales, slots=slots, search=search)
            )

        right = reference or opened_once(bundle)
        return compare(bundle, right, candidate, records, policy, batch=batch).kl
