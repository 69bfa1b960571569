"""The length of a regular expression with its repetition counts expanded, computed from its text
before anything is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglcore.engine.structured_output.grammar_schema import schemas
from sglcore.sampling.grammar_spec import Grammar, GrammarError, read_schema, read_tags

MOST_WRITTEN_OUT = 1 << 14
"""Maximum of `written_out` for one pattern: compilers expand counts, and look ahead over the
expanded pattern at each token."""
_COUNT = re.compile(r"\{(\d{1,18})(?:,\d*)?\}")
_OPENING = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?")
"""The beginning of a group, with its name or flags."""


def refuse_large(grammar: Grammar) -> None:
    """Raise GrammarError if `written_out` of a pattern in the grammar is more than
    MOST_WRITTEN_OUT."""
    for place, pattern in _patterns(grammar):
        size = written_out(pattern)
        if size > MOST_WRITTEN_OUT:
            raise GrammarError(
                f"{place} needs {size} characters: nested repetition counts are multiplied",
                wanted=f"at most {MOST_WRITTEN_OUT}",
                remedy="take out repetitions with large counts",
            )


def written_out(pattern: str) -> int:
    """Return the number of characters of the longest alternative, with each repetition count
    expanded to its minimum and `*` and `?` counted as no repetition.

    It parses what the libraries have in common (groups, sets, escapes, counts), and raises nothing
    for an invalid pattern.
    """
    outer: list[tuple[int, int]] = []
    longest, total, last, place = 0, 0, 0, 0
    while place < len(pattern):
        letter, end = pattern[place], place + 1
        count = _COUNT.match(pattern, place) if letter == "{" else None
        opening = _OPENING.match(pattern, place)
        if count is not None:
            total, last, end = total - last + last * int(count[1]), last * int(count[1]), count.end()
        elif opening is not None:
            outer.append((longest, total))
            longest, total, last, end = 0, 0, 0, opening.end()
        elif letter == ")" and outer:
            last = max(longest, total)
            longest, before = outer.pop()
            total = before + last
        elif letter == "|":
            longest, total, last = max(longest, total), 0, 0
        elif letter in "*?":
            total, last = total - last, 0
        elif letter not in "^$+":
            end = _atom_end(pattern, place)
            total, last = total + 1, 1
        is_lazy = (count is not None or letter in "*+?") and pattern.startswith("?", end)
        place = end + is_lazy
    return max(longest, total)


def _atom_end(pattern: str, place: int) -> int:
    """Return the index after the character, escape or set that begins at index `place` of a
    pattern."""
    if pattern[place] == "\\":
        return place + 2
    if pattern[place] != "[":
        return place + 1
    inside = re.compile(r"\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL).match(pattern, place + 1)
    assert inside is not None
    return inside.end()


def _patterns(grammar: Grammar) -> Iterator[tuple[str, str]]:
    """Yield the regular expressions of a grammar, each after its place for an error text. Patterns
    inside lark and EBNF rules are not found."""
    if grammar.kind == "regex":
        yield "this regex", grammar.text
    texts = [grammar.text] if grammar.kind == "json_schema" else []
    if grammar.kind == "structural_tag":
        texts = [tag.schema for tag in read_tags(grammar.text).tags]
    for text in texts:
        schema = read_schema(text)
        for place, node in schemas(schema):
            named = node.get("patternProperties")
            found = [node.get("pattern"), *(named if isinstance(named, dict) else ())]
            yield from ((f"the pattern at {place}", each) for each in found if isinstance(each, str))
