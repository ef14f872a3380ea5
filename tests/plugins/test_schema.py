"""The table of operators: light to import, one truth for ports, rules, launch and bytes."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from torch._subclasses.fake_tensor import FakeTensorMode

from fixedstate.errors import BackendError, SpecError
from fixedstate.export import trace
from fixedstate.plugins import ptx, reference
from fixedstate.plugins.schema import (
    ATTRIBUTES,
    DOMAIN,
    GRID_LIMIT,
    KERNEL_IO,
    LONGEST_BLOCK,
    OPS,
    VERSION,
    KernelSpec,
    Tile,
    cdiv,
)
from fixedstate.plugins.torch_ops import TRACED

SPECS = [pytest.param(spec, id=spec.name) for spec in OPS.values()]

SIZES = {
    "CausalConv": {"C": 48, "K": 4},
    "SsdBlock": {"H": 4, "P": 16, "G": 2, "N": 32, "W": 1},
    "SelectiveScan": {"E": 48, "N": 16},
}


def family(spec: KernelSpec) -> str:
    return spec.name.removesuffix("Denoise").removesuffix("Commit").removesuffix("Reverse")


def sizes_of(spec: KernelSpec, tokens: int = 16, **changes: int) -> dict[str, int]:
    """Sizes that every operator takes, two rows of one block."""
    return {"B": 2, "T": tokens, "L": tokens, **SIZES[family(spec)], **changes}


def shapes_of(spec: KernelSpec, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Shapes of the inputs."""
    return list(spec.shapes(sizes)[: len(spec.inputs)])


# --- what it costs to import ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["schema", "reference", "ptx", "library", "quick", "rtx", "driver"]
)
def test_import_needs_numpy_alone(module: str) -> None:
    """A device that builds or runs engines has neither PyTorch nor ONNX packages nor Triton."""
    heavy = "torch onnx onnx_ir onnxscript onnxruntime triton tensorrt tensorrt_rtx"
    program = (
        f"import fixedstate.plugins.{module}, sys; "
        f"print(*sorted(set('{heavy} tensorrt_rtx_bindings'.split()) & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# --- names ---------------------------------------------------------------------------------------


def test_names_differ_from_every_builtin_operator() -> None:
    """A parser keys local functions by name alone: a built-in one would be taken instead."""
    builtin = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain != DOMAIN}
    builtin |= {s.name for s in get_all_operator_schema()}
    assert "LinearAttention" in builtin
    assert not builtin & set(OPS)
    assert len({spec.torch_name for spec in OPS.values()}) == len(OPS) == 9


