"""Sends a load to a server: each request at its own time, whether or not others have ended.

Latency is measured from the time at which a request was due, not from when it was sent, because a
user would also have waited for a slow client or server. In a load without arrival times, it is
measured from when the request was sent.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from sglcore.bench.address import Address, unreachable
from sglcore.bench.reply import Fault, Reply
from sglcore.bench.request_record import Record
from sglcore.bench.workload import Job

Done = Callable[[Record], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The server that gets the load, and how requests are sent.

    `where` is its address, `model` the name that requests give. `is_open` says whether the load has
    arrival times, from which latency is then measured. `max_concurrency` limits the requests in
    flight, long prompts excepted; None is no limit. `timeout` is in seconds for each whole request.
    `extra` is added to the body of each request and overrides its fields.
    """

    where: Address
    model: str
    is_open: bool
    max_concurrency: int | None = None
    timeout: float = 600.0
    temperature: float = 0.0
    extra: dict[str, object] = field(default_factory=dict)

    def request(self, job: Job) -> bytes:
        """Return the bytes of the HTTP request for a job: a POST to /v1/completions that asks for a
        stream with token counts, and for `job.output_len` tokens whatever the end-of-sequence
        token."""
        body = {
            "model": self.model,
            "prompt": list(job.prompt),
            "max_tokens": job.output_len,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        content = json.dumps(body, separators=(",", ":")).encode()
        fields = {
            **self.where.headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Connection": "close",
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.where.folder}/v1/completions HTTP/1.1\r\n{head}\r\n".encode() + content


def run_load(offer: Offer, jobs: Sequence[Job], done: Done) -> list[Record]:
    """Send every job when it is due, and return their records, in the order of `jobs`.

    Blocks until all have ended; cannot be called in a running event loop. `jobs` must be in order
    of arrival. `done` is called on this thread with each record when its request ends. A failed
    request raises nothing: it has a `fault` in its record. Raises ServerError if the server cannot
    be reached at the start.
    """
    return asyncio.run(_offer(offer, jobs, done))


async def _offer(offer: Offer, jobs: Sequence[Job], done: Done) -> list[Record]:
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(offer.max_concurrency) if offer.max_concurrency else nullcontext()
    requests = [offer.request(job) for job in jobs]
    host = await _reachable(offer.where)
    begin = loop.time()

    def clock() -> float:
        return loop.time() - begin

    async def one(job: Job, request: bytes) -> Record:
        async with nullcontext() if job.is_long else gate:
            record = await _send(offer, host, job, request, clock)
        done(record)
        return record

    tasks: list[asyncio.Task[Record]] = []
    for job, request in zip(jobs, requests, strict=True):
        if job.arrival > clock():
            await asyncio.sleep(job.arrival - clock())
        tasks.append(asyncio.create_task(one(job, request)))
    return list(await asyncio.gather(*tasks))


async def _reachable(where: Address) -> str:
    """Return the server's IP address, so that requests do not wait for name resolution.

    Raises ServerError if it does not accept a connection.
    """
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(asyncio.Protocol, where.host, where.port)
    except OSError as error:
        raise unreachable(where, error) from None
    host = transport.get_extra_info("peername")[0]
    transport.abort()
    return host


async def _send(offer: Offer, host: str, job: Job, request: bytes, clock: Callable[[], float]) -> Record:
    loop = asyncio.get_running_loop()
    reply = Reply(request, clock, loop)
    where = offer.where
    secure = {"ssl": ssl.create_default_context(), "server_hostname": where.host} if where.is_secure else {}
    sent = clock()
    due = job.arrival if offer.is_open else sent
    fault: Fault | None = None
    try:
        async with asyncio.timeout(offer.timeout):
            await loop.create_connection(lambda: reply, host, where.port, **secure)
            await reply.ended
    except TimeoutError:
        fault = Fault("timeout", f"no whole answer within {offer.timeout:g} s")
    except OSError as error:
        fault = _unsent(error)
    finally:
        reply.close()
    usage = reply.usage
    details = usage.get("prompt_tokens_details") or {}
    drafted = usage.get("completion_tokens_details") or {}
    accepted = drafted.get("accepted_prediction_tokens") or 0
    return Record(
        job.number,
        due,
        sent,
        clock(),
        tuple(reply.marks),
        len(job.prompt),
        usage.get("completion_tokens", len(reply.marks)),
        details.get("cached_tokens") or 0,
        fault or reply.fault,
        accepted + (drafted.get("rejected_prediction_tokens") or 0),
        accepted,
        job.is_long,
    )


def _unsent(error: OSError) -> Fault:
    if error.errno == errno.EMFILE:
        return Fault(
            "no file left here",
            "this client may open no more connections; raise `ulimit -n`, or give --max-concurrency",
        )
    return Fault("no connection", str(error))
