"""Grammars by llguidance: its own lexer and parser over the tokenizer's bytes, in Rust, without a tensor library."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from sglcore.engine.grammar import Vocabulary
from sglcore.engine.grammar_schema import refuse_keywords
from sglcore.sampling.grammar import Grammar, GrammarError, read_schema
from sglcore.schedule.request import Matcher

WHITESPACE = r"( |\n[ \t]{0,32})?"
"""Between JSON's tokens: nothing, a space, or a line break with its indentation. Without a bound a model may write blanks
until its tokens are used up."""

UNENFORCED = frozenset({"x-guidance", "$anchor", "$dynamicAnchor"})
"""What it reads in silence: the first switches its own checks off."""


class Llguidance:
    """One vocabulary's compiler. The vocabulary is read when the first grammar comes."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def _tokenizer(self) -> Any:
        given = self._vocabulary
        try:
            return llguidance.LLTokenizer(given.tokenizer.to_str(), n_vocab=given.size, eos_token=sorted(given.eos_ids))
        except (ValueError, RuntimeError) as error:
            raise GrammarError(f"llguidance can not read this tokenizer: {error}", wanted="a byte-level one") from None

    def compile(self, grammar: Grammar) -> CompiledByLlguidance:
        """As `GrammarBackend.compile`."""
        matcher = llguidance.LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarError(f"this {grammar.kind} can not be enforced: {_one_line(matcher.get_error())}")
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(f"this {grammar.kind} can not be enforced wholly: {'; '.join(warnings)}")
        # The first mask builds most of the lexer, which all copies share.
        LlguidanceMatcher(matcher.deep_copy()).fill(np.empty(-(-self._vocabulary.size // 32), dtype=np.int32))
        return CompiledByLlguidance(matcher)


class CompiledByLlguidance:
    """A matcher at the beginning, to be copied."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Matcher:
        """As `CompiledGrammar.start`."""
        return LlguidanceMatcher(self._matcher.deep_copy())


class LlguidanceMatcher:
    """One sample's way through a grammar."""

    __slots__ = ("_matcher", "error")

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.error = ""

    def accept(self, token_id: int) -> bool:
        """As `Matcher.accept`."""
        return self._matcher.consume_token(token_id)

    def fill(self, words: NDArray[np.int32]) -> None:
        """As `Matcher.fill`."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0
            self.error = self.error or _one_line(self._matcher.get_error())


def _source(grammar: Grammar) -> str:
    """llguidance's own notation of a grammar."""
    library = llguidance.LLMatcher
    if grammar.kind == "regex":
        return library.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return library.grammar_from_lark(grammar.text)
    if grammar.kind == "ebnf":
        return library.grammar_from_lark(_lark_of(grammar.text))
    schema = {"type": "object"} if grammar.kind == "json_object" else read_schema(grammar.text)
    refuse_keywords(schema, UNENFORCED, Llguidance.name)
    text = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
    if schema is True:
        text = "{}"
    if schema is False:
        raise GrammarError("the schema is false", wanted="one that some value fulfils")
    return library.grammar_from_json_schema(
        text,
        overrides={
            "whitespace_flexible": True,
            "whitespace_pattern": WHITESPACE,
            "lenient": False,
            "coerce_one_of": False,
        },
    )


def _lark_of(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception as error:
        raise GrammarError(f"this ebnf can not be read: {error}", wanted="the EBNF of llama.cpp") from None


def _one_line(text: str) -> str:
    return " ".join(text.partition("\n<state>")[0].split())
