"""Docstrings and comments do not count as code; everything else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.code import code_of

PLAIN = '''"""A module."""

LIMIT = 3
"""Most of them."""


class Box:
    """A box."""

    def put(self, text: str = "in # it") -> str:
        """Return what."""
        return text  # as it came
'''
BARE = b"""LIMIT = 3
class Box:
    def put(self, text: str = "in # it") -> str:
        return text"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.py"
    path.write_text(PLAIN)
    return path


def test_comments_docstrings_and_blank_lines_do_not_count(file: Path) -> None:
    assert code_of(file) == BARE


@pytest.mark.parametrize(
    ("was", "now"),
    [("= 3", "= 4"), ("in # it", "in # that"), ("return text", 'return "text"'), ("        return", "       return")],
)
def test_every_change_of_code_counts(file: Path, was: str, now: str) -> None:
    file.write_text(PLAIN.replace(was, now))
    assert code_of(file) != BARE


def test_code_beside_a_docstring_counts(file: Path) -> None:
    file.write_text('class Box: "A büx"; size = 3\n')
    assert code_of(file) == b"class Box: ; size = 3"


def test_a_string_that_is_a_value_counts(file: Path) -> None:
    file.write_text('f(\n    "first"\n)\n"not documentation"\n')
    assert code_of(file) == b'f(\n    "first"\n)\n"not documentation"'


@pytest.mark.parametrize("text", ["def broken(:  # why\n", "no text # at all"])
def test_what_is_no_python_counts_whole(file: Path, text: str) -> None:
    file.write_text(text)
    assert code_of(file) == text.encode()


def test_another_kind_of_file_counts_whole(tmp_path: Path) -> None:
    path = tmp_path / "one.cpp"
    path.write_text("int a; // b\n\n")
    assert code_of(path) == b"int a; // b\n\n"
