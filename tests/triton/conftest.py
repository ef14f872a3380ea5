"""A repository, a model loaded from it, and a real server on it."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import triton_stand_in
from triton_server import TritonServer, free_ports

from fixedstate.export import tritonrepo
from fixedstate.serve.tritonmodel import ModelSetup

ROOT = Path(__file__).resolve().parents[2]
SERVER_PACKAGE = "nvidia-pytriton==0.7.0"
"""It holds server 2.51.0 (24.10) and stubs; nothing of it is imported."""


@pytest.fixture(scope="session")
def bundle(bundle_path) -> Path:
    """A trained model with a tokenizer; its blocks hold 16 tokens."""
    return bundle_path("tiny-mamba")


@pytest.fixture(scope="session")
def repository(bundle, tmp_path_factory) -> tritonrepo.Repository:
    """Four slots, a queue of sixteen, short limits, the facade beside."""
    setup = ModelSetup(
        "",
        slots=4,
        queue=16,
        max_prompt_tokens=256,
        max_new_tokens=100_000,
        max_state_bytes=4 << 20,
        threads=1,
    )
    request = tritonrepo.RepositoryRequest(setup=setup, facade=True)
    return tritonrepo.write(bundle, tmp_path_factory.mktemp("triton") / "repository", request)


# --- the model in this process, on a stand-in ----------------------------------------------------


@pytest.fixture
def backend(monkeypatch):
    """The stand-in for the server's module."""
    made = triton_stand_in.module()
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def arguments(repository: Path, name: str = "fixedstate", **parameters: str) -> dict[str, str]:
    """What the Python back end hands to ``initialize``; parameters replace those of the file."""
    from google.protobuf import json_format

    from fixedstate.export import tritonconfig

    text = (repository / name / "config.pbtxt").read_text()
    config = json_format.MessageToDict(tritonconfig.parsed(text), preserving_proto_field_name=True)
    for key, value in parameters.items():
        config["parameters"][key] = {"string_value": value}
    return {
        "model_config": json.dumps(config),
        "model_repository": str(repository / name),
        "model_version": "1",
        "model_name": name,
    }


@pytest.fixture
def load_model(backend, repository, monkeypatch) -> Iterator[Callable]:
    """Load the model on the stand-in: ``load_model(slots="2")``; it is unloaded at the end.

    Its numpy check is told of numpy 1: the stand-in takes every numpy.
    """
    tritonmodel = importlib.import_module("fixedstate.serve.tritonmodel")
    monkeypatch.setattr(tritonmodel, "check_numpy", lambda version, target: None)
    loaded = []

    def load(path: Path = repository.path, **parameters: str):
        model = tritonmodel.TritonPythonModel()
        model.initialize(arguments(path, **parameters))
        loaded.append(model)
        return model

    yield load
    for model in loaded:
        model.finalize()


# --- a real server -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server_package() -> Path:
    """Folder with the server's package, installed once and kept in .venv-triton.

    Skips with the reason where it cannot be had (a failure under REQUIRE_ALL=1). TRITON_PACKAGE
    names a folder that holds it already.
    """
    if os.environ.get("TRITON_PACKAGE"):
        return Path(os.environ["TRITON_PACKAGE"])
    if platform.machine() != "x86_64":
        pytest.skip(f"the server's package is for x86_64, this is {platform.machine()}")
    folder = ROOT / ".venv-triton"
    stamp = folder / "installed"
    with open(f"{folder}.lock", "w") as lock:  # two test runs at once install it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == SERVER_PACKAGE:
            return folder
        command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(folder), SERVER_PACKAGE],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            pytest.skip(f"{SERVER_PACKAGE} cannot be installed: {last}")
        stamp.write_text(SERVER_PACKAGE)
    return folder


@pytest.fixture(scope="session")
def start_server(server_package, runtime310, tmp_path_factory) -> Callable[..., TritonServer]:
    """Start a server by the repository's own launch.py: ``with start_server(folder) as server``.

    STUB_PYTHON names the Python of another environment for its stubs.
    """
    python = os.environ.get("STUB_PYTHON") or str(runtime310.python)

    def start(repository: Path, *options: str, server_options: tuple[str, ...] = ()):
        return TritonServer(
            [
                *(sys.executable, str(repository / "launch.py")),
                *("--pytriton", str(server_package), "--python", python),
                *("--exit-timeout", "15", "--deadline", "120", *options),
            ],
            free_ports(3),
            tmp_path_factory.mktemp("server") / "log",
            server_options,
        )

    return start


@pytest.fixture(scope="module")
def server(start_server, repository) -> Iterator[TritonServer]:
    """One server for a module; at the end it must have ended cleanly."""
    with start_server(repository.path, "--no-supervise") as running:
        yield running
    assert running.code == 0, running.log[-3000:]
