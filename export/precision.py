"""float32 graph -> float16 or bfloat16 graph, as one pass over the finished file of a bundle.

:mod:`fixedstate.export.precisionplan` decides what is half; here it is written into the graph. A
converted graph needs its own weights file: :mod:`fixedstate.export.precisionfiles` writes both to a
folder from which engines are built, and :mod:`fixedstate.export.precisioncheck` runs the result
beside the float32 graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate import state as states
from fixedstate.errors import UsageError
from fixedstate.export.passes import CUSTOM, add_functions, name_values, valueless
from fixedstate.export.precisionplan import ANY_DTYPE, HALVES, NUMPY_HALVES, HalfPlan, is_constant
from fixedstate.plugins.schema import DOMAIN
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision, StateSpec

PRECISIONS = {name: states.PRECISIONS[name] for name in ("fp16", "bf16")}
"""Io dtype of every precision that a float32 graph can be converted to."""


def half_precision(name: str, given: Precision | None = None) -> Precision:
    """``fp16`` or ``bf16``: io and kv in that dtype, scan state float32.

    Args:
        name: Of the precision.
        given: Of the float32 graphs; states and keys that it keeps in fewer bits stay so.

    Raises:
        UsageError: for another name.
    """
    if name not in PRECISIONS:
        raise UsageError(
            f"precision {name!r} cannot be converted to; use one of {', '.join(PRECISIONS)}"
        )
    return (given or Precision()).at(PRECISIONS[name])


def convert(
    model: ir.Model,
    spec: ModelSpec,
    precision: str,
    fp32_layers: Collection[int] = (),
    given: Precision | None = None,
) -> ir.Model:
    """Make a half precision graph of one float32 graph, in place.

    Weights that become half have dtype and shape, but no values: :func:`convert_bundle` writes
    those. The ports are the ones of ``StateSpec.of(spec, half_precision(precision, given))``.

    Args:
        model: The finished graph of one role of a float32 bundle.
        spec: The model.
        precision: ``fp16`` or ``bf16``.
        fp32_layers: Indices of layers that stay float32 as a whole. Their ports do not; what they
            add to is float32 behind them.
        given: Of the bundle; float32 as a whole if not given.

    Raises:
        UsageError: for another precision, or for a layer that there is not.
    """
    return convert_together([model], spec, precision, fp32_layers, given)[0]


def convert_together(
    models: Sequence[ir.Model],
    spec: ModelSpec,
    precision: str,
    fp32_layers: Collection[int],
    given: Precision | None = None,
) -> Sequence[ir.Model]:
    """Convert the graphs of one weights file together: a weight has one dtype in all of them."""
    chosen = half_precision(precision, given)
    kept = _checked_layers(models, spec, fp32_layers)
    state = StateSpec.of(spec, chosen)
    wide: set[str] = set()
    while True:
        plans = [HalfPlan(model, spec, state, kept, frozenset(wide)) for model in models]
        asked = [plan.weights() for plan in plans]
        both = set().union(*(a.half for a in asked)) & set().union(*(a.wide for a in asked))
        if both <= wide:
            break
        wide |= both
    for model, plan in zip(models, plans, strict=True):
        _Rewriter(model, plan, HALVES[chosen.io]).run()
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


class _Rewriter:
    """Writes a plan into its graph."""

    def __init__(self, model: ir.Model, plan: HalfPlan, dtype: ir.DataType) -> None:
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
            if node.op_type in ANY_DTYPE or plan.moves_weight(node):
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
        if half and is_constant(value):
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
            data = value.const_value.numpy().astype(NUMPY_HALVES[self.dtype])
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
        wanted = self.plan.ports.get(name, "float32") in HALVES
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


def _write_functions(
    model: ir.Model, spec: ModelSpec, precision: Precision, plan: HalfPlan
) -> None:
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
