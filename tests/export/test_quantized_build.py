"""Quantised bundles on their way to an engine: half graphs, four-bit floats, bytes kept."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common
from random_sequences import random_data
from sample_models import model

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.calib.apply import MULTIPLIED, SCALE, TENSOR_SCALE, VALUES, stored
from fixedstate.calib.collect import collect
from fixedstate.calib.formats import FORMATS, TARGETS
from fixedstate.calib.lint import check_emission
from fixedstate.calib.plan import Plan, uniform
from fixedstate.calib.report import Gates, Report
from fixedstate.calib.score import choices
from fixedstate.calib.sites import find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.calib.trial import quantized_engine, weight_of
from fixedstate.errors import BackendError, ParityError
from fixedstate.export import engine as builds
from fixedstate.export.against import compare_unrun
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.precisioncheck import check_precision, require_precision
from fixedstate.export.precisionfiles import convert_bundle
from fixedstate.export.precisionrounding import multiply_out
from fixedstate.export.profiles import BuildRequest, plan
from fixedstate.export.quantized import quantize_bundle, write_graphs
from fixedstate.export.realized import realized
from fixedstate.export.weightfile import places_in
from fixedstate.runtime.decoder import open_engine
from fixedstate.spec import AttentionSizes, LayerSpec

POLICY = Policy(masks=(1.0,), blocks=1)
LOOSE = Gates(kl_mean=10.0, kl_p99=100.0, agree=0.0)
HALF = ir.DataType.FLOAT16

Made = Callable[[str], tuple[Bundle, Plan, Report]]


def quantizer(bundle: Bundle, folder: Path) -> Made:
    """Quantises a bundle, all products in one format, once each."""
    data = random_data(bundle, folder, blocks=1)
    table: Table = collect(bundle, data, POLICY, records=2)
    sites = find_sites(load_graphs(bundle))

    @functools.cache
    def made(name: str) -> tuple[Bundle, Plan, Report]:
        target = next(key for key in reversed(TARGETS) if name in TARGETS[key])
        formats = dict.fromkeys(choices(sites, (name,)), name)
        assert formats
        planned = uniform(bundle, table, sites, formats, (target,))
        out = folder / name.replace(":", "-")
        quantised, report = quantize_bundle(
            bundle, planned, table, data, out, gates=LOOSE, records=1
        )
        return quantised, planned, report

    return made


@pytest.fixture(scope="module")
def small(bundle_path: Callable[..., Path]) -> Bundle:
    """Mamba-2 and attention, width 32."""
    return Bundle.open(bundle_path("F3"))


@pytest.fixture(scope="module")
def made(small: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantizer(small, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One layer of attention of width 768, 7 million weights: a plan of weights, not of kernels."""
    root = tmp_path_factory.mktemp("wide")
    sizes = AttentionSizes(heads=8, kv_heads=8, head_dim=96, rotary_dim=96)
    layer = LayerSpec("attention", sizes, "block", mlp="gated", mlp_width=2048)
    spec = model(layer, width=768)
    save_checkpoint(root / "checkpoint", spec, random_tensors(spec, seed=7))
    return export_bundle(root / "checkpoint", root / "bundle", fused=False).bundle


@pytest.fixture(scope="module")
def made_wide(wide: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantizer(wide, tmp_path_factory.mktemp("wide-quantised"))


# --- half graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision"),
    [("int8", "fp16"), ("int8", "bf16"), ("int4:32", "bf16"), ("nvfp4", "fp16"), ("mxfp8", "fp16")],
)
def test_half_graphs_are_as_near_as_those_of_a_float_bundle(
    made: Made, tmp_path: Path, name: str, precision: str
) -> None:
    quantised, planned, _ = made(name)
    half = convert_bundle(quantised, precision, tmp_path)
    for graph in half.graphs.values():
        check_emission(ir.load(tmp_path / graph.file), planned.targets)
    report = check_precision(quantised, half, threads=1)
    require_precision(report)
    assert 0 < report["largest"]["rms_rel"] < {"fp16": 5e-3, "bf16": 5e-2}[precision]
    assert ("activations" in report) == (name == "int8")
    if name == "int8":
        assert "not quantised" in report["kind"]
        assert report["activations"]["comparisons"] == report["comparisons"]
        assert 0 < report["activations"]["rounding"] < 1


