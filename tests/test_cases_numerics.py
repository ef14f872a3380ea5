"""Cases NU: numbers that overflow, vanish or drift in a careless form, judged by float64 loops."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from one_op import run_op, single
from onnx import TensorProto, numpy_helper
from reference_model import ReferenceModel
from safetensors import safe_open
from sample_models import ATTENTION, MAMBA, model
from scan_inputs import scan_inputs, selective_inputs, without_state

from fixedstate.bundle import WEIGHTS, Bundle
from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.layers import rms_norm
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.simplify import simplify
from fixedstate.plugins import reference
from fixedstate.plugins.schema import DOMAIN
from fixedstate.plugins.torch_ops import PLAIN
from fixedstate.runtime.decoder import open_engine
from fixedstate.spec import LayerSpec, Mamba1Sizes, Mamba2Sizes

Inputs = dict[str, np.ndarray]
Op = Callable[..., list[np.ndarray]]


def torch_op(name: str, inputs: Inputs, block_len: int) -> list[np.ndarray]:
    """The same operator in plain PyTorch."""
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    kind = name.removeprefix("SsdBlock").removeprefix("SelectiveScan").lower()
    call = getattr(PLAIN, f"{'ssd' if name.startswith('Ssd') else 'scan'}_{kind}")
    extra = {"block_len": block_len} if name.startswith("Ssd") or kind == "reverse" else {}
    out = call(**tensors, **extra)
    return [tensor.numpy() for tensor in (out if isinstance(out, tuple) else (out,))]


FORMS: dict[str, Op] = {"onnx": run_op, "torch": torch_op}


def ssd_inputs(tokens: int, log_decay: float, x: float = 1.0) -> Inputs:
    """Two heads of four, every step the same decay, B = C = 1, no skip, state 0."""
    return {
        "x": np.full((1, tokens, 2, 4), x, np.float32),
        "dt": np.ones((1, tokens, 2), np.float32),
        "a": np.full(2, log_decay, np.float32),
        "b": np.ones((1, tokens, 1, 3), np.float32),
        "c": np.ones((1, tokens, 1, 3), np.float32),
        "d": np.zeros(2, np.float32),
        "state": np.zeros((1, 2, 3, 4), np.float32),
    }


def scan1_inputs(tokens: int, log_decay: float, x: float = 1.0) -> Inputs:
    """The same for Mamba-1: eight channels."""
    return {
        "x": np.full((1, tokens, 8), x, np.float32),
        "dt": np.ones((1, tokens, 8), np.float32),
        "a": np.full((3, 8), log_decay, np.float32),
        "b": np.ones((1, tokens, 3), np.float32),
        "c": np.ones((1, tokens, 3), np.float32),
        "d": np.zeros(8, np.float32),
        "state": np.zeros((1, 3, 8), np.float32),
    }


@dataclass(frozen=True)
class Kind:
    """One of the two scans: its operators, its judges and its inputs."""

    prefix: str
    forward: Callable[..., tuple[np.ndarray, np.ndarray]]
    reverse: Callable[..., np.ndarray]
    steady: Callable[..., Inputs]
    random: Callable[..., Inputs]


KINDS = {
    "mamba2": Kind(
        "SsdBlock",
        reference.ssd,
        reference.ssd_reverse,
        ssd_inputs,
        lambda rng, tokens, scale: scan_inputs(rng, 2, tokens, 4, 2, scale),
    ),
    "mamba1": Kind(
        "SelectiveScan",
        reference.selective_scan,
        reference.selective_scan_reverse,
        scan1_inputs,
        lambda rng, tokens, scale: selective_inputs(rng, 2, tokens, 12, 5, scale),
    ),
}
both_kinds = pytest.mark.parametrize("kind", KINDS)
both_forms = pytest.mark.parametrize("form", FORMS)


def at_precision(bundle_path: Callable[..., Path], name: str, precision: str) -> Path:
    """A bundle of the shared fixtures; the one at fp32 is that of every other test."""
    return bundle_path(name) if precision == "fp32" else bundle_path(name, precision)


# --- NU-01: softplus ------------------------------------------------------------------------------

STEPS = [-88.0, -50.0, -20.0, -11.0, 0.0, 5.0, 10.0, 11.0, 11.09, 12.0, 20.0, 88.0, 30000.0]


def step_paths(file: Path) -> list[tuple[onnx.ModelProto, int]]:
    """The dt path of every layer as a graph of its own, bias 0, and its channels."""
    graph = onnx.load(file).graph
    producer = {name: node for node in graph.node for name in node.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    found = []
    for plus in [node for node in graph.node if node.op_type == "Softplus"]:
        add = producer[plus.input[0]]
        assert add.op_type == "Add"
        (bias,) = (weights[name] for name in add.input if name in weights)
        assert bias.data_type == TensorProto.FLOAT
        (start,) = (name for name in add.input if name not in weights)
        nodes, io = [add, plus], TensorProto.FLOAT
        if start in producer and producer[start].op_type == "Cast":
            nodes.insert(0, producer[start])
            start, io = producer[start].input[0], TensorProto.FLOAT16
        takers = {node.domain for node in graph.node if plus.output[0] in node.input}
        assert takers == {DOMAIN}  # the step is used as it is
        zero = numpy_helper.from_array(np.zeros(list(bias.dims), np.float32), bias.name)
        path = onnx.ModelProto(ir_version=10)
        path.opset_import.add(domain="", version=21)
        path.graph.name = "step"
        path.graph.node.extend(nodes)
        path.graph.initializer.append(zero)
        enters = path.graph.input.add(name=start).type.tensor_type
        enters.elem_type = io
        for _ in range(3):
            enters.shape.dim.add()
        leaves = path.graph.output.add(name=plus.output[0]).type.tensor_type
        leaves.elem_type = TensorProto.FLOAT
        found.append((path, bias.dims[0]))
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["F1", "F2"])
def test_NU_01_step_sizes_neither_overflow_nor_vanish(
    bundle_path: Callable[..., Path], name: str, precision: str
) -> None:
    """Softplus is one operator over float32, whatever enters: x at +large, exp(x) at -large."""
    file = at_precision(bundle_path, name, precision) / "denoise.onnx"
    assert not [node for node in onnx.load(file).graph.node if node.op_type == "Log"]
    dtype = np.float16 if precision == "fp16" else np.float32
    values = np.array(STEPS, dtype)
    paths = step_paths(file)
    assert len(paths) == (2 if name == "F1" else 3)  # F2: the untied layer has two directions
    for path, channels in paths:
        session = onnxruntime.InferenceSession(path.SerializeToString())
        given = np.repeat(values[:, None, None], channels, 2)
        (found,) = session.run(None, {session.get_inputs()[0].name: given})
        assert found.dtype == np.float32
        expected = np.broadcast_to(reference.softplus(given), found.shape)
        # subnormal floats may be flushed to zero
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-37)
        assert found[-1, 0, 0] == np.float32(values[-1])  # no inf at 30000


# --- NU-03, NU-05: decays -------------------------------------------------------------------------


@both_forms
@both_kinds
@pytest.mark.parametrize("tokens", [64, 128, 512])
@pytest.mark.parametrize("log_decay", [-0.1, -1.0, -16.0])
def test_NU_03_no_division_by_a_vanishing_product(
    form: str, kind: str, log_decay: float, tokens: int
) -> None:
    """Products of decays underflow in both directions; every output is finite and right."""
    case, op = KINDS[kind], FORMS[form]
    inputs = case.steady(tokens, log_decay)
    expected, final = case.forward(**inputs)
    y, state = op(f"{case.prefix}Commit", inputs, 64)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(state, final, rtol=1e-5)
    free = without_state(inputs)
    (y,) = op(f"{case.prefix}Reverse", free, 64)
    np.testing.assert_allclose(y, case.reverse(**free, block_len=64), rtol=1e-5)
    if tokens == 128:
        (y,) = op(f"{case.prefix}Denoise", inputs, 128)
        np.testing.assert_allclose(y, expected, rtol=1e-5)


@both_forms
@both_kinds
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e3, 1e4, 1e6])
def test_NU_05_no_exponent_is_positive(form: str, kind: str, scale: float) -> None:
    """Decays of -1e3 and -1e6 a step, 300 tokens, several chunks: finite, equal to the loop."""
    case, op = KINDS[kind], FORMS[form]
    inputs = single(case.random(np.random.default_rng(5), 300, scale))
    for length in (75, 100, 150):
        y, state = op(f"{case.prefix}Commit", inputs, length)
        expected, final = case.forward(**inputs)
        np.testing.assert_allclose(y, expected, atol=1e-3)
        np.testing.assert_allclose(state, final, atol=1e-3)
        free = without_state(inputs)
        (y,) = op(f"{case.prefix}Reverse", free, length)
        np.testing.assert_allclose(y, case.reverse(**free, block_len=length), atol=1e-3)


@both_forms
@both_kinds
def test_NU_05_what_has_decayed_is_zero(form: str, kind: str) -> None:
    """At -1e6 a step each token sees itself alone: nothing of the others, not even noise."""
    case, op = KINDS[kind], FORMS[form]
    inputs = case.steady(300, -1e6)
    y, state = op(f"{case.prefix}Commit", inputs, 100)
    assert np.array_equal(state, np.ones_like(state))
    assert np.array_equal(y, np.full_like(y, 3.0))  # N = 3 states of 1


# --- NU-06: the state's precision -----------------------------------------------------------------


@pytest.mark.parametrize("io", ["float32", "float16"])
@both_kinds
def test_NU_06_small_steps_are_not_lost_over_2048_tokens(kind: str, io: str) -> None:
    """0.001 a token under a decay of exp(-0.001): 0.871, where 16-bit states stick far below."""
    case = KINDS[kind]
    whole = case.steady(2048, -0.001, x=1.0)
    whole["x"] = whole["x"] * np.float32(0.001)
    exact = case.forward(**whole)[1]
    assert abs(exact.flat[0] - 0.871) < 1e-3
    state = whole["state"]
    for start in range(0, 2048, 256):
        part = {
            key: value[:, start : start + 256] if key in ("x", "dt", "b", "c") else value
            for key, value in whole.items()
        }
        for key in ("x", "b", "c"):
            part[key] = part[key].astype(io)
        _, state = run_op(f"{case.prefix}Commit", {**part, "state": state}, 256, io=io)
    assert state.dtype == np.float32
    np.testing.assert_allclose(state, exact, rtol=1e-3 if io == "float16" else 1e-4)


@pytest.mark.parametrize("name", ["F1", "F2"])
def test_NU_06_scan_states_of_a_half_precision_bundle_are_float32(
    bundle_path: Callable[..., Path], name: str
) -> None:
    """In the manifest and in the graphs."""
    bundle = Bundle.open(bundle_path(name, "fp16"))
    scans = [port for port in bundle.state.ports if port.kind == "ssm"]
    assert len(scans) == 2
    assert {port.past.dtype for port in scans} == {"float32"}
    graph = onnx.load(bundle.path / "commit.onnx", load_external_data=False).graph
    types = {
        value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.output]
    }
    for port in scans:
        assert types[port.past.name] == types[port.present.name] == TensorProto.FLOAT


# --- NU-07, NU-10: what half precision cannot hold ------------------------------------------------

A_LOGS = (0.0, 2.77, 11.2)
EPSILONS = (1e-5, 1e-6, 1e-8)
SMALL = Mamba2Sizes(32, 4, 8, 4, 2, 4, conv_bias=False)
ZERO = 0  # the id whose embedding is zero


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """An fp16 bundle from an fp16 checkpoint: large A, dt of 0, epsilons below fp16's range."""
    mamba = [
        LayerSpec("mamba2", replace(SMALL, norm_eps=eps), "forward", norm_eps=eps)
        for eps in EPSILONS
    ]
    scan = LayerSpec("mamba1", Mamba1Sizes(24, 3, 2, 4, conv_bias=False), "forward", norm_eps=1e-8)
    heads = LayerSpec("attention", replace(ATTENTION, qk_norm=True), norm_eps=1e-8)
    spec = model(*mamba, scan, heads, norm_eps=1e-8)
    tensors = random_tensors(spec, seed=3)
    tensors["embedding.weight"][ZERO] = 0
    for index, a_log in enumerate(A_LOGS):
        tensors[f"layers.{index}.mixer.A_log"].fill_(a_log)
        tensors[f"layers.{index}.mixer.dt_bias"][0] = -60000.0  # softplus of it is 0
    tensors["layers.3.mixer.A_log"].copy_(torch.tensor(A_LOGS).expand(24, 3))
    tensors["layers.3.mixer.dt_proj.bias"][0] = -60000.0
    root = tmp_path_factory.mktemp("half")
    save_checkpoint(root / "c", spec, tensors, dtype="float16")
    return export_bundle(root / "c", root / "half.bundle", precision="fp16", fused=False).bundle


