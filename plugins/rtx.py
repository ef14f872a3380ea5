"""Plugins of TensorRT-RTX: every operator as a class of its Python interface, IPluginV3.

All of it is read from :class:`fixedstate.plugins.schema.KernelSpec`. They build like any plugin;
a run calls back into this process, which launches the compiled kernel on the engine's stream.

A callback that raises while a network is parsed fails the parser, with a text that names the
callback alone; one that raises while an engine is built may end the process. So what a kernel
cannot take is refused as early as it is known, and every reason is also kept in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np

from fixedstate.errors import BackendError, FixedStateError
from fixedstate.plugins.ptx import Ptx
from fixedstate.plugins.schema import DOMAIN, KERNEL_IO, OPS, VERSION, KernelSpec, OpPort, Unknown

BLOCK_LEN = "block_len"
"""The only attribute that is a field of a plugin; the others say where it is registered."""

_DYNAMIC = "BT"  # symbols that may be dynamic
_ADVICE = "build without plugins: the parser then inlines the function body"


class Function(Protocol):
    """A loaded kernel, as :class:`fixedstate.plugins.driver.Function` is."""

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        stream: int,
        arguments: Sequence[tuple[str, int]],
    ) -> None:
        """Start it on a stream."""
        ...


Load = Callable[[Ptx], Function]
"""Makes a kernel ready to launch."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One launch without its pointers.

    Attributes:
        kernel: The loaded kernel.
        text: What it was loaded from.
        grid: Thread blocks along x, y and z.
        arguments: The int32 run-time arguments.
    """

    kernel: Function
    text: Ptx
    grid: tuple[int, int, int]
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Common:
    """What all plugins of one registration share."""

    trt: Any
    load: Load
    refused: list[str]
    plugin: Any


def creators(trt: Any, load: Load, refused: list[str]) -> list[Any]:
    """A creator per operator, to be registered in the namespace ``fixedstate``; keep them alive.

    Args:
        trt: The module ``tensorrt_rtx`` or ``tensorrt_rtx_bindings``.
        load: Makes kernels ready, see :func:`driver_load`; called when an engine runs.
        refused: Gets what a kernel could not take. An engine built meanwhile must not be used.
    """
    plugin = _class(
        "FixedStatePlugin",
        _Plugin,
        trt.IPluginV3,
        trt.IPluginV3OneCore,
        trt.IPluginV3OneBuildV2,
        trt.IPluginV3OneRuntime,
    )
    creator = _class("FixedStateCreator", _Creator, trt.IPluginCreatorV3One)
    common = _Common(trt, load, refused, plugin)
    return [creator(common, spec) for spec in OPS.values()]


def driver_load(device: int = 0) -> Load:
    """Loads kernels by the CUDA driver, each once; the driver is opened with the first of them.

    Args:
        device: The card that engines run on.
    """
    opened: list[Any] = []
    kernels: dict[str, Function] = {}

    def load(text: Ptx) -> Function:
        from fixedstate.plugins.driver import Driver

        if not opened:
            opened.append(Driver(device))
        if text.sha256 not in kernels:
            opened[0].make_current()
            kernels[text.sha256] = opened[0].load(text.text, text.entry)
        return kernels[text.sha256]

    return load


def _class(name: str, ours: type, *theirs: type) -> Any:
    """Our methods on their interfaces, each of which has to be initialised by name."""

    def begin(self: Any, *arguments: Any) -> None:
        for base in theirs:
            base.__init__(self)  # type: ignore[misc]
        ours.__init__(self, *arguments)  # type: ignore[misc]

    return type(name, (ours, *theirs), {"__init__": begin})


class _Creator:
    """IPluginCreatorV3One: makes plugins out of nodes, and again out of engines."""

    def __init__(self, common: _Common, spec: KernelSpec) -> None:
        self.name = spec.name
        self.plugin_namespace = DOMAIN
        self.plugin_version = str(VERSION)
        field = _field(common.trt, np.zeros(0, np.int32))
        self.field_names = common.trt.PluginFieldCollection([field])
        self._common, self._spec = common, spec

    def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
        """The plugin of one node; ``fields`` are its attributes, or what an engine kept of them.

        Raises:
            BackendError: where ``block_len`` is missing.
        """
        found = {field.name: np.asarray(field.data).ravel() for field in fields}
        if found.get(BLOCK_LEN, np.zeros(0)).size != 1:
            text = (
                f"{DOMAIN}::{self.name}: node {name!r} lacks the attribute {BLOCK_LEN}, an int; "
                "export the model again"
            )
            self._common.refused.append(text)
            raise BackendError(text)
        return self._common.plugin(self._common, self._spec, int(found[BLOCK_LEN][0]))


class _Plugin:
    """IPluginV3 with its capabilities core, build and run, of one node."""

    def __init__(self, common: _Common, spec: KernelSpec, block_len: int) -> None:
        self.plugin_name = spec.name
        self.plugin_namespace = DOMAIN
        self.plugin_version = str(VERSION)
        self.num_outputs = len(spec.outputs)
        self.timing_cache_id = ""
        self._common, self._spec, self._block_len = common, spec, block_len
        self._kept = np.array([block_len], np.int32)  # a field only points to its data
        trt = common.trt
        self._io = {trt.float16: "float16", trt.bfloat16: "bfloat16"}
        self._kinds = {"float32": trt.float32, "int64": trt.int64}
        self._prepared: dict[tuple[Any, ...], Prepared] = {}

    # --- core -----------------------------------------------------------------------------------

    def get_capability_interface(self, kind: Any) -> Any:
        """All three are this object."""
        return self

    def clone(self) -> Any:
        """Another one of the same node."""
        return type(self)(self._common, self._spec, self._block_len)

    # --- build ----------------------------------------------------------------------------------

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        """Io outputs are as x, states are float32.

        Raises:
            BackendError: for dtypes without kernels.
        """
        if input_types[0] not in self._io:
            name = "float32" if input_types[0] == self._kinds["float32"] else input_types[0]
            self._refuse(f"io dtype {name}: the kernels take {' and '.join(KERNEL_IO)}")
        for port, given in zip(self._spec.inputs, input_types, strict=True):
            expected = input_types[0] if port.dtype == "io" else self._kinds[port.dtype]
            if given != expected:
                self._refuse(f"input {port.name!r} is {given}; expected {expected}")
        return [
            input_types[0] if port.dtype == "io" else self._kinds[port.dtype]
            for port in self._spec.outputs
        ]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Any, build: Any) -> list[Any]:
        """Every output has the shape of an input: y of x, the new state of the state.

        Raises:
            BackendError: for sizes that the kernel cannot take, as far as they are fixed.
        """
        known = [
            [
                dim.get_constant_value() if dim.is_constant() else Unknown()
                for dim in (given[axis] for axis in range(len(given)))
            ]
            for given in inputs
        ]
        # any dtype with kernels: those of the inputs have been looked at
        reasons = self._reasons(known, next(iter(self._io.values())))
        if reasons:
            self._refuse(reasons)
        shapes = [port.shape for port in self._spec.inputs]
        return [
            self._common.trt.DimsExprs(inputs[shapes.index(port.shape)])
            for port in self._spec.outputs
        ]

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """Dense tensors, of the dtypes of the ports."""
        port, given = self._spec.ports[pos], in_out[pos].desc
        if given.format != self._common.trt.TensorFormat.LINEAR:
            return False
        if port.dtype == "io":
            return bool(given.type == in_out[0].desc.type and given.type in self._io)
        return bool(given.type == self._kinds[port.dtype])

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Look at the largest sizes of the profile; does not raise, see the module."""
        largest = [
            [
                size if size >= 0 else most if letter in _DYNAMIC else Unknown()
                for letter, size, most in zip(
                    _letters(port, len(given.max)),
                    tuple(given.desc.dims),
                    tuple(given.max),
                    strict=True,
                )
            ]
            for port, given in zip(self._spec.inputs, inputs, strict=True)
        ]
        reasons = self._reasons(largest, self._io[inputs[0].desc.type])
        if reasons:
            self._common.refused.append(self._text(reasons))

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """None: the kernels need no memory of their own."""
        return 0

    def get_valid_tactics(self) -> list[int]:
        """None to choose from: a builder without a card cannot time them."""
        return []

    def get_aliased_input(self, output_index: int) -> int:
        """No output stands in the memory of an input: states trade places between two buffers."""
        return -1

    # --- run ------------------------------------------------------------------------------------

    def get_fields_to_serialize(self) -> Any:
        """What an engine keeps of the node."""
        return self._common.trt.PluginFieldCollection([_field(self._common.trt, self._kept)])

    def attach_to_context(self, context: Any) -> Any:
        """One per execution context."""
        return self.clone()

    def set_tactic(self, tactic: int) -> None:
        """There is one."""

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Load the kernel and compute its launch, so that a captured run only launches."""
        self._prepare(inputs)

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch: pointers of the inputs, the int32 arguments, pointers of the outputs.

        Raises:
            BackendError: for sizes that the kernel cannot take, or by the driver.
        """
        ready = self._prepare(input_desc)
        arguments = [("pointer", int(value)) for value in inputs]
        arguments += [("int32", value) for value in ready.arguments]
        arguments += [("pointer", int(value)) for value in outputs]
        threads = (ready.text.threads, 1, 1)
        ready.kernel.launch(ready.grid, threads, ready.text.shared, int(stream), arguments)

    # --- ours -----------------------------------------------------------------------------------

    def _prepare(self, inputs: Sequence[Any]) -> Prepared:
        shapes = tuple(tuple(given.dims) for given in inputs)
        io = self._io[inputs[0].type]
        if (io, shapes) not in self._prepared:
            reasons = self._reasons(shapes, io)
            if reasons:
                raise BackendError(self._text(reasons))
            sizes = self._spec.sizes(shapes, self._block_len)
            tile = self._spec.tiles_for(sizes, self._block_len)[0]
            text = self._spec.text(tile, io)
            launch = self._spec.launch(sizes, tile)
            self._prepared[io, shapes] = Prepared(
                self._common.load(text), text, launch.grid, launch.arguments
            )
        return self._prepared[io, shapes]

    def _reasons(self, shapes: Sequence[Sequence[Any]], io: str) -> str:
        """Why the kernel cannot take these shapes; empty if it can."""
        try:
            sizes = self._spec.sizes(shapes, self._block_len)
        except FixedStateError as err:
            return str(err).removeprefix(f"{self._spec.name}: ")
        return "; ".join(self._spec.refusals(sizes, self._block_len, io))

    def _text(self, reasons: str) -> str:
        return f"{DOMAIN}::{self._spec.name}: {reasons}; {_ADVICE}"

    def _refuse(self, reasons: str) -> NoReturn:
        text = self._text(reasons)
        if text not in self._common.refused:
            self._common.refused.append(text)
        raise BackendError(text)


def _letters(port: OpPort, axes: int) -> str:
    """Symbols of the axes of an input; a wrong number of axes is refused where sizes are read."""
    return next((shape for shape in port.shapes if len(shape) == axes), "?" * axes)


def _field(trt: Any, data: Any) -> Any:
    return trt.PluginField(BLOCK_LEN, data, trt.PluginFieldType.INT32)
