"""Two ranks on the CPU compared with one rank of two threads; latency of sending a step to ranks;
and how soon a rank's death is detected.

Decode: one model in three ways, in turn within one run: one rank with two threads, two ranks with
one thread each and graphs, and the same without graphs. Each ratio is of two adjacent runs. Besides
the quantiles of all ratios there are those of quiet rounds, in which other processes used less than
5 % of the cores. Batches: time from a step's record to the last rank that has decoded it. Deaths: a
rank is killed during a step; times until the leader knows, until every client has its error, and
until the next answer. Soak (optional): `--soak` random steps, and the held memory before and after.

    PYTHONPATH=. python benchmarks/ranks.py [--json FILE] [--rounds 25] [--kills 5]
        [--soak 10000] [--parts decode]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from made_models import make_model
from results import machine, write_results
from server_client import get, request_bytes, served, stream

from sglcore import LLM, SamplingParams
from sglcore.core.errors import WorkerLost
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.wire import Channel, Kind
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.parallel.engine import RankedEngine
from tests.parallel.ranks.test_serve_ranks import ranks_of
from tests.parallel.soak import held, resident, soak

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16}
"""A Llama of 200 million weights."""
BATCHES, TOKENS = (1, 16), 24
WAYS: Mapping[str, dict[str, Any]] = {
    "one rank, 2 threads": {"tp": 1, "threads": 2},
    "2 ranks, recorded": {"tp": 2, "threads": 1},
    "2 ranks, eager": {"tp": 2, "threads": 1, "graph": "off"},
}
ONE, RECORDED, EAGER = WAYS
READERS, SENT, EVERY = 3, 1500, 0.002
"""Number of ranks that receive a batch, number of batches, and seconds between two batches."""
QUIET = 0.05
PORT, STREAMS = 8341, 8


def quantiles(values: list[float], digits: int = 1) -> dict[str, float]:
    """Return the median, both quartiles, minimum and maximum."""
    found = np.percentile(values, [50, 25, 75, 0, 100])
    return {
        name: round(float(each), digits)
        for name, each in zip(("p50", "p25", "p75", "least", "most"), found, strict=True)
    }


class Others:
    """Measures the share of the cores that other processes, and the hypervisor, use while a block
    runs."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self.share = [os.getpid(), *pids], 0.0

    def __enter__(self) -> Others:
        self._begin, self._busy, self._own = time.monotonic(), _busy(), self._used()
        return self

    def __exit__(self, *error: object) -> None:
        wall = (time.monotonic() - self._begin) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        self.share = max(_busy() - self._busy - (self._used() - self._own), 0) / wall

    def _used(self) -> int:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return sum(int(each[11]) + int(each[12]) for each in fields)


def _busy() -> int:
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + soft + steal


