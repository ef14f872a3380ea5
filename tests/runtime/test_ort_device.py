"""Providers of ONNX Runtime on a card, without one: a stand-in where every port is an address."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from toy_bundle import write_toy_bundle

from fixedstate.bundle import Bundle
from fixedstate.errors import BackendError, CapacityError, UsageError
from fixedstate.ports import Port
from fixedstate.runtime import Request, Settings, Snapshot, load, ort, ortdevice
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.laws import check_engine
from fixedstate.runtime.ortplaces import SHAPE_OPS, check_places
from fixedstate.state import Precision

sys.path.append(str(Path(__file__).parent))

from ort_device_stand_in import CPU, SIZES, Provider
from test_trt import decoded, reference, states

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
RTX = "NvTensorRTRTXExecutionProvider"


@pytest.fixture
def bench(monkeypatch):
    """A provider that is none; everything on its card has to be given back."""
    made = Provider()
    made.install(monkeypatch)
    yield made
    assert not made.card.allocations
    assert not made.card.pinned


@pytest.fixture
def on_card(bench):
    """Opens an engine on the stand-in, closed behind the test."""
    opened = []

    def opens(path, roles=(), **options):
        bundle = path if isinstance(path, Bundle) else Bundle.open(path, verify_weights=False)
        given = {"provider": "cuda", "threads": 1, **options}
        if roles:
            opened.append(ortdevice.open_engine(bundle, roles, **given))
        else:
            opened.append(open_engine(bundle, **given))
        return opened[-1]

    yield opens
    for engine in opened:
        engine.close()


def on_cpu(path, **options):
    return open_engine(Bundle.open(path, verify_weights=False), threads=1, **options)


# --- the same tokens, the same state --------------------------------------------------------------

WAYS = {
    "apart": ("denoise", "commit"),
    "beside the fused graph": ("denoise", "commit_denoise"),
    "one graph": ("commit_denoise",),
}


@pytest.mark.parametrize(
    ("name", "way", "times"),
    [(name, way, 2) for name in ("F2", "F3", "F4") for way in WAYS]
    + [("tiny-attention", "apart", 1), ("tiny-hybrid", "beside the fused graph", 1)]
    + [("tiny-mamba", "one graph", 1)],
)
def test_tokens_and_state_are_those_of_the_cpu(bench, on_card, bundle_path, name, way, times):
    """Greedy and sampled, three rows, over the same slots again; state byte for byte."""
    path = bundle_path(name, fused=True)
    engine = on_card(path, WAYS[way], slots=3)
    expected = reference(path, WAYS[way], 3)
    assert (engine.roles, engine.fuses) == (expected.roles, expected.fuses)
    assert (engine.provider, engine.limit) == ("cuda", None)
    for _ in range(times):
        assert decoded(engine) == decoded(expected)
        assert bench.card.read == 0  # of all that was decoded, no copy of state
        assert states(engine) == states(expected)
        bench.card.read = 0
    ids = np.zeros((2, engine.spec.block_len), np.int64)
    engine.denoise(ids)
    bound = [len(session.bindings) for session in bench.sessions]
    right = engine.denoise(ids).tobytes()
    assert engine.denoise(ids).tobytes() == right
    assert [len(session.bindings) for session in bench.sessions] == bound  # once for each pass
    assert sum(bound) < sum(session.runs for session in bench.sessions)
    assert bench.card.captures == 0


def test_state_never_comes_to_the_host(bench, on_card, bundle_path):
    """Per pass: ids, lengths and places there, logits back; a commit brings back nothing."""
    engine = on_card(bundle_path("tiny-hybrid", fused=True), slots=4, memory="fast")
    spec, length, card = engine.spec, engine.spec.block_len, bench.card
    ids = np.full((3, length), 5)
    logits, small = 3 * length * spec.vocab_rows * 4, 3 * length * 8 + 3 * 8
    bench.card.to_host = bench.card.to_device = 0
    for _ in range(3):
        for run, there, back in (
            (lambda: engine.denoise(ids), small, logits),
            (lambda: engine.commit(ids, np.full(3, length)), small + 3 * 8, 0),
            (
                lambda: engine.commit_denoise(np.tile(ids, 2)),
                2 * small - 3 * 8 + 3 * 8,
                logits,
            ),
        ):
            before = card.to_device, card.to_host, engine.sent_bytes, engine.returned_bytes
            run()
            after = card.to_device, card.to_host, engine.sent_bytes, engine.returned_bytes
            moved = tuple(b - a for a, b in zip(before, after, strict=True))
            assert moved == (there, back, there, back)
    assert card.read == 0
    assert engine.read(0)["conv_state_000"].any()
    assert card.read == engine.state_bytes() + engine.kv_bytes(int(engine.past_length[0]))


def test_reduced_heads(on_card, bundle_path):
    """What a head gives, and nothing else, comes back."""
    path = bundle_path("F2", fused=True, head="top_k")
    engine = on_card(path, slots=2, head="top_k")
    expected = on_cpu(path, slots=2, head="top_k")
    assert (engine.head, engine.top_k) == (expected.head, expected.top_k)
    assert decoded(engine) == decoded(expected)
    assert states(engine) == states(expected)
    with pytest.raises(BackendError, match="the graphs that are loaded give top_k, not all scores"):
        engine.denoise(np.zeros((1, engine.spec.block_len), np.int64))


@pytest.mark.parametrize("direction", ["to the card", "from the card"])
def test_saved_states_go_on_elsewhere(on_card, bundle_path, direction):
    """Taken on one back end, gone on from on the other: the tokens of one that never moved."""
    path = bundle_path("F3", fused=True)
    card, cpu = on_card(path, slots=2), on_cpu(path, slots=2)
    taken, goes_on = (cpu, card) if direction == "to the card" else (card, cpu)
    ids = np.arange(3 * card.spec.block_len).reshape(1, -1) % 30
    taken.commit(ids, np.array([ids.shape[1]]), 1)
    saved = Snapshot.from_bytes(Snapshot.take(taken, 1, (4, 5), seed=9).to_bytes())
    saved.restore(goes_on, 0)
    assert states(goes_on)[0] == states(taken)[1]
    canvas = np.full((1, card.spec.block_len), card.spec.mask_id)
    assert goes_on.denoise(canvas, 0).tobytes() == taken.denoise(canvas, 1).tobytes()


def test_laws(on_card, bundle_path):
    """Along trajectories, byte for byte where rows have to be."""
    path = bundle_path("F3", fused=True)
    results = check_engine(
        lambda slots: on_card(path, slots=slots), block_counts=(1, 9), only=(1, 2, 4, 6, 7)
    )
    assert [(result.law, result.passed) for result in results] == [
        (law, True) for law in (1, 2, 4, 6, 7)
    ]


def test_no_profiles_no_bounds(bench, on_card, bundle_path):
    """Without a limit, rows grow and a commit of any width is one pass."""
    path, roles = bundle_path("F4", fused=True), ("denoise", "commit")
    engine, expected = on_card(path, roles, slots=5), reference(path, roles, 5)
    length = engine.spec.block_len
    ids = np.arange(40 * length).reshape(1, -1) % 30
    for blocks in (1, 40, 3):
        before = [session.runs for session in bench.sessions]
        for one in (engine, expected):
            one.commit(ids[:, : blocks * length], np.array([blocks * length]), 3)
        after = [session.runs for session in bench.sessions]
        assert sum(after) - sum(before) == 1
        assert states(engine) == states(expected)
    assert (
        (engine.limit, engine.buffers.capacity) == (None, expected.buffers.capacity) == (None, 512)
    )
    limited = on_card(path, slots=1, limit=24)
    assert (limited.limit, limited.buffers.capacity) == (24, 24)
    with pytest.raises(CapacityError, match="the limit is 24"):
        limited.commit(ids[:, : 4 * length], np.array([4 * length]))


def test_bf16_bundles_run_on_a_card(bench, toy, tmp_path):
    """OR-10: state is bound by the number of its type, which numpy has no name for."""
    folder = write_toy_bundle(
        tmp_path / "b", precision=Precision("bfloat16", "float32", "bfloat16")
    )
    bench.twin = toy  # its graphs compute, rounded at the ports
    request = Request([1, 2, 3, 4, 5, 6, 7, 8, 9], Settings(20, stop_ids=()))
    with load(folder, provider="cuda", slots=2) as decoder:
        (found,) = decoder.generate([request])
        kept = Snapshot.take(decoder.engine, 0).arrays
    with load(toy) as decoder:
        (expected,) = decoder.generate([request])
    assert (found.token_ids, found.provider) == (expected.token_ids, "cuda")
    assert {array.dtype.name for array in kept.values()} == {"uint16", "float32"}


def test_graphs_for_a_target_are_taken(bench, on_card, toy, tmp_path):
    """Role `denoise@ort-cuda` before `denoise`; the other providers have none of their own."""
    folder = write_toy_bundle(tmp_path / "b")
    (folder / "denoise.onnx").rename(folder / "other.onnx")
    (folder / "denoise.onnx").write_bytes(b"not read")
    bundle = Bundle.open(toy)
    graphs = dict(bundle.graphs)
    graphs["denoise@ort-cuda"] = replace(graphs["denoise"], file="other.onnx")
    engine = on_card(replace(bundle, path=folder, graphs=graphs))
    ids = np.arange(8)[None]
    assert engine.denoise(ids).argmax(-1).tolist() == [[2 * i % 35 for i in range(8)]]


# --- is it there ----------------------------------------------------------------------------------


def refused(path, provider="cuda", **options):
    """The error without a fallback; with it the CPU answers, and says so."""
    with pytest.raises(BackendError) as caught:
        load(path, provider=provider, **options)
    with load(path, provider=provider, allow_fallback=True, **options) as decoder:
        (result,) = decoder.generate([Request([1, 2], Settings(9, stop_ids=()))])
        assert (result.provider, len(result.token_ids)) == ("cpu", 9)
    return str(caught.value)


def test_OR_01_no_card(bench, toy, monkeypatch):
    """The provider is installed and there is no driver, or not that card."""
    monkeypatch.setattr(
        ortdevice, "DeviceDriver", partial(ortdevice.DeviceDriver.func, library=object())
    )
    assert "provider 'cuda' needs an NVIDIA card: the CUDA driver has no cuInit" in refused(toy)
    monkeypatch.setattr(
        ortdevice, "DeviceDriver", partial(ortdevice.DeviceDriver.func, library=bench.card)
    )
    with pytest.raises(BackendError, match="CUDA device 7 was asked for; the driver reports 1"):
        ortdevice.open_engine(Bundle.open(toy), ("denoise",), provider="cuda", device=7)


def test_OR_01_a_provider_that_starts_elsewhere(bench, toy):
    """Its libraries are missing: ONNX Runtime takes the CPU and says nothing."""
    bench.starts = False
    assert f"'cuda' ({CUDA}) could not start and ONNX Runtime took {CPU}" in refused(toy)
    assert all(session.runs == 0 for session in bench.sessions)


def test_OR_01_nodes_on_the_cpu_are_refused(bench, toy, bundle_path):
    """What computes sizes may be there; a product there would bring its operands to the host."""
    path = bundle_path("F3", fused=True)
    with load(path, provider="cuda") as decoder:
        assert set(decoder.engine.places) == {"denoise", "commit_denoise"}
        for placed in decoder.engine.places.values():
            assert set(placed[CPU]) == SIZES & {*placed[CPU]} != set()
            assert "MatMul" in placed[CUDA]
    bench.on_cpu = SIZES | {"MatMul", "Exp"}
    message = refused(path)
    assert "provider 'cuda' does not run all of" in message
    assert "x Exp, " in message
    assert "x MatMul, and travel at every pass" in message
    bench.on_cpu, bench.tells = SIZES, False
    assert "does not say where it runs the nodes of" in refused(toy)
    assert "install 1.24 or newer for provider 'cuda'" in refused(toy)


@pytest.mark.parametrize("port", ["past_ssm_state_001", "input_ids", "present_key_000"])
def test_ports_on_the_host_are_refused(bench, toy, port):
    """ONNX Runtime would copy an input once, when it is bound, and read that copy ever after."""
    bench.on_host = frozenset({port})
    assert f"on the CPU would be port {port}, and travel at every pass" in refused(toy)


def test_a_session_that_reads_a_copy_is_found(bench, toy, bundle_path):
    """It takes our memory for that of another device: nothing else would tell."""
    bench.copies = True
    for path in (toy, bundle_path("F2", fused=True)):
        assert "gives the same results for other tokens" in refused(path)


def test_what_a_copy_would_do(bench, toy, monkeypatch):
    """The two checks above are no empty words: without them tokens go wrong in silence."""
    request = Request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], Settings(20, stop_ids=()))
    with load(toy, provider="cuda") as decoder:
        right = decoder.generate([request])[0].token_ids
    monkeypatch.setattr(ort, "check_places", lambda *given: None)
    monkeypatch.setattr(ortdevice.OrtDeviceEngine, "check_reads", lambda engine: None)
    bench.copies = True
    with load(toy, provider="cuda") as decoder:
        assert decoder.generate([request])[0].token_ids != right


def test_without_our_stream_a_run_is_out_of_order(bench, toy, monkeypatch):
    """It reads ids that have not arrived."""
    settings = ortdevice.provider_settings

    def without(*given):
        return {k: v for k, v in settings(*given).items() if "stream" not in k}

    monkeypatch.setattr(ortdevice, "provider_settings", without)
    with pytest.raises(BackendError, match="gives the same results for other tokens"):
        load(toy, provider="cuda")


def test_a_failed_run_takes_nothing_over(bench, on_card, toy, monkeypatch):
    """The error is ONNX Runtime's; the row can go on."""
    engine = on_card(toy)
    ids = np.ones((1, 8), np.int64)
    engine.commit(ids, np.array([8]))
    kept = states(engine)
    fails = "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access"

    def run(session, binding):
        raise RuntimeError(fails)

    with monkeypatch.context() as patch:
        patch.setattr("ort_device_stand_in.Session.run_with_iobinding", run)
        with pytest.raises(BackendError, match=r"failed in a run of commit.onnx: CUDA failure 700"):
            engine.commit(ids, np.array([8]))
    assert states(engine) == kept
    engine.commit(ids, np.array([8]))
    assert engine.past_length.tolist() == [16]


