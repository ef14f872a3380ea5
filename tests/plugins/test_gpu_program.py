"""The program for a card (tests/gpu), run against a stand-in for the driver.

Whether kernels are right only a card shows. Whether the program hands them the right arguments,
runs everything that ships and reports what is wrong is shown here: a fault is put in, one at a
time, and has to be found.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_stand_in import StandIn, from_bits, to_bits

from fixedstate.plugins import driver as door
from fixedstate.plugins.driver import Driver
from fixedstate.plugins.schema import KERNEL_IO, OPS

HERE = Path(__file__).resolve().parent
GPU = HERE.parent / "gpu"
sys.path.append(str(GPU))

import card  # noqa: E402
import card_errors  # noqa: E402
import card_replay  # noqa: E402
import card_times  # noqa: E402
import run  # noqa: E402


@pytest.fixture
def library():
    return StandIn()


@pytest.fixture
def few(monkeypatch):
    """One tile of each operator, in float16: enough to find a fault."""
    some = {name: dataclasses.replace(spec, tiles=spec.tiles[:1]) for name, spec in OPS.items()}
    monkeypatch.setattr(card_errors, "OPS", some)
    monkeypatch.setattr(card_errors, "KERNEL_IO", ("float16",))
    monkeypatch.setattr(card_errors, "SMALL_CASES", 6)
    names = [card_errors.file_name(spec, spec.tiles[0], "float16") for spec in some.values()]
    monkeypatch.setattr(card_errors, "_shipped", lambda: dict.fromkeys(names))


def measured(part, library, seconds=100.0):
    with Driver(library=library) as driver:
        result = part.measure(card.Card(driver, True, seconds, False))
        assert driver.allocated == 0
    return result


# --- nothing wrong --------------------------------------------------------------------------------


def test_whole_program(tmp_path):
    """As a user starts it, each part in a process of its own."""
    out = tmp_path / "results.json"
    command = [sys.executable, "-W", "error", str(GPU / "run.py"), "--small", "--out", str(out)]
    command += ["--stand-in", f"{HERE.parent / 'cuda_stand_in.py'}:StandIn"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert results["problems"] == results["cut"] == []
    assert not results["about"]["real"]
    errors, replay, times = (results["parts"][name] for name in ("errors", "replay", "times"))
    # every text that ships was launched, with and without skipped tails
    texts = {row["text"] for row in errors["rows"]}
    assert len(texts) == results["about"]["texts"] == len(errors["rows"])
    assert all(row["cases"] == 2 and 0 < row["used"] < 1 for row in errors["rows"])
    assert [run["blocks"] for run in replay["runs"]] == [6, 3]
    assert {row["op"] for row in times["rows"]} == set(OPS)
    assert all(row["floor_us"] > 0 and row["graph_us"] > 0 for row in times["rows"])
    page = out.with_suffix(".md").read_text()
    assert page in done.stdout
    assert "A stand-in took the place of the card" in page
    assert "Everything was right" not in page
    assert all(f"| {name} | bfloat16 |" in page for name in OPS)
    width = {
        line.count("|") for line in page.splitlines() if line.startswith("| CausalConvDenoise")
    }
    assert len(width) == 2  # of two tables


def test_what_is_imported_is_light():
    """numpy, the driver and nothing else: the card's machine may have no more."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import run, card_errors, card_replay\n"
        "import card_times, card_report\n"
        "print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(GPU)], capture_output=True, text=True, check=True
    )
    found = set(done.stdout.split())
    assert not found & {"torch", "onnx", "onnx_ir", "triton", "click", "rich", "safetensors"}


def test_no_driver_is_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(door, "LIBRARY", "libcuda-that-is-not-there.so.1")
    out = tmp_path / "results.json"
    assert run.main(["--out", str(out)]) == 1
    assert "no CUDA driver" in json.loads(out.read_text())["problems"][0]
    assert "no CUDA driver" in capsys.readouterr().out


