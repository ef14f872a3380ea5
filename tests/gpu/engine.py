"""What only TensorRT can tell about the plugins, on a machine that has it and a card.

    fixedstate export export/models/tiny-hybrid --precision fp16 -o tiny.bundle
    python tests/gpu/engine.py tiny.bundle --out engine.json

Builds the denoise and the commit graph twice, with the plugins and without (the function bodies are
inlined then), runs both on the same inputs, and compares: that an engine with plugins builds at
all, that its kernels get the right arguments, that it can be captured into a CUDA graph, and how
long it takes. ``--product rtx`` is TensorRT-RTX, whose plugins run in this Python process;
``--lean`` builds version-compatible engines and opens them with the lean runtime;
``--build-only`` stops before anything needs a card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]

CLOSE = 2e-2
"""Largest difference of a float16 engine from another, relative to the output's largest element."""

ROLES = ("denoise", "commit")
COLUMNS = 64
RANGES = {"B": (1, 1, 8), "n": (1, 1, 4), "C": (1, COLUMNS, 4 * COLUMNS)}
"""Least, usual and most of every symbol."""


def product(name: str, plugins: bool) -> Any:
    """The module of TensorRT or TensorRT-RTX, in which the plugins are registered or not yet."""
    from fixedstate.plugins import library

    if name == "rtx":
        if plugins:
            library.register_rtx()
        return library.tensorrt_rtx()
    if plugins:
        library.register_quick()
    return library.tensorrt()


