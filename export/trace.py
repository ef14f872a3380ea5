"""Denoiser -> ONNX: one graph per role, traced with its ports as plain tensors.

``torch.onnx.export`` keeps the block operators as nodes of domain ``fixedstate``; passes in
:mod:`fixedstate.export.passes` then finish the file. What came back is checked, because the
converter only logs some of its failures.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from onnx import defs
from onnxscript import values
from onnxscript.function_libs.torch_lib.ops.core import aten_view
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

from fixedstate.errors import ExportError
from fixedstate.export.denoiser import BlockModel, Denoiser, RoleGraph
from fixedstate.export.passes import valueless
from fixedstate.export.simplify import simplify
from fixedstate.export.weights import tensor_shapes
from fixedstate.plugins.schema import DOMAIN, OPS, OPSET, VERSION, OpPort
from fixedstate.ports import Port
from fixedstate.spec import ModelSpec

_EXAMPLE = {"B": 3, "n": 5, "m": 2, "C": 37, "T": 24, "R": 7}
"""Sizes used while tracing: no two alike, none of them 1, so that nothing is specialised."""

M = TypeVar("M")

_ATEN = torch.ops.aten

_ANY = [f"tensor({name})" for name in ("float", "float16", "bfloat16", "double", "int64", "bool")]


def _register_schemas() -> None:
    """Tell onnx the operators of domain ``fixedstate``, once per process."""
    for op in OPS.values():
        if defs.has(op.name, DOMAIN):
            continue
        formal = defs.OpSchema.FormalParameter
        inputs = [formal(port.name, _formal_type(port)) for port in op.inputs]
        outputs = [formal(port.name, _formal_type(port)) for port in op.outputs]
        used = {_formal_type(port) for port in op.ports} & {"T", "S"}
        defs.register_schema(
            defs.OpSchema(
                op.name,
                DOMAIN,
                VERSION,
                doc="",
                inputs=inputs,
                outputs=outputs,
                type_constraints=[(letter, _ANY, "") for letter in sorted(used)],
                attributes=[
                    defs.OpSchema.Attribute(name, kind, "", required=False)
                    for name, kind in (
                        ("block_len", defs.OpSchema.AttrType.INT),
                        ("plugin_namespace", defs.OpSchema.AttrType.STRING),
                        ("plugin_version", defs.OpSchema.AttrType.STRING),
                    )
                ],
            )
        )


def _formal_type(port: OpPort) -> str:
    """T follows the io dtype, S is the state's own dtype, the rest are fixed."""
    if port.name in ("state", "new_state"):
        return "S"
    return {"io": "T", "float32": "tensor(float)", "int64": "tensor(int64)"}[port.dtype]


