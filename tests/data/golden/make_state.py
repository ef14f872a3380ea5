"""Make the golden saved state of the format that this checkout writes; run once per format.

    .venv/bin/python tests/data/golden/make_state.py

A golden state that is there is never replaced: it must load for ever. It is that of the golden
bundle of schema 2 after the first 13 of the ids in its ``expected.npz``, so what comes behind it is
expected there as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fixedstate.bundle import Bundle
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.snapshot import FORMAT, Snapshot

HERE = Path(__file__).parent


def main() -> None:
    """Write ``state-N.state``."""
    target = HERE / f"state-{FORMAT}.state"
    if target.exists():
        raise SystemExit(f"{target} is there and stays as it is")
    engine = open_engine(Bundle.open(HERE / "schema-2" / "bundle"), threads=1)
    ids = np.load(HERE / "schema-2" / "expected.npz")["ids"]
    engine.commit(ids[:, :16], np.array([13]))
    Snapshot.take(engine, 0, pending=(3, 5), seed=9).save(target)


if __name__ == "__main__":
    main()
