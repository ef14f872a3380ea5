"""Cases EX: what an export makes, what it refuses, and that no wrong graph passes for a right one.

A case's length is a count of committed tokens.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from reference_model import ReferenceModel
from sample_models import MODELS, attention_layer, mamba_layer, model
from torch import Tensor

from fixedstate.bundle import PARITY, Bundle
from fixedstate.cli import cli
from fixedstate.errors import (
    BundleError,
    ExportError,
    FixedStateError,
    ParityError,
    SpecError,
    UsageError,
)
from fixedstate.export import denoiser as denoiser_module
from fixedstate.export import passes, pipeline
from fixedstate.export.checkpoint import load_checkpoint, random_tensors, save_checkpoint
from fixedstate.export.denoiser import Denoiser
from fixedstate.export.pipeline import export_bundle
from fixedstate.export.trace import trace
from fixedstate.plugins import bodies
from fixedstate.plugins.schema import DOMAIN, OPS
from fixedstate.plugins.torch_ops import TRACED
from fixedstate.runtime.decoder import open_engine
from fixedstate.spec import AttentionSizes, LayerSpec, Mamba2Sizes, ModelSpec
from fixedstate.state import Precision, StateSpec, graph_ports

NAMES = ("F1", "F2", "F2-forward", "F3", "F4")
RIGHT = 1e-4


@pytest.fixture(scope="session")
def graphs(bundle_path) -> Callable[[str], dict[str, onnx.ModelProto]]:
    """The files of a bundle by role, without their weights; F3 has the fused role too."""

    @functools.cache
    def read(name: str) -> dict[str, onnx.ModelProto]:
        folder = bundle_path(name, fused=True) if name == "F3" else bundle_path(name)
        return {
            file.stem: onnx.load(file, load_external_data=False)
            for file in sorted(folder.glob("*.onnx"))
        }

    return read


@pytest.fixture(scope="session")
def opened(bundle_path, checkpoint_path):
    """Bundle, engine with three slots, and judge of a model."""

    @functools.cache
    def make(name: str):
        bundle = Bundle.open(bundle_path(name))
        tensors = load_checkpoint(checkpoint_path(name)).tensors
        engine = open_engine(bundle, threads=1, slots=3)
        return bundle, engine, ReferenceModel(bundle.spec, tensors)

    return make


def nodes_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of subgraphs included."""
    for node in graph.node:
        yield node
        for attr in node.attribute:
            for inner in [attr.g, *attr.graphs]:
                yield from nodes_of(inner)


