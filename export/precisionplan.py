"""Which values of a float32 graph become half, and which operators compute in half.

What is half and what is not follows from the operators alone; nothing depends on a model's names:

* half: products with a weight, rows looked up in a weight, the two products around a softmax
  (scores and mixtures of values), sums of halves, activations of the ``fixedstate`` operators, and
  whatever only moves elements of these;
* float32: everything else. Norms, softmax, steps, decays, angles, activation functions, products
  of two activations and sums over carried state are all among it, and so is any structure that
  these rules do not know.

Values meet by casts; where one side is float32, the result is. A weight that a float32 operator
reads stays float32. Of a quantised weight the scales become half, and so does what its
DequantizeLinear gives; scales that have a scale of their own stay as they are, since that one is
too small for float16. An activation is quantised in float32 by its own scale, and dequantised to
half. Ports of states, keys and values that are stored in fewer bits stay as they are: they are made
of float32 numbers and read as such, and what keys and values are read as is cast for their
products. These are the islands of ``export --precision fp16``, except that gates of an MLP and sums
that a float32 operator reads stay float32 here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fixedstate.export.passes import is_weight
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.spec import ModelSpec
from fixedstate.state import StateSpec

HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
NUMPY_HALVES: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
}
LAYER = re.compile(r"layers\.(\d+)\.")

MOVING: dict[str, tuple[int, ...] | None] = {
    "Concat": None,
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "Pad": (0, 2),
    "Reshape": (0,),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""Operators that only move elements, and which of their inputs hold them (None: all)."""

_SCORING = ("Add", "Div", "Mul", "Tanh")
"""What may stand between a product and the softmax that makes it one of scores."""

_ADDING = ("Add", "Sub", "Mul", "Div")
"""What may stand between a product and the carried state that it is part of."""

_STORING = ("Cast", "Clip", "Round")
"""What stands between a scan state and the numbers that it is stored as."""

_BESIDE = ("_scale", "_recent")
"""Ends of the kinds of ports that belong to keys, values and states stored in fewer bits."""

ANY_DTYPE = ("Shape", "Size")


@dataclass(slots=True)
class Asked:
    """Weights by name, by the dtype that operators ask of them."""

    half: set[str] = field(default_factory=set)
    wide: set[str] = field(default_factory=set)


