"""Engine folders: what opens, what is refused in which words, what survives a round trip."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_engine import (
    AOT,
    CHECK,
    HYBRID,
    LEVELS,
    LIBRARY,
    ROLES,
    edit,
    fill_engine,
    identity_of,
    plans_of,
    precision_of,
    profile_of,
    sealed,
    sha,
    write_placeholder_bundle,
)

from fixedstate.bundle import Bundle, sha256_of, staged_folder
from fixedstate.errors import BackendError, BundleError, CapacityError, SpecError
from fixedstate.ports import Port
from fixedstate.runtime.enginefile import MANIFEST, EngineFolder, Plan, plan_ports, write_engine
from fixedstate.runtime.identity import (
    HARDWARE,
    PLUGIN_KINDS,
    PRECISIONS,
    SCHEMA,
    Identity,
    PluginUse,
)
from fixedstate.spec import LayerSpec
from fixedstate.state import StateSpec

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "schema-2" / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return write_placeholder_bundle(tmp_path_factory.mktemp("bundles") / "my.bundle")


@pytest.fixture(scope="module")
def made(tmp_path_factory, bundle) -> Path:
    """An engine of every role, with a plugin library; not to be changed."""
    folder = tmp_path_factory.mktemp("engines") / "my.engine"
    with staged_folder(folder) as staging:
        fill_engine(staging, bundle, identity_of(bundle, plugins=(LIBRARY,)))
    return folder


@pytest.fixture
def engine(tmp_path, made) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(made, tmp_path / "my.engine")


def refusal(folder: Path, **options) -> str:
    """What opening says: one sentence that names the place."""
    with pytest.raises(BundleError) as caught:
        EngineFolder.open(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


# --- what opens -----------------------------------------------------------------------------------


def test_an_untouched_copy_opens(engine, bundle):
    """With all that decoding needs; sealing it again changes nothing."""
    opened = EngineFolder.open(engine)
    assert opened.digest == sha256_of(engine / MANIFEST)
    assert opened.manifest() == (engine / MANIFEST).read_bytes()
    edit(engine, lambda data: None)
    assert EngineFolder.open(engine) == opened
    assert set(opened.hashes()) | {MANIFEST} == set(os.listdir(engine))
    assert (opened.spec, opened.decode, opened.source) == (HYBRID, bundle.decode, bundle.source)
    assert opened.state == StateSpec.of(HYBRID, precision_of("fp16"))
    assert set(opened.plans) == set(ROLES)
    assert opened.check == CHECK
    assert opened.identity.bundle == bundle.digest
    assert (engine / "tokenizer.json").read_bytes() == (bundle.path / "tokenizer.json").read_bytes()


def test_ports_have_the_dtypes_of_the_engine(made):
    """Activations and keys in half precision, scan state and scores in float32."""
    opened = EngineFolder.open(made)
    dtypes = {port.name: port.dtype for port in opened.plan("commit_denoise").inputs}
    assert dtypes["past_conv_state_001"] == dtypes["past_key_000"] == "float16"
    assert dtypes["past_ssm_state_001"] == "float32"
    assert opened.plan("denoise").outputs == (Port("logits", "float32", ("B", 8, 40)),)
    assert opened.plan("denoise_top_k").top_k == 8


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("roles", [("denoise",), ("commit", "denoise"), ("commit_denoise",)])
def test_every_precision_and_set_of_roles(tmp_path, bundle, precision, roles):
    """Also of a bundle that was exported: the golden one."""
    for number, source in enumerate((bundle, Bundle.open(GOLDEN))):
        chosen = tuple(role for role in roles if role in source.graphs)
        if not chosen:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        identity = identity_of(source, chosen, precision=precision)
        written = fill_engine(folder, source, identity)
        assert EngineFolder.open(folder) == written
        assert {port.past.dtype for port in written.state.ports} == {
            precision_of(precision).io,
            "float32",
        }


def test_two_writes_give_the_same_bytes(tmp_path, bundle):
    """Into two folders, from values in another order."""
    first = identity_of(bundle, plugins=(AOT, replace(AOT, name="ConvBlockDenoise")))
    again = identity_of(
        bundle,
        capabilities=("12.0", "8.9", "12.0"),
        graphs=dict(reversed(first.graphs.items())),
        flags=dict(reversed(first.flags.items())),
        profiles={
            role: [dict(reversed(profile.items())) for profile in profiles]
            for role, profiles in reversed(first.profiles.items())
        },
        plugins=first.plugins[::-1],
    )
    contents = []
    for name, identity, check in (
        ("a", first, CHECK),
        ("b", again, dict(reversed(CHECK.items()))),
    ):
        with staged_folder(tmp_path / name) as folder:
            fill_engine(folder, bundle, identity, check=check)
        contents.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert first.key == again.key
    assert str(tmp_path) not in contents[0][MANIFEST].decode()


def test_an_engine_appears_whole_or_not_at_all(tmp_path, bundle):
    """Whatever fails inside the staged folder."""
    identity = identity_of(bundle)
    with pytest.raises(BackendError):
        with staged_folder(tmp_path / "my.engine") as folder:
            fill_engine(folder, bundle, identity, check={})
    with pytest.raises(
        BundleError, match="commit.plan is missing: the build of commit left no plan"
    ):
        with staged_folder(tmp_path / "my.engine") as folder:
            write_engine(
                folder,
                bundle,
                identity,
                precision_of("fp16"),
                plans_of(bundle, identity),
                check=CHECK,
            )
    assert os.listdir(tmp_path) == []


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["denoise.plan", "tokenizer.json", "LICENSE", "libplugins.so"])
def test_one_changed_byte_of_a_file_is_refused(engine, name):
    """An edited plan, by its hash: both are named."""
    good = (engine / name).read_bytes()
    for bad in (bytes([good[0] ^ 1]) + good[1:], good[:-1], good + b"\0", b""):
        (engine / name).write_bytes(bad)
        text = refusal(engine)
        assert text == (
            f"{engine / name} was changed after the build: sha256 {sha(bad)[:16]}..., expected "
            f"{sha(good)[:16]}...: copy the engine again or build it again"
        )
    (engine / name).unlink()
    assert f"{engine / name} is missing: the engine is incomplete, copy it whole" in refusal(engine)
    assert "is missing" in refusal(engine, verify=False)


def test_plans_can_be_skipped_by_choice(engine):
    """The slow hashes only, never another one."""
    (engine / "denoise.plan").write_bytes(b"x")
    EngineFolder.open(engine, verify=False)
    (engine / "tokenizer.json").write_bytes(b"x")
    assert "tokenizer.json was changed" in refusal(engine, verify=False)


@settings(max_examples=150)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_changed_byte_of_the_manifest_is_refused(made, place, bit):
    """Wherever it is: a number, a name, a space, the seal itself."""
    raw = bytearray((made / MANIFEST).read_bytes())
    raw[place % len(raw)] ^= 1 << bit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fixedstate.runtime.enginefile._read_manifest", lambda folder: bytes(raw))
        assert MANIFEST in refusal(made) or "schema" in refusal(made)


# ONNX Runtime's first session sets flush-to-zero for its thread, where Hypothesis refuses to draw
# subnormal numbers: whether one was opened before depends on which tests ran.
FLOATS = st.floats(allow_subnormal=False)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | FLOATS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


OURS = ("identity", "precision", "state", "plans", "files")  # others are read as in a bundle


@settings(max_examples=200)
@given(data=st.data())
def test_any_other_value_in_the_manifest_is_refused_or_opens(made, data):
    """Of any type, anywhere, sealed again: what opens is whole, nothing else is ever raised."""
    manifest = json.loads((made / MANIFEST).read_bytes())
    at, key = manifest, data.draw(st.sampled_from(OURS))
    for _ in range(data.draw(st.integers(0, 6))):
        inner = at[key]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        at, key = inner, data.draw(st.sampled_from(list(keys)))
    at[key] = data.draw(JUNK)
    try:
        raw = sealed(manifest)
    except UnicodeEncodeError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fixedstate.runtime.enginefile._read_manifest", lambda folder: raw)
        with contextlib.suppress(BundleError):
            assert json.loads(EngineFolder.open(made, verify=False).manifest()) == json.loads(raw)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged (0 bytes, not JSON)"),
        (b"\xff\xfe", "is damaged (2 bytes, not JSON)"),
        (b"[]", "names no schema"),
        (b'{"schema": "1"}', "names no schema"),
        (b'{"schema": true}', "names no schema"),
        (b'{"schema": 0}', "names no schema"),
        (b'{"schema": 1}', "lacks the keys ['identity', "),
    ],
)
def test_manifests_that_are_none(engine, content, words):
    """Truncated, of another kind, or of no schema."""
    (engine / MANIFEST).write_bytes(content)
    assert words in refusal(engine)


def test_a_newer_schema_names_both_numbers(engine):
    """Whatever else a newer version writes."""
    edit(engine, lambda data: data.update(schema=SCHEMA + 6, anything="else"))
    text = refusal(engine)
    assert f"has schema {SCHEMA + 6}, this version reads up to {SCHEMA}: install a newer" in text


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("identity",),
        ("identity", "plugins", 0),
        ("model",),
        ("precision",),
        ("state", 0),
        ("plans", "denoise"),
        ("plans", "denoise", "inputs", 0),
        ("decode",),
        ("source",),
    ],
)
def test_unknown_keys_are_refused_at_every_depth(engine, keys):
    """They may change what the known ones mean."""

    def change(data):
        for key in keys:
            data = data[key]
        data["colour"] = 1

    edit(engine, change)
    assert "unknown keys ['colour']" in refusal(engine)


def test_what_is_no_engine_folder(tmp_path, bundle):
    """Missing, a file, an empty folder, a bundle."""
    assert "does not exist: give the folder that `fixedstate build` wrote" in refusal(
        tmp_path / "a"
    )
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "holds no engine.json: it is not an engine" in refusal(tmp_path / "empty")
    assert f"make one with `fixedstate build {bundle.path}`" in refusal(bundle.path)


def set_at(*keys: object, value: object) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


def drop(*keys: object) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


def renamed(data: dict) -> None:
    data["plans"]["full"] = data["plans"].pop("denoise")


def swapped(data: dict) -> None:
    outputs = data["plans"]["commit"]["outputs"]
    outputs[0], outputs[1] = outputs[1], outputs[0]


PROFILE = ("identity", "profiles", "denoise", 0)
BROKEN = {
    "plan of another role": (
        renamed,
        "it has plans for commit, commit_denoise, denoise_top_k, full",
    ),
    "role without a plan": (drop("plans", "commit"), "and was built from graphs for commit, "),
    "plan file": (set_at("plans", "denoise", "file", value="a.plan"), "expected 'denoise.plan'"),
    "file outside": (set_at("files", "../x", value="0" * 64), "would leave the engine's folder"),
    "no sha256": (set_at("plans", "denoise", "sha256", value="0"), "'0' of 'denoise.plan' is no"),
    "port dtype": (
        set_at("plans", "commit", "inputs", 1, "dtype", value="float32"),
        "input 1 is past_key_000 float32 [B, 1, C, 2], expected past_key_000 float16 [B, 1, C, 2]",
    ),
    "port order": (swapped, "output 0 is present_value_000 float16 [B, 1, 8n, 2], expected"),
    "port missing": (drop("plans", "commit", "inputs", 1), "input 1 is past_value_000 "),
    "precision": (set_at("precision", "io", value="float32"), "its ports are fp32, its identity"),
    "state dtype": (
        set_at("state", 0, "past", "dtype", value="float32"),
        "its state is not that of the model in fp16",
    ),
    "no check": (set_at("check", value={}), "it does not say how its fp16 was checked"),
    "alias of no port": (
        set_at("plans", "commit", "aliases", value={"present_key_009": "past_key_000"}),
        "but it has no output 'present_key_009'",
    ),
    "alias of no input": (
        set_at("plans", "commit", "aliases", value={"present_key_000": "past"}),
        "but it has no input 'past'",
    ),
    "alias of another port": (
        set_at("plans", "commit", "aliases", value={"present_key_000": "past_value_000"}),
        "which is not its pair ('past_key_000')",
    ),
    "alias of new columns": (
        set_at("plans", "commit", "aliases", value={"present_key_000": "past_key_000"}),
        "is present_key_000 float16 [B, 1, 8n, 2], expected present_key_000 float16 [B, 1, C, 2]",
    ),
    "no profile": (
        set_at(*PROFILE[:-1], value=[]),
        "plan denoise has dynamic inputs and no profile",
    ),
    "profile lacks an input": (
        drop(*PROFILE, "past_length"),
        "profile 0 of denoise lacks the dynamic input 'past_length'",
    ),
    "profile of a static input": (
        set_at(*PROFILE, "colour", value=[[1], [1], [1]]),
        "profile 0 of denoise names no dynamic input: 'colour'",
    ),
    "profile of another rank": (
        set_at(*PROFILE, "input_ids", value=[[1], [1], [8]]),
        "'input_ids' is [1]; expected ['B', 8]",
    ),
    "profile against a fixed size": (
        set_at(*PROFILE, "input_ids", value=[[1, 8], [1, 8], [8, 16]]),
        "'input_ids' is [8, 16], which is no ['B', 8]",
    ),
    "rows that differ between inputs": (
        set_at(*PROFILE, "past_length", value=[[1], [1], [4]]),
        "'past_length' is [4], which is no ['B'] with B = 8",
    ),
    "no whole blocks": (
        set_at("identity", "profiles", "commit", 0, "input_ids", value=[[1, 8], [1, 8], [8, 100]]),
        "'input_ids' is [8, 100], which is no ['B', '8n']",
    ),
    "no rows": (
        set_at(*PROFILE, "past_length", value=[[0], [1], [8]]),
        "'past_length' is [0], which is no ['B']",
    ),
    "float32 layer": (
        set_at("identity", "fp32_layers", value=[0, 3]),
        "layer 3 is to stay float32; the model has 3",
    ),
    "library": (drop("files", "libplugins.so"), "'libplugins.so' of plugin fixedstate::SsdBlock"),
    "twice": (
        set_at("files", "denoise.plan", value="0" * 64),
        "a file is named twice: ",
    ),
    "product": (set_at("identity", "product", value="trt"), "product 'trt' is none of tensorrt"),
    "capability": (set_at("identity", "capabilities", value=["8"]), "compute capability '8'"),
    "capability text": (
        set_at("identity", "capabilities", value="8.9"),
        "capabilities are '8.9'; expected a list",
    ),
    "no capability": (set_at("identity", "capabilities", value=[]), "no compute capability"),
    "version": (set_at("identity", "version", value="newest"), "version 'newest' is none"),
    "weights": (set_at("identity", "weights", value="abc"), "'abc' of 'weights' is no sha256"),
    "flag": (set_at("identity", "flags", "x", value={}), "flag 'x' is {}; expected texts, numb"),
    "plugin kind": (set_at("identity", "plugins", 0, "kind", value="jit"), "is of kind 'jit'"),
    "plugin library": (
        set_at("identity", "plugins", 0, "library", value=""),
        "plugins of kind 'library' name one, others none",
    ),
    "profiles of no role": (drop("identity", "profiles", "commit"), "every role needs both"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_parts_that_contradict_one_another(engine, name):
    """Sealed and of the right hashes, as another program might write them."""
    change, words = BROKEN[name]
    edit(engine, change)
    text = refusal(engine)
    assert words in text
    assert text.startswith(f"{engine / MANIFEST} is damaged: ")
    assert text.endswith("; build the engine again")


def test_falling_sizes_in_a_profile(engine):
    """Of every input alike, so that only their order is wrong."""

    def change(data):
        for shapes in data["identity"]["profiles"]["denoise"][0].values():
            shapes[1], shapes[2] = shapes[2], shapes[1]

    edit(engine, change)
    text = refusal(engine)
    assert "goes from [1, 8] by [8, 8] to [1, 8]; expected rising sizes" in text


# --- what write_engine refuses --------------------------------------------------------------------


def test_what_is_not_of_the_bundle_is_not_written(tmp_path, bundle):
    """Another bundle's identity, another graph, a file that changed meanwhile."""
    other = write_placeholder_bundle(tmp_path / "other", graphs="another graph")
    for source, words in (
        (identity_of(other), "its denoise was built from graph "),
        (
            identity_of(bundle, bundle="0" * 64),
            "the identity is that of bundle 0000000000000000...",
        ),
        (identity_of(bundle, precision="bf16", fp32_layers=(7,)), "layer 7 is to stay float32"),
    ):
        folder = tmp_path / "new"
        folder.mkdir()
        with pytest.raises(BackendError, match=words):
            fill_engine(folder, bundle, source)
        assert not (folder / MANIFEST).exists()
        shutil.rmtree(folder)
    (other.path / "tokenizer.json").write_text("changed")
    (tmp_path / "new").mkdir()
    with pytest.raises(BundleError, match="tokenizer.json was changed since the bundle was opened"):
        fill_engine(tmp_path / "new", other, identity_of(other))
    (other.path / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match="tokenizer.json cannot be copied: No such file"):
        fill_engine(tmp_path / "new", other, identity_of(other))


