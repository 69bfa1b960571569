"""The grammar backend xgrammar, used only if requested by name: it needs a tensor library and
enforces fewer schema keywords."""

from __future__ import annotations

import json
import re
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.engine.structured_output.grammar_schema import refuse_keywords, schemas
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.tag_grammar import xgrammar_of_tags
from sglcore.sampling.grammar_spec import Grammar, GrammarError, read_schema, read_tags
from sglcore.schedule.request import Matcher

MAX_WHITESPACE = 33
"""Maximum white space characters between JSON's tokens. Without a limit a model may write white
space until its tokens are used up."""

UNENFORCED = frozenset(
    {
        "$anchor",
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Keywords that xgrammar ignores silently or enforces only in part."""

ALONE = ("$ref", "anyOf", "const", "enum")
"""Keywords with which xgrammar ignores the other keywords of the same schema."""

NOTES = frozenset(
    [
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
"""Keywords that restrict no value."""
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "time",
        "uri",
        "uuid",
    }
)
"""Values of `format` that xgrammar enforces."""

OWN_TYPE = MappingProxyType(
    {
        "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
        "number": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}),
        "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
        "object": frozenset({"additionalProperties", "maxProperties", "minProperties", "properties", "required"}),
    }
)
"""Keywords that xgrammar reads only if the schema also has the `type` that they apply to."""


class Xgrammar:
    """The `GrammarBackend` xgrammar for one vocabulary, which is read when the first grammar is
    compiled."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library = xgrammar
        self.vocabulary = vocabulary

    @cached_property
    def _compiler(self) -> Any:
        given, library = self.vocabulary, self._library
        found = library.TokenizerInfo._detect_metadata_from_hf(given.tokenizer.to_str())
        info = library.TokenizerInfo(
            _spellings(given),
            found["vocab_type"],
            vocab_size=given.size,
            stop_token_ids=sorted(given.eos_ids),
            add_prefix_space=found["add_prefix_space"],
        )
        return library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> CompiledByXgrammar:
        """Compile a grammar; waits. Raises GrammarError if it is invalid, or if its schema has
        something that xgrammar does not enforce."""
        try:
            return CompiledByXgrammar(self._library, self._compile(grammar))
        except RuntimeError as error:
            raise GrammarError(f"this {grammar.kind} cannot be enforced: {_one_line(str(error))}") from None

    def _compile(self, grammar: Grammar) -> Any:
        compiler, text = self._compiler, grammar.text
        if grammar.kind == "regex":
            return compiler.compile_regex(text)
        if grammar.kind == "lark":
            return compiler.compile_lark(text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(text)
        if grammar.kind == "structural_tag":
            found = read_tags(text)
            for tag in found.tags:
                self._check(json.loads(tag.schema))
            return compiler.compile_structural_tag(xgrammar_of_tags(found))
        schema = {"type": "object"} if grammar.kind == "json_object" else read_schema(text)
        self._check(schema)
        return compiler.compile_json_schema(
            text or schema, any_whitespace=True, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
        )

    def _check(self, schema: Any) -> None:
        refuse_keywords(schema, UNENFORCED, self.name)
        for place, node in schemas(schema):
            _refuse_mixtures(place, node)


class CompiledByXgrammar:
    """A `CompiledGrammar` by xgrammar, which all its matchers share."""

    def __init__(self, library: Any, compiled: Any) -> None:
        self._library, self._compiled = library, compiled

    def start(self) -> Matcher:
        """Return a new matcher at the beginning of the grammar, independent of all others."""
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled))


class XgrammarMatcher:
    """The `Matcher` of one sample, by xgrammar."""

    __slots__ = ("_matcher", "error")

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.error = ""

    def accept(self, token_id: int) -> bool:
        """Implements `Matcher.accept`: advance by a token; False if the grammar does not allow it,
        and if the library fails, which also sets `error`."""
        try:
            return self._matcher.accept_token(token_id)
        except RuntimeError as error:
            self.error = _one_line(str(error))
            return False

    def rollback(self, count: int) -> None:
        """Implements `Matcher.rollback`: take back the last `count` accepted tokens and any
        failure."""
        self._matcher.rollback(count)
        self.error = ""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Implements `Matcher.fill`: write the mask of the allowed next tokens into `words`
        int32[ceil(V / 32)]; after a failure, zeros."""
        try:
            self._matcher.fill_next_token_bitmask(words.reshape(1, -1))
        except Exception as error:
            words[:] = 0
            self.error = self.error or _one_line(str(error))


def _refuse_mixtures(place: str, node: dict[str, Any]) -> None:
    """Raise GrammarError if the schema `node`, at the JSON pointer `place`, combines keywords or
    has values that xgrammar does not enforce, though it enforces each keyword by itself."""
    found = ""
    alone = next((name for name in ALONE if name in node), None)
    beside = sorted(set(node) - NOTES - {alone, "type"})
    kind = "number" if node.get("type") == "integer" else node.get("type")
    if alone is not None and beside:
        found = f"{alone!r} with {beside[0]!r}"
    elif stray := sorted(name for own, names in OWN_TYPE.items() if own != kind for name in names & set(node)):
        found = f"{stray[0]!r} without its type"
    elif "pattern" in node and not {"minLength", "maxLength"}.isdisjoint(node):
        found = "'pattern' with a length"
    elif node.get("format", "date") not in FORMATS:
        found = f"format {node['format']!r}"
    elif not set(node.get("required", ())) <= set(node.get("properties", ())):
        found = "'required' for a property that is not in 'properties'"
    if found:
        raise GrammarError(
            f"the schema uses {found} at {place}, which the grammar backend xgrammar does not enforce",
            wanted="a schema without it",
            remedy="use the backend llguidance",
        )


def _spellings(vocabulary: Vocabulary) -> list[str]:
    """Return the text of each token id as the tokenizer's vocabulary has it; empty (never allowed)
    for special tokens and for ids beyond the tokenizer."""
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    spelled = [""] * vocabulary.size
    for text, token_id in vocabulary.tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocabulary.size and not (token_id in added and added[token_id].special):
            spelled[token_id] = text
    return spelled


def _one_line(text: str) -> str:
    """Return the library's message in one line, without its time and source line."""
    return " ".join(re.sub(r"\[[\d:]+\] \S+:\d+: ", "", text).split())
