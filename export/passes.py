"""Passes that turn a traced graph into the portable file, each with one job.

Order: :func:`finish`. The portable file is opset 21, IR 10 (23 and 11 with weights in four-bit
floats), standard operators and nodes of domain ``fixedstate`` whose model-local body holds only
such operators; :func:`lint` checks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
from onnx import defs
from onnx_ir.passes import common

from fixedstate.calib.apply import OPSET as FOUR_BIT_FLOATS
from fixedstate.calib.apply import has_four_bit_floats
from fixedstate.errors import ExportError
from fixedstate.plugins.bodies import function_body
from fixedstate.plugins.schema import DOMAIN, OPS, OPSET, VERSION
from fixedstate.ports import Array, Port
from fixedstate.spec import Mamba1Sizes, Mamba2Sizes, ModelSpec
from fixedstate.state import TOP_K, Precision, StateSpec, graph_ports, split_role

IR_VERSION = 10
MIN_ONNXRUNTIME = "1.18.0"
"""The first ONNX Runtime that reads opset 21 and IR 10."""

LARGEST_CONSTANT = 4096
"""Bytes of a constant inside a graph at most; what is larger must be a weight."""

CUSTOM = "module."
"""What the names of a custom module's parameters and buffers begin with."""

_WEIGHTS = ("layers.", "embedding.", "norm.", "head.", "self_conditioning.", CUSTOM)

COLUMNS = "columns"
"""Key in the meta of a weight that is some columns of another: its name, first and last column."""

FORBIDDEN = {
    "Attention": "TensorRT before 10.14 has no importer",
    "RMSNormalization": "TensorRT before 10.15 has no importer",
    "RotaryEmbedding": "TensorRT before 10.15 has no importer",
    "TensorScatter": "TensorRT before 10.15 has no importer",
    "LinearAttention": "it needs a plugin library",
    "CausalConvWithState": "it needs a plugin library",
    "CumSum": "TensorRT imports it as a loop",
    "Loop": "carried values change type or run once too often in TensorRT",
    "If": "no data-dependent control flow",
    "NonZero": "its output size depends on data",
    "Unique": "its output size depends on data",
    "Compress": "its output size depends on data",
    "RandomNormal": "the graph must be a function of its inputs",
    "RandomUniform": "the graph must be a function of its inputs",
    "RandomNormalLike": "the graph must be a function of its inputs",
    "RandomUniformLike": "the graph must be a function of its inputs",
    "Multinomial": "the graph must be a function of its inputs",
    "Bernoulli": "the graph must be a function of its inputs",
}
"""Operators of the standard domain that the portable file must not hold, and why."""

ONNX_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "int64": ir.DataType.INT64,
}


def finish(
    model: ir.Model, spec: ModelSpec, precision: Precision, role: str, top_k: int = TOP_K
) -> ir.Model:
    """Make the portable file of one role out of its traced graph, in place.

    Raises:
        ExportError: where the graph's ports are not those of the role, or :func:`lint` objects.
    """
    inputs, outputs = graph_ports(spec, StateSpec.of(spec, precision), role, top_k)
    return finish_with(model, spec, precision, role, inputs, outputs)


def finish_with(
    model: ir.Model,
    spec: ModelSpec,
    precision: Precision,
    role: str,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
) -> ir.Model:
    """The same for a graph with ports of its own."""
    if split_role(role) == ("commit_denoise", "logits"):
        # not where a head is asked for few slots: turned round, the bytes of the product would
        # depend on how many, and so on the rows beside
        share_embedding(model)
    strip_metadata(model)
    name_weights(model)
    plain_softplus(model)
    split_projections(model)
    add_functions(model, spec, precision)
    common.RemoveUnusedNodesPass()(model)
    check_inputs_read(model)
    repair_open_ends(model)
    set_ports(model.graph.inputs, inputs)
    set_ports(model.graph.outputs, outputs)
    name_values(model)
    model.ir_version = IR_VERSION
    model.opset_imports.clear()
    model.opset_imports[""] = OPSET
    model.producer_name, model.producer_version, model.domain = "fixedstate", "", ""
    if any(node.domain == DOMAIN for node in model.graph):
        model.opset_imports[DOMAIN] = VERSION
    lint(model, inputs, outputs)
    return model


def valueless(dtype: ir.DataType, shape: ir.Shape, name: str) -> ir.LazyTensor:
    """What a weight holds until it points into the weights file: no values, and none are needed."""

    def refuse() -> ir.TensorProtocol:
        raise ExportError(f"a pass asked for the values of weight {name!r}, which are not loaded")

    return ir.LazyTensor(refuse, dtype=dtype, shape=shape, name=name)