def test_part_that_dies_leaves_the_others(tmp_path, monkeypatch):
    """Its process ends without a result, or never ends."""
    options = run.argparse.Namespace(stand_in="no-such-file.py:X", small=True)
    assert run.child("errors", 60.0, options)["problems"] == [
        "its process ended with 1 and left no result"
    ]
    monkeypatch.setattr(run, "GRACE", 0.0)
    found = run.child("errors", 0.01, options)["problems"]
    assert found == ["ended after 0 s, before it had a result"]


def test_part_that_raises_has_a_problem(library, capsys):
    library.total = 0
    found = run.run_part("replay", 60.0, True, library)
    assert found["problems"][0].startswith("stopped by BackendError: cuMemAlloc_v2 failed with")
    assert "Traceback" in capsys.readouterr().err


def test_time_that_is_up_is_named(library, few):
    assert measured(card_errors, library, -1.0)["cut"] == ["54 of 54 cases"]
    assert measured(card_replay, library, -1.0)["cut"] == [
        "float16: all of it",
        "bfloat16: all of it",
    ]
    assert measured(card_times, library, -1.0)["cut"] == ["18 of 18 shapes"]


# --- bfloat16 -------------------------------------------------------------------------------------


def test_bfloat16_by_hand():
    numbers = np.array([1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 0, 3e38, 1e-40])
    stored = card.encode(numbers, "bfloat16")
    expected = [0x3F80, 0xC000, 0x3F80, 0x3F82, 0x3F81, 0, 0x7F62, 1]
    assert [hex(v) for v in stored] == [hex(v) for v in expected]
    assert card.encode(np.array([3.4e38]), "bfloat16")[0] == 0x7F80
    assert np.isnan(card.decode(card.encode(np.array([np.nan]), "bfloat16"), "bfloat16")).all()
    assert np.isnan(card.decode(card.empty("bfloat16", (2,)), "bfloat16")).all()


def test_bfloat16_is_rounded_to_nearest_even():
    """Two ways to round, and the neighbours: nothing that can be stored is nearer."""
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal(20000) * 10.0 ** rng.integers(-30, 30, 20000)).astype(np.float32)
    stored = card.encode(numbers, "bfloat16")
    np.testing.assert_array_equal(stored, to_bits(numbers, "bfloat16"))
    back = card.decode(stored, "bfloat16")
    np.testing.assert_array_equal(back, from_bits(stored, "bfloat16"))
    error = np.abs(back - numbers)
    assert (error <= card_errors.ROUNDING["bfloat16"] * np.abs(numbers)).all()
    for neighbour in (stored - np.uint16(1), stored + np.uint16(1)):
        other = card.decode(neighbour, "bfloat16")
        assert (error <= np.abs(other - numbers)).all()
    again = card.encode(back, "bfloat16")
    np.testing.assert_array_equal(again, stored)


# --- which shapes ---------------------------------------------------------------------------------


