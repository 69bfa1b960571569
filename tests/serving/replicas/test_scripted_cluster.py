"""Engines in actors of a cluster that the test plays: what is requested for each, and how the end
of an actor becomes the end of its engine."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.ranks.launch_ray import ChildActor
from sglcore.serving.replicas import ray_launch
from sglcore.serving.replicas.engine_launch import launcher_for
from sglcore.serving.replicas.ipc import Address, EngineSpec
from sglcore.serving.replicas.ray_launch import ENGINE, LOST, RayLauncher, RayProcess

SPEC = EngineSpec(Address("tcp://h:1"), {}, 3)


class RayError(Exception):
    """The cluster's own error."""


class Cluster:
    """A played Ray: it keeps what is requested, and its actors do what the test says."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.given: list[tuple[Any, ...]] = []
        self.killed: list[Any] = []
        self.rooms: list[tuple[str, int]] = []
        self.shut_downs = 0
        self.threads = set[bool]()
        self.is_ours = True
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        self.actor: Any = Actor()

    def remote(self, kind: Any) -> Any:
        assert kind is ChildActor

        def options(**found: Any) -> Any:
            self.options = found
            return SimpleNamespace(remote=start)

        def start(*given: Any) -> Any:
            self.given.append(given)
            return self.actor

        return SimpleNamespace(options=options)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0, "node:10.0.0.1": 1.0}

    def connect(self, address: str, room: int) -> bool:
        self.threads.add(threading.current_thread() is threading.main_thread())
        self.rooms.append((address, room))
        return self.is_ours

    def shutdown(self) -> None:
        self.threads.add(threading.current_thread() is threading.main_thread())
        self.shut_downs += 1


class Actor:
    """An actor whose calls end when the test sets their results."""

    def __init__(self) -> None:
        self.placed: asyncio.Future[Any] | None = None
        self.ended: asyncio.Future[Any] | None = None
        self.place, self.wait = (
            SimpleNamespace(remote=lambda name=name: self._future(name)) for name in ("placed", "ended")
        )

    def _future(self, name: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        setattr(self, name, future)
        return future


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(ray_launch, "ray_module", lambda: found)
    monkeypatch.setattr(ray_launch, "connect", found.connect)
    monkeypatch.setattr(ray_launch, "check_installed", lambda: None)
    return found


@pytest.mark.parametrize(
    ("resources", "wanted"),
    [
        ({}, (1.0, 0.0, None, None)),
        ({"CPU": 0.5}, (0.5, 0.0, None, None)),
        ({"GPU": 2.0, "memory": 9.0}, (1.0, 2.0, 9.0, None)),
        ({"NPU": 4.0, "special": 1.0, "GPU": 1.0}, (1.0, 1.0, None, {"NPU": 4.0, "special": 1.0})),
    ],
)
def test_each_engine_wants_its_own_resources_and_one_processor_unless_it_says_another_number(
    cluster: Cluster, resources: dict[str, float], wanted: Any
) -> None:
    async def play() -> None:
        launcher = RayLauncher("auto", resources, 2)
        process = await launcher.launch(SPEC, {"A": "b"})
        found = cluster.options
        assert (found["num_cpus"], found["num_gpus"], found["memory"], found["resources"]) == wanted
        assert (found["max_restarts"], found["scheduling_strategy"]) == (0, "SPREAD") and found["max_concurrency"] == 2
        ((module, line, variables),) = cluster.given
        assert (module, variables) == (ENGINE, {"A": "b"}) and line.endswith(b"\n")
        assert msgspec.json.decode(line, type=EngineSpec) == SPEC and process.name == "of replica 3 without a place"

    asyncio.run(play())


@pytest.mark.parametrize(("cpus", "replicas", "room"), [(1.0, 1, 1), (1.0, 3, 3), (0.5, 3, 2), (2.5, 2, 5)])
def test_a_cluster_is_joined_once_with_room_for_all_replicas(
    cluster: Cluster, cpus: float, replicas: int, room: int
) -> None:
    async def play() -> None:
        launcher = RayLauncher("local", {"CPU": cpus}, replicas)
        assert launcher.is_remote
        found = await asyncio.gather(launcher.frontend_host(), launcher.launch(SPEC, {}), launcher.launch(SPEC, {}))
        assert found[0] == "10.0.0.1" and cluster.rooms == [("local", room)]
        for _ in range(2):
            await launcher.close()
        assert cluster.shut_downs == 1 and cluster.threads == {False}, "Ray would take the signals of the main thread"

    asyncio.run(play())


def test_a_cluster_of_others_and_one_that_was_never_joined_are_left_as_they_are(cluster: Cluster) -> None:
    async def play() -> None:
        await RayLauncher("auto", {}, 1).close()
        cluster.is_ours = False
        launcher = RayLauncher("auto", {}, 1)
        await launcher.frontend_host()
        await launcher.close()
        assert cluster.shut_downs == 0

    asyncio.run(play())


def test_a_server_on_a_cluster_has_the_launcher_of_its_settings(cluster: Cluster) -> None:
    async def play() -> None:
        launcher = launcher_for(ServerConfig(ray="auto", ray_resources=("CPU=2", "NPU=1"), replicas=3))
        await launcher.launch(SPEC, {})
        assert cluster.rooms == [("auto", 6)] and cluster.options["resources"] == {"NPU": 1.0}
        assert launcher_for(ServerConfig()).is_remote is False

    asyncio.run(play())


async def begun(cluster: Cluster) -> tuple[RayProcess, asyncio.Task[int]]:
    """A process and the task that waits for its end."""
    process = RayProcess(cluster.actor, 3, {"CPU": 1.0})
    waiting = asyncio.create_task(process.wait())
    while cluster.actor.placed is None:
        await asyncio.sleep(0)
    return process, waiting


async def placed(cluster: Cluster) -> tuple[RayProcess, asyncio.Task[int]]:
    process, waiting = await begun(cluster)
    cluster.actor.placed.set_result(("node7", 42))
    while cluster.actor.ended is None:
        await asyncio.sleep(0)
    return process, waiting


@pytest.mark.parametrize("code", [0, 4, -9])
def test_an_engine_ends_as_its_process_does_and_its_place_is_given_back(cluster: Cluster, code: int) -> None:
    async def play() -> None:
        process, waiting = await placed(cluster)
        assert (process.name, process.host, process.pid) == ("process 42 on node7", "node7", 42)
        assert not waiting.done() and not cluster.killed
        cluster.actor.ended.set_result(code)
        assert await waiting == code and cluster.killed == [cluster.actor] and process.last_words == ""
        process.kill()
        assert cluster.killed == [cluster.actor], "once"

    asyncio.run(play())


def test_an_engine_that_is_killed_ends_at_once_wherever_it_is(cluster: Cluster) -> None:
    async def play() -> None:
        for start in (begun, placed):
            cluster.actor = Actor()
            process, waiting = await start(cluster)
            for _ in range(2):
                process.kill()
            assert await asyncio.wait_for(waiting, 60) == LOST and cluster.killed.count(cluster.actor) == 1

    asyncio.run(play())


def test_an_actor_that_is_lost_is_told_with_the_last_line_of_its_error(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        process, waiting = await placed(cluster)
        cluster.actor.ended.set_exception(RayError("a traceback\nof many lines\nthe node died\n"))
        assert await waiting == LOST
        assert process.last_words == "Ray lost the actor of the engine process 42 on node7: the node died"
        cluster.actor = Actor()
        process, waiting = await begun(cluster)
        cluster.actor.placed.set_exception(RayError("no node"))
        assert await waiting == LOST and process.last_words.endswith("of replica 3 without a place: no node")

    asyncio.run(play())
    assert "actor of replica 3" in caplog.text


def test_an_engine_without_a_place_is_told_once_with_what_the_cluster_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_launch, "PENDING_SECONDS", 0.0)

    async def play() -> None:
        _, waiting = await begun(cluster)
        while "no place yet" not in caplog.text:
            await asyncio.sleep(0)
        cluster.actor.placed.set_result(("node7", 42))
        while cluster.actor.ended is None:
            await asyncio.sleep(0)
        cluster.actor.ended.set_result(0)
        assert await waiting == 0

    asyncio.run(asyncio.wait_for(play(), 60))
    (said,) = caplog.messages
    assert "replica 3 has no place yet: it wants {'CPU': 1.0} and the cluster has {'CPU': 4.0}" in said
