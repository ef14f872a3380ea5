"""Plans without weights, at stand-ins: built beside one weights file, refitted when loaded."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import trt_builder_stand_in as builder
import trt_plan_stand_in
from click.testing import CliRunner
from onnx_ir.passes import common

from fixedstate.bundle import WEIGHTS, Bundle, sha256_of
from fixedstate.cli import cli
from fixedstate.errors import BackendError, BundleError
from fixedstate.export import engine
from fixedstate.export.enginecache import EngineCache
from fixedstate.export.profiles import BuildRequest, Range
from fixedstate.runtime import trt
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.enginefile import MANIFEST, EngineFolder, _sealed
from fixedstate.runtime.identity import Card
from fixedstate.runtime.memory import LEAN_ABOVE

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

import trt_runtime_stand_in as runtime

ROLES = ("denoise", "commit_denoise")
VERSION = "11.4.0.106"
CARD = Card(runtime.CAPABILITY, runtime.CARD)
REQUEST = BuildRequest(
    target="tensorrt",
    capabilities=(runtime.CAPABILITY,),
    precision="fp32",
    plugins="none",
    batch=Range(1, 1, 2),
    roles=ROLES,
)


def stripped(request: BuildRequest, *more: str) -> BuildRequest:
    return replace(request, builder_flags=("STRIP_PLAN", *more))


@pytest.fixture(scope="module")
def bundle(bundle_path) -> Bundle:
    return Bundle.open(bundle_path("F3", fused=True))


@pytest.fixture(scope="module")
def build(bundle, tmp_path_factory):
    """Builds at the stand-in, on a machine that has a card; each engine once."""
    root = tmp_path_factory.mktemp("refit")
    made: dict[BuildRequest, Path] = {}

    def built(request: BuildRequest) -> Path:
        if request not in made:
            with pytest.MonkeyPatch.context() as patch:
                builder.install(patch, root)
                patch.setattr(engine, "first_card", lambda: CARD)
                patch.setattr(engine, "_version", lambda target, folder: VERSION)
                out = root / f"{len(made)}.engine"
                made[request] = engine.build(bundle, request, out).path
        return made[request]

    return built


@pytest.fixture
def opens():
    """Opens engines at the stand-in of the runtime; everything is given back."""
    opened = []

    def made(path: Path | EngineFolder, **options: Any) -> Any:
        cuda = runtime.Cuda()
        product = runtime.Product(cuda, VERSION)
        opened.append((trt.open_engine(path, module=product, cuda=cuda, slots=2, **options), cuda))
        return opened[-1][0]

    yield made
    for one, cuda in opened:
        one.close()
        assert not cuda.allocations


@pytest.fixture
def copied(build, tmp_path) -> Path:
    """A stripped engine that a test may damage."""
    return Path(shutil.copytree(build(stripped(REQUEST)), tmp_path / "my.engine"))


def passes(one: Any) -> tuple[list[np.ndarray], list[int]]:
    """Logits of blocks along decoding, and their tokens."""
    spec, rng = one.spec, np.random.default_rng(5)
    logits = []
    for row in range(2):
        one.reset(row)
    for _ in range(3):
        ids = rng.integers(0, spec.vocab_size, (2, spec.block_len))
        logits.append(np.array(one.denoise(np.full_like(ids, spec.mask_id))))
        one.commit(ids, np.array([spec.block_len, spec.block_len]))
    return logits, [int(token) for block in logits for token in block.argmax(-1).ravel()]


# --- what is built -------------------------------------------------------------------------------


def test_weights_lie_once_beside_plans_without_them(build, bundle):
    """One weights file and a graph per plan, each with its hash; no weight in any plan."""
    path = build(stripped(REQUEST))
    opened = EngineFolder.open(path)
    assert opened.refits
    assert {name: opened.files[name] for name in opened.files if name.endswith(".onnx")} == {
        f"{role}.onnx": sha256_of(path / f"{role}.onnx") for role in ROLES
    }
    assert opened.files[WEIGHTS] == bundle.weights == sha256_of(path / WEIGHTS)
    assert opened.identity.flags["STRIP_PLAN"] is opened.identity.flags["REFIT_IDENTICAL"] is True
    weights = (path / WEIGHTS).stat().st_size
    for role in ROLES:
        plan = json.loads((path / f"{role}.plan").read_bytes())
        assert plan["weights"] is None
        assert len(plan["refittable"]) > 20
        whole = (build(REQUEST) / f"{role}.plan").stat().st_size
        assert (path / f"{role}.plan").stat().st_size < whole - weights / 2
        assert opened.loaded_bytes(role) == (path / f"{role}.plan").stat().st_size + weights
    assert not EngineFolder.open(build(REQUEST)).refits


def test_nothing_that_is_refitted_is_inside_a_function(build, bundle):
    """TensorRT's refitter looks into none; the bundle's graphs keep theirs."""
    for role in ROLES:
        assert ir.load(bundle.path / f"{role}.onnx").functions
        graph = ir.load(build(stripped(REQUEST)) / f"{role}.onnx")
        assert not graph.functions
        names = [value.name for node in graph.graph.all_nodes() for value in node.outputs]
        assert len(set(names)) == len(names)


def test_calls_that_become_plugins_stay_calls(bundle, tmp_path):
    """Their functions too, for the parser; of the others every node is in the graph."""
    file = bundle.path / "denoise.onnx"
    calls = [node for node in ir.load(file).graph.all_nodes() if node.domain == "fixedstate"]
    kept = {node.name for node in calls[1:]}
    model = ir.load(file)
    for node in model.graph.all_nodes():
        if node.name not in kept and "plugin_namespace" in node.attributes:
            del node.attributes["plugin_namespace"]
    given = tmp_path / "given"
    given.mkdir()
    shutil.copyfile(bundle.path / WEIGHTS, given / WEIGHTS)
    ir.save(model, given / "denoise.onnx")
    planned = engine.planned_build(bundle, REQUEST, card=CARD).roles["denoise"]
    uses = replace(planned, needs=(object(),))  # what is asked is whether there are any
    made = ir.load(engine._refittable(given / "denoise.onnx", tmp_path / "made.onnx", uses))
    assert {n.name for n in made.graph.all_nodes() if n.domain == "fixedstate"} == kept
    assert {key[1] for key in made.functions} == {node.op_type for node in calls[1:]}
    common.InlinePass()(made)
    common.InlinePass()(model)
    assert sorted(n.op_type for n in made.graph.all_nodes()) == sorted(
        n.op_type for n in model.graph.all_nodes()
    )


def test_tensorrt_rtx_takes_what_is_written_for_a_refit(bundle, tmp_path, monkeypatch):
    """The real builder, which strips nothing without a card: the same graph, whole plans."""
    monkeypatch.setattr(engine.BuilderFlags, "is_stripped", property(lambda self: True))
    monkeypatch.setattr(engine.BuilderFlags, "named", property(lambda self: self.more))
    request = BuildRequest(
        capabilities=("12.0",), precision="fp32", plugins="none", roles=("denoise",)
    )
    report = engine.build(bundle, request, tmp_path / "my.engine")
    assert set(report.engine.files) >= {"denoise.onnx", WEIGHTS}
    made = report.builds["denoise"]
    assert made.warnings == ()
    graph = ir.load(tmp_path / "my.engine" / "denoise.onnx").graph
    products = sum(node.op_type == "MatMul" for node in graph.all_nodes())
    assert made.layers["MATRIX_MULTIPLY"] == products


def test_how_plans_are_refitted_is_said_to_the_builder():
    """The way that keeps full speed, but where another one is asked for."""
    flags = engine.BuilderFlags(more=("STRIP_PLAN", "STRICT_NANS"))
    assert flags.named == ("STRIP_PLAN", "STRICT_NANS", "REFIT_IDENTICAL")
    other = engine.BuilderFlags(more=("STRIP_PLAN", "REFIT"))
    assert other.named == ("STRIP_PLAN", "REFIT")
    assert engine.BuilderFlags(more=("REFIT",)).named == ("REFIT",)
    values = flags.identity("tensorrt", False, "")
    assert values["REFIT_IDENTICAL"] is True
    assert "REFIT_IDENTICAL" not in other.identity("tensorrt", False, "")


def test_weights_changed_during_the_build(bundle, tmp_path, monkeypatch):
    """The plans are of the old ones: no engine."""
    builder.install(monkeypatch, tmp_path)
    monkeypatch.setattr(engine, "first_card", lambda: CARD)
    monkeypatch.setattr(engine, "_version", lambda target, folder: VERSION)
    source = Path(shutil.copytree(bundle.path, tmp_path / "my.bundle"))
    opened = Bundle.open(source)
    with (source / WEIGHTS).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x00\x80\x3f")
    with pytest.raises(BundleError, match="weights.safetensors was changed since the bundle was"):
        engine.build(opened, stripped(replace(REQUEST, roles=("denoise",))), tmp_path / "e")
    assert not (tmp_path / "e").exists()


# --- what is loaded ------------------------------------------------------------------------------


def test_a_refitted_plan_computes_what_the_whole_one_does(build, bundle, opens):
    """The same bytes as the engine with its weights inside, the same tokens as the bundle."""
    for memory in ("fast", "lean"):
        mine, tokens = passes(opens(build(stripped(REQUEST)), memory=memory))
        theirs, _ = passes(opens(build(REQUEST), memory=memory))
        for one, other in zip(mine, theirs, strict=True):
            assert one.tobytes() == other.tobytes()
        expected, right = passes(open_engine(bundle, slots=2, threads=1, memory=memory))
        assert tokens == right
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_weights_of_another_precision(build, opens):
    """Plans of a converted bundle are refitted from the weights that were made for them."""
    half = replace(REQUEST, precision="fp16", roles=("commit_denoise",))
    path = build(stripped(half))
    assert EngineFolder.open(path).files[WEIGHTS] != EngineFolder.open(path).identity.weights
    mine, theirs = (passes(opens(one))[0] for one in (path, build(half)))
    for one, other in zip(mine, theirs, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_plan_with_weights_is_not_refitted(build, opens, monkeypatch):
    """REFIT alone leaves them in."""
    monkeypatch.setattr(runtime.Product, "Refitter", None)
    path = build(replace(REQUEST, builder_flags=("REFIT",), roles=("commit_denoise",)))
    opened = EngineFolder.open(path)
    assert not opened.refits
    assert WEIGHTS not in opened.files
    assert len(passes(opens(path))[1]) > 0


def test_the_mode_goes_by_the_weights(build, monkeypatch):
    """A plan without them is small; what is loaded is not."""
    opened = EngineFolder.open(build(stripped(REQUEST)))
    assert trt.plan_roles(opened, None, "logits") == ("denoise", "commit_denoise")
    monkeypatch.setattr(trt, "LEAN_ABOVE", (opened.path / "commit_denoise.plan").stat().st_size + 1)
    assert trt.LEAN_ABOVE < LEAN_ABOVE
    assert trt.plan_roles(opened, None, "logits") == ("commit_denoise",)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, "denoise.onnx"])
def test_a_changed_file_is_refused_before_a_plan_is_loaded(copied, opens, name):
    """Other weights compute something else, and TensorRT would not say so."""
    content = bytearray((copied / name).read_bytes())
    content[-3] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name} was changed after the build: sha256 "):
        opens(copied)
    (copied / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing: the engine is incomplete"):
        opens(copied)


def without(folder: Path, *names: str) -> None:
    """Take files out of engine.json."""
    values = json.loads((folder / MANIFEST).read_bytes())
    for name in names:
        del values["files"][name]
    del values["sha256"]
    (folder / MANIFEST).write_bytes(_sealed(values))


def test_an_engine_of_before_is_refused(copied, opens):
    """It says that its plans hold no weights, and lists nothing to put into them."""
    without(copied, WEIGHTS, *(f"{role}.onnx" for role in ROLES))
    assert not EngineFolder.open(copied).refits
    with pytest.raises(BackendError, match="its plans hold no weights .builder flag STRIP_PLAN"):
        opens(copied)
    shown = CliRunner().invoke(cli, ["inspect", str(copied)])
    assert "hold no weights, and the engine has none to put into them" in shown.stdout


def test_half_of_what_a_refit_needs_is_damage(copied):
    without(copied, "denoise.onnx")
    with pytest.raises(BundleError, match=r"refitted from denoise\.onnx is none of its files"):
        EngineFolder.open(copied)


def test_TB_09_a_refit_that_finds_not_all_weights(build, copied, opens, monkeypatch):
    """Where a graph calls functions, whose constants no refitter reads: one sentence."""
    graph = ir.load(copied / "denoise.onnx")
    del graph.graph.initializers["embedding.weight"]
    monkeypatch.setattr(trt_plan_stand_in.ir, "load", lambda path: graph)
    with pytest.raises(BackendError) as info:
        opens(copied, memory="fast")
    text = str(info.value)
    assert f"TensorRT does not put the weights of {copied / 'denoise.onnx'} into denoise.plan" in (
        text
    )
    assert "Only successfully refitted " in text
    assert "it lacks 'embedding.weight': build the engine again without STRIP_PLAN" in text


def test_TB_09_a_refit_that_fails(copied, opens, monkeypatch):
    """TensorRT says no at the last step, or gives no refitter: what it said is told."""

    def fails(self):
        self.logger.log(1, "CUDA failure 2: out of memory")
        return False

    monkeypatch.setattr(trt_plan_stand_in.Refitter, "refit_cuda_engine", fails)
    with pytest.raises(BackendError, match=r"denoise\.plan: CUDA failure 2: out of memory: build"):
        opens(copied, memory="fast")

    def none(engine, logger):
        logger.log(1, "the engine is not refittable")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(runtime.Product, "Refitter", staticmethod(none))
    with pytest.raises(BackendError, match=r"denoise\.plan: the engine is not refittable: build"):
        opens(copied, memory="fast")


def test_the_stand_in_runs_nothing_without_weights(copied, opens, monkeypatch):
    """So that the tests above show that weights were put in."""
    monkeypatch.setattr(trt._Runner, "_refit", lambda *_: None)
    one = opens(copied, memory="fast")
    with pytest.raises(runtime.Broken, match="a run of a plan that has no weights"):
        passes(one)


# --- around it -----------------------------------------------------------------------------------


def test_inspect_shows_where_weights_are(build):
    path = build(stripped(REQUEST))
    shown = CliRunner().invoke(cli, ["inspect", str(path)]).stdout
    size = (path / WEIGHTS).stat().st_size
    assert f"hold no weights; put in when loaded: weights.safetensors, {size:,} bytes" in shown
    data = json.loads(CliRunner().invoke(cli, ["inspect", str(path), "--json"]).stdout)
    assert data["refit"] == {
        "weights": WEIGHTS,
        "bytes": size,
        "graphs": {role: f"{role}.onnx" for role in sorted(ROLES)},
    }
    whole = CliRunner().invoke(cli, ["inspect", str(build(REQUEST)), "--json"]).stdout
    assert json.loads(whole)["refit"] is None


def test_the_cache_counts_and_keeps_the_files(build, tmp_path):
    """One of before, which nothing can refit, is built again."""
    path, notes = build(stripped(REQUEST)), []
    cache = EngineCache(tmp_path / "cache", notes=notes.append)
    identity = EngineFolder.open(path).identity

    def copy(folder: Path) -> None:
        shutil.copytree(path, folder, dirs_exist_ok=True)

    found = cache.make(identity, copy)
    assert cache.entries()[0].nbytes == sum(file.stat().st_size for file in path.iterdir())
    assert cache.find(identity) == found
    without(found, WEIGHTS, *(f"{role}.onnx" for role in ROLES))
    assert cache.find(identity) is None
    assert EngineFolder.open(cache.make(identity, copy)).refits
    assert "holds nothing that its plans could be refitted from" in notes[-1]