def test_NU_07_decays_are_formed_in_float32(half: Bundle) -> None:
    """exp(11.2) is infinite in fp16: A is folded at export and stored in float32."""
    with safe_open(half.path / WEIGHTS, framework="np") as stored:
        for index, a_log in enumerate(A_LOGS):
            a = stored.get_tensor(f"layers.{index}.mixer.A")
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, -np.exp(np.float64(np.float16(a_log))), rtol=1e-6)
        a = stored.get_tensor("layers.3.mixer.A")
        assert a.dtype == np.float32
        assert np.isfinite(a).all()
        assert a.min() < -70000


def test_NU_07_a_large_decay_times_a_step_of_zero_is_no_nan(half: Bundle) -> None:
    """Everything that comes out is finite, and a head whose step is 0 keeps its state's bytes."""
    engine = open_engine(half, threads=1, slots=1)
    state = engine.read(0)
    for suffix in state:
        if suffix.startswith("ssm"):
            state[suffix] = state[suffix] + np.float32(0.5)
    engine.write(0, state, 0)
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, 36, (1, 16))
        assert np.isfinite(engine.denoise(ids[:, :8])).all()
        engine.commit(ids, np.array([16]))
    for suffix, array in engine.read(0).items():
        assert np.isfinite(array).all(), suffix
        if suffix.startswith("ssm"):
            still = array[:, 0] if suffix == "ssm_state_003" else array[0]
            assert np.array_equal(still, np.full_like(still, 0.5)), suffix


