"""Cases TB: what is planned and checked before TensorRT is called, and TR as far as a plan decides.

TB-09 and TB-11 are of the build and the run themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, SpecError
from fixedstate.export import graphfacts
from fixedstate.export.pluginuse import (
    NodeUse,
    PluginNeed,
    Registered,
    accepted_types,
    judge_types,
    missing_plugins,
    need,
    node_problems,
)
from fixedstate.export.precision import convert
from fixedstate.export.profiles import BuildRequest, Range, plan, set_profiles
from fixedstate.export.targets import RTX, capabilities_of
from fixedstate.plugins import library, rtx
from fixedstate.plugins.schema import DOMAIN, KERNEL_IO, OPS, VERSION
from fixedstate.state import PRECISIONS

NAMES = ("F1", "F2", "F3", "F4")
FLOATS = ("float32", "float16", "bfloat16")


def graph(body: str, inputs: str = "float[B, 4] x, int64[1] k", functions: str = "") -> ir.Model:
    """A graph whose one output is y, in ONNX text."""
    text = (
        '<ir_version: 10, opset_import: ["": 21, "ours": 1]>\n'
        f"g ({inputs}) => (y) {{ {body} }}\n{functions}"
    )
    return ir.from_proto(onnx.parser.parse_model(text))


def problems(body: str, **parts: str) -> tuple[str, ...]:
    return graphfacts.facts(graph(body, **parts), values=True).problems


@pytest.fixture(scope="session")
def facts_of(bundle_path) -> Callable[[str, str], dict[str, graphfacts.GraphFacts]]:
    """Facts of every graph of a bundle, weights looked at."""

    @functools.cache
    def read(name: str, precision: str) -> dict[str, graphfacts.GraphFacts]:
        bundle = Bundle.open(bundle_path(name, precision))
        return {
            role: graphfacts.facts(ir.load(bundle.path / one.file), values=True)
            for role, one in bundle.graphs.items()
        }

    return read


# --- TB-01: the parser finds every plugin, or it is said which and why ----------------------------


def right(one: PluginNeed) -> Registered:
    return Registered(one.name, one.version, one.namespace, one.fields)


NEEDS = [need(spec, "float16", spec.tiles[:1]) for spec in OPS.values()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Other"}, "its name is not registered"),
        ({"version": "2"}, "in version '2', not '1'"),
        ({"namespace": ""}, "in the namespace '', not 'fixedstate'"),
        ({"fields": ("length",)}, "has no field 'block_len'"),
    ],
)
def test_TB_01_a_registry_that_differs(change, message: str) -> None:
    registry = [right(one) for one in NEEDS]
    assert missing_plugins(NEEDS, registry) == []
    wrong = [replace(one, **change) if one.name == "SsdBlockCommit" else one for one in registry]
    (found,) = missing_plugins(NEEDS, wrong)
    assert found.startswith("plugin fixedstate::SsdBlockCommit version 1: ")
    assert message in found


def test_TB_01_an_empty_registry_lacks_them_all() -> None:
    assert len(missing_plugins(NEEDS, [])) == len(OPS)


def test_TB_01_the_right_one_beside_others_is_found() -> None:
    one = right(NEEDS[0])
    others = [replace(one, version="2"), replace(one, namespace=""), replace(one, fields=())]
    assert missing_plugins(NEEDS[:1], [*others[:2], one]) == []


def test_TB_01_what_we_register_is_what_is_needed() -> None:
    """The creators of TensorRT-RTX, in its own classes."""
    made = rtx.creators(library.tensorrt_rtx(), rtx.driver_load(), [])
    registered = [
        Registered(
            creator.name,
            creator.plugin_version,
            creator.plugin_namespace,
            tuple(one.name for one in creator.field_names),
        )
        for creator in made
    ]
    assert missing_plugins(NEEDS, registered) == []


RIGHT_NODE = NodeUse(
    "CausalConvDenoise",
    "conv_7",
    {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION), "block_len": 8},
    (("B", 8, 16), (16, 4), (16,), ("B", 16, 3)),
    ("float16",) * 4,
)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("plugin_version", "2", "'plugin_version' is '2'; plugins of this version have '1'"),
        ("plugin_namespace", "trt", "'plugin_namespace' is 'trt'"),
        ("block_len", 8.0, "'block_len' is 8.0; expected an int"),
        ("block_len", None, "lacks the attribute 'block_len'"),
        ("plugin_namespace", None, "lacks the attribute 'plugin_namespace'"),
    ],
)
def test_TB_01_a_node_that_no_plugin_answers(name: str, value, message: str) -> None:
    assert node_problems(RIGHT_NODE) == []
    attributes = {key: v for key, v in RIGHT_NODE.attributes.items() if key != name}
    attributes |= {} if value is None else {name: value}
    (found,) = node_problems(replace(RIGHT_NODE, attributes=attributes))
    assert found.startswith("node 'conv_7' (fixedstate::CausalConvDenoise)")
    assert message in found


def test_TB_01_such_a_node_in_a_file_is_refused(bundle_path) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    file = ir.load(bundle.path / "denoise.onnx")
    node = next(one for one in file.graph if one.domain == DOMAIN)
    node.attributes["plugin_version"] = ir.AttrString("plugin_version", "2")
    changed = {"denoise": graphfacts.facts(file)}
    with pytest.raises(BackendError, match=r"denoise: node .*'plugin_version' is '2'"):
        plan(bundle, BuildRequest(roles=("denoise",)), changed)


def test_TB_01_the_plan_lists_what_is_needed(bundle_path) -> None:
    bundle = Bundle.open(bundle_path("F1", "fp16"))
    asked = {"target": "tensorrt", "capabilities": ("9.0",), "roles": ("denoise", "commit")}
    needs = plan(bundle, BuildRequest(**asked)).needs
    assert {one.name for one in needs} == {
        "CausalConvDenoise",
        "CausalConvCommit",
        "SelectiveScanDenoise",
        "SelectiveScanCommit",
    }
    one = next(one for one in needs if one.name == "CausalConvCommit")
    assert (one.version, one.namespace, one.fields) == ("1", "fixedstate", ("block_len",))
    assert one.types["length"] == "int64"
    assert one.to_dict()["types"]["x"] == "float16"


# --- TB-02: a profile for every dynamic input -----------------------------------------------------


@dataclass
class StandInProfile:
    """Stand-in of an optimization profile: keeps what it is told."""

    shapes: dict[str, tuple] = field(default_factory=dict)

    def set_shape(self, name: str, least, usual, most) -> None:
        assert name not in self.shapes
        self.shapes[name] = (least, usual, most)


@dataclass
class StandInBuilder:
    """Stand-in of builder and configuration."""

    made: list[StandInProfile] = field(default_factory=list)
    added: list[StandInProfile] = field(default_factory=list)
    refuses: bool = False

    def create_optimization_profile(self) -> StandInProfile:
        self.made.append(StandInProfile())
        return self.made[-1]

    def add_optimization_profile(self, profile: StandInProfile) -> int:
        self.added.append(profile)
        return -1 if self.refuses else len(self.added) - 1


@pytest.mark.parametrize("name", NAMES)
def test_TB_02_each_input_is_set_and_each_profile_added_once(bundle_path, name: str) -> None:
    bundle = Bundle.open(bundle_path(name))
    found = plan(bundle, BuildRequest(batch=Range(1, 2, 4), roles=("denoise", "commit")))
    for role, one in found.roles.items():
        builder = StandInBuilder()
        set_profiles(builder, builder, one)
        assert builder.made == builder.added
        assert len(builder.added) == len(one.profiles)
        names = [value.name for value in ir.load(bundle.path / f"{role}.onnx").graph.inputs]
        assert [list(profile.shapes) for profile in builder.added] == [names]


def test_TB_02_a_profile_that_is_not_taken_is_an_error(bundle_path) -> None:
    one = plan(Bundle.open(bundle_path("F2")), BuildRequest(roles=("denoise",))).roles["denoise"]
    builder = StandInBuilder(refuses=True)
    with pytest.raises(BackendError, match="did not take the optimization profile 'denoise'"):
        set_profiles(builder, builder, one)


# --- TB-04: no input decides a shape --------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_TB_04_TB_06_TB_07_TB_08_our_graphs_are_clean(facts_of, name: str, precision: str) -> None:
    for role, found in facts_of(name, precision).items():
        assert found.problems == (), role


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_TB_06_TB_07_what_a_build_converts_is_clean(bundle_path, precision: str) -> None:
    """Weights have no values there yet, so that they are not looked at."""
    bundle = Bundle.open(bundle_path("F3"))
    for role in ("denoise", "commit"):
        made = convert(ir.load(bundle.path / f"{role}.onnx"), bundle.spec, precision)
        found = graphfacts.facts(made)
        assert found.problems == ()
        assert {one.types[0] for one in found.nodes} == {PRECISIONS[precision]}


FUNCTION = """
<domain: "ours", opset_import: ["": 21]>
Shaped (x, shape) => (out) { out = Reshape (x, shape) }
"""


@pytest.mark.parametrize(
    ("body", "operand"),
    [
        ("y = Reshape (x, k)", "Reshape, operand 1"),
        ("two = Constant <value_ints = [2]> () s = Mul (k, two) y = Reshape (x, s)", "Reshape"),
        (
            "o = Constant <value_ints = [0]> () y = Slice (x, o, k)",
            "Slice, operand 2",
        ),
        ("y0 = ConstantOfShape (k) y = Add (x, y0)", "ConstantOfShape, operand 0"),
        ("y = Expand (x, k)", "Expand, operand 1"),
        ("y, i = TopK (x, k)", "TopK, operand 1"),
        ("y = ours.Shaped (x, k)", "Reshape, operand 1"),
        ("y = Tile (x, k)", "Tile, operand 1"),
    ],
)
def test_TB_04_an_input_that_decides_a_shape(body: str, operand: str) -> None:
    inputs = "float[B, 4] x, int64[2] k" if "Tile" in body or "Expand" in body else ""
    parts = {"inputs": inputs} if inputs else {}
    found = problems(body, functions=FUNCTION if "ours" in body else "", **parts)
    assert len(found) == 1
    assert "graph input 'k' decides a shape" in found[0]
    assert operand in found[0]


def test_TB_04_inside_a_loop_body() -> None:
    body = """
      y, ys = Scan <num_scan_inputs = 1, body = step (float[4] c, float[4] v) => (float[4] d,
        float[4] w) { s = Reshape (v, k) d = Add (c, s) w = Identity (d) }> (start, x)
    """
    found = problems(body, inputs="float[B, 4] x, float[4] start, int64[1] k")
    assert [one for one in found if "input 'k' decides a shape" in one]


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape (x) y = Reshape (x, s)",
        "g = Gather (x, k) s = Shape (g) y = Reshape (g, s)",
        "f = Cast <to = 1> (k) y = Add (x, f)",
        "y = Gather (x, k)",
    ],
)
def test_TB_04_values_that_only_select_are_fine(body: str) -> None:
    assert problems(body) == ()


# --- TB-05: a strongly typed network has no precision flags ---------------------------------------


@pytest.mark.parametrize("target", ["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_TB_05_no_plan_has_a_precision_flag(bundle_path, target: str, precision: str) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    found = plan(bundle, BuildRequest(target, precision, capabilities=("8.9",)))
    assert found.flags == {"STRONGLY_TYPED": True, "TF32": False}


@pytest.mark.parametrize("target", ["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("FP16", "strongly typed"),
        ("BF16", "strongly typed"),
        ("INT8", "strongly typed"),
        ("OBEY_PRECISION_CONSTRAINTS", "strongly typed"),
        ("TF32", "rounds the scan's prefix sums"),
        ("FAST", "is not one of REFIT"),
    ],
)
def test_TB_05_such_a_flag_is_refused(bundle_path, target: str, flag: str, reason: str) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    asked = BuildRequest(target, capabilities=("8.9",), builder_flags=("REFIT", flag))
    with pytest.raises(BackendError, match=f"builder flag {flag}: .*{reason}"):
        plan(bundle, asked)


# --- TB-06: islands stand in the graph ------------------------------------------------------------


@pytest.mark.parametrize("op", graphfacts.ISLANDS)
def test_TB_06_an_island_in_half_is_found(op: str) -> None:
    more = {
        "LayerNormalization": ", x",
        "InstanceNormalization": ", x, x",
        "GroupNormalization": ", x, x",
    }.get(op, "")
    inputs = "float16[2, 4, 4] x"
    if more:
        inputs += ", float16[4] s"
        more = {"LayerNormalization": ", s"}.get(op, ", s, s")
    attributes = " <num_groups = 2>" if op == "GroupNormalization" else ""
    found = problems(f"y = {op}{attributes} (x{more})", inputs=inputs)
    assert len(found) == 1
    assert f"({op}) runs in float16" in found[0]
    cast = f"f = Cast <to = 1> (x) y = {op}{attributes} (f{more})"
    if not more:
        assert problems(cast + " h = Identity (x)", inputs=inputs) == ()


def test_TB_06_a_scan_state_in_half_is_found() -> None:
    body = """
      y, ys = Scan <num_scan_inputs = 1, body = step (float16[4] c, float16[4] v) => (float16[4] d,
        float16[4] w) { d = Add (c, v) w = Identity (d) }> (start, x)
    """
    (found,) = problems(body, inputs="float16[B, 4] x, float16[4] start")
    assert "(Scan) runs in float16" in found


@pytest.mark.parametrize("name", NAMES)
def test_TB_06_norms_and_softmax_of_a_half_graph_read_float(bundle_path, name: str) -> None:
    """By ONNX's own inference on the inlined file, apart from the lint."""
    seen = 0
    for role in ("denoise", "commit"):
        file = onnx.load(bundle_path(name, "fp16") / f"{role}.onnx", load_external_data=False)
        flat = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(file))
        values = (*flat.graph.value_info, *flat.graph.input)
        types = {one.name: one.type.tensor_type.elem_type for one in values}
        for node in flat.graph.node:
            if node.op_type in ("ReduceMean", "Softmax", "Softplus", "Exp", "Scan"):
                assert types[node.input[0]] == onnx.TensorProto.FLOAT, (role, node.name)
                seen += 1
    assert seen > 3


