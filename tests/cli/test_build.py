"""`build` and `inspect ENGINE`: what options become, and what is printed where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_engine import (
    CHECK,
    PYTHON,
    fill_engine,
    identity_of,
    plans_of,
    precision_of,
    write_placeholder_bundle,
)

from fixedstate.bundle import Bundle
from fixedstate.export import engine
from fixedstate.export.builderflags import BuilderFlags
from fixedstate.export.profiles import BuildRequest, Range
from fixedstate.runtime.enginefile import EngineFolder, write_engine
from fixedstate.runtime.identity import Card


def written(folder: Path, libraries: tuple[Path, ...] = (), **changes: Any) -> EngineFolder:
    """An engine of stand-in plans."""
    source = write_placeholder_bundle(folder / "my.bundle")
    identity = identity_of(source, **changes)
    made = folder / "my.engine"
    made.mkdir()
    fill_engine(made, source, identity)
    precision, plans = precision_of(identity.precision), plans_of(source, identity)
    return write_engine(made, source, identity, precision, plans, check=CHECK, libraries=libraries)


def _fresh(folder: Path) -> Path:
    (folder / "engines").mkdir()
    return folder / "engines"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command asks of the builder; nothing is built."""
    found: dict[str, Any] = {}
    made = written(_fresh(tmp_path))

    class Plan:
        notes = ("a note",)

    class Report:
        path, plan = made.path, Plan()

        def to_dict(self) -> dict[str, Any]:
            return {"path": str(made.path)}

    def build(bundle: Bundle, request: BuildRequest, out: Path | None, **options: Any) -> Report:
        found.update(bundle=bundle.path, request=request, out=out, **options)
        return Report()

    monkeypatch.setattr(engine, "build", build)
    return found


def test_prints_the_path_and_nothing_else(run, bundle, asked) -> None:
    """`$(fixedstate build ...)` is a folder name; notes go to standard error."""
    done = run("build", bundle, "--target", "tensorrt-rtx")
    assert done.code == 0
    assert done.out.endswith("my.engine\n")
    assert done.err == "note: a note\n"
    assert asked["out"] is None
    assert asked["request"] == BuildRequest()
    assert asked["flags"] == BuilderFlags()
    assert run("build", bundle, "--target", "tensorrt-rtx", "--json").json["path"]


def test_options_reach_the_builder(run, bundle, asked, tmp_path) -> None:
    done = run(
        *("build", bundle, "--target", "tensorrt", "-o", tmp_path / "e", "--precision", "bf16"),
        *("--fp32-layers", "0,2", "--fp32-layers", "1", "--batch", "1:2:8", "--blocks", "16"),
        *("--capacity", "256:512:1024", "--compute-capability", "8.9, 9.0", "--plugins", "none"),
        *("--compute-capability", "12.0", "--roles", "denoise,commit", "--timeout", "60"),
        *("--builder-flag", "STRICT_NANS", "--timing-cache", "t", "--optimization-level", "5"),
        *("--hardware-compatibility", "ampere+", "--version-compatible", "--force"),
    )
    assert done.code == 0, done.err
    assert asked["request"] == BuildRequest(
        target="tensorrt",
        precision="bf16",
        batch=Range(1, 2, 8),
        blocks=Range(16, 16, 16),
        capacity=Range(256, 512, 1024),
        capabilities=("8.9", "9.0", "12.0"),
        plugins="none",
        roles=("denoise", "commit"),
        fp32_layers=(0, 2, 1),
        builder_flags=("STRICT_NANS",),
        timing_cache="t",
    )
    assert asked["flags"] == BuilderFlags(
        optimization_level=5, hardware="ampere+", version_compatible=True
    )
    assert (asked["out"], asked["force"], asked["timeout"]) == (tmp_path / "e", True, 60)


def test_the_target_has_to_be_said(run, bundle) -> None:
    done = run("build", bundle)
    assert done.code == 2
    assert "--target" in done.err


def test_a_layer_is_a_number(run, bundle) -> None:
    done = run("build", bundle, "--target", "tensorrt-rtx", "--fp32-layers", "0,first")
    assert done.code == 2
    assert "'first' is no index of a layer" in done.err


def test_tensorrt_builds_for_the_card_that_is_here(run, bundle, asked, monkeypatch) -> None:
    """Its capability need not be named; where there is no card it has to be."""
    from fixedstate.export import cards

    monkeypatch.setattr(cards, "first_card", lambda: Card("9.0", "H100"))
    assert run("build", bundle, "--target", "tensorrt").code == 0
    assert asked["request"].capabilities == ("9.0",)
    monkeypatch.setattr(cards, "first_card", lambda: None)
    done = run("build", bundle, "--target", "tensorrt")
    assert done.code == 2
    assert "here is no NVIDIA card with a driver" in done.err


def test_dry_run_prints_the_plan(run, bundle_path, tmp_path) -> None:
    """As a table and as JSON; no file appears and TensorRT is not asked."""
    words = ("build", bundle_path("F3"), "--target", "tensorrt-rtx", "--dry-run")
    out = tmp_path / "e"
    done = run(*words, "-o", out)
    assert (done.code, done.err) == (0, "")
    for text in ("Profiles", "Operators", "Memory of 1 rows", "SsdBlockCommit", "past_key_001"):
        assert text in done.out
    data = run(*words, "--json").json
    assert data["request"]["target"] == "tensorrt-rtx"
    assert set(data["roles"]) == {"denoise", "commit"}
    assert not out.exists()
    refused = run(*words, "--builder-flag", "REFIT")
    assert (refused.code, refused.out) == (1, "")


@pytest.fixture
def folder(tmp_path: Path) -> EngineFolder:
    return written(tmp_path, plugins=(PYTHON,))


def test_inspect_shows_an_engine(run, folder) -> None:
    """Identity, plans, profiles, plugins; without TensorRT and without the bundle."""
    data = run("inspect", folder.path, "--json").json
    assert data["identity"] == folder.identity.to_dict()
    assert data["key"] == folder.identity.key
    assert [plan["role"] for plan in data["plans"]] == sorted(folder.plans)
    assert all(plan["layers"] is None for plan in data["plans"])  # these plans record none
    assert data["plans"][0]["profiles"][0]["input_ids"]
    done = run("inspect", folder.path)
    assert (done.code, done.err) == (0, "")
    for text in (
        folder.identity.version,
        "compute capability",
        "denoise.plan",
        "fixedstate::SsdBlockDenoise",
        "past_ssm_state_001",
        folder.identity.bundle,
    ):
        assert text in done.out


def test_inspect_shows_layers(run, tmp_path, monkeypatch) -> None:
    """What the build recorded of networks and plans."""
    layers = tmp_path / engine.LAYERS
    record = {
        "layers": {"MATRIX_MULTIPLY": 9},
        "steps": {"fully_connected": 7},
        "weight_bytes": 1234567,
    }
    layers.write_text(json.dumps({"denoise": record}))
    made = written(tmp_path, libraries=(layers,))
    done = run("inspect", made.path)
    assert done.code == 0, done.err
    assert "1,234,567" in done.out
    assert "fully_connected" in done.out
    data = run("inspect", made.path, "--json").json
    assert {plan["role"]: plan["layers"] for plan in data["plans"]}["denoise"] == record


def test_a_changed_file_is_refused(run, folder) -> None:
    (folder.path / "tokenizer.json").write_text("{}")
    done = run("inspect", folder.path)
    assert done.code == 1
    assert "tokenizer.json was changed after the build" in done.err
