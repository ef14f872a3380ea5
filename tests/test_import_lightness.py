"""The runtime starts fast and pulls in nothing that a device does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = "torch onnx onnx_ir onnxscript transformers tensorrt tensorrt_rtx"
RUNTIME_NEVER = f"{HEAVY} click rich tokenizers safetensors"


def cpu_seconds(command: list[str], pycache: Path) -> float:
    """Least user plus system time of four runs; the first one also compiles the sources."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(pycache)
    times = []
    for _ in range(4):
        child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, command
        times.append(usage.ru_utime + usage.ru_stime)
    return min(times)


@pytest.mark.parametrize(
    ("statement", "never"),
    [
        pytest.param("import fixedstate", f"{RUNTIME_NEVER} onnxruntime", id="root"),
        pytest.param("import fixedstate.runtime", RUNTIME_NEVER, id="runtime"),
        pytest.param("import fixedstate.cli", f"{HEAVY} onnxruntime", id="cli"),
    ],
)
def test_import_loads_nothing_heavy(statement, never):
    """PyTorch alone is seconds and hundreds of megabytes, and a device has none."""
    program = f"{statement}; import sys; print(*sorted(set('{never}'.split()) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        pytest.param([sys.executable, "-c", "import fixedstate.runtime"], 0.4, id="runtime"),
        pytest.param([str(Path(sys.executable).with_name("fixedstate")), "--help"], 0.3, id="help"),
    ],
)
def test_start_is_cheap(command, limit, tmp_path):
    """CPU seconds, not wall: the machine may be busy."""
    assert cpu_seconds(command, tmp_path) < limit
