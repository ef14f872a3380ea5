"""The passes over state that lies on a device, under TensorRT or a provider of ONNX Runtime.

It answers as :class:`fixedstate.runtime.engine.SessionEngine` does, so that the decode loop is the
same. State never comes to the host between passes; ids and lengths go there through pinned memory,
and logits, or what a reduced head gives, come back.

This module mutates, through :class:`fixedstate.runtime.devicebuffers.DeviceBuffers`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fixedstate.errors import BackendError, UsageError
from fixedstate.plugins.driver import Stream
from fixedstate.ports import Array, Port, numpy_dtype
from fixedstate.runtime.devicebuffers import DeviceBuffers
from fixedstate.runtime.devicememory import DeviceDriver, OnDevice, Scratch
from fixedstate.runtime.engine import PassEngine, check_commit, check_denoise
from fixedstate.runtime.enginefile import Plan
from fixedstate.spec import ModelSpec
from fixedstate.state import StatePort, StateSpec, head_ports, top_k_of

KEPT_PASSES = 64
"""Passes of one shape over the same slots that are kept, each a context and a CUDA graph."""

UNBOUNDED = 2**31 - 1
"""What a plan without profiles takes of rows, tokens or columns."""


class DevicePass(Protocol):
    """A pass bound to shapes and addresses."""

    nodes: int
    uncaptured: str

    def run(self, graphs: bool = True) -> None:
        """Put it into its stream."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class DeviceRole(Protocol):
    """A plan on the device."""

    @property
    def plan(self) -> Plan:
        """Its ports, profiles and aliases."""
        ...

    def bind(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        stream: Stream,
    ) -> DevicePass:
        """A pass of these shapes on these addresses."""
        ...


@dataclass(frozen=True, slots=True)
class _Input:
    """A small input on its way: pinned memory, and where it goes."""

    host: Array
    address: int


@dataclass(frozen=True, slots=True)
class _Bound:
    """One pass with its memory.

    Attributes:
        work: The pass.
        inputs: What is written anew for every run, by port.
        outputs: Address, port and shape of what comes to the host, by port.
        columns: Port, address and width of appended columns that the runtime has to take over.
        enter: Rows to copy (port, target, source) before the run, where slots are not aligned.
        leave: Likewise behind it.
        addresses: All that it was bound to.
    """

    work: DevicePass
    inputs: dict[str, _Input]
    outputs: dict[str, tuple[int, Port, tuple[int, ...]]]
    columns: tuple[tuple[StatePort, int, int], ...]
    enter: tuple[tuple[StatePort, int, int], ...]
    leave: tuple[tuple[StatePort, int, int], ...]
    addresses: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Ran:
    """A pass that ran: what it gave to the host."""

    bound: _Bound
    given: dict[str, Array]
    last_logits: Array | None


