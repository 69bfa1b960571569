"""The garbage collector is off during a build, and has its former state afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sglcore.core.garbage_collection import MANY, no_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.unfreeze()
    assert gc.isenabled()
    yield
    gc.freeze()
    gc.enable()


def is_young(thing: object) -> bool:
    return any(other is thing for other in gc.get_objects(generation=0))


def test_nothing_is_collected_inside_and_the_collector_is_on_again() -> None:
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), no_collection():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


def test_one_inside_another_leaves_the_outer_one_alone() -> None:
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_inside_is_old_and_no_collection_ran_for_it() -> None:
    before = [each["collections"] for each in gc.get_stats()]
    with no_collection():
        kept = [[number] for number in range(2 * MANY)]
        assert is_young(kept)
    is_old, after = not is_young(kept), [each["collections"] for each in gc.get_stats()]
    assert is_old and after == before
    assert gc.get_freeze_count() == 0


def test_garbage_made_inside_is_found_by_a_whole_collection() -> None:
    gc.collect()
    with no_collection():
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
    assert gc.collect() >= 1


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with no_collection():
        pass
    assert gc.get_freeze_count() >= frozen - 100