def test_no_memory_is_a_clear_error_and_leaves_nothing(bench, toy):
    """Whatever was opened by then; it is no reason for the CPU."""
    bench.card.total = 1 << 10
    for allow in (False, True):
        with pytest.raises(CapacityError, match="no device memory for past_"):
            load(toy, provider="cuda", slots=2, allow_fallback=allow)


def test_a_closed_decoder_gives_everything_back(bench, toy):
    """In order: bindings, memory, sessions, stream, driver."""
    decoder = load(toy, provider="cuda")
    engine = decoder.engine
    engine.denoise(np.zeros((1, 8), np.int64))
    decoder.close()
    assert not bench.card.allocations
    assert not any(isinstance(thing, list) for thing in bench.card._objects.values())  # streams
    with pytest.raises(UsageError, match="this engine is closed"):
        engine.denoise(np.zeros((1, 8), np.int64))


# --- what a provider is told ----------------------------------------------------------------------


def test_settings_of_cuda(bench, on_card, toy):
    """Our stream, the card, full float32, and no timing of kernels."""
    engine = on_card(toy)
    stream = str(engine._stream.handle)
    assert [session.providers[0][0] for session in bench.sessions] == [CUDA, CUDA]
    assert bench.sessions[0].settings() == {
        "device_id": "0",
        "has_user_compute_stream": "1",
        "user_compute_stream": stream,
        "use_tf32": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
    }


