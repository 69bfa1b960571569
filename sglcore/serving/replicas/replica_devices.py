"""The devices of replicas on this machine: each gets `tp` consecutive ones. On other machines Ray
assigns devices."""

from __future__ import annotations

from dataclasses import replace

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.device.selection import Choice

INDEX = "{index}"


def devices_of(choice: Choice, config: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """Return the first device of each replica, as `ChosenDevice.encode` writes it; replica number N
    gets `tp` devices from the chosen one plus N * `tp` on. All replicas get the same one if it is
    the processor, or if `replica_env` has a variable that differs between replicas, because it may
    select the visible devices. Raises ConfigError if there are too few devices."""
    first, count = choice.chosen.index, len(choice.report.devices)
    chooses_itself = any(INDEX in each for each in server.replica_env)
    if choice.package.is_host or chooses_itself or server.replicas == 1:
        return (choice.chosen.encode(),) * server.replicas
    needed = server.replicas * config.tp
    if count and first + needed > count:
        name = choice.package.name
        of_them = f" with {config.tp} devices each" if config.tp > 1 else ""
        raise ConfigError(
            f"{server.replicas} replicas{of_them} need {needed} devices, and {name!r} has {count}, {count - first} of"
            f" them from number {first} on",
            remedy=f"--replicas {max((count - first) // config.tp, 1)}, or --replica-env 'NAME={INDEX}' with the"
            " variable that selects the devices of each",
        )
    return tuple(replace(choice.chosen, index=first + number * config.tp).encode() for number in range(server.replicas))
