"""Ranks on the hosts of a Ray cluster, with a fake cluster that records every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglcore.device.errors import ConfigError, WorkerLost
from sglcore.engine.ranks import launch_ray
from tests.checkpoints import llama, save
from tests.laws.engine import TokenEngine, random_prompts
from tests.parallel.engine import RankedEngine
from tests.parallel.fake_ray import FakeRay


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    fake.install(monkeypatch)
    return fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("llama"))


def start(folder: Path, **settings: Any) -> RankedEngine:
    return RankedEngine(folder, nodes=2, leader="ray:local", **{"join_timeout": 120.0, **settings})


def test_a_node_that_ray_starts_holds_its_part_and_gives_its_place_back(ray: FakeRay, folder: Path) -> None:
    engine = start(folder)
    prompts = random_prompts(1, (5, 9))
    alone = TokenEngine(folder)
    assert [each.tokens for each in engine.run(prompts, 8)] == [each.tokens for each in alone.run(prompts, 8)]
    alone.worker.close()
    assert ray.joined == ["local"]
    here = {"CPU": 1.0, f"node:{ray.address}": launch_ray.PINNED}
    assert ray.groups == [([here, {"CPU": 1.0}], "STRICT_SPREAD")]
    (actor,) = ray.actors
    assert actor.options["scheduling_strategy"] == 1 and actor.options["num_cpus"] == 1.0
    assert actor.options["max_restarts"] == 0, "all ranks start again, or none"
    row = next(row for row in engine.started.ledger.rows if row.topic == "placement")
    assert row.effective == "2 nodes by Ray"
    engine.worker.close()
    engine.worker.close()
    assert actor.made.wait() == 0 and actor.is_killed and ray.events == ["removed", "left"]


def test_a_cluster_in_which_the_program_was_before_is_not_left(ray: FakeRay) -> None:
    ray.is_joined = True
    hosts = launch_ray.RayHosts("local", 1, {"CPU": 1.0})
    hosts.begin((), 1.0)
    hosts.close()
    assert ray.joined == [] and ray.events == ["removed"]


def test_a_cluster_without_so_many_hosts_is_refused_with_what_it_has(ray: FakeRay, folder: Path) -> None:
    ray.has_room = False
    message = r"did not place 2 nodes on 2 hosts, one of them 127\.0\.0\.1, in 3 s; it has \{'CPU': 1\.0\}"
    with pytest.raises(ConfigError, match=message):
        start(folder, join_timeout=3.0)
    assert ray.events == ["removed", "left"] and not ray.actors


@pytest.mark.parametrize(("is_lost", "how"), [(False, "exit code 1"), (True, "its node has died")])
def test_a_node_that_ends_before_it_has_joined_ends_the_start(
    is_lost: bool, how: str, ray: FakeRay, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_ray, "NODE", "no.such.module")
    ray.lost = is_lost
    with pytest.raises(WorkerLost, match=f"node 1 ended with .*{how}"):
        start(folder)
    assert ray.actors[0].is_killed and ray.events == ["removed", "left"]
