"""A stand-in for the hub on loopback: repositories with one commit each, and the three kinds of
requests of a fetch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """Repositories by name, each a mapping of paths to bytes; `gated` ones need a token. `asked`
    collects the paths that were read, without the repository name. `refusals` maps kinds of
    requests ("revision", "tree", "resolve") to an error status."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    url: str = ""
    tokens: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    refusals: dict[str, int] = field(default_factory=dict)

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        parts = path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        if status := self.refusals.get(rest[0], 0):
            return status, {"Retry-After": "7"}, b"{}"
        files = self.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if name in self.gated and not token:
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        self.tokens.add(token)
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if rest[0] == "tree":
            found = [{"type": "file", "path": p, "size": len(d), "oid": sha1(d).hexdigest()} for p, d in files.items()]
            return 200, {}, json.dumps(found).encode()
        if rest[0] == "revision":
            siblings = [{"rfilename": each} for each in files]
            return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        file = "/".join(rest[2:])
        self.asked.add(f"{name}/{file}")
        return 200, {"ETag": f'"{sha1(files[file]).hexdigest()}"', "X-Repo-Commit": COMMIT}, files[file]


@contextmanager
def hub_server(server: HubServer) -> Iterator[HubServer]:
    """Run the server, listening at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = server.answer(self.path, self.headers.get("authorization", ""))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