def test_every_text_has_cases_and_the_paper_shape():
    """On a card: short and long blocks, several blocks, rows and widths below the padded one."""
    for spec in OPS.values():
        for tile in spec.tiles:
            found = card_errors.cases(spec, tile, small=False)
            assert len(found) >= card_errors.CASES_PER_TEXT, (spec.name, tile.label)
            assert all(tile in spec.tiles_for(sizes, length) for sizes, length in found)
            assert len({sizes["T"] for sizes, _ in found}) > 2
            assert len({sizes["B"] for sizes, _ in found}) > 1
        every = [case for tile in spec.tiles for case in card_errors.cases(spec, tile, small=False)]
        assert any(
            sizes.get("H") == 80 or sizes.get("E", sizes.get("C", 0)) > 5000 for sizes, _ in every
        )
        if card_errors.family(spec) == "conv":
            assert {sizes["K"] for sizes, _ in every} == {2, 3, 4, 8}
        if not spec.single_block:
            assert {sizes["T"] // length for sizes, length in every} >= {1, 2, 3}
        if card_errors.family(spec) == "ssd":
            assert {sizes["W"] > 1 for sizes, _ in every} == {True, False}
            assert {sizes["G"] for sizes, _ in every} >= {1, 2, 4}
            assert {sizes["N"] for sizes, _ in every} & {16, 48, 80, 112, 144, 240}


# --- faults ---------------------------------------------------------------------------------------


def swap(first, second):
    """Another argument vector: two pointers change places."""

    def vector(spec, launch, address):
        known = dict(address)
        if first in known and second in known:
            known[first], known[second] = known[second], known[first]
        return card_vector(spec, launch, known)

    return vector


def other_number(name, change):
    def vector(spec, launch, address):
        found = card_vector(spec, launch, address)
        if name in spec.argument_names:
            where = len(spec.inputs) + spec.argument_names.index(name)
            found[where] = ("int32", change(found[where][1]))
        return found

    return vector


card_vector = card.vector


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("b", "c", "Ssd"),
        ("x", "y", "Causal"),
        ("weight", "bias", "Causal"),
        ("state", "new_state", "Ssd"),
        ("a", "d", "Selective"),
        ("y", "new_state", "Selective"),
    ],
)
def test_swapped_pointers_are_found(monkeypatch, library, few, first, second, names):
    monkeypatch.setattr(card, "vector", swap(first, second))
    found = measured(card_errors, library)["problems"]
    affected = {
        spec.torch_name
        for spec in OPS.values()
        if {first, second} <= {port.name for port in spec.ports}
    }
    assert {text.partition(".")[0] for text in found} == affected
    assert any(OPS[name].torch_name in affected for name in OPS if name.startswith(names))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("T", lambda v: v - 1),
        ("T", lambda v: v + 1),
        ("W", lambda v: 16 if v == 1 else 1),
        ("L", lambda v: v * 2),
        ("K", lambda v: v + 1),
    ],
)
def test_wrong_numbers_are_found(monkeypatch, library, few, name, change):
    monkeypatch.setattr(card, "vector", other_number(name, change))
    found = measured(card_errors, library)["problems"]
    for spec in OPS.values():
        if name in spec.argument_names:
            assert any(text.startswith(spec.torch_name + ".") for text in found), spec.name


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_grids_that_are_too_small_are_found(monkeypatch, library, few, axis):
    """Cells that nobody writes stay what they were: not a number."""
    launch_of = card.KernelSpec.launch

    def smaller(spec, sizes, tile):
        found = launch_of(spec, sizes, tile)
        grid = list(found.grid)
        grid[axis] = max(1, grid[axis] - 1)
        return dataclasses.replace(found, grid=tuple(grid))

    monkeypatch.setattr(card.KernelSpec, "launch", smaller)
    found = measured(card_errors, library)["problems"]
    assert found
    assert any("not finite or were not written" in text for text in found)


@pytest.mark.parametrize(
    ("port", "change", "finds"),
    [
        (0, lambda v: v * (1 + 2e-3), True),
        (1, lambda v: v + 3e-5 * np.abs(v).max(), True),
        (1, lambda v: v + 3e-6 * np.abs(v).max(), False),
        (1, lambda v: np.where(v == v.flat[3], np.nan, v), True),
    ],
)
def test_tolerance(monkeypatch, library, few, port, change, finds):
    """Twice the rounding of an output, or three times what a float32 state may be off."""

    def alter(spec, outputs):
        if len(outputs) > port and not (port and spec.name.startswith("Causal")):
            outputs[port] = change(outputs[port])

    library.alter = alter
    found = measured(card_errors, library)["problems"]
    assert bool(found) == finds
    if finds and port:
        assert {text.partition(".")[0] for text in found} == {"ssd_commit", "scan_commit"}


def test_copied_window_has_to_be_equal(library, few):
    def alter(spec, outputs):
        if spec.name == "CausalConvCommit":
            outputs[1].flat[-1] *= 1.001

    library.alter = alter
    (text, *_) = measured(card_errors, library)["problems"]
    assert text.startswith("conv_commit.float16.")
    assert "new_state: 1 copies differ" in text


