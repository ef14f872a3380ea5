"""Rules for the whole suite: what may skip, Hypothesis profiles, the old runtime environment."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle

ROOT = Path(__file__).resolve().parent.parent
REQUIRE_ALL = os.environ.get("REQUIRE_ALL") == "1"

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, print_blob=True, database=None
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# --- what may skip -------------------------------------------------------------------------------


@functools.cache
def _no_gpu() -> str:
    """Why no test marked gpu can run here; empty where one can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs an NVIDIA card: no driver library here"
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "needs an NVIDIA card: the driver reports none"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "runtime310" in getattr(item, "fixturenames", ()):
            item.add_marker("runtime310")
        if Path(ROOT, "tests", "gpu") in item.path.parents:
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.skip(reason)


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that says what was skipped for."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"under REQUIRE_ALL=1 only tests marked gpu may skip. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    expected = hasattr(report, "wasxfail")
    if REQUIRE_ALL and report.skipped and not expected and not item.get_closest_marker("gpu"):
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    on_card = Path(ROOT, "tests", "gpu") in collector.path.parents
    if REQUIRE_ALL and report.skipped and not on_card:
        _forbid_skip(report)
    return report


# --- one copy of the package ---------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def no_second_copy():
    """`import export` from the repository root would load every class a second time."""
    yield
    package = ROOT / "src" / "fixedstate"
    doubles = [
        name
        for name in ("export", "runtime", "plugins", "calib")
        if (file := getattr(sys.modules.get(name), "__file__", None))
        and (package / name).resolve() in Path(file).resolve().parents
    ]
    assert not doubles, f"imported beside fixedstate: {doubles}: import fixedstate.NAME instead"


# --- one thread ----------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Tiny models: more threads wait for one another longer than they compute."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)


# --- the old runtime environment -----------------------------------------------------------------

OLD_PACKAGES = (
    "numpy onnxruntime tokenizers safetensors click rich pytest pytest-timeout hypothesis"
)


@dataclass(frozen=True)
class OldRuntime:
    """Python 3.10 with numpy 1.26 and ONNX Runtime 1.23.2; this checkout is on its path."""

    python: Path

    def run(self, *args: str | Path, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Run that interpreter with `args`; output is captured as text.

        Raises:
            AssertionError: with the output, if `check` and the exit status is not 0.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        env |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        env |= options.pop("env", {})
        done = subprocess.run(
            [str(self.python), *map(str, args)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
        assert not check or done.returncode == 0, f"{args}: exit {done.returncode}\n" + (
            done.stdout + done.stderr
        )
        return done


def _python310() -> str:
    """An interpreter of Python 3.10 that can make environments; empty if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    candidates = [
        os.environ.get("PYTHON310", ""),
        *([shutil.which("python3.10")] if shutil.which("python3.10") else []),
        *sorted(map(str, pyenv.glob("3.10*/bin/python3.10")), reverse=True),
    ]
    probe = "import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 10))"
    for candidate in filter(None, candidates):
        # A version manager's shim is on the path for versions not selected too, and fails.
        if (
            subprocess.run([candidate, "-c", probe], capture_output=True, check=False).returncode
            == 0
        ):
            return candidate
    return ""


@pytest.fixture(scope="session")
def runtime310() -> OldRuntime:
    """The environment of constraints-runtime.txt, built once and kept in .venv-runtime310.

    Skips with the reason where there is no Python 3.10 or nothing to install from (a failure under
    REQUIRE_ALL=1). RUNTIME310_VENV names another folder, PYTHON310 another interpreter.
    """
    venv = Path(os.environ.get("RUNTIME310_VENV") or ROOT / ".venv-runtime310")
    pins = ROOT / "constraints-runtime.txt"
    key = hashlib.sha256(pins.read_bytes() + OLD_PACKAGES.encode()).hexdigest()
    stamp = venv / "installed"
    python = venv / "bin" / "python"
    with open(f"{venv}.lock", "w") as lock:  # two test runs at once build it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == key and python.exists():
            return OldRuntime(python)
        base = _python310()
        if not base:
            pytest.skip("no Python 3.10 here: install one or set PYTHON310")
        shutil.rmtree(venv, ignore_errors=True)
        commands = (
            [base, "-m", "venv", str(venv)],
            [str(python), "-m", "pip", "install", "-q", "-c", str(pins), *OLD_PACKAGES.split()],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip() or "no output").splitlines()[-1]
                pytest.skip(f"the Python 3.10 environment cannot be made: {last}")
        stamp.write_text(key)
    return OldRuntime(python)


# --- exported bundles ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random checkpoint of one of the models in sample_models, by name."""
    import torch
    from sample_models import MODELS

    from fixedstate.export.checkpoint import random_tensors, save_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def folder(name: str) -> Path:
        target = root / name
        tensors = random_tensors(MODELS[name], seed=7)
        if name == "F1":  # steps from very small to large
            for key in [key for key in tensors if key.endswith("dt_proj.bias")]:
                tensors[key] = torch.tensor([-4.0, 3.0, -1.0, 1.0]).repeat_interleave(8)
        save_checkpoint(target, MODELS[name], tensors)
        return target

    return folder


@pytest.fixture(scope="session")
def bundle_path(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_path: Callable[[str], Path]
) -> Callable[..., Path]:
    """Folder of an exported bundle, made once: ``bundle_path("F3")``.

    Names are those of sample_models or of shipped models; ``precision``, ``fused`` and ``head`` go
    to the exporter; the fused graph is made where it is asked for, because it takes time.
    """
    from fixedstate.export.pipeline import export_bundle

    root = tmp_path_factory.mktemp("bundles")

    @functools.cache
    def made(name: str, precision: str, fused: bool, head: str) -> Path:
        source = name if name.startswith("tiny-") else checkpoint_path(name)
        target = root / f"{name}-{precision}{'-fused' if fused else ''}-{head}"
        export_bundle(source, target, precision=precision, fused=fused, head=head)
        return target

    def folder(
        name: str, precision: str = "fp32", fused: bool = False, head: str = "logits"
    ) -> Path:
        return made(name, precision, fused, head)

    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of objective full: Mamba-2 and attention, random weights of seed 5."""
    from variants import VARIANTS

    from fixedstate.export.checkpoint import random_tensors, save_checkpoint
    from fixedstate.export.pipeline import export_bundle

    folder = tmp_path_factory.mktemp("whole")
    spec = VARIANTS["Whole sequence (objective full)"]["Mamba-2 and attention"]
    save_checkpoint(folder / "c", spec, random_tensors(spec, seed=5))
    return export_bundle(folder / "c", folder / "b").bundle
