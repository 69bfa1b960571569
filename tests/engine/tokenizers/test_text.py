"""Text that grows token by token: only whole characters, no partial stop strings, and the same
result as decoding at once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.detokenizer import UNKNOWN, IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import LONG_TEXT, TextCodec, TextError, eos_token_ids

CODEC = TextCodec(embedded_model())


def grow(
    ids: list[int], sizes: list[int], stop: list[str], include: bool = False, patterns: Sequence[str] = ()
) -> tuple[list[str], IncrementalDetokenizer]:
    """Push tokens in groups of the given sizes, and the rest at once."""
    text = IncrementalDetokenizer(CODEC, stop, skip_special=True, include_stop=include, patterns=patterns)
    parts, place = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(text.push(ids[place : place + size]))
        place += size
    parts.append(text.finish())
    return parts, text


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("fills", [False, True])
def test_a_tokenizer_that_was_saved_to_cut_or_fill_texts_does_neither(cuts: bool, fills: bool, tmp_path: Path) -> None:
    saved = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    if cuts:
        saved.enable_truncation(6, stride=1)
    if fills:
        saved.enable_padding(length=40, pad_id=3)
    saved.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    for text in ("once", "once " * 20, "once " * (LONG_TEXT // 5 + 1)):
        assert codec.encode(text) == CODEC.encode(text)
        assert codec.encode_texts(text, "a fox") == CODEC.encode_texts(text, "a fox")
        assert codec.first_tokens(text, 9) == CODEC.first_tokens(text, 9)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(1, 4), max_size=20))
def test_pieces_add_up_to_the_decoded_text(content: str, sizes: list[int]) -> None:
    ids = CODEC.encode(content, special=False)
    parts, text = grow(ids, sizes, [])
    assert "".join(parts) == text.text == CODEC.decode(ids)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abc é🙂", max_size=30),
    st.lists(st.text(alphabet="abc é🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), max_size=20),
    st.booleans(),
)
def test_nothing_of_a_stop_string_or_after_it_is_ever_shown(
    content: str, stop: list[str], sizes: list[int], include: bool
) -> None:
    ids = CODEC.encode(content, special=False)
    parts, text = grow(ids, sizes, stop, include)
    whole = CODEC.decode(ids)
    places = [place for word in stop if (place := whole.find(word)) >= 0]
    shown = "".join(parts)
    assert whole.startswith(shown)
    if not places:
        assert shown == whole and text.stopped_by is None
        return
    assert text.stopped_by in stop
    word = text.stopped_by or ""
    assert shown == whole[: whole.find(word) + (len(word) if include else 0)]


def test_half_a_character_is_never_shown() -> None:
    ids = CODEC.encode("🙂", special=False)
    assert len(ids) > 1
    text = IncrementalDetokenizer(CODEC, [], skip_special=True, include_stop=False)
    assert [text.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]


def test_an_incomplete_character_at_the_end_is_shown_as_its_decoder_does() -> None:
    ids = CODEC.encode("a🙂", special=False)[:-1]
    parts, _ = grow(ids, [1] * len(ids), [])
    assert "".join(parts) == CODEC.decode(ids)


BYTES = [token_id for token_id in range(CODEC.tokenizer.get_vocab_size()) if UNKNOWN in CODEC.token(token_id)]
"""Tokens that are only a part of a character."""
OTHERS = [*CODEC.encode("a é.", special=False), *sorted(CODEC.special_ids)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(BYTES * 4 + OTHERS * 8), max_size=60), st.lists(st.integers(1, 4), max_size=20))
def test_pieces_add_up_whatever_the_tokens_are(ids: list[int], sizes: list[int]) -> None:
    parts, text = grow(ids, sizes, [])
    assert "".join(parts) == text.text == CODEC.decode(ids)


class Counted(TextCodec):
    """Records the largest number of tokens that it decoded at once."""

    most = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.most = max(self.most, len(ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("token_id", [BYTES[0], min(CODEC.special_ids)])
@pytest.mark.parametrize("skip_special", [True, False])
def test_tokens_without_an_end_of_a_character_are_not_decoded_again_and_again(
    token_id: int, skip_special: bool
) -> None:
    codec = Counted(embedded_model())
    text = IncrementalDetokenizer(codec, [], skip_special=skip_special, include_stop=False)
    for _ in range(200):
        text.push([token_id])
    text.finish()
    assert codec.most < 40
    assert text.text == CODEC.decode([token_id] * 200, skip_special_tokens=skip_special)


def test_the_beginning_of_a_stop_string_is_held_back_by_the_longest_match_and_let_go_when_it_fails() -> None:
    text = IncrementalDetokenizer(CODEC, ["aab.", "ab"], skip_special=True, include_stop=False)
    shown = [text.push(CODEC.encode(letter, special=False)) for letter in "aaax"]
    assert shown == ["", "", "a", "aax"] and text.finish() == ""


@pytest.mark.parametrize(
    ("min_tokens", "wanted"),
    [(0, ""), (1, ""), (2, "a"), (3, "a"), (4, "abx"), (5, "abxaby"), (7, "abxaby"), (8, "abxabyab")],
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_stop_string_that_the_first_tokens_complete_is_text(min_tokens: int, wanted: str, size: int) -> None:
    ids = [CODEC.encode(letter, special=False)[0] for letter in "abxabyab"]
    text = IncrementalDetokenizer(CODEC, ["ab", "bxa"], skip_special=True, include_stop=False, min_tokens=min_tokens)
    shown = "".join(text.push(ids[place : place + size]) for place in range(0, len(ids), size)) + text.finish()
    assert shown == text.text == wanted


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab1é🙂\n", max_size=30),
    st.lists(st.sampled_from(["a.b", r"\d+a", "[é🙂]a*b", r"\nb\d", "a[^é]*1"]), min_size=1, max_size=3),
    st.lists(st.sampled_from(["ab", "1é"]), max_size=1),
    st.lists(st.integers(1, 3), max_size=20),
    st.booleans(),
)
def test_nothing_of_a_match_or_after_it_is_ever_shown_however_the_tokens_come(
    content: str, patterns: list[str], stop: list[str], sizes: list[int], include: bool
) -> None:
    ids = CODEC.encode(content, special=False)
    parts, text = grow(ids, sizes, stop, include, patterns)
    shown, (_, single) = "".join(parts), grow(ids, [1] * len(ids), stop, include, patterns)
    assert shown == text.text == single.text and text.stopped_by == single.stopped_by
    whole = CODEC.decode(ids)
    if text.stopped_by is None:
        assert shown == whole and not any(re.search(pattern, whole) for pattern in patterns)
        return
    cause = re.escape(text.stopped_by) if text.stopped_by in stop else text.stopped_by
    if include:
        assert whole.startswith(shown) and re.search(rf"(?:{cause})\Z", shown)
    else:
        assert re.compile(cause).match(whole, len(shown)) and not re.search(cause, shown)


@pytest.mark.parametrize(("min_tokens", "wanted"), [(0, "x"), (3, "x"), (4, "x12ay"), (6, "x12ay"), (7, "x12ay3a")])
def test_a_match_that_the_first_tokens_complete_is_text(min_tokens: int, wanted: str) -> None:
    ids = [CODEC.encode(letter, special=False)[0] for letter in "x12ay3a"]
    text = IncrementalDetokenizer(
        CODEC, [], skip_special=True, include_stop=False, min_tokens=min_tokens, patterns=[r"\d+[ab]"]
    )
    shown = "".join(text.push([token]) for token in ids) + text.finish()
    assert shown == text.text == wanted


def test_a_template_that_refuses_is_a_clear_error() -> None:
    with pytest.raises(TextError, match="template"):
        CODEC.render_chat([{"role": "nobody", "content": 1}])


def test_the_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    def ends(config: dict[str, Any], generation: dict[str, Any] | None = None) -> frozenset[int]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return eos_token_ids(tmp_path)

    assert ends({"eos_token_id": 2}) == {2}
    assert ends({"eos_token_id": 2}, {"eos_token_id": [5, 6], "pad_token_id": 0}) == {5, 6}
    assert ends({"eos_token_id": 2}, {"eos_token_id": 0}) == {0}
    assert ends({"eos_token_id": None}, {}) == frozenset()


class Held:
    """A tokenizer that records the names of its attributes as they are used."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._tokenizer, name)


