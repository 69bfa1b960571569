"""Draft trees compared with chains: tokens per step with the draft heads of the embedded model, and
host time of building trees.

Lower bound of the host time: a sort and three gathers over the records of each request; it does not
depend on the vocabulary size.

    python benchmarks/draft_trees.py [--prompts 64] [--written 128] [--requests 64]
        [--depths 1 2 3 4 5 6] [--json FILE]

With `--depths`, for each number of draft forwards: a chain, trees of 8 nodes for each beam width in
`WIDTHS`, and the tree of all recorded candidates, an upper bound for any 8 nodes of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from results import machine, write_results
from tokenizers import Tokenizer

from sglcore import LLM, SamplingParams
from sglcore.engine.start import embedded_model
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.tree import TreeRecords, TreeTables, depths_of_records
from sglcore.step.tree_shapes import MOST_NODES, TreeShape
from sglcore_cpu.choice import kernels as processor_kernels

KINDS, TEMPERATURES = ("eagle3", "mtp"), (0.0, 1.0)
CHAIN, ROUNDS = 4, 400
NAMES = ("Mia", "Ben", "Tom", "Lily", "Max", "Anna", "Leo", "Nora")
THINGS = ("scarf", "boat", "lamp", "kite", "drum", "ladder", "basket", "clock")
SHAPES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "chain of 4": {"draft_tokens": CHAIN},
        "tree of 8 nodes, 2 beams": {"draft_tokens": 7, "draft_width": 2, "draft_depth": CHAIN},
        "tree of 8 nodes, 3 beams": {"draft_tokens": 7, "draft_width": 3, "draft_depth": CHAIN},
        "tree of 16 nodes, 4 beams": {"draft_tokens": 15, "draft_width": 4, "draft_depth": CHAIN},
    }
)
"""Each shape takes CHAIN draft forwards."""
NODES, WIDTHS = 8, (2, 3, 4, 7)


def prompts_of(count: int) -> list[list[int]]:
    """Return `count` beginnings of stories as token ids."""
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    texts = [f"Once upon a time {name} had a {thing}. One day" for name in NAMES for thing in THINGS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts[:count]]


def tokens_of_a_step(
    kind: str, prompts: Sequence[list[int]], written: int, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Return, by temperature, tokens per verification step of a request, including the token that
    the model draws itself."""
    found = {}
    with LLM(device="cpu", speculative=kind, max_requests=len(prompts), **settings) as llm:
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=seed, max_tokens=written, ignore_eos=True)
                for seed in range(len(prompts))
            ]
            outputs = [each.outputs[0] for each in llm.generate(prompts, params)]
            steps = sum(each.verified_steps for each in outputs)
            found[str(temperature)] = round(1 + sum(each.accepted_tokens for each in outputs) / steps, 3)
    return found


def shapes_of(depth: int) -> dict[str, dict[str, int]]:
    """Return a chain, all possible trees of `NODES` nodes, and the trees of all recorded
    candidates, with `depth` draft forwards each."""
    found = {"chain": {"draft_tokens": depth}}
    for width in WIDTHS:
        shape, given = TreeShape(width, depth, NODES), {"draft_width": width, "draft_depth": depth}
        most = sum(shape.records)
        if depth < NODES <= most + 1 and shape.cells <= MOST_NODES:
            found[f"{width} beams"] = {"draft_tokens": NODES - 1, **given}
        if NODES <= most < MOST_NODES:
            found[f"all of {width} beams"] = {"draft_tokens": most, **given}
    return found


def tokens_by_shape(
    kind: str, prompts: Sequence[list[int]], written: int, shapes: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """Measure and print `tokens_of_a_step` for each shape."""
    found = {}
    for name, settings in shapes.items():
        own = found[name] = tokens_of_a_step(kind, prompts, written, settings)
        print(f"{kind:8}{name:28}" + "".join(f"  {own[each]:.3f} at {each}" for each in own), flush=True)
    return found


@torch.inference_mode()
def host_time(requests: int, kernels: KernelTable) -> dict[str, float]:
    """Return median host microseconds of a step without forwards and draws, for one tree of 8 nodes
    per request: building the trees, and finding the accepted paths."""
    shape = TreeShape(3, CHAIN, 8)
    tables = TreeTables(requests + 1, shape.nodes, torch.device("cpu"), kernels)
    slots = torch.arange(1, requests + 1, dtype=torch.int32)
    widths = [1, *[shape.width] * (shape.depth - 1)]
    leaders = [
        (
            torch.randint(1000, (requests * width, shape.width), dtype=torch.int32),
            -torch.rand(requests * width, shape.width).sort(dim=-1).values,
        )
        for width in widths
    ]
    depths = depths_of_records(shape, "cpu")
    built, walked = [], []
    owners, state = slots.repeat_interleave(shape.nodes), torch.zeros(3, requests + 1, dtype=torch.int32)
    proposals = torch.zeros(requests + 1, shape.nodes - 1, dtype=torch.int32)
    path, runs = torch.empty(requests, shape.steps).int(), torch.empty(4, requests).int()
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        records = TreeRecords(requests, shape, depths, kernels)
        for tokens, scores in leaders:
            records.expand(tokens, scores)
        tables.put(slots, records.build(), proposals)
        middle = time.perf_counter()
        drawn = torch.randint(1000, (requests * shape.nodes,), dtype=torch.int32)
        kernels.tree_walk(drawn, owners, slots, state[0, 1:], tables.held, state[1], state[2], proposals, path, runs)
        built.append((middle - begin) * 1e6)
        walked.append((time.perf_counter() - middle) * 1e6)
    return {"build": round(statistics.median(built), 1), "walk": round(statistics.median(walked), 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--written", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--depths", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables = {"native": processor_kernels(), "torch": KernelTable()}
    taken = {name: host_time(given.requests, table) for name, table in tables.items()}
    for name, own in taken.items():
        print(
            f"host time of {given.requests} requests, {name}: {own['build']} us to build trees, "
            f"{own['walk']} us to walk them"
        )
    prompts = prompts_of(given.prompts)
    found = {kind: tokens_by_shape(kind, prompts, given.written, SHAPES) for kind in KINDS}
    by_depth = {
        kind: {str(each): tokens_by_shape(kind, prompts, given.written, shapes_of(each)) for each in given.depths}
        for kind in KINDS
    }
    if given.json:
        sizes = {"prompts": given.prompts, "written": given.written, "requests": given.requests}
        results: dict[str, object] = {"machine": machine(), **sizes, "microseconds": taken, "tokens_of_a_step": found}
        write_results(given.json, results | {"by_forwards_of_the_draft": by_depth})


if __name__ == "__main__":
    main()
