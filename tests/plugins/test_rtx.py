"""TensorRT-RTX's parser and builder on our graphs, with the registered plugins and without.

No card is needed to build, and without one an engine cannot run: what is asserted is what the
parser made of each node and what the engine holds. Every build has a process of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from rtx_build import build

from fixedstate.bundle import DecodeDefaults, Source
from fixedstate.errors import BackendError
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import write_bundle
from fixedstate.export.stored import StoredWeights
from fixedstate.export.trace import without_weights
from fixedstate.plugins import driver, rtx
from fixedstate.plugins.library import tensorrt_rtx
from fixedstate.plugins.ptx import Ptx
from fixedstate.plugins.schema import DOMAIN, OPS, KernelSpec
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.state import Precision

sys.path.append(str(Path(__file__).resolve().parent))

from cuda_stand_in import StandIn, from_bits, to_bits

pytestmark = pytest.mark.trt

SIZES = {"B": (1, 1, 8), "n": (1, 1, 16), "C": (256, 256, 1024)}
BODY = "node_"
"""What names of layers that come out of a function body begin with."""

# --- whole models -------------------------------------------------------------------------------


TINY = ("tiny-mamba", "tiny-hybrid", "tiny-attention")
WAYS = (("fp16", True), ("fp16", False), ("fp32", False))
"""Precision of the graph, and whether plugins are registered."""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folder of a shipped model's graphs: ``graphs("tiny-mamba", "fp16")``.

    They are not compared with PyTorch, which is for other tests to do, and which the exporter
    refuses for tiny-mamba in fp16: its activations are too large for it.
    """
    root = tmp_path_factory.mktemp("graphs")

    @functools.cache
    def made(name: str, precision: str) -> Path:
        chosen = Precision.named(precision)
        loaded = load_checkpoint(name)
        folder = root / f"{name}-{precision}"
        folder.mkdir()
        write_bundle(
            folder,
            without_weights(
                loaded.spec, lambda given: Denoiser(loaded.spec, given, chosen, TRACED)
            ),
            StoredWeights(loaded.tensors, chosen),
            ["denoise", "commit"],
            lambda _: None,
            decode=DecodeDefaults(),
            files={},
            source=Source(),
        )
        return folder

    return made


@pytest.fixture(scope="module")
def built(
    graphs: Callable[[str, str], Path], request: pytest.FixtureRequest
) -> Iterator[Callable[..., dict[str, Any]]]:
    """What a build of a shipped model came to: ``built("tiny-mamba", "commit", "fp16", True)``.

    All builds that tests of this run ask for begin with the first of them, two at a time.
    """
    asked = [item.nodeid for item in request.session.items if "shipped_models" in item.nodeid]
    with ThreadPoolExecutor(2) as pool:
        begun: dict[tuple[str, str, str, bool], Future[dict[str, Any]]] = {
            (name, role, precision, plugins): pool.submit(
                build, graphs(name, precision) / f"{role}.onnx", SIZES, plugins=plugins
            )
            for name in TINY
            if any(f"[{name}-" in item for item in asked)
            for precision, plugins in WAYS
            for role in ("denoise", "commit")
        }
        yield lambda *way: begun[way].result()
        pool.shutdown(cancel_futures=True)


def nodes_of(graph: Path) -> dict[str, str]:
    """Name and operator of every node of our domain."""
    model = onnx.load(graph, load_external_data=False)
    return {node.name: node.op_type for node in model.graph.node if node.domain == DOMAIN}


def check_plugins(result: Mapping[str, Any], nodes: Mapping[str, str]) -> None:
    """Each node is one plugin layer and one call in the engine, and nothing is left of a body."""
    assert result["ok"], result
    assert sorted(result["plugins"]) == sorted(nodes)
    assert result["layers"].get("PLUGIN_V3", 0) == len(nodes)
    assert [name for name in result["names"] if name.startswith(BODY)] == []
    assert result["custom"] == {name: len(OPS[op].inputs) for name, op in nodes.items()}
    assert result["refused"] == result["warnings"] == []