def test_every_text_has_a_name_of_its_own() -> None:
    """Two tiles of one label would share a file."""
    for spec in OPS.values():
        assert len({tile.label for tile in spec.tiles}) == len(spec.tiles)
    names = [
        ptx.file_name(spec, tile, io)
        for spec in OPS.values()
        for io in KERNEL_IO
        for tile in spec.tiles
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("spec", SPECS)
def test_tactics_count_from_one(spec: KernelSpec) -> None:
    """0 is what a builder calls its own default."""
    assert [spec.tactic(tile) for tile in spec.tiles] == list(range(1, len(spec.tiles) + 1))


# --- everything else that lists the ports --------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("io", ["float32", "float16"])
def test_function_bodies_have_the_ports(spec: KernelSpec, io: str) -> None:
    for block_len in (0, 16):
        made = spec.function_body(block_len, io, taps=(4,), one_group=True, channels=48)
        assert (made.domain, made.name) == (DOMAIN, spec.name)
        assert tuple(value.name for value in made.inputs) == spec.input_names
        assert tuple(value.name for value in made.outputs) == spec.output_names
        assert tuple(made.attributes) == ATTRIBUTES


@pytest.mark.parametrize("spec", SPECS)
def test_torch_operators_have_the_ports(spec: KernelSpec) -> None:
    schema = getattr(torch.ops.fixedstate, spec.torch_name).default._schema
    names = [argument.name for argument in schema.arguments]
    assert tuple(name for name in names if name != "block_len") == spec.input_names
    assert names.index("block_len") == len(names) - 1 if "block_len" in names else True
    assert len(schema.returns) == len(spec.outputs)
    assert not any(argument.alias_info for argument in schema.arguments)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("io", ["float32", "float16", "bfloat16"])
def test_fake_kernels_give_the_outputs(spec: KernelSpec, io: str) -> None:
    """What a trace is told about shapes and dtypes, for both forms of d."""
    for changes in ({}, {"W": 16}) if family(spec) == "SsdBlock" else ({},):
        sizes = sizes_of(spec, **changes)
        shapes = spec.shapes(sizes)
        dtypes = [getattr(torch, port.dtype_for(io)) for port in spec.ports]
        count = len(spec.inputs)
        takes = [
            a.name for a in getattr(torch.ops.fixedstate, spec.torch_name).default._schema.arguments
        ]
        with FakeTensorMode():
            given_ = [
                torch.empty(shape, dtype=dtype)
                for shape, dtype in zip(shapes[:count], dtypes, strict=False)
            ]
            more = [sizes["L"]] if "block_len" in takes else []
            got = getattr(TRACED, spec.torch_name)(*given_, *more)
        got = got if isinstance(got, tuple) else (got,)
        assert [tuple(value.shape) for value in got] == list(shapes[count:])
        assert [value.dtype for value in got] == dtypes[count:]


@pytest.mark.parametrize("spec", SPECS)
def test_onnx_is_told_the_same(spec: KernelSpec) -> None:
    """The schemas by which the converter to ONNX types nodes and casts constants."""
    trace._register_schemas()
    schema = onnx.defs.get_schema(spec.name, VERSION, DOMAIN)
    letters = {one.type_param_str: set(one.allowed_type_strs) for one in schema.type_constraints}
    spelled = {"float32": "tensor(float)", "int64": "tensor(int64)"}
    for port, formal in zip(spec.ports, [*schema.inputs, *schema.outputs], strict=True):
        assert formal.name == port.name
        if port.dtype == "io":
            assert {"tensor(float)", "tensor(float16)"} <= letters[formal.type_str]
        elif formal.type_str in letters:  # a state, whose dtype no other port shares
            assert port.name in ("state", "new_state")
            assert spelled[port.dtype] in letters[formal.type_str]
        else:
            assert formal.type_str == spelled[port.dtype]
    assert set(schema.attributes) == set(ATTRIBUTES)


# --- shapes and sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_sizes_and_shapes_are_inverse(spec: KernelSpec) -> None:
    sizes = sizes_of(spec)
    assert spec.sizes(shapes_of(spec, sizes), 16) == sizes
    assert spec.sizes(shapes_of(spec, sizes), 0) == sizes  # one block of any length


SSD = OPS["SsdBlockCommit"]
CONV = OPS["CausalConvCommit"]


@pytest.mark.parametrize(
    ("name", "changes", "block_len", "says"),
    [
        ("SsdBlockCommit", {"x": (2, 16, 64)}, 16, r"'x' has 3 axes; expected \[B, T, H, P\]"),
        ("SsdBlockCommit", {"d": (4, 16, 1)}, 16, r"'d' has 3 axes; expected \[H\] or \[H, W\]"),
        ("SsdBlockCommit", {"dt": (2, 16, 3)}, 16, "H is 3 in input 'dt' and 4 in an earlier one"),
        ("SsdBlockCommit", {"state": (2, 4, 16, 32)}, 16, "N is 16 in input 'state' and 32"),
        ("SsdBlockCommit", {"b": (2, 16, 3, 32)}, 16, "G is 2 in input 'c' and 3"),
        ("SsdBlockCommit", {"b": (2, 16, 3, 32), "c": (2, 16, 3, 32)}, 16, "4 heads do not divide"),
        ("SsdBlockCommit", {"d": (4, 3)}, 16, "d has 3 weights per head; expected 1 or 16"),
        ("SsdBlockCommit", {}, 5, "16 tokens are not a multiple of the block length 5"),
        ("SsdBlockDenoise", {}, 8, "16 tokens; expected one block of 8"),
        ("SelectiveScanReverse", {}, 32, "16 tokens are not a multiple of the block length 32"),
        ("SelectiveScanDenoise", {"a": (48, 16)}, 16, "E is 16 in input 'a' and 48"),
        ("CausalConvCommit", {"state": (2, 48, 4)}, 16, "K is 5 in input 'state' and 4"),
        ("CausalConvCommit", {"length": (3,)}, 16, "B is 3 in input 'length' and 2"),
        ("CausalConvReverse", {"x": (2, 0, 48)}, 0, "T is 0; expected 1 or more"),
        (
            "CausalConvDenoise",
            {"weight": (48, 1), "state": (2, 48, 0)},
            16,
            "K is 1; expected 2 or more: no tensor may be empty",
        ),
        ("CausalConvReverse", {}, LONGEST_BLOCK + 1, "block_len is 257; expected 1 to 256, or 0"),
        ("CausalConvReverse", {}, -1, "block_len is -1"),
        ("CausalConvReverse", {}, True, "block_len is True"),
    ],
)
def test_contradictions_are_named(
    name: str, changes: Mapping[str, tuple[int, ...]], block_len: int, says: str
) -> None:
    spec = OPS[name]
    given_ = dict(zip(spec.input_names, shapes_of(spec, sizes_of(spec)), strict=True))
    with pytest.raises(SpecError, match=says) as caught:
        spec.sizes(list({**given_, **changes}.values()), block_len)
    assert spec.name in str(caught.value)


def test_missing_input_is_named() -> None:
    with pytest.raises(SpecError, match=r"has 4 inputs \(x, weight, bias, state\); 3 shapes"):
        OPS["CausalConvDenoise"].sizes([(1, 4, 16), (16, 4), (16,)], 4)


# --- what the kernels do not take ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "failing"),
    [
        ("SsdBlockDenoise", {"H": 8, "P": 5, "N": 6, "G": 1}, ["P = 5", "N = 6"]),
        ("SsdBlockReverse", {"H": 8, "P": 5, "N": 6, "G": 1}, ["P = 5", "N = 6"]),
        ("CausalConvCommit", {"C": 52}, ["C = 52"]),
        ("SelectiveScanCommit", {"E": 40, "N": 6}, ["E = 40"]),
        ("SsdBlockCommit", {"N": 272}, ["N = 272: the kernels take at most 256"]),
        ("SelectiveScanDenoise", {"N": 80}, ["N = 80: the kernels take at most 64"]),
        ("SsdBlockCommit", {"H": GRID_LIMIT + 1}, ["65536 thread blocks along y"]),
        ("SelectiveScanCommit", {"B": GRID_LIMIT + 1}, ["65536 thread blocks along z"]),
    ],
)
def test_CF_06_refusals_name_every_failing_dimension(
    name: str, changes: Mapping[str, int], failing: list[str]
) -> None:
    """Case CF-06 (width 20, 8 heads of 5, state 6), widths and grids; the body takes them all."""
    spec = OPS[name]
    reasons = spec.refusals(sizes_of(spec, **changes), 16, "float16")
    assert len(reasons) == len(failing)
    for reason, words in zip(reasons, failing, strict=True):
        assert words in reason
    both = spec.refusals(sizes_of(spec, **changes), 16, "float32")
    assert "float32" in both[0]


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_refused_within_the_limits(spec: KernelSpec) -> None:
    for io, tokens in itertools.product(KERNEL_IO, (1, 4, 33, 64, 65, LONGEST_BLOCK)):
        sizes = sizes_of(spec, tokens)
        assert spec.refusals(sizes, tokens, io) == []
        assert spec.refusals(sizes, 0, io) == []
        assert spec.refusals({**sizes, "B": Symbol("B"), "T": Symbol("T")}, tokens, io) == []


