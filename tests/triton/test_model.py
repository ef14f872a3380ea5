"""The model's logic on a stand-in for the server: order, ends, errors, cancels, numbers."""

from __future__ import annotations

import base64
import json
import shutil

import numpy as np
import pytest
from triton_stand_in import FINAL, Request, ids, text, until

from fixedstate.errors import BackendError, UsageError
from fixedstate.runtime import Request as Asked
from fixedstate.runtime import Settings, Snapshot, load
from fixedstate.runtime.text import Text
from fixedstate.serve import tritonmodel
from fixedstate.serve.tritonmodel import ModelSetup, check_numpy

QUESTION = "set arm_3 17\nget arm_3\n"
LONG = {"max_new_tokens": 40, "stop_ids": ""}  # three blocks of 16: nothing ends it early


@pytest.fixture(scope="module")
def alone(bundle):
    """Answers of the bundle itself: ``alone(ids, max_new_tokens=8, seed=3)``."""
    with load(bundle, threads=1) as decoder:

        def answer(prompt, **settings):
            return list(decoder.generate([Asked(prompt, Settings(**settings))])[0].token_ids)

        yield answer


@pytest.mark.parametrize(
    ("settings", "blocks"), [({"max_new_tokens": 3, "stop_ids": ""}, 1), (LONG, 3)]
)
def test_TS_10_one_final_flag_with_the_last_block(load_model, bundle, alone, settings, blocks):
    """A client that waits for the flag waits for ever without it, and is confused by two."""
    model = load_model()
    prompt = Text.open(bundle).encode(QUESTION)
    request = ids(*prompt, **settings)
    model.execute([request])
    sender = request.sender.wait()
    assert sender.flags == [0] * (blocks - 1) + [FINAL]
    assert [block["block_index"].tolist() for block in sender.blocks] == [
        [i] for i in range(blocks)
    ]
    reasons = [block["finish_reason"][0] for block in sender.blocks]
    assert reasons == [b""] * (blocks - 1) + [b"length"]
    assert sender.ids == alone(prompt, max_new_tokens=settings["max_new_tokens"], stop_ids=())
    assert sender.text == Text.open(bundle).decode(sender.ids)
    types = {name: array.dtype for name, array in sender.blocks[0].items()}
    assert types == {
        "text_output": np.dtype(object),
        "token_ids": np.dtype(np.int64),
        "block_index": np.dtype(np.int32),
        "finish_reason": np.dtype(object),
        "prompt_tokens": np.dtype(np.int64),
    } | ({"denoise_passes": np.dtype(np.int64)} if blocks == 1 else {})
    assert sender.blocks[0]["prompt_tokens"] == len(prompt)
    assert sender.blocks[-1]["denoise_passes"] >= blocks


def test_TS_10_refused_request_has_one_final_flag(load_model):
    """No block at all: the refusal is the last response."""
    request = ids(41, max_new_tokens=0)
    load_model().execute([request])
    sender = request.sender.wait()
    assert (sender.flags, sender.error.code) == ([FINAL], "invalid")


def test_TS_10_error_in_the_second_block_has_one_final_flag(load_model, backend):
    """The first block stays; the error of the second ends this request, and no other."""
    model = load_model()
    engine = model._decoder.engine
    bad, good = ids(41, 42, 43, **LONG), ids(44, 45, **LONG)
    engine_denoise = engine.denoise

    def denoise(canvas, first=0):
        logits = engine_denoise(canvas, first)
        if bad.sender.started.is_set() and not bad.sender.over.is_set():
            logits = logits.copy()
            logits[0] = np.nan  # the row that came first is in slot 0
        return logits

    engine.denoise = denoise
    model.execute([bad])
    until(bad.sender.started.is_set)
    model.execute([good])
    assert bad.sender.wait().flags == [0, FINAL], (str(bad.sender.error), backend.errors)
    assert "not finite" in str(bad.sender.error)
    assert bad.sender.error.code == "internal"
    assert len(good.sender.wait().ids) == 40
    assert backend.metrics["fixedstate_requests_total", "error"].value == 1


