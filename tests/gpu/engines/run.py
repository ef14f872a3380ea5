"""An engine as users run it, on the card that is here: build, load, compare, capture, time.

    fixedstate export export/models/tiny-hybrid -o tiny.bundle
    python tests/gpu/engines/run.py tiny.bundle --target tensorrt --out engines.json

Builds an engine of the bundle for this card (or takes one, ``--engine FOLDER``), opens it by the
runtime's own adapter, and looks at what only a card can show: that its passes give what ONNX
Runtime gives along a trajectory, that the laws hold, that warm-up and capture leave live state
alone, that a CUDA graph gives what single launches give, that an engine of the wrong card is
refused, and how long passes take. ``--stripped`` builds plans without weights, which are refitted
when they are loaded. ``--provider cuda`` looks at a provider of ONNX Runtime instead:
the same comparison, laws and times, and where its nodes run. Of a model that sees the whole
sequence (objective full) the passes are compared, captured and timed at the lengths that the engine
was built for; it has no laws. Exit 1 if anything was wrong.
``tests/gpu/engine.py`` looks below that, at plugins against function bodies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "src")]

BLOCKS = 6
RUNS = 30
ROWS = 4
LENGTHS = "32:128:512"
LAWS = (1, 2, 3, 4, 7)

Problems = list[str]


def built(
    bundle: Path, target: str, precision: str, folder: Path, stripped: bool = False
) -> tuple[Path, float]:
    """An engine for this card, its plans without weights if wanted, and the seconds it took."""
    from fixedstate.bundle import Bundle
    from fixedstate.plugins.driver import Driver

    with Driver() as driver:
        capability = ".".join(map(str, driver.compute_capability))
    began = time.perf_counter()
    command = [sys.executable, "-m", "fixedstate", "build", str(bundle), "-o", str(folder)]
    command += ["--target", target, "--precision", precision, "--batch", f"1:1:{ROWS}"]
    command += ["--compute-capability", capability]
    if Bundle.open(bundle, verify_weights=False).spec.objective == "full":
        command += ["--capacity", LENGTHS]
    command += ["--builder-flag", "STRIP_PLAN"] if stripped else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fixedstate build failed: {done.stderr.strip()}")
    return folder, round(time.perf_counter() - began, 1)


def numbers(state: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A row's state as numbers, whatever it is kept in."""
    dtypes = {port.suffix: port.past.dtype for port in state.committed}
    return {
        name: (array.astype(np.uint32) << 16).view(np.float32)
        if dtypes[name] == "bfloat16"
        else array.astype(np.float32)
        for name, array in arrays.items()
    }


def compare(engine: Any, other: Any, tolerance: Any, problems: Problems) -> dict[str, Any]:
    """Logits and state of both along ragged rows; tokens where the choice is clear."""
    from fixedstate.runtime.compare import difference

    spec, rng = engine.spec, np.random.default_rng(0)
    length, worst, clear, same = spec.block_len, {"logits": 0.0, "state": 0.0}, 0, 0
    for row in range(ROWS):
        engine.reset(row)
        other.reset(row)
    for block in range(BLOCKS):
        ids = rng.integers(0, spec.vocab_size, (ROWS, length))
        canvas = np.where(np.arange(length) < block % length, ids, spec.mask_id)
        found, right = (one.denoise(canvas).copy() for one in (engine, other))
        pairs = [("logits", "logits", right, found)]
        top = np.partition(right, -2, axis=-1)
        sure = top[..., -1] - top[..., -2] > 0.1
        clear += int(sure.sum())
        same += int((right.argmax(-1) == found.argmax(-1))[sure].sum())
        lengths = np.array([length if block % (row + 1) == 0 else 0 for row in range(ROWS)])
        for one in (engine, other):
            one.commit(ids, lengths)
        for row in range(ROWS):
            mine, theirs = (numbers(one.state, one.read(row)) for one in (engine, other))
            pairs += [("state", name, theirs[name], mine[name]) for name in theirs]
        for kind, name, reference, candidate in pairs:
            seen = difference(name, reference, candidate, tolerance)
            worst[kind] = max(worst[kind], seen.max_abs)
            if not seen.passed:
                problems.append(f"block {block}: {seen}")
    if same < clear:
        problems.append(f"{clear - same} of {clear} clear choices are other tokens")
    return {**worst, "clear_choices": clear, "same_tokens": same}


def states(engine: Any) -> list[bytes]:
    """Every live byte, row by row."""
    return [
        b"".join(array.tobytes() for array in engine.read(row).values())
        for row in range(engine.slots)
    ]


