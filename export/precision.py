"""float32 graph -> float16 or bfloat16 graph, as one pass over the finished file of a bundle.

What is half and what is not follows from the operators alone; nothing depends on a model's names:

* half: products with a weight, rows looked up in a weight, the two products around a softmax
  (scores and mixtures of values), sums of halves, activations of the ``fixedstate`` operators, and
  whatever only moves elements of these;
* float32: everything else. Norms, softmax, steps, decays, angles, activation functions, products
  of two activations and sums over carried state are all among it, and so is any structure that
  these rules do not know.

Values meet by casts; where one side is float32, the result is. A weight that a float32 operator
reads stays float32. These are the islands of ``export --precision fp16``, except that gates of an
MLP and sums that a float32 operator reads stay float32 here.

A converted graph needs its own weights file: :func:`convert_bundle` writes both to a folder from
which engines are built. :func:`check_precision` runs the result in ONNX Runtime beside the float32
graphs. That has no bfloat16 products on a CPU: there :func:`emulate_bf16` rounds by pairs of casts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate import state as states
from fixedstate.bundle import MANIFEST, WEIGHTS, Bundle, Graph, sha256_of, umask, write_atomic
from fixedstate.errors import BackendError, ParityError, UsageError
from fixedstate.export.passes import (
    CUSTOM,
    add_functions,
    is_weight,
    lint,
    name_values,
    serialised,
    valueless,
)
from fixedstate.export.weightfile import Place, layout, places_in, point_at_weights
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.ports import Array, numpy_dtype
from fixedstate.runtime.compare import Tolerance, difference, draw_inputs
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.ort import open_sessions
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports, split_role

PRECISIONS = {name: states.PRECISIONS[name] for name in ("fp16", "bf16")}
"""Io dtype of every precision that a float32 graph can be converted to."""

CHECKED_BLOCKS = 4
"""Blocks along which :func:`check_precision` compares."""

SAMPLE = (
    "set lamp_2 on\nset lamp_7 off\nread sensor_4\nsensor_4 is 21.5\nmove arm_1 to 40 12\n"
    "Once the state has a fixed size, a long text costs as much memory as a short one.\n"
    '{"arm": 1, "place": [40, 12], "lamps": {"2": true, "7": false}}\n'
    "for name in names:\n    print(name, count[name] + 1)\n"
)
"""Text along which models with a tokenizer are compared."""

_CHECKED_ROWS = 3
_PIECE = 1 << 22  # elements converted at once
_TELL = 1 << 28  # bytes between two words on how far the file is

_HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_NUMPY: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
}
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.39e38}
_LAYER = re.compile(r"layers\.(\d+)\.")

_MOVING: dict[str, tuple[int, ...] | None] = {
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

_ANY_DTYPE = ("Shape", "Size")


def half_precision(name: str) -> Precision:
    """``fp16`` or ``bf16``: io and kv in that dtype, scan state float32.

    Raises:
        UsageError: for another name.
    """
    if name not in PRECISIONS:
        raise UsageError(
            f"precision {name!r} cannot be converted to; use one of {', '.join(PRECISIONS)}"
        )
    return Precision(io=PRECISIONS[name], state="float32", kv=PRECISIONS[name])


def convert(
    model: ir.Model, spec: ModelSpec, precision: str, fp32_layers: Collection[int] = ()
) -> ir.Model:
    """Make a half precision graph of one float32 graph, in place.

    Weights that become half have dtype and shape, but no values: :func:`convert_bundle` writes
    those. The ports are the ones of ``StateSpec.of(spec, half_precision(precision))``.

    Args:
        model: The finished graph of one role of a float32 bundle.
        spec: The model.
        precision: ``fp16`` or ``bf16``.
        fp32_layers: Indices of layers that stay float32 as a whole. Their ports do not; what they
            add to is float32 behind them.

    Raises:
        UsageError: for another precision, or for a layer that there is not.
    """
    return _convert([model], spec, precision, fp32_layers)[0]


def _convert(
    models: Sequence[ir.Model], spec: ModelSpec, precision: str, fp32_layers: Collection[int]
) -> Sequence[ir.Model]:
    """Convert the graphs of one weights file together: a weight has one dtype in all of them."""
    chosen = half_precision(precision)
    kept = _checked_layers(models, spec, fp32_layers)
    state = StateSpec.of(spec, chosen)
    wide: set[str] = set()
    while True:
        plans = [_Plan(model, spec, state, kept, frozenset(wide)) for model in models]
        asked = [plan.weights() for plan in plans]
        both = set().union(*(a.half for a in asked)) & set().union(*(a.wide for a in asked))
        if both <= wide:
            break
        wide |= both
    for model, plan in zip(models, plans, strict=True):
        _Rewriter(model, plan, _HALVES[chosen.io]).run()
        _write_functions(model, spec, chosen, plan)
        name_values(model)
    return models


def _checked_layers(
    models: Sequence[ir.Model], spec: ModelSpec, layers: Collection[int]
) -> frozenset[int]:
    """The layers that stay float32.

    Raises:
        UsageError: for one that there is not, or that cannot be told apart in a custom module.
    """
    wrong = sorted(index for index in layers if not 0 <= index < len(spec.layers))
    if wrong:
        raise UsageError(
            f"--fp32-layers {', '.join(map(str, wrong))}: the model has layers 0 to "
            f"{len(spec.layers) - 1}"
        )
    if layers and any(name.startswith(CUSTOM) for m in models for name in m.graph.initializers):
        raise UsageError(
            "--fp32-layers was given, but nothing tells the layers of a custom module apart: leave "
            "the option out, or write casts into the module"
        )
    return frozenset(layers)


@dataclass(slots=True)
class _Asked:
    """Weights by name, by the dtype that operators ask of them."""

    half: set[str] = field(default_factory=set)
    wide: set[str] = field(default_factory=set)


class _Plan:
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
        self._outputs = set(model.graph.outputs)
        self._roots: dict[ir.Value, str] = {}
        self._layers: dict[ir.Value, int] = {}
        for name, value in model.graph.initializers.items():
            if is_weight(name) and value.dtype == ir.DataType.FLOAT:
                self._roots[value] = name
                found = _LAYER.match(name)
                self._layers[value] = int(found[1]) if found else -1
        for node in model.graph:
            self._follow(node)
        self._scores = self._find_scores()
        carried = [pair.present.name for pair in state.committed if pair.present.dtype == "float32"]
        self._carried = self._find_carried(carried)
        exact: set[ir.Node] = set()  # softmaxes whose scores stay float32
        while True:
            before = len(exact)
            self._walk(exact)
            if len(exact) == before:
                break
        self._pull_casts_up()

    # --- what is known of values before any dtype is -------------------------------------------

    def _follow(self, node: ir.Node) -> None:
        """Which layer a value belongs to, and which are a weight with its elements moved."""
        layer = max((self._layers.get(v, -1) for v in node.inputs if v is not None), default=-1)
        for value in node.outputs:
            self._layers[value] = layer
        moved = _moved(node)
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
            return _constant(node.inputs[1]) or _constant(node.inputs[0])
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
            elif node.op_type in _MOVING:
                waiting += _moved(node)
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
            if node.op_type in _MOVING:
                waiting += _moved(node)
            elif node.op_type in _ADDING:
                waiting += node.inputs
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
            if self.ports.get(value.name or "", "float32") in _HALVES:
                self.half.add(value)
        for node in self.model.graph:
            outputs = self._half_outputs(node, exact)
            self.half |= outputs
            if outputs:
                self.computing.add(node)
            if outputs and node.op_type not in _MOVING:
                continue  # computed anew
            if node.domain != "" or node.op_type in ("Softmax", *_ANY_DTYPE):
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
        if node.op_type in _MOVING:
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
        if roots or kept or _constant(left) or _constant(right):
            return False
        softmax = self._scores.get(node)
        if softmax is not None:
            if any(v in self._of_port and v not in self.half for v in (left, right)):
                exact.add(softmax)
            return softmax not in exact
        shares = [v for v in (left, right) if self._is_share(v)]
        return len(shares) == 1 and (right if shares[0] is left else left) in self.half

    def _is_weight_product(self, node: ir.Node, root: str) -> bool:
        weight = self.model.graph.initializers[root]
        layer = self._layers[weight]
        if root in self.wide or layer in self.fp32_layers or node.outputs[0] in self._carried:
            return False
        return weight.shape is not None and len(weight.shape) >= 2

    def _is_share(self, value: ir.Value) -> bool:
        """Whether a value is what a softmax gave, moved or not."""
        node = value.producer()
        while node is not None and node.op_type in _MOVING and len(_moved(node)) == 1:
            node = _moved(node)[0].producer()
        return node is not None and node.domain == "" and node.op_type == "Softmax"

    def _is_lookup(self, node: ir.Node) -> bool:
        """Whether a node takes rows of a weight."""
        if node.op_type != "Gather" or node.inputs[0] is None:
            return False
        root = self._roots.get(node.inputs[0])
        return root is not None and root not in self.wide

    def _moves_halves(self, node: ir.Node) -> bool:
        """Whether all that is moved is half, or is a constant that half holds as it is."""
        moved = _moved(node)
        return any(value in self.half for value in moved) and all(
            value in self.half or self._fits(value) for value in moved
        )

    def _fits(self, value: ir.Value) -> bool:
        if not _constant(value):
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
        if value in self._outputs and self.ports.get(value.name or "", "float32") in _HALVES:
            return True
        for node, place in value.uses():
            if node.domain == DOMAIN:
                if OPS[node.op_type].inputs[place].dtype == "io":
                    return True
            elif node.op_type in _MOVING:
                if any(self._read_by_half(one) for one in node.outputs):
                    return True
            elif node.op_type in ("MatMul", "Gemm", "Add"):
                return True
        return False

    # --- casts before movement, not behind it ----------------------------------------------------

    def _pull_casts_up(self) -> None:
        """Movement that only halves read moves halves: one cast before it, not one behind each."""
        for node in reversed(list(self.model.graph)):
            moved = _moved(node)
            if node in self.computing or len(moved) != 1 or moved[0] in self._roots:
                continue
            if _constant(moved[0]) or moved[0].dtype != ir.DataType.FLOAT:
                continue
            if all(self._only_half_reads(value) for value in node.outputs):
                self.computing.add(node)
                self.half |= set(node.outputs)

    def _only_half_reads(self, value: ir.Value) -> bool:
        if value in self._outputs and self.ports.get(value.name or "", "float32") not in _HALVES:
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
        if node.op_type in _MOVING:
            places = _MOVING[node.op_type]
            return places is None or place in places
        return True

    # --- weights ---------------------------------------------------------------------------------

    def weights(self) -> _Asked:
        """What operators ask of the weights; a weight that nothing reads as float32 is half."""
        asked = _Asked()
        for value, root in self._roots.items():
            for node, place in value.uses():
                if node.op_type not in _ANY_DTYPE and node.outputs[0] not in self._roots:
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
        names = asked.half - asked.wide - self.wide
        return {value for value, root in self._roots.items() if root in names}


def _moved(node: ir.Node) -> list[ir.Value]:
    """Inputs whose elements a node only moves; empty where it does more."""
    if node.domain != "" or node.op_type not in _MOVING:
        return []
    places = _MOVING[node.op_type]
    inputs = [v for i, v in enumerate(node.inputs) if places is None or i in places]
    return [value for value in inputs if value is not None]


def _constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant of the graph, not a weight."""
    return (
        value is not None
        and value.is_initializer()
        and not is_weight(value.name or "")
        and value.const_value is not None
    )