def test_long_texts_are_read_by_calls_that_let_other_threads_run_and_to_the_same_tokens() -> None:
    codec = TextCodec(embedded_model())
    text = "The fox, jumping. " * 300
    wanted = codec.tokenizer.encode(text, "a fox")
    held: Any = Held(codec.tokenizer)
    codec.tokenizer = held
    assert codec.encode_texts(text, "a fox")[0] == wanted.ids
    assert len(codec.encode_texts(text, "a fox", most=20)[0]) == 20
    assert codec.encode(text, special=False) == codec.encode_texts(text)[0][-len(codec.encode(text, special=False)) :]
    assert text.startswith(codec.first_tokens(text, 7)) and len(codec.first_tokens(text, 7)) < 60
    assert held.calls.count("encode") == 1  # the shorter text of a truncated pair


def test_of_endings_that_begin_together_and_come_with_one_token_the_longest_counts() -> None:
    token_id = next(number for number in range(100, 4000) if len(CODEC.token(number)) > 3)
    word = CODEC.token(token_id)
    for stop in ([word[:2], word[:3], word[:1]], [word[:3], word[:1], word[:2]]):
        for include in (False, True):
            parts, text = grow([token_id], [1], stop, include)
            assert (text.stopped_by, "".join(parts)) == (word[:3], word[:3] if include else "")