def test_writes_outside_are_found(library, few):
    def alter(spec, outputs):
        if spec.name == "SelectiveScanDenoise":
            newest = max(library.allocations)
            for address in (newest, *list(library.allocations)[-2:]):
                library.view(address, 1)[0] = 0

    library.alter = alter
    found = measured(card_errors, library)["problems"]
    assert found
    assert all(text.startswith("scan_denoise.") for text in found)
    assert any("bytes around it were written" in text for text in found)


def test_changed_inputs_are_found(library, few):
    def alter(spec, outputs):
        if spec.name == "SsdBlockDenoise":
            first = list(library.allocations)[-8]  # x: seven inputs and an output are there
            library.view(first + card.GUARD, 2)[:] ^= 1

    library.alter = alter
    found = measured(card_errors, library)["problems"]
    assert found
    assert all("input x was changed" in text for text in found), found


def test_fault_in_one_text_leaves_the_others(library, few):
    library.faults["ssd_reverse"] = 700
    result = measured(card_errors, library)
    (text,) = result["problems"]
    assert text.startswith("ssd_reverse.")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in text
    assert result["cases"] == 54


def test_text_that_no_case_is_for_is_found(monkeypatch, library, few):
    monkeypatch.setattr(card_errors, "shapes", lambda spec, small: iter(()))
    assert len([t for t in measured(card_errors, library)["problems"] if "no case" in t]) == 9


def test_text_that_the_table_does_not_know_is_found(monkeypatch, library, few):
    known = card_errors._shipped()
    monkeypatch.setattr(card_errors, "_shipped", lambda: {**known, "old.ptx": {}})
    assert measured(card_errors, library)["problems"] == ["old.ptx"]


# --- faults of the chain --------------------------------------------------------------------------


def replayed(library):
    return measured(card_replay, library)["problems"]


def test_capture_that_runs_is_found(library):
    """What a warm-up on the live states would do."""
    library.eager_capture = True
    assert any("warm-up or capture changed a live state" in text for text in replayed(library))


def test_graph_that_lost_a_layer_is_found(library):
    library.lost = 1
    found = replayed(library)
    assert any("outputs differ from those of single launches" in text for text in found)
    assert any("states differ from those of single launches" in text for text in found)
    assert any("layer 1: new_state" in text for text in found)


@pytest.mark.parametrize("always", [True, False])
def test_states_that_are_not_swapped_are_found(monkeypatch, library, always):
    """In the graphs and the launches alike, so that only the reference can tell."""
    run_of = card_replay.Chain.run

    def stuck(chain, kernel, text, launch, stream, read, write):
        if read[0] is chain.odd[0] or (always and read[0] is chain.even[0]):
            read, write = (chain.even, chain.odd) if always else (chain.odd, chain.odd)
        run_of(chain, kernel, text, launch, stream, read, write)

    monkeypatch.setattr(card_replay.Chain, "run", stuck)
    found = replayed(library)
    assert any("new_state" in text for text in found)


def test_memory_that_grows_is_found(monkeypatch, library):
    feed = card_replay.Chain.feed
    kept = []

    def leaking(chain, block, stream):
        kept.append(chain.driver.allocate(16))
        feed(chain, block, stream)

    monkeypatch.setattr(card_replay.Chain, "feed", leaking)
    with Driver(library=library) as driver:
        found = card_replay.measure(card.Card(driver, True, 100.0, False))["problems"]
    assert "float16: 96 bytes of device memory were taken" in found


def test_states_of_single_launches_and_graphs_are_compared(library):
    """A chain whose results depend on how often it ran is no longer the same chain."""
    count = iter(range(10**6))

    def alter(spec, outputs):
        outputs[1].flat[0] += 1e-7 * next(count)

    library.alter = alter
    assert any("differ from those of single launches" in text for text in replayed(library))


def test_texts_are_all_known():
    """The stand-in tells texts apart by their hash, so no two may be equal."""
    hashes = [
        spec.text(tile, io).sha256
        for spec in OPS.values()
        for tile in spec.tiles
        for io in KERNEL_IO
    ]
    assert len(set(hashes)) == len(hashes)
