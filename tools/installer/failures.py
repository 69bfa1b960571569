"""Explains failures in one line with a remedy, from pip's output and the machine's state."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.installer.choice import size
from tools.installer.needs import InstallError
from tools.installer.pythons import AGAIN
from tools.installer.sources import Machine, Sources, page, reason, wheels

NO_SPACE = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded")
NO_TRUST = re.compile(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLError|SSLCertVerificationError")
NO_PROXY = re.compile(r"ProxyError|Cannot connect to proxy|Tunnel connection failed|407 Proxy")
NO_NETWORK = re.compile(
    r"Failed to establish a new connection|NewConnectionError|ConnectTimeoutError|ReadTimeoutError"
    r"|Name or service not known|Temporary failure in name resolution|nodename nor servname"
    r"|Network is unreachable|Connection refused|Connection reset|Connection broken|Remote end closed"
    r"|Max retries exceeded"
)
SPOILED = re.compile(r"DO NOT MATCH THE HASHES|BadZipFile|not a zip file|[Ww]heel '?\S+ .*is invalid|[Ii]nvalid wheel")
NOT_FOUND = re.compile(r"(?:No matching distribution found for|that satisfies the requirement) ([^\s;(]+)")
STATUS = re.compile(r"HTTP error (\d+) while getting (\S+)")

THEN = f"; then {AGAIN} again"
MIRROR = f"set HTTPS_PROXY, or a mirror by PIP_INDEX_URL{THEN}"
CONNECT = f"connect this machine, {MIRROR}"
PAGE = f"answers with a page that is no package index: a proxy or a login page stands between; {MIRROR}"
SPACE = f"free some, or set TMPDIR and PIP_CACHE_DIR to another disk{THEN}"
HEARD = 60
"""How many last lines of pip's output are searched."""
LAST = 20
"""How many last lines of pip's output are shown if the failure is unknown."""

Pages = Callable[[str, Sources], str]


def explain(said: str, sources: Sources, machine: Machine, log: Path, pages: Pages = page) -> str:
    """Explain pip's output in one line with a remedy; for an unknown failure return the end of the
    output. Only the last HEARD lines count: pip has retried earlier errors. May wait for an
    index."""
    said = "\n".join(said.strip().splitlines()[-HEARD:])
    proxy = sources.proxy or os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or "the proxy"
    known = (
        (NO_SPACE, f"no space is left on a disk: {SPACE}"),
        (
            NO_TRUST,
            f"the certificate of {sources.index} is not trusted: set PIP_CERT to its issuer's certificate file{THEN}",
        ),
        (NO_PROXY, f"{proxy} lets no connection to {sources.index} through: correct HTTPS_PROXY{THEN}"),
        (SPOILED, f"{sources.index} did not return the package: a proxy stands between; {MIRROR}"),
    )
    for pattern, line in known:
        if pattern.search(said):
            return line
    if missing := NOT_FOUND.search(said):
        return _missing(missing.group(1), sources, machine, pages)
    if NO_NETWORK.search(said):
        return f"{sources.index} cannot be reached: {CONNECT}"
    if status := STATUS.search(said):
        return f"{status.group(2)} answers with HTTP status {status.group(1)}: name a mirror by PIP_INDEX_URL{THEN}"
    last = "\n".join(said.strip().splitlines()[-LAST:])
    return f"{last}\npip failed; its whole output is in {log}: fix the cause{THEN}"


def is_spoiled(said: str) -> bool:
    """Return whether a file does not match the index; pip may take it from its cache again."""
    return SPOILED.search(said) is not None


def _missing(requirement: str, sources: Sources, machine: Machine, pages: Pages) -> str:
    """Explain why pip does not find a package: no network, a page that is not an index, or no
    matching wheel."""
    project = re.split(r"[^\w.-]", requirement)[0]
    address = f"{sources.index.rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    try:
        found = wheels(pages(address, sources), re.sub(r"[-_.]+", "[-_.]+", project))
    except OSError as error:
        return f"{address} does not answer ({reason(error)}): {CONNECT}"
    if not found:
        return f"{address} {PAGE}"
    place = f"{machine.python} on {machine.system} {machine.machine}"
    other = f"use another Python by {AGAIN} PYTHON=python3.12, or another index by PIP_INDEX_URL"
    return f"{sources.index} has no {requirement} for {place}: {other}"


def check_space(
    needed: Sequence[tuple[Path, int]],
    what: str,
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> None:
    """Check free space before any download. `needed`: folders with megabytes; folders on one disk
    are added up. Raises InstallError if a disk has less."""
    disks: dict[int, list[tuple[Path, int]]] = {}
    for path, megabytes in needed:
        there = next(each for each in (path, *path.parents) if each.exists())
        disks.setdefault(there.stat().st_dev, []).append((there, megabytes))
    for parts in disks.values():
        total, place = sum(megabytes for _, megabytes in parts), parts[0][0]
        found = free(place) / 1e6
        if found < total:
            have = f"which has {size(found)} free"
            raise InstallError(f"{what} needs about {size(total)} on the disk of {place}, {have}: {SPACE}")
