"""Ranks of one model on several hosts: they give the results of one process, agree before they
load, and end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.ranks import host_process
from sglcore.engine.ranks.hosts import EPOCH, Joined, NodeFacts, Order, RemoteHost, host_spec
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.rank_process import LEADER_GONE
from sglcore.engine.ranks.spec import HOST_GONE
from sglcore.engine.ranks.watch import Patience
from sglcore.engine.ranks.wire import Channel, Kind, connect, listen
from sglcore.worker.topology import Place, Topology
from sglcore_cpu.choice import engine_of_one
from sglcore_cpu.rank_meeting import memory_size
from sglcore_cpu.shared_sums import MOST, _opened, sums_for
from tests.checkpoints import llama, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine
from tests.parallel.hosts import OtherNode, free_port

QUICK = Patience(silence=3.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    oracle = llama(max_position_embeddings=128)
    return save(oracle, tmp_path_factory.mktemp("llama")), oracle


@pytest.fixture
def led(model: tuple[Path, Any]) -> Iterator[Callable[..., RankedEngine]]:
    engines: list[RankedEngine] = []

    def lead(port: int, patience: Patience = Patience(silence=60.0), nodes: int = 2, **settings: Any) -> RankedEngine:
        given = {"nodes": nodes, "node_rank": 0, "leader": f"127.0.0.1:{port}", "join_timeout": 60.0, **settings}
        engines.append(RankedEngine(model[0], patience=patience, **given))
        return engines[-1]

    yield lead
    for engine in engines:
        engine.worker.close()


def test_ranks_of_two_hosts_give_the_logprobs_of_transformers_and_the_tokens_of_one_process(
    model: tuple[Path, Any], led: Callable[..., RankedEngine]
) -> None:
    port = free_port()
    other = OtherNode(model[0], port)
    engine = led(port)
    prompts = random_prompts(1, (5, 9, 30))
    found = engine.run(prompts, 8, score_prompts=True, stagger=2)
    check_logprobs(found, model[1], 1e-4)
    alone = TokenEngine(model[0])
    assert [each.tokens for each in found] == [each.tokens for each in alone.run(prompts, 8)]
    alone.worker.close()
    rows = {row.topic: row for row in engine.started.ledger.rows}
    assert rows["placement"].effective == "2 nodes by hand" and "node 0 is 127.0.0.1" in rows["placement"].reason
    assert len(engine.forking.processes) == len(other.forking.processes) == 1
    engine.worker.close()
    assert other.ended() == 0, "the leader has closed it"


def test_four_ranks_of_two_hosts_stand_in_a_row(model: tuple[Path, Any], led: Callable[..., RankedEngine]) -> None:
    port = free_port()
    other = OtherNode(model[0], port, tp=4)
    engine = led(port, tp=4)
    check_logprobs(engine.run(random_prompts(1, (5, 9)), 4), model[1], 1e-4)
    assert [member.host for member in engine.worker._watch.members] == ["", "", "127.0.0.1", "127.0.0.1"]
    engine.worker.close()
    assert other.ended() == 0 and len(other.forking.processes) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs files whose room can be taken beforehand")
def test_the_memory_of_all_ranks_is_there_before_it_is_used(tmp_path: Path) -> None:
    """Otherwise, without room, a rank would end by a signal at its first touch of a page, without a
    message."""
    _opened(tmp_path / "sums", 3).close()
    found = (tmp_path / "sums").stat()
    assert found.st_size == memory_size(3, MOST) and found.st_blocks * 512 >= found.st_size


def test_small_sums_go_through_memory_only_where_it_is_shared() -> None:
    here = Place(0, Topology(tp=2), "file:///dev/shm/sglcore/meeting", 0, 2)
    assert sums_for(here, engine_of_one) is not None
    for elsewhere in (
        Place(0, Topology(tp=2), "tcp://10.0.0.1:5", 0, 1),
        Place(0, Topology(tp=2), "tcp://127.0.0.1:5", 0, 2),
        Place(0, Topology(tp=4, dp=2), "file:///dev/shm/sglcore/meeting", 0, 2),
    ):
        assert sums_for(elsewhere, engine_of_one) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 8}, "node 0 and node 1 .* differ: --page-size is 4 and 8; wanted the same"),
        ({"tp": 4}, "--tp is 2 and 4"),
        ({"node": 2, "nodes": 2}, "says that it is node 2 of 2"),
    ],
)
def test_hosts_that_differ_are_refused_on_both_sides_before_anything_is_loaded(
    settings: dict[str, Any], message: str, model: tuple[Path, Any], led: Callable[..., RankedEngine]
) -> None:
    port = free_port()
    other = OtherNode(model[0], port, **settings)
    with pytest.raises(ConfigError, match=message):
        led(port)
    other.join(60)
    assert isinstance(other.error, ConfigError) and "refuses" in str(other.error) and not other.forking.processes


def test_a_node_that_leaves_a_choice_open_takes_what_the_leader_has_decided(
    model: tuple[Path, Any], led: Callable[..., RankedEngine]
) -> None:
    """For example the settled choices of a leader that restarts its ranks."""
    port = free_port()
    other = OtherNode(model[0], port, speculative="auto")
    engine = led(port, speculative="ngram")
    prompts = random_prompts(1, (5, 9))
    alone = TokenEngine(model[0])
    assert [each.tokens for each in engine.run(prompts, 8)] == [each.tokens for each in alone.run(prompts, 8)]
    alone.worker.close()
    engine.worker.close()
    assert other.ended() == 0


def test_another_choice_than_the_leaders_is_refused(model: tuple[Path, Any], led: Callable[..., RankedEngine]) -> None:
    port = free_port()
    other = OtherNode(model[0], port, speculative="off")
    with pytest.raises(ConfigError, match="--speculative is ngram and off"):
        led(port, speculative="ngram")
    other.join(60)


def test_another_version_and_other_files_are_refused(
    model: tuple[Path, Any], led: Callable[..., RankedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, there = free_port(), save(llama(max_position_embeddings=128, rope_theta=9.0), tmp_path)
    own = host_process.shared_facts
    monkeypatch.setattr(host_process, "shared_facts", lambda *given: own(*given) | {"sglcore": "0.0.1"})
    other = OtherNode(there, port)
    with pytest.raises(ConfigError, match=r"sglcore is .* and 0\.0\.1.*the files of the model is \w{12} and \w{12}"):
        led(port)
    other.join(60)


def test_two_hosts_of_one_number_are_refused(model: tuple[Path, Any], led: Callable[..., RankedEngine]) -> None:
    port = free_port()
    others = [OtherNode(model[0], port, nodes=4, tp=4) for _ in range(2)]
    with pytest.raises(ConfigError, match="both say that they are node 1"):
        led(port, tp=4, nodes=4)
    for other in others:
        other.join(60)
        assert isinstance(other.error, ConfigError)


def test_what_a_host_lacks_is_said_by_the_leader_too(model: tuple[Path, Any], led: Callable[..., RankedEngine]) -> None:
    def lacks(given: Any) -> Any:
        raise ConfigError("there is no model at '/models/x'")

    port = free_port()
    other = OtherNode(model[0], port, prepare=lacks)
    with pytest.raises(ConfigError, match=r"host 127\.0\.0\.1: there is no model at '/models/x'"):
        led(port)
    other.join(60)


def test_a_host_that_does_not_come_is_named_after_the_time(led: Callable[..., RankedEngine]) -> None:
    port = free_port()
    with pytest.raises(WorkerLost, match=rf"of 2 nodes 1 did not join at 127\.0\.0\.1:{port} in 1 s.*--join-timeout"):
        led(port, join_timeout=1.0)


def test_a_port_that_is_taken_is_an_error_before_anybody_is_waited_for(led: Callable[..., RankedEngine]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .*another port"):
            led(port)


def test_whoever_speaks_another_language_is_let_go(model: tuple[Path, Any], led: Callable[..., RankedEngine]) -> None:
    port = free_port()

    def babble() -> None:
        with host_process.reach("127.0.0.1", port, 30.0) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\nhost: somebody\r\n\r\n")
            stream.settimeout(30.0)
            try:
                heard.append(stream.recv(1))
            except ConnectionResetError:  # it was let go before all was read
                heard.append(b"")

    heard: list[bytes] = []
    stranger = threading.Thread(target=babble)
    stranger.start()
    time.sleep(0.05)
    other = OtherNode(model[0], port)
    engine = led(port)
    stranger.join(30)
    assert heard == [b""]
    engine.worker.close()
    assert other.ended() == 0


@pytest.mark.parametrize("victim", ["a rank there", "a rank here"])
def test_a_rank_that_dies_ends_those_of_every_host(
    victim: str, model: tuple[Path, Any], led: Callable[..., RankedEngine]
) -> None:
    port = free_port()
    other = OtherNode(model[0], port)
    engine = led(port, patience=Patience(silence=3600.0, starting=3600.0))
    engine.run(random_prompts(1, (5,)), 2)
    process = (other.forking if victim == "a rank there" else engine.forking).processes[0]
    os.kill(process.pid, signal.SIGKILL)
    where = r"process \d+ on 127\.0\.0\.1" if victim == "a rank there" else r"process \d+"
    with pytest.raises(WorkerLost, match=rf"rank [01] \({where}\) ended by SIGKILL"):
        engine.run(random_prompts(1, (5, 9)), 100)
    engine.worker.close()
    # The node may learn the cause before or after it sees its leader leave.
    assert other.ended() in (host_process.FAILED, LEADER_GONE)
    assert all(each.poll() is not None for each in engine.forking.processes)


def test_what_ends_a_rank_of_another_host_while_it_comes_up_is_told(
    model: tuple[Path, Any], led: Callable[..., RankedEngine]
) -> None:
    port = free_port()
    other = OtherNode(model[0], port, defect=partial(defects.dies_in, "model"))
    with pytest.raises(WorkerLost, match=r"rank 1 \(process \d+ on 127\.0\.0\.1\) ended by SIGKILL"):
        led(port)
    assert other.ended() == host_process.FAILED


def test_a_host_that_is_told_to_end_goes_on_until_its_time_is_over(
    model: tuple[Path, Any], led: Callable[..., RankedEngine]
) -> None:
    port = free_port()
    other = OtherNode(model[0], port)
    engine = led(port)
    other.node.stopping.finish = 1.0
    other.node.stopping.is_asked = True
    engine.run(random_prompts(1, (5,)), 2)
    assert other.ended() == host_process.FAILED
    with pytest.raises(WorkerLost, match="rank 1"):
        while True:
            engine.worker.check()
            time.sleep(0.01)


class Quiet:
    """A leader's or a node's end of a channel; it sends and receives only what the test does."""

    def __init__(self) -> None:
        self.listener, address = listen(None, "127.0.0.1")
        self.far = Channel(connect(address), EPOCH)
        stream, _ = self.listener.accept()
        self.near = Channel(stream, EPOCH)

    def close(self) -> None:
        for each in (self.listener, self.far, self.near):
            each.close()


@pytest.fixture
def quiet() -> Iterator[Quiet]:
    made = Quiet()
    yield made
    made.close()


def order(silence: float) -> Order:
    return Order([{"rank": 1}], "127.0.0.1", 1, 2, 3, "secret", 0.1, silence, (), {"speculative": "auto"})


class Stuck:
    """A process that runs until it is killed."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float) -> int:
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL


def test_a_host_ends_its_ranks_when_the_leader_is_silent(quiet: Quiet) -> None:
    ranks: Any = {1: Stuck()}
    begin = time.monotonic()
    code = host_process.Following(quiet.near, ranks, order(0.5), host_process.Stopping()).run()
    assert code == LEADER_GONE and time.monotonic() - begin >= 0.5
    host_process.end_ranks(ranks)
    assert ranks[1].poll() == -signal.SIGKILL


def test_a_host_ends_its_ranks_when_the_leader_is_gone(quiet: Quiet) -> None:
    quiet.far.close()
    ranks: Any = {1: Stuck()}
    following = host_process.Following(quiet.near, ranks, order(60.0), host_process.Stopping(), ending=0.2)
    assert following.run() == LEADER_GONE


class Slow(Stuck):
    """A process that the leader has closed, and that ends a while later."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._at = time.monotonic() + seconds

    def poll(self) -> int | None:
        return 0 if self.code is None and time.monotonic() >= self._at else self.code


def test_ranks_that_the_leader_has_closed_may_take_longer_than_a_beat_to_end(quiet: Quiet) -> None:
    quiet.far.close()
    ranks: Any = {1: Slow(10 * order(60.0).beat)}
    assert host_process.Following(quiet.near, ranks, order(60.0), host_process.Stopping()).run() == 0


def remote_of(quiet: Quiet, silence: float) -> RemoteHost:
    facts = NodeFacts(1, "", 0, 0, 1, {})
    remote = RemoteHost(Joined(facts, quiet.near, "10.0.0.2", "10.0.0.1"), 0.1, silence)
    remote.begin(order(silence))
    return remote


@pytest.mark.parametrize(("is_cut", "is_tied_later"), [(True, False), (False, False), (False, True)])
def test_a_leader_takes_the_ranks_of_a_host_that_is_gone_or_silent_for_gone(
    is_cut: bool, is_tied_later: bool, quiet: Quiet
) -> None:
    ours, theirs = socket.socketpair()
    remote = remote_of(quiet, 0.5 if is_cut else 60.0)
    if not is_tied_later:
        remote.hang_up_with([Channel(ours, EPOCH)])
    if not is_cut:
        quiet.far.close()
    assert remote.ranks[1].wait(30.0) == HOST_GONE
    if is_tied_later:
        remote.hang_up_with([Channel(ours, EPOCH)])
    theirs.settimeout(30.0)
    assert theirs.recv(1) == b"", "its ranks hear that they are to end"
    theirs.close()


def test_a_host_that_is_cut_off_and_told_to_end_its_ranks_is_not_waited_for(quiet: Quiet) -> None:
    remote = remote_of(quiet, 3600.0)
    remote.ranks[1].kill()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        remote.ranks[1].wait(3600.0)
    assert time.monotonic() - begin < 60.0
    frames: list[Kind] = []
    while Kind.CLOSE not in frames:
        frames.append(quiet.far.receive().kind)
    assert frames[0] is Kind.ORDER
    remote.close()


def test_a_host_follows_again_where_the_leader_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([LEADER_GONE, host_process.FAILED, 0])

    class Again:
        stopping = host_process.Stopping()

        def follow(self) -> int:
            return next(codes)

    node: Any = Again()
    monkeypatch.setattr(host_process, "_signals", lambda stopping: socket.socket())
    assert host_process.follow(node, restart=False) == LEADER_GONE
    assert host_process.follow(node, restart=True) == 0


def test_a_node_that_another_process_has_started_ends_with_it(model: tuple[Path, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as leader:
        placement = Placement("Ray", "", 2, 1, ("127.0.0.1", leader.getsockname()[1]))
        config = resolve_config({"model": str(model[0]), "device": "cpu", "nodes": 2, "tp": 2}, {})
        command = [sys.executable, "-m", host_process.__name__]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as node:
            assert node.stdin is not None
            node.stdin.write(host_spec(config, placement))
            node.stdin.flush()
            stream, _ = leader.accept()
            with stream:
                node.stdin.close()
                assert node.wait(120.0) == LEADER_GONE
