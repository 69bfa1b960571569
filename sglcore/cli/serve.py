"""The command `sglcore serve`: serves a model over HTTP, or holds ranks for a server on another
node."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglcore.cli import options
from sglcore.cli.aliases import role_name
from sglcore.cli.setting_flags import engine_settings, flag_names, split_settings
from sglcore.config.engine_config import EngineConfig, resolve_config, resolve_server_config
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.engine.process_end import drop_output

if TYPE_CHECKING:
    from sglcore.engine.ranks.rank_launch import Placement
    from sglcore.serving.chat.chat_frontend import ChatFrontend

TEXT_ENDPOINTS = "/v1/chat/completions /v1/completions /v1/responses /v1/messages /api/chat /metrics"
VECTOR_ENDPOINTS = "/v1/embeddings /v1/score /v1/rerank /tokenize /metrics"
LABEL_ENDPOINTS = "/classify /v1/score /v1/rerank /tokenize /metrics"
"""Endpoints to print for a model that generates text, for one that embeds, and for one with a
classification head."""
ID_ENDPOINTS, ID_VECTOR_ENDPOINTS = "/v1/completions /generate /completion /metrics", "/v1/embeddings /metrics"
"""Endpoints to print without a tokenizer, which accept token ids: for a model that generates, and
for one that embeds."""
POLL_SECONDS = 0.05
LAST_WORDS = 10.0
"""Seconds added to the drain timeout on a node that has no requests of its own: when all nodes are
told to stop, the leader must finish first."""


def serve(
    model: options.ModelArgument = None,
    model_path: Annotated[
        str | None, typer.Option(*flag_names("model"), help="MODEL as a flag; an error if both differ. [SGLCORE_MODEL]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the address.")] = False,
    verbose: options.Verbose = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Serve a model (default: the embedded one) over HTTP: the APIs of OpenAI, Anthropic and
    Ollama, and a chat page at /. On a node other than the first, hold ranks of it for the server
    there.

    Each flag can be set by the environment variable in brackets; the flag takes precedence. A
    variable separates repeated values by commas, and is 0 or 1 for a flag without a value.
    """
    given = settings or {}
    if model is not None and model_path is not None and model != model_path:
        raise ConfigError(f"two models are named: {model!r} and {model_path!r}", remedy="name one")
    config = resolve_config({"model": model or model_path, **engine_settings(given)})
    named = split_settings(given, ServerConfig)
    server = resolve_server_config({**named, **({"role": role_name(named["role"])} if "role" in named else {})})
    placement, config, server = _placed(config, server)
    if placement.node:
        raise typer.Exit(_follow(placement, config, server, quiet=quiet))
    raise typer.Exit(_run(_fetched(config, quiet=quiet), server, quiet=quiet, verbose=verbose))


def _placed(config: EngineConfig, server: ServerConfig) -> tuple[Placement, EngineConfig, ServerConfig]:
    """Return this node's placement, and the two configurations with what it changes in them.

    With several nodes, --ray places the nodes instead of replicas. Raises ConfigError for server
    settings that cannot be combined with several nodes, and as `find_placement` does.
    """
    from sglcore.engine.ranks.rank_launch import find_placement

    if config.nodes > 1 and server.ray is not None:
        config = replace(config, leader=config.leader or f"ray:{server.ray}")
    placement = find_placement(config)
    if placement.nodes == 1:
        return placement, config, server
    if server.replicas > 1 or server.ray_resources:
        name = "replicas" if server.replicas > 1 else "ray-resources"
        raise ConfigError(
            f"the model is held by {placement.nodes} nodes, and --{name} is given",
            remedy=f"leave --{name} out; start one server for each copy of the model",
        )
    if server.restart and placement.restarter:
        raise ConfigError(
            f"--restart is given, and {placement.restarter} starts all nodes again", remedy="leave --restart out"
        )
    return placement, config, replace(server, ray=None) if config.nodes > 1 else server


def _follow(placement: Placement, config: EngineConfig, server: ServerConfig, *, quiet: bool) -> int:
    """Hold ranks of the model for the server on node 0 until it stops, and return the exit code of
    this process. Prints one line on standard output unless `quiet`; the log goes to the error
    stream."""
    import logging

    from sglcore.engine.ranks.host_process import Node, Stopping, follow
    from sglcore.engine.start import model_folder

    logging.basicConfig(level=server.log_level.upper(), format=f"%(levelname)s node {placement.node}: %(message)s")

    def prepare() -> tuple[EngineConfig, Path]:
        own = _fetched(config, quiet=quiet)
        return own, model_folder(own)

    node = Node(placement, prepare, config.join_timeout, stopping=Stopping(finish=server.drain_timeout + LAST_WORDS))
    if not quiet:
        host, port = placement.leader
        print(f"node {placement.node} of {placement.nodes}, for the leader at {host}:{port}", flush=True)
    return follow(node, restart=server.restart)


