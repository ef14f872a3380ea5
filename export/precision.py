"""float32 graph -> float16 or bfloat16 graph, as one pass over the finished file of a bundle.

What is half and what is not follows from the operators alone; nothing depends on a model's names:

* half: products with a weight, rows looked up in a weight, the two products around a softmax
  (scores and mixtures of values), sums of halves, activations of the ``fixedstate`` operators, and
  whatever only moves elements of these;
* float32: everything else. Norms, softmax, steps, decays, angles, activation functions, products
  of two activations and sums over carried state are all among it, and so is any structure that
  these rules do not know.

Values meet by casts; where one side is float32, the result is. A weight that a float32 operator
reads stays float32. These are the islands of ``export --precision fp16``, except that gates of an
MLP and sums that a float32 operator reads stay float32 here.

A converted graph needs its own weights file: :func:`convert_bundle` writes both to a folder from
which engines are built. :func:`check_precision` runs the result in ONNX Runtime beside the float32
graphs. That has no bfloat16 products on a CPU: there :func:`emulate_bf16` rounds by pairs of casts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.bundle import MANIFEST, WEIGHTS, Bundle, Graph, sha256_of, umask, write_atomic
from fixedstate.errors import BackendError, ParityError, UsageError
from fixedstate.export.passes import (
    CUSTOM,
    add_functions,
    is_weight,
    lint,
    name_values,
    serialised,
    valueless,
)
from fixedstate.export.weightfile import Place, layout, places_in, point_at_weights
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.ports import Array, numpy_dtype
from fixedstate.runtime.compare import Tolerance, difference, draw_inputs
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.ort import open_sessions
from fixedstate.spec import ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports, split_role

PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
"""Io dtype of every precision that a float32 graph can be converted to."""

CHECKED_BLOCKS = 4
"""Blocks along which :func:`check_precision` compares."""

SAMPLE = (
    "set lamp_2 on\nset lamp_7 off\nread sensor_4\nsensor_4 is 21.5\nmove arm_1 to 40 12\n"
    "Once the state has a fixed size, a long text costs as much memory as a short one.\n"
    '{"arm": 1, "place": [40, 12], "lamps": {"2": true, "7": false}}\n'
    "for name in names:\n    print(name, count[name] + 1)\n"
)
"""Text along which models with a tokenizer are compared."""

_CHECKED_ROWS = 3
_PIECE = 1 << 22  # elements converted at once
_TELL = 1 << 28  # bytes between two words on how far the file is

_HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_NUMPY: dict[ir.DataType, Any] = {
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
}
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.39e38}
_LAYER = re.compile(r"layers\.(\d+)\.")

_MOVING: dict[str, tuple[int, ...] | None] = {
    "Concat": None,
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "Pad": (0, 2),
    "Reshape": (0,),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""Operators that only move elements, and which of their inputs hold them (None: all)."""

_SCORING = ("Add", "Div", "Mul", "Tanh")
"""What may stand between a product and the softmax that makes it one of scores."""

_ADDING = ("Add", "Sub", "Mul", "Div")
"""What may stand between a product and the carried state that it is part of."""

_ANY_DTYPE = ("Shape", "Size")


def half_precision(name: str) -> Precision:
    """``fp16`` or ``bf16``: io and kv in that dtype, scan state float32.

    Raises:
        UsageError: for another name.
    """
    if name not in PRECISIONS:
        raise UsageError(
            f"precision {name!r} cannot be converted to; use one of {', '.join(PRECISIONS)}"
        )
    return Precision(io=PRECISIONS[name], state="float32", kv=PRECISIONS[name])


def convert(
    model: ir.Model, spec: ModelSpec, precision: str, fp32_layers: Collection[int] = ()
) -> ir.Model:
    """Make a half precision graph of one float32 graph, in place.

    Weights that become half have dtype and shape, but no values: :func:`convert_bundle` writes
    those. The ports are the ones of ``StateSpec.of(spec, half_precision(precision))``.

    Args:
        model: The finished graph of one role of a float32 bundle.
        spec: The model.
        precision: ``fp16`` or ``bf16``.
        fp32_layers: Indices of layers that stay float32 as a whole. Their ports do not; what they
            add to is float32 behind them.

    Raises:
        UsageError: for another precision, or for a layer that there is not.
    """
    return _convert([model], spec, precision, fp32_layers)[0]


