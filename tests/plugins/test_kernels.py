"""The kernels' source in Triton's interpreter against the float64 loops, and what tf32 does to it.

The interpreter runs in a process of its own (interpret.py). Float32 inputs show the kernel's own
error; with 16-bit inputs the rounding of the output is taken off first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixedstate.plugins.reference import ssd
from fixedstate.plugins.schema import OPS, KernelSpec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import interpret  # noqa: E402

LIMIT = 1e-6
"""Largest error of a float32 kernel, relative to the largest element of the output."""

SPECS = [pytest.param(spec, id=spec.name) for spec in OPS.values()]
Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Every case of every operator, in two processes side by side."""
    scans = [spec.torch_name for spec in OPS.values() if "E" in spec.multiples]
    rest = [spec.torch_name for spec in OPS.values() if "E" not in spec.multiples]
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "interpret.py", "--only", *names],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for names in (scans, rest)
    ]
    found: Outcomes = []
    for process in started:
        out, error = process.communicate(timeout=500)
        assert process.returncode == 0, error
        found += json.loads(out)
    return found


def limit(case: dict[str, Any]) -> float:
    """What a case may be off by.

    A scan multiplies its state by one rounded decay per token. Where decays lie within some units
    in the last place of 1, all these roundings stay: half of one each, in any float32 scan.
    """
    if case["op"].startswith("SelectiveScan") and case["kind"] == "tiny":
        return max(LIMIT, case["sizes"]["T"] * 2.0**-24)
    return LIMIT


@pytest.mark.parametrize("io", interpret.IO)
@pytest.mark.parametrize("spec", SPECS)
def test_kernel_equals_the_loop(outcomes: Outcomes, spec: KernelSpec, io: str) -> None:
    """Outputs, untouched inputs and surroundings, nothing left unwritten."""
    mine = [one for one in outcomes if one["case"]["op"] == spec.name and one["case"]["io"] == io]
    assert len(mine) >= 4
    for one in mine:
        assert not one["wrong"], one["case"]
        judged = set(spec.output_names) - ({"new_state"} if "C" in spec.multiples else set())
        assert set(one["inside"]) == judged
        for name, error in one["inside"].items():
            assert error <= limit(one["case"]), (name, one["case"])


