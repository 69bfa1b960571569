"""Ranks on the hosts of a Ray cluster, with a fake cluster that records every call."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.core.errors import ConfigError, WorkerLost
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
    assert ray.groups == [([here, {"CPU": 1.0}], "STRICT_SPREAD")] and ray.waits == [120.0]
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
    assert ray.joined == [] and ray.events == ["removed"] and ray.waits == [1.0]


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


@pytest.mark.parametrize(
    ("bundle", "options"),
    [
        ({"CPU": 2.0}, (2.0, 0.0, None)),
        ({"GPU": 4.0}, (0.0, 4.0, None)),
        ({"NPU": 1.0}, (0.0, 0.0, {"NPU": 1.0})),
    ],
)
def test_an_actor_requests_nothing_that_its_bundle_does_not_have(
    bundle: dict[str, float], options: tuple[float, float, Any], ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own default is one CPU, for which its bundle would have no room."""
    monkeypatch.setattr(launch_ray, "NODE", "no.such.module")
    hosts = launch_ray.RayHosts("auto", 2, bundle)
    hosts.begin((b"one\n",), 1.0)
    hosts.close()
    (actor,) = ray.actors
    assert tuple(actor.options[name] for name in ("num_cpus", "num_gpus", "resources")) == options


def test_a_child_has_its_module_its_line_and_its_variables(
    ray: FakeRay, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of its own takes precedence over the actor's."""
    actor = launch_ray.ChildActor("timeit", b"line\n", {"ACTOR_WORD": "given"})
    assert actor.place() == (ray.address, actor._process.pid)
    assert os.getsid(actor._process.pid) == actor._process.pid, "a signal for the actor's group is not for its child"
    actor._process.kill()
    assert actor.wait() == -9
    monkeypatch.setenv("ACTOR_WORD", "of the actor")
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
    assert not [each for each in threading.enumerate() if each.name.startswith("ray")], "its thread ends with it"
    found = given[0].get("num_cpus")
    assert given[0].get("include_dashboard") is (None if address == "auto" else False)
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


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("head:6379", ("head", 6379)),
        ("[fd00::1]:6379", ("fd00::1", 6379)),
        ("auto", None),
        ("local", None),
        ("head", None),
    ],
)
def test_a_head_is_looked_for_at_its_host_and_port_for_some_seconds(
    address: str, asked: tuple[str, int] | None, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *given: tried.append(given) or socket.socket())
    launch_ray.RayHosts(address, 1, {"CPU": 1.0}).close()
    assert tried == ([] if asked is None else [(asked, launch_ray.HEAD_SECONDS)]) and ray.joined == [address]


@pytest.mark.parametrize("text", ["cause", "story\ncause", "story\n\n  cause \n", "story\r\ncause\r\n"])
def test_the_cause_of_a_remote_error_is_in_its_last_line(text: str) -> None:
    assert launch_ray.last_line(text) == "cause" and launch_ray.last_line("\n") == ""


def test_ray_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ray, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is requested, and it is not installed.*pip install ray"):
        launch_ray.RayHosts("auto", 1, {"CPU": 1.0})


def test_a_cluster_that_has_not_enough_says_what_hosts_have_and_not_rays_own_marks(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.has_room = False
    has = {"CPU": 8.0, "node:10.0.0.1": 1.0, "node:__internal_head__": 1.0}
    monkeypatch.setattr(launch_ray.ray_module(), "cluster_resources", lambda: has)
    hosts = launch_ray.RayHosts("auto", 2, {"CPU": 2.0})
    with pytest.raises(
        ConfigError, match=r"it has \{'CPU': 8.0, 'node:10.0.0.1': 1.0\}; wanted \{'CPU': 2.0\} on each"
    ):
        hosts.begin((b"one\n",), 1.0)
    hosts.close()


@pytest.mark.parametrize("ended", [1, 2, 3])
def test_the_node_that_has_ended_is_named_by_its_number(
    ended: int, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Child:
        """A child that ends when it is told to; the given one has ended with exit code 7."""

        def __init__(self, module: str, spec: bytes, variables: dict[str, str]) -> None:
            code = 7 if int(spec) == ended else None
            closing = SimpleNamespace(close=lambda: None)
            self._process = SimpleNamespace(poll=lambda: code, wait=lambda: code, stdin=closing)

    monkeypatch.setattr(launch_ray, "ChildActor", Child)
    monkeypatch.setattr(launch_ray, "ENDING", 0.0)
    hosts = launch_ray.RayHosts("auto", 4, {"CPU": 1.0})
    hosts.begin((b"1", b"2", b"3"), 1.0)
    with pytest.raises(WorkerLost, match=f"node {ended} ended with exit code 7; its log on that host"):
        hosts.check()
    hosts.close()
    assert all(each.is_killed and each.options["max_concurrency"] == 2 for each in ray.actors)


def test_all_nodes_are_waited_for_before_their_actors_are_killed(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, int, float]] = []
    module = launch_ray.ray_module()

    def wait(ends: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        waits.append((len(ends), num_returns, timeout))
        assert not any(each.is_killed for each in ray.actors)
        return ends, []

    monkeypatch.setattr(launch_ray, "NODE", "no.such.module")
    monkeypatch.setattr(module, "wait", wait)
    hosts = launch_ray.RayHosts("auto", 3, {"CPU": 1.0})
    hosts.begin((b"1\n", b"2\n"), 1.0)
    hosts.close()
    assert waits == [(2, 2, launch_ray.ENDING)] and all(each.is_killed for each in ray.actors)


@pytest.mark.parametrize(("chosen", "kept"), [(None, "0"), ("1", "1")])
def test_a_cluster_that_is_started_here_reports_its_use_to_nobody_unless_that_is_wanted(
    chosen: str | None, kept: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "RAY_USAGE_STATS_ENABLED"
    monkeypatch.setattr(os, "environ", {**os.environ, **({} if chosen is None else {name: chosen})})
    if chosen is None:
        os.environ.pop(name, None)
    launch_ray.RayHosts("auto", 1, {"CPU": 1.0}).close()
    assert os.environ.get(name) == chosen
    launch_ray.RayHosts("local", 1, {"CPU": 1.0}).close()
    assert os.environ[name] == kept


@pytest.mark.parametrize(("cores", "asked"), [(10_000.5, 10_001), (10_000.0, 10_000)])
def test_a_part_of_a_core_is_a_core_of_a_cluster_that_is_started_here(
    cores: float, asked: int, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(launch_ray.ray_module(), "init", lambda where, **options: given.append(options))
    launch_ray.RayHosts("local", 1, {"CPU": cores}).close()
    assert given[0]["num_cpus"] == asked and given[0]["object_store_memory"] == launch_ray.OBJECT_STORE_BYTES