# --- TB-07: constants that half precision holds ---------------------------------------------------


HALVES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def half_graph(values: list[float], dtype: str, name: str = "c0") -> ir.Model:
    """Y = x + a constant or weight of half precision."""
    kind = HALVES[dtype]
    with np.errstate(over="ignore"):
        tensor = ir.tensor(np.asarray(values, np.float32).astype(kind.numpy()), name=name)
    x = ir.Value(name="x", shape=ir.Shape(["B", 3]), type=ir.TensorType(kind))
    held = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
    node = ir.node("Add", [x, held])
    node.outputs[0].name = "y"
    opsets = {"": 21}
    return ir.Model(
        ir.Graph([x], node.outputs, nodes=[node], initializers=[held], opset_imports=opsets),
        ir_version=10,
    )


LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["c0", "layers.0.mixer.out_proj.weight"])
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (-np.inf, "is not finite"),
        (np.nan, "is not finite"),
        (-1.0, "was clamped to the largest"),
        (1.0, "was clamped to the largest"),
        (0.5, ""),
        (0.0, ""),
    ],
)
def test_TB_07_half_constants(dtype: str, name: str, last: float, message: str) -> None:
    """Infinity, not a number, what a mask is clamped to; half of that is as good as any number."""
    value = last * LARGEST[dtype] if np.isfinite(last) else last
    found = graphfacts.facts(half_graph([1.0, 2.0, value], dtype, name), values=True).problems
    assert len(found) == bool(message)
    if message:
        assert f"{name!r} {message}" in found[0]
        assert dtype in found[0]


