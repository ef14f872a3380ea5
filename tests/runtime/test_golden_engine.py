"""Golden engine folders: what an older version wrote opens for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fixedstate.cli import cli
from fixedstate.runtime.enginefile import MANIFEST, EngineFolder
from fixedstate.runtime.identity import SCHEMA, Card, Here

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
ENGINES = sorted(GOLDEN.glob("engine-*"))
MANIFESTS = {"engine-1": "c1509d9553dfb617e63be8b471f5fbd86f4b2d419c06d8e1889c90996c945e58"}
"""sha256 of engine.json as it was written."""

EACH = pytest.mark.parametrize("golden", ENGINES, ids=lambda folder: folder.name)


def test_every_schema_has_its_golden_engine():
    """Made once with tests/data/golden/make_engine.py when the schema number goes up, and small."""
    assert [folder.name for folder in ENGINES] == [f"engine-{n + 1}" for n in range(SCHEMA)]
    for folder in ENGINES:
        assert sum(file.stat().st_size for file in folder.iterdir()) < 200_000
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        assert digest == MANIFESTS[folder.name]


@EACH
def test_it_opens_with_all_that_it_says(golden):
    """Hashes of every file are right, and nothing of the manifest is lost on the way."""
    engine = EngineFolder.open(golden)
    said = json.loads((golden / MANIFEST).read_text())
    assert engine.identity.to_dict() == said["identity"]
    assert engine.spec.to_dict() == said["model"]
    assert engine.check == said["check"]
    assert set(engine.plans) == {"commit", "denoise", "denoise_top_k"}
    assert [len(plan.profiles) for plan in engine.plans.values()] == [2, 1, 1]
    assert set(engine.files) == {"LICENSE", "layers.json", "tokenizer.json"}
    wide = {pair.past.name for pair in engine.state.committed if pair.past.dtype == "float32"}
    assert wide == {"past_ssm_state_001"}


@EACH
def test_it_still_knows_where_it_runs(golden):
    identity = EngineFolder.open(golden).identity
    (plugin,) = identity.plugins
    creators = {plugin.id: plugin.version}
    here = Here(
        identity.product,
        identity.version,
        identity.os,
        (Card("12.0"), Card("7.5")),
        creators=creators,
        texts=plugin.texts,
    )
    engine = EngineFolder.open(golden)
    assert engine.refusal(here) is None
    other = Here(identity.product, identity.version, identity.os, here.cards, 1, creators)
    assert "card 1 has 7.5: choose card 0, which it fits" in (engine.refusal(other) or "")


@EACH
def test_inspect_shows_it(golden):
    """For people and as JSON."""
    shown = CliRunner().invoke(cli, ["inspect", str(golden)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    for words in (
        "tensorrt-rtx 1.7.1.116",
        "ssm_state_001, row 0: 0.0011 of its deviation",
        "8x128",
    ):
        assert words in shown.stdout
    data = json.loads(CliRunner().invoke(cli, ["inspect", str(golden), "--json"]).stdout)
    assert data["check"]["largest"]["max_rel"] == 0.0481
