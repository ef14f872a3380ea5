"""The compiled kernels that ship with the package: PTX texts, found by operator, tile and dtype.

Texts are package data under ``ptx/``, made by ``make ptx`` (:mod:`fixedstate.plugins.compile`) and
never at run time: neither Triton nor a CUDA toolkit is needed to build or to run an engine.
``ptx/index.json`` lists each with its entry name, threads, shared memory and sha256.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fixedstate.errors import BackendError
from fixedstate.plugins.schema import DOMAIN, KERNEL_IO, KernelSpec, Tile

TARGET = "sm_80"
"""The oldest GPU the texts are made for; a driver compiles them for it and everything newer."""

ISA = "8.0"
"""PTX version of the texts: every driver of CUDA 12.0 or newer reads it."""

SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory a thread block gets without asking for more, which a plugin cannot."""


@dataclass(frozen=True, slots=True)
class Ptx:
    """One compiled kernel.

    Attributes:
        entry: Name of its ``.entry``.
        text: The PTX.
        threads: Threads per thread block.
        shared: Bytes of dynamic shared memory.
        sha256: Of the text's UTF-8 bytes.
    """

    entry: str
    text: str
    threads: int
    shared: int
    sha256: str


def file_name(spec: KernelSpec, tile: Tile, io: str) -> str:
    """Name of a text under ``ptx/``, e.g. ``ssd_denoise.float16.n128l32sp16w4.ptx``."""
    return f"{spec.torch_name}.{io}.{tile.label}.ptx"


@functools.cache
def index() -> dict[str, Any]:
    """What ``ptx/index.json`` holds: the compiler's version and one entry per text.

    Raises:
        BackendError: if the package was installed without its texts.
    """
    path = resources.files("fixedstate.plugins") / "ptx" / "index.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise BackendError(
            "the package holds no compiled kernels (plugins/ptx/index.json); install it from a "
            "wheel, or run `make ptx` in a source tree"
        ) from None


@functools.cache
def _load(name: str) -> Ptx:
    entry = index()["texts"].get(name)
    if entry is None:
        raise BackendError(f"no compiled kernel {name!r}; run `make ptx`")
    path = resources.files("fixedstate.plugins") / "ptx" / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BackendError(f"compiled kernel {name!r} is listed but missing") from None
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        raise BackendError(
            f"compiled kernel {name!r} was changed: its sha256 is {found}, the index says "
            f"{entry['sha256']}; install the package again or run `make ptx`"
        )
    text = data.decode("utf-8")
    return Ptx(entry["entry"], text, entry["threads"], entry["shared"], found)


def load(spec: KernelSpec, tile: Tile, io: str) -> Ptx:
    """The compiled kernel of one operator, tile and io dtype.

    Raises:
        BackendError: for a dtype without kernels, or a text that is missing or was changed.
    """
    if io not in KERNEL_IO:
        raise BackendError(
            f"{DOMAIN}::{spec.name} has no {io} kernel (there are {', '.join(KERNEL_IO)}); build "
            "the engine without plugins"
        )
    return _load(file_name(spec, tile, io))