class _Rewriter:
    """Writes a plan into its graph."""

    def __init__(self, model: ir.Model, plan: _Plan, dtype: ir.DataType) -> None:
        self.model, self.plan, self.dtype = model, plan, dtype
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._half = plan.half | plan.half_weights
        self._top = next(iter(model.graph))

    def run(self) -> None:
        """Change dtypes and put casts where they meet."""
        graph, plan = self.model.graph, self.plan
        nodes = list(graph.all_nodes())
        for value in self._half:
            value.dtype = self.dtype
            if value.is_initializer():
                assert value.shape is not None
                value.const_value = valueless(self.dtype, value.shape, value.name or "")
        for node in nodes:
            if node.op_type in _ANY_DTYPE or plan.moves_weight(node):
                continue
            for place, given in enumerate(node.inputs):
                if given is not None:
                    wanted = plan.takes_half(node, place)
                    node.replace_input_with(place, self._as(given, wanted))
        for node in plan.lookups:
            self._widen(node)
        for place, value in enumerate(list(graph.outputs)):
            self._set_output(place, value)

    def _as(self, value: ir.Value, half: bool) -> ir.Value:
        """A value in the dtype that is asked for; what is no float stays as it is."""
        if (value in self._half) == half:
            return value
        if half and _constant(value):
            return self._constant(value)
        if not half or value in self.plan.half or value.dtype == ir.DataType.FLOAT:
            return self._cast(value, self.dtype if half else ir.DataType.FLOAT)
        return value

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if (value, dtype) not in self._made:
            node = ir.node("Cast", [value], attributes={"to": int(dtype)})
            made = node.outputs[0]
            made.dtype = dtype
            producer = value.producer()
            if producer is None:
                self.model.graph.insert_before(self._top, node)
            else:
                self.model.graph.insert_after(producer, node)
            self._made[value, dtype] = made
        return self._made[value, dtype]

    def _constant(self, value: ir.Value) -> ir.Value:
        """A constant once more, half."""
        if (value, self.dtype) not in self._made:
            assert value.const_value is not None
            name = f"{value.name}_half"
            data = value.const_value.numpy().astype(_NUMPY[self.dtype])
            tensor = ir.tensor(data, dtype=self.dtype, name=name)
            made = ir.Value(name=name, const_value=tensor, shape=value.shape)
            made.dtype = self.dtype
            self.model.graph.register_initializer(made)
            self._made[value, self.dtype] = made
        return self._made[value, self.dtype]

    def _widen(self, node: ir.Node) -> None:
        """Make a half output float32 for all that read it."""
        looked_up = node.outputs[0]
        uses = list(looked_up.uses())
        looked_up.dtype = self.dtype
        cast = self._cast(looked_up, ir.DataType.FLOAT)
        for user, place in uses:
            user.replace_input_with(place, cast)

    def _set_output(self, place: int, value: ir.Value) -> None:
        """Give an output port the dtype that the state has."""
        name = value.name or ""
        wanted = self.plan.ports.get(name, "float32") in _HALVES
        if value.dtype not in (ir.DataType.FLOAT, self.dtype):
            return
        port = self._as(value, wanted)
        if port is value:
            return
        if port in self.model.graph.outputs or port.producer() is None:
            node = ir.node("Identity", [port])
            self.model.graph.append(node)
            node.outputs[0].type = port.type
            port = node.outputs[0]
        value.name, port.name = f"{name}_before", name
        port.shape, value.shape = value.shape, None
        self.model.graph.outputs[place] = port