def _convert(
    models: Sequence[ir.Model], spec: ModelSpec, precision: str, fp32_layers: Collection[int]
) -> Sequence[ir.Model]:
    """Convert the graphs of one weights file together: a weight has one dtype in all of them."""
    chosen = half_precision(precision)
    kept = _checked_layers(models, spec, fp32_layers)
    state = StateSpec.of(spec, chosen)
    wide: set[str] = set()
    while True:
        plans = [_Plan(model, spec, state, kept, frozenset(wide)) for model in models]
        asked = [plan.weights() for plan in plans]
        both = set().union(*(a.half for a in asked)) & set().union(*(a.wide for a in asked))
        if both <= wide:
            break
        wide |= both
    for model, plan in zip(models, plans, strict=True):
        _Rewriter(model, plan, _HALVES[chosen.io]).run()
        _write_functions(model, spec, chosen, plan)
        name_values(model)
    return models


def _checked_layers(
    models: Sequence[ir.Model], spec: ModelSpec, layers: Collection[int]
) -> frozenset[int]:
    """The layers that stay float32.

    Raises:
        UsageError: for one that there is not, or that cannot be told apart in a custom module.
    """
    wrong = sorted(index for index in layers if not 0 <= index < len(spec.layers))
    if wrong:
        raise UsageError(
            f"--fp32-layers {', '.join(map(str, wrong))}: the model has layers 0 to "
            f"{len(spec.layers) - 1}"
        )
    if layers and any(name.startswith(CUSTOM) for m in models for name in m.graph.initializers):
        raise UsageError(
            "--fp32-layers was given, but nothing tells the layers of a custom module apart: leave "
            "the option out, or write casts into the module"
        )
    return frozenset(layers)


@dataclass(slots=True)
class _Asked:
    """Weights by name, by the dtype that operators ask of them."""

    half: set[str] = field(default_factory=set)
    wide: set[str] = field(default_factory=set)


