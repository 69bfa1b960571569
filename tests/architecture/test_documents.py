"""Every link of the documents leads somewhere, and every page is reachable from the first one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("devices/*/*.md"), *ROOT.glob("simulator/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_MARKUP = re.compile(r"`|\*|\[([^\]]*)\]\([^)]*\)")


def slug_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    plain = _MARKUP.sub(lambda found: found[1] or "", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings."""
    return frozenset(map(slug_of, _HEADING.findall(page.read_text(encoding="utf-8"))))


def dead_links(page: Path, text: str) -> list[str]:
    """Return the links to files or headings of the checkout that do not exist."""
    dead = []
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert dead_links(page, page.read_text(encoding="utf-8")) == []


def test_a_link_to_nothing_is_seen() -> None:
    text = "[a](nothing.md) [b](api.md#nothing) [c](#nothing) [d](api.md#endpoints) [e](https://example.org/nothing)"
    assert dead_links(DOCS / "README.md", text) == ["nothing.md", "api.md#nothing", "#nothing"]


def test_the_first_page_names_all_others_once() -> None:
    named = [link for link in _LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")) if "/" not in link]
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")
