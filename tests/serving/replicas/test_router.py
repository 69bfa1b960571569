"""Routing of prompts: never to a replica that is not ready or too busy; otherwise to one that has
their prefix cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore.config.engine_config import EngineConfig
from sglcore.serving.replicas.router import Router, block_hashes
from tests.serving.staged_replicas import staged

PAGE = 16
PAGES = 256


@dataclass
class Played:
    """A replica with its own prefix cache, and requests that last some turns."""

    number: int
    page_size: int = PAGE
    num_pages: int = PAGES
    cached: dict[bytes, None] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    hit_pages: int = 0

    @property
    def load(self) -> int:
        """The number of unfinished requests."""
        return len(self.ends)

    def serve(self, prompt: bytes, end: int) -> None:
        """Compute the uncached pages, and evict the least recently used ones."""
        pages = [prompt[:stop] for stop in range(4 * PAGE, len(prompt) + 1, 4 * PAGE)]
        self.hit_pages += next((count for count, page in enumerate(pages) if page not in self.cached), len(pages))
        for page in reversed(pages):
            self.cached.pop(page, None)
            self.cached[page] = None
        for page in list(self.cached)[: max(0, len(self.cached) - self.num_pages)]:
            del self.cached[page]
        self.ends.append(end)


Choose = Callable[[Sequence[Played], bytes], Played]


def in_turn() -> Choose:
    """A round-robin router, which ignores prefixes."""
    turn = iter(range(1 << 30))
    return lambda ready, prompt: ready[next(turn) % len(ready)]


def prompts(groups: int, count: int, seed: int, shared: int = 12 * PAGE) -> list[bytes]:
    """Prompts with a beginning shared in their group and an ending of their own."""
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, 1000, (groups, shared), dtype=np.int32)
    ends = rng.integers(0, 1000, (count, 2 * PAGE), dtype=np.int32)
    return [np.concatenate([begins[rng.integers(groups)], end]).tobytes() for end in ends]


def hit_share(choose: Choose, replicas: int, sent_prompts: Sequence[bytes], *, lasts: int = 8) -> float:
    """The share of all pages that were cached on the chosen replica. A request ends after `lasts`
    more have arrived."""
    targets = [Played(number) for number in range(replicas)]
    for now, prompt in enumerate(sent_prompts):
        for target in targets:
            target.ends = [end for end in target.ends if end > now]
        choose(targets, prompt).serve(prompt, now + lasts)
    return sum(target.hit_pages for target in targets) / sum(len(prompt) // (4 * PAGE) for prompt in sent_prompts)


def holds_prefixes_together(make: Callable[[], Choose]) -> bool:
    """The invariant: with groups of shared prefixes, four replicas hit nearly as often as one."""
    sent_prompts = prompts(groups=24, count=400, seed=1)
    return hit_share(make(), 4, sent_prompts) > 0.9 * hit_share(make(), 1, sent_prompts)


def test_several_replicas_find_nearly_as_much_cached_as_one() -> None:
    assert holds_prefixes_together(lambda: Router().choose)


def test_the_law_of_cached_prefixes_finds_a_router_that_takes_turns() -> None:
    assert not holds_prefixes_together(in_turn)


steps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.sets(st.integers(0, 3), min_size=1), st.booleans()),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_only_ready_replicas_below_the_bound_are_chosen(taken: list[tuple[int, int, set[int], bool]]) -> None:
    router, targets = Router(slack=3, ratio=1.5), [Played(number) for number in range(4)]
    groups = prompts(groups=4, count=4, seed=2)
    for group, length, numbers, ends in taken:
        ready = [target for target in targets if target.number in numbers]
        loads = [target.load for target in ready]
        chosen = router.choose(ready, groups[group][: length * 4])
        assert chosen in ready
        assert chosen.load <= 1.5 * min(loads) + 3
        chosen.ends.append(0)
        if ends:
            chosen.ends.clear()


def test_a_prefix_that_everybody_shares_is_spread_over_all_replicas() -> None:
    router, targets = Router(ratio=1.0, slack=4), [Played(number) for number in range(3)]
    (prompt,) = prompts(groups=1, count=1, seed=3)
    for _ in range(60):
        router.choose(targets, prompt).ends.append(0)
    assert max(target.load for target in targets) - min(target.load for target in targets) <= 5


def test_equals_take_turns() -> None:
    router, targets = Router(), [Played(number) for number in range(3)]
    assert [router.choose(targets, b"").number for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_replica_that_has_ended_is_forgotten() -> None:
    router, targets = Router(), [Played(number) for number in range(2)]
    (prompt,) = prompts(groups=1, count=1, seed=4)
    assert [router.choose(targets, prompt).number for _ in range(3)] == [0, 0, 0]
    router.forget(0)
    targets[0].ends.append(0)
    assert router.choose(targets, prompt).number == 1
    targets[0].ends.clear()
    assert router.choose(targets, prompt).number == 1


@pytest.mark.parametrize(("most_blocks", "num_pages"), [(40, 1000), (1000, 40)])
def test_no_more_is_remembered_than_said(most_blocks: int, num_pages: int) -> None:
    router, target = Router(most_blocks=most_blocks), Played(0, num_pages=num_pages)
    sent_prompts = prompts(groups=10, count=50, seed=5)
    for prompt in sent_prompts:
        router.choose([target], prompt)
    remembered = sum(router.matched(target, block_hashes(prompt, PAGE)[:1]) for prompt in sent_prompts)
    whole = router.matched(target, block_hashes(sent_prompts[-1], PAGE))
    assert whole == len(sent_prompts[-1]) // (4 * PAGE), "the newest is remembered whole"
    assert remembered < len(sent_prompts), "the oldest is not"
    assert router.remembered(0) <= 40


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(1, 8))
def test_blocks_agree_as_far_as_the_tokens_do(first: list[int], second: list[int], page: int) -> None:
    def hashes(ids: list[int]) -> list[int]:
        return block_hashes(np.asarray(ids, dtype="<i4").tobytes(), page)

    same = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    common = min(len(first), len(second)) if same is None else same
    agreed = [a == b for a, b in zip(hashes(first), hashes(second), strict=False)]
    assert len(hashes(first)) == len(first) // page
    assert agreed == [index < common // page for index in range(len(agreed))]


@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_follow_what_is_cached_only_where_prefixes_are_cached(keeps: bool) -> None:
    async def play() -> None:
        async with staged(replicas=2, config=EngineConfig(prefix_cache=keeps)) as stage:
            for _ in range(2):
                await stage.ready_engine()
            taken = list[int]()
            for number in range(4):
                generation = stage.submit(f"r{number}", *range(64))
                replicas = stage.supervisor.replicas.values()
                taken += [each.number for each in replicas if generation.request_id in each.generations]
                generation.abort()
            assert taken == ([taken[0]] * 4 if keeps else [0, 1, 0, 1])

    asyncio.run(play())
