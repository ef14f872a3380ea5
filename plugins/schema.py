"""One :class:`KernelSpec` per operator of domain ``fixedstate``; every consumer reads it from here.

Who reads what:

* the exporter: names, ports and attributes of the nodes, and the function bodies;
* ONNX Runtime and TensorRT without plugins: the function body, a model-local function of the same
  name as the node;
* TensorRT with plugins: ports, refusals, tiles, launch grid and PTX (a node of this domain carries
  the attributes by which the parser finds a registered plugin);
* tests: the numpy reference in float64.

The grid and the run-time arguments are plain formulas over sizes. They only add, multiply and
divide, so the same lines work on ints and on a builder's symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from fixedstate.errors import SpecError
from fixedstate.plugins import reference
from fixedstate.ports import DTYPES, Array

DOMAIN = "fixedstate"
VERSION = 1

OPSET = 21
"""Opset of the standard operators beside and inside these, in every portable file."""

CHUNK = 64
"""Most tokens in one chunk of the scan's matrix form."""

LONGEST_BLOCK = 256
"""Largest L of a block; 0 in ``block_len`` stands for a whole sequence of any length."""

ATTRIBUTES = ("plugin_namespace", "plugin_version", "block_len")
"""Attributes of every node, always written: where a plugin is looked up, and L in tokens.

``block_len`` 0 says that the whole sequence is one block of any length, which starts from the given
state, or from zero at its right edge.
"""

KERNEL_IO = ("float16", "bfloat16")
"""Io dtypes the kernels are made for; float32 engines use the function body."""

GRID_LIMIT = 65535
"""Most thread blocks along y and z of a launch grid (CUDA C++ programming guide, table 27)."""


