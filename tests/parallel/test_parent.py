"""A child process ends with the exit code that it was given once its standard input closes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sglcore.engine.ranks import parent


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_parent_writes_is_read_until_its_end_closes(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: Iterator[bytes] = iter([b"a line\n", b"more", b""])
    asked: list[tuple[int, int]] = []
    left: list[int] = []
    ended = threading.Event()

    def read(number: int, size: int) -> bytes:
        asked.append((number, size))
        return next(chunks)

    def end(given: int) -> None:
        left.append(given)
        ended.set()

    monkeypatch.setattr(parent.os, "read", read)
    monkeypatch.setattr(parent.os, "_exit", end)
    parent.end_with_parent(code)
    assert ended.wait(30.0)
    assert left == [code] and [number for number, _ in asked] == [0, 0, 0]