def _translations(block_len: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """torch operator -> a function that records one node of domain ``fixedstate``."""
    opset = values.Opset(DOMAIN, VERSION)
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for op in OPS.values():
        target = getattr(torch.ops.fixedstate, op.torch_name).default
        names = [argument.name for argument in target._schema.arguments]
        table[target] = _translation(getattr(opset, op.name), names, len(op.inputs), block_len)
    table[_ATEN.reshape.default] = aten_view  # a size of 0 is one, as in a decomposed graph
    return table


def _translation(
    record: Callable[..., Any], names: list[str], count: int, block_len: int
) -> Callable[..., Any]:
    """A function of the operator's own arguments, of which the first ``count`` are tensors."""

    def translated(*arguments: Any) -> Any:
        return record(*arguments[:count], block_len=block_len)

    # the exporter reads the parameters from here
    translated.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return translated


def without_weights(spec: ModelSpec, make: Callable[[Mapping[str, torch.Tensor]], M]) -> M:
    """A model to trace, made of weights that have shapes but no values.

    Args:
        spec: The model whose tensors are asked for.
        make: Makes the model of its tensors, own checkpoint layout.
    """
    with FakeTensorMode():
        return make({name: torch.empty(shape) for name, shape in tensor_shapes(spec).items()})


def trace(model: BlockModel, role: str) -> ir.Model:
    """The graph of one role, with the ports' names and still without function bodies.

    Args:
        model: A denoiser with :data:`fixedstate.plugins.torch_ops.TRACED` operators, which needs
            no weights, or a module of another kind.
        role: One of :data:`fixedstate.state.ROLES`.

    Returns:
        The graph. Its weights have name, shape and dtype, but no values.

    Raises:
        ExportError: naming what could not be traced, or what came back instead.
    """
    return trace_graph(RoleGraph(model, role))


def trace_graph(graph: RoleGraph) -> ir.Model:
    """The graph of a module whose arguments and results are ports; see :func:`trace`."""
    _register_schemas()
    inputs = [_example(port) for port in graph.inputs]
    with _quiet() as said, _eager_shapes():
        try:
            captured = torch.export.export(
                graph,
                tuple(inputs),
                dynamic_shapes=(_dynamic(graph.inputs),),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            weights = {*captured.graph_signature.inputs_to_buffers.values()}
            weights |= {*captured.graph_signature.inputs_to_parameters.values()}
            _decompose_once(captured)
            program = torch.onnx.export(
                captured,
                (),
                None,
                dynamo=True,
                opset_version=OPSET,
                input_names=[port.name for port in graph.inputs],
                output_names=[port.name for port in graph.outputs],
                custom_translation_table=_translations(graph.denoiser.spec.block_len),
                verbose=False,
                optimize=False,
            )
        except Exception as err:
            raise ExportError(f"graph {graph.role!r}: {_reason(err, graph, inputs)}") from err
        assert program is not None
        model = program.model
        _simplify(model, weights)
    found = model.opset_imports.get("")
    if found != OPSET:
        raise ExportError(
            f"graph {graph.role!r}: the converter gave opset {found} instead of {OPSET}; it said: "
            f"{said.getvalue().strip()[-300:] or 'nothing'}"
        )
    return model


@contextlib.contextmanager
def _eager_shapes() -> Iterator[None]:
    """Settings of PyTorch while it captures a graph.

    Sizes 0 and 1 are as dynamic as others. What an operator gives is not kept by its symbolic
    shapes, which takes longer than computing it anew.
    """
    with (
        torch.fx.experimental._config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
    ):
        yield


_SPELLINGS = {
    _ATEN.__and__.Tensor: _ATEN.bitwise_and.Tensor,
    _ATEN.__or__.Tensor: _ATEN.bitwise_or.Tensor,
    _ATEN.lift_fresh_copy.default: _ATEN.alias.default,
    _ATEN.detach_.default: _ATEN.alias.default,
}
"""Operators as Python code spells them, and what they come to in a graph that is only run."""


def _decompose_once(captured: torch.export.ExportedProgram) -> None:
    """Decompose in place what needs no second run through the graph; skip that run if it can be.

    The converter asks the program for a decomposed one, which traces it all over again and takes
    longer than everything else. Where no operator is left to decompose the program is its own
    answer.
    """
    for node in captured.graph.nodes:
        if node.target in _SPELLINGS:
            node.target = _SPELLINGS[node.target]
        elif node.target is _ATEN.to.dtype and len(node.args) == 2 and not node.kwargs:
            source, dtype = node.args
            if source.meta["val"].dtype == dtype:
                node.target, node.args = _ATEN.alias.default, (source,)
            else:
                node.target, node.args = _ATEN._to_copy.default, (source,)
                node.kwargs = {"dtype": dtype}
    whole = captured.run_decompositions

    def run_decompositions(table: Any = None) -> torch.export.ExportedProgram:
        return whole(table) if _decomposable(captured, table or {}) else captured

    captured.run_decompositions = run_decompositions


def _decomposable(captured: torch.export.ExportedProgram, table: Mapping[Any, Any]) -> bool:
    """Whether an operator would be decomposed, or changes its input in place."""
    for node in captured.graph.nodes:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or op is _ATEN.reshape.default:
            continue
        composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        # a composite operator outside the table is kept where the converter knows it, which the
        # table is made to say, and dissolved where PyTorch itself always does so
        if op in table or op._schema.is_mutable or (composite and op not in _optional()):
            return True
    return False


@functools.cache
def _optional() -> frozenset[Any]:
    """Operators that PyTorch decomposes only if asked to."""
    return frozenset(torch.export.default_decompositions())


def _simplify(model: ir.Model, weights: set[str]) -> None:
    """Fold constants and drop what is double; values of weights are not looked at.

    Afterwards a weight stands for its values without having them.
    """
    values_of = [value for name, value in model.graph.initializers.items() if name in weights]
    for value in values_of:
        value.const_value = None
    simplify(model)
    for value in values_of:
        assert value.dtype is not None
        assert value.shape is not None
        assert value.name is not None
        value.const_value = valueless(value.dtype, value.shape, value.name)


class _OpaqueOperatorError(Exception):
    """An operator that is neither PyTorch's own nor one of ours."""


class _KnownOpsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops a run at the first operator that no graph can hold."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in ("aten", "prim", "prims", DOMAIN):
            raise _OpaqueOperatorError(f"operator {func.namespace}::{func._opname}")
        return func(*args, **(kwargs or {}))


def _reason(err: BaseException, graph: RoleGraph, inputs: list[torch.Tensor]) -> str:
    """Layer, operator and remedy in one line.

    The exporter's messages name no layer, so the pass is run once more without it: an operator
    that is not PyTorch's own is found where it is called.
    """
    held = [tensor for tensor in graph.buffers() if isinstance(tensor, FakeTensor)]
    kind: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if held:  # weights without values run among tensors of their own kind only
        kind = held[0].fake_mode
        inputs = [held[0].fake_mode.from_tensor(tensor) for tensor in inputs]
    try:
        with torch.no_grad(), kind, _KnownOpsOnly():  # type: ignore[no-untyped-call]
            graph(*inputs)
    except _OpaqueOperatorError as found:
        return (
            f"{_layer_of(found)}{found} cannot be traced: replace it by tensor code that "
            "torch.export can follow, or declare it in fixedstate.plugins with a function body"
        )
    except Exception as found:
        err = err if held else found  # without values a run may fail for the want of them
    cause = _causes(err)[-1]
    text = " ".join(str(cause).split())
    return (
        f"{_layer_of(err)}cannot be traced: {type(cause).__name__}: {text[:400]}; replace the "
        "operator by tensor code that torch.export can follow"
    )


def _causes(err: BaseException) -> list[BaseException]:
    causes = [err]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return causes


def _layer_of(err: BaseException) -> str:
    """Which layer was running: ``layer 1 (mamba2): ``; empty where none was."""
    for cause in reversed(_causes(err)):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_code is Denoiser._run.__code__ and "index" in frame.f_locals:
                layer = frame.f_locals["layer"]
                return f"layer {frame.f_locals['index']} ({layer.mixer}): "
    return ""


def _example(port: Port) -> torch.Tensor:
    shape = port.resolve(**_EXAMPLE)
    if port.name == "commit_length":
        return torch.ones(shape, dtype=torch.int64)
    return torch.zeros(shape, dtype=getattr(torch, port.dtype))


def _dynamic(ports: tuple[Port, ...]) -> tuple[dict[int, Any], ...]:
    """Dimensions that vary, as torch.export wants them: one entry per input.

    A product such as ``16n`` is one symbol here: no tensor code depends on the factor, and plain
    symbols trace in half the time.
    """
    symbols: dict[str, Any] = {}
    out = []
    for port in ports:
        entry: dict[int, Any] = {}
        for axis, dim in enumerate(port.shape):
            if isinstance(dim, str):
                name = "tokens" if dim[0].isdigit() else dim
                entry[axis] = symbols.setdefault(dim, Dim(name, min=1))
        out.append(entry)
    return tuple(out)


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Keep the exporter's chatter off the terminal; what it logged is given back."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    named = ["torch", "onnxscript", "onnx_ir", *logging.root.manager.loggerDict]
    loggers = [
        logging.getLogger(name)
        for name in dict.fromkeys(named)
        if name.partition(".")[0] in ("torch", "onnxscript", "onnx_ir")
    ]
    kept = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    try:
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            warnings.simplefilter("ignore")
            yield said
    finally:
        for logger, handlers, propagate in kept:
            logger.handlers, logger.propagate = handlers, propagate
