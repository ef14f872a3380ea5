"""What each TensorRT product and each card takes: capabilities, dtypes, builder flags. Data, pure.

Everything is judged by the card that an engine is built for, never by the machine that builds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

RTX = "tensorrt-rtx"
ENTERPRISE = "tensorrt"
TARGETS = (RTX, ENTERPRISE)
"""Products an engine can be built with."""

CAPABILITIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "7.5": ("Turing", TARGETS),
    "8.0": ("Ampere, data centre", TARGETS),
    "8.6": ("Ampere", TARGETS),
    "8.7": ("Jetson Orin", (ENTERPRISE,)),
    "8.9": ("Ada", TARGETS),
    "9.0": ("Hopper", (ENTERPRISE,)),
    "10.0": ("Blackwell, data centre", (ENTERPRISE,)),
    "10.1": ("Jetson Thor before CUDA 13", (ENTERPRISE,)),
    "10.3": ("Blackwell, data centre", (ENTERPRISE,)),
    "11.0": ("Jetson Thor", (ENTERPRISE,)),
    "12.0": ("Blackwell", TARGETS),
    "12.1": ("GB10", TARGETS),
}
"""Compute capability: its cards, and the products that build for it.

TensorRT-RTX by the enumeration of its version 1.7; a test holds the two together.
"""

KERNEL_CAPABILITY = "8.0"
"""The oldest card the compiled kernels run on: they are PTX for sm_80."""

_LEAST: dict[str, tuple[str, str]] = {
    "bfloat16": ("8.0", "8.0"),
    "int8": ("8.0", "7.5"),
    "int4": ("8.0", "8.0"),
    "uint4": ("8.0", "8.0"),
    "float8e4m3fn": ("8.9", "8.9"),
    "float8e5m2": ("8.9", "8.9"),
    "float4e2m1": ("12.0", "10.0"),
}
"""Dtype: the oldest capability that has it, in TensorRT-RTX and in TensorRT (support matrices)."""

FLAGS: dict[str, str] = {
    "REFIT": "weights can be replaced by TensorRT's own refitter; here plans run as built",
    "STRIP_PLAN": "plans hold no weights, which lie beside them once and are put in at loading",
    "STRICT_NANS": "0 * x is computed even where the builder could leave it out",
    "WEIGHT_STREAMING": "weights that do not fit are read from the host",
}
"""Builder flags that a request may set, by their TensorRT names, and what they do."""

_PRECISION_FLAGS = (
    "FP16",
    "BF16",
    "INT8",
    "FP8",
    "INT4",
    "FP4",
    "OBEY_PRECISION_CONSTRAINTS",
    "PREFER_PRECISION_CONSTRAINTS",
)
_TIMING_FLAGS = ("DISABLE_TIMING_CACHE", "EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")
_FORM = re.compile(r"[1-9][0-9]?\.[0-9]", re.ASCII)


def well_formed(capability: str) -> bool:
    """Whether a text could be a compute capability, such as ``12.0``."""
    return _FORM.fullmatch(capability) is not None


def version_key(capability: str) -> tuple[int, int]:
    """A capability as numbers, for comparing: ``8.9`` is older than ``12.0``."""
    major, minor = capability.split(".")
    return int(major), int(minor)


def capabilities_of(target: str) -> tuple[str, ...]:
    """Compute capabilities that a product builds for, oldest first."""
    return tuple(key for key, (_, products) in CAPABILITIES.items() if target in products)


def capability_refusals(
    target: str,
    capabilities: Sequence[str],
    dtypes: Iterable[str],
    float32_products: bool,
) -> list[str]:
    """Why a product cannot build for these cards; empty where it can.

    Args:
        target: One of :data:`TARGETS`.
        capabilities: What the engine is to run on.
        dtypes: Every dtype that stands in the graphs, by ONNX name in lower case.
        float32_products: Whether a graph multiplies matrices of float32.
    """
    reasons = []
    for given in capabilities:
        products = CAPABILITIES.get(given, ("", ()))[1]
        if target not in products:
            known = ", ".join(capabilities_of(target))
            instead = f"build it with --target {products[0]}, or " if products else ""
            reasons.append(
                f"compute capability {given}: {target} builds for {known}; {instead}choose one of "
                "these"
            )
            continue
        for dtype in sorted(set(dtypes) & set(_LEAST)):
            least = _LEAST[dtype][TARGETS.index(target)]
            if version_key(given) < version_key(least):
                other = "precision" if dtype == "bfloat16" else "format for the weights"
                reasons.append(
                    f"compute capability {given} has no {dtype} in {target} ({least} and newer "
                    f"have): choose another {other} or another card"
                )
        if target == RTX and float32_products and version_key(given) < (8, 0):
            # its support matrix; and such engines, where one comes out, give zeros
            reasons.append(
                f"compute capability {given}: {target} multiplies no matrices of float32 there, "
                f"and the graph does: build for 8.0 or newer, or with --target {ENTERPRISE}"
            )
    if target == ENTERPRISE and len(capabilities) > 1:
        reasons.append(
            f"{len(capabilities)} compute capabilities ({', '.join(capabilities)}): {target} "
            "builds for the one card of the machine it runs on: name one, and build once per kind "
            "of card"
        )
    return reasons


def flag_refusals(target: str, flags: Iterable[str], timing_cache: str | None) -> list[str]:
    """Why builder options do not go together; empty where they do.

    Every network is strongly typed: its precisions are those of the graph, and flags that ask for
    a precision make the builder refuse it.

    Args:
        target: One of :data:`TARGETS`.
        flags: TensorRT names of builder flags.
        timing_cache: File of a timing cache, if one is asked for.
    """
    reasons = []
    for flag in flags:
        if flag in FLAGS:
            continue
        if flag in _PRECISION_FLAGS:
            reason = "the network is strongly typed and takes none; choose --precision"
        elif flag == "TF32":
            reason = (
                "it rounds the scan's prefix sums, which are products of float32 matrices, to 10 "
                "bits; choose --precision fp16 or bf16 for speed"
            )
        elif flag in _TIMING_FLAGS:
            reason = "timing is up to --timing-cache" if target != RTX else f"{_no_cache()}"
        else:
            reason = f"it is not one of {', '.join(FLAGS)}"
        reasons.append(f"builder flag {flag}: {reason}")
    if timing_cache is not None and target == RTX:
        reasons.append(f"timing cache {timing_cache}: {_no_cache()}")
    return reasons


def _no_cache() -> str:
    return (
        f"{RTX} has none: it times nothing when it builds, and keeps what it compiles on a card in "
        "its run-time cache; leave the option out"
    )
