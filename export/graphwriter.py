"""Nodes and constants added to a finished graph, wherever they belong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fixedstate.ports import Array


class GraphWriter:
    """Adds nodes to a graph; :meth:`finish` puts them where their inputs are made.

    Args:
        graph: Of a model whose values are named anew afterwards.
        prefix: What the names of its constants begin with until then.
    """

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.graph = graph
        self._prefix = prefix
        self._constants: dict[tuple[object, ...], ir.Value] = {}

    def node(
        self,
        op: str,
        *inputs: ir.Value,
        dtype: ir.DataType | None = ir.DataType.FLOAT,
        **attributes: int | Sequence[int],
    ) -> ir.Value:
        """What a new node with one output gives, of that dtype; ``Cast`` casts to it."""
        if op == "Cast" and dtype is not None:
            attributes["to"] = int(dtype)
        node = ir.node(op, inputs, attributes=attributes or None)
        if dtype is not None:
            node.outputs[0].dtype = dtype
        self.graph.append(node)
        return node.outputs[0]

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int = -1) -> list[ir.Value]:
        """The parts of a value along an axis."""
        cut = self.ints(*sizes)
        node = ir.node("Split", [value, cut], attributes={"axis": axis}, num_outputs=len(sizes))
        for part in node.outputs:
            part.type = value.type
        self.graph.append(node)
        return list(node.outputs)

    def copy(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
        """What the same operator with one output gives of other inputs."""
        made = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()))
        made.outputs[0].type = node.outputs[0].type
        self.graph.append(made)
        return made.outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        """A constant of int64, of one dimension."""
        return self.constant(np.asarray(numbers, np.int64))

    def floats(self, number: float) -> ir.Value:
        """A float32 constant without dimensions."""
        return self.constant(np.float32(number))

    def constant(self, number: Array | np.generic) -> ir.Value:
        """A constant of the graph; equal ones are one."""
        array = np.asarray(number)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"{self._prefix}_{len(self._constants)}"
            held = ir.tensor(array, name=name)
            kind, shape = ir.TensorType(held.dtype), ir.Shape(array.shape)
            value = ir.Value(name=name, type=kind, shape=shape, const_value=held)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def finish(self) -> None:
        """Bring all nodes into an order in which none stands before its inputs."""
        self.graph.sort()
