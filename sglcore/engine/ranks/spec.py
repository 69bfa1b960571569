"""What the process of a rank is told, and how one comes to be on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Protocol

import msgspec

from sglcore.device.choice import ChosenDevice
from sglcore.device.config import EngineConfig, plain_config
from sglcore.device.topology import Place


class RankSpec(msgspec.Struct, frozen=True):
    """One line of JSON on a process's standard input. `config` and `place` are plain values, `chosen` is the device of this
    rank; the leader listens at `address` for who knows `secret`, and hears of the rank every `beat` seconds. `own_address` is that
    of this machine as other hosts reach it, if there are any; `interface_variables` are told its network interface."""

    config: dict[str, Any]
    chosen: str
    place: dict[str, Any]
    address: str
    epoch: int
    secret: str
    beat: float = 1.0
    own_address: str = ""
    interface_variables: tuple[str, ...] = ()


HOST_GONE = 256
"""The exit code of a rank whose host can not be heard any more. No process has it."""


class RankProcess(Protocol):
    """A process that runs a rank."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs. Does not wait."""
        ...

    def wait(self, timeout: float) -> int:
        """The same; waits for its end. Raises an exception after `timeout` seconds."""
        ...

    def kill(self) -> None:
        """End it at once. Idempotent."""
        ...


Spawn = Callable[[RankSpec], RankProcess]
"""Starts the process of a rank; does not wait for it."""


def spawn_local(spec: RankSpec) -> RankProcess:
    """A child of this process. It ends when this one does, for then its channels close."""
    command = [sys.executable, "-m", "sglcore.engine.ranks.rank_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=dict(os.environ))
    assert process.stdin is not None
    with process.stdin as given:
        given.write(msgspec.json.encode(spec) + b"\n")
    return process


def spec_of(config: EngineConfig, chosen: ChosenDevice, place: Place, *, is_host: bool, **told: Any) -> RankSpec:
    """What the rank at `place` is told; `told` are further fields. Ranks of one machine have devices in a row; those of the processor share it."""
    own = chosen if is_host else replace(chosen, index=chosen.index + place.local)
    device = own.name if is_host else f"{own.name}:{own.index}"
    plain = plain_config(replace(config, device=device))
    return RankSpec(plain, own.encode(), place.as_plain(), **told)


def limits_text(limits: object) -> str:
    """Limits for a person, who looks for what differs."""
    return ", ".join(f"{name}={value}" for name, value in asdict(limits).items())  # pyright: ignore[reportArgumentType]
