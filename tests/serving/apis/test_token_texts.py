"""Single tokens as text and bytes, for each kind of tokenizer: joined, they are what the tokenizer
decodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglcore.serving.apis.fill_in_middle import FILL, fill_marks, filled
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.replicas.server_errors import InvalidRequest

WORDS = ["a", "\u2581b", "<0xE2>", "<0x82>", "<0xAC>", "\u2581", "<0x0A>", "c"]
SPECIAL, SHOWN = "<end>", "<tool>"


def texts_of(tokenizer: Tokenizer) -> TokenTexts:
    def token(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    codec: Any = SimpleNamespace(tokenizer=tokenizer, token=token)
    return TokenTexts(codec)


def made(words: list[str], decoder: Any) -> Tokenizer:
    """A tokenizer of these pieces, with a special token and one that is only added."""
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken(SHOWN, special=False)])
    return tokenizer


def joined(texts: TokenTexts, tokenizer: Tokenizer) -> bytes:
    return b"".join(texts.data(token_id) for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)))


def test_pieces_of_a_byte_fallback_are_their_bytes_with_spaces_for_marks() -> None:
    chain = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    for decoder in (chain, decoders.Metaspace()):
        tokenizer = made(WORDS, decoder)
        assert joined(texts_of(tokenizer), tokenizer) == "a b€ \nc<end><tool>".encode()
    ids = list(range(len(WORDS)))
    assert made(WORDS, chain).decode(ids) == "a b€ \nc"


def test_without_marks_for_spaces_a_piece_is_what_the_tokenizer_decodes() -> None:
    words = ["a", "\u2581b", "<0x41>"]
    fallback = made(words, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    assert [texts_of(fallback).text(place) for place in range(3)] == ["a", "\u2581b", "A"]
    plain = made(words, decoders.Fuse())
    assert [texts_of(plain).text(place) for place in range(3)] == words
    nothing = made(words, None)
    assert [texts_of(nothing).text(place) for place in range(3)] == words


DECODERS: dict[str, Any] = {
    "marks": decoders.Replace("\u2581", " "),
    "bytes": decoders.ByteFallback(),
    "other marks": decoders.Replace("_", " "),
    "fuse": decoders.Fuse(),
    "words": decoders.WordPiece(),
}


@pytest.mark.parametrize(
    "names",
    [("marks",), ("bytes",), ("marks", "fuse"), ("bytes", "fuse"), ("other marks", "fuse"), ("fuse",), ("words",)],
)
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_piece_is_read_as_its_decoder_reads_it(names: tuple[str, ...], is_chain: bool) -> None:
    if not is_chain and len(names) > 1:
        return
    chain = [DECODERS[name] for name in names]
    tokenizer = made(["a", "\u2581b", "<0x41>", "_c"], decoders.Sequence(chain) if is_chain else chain[0])
    texts = texts_of(tokenizer)
    for token_id in range(4):
        assert texts.text(token_id) == tokenizer.decode([token_id], skip_special_tokens=False), token_id


def test_letters_of_a_byte_level_vocabulary_are_bytes_and_other_pieces_are_text() -> None:
    space, euro = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), "€"
    ((letters, _),) = space.pre_tokenize_str(f" {euro}\n")
    words = [*letters, "日"]
    for decoder in (decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel()])):
        tokenizer = made(words, decoder)
        texts = texts_of(tokenizer)
        assert b"".join(texts.data(place) for place in range(len(letters))) == f" {euro}\n".encode()
        assert texts.text(words.index("日")) == tokenizer.decode([words.index("日")])
        shown = [texts.text(place) for place in range(1, 4)]
        assert shown == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


def test_a_byte_below_sixteen_has_two_digits_and_each_token_a_text_of_its_own() -> None:
    chain = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = texts_of(made([f"<0x{byte:02X}>" for byte in range(256)], chain))
    shown = [texts.text(byte) for byte in range(256)]
    assert len(set(shown)) == 256 and shown[0x41] == "A" and shown[9] == "\t" and shown[0x80] == "bytes:\\x80"
    ((letters, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é")
    pair = texts_of(made([letters[1] + "a", letters[0] + chr(0x100 + 5)], decoders.ByteLevel()))
    assert pair.text(1) == "bytes:\\xc3\\x05"


def test_special_tokens_are_those_that_texts_leave_out_and_all_added_ones_have_their_names() -> None:
    tokenizer = made(["a"], decoders.ByteLevel())
    texts = texts_of(tokenizer)
    special, shown = 1, 2
    assert [tokenizer.id_to_token(each) for each in (special, shown)] == [SPECIAL, SHOWN]
    assert [texts.is_special(each) for each in (0, special, shown)] == [False, True, False]
    assert [texts.text(each) for each in (special, shown)] == [SPECIAL, SHOWN]
    unknown = tokenizer.get_vocab_size(with_added_tokens=True)
    assert [texts.is_unknown(each) for each in (0, special, shown, unknown)] == [False, False, False, True]
    assert (texts.data(unknown), texts.text(unknown)) == (b"", "")


def frontend(*marks: str, first: int = 0) -> Any:
    known = {mark: place for place, mark in enumerate(marks, first)}
    needed: list[tuple[str, str]] = []
    codec = SimpleNamespace(
        tokenizer=SimpleNamespace(token_to_id=known.get), need_text=lambda *given: needed.append(given), needed=needed
    )
    return SimpleNamespace(codec=codec)


@pytest.mark.parametrize("marks", FILL)
def test_a_text_is_filled_in_behind_both_of_its_sides_in_the_marks_of_the_model(marks: tuple[str, str, str]) -> None:
    served = frontend(*marks)
    begin, end, middle = marks
    assert fill_marks(served) == marks
    found = filled(served, "before", "after", param="suffix", instead="leave it out")
    assert found == f"{begin}before{end}after{middle}"
    assert [given[1] for given in served.codec.needed] == ["suffix"]


@pytest.mark.parametrize("first", range(len(FILL)))
def test_of_several_sets_of_marks_the_first_of_our_list_is_used(first: int) -> None:
    known = FILL[first:]
    assert fill_marks(frontend(*(mark for marks in reversed(known) for mark in marks))) == FILL[first]


@pytest.mark.parametrize("missing", range(3))
def test_a_model_that_has_some_of_the_marks_fills_in_nothing(missing: int) -> None:
    some = [mark for marks in FILL for place, mark in enumerate(marks) if place != missing]
    served = frontend(*some, first=5)
    assert fill_marks(served) is None
    with pytest.raises(InvalidRequest, match="leave it out, or serve") as refused:
        filled(served, "a", "b", param="suffix", instead="leave it out")
    assert refused.value.param == "suffix"
