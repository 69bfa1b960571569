"""The specification of a rank's process, and how a process starts on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Protocol

import msgspec

from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.device.choice import ChosenDevice
from sglcore.worker.topology import Place


class RankSpec(msgspec.Struct, frozen=True):
    """What the process of a rank is started with, as one line of JSON on its standard input: the
    configuration, the rank's device and place, how to reach the leader, and the time between
    heartbeats. `spec_of` and `hosts.spec_at` make it."""

    config: dict[str, Any]
    """The configuration, as `plain_config` returns it."""
    chosen: str
    """The rank's device, as `ChosenDevice.encode` writes it."""
    place: dict[str, Any]
    """The rank's `Place`, as `as_plain` returns it."""
    address: str
    """The leader's address, in the form that `wire.connect` takes."""
    epoch: int
    """The number of this start of the ranks."""
    secret: str
    """The secret that the rank sends to be admitted."""
    beat: float = 1.0
    """Seconds between two heartbeats of the rank."""
    own_address: str = ""
    """The address of this machine as other hosts reach it; empty: there are no other hosts."""
    interface_variables: tuple[str, ...] = ()
    """Names of environment variables that get the name of the network interface."""


HOST_GONE = 256
"""The exit code that is reported for a rank if the connection to its host is lost. No process
returns it."""


class RankProcess(Protocol):
    """The process of one rank: a child process, or one on another host."""

    @property
    def pid(self) -> int:
        """The process id on its own host; 0 until another host has reported it."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended the process; None while it runs.
        Does not wait."""
        ...

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process and return the exit code. Raises an exception after
        `timeout` seconds."""
        ...

    def kill(self) -> None:
        """End the process at once, without waiting for its end. A process on another host: tell
        that host to end all its ranks, without waiting. Idempotent."""
        ...


Spawn = Callable[[RankSpec], RankProcess]
"""Starts the process of a rank and returns it; does not wait for its start-up."""


def spawn_local(spec: RankSpec) -> RankProcess:
    """Start the rank as a child of this process. The rank ends when this process does, because its
    channels close then."""
    command = [sys.executable, "-m", "sglcore.engine.ranks.rank_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=dict(os.environ))
    assert process.stdin is not None
    with process.stdin as given:
        given.write(msgspec.json.encode(spec) + b"\n")
    return process


def spec_of(config: EngineConfig, chosen: ChosenDevice, place: Place, *, is_host: bool, **told: Any) -> RankSpec:
    """Return the spec of the rank at `place`; `told`: further fields of `RankSpec` by name.

    Ranks of one machine get consecutive devices from `chosen` on. With `is_host` (the processor),
    they share the device.
    """
    own = chosen if is_host else replace(chosen, index=chosen.index + place.local)
    device = own.name if is_host else f"{own.name}:{own.index}"
    plain = plain_config(replace(config, device=device))
    return RankSpec(plain, own.encode(), place.as_plain(), **told)


def limits_text(limits: object) -> str:
    """Return the fields of a `Limits` as one line, for an error that compares two."""
    return ", ".join(f"{name}={value}" for name, value in asdict(limits).items())  # pyright: ignore[reportArgumentType]
