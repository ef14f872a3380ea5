"""The four values: what they refuse, what survives a round trip, and which ports a graph has."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_models import ATTENTION, MAMBA, MODELS, attention_layer, mamba_layer, model

from fixedstate.bundle import DecodeDefaults, Graph, Source
from fixedstate.errors import SpecError
from fixedstate.ports import DTYPES, Port, numpy_dtype, resolve_dim
from fixedstate.spec import (
    SINCE_SCHEMA_2,
    AttentionSizes,
    LayerSpec,
    Mamba1Sizes,
    Mamba2Sizes,
    ModelSpec,
)
from fixedstate.state import Precision, StatePort, StateSpec, graph_ports

MAMBA1 = LayerSpec("mamba1", Mamba1Sizes(32, 4, 2, 4), "forward")
WINDOW = attention_layer("forward", AttentionSizes(4, 2, 8, 8, window=16, sinks=3))
PLAIN = LayerSpec("none", None, mlp="plain", mlp_width=8)

SPECS: dict[str, ModelSpec] = {
    **MODELS,
    "every-kind": model(mamba_layer(), attention_layer(), MAMBA1, WINDOW, PLAIN, stop_ids=(2, 3)),
    "full": model(attention_layer(), objective="full", mask_id=None),
    "causal": model(attention_layer("forward"), objective="causal", mask_id=None, bos_id=1),
}


def through_json(value):
    return json.loads(json.dumps(value.to_dict(), allow_nan=False))


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_specs_survive_a_round_trip(name):
    """Through JSON text, tuples and nested sizes included; hash and equality too."""
    spec = SPECS[name]
    assert ModelSpec.from_dict(through_json(spec)) == spec
    assert hash(ModelSpec.from_dict(through_json(spec))) == hash(spec)
    for layer in spec.layers:
        assert LayerSpec.from_dict(through_json(layer)) == layer
    for precision in (Precision(), Precision("float16", "float32", "int8")):
        state = StateSpec.of(spec, precision)
        assert StateSpec.from_dict(json.loads(json.dumps(state.to_dict()))) == state
        assert Precision.from_dict(through_json(precision)) == precision


@given(
    heads=st.integers(1, 8),
    groups=st.integers(1, 4),
    d_conv=st.integers(1, 8),
    d_state=st.integers(1, 64),
    block_len=st.integers(7, 256),
    dt_max=st.none() | st.floats(0.1, 10),
)
def test_any_legal_model_survives_a_round_trip(heads, groups, d_conv, d_state, block_len, dt_max):
    """Sizes drawn from their whole ranges."""
    sizes = Mamba2Sizes(
        heads * groups * 8, heads * groups, 8, d_state, groups, d_conv, dt_max=dt_max
    )
    spec = model(mamba_layer(sizes=sizes), MAMBA1, block_len=block_len)
    assert ModelSpec.from_dict(through_json(spec)) == spec
    conv = StateSpec.of(spec).layer(0).get("conv")
    assert (conv is None) == (d_conv == 1)
    if conv is not None:
        assert conv.past.shape == ("B", sizes.d_inner + 2 * groups * d_state, d_conv - 1)


@pytest.mark.parametrize(
    "value",
    [
        Port("past_key_001", "float16", ("B", 2, "C", 8)),
        DecodeDefaults(steps=4, threshold=0.9, temperature=0.5, prefill_blocks=2, train_length=256),
        Source("name", "revision", "Apache-2.0", {"b": "2", "a": "1"}),
    ],
)
def test_small_values_survive_a_round_trip(value):
    """And refuse what they do not know."""
    assert type(value).from_dict(through_json(value)) == value
    with pytest.raises(SpecError, match=r"unknown keys \['colour'\]; known keys: "):
        type(value).from_dict(through_json(value) | {"colour": 1})
    first, *rest = through_json(value).items()
    with pytest.raises(SpecError, match=rf"lacks the keys \['{first[0]}'\]"):
        type(value).from_dict(dict(rest))


def test_graph_values_survive_a_round_trip():
    """The role is the key of the manifest, not a part of the value."""
    inputs, outputs = graph_ports(MODELS["F3"], StateSpec.of(MODELS["F3"]), "commit")
    graph = Graph("commit", "commit.onnx", "00", "1.18.0", inputs, outputs)
    assert Graph.from_dict("commit", through_json(graph)) == graph


VALUES = {
    "ModelSpec": (ModelSpec.from_dict, SPECS["every-kind"].to_dict()),
    "LayerSpec": (LayerSpec.from_dict, mamba_layer().to_dict()),
    "Precision": (Precision.from_dict, Precision().to_dict()),
    "StatePort": (StatePort.from_dict, StateSpec.of(MODELS["F2"]).ports[0].to_dict()),
    "port": (Port.from_dict, Port("x", "float32", ()).to_dict()),
    "Mamba2Sizes": (
        lambda sizes: LayerSpec.from_dict(mamba_layer().to_dict() | {"sizes": sizes}),
        mamba_layer().to_dict()["sizes"],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_unknown_and_missing_keys_are_refused(name):
    """By name, whichever key it is, and what is no mapping at all; schema 1 lacks the new ones."""
    read, data = VALUES[name]
    read(data)
    with pytest.raises(SpecError, match=rf"{name} holds unknown keys \['extra'\]"):
        read({**data, "extra": 0})
    for key in set(data) - set(SINCE_SCHEMA_2.get(name, ())):
        with pytest.raises(SpecError, match=rf"lacks the keys \['{key}'\]"):
            read({k: v for k, v in data.items() if k != key})
    for wrong in (None, 3, "text", [1]):
        with pytest.raises(SpecError, match="must be a mapping"):
            read(wrong)


def test_values_are_frozen():
    """A value never changes; another one is made."""
    for value, field in ((MODELS["F2"], "width"), (Precision(), "io"), (MAMBA, "heads")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, 1)


# --- refusals with their numbers ------------------------------------------------------------------

REFUSED = [
    (lambda: model(mamba_layer(), block_len=3), "block_len must be 4 to 256 tokens; got 3"),
    (lambda: model(mamba_layer(), block_len=257), "block_len must be 4 to 256 tokens; got 257"),
    (lambda: model(mamba_layer(), block_len=0), "block_len must be a positive int; got 0"),
    (lambda: model(mamba_layer(), block_len=True), "block_len must be a positive int; got True"),
    (lambda: model(mamba_layer(), block_len=8.0), "block_len must be a positive int; got 8.0"),
    (lambda: model(), "at least one layer; got none"),
    (lambda: model(mamba_layer(), vocab_size=41), "vocab_size 41 cannot exceed vocab_rows 40"),
    (lambda: model(mamba_layer(), mask_id=None), "objective 'block' needs a mask id"),
    (lambda: model(mamba_layer(), mask_id=40), r"mask_id 40 is outside 0..39"),
    (lambda: model(mamba_layer(), mask_id=-1), r"mask_id -1 is outside 0..39"),
    (lambda: model(mamba_layer(), stop_ids=(37,)), r"stop_ids 37 is outside 0..36"),
    (lambda: model(mamba_layer(), bos_id=-2), r"bos_id -2 is outside 0..36"),
    (lambda: model(mamba_layer(), stop_ids=(36,)), "mask_id 36 is also a stop id"),
    (lambda: model(mamba_layer(), objective="causal"), "'causal' needs forward layers only"),
    (lambda: model(mamba_layer(), objective="masked"), "objective 'masked' is unknown; use one of"),
    (lambda: model(mamba_layer(), commit_mask="all"), "commit_mask 'all' is unknown"),
    (lambda: model(mamba_layer(), norm="batch"), "norm 'batch' is unknown"),
    (
        lambda: model(mamba_layer(sizes=replace(MAMBA, d_conv=8)), block_len=6),
        "layer 0: d_conv 8 needs block_len >= 7; got 6",
    ),
    (lambda: replace(MAMBA, d_conv=9), "d_conv must be 1 to 8 taps; got 9"),
    (lambda: replace(MAMBA, d_conv=0), "d_conv must be a positive int; got 0"),
    (lambda: replace(MAMBA, heads=7), "d_inner 64 must be heads x head_dim = 7 x 8 = 56"),
    (lambda: replace(MAMBA, groups=3), "heads 8 must be a multiple of groups 3"),
    (lambda: replace(MAMBA, dt_min=2.0, dt_max=1.0), "0 <= 2.0 <= 1.0"),
    (lambda: replace(MAMBA, gated_norm="inside"), "gated_norm 'inside' is unknown"),
    (lambda: replace(ATTENTION, heads=5), "heads 5 must be a multiple of kv_heads 2"),
    (lambda: replace(ATTENTION, rotary_dim=7), "rotary_dim 7 must be even and between 0 and"),
    (lambda: replace(ATTENTION, rotary_dim=10), "between 0 and head_dim 8"),
    (lambda: replace(ATTENTION, rope_theta=0.0), "rope_theta must be positive; got 0.0"),
    (lambda: replace(ATTENTION, window=0), "window must be at least 1 token; got 0"),
    (lambda: replace(ATTENTION, sinks=2), "sinks 2 must be >= 0 and need a window"),
    (lambda: LayerSpec("mamba3", MAMBA), "mixer 'mamba3' is unknown; use one of attention"),
    (lambda: LayerSpec("mamba2", ATTENTION), "mixer 'mamba2' needs Mamba2Sizes"),
    (lambda: LayerSpec("none", MAMBA), "a layer without a mixer has no sizes"),
    (lambda: LayerSpec("mamba2", MAMBA, "sideways"), "direction 'sideways' is unknown"),
    (lambda: LayerSpec("mamba2", MAMBA, tied="most"), "tied 'most' is unknown"),
    (lambda: LayerSpec("mamba2", MAMBA, mlp="gated"), "mlp 'gated' does not go with mlp_width 0"),
    (lambda: LayerSpec("mamba2", MAMBA, mlp_width=8), "mlp 'none' does not go with mlp_width 8"),
    (lambda: LayerSpec("mamba2", MAMBA, norm_eps=0.0), "norm_eps must be positive; got 0.0"),
    (lambda: Port("x", "float64", ()), "dtype 'float64' is unknown; use one of float32"),
    (lambda: Port("x", "float32", ("Q",)), "dimension 'Q' is neither an int nor a symbol"),
    (lambda: Port("x", "float32", (-1,)), "port 'x' has the negative dimension -1"),
    (lambda: Precision(io="int64"), "io dtype 'int64' is none of float32, float16, bfloat16"),
    (lambda: Precision(kv="float8"), "kv format 'float8' is unknown"),
    (lambda: Precision.named("fp8"), "precision 'fp8' is unknown; use one of fp32, fp16"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_contradictions_are_refused_with_their_numbers(make, words):
    """What was given and what was expected, in one sentence."""
    with pytest.raises(SpecError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("block_len", [4, 16, 256])
def test_the_ends_of_the_ranges_are_legal(block_len):
    """4 to 256 tokens, 1 to 8 taps where the block is long enough."""
    for taps in (1, min(8, block_len + 1)):
        model(mamba_layer(sizes=replace(MAMBA, d_conv=taps)), block_len=block_len)


def test_state_ports_pair_by_their_suffix():
    """Two names that end differently would be swapped by a server."""
    good = StateSpec.of(MODELS["F2"]).ports[0]
    with pytest.raises(SpecError, match="must end alike"):
        replace(good, present=replace(good.present, name="present_conv_state_001"))
    for change in ({"kind": "gate"}, {"update": "add"}, {"scope": "global"}):
        with pytest.raises(SpecError, match="unknown kind, update or scope"):
            replace(good, **change)


# --- dimensions -----------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_products_of_a_symbol(factor, size):
    """``16n`` for n blocks, alone or in a shape, and in bytes."""
    assert resolve_dim(f"{factor}n", {"n": size}) == factor * size
    port = Port("x", "float16", ("B", f"{factor}n", 3))
    assert port.resolve(B=2, n=size) == (2, factor * size, 3)
    assert port.nbytes(B=2, n=size) == 2 * factor * size * 3 * 2


def test_a_symbol_needs_a_size():
    """Named, with what was given."""
    with pytest.raises(SpecError, match=r"'16n' needs a size for 'n'; given: \{'B': 1\}"):
        Port("x", "float32", ("B", "16n")).resolve(B=1)
    for wrong in ("", "n16", "16 n", "x", "1.5n", "-2n"):
        with pytest.raises(SpecError, match="neither an int nor a symbol"):
            resolve_dim(wrong, {"n": 1})


def test_dtypes_have_the_size_they_say():
    """bfloat16 is kept as uint16, which numpy has."""
    for name, size in DTYPES.items():
        assert numpy_dtype(name).itemsize == size
    assert numpy_dtype("bfloat16") == np.uint16


# --- StateSpec ------------------------------------------------------------------------------------


def test_state_of_every_kind_of_layer():
    """Names, shapes, dtypes and updates of the contract's table, in order of layer and kind."""
    spec = SPECS["every-kind"]
    state = StateSpec.of(spec, Precision("float16", "float32", "float16"))
    found = [(p.suffix, p.past.shape, p.present.shape, p.past.dtype, p.update) for p in state.ports]
    window = ("B", 2, 19, 8)
    assert found == [
        ("conv_state_000", ("B", 96, 3), ("B", 96, 3), "float16", "swap"),
        ("ssm_state_000", ("B", 8, 8, 8), ("B", 8, 8, 8), "float32", "swap"),
        ("key_001", ("B", 2, "C", 8), ("B", 2, "8n", 8), "float16", "append"),
        ("value_001", ("B", 2, "C", 8), ("B", 2, "8n", 8), "float16", "append"),
        ("conv_state_002", ("B", 32, 3), ("B", 32, 3), "float16", "swap"),
        ("ssm_state_002", ("B", 4, 32), ("B", 4, 32), "float32", "swap"),
        ("key_003", window, window, "float16", "swap"),
        ("value_003", window, window, "float16", "swap"),
    ]
    assert [p.past.name for p in state.ports] == [f"past_{p.suffix}" for p in state.ports]
    assert [p.present.name for p in state.ports] == [f"present_{p.suffix}" for p in state.ports]
    constant = 96 * 3 * 2 + 8 * 8 * 8 * 4 + 32 * 3 * 2 + 4 * 32 * 4 + 2 * (2 * 19 * 8 * 2)
    assert state.state_bytes() == constant
    assert state.state_bytes(rows=3) == 3 * constant
    assert state.kv_bytes_per_token() == 2 * 2 * 8 * 2
    assert {p.suffix for p in state.swapped} | {p.suffix for p in state.appended} == {
        p.suffix for p in state.ports
    }
    assert list(state.layer(1)) == ["key", "value"]
    assert state.layer(4) == {}


