"""A cluster as numbers, from a small TOML file: the performance of a device, of links, and the
number of devices."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import ConfigError
from sglcore.engine.layouts.link_costs import Link, Links


@dataclass(frozen=True, slots=True)
class DeviceNumbers:
    """The performance of one device, as the cluster file says: `memory` in bytes, memory
    `bandwidth` in bytes/s, `flops` with 16-bit elements and `flops_8bit` with 8-bit weights in
    operations/s, and `launch`, the seconds from one kernel to the next."""

    memory: float
    bandwidth: float
    flops: float
    flops_8bit: float
    launch: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical `hosts`, each with `links.per_host` devices. Hidden states are sent to experts with
    `bytes_out` bytes per element (None: unchanged): with `is_copy_per_rank` one copy to each host,
    and from there to each rank with chosen experts; otherwise one copy per chosen expert. The
    busiest rank has `imbalance` times the mean load."""

    device: DeviceNumbers
    links: Links
    hosts: int
    is_copy_per_rank: bool = False
    bytes_out: float | None = None
    imbalance: float = 1.0

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.links.per_host


_TABLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "device": (("memory_gb", "bandwidth_gb_s", "tflops"), ("tflops_8bit", "launch_us")),
        "hosts": (("count", "devices"), ()),
        "inside": (("alpha_us", "gb_s"), ()),
        "between": (("alpha_us", "gb_s"), ()),
        "experts": ((), ("copies", "bytes_out", "imbalance")),
    }
)
"""Tables of a cluster's file: the required names and the optional names. Units are in the names;
`gb_s`: gigabytes that one rank sends per second."""


def read_cluster(file: Path) -> Cluster:
    """Read the TOML file of a cluster. Raises ConfigError if it does not exist, is not TOML, lacks
    a required table or value, or has unknown names or wrong values."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(file)!r}", wanted="a TOML file that describes a cluster") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    _check(file, given)
    device, hosts, experts = given["device"], given["hosts"], given.get("experts", {})
    inside = _link(given["inside"])
    return Cluster(
        DeviceNumbers(
            memory=device["memory_gb"] * 1e9,
            bandwidth=device["bandwidth_gb_s"] * 1e9,
            flops=device["tflops"] * 1e12,
            flops_8bit=device.get("tflops_8bit", device["tflops"]) * 1e12,
            launch=device.get("launch_us", 0.0) * 1e-6,
        ),
        Links(inside, _link(given["between"]) if "between" in given else inside, hosts["devices"]),
        hosts["count"],
        experts.get("copies", "expert") == "rank",
        experts.get("bytes_out"),
        experts.get("imbalance", 1.0),
    )


def _link(table: Mapping[str, float]) -> Link:
    return Link(table["alpha_us"] * 1e-6, 1e-9 / table["gb_s"])


def _check(file: Path, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _TABLES:
            raise ConfigError(f"{file} has [{name}]", wanted=f"some of {', '.join(_TABLES)}")
    hosts = given.get("hosts")
    several = not isinstance(hosts, dict) or hosts.get("count") != 1
    for name, (needed, optional) in _TABLES.items():
        is_needed = name in ("device", "hosts", "inside") or (name == "between" and several)
        if name not in given and not is_needed:
            continue
        table = given.get(name)
        if not isinstance(table, dict):
            raise ConfigError(f"{file} has no [{name}]", wanted=f"a table with {', '.join(needed)}")
        _check_table(f"{file}: [{name}]", table, needed, optional)


def _check_table(where: str, table: Mapping[str, Any], needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for name in needed:
        if name not in table:
            raise ConfigError(f"{where} has no {name}", wanted="a number above zero")
    for name, value in table.items():
        if name not in (*needed, *optional):
            raise ConfigError(f"{where} has {name}", wanted=f"some of {', '.join((*needed, *optional))}")
        if name == "copies":
            fits, wanted = value in ("rank", "expert"), "rank or expert"
        elif name in ("count", "devices"):
            fits, wanted = type(value) is int and value > 0, "a whole number above zero"
        else:
            zero_too = name.endswith("_us")
            fits = type(value) in (int, float) and (value > 0 or (zero_too and value == 0))
            wanted = "a number above zero" + (", or zero" if zero_too else "")
        if not fits:
            raise ConfigError(f"{where} has {name} = {value!r}", wanted=wanted)