class Size(Protocol):
    """An int, or a dimension that a builder only knows as a symbol."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...


class Unknown:
    """A size known at run time only, of which a formula makes another unknown one."""

    def __add__(self, other: object) -> Unknown:
        return self

    __sub__ = __mul__ = __rmul__ = __floordiv__ = __add__


Sizes = Mapping[str, Any]
"""Symbol to size: an int, or a :class:`Size` where it is dynamic."""


def cdiv(a: Any, b: int) -> Any:
    """The quotient of non-negative sizes, rounded up; without a negative number on the way."""
    return (a + (b - 1)) // b


@dataclass(frozen=True, slots=True)
class OpPort:
    """One input or output of an operator.

    Attributes:
        name: Its name in the schema, the function body and the reference.
        dtype: ``io`` for the dtype of activations, or one of :data:`fixedstate.ports.DTYPES`.
        shapes: Allowed shapes in symbols, the usual one first.
    """

    name: str
    dtype: str
    shapes: tuple[str, ...]

    @property
    def shape(self) -> str:
        """The usual shape, one letter per axis."""
        return self.shapes[0]

    def dtype_for(self, io: str) -> str:
        """The dtype where activations are ``io``."""
        return io if self.dtype == "io" else self.dtype


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled form of a kernel: what is fixed in its text.

    Attributes:
        label: Its name within the operator, part of the text's file name.
        constants: Compile-time constants of the kernel by name.
        warps: Warps of 32 threads per thread block.
        longest_block: Largest L it takes as one chunk; None if it loops over chunks.
        widest_state: Largest N it takes; None if it takes any, or the operator has no N.
    """

    label: str
    constants: Mapping[str, int]
    warps: int
    longest_block: int | None = None
    widest_state: int | None = None

    @property
    def threads(self) -> int:
        """Threads per thread block."""
        return 32 * self.warps


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is started.

    Attributes:
        tile: The compiled form.
        grid: Thread blocks along x, y and z; ints or symbolic sizes.
        arguments: The int32 run-time arguments between input and output pointers.
    """

    tile: Tile
    grid: tuple[Any, Any, Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One operator: its ports and rules, its reference and its kernel.

    Kernel parameters stand in this order: pointers of all inputs, the int32 arguments, pointers of
    all outputs.

    Attributes:
        name: ONNX op_type, function name and plugin name; equal to no built-in operator.
        torch_name: The torch custom operator that becomes this node; also the kernel's entry.
        inputs: In order; none is optional.
        outputs: In order.
        argument_names: Symbols of the int32 run-time arguments, in order.
        tiles: Compiled forms in order of preference; a tactic number is an index here plus 1.
        multiples: What a size has to be a multiple of for the kernel.
        reverse: Whether it runs right to left inside each block, from zero.
        single_block: Whether its T tokens are one block.
    """

    name: str
    torch_name: str
    inputs: tuple[OpPort, ...]
    outputs: tuple[OpPort, ...]
    argument_names: tuple[str, ...]
    tiles: tuple[Tile, ...]
    multiples: Mapping[str, int]
    reverse: bool
    single_block: bool
    _reference: Callable[..., Any]
    _grid: Callable[[Sizes, Tile], tuple[Any, Any, Any]]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs in order."""
        return tuple(port.name for port in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs in order."""
        return tuple(port.name for port in self.outputs)

    @property
    def ports(self) -> tuple[OpPort, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    def sizes(self, shapes: Sequence[Sequence[Any]], block_len: int) -> dict[str, Any]:
        """Every symbol's size from the shapes of the inputs.

        Besides the symbols of the ports gives L, tokens per block, and W, skip weights per head
        (Mamba-2: 1 or P).

        Args:
            shapes: One shape per input, ints or symbolic sizes.
            block_len: The attribute.

        Raises:
            SpecError: naming the input whose rank or size contradicts the others. Sizes that are
                not both ints are not compared.
        """
        if len(shapes) != len(self.inputs):
            raise SpecError(
                f"{self.name} has {len(self.inputs)} inputs "
                f"({', '.join(self.input_names)}); {len(shapes)} shapes were given"
            )
        if isinstance(block_len, bool) or not 0 <= block_len <= LONGEST_BLOCK:
            raise SpecError(
                f"{self.name}: block_len is {block_len}; expected 1 to {LONGEST_BLOCK}, or 0 for a "
                "whole sequence"
            )
        found: dict[str, Any] = {}
        for port, shape in zip(self.inputs, shapes, strict=True):
            letters = next((s for s in port.shapes if len(s) == len(shape)), None)
            if letters is None:
                allowed = " or ".join(f"[{', '.join(s)}]" for s in port.shapes)
                raise SpecError(
                    f"{self.name}: input {port.name!r} has {len(shape)} axes; expected {allowed}"
                )
            for letter, given in zip(letters, shape, strict=True):
                # the window of K taps holds K-1 columns
                size = given + 1 if port.name == "state" and letter == "K" else given
                if letter == "W" or letter not in found:
                    found[letter] = size
                elif isinstance(size, int) and isinstance(found[letter], int):
                    if size != found[letter]:
                        raise SpecError(
                            f"{self.name}: {letter} is {size} in input {port.name!r} and "
                            f"{found[letter]} in an earlier one"
                        )
                elif isinstance(size, int):
                    found[letter] = size  # a known size says more than a symbol
        found["L"] = block_len or found["T"]
        if "H" in found:
            found.setdefault("W", 1)
        self._check(found)
        return found

    def _check(self, sizes: Sizes) -> None:
        known = {key: value for key, value in sizes.items() if isinstance(value, int)}
        for key, value in known.items():
            least = 2 if key == "K" and not self.reverse else 1  # a window holds K-1 columns
            if value < least:
                raise SpecError(
                    f"{self.name}: {key} is {value}; expected {least} or more: no tensor may "
                    "be empty"
                )
        if {"H", "G"} <= set(known) and known["H"] % known["G"]:
            raise SpecError(
                f"{self.name}: {known['H']} heads do not divide into {known['G']} groups"
            )
        if "W" in known and known["W"] not in (1, known.get("P", known["W"])):
            raise SpecError(
                f"{self.name}: d has {known['W']} weights per head; expected 1 or {known['P']}"
            )
        if {"T", "L"} <= set(known):
            tokens, block = known["T"], known["L"]
            if self.single_block and tokens != block:
                raise SpecError(f"{self.name}: {tokens} tokens; expected one block of {block}")
            if tokens % block:
                raise SpecError(
                    f"{self.name}: {tokens} tokens are not a multiple of the block length {block}"
                )

    def shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """Shapes of inputs and outputs in order, for known sizes (W above 1 gives d [H, P])."""
        shapes = []
        for port in self.ports:
            letters = port.shapes[-1] if port.name == "d" and sizes.get("W", 1) > 1 else port.shape
            window = port.name in ("state", "new_state")
            shapes.append(tuple(sizes[s] - 1 if s == "K" and window else sizes[s] for s in letters))
        return tuple(shapes)

    def refusals(self, sizes: Sizes, block_len: int, io: str) -> list[str]:
        """Why the kernel cannot take these sizes; empty if it can.

        The function body takes every size, so a refusal means slower, not impossible.

        Args:
            sizes: From :meth:`sizes`; for a dynamic size, its largest value or a symbol, which is
                not judged except where the kernel needs it known.
            block_len: The attribute.
            io: Dtype of activations.
        """
        reasons = []
        if io not in KERNEL_IO:
            reasons.append(f"io dtype {io}: the kernels take {' and '.join(KERNEL_IO)}")
        fixed = [key for key in ("C", "K", "H", "P", "G", "N", "E", "W") if key in sizes]
        dynamic = [key for key in fixed if not isinstance(sizes[key], int)]
        reasons += [f"{key} is dynamic: the kernels need it fixed" for key in dynamic]
        for key, step in self.multiples.items():
            if key not in dynamic and sizes[key] % step:
                reasons.append(f"{key} = {sizes[key]}: the kernels take multiples of {step}")
        if not reasons and not self.tiles_for(sizes, block_len):
            widest = max(tile.widest_state or 0 for tile in self.tiles)
            reasons.append(f"N = {sizes['N']}: the kernels take at most {widest}")
        if not reasons:
            tile = self.tiles_for(sizes, block_len)[0]
            grid = self._grid(sizes, tile)
            for axis, count in zip("yz", grid[1:], strict=True):
                if isinstance(count, int) and count > GRID_LIMIT:
                    reasons.append(
                        f"{count} thread blocks along {axis}: a launch takes at most {GRID_LIMIT}"
                    )
        return reasons

    def tiles_for(self, sizes: Sizes, block_len: int) -> tuple[Tile, ...]:
        """The compiled forms that take these sizes, in order of preference.

        Of several state widths only the smallest sufficient one is given. Where the whole sequence
        is one block, whose length is only known at run time, forms that loop are given.
        """
        fitting = [
            tile
            for tile in self.tiles
            if (tile.widest_state is None or sizes["N"] <= tile.widest_state)
            and (tile.longest_block is None or 0 < block_len <= tile.longest_block)
        ]
        if not fitting:
            return ()
        narrowest = min(tile.widest_state or 0 for tile in fitting)
        fitting = [tile for tile in fitting if (tile.widest_state or 0) == narrowest]
        whole = [tile.longest_block for tile in fitting if tile.longest_block is not None]
        if whole:  # one chunk is enough, and the smallest one is the least work
            fitting = [tile for tile in fitting if tile.longest_block == min(whole)]
        return tuple(fitting)

    def tactic(self, tile: Tile) -> int:
        """The number a builder knows a tile by, 1 or more."""
        return self.tiles.index(tile) + 1

    def launch(self, sizes: Sizes, tile: Tile) -> Launch:
        """Grid and run-time arguments for sizes from :meth:`sizes`, ints or symbolic."""
        arguments = tuple(sizes[name] for name in self.argument_names)
        return Launch(tile, self._grid(sizes, tile), arguments)

    def reference(self, inputs: Mapping[str, Array], block_len: int) -> tuple[Array, ...]:
        """The outputs by :mod:`fixedstate.plugins.reference`, float64, in order.

        Args:
            inputs: Every input by name, of any float dtype numpy has.
            block_len: The attribute.
        """
        self.sizes([np.shape(inputs[name]) for name in self.input_names], block_len)
        arguments = [inputs[name] for name in self.input_names]
        if self.reverse:
            return (self._reference(*arguments, block_len),)
        return tuple(self._reference(*arguments)[: len(self.outputs)])

    def function_body(self, block_len: int, io: str, **model: Any) -> Any:
        """The ONNX function body, see :func:`fixedstate.plugins.bodies.function_body`."""
        from fixedstate.plugins.bodies import function_body

        return function_body(self.name, block_len, io, **model)

    def text(self, tile: Tile, io: str) -> Any:
        """The compiled kernel, see :func:`fixedstate.plugins.ptx.load`."""
        from fixedstate.plugins.ptx import load

        return load(self, tile, io)

    def bytes_moved(self, sizes: Sizes, io: str) -> int:
        """Bytes of every input and output, each read or written once: the floor of a pass."""
        total = 0
        for port, shape in zip(self.ports, self.shapes(sizes), strict=True):
            count = 1
            for size in shape:
                count *= size
            total += count * DTYPES[port.dtype_for(io)]
        return total


# --- the table ----------------------------------------------------------------------------------

_CONV = (
    OpPort("x", "io", ("BTC",)),
    OpPort("weight", "io", ("CK",)),
    OpPort("bias", "io", ("C",)),
)
_CONV_STATE = OpPort("state", "io", ("BCK",))
_LENGTH = OpPort("length", "int64", ("B",))
_CONV_Y = OpPort("y", "io", ("BTC",))
_NEW_WINDOW = OpPort("new_state", "io", ("BCK",))

_SSD = (
    OpPort("x", "io", ("BTHP",)),
    OpPort("dt", "float32", ("BTH",)),
    OpPort("a", "float32", ("H",)),
    OpPort("b", "io", ("BTGN",)),
    OpPort("c", "io", ("BTGN",)),
    OpPort("d", "float32", ("H", "HW")),
)
_SSD_STATE = OpPort("state", "float32", ("BHNP",))
_SSD_Y = OpPort("y", "io", ("BTHP",))
_NEW_SSD = OpPort("new_state", "float32", ("BHNP",))

_SCAN = (
    OpPort("x", "io", ("BTE",)),
    OpPort("dt", "float32", ("BTE",)),
    OpPort("a", "float32", ("NE",)),
    OpPort("b", "io", ("BTN",)),
    OpPort("c", "io", ("BTN",)),
    OpPort("d", "float32", ("E",)),
)
_SCAN_STATE = OpPort("state", "float32", ("BNE",))
_SCAN_Y = OpPort("y", "io", ("BTE",))
_NEW_SCAN = OpPort("new_state", "float32", ("BNE",))

_CONV_ARGUMENTS = ("T", "C", "K")
_SSD_ARGUMENTS = ("T", "H", "P", "G", "N", "W")
_SCAN_ARGUMENTS = ("T", "E", "N")

CONV_MULTIPLES = MappingProxyType({"C": 16})
SSD_MULTIPLES = MappingProxyType({"P": 16, "N": 16})
SCAN_MULTIPLES = MappingProxyType({"E": 16})


def _conv_grid(sizes: Sizes, tile: Tile) -> tuple[Any, Any, Any]:
    """Channels, tokens, rows."""
    channels = cdiv(sizes["C"], tile.constants["BLOCK_C"])
    return channels, cdiv(sizes["T"], tile.constants["BLOCK_T"]), sizes["B"]


def _ssd_grid(sizes: Sizes, tile: Tile) -> tuple[Any, Any, Any]:
    """Channels of a head, heads, rows."""
    return cdiv(sizes["P"], tile.constants["BLOCK_P"]), sizes["H"], sizes["B"]


def _ssd_reverse_grid(sizes: Sizes, tile: Tile) -> tuple[Any, Any, Any]:
    """Channels of a head times blocks (the channel tile changes fastest), heads, rows."""
    parts, heads, rows = _ssd_grid(sizes, tile)
    return (sizes["T"] // sizes["L"]) * parts, heads, rows


def _scan_grid(sizes: Sizes, tile: Tile) -> tuple[Any, Any, Any]:
    """Channels, 1, rows."""
    return cdiv(sizes["E"], tile.constants["BLOCK_E"]), 1, sizes["B"]


def _scan_reverse_grid(sizes: Sizes, tile: Tile) -> tuple[Any, Any, Any]:
    """Channels, blocks, rows."""
    parts, _, rows = _scan_grid(sizes, tile)
    return parts, sizes["T"] // sizes["L"], rows


def _frozen(**constants: int) -> Mapping[str, int]:
    return MappingProxyType(constants)


def _conv_tiles() -> tuple[Tile, ...]:
    return tuple(
        Tile(f"t{tokens}c{channels}w{warps}", _frozen(BLOCK_T=tokens, BLOCK_C=channels), warps)
        for tokens, channels, warps in ((16, 64, 4), (32, 32, 4))
    )


def _ssd_tiles(one_chunk: bool) -> tuple[Tile, ...]:
    """Forms of one chunk if wanted, which take any N; then loops over chunks by state width.

    For up to 32 tokens there are two: 16 channels make enough thread blocks to fill a card with one
    row, 32 channels read B and C half as often. Registers decide the rest: a chunk of 64 tokens
    takes 200 of them with 16 channels as with 32, and 256 states leave them for 8.
    """
    tiles = [
        Tile(
            f"l{size}sp{part}w4",
            _frozen(BLOCK_N=32, BLOCK_S=32, BLOCK_T=size, BLOCK_P=part, STAGES=stages),
            4,
            size,
        )
        for size, part, stages in ((32, 16, 4), (32, 32, 4), (64, 32, 3))
        if one_chunk
    ]
    tiles += [
        Tile(
            f"n{width}l32mp{part}w{warps}",
            _frozen(BLOCK_N=width, BLOCK_S=rows, BLOCK_T=32, BLOCK_P=part, STAGES=1),
            warps,
            None,
            width,
        )
        for width, rows, part, warps in ((64, 64, 16, 4), (128, 128, 16, 4), (256, 64, 8, 8))
    ]
    return tuple(tiles)


def _scan_tiles() -> tuple[Tile, ...]:
    """Few channels and warps: the sum over N stays in a warp. BLOCK_T tokens are loaded ahead."""
    return tuple(
        Tile(
            f"n{width}e16w{warps}",
            _frozen(BLOCK_N=width, BLOCK_T=4, BLOCK_E=16),
            warps,
            None,
            width,
        )
        for width, warps in ((16, 1), (32, 1), (64, 2))
    )


OPS: dict[str, KernelSpec] = {
    op.name: op
    for op in (
        KernelSpec(
            "CausalConvDenoise",
            "conv_denoise",
            (*_CONV, _CONV_STATE),
            (_CONV_Y,),
            _CONV_ARGUMENTS,
            _conv_tiles(),
            CONV_MULTIPLES,
            False,
            True,
            reference.causal_conv,
            _conv_grid,
        ),
        KernelSpec(
            "CausalConvCommit",
            "conv_commit",
            (*_CONV, _CONV_STATE, _LENGTH),
            (_CONV_Y, _NEW_WINDOW),
            _CONV_ARGUMENTS,
            _conv_tiles(),
            CONV_MULTIPLES,
            False,
            False,
            reference.causal_conv,
            _conv_grid,
        ),
        KernelSpec(
            "CausalConvReverse",
            "conv_reverse",
            _CONV,
            (_CONV_Y,),
            (*_CONV_ARGUMENTS, "L"),
            _conv_tiles(),
            CONV_MULTIPLES,
            True,
            False,
            reference.causal_conv_reverse,
            _conv_grid,
        ),
        KernelSpec(
            "SsdBlockDenoise",
            "ssd_denoise",
            (*_SSD, _SSD_STATE),
            (_SSD_Y,),
            _SSD_ARGUMENTS,
            _ssd_tiles(True),
            SSD_MULTIPLES,
            False,
            True,
            reference.ssd,
            _ssd_grid,
        ),
        KernelSpec(
            "SsdBlockCommit",
            "ssd_commit",
            (*_SSD, _SSD_STATE),
            (_SSD_Y, _NEW_SSD),
            _SSD_ARGUMENTS,
            _ssd_tiles(False),
            SSD_MULTIPLES,
            False,
            False,
            reference.ssd,
            _ssd_grid,
        ),
        KernelSpec(
            "SsdBlockReverse",
            "ssd_reverse",
            _SSD,
            (_SSD_Y,),
            (*_SSD_ARGUMENTS, "L"),
            _ssd_tiles(True),
            SSD_MULTIPLES,
            True,
            False,
            reference.ssd_reverse,
            _ssd_reverse_grid,
        ),
        KernelSpec(
            "SelectiveScanDenoise",
            "scan_denoise",
            (*_SCAN, _SCAN_STATE),
            (_SCAN_Y,),
            _SCAN_ARGUMENTS,
            _scan_tiles(),
            SCAN_MULTIPLES,
            False,
            True,
            reference.selective_scan,
            _scan_grid,
        ),
        KernelSpec(
            "SelectiveScanCommit",
            "scan_commit",
            (*_SCAN, _SCAN_STATE),
            (_SCAN_Y, _NEW_SCAN),
            _SCAN_ARGUMENTS,
            _scan_tiles(),
            SCAN_MULTIPLES,
            False,
            False,
            reference.selective_scan,
            _scan_grid,
        ),
        KernelSpec(
            "SelectiveScanReverse",
            "scan_reverse",
            _SCAN,
            (_SCAN_Y,),
            (*_SCAN_ARGUMENTS, "L"),
            _scan_tiles(),
            SCAN_MULTIPLES,
            True,
            False,
            reference.selective_scan_reverse,
            _scan_reverse_grid,
        ),
    )
}
"""Every operator by name. Math and shapes: :mod:`fixedstate.plugins.reference`."""
