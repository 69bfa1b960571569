"""The thread pool: it visits every element once, gives each thread its own share, and reports
failures."""

from __future__ import annotations

import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore_cpu.native import Engine, Library

NOBODY, TOGETHER = -1, -2


class Runs:
    """The result of `probe_pool` after some runs: how often each element was visited, and which
    thread visited it last."""

    def __init__(self, engine: Engine, count: int, grain: int, runs: int = 1, **how: int) -> None:
        self.hits = torch.zeros(count, dtype=torch.int32)
        self.threads = torch.full((count,), NOBODY, dtype=torch.int32)
        places = {"hits": self.hits.data_ptr(), "threads": self.threads.data_ptr()}
        how = {"waits": NOBODY, "fails": NOBODY} | how
        engine.kernel("probe_pool").bind()(**places, count=count, grain=grain, runs=runs, **how)


def many(library: Library, threads: int) -> Engine:
    return library.engine(library.usable()[0], threads)


@settings(derandomize=True, max_examples=40)
@given(st.integers(0, 5000), st.integers(1, 700), st.integers(1, 9), st.integers(1, 20))
def test_every_element_is_visited_once_in_each_run(
    library: Library, count: int, grain: int, threads: int, runs: int
) -> None:
    done = Runs(many(library, threads), count, grain, runs)
    assert (done.hits == runs).all()
    assert ((done.threads >= 0) & (done.threads < threads)).all()


def test_runs_follow_each_other_without_a_lost_wake(library: Library) -> None:
    engine = many(library, 2)
    assert (Runs(engine, 7, 1, 20_000).hits == 20_000).all()


def test_threads_that_slept_are_woken(library: Library) -> None:
    engine = many(library, 3)
    for _ in range(20):
        time.sleep(0.005)
        assert (Runs(engine, 3, 1, waits=TOGETHER).hits == 1).all()


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_thread_delays_one_part_of_its_share(library: Library, late: int) -> None:
    done = Runs(many(library, 2), 64, 1, waits=late)
    assert (done.threads == late).sum() <= 1


@pytest.mark.parametrize(("count", "grain"), [(4, 1), (400, 100), (397, 100)])
def test_threads_take_their_own_share_first(library: Library, count: int, grain: int) -> None:
    done = Runs(many(library, 4), count, grain, 50, waits=TOGETHER)
    assert done.threads.tolist() == [place // grain for place in range(count)]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("fails", [0, 99])
def test_what_a_part_throws_is_an_error_and_the_pool_runs_on(library: Library, threads: int, fails: int) -> None:
    engine = many(library, threads)
    with pytest.raises(MemoryError):
        Runs(engine, 100, 3, fails=fails)
    assert (Runs(engine, 100, 3, 50).hits == 50).all()


def test_threads_that_may_run_on_some_cores_only_do_all_work(library: Library) -> None:
    if not isinstance(library, Library):
        pytest.skip("cores are not those of an emulated processor")
    core = min(os.sched_getaffinity(0))
    engine = library.engine(library.usable()[0], 3, ((), (core,), (core, 8191, 100_000)))
    assert (Runs(engine, 3, 1, waits=TOGETHER).hits == 1).all()


def test_more_threads_than_cores_make_progress(library: Library) -> None:
    assert (Runs(many(library, 33), 100, 1, 300).hits == 300).all()
