"""Engines in actors of a Ray cluster on this machine alone: the same guarantees as for child
processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest
import uvloop

from sglcore.core.errors import ConfigError
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.ray_launch import RayLauncher, RayProcess
from sglcore.serving.replicas.server_errors import EngineDied
from tests.serving.replicas.test_deaths import PATIENCE, SHORT, begin, is_running, running_frontend, text_of
from tests.serving.staged_replicas import until

pytestmark = pytest.mark.needs("clients")


def engines(frontend: Frontend) -> dict[int, RayProcess]:
    """The engines by replica number."""
    found = {replica.number: replica.process for replica in frontend.supervisor.replicas.values()}
    return {number: process for number, process in found.items() if isinstance(process, RayProcess)}


def test_replicas_on_a_cluster_answer_die_and_are_replaced() -> None:
    async def play() -> list[int]:
        async with running_frontend(replicas=2, ray="local") as frontend:
            begun = [await begin(frontend) for _ in range(2)]
            for generation in begun:
                await generation.__anext__()
            assert all(len(replica.generations) == 1 for replica in frontend.supervisor.ready), "each replica answers"
            killed = engines(frontend)[0].pid
            os.kill(killed, signal.SIGKILL)
            lost = next(each for each in begun if each.request_id in frontend.supervisor.replicas[0].generations)
            with pytest.raises(EngineDied, match="signal 9; part of the answer had been given"):
                await text_of(lost)
            begun[1 - begun.index(lost)].abort()
            assert frontend.health.ready
            await until(lambda: len(frontend.supervisor.ready) == 2, PATIENCE)
            texts = [text_of(await begin(frontend, SHORT)) for _ in range(2)]
            assert len(set(await asyncio.gather(*texts))) == 1
            assert await frontend.audit() == []
            return [killed, *(engine.pid for engine in engines(frontend).values())]

    pids = uvloop.run(play())
    assert len(set(pids)) == 3 and not [pid for pid in pids if is_running(pid)]


def test_a_head_where_nobody_listens_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        launcher = RayLauncher(address, {}, 1)
        with pytest.raises(ConfigError, match=f"no Ray cluster can be joined at '{address}'.*ray start --head"):
            uvloop.run(launcher.frontend_host())
