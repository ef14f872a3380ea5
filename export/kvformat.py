"""Keys and values stored in fewer bits: what a finished graph keeps of them is changed, no more.

Attention sees a token in full precision as long as it is in the block that is being read or
written, or among the newest that are kept in float; everywhere else it sees what is stored, also
where a pass commits several blocks. So one commit of k blocks does what k commits do, and the fused
graph what two graphs do. Quantised is in passes that commit, dequantised in front of the products.

Formats: :class:`fixedstate.state.KvFormat`. Source of the packed ones: KIVI (arXiv 2402.02750),
keys by channel and values by token, with groups of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from fixedstate.errors import ExportError
from fixedstate.export.graphwriter import GraphWriter
from fixedstate.export.kvcodec import Codec, Stored, codec_of
from fixedstate.export.passes import describe_port, name_values
from fixedstate.ports import Port
from fixedstate.spec import AttentionSizes, ModelSpec
from fixedstate.state import StatePort, StateSpec, split_role

_KINDS = ("key", "value")
_ROTATION = ("Slice", "Mul", "Sub", "Add", "Concat", "Transpose")
_SCORE = ("Div", "Tanh", "Mul")  # a soft cap
_NEW_INPUT = Port("commit_length", "int64", ("B",))


def store_kv(
    model: ir.Model, spec: ModelSpec, before: StateSpec, after: StateSpec, role: str
) -> None:
    """Make keys and values of one graph enter and leave it as another StateSpec says, in place.

    All else stays as it is: ports of other kinds, weights, and what is computed. A pass that does
    not commit writes nothing, as before; rows that commit nothing keep their stored bytes; garbage
    behind ``past_length`` is not seen as long as it is finite.

    A value that a format does not have is no number when it is read, so that decoding stops with
    an error: a token with a value that is none has a scale that is none, and packed formats end at
    65504, where the float16 of their minima does.

    Args:
        model: A finished graph, whose keys and values are float32.
        spec: The model.
        before: What the graph carries now.
        after: What it is to carry: keys and values in a :class:`fixedstate.state.KvFormat`, beside
            them what belongs to it. Ports of other kinds may differ; they are not looked at.
        role: The graph's.

    Raises:
        ExportError: for keys that are not float32 before or not the same ones afterwards, a graph
            without their ports or without attention as this package exports it, and for a layer
            that a format cannot be written for: keys that are rotated at their place in the cache,
            beside sinks, or beside newest blocks kept in float.
    """
    layers = _layers(before)
    if layers != _layers(after):
        raise ExportError(
            f"layers {_layers(after)} of the new state have keys, those of the graph are {layers}: "
            "take both from one ModelSpec"
        )
    writer = _Writer(model, spec, after, role)
    for index in layers:
        held = before.layer(index)
        for kind in _KINDS:
            if held[kind].past.dtype != "float32":
                raise ExportError(
                    f"{held[kind].past.name} is {held[kind].past.dtype} already, expected float32: "
                    "keys and values are quantised once; begin with the float32 bundle"
                )
        wanted = after.layer(index)
        if "key_scale" in wanted:
            writer.write(index)
        elif wanted["key"].past.dtype != "float32":
            raise ExportError(
                f"{wanted['key'].past.name} cannot be made {wanted['key'].past.dtype} alone: "
                "export the bundle in that precision, or store keys and values as int8"
            )
    writer.finish()
    common.RemoveUnusedNodesPass()(model)
    name_values(model)


def _layers(state: StateSpec) -> list[int]:
    return [port.layer for port in state.committed if port.kind == "key"]


class _Writer:
    """Writes one layer after the other into a graph."""

    def __init__(self, model: ir.Model, spec: ModelSpec, after: StateSpec, role: str) -> None:
        self._spec, self._after = spec, after
        self._pass, self._head = split_role(role)
        self._commits = self._pass.startswith("commit")
        self._graph = model.graph
        self._make = GraphWriter(model.graph, "kv_constant")
        self._inputs = {value.name: value for value in self._graph.inputs}
        self._outputs = [value.name or "" for value in self._graph.outputs]
        self._shared: dict[object, ir.Value] = {}
        mixing = [index for index, layer in enumerate(spec.layers) if layer.mixer != "none"]
        self._narrow = mixing[-1] if self._narrows and mixing else -1

    @property
    def _narrows(self) -> bool:
        """Whether the last mixer answers for the slots asked for alone; see the denoiser."""
        return self._head != "logits" and not self._spec.self_conditioning_width

    def write(self, index: int) -> None:
        """Change where keys and values of a layer enter, leave, and are looked at."""
        ports = self._after.layer(index)
        sizes = self._spec.layers[index].attention
        codecs = {
            kind: codec_of(self._make, ports[kind], sizes, self._spec.block_len) for kind in _KINDS
        }
        kept = ports["key_recent"].past.shape[2] if "key_recent" in ports else 0
        assert isinstance(kept, int)
        self._check_rotation(index, sizes, kept)
        readers = {kind: self._readers(ports[kind]) for kind in _KINDS}
        masks: list[ir.Node] = []
        for kind, codec in codecs.items():
            entering = None
            past = self._inputs.get(ports[kind].past.name)
            if past is not None:
                uses = list(past.uses())
                describe_port(past, ports[kind].past)
                entering = past, self._input(ports[f"{kind}_scale"].past)
                whole = self._whole(codec, entering, ports.get(f"{kind}_recent"))
                masks += self._replace_uses(uses, entering, whole, kept)
            if self._commits:
                stored = self._leave(codec, ports, kind, entering)
                for reader in readers[kind]:
                    self._look_twice(index, kind, reader, stored, kept)
        looks = ports["key"].past.name in self._inputs
        if kept and looks and not masks:
            raise ExportError(
                f"layer {index}: no product of queries and cached keys was found: the graph was "
                "not exported by this package"
            )
        for node in masks:
            node.replace_input_with(0, self._cache_mask(index, ports["key_scale"], kept))

    @staticmethod
    def _check_rotation(index: int, sizes: AttentionSizes, kept: int) -> None:
        """Refuse keys whose angles are those of their places in the cache, where these are others.

        Raises:
            ExportError: naming the layer.
        """
        if sizes.keys_rotated or not sizes.rotary_dim:
            return
        if kept:
            raise ExportError(
                f"layer {index} rotates keys at their place in the cache, and newest blocks that "
                "are kept in float have another one: use a format without them (kivi4r0)"
            )
        if sizes.window is not None and sizes.sinks:
            raise ExportError(
                f"layer {index} rotates keys at their place in the cache and looks at new sinks "
                "apart from other new tokens: keep its keys and values in float32"
            )

    # --- where they enter

    def _whole(
        self, codec: Codec, entering: tuple[ir.Value, ir.Value], recent: StatePort | None
    ) -> ir.Value:
        """The cache as attention reads it: newest tokens in float first, then what is stored.

        In front, because the bytes of a product may depend on where numbers stand that count, but
        not on zeros behind them: that is where the capacity's are.
        """
        read = codec.read(*entering)
        if recent is None:
            return read
        return self._make.node("Concat", self._input(recent.past), read, axis=2)

    def _input(self, port: Port) -> ir.Value:
        """A graph input, new or old; where it belongs in their order is found at the end."""
        if port.name not in self._inputs:
            value = ir.Value()
            describe_port(value, port)
            self._graph.inputs.append(value)
            self._inputs[port.name] = value
        return self._inputs[port.name]

    def _replace_uses(
        self,
        uses: Iterable[tuple[ir.Node, int]],
        entering: tuple[ir.Value, ir.Value],
        whole: ir.Value,
        kept: int,
    ) -> list[ir.Node]:
        """Let all that read the float port read this; gives the choices of scores by its mask."""
        masks = []
        for node, place in uses:
            if node.op_type == "Shape":
                self._measure(node, entering[1], kept)
                continue
            node.replace_input_with(place, whole)
            if kept and node.op_type == "Transpose":
                masks += [self._mask_of(user) for user, _ in node.outputs[0].uses()]
        return masks

    def _measure(self, node: ir.Node, scales: ir.Value, kept: int) -> None:
        """Let what counts rows, heads or columns count those that attention reads.

        Of the scales, since TensorRT does not look at the shape of bytes.
        """
        start = node.attributes["start"].as_int() if "start" in node.attributes else 0
        end = node.attributes["end"].as_int() if "end" in node.attributes else 4
        if not 0 <= start <= end <= 3 or (end == 3 and start < 2):
            raise ExportError(f"node {node.name!r} measures {scales.name!r} in an unknown way")
        node.replace_input_with(0, scales)
        if kept and end == 3:
            uses = list(node.outputs[0].uses())
            columns = self._int("Add", node.outputs[0], self._make.ints(kept))
            for user, place in uses:
                user.replace_input_with(place, columns)

    @staticmethod
    def _mask_of(node: ir.Node) -> ir.Node:
        """The choice of scores that a product of queries and keys ends in."""
        while node.op_type == "MatMul" or node.op_type in _SCORE:
            uses = list(node.outputs[0].uses())
            if len(uses) != 1:
                break
            node = uses[0].node
        if node.op_type != "Where":
            raise ExportError(f"node {node.name!r} is no choice of scores by a mask")
        return node

    # --- where they leave

    def _leave(
        self,
        codec: Codec,
        ports: dict[str, StatePort],
        kind: str,
        entering: tuple[ir.Value, ir.Value] | None,
    ) -> ir.Value:
        """Hand them out quantised; what reading them again gives, of the new tokens."""
        port, scale, recent = ports[kind], ports[f"{kind}_scale"], ports.get(f"{kind}_recent")
        made = self._made(port)
        if port.update == "append":
            stored = codec.write(made)
            codes, scales = stored.codes, stored.scales
        else:
            assert entering is not None
            new, columns = _window_parts(made)
            stored = codec.write(new)
            codes, scales = self._moved(codec, entering, stored, columns)
        made.name, made.shape = f"{made.name}_before", None
        self._set_output(port.present, codes)
        self._set_output(scale.present, scales)
        if recent is not None:
            self._set_output(recent.present, self._newest(recent, made))
        return stored.back

    def _moved(
        self,
        codec: Codec,
        entering: tuple[ir.Value, ir.Value],
        stored: Stored,
        columns: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        """A window after the pass: numbers and scales are copied as they are, none is made anew."""
        make = self._make
        axis, first, end = make.ints(3), make.ints(0), make.ints(1)
        one = make.node("Slice", columns, first, end, axis, dtype=ir.DataType.INT64)
        both = make.node("Concat", codec.plain(entering[0]), stored.plain, axis=2)
        codes = codec.pack(make.node("GatherElements", both, columns, axis=2))
        both = make.node("Concat", entering[1], stored.scales, axis=2)
        return codes, make.node("GatherElements", both, one, axis=2)

    def _newest(self, recent: StatePort, made: ir.Value) -> ir.Value:
        """The newest tokens after the pass; copied: rows that commit nothing keep theirs."""
        make = self._make
        _, heads, kept, width = recent.past.shape
        assert isinstance(kept, int)

        def places() -> ir.Value:
            length = self._input(_NEW_INPUT)
            length = self._int("Reshape", length, make.ints(-1, 1, 1, 1))
            moved = self._int(
                "Add", make.constant(np.arange(kept, dtype=np.int64)[:, None]), length
            )
            return self._int("Expand", moved, make.ints(1, int(heads), kept, int(width)))

        columns = self._once(("newest", heads, kept, width), places)
        both = make.node("Concat", self._input(recent.past), made, axis=2)
        return make.node("GatherElements", both, columns, axis=2)

    def _set_output(self, port: Port, value: ir.Value) -> None:
        describe_port(value, port)
        if port.name in self._outputs:
            self._graph.outputs[self._outputs.index(port.name)] = value
        else:
            self._graph.outputs.append(value)
            self._outputs.append(port.name)

    # --- where new tokens are looked at

    def _readers(self, port: StatePort) -> list[_Reader]:
        """The products with new keys or values, in a pass that commits and looks at any."""
        if not self._commits:
            return []
        fresh = self._made(port)
        if port.update == "swap":
            fresh, _ = _window_parts(fresh)
        found = _find_readers(fresh)
        expected = int(port.layer != self._ends_at)
        if len(found) != expected:
            raise ExportError(
                f"layer {port.layer}: {len(found)} products with new {port.kind}s were found, "
                f"expected {expected}: the graph was not exported by this package"
            )
        return found

    def _made(self, port: StatePort) -> ir.Value:
        """What the graph hands out by a port."""
        if port.present.name not in self._outputs:
            raise ExportError(
                f"the graph has no port {port.present.name!r}, which the state lists: it is not a "
                "graph of this model"
            )
        return self._graph.outputs[self._outputs.index(port.present.name)]

    @property
    def _ends_at(self) -> int:
        """The layer whose keys a commit pass makes last, without looking at any."""
        if self._pass != "commit" or self._spec.logit_shift:
            return -1
        return max(port.layer for port in self._after.committed)

    def _look_twice(
        self, index: int, kind: str, reader: _Reader, stored: ir.Value, kept: int
    ) -> None:
        """Let queries see tokens of other blocks as they are stored, and of their own in float."""
        make, near, node = self._make, self._near(index, kept), reader.node
        left, result = node.inputs[0], node.outputs[0]
        assert left is not None
        uses = list(result.uses())
        other = reader.copied(make, stored)
        if kind == "key":
            joined = make.node("Where", near, result, make.node("MatMul", left, other))
        else:
            zero = make.floats(0.0)
            node.replace_input_with(0, make.node("Where", near, left, zero))
            rest = make.node("MatMul", make.node("Where", near, zero, left), other)
            joined = make.node("Add", result, rest)
        for user, place in uses:
            user.replace_input_with(place, joined)

    def _near(self, index: int, kept: int) -> ir.Value:
        """[B or 1, 1, G T, S] bool: which new tokens a query sees in float."""
        group = self._group(index)

        def make() -> ir.Value:
            starts = self._int("Reshape", self._starts(), self._make.ints(1, 1, 1, -1))
            apart = self._int("Sub", self._query_starts(index, group), starts)
            return self._bool("LessOrEqual", apart, self._make.ints(kept))

        return self._once(("near", group, index == self._narrow, kept), make)

    def _cache_mask(self, index: int, scales: StatePort, kept: int) -> ir.Value:
        """[B, 1, 1 or G T, kept + columns] bool: which of them a query sees.

        A query whose block begins q tokens into the pass sees the kept tokens that are among the
        newest for it: the first q of them have become old. With those counted from the left and the
        stored tokens behind them, what it sees is one piece of both.
        """
        group = self._group(index)

        def make() -> ir.Value:
            make, both = self._make, self._make.ints(kept)
            past = self._input(Port("past_length", "int64", ("B",)))
            past = self._int("Reshape", past, make.ints(-1, 1, 1, 1))
            first, end = self._int("Sub", both, past), past
            if self._commits:
                old = self._int("Min", self._query_starts(index, group), both)
                first = self._int("Max", first, old)
                end = self._int("Add", past, old)
            zero, one = (make.constant(np.int64(number)) for number in (0, 1))
            held = self._inputs[scales.past.name]
            columns = make.node("Shape", held, dtype=ir.DataType.INT64, start=2, end=3)
            columns = self._int("Squeeze", self._int("Add", columns, both))
            place = self._int("Range", zero, columns, one)
            from_first = self._bool("GreaterOrEqual", place, first)
            to_end = self._bool("Less", place, self._int("Max", end, both))
            return self._bool("And", from_first, to_end)

        return self._once(("cache", group, index == self._narrow, kept), make)

    def _group(self, index: int) -> int:
        sizes = self._spec.layers[index].attention
        return sizes.heads // sizes.kv_heads

    def _starts(self) -> ir.Value:
        """[T] int64: where in the pass each new token's block begins."""

        def make() -> ir.Value:
            make = self._make
            tokens = self._int("Squeeze", self._tokens())
            zero, one = (make.constant(np.int64(number)) for number in (0, 1))
            return self._block_start(self._int("Range", zero, tokens, one))

        return self._once("starts", make)

    def _tokens(self) -> ir.Value:
        """[1] int64: T."""
        ids = self._inputs["input_ids"]
        return self._once(
            "tokens", lambda: self._make.node("Shape", ids, dtype=ir.DataType.INT64, start=1, end=2)
        )

    def _block_start(self, place: ir.Value) -> ir.Value:
        length = self._make.ints(self._spec.block_len)
        return self._int("Mul", self._int("Div", place, length), length)

    def _query_starts(self, index: int, group: int) -> ir.Value:
        """[B or 1, 1, G T, 1] int64: the same of each query, as queries of one key head stand."""
        narrow = index == self._narrow

        def make() -> ir.Value:
            make = self._make
            if not narrow:
                tiled = self._int("Tile", self._starts(), make.ints(group))
                return self._int("Reshape", tiled, make.ints(1, 1, -1, 1))
            before = self._int("Sub", self._tokens(), make.ints(self._spec.block_len))
            places = self._int("Add", self._inputs["open_slots"], before)
            if self._spec.logit_shift:
                last = self._int("Sub", self._inputs["commit_length"], make.ints(1))
                last = self._int("Max", last, make.ints(0))
                last = self._int("Unsqueeze", last, make.ints(1))
                places = make.node("Concat", places, last, dtype=ir.DataType.INT64, axis=1)
            tiled = self._int("Tile", self._block_start(places), make.ints(1, group))
            return self._int("Unsqueeze", tiled, make.ints(1, 3))

        return self._once(("query starts", group, narrow), make)

    # --- the end

    def finish(self) -> None:
        """Bring ports into the order of the StateSpec, and nodes into one that can be run."""
        state = self._after
        inputs = ["input_ids", *(port.past.name for port in (*state.committed, *state.stepped))]
        inputs += ["past_length", "position_ids", "commit_length", "open_slots"]
        outputs = [port.present.name for port in state.committed]
        _reorder(self._graph.inputs, inputs)
        _reorder(self._graph.outputs, outputs)
        self._make.finish()

    def _once(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _int(self, op: str, *inputs: ir.Value) -> ir.Value:
        return self._make.node(op, *inputs, dtype=ir.DataType.INT64)

    def _bool(self, op: str, *inputs: ir.Value) -> ir.Value:
        return self._make.node(op, *inputs, dtype=ir.DataType.BOOL)


# --- graphs --------------------------------------------------------------------------------------


class _Reader(NamedTuple):
    """A product with new keys or values, and what stands between them and it.

    Attributes:
        node: The product.
        fresh: The keys or values.
        between: The nodes.
    """

    node: ir.Node
    fresh: ir.Value
    between: frozenset[ir.Node]

    def copied(self, make: GraphWriter, stored: ir.Value) -> ir.Value:
        """What the product would be given of other keys or values."""
        made = {self.fresh: stored}

        def of(value: ir.Value | None) -> ir.Value | None:
            node = value.producer() if value is not None else None
            if value is None or value in made or node not in self.between:
                return made.get(value, value) if value is not None else None
            made[value] = make.copy(node, [of(given) for given in node.inputs])
            return made[value]

        found = of(self.node.inputs[1])
        assert found is not None
        return found


def _find_readers(fresh: ir.Value) -> list[_Reader]:
    """The products whose right side is made of new keys or values alone, as rotation does."""
    between: list[ir.Node] = []
    products: list[ir.Node] = []
    values = [fresh]
    for value in values:
        for node, place in value.uses():
            if node.op_type == "MatMul" and place == 1:
                if node not in products:
                    products.append(node)
            elif _along_columns(node) or node in between:
                continue
            elif node.op_type in _ROTATION:
                between.append(node)
                values += node.outputs
            else:
                raise ExportError(
                    f"node {node.name!r} ({node.op_type}) reads new keys or values, where the "
                    "graphs of this package have none"
                )
    return [_Reader(node, fresh, frozenset(between)) for node in products]


def _along_columns(node: ir.Node) -> bool:
    """Whether a node only puts new tokens behind a window."""
    return node.op_type == "Concat" and node.attributes["axis"].as_int() == 2


def _window_parts(made: ir.Value) -> tuple[ir.Value, ir.Value]:
    """New keys or values of a window's port, and the columns that its next content is taken from.

    Raises:
        ExportError: where the graph does not make the port so.
    """
    take = made.producer()
    both = take.inputs[0].producer() if take is not None and take.inputs[0] is not None else None
    if take is None or take.op_type != "GatherElements" or both is None or not _along_columns(both):
        raise ExportError(f"output {made.name!r} is not taken from a window and new tokens")
    new, columns = both.inputs[1], take.inputs[1]
    assert new is not None
    assert columns is not None
    return new, columns


def _reorder(values: MutableSequence[ir.Value], names: Sequence[str]) -> None:
    """Bring graph inputs or outputs into an order; those it does not name stay behind the others.

    They keep their own order.
    """
    places = {name: place for place, name in enumerate(names)}
    ordered = sorted(values, key=lambda value: places.get(value.name or "", len(places)))
    values.clear()
    values.extend(ordered)
