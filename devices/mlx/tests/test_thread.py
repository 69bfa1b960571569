"""Tests of the stream's thread: calls run in order; results and errors reach the caller."""

from __future__ import annotations

import threading

import pytest

from sglcore_mlx.thread import StreamThread


def test_calls_run_in_the_order_in_which_they_were_posted_on_one_thread() -> None:
    thread, seen = StreamThread(), []
    futures = [thread.post(lambda number=number: seen.append((number, threading.get_ident()))) for number in range(50)]
    for future in futures:
        future.result()
    assert [number for number, _ in seen] == list(range(50))
    assert len({ident for _, ident in seen}) == 1 and seen[0][1] != threading.get_ident()
    thread.close()


def test_an_error_reaches_its_caller_and_later_calls_run() -> None:
    thread = StreamThread()
    failed = thread.post(lambda: 1 // 0)
    assert thread.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        failed.result()
    thread.close()


def test_closing_finishes_what_was_posted_and_refuses_more() -> None:
    thread, seen = StreamThread(), []
    for number in range(5):
        thread.post(seen.append, number)
    thread.close()
    thread.close()
    assert seen == list(range(5))
    with pytest.raises(RuntimeError, match="closed"):
        thread.post(seen.append, 5)
