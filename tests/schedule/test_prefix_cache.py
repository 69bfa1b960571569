"""The radix tree of pages: matching, locking and eviction order, compared with a plain set of
prefixes; and the positions of requests in it."""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

import numpy as np
import pytest

from sglcore.schedule.batch_builder import BatchBuilder
from sglcore.schedule.cache.prefix_cache import SLACK, Node, PrefixCache
from sglcore.schedule.request import Request
from tests.schedule.drive import Drive


def tokens(*ids: int) -> np.ndarray:
    """A sequence of tokens."""
    return np.array(ids, dtype=np.int32)


def publish(cache: PrefixCache, ids: np.ndarray, pages: list[int]) -> Node:
    """Insert a whole sequence and leave it unused."""
    node = cache.root
    for index, page in enumerate(pages):
        key = cache.key(ids, index)
        found = node.children.get(key)
        if found is None:
            found = cache.insert(node, key, page)
        else:
            cache.use((found,))
        node = found
    cache.leave(node)
    return node


def pages_of(path: list[Node]) -> list[int]:
    """The pages of the nodes."""
    return [node.page for node in path]


@pytest.mark.parametrize(("length", "matched"), [(1, 0), (4, 1), (5, 2), (6, 2), (7, 3), (9, 3)])
def test_a_match_is_whole_pages_and_leaves_a_token_to_compute(length: int, matched: int) -> None:
    cache = PrefixCache(page_size=2, lookahead=0)
    publish(cache, tokens(*range(7)), [1, 2, 3])
    assert len(cache.match(tokens(*range(length)))) == matched


def test_a_page_is_found_only_after_the_same_beginning() -> None:
    cache = PrefixCache(page_size=2, lookahead=0)
    publish(cache, tokens(1, 2, 3, 4), [1, 2])
    assert pages_of(cache.match(tokens(1, 2, 3, 4, 5))) == [1, 2]
    assert cache.match(tokens(9, 9, 3, 4, 5)) == []


@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_page_is_found_only_before_the_same_following_tokens(lookahead: int) -> None:
    cache = PrefixCache(page_size=2, lookahead=lookahead)
    publish(cache, tokens(1, 2, 3, 4, 5, 6), [1, 2])
    assert pages_of(cache.match(tokens(1, 2, 3, 4, 5, 6))) == [1, 2]
    assert pages_of(cache.match(tokens(1, 2, 3, 4, 9, 6))) == [1]
    assert cache.match(tokens(1, 2, 9, 4)) == []
    assert pages_of(cache.match(tokens(1, 2, 3, 4, 5)[: 2 + lookahead])) == [1]


def test_the_least_recently_used_branch_goes_first_from_its_end() -> None:
    cache = PrefixCache(page_size=1, lookahead=0)
    publish(cache, tokens(1, 2, 3), [1, 2, 3])
    publish(cache, tokens(1, 5, 6), [1, 5, 6])
    publish(cache, tokens(1, 2, 3), [1, 2, 3])
    assert pages_of(cache.evict(2)) == [6, 5]
    assert pages_of(cache.evict(9)) == [3, 2, 1]
    assert (cache.num_pages, cache.num_unused) == (0, 0)


def test_pages_in_use_and_all_before_them_are_kept() -> None:
    cache = PrefixCache(page_size=1, lookahead=0)
    publish(cache, tokens(1, 2, 3), [1, 2, 3])
    path = cache.match(tokens(1, 2, 9))
    cache.use(path)
    assert pages_of(cache.evict(9)) == [3]
    cache.leave(path[-1])
    assert pages_of(cache.evict(9)) == [2, 1]


def test_many_uses_do_not_grow_the_eviction_order_without_bound() -> None:
    cache = PrefixCache(page_size=1, lookahead=0)
    publish(cache, tokens(1, 2), [1, 2])
    beginning = cache.match(tokens(1, 9))
    cache.use(beginning)
    cache.leave(beginning[-1])
    publish(cache, tokens(7), [7])
    for _ in range(5000):
        path = cache.match(tokens(1, 2, 3))
        cache.use(path)
        cache.leave(path[-1])
    assert len(cache._leaves) < 200
    assert pages_of(cache.evict(3)) == [7, 2, 1]