def test_settings_of_tensorrt(bench, on_card, bundle_path, tmp_path):
    """The range of every input, so that no other shape makes it build again; CUDA beside it."""
    bench.name = TENSORRT
    bench.available = [TENSORRT, CUDA, CPU]
    path = bundle_path("F3", fused=True)
    with pytest.raises(UsageError, match="'tensorrt' builds its engine for sizes known before"):
        on_card(path, provider="tensorrt", slots=3)
    engine = on_card(
        path, provider="tensorrt", slots=3, limit=1000, engine_cache=tmp_path / "cache"
    )
    denoise, fused = bench.sessions
    (name, settings), (second, shared), last = denoise.providers
    assert (name, second, last) == (TENSORRT, CUDA, CPU)
    stream = str(engine._stream.handle)
    assert settings["user_compute_stream"] == shared["user_compute_stream"] == stream
    assert (shared["use_tf32"], settings["trt_engine_cache_enable"]) == ("0", "1")
    assert settings["trt_engine_cache_path"] == str(tmp_path / "cache")
    shapes = {
        level: dict(one.split(":") for one in settings[f"trt_profile_{level}_shapes"].split(","))
        for level in ("min", "opt", "max")
    }
    inputs = {port.name for port in engine._roles["denoise"].plan.inputs}
    assert set(shapes["min"]) == set(shapes["opt"]) == set(shapes["max"]) == inputs
    assert [shapes[level]["past_key_001"] for level in shapes] == [
        "1x2x256x8",
        "3x2x1000x8",
        "3x2x1000x8",
    ]
    wide = fused.settings()
    assert [
        dict(one.split(":") for one in wide[f"trt_profile_{level}_shapes"].split(","))["input_ids"]
        for level in shapes
    ] == ["1x8", "3x16", "3x128"]
    expected = on_cpu(path, slots=3, limit=1000)
    assert decoded(engine) == decoded(expected)
    assert (engine.provider, engine.limit) == ("tensorrt", 1000)
    with pytest.raises(CapacityError, match="the limit is 1000"):
        engine.commit(np.zeros((1, 1008), np.int64), np.array([1008]))


