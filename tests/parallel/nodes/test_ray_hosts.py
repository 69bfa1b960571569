"""Ranks on two hosts of a real Ray cluster: they answer as one process does, and end together when
the link between the hosts is cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.parallel import ray_cluster
from tests.parallel.namespaces import ADDRESSES, TwoHosts, command_of, missing
from tests.parallel.served import (
    ANSWER,
    SERVE,
    SILENCE,
    answer_of,
    ledger_of,
    settings_environ,
    stream_until_error,
    until,
    url_in,
)

pytestmark = pytest.mark.needs("clients")


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if lacking := missing():
        pytest.skip(f"this machine lacks {lacking}")
    with TwoHosts() as two:
        yield two


def test_two_hosts_of_a_cluster_answer_like_one_and_end_when_their_link_is_cut(hosts: TwoHosts, tmp_path: Path) -> None:
    ray_cluster.begin(hosts, tmp_path)
    log = tmp_path / "served"
    server = hosts.start(
        0, (*SERVE, "--nodes", "2", "--ray", ray_cluster.HEAD), log, **settings_environ(), **ray_cluster.VARIABLES
    )
    url = url_in(log, server)
    assert hosts.on(0, partial(answer_of, url)) == ANSWER
    row = hosts.on(0, partial(ledger_of, url))["placement"]
    assert row["effective"] == "2 nodes by Ray" and f"node 0 is {ADDRESSES[0]}, {hosts.interfaces[0]}" in row["reason"]
    ranks = [pid for pid in hosts.pids(1) if _is_rank(pid)]
    said, seconds = hosts.on(0, partial(stream_until_error, url, hosts.cut))
    assert f"on {ADDRESSES[1]}" in said and "rank 1" in said and seconds < SILENCE + 1.0
    assert server.wait(120) != 0
    assert len(ranks) == 2, "the node and its rank"
    until(lambda: not any(map(_is_rank, hosts.pids(1))))


def _is_rank(pid: int) -> bool:
    return b"engine.ranks" in command_of(pid)
