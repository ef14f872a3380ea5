"""Quantised bundles: written whole, compared, bound to what they were made of, and bundles."""

from __future__ import annotations

import collections
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_sequences import random_data

from fixedstate.bundle import QUANTIZATION, WEIGHTS, Bundle
from fixedstate.calib.apply import stored
from fixedstate.calib.collect import collect
from fixedstate.calib.data import Data
from fixedstate.calib.formats import format_named
from fixedstate.calib.plan import Plan, uniform
from fixedstate.calib.report import Gates, Report
from fixedstate.calib.score import choices
from fixedstate.calib.sites import Site, find_sites, load_graphs, products
from fixedstate.calib.table import Policy, Table
from fixedstate.calib.trial import weight_of
from fixedstate.errors import BundleError, CalibrationError, UsageError
from fixedstate.export.quantized import quantize_bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.laws import check_bundle

POLICY = Policy(masks=(1.0, 0.5), blocks=2)
LOOSE = Gates(kl_mean=10.0, kl_p99=100.0, agree=0.0)
NAMES = ("int8", "int8-weights", "int4:32", "fp8")


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    return Bundle.open(bundle_path("tiny-hybrid", fused=True))


@pytest.fixture(scope="module")
def sites(bundle: Bundle) -> dict[str, Site]:
    return find_sites(load_graphs(bundle))