def test_a_check_that_is_no_json_is_not_written(tmp_path, bundle):
    """An error of NaN would be read back as a number that is none."""
    for check in ({"error": float("nan")}, {"error": object()}):
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        folder.mkdir()
        with pytest.raises(BackendError, match="the check of the precision cannot be written: "):
            fill_engine(folder, bundle, identity_of(bundle), check=check)


def test_ports_of_another_precision_are_not_written(tmp_path, bundle):
    """A builder that kept a port in float32."""
    identity = identity_of(bundle, ("denoise",))
    plans = plans_of(bundle, replace(identity, precision="fp32"))
    (tmp_path / "denoise.plan").write_bytes(b"x")
    with pytest.raises(BackendError, match="input 1 is past_key_000 float32 .* expected .*float16"):
        write_engine(tmp_path, bundle, identity, precision_of("fp16"), plans, check=CHECK)


# --- aliases and profiles -------------------------------------------------------------------------


def test_a_declared_alias_makes_the_output_the_whole_buffer(tmp_path, bundle):
    """Keys and values updated in place leave as large as they entered."""
    aliases = {"present_key_000": "past_key_000", "present_value_000": "past_value_000"}
    fill_engine(tmp_path, bundle, identity_of(bundle), commit=aliases)
    plan = EngineFolder.open(tmp_path).plan("commit")
    assert plan.aliases == aliases
    shapes = {port.name: port.shape for port in plan.outputs}
    assert shapes["present_key_000"] == ("B", 1, "C", 2)
    assert shapes["present_key_002"] == ("B", 1, "8n", 2)
    assert EngineFolder.open(tmp_path).plan("commit_denoise").aliases == {}


