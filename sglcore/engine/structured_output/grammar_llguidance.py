"""The grammar backend llguidance: a Rust library with a lexer and parser over the tokenizer's
bytes, without a tensor library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary, first_steps
from sglcore.engine.structured_output.guidance_schema import NAME, OPTIONS, check_schema
from sglcore.engine.structured_output.schema_loosening import loosened
from sglcore.engine.structured_output.tag_grammar import lark_of_tags
from sglcore.sampling.grammar_spec import ORIGIN, Grammar, GrammarError, read_schema, read_tags
from sglcore.schedule.request import Matcher

MAX_EBNF = 1 << 14
"""Maximum characters of a grammar of kind "ebnf". Its translation takes quadratic time and blocks
other threads."""
_LISTING = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_PLAIN = (
    (r"NoExtension(?:Bias)?\b", "no text completes it, because a rule or a $ref only refers to itself"),
    (
        r"(?:parser error: )?Too many items \(limit (\d+).*",
        r"there are more than \1 ways to read the text at one place",
    ),
    (r"Unsatisfiable schema: ", "no value satisfies the schema: "),
    (r"Unimplemented keys: ", "keywords that are not enforced: "),
    (r"Resource '([^']*)' is not present in a registry.*", r"$ref to another document, '\1', which is not fetched"),
    (r"Pointer '([^']*)' does not exist", r"$ref to '#\1', which is not in the schema"),
    (r" \(in regex\): regex parse error: .* error: ", ": "),
    (r" \(in regex\): lookarounds not supported yet; .*", r": look-around, such as \\b, is not supported"),
    (r"regex parse error: (.*?) \^+ error: ", r"invalid regex '\1': "),
)
"""Patterns of the library's messages -> our text."""


MOST_ITEMS = 6000
"""Maximum parser items at one position of a text. An object takes four for each optional property,
and time grows with their square."""

OUTSIDE = "doesn't satisfy the grammar"
"""The part of the library's message for a token that the mask forbids. After any other message, the
matcher has failed: it would not accept an allowed token either."""

MARK = re.compile(r"<\S+>")
"""Added tokens of this form are treated as special tokens, even if their tokenizer does not call
them special."""

NOWHERE = "\U0010ffff"
"""A character that occurs in no text."""


