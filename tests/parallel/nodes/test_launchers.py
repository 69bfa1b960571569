"""Ranks started by launchers: torchrun itself, a LeaderWorkerSet by its variables, and by hand, on
two hosts; then the link between them is cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sglcore.engine.ranks.rank_process import HOST_INTERFACE
from tests.parallel.hosts import free_port
from tests.parallel.namespaces import ADDRESSES, NAMES, TwoHosts, command_of, missing
from tests.parallel.served import (
    ANSWER,
    SERVE,
    SETTINGS,
    SILENCE,
    answer_of,
    answered_again,
    ledger_of,
    settings_environ,
    stream_until_error,
    until,
    url_in,
)

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MANY = 120.0
"""Seconds that a launcher may take to end; it reports the end itself."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if lacking := missing():
        pytest.skip(f"this machine lacks {lacking}")
    with TwoHosts() as two:
        yield two


def torchrun(node: int) -> tuple[str, ...]:
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", ADDRESSES[0])
    return (*TORCHRUN, *words, "--master-port", "29610", "-m", "sglcore", *SETTINGS)


def by_hand(node: int) -> tuple[str, ...]:
    return (*SERVE, "--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", f"{NAMES[0]}:29611")


def worker_set(node: int) -> dict[str, str]:
    return {"LWS_LEADER_ADDRESS": ADDRESSES[0], "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(node)}


def test_torchrun_of_one_machine_starts_a_server_of_two_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    given = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
    with log.open("w") as out:
        launcher = subprocess.Popen(
            (*TORCHRUN, *words, "-m", "sglcore", *SETTINGS), stdout=out, stderr=out, env={**given, **settings_environ()}
        )
    try:
        url = url_in(log, launcher)
        assert answer_of(url) == ANSWER
        row = ledger_of(url)["placement"]
        assert row["effective"] == "2 nodes by torchrun" and "node 0 is 127.0.0.1, lo" in row["reason"]
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(MANY)
    finally:
        launcher.kill()
        launcher.wait()


STARTS = {
    "torchrun": (torchrun, lambda node: {}, "torchrun"),
    "hand": (by_hand, lambda node: {}, "hand"),
    "a LeaderWorkerSet": (lambda node: SERVE, worker_set, "a LeaderWorkerSet"),
}


@pytest.mark.parametrize("start", STARTS)
def test_two_hosts_answer_like_one_and_end_when_their_link_is_cut(start: str, hosts: TwoHosts, tmp_path: Path) -> None:
    words, variables, launcher = STARTS[start]
    logs = [tmp_path / f"log{node}" for node in (0, 1)]
    started = [
        hosts.start(node, words(node), logs[node], **{**settings_environ(), **variables(node)}) for node in (1, 0)
    ]
    url = url_in(logs[0], started[1])
    assert hosts.on(0, partial(answer_of, url)) == ANSWER
    row = hosts.on(0, partial(ledger_of, url))["placement"]
    assert row["effective"] == f"2 nodes by {launcher}"
    assert f"node 0 is {ADDRESSES[0]}, {hosts.interfaces[0]}" in row["reason"]
    said, seconds = hosts.on(0, partial(stream_until_error, url, hosts.cut))
    assert f"on {ADDRESSES[1]}" in said and "rank 1" in said
    assert seconds < SILENCE + 1.0
    for process in started:
        assert process.wait(MANY) != 0
    assert hosts.pids(0) == hosts.pids(1) == []


def test_a_link_that_is_cut_while_ranks_come_up_ends_the_start(hosts: TwoHosts, tmp_path: Path) -> None:
    logs = [tmp_path / f"log{node}" for node in (0, 1)]
    started = [hosts.start(node, by_hand(node), logs[node], **settings_environ()) for node in (0, 1)]
    until(lambda: bool(ranks_on(hosts, 1)))
    hosts.cut()
    assert [process.wait(MANY) > 0 for process in started] == [True, True]
    assert "rank 1" in logs[0].read_text() and "is gone with its host" in logs[0].read_text()
    assert hosts.pids(0) == hosts.pids(1) == []


def test_an_interface_that_others_can_not_reach_ends_the_start(hosts: TwoHosts, tmp_path: Path) -> None:
    """The back end would choose this interface itself where the host's name means loopback; here
    the user has set it."""
    logs = [tmp_path / f"log{node}" for node in (0, 1)]
    given = {**settings_environ(), HOST_INTERFACE: "lo"}
    started = [hosts.start(node, by_hand(node), logs[node], **given) for node in (0, 1)]
    assert [process.wait(MANY) > 0 for process in started] == [True, True]
    said = logs[0].read_text()
    assert "failed in" in said and "remote=[127.0." in said


def ranks_on(hosts: TwoHosts, host: int) -> list[int]:
    """The processes of ranks on a host."""
    return [pid for pid in hosts.pids(host) if b"rank_process" in command_of(pid)]


def test_what_is_killed_is_noticed_at_once_and_with_restart_all_start_again(hosts: TwoHosts, tmp_path: Path) -> None:
    logs = [tmp_path / f"log{node}" for node in (0, 1, 2)]
    words = [(*by_hand(node), "--restart") for node in (0, 1)]
    leader, other = (hosts.start(node, words[node], logs[node], **settings_environ()) for node in (0, 1))
    url = url_in(logs[0], leader)
    (rank,) = ranks_on(hosts, 0)
    said, seconds = hosts.on(0, partial(stream_until_error, url, partial(os.kill, rank, signal.SIGKILL)))
    assert "rank 0" in said and "SIGKILL" in said and seconds < 1.0
    hosts.on(0, partial(answered_again, url))
    assert "waiting for the leader to start again" in logs[1].read_text()

    (rank,) = ranks_on(hosts, 1)
    said, seconds = hosts.on(0, partial(stream_until_error, url, other.kill))
    assert "rank 1" in said and seconds < 1.0
    other.wait(MANY)
    until(lambda: not hosts.pids(1))  # its rank ends by itself
    again = hosts.start(1, words[1], logs[2], **settings_environ())
    hosts.on(0, partial(answered_again, url))
    leader.send_signal(signal.SIGTERM)
    assert [leader.wait(MANY), again.wait(MANY)] == [0, 0]
    assert hosts.pids(0) == hosts.pids(1) == []


def test_restarts_are_the_launchers_where_it_starts_all_again(tmp_path: Path) -> None:
    given = {**os.environ, **settings_environ(), **worker_set(1)}
    found = subprocess.run((*SERVE, "--restart"), capture_output=True, text=True, env=given, check=False)
    assert found.returncode == 2
    assert "--restart is given, and the LeaderWorkerSet, by its restartPolicy starts all nodes again" in found.stderr
