"""How a long prompt delays running requests: chunked prefill compared with layered prefill (slices
of layers between decode steps).

Some chats decode. After a quiet period a prompt of 8,192 tokens arrives, and another quiet period
follows. The inter-token latency of the chats until the prompt's first token is compared with that
of the quiet periods; there is one before and one after, because steps take longer as the chats
grow. Throughput is over the whole load: all tokens of the chats plus the prompt, divided by the
total time. A chunk has the maximum number of tokens of a step (`--chunk`). A form is a value of
`prompt_slices`, with an optional value of `prompt_lane`: off, auto/interleave, auto/priority,
4096/priority.

    python benchmarks/prompt_slices.py [--device NAME] [--geometry 0.1B|0.6B|8B] [--chats N]
        [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_decode import GEOMETRIES, make
from results import machine, write_results

from sglcore import LLM, SamplingParams

LONG, SHORT, QUIET = 8192, 128, 64


def params(tokens: int) -> SamplingParams:
    """Return parameters for exactly `tokens` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def ids(draw: np.random.Generator, length: int) -> list[int]:
    """Return a random prompt, so that no two prompts are alike."""
    return draw.integers(10, 150_000, length).tolist()


def play(llm: LLM, chats: int, tokens: int, seed: int) -> dict[str, Any]:
    """Run one load. Returns seconds between tokens of a chat before, during and after the long
    prompt, the seconds to the prompt's first token, and tokens per second."""
    draw, step = np.random.default_rng(seed), llm.engine.step
    outputs = [llm.engine.add(ids(draw, SHORT), params(tokens)) for _ in range(chats)]
    while not all(output.outputs[0].token_ids for output in outputs):
        step()
    first, quiet = outputs[0].outputs[0], list[float]()
    last, begin = time.perf_counter(), time.perf_counter()
    while len(quiet) < QUIET:
        last = take(step, first, last, quiet)
    had, during, start = len(first.token_ids), list[float](), time.perf_counter()
    long = llm.engine.add(ids(draw, LONG), params(1))
    while not long.finished and len(first.token_ids) < tokens:
        last = take(step, first, last, during)
    if not during:
        during.append(time.perf_counter() - last)
    first_token, after = time.perf_counter() - start, list[float]()
    last = take(step, first, time.perf_counter(), [])
    while len(after) < QUIET and len(first.token_ids) < tokens:
        last = take(step, first, last, after)
    while not all(output.finished for output in outputs):
        step()
    seconds = time.perf_counter() - begin
    if had + len(during) >= tokens:
        print(
            f"the chats ended before the prompt did, after {len(during)} tokens beside it; raise --tokens", flush=True
        )
    return {
        "before": quiet,
        "after": after,
        "during": during,
        "first_token_seconds": first_token,
        "tokens_a_second": (chats * (tokens - 1) + LONG) / seconds,
    }


def take(step: Any, output: Any, last: float, into: list[float]) -> float:
    """Run one step. If it brought a token of the chat, append the seconds since the token before to
    `into` and return the time; otherwise return `last`."""
    had = len(output.token_ids)
    step()
    if len(output.token_ids) == had:
        return last
    now = time.perf_counter()
    into.append(now - last)
    return now


def measure(folder: Path, chosen: argparse.Namespace, slices: str) -> dict[str, Any]:
    """Measure all rounds of one form; the first round, with another seed, is a warm-up."""
    settings = {"device": chosen.device, "max_requests": chosen.chats + 2, "max_model_len": LONG + 2048}
    asked, _, lane = slices.partition("/")
    settings |= {"prompt_slices": asked, "prompt_lane": lane or "auto"}
    llm = LLM(str(folder), max_batch_tokens=chosen.chunk, prefix_cache=False, **settings)
    found = [play(llm, chosen.chats, chosen.tokens, seed) for seed in range(chosen.rounds + 1)][1:]
    ledger = {row.topic: f"{row.effective}: {row.reason}" for row in llm.ledger.rows}
    llm.started.worker.close()
    before, after, during = (np.concatenate([each[name] for each in found]) for name in ("before", "after", "during"))
    return {
        "quiet_p50_ms": 1e3 * float(np.median(np.concatenate([before, after]))),
        "quiet_before_p50_ms": 1e3 * float(np.median(before)),
        "quiet_after_p50_ms": 1e3 * float(np.median(after)),
        **{f"during_p{q}_ms": 1e3 * float(np.percentile(during, q)) for q in (50, 90, 99)},
        "tokens_while_the_prompt_ran": len(during) // len(found),
        "first_token_seconds": float(np.median([each["first_token_seconds"] for each in found])),
        "tokens_a_second": float(np.median([each["tokens_a_second"] for each in found])),
        "slices": ledger.get("prompt slices", "off"),
        "lane": ledger.get("prompt lane", ""),
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for each form."""
    whole = found["off"]["tokens_a_second"]
    for name, each in found.items():
        quiet = each["quiet_p50_ms"]
        ratios = "  ".join(f"p{q} {each[f'during_p{q}_ms'] / quiet:7.2f}" for q in (50, 90, 99))
        print(
            f"{name:>16}: quiet {quiet:7.2f} ms, while the prompt ran {ratios} times that;"
            f" prompt {each['first_token_seconds']:6.2f} s;"
            f" throughput {each['tokens_a_second'] / whole:5.3f} of chunks",
            flush=True,
        )


def main() -> None:
    """Measure each form on the same weights, print a row for each, write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--geometry", default="0.1B", choices=GEOMETRIES)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--forms", default="off,auto/interleave,auto/priority")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, has_other = Path(made), torch.accelerator.is_available() and chosen.device != "cpu"
        accelerator = torch.accelerator.current_accelerator() if has_other else None
        make(folder, chosen.geometry, accelerator.type if accelerator else "cpu", context=2 * LONG)
        found = {form: measure(folder, chosen, form) for form in chosen.forms.split(",")}
    table(found)
    content: dict[str, object] = {"machine": machine(), "geometry": chosen.geometry, "chats": chosen.chats}
    content |= {"prompt": LONG, "chunk": chosen.chunk, "tokens": chosen.tokens, "forms": found}
    if accelerator:
        content["hardware"] = torch.get_device_module(accelerator.type).get_device_name()
    if chosen.json:
        write_results(chosen.json, content)


if __name__ == "__main__":
    main()