@pytest.fixture(scope="module")
def data(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return random_data(bundle, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def table(bundle: Bundle, data: Data) -> Table:
    return collect(bundle, data, POLICY, records=4)


@pytest.fixture(scope="module")
def planned(bundle: Bundle, table: Table, sites: dict[str, Site]) -> Callable[[str], Plan]:
    def made(name: str) -> Plan:
        formats = dict.fromkeys(choices(sites, (name,)), name)
        return uniform(bundle, table, sites, formats, ("ort-cpu",))

    return made


Made = Callable[[str], tuple[Bundle, Report]]


@pytest.fixture(scope="module")
def made(
    bundle: Bundle,
    table: Table,
    data: Data,
    planned: Callable[[str], Plan],
    tmp_path_factory: pytest.TempPathFactory,
) -> Made:
    folder = tmp_path_factory.mktemp("quantised")
    cache: dict[str, tuple[Bundle, Report]] = {}

    def get(name: str) -> tuple[Bundle, Report]:
        if name not in cache:
            target = folder / name.replace(":", "-")
            cache[name] = quantize_bundle(
                bundle, planned(name), table, data, target, gates=LOOSE, records=2
            )
        return cache[name]

    return get


def tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a safetensors file by name, read without a library."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + size])
    body = raw[8 + size :]
    return {
        name: (one["dtype"], one["shape"], body[slice(*one["data_offsets"])])
        for name, one in entries.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_bundle_that_decodes(made: Made, bundle: Bundle, name: str) -> None:
    quantised, report = made(name)
    opened = Bundle.open(quantised.path)
    assert opened == quantised
    assert opened.is_quantized
    assert not bundle.is_quantized
    assert set(opened.graphs) == set(bundle.graphs)
    for role, graph in opened.graphs.items():
        assert (graph.inputs, graph.outputs) == (
            bundle.graphs[role].inputs,
            bundle.graphs[role].outputs,
        )
    assert set(opened.files) == {*bundle.files, QUANTIZATION}
    settings = Settings(max_new_tokens=32, steps=4, stop_ids=())
    with load(opened.path, threads=1) as decoder:
        (result,) = decoder.generate([Request((5, 6), settings)])
    assert len(result.token_ids) == 32
    assert 0 < report.comparison.kl < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_QU_12_the_file_is_as_small_as_the_plan_says(made: Made, bundle: Bundle, name: str) -> None:
    quantised, report = made(name)
    before, after = (tensors(one.path / WEIGHTS) for one in (bundle, quantised))
    kept = sum(len(raw) for key, (_, _, raw) in after.items() if key in before)
    added = sum(len(raw) for key, (_, _, raw) in after.items() if key not in before)
    assert added == sum(size for one, size in report.nbytes.items() if one != "float")
    gone = [key for key in before if key not in after]
    assert gone
    assert kept == sum(len(raw) for _, _, raw in before.values()) - sum(
        len(before[key][2]) for key in gone
    )
    assert (quantised.path / WEIGHTS).stat().st_size < 0.75 * (bundle.path / WEIGHTS).stat().st_size


@pytest.mark.parametrize("name", NAMES)
def test_stored_bytes_are_the_values_and_scales_of_each_weight(
    made: Made, bundle: Bundle, sites: dict[str, Site], name: str
) -> None:
    quantised, _ = made(name)
    found = tensors(quantised.path / WEIGHTS)
    graphs = load_graphs(bundle)
    for weight in choices(sites, (name,)):
        one = stored(weight_of(graphs, weight), sites[weight], format_named(name))
        kind, shape, raw = found[f"{weight}.quantized"]
        rows, columns = sites[weight].rows, sites[weight].columns
        if name == "int4:32":
            assert (kind, shape) == ("U8", [rows, columns // 2])
            pairs = np.frombuffer(raw, np.uint8)
            low, high = pairs & 15, pairs >> 4  # the first value is in the low half
            flat = np.stack([low, high], 1).reshape(rows, columns).astype(np.int8)
            values = np.where(flat > 7, flat - 16, flat)
            np.testing.assert_array_equal(values, one.values.astype(np.int8))
        else:
            assert (kind, shape) == ({"fp8": "F8_E4M3"}.get(name, "I8"), [rows, columns])
            assert raw == one.values.tobytes()
        assert found[f"{weight}.scale"][2] == one.scales.astype(np.float32).tobytes()


@pytest.mark.parametrize("role", ["denoise", "commit", "commit_denoise"])
def test_every_int8_product_is_one_integer_kernel(made: Made, role: str, tmp_path: Path) -> None:
    """Products that share an activation too: with one scale for all of them none would be."""
    quantised, _ = made("int8")
    file = quantised.path / quantised.graphs[role].file
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(file, options, disabled_optimizers=["ConstantSharing"])
    counts = collections.Counter(
        node.op_type
        for node in onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    )
    expected = sum(
        node.op_type == "MatMul"
        and all(v is not None and v.producer() is not None for v in node.inputs)
        and all(
            v.producer().op_type == "DequantizeLinear"  # type: ignore[union-attr]
            for v in node.inputs
        )
        for node in ir.load(file).graph
    )
    assert expected > 10
    assert counts["MatMulIntegerToFloat"] == expected
    assert counts["DequantizeLinear"] == 0


def test_QU_07_fused_and_plain_graphs_agree(made: Made) -> None:
    """What ONNX Runtime fuses blocks of four bits into gives the numbers of the graph as it is."""
    quantised, _ = made("int4:32")
    graph = quantised.graphs["denoise"]
    rng = np.random.default_rng(0)
    feeds = {}
    for port in graph.inputs:
        shape = port.resolve(B=2, C=32)
        if port.dtype == "int64":
            high = quantised.spec.vocab_size if port.name == "input_ids" else 16
            feeds[port.name] = rng.integers(0, high, shape)
        else:
            feeds[port.name] = rng.standard_normal(shape).astype(np.float32)
    results = []
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, None):
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        if level is not None:
            options.graph_optimization_level = level
        results.append(ort.InferenceSession(quantised.path / graph.file, options).run(None, feeds))
    np.testing.assert_allclose(results[1][0], results[0][0], atol=2e-4)


@pytest.mark.parametrize("name", ["int8", "int4:32"])
def test_laws_hold_for_quantised_bundles(made: Made, name: str) -> None:
    """Static scales: a row's bytes are its own, alone and among others, saved and restored."""
    quantised, _ = made(name)
    results = check_bundle(quantised, block_counts=(1, 3), seed=3)
    assert [(one.law, one.passed) for one in results] == [(law, True) for law in (1, 2, 3, 4, 6, 7)]


def test_gates_keep_a_bad_model_from_appearing(
    bundle: Bundle, table: Table, data: Data, planned: Callable[[str], Plan], tmp_path: Path
) -> None:
    plan, target = planned("int4:32"), tmp_path / "q"
    with pytest.raises(CalibrationError, match="kl_mean is") as caught:
        quantize_bundle(bundle, plan, table, data, target, gates=Gates(kl_mean=1e-9), records=1)
    assert caught.value.code == "GATES"
    assert list(tmp_path.iterdir()) == []
    kept, report = quantize_bundle(
        bundle, plan, table, data, target, gates=Gates(kl_mean=1e-9), keep_failed=True, records=1
    )
    record = json.loads((kept.path / QUANTIZATION).read_bytes())
    assert record["breaches"] == report.breaches(Gates(kl_mean=1e-9)) != []
    assert Plan.from_dict(record["plan"]) == plan


def test_QU_01_nothing_is_made_of_another_models_ranges_or_plan(
    bundle: Bundle, table: Table, data: Data, planned: Callable[[str], Plan], tmp_path: Path
) -> None:
    plan = planned("int8")
    other = replace(bundle, weights="0" * 64)
    with pytest.raises(CalibrationError, match="the plan is for weights") as caught:
        quantize_bundle(other, plan, table, data, tmp_path / "q")
    assert caught.value.code == "STALE"
    with pytest.raises(CalibrationError, match="the table's model") as caught:
        quantize_bundle(other, replace(plan, weights=other.weights), table, data, tmp_path / "q")
    assert caught.value.code == "STALE"
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_bundle_is_not_quantised_again(
    made: Made, planned: Callable[[str], Plan], table: Table, data: Data, tmp_path: Path
) -> None:
    quantised, _ = made("int8")
    with pytest.raises(CalibrationError, match="already quantised") as caught:
        quantize_bundle(quantised, planned("int8"), table, data, tmp_path / "q")
    assert caught.value.code == "MODEL"


def test_the_record_is_part_of_the_bundle(made: Made, tmp_path: Path) -> None:
    quantised, _ = made("int8")
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in quantised.path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    text = (copied / QUANTIZATION).read_text()
    (copied / QUANTIZATION).write_text(text.replace('"agree": 0.', '"agree": 1.', 1))
    with pytest.raises(BundleError, match="quantization.json was changed"):
        Bundle.open(copied)


def test_a_folder_that_is_there_is_not_touched(
    made: Made, bundle: Bundle, table: Table, data: Data, planned: Callable[[str], Plan]
) -> None:
    quantised, _ = made("int8")
    before = Bundle.open(quantised.path).digest
    with pytest.raises(UsageError, match="exists"):
        quantize_bundle(bundle, planned("int8"), table, data, quantised.path)
    assert Bundle.open(quantised.path).digest == before


def test_the_same_plan_gives_the_same_bytes(
    made: Made,
    bundle: Bundle,
    table: Table,
    data: Data,
    planned: Callable[[str], Plan],
    tmp_path: Path,
) -> None:
    first, _ = made("int8")
    again, _ = quantize_bundle(
        bundle, planned("int8"), table, data, tmp_path / "q", gates=LOOSE, records=2
    )
    assert again.digest == first.digest


def test_products_of_other_kinds_stay_as_they_are(made: Made, sites: dict[str, Site]) -> None:
    quantised, _ = made("int8")
    model = ir.load(quantised.path / quantised.graphs["denoise"].file)
    left = {product.weight for product in products(model)}
    assert not any(name.endswith(".quantized") for name in left)
    assert {sites[name].kind for name in left if name in sites} <= {"", "x_proj", "dt_proj"}
