"""Quantised graphs tried in memory: engines of a bundle with some weights in other formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import onnx_ir as ir

from fixedstate.bundle import Bundle
from fixedstate.calib.apply import MULTIPLIED, part_of, parts_of, quantize_graph, stored
from fixedstate.calib.formats import Format, Quantized
from fixedstate.calib.observe import ROLES, opened
from fixedstate.calib.sites import Site
from fixedstate.errors import CalibrationError
from fixedstate.ports import Array
from fixedstate.runtime.engine import SessionEngine

LARGEST = 1 << 30
"""Bytes of quantised weights that a graph can hold itself; protobuf ends at twice that."""


def weight_of(graphs: Mapping[str, ir.Model], name: str) -> Array:
    """A weight as it stands in the weights file.

    Raises:
        CalibrationError: ``GRAPH``, where no graph reads it.
    """
    for model in graphs.values():
        value = model.graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            found: Array = value.const_value.numpy()
            return found
    raise CalibrationError("GRAPH", f"no graph of the bundle reads a weight {name!r}")


@contextmanager
def quantized_engine(
    bundle: Bundle,
    graphs: Mapping[str, ir.Model],
    sites: Mapping[str, Site],
    formats: Mapping[str, Format],
    scales: Mapping[str, float],
    *,
    slots: int,
    search: bool = False,
) -> Iterator[SessionEngine]:
    """An engine on ONNX Runtime's CPU, one thread, with some weights quantised.

    Args:
        bundle: The fp32 bundle.
        graphs: Its graphs by role; left as they are.
        sites: Its sites by weight.
        formats: Of the weights that are quantised.
        scales: Of the activations that are.
        slots: Rows at most.
        search: See :func:`fixedstate.calib.apply.stored`.

    Raises:
        CalibrationError: ``TOO_LARGE`` for more quantised weights than a graph can hold: write the
            bundle and open that.
    """
    size = sum(_size(sites[name], one) for name, one in formats.items())
    if size > LARGEST:
        raise CalibrationError(
            "TOO_LARGE",
            f"{size:,} bytes of quantised weights do not fit into a graph (at most {LARGEST:,}): "
            "write the quantised bundle and compare that",
        )
    made = {
        name: stored(weight_of(graphs, name), sites[name], one, search)
        for name, one in formats.items()
    }
    models = {role: graphs[role].clone() for role in ROLES}
    for model in models.values():
        quantize_graph(model, sites, formats, scales, partial(_held, made), simulate=True)
    with opened(bundle, models, {}) as sessions:
        yield SessionEngine(
            bundle.spec, bundle.state, sessions, slots=slots, weights=bundle.weights
        )


def _size(site: Site, chosen: Format) -> int:
    """Bytes of a weight as it is tried."""
    if chosen.is_on_cpu:
        return chosen.nbytes(site.rows, site.columns)
    return 4 * site.rows * site.columns


def _held(
    made: Mapping[str, Quantized], dtype: ir.DataType, shape: ir.Shape, name: str
) -> ir.TensorProtocol:
    """The values or the scales of a quantised weight, by the name of the new weight."""
    weight, part = part_of(name)
    one = made[weight]
    return ir.tensor(
        one.dequantized() if part == MULTIPLIED else parts_of(one)[part], name=name, dtype=dtype
    )
