"""ASGI middleware: each class handles one concern and passes streams through."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from sglcore.serving.http.middleware.admission import Admission
from sglcore.serving.http.middleware.allowed_hosts import Hosts
from sglcore.serving.http.middleware.bodies import Bodies
from sglcore.serving.http.middleware.exchanges import Exchanges
from sglcore.serving.http.middleware.keys import Keys
from sglcore.serving.http.middleware.paths import Paths
from sglcore.serving.http.middleware.refusal import Refusals

if TYPE_CHECKING:
    from sglcore.serving.http.tracing import Spans
    from sglcore.serving.replicas.engine_frontend import Frontend

log = logging.getLogger("sglcore.serving")

REQUEST_LOG = "sglcore.requests"
_EXPOSED = ("x-request-id", "request-id", "x-sglcore-warnings", "x-sglcore-max-tokens", "retry-after")


def with_middleware(app: ASGIApp, frontend: Frontend, traces: Spans | None = None) -> ASGIApp:
    """Return the app inside its middleware. From the innermost to the outermost: bodies, admission,
    keys (if the server has any), hosts (if it listens on loopback or has allowed hosts), the answer
    to what these refuse, CORS (if it has origins), logs with metrics and traces (None: off), and
    paths. Logs a warning if every client on the network may use the server."""
    config, metrics = frontend.config, frontend.metrics
    if not config.api_key and not config.is_loopback:
        log.warning("every client that can reach %s may use this server; give it keys with --api-key-file", config.host)
    files = config.max_request_bytes if config.batch_folder is None else config.max_batch_file_bytes
    app = Bodies(app, config.max_request_bytes, config.body_timeout, files)
    app = Admission(
        app, config.max_concurrent_requests, config.max_queued_requests, lambda: frontend.stats().waiting, metrics
    )
    if config.api_key:
        app = Keys(app, config.api_key)
    if config.is_loopback or config.allowed_hosts:
        app = Hosts(app, config.allowed_hosts, config.cors_origins)
    app = Refusals(app, metrics)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
    return Paths(Exchanges(app, metrics, logging.getLogger(REQUEST_LOG), traces))