def test_no_alias_leaves_the_ports_of_the_graph(bundle):
    """The bundle's own ports, at its own precision."""
    for role, graph in bundle.graphs.items():
        found = plan_ports(bundle.spec, bundle.state, role, {}, graph.top_k)
        assert found == (graph.inputs, graph.outputs)


@given(
    rows=st.integers(0, 12),
    blocks=st.integers(0, 20),
    capacity=st.integers(0, 5000),
)
def test_a_profile_is_found_for_what_it_takes(made, rows, blocks, capacity):
    """And for nothing else, the first one of several."""
    plan = EngineFolder.open(made, verify=False).plan("commit")
    wide = ({**LEVELS[0], "n": 2}, {**LEVELS[1], "n": 2}, {**LEVELS[2], "n": 18, "C": 4096})
    plan = replace(plan, profiles=(*plan.profiles, profile_of(plan.inputs, wide)))
    sizes = {"B": rows, "n": blocks, "C": capacity}
    shapes = {port.name: port.resolve(**sizes) for port in plan.inputs}
    fits = 1 <= rows <= 8 and 8 <= capacity <= 4096
    if fits and 1 <= blocks <= 16:
        assert plan.profile_for(shapes) == 0
    elif fits and 17 <= blocks <= 18:
        assert plan.profile_for(shapes) == 1
    else:
        with pytest.raises(CapacityError, match="no profile of commit.plan takes these shapes"):
            plan.profile_for(shapes)


