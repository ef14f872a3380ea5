"""A float32 bundle's graphs and weights at another precision, in a folder of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from fixedstate.bundle import MANIFEST, WEIGHTS, Bundle, Graph, sha256_of, write_atomic
from fixedstate.errors import BackendError, UsageError
from fixedstate.export.passes import ONNX_DTYPES, is_weight, lint, serialised
from fixedstate.export.precision import convert_together, half_precision
from fixedstate.export.precisionplan import LAYER, NUMPY_HALVES
from fixedstate.export.weightfile import Place, layout, places_in, point_at_weights, write_pieces
from fixedstate.state import StateSpec, graph_ports

_PIECE = 1 << 22  # elements converted at once
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.39e38}


def convert_bundle(
    bundle: Bundle,
    precision: str,
    folder: Path,
    *,
    fp32_layers: Collection[int] = (),
    roles: Iterable[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Bundle:
    """Write the graphs of a float32 bundle at another precision, with weights of their own.

    The weights go through some megabytes of memory, whatever their size. Tokenizer and licence
    files are not copied: the folder is what engines are built from.

    Args:
        bundle: A float32 bundle.
        precision: ``fp16`` or ``bf16``.
        folder: An empty folder.
        fp32_layers: See :func:`fixedstate.export.precision.convert`.
        roles: Graphs to convert; all if none are given, copies for one target aside.
        progress: Told what is being done.

    Returns:
        What stands in the folder, as a bundle.

    Raises:
        UsageError: see :func:`fixedstate.export.precision.convert`; for a bundle not in float32.
        BackendError: for weights that do not fit the dtype.
        BundleError: where a file cannot be written.
    """
    say = progress or (lambda _: None)
    chosen = half_precision(precision, bundle.precision)
    if bundle.precision.at("float32") != bundle.precision:
        raise UsageError(
            f"{bundle.path} is {bundle.precision}, and only a float32 bundle can be converted to "
            f"{precision}: export it at --precision fp32"
        )
    names = list(roles) or [role for role in bundle.graphs if "@" not in role]
    graphs = {name: bundle.graph(name) for name in names}
    say(f"converting {len(names)} graphs to {precision}")
    models = {name: ir.load(bundle.path / graph.file) for name, graph in graphs.items()}
    stored: dict[str, Place] = {}
    for model in models.values():
        stored |= places_in(model)
    convert_together(list(models.values()), bundle.spec, precision, fp32_layers, bundle.precision)
    places, digest = _write_weights(models.values(), stored, bundle.path / WEIGHTS, folder, say)
    state = StateSpec.of(bundle.spec, chosen)
    made: dict[str, Graph] = {}
    for name, model in models.items():
        inputs, outputs = graph_ports(bundle.spec, state, name, graphs[name].top_k)
        lint(model, inputs, outputs)
        _check_ports(model, {port.name: port.dtype for port in (*inputs, *outputs)})
        point_at_weights(model, places, folder)
        file = f"{name}.onnx"
        write_atomic(folder / file, serialised(model))
        sha256 = sha256_of(folder / file)
        made[name] = Graph(name, file, sha256, graphs[name].min_onnxruntime, inputs, outputs)
    out = replace(
        bundle, path=folder, precision=chosen, state=state, graphs=made, weights=digest, files={}
    )
    write_atomic(folder / MANIFEST, out.manifest())
    return replace(out, digest=sha256_of(folder / MANIFEST))


def _check_ports(model: ir.Model, dtypes: Mapping[str, str]) -> None:
    """The graph's ports have the dtypes that the state says.

    Raises:
        BackendError: naming the port.
    """
    for value in itertools.chain(model.graph.inputs, model.graph.outputs):
        if value.dtype != ONNX_DTYPES[dtypes[value.name or ""]]:
            raise BackendError(
                f"port {value.name!r} of the converted graph is {value.dtype}, expected "
                f"{dtypes[value.name or '']}: please report this model"
            )


def _write_weights(
    models: Iterable[ir.Model],
    stored: Mapping[str, Place],
    source: Path,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[dict[str, Place], str]:
    """Write the weights that the converted graphs read; see :func:`convert_bundle`.

    Returns:
        Place by name, and the sha256 of the file.
    """
    dtypes: dict[str, ir.DataType] = {}
    for model in models:
        for name, value in model.graph.initializers.items():
            if is_weight(name):
                assert value.dtype is not None
                dtypes[name] = value.dtype
    # wide elements first, so that each lies on its own size
    names = sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))
    header, places = layout((name, dtypes[name], stored[name].shape) for name in names)
    with source.open("rb") as given:
        pieces = (
            piece for name in names for piece in _pieces(given, name, stored[name], dtypes[name])
        )
        return places, write_pieces(header, places, pieces, folder / WEIGHTS, say)


def _pieces(
    given: BinaryIO, name: str, place: Place, dtype: ir.DataType
) -> Iterator[bytes | memoryview]:
    """A weight piece by piece, in another dtype.

    Raises:
        BackendError: where it does not fit.
    """
    given.seek(place.offset)
    left, size = place.length, place.dtype.itemsize
    while left:
        raw = given.read(min(left, int(_PIECE * size)))
        if not raw:
            raise BackendError(f"weight {name!r} ends too early: copy the bundle again")
        left -= len(raw)
        if dtype == place.dtype:
            yield raw
            continue
        values = np.frombuffer(raw, np.float32)
        with np.errstate(over="ignore"):
            made = values.astype(NUMPY_HALVES[dtype])
        if not np.isfinite(made).all():
            raise BackendError(_overflow(given, name, place, dtype))
        yield made.view(np.uint8).data


def _overflow(given: BinaryIO, name: str, place: Place, dtype: ir.DataType) -> str:
    """What is wrong with a weight that does not fit a dtype."""
    given.seek(place.offset)
    largest, left = 0.0, place.length
    while left:
        values = np.frombuffer(given.read(min(left, _PIECE * 4)), np.float32)
        left -= values.nbytes
        largest = max(largest, float(np.abs(values).max()))  # NaN wins
    text = f"weight {name!r} holds values up to {largest:.3g}"
    if not np.isfinite(largest):
        return f"{text}, expected finite ones: the checkpoint is broken, use another one"
    limit = _LARGEST[dtype]
    found = LAYER.match(name)
    keep = f" or keep the layer in float32 (--fp32-layers {found[1]})" if found else ""
    other = (
        "build at --precision fp32"
        if dtype == ir.DataType.BFLOAT16
        else ("build at --precision bf16")
    )
    return f"{text}, and {dtype.name.lower()} ends at {limit:.3g}: {other}{keep}"
