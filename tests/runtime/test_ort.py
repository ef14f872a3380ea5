"""ONNX Runtime sessions, files, dtypes, bindings (cases OR)."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from toy_bundle import ATTENTION, MAMBA, write_toy_bundle

from fixedstate.bundle import MANIFEST, SCHEMA, WEIGHTS, Bundle
from fixedstate.errors import BackendError, BundleError, CapacityError, UsageError
from fixedstate.ports import Port
from fixedstate.runtime import Request, Settings, load, ort
from fixedstate.runtime.compare import Tolerance, compare
from fixedstate.runtime.decoder import open_engine
from fixedstate.spec import LayerSpec
from fixedstate.state import Precision

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
CPU = "CPUExecutionProvider"


def answer(folder, **options):
    with load(folder, threads=1, **options) as decoder:
        return decoder.generate([Request(PROMPT, Settings(20, stop_ids=()))])[0]


@pytest.fixture
def graph_file(tmp_path):
    """A graph y = 2 x + ids."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> twice (float[B,N] x, int64[B,N] ids)'
        " => (float[B,N] y) { f = Cast<to = 1>(ids) z = Add(x, x) y = Add(z, f) }"
    )
    path = tmp_path / "twice.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


IN = (Port("x", "float32", ("B", "n")), Port("ids", "int64", ("B", "n")))
OUT = (Port("y", "float32", ("B", "n")),)


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_OR_01_no_silent_fallback(toy, provider, monkeypatch):
    """Asked for a device that is not there: an error, or the fallback by name in the result."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(BackendError, match=rf"provider '{provider}' .* is not in this ONNX"):
        load(toy, provider=provider)
    assert answer(toy, provider=provider, allow_fallback=True).provider == "cpu"


def test_OR_01_a_provider_that_cannot_start_is_noticed(toy, monkeypatch):
    """A build that lists a provider whose libraries are missing takes the CPU in silence."""
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: [ort.PROVIDERS["cuda"], CPU]
    )
    real, asked = onnxruntime.InferenceSession, []

    def on_cpu(source, options, providers, enable_fallback):
        asked.append(providers[0] if isinstance(providers[0], str) else providers[0][0])
        assert enable_fallback == 0  # or it would print, and take the CPU by itself
        return real(source, options, providers=[CPU])

    monkeypatch.setattr(onnxruntime, "InferenceSession", on_cpu)
    bundle, roles = Bundle.open(toy), ("denoise", "commit")
    with pytest.raises(BackendError, match="'cuda' .* could not start and ONNX Runtime took CPU"):
        ort.open_sessions(bundle, roles, provider="cuda")
    sessions = ort.open_sessions(bundle, roles, provider="cuda", allow_fallback=True)
    assert {session.provider for session in sessions.values()} == {"cpu"}
    assert asked == ["CUDAExecutionProvider"] * 2 + [CPU] * 2


def test_OR_01_unknown_names_are_usage_errors(toy):
    """A typing error is not a missing device."""
    with pytest.raises(UsageError, match="provider 'gpu' is unknown; use one of cpu, cuda"):
        load(toy, provider="gpu")
    with pytest.raises(UsageError, match="optimization 'max' is unknown"):
        load(toy, optimization="max")
    with pytest.raises(UsageError, match="threads must be 1 or more; got 0"):
        load(toy, threads=0)
    with pytest.raises(UsageError, match="slots must be 1 or more; got 0"):
        load(toy, slots=0)


def test_OR_02_kept_bindings_equal_plain_runs(toy):
    """Batch and blocks vary; memory bound once must not show what was in it before."""
    bundle = Bundle.open(toy)
    engine = open_engine(bundle, threads=1, slots=3)
    plain = ort.open_sessions(bundle, ("denoise", "commit"), threads=1)
    rng = np.random.default_rng(0)
    ports = {port.past.name: port for port in bundle.state.ports}
    for rows, blocks in [(1, 5), (2, 3), (1, 5), (3, 1), (2, 3), (1, 40), (3, 2), (2, 5)]:
        ids = rng.integers(0, 37, (rows, 8 * blocks))
        lengths = 8 * rng.integers(0, blocks + 1, rows)
        side, past = engine.buffers.align(rows), engine.past_length[:rows].copy()
        feeds = {n: engine.buffers.past(p, side, rows).copy() for n, p in ports.items()}
        feeds |= {"input_ids": ids, "past_length": past, "commit_length": lengths}
        wanted = plain["commit"].run(feeds)
        engine.commit(ids, lengths)
        for row in range(rows):
            state = engine.read(row)
            assert (state["ssm_state_001"] == wanted["present_ssm_state_001"][row]).all()
            new = state["key_000"][:, past[row] :]
            assert (new == wanted["present_key_000"][row][:, : lengths[row]]).all()
        side = engine.buffers.align(rows)
        feeds = {n: engine.buffers.past(p, side, rows) for n, p in ports.items()}
        feeds |= {"input_ids": ids[:, :8], "past_length": engine.past_length[:rows]}
        assert (engine.denoise(ids[:, :8]) == plain["denoise"].run(feeds)["logits"]).all()


def test_OR_03_strided_arrays_are_copied_or_refused(graph_file):
    """Bound by pointer, a transposed array gives wrong numbers without an error."""
    session = ort.open_graph(graph_file, IN, OUT)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    ids = np.arange(24).reshape(3, 8)[:, ::2]
    for feed in (x, np.asfortranarray(x), np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2]):
        assert (session.run({"x": feed, "ids": ids})["y"] == 2 * feed + ids).all()
    whole = np.ascontiguousarray(ids)
    with pytest.raises(BackendError, match="input 'x' is strided"):
        session.bind({"x": x.T.copy().T, "ids": whole}, {"y": np.zeros_like(x)})


def test_OR_03_strided_ids_and_states(toy):
    """What a caller hands over may have any layout."""
    engine = open_engine(Bundle.open(toy), threads=1, slots=2)
    ids = np.random.default_rng(0).integers(0, 37, (2, 16))
    engine.commit(ids, np.array([16, 8]))
    expected = engine.denoise(ids[:, :8]).copy()
    state = [engine.read(row) for row in (0, 1)]
    for layout in (np.asfortranarray, lambda a: np.repeat(a, 2, axis=-1)[..., ::2]):
        engine.reset(0)
        engine.reset(1)
        engine.commit(layout(ids), layout(np.array([16, 8])))
        assert (engine.denoise(layout(ids[:, :8])) == expected).all()
        engine.write(0, {name: layout(array) for name, array in state[0].items()}, 16)
        assert (engine.denoise(layout(ids[:, :8])) == expected).all()
    assert (engine.denoise(ids[:, :8].astype(np.int32)) == expected).all()


def test_OR_03_bound_arrays_stay_alive(graph_file):
    """Nobody else may hold them."""
    session = ort.open_graph(graph_file, IN, OUT)
    out = np.zeros((64, 64), np.float32)
    binding = session.bind(
        {"x": np.full((64, 64), 3, np.float32), "ids": np.full((64, 64), 1)}, {"y": out}
    )
    gc.collect()
    noise = [np.full((64, 64), 99, np.float32) for _ in range(200)]
    binding.run()
    assert (out == 7).all()
    del noise


def test_one_memory_is_never_input_and_output(graph_file):
    """ONNX Runtime gives silently wrong numbers then."""
    session = ort.open_graph(graph_file, IN, OUT)
    x, ids = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.int64)
    for target in (x, x[:], x.reshape(-1)[:4].reshape(1, 4)):
        with pytest.raises(BackendError, match=r"'x' and output 'y' (share|are one)"):
            session.bind({"x": x, "ids": ids}, {"y": target})


def test_ports_of_a_binding_are_checked(graph_file):
    """A wrong name or dtype is named, before anything runs."""
    session = ort.open_graph(graph_file, IN, OUT)
    x = np.zeros((1, 1), np.float32)
    with pytest.raises(BackendError, match=r"missing \['ids'\], unknown \['id'\]"):
        session.run({"x": x, "id": x})
    with pytest.raises(BackendError, match="'ids' is float32, the graph wants int64"):
        session.run({"x": x, "ids": x})


def test_OR_05_first_block_has_no_past(toy):
    """Buffers have a constant size, so nothing of length 0 is ever bound."""
    engine = open_engine(Bundle.open(toy), threads=1)
    ids = np.full((1, 8), 36)
    assert engine.denoise(ids).argmax(-1).tolist() == [[(36 + i) % 35 for i in range(8)]]


def test_OR_06_weights_lie_in_a_side_file(toy):
    """No graph file holds weights, so none comes near the two gigabytes of a protobuf."""
    assert (toy / WEIGHTS).is_file()
    assert max(file.stat().st_size for file in toy.glob("*.onnx")) < 20_000


def test_OR_08_a_moved_bundle_is_complete(toy, tmp_path):
    """Copied elsewhere, the first place gone, opened from another folder, read-only."""
    expected = answer(toy).token_ids
    first, second = tmp_path / "a" / "x.bundle", tmp_path / "b" / "y.bundle"
    shutil.copytree(toy, first)
    second.parent.mkdir()
    shutil.move(first, second)
    for file in second.iterdir():
        file.chmod(0o444)
    second.chmod(0o555)
    try:
        assert answer(second).token_ids == expected
    finally:
        second.chmod(0o755)


@pytest.mark.parametrize("layout", ["one store", "two stores"])
def test_OR_08_files_may_be_links(toy, tmp_path, layout):
    """Hub caches keep blobs under other names, mounted maps in other folders."""
    folder = tmp_path / "linked.bundle"
    folder.mkdir()
    for i, file in enumerate(sorted(toy.iterdir())):
        store = tmp_path / ("store" if layout == "one store" else f"store{i}")
        store.mkdir(exist_ok=True)
        shutil.copy(file, store / f"blob{i}")
        (folder / file.name).symlink_to(store / f"blob{i}")
    assert answer(folder).token_ids == answer(toy).token_ids


def test_OR_09_half_precision_files_are_run(tiny_half):
    """An fp16 bundle loads on the CPU (by casts) and its laws hold within its tolerance."""
    engine = open_engine(tiny_half, threads=1)
    ids = np.zeros((1, tiny_half.spec.block_len), np.int64)
    engine.commit(ids, np.array([tiny_half.spec.block_len]))
    assert np.isfinite(engine.denoise(ids)).all()


@pytest.fixture(params=["F2", "F2-forward", "F3", "F4"])
def tiny_half(request):
    return Bundle.open(request.getfixturevalue("bundle_path")(request.param, precision="fp16"))


def test_OR_10_bf16_is_refused_on_the_cpu(tmp_path):
    """Before the session, with advice; a fallback to the CPU changes nothing."""
    folder = write_toy_bundle(
        tmp_path / "b", precision=Precision("bfloat16", "float32", "bfloat16")
    )
    for options in ({}, {"provider": "cuda", "allow_fallback": True}):
        with pytest.raises(BackendError, match="is bf16 .* use an fp32 bundle on the CPU"):
            load(folder, **options)


def test_OR_11_newer_files_say_which_side_to_change(tmp_path):
    """IR 99, and a graph that needs a newer ONNX Runtime."""
    folder = write_toy_bundle(tmp_path / "ir", ir_version=99)
    with pytest.raises(BackendError, match="IR version.* install a newer onnxruntime, or export"):
        load(folder)
    folder = write_toy_bundle(tmp_path / "version", min_onnxruntime="99.1")
    with pytest.raises(
        BackendError,
        match=rf"needs ONNX Runtime 99.1 or newer, installed is {onnxruntime.__version__}: install",
    ):
        load(folder)


def test_OR_11_opset_of_the_future(graph_file):
    """The other half of a file that is too new."""
    model = onnx.load(graph_file)
    model.opset_import[0].version = 99
    graph_file.write_bytes(model.SerializeToString())
    with pytest.raises(BackendError, match="newer than this ONNX Runtime"):
        ort.open_graph(graph_file, IN, OUT)


@pytest.mark.parametrize(
    ("installed", "needed", "fine"),
    [
        ("1.23.2", "1.23", True),
        ("1.23.2", "1.23.2", True),
        ("1.9.0", "1.10.0", False),
        ("1.32.0+cpu", "1.32.0", True),
        ("1.24.0rc1", "1.24.1", False),
    ],
)
def test_versions_are_compared_as_numbers(toy, installed, needed, fine):
    """1.9 is older than 1.10."""
    graph = Bundle.open(toy).graphs["denoise"]
    graph = type(graph)("denoise", graph.file, graph.sha256, needed, graph.inputs, graph.outputs)
    if fine:
        ort.check_version(graph, installed)
        return
    with pytest.raises(BackendError, match=f"needs ONNX Runtime {needed}"):
        ort.check_version(graph, installed)


def test_a_graph_that_differs_from_its_manifest_is_refused(graph_file):
    """Names, dtypes and ranks, in both directions."""
    shapeless = Port("ids", "int64", ("B",))
    floating = Port("ids", "float32", ("B", "n"))
    for ports in (IN[:1], (IN[0], shapeless), (IN[0], floating)):
        with pytest.raises(BundleError, match=r"graph's inputs differ from bundle.json in \['ids'"):
            ort.open_graph(graph_file, ports, OUT)
    with pytest.raises(BundleError, match=r"outputs differ .* \['y', 'z'\]"):
        ort.open_graph(graph_file, IN, (Port("z", "float32", ("B", "n")),))


def test_damaged_graphs_are_one_sentence(tmp_path, graph_file):
    """Whatever ONNX Runtime says about it."""
    graph_file.write_bytes(graph_file.read_bytes()[:50])
    with pytest.raises(BackendError, match=r"cannot load .*twice.onnx: .*: export the bundle"):
        ort.open_graph(graph_file, IN, OUT)
    with pytest.raises(BundleError, match="none.onnx is missing"):
        ort.open_graph(tmp_path / "none.onnx", IN, OUT)


def test_OR_12_optimisation_levels_agree(tiny):
    """The same tokens at levels none, basic and all; the spread is within the tolerance."""
    rng = np.random.default_rng(0)
    spec = tiny.spec
    ids = rng.integers(0, spec.vocab_size, (2, 3 * spec.block_len))
    found = {}
    for level in ort.OPTIMIZATIONS:
        engine = open_engine(tiny, threads=1, slots=2, optimization=level)
        engine.commit(ids, np.array([3, 1]) * spec.block_len)
        logits = {"logits": engine.denoise(ids[:, : spec.block_len]).copy()}
        found[level] = logits | engine.read(0)
    for level in ("basic", "all"):
        labels = ("level none", f"level {level}")
        compare(found["none"], found[level], Tolerance.of("fp32"), labels=labels).require()


def test_subnormals_are_zero_in_every_thread():
    """A mostly empty cache is 2.5 times slower otherwise; the first session decides."""
    program = """
