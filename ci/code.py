"""Reduces a source file to its code: Python without comments, docstrings and blank lines."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_of(path: Path) -> bytes:
    """Return the bytes of a file that can change the outcome of a test. A file that is not Python,
    or not valid Python, is returned whole."""
    whole = path.read_bytes()
    return _code_of_python(whole) if path.suffix == ".py" else whole


@cache
def _code_of_python(whole: bytes) -> bytes:
    """Cached by content, because many groups cover the same files."""
    try:
        text = whole.decode()
        lines = _without_comments(text)
        for string in _docstrings(ast.parse(text)):
            _cut(lines, string)
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return whole
    return b"\n".join(line for line in map(bytes.rstrip, lines) if line)


def _without_comments(text: str) -> list[bytes]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.encode() for line in lines]


def _docstrings(tree: ast.Module) -> list[ast.expr]:
    """Return the docstrings: strings at the beginning of modules, classes and functions, and
    strings after an assignment in their bodies."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    found = [
        statement.value
        for body in bodies
        for place, statement in enumerate(body)
        if isinstance(statement, ast.Expr) and (place == 0 or isinstance(body[place - 1], (ast.Assign, ast.AnnAssign)))
    ]
    return [value for value in found if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def _cut(lines: list[bytes], string: ast.expr) -> None:
    """Remove a string from its lines; other code on these lines stays."""
    first, last = string.lineno - 1, (string.end_lineno or string.lineno) - 1
    before, after = lines[first][: string.col_offset], lines[last][string.end_col_offset :]
    lines[first : last + 1] = [before + after] + [b""] * (last - first)
