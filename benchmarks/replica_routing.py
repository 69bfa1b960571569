"""Prefill work and time of two replicas under prompts that share prefixes, by how the router chooses.

The prefixes together fill the pages of more than one replica, and some are asked for far more often than others, so a
router has to keep each in one place and still leave no replica idle. Engines run on this machine, one thread each.

    python benchmarks/replica_routing.py [--json FILE] [--requests 120] [--replicas 2]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from results import machine, write_results

from sglcore.device.config import EngineConfig
from sglcore.device.server_config import ServerConfig
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.replica import Replica
from sglcore.serving.replicas.router import Router, block_hashes
from sglcore.serving.replicas.supervisor import Supervisor

GROUPS, SHARED, OWN, NEW = 32, 512, 24, 16
"""Prefixes, their tokens, tokens of a prompt of its own, and tokens that are drawn for it."""
CONCURRENT = 16
KV_BYTES = 36 << 20
NO_BOUND = 1 << 30


class InTurn(Router):
    """Knows no prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, ready: Sequence[Replica], prompt: bytes) -> Replica:
        """One after the other."""
        self._turn += 1
        return ready[self._turn % len(ready)]


ROUTERS: dict[str, Callable[[], Router]] = {
    "in turn": InTurn,
    "prefix, least busy only": lambda: Router(ratio=1.0, slack=0),
    "prefix, slack 2": lambda: Router(ratio=1.0, slack=2),
    "prefix, as served": Router,
    "prefix, no bound": lambda: Router(slack=NO_BOUND),
}
ONE_PREFIX = ("prefix, as served", "prefix, no bound")
"""Routers that are also measured where all prompts begin alike, which is what the bound is for."""


def make_prompts(count: int, groups: int) -> list[list[int]]:
    """Prompts whose prefixes are asked for with odds of 1, 1/2, 1/3 and so on."""
    rng = np.random.default_rng(7)
    odds = 1 / np.arange(1, groups + 1)
    begins = rng.integers(10, 2000, (groups, SHARED))
    drawn = rng.choice(groups, count, p=odds / odds.sum())
    return [[*begins[group].tolist(), *rng.integers(10, 2000, OWN).tolist()] for group in drawn]


async def measure(router: Router, replicas: int, prompts: list[list[int]]) -> dict[str, float]:
    """One replica set, from empty caches."""
    config = EngineConfig(threads=1, max_requests=CONCURRENT, kv_cache_memory=KV_BYTES)
    server = ServerConfig(replicas=replicas)
    frontend = Frontend(config, server)
    frontend.supervisor = Supervisor(config, server, frontend.health, router=router)
    await frontend.start()
    try:
        while not frontend.health.ready:
            assert not frontend.supervisor.stopped.is_set(), frontend.health.reason
            await asyncio.sleep(0.05)
        before, begin = frontend.stats(), time.perf_counter()
        await asyncio.gather(*(run_all(frontend, iter_of) for iter_of in [iter(prompts)] * CONCURRENT))
        seconds = time.perf_counter() - begin
        while frontend.stats().running or frontend.stats().requests - before.requests < len(prompts):
            await asyncio.sleep(0.05)
        return figures(frontend, before, seconds)
    finally:
        await frontend.stop()


async def run_all(frontend: Frontend, prompts: Iterator[list[int]]) -> None:
    """One of the clients that share the prompts."""
    for prompt in prompts:
        await (await frontend.generate(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, seed=1))).wait()


def figures(frontend: Frontend, before: EngineStats, seconds: float) -> dict[str, float]:
    """Tokens of prompts that were computed, the part that was cached, time, and how uneven the replicas' requests are."""
    after = frontend.stats()
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    computed = after.computed_prompt_tokens - before.computed_prompt_tokens
    counts = [replica.stats.requests for replica in frontend.supervisor.ready]
    return {
        "computed_prompt_tokens": computed,
        "cached_share": round(1 - computed / prompt_tokens, 3),
        "seconds": round(seconds, 2),
        "most_to_mean_requests": round(max(counts) * len(counts) / sum(counts), 2),
    }


def routing_cost(tokens: int = 4096, rounds: int = 200) -> float:
    """Microseconds that the frontend spends on one new prompt of so many tokens, among four replicas with full memories."""

    class Target:
        load, page_size, num_pages = 0, 16, 16384

        def __init__(self, number: int) -> None:
            self.number = number

    router, targets = Router(), [Target(number) for number in range(4)]
    prompts = np.random.default_rng(1).integers(0, 30_000, (2 * rounds, tokens), dtype=np.int32)
    packed = [prompt.tobytes() for prompt in prompts]
    assert len(block_hashes(packed[0], 16)) == tokens // 16
    for prompt in packed[:rounds]:
        router.choose(targets, prompt)
    begin = time.process_time()
    for prompt in packed[rounds:]:
        router.choose(targets, prompt)
    return (time.process_time() - begin) / rounds * 1e6


def main() -> None:
    """Measure every router and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--replicas", type=int, default=2)
    given = parser.parse_args()
    cost = routing_cost()
    print(f"routing a prompt of 4096 tokens: {cost:.0f} microseconds")
    loads = {f"{GROUPS} prefixes": (GROUPS, tuple(ROUTERS)), "one prefix": (1, ONE_PREFIX)}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for load, (groups, names) in loads.items():
        prompts = make_prompts(given.requests, groups)
        rows[load] = {}
        for name in names:
            rows[load][name] = asyncio.run(measure(ROUTERS[name](), given.replicas, prompts))
            print(f"{load:14}  {name:24}", *(f"{key} {value}" for key, value in rows[load][name].items()), sep="  ")
    if given.json:
        content = {"machine": machine(), "replicas": given.replicas, "requests": given.requests}
        write_results(given.json, {**content, "routing_4096_tokens_us": round(cost, 1), "loads": rows})


if __name__ == "__main__":
    main()
