"""The rule about circles of imports, in the form of the rules in `rules.py`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.rules import Source, sources

EXEMPT = frozenset({"cli", "conformance"})
"""Rooms of `sglcore` that may still have circles."""


def import_circles(root: Path) -> list[str]:
    """Find modules of one room of the core that import each other in a circle. Imports for types
    and inside functions count: a reader follows them too."""
    modules = {_module(source): source for source in sources(root) if source.name.startswith("sglcore/")}
    rooms = {name: name.split(".")[1] for name in modules if "." in name}
    graph = {
        name: {other for other in _imported(source) if other != name and rooms.get(other) == rooms.get(name)}
        for name, source in modules.items()
        if rooms.get(name) and rooms[name] not in EXEMPT
    }
    return [
        f"{modules[circle[0]].name}: imports itself by way of {', '.join(circle[1:])}" for circle in _circles(graph)
    ]


def _module(source: Source) -> str:
    return source.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _imported(source: Source) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, each sorted by name."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if other in graph and name in reached[other])
        for name in graph
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that imports lead to from `start`; itself only by way of others."""
    found: set[str] = set()
    queue = list(graph[start])
    while queue:
        name = queue.pop()
        if name not in found and name in graph:
            found.add(name)
            queue += graph[name]
    return found