def tokens_per_second(llm: LLM, batch: int) -> float:
    """Return the decode throughput from the step after which every request has a token."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = [llm.engine.add(rng.integers(10, 2000, 16).tolist(), params) for _ in range(batch)]
    while not all(each.outputs[0].token_ids for each in outputs):
        llm.engine.step()
    begin, had = time.perf_counter(), sum(len(each.outputs[0].token_ids) for each in outputs)
    while not all(each.finished for each in outputs):
        llm.engine.step()
    return (batch * TOKENS - had) / (time.perf_counter() - begin)


@contextmanager
def started(folder: Path) -> Iterator[dict[str, LLM]]:
    """Start the engines of all ways; those that do not run sleep."""
    with ExitStack() as stack:
        found = {}
        for name, settings in WAYS.items():
            sizes = {"graph_buckets": BATCHES, "max_requests": max(BATCHES), "kv_cache_memory": 64 << 20}
            found[name] = LLM(model=str(folder), **sizes, **settings)
            stack.callback(found[name].close)
        yield found


def pids_of(llm: LLM) -> list[int]:
    """Return the process ids of its ranks; empty for one rank."""
    worker: Any = llm.started.worker
    return list(worker.pids) if llm.config.tp > 1 else []


def decode_speeds(rounds: int) -> dict[str, Any]:
    """Measure tokens per second of every way at every batch size, and the ratios."""
    with tempfile.TemporaryDirectory() as name:
        weights = make_model(Path(name), "llama", SIZES)
        with started(Path(name)) as llms:
            return {"weights": weights, **{f"batch {batch}": compare(llms, batch, rounds) for batch in BATCHES}}


def compare(llms: dict[str, LLM], batch: int, rounds: int) -> dict[str, Any]:
    """Run all ways in turn, each round in another order, after one warm-up each."""
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    shares: list[float] = []
    for llm in llms.values():
        tokens_per_second(llm, batch)
    for turn in range(rounds):
        order = list(llms)[turn % len(llms) :] + list(llms)[: turn % len(llms)]
        worst = 0.0
        for name in order:
            with Others(pids_of(llms[name])) as others:
                speeds[name].append(tokens_per_second(llms[name], batch))
            worst = max(worst, others.share)
        shares.append(worst)
    quiet = np.array(shares) < QUIET
    one, found = np.array(speeds[ONE]), {}
    for name, values in speeds.items():
        ratios = np.array(values) / one
        found[name] = {
            "tokens_per_second": quantiles(values),
            "ratio": quantiles(list(ratios), 3),
            "ratio_quiet": quantiles(list(ratios[quiet]), 3) if quiet.any() else None,
        }
    return {**found, "rounds": rounds, "quiet_rounds": int(quiet.sum()), "others_share": quantiles(shares, 3)}


def decode_batch(step: int, rows: int) -> ScheduleBatch:
    """Make a decode step of `rows` requests, as a scheduler sends it."""
    ints = np.arange(rows, dtype=np.int32)
    ends, pages = np.arange(rows + 1, dtype=np.int32), np.zeros(0, np.int32)
    none = np.zeros(rows + 1, np.int32)
    emits = np.ones(rows, bool)
    return ScheduleBatch(
        step, ForwardMode.DECODE, ints, ints + 9, ints + 8, ends, -ints, ints, none, pages, emits, composition=7
    )


def read_batches(stream_: socket.socket, said: memoryview, place: int) -> None:
    """Run a rank that decodes each batch and stores the time in shared memory, which wakes no other
    process."""
    channel = Channel(stream_, 1)
    while (frame := channel.receive()).kind is Kind.STEP:
        decode(frame.body)
        said[place] = time.monotonic_ns()
    os._exit(0)


def broadcast(rows: int) -> dict[str, float]:
    """Measure microseconds from a step's record to the last reader that has decoded it."""
    said = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    channels, found = [], []
    for place in range(READERS):
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        if not os.fork():
            ours.close()
            read_batches(theirs, said, place)
        theirs.close()
        channels.append(Channel(ours, 1))
    for step in range(SENT):
        batch = decode_batch(step, rows)
        begin = time.monotonic_ns()
        frame = channels[0].packed(Kind.STEP, encode(batch))
        for channel in channels:
            channel.send_packed(frame)
        time.sleep(EVERY)
        while min(said[:READERS]) < begin:
            time.sleep(EVERY)
        found.append((max(said[:READERS]) - begin) / 1e3)
    for channel in channels:
        channel.send(Kind.CLOSE)
        os.wait()
    return {**quantiles(found), "p99": round(float(np.percentile(found, 99)), 1), "bytes": len(frame)}


def death_in_the_leader(folder: Path) -> float:
    """Measure milliseconds from killing a rank during a step until the leader raises WorkerLost."""
    llm = LLM(model=str(folder), tp=2, threads=1, kv_cache_memory=64 << 20)
    try:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        for _ in range(4):
            llm.engine.add([5] * 8, params)
        for _ in range(20):
            llm.engine.step()
        killed = time.perf_counter()
        os.kill(pids_of(llm)[1], signal.SIGKILL)
        try:
            while True:
                llm.engine.step()
        except WorkerLost:
            return (time.perf_counter() - killed) * 1e3
    finally:
        llm.close()


