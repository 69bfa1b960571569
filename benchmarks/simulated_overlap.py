"""Two-batch overlap and layered prefill on a simulated device in virtual time: how much of the
collectives two micro-batches hide, and how a long prompt delays running requests.

No accelerator is needed: `sglcore_sim.clocks` computes the time of operations, links and streams
from the speeds below, independent of this machine. One rank; its all-reduces take as long as the
link says.

    python benchmarks/simulated_overlap.py [--kind NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from results import machine, write_results
from torch import Tensor
from two_batch_overlap import HIDDEN, PARTS, STAGGERS, TOKENS, Site, link_of, ms, row_of, show, write_checkpoint

import sglcore_sim
from sglcore import LLM, SamplingParams
from sglcore.engine.start import embedded_model
from sglcore.runtime.parallel.process_group import Group
from sglcore.schedule import step_loop
from sglcore_sim.clocks import Speeds, VirtualTime, virtual_time
from sglcore_sim.collectives import Group as SimulatedGroup

SPEEDS = Speeds(flops=1e12, bandwidth=1e11, start=1e-6, launch=1e-7, alpha=0.0, beta=0.0)


class OneRank(Group):
    """A group of one rank; its all-reduces go over the link of the simulated device."""

    def __init__(self, simulated: Any) -> None:
        none: Any = None
        super().__init__(none, 0, 1, none)
        self._simulated, self.sums = simulated, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._run(partial(self._start, x), x)

    def _start(self, x: Tensor, later: bool) -> Any:
        options = dist.AllreduceOptions()
        options.asyncOp, self.sums = later, self.sums + 1
        work = self._simulated.allreduce([x], options)
        return work if later else None


class SimulatedSite(Site):
    """The batch of `Site` on the simulated device."""

    def __init__(self, sim: Any, folder: Path) -> None:
        store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self.sim, self.group = sim, OneRank(SimulatedGroup(sim, store, 0, 1, timedelta(seconds=60)))
        super().__init__(folder, self.group, str(sim.device()))

    def seconds(self, speeds: Speeds, run: Callable[[], None]) -> float:
        """Return the virtual seconds of a step; deterministic, so one run is enough."""
        torch.accelerator.synchronize()
        with virtual_time(self.sim, speeds) as clock:
            run()
            torch.accelerator.synchronize()
            return clock.now


def halves_table(sim: Any) -> dict[str, Any]:
    """Measure computing time of the whole batch and of micro-batches, and for each of PARTS the
    hidden communication."""
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        site = SimulatedSite(sim, Path(name))
        whole = site.seconds(SPEEDS, site.whole)
        sums, size = site.group.sums, TOKENS * HIDDEN * 4
        computing = site.seconds(SPEEDS, partial(site.in_halves, 0))
        rows = [halves_row(site, whole, computing, part, sums, size) for part in PARTS]
    return {"whole_ms": ms(whole), "halves_ms": ms(computing), "sums": sums, "waits": rows}


def halves_row(
    site: SimulatedSite, whole: float, computing: float, part: float, sums: int, size: int
) -> dict[str, float]:
    """Measure with communication that takes `part` of the computing time."""
    alpha, beta = link_of(part, whole, sums, size)
    speeds = replace(SPEEDS, alpha=alpha, beta=beta)
    ways = {"whole": site.whole, **{f"stagger {each}": partial(site.in_halves, each) for each in STAGGERS}}
    found = {name: site.seconds(speeds, run) for name, run in ways.items()}
    return row_of(part, computing, 2 * sums * speeds.collective(size // 2), found)


LONG, SHORT, CHATS, QUIET, TOKENS_OF_CHATS = 2048, 16, 4, 24, 600
FORMS = ("off/auto", "auto/interleave", "auto/priority")
LANE_SHARE = 0.4
"""The share of the device that prefill gets while a decode step, which has priority, runs: a decode
step waits for memory most of the time."""


def slices_table(kind: str) -> dict[str, Any]:
    """Measure each form: the inter-token latency of chats during a long prompt, as a multiple of
    that before and after it."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        config = Path(name) / "config.json"
        config.write_text(
            config.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 4096')
        )
        shutil.copy(Path(embedded_model()) / "tokenizer.json", name)
        for form in FORMS:
            found[form] = slices_row(Path(name), kind, *form.split("/"))
    for each in found.values():
        each["throughput"] = round(each["tokens_a_second"] / found[FORMS[0]]["tokens_a_second"], 3)
    return found


