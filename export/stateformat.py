"""Scan states stored in 16 or 8 bits: what a finished graph reads and writes is changed, no more.

A state is rounded once, where a commit pass hands it out; inside a pass it is float32. The format
``int8row`` is symmetric, with a scale for every row of d_state values (of a head and channel), as
published for served state-space models (vLLM issues 40012 and 52962); what it costs is measured by
:mod:`fixedstate.calib.drift`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.errors import ExportError
from fixedstate.export.passes import ONNX_DTYPES, describe_port, name_values
from fixedstate.ports import Array, Port
from fixedstate.spec import ModelSpec
from fixedstate.state import StatePort, StateSpec, split_role

_LARGEST = 127.0  # of a stored int8: symmetric, so that -128 is never used


def store_state(
    model: ir.Model, spec: ModelSpec, before: StateSpec, after: StateSpec, role: str
) -> None:
    """Make the scan states of one graph enter and leave it as another StateSpec says, in place.

    All else stays as it is: ports of other kinds, weights, and what is computed. A pass that does
    not commit writes nothing, as before; rows that commit nothing keep their stored bytes; what
    ``commit_denoise`` denoises reads the state as it is stored.

    A value that a format does not have is no number afterwards, and whatever is computed from it
    is none: float16 ends at 65504, and a row of ``int8row`` with a value that is no number has a
    scale that is none. So decoding stops with an error, and no such state can be saved; but
    nothing is refused here, since a graph knows no values. Measure before.

    Args:
        model: A finished graph, whose scan states are float32.
        spec: The model.
        before: What the graph carries now.
        after: What it is to carry: the same ports, scan states in a format of
            :data:`fixedstate.state.STATE_DTYPES`, their scales behind them. Ports of other kinds
            may differ; they are not looked at.
        role: The graph's.

    Raises:
        ExportError: for scan states that are not float32 before or not the same ones afterwards, a
            graph without their ports, or the fused graph of a model with linear attention.
    """
    states = _states(before)
    kept = _states(after)
    if not states:
        raise ExportError("the model has no scan state: there is nothing to store in fewer bits")
    if [port.suffix for port in states] != [port.suffix for port in kept]:
        raise ExportError(
            f"the scan states {[port.suffix for port in kept]} are not those of the graph "
            f"{[port.suffix for port in states]}: take both from one ModelSpec"
        )
    if split_role(role)[0] == "commit_denoise" and not fuses(spec, after):
        raise ExportError(
            f"a model with linear attention has no {role} pass that reads its state as it is "
            "stored: leave the fused graphs out, or keep the state in float32"
        )
    writer = _Writer(model)
    for old, new in zip(states, kept, strict=True):
        if old.past.dtype != "float32":
            raise ExportError(
                f"{old.past.name} is {old.past.dtype} already, expected float32: a state is "
                "rounded once; begin with the float32 bundle"
            )
        if new.past.dtype != "float32":
            scale = after.layer(new.layer).get("ssm_scale")
            writer.write(new, scale)
    common.RemoveUnusedNodesPass()(model)
    name_values(model)


def _states(state: StateSpec) -> list[StatePort]:
    return [port for port in state.committed if port.kind == "ssm"]


def fuses(spec: ModelSpec, state: StateSpec) -> bool:
    """Whether graphs that commit and denoise in one pass can be kept with these stored states.

    Linear attention adds what the committed block writes to what the state gave, token by token:
    no token behind it reads the new state, and so none would read what is stored.
    """
    return not any(
        port.past.dtype != "float32" and spec.layers[port.layer].mixer == "linear_attention"
        for port in _states(state)
    )


class _Writer:
    """Writes one port after the other into a graph."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._first = next(iter(model.graph))
        self._constants: dict[tuple[object, ...], ir.Value] = {}
        self._committing: dict[int, ir.Value] = {}

    def write(self, port: StatePort, scale: StatePort | None) -> None:
        """Change where a state enters and, in a pass that commits, where it leaves."""
        past = _port_value(self._graph.inputs, port.past)
        uses = list(past.uses())
        past.dtype = ONNX_DTYPES[port.past.dtype]
        stored = self._at_the_top("Cast", past)
        wide, entering = stored, None
        if scale is not None:
            entering = _value(scale.past)
            self._graph.inputs.insert(self._graph.inputs.index(past) + 1, entering)
            wide = self._at_the_top("Mul", stored, entering)
        for node, place in uses:
            node.replace_input_with(place, wide)
        names = [value.name for value in self._graph.outputs]
        if port.present.name not in names:
            return
        place = names.index(port.present.name)
        made = self._graph.outputs[place]
        made.name, made.shape = f"{made.name}_before", None
        if entering is None or scale is None:
            self._leave_rounded(port.present, place, made)
        else:
            leaving = self._leave_scaled(place, made, stored, wide, entering)
            for value, target in zip(leaving, (port.present, scale.present), strict=True):
                describe_port(value, target)

    def _leave_rounded(self, port: Port, place: int, made: ir.Value) -> None:
        """Hand a state out in 16 bits; whatever read it reads what was handed out.

        Rows that commit nothing keep their bytes: rounding a number that the format has is exact.
        """
        out = _Chain()
        stored = out.node("Cast", made, dtype=ONNX_DTYPES[port.dtype])
        rounded = out.node("Cast", stored)
        self._put_behind(out, made, rounded)
        self._graph.outputs[place] = stored
        describe_port(stored, port)

    def _leave_scaled(
        self, place: int, made: ir.Value, past: ir.Value, wide: ir.Value, scale: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Hand a state out as whole numbers and scales.

        Rows that commit nothing keep theirs: other scales may come out where the largest value is
        not the largest number. The largest value is found without an order of summation, so a row
        has the same bytes alone and beside others.

        Args:
            place: Of the output.
            made: The state in float32.
            past: The stored numbers that entered, as float32.
            wide: The state that entered.
            scale: Its scales.

        Returns:
            The outputs for numbers and scales.
        """
        out = _Chain()
        some = self._commits(len(scale.shape or ()))
        new = _committed(made, wide)
        axis = self._constant(np.asarray([-2], np.int64))
        one = self._constant(np.float32(1))
        largest = out.node("ReduceMax", out.node("Abs", new), axis, keepdims=1)
        # ReduceMax may pass over a NaN: the step of such a row is divided by 0, and no number
        strange = out.node("Cast", out.node("IsNaN", new, dtype=ir.DataType.BOOL))
        strange = out.node("ReduceMax", strange, axis, keepdims=1)
        step = out.node("Div", largest, self._constant(np.float32(_LARGEST)))
        step = out.node("Div", step, out.node("Sub", one, strange))
        zero = self._constant(np.float32(0))
        above = out.node("Greater", step, zero, dtype=ir.DataType.BOOL)
        whole = out.node("Round", out.node("Div", new, out.node("Where", above, step, one)))
        low, high = (self._constant(np.float32(sign * _LARGEST)) for sign in (-1, 1))
        numbers = out.node("Where", some, out.node("Clip", whole, low, high), past)
        scales = out.node("Where", some, step, scale)
        stored = out.node("Cast", numbers, dtype=ir.DataType.INT8)
        rounded = out.node("Mul", numbers, scales)
        self._put_behind(out, made, rounded)
        self._graph.outputs[place] = stored
        self._graph.outputs.insert(place + 1, scales)
        return stored, scales

    def _put_behind(self, chain: _Chain, made: ir.Value, rounded: ir.Value) -> None:
        """Put nodes behind the state's own, and let all other readers have what is stored."""
        own = set(chain.nodes)
        for node, place in list(made.uses()):
            if node not in own:
                node.replace_input_with(place, rounded)
        producer = made.producer()
        if producer is None:
            raise ExportError(f"graph input {made.name!r} is an output too: nothing commits it")
        self._graph.insert_after(producer, chain.nodes)

    def _commits(self, rank: int) -> ir.Value:
        """[B, 1, ...] bool: the rows that commit anything."""
        if rank not in self._committing:
            length = next((v for v in self._graph.inputs if v.name == "commit_length"), None)
            if length is None:
                raise ExportError("the graph hands out a state and has no input 'commit_length'")
            zero, bools = self._constant(np.int64(0)), ir.DataType.BOOL
            some = self._at_the_top("Greater", length, zero, dtype=bools)
            shape = self._constant(np.asarray([-1, *[1] * (rank - 1)], np.int64))
            self._committing[rank] = self._at_the_top("Reshape", some, shape, dtype=bools)
        return self._committing[rank]

    def _at_the_top(
        self, op: str, *inputs: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT
    ) -> ir.Value:
        made = _Chain()
        value = made.node(op, *inputs, dtype=dtype)
        self._graph.insert_before(self._first, made.nodes)
        return value

    def _constant(self, number: Array | np.generic) -> ir.Value:
        array = np.asarray(number)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"state_constant_{len(self._constants)}"  # until values are named in order
            held = ir.tensor(array, name=name)
            value = ir.Value(
                name=name,
                type=ir.TensorType(held.dtype),
                shape=ir.Shape(array.shape),
                const_value=held,
            )
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]


class _Chain:
    """Nodes that are made one after the other."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def node(
        self,
        op: str,
        *inputs: ir.Value,
        dtype: ir.DataType = ir.DataType.FLOAT,
        **attributes: int,
    ) -> ir.Value:
        """What a new node gives, of that dtype."""
        if op == "Cast":
            attributes["to"] = int(dtype)
        self.nodes.append(ir.node(op, inputs, attributes=attributes or None))
        self.nodes[-1].outputs[0].dtype = dtype
        return self.nodes[-1].outputs[0]


def _committed(made: ir.Value, past: ir.Value) -> ir.Value:
    """The new state before rows that commit nothing were given their old one.

    That choice is made once more, between stored numbers.
    """
    node = made.producer()
    if node is not None and node.op_type == "Where" and node.inputs[2] is past:
        assert node.inputs[1] is not None
        return node.inputs[1]
    return made


def _port_value(values: Sequence[ir.Value], port: Port) -> ir.Value:
    found = next((value for value in values if value.name == port.name), None)
    if found is None:
        raise ExportError(
            f"the graph has no port {port.name!r}, which the state lists: it is not a graph of "
            "this model"
        )
    return found


def _value(port: Port) -> ir.Value:
    value = ir.Value()
    describe_port(value, port)
    return value
