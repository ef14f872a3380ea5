"""Mamba-1 in exported graphs: mixed with other layers, as a sidecar, over whole sequences."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from sample_models import attention_layer, mamba_layer, model, selective_layer

from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.spec import Mamba1Sizes, Mamba2Sizes, ModelSpec

SPECS: dict[str, tuple[ModelSpec, str, bool]] = {
    # convolutions of different channels and taps, one of them without a window
    "mixed": (
        model(
            selective_layer(tied="projections"),
            mamba_layer(sizes=Mamba2Sizes(64, 8, 8, 8, 2, 2)),
            selective_layer("forward", Mamba1Sizes(33, 3, 5, 1, bias=True, conv_bias=False)),
        ),
        "fp32",
        True,
    ),
    "sidecar": (
        model(
            attention_layer("forward"),
            selective_layer("reverse", norm="layer", norm_place="after", output_gate=True),
            attention_layer("forward"),
            commit_mask="causal",
        ),
        "fp32",
        False,
    ),
    "half": (model(selective_layer()), "fp16", False),
}


@pytest.mark.parametrize("name", SPECS)
def test_export_equals_pytorch(tmp_path: Path, name: str) -> None:
    """The exporter's own comparison, over batches, block counts and ragged lengths, passes."""
    spec, precision, single = SPECS[name]
    save_checkpoint(tmp_path / "c", spec, random_tensors(spec, seed=9))
    export_bundle(tmp_path / "c", tmp_path / "b", precision=precision, fused=single)
    for file in (tmp_path / "b").glob("*.onnx"):
        functions = onnx.load(file, load_external_data=False).functions
        scans = [function for function in functions if function.name.startswith("SelectiveScan")]
        assert scans, file.name
        for function in scans:
            assert [node.op_type for node in function.node].count("Scan") == 1
