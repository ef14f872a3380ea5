"""A report as a picture: where a quantised model is away from the one it was made of."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fixedstate.bundle import write_atomic
from fixedstate.calib.report import Report
from fixedstate.errors import UsageError

SUFFIXES = (".png", ".svg")


def check_plot(file: Path) -> None:
    """Refuse a name of a picture that cannot be written.

    Raises:
        UsageError: for another suffix than those of :data:`SUFFIXES`.
        ModuleNotFoundError: where matplotlib is not installed.
    """
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{file} is a picture of no known kind: name it {' or '.join(SUFFIXES)}")
    import matplotlib.figure  # noqa: F401


def plot(report: Report, file: Path) -> None:
    """Draw a report; the file appears whole or not at all.

    Three panels: divergence by share of masks, by committed blocks, and the error of the scan
    states along them.

    Args:
        report: What was measured.
        file: PNG or SVG, by its suffix.

    Raises:
        UsageError: for another suffix.
        BundleError: where the file cannot be written.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    data = report.comparison.to_dict()
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    masks, blocks, states = figure.subplots(1, 3)
    _divergence(masks, "share of masks", data["by_masks"])
    _divergence(blocks, "blocks up to", data["by_block"])
    curves = {"this model": report.comparison.state}
    curves |= {f"state in {one.name}": one.comparison.state for one in report.drifts}
    for name, curve in curves.items():
        if curve:
            places = sorted(curve)
            states.plot(places, [curve[place] for place in places], marker="o", label=name)
    states.set_xlabel("committed blocks")
    states.set_ylabel("relative error of the state")
    if any(curve for curve in curves.values()):
        states.set_xscale("log")
        _log(states, [error for curve in curves.values() for error in curve.values()])
        states.legend()
    content = io.BytesIO()
    kind = file.suffix.lower()[1:]
    # the same report is the same picture: an SVG would hold the time
    figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(file, content.getvalue())


def _divergence(axes: Any, title: str, parts: Mapping[str, Mapping[str, float]]) -> None:
    values = []
    for key, name in (("kl_mean", "mean"), ("kl_p99", "p99")):
        line = [one[key] for one in parts.values()]
        values += line
        axes.plot(list(parts), line, marker="o", label=name)
    axes.set_xlabel(title)
    axes.set_ylabel("divergence in nats")
    _log(axes, values)
    axes.legend()


def _log(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic scale, where every value has a place on it."""
    if values and min(values) > 0.0:
        axes.set_yscale("log")
