"""Graphs that also give their activations, behind the sessions that the runtime's engine drives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.calib.sites import Site, activation, products, weights_file
from fixedstate.ports import Array, Port
from fixedstate.runtime import ort
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.session import Binding, Session, check_binding, check_names

ROLES = ("denoise", "commit")
"""What decoding visits; the fused pass is made of them, and sees what they see."""

Told = Callable[[str, str, Array], None]
"""Told the role, the name of an activation and its values [tokens, K], tokens of no row but padding
left out."""


@contextmanager
def observed_engine(
    bundle: Bundle,
    graphs: Mapping[str, ir.Model],
    sites: Mapping[str, Site],
    inputs: Iterable[str],
    tell: Told,
    slots: int,
) -> Iterator[SessionEngine]:
    """An engine on ONNX Runtime's CPU whose passes also tell what goes into some sites.

    It has one thread, with which a row's bytes are the same alone and among others.

    Args:
        bundle: The bundle.
        graphs: Its graphs by role; left as they are.
        sites: Its sites by weight.
        inputs: Names of the activations.
        tell: Called for each of them in every pass that has it.
        slots: Rows at most.
    """
    wanted = set(inputs)
    made = {role: _with_outputs(graphs[role].clone(), sites, wanted) for role in ROLES}
    models = {role: model for role, (model, _) in made.items()}
    extra = {role: tuple(ports.values()) for role, (_, ports) in made.items()}
    with opened(bundle, models, extra) as native:
        sessions: dict[str, Session] = {}
        for role, session in native.items():
            names = {port.name: name for name, port in made[role][1].items()}
            outputs = bundle.graph(role).outputs
            sessions[role] = _Observed(session, outputs, role, names, tell)
        yield SessionEngine(
            bundle.spec, bundle.state, sessions, slots=slots, weights=bundle.weights
        )


@contextmanager
def opened(
    bundle: Bundle, models: Mapping[str, ir.Model], extra: Mapping[str, tuple[Port, ...]]
) -> Iterator[dict[str, Session]]:
    """Sessions of changed graphs on ONNX Runtime's CPU, one thread, over the bundle's weights.

    Args:
        bundle: The bundle.
        models: The graphs by role; what is not in the weights file they hold themselves.
        extra: Outputs beside those of the bundle, by role.
    """
    with TemporaryDirectory() as folder:
        os.symlink(weights_file(bundle), Path(folder, WEIGHTS))
        sessions: dict[str, Session] = {}
        for role, model in models.items():
            graph, file = bundle.graph(role), Path(folder, f"{role}.onnx")
            ir.save(model, file)
            outputs = (*graph.outputs, *extra.get(role, ()))
            sessions[role] = ort.open_graph(file, graph.inputs, outputs, threads=1, quantized=True)
        yield sessions


def _with_outputs(
    model: ir.Model, sites: Mapping[str, Site], wanted: set[str]
) -> tuple[ir.Model, dict[str, Port]]:
    """The graph with activations among its outputs, and their ports by name."""
    found: dict[str, ir.Value] = {}
    for product in products(model):
        name = sites[product.weight].input
        if name in wanted:
            found.setdefault(name, activation(product))
    ports: dict[str, Port] = {}
    given: dict[ir.Value, Port] = {}
    for name, value in found.items():
        if value not in given:
            dims = (f"rows_{len(given)}", f"tokens_{len(given)}", sites[name].rows)
            # an output of a value of its own, so that its name cannot be one of the ports'
            copied = ir.node("Identity", [value], name=f"observed_{len(given)}")
            copied.outputs[0].name = f"observed_{len(given)}"
            copied.outputs[0].dtype = ir.DataType.FLOAT
            copied.outputs[0].shape = ir.Shape(dims)
            model.graph.append(copied)
            model.graph.outputs.append(copied.outputs[0])
            given[value] = Port(f"observed_{len(given)}", "float32", ("B", "T", sites[name].rows))
        ports[name] = given[value]
    return model, ports


class _Observed:
    """A session that has the declared outputs and tells the others."""

    def __init__(
        self,
        session: Session,
        outputs: tuple[Port, ...],
        role: str,
        names: Mapping[str, str],
        tell: Told,
    ) -> None:
        self._session = session
        self._role = role
        self._names = names
        self._tell = tell
        self.inputs = session.inputs
        self.outputs = outputs
        self.provider = session.provider

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Binding:
        """Bind arrays to the declared ports."""
        check_names(self.inputs, inputs, "input")
        check_names(self.outputs, outputs, "output")
        check_binding(inputs, outputs)
        return _ObservedBinding(self, dict(inputs), dict(outputs))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; what the declared outputs hold, the others told."""
        found = self._session.run(feeds)
        tokens = feeds["input_ids"].shape[1]
        lengths = feeds.get("commit_length", np.full(len(feeds["input_ids"]), tokens))
        real = np.arange(tokens) < np.asarray(lengths)[:, None]
        for port, name in self._names.items():
            values = found.pop(port)
            self._tell(self._role, name, values[real[:, : values.shape[1]]])
        return found


class _ObservedBinding:
    """Arrays that a run reads and writes."""

    def __init__(
        self, session: _Observed, inputs: dict[str, Array], outputs: dict[str, Array]
    ) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs

    def run(self) -> None:
        """Run the graph and copy what comes out into the bound arrays."""
        for name, values in self._session.run(self._inputs).items():
            np.copyto(self._outputs[name], values)
