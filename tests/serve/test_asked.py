"""What comes from outside is taken exactly as meant, or refused by name."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixedstate.errors import CapacityError, FixedStateError, StateError, UsageError
from fixedstate.runtime import Settings
from fixedstate.serve.asked import PARAMETERS, Asked, Limits, field_of, read, read_json
from fixedstate.serve.openai import read_call
from fixedstate.serve.stops import StopTexts

LIMITS = Limits(max_prompt_tokens=8, max_new_tokens=64, max_body_bytes=100, max_state_bytes=1000)


def test_everything_that_can_be_said():
    """The names are an interface: a client written today must be understood tomorrow."""
    given_ = {
        "max_new_tokens": 64,
        "min_new_tokens": 2,
        "steps": 3,
        "threshold": 1,
        "temperature": 0.5,
        "seed": 2**64 - 1,
        "stop": "END",
        "stop_ids": [],
        "return_state": True,
        "state": None,
    }
    assert set(given_) == set(PARAMETERS)
    asked = read(given_, LIMITS, ids=[1, 2])
    settings = Settings(64, 2, 3, 1.0, 0.5, 2**64 - 1, ())
    assert asked == Asked(None, (1, 2), settings, ("END",), None, True)


def test_nothing_said_takes_the_defaults():
    """A prompt alone is a whole request; the server's limit lowers the default."""
    assert read({}, Limits(max_new_tokens=7), text="").settings == Settings(7)
    assert read({"seed": None}, Limits(), text="x").settings == Settings()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_openai_names_mean_the_same(name):
    assert read({name: 5}, LIMITS, ids=[]).settings.max_new_tokens == 5


def test_ids_may_be_a_text():
    """Triton's parameters hold no lists."""
    assert read({"stop_ids": "3,4"}, LIMITS, ids=[]).settings.stop_ids == (3, 4)
    assert read({"stop_ids": ""}, LIMITS, ids=[]).settings.stop_ids == ()