def left_behind(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def random_checkpoint(folder: Path, spec: ModelSpec) -> Path:
    save_checkpoint(folder, spec, random_tensors(spec, seed=1))
    return folder


# --- EX-01, and two exports of one checkpoint -----------------------------------------------------

ELSEWHERE = """
import importlib.abc, json, sys

FUSED = ("mamba_ssm", "causal_conv1d", "selective_scan_cuda", "flash_attn", "fla")
asked = []

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FUSED:
            asked.append(name)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from fixedstate.export.pipeline import export_bundle
export_bundle(*sys.argv[1:], fused=False)
print(json.dumps(asked))
"""


@pytest.fixture(scope="session")
def elsewhere(checkpoint_path, tmp_path_factory):
    """F1 exported by another process from another folder to another place; modules it wanted."""
    folder = tmp_path_factory.mktemp("elsewhere") / "some where" / "deep"
    shutil.copytree(checkpoint_path("F1"), folder / "my-checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder / "my-checkpoint"), str(folder / "out")],
        env={
            **os.environ,
            "PYTHONHASHSEED": "12345",
            "CUDA_VISIBLE_DEVICES": "",
            "TZ": "Asia/Tokyo",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", json.loads(done.stdout), done.stderr


def test_EX_01_no_fused_package_is_needed(elsewhere, opened):
    """Without mamba-ssm, causal-conv1d and a GPU: exported, quiet, and right."""
    folder, asked, said = elsewhere
    assert (asked, said) == ([], "")
    bundle, _, judge = opened("F1")
    engine = open_engine(Bundle.open(folder), threads=1)
    ids = np.random.default_rng(0).integers(0, 37, (1, bundle.spec.block_len))
    engine.commit(ids, np.array([8]))
    logits, states = judge.run(np.concatenate([ids[0, :8], ids[0]]), clean=8)
    np.testing.assert_allclose(engine.denoise(ids)[0], logits[-bundle.spec.block_len :], atol=RIGHT)
    for suffix, value in engine.read(0).items():
        np.testing.assert_allclose(value, states[suffix], atol=RIGHT, err_msg=suffix)


def test_two_exports_are_the_same_bytes(elsewhere, bundle_path):
    """Other folder, process, hash seed and time zone; parity.json aside."""
    there, here = elsewhere[0], bundle_path("F1")
    assert left_behind(there) == left_behind(here)
    for file in left_behind(here):
        if file != PARITY:
            assert (there / file).read_bytes() == (here / file).read_bytes(), file


def test_no_file_says_where_it_was_made(elsewhere, bundle_path):
    """No path, host or user, and no stack of the exporter's own files."""
    words = {socket.gethostname(), str(Path.home()), os.getcwd(), "site-packages", "my-checkpoint"}
    words |= {"Traceback", f"{tempfile.gettempdir()}/", "some where", "pkg.torch", sys.prefix}
    for folder in (elsewhere[0], *(bundle_path(name) for name in ("F2", "F4"))):
        words.add(str(folder.parent))
        for file in folder.iterdir():
            content = file.read_bytes()
            found = [word for word in words if len(word) > 3 and word.encode() in content]
            assert not found, (file.name, found)


# --- EX-02: what cannot be traced -----------------------------------------------------------------


@torch.library.custom_op("mylib::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """An extension that only says what shape it gives."""
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("mylib::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    """An extension that says nothing."""
    return x.clone()


OPAQUE = {
    "mylib::opaque": opaque,
    "mylib::shapeless": shapeless,
    "Could not guard on data-dependent": lambda x: x if x.sum() > 0 else -x,
}


@pytest.mark.parametrize(
    ("words", "function", "place"),
    [
        ("mylib::opaque", "mamba2", "layer 2 (mamba2)"),
        ("mylib::shapeless", "attention", "layer 1 (attention)"),
        ("Could not guard on data-dependent", "mamba2", "layer 2 (mamba2)"),
    ],
)
def test_EX_02_an_opaque_operator_is_named(tmp_path, monkeypatch, words, function, place):
    """Layer, operator and remedy in one line; nothing is written."""
    spec = MODELS["F3"]
    real = denoiser_module._MIXERS[function]

    def wrapped(layer, weights, x, *rest):
        if layer.mixer == "attention" or layer.tied == "projections":
            x = OPAQUE[words](x)
        return real(layer, weights, x, *rest)

    monkeypatch.setitem(denoiser_module._MIXERS, function, wrapped)
    checkpoint = random_checkpoint(tmp_path / "checkpoint", spec)
    with pytest.raises(ExportError) as caught:
        export_bundle(checkpoint, tmp_path / "out")
    text = str(caught.value)
    assert text.startswith(f"graph 'denoise': {place}: ")
    assert words in text
    assert "replace" in text
    assert "\n" not in text
    assert left_behind(tmp_path) == ["checkpoint"]


# --- EX-03: no wrong graph passes -----------------------------------------------------------------


@pytest.fixture(scope="session")
def traced_f2(checkpoint_path) -> Callable[[Denoiser, str], ir.Model]:
    """Tracing of F2 done once: the tests that follow change what comes after it."""
    spec = MODELS["F2"]
    tensors = load_checkpoint(checkpoint_path("F2")).tensors
    made = Denoiser(spec, tensors, Precision(), TRACED)
    kept = {role: trace(made, role) for role in ("denoise", "commit")}
    return lambda _, role: kept[role].clone()


def wrong_eps(model_: ir.Model) -> None:
    hit = 0
    for name, value in model_.graph.initializers.items():
        if passes.is_weight(name):
            continue
        data = value.const_value.numpy()
        if data.size == 1 and data.dtype == np.float32 and abs(float(data.item()) - 1e-5) < 1e-9:
            value.const_value = ir.tensor(np.full_like(data, 1e-3), name=value.name)
            hit += 1
    assert hit


def swapped_ports(prefix: str):
    """Two layers' states trade places: same shapes, wrong owner."""

    def fault(model_: ir.Model) -> None:
        values = {v.name: v for v in (*model_.graph.inputs, *model_.graph.outputs)}
        pair = [values.get(f"{prefix}_ssm_state_{i:03d}") for i in (0, 1)]
        if pair[0] is not None:
            pair[0].name, pair[1].name = pair[1].name, pair[0].name

    return fault


def unmasked_steps(model_: ir.Model) -> None:
    """Tokens behind commit_length move the state."""
    for node in list(model_.graph):
        if node.op_type == "Where":
            other = node.inputs[2].const_value
            if other is not None and other.size == 1 and other.numpy().item() == 0:
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[1])


def _zeroed(body, value):
    return body.op("Mul", value, body.const(0.0, np.float32))


def no_conv_state(patch: pytest.MonkeyPatch) -> None:
    real = bodies._Body.transpose

    def transpose(self, value, *perm):
        return real(self, _zeroed(self, value) if value.name == "state" else value, *perm)

    patch.setattr(bodies._Body, "transpose", transpose)


def stale_conv_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        bodies,
        "_window",
        lambda body, full, most, mixed: body.transpose(body.slice(full, 1, 0, most - 1), 0, 2, 1),
    )


def late_conv_window(patch: pytest.MonkeyPatch) -> None:
    """At the end of the pass instead of at commit_length."""

    def window(body, full, most, mixed):
        last = body.slice(full, 1, 1 - most, 2**31 - 1)
        return body.transpose(last, 0, 2, 1)

    patch.setattr(bodies, "_window", window)


def swapped_groups(patch: pytest.MonkeyPatch) -> None:
    """Head h reads group h % G instead of h // (H / G)."""
    real = bodies._Cut.by_group

    def by_group(self, value):
        body = self.body
        heads = body.op("Range", body.const(0), body.op("Squeeze", self._heads), body.const(1))
        turned = body.transpose(body.reshape(heads, self._groups, -1), 1, 0)
        return real(self, body.op("Gather", value, body.reshape(turned, -1), axis=1))

    patch.setattr(bodies._Cut, "by_group", by_group)


def unflipped_taps(patch: pytest.MonkeyPatch) -> None:
    real = bodies._convolved

    def convolved(*given: object, reverse: bool = False) -> object:
        del reverse
        return real(*given)  # type: ignore[arg-type]

    patch.setattr(bodies, "_convolved", convolved)


def wrong_direction(patch: pytest.MonkeyPatch) -> None:
    """Decays of the reverse scan run from the left."""
    real = bodies._segment_sums
    patch.setattr(
        bodies, "_segment_sums", lambda body, a, size, reverse=False: real(body, a, size, False)
    )


def no_carried_state(patch: pytest.MonkeyPatch) -> None:
    def without(real):
        def made(body, *args):
            state = body.inputs["state"]
            body.inputs["state"] = _zeroed(body, state)
            value = real(body, *args)
            body.inputs["state"] = state
            return value

        return made

    for name in ("_of_past", "_final"):
        patch.setattr(bodies, name, without(getattr(bodies, name)))


WEIGHT_FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sign of A": (".A", lambda a: -a),
    "A of half the size": (".A", lambda a: a / 2),
    "no D": (".D", torch.zeros_like),
    "no dt bias": (".dt_bias", torch.zeros_like),
    "norm weight left out": ("mixer.norm.weight", torch.ones_like),
    "one weight": ("layers.0.mixer.out_proj.weight", lambda w: _one_off(w)),
}
"""End of the names of the weights, and what becomes of them on their way into the file."""

MODEL_FAULTS: dict[str, Callable[[ir.Model], None]] = {
    "norm eps": wrong_eps,
    "past states of other layers": swapped_ports("past"),
    "present states of other layers": swapped_ports("present"),
    "steps behind commit_length": unmasked_steps,
}
BODY_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "dropped conv state": no_conv_state,
    "conv window not moved": stale_conv_window,
    "conv window at the end": late_conv_window,
    "groups swapped": swapped_groups,
    "reverse taps not flipped": unflipped_taps,
    "reverse scan from the left": wrong_direction,
    "carried state dropped": no_carried_state,
}


