"""A local proxy of the public package index that serves each wheel's metadata as a separate file
(PEP 658).

pip resolves without downloading wheels only if an index does this. The public one does; a mirror of
it may not, and then the proxy reads the metadata out of the wheel by byte ranges. Metadata is
cached on disk. The proxy has no list of packages.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

PUBLIC = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
SCHEME, SUFFIX = "https://", ".metadata"
SECONDS = 60.0
OTHERS = re.compile(
    r"-(cp2|cp3[0-9]\b|cp310|pp)[^-]*-(cp|pp)|win32|win_|musllinux|i686|ppc64|s390x|armv|riscv|macosx\w*x86_64"
)
"""Wheels for interpreters and machines that no row uses: most of a page."""
TAIL = 1 << 18
"""Bytes read at once from the end of a wheel: for most wheels they contain the file list and the
metadata."""


class Ranges(io.RawIOBase):
    """A file at a URL, read by byte ranges."""

    def __init__(self, url: str) -> None:
        """Request the file's size and read its last bytes."""
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS) as answer:
            self.size = int(answer.headers["content-length"])
        self.tail_at = max(0, self.size - TAIL)
        self.tail = self._get(self.tail_at, self.size)

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte to read."""
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the offset; returns it."""
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Read some bytes; waits for the network."""
        start, end = self.at, self.size if size < 0 else min(self.size, self.at + size)
        self.at = max(start, end)
        if start >= end:
            return b""
        is_kept = start >= self.tail_at
        return self.tail[start - self.tail_at : end - self.tail_at] if is_kept else self._get(start, end)

    def _get(self, start: int, end: int) -> bytes:
        asked = urllib.request.Request(self.url, headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            found = answer.read()
        return found if len(found) == end - start else found[start:end]


def metadata_of(url: str) -> bytes:
    """Return the file METADATA of the wheel at a URL. Raises KeyError if it has none."""
    with zipfile.ZipFile(Ranges(url)) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
        return wheel.read(names[0] if names else "METADATA")


class Front:
    """Pages and metadata of one index, each fetched once. `kept` is the folder of cached
    metadata."""

    def __init__(self, kept: Path, upstream: str = PUBLIC) -> None:
        """Fetch nothing yet."""
        self.kept, self.upstream = kept, upstream
        self.pages: dict[str, bytes] = {}
        self.locks: dict[str, Lock] = {}
        self.lock = Lock()
        self.fetched = 0
        """Bytes of metadata fetched over the network."""

    def page(self, name: str, address: str) -> bytes:
        """Return the JSON page of a project's wheels, with local URLs and metadata; waits for the
        network."""
        with self._lock_of(name):
            if name not in self.pages:
                asked = urllib.request.Request(f"{self.upstream}/{name}/", headers={"Accept": JSON})
                with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                    self.pages[name] = json.dumps(_fronted(json.load(answer), address)).encode()
            return self.pages[name]

    def metadata(self, url: str) -> bytes:
        """Return the metadata of the wheel at a URL; waits for the network if it is not cached."""
        path = self.kept / hashlib.sha256(url.encode()).hexdigest()[:32]
        with self._lock_of(url):
            if not path.is_file():
                found = self._fetch(url)
                self.kept.mkdir(parents=True, exist_ok=True)
                fresh = path.with_suffix(f".{os.getpid()}")
                fresh.write_bytes(found)
                fresh.replace(path)
        return path.read_bytes()

    def _fetch(self, url: str) -> bytes:
        try:
            with urllib.request.urlopen(url + SUFFIX, timeout=SECONDS) as answer:
                found = answer.read()
        except OSError:
            found = b""
        found = found if found.startswith(b"Metadata-Version") else metadata_of(url)
        self.fetched += len(found)
        return found

    def _lock_of(self, what: str) -> Lock:
        with self.lock:
            return self.locks.setdefault(what, Lock())


def _fronted(page: dict[str, Any], address: str) -> dict[str, Any]:
    """Return a page with local URLs for its wheels. Other files are removed, because pip could only
    build them."""
    wheels = [
        file for file in page["files"] if file["filename"].endswith(".whl") and not OTHERS.search(file["filename"])
    ]
    for file in wheels:
        file["url"] = f"{address}/files/{file['url'].removeprefix(SCHEME)}"
        file["core-metadata"] = True
    return {**page, "files": wheels}


@contextmanager
def serving(kept: Path, upstream: str = PUBLIC) -> Iterator[tuple[Front, str]]:
    """Run a proxy; yields it and its URL for pip, and ends with the block."""
    front = Front(kept, upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            kind, _, rest = self.path.removeprefix("/").partition("/")
            try:
                self._answer(200, self._found(kind, rest))
            except Exception as error:
                self._answer(404, str(error).encode())

        def _found(self, kind: str, rest: str) -> bytes:
            if kind == "simple":
                return front.page(rest.rstrip("/"), f"http://127.0.0.1:{self.server.server_port}")  # type: ignore[attr-defined]
            if kind == "files" and rest.endswith(SUFFIX):
                return front.metadata(SCHEME + rest.removesuffix(SUFFIX))
            raise LookupError(f"no {self.path} here")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", JSON if self.path.startswith("/simple") else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore errors: the client has disconnected, and repeats the request if it needs the
            answer."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield front, f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        server.server_close()
