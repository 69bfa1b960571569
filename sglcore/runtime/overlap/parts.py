"""Streams of a device whose compute units can be divided: prompts by slices keep to some of them, beside decode steps on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglcore.device.errors import ConfigError
from sglcore.device.package import DevicePackage, resolve
from sglcore.runtime.streams import Part, take_part
from sglcore.step.shares import prompt_units


@dataclass(frozen=True, slots=True)
class Partition:
    """The compute units of a device, as `DevicePackage.partition` gives it. Kernels of `stream(n)`, a new stream, run on n of its
    `units` alone, the same ones each time; n is a `multiple`. Raises ConfigError where that can not be had."""

    units: int
    multiple: int
    stream: Callable[[int], torch.Stream]


def make_parts(package: DevicePackage, device: torch.device) -> tuple[tuple[Part, ...], int]:
    """A stream for each share, and how many units the device has. Raises ConfigError where it can not be divided."""
    if package.partition is None:
        raise ConfigError(f"the package of {package.name!r} divides no compute units")
    partition: Partition = resolve(package.partition, package.name)(device)
    shares = prompt_units(partition.units, partition.multiple)
    if not shares:
        raise ConfigError(f"{partition.units} units can not be divided in multiples of {partition.multiple}")
    return tuple(take_part(device, units, partition.stream) for units in shares), partition.units
