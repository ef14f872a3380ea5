"""Cases of engines at run time (TR), as far as what stands in engine.json decides them.

Cards, versions and registered plugins are given as values: nothing here asks a library.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_engine import (
    AOT,
    LIBRARY,
    PTX,
    PYTHON,
    edit,
    fill_engine,
    identity_of,
    write_placeholder_bundle,
)

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, BundleError, SpecError
from fixedstate.runtime.enginefile import EngineFolder, check_aliases
from fixedstate.runtime.identity import (
    CARD,
    HARDWARE,
    TIMING_CACHE,
    VERSION_COMPATIBLE,
    Card,
    Here,
    Identity,
    os_text,
    other_model,
    refusal,
)

ADA, AMPERE, TURING = Card("8.9", "RTX 4090"), Card("8.6", "RTX 3090"), Card("7.5", "RTX 2080")
RTX = Here("tensorrt-rtx", "1.7.1.116", "linux-x86_64", (ADA,))
TRT = Here("tensorrt", "10.9.0.34", "linux-x86_64", (AMPERE,))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Bundle:
    return write_placeholder_bundle(tmp_path_factory.mktemp("bundles") / "my.bundle")


@pytest.fixture(scope="module")
def rtx(bundle) -> Identity:
    """Built for two kinds of cards."""
    return identity_of(bundle)


@pytest.fixture(scope="module")
def trt(bundle) -> Identity:
    """Built for the kind of card it was built on."""
    return identity_of(
        bundle,
        product="tensorrt",
        version="10.9.0.34",
        capabilities=("8.6",),
        flags={HARDWARE: "same"},
        plugins=(AOT,),
    )


def said(identity: Identity, here: Here, folder: Path | None = None) -> str:
    """Why it cannot run: one sentence with a remedy."""
    text = refusal(identity, here, folder)
    assert text is not None
    assert "\n" not in text
    return text


def test_an_engine_runs_where_all_agrees(rtx, trt):
    """On every kind of card it was built for, whatever else is installed."""
    for capability in ("8.9", "12.0"):
        assert refusal(rtx, replace(RTX, cards=(Card(capability),))) is None
    assert refusal(trt, TRT) is None
    assert refusal(trt, replace(TRT, creators={}, texts={})) is None  # kernels are in the plan


# --- TR-01 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "9.0", "12.1"])
def test_TR_01_another_compute_capability(rtx, capability):
    """Both sides and the command; newer cards are other cards too."""
    assert said(rtx, replace(RTX, cards=(Card(capability),))) == (
        "this engine cannot run here: it was built for compute capability 8.9 and 12.0, card 0 has "
        f"{capability}: build it again: `fixedstate build BUNDLE --target tensorrt-rtx --precision "
        f"fp16 --compute-capability {capability}`"
    )


def test_TR_01_another_operating_system(rtx, trt):
    """Or another processor; the card it is to run on stays."""
    for identity, here in ((rtx, RTX), (trt, TRT)):
        for os in ("windows-x86_64", "linux-aarch64"):
            text = said(identity, replace(here, os=os))
            assert f"it was built for linux-x86_64, here is {os}: build it again" in text
    assert "--compute-capability 8.9,12.0`" in said(rtx, replace(RTX, os="linux-aarch64"))
    assert re.fullmatch(r"[a-z]+-\w+", os_text())


def test_TR_01_another_index(rtx):
    """The card that is chosen counts, and one that would do is named."""
    here = replace(RTX, cards=(ADA, TURING, AMPERE))
    assert refusal(rtx, here) is None
    text = said(rtx, replace(here, device=1))
    assert "card 1 has 7.5: choose card 0, which it fits" in text
    text = said(rtx, replace(here, device=3))
    assert "card 3 was asked for and there are cards 0 to 2: choose a card that is there" in text
    assert "there is card 0 only" in said(rtx, replace(RTX, device=1))
    assert "card -1 was asked for" in said(rtx, replace(RTX, device=-1))


def test_TR_01_no_card(rtx):
    """What would help is said, not that it could be built again."""
    text = said(rtx, replace(RTX, cards=()))
    assert "compute capability 8.9 and 12.0, here is no NVIDIA card with a driver: run it" in text
    assert "fixedstate build" not in text


def test_TR_01_hardware_compatibility(trt):
    """Of TensorRT: this model only, this capability, or everything from Ampere on."""
    plus = replace(trt, flags={HARDWARE: "ampere+"})
    for capability, same in (("8.6", True), ("8.0", False), ("9.0", False), ("12.0", False)):
        here = replace(TRT, cards=(Card(capability),))
        assert refusal(plus, here) is None
        assert (refusal(trt, here) is None) == same
    text = said(plus, replace(TRT, cards=(TURING,)))
    assert "it was built for compute capability 8.0 and newer, card 0 has 7.5" in text
    for flags in ({CARD: "RTX 3090"}, {CARD: "RTX 3090", HARDWARE: "none"}):
        alone = replace(trt, flags=flags)
        assert refusal(alone, TRT) is None
        assert refusal(alone, replace(TRT, cards=(Card("8.6"),))) is None  # a card without a name
        text = said(alone, replace(TRT, cards=(Card("8.6", "A10"), AMPERE)))
        assert "it was built on RTX 3090 and for no other model (hardware_compatib" in text
        assert "is 'none'), card 0 is A10: choose card 1, which it fits" in text
    assert refusal(replace(trt, flags={CARD: "x", HARDWARE: "same"}), TRT) is None


@pytest.mark.parametrize(
    ("product", "flags", "words"),
    [
        ("tensorrt", {HARDWARE: "all"}, "is 'all'; expected 'none', 'same' or 'ampere+'"),
        ("tensorrt", {HARDWARE: "ampere+"}, "'ampere+' for compute capability 7.5; it starts at"),
        ("tensorrt", {VERSION_COMPATIBLE: "yes"}, "is 'yes'; expected true or false"),
        ("tensorrt", {CARD: 3}, "flag 'card' is 3; expected a card's model"),
        ("tensorrt-rtx", {HARDWARE: "same"}, "TensorRT-RTX has no flag 'hardware_compatibility'"),
        ("tensorrt-rtx", {VERSION_COMPATIBLE: True}, "TensorRT-RTX has no flag 'VERSION_COMPAT"),
    ],
)
def test_TR_01_flags_that_a_product_does_not_have(bundle, product, flags, words):
    """They would promise what the engine does not keep."""
    with pytest.raises(SpecError) as caught:
        identity_of(bundle, product=product, flags=flags, capabilities=("7.5", "8.6"))
    assert words in str(caught.value)


# --- TR-02 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "here", "exact", "compatible"),
    [
        ("10.9.0.34", "10.9.0.34", True, True),
        ("10.3.0.26", "10.9.0.34", False, True),
        ("10.9.0.34", "10.3.0.26", False, False),
        ("10.9.0.34", "10.9.0.35", False, True),
        ("9.3.0.1", "10.9.0.34", False, False),
        ("10.16.1.11", "11.1.0.3", False, True),
        ("11.1.0.3", "10.16.1.11", False, False),
        ("11.4.0.1", "12.0.0.1", False, False),
    ],
)
def test_TR_02_another_version(trt, built, here, exact, compatible):
    """The same, or a newer one where the flag says so and NVIDIA's matrix names the pair."""
    for flag, runs in ((False, exact), (True, compatible)):
        identity = replace(trt, version=built, flags={HARDWARE: "same", VERSION_COMPATIBLE: flag})
        there = replace(TRT, version=here)
        if runs:
            assert refusal(identity, there) is None
            continue
        newer = " for it and newer versions" if flag else ""
        text = said(identity, there)
        assert f"it was built by TensorRT {built}{newer}, here is TensorRT {here}: build it" in text
        assert "`fixedstate build BUNDLE --target tensorrt --precision fp16" in text


