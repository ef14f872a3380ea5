"""A model repository of Triton Inference Server, written from a bundle or an engine.

The folder is what ``tritonserver --model-repository`` takes::

    model_repository/
      launch.py  README.md  requirements-stub.txt  repository.json
      fixedstate/config.pbtxt
      fixedstate/1/model.py
      fixedstate/1/bundle/                  the bundle or engine, whole
      fixedstate/1/fixedstate-...whl        this package, unless it is installed there
      fixedstate_generate/                  --generate-facade
      fixedstate_step/                      --step-model

Only folders with models stand in it: a server takes any other folder for one.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fixedstate
from fixedstate.bundle import MANIFEST, PARITY, WEIGHTS, Bundle, Graph, staged_folder
from fixedstate.errors import ExportError, UsageError
from fixedstate.export import tritonconfig, tritonlaunch, tritonreadme, tritonrules
from fixedstate.export.tritonconfig import Tree, Word, data_type, tensor
from fixedstate.runtime.enginefile import MANIFEST as ENGINE_MANIFEST
from fixedstate.runtime.enginefile import EngineFolder
from fixedstate.runtime.requests import check_decodable
from fixedstate.serve.tritonmodel import BUNDLE, IDS, OLDEST, TEXT, ModelSetup

Notes = Callable[[str], None]

MODEL = """\
\"\"\"Triton's Python back end looks here for its model: it is in the package fixedstate.\"\"\"

{find}from fixedstate.serve.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""

FIND_WHEEL = """\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().with_name({wheel!r})))

"""

FIND_INSTALLED = """\
import importlib.util

if importlib.util.find_spec("fixedstate") is None:
    raise ImportError("install fixedstate {version} in the environment of this Python stub")

import fixedstate

if fixedstate.__version__ != "{version}":
    raise ImportError(
        "this repository was written for fixedstate {version}, here is " + fixedstate.__version__
    )

"""

REQUIREMENTS = """\
# What the Python stub of the server needs, beside the package fixedstate itself.
# Triton 24.10 talks to numpy 1 only: with numpy 2 tensors come out empty.
numpy>=1.26{numpy}
safetensors>=0.4
tokenizers>=0.20
{backend}
"""

FACADE_INSTANCES = 2
IDLE_MICROSECONDS = 60_000_000
"""How long a sequence of the step model may be silent; a step takes far less."""

STEP_ROWS = 8


@dataclass(frozen=True, slots=True)
class RepositoryRequest:
    """What is to be written; `slots` and the like as in :class:`ModelSetup`.

    Attributes:
        name: Of the model.
        setup: Limits of the model; its digest is filled in.
        facade: Whether a model ``<name>_generate`` gives whole answers.
        step: Whether a model ``<name>_step`` with implicit state is written beside.
        installed: Whether the package is installed in the stub's environment, instead of lying in
            the repository.
    """

    name: str = "fixedstate"
    setup: ModelSetup = field(default_factory=lambda: ModelSetup(""))
    facade: bool = False
    step: bool = False
    installed: bool = False


@dataclass(frozen=True, slots=True)
class Repository:
    """What was written.

    Attributes:
        path: The folder.
        models: Names of the models that ``launch.py`` loads.
        files: Paths in the folder, sorted.
        record: The content of ``repository.json``.
    """

    path: Path
    models: tuple[str, ...]
    files: tuple[str, ...]
    record: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "path": str(self.path),
            "models": list(self.models),
            "files": list(self.files),
            "record": self.record,
        }


