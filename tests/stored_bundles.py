"""Bundles that keep what they carry in fewer bits, as their graphs are rewritten for it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from sample_models import ATTENTION, attention_layer, model

from fixedstate.bundle import MANIFEST, WEIGHTS, Bundle, sha256_of, write_atomic
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.kvformat import store_kv
from fixedstate.export.passes import lint, serialised
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.stateformat import store_state
from fixedstate.export.weightfile import places_in, point_at_weights
from fixedstate.state import StateSpec, graph_ports


def stored(
    bundle: Bundle,
    folder: Path,
    *,
    state: str = "float32",
    kv: str = "float32",
    roles: Sequence[str] = (),
) -> Bundle:
    """The bundle with scan states, keys and values in these formats; nothing is compared."""
    precision = replace(bundle.precision, state=state, kv=kv)
    after = StateSpec.of(bundle.spec, precision)
    shutil.copyfile(bundle.path / WEIGHTS, folder / WEIGHTS)
    graphs = {}
    for role in roles or bundle.graphs:
        graph = bundle.graphs[role]
        changed = ir.load(bundle.path / graph.file)
        places = places_in(changed)
        if state != "float32":
            store_state(changed, bundle.spec, bundle.state, after, role)
        if kv != "float32":
            store_kv(changed, bundle.spec, bundle.state, after, role)
        inputs, outputs = graph_ports(bundle.spec, after, role, graph.top_k)
        lint(changed, inputs, outputs)
        point_at_weights(changed, places, folder)
        write_atomic(folder / graph.file, serialised(changed))
        sha256 = sha256_of(folder / graph.file)
        graphs[role] = replace(graph, sha256=sha256, inputs=inputs, outputs=outputs)
    made = replace(bundle, path=folder, precision=precision, state=after, graphs=graphs, files={})
    write_atomic(folder / MANIFEST, made.manifest())
    return Bundle.open(folder)


def windowed(folder: Path) -> Bundle:
    """A layer that looks at a window, and one that looks at sinks and a window."""
    spec = model(
        attention_layer(sizes=replace(ATTENTION, window=12)),
        attention_layer(sizes=replace(ATTENTION, window=12, sinks=3)),
    )
    save_checkpoint(folder / "checkpoint", spec, random_tensors(spec, seed=7))
    return export_bundle(folder / "checkpoint", folder / "bundle", fused=True).bundle
