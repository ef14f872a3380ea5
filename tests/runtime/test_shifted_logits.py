"""Models whose logits predict the next position: slots are scored by the position before them."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import ScriptedEngine, decode, decode_all, noise_table, one_hot, small_spec

from fixedstate.errors import UsageError
from fixedstate.runtime.requests import Request, Settings

LENGTH = 8


def names_next(spec, history):
    """Each position's best token says where the next one stands: position modulo 30."""
    return one_hot(spec, (len(history) + 1 + np.arange(spec.block_len)) % 30)


@pytest.fixture
def engine():
    spec = small_spec(logit_shift=True)
    return ScriptedEngine(spec, lambda history, ids: names_next(spec, history))


@pytest.mark.parametrize("prompt_len", range(1, 2 * LENGTH + 2))
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_every_slot_takes_the_logits_before_it(engine, prompt_len, steps):
    """Across the left edge of the block too, for every remainder of the prompt."""
    prompt = [29] * prompt_len
    result = decode(engine, prompt, max_new_tokens=20, steps=steps)
    expected = [(prompt_len + i) % 30 for i in range(20)]
    assert list(result.token_ids) == expected


def test_an_empty_prompt_is_refused(engine):
    """Nothing predicts the first position; no pass is spent on finding out."""
    with pytest.raises(UsageError, match="predicts the next position.*at least one token"):
        decode(engine, [], max_new_tokens=4)
    assert engine.denoised == 0


def test_the_refusal_names_the_begin_id():
    """Where the model has one."""
    engine = ScriptedEngine(small_spec(logit_shift=True, bos_id=3))
    with pytest.raises(UsageError, match="such as its begin id 3"):
        decode(engine, [], max_new_tokens=4)


def test_rows_keep_their_own_last_logits():
    """A row decodes alone as in a batch, whichever rows finish and leave before it."""
    spec = small_spec(logit_shift=True)
    requests = [
        Request(
            [i + 1] * n, Settings(max_new_tokens=m, steps=s, temperature=t, seed=i, stop_ids=())
        )
        for i, (n, m, s, t) in enumerate(
            [(3, 30, 2, 0.0), (8, 5, 8, 0.7), (17, 20, 1, 0.0), (1, 40, 3, 1.0), (9, 9, 2, 0.0)]
        )
    ]
    together = decode_all(ScriptedEngine(spec, noise_table(spec), slots=3), requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = decode_all(ScriptedEngine(spec, noise_table(spec), slots=1), [request])
        assert alone.token_ids == result.token_ids