def test_without_keys_no_limit_is_needed(bench, on_card, bundle_path):
    """Sizes of a state are constant."""
    bench.name, bench.available = TENSORRT, [TENSORRT, CPU]
    engine = on_card(bundle_path("F2", fused=True), provider="tensorrt", slots=2)
    assert [name if isinstance(name, str) else name[0] for name in bench.sessions[0].providers] == [
        TENSORRT,
        CPU,
    ]
    assert decoded(engine) == decoded(on_cpu(bundle_path("F2", fused=True), slots=2))


def test_engine_caches_are_for_providers_that_build(bench, toy, tmp_path):
    """No option is ignored in silence."""
    for provider in ("cpu", "cuda"):
        with pytest.raises(UsageError, match=f"provider '{provider}' builds no engines, only"):
            load(toy, provider=provider, engine_cache=tmp_path)


class Options(onnxruntime.SessionOptions):
    """Options that note the devices they are given."""

    def add_provider_for_devices(self, devices, settings):
        self.devices, self.settings = devices, dict(settings)


@pytest.fixture
def plugin(bench, monkeypatch):
    """The TensorRT-RTX plugin: a package, a library that is registered once, one card."""
    found = SimpleNamespace(registered=[], cards=1)
    bench.name, bench.available = RTX, [CPU]

    def register(name, path):
        if found.registered:
            raise onnxruntime.capi.onnxruntime_pybind11_state.Fail(f"{name} is already registered")
        found.registered.append((name, path))

    def devices():
        cards = range(found.cards if found.registered else 0)
        return [SimpleNamespace(ep_name=CPU), *(SimpleNamespace(ep_name=RTX, n=n) for n in cards)]

    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", register)
    monkeypatch.setattr(onnxruntime, "get_ep_devices", devices)
    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    package = SimpleNamespace(get_library_path=lambda: "lib/plugin.so")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_nv_tensorrt_rtx", package)
    session = bench._session

    def with_options(source, options, enable_fallback=1, **where):
        if not where:
            where = {"providers": [(RTX, options.settings)]}
            assert [device.n for device in options.devices] == [0]
        return session(source, options, enable_fallback, **where)

    monkeypatch.setattr(onnxruntime, "InferenceSession", with_options)
    return found


