"""Prefixes: what is made is what a request would have, and the store never gives anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from holder import Holder
from hypothesis import given
from hypothesis import strategies as st
from sample_models import attention_layer, mamba_layer, model

from fixedstate.bundle import Bundle
from fixedstate.errors import CapacityError, StateError, UsageError
from fixedstate.runtime.decoder import open_engine
from fixedstate.runtime.prefix import PrefixStore, make_prefix
from fixedstate.runtime.snapshot import Snapshot

BUNDLE = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
KEYS_ONLY = model(attention_layer(), block_len=4)  # bytes grow with the tokens
BLOCK = 4


def engine(**options):
    return open_engine(Bundle.open(BUNDLE), threads=1, **options)


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 36, count)


def state_of(tokens, spec=KEYS_ONLY, **options):
    """Some state behind that many tokens."""
    holder = Holder(spec, slots=1, **options)
    holder.fill(0, len(tokens), seed=int(np.sum(tokens)) if len(tokens) else 0)
    return Snapshot.take(holder, 0)


# --- making one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 3, 8, 30])
@pytest.mark.parametrize("count", [0, 5, 16, 27])
def test_a_prefix_goes_on_from_another(count, more):
    """In the slices of one prefix of both where the first ends with a slice, byte for byte."""
    one, tokens = engine(), ids(count + more)
    first = make_prefix(one, tokens[:count], 2)
    both = make_prefix(one, tokens[count:], 2, seed=3, prefix=first)
    whole = make_prefix(one, tokens, 2, seed=3)
    assert (both.past_length, both.pending, both.seed) == (whole.past_length, whole.pending, 3)
    if count in (0, 16):
        assert both.to_bytes() == whole.to_bytes()
    for name, array in whole.arrays.items():
        np.testing.assert_allclose(both.arrays[name], array, rtol=1e-4, atol=1e-5)


def test_a_prefix_of_two_is_held_to_the_limit_and_the_model():
    """Before anything is run."""
    small = engine(limit=24)
    first = make_prefix(small, ids(17), 2)
    with pytest.raises(CapacityError, match="has 32 tokens in whole blocks; the limit is 24"):
        make_prefix(small, ids(15), 2, prefix=first)
    other = state_of(ids(8), weights="e" * 64)
    with pytest.raises(StateError, match="was made with weights"):
        make_prefix(small, ids(1), 2, prefix=other)


@pytest.mark.parametrize("count", [0, 5, 8, 24, 51])
def test_a_prefix_is_what_a_request_would_have(count):
    """Whole blocks in slices from the first token, byte for byte; the rest is pending."""
    one, two = engine(), engine(slots=3)
    one.commit(ids(16)[None], np.array([16]))
    tokens = ids(count, seed=1)
    found = make_prefix(one, tokens.tolist(), prefill_blocks=2, seed=5)
    whole = count // 8 * 8
    for first in range(0, whole, 16):
        piece = tokens[None, first : min(first + 16, whole)]
        two.commit(piece, np.array([piece.shape[1]]), 2)
    expected = Snapshot.take(two, 2, tuple(tokens[whole:].tolist()), seed=5)
    assert found.to_bytes() == expected.to_bytes()
    assert (found.past_length, len(found.pending)) == (whole, count % 8)


@pytest.mark.parametrize("cut", [0, 3, 8, 13, 16, 24, 40])
def test_a_prefix_that_goes_on_from_another_ends_alike(cut):
    """Its pending ids come first, and slices stay those counted from the first token."""
    one, tokens, prefill = engine(), ids(60, seed=2), 2
    alone = make_prefix(one, tokens, prefill)
    first = make_prefix(one, tokens[:cut], prefill)
    found = make_prefix(one, tokens[cut:], prefill, prefix=first)
    assert (found.past_length, found.pending) == (alone.past_length, alone.pending)
    for name, array in found.arrays.items():
        np.testing.assert_allclose(array, alone.arrays[name], atol=1e-5, err_msg=name)
    if cut // 8 % prefill == 0:
        assert found.to_bytes() == alone.to_bytes()


def test_a_prefix_does_not_go_on_from_that_of_another_model():
    """Nothing is run and nothing written."""
    one = engine()
    one.commit(ids(8)[None], np.array([8]))
    before = one.buffers.hash()
    with pytest.raises(StateError, match="the state was made with weights"):
        make_prefix(one, ids(8), 2, prefix=state_of(ids(8)))
    first = make_prefix(engine(), ids(29), 2)
    with pytest.raises(CapacityError, match="32 tokens in whole blocks; the limit is 24"):
        make_prefix(engine(limit=24), ids(5), 2, prefix=first)
    assert one.buffers.hash() == before


def test_prefixes_that_do_not_fit_are_refused_before_a_pass():
    """By the limit in whole blocks, and by ids that are no tokens."""
    small = engine(limit=32)
    small.commit(ids(8)[None], np.array([8]))
    before = small.buffers.hash()
    with pytest.raises(CapacityError, match="40 tokens in whole blocks; the limit is 32"):
        make_prefix(small, ids(45), 16)
    with pytest.raises(UsageError, match="prefix ids: id 36 at place 1 is the mask"):
        make_prefix(small, [1, 36], 16)
    assert small.buffers.hash() == before
    assert make_prefix(small, ids(39), 16).past_length == 32


# --- the store ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "prompt", "prefill", "blocks"),
    [
        ([2], 2, 2, 2),
        ([2, 4, 6], 5, 2, 4),
        ([2, 4, 6], 6, 2, 6),
        ([1, 2, 3], 3, 16, 3),
        ([1, 2, 3], 5, 16, None),
        ([3], 4, 2, None),
        ([16, 17], 17, 16, 17),
        ([16, 17], 18, 16, 16),
        ([4], 3, 2, None),
        ([], 3, 2, None),
        ([1], 0, 1, None),
    ],
)
@pytest.mark.parametrize("rest", [0, 3])
def test_the_longest_state_with_the_same_slices_is_found(stored, prompt, prefill, blocks, rest):
    """A multiple of the slice, or all whole blocks of the prompt: else the slices would shift."""
    tokens = ids(30 * BLOCK)
    store = PrefixStore(10**6)
    for count in stored:
        store.put(tokens[: count * BLOCK], state_of(tokens[: count * BLOCK]))
    found = store.find(tokens[: prompt * BLOCK + rest], BLOCK, prefill)
    assert (found and found[0]) == blocks
    assert (store.hits, store.misses) == (int(blocks is not None), int(blocks is None))
    assert store.tokens_saved == (blocks or 0) * BLOCK
    if found:
        assert found[1].past_length == blocks * BLOCK


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "find"]),
        st.lists(st.integers(0, 1), max_size=5),  # blocks of two kinds: prefixes of one another
        st.integers(0, BLOCK - 1),
    ),
    max_size=40,
)


@given(OPERATIONS, st.integers(0, 4000), st.integers(1, 3))
def test_a_store_is_bounded_and_never_wrong(operations, max_bytes, prefill):
    """The bound holds after every step, counters add up, and what is found is a stored prefix."""
    store = PrefixStore(max_bytes)
    finds = added = 0
    for name, blocks, rest in operations:
        tokens = np.repeat(blocks, BLOCK).astype(np.int64)
        if name == "put" and blocks:
            before, evictions = len(store), store.evictions
            state = state_of(tokens)
            refused = store.refused
            store.put(tokens, state)
            assert store.refused - refused == (state.nbytes > max_bytes)
            added += len(store) - before + store.evictions - evictions
        elif name == "find":
            finds += 1
            prompt = np.concatenate([tokens, np.full(rest, 9)])
            saved = store.tokens_saved
            found = store.find(prompt, BLOCK, prefill)
            assert store.tokens_saved - saved == (found[0] * BLOCK if found else 0)
            if found:
                count, state = found
                assert count % prefill == 0 or count == len(blocks)
                assert state.to_bytes() == state_of(tokens[: count * BLOCK]).to_bytes()
        assert 0 <= store.bytes <= max_bytes
        assert store.bytes == sum(state.nbytes for state in store._states.values())
    assert store.hits + store.misses == finds
    assert len(store) == added - store.evictions


def test_the_least_recently_used_state_goes_first():
    """A look-up counts as use; a state put again takes its own place."""
    tokens = [np.full(BLOCK, kind) for kind in range(4)]
    states = [state_of(row) for row in tokens]
    store = PrefixStore(3 * states[0].nbytes)
    for kind in range(3):
        store.put(tokens[kind], states[kind])
    store.put(tokens[1], states[1])
    assert store.find(tokens[0], BLOCK, 1) == (1, states[0])
    store.put(tokens[3], states[3])
    assert [bool(store.find(row, BLOCK, 1)) for row in tokens] == [True, True, False, True]
    assert (store.evictions, len(store), store.bytes) == (1, 3, store.max_bytes)
    store.clear()
    assert (len(store), store.bytes, store.find(tokens[0], BLOCK, 1)) == (0, 0, None)


@pytest.mark.parametrize(
    ("tokens", "changes", "words"),
    [
        (ids(6), {}, "6 tokens and 0 pending ones"),
        ([], {}, "0 tokens"),
        (ids(8), {"pending": (1,)}, "8 tokens and 1 pending ones"),
        (ids(12), {}, "that of 8 tokens, not 12"),
        ([1.5] * 8, {}, "whole numbers; got float64"),
        (ids(8)[None], {}, "flat list"),
    ],
)
def test_states_of_other_tokens_are_refused(tokens, changes, words):
    """A store that took them would give them to the wrong prompt."""
    holder = Holder(KEYS_ONLY, slots=1).fill(0, 8)
    state = Snapshot.take(holder, 0, **changes)
    store = PrefixStore(10**6)
    with pytest.raises(UsageError, match=words):
        store.put(tokens, state)
    assert len(store) == 0


def test_a_store_serves_one_model():
    """The same tokens have another state there."""
    tokens = ids(8)
    store = PrefixStore(10**6)
    store.put(tokens, state_of(tokens))
    with pytest.raises(StateError, match="another model or precision: use a store for each"):
        store.put(tokens, state_of(tokens, weights="e" * 64))
    with pytest.raises(StateError, match="another model"):
        store.put(tokens, state_of(tokens, model(mamba_layer(), block_len=4)))
    with pytest.raises(UsageError, match="max_bytes must be 0 or more; got -1"):
        PrefixStore(-1)


def test_a_prompt_goes_on_from_the_store_byte_for_byte():
    """With and without the store the state behind a prompt is the same."""
    one, prompt, prefill = engine(slots=2), ids(75), 2
    store = PrefixStore(10**6)
    for end in (16, 32, 48):
        store.put(prompt[:end], make_prefix(one, prompt[:end], prefill))
    alone = make_prefix(one, prompt, prefill)
    blocks, state = store.find(prompt, 8, prefill)
    assert blocks == 6
    state.restore(one, 1)
    for first, end in ((48, 64), (64, 72)):
        one.commit(prompt[None, first:end], np.array([end - first]), 1)
    assert Snapshot.take(one, 1, alone.pending).to_bytes() == alone.to_bytes()