def _one_off(weight: Tensor) -> Tensor:
    out = weight.clone()
    out[0, 0] += 0.1
    return out


def break_it(name: str, patch: pytest.MonkeyPatch) -> None:
    """Put one fault into the exporter."""
    if name in BODY_FAULTS:
        BODY_FAULTS[name](patch)
        return
    if name in WEIGHT_FAULTS:
        end, change = WEIGHT_FAULTS[name]
        loaded = pipeline.StoredWeights.load

        def load(self: pipeline.StoredWeights, weight: str) -> Tensor:
            right = loaded(self, weight)
            return change(right) if weight.endswith(end) else right

        patch.setattr(pipeline.StoredWeights, "load", load)
        return
    real = pipeline.finish

    def finish(model_, *given):
        MODEL_FAULTS[name](real(model_, *given))
        return model_

    patch.setattr(pipeline, "finish", finish)


@pytest.mark.parametrize("fault", [*WEIGHT_FAULTS, *MODEL_FAULTS, *BODY_FAULTS])
def test_EX_03_a_wrong_graph_is_never_written(
    tmp_path, monkeypatch, checkpoint_path, traced_f2, fault
):
    """Each fault alone is a mismatch that names trial, port, size and tolerance."""
    monkeypatch.setattr(pipeline, "trace", traced_f2)
    break_it(fault, monkeypatch)
    with pytest.raises(ParityError, match=r"trials, worst at .*, port .*: .*allowed at fp32"):
        export_bundle(checkpoint_path("F2"), tmp_path / "out", fused=False)
    assert left_behind(tmp_path) == []


def test_EX_03_the_same_road_without_a_fault(tmp_path, monkeypatch, checkpoint_path, traced_f2):
    """What makes the test above say something."""
    monkeypatch.setattr(pipeline, "trace", traced_f2)
    report = export_bundle(checkpoint_path("F2"), tmp_path / "out", fused=False)
    assert report.parity["passed"]
    assert report.parity["worst"]["max_abs"] <= 1e-5