def test_TB_07_a_mask_beyond_float16_becomes_infinite_and_is_found() -> None:
    for value in (-1e12, float(np.finfo(np.float32).min)):
        (found,) = graphfacts.facts(half_graph([0.0, 0.0, value], "float16")).problems
        assert "is not finite in float16" in found


def test_TB_07_the_same_masks_in_float32_are_fine() -> None:
    body = "m = Constant <value_floats = [-1e30, 0.0, 0.0, -1e12]> () y = Add (x, m)"
    assert problems(body) == ()


def test_TB_07_constants_inside_functions_and_nodes_are_seen() -> None:
    """-65504 is written by its bits, 0xFBFF, in ONNX text."""
    function = """
    <domain: "ours", opset_import: ["": 21]>
    Masked (x) => (out) {
      wide = Constant <value = float16[1] {64511}> ()
      out = Add (x, wide)
    }
    """
    (found,) = problems("y = ours.Masked (x)", inputs="float16[B, 4] x", functions=function)
    assert "was clamped to the largest float16" in found


@pytest.mark.parametrize("name", ["F2", "F3"])
def test_TB_07_activations_of_300_stay_finite(bundle_path, name: str) -> None:
    """Their squares, 9e4, exceed float16: norms are computed in float32."""
    folder = bundle_path(name, "fp16")
    file = onnx.load(folder / "denoise.onnx")
    embedding = next(one for one in file.graph.initializer if one.name == "embedding.weight")
    rows = onnx.numpy_helper.to_array(embedding)
    large = (300 * np.sign(rows.astype(np.float32) + 1e-6)).astype(np.float16)
    embedding.CopyFrom(onnx.numpy_helper.from_array(large, embedding.name))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(file.SerializeToString(), options)
    feeds = {}
    for port in Bundle.open(folder).graphs["denoise"].inputs:
        kind = np.dtype(port.dtype)
        feeds[port.name] = np.zeros(port.resolve(B=2, C=16), kind)
    feeds["input_ids"][:] = np.arange(8)
    (logits,) = session.run(["logits"], feeds)
    assert np.isfinite(logits).all()
    assert logits.std() > 0


