"""The operators as ahead-of-time quick-deployable plugins of TensorRT: kernels inside the engine.

``tensorrt.plugin`` (10.9 and newer) takes three functions per plugin. They run while an engine is
built; what stays in the engine is the PTX text, its entry, and formulas for grid and arguments, so
that neither Python nor a plugin library is needed to run it:

* register: types and shapes of the outputs. Called while the graph is parsed, so nearly everything
  that a kernel cannot take is refused here, before any building.
* autotune: which types and which compiled forms (tactics) to choose from. Called with the sizes, so
  only forms that take them are offered.
* aot_impl: text, entry, launch. Called per optimization profile, whose bounds are checked here.

Everything is read from :class:`~fixedstate.plugins.schema.KernelSpec`. TensorRT keeps kernels by
types and tactic, not by shape or profile: a text depends on its tactic and on the io dtype alone.
TensorRT prints an error raised here on stderr and fails without repeating it, so the texts are
kept in a list as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Any

from fixedstate.errors import BackendError, FixedStateError, SpecError
from fixedstate.plugins.schema import DOMAIN, KERNEL_IO, OPS, KernelSpec, Tile, Unknown

ATTRIBUTE = "block_len"
"""The one attribute that reaches a plugin; the parser keeps namespace and version to itself."""

ARGUMENT_LIMIT = 2**31 - 1
"""Largest int32 argument, and most thread blocks along x."""

_INSTEAD = "build the engine without plugins: the function body takes every size and dtype"

_TYPE_NAMES = {
    "float32": ("FLOAT", "FP32"),
    "float16": ("HALF", "FP16"),
    "bfloat16": ("BF16", "BF16"),
    "int64": ("INT64", "INT64"),
}
"""Per dtype: its name in ``tensorrt.DataType``, and in an autotune combination."""

_Function = Callable[..., Any]


def register(trt: Any, trtp: Any, refused: list[str] | None = None) -> list[str]:
    """Register every operator, so that TensorRT's ONNX parser finds the plugins.

    Nodes need ``plugin_namespace``, ``plugin_version`` and ``block_len``; an ``aot`` attribute is
    not needed, since no implementation but the ahead-of-time one is there. Operators that are
    registered already are left as they are.

    Args:
        trt: The module ``tensorrt``.
        trtp: The module ``tensorrt.plugin``.
        refused: Receives the text of every error that a later parse or build raises in here.

    Returns:
        ``fixedstate::Name`` of every operator.

    Raises:
        BackendError: if this TensorRT has no ahead-of-time plugins.
    """
    if not hasattr(trtp, "KernelLaunchParams"):
        raise BackendError(
            f"TensorRT {getattr(trt, '__version__', 'of unknown version')} has no ahead-of-time "
            "plugins; install tensorrt 10.9 or newer, or build the engine without plugins"
        )
    known = getattr(trtp.op, DOMAIN, None)
    for spec in OPS.values():
        if not hasattr(known, spec.name):
            _define(trt, trtp, spec, [] if refused is None else refused)
    return [_identity(spec) for spec in OPS.values()]


def _identity(spec: KernelSpec) -> str:
    return f"{DOMAIN}::{spec.name}"


def _define(trt: Any, trtp: Any, spec: KernelSpec, refused: list[str]) -> None:
    """Register one operator; ``tensorrt.plugin`` reads parameter names and annotations."""
    dtypes = {getattr(trt.DataType, names[0]): dtype for dtype, names in _TYPE_NAMES.items()}
    outputs = GenericAlias(tuple, (trtp.TensorDesc,) * len(spec.outputs))
    inputs: dict[str, Any] = dict.fromkeys(spec.input_names, trtp.TensorDesc)
    inputs[ATTRIBUTE] = int

    def describe(*descs: Any, **attributes: Any) -> tuple[Any, ...]:
        return _describe(spec, dtypes, descs, attributes)

    def autotune(*arguments: Any) -> list[Any]:
        *descs, block_len, _ = arguments
        return [trtp.AutoTuneCombination(*_combination(spec, descs, block_len))]

    def kernel(*arguments: Any) -> tuple[str, str, Any, Any]:
        *descs, block_len, _, tactic = arguments
        return _kernel(trtp, spec, dtypes, descs, block_len, tactic)

    def signed(function: _Function, parameters: dict[str, Any], returns: Any) -> _Function:
        return _signed(_noting(function, refused), parameters, returns)

    name = _identity(spec)
    combinations = GenericAlias(list, (trtp.AutoTuneCombination,))
    launch = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    with_outputs = inputs | {"outputs": outputs}
    trtp.register(name)(signed(describe, inputs, outputs))
    trtp.autotune(name)(signed(autotune, with_outputs, combinations))
    trtp.aot_impl(name)(signed(kernel, with_outputs | {"tactic": int}, launch))


def _noting(function: _Function, refused: list[str]) -> _Function:
    """The function, with the text of every error of ours kept in a list."""

    def noting(*arguments: Any, **attributes: Any) -> Any:
        try:
            return function(*arguments, **attributes)
        except FixedStateError as error:
            refused.append(str(error))
            raise

    return noting


def _signed(function: _Function, parameters: dict[str, Any], returns: Any) -> _Function:
    """The function with the signature that ``inspect`` is to see."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=one) for name, one in parameters.items()],
        return_annotation=returns,
    )
    return function


