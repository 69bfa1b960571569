"""docs/glossary.md lists each word once, and the code names in it exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \| ([^|]*) ?\|$", (ROOT / "docs" / "glossary.md").read_text("utf-8"))
WORDS = [word.strip() for first, _, _ in ROWS if first not in ("word", "---") for word in first.split(", ")]


def test_a_word_has_one_meaning() -> None:
    assert len(WORDS) > 40 and [word for word, count in Counter(WORDS).items() if count > 1] == []


def test_each_class_that_it_names_is_one_of_the_code() -> None:
    names = {word.strip("`") for word in WORDS if re.fullmatch(r"`[A-Z]\w+`", word)}
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "sglcore").rglob("*.py"))
    assert names and {name for name in names if not re.search(rf"^class {name}\b", code, re.MULTILINE)} == set()
