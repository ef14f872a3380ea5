"""What a back end offers: graphs with named ports that run on memory bound once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from fixedstate.errors import BackendError
from fixedstate.ports import Array, Port, numpy_dtype


class Binding(Protocol):
    """Arrays bound to the ports of one graph; running reads and writes them in place."""

    def run(self) -> None:
        """Run the graph on the bound arrays."""
        ...


class Session(Protocol):
    """One loaded graph."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The graph's inputs, in order."""
        ...

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The graph's outputs, in order."""
        ...

    @property
    def provider(self) -> str:
        """What it really runs on."""
        ...

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Binding:
        """Bind arrays to every port; see :func:`check_binding` for what is refused."""
        ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once on any arrays; strided ones are copied."""
        ...


def check_names(ports: tuple[Port, ...], arrays: Mapping[str, Array], what: str) -> None:
    """Refuse arrays that are not exactly those of the ports, by name and dtype.

    Raises:
        BackendError: naming what is missing, unknown or of another dtype.
    """
    names = {port.name for port in ports}
    if names != set(arrays):
        raise BackendError(
            f"{what}s differ from the graph's: missing {sorted(names - set(arrays))}, "
            f"unknown {sorted(set(arrays) - names)}"
        )
    for port in ports:
        expected = numpy_dtype(port.dtype)
        if arrays[port.name].dtype != expected:
            raise BackendError(
                f"{what} {port.name!r} is {arrays[port.name].dtype}, the graph wants {expected}"
            )


def check_binding(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Refuse memory that a back end would misread without an error.

    Raises:
        BackendError: for a strided array, or one memory as input and output of a run.
    """
    for kind, arrays in (("input", inputs), ("output", outputs)):
        for name, array in arrays.items():
            if not array.flags.c_contiguous:
                raise BackendError(f"{kind} {name!r} is strided: bind a contiguous array")
    for name, target in outputs.items():
        if not target.flags.writeable:
            raise BackendError(f"output {name!r} is read-only: bind an array that can be written")
        for other, array in [*inputs.items(), *outputs.items()]:
            if array is not target and np.may_share_memory(array, target):
                raise BackendError(f"{other!r} and output {name!r} share memory: results go wrong")
            if array is target and other != name:
                raise BackendError(f"{other!r} and output {name!r} are one array")
