"""The import contracts hold, and they catch what they are there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("calib", "export", "plugins", "runtime")


def lint_imports(root: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_contracts_hold():
    """Imports go one way."""
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "says"),
    [
        ("runtime/stray.py", "import torch", "fixedstate.runtime.stray -> torch"),
        ("runtime/stray.py", "import onnxruntime", "fixedstate.runtime.stray -> onnxruntime"),
        ("runtime/stray.py", "def f():\n    import tokenizers", "stray -> tokenizers"),
        ("export/stray.py", "import tensorrt_rtx", "fixedstate.export.stray -> tensorrt_rtx"),
        ("plugins/stray.py", "import onnx_ir", "fixedstate.plugins.stray -> onnx_ir"),
        (
            "calib/stray.py",
            "import fixedstate.export",
            "fixedstate.calib.stray -> fixedstate.export",
        ),
        ("src/fixedstate/stray.py", "", "fixedstate.stray"),
    ],
)
def test_contract_catches(file, line, says, tmp_path):
    """A contract that never fails may be looking at nothing."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copy2(ROOT / ".importlinter", tmp_path)
    for name in ("src", *STAGES):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore)
    (tmp_path / file).write_text(line + "\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout


def test_contract_lets_a_named_door_through(tmp_path):
    """The doors of the contracts are spelled right: a wrong name would forbid the door itself."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copy2(ROOT / ".importlinter", tmp_path)
    for name in ("src", *STAGES):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore)
    for file, module in (
        ("runtime/ort.py", "onnxruntime"),
        ("runtime/text.py", "tokenizers"),
        ("runtime/snapshot.py", "safetensors.numpy"),
        ("runtime/trt.py", "tensorrt"),
        ("export/engine.py", "tensorrt_rtx"),
        ("plugins/library.py", "tensorrt"),
        ("plugins/torch_ops.py", "torch"),
    ):
        with open(tmp_path / file, "a") as source:
            source.write(f"\nimport {module}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