def _fetched(config: EngineConfig, *, quiet: bool) -> EngineConfig:
    """Download the model if necessary (blocks), and return the configuration with its revision, and
    with `speculative` "auto" if the checkpoint has a draft model.

    Done before the server listens, so that a wrong model ends the command. An explicit
    `speculative` or `draft_model` is kept.
    """
    from sglcore.engine.progress import Progress
    from sglcore.engine.start import fetched, has_draft

    with Progress(enabled=not quiet and sys.stderr.isatty()) as progress:
        config, folder = fetched(config, progress.phase)
    is_open = config.speculative is None and config.draft_model is None
    return replace(config, speculative="auto") if is_open and has_draft(folder) else config


def _run(config: EngineConfig, server: ServerConfig, *, quiet: bool, verbose: bool) -> int:
    import uvloop

    from sglcore.serving.http.server import serve as serve_model

    chosen = () if server.ray is not None else _choose(config, server)
    watches: set[asyncio.Task[None]] = set()

    def on_listening(frontend: ChatFrontend, url: str) -> None:
        watches.add(asyncio.ensure_future(_show(frontend, url, quiet=quiet, verbose=verbose)))

    return uvloop.run(serve_model(config, server, chosen=chosen, on_listening=on_listening))


def _choose(config: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """Return the device of each replica, as text for its process.

    Done before the server listens, so that a missing device ends the command. Raises DeviceError,
    or ConfigError if there are too few devices.
    """
    from sglcore.core.ledger import DecisionLedger
    from sglcore.engine.start import choose
    from sglcore.serving.replicas.replica_devices import devices_of

    return devices_of(choose(config, DecisionLedger()), config, server)


async def _show(frontend: ChatFrontend, url: str, *, quiet: bool, verbose: bool = False) -> None:
    """Wait until the model is loaded, then print the server's address and endpoints on standard
    output. The progress before and the banner after go to the error stream, and so does the reason
    if loading fails. `quiet`: only the address, or that reason.

    If the output cannot be written, that is logged and the server continues.
    """
    import logging

    try:
        await _show_start(frontend, url, quiet=quiet, verbose=verbose)
    except OSError as error:
        drop_output()
        logging.getLogger("sglcore.serving").warning(
            "serving at %s; standard output cannot be written: %s", url, error.strerror
        )


async def _show_start(frontend: ChatFrontend, url: str, *, quiet: bool, verbose: bool) -> None:
    from sglcore.engine.progress import Progress

    progress = Progress(enabled=not quiet and sys.stderr.isatty())
    with progress:
        while not frontend.health.ready and frontend.health.live:
            known = frontend.health.snapshot()
            if isinstance(known["total"], int) and isinstance(known["done"], int) and known["total"]:
                progress.phase(str(known["phase"]), known["done"], known["total"])
            await asyncio.sleep(POLL_SECONDS)
    if not frontend.health.ready:
        print(f"error: {frontend.health.reason}", file=sys.stderr)
        return
    print(f"serving {', '.join(frontend.names)} at {url}", flush=True)
    if not quiet:
        print(f"  the page: {url}/\n  endpoints: {_endpoints(frontend)}\n  Ctrl-C drains, then stops", flush=True)
        _banner(frontend, verbose=verbose)


def _endpoints(frontend: ChatFrontend) -> str:
    assert frontend.info is not None
    if frontend.engine_config.skip_tokenizer:
        return ID_ENDPOINTS if frontend.info.generates else ID_VECTOR_ENDPOINTS
    if frontend.info.generates:
        return TEXT_ENDPOINTS
    return LABEL_ENDPOINTS if frontend.info.limits["num_labels"] else VECTOR_ENDPOINTS


def _banner(frontend: ChatFrontend, *, verbose: bool) -> None:
    from sglcore.cli.banner import show_start
    from sglcore.core.ledger import Row

    info = frontend.info
    assert info is not None
    rows = [*(Row(**row) for row in info.ledger), *frontend.format.rows]
    brought_by = f"{info.distribution} {info.version}"
    show_start(info.device, brought_by, info.device_evidence, rows, info.seconds, verbose=verbose)
