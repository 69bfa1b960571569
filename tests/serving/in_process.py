"""A whole server in the test's own process: the frontend's event loop in one thread, its engine in
another."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.http.http_app import running_app
from sglcore.serving.http.middleware import with_middleware
from sglcore.serving.http.server import uvicorn_config
from sglcore.serving.replicas.channel import EngineChannel
from sglcore.serving.replicas.engine_process import start_service
from sglcore.serving.replicas.ipc import EngineSpec, Failed

LONGEST_START_S = 60.0


class ThreadedEngine:
    """An engine in a thread instead of a process, with the real channel to the frontend."""

    last_words = name = "thread"

    def __init__(self, spec: EngineSpec) -> None:
        self._task = asyncio.get_running_loop().run_in_executor(None, _run, spec)

    async def wait(self) -> int:
        """Wait for its end; return the exit code of a process."""
        return await asyncio.shield(self._task)

    def kill(self) -> None:
        """Do nothing: the engine ends when the frontend tells it to."""


def _run(spec: EngineSpec) -> int:
    channel = EngineChannel(spec.address)
    try:
        return start_service(spec, channel).run()
    except BaseException as error:
        channel.send(Failed(str(error), 1))
        return 1
    finally:
        channel.close()


class ThreadLauncher:
    """Launches engines as threads of this process."""

    is_remote = False

    async def frontend_host(self) -> str:
        """Return "": not used."""
        return ""

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> ThreadedEngine:
        """Start an engine."""
        return ThreadedEngine(spec)

    async def close(self) -> None:
        """Do nothing."""


@contextmanager
def served_here(folder: Path | None, server: ServerConfig | None = None, **settings: Any) -> Iterator[str]:
    """Serve a checkpoint (None: the embedded one) with these settings of EngineConfig; yield the
    address once the engine answers."""
    config = EngineConfig(model=None if folder is None else str(folder), **settings)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        ended, started = threading.Event(), threading.Event()
        faults: list[str] = []
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve(config, server or ServerConfig(), listener, started, ended, faults))
        )
        thread.start()
        try:
            assert started.wait(LONGEST_START_S) and not faults, faults
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


async def _serve(
    config: EngineConfig,
    wanted: ServerConfig,
    listener: socket.socket,
    started: threading.Event,
    ended: threading.Event,
    faults: list[str],
) -> None:
    frontend = ChatFrontend(config, wanted, launcher=ThreadLauncher())
    async with running_app(frontend) as app:
        server = uvicorn.Server(uvicorn_config(with_middleware(app, frontend), wanted))
        await _serve_app(server, frontend, listener, started, ended, faults)


async def _serve_app(
    server: uvicorn.Server,
    frontend: ChatFrontend,
    listener: socket.socket,
    started: threading.Event,
    ended: threading.Event,
    faults: list[str],
) -> None:
    await frontend.start()
    while not frontend.health.ready and frontend.health.live:
        await asyncio.sleep(0.005)
    if not frontend.health.ready:
        faults.append(frontend.health.reason)
    serving = asyncio.create_task(server.serve([listener]))
    started.set()
    await asyncio.to_thread(ended.wait)
    server.should_exit = True
    await serving
    await frontend.stop()
