"""Ranges along the trajectories that decoding visits: the runtime's own loop carries the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fixedstate.bundle import Bundle
from fixedstate.calib.data import Data, Record
from fixedstate.calib.observe import observed_engine
from fixedstate.calib.sites import Site, find_sites, inputs_of, load_graphs
from fixedstate.calib.table import COMMIT, Policy, Table
from fixedstate.calib.trajectory import Pass, Trajectory, longest_first
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.loop import Stream
from fixedstate.runtime.requests import Request, Settings

MEMORY = 1 << 30
"""Bytes of activations that a pass may give at once; more are taken in several passes."""


def collect(
    bundle: Bundle,
    data: Data,
    policy: Policy | None = None,
    *,
    split: str = "calibrate",
    records: int | None = None,
    batch: int = 4,
    memory: int = MEMORY,
    resume: Table | None = None,
    save: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Table:
    """Collect the ranges of what goes into every product with a weight.

    The table does not depend on the order of the data nor on `batch` and `memory`, to the bit.

    Args:
        bundle: An fp32 bundle of objective ``block``.
        data: The sequences.
        policy: Which passes; see :class:`Policy`.
        split: Of the data.
        records: Sequences at most; None for all of the split.
        batch: Sequences that run together.
        memory: See :data:`MEMORY`.
        resume: A table to go on with: what it has seen is not run again.
        save: Where to write the table behind every batch.
        progress: Told how far it is.

    Raises:
        CalibrationError: ``MODEL`` for a bundle that ranges cannot be taken of, ``NO_DATA``,
            ``STALE`` where `resume` is of something else.
    """
    policy = policy or Policy()
    check_collectable(bundle)
    if batch < 1:
        raise CalibrationError("POLICY", f"batch must be 1 or more; got {batch}")
    graphs = load_graphs(bundle)
    sites = find_sites(graphs)
    table = resume or Table.begin(bundle, data, split, policy, inputs_of(sites.values()))
    table.check(bundle, data, policy)
    chosen = data.split(split, bundle.spec.block_len, policy.blocks)[:records]
    left = longest_first([record for record in chosen if record.id not in table.records])
    pieces = _pieces(bundle, sites, batch, memory)
    run = _Run(bundle, policy, table)

    def opened(names: tuple[str, ...]) -> AbstractContextManager[SessionEngine]:
        return observed_engine(bundle, graphs, sites, names, run.told, min(batch, len(left)))

    with ExitStack() as stack:
        # weights of one engine are in memory at a time
        alone = stack.enter_context(opened(pieces[0])) if left and len(pieces) == 1 else None
        for start in range(0, len(left), batch):
            if progress is not None:
                progress(f"sequence {start + 1} of {len(left)}")
            run.rows = left[start : start + batch]
            for names in pieces:
                with nullcontext(alone) if alone is not None else opened(names) as engine:
                    run.trajectory(engine)
            table.records |= {record.id for record in run.rows}
            if save is not None:
                table.save(save)
    return table


def check_collectable(bundle: Bundle) -> None:
    """Refuse a bundle that ranges cannot be taken of.

    Raises:
        CalibrationError: ``MODEL``, with the reason.
    """
    if bundle.spec.objective != "block":
        raise CalibrationError(
            "MODEL",
            f"{bundle.path} has objective {bundle.spec.objective!r}: ranges are taken along block "
            "decoding, which only models of objective 'block' do",
        )
    if bundle.is_quantized:
        raise CalibrationError(
            "MODEL",
            f"{bundle.path} is already quantised: use the bundle that it was made of",
        )
    if bundle.precision.io != "float32":
        raise CalibrationError(
            "MODEL",
            f"{bundle.path} is {bundle.precision.name}: quantise the fp32 bundle; rounded twice it "
            "would only be worse",
        )


def _pieces(
    bundle: Bundle, sites: dict[str, Site], batch: int, memory: int
) -> list[tuple[str, ...]]:
    """Activations in groups, each of which a pass gives within the memory."""
    tokens = batch * bundle.spec.block_len * max(1, bundle.decode.prefill_blocks)
    pieces: list[list[str]] = [[]]
    used = 0
    for name in inputs_of(sites.values()):
        size = 4 * tokens * sites[name].rows
        if pieces[-1] and used + size > memory:
            pieces.append([])
            used = 0
        pieces[-1].append(name)
        used += size
    return [tuple(piece) for piece in pieces]


@dataclass(slots=True)
class _Run:
    """Batches of sequences on their way through the blocks, and what is counted of them."""

    bundle: Bundle
    policy: Policy
    table: Table
    rows: Sequence[Record] = ()
    name: str = ""

    def told(self, role: str, name: str, values: Array) -> None:
        """Count what a pass gave; nothing of passes that the policy leaves out."""
        if role == "commit":
            if self.policy.commit:
                self.table.add(name, COMMIT, values)
        else:
            self.table.add(name, self.name, values)

    def trajectory(self, engine: SessionEngine) -> None:
        """All blocks of the batch."""
        if self.policy.sampler == "trace":
            self._trace(engine)
            return
        blocks = self.bundle.decode.prefill_blocks
        Trajectory(self.bundle.spec, self.policy, self.rows, blocks).drive(
            [engine], before=self._begin
        )

    def _begin(self, one: Pass) -> None:
        self.name = f"{one.share:g}"

    def _trace(self, engine: SessionEngine) -> None:
        """Let the decode loop fill as many tokens as each sequence has behind its prompt."""
        self.name = "trace"
        requests = [
            Request(
                record.ids[: record.prompt_len],
                Settings(max_new_tokens=len(record.ids) - record.prompt_len, seed=self.policy.seed),
            )
            for record in self.rows
        ]
        for _ in Stream(engine, requests, self.bundle.decode):
            pass
