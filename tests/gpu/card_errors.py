"""Every shipped text, launched as the plugin launches it, against the float64 reference.

Tolerance of an element: ROUNDING of its dtype times its size (the kernel rounds once, to nearest)
plus INSIDE of its family times the largest element of the tensor. Per family, because of what is
inside:

* conv: at most eight float32 products and a SiLU by ex2.approx (2 units in the last place);
* scan: float32 throughout, one ex2.approx and two roundings per token;
* ssd: tensor-core products of operands that tf32 holds exactly (float32 operands are split into
  two parts, of which the second keeps 11 of 13 bits), summed in float32 without rounding to
  nearest; exponents are float32 sums of up to a chunk.

States are float32 and have INSIDE alone. The convolution's window is copied: equal bytes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from card import Card, Tensor, decode, empty, encode, start, values

from fixedstate.errors import BackendError
from fixedstate.plugins.driver import Driver, Function
from fixedstate.plugins.ptx import Ptx, file_name
from fixedstate.plugins.schema import KERNEL_IO, OPS, KernelSpec, Tile

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Largest relative error of rounding to nearest."""

SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
"""Largest error of rounding among subnormal numbers."""

INSIDE = {"conv": 4e-6, "scan": 1e-5, "ssd": 1e-5}
"""Error of the arithmetic relative to the largest element."""

KINDS = ("usual", "any", "tail")

CASES_PER_TEXT, SMALL_CASES = 8, 2


@dataclass
class Row:
    """What was found about one text."""

    text: str
    op: str
    io: str
    tile: str
    tactic: int
    cases: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    inside: dict[str, float] = field(default_factory=dict)
    used: float = 0.0
    registers: int = 0
    local_bytes: int = 0
    load_seconds: float = 0.0


def family(spec: KernelSpec) -> str:
    """conv, ssd or scan."""
    return spec.torch_name.partition("_")[0]


