"""Reads macOS's system information with `sysctlbyname`, without a child process or a slow import.
Standard library only.

Below a root other than `/` (in tests), the file `sysctl/NAME` holds the answer, and `site-packages`
holds the modules.
"""

from __future__ import annotations

import ctypes
import sys

from sglcore.device.system import System


def text(system: System, name: str) -> str | None:
    """Return the text under `name`, such as "machdep.cpu.brand_string"; None if there is none, and
    on systems other than macOS."""
    if not system.is_this_machine:
        found = system.read(f"/sysctl/{name}")
        return None if found is None else found.strip()
    raw = _raw(name)
    return None if raw is None else raw.rstrip(b"\0").decode(errors="replace")


def number(system: System, name: str) -> int | None:
    """Return the integer under `name`, such as "hw.optional.arm64"; None if there is none, and on
    systems other than macOS."""
    if not system.is_this_machine:
        found = system.read(f"/sysctl/{name}")
        return None if found is None else int(found)
    raw = _raw(name)
    return None if raw is None else int.from_bytes(raw, sys.byteorder)


def _raw(name: str) -> bytes | None:
    """Return the bytes under a name; None on systems other than macOS, and for an unknown name."""
    if sys.platform != "darwin":
        return None
    call = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t(0)
    if call(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if call(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]
