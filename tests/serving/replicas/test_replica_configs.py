"""A decision that one replica makes by measurement applies to all."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.serving.replicas.configs import decided
from sglcore.serving.replicas.engine_process import fingerprint
from sglcore.serving.replicas.ipc import Ready
from tests.serving.staged_replicas import PATIENCE, PlayedEngine, Stage, info, staged, until

DECISIONS = {
    "eagle3, 0, 1 or 4 tokens a step; text as without": "eagle3",
    "ngram; text as without": "ngram",
    "off": "off",
}


def row(effective: str) -> dict[str, object]:
    return {"topic": "speculative", "effective": effective}


async def become_ready(stage: Stage, engine: PlayedEngine, effective: str) -> None:
    """Report the result of the measurement, and become ready."""
    count = len(stage.supervisor.ready)
    engine.say(Ready(msgspec.structs.replace(info(), ledger=(row(effective),))))
    await until(lambda: len(stage.supervisor.ready) > count)


@pytest.mark.parametrize("found", DECISIONS)
def test_the_first_replica_decides_and_the_others_and_their_successors_are_told(found: str) -> None:
    async def play() -> None:
        config = EngineConfig(speculative="auto")
        async with staged(replicas=3, config=config) as stage:
            first = await stage.launched()
            await asyncio.sleep(0)
            assert len(stage.engines) == 1 and first.spec.config["speculative"] == "auto"
            await become_ready(stage, first, found)
            assert not stage.supervisor.health.ready, "the others are on their way"
            others = [await stage.launched() for _ in range(2)]
            for other in others:
                assert other.spec.config["speculative"] == DECISIONS[found]
                await become_ready(stage, other, found)
            assert stage.supervisor.health.ready and {each.spec.replica for each in stage.engines} == {0, 1, 2}
            first.die()
            assert (await stage.launched()).spec.config["speculative"] == DECISIONS[found]

    asyncio.run(asyncio.wait_for(play(), PATIENCE))


def test_a_first_replica_that_dies_before_it_has_decided_is_followed_by_one_that_does() -> None:
    async def play() -> None:
        async with staged(replicas=2, config=EngineConfig(speculative="auto")) as stage:
            (await stage.launched()).die(1)
            again = await stage.launched()
            assert (again.spec.replica, again.spec.config["speculative"]) == (0, "auto")
            await become_ready(stage, again, "off")
            assert (await stage.launched()).spec.config["speculative"] == "off"

    asyncio.run(asyncio.wait_for(play(), PATIENCE))


def test_the_others_are_started_once_though_the_first_says_nothing_of_it() -> None:
    async def play() -> None:
        async with staged(replicas=2, config=EngineConfig(speculative="auto")) as stage:
            for _ in range(2):
                await stage.ready_engine()
            assert stage.supervisor.health.ready and len(stage.engines) == 2

    asyncio.run(asyncio.wait_for(play(), PATIENCE))


def test_what_was_asked_for_by_name_is_started_everywhere_at_once() -> None:
    async def play() -> None:
        async with staged(replicas=2, config=EngineConfig(speculative="ngram")) as stage:
            assert [(await stage.launched()).spec.config["speculative"] for _ in range(2)] == ["ngram"] * 2

    asyncio.run(asyncio.wait_for(play(), PATIENCE))


def test_a_decision_that_nobody_made_changes_nothing() -> None:
    config = EngineConfig(speculative="auto")
    assert decided(config, info()) == config
    named = replace(config, speculative="ngram")
    assert decided(named, msgspec.structs.replace(info(), ledger=(row("off"),))) == named


def test_who_decided_and_who_was_told_have_the_same_fingerprint(tmp_path: Path) -> None:
    draft: dict[str, object] = {"topic": "draft model", "effective": "eagle3"}
    pairs = [
        ([draft, row("off")], [row("off")]),
        ([draft, row("eagle3, 4 tokens a step; text as without")], [draft, row("eagle3, 4 tokens a step")]),
    ]
    for decides, told in pairs:
        assert fingerprint(tmp_path, "x", decides) == fingerprint(tmp_path, "x", told)
    assert fingerprint(tmp_path, "x", pairs[0][0]) != fingerprint(tmp_path, "x", pairs[1][0])


def test_the_last_decision_of_an_engine_counts_where_one_was_asked_for() -> None:
    ledger = (row("off"), row("ngram; text as without"), {"topic": "graphs", "effective": "full"})
    facts = msgspec.structs.replace(info(), ledger=ledger)
    assert decided(EngineConfig(speculative="auto"), facts).speculative == "ngram"
    assert decided(EngineConfig(speculative="off"), facts).speculative == "off"
    assert decided(EngineConfig(speculative="auto"), msgspec.structs.replace(facts, ledger=ledger[2:])) == EngineConfig(
        speculative="auto"
    )
