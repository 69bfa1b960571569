"""Starts engine processes as children on this machine. `ray_launch.py` starts them on other
machines."""

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
    """A running engine process, which a `Launcher` started: `LocalProcess` or `RayProcess`."""

    @property
    def name(self) -> str:
        """Its name for messages, such as its process id."""
        ...

    @property
    def last_words(self) -> str:
        """The launcher's reason for the end of this process, shown in place of the exit code; empty
        if it knows none."""
        ...

    async def wait(self) -> int:
        """Return the exit code; waits until the process has ended. Negative: the signal that ended
        it."""
        ...

    def kill(self) -> None:
        """End the process at once, without waiting for its end. Idempotent, also after its end."""
        ...


class Launcher(Protocol):
    """Starts engine processes: `LocalLauncher` on this machine, `RayLauncher` in a cluster."""

    @property
    def is_remote(self) -> bool:
        """Whether processes may run on other machines, so that their channels use TCP and they
        choose their own device."""
        ...

    async def frontend_host(self) -> str:
        """Return the address of this machine as the engines' machines reach it; called only if
        `is_remote`. May wait. Raises ConfigError."""
        ...

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> EngineProcess:
        """Start an engine process with `spec`, and with `variables` in addition to its environment;
        does not wait for its model. The process connects to `spec.address` itself."""
        ...

    async def close(self) -> None:
        """Release the launcher's resources; called when every process has ended. Idempotent."""
        ...


class LocalProcess:
    """The `EngineProcess` that is a child of this process. When this process ends for any reason,
    the child's standard input closes and the child ends too."""

    last_words = ""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def name(self) -> str:
        """Its name for messages: "process" and its process id."""
        return f"process {self._process.pid}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code (negative: the signal that ended it); waits until the process has
        ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """End the process at once, without waiting for its end. Idempotent."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()


class LocalLauncher:
    """The `Launcher` that starts engines as children of this process."""

    is_remote = False

    async def frontend_host(self) -> str:
        """Return "": channels on one machine are files and need no host."""
        return ""

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> LocalProcess:
        """Start a child with `spec` on its standard input, which stays open; does not wait for its
        model. `variables` are added to this process's environment."""
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
        """Do nothing: there is nothing to release."""


def launcher_for(server: ServerConfig) -> Launcher:
    """Return the launcher of this server's engines. Raises ConfigError if Ray is requested and not
    installed."""
    if server.ray is None:
        return LocalLauncher()
    from sglcore.serving.replicas.ray_launch import RayLauncher

    return RayLauncher(server.ray, server.resources, server.replicas)
