"""GET /server_info and /server_info/stats: what runs and why, and what it counts."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from sglcore import __version__
from sglcore.device.server_config import ServerConfig
from sglcore.device.settings import settings_of
from sglcore.schedule.draft_counts import sums_of
from sglcore.serving.apis.server.answers import OF_ENGINE, ServerAudit, ServerInfo, ServerStats
from sglcore.serving.apis.shared import as_json
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics import kv_usage
from sglcore.serving.replicas.replica import Replica

_LIMITS = tuple(
    item.name
    for item in settings_of(ServerConfig).values()
    if item.kind.startswith(("int", "float")) and item.name not in ("port", "replicas")
)


def routes(frontend: Frontend) -> APIRouter:
    """The routes; they wait for nothing."""
    router = APIRouter(tags=["operations"])

    @router.get("/server_info", responses={200: {"model": ServerInfo}}, summary="What runs, and every decision")
    async def server_info() -> Response:
        return as_json(_info(frontend))

    @router.get("/server_info/stats", responses={200: {"model": ServerStats}}, summary="What it counts")
    async def stats() -> Response:
        found = [_replica(replica) for replica in frontend.replica_set.replicas.values()]
        known = {"time": time.time(), "deaths": frontend.replica_set.deaths}
        return as_json({**known, **_counters(frontend.stats()), "replicas": found})

    @router.get("/server_info/audit", responses={200: {"model": ServerAudit}}, summary="Looks for what leaked")
    async def audit() -> Response:
        return as_json({"problems": await frontend.audit()})

    return router


def _info(frontend: Frontend) -> dict[str, Any]:
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
    }
