"""The end of a JSON object in text that arrives in parts, compared with Python's own reader."""

from __future__ import annotations

import json

import pytest

from sglcore.serving.chat.parsers.json_text import JsonText

NUMBERS = ("0", "-0", "10", "1.5e+10", "1E5", "1e-05", "-1.25", "01", "-", "1.", ".5", "+1", "1e", "1e+", "--1", "0x1")
OTHER_DIGITS = ("\u0663", "1\u0663", "1.\u0663", "1e\u0663", "\u00b2", "\uff11")
WORDS = ("true", "false", "null", "nul", "True", "NULL", "nullx", "truefalse", "true1", "undefined", "Infinity")
STRINGS = (
    "",
    "\u00e9",
    "\U0001f642",
    "\x7f",
    "\u2028",
    "\t",
    "\x00",
    "\x1f",
    "\n",
    *(f"\\{mark}" for mark in "\"\\/bfnrtuxa0'"),
) + (
    *(
        "\\u00e9",
        "\\uABCD",
        "\\uabcd",
        "\\u12",
        "\\u12g4",
        "\\u 123",
        "\\U0001f642",
        "\\ud83d\\ude42",
        "\\ud83d",
        "\\\\u1",
    ),
)
SPACES = ("1", " 1", "\t1 ", "\r\n1\r", "\x0b1", "\x0c1", "\u00a01", "1\u2003", "\ufeff1")
SHAPES = ("[]", "[1,2]", "[1 2]", "[1,]", "[,1]", "{}", '{"b":1}', '{"b":1,}', '{"b"}', '{"b":}', "{b:1}", "[}", "1,2")


@pytest.mark.parametrize(
    "value", [*NUMBERS, *OTHER_DIGITS, *WORDS, *SPACES, *SHAPES, *(f'"{each}"' for each in STRINGS)]
)
@pytest.mark.parametrize("form", ['{"a":VALUE}', '{"a": [VALUE, 1]}', '{"a": {"b": VALUE}}'])
def test_what_is_an_object_is_one_and_no_other_text(form: str, value: str) -> None:
    text = form.replace("VALUE", value)

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
        is_object = True
    except ValueError:
        is_object = False
    whole, split = JsonText(), JsonText()
    size = whole.feed(text + "}")
    assert (whole.done, whole.bad) == (is_object, not is_object)
    assert size == len(text) if is_object else size <= len(text)
    assert sum(map(split.feed, text + "}")) == size and (split.done, split.bad) == (whole.done, whole.bad)


@pytest.mark.parametrize("mark", ["\u00e9", "\u0663", "\u00b2", "\uff41", "+", ".", "'", "(", ":", ",", "}"])
def test_what_begins_no_value_is_bad_at_once(mark: str) -> None:
    reader = JsonText()
    assert reader.feed('{"a": ' + mark) == len('{"a": ') and reader.bad


@pytest.mark.parametrize("text", ["[1]", '"a"', "1", " {}", "null", "}"])
def test_only_an_object_is_read(text: str) -> None:
    reader = JsonText()
    assert reader.feed(text) == 0 and reader.bad and not reader.done


def test_text_is_read_from_the_given_place_up_to_the_end_of_the_object() -> None:
    reader = JsonText()
    assert reader.feed('so {"a', at=3) == 3
    assert reader.feed('": {}} {}') == len('": {}}') and reader.done
    assert reader.feed("{}") == 0 and reader.done and not reader.bad
