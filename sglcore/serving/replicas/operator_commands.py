"""Commands of an operator to all engines: audit, flush, pause.

A replica that does not answer is waited for only up to the command's time limit.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import TypeVar, cast

from sglcore.serving.replicas.ipc import Audit, Flush, Pause
from sglcore.serving.replicas.replica import Replica
from sglcore.serving.replicas.server_errors import EngineDied, NotAnswering

Value = TypeVar("Value")


async def audit_all(replicas: Iterable[Replica]) -> list[str]:
    """Return what the audits of the engines found, and the replicas that did not answer, each as
    "replica N: ..."; empty if nothing was found. Waits, at most 20 seconds."""
    return [each for found in await asyncio.gather(*map(_audit, replicas)) for each in found]


async def flush_all(replicas: Iterable[Replica]) -> int:
    """Drop cached prefixes that no request uses, in all engines, and return the number of their
    pages; waits. Raises the first NotAnswering or EngineDied, after the other replicas have
    answered."""
    found = await _all(replica.order(Flush(_name("flush"))) for replica in replicas)
    return sum(done.pages for done in found)


async def pause_all(replicas: Iterable[Replica], is_paused: bool) -> None:
    """Pause all engines, or let them continue (`is_paused` false); waits. Raises NotAnswering,
    after the other replicas have answered."""
    await _all(pause(replica, is_paused) for replica in replicas)


async def pause(replica: Replica, is_paused: bool) -> None:
    """Pause one engine, or let it continue (`is_paused` false); waits. A replica that dies
    meanwhile counts as paused. Raises NotAnswering."""
    with suppress(EngineDied):
        await replica.order(Pause(_name("pause"), is_paused))


async def _audit(replica: Replica) -> list[str]:
    """Return what the audit of one engine found, each with the replica's number before it; a
    missing answer counts as a finding. Waits."""
    try:
        done = await replica.order(Audit(_name("audit")))
    except (EngineDied, NotAnswering) as error:
        return [f"replica {replica.number}: {error}"]
    return [f"replica {replica.number}: {problem}" for problem in done.problems]


async def _all(orders: Iterable[Awaitable[Value]]) -> list[Value]:
    """Wait for all and return their results in order, or raise the first error, in that order,
    after all have ended."""
    found = await asyncio.gather(*orders, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return cast(list[Value], found)


def _name(what: str) -> str:
    return f"{what}-{secrets.token_hex(8)}"
