"""A pytest plugin that makes this process's machine one with an acme accelerator, simulated on torch's private backend."""

from __future__ import annotations

from types import MappingProxyType

import sglcore_sim
from sglcore_sim.kinds import Kind

FILES = MappingProxyType({"dev/acme{i}": "", "usr/lib/libacme.so.1": ""})
"""The files by which acme's driver shows."""

simulator = sglcore_sim.install(Kind("acme", "acme", files=FILES))