def serialised(model: ir.Model) -> bytes:
    """The bytes of a graph file, the same ones each time.

    Raises:
        ExportError: where constants make it as large as a file of weights.
    """
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    if len(data) > 1 << 30:
        raise ExportError(
            f"a graph is {len(data)} bytes without its weights: constants of the model should be "
            "weights; please report this model"
        )
    return bytes(data)


def strip_metadata(model: ir.Model) -> None:
    """Drop stack traces, paths and notes: files must not differ by where they were made."""
    model.metadata_props.clear()
    model.doc_string = None
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    model.graph.name = "fixedstate"
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
            value.shape = None
    for value in itertools.chain(model.graph.inputs, model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


def name_weights(model: ir.Model) -> None:
    """Give weights the names of the checkpoint layout: ``layers.0.mixer.in_proj.weight``.

    Those of a custom module keep their qualified names behind ``module.``.
    """
    for value in list(model.graph.initializers.values()):
        assert value.name is not None
        if not value.name.startswith("denoiser."):
            continue
        del model.graph.initializers[value.name]
        value.name = value.name.removeprefix("denoiser.")
        if not value.name.startswith(CUSTOM):
            value.name = value.name.replace("__", ".")
        if value.const_value is not None:
            value.const_value.name = value.name
        model.graph.register_initializer(value)


def plain_softplus(model: ir.Model) -> None:
    """Where(x > 20, x, Softplus(x)) is Softplus(x): the operator is right for every x."""
    for node in list(model.graph):
        if node.op_type != "Where":
            continue
        test, same, soft = (value.producer() if value else None for value in node.inputs)
        del same
        if test is None or soft is None or (test.op_type, soft.op_type) != ("Greater", "Softplus"):
            continue
        x = node.inputs[1]
        if soft.inputs[0] is x and test.inputs[0] is x:
            ir.convenience.replace_all_uses_with(node.outputs[0], soft.outputs[0])


def share_embedding(model: ir.Model) -> None:
    """A tied head reads the embedding as it is: (E x^T)^T in place of x E^T.

    As the right operand of a product ONNX Runtime keeps a packed copy of E beside the one that
    tokens are looked up in; as the left one it needs none. For the graph that runs where memory
    counts: with many rows the product itself takes about half as long again.
    """
    for node in list(model.graph):
        if node.op_type != "MatMul" or node.inputs[0] is None or node.inputs[1] is None:
            continue
        x, turned = node.inputs[0], node.inputs[1].producer()
        if turned is None or turned.op_type != "Transpose" or turned.inputs[0] is None:
            continue
        table = turned.inputs[0]
        looked_up = any(use.node.op_type == "Gather" for use in table.uses())
        if not (table.is_initializer() and looked_up) or x.shape is None or len(x.shape) != 3:
            continue
        perm = {"perm": [0, 2, 1]}
        columns = ir.node("Transpose", [x], attributes=perm)
        product = ir.node("MatMul", [table, columns.outputs[0]])
        rows = ir.node("Transpose", [product.outputs[0]], attributes=perm)
        rows.outputs[0].type, rows.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        model.graph.insert_before(node, [columns, product, rows])
        ir.convenience.replace_all_uses_with(
            node.outputs[0], rows.outputs[0], replace_graph_outputs=True
        )


NARROW = 64
"""Columns below which a product of its own costs more than copying its neighbour apart."""


def split_projections(model: ir.Model) -> None:
    """Split(MatMul(x, W)) becomes one MatMul per wide part: the same sums, not copied apart.

    Column j of a product depends on column j of W alone, so nothing else changes. A narrow part
    stays with the part before it.
    """
    for node in list(model.graph):
        if node.op_type != "Split" or len(node.inputs) < 2:
            continue  # without sizes: equal parts
        if node.inputs[0] is None or node.inputs[1] is None:
            continue
        whole, sizes = node.inputs[0], node.inputs[1].const_value
        product = whole.producer()
        if product is None or product.op_type != "MatMul" or sizes is None:
            continue
        weight = product.inputs[1]
        if weight is None or not weight.is_initializer() or not is_weight(weight.name or ""):
            continue
        if len(whole.uses()) != 1:
            continue
        start = 0
        for places in _wide_groups([int(v) for v in sizes.numpy()]):
            widths = [int(sizes.numpy()[place]) for place in places]
            end = start + sum(widths)
            columns = _columns(model, weight, places[0], start, end)
            start = end
            part = ir.node("MatMul", [product.inputs[0], columns])
            model.graph.insert_before(node, part)
            values = [part.outputs[0]]
            if len(places) > 1:
                cut = _constant(model, widths)
                apart = ir.node(
                    "Split", [values[0], cut], attributes={"axis": -1}, num_outputs=len(places)
                )
                model.graph.insert_before(node, apart)
                values = list(apart.outputs)
            for place, value in zip(places, values, strict=True):
                ir.convenience.replace_all_uses_with(node.outputs[place], value)


def _wide_groups(sizes: list[int]) -> list[list[int]]:
    """Places of the parts, narrow ones together with the part before them."""
    groups: list[list[int]] = []
    for place, size in enumerate(sizes):
        if groups and size < NARROW:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _columns(model: ir.Model, weight: ir.Value, place: int, start: int, end: int) -> ir.Value:
    """Some columns of a weight as a weight of its own."""
    name = f"{weight.name}.{place}"
    if name not in model.graph.initializers:
        assert weight.dtype is not None
        assert weight.shape is not None
        shape = ir.Shape((weight.shape[0], end - start))
        held = valueless(weight.dtype, shape, name)
        value = ir.Value(name=name, const_value=held, type=weight.type, shape=shape)
        value.meta[COLUMNS] = (weight.name, start, end)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]


