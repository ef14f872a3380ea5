"""Denoiser -> ONNX: one graph per role, traced with its ports as plain tensors.

``torch.onnx.export`` keeps the block operators as nodes of domain ``fixedstate``; passes in
:mod:`fixedstate.export.passes` then finish the file. What came back is checked, because the
converter only logs some of its failures.
"""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch
from onnx import defs
from onnxscript import values
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

from fixedstate.errors import ExportError
from fixedstate.export.denoiser import Denoiser, RoleGraph
from fixedstate.plugins.schema import DOMAIN, FLOAT32_INPUTS, OPS, OPSET, VERSION
from fixedstate.ports import Port

_EXAMPLE = {"B": 3, "n": 5, "m": 2, "C": 37, "T": 24}
"""Sizes used while tracing: no two alike, none of them 1, so that nothing is specialised."""

_ANY = [f"tensor({name})" for name in ("float", "float16", "bfloat16", "double", "int64", "bool")]


def _register_schemas() -> None:
    """Tell onnx the operators of domain ``fixedstate``, once per process."""
    for op in OPS.values():
        if defs.has(op.name, DOMAIN):
            continue
        formal = defs.OpSchema.FormalParameter
        inputs = [formal(name, _formal_type(name)) for name in op.inputs]
        outputs = [formal(name, _formal_type(name)) for name in op.outputs]
        used = {_formal_type(name) for name in (*op.inputs, *op.outputs)} & {"T", "S"}
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


def _formal_type(name: str) -> str:
    """T follows the io dtype, S is the state's own dtype, the rest are fixed."""
    if name in FLOAT32_INPUTS:
        return "tensor(float)"
    return {"state": "S", "new_state": "S", "length": "tensor(int64)"}.get(name, "T")


def _translations(block_len: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """torch operator -> a function that records one node of domain ``fixedstate``."""
    opset = values.Opset(DOMAIN, VERSION)
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for op in OPS.values():
        target = getattr(torch.ops.fixedstate, op.torch_name).default
        table[target] = _translation(opset, op.name, len(op.inputs), block_len)
    return table


def _translation(opset: values.Opset, name: str, count: int, block_len: int) -> Callable[..., Any]:
    record = getattr(opset, name)
    if count == 3:
        if name == "CausalConvReverse":
            return lambda x, weight, bias, length: record(x, weight, bias, block_len=block_len)
        raise AssertionError(name)
    if count == 4:
        return lambda x, weight, bias, state: record(x, weight, bias, state, block_len=block_len)
    if count == 5:
        return lambda x, weight, bias, state, length: record(
            x, weight, bias, state, length, block_len=block_len
        )
    if count == 6:
        return lambda x, dt, a, b, c, d, length: record(x, dt, a, b, c, d, block_len=block_len)
    return lambda x, dt, a, b, c, d, state, length: record(
        x, dt, a, b, c, d, state, block_len=block_len
    )


def trace(denoiser: Denoiser, role: str) -> ir.Model:
    """The graph of one role, with the ports' names and still without function bodies.

    Args:
        denoiser: A denoiser with :data:`fixedstate.plugins.torch_ops.TRACED` operators.
        role: ``denoise``, ``commit`` or ``commit_denoise``.

    Raises:
        ExportError: naming what could not be traced, or what came back instead.
    """
    _register_schemas()
    graph = RoleGraph(denoiser, role)
    inputs = [_example(port) for port in graph.inputs]
    with _quiet() as said:
        try:
            program = torch.onnx.export(
                graph,
                tuple(inputs),
                None,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=(_dynamic(graph.inputs),),
                input_names=[port.name for port in graph.inputs],
                output_names=[port.name for port in graph.outputs],
                custom_translation_table=_translations(denoiser.spec.block_len),
                verbose=False,
                optimize=True,
            )
        except Exception as err:
            raise ExportError(f"graph {role!r}: {_reason(err, graph, inputs)}") from err
    assert program is not None
    model = program.model
    found = model.opset_imports.get("")
    if found != OPSET:
        raise ExportError(
            f"graph {role!r}: the converter gave opset {found} instead of {OPSET}; it said: "
            f"{said.getvalue().strip()[-300:] or 'nothing'}"
        )
    return model


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
    try:
        with torch.inference_mode(), _KnownOpsOnly():  # type: ignore[no-untyped-call]
            graph(*inputs)
    except _OpaqueOperatorError as found:
        return (
            f"{_layer_of(found)}{found} cannot be traced: replace it by tensor code that "
            "torch.export can follow, or declare it in fixedstate.plugins with a function body"
        )
    except Exception as found:
        err = found
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
    named = ["torch", "onnxscript", *logging.root.manager.loggerDict]
    loggers = [
        logging.getLogger(name)
        for name in dict.fromkeys(named)
        if name.partition(".")[0] in ("torch", "onnxscript")
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