def slices_row(folder: Path, kind: str, asked: str, lane: str) -> dict[str, Any]:
    """Measure one form. The pace controller of slices sees virtual time."""
    settings: dict[str, Any] = {"device": kind, "graph": "off", "kernels": "reference", "attention_backend": "gathered"}
    settings |= {"max_requests": CHATS + 2, "max_model_len": LONG + TOKENS_OF_CHATS, "max_batch_tokens": 1024}
    llm = LLM(str(folder), prompt_slices=asked, prompt_lane=lane, prefix_cache=False, **settings)
    sim = sglcore_sim.current()
    assert sim is not None
    with virtual_time(sim, SPEEDS) as clock, mock.patch.object(step_loop, "perf_counter", lambda: clock.now):
        worker: Any = llm.started.worker
        streams = worker.runner.streams
        clock.share(streams.forward, 1.0)
        if streams.lane is not None:
            clock.share(streams.lane, LANE_SHARE)
        found = played(llm, clock)
    llm.started.worker.close()
    return found


def played(llm: LLM, clock: VirtualTime) -> dict[str, Any]:
    """Run chats that decode throughout, with one long prompt in between."""
    engine, draw = llm.engine, np.random.default_rng(0)

    def add(length: int, tokens: int) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return engine.add(draw.integers(1, 60, length).tolist(), params)

    chats = [add(SHORT, TOKENS_OF_CHATS) for _ in range(CHATS)]
    while not all(chat.outputs[0].token_ids for chat in chats):
        engine.step()
    begin, first = clock.now, chats[0].outputs[0]
    before = gaps(engine.step, first, clock, lambda found: len(found) < QUIET)
    long = add(LONG, 1)
    during = gaps(engine.step, first, clock, lambda found: not long.finished)
    after = gaps(engine.step, first, clock, lambda found: len(found) < QUIET)
    if len(first.token_ids) >= TOKENS_OF_CHATS:
        raise SystemExit("the chats ended before the prompt did; raise TOKENS_OF_CHATS")
    while engine.has_work:
        engine.step()
    quiet = float(np.median(before + after))
    return {
        "quiet_ms": ms(quiet),
        **{f"p{q}": round(float(np.percentile(during, q)) / quiet, 2) for q in (50, 90, 99)},
        "tokens_while_the_prompt_ran": len(during),
        "tokens_a_second": round((CHATS * (TOKENS_OF_CHATS - 1) + LONG) / (clock.now - begin), 1),
    }


def gaps(
    step: Callable[[], object], output: Any, clock: VirtualTime, goes_on: Callable[[list[float]], bool]
) -> list[float]:
    """Run steps while `goes_on`; returns the virtual seconds between tokens of an output."""
    found, last, had = list[float](), clock.now, len(output.token_ids)
    while goes_on(found):
        step()
        if len(output.token_ids) > had:
            found.append(clock.now - last)
            last, had = clock.now, len(output.token_ids)
    return found


def main() -> None:
    """Measure, print, and with `--json` write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="cuda", help="of the simulated device")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sim = sglcore_sim.install(options.kind)
    halves, slices = halves_table(sim), slices_table(options.kind)
    show(halves)
    for form, row in slices.items():
        print(
            f"{form:>16}: while the prompt ran p50 {row['p50']:6.2f}  p90 {row['p90']:6.2f}  p99 {row['p99']:6.2f}"
            f" times the quiet {row['quiet_ms']:.3f} ms; throughput {row['throughput']:.3f} of chunks"
        )
    if options.json:
        content = {"machine": machine(), "kind": options.kind, "speeds": asdict(SPEEDS), "lane_share": LANE_SHARE}
        write_results(options.json, {**content, "halves": halves, "slices": slices})


if __name__ == "__main__":
    main()