def check_bodies(result: Mapping[str, Any], nodes: Mapping[str, str]) -> None:
    """Nothing is a plugin, and each node's body was inlined."""
    assert result["ok"], result
    assert result["plugins"] == list(result["custom"]) == result["warnings"] == []
    assert "PLUGIN_V3" not in result["layers"]
    assert any(name.startswith(BODY) for name in result["names"]) == bool(nodes)
    assert not set(nodes) & set(result["names"])


@pytest.mark.parametrize("role", ["denoise", "commit"])
@pytest.mark.parametrize("name", TINY)
def test_shipped_models_build_with_and_without_plugins(
    graphs: Callable[[str, str], Path], built: Callable[..., dict[str, Any]], name: str, role: str
) -> None:
    """The same fp16 file: one plugin per node where they are registered, else the bodies."""
    nodes = nodes_of(graphs(name, "fp16") / f"{role}.onnx")
    assert bool(nodes) == (name != "tiny-attention")
    check_plugins(built(name, role, "fp16", True), nodes)
    check_bodies(built(name, role, "fp16", False), nodes)


@pytest.mark.parametrize("role", ["denoise", "commit"])
@pytest.mark.parametrize("name", TINY)
def test_shipped_models_build_in_fp32(
    graphs: Callable[[str, str], Path], built: Callable[..., dict[str, Any]], name: str, role: str
) -> None:
    """An fp32 engine is made of the bodies."""
    file = graphs(name, "fp32") / f"{role}.onnx"
    check_bodies(built(name, role, "fp32", False), nodes_of(file))


def test_fp32_with_plugins_is_refused_with_the_reason(graphs: Callable[[str, str], Path]) -> None:
    """The parser only says which callback failed; the reason is kept."""
    result = build(graphs("tiny-hybrid", "fp32") / "denoise.onnx", SIZES, plugins=True)
    assert not result["ok"]
    assert "CausalConvDenoise" in result["error"]
    (reason,) = result["refused"]
    assert "io dtype float32: the kernels take float16 and bfloat16" in reason
    assert "build without plugins" in reason


# --- single operators ---------------------------------------------------------------------------


Op = tuple[str, Mapping[str, int]]


def ops_model(
    ops: Sequence[Op],
    block_len: int,
    io: str,
    dynamic: Sequence[str] = ("B", "T"),
    drop: Mapping[int, str] | None = None,
) -> ir.Model:
    """A graph of operators side by side, one function per name; inputs are named ``0_x``, ``1_x``.

    Args:
        ops: Names and sizes.
        block_len: L of all.
        io: Dtype of activations.
        dynamic: Symbols that are dynamic: T is a number of blocks, unless it is a single one.
        drop: Attribute that a node lacks, by the number of the node.
    """
    inputs, outputs, nodes, functions = [], [], [], {}
    ssd = [sizes for name, sizes in ops if name.startswith("Ssd")]
    convs = [sizes for name, sizes in ops if name.startswith("CausalConv")]
    widths = {sizes["C"] for sizes in convs}
    attributes = {"plugin_namespace": DOMAIN, "plugin_version": "1", "block_len": block_len}
    for number, (name, sizes) in enumerate(ops):
        spec = OPS[name]
        symbols: dict[str, Any] = {key: key for key in dynamic}
        if "T" in symbols:
            symbols["T"] = block_len if spec.single_block else f"{block_len}n"
        values = []
        for port, shape in zip(spec.ports, spec.shapes(sizes), strict=True):
            letters = next(s for s in port.shapes if len(s) == len(shape))
            dims = [symbols.get(key, size) for key, size in zip(letters, shape, strict=True)]
            dtype = ir.DataType[
                {"float32": "FLOAT", "float16": "FLOAT16", "int64": "INT64"}[port.dtype_for(io)]
            ]
            kind = ir.TensorType(dtype)
            values.append(ir.Value(name=f"{number}_{port.name}", type=kind, shape=ir.Shape(dims)))
        count = len(spec.inputs)
        lacks = (drop or {}).get(number)
        kept = {key: value for key, value in attributes.items() if key != lacks}
        node = ir.Node(
            DOMAIN,
            name,
            values[:count],
            ir.convenience.convert_attributes(kept),
            outputs=values[count:],
            name=f"{name}_{number}",
        )
        inputs += values[:count]
        outputs += values[count:]
        nodes.append(node)
        body = spec.function_body(
            block_len,
            io,
            taps=[sizes["K"] for sizes in convs],
            one_group=all(sizes["G"] == 1 for sizes in ssd),
            channels=convs[0]["C"] if len(widths) == 1 else None,
            wide_skip=any(sizes.get("W", 1) > 1 for sizes in ssd),
        )
        functions[name] = body
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, opset_imports={"": 21, DOMAIN: 1}, name="operators"
    )
    return ir.Model(graph, ir_version=10, functions=list(functions.values()))


