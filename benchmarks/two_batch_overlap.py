"""Two-batch overlap: how much communication two micro-batches hide, compared with the cost model,
and the overhead of the driver that switches between them.

One rank, with a group that simulates a link: an all-reduce takes alpha + beta * bytes seconds, one
after the other; a wait spins until it is done. The communication time is set to fractions of the
computing time, which is measured first.

    python benchmarks/two_batch_overlap.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import machine, write_results
from safetensors.torch import save_file
from torch import Tensor

from sglcore.checkpoint.model_config import read_config
from sglcore.models.single_steps import Steps
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.overlap.interleave import take_turns
from sglcore.runtime.overlap.micro_batches import Halves
from sglcore.runtime.parallel.expert_dispatch import RaggedDispatcher
from sglcore.runtime.parallel.process_group import Group
from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.step.micro_batch_cut import CutTerms, Staggers
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.topology import Communication, Place, Topology

LAYERS, HIDDEN, HEADS, HEAD_DIM, INNER, VOCAB, TOKENS = 12, 512, 8, 64, 1024, 64, 126
PARTS = (0.25, 0.5, 1.0, 2.0)
"""Communication time of a step, as fractions of its computing time."""
ROUNDS, WANTED_SHARE, WANTED_US = 15, 0.8, 40.0
STAGGERS = (0, 1, 2)
DRIVER_SUMS = (25, 57)
"""All-reduces of a micro-batch in models of 12 and of 28 layers."""


@dataclass
class Link:
    """A simulated link: seconds per message (`alpha`) and per byte (`beta`). `free_at`: when the
    last message arrives."""

    alpha: float = 0.0
    beta: float = 0.0
    free_at: float = 0.0
    launched: int = 0

    def launch(self, size: int) -> float:
        self.launched += 1
        self.free_at = max(self.free_at, time.perf_counter()) + self.alpha + self.beta * size
        return self.free_at


class Spun:
    """A work handle that is done at a given time; `wait` spins."""

    __slots__ = ("_done_at",)

    def __init__(self, done_at: float) -> None:
        self._done_at = done_at

    def wait(self) -> None:
        while time.perf_counter() < self._done_at:
            pass


class SlowGroup(Group):
    """A group of one rank; its all-reduces take as long as the link says."""

    def __init__(self, link: Link) -> None:
        none: Any = None
        super().__init__(none, 0, 1, none)
        self._link = link

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._run(partial(self._start, x), x)

    def _start(self, x: Tensor, later: bool) -> Any:
        work = Spun(self._link.launch(x.nbytes))
        if later:
            return work
        work.wait()
        return None


def write_checkpoint(folder: Path) -> None:
    """Write a Llama with zero weights; its layers do the same work as any of this size."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    width = HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.{name}_proj.weight": (width, HIDDEN) for name in "qkv"}
        shapes |= {f"{attention}.o_proj.weight": (HIDDEN, width), f"{mlp}.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{mlp}.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (HIDDEN,) for name in norms}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")


