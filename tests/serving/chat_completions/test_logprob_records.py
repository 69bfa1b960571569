"""The records of log-probabilities in answers, in all their fields."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.logprob_records import CompletionLogprobs, chat_logprobs, prompt_scores
from sglcore.serving.apis.request_params import bias_of
from sglcore.serving.apis.token_text import BYTE_OF_LETTER, _marked
from sglcore.serving.replicas.server_errors import InvalidRequest

HELD = {1: b"a", 2: b" b", 3: "é".encode(), 4: b"\xe2\x80", 5: b"<end>"}
"""The tokens of these tests: 4 is part of a character, 5 is special."""
LIKELY = TokenLogprob(1, -0.5, 1, ((1, -0.5), (2, -1.5), (3, -2.5)))
UNLIKELY = TokenLogprob(4, -7.0, 9, ((2, -0.25), (1, -1.25), (3, -float("inf"))))


class Texts:
    """The texts of five tokens."""

    def data(self, token_id: int) -> bytes:
        return HELD[token_id]

    def text(self, token_id: int) -> str:
        return HELD[token_id].decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id == 5


def _entry(token_id: int, logprob: float) -> dict[str, object]:
    data = HELD[token_id]
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def test_a_chats_record_has_each_token_its_bytes_and_as_many_alternatives_as_asked_for() -> None:
    found = chat_logprobs(Texts(), [LIKELY, UNLIKELY], 2)  # pyright: ignore[reportArgumentType]
    assert found == {
        "content": [
            {**_entry(1, -0.5), "top_logprobs": [_entry(1, -0.5), _entry(2, -1.5)]},
            {**_entry(4, -7.0), "top_logprobs": [_entry(2, -0.25), _entry(1, -1.25)]},
        ],
        "refusal": None,
    }


def test_a_prompts_scores_count_ranks_from_one_and_say_the_chosen_tokens_own_first() -> None:
    first, likely, unlikely = prompt_scores(Texts(), [None, LIKELY, UNLIKELY], 2)  # pyright: ignore[reportArgumentType]
    assert first is None
    assert list(likely.items()) == [
        ("1", {"logprob": -0.5, "rank": 1, "decoded_token": "a"}),
        ("2", {"logprob": -1.5, "rank": 2, "decoded_token": " b"}),
    ]
    assert list(unlikely.items()) == [
        ("4", {"logprob": -7.0, "rank": 9, "decoded_token": HELD[4].decode(errors="replace")}),
        ("2", {"logprob": -0.25, "rank": 1, "decoded_token": " b"}),
        ("1", {"logprob": -1.25, "rank": 2, "decoded_token": "a"}),
    ]


def test_a_completions_record_adds_the_chosen_token_to_the_most_likely_and_counts_characters() -> None:
    record = CompletionLogprobs(Texts(), offset=10).record  # pyright: ignore[reportArgumentType]
    found = record([3, 5, 1], [None, UNLIKELY, LIKELY], 2)
    assert found == {
        "tokens": ["é", "<end>", "a"],
        "token_logprobs": [None, -7.0, -0.5],
        "top_logprobs": [
            None,
            {" b": -0.25, "a": -1.25, HELD[4].decode(errors="replace"): -7.0},
            {"a": -0.5, " b": -1.5},
        ],
        "text_offset": [10, 11, 11],
    }
    assert record([2], [LIKELY], 0)["text_offset"] == [12], "offsets run on from part to part"


@pytest.mark.parametrize(("shows", "offsets"), [(False, [0, 0]), (True, [0, 5])])
def test_a_special_token_counts_where_it_is_shown(shows: bool, offsets: list[int]) -> None:
    record = CompletionLogprobs(Texts(), shows_special=shows).record  # pyright: ignore[reportArgumentType]
    assert record([5, 1], [LIKELY, LIKELY], 0)["text_offset"] == offsets


@pytest.mark.parametrize(
    ("logprob", "told"),
    [(-math.inf, -9999.0), (-1e30, -9999.0), (-10000.0, -9999.0), (-9999.0, -9999.0), (-9998.5, -9998.5), (0.0, 0.0)],
)
def test_every_probability_is_a_number_that_json_holds(logprob: float, told: float) -> None:
    texts: Any = Texts()
    for item in (TokenLogprob(1, logprob, 9, ((2, logprob),)), TokenLogprob(2, logprob, 1, ((2, logprob),))):
        (chat,) = chat_logprobs(texts, [item], 1)["content"]
        completion = CompletionLogprobs(texts).record([item.token_id], [item], 1)
        (scores,) = prompt_scores(texts, [item], 1)
        assert (chat["logprob"], chat["top_logprobs"][0]["logprob"]) == (told, told)
        assert completion["token_logprobs"] == [told]
        assert set(completion["top_logprobs"][0].values()) == {told}
        assert {each["logprob"] for each in scores.values()} == {told}


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 5])
def test_a_record_has_the_most_likely_tokens_and_the_chosen_one_whichever_it_is(wanted: int) -> None:
    texts: Any = Texts()
    for item in (LIKELY, UNLIKELY):
        likely = [token for token, _ in item.top[:wanted]]
        both = {*likely, item.token_id}
        (chat,) = chat_logprobs(texts, [item], wanted)["content"]
        (completion,) = CompletionLogprobs(texts).record([item.token_id], [item], wanted)["top_logprobs"]
        (scores,) = prompt_scores(texts, [item], wanted)
        assert [each["token"] for each in chat["top_logprobs"]] == [texts.text(token) for token in likely]
        assert completion.keys() == {texts.text(token) for token in both}
        assert scores.keys() == {str(token) for token in both} and next(iter(scores)) == str(item.token_id)


def test_a_character_of_several_tokens_counts_at_the_first_of_them() -> None:
    held = [b"a", b"\xf0\x9f", b"\x99", b"\x82", b"\xe2\x80", b"\xa8b", "é日".encode(), b""]
    texts: Any = SimpleNamespace(text=str, data=held.__getitem__, is_special=lambda token_id: False)
    found = CompletionLogprobs(texts, offset=3).record(range(len(held)), [None] * len(held), 0)
    assert found["text_offset"] == [3, 4, 5, 5, 5, 6, 7, 9]


def test_letters_of_byte_level_vocabularies_are_those_of_the_tokenizers_library() -> None:
    assert set(BYTE_OF_LETTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in (*range(0x800), *range(0x800, 0xD800, 0x3F), *range(0x10000, 0x110000, 0xFFF)):
        ((letters, _),) = theirs.pre_tokenize_str(chr(code))
        assert bytes(BYTE_OF_LETTER[letter] for letter in letters) == chr(code).encode(), code


@pytest.mark.parametrize(
    ("piece", "data"),
    [
        ("\u2581a\u2581", b" a "),
        ("<0xE2>", b"\xe2"),
        ("<0x0a>", b"\n"),
        ("<0xZZ>", b"<0xZZ>"),
        ("<0x1>", b"<0x1>"),
        ("<0x123>", b"<0x123>"),
        ("<0x41>b", b"<0x41>b"),
    ],
)
def test_a_piece_has_spaces_for_their_marks_and_a_byte_that_it_names(piece: str, data: bytes) -> None:
    assert _marked(piece) == data


def test_a_bias_belongs_to_a_token_by_its_decimal_id() -> None:
    assert bias_of({"0": 1.0, "007": -2.0, "999999999": 3.0}) == {0: 1.0, 7: -2.0, 999_999_999: 3.0}
    for key in ("", "-1", "1.0", " 1", "\u00b2", "\u0663", "1_0", "1000000000"):
        with pytest.raises(InvalidRequest, match="a token id") as refused:
            bias_of({"1": 0.0, key: 1.0})
        assert refused.value.param == "logit_bias"