def test_NU_10_an_epsilon_below_half_precision_is_kept(half: Bundle) -> None:
    """Each epsilon stands in the graph as float32; none became a half-precision zero."""
    graph = onnx.load(half.path / "denoise.onnx").graph
    constants = list(graph.initializer)
    constants += [a.t for node in graph.node for a in node.attribute if a.name == "value"]
    scalars = [numpy_helper.to_array(t) for t in constants if np.prod(t.dims, dtype=int) == 1]
    floats = [value.item() for value in scalars if value.dtype == np.float32]
    for eps in EPSILONS:
        assert any(abs(value - eps) < 1e-3 * eps for value in floats), eps
    assert not [value for value in scalars if value.dtype == np.float16 and 0 < value < 1e-4]


def test_NU_10_a_row_of_zeros_stays_zeros(half: Bundle) -> None:
    """Through six norms with epsilons down to 1e-8: no 0/0, and nothing out of nothing."""
    engine = open_engine(half, threads=1, slots=1)
    zeros = np.full((1, 8), ZERO)
    for _ in range(2):
        logits = engine.denoise(zeros)
        assert np.array_equal(logits, np.zeros_like(logits))
        engine.commit(zeros, np.array([8]))
    assert all(np.array_equal(array, np.zeros_like(array)) for array in engine.read(0).values())


