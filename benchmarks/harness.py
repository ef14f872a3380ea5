"""Interleaved timing of callables and of commands.

Two things are compared by running them in turn, A B A B ..., in one sitting. A machine that slows
down for a while (another job, a hot processor) then slows both, and the ratio of neighbours
survives what a comparison of two separate runs does not.

What the numbers mean
    wall      seconds from start to end of one call: what a user waits.
    cpu       processor seconds, user plus system: of all threads of the process (callables), or of
              the process and the children it waited for (commands). `cpu` near `wall` is one busy
              thread, near twice `wall` two; below `wall` is waiting. Where `wall` rises and `cpu`
              does not, the machine was busy with something else.
    median    of the samples. Half of all samples lie between the quartiles `q1` and `q3`.
    spread    (q3 - q1) / median. Above about 0.1, distrust differences of a few percent.
    ratio     how many times as long as the baseline, the first subject, a subject takes: 2.0 is
              half as fast. `of_medians` divides the two medians. `of_pairs` is the median of the
              ratios of neighbouring samples: slow drift cancels in it. Where the two differ, the
              machine drifted, and `of_pairs` is the one to quote.
    calls     calls in one sample, by which its figures are divided: more than one where a single
              call is too short for the clock.
    load      the load average of the last minute, at the start and at the end. Above the number
              of cores something else ran: a run is refused (callers may allow it), and a report is
              marked as busy.

From Python::

    from harness import interleave

    report = interleave({"ours": ours, "eager": eager}, runs=15)
    print(report.table())
    report.ratio("eager").of_pairs  # eager takes this many times as long as ours

From a shell::

    python benchmarks/harness.py --a "one --cores {threads}" --b "two" --threads 1,2 --json out.json

Threads are the subjects' own matter: a command finds the number in OMP_NUM_THREADS and its kin and
in place of `{threads}`; `interleave_threads` hands it to the function that makes the callables.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCHEMA = 1
RUNS = 15
WARMUP = 2
MIN_SAMPLE_S = 0.01  # a shorter sample holds more calls; reading the clocks costs about 1 us
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


class BusyMachine(RuntimeError):
    """The load average is above the number of cores: what would be timed is the other work."""


class CommandFailed(RuntimeError):
    """A timed command exited with another status than 0."""


@dataclass(frozen=True)
class Sample:
    """One measurement, per call."""

    wall_s: float
    cpu_s: float
    max_rss_bytes: int | None = None  # commands only: the largest resident size it reached


@dataclass(frozen=True)
class Summary:
    """Order statistics of one figure over all samples of a subject."""

    median: float
    q1: float
    q3: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """Summarise `values`, of which there is at least one."""
        low, q1, median, q3, high = np.percentile(list(values), [0, 25, 50, 75, 100]).tolist()
        return cls(median, q1, q3, low, high)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median; 0 where the median is 0."""
        return (self.q3 - self.q1) / self.median if self.median else 0.0

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, for JSON."""
        return {
            "median": self.median,
            "q1": self.q1,
            "q3": self.q3,
            "min": self.min,
            "max": self.max,
            "spread": self.spread,
        }


@dataclass(frozen=True)
class Series:
    """All samples of one subject, in the order they were taken."""

    name: str
    calls: int
    samples: tuple[Sample, ...]

    @property
    def wall(self) -> Summary:
        """Seconds that one call took."""
        return Summary.of(s.wall_s for s in self.samples)

    @property
    def cpu(self) -> Summary:
        """Processor seconds that one call used, all threads together."""
        return Summary.of(s.cpu_s for s in self.samples)

    @property
    def max_rss_bytes(self) -> int | None:
        """Largest resident size over all samples; None for callables."""
        sizes = [s.max_rss_bytes for s in self.samples if s.max_rss_bytes is not None]
        return max(sizes, default=None)


@dataclass(frozen=True)
class Ratio:
    """How many times as long as the baseline a subject takes (wall time)."""

    name: str
    baseline: str
    of_medians: float
    of_pairs: float
    pairs: Summary  # of the ratios of neighbouring samples

    @classmethod
    def of(cls, subject: Series, baseline: Series) -> Ratio:
        """Compare two series that were taken in turn."""
        # A clock may read 0 for nothing at all; the ratio is then not a number, and says so.
        with np.errstate(divide="ignore", invalid="ignore"):
            pairs = Summary.of(
                np.float64(s.wall_s) / b.wall_s
                for s, b in zip(subject.samples, baseline.samples, strict=True)
            )
            medians = float(np.float64(subject.wall.median) / baseline.wall.median)
        return cls(subject.name, baseline.name, medians, pairs.median, pairs)


@dataclass(frozen=True)
class Report:
    """What `interleave` and `interleave_commands` give back."""

    kind: str  # "callables" or "commands"
    series: tuple[Series, ...]  # the first one is the baseline
    threads: int | None  # as told to the subjects; None where nothing was told
    load_start: float
    load_end: float
    cores: int

    @property
    def busy(self) -> bool:
        """Whether the load average was above the number of cores at either end."""
        return max(self.load_start, self.load_end) > self.cores

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Every subject but the baseline against the baseline."""
        return tuple(Ratio.of(s, self.series[0]) for s in self.series[1:])

    def __getitem__(self, name: str) -> Series:
        """The series of the subject called `name`."""
        return {s.name: s for s in self.series}[name]

    def ratio(self, name: str, baseline: str | None = None) -> Ratio:
        """How many times as long as `baseline` (default: the first subject) `name` takes."""
        return Ratio.of(self[name], self[baseline or self.series[0].name])

    def to_dict(self) -> dict[str, object]:
        """Everything, samples included, for JSON. Times are in seconds."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "threads": self.threads,
            "runs": len(self.series[0].samples),
            "load": {"start": self.load_start, "end": self.load_end, "busy": self.busy},
            "machine": machine(),
            "subjects": [
                {
                    "name": s.name,
                    "calls": s.calls,
                    "wall": s.wall.to_dict(),
                    "cpu": s.cpu.to_dict(),
                    "max_rss_bytes": s.max_rss_bytes,
                    "samples": [[sample.wall_s, sample.cpu_s] for sample in s.samples],
                }
                for s in self.series
            ],
            "ratios": [
                {
                    "name": r.name,
                    "baseline": r.baseline,
                    "of_medians": r.of_medians,
                    "of_pairs": r.of_pairs,
                    "pairs": r.pairs.to_dict(),
                }
                for r in self.ratios
            ],
        }

    def table(self) -> str:
        """Lines for a person: one a subject, one a ratio, and the load."""
        threads = "" if self.threads is None else f", threads {self.threads}"
        width = max(len(s.name) for s in self.series)
        lines = [
            f"runs {len(self.series[0].samples)}{threads}",
            f"{'':{width}}  {'wall':>9} {'q1':>9} {'q3':>9} {'spread':>7} {'cpu':>9}  calls",
        ]
        for s in self.series:
            wall = s.wall
            figures = f"{_time(wall.median)} {_time(wall.q1)} {_time(wall.q3)} {wall.spread:7.1%}"
            lines.append(f"{s.name:{width}}  {figures} {_time(s.cpu.median)}  {s.calls}")
        for r in self.ratios:
            lines.append(
                f"{r.name} takes {r.of_pairs:.3f} x the time of {r.baseline} by pairs "
                f"({r.pairs.q1:.3f} to {r.pairs.q3:.3f}), {r.of_medians:.3f} x by medians"
            )
        lines.append(
            f"load {self.load_start:.2f} at start, {self.load_end:.2f} at end, {self.cores} cores"
            + (": BUSY, do not quote" if self.busy else "")
        )
        return "\n".join(lines)


def interleave(
    subjects: Mapping[str, Callable[[], object]],
    *,
    runs: int = RUNS,
    warmup: int = WARMUP,
    calls: int | None = None,
    threads: int | None = None,
    allow_busy: bool = False,
) -> Report:
    """Time callables in turn: A B A B ...

    Args:
        subjects: what to time, by name; the first is the baseline of the ratios.
        runs: samples of each; 15 or more for a number that is quoted.
        warmup: rounds before the first sample, not counted.
        calls: calls in one sample. By default as many as make a sample of 10 ms, found in the
            warm-up for each subject by itself.
        threads: how many the subjects were told to use; only noted.
        allow_busy: warn instead of refusing on a busy machine.

    Returns:
        The samples and what follows from them.

    Raises:
        BusyMachine: if the load average is above the number of cores.
        ValueError: if there is nothing to time.
    """
    _check(subjects, runs)
    load = _load_at_start(allow_busy)
    counts = {}
    for name, call in subjects.items():
        for _ in range(warmup):
            call()
        counts[name] = calls or _calls_for(call)
    samples: dict[str, list[Sample]] = {name: [] for name in subjects}
    with _no_collection():
        for _ in range(runs):
            for name, call in subjects.items():
                samples[name].append(_time_callable(call, counts[name]))
    series = tuple(Series(name, counts[name], tuple(samples[name])) for name in subjects)
    return _report("callables", series, threads, load)


def interleave_threads(
    make: Callable[[int], Mapping[str, Callable[[], object]]],
    *,
    threads: Sequence[int] = (1, 2),
    **options: object,
) -> tuple[Report, ...]:
    """Time the callables that `make(n)` gives for each thread count n, one report each.

    Args:
        make: builds the subjects for a thread count; it sets the thread pools itself.
        threads: the counts.
        options: as for `interleave`.
    """
    return tuple(interleave(make(n), threads=n, **options) for n in threads)  # type: ignore[arg-type]


def interleave_commands(
    subjects: Mapping[str, str | Sequence[str]],
    *,
    runs: int = RUNS,
    warmup: int = 1,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
    allow_busy: bool = False,
) -> Report:
    """Time commands in turn, each a process of its own, start and exit included.

    Args:
        subjects: the commands by name: a list of arguments, or a string that is split as a shell
            would split it (no shell runs). `{threads}` in an argument is replaced.
        runs: samples of each.
        warmup: rounds before the first sample: files are then in memory.
        threads: set in OMP_NUM_THREADS and its kin for the commands; None leaves them as they are.
        env: further environment variables.
        allow_busy: warn instead of refusing on a busy machine.

    Raises:
        BusyMachine: if the load average is above the number of cores.
        CommandFailed: if a command exits with another status than 0; its standard error is in the
            text.
        ValueError: if there is nothing to time.
    """
    _check(subjects, runs)
    load = _load_at_start(allow_busy)
    environment = {**os.environ, **(env or {})}
    if threads is not None:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    commands = {
        name: [
            word if threads is None else word.replace("{threads}", str(threads))
            for word in (shlex.split(command) if isinstance(command, str) else command)
        ]
        for name, command in subjects.items()
    }
    for _ in range(warmup):
        for command in commands.values():
            _time_command(command, environment)
    samples: dict[str, list[Sample]] = {name: [] for name in subjects}
    for _ in range(runs):
        for name, command in commands.items():
            samples[name].append(_time_command(command, environment))
    series = tuple(Series(name, 1, tuple(samples[name])) for name in subjects)
    return _report("commands", series, threads, load)


def machine() -> dict[str, object]:
    """What places the numbers: processor, cores, system, Python; not the machine's name."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]


