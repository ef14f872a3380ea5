"""``export --names``: a checkpoint as a folder for another runtime, compared before it appears.

The bundle comes first, as always; then its graphs are written under other names
(:mod:`fixedstate.export.portnames`) and both go along a text in ONNX Runtime, each with its own
state. What differs leaves nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from fixedstate.bundle import (
    NAMES,
    PARITY,
    WEIGHTS,
    Bundle,
    check_target,
    sha256_of,
    staged_folder,
    write_atomic,
)
from fixedstate.errors import UsageError
from fixedstate.export.checkpoint import load_checkpoint
from fixedstate.export.custom import build_reference
from fixedstate.export.parity import real_tokens
from fixedstate.export.passes import serialised
from fixedstate.export.pipeline import Say, export_bundle
from fixedstate.export.portnames import (
    LAYOUTS,
    SCHEMES,
    Renamed,
    Scheme,
    check_covered,
    rename_graph,
    renamed_state,
    to_theirs,
)
from fixedstate.ports import Array, numpy_dtype
from fixedstate.runtime.compare import Comparison, Tolerance, compare
from fixedstate.runtime.ort import open_graph, open_sessions
from fixedstate.runtime.session import Session
from fixedstate.spec import ModelSpec
from fixedstate.state import StateSpec

SCHEMA = 1
GENAI_CONFIG = "genai_config.json"
GENAI_LENGTH = 131_072
"""Tokens of a text in onnxruntime-genai unless its user says otherwise; it keeps ids, no more."""

_OF_CHECKPOINT = ("block_len", "mask_id", "stop_ids", "conv_layout", "allow_unexpected")
"""Options that say how a checkpoint is read."""

Graphs = Mapping[str, tuple[tuple[Renamed, ...], tuple[Renamed, ...]]]
"""Inputs and outputs by file, in the order of the graph."""


@dataclass(frozen=True, slots=True)
class NamesReport:
    """What an export under other names made.

    Attributes:
        path: The folder.
        content: What its names.json holds.
        parity: What its parity.json holds: the bundle against PyTorch and, under ``names``, the
            written graphs against the bundle.
    """

    path: Path
    content: dict[str, Any]
    parity: dict[str, Any]


def export_names(
    checkpoint: str | Path,
    out: str | Path,
    names: str,
    *,
    force: bool = False,
    head: str = "logits",
    fused: bool = True,
    progress: Say | None = None,
    **options: Any,
) -> NamesReport:
    """Export a checkpoint for another runtime, or leave nothing.

    The bundle is exported and compared with PyTorch first, then its graphs are rewritten and
    compared with it along a text in ONNX Runtime.

    Args:
        checkpoint: Name of a shipped model or a checkpoint folder.
        out: The folder to make: graphs, ``weights.safetensors``, ``names.json``, ``parity.json``,
            tokenizer and licence files, for ``genai`` also ``genai_config.json``.
        names: A key of :data:`SCHEMES`.
        force: Replace what stands at ``out``.
        head: Must be ``logits``.
        fused: Must be true for ``genai``.
        progress: Told what is being done.
        **options: Of :func:`fixedstate.export.pipeline.export_bundle`.

    Raises:
        UsageError: for names that are unknown, or options that do not go with them.
        ExportError: where something of the model has no name there.
        ParityError: where a written graph differs from the bundle's.
    """
    if names not in SCHEMES:
        raise UsageError(f"names {names!r} are unknown; use one of {', '.join(SCHEMES)}")
    scheme = SCHEMES[names]
    target = Path(out)
    check_target(target, force)
    fused = _check_options(scheme, checkpoint, head, fused)
    given = {name: options[name] for name in _OF_CHECKPOINT if name in options}
    spec = load_checkpoint(checkpoint, **given).spec
    check_covered(scheme, spec, StateSpec.of(spec))  # before what takes long
    with staged_folder(target, force=force) as folder:
        inner = folder / "bundle"
        made = export_bundle(checkpoint, inner, fused=fused, progress=progress, **options)
        content, compared = write_renamed(made.bundle, folder, scheme, progress)
        shutil.rmtree(inner)
        parity = {**made.parity, "names": [one.to_dict() for one in compared]}
        _write_json(folder / PARITY, parity)
    return NamesReport(target, content, parity)


def write_renamed(
    bundle: Bundle, folder: Path, scheme: Scheme, progress: Say | None = None
) -> tuple[dict[str, Any], list[Comparison]]:
    """Write a bundle's graphs under other names, with all they need beside them.

    Args:
        bundle: The bundle, with the graphs that the scheme asks for.
        folder: Where to; weights and other files are copied there.
        scheme: Whose names.
        progress: Told what is being done.

    Returns:
        The content of ``names.json``, and what the graphs were compared with.

    Raises:
        ExportError: where something of the model has no name there.
        ParityError: where a written graph differs from the bundle's.
    """
    say = progress or (lambda _: None)
    check_covered(scheme, bundle.spec, bundle.state)
    say(f"writing the graphs with the names of {scheme.name}")
    graphs = _write_graphs(scheme, bundle, folder)
    for name in (WEIGHTS, *bundle.files):
        # not linked: a file with two names is refused by onnx, in the bundle as well
        shutil.copyfile(bundle.path / name, folder / name)
    say("comparing them with the bundle")
    compared = _compare(scheme, bundle, folder, graphs)
    content = _content(scheme, bundle, folder, graphs)
    _write_json(folder / NAMES, content)
    if scheme.name == "genai":
        _write_json(folder / GENAI_CONFIG, genai_config(bundle.spec, bundle.state))
    return content, compared


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    write_atomic(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _check_options(scheme: Scheme, checkpoint: str | Path, head: str, fused: bool) -> bool:
    """Whether the bundle needs the fused graph."""
    if head != "logits":
        raise UsageError(
            f"--names {scheme.name} with --head {head}: a graph that gives less than all scores "
            "has no published names: leave one of them out"
        )
    if build_reference(checkpoint) is not None:
        raise UsageError(
            f"--names {scheme.name}: {checkpoint} is a module of your own, and what it carries has "
            "no published names: leave the option out"
        )
    needed = "commit_denoise" in scheme.roles
    if needed and not fused:
        raise UsageError(
            f"--names {scheme.name} needs the graph that gives state and logits in one pass: leave "
            "--no-fused out"
        )
    return needed


def _write_graphs(scheme: Scheme, bundle: Bundle, folder: Path) -> Graphs:
    out = {}
    for role, file in scheme.roles.items():
        model = ir.load(bundle.path / bundle.graph(role).file)
        out[file] = rename_graph(model, bundle.spec, bundle.state, role, scheme)
        write_atomic(folder / file, serialised(model))
    return out


# --- against the bundle's graphs ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """One pass of a written graph, and what the bundle says that it gives."""

    file: str
    ids: Array
    expected: dict[str, Array]


class _Carried:
    """The bundle's own graphs along a text: one state of some rows of one length."""

    def __init__(self, bundle: Bundle, rows: int, columns: int) -> None:
        self.spec, self.state_spec = bundle.spec, bundle.state
        self._sessions = open_sessions(bundle, ("denoise", "commit"))
        self.past = 0
        self.state: dict[str, Array] = {
            port.suffix: np.zeros(
                port.past.resolve(B=rows, C=columns), numpy_dtype(port.past.dtype)
            )
            for port in bundle.state.committed
        }

    def run(self, role: str, ids: Array) -> dict[str, Array]:
        """One pass over tokens that all count, filled up to whole blocks."""
        rows, length = ids.shape
        known: dict[str, Array] = {
            "input_ids": np.pad(ids, ((0, 0), (0, -length % self.spec.block_len))),
            "past_length": np.full(rows, self.past),
            "commit_length": np.full(rows, length),
            **{f"past_{suffix}": array for suffix, array in self.state.items()},
        }
        session: Session = self._sessions[role]
        return session.run({port.name: known[port.name] for port in session.inputs})

    def commit(self, ids: Array) -> dict[str, Array]:
        """Carry the tokens into the state; give what the pass made."""
        made = self.run("commit", ids)
        end = self.past + ids.shape[1]
        for port in self.state_spec.committed:
            new = made[port.present.name]
            if port.update == "swap":
                self.state[port.suffix] = new
            else:
                self.state[port.suffix][:, :, self.past : end] = new[:, :, : ids.shape[1]]
        self.past = end
        return made

    def last_logits(self, ids: Array) -> Array:
        """(B, 1, vocab_size) behind the tokens, by a denoise pass of the block that they end in."""
        whole = (ids.shape[1] - 1) // self.spec.block_len * self.spec.block_len
        kept = self.past, dict(self.state)
        if whole:
            self.commit(ids[:, :whole])
        logits = self.run("denoise", ids[:, whole:])["logits"]
        self.past, self.state = kept
        last = ids.shape[1] - whole - 1
        return logits[:, last : last + 1, : self.spec.vocab_size]

    def presents(self, scheme: Scheme) -> dict[str, Array]:
        """The state by the names and in the layouts of a scheme."""
        out = {}
        for suffix, (_, renamed) in renamed_state(scheme, self.spec, self.state_spec).items():
            array = self.state[suffix]
            if renamed.layout == "whole":
                array = array[:, :, : self.past].copy()  # the buffer is written on
            out[renamed.name] = to_theirs(array, renamed.layout)
        return out


