"""The flight recorder: what every row saw and did, in a folder of bounded size.

This module mutates: :class:`Recorder` writes its folder, while a scheduler tells it what happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np

from fixedstate.bundle import Bundle, write_atomic
from fixedstate.errors import BundleError, StateError, UsageError
from fixedstate.ports import Array
from fixedstate.runtime.engine import Engine
from fixedstate.runtime.recording import (
    HASH,
    HEADER,
    RING,
    Begun,
    Header,
    Layout,
    hash_array,
    hash_policy,
    hash_ports,
    hash_scores,
    model_hash,
    rules_to_dict,
    state_file,
)
from fixedstate.runtime.ring import Ring
from fixedstate.runtime.rows import Row
from fixedstate.runtime.snapshot import Snapshot

EVERY = 64
"""Blocks of a row between two saved states."""

LENGTH = 1 << 16
"""Cells of the ring: a pass takes one, a commit one or more."""

STATE_BYTES = 1 << 29
"""Bytes of all saved states at most."""

_LEAST = 1 << 12  # cells: a slice of a prompt and a request's rules always fit
_KEPT = 4  # saved states per slot, where the budget allows it
_NOTE = 1 << 16  # bytes of a state file beside the tensors, of which each port takes
_NOTE_OF_PORT = 512
_PAGE = 1 << 12
_NO_HASH = bytes(HASH)


class VisibleEngine(Engine, Protocol):
    """An engine whose state can be hashed where it lies."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the graphs that run."""
        ...

    def views(self, row: int) -> dict[str, Array]:
        """A row's state by port suffix, valid until the next pass."""
        ...


@dataclass(slots=True)
class _Open:
    """A request that has begun and not ended."""

    begun: Begun
    seen: bytes = b""
    before: Array | None = None
    again: bool = False


