"""What can be said of an engine beside its bundle where the engine cannot run.

A build leaves a record of the network that TensorRT parsed and of the plan that it made
(``layers.json``). It is held against the graphs of the bundle: ports, layers of the kinds that
parsers take over one to one, plugins, and bytes per weight. None of it shows that the numbers are
right; only a run does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.bundle import Bundle
from fixedstate.errors import BundleError
from fixedstate.export import graphfacts
from fixedstate.export.engine import LAYERS
from fixedstate.export.profiles import stored_bytes
from fixedstate.plugins.schema import DOMAIN
from fixedstate.ports import DTYPES, Port
from fixedstate.runtime.enginefile import EngineFolder, Plan
from fixedstate.state import PRECISIONS

ONE_TO_ONE = {
    "MATRIX_MULTIPLY": ("MatMul", "Gemm"),
    "CONVOLUTION": ("Conv",),
    "SOFTMAX": ("Softmax",),
    "REDUCE": ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd"),
    "QUANTIZE": ("QuantizeLinear",),
    "DEQUANTIZE": ("DequantizeLinear",),
}
"""Layers of a parsed network, and the operators of which each becomes one such layer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was compared.

    Attributes:
        role: Of the plan.
        what: What was compared.
        bundle: What the bundle says.
        engine: What the engine says.
        passed: Whether they agree; None where it is only told.
    """

    role: str
    what: str
    bundle: str
    engine: str
    passed: bool | None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {name: getattr(self, name) for name in self.__slots__}


def compare_unrun(bundle: Bundle, engine: EngineFolder) -> list[Finding]:
    """Hold an engine against the bundle it was built from, without running it.

    Args:
        bundle: The opened bundle.
        engine: The opened engine; whether it is of this bundle was looked at before.

    Returns:
        What was compared, by role; an engine that no build has written has no record of its layers
        and says so.

    Raises:
        BundleError: for a graph or a record that cannot be read.
    """
    record = layer_record(engine)
    findings: list[Finding] = []
    for role, plan in engine.plans.items():
        findings += _ports(bundle, engine, plan)
        if role not in record:
            findings.append(Finding(role, "layers", "-", f"no {LAYERS}: not compared", None))
            continue
        try:
            findings += _layers(bundle, engine, role, record[role])
            findings += _weights(bundle, engine, role, record[role])
        except (KeyError, TypeError, ValueError) as err:
            raise BundleError(
                f"{engine.path / LAYERS} does not say what it should of {role} ({err!r}): build "
                "the engine again"
            ) from err
    findings.append(_checked(engine))
    return findings


def layer_record(engine: EngineFolder) -> dict[str, Any]:
    """What the build recorded, by role; its hash was checked when the engine was opened."""
    if LAYERS not in engine.files:
        return {}
    found: dict[str, Any] = json.loads((engine.path / LAYERS).read_bytes())
    return found


def _ports(bundle: Bundle, engine: EngineFolder, plan: Plan) -> Iterator[Finding]:
    graph = bundle.graph(plan.role, engine.identity.product)
    for what, ours, theirs in (
        ("inputs", graph.inputs, plan.inputs),
        ("outputs", graph.outputs, plan.outputs),
    ):
        same = _shapes(ours, {}) == _shapes(theirs, {})
        if what == "outputs":  # one that updates an input in place is as large as that
            inputs = {port.name: port for port in graph.inputs}
            same = _shapes(ours, {k: inputs[v] for k, v in plan.aliases.items()}) == _shapes(
                theirs, {}
            )
        found = f"{len(theirs)}, {_dtypes(theirs)}"
        yield Finding(plan.role, what, f"{len(ours)}, {_dtypes(ours)}", found, same)


def _shapes(ports: tuple[Port, ...], instead: Mapping[str, Port]) -> list[tuple[Any, ...]]:
    return [(port.name, instead.get(port.name, port).shape) for port in ports]


def _dtypes(ports: tuple[Port, ...]) -> str:
    return " ".join(sorted({port.dtype for port in ports}))


def _layers(
    bundle: Bundle, engine: EngineFolder, role: str, record: Mapping[str, Any]
) -> Iterator[Finding]:
    plugins = len(record["plugins"])
    planned = sum(count for _, count, verdict in record["kernels"] if verdict.startswith("plugin"))
    nodes = sum(count for _, count, _ in record["kernels"])
    model = _load(bundle.path / bundle.graph(role, engine.identity.product).file)
    ours = sum(node.domain == DOMAIN for node in model.graph.all_nodes())
    yield Finding(role, "operators of this package", str(ours), str(nodes), ours == nodes)
    yield Finding(role, "plugin layers", f"{planned} planned", str(plugins), planned == plugins)
    if plugins not in (0, ours):
        said = f"{plugins} of {ours} are plugins: bodies of the rest not counted"
        yield Finding(role, "layers", "-", said, None)
        return
    if not plugins:
        common.InlinePass()(model)
    operators = Counter(node.op_type for node in model.graph.all_nodes() if node.domain == "")
    for kind, names in ONE_TO_ONE.items():
        wanted = sum(operators[name] for name in names)
        found = int(record["layers"].get(kind, 0))
        if wanted or found:
            what = " + ".join(name for name in names if operators[name]) or names[0]
            yield Finding(role, f"{what}, {kind}", str(wanted), str(found), wanted == found)


def _load(file: Path) -> ir.Model:
    try:
        return ir.load(file)
    except Exception as err:
        raise BundleError(f"{file} is no ONNX graph ({err}): copy the bundle again") from err


def _weights(
    bundle: Bundle, engine: EngineFolder, role: str, record: Mapping[str, Any]
) -> Iterator[Finding]:
    weights = graphfacts.read(bundle, role, engine.identity.product).weights
    count = sum(prod(weight.shape) for weight in weights)
    stored = sum(stored_bytes(weight) for weight in weights)
    floats = sum(prod(weight.shape) for weight in weights if weight.dtype == "float32")
    read, plan = int(record["weight_bytes"]), int(record["plan_bytes"])
    size = (engine.path / engine.plans[role].file).stat().st_size
    yield Finding(role, "plan bytes", f"{plan:,} at the build", f"{size:,}", plan == size)
    if not count:
        return
    ours, theirs = stored / count, read / count
    least = DTYPES[PRECISIONS[engine.identity.precision]]
    # norms, decays and layers that were kept are float32 in a half engine
    fits = stored - (4 - least) * floats <= read <= stored
    fits &= least == 4 or read < stored or bool(engine.identity.fp32_layers)
    yield Finding(role, "bytes per weight", f"{ours:.3f}", f"{theirs:.3f}", fits)
    holds = None if engine.identity.is_stripped else size >= read
    yield Finding(role, "plan / weight bytes", f"{read:,} B", f"{size / max(read, 1):.2f}", holds)


def _checked(engine: EngineFolder) -> Finding:
    """How the build compared its graphs with float32."""
    check = engine.check
    if not check:
        said = f"{engine.identity.precision}, nothing was converted"
        return Finding("all", "precision", "-", said, None)
    passed = check.get("passed")
    said = f"{engine.identity.precision}: {check.get('kind', 'not said how')}"
    return Finding("all", "precision, when built", "-", said, None if passed is None else passed)