NEUTRAL = """
<ir_version: 10, opset_import: ["": 21]>
near (float[N] x) => (float[N] y) {
  eps = Constant <value_float = 1e-12> ()
  close = Constant <value_float = 1.000001> ()
  one = Constant <value_float = 1.0> ()
  a = Add (x, eps)
  b = Mul (a, close)
  c = Div (b, close)
  d = Mul (c, one)
  y = Div (d, one)
}
"""


def test_NU_10_no_simplification_takes_a_small_number_for_zero() -> None:
    """An optimiser with tolerances drops 1e-12 and 1.000001; only 1 itself is neutral."""
    graph = ir.from_proto(onnx.parser.parse_model(NEUTRAL))
    simplify(graph)
    assert [node.op_type for node in graph.graph] == ["Add", "Mul", "Div"]


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_NU_10_norms_of_zero_and_tiny_rows(eps: float, dtype: torch.dtype) -> None:
    """A zero row is zero; a row below sqrt(eps) is scaled by that epsilon, not by another."""
    rows = torch.tensor([[0.0] * 4, [1e-4] * 4], dtype=dtype)
    found = rms_norm(rows, torch.ones(4), eps)
    assert torch.equal(found[0], torch.zeros(4, dtype=dtype))
    value = float(rows[1, 0])
    assert float(found[1, 0]) == pytest.approx(value / np.sqrt(value**2 + eps), rel=2e-3)