def test_EX_03_the_command_exits_with_1(tmp_path, monkeypatch, checkpoint_path, traced_f2):
    """One line on standard error, and an older bundle stays where --force was given."""
    monkeypatch.setattr(pipeline, "trace", traced_f2)
    break_it("sign of A", monkeypatch)
    old = tmp_path / "out"
    old.mkdir()
    (old / "mine").touch()
    args = ["export", str(checkpoint_path("F2")), "-o", str(old), "--force", "--no-fused"]
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "differ from PyTorch" in done.stderr
    assert left_behind(tmp_path) == ["out"]
    assert left_behind(old) == ["mine"]


# --- a full disk at any point of an export --------------------------------------------------------

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fails_at(monkeypatch, owner, name: str, call: int) -> None:
    real, calls = getattr(owner, name), []

    def wrapper(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise FULL
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [
        ("fixedstate.export.weightfile", "_content", 3),  # in the middle of the weights
        ("os", "fdopen", 1),  # the first graph
        ("os", "fdopen", 2),  # the second
        ("os", "fdopen", 3),  # the manifest
        ("os", "fdopen", 4),  # parity.json
        ("shutil", "copyfile", 1),  # the tokenizer
        ("os", "fsync", 6),
        ("tempfile", "mkdtemp", 1),
        ("pathlib.Path", "rename", 1),  # the last step
    ],
)
def test_a_full_disk_leaves_nothing(
    tmp_path, monkeypatch, checkpoint_path, traced_f2, where, name, call
):
    """Whatever write fails: one sentence with the reason, and nothing half-written."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_path("F2"), checkpoint)
    (checkpoint / "NOTICE").write_text("of somebody\n")
    monkeypatch.setattr(pipeline, "trace", traced_f2)
    passed = {"passed": True, "tolerance": {}, "trials": []}
    monkeypatch.setattr(pipeline.parity, "compare_graphs", lambda *a, **k: passed)
    owner = Path if where == "pathlib.Path" else sys.modules[where]
    _fails_at(monkeypatch, owner, name, call)
    with pytest.raises(BundleError, match="No space left on device"):
        export_bundle(checkpoint, tmp_path / "out", fused=False)
    assert left_behind(tmp_path) == ["checkpoint"]


# --- EX-04, EX-05, EX-06: sizes and phases --------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["F1", "F2", "F3", "F4"])
def test_EX_04_every_size_in_range_is_right(opened, name, rows):
    """Sizes that were not traced: committed lengths, block counts and batches against F9."""
    bundle, engine, judge = opened(name)
    length = bundle.spec.block_len
    lengths = (1, 16, 17, 63, 96) if name == "F1" else (length, 2 * length, 5 * length)
    rng = np.random.default_rng(rows)
    for count in lengths:
        width = -(-count // length) * length
        ids = rng.integers(0, 37, (rows, width))
        canvas = rng.integers(0, 37, (rows, length))
        for row in range(rows):
            engine.reset(row)
        engine.commit(ids, np.full(rows, count))
        logits = engine.denoise(canvas).copy()
        for row in range(rows):
            right, states = judge.run(np.concatenate([ids[row, :count], canvas[row]]), clean=count)
            np.testing.assert_allclose(logits[row], right[-length:], atol=RIGHT)
            for suffix, value in engine.read(row).items():
                np.testing.assert_allclose(value, states[suffix], atol=RIGHT, err_msg=suffix)


@pytest.mark.parametrize("name", ["F1", "F2", "F3", "F4"])
def test_EX_04_other_sizes_are_refused_by_name(opened, name):
    """No width that is no whole number of blocks reaches a graph."""
    bundle, engine, _ = opened(name)
    length = bundle.spec.block_len
    for width in (0, 1, length - 1, length + 1):
        ids = np.zeros((1, width), np.int64)
        with pytest.raises(UsageError, match=rf"n x {length}\]; got \[1, {width}\]"):
            engine.commit(ids, np.array([0]))
        with pytest.raises(UsageError, match=rf"{length}\]; got \[1, {width}\]"):
            engine.denoise(ids)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 33])
def test_EX_05_the_scan_agrees_with_a_plain_loop(opened, count):
    """Lengths that are no power of two included: nothing is written in place."""
    bundle, engine, judge = opened("F1")
    ids = np.random.default_rng(count).integers(0, 37, (1, bundle.spec.block_len))
    engine.reset(0)
    engine.commit(ids, np.array([count]))
    _, states = judge.run(ids[0, :count], clean=count)
    for suffix, value in engine.read(0).items():
        np.testing.assert_allclose(value, states[suffix], atol=RIGHT, err_msg=suffix)


def test_EX_06_no_phase_is_frozen(opened):
    """Five tokens at once and three one by one are one pass over eight, from any state."""
    bundle, engine, judge = opened("F1")
    length = bundle.spec.block_len
    ids = np.random.default_rng(0).integers(0, 37, (1, length))
    for row in range(2):
        engine.reset(row)
    engine.commit(ids, np.array([5]))
    for t in range(5, 8):
        step = np.roll(ids, -t, axis=1)
        engine.commit(step, np.array([1]))
    stepped = engine.read(0)
    engine.reset(0)
    engine.commit(ids, np.array([8]))
    _, states = judge.run(ids[0, :8], clean=8)
    for suffix, value in engine.read(0).items():
        np.testing.assert_allclose(stepped[suffix], value, atol=1e-5, err_msg=suffix)
        np.testing.assert_allclose(value, states[suffix], atol=RIGHT, err_msg=suffix)


# --- EX-07, EX-09, EX-10: names -------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_EX_07_ports_stand_in_the_documented_order(graphs, bundle_path, name):
    """Graph, manifest and StateSpec list the same names, dtypes and shapes in one order."""
    folder = bundle_path(name, fused=True) if name == "F3" else bundle_path(name)
    bundle = Bundle.open(folder)
    assert set(graphs(name)) == set(bundle.graphs)
    for role, file in graphs(name).items():
        listed = bundle.graphs[role]
        assert (listed.inputs, listed.outputs) == graph_ports(bundle.spec, bundle.state, role)
        graph = file.graph
        for values, ports in ((graph.input, listed.inputs), (graph.output, listed.outputs)):
            found = [
                (
                    v.name,
                    onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type),
                    tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim),
                )
                for v in values
            ]
            kinds = {"float32": "FLOAT", "int64": "INT64"}
            assert found == [(p.name, kinds[p.dtype], p.shape) for p in ports]


@pytest.mark.parametrize("name", NAMES)
def test_EX_09_names_are_unique_and_no_port_is_passed_through(graphs, name):
    """An unchanged state still has an input and an output of its own, made by a node."""
    for role, file in graphs(name).items():
        inputs = [v.name for v in file.graph.input]
        outputs = [v.name for v in file.graph.output]
        assert len({*inputs, *outputs}) == len(inputs) + len(outputs), role
        made = {out for node in file.graph.node for out in node.output}
        assert set(outputs) <= made
        pasts = {n.removeprefix("past_") for n in inputs if n.startswith("past_") and "_0" in n}
        presents = {n.removeprefix("present_") for n in outputs if n.startswith("present_")}
        if role != "denoise":
            assert pasts <= presents


@pytest.mark.parametrize("name", NAMES)
def test_EX_10_every_listed_input_is_read(graphs, name):
    """What a graph does not use stands neither in it nor in the manifest."""
    for role, file in graphs(name).items():
        read = {value for node in nodes_of(file.graph) for value in node.input}
        assert {v.name for v in file.graph.input} <= read, role
    positions = any("past_length" in [v.name for v in f.graph.input] for f in graphs(name).values())
    assert positions == MODELS[name].has_attention


def test_EX_10_an_unread_input_is_an_error(bundle_path):
    """Should a model ever ignore a port, the export says so."""
    model_ = ir.load(bundle_path("F2") / "denoise.onnx")
    extra = ir.Value(name="position_ids", type=ir.TensorType(ir.DataType.INT64))
    model_.graph.inputs.append(extra)
    with pytest.raises(ExportError, match="'position_ids' is listed but nothing reads it"):
        passes.check_inputs_read(model_)


# --- EX-11, EX-12: size of the graph, control flow ------------------------------------------------


def finished(spec: ModelSpec, role: str, precision: Precision | None = None) -> ir.Model:
    precision = precision or Precision()
    made = Denoiser(spec, random_tensors(spec, seed=1), precision, TRACED)
    return passes.finish(trace(made, role), spec, precision, role)


MORE = 80
"""Nodes that a body of several chunks may have above one of a single chunk."""


def test_EX_11_nodes_do_not_depend_on_the_block_length():
    """L=16 and L=256: the same nodes; several chunks cost a bounded number more inside a body."""
    counts = {}
    for length in (16, 256):
        spec = model(mamba_layer(), block_len=length)
        for role in ("denoise", "commit"):
            made = finished(spec, role)
            counts[length, role] = (
                len(list(made.graph.all_nodes())),
                {f.name: len(list(f.all_nodes())) for f in made.functions.values()},
            )
    for role in ("denoise", "commit"):
        (few, short), (many, long) = counts[16, role], counts[256, role]
        assert few == many, role
        assert short.keys() == long.keys()
        assert all(long[name] - short[name] <= MORE for name in short), (short, long)


@pytest.mark.parametrize("name", OPS)
def test_EX_11_bodies_have_a_bounded_number_of_nodes(name):
    """One chunk, or several of them, of which the last may be padded: never one node a token."""
    sizes = {
        length: len(list(bodies.function_body(name, length, "float32", (4,)).all_nodes()))
        for length in (4, 16, 33, 64, 65, 100, 128, 192, 255, 256)
    }

    def spread(*lengths: int) -> int:  # constants that are equal are written once
        return max(sizes[n] for n in lengths) - min(sizes[n] for n in lengths)

    assert spread(4, 16, 33, 64) <= 2
    assert spread(128, 192, 256) <= 2
    assert spread(65, 100, 255) <= 2
    assert spread(*sizes) <= MORE


def test_EX_11_512_is_refused_by_name(tmp_path, checkpoint_path):
    """Longer blocks are outside the declared range."""
    with pytest.raises(SpecError, match="block_len must be 4 to 256 tokens; got 512"):
        model(mamba_layer(), block_len=512)
    shutil.copytree(checkpoint_path("F1"), tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    config["model"]["block_len"] = 512
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FixedStateError, match="4 to 256 tokens; got 512"):
        export_bundle(tmp_path / "long", tmp_path / "out")
    assert left_behind(tmp_path) == ["long"]


@pytest.mark.parametrize("name", NAMES)
def test_EX_12_no_control_flow(graphs, name):
    """No Loop or If; one Scan in the body of a Mamba-1 operator, its carried value float32."""
    for role, file in graphs(name).items():
        for part in (file.graph, *file.functions):
            nodes = list(nodes_of(part))
            kinds = {node.op_type for node in nodes}
            assert not kinds & {"Loop", "If", "SequenceMap"}, role
            scans = [node for node in nodes if node.op_type == "Scan"]
            assert len(scans) == part.name.startswith("SelectiveScan"), role
            for scan in scans:
                body = next(a.g for a in scan.attribute if a.name == "body")
                carried = (body.input[0], body.output[0])
                kept = {value.type.tensor_type.elem_type for value in carried}
                assert kept == {onnx.TensorProto.FLOAT}


def from_text(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def lint(model_: ir.Model) -> None:
    """The linter with the graph's own ports."""
    ports = tuple(
        tuple(passes.Port(v.name, "float32", ()) for v in group)
        for group in (model_.graph.inputs, model_.graph.outputs)
    )
    passes.lint(model_, *ports)