def capture(engine: Any, plain: Any, problems: Problems) -> dict[str, Any]:
    """Warm-up leaves live state; graphs give what single launches give."""
    spec, rng = engine.spec, np.random.default_rng(1)
    length = spec.block_len
    ids = rng.integers(0, spec.vocab_size, (ROWS, length))
    for one in (engine, plain):
        for row in range(ROWS):
            one.reset(row)
        one.commit(ids, np.full(ROWS, length))
    before = states(engine)
    began = time.perf_counter()
    engine.warm_up(rows=ROWS)
    seconds = time.perf_counter() - began
    if states(engine) != before:
        problems.append("warm-up changed live state")
    for block in range(4):
        canvas = np.where(rng.random((ROWS, length)) < 0.5, ids, spec.mask_id)
        if engine.denoise(canvas).tobytes() != plain.denoise(canvas).tobytes():
            problems.append(f"block {block}: a CUDA graph gives other logits than single launches")
        for one in (engine, plain):
            one.commit(ids, np.full(ROWS, length))
        if states(engine) != states(plain):
            problems.append(f"block {block}: a CUDA graph leaves another state")
    for name, why in engine.uncaptured.items():
        problems.append(f"{name} was not captured: {why}")
    return {"graphs": engine.captured, "warm_up_seconds": round(seconds, 2)}


def laws(opens: Callable[[int], Any], precision: str, problems: Problems) -> list[dict[str, Any]]:
    """The laws of the cache, within the precision's tolerance."""
    from fixedstate.runtime.laws import check_engine

    found = check_engine(opens, precision=precision, exact=False, block_counts=(1, 2, 3), only=LAWS)
    for law in found:
        if not law.passed:
            problems.append(f"law {law.law}: {law.where}")
    return [law.to_dict() for law in found]