import threading, numpy as np, onnx.parser, onnxruntime
from fixedstate.runtime import ort
text = ('<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y)'
        '{ c = Constant<value_float = 1.0e-10>() y = Mul(x, c) }')
model = onnx.parser.parse_model(text).SerializeToString()
session = onnxruntime.InferenceSession(model, ort._options(1, "all"), providers=["%s"])
found = []
def run():
    found.append(session.run(None, {"x": np.full(9, 1e-30, np.float32)})[0].max())
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
np.finfo(np.float32).smallest_subnormal
assert found == [0, 0], found
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program % CPU], check=True)


def test_two_threads_share_a_runner(toy):
    """Calls are serialised: each gets the answer it gets alone."""
    expected = answer(toy).token_ids
    with load(toy, threads=1, slots=2) as decoder:
        found = []

        def ask():
            for _ in range(5):
                results = decoder.generate([Request(PROMPT, Settings(20, stop_ids=()))] * 3)
                found.extend(result.token_ids for result in results)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected] * 30


def test_a_changed_file_is_found(toy, tmp_path):
    """One byte; weights may be skipped by choice."""
    folder = tmp_path / "changed.bundle"
    shutil.copytree(toy, folder)
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS).write_bytes(weights)
    with pytest.raises(BundleError, match="was changed after the export"):
        load(folder)
    load(folder, verify_weights=False).close()
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["schema"] = 99
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"has schema 99, this version reads up to {SCHEMA}"):
        load(folder)


