"""The door to TensorRT: what is missing or unfit is an error that says what to do."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fixedstate.errors import BackendError
from fixedstate.plugins import library, quick

Importer = Callable[..., Any]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes imports of modules fail, as missing ones or with a given error."""

    def hide(*names: str, error: Exception | None = None) -> None:
        real: Importer = builtins.__import__

        def importer(
            name: str, namespace: Any = None, local: Any = None, wanted: Any = (), level: int = 0
        ) -> Any:
            if name in names and level == 0:
                raise error or ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, namespace, local, wanted, level)

        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(builtins, "__import__", importer)

    return hide


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("8.6.1", "ahead-of-time plugins came with 10.9"),
        ("10.3.0", "ahead-of-time plugins came with 10.9"),
        ("10.8.0.43", "ahead-of-time plugins came with 10.9"),
        ("10.14.1.48", "quick-deployable plugins do not work in 10.14"),
        ("unknown", "ahead-of-time plugins came with 10.9"),
    ],
)
def test_versions_whose_plugins_do_not_work_are_refused(version: str, reason: str) -> None:
    """With the reason, and what works instead."""
    with pytest.raises(BackendError) as info:
        library.check_version(version)
    assert f"TensorRT {version} cannot take the plugins: {reason}" in str(info.value)
    assert "build without plugins" in str(info.value)


@pytest.mark.parametrize("version", ["10.9.0.34", "10.13.3.9", "10.15.0.1", "11.4.0.106", "12.0"])
def test_versions_whose_plugins_work_are_taken(version: str) -> None:
    """Nothing is raised."""
    assert library.check_version(version) is None


def test_the_version_of_an_installed_tensorrt_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where plugins are registered: without them any version builds and runs engines.

    A stand-in for the package, which holds its version only.
    """
    module = ModuleType("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    module.__version__ = "11.4.0.106"  # type: ignore[attr-defined]
    assert library.tensorrt() is module
    module.__version__ = "10.14.0.1"  # type: ignore[attr-defined]
    assert library.tensorrt() is module
    with pytest.raises(BackendError, match="do not work in 10.14"):
        library.register_quick()


def test_plugins_of_tensorrt_are_registered_by_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the package and for what registers; refusals of both products are one list."""
    module, plugin = ModuleType("tensorrt"), ModuleType("tensorrt.plugin")
    module.__version__, module.plugin = "11.4.0.106", plugin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugin)

    def register(trt: Any, trtp: Any, refused: list[str]) -> list[str]:
        assert (trt, trtp) == (module, plugin)
        refused += ["one", "two", "one"]
        return ["SsdBlockDenoise"]

    monkeypatch.setattr(quick, "register", register)
    assert library.register_quick() == ["SsdBlockDenoise"]
    assert library.refusals() == ["one", "two"]
    assert library.refusals() == []


def test_a_missing_package_is_named_with_what_to_install(absent: Callable[..., None]) -> None:
    """Both products."""
    absent("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
    with pytest.raises(BackendError, match=r"no module 'tensorrt'.*install fixedstate\[trt\]"):
        library.tensorrt()
    with pytest.raises(BackendError, match=r"TensorRT-RTX is not.*install fixedstate\[rtx\]"):
        library.tensorrt_rtx()
    with pytest.raises(BackendError, match="TensorRT-RTX is not installed"):
        library.register_rtx()


def test_a_package_that_cannot_be_loaded_is_not_called_missing(
    absent: Callable[..., None],
) -> None:
    """The loader's own words are passed on."""
    absent("tensorrt", "tensorrt_rtx", error=OSError("libnvinfer.so.10: cannot open"))
    with pytest.raises(BackendError, match=r"is installed and cannot be loaded: libnvinfer.so.10"):
        library.tensorrt()
    with pytest.raises(BackendError, match=r"is installed and cannot be loaded: libnvinfer.so.10"):
        library.tensorrt_rtx()


@pytest.mark.trt
def test_the_bindings_serve_where_the_outer_package_is_missing(
    absent: Callable[..., None],
) -> None:
    """The package tensorrt_rtx only passes on what tensorrt_rtx_bindings holds."""
    absent("tensorrt_rtx")
    assert library.tensorrt_rtx().__name__ == "tensorrt_rtx_bindings"


PROGRAM = """
import sys
from fixedstate.errors import BackendError
from fixedstate.plugins import library
try:
    print(len(library.register_rtx()), len(library.register_rtx()), library.refusals())
except BackendError as err:
    print("refused:", err)
"""


def run_program(search: str, hide: bool = False) -> str:
    """Output of a process that registers the plugins, with a search path."""
    begin = "from fixedstate.plugins import library\nlibrary._rtx_folders = lambda: []\n"
    environment = {**os.environ, "LD_LIBRARY_PATH": search}
    program = begin + PROGRAM if hide else PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.trt
def test_a_missing_library_is_an_error_before_the_process_can_end(tmp_path: Path) -> None:
    """The parser itself would end it; a link made by `link_rtx` repairs it, once is enough."""
    said = run_program("", hide=True)
    assert said.startswith("refused: TensorRT-RTX's parser opens libtensorrt_rtx.so")
    assert "LD_LIBRARY_PATH before the process starts" in said
    assert "or build without plugins" in said
    folder = library.link_rtx(tmp_path)
    assert run_program(str(folder), hide=True) == "9 9 []"


@pytest.mark.trt
def test_the_link_is_made_again_where_one_stands(tmp_path: Path) -> None:
    """Also over a broken one."""
    link = tmp_path / library.RTX_LIBRARY
    link.symlink_to(tmp_path / "nothing")
    assert library.link_rtx(tmp_path) == tmp_path
    assert link.exists()
    assert link.resolve().name.startswith(library.RTX_LIBRARY + ".")


def test_nothing_to_link_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming the package."""
    monkeypatch.setattr(library, "_rtx_folders", list)
    with pytest.raises(BackendError, match="install the package tensorrt-rtx-cu13-libs"):
        library.link_rtx(tmp_path)
    monkeypatch.setattr(library, "_rtx_folders", lambda: [tmp_path])
    with pytest.raises(BackendError, match="install the package tensorrt-rtx-cu13-libs"):
        library.link_rtx(tmp_path)


@pytest.mark.trt
def test_a_link_beside_the_library_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser looks in its own folder first."""
    monkeypatch.setattr(library, "_rtx_folders", lambda: [tmp_path])
    monkeypatch.setattr(library, "RTX_LIBRARY", "libtensorrt_rtx_of_a_test.so")
    with pytest.raises(BackendError, match="ends the process"):
        library._check_rtx_library()
    (tmp_path / library.RTX_LIBRARY).touch()
    assert library._check_rtx_library() is None


def test_importing_the_door_imports_no_tensorrt() -> None:
    """Nor does the module of the plugins."""
    program = (
        "import sys; from fixedstate.plugins import library, rtx;"
        "print([n for n in sys.modules if n.startswith('tensorrt') or n in ('torch', 'onnx_ir')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
