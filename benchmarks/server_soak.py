"""Ten thousand requests at 256 at once, some of them rude: is anything lost, leaked or growing?

Lengths are random; one request in twenty disconnects in mid-stream and one in twenty is malformed. Counted: answers that
did not come or were not what was asked; pages and slots that are held afterwards; memory of the frontend and of the engine
after each tenth. The KV pool is small enough to be full after the first of these, so that requests wait, pages are evicted,
and what grows later is no page that is touched for the first time.

    python benchmarks/server_soak.py [--requests N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from pathlib import Path

from results import machine, write_results
from server_client import Streamed, get, request_bytes, served, stream

PORT, AT_ONCE, KV_MEMORY = 8322, 256, "128M"
MALFORMED = (
    b'{"prompt": "a", "max_tokens": ',
    b'{"prompt": 7.5}',
    b'{"prompt": "a", "temprature": 1}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": [1, 99999999]}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b"[]",
    b"\xff\xfe",
)
KINDS = ("whole", "left", "malformed")


def plan(rng: random.Random) -> tuple[str, bytes, int | None]:
    """One request: its kind, its bytes, and after how many events the client leaves."""
    kind = rng.choices(KINDS, (90, 5, 5))[0]
    if kind == "malformed":
        return kind, request_bytes("/v1/completions", rng.choice(MALFORMED)), None
    body = {
        "prompt": [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 200))],
        "max_tokens": rng.randrange(1, 24) if kind == "whole" else 400,
        "temperature": rng.choice((0.0, 0.8)),
        "ignore_eos": True,
        "stream": True,
    }
    return kind, request_bytes("/v1/completions", body), rng.randrange(1, 6) if kind == "left" else None


def is_right(kind: str, answer: Streamed) -> bool:
    """Whether a request ended as one of its kind must."""
    wanted = {"whole": (200, "done"), "left": (200, "left"), "malformed": (400, "answered")}[kind]
    return (answer.status, answer.ended) == wanted


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


async def load(requests: int, rng: random.Random, frontend: int) -> tuple[Counter[str], list[dict[str, float]]]:
    """Keep AT_ONCE requests on their way until all are done."""
    outcomes: Counter[str] = Counter()
    memory: list[dict[str, float]] = []
    planned = iter([plan(rng) for _ in range(requests)])
    begin = time.perf_counter()

    async def work() -> None:
        for kind, request, leave_after in planned:
            try:
                answer = await asyncio.wait_for(stream(PORT, request, leave_after=leave_after), 300)
                right = is_right(kind, answer)
                outcomes[f"{kind} {'right' if right else f'{answer.status} {answer.ended}'}"] += 1
            except Exception as error:
                outcomes[f"{kind} {type(error).__name__}"] += 1
            if outcomes.total() % max(requests // 10, 1) == 0:
                memory.append(resident_mib(frontend))
                print(f"{outcomes.total():6} after {time.perf_counter() - begin:5.0f} s  {memory[-1]}", flush=True)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes, memory


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json")
    given = options.parse_args()
    with served("--kv-cache-memory", KV_MEMORY, port=PORT) as server:
        outcomes, memory = asyncio.run(load(given.requests, random.Random(given.seed), server.pid))
        time.sleep(2.0)
        stats, problems = get(f"{server.url}/server_info/stats"), get(f"{server.url}/server_info/audit")["problems"]
    found = {
        "requests": given.requests,
        "at_once": AT_ONCE,
        "kv_cache_memory": KV_MEMORY,
        "outcomes": dict(sorted(outcomes.items())),
        "lost_or_wrong": sum(count for name, count in outcomes.items() if not name.endswith("right")),
        "held_afterwards": {name: stats[name] for name in ("running", "waiting", "kv_used")},
        "audit": problems,
        "memory_mib": memory,
    }
    for name, value in found.items():
        print(f"{name:16} {value}")
    if given.json:
        write_results(given.json, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