class Llguidance:
    """The `GrammarBackend` llguidance for one vocabulary, which is read when the first grammar is
    compiled."""

    name = NAME

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._limits = llguidance.LLParserLimits(max_items_in_row=MOST_ITEMS)
        # llguidance needs at least as many tokens as the tokenizer has; a model may have fewer.
        self._size = max(vocabulary.size, vocabulary.tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def _tokenizer(self) -> Any:
        given = self.vocabulary
        try:
            spelling = llguidance.TokenizerWrapper(_Spelling(given.tokenizer, self._size, min(given.eos_ids)))
            return llguidance.LLTokenizer(spelling, n_vocab=self._size, eos_token=sorted(given.eos_ids))
        except (ValueError, RuntimeError) as error:
            raise GrammarError(f"llguidance cannot read this tokenizer: {error}", wanted="a byte-level one") from None

    def compile(self, grammar: Grammar) -> CompiledByLlguidance:
        """Compile a grammar; waits. Raises GrammarError if it is invalid or cannot be enforced,
        also if the library only warns about it, and if the library cannot read the tokenizer."""
        matcher = llguidance.LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(f"this {grammar.kind} cannot be fully enforced: {'; '.join(warnings)}")
        # The first mask builds most of the lexer, which all copies share.
        compiled = CompiledByLlguidance(matcher, -(-self._size // 32))
        first_steps(compiled, self.vocabulary)
        return compiled


class CompiledByLlguidance:
    """A `CompiledGrammar` by llguidance: a matcher at its start, which is copied for each sample.
    `num_words`: int32 words of the library's masks."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def start(self) -> Matcher:
        """Return a new matcher at the beginning of the grammar, independent of all others."""
        return LlguidanceMatcher(self._matcher, self._num_words)


class LlguidanceMatcher:
    """The `Matcher` of one sample, by llguidance."""

    __slots__ = ("_beginning", "_matcher", "_num_words", "_tokens", "error")

    def __init__(self, beginning: Any, num_words: int) -> None:
        self._beginning, self._num_words = beginning, num_words
        self._matcher, self._tokens = beginning.deep_copy(), list[int]()
        self.error = ""

    def accept(self, token_id: int) -> bool:
        """Implements `Matcher.accept`: advance by a token; False if the grammar does not allow it.
        Any other failure of the library sets `error` too."""
        is_taken = self._matcher.consume_token(token_id)
        if is_taken:
            self._tokens.append(token_id)
        elif OUTSIDE not in (reason := self._matcher.get_error()):
            self.error = self.error or _one_line(reason)
        return is_taken

    def rollback(self, count: int) -> None:
        """Implements `Matcher.rollback`: take back the last `count` accepted tokens and any
        failure."""
        del self._tokens[len(self._tokens) - count :]
        matcher = self._matcher
        # A failed matcher refuses everything; one that has stopped takes end tokens without
        # counting them.
        if matcher.is_error() or matcher.is_stopped() or not matcher.rollback(count):
            self._matcher = self._beginning.deep_copy()
            self._matcher.consume_tokens(self._tokens)
        self.error = ""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Implements `Matcher.fill`: write the mask of the allowed next tokens into `words`
        int32[ceil(V / 32)]; after a failure, zeros."""
        whole = words if len(words) == self._num_words else np.empty(self._num_words, dtype=np.int32)
        try:
            self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
            error = self._matcher.get_error() if self._matcher.is_error() else ""
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        words[:] = 0 if error else whole[: len(words)]
        self.error = self.error or _one_line(error)


class _Spelling:
    """A tokenizer in the form that llguidance reads. Text that a grammar forces is encoded in
    ordinary tokens: the text of a special token becomes ordinary tokens too, never the special
    token."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_id: int) -> None:
        added = tokenizer.get_added_tokens_decoder()
        marks = {each: token.content for each, token in added.items() if token.special or MARK.fullmatch(token.content)}
        self._marks = frozenset(marks)
        self._plain = llguidance.LLTokenizer(_without(marks, tokenizer), n_vocab=size, eos_token=eos_id, slices=[])
        self.eos_token_id = eos_id
        self.tokens = [self._plain.decode_bytes([each]) for each in range(size)]
        for each, text in marks.items():
            self.tokens[each] = text.encode()
        self.special_token_ids = [each for each in range(size) if each in marks or self._plain.is_special_token(each)]

    def __call__(self, text: bytes) -> list[int]:
        ids = self._plain.tokenize_bytes(text)
        if self._marks.isdisjoint(ids):
            return ids
        # A unigram model has marks among its pieces; no single character is a mark.
        return [each for character in text.decode() for each in self._plain.tokenize_str(character)]


def _without(marks: Mapping[int, str], tokenizer: Tokenizer) -> str:
    """Return the tokenizer.json text of a tokenizer that does not match the special tokens `marks`
    (text by id) in texts. Those that its model's vocabulary lacks keep their ids under names that
    no text has, because ids of added tokens are counted."""
    known = tokenizer.get_vocab(with_added_tokens=False)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [
        {**each, "content": NOWHERE + each["content"]} if each["id"] in marks else each
        for each in file["added_tokens"]
        if each["id"] not in marks or each["content"] not in known
    ]
    return json.dumps(file)


def _source(grammar: Grammar) -> str:
    """Return a grammar of any kind (`Grammar.kind`) as text in the notation that llguidance
    compiles. Parts of a JSON schema that it does not enforce are removed (`loosened`). Raises
    GrammarError."""
    library = llguidance.LLMatcher
    if grammar.kind == "regex":
        return library.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return library.grammar_from_lark(grammar.text)
    if grammar.kind == "structural_tag":
        return library.grammar_from_lark(lark_of_tags(read_tags(grammar.text)))
    if grammar.kind == "ebnf":
        return library.grammar_from_lark(_lark_of(grammar.text))
    schema = {"type": "object"} if grammar.kind == "json_object" else read_schema(grammar.text)
    check_schema(schema)
    if schema is False:
        raise GrammarError("the schema is false", wanted="a schema that some value satisfies")
    options: Any = dict(OPTIONS)
    simpler = loosened(schema).schema if isinstance(schema, dict) else {}
    return library.grammar_from_json_schema(json.dumps(simpler, ensure_ascii=False), overrides=options)


def _lark_of(text: str) -> str:
    if len(text) > MAX_EBNF:
        raise GrammarError(
            f"this ebnf has {len(text)} characters", wanted=f"at most {MAX_EBNF}", remedy="write it as a lark grammar"
        )
    try:
        return any_to_lark(text)
    except Exception as error:
        raise GrammarError(f"this ebnf cannot be read: {error}", wanted="the EBNF of llama.cpp") from None


def _refusal(grammar: Grammar, text: str) -> GrammarError:
    """Return the error for the library's message `text`, without its listing of the grammar. If the
    rule came from a schema or tag, the error names that origin."""
    reason = _one_line(_LISTING.split(text, maxsplit=1)[0])
    place = _PLACE.match(reason)
    lines = grammar.text.splitlines()[: int(place[1])] if place else []
    origin = next((line.removeprefix(ORIGIN) for line in reversed(lines) if line.startswith(ORIGIN)), None)
    if origin is None or place is None:
        return GrammarError(f"this {grammar.kind} cannot be enforced: {reason}")
    return GrammarError(f"{origin} cannot be enforced: {reason[place.end() :]}")


def _one_line(text: str) -> str:
    """Return the library's message in one line and in the words of the grammar's author
    (`_PLAIN`)."""
    line = " ".join(text.partition("\n<state>")[0].split())
    for theirs, ours in _PLAIN:
        line = re.sub(theirs, ours, line)
    return line
