"""A real Ray cluster on two hosts that are network namespaces."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.parallel.namespaces import ADDRESSES, TwoHosts
from tests.parallel.served import until

PORT = 6379
START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
HEAD = f"{ADDRESSES[0]}:{PORT}"


VARIABLES: Mapping[str, str] = MappingProxyType({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
"""For all processes of the cluster: by default the head uses a token from the user's home
directory, which joining nodes do not."""


def begin(hosts: TwoHosts, logs: Path) -> None:
    """Start the head on host 0 and a worker on host 1, with two cores each."""
    common = ("--num-cpus", "2", "--object-store-memory", str(80 << 20))
    head = (
        *START,
        "--head",
        "--port",
        str(PORT),
        "--node-ip-address",
        ADDRESSES[0],
        "--include-dashboard=false",
        *common,
    )
    hosts.start(0, head, logs / "ray0", **VARIABLES)
    wait_for(logs / "ray0", "Ray runtime started")
    other = (*START, "--address", HEAD, "--node-ip-address", ADDRESSES[1], *common)
    hosts.start(1, other, logs / "ray1", **VARIABLES)
    wait_for(logs / "ray1", "Ray runtime started")


def wait_for(log: Path, word: str) -> None:
    """Wait until the log contains `word`."""
    until(lambda: word in log.read_text())