def _constant(model: ir.Model, values: list[int]) -> ir.Value:
    name = f"sizes_{'_'.join(str(v) for v in values)}"
    if name not in model.graph.initializers:
        tensor = ir.tensor(np.asarray(values, np.int64), name=name)
        model.graph.register_initializer(ir.Value(name=name, const_value=tensor))
    return model.graph.initializers[name]


def add_functions(model: ir.Model, spec: ModelSpec, precision: Precision) -> None:
    """Write every attribute on the ``fixedstate`` nodes and add one body per operator used."""
    ssd = [layer.mamba2 for layer in spec.layers if layer.mixer == "mamba2"]
    wide_skip = any(one.d_has_hdim for one in ssd)
    one_group = all(one.groups == 1 for one in ssd)
    scans: list[Mamba1Sizes | Mamba2Sizes] = [*ssd]
    scans += [layer.mamba1 for layer in spec.layers if layer.mixer == "mamba1"]
    convolving = [one for one in scans if one.d_conv > 1]
    taps = [one.d_conv for one in convolving]
    widths = {one.conv_dim for one in convolving}
    channels = widths.pop() if len(widths) == 1 else None
    block_len = 0 if spec.objective == "full" else spec.block_len
    used: set[str] = set()
    for node in model.graph.all_nodes():
        if node.domain != DOMAIN:
            continue
        used.add(node.op_type)
        node.attributes["plugin_namespace"] = ir.AttrString("plugin_namespace", DOMAIN)
        node.attributes["plugin_version"] = ir.AttrString("plugin_version", str(VERSION))
        node.attributes["block_len"] = ir.AttrInt64("block_len", block_len)
    for name in OPS:
        if name in used:
            body = function_body(
                name, block_len, precision.io, taps, wide_skip, one_group, channels
            )
            body.opset_imports[""] = opset_of(model)
            model.functions[body.identifier()] = body


def check_inputs_read(model: ir.Model) -> None:
    """Manifest and graph never disagree: an input that nothing reads is an error.

    Raises:
        ExportError: naming the input.
    """
    for value in model.graph.inputs:
        if not value.uses():
            raise ExportError(f"graph input {value.name!r} is listed but nothing reads it")


def set_ports(values: Iterable[ir.Value], ports: Iterable[Port]) -> None:
    """Write names, dtypes and dimensions of the ports onto graph inputs or outputs."""
    for value, port in zip(values, ports, strict=True):
        describe_port(value, port)


def describe_port(value: ir.Value, port: Port) -> None:
    """Write a port's name, dtype and dimensions onto a value."""
    value.name = port.name
    value.dtype = ONNX_DTYPES[port.dtype]
    value.shape = ir.Shape([dim if isinstance(dim, int) else str(dim) for dim in port.shape])


def name_values(model: ir.Model) -> None:
    """Number nodes and intermediate values, so that names do not depend on the exporter."""
    fixed = {id(value) for value in itertools.chain(model.graph.inputs, model.graph.outputs)}
    for index, node in enumerate(model.graph):
        node.name = f"{node.op_type}_{index}"
        for place, value in enumerate(node.outputs):
            if id(value) not in fixed:
                value.name = f"v{index}_{place}" if place else f"v{index}"
    constants = [value for name, value in model.graph.initializers.items() if not is_weight(name)]
    for index, value in enumerate(constants):
        assert value.name is not None
        del model.graph.initializers[value.name]
        value.name = f"c{index}"
        if value.const_value is not None:
            value.const_value.name = value.name
    for value in constants:
        model.graph.register_initializer(value)


def is_weight(name: str) -> bool:
    """Whether an initialiser is a weight of the checkpoint rather than a constant of the graph."""
    return name.startswith(_WEIGHTS)


