"""Half graphs of bundles that keep states, keys and values in fewer bits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx_ir as ir
import pytest
from rtx_build import build
from stored_bundles import stored, windowed

from fixedstate.bundle import Bundle
from fixedstate.errors import ParityError
from fixedstate.export.passes import serialised
from fixedstate.export.precisioncheck import check_precision, require_precision
from fixedstate.export.precisionfiles import convert_bundle
from fixedstate.state import Precision

CASES = [
    ("F1", "int8row", "float32"),
    ("F1", "bfloat16", "float32"),
    ("F3", "int8row", "int8"),
    ("F3", "float16", "kivi4"),
    ("tiny-hybrid", "int8row", "float8_e4m3fn"),
    ("tiny-hybrid", "bfloat16", "kivi2r0"),
    ("tiny-hybrid", "float32", "kivi4r1"),
    ("windows", "float32", "int8"),
]
BOTH = pytest.mark.parametrize("precision", ["fp16", "bf16"])


@pytest.fixture(scope="module")
def small(bundle_path, tmp_path_factory) -> Callable[[str, str, str], Bundle]:
    """A float32 bundle by name, with what it carries in these formats."""

    @functools.cache
    def plain(name: str) -> Bundle:
        if name != "windows":
            return Bundle.open(bundle_path(name, fused=name != "tiny-attention"))
        return windowed(tmp_path_factory.mktemp("windows"))

    @functools.cache
    def made(name: str, state: str, kv: str) -> Bundle:
        return stored(plain(name), tmp_path_factory.mktemp("stored"), state=state, kv=kv)

    return made


@pytest.mark.parametrize("case", CASES, ids="-".join)
@BOTH
def test_half_graphs_are_near_and_keep_the_formats(small, tmp_path, case, precision) -> None:
    bundle = small(*case)
    half = convert_bundle(bundle, precision, tmp_path)
    assert half.precision == Precision(
        io={"fp16": "float16", "bf16": "bfloat16"}[precision],
        state=bundle.precision.state,
        kv=half.precision.io if bundle.precision.kv == "float32" else bundle.precision.kv,
    )
    for pair, before in zip(half.state.committed, bundle.state.committed, strict=True):
        if before.past.dtype != "float32":
            assert pair == before
    report = check_precision(bundle, half, threads=1)
    require_precision(report)
    allowed = {"fp16": 0.02, "bf16": 0.08}[precision]
    assert report["tolerance"]["relative"] == allowed  # a step of a format is added by port only


def products(bundle: Bundle, role: str) -> list[set[ir.DataType | None]]:
    """Dtypes of the inputs of every product of two activations."""
    graph = ir.load(bundle.path / bundle.graphs[role].file).graph
    return [
        {value.dtype for value in node.inputs if value is not None}
        for node in graph
        if node.op_type == "MatMul" and node.inputs[1] is not None
        if node.inputs[1].producer() is not None
    ]


@pytest.mark.parametrize("kv", ["int8", "kivi4"])
def test_products_with_stored_keys_are_half(small, tmp_path, kv) -> None:
    """They are made float32 by their scales, and cast: no product is slower for it."""
    half = convert_bundle(small("tiny-hybrid", "int8row", kv), "fp16", tmp_path)
    found = [kinds for kinds in products(half, "denoise") if ir.DataType.FLOAT16 in kinds]
    layers = [layer for layer in half.spec.layers if layer.mixer == "attention"]
    assert len(found) >= 4 * len(layers)  # scores and mixtures, with the cache and with the block
    assert all(len(kinds) == 1 for kinds in products(half, "denoise"))


@pytest.mark.parametrize("kv", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("role", ["commit", "denoise"])
def test_wrong_scales_are_noticed(small, tmp_path, kv, role) -> None:
    """What is handed out differs by more than a step then, and what is read changes the scores."""
    bundle = small("tiny-hybrid", "float32", kv)
    half = convert_bundle(bundle, "fp16", tmp_path)
    file = tmp_path / half.graphs[role].file
    loaded = ir.load(file)
    graph = loaded.graph
    ports = graph.outputs if role == "commit" else graph.inputs
    place, port = next((i, v) for i, v in enumerate(ports) if "value_scale" in str(v.name))
    wrong = ir.node("Add", [port, port])
    wrong.outputs[0].type = port.type
    if role == "commit":
        graph.append(wrong)
        wrong.outputs[0].name, port.name = port.name, "before"
        graph.outputs[place] = wrong.outputs[0]
    else:
        ir.convenience.replace_all_uses_with(port, wrong.outputs[0])
        wrong.replace_input_with(0, port)
        wrong.replace_input_with(1, port)
        graph.insert_before(next(iter(graph)), wrong)
    file.write_bytes(serialised(loaded))
    with pytest.raises(ParityError, match="fp16 graphs differ from float32"):
        require_precision(check_precision(bundle, half, threads=1))


@BOTH
def test_tensorrt_rtx_builds_half_graphs_of_stored_states(small, tmp_path, precision) -> None:
    half = convert_bundle(small("F3", "int8row", "int8"), precision, tmp_path)
    sizes = {"B": (1, 1, 4), "n": (1, 1, 4), "m": (1, 2, 2), "C": (8, 256, 512)}
    result = build(half.path / "commit_denoise.onnx", sizes)
    assert result["ok"], result
    assert result["warnings"] == []
