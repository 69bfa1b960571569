"""Random traces of a device with speculation: arrivals, aborts, stops, shared prefixes, too few
pages. A request gets the same tokens and log-probabilities as alone and without speculation, and
every page and slot is freed. Does not use torch."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from devices.mlx.tests.parity import TokenEngine
from devices.mlx.tests.speculating import AtRandom, stepper_of
from devices.mlx.tests.test_traces import Truth, check_life, draw_life, engine, folder, open_engine, play, truth
from sglcore_mlx.speculative.verify import NONE
from sglcore_mlx.speculative.worker import SpeculativeWorker

__all__ = ["engine", "folder", "truth"]

SEEDS = range(100, 124)
MOST = 3


class Remembering:
    """Proposes the continuation of the same prefix in known texts, with mistakes. Waits for the
    device."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._random = np.random.default_rng(0)
        self._next: dict[bytes, list[int]] = {}

    def learn(self) -> None:
        """Store the continuation of every prefix of the texts known so far."""
        for found in self._truth._known.values():
            text = np.array([*found.prompt, *found.tokens], np.int32)
            for end in range(len(found.prompt), len(text)):
                self._next[text[:end].tobytes()] = text[end : end + MOST].tolist()

    def __call__(self, known: mx.array, last: mx.array, tokens: int) -> mx.array:
        """As `ngram.propose`."""
        rows = zip(np.array(known), np.array(last).tolist(), strict=True)
        return mx.array(np.stack([self._propose(row[: end + 1], tokens) for row, end in rows]))

    def _propose(self, text: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
        found = np.full(tokens, NONE, np.int32)
        following = self._next.get(np.ascontiguousarray(text).tobytes(), [])[:tokens]
        found[: len(following)] = following
        if len(following) and self._random.random() < 0.3:
            found[self._random.integers(len(following))] = 5
        return found


@pytest.fixture(scope="module")
def proposing(folder) -> Iterator[TokenEngine]:
    """An engine that verifies a different number of draft tokens at each step."""
    with open_engine(folder, speculative="ngram", draft_tokens=MOST) as made:
        yield made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_life_gives_each_request_what_it_gets_alone_without_proposals(
    proposing: TokenEngine, truth: Truth, seed: int
) -> None:
    print("seed", seed)
    life = draw_life(Random(seed))
    for arrival in life.arrivals:
        truth(arrival)
    stepper_of(proposing).drafter = drafter = Remembering(truth)
    drafter.learn()
    assert isinstance(proposing.worker, SpeculativeWorker)
    proposing.worker.length = AtRandom(MOST)
    for overlap in (True, False):
        check_life(life, play(proposing.recorder, life, overlap=overlap), truth)


def test_the_lives_reach_what_they_are_meant_to_reach(proposing: TokenEngine, truth: Truth) -> None:
    seen: dict[str, int] = dict.fromkeys(("retractions", "hit_tokens", "length", "stop", "abort"), 0)
    right = 0
    for seed in SEEDS[:12]:
        life = draw_life(Random(seed))
        for arrival in life.arrivals:
            truth(arrival)
        stepper_of(proposing).drafter = drafter = Remembering(truth)
        drafter.learn()
        proposing.recorder.keep, before = True, len(proposing.recorder.steps)
        lived = play(proposing.recorder, life, overlap=True)
        for name in ("retractions", "hit_tokens"):
            seen[name] += getattr(lived.stats, name) > 0
        for result in lived.results:
            seen[result.finish] += 1
        steps = [found for _, found in proposing.recorder.steps[before:] if found.proposed is not None]
        right += sum(len(found.token_ids) - len(found.proposed) for found in steps if found.proposed is not None)
    assert min(seen.values()) >= 2 and right > 20, (seen, right)