# --- the three functions ------------------------------------------------------------------------


def _describe(
    spec: KernelSpec, dtypes: dict[Any, str], descs: Sequence[Any], attributes: dict[str, Any]
) -> tuple[Any, ...]:
    """Descriptors of the outputs; first called with ranks only, then with dimensions."""
    if ATTRIBUTE not in attributes:
        raise BackendError(
            f"{_identity(spec)}: the node lacks the attribute {ATTRIBUTE!r}; every attribute has "
            "to be written: export the model again"
        )
    block_len = attributes[ATTRIBUTE]
    sizes = _symbolic_sizes(spec, descs, block_len)
    io = _io(spec, dtypes, descs)
    if not any(size.is_fake for desc in descs for size in desc.shape_expr):
        _refuse(spec, sizes, block_len, io)
    like = [
        next(i for i, one in enumerate(spec.inputs) if (one.shapes, one.dtype) == of)
        for of in ((port.shapes, port.dtype) for port in spec.outputs)
    ]
    return tuple(descs[index].like() for index in like)


def _combination(
    spec: KernelSpec, descs: Sequence[Any], block_len: int
) -> tuple[str, str, list[int]]:
    """Types of all ports, their layout, and the tactics that take these sizes."""
    # `|` ties ports together: all io ports are of one dtype
    io = "|".join(_TYPE_NAMES[name][1] for name in KERNEL_IO)
    types = [io if port.dtype == "io" else _TYPE_NAMES[port.dtype][1] for port in spec.ports]
    shapes = [[_known(size) for size in desc.shape] for desc in descs]
    sizes = spec.sizes(shapes, block_len)
    _refuse(spec, sizes, block_len, KERNEL_IO[0])
    tactics = [spec.tactic(tile) for tile in spec.tiles_for(sizes, block_len)]
    return ",".join(types), "LINEAR", tactics


def _kernel(
    trtp: Any,
    spec: KernelSpec,
    dtypes: dict[Any, str],
    descs: Sequence[Any],
    block_len: int,
    tactic: int,
) -> tuple[str, str, Any, Any]:
    """Entry, text, launch parameters and int32 arguments of one tactic."""
    io = _io(spec, dtypes, descs)
    sizes = _symbolic_sizes(spec, descs, block_len)
    _refuse(spec, sizes, block_len, io)
    fitting = {spec.tactic(tile): tile for tile in spec.tiles_for(sizes, block_len)}
    if tactic not in fitting:
        raise BackendError(
            f"{_identity(spec)}: tactic {tactic} was not offered for these sizes (offered: "
            f"{sorted(fitting)}); a timing cache of another version was read: build without it"
        )
    tile = fitting[tactic]
    _check_profile(spec, descs, block_len, io, tile)
    ptx = spec.text(tile, io)
    launch = spec.launch(sizes, tile)
    params = trtp.KernelLaunchParams()
    params.grid_x, params.grid_y, params.grid_z = launch.grid
    params.block_x = ptx.threads
    params.shared_mem = ptx.shared
    # anything but SymInt32 is refused, a bare int included
    arguments = trtp.SymIntExprs.from_tuple([trtp.SymInt32(one) for one in launch.arguments])
    return ptx.entry, ptx.text, params, arguments