def write(
    source: Path, out: Path, request: RepositoryRequest, *, force: bool = False
) -> Repository:
    """Write a repository that appears whole or not at all.

    Args:
        source: A bundle or an engine; all its hashes are checked.
        out: The folder.
        request: What is to be in it.
        force: Whether an older folder is replaced.

    Raises:
        UsageError: for a name, limit or version that is none, or a model that cannot be decoded or
            has no step model.
        BundleError: for a source that is damaged, or a folder that cannot be written.
        ExportError: where a configuration breaks a rule of the server.
    """
    tritonrules.check_name(request.name)
    tritonrules.check_target(request.setup.target_version)
    request.setup.limits  # noqa: B018 - refuses limits that are none
    if request.setup.slots < 1:
        raise UsageError(f"slots must be 1 or more; got {request.setup.slots}")
    engine = (source / ENGINE_MANIFEST).is_file()
    model: Bundle | EngineFolder = EngineFolder.open(source) if engine else Bundle.open(source)
    check_decodable(model.spec)
    if engine and request.setup.threads:
        raise UsageError("threads are of ONNX Runtime; an engine has none: leave them out")
    rows = most_rows(model)
    if rows is not None and request.setup.slots > rows:
        raise UsageError(
            f"slots is {request.setup.slots}, but the engine was built for {rows} rows: ask for "
            "fewer slots, or build with a wider --batch"
        )
    setup = _with(request.setup, digest=model.digest)
    step = _step_graph(model) if request.step else None
    with staged_folder(out, force=force) as folder:
        models = [request.name]
        _write_model(folder / request.name, model, request, setup, engine)
        if request.facade:
            models.append(f"{request.name}_generate")
            _write_facade(folder / models[-1], request)
        if step is not None:
            assert isinstance(model, Bundle)
            _write_step(folder / f"{request.name}_step", model, step, setup)
        record = _record(model, request, setup, models, engine)
        _write_text(folder / tritonlaunch.RECORD, json.dumps(record, indent=1) + "\n")
        shutil.copyfile(tritonlaunch.__file__, folder / "launch.py")
        (folder / "launch.py").chmod(0o755)
        _write_text(folder / "requirements-stub.txt", _requirements(setup, engine))
        _write_text(folder / "README.md", tritonreadme.text(record, request.installed))
        files = tuple(
            sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        )
    return Repository(out, tuple(models), files, record)


def most_rows(model: Bundle | EngineFolder) -> int | None:
    """Rows that a pass can have; None for a bundle, whose graphs take any number."""
    if isinstance(model, Bundle):
        return None
    profiles = [profile for plan in model.plans.values() for profile in plan.profiles]
    return min((profile["input_ids"][2][0] for profile in profiles), default=None)


def usual_slots(source: Path) -> int:
    """Slots where nothing is asked for: 16, or as many rows as an engine was built for."""
    if not (source / ENGINE_MANIFEST).is_file():
        return ModelSetup("").slots
    rows = most_rows(EngineFolder.open(source, verify=False))
    return min(ModelSetup("").slots, rows or 1)


def _with(setup: ModelSetup, **changes: Any) -> ModelSetup:
    return ModelSetup(**{**asdict(setup), **changes})


# --- the streaming model --------------------------------------------------------------------------


def model_config(name: str, setup: ModelSetup, *, on_card: bool = False) -> Tree:
    """The configuration of the streaming model: everything it knows comes from the bundle."""
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,  # it batches by itself, one pass over all active rows
        "model_transaction_policy": {"decoupled": True},
        "input": [
            tensor(TEXT, "TYPE_STRING", [1], optional=True),
            tensor(IDS, "TYPE_INT64", [-1], optional=True),
        ],
        "output": [
            tensor("text_output", "TYPE_STRING", [1]),
            tensor("token_ids", "TYPE_INT64", [-1]),
            tensor("block_index", "TYPE_INT32", [1]),
            tensor("finish_reason", "TYPE_STRING", [1]),
            tensor("prompt_tokens", "TYPE_INT64", [1]),
            tensor("denoise_passes", "TYPE_INT64", [1]),
            tensor("state", "TYPE_STRING", [1]),
        ],
        "instance_group": [_instances(1, on_card)],
        "parameters": tritonconfig.parameters(setup.to_parameters()),
    }


def _instances(count: int, on_card: bool) -> Tree:
    if on_card:
        return {"kind": Word("KIND_GPU"), "count": count, "gpus": [0]}
    return {"kind": Word("KIND_CPU"), "count": count}


def _write_model(
    folder: Path,
    model: Bundle | EngineFolder,
    request: RepositoryRequest,
    setup: ModelSetup,
    engine: bool,
) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    _write_config(folder, model_config(request.name, setup, on_card=engine))
    _write_text(version / "model.py", _model_py("tritonmodel", request.installed))
    if not request.installed:
        write_wheel(version / wheel_name())
    copied = version / BUNDLE
    copied.mkdir()
    manifest = ENGINE_MANIFEST if engine else MANIFEST
    names = [manifest, *model.hashes()]
    if (model.path / PARITY).is_file():
        names.append(PARITY)
    for file in names:
        shutil.copyfile(model.path / file, copied / file)
    opened = EngineFolder.open(copied) if engine else Bundle.open(copied)
    if opened.digest != model.digest:
        raise ExportError(f"{model.path} was changed while it was copied: do it again")