def test_what_no_profile_takes_is_named(made):
    """The input, its shape, the bounds and the options."""
    plan = EngineFolder.open(made).plan("denoise")
    shapes = {port.name: port.resolve(B=9, C=256) for port in plan.inputs}
    with pytest.raises(CapacityError) as caught:
        plan.profile_for(shapes)
    assert "input_ids is [9, 8], profiles take [1, 8] to [8, 8]; " in str(caught.value)
    with pytest.raises(CapacityError, match="denoise: no shape is given for input_ids, past_key"):
        plan.profile_for({})
    static = Plan("denoise", "denoise.plan", "", (Port("input_ids", "int64", (1, 8)),), ())
    assert static.profile_for({}) == 0


# --- round trips ----------------------------------------------------------------------------------

HASHES = st.text("0123456789abcdef", min_size=64, max_size=64)
WORDS = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=8)
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,12}\.so", fullmatch=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)  # as FLOATS
SCALARS = st.booleans() | st.integers() | FINITE | WORDS


@st.composite
def plugin_uses(draw: st.DrawFn) -> PluginUse:
    kind = draw(st.sampled_from(PLUGIN_KINDS))
    return PluginUse(
        draw(WORDS),
        draw(WORDS),
        draw(WORDS),
        kind,
        draw(NAMES) if kind == "library" else "",
        draw(st.dictionaries(WORDS, HASHES, max_size=2)),
    )


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    """Any that an engine can have."""
    roles = draw(st.sets(st.sampled_from(ROLES), min_size=1))
    shapes = st.tuples(*[st.lists(st.integers(1, 2**31), max_size=4).map(tuple)] * 3)
    profiles = st.lists(st.dictionaries(WORDS, shapes, max_size=3), max_size=3)
    flags = st.dictionaries(WORDS, SCALARS | st.lists(SCALARS, max_size=2).map(tuple), max_size=3)
    product = draw(st.sampled_from(["tensorrt", "tensorrt-rtx"]))
    chosen = draw(flags)
    if product == "tensorrt":
        chosen[HARDWARE] = draw(st.sampled_from(["none", "same"]))
    return Identity(
        product=product,
        version=".".join(map(str, draw(st.lists(st.integers(0, 200), min_size=2, max_size=4)))),
        package=draw(WORDS),
        os=draw(st.sampled_from(["linux-x86_64", "linux-aarch64"])),
        capabilities=tuple(
            draw(st.lists(st.sampled_from(["7.5", "8.6", "8.9", "9.0", "12.0"]), min_size=1))
        ),
        bundle=draw(HASHES),
        weights=draw(HASHES),
        graphs={role: draw(HASHES) for role in roles},
        precision=draw(st.sampled_from(PRECISIONS)),
        fp32_layers=tuple(draw(st.lists(st.integers(0, 100), max_size=3))),
        flags=chosen,
        profiles={role: tuple(draw(profiles)) for role in roles},
        plugins=tuple(draw(st.lists(plugin_uses(), max_size=2, unique_by=lambda p: p.id))),
    )


