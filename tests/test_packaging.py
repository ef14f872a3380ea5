"""The wheel holds the whole package and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("calib", "export", "plugins", "runtime")
BUILD_INPUTS = (
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "src",
    *STAGES,
)


def is_source(path: Path) -> bool:
    return "__pycache__" not in path.parts and path.suffix not in {".pyc", ".pyo"}


@pytest.mark.parametrize("stage", STAGES)
def test_stage_is_a_relative_link(stage):
    """A checkout without links builds a wheel without any stage, and exits 0."""
    link = ROOT / "src" / "fixedstate" / stage
    if not link.is_symlink():
        # A source archive holds plain folders in place of the links, and no second copy.
        assert (link / "__init__.py").is_file(), f"{link} is neither a link nor a package"
        assert not (ROOT / stage).exists(), f"{link} should be a link to ../../{stage}"
        return
    assert os.readlink(link) == f"../../{stage}"
    assert (link / "__init__.py").is_file()


def test_wheel_equals_tree(tmp_path):
    """A data file that no pattern names, or a stray folder, shows up here and nowhere else."""
    package = ROOT / "src" / "fixedstate"
    tree = {
        f"fixedstate/{Path(folder, name).relative_to(package)}"
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
        if is_source(Path(folder, name))
    }
    # Built from a copy: setuptools leaves build/ behind and would pick up old files from it.
    copy = tmp_path / "tree"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, copy / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    done = subprocess.run([*build, str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {n for n in archive.namelist() if ".dist-info/" not in n and not n.endswith("/")}
    assert sorted(packed) == sorted(tree)