def test_a_failing_pass_ends_the_open_requests_and_no_later_one(load_model, backend, alone):
    """No state behind such a pass can be trusted; the next request begins from reset."""
    model = load_model()
    real = model._decoder.engine.denoise

    def fails(canvas, first=0):
        model._decoder.engine.denoise = real
        raise RuntimeError("secret of another package")

    model._decoder.engine.denoise = fails
    first, second = ids(41, 42, **LONG), ids(41, 42, max_new_tokens=8)
    model.execute([first])
    assert first.sender.wait().error.code == "internal"
    assert "secret" not in str(first.sender.error)
    assert any("secret" in line for line in backend.errors)
    model.execute([second])
    assert second.sender.wait().ids == alone([41, 42], max_new_tokens=8)


def test_TS_07_sixteen_seeds_together_are_each_as_alone(load_model, alone):
    """Rows share passes and slots are used again: nothing of one may be seen in another."""
    model = load_model(queue="64")
    prompts = [[41 + i % 5, 47, 40 + i] for i in range(16)]
    requests = [
        ids(*prompt, max_new_tokens=20 + i, seed=i, temperature=1.0)
        for i, prompt in enumerate(prompts)
    ]
    model.execute(requests)
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        expected = alone(prompt, max_new_tokens=20 + i, seed=i, temperature=1.0)
        assert request.sender.wait().ids == expected, i


BAD = {
    "mask": (ids(1, 2), "mask"),
    "both": (Request(text_input=np.array([b"a"], object), input_ids=np.array([1])), "both"),
    "neither": (Request(), "neither"),
    "unknown": (ids(41, top_p=0.5), "top_p"),
    "float": (ids(41, steps=1.5), "steps"),
    "flag": (ids(41, steps=True), "steps"),
    "text": (ids(41, steps="many"), "steps"),
    "negative-seed": (ids(41, seed=-1), "seed"),
    "seed-text": (ids(41, seed="1e3"), "seed"),
    "large-seed": (ids(41, seed=str(2**64)), "seed"),
    "temperature": (ids(41, temperature=-0.5), "temperature"),
    "infinite": (ids(41, temperature=float("inf")), "temperature"),
    "nan": (ids(41, threshold=float("nan")), "threshold"),
    "threshold": (ids(41, threshold=1.5), "threshold"),
    "most": (ids(41, max_new_tokens=100_001), "max_new_tokens"),
    "zero": (ids(41, max_tokens=0), "max_tokens"),
    "twice": (ids(41, max_tokens=1, max_new_tokens=1), "max_new_tokens"),
    "least-above-most": (ids(41, min_new_tokens=9, max_new_tokens=8), "min_new_tokens"),
    "stop-ids": (ids(41, stop_ids="1;2"), "stop_ids"),
    "stop-id-outside": (ids(41, stop_ids="999"), "stop ids"),
    "outside": (ids(41, 999), "999"),
    "below": (ids(-1), "prompt"),
    "long": (ids(*[41] * 257), "257"),
    "long-text": (text("a" * 70_000), "70000 bytes"),
    "no-text": (Request(text_input=np.array([], object)), "0 texts"),
    "not-utf8": (Request(text_input=np.array([b"\xff\xfe"], object)), "UTF-8"),
    "state": (ids(41, state="?"), "state"),
    "state-bytes": (ids(41, state=base64.b64encode(b"abc").decode()), "state"),
    "state-and-stop": (ids(41, return_state=True, stop="a"), "return_state"),
    "return-state": (ids(41, return_state=1), "return_state"),
}


