"""`build`: real engines of a small model by TensorRT-RTX, and TB-09 at a stand-in of TensorRT."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trt_builder_stand_in as stand_in
from sample_models import attention_layer, mamba_layer, model

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, UsageError
from fixedstate.export import engine, engineprocess
from fixedstate.export.builderflags import BuilderFlags
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.enginecache import EngineCache
from fixedstate.export.enginechild import Progress
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.profiles import BuildRequest, Range
from fixedstate.plugins import library
from fixedstate.runtime.enginefile import MANIFEST, EngineFolder
from fixedstate.spec import Mamba2Sizes

RTX = BuildRequest(capabilities=("12.0",), precision="fp32", batch=Range(1, 1, 4))
TRT = BuildRequest(
    target="tensorrt",
    capabilities=("9.0",),
    precision="fp32",
    plugins="none",
    batch=Range(1, 1, 4),
    roles=("denoise",),
)
PLUGINS = BuildRequest(capabilities=("12.0",), plugins="required", roles=("denoise",))
VERSION = "11.4.0.106"
FITS = Mamba2Sizes(d_inner=32, heads=2, head_dim=16, d_state=16, groups=1, d_conv=4)
SMALL = Mamba2Sizes(d_inner=32, heads=4, head_dim=8, d_state=16, groups=1, d_conv=4)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A bundle of a model with these layers, blocks of 16, made once."""
    root = tmp_path_factory.mktemp("engines")
    made: dict[str, Bundle] = {}

    def export(name: str, *layers: Any) -> Bundle:
        if name not in made:
            spec = model(*layers, block_len=16)
            save_checkpoint(root / f"{name}.checkpoint", spec, random_tensors(spec, seed=7))
            export_bundle(root / f"{name}.checkpoint", root / name, fused=False)
            made[name] = Bundle.open(root / name)
        return made[name]

    return export


@pytest.fixture
def bundle(exported) -> Bundle:
    """One Mamba-2 layer of sizes that the kernels take."""
    return exported("fits", mamba_layer("forward", FITS))


