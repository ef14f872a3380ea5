"""The kernels that ours are timed against are handed the same sum, in their own layouts.

Here on the CPU, with this package's tensor operations as they are, and with stand-ins of the
published functions, which take what those take ([B, D, L], [B, H, P, N]).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fixedstate.plugins import reference
from fixedstate.plugins.schema import OPS

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

import card_errors
import card_peers

SMALL = {
    "conv": {"C": 32, "K": 4},
    "ssd": {"H": 4, "P": 16, "G": 2, "N": 16, "W": 1},
    "scan": {"E": 32, "N": 16},
}


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch):
    def small(spec, length, rows):
        return {"B": rows, "T": length, "L": length, **SMALL[card_errors.family(spec)]}

    monkeypatch.setattr(card_peers, "DEVICE", "cpu")
    monkeypatch.setattr(card_peers, "paper", small)


def as_torch(*arrays):
    return tuple(torch.from_numpy(array).half() for array in arrays)


def chunk_scan(x, dt, A, B, C, chunk_size, D=None, initial_states=None, return_final_states=False):
    assert chunk_size & (chunk_size - 1) == 0
    assert initial_states.shape == (*x.shape[:1], *x.shape[2:], B.shape[-1])
    y, state = reference.ssd(x, dt, A, B, C, D, initial_states.transpose(2, 3))
    return as_torch(y, state)


def selective_scan(u, delta, A, B, C, D=None, return_last_state=False):
    assert u.dtype == delta.dtype
    assert A.shape == (u.shape[1], B.shape[1])
    rows = [v.transpose(1, 2) for v in (u, delta, B, C)]
    zero = torch.zeros(u.shape[0], A.shape[1], u.shape[1])
    y, state = reference.selective_scan(rows[0], rows[1], A.T, rows[2], rows[3], D, zero)
    return as_torch(y.transpose(0, 2, 1), state)


def causal_conv(x, weight, bias, initial_states=None, return_final_states=False, activation=None):
    assert activation == "silu"
    assert x.stride(1) == initial_states.stride(1) == 1  # channels last, as theirs asks for
    y, state = reference.causal_conv(x.transpose(1, 2), weight, bias, initial_states)
    return as_torch(y.transpose(0, 2, 1), state)


@pytest.fixture
def published(monkeypatch):
    for name, attribute, function in (
        ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", chunk_scan),
        ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", selective_scan),
        ("causal_conv1d", "causal_conv1d_fn", causal_conv),
    ):
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(name)
        setattr(module, attribute, function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", OPS)
def test_tensor_operations_give_the_same(name):
    t, numbers = card_peers._tensors(OPS[name], 2, 12)
    got = card_peers._eager(OPS[name], t, 12)()
    assert card_peers._far(OPS[name], numbers, 12, "torch", got) < 2e-3


@pytest.mark.parametrize("name", OPS)
def test_published_kernels_are_asked_for_the_same(name, published):
    t, numbers = card_peers._tensors(OPS[name], 2, 12)
    call = card_peers._published(OPS[name], t, 12)
    assert (call is None) == (not name.endswith("Commit"))
    if call:
        assert card_peers._far(OPS[name], numbers, 12, "published", call()) < 2e-3


def test_another_sum_is_far(published):
    spec = OPS["SsdBlockCommit"]
    t, numbers = card_peers._tensors(spec, 1, 12)
    t["b"], t["c"] = t["c"], t["b"]
    assert card_peers._far(spec, numbers, 12, "torch", card_peers._eager(spec, t, 12)()) > 0.05


def test_absent_kernels_are_a_note(monkeypatch):
    """Nothing installed: what there is to say is said once."""
    for name in ("mamba_ssm", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(card_peers, "_time", lambda call: (1.0, "graph"))
    card = type("Card", (), {"left": lambda self: 1.0})()
    found, notes = card_peers.measure(card)
    assert {entry["peer"] for entry in found} == {"torch"}
    assert len(found) == 6 * len(OPS)
    assert len(notes) == 3
    assert all("absent" in note for note in notes)


def test_without_a_card_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, notes = card_peers.measure(None)
    assert found == []
    assert "sees no card" in notes[0]
