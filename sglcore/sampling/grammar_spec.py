"""A grammar for a request's output, as text: a frozen, checked record. It knows no grammar
compiler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from sglcore.core.errors import SglcoreError
from sglcore.sampling.structural_tag import StructuralTag, TagError, read_structural_tag

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "ebnf", "structural_tag"]
KINDS: tuple[str, ...] = get_args(GrammarKind)
MAX_GRAMMAR_TEXT = 1 << 18
"""Maximum number of characters of a grammar."""


ORIGIN = "//: "
"""Prefix of a line in a Lark grammar that names, for error messages, the source of the rules after
it.
"""


class GrammarError(SglcoreError, ValueError):
    """A grammar that cannot be read or cannot be enforced."""


class GrammarBusy(GrammarError):
    """A grammar that cannot be compiled now, because other grammars keep the compiler busy.
    `retry_after` is the time after which to try again, in seconds, the same for all.
    """

    retry_after: ClassVar[float] = 10.0

    def __init__(self, found: str) -> None:
        """`found` says what the grammar waited for."""
        super().__init__(found, remedy="try again later")


@dataclass(frozen=True, slots=True)
class Grammar:
    """The format of the output, by `kind`: JSON of a schema (`text` is the schema), any JSON object
    (no text), a regular expression, a Lark grammar, a grammar in the EBNF of llama.cpp, or free
    text with structural tags (`text` is their JSON).

    Raises GrammarError for an unknown kind, a missing text, a text for json_object, more than
    MAX_GRAMMAR_TEXT characters, or a schema or structural tags that cannot be read. The other kinds
    are checked when they are compiled, not here.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"{self.kind!r} is not a kind of grammar", wanted=f"one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise GrammarError(f"the grammar is {type(self.text).__name__}", wanted="text")
        if len(self.text) > MAX_GRAMMAR_TEXT:
            raise GrammarError(
                f"the grammar has {len(self.text)} characters",
                wanted=f"at most {MAX_GRAMMAR_TEXT}",
                remedy="take out what the output does not need",
            )
        if bool(self.text) == (self.kind == "json_object"):
            wanted = "none: give a json_schema" if self.text else "one"
            raise GrammarError(f"a {self.kind} grammar with {'a' if self.text else 'no'} text", wanted=wanted)
        if self.kind == "json_schema":
            read_schema(self.text)
        if self.kind == "structural_tag":
            read_tags(self.text)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning before the output that no grammar constrains: any text up to `end`.

    `begin` is the text of the added token that starts the reasoning, if the output starts with it;
    empty if the prompt has already started it. After `budget` tokens (None: no limit), `closing` is
    forced, which ends with `end`. `may_stop`: the output may end inside the reasoning. Raises
    GrammarError if `closing` does not end with a non-empty `end`, or for a negative budget.
    """

    end: str
    closing: str
    begin: str = ""
    budget: int | None = None
    may_stop: bool = False

    def __post_init__(self) -> None:
        if not self.end or not self.closing.endswith(self.end):
            raise GrammarError(f"reasoning is closed by {self.closing!r}", wanted=f"text that ends with {self.end!r}")
        if self.budget is not None and self.budget < 0:
            raise GrammarError(f"the budget of reasoning is {self.budget}", wanted="0 tokens or more")


@dataclass(frozen=True, slots=True)
class TokenRules:
    """`allowed`: the only token ids that may be sampled (empty: all). `bad_words`: words that may
    not occur, neither directly nor after a space.
    """

    allowed: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repetition:
    """DRY: a penalty on tokens that would continue a repetition in the last `last_n` tokens of
    prompt and output (-1: all).

    The logit of a token that followed the same n tokens before, with n at least `allowed_length`,
    is reduced by `multiplier` * `base` ** (n - `allowed_length`). No repetition extends over a text
    of `breakers`.
    """

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: tuple[str, ...]


def read_tags(text: str) -> StructuralTag:
    """Parse structural tags. Raises GrammarError if the text has none, or if they cannot be
    enforced.
    """
    try:
        return read_structural_tag(text)
    except TagError as error:
        raise GrammarError(error.found, wanted=error.wanted, remedy=error.remedy) from None


def read_schema(text: str) -> dict | bool:
    """Parse a JSON schema: an object, true or false. Raises GrammarError for any other text."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}", wanted="a JSON schema") from None
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"the schema is a JSON {type(schema).__name__}", wanted="an object, or true or false")
    return schema
