"""The functions of a Python file, and which of them a set of lines belongs to."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType

MODULE = ""
"""Stands for the lines of a file that are in no function: they run when it is imported."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def bodies_of(path: Path) -> MappingProxyType[str, int]:
    """The lines of each function's own body as a number whose bit N is line N, by the function's
    dotted name. Lines of a function inside are that one's. Empty for a file that does not parse."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return MappingProxyType({})
    found: dict[str, int] = {}
    for name, node in _functions(tree, ""):
        inner = 0
        for _, other in _functions(node, ""):
            inner |= _bits(_first(other), other.end_lineno or other.lineno)
        own = _bits(node.body[0].lineno, node.end_lineno or node.lineno) & ~inner
        found[name] = found.get(name, 0) | own
    return MappingProxyType(found)


def functions_at(path: Path, lines: Iterable[int]) -> list[str]:
    """The functions of a file that have one of these lines, their heads and decorators too; MODULE
    for other lines."""
    spans = _spans(path)
    found: dict[str, None] = {}
    for line in lines:
        holding = [(last - first, name) for name, first, last in spans if first <= line <= last]
        found[min(holding)[1] if holding else MODULE] = None
    return list(found)


@cache
def _spans(path: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return ()
    return tuple((name, _first(node), node.end_lineno or node.lineno) for name, node in _functions(tree, ""))


def _functions(node: ast.AST, before: str) -> Iterator[tuple[str, _Function]]:
    """Every function below a node with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield before + child.name, child
            yield from _functions(child, f"{before}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{before}{child.name}.")
        else:
            yield from _functions(child, before)


def _first(node: _Function) -> int:
    """The line where a function begins, its decorators counted."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _bits(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first)
