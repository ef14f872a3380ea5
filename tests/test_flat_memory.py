"""What the project exists for: the cache of a model without attention never grows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A process of its own: in the one that runs the other tests, memory they freed comes and goes
# at times nobody chooses, by more than the bound below.
DECODES = """
import json, os, sys
import psutil
from fixedstate.runtime import Request, Settings, load

with load(sys.argv[1], threads=1) as decoder:
    settings = {"steps": 1, "stop_ids": ()}
    short = decoder.generate([Request((5,), Settings(max_new_tokens=64, **settings))])[0]
    process = psutil.Process(os.getpid())
    resident = {}
    stream = decoder.stream([Request((5,), Settings(max_new_tokens=8192, **settings))])
    for count, _ in enumerate(stream, start=1):
        if count in (10, 500):
            resident[count] = process.memory_info().rss
    (long,) = stream.results
print(json.dumps({
    "tokens": [len(short.token_ids), len(long.token_ids)],
    "state": [short.state_bytes, long.state_bytes],
    "kv": [short.kv_bytes, long.kv_bytes],
    "grown": resident[500] - resident[10],
}))
"""


@pytest.fixture(scope="module")
def measured(bundle_path: Callable[..., Path]) -> dict[str, object]:
    """What a fresh process reports that decoded 64 and then 8,192 tokens."""
    bundle = bundle_path("tiny-mamba")
    command = [sys.executable, "-c", DECODES, str(bundle)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    values: dict[str, object] = json.loads(told.stdout)
    print(values)
    return values


def test_state_bytes_stay_the_same(measured: dict[str, object]) -> None:
    """64 and 8,192 tokens: the same state bytes, no keys or values."""
    assert measured["tokens"] == [64, 8192]
    state = measured["state"]
    assert isinstance(state, list)
    assert state[0] == state[1] > 0
    assert measured["kv"] == [0, 0]


def test_resident_memory_stays_flat(measured: dict[str, object]) -> None:
    """Under 1 MB more resident from block 10 to block 500."""
    grown = measured["grown"]
    assert isinstance(grown, int)
    assert grown < 1_000_000
