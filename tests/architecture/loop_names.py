"""The rule about loop variables, in the form of the rules in `rules.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.rules import sources

SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
LOOPS = (ast.For, ast.AsyncFor)


def taken_names(root: Path) -> list[str]:
    """Find loop variables that overwrite an earlier value of the same function that is read again
    after the loop: that read sees the loop's last value."""
    return [
        source.finding(loop, f"the loop takes {name!r}, which is read behind it as what it was before")
        for source in sources(root)
        for function in ast.walk(source.tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for loop, name in _takers(function)
    ]


def _takers(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.AST, str]]:
    nodes = list(_nodes(function))
    loops = [node for node in nodes if isinstance(node, LOOPS)]
    targets = {id(node) for loop in loops for node in ast.walk(loop.target)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    begins = [(each.arg, 0) for each in ast.walk(function.args) if isinstance(each, ast.arg)]
    given = [(each.id, each.lineno) for each in names if isinstance(each.ctx, ast.Store) and id(each) not in targets]
    for loop in loops:
        for name in {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}:
            last = loop.end_lineno or loop.lineno
            reads = [each.lineno for each in names if each.id == name and isinstance(each.ctx, ast.Load)]
            read = min((line for line in reads if line > last), default=None)
            stores = [line for other, line in begins + given if other == name]
            if read is None or min(stores, default=loop.lineno) >= loop.lineno:
                continue
            if not any(last < line <= read for line in stores):
                yield loop, name


def _nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of nested scopes, which have names of their own."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from _nodes(child)