def shapes(spec: KernelSpec, small: bool) -> Iterator[tuple[dict[str, int], int]]:
    """Sizes and block lengths worth trying, for all tiles of an operator."""
    lengths = (
        [7, 33, 70, 17, 1, 64, 32]
        if small
        else [32, 1, 17, 31, 7, 64, 33, 48, 65, 96, 128, 200, 256]
    )
    blocks = [1] if spec.single_block else [1, 3, 2]
    for turn, length in enumerate(lengths):
        for more, count in enumerate(blocks):
            rows = 1 + (turn + more) % 3
            both = {"B": rows, "T": count * length, "L": length}
            if family(spec) == "conv":
                for channels, taps in ((16, 4), (112, 2), (48, 8), (80, 3)):
                    yield {**both, "C": channels, "K": taps}, length
            elif family(spec) == "ssd":
                wide = [(16, 2, 1, 1), (80, 4, 2, 1), (32, 4, 4, 32), (64, 6, 1, 1), (48, 3, 3, 48)]
                wide = wide[:1] + wide[2:3] if small else wide
                for width in (64, 128, 256, 16, 80, 144, 48, 112, 240):
                    part, heads, groups, skip = wide[(turn + more + width // 16) % len(wide)]
                    sizes = {"H": heads, "P": part, "G": groups, "N": width, "W": skip}
                    yield {**both, **sizes}, length
            else:
                for width in (16, 32, 64, 1, 17, 48, 3, 24, 40):
                    inner = (16, 80, 128, 48)[(turn + more + width) % (1 if small else 4)]
                    yield {**both, "E": inner, "N": width}, length


def paper(spec: KernelSpec, length: int, rows: int) -> dict[str, int]:
    """The published size: 5120 channels as 80 heads x 64 or 5120 x 16; convolution over 5376."""
    size = {
        "conv": {"C": 5376, "K": 4},
        "ssd": {"H": 80, "P": 64, "G": 1, "N": 128, "W": 1},
        "scan": {"E": 5120, "N": 16},
    }[family(spec)]
    return {"B": rows, "T": length, "L": length, **size}


def cases(spec: KernelSpec, tile: Tile, small: bool) -> list[tuple[dict[str, int], int]]:
    """The sizes that a builder would choose this tile for, spread over what is worth trying."""
    fitting = [
        (sizes, length)
        for sizes, length in shapes(spec, small)
        if tile in spec.tiles_for(sizes, length) and not spec.refusals(sizes, length, "float16")
    ]
    # the same ones every time, others for every text: a stride would miss what it divides
    rng = np.random.default_rng(zlib.crc32(f"{spec.name} {tile.label}".encode()))
    count = min(len(fitting), SMALL_CASES if small else CASES_PER_TEXT)
    chosen = [fitting[index] for index in rng.permutation(len(fitting))[:count]]
    if not small:
        for length in (32, 64, 128):
            if tile in spec.tiles_for(paper(spec, length, 1), length):
                chosen.insert(1, (paper(spec, length, 1), length))
                break
    return chosen


def judge(
    driver: Driver,
    kernel: Function,
    text: Ptx,
    spec: KernelSpec,
    tile: Tile,
    io: str,
    case: tuple[dict[str, int], int],
    seed: int,
    row: Row,
) -> list[str]:
    """Run one case, add its errors to the row, and say what is wrong."""
    sizes, length = case
    inputs = values(spec, io, sizes, seed, KINDS[seed % 3])
    found = spec.sizes([inputs[name].shape for name in spec.input_names], length)
    # a size of 1 may stand for more than one symbol's value: the shapes have to say the same
    assert all(found[key] == sizes[key] for key in sizes), (found, sizes)
    dtypes = {port.name: port.dtype_for(io) for port in spec.ports}
    results = {
        port.name: empty(dtypes[port.name], shape)
        for port, shape in zip(spec.outputs, spec.shapes(found)[len(spec.inputs) :], strict=True)
    }
    with ExitStack() as stack:
        tensors = {
            name: stack.enter_context(Tensor(driver, array))
            for name, array in {**inputs, **results}.items()
        }
        address = {name: tensor.address for name, tensor in tensors.items()}
        start(kernel, text, spec, spec.launch(found, tile), address)
        driver.synchronize()
        wrong = [
            f"{name}: bytes around it were written"
            for name in tensors
            if not tensors[name].guarded()
        ]
        wrong += [f"input {name} was changed" for name in inputs if not tensors[name].unchanged()]
        got = {name: tensors[name].read() for name in results}
    decoded = {name: decode(array, dtypes[name]) for name, array in inputs.items()}
    expected = dict(zip(results, spec.reference(decoded, length), strict=True))
    for name, reference in expected.items():
        wrong += compare(row, spec, name, dtypes[name], got[name], reference)
    where = ", ".join(f"{key} {value}" for key, value in found.items())
    return [f"{row.text}: {text} ({where}; dt {KINDS[seed % 3]})" for text in wrong]


def compare(
    row: Row, spec: KernelSpec, name: str, dtype: str, got: np.ndarray, reference: np.ndarray
) -> list[str]:
    """One output against the reference."""
    if family(spec) == "conv" and name == "new_state":
        same = got.tobytes() == encode(reference, dtype).tobytes()
        return (
            []
            if same
            else [f"{name}: {int((got != encode(reference, dtype)).sum())} copies differ"]
        )
    numbers = decode(got, dtype)
    missing = int((~np.isfinite(numbers)).sum())
    if missing:
        return [f"{name}: {missing} of {numbers.size} elements are not finite or were not written"]
    error = np.abs(numbers - reference)
    scale = max(float(np.abs(reference).max()), 1e-30)
    # 1.01: the float32 value that was rounded may lie a little further out than the reference
    rounding = 1.01 * ROUNDING[dtype] * np.abs(reference) + SMALLEST[dtype]
    inside = INSIDE[family(spec)] * scale
    row.worst[name] = max(row.worst.get(name, 0.0), float(error.max()) / scale)
    beyond = float(np.maximum(error - rounding, 0).max()) / scale
    row.inside[name] = max(row.inside.get(name, 0.0), beyond)
    used = float((error / (rounding + inside)).max())
    row.used = max(row.used, used)
    if used <= 1:
        return []
    relative = float(error.max()) / scale
    return [f"{name}: error {relative:.2g} of the largest element, {used:.3g} of the tolerance"]


def load_all(card: Card, rows: list[Row], jobs: list[Any]) -> list[tuple[Function, Ptx] | str]:
    """Compile every text for this card, several at a time; a refusal is given as its message."""

    def one(number: int) -> tuple[Function, Ptx] | str:
        spec, tile, io = jobs[number]
        began = time.monotonic()
        try:
            card.driver.make_current()
            text = spec.text(tile, io)
            kernel = card.driver.load(text.text, text.entry)
        except BackendError as error:
            return f"{rows[number].text}: {error}"
        rows[number].load_seconds = round(time.monotonic() - began, 3)
        rows[number].registers = kernel.registers
        rows[number].local_bytes = kernel.local_bytes
        return kernel, text

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(len(jobs))))