def opset_of(model: ir.Model) -> int:
    """The opset that a graph has to import: a newer one only for weights in four-bit floats."""
    return FOUR_BIT_FLOATS if has_four_bit_floats(model) else OPSET


def lint(model: ir.Model, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> None:
    """Refuse a graph that breaks a rule of the portable file.

    Raises:
        ExportError: naming node, operator, domain and rule.
    """
    for given, ports in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        names = [value.name for value in given]
        if names != [port.name for port in ports]:
            raise ExportError(
                f"graph ports {names} differ from the manifest's {[p.name for p in ports]}"
            )
    taken = {value.name for value in model.graph.inputs}
    if taken & {value.name for value in model.graph.outputs}:
        raise ExportError("a graph input and a graph output share a name")
    bodies = {identifier[:2] for identifier in model.functions}
    wrong = [problem for node in model.graph.all_nodes() for problem in _lint_op(node, bodies, "")]
    for function in model.functions.values():
        if function.domain != DOMAIN or function.name not in OPS:
            wrong.append(f"function {function.domain}::{function.name} is no declared operator")
        where = f"body of {function.name}: "
        wrong += [found for node in function.all_nodes() for found in _lint_op(node, set(), where)]
    if wrong:
        raise ExportError("; ".join(wrong))
    for name, value in model.graph.initializers.items():
        _lint_constant(name, value)
    opset = opset_of(model)
    for identifier, found in model.opset_imports.items():
        if (identifier, found) not in (("", opset), (DOMAIN, VERSION)):
            raise ExportError(f"the graph imports opset {identifier or 'ai.onnx'} {found}")


def _lint_op(node: ir.Node, bodies: set[tuple[str, str]], where: str) -> Iterator[str]:
    """What is wrong with a node, if anything."""
    what = f"{where}node {node.name!r} ({node.domain or 'ai.onnx'}::{node.op_type})"
    if node.domain not in ("", "ai.onnx"):
        if (node.domain, node.op_type) not in bodies:
            yield (
                f"{what} is neither a standard operator nor a declared one with a body: declare "
                "it as a plugin operator or rewrite the layer in standard operators"
            )
        return
    if node.op_type in FORBIDDEN:
        yield f"{what} may not stand in the portable file: {FORBIDDEN[node.op_type]}"
    elif not defs.has(node.op_type, OPSET, ""):
        yield f"{what} is no operator of opset {OPSET}: rewrite the layer in standard operators"
    elif node.op_type == "Scan":
        yield from _lint_scan(node, what)
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.TENSOR:
            _lint_array(f"{what} attribute {attr.name!r}", attr.as_tensor().numpy())


def _lint_scan(node: ir.Node, what: str) -> Iterator[str]:
    """A carried value keeps its type from step to step."""
    body = node.attributes["body"].as_graph()
    carried = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    for place in range(carried):
        before, after = body.inputs[place], body.outputs[place]
        outside = node.inputs[place]
        kinds = {v.dtype for v in (outside, before, after) if v is not None and v.dtype is not None}
        if len(kinds) > 1:
            yield f"{what} carries value {place} in more than one type: {sorted(map(str, kinds))}"


def _lint_constant(name: str, value: ir.Value) -> None:
    if value.const_value is None:
        raise ExportError(f"initialiser {name!r} has no value")
    if is_weight(name):
        return
    if value.const_value.nbytes > LARGEST_CONSTANT:
        raise ExportError(
            f"constant {name!r} has {value.const_value.nbytes} bytes inside the graph: weights "
            "stand in the weights file: make it a parameter or a buffer of the module, or report "
            "this model"
        )
    _lint_array(f"constant {name!r}", value.const_value.numpy())


def _lint_array(what: str, data: Array) -> None:
    if data.dtype.kind == "f" and not np.isfinite(data).all():
        raise ExportError(f"{what} is not finite in {data.dtype}: use a constant that fits")
    limits = np.iinfo(np.int32)
    if data.dtype == np.int64 and ((data < limits.min) | (data > limits.max)).any():
        raise ExportError(f"{what} does not fit 32 bits: TensorRT would clamp it")


def repair_open_ends(model: ir.Model) -> None:
    """Write open slice ends (INT64 limits) as those of INT32, which every parser keeps."""
    limits = np.iinfo(np.int32)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if is_weight(name) or tensor is None or tensor.dtype != ir.DataType.INT64:
            continue
        if all(node.op_type == "Slice" and place in (1, 2) for node, place in value.uses()):
            clipped = np.clip(tensor.numpy(), limits.min, limits.max)
            value.const_value = ir.tensor(clipped, name=value.name)
