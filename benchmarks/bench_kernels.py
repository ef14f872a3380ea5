"""The SSD denoise form, one layer, one thread: our ONNX body against what else could compute it.

    python benchmarks/bench_kernels.py                        # L=32, 24 heads x 64, d_state 128
    python benchmarks/bench_kernels.py --tokens 128 --runs 31 --json out.json
    python benchmarks/bench_kernels.py --bytes                # bytes per pass, nothing is timed

Every form takes the same float32 inputs (x, dt, A, B, C, D, state; one group, one row) and gives
y, the skip D x included; what a form needs of them in another shape it makes inside:

    body          the function body that the exporter writes
    linear        com.microsoft.LinearAttention: key = B and query = C tiled over the heads, value =
                  dt x, decay = dt A, scale 1; it always writes a new state, which nobody reads here
    linear+state  the same, the new state handed out
    delta         com.microsoft.GatedDeltaNet by the rule `gated`: B and C as they are, the state
                  transposed on the way in
    onnx          LinearAttention of ai.onnx (opset 27), which ONNX Runtime inlines
    eager         fixedstate.plugins.torch_ops.PLAIN under inference_mode
    compile       the same by torch.compile
    linear-op     LinearAttention alone: inputs prepared, no skip. Not the same work, a floor
    delta-op      GatedDeltaNet alone, likewise, with the state kept transposed

Each form is compared with the float64 loop first. A wrong one ends the run; one that the library
refuses is named and left out. What counts is `cpu`.

`--bytes` counts every input and output once (KernelSpec.bytes_moved): a denoise by its own
one-output form, and by the commit form, whose second output it would throw away.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from harness import Report, interleave

from fixedstate.plugins import reference
from fixedstate.plugins.bodies import function_body
from fixedstate.plugins.schema import DOMAIN, OPS, VERSION
from fixedstate.plugins.torch_ops import PLAIN
from fixedstate.ports import Array

TOLERANCE = 1e-5
"""Largest error over the largest |y|; float32 forms reach some 1e-7."""

OURS = "body"
ALONE = ("linear-op", "delta-op")
"""Forms that do less than the others."""

OWN = (OURS, "eager")
"""Forms of this package alone: they run everywhere."""

NAMES = ("x", "dt", "a", "b", "c", "d", "state")

_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, one row and one group."""

    tokens: int = 32
    heads: int = 24
    head_dim: int = 64
    d_state: int = 128


def draw(shape: Shape) -> dict[str, Array]:
    """Random float32 inputs by name."""
    rng = np.random.default_rng(0)
    tokens, heads, wide, deep = shape.tokens, shape.heads, shape.head_dim, shape.d_state
    found = {
        "x": rng.standard_normal((1, tokens, heads, wide)),
        "dt": np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (1, tokens, heads))),
        "a": -rng.uniform(1, 16, heads),
        "b": rng.standard_normal((1, tokens, 1, deep)),
        "c": rng.standard_normal((1, tokens, 1, deep)),
        "d": rng.standard_normal(heads),
        "state": rng.standard_normal((1, heads, deep, wide)),
    }
    return {name: found[name].astype(np.float32) for name in NAMES}


