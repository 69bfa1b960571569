"""A cosmic-ray operator that removes statements: a call, a raise, a deletion, an augmented
assignment, or an assignment to an attribute or item becomes `pass`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cosmic_ray.operators.operator import Example, Operator  # pyright: ignore[reportMissingImports]
from parso.python.tree import Keyword  # pyright: ignore[reportMissingImports]

Position = tuple[tuple[int, int], tuple[int, int]]


class RemoveStatement(Operator):
    """Replaces a statement with side effects by `pass`; plain assignments to names stay."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield (start, end) of a statement of these kinds, each as (line, column)."""
        if (
            node.parent is not None
            and node.parent.type == "simple_stmt"
            and node is node.parent.children[0]
            and _acts(node)
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return `pass` as its replacement."""
        return Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Examples for cosmic-ray's own tests."""
        return (Example("f(x)\n", "pass\n"), Example("a.b = c\n", "pass\n"), Example("raise E\n", "pass\n"))


def _acts(node: Any) -> bool:
    if node.type in ("raise_stmt", "del_stmt"):
        return True
    if node.type == "expr_stmt":
        target = node.children[0]
        return target.type in ("atom_expr", "power") or (
            node.children[1].type == "operator" and node.children[1].value != "="
        )
    return node.type in ("atom_expr", "power") and str(node.children[-1].get_first_leaf().value) == "("


class Chosen:
    """Provides the operators with names that `pattern` matches: cosmic-ray's (`core`) and ours."""

    def __init__(self, core: Mapping[str, type[Operator]], pattern: str) -> None:
        self._core = core
        self._names = [name for name in [*core, RemoveStatement.__name__] if re.fullmatch(pattern, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> type[Operator]:
        return RemoveStatement if name == RemoveStatement.__name__ else self._core[name]