WRONG = {
    **{
        f"{name}-{value!r:.10}": ({name: value}, name)
        for name in ("max_new_tokens", "min_new_tokens", "steps", "seed", "max_tokens")
        for value in (True, 1.0, "1", -1, [1], {}, 10**400)
    },
    **{
        f"{name}-{value!r:.10}": ({name: value}, name)
        for name in ("threshold", "temperature")
        for value in (True, "1", -0.1, float("nan"), float("inf"), [0.5], -(10**400))
    },
    "max_new_tokens-0": ({"max_new_tokens": 0}, "max_new_tokens"),
    "steps-0": ({"steps": 0}, "steps"),
    "steps-large": ({"steps": 1 << 17}, "steps"),
    "seed-large": ({"seed": 2**64}, "seed"),
    "threshold-high": ({"threshold": 1.01}, "threshold"),
    "least-above-most": ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
    "stop-number": ({"stop": 1}, "stop"),
    "stop-empty": ({"stop": ""}, "stop"),
    "stop-empty-entry": ({"stop": ["x", ""]}, "stop"),
    "stop-bytes": ({"stop": [b"x"]}, "stop"),
    "stop-long": ({"stop": "x" * 300}, "stop"),
    "stop-many": ({"stop": ["x"] * 17}, "stop"),
    "stop-surrogate": ({"stop": "\ud800"}, "stop"),
    "stop_ids-float": ({"stop_ids": [1.0]}, "stop_ids"),
    "stop_ids-bool": ({"stop_ids": [True]}, "stop_ids"),
    "stop_ids-text": ({"stop_ids": "1;2"}, "stop_ids"),
    "stop_ids-many": ({"stop_ids": [1] * 17}, "stop_ids"),
    "return_state-number": ({"return_state": 1}, "return_state"),
    "return_state-text": ({"return_state": "true"}, "return_state"),
    "state-list": ({"state": [1]}, "state"),
    "state-no-base64": ({"state": "a b"}, "state"),
    "state-not-ascii": ({"state": "ä"}, "state"),
    "both-names": ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_name(case):
    """`True` passes int() and NaN every comparison: either would decode something else."""
    given_, name = WRONG[case]
    with pytest.raises((UsageError, CapacityError), match=name) as caught:
        read(given_, LIMITS, ids=[1])
    assert field_of(caught.value) == name
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["top_k", "Seed", "", "max_new_token", "x" * 5000, "\ud800"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UsageError, match="unknown parameter") as caught:
        read({name: None}, LIMITS, ids=[1])
    assert len(str(caught.value)) < 300


PROMPTS = {
    "none": ({}, UsageError),
    "both": ({"text": "x", "ids": [1]}, UsageError),
    "text-number": ({"text": 1}, UsageError),
    "text-bytes": ({"text": b"x"}, UsageError),
    "text-surrogate": ({"text": "\udcff"}, UsageError),
    "text-long": ({"text": "ä" * 51}, CapacityError),
    "ids-text": ({"ids": "1"}, UsageError),
    "ids-number": ({"ids": 1}, UsageError),
    "ids-float": ({"ids": [1.0]}, UsageError),
    "ids-bool": ({"ids": [True]}, UsageError),
    "ids-negative": ({"ids": [-1]}, UsageError),
    "ids-nested": ({"ids": [[1]]}, UsageError),
    "ids-many": ({"ids": [1] * 9}, CapacityError),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_wrong_prompts_are_refused(case):
    prompt, kind = PROMPTS[case]
    with pytest.raises(kind, match="prompt") as caught:
        read({}, LIMITS, **prompt)
    assert type(caught.value) is kind
    assert field_of(caught.value) == "prompt"


def test_limits_are_kept():
    with pytest.raises(CapacityError, match="max_tokens is 65; the server gives 64"):
        read({"max_tokens": 65}, LIMITS, ids=[1])
    with pytest.raises(CapacityError, match="state has 1001 bytes"):
        read({"state": base64.b64encode(bytes(1001)).decode()}, LIMITS, ids=[1])
    with pytest.raises(UsageError, match="takes no saved states"):
        read({"state": ""}, Limits(max_state_bytes=0), ids=[1])
    with pytest.raises(StateError, match="state"):
        read({"state": base64.b64encode(bytes(99)).decode()}, LIMITS, ids=[1])


def test_text_needs_a_tokenizer():
    """A model without one takes ids, and ids only."""
    with pytest.raises(UsageError, match="no tokenizer"):
        read({}, LIMITS, text="x").request(None, LIMITS)
    with pytest.raises(UsageError, match="stop_ids"):
        read({"stop": "x"}, LIMITS, ids=[1]).request(None, LIMITS)


def test_encoded_prompts_are_held_to_the_limit(text):
    asked = read({}, LIMITS, text="1 2 3 4 5 6 7 8 9")
    with pytest.raises(CapacityError, match="prompt has 9 tokens; the server takes 8"):
        asked.request(text, LIMITS)


@pytest.mark.parametrize(
    "field", ["max_prompt_tokens", "max_new_tokens", "max_body_bytes", "queue"]
)
@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_limits_are_checked(field, value):
    with pytest.raises(UsageError, match=field):
        Limits(**{field: value})


# --- bodies


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "a JSON object"),
        (b"null", "a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        (b"\xff\xfe\x00", "no JSON"),
        (b'{"a": "\xff"}', "no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bodies_that_are_no_plain_object(body, words):
    with pytest.raises(UsageError, match=words) as caught:
        read_json(body)
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(body):
    """Nothing else may come out of a parser that strangers feed."""
    with contextlib.suppress(UsageError):
        assert isinstance(read_json(body), dict)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "model", "n", "stop", "seed", "stream", "stream_options", "temperature"]
    + ["user", "state", "stop_ids", "logit_bias", "response_format", "max_tokens"]
)


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from([None, "{text}\n"]))
def test_any_body_is_read_or_refused_with_words(body, turn):
    """A fault would be a 500 that anybody can cause."""
    refused = ""
    try:
        asked = read_call(body, LIMITS, model="model", turn=turn).asked
    except FixedStateError as err:
        refused = str(err)
    assert (len(refused) in range(1, 400)) or (asked.text is None) != (asked.ids is None)


# --- stop texts


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_texts_do_not_depend_on_how_text_arrives(whole, stops, data):
    """Blocks cut text anywhere: also in the middle of a stop text."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    found = StopTexts(stops)
    sent = ""
    for piece in pieces:
        sent += found.push(piece)
        assert whole.startswith(sent)
    sent += found.finish()
    ends = {stop: whole.find(stop) + len(stop) for stop in stops if stop in whole}
    assert found.found == bool(ends)
    first = [stop for stop in ends if ends[stop] == min(ends.values())]
    assert sent == (whole[: ends[first[0]] - max(map(len, first))] if ends else whole)