def _model_py(module: str, installed: bool) -> str:
    if installed:
        find = FIND_INSTALLED.format(version=fixedstate.__version__)
    else:
        find = FIND_WHEEL.format(wheel=wheel_name())
    return MODEL.format(find=find, module=module)


def _write_config(
    folder: Path, tree: Tree, graph: Graph | None = None, config: str = "config.pbtxt"
) -> None:
    text = tritonconfig.text_of(tree)
    ports = (graph.inputs, graph.outputs) if graph is not None else ((), ())
    tritonrules.check(tritonconfig.parsed(text), *ports)
    _write_text(folder / config, text)


def _write_text(file: Path, text: str) -> None:
    marks = re.findall(r"\$\{|\{\{", text)
    if marks:
        raise ExportError(f"{file.name} holds the template mark {marks[0]!r}")
    file.write_text(text, encoding="utf-8")


def _requirements(setup: ModelSetup, engine: bool) -> str:
    numpy = ",<2" if setup.target_version <= OLDEST else ""
    backend = "# and the TensorRT that the engine was built with" if engine else "onnxruntime>=1.23"
    return REQUIREMENTS.format(numpy=numpy, backend=backend)


# --- whole answers --------------------------------------------------------------------------------


def _write_facade(folder: Path, request: RepositoryRequest) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    tree: Tree = {
        "name": folder.name,
        "backend": "python",
        "max_batch_size": 0,
        "input": [
            tensor(TEXT, "TYPE_STRING", [1], optional=True),
            tensor(IDS, "TYPE_INT64", [-1], optional=True),
        ],
        "output": [
            tensor("text_output", "TYPE_STRING", [1]),
            tensor("token_ids", "TYPE_INT64", [-1]),
            tensor("finish_reason", "TYPE_STRING", [1]),
        ],
        "instance_group": [_instances(FACADE_INSTANCES, on_card=False)],
        "parameters": tritonconfig.parameters({"model": request.name}),
    }
    _write_config(folder, tree)
    _write_text(version / "model.py", _model_py("tritonfacade", request.installed))
    if not request.installed:
        write_wheel(version / wheel_name())


# --- one step, with the server's own state --------------------------------------------------------


def _step_graph(model: Bundle | EngineFolder) -> Graph:
    """The graph whose passes either denoise or commit, by `commit_length`.

    Raises:
        UsageError: for an engine, a bundle without that graph, or a model with keys and values.
    """
    if not isinstance(model, Bundle):
        raise UsageError("a step model is made of a bundle; this is an engine")
    appended = [port.suffix for port in model.state.appended]
    if appended:
        raise UsageError(
            f"this model appends keys and values ({appended[0]}): the server's state would be "
            "replaced by the new columns, so it has no step model; leave --step-model out"
        )
    if not model.state.swapped:
        raise UsageError("this model carries no state, so it has no step model")
    if "commit_denoise" not in model.graphs:
        raise UsageError(
            "a step model runs the graph commit_denoise, which this bundle does not have: export "
            "it with --fused"
        )
    return model.graph("commit_denoise")


def step_config(name: str, model: Bundle, graph: Graph) -> Tree:
    """The configuration of the step model: a sequence is a row, its state the server's.

    A request with ``commit_length`` 0 leaves the state as it is, byte for byte.
    """
    pairs = {port.past.name: port for port in model.state.committed}
    states = []
    for port in pairs.values():
        dims = [dim for dim in port.past.shape[1:] if isinstance(dim, int)]
        states.append(
            {
                "input_name": port.past.name,
                "output_name": port.present.name,
                "data_type": data_type(port.past),
                "dims": dims,
                "initial_state": [
                    {
                        "name": f"zero_{port.suffix}",
                        "data_type": data_type(port.past),
                        "dims": dims,
                        "zero_data": True,
                    }
                ],
            }
        )
    presents = {port.present.name for port in pairs.values()}
    return {
        "name": name,
        "backend": "onnxruntime",
        "max_batch_size": STEP_ROWS,
        "default_model_filename": graph.file,
        "input": [_graph_tensor(port) for port in graph.inputs if port.name not in pairs],
        "output": [_graph_tensor(port) for port in graph.outputs if port.name not in presents],
        "sequence_batching": {
            "max_sequence_idle_microseconds": IDLE_MICROSECONDS,
            "direct": {},
            "state": states,
        },
        "instance_group": [_instances(1, on_card=False)],
    }


