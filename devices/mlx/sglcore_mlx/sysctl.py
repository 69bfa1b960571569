"""What macOS says of itself through `sysctlbyname`, without a process or an import that costs.
Standard library only.

Below another root than `/`, the file `sysctl/NAME` stands for the answer, as `site-packages` stands
for modules.
"""

from __future__ import annotations

import ctypes
import sys

from sglcore.device.system import System


def text(system: System, name: str) -> str | None:
    """The text under `name`, such as "machdep.cpu.brand_string"; None where there is none."""
    if not system.is_this_machine:
        found = system.read(f"/sysctl/{name}")
        return None if found is None else found.strip()
    raw = _raw(name)
    return None if raw is None else raw.rstrip(b"\0").decode(errors="replace")


def number(system: System, name: str) -> int | None:
    """The whole number under `name`, such as "hw.optional.arm64"; None where there is none."""
    if not system.is_this_machine:
        found = system.read(f"/sysctl/{name}")
        return None if found is None else int(found)
    raw = _raw(name)
    return None if raw is None else int.from_bytes(raw, sys.byteorder)


def _raw(name: str) -> bytes | None:
    """The bytes that the kernel gives; None on other systems than macOS, and for a name it does not
    know."""
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