class Graph:
    """A graph under construction; its inputs have fixed sizes."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        self.inputs = {
            name: ir.Value(name=name, type=_FLOAT, shape=ir.Shape(array.shape))
            for name, array in inputs.items()
        }
        self.nodes: list[ir.Node] = []

    def node(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        outputs: int = 1,
        **more: object,
    ) -> Sequence[ir.Value]:
        """One node; its outputs."""
        made = ir.node(op_type, list(inputs), more, domain=domain, num_outputs=outputs)
        for index, value in enumerate(made.outputs):
            value.name = f"v{len(self.nodes)}_{index}"
        self.nodes.append(made)
        return made.outputs

    def op(self, op_type: str, *inputs: ir.Value | None, **more: object) -> ir.Value:
        """One node with one output."""
        return self.node(op_type, *inputs, **more)[0]  # type: ignore[arg-type]

    def const(self, *numbers: int) -> ir.Value:
        """A 1-D int64 constant."""
        return self.op("Constant", value=ir.tensor(np.asarray(numbers, np.int64)))

    def session(
        self,
        outputs: Sequence[ir.Value],
        opset: int = 21,
        functions: Sequence[ir.Function] = (),
    ) -> onnxruntime.InferenceSession:
        """The finished graph in ONNX Runtime, one thread."""
        for value in outputs:
            value.type = _FLOAT
        imports = {"": opset, _MICROSOFT: 1, DOMAIN: VERSION}
        graph = ir.Graph(
            list(self.inputs.values()),
            list(outputs),
            nodes=self.nodes,
            opset_imports=imports,
            name="kernel",
        )
        model = ir.Model(graph, ir_version=10 if opset <= 21 else 13, functions=list(functions))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)


Bound = tuple[Callable[[], object], Array]
"""A call, and the array into which it writes y."""


def bound(
    session: onnxruntime.InferenceSession, inputs: Mapping[str, Array], y: Array, *rest: Array
) -> Bound:
    """A session on arrays that stay where they are, as the runtime runs it."""
    binding = session.io_binding()
    kept = []
    for name, array in inputs.items():
        kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_input(name, kept[-1])
    for port, array in zip(session.get_outputs(), (y, *rest), strict=True):
        kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_output(port.name, kept[-1])

    def run(kept: object = kept) -> None:  # the binding holds no references
        session.run_with_iobinding(binding)

    return run, y


def empty_y(inputs: Mapping[str, Array]) -> Array:
    """An output without a value that could pass for one."""
    return np.full_like(inputs["x"], np.nan)


def body(inputs: Mapping[str, Array]) -> Bound:
    """The exporter's function body."""
    tokens = inputs["x"].shape[1]
    graph = Graph(inputs)
    attributes = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION), "block_len": tokens}
    y = graph.op("SsdBlockDenoise", *graph.inputs.values(), domain=DOMAIN, **attributes)
    function = function_body("SsdBlockDenoise", tokens, "float32", one_group=True)
    return bound(graph.session([y], functions=[function]), inputs, empty_y(inputs))


def _skip(graph: Graph, y: ir.Value) -> ir.Value:
    """Y + D x."""
    skip = graph.op("Unsqueeze", graph.inputs["d"], graph.const(1))
    return graph.op("Add", y, graph.op("Mul", graph.inputs["x"], skip))


def _driven(graph: Graph) -> tuple[ir.Value, ir.Value]:
    """Dt x and dt A."""
    step = graph.inputs["dt"]
    v = graph.op("Mul", graph.inputs["x"], graph.op("Unsqueeze", step, graph.const(3)))
    return v, graph.op("Mul", step, graph.inputs["a"])


