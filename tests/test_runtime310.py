"""The runtime half on Python 3.10, numpy 1.26 and ONNX Runtime 1.23.2, without PyTorch."""

from __future__ import annotations

import pytest


@pytest.mark.timeout(900)  # the first use installs the environment
def test_old_environment_is_what_it_says(runtime310):
    """Every test that uses the fixture is worth nothing if the versions are others."""
    program = (
        "import sys, numpy, onnxruntime as ort, importlib.util as u\n"
        "print(*sys.version_info[:2], numpy.__version__, ort.__version__, u.find_spec('torch'))"
    )
    assert runtime310.run("-c", program).stdout.split() == ["3", "10", "1.26.4", "1.23.2", "None"]


def test_runtime_imports_on_the_old_environment(runtime310):
    """JetPack 6 has nothing newer."""
    runtime310.run("-W", "error", "-c", "import fixedstate.runtime, fixedstate.cli")
