"""Finds the functions of a Python file, and the functions that contain given lines."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType

MODULE = ""
"""The name for lines outside of functions; they run at import."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def bodies_of(path: Path) -> MappingProxyType[str, int]:
    """Return the lines of each function's body, by the function's dotted name, as a bit mask (bit N
    for line N). Lines of a nested function count for that function only. Empty for a file that does
    not parse, or that is gone."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
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
    """Return the innermost functions that contain these lines, including their signatures and
    decorators; MODULE for lines outside of functions."""
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
    """Yield every function below a node with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield before + child.name, child
            yield from _functions(child, f"{before}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{before}{child.name}.")
        else:
            yield from _functions(child, before)


def _first(node: _Function) -> int:
    """Return the first line of a function, including decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _bits(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first)
