"""Graphs under the port names that another runtime expects: ``export --names``.

The ports of a bundle have the names of its StateSpec and no others, so what is written here is no
bundle: a folder of graphs for a loop of somebody else's. Names, layouts and the meaning of a pass
are those that the other side publishes; what has no name there is refused.

All tokens of a pass count, and keys and values have no spare columns, so ``commit_length`` and
``past_length`` are no inputs: they are the lengths of ``input_ids`` and of the keys. A model whose
commit looks ahead inside a block takes whole blocks of tokens; any other takes any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.errors import ExportError
from fixedstate.export.passes import set_ports
from fixedstate.ports import Array, Port
from fixedstate.spec import ModelSpec
from fixedstate.state import StatePort, StateSpec, graph_ports


@dataclass(frozen=True, slots=True)
class Scheme:
    """The port names of another runtime or exporter.

    Attributes:
        name: As on the command line.
        source: Where they are published.
        past: What the inputs of a layer's state begin with.
        present: What its outputs begin with.
        suffixes: How the name ends, by kind of port.
        pure_past: ``past`` where every layer is a Mamba layer of one kind.
        turned: Mixers whose scan state has its last two axes the other way round.
        whole_window: Whether a convolution keeps K columns; the first is never read.
        roles: Graphs that are written, and their files.
        reads_first: Whether the runtime writes a pass's outputs over its inputs, so that the graph
            has to take a copy before it makes them.
    """

    name: str
    source: str
    past: str
    present: str
    suffixes: Mapping[str, str]
    roles: Mapping[str, str]
    pure_past: str = ""
    turned: frozenset[str] = frozenset()
    whole_window: bool = False
    reads_first: bool = False


_TWO_GRAPHS = {"denoise": "denoise.onnx", "commit": "commit.onnx"}
_SUFFIXES = {"conv": "conv_state", "ssm": "ssm_state", "key": "key", "value": "value"}

SCHEMES = {
    "genai": Scheme(
        "genai",
        "onnxruntime-genai 0.18.0 (github.com/microsoft/onnxruntime-genai): "
        "src/models/recurrent_state.cpp, src/models/kv_cache.cpp",
        past="past_key_values.{layer}.",
        present="present.{layer}.",
        suffixes={**_SUFFIXES, "ssm": "recurrent_state"},
        roles={"commit_denoise": "model.onnx"},
        reads_first=True,
    ),
    "mobius": Scheme(
        "mobius",
        "mobius-onnx 0.1.0 (github.com/onnxruntime/mobius): src/mobius/tasks/_ssm_causal_lm.py, "
        "src/mobius/tasks/_cache_utils.py",
        past="past_key_values.{layer}.",
        present="present.{layer}.",
        suffixes=_SUFFIXES,
        roles=_TWO_GRAPHS,
        pure_past="past_states.{layer}.",
        turned=frozenset({"mamba1"}),
    ),
    "hf": Scheme(
        "hf",
        "transformers 5.24.0 (github.com/huggingface/transformers): transformers.exporters."
        "OnnxExporter, transformers/cache_utils.py",
        past="input.cache.layers.{layer}.",
        present="output.cache.layers.{layer}.",
        suffixes={
            "conv": "conv_states.0",
            "ssm": "recurrent_states.0",
            "key": "keys",
            "value": "values",
        },
        roles=_TWO_GRAPHS,
        turned=frozenset({"mamba1", "mamba2"}),
        whole_window=True,
    ),
}
"""Schemes by name. Layers count from 0 and are not padded: sorted by name, 10 comes before 2."""

LAYOUTS = {
    "same": "as in a bundle",
    "turned": "the last two axes the other way round",
    "window": "K columns, the newest last; the first is never read, and comes out as zeros",
    "whole": "keys and values of every token and nothing behind them; what comes out is the past "
    "and the new ones",
}
"""What becomes of a bundle's tensor, by layout."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """One port of a written graph.

    Attributes:
        ours: The port of the bundle's graph.
        name: Its name in the written graph.
        shape: Its dimensions there: ints, or B rows, T tokens of the pass, P tokens before it.
        layout: A key of :data:`LAYOUTS`.
    """

    ours: Port
    name: str
    shape: tuple[int | str, ...]
    layout: str = "same"

    @property
    def port(self) -> Port:
        """The same for ONNX Runtime, which is asked for names, dtypes and ranks."""
        return Port(
            self.name,
            self.ours.dtype,
            tuple(dim if isinstance(dim, int) else "T" for dim in self.shape),
        )

    def to_dict(self) -> dict[str, Any]:
        """The entry in names.json."""
        return {
            "ours": self.ours.name,
            "name": self.name,
            "dtype": self.ours.dtype,
            "shape": list(self.shape),
            "layout": self.layout,
        }


# --- which name, which layout ---------------------------------------------------------------------


def check_covered(scheme: Scheme, spec: ModelSpec, state: StateSpec) -> None:
    """Refuse a model that the scheme has no names for.

    Raises:
        ExportError: naming the port, or what the other side's loop cannot do.
    """
    what = f"--names {scheme.name}"
    if not state.ports:
        raise ExportError(
            f"{what}: the model is of objective {spec.objective!r} and carries no state, so there "
            "is nothing to rename: export it without the option"
        )
    if scheme.name == "genai" and not (spec.objective == "causal" and spec.causal_commit):
        raise ExportError(
            f"{what}: onnxruntime-genai takes the next token from the last logits of a causal "
            f"model and moves the state in every pass; this one, of objective {spec.objective!r}, "
            "fills blocks by passes that leave the state as it is: decode it with `fixedstate "
            "generate`, or take --names mobius or hf for a loop of your own"
        )
    if scheme.name == "genai" and not spec.stop_ids:
        raise ExportError(
            f"{what}: the model names no id that ends a text, and onnxruntime-genai would take id "
            "0 for it: say which with --stop-id"
        )
    for port in state.ports:
        why = _uncovered(spec, port)
        if why:
            raise ExportError(
                f"{what}: {port.past.name} has no name there ({why}): export without the option"
            )
    sizes = {(port.kind, port.past.shape) for port in state.swapped}
    if scheme.name == "genai" and len(sizes) > len({kind for kind, _ in sizes}):
        raise ExportError(
            f"{what}: onnxruntime-genai gives the state of every layer the size that the first one "
            "has, and the Mamba layers of this model differ in size: export without the option"
        )
    for index, layer in enumerate(spec.layers):
        kinds = state.layer(index)
        if layer.mixer.startswith("mamba") and "ssm" in kinds and "conv" not in kinds:
            raise ExportError(
                f"{what}: layer {index} convolves with one tap and carries no columns, and "
                "a conv_state is expected beside every scan state: export without the option"
            )


def _uncovered(spec: ModelSpec, port: StatePort) -> str:
    """Why a port has no published name; empty where it has one."""
    if port.scope == "step":
        return "it is carried from pass to pass of a block"
    mixer = spec.layers[port.layer].mixer
    if mixer == "linear_attention":
        return "a state of linear attention"
    if port.kind in ("key", "value") and port.update == "swap":
        return "keys and values of a window"
    return ""


def renamed_state(
    scheme: Scheme, spec: ModelSpec, state: StateSpec
) -> dict[str, tuple[Renamed, Renamed]]:
    """Input and output of every carried tensor under other names, by suffix, in StateSpec order."""
    mixers = {layer.mixer for layer in spec.layers}
    pure = len(mixers) == 1 and next(iter(mixers)).startswith("mamba")
    past = scheme.pure_past if pure and scheme.pure_past else scheme.past
    out = {}
    for port in state.committed:
        suffix = scheme.suffixes[port.kind]
        layout = _layout(scheme, spec, port)
        out[port.suffix] = (
            Renamed(
                port.past,
                past.format(layer=port.layer) + suffix,
                _shape(port.past, layout, "P"),
                layout,
            ),
            Renamed(
                port.present,
                scheme.present.format(layer=port.layer) + suffix,
                _shape(port.past, layout, "P+T"),
                layout,
            ),
        )
    return out


def _layout(scheme: Scheme, spec: ModelSpec, port: StatePort) -> str:
    if port.kind in ("key", "value"):
        return "whole"
    if port.kind == "conv":
        return "window" if scheme.whole_window else "same"
    return "turned" if spec.layers[port.layer].mixer in scheme.turned else "same"


def _shape(port: Port, layout: str, tokens: str) -> tuple[int | str, ...]:
    shape = list(port.shape)
    if layout == "whole":
        shape[2] = tokens
    elif layout == "window":
        assert isinstance(shape[2], int)
        shape[2] += 1
    elif layout == "turned":
        shape[-2], shape[-1] = shape[-1], shape[-2]
    return tuple(shape)


def to_theirs(array: Array, layout: str) -> Array:
    """A bundle's tensor in the layout of the written graph; whole keys must be cut before."""
    if layout == "turned":
        return np.swapaxes(array, -1, -2)
    if layout == "window":
        return np.pad(array, ((0, 0), (0, 0), (1, 0)))
    return array


