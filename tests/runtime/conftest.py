"""Scripted denoiser (F5), toy bundles and the random tiny ones for the runtime's tests."""

from __future__ import annotations

import pytest
from scripted import ScriptedEngine, small_spec
from toy_bundle import write_toy_bundle

from fixedstate.bundle import Bundle
from fixedstate.runtime.decoder import open_engine

TINY = ("toy", "F2", "F2-forward", "F3", "F4")


@pytest.fixture
def spec():
    return small_spec()


@pytest.fixture
def engine(spec):
    return ScriptedEngine(spec)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """The folder of a toy bundle with the roles denoise and commit."""
    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "toy.bundle")


@pytest.fixture(scope="session", params=TINY)
def tiny(request):
    """Every tiny bundle in turn, opened."""
    if request.param == "toy":
        return Bundle.open(request.getfixturevalue("toy"))
    return Bundle.open(request.getfixturevalue("bundle_path")(request.param))


@pytest.fixture(scope="session")
def tiny_engine(tiny):
    """Its passes on one thread, four rows; tests reset the rows they use."""
    return open_engine(tiny, threads=1, slots=4)
