"""Ten thousand requests at 256 at once, some of them rude: is anything lost, leaked or growing?

Lengths are random, prompts repeat a phrase; a third of the requests wants no stream, one in twenty disconnects in mid-stream
and one in twenty is malformed. Counted: answers that did not come or were not what was asked; pages and slots that are held afterwards; memory of the frontend and of the engine
after each tenth. The KV pool is small enough to be full after the first of these, so that requests wait, pages are evicted,
and what grows later is no page that is touched for the first time. With --kill the engine is killed once and started again:
streams that had begun then end with an error, and only those, and clients that are refused meanwhile come again.

    python benchmarks/server_soak.py [--requests N] [--max-tokens N] [--kv-cache-memory M] [--kill N] [--json FILE]
        [-- FLAGS OF THE SERVER]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from results import machine, write_results
from server_client import Served, Streamed, get, request_bytes, served, stream

PORT, AT_ONCE = 8322, 256
COUNTED = ("deaths", "generation_tokens", "verified_steps", "proposed_tokens", "accepted_tokens")
MALFORMED = (
    b'{"prompt": "a", "max_tokens": ',
    b'{"prompt": 7.5}',
    b'{"prompt": "a", "stop": 1}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": [1, 99999999]}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b"[]",
    b"\xff\xfe",
)
KINDS = ("whole", "streamed", "left", "malformed")


def plan(rng: random.Random, most: int) -> tuple[str, bytes, int | None]:
    """One request of up to `most` tokens: its kind, its bytes, and after how many events the client leaves."""
    kind = rng.choices(KINDS, (30, 60, 5, 5))[0]
    if kind == "malformed":
        return kind, request_bytes("/v1/completions", rng.choice(MALFORMED)), None
    phrase = [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 20))]
    body = {
        "prompt": phrase * rng.randrange(1, 20),
        "max_tokens": 400 if kind == "left" else rng.randrange(1, most + 1),
        "temperature": rng.choice((0.0, 0.8)),
        "ignore_eos": True,
        "stream": kind != "whole",
    }
    return kind, request_bytes("/v1/completions", body), rng.randrange(1, 6) if kind == "left" else None


def is_right(kind: str, answer: Streamed) -> bool:
    """Whether a request ended as one of its kind must."""
    wanted = {"streamed": (200, "done"), "left": (200, "left"), "malformed": (400, "answered")}
    return (answer.status, answer.ended) == wanted.get(kind, (200, "answered"))


def resident_mib(frontend: int) -> dict[str, float]:
    """Resident memory of a server's frontend and of its engine, which is its child."""
    found: dict[str, float] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            pages = int((process / "statm").read_text().split()[1])
        except (OSError, ValueError):
            continue
        if frontend in (int(process.name), parent):
            found["frontend" if int(process.name) == frontend else "engine"] = pages * 4096 / 2**20
    return found


async def answered(request: bytes, leave_after: int | None) -> Streamed:
    """The answer to a request, which comes again while no engine is ready."""
    while (answer := await asyncio.wait_for(stream(PORT, request, leave_after=leave_after), 300)).status == 503:
        await asyncio.sleep(0.5)
    return answer


async def load(
    planned: Iterator[tuple[str, bytes, int | None]], server: Served, tenth: int, kill: int | None
) -> tuple[Counter[str], list[dict[str, float]]]:
    """Keep AT_ONCE requests on their way until all are done. Memory is read after each `tenth`; after `kill` requests the engine
    is killed."""
    outcomes: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    begin, killed = time.perf_counter(), 0.0

    async def work() -> None:
        nonlocal killed
        for kind, request, leave_after in planned:
            start = time.perf_counter()
            try:
                answer = await answered(request, leave_after)
                ended = "right" if is_right(kind, answer) else f"{answer.status} {answer.ended}"
                is_cut = ended == "200 error" and answer.events > 1
                outcomes[f"{kind} {'cut by the kill' if is_cut and start < killed else ended}"] += 1
            except Exception as error:
                outcomes[f"{kind} {type(error).__name__}"] += 1
            if outcomes.total() % tenth == 0:
                memory.append(resident_mib(server.pid))
                print(f"{outcomes.total():6} after {time.perf_counter() - begin:5.0f} s  {memory[-1]}", flush=True)
            if outcomes.total() == kill:
                killed = time.perf_counter()
                os.kill(engine_of(server), signal.SIGKILL)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes, memory


def engine_of(server: Served) -> int:
    """The process of its engine."""
    return int(get(f"{server.url}/server_info/stats")["replicas"][0]["process"].split()[1])


def retractions(server: Served) -> float:
    """Requests that its engines put back for want of pages."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sglcore_retractions_total{"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--kv-cache-memory", default="128M")
    options.add_argument("--max-tokens", type=int, default=24, help="tokens of an answer at most")
    options.add_argument("--kill", type=int, help="kill the engine after so many requests")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json")
    options.add_argument("flags", nargs="*", help="of the server, behind --")
    given = options.parse_args()
    flags = ["--kv-cache-memory", given.kv_cache_memory, *(["--restart"] if given.kill else []), *given.flags]
    rng = random.Random(given.seed)
    planned = iter([plan(rng, given.max_tokens) for _ in range(given.requests)])
    with served(*flags, port=PORT) as server:
        outcomes, memory = asyncio.run(load(planned, server, max(given.requests // 10, 1), given.kill))
        time.sleep(2.0)
        stats, problems = get(f"{server.url}/server_info/stats"), get(f"{server.url}/server_info/audit")["problems"]
        counted = {"retractions": retractions(server), **{name: stats[name] for name in COUNTED}}
    found = {
        "requests": given.requests,
        "at_once": AT_ONCE,
        "max_tokens": given.max_tokens,
        "flags": flags,
        "outcomes": dict(sorted(outcomes.items())),
        "lost_or_wrong": sum(count for name, count in outcomes.items() if not name.endswith(("right", "kill"))),
        "held_afterwards": {name: stats[name] for name in ("running", "waiting", "kv_used")},
        "audit": problems,
        "counted": counted,
        "memory_mib": memory,
    }
    for name, value in found.items():
        print(f"{name:16} {value}")
    if given.json:
        write_results(given.json, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