async def ended(body: Mapping[str, Any]) -> tuple[str, float]:
    """Run a stream; returns how and when it ended."""
    found = await stream(PORT, request_bytes("/v1/completions", body))
    return found.ended, time.perf_counter()


async def death_at_clients(pid: int) -> tuple[float, float, int]:
    """Measure milliseconds from killing a rank until the last of STREAMS streams has its error, and
    until the next answer. Also returns how many streams had sent nothing yet and were restarted."""
    body = {"prompt": [5] * 8, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    streams = [asyncio.ensure_future(ended(body)) for _ in range(STREAMS)]
    while get(f"http://127.0.0.1:{PORT}/server_info/stats")["running"] < STREAMS:
        await asyncio.sleep(0.01)
    killed = time.perf_counter()
    os.kill(ranks_of(pid)[1], signal.SIGKILL)
    again = asyncio.ensure_future(ended({**body, "max_tokens": 1}))
    found = [await each for each in streams]
    told = [at for how, at in found if how == "error"]
    assert told and all(how in ("error", "done") for how, _ in found)
    how, answered = await again
    assert how == "done"
    return (max(told) - killed) * 1e3, (answered - killed) * 1e3, len(found) - len(told)


def deaths(kills: int) -> dict[str, Any]:
    """Measure detection of deaths by the leader (random model), and by clients of a server that
    restarts (embedded model)."""
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), "llama", SIZES)
        in_leader = [death_in_the_leader(Path(name)) for _ in range(kills)]
    at_clients = []
    for _ in range(kills):
        with served("--tp", "2", "--threads", "1", "--restart", port=PORT) as server:
            at_clients.append(asyncio.run(death_at_clients(server.pid)))
    told, again, retried = zip(*at_clients, strict=True)
    return {
        "kills": kills,
        "leader_ms": quantiles(in_leader),
        "clients_ms": quantiles(list(told)),
        "next_answer_ms": quantiles(list(again), 0),
        "streams": STREAMS * kills,
        "begun_again": sum(retried),
    }


def soaked(steps: int) -> dict[str, Any]:
    """Run a soak test on ranks of a very small model. Returns what is held (equal before and after,
    asserted) and how many bytes each process has grown."""
    from tests.checkpoints import llama, save

    with tempfile.TemporaryDirectory() as name:
        folder = save(llama(max_position_embeddings=128), Path(name))
        with RankedEngine(folder, kv_cache_memory=28 << 10, max_requests=6) as engine:
            soak(engine, max(steps // 5, 50), 1)
            before, memory = held(engine), resident(engine)
            counts = soak(engine, steps, 2)
            after = held(engine)
            grown = [now - then for now, then in zip(resident(engine), memory, strict=True)]
            stats = engine.scheduler.stats()
    assert before == after, (before, after)
    return {"steps": steps, **counts, "retractions": stats.retractions, "held": after, "grown_bytes": grown}


def main() -> None:
    """Measure, print, write the results."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", default=None)
    arguments.add_argument("--rounds", type=int, default=25)
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--soak", type=int, default=0)
    arguments.add_argument("--note", default="", help="how it was run, such as with what priority")
    arguments.add_argument("--parts", nargs="*", default=("batches", "decode", "deaths", "soak"))
    chosen = arguments.parse_args()
    os.environ.setdefault("LANE_DEVICE", "cpu")
    parts: dict[str, Callable[[], Any]] = {
        "batches": lambda: {f"to {READERS} ranks, {rows} rows, us": broadcast(rows) for rows in BATCHES},
        "decode": lambda: decode_speeds(chosen.rounds),
        "deaths": lambda: deaths(chosen.kills),
        "soak": lambda: soaked(chosen.soak) if chosen.soak else None,
    }
    content: dict[str, Any] = {"machine": machine(), "note": chosen.note, "load_before": os.getloadavg()}
    for name in chosen.parts:
        content[name] = parts[name]()
        print(name, json.dumps(content[name], indent=1))
    content["load_after"] = os.getloadavg()
    if chosen.json:
        write_results(chosen.json, content)


if __name__ == "__main__":
    main()
