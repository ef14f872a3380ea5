"""Every operator's time against the memory bandwidth of this card, and against other kernels.

The floor of a pass is KernelSpec.bytes_moved over the bandwidth that large copies reach here. Each
launch of a series works on tensors of its own, together more than twice the L2 cache where memory
allows it, because in a model the other layers' states pass through the cache in between.

``graph`` is the time per launch inside a CUDA graph of the whole series, ``stream`` the same
launches one by one through this program's driver door, and so mostly the host's time.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from card import Card, encode, start, values
from card_errors import family, paper

from fixedstate.errors import BackendError
from fixedstate.plugins.driver import Driver, Stream
from fixedstate.plugins.schema import OPS, KernelSpec, Tile

LEAST, MOST = 50, 600
"""Launches in a series."""

ALIGNMENT = 256

Case = tuple[KernelSpec, str, int, int]
"""Operator, io dtype, rows, tokens."""


def cases(small: bool) -> list[Case]:
    """What is timed, the most telling first."""
    rows, lengths = ((1, 2), (8,)) if small else ((1, 8), (32, 16, 64))
    found = [
        (spec, "float16", count, length)
        for length in lengths
        for count in rows
        for spec in OPS.values()
    ]
    if not small:
        found += [(spec, "bfloat16", 1, 32) for spec in OPS.values()]
    return found


def bandwidth(card: Card) -> float:
    """Bytes per second of a large copy, read and written ones together."""
    nbytes = 1 << 20 if card.small else min(1 << 30, card.driver.free_bytes()[0] // 8)
    driver = card.driver
    with driver.allocate(nbytes) as a, driver.allocate(nbytes) as b, driver.stream() as stream:
        a.fill(1)
        milliseconds = _median(
            driver,
            stream,
            lambda: driver.copy(b.address, a.address, nbytes, stream.handle),
            3 if card.small else 21,
        )
    return 2 * nbytes / (milliseconds / 1e3)


def _median(driver: Driver, stream: Stream, action: Any, repeats: int) -> float:
    """Milliseconds of an action, after three runs that do not count."""
    times = []
    with driver.event() as first, driver.event() as last:
        for number in range(repeats + 3):
            first.record(stream)
            action()
            last.record(stream)
            last.synchronize()
            if number >= 3:
                times.append(last.milliseconds_since(first))
    return float(np.median(times))


def time_op(card: Card, case: Case, tile: Tile) -> dict[str, Any]:
    """Times of one compiled form, in microseconds."""
    spec, io, rows, length = case
    driver = card.driver
    sizes = _small_sizes(spec, length, rows) if card.small else paper(spec, length, rows)
    found = spec.sizes(spec.shapes(sizes)[: len(spec.inputs)], length)
    text = spec.text(tile, io)
    kernel = driver.load(text.text, text.entry)
    launch = spec.launch(found, tile)
    moved = spec.bytes_moved(found, io)
    inputs = values(spec, io, sizes, 3)
    layout: dict[str, int] = {}
    step = 0
    for port, shape in zip(spec.ports, spec.shapes(found), strict=True):
        layout[port.name] = step
        nbytes = encode(np.empty(0), port.dtype_for(io)).itemsize * int(np.prod(shape))
        step += -(-nbytes // ALIGNMENT) * ALIGNMENT
    wanted = 2 if card.small else min(MOST, max(LEAST, -(-2 * driver.l2_bytes // step)))
    sets = max(1, min(wanted, driver.free_bytes()[0] // 4 // step))
    with ExitStack() as stack:
        stream = stack.enter_context(driver.stream())
        arena = stack.enter_context(driver.allocate(sets * step))
        arena.fill(0)
        for name, array in inputs.items():
            arena.write(array, layout[name])
        for number in range(1, sets):
            driver.copy(arena.address + number * step, arena.address, step)
        driver.synchronize()

        def series() -> None:
            for number in range(wanted):
                base = arena.address + (number % sets) * step
                address = {name: base + offset for name, offset in layout.items()}
                start(kernel, text, spec, launch, address, stream)

        series()
        stream.synchronize()
        with stream.capture() as graph:
            series()
        stack.enter_context(graph)
        if graph.nodes != wanted:
            raise BackendError(f"{text.entry}: a graph of {graph.nodes} launches, not {wanted}")
        repeats = 2 if card.small else 25
        in_graph = _median(driver, stream, lambda: graph.launch(stream), repeats)
        in_stream = _median(driver, stream, series, 1 if card.small else 5)
    driver.unload(kernel)
    return {
        "op": spec.name,
        "io": io,
        "rows": rows,
        "tokens": length,
        "tile": tile.label,
        "tactic": spec.tactic(tile),
        "blocks": int(np.prod(launch.grid)),
        "bytes": moved,
        "launches": wanted,
        "working_set_bytes": sets * step,
        "graph_us": 1e3 * in_graph / wanted,
        "stream_us": 1e3 * in_stream / wanted,
    }


def _small_sizes(spec: KernelSpec, length: int, rows: int) -> dict[str, int]:
    size = {
        "conv": {"C": 16, "K": 4},
        "ssd": {"H": 2, "P": 16, "G": 1, "N": 16, "W": 1},
        "scan": {"E": 16, "N": 16},
    }[family(spec)]
    return {"B": rows, "T": length, "L": length, **size}


def measure(card: Card) -> dict[str, Any]:
    """Rows of a table: every operator, shape and compiled form; then what other kernels take."""
    peak = bandwidth(card)
    problems: list[str] = []
    rows: list[dict[str, Any]] = []
    plan = cases(card.small)
    dropped = 0
    for case in plan:
        spec, io, count, length = case
        sizes = _small_sizes(spec, length, count) if card.small else paper(spec, length, count)
        if reasons := spec.refusals(sizes, length, io):
            problems.append(f"{spec.name}, {length} tokens: {'; '.join(reasons)}")
            continue
        # a fifth of the time is kept for the other kernels
        if card.left() < 0.2 * card.seconds:
            dropped += 1
            continue
        for tile in spec.tiles_for(sizes, length):
            try:
                row = time_op(card, case, tile)
            except BackendError as error:
                problems.append(f"{spec.name}, {count} x {length}, {tile.label}: {error}")
                card.driver.synchronize()  # ends this part if the context is lost
                continue
            row["floor_us"] = 1e6 * row["bytes"] / peak
            row["share"] = row["floor_us"] / row["graph_us"]
            rows.append(row)
    cut = [f"{dropped} of {len(plan)} shapes"] if dropped else []
    peers, notes = _peers(card)
    return {
        "problems": problems,
        "cut": cut,
        "bandwidth": peak,
        "rows": rows,
        "peers": peers,
        "notes": notes,
    }


def _peers(card: Card) -> tuple[list[dict[str, Any]], list[str]]:
    """Times of other kernels; that they are absent or fail is no fault of ours, and is said."""
    if not card.real:
        return [], ["other kernels: need a card"]
    try:
        import card_peers
    except ImportError as error:
        return [], [f"other kernels: absent ({error})"]
    return card_peers.measure(card)