def test_sizes_that_have_to_be_known_are_named() -> None:
    spec = OPS["SsdBlockDenoise"]
    dynamic = {**sizes_of(spec), "H": Symbol("H"), "N": Symbol("N")}
    reasons = spec.refusals(dynamic, 16, "float16")
    assert [reason.split(":")[0] for reason in reasons] == ["H is dynamic", "N is dynamic"]


@pytest.mark.parametrize("spec", SPECS)
def test_float32_has_no_text(spec: KernelSpec) -> None:
    with pytest.raises(BackendError, match=f"{spec.name} has no float32 kernel"):
        spec.text(spec.tiles[0], "float32")


@pytest.mark.parametrize("spec", SPECS)
@given(block_len=st.integers(0, LONGEST_BLOCK), part=st.integers(1, 16))
def test_tiles_take_what_they_are_chosen_for(spec: KernelSpec, block_len: int, part: int) -> None:
    """Wide enough for the state, long enough for the block, and no wider than needed."""
    state = min(16 * part, max(tile.widest_state or 0 for tile in spec.tiles))
    chosen = spec.tiles_for({"N": state}, block_len)
    assert chosen
    widths = {tile.widest_state for tile in chosen}
    assert len(widths) == 1
    for tile in chosen:
        assert tile.widest_state is None or tile.widest_state >= state
        assert tile.longest_block is None or 0 < block_len <= tile.longest_block
        assert tile.threads == 32 * tile.warps
        for other in spec.tiles:  # none narrower would do
            short = other.longest_block is not None and not 0 < block_len <= other.longest_block
            narrow = other.widest_state is not None and other.widest_state < state
            wider = (other.widest_state or 0) >= (tile.widest_state or 0)
            assert short or narrow or wider
    if block_len == 0:
        assert all(tile.longest_block is None for tile in chosen)