def test_scales_follow_the_dtype_of_their_product(made: Made, tmp_path: Path) -> None:
    """In a strongly typed network DequantizeLinear gives what its scale is."""
    for name in ("int8", "nvfp4"):
        quantised, _, _ = made(name)
        folder = tmp_path / name
        folder.mkdir()
        half = convert_bundle(quantised, "fp16", folder)
        places = places_in(ir.load(folder / half.graphs["denoise"].file))
        ends = {key: {p.dtype for k, p in places.items() if k.endswith(key)} for key in (SCALE,)}
        if name == "int8":
            assert ends[SCALE] == {HALF}
        else:  # one scale of a whole weight lies below what float16 holds with all its bits
            assert ends[SCALE] == {ir.DataType.FLOAT8E4M3FN}
            kept = {p.dtype for key, p in places.items() if key.endswith(TENSOR_SCALE)}
            assert kept == {ir.DataType.FLOAT}
        for node in ir.load(folder / half.graphs["denoise"].file).graph:
            if node.op_type == "MatMul" and node.inputs[1] is not None:
                kinds = {value.dtype for value in node.inputs if value is not None}
                assert len(kinds) == 1
            if node.op_type == "QuantizeLinear":
                assert node.inputs[1].const_value.dtype == ir.DataType.FLOAT  # type: ignore[union-attr]


def scaled(bundle: Bundle, ending: str, factor: float) -> None:
    """Change the float16 weights whose names end so."""
    graph = ir.load(bundle.path / bundle.graphs["denoise"].file)
    raw = bytearray((bundle.path / WEIGHTS).read_bytes())
    for name, place in places_in(graph).items():
        if name.endswith(ending):
            part = slice(place.offset, place.offset + place.length)
            raw[part] = (np.frombuffer(raw[part], np.float16) * np.float16(factor)).tobytes()
    (bundle.path / WEIGHTS).write_bytes(raw)


def test_wrong_scales_of_weights_are_noticed(made: Made, tmp_path: Path) -> None:
    quantised, _, _ = made("int8-weights")
    half = convert_bundle(quantised, "fp16", tmp_path)
    scaled(half, SCALE, 1.25)
    with pytest.raises(ParityError, match=r"fp16 graphs differ .*allowed: 0.02\)"):
        require_precision(check_precision(quantised, half, threads=1))


def test_wrong_scales_of_activations_are_noticed(made: Made, tmp_path: Path) -> None:
    """They are in the comparison of the graphs as they are, not in the other one."""
    quantised, _, _ = made("int8")
    half = convert_bundle(quantised, "fp16", tmp_path)
    for graph in half.graphs.values():
        file = tmp_path / graph.file
        proto = onnx.load(file, load_external_data=False)
        up = {n.input[1] for n in proto.graph.node if n.op_type == "DequantizeLinear"}
        for held in proto.graph.initializer:
            if held.name in up and held.data_type == onnx.TensorProto.FLOAT16 and not held.dims:
                (value,) = struct.unpack("<e", held.raw_data)
                held.raw_data = struct.pack("<e", 4 * value)
        onnx.save(proto, file)
    report = check_precision(quantised, half, threads=1)
    assert report["worst"]["passed"]
    assert not report["activations"]["passed"]
    with pytest.raises(ParityError, match="fp16 graphs differ from float32"):
        require_precision(report)


# --- four-bit floats ----------------------------------------------------------------------------


def test_QU_10_what_no_provider_reads_is_simulated_and_said_so(made: Made, small: Bundle) -> None:
    quantised, planned, report = made("nvfp4")
    assert report.simulated == ("nvfp4",)
    assert "no card has been asked" in report.markdown()
    assert 0 < report.comparison.kl < 0.5
    for graph in quantised.graphs.values():
        assert graph.min_onnxruntime == "1.23.0"
        proto = onnx.load(quantised.path / graph.file)
        assert [one.version for one in proto.opset_import if not one.domain] == [23]
        onnx.checker.check_model(proto)
    assert {g.min_onnxruntime for g in made("mxfp8")[0].graphs.values()} == {
        g.min_onnxruntime for g in small.graphs.values()
    }


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_QU_11_blocks_are_dequantised_to_the_numbers_they_stand_for(
    made: Made, small: Bundle, name: str
) -> None:
    """By ONNX's own reference, by what the comparison ran with, and by the quantiser."""
    quantised, planned, _ = made(name)
    graphs = load_graphs(small)
    sites = find_sites(graphs)
    file = quantised.path / quantised.graphs["denoise"].file
    alone = ir.load(file)
    values = {
        str(node.inputs[0].name): node.outputs[0]  # type: ignore[union-attr]
        for node in alone.graph
        if node.op_type == "DequantizeLinear" and str(node.inputs[0].name).endswith(VALUES)  # type: ignore[union-attr]
    }
    assert len(values) == len(planned.formats)
    alone.graph.outputs[:] = values.values()
    alone.graph.inputs.clear()
    common.RemoveUnusedNodesPass()(alone)
    proto = ir.to_proto(alone)
    onnx.load_external_data_for_model(proto, str(file.parent))
    seen = ReferenceEvaluator(proto).run(None, {})
    multiplied = multiply_out(ir.load(file)).graph.initializers
    for key, array in zip(values, seen, strict=True):
        weight = key.removesuffix(VALUES)
        right = stored(weight_of(graphs, weight), sites[weight], FORMATS[name]).dequantized()
        np.testing.assert_allclose(array, right, rtol=1e-6, atol=0)
        if name == "nvfp4":
            held = multiplied[f"{key}{MULTIPLIED}"]
            np.testing.assert_array_equal(held.const_value.numpy(), right)  # type: ignore[union-attr]


