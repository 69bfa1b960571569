"""One server from start to end: the frontend listens before the model is there, and drains when it is told to stop."""

from __future__ import annotations

from collections.abc import Callable

from sglcore.device.config import EngineConfig
from sglcore.device.server_config import ServerConfig
from sglcore.serving.app import make_app
from sglcore.serving.frontend import Frontend
from sglcore.serving.http import bind, run_server
from sglcore.serving.logs import Logs
from sglcore.serving.middleware import with_middleware

UNANSWERED = 1
"""The exit code of a stop that did not wait for every answer."""
OnListening = Callable[[Frontend, str], None]


async def serve(
    config: EngineConfig, server: ServerConfig, *, chosen: str = "", on_listening: OnListening | None = None
) -> int:
    """Serve until told to stop (0; UNANSWERED if that cut requests off) or until the model can not be served any more (its
    exit code). Waits.

    `on_listening` gets the frontend and the URL once connections are taken, before the model is there. Raises ConfigError
    for what can not start at all: a port in use, no checkpoint, no tokenizer.
    """
    sockets = bind(server)
    frontend = Frontend(config, server, chosen=chosen)
    logs = Logs(server)
    frontend.metrics.lost_log_records = lambda: logs.lost
    try:
        await frontend.start()
        clean = await run_server(
            with_middleware(make_app(frontend), frontend),
            server,
            on_drain=frontend.drain,
            stopped=frontend.replica_set.stopped,
            sockets=sockets,
            on_listening=None if on_listening is None else lambda url: on_listening(frontend, url),
            metrics=frontend.metrics,
            on_overdue=frontend.give_up,
        )
    finally:
        await frontend.stop()
        logs.close()
    return frontend.replica_set.exit_code or (0 if clean else UNANSWERED)