class HalfPlan:
    """Which values of a graph become half, and which operators compute in half.

    Args:
        model: A float32 graph; not changed.
        spec: The model.
        state: Its ports at the new precision.
        fp32_layers: Layers that stay float32.
        wide: Weights that stay float32 whatever asks for them.

    Attributes:
        half: Values that become half.
        computing: Nodes that compute in half, or move halves.
        separate: Nodes of domain ``fixedstate`` that stay float32.
        lookups: Nodes whose half output is made float32 at once.
        ports: Dtype of every float port, by name.
    """

    def __init__(
        self,
        model: ir.Model,
        spec: ModelSpec,
        state: StateSpec,
        fp32_layers: frozenset[int],
        wide: frozenset[str],
    ) -> None:
        self.model, self.spec, self.wide = model, spec, wide
        self.fp32_layers = fp32_layers
        self.half: set[ir.Value] = set()
        self.computing: set[ir.Node] = set()
        self.separate: set[ir.Node] = set()
        self.lookups: set[ir.Node] = set()
        self.ports = {
            port.name: port.dtype for pair in state.ports for port in (pair.past, pair.present)
        }
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.name in self.ports and value.dtype != ir.DataType.FLOAT:
                self.ports[value.name] = "float32"  # stored in fewer bits already: it stays so
        self._outputs = set(model.graph.outputs)
        self._roots: dict[ir.Value, str] = {}
        self._steps: set[str] = set()  # weights that are the scales of quantised ones
        self._exact: set[str] = set()  # of these, the ones that are never half
        self._layers: dict[ir.Value, int] = {}
        for name, value in model.graph.initializers.items():
            if is_weight(name) and value.dtype == ir.DataType.FLOAT:
                self._roots[value] = name
                found = LAYER.match(name)
                self._layers[value] = int(found[1]) if found else -1
        for node in model.graph:
            self._follow(node)
        self._scores = self._find_scores()
        self._carried = self._find_carried(
            [
                pair.present.name
                for pair in state.committed
                if pair.kind == "ssm"
                or (pair.present.dtype == "float32" and not pair.kind.endswith(_BESIDE))
            ]
        )
        stored = {pair.layer for pair in state.committed if pair.kind == "key_scale"}
        self._decoded = self._find_decoded(
            [pair.past.name for pair in state.committed if pair.layer in stored]
        )
        exact: set[ir.Node] = set()  # softmaxes whose scores stay float32
        while True:
            before = len(exact)
            self._walk(exact)
            if len(exact) == before:
                break
        self._pull_casts_up()

    # --- what is known of values before any dtype is -------------------------------------------

    def _follow(self, node: ir.Node) -> None:
        """Which layer a value belongs to, and which are a weight with its elements moved.

        A quantised weight goes by the name of its scales, whose dtype it has once dequantised.
        """
        layer = max((self._layers.get(v, -1) for v in node.inputs if v is not None), default=-1)
        for value in node.outputs:
            self._layers[value] = layer
        scale = scale_of(node)
        moved = moved_by(node) if scale is None else [scale]
        if scale is not None and scale in self._roots:
            self._steps.add(self._roots[scale])
            if not scale.is_initializer():
                self._exact.add(self._roots[scale])
        if len(moved) == 1 and moved[0] in self._roots and node.op_type != "Gather":
            for value in node.outputs:
                self._roots[value] = self._roots[moved[0]]

    def _find_scores(self) -> dict[ir.Node, ir.Node]:
        """Products of two activations by the softmax that they are scores of."""
        found: dict[ir.Node, ir.Node] = {}
        for node in self.model.graph:
            if node.op_type == "Softmax" and node.domain == "":
                for product in self._products_before(node.inputs[0], self._is_scoring):
                    found[product] = node
        return found

    def _is_scoring(self, node: ir.Node) -> bool:
        if node.op_type in ("Mul", "Div"):
            return is_constant(node.inputs[1]) or is_constant(node.inputs[0])
        return node.op_type in _SCORING

    def _products_before(
        self, value: ir.Value | None, through: Callable[[ir.Node], bool]
    ) -> Iterator[ir.Node]:
        """Products that reach a value through movement and some other operators."""
        waiting, seen = [value], set()
        while waiting:
            one = waiting.pop()
            node = one.producer() if one is not None else None
            if node is None or node in seen or node.domain != "":
                continue
            seen.add(node)
            if node.op_type in ("MatMul", "Gemm"):
                yield node
            elif node.op_type in MOVING:
                waiting += moved_by(node)
            elif through(node):
                waiting += node.inputs

    def _find_carried(self, names: Collection[str]) -> set[ir.Value]:
        """Values that are added up in carried float32 state."""
        found: set[ir.Value] = set()
        waiting: list[ir.Value | None] = [v for v in self.model.graph.outputs if v.name in names]
        while waiting:
            value = waiting.pop()
            if value is None or value in found:
                continue
            found.add(value)
            node = value.producer()
            if node is None or node.domain != "":
                continue
            if node.op_type in MOVING:
                waiting += moved_by(node)
            elif node.op_type in _ADDING:
                waiting += node.inputs
            elif node.op_type in _STORING:
                waiting.append(node.inputs[0])
        return found

    def _find_decoded(self, names: Collection[str]) -> set[ir.Value]:
        """What stored keys and values are read as: float32, and half for a product as it is."""
        found = {value for value in self.model.graph.inputs if value.name in names}
        for node in self.model.graph:
            if node.domain != "" or node.op_type in ("MatMul", "Gemm", "Softmax", *ANY_DTYPE):
                continue
            floats = [v for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
            if any(value in found for value in node.inputs) and all(
                value in found or is_constant(value) for value in floats
            ):
                found |= set(node.outputs)
        return found

    # --- dtypes, in the order of the graph -------------------------------------------------------

    def _walk(self, exact: set[ir.Node]) -> None:
        """Decide every node; a softmax whose scores must not be half joins ``exact``."""
        self.half, self.computing = set(), set()
        self.separate, self.lookups = set(), set()
        # what a float32 operator made of a port: a carried sum, or a cached key turned again
        self._of_port: set[ir.Value] = set()
        for value in self.model.graph.inputs:
            if value.name in self.ports:
                self._of_port.add(value)
            if self.ports.get(value.name or "", "float32") in HALVES:
                self.half.add(value)
        for node in self.model.graph:
            outputs = self._half_outputs(node, exact)
            self.half |= outputs
            if outputs:
                self.computing.add(node)
            if outputs and node.op_type not in MOVING:
                continue  # computed anew
            if node.domain != "" or node.op_type in ("Softmax", *ANY_DTYPE):
                continue
            if any(value in self._of_port for value in node.inputs if value is not None):
                self._of_port |= set(node.outputs)

    def _half_outputs(self, node: ir.Node, exact: set[ir.Node]) -> set[ir.Value]:
        """The outputs of a node that are half."""
        whole = set(node.outputs)
        kept = self._layers[node.outputs[0]] in self.fp32_layers
        if node.domain == DOMAIN:
            if kept:
                self.separate.add(node)
                return set()
            ports = OPS[node.op_type].outputs
            return {v for v, p in zip(node.outputs, ports, strict=True) if p.dtype == "io"}
        if node.domain != "":
            return set()
        if node.op_type in ("MatMul", "Gemm"):
            return whole if self._is_half_product(node, kept, exact) else set()
        if self._is_lookup(node):
            if not self.spec.residual_fp32:
                return whole
            self.computing.add(node)
            self.lookups.add(node)
            return set()
        if node.op_type in MOVING:
            return whole if self._moves_halves(node) else set()
        if node.op_type == "Add":
            return whole if not kept and self._is_half_sum(node) else set()
        return set()

    def _is_half_product(self, node: ir.Node, kept: bool, exact: set[ir.Node]) -> bool:
        left, right = node.inputs[0], node.inputs[1]
        assert left is not None
        assert right is not None
        roots = [self._roots[v] for v in (left, right) if v in self._roots]
        if len(roots) == 1:
            return self._is_weight_product(node, roots[0])
        if roots or kept or is_constant(left) or is_constant(right):
            return False
        softmax = self._scores.get(node)
        if softmax is not None:
            if any(v in self._of_port and not self._can_be_half(v) for v in (left, right)):
                exact.add(softmax)
            return softmax not in exact
        shares = [v for v in (left, right) if self._is_share(v)]
        return len(shares) == 1 and self._can_be_half(right if shares[0] is left else left)

    def _can_be_half(self, value: ir.Value) -> bool:
        return value in self.half or value in self._decoded

    def _is_weight_product(self, node: ir.Node, root: str) -> bool:
        weight = self.model.graph.initializers[root]
        layer = self._layers[weight]
        if root in self.wide or layer in self.fp32_layers or node.outputs[0] in self._carried:
            return False
        return root in self._steps or (weight.shape is not None and len(weight.shape) >= 2)

    def _is_share(self, value: ir.Value) -> bool:
        """Whether a value is what a softmax gave, moved or not."""
        node = value.producer()
        while node is not None and node.op_type in MOVING and len(moved_by(node)) == 1:
            node = moved_by(node)[0].producer()
        return node is not None and node.domain == "" and node.op_type == "Softmax"

    def _is_lookup(self, node: ir.Node) -> bool:
        """Whether a node takes rows of a weight."""
        if node.op_type != "Gather" or node.inputs[0] is None:
            return False
        root = self._roots.get(node.inputs[0])
        return root is not None and root not in self.wide

    def _moves_halves(self, node: ir.Node) -> bool:
        """Whether all that is moved is half, or is a constant that half holds as it is."""
        moved = moved_by(node)
        return any(value in self.half for value in moved) and all(
            self._can_be_half(value) or self._fits(value) for value in moved
        )

    def _fits(self, value: ir.Value) -> bool:
        if not is_constant(value):
            return self._roots.get(value, "") not in self.wide and value in self._roots
        assert value.const_value is not None
        data = value.const_value.numpy()
        # whole numbers up to 256 are the same in every float
        return bool((data == np.trunc(data)).all() and (np.abs(data) <= 256).all())

    def _is_half_sum(self, node: ir.Node) -> bool:
        """Whether a sum is one of halves, a bias among them; not one that only float32 reads.

        The residual stream is read by norms and by the next sum, so it is half where all that is
        added to it is.
        """
        inputs = [value for value in node.inputs if value is not None]
        halves = [value for value in inputs if value in self.half]
        biases = [value for value in inputs if value in self._roots]
        if node.outputs[0] in self._carried or not halves or len(halves) + len(biases) < 2:
            return False
        if not biases:
            return True
        return self._roots[biases[0]] not in self.wide and self._read_by_half(node.outputs[0])

    def _read_by_half(self, value: ir.Value) -> bool:
        """Whether something may read a value as half: what is no product, sum or port may not."""
        if value in self._outputs and self.ports.get(value.name or "", "float32") in HALVES:
            return True
        for node, place in value.uses():
            if node.domain == DOMAIN:
                if OPS[node.op_type].inputs[place].dtype == "io":
                    return True
            elif node.op_type in MOVING:
                if any(self._read_by_half(one) for one in node.outputs):
                    return True
            elif node.op_type in ("MatMul", "Gemm", "Add"):
                return True
        return False

    # --- casts before movement, not behind it ----------------------------------------------------

    def _pull_casts_up(self) -> None:
        """Movement that only halves read moves halves: one cast before it, not one behind each."""
        for node in reversed(list(self.model.graph)):
            scale = scale_of(node)
            moved = moved_by(node) if scale is None else [scale]
            if node in self.computing or len(moved) != 1 or moved[0] in self._roots:
                continue
            given = moved[0]
            if scale is None and (is_constant(given) or given.dtype != ir.DataType.FLOAT):
                continue
            if all(self._only_half_reads(value) for value in node.outputs):
                self.computing.add(node)
                self.half |= set(node.outputs)

    def _only_half_reads(self, value: ir.Value) -> bool:
        if value in self._outputs and self.ports.get(value.name or "", "float32") not in HALVES:
            return False
        uses = value.uses()
        if not uses:
            return value in self._outputs
        return all(self.takes_half(node, place) for node, place in uses)

    def takes_half(self, node: ir.Node, place: int) -> bool:
        """Whether a node takes an input as half."""
        if node not in self.computing:
            return False
        if node.domain == DOMAIN:
            return OPS[node.op_type].inputs[place].dtype == "io"
        if node.op_type in MOVING:
            places = MOVING[node.op_type]
            return places is None or place in places
        return scale_of(node) is None or place == 1

    # --- weights ---------------------------------------------------------------------------------

    def weights(self) -> Asked:
        """What operators ask of the weights; a weight that nothing reads as float32 is half."""
        asked = Asked()
        for value, root in self._roots.items():
            for node, place in value.uses():
                if node.op_type not in ANY_DTYPE and node.outputs[0] not in self._roots:
                    (asked.half if self.takes_half(node, place) else asked.wide).add(root)
            if value in self._outputs:
                asked.wide.add(root)
        return asked

    def moves_weight(self, node: ir.Node) -> bool:
        """Whether a node gives a weight with its elements moved: its dtype is the weight's."""
        return node.outputs[0] in self._roots

    @property
    def half_weights(self) -> set[ir.Value]:
        """Every value that is a weight, moved or not, that becomes half."""
        asked = self.weights()
        names = asked.half - asked.wide - self.wide - self._exact
        return {value for value, root in self._roots.items() if root in names}


def moved_by(node: ir.Node) -> list[ir.Value]:
    """Inputs whose elements a node only moves; empty where it does more."""
    if node.domain != "" or node.op_type not in MOVING:
        return []
    places = MOVING[node.op_type]
    inputs = [v for i, v in enumerate(node.inputs) if places is None or i in places]
    return [value for value in inputs if value is not None]


def scale_of(node: ir.Node) -> ir.Value | None:
    """What a DequantizeLinear multiplies with, whose dtype its output has; None for the others."""
    if node.domain != "" or node.op_type != "DequantizeLinear":
        return None
    return node.inputs[1]


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant of the graph, not a weight."""
    return (
        value is not None
        and value.is_initializer()
        and not is_weight(value.name or "")
        and value.const_value is not None
    )
