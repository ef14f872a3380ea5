"""State buffers: swap pairs, appended columns, growth, rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_bundle import toy_spec

from fixedstate.errors import CapacityError, StateError
from fixedstate.runtime.buffers import StateBuffers
from fixedstate.state import Precision, StateSpec

SPEC = toy_spec()
STATE = StateSpec.of(SPEC)


def buffers(slots=3, **options):
    return StateBuffers(STATE, slots, SPEC.block_len, **options)


def commit(target, lengths, value):
    """Commit `lengths` tokens per row; everything written is `value`."""
    rows = len(lengths)
    lengths = np.array(lengths)
    target.reserve(rows, lengths)
    side = target.align(rows)
    for port in STATE.swapped:
        past, present = target.past(port, side, rows), target.present(port, side, rows)
        keep = (lengths == 0).reshape(-1, *[1] * (past.ndim - 1))
        present[:] = np.where(keep, past, value)
    width = -(-max(int(lengths.max()), 1) // 8) * 8
    columns = {
        port.suffix: np.full(port.present.resolve(B=rows, n=width // 8), value, np.float32)
        for port in STATE.appended
    }
    target.commit(rows, lengths, columns)


def test_starts_at_the_reset_value():
    """Finite everywhere, nothing committed."""
    made = buffers()
    assert all((array == 0).all() for array in made.read(0).values())
    assert made.past_length.tolist() == [0, 0, 0]
    assert made.capacity == 256


def test_swap_and_append():
    """A commit shows in both kinds of port, for the rows with a length only."""
    made = buffers()
    commit(made, [8, 0, 16], 5)
    commit(made, [8, 8], 7)
    assert made.past_length.tolist() == [16, 8, 16]
    rows = [made.read(row) for row in range(3)]
    assert [row["ssm_state_001"].flat[0] for row in rows] == [7, 7, 5]
    assert rows[0]["key_000"][0, :, 0].tolist() == [5] * 8 + [7] * 8
    assert rows[1]["key_000"][0, :, 0].tolist() == [7] * 8
    assert rows[2]["value_000"][0, :, 0].tolist() == [5] * 16


@pytest.mark.parametrize("leave", ["reset", "move", "write"])
def test_what_was_no_number_is_gone_with_its_request(leave):
    """A weight of 0 does not keep NaN in unused columns from the row that comes next."""
    made = buffers()
    commit(made, [16, 8, 0], 5)
    for port in STATE.appended:
        made.past(port, 0, 3)[0, :, 8:16] = np.nan
    if leave == "reset":
        made.reset(0)
    elif leave == "move":
        made.move(1, 0)
    else:
        made.write(0, made.read(1), 8)
    for port in STATE.appended:
        assert (made.past(port, 0, 3)[0, :, made.past_length[0] :] == 0).all()
    assert (made.read(1)["key_000"] == 5).all()


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=12), st.data())
def test_rows_keep_their_state_whatever_runs(steps, data):
    """Any mix of batch sizes, moves and resets: each row holds what it was last given."""
    made, model = buffers(4), [0.0] * 4
    lengths = [0] * 4
    for value, step in enumerate(steps, start=1):
        commit(made, [8 * run for run in step], value)
        for row, run in enumerate(step):
            model[row] = value if run else model[row]
            lengths[row] += 8 * run
        source, target = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        made.move(source, target)
        model[target], lengths[target] = model[source], lengths[source]
        if data.draw(st.booleans()):
            made.reset(source)
            model[source], lengths[source] = 0.0, 0
    assert [made.read(row)["conv_state_001"].flat[0] for row in range(4)] == model
    assert made.past_length.tolist() == lengths
    assert [made.read(row)["key_000"].shape[1] for row in range(4)] == lengths


def test_capacity_grows_by_powers_of_two_and_keeps_columns():
    """One copy at a time, zero behind the tokens."""
    made = buffers(2)
    for step in range(70):
        commit(made, [8, 0], step)
    assert made.capacity == 1024
    assert made.read(0)["key_000"][0, ::8, 0].tolist() == list(range(70))
    assert made.read(1)["key_000"].shape[1] == 0
    port = STATE.appended[0]
    assert (made.past(port, 0, 2)[:, :, 560:] == 0).all()


def test_room_is_checked_before_anything_is_written():
    """A commit past the limit is refused with capacity and need; the state stays."""
    made = buffers(2, limit=32)
    assert made.capacity == 32
    commit(made, [24, 32], 1)
    before = made.hash()
    with pytest.raises(CapacityError, match="row 1 holds 32 .* 8 more .* 40; the limit is 32"):
        made.reserve(2, np.array([8, 8]))
    assert made.hash() == before
    assert made.reserve(2, np.array([8, 0])) is False


def test_growth_that_fails_leaves_the_buffers(monkeypatch):
    """No memory is an error with numbers, not a half-grown state."""
    made = buffers(2)
    commit(made, [8, 8], 3)
    before, real, calls = made.hash(), np.zeros, []

    def failing(shape, dtype):
        calls.append(shape)
        if len(calls) > 1:
            raise MemoryError
        return real(shape, dtype)

    monkeypatch.setattr(np, "zeros", failing)
    with pytest.raises(CapacityError, match="no memory for past_value_000"):
        made.reserve(2, np.array([512, 0]))
    monkeypatch.undo()
    assert made.hash() == before
    assert made.capacity == 256


def test_read_and_write_are_inverse():
    """A state that was read can be put into another row, elsewhere, at any time."""
    one, two = buffers(), buffers()
    commit(one, [16, 8], 4)
    two.write(2, one.read(0), 16)
    for name, array in one.read(0).items():
        assert (two.read(2)[name] == array).all()
    before = two.hash()
    with pytest.raises(StateError, match="'key_000' has shape"):
        two.write(1, one.read(0), 8)
    assert two.hash() == before


def test_hash_names_the_port_that_changed():
    """One bit of one row changes the digest of its port alone."""
    made = buffers()
    before = made.hash()
    made.past(STATE.swapped[1], made.align(3), 3)[2, 0, 0, 0] = -0.0
    after = made.hash()
    assert [name for name in before if before[name] != after[name]] == ["ssm_state_001"]


def test_bytes_are_those_of_the_spec():
    """Reports and the state's description agree."""
    made = buffers(2)
    assert made.state_bytes == STATE.state_bytes()
    assert made.nbytes["ssm_state_001"] == 2 * 2 * 8 * 8 * 8 * 4
    assert made.kv_bytes(100) == 1600
    half = StateBuffers(StateSpec.of(SPEC, Precision.named("fp16")), 1, 8)
    assert half.read(0)["conv_state_001"].dtype == np.float16
    assert half.read(0)["ssm_state_001"].dtype == np.float32