def _write_functions(model: ir.Model, spec: ModelSpec, precision: Precision, plan: _Plan) -> None:
    """Bodies for the new dtype; operators of float32 layers become their float32 bodies.

    A function is found by its name, so one body per operator is all that a model can have.
    """
    model.functions.clear()
    if plan.separate:
        add_functions(model, spec, Precision())
        bodies = list(model.functions.values())
        model.functions.clear()
        for body in bodies:
            body.overload = "float32"
            model.functions[body.identifier()] = body
        for node in plan.separate:
            node.overload = "float32"
        common.InlinePass()(model)
        model.functions.clear()
    add_functions(model, spec, precision)
    if not model.functions:
        model.opset_imports.pop(DOMAIN, None)


# --- rounding to bfloat16 where nothing computes in it -------------------------------------------


def emulate_bf16(model: ir.Model) -> ir.Model:
    """The float32 graph that rounds where a bfloat16 graph does, in place.

    Operators compute in float32 and their results are cast to bfloat16 and back, as a tensor core
    does that adds up in float32. Weights stay bfloat16 in the file; ports are float32.

    Args:
        model: What :func:`convert` made for ``bf16``, function bodies included.
    """
    graph = model.graph
    nodes = list(graph)
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.BFLOAT16:
            _read_as_float(graph, value, nodes[0])
    for value in graph.inputs:
        if value.dtype == ir.DataType.BFLOAT16:
            value.dtype = ir.DataType.FLOAT
            _insert_casts(graph, value, nodes[0], ir.DataType.BFLOAT16, ir.DataType.FLOAT)
    for node in nodes:
        for value in node.outputs:
            if value.dtype != ir.DataType.BFLOAT16:
                continue
            if node.op_type == "Cast" or _looks_up(node):
                _insert_casts(graph, value, node, ir.DataType.FLOAT)
                continue
            value.dtype = ir.DataType.FLOAT
            if node.op_type not in _MOVING:
                _insert_casts(graph, value, node, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
    for function in model.functions.values():
        for node in function.all_nodes():
            if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.BFLOAT16:
                node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    name_values(model)
    return model


def _looks_up(node: ir.Node) -> bool:
    """Whether a node takes rows of a bfloat16 weight, which ONNX Runtime does on a CPU."""
    table = node.inputs[0] if node.op_type == "Gather" else None
    return table is not None and table.is_initializer() and is_weight(table.name or "")


def _read_as_float(graph: ir.Graph, value: ir.Value, first: ir.Node) -> None:
    """Make a bfloat16 constant float32, and cast a bfloat16 weight for all but lookups."""
    if is_weight(value.name or ""):
        uses = [(node, place) for node, place in value.uses() if not _looks_up(node)]
        _insert_casts(graph, value, first, ir.DataType.FLOAT, uses=uses)
        return
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    value.dtype = ir.DataType.FLOAT


def _insert_casts(
    graph: ir.Graph,
    value: ir.Value,
    at: ir.Node,
    *dtypes: ir.DataType,
    uses: Sequence[tuple[ir.Node, int]] | None = None,
) -> None:
    """Put casts one after the other behind a value, for these or for all that read it.

    Args:
        graph: The graph.
        value: The value.
        at: Its producer, or the graph's first node where it has none.
        dtypes: Of the casts.
        uses: Nodes and their inputs that take the last cast; all and the port if None.
    """
    whole = uses is None
    readers = [(node, place) for node, place in (value.uses() if uses is None else uses)]
    last, nodes = value, []
    for dtype in dtypes:
        nodes.append(ir.node("Cast", [last], attributes={"to": int(dtype)}))
        last = nodes[-1].outputs[0]
        last.dtype = dtype
    if value.producer() is None:
        graph.insert_before(at, nodes)
    else:
        graph.insert_after(at, nodes)
    for node, place in readers:
        node.replace_input_with(place, last)
    for place, port in enumerate(list(graph.outputs)):
        if whole and port is value:
            last.name, last.shape = value.name, value.shape
            value.name, value.shape = f"{value.name}_before", None
            graph.outputs[place] = last


# --- files ---------------------------------------------------------------------------------------


def convert_bundle(
    bundle: Bundle,
    precision: str,
    folder: Path,
    *,
    fp32_layers: Collection[int] = (),
    roles: Iterable[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Bundle:
    """Write the graphs of a float32 bundle at another precision, with weights of their own.

    The weights go through some megabytes of memory, whatever their size. Tokenizer and licence
    files are not copied: the folder is what engines are built from.

    Args:
        bundle: A float32 bundle.
        precision: ``fp16`` or ``bf16``.
        folder: An empty folder.
        fp32_layers: See :func:`convert`.
        roles: Graphs to convert; all if none are given, copies for one target aside.
        progress: Told what is being done.

    Returns:
        What stands in the folder, as a bundle.

    Raises:
        UsageError: see :func:`convert`; for a bundle of another precision.
        BackendError: for weights that do not fit the dtype.
        BundleError: where a file cannot be written.
    """
    say = progress or (lambda _: None)
    chosen = half_precision(precision)
    if bundle.precision != Precision():
        raise UsageError(
            f"{bundle.path} is {bundle.precision.name}, and only a float32 bundle can be converted "
            f"to {precision}: export it at --precision fp32"
        )
    names = list(roles) or [role for role in bundle.graphs if "@" not in role]
    graphs = {name: bundle.graph(name) for name in names}
    say(f"converting {len(names)} graphs to {precision}")
    models = {name: ir.load(bundle.path / graph.file) for name, graph in graphs.items()}
    stored: dict[str, Place] = {}
    for model in models.values():
        stored |= places_in(model)
    _convert(list(models.values()), bundle.spec, precision, fp32_layers)
    places, digest = _write_weights(models.values(), stored, bundle.path / WEIGHTS, folder, say)
    state = StateSpec.of(bundle.spec, chosen)
    made: dict[str, Graph] = {}
    for name, model in models.items():
        inputs, outputs = graph_ports(bundle.spec, state, name, graphs[name].top_k)
        lint(model, inputs, outputs)
        _check_ports(model, {port.name: port.dtype for port in (*inputs, *outputs)})
        point_at_weights(model, places, folder)
        file = f"{name}.onnx"
        write_atomic(folder / file, serialised(model))
        sha256 = sha256_of(folder / file)
        made[name] = Graph(name, file, sha256, graphs[name].min_onnxruntime, inputs, outputs)
    out = replace(
        bundle, path=folder, precision=chosen, state=state, graphs=made, weights=digest, files={}
    )
    write_atomic(folder / MANIFEST, out.manifest())
    return replace(out, digest=sha256_of(folder / MANIFEST))


def _check_ports(model: ir.Model, dtypes: Mapping[str, str]) -> None:
    """The graph's ports have the dtypes that the state says.

    Raises:
        BackendError: naming the port.
    """
    spelled = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64, **_HALVES}
    for value in itertools.chain(model.graph.inputs, model.graph.outputs):
        if value.dtype != spelled[dtypes[value.name or ""]]:
            raise BackendError(
                f"port {value.name!r} of the converted graph is {value.dtype}, expected "
                f"{dtypes[value.name or '']}: please report this model"
            )


def _write_weights(
    models: Iterable[ir.Model],
    stored: Mapping[str, Place],
    source: Path,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[dict[str, Place], str]:
    """Write the weights that the converted graphs read; see :func:`convert_bundle`.

    Returns:
        Place by name, and the sha256 of the file.
    """
    dtypes: dict[str, ir.DataType] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if is_weight(name):
                assert value.dtype is not None
                dtypes[name] = value.dtype
    # wide elements first, so that each lies on its own size
    names = sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))
    header, places = layout((name, dtypes[name], stored[name].shape) for name in names)
    digest = hashlib.sha256(header)
    total = sum(place.length for place in places.values())
    done = told = 0
    target = folder / WEIGHTS
    with source.open("rb") as given, target.open("wb") as stream:
        stream.write(header)
        for name in names:
            for piece in _pieces(given, name, stored[name], dtypes[name]):
                stream.write(piece)
                digest.update(piece)
                done += len(piece)
                if done - told >= _TELL:
                    told = done
                    say(f"writing the weights: {100 * done // total} %")
    target.chmod(0o666 & ~umask())
    return places, digest.hexdigest()


def _pieces(
    given: BinaryIO, name: str, place: Place, dtype: ir.DataType
) -> Iterator[bytes | memoryview]:
    """A weight piece by piece, in another dtype.

    Raises:
        BackendError: where it does not fit.
    """
    given.seek(place.offset)
    left, size = place.length, place.dtype.itemsize
    while left:
        raw = given.read(min(left, int(_PIECE * size)))
        if not raw:
            raise BackendError(f"weight {name!r} ends too early: copy the bundle again")
        left -= len(raw)
        if dtype == place.dtype:
            yield raw
            continue
        values = np.frombuffer(raw, np.float32)
        with np.errstate(over="ignore"):
            made = values.astype(_NUMPY[dtype])
        if not np.isfinite(made).all():
            raise BackendError(_overflow(given, name, place, dtype))
        yield made.view(np.uint8).data


def _overflow(given: BinaryIO, name: str, place: Place, dtype: ir.DataType) -> str:
    """What is wrong with a weight that does not fit a dtype."""
    given.seek(place.offset)
    largest, left = 0.0, place.length
    while left:
        values = np.frombuffer(given.read(min(left, _PIECE * 4)), np.float32)
        left -= values.nbytes
        largest = max(largest, float(np.abs(values).max()))  # NaN wins
    text = f"weight {name!r} holds values up to {largest:.3g}"
    if not np.isfinite(largest):
        return f"{text}, expected finite ones: the checkpoint is broken, use another one"
    limit = _LARGEST[dtype]
    found = _LAYER.match(name)
    keep = f" or keep the layer in float32 (--fp32-layers {found[1]})" if found else ""
    other = (
        "build at --precision fp32"
        if dtype == ir.DataType.BFLOAT16
        else ("build at --precision bf16")
    )
    return f"{text}, and {dtype.name.lower()} ends at {limit:.3g}: {other}{keep}"


# --- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """How far one port of a converted graph is from float32, and what was allowed.

    Attributes:
        place: Where on the way.
        port: Its name, and the row where it is a state.
        max_abs: Largest difference.
        max_rel: The same as a share of the port's deviation.
        rms_rel: Root mean square of the difference, as such a share.
        peak_rel: Largest difference as a share of the port's largest value.
        passed: Whether that is allowed.
        problem: What is wrong beside the size of the difference.
    """

    place: str
    port: str
    max_abs: float
    max_rel: float
    rms_rel: float
    peak_rel: float
    passed: bool
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; numbers that have no meaning are None."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return {
            k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in out.items()
        }


def check_precision(
    bundle: Bundle,
    converted: Bundle,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare converted graphs with the float32 ones along trajectories, in ONNX Runtime.

    Each side carries its own state over :data:`CHECKED_BLOCKS` blocks of :data:`SAMPLE`, of random
    tokens where the bundle has no tokenizer, and denoises blocks of which half is masked. float16
    graphs run as they are; bfloat16 ones as :func:`emulate_bf16` rounds them. The float32 side
    runs first, so that one side at a time is in memory.

    A port passes within the tolerance of the precision. A scan state of few large values among
    many small ones has a deviation far below the large: such a port also passes if the root mean
    square of the difference is within that share of the deviation, and the largest difference
    within that share of the largest value. Tokens of a reduced head may be others if float32
    scores them as high within twice the tolerance.

    Args:
        bundle: The float32 bundle.
        converted: What :func:`convert_bundle` made of it.
        seed: Of masks and random tokens.
        threads: Of a pass; None for ONNX Runtime's choice.
        progress: Told what is compared.

    Returns:
        ``kind`` (how it was run), ``reference``, ``passed``, ``graphs``, ``tokens``, ``blocks``,
        ``comparisons``, ``worst`` (place, port and sizes) and ``tolerance``.
        :func:`require_precision` raises where it failed.

    Raises:
        BackendError: where ONNX Runtime cannot run a graph.
    """
    say = progress or (lambda _: None)
    name = converted.precision.name
    tolerance = Tolerance.of(name)
    roles = list(converted.graphs)
    found: list[_Found] = []
    ids = _tokens(bundle)
    with _runnable(converted) as runnable:
        for group in _groups(roles):
            say(f"comparing {', '.join(group)} at {name} with float32")
            if split_role(group[0])[1] != "logits":
                found += _head_differences(bundle, runnable, group[0], seed, tolerance)
                continue
            right = list(_walk(bundle, group, ids, seed, threads))
            given = _walk(runnable, group, ids, seed, threads)
            for (place, expected), (_, got) in zip(right, given, strict=True):
                for port in {**expected, **got}:
                    one = _difference(place, port, expected[port], got[port], tolerance)
                    found.append(one)
    worst = max(found, key=lambda one: (not one.passed, bool(one.problem), one.max_rel))
    how = "run as they are" if name == "fp16" else "in float32, rounded to bf16 by pairs of casts"
    return {
        "kind": f"{name} graphs in ONNX Runtime on the CPU, {how}",
        "reference": "the bundle's float32 graphs in ONNX Runtime on the CPU",
        "passed": all(one.passed for one in found),
        "graphs": roles,
        "tokens": "random" if ids is None else "text",
        "blocks": CHECKED_BLOCKS,
        "comparisons": len(found),
        "worst": worst.to_dict(),
        "tolerance": tolerance.to_dict(),
    }


def require_precision(report: Mapping[str, Any], fp32_layers: Collection[int] = ()) -> None:
    """Raise where the graphs of a precision are not close enough to float32.

    Args:
        report: What :func:`check_precision` gave.
        fp32_layers: The layers that stayed float32.

    Raises:
        ParityError: naming place, port, size and tolerance, and what to do.
    """
    if report["passed"]:
        return
    worst, limit = report["worst"], report["tolerance"]
    what = worst["problem"] or (
        f"differs by {worst['max_abs']:.3g}, {worst['max_rel']:.3g} of its deviation"
    )
    also = "more layers" if fp32_layers else "layers"
    other = "bf16 or fp32" if limit["precision"] == "fp16" else "fp32"
    raise ParityError(
        f"{limit['precision']} graphs differ from float32: {worst['place']}, {worst['port']}: "
        f"{what} (allowed: {limit['relative']}): build at --precision {other}, or keep {also} in "
        "float32 with --fp32-layers"
    )


def _difference(place: str, port: str, right: Array, given: Array, tolerance: Tolerance) -> _Found:
    """How one port differs."""
    plain = difference(port, right, given, tolerance)
    if plain.problem or not plain.max_rel:
        sizes = (plain.max_abs, plain.max_rel, 0.0, 0.0)
        return _Found(place, port, *sizes, plain.passed, plain.problem)
    exact = right.astype(np.float64)
    gap = given.astype(np.float64) - exact
    scale = plain.max_abs / plain.max_rel
    rms = float(np.sqrt(np.mean(gap * gap))) / scale
    peak = plain.max_abs / float(np.abs(exact).max())
    passed = plain.passed or (rms <= tolerance.relative and peak <= tolerance.relative)
    return _Found(place, port, plain.max_abs, plain.max_rel, rms, peak, passed)


@contextlib.contextmanager
def _runnable(converted: Bundle) -> Iterator[Bundle]:
    """The bundle as ONNX Runtime's CPU provider can run it."""
    if converted.precision.io != "bfloat16":
        yield converted
        return
    state = StateSpec.of(converted.spec)
    made: dict[str, Graph] = {}
    try:
        for role, graph in converted.graphs.items():
            model = emulate_bf16(ir.load(converted.path / graph.file))
            inputs, outputs = graph_ports(converted.spec, state, role, graph.top_k)
            made[role] = replace(graph, file=f"{role}.rounded.onnx", inputs=inputs, outputs=outputs)
            write_atomic(converted.path / made[role].file, serialised(model))
        yield replace(converted, precision=Precision(), state=state, graphs=made)
    finally:
        for graph in made.values():
            (converted.path / graph.file).unlink(missing_ok=True)


def _groups(roles: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Roles that are run together: a trajectory needs one to commit and one to denoise."""
    left = dict.fromkeys(roles)
    if "denoise" in left and "commit" in left:
        yield "denoise", "commit"
        del left["denoise"], left["commit"]
    for role in left:
        yield (role,)


def _tokens(bundle: Bundle) -> Array | None:
    """Ids of the sample; None where the bundle has no tokenizer."""
    try:
        from fixedstate.runtime.text import Text

        ids = Text.open(bundle).encode(SAMPLE)
    except UsageError:
        return None
    if not ids:
        raise ParityError("the bundle's tokenizer gives no ids for plain text: check it")
    return np.asarray(ids, np.int64)


def _walk(
    bundle: Bundle, roles: tuple[str, ...], ids: Array | None, seed: int, threads: int | None
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Outputs and states by port, place by place."""
    rng = np.random.default_rng(seed)
    sessions = open_sessions(bundle, roles, threads=threads)
    spec, rows, length = bundle.spec, _CHECKED_ROWS, bundle.spec.block_len
    count = (CHECKED_BLOCKS + 1) * length
    if ids is None:
        tokens = rng.integers(0, spec.vocab_size, (rows, count))
    else:  # every row begins elsewhere in the text
        starts = np.arange(rows)[:, None] * len(ids) // rows
        tokens = ids[(starts + np.arange(count)) % len(ids)]
    if roles == ("full",):
        for end in (1, length, 3 * length + 1):
            yield f"full, {end} tokens", sessions["full"].run({"input_ids": tokens[:, :end]})
        return
    engine = SessionEngine(spec, bundle.state, sessions, slots=rows)
    mask = 0 if spec.mask_id is None else spec.mask_id
    blocks = [tokens[:, i * length : (i + 1) * length] for i in range(CHECKED_BLOCKS + 1)]
    masked = [np.where(rng.random(block.shape) < 0.5, mask, block) for block in blocks]
    for index in range(CHECKED_BLOCKS):
        for step in range(2 if spec.self_conditioning_width else 1):
            logits = engine.denoise(masked[index])
            yield f"block {index}, denoise pass {step + 1}", {"logits": logits.copy()}
        if engine.fuses:
            logits = engine.commit_denoise(np.concatenate([blocks[index], masked[index + 1]], 1))
            yield f"block {index}, commit_denoise", {"logits": logits.copy()}
        else:
            # the second row commits every other block only
            lengths = [0 if row == 1 and index % 2 else length for row in range(rows)]
            engine.commit(blocks[index], np.array(lengths))
        states = {
            f"{port}, row {row}": array
            for row in range(rows)
            for port, array in engine.read(row).items()
        }
        if spec.logit_shift:
            states["last_logits"] = engine.last_logits.copy()
        yield f"block {index}, state", states


def _head_differences(
    bundle: Bundle, converted: Bundle, role: str, seed: int, tolerance: Tolerance
) -> Iterator[_Found]:
    """How a reduced head differs from what float32 logits say of the tokens that it gives.

    Logits that are off by e at most change a logarithm of a probability by 2e at most.
    """
    spec = bundle.spec
    base, _ = split_role(role)
    rng = np.random.default_rng(seed)
    sizes = {"B": _CHECKED_ROWS, "m": 1, "C": 4 * spec.block_len, "R": spec.block_len}
    lengths = np.zeros(_CHECKED_ROWS, np.int64)
    feeds = draw_inputs(
        bundle.graph(role).inputs,
        rng,
        vocab=spec.vocab_size,
        past_length=rng.integers(0, 4, _CHECKED_ROWS) * spec.block_len,
        commit_length=lengths,
        **sizes,
    )
    slots = feeds["open_slots"] = feeds["open_slots"] % spec.block_len
    plain = {port.name: feeds[port.name] for port in bundle.graph(base).inputs}
    logits = open_sessions(bundle, (base,))[base].run(plain)["logits"].astype(np.float64)
    session = open_sessions(converted, (role,))[role]
    given = session.run(
        {port.name: feeds[port.name].astype(numpy_dtype(port.dtype)) for port in session.inputs}
    )
    scores = np.take_along_axis(logits, slots[..., None], 1)
    off = 2 * tolerance.relative * float(scores.std()) + tolerance.floor
    scores[..., spec.vocab_size :] = -np.inf
    if spec.mask_id is not None:
        scores[..., spec.mask_id] = -np.inf
    shares = scores - scores.max(-1, keepdims=True)
    shares -= np.log(np.exp(shares).sum(-1, keepdims=True))  # logarithms of probabilities
    place = f"{role}, one pass"
    rank = -np.sort(-shares, -1)
    for tokens, confidence in (("tokens", "confidence"), ("top_tokens", "top_confidence")):
        if tokens not in given:
            continue
        chosen = given[tokens].reshape(*slots.shape, -1)
        right = np.take_along_axis(shares, np.clip(chosen, 0, spec.vocab_rows - 1), -1)
        gap = float(np.abs(rank[..., : chosen.shape[-1]] - right).max())
        yield _within(place, tokens, gap, off)
        with np.errstate(divide="ignore"):
            found = np.log(given[confidence].reshape(chosen.shape).astype(np.float64))
        yield _within(place, confidence, float(np.abs(found - right).max()), off)
    if "entropy" in given:
        sure = np.where(np.isfinite(shares), shares, 0.0)
        entropy = -(np.exp(shares) * sure).sum(-1)
        gap = float(np.abs(given["entropy"] - entropy).max())
        yield _within(place, "entropy", gap, off * float(np.log(spec.vocab_rows)))


def _within(place: str, port: str, gap: float, limit: float) -> _Found:
    """A difference that is judged by a limit of its own; NaN and infinity never pass."""
    problem = "" if np.isfinite(gap) else "the candidate holds NaN, infinity or 0"
    share = gap / limit
    return _Found(place, port, gap, share, share, share, gap <= limit and not problem, problem)
