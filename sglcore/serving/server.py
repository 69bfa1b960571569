"""One server from start to end: the front listens before the model is there, and drains when it is told to stop."""

from __future__ import annotations

from collections.abc import Callable

from sglcore.device.config import EngineConfig
from sglcore.device.server_config import ServerConfig
from sglcore.serving.app import make_app
from sglcore.serving.front import Front
from sglcore.serving.guards import guard
from sglcore.serving.http import bind, run_server
from sglcore.serving.logs import Logs

UNANSWERED = 1
"""The exit code of a stop that did not wait for every answer."""
OnListening = Callable[[Front, str], None]


async def serve(
    config: EngineConfig, server: ServerConfig, *, chosen: str = "", on_listening: OnListening | None = None
) -> int:
    """Serve until told to stop (0; UNANSWERED if that cut requests off) or until the model can not be served any more (its
    exit code). Waits.

    `on_listening` gets the front and the URL once connections are taken, before the model is there. Raises ConfigError
    for what can not start at all: a port in use, no checkpoint, no tokenizer.
    """
    sockets = bind(server)
    front = Front(config, server, chosen=chosen)
    logs = Logs(server)
    front.metrics.lost_log_records = lambda: logs.lost
    try:
        await front.start()
        clean = await run_server(
            guard(make_app(front), front),
            server,
            on_drain=front.drain,
            stopped=front.fleet.stopped,
            sockets=sockets,
            on_listening=None if on_listening is None else lambda url: on_listening(front, url),
            metrics=front.metrics,
            on_overdue=front.give_up,
        )
    finally:
        await front.stop()
        logs.close()
    return front.fleet.exit_code or (0 if clean else UNANSWERED)
