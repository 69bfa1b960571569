"""What the server adds to the engine: throughput of 64 streams against the offline engine, processor time of the frontend for each
of their tokens, and time to the first token.

Both run the same prompts in turns, in one run on one machine: the offline engine in this process, the server and its
engine in others, this process being its client as well. Floor of the frontend: about 15 us to detokenise and 30 us to frame
a token, on a core that the engine does not use.

    python benchmarks/server_overhead.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path

from results import machine, write_results
from server_client import get, request_bytes, served, stream

from sglcore import LLM, SamplingParams

STREAMS, TOKENS, PROMPT = 64, 128, 32
PREFIX, QUESTIONS = 512, 200
PORT = 8321


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Random token ids that nothing has cached."""
    return [[rng.randrange(10, 2000) for _ in range(length)] for _ in range(count)]


def body(prompt: list[int], tokens: int) -> bytes:
    """A streamed completion of exactly so many tokens."""
    wanted = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return request_bytes("/v1/completions", wanted)


def offline(llm: LLM, wanted: list[list[int]]) -> float:
    """Tokens per second of the engine alone."""
    begin = time.perf_counter()
    llm.generate(wanted, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    return len(wanted) * TOKENS / (time.perf_counter() - begin)


async def online(wanted: list[list[int]]) -> float:
    """Tokens per second of as many streams of the server."""
    begin = time.perf_counter()
    ended = await asyncio.gather(*(stream(PORT, body(prompt, TOKENS)) for prompt in wanted))
    assert all(each.ended == "done" for each in ended), [each for each in ended if each.ended != "done"][:3]
    return len(wanted) * TOKENS / (time.perf_counter() - begin)


def first_offline(llm: LLM, prompt: list[int]) -> float:
    """Seconds to the first token of one prompt."""
    begin = time.perf_counter()
    pieces = llm.stream(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    next(pieces)
    seconds = time.perf_counter() - begin
    pieces.close()
    return seconds


async def first_online(prompt: list[int]) -> float:
    """The same over HTTP, on a connection of its own."""
    return (await stream(PORT, body(prompt, 2))).first


def shared_prefix(rng: random.Random, url: str) -> dict[str, float]:
    """Prompt tokens asked for against those worked on: questions with one long beginning, 16 at a time."""
    prefix = prompts(rng, 1, PREFIX)[0]
    wanted = [prefix + question for question in prompts(rng, QUESTIONS, 16)]

    async def ask_all() -> None:
        gate = asyncio.Semaphore(16)

        async def one(prompt: list[int]) -> None:
            async with gate:
                assert (await stream(PORT, body(prompt, 4))).ended == "done"

        await asyncio.gather(*(one(prompt) for prompt in wanted))

    before = get(f"{url}/server_info/stats")
    asyncio.run(ask_all())
    time.sleep(1.0)
    after = get(f"{url}/server_info/stats")
    tokens, computed = (after[name] - before[name] for name in ("prompt_tokens", "prompt_tokens_computed"))
    return {"prompt_tokens": tokens, "computed": computed, "times_less_work": tokens / computed}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json")
    given = options.parse_args()
    rng = random.Random(given.seed)
    alone, over_http, firsts, front = [], [], [], 0.0
    with LLM(max_requests=256) as llm, served(port=PORT) as server:
        asyncio.run(online(prompts(rng, STREAMS, PROMPT)))
        offline(llm, prompts(rng, STREAMS, PROMPT))
        for _ in range(given.rounds):
            wanted = prompts(rng, STREAMS, PROMPT)
            alone.append(offline(llm, wanted))
            before = processor_seconds(server.pid)
            over_http.append(asyncio.run(online(wanted)))
            front += processor_seconds(server.pid) - before
        for prompt in prompts(rng, 40, PROMPT):
            firsts.append((first_offline(llm, prompt), asyncio.run(first_online(prompt))))
        prefix = shared_prefix(rng, server.url)
    ratios = [served_rate / rate for served_rate, rate in zip(over_http, alone, strict=True)]
    added = [(there - here) * 1000 for here, there in firsts]
    found = {
        "streams": STREAMS,
        "offline_tokens_per_s": statistics.median(alone),
        "server_tokens_per_s": statistics.median(over_http),
        "server_over_offline": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "front_us_per_token": front / (given.rounds * STREAMS * TOKENS) * 1e6,
        "ttft_added_ms": {"median": statistics.median(added), "p90": sorted(added)[int(len(added) * 0.9)]},
        "ttft_offline_ms": statistics.median(here for here, _ in firsts) * 1000,
        "shared_prefix": prefix,
    }
    for name, value in found.items():
        print(f"{name:24} {value}")
    if given.json:
        write_results(given.json, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