@pytest.mark.parametrize("spec", SPECS)
def test_cases_reach_everything(spec: KernelSpec) -> None:
    """A grid that someone shortens is noticed."""
    cases = list(interpret.cases(spec))
    single = [case for case in cases if case.io == "float32"]
    lengths = {case.sizes["L"] for case in single}
    assert lengths >= {1, 2, 3, 5, 7, 16, 17, 32, 33, 64, 65, 128, 256}
    assert {case.tile for case in single} == {tile.label for tile in spec.tiles}
    blocks = {case.sizes["T"] // case.sizes["L"] for case in single}
    assert blocks == ({1} if spec.single_block else {1, 2, 3})
    assert 0 in {case.block_len for case in single}
    for io in interpret.IO:
        assert {case.kind for case in cases if case.io == io} == set(interpret.KINDS)
    if "C" in spec.multiples:
        assert {case.sizes["K"] for case in single} == set(range(2, 9))
    elif "W" in cases[0].sizes:
        assert {case.sizes["N"] for case in single} >= {16, 48, 64, 80, 128, 208, 256}
        assert {case.sizes["P"] for case in single} == {16, 32, 64, 80}
        assert {case.sizes["G"] for case in single} == {1, 2, 4}
        assert {case.sizes["W"] == 1 for case in single} == {True, False}
        for flag in ("SPLIT", "UPCAST"):
            assert {case.flags[flag] for case in single} == {True, False}
    else:
        assert {case.sizes["N"] for case in single} >= {1, 5, 16, 32, 33, 48, 64}


def test_lengths_of_windows() -> None:
    """None, all and some of the tokens of a row."""
    spec = OPS["CausalConvCommit"]
    seen = set()
    for case in interpret.cases(spec):
        lengths = interpret.inputs_of(spec, case)["length"].tolist()
        tokens = case.sizes["T"]
        seen |= {0 if n == 0 else 2 if n == tokens else 1 for n in lengths}
        assert all(0 <= n <= tokens for n in lengths)
    assert seen == {0, 1, 2}


def test_judge_sees_a_write_beside_a_tensor() -> None:
    """The strips and the copy of each tensor."""
    tensor = interpret.Guarded(torch.arange(6.0).view(2, 3))
    assert tensor.guarded()
    assert tensor.unchanged()
    tensor.inner[1, 2] = 7
    assert tensor.guarded()
    assert not tensor.unchanged()
    tensor.whole[interpret.GUARD + 6] = 0
    assert not tensor.guarded()


def test_program_wants_the_interpreter() -> None:
    """Without a GPU a compiled kernel would fail at the first case with another message."""
    done = subprocess.run(
        [sys.executable, HERE / "interpret.py"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1" in done.stderr


# --- tf32 ----------------------------------------------------------------------------------------


Product = Callable[[np.ndarray, np.ndarray], np.ndarray]


def tf32(v: np.ndarray) -> np.ndarray:
    """What a tensor core sees of a float32 operand: its upper 19 bits."""
    return (v.astype(np.float32).view(np.int32) & -8192).view(np.float32)


def core(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A tf32 product with sums in float32, emulated."""
    return np.matmul(tf32(a), tf32(b), dtype=np.float32)


def split_left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The left operand in two halves."""
    return core(a - tf32(a), b) + core(tf32(a), b)


def split_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The right operand in two halves."""
    return core(a, b - tf32(b)) + core(a, tf32(b))


def chunks(
    inputs: dict[str, np.ndarray], size: int, left: Product, right: Product
) -> tuple[np.ndarray, np.ndarray]:
    """The kernels' matrix form for one head, over chunks of ``size`` tokens, in float32."""
    x, dt, b, c = (inputs[name].astype(np.float32) for name in ("x", "dt", "b", "c"))
    a, state = np.float32(inputs["a"]), inputs["state"].astype(np.float32)
    outputs = []
    for start in range(0, len(x), size):
        cut = slice(start, start + size)
        step = dt[cut] * a
        lower = np.tri(size, dtype=bool)
        steps = np.where(np.tri(size, k=-1, dtype=bool), step[:, None], np.float32(0))
        weight = np.where(lower, np.exp(np.cumsum(steps, 0)), 0) * (c[cut] @ b[cut].T) * dt[cut]
        y = left(weight.astype(np.float32), x[cut])
        y += np.exp(np.cumsum(step))[:, None] * right(c[cut], state)
        outputs.append(y + inputs["d"].astype(np.float32) * x[cut])
        after = np.cumsum(np.append(step[1:], np.float32(0))[::-1])[::-1]
        value = x[cut] * (np.exp(after) * dt[cut])[:, None]
        state = np.exp(step.sum()) * state + right(b[cut].T, value.astype(np.float32))
    return np.concatenate(outputs), state


@pytest.mark.parametrize("io", [np.float16, "bfloat16"])
def test_two_halves_keep_float32(io: type | str) -> None:
    """Over 16 chunks: float32's error with split operands, tf32's without."""
    rng = np.random.default_rng(3)
    tokens, states, channels = 512, 128, 64

    def rounded(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape)
        if io == "bfloat16":
            return torch.from_numpy(values).bfloat16().double().numpy()
        return values.astype(io).astype(np.float64)

    inputs = {
        "x": rounded(tokens, channels),
        "dt": rng.uniform(0.001, 0.1, tokens).astype(np.float32).astype(np.float64),
        "a": np.float64(-1.0),
        "b": rounded(tokens, states),
        "c": rounded(tokens, states),
        "d": np.float64(0.5),
        "state": rng.standard_normal((states, channels)).astype(np.float32).astype(np.float64),
    }
    for name in "xbc":  # tf32 holds them
        np.testing.assert_array_equal(tf32(inputs[name]), inputs[name])
    shaped = {
        "x": inputs["x"][None, :, None],
        "dt": inputs["dt"][None, :, None],
        "a": inputs["a"][None],
        "b": inputs["b"][None, :, None],
        "c": inputs["c"][None, :, None],
        "d": inputs["d"][None],
        "state": inputs["state"][None, None],
    }
    expected = [value.reshape(-1, channels) for value in ssd(**shaped)]
    errors = {}
    for name, left, right in (("split", split_left, split_right), ("plain", core, core)):
        found = chunks(inputs, 32, left, right)
        errors[name] = [
            float(np.abs(got - true).max() / np.abs(true).max())
            for got, true in zip(found, expected, strict=True)
        ]
    assert max(errors["split"]) < 2e-6
    assert min(errors["plain"]) > 1e-4
