"""Rooms without circles of imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.circles import EXEMPT, import_circles

ROOT = Path(__file__).resolve().parents[2]
TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    "
CASES = {
    "two": ({"a": "import sglcore.step.b", "b": "from sglcore.step.a import x"}, ["a", "b"]),
    "for types": ({"a": "from sglcore.step.b import x", "b": f"{TYPES}from sglcore.step.a import x"}, ["a", "b"]),
    "later": ({"a": "from sglcore.step.b import x", "b": "def f():\n    from sglcore.step import a"}, ["a", "b"]),
    "three": (
        {
            "a": "import sglcore.step.b",
            "b": "import sglcore.step.c",
            "c": "import sglcore.step.a",
            "d": "import sglcore.step.a",
        },
        ["a", "b", "c"],
    ),
    "none": ({"a": "import sglcore.step.b", "b": "import sglcore.step.c", "c": ""}, []),
}


def test_no_room_has_a_circle_but_the_exempt() -> None:
    findings = import_circles(ROOT)
    rules.parsed.cache_clear()
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("case", CASES)
def test_a_circle_is_found_with_its_members(tmp_path: Path, case: str) -> None:
    files, circle = CASES[case]
    (tmp_path / "sglcore" / "step").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "sglcore" / "step" / f"{name}.py").write_text(text)
    members = [f"sglcore.step.{name}" for name in circle]
    wanted = [f"sglcore/step/{circle[0]}.py: imports itself by way of {', '.join(members[1:])}"] if circle else []
    assert import_circles(tmp_path) == wanted


def test_each_exempt_room_has_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.architecture.circles.EXEMPT", frozenset())
    rooms = {finding.split("/")[1] for finding in import_circles(ROOT)}
    rules.parsed.cache_clear()
    assert rooms == EXEMPT
