"""What the project exists for: the cache of a model without attention never grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil

from fixedstate.runtime import Request, Settings, load

BLOCK_LEN = 16


def test_state_bytes_and_resident_memory_stay_flat(bundle_path: Callable[..., Path]) -> None:
    """64 and 8,192 tokens: the same state bytes; under 1 MB from block 10 to block 500."""
    with load(bundle_path("tiny-mamba"), threads=1) as decoder:
        settings = {"steps": 1, "stop_ids": ()}
        short = decoder.generate([Request((5,), Settings(max_new_tokens=64, **settings))])[0]
        assert len(short.token_ids) == 64
        process = psutil.Process(os.getpid())
        resident: dict[int, int] = {}
        stream = decoder.stream([Request((5,), Settings(max_new_tokens=8192, **settings))])
        for count, _ in enumerate(stream, start=1):
            if count in (10, 500):
                resident[count] = process.memory_info().rss
        (long,) = stream.results
    assert len(long.token_ids) == 8192
    assert long.state_bytes == short.state_bytes > 0
    assert long.kv_bytes == short.kv_bytes == 0
    grown = resident[500] - resident[10]
    print(f"state {long.state_bytes} bytes; block 10 to 500: {grown / 1e6:+.3f} MB resident")
    assert grown < 1_000_000