class KeepsStaleEntries(PrefixCache):
    """Mutant: when the eviction queue is rebuilt, any entry of a node may be kept, not only its
    newest."""

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            self._serial += 1
            heapq.heappush(self._leaves, (node.tick, self._serial, node))
            if len(self._leaves) > 2 * self.num_pages + SLACK:
                self._leaves = sorted({id(entry[2]): entry for entry in self._leaves}.values())


@pytest.mark.parametrize(("kind", "evicted"), [(PrefixCache, [1, 2]), (KeepsStaleEntries, [2])])
def test_an_order_that_is_made_anew_has_each_page_where_it_was_used_last(kind: type, evicted: list[int]) -> None:
    cache = kind(page_size=1, lookahead=0)
    for page in (1, 1, 2):
        node = publish(cache, tokens(page), [page])
    stale, live, other = cache._leaves
    cache._leaves = [live, other, *[stale] * (2 * cache.num_pages + SLACK)]
    cache._offer(node)
    assert pages_of(cache.evict(2)) == evicted


@pytest.mark.parametrize("seed", range(20))
def test_random_use_agrees_with_a_plain_set_of_prefixes(seed: int) -> None:
    print("seed", seed)
    rnd = Random(seed)
    cache = PrefixCache(page_size=2, lookahead=rnd.choice([0, 1]))
    pages, known = iter(range(1, 10_000)), {}
    for _ in range(150):
        ids = tokens(*(rnd.randint(0, 2) for _ in range(rnd.randint(1, 11))))
        full = max(len(ids) - cache.lookahead, 0) // 2
        prefixes = [ids[: 2 * index + 2 + cache.lookahead].tobytes() for index in range(full)]
        found = pages_of(cache.match(ids))
        usable = prefixes[: (len(ids) - max(1, cache.lookahead)) // 2]
        wanted = []
        for prefix in usable:
            if prefix not in known:
                break
            wanted.append(known[prefix])
        assert found == wanted
        fresh = [known.setdefault(prefix, page) for prefix, page in zip(prefixes, pages, strict=False)]
        publish(cache, ids, fresh)
        gone = set(pages_of(cache.evict(rnd.choice([0, 0, 0, 3]))))
        known = {prefix: page for prefix, page in known.items() if page not in gone}
        assert sorted(pages_of(cache.nodes())) == sorted(known.values())
        assert cache.num_pages == cache.num_unused == len(known)


class ForgetsNothing(BatchBuilder):
    """Mutant: keeps what it knows of requests that have ended."""

    def forget(self, request: Request) -> None:
        """Do nothing."""


def make_drive() -> Drive:
    return Drive(overlap=False, draft_tokens=2, takes_proposals=True, keeps_history=True, allows_mixed_batches=False)


def known(drive: Drive) -> set[Request]:
    """The requests with a known position in the prefix cache."""
    proposals: Any = drive.scheduler._builder._proposals
    return set(proposals._standings)


def test_a_position_is_kept_while_the_request_runs() -> None:
    drive = make_drive()
    drive.add("before", 12, 4)
    drive.run()
    requests = [drive.add(rid, 12, 12) for rid in ("one", "two")]
    drive.step(6)
    assert known(drive) == set(requests)
    drive.scheduler.abort("one")
    assert known(drive) == {requests[1]}
    drive.run()
    assert not known(drive)


def test_a_position_of_a_request_that_has_ended_is_noticed() -> None:
    drive = make_drive()
    drive.scheduler._builder.__class__ = ForgetsNothing
    drive.add("before", 12, 4)
    drive.add("one", 12, 12)
    with pytest.raises(AssertionError, match="have ended and still have a position"):
        drive.run()
