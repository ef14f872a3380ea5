"""What an NVIDIA card proves about the compiled kernels, in one command of less than ten minutes.

    python tests/gpu/run.py --out results.json

Needs numpy and the card's driver; the package does not have to be installed. Three parts run one
after another, each in a process of its own, so that a fault in one leaves the others alone:

* ``errors``: every shipped PTX text against the float64 reference;
* ``replay``: a chain of layers as CUDA graphs over swapped pairs of states;
* ``times``: every operator against the memory bandwidth of this card, and against other kernels.

Writes results.json and results.md beside it, the second to be pasted into docs/gpu.md. The exit
code is 0 if everything was right, 1 if anything was not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(HERE)]

SHARES = {"errors": 0.6, "replay": 0.75, "times": 1.0}
"""Part to the share of all time that has passed when it has to end; what is left over goes on."""

GRACE = 25.0
"""Seconds beyond its time after which a part is ended: it looks at the clock between cases."""


def stand_in(where: str) -> Any:
    """The driver library that ``file.py:name`` makes; None for the real one."""
    if not where:
        return None
    file, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location("cuda_stand_in", file)
    assert spec is not None, f"{where!r} is not file.py:name"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)()


def run_part(name: str, seconds: float, small: bool, library: Any = None) -> dict[str, Any]:
    """One part in this process; whatever it raises is a problem in its result."""
    from card import Card

    from fixedstate.plugins.driver import Driver

    started = time.monotonic()
    try:
        module = __import__(f"card_{name}")
        with Driver(library=library) as driver:
            result: dict[str, Any] = module.measure(Card(driver, small, seconds, library is None))
    except Exception as error:
        traceback.print_exc()
        result = {"problems": [f"stopped by {type(error).__name__}: {error}"]}
    return {"seconds": round(time.monotonic() - started, 1), **result}


def child(name: str, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """One part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "part.json")
        command = [sys.executable, str(HERE / "run.py"), "--part", name, "--out", str(out)]
        command += ["--minutes", str(seconds / 60), "--stand-in", options.stand_in]
        command += ["--small"] if options.small else []
        try:
            done = subprocess.run(command, timeout=seconds + GRACE, check=False)
        except subprocess.TimeoutExpired:
            return {"problems": [f"ended after {seconds + GRACE:.0f} s, before it had a result"]}
        if not out.is_file():
            return {"problems": [f"its process ended with {done.returncode} and left no result"]}
        return dict(json.loads(out.read_text()))


def about(library: Any) -> dict[str, Any]:
    """The card, the texts and the day."""
    import numpy as np

    from fixedstate import __version__
    from fixedstate.plugins import ptx
    from fixedstate.plugins.driver import Driver

    with Driver(library=library) as driver:
        found = {
            "card": driver.name,
            "compute_capability": "{}.{}".format(*driver.compute_capability),
            "cuda_of_driver": "{}.{}".format(*driver.version),
            "multiprocessors": driver.multiprocessors,
            "l2_bytes": driver.l2_bytes,
            "memory_bytes": driver.free_bytes()[1],
        }
    return {
        **found,
        "real": library is None,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "fixedstate": __version__,
        "triton_of_texts": ptx.index()["triton"],
        "texts": len(ptx.index()["texts"]),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="JSON to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all parts")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the program")
    parser.add_argument("--stand-in", default="", help="file.py:name of a stand-in for the driver")
    parser.add_argument("--part", choices=SHARES, help="this part alone, in this process")
    options = parser.parse_args(arguments)
    seconds = 60 * options.minutes
    if options.part:
        result = run_part(options.part, seconds, options.small, stand_in(options.stand_in))
        options.out.write_text(json.dumps(result, indent=1))
        return 1 if result["problems"] else 0

    from card_report import markdown

    started = time.monotonic()
    results: dict[str, Any] = {"small": options.small, "parts": {}, "problems": [], "cut": []}
    try:
        results["about"] = about(stand_in(options.stand_in))
    except Exception as error:
        results["problems"].append(f"start: {error}")
    else:
        for name, share in SHARES.items():
            left = share * seconds - (time.monotonic() - started)
            if left < 1:
                part: dict[str, Any] = {"problems": [], "cut": ["all of it"]}
            else:
                print(f"== {name}, at most {left:.0f} s", flush=True)
                part = child(name, left, options)
            results["parts"][name] = part
            results["problems"] += [f"{name}: {text}" for text in part["problems"]]
            results["cut"] += [f"{name}: {text}" for text in part.get("cut", [])]
    results["seconds"] = round(time.monotonic() - started, 1)
    options.out.write_text(json.dumps(results, indent=1))
    table = markdown(results)
    options.out.with_suffix(".md").write_text(table)
    print(table)
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
