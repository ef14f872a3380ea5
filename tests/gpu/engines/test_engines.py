"""The whole program on the card and the TensorRT that are here; skipped, by name, elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
MODULES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}


@pytest.mark.gpu
@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    ("precision", "more"),
    [("fp32", []), ("fp16", []), ("bf16", []), ("fp32", ["--stripped"]), ("fp16", ["--stripped"])],
)
@pytest.mark.parametrize("target", MODULES)
@pytest.mark.parametrize("model", ["tiny-hybrid", "whole sequence"])
def test_an_engine_is_right_on_this_card(
    bundle_path, whole, tmp_path, target, precision, more, model
):
    if not any(importlib.util.find_spec(name) for name in MODULES[target]):
        pytest.skip(f"needs {' or '.join(MODULES[target])}")
    out = tmp_path / "engines.json"
    bundle = whole.path if model == "whole sequence" else bundle_path(model)
    command = [sys.executable, RUN, bundle, "--target", target]
    command += ["--precision", precision, "--out", out, *more]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    results = json.loads(out.read_text())
    assert results["problems"] == [], done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0
    assert results["captured"]["graphs"]
    assert results["engine"]["refitted"] is bool(more)


@pytest.mark.gpu
@pytest.mark.timeout(660)
@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_a_provider_is_right_on_this_card(bundle_path, tmp_path, provider):
    from fixedstate.errors import BackendError
    from fixedstate.runtime.ort import choose_provider

    try:
        choose_provider(provider)
    except BackendError as error:
        pytest.skip(str(error))
    out = tmp_path / "provider.json"
    command = [sys.executable, RUN, bundle_path("tiny-hybrid"), "--provider", provider]
    done = subprocess.run(
        list(map(str, [*command, "--out", out])),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    results = json.loads(out.read_text())
    assert results["problems"] == [], done.stdout[-4000:] + done.stderr[-4000:]
    assert (done.returncode, results["provider"]) == (0, provider)
