"""The number of calls in a forced answer reaches the limit exactly, in every family of
templates."""

from __future__ import annotations

import pytest

from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.call_grammar import MOST_CALLS
from sglcore.serving.chat.format import ChatFormat
from tests.serving.chat.test_call_grammar import GOOD, SAME_QUOTES, TOOLS, Case

SEVERAL = [name for name in SAME_QUOTES if name not in ("llama", "harmony")]
"""Families with templates that write several calls."""


@pytest.mark.parametrize("name", SEVERAL)
def test_a_forced_answer_makes_as_many_calls_as_the_limit_and_no_more(
    name: str, codecs: dict[str, TextCodec], formats: dict[str, ChatFormat]
) -> None:
    case = Case(name, codecs[name], formats[name])
    grammar = case.format.tool_grammar(TOOLS, "required")
    for count in (MOST_CALLS - 1, MOST_CALLS, MOST_CALLS + 1):
        calls = case.answer(*[("look", GOOD)] * count)
        assert case.accepts(grammar, calls) == (count <= MOST_CALLS), count
