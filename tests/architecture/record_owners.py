"""The rule that one module writes each record of a request, in the form of the rules in
`rules.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.architecture.rules import Source, sources

FOLDER = "sglcore/schedule/"
ROOMS = (FOLDER, "sglcore/engine/")
"""The rooms that have requests."""
OWNERS: Mapping[str, str] = MappingProxyType(
    {
        "Held": f"{FOLDER}cache/request_pages.py",
        "WindowList": f"{FOLDER}cache/window_pages.py",
        "SavedStates": f"{FOLDER}cache/state_snapshots.py",
        "RunState": f"{FOLDER}run_state.py",
    }
)
"""The records of a request, and the module that defines each and alone changes it."""
PATHS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("Request", "held"): "Held",
        ("Request", "run"): "RunState",
        ("Held", "windows"): "WindowList",
        ("Held", "states"): "SavedStates",
    }
)
"""The fields that have a record, by the record that they are in."""
CHANGES = frozenset(
    {
        "add",
        "append",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
    }
)
"""Methods that change a list, a set or a dictionary."""


def foreign_writes(root: Path) -> list[str]:
    """Find statements that change a field of a request's record outside the record's own module: an
    assignment, `del`, or a call of a method that changes a list, a set or a dictionary. Names count
    that a function assigns from a record, or that are annotated with one."""
    return [
        f"{source.name}:{node.lineno}: changes {record}.{name}, which only {OWNERS[record]} may"
        for source in sources(root)
        if source.name.startswith(ROOMS)
        for node, record, name in _writes(source)
        if source.name != OWNERS[record]
    ]


def _writes(source: Source) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield each changed field of a record: its node, the record and the field's name."""
    for scope in ast.walk(source.tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            names = _named(scope)
            for node in ast.walk(scope):
                for target in _changed(node):
                    if isinstance(target, ast.Attribute) and (record := _record(target.value, names)) in OWNERS:
                        yield target, record, target.attr


def _named(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """Map the names that stand for a record in a function to the record."""
    given = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
    names = {each.arg: each.annotation.id for each in given if isinstance(each.annotation, ast.Name)}
    names = {name: kind for name, kind in names.items() if kind in OWNERS}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node.targets, node.value):
                if isinstance(target, ast.Name) and (record := _record(value, names)) in OWNERS:
                    names[target.id] = record
    return names


def _pairs(targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def _record(node: ast.expr, names: dict[str, str]) -> str:
    """Return the record that an expression reads from a request or from another record; "" if it is
    none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if not isinstance(node, ast.Attribute):
        return ""
    return PATHS.get((_record(node.value, names) or "Request", node.attr), "")


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement or a call changes, without subscripts."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = [*node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        targets = [node.func.value]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        elif isinstance(target, ast.Subscript | ast.Starred):
            targets.append(target.value)
        else:
            yield target