class _Plan:
    """Which values of a graph become half, and which operators compute in half.

    Args:
        model: A float32 graph; not changed.
        spec: The model.
        state: Its ports at the new precision.
        fp32_layers: Layers that stay float32.
        wide: Weights that stay float32 whatever asks for them.

    Attributes:
        half: Values that become half.
        computing: Nodes that compute in half, or move halves.
        separate: Nodes of domain ``fixedstate`` that stay float32.
        lookups: Nodes whose half output is made float32 at once.
        ports: Dtype of every float port, by name.
    """

    def __init__(
        self,
        model: ir.Model,
        spec: ModelSpec,
        state: StateSpec,
        fp32_layers: frozenset[int],
        wide: frozenset[str],
    ) -> None:
        self.model, self.spec, self.wide = model, spec, wide
        self.fp32_layers = fp32_layers
        self.half: set[ir.Value] = set()
        self.computing: set[ir.Node] = set()
        self.separate: set[ir.Node] = set()
        self.lookups: set[ir.Node] = set()
        self.ports = {
            port.name: port.dtype for pair in state.ports for port in (pair.past, pair.present)
        }
        self._outputs = set(model.graph.outputs)
        self._roots: dict[ir.Value, str] = {}
        self._layers: dict[ir.Value, int] = {}
        for name, value in model.graph.initializers.items():
            if is_weight(name) and value.dtype == ir.DataType.FLOAT:
                self._roots[value] = name
                found = _LAYER.match(name)
                self._layers[value] = int(found[1]) if found else -1
        for node in model.graph:
            self._follow(node)
        self._scores = self._find_scores()
        carried = [pair.present.name for pair in state.committed if pair.present.dtype == "float32"]
        self._carried = self._find_carried(carried)
        exact: set[ir.Node] = set()  # softmaxes whose scores stay float32
        while True:
            before = len(exact)
            self._walk(exact)
            if len(exact) == before:
                break
        self._pull_casts_up()

    # --- what is known of values before any dtype is -------------------------------------------

    def _follow(self, node: ir.Node) -> None:
        """Which layer a value belongs to, and which are a weight with its elements moved."""
        layer = max((self._layers.get(v, -1) for v in node.inputs if v is not None), default=-1)
        for value in node.outputs:
            self._layers[value] = layer
        moved = _moved(node)
        if len(moved) == 1 and moved[0] in self._roots and node.op_type != "Gather":
            for value in node.outputs:
                self._roots[value] = self._roots[moved[0]]

    def _find_scores(self) -> dict[ir.Node, ir.Node]:
        """Products of two activations by the softmax that they are scores of."""
        found: dict[ir.Node, ir.Node] = {}
        for node in self.model.graph:
            if node.op_type == "Softmax" and node.domain == "":
                for product in self._products_before(node.inputs[0], self._is_scoring):
                    found[product] = node
        return found

    def _is_scoring(self, node: ir.Node) -> bool:
        if node.op_type in ("Mul", "Div"):
            return _constant(node.inputs[1]) or _constant(node.inputs[0])
        return node.op_type in _SCORING

    def _products_before(
        self, value: ir.Value | None, through: Callable[[ir.Node], bool]
    ) -> Iterator[ir.Node]:
        """Products that reach a value through movement and some other operators."""
        waiting, seen = [value], set()
        while waiting:
            one = waiting.pop()
            node = one.producer() if one is not None else None
            if node is None or node in seen or node.domain != "":
                continue
            seen.add(node)
            if node.op_type in ("MatMul", "Gemm"):
                yield node
            elif node.op_type in _MOVING:
                waiting += _moved(node)
            elif through(node):
                waiting += node.inputs

    def _find_carried(self, names: Collection[str]) -> set[ir.Value]:
        """Values that are added up in carried float32 state."""
        found: set[ir.Value] = set()
        waiting: list[ir.Value | None] = [v for v in self.model.graph.outputs if v.name in names]
        while waiting:
            value = waiting.pop()
            if value is None or value in found:
                continue
            found.add(value)
            node = value.producer()
            if node is None or node.domain != "":
                continue
            if node.op_type in _MOVING:
                waiting += _moved(node)
            elif node.op_type in _ADDING:
                waiting += node.inputs
        return found

    # --- dtypes, in the order of the graph -------------------------------------------------------

    def _tokens(bundle: Bundle) -> Array | None:
    """Ids of the sample; None where the bundle has no tokenizer."""
    try:
        from fixedstate.runtime.text import Text

        ids = Text.open(bundle).encode(SAMPLE)
    except UsageError:
        return None
    if not ids:
        raise ParityError("the bundle's tokenizer gives no ids for plain text: check it")
    return np.asarray(ids, np.int64)