def test_TR_02_releases_of_the_rtx_edition_do_not_mix(rtx):
    """In neither direction, not even by a build number."""
    for version in ("1.6.0.1", "1.7.1.115", "1.7.1.117", "2.0.0.1"):
        text = said(rtx, replace(RTX, version=version))
        assert f"built by TensorRT-RTX 1.7.1.116, here is TensorRT-RTX {version}: build" in text


def test_TR_02_another_product_or_none(rtx, trt):
    """Each named as its package is."""
    text = said(rtx, replace(TRT, cards=(ADA,)))
    assert "built by TensorRT-RTX 1.7.1.116, asked to run it is TensorRT 10.9.0.34" in text
    assert "`fixedstate build BUNDLE --target tensorrt --precision" in text
    text = said(trt, replace(TRT, version=""))
    assert "here is no TensorRT: install fixedstate[trt] with TensorRT 10.9.0.34" in text
    text = said(rtx, replace(RTX, version=""))
    assert "here is no TensorRT-RTX: install fixedstate[rtx] with TensorRT-RTX 1.7.1.116" in text


def test_TR_02_all_that_differs_is_said_at_once(rtx):
    """So that it is built again once, not once per difference."""
    here = Here("tensorrt-rtx", "1.6.0.1", "windows-x86_64", (TURING,))
    text = said(replace(rtx, fp32_layers=(2, 0)), here)
    for words in ("1.6.0.1", "windows-x86_64", "card 0 has 7.5"):
        assert words in text
    assert text.count("fixedstate build BUNDLE") == 1
    assert "--fp32-layers 0,2 --compute-capability 7.5`" in text


