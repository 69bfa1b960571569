"""Speed-up of speculative decoding over plain decode when steps are bound by the device.

On the simulated accelerator each forward of the embedded model keeps the device busy for --step
milliseconds, however many tokens it verifies, and each draft forward for a fraction c of that. The
host continues meanwhile, and waits where it would on hardware. k draft tokens that bring tau tokens
per step then give a speed-up of tau / (1 + f c), if host time is hidden and nothing else waits; the
goal is to be within 10 % of it. f is k if a draft forward brings one token, and 1 if it brings a
block. The device's arithmetic runs on the host too, so `host_ms`, the CPU time of a step, is more
than the scheduling time. If steps do not overlap, as on a device that needs lengths from the host,
only the draft forwards hide host time. On a busy machine set OMP_NUM_THREADS=1: torch's threads
wait for each other's cores.

    python benchmarks/speculative_latency.py [--device KIND] [--step MS] [--batch N] [--draft NAME]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
from results import machine, write_results
from torch import Tensor

import sglcore_sim
from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import embedded_model, start
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import Model, ModelRunner
from sglcore.runtime.speculative.block_drafts import BlockDrafter
from sglcore.runtime.speculative.chain_drafts import AutoregressiveDrafter
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop

COSTS = (0.1, 0.25)
HEADS = (("eagle3", (2, 4, 7)), ("mtp", (2, 4)), ("dflash", (2, 4, 7)))
"""Drafters, and their numbers of draft tokens."""
TOKENS = 96
THINGS = [
    "scarf",
    "umbrella",
    "boat",
    "lamp",
    "kite",
    "drum",
    "ladder",
    "apple",
    "horse",
    "basket",
    "bell",
    "coat",
    "bridge",
    "mirror",
    "clock",
    "garden",
]


class Busy:
    """Wraps a model; each forward keeps the device busy for `milliseconds`. This happens at the
    output layer, which runs once per forward, after the graph."""

    def __init__(self, model: Model, sim: sglcore_sim.Simulator) -> None:
        self._model, self._sim = model, sim
        self.milliseconds = 0.0

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The model's."""
        return self._model.attention_layers

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The model's."""
        return self._model(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Keep the device busy, then return the model's logits."""
        self._sim.busy(self.milliseconds)
        return self._model.logits(hidden)

    def embed_ids(self, ids: Tensor) -> Tensor:
        """The model's."""
        return self._model.embed_ids(ids)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens, steps and seconds of decode, each summed over requests; and host CPU milliseconds of
    one step of the batch."""

    tokens: int
    steps: int
    seconds: float
    host_ms: float

    @property
    def rate(self) -> float:
        """Tokens per second of one request."""
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step."""
        return self.seconds / self.steps * 1e3


class Engine:
    """The embedded model on the simulated device. `target` and `draft` (None: no draft model) set
    how long their forwards keep the device busy."""

    def __init__(self, sim: sglcore_sim.Simulator, batches: tuple[int, ...], **settings: object) -> None:
        given = {"device": sim.kind.name, "prefix_cache": False, "max_model_len": 256, "max_requests": max(batches)}
        config = resolve_config({**given, "graph_buckets": batches, **settings})
        started = start(config)
        worker, self.overlaps = started.worker, started.overlap
        assert isinstance(worker, TpModelWorker)
        self.target, self.draft = busy(worker.runner, sim), None
        if isinstance(worker, SpeculativeWorker):
            assert isinstance(worker.drafter, AutoregressiveDrafter | BlockDrafter)
            self.draft = busy(worker.drafter.runner, sim)
        self._worker, self._runs = worker, 0
        self._loop = Loop(Scheduler(worker.limits, prefix_cache=False), worker, overlap=self.overlaps)

    def decode(self, prompts: list[list[int]], step: float, cost: float = 0.0) -> Decoded:
        """Continue the prompts as one batch; a target forward takes `step` milliseconds, a draft
        forward `cost` times that."""
        self.target.milliseconds = step
        if self.draft is not None:
            self.draft.milliseconds = step * cost
        self._runs += 1
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self._loop.scheduler.add(Request(f"{self._runs} {index}", np.array(prompt, np.int32), params))
        seen, first, last = Counter[str](), dict[str, float](), dict[str, float]()
        tokens = turns = 0
        begin = time.process_time()
        while self._loop.has_work:
            outputs, now = self._loop.step(), time.perf_counter()
            turns += 1
            for output in outputs:
                # Output 1 has the prefill's token; the time of output 2 starts the measurement.
                name = output.request_id
                seen[name] += 1
                first.setdefault(name, now) if seen[name] == 2 else None
                tokens += len(output.token_ids) if seen[name] > 2 else 0
                last[name] = now
        host_ms = (time.process_time() - begin) / turns * 1e3
        seconds = sum(last[name] - first[name] for name in first)
        return Decoded(tokens, seen.total() - 2 * len(prompts), seconds, host_ms)

    def close(self) -> None:
        """Free the device."""
        self._worker.close()


def busy(runner: ModelRunner, sim: sglcore_sim.Simulator) -> Busy:
    """Wrap the runner's model in `Busy`; returns the wrapper."""
    runner.model = made = Busy(runner.model, sim)
    return made


@contextmanager
def engine(sim: sglcore_sim.Simulator, batches: tuple[int, ...], **settings: object) -> Iterator[Engine]:
    """Make an engine that is closed at the end of the block."""
    made = Engine(sim, batches, **settings)
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=float, default=150.0, help="milliseconds of a target's forward")
    parser.add_argument("--device", default="musa", help="a kind of simulated device")
    parser.add_argument("--batch", type=int, default=16, help="requests at once, beside runs of one request")
    parser.add_argument("--draft", choices=[head for head, _ in HEADS], help="one drafter only; default: all")
    parser.add_argument("--json")
    args = parser.parse_args()
    sim = sglcore_sim.install(args.device)
    codec = TextCodec(embedded_model())
    told = ([{"role": "user", "content": f"Tell me a story about a {thing}."}] for thing in THINGS)
    prompts = [codec.encode(codec.render_chat(each), special=False) for each in told]
    by_torch = {"kernels": "reference", "attention_backend": "gathered"}
    rows, batches = [], (1, args.batch)
    with engine(sim, batches, speculative="off", **by_torch) as one:
        plain = {batch: one.decode(prompts[:batch], args.step) for batch in batches}
    drafts = [(head, length) for head, lengths in HEADS for length in lengths if args.draft in (None, head)]
    for head, length in drafts:
        forwards = 1 if head == "dflash" else length
        with engine(sim, batches, speculative=head, draft_tokens=length, **by_torch) as one:
            for batch, cost in product(batches, COSTS):
                found = one.decode(prompts[:batch], args.step, cost)
                named = {"draft": head, "k": length, "c": cost, "batch": batch, "overlaps": one.overlaps}
                rows.append(named | compare(found, plain[batch], 1 + forwards * cost))
                print(rows[-1], flush=True)
    if args.json:
        what = {"benchmark": "speed-up of verified proposals", "device": args.device, "target_ms": args.step}
        steps = {batch: {"step_ms": found.step_ms, "host_ms": found.host_ms} for batch, found in plain.items()}
        write_results(args.json, {**what, "machine": machine(), "plain": steps, "rows": rows})


def compare(found: Decoded, plain: Decoded, forwards: float) -> dict[str, float]:
    """Return tokens per step, the expected speed-up if a step takes the time of `forwards` target
    forwards, and the measured one."""
    tau, speed_up = found.tokens / found.steps, found.rate / plain.rate
    row = {"tau": tau, "expected": tau / forwards, "speed_up": speed_up, "ratio": speed_up * forwards / tau}
    row |= {"step_ms": found.step_ms, "token_ms": 1e3 / found.rate, "host_ms": found.host_ms}
    return {name: round(value, 3) for name, value in row.items()}


if __name__ == "__main__":
    main()