def times(**ways: Any) -> list[dict[str, Any]]:
    """Median milliseconds of a pass, with everything that travels, waited for, by engine."""
    out = []
    for rows in (1, ROWS):
        for way, one in ways.items():
            length = one.spec.block_len
            ids = np.full((rows, length), 1)
            for row in range(rows):
                one.reset(row)
            passes = {
                "denoise": lambda one=one, ids=ids: one.denoise(ids),
                "commit": lambda one=one, ids=ids: one.commit(ids, np.full(*ids.shape)),
            }
            for name, run in passes.items():
                taken, limit = [], one.limit or 10**9
                returned = one.returned_bytes
                for _ in range(min(RUNS, limit // length - 4)):
                    began = time.perf_counter()
                    run()
                    taken.append(1e3 * (time.perf_counter() - began))
                out.append(
                    {
                        "pass": name,
                        "rows": rows,
                        "way": way,
                        "ms": round(float(np.median(taken[3:])), 3),
                        "bytes_to_host": (one.returned_bytes - returned) // len(taken),
                    }
                )
    return out


def measure(
    bundle_path: Path, engine_path: Path, results: dict[str, Any], **stand_ins: Any
) -> None:
    """Fill results; ``stand_ins`` go to the adapter."""
    from fixedstate.bundle import Bundle
    from fixedstate.errors import BackendError
    from fixedstate.runtime import trt
    from fixedstate.runtime.compare import Tolerance
    from fixedstate.runtime.decoder import open_engine
    from fixedstate.runtime.enginefile import EngineFolder

    problems = results["problems"]
    bundle, folder = Bundle.open(bundle_path), EngineFolder.open(engine_path)
    precision = folder.precision.name
    results["engine"] = {
        "product": folder.identity.product,
        "version": folder.identity.version,
        "precision": precision,
        "plugins": [plugin.id for plugin in folder.identity.plugins],
        "plans": {role: (folder.path / p.file).stat().st_size for role, p in folder.plans.items()},
        "refitted": folder.refits,
    }
    opened: list[Any] = []

    def opens(slots: int, **options: Any) -> Any:
        while len(opened) > 2:
            opened.pop().close()
        began = time.perf_counter()
        opened.append(trt.open_engine(folder, slots=slots, **options, **stand_ins))
        results.setdefault("load_seconds", round(time.perf_counter() - began, 2))
        return opened[-1]

    try:
        engine, plain = opens(ROWS), opens(ROWS, graphs=False)
        results["provider"] = engine.provider
        tolerance = Tolerance.of(precision)
        if bundle.spec.objective == "full":
            measure_whole(bundle, folder, {"graph": engine, "launches": plain}, tolerance, results)
        else:
            other = open_engine(bundle, slots=ROWS)
            results["compared"] = compare(engine, other, tolerance, problems)
            results["captured"] = capture(engine, plain, problems)
            results["laws"] = laws(opens, precision, problems)
            results["times"] = times(graph=engine, launches=plain)
        try:
            trt.open_engine(folder, device=99, **stand_ins).close()
            problems.append("card 99 was not refused")
        except BackendError as error:
            results["refused"] = str(error)
    finally:
        for one in opened:
            one.close()


def measure_whole(
    bundle: Any, folder: Any, ways: dict[str, Any], tolerance: Any, results: dict[str, Any]
) -> None:
    """The same of whole sequences, which have no state: scores, graphs, times by length."""
    from fixedstate.runtime.against import compare_engines, whole_lengths
    from fixedstate.runtime.decoder import open_full

    lengths, problems = whole_lengths(folder), results["problems"]
    engine = ways["graph"]
    found = compare_engines(open_full(bundle, slots=ROWS), engine, tolerance, lengths=lengths)
    results["compared"] = found.to_dict()
    if not found.passed:
        problems.append(found.first or "nothing was compared")
    out = results["times"] = []
    rng = np.random.default_rng(1)
    for rows in (1, ROWS):
        for tokens in lengths:
            ids = rng.integers(0, bundle.spec.vocab_size, (rows, bundle.spec.block_len))
            last: dict[str, bytes] = {}
            for way, one in ways.items():
                for row in range(rows):
                    one.reset(row, tokens)
                returned, taken = one.sequences.returned_bytes, []
                for _ in range(RUNS):
                    began = time.perf_counter()
                    logits = one.denoise(ids)
                    taken.append(1e3 * (time.perf_counter() - began))
                last[way] = logits.tobytes()
                out.append(
                    {
                        "pass": "full",
                        "rows": rows,
                        "tokens": tokens,
                        "way": way,
                        "ms": round(float(np.median(taken[3:])), 3),
                        "bytes_to_host": (one.sequences.returned_bytes - returned) // RUNS,
                    }
                )
            if last["graph"] != last["launches"]:
                problems.append(f"{rows} x {tokens}: a CUDA graph gives other logits than launches")
    for name, why in engine.sequences.uncaptured.items():
        problems.append(f"{name} was not captured: {why}")
    results["captured"] = {"graphs": engine.sequences.captured}


def measure_provider(bundle_path: Path, provider: str, results: dict[str, Any]) -> None:
    """The same of a provider of ONNX Runtime, as far as it has it; the bundle is a float32 one."""
    from fixedstate.bundle import Bundle
    from fixedstate.runtime.compare import Tolerance
    from fixedstate.runtime.decoder import open_engine

    problems, bundle = results["problems"], Bundle.open(bundle_path)
    precision = bundle.precision.name
    opened: list[Any] = []

    def opens(slots: int) -> Any:
        while len(opened) > 2:
            opened.pop().close()
        limit = 64 * bundle.spec.block_len
        opened.append(open_engine(bundle, provider=provider, slots=slots, limit=limit))
        return opened[-1]

    try:
        engine = opens(ROWS)
        results["provider"], results["places"] = engine.provider, engine.places
        other = open_engine(bundle, slots=ROWS)
        results["compared"] = compare(engine, other, Tolerance.of(precision), problems)
        results["laws"] = laws(opens, precision, problems)
        results["times"] = times(**{provider: engine})
    finally:
        for one in opened:
            one.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--engine", type=Path, help="one that was built already")
    parser.add_argument("--target", choices=("tensorrt", "tensorrt-rtx"), default="tensorrt")
    parser.add_argument(
        "--stripped", action="store_true", help="plans without weights, refitted when loaded"
    )
    parser.add_argument("--provider", help="of ONNX Runtime, in place of an engine")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp16")
    parser.add_argument("--out", type=Path, default=Path("engines.json"))
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "problems": [],
    }
    try:
        if options.provider:
            measure_provider(options.bundle, options.provider, results)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                engine = options.engine
                if engine is None:
                    engine, results["build_seconds"] = built(
                        options.bundle,
                        options.target,
                        options.precision,
                        Path(scratch, "e"),
                        options.stripped,
                    )
                measure(options.bundle, engine, results)
    except Exception as error:
        results["problems"].append(f"{type(error).__name__}: {error}")
    text = json.dumps(results, indent=1)
    options.out.write_text(text + "\n")
    print(text)
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