# --- TB-08: constants that 32 bits hold -----------------------------------------------------------

OPEN = np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ((f"o = Constant <value_ints = [0]> () e = Constant <value_ints = [{OPEN}]> () "
         "y = Slice (x, o, e)"), True),
        ((f"o = Constant <value_ints = [{-OPEN}]> () e = Constant <value_ints = [{OPEN}]> () "
         "y = Slice (x, o, e)"), True),
        (("i = Constant <value_int = 8589934592> () s = Add (k, i) f = Cast <to = 1> (s) "
         "y = Add (x, f)"), False),
        (("i = Constant <value = int64[1] {8589934592}> () s = Add (k, i) f = Cast <to = 1> (s) "
         "y = Add (x, f)"), False),
        (("i = Constant <value = int64[1] {-2147483649}> () s = Add (k, i) f = Cast <to = 1> (s) "
         "y = Add (x, f)"), False),
        (("i = Constant <value = int64[2] {2147483647, -2147483648}> () s = Add (k, i) "
         "f = Cast <to = 1> (s) z = ReduceSum <keepdims = 0> (f) y = Add (x, z)"), True),
        ((f"o = Constant <value_ints = [0]> () e = Constant <value_ints = [{OPEN}]> () "
         "a = Slice (x, o, e) s = Add (k, e) f = Cast <to = 1> (s) y = Add (a, f)"), False),
        ((f"o = Constant <value_ints = [0]> () e = Constant <value_ints = [4]> () "
         f"a = Constant <value_ints = [1]> () t = Constant <value_ints = [{OPEN}]> () "
         "y = Slice (x, o, e, a, t)"), False),
    ],
)  # fmt: skip
def test_TB_08_int64_constants(body: str, fits: bool) -> None:
    """Open ends of a slice may be cut; an id, a step, or an end that is also an id may not."""
    found = problems(body)
    assert len(found) == (not fits)
    if found:
        assert "does not fit 32 bits: TensorRT would cut it" in found[0]


