"""Runs the kernels' source in Triton's interpreter and compares with the float64 reference.

A program of its own, because Triton decides when it is imported whether it interprets:

    TRITON_INTERPRET=1 python tests/plugins/interpret.py --only ssd_commit --io float32

The interpreter is numpy: it shows indices, masks, formulas and float32 arithmetic. It says nothing
of races, of tf32 or of a GPU's exponential; test_kernels.py emulates tf32, tests/gpu has the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fixedstate.plugins.schema import OPS, KernelSpec, Tile

IO = ("float32", "float16", "bfloat16")
TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-7}
"""What storing costs, relative; float32 gets none: its error is what is measured.

Half a unit in the last place, and a whole one of bfloat16: the interpreter cuts where the compiled
kernels round to nearest (test_ptx.py looks for that).
"""
SMALLEST = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 2.0**-133}
"""The same near zero."""

GUARD = 64
"""Elements before and after each tensor that nothing may touch."""

KINDS = ("usual", "large", "tiny", "tail")
"""dt: as in models; so large that every decay is 0; so tiny that none is; 0 from some token on."""


@dataclass(frozen=True)
class Case:
    """What is run: an operator, a dtype, one tile, sizes, and what dt is like."""

    op: str
    io: str
    tile: str
    sizes: dict[str, int]
    block_len: int
    kind: str
    flags: dict[str, bool]


@dataclass(frozen=True)
class Outcome:
    """Errors of each output, relative to its largest element.

    Attributes:
        worst: By output; of an output in float16 or bfloat16 almost all of it is its rounding.
        inside: By output, what is left after the rounding of the output itself.
        wrong: What must not happen at all.
    """

    case: Case
    worst: dict[str, float]
    inside: dict[str, float]
    wrong: list[str]
    seconds: float


# --- what is run ---------------------------------------------------------------------------------


CONV = (
    # T or n*L, C, K, B; one block
    (1, 16, 2, 2), (2, 48, 3, 1), (3, 64, 4, 2), (5, 80, 5, 1), (7, 32, 6, 1), (16, 64, 7, 2),
    (17, 48, 8, 1), (32, 80, 4, 1), (33, 16, 4, 2), (64, 32, 2, 1), (65, 16, 8, 1),
    (128, 16, 3, 1), (256, 16, 4, 1),
)  # fmt: skip

SSD = (
    # L, H, P, G, N, W, B
    (1, 2, 16, 1, 16, 0, 2), (2, 2, 32, 2, 48, 1, 1), (3, 1, 64, 1, 64, 0, 1),
    (5, 4, 16, 4, 80, 1, 1), (7, 2, 80, 1, 128, 0, 1), (16, 4, 16, 2, 16, 0, 1),
    (17, 2, 32, 1, 256, 1, 1), (32, 2, 16, 2, 128, 0, 2), (32, 1, 64, 1, 32, 1, 1),
    (33, 2, 16, 1, 48, 0, 1), (64, 1, 32, 1, 128, 1, 1), (64, 1, 80, 1, 16, 0, 1),
    (65, 2, 16, 1, 64, 0, 1), (65, 2, 16, 2, 80, 1, 1), (128, 1, 32, 1, 48, 0, 1),
    (128, 1, 16, 1, 208, 1, 1), (256, 1, 16, 1, 128, 0, 1),
)  # fmt: skip

SCAN = (
    # L, E, N, B
    (1, 16, 16, 2), (2, 48, 5, 1), (3, 32, 16, 1), (4, 16, 64, 1), (5, 16, 33, 1), (7, 48, 8, 1),
    (16, 32, 16, 2), (17, 16, 1, 1), (32, 16, 64, 1), (33, 16, 32, 1), (64, 16, 16, 1),
    (65, 16, 48, 1), (128, 16, 16, 1), (256, 16, 4, 1),
)  # fmt: skip


def shapes(spec: KernelSpec) -> Iterator[tuple[dict[str, int], int]]:
    """Sizes and block lengths; several blocks where the operator takes them, not of long ones."""
    if "C" in spec.multiples:
        rows = [dict(zip("LCKB", row, strict=True)) for row in CONV]
    elif "E" in spec.multiples:
        rows = [dict(zip("LENB", row, strict=True)) for row in SCAN]
    else:
        rows = [dict(zip("LHPGNWB", row, strict=True)) for row in SSD]
    for place, row in enumerate(rows):
        length = row["L"]
        blocks = 1 if spec.single_block or length > 33 else place % 3 + 1
        sizes = {**row, "T": length * blocks}
        if "W" in row:
            sizes["W"] = row["P"] if row["W"] else 1
        yield sizes, length
        # a whole sequence as one block: for Mamba-2 the forms that loop, even over one token
        if blocks == 1 and (place % 2 == 1 if "W" in row else place == 6):
            yield sizes, 0


def cases(spec: KernelSpec) -> Iterator[Case]:
    """Every shape with every tile that a builder may choose for it; half of them in 16 bits."""
    for io in IO:
        for place, (sizes, block_len) in enumerate(shapes(spec)):
            half = io != "float32"
            longest = 51 if "E" in spec.multiples else 99  # a scan takes a loop in Python per token
            if half and ((place + IO.index(io)) % 2 or sizes["T"] > longest):
                continue
            for tile in spec.tiles_for(sizes, block_len):
                if half and "C" in spec.multiples and tile is not spec.tiles[place // 2 % 2]:
                    continue
                flags = {}
                if "BLOCK_P" in tile.constants:
                    flags = {
                        "ONE_CHUNK": tile.longest_block is not None,
                        "SPLIT": place % 3 != 0,
                        "UPCAST": io == "bfloat16" or place % 4 == 0,
                    }
                kind = KINDS[(place + place // 4 + IO.index(io)) % len(KINDS)]
                yield Case(spec.name, io, tile.label, sizes, block_len, kind, flags)


# --- running it ----------------------------------------------------------------------------------


class Guarded:
    """A tensor between two strips that nothing may write."""

    def __init__(self, values: torch.Tensor) -> None:
        self.whole = torch.full((values.numel() + 2 * GUARD,), 77, dtype=values.dtype)
        self.inner = self.whole[GUARD : GUARD + values.numel()].view(values.shape)
        self.inner.copy_(values)
        self.before = self.whole.clone()

    def guarded(self) -> bool:
        """Whether the strips are as they were."""
        strips = [self.whole[:GUARD], self.whole[-GUARD:]]
        return all(bool((strip == 77).all()) for strip in strips)

    def unchanged(self) -> bool:
        """Whether every byte is as it was."""
        return raw(self.whole) == raw(self.before)


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes; numpy has no bfloat16."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def inputs_of(spec: KernelSpec, case: Case) -> dict[str, torch.Tensor]:
    """Random inputs in their dtypes."""
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    found: dict[str, torch.Tensor] = {}
    for port, shape in zip(spec.inputs, spec.shapes(case.sizes), strict=False):
        if port.name == "length":
            values = rng.integers(0, case.sizes["T"] + 1, shape)
            values[0] = (0, case.sizes["T"], values[0])[int(rng.integers(3))]
        elif port.name == "dt":
            values = rng.uniform(0.001, 0.5, shape)
            values *= {"large": 400.0, "tiny": 1e-6}.get(case.kind, 1.0)
            if case.kind == "tail":
                values[:, int(rng.integers(shape[1] + 1)) :] = 0
        elif port.name == "a":
            values = -rng.uniform(0.5, 8, shape)
        else:
            values = rng.standard_normal(shape)
        found[port.name] = torch.from_numpy(np.asarray(values)).to(TORCH[port.dtype_for(case.io)])
    return found


def run(spec: KernelSpec, tile: Tile, case: Case) -> Outcome:
    """One case."""
    from fixedstate.plugins import kernels

    start = time.perf_counter()
    given = inputs_of(spec, case)
    sizes = spec.sizes([tuple(value.shape) for value in given.values()], case.block_len)
    inputs = {name: Guarded(value) for name, value in given.items()}
    outputs = {}
    for port, shape in zip(spec.outputs, spec.shapes(sizes)[len(spec.inputs) :], strict=True):
        outputs[port.name] = Guarded(
            torch.full(shape, torch.nan, dtype=TORCH[port.dtype_for(case.io)])
        )
    launch = spec.launch(sizes, tile)
    with np.errstate(all="ignore"):
        getattr(kernels, spec.torch_name)[launch.grid](
            *(tensor.inner for tensor in inputs.values()),
            *launch.arguments,
            *(tensor.inner for tensor in outputs.values()),
            **tile.constants,
            **case.flags,
        )
    wrong = [f"input {name} was changed" for name in inputs if not inputs[name].unchanged()]
    wrong += [f"bytes around output {name}" for name in outputs if not outputs[name].guarded()]
    wide = {
        name: (value if value.dtype == torch.int64 else value.double()).numpy()
        for name, value in given.items()
    }
    worst, inside = {}, {}
    references = spec.reference(wide, case.block_len)
    for (name, tensor), port, reference in zip(
        outputs.items(), spec.outputs, references, strict=True
    ):
        got = tensor.inner.double().numpy()
        if name == "new_state" and "C" in spec.multiples:  # copies
            same = raw(torch.from_numpy(reference).to(tensor.inner.dtype)) == raw(tensor.inner)
            if not same:
                wrong.append("the window is not a copy")
            continue
        if missing := int((~np.isfinite(got)).sum()):
            wrong.append(f"{name}: {missing} of {got.size} are not finite or not written")
            continue
        scale = max(float(np.abs(reference).max()), 1e-30)
        error = np.abs(got - reference)
        dtype = port.dtype_for(case.io)
        # 1.01: what was rounded may itself lie a little further out than the reference
        rounding = 1.01 * ROUNDING[dtype] * np.abs(reference) + SMALLEST[dtype]
        worst[name] = float(error.max()) / scale
        inside[name] = float(np.maximum(error - rounding, 0).max()) / scale
    return Outcome(case, worst, inside, wrong, time.perf_counter() - start)


def outcomes(spec: KernelSpec, ios: tuple[str, ...]) -> Iterator[Outcome]:
    """All cases of an operator."""
    tiles = {tile.label: tile for tile in spec.tiles}
    for case in cases(spec):
        if case.io in ios:
            yield run(spec, tiles[case.tile], case)


def main() -> int:
    """Prints the outcomes as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[op.torch_name for op in OPS.values()])
    parser.add_argument("--io", nargs="+", default=IO, choices=IO)
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        print("set TRITON_INTERPRET=1: without a GPU nothing else runs a kernel", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = [
        asdict(outcome)
        for spec in OPS.values()
        if spec.torch_name in options.only
        for outcome in outcomes(spec, tuple(options.io))
    ]
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