def test_the_plugin_is_registered_once(bench, plugin, toy, tmp_path):
    """By the path its package names; a session gets its device instead of a name."""
    request = Request([1, 2, 3], Settings(20, stop_ids=()))
    with load(toy) as decoder:
        expected = decoder.generate([request])[0].token_ids
    for _ in range(2):
        options = {"provider": "tensorrt-rtx", "limit": 64, "engine_cache": tmp_path}
        with load(toy, **options) as decoder:
            (result,) = decoder.generate([request])
            assert (result.token_ids, result.provider) == (expected, "tensorrt-rtx")
    assert plugin.registered == [(RTX, "lib/plugin.so")]
    settings = bench.sessions[-1].settings()
    assert settings["nv_runtime_cache_path"] == str(tmp_path)
    assert "nv_profile_min_shapes" in settings
    assert "device_id" not in settings


def test_the_plugin_without_a_card_or_a_package(plugin, toy, monkeypatch):
    """What is there, and what to install."""
    plugin.cards = 0
    message = refused(toy, "tensorrt-rtx", limit=64)
    assert "its plugin finds no card that it runs on" in message
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_nv_tensorrt_rtx", None)
    plugin.registered.clear()
    message = refused(toy, "tensorrt-rtx", limit=64)
    assert f"which has {CPU}: install onnxruntime-ep-nv-tensorrt-rtx-cu13 beside" in message


def test_a_plugin_library_that_does_not_load(plugin, toy, monkeypatch):
    """As without a driver."""

    def fails(name, path):
        fail = onnxruntime.capi.onnxruntime_pybind11_state.Fail
        raise fail("[ONNXRuntimeError] : 1 : FAIL : Failed to load library: libcuda.so.1: none")

    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", fails)
    message = refused(toy, "tensorrt-rtx", limit=64)
    assert "does not load: Failed to load library: libcuda.so.1: none: check its package" in message


