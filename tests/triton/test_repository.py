"""What a generated repository holds, and the rules that its configurations keep (cases TS)."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sample_engine import (
    HYBRID,
    LIBRARY,
    fill_engine,
    identity_of,
    write_placeholder_bundle,
)

from fixedstate.bundle import Bundle
from fixedstate.errors import BundleError, ExportError, UsageError
from fixedstate.export import tritonconfig, tritonrepo, tritonrules
from fixedstate.export.tritonconfig import Word, tensor
from fixedstate.export.tritonrepo import RepositoryRequest
from fixedstate.ports import Port
from fixedstate.serve.tritonmodel import ModelSetup


@pytest.fixture(scope="module")
def stepped(bundle_path, tmp_path_factory) -> tritonrepo.Repository:
    """Every model of a repository, all limits at their defaults; two layers with state."""
    out = tmp_path_factory.mktemp("stepped") / "repository"
    request = RepositoryRequest(facade=True, step=True)
    return tritonrepo.write(bundle_path("F2", fused=True), out, request)


@pytest.fixture(scope="module")
def step(stepped):
    """The step model's configuration, its graph's ports, and its bundle."""
    bundle = Bundle.open(stepped.path / "fixedstate" / "1" / "bundle")
    config = parsed(stepped.path / "fixedstate_step")
    return config, bundle.graph("commit_denoise"), bundle


def parsed(folder: Path):
    return tritonconfig.parsed((folder / "config.pbtxt").read_text())


def rules(step, change=lambda config: None) -> str:
    """The broken rules after a change."""
    config, graph, _ = step
    changed = copy.deepcopy(config)
    change(changed)
    return "; ".join(tritonrules.broken(changed, graph.inputs, graph.outputs))


# --- files ---------------------------------------------------------------------------------------


def test_tree(stepped):
    """Folders are models; everything else at the top is a file."""
    wheel = tritonrepo.wheel_name()
    bundle = ("bundle.json", "commit.onnx", "commit_denoise.onnx", "denoise.onnx", "parity.json")
    assert set(stepped.files) == {
        *("README.md", "launch.py", "repository.json", "requirements-stub.txt"),
        *("fixedstate/config.pbtxt", "fixedstate/1/model.py", f"fixedstate/1/{wheel}"),
        *(f"fixedstate/1/bundle/{name}" for name in (*bundle, "weights.safetensors")),
        "fixedstate_generate/config.pbtxt",
        *(f"fixedstate_generate/1/{name}" for name in ("model.py", wheel)),
        "fixedstate_step/config.pbtxt",
        *(f"fixedstate_step/1/{name}" for name in ("commit_denoise.onnx", "weights.safetensors")),
    }
    assert stepped.models == ("fixedstate", "fixedstate_generate")
    assert os.access(stepped.path / "launch.py", os.X_OK)


def test_TS_12_no_template_mark_stays(stepped):
    """Every configuration parses, and nothing that was to be filled in is left."""
    for file in stepped.files:
        if file.endswith((".pbtxt", ".py", ".md", ".txt", ".json")):
            text = (stepped.path / file).read_text()
            assert not re.search(r"\$\{|\{\{|\}\}", text.replace("}}}", "")) or "bundle" in file, (
                file
            )
    for name in ("fixedstate", "fixedstate_generate", "fixedstate_step"):
        assert parsed(stepped.path / name).name == name


def test_repositories_of_one_bundle_are_the_same_to_the_byte(bundle_path, stepped, tmp_path):
    request = RepositoryRequest(facade=True, step=True)
    again = tritonrepo.write(bundle_path("F2", fused=True), tmp_path / "r", request)
    assert again.files == stepped.files
    for file in again.files:
        assert (again.path / file).read_bytes() == (stepped.path / file).read_bytes(), file


def test_package_in_the_repository_runs_alone(stepped, runtime310, tmp_path):
    """Python 3.10 and numpy 1.26, isolated as the stub is: only the wheel and its requirements."""
    wheel = stepped.path / "fixedstate" / "1" / tritonrepo.wheel_name()
    program = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        "import fixedstate.serve.tritonmodel as m, fixedstate.serve.tritonfacade, fixedstate\n"
        "from fixedstate.runtime import Request, Settings, load\n"
        "d = load(sys.argv[1], threads=1)\n"
        "print(m.__file__.startswith(sys.path[0]), 'torch' in sys.modules,\n"
        "      d.generate([Request([3, 4], Settings(8))])[0].new_tokens)\n"
    )
    bundle = stepped.path / "fixedstate" / "1" / "bundle"
    done = subprocess.run(
        [str(runtime310.python), "-I", "-c", program, str(bundle)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["True", "False", "8"], done.stderr


def test_wheel_is_one_that_pip_takes(stepped, tmp_path):
    """What lies there is not only importable: it installs."""
    wheel = stepped.path / "fixedstate" / "1" / tritonrepo.wheel_name()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
    assert "fixedstate/runtime/ort.py" in names
    assert not [name for name in names if "/models/" in name or "__pycache__" in name]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--target", str(tmp_path / "t"), str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t" / "fixedstate" / "plugins" / "ptx" / "index.json").is_file()


def test_installed_package_is_expected_in_its_version(bundle_path, tmp_path):
    """No wheel in the tree; another version is refused in one sentence."""
    made = tritonrepo.write(
        bundle_path("F2", fused=True), tmp_path / "r", RepositoryRequest(installed=True)
    )
    assert not [file for file in made.files if file.endswith(".whl")]
    assert "fixedstate" in (made.path / "README.md").read_text()
    model = (made.path / "fixedstate" / "1" / "model.py").read_text()
    program = "import fixedstate; fixedstate.__version__ = '9.9'\n" + model
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "here is 9.9" in done.stderr.splitlines()[-1]
    whole = subprocess.run([sys.executable, "-c", model], capture_output=True, check=False)
    assert whole.returncode == 0, whole.stderr


def test_nothing_is_left_of_a_failure(bundle_path, tmp_path, monkeypatch):
    """Whole or not at all; an older repository stays."""
    bundle = bundle_path("F2", fused=True)
    tritonrepo.write(bundle, tmp_path / "r", RepositoryRequest())
    with pytest.raises(UsageError, match="--force"):
        tritonrepo.write(bundle, tmp_path / "r", RepositoryRequest())
    monkeypatch.setattr(tritonrepo.tritonreadme, "text", lambda *_: "${left}")
    for target, force in ((tmp_path / "r", True), (tmp_path / "s", False)):
        with pytest.raises(ExportError, match="template mark"):
            tritonrepo.write(bundle, target, RepositoryRequest(facade=True), force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert not (tmp_path / "r" / "fixedstate_generate").exists()


def test_damaged_bundle_is_refused(tmp_path):
    bundle = write_placeholder_bundle(tmp_path / "b")
    (tmp_path / "b" / "denoise.onnx").write_text("other")
    with pytest.raises(BundleError, match="changed after the export"):
        tritonrepo.write(bundle.path, tmp_path / "r", RepositoryRequest())
    assert not (tmp_path / "r").exists()


BAD_REQUESTS = {
    "name": (RepositoryRequest(name="../x"), "model name"),
    "empty-name": (RepositoryRequest(name=""), "model name"),
    "slots": (RepositoryRequest(setup=ModelSetup("", slots=0)), "slots"),
    "queue": (RepositoryRequest(setup=ModelSetup("", queue=-1)), "queue"),
    "prompt": (RepositoryRequest(setup=ModelSetup("", max_prompt_tokens=0)), "max_prompt_tokens"),
    "version": (RepositoryRequest(setup=ModelSetup("", target_version="2.51")), "no release"),
    "month": (RepositoryRequest(setup=ModelSetup("", target_version="24.13")), "no release"),
    "step": (RepositoryRequest(step=True), "appends keys and values"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_are_refused(tmp_path, name):
    request, words = BAD_REQUESTS[name]
    bundle = write_placeholder_bundle(tmp_path / "b")
    with pytest.raises(UsageError, match=words):
        tritonrepo.write(bundle.path, tmp_path / "r", request)
    assert not (tmp_path / "r").exists()


def test_step_model_needs_the_fused_graph(tmp_path):
    spec = replace(HYBRID, layers=HYBRID.layers[1:2])
    bundle = write_placeholder_bundle(tmp_path / "b", spec, ("denoise", "commit"))
    with pytest.raises(UsageError, match="--fused"):
        tritonrepo.write(bundle.path, tmp_path / "r", RepositoryRequest(step=True))


def test_TS_11_plugin_library_of_an_engine_is_in_the_tree(tmp_path):
    """The model loads it by itself, hash checked; README and record name it."""
    bundle = write_placeholder_bundle(tmp_path / "b")
    (bundle.path / LIBRARY.library).write_bytes(b"library")
    identity = identity_of(bundle, plugins=(LIBRARY,))
    (tmp_path / "e").mkdir()
    engine = fill_engine(tmp_path / "e", bundle, identity)
    assert tritonrepo.usual_slots(engine.path) == 8  # what its profiles take
    with pytest.raises(UsageError, match="built for 8 rows"):
        tritonrepo.write(engine.path, tmp_path / "s", RepositoryRequest())
    eight = RepositoryRequest(setup=ModelSetup("", slots=8))
    made = tritonrepo.write(engine.path, tmp_path / "r", eight)
    assert f"fixedstate/1/bundle/{LIBRARY.library}" in made.files
    assert made.record["libraries"] == [LIBRARY.library]
    assert LIBRARY.library in (made.path / "README.md").read_text()
    assert parsed(made.path / "fixedstate").instance_group[0].gpus == [0]
    assert parsed(made.path / "fixedstate").parameters["digest"].string_value == engine.digest
    request = RepositoryRequest(setup=ModelSetup("", slots=8, threads=2))
    with pytest.raises(UsageError, match="threads"):
        tritonrepo.write(engine.path, tmp_path / "s", request)


# --- configurations ------------------------------------------------------------------------------


def test_configuration_says_what_the_bundle_is(stepped):
    config = parsed(stepped.path / "fixedstate")
    bundle = Bundle.open(stepped.path / "fixedstate" / "1" / "bundle")
    given = {name: value.string_value for name, value in config.parameters.items()}
    assert given == ModelSetup(bundle.digest).to_parameters()
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert [entry.optional for entry in config.input] == [True, True]


def test_written_text_is_compared_with_what_the_schema_reads(monkeypatch):
    """A slip of the writer, or a field that is none, does not reach a server."""
    tree = {"name": "a", "max_batch_size": 0, "input": [tensor("x", "TYPE_FP32", [1, -1])]}
    assert tritonconfig.parsed(tritonconfig.text_of(tree)).input[0].dims == [1, -1]
    with pytest.raises(ExportError, match="no field named"):
        tritonconfig.text_of({**tree, "inputs": []})
    with pytest.raises(ExportError, match="no model configuration"):
        tritonconfig.text_of({**tree, "backend": Word('"a" }')})
    monkeypatch.setattr(tritonconfig, "_scalar", lambda value: '"x"' if value == "a" else "7")
    with pytest.raises(ExportError, match="config.pbtxt"):
        tritonconfig.text_of(tree)


def test_TS_01_batch_axis_is_left_out_only_where_there_is_one():
    """[B, 8] with rows, [1, 8] with rows, [1, 8] without."""

    def found(shape, rows, dims):
        tree = {
            "name": "a",
            "backend": "onnxruntime",
            "max_batch_size": rows,
            "input": [tensor("x", "TYPE_FP32", dims)],
        }
        config = tritonconfig.parsed(tritonconfig.text_of(tree))
        return tritonrules.broken(config, (Port("x", "float32", shape),))

    assert found(("B", 8), 4, [8]) == []
    assert found((1, 8), 0, [1, 8]) == []
    assert found(("B", 8), 0, [-1, 8]) == []
    assert "no batch axis" in found((1, 8), 4, [8])[0]
    assert "has shape [8]" in found(("B", 8), 4, [-1, 8])[0]


def test_TS_02_types_are_those_of_the_graph(step):
    """Read from the file itself, whatever the manifest says."""
    onnx = pytest.importorskip("onnx")
    config, graph, bundle = step
    model = onnx.load(bundle.path / graph.file, load_external_data=False)
    entries = {e.name: e.data_type for e in [*config.input, *config.output]}
    for state in config.sequence_batching.state:
        entries |= {state.input_name: state.data_type, state.output_name: state.data_type}
    names = {onnx.TensorProto.INT64: "int64", onnx.TensorProto.FLOAT: "float32"}
    values = config.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    found = {
        value.name: values[tritonconfig.TYPES[names[value.type.tensor_type.elem_type]]].number
        for value in [*model.graph.input, *model.graph.output]
    }
    assert entries == found

    def change(changed):
        changed.input[0].data_type = values["TYPE_INT32"].number

    assert "another type" in rules(step, change)


def test_TS_04_every_state_begins_with_zeros(step):
    """Without, the first pass reads memory of whatever was there before."""
    states = step[0].sequence_batching.state
    assert len(states) == 4  # conv and scan of two layers
    assert all(state.initial_state[0].zero_data for state in states)

    def change(changed):
        del changed.sequence_batching.state[1].initial_state[:]

    assert rules(step) == ""
    assert "begin with garbage" in rules(step, change)


def test_TS_05_dimensions_of_states_are_fixed(step):
    """A variable one silently becomes 1."""
    assert all(dim > 0 for state in step[0].sequence_batching.state for dim in state.dims)

    def change(changed):
        changed.sequence_batching.state[0].dims[0] = -1

    assert "becomes 1" in rules(step, change)


def test_TS_06_old_servers_are_refused_and_tensors_stand_once(step, stepped, tmp_path):
    """A server of 2021 knows nothing of this; a state listed as an input too is fed twice."""
    assert stepped.record["lowest_server"] == "2.51.0"
    assert "2.51.0" in (stepped.path / "README.md").read_text()
    request = RepositoryRequest(setup=ModelSetup("", target_version="21.12"))
    bundle = stepped.path / "fixedstate" / "1" / "bundle"
    with pytest.raises(UsageError, match=r"21\.12 is older than 24\.10"):
        tritonrepo.write(bundle, tmp_path / "r", request)

    def twice(changed):
        state = changed.sequence_batching.state[0]
        entry = changed.input.add()
        entry.name, entry.data_type = state.input_name, state.data_type
        entry.dims.extend(state.dims)

    def with_batch(changed):
        changed.sequence_batching.state[0].dims.insert(0, 1)

    assert "stands twice" in rules(step, twice)
    assert "has shape" in rules(step, with_batch)


def test_states_that_the_server_would_swap_are_refused(step):
    """It pairs inputs and outputs by the order of their names."""
    states = step[0].sequence_batching.state
    assert [s.input_name.removeprefix("past_") for s in states] == [
        s.output_name.removeprefix("present_") for s in states
    ]

    def swap(changed):
        state = changed.sequence_batching.state
        state[0].output_name, state[1].output_name = state[1].output_name, state[0].output_name

    assert "swap states" in rules(step, swap)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c, "backend", "python"), "no implicit state"),
        (lambda c: setattr(c, "max_batch_size", 0), "sequences are batched"),
        (lambda c: setattr(c.response_cache, "enable", True), "response cache"),
        (lambda c: c.output.pop(), "'logits' is not listed"),
        (lambda c: setattr(c.input[0], "name", "ids"), "no port of the graph"),
        (
            lambda c: setattr(c.sequence_batching.state[0], "use_growable_memory", True),
            "one buffer for both",
        ),
        (
            lambda c: setattr(c.sequence_batching.state[0].initial_state[0], "data_type", 3),
            "another shape or type",
        ),
    ],
)
def test_other_rules(step, change, words):
    assert words in rules(step, change)


def test_TS_14_a_silent_sequence_is_dropped_and_the_readme_says_how(step, stepped):
    """START and END are the client's; a minute is far more than a pass takes."""
    assert step[0].sequence_batching.max_sequence_idle_microseconds == 60_000_000
    readme = (stepped.path / "README.md").read_text()
    assert "first request sets START" in readme
    assert "silent for a minute" in readme

    def change(changed):
        changed.sequence_batching.max_sequence_idle_microseconds = 0

    assert "a client that leaves" in rules(step, change)