def _walk(scheme: Scheme, bundle: Bundle) -> Iterator[_Step]:
    """A text of two rows through the bundle's graphs, in passes of several lengths."""
    tokens, _ = real_tokens(bundle)
    ids = np.stack([tokens, tokens[::-1]])
    spec, block = bundle.spec, bundle.spec.block_len
    right = _Carried(bundle, len(ids), ids.shape[1])
    pieces = (block + 1, 1, 2 * block - 2) if spec.causal_commit else (block, 2 * block, block)
    for piece in pieces:
        start, new = right.past, ids[:, right.past : right.past + piece]
        if "commit_denoise" in scheme.roles:
            logits = right.last_logits(new)
            right.commit(new)
            made = {**right.presents(scheme), "logits": logits}
            yield _Step(scheme.roles["commit_denoise"], new, made)
            continue
        canvas = ids[:, start : start + block].copy()
        canvas[:, block // 2 :] = 0 if spec.mask_id is None else spec.mask_id
        logits = right.run("denoise", canvas)["logits"]
        yield _Step(scheme.roles["denoise"], canvas, {"logits": logits})
        made = right.commit(new)
        extra = {name: made[name] for name in made if not name.startswith("present_")}
        yield _Step(scheme.roles["commit"], new, {**right.presents(scheme), **extra})


def _compare(scheme: Scheme, bundle: Bundle, folder: Path, graphs: Graphs) -> list[Comparison]:
    """Carry the state through the written graphs, by their names alone, and hold it against that.

    Raises:
        ParityError: naming file, port and size of the difference.
    """
    walked = list(_walk(scheme, bundle))  # before other sessions: one copy of the weights at a time
    sessions = {
        file: open_graph(
            folder / file, tuple(one.port for one in inputs), tuple(one.port for one in outputs)
        )
        for file, (inputs, outputs) in graphs.items()
    }
    pairs = renamed_state(scheme, bundle.spec, bundle.state).values()
    sizes = {"B": len(walked[0].ids), "P": 0}
    state = {
        past.name: np.zeros(
            [dim if isinstance(dim, int) else sizes[dim] for dim in past.shape],
            numpy_dtype(past.ours.dtype),
        )
        for past, _ in pairs
    }
    tolerance = Tolerance.of(bundle.precision.name)
    out = []
    for count, step in enumerate(walked):
        known = {"input_ids": step.ids, **state}
        session = sessions[step.file]
        made = session.run({port.name: known[port.name] for port in session.inputs})
        for past, present in pairs:
            if present.name in made:
                state[past.name] = made[present.name]
        labels = (f"{bundle.path.name}, ONNX Runtime", f"{step.file}, pass {count}")
        out.append(compare(step.expected, made, tolerance, labels=labels).require())
    return out


# --- the files beside -----------------------------------------------------------------------------


def genai_config(spec: ModelSpec, state: StateSpec) -> dict[str, Any]:
    """The content of onnxruntime-genai's ``genai_config.json`` for ``model.onnx``.

    Args:
        spec: A model with a stop id.
        state: What it carries.
    """
    scheme = SCHEMES["genai"]
    past, present = (text.format(layer="%d") for text in (scheme.past, scheme.present))
    attention = [spec.layers[p.layer].attention for p in state.committed if p.kind == "key"]
    heads = attention[0] if attention else None
    model: dict[str, Any] = {
        "type": "decoder",
        "vocab_size": spec.vocab_size,
        "context_length": GENAI_LENGTH,
        "eos_token_id": list(spec.stop_ids),
        "pad_token_id": spec.stop_ids[0],
        "decoder": {
            "filename": scheme.roles["commit_denoise"],
            "session_options": {"provider_options": []},
            "hidden_size": spec.width,
            "num_hidden_layers": len(spec.layers),
            "num_attention_heads": heads.heads if heads else 1,
            "num_key_value_heads": heads.kv_heads if heads else 1,
            "head_size": heads.head_dim if heads else 1,
            "inputs": {
                "input_ids": "input_ids",
                "past_key_names": f"{past}key",
                "past_value_names": f"{past}value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": f"{present}key",
                "present_value_names": f"{present}value",
            },
        },
    }
    if spec.bos_id is not None:
        model["bos_token_id"] = spec.bos_id
    search = {"max_length": GENAI_LENGTH, "do_sample": False, "past_present_share_buffer": False}
    return {"model": model, "search": search}


def _content(scheme: Scheme, bundle: Bundle, folder: Path, graphs: Graphs) -> dict[str, Any]:
    """What names.json holds: nothing of this machine."""
    roles = {file: role for role, file in scheme.roles.items()}
    used = {one.layout for ports in graphs.values() for side in ports for one in side}
    spec = bundle.spec
    return {
        "schema": SCHEMA,
        "names": scheme.name,
        "source": scheme.source,
        "bundle": bundle.digest,
        "checkpoint": bundle.source.to_dict(),
        "block_len": spec.block_len,
        "tokens": "any number" if spec.causal_commit else f"a multiple of {spec.block_len}",
        "layouts": {name: text for name, text in LAYOUTS.items() if name in used},
        "graphs": {
            file: {
                "role": roles[file],
                "sha256": sha256_of(folder / file),
                "inputs": [one.to_dict() for one in inputs],
                "outputs": [one.to_dict() for one in outputs],
            }
            for file, (inputs, outputs) in graphs.items()
        },
        "files": {WEIGHTS: bundle.weights, **dict(sorted(bundle.files.items()))},
    }
