"""One graph through TensorRT-RTX's parser and builder, in a process of its own; needs no card.

Some graphs end the process that parses them, and the parser finds its library only where a folder
with its unversioned name was on the search path before that process began: hence a child process.
An engine cannot be opened without a card, but the text inside it tells what the builder made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fixedstate.plugins.library import link_rtx

Range = tuple[int, int, int]
"""Least, usual and most of one dimension."""

_EXPECTED = re.compile(
    "has Int64 binding"  # ports of tokens and lengths are int64
    "|A node named .* already exists"  # each copy of a function body has the same names
)
"""Warnings that say nothing new."""


def build(
    graph: Path,
    sizes: Mapping[str, Range],
    *,
    plugins: bool = False,
    parse_only: bool = False,
    timeout: float = 300,
) -> dict[str, Any]:
    """Parse and build one ONNX file for SM 12.0, strongly typed.

    Args:
        graph: The file; external data is found beside it.
        sizes: Range of every symbol in the shapes of its inputs: ``B``, ``C``, ``n``, where a
            dimension ``16n`` is 16 times that of ``n``.
        plugins: Register the plugins of domain ``fixedstate`` first.
        parse_only: Stop behind the parser.
        timeout: Seconds.

    Returns:
        ``ok``; ``error``, a text; ``warnings``; ``refused``, what plugins refused; ``died``, where
        the process did; ``parse_seconds`` and ``build_seconds``; ``layers``, the number of each
        layer type of the parsed network; ``plugins``, the names of its plugin layers; ``names``,
        those of all layers; ``bytes`` of the engine; ``steps``, the number of each kind of step in
        it, and ``custom``, the plugins that it calls and with how many inputs.
    """
    request = {"sizes": dict(sizes), "plugins": plugins, "parse_only": parse_only}
    with tempfile.TemporaryDirectory() as folder:
        search = [str(link_rtx(Path(folder))), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, search))}
        done = subprocess.run(
            [sys.executable, __file__, str(graph), json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            check=False,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        text = f"exit status {done.returncode}: {done.stderr[-2000:]}"
        return {"ok": False, "error": text, "died": True}
    return json.loads(lines[-1])


def _ranges(name: str, sizes: Mapping[str, Sequence[int]]) -> Sequence[int]:
    match = re.fullmatch(r"(\d*)(\w+)", name)
    assert match, name
    return [int(match[1] or 1) * size for size in sizes[match[2]]]


def _profile(trt: Any, builder: Any, network: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """One profile with the ranges of every dynamic input."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        port = network.get_input(index)
        if -1 not in tuple(port.shape):
            continue
        ranges = [
            _ranges(port.get_dimension_name(axis), sizes) if size == -1 else (size,) * 3
            for axis, size in enumerate(port.shape)
        ]
        profile.set_shape(port.name, *zip(*ranges, strict=True))
    return profile


def _inside(plan: bytes) -> dict[str, Any]:
    """Steps and plugin calls in the text that an engine holds.

    Raises:
        AssertionError: where the text is not laid out as TensorRT-RTX 1.7 does.
    """
    text = b"\n".join(re.findall(rb"[\x20-\x7e]+", plan)).decode()
    main = re.search(r"^main \{$(.*?)^shape_main \{", text, re.MULTILINE | re.DOTALL)
    assert main, "the engine's text has no main part"
    steps = Counter(re.findall(r"^  ([a-z_]+)=\{", main[1], re.MULTILINE))
    calls = re.findall(r'^  custom_layer=\{ name="(\w+)".*?input=\{(.*?)\}', main[1], re.MULTILINE)
    return {
        "steps": dict(steps),
        "custom": {name: len(re.findall('"[^"]+"', inputs)) for name, inputs in calls},
    }


def _run(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    from fixedstate.plugins import library

    trt = library.tensorrt_rtx()
    if request["plugins"]:
        library.register_rtx()
    messages: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING and not _EXPECTED.search(text):
                messages.append(text)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    began = time.perf_counter()
    parsed = parser.parse_from_file(path)
    result: dict[str, Any] = {"ok": False, "parse_seconds": time.perf_counter() - began}
    result["warnings"] = messages
    result["refused"] = library.refusals()
    if not parsed:
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        return result | {"error": "; ".join(f"{e.node_operator()}: {e}" for e in errors)}
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    result |= {
        "layers": dict(Counter(layer.type.name for layer in layers)),
        "plugins": [layer.name for layer in layers if layer.type.name == "PLUGIN_V3"],
        "names": [layer.name for layer in layers],
    }
    if request["parse_only"]:
        return result | {"ok": True}
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.add_optimization_profile(_profile(trt, builder, network, request["sizes"]))
    began = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    result["build_seconds"] = time.perf_counter() - began
    result["refused"] += library.refusals()
    if plan is None:
        return result | {"error": "; ".join(messages)}
    data = bytes(plan)
    return result | {"ok": True, "bytes": len(data)} | _inside(data)


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1], json.loads(sys.argv[2]))))