def test_TB_08_an_initialiser_is_seen() -> None:
    made = graph("f = Cast <to = 1> (ids) y = Add (x, f)", inputs="float[B, 1] x, int64[1] ids")
    value = made.graph.inputs.pop()
    value.const_value = ir.tensor(np.asarray([2**33]), name="ids")
    made.graph.register_initializer(value)
    (found,) = graphfacts.facts(made).problems
    assert "constant 'ids' holds 8589934592" in found


# --- TB-10: every combination of types is decided -------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_TB_10_every_combination_is_decided(op: str) -> None:
    """A plugin exactly where the published table has it, a body where float32 is meant."""
    spec = OPS[op]
    table = [[one[port.name] for port in spec.inputs] for one in accepted_types()[op]]
    whole = [port.dtype_for("float32") for port in spec.inputs]
    choices = [FLOATS if port.dtype != "int64" else ("int64", "int32") for port in spec.inputs]
    counts = {"plugin": 0, "body": 0, "refused": 0}
    for types in itertools.product(*choices):
        verdict, why = judge_types(op, types)
        counts[verdict] += 1
        expected = "plugin" if list(types) in table else "body" if list(types) == whole else ""
        assert verdict == (expected or "refused"), types
        assert bool(why) == (verdict != "plugin")
        if verdict == "refused":
            assert "add a Cast there" in why
    assert counts["plugin"] == len(KERNEL_IO)
    assert counts["body"] == 1
    assert counts["refused"] > counts["plugin"]


