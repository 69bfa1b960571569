"""Ranks on the hosts of a Ray cluster, with a fake cluster that records every call."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from sglcore.device.errors import ConfigError, WorkerLost
from sglcore.engine.ranks import launch_ray
from tests.checkpoints import llama, save
from tests.laws.engine import TokenEngine, random_prompts
from tests.parallel.engine import RankedEngine
from tests.parallel.fake_ray import FakeRay, RayError


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


def test_an_actor_has_the_devices_of_its_bundle_and_its_child_the_line_and_the_variables(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_ray, "NODE", "no.such.module")
    hosts = launch_ray.RayHosts("auto", 3, {"CPU": 2.0, "GPU": 4.0, "NPU": 1.0})
    hosts.begin((b"one\n", b"two\n"), 1.0)
    hosts.close()
    kept = ("num_cpus", "num_gpus", "resources", "scheduling_strategy", "max_restarts")
    assert [[each.options[name] for name in kept] for each in ray.actors] == [
        [2.0, 4.0, {"NPU": 1.0}, place, 0] for place in (1, 2)
    ]
    assert len(ray.groups[0][0]) == 3 and all(each.is_killed for each in ray.actors)


def test_a_child_has_its_module_its_line_and_its_variables(ray: FakeRay, capfd: pytest.CaptureFixture[str]) -> None:
    actor = launch_ray.ChildActor("timeit", b"line\n", {"ACTOR_WORD": "given"})
    assert actor.place() == (ray.address, actor._process.pid)
    actor._process.kill()
    assert actor.wait() == -9
    command = "import os, sys; print(sys.stdin.readline().strip(), os.environ['ACTOR_WORD'], 'PATH' in os.environ)"
    popen = launch_ray.subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_ray.subprocess, "Popen", lambda words, **how: popen([words[0], "-c", command], **how))
        actor = launch_ray.ChildActor("any", b"line\n", {"ACTOR_WORD": "given"})
    assert actor.wait() == 0 and capfd.readouterr().out == "line given True\n"


@pytest.mark.parametrize(("address", "room"), [("local", 1), ("local", 10_000), ("auto", 4)])
def test_a_cluster_that_is_started_here_has_room_for_the_ranks(
    address: str, room: int, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(launch_ray.ray_module(), "init", lambda where, **options: given.append(options))
    hosts = launch_ray.RayHosts(address, 1, {"CPU": float(room)})
    hosts.close()
    hosts.close()
    found = given[0].get("num_cpus")
    assert found == (None if address == "auto" else max(room, os.cpu_count() or 1)) and ray.events == ["left"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("\nno head\nat all"), "no head"), (ValueError(), "ValueError"), (RayError("gone"), "gone")],
)
def test_a_cluster_that_can_not_be_joined_is_told_with_the_first_line_of_the_reason(
    error: Exception, reason: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str, **options: Any) -> None:
        raise error

    monkeypatch.setattr(launch_ray.ray_module(), "init", init)
    with pytest.raises(ConfigError, match=f"no Ray cluster can be joined at 'auto': {reason}; wanted a cluster"):
        launch_ray.RayHosts("auto", 1, {"CPU": 1.0})
    assert not [each for each in threading.enumerate() if each.name.startswith("ray")] and not ray.events


def test_a_head_that_is_not_there_is_not_waited_for(ray: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        launch_ray.RayHosts(f"127.0.0.1:{port}", 1, {"CPU": 1.0}).close()
    with pytest.raises(ConfigError, match=f"no Ray cluster can be joined at '127.0.0.1:{port}': .*refused"):
        launch_ray.RayHosts(f"127.0.0.1:{port}", 1, {"CPU": 1.0})
    assert ray.joined == [f"127.0.0.1:{port}"]


def test_ray_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ray, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is requested, and it is not installed.*pip install ray"):
        launch_ray.RayHosts("auto", 1, {"CPU": 1.0})
