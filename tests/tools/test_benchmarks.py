"""docs/benchmarks.md names every benchmark and every result, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_script() -> None:
    scripts = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert set(re.findall(r"(?m)^\| `benchmarks/(\w+\.py)` \|", PAGE)) == scripts


def test_a_result_is_named_by_a_page() -> None:
    pages = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("devices/*/README.md"))
    )
    results = {path.name for path in (FOLDER / "results").glob("*.json")}
    assert {name for name in results if f"benchmarks/results/{name}" not in pages} == set()