def _linear_attributes(heads: int) -> dict[str, object]:
    return {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated", "scale": 1.0}


def linear(inputs: Mapping[str, Array], domain: str, opset: int, state: bool) -> Bound:
    """LinearAttention with everything around it; ``state`` hands the new state out."""
    heads, wide = inputs["x"].shape[2:]
    graph = Graph(inputs)
    v, decay = _driven(graph)
    flat, tiles = graph.const(0, 0, -1), graph.const(1, 1, heads)
    key, query = (
        graph.op("Tile", graph.op("Reshape", graph.inputs[name], flat), tiles)
        for name in ("b", "c")
    )
    read, new = graph.node(
        "LinearAttention",
        query,
        key,
        graph.op("Reshape", v, flat),
        graph.inputs["state"],
        decay,
        domain=domain,
        outputs=2,
        **_linear_attributes(heads),
    )
    y = _skip(graph, graph.op("Reshape", read, graph.const(0, 0, heads, wide)))
    session = graph.session([y, new] if state else [y], opset)
    rest = [np.full_like(inputs["state"], np.nan)] if state else []
    return bound(session, inputs, empty_y(inputs), *rest)


def delta(inputs: Mapping[str, Array]) -> Bound:
    """GatedDeltaNet with everything around it."""
    graph = Graph(inputs)
    v, decay = _driven(graph)
    state = graph.op("Transpose", graph.inputs["state"], perm=[0, 1, 3, 2])
    read = _delta(graph, graph.inputs["c"], graph.inputs["b"], v, decay, state)
    return bound(graph.session([_skip(graph, read)]), inputs, empty_y(inputs))


def _delta(graph: Graph, *inputs: ir.Value) -> ir.Value:
    query, key, value, decay, state = inputs
    order = (query, key, value, None, decay, None, state)
    return graph.op("GatedDeltaNet", *order, domain=_MICROSOFT, update_rule="gated", scale=1.0)


def prepared(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What the fused operators read: dt x, dt A, the rest as it is."""
    kept = {name: inputs[name] for name in ("b", "c", "state")}
    v = inputs["dt"][..., None] * inputs["x"]
    return {**kept, "v": v, "decay": inputs["dt"] * inputs["a"]}


def linear_op(inputs: Mapping[str, Array]) -> Bound:
    """LinearAttention alone."""
    rows, tokens, heads, _ = inputs["x"].shape
    ready = prepared(inputs)
    for name in ("b", "c"):
        ready[name] = np.tile(ready[name], (1, 1, heads, 1)).reshape(rows, tokens, -1)
    ready["v"] = ready["v"].reshape(rows, tokens, -1)
    graph = Graph(ready)
    order = [graph.inputs[name] for name in ("c", "b", "v", "state", "decay")]
    read, _ = graph.node(
        "LinearAttention", *order, domain=_MICROSOFT, outputs=2, **_linear_attributes(heads)
    )
    return bound(graph.session([read]), ready, np.full_like(ready["v"], np.nan))


def delta_op(inputs: Mapping[str, Array]) -> Bound:
    """GatedDeltaNet alone."""
    ready = prepared(inputs)
    ready["state"] = np.ascontiguousarray(ready["state"].swapaxes(2, 3))
    graph = Graph(ready)
    read = _delta(graph, *(graph.inputs[name] for name in ("c", "b", "v", "decay", "state")))
    return bound(graph.session([read]), ready, empty_y(inputs))


def in_torch(inputs: Mapping[str, Array], compiled: bool) -> Bound:
    """Our PyTorch operator."""
    torch.set_num_threads(1)
    tokens = inputs["x"].shape[1]
    tensors = [torch.from_numpy(inputs[name]) for name in NAMES]
    operator = PLAIN.ssd_denoise
    if compiled:
        operator = torch.compile(operator, dynamic=False, fullgraph=True)
    y = empty_y(inputs)

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return operator(*tensors, tokens)

    y[:] = run().numpy()
    return run, y


FORMS: dict[str, Callable[[Mapping[str, Array]], Bound]] = {
    OURS: body,
    "linear": lambda inputs: linear(inputs, _MICROSOFT, 21, False),
    "linear+state": lambda inputs: linear(inputs, _MICROSOFT, 21, True),
    "delta": delta,
    "onnx": lambda inputs: linear(inputs, "", 27, False),
    "eager": lambda inputs: in_torch(inputs, False),
    "compile": lambda inputs: in_torch(inputs, True),
    "linear-op": linear_op,
    "delta-op": delta_op,
}
"""Every form by name, ours first."""


def subjects(
    shape: Shape, names: Sequence[str] = tuple(FORMS)
) -> tuple[dict[str, Callable[[], object]], dict[str, float], dict[str, str]]:
    """The forms that compute this shape rightly.

    Returns:
        Calls by name, their error over the scale of y, and what was said by those refused.

    Raises:
        SystemExit: if a form gives a wrong y.
    """
    inputs = draw(shape)
    y, _ = reference.ssd(*(inputs[name] for name in NAMES))
    skip = inputs["d"].astype(np.float64)[:, None] * inputs["x"]
    calls: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            call, got = FORMS[name](inputs)
            call()
        except Exception as err:
            if name in OWN:
                raise
            refused[name] = f"{type(err).__name__}: {err}".splitlines()[0]
            continue
        expected = y - skip if name in ALONE else y
        errors[name] = float(np.abs(got.reshape(y.shape) - expected).max() / np.abs(expected).max())
        if not errors[name] <= TOLERANCE:
            raise SystemExit(f"{name} is wrong by {errors[name]:.1e} of the largest |y|: not timed")
        calls[name] = call
    return calls, errors, refused


def verdict(report: Report) -> str:
    """Whether ours is the fastest of those that do the same work."""
    rivals = [series for series in report.series if series.name not in ALONE]
    best = min(rivals, key=lambda series: series.cpu.median)
    return "fastest: " + ("ours" if best.name == OURS else f"{best.name}, NOT ours")


# --- bytes --------------------------------------------------------------------------------------

IO = "float16"
LAYERS = 28
WIDTH = 2560
INNER = 5120

PAPER: tuple[tuple[str, dict[str, int]], ...] = (
    ("CausalConv", {"C": INNER + 2 * 128, "K": 4}),
    ("SsdBlock", {"H": 80, "P": 64, "G": 1, "N": 128, "W": 1}),
    ("SelectiveScan", {"E": INNER, "N": 16}),
)
"""The paper's layer, width 2560: Mamba-2 with its convolution, and Mamba-1 of that inner width."""

# in_proj gives z, x, B, C and dt (Mamba-2), or x and z (Mamba-1, whose B, C and dt come from x)
_MAMBA2 = WIDTH * (2 * INNER + 2 * 128 + 80) + INNER * WIDTH
_MAMBA1 = WIDTH * 2 * INNER + INNER * (160 + 2 * 16) + 160 * INNER + INNER * WIDTH


def moved(family: str, sizes: Mapping[str, int], rows: int, tokens: int) -> tuple[int, int]:
    """Bytes of a denoise pass by the one-output form, and by the two-output form."""
    full = {**sizes, "B": rows, "T": tokens, "L": tokens}
    one, two = (OPS[f"{family}{form}"].bytes_moved(full, IO) for form in ("Denoise", "Commit"))
    return one, two


def bytes_table() -> str:
    """Markdown: bytes per operator and pass, then a step of 28 layers with its weights."""
    mib = 1 << 20
    lines = [
        f"{IO} activations, float32 state; MiB of one operator and one pass",
        "",
        "| operator | B | L | one output | two outputs | saved |",
        "|---|---|---|---|---|---|",
    ]
    for family, sizes in PAPER:
        for rows in (1, 8):
            for tokens in (16, 32, 64):
                one, two = moved(family, sizes, rows, tokens)
                lines.append(
                    f"| {family} | {rows} | {tokens} | {one / mib:.3f} | {two / mib:.3f} | "
                    f"{1 - one / two:.1%} |"
                )
    lines += [
        "",
        f"{LAYERS} layers and the weights of their projections ({IO}, read once), MiB a step",
        "",
        "| layers | B | L | weights | one output | two outputs | step saved | operators' share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    conv, ssd, scan = PAPER
    narrow = (conv[0], {**conv[1], "C": INNER})  # Mamba-1 convolves x alone
    for title, operators, parameters in (
        ("Mamba-2", (conv, ssd), _MAMBA2),
        ("Mamba-1", (narrow, scan), _MAMBA1),
    ):
        weights = LAYERS * parameters * 2
        for rows in (1, 8):
            for tokens in (16, 32, 64):
                pairs = [moved(*operator, rows, tokens) for operator in operators]
                one, two = (LAYERS * sum(column) for column in zip(*pairs, strict=True))
                lines.append(
                    f"| {title} | {rows} | {tokens} | {weights / mib:.0f} | {one / mib:.1f} | "
                    f"{two / mib:.1f} | {(two - one) / (weights + two):.1%} | "
                    f"{one / (weights + one):.1%} |"
                )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sizes = Shape()
    parser.add_argument("--tokens", type=int, default=sizes.tokens)
    parser.add_argument("--heads", type=int, default=sizes.heads)
    parser.add_argument("--head-dim", type=int, default=sizes.head_dim)
    parser.add_argument("--d-state", type=int, default=sizes.d_state)
    parser.add_argument("--forms", default=",".join(FORMS), help="(%(default)s)")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--bytes", action="store_true", help="count bytes, time nothing")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if given.bytes:
        print(bytes_table())
        return
    names = given.forms.split(",")
    if unknown := [name for name in names if name not in FORMS]:
        parser.error(f"unknown forms {', '.join(unknown)}: there are {', '.join(FORMS)}")
    shape = Shape(given.tokens, given.heads, given.head_dim, given.d_state)
    calls, errors, refused = subjects(shape, [OURS, *(name for name in names if name != OURS)])
    report = interleave(calls, runs=given.runs, threads=1, allow_busy=given.allow_busy)
    print(
        f"SSD denoise, L={shape.tokens}, {shape.heads} heads x {shape.head_dim}, d_state "
        f"{shape.d_state}, one group, B=1, one thread"
    )
    print(report.table())
    ours = report[OURS].cpu.median
    print("\n| form | CPU, ms | over ours | error |\n|---|---|---|---|")
    for name, error in errors.items():
        cpu = report[name].cpu.median
        print(f"| {name} | {cpu * 1e3:.3f} | {cpu / ours:.2f} | {error:.1e} |")
    for name, said in refused.items():
        print(f"| {name} | refused: {said} | | |")
    print(verdict(report))
    if given.json:
        found = {"shape": vars(shape), "errors": errors, "refused": refused}
        given.json.write_text(json.dumps({**found, **report.to_dict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
