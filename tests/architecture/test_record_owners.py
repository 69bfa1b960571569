"""One writer for each record of a request."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from sglcore.schedule.request import Request
from tests.architecture import rules
from tests.architecture.record_owners import OWNERS, PATHS, foreign_writes

ROOT = Path(__file__).resolve().parents[2]
WRITES = {
    "an assignment": "request.held.shared = 1",
    "one of several": "request.state, request.run.slot = 1, 2",
    "an addition": "request.held.pages += [1]",
    "an entry": "request.held.states.places[8] = 1",
    "a deletion": "del request.held.windows.pages[:2]",
    "a method": "request.held.windows.ends.add(3)",
    "a name": "held = request.held\n    held.num_cells = 3",
    "a name of several": "held, count = self.leader.held, 2\n    held.windows.kept.clear()",
    "a name of a record in a record": "held = request.held\n    states = held.states\n    states.spare = 0",
    "a parameter": "run.leaving = True",
}
READS = ("pages = request.held.pages[2:]", "request.held.fill(3)", "request.run = fresh", "held = [request.held]")


def found(root: Path, file: str, statement: str) -> list[str]:
    """Return what the rule finds in one statement of a function in a file."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"def change(self, request: Request, run: RunState) -> None:\n    {statement}\n")
    return foreign_writes(root)


def test_each_record_of_a_request_is_written_by_its_own_module() -> None:
    findings = foreign_writes(ROOT)
    rules.parsed.cache_clear()
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("statement", WRITES.values(), ids=WRITES)
def test_a_write_of_another_module_is_found(tmp_path: Path, statement: str) -> None:
    (finding,) = found(tmp_path, "sglcore/schedule/other.py", statement)
    assert "other.py:" in finding and ", which only sglcore/schedule/" in finding


@pytest.mark.parametrize("statement", READS)
def test_a_read_and_a_method_of_the_record_are_not_found(tmp_path: Path, statement: str) -> None:
    assert not found(tmp_path, "sglcore/schedule/other.py", statement)


def test_the_owner_may_write(tmp_path: Path) -> None:
    assert not found(tmp_path, OWNERS["RunState"], WRITES["a parameter"])
    assert found(tmp_path, OWNERS["Held"], WRITES["a parameter"])


def test_the_rule_knows_all_records_and_their_modules() -> None:
    for record, file in OWNERS.items():
        tree = ast.parse((ROOT / file).read_text())
        assert any(isinstance(node, ast.ClassDef) and node.name == record for node in tree.body), file
    kept = {each.name: each.type for each in fields(Request) if each.type in OWNERS}
    assert kept == {name: record for (owner, name), record in PATHS.items() if owner == "Request"}