def test_every_bad_request_is_refused_by_name_and_disturbs_nobody(load_model, backend, alone):
    """Each says what is wrong; a good one between them gets its answer."""
    model = load_model()
    good = ids(41, 42, 43, max_new_tokens=40)
    model.execute([good])
    for name, (request, words) in BAD.items():
        model.execute([request])
        sender = request.sender.wait()
        assert sender.flags == [FINAL], name
        assert sender.error.code == "invalid", name
        assert str(sender.error).startswith("INVALID_ARGUMENT: "), (name, str(sender.error))
        assert words in str(sender.error), (name, str(sender.error))
    assert good.sender.wait().ids == alone([41, 42, 43], max_new_tokens=40)
    assert backend.metrics["fixedstate_requests_total", "invalid"].value == len(BAD)
    assert backend.errors == []


def test_whole_numbers_as_texts(load_model, alone):
    """JSON over HTTP loses numbers from 2**31 on without a word; texts keep them."""
    request = ids(5, max_new_tokens=16, seed=str(2**64 - 1), temperature=1.0)
    load_model().execute([request])
    expected = alone([5], max_new_tokens=16, seed=2**64 - 1, temperature=1.0)
    assert request.sender.wait().ids == expected


def test_stop_text_ends_the_answer(load_model):
    """The text in front of it comes, the reason is stop, the slot is free."""
    whole, cut = (text(QUESTION, max_new_tokens=24), text(QUESTION, max_new_tokens=24, stop="17"))
    model = load_model()
    model.execute([whole, cut])
    before, found, _ = whole.sender.wait().text.partition("17")
    assert found, "the model no longer answers 17: take another stop text"
    assert (cut.sender.wait().text, cut.sender.reason) == (before, "stop")
    until(lambda: model._open_jobs == 0)


def test_full_queue_is_unavailable(load_model, backend):
    """One slot, one place: the third request is refused at once, the others are answered."""
    model = load_model(slots="1", queue="1")
    requests = [ids(41, max_new_tokens=2000, stop_ids="") for _ in range(3)]
    model.execute(requests)
    assert requests[2].sender.wait(1).error.code == "unavailable"
    assert str(requests[2].sender.error).startswith("UNAVAILABLE: ")
    assert "try again" in str(requests[2].sender.error)
    for request in requests[:2]:
        request.sender.gone = True
        assert request.sender.wait().error.code == "gone"
    assert backend.metrics["fixedstate_requests_total", "rejected"].value == 1
    again = ids(41, max_new_tokens=1)
    model.execute([again])
    assert again.sender.wait().error is None


def test_cancel_frees_the_slot(load_model, backend):
    """The one that waits for the slot is answered although the other would never end."""
    model = load_model(slots="1", queue="1")
    endless, next_one = ids(41, max_new_tokens=100_000, stop_ids=""), ids(42, max_new_tokens=4)
    model.execute([endless, next_one])
    until(endless.sender.started.is_set)
    assert not next_one.sender.started.is_set()
    endless.sender.gone = True
    assert endless.sender.wait().error.code == "gone"
    assert endless.sender.flags.count(FINAL) == 1
    assert next_one.sender.wait().error is None
    assert backend.metrics["fixedstate_requests_total", "cancelled"].value == 1
    until(lambda: backend.metrics["fixedstate_active_slots", ""].value == 0)


def test_broken_connection_ends_its_request_only(load_model):
    model = load_model()
    broken, good = ids(41, **LONG), ids(42, **LONG)
    broken.sender.broken = True
    model.execute([broken, good])
    assert broken.sender.wait().error.code == "internal"
    assert len(good.sender.wait().ids) == 40


def test_unloading_answers_what_is_open(load_model):
    """Nobody waits for ever."""
    model = load_model(slots="1", queue="2")
    requests = [ids(41, max_new_tokens=100_000, stop_ids="") for _ in range(3)]
    model.execute(requests)
    until(requests[0].sender.started.is_set)
    model.finalize()
    assert [r.sender.wait(5).error.code for r in requests] == ["unavailable"] * 3
    late = ids(41)
    model.execute([late])
    assert late.sender.wait(1).error.code == "unavailable"


