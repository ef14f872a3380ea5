"""The process in which TensorRT parses and builds one graph, since some inputs end the process.

Run by :mod:`fixedstate.export.engineprocess`; not meant to be called by hand:

    python -m fixedstate.export.enginechild REQUEST.json DESCRIPTOR

The request is a JSON file. Answers go to the file descriptor, one JSON object a line: ``share``
(how much of the build is done) any number of times, then ``result`` once. A process that ends
without a result died. When its standard input ends, so does it: then nobody waits for it any more.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fixedstate.bundle import write_atomic
from fixedstate.errors import FixedStateError
from fixedstate.export.builderflags import BuilderFlags
from fixedstate.export.engineprocess import peak_bytes
from fixedstate.export.pluginuse import PluginNeed, Registered, missing_plugins
from fixedstate.export.profiles import RolePlan, set_profiles
from fixedstate.export.targets import RTX
from fixedstate.plugins import library

Send = Callable[[dict[str, Any]], None]

_EXPECTED = re.compile(
    "has Int64 binding"  # ports of tokens and lengths are int64
    "|A node named .* already exists"  # each copy of a function body has the same names
)
"""Warnings that say nothing new."""

_EVERY = 0.1  # seconds between two words on how far it is


def main(arguments: list[str]) -> int:
    """Do what a request asks and send the result."""
    request = json.loads(Path(arguments[0]).read_text())
    channel = os.fdopen(int(arguments[1]), "w")
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with lock:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = probe(request) if request["action"] == "probe" else build(request, send)
    except FixedStateError as err:
        result = _failure("package", [str(err)])
    except MemoryError:
        result = _failure("memory", [])
    send({"result": result})
    return 0


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _failure(stage: str, texts: list[str], **more: Any) -> dict[str, Any]:
    return {"ok": False, "stage": stage, "texts": texts, **more}


def product(target: str) -> Any:
    """The module of a target."""
    return library.tensorrt_rtx() if target == RTX else library.tensorrt()


def probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """The version that is installed."""
    return {"ok": True, "version": str(product(request["target"]).__version__)}


def build(request: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Parse and build one graph.

    Args:
        request: ``target``, ``role``, ``graph`` and ``plan`` (paths), ``names``, ``profiles``,
            ``capabilities``, ``flags``, ``needs`` (plugins to register; none for an empty list),
            ``timing_cache`` (a path, or None).
        send: Told how much is done.

    Returns:
        ``ok``, and where it went well ``layers`` (how many of each type the parsed network has),
        ``plugins`` (names of its plugin layers), ``ports``, ``bytes``, ``steps``, seconds and
        ``warnings``; else ``stage``, ``texts`` and, of the parser, ``node`` and ``op``.
    """
    needs = [PluginNeed(**one) for one in request["needs"]]
    trt = product(request["target"])
    if needs:
        (library.register_rtx if request["target"] == RTX else library.register_quick)()
        if missing := missing_plugins(needs, registered(trt)):
            return _failure("plugins", missing)
    messages: list[str] = []
    log = _logger(trt, messages)
    try:
        flags = BuilderFlags.from_dict(request["flags"])
        builder = trt.Builder(log)
        network = builder.create_network(flags.network(trt))
        parser = trt.OnnxParser(network, log)
    except (TypeError, RuntimeError) as err:  # what its bindings raise for a null pointer
        return _failure("start", messages or [str(err)])
    began = time.perf_counter()
    parsed = parser.parse_from_file(str(request["graph"]))
    result: dict[str, Any] = {"ok": True, "parse_seconds": time.perf_counter() - began}
    if refused := library.refusals():
        return _failure("plugins", refused)
    if not parsed or parser.num_errors:
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        found = [{"node": e.node_name(), "op": e.node_operator(), "text": e.desc()} for e in errors]
        return _failure("parse", messages, errors=found)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    kinds = Counter(layer.type.name for layer in layers)
    result["layers"] = dict(sorted(kinds.items()))
    result["plugins"] = [one.name for one in layers if one.type.name.startswith("PLUGIN")]
    result["ports"] = {"inputs": _ports(network, "input"), "outputs": _ports(network, "output")}
    config = builder.create_builder_config()
    flags.apply(trt, config, request["target"], request["capabilities"])
    cache = _read_cache(config, request["timing_cache"])
    set_profiles(builder, config, _role(request))
    monitor = _monitor(trt, send)
    config.progress_monitor = monitor
    began = time.perf_counter()
    try:
        plan = builder.build_serialized_network(network, config)
    except RuntimeError as err:
        return _failure("build", [str(err), *messages])
    if refused := library.refusals():
        return _failure("plugins", refused)
    if plan is None:
        return _failure("build", messages)
    result["build_seconds"] = time.perf_counter() - began
    target = Path(request["plan"])
    target.write_bytes(memoryview(plan))
    result["bytes"] = target.stat().st_size
    if cache is not None:
        cache = config.get_timing_cache()
        # several builds may use one file: the last one whole is what stays
        write_atomic(Path(request["timing_cache"]), memoryview(cache.serialize()))
    peak = peak_bytes()
    return result | {"steps": steps(target), "warnings": messages, "peak_bytes": peak}