@given(identity=identities())
def test_identities_survive_a_round_trip(identity):
    """Through JSON text; the key is that of the values, whatever their order."""
    data = json.loads(json.dumps(identity.to_dict(), allow_nan=False))
    again = Identity.from_dict(data)
    assert again == identity
    assert again.key == identity.key
    assert json.loads(json.dumps(again.to_dict())) == data
    assert identity.differences(again) == []
    shuffled = replace(
        identity,
        capabilities=identity.capabilities[::-1],
        flags=dict(reversed(identity.flags.items())),
        graphs=dict(reversed(identity.graphs.items())),
        plugins=identity.plugins[::-1],
    )
    assert shuffled.key == identity.key
    assert shuffled == identity


@given(first=identities(), second=identities())
def test_different_identities_have_different_keys_and_say_why(first, second):
    """Every difference that the key sees has a line, and no other."""
    assert (first.key == second.key) == (first.differences(second) == [])
    lines = first.differences(second)
    assert len(lines) == len(second.differences(first))
    assert all(": engine has " in line and ", here is " in line for line in lines)


def test_a_kernel_named_like_a_part_of_the_identity(bundle):
    """Names inside are any text; found by the test above."""
    odd = replace(AOT, texts={"plugins": "0" * 64})
    lines = identity_of(bundle, plugins=(odd,)).differences(identity_of(bundle))
    assert "plugins.fixedstate::SsdBlockDenoise.texts.plugins: " in " ".join(lines)