def saved(folder: Path, *arguments: Any, **options: Any) -> Path:
    """The same as a file."""
    file = folder / "operators.onnx"
    ir.save(ops_model(*arguments, **options), file)
    return file


# d_model 2560: the sizes of the published 2.7B models
MAMBA2 = {"B": 1, "T": 32, "C": 5376, "K": 4, "H": 80, "P": 64, "G": 1, "N": 128, "W": 1}
MAMBA1 = {"B": 1, "T": 32, "C": 5120, "K": 4, "E": 5120, "N": 16}


@pytest.mark.parametrize("form", ["Denoise", "Commit"])
@pytest.mark.parametrize(("scan", "sizes"), [("SsdBlock", MAMBA2), ("SelectiveScan", MAMBA1)])
def test_a_layer_of_published_size_builds_with_and_without_plugins(
    tmp_path: Path, scan: str, sizes: Mapping[str, int], form: str
) -> None:
    """Every operator of one bidirectional layer, B and n dynamic."""
    names = [f"CausalConv{form}", f"{scan}{form}", "CausalConvReverse", f"{scan}Reverse"]
    file = saved(tmp_path, [(name, sizes) for name in names], 32, "float16")
    nodes = nodes_of(file)
    assert list(nodes.values()) == names
    with_plugins = build(file, SIZES, plugins=True)
    check_plugins(with_plugins, nodes)
    without = build(file, SIZES)
    check_bodies(without, nodes)
    # one loop per Mamba-1 operator; the matrix form has none
    loops = {"SsdBlock": 0, "SelectiveScan": 2}[scan]
    assert without["layers"].get("TRIP_LIMIT", 0) == loops
    assert "TRIP_LIMIT" not in with_plugins["layers"]


SMALL = {"B": 2, "T": 32, "H": 4, "P": 16, "G": 1, "N": 32, "W": 1}
OTHER = {"B": 2, "T": 32, "H": 6, "P": 32, "G": 3, "N": 16, "W": 32}


@pytest.mark.parametrize("name", ["SsdBlockDenoise", "SsdBlockCommit", "SsdBlockReverse"])
def test_one_body_serves_two_mamba2_sizes(tmp_path: Path, name: str) -> None:
    """Other heads, channels, groups, state and skip: right numbers, and both parsers take it."""
    length = 32 if name == "SsdBlockDenoise" else 16
    ops = [(name, SMALL), (name, OTHER)]
    model = ops_model(ops, length, "float32")
    assert len(model.functions) == 1
    rng = np.random.default_rng(3)
    feed: dict[str, Any] = {}
    expected: list[Any] = []
    for number, (_, sizes) in enumerate(ops):
        spec = OPS[name]
        given = {
            port.name: rng.standard_normal(shape).astype(np.float32)
            for port, shape in zip(spec.inputs, spec.shapes(sizes), strict=False)
        }
        given["dt"] = np.abs(given["dt"])
        given["a"] = -np.abs(given["a"])
        feed |= {f"{number}_{key}": value for key, value in given.items()}
        expected += spec.reference(given, length)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for found, right in zip(session.run(None, feed), expected, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-4)
    file = saved(tmp_path, ops, length, "float16")
    nodes = nodes_of(file)
    assert len(nodes) == 2
    check_plugins(build(file, SIZES, plugins=True), nodes)
    check_bodies(build(file, SIZES), nodes)