def test_TB_10_the_table_names_every_port() -> None:
    table = accepted_types()
    assert list(table) == list(OPS)
    for op, rows in table.items():
        assert [row["x"] for row in rows] == list(KERNEL_IO)
        for row in rows:
            assert list(row) == [port.name for port in OPS[op].ports]


def test_TB_10_a_state_of_another_half_is_refused_by_name() -> None:
    types = ("float16", "float32", "float32", "float16", "float16", "float32", "bfloat16")
    verdict, why = judge_types("SsdBlockCommit", types)
    assert verdict == "refused"
    assert "input 'state' is bfloat16, expected float32 where activations are float16" in why


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("float64",) * 4, "activations are float64; expected float16, bfloat16, float32"),
        (("float8e4m3fn",) * 4, "activations are float8e4m3fn"),
        (("float16", "float32", "float16", "float16"), "input 'weight' is float32"),
    ],
)
def test_TB_10_a_node_with_such_types_stops_the_plan(bundle_path, types, message: str) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    node = replace(RIGHT_NODE, types=types)
    (problem,) = node_problems(node)
    found = graphfacts.GraphFacts((node,), (), frozenset(), (), (problem,))
    with pytest.raises(BackendError, match=message):
        plan(bundle, BuildRequest(roles=("denoise",)), {"denoise": found})


def test_TB_10_an_operator_that_is_none() -> None:
    with pytest.raises(SpecError, match="fixedstate::Other with 4 inputs is no operator"):
        judge_types("Other", ("float16",) * 4)
    with pytest.raises(SpecError, match="with 3 inputs"):
        judge_types("CausalConvDenoise", ("float16",) * 3)


# --- TR-05, TR-06: the edition and the card that are asked for ------------------------------------


