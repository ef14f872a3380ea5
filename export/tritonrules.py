"""Rules that a Triton model configuration has to keep beside its schema.

The server checks few of them: the others end in tensors that are garbage, swapped or missing while
the model counts as loaded. Rules of implicit state follow its documentation and the sources of
release 24.10 (triton-inference-server/core, ``sequence_state.cc``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from fixedstate.errors import ExportError, UsageError
from fixedstate.export.tritonconfig import data_type
from fixedstate.ports import Port
from fixedstate.serve.tritonmodel import OLDEST

STATEFUL = ("onnxruntime", "tensorrt", "pytorch")
"""Back ends of the server that have implicit state."""

SERVERS = {OLDEST: "2.51.0"}
"""Version of the server by release, for those that something here depends on."""

_RELEASE = re.compile(r"\d\d\.(0[1-9]|1[0-2])")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def check_target(release: str) -> None:
    """Refuse a release of the server that this was never tried with.

    Raises:
        UsageError: for one that is none, or older than the oldest one.
    """
    if not _RELEASE.fullmatch(release):
        raise UsageError(
            f"target version {release!r} is no release of Triton: give year and month, as {OLDEST}"
        )
    if release < OLDEST:
        raise UsageError(
            f"target version {release} is older than {OLDEST} (server {SERVERS[OLDEST]}), the "
            "oldest release that repositories are written for: decoupled responses, cancellation "
            "and implicit state came one by one before it; use a newer server"
        )


def check_name(name: str) -> None:
    """Refuse a name that is no folder's or that a URL would have to escape.

    Raises:
        UsageError: quoting it.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"model name {name!r}: use letters, digits, _ and -, the first one a letter, 64 at most"
        )


def check(config: Any, inputs: Sequence[Port] = (), outputs: Sequence[Port] = ()) -> None:
    """Refuse a configuration that breaks a rule.

    Args:
        config: A message ``ModelConfig``.
        inputs: Of the graph that it serves; none for a model in Python.
        outputs: Likewise.

    Raises:
        ExportError: naming every broken rule.
    """
    found = broken(config, inputs, outputs)
    if found:
        raise ExportError(f"config.pbtxt of {config.name!r}: {'; '.join(found)}")


def broken(config: Any, inputs: Sequence[Port] = (), outputs: Sequence[Port] = ()) -> list[str]:
    """The broken rules, one line each; arguments as in :func:`check`."""
    found = _names(config) + _states(config)
    if config.HasField("sequence_batching"):
        if not config.sequence_batching.max_sequence_idle_microseconds:
            found.append("max_sequence_idle_microseconds is not set: a client that leaves keeps it")
        if config.response_cache.enable:
            found.append("a response cache answers sequences without their state")
    if inputs or outputs:
        states = config.sequence_batching.state
        found += _ports(config, inputs, config.input, {s.input_name: s for s in states})
        found += _ports(config, outputs, config.output, {s.output_name: s for s in states})
    return found


def _names(config: Any) -> list[str]:
    """Every tensor stands once."""
    states = config.sequence_batching.state
    found = []
    for what, names in (
        ("input", [t.name for t in config.input] + [s.input_name for s in states]),
        ("output", [t.name for t in config.output] + [s.output_name for s in states]),
    ):
        found += [f"{what} {name!r} stands twice" for name in _twins(names)]
    return found


def _twins(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


def _states(config: Any) -> list[str]:
    states = list(config.sequence_batching.state)
    if not states:
        return []
    found = []
    if config.backend not in STATEFUL:
        found.append(f"back end {config.backend!r} has no implicit state")
    if config.max_batch_size < 1:
        found.append("max_batch_size is 0: sequences are batched, so it is 1 or more")
    by_input = [s.output_name for s in sorted(states, key=lambda s: s.input_name)]
    if by_input != sorted(s.output_name for s in states):
        found.append(
            "inputs and outputs of states do not sort alike: the server pairs them by that order "
            "and would swap states"
        )
    on_card = {group.kind for group in config.instance_group} == {1}  # KIND_GPU
    for state in states:
        name = state.input_name
        if any(dim < 1 for dim in state.dims):
            found.append(f"state {name!r} has a variable dimension, which becomes 1")
        initial = list(state.initial_state)
        if len(initial) != 1 or not initial[0].zero_data or not initial[0].name:
            found.append(f"state {name!r} does not begin with zeros: it would begin with garbage")
        elif (initial[0].data_type, list(initial[0].dims)) != (state.data_type, list(state.dims)):
            found.append(f"state {name!r} begins with another shape or type")
        if state.use_growable_memory and not (state.use_same_buffer_for_input_output and on_card):
            found.append(f"state {name!r} grows, which needs one buffer for both, and a card")
    return found


def _ports(
    config: Any, ports: Sequence[Port], tensors: Iterable[Any], states: dict[str, Any]
) -> list[str]:
    """Each port of the graph is listed, with its type, and its shape without the batch axis."""
    listed = {tensor.name: tensor for tensor in tensors} | states
    found = [
        f"{name!r} is no port of the graph" for name in listed.keys() - {p.name for p in ports}
    ]
    for port in ports:
        entry = listed.get(port.name)
        if entry is None:
            found.append(f"port {port.name!r} is not listed")
            continue
        expected = entry.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
        if entry.data_type != expected[data_type(port)].number:
            found.append(f"port {port.name!r} is {port.dtype}, the configuration has another type")
        batched = config.max_batch_size > 0
        if batched and (not port.shape or port.shape[0] != "B"):
            found.append(f"port {port.name!r} has no batch axis, but max_batch_size is not 0")
            continue
        shape = [dim if isinstance(dim, int) else -1 for dim in port.shape[int(batched) :]]
        reshaped = entry.HasField("reshape") if "reshape" in entry.DESCRIPTOR.fields_by_name else 0
        dims = list(entry.reshape.shape) if reshaped else list(entry.dims)
        if dims != shape:
            found.append(f"port {port.name!r} has shape {shape}, the configuration has {dims}")
    return found
