"""Streams limited to part of a device's compute units.

Prefill slices use some, decode steps all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglcore.core.errors import ConfigError
from sglcore.device.package import DevicePackage, resolve
from sglcore.runtime.streams import Part, take_part
from sglcore.step.compute_shares import prompt_units


@dataclass(frozen=True, slots=True)
class Partition:
    """The compute units of a device, as returned by `DevicePackage.partition`.

    `stream(n)` returns a new stream with kernels limited to n of the `units`, always the same ones;
    n is a multiple of `multiple`. It raises ConfigError if the device refuses.
    """

    units: int
    multiple: int
    stream: Callable[[int], torch.Stream]


def make_parts(package: DevicePackage, device: torch.device) -> tuple[tuple[Part, ...], int]:
    """Return a `Part`, a stream with a limited number of units, for each share of `prompt_units`,
    and the device's number of units.

    Raises ConfigError if the package has no `partition`, or the device cannot be partitioned.
    """
    if package.partition is None:
        raise ConfigError(f"the package of {package.name!r} divides no compute units")
    partition: Partition = resolve(package.partition, package.name)(device)
    shares = prompt_units(partition.units, partition.multiple)
    if not shares:
        raise ConfigError(f"{partition.units} units cannot be divided in multiples of {partition.multiple}")
    return tuple(take_part(device, units, partition.stream) for units in shares), partition.units
