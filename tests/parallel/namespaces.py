"""Two hosts on one machine: network namespaces, each with its own loopback, joined by a pair of
interfaces with different names."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NETWORK = 0x40000000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("host-of-leader", "other-host")
"""Host names. On its own host a name means loopback, as on many systems."""
FILES = Path("/etc/netns")
"""`ip netns exec` mounts a namespace's files from here over those in /etc."""


def missing() -> str:
    """A requirement that this machine lacks; empty if none."""
    if sys.platform != "linux":
        return "network namespaces of Linux"
    if shutil.which("ip") is None:
        return "the command ip (iproute2)"
    return "" if os.geteuid() == 0 and _may_make() else "the right to make network namespaces"


def _may_make() -> bool:
    name = f"sgl{os.getpid()}t"
    made = subprocess.run(("ip", "netns", "add", name), capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(("ip", "netns", "del", name), check=True)
    return made


class TwoHosts:
    """Hosts 0 and 1 as a context manager; processes that still run in them at the end are
    killed."""

    def __init__(self) -> None:
        self.names = tuple(f"sgl{os.getpid()}{letter}" for letter in "ab")
        self.interfaces = tuple(f"v{os.getpid()}{letter}" for letter in "ab")
        self.processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> TwoHosts:
        for host, name in enumerate(self.names):
            _ip("netns", "add", name)
            (FILES / name).mkdir(parents=True, exist_ok=True)
            (FILES / name / "hosts").write_text(_names_on(host))
        _ip("link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for name, interface, address in zip(self.names, self.interfaces, ADDRESSES, strict=True):
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            _ip(
                "-n", name, "route", "add", "default", "dev", interface
            )  # who looks for its own address asks for a way out
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in (pid for host in (0, 1) for pid in self.pids(host)):
            os.kill(pid, 9)
        for name in self.names:
            _ip("netns", "del", name)
            shutil.rmtree(FILES / name)

    def start(self, host: int, words: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[Any]:
        """Start a process on a host, with its output in `log`. It does not inherit the caller's
        SGLCORE_* variables."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
        with log.open("w") as out:
            process = subprocess.Popen(
                ("ip", "netns", "exec", self.names[host], *words), stdout=out, stderr=out, env={**given, **variables}
            )
        self.processes.append(process)
        return process

    def pids(self, host: int) -> list[int]:
        """The pids of processes on a host, without that of the command that lists them."""
        found = subprocess.run(("ip", "netns", "pids", self.names[host]), capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split() if Path(f"/proc/{pid}").exists()]

    def cut(self) -> None:
        """Cut the link between the hosts without notifying either."""
        _ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")

    def on(self, host: int, act: Callable[[], Any]) -> Any:
        """Run `act` on a host, wait, and return its result. Sockets that it opens belong to that
        host."""
        found: list[Any] = []

        def run() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{self.names[host]}", "rb") as namespace:
                if libc.setns(namespace.fileno(), NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
            try:
                found.append((act(), None))
            except BaseException as error:
                found.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        value, error = found[0]
        if error is not None:
            raise error
        return value


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _names_on(host: int) -> str:
    """The content of a host's /etc/hosts; it includes the machine's own name."""
    own = f"127.0.0.1 localhost\n127.0.1.1 {NAMES[host]} {socket.gethostname()}\n"
    return f"{own}{ADDRESSES[1 - host]} {NAMES[1 - host]}\n"


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)
