"""Text to ids and back."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from toy_bundle import toy_spec, write_toy_bundle

from fixedstate.errors import BundleError, UsageError
from fixedstate.runtime.text import Text

SPEC = toy_spec(vocab_size=260, vocab_rows=264, mask_id=258, stop_ids=(257,), bos_id=256)


def byte_tokenizer(*, begin=True, size=260):
    """Ids 0..255 are bytes, then begin, stop, mask, one more special, and further words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<mask>", "<pad>"])
    if size > 260:
        made.add_tokens([f"<word{i}>" for i in range(260, size)])
    if begin:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return made


@pytest.fixture
def text():
    return Text(byte_tokenizer(), SPEC)


@pytest.mark.parametrize("words", ["hello", "", "naïve 雪 🙂", "a\nb  c"])
def test_round_trip(text, words):
    """Any text comes back, without the begin token."""
    ids = text.encode(words)
    assert ids[0] == 256
    assert text.decode(ids) == words


def test_never_two_begin_tokens(text):
    """The text itself may begin with one; explicit ids are nobody's business here."""
    assert text.encode("<s>hi") == text.encode("hi")
    assert Text(byte_tokenizer(begin=False), SPEC).encode("hi") == text.encode("hi")[1:]


@pytest.mark.parametrize("words", ["hello", "", "naïve 雪 🙂", "<s>hi"])
def test_text_that_goes_on_has_nothing_around_it(text, words):
    """Two pieces are the tokens of the whole; a begin token that is written stays written."""
    assert text.encode(words, goes_on=True) == Text(byte_tokenizer(begin=False), SPEC).encode(words)
    assert [*text.encode("a b"), *text.encode(words, goes_on=True)] == text.encode("a b" + words)


def test_stop_ids_and_specials_are_not_text(text):
    """A stop id is in token_ids, not in the text."""
    ids = text.encode("yes")[1:]
    assert text.decode([256, *ids, 259, 258, 257]) == "yes"
    assert text.decode([*ids, 262, 9999]) == "yes"
    assert text.decode([]) == ""


def test_ids_outside_the_vocabulary_are_refused():
    """A tokenizer may know more tokens than the model has."""
    text = Text(byte_tokenizer(size=263), SPEC)
    with pytest.raises(UsageError, match="token 262 .'<word262>'., outside the .* of 260"):
        text.encode("a<word262>")


@pytest.mark.parametrize("piece", [1, 2, 5])
def test_incremental_text_is_the_whole_text(text, piece):
    """Characters of several bytes come when they are whole, over any cut of the ids."""
    words = "naïve 雪 🙂 end"
    ids = [*text.encode(words)[1:], 257]
    stream = text.incremental()
    parts = [stream.push(ids[i : i + piece]) for i in range(0, len(ids), piece)]
    assert "".join(parts) + stream.finish() == words
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_comes_at_the_end(text):
    """A limit may cut a character in the middle."""
    ids = text.encode("ab雪")[1:-1]
    stream = text.incremental()
    assert stream.push(ids) == "ab"
    assert stream.finish() == text.decode(ids)[2:]
    assert stream.finish() == ""


def test_open_reads_the_bundles_tokenizer(tmp_path, toy):
    """From its folder; without one the message says what to give instead."""
    content = byte_tokenizer().to_str().encode()
    sizes = {"vocab_size": 37, "vocab_rows": 40}
    folder = write_toy_bundle(tmp_path / "t.bundle", files={"tokenizer.json": content}, **sizes)
    assert Text.open(folder).decode([0, 1]) == byte_tokenizer().decode([0, 1])
    with pytest.raises(UsageError, match="has no tokenizer.json: give --prompt-ids"):
        Text.open(toy)
    damaged = write_toy_bundle(tmp_path / "d.bundle", files={"tokenizer.json": b"{"})
    with pytest.raises(BundleError, match=r"tokenizer.json is damaged"):
        Text.open(damaged)