@pytest.fixture
def known_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version without the process that asks for it, which costs seconds."""
    monkeypatch.setattr(engine, "_version", lambda target, folder: VERSION)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- real builds ---------------------------------------------------------------------------------


def test_float32_engine(bundle: Bundle, tmp_path: Path) -> None:
    """It opens, says what it was made of, and holds its weights."""
    told: list[tuple[str, float]] = []
    report = engine.build(bundle, RTX, tmp_path / "my.engine", progress=lambda *a: told.append(a))
    opened = EngineFolder.open(tmp_path / "my.engine")
    assert opened == EngineFolder.open(report.path)
    assert set(opened.plans) == {"denoise", "commit"}
    identity = opened.identity
    assert (identity.product, identity.capabilities) == ("tensorrt-rtx", ("12.0",))
    assert identity.bundle == bundle.digest
    assert identity.version == library.tensorrt_rtx().__version__
    assert identity.flags == {
        "PROFILING_VERBOSITY": "DETAILED",
        "STRONGLY_TYPED": True,
        "TF32": False,
    }
    assert (identity.plugins, opened.check) == ((), {})
    layers = json.loads((report.path / engine.LAYERS).read_text())
    for role, build in report.builds.items():
        assert build.plan_bytes == (report.path / f"{role}.plan").stat().st_size
        assert build.plan_bytes > build.weight_bytes > 0
        assert 100e6 < build.peak_bytes < 2e9
        assert build.layers["MATRIX_MULTIPLY"] > 1
        assert build.steps["function"] > 1
        assert (build.plugins, build.warnings) == ((), ())
        assert layers[role]["layers"] == build.layers
    assert left(tmp_path) == ["my.engine"]
    assert left(report.path) == ["commit.plan", "denoise.plan", MANIFEST, engine.LAYERS]
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert len({text for text, _ in told}) == 3
    assert any(share % 0.5 > 0 for share in shares)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_engine_with_plugins(bundle: Bundle, tmp_path: Path, precision: str) -> None:
    """Converted, compared, and every node a plugin whose kernels are named by their hashes."""
    request = BuildRequest(capabilities=("12.0",), precision=precision, plugins="required")
    report = engine.build(bundle, request, tmp_path / "my.engine")
    found = EngineFolder.open(report.path)
    assert found.precision.name == precision
    assert found.check["passed"] is True
    assert precision in found.check["kind"]
    assert [plugin.kind for plugin in found.identity.plugins] == ["python"] * 4
    for plugin in found.identity.plugins:
        assert all(name.endswith(".ptx") for name in plugin.texts)
        assert plugin.texts
    for build in report.builds.values():
        assert build.layers["PLUGIN_V3"] == build.steps["custom_layer"] == len(build.plugins) == 2


def test_each_half_weight_takes_two_bytes(exported, tmp_path: Path) -> None:
    """Number 2 of the issue: plans of three precisions differ by the bytes of their weights."""
    wide = Mamba2Sizes(d_inner=512, heads=8, head_dim=64, d_state=16, groups=1, d_conv=4)
    source = exported("wide", mamba_layer("forward", wide))
    sizes, weights = {}, {}
    for precision in ("fp32", "fp16", "bf16"):
        request = BuildRequest(
            capabilities=("12.0",), precision=precision, roles=("denoise",), plugins="none"
        )
        build = engine.build(source, request, tmp_path / precision).builds["denoise"]
        sizes[precision], weights[precision] = build.plan_bytes, build.weight_bytes
    saved = weights["fp32"] - weights["fp16"]
    assert saved > 80_000
    assert weights["bf16"] == weights["fp16"]
    print({name: (sizes[name], weights[name]) for name in sizes})
    for half in ("fp16", "bf16"):
        assert sizes["fp32"] - sizes[half] == pytest.approx(saved, abs=0.25 * saved)


def test_a_node_that_no_kernel_takes_keeps_its_body(exported, tmp_path: Path) -> None:
    """`auto` of TensorRT, whose graph TensorRT-RTX's parser reads here with all plugins there."""
    source = exported(
        "mixed", mamba_layer("forward", FITS), mamba_layer("forward", SMALL), attention_layer()
    )
    request = BuildRequest(target="tensorrt", capabilities=("9.0",), roles=("denoise",))
    planned = engine.planned_build(source, request)
    role = planned.roles["denoise"]
    assert engine.planned_plugins(role) == 3  # two convolutions, one scan
    assert sum(count for _, count, _ in role.kernels) == 4
    identity = engine.identity_of(source, planned, BuilderFlags(), VERSION)
    work = engine._Build(source, planned, BuilderFlags(), identity, lambda *_: None, None)
    converted, _ = work._source(tmp_path)
    graph = work._without_refused(role, converted.path / "denoise.onnx", converted, tmp_path)
    finished = engineprocess.run(
        {
            "action": "build",
            "target": "tensorrt-rtx",
            "role": "denoise",
            "graph": str(graph),
            "plan": str(tmp_path / "denoise.plan"),
            "names": list(role.names),
            "profiles": list(role.profiles),
            "capabilities": ["12.0"],
            "flags": BuilderFlags().to_dict(),
            "needs": [need.to_dict() for need in role.needs],
            "timing_cache": None,
        },
        tmp_path,
    )
    result = engineprocess.require(finished, "tensorrt-rtx", VERSION, "denoise")
    assert result["layers"]["PLUGIN_V3"] == len(result["plugins"]) == 3
    assert list(engine._plugin_problems(role, result)) == []