def _walk(
    bundle: Bundle, roles: tuple[str, ...], ids: Array | None, seed: int, threads: int | None
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Outputs and states by port, place by place."""
    rng = np.random.default_rng(seed)
    sessions = open_sessions(bundle, roles, threads=threads)
    spec, rows, length = bundle.spec, _CHECKED_ROWS, bundle.spec.block_len
    count = (CHECKED_BLOCKS + 1) * length
    if ids is None:
        tokens = rng.integers(0, spec.vocab_size, (rows, count))
    else:  # every row begins elsewhere in the text
        starts = np.arange(rows)[:, None] * len(ids) // rows
        tokens = ids[(starts + np.arange(count)) % len(ids)]
    if roles == ("full",):
        for end in (1, length, 3 * length + 1):
            yield f"full, {end} tokens", sessions["full"].run({"input_ids": tokens[:, :end]})
        return
    engine = SessionEngine(spec, bundle.state, sessions, slots=rows)
    mask = 0 if spec.mask_id is None else spec.mask_id
    blocks = [tokens[:, i * length : (i + 1) * length] for i in range(CHECKED_BLOCKS + 1)]
    masked = [np.where(rng.random(block.shape) < 0.5, mask, block) for block in blocks]
    for index in range(CHECKED_BLOCKS):
        for step in range(2 if spec.self_conditioning_width else 1):
            logits = engine.denoise(masked[index])
            yield f"block {index}, denoise pass {step + 1}", {"logits": logits.copy()}
        if engine.fuses:
            logits = engine.commit_denoise(np.concatenate([blocks[index], masked[index + 1]], 1))
            yield f"block {index}, commit_denoise", {"logits": logits.copy()}
        else:
            # the second row commits every other block only
            lengths = [0 if row == 1 and index % 2 else length for row in range(rows)]
            engine.commit(blocks[index], np.array(lengths))
        states = {
            f"{port}, row {row}": array
            for row in range(rows)
            for port, array in engine.read(row).items()
        }
        if spec.logit_shift:
            states["last_logits"] = engine.last_logits.copy()
        yield f"block {index}, state", states


def _head_differences(
    bundle: Bundle, converted: Bundle, role: str, seed: int, tolerance: Tolerance
) -> Iterator[_Found]:
    """How a reduced head differs from what float32 logits say of the tokens that it gives.

    Logits that are off by e at most change a logarithm of a probability by 2e at most.
    """
    spec = bundle.spec
    base, _ = split_role(role)
    rng = np.random.default_rng(seed)
    sizes = {"B": _CHECKED_ROWS, "m": 1, "C": 4 * spec.block_len, "R": spec.block_len}
    lengths = np.zeros(_CHECKED_ROWS, np.int64)
    feeds = draw_inputs(
        bundle.graph(role).inputs,
        rng,
        vocab=spec.vocab_size,
        past_length=rng.integers(0, 4, _CHECKED_ROWS) * spec.block_len,
        commit_length=lengths,
        **sizes,
    )
    slots = feeds["open_slots"] = feeds["open_slots"] % spec.block_len
    plain = {port.name: feeds[port.name] for port in bundle.graph(base).inputs}
    logits = open_sessions(bundle, (base,))[base].run(plain)["logits"].astype(np.float64)
    session = open_sessions(converted, (role,))[role]
    given = session.run(
        {port.name: feeds[port.name].astype(numpy_dtype(port.dtype)) for port in session.inputs}
    )
    scores = np.take_along_axis(logits, slots[..., None], 1)
    off = 2 * tolerance.relative * float(scores.std()) + tolerance.floor
    scores[..., spec.vocab_size :] = -np.inf
    if spec.mask_id is not None:
        scores[..., spec.mask_id] = -np.inf
    shares = scores - scores.max(-1, keepdims=True)
    shares -= np.log(np.exp(shares).sum(-1, keepdims=True))  # logarithms of probabilities
    place = f"{role}, one pass"
    rank = -np.sort(-shares, -1)
    for tokens, confidence in (("tokens", "confidence"), ("top_tokens", "top_confidence")):
        if tokens not in given:
            continue
        chosen = given[tokens].reshape(*slots.shape, -1)
        right = np.take_along_axis(shares, np.clip(chosen, 0, spec.vocab_rows - 1), -1)
        gap = float(np.abs(rank[..., : chosen.shape[-1]] - right).max())
        yield _within(place, tokens, gap, off)
        with np.errstate(divide="ignore"):
            found = np.log(given[confidence].reshape(chosen.shape).astype(np.float64))
        yield _within(place, confidence, float(np.abs(found - right).max()), off)
    if "entropy" in given:
        sure = np.where(np.isfinite(shares), shares, 0.0)
        entropy = -(np.exp(shares) * sure).sum(-1)
        gap = float(np.abs(given["entropy"] - entropy).max())
        yield _within(place, "entropy", gap, off * float(np.log(spec.vocab_rows)))


def _within(place: str, port: str, gap: float, limit: float) -> _Found:
    """A difference that is judged by a limit of its own; NaN and infinity never pass."""
    problem = "" if np.isfinite(gap) else "the candidate holds NaN, infinity or 0"
    share = gap / limit
    return _Found(place, port, gap, share, share, share, gap <= limit and not problem, problem)
