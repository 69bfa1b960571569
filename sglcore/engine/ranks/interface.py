"""The network interface that has an address of this machine, for libraries that need its name."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address (in digits); None if no interface
    has it, or if this system is not Linux."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        lines = _IPV6.read_text().splitlines() if _IPV6.is_file() else []
        rows = (line.split() for line in lines)
        return next((row[-1] for row in rows if int(row[0], 16) == int(wanted)), None)
    if wanted.is_loopback:
        return "lo"
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == wanted), None)


def _ipv4_of(name: str) -> ipaddress.IPv4Address | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return ipaddress.IPv4Address(found[20:24])