class Site:
    """A prefill batch that runs whole or as two micro-batches, over a link."""

    def __init__(self, folder: Path, group: Group, device: str = "cpu") -> None:
        write_checkpoint(folder)
        place = Place(0, Topology(1), "", 0, 1)
        groups = Groups(group, place, Communication("gloo"), group, group, RaggedDispatcher, 0)
        model = load_model(
            folder, read_config(folder), kernels=KernelTable(), device=device, dtype=torch.float32, groups=groups
        )
        steps = Steps(model, device=device)
        self.runner, backend = steps.runner, steps.runner.attn_backend
        pools = backend.req_to_token_pool, backend.token_to_kv_pool, backend.kernels
        self.batch: ForwardBatch = self.runner.prepared(
            steps.staged({1: [3] * (TOKENS // 2), 2: [5] * (TOKENS // 2)}, ForwardMode.EXTEND)
        )
        self.backends = backend, type(backend)(backend.shape, *pools)

    def whole(self) -> None:
        """Run one forward of the whole batch."""
        self.runner.halves, self.batch.plan_record = None, None
        self.runner.run_eager(self.batch)

    def in_halves(self, stagger: int) -> None:
        """Run the same batch as two micro-batches with this stagger."""
        self.runner.halves = Halves(self.backends, CutTerms(staggers=Staggers(stagger, stagger)))
        self.runner.run_eager(self.batch)


def seconds(ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median seconds of several functions, which run in turn; the first round is not
    counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - begun)
    return {name: median(times[1:]) for name, times in found.items()}


def measure() -> dict[str, Any]:
    """Measure computing time of the whole batch and of micro-batches, and for each of PARTS the
    hidden communication."""
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        link = Link()
        site = Site(Path(name), SlowGroup(link))
        free = seconds({"whole": site.whole, "halves": partial(site.in_halves, 0)})
        link.launched = 0
        site.whole()
        sums, size = link.launched, TOKENS * HIDDEN * 4
        rows = [measured(site, link, free, part, sums, size) for part in PARTS]
    return {"whole_ms": ms(free["whole"]), "halves_ms": ms(free["halves"]), "sums": sums, "waits": rows}


def link_of(part: float, whole: float, sums: int, size: int) -> tuple[float, float]:
    """Return alpha and beta such that the all-reduces take `part` of the whole batch's computing
    time; a tenth of each is alpha."""
    each = part * whole / sums
    return each / 10, each * 0.9 / size


def measured(site: Site, link: Link, free: dict[str, float], part: float, sums: int, size: int) -> dict[str, float]:
    """Measure with communication that takes `part` of the computing time."""
    link.alpha, link.beta = link_of(part, free["whole"], sums, size)
    waits = sums * 2 * (link.alpha + link.beta * size / 2)
    found = seconds({"whole": site.whole, **{f"stagger {d}": partial(site.in_halves, d) for d in STAGGERS}})
    link.alpha = link.beta = 0.0
    return row_of(part, free["halves"], waits, found)


def row_of(part: float, computing: float, waits: float, found: dict[str, float]) -> dict[str, float]:
    """Make a result row from seconds of the whole batch and of micro-batches. At most the shorter
    of computing and communication can be hidden."""
    best = min(time for name, time in found.items() if name != "whole")
    hideable, hidden = min(computing, waits), computing + waits - best
    return {
        "waits_by_computing": part,
        **{f"{name.replace(' ', '_')}_ms": ms(time) for name, time in found.items()},
        "model_ms": ms(max(computing, waits)),
        "hideable_ms": ms(hideable),
        "hidden_ms": ms(hidden),
        "share": round(hidden / hideable, 3),
        "speedup": round(found["whole"] / best, 3),
    }


def driver(sums: int) -> float:
    """Return the driver's overhead in microseconds: two micro-batches with `sums` all-reduces each
    and no other work, interleaved, minus the same one after the other."""
    group, x = SlowGroup(Link()), torch.zeros(1)

    def half() -> Tensor:
        for _ in range(sums):
            group.all_reduce(x)
        return x

    def in_turn() -> None:
        half()
        half()

    found = [seconds({"plain": in_turn, "turns": lambda: take_turns(half, half) and None}) for _ in range(20)]
    return round(median(each["turns"] - each["plain"] for each in found) * 1e6, 1)


def ms(value: float) -> float:
    """Convert seconds to milliseconds, rounded to the microsecond."""
    return round(value * 1e3, 3)


def show(found: Mapping[str, Any]) -> None:
    """Print a line for each of PARTS."""
    print(f"computing: {found['whole_ms']} ms whole, {found['halves_ms']} ms in halves; {found['sums']} sums")
    for row in found["waits"]:
        print(
            f"waits {row['waits_by_computing']:4.2f} of it: whole {row['whole_ms']:8.3f} ms, halves at best"
            f" {min(row[f'stagger_{d}_ms'] for d in STAGGERS):8.3f} (model {row['model_ms']:8.3f}),"
            f" hidden {row['share']:5.0%} of what can be, {row['speedup']:.2f} times as fast"
        )
    print(f"wanted: {WANTED_SHARE:.0%} hidden")


def main() -> None:
    """Measure, print, and with `--json` write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"driver_us": {str(2 * sums): driver(sums) for sums in DRIVER_SUMS}, **measure()}
    for sums, took in found["driver_us"].items():
        print(f"driver: {took} us a step of {sums} sums (wanted: at most {WANTED_US})")
    show(found)
    if options.json:
        sizes = {"layers": LAYERS, "hidden": HIDDEN, "inner": INNER, "tokens": TOKENS}
        write_results(
            options.json,
            {"machine": machine(), **sizes, "wanted_share": WANTED_SHARE, "wanted_driver_us": WANTED_US, **found},
        )


if __name__ == "__main__":
    main()