def write_json(reports: Sequence[Report], path: str | os.PathLike[str]) -> None:
    """Write reports as a JSON list."""
    Path(path).write_text(json.dumps([r.to_dict() for r in reports], indent=1) + "\n")


def _check(subjects: Mapping[str, object], runs: int) -> None:
    if not subjects:
        raise ValueError("nothing to time: give at least one subject")
    if runs < 1:
        raise ValueError(f"runs is {runs}: give at least 1")


def _load_at_start(allow_busy: bool) -> float:
    load, limit = load_average(), cores()
    print(f"load average {load:.2f}, {limit} cores", file=sys.stderr)
    if load > limit:
        text = f"load average {load:.2f} on {limit} cores: wait until the other work is done"
        if not allow_busy:
            raise BusyMachine(text)
        print(f"warning: {text}", file=sys.stderr)
    return load


def _report(kind: str, series: tuple[Series, ...], threads: int | None, load: float) -> Report:
    report = Report(kind, series, threads, load, load_average(), cores())
    print(f"load average {report.load_end:.2f} at the end", file=sys.stderr)
    if report.busy:
        print("warning: other work ran beside this: do not quote these numbers", file=sys.stderr)
    return report


def _calls_for(call: Callable[[], object]) -> int:
    """How many calls make a sample of MIN_SAMPLE_S."""
    count = 1
    while (sample := _time_callable(call, count)).wall_s * count < MIN_SAMPLE_S:
        # Aim for the target, and never grow tenfold on the word of one short reading.
        wanted = MIN_SAMPLE_S / max(sample.wall_s, 1e-9)
        count = int(min(max(wanted * 1.1, count + 1), count * 10))
    return count


