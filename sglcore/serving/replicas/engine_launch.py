"""Starts engine processes: on this machine as children. For other machines there is another
launcher."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from sglcore.config.server_config import ServerConfig
from sglcore.serving.replicas.ipc import EngineSpec


class EngineProcess(Protocol):
    """A running engine process."""

    @property
    def name(self) -> str:
        """Its name for a person, such as its process number."""
        ...

    @property
    def last_words(self) -> str:
        """The launcher's reason for the end of this process, shown instead of the exit code; empty
        if it knows none."""
        ...

    async def wait(self) -> int:
        """Return its exit code; waits until it has ended. Negative: the signal that ended it."""
        ...

    def kill(self) -> None:
        """End it at once. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts engine processes."""

    @property
    def is_remote(self) -> bool:
        """Whether processes may run on other machines, so that they are reached by TCP and choose
        their own device."""
        ...

    async def frontend_host(self) -> str:
        """Return the address of this machine as the engines' machines reach it; called only if
        `is_remote`. May wait."""
        ...

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> EngineProcess:
        """Start a process, with these variables in its environment; does not wait for its model."""
        ...

    async def close(self) -> None:
        """Release the launcher's resources; every process has ended. Idempotent."""
        ...


class LocalProcess:
    """A child of this process. When this process ends for any reason, the child's input closes and
    the child ends too."""

    last_words = ""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def name(self) -> str:
        """Its process number."""
        return f"process {self._process.pid}"

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    async def wait(self) -> int:
        """Return its exit code; waits until it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


class LocalLauncher:
    """Starts children of this process."""

    is_remote = False

    async def frontend_host(self) -> str:
        """Empty: channels on one machine are files and need no host."""
        return ""

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> LocalProcess:
        """Start a child; does not wait for its model."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sglcore.serving.replicas.engine_process",
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        return LocalProcess(process)

    async def close(self) -> None:
        """There is nothing to release."""


def launcher_for(server: ServerConfig) -> Launcher:
    """Return the launcher of this server's engines. Raises ConfigError if it is not installed."""
    if server.ray is None:
        return LocalLauncher()
    from sglcore.serving.replicas.ray_launch import RayLauncher

    return RayLauncher(server.ray, server.resources, server.replicas)