def test_roles_may_share_one_graph(toy, tmp_path):
    """A bundle with commit_denoise alone decodes the same; where it has all, one may choose."""
    folder = write_toy_bundle(tmp_path / "one.bundle", roles=("commit_denoise",))
    assert answer(folder).token_ids == answer(toy).token_ids
    folder = write_toy_bundle(tmp_path / "all", roles=("denoise", "commit", "commit_denoise"))
    for memory, sessions in (("fast", 2), ("lean", 1)):
        engine = open_engine(Bundle.open(folder), memory=memory)
        assert len(set(map(id, engine._sessions.values()))) == sessions
        assert answer(folder, memory=memory).token_ids == answer(toy).token_ids


def test_a_bundle_without_the_role_is_refused(tmp_path):
    """Not by a KeyError in the middle of a pass."""
    folder = write_toy_bundle(tmp_path / "half.bundle", roles=("denoise",))
    with pytest.raises(BundleError, match="has no graph 'commit_denoise'"):
        load(folder)


def test_autoregressive_bundles_load_but_do_not_generate(tmp_path):
    """They are there for checking."""
    layers = tuple(
        LayerSpec(kind, sizes, direction="forward")
        for kind, sizes in (("attention", ATTENTION), ("mamba2", MAMBA))
    )
    folder = write_toy_bundle(
        tmp_path / "ar.bundle", layers=layers, objective="causal", mask_id=None
    )
    with load(folder) as decoder:
        with pytest.raises(UsageError, match="autoregressive"):
            decoder.generate([Request([1])])


def test_a_closed_decoder_says_so(toy):
    """Instead of an attribute error."""
    decoder = load(toy)
    decoder.close()
    with pytest.raises(UsageError, match="this decoder is closed"):
        decoder.generate([Request([1])])


def test_limit_is_for_prompt_and_answer(toy):
    """A request that cannot fit is refused before its first pass."""
    assert len(answer(toy, limit=32).token_ids) == 20
    with pytest.raises(CapacityError, match="the limit is 31"):
        answer(toy, limit=31)
    with pytest.raises(UsageError, match="limit must be 1 token or more; got 0"):
        load(toy, limit=0)