def test_the_first_tokens_of_a_text_are_its_beginning_up_to_their_end() -> None:
    content = "Once upon a time, there was é🙂 a fox"
    ids = CODEC.encode(content, special=False)
    for count in (*range(1, 8), len(ids) - 1, len(ids), len(ids) + 1):
        found = CODEC.first_tokens(content, count)
        assert content.startswith(found) and CODEC.encode(found, special=False) == ids[:count]
    assert len(CODEC.encode("🙂", special=False)) > 1 and CODEC.first_tokens("🙂🙂", 1) == "🙂"


@pytest.mark.parametrize("count", [LONG_TEXT, LONG_TEXT + 1])
def test_texts_of_any_length_are_decoded_with_or_without_special_tokens(count: int) -> None:
    mark = min(CODEC.special_ids)
    ids = [*CODEC.encode("fox", special=False), *[mark] * count]
    assert CODEC.decode(ids) == "fox"
    assert CODEC.decode(ids, skip_special_tokens=False) == "fox" + CODEC.token(mark) * count


def test_a_text_of_as_many_tokens_as_are_kept_stays_whole(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    assert [codec.first_tokens(" a b  ", count) for count in (1, 2, 3)] == [" a", " a b  ", " a b  "]


@pytest.mark.parametrize("second", [None, "the sea"])
def test_a_text_can_be_cut_to_one_token_and_not_to_none(second: str | None) -> None:
    texts = 1 if second is None else 2
    least = CODEC.tokenizer.num_special_tokens_to_add(texts > 1) + texts
    ids, _ = CODEC.encode_texts("a fox ran", second, most=least)
    firsts = [CODEC.encode(text, special=False)[0] for text in ("a fox ran", "the sea")[:texts]]
    assert len(ids) == least and [each for each in ids if each not in CODEC.special_ids] == firsts
    with pytest.raises(TextError, match=f"cut to {least - 1} tokens; wanted at least {least}"):
        CODEC.encode_texts("a fox ran", second, most=least - 1)


@pytest.mark.parametrize("before", ["", "a long prompt with many words before its end"])
def test_a_text_after_a_prompt_that_ends_inside_a_character_begins_after_that_character(before: str) -> None:
    ids = CODEC.encode("🙂 fox", special=False)
    inside = len(CODEC.encode("🙂", special=False)) - 1
    assert inside > 1
    prompt = [*CODEC.encode(before, special=False), *ids[:inside]]
    text = IncrementalDetokenizer(CODEC, [], skip_special=True, include_stop=False, prompt=prompt)
    assert "".join(text.push([each]) for each in ids[inside:]) + text.finish() == " fox"


def test_a_stop_string_among_bytes_that_form_no_character_ends_the_text() -> None:
    for include in (False, True):
        text = IncrementalDetokenizer(CODEC, [UNKNOWN], skip_special=True, include_stop=include)
        shown = "".join(text.push([BYTES[0]]) for _ in range(12)) + text.finish()
        assert shown == text.text == UNKNOWN * include and text.stopped_by == UNKNOWN
        assert text.push([BYTES[0]]) == text.finish() == "" and text.taken == 0


def test_a_stop_string_that_the_first_tokens_complete_is_shown_at_once() -> None:
    ids = [CODEC.encode(letter, special=False)[0] for letter in "abab"]
    text = IncrementalDetokenizer(CODEC, ["ab"], skip_special=True, include_stop=False, min_tokens=2)
    assert [text.push([token]) for token in ids] == ["", "ab", "", ""] and text.stopped_by == "ab"


@pytest.mark.parametrize("stop", [["a", "bcdefgh"], ["bcdefgh", "xx"], ["bcdefgh", "cdefgh", "d"]])
def test_a_stop_string_is_found_wherever_its_tokens_begin(stop: list[str]) -> None:
    ids = [CODEC.encode(letter, special=False)[0] for letter in "zbcdefghz"]
    for size in (1, 2, 3, 9):
        parts, text = grow(ids, [size] * (len(ids) // size), stop)
        assert "".join(parts) == "z" + "bc" * ("d" in stop) and text.stopped_by == ("d" if "d" in stop else "bcdefgh")