def test_decoding_that_has_ended_says_so(load_model, backend):
    """Neither silence nor a wrong reason; a supervisor sees it, since this is not being busy."""
    model = load_model()

    def broken(*_):
        raise RuntimeError("broken")

    model._drop_cancelled = broken
    first, second = ids(41), ids(41)
    model.execute([first])
    assert first.sender.wait().error.code == "unavailable"
    model.execute([second])
    assert "load the model again" in str(second.sender.wait(1).error)
    assert first.sender.flags == second.sender.flags == [FINAL]


def test_numbers_are_counted(load_model, backend):
    request = ids(41, **LONG)
    model = load_model()
    model.execute([request])
    request.sender.wait()
    counted = {name: metric.value for (name, _), metric in backend.metrics.items() if metric.value}
    assert counted.pop("fixedstate_passes_total") >= 3
    state = model._decoder.engine.state_bytes()
    assert counted == {
        "fixedstate_requests_total": 1,
        "fixedstate_blocks_total": 3,
        "fixedstate_tokens_total": 40,
        "fixedstate_state_bytes": 4 * state,
    }


def test_a_state_goes_in_and_comes_back(load_model, bundle, alone):
    """Half of an answer here, half there, is the whole answer."""
    whole = alone([41, 42, 43], max_new_tokens=29, stop_ids=())
    model = load_model()
    first = ids(41, 42, 43, max_new_tokens=13, stop_ids="", return_state=True)
    model.execute([first])
    sender = first.sender.wait()
    state = sender.blocks[-1]["state"][0].decode()
    assert Snapshot.from_bytes(base64.b64decode(state)).past_length > 0
    rest = Request(
        {"max_new_tokens": 16, "stop_ids": "", "state": state}, input_ids=np.zeros(0, np.int64)
    )
    model.execute([rest])
    assert sender.ids + rest.sender.wait().ids == whole


# --- loading -------------------------------------------------------------------------------------


def test_old_server_with_numpy_2_is_refused_in_one_sentence():
    """Tensors would come out empty, without an error."""
    with pytest.raises(BackendError, match=r"numpy 2.4.6 .* install numpy<2") as found:
        check_numpy("2.4.6", "24.10")
    assert "\n" not in str(found.value)
    check_numpy("1.26.4", "24.10")
    check_numpy("2.4.6", "25.12")


def test_another_bundle_is_not_loaded(load_model, backend):
    """The configuration's limits are those of its own bundle."""
    with pytest.raises(backend.TritonModelException, match="write the repository again"):
        load_model(digest="0" * 64)


def test_damaged_bundle_is_not_loaded(load_model, backend, repository, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(repository.path, copy)
    weights = copy / "fixedstate" / "1" / "bundle" / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(backend.TritonModelException, match="changed after the export"):
        load_model(copy)


def test_model_that_is_not_decoupled_is_not_loaded(load_model, backend, monkeypatch):
    monkeypatch.setattr(backend, "using_decoupled_model_transaction_policy", lambda config: False)
    with pytest.raises(backend.TritonModelException, match="decoupled"):
        load_model()


@pytest.mark.parametrize("value", ["", "-1", "1.5", "many", "٣"])
def test_parameter_of_the_configuration_that_is_no_number(load_model, backend, value):
    with pytest.raises(backend.TritonModelException, match="slots"):
        load_model(slots=value)


def test_setup_is_read_back():
    setup = ModelSetup("a" * 64, slots=3, max_state_bytes=7, threads=2, target_version="25.01")
    given = setup.to_parameters()
    assert ModelSetup.from_parameters({**given, "EXECUTION_ENV_PATH": "x"}) == setup
    del given["queue"]
    with pytest.raises(UsageError, match="queue"):
        ModelSetup.from_parameters(given)


def test_outputs_of_the_configuration_are_those_of_the_model(repository):
    from fixedstate.export import tritonconfig

    config = tritonconfig.parsed((repository.path / "fixedstate" / "config.pbtxt").read_text())
    assert tuple(entry.name for entry in config.output) == tritonmodel.OUTPUTS
    assert json.loads((repository.path / "repository.json").read_text()) == repository.record
