"""Random steps of an engine of ranks with requests that arrive, end and are aborted; and the
resources held by its processes."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from sglcore.sampling.params import SamplingParams
from tests.parallel.engine import RankedEngine


def soak(engine: RankedEngine, steps: int, seed: int) -> dict[str, int]:
    """Run at least `steps` steps until no work is left; return the numbers of requests and of
    aborted ones."""
    rng, begun = np.random.default_rng(seed), engine.scheduler.stats().steps
    open_requests: list[Any] = []
    counts = {"requests": 0, "aborted": 0}
    while engine.scheduler.stats().steps - begun < steps:
        if len(open_requests) < 12 and rng.random() < 0.4:
            open_requests.append(_request(engine, rng))
            engine.scheduler.add(open_requests[-1])
            counts["requests"] += 1
        if open_requests and rng.random() < 0.05:
            request = open_requests[int(rng.integers(len(open_requests)))]
            counts["aborted"] += engine.scheduler.abort(request.rid) is not None
        if rng.random() < 0.002:
            _run_dry(engine)
            time.sleep(0.01)
        if engine.loop.has_work:
            engine.loop.step()
        open_requests = [request for request in open_requests if request.finish_reason is None]
    _run_dry(engine)
    assert all(request.finish_reason != "error" for request in open_requests)
    return counts


def _request(engine: RankedEngine, rng: np.random.Generator) -> Any:
    """A request with a prompt that may share a prefix, of random length, greedy or sampled."""
    known = [[5] * 40, [9, 4] * 15, []][int(rng.integers(3))]
    prompt = known + rng.integers(3, 90, size=int(rng.integers(1, 20))).tolist()
    drawn = (
        {"temperature": 0.8, "top_p": 0.9, "seed": int(rng.integers(100))}
        if rng.random() < 0.5
        else {"temperature": 0.0}
    )
    params: Any = {"max_tokens": int(rng.integers(1, 40)), "ignore_eos": True, **drawn}
    return engine.request(prompt, SamplingParams(**params))


def _run_dry(engine: RankedEngine) -> None:
    while engine.loop.has_work:
        engine.loop.step()


def held(engine: RankedEngine) -> dict[str, Any]:
    """Resources held while nothing runs: the scheduler's requests and pages, and each process's
    open files, shared mappings, threads and children."""
    gc.collect()  # frees other engines, which have ended
    engine.scheduler.audit()
    engine.scheduler.flush_prefix_cache()
    stats = engine.scheduler.stats()
    pids = (os.getpid(), *engine.worker.pids)
    return {
        "in flight": len(engine.scheduler.in_flight),
        "free pages": stats.free_pages,
        "cached pages": stats.cached_pages,
        "files": [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids],
        "shared mappings": [_shared(pid) for pid in pids],
        "threads": [len(os.listdir(f"/proc/{pid}/task")) for pid in pids],
        "dropped frames": [channel.dropped for channel in engine.worker._steps],
    }


def resident(engine: RankedEngine) -> list[int]:
    """Resident memory of each process in bytes, this one first."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (os.getpid(), *engine.worker.pids)]
    return [each * os.sysconf("SC_PAGE_SIZE") for each in pages]


def _shared(pid: int) -> int:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(line.split()[1].endswith("s") for line in lines)
