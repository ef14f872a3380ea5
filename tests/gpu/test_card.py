"""The whole program on the card that is here; skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")


@pytest.mark.gpu
@pytest.mark.timeout(660)
def test_everything_is_right_on_this_card(tmp_path):
    out = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--out", str(out)], capture_output=True, text=True, check=False
    )
    results = json.loads(out.read_text())
    assert results["problems"] == [], done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0
    assert results["about"]["real"]
    assert set(results["parts"]) == {"errors", "replay", "times"}
