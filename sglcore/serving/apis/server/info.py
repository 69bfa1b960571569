"""GET /server_info, /server_info/stats, /server_info/audit and /metrics: the running configuration
with its reasons, and counters."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, get_type_hints

from fastapi import APIRouter, Response
from pydantic import create_model

from sglcore import __version__
from sglcore.config.server_config import ServerConfig
from sglcore.config.settings import settings_of
from sglcore.schedule.draft_counts import sums_of
from sglcore.serving.apis.answer import Answer, as_json
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.replicas.ipc import EngineStats, ModelInfo
from sglcore.serving.replicas.metrics.server_metrics import CONTENT_TYPE, kv_usage
from sglcore.serving.replicas.replica import Replica

_LIMITS = tuple(
    item.name
    for item in settings_of(ServerConfig).values()
    if item.kind.startswith(("int", "float")) and item.name not in ("port", "replicas")
)


class _ServerFacts(Answer):
    """The base of ServerInfo, the answer of /server_info: the fields that do not come from the
    engine alone; the others are the fields of `ModelInfo`. `ledger`: the rows of start-up
    decisions; `seconds`: of each start-up step; a parser that is null is not used, and its reason
    says why; `server_limits`: numeric settings of the server, null for no limit."""

    version: str
    phase: str
    model: str
    served_model_names: list[str]
    ledger: list[dict[str, Any]]
    seconds: dict[str, float]
    tool_parser: str | None
    tool_reason: str
    reasoning_parser: str | None
    reasoning_reason: str
    server_limits: dict[str, int | float | None]


OF_ENGINE = tuple(name for name in ModelInfo.__struct_fields__ if name not in (*_ServerFacts.model_fields, "eos_ids"))
"""Fields of `ModelInfo` that are reported as the engine sent them."""


def _server_info() -> type[Answer]:
    kinds = get_type_hints(ModelInfo)
    known_later: dict[str, Any] = {name: (kinds[name] | None, ...) for name in OF_ENGINE}
    text = "The running configuration and every start-up decision. Fields of the model are null until it is ready."
    return create_model("ServerInfo", __base__=_ServerFacts, __doc__=text, **known_later)


ServerInfo = _server_info()


class Counters(Answer):
    """Counts of the engines since their start, and their present load: requests `running` and
    `waiting`, and `kv_used`, the share of KV pages that requests hold, from 0 to 1.

    `requests` were accepted, with `prompt_tokens` in all. `cached_tokens` came from the prefix
    cache; `prompt_tokens_computed` were run on the device, some twice after a preemption;
    `generation_tokens` were sent. `verified_steps` counts a step that verifies draft tokens once
    for each of its requests: it gives one token and the `accepted_tokens` of the `proposed_tokens`.
    Of the `hisparse_rows` that decode steps selected, `hisparse_hits` were on the device.
    """

    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int
    kv_used: float
    cached_tokens: int
    prompt_tokens_computed: int
    requests: int
    verified_steps: int
    proposed_tokens: int
    accepted_tokens: int
    hisparse_rows: int
    hisparse_hits: int


class ReplicaStats(Counters):
    """The counters of one engine, as it last reported them, `report_age` seconds ago. `number`: of
    the replica, from 0; `process`: name of its process; `state`: "ready", "starting" and others."""

    number: int
    process: str
    report_age: float
    state: str


class ServerStats(Counters):
    """The sums over all engines, also those that have ended, except `kv_used`, which is the share
    of the pages of all together. `replicas`: the present engines one by one; `time`: seconds since
    1970; `deaths`: number of engines that ended unexpectedly."""

    time: float
    deaths: int
    replicas: list[ReplicaStats]


class ServerAudit(Answer):
    """Descriptions of leaked or doubly held pages and slots of the engines, and of engines that did
    not answer; empty if there are none."""

    problems: list[str]


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add the endpoints to the router; only the audit waits for the engines, and raises NotReady if
    none is ready. The others answer before the model is loaded."""

    @router.get("/server_info", tags=["operations"], responses={200: {"model": ServerInfo}})
    async def server_info() -> Response:
        """Return the running configuration and every start-up decision."""
        return as_json(_info(frontend))

    @router.get("/server_info/stats", tags=["operations"], responses={200: {"model": ServerStats}})
    async def stats() -> Response:
        """Return the newest counters of the engines, summed and one by one."""
        found = [_replica(replica) for replica in frontend.supervisor.replicas.values()]
        known = {"time": time.time(), "deaths": frontend.supervisor.deaths}
        return as_json({**known, **_counters(frontend.stats()), "replicas": found})

    @router.get("/server_info/audit", tags=["operations"], responses={200: {"model": ServerAudit}})
    async def audit() -> Response:
        """Search for leaked pages and slots in all engines."""
        return as_json({"problems": await frontend.audit()})

    @router.get(
        "/metrics",
        tags=["operations"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(frontend.metrics.page(), headers={"content-type": CONTENT_TYPE})


def _info(frontend: ChatFrontend) -> dict[str, Any]:
    info, form = frontend.info, frontend.format
    rows = [*(info.ledger if info is not None else ()), *(asdict(row) for row in form.rows)]
    return {
        **{name: None if info is None else getattr(info, name) for name in OF_ENGINE},
        "version": __version__,
        "phase": frontend.health.phase,
        "model": str(frontend.names[0]),
        "served_model_names": list(frontend.names),
        "ledger": rows,
        "seconds": info.seconds if info is not None else {},
        "tool_parser": form.tool_parser,
        "tool_reason": form.tool_reason,
        "reasoning_parser": form.reasoning_parser,
        "reasoning_reason": form.reasoning_reason,
        "server_limits": {name: getattr(frontend.config, name) for name in _LIMITS},
    }


def _replica(replica: Replica) -> dict[str, Any]:
    known = {"number": replica.number, "process": replica.process.name, "report_age": round(replica.report_age, 3)}
    return {**known, "state": replica.state, **_counters(replica.stats)}


def _counters(stats: EngineStats) -> dict[str, Any]:
    drafts = sums_of(stats.drafts)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_used": kv_usage(stats),
        "cached_tokens": stats.hit_tokens,
        "prompt_tokens_computed": stats.computed_prompt_tokens,
        "requests": stats.requests,
        "verified_steps": drafts.steps,
        "proposed_tokens": drafts.proposed,
        "accepted_tokens": drafts.accepted,
        "hisparse_rows": stats.swap_rows,
        "hisparse_hits": stats.swap_hits,
    }