def test_layers_that_carry_nothing_have_no_ports():
    """Reverse layers, layers without mixer, and whole models without a cache."""
    spec = model(mamba_layer("reverse"), PLAIN, mamba_layer(sizes=replace(MAMBA, d_conv=1)))
    assert [port.suffix for port in StateSpec.of(spec).ports] == ["ssm_state_002"]
    assert StateSpec.of(SPECS["full"]).ports == ()


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_precisions_by_name(name):
    """Scan state is float32 whatever the rest is."""
    precision = Precision.named(name)
    assert precision.name == name
    assert precision.state == "float32"
    assert Precision("bfloat16", "float32", "bfloat16").name == "bf16"


# --- causal commits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "changes", "exact"),
    [
        ((mamba_layer("forward"), attention_layer("forward"), PLAIN), {}, True),
        ((mamba_layer("block"),), {}, False),
        ((mamba_layer("block"),), {"commit_reverse": False}, True),
        ((mamba_layer("reverse"), mamba_layer("forward")), {}, False),
        ((mamba_layer("reverse"), mamba_layer("forward")), {"commit_reverse": False}, True),
        ((attention_layer("block"),), {}, False),
        ((attention_layer("block"),), {"commit_mask": "causal"}, True),
        ((mamba_layer(), attention_layer()), {"commit_reverse": False}, False),
        (
            (mamba_layer(), attention_layer()),
            {"commit_reverse": False, "commit_mask": "causal"},
            True,
        ),
    ],
)
def test_where_a_commit_inside_a_block_is_exact(layers, changes, exact):
    """Only where nothing in the commit pass looks ahead."""
    assert model(*layers, **changes).causal_commit is exact


