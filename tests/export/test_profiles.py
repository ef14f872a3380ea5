"""The plan of an engine: profiles for every input, limits, kernels or bodies, bytes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sample_models import MODELS, attention_layer, mamba_layer, model, selective_layer

from fixedstate.bundle import WEIGHTS, Bundle, DecodeDefaults, Graph, Source
from fixedstate.errors import BackendError, BundleError, ExportError, UsageError
from fixedstate.export import graphfacts, profiles, stored, targets
from fixedstate.export.activations import inner_tensors
from fixedstate.export.checkpoint import random_tensors
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.graphfacts import GraphFacts
from fixedstate.export.pipeline import write_bundle
from fixedstate.export.pluginuse import NodeUse
from fixedstate.export.profiles import (
    BuildRequest,
    Range,
    plan,
    profile_of,
    set_profiles,
    symbol_ranges,
)
from fixedstate.export.stored import StoredWeights
from fixedstate.export.trace import without_weights
from fixedstate.plugins.library import tensorrt_rtx
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.ports import Port
from fixedstate.spec import AttentionSizes, Mamba1Sizes, Mamba2Sizes
from fixedstate.state import Precision, StateSpec, graph_ports

WIDE = Mamba2Sizes(d_inner=64, heads=4, head_dim=16, d_state=16, groups=2, d_conv=4)
WIDE_SCAN = Mamba1Sizes(d_inner=32, d_state=16, dt_rank=2, d_conv=4)
WINDOW = AttentionSizes(heads=4, kv_heads=2, head_dim=8, rotary_dim=8, window=12, sinks=2)
SPECS = {
    **MODELS,
    "window": model(attention_layer(sizes=WINDOW), mamba_layer("forward")),
    "shifted": model(mamba_layer("forward"), attention_layer("forward"), logit_shift=True),
    "steps": model(mamba_layer(), self_conditioning_width=16),
    "full": model(mamba_layer("block"), attention_layer(), objective="full"),
    "wide": model(
        mamba_layer(sizes=WIDE),
        selective_layer("block", sizes=WIDE_SCAN),
        attention_layer(),
        mamba_layer("reverse", sizes=WIDE),
    ),
}
ROLES = ("denoise", "commit", "commit_denoise", "denoise_top_k", "commit_denoise_top_k")


def roles_of(spec) -> tuple[str, ...]:
    return ("full",) if spec.objective == "full" else ROLES


def bundle_of(spec, folder: Path, precision: str = "fp32", roles=None) -> Bundle:
    """A bundle as a value: what a plan reads of it, without graphs on disk."""
    has = Precision.named(precision)
    state = StateSpec.of(spec, has)
    graphs = {
        role: Graph(role, f"{role}.onnx", "", "1.18.0", *graph_ports(spec, state, role))
        for role in (roles or roles_of(spec))
    }
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_bytes(b"0")
    return Bundle(folder, spec, has, state, graphs, "", DecodeDefaults(), {}, Source())


NOTHING = GraphFacts((), (), frozenset({"float32"}), (), ())


def planned(bundle: Bundle, facts: GraphFacts = NOTHING, **asked):
    """A plan from facts that are given rather than read."""
    request = BuildRequest(**asked)
    return plan(bundle, request, dict.fromkeys(bundle.graphs, facts))


@pytest.fixture
def made(tmp_path):
    def make(name: str, precision: str = "fp32", roles=None) -> Bundle:
        return bundle_of(SPECS[name], tmp_path / name, precision, roles)

    return make


@pytest.fixture(scope="session")
def wide(tmp_path_factory) -> Callable[[str], Bundle]:
    """The bundle of a model whose every size the kernels take, by precision; not compared."""
    root = tmp_path_factory.mktemp("wide")
    spec = SPECS["wide"]
    tensors = random_tensors(spec, seed=7)

    @functools.cache
    def opened(precision: str) -> Bundle:
        chosen, folder = Precision.named(precision), root / precision
        folder.mkdir()
        write_bundle(
            folder,
            without_weights(spec, lambda given: Denoiser(spec, given, chosen, TRACED)),
            StoredWeights(tensors, chosen),
            ["denoise", "commit"],
            lambda said: None,
            decode=DecodeDefaults(),
            files={},
            source=Source(),
        )
        return Bundle.open(folder)

    return opened


# --- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1:1:8", (1, 1, 8)), ("8", (8, 8, 8)), ("2:2:2", (2, 2, 2)), ("1:7:2147483647", None)],
)
def test_ranges(text: str, expected) -> None:
    found = Range.parse(text)
    assert (found.least, found.usual, found.most) == (expected or (1, 7, 2**31 - 1))


BAD = [
    "",
    "a",
    "1:2",
    "1:2:3:4",
    "1:2:",
    " 1",
    "1:2:3\n",
    "+1",
    "-1",
    "-1:1:2",
    "1.0",
    "1e3",
    "0",
    "0:1:2",
    "2:1:3",
    "1:3:2",
    "3:2:1",
    "1:1:2147483648",
    "99999999999999999999",
    "1" * 5000,
    "１",
    "0x10",
    "1_0",
]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_range_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Range.parse(text, "--batch")
    assert str(caught.value).startswith(f"--batch {text!r}")


@given(st.integers(-3, 2**40), st.integers(-3, 2**40), st.integers(-3, 2**40))
def test_a_range_is_ordered_or_refused(least: int, usual: int, most: int) -> None:
    if 1 <= least <= usual <= most < 2**31:
        one = Range(least, usual, most)
        assert Range.parse(str(one)) == one
    else:
        with pytest.raises(UsageError, match=str(least)):
            Range(least, usual, most)


@pytest.mark.parametrize("sizes", [(True, 1, 2), (1, 1.0, 2), ("1", 1, 2), (1, 1, None)])
def test_a_range_takes_ints(sizes) -> None:
    with pytest.raises(UsageError, match="whole numbers"):
        Range(*sizes)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"target": "openvino"}, "target 'openvino' is unknown"),
        ({"precision": "int8"}, "precision 'int8' is unknown"),
        ({"plugins": "some"}, "plugins 'some' is unknown"),
        ({"batch": 8}, "batch must be a Range; got 8"),
        ({"capabilities": ()}, "no compute capability"),
        ({"capabilities": ("sm_89",)}, "'sm_89' is not of the form 8.9"),
        ({"capabilities": ("89",)}, "'89' is not of the form"),
        ({"capabilities": ("8.9\n",)}, "is not of the form"),
        ({"capabilities": ("8.9", "8.9")}, "names one twice"),
        ({"roles": ("commit", "commit")}, "names one twice"),
        ({"roles": ("commit@ort-cpu",)}, "without its target"),
        ({"precision": "fp32", "fp32_layers": (0,)}, "every layer is float32"),
        ({"fp32_layers": (-1,)}, "fp32_layers holds -1"),
        ({"fp32_layers": (True,)}, "fp32_layers holds True"),
    ],
)
def test_a_request_that_is_none(asked, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildRequest(**asked)


# --- profiles -------------------------------------------------------------------------------------


@st.composite
def ranges(draw, most: int = 64) -> Range:
    return Range(*sorted(draw(st.lists(st.integers(1, most), min_size=3, max_size=3))))


@given(
    name=st.sampled_from(sorted(SPECS)),
    batch=ranges(),
    blocks=ranges(),
    capacity=ranges(1500),
    precision=st.sampled_from(["fp32", "fp16", "bf16"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_dynamic_input_has_a_profile(
    tmp_path, name: str, batch: Range, blocks: Range, capacity: Range, precision: str
) -> None:
    """For whatever sizes: planned with shapes in order, or refused with a reason."""
    bundle = bundle_of(SPECS[name], tmp_path / name)
    asked = {"batch": batch, "blocks": blocks, "capacity": capacity, "precision": precision}
    spec = bundle.spec
    room = capacity.most >= spec.block_len * max(1, blocks.most * (spec.objective != "full"))
    if (bundle.state.appended or spec.objective == "full") and not room:
        with pytest.raises(UsageError, match="--capacity"):
            planned(bundle, roles=tuple(bundle.graphs), **asked)
        return
    found = planned(bundle, roles=tuple(bundle.graphs), **asked)
    assert list(found.roles) == list(bundle.graphs)
    for role, one in found.roles.items():
        assert (one.inputs, one.outputs) == graph_ports(bundle.spec, found.state, role)
        assert len(one.names) == len(one.profiles) == len(set(one.names)) >= 1
        dynamic = [port for port in one.inputs if any(isinstance(d, str) for d in port.shape)]
        for profile in one.profiles:
            assert list(profile) == [port.name for port in dynamic]
            for port in dynamic:
                least, usual, most = profile[port.name]
                assert len(least) == len(usual) == len(most) == len(port.shape)
                for axis, dim in enumerate(port.shape):
                    sizes = least[axis], usual[axis], most[axis]
                    assert 1 <= sizes[0] <= sizes[1] <= sizes[2] < 2**31
                    if isinstance(dim, int):
                        assert set(sizes) == {dim}
                    if dim == "B":
                        assert sizes == (batch.least, batch.usual, batch.most)
                    if dim == "R":
                        assert sizes == (1, bundle.spec.block_len, bundle.spec.block_len)
                    if dim in ("C", "T"):
                        assert sizes == (capacity.least, capacity.usual, capacity.most)
    json.dumps(found.to_dict())
    assert found.text()


def tokens(one, index: int) -> list[int]:
    return [shape[1] for shape in one.profiles[index]["input_ids"]]


def test_a_fused_graph_has_a_profile_for_each_use(made) -> None:
    found = planned(made("F3"), blocks=Range(1, 4, 16))
    one = found.roles["commit_denoise"]
    assert one.names == ("denoise", "fused", "prefill")
    assert [tokens(one, i) for i in range(3)] == [[8, 8, 8], [16, 16, 16], [8, 32, 128]]


@pytest.mark.parametrize("blocks", ["1", "2"])
def test_a_profile_that_another_covers_is_left_out(made, blocks: str) -> None:
    found = planned(made("F2"), roles=("commit_denoise",), blocks=Range.parse(blocks))
    assert found.roles["commit_denoise"].names == ("denoise", "fused")


def test_a_finished_block_can_always_be_committed(made) -> None:
    found = planned(made("F2"), roles=("denoise", "commit"), blocks=Range(4, 4, 8))
    one = found.roles["commit"]
    assert one.names == ("block", "prefill")
    assert [tokens(one, i) for i in range(2)] == [[8, 8, 8], [32, 32, 64]]
    found = planned(made("F2"), roles=("denoise", "commit"), blocks=Range(1, 4, 8))
    assert found.roles["commit"].names == ("prefill",)


def test_static_inputs_have_none() -> None:
    ports = (Port("fixed", "float32", (2, 3)), Port("x", "float32", ("B", "16n", 3)))
    sizes = {"B": Range(1, 2, 4), "n": Range(1, 1, 2)}
    assert profile_of(ports, sizes) == {"x": ((1, 16, 3), (2, 16, 3), (4, 32, 3))}


def test_default_roles_are_those_decoding_opens(made) -> None:
    assert list(planned(made("F3")).roles) == ["denoise", "commit_denoise"]
    pair = made("F3", roles=("denoise", "commit"))
    assert list(planned(pair).roles) == ["denoise", "commit"]
    assert list(planned(made("full")).roles) == ["full"]
    whole = planned(made("full"))
    assert whole.notes == ()
    assert whole.request.capacity == Range(8, 1024, 4096)  # a block of it has 8
    asked = planned(made("full"), capacity=Range(256, 1024, 4096))
    (told,) = asked.notes
    assert told.startswith("sequences of fewer than 256 tokens will be refused: give --capacity")
    assert planned(made("full"), capacity=Range(8, 64, 64)).notes == ()


def test_a_copy_for_the_target_is_taken(made) -> None:
    bundle = made("F2", roles=("denoise", "commit", "commit@tensorrt"))
    built = planned(bundle, target="tensorrt", capabilities=("9.0",), roles=("denoise", "commit"))
    assert built.roles["commit"].file == "commit@tensorrt.onnx"
    built = planned(bundle, roles=("denoise", "commit"))
    assert built.roles["commit"].file == "commit.onnx"


def test_a_role_that_the_bundle_lacks(made) -> None:
    with pytest.raises(BundleError, match="has no graph 'commit_denoise'"):
        planned(made("F2", roles=("denoise", "commit")), roles=("commit_denoise",))


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "io"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")]
)
def test_the_state_is_that_of_the_engine(made, precision: str, io: str) -> None:
    found = planned(made("F3"), precision=precision)
    assert found.precision == Precision(io, "float32", io)
    dtypes = {port.kind: port.past.dtype for port in found.state.ports}
    assert dtypes == {"conv": io, "ssm": "float32", "key": io, "value": io}
    assert found.roles["denoise"].outputs[-1].dtype == "float32"


def test_what_was_rounded_is_not_built_finer(made) -> None:
    bundle = made("F2", "fp16")
    assert planned(bundle, precision="fp16").precision == Precision.named("fp16")
    for other in ("fp32", "bf16"):
        with pytest.raises(BackendError, match=f"is fp16 and cannot be built as {other}"):
            planned(bundle, precision=other)
    with pytest.raises(BackendError, match="rounded does not come back"):
        planned(bundle, precision="fp16", fp32_layers=(0,))


def test_layers_that_are_not_there(made) -> None:
    with pytest.raises(UsageError, match="layer 3; the model has layers 0 to 2"):
        planned(made("F3"), fp32_layers=(1, 3))


# --- limits ---------------------------------------------------------------------------------------


def test_a_block_that_no_buffer_holds(made) -> None:
    with pytest.raises(UsageError, match="hold no block of 8: raise it to 8"):
        planned(made("F3"), capacity=Range(1, 1, 7), blocks=profiles.ONE)
    with pytest.raises(UsageError, match="lower --blocks to 12 or raise --capacity to 128"):
        planned(made("F3"), capacity=Range(1, 1, 100), blocks=Range(1, 1, 16))
    planned(made("F3"), capacity=Range(1, 1, 128), blocks=Range(1, 1, 16))
    with pytest.raises(UsageError, match="sequences of at most 7 tokens"):
        planned(made("full"), capacity=Range(1, 1, 7))
    found = planned(made("F2"), capacity=Range(1, 1, 1))  # it keeps no columns
    assert "capacity is not used" in found.text()


def test_tensors_that_cannot_be_counted(made) -> None:
    """Just below the limit it is planned, at it it is refused with name, shape and remedy."""
    spec = SPECS["F2"]
    largest = max(
        prod(inner.shape)
        for inner in inner_tensors(spec, StateSpec.of(spec), "denoise", {"B": 1, "R": 8}, "float16")
    )
    fits = (2**31 - 1) // largest
    bundle = made("F2", roles=("denoise", "commit"))
    planned(bundle, roles=("denoise",), batch=Range(1, 1, fits))
    with pytest.raises(BackendError, match=r"denoise: layer 0: .* elements.*: lower --batch$"):
        planned(bundle, roles=("denoise",), batch=Range(1, 1, fits + 1))


@given(batch=ranges(2**24), blocks=ranges(2**20), capacity=ranges(2**30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_port_of_a_plan_is_too_large(tmp_path, batch, blocks, capacity) -> None:
    bundle = bundle_of(SPECS["F3"], tmp_path / "F3")
    asked = {"roles": ("denoise", "commit"), "batch": batch, "blocks": blocks, "capacity": capacity}
    if capacity.most < 8 or blocks.most * 8 > capacity.most:
        with pytest.raises(UsageError, match="--capacity"):
            planned(bundle, **asked)
        return
    try:
        found = planned(bundle, **asked)
    except BackendError:
        with pytest.raises(BackendError, match=r"TensorRT counts at most.*: lower --"):
            planned(bundle, **asked)
        return
    most = {"B": batch.most, "n": blocks.most, "C": capacity.most, "R": 8}
    for one in found.roles.values():
        assert all(prod(port.resolve(**most)) < 2**31 for port in one.ports)


def test_the_largest_keys_are_refused_by_name(made) -> None:
    with pytest.raises(BackendError) as caught:
        planned(made("F4"), roles=("denoise",), batch=Range(1, 1, 64), capacity=Range(1, 1, 2**21))
    assert "64 x 4 x 8 x 2097160" in str(caught.value)  # scores: heads, block, columns and block
    assert "lower --batch or --capacity" in str(caught.value)


# --- what comes to what ---------------------------------------------------------------------------


def test_bytes(made) -> None:
    found = planned(
        made("F3"), precision="fp16", batch=Range(1, 2, 4), capacity=Range(256, 256, 512)
    )
    state = StateSpec.of(SPECS["F3"], Precision.named("fp16"))
    assert found.state_bytes == 2 * 4 * state.state_bytes()
    assert found.kv_bytes == 4 * 512 * (2 * 2 * 8) * 2  # keys and values, 2 heads of 8, 2 bytes
    assert found.total == (found.weights + found.state_bytes + found.kv_bytes + found.activations)
    stepped = planned(made("steps"), precision="fp32")
    soft = 2 * 8 * 32 * 4  # two buffers of one block of embeddings
    assert stepped.state_bytes == 2 * StateSpec.of(SPECS["steps"]).state_bytes() + soft


def test_weights_of_a_conversion_are_those_of_the_export(wide) -> None:
    """Weights in fp16 are foreseen to the byte, and those of an fp16 bundle are those on disk."""
    halves = plan(wide("fp16"), BuildRequest(precision="fp16"))
    foreseen = plan(wide("fp32"), BuildRequest(precision="fp16"))
    whole = plan(wide("fp32"), BuildRequest(precision="fp32"))
    assert halves.weights == foreseen.weights < whole.weights
    kept = plan(wide("fp32"), BuildRequest(precision="bf16", fp32_layers=(0, 1, 2, 3)))
    assert foreseen.weights < kept.weights < whole.weights
    with safe_open(wide("fp16").path / WEIGHTS, "numpy") as file:
        held = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    assert halves.roles["denoise"].weights == held  # a denoise pass reads them all
    assert halves.roles["commit"].weights < held


def test_islands_are_the_exporter_s() -> None:
    assert profiles.is_island is stored.is_island


# --- kernels or bodies ----------------------------------------------------------------------------


def verdicts(found) -> dict[str, str]:
    return {op: text for one in found.roles.values() for op, _, text in one.kernels}


def test_every_operator_becomes_a_plugin_where_the_kernels_take_it(wide) -> None:
    asked = {"target": "tensorrt", "capabilities": ("9.0",), "precision": "fp16"}
    found = plan(wide("fp32"), BuildRequest(**asked))
    assert all(text.startswith("plugin: ") for text in verdicts(found).values())
    assert verdicts(found)["SsdBlockDenoise"] == "plugin: l32sp16w4, l32sp32w4"
    counts = {op: count for op, count, _ in found.roles["denoise"].kernels}
    assert counts["CausalConvReverse"] == 3  # two block layers, one reverse layer
    assert {one.name for one in found.needs} == set(OPS)
    for one in found.needs:
        spec = OPS[one.name]
        labels = {tile.label: spec.text(tile, "float16").sha256 for tile in spec.tiles}
        assert one.texts.items() <= labels.items()
        assert one.texts
    rtx = plan(wide("fp16"), BuildRequest(precision="fp16", plugins="required"))
    assert verdicts(rtx)["SsdBlockDenoise"] == "plugin: l32sp16w4"  # it has no tactics to time
    assert "needs this package and Python where it runs" in rtx.text()


def test_reasons_for_a_body(wide) -> None:
    asked = {"target": "tensorrt", "capabilities": ("9.0",), "precision": "fp16"}
    rows = {"batch": Range(1, 1, 65536), "capacity": Range(128, 128, 128), "roles": ("denoise",)}
    many = plan(wide("fp16"), BuildRequest(**rows, **asked))
    assert verdicts(many)["SsdBlockDenoise"] == (
        "body: 65536 thread blocks along z: a launch takes at most 65535"
    )
    single = plan(wide("fp32"), BuildRequest(**{**asked, "precision": "fp32"}))
    assert set(verdicts(single).values()) == {
        "body: io dtype float32: the kernels take float16 and bfloat16"
    }
    old = plan(wide("fp16"), BuildRequest(**{**asked, "capabilities": ("7.5",)}))
    assert "compute capability 7.5: the kernels run on 8.0 and newer" in old.text()
    off = plan(wide("fp16"), BuildRequest(plugins="none", **asked))
    assert set(verdicts(off).values()) == {"body: plugins are off"}
    auto = plan(wide("fp16"), BuildRequest(precision="fp16"))
    assert set(verdicts(auto).values()) == {
        "body: no plugins on tensorrt-rtx unless they are required"
    }
    assert not any(one.needs for one in (single, old, off, auto))


def test_required_plugins_name_every_obstacle(bundle_path, wide) -> None:
    narrow = Bundle.open(bundle_path("F3"))
    with pytest.raises(BackendError) as caught:
        plan(narrow, BuildRequest(plugins="required", roles=("denoise", "commit")))
    assert "denoise: 2 x SsdBlockDenoise: P = 8: the kernels take multiples of 16" in str(
        caught.value
    )
    assert "commit: 2 x SsdBlockCommit" in str(caught.value)
    assert "CausalConv" not in str(caught.value)  # 96 channels
    with pytest.raises(BackendError, match="denoise: 1 x SsdBlockDenoise: io dtype float32"):
        plan(wide("fp32"), BuildRequest(plugins="required", fp32_layers=(0,)))


def test_a_layer_that_stays_float32_runs_the_body(wide) -> None:
    asked = BuildRequest(target="tensorrt", capabilities=("9.0",), fp32_layers=(1,))
    rows = plan(wide("fp32"), asked).roles["denoise"].kernels
    split = [(op, count, text[:4]) for op, count, text in rows]
    assert ("SelectiveScanDenoise", 1, "body") in split
    assert ("CausalConvDenoise", 1, "body") in split
    assert ("CausalConvDenoise", 1, "plug") in split
    assert ("SsdBlockDenoise", 1, "plug") in split


def test_nodes_are_of_the_layers_they_stand_in(wide) -> None:
    nodes = graphfacts.nodes_of(wide("fp16"), "commit")
    assert [(one.op, one.layer) for one in nodes] == [
        ("CausalConvCommit", 0),
        ("SsdBlockCommit", 0),
        ("CausalConvReverse", 0),
        ("SsdBlockReverse", 0),
        ("CausalConvCommit", 1),
        ("SelectiveScanCommit", 1),
        ("CausalConvReverse", 1),
        ("SelectiveScanReverse", 1),
    ]
    ssd = nodes[1]
    assert ssd.shapes[0] == ("B", "8n", 4, 16)
    assert ssd.shapes[-1] == ("B", 4, 16, 16)
    assert ssd.types == ("float16", "float32", "float32", "float16", "float16", "float32") + (
        "float32",
    )
    assert ssd.attributes["block_len"] == 8


def test_sizes_that_a_graph_does_not_tell(made) -> None:
    """Tokens are those of the pass; any other unknown size is an error, not a guess."""
    attributes = {"plugin_namespace": DOMAIN, "plugin_version": "1", "block_len": 8}
    unknown = ("B", "unk__1", 16)
    shapes = (unknown, (16, 4), (16,), ("B", 16, 3))
    node = NodeUse("CausalConvDenoise", "n", attributes, shapes, ("float16",) * 4, 0)
    facts = replace(NOTHING, nodes=(node,))
    asked = {"target": "tensorrt", "capabilities": ("9.0",), "roles": ("denoise",)}
    found = planned(made("F2"), facts, **asked)
    assert verdicts(found) == {"CausalConvDenoise": "plugin: t16c64w4, t32c32w4"}
    lost = replace(node, shapes=(("B", "unk__1", None), *shapes[1:]))
    with pytest.raises(BackendError, match="size C of input 'x' is not known"):
        planned(made("F2"), replace(NOTHING, nodes=(lost,)), **asked)
    wrong = replace(node, shapes=(("B", "unk__1", 32), *shapes[1:]))
    with pytest.raises(BackendError, match="C is 16 in input 'weight' and 32 in an earlier one"):
        planned(made("F2"), replace(NOTHING, nodes=(wrong,)), **asked)


def test_what_is_stored_in_fewer_bits_is_built_as_it_is(made) -> None:
    bundle = made("F3")
    precision = Precision(state="int8row", kv="kivi4")
    stored = replace(bundle, precision=precision, state=StateSpec.of(bundle.spec, precision))
    half = planned(stored, precision="fp16").precision
    assert half == Precision(io="float16", state="int8row", kv="kivi4")
    assert planned(stored, precision="fp32").precision == precision
    with pytest.raises(UsageError, match="are multiples of 8: give such"):
        planned(stored, precision="fp32", capacity=Range(12, 16, 64))


def test_what_a_graph_has_wrong_is_refused(made) -> None:
    facts = replace(NOTHING, problems=("graph input 'x' decides a shape",))
    with pytest.raises(BackendError, match="denoise: graph input 'x' decides a shape"):
        planned(made("F2"), facts)


def test_an_engine_that_cannot_decode_says_so(made) -> None:
    assert "it has no commit pass" in planned(made("F2"), roles=("denoise",)).text()
    assert "it has no denoise pass" in planned(made("F2"), roles=("commit",)).text()
    for roles in (("denoise", "commit"), ("commit_denoise",), ("denoise_top_k", "commit")):
        assert "cannot decode" not in planned(made("F2"), roles=roles).text()


def test_the_text_of_a_plan(wide) -> None:
    found = plan(wide("fp16"), BuildRequest(batch=Range(1, 2, 8), builder_flags=("REFIT",)))
    text = found.text()
    for part in (
        "target     tensorrt-rtx",
        "8.6 (Ampere), 8.9 (Ada), 12.0 (Blackwell)",
        "io float16, state float32, kv float16",
        "STRONGLY_TYPED, REFIT",
        "past_key_002 and 1 alike",
        "8x2x4096x8",
        "Memory of 8 rows on the device",
        f"{found.total:,}",
    ):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())


# --- purity and the real product ------------------------------------------------------------------


def test_planning_needs_neither_torch_nor_onnx() -> None:
    code = (
        "import sys; from fixedstate.export import profiles;"
        "heavy = {'torch', 'onnx', 'onnx_ir', 'tensorrt', 'tensorrt_rtx', 'tensorrt_rtx_bindings',"
        " 'onnxruntime', 'triton'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_capabilities_are_those_of_the_product() -> None:
    """The table against the enumeration of the TensorRT-RTX that is installed."""
    members = tensorrt_rtx().ComputeCapability.__members__
    numbers = {int(value) for value in members.values() if int(value) > 1}
    written = {int(one.replace(".", "")) for one in targets.capabilities_of(targets.RTX)}
    assert numbers == written


def test_flags_are_those_of_the_product() -> None:
    assert set(targets.FLAGS) <= set(tensorrt_rtx().BuilderFlag.__members__)
    assert "TF32" in tensorrt_rtx().BuilderFlag.__members__


class Quiet:
    """Builder and configuration of TensorRT-RTX, without a card."""

    def __init__(self) -> None:
        trt = tensorrt_rtx()
        self.log = trt.Logger(trt.Logger.INTERNAL_ERROR)
        self.builder = trt.Builder(self.log)
        self.config = self.builder.create_builder_config()


def test_the_product_takes_the_profiles(made) -> None:
    found = planned(made("F3"), batch=Range(1, 2, 8))
    one = found.roles["commit_denoise"]
    real = Quiet()
    set_profiles(real.builder, real.config, one)
    assert real.config.num_optimization_profiles == 3


def test_a_profile_that_the_product_refuses(made) -> None:
    one = planned(made("F3"), batch=Range(1, 2, 8)).roles["denoise"]
    broken = replace(one, profiles=({"input_ids": ((4, 8), (2, 8), (1, 8))},))
    real = Quiet()
    with pytest.raises(BackendError, match="denoise: TensorRT"):
        set_profiles(real.builder, real.config, broken)


def test_facts_leave_the_graph_alone(wide) -> None:
    file = wide("fp16").path / "commit.onnx"
    graph = ir.load(file)
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    facts = graphfacts.facts(graph, values=True)
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before
    assert facts == graphfacts.read(wide("fp16"), "commit")
    assert not facts.problems
    assert facts.float32_products  # the scan's islands
    names = {weight.name for weight in facts.weights}
    assert {"embedding.weight", "layers.0.mixer.A"} <= names
    assert "head.weight" not in names  # a commit has none


def test_a_graph_whose_types_are_unknown_is_refused() -> None:
    x = ir.Value(name="x", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("NoSuchOperator", [x])
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    with pytest.raises(ExportError, match="NoSuchOperator"):
        graphfacts.facts(ir.Model(graph, ir_version=10))


def test_a_file_that_is_no_graph(made) -> None:
    bundle = made("F2")
    (bundle.path / "denoise.onnx").write_bytes(b"\xff" * 64)
    with pytest.raises(BundleError, match="is no ONNX graph"):
        plan(bundle, BuildRequest(roles=("denoise",)))


def test_symbols_stay_inside_their_roles() -> None:
    spec = SPECS["F3"]
    for role in ROLES:
        for one in symbol_ranges(spec, role, BuildRequest()).values():
            assert one["R"] == Range(1, 8, 8)
            assert {"B", "C", "R"} <= set(one)


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=4).map(tuple), min_size=4, max_size=4).map(tuple)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_nodes_end_in_an_error_of_ours(tmp_path, shapes) -> None:
    """Whatever shapes a graph gives a node, it is planned or refused by name."""
    bundle = bundle_of(SPECS["F2"], tmp_path / "F2")
    attributes = {"plugin_namespace": DOMAIN, "plugin_version": "1", "block_len": 8}
    node = NodeUse("CausalConvDenoise", "n", attributes, shapes, ("float16",) * 4, 0)
    facts = replace(NOTHING, nodes=(node,))
    asked = {"target": "tensorrt", "capabilities": ("9.0",), "roles": ("denoise",)}
    x, weight, bias, state = shapes
    right = (
        [len(one) for one in shapes] == [3, 2, 1, 3]
        and x[2] == weight[0] == bias[0] == state[1] > 0
        and weight[1] == state[2] + 1 > 1
        and x[0] == state[0] > 0
        and x[1] == 8
    )
    if right:
        assert list(verdicts(planned(bundle, facts, **asked))) == ["CausalConvDenoise"]
    else:
        with pytest.raises(BackendError, match="denoise: CausalConvDenoise"):
            planned(bundle, facts, **asked)
