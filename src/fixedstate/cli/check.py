"""``fixedstate check``: the laws of a bundle along whole trajectories, or an engine beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fixedstate.cli.opening import ENGINE
from fixedstate.cli.options import bundle_argument, debug_option, json_option, real
from fixedstate.cli.output import echo_fields, echo_json, echo_table, note, progress
from fixedstate.errors import UsageError

if TYPE_CHECKING:
    from fixedstate.bundle import Bundle
    from fixedstate.export.against import Finding
    from fixedstate.runtime.against import Comparison, PortRecord
    from fixedstate.runtime.enginefile import EngineFolder
    from fixedstate.runtime.laws import LawResult


_QUICK = (1, 2, 3)  # block counts of --quick; the full check goes to 33

Tell = Callable[[str], None]


@click.command("check", short_help="Check a bundle's laws, or an engine; exit 1 where it fails.")
@bundle_argument
@click.option("--checkpoint", help="Checkpoint it came from: adds the comparison with PyTorch.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="ENGINE",
    help="Compare this engine, or other bundle of the model, with BUNDLE instead.",
)
@click.option("--quick", is_flag=True, help="Short trajectories only.")
@click.option(
    "--tolerance",
    type=real(0),
    metavar="R",
    help="With --against: share of a port's deviation that may differ [default: the precision's].",
)
@click.option(
    "--require-run", is_flag=True, help="With --against: fail where the engine cannot run here."
)
@click.option(
    "--save-inputs",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Save a real pass of each graph for Polygraphy: what goes in.",
)
@click.option(
    "--save-outputs",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The same: what comes out.",
)
@json_option
@debug_option
@click.pass_context
def command(
    context: click.Context,
    bundle: Path,
    checkpoint: str | None,
    against: Path | None,
    quick: bool,
    tolerance: float | None,
    require_run: bool,
    save_inputs: Path | None,
    save_outputs: Path | None,
    as_json: bool,
) -> None:
    """Check that BUNDLE keeps the laws of cached decoding; exit 1 where it does not.

    Runs with one thread, where rows agree byte for byte. Without --checkpoint the comparison with
    PyTorch is not run, and the report says so.

    With --against an engine is driven beside the bundle along the same trajectories; where it
    cannot run, what its build recorded is compared. The last line begins with PASSED or FAILED.
    """
    from fixedstate.bundle import Bundle

    _check_options(checkpoint, against, tolerance, require_run, (save_inputs, save_outputs))
    saved: list[Path] = []
    with progress("checking") as tell:
        opened = Bundle.open(bundle)
        if save_inputs is not None or save_outputs is not None:
            saved = _save(opened, save_inputs, save_outputs, tell)
        report: _Report
        if against is None:
            report = _laws(opened, checkpoint, quick, tell)
        else:
            report = _against(opened, against, quick, tolerance, require_run, tell)
    for file in saved:
        note(f"wrote {file}")
    if as_json:
        echo_json(report.data)
    else:
        report.show()
    context.exit(0 if report.passed else 1)


def _check_options(
    checkpoint: str | None,
    against: Path | None,
    tolerance: float | None,
    require_run: bool,
    folders: Sequence[Path | None],
) -> None:
    """Refuse what makes no sense together, and folders that cannot be made, before any work.

    Raises:
        UsageError: naming it.
    """
    from fixedstate.bundle import check_target

    if against is not None and checkpoint is not None:
        raise UsageError(
            "--checkpoint compares with PyTorch and --against with an engine: give one of them"
        )
    if against is None and (tolerance is not None or require_run):
        option = "--require-run" if require_run else "--tolerance"
        raise UsageError(f"{option} is about an engine, and none is given: add --against ENGINE")
    given = [folder for folder in folders if folder is not None]
    for folder in given:
        if folder.exists():
            raise UsageError(f"{folder} exists: choose another name, or remove it first")
        check_target(folder, force=False)
    if len(given) == 2 and given[0].absolute() == given[1].absolute():
        raise UsageError(
            f"--save-inputs and --save-outputs are both {given[0]}: files of one would replace "
            "those of the other; give two folders"
        )
    if given:
        from fixedstate.export.passfiles import require_polygraphy

        require_polygraphy()


def _save(bundle: Bundle, inputs: Path | None, outputs: Path | None, tell: Tell) -> list[Path]:
    """Save passes for Polygraphy; the files."""
    from fixedstate.export.passfiles import keep_passes, save_passes

    tell("saving passes")
    return save_passes(keep_passes(bundle), inputs, outputs)


class _Report:
    """What came out: its verdict, its JSON and its page."""

    passed: bool
    data: dict[str, Any]

    def show(self) -> None:
        """Print it for people; the last line begins with PASSED or FAILED."""
        raise NotImplementedError


# --- laws ----------------------------------------------------------------------------------------


class _Laws(_Report):
    def __init__(self, results: Sequence[LawResult]) -> None:
        self._results = results
        self.passed = bool(results) and all(result.passed for result in results)
        self.data = {"passed": self.passed, "laws": [result.to_dict() for result in results]}

    def show(self) -> None:
        rows: list[tuple[Any, ...]] = [
            (r.law, r.title, "passed" if r.passed else "FAILED", _worst(r), r.where, r.note)
            for r in self._results
        ]
        echo_table("Laws", ("law", "what", "result", "worst>", "where", "note"), rows)
        click.echo("PASSED" if self.passed else "FAILED")


def _laws(bundle: Bundle, checkpoint: str | None, quick: bool, tell: Tell) -> _Laws:
    from fixedstate.runtime.laws import check_bundle

    counts: dict[str, Any] = {"block_counts": _QUICK} if quick else {}
    beside = _pytorch_side(bundle, checkpoint, tell, counts) if checkpoint is not None else []
    rest = (2, 3, 4, 6, 7) if beside else ()  # laws 1 and 5 were proved against PyTorch
    laws = check_bundle(bundle, progress=tell, only=rest, **counts)
    return _Laws(sorted([*laws, *beside], key=lambda result: result.law))


def _pytorch_side(
    bundle: Bundle, checkpoint: str, tell: Tell, counts: dict[str, Any]
) -> list[LawResult]:
    """Run first: a checkpoint that is not there is found before minutes of laws."""
    from fixedstate.export.parity import check_against_checkpoint

    return list(check_against_checkpoint(bundle, checkpoint, progress=tell, **counts))


def _worst(result: LawResult) -> str | None:
    return None if result.worst is None else f"{result.worst:.1e}"


# --- an engine -----------------------------------------------------------------------------------


def _against(
    bundle: Bundle,
    path: Path,
    quick: bool,
    tolerance: float | None,
    require_run: bool,
    tell: Tell,
) -> _Report:
    """Run both side by side, or compare what can be compared without a run."""
    from fixedstate.bundle import Bundle
    from fixedstate.runtime import against, trt
    from fixedstate.runtime.enginefile import EngineFolder

    is_engine = (path / ENGINE).is_file()
    candidate = EngineFolder.open(path) if is_engine else Bundle.open(path)
    against.require_same_model(bundle, candidate)
    allowed = against.tolerance_between(bundle, candidate, tolerance)
    if isinstance(candidate, EngineFolder) and (reason := trt.why_not_here(candidate)):
        from fixedstate.export.against import compare_unrun

        tell("comparing what the build recorded")
        return _Unrun(bundle, candidate, compare_unrun(bundle, candidate), reason, require_run)
    found = against.compare_bundles(bundle, candidate, allowed, quick=quick, progress=tell)
    return _Run(bundle, path, found)


class _Run(_Report):
    def __init__(self, bundle: Bundle, path: Path, found: Sequence[Comparison]) -> None:
        self._found, self._paths = found, (bundle.path, path)
        self.passed = bool(found) and all(one.passed for one in found)
        self.data = {
            "passed": self.passed,
            "ran": True,
            "comparisons": [one.to_dict() for one in found],
        }

    def show(self) -> None:
        for one in self._found:
            self._show(one)
        click.echo("PASSED" if self.passed else "FAILED")

    def _show(self, found: Comparison) -> None:
        limit = found.tolerance
        bounds = [f"{limit.relative:g} of a port's deviation"]
        if limit.absolute is not None:
            bounds.append(f"{limit.absolute:g} at a deviation up to 1")
        else:
            bounds.append("by root mean square where single values are large")
        chosen = " (chosen, not the default)" if limit.overridden else ""
        allowed = f"{limit.precision}: {', '.join(bounds)}{chosen}"
        commits = f", {found.commits} commits" if found.carries else ""
        tried = f"{found.passes} denoise passes{commits}, up to {found.rows} rows"
        echo_fields(
            (
                ("reference", f"{self._paths[0]} on {found.reference}"),
                ("candidate", f"{self._paths[1]} on {found.candidate}"),
                ("head", None if found.head == "logits" else found.head),
                ("tolerance", allowed),
                ("because", limit.reason),
                ("compared", tried),
            )
        )
        kinds: dict[str, list[PortRecord]] = {}
        for port in found.ports:
            kinds.setdefault(_kind(port), []).append(port)
        echo_table(
            "Ports",
            (
                *("what", "ports>", "compared>", "worst>", "of deviation>", "rms>", "cosine>"),
                *("result", "where it is worst"),
            ),
            [_port_row(kind, ports) for kind, ports in kinds.items()],
        )
        choices, tokens = found.choices, found.tokens
        sure = f"slots whose two best scores differ by more than {choices.margin}"
        alone = f"equal from the beginning: {', '.join(map(str, tokens.first))}"
        echo_fields(
            (
                ("top-1", f"{choices.agreed:,} of {choices.sure:,} {sure}"),
                ("tokens", f"{tokens.equal:,} of {tokens.tokens:,}, each side alone; {alone}"),
                ("first divergence", found.first),
            )
        )


def _kind(port: PortRecord) -> str:
    """The ports of all layers that are of one kind share a line."""
    return port.name if port.layer is None else port.name.rpartition("_")[0]


def _port_row(kind: str, ports: Sequence[PortRecord]) -> tuple[object, ...]:
    def size(port: PortRecord) -> float:
        return math.inf if math.isnan(port.max_rel) else port.max_rel

    worst = max(ports, key=lambda port: (bool(port.failed), size(port)))
    cosine = min((port.cosine for port in ports), key=lambda one: (not math.isnan(one), one))
    return (
        kind,
        len(ports),
        sum(port.compared for port in ports),
        f"{worst.max_abs:.1e}",
        f"{worst.max_rel:.1e}",
        f"{worst.rms_rel:.1e}",
        "-" if math.isnan(cosine) else f"{cosine:.6f}",
        "FAILED" if any(port.failed for port in ports) else "passed",
        worst.where if worst.layer is None else f"{worst.where}, layer {worst.layer}",
    )


class _Unrun(_Report):
    def __init__(
        self,
        bundle: Bundle,
        engine: EngineFolder,
        findings: Sequence[Finding],
        reason: str,
        require_run: bool,
    ) -> None:
        self._sides = str(bundle.path), str(engine.path)
        self._findings = findings
        self._reason = reason
        self._agree = all(finding.passed is not False for finding in findings)
        self.passed = self._agree and not require_run
        self.data = {
            "passed": self.passed,
            "ran": False,
            "reason": reason,
            "bundle": self._sides[0],
            "engine": self._sides[1],
            "checks": [finding.to_dict() for finding in findings],
        }

    def show(self) -> None:
        echo_fields((("bundle", self._sides[0]), ("engine", self._sides[1])))
        words = {True: "passed", False: "FAILED", None: None}
        echo_table(
            "Without a run",
            ("role", "what", "bundle>", "engine>", "result"),
            [(f.role, f.what, f.bundle, f.engine, words[f.passed]) for f in self._findings],
        )
        click.echo("the run itself was not possible: no numbers were compared")
        what = "static checks only, " if self._agree else "static checks, "
        verdict = "PASSED" if self.passed else "FAILED"
        click.echo(f"{verdict} {what}not run: {self._reason}")