# --- launch: one formula for numbers and for symbols ---------------------------------------------


@dataclass(frozen=True, eq=False)
class Symbol:
    """A size known later: records sums, differences, products and quotients, and nothing else.

    It cannot be compared, has no truth value, and refuses to divide a negative number when it is
    evaluated: builders round such quotients otherwise than Python.
    """

    name: str
    left: Any = None
    right: Any = None

    def __add__(self, other: Any) -> Symbol:
        return Symbol("+", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return Symbol("+", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return Symbol("-", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return Symbol("-", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return Symbol("*", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return Symbol("*", other, self)

    def __floordiv__(self, other: Any) -> Symbol:
        return Symbol("/", self, other)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return Symbol("/", other, self)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a size that is not known was compared")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise AssertionError("a size that is not known was judged")


def value_of(size: Any, known: Mapping[str, int]) -> int:
    """The number behind a symbol, once its names are known."""
    if not isinstance(size, Symbol):
        return int(size)
    if size.left is None:
        return known[size.name]
    left, right = value_of(size.left, known), value_of(size.right, known)
    if size.name == "/":
        assert left >= 0 < right
        return left // right
    return {"+": left + right, "-": left - right, "*": left * right}[size.name]


def test_symbols_refuse_what_builders_do() -> None:
    """The stand-in itself: a formula it lets through has to be one that builders take."""
    size = Symbol("T")
    assert value_of(cdiv(size * 3 - 1, 4), {"T": 2}) == 2
    for wrong in (lambda: size == 1, lambda: bool(size), lambda: size < 1, lambda: size % 2):
        with pytest.raises((AssertionError, TypeError)):
            wrong()
    with pytest.raises(AssertionError):
        value_of((size - 3) // 2, {"T": 2})


@st.composite
def drawn(draw: st.DrawFn, spec: KernelSpec) -> tuple[dict[str, int], int]:
    """Sizes of any kind for an operator, and the attribute."""
    block = draw(st.integers(1, 70))
    count = 1 if spec.single_block else draw(st.integers(1, 4))
    groups = draw(st.integers(1, 3))
    wide = draw(st.integers(1, 70))
    sizes = {
        "B": draw(st.integers(1, 4)),
        "T": block * count,
        "L": block,
        "C": draw(st.integers(1, 150)),
        "K": draw(st.integers(2, 8)),
        "E": draw(st.integers(1, 150)),
        "G": groups,
        "H": groups * draw(st.integers(1, 3)),
        "P": wide,
        "N": draw(st.integers(1, 70)),
        "W": draw(st.sampled_from([1, wide])),
    }
    whole = draw(st.booleans())
    if whole:
        sizes["L"] = sizes["T"]
    letters = {"B", "T", "L", *SIZES[family(spec)]}
    kept = {key: value for key, value in sizes.items() if key in letters}
    return kept, 0 if whole else block


@pytest.mark.parametrize("spec", SPECS)
@given(data=st.data())
def test_launch_on_symbols_equals_launch_on_ints(spec: KernelSpec, data: st.DataObject) -> None:
    """A builder's expressions, evaluated later, give the grid and the arguments of the numbers."""
    sizes, block_len = data.draw(drawn(spec))
    shapes = shapes_of(spec, sizes)
    known: dict[str, int] = {}
    symbols = []
    for port, shape in zip(spec.inputs, shapes, strict=True):
        names = [f"{port.name}.{axis}" for axis in range(len(shape))]
        known.update(zip(names, shape, strict=True))
        symbols.append([Symbol(name) for name in names])
    found = spec.sizes(shapes, block_len)
    later = spec.sizes(symbols, block_len)
    assert found.keys() == later.keys()
    assert {key: value_of(size, known) for key, size in later.items()} == found
    for tile in spec.tiles:
        now, then = spec.launch(found, tile), spec.launch(later, tile)
        assert tuple(value_of(size, known) for size in then.grid) == now.grid
        assert tuple(value_of(size, known) for size in then.arguments) == now.arguments
        assert now.arguments == tuple(found[name] for name in spec.argument_names)
        assert then.tile is now.tile is tile


def test_arguments_are_those_of_the_kernels() -> None:
    """A wrong order is garbage without an error: it is written down here a second time."""
    order = {"CausalConv": "T C K", "SsdBlock": "T H P G N W", "SelectiveScan": "T E N"}
    for spec in OPS.values():
        block = " L" if spec.name.endswith("Reverse") else ""
        assert " ".join(spec.argument_names) == order[family(spec)] + block


@pytest.mark.parametrize("spec", SPECS)
def test_known_size_is_preferred_to_a_symbol(spec: KernelSpec) -> None:
    """Rows may be dynamic in one input and known in another."""
    shapes = shapes_of(spec, sizes_of(spec))
    mixed: list[Any] = [list(shape) for shape in shapes]
    mixed[0][0] = mixed[0][1] = Symbol("any")
    found = spec.sizes(mixed, 16)
    knows_rows = any("B" in port.shape for port in spec.inputs[1:])
    assert isinstance(found["B"], int) == knows_rows
    assert found["L"] == 16


def programs(
    spec: KernelSpec, sizes: Mapping[str, int], tile: Tile
) -> Iterator[tuple[int | slice, ...]]:
    """What each thread block of a launch writes, as an index of :func:`outputs_of`."""
    grid = spec.launch(sizes, tile).grid
    step = tile.constants
    for x, y, z in itertools.product(*map(range, grid)):
        if family(spec) == "CausalConv":
            size, wide = step["BLOCK_T"], step["BLOCK_C"]
            yield z, slice(y * size, (y + 1) * size), slice(x * wide, (x + 1) * wide)
        elif family(spec) == "SsdBlock":
            wide = step["BLOCK_P"]
            block, part = divmod(x, cdiv(sizes["P"], wide)) if spec.reverse else (0, x)
            yield z, block, y, slice(part * wide, (part + 1) * wide)
        else:
            wide = step["BLOCK_E"]
            yield z, y, slice(x * wide, (x + 1) * wide)


def outputs_of(spec: KernelSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Rows, tokens or blocks, and the rest; a forward scan walks all of its blocks: 1."""
    blocks = sizes["T"] // sizes["L"] if spec.reverse else 1
    if family(spec) == "CausalConv":
        return sizes["B"], sizes["T"], sizes["C"]
    if family(spec) == "SsdBlock":
        return sizes["B"], blocks, sizes["H"], sizes["P"]
    return sizes["B"], blocks, sizes["E"]


@pytest.mark.parametrize("spec", SPECS)
@given(data=st.data())
def test_grid_covers_every_element_once(spec: KernelSpec, data: st.DataObject) -> None:
    """By counting who writes what: nothing twice, nothing never, no thread block without work."""
    sizes, _ = data.draw(drawn(spec))
    for tile in spec.tiles:
        writers = np.zeros(outputs_of(spec, sizes), np.int64)
        for index in programs(spec, sizes, tile):
            assert writers[index].size
            writers[index] += 1
        assert (writers == 1).all()


# --- the page ------------------------------------------------------------------------------------


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("spec", SPECS)
def test_page_lists_the_ports(spec: KernelSpec) -> None:
    """docs/plugins.md against the table: names, order, arguments, shapes and dtypes."""
    columns = [", ".join(x) for x in (spec.input_names, spec.output_names, spec.argument_names)]
    assert f"| `{spec.name}` | `{spec.torch_name}` | {' | '.join(columns)} |" in PAGE
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]
    header = next(row for row in rows if row[:1] == ["port"])
    for port in spec.ports:
        shapes = [", ".join(shape) for shape in port.shapes]
        if port.name in ("state", "new_state"):
            shapes = [shape.replace("K", "K-1") for shape in shapes]
        row = next(row for row in rows if row[:1] == [port.name])
        cell = " or ".join(f"[{shape}]" for shape in shapes)
        assert row[header.index(family(spec))] == f"{cell} {port.dtype}"


@pytest.mark.parametrize("spec", SPECS)
def test_page_lists_the_tiles(spec: KernelSpec) -> None:
    """Labels in order of preference: a tactic number is a place in this list."""
    labels = ", ".join(f"`{tile.label}`" for tile in spec.tiles)
    (row,) = (
        line for line in PAGE.splitlines() if line.endswith(f"| {labels} |") and spec.name in line
    )
    assert f"`{spec.name}`" in row


def test_page_names_the_texts() -> None:
    names = {
        ptx.file_name(spec, tile, io)
        for spec in OPS.values()
        for io in KERNEL_IO
        for tile in spec.tiles
    }
    assert f"io dtype and tile, {len(names)} of them" in PAGE
    (example,) = re.findall(r"`plugins/ptx/(\S+)`", PAGE)
    assert example in names


def test_page_gives_the_limits() -> None:
    widest = {
        name: max(tile.widest_state or 0 for tile in OPS[f"{name}Commit"].tiles)
        for name in ("SsdBlock", "SelectiveScan")
    }
    assert f"| N of SelectiveScan | at most {widest['SelectiveScan']} |" in PAGE
    free = [t.longest_block or 0 for t in OPS["SsdBlockDenoise"].tiles if t.widest_state is None]
    assert f"at most {widest['SsdBlock']}; any in a Denoise or Reverse of {max(free)} tok" in PAGE
    assert f"| L | 1 to {LONGEST_BLOCK}, or 0 |" in PAGE
    assert f"at most {GRID_LIMIT:,} (y and z of a grid)" in PAGE
    steps = {key: {*spec.multiples.values()} for key, spec in OPS.items()}
    assert set.union(*steps.values()) == {16}  # what the page says of every size


# --- reference and bytes -------------------------------------------------------------------------


def random_inputs(spec: KernelSpec, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found = {}
    for port, shape in zip(spec.inputs, spec.shapes(sizes), strict=False):
        found[port.name] = rng.standard_normal(shape)
    found.update({name: -np.abs(found[name]) for name in ("a",) if name in found})
    found.update({name: np.abs(found[name]) for name in ("dt",) if name in found})
    if "length" in found:
        found["length"] = rng.integers(0, sizes["T"] + 1, sizes["B"])
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_reference_is_the_float64_loop(spec: KernelSpec) -> None:
    """The spec hands over every input in order, the block length, and every output."""
    count = 1 if spec.single_block else 3
    sizes = sizes_of(spec, 4)
    sizes["T"] = 4 * count
    inputs = random_inputs(spec, sizes)
    loops = {
        "CausalConv": (reference.causal_conv, reference.causal_conv_reverse),
        "SsdBlock": (reference.ssd, reference.ssd_reverse),
        "SelectiveScan": (reference.selective_scan, reference.selective_scan_reverse),
    }
    forward, reverse = loops[family(spec)]
    if spec.name.endswith("Reverse"):
        expected: tuple[np.ndarray, ...] = (reverse(**inputs, block_len=4),)
    else:
        expected = forward(**inputs)[: 2 if spec.name.endswith("Commit") else 1]
    got = spec.reference(inputs, 4)
    assert [value.shape for value in got] == list(spec.shapes(sizes)[len(spec.inputs) :])
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(SpecError, match="not a multiple|one block"):
        spec.reference(inputs, 5)


def test_bytes_of_a_pass_by_hand() -> None:
    """Every input and output once, at its own width."""
    conv = sizes_of(CONV, 8, B=3)
    x = y = 3 * 8 * 48 * 2
    window = 3 * 48 * 3 * 2
    expected = x + y + 48 * 4 * 2 + 48 * 2 + 2 * window + 3 * 8
    assert CONV.bytes_moved(conv, "float16") == expected
    ssd = sizes_of(SSD, 8, B=3, W=16)
    x = y = 3 * 8 * 4 * 16 * 4
    b = c = 3 * 8 * 2 * 32 * 4
    state = 3 * 4 * 32 * 16 * 4
    expected = x + y + b + c + 3 * 8 * 4 * 4 + 4 * 4 + 4 * 16 * 4 + 2 * state
    assert SSD.bytes_moved(ssd, "float32") == expected


@pytest.mark.parametrize("name", ["CausalConv", "SsdBlock", "SelectiveScan"])
def test_one_output_form_saves_the_new_state(name: str) -> None:
    """What a denoise pass would throw away; a convolution need not read lengths either."""
    denoise, commit = OPS[f"{name}Denoise"], OPS[f"{name}Commit"]
    sizes = sizes_of(denoise)
    state = dict(zip(commit.output_names, commit.shapes(sizes)[-2:], strict=True))["new_state"]
    wide = 2 if name == "CausalConv" else 4
    lengths = 8 * sizes["B"] if name == "CausalConv" else 0
    saved = commit.bytes_moved(sizes, "float16") - denoise.bytes_moved(sizes, "float16")
    assert saved == int(np.prod(state)) * wide + lengths