numbers = st.lists(st.integers(0, 12), min_size=2, max_size=4).map(
    lambda parts: ".".join(map(str, parts))
)


@given(built=numbers, here=numbers, flag=st.booleans())
def test_TR_02_never_on_an_older_version(trt, built, here, flag):
    """Whatever the flag says."""
    identity = replace(trt, version=built, flags={HARDWARE: "same", VERSION_COMPATIBLE: flag})
    runs = refusal(identity, replace(TRT, version=here)) is None
    first, second = ([int(part) for part in text.split(".")] for text in (built, here))
    assert not runs or first <= second
    assert runs or built != here
    assert not runs or flag or built == here


# --- TR-03 ----------------------------------------------------------------------------------------


def test_TR_03_a_plugin_in_a_new_process(rtx):
    """Plugins that run in the process are named with their creator and how to register it."""
    identity = replace(rtx, plugins=(PYTHON,))
    right = replace(RTX, creators={"fixedstate::SsdBlockDenoise": "1"}, texts=PTX)
    assert refusal(identity, right) is None
    assert refusal(identity, replace(RTX, creators=None)) is None  # not looked at yet
    text = said(identity, replace(right, creators={}))
    assert (
        "it needs plugin fixedstate::SsdBlockDenoise version 1, for which no creator is registered "
        "here: call fixedstate.plugins.library.register_rtx() in this process first"
    ) in text
    text = said(identity, replace(right, creators={PYTHON.id: "2"}))
    assert "plugin fixedstate::SsdBlockDenoise version 1, here is version 2: build it" in text


def test_TR_03_other_kernel_texts(rtx):
    """A newer package launches other kernels than those the engine was checked with."""
    identity = replace(rtx, plugins=(PYTHON,))
    (file,) = PTX
    for texts, words in (({}, "none"), ({file: "2" * 64}, "2222222222222222...")):
        text = said(identity, replace(RTX, texts=texts))
        assert f"kernel {file} of sha256 1111111111111111..., here is {words}: build it" in text


def test_TR_03_a_plugin_library(tmp_path, bundle, rtx):
    """It stands in the engine's folder, and is named with its path where it does not."""
    identity = replace(rtx, plugins=(LIBRARY,))
    fill_engine(tmp_path, bundle, identity)
    engine = EngineFolder.open(tmp_path)
    path = tmp_path / "libplugins.so"
    assert engine.refusal(replace(RTX, creators={LIBRARY.id: "1"})) is None
    text = engine.refusal(replace(RTX, creators={}))
    assert text is not None
    assert f"the engine {tmp_path} cannot run here: it needs plugin {LIBRARY.id} version 1 " in text
    assert f"of library {path}, for which no creator is registered here: load {path} bef" in text
    path.unlink()
    text = engine.refusal(RTX)
    assert text is not None
    assert f"of library {path}, which is missing: copy the engine's folder whole" in text
    with pytest.raises(BundleError, match=r"libplugins.so is missing: the engine is incomplete"):
        EngineFolder.open(tmp_path)


def test_TR_03_remedies_of_several_faults(rtx):
    """Each once: to build again does not register a plugin."""
    identity = replace(rtx, plugins=(PYTHON, replace(PYTHON, name="ConvBlockDenoise")))
    text = said(identity, replace(RTX, version="1.6.0.1", creators={}))
    assert text.count("register_rtx") == text.count("fixedstate build") == 1


# --- TR-05 ----------------------------------------------------------------------------------------