def _time_callable(call: Callable[[], object], count: int) -> Sample:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall / count, cpu / count)


def _time_command(command: Sequence[str], env: Mapping[str, str]) -> Sample:
    # Errors go to a file, not to a pipe: nobody has to read along, and a full pipe stalls nothing.
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        try:
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
        except OSError as error:
            raise CommandFailed(f"{shlex.join(command)}: {error.strerror}") from error
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            child.wait()
            raise
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise CommandFailed(f"{shlex.join(command)}: exit status {child.returncode}\n{said}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the samples, as timeit does."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _time(seconds: float) -> str:
    """Nine characters, in the unit that shows it best."""
    if seconds >= 1:
        return f"{seconds:7.3f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:6.2f} ms"
    return f"{seconds * 1e6:6.2f} us"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two commands; the table goes to standard output."""
    parser = argparse.ArgumentParser(
        description="Time two commands in turn: A B A B ...",
        epilog="What the numbers mean is explained at the top of this file.",
    )
    parser.add_argument("--a", required=True, metavar="CMD", help="the baseline; no shell runs it")
    parser.add_argument("--b", metavar="CMD", help="what is compared with it")
    parser.add_argument("--runs", type=int, default=RUNS, help="samples of each (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before (%(default)s)")
    parser.add_argument(
        "--threads",
        metavar="N[,N]",
        help="once for each count, told by OMP_NUM_THREADS and {threads}",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there, samples included")
    parser.add_argument("--allow-busy", action="store_true", help="warn on a busy machine, go on")
    options = parser.parse_args(arguments)
    subjects = {"A": options.a} | ({"B": options.b} if options.b else {})
    try:
        counts = [int(n) for n in options.threads.split(",")] if options.threads else [None]
    except ValueError:
        parser.error(f"--threads is {options.threads!r}: give counts such as 1,2")
    reports = []
    try:
        for threads in counts:
            report = interleave_commands(
                subjects,
                runs=options.runs,
                warmup=options.warmup,
                threads=threads,
                allow_busy=options.allow_busy,
            )
            reports.append(report)
            print(report.table(), flush=True)
    except ValueError as error:
        parser.error(str(error))
    except (BusyMachine, CommandFailed) as error:
        print(f"harness: {error}", file=sys.stderr)
        return 1
    if options.json:
        write_json(reports, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
