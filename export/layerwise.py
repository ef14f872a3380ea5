"""The comparison of models too large to be held whole: part by part, each with its real weights.

Every layer, the embedding and the head become graphs of their own, one in memory at a time. They
are traced and finished like the graphs of the bundle, layers of one kind from one trace, and read
their weights out of the bundle's own file, at the places where its graphs read them; PyTorch has
them from the checkpoint. Two layers between embedding and head are compared from end to end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from torch import Tensor

from fixedstate.bundle import Bundle, Graph
from fixedstate.errors import ParityError
from fixedstate.export import parity
from fixedstate.export.denoiser import BlockModel, Denoiser, RoleGraph
from fixedstate.export.parts import Part, parts_of
from fixedstate.export.passes import MIN_ONNXRUNTIME, finish_with, serialised
from fixedstate.export.stored import as_stored
from fixedstate.export.trace import trace_graph, without_weights
from fixedstate.export.weightfile import Place, places_in, point_at_weights
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.ports import Port
from fixedstate.runtime.ort import open_sessions
from fixedstate.runtime.session import Session
from fixedstate.state import Precision, StateSpec, split_role

WHOLE_UP_TO = 1 << 30
"""Bytes of weights up to which whole graphs are compared."""

_BATCHES = (1, 3)
_BLOCKS = (1, 3)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Traced:
    """The graph of a role, for all parts of one key.

    Attributes:
        model: The finished graph, its weights without places.
        offered: Inputs that the part has.
        inputs: Those of them that the graph reads.
        outputs: What it gives.
    """

    model: ir.Model
    offered: tuple[Port, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """The PyTorch sides of a part, made anew whenever one is asked for and not kept."""

    part: Part
    tensors: Mapping[str, Tensor]
    precision: Precision

    def plain(self) -> Denoiser:
        """In float32, with the weights as the bundle stores them."""
        return self.part.model(as_stored(self.tensors, self.precision))

    def exact(self) -> BlockModel:
        """The same in float64."""
        return self.plain().double()

    def peer(self, precision: Precision) -> Denoiser:
        """The same at the bundle's own precision."""
        return self.part.model(self.tensors, precision)


def compare_layers(
    bundle: Bundle,
    tensors: Mapping[str, Tensor],
    *,
    seed: int = 0,
    progress: Say | None = None,
) -> dict[str, Any]:
    """Compare the parts of a bundle with the PyTorch denoiser.

    Args:
        bundle: A bundle that is being staged: graphs of the parts are written beside its own for
            as long as they are compared.
        tensors: The checkpoint's, own layout; read one at a time.
        seed: Of ids, hidden values and states.
        progress: Told what is compared.

    Returns:
        The content of parity.json.

    Raises:
        ParityError: where the bundle's graphs read a weight that no part has, or two of them one
            weight from different places.
    """
    say = progress or (lambda _: None)
    places = _places(bundle)
    reduced = [graph for role, graph in bundle.graphs.items() if split_role(role)[1] != "logits"]
    parts = parts_of(bundle.spec, bool(reduced), *{graph.top_k for graph in reduced})
    ids, kind = parity.real_tokens(bundle)
    traced: dict[object, _Traced] = {}
    trials: list[parity.Trial] = []
    used: set[str] = set()
    for number, part in enumerate(parts):
        say(f"comparing {part.name} with PyTorch ({number + 1} of {len(parts)})")
        sides = _Made(part, part.tensors(tensors), bundle.precision)
        graphs = {}
        for role in _roles(bundle, part):
            if (part.key, role) not in traced:
                traced[part.key, role] = _trace(part, bundle, role)
            graphs[role] = traced[part.key, role]
        with _beside(bundle, part, graphs, places) as (cut, names):
            used |= names
            trials += _passes(cut, part, graphs, sides, seed)
            if part.whole and {"denoise", "commit"} <= set(graphs):
                trials += parity.trajectory(_OneAtATime(cut), sides, ids, bundle.precision)
    missed = sorted(set(places) - used)
    if missed:
        raise ParityError(
            f"the bundle's graphs read {', '.join(missed[:3])} ({len(missed)} weights in all), "
            "which no compared part has: please report this model"
        )
    return parity.report_of(bundle, trials, kind, "layers", [part.name for part in parts])