def test_EX_12_a_carried_value_keeps_its_type():
    """A scan whose state goes in as float16 and comes out as float32 is refused."""
    text = (
        HEAD
        + """ g (float[4] s, float16[3,4] x) => (float[4] out) {
        half = Cast<to = 10>(s)
        out, y = Scan<num_scan_inputs = 1, body = b (float16[4] a, float16[4] c)
            => (float[4] d, float16[4] e) { e = Add(a, c) d = Cast<to = 1>(e) }>(half, x)
    }"""
    )
    with pytest.raises(ExportError, match=r"Scan\) carries value 0 in more than one type"):
        lint(from_text(text))
    same = text.replace("float16", "float").replace("to = 10", "to = 1")
    lint(from_text(same))


# --- EX-13: the linter ----------------------------------------------------------------------------


def foreign(model_: ir.Model, *kinds: tuple[str, str]) -> None:
    """Put nodes of these domains and types behind the first node."""
    first = next(iter(model_.graph))
    value = first.outputs[0]
    for place, (domain, kind) in enumerate(kinds):
        node = ir.Node(domain, kind, [value], name=f"odd_{place}")
        node.outputs[0].name = f"odd_{place}_out"
        model_.graph.insert_after(first, node)


@pytest.fixture
def graph_f3(bundle_path):
    """A finished graph, its ports, and a call that lints it."""
    bundle = Bundle.open(bundle_path("F3", fused=True))
    listed = bundle.graphs["commit"]
    model_ = ir.load(bundle.path / listed.file)
    return model_, lambda: passes.lint(model_, listed.inputs, listed.outputs)