def test_TS_08_shared_memory_is_estimated_from_the_limits(stepped):
    """Logits of 4 rows, 32 tokens and 50,000 ids would be 26 MB a pass: they never leave."""
    limits = ModelSetup.from_parameters(stepped.record["limits"])
    assert stepped.record["shm_bytes"] == tritonrepo.shm_bytes(limits)
    prompt = max(8 * limits.max_prompt_tokens, limits.max_text_bytes)
    assert stepped.record["shm_bytes"] > (limits.slots + limits.queue) * prompt
    more = replace(limits, max_state_bytes=3 << 20)
    assert tritonrepo.shm_bytes(more) - tritonrepo.shm_bytes(limits) == 16 * 2 * (4 << 20)
    assert (
        f"--shm-size={-(-stepped.record['shm_bytes'] >> 20)}m"
        in (stepped.path / "README.md").read_text()
    )
    assert "logits" not in {e.name for e in parsed(stepped.path / "fixedstate").output}


def test_TS_13_weights_lie_beside_the_graph(step, stepped, tmp_path, monkeypatch):
    """The step model's file opens from another folder, and gives what the bundle's does."""
    import onnxruntime

    _, graph, _ = step
    monkeypatch.chdir(tmp_path)
    file = stepped.path / "fixedstate_step" / "1" / graph.file
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    sizes = {"B": 1, "m": 1}
    feeds = {
        port.name: np.zeros(port.resolve(**sizes), "int64" if port.dtype == "int64" else "float32")
        for port in graph.inputs
    }
    states = [entry.output_name for entry in step[0].sequence_batching.state]
    outputs = session.run([*states, "logits"], feeds)
    assert all(not output.any() for output in outputs[:-1])  # commit_length 0 leaves the zeros
    assert outputs[-1].any()


def test_record_is_that_of_the_file(stepped):
    assert json.loads((stepped.path / "repository.json").read_text()) == stepped.record
