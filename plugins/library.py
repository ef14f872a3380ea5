"""The only door to TensorRT for plugins: finds a package and registers the operators in it.

Two products, two ways. TensorRT (data-centre cards and Jetson) takes ahead-of-time plugins, whose
kernels stand in the engine (:mod:`fixedstate.plugins.quick`). TensorRT-RTX takes only plugins that
run in the Python process (:mod:`fixedstate.plugins.rtx`). Neither is needed to run a model: without
plugins a parser inlines the function bodies.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from fixedstate.errors import BackendError
from fixedstate.plugins.schema import DOMAIN

OLDEST = (10, 9)
"""The first TensorRT with ahead-of-time plugins."""

BROKEN = (10, 14)
"""TensorRT whose quick-deployable plugins do not work."""

RTX_LIBRARY = "libtensorrt_rtx.so"
"""Name by which TensorRT-RTX's parser opens the library as soon as a graph has a plugin node."""

_RTX_LIBRARIES = "tensorrt_rtx_libs"
_creators: list[Any] = []  # a registry keeps no Python reference to what is registered
_refused: list[str] = []


def tensorrt_rtx() -> Any:
    """The Python module of TensorRT-RTX.

    Raises:
        BackendError: if none is installed, or one is that cannot be loaded.
    """
    try:
        try:
            import tensorrt_rtx as module
        except ModuleNotFoundError as err:
            if err.name != "tensorrt_rtx":
                raise
            import tensorrt_rtx_bindings as module
    except ModuleNotFoundError as err:
        raise BackendError(
            f"TensorRT-RTX is not installed (no module {err.name!r}); install "
            "fixedstate[rtx] on x86-64 Linux"
        ) from None
    except (ImportError, OSError) as err:
        raise BackendError(
            f"TensorRT-RTX is installed and cannot be loaded: {err}; install its -libs and "
            "-bindings packages in one version"
        ) from err
    return module


def tensorrt() -> Any:
    """The Python module of TensorRT, of whatever version; :func:`check_version` is for plugins.

    Raises:
        BackendError: if none is installed, or it cannot be loaded.
    """
    try:
        import tensorrt as module
    except ModuleNotFoundError as err:
        raise BackendError(
            f"TensorRT is not installed (no module {err.name!r}); install fixedstate[trt], "
            "TensorRT 10.9 or newer except 10.14"
        ) from None
    except (ImportError, OSError) as err:
        raise BackendError(
            f"TensorRT is installed and cannot be loaded: {err}; its libraries and its Python "
            "package must be of one version"
        ) from err
    return module


def check_version(version: str) -> None:
    """Refuse a TensorRT whose ahead-of-time plugins do not work.

    Args:
        version: As in ``tensorrt.__version__``.

    Raises:
        BackendError: with the reason and the versions that work.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if found < OLDEST:
        reason = "ahead-of-time plugins came with 10.9"
    elif found == BROKEN:
        reason = "quick-deployable plugins do not work in 10.14"
    else:
        return
    raise BackendError(
        f"TensorRT {version} cannot take the plugins: {reason}; expected 10.9 or newer except "
        "10.14: install another version, or build without plugins, which needs none"
    )


def register_quick() -> list[str]:
    """Register every operator as an ahead-of-time plugin of TensorRT.

    Ask :func:`refusals` after every build.

    Returns:
        Names of the operators.

    Raises:
        BackendError: see :func:`tensorrt` and :func:`check_version`.
    """
    module = tensorrt()
    check_version(str(module.__version__))
    import tensorrt.plugin as plugin

    from fixedstate.plugins import quick

    return list(quick.register(module, plugin, _refused))


def register_rtx(device: int = 0) -> list[str]:
    """Register every operator as a plugin of TensorRT-RTX in this process; once is enough.

    An engine built with them needs a process that called this to run. Ask :func:`refusals`
    after every build.

    Args:
        device: The card that engines run on; no card is needed to build.

    Returns:
        Names of the operators.

    Raises:
        BackendError: see :func:`tensorrt_rtx`; and where the parser would not find its library,
            which ends the process at the first plugin node.
    """
    module = tensorrt_rtx()
    if not _creators:
        _check_rtx_library()
        from fixedstate.plugins import rtx

        registry = module.get_plugin_registry()
        for creator in rtx.creators(module, rtx.driver_load(device), _refused):
            if not registry.register_creator(creator, DOMAIN):
                raise BackendError(
                    f"TensorRT-RTX took no plugin {DOMAIN}::{creator.name}; is another one "
                    "registered under that name? Register once, from one copy of this package"
                )
            _creators.append(creator)
    return [str(creator.name) for creator in _creators]


def refusals() -> list[str]:
    """What registered plugins refused since the last call, each with what to do.

    TensorRT does not pass on why a plugin refused. Where this gives something, the graph has to be
    built without plugins, even if an engine came out.
    """
    found = list(dict.fromkeys(_refused))
    _refused.clear()
    return found


def link_rtx(folder: Path) -> Path:
    """Give TensorRT-RTX's library the name by which its parser opens it.

    The folder has to be on ``LD_LIBRARY_PATH`` before the process starts that registers plugins:
    the search path is read once.

    Args:
        folder: Where to make the link; one that stands there is replaced.

    Returns:
        The folder.

    Raises:
        BackendError: where the library is not found.
    """
    places = _rtx_folders()
    found = [file for place in places for file in sorted(place.glob(RTX_LIBRARY + ".*"))]
    if not found:
        where = ", ".join(map(str, places)) or f"no package {_RTX_LIBRARIES}"
        raise BackendError(
            f"no {RTX_LIBRARY}.* to link ({where}); install the package tensorrt-rtx-cu13-libs"
        )
    link = folder / RTX_LIBRARY
    link.unlink(missing_ok=True)
    link.symlink_to(found[0])
    return folder


def _rtx_folders() -> list[Path]:
    """Where the package of TensorRT-RTX's libraries stands."""
    found = importlib.util.find_spec(_RTX_LIBRARIES)
    return [Path(place) for place in (found.submodule_search_locations or ())] if found else []


def _check_rtx_library() -> None:
    """Refuse to go on where the first plugin node would end the process.

    Raises:
        BackendError: with what to do.
    """
    if sys.platform != "linux":
        return
    folders = _rtx_folders()
    if any((folder / RTX_LIBRARY).exists() for folder in folders):
        return  # the parser looks beside itself first
    try:
        ctypes.CDLL(RTX_LIBRARY)
    except OSError:
        where = str(folders[0]) if folders else f"the folder of {RTX_LIBRARY}.1"
        raise BackendError(
            f"TensorRT-RTX's parser opens {RTX_LIBRARY} at the first plugin node and ends the "
            "process where there is none; the package holds it under a versioned name only. Make a "
            f"link of that name to {RTX_LIBRARY}.1 in {where}, or in a folder that is on "
            "LD_LIBRARY_PATH before the process starts (fixedstate.plugins.library.link_rtx makes "
            "it), or build without plugins"
        ) from None