def test_EX_13_what_was_exported_passes(graph_f3):
    """The linter has no objection to a right graph."""
    graph_f3[1]()


@pytest.mark.parametrize(
    ("domain", "kind", "words"),
    [
        ("com.microsoft", "FusedMatMul", "neither a standard operator nor a declared one"),
        ("mylib", "Opaque", "neither a standard operator nor a declared one"),
        (DOMAIN, "NoSuchOp", "neither a standard operator nor a declared one"),
        ("", "NoSuchOp", "no operator of opset 21"),
        ("", "RMSNormalization", "may not stand in the portable file"),
        *((("", kind, "may not stand in the portable file")) for kind in passes.FORBIDDEN),
    ],
)
def test_EX_13_foreign_nodes_are_named(graph_f3, domain, kind, words):
    """Node, operator, domain and what to do."""
    model_, check = graph_f3
    foreign(model_, (domain, kind))
    with pytest.raises(ExportError) as caught:
        check()
    assert f"node 'odd_0' ({domain or 'ai.onnx'}::{kind})" in str(caught.value)
    assert words in str(caught.value)


def test_EX_13_every_foreign_node_is_listed(graph_f3):
    """Not only the first, and those inside a body with the body's name."""
    model_, check = graph_f3
    foreign(model_, ("mylib", "Opaque"), ("", "Loop"))
    body = next(f for f in model_.functions.values() if f.name == "SsdBlockCommit")
    body.append(ir.Node("mylib", "Inner", [body.inputs[0]], name="inner"))
    with pytest.raises(ExportError) as caught:
        check()
    inside = "body of SsdBlockCommit: node 'inner' (mylib::Inner)"
    for words in ("mylib::Opaque", "ai.onnx::Loop", inside):
        assert words in str(caught.value)