def logger(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps warnings and errors."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                messages.append(f"{severity.name}: {text}")

    return Log()


def build(
    trt: Any, log: Any, graph: Any, folder: Path, lean: bool, cardless: bool
) -> tuple[bytes, dict[str, Any]]:
    """One engine, strongly typed, with one profile.

    Args:
        trt: The module.
        log: A logger.
        graph: The bundle's description of the graph.
        folder: Of the bundle.
        lean: Make it version-compatible.
        cardless: For SM 12.0, since there is no card to ask (TensorRT-RTX only).
    """
    began = time.perf_counter()
    builder = trt.Builder(log)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(folder / graph.file)):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise RuntimeError(f"the parser refused {graph.file}: {errors}")
    kinds = [network.get_layer(index).type.name for index in range(network.num_layers)]
    profile = builder.create_optimization_profile()
    for port in graph.inputs:
        bounds = [
            port.resolve(**{symbol: sizes[bound] for symbol, sizes in RANGES.items()})
            for bound in range(3)
        ]
        profile.set_shape(port.name, *bounds)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if lean:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    if cardless:
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError(f"the builder made no engine of {graph.file}")
    return bytes(plan), {
        "plugin_layers": kinds.count("PLUGIN_V3"),
        "layers": len(kinds),
        "engine_bytes": plan.nbytes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def inputs_of(graph: Any, vocabulary: int, rows: int) -> dict[str, np.ndarray]:
    """Random inputs of one block: a committed past of half the columns, everything committed."""
    rng = np.random.default_rng(5)
    made: dict[str, np.ndarray] = {}
    for port in graph.inputs:
        shape = port.resolve(B=rows, n=1, C=COLUMNS)
        if port.name == "past_length":
            made[port.name] = np.full(shape, COLUMNS // 2, np.int64)
        elif port.name == "commit_length":
            made[port.name] = np.full(shape, made["input_ids"].shape[1], np.int64)
        elif port.dtype == "int64":
            made[port.name] = rng.integers(0, vocabulary, shape)
        else:
            made[port.name] = (0.5 * rng.standard_normal(shape)).astype(port.dtype)
    return made


def run(
    trt: Any, log: Any, driver: Any, plan: bytes, graph: Any, inputs: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Outputs of an engine for some inputs, and its times in microseconds."""
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        raise RuntimeError("the runtime did not open the engine")
    context = engine.create_execution_context()
    rows = inputs["input_ids"].shape[0]
    with ExitStack() as stack:
        stream = stack.enter_context(driver.stream())
        for name, array in inputs.items():
            if not context.set_input_shape(name, array.shape):
                raise RuntimeError(f"the engine refused {name} of shape {array.shape}")
            context.set_tensor_address(name, stack.enter_context(driver.upload(array)).address)
        results = {}
        for port in graph.outputs:
            array = np.zeros(port.resolve(B=rows, n=1, C=COLUMNS), port.dtype)
            memory = stack.enter_context(driver.upload(array))
            context.set_tensor_address(port.name, memory.address)
            results[port.name] = memory, array
        driver.synchronize()

        def once() -> None:
            if not context.execute_async_v3(stream.handle):
                raise RuntimeError("the engine refused to run")

        once()
        stream.synchronize()
        outputs = {
            name: memory.read(array.dtype, array.shape) for name, (memory, array) in results.items()
        }
        times: dict[str, Any] = {"stream_us": _median(driver, stream, once)}
        try:
            with stream.capture() as captured:
                once()
            stack.enter_context(captured)
            times["graph_nodes"] = captured.nodes
            times["graph_us"] = _median(driver, stream, lambda: captured.launch(stream))
            for memory, _ in results.values():
                memory.fill(0xFF)  # or a graph that does nothing would leave the right outputs
            captured.launch(stream)
            stream.synchronize()
            for name, (memory, array) in results.items():
                again = memory.read(array.dtype, array.shape)
                if again.tobytes() != outputs[name].tobytes():
                    raise RuntimeError(f"as a CUDA graph, {name} is another")
        except Exception as error:
            times["graph_error"] = str(error)
    return outputs, times


def _median(driver: Any, stream: Any, action: Callable[[], None]) -> float:
    found = []
    with driver.event() as first, driver.event() as last:
        for number in range(33):
            first.record(stream)
            action()
            last.record(stream)
            last.synchronize()
            if number >= 3:
                found.append(1e3 * last.milliseconds_since(first))
    return round(float(np.median(found)), 2)


def difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference relative to the largest element of its output, and that output."""
    worst = (0.0, "")
    for name, one in a.items():
        left, right = one.astype(np.float64), b[name].astype(np.float64)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            return float("inf"), name
        scale = max(float(np.abs(right).max()), 1e-30)
        worst = max(worst, (float(np.abs(left - right).max()) / scale, name))
    return worst


def measure(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Fill results: one entry for each role and way."""
    from fixedstate.bundle import Bundle
    from fixedstate.plugins.driver import Driver
    from fixedstate.plugins.library import refusals
    from fixedstate.plugins.schema import KERNEL_IO

    bundle = Bundle.open(options.bundle)
    if bundle.precision.io not in KERNEL_IO:
        raise RuntimeError(
            f"{options.bundle} is {bundle.precision.io}; the kernels take "
            f"{' and '.join(KERNEL_IO)}: export it with --precision fp16"
        )
    problems, messages = results["problems"], results["messages"]
    trt = product(options.product, plugins=False)
    results["version"] = str(trt.__version__)
    opener = trt
    if options.lean:
        import tensorrt_lean

        opener = tensorrt_lean
    plans: dict[tuple[str, bool], bytes] = {}
    for plugins in (False, True):  # once registered, plugins stay
        trt = product(options.product, plugins)
        log = logger(trt, messages)
        for role in ROLES:
            way = f"{role}, {'plugins' if plugins else 'function bodies'}"
            try:
                cardless = options.build_only and options.product == "rtx"
                graph = bundle.graph(role)
                plan, entry = build(trt, log, graph, bundle.path, options.lean, cardless)
            except RuntimeError as error:
                problems.append(f"{way}: {error}; refused: {refusals()}")
                continue
            plans[role, plugins] = plan
            if options.save:
                options.save.mkdir(parents=True, exist_ok=True)
                kind = "plugins" if plugins else "bodies"
                (options.save / f"{role}-{kind}.plan").write_bytes(plan)
            results["engines"].append({"role": role, "plugins": plugins, **entry})
            if refused := refusals():
                problems.append(f"{way}: plugins refused: {refused}")
            if bool(entry["plugin_layers"]) != plugins:
                problems.append(f"{way}: {entry['plugin_layers']} plugin layers")
    if options.build_only:
        return
    with Driver() as driver:
        results["card"] = driver.name
        log = logger(opener, messages)
        for rows in (1, 8):
            for role in ROLES:
                inputs = inputs_of(bundle.graph(role), bundle.spec.vocab_rows, rows)
                outputs = {}
                for plugins in (False, True):
                    if (role, plugins) not in plans:
                        continue
                    outputs[plugins], times = run(
                        opener, log, driver, plans[role, plugins], bundle.graph(role), inputs
                    )
                    entry = {"role": role, "plugins": plugins, "rows": rows, **times}
                    results["runs"].append(entry)
                    if "graph_error" in times:
                        problems.append(f"{role}, plugins {plugins}: {times['graph_error']}")
                if len(outputs) == 2:
                    far, name = difference(outputs[True], outputs[False])
                    results["differences"].append(
                        {"role": role, "rows": rows, "difference": far, "output": name}
                    )
                    if not far <= CLOSE:
                        problems.append(f"{role}, {rows} rows: {name} differs by {far:.2g}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--product", choices=("tensorrt", "rtx"), default="tensorrt")
    parser.add_argument("--lean", action="store_true", help="open with the lean runtime")
    parser.add_argument("--build-only", action="store_true", help="stop before a card is needed")
    parser.add_argument("--save", type=Path, help="folder to write the engines to")
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "product": options.product,
        "lean": options.lean,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "problems": [],
        "engines": [],
        "runs": [],
        "differences": [],
        "messages": [],
    }
    try:
        measure(options, results)
    except Exception as error:
        results["problems"].append(f"{type(error).__name__}: {error}")
    options.out.write_text(json.dumps(results, indent=1))
    print(json.dumps({key: results[key] for key in results if key != "messages"}, indent=1))
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