# --- graph_ports ----------------------------------------------------------------------------------


def names(spec: ModelSpec, role: str) -> tuple[list[str], list[str]]:
    inputs, outputs = graph_ports(spec, StateSpec.of(spec), role)
    return [port.name for port in inputs], [port.name for port in outputs]


CONV = "conv_state_000", "ssm_state_000"
KEYS = "key_001", "value_001"


def past(*suffixes: str) -> list[str]:
    return [f"past_{suffix}" for suffix in suffixes]


def present(*suffixes: str) -> list[str]:
    return [f"present_{suffix}" for suffix in suffixes]


def test_ports_of_a_pure_mamba_model():
    """No position is read, so none is listed."""
    spec = model(mamba_layer())
    assert names(spec, "denoise") == (["input_ids", *past(*CONV)], ["logits"])
    assert names(spec, "commit") == (["input_ids", *past(*CONV), "commit_length"], present(*CONV))
    assert names(spec, "commit_denoise") == (
        ["input_ids", *past(*CONV), "commit_length"],
        [*present(*CONV), "logits"],
    )


def test_commit_does_not_read_the_last_attention_layer():
    """Nothing behind its keys and values is carried, so its cache only matters to a denoise."""
    spec = model(mamba_layer(), attention_layer())
    both = (*CONV, *KEYS)
    assert names(spec, "denoise") == (["input_ids", *past(*both), "past_length"], ["logits"])
    assert names(spec, "commit") == (
        ["input_ids", *past(*CONV), "past_length", "commit_length"],
        present(*both),
    )
    assert names(spec, "commit_denoise") == (
        ["input_ids", *past(*both), "past_length", "commit_length"],
        [*present(*both), "logits"],
    )
    behind = model(mamba_layer(), attention_layer(), mamba_layer())
    assert "past_key_001" in names(behind, "commit")[0]
    stateless = model(mamba_layer(), attention_layer(), mamba_layer("reverse"), PLAIN)
    assert "past_key_001" not in names(stateless, "commit")[0]