# --- beside the decode loop -----------------------------------------------------------------------


def test_generate_on_a_provider(bench, bundle_path):
    """The command line gives the same text, and everything back."""
    from click.testing import CliRunner

    from fixedstate.cli import cli

    words = ["--prompt", "once", "--prompt", "2 + 2", "--max-new-tokens", "40", "--seed", "4"]
    path, outputs = str(bundle_path("tiny-hybrid", fused=True)), []
    for provider in ("cpu", "cuda"):
        done = CliRunner().invoke(cli, ["generate", path, *words, "--provider", provider])
        assert done.exit_code == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert bench.sessions[0].runs > 2


def test_the_program_for_a_card(bench, bundle_path):
    """tests/gpu/engines/run.py --provider as far as it goes here; it finds wrong numbers."""
    place = Path(__file__).parents[1] / "gpu" / "engines" / "run.py"
    spec = importlib.util.spec_from_file_location("run_providers", place)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    results = {"problems": []}
    program.measure_provider(bundle_path("F3", fused=True), "cuda", results)
    assert results["problems"] == []
    assert results["compared"]["same_tokens"] == results["compared"]["clear_choices"] > 0
    assert {row["way"] for row in results["times"]} == {"cuda"}
    assert CUDA in results["places"]["denoise"]
    bench.bias = 1.0
    program.measure_provider(bundle_path("F3", fused=True), "cuda", results)
    assert any("logits" in problem for problem in results["problems"])


def test_passes_without_state_are_copied(bench, tmp_path):
    """Objective full: ids there, scores back at every run, and nothing is bound on the card."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> twice (float[B,N] x) => (float[B,N] y)'
        " { y = Add(x, x) }"
    )
    path = tmp_path / "twice.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    ports = [(Port(name, "float32", ("B", "n")),) for name in "xy"]
    session = ort.open_graph(path, *ports, provider="cuda")
    x, y = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    binding = session.bind({"x": x}, {"y": y})
    for value in (1, 5):
        x[:] = value
        binding.run()
        assert (y == 2 * value).all()
    assert (session.provider, bench.sessions[0].bindings) == ("cuda", [])
    assert (session.run({"x": x})["y"] == 10).all()


def test_the_rule_of_sizes_holds_for_every_graph(bundle_path):
    """What ONNX Runtime would keep on the host is of the operators that are allowed there.

    The rule of ``GetCpuPreferredNodes``: whatever depends on sizes and constants alone.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    for name in ("F2", "F3"):
        for file in sorted(bundle_path(name, fused=True).glob("*.onnx")):
            options.optimized_model_filepath = str(file.with_suffix(".plain"))
            onnxruntime.InferenceSession(str(file), options, providers=[CPU])
            graph = onnx.load(file.with_suffix(".plain"), load_external_data=False).graph
            file.with_suffix(".plain").unlink()
            kept, entering = sizes_only(graph), {port.name for port in graph.input}
            assert kept
            assert {node.op_type for node in kept} <= SHAPE_OPS
            assert not {name for node in kept for name in node.input} & entering


def sizes_only(graph):
    """Nodes that depend on nothing but sizes and small constants."""
    known = {one.name for one in graph.initializer if np.prod(one.dims) <= 100}
    sizes, found = set(), []
    for node in graph.node:
        if node.op_type in ("Shape", "Size"):
            sizes |= set(node.output)
            continue
        given = set(filter(None, node.input))
        if node.op_type != "Range" and given & sizes and given <= known | sizes:
            sizes |= set(node.output)
            found.append(node)
    return found


def test_check_places_needs_all_three():
    """A session that tells everything and has everything on the card passes."""
    node = SimpleNamespace(op_type="MatMul")
    port, memory = SimpleNamespace(name="x"), SimpleNamespace(name="Cuda")
    session = SimpleNamespace(
        get_provider_graph_assignment_info=lambda: [
            SimpleNamespace(ep_name=CUDA, get_nodes=lambda: [node])
        ],
        get_inputs=lambda: [port],
        get_outputs=lambda: [port],
        get_input_memory_infos=lambda: [memory],
        get_output_memory_infos=lambda: [memory],
    )
    check_places(Path("a.onnx"), session, "cuda")
    memory.name = "Cpu"
    with pytest.raises(BackendError, match="port x, port x"):
        check_places(Path("a.onnx"), session, "cuda")