def test_EX_13_declared_operators_need_their_body(graph_f3):
    """A node of our own domain without a function runs nowhere."""
    model_, check = graph_f3
    key = next(key for key in model_.functions if key[1] == "CausalConvCommit")
    del model_.functions[key]
    with pytest.raises(ExportError, match=r"fixedstate::CausalConvCommit\) is neither"):
        check()


def test_EX_13_undeclared_functions_and_opsets(graph_f3):
    """A function of another domain, and an opset that the file does not need."""
    model_, check = graph_f3
    other = ir.Function("mylib", "F", graph=ir.Graph([], [], nodes=[], name="F"), attributes=[])
    model_.functions[other.identifier()] = other
    with pytest.raises(ExportError, match="function mylib::F is no declared operator"):
        check()
    del model_.functions[other.identifier()]
    model_.opset_imports["mylib"] = 1
    with pytest.raises(ExportError, match="the graph imports opset mylib 1"):
        check()


def test_EX_13_ports_that_differ_from_the_manifest(graph_f3):
    """A name that was altered on the way."""
    model_, check = graph_f3
    model_.graph.inputs[0].name = "ids"
    with pytest.raises(ExportError, match="differ from the manifest's"):
        check()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([2**31]), "does not fit 32 bits"),
        (np.array([-(2**31) - 1]), "does not fit 32 bits"),
        (np.array([1.0, np.inf], np.float32), "is not finite"),
        (np.array([np.nan], np.float32), "is not finite"),
        (np.array([-np.inf], np.float16), "is not finite"),
    ],
)
def test_EX_13_constants_fit_their_type(graph_f3, array, words):
    """As initialisers and inside nodes."""
    model_, check = graph_f3
    value = ir.Value(name="c999", const_value=ir.tensor(array, name="c999"))
    model_.graph.register_initializer(value)
    with pytest.raises(ExportError, match=f"'c999' {words}"):
        check()
    del model_.graph.initializers["c999"]
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(array))], name="made")
    model_.graph.insert_before(next(iter(model_.graph)), node)
    with pytest.raises(ExportError, match=f"'made' .* attribute 'value' {words}"):
        check()


def test_EX_13_weights_do_not_hide_in_the_graph(graph_f3):
    """A large constant is a weight that somebody copied."""
    model_, check = graph_f3
    value = ir.Value(name="c999", const_value=ir.tensor(np.ones(2000, np.float32), name="c999"))
    model_.graph.register_initializer(value)
    with pytest.raises(ExportError, match="'c999' has 8000 bytes inside the graph"):
        check()


@pytest.mark.parametrize("name", NAMES)
def test_integer_constants_fit_32_bits(graphs, name):
    """In graphs and in bodies: TensorRT clamps what does not."""
    for role, file in graphs(name).items():
        tensors = [t for t in file.graph.initializer if t.data_location == 0]
        for part in (file.graph, *file.functions):
            tensors += [a.t for node in nodes_of(part) for a in node.attribute if a.HasField("t")]
        whole = [onnx.numpy_helper.to_array(t) for t in tensors if t.data_type == 7]
        assert whole
        assert all(abs(int(v)) < 2**31 for array in whole for v in array.ravel()), role