@pytest.mark.parametrize(
    ("layers", "changes", "read"),
    [
        # keys carry a rotary position; without one nothing is read where nothing comes before
        ((attention_layer(),), {}, ["past_length"]),
        ((attention_layer(sizes=replace(ATTENTION, rotary_dim=0)),), {}, []),
        ((PLAIN, attention_layer(sizes=replace(ATTENTION, rotary_dim=0))), {}, []),
        ((attention_layer(), attention_layer()), {}, ["past_length", "commit_length"]),
        (
            (mamba_layer("reverse"), attention_layer(sizes=replace(ATTENTION, rotary_dim=0))),
            {},
            ["commit_length"],
        ),
        (
            (mamba_layer("reverse"), attention_layer(sizes=replace(ATTENTION, rotary_dim=0))),
            {"commit_reverse": False},
            [],
        ),
    ],
)
def test_lengths_are_listed_where_they_are_read(layers, changes, read):
    """A commit lists past_length and commit_length only where its result depends on them."""
    inputs, _ = names(model(*layers, **changes), "commit")
    assert [name for name in inputs if name.endswith("_length")] == read


@pytest.mark.parametrize("role", ["denoise", "commit", "commit_denoise"])
def test_shapes_are_in_the_symbols_of_the_role(role):
    """n blocks in a commit, m in a fused pass, L logits whatever m is."""
    spec = MODELS["F3"]
    inputs, outputs = graph_ports(spec, StateSpec.of(spec), role)
    ports = {port.name: port for port in (*inputs, *outputs)}
    tokens = {"denoise": 8, "commit": "8n", "commit_denoise": "8m"}[role]
    assert ports["input_ids"] == Port("input_ids", "int64", ("B", tokens))
    assert ports["past_length"] == Port("past_length", "int64", ("B",))
    if role != "denoise":
        assert ports["present_key_001"].shape == ("B", 2, tokens, 8)
        assert ports["present_ssm_state_000"].shape == ports["past_ssm_state_000"].shape
    if role != "commit":
        assert ports["logits"] == Port("logits", "float32", ("B", 8, 40))
    assert graph_ports(spec, StateSpec.of(spec), f"{role}@ort-cpu") == (inputs, outputs)
    half = graph_ports(spec, StateSpec.of(spec, Precision.named("fp16")), role)
    assert [port.name for port in half[0]] == [port.name for port in inputs]
    assert all(p.dtype == "float32" for p in half[1] if p.name == "logits")


def test_ports_of_a_model_without_a_cache():
    """One graph, whole sequences, no state."""
    spec = SPECS["full"]
    assert names(spec, "full") == (["input_ids"], ["logits"])
    (ids,), (logits,) = graph_ports(spec, StateSpec.of(spec), "full")
    assert (ids.shape, logits.shape) == (("B", "T"), ("B", "T", 40))


def test_roles_that_a_model_does_not_have():
    """Objective and role go together; an unknown role is named."""
    for name, role in (("full", "denoise"), ("full", "commit"), ("F2", "full")):
        with pytest.raises(SpecError, match=f"has no graph '{role}'"):
            graph_ports(SPECS[name], StateSpec.of(SPECS[name]), role)
    with pytest.raises(SpecError, match="graph role 'prefill' is unknown; use one of denoise"):
        graph_ports(MODELS["F2"], StateSpec.of(MODELS["F2"]), "prefill")