# --- checks -------------------------------------------------------------------------------------


def _symbolic_sizes(spec: KernelSpec, descs: Sequence[Any], block_len: int) -> dict[str, Any]:
    """Sizes by symbol: ints where the network knows them, TensorRT's expressions elsewhere."""
    return spec.sizes([[_size(one) for one in desc.shape_expr] for desc in descs], block_len)


def _size(expression: Any) -> Any:
    if not expression.is_fake and expression.is_constant:
        return int(expression.constant_value())
    return expression


def _known(size: int) -> Any:
    """The size, or an unknown one for TensorRT's -1."""
    return int(size) if size >= 0 else Unknown()


def _io(spec: KernelSpec, dtypes: dict[Any, str], descs: Sequence[Any]) -> str:
    """The dtype of activations, after a look at the dtype of every input."""
    given = [dtypes.get(desc.dtype) or str(desc.dtype.name) for desc in descs]
    io = given[next(i for i, port in enumerate(spec.inputs) if port.dtype == "io")]
    if io not in KERNEL_IO:
        raise BackendError(
            f"{_identity(spec)}: activations are {io}; the kernels take {' and '.join(KERNEL_IO)}. "
            f"Export the model in one of these, or {_INSTEAD}"
        )
    for port, dtype in zip(spec.inputs, given, strict=True):
        if dtype != port.dtype_for(io):
            raise BackendError(
                f"{_identity(spec)}: input {port.name!r} is {dtype}; expected "
                f"{port.dtype_for(io)} where activations are {io}; export the model again"
            )
    return io


def _refuse(
    spec: KernelSpec, sizes: dict[str, Any], block_len: int, io: str, where: str = ""
) -> None:
    """Raise what the kernels cannot take; ``where`` says that a profile's sizes are the cause."""
    reasons = spec.refusals(sizes, block_len, io)
    if reasons:
        instead = f"Lower the profile's sizes, or {_INSTEAD}" if where else _INSTEAD.capitalize()
        raise BackendError(f"{_identity(spec)}: {'; '.join(reasons)}{where}. {instead}")


def _check_profile(
    spec: KernelSpec, descs: Sequence[Any], block_len: int, io: str, tile: Tile
) -> None:
    """Refuse a profile one of whose bounds the kernel cannot take."""
    for bound in ("min", "opt", "max"):
        where = f" at the optimization profile's {bound} shapes"
        try:
            sizes = spec.sizes([_bound(desc.shape, bound) for desc in descs], block_len)
        except SpecError as error:
            raise BackendError(f"{error}{where}. Change the profile's sizes") from error
        _refuse(spec, sizes, block_len, io, where)
        launch = spec.launch(sizes, tile)
        for value in (*launch.grid, *launch.arguments):
            if isinstance(value, int) and value > ARGUMENT_LIMIT:
                raise BackendError(
                    f"{_identity(spec)}: {value} in a launch, more than {ARGUMENT_LIMIT},{where}. "
                    "Lower the profile's sizes"
                )


def _bound(shape: Any, bound: str) -> list[Any]:
    """One bound of the profile; unknown sizes where it says nothing."""
    fixed = list(shape)
    given = list(getattr(shape, bound)) if shape.is_dynamic else fixed
    return [_known(size) for size in (given if len(given) == len(fixed) else fixed)]
