"""The results as a page of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows] + [""]


def _listed(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1e}" for name, value in sorted(found.items(), reverse=True))


def markdown(results: dict[str, Any]) -> str:
    """Tables of all parts, what was cut and what was wrong."""
    lines: list[str] = []
    about = results.get("about")
    if about:
        sentences = [
            f"Compute capability {about['compute_capability']}, driver of CUDA",
            f"{about['cuda_of_driver']}, {about['multiprocessors']} multiprocessors, L2",
            f"{about['l2_bytes'] / 2**20:.0f} MiB; fixedstate {about['fixedstate']},",
            f"{about['texts']} texts of Triton {about['triton_of_texts']};",
            f"{results['seconds']} s in all.",
        ]
        if not about["real"]:
            sentences.append("A stand-in took the place of the card: no time means anything.")
        lines += [f"## {about['card']}, {about['date']}", "", " ".join(sentences), ""]
    wrong = results["problems"]
    right = "Everything was right." if about and about["real"] else "The program ran to its end."
    lines += [f"**{len(wrong)} wrong**" if wrong else f"**{right}**", ""]
    lines += [f"- {text}" for text in wrong[:40]]
    lines += [f"- and {len(wrong) - 40} more" for _ in wrong[40:41]]
    lines += [""] if wrong else []
    if results["cut"]:
        lines += ["Cut, because time was up: " + "; ".join(results["cut"]) + ".", ""]
    if results["small"]:
        lines += ["Small shapes only.", ""]
    parts = results["parts"]
    lines += _errors(parts.get("errors", {})) + _replay(parts.get("replay", {}))
    lines += _times(parts.get("times", {}))
    return "\n".join(lines).rstrip() + "\n"


def _errors(part: dict[str, Any]) -> list[str]:
    if "worst" not in part:
        return []
    spilled = part["spilled"]
    sentences = [
        f"{part['cases']} launches; the driver compiled all texts in {part['load_seconds']} s.",
        "Errors are relative to the largest element of the tensor; `inside` is what is left",
        "without the rounding of the output; `of tolerance` has to be below 1.",
    ]
    lines = ["### Errors", "", " ".join(sentences), ""]
    head = ["operator", "io", "texts", "cases", "error", "inside", "of tolerance", "registers"]
    rows = [
        [
            row["op"],
            row["io"],
            row["texts"],
            row["cases"],
            _listed(row["worst"]),
            _listed(row["inside"]),
            f"{row['used']:.2f}",
            row["registers"],
        ]
        for row in part["worst"]
    ]
    lines += table(head, rows)
    if spilled:
        lines += [f"Texts that use local memory on this card: {', '.join(spilled)}.", ""]
    else:
        lines += ["No text uses local memory on this card.", ""]
    return lines


def _replay(part: dict[str, Any]) -> list[str]:
    if not part.get("runs"):
        return []
    head = ["io", "layers", "blocks", "state bytes", "graph, µs a block", "single launches, µs"]
    head += ["GB/s", "worst error"]
    rows = [
        [
            run["io"],
            run["layers"],
            run["blocks"],
            run["state_bytes"],
            run["graph_us_per_block"],
            run["single_launches_us_per_block"],
            f"{run['bytes_per_block'] / max(run['graph_us_per_block'], 1e-3) / 1e3:.0f}",
            _listed(run["worst"]),
        ]
        for run in part["runs"]
    ]
    return ["### A chain of layers as CUDA graphs", "", *table(head, rows)]


def _times(part: dict[str, Any]) -> list[str]:
    if "rows" not in part:
        return []
    lines = ["### Times", "", f"Large copies reach {part['bandwidth'] / 1e9:.0f} GB/s here.", ""]
    peers = {(p["op"], p["rows"], p["tokens"], p["peer"]): p for p in part["peers"]}
    head = ["operator", "io", "B", "L", "tactic", "tile", "thread blocks", "MB", "floor, µs"]
    head += ["graph, µs", "floor / graph", "stream, µs", "published, µs", "torch, µs"]
    rows = []
    for row in part["rows"]:
        others = []
        for peer in ("published", "torch"):
            found = peers.get((row["op"], row["rows"], row["tokens"], peer))
            same = found is not None and row["io"] == "float16"
            mark = " (stream)" if same and found["how"] == "stream" else ""
            others.append(f"{found['us']:.1f}{mark}" if same else "")
        rows.append(
            [
                row["op"],
                row["io"],
                row["rows"],
                row["tokens"],
                row["tactic"],
                row["tile"],
                row["blocks"],
                f"{row['bytes'] / 1e6:.2f}",
                f"{row['floor_us']:.2f}",
                f"{row['graph_us']:.2f}",
                f"{row['share']:.2f}",
                f"{row['stream_us']:.2f}",
                *others,
            ]
        )
    lines += table(head, rows)
    lines += [f"- {note}" for note in part["notes"]]
    return lines + [""]