def registered(trt: Any) -> list[Registered]:
    """Every plugin creator that the product has."""
    return [
        Registered(
            str(one.name),
            str(one.plugin_version),
            str(one.plugin_namespace),
            tuple(field.name for field in one.field_names),
        )
        for one in trt.get_plugin_registry().all_creators
    ]


def steps(plan: Path) -> dict[str, int]:
    """How many steps of each kind TensorRT-RTX's engine has, by the text that it holds.

    Empty where there is no such text: an engine of another product, or laid out otherwise than
    version 1.7 does.
    """
    with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = data.find(b"main {\n")
        end = data.find(b"\nshape_main {", max(begin, 0))
        text = data[begin:end] if 0 <= begin < end else b""
    found = Counter(re.findall(rb"^  ([a-z_]+)=\{", text, re.MULTILINE))
    return {kind.decode(): count for kind, count in sorted(found.items())}


def _role(request: Mapping[str, Any]) -> RolePlan:
    """As much of the plan of a role as profiles need."""
    profiles = tuple(
        {port: tuple(map(tuple, shapes)) for port, shapes in one.items()}
        for one in request["profiles"]
    )
    return RolePlan(
        role=request["role"],
        file="",
        inputs=(),
        outputs=(),
        names=tuple(request["names"]),
        profiles=profiles,  # type: ignore[arg-type]
        kernels=(),
        needs=(),
        weights=0,
        io=0,
        activations=0,
    )


def _ports(network: Any, kind: str) -> list[dict[str, Any]]:
    count = getattr(network, f"num_{kind}s")
    tensors = [getattr(network, f"get_{kind}")(index) for index in range(count)]
    return [{"name": one.name, "dtype": one.dtype.name, "shape": [*one.shape]} for one in tensors]


def _read_cache(config: Any, path: str | None) -> Any:
    """A timing cache, filled from its file if there is one."""
    if path is None:
        return None
    file = Path(path)
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    config.set_timing_cache(cache, False)
    return cache


def _logger(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps warnings and errors."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING and not _EXPECTED.search(text):
                messages.append(text.strip())

    return Log()


class Progress:
    """How much of a build is done, from phases that contain phases.

    A phase is as large as one step of the phase around it, which is all that TensorRT tells.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # parent, steps done, steps
        self._lock = threading.Lock()
        self._best, self._told = 0.0, 0.0

    def start(self, name: str, parent: str | None, count: int) -> None:
        """A phase begins."""
        with self._lock:
            self._phases[name] = (parent, 0, max(count, 1))

    def step(self, name: str, step: int) -> None:
        """A phase has done one more step."""
        with self._lock:
            if name in self._phases:
                parent, _, count = self._phases[name]
                self._phases[name] = (parent, min(step + 1, count), count)
            now = time.monotonic()
            self._best = max(self._best, self._share(name))
            if now - self._told < _EVERY:
                return
            self._told = now
        self._send({"share": round(self._best, 4)})

    def finish(self, name: str) -> None:
        """A phase ends."""
        with self._lock:
            self._phases.pop(name, None)

    def _share(self, name: str) -> float:
        share, seen = 0.0, set()
        inner: str | None = name
        while inner in self._phases and inner not in seen:
            seen.add(inner)
            inner, done, count = self._phases[inner]
            share = min((done + share) / count, 1.0)
        return share


def _monitor(trt: Any, send: Send) -> Any:
    """TensorRT's interface to :class:`Progress`."""
    progress = Progress(send)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