def _places(bundle: Bundle) -> dict[str, Place]:
    """Where the bundle's graphs read their weights, by name.

    Raises:
        ParityError: where two graphs do not agree.
    """
    places: dict[str, Place] = {}
    for role, graph in bundle.graphs.items():
        for name, place in places_in(ir.load(bundle.path / graph.file)).items():
            if places.setdefault(name, place) != place:
                raise ParityError(
                    f"graph {role!r} reads weight {name!r} from {place}, another graph from "
                    f"{places[name]}: export again, and please report this model"
                )
    return places


def _roles(bundle: Bundle, part: Part) -> list[str]:
    """The bundle's roles that a part has; where nothing is carried, a pass is a pass."""
    roles = {role: split_role(role) for role in sorted(bundle.graphs) if "@" not in role}
    if not part.layers:
        roles = {role: both for role, both in roles.items() if both[0] in ("denoise", "full")}
    if not part.heads:
        roles = {role: both for role, both in roles.items() if both[1] == "logits"}
    elif part.layers and not part.embeds:
        roles = {role: both for role, both in roles.items() if both[1] != "logits"}
    return list(roles)


def _trace(part: Part, bundle: Bundle, role: str) -> _Traced:
    """The graph of a part, by the stages that make the bundle's own.

    Operators get the bodies they have in the whole model, which depend on all its layers.
    """

    def make(tensors: Mapping[str, Tensor]) -> Denoiser:
        return part.model(part.tensors(tensors), bundle.precision, TRACED)

    graph = RoleGraph(without_weights(bundle.spec, make), role)
    model = trace_graph(graph)
    common.RemoveUnusedNodesPass()(model)
    kept = [
        (value, port)
        for value, port in zip(model.graph.inputs, graph.inputs, strict=True)
        if value.uses() or value.is_graph_output()
    ]
    model.graph.inputs[:] = [value for value, _ in kept]
    inputs = tuple(port for _, port in kept)
    finish_with(model, bundle.spec, bundle.precision, role, inputs, graph.outputs)
    return _Traced(model, graph.inputs, inputs, graph.outputs)


@contextlib.contextmanager
def _beside(
    bundle: Bundle, part: Part, graphs: Mapping[str, _Traced], places: Mapping[str, Place]
) -> Iterator[tuple[Bundle, set[str]]]:
    """A part as a bundle beside the weights it reads, for as long as it is compared."""
    names: set[str] = set()
    listed = {}
    files = []
    try:
        for role, graph in graphs.items():
            file = bundle.path / f".part-{role}.onnx"
            files.append(file)
            names |= set(point_at_weights(graph.model, places, bundle.path, part.name_of))
            file.write_bytes(serialised(graph.model))
            listed[role] = Graph(role, file.name, "", MIN_ONNXRUNTIME, graph.inputs, graph.outputs)
        state = StateSpec.of(part.spec, bundle.precision)
        yield replace(bundle, spec=part.spec, state=state, graphs=listed), names
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _passes(
    cut: Bundle, part: Part, graphs: Mapping[str, _Traced], sides: _Made, seed: int
) -> Iterator[parity.Trial]:
    """Single passes of a part; one side at a time is in memory."""
    model = sides.plain()
    drawn = {}
    for role, graph in graphs.items():
        rng = np.random.default_rng(seed)
        passes = parity.draw_passes(model, role, graph.offered, rng, _BATCHES, _BLOCKS)
        drawn[role] = list(passes)
    del model
    sessions = _OneAtATime(cut)
    for role, graph in graphs.items():
        wanted = [port.name for port in graph.inputs]
        session = sessions[role]
        found = [session.run({name: one.feeds[name] for name in wanted}) for one in drawn[role]]
        del session
        sessions.close()
        yield from parity.settle(drawn[role], found, role, sides, cut.precision, f"{part.name} ")


class _OneAtATime(Mapping[str, Session]):
    """Sessions of a bundle by role, of which only the last one asked for stays open."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._role = ""
        self._session: Session | None = None

    def __getitem__(self, role: str) -> Session:
        if role != self._role or self._session is None:
            self.close()  # before the next one takes memory
            self._session = open_sessions(self._bundle, (role,), threads=1)[role]
            self._role = role
        return self._session

    def close(self) -> None:
        """Let go of the session that is open."""
        self._session = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._bundle.graphs)

    def __len__(self) -> int:
        return len(self._bundle.graphs)