def test_the_same_engine_is_built_once(bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    """Without `out` it is found in the cache again."""
    monkeypatch.setattr(engine, "_version", lambda target, folder: "1.7.1.116")
    cache = EngineCache(tmp_path / "cache")
    request = BuildRequest(capabilities=("12.0",), precision="fp32", roles=("denoise",))
    first = engine.build(bundle, request, cache=cache)
    assert first.path.name == first.engine.identity.key
    monkeypatch.setattr(engineprocess, "run", lambda *a, **k: pytest.fail("it was built again"))
    again = engine.build(bundle, request, cache=cache)
    assert (again.path, dict(again.builds)) == (first.path, {})
    with pytest.raises(UsageError, match="--force replaces what is at -o"):
        engine.build(bundle, request, cache=cache, force=True)


def test_no_link_to_the_library(bundle: Bundle, tmp_path: Path, monkeypatch, known_version) -> None:
    """Where it cannot be made, the process is not let into its end."""
    monkeypatch.setattr(library, "link_rtx", lambda folder: folder)
    with pytest.raises(BackendError, match="ends the process where there is none"):
        engine.build(bundle, PLUGINS, tmp_path / "my.engine")
    assert left(tmp_path) == []


def test_a_process_that_terminates_is_a_sentence(
    bundle: Bundle, tmp_path: Path, monkeypatch, known_version
) -> None:
    """The real std::terminate of TensorRT-RTX, at a plugin node without the library's link."""
    (tmp_path / "sitecustomize.py").write_text(
        "from fixedstate.plugins import library\nlibrary._check_rtx_library = lambda: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(library, "link_rtx", lambda folder: folder)
    with pytest.raises(BackendError) as info:
        engine.build(bundle, PLUGINS, tmp_path / "my.engine")
    text = str(info.value)
    assert "ended its process (SIGABRT), its last words: 'terminate called" in text
    assert "build with --plugins none" in text
    assert left(tmp_path) == ["sitecustomize.py"]


# --- TB-09: failures, at the stand-in ------------------------------------------------------------


def test_calls_of_a_build(bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    """TB-02, TB-05: typed strongly, no precision flag, each dynamic input in each profile once."""
    record = stand_in.install(monkeypatch, tmp_path)
    request = BuildRequest(
        target="tensorrt",
        capabilities=("9.0",),
        batch=Range(1, 1, 4),
        blocks=Range(2, 2, 4),
        timing_cache=str(tmp_path / "times.cache"),
        builder_flags=("STRICT_NANS",),
    )
    flags = BuilderFlags(optimization_level=5, hardware="same", version_compatible=True)
    report = engine.build(bundle, request, tmp_path / "my.engine", flags=flags)
    identity = report.engine.identity
    assert (identity.product, identity.version) == ("tensorrt", VERSION)
    assert [plugin.kind for plugin in identity.plugins] == ["aot"] * 4
    assert identity.flags == {
        "BUILDER_OPTIMIZATION_LEVEL": 5,
        "PROFILING_VERBOSITY": "DETAILED",
        "STRICT_NANS": True,
        "STRONGLY_TYPED": True,
        "TF32": False,
        "VERSION_COMPATIBLE": True,
        "hardware_compatibility": "same",
        "timing_cache": True,
    }
    done = stand_in.calls(record)
    named = [name for name, _ in done]
    assert named.count("Builder") == named.count("build_serialized_network") == 2
    assert [value for name, value in done if name == "create_network"] == [2, 2]
    assert [value for name, value in done if name == "clear_flag"] == ["TF32"] * 2
    assert [v for n, v in done if n == "set_flag"] == ["STRICT_NANS", "VERSION_COMPATIBLE"] * 2
    levels = [v for n, v in done if n == "hardware_compatibility_level"]
    assert levels == ["SAME_COMPUTE_CAPABILITY"] * 2
    profiles = [value for name, value in done if name == "add_optimization_profile"]
    assert len(profiles) == 3  # denoise, one block, prefill
    commit = report.engine.plans["commit"]
    dynamic = {p.name for p in commit.inputs if any(isinstance(d, str) for d in p.shape)}
    assert set(profiles[1]) == set(profiles[2]) == dynamic
    assert profiles[2]["input_ids"] == [[1, 32], [1, 32], [4, 64]]
    # the second role reads what the first one timed
    assert [v for n, v in done if n == "create_timing_cache"] == [0, 5]
    assert [v for n, v in done if n == "set_timing_cache"] == [False, False]
    file = engine.timing_cache(tmp_path / "times.cache", VERSION)
    assert file.read_bytes() == b"timestimes"
    assert file != engine.timing_cache(tmp_path / "times.cache", "11.5.0.1")


FAILURES = {
    "parser": (
        "denoise: TensorRT 11.4.0.106 cannot parse the graph: node 'layers.0.scan' (Scan): Asser",
        "must be 0; node 'layers.1.pad' (Pad): INVALID_NODE: pads are not constant: export the ",
    ),
    "parser, no word": ("cannot parse the graph: it gave no reason: export the bundle again",),
    "builder": (
        "denoise: TensorRT 11.4.0.106 made no engine: Error Code 10: no implementation for node ",
        "node MatMul_7: build with --plugins none or another --precision",
    ),
    "silent": ("made no engine: it gave no reason: build with --plugins none",),
    "lean": ("Unable to load library: libnvinfer_lean.so.11", "that holds libnvinfer_lean.so.11"),
    "no card": (
        "could not start: CUDA initialization failure with error: 35: it needs a card",
        "--target tensorrt-rtx, which needs none",
    ),
    "abort": (
        "ended its process (SIGABRT), its last words: 'terminate called without an active exc",
        "exception': build with --plugins none",
    ),
    "killed": ("was killed (SIGKILL) at 0.", "memory ran out: lower --batch, --blocks"),
    "memory": ("ran out of memory: lower --batch, --blocks or --capacity",),
    "exit": ("ended its process with exit status 3: report this model",),
    "dtype": ("read is not what was planned: 'input_ids' is FLOAT [-1, 16], expected INT64",),
    "hang": ("took longer than 3 seconds and was ended: allow more with --timeout",),
}


@pytest.mark.parametrize("fail", FAILURES)
def test_TB_09_one_sentence_and_nothing_left(
    bundle: Bundle, tmp_path: Path, monkeypatch, known_version, fail: str
) -> None:
    """Whatever ends a build: what, where, what to do; no file and no process stays."""
    stand_in.install(monkeypatch, tmp_path, fail=fail)
    before = left(tmp_path)
    with pytest.raises(BackendError) as info:
        engine.build(bundle, TRT, tmp_path / "my.engine", timeout=3 if fail == "hang" else None)
    text = str(info.value)
    print(text)
    for words in FAILURES[fail]:
        assert words in text
    assert "\n" not in text
    assert set(left(tmp_path)) - set(before) <= {"calls.jsonl"}


@pytest.mark.parametrize(
    ("registry", "words"),
    [
        ({"lacks": "SsdBlockDenoise"}, "version 1: its name is not registered"),
        ({"version": "2"}, "it is registered in version '2', not '1'"),
        ({"namespace": "other"}, "it is registered in the namespace 'other', not 'fixedstate'"),
        ({"fields": ["other"]}, "the registered one has no field 'block_len'"),
    ],
)
def test_TB_01_the_registry_is_looked_at_first(
    bundle: Bundle, tmp_path: Path, monkeypatch, known_version, registry, words: str
) -> None:
    """Before the graph is parsed, since the parser would take function bodies in silence."""
    record = stand_in.install(monkeypatch, tmp_path, registry=registry)
    request = BuildRequest(target="tensorrt", capabilities=("9.0",), roles=("denoise",))
    with pytest.raises(BackendError) as info:
        engine.build(bundle, request, tmp_path / "my.engine")
    assert "plugin fixedstate::SsdBlockDenoise version 1" in str(info.value)
    assert words in str(info.value)
    assert not record.exists()  # no builder was made
    assert "my.engine" not in left(tmp_path)


def test_a_plugin_that_the_parser_passes_over(
    bundle: Bundle, tmp_path: Path, monkeypatch, known_version
) -> None:
    """It says nothing about it and takes the function body."""
    stand_in.install(monkeypatch, tmp_path, fail="passed over")
    request = BuildRequest(target="tensorrt", capabilities=("9.0",), roles=("denoise",))
    with pytest.raises(BackendError, match="0 plugin layers, 2 planned"):
        engine.build(bundle, request, tmp_path / "my.engine")


def test_no_package(bundle: Bundle, tmp_path: Path) -> None:
    """TensorRT is not installed here: the extra that brings it is named."""
    with pytest.raises(BackendError) as info:
        engine.build(bundle, TRT, tmp_path / "my.engine")
    assert "TensorRT is not installed" in str(info.value)
    assert "fixedstate[trt]" in str(info.value)
    assert left(tmp_path) == []


def _hears_interrupts() -> None:
    """A job in the background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _hanging_build(
    bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command on a builder that never ends: its process, and the number of its child."""
    stand_in.install(monkeypatch, folder, fail="hang")
    record = folder / "calls.jsonl"
    command = [sys.executable, "-m", "fixedstate", "build", str(bundle.path), "-o", "my.engine"]
    command += ["--target", "tensorrt", "--compute-capability", "9.0", "--precision", "fp32"]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_interrupts,
    ) as parent:
        deadline = time.monotonic() + 60
        while not (record.exists() and "build_serialized" in record.read_text()):
            assert time.monotonic() < deadline
            assert parent.poll() is None, parent.communicate()
            time.sleep(0.05)
        (child,) = _children(parent.pid)
        yield parent, child


def test_interrupt_ends_the_build_and_leaves_nothing(
    bundle: Bundle, tmp_path: Path, monkeypatch
) -> None:
    """Ctrl-C: exit 130, no file, and no process that goes on."""
    with _hanging_build(bundle, tmp_path, monkeypatch) as (parent, child):
        parent.send_signal(signal.SIGINT)
        out, err = parent.communicate(timeout=30)
    assert (parent.returncode, out, err.strip()) == (130, "", "error: interrupted")
    assert not Path(f"/proc/{child}").exists()
    assert left(tmp_path) == ["calls.jsonl", "packages"]


def test_a_build_ends_with_the_process_that_asked(
    bundle: Bundle, tmp_path: Path, monkeypatch
) -> None:
    """Killed without a chance to tidy up: the child does not go on alone."""
    with _hanging_build(bundle, tmp_path, monkeypatch) as (parent, child):
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and _command(child):
        assert time.monotonic() < deadline, "the child goes on"
        time.sleep(0.05)
    assert not (tmp_path / "my.engine").exists()


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# --- parts ---------------------------------------------------------------------------------------


def test_peak_is_of_the_process_alone() -> None:
    """Not of the process it was forked from, which `wait4` counts in."""
    large = bytearray(os.urandom(1)) * 300_000_000
    code = "from fixedstate.export.engineprocess import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1e6 < int(done.stdout) < len(large) < engineprocess.peak_bytes()
    assert engineprocess.peak_bytes("no process") == 0


def test_progress_of_phases_inside_phases() -> None:
    """A step of a phase is as large as all of the phase inside it; it never goes back."""
    told: list[float] = []
    progress = Progress(lambda message: told.append(message["share"]))
    steps = [
        ("start", "all", None, 4),
        ("step", "all", 0),
        ("start", "inner", "all", 2),
        ("step", "inner", 0),
        ("step", "inner", 1),
        ("finish", "inner"),
        ("step", "all", 1),
        ("step", "unknown", 3),
        ("start", "none", "all", 0),
        ("step", "none", 9),
        ("step", "all", 3),
        ("finish", "all"),
    ]
    for name, *arguments in steps:
        progress._told = -1.0
        getattr(progress, name)(*arguments)
    assert told == [0.25, 0.375, 0.5, 0.5, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tf32": True}, "TF32 is off"),
        ({"strongly_typed": False}, "strongly typed"),
        ({"optimization_level": 6}, "optimization level 6: expected 0 to 5"),
        ({"hardware": "all"}, "hardware compatibility 'all' is unknown"),
        ({"more": ("FP16",)}, "builder flag FP16 is not one of REFIT, STRIP_PLAN"),
    ],
)
def test_flags_that_are_none(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BuilderFlags(**values)


def test_flags_survive_json() -> None:
    flags = BuilderFlags(optimization_level=1, hardware="ampere+", more=("REFIT",))
    assert BuilderFlags.from_dict(json.loads(json.dumps(flags.to_dict()))) == flags


def test_a_card_is_needed_for_refit_only() -> None:
    """The reason is said; with a card there is none."""
    flags = BuilderFlags(more=("REFIT", "STRIP_PLAN", "STRICT_NANS"))
    reasons = flags.refusals("tensorrt-rtx", cards=False)
    assert [reason.split(":")[0] for reason in reasons] == [
        "builder flag REFIT",
        "builder flag STRIP_PLAN",
    ]
    assert flags.refusals("tensorrt-rtx", cards=True) == []


def test_a_card_is_really_needed_for_refit(bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    """TensorRT-RTX's own refusal, where the plan did not know better: a sentence all the same."""
    if engine.first_card() is not None:
        pytest.skip("needs a machine without an NVIDIA card: here is one")
    monkeypatch.setattr(BuilderFlags, "refusals", lambda self, target, cards: [])
    request = BuildRequest(
        capabilities=("12.0",), precision="fp32", roles=("denoise",), builder_flags=("REFIT",)
    )
    with pytest.raises(BackendError) as info:
        engine.build(bundle, request, tmp_path / "my.engine")
    assert "made no engine" in str(info.value)
    assert "it needs a card for this: build on a machine with the card" in str(info.value)
    assert left(tmp_path) == []
