"""``fixedstate inspect``: what a bundle holds, what it carries and what it needs of memory.

Engines are shown by :mod:`fixedstate.cli.inspect_engine`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.options import bundle_argument, debug_option, json_option
from fixedstate.cli.output import byte_text, echo_fields, echo_json, echo_table

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle, Graph
    from fixedstate.ports import Port

_KV_TOKENS = (1024, 8192)


@click.command("inspect", short_help="Show what is in a bundle or an engine.")
@bundle_argument
@json_option
@debug_option
def command(bundle: Path, as_json: bool) -> None:
    """Show the graphs, ports, state and memory of BUNDLE, or the plans and layers of an engine.

    Bytes of a port are those of one row; none where the size depends on more than the rows. An
    engine is shown without TensorRT: who built it for what, and what it consists of.
    """
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.enginefile import MANIFEST, EngineFolder

    if (bundle / MANIFEST).is_file():
        from fixedstate.cli import inspect_engine

        engine = inspect_engine.describe(EngineFolder.open(bundle))
        if as_json:
            echo_json(engine)
        else:
            inspect_engine.show(engine)
        return
    data = describe(Bundle.open(bundle))
    if as_json:
        echo_json(data)
    else:
        _print(data)


def describe(bundle: Bundle) -> dict[str, Any]:
    """Everything ``inspect`` says about a bundle, ready for JSON.

    Args:
        bundle: An opened bundle.

    Returns:
        Identity, model, what was quantised and how far that took it (None where nothing was),
        graphs, ports (``bytes`` for one row, None where the shape holds another
        symbol than B), state bytes of one row, KV bytes of one token, and the memory plan.
    """
    from fixedstate.bundle import MANIFEST

    state = bundle.state
    manifest = json.loads((bundle.path / MANIFEST).read_bytes())
    return {
        "path": str(bundle.path),
        "digest": bundle.digest,
        "schema": manifest["schema"],
        "source": bundle.source.to_dict(),
        "precision": bundle.precision.to_dict(),
        "model": _model(bundle),
        "decode": bundle.decode.to_dict(),
        "quantization": _quantization(bundle),
        "graphs": [_graph(graph) for graph in bundle.graphs.values()],
        "ports": list(_ports(bundle)),
        "state_bytes": state.state_bytes(),
        "kv_bytes_per_token": state.kv_bytes_per_token(),
        "memory": _memory(bundle),
    }


def _model(bundle: Bundle) -> dict[str, Any]:
    spec = bundle.spec
    return {
        "objective": spec.objective,
        "layers": len(spec.layers),
        "mixers": [layer.mixer for layer in spec.layers],
        "directions": sorted({layer.direction for layer in spec.layers}),
        "width": spec.width,
        "vocab_size": spec.vocab_size,
        "vocab_rows": spec.vocab_rows,
        "block_len": spec.block_len,
        "mask_id": spec.mask_id,
        "stop_ids": list(spec.stop_ids),
        "bos_id": spec.bos_id,
        "logit_shift": spec.logit_shift,
    }


def _quantization(bundle: Bundle) -> dict[str, Any] | None:
    """What ``quantization.json`` says in short."""
    from fixedstate.bundle import QUANTIZATION

    if not bundle.is_quantized:
        return None
    record = json.loads((bundle.path / QUANTIZATION).read_bytes())
    report = record["report"]
    return {
        "from_weights": record["plan"]["weights"],
        "targets": record["plan"]["targets"],
        "bytes": report["bytes"]["by_format"],
        "float32_bytes": report["bytes"]["float32"],
        "simulated": report["simulated"],
        **{key: report["comparison"]["all"][key] for key in ("kl_mean", "kl_p99", "agree")},
        "breaches": record["breaches"],
    }


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "role": graph.role,
        "file": graph.file,
        "sha256": graph.sha256,
        "min_onnxruntime": graph.min_onnxruntime,
        "inputs": [port.name for port in graph.inputs],
        "outputs": [port.name for port in graph.outputs],
    }


def _ports(bundle: Bundle) -> Iterator[dict[str, Any]]:
    carried = {
        name: port for port in bundle.state.ports for name in (port.past.name, port.present.name)
    }
    for graph in bundle.graphs.values():
        for direction, ports in (("input", graph.inputs), ("output", graph.outputs)):
            for port in ports:
                state = carried.get(port.name)
                yield {
                    "name": port.name,
                    "graph": graph.role,
                    "direction": direction,
                    "shape": list(port.shape),
                    "dtype": port.dtype,
                    "update": None if state is None else state.update,
                    "scope": None if state is None else state.scope,
                    "bytes": _row_bytes(port),
                }


def _row_bytes(port: Port) -> int | None:
    """Bytes for one row; None where the shape holds a symbol other than B."""
    if any(isinstance(dim, str) and dim != "B" for dim in port.shape):
        return None
    return port.nbytes(B=1)


def _memory(bundle: Bundle) -> dict[str, Any]:
    """Bytes of one row, and the plan of every memory mode that the bundle has graphs for."""
    from fixedstate.bundle import WEIGHTS
    from fixedstate.errors import UsageError
    from fixedstate.runtime import memory

    per_token = bundle.state.kv_bytes_per_token()
    steps = sum(port.nbytes(1) for port in bundle.state.stepped)
    plans = {}
    for mode in (None,) if bundle.spec.objective == "full" else memory.MODES:
        with contextlib.suppress(UsageError):
            plan = memory.plan(bundle, mode)
            plans[plan.memory] = plan.to_dict()
    return {
        "weights": (bundle.path / WEIGHTS).stat().st_size,
        "state_two_buffers": 2 * (bundle.state.state_bytes() + steps),
        **{f"kv_{tokens}_tokens": tokens * per_token for tokens in _KV_TOKENS},
        "default": memory.choose(bundle),
        "plans": plans,
    }


def _quantized(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    sizes = ", ".join(f"{name} {size:,}" for name, size in found["bytes"].items())
    return [
        ("products", f"{sizes} bytes (float32 {found['float32_bytes']:,})"),
        (
            "divergence",
            (
                f"{found['kl_mean']:.2e} nats, p99 {found['kl_p99']:.2e}, the same best token for "
                f"{found['agree']:.2%}"
            ),
        ),
        ("gates broken", "; ".join(found["breaches"])),
    ]


def _print(data: dict[str, Any]) -> None:
    model, memory, source = data["model"], data["memory"], data["source"]
    mixers = {name: model["mixers"].count(name) for name in dict.fromkeys(model["mixers"])}
    echo_fields(
        (
            ("bundle", data["path"]),
            ("digest", data["digest"]),
            ("schema", data["schema"]),
            ("source", " ".join(filter(None, (source["name"], source["revision"])))),
            ("licence", source["licence"]),
            ("objective", model["objective"]),
            ("layers", ", ".join(f"{count} {name}" for name, count in mixers.items())),
            ("width", model["width"]),
            ("vocabulary", f"{model['vocab_size']:,} ids in {model['vocab_rows']:,} rows"),
            ("block length", model["block_len"]),
            ("mask id", model["mask_id"]),
            ("stop ids", ", ".join(map(str, model["stop_ids"]))),
            ("precision", ", ".join(f"{k} {v}" for k, v in data["precision"].items())),
            *_quantized(data["quantization"]),
            ("state per row", byte_text(data["state_bytes"])),
            ("KV per token", byte_text(data["kv_bytes_per_token"])),
        )
    )
    echo_table(
        "Graphs",
        ("role", "file", "inputs>", "outputs>", "ONNX Runtime from"),
        [
            (g["role"], g["file"], len(g["inputs"]), len(g["outputs"]), g["min_onnxruntime"])
            for g in data["graphs"]
        ],
    )
    echo_table(
        "Ports",
        ("graph", "direction", "name", "shape", "dtype", "update", "bytes>"),
        [
            (
                p["graph"],
                p["direction"],
                p["name"],
                "[" + ", ".join(map(str, p["shape"])) + "]",
                p["dtype"],
                p["update"],
                None if p["bytes"] is None else f"{p['bytes']:,}",
            )
            for p in data["ports"]
        ],
    )
    names = {
        "weights": "weights",
        "state_two_buffers": "state, both buffers",
        **{f"kv_{tokens}_tokens": f"KV at {tokens:,} tokens" for tokens in _KV_TOKENS},
    }
    echo_table(
        "Memory of one row",
        ("what", "bytes>"),
        [(text, byte_text(memory[key])) for key, text in names.items()],
    )
    parts = ("weights", "state", "kv", "scratch", "process", "total")
    echo_table(
        "Memory plans (1 slot)",
        ("memory", "sessions", *(f"{part}>" for part in parts)),
        [
            (
                f"{mode} (default)" if mode == memory["default"] else mode,
                ", ".join(plan["sessions"]),
                *(f"{plan[part]:,}" for part in parts),
            )
            for mode, plan in memory["plans"].items()
        ],
    )
