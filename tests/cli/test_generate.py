"""`generate` over a scripted model: what it prints, and with which exit code."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import fixedstate.runtime
from fixedstate.bundle import Bundle
from fixedstate.cli.canvas import CanvasView
from fixedstate.runtime import BlockEvent, PassEvent, Request, Settings, load
from fixedstate.runtime.engine import SessionEngine
from fixedstate.runtime.text import Text

FIELDS = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "blocks": int,
    "denoise_passes": int,
    "tokens_per_pass": float,
    "state_bytes": int,
    "kv_bytes": int,
    "seconds": dict,
    "provider": str,
    "forced_slots": int,
    "seed": int,
    "prompt_tokens": int,
}
PHASES = {"load", "prefill", "denoise", "policy", "commit", "total"}


def test_one_prompt_gives_one_object(run, bundle, scripted):
    """Scripts read these fields by name."""
    done = run("generate", bundle, "--prompt", "ab", "--max-new-tokens", 10, "--seed", 7, "--json")
    assert (done.code, done.err) == (0, "")
    data = done.json
    for name, kind in FIELDS.items():
        assert isinstance(data[name], kind), name
    assert data["text"] == "cdefghijkl"
    assert data["token_ids"] == list(range(5, 15))
    assert (data["finish_reason"], data["seed"], data["prompt_tokens"]) == ("length", 7, 2)
    assert set(data["seconds"]) >= PHASES
    assert data["tokens_per_pass"] == 10 / data["denoise_passes"]


def test_several_prompts_give_an_array_in_order(run, bundle, scripted, tmp_path):
    """An item answers the prompt at its place: texts, then ids, then files."""
    file = tmp_path / "prompt.txt"
    file.write_text("abcd")
    done = run(
        *("generate", bundle, "--prompt-ids", "3,4,5", "--prompt-file", file, "--prompt", "a"),
        *("--prompt", "ab", "--max-new-tokens", 1, "--json"),
    )
    assert [row["prompt_tokens"] for row in done.json] == [1, 2, 3, 4]
    assert [row["text"] for row in done.json] == ["b", "c", "d", "e"]
    assert scripted["slots"] == 4


def test_text_of_one_prompt_ends_with_a_line_break(run, bundle, scripted):
    done = run("generate", bundle, "--prompt", "ab", "--max-new-tokens", 10)
    assert (done.code, done.out, done.err) == (0, "cdefghijkl\n", "")


def test_streamed_and_unstreamed_text_are_the_same(run, bundle, scripted):
    shown = [
        run("generate", bundle, "--prompt", "a", "--max-new-tokens", 18, option).out
        for option in ("--stream", "--no-stream")
    ]
    assert shown == ["bcdefghijklmnopqrs\n"] * 2


def test_several_texts_are_told_apart(run, bundle, scripted):
    done = run("generate", bundle, "--prompt", "a", "--prompt", "", "--max-new-tokens", 2)
    assert done.out == "=== 1\nbc\n=== 2\nab\n"


@pytest.mark.parametrize("option", ["--prompt", "--prompt-ids"])
def test_empty_prompt_works(run, bundle, scripted, option):
    done = run("generate", bundle, option, "", "--max-new-tokens", 3, "--json")
    assert (done.code, done.json["text"], done.json["prompt_tokens"]) == (0, "abc", 0)


def test_stop_is_not_in_the_text(run, bundle, scripted):
    data = run("generate", bundle, "--prompt", "", "--json").json
    assert data["finish_reason"] == "stop"
    assert (data["token_ids"][-1], data["text"][-1]) == (2, "t")


def test_prompt_may_come_from_standard_input(run, bundle, scripted):
    done = run("generate", bundle, "--prompt-file", "-", "--max-new-tokens", 1, input="abc")
    assert done.out == "d\n"


def test_options_reach_the_runtime(run, bundle, scripted):
    run(
        *("generate", bundle, "--prompt", "a", "--threads", 2, "--provider", "cuda"),
        *("--allow-fallback", "--max-context", 256, "--json"),
    )
    assert scripted["threads"] == 2
    assert scripted["provider"] == "cuda"
    assert scripted["allow_fallback"] is True
    assert scripted["limit"] == 256


def test_steps_bound_the_passes(run, bundle, scripted):
    data = run(
        "generate", bundle, "--prompt", "", "--max-new-tokens", 16, "--steps", 2, "--json"
    ).json
    assert (data["blocks"], data["denoise_passes"]) == (2, 4)


def test_help_states_the_defaults_of_the_settings(run):
    """They are written in two places, so one test holds them together."""
    text = " ".join(run("generate", "--help").out.split())
    settings = Settings()
    for option, value in (
        ("--max-new-tokens", settings.max_new_tokens),
        ("--min-new-tokens", settings.min_new_tokens),
        ("--seed", settings.seed),
    ):
        assert f"[default: {value}]" in text.split(f"{option} N", 1)[1][:90], option


def test_interrupt_keeps_finished_blocks(run, bundle, scripted):
    """Ctrl-C in the second block: the first one is printed, the exit code is 130."""
    scripted["faults"]["interrupt_at"] = 10  # 8 passes a block
    done = run("generate", bundle, "--prompt", "", "--json")
    assert done.code == 130
    assert (done.json["text"], done.json["finish_reason"]) == ("abcdefgh", "cancelled")
    done = run("generate", bundle, "--prompt", "")
    assert (done.code, done.out) == (130, "abcdefgh\n")


def test_interrupt_between_blocks_keeps_them_too(run, bundle, scripted, monkeypatch):
    """Ctrl-C may come while a block is being printed, outside of the runtime."""
    from fixedstate.runtime import text

    class Slow:
        def __init__(self):
            self.calls = 0

        def push(self, ids):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return "".join(chr(94 + i) for i in ids)

        def finish(self):
            return ""

    opened = text.Text.open("")
    monkeypatch.setattr(opened, "incremental", Slow, raising=False)
    monkeypatch.setattr(text.Text, "open", lambda _: opened)
    done = run("generate", bundle, "--prompt", "")
    assert (done.code, done.out) == (130, "abcdefgh\n")


def test_interrupt_before_the_first_block(run, bundle, scripted):
    scripted["faults"]["interrupt_at"] = 0
    done = run("generate", bundle, "--prompt", "a", "--prompt", "b", "--json")
    assert done.code == 130
    assert [(row["text"], row["finish_reason"]) for row in done.json] == [("", "cancelled")] * 2


def test_interrupt_while_loading(run, bundle, monkeypatch):
    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fixedstate.runtime, "load", load)
    done = run("generate", bundle, "--prompt", "a")
    assert (done.code, done.out) == (130, "")
    assert done.lines[-1] == "error: interrupted"


def test_ids_without_a_tokenizer(run, make_bundle, scripted):
    """A checkpoint of another program may bring no tokenizer; ids still work."""
    folder = make_bundle("bare.bundle", tokenizer=False)
    done = run("generate", folder, "--prompt-ids", "3,4", "--max-new-tokens", 3, "--json")
    assert (done.code, done.json["text"], done.json["token_ids"]) == (0, None, [5, 6, 7])
    assert run("generate", folder, "--prompt-ids", "3,4", "--max-new-tokens", 3).out == "5,6,7\n"


def test_watch_without_a_terminal_says_so(run, bundle, scripted):
    done = run("generate", bundle, "--prompt", "ab", "--max-new-tokens", 2, "--watch")
    assert (done.code, done.out) == (0, "cd\n")
    assert done.lines == [
        "note: --watch needs a terminal on standard error; decoding goes on without it"
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_watch_shows_open_and_filled_slots(monkeypatch):
    """Open slots are drawn as such, and a control character of a token never moves the cursor."""
    from sample_models import MODELS

    monkeypatch.setattr("sys.stderr", Terminal())
    spec = MODELS["F3"]
    mask = spec.mask_id

    def decode(ids):
        return "".join({1: "\n", 2: "\x1b"}.get(i, chr(94 + i)) for i in ids)

    def event(step, *canvas):
        return PassEvent((0,), np.array([canvas]), (0,), (step,), (0,))

    view = CanvasView(spec, decode, [[3, 4]])
    view.on_pass(event(0, 3, 4, 5, mask, mask, 1, mask, mask))
    picture = view.render()
    assert picture.plain == "abc░░⏎░░\n"
    assert [str(span.style) for span in picture.spans][:4] == ["dim", "dim", "bold reverse", "dim"]
    view.on_pass(event(1, 3, 4, 5, 6, 2, 1, 7, 8))
    picture = view.render()
    assert picture.plain == "abcd·⏎ef\n"
    fresh = [picture.plain[s.start : s.end] for s in picture.spans if s.style == "bold reverse"]
    assert fresh == ["d", "·", "e", "f"]
    view.on_block(BlockEvent(0, 0, (5, 6, 7, 8), "length"))
    assert view.render().plain == "cdef\n"


def test_watch_of_a_whole_sequence_begins_behind_the_prompt(monkeypatch):
    """No slot of the first block is given by the prompt."""
    from sample_models import attention_layer, model

    monkeypatch.setattr("sys.stderr", Terminal())
    spec = model(attention_layer(), objective="full")
    view = CanvasView(spec, lambda ids: "".join(chr(94 + i) for i in ids), [[3, 4]])
    canvas = [3, 4] + [spec.mask_id] * 6
    view.on_pass(PassEvent((0,), np.array([canvas]), (0,), (0,), (2,)))
    assert [str(span.style) for span in view.render().spans][:3] == ["bold reverse"] * 2 + ["dim"]


def test_OR_01_missing_provider_is_an_error(run, bundle):
    """Asked for a card and given the processor in silence: slow, and nobody knows why."""
    done = run("generate", bundle, "--prompt-ids", "3", "--provider", "tensorrt", "--json")
    assert (done.code, done.out) == (1, "")
    assert len(done.lines) == 1
    assert "'tensorrt'" in done.lines[0]


def test_unknown_provider_is_a_usage_error(run, bundle):
    done = run("generate", bundle, "--prompt-ids", "3", "--provider", "quantum")
    assert (done.code, done.out) == (2, "")
    assert "'quantum' is unknown" in done.lines[0]


@pytest.mark.parametrize("objective", ["causal", "full"])
def test_model_without_a_mask_is_refused_with_the_reason(run, make_bundle, scripted, objective):
    changes = {"objective": objective, "mask_id": None}
    roles = ("full",) if objective == "full" else ("denoise", "commit")
    folder = make_bundle("other.bundle", "F2-forward", roles, **changes)
    done = run("generate", folder, "--prompt-ids", "3")
    assert done.code == 2
    assert f"objective '{objective}'" in done.lines[0]


def test_ids_outside_the_vocabulary_are_refused(run, bundle, scripted):
    done = run("generate", bundle, "--prompt-ids", "1,99")
    assert (done.code, done.out) == (2, "")
    assert "id 99 at place 1 is outside the vocabulary 0..36" in done.lines[0]


def test_request_beyond_the_limit_runs_nothing(run, bundle, scripted):
    done = run("generate", bundle, "--prompt", "abc", "--max-new-tokens", 6, "--max-context", 8)
    assert (done.code, done.out) == (1, "")
    assert "the limit is 8" in done.lines[0]


# --- states: samples, prefixes, what is saved

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "schema-2" / "bundle"
WORDS = "set arm 3 17 get arm set arm 5 29 get arm"  # 12 tokens, blocks of 8


def answers(prompts, new=12, **settings):
    with load(GOLDEN, threads=1) as decoder:
        rows = [Request(prompt, Settings(new, **settings)) for prompt in prompts]
        return [list(result.token_ids) for result in decoder.generate(rows)]


def encode(text):
    return Text.open(Bundle.open(GOLDEN)).encode(text)


@pytest.fixture
def real(run):
    """`real("--prompt", "set", ...)`: generate over a small model, as JSON."""
    options = ("--max-new-tokens", 12, "--threads", 1, "--json")
    return lambda *words: run("generate", GOLDEN, *words, *options)


@pytest.fixture
def committed(monkeypatch):
    """Tokens of every commit call, in a list."""
    calls, commit = [], SessionEngine.commit

    def counted(self, ids, lengths, first=0):
        calls.append(int(lengths.sum()))
        return commit(self, ids, lengths, first)

    monkeypatch.setattr(SessionEngine, "commit", counted)
    return calls


def test_samples_have_seeds_of_their_own(real, committed):
    """Every prompt is committed once; a sample is what its seed gives alone."""
    prompts = [encode(WORDS), [5] * 17]
    done = real(
        *("--prompt", WORDS, "--prompt-ids", ",".join(["5"] * 17), "--samples", 3),
        *("--temperature", 1, "--seed", 7),
    )
    assert done.code == 0
    assert committed[:2] == [8, 16]  # whole blocks of both prompts
    assert [row["seed"] for row in done.json] == [7, 8, 9] * 2
    assert [row["prompt_tokens"] for row in done.json] == [12] * 3 + [17] * 3
    expected = [
        answers([prompt], temperature=1.0, seed=seed)[0] for prompt in prompts for seed in (7, 8, 9)
    ]
    assert [row["token_ids"] for row in done.json] == expected
    assert expected[0] != expected[1]


def test_samples_are_told_apart(run):
    done = run("generate", GOLDEN, "--prompt", "set", "--samples", 2, "--max-new-tokens", 3)
    assert [line for line in done.out.splitlines() if line.startswith("===")] == [
        *("=== 1, seed 0", "=== 1, seed 1")
    ]


def test_samples_need_no_state(run, bundle, scripted, monkeypatch):
    """A model that sees the whole sequence has nothing to fork: each sample is decoded."""
    engine = type(fixedstate.runtime.load(bundle).engine)
    monkeypatch.setattr(engine, "whole_blocks", False)
    done = run(
        "generate", bundle, "--prompt", "ab", "--samples", 2, "--max-new-tokens", 8, "--json"
    )
    assert done.code == 0, done.err
    assert [(row["seed"], row["text"]) for row in done.json] == [(0, "cdefghij"), (1, "cdefghij")]


def test_wrong_samples_run_nothing(real, committed):
    """The second prompt does not fit: the first one is not committed."""
    done = real(
        *("--prompt", WORDS, "--prompt-ids", ",".join(["5"] * 50), "--samples", 2),
        *("--max-context", 48),
    )
    assert (done.code, done.out, committed) == (1, "", [])
    assert "the limit is 48" in done.err
    done = real("--prompt", WORDS, "--samples", 2, "--seed", 2**64 - 1)
    assert (done.code, committed) == (2, [])
    assert "seed must be below 2**64" in done.err


@pytest.mark.parametrize("samples", [1, 2])
def test_prompts_go_on_from_a_saved_state(run, real, tmp_path, samples):
    """As if its text stood before them."""
    file = tmp_path / "system.state"
    assert run("prefix", "make", GOLDEN, "--ids", ",".join(["5"] * 19), "-o", file).code == 0
    done = real("--prompt", WORDS, "--prompt-ids", "", "--prefix", file, "--samples", samples)
    assert done.code == 0, done.err
    expected = answers([[5] * 19 + encode(WORDS), [5] * 19])
    assert [row["token_ids"] for row in done.json[::samples]] == expected
    assert [row["prompt_tokens"] for row in done.json[::samples]] == [12, 0]
    assert {row["prefix_tokens"] for row in done.json} == {19}


def test_a_state_is_saved_and_gone_on_from(real, tmp_path):
    """Two commands are one sequence; what is there is kept without --force."""
    file = tmp_path / "a.state"
    first = real("--prompt", WORDS, "--save-state", file).json
    second = real("--prompt", "get arm", "--prefix", file)
    whole = [*encode(WORDS), *first["token_ids"], *encode("get arm")]
    assert second.json["token_ids"] == answers([whole])[0]
    assert second.json["prefix_tokens"] == 24
    before = file.read_bytes()
    done = real("--prompt", "get", "--save-state", file)
    assert (done.code, done.out) == (2, "")
    assert "a.state exists" in done.err
    assert file.read_bytes() == before
    assert real("--prompt", "get", "--save-state", file, "--force").code == 0
    assert file.read_bytes() != before


@pytest.mark.parametrize("words", [("--prompt", "get"), ("--samples", 2)])
def test_one_state_is_of_one_answer(real, tmp_path, words):
    done = real("--prompt", "set", *words, "--save-state", tmp_path / "a.state")
    assert (done.code, done.out) == (2, "")
    assert "--save-state takes one prompt and one sample" in done.err


def test_text_behind_a_state_has_no_second_begin_token(real, run, tmp_path, monkeypatch):
    """The tokenizer's begin token stands once, where the sequence begins."""
    asked = []
    plain = Text.encode
    monkeypatch.setattr(
        Text,
        "encode",
        lambda self, text, **how: asked.append((text, how)) or plain(self, text, **how),
    )
    file = tmp_path / "a.state"
    assert real("--prompt", "set", "--save-state", file).code == 0
    assert real("--prompt", "get", "--prefix", file).code == 0
    assert [how["goes_on"] for _, how in asked] == [False, True]


def test_a_broken_pass_leaves_no_state(run, tmp_path, monkeypatch):
    """Ctrl-C inside a pass: blocks are kept, the state is not, and that is said."""
    denoise, calls = SessionEngine.denoise, []

    def interrupted(self, ids, first=0):
        calls.append(1)
        if len(calls) == 12:  # in the second block
            raise KeyboardInterrupt
        return denoise(self, ids, first)

    monkeypatch.setattr(SessionEngine, "denoise", interrupted)
    file = tmp_path / "a.state"
    done = run("generate", GOLDEN, "--prompt", "", "--json", "--save-state", file)
    assert (done.code, done.json["new_tokens"]) == (130, 8)
    assert "a.state was not written" in done.err
    assert not file.exists()


def test_slots_bound_what_runs_at_once(run, bundle, scripted):
    """16 unless given, and never more than there are answers."""
    few = ("generate", bundle, "--prompt", "a", "--prompt", "b", "--prompt", "c", "--json")
    assert len(run(*few, "--slots", 2).json) == 3
    assert scripted["slots"] == 2
    run(*few)
    assert scripted["slots"] == 3
    run("generate", bundle, *["--prompt", "a"] * 20, "--max-new-tokens", 1)
    assert scripted["slots"] == 16