# --- the graphs -----------------------------------------------------------------------------------


class _Edit:
    """Puts nodes before and behind those of a graph."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._first = model.graph[0]
        self._count = 0

    def _node(self, op: str, inputs: list[ir.Value], attributes: dict[str, Any]) -> ir.Node:
        node = ir.node(op, inputs, attributes=attributes)
        node.name = f"io_{op}_{self._count}"
        node.outputs[0].name = f"io_{self._count}"
        self._count += 1
        return node

    def before(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """The output of a node that runs before the graph's own."""
        node = self._node(op, list(inputs), attributes)
        self._graph.insert_before(self._first, node)
        return node.outputs[0]

    def behind(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """The output of a node that runs behind them."""
        node = self._node(op, list(inputs), attributes)
        self._graph.append(node)
        return node.outputs[0]

    def constant(self, *numbers: int) -> ir.Value:
        """A vector of whole numbers."""
        name = "io_of_" + "_".join(str(number).replace("-", "m") for number in numbers)
        if name not in self._graph.initializers:
            tensor = ir.tensor(np.array(numbers, np.int64), name=name)
            self._graph.register_initializer(ir.Value(name=name, const_value=tensor))
        return self._graph.initializers[name]


def rename_graph(
    model: ir.Model, spec: ModelSpec, state: StateSpec, role: str, scheme: Scheme
) -> tuple[tuple[Renamed, ...], tuple[Renamed, ...]]:
    """Give a graph of a bundle other port names and layouts, in place.

    Args:
        model: The graph of the role.
        spec: The model.
        state: What it carries.
        role: ``denoise``, ``commit``, or ``commit_denoise``, which gives the logits of the last
            token alone.
        scheme: Whose names; see :func:`check_covered`.

    Returns:
        Its inputs and outputs, in order.
    """
    graph, edit = model.graph, _Edit(model)
    given = {str(value.name): value for value in graph.inputs}
    made = {str(value.name): value for value in graph.outputs}
    ours = {port.name: port for side in graph_ports(spec, state, role) for port in side}
    for name, value in (given | made).items():
        value.name = f"bundle_{name}"  # the name is another value's now
    names = renamed_state(scheme, spec, state)

    ids = ir.Value(name="input_ids")
    rows = edit.before("Shape", ids, start=0, end=1)
    length = edit.before("Shape", ids, start=1, end=2)
    whole, missing = ids, None
    if role != "denoise":
        whole, missing = _whole_blocks(edit, ids, length, spec)
    derived = {"input_ids": whole, "commit_length": edit.before("Expand", length, rows)}
    tokens = spec.block_len if role == "denoise" else "T"
    inputs = [(ids, Renamed(ours["input_ids"], "input_ids", ("B", tokens)))]
    past: dict[str, ir.Value] = {}
    for port in state.committed:
        renamed, port_name = names[port.suffix][0], port.past.name
        if port_name in given or port.update == "append":  # keys come out again in any case
            value = past[port.suffix] = ir.Value(name=renamed.name)
            inputs.append((value, renamed))
            derived[port_name] = _entering(edit, value, renamed, rows, scheme)
            if port.kind == "key":
                before = edit.before("Shape", value, start=2, end=3)
                derived["past_length"] = edit.before("Expand", before, rows)
    for name, value in given.items():
        ir.convenience.replace_all_uses_with(value, derived[name])

    outputs: list[tuple[ir.Value, Renamed]] = []
    carried = {port.present.name: port.suffix for port in state.committed}
    for name, value in made.items():
        if name in carried:
            renamed = names[carried[name]][1]
            if renamed.layout == "whole":
                if missing is not None:
                    value = edit.behind("Slice", value, edit.constant(0), length, edit.constant(2))
                value = edit.behind("Concat", past[carried[name]], value, axis=2)
            outputs.append((_leaving(edit, value, renamed), renamed))
        elif role != "commit_denoise":
            outputs.append((value, Renamed(ours[name], name, ours[name].shape)))
        elif name == "logits":
            assert missing is not None
            renamed = Renamed(ours[name], name, ("B", 1, spec.vocab_size))
            outputs.append((_last(edit, value, missing, spec), renamed))

    graph.inputs[:] = [value for value, _ in inputs]
    graph.outputs[:] = [value for value, _ in outputs]
    for values in (inputs, outputs):
        set_ports([value for value, _ in values], [renamed.port for _, renamed in values])
        for value, renamed in values:
            value.shape = ir.Shape(renamed.shape)
    common.RemoveUnusedNodesPass()(model)
    return tuple(named for _, named in inputs), tuple(named for _, named in outputs)


def _whole_blocks(
    edit: _Edit, ids: ir.Value, length: ir.Value, spec: ModelSpec
) -> tuple[ir.Value, ir.Value | None]:
    """Tokens in whole blocks, and how many of them had to be added; None where none may be."""
    blocks = edit.constant(spec.block_len)
    if spec.causal_commit:
        missing = edit.before("Mod", edit.before("Neg", length), blocks)
        pads = edit.before("Concat", edit.constant(0, 0, 0), missing, axis=0)
        return edit.before("Pad", ids, pads), missing
    # another length fails here instead of giving numbers
    cut = edit.before("Reshape", ids, edit.constant(0, -1, spec.block_len))
    return edit.before("Reshape", cut, edit.constant(0, -1)), None


def _entering(
    edit: _Edit, value: ir.Value, renamed: Renamed, rows: ir.Value, scheme: Scheme
) -> ir.Value:
    """An input in the layout of the bundle's graph."""
    if renamed.layout == "turned":
        return edit.before("Transpose", value, perm=_turned(renamed))
    if renamed.layout == "window":
        width = renamed.shape[2]
        assert isinstance(width, int)
        end, axes = edit.constant(width), edit.constant(2)
        return edit.before("Slice", value, edit.constant(1), end, axes)
    if renamed.layout == "same" and scheme.reads_first:
        # all rows: a copy that depends on the run, so that no optimiser takes it out
        return edit.before("Slice", value, edit.constant(0), rows, edit.constant(0))
    return value


def _leaving(edit: _Edit, value: ir.Value, renamed: Renamed) -> ir.Value:
    """An output of the bundle's graph in the layout that is expected."""
    if renamed.layout == "turned":
        return edit.behind("Transpose", value, perm=_turned(renamed))
    if renamed.layout == "window":
        return edit.behind("Pad", value, edit.constant(0, 0, 1, 0, 0, 0))
    return value


def _turned(renamed: Renamed) -> list[int]:
    axes = list(range(len(renamed.shape)))
    return [*axes[:-2], axes[-1], axes[-2]]


def _last(edit: _Edit, logits: ir.Value, missing: ir.Value, spec: ModelSpec) -> ir.Value:
    """The scores of the last token, of ids that there are: (B, 1, vocab_size)."""
    end = edit.behind("Sub", edit.constant(spec.block_len), missing)
    start = edit.behind("Sub", end, edit.constant(1))
    row = edit.behind("Slice", logits, start, end, edit.constant(1))
    vocab = edit.constant(spec.vocab_size)
    return edit.behind("Slice", row, edit.constant(0), vocab, edit.constant(2))