def refuses_a_broken_text(card: Card, spec: KernelSpec, tile: Tile, io: str) -> list[str]:
    """The driver's compiler log has to come back, or nobody could tell what a driver refuses."""
    text = spec.text(tile, io)
    broken = text.text.replace("ret;", "no_such_instruction;")
    try:
        card.driver.load(broken, text.entry)
    except BackendError as error:
        return [] if "no_such_instruction" in str(error) else [f"no compiler log in: {error}"]
    return ["a text with an instruction that does not exist was loaded"]


def measure(card: Card) -> dict[str, Any]:
    """Errors of every text: rows of a table, problems, and what was cut for time."""
    jobs = [(spec, tile, io) for spec in OPS.values() for io in KERNEL_IO for tile in spec.tiles]
    rows = [
        Row(file_name(spec, tile, io), spec.name, io, tile.label, spec.tactic(tile))
        for spec, tile, io in jobs
    ]
    problems = refuses_a_broken_text(card, *jobs[0])
    began = time.monotonic()
    loaded = load_all(card, rows, jobs)
    load_seconds = round(time.monotonic() - began, 1)
    problems += [one for one in loaded if isinstance(one, str)]
    plans = [cases(spec, tile, card.small) for spec, tile, _ in jobs]
    problems += [f"{row.text}: no case" for row, plan in zip(rows, plans, strict=True) if not plan]
    problems += sorted(set(_shipped()) ^ {row.text for row in rows})
    done = total = 0
    for turn in range(max(map(len, plans))):  # the first case of every text comes first
        for number, (spec, tile, io) in enumerate(jobs):
            pair = loaded[number]
            if turn >= len(plans[number]) or isinstance(pair, str):
                continue
            total += 1
            if card.left() < 0:
                continue
            try:
                problems += judge(
                    card.driver,
                    *pair,
                    spec,
                    tile,
                    io,
                    plans[number][turn],
                    turn + number,
                    rows[number],
                )
            except BackendError as error:
                problems.append(f"{rows[number].text}: {error}")
                card.driver.synchronize()  # ends this part if the context is lost
            rows[number].cases += 1
            done += 1
    cut = [f"{total - done} of {total} cases"] if done < total else []
    spilled = [row.text for row in rows if row.local_bytes]
    return {
        "problems": problems,
        "cut": cut,
        "cases": done,
        "load_seconds": load_seconds,
        "spilled": spilled,
        "inside_tolerance": INSIDE,
        "rows": [vars(row) for row in rows],
        "worst": _worst(rows),
    }


def _shipped() -> Mapping[str, Any]:
    from fixedstate.plugins import ptx

    return dict(ptx.index()["texts"])


def _worst(rows: list[Row]) -> list[dict[str, Any]]:
    """Per operator and io dtype, over all tiles."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.io), []).append(row)
    table = []
    for (op, io), members in groups.items():
        entry: dict[str, Any] = {"op": op, "io": io, "texts": len(members)}
        entry["cases"] = sum(row.cases for row in members)
        for key in ("worst", "inside"):
            names = {name for row in members for name in getattr(row, key)}
            entry[key] = {
                name: max(getattr(row, key).get(name, 0.0) for row in members) for name in names
            }
        entry["used"] = max(row.used for row in members)
        entry["registers"] = max(row.registers for row in members)
        entry["local_bytes"] = max(row.local_bytes for row in members)
        table.append(entry)
    return table
