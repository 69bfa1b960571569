"""Text that becomes part of a regular expression matches itself and nothing else, whatever
characters it has."""

from __future__ import annotations

import re
import string
from collections.abc import Callable

import pytest

from sglcore.engine.structured_output import tag_grammar
from sglcore.serving.apis import request_params
from sglcore.serving.apis.request_params import StructuredOutputs
from sglcore.serving.chat import call_grammar

ESCAPES: dict[str, Callable[[str], str]] = {
    "a choice": request_params._literal,
    "a mark between slashes": call_grammar._escaped,
    "a trigger between slashes": tag_grammar._escaped,
}
LETTERS = (*string.printable, "é", "\u2028", "\U0001f642")
WORDS = (
    "a|b",
    "a.b",
    "[a]",
    "{1,2}",
    "a{2}",
    "^a$",
    r"\d",
    r"a\b",
    "a/b",
    "(?:a)",
    "x*y+z?",
    "a\nb",
    "aa",
    "|a",
    "a|",
    "",
)
TEXTS = (*LETTERS, *WORDS)


@pytest.mark.parametrize("kind", list(ESCAPES))
def test_every_letter_and_every_word_stands_for_itself_alone(kind: str) -> None:
    for text in TEXTS:
        pattern = re.compile(ESCAPES[kind](text))
        assert [other for other in TEXTS if pattern.fullmatch(other)] == [text], text
        assert "/" not in re.sub(r"\\.", "", pattern.pattern) or "slashes" not in kind


def test_the_choices_of_an_answer_are_those_that_are_listed() -> None:
    for listed in (WORDS, ("a|b",), ("a.b", "x*y+z?"), LETTERS):
        found = request_params._of_structured(StructuredOutputs.model_validate({"choice": list(listed)}), "guided_")
        (grammar,) = found.values()
        pattern = re.compile(grammar.text)
        assert [text for text in TEXTS if pattern.fullmatch(text)] == [text for text in TEXTS if text in listed]