class Recorder:
    """Watches a scheduler (:class:`fixedstate.runtime.scheduler.Watcher`) and writes a recording.

    It writes nothing but its folder. Where a state cannot be saved, the recording goes on without
    it and its header says why.

    Args:
        folder: An empty folder.
        engine: Where the passes run.
        header: What is run.

    Raises:
        StateError: where the folder cannot be written.
    """

    def __init__(self, folder: Path, engine: Engine, header: Header) -> None:
        self.folder, self.header = folder, header
        self._engine = engine
        self._spec = engine.spec
        self._layout = Layout(header.block_len, len(header.state.committed))
        self._ring = Ring(folder / RING, header.payload, header.length)
        self._open: dict[int, _Open] = {}
        self._count = 0
        self._turn = 0  # which file of a saved state is written next
        self._keys = [""] * header.states  # of the files
        self._padded = 0
        self._write(HEADER, header.to_json())  # last: a folder with it is a recording

    @classmethod
    def start(
        cls,
        folder: Path,
        engine: Engine,
        bundle: Bundle,
        *,
        name: str = "",
        threads: int | None = None,
        optimization: str = "all",
        every: int = EVERY,
        length: int = LENGTH,
        state_bytes: int = STATE_BYTES,
        force: bool = False,
    ) -> Recorder:
        """Make the folder and begin.

        Args:
            folder: A new folder.
            engine: Where the passes run.
            bundle: What it was opened from.
            name: The bundle's folder as the user gave it, for a replay that is given none.
            threads: Of a pass, as the engine was opened with.
            optimization: As the engine was opened with.
            every: Blocks of a row between two saved states.
            length: Cells of the ring: a pass takes one, a commit one or more.
            state_bytes: Of all saved states at most.
            force: Replace an older recording.

        Raises:
            UsageError: where something is there already, or a number is out of range.
            StateError: where the folder cannot be written.
        """
        if every < 1:
            raise UsageError(f"every must be 1 block or more; got {every}")
        if length < _LEAST:
            raise UsageError(f"a recording needs {_LEAST} cells or more; got {length}")
        if state_bytes < 0:
            raise UsageError(f"state_bytes must be 0 or more; got {state_bytes}")
        header = _header(engine, bundle, name, threads, optimization, every, length, state_bytes)
        _make_folder(folder, force)
        return cls(folder, engine, header)

    # --- what a scheduler tells

    def begun(self, row: Row, slot: int) -> None:
        """A request was seated: its state is the one before its prompt."""
        past = int(self._engine.past_length[slot])
        key = self._key(slot) if past else ""
        values: dict[str, Any] = {
            "past_length": past,
            "state": key,
            "room": row.room,
            "prompt": len(row.prompt),
            "rules": rules_to_dict(row.rules),
        }
        request = self._count
        self._count += 1
        number = self._ring.append(self._layout.pack_begun(slot, request, values))
        opened = _Open(Begun(number, request, slot, **values))
        self._open[row.request] = opened
        if past and key not in self._keys:
            self._save(opened, slot, -1, key)

    def committed(self, row: Row, slot: int, ids: Array, *, fused: bool) -> None:
        """A row's state now holds these tokens more."""
        opened, engine = self._open[row.request], self._engine
        past = int(engine.past_length[slot]) - len(ids)
        ports, last = self._hashes(slot, past)
        event = self._layout.pack_commit(
            slot,
            opened.begun.request,
            block=row.blocks,
            past_length=past,
            fused=fused,
            ids=ids,
            ports=ports,
            last_logits=last,
        )
        self._ring.append(event)

    def scored(self, row: Row, slot: int, canvas: Array, logits: Array) -> None:
        """A pass gave logits (L, V) for a canvas (L,)."""
        opened = self._open[row.request]
        looked = canvas == self._spec.mask_id
        if row.rules.policy.needs == "logits":
            looked = np.ones_like(looked)
        opened.seen = hash_scores(logits, np.flatnonzero(looked), self._spec.vocab_size)
        opened.before = canvas.copy()
        opened.again = row.held is not None

    def revealed(self, row: Row, slot: int, canvas: Array) -> None:
        """The policy filled slots of the canvas (L,)."""
        opened = self._open[row.request]
        digest, text = hash_policy(row.policy_state)
        event = self._layout.pack_pass(
            slot,
            opened.begun.request,
            text,
            again=opened.again,
            block=row.blocks,
            past_length=row.committed,
            step=row.step - 1,
            seed=row.rules.seed,
            made=row.count,
            fixed=len(row.remainder),
            before=opened.before,
            after=canvas,
            logits=opened.seen,
            policy=digest,
        )
        self._ring.append(event)
        if (row.blocks + 1) % self.header.every == 0 and (canvas != self._spec.mask_id).all():
            self._save(opened, slot, row.blocks)

    def ended(self, row: Row) -> None:
        """The row has its last token."""
        opened = self._open.pop(row.request, None)
        if opened is None:
            return  # it was cancelled while it waited
        values = {"reason": row.reason, "error": row.error, "tokens": row.count}
        begun = opened.begun
        self._ring.append(self._layout.pack_ended(begun.slot, begun.request, values))

    def _hashes(self, slot: int, begin: int) -> tuple[bytes, bytes]:
        """Of every port (of its columns from `begin` on), and of the last logits."""
        engine, state, ports = self._engine, self.header.state, b""
        if state.committed:
            ports = hash_ports(state, cast(VisibleEngine, engine).views(slot), begin)
        last = hash_array(engine.last_logits[slot]) if self._spec.logit_shift else _NO_HASH
        return ports, last

    # --- saved states

    def _key(self, slot: int) -> str:
        """What a state is known by."""
        past = int(self._engine.past_length[slot])
        parts = (past.to_bytes(8, "little"), *self._hashes(slot, 0))
        return hashlib.blake2b(b"".join(parts), digest_size=HASH).hexdigest()

    def _save(self, opened: _Open, slot: int, block: int, key: str = "") -> None:
        """Save the state of a row over the oldest; see :class:`SavedState` for block and key."""
        header = self.header
        if not header.states:
            return
        try:
            taken = Snapshot.take(self._engine, slot, seed=opened.begun.rules["seed"])
            state = taken.to_bytes()
            pieces = state_file(opened.begun, self._ring.next, block, key, state)
            size = sum(map(len, pieces))
            if size > header.state_bytes:
                raise StateError(
                    f"a state of {taken.past_length} tokens takes {size} bytes, more than the "
                    f"{header.state_bytes} of a file"
                )
            place = self._turn % header.states
            self._write(f"state-{place:03d}.bin", *pieces, bytes(self._padding(size)))
        except StateError as err:
            self._unsaved(str(err))
            return
        self._turn += 1
        self._keys[place] = key
        self._ring.flush()

    def _padding(self, size: int) -> int:
        """Bytes that make files of one size, where the state has one size."""
        if self.header.state.appended:
            return 0
        if size > self._padded:
            self._padded = min(-(-(size + 1024) // _PAGE) * _PAGE, self.header.state_bytes)
        return self._padded - size

    def _unsaved(self, reason: str) -> None:
        """Note the first reason in the header."""
        if not self.header.unsaved:
            self.header = replace(self.header, unsaved=reason)
            with contextlib.suppress(StateError):  # a full disk: the caller can still say it
                self._write(HEADER, self.header.to_json())

    def _write(self, name: str, *pieces: bytes) -> None:
        try:
            write_atomic(self.folder / name, *pieces)
        except BundleError as err:
            raise StateError(str(err)) from err

    # --- the end

    def close(self) -> None:
        """Bring everything to the disk and let go of it."""
        self._ring.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _header(
    engine: Engine,
    bundle: Bundle,
    name: str,
    threads: int | None,
    optimization: str,
    every: int,
    length: int,
    state_bytes: int,
) -> Header:
    spec, state = bundle.spec, bundle.state
    most = engine.state_bytes() + engine.kv_bytes(engine.limit or 0)
    most += max(_NOTE, _NOTE_OF_PORT * len(state.ports))
    if spec.logit_shift:
        most += 4 * spec.vocab_rows
    states = min(_KEPT * engine.slots, state_bytes // most) if engine.whole_blocks else 0
    unsaved = ""
    if engine.whole_blocks and not states:
        unsaved = f"a state takes up to {most} bytes, more than the {state_bytes} of all states"
    roles = cast(VisibleEngine, engine).roles
    return Header(
        bundle=name,
        digest=bundle.digest,
        weights=bundle.weights,
        model=model_hash(bundle),
        roles=roles,
        graphs={
            name: graph.sha256
            for name, graph in bundle.graphs.items()
            if name.partition("@")[0] in roles
        },
        objective=spec.objective,
        precision=bundle.precision,
        state=state,
        decode=bundle.decode,
        block_len=spec.block_len,
        versions=versions(),
        provider=engine.provider,
        threads=threads,
        cores=cores(),
        optimization=optimization,
        slots=engine.slots,
        limit=engine.limit,
        every=every,
        payload=-(-Layout(spec.block_len, len(state.committed)).pass_bytes // 8) * 8,
        length=length,
        states=states,
        state_bytes=state_bytes // states if states else 0,
        unsaved=unsaved,
    )


def versions() -> dict[str, str]:
    """Versions of what bytes depend on, by package; those that are not installed are left out."""
    out = {}
    for name in ("fixedstate", "numpy", "onnxruntime", "onnxruntime-gpu"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that cannot be recorded into, before any work starts.

    Raises:
        UsageError: where something is there already (with force: something else than a
            recording), or it cannot be made there.
    """
    if folder.exists() or folder.is_symlink():
        if not force:
            raise UsageError(f"{folder} exists: choose another name or add --force to replace it")
        if folder.is_symlink() or not (folder / HEADER).is_file():
            raise UsageError(
                f"{folder} is no recording, so it is not replaced: choose another name"
            )
    parent = folder.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{parent} is no folder that can be written: make it or choose another")


def _make_folder(folder: Path, force: bool) -> None:
    """Make the folder, in the place of an older recording if that is wanted."""
    check_folder(folder, force)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
    except OSError as err:
        raise UsageError(f"{folder} cannot be made: {err.strerror or err}") from err