SHAPE_OPERANDS = {
    "Reshape": (1,),
    "Expand": (1,),
    "ConstantOfShape": (0,),
    "Tile": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Slice": (1, 2, 4),
    "Split": (1,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "TopK": (1,),
    "Resize": (2, 3),
}
"""Operators and the inputs whose values decide the shape of what comes out."""


def shaped_by(nodes, functions, tainted: set[str]) -> Iterator[str]:
    """Nodes whose output shape depends on the values named; Shape itself does not."""
    for node in nodes:
        hot = [place for place, name in enumerate(node.input) if name in tainted]
        if not hot or node.op_type in ("Shape", "Size"):
            continue
        if set(hot) & set(SHAPE_OPERANDS.get(node.op_type, ())):
            yield f"{node.op_type} {node.name}"
        if node.domain == DOMAIN:
            body = functions[node.op_type]
            inner = {body.input[place] for place in hot}
            yield from (
                f"{node.op_type}/{found}" for found in shaped_by(body.node, functions, inner)
            )
        tainted |= set(node.output)


@pytest.mark.parametrize("name", NAMES)
def test_no_input_value_decides_a_shape(graphs, name):
    """Shapes come from shapes: lengths and ids only select."""
    for role, file in graphs(name).items():
        functions = {f.name: f for f in file.functions}
        inputs = {v.name for v in file.graph.input}
        assert list(shaped_by(file.graph.node, functions, inputs)) == [], role


# --- EX-14: a windowed cache stays as large as it is ----------------------------------------------


def test_EX_14_a_window_keeps_its_size_and_its_numbers(tmp_path):
    """100 blocks of 4 through a window of 16: shapes and bytes of block 1, logits of the loops."""
    sizes = AttentionSizes(4, 2, 8, 8, window=16, sinks=2, keys_rotated=False)
    spec = model(mamba_layer(), attention_layer(sizes=sizes), block_len=4)
    for port in StateSpec.of(spec).layer(1).values():
        assert port.past.shape == port.present.shape == ("B", 2, 18, 8)
        assert port.update == "swap"
    checkpoint = random_checkpoint(tmp_path / "checkpoint", spec)
    bundle = export_bundle(checkpoint, tmp_path / "out", fused=False).bundle
    engine = open_engine(bundle, threads=1)
    ids = np.random.default_rng(14).integers(0, spec.vocab_size, (1, 101 * 4))
    seen = []
    for block in range(100):
        engine.denoise(np.full((1, 4), spec.mask_id))
        engine.commit(ids[:, 4 * block : 4 * block + 4], np.array([4]))
        shapes = {name: array.shape for name, array in engine.read(0).items()}
        seen.append((shapes, dict(engine.buffers.nbytes)))
    assert seen[0] == seen[-1]
    assert seen[0][0]["key_001"] == (2, 18, 8)
    judge = ReferenceModel(spec, load_checkpoint(checkpoint).tensors)
    expected, _ = judge.run(ids[0], clean=400)
    np.testing.assert_allclose(engine.denoise(ids[:, 400:])[0], expected[400:], atol=RIGHT)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            model(attention_layer("reverse"), mamba_layer()),
            "layer 0: attention of direction 'reverse'",
        ),
        (
            model(
                attention_layer(sizes=AttentionSizes(4, 2, 8, 8, window=16)),
                objective="full",
                mask_id=None,
            ),
            "layer 0: a sliding window of 16 tokens is a state",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, spec, words):
    """Before anything is traced."""
    checkpoint = random_checkpoint(tmp_path / "checkpoint", spec)
    with pytest.raises(ExportError, match=words):
        export_bundle(checkpoint, tmp_path / "out")
    assert left_behind(tmp_path) == ["checkpoint"]


# --- unusual models -------------------------------------------------------------------------------


def taps(count: int) -> LayerSpec:
    """A Mamba-2 layer with a convolution of that many taps."""
    return mamba_layer(sizes=Mamba2Sizes(64, 4, 16, 4, 4, count))


UNUSUAL = {
    # the commit pass leaves the reverse layer out, and then has no length to read
    "left-out-reverse": (
        model(mamba_layer("reverse"), attention_layer(), commit_reverse=False),
        ("commit",),
    ),
    # one body serves 8, 2 and 1 taps; the last layer has no conv port
    "mixed-taps": (
        model(
            LayerSpec("none", None, mlp="plain", mlp_width=16, norm="layer"),
            taps(8),
            taps(2),
            taps(1),
        ),
        ("denoise", "commit"),
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_models_have_the_ports_that_are_read(name):
    """What the linter wants holds for them too."""
    spec, roles = UNUSUAL[name]
    for role in roles:
        made = finished(spec, role)
        inputs, outputs = graph_ports(spec, StateSpec.of(spec), role)
        assert [v.name for v in made.graph.inputs] == [p.name for p in inputs]
        assert [v.name for v in made.graph.outputs] == [p.name for p in outputs]


def test_a_tied_head_holds_the_embedding_once_where_memory_counts(bundle_path):
    """The fused graph multiplies by the table as it stands; the result is that of the others."""
    folder = bundle_path("F2-forward", fused=True)
    heads = {}
    for role in ("denoise", "commit_denoise"):
        model = onnx.load(folder / f"{role}.onnx", load_external_data=False)
        heads[role] = [
            [node.op_type for node in model.graph.node if "embedding.weight" in node.input]
        ]
    assert heads == {"denoise": [["Gather", "Transpose"]], "commit_denoise": [["Gather", "MatMul"]]}