def test_a_node_without_the_namespace_keeps_its_body_beside_plugins(tmp_path: Path) -> None:
    """How a builder keeps the plugins of a graph in which one node's size has no kernel."""
    ops = [("SsdBlockCommit", SMALL), ("SsdBlockCommit", {**SMALL, "P": 8})]
    file = saved(tmp_path, ops, 16, "float16", drop={1: "plugin_namespace"})
    result = build(file, SIZES, plugins=True)
    assert result["ok"], result
    assert result["custom"] == {"SsdBlockCommit_0": 7}
    assert result["refused"] == result["warnings"] == []
    assert any(name.startswith(BODY) for name in result["names"])


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"P": 24}, {}, "P = 24: the kernels take multiples of 16"),
        ({"N": 512}, {}, "N = 512: the kernels take at most 256"),
        ({}, {"dynamic": ("B", "T", "H")}, "H is dynamic: the kernels need it fixed"),
        ({}, {"drop": {0: "block_len"}}, "lacks the attribute block_len"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_by_the_parser(
    tmp_path: Path, change: Mapping[str, int], options: Mapping[str, Any], reason: str
) -> None:
    """With the reason, and never by an engine."""
    ops = [("SsdBlockCommit", SMALL | change)]
    file = saved(tmp_path, ops, 32, "float16", **options)
    result = build(file, SIZES | {"H": (4, 4, 8)}, plugins=True)
    assert not result["ok"]
    (found,) = result["refused"]
    assert found.startswith(f"{DOMAIN}::SsdBlockCommit: ")
    assert reason in found
    assert not result.get("died")


def test_a_grid_too_large_is_refused_at_the_largest_size_of_the_profile(tmp_path: Path) -> None:
    """A builder may end the process if a plugin raises, so the reason is kept, beside an engine."""
    file = saved(tmp_path, [("SsdBlockCommit", SMALL)], 32, "float16")
    result = build(file, {"B": (1, 1, 70_000), "n": (1, 1, 1)}, plugins=True)
    (reason,) = result["refused"]
    assert "70000 thread blocks along z: a launch takes at most 65535" in reason


# --- callbacks ----------------------------------------------------------------------------------


class Recorder:
    """A stand-in for the loader of kernels and for a kernel: writes down what it is asked."""

    def __init__(self) -> None:
        self.loaded: list[Ptx] = []
        self.launches: list[tuple[Any, ...]] = []

    def load(self, text: Ptx) -> Recorder:
        self.loaded.append(text)
        return self

    def launch(self, *arguments: Any) -> None:
        self.launches.append(arguments)


@pytest.fixture(scope="module")
def trt() -> Any:
    return tensorrt_rtx()


def made_plugin(trt: Any, spec: KernelSpec, block_len: int, load: Any = None) -> Any:
    """A plugin as a builder makes it: out of the fields of a node."""
    made = rtx.creators(trt, load or Recorder().load, [])
    (creator,) = (one for one in made if one.name == spec.name)
    field = trt.PluginField("block_len", np.array([block_len], np.int32), trt.PluginFieldType.INT32)
    plugin = creator.create_plugin("node", trt.PluginFieldCollection([field]), None)
    # an engine makes it again of what was kept
    kept = plugin.get_fields_to_serialize()
    return creator.create_plugin("node", kept, None)


def descriptions(trt: Any, spec: KernelSpec, sizes: Mapping[str, int], io: str) -> list[Any]:
    """What a run gives a plugin for its inputs."""
    kinds = {
        "float16": trt.float16,
        "bfloat16": trt.bfloat16,
        "float32": trt.float32,
        "int64": trt.int64,
    }
    out = []
    for port, shape in zip(spec.inputs, spec.shapes(sizes), strict=False):
        one = trt.PluginTensorDesc()
        one.dims, one.type = trt.Dims(shape), kinds[port.dtype_for(io)]
        one.format = trt.TensorFormat.LINEAR
        out.append(one)
    return out


@pytest.mark.parametrize("io", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_a_run_launches_the_kernel_as_the_spec_says(trt: Any, name: str, io: str) -> None:
    """Text, grid, threads, and every argument in the kernel's order; loaded before the launch."""
    spec, length = OPS[name], 16
    base = MAMBA1 if name.startswith("Sel") else MAMBA2
    recorder = Recorder()
    plugin = made_plugin(trt, spec, length, recorder.load)
    for rows, blocks in ((1, 1), (3, 1 if spec.single_block else 4), (1, 1)):
        sizes = {**base, "B": rows, "T": blocks * length, "L": length}
        given = descriptions(trt, spec, sizes, io)
        pointers = list(range(1000, 1000 + len(spec.ports)))
        inputs, outputs = pointers[: len(spec.inputs)], pointers[len(spec.inputs) :]
        plugin.on_shape_change(given, [])
        before = len(recorder.loaded)
        plugin.enqueue(given, [], inputs, outputs, 0, 77)
        assert len(recorder.loaded) == before  # a captured run only launches
        tile = spec.tiles_for(sizes, length)[0]
        text, launch = spec.text(tile, io), spec.launch(sizes, tile)
        assert recorder.loaded[-1] == text
        grid, block, shared, stream, arguments = recorder.launches[-1]
        assert (grid, block) == (launch.grid, (text.threads, 1, 1))
        assert (shared, stream) == (text.shared, 77)
        assert arguments == (
            [("pointer", value) for value in inputs]
            + [("int32", value) for value in launch.arguments]
            + [("pointer", value) for value in outputs]
        )


@pytest.mark.parametrize("name", OPS)
def test_a_run_by_the_driver_gives_the_reference(
    trt: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Through the driver's door, whose library is a stand-in that computes by the reference."""
    spec, length = OPS[name], 16
    library = StandIn()
    monkeypatch.setattr(driver, "_open", lambda: library)
    plugin = made_plugin(trt, spec, length, rtx.driver_load())
    base = {"C": 48, "K": 3, **SMALL, "E": 48, "N": 16}
    sizes = {**base, "T": length if spec.single_block else 2 * length, "L": length}
    rng = np.random.default_rng(4)
    stored, given = [], {}
    for port, shape in zip(spec.inputs, spec.shapes(sizes), strict=False):
        numbers = rng.uniform(0.1, 1, shape) * (-1 if port.name == "a" else 1)
        if port.dtype == "int64":
            numbers = rng.integers(0, sizes["T"] + 1, shape)
        stored.append(to_bits(numbers, port.dtype_for("float16")))
        given[port.name] = from_bits(stored[-1], port.dtype_for("float16"))
    outputs = spec.shapes(sizes)[len(spec.inputs) :]
    described = descriptions(trt, spec, sizes, "float16")
    with driver.Driver() as memory:
        inputs = [memory.upload(array) for array in stored]
        results = [memory.allocate(8 * int(np.prod(shape))) for shape in outputs]
        addresses = [[one.address for one in some] for some in (inputs, results)]
        plugin.on_shape_change(described, [])
        plugin.enqueue(described, [], *addresses, 0, 0)
        memory.synchronize()
        for right, one, port, shape in zip(
            spec.reference(given, length), results, spec.outputs, outputs, strict=True
        ):
            dtype = port.dtype_for("float16")
            np.testing.assert_allclose(one.read(dtype, shape), right, rtol=2e-3, atol=1e-3)


def test_a_kernel_is_loaded_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the driver's door counts: a model has the same kernel in every layer."""
    calls: list[Any] = []

    class Door:
        def __init__(self, device: int) -> None:
            calls.append(device)

        def make_current(self) -> None:
            calls.append("current")

        def load(self, text: str, entry: str) -> str:
            calls.append(entry)
            return entry

    monkeypatch.setattr(driver, "Driver", Door)
    load = rtx.driver_load(2)
    assert calls == []
    texts = [OPS[name].text(OPS[name].tiles[0], "float16") for name in list(OPS)[:2]]
    assert [load(text) for text in texts * 2] == ["conv_denoise", "conv_commit"] * 2
    assert calls == [2, "current", "conv_denoise", "current", "conv_commit"]


def test_a_run_with_sizes_that_do_not_fit_raises(trt: Any) -> None:
    """Whatever the builder let through: no launch with wrong numbers."""
    spec, recorder = OPS["SsdBlockCommit"], Recorder()
    plugin = made_plugin(trt, spec, 32, recorder.load)
    given = descriptions(trt, spec, {**SMALL, "T": 48}, "float16")
    with pytest.raises(BackendError, match="48 tokens are not a multiple of the block length 32"):
        plugin.enqueue(given, [], [1] * 7, [2] * 2, 0, 0)
    given = descriptions(trt, spec, {**SMALL, "B": 70_000}, "float16")
    with pytest.raises(BackendError, match="70000 thread blocks along z"):
        plugin.on_shape_change(given, [])
    assert recorder.launches == recorder.loaded == []


def test_formats_are_dense_and_of_the_dtypes_of_the_ports(trt: Any) -> None:
    """Per port: one dtype, io tied to that of x."""
    spec = OPS["CausalConvCommit"]
    plugin = made_plugin(trt, spec, 16)
    for io in (trt.float16, trt.bfloat16):
        for pos, port in enumerate(spec.ports):
            for kind in (trt.float16, trt.bfloat16, trt.float32, trt.int32, trt.int64):
                for form in (trt.TensorFormat.LINEAR, trt.TensorFormat.CHW32):
                    in_out = []
                    for one in spec.ports:
                        made = trt.DynamicPluginTensorDesc()
                        made.desc.type = io if one.dtype == "io" else trt.int64
                        made.desc.format = trt.TensorFormat.LINEAR
                        in_out.append(made)
                    in_out[pos].desc.type, in_out[pos].desc.format = kind, form
                    wanted = trt.int64 if port.dtype == "int64" else io
                    if pos == 0 and kind in (trt.float16, trt.bfloat16):
                        wanted = kind
                    found = plugin.supports_format_combination(pos, in_out, len(spec.inputs))
                    assert found == (kind == wanted and form == trt.TensorFormat.LINEAR)


def test_a_clone_is_of_the_same_node(trt: Any) -> None:
    """Kernel, block length and name."""
    recorder = Recorder()
    plugin = made_plugin(trt, OPS["CausalConvReverse"], 16, recorder.load)
    given = descriptions(trt, OPS["CausalConvReverse"], {**MAMBA2, "T": 48}, "float16")
    for one in (plugin.clone(), plugin.attach_to_context(None)):
        assert (one.plugin_name, one.plugin_namespace) == ("CausalConvReverse", DOMAIN)
        one.enqueue(given, [], [1, 2, 3], [4], 0, 0)
    first, second = recorder.launches
    assert first == second
    assert first[4][3:7] == [("int32", 48), ("int32", 5376), ("int32", 4), ("int32", 16)]
