"""What is compared of an engine that cannot run here: a real build of TensorRT-RTX."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_engine import edit
from sample_models import mamba_layer, model

from fixedstate.bundle import Bundle
from fixedstate.errors import BundleError
from fixedstate.export import engine as builds
from fixedstate.export.against import Finding, compare_unrun
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.engine import LAYERS
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.profiles import BuildRequest
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.spec import Mamba2Sizes

FITS = Mamba2Sizes(d_inner=32, heads=2, head_dim=16, d_state=16, groups=1, d_conv=4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One Mamba-2 layer of sizes that the kernels take."""
    root = tmp_path_factory.mktemp("against")
    spec = model(mamba_layer("forward", FITS), block_len=16)
    save_checkpoint(root / "checkpoint", spec, random_tensors(spec, seed=7))
    export_bundle(root / "checkpoint", root / "bundle", fused=False)
    return Bundle.open(root / "bundle")


@pytest.fixture(scope="module")
def built(bundle: Bundle) -> Callable[[str, str], Path]:
    """Folder of an engine of the role denoise, made once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(precision: str, plugins: str) -> Path:
        key = precision, plugins
        if key not in made:
            made[key] = bundle.path.parent / f"{precision}-{plugins}.engine"
            request = BuildRequest(
                capabilities=("12.0",), precision=precision, plugins=plugins, roles=("denoise",)
            )
            builds.build(bundle, request, made[key])
        return made[key]

    return folder


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def damage(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> EngineFolder:
    """An engine whose record of its layers says something else, and is sealed again."""
    shutil.copytree(source, target)
    file = target / LAYERS
    record = json.loads(file.read_text())
    change(record["denoise"])
    file.write_text(json.dumps(record))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    edit(target, lambda data: data["files"].update({LAYERS: digest}))
    return EngineFolder.open(target)


def test_the_parsed_network_is_the_graph(bundle: Bundle, built: Callable[[str, str], Path]) -> None:
    """Function bodies inlined: one layer for each product, convolution and reduction."""
    findings = by_name(compare_unrun(bundle, EngineFolder.open(built("fp32", "none"))))
    assert {finding.passed for finding in findings.values()} == {True, None}
    product = findings["MatMul, MATRIX_MULTIPLY"]
    assert product.bundle == product.engine
    assert int(product.engine) > 2
    assert findings["Conv, CONVOLUTION"].engine == "1"
    assert int(findings["ReduceMean, REDUCE"].engine) > 0
    assert findings["plugin layers"].engine == "0"
    assert findings["operators of this package"].engine == "2"
    assert findings["bytes per weight"].engine == "4.000"
    assert float(findings["plan / weight bytes"].engine) > 1


def test_half_engine_with_plugins(bundle: Bundle, built: Callable[[str, str], Path]) -> None:
    """Bodies that became plugins are not counted; the precision is that of the bytes."""
    findings = by_name(compare_unrun(bundle, EngineFolder.open(built("fp16", "required"))))
    assert {finding.passed for finding in findings.values()} == {True}
    assert findings["plugin layers"].engine == "2"
    assert "Conv, CONVOLUTION" not in findings
    assert int(findings["MatMul, MATRIX_MULTIPLY"].engine) > 0
    assert findings["bytes per weight"].bundle == "4.000"
    assert 2 <= float(findings["bytes per weight"].engine) < 3
    assert findings["inputs"].bundle != findings["inputs"].engine  # dtypes, not shapes
    assert findings["precision, when built"].engine.startswith("fp16: fp16 graphs in ONNX Runtime")


CHANGES = {
    "a product is missing": (
        lambda record: record["layers"].update(MATRIX_MULTIPLY=3),
        "MatMul, MATRIX_MULTIPLY",
    ),
    "a softmax too many": (lambda record: record["layers"].update(SOFTMAX=1), "Softmax, SOFTMAX"),
    "an operator was left out": (
        lambda record: record["kernels"].pop(),
        "operators of this package",
    ),
    "a plugin that was not planned": (
        lambda record: record["plugins"].append("scan"),
        "plugin layers",
    ),
    "weights in half": (
        lambda record: record.update(weight_bytes=record["weight_bytes"] // 2),
        "bytes per weight",
    ),
    "a plan without its weights": (
        lambda record: record.update(weight_bytes=record["plan_bytes"] + 1),
        "plan / weight bytes",
    ),
    "another plan": (lambda record: record.update(plan_bytes=1), "plan bytes"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_agree_is_named(
    bundle: Bundle, built: Callable[[str, str], Path], tmp_path: Path, change: str
) -> None:
    """Each is a network that is not the graph, or a plan that is not the network."""
    apply, what = CHANGES[change]
    findings = compare_unrun(bundle, damage(built("fp32", "none"), tmp_path / "e", apply))
    assert what in [finding.what for finding in findings if finding.passed is False]


def test_a_record_that_says_nothing_is_an_error(
    bundle: Bundle, built: Callable[[str, str], Path], tmp_path: Path
) -> None:
    broken = damage(built("fp32", "none"), tmp_path / "e", lambda record: record.pop("kernels"))
    with pytest.raises(BundleError, match=r"does not say what it should of denoise .*'kernels'"):
        compare_unrun(bundle, broken)


def test_an_engine_without_a_record_says_so(
    bundle: Bundle, built: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Ports are compared all the same."""
    shutil.copytree(built("fp32", "none"), tmp_path / "e")
    (tmp_path / "e" / LAYERS).unlink()
    edit(tmp_path / "e", lambda data: data["files"].pop(LAYERS))
    findings = by_name(compare_unrun(bundle, EngineFolder.open(tmp_path / "e")))
    assert findings["layers"].engine == "no layers.json: not compared"
    assert findings["layers"].passed is None
    assert findings["inputs"].passed is findings["outputs"].passed is True
