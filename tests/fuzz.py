"""Laws 1 to 5 under fuzz: many models, one export each, many weights and prompts on every export.

    PYTHONPATH=tests python tests/fuzz.py --specs 250 --draws 40 --jobs 2      # `make fuzz`
    PYTHONPATH=tests python tests/fuzz.py --spec 17 --draws 40                 # one model again

The list of models is the same on every machine: :func:`drawn_specs`. What was done is kept in a
file of JSON lines, so that a run that was stopped goes on where it was; a failure names the model's
number and the smallest draw that Hypothesis found for it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from law_trials import check_trial
from strategies import THEMES, Stress, Trial, model_specs, stresses, trials

from fixedstate.export.checkpoint import random_tensors, save_checkpoint
from fixedstate.export.pipeline import export_bundle
from fixedstate.spec import ModelSpec

KEPT = Path(".fuzz.jsonl")
_PER_THEME = 40  # models drawn per theme and round
_PLAIN = 10  # of which so many are left out


@functools.cache
def drawn_specs(count: int) -> tuple[ModelSpec, ...]:
    """The first models of the list: themes in turn, no model twice."""
    found: dict[ModelSpec, None] = {}
    columns = [iter(_of_theme(theme)) for theme in THEMES]
    while len(found) < count:
        for column in columns:
            found.setdefault(next(column))
    return tuple(found)[:count]


def _of_theme(theme: str) -> Iterator[ModelSpec]:
    number = 0
    while True:
        yield from _batch(theme, number)
        number += 1


def _batch(theme: str, number: int) -> list[ModelSpec]:
    """Models as Hypothesis draws them, but for its first ones, which are small and plain."""
    out: list[ModelSpec] = []

    @seed(number)
    @settings(
        max_examples=_PER_THEME,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(model_specs(theme))
    def draw(spec: ModelSpec) -> None:
        out.append(spec)

    draw()
    return out[_PLAIN:]


def fuzz_one(index: int, spec: ModelSpec, draws: int, folder: Path) -> int:
    """Export a model once and try that many draws on it; returns how many were tried.

    Its number decides the precision, and whether the fused graph is made and compared too.

    Raises:
        Exception: of the export, or the AssertionError of the smallest failing draw.
    """
    save_checkpoint(folder / "checkpoint", spec, random_tensors(spec, seed=0))
    export_bundle(
        folder / "checkpoint",
        folder / "bundle",
        precision=precision_of(index),
        fused=index % 7 == 3,
    )
    tried = 0

    @seed(0)
    @settings(
        max_examples=draws,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(stresses(), trials(spec))
    def attempt(stress: Stress, trial: Trial) -> None:
        nonlocal tried
        tried += 1
        check_trial(folder / "bundle", stress.tensors(spec), trial)

    attempt()
    return tried


def precision_of(index: int) -> str:
    """Every eighth model is exported as fp16."""
    return "fp16" if index % 8 == 5 else "fp32"


def _job(task: tuple[int, ModelSpec, int]) -> dict[str, object]:
    import torch

    index, spec, draws = task

    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            tried, problem = fuzz_one(index, spec, draws, Path(scratch)), ""
        except Exception as err:
            tried, problem = 0, "".join(traceback.format_exception(err))[-4000:]
    return {
        "spec": index,
        "model": json.dumps(spec.to_dict()),
        "precision": precision_of(index),
        "draws": draws,
        "tried": tried,
        "problem": problem,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _done(file: Path, specs: tuple[ModelSpec, ...], draws: int) -> dict[int, dict[str, object]]:
    """What an earlier run passed with the same models and at least as many draws."""
    done: dict[int, dict[str, object]] = {}
    if not file.exists():
        return done
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        index = entry["spec"]
        same = index < len(specs) and entry["model"] == json.dumps(specs[index].to_dict())
        if same and not entry["problem"] and entry["draws"] >= draws:
            done[index] = entry
    return done


def main() -> int:
    """Run what is open, print failures and a summary; exit 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--specs", type=int, default=250)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--spec", type=int, action="append", help="only these numbers, again")
    parser.add_argument("--file", type=Path, default=KEPT, help="what was done; go on behind it")
    given_ = parser.parse_args()
    specs = drawn_specs(max([given_.specs, *(n + 1 for n in given_.spec or ())]))
    done = {} if given_.spec else _done(given_.file, specs, given_.draws)
    todo = given_.spec or [n for n in range(given_.specs) if n not in done]
    print(f"{len(specs)} models, {len(done)} done before, {len(todo)} to do", flush=True)
    start, entries = time.perf_counter(), list(done.values())
    tasks = [(index, specs[index], given_.draws) for index in todo]
    # a worker's memory grows with every export: it is replaced after some
    with get_context("spawn").Pool(given_.jobs, maxtasksperchild=25) as pool:
        for entry in pool.imap_unordered(_job, tasks):
            entries.append(entry)
            with given_.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
            verdict = "FAILED" if entry["problem"] else "passed"
            minutes = (time.perf_counter() - start) / 60
            print(f"{minutes:5.1f} min  model {entry['spec']} {verdict} {entry['seconds']} s")
            if entry["problem"]:
                print(f"{entry['model']}\n{entry['problem']}")
            sys.stdout.flush()
    failed = [entry["spec"] for entry in entries if entry["problem"]]
    print(
        f"{len(entries)} models, {sum(int(str(e['tried'])) for e in entries)} draws, "
        f"{len(failed)} failed {sorted(map(int, map(str, failed)))}, "
        f"{(time.perf_counter() - start) / 60:.1f} minutes"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