class DeviceEngine(OnDevice, PassEngine):
    """State on a device and the passes over it; see :class:`fixedstate.runtime.engine.Engine`.

    For every role, rows, blocks and side of the pairs there is a pass of its own: an execution
    context whose addresses are set once, and at the second run its CUDA graph. So pairs trade
    places by another pass taking its turn, and nothing is ever bound anew. A run that is not taken
    over writes nothing but the other sides of pairs, which hold nothing.

    Calls from several threads wait for one another, and each thread gets its results in memory of
    its own. A row belongs to who uses it, as on every engine.

    Args:
        spec: The model.
        state: What is carried, at the engine's precision.
        roles: By role, as for :class:`fixedstate.runtime.engine.SessionEngine`.
        driver: The driver.
        slots: Rows at most.
        limit: Committed tokens per row at most; None for what the profiles take.
        capacity: Columns of keys and values at first.
        weights: Hash of the weights, which saved states are held against.
        provider: What the passes run on.
        graphs: Whether passes become CUDA graphs.
        stream: That passes and copies are put in, where the roles work in one of their own; None
            makes one. It stays the caller's.

    Attributes:
        roles: Roles of the plans, sorted.
        weights: Hash of the weights.
        returned_bytes: Bytes that passes brought to the host so far.
        sent_bytes: Bytes of ids, lengths and places that were sent so far.

    Raises:
        BackendError: where a role is missing, or plans update ports in place in different ways.
        CapacityError: where the device's memory is too small.
        UsageError: for more slots than the engine was built for.
    """

    buffers: DeviceBuffers
    _part, _holder, _verb = "plan", "engine", "build"
    _fusing = "build the engine with that role"

    def __init__(
        self,
        spec: ModelSpec,
        state: StateSpec,
        roles: Mapping[str, DeviceRole],
        driver: DeviceDriver,
        *,
        slots: int = 1,
        limit: int | None = None,
        capacity: int = 0,
        weights: str = "",
        provider: str = "device",
        graphs: bool = True,
        stream: Stream | None = None,
    ) -> None:
        OnDevice.__init__(self, driver)
        PassEngine.__init__(self, spec, slots, weights)
        self.provider = provider
        self.returned_bytes = self.sent_bytes = 0
        self._roles = self._serve(roles)
        plans = [role.plan for role in self._roles.values()]
        check_slots(plans, slots)
        columns = _columns(plans)
        if state.appended and columns[1] < UNBOUNDED:
            limit = columns[1] if limit is None else min(limit, columns[1])
        self._graphs = graphs
        self._own_stream = stream is None
        self._stream = driver.stream() if stream is None else stream
        self._scratch = Scratch(driver)
        self._results: dict[int, Scratch] = {}
        self._passes: OrderedDict[tuple[Any, ...], _Bound] = OrderedDict()
        self._ports = {port.past.name: port for port in state.ports}
        self._presents = {port.present.name: port for port in state.ports}
        self._given = {port.name for port in head_ports(spec, self.head)}
        self._widths = {name: _widest(role.plan, spec) for name, role in self._roles.items()}
        self._least = {name: fewest_rows(role.plan) for name, role in self._roles.items()}
        try:
            self.buffers = DeviceBuffers(
                driver,
                self._stream,
                state,
                slots,
                spec.block_len,
                capacity,
                limit,
                spec.vocab_rows if spec.logit_shift else 0,
                in_place=_in_place(plans, state),
                columns=columns,
            )
        except BaseException:
            if self._own_stream:
                self._stream.__exit__(None, None, None)
            raise
        self.buffers.on_move = self._forget

    # --- what it is

    @property
    def top_k(self) -> int:
        """Tokens that the head ``top_k`` gives."""
        return top_k_of(self._roles["denoise"].plan.outputs)

    @property
    def captured(self) -> dict[str, int]:
        """Nodes of every CUDA graph that was captured, by role, rows, blocks and side."""
        return {_named(key): b.work.nodes for key, b in self._passes.items() if b.work.nodes}

    @property
    def uncaptured(self) -> dict[str, str]:
        """Why a pass runs without a CUDA graph although one was wanted, likewise."""
        return {
            _named(key): b.work.uncaptured for key, b in self._passes.items() if b.work.uncaptured
        }

    # --- passes

    def _denoise(self, ids: Array, places: Array | None, first: int) -> dict[str, Array]:
        ids = check_denoise(self.spec, self.slots, ids, first)
        places = self._checked(ids.shape[0], places)
        with self._held():
            ran = self._run("denoise", ids, first, 0, places)
            self.buffers.advance_step(ids.shape[0], first)
            return ran.given

    def commit(self, ids: Array, commit_length: Array, first: int = 0) -> None:
        """Carry clean tokens into each row's state; see :class:`Engine`.

        More blocks than a profile takes are committed in slices of as many as it does, counted from
        the first one, whatever runs beside a row.

        Raises:
            CapacityError: where a row has no room; nothing was run.
        """
        ids, lengths = check_commit(self.spec, self.slots, ids, commit_length, first)
        rows, total = ids.shape
        width = min(self._widths["commit"], total)
        with self._held():
            self._reserve("commit", rows, lengths, first, -(-total // width) * width)
            for start in range(0, total, width):
                piece = ids[:, start : start + width]
                counts = np.clip(lengths - start, 0, piece.shape[1])
                if start and not counts.any():
                    break
                ran = self._run("commit", piece, first, counts, None)
                self._take_over(ran, rows, counts, first)

    def _commit_denoise(self, ids: Array, places: Array | None, first: int) -> dict[str, Array]:
        ids = check_denoise(self.spec, self.slots, ids, first, blocks=2)
        rows = ids.shape[0]
        places = self._checked(rows, places)
        lengths = np.full(rows, self.spec.block_len, np.int64)
        with self._held():
            self._reserve("commit_denoise", rows, lengths, first, ids.shape[1])
            for row in range(first, first + rows):
                self.buffers.begin_block(row)  # the pass reads what the new block begins with
            ran = self._run("commit_denoise", ids, first, lengths, places)
            self._take_over(ran, rows, lengths, first)
            self.buffers.advance_step(rows, first)
            return ran.given

    def warm_up(self, rows: int = 1, blocks: int = 1, places: int = 1) -> None:
        """Run and capture the passes of that many rows from slot 0 on, ahead of the first request.

        No live byte changes: nothing is committed (commit_length is 0) and nothing taken over, so
        passes write the other sides of pairs, which hold nothing, and columns behind each row's.

        Args:
            rows: k.
            blocks: Of a commit pass.
            places: Positions that a reduced head is asked for.

        Raises:
            CapacityError: where the profiles do not take them.
        """
        length, fill = self.spec.block_len, self.spec.mask_id or 0
        asked = None if self.head == "logits" else np.zeros((rows, places), np.int64)
        with self._held():
            self._reserve("commit", rows, np.zeros(rows, np.int64), 0, blocks * length)
            counted = self.returned_bytes, self.sent_bytes
            for _ in range(2):
                for role, width in (("denoise", length), ("commit", blocks * length)):
                    ids = np.full((rows, width), fill, np.int64)
                    for _ in range(2):
                        self._run(role, ids, 0, 0, asked if role == "denoise" else None)
                self.buffers.flip(rows)
            self.returned_bytes, self.sent_bytes = counted

    def _reserve(self, role: str, rows: int, lengths: Array, first: int, width: int) -> None:
        """Room for a commit; where its columns are written in place, for all of the pass."""
        plan = self._roles[role].plan
        appended = {port.present.name for port in self.state.appended}
        whole = width if appended & set(plan.aliases) else 0
        self.buffers.reserve(rows, lengths, first, whole)

    def _take_over(self, ran: _Ran, rows: int, lengths: Array, first: int) -> None:
        """Append the columns that a pass made, and trade sides."""
        for port, address, width in ran.bound.columns:
            self.buffers.append(port, address, width, lengths, first)
        self.buffers.commit(rows, lengths, ran.last_logits, first)

    def _run(
        self,
        role: str,
        ids: Array,
        first: int,
        commit_length: Array | int,
        places: Array | None,
    ) -> _Ran:
        """Run one pass on slots first..; what it wrote is not taken over yet."""
        rows = ids.shape[0]
        asked = 1 if places is None else places.shape[1]
        bound = self._bind(role, first, rows, ids.shape[1] // self.spec.block_len, asked)
        values = {
            "input_ids": ids,
            "past_length": self.past_length[first : first + rows],
            "commit_length": commit_length,
            "open_slots": 0 if places is None else places,
        }
        for name, given in bound.inputs.items():
            given.host[:rows], given.host[rows:] = values[name], 0
            self._driver.to_device(given.address, given.host, self._stream)
            self.sent_bytes += given.host.nbytes
        for port, target, source in bound.enter:
            self.buffers.copy_rows(port, target, source, rows)
        bound.work.run(self._graphs)
        for port, target, source in bound.leave:
            self.buffers.copy_rows(port, target, source, rows)
        wanted = set() if role == "commit" else set(self._given)
        wanted |= set() if role == "denoise" else {"last_logits"}
        found = {
            name: self._to_host(output, shape, address)[:rows]
            for name, (address, output, shape) in bound.outputs.items()
            if name in wanted
        }
        self._stream.synchronize()
        return _Ran(bound, found, found.pop("last_logits", None))

    def _to_host(self, port: Port, shape: tuple[int, ...], address: int) -> Array:
        """An output in pinned memory of the calling thread, once the stream has come there."""
        results = self._results.setdefault(threading.get_ident(), Scratch(self._driver))
        dtype = numpy_dtype(port.dtype)
        # so that it never moves
        largest = port.resolve(B=self._most_rows, R=self.spec.block_len)
        whole = results.host(port.name, dtype, largest).reshape(-1)
        array = whole[: int(np.prod(shape))].reshape(shape)
        self._driver.to_host(array, address, self._stream)
        self.returned_bytes += array.nbytes
        return array

    # --- binding

    def _bind(self, role: str, first: int, rows: int, blocks: int, asked: int) -> _Bound:
        sides = self.buffers.align(rows, first), self.buffers.align_step(rows, first)
        key = (role, first, rows, blocks, asked, *sides)
        bound = self._passes.get(key)
        if bound is None:
            bound = self._make(*key)
            if replaced := self._scratch.replaced:  # older passes may hold that memory
                self._forget(replaced)
            elif len(self._passes) >= KEPT_PASSES:
                self._passes.popitem(last=False)[1].work.close()
            self._passes[key] = bound
        self._passes.move_to_end(key)
        return bound

    def _make(
        self, role: str, first: int, rows: int, blocks: int, asked: int, side: int, step_side: int
    ) -> _Bound:
        plan = self._roles[role].plan
        length = self.spec.block_len
        # where a plan takes no fewer rows, others of no slot fill up: what they hold is any state,
        # what they are given is mask ids and no token to commit, what they give is not looked at
        filled = max(rows, self._least[role])
        sizes = {"B": filled, "n": blocks, "m": blocks, "C": self.buffers.capacity, "R": asked}
        direct = filled == rows and self.buffers.aligned(first)
        addresses: dict[str, int] = {}
        inputs: dict[str, _Input] = {}
        enter, leave, columns = [], [], []
        for port in plan.inputs:
            pair = self._ports.get(port.name)
            if pair is None:
                made = self._input(port, sizes)
                inputs[port.name], addresses[port.name] = made, made.address
                continue
            lies = self.buffers.past(pair, step_side if pair.scope == "step" else side, first)
            addresses[port.name] = lies if direct else self._staged(port, sizes)
            if not direct:
                enter.append((pair, addresses[port.name], lies))
        outputs: dict[str, tuple[int, Port, tuple[int, ...]]] = {}
        for port in plan.outputs:
            pair, alias = self._presents.get(port.name), plan.aliases.get(port.name)
            if alias is not None:
                addresses[port.name] = addresses[alias]
            elif pair is not None and pair.update == "swap" and direct:
                which = step_side if pair.scope == "step" else side
                addresses[port.name] = self.buffers.present(pair, which, first)
            else:
                addresses[port.name] = self._staged(port, sizes)
            if pair is None:
                outputs[port.name] = addresses[port.name], port, port.resolve(**sizes)
            elif pair.update == "append":
                if alias is None:
                    columns.append((pair, addresses[port.name], blocks * length))
                elif not direct:
                    lies = self.buffers.past(pair, side, first)
                    leave.append((pair, lies, addresses[port.name]))
            elif not direct:
                which = step_side if pair.scope == "step" else side
                leave.append((pair, self.buffers.present(pair, which, first), addresses[port.name]))
        shapes = {port.name: port.resolve(**sizes) for port in (*plan.inputs, *plan.outputs)}
        work = self._roles[role].bind(shapes, addresses, self._stream)
        return _Bound(
            work,
            inputs,
            outputs,
            tuple(columns),
            tuple(enter),
            tuple(leave),
            frozenset((*addresses.values(), *(one.host.ctypes.data for one in inputs.values()))),
        )

    def _largest(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes that memory is allocated for, so that it seldom moves.

        All rows and places; blocks by powers of two, since keys and values of a slice are large.
        """
        blocks = self._rounded(sizes["n"])
        return {**sizes, "B": self._most_rows, "R": self.spec.block_len, "n": blocks, "m": blocks}

    @property
    def _most_rows(self) -> int:
        """Of a pass, those that fill up included."""
        return max(self.slots, *self._least.values())

    def _rounded(self, blocks: int) -> int:
        """The next power of two, or what the widest pass takes where that is less."""
        most = max(self._widths.values()) // self.spec.block_len
        return min(1 << (max(blocks, 1) - 1).bit_length(), max(most, blocks))

    def _input(self, port: Port, sizes: Mapping[str, int]) -> _Input:
        shape = port.resolve(**sizes)
        widest = max(self._widths.values())
        if widest == UNBOUNDED:
            widest = self._rounded(sizes["n"]) * self.spec.block_len
        largest = self._most_rows, widest  # of ids; the others are smaller
        whole = self._scratch.host(port.name, numpy_dtype(port.dtype), largest).reshape(-1)
        host = whole[: int(np.prod(shape))].reshape(shape)
        return _Input(host, self._scratch.device(port.name, whole.nbytes))

    def _staged(self, port: Port, sizes: Mapping[str, int]) -> int:
        """Memory outside the slots for a port's rows, which begins where TensorRT can read it."""
        return self._scratch.device(port.name, port.nbytes(**self._largest(sizes)))

    def _forget(self, addresses: Collection[int] | None = None) -> None:
        """Let go of the passes that hold one of these addresses, or of all; then of the memory."""
        self._stream.synchronize()
        for key, bound in list(self._passes.items()):
            if addresses is None or not bound.addresses.isdisjoint(addresses):
                del self._passes[key]
                bound.work.close()
        self._scratch.drop_replaced()

    # --- rows

    def begin_block(self, row: int) -> None:
        """Forget what earlier denoise passes left in the state of scope ``step``."""
        with self._held():
            self.buffers.begin_block(row)

    def reset(self, row: int, room: int = 0) -> None:
        """Give a row the state it has before its first token."""
        with self._held():
            self.buffers.reset(row)

    def move(self, source: int, target: int) -> None:
        """Copy a row's state over another row."""
        with self._held():
            self.buffers.move(source, target)

    def swap(self, row: int, other: int) -> None:
        """Exchange the states of two rows."""
        with self._held():
            self.buffers.swap(row, other)

    def read(self, row: int) -> dict[str, Array]:
        """A copy of a row's state by port suffix; keys and values of committed tokens only."""
        with self._held():
            return self.buffers.read(row)

    def views(self, row: int) -> dict[str, Array]:
        """The same: on a device nothing can be looked at where it lies."""
        return self.read(row)

    def write(
        self,
        row: int,
        arrays: Mapping[str, Array],
        past_length: int,
        last_logits: Array | None = None,
    ) -> None:
        """Give a row a state that :meth:`read` returned, from here or elsewhere."""
        with self._held():
            self.buffers.write(row, arrays, past_length, last_logits)

    # --- life

    def _give_back(self, stack: ExitStack) -> None:
        if self._own_stream:
            stack.callback(self._stream.__exit__, None, None, None)
        for scratch in (self._scratch, *self._results.values()):
            stack.callback(scratch.free)
        stack.callback(self.buffers.free)
        stack.callback(self._forget)


def _named(key: tuple[Any, ...]) -> str:
    role, first, rows, blocks, asked, side, step_side = key
    return (
        f"{role} rows {first}..{first + rows - 1} blocks {blocks} R {asked} side {side}{step_side}"
    )


def check_slots(plans: list[Plan], slots: int) -> None:
    """Refuse more rows than plans take.

    Raises:
        UsageError: naming one of them and what to do.
    """
    for plan in plans:
        most = _most(plan, 0, 1)
        if slots > most:
            raise UsageError(
                f"{slots} slots were asked for; {plan.file} takes {most} rows at most: ask for "
                "less, or build it with a larger --batch"
            )


def fewest_rows(plan: Plan) -> int:
    """Rows that a pass has at least."""
    return min((profile["input_ids"][0][0] for profile in plan.profiles), default=1)


def _widest(plan: Plan, spec: ModelSpec) -> int:
    """Tokens of a row that the widest profile takes in one pass."""
    most = _most(plan, 1, spec.block_len)
    return most if most == UNBOUNDED else max(most // spec.block_len, 1) * spec.block_len


def _most(plan: Plan, axis: int, fixed: int) -> int:
    """The most that profiles take of an axis of ``input_ids``.

    Without profiles that is anything, where the axis is dynamic; else what it is, or `fixed` where
    the plan does not even have that port.
    """
    sizes = [profile["input_ids"][2][axis] for profile in plan.profiles]
    for port in plan.inputs:
        if port.name == "input_ids" and not sizes:
            size = port.shape[axis]
            sizes.append(size if isinstance(size, int) else UNBOUNDED)
    return max(sizes, default=fixed)


def _columns(plans: list[Plan]) -> tuple[int, int]:
    """Least and most columns of keys and values that all plans take."""
    least, most = 1, UNBOUNDED
    for plan in plans:
        for port in plan.inputs:
            if "C" not in port.shape or not plan.profiles:
                continue
            axis = port.shape.index("C")
            least = max(least, min(profile[port.name][0][axis] for profile in plan.profiles))
            most = min(most, max(profile[port.name][2][axis] for profile in plan.profiles))
    return least, most


def _in_place(plans: list[Plan], state: StateSpec) -> set[str]:
    """Suffixes of swap ports that passes update where they lie.

    Raises:
        BackendError: where some plans do and others do not: their buffers would part.
    """
    found: set[str] = set()
    for port in (*state.swapped, *state.stepped):
        name = port.present.name
        ways = {
            name in plan.aliases
            for plan in plans
            if any(output.name == name for output in plan.outputs)
        }
        if len(ways) > 1:
            raise BackendError(
                f"some plans update {port.past.name} in place and others do not: build all of them "
                "one way"
            )
        if True in ways:
            found.add(port.suffix)
    return found