def test_TR_05_a_timing_cache_is_of_one_edition(bundle_path) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    with pytest.raises(BackendError, match=r"timing cache t\.cache: .*its run-time cache"):
        plan(bundle, BuildRequest(timing_cache="t.cache"))
    with pytest.raises(BackendError, match="builder flag DISABLE_TIMING_CACHE: .*has none"):
        plan(bundle, BuildRequest(builder_flags=("DISABLE_TIMING_CACHE",)))
    asked = BuildRequest("tensorrt", capabilities=("9.0",), timing_cache="t.cache")
    assert "timing cache  t.cache" in plan(bundle, asked).text()


TURNED_DOWN = {
    ("tensorrt-rtx", "7.5", "fp32"): "multiplies no matrices of float32",
    ("tensorrt-rtx", "7.5", "fp16"): "multiplies no matrices of float32",
    ("tensorrt-rtx", "7.5", "bf16"): "has no bfloat16 in tensorrt-rtx",
    ("tensorrt", "7.5", "bf16"): "has no bfloat16 in tensorrt",
}


@pytest.mark.parametrize("target", ["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize("capability", ["7.5", "8.7", "8.9", "9.0", "10.0", "12.0", "12.1", "6.1"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_TR_06_judged_by_the_card_asked_for(
    bundle_path, target: str, capability: str, precision: str
) -> None:
    """The scan's islands multiply float32 matrices in a half graph too."""
    bundle = Bundle.open(bundle_path("F2"))
    asked = BuildRequest(target, precision, capabilities=(capability,))
    if capability not in capabilities_of(target):
        with pytest.raises(BackendError, match=f"capability {capability}: {target} builds for"):
            plan(bundle, asked)
    elif (target, capability, precision) in TURNED_DOWN:
        message = TURNED_DOWN[target, capability, precision]
        with pytest.raises(BackendError, match=f"compute capability {capability}.*{message}"):
            plan(bundle, asked)
    else:
        assert plan(bundle, asked).request.capabilities == (capability,)


def test_TR_06_an_attention_model_in_half_runs_on_the_oldest_card(bundle_path) -> None:
    """It has no float32 products, as its exported file shows; a conversion cannot show it yet."""
    asked = BuildRequest(RTX, "fp16", capabilities=("7.5",))
    assert plan(Bundle.open(bundle_path("F4", "fp16")), asked).roles
    with pytest.raises(BackendError, match="shows when it is exported with --precision fp16"):
        plan(Bundle.open(bundle_path("F4")), asked)


def test_TR_06_one_card_among_several_is_enough_to_refuse(bundle_path) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    with pytest.raises(BackendError, match=r"capability 8\.7: .*--target tensorrt"):
        plan(bundle, BuildRequest(capabilities=("8.9", "8.7")))
    with pytest.raises(BackendError, match="builds for the one card of the machine"):
        plan(bundle, BuildRequest("tensorrt", capabilities=("8.9", "9.0")))
    assert plan(bundle, BuildRequest(capabilities=("8.0", "8.6", "8.9", "12.0", "12.1"))).roles


@pytest.mark.parametrize(
    ("dtype", "capability", "fits"),
    [
        ("float8e4m3fn", "8.6", False),
        ("float8e4m3fn", "8.9", True),
        ("float4e2m1", "8.9", False),
        ("float4e2m1", "12.0", True),
        ("int4", "8.0", True),
        ("int8", "8.6", True),
    ],
)
def test_TR_06_dtypes_of_a_quantised_graph(bundle_path, dtype, capability, fits) -> None:
    bundle = Bundle.open(bundle_path("F2"))
    found = graphfacts.GraphFacts((), (), frozenset({dtype}), (), ())
    asked = BuildRequest(RTX, "fp32", capabilities=(capability,), roles=("denoise",))
    if fits:
        assert plan(bundle, asked, {"denoise": found}).roles
    else:
        with pytest.raises(BackendError, match=f"has no {dtype}"):
            plan(bundle, asked, {"denoise": found})
