"""Patterns that end a text, against Python's own `re` on every part of the text; mutants of the
matcher; and its bounds."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from sglcore.sampling import stop_pattern as module
from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.sampling.pattern_syntax import PatternError
from sglcore.sampling.stop_pattern import LONGEST_CUT, MAX_PLACES, Match, PatternScan, StopPattern, Where
from tests.planted import planted

PIECES = [
    "a",
    "b",
    "ab",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    r"\n",
    "(?:a|bc)",
    "(b)",
    "(?P<x>c)",
    "^",
    ".^",
    "[^a]^",
    r"\A",
    r"\x61",
    "é",
    r"\.",
]
COUNTS = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?"]
FLAGS = ["", "(?i)", "(?m)", "(?m)", "(?s)", "(?im)", "(?ms)", "(?ms)"]
LETTERS = "aabbcA1.é\n\n"


def any_pattern(rnd: random.Random) -> str:
    """A random pattern that `re` compiles and that does not match the empty text."""
    while True:
        parts = [rnd.choice(PIECES) + rnd.choice(COUNTS) for _ in range(rnd.randint(1, 4))]
        body = (
            "".join(parts)
            if rnd.random() < 0.7
            else f"(?:{''.join(parts[:2])}|{''.join(parts[2:])}){rnd.choice(COUNTS)}"
        )
        pattern = rnd.choice(FLAGS) + body
        try:
            if re.compile(pattern).match("") is None and re.compile(pattern).fullmatch("\n", 1, 1) is None:
                return pattern
        except re.error:
            continue


def by_re(pattern: str, text: str, free: int = 0) -> Match | None:
    """The match that is complete first, after the first `free` characters; among equals the one
    that begins first."""
    compiled = re.compile(pattern)
    for end in range(free + 1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return Match(max(start, end - LONGEST_CUT), end)
    return None


def law(seed: int, found_in: Any = module) -> None:
    """However a text is cut into pieces, the match equals that of `re`, and no part of it was
    released before."""
    rnd = random.Random(seed)
    pattern = any_pattern(rnd)
    shared = found_in.StopPattern(pattern)
    for _ in range(2):
        law_of_one_text(rnd, pattern, shared, found_in)


def law_of_one_text(rnd: random.Random, pattern: str, shared: Any, found_in: Any) -> None:
    """Check one text, with a pattern object that may have scanned other texts before."""
    text, free = "".join(rnd.choices(LETTERS, k=rnd.randint(1, 20))), rnd.choice([0, 0, 3])
    wanted = by_re(pattern, text, free)
    scan, place, let_go = found_in.PatternScan(shared), 0, 0
    while place < len(text):
        may_end = place >= free
        end = min(place + rnd.randint(1, 4), len(text) if may_end else free)
        match = scan.feed(text[place:end], may_end=may_end)
        assert match == (wanted if wanted is not None and may_end and wanted.end <= end else None), (pattern, text)
        if match is not None:
            assert let_go <= match.start, (pattern, text)
            return
        place, let_go = end, end - scan.held_back
    assert wanted is None, (pattern, text)


def test_the_first_match_is_the_one_of_re_and_was_held_back() -> None:
    for seed in range(400):
        law(seed)


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("found is None and hits & last", "hits & last"),
        ("EMPTY if node in self._holding else NEVER", "EMPTY"),
        ("range(node.high - node.low)", "range(node.high)"),
        ("one.first | (other.first if one.is_empty else 0)", "one.first"),
        ("other.last | (one.last if other.is_empty else 0)", "other.last"),
        ("self._join(again, again)", "pass"),
        ('character == "\\n" else', 'character == "?" else'),
        ("self._begun[0][0]", "self._begun[-1][0]"),
        ("is not None and may_end", "is not None"),
        ("steps = self._steps[where]", "steps = self._steps[0]"),
        ("found = self._masks.get(character)", "found = next(iter(self._masks.values()), None)"),
    ],
)
def test_the_law_catches_a_planted_defect(sound: str, defect: str) -> None:
    broken = planted(module, sound, defect)
    with pytest.raises((AssertionError, PatternError)):
        for seed in range(1500):
            law(seed, broken)


def test_what_may_follow_depends_on_where_a_line_begins() -> None:
    """The same characters of a pattern are needed within a line and after a line's end, in either
    order."""
    shared = StopPattern("(?ms)a.^b")
    for text, wanted in (("aab", None), ("a\nb", Match(0, 3)), ("aab a\nb", Match(4, 7)), ("a\n\nb", None)):
        assert PatternScan(shared).feed(text) == wanted == by_re(shared.text, text), text


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        ("a(?=b)", "looks ahead"),
        ("(?<!a)b", "looks ahead"),
        (r"(a)\1", "group"),
        ("(?P<x>a)(?P=x)", "group"),
        ("a$", "end of a text"),
        (r"\ba", "edge of a word"),
        ("(?x)a", "flag x"),
        ("(?i:a)", "flags for a part"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("a*", "empty text"),
        ("^", "empty text"),
        (f"a{{{MAX_PLACES + 1}}}", "128"),
        ("(?:(?:a{9}){9}){9}", "128"),
        ("(?:(?:){999}){999}a", "128"),
        ("(" * 60 + "a" + ")" * 60, "nested"),
    ],
)
def test_what_can_not_be_followed_is_refused_with_its_reason(pattern: str, reason: str) -> None:
    with pytest.raises(SamplingError, match=f"stop_regex: .*{reason}"):
        SamplingParams(stop_regex=pattern)  # pyright: ignore[reportArgumentType]


def test_all_patterns_together_are_bounded() -> None:
    assert SamplingParams(stop_regex=["a", "b{9}"]).stop_regex == ("a", "b{9}")  # pyright: ignore[reportArgumentType]
    assert len(SamplingParams(stop_regex=("a" * 70, "b{58}")).stop_regex) == 2
    for many in (["a"] * 17, ["a" * 70, "b" * 59], ["a{70}", "b{59}"], ["[a" + "b" * 1100 + "]"], [""], 5):
        with pytest.raises(SamplingError, match="stop_regex"):
            SamplingParams(stop_regex=many)  # pyright: ignore[reportArgumentType]


def test_of_a_match_without_bounds_the_last_characters_are_held_back_and_cut() -> None:
    scan = PatternScan(StopPattern("(?s)<.*>"))
    assert scan.feed("ab<" + "x" * 10) is None and scan.held_back == 11
    assert scan.feed("x" * 5000) is None and scan.held_back == LONGEST_CUT
    assert scan.feed("yy>z") == Match(5016 - LONGEST_CUT, 5016)


def steps(pattern: str, found_in: Any = module) -> int:
    """The number of calls of `after` for a long text without a match."""
    asked = 0

    class Counted(found_in.StopPattern):
        def after(self, hits: int, where: Where) -> int:
            nonlocal asked
            asked += 1
            return super().after(hits, where)

    assert found_in.PatternScan(Counted(pattern)).feed("ac" + "a" * 500) is None
    return asked


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a|b)*a(a|b){20}c{2}"])
def test_a_character_takes_no_more_steps_than_the_pattern_has_places(pattern: str) -> None:
    """A backtracking engine's time would double with each character."""
    assert steps(pattern) <= 502 * len(StopPattern(pattern))
    assert steps(pattern, planted(module, "& ~seen", "")) > 502 * len(StopPattern(pattern))