def _graph_tensor(port: Any) -> Tree:
    """A port without its batch axis; one that has no other is a single number a row."""
    dims = [dim if isinstance(dim, int) else -1 for dim in port.shape[1:]]
    more: Tree = {} if dims else {"reshape": {"shape": []}}
    return tensor(port.name, data_type(port), dims or [1], **more)


def _write_step(folder: Path, model: Bundle, graph: Graph, setup: ModelSetup) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    _write_config(folder, step_config(folder.name, model, graph), graph)
    for file in (graph.file, WEIGHTS):  # the graph names its weights by this name, beside it
        shutil.copyfile(model.path / file, version / file)


# --- the package ----------------------------------------------------------------------------------


def wheel_name() -> str:
    """File name of the wheel of this package."""
    return f"fixedstate-{fixedstate.__version__}-py3-none-any.whl"


def write_wheel(file: Path) -> None:
    """Pack this package as it runs here: a wheel that Python also imports as it lies there.

    The same package gives the same bytes. The shipped checkpoints stay out.

    Raises:
        ExportError: where the package's own metadata is not to be found.
    """
    try:
        found = importlib.metadata.distribution("fixedstate")
    except importlib.metadata.PackageNotFoundError as err:
        raise ExportError(
            "fixedstate is not installed here (it runs from a folder), so no wheel of it can be "
            "made: install it, or write the repository with --installed"
        ) from err
    name = f"fixedstate-{fixedstate.__version__}.dist-info"
    packed = dict(_sources(Path(fixedstate.__file__).parent))
    packed[f"{name}/METADATA"] = (found.read_text("METADATA") or "").encode()
    packed[f"{name}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    packed[f"{name}/entry_points.txt"] = (found.read_text("entry_points.txt") or "").encode()
    packed[f"{name}/RECORD"] = "".join(f"{entry},,\n" for entry in sorted(packed)).encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in sorted(packed):
            archive.writestr(zipfile.ZipInfo(entry), packed[entry], zipfile.ZIP_DEFLATED)


def _sources(package: Path) -> Iterator[tuple[str, bytes]]:
    """Files of the package by their path in it; its stages may be links to other folders."""
    folders = [package]
    while folders:
        folder = folders.pop()
        for entry in folder.iterdir():
            inside = entry.relative_to(package)
            if entry.name == "__pycache__" or inside == Path("export", "models"):
                continue
            if entry.is_dir():
                folders.append(entry)
            elif entry.suffix not in (".pyc", ".pyo"):
                yield f"fixedstate/{inside}", entry.read_bytes()


# --- the record -----------------------------------------------------------------------------------


def shm_bytes(setup: ModelSetup) -> int:
    """Shared memory that requests may take at a time.

    It grows by what lies in it at once and never shrinks: a stub's own megabytes, and for every
    request that may be open its prompt as text or ids, its answers, and a saved state both ways.
    Logits never pass through it.
    """
    state = 2 * -(-setup.max_state_bytes // 3) * 4
    prompt = max(8 * setup.max_prompt_tokens, setup.max_text_bytes)
    answer = 64 * 1024
    return (8 << 20) + (setup.slots + setup.queue) * (prompt + answer) + setup.slots * state


def _record(
    model: Bundle | EngineFolder,
    request: RepositoryRequest,
    setup: ModelSetup,
    models: list[str],
    engine: bool,
) -> dict[str, Any]:
    return {
        "fixedstate": fixedstate.__version__,
        "model": request.name,
        "models": models,
        "step_model": f"{request.name}_step" if request.step else None,
        "digest": model.digest,
        "source": model.source.name,
        "target_version": setup.target_version,
        "lowest_server": tritonrules.SERVERS[OLDEST],
        "on_card": engine,
        "libraries": sorted(file for file in model.hashes() if ".so" in Path(file).suffixes),
        "shm_bytes": shm_bytes(setup),
        "limits": setup.to_parameters(),
        "probe": {"input_ids": [model.spec.any_token], "max_new_tokens": 1},
    }