CHANGES = {
    "product": ("tensorrt", "product: engine has tensorrt-rtx, here is tensorrt"),
    "version": ("1.6.0.1", "version: engine has 1.7.1.116, here is 1.6.0.1"),
    "package": ("0.2.0", "package: engine has 0.1.0, here is 0.2.0"),
    "os": ("linux-aarch64", "os: engine has linux-x86_64, here is linux-aarch64"),
    "capabilities": (("8.6",), 'capabilities: engine has ["8.9","12.0"], here is ["8.6"]'),
    "bundle": ("0" * 64, "here is 0000000000000000..."),
    "weights": ("0" * 64, "here is 0000000000000000..."),
    "precision": ("bf16", "precision: engine has fp16, here is bf16"),
    "fp32_layers": ((1,), "fp32_layers: engine has [], here is [1]"),
    "flags": (
        {"strongly_typed": 1, "optimization_level": 3},
        "flags.strongly_typed: engine has true, here is 1",
    ),
    "plugins": (
        (AOT,),
        "plugins.fixedstate::SsdBlockDenoise.kind: engine has nothing, here is aot",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_is_part_of_the_identity(bundle, name):
    """One value changed: another key, and a line that names both sides."""
    identity = identity_of(bundle)
    value, line = CHANGES[name]
    other = replace(identity, **{name: value})
    assert other.key != identity.key
    lines = identity.differences(other)
    assert [text for text in lines if line in text]
    assert all(text.startswith(name) for text in lines)


def test_graphs_and_profiles_are_part_of_the_identity(bundle):
    """Of one role and one input."""
    identity = identity_of(bundle)
    other = replace(identity, graphs={**identity.graphs, "commit": "0" * 64})
    was = identity.graphs["commit"][:16]
    assert identity.differences(other) == [
        f"graphs.commit: engine has {was}..., here is 0000000000000000..."
    ]
    profile = {**identity.profiles["commit"][0], "past_length": ((1,), (2,), (8,))}
    other = replace(identity, profiles={**identity.profiles, "commit": (profile,)})
    assert identity.differences(other) == [
        "profiles.commit.0.past_length: engine has [[1],[1],[8]], here is [[1],[2],[8]]"
    ]
    near = identity.weights[:16] + "0" * 48
    assert identity.differences(replace(identity, weights=near)) == [
        f"weights: engine has {identity.weights}, here is {near}"
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision": "int8"}, "precision 'int8' is none of fp32, fp16, bf16"),
        ({"capabilities": ("8",)}, "compute capability '8' is none, such as 8.9"),
        ({"capabilities": (8.9,)}, "compute capability 8.9 is none"),
        ({"fp32_layers": (True,)}, "float32 layer True is no index"),
        ({"fp32_layers": (-1,)}, "float32 layer -1 is no index"),
        ({"flags": {"x": float("nan")}}, "flag 'x' is nan"),
        ({"flags": {"x": ((1,),)}}, "expected texts, numbers, true or false"),
        ({"os": ""}, "os is ''; expected a text"),
        ({"graphs": {"denoise": "x"}}, "'x' of 'denoise' is no sha256"),
        ({"plugins": (AOT, AOT)}, "a plugin is named twice: fixedstate::SsdBlockDenoise, "),
    ],
)
def test_values_that_no_engine_has(bundle, values, words):
    """Named with what was given."""
    with pytest.raises(SpecError) as caught:
        identity_of(bundle, **values)
    assert words in str(caught.value)


def test_layers_without_state_make_an_engine_too(tmp_path):
    """A model of attention alone, a role of one pass, static but for the rows."""
    spec = replace(HYBRID, layers=(HYBRID.layers[0], LayerSpec("none", None, mlp="none")))
    source = write_placeholder_bundle(tmp_path / "bundle", spec, ("denoise",))
    (tmp_path / "engine").mkdir()
    written = fill_engine(tmp_path / "engine", source, identity_of(source))
    assert EngineFolder.open(tmp_path / "engine") == written
    with pytest.raises(BundleError, match=r"has no plan 'commit' \(it has denoise\)"):
        written.plan("commit")