def test_TR_05_a_timing_cache_is_of_one_product(bundle, trt):
    """The other one keeps what it compiles in a runtime cache; a path is part of no identity."""
    assert replace(trt, flags={**trt.flags, TIMING_CACHE: True}).key != trt.key
    with pytest.raises(SpecError, match="TensorRT-RTX has no flag 'timing_cache': it keeps what"):
        identity_of(bundle, flags={TIMING_CACHE: True})
    with pytest.raises(SpecError, match="flag 'timing_cache' is 'timings'; expected true or false"):
        replace(trt, flags={TIMING_CACHE: "timings"})
    assert identity_of(bundle, flags={TIMING_CACHE: False}).flags == {TIMING_CACHE: False}


def test_TR_05_a_runtime_cache_belongs_to_one_engine_and_kind_of_card(rtx, trt):
    """So that writers of different engines never meet in one file."""
    names = {
        identity.runtime_cache(capability)
        for identity in (rtx, replace(rtx, precision="bf16"), replace(rtx, version="1.8.0.1"))
        for capability in ("8.9", "12.0")
    }
    assert len(names) == 6
    assert all(re.fullmatch(r"[0-9a-f]{64}-\d+\.\d\.runtime", name) for name in names)
    with pytest.raises(BackendError, match="TensorRT has no runtime cache"):
        trt.runtime_cache("8.6")
    with pytest.raises(SpecError, match="compute capability '89' is none"):
        rtx.runtime_cache("89")


# --- other weights, other graph, an edited plan, a newer schema -----------------------------------


def test_TR_01_another_bundle(tmp_path, bundle, rtx):
    """Weights and graphs decide; another digest alone does not."""
    assert other_model(rtx, bundle) is None
    assert other_model(replace(rtx, bundle="0" * 64), bundle) is None
    for name, options in (("weights", {"weights": b"x"}), ("graph", {"graphs": "other graph"})):
        other = write_placeholder_bundle(tmp_path / name, **options)
        text = other_model(rtx, other)
        assert text is not None
        assert text.startswith("the engine is not of this bundle: ")
        has, wants = (
            (rtx.weights, other.weights)
            if name == "weights"
            else (rtx.graphs["commit"], other.graphs["commit"].sha256)
        )
        assert f"built from {name} {has[:16]}..., {other.path} has {wants[:16]}..." in text
        assert f"build it again: `{rtx.rebuild()}`" in text
    missing = write_placeholder_bundle(tmp_path / "fewer", roles=("denoise",))
    assert f", {missing.path} has none" in str(other_model(rtx, missing))


def test_TR_01_a_lowering_for_a_target_is_of_the_bundle(bundle, rtx):
    """An engine built from ``denoise@tensorrt`` has the role denoise."""
    lowered = replace(bundle.graphs["denoise"], role="denoise@tensorrt", sha256="3" * 64)
    both = replace(bundle, graphs={**bundle.graphs, "denoise@tensorrt": lowered})
    built = replace(rtx, graphs={**rtx.graphs, "denoise": "3" * 64})
    assert other_model(built, both) is None
    assert "its denoise was built from graph 3333" in str(other_model(built, bundle))


def test_TR_01_an_edited_plan_and_a_newer_schema(tmp_path, bundle, rtx):
    """Found before anything is compared with a card."""
    fill_engine(tmp_path, bundle, rtx)
    plan = tmp_path / "commit.plan"
    plan.write_bytes(plan.read_bytes() + b"x")
    with pytest.raises(BundleError, match=r"commit\.plan was changed after the build: sha256 "):
        EngineFolder.open(tmp_path)
    edit(tmp_path, lambda data: data.update(schema=3))
    with pytest.raises(BundleError, match="has schema 3, this version reads up to 1: install"):
        EngineFolder.open(tmp_path)


def test_TB_11_aliases_of_a_loaded_engine():
    """The half of it that needs no engine: declared and found pairs, each difference named."""
    check_aliases("commit", {}, {})
    check_aliases(
        "commit", {"present_key_000": "past_key_000"}, {"present_key_000": "past_key_000"}
    )
    for declared, found, words in (
        ({"a": "b"}, {}, "commit: a updates no input in place, engine.json says b: build"),
        ({}, {"a": "b"}, "commit: a updates b in place, engine.json says none: build"),
        ({"a": "b"}, {"a": "c"}, "commit: a updates c in place, engine.json says b: build"),
    ):
        with pytest.raises(BackendError) as caught:
            check_aliases("commit", declared, found)
        assert words in str(caught.value)
