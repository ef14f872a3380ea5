"""Whole sequences through a plan on a device; see :mod:`fixedstate.runtime.sequences`.

Nothing is carried from pass to pass. Ids go to the device through pinned memory, and of the logits
only the positions that were asked for come back: of a canvas of T tokens a block of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fixedstate.errors import BackendError, CapacityError
from fixedstate.ports import Array, Port, numpy_dtype
from fixedstate.runtime.deviceengine import UNBOUNDED, DevicePass, DeviceRole, fewest_rows
from fixedstate.runtime.devicememory import DeviceDriver, OnDevice, Scratch
from fixedstate.runtime.enginefile import Plan
from fixedstate.runtime.sequences import BoundSequences, Sequences, no_memory


@dataclass(frozen=True, slots=True)
class _DeviceBound:
    """An execution context for one shape, in the memory that all shapes share.

    Attributes:
        work: The pass.
        whole: Pinned ids of all rows that it runs.
        ids: Those of the rows that count; the others fill up what a plan has at least.
    """

    owner: DeviceSequences
    work: DevicePass
    whole: Array
    ids: Array

    def run(self, spans: Sequence[tuple[int, int]]) -> list[Array]:
        return self.owner.run(self, spans)

    def close(self) -> None:
        self.work.close()


class DeviceSequences(OnDevice, Sequences):
    """The plan ``full`` on a device.

    For every shape there is an execution context of its own, whose addresses are set once, and at
    its second run a CUDA graph. Any thread may use it, one at a time from writing ids to reading
    logits: all shapes share their memory.

    Args:
        role: The plan.
        driver: The driver.
        provider: What it runs on.
        graphs: Whether passes become CUDA graphs.

    Attributes:
        returned_bytes: Bytes that passes brought to the host so far.
        sent_bytes: Bytes of ids that were sent so far.
        lengths: Fewest and most tokens of a row that the plan takes.
    """

    def __init__(
        self, role: DeviceRole, driver: DeviceDriver, *, provider: str, graphs: bool = True
    ) -> None:
        OnDevice.__init__(self, driver)
        Sequences.__init__(self)
        self.returned_bytes = self.sent_bytes = 0
        self.lengths = _lengths(role.plan)
        self._role = role
        self._provider = provider
        self._graphs = graphs
        (self._ids,), (self._logits,) = role.plan.inputs, role.plan.outputs
        self._least = fewest_rows(role.plan)
        self._scratch = Scratch(driver)
        self._stream = driver.stream()

    @property
    def provider(self) -> str:
        """What it really runs on."""
        return self._provider

    @property
    def captured(self) -> dict[str, int]:
        """Nodes of every CUDA graph that was captured, by rows and tokens."""
        return {name: work.nodes for name, work in self._works().items() if work.nodes}

    @property
    def uncaptured(self) -> dict[str, str]:
        """Why a pass runs without a CUDA graph although one was wanted, likewise."""
        return {name: work.uncaptured for name, work in self._works().items() if work.uncaptured}

    def _works(self) -> dict[str, DevicePass]:
        return {
            f"full {rows} x {length}": bound.work
            for (rows, length), bound in self._bound.items()
            if isinstance(bound, _DeviceBound)
        }

    def check(self, length: int) -> None:
        """Refuse sequences of a length that no profile takes.

        Raises:
            CapacityError: naming the profiles' range and what to do.
        """
        least, most = self.lengths
        if least <= length <= most:
            return
        ask = "more" if length < least else "fewer"
        low, high = min(least, length), max(most, length)
        raise CapacityError(
            f"a sequence of {length} tokens does not fit: {self._role.plan.file} takes {least} to "
            f"{most}: ask for {ask} new tokens, or build the engine with a --capacity from {low} "
            f"to {high}"
        )

    def bind(self, rows: int, length: int) -> BoundSequences:
        """An execution context for that many rows of that many tokens.

        Raises:
            BackendError: where TensorRT refuses it.
            CapacityError: where no profile takes it, or the device has no memory for it.
            UsageError: after :meth:`close`.
        """
        with self._held():
            self.check(length)
            return super().bind(rows, length)

    def forget(self) -> None:
        """Let go of all execution contexts; their memory stays."""
        self._stream.synchronize()
        super().forget()

    def _rows(self, rows: int) -> int:
        return max(rows, self._least)

    def _allocate(self, rows: int, length: int) -> None:
        sizes = {"B": self._rows(rows), "T": length}
        self._scratch.free()  # before there is more: logits are large
        try:
            for port in (self._logits, self._ids):
                self._scratch.device(port.name, port.nbytes(**sizes))
            self._host(self._ids, self._ids.resolve(**sizes))
        except BackendError as err:
            self._scratch.free()
            width = self._logits.resolve(**sizes)[-1]
            raise CapacityError(no_memory(sizes["B"], length, width, "device ", err)) from err

    def _make(self, rows: int, length: int) -> BoundSequences:
        sizes = {"B": self._rows(rows), "T": length}
        ports = (self._ids, self._logits)
        addresses = {port.name: self._scratch.device(port.name, 0) for port in ports}
        work = self._role.bind(
            {port.name: port.resolve(**sizes) for port in ports}, addresses, self._stream
        )
        whole = self._host(self._ids, self._ids.resolve(**sizes))
        return _DeviceBound(self, work, whole, whole[:rows])

    def _host(self, port: Port, shape: tuple[int, ...]) -> Array:
        """Pinned memory for a port; what it held before is gone."""
        return self._scratch.host(port.name, numpy_dtype(port.dtype), shape)

    def run(self, bound: _DeviceBound, spans: Sequence[tuple[int, int]]) -> list[Array]:
        """Run one shape; see :meth:`fixedstate.runtime.sequences.BoundSequences.run`.

        Raises:
            BackendError: where TensorRT or the device refuses.
            UsageError: after :meth:`close`.
        """
        length, (_, _, width) = bound.ids.shape[1], self._logits.shape
        with self._held():
            bound.whole[len(bound.ids) :] = 0  # rows that fill up; nobody looks at them
            source, ids = (self._scratch.device(port.name, 0) for port in (self._logits, self._ids))
            self._driver.to_device(ids, bound.whole, self._stream)
            bound.work.run(self._graphs)
            ends = [end - first for first, end in spans]
            whole = self._host(self._logits, (sum(ends), int(width)))
            found, at = [], 0
            for row, (first, end) in enumerate(spans):
                target = whole[at : at + end - first]
                line = target.strides[0]
                self._driver.to_host(target, source + (row * length + first) * line, self._stream)
                found.append(target)
                at += end - first
            self._stream.synchronize()
            self._scratch.drop_replaced()
            self.sent_bytes += bound.whole.nbytes
            self.returned_bytes += whole.nbytes
            return found

    def _give_back(self, stack: ExitStack) -> None:
        stack.callback(self._stream.__exit__, None, None, None)
        stack.callback(self._scratch.free)
        stack.callback(self.forget)


def _lengths(plan: Plan) -> tuple[int, int]:
    """Fewest and most tokens of a row that the profiles of a plan take."""
    spans = [[bound[1] for bound in profile["input_ids"]] for profile in plan.profiles]
    least = min((span[0] for span in spans), default=1)
    return least, max((span[-1] for span in spans), default=UNBOUNDED)