# --- NU-08: the gated norm ------------------------------------------------------------------------


def test_NU_08_each_group_has_its_own_mean_square() -> None:
    """Width 64, groups at scales 1 and 8: each comes out at scale 1, unlike under one norm."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    x = x * torch.tensor([1.0, 8.0]).repeat_interleave(32)
    found = rms_norm(x, torch.ones(64), 1e-5, groups=2)
    parts = x.reshape(5, 2, 32)
    expected = parts / torch.sqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(found, expected.reshape(5, 64))
    whole = rms_norm(x, torch.ones(64), 1e-5)
    assert float(torch.cosine_similarity(found, whole).mean()) < 0.9


@pytest.mark.parametrize("gated_norm", ["after", "before"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_NU_08_the_gated_norm_of_a_model_is_per_group(groups: int, gated_norm: str) -> None:
    """Groups of very different scale, against the loops."""
    sizes = replace(MAMBA, groups=groups, gated_norm=gated_norm)
    spec = model(LayerSpec("mamba2", sizes, "forward"))
    tensors = random_tensors(spec, seed=2)
    scale = 8.0 ** torch.arange(4).repeat_interleave(16)  # of z and x, group by group
    tensors["layers.0.mixer.in_proj.weight"][:64] *= scale[:, None]
    tensors["layers.0.mixer.in_proj.weight"][64:128] *= scale[:, None]
    ids = np.random.default_rng(1).integers(0, 37, 16)
    expected, _ = ReferenceModel(spec, tensors).run(ids, clean=8)
    logits = Denoiser(spec, tensors).recompute(torch.from_numpy(ids)[None])[0]
    np.testing.assert_allclose(logits, expected[-8:], atol=1e-4)


# --- NU-09: the same bytes ------------------------------------------------------------------------

ROLLOUT = """
import hashlib, sys
import numpy as np
from fixedstate.bundle import Bundle
from fixedstate.runtime.decoder import open_engine

def rollout(engine):
    digest = hashlib.sha256()
    engine.reset(0)
    length = engine.spec.block_len
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, engine.spec.vocab_size, (1, length))
        digest.update(engine.denoise(ids).tobytes())
        engine.commit(ids, np.array([length]))
    for suffix, array in sorted(engine.read(0).items()):
        digest.update(suffix.encode() + array.tobytes())
    return digest.hexdigest()

if __name__ == "__main__":
    print(rollout(open_engine(Bundle.open(sys.argv[1]), threads=1, slots=1)))
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["F1", "F2"])
def test_NU_09_the_same_run_gives_the_same_bytes(
    bundle_path: Callable[..., Path], tmp_path: Path, name: str, precision: str
) -> None:
    """Five runs in one process, and one in another."""
    script = tmp_path / "rollout.py"
    script.write_text(ROLLOUT)
    space: dict[str, object] = {"__name__": "rollout"}
    exec(compile(ROLLOUT, str(script), "exec"), space)
    path = at_precision(bundle_path, name, precision)
    engine = open_engine(Bundle.open(path), threads=1, slots=1)
    rollout: Callable[[object], str] = space["rollout"]  # type: ignore[assignment]
    here = {rollout(engine) for _ in range(5)}
    other = subprocess.run(
        [sys.executable, str(script), str(path)], capture_output=True, text=True, check=True
    )
    assert here == {other.stdout.strip()}
    assert len(hashlib.sha256(b"").hexdigest()) == len(here.pop())