def test_a_format_is_tried_as_it_is_compared(made: Made, small: Bundle, tmp_path: Path) -> None:
    """In memory, where formats are scored, and as files, where the bundle is reported on."""
    _, planned, _ = made("nvfp4")
    graphs = load_graphs(small)
    sites = find_sites(graphs)
    block = np.arange(small.spec.block_len)[None] % small.spec.vocab_size
    tried = quantized_engine(
        small, load_graphs(small), sites, planned.chosen(), planned.scales, slots=1
    )
    with tried as engine:
        right = engine.denoise(block).copy()
    simulated = write_graphs(small, planned, graphs, sites, tmp_path, simulate=True)
    written, given = (
        open_engine(one, threads=1, slots=1, memory="fast").denoise(block)
        for one in (simulated, small)
    )
    np.testing.assert_allclose(written, right, rtol=0, atol=1e-5)
    assert np.abs(given - right).max() > 1e-3


# --- builds -------------------------------------------------------------------------------------

KERNELS = 3_500_000
"""Bytes of the kernels of one layer, at most."""

CARDS = {
    "int8": ("8.6", "fp16"),
    "int8-weights": ("8.6", "fp32"),
    "int4:32": ("8.6", "fp16"),
    "fp8": ("8.9", "fp16"),
    "nvfp4": ("12.0", "fp16"),
    "mxfp8": ("12.0", "fp32"),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_engine_keeps_its_weights_quantised(
    made_wide: Made, wide: Bundle, tmp_path: Path, name: str
) -> None:
    """A real build of TensorRT-RTX: bytes of the plan, and its layers beside the bundle's nodes."""
    quantised, planned, _ = made_wide(name)
    capability, precision = CARDS[name]
    request = BuildRequest(
        capabilities=(capability,), precision=precision, plugins="none", roles=("denoise",)
    )
    report = builds.build(quantised, request, tmp_path / "engine")
    (found,) = realized(wide, quantised, planned, report.engine)
    kernels = found.plan_bytes - found.planned - found.others
    assert -0.1 * found.planned < kernels < KERNELS  # half scales take less than planned
    assert 2 * found.weights > found.planned + KERNELS  # float16 weights would not fit
    assert found.passed is not False
    findings = {finding.what: finding for finding in compare_unrun(quantised, report.engine)}
    assert all(finding.passed is not False for finding in findings.values())
    assert findings["bytes per weight"].passed
    assert findings["DequantizeLinear, DEQUANTIZE"].passed
    assert report.engine.check.get("passed", True)


@pytest.mark.parametrize(
    ("name", "capability", "dtype"),
    [
        ("fp8", "8.6", "float8e4m3fn"),
        ("mxfp8", "8.6", "float8e4m3fn"),
        ("nvfp4", "8.9", "float4e2m1"),
        ("int4:32", "7.5", "int4"),
        ("int8", "7.5", "int8"),
    ],
)
def test_a_card_without_the_format_is_refused_before_anything_is_built(
    made: Made, name: str, capability: str, dtype: str
) -> None:
    quantised, _, _ = made(name)
    request = BuildRequest(capabilities=("12.0", capability), precision="fp32")
    with pytest.raises(BackendError, match=rf"{capability} has no {dtype} in tensorrt-rtx"):
        plan(quantised, request)
    if capability != "7.5":
        planned = plan(quantised, replace(request, capabilities=("12.0",)))
        assert planned.weights < plan_bytes_of_float(quantised)


def plan_bytes_of_float(bundle: Bundle) -> int:
    """Bytes of the quantised weights of all roles as float32."""
    return sum(
        4 * int(np.prod([int(str(size)) for size in value.shape or ()]))
        for graph in bundle.graphs.values()
        for key, value in ir.load(bundle.path / graph.file).graph.initializers.items()
        if key.endswith(VALUES)
    )
