"""Where a model can be quantised: its products with a weight, found in the graphs of a bundle.

A site is one weight. What goes into it is an activation, which several weights may share (query,
key and value; the parts of a projection that the exporter split): they share one scale, in every
role, so that a denoise pass and a fused pass round alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.errors import CalibrationError
from fixedstate.runtime.ort import EMBEDDING
from fixedstate.state import split_role

KINDS = {
    "in_proj": "in_proj",
    "out_proj": "out_proj",
    "x_proj": "x_proj",
    "dt_proj": "dt_proj",
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "o_proj",
    "up_proj": "up",
    "gate_proj": "up",
    "down_proj": "down",
    "lm_head": "head",
    "head": "head",
    "embedding": "head",
}
"""Kind of a product by the name of the module that its weight is of."""

DEFAULT_KINDS = ("in_proj", "out_proj", "qkv", "o_proj", "up", "down", "head")
"""Kinds that are quantised unless told otherwise; those of Mamba-1's steps are not."""


@dataclass(frozen=True, slots=True)
class Site:
    """A weight that something is multiplied with.

    Attributes:
        name: Of the weight, in graphs and weights file.
        kind: One of :data:`KINDS`, or empty where the name is not known: it stays as it is.
        layer: Index of the layer; None for the head.
        rows: K, what the product sums over.
        columns: N.
        input: Names the activation that goes in: the first of the weights that share it.
    """

    name: str
    kind: str
    layer: int | None
    rows: int
    columns: int
    input: str


@dataclass(frozen=True, slots=True)
class Product:
    """A product in a graph.

    Attributes:
        node: The MatMul.
        weight: Name of the weight.
        value: The activation.
        turned: Whether the weight stands first, [N, K], and the activation behind it, [.., K, T].
    """

    node: ir.Node
    weight: str
    value: ir.Value
    turned: bool


def products(model: ir.Model) -> Iterator[Product]:
    """Every product of an activation with a weight, in the order of the graph.

    A tied head multiplies with the embedding: behind a Transpose of it, or as the first factor.
    """
    weights = model.graph.initializers
    for node in model.graph:
        if node.op_type != "MatMul" or node.domain:
            continue
        first, second = node.inputs
        assert first is not None
        assert second is not None
        if (name := _weight_of(second, weights)) is not None:
            yield Product(node, name, first, turned=False)
        elif first.name in weights:
            yield Product(node, str(first.name), second, turned=True)


def _weight_of(value: ir.Value, weights: Mapping[str, ir.Value]) -> str | None:
    """Name of the weight that a factor is, maybe behind a Transpose."""
    maker = value.producer()
    if maker is not None and maker.op_type == "Transpose" and maker.inputs[0] is not None:
        value = maker.inputs[0]
    return str(value.name) if value.name in weights else None


def activation(product: Product) -> ir.Value:
    """The activation as [.., T, K]: in front of the Transpose that a turned product makes of it.

    Raises:
        CalibrationError: ``GRAPH``, for a turned product of another form.
    """
    if not product.turned:
        return product.value
    maker = product.value.producer()
    if maker is None or maker.op_type != "Transpose" or maker.inputs[0] is None:
        raise CalibrationError(
            "GRAPH", f"{product.node.name} multiplies {product.weight} in a form that is not known"
        )
    return maker.inputs[0]


def load_graphs(bundle: Bundle) -> dict[str, ir.Model]:
    """Every graph of a bundle by role; weights stay in their file."""
    return {role: ir.load(bundle.path / graph.file) for role, graph in bundle.graphs.items()}


def find_sites(graphs: Mapping[str, ir.Model]) -> dict[str, Site]:
    """Every site of a bundle by the name of its weight, in the order of the passes.

    Args:
        graphs: By role; see :func:`load_graphs`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    shared: dict[str, str] = {}  # a weight, and one that goes with it

    def leader(name: str) -> str:
        while shared[name] != name:
            name = shared[name]
        return name

    for role in sorted(graphs, key=_order):
        model = graphs[role]
        together: dict[ir.Value, str] = {}
        for product in products(model):
            held = model.graph.initializers[product.weight]
            rows, columns = (int(size) for size in held.shape or ())  # type: ignore[arg-type]
            if product.turned or product.weight == EMBEDDING:
                rows, columns = columns, rows
            shapes.setdefault(product.weight, (rows, columns))
            shared.setdefault(product.weight, product.weight)
            value = activation(product)
            other = together.setdefault(value, product.weight)
            one, two = sorted((leader(other), leader(product.weight)))
            shared[two] = one
    return {
        name: Site(name, _kind(name), _layer(name), *shapes[name], input=leader(name))
        for name in shapes
    }


def _order(role: str) -> tuple[int, str]:
    """Passes that take all layers come first."""
    return 0 if split_role(role)[0] == "commit_denoise" else 1, role


def _kind(name: str) -> str:
    parts = name.split(".")
    return next((KINDS[part] for part in parts if part in KINDS), "")


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and parts[1].isdigit() else None


def inputs_of(sites: Iterable[Site]) -> tuple[str, ...]:
    """Names of the activations of some sites, each once, in order."""
    return tuple(dict.fromkeys(site.input for site in sites))


def weights_file(bundle: Bundle) -> Path:
    """The bundle's weights, where they really lie."""
    return (bundle.path / WEIGHTS).resolve()
