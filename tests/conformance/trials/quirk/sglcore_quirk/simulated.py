"""The simulated quirk accelerator for `--sim=quirk`, if sglcore-sim is installed. Device code does
not import this."""

from __future__ import annotations

from types import MappingProxyType

from sglcore_sim.kinds import Kind

FILES = {"dev/quirk{i}": "", "usr/lib/libquirk.so.1": "", "site-packages/torch_quirk/__init__.py": ""}
KIND = Kind("quirk", "quirk", capabilities=frozenset(), files=MappingProxyType(FILES))
