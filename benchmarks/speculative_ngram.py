"""What proposals by what followed before are worth on a processor: a model in the geometry of Qwen3-0.6B writes a text of which its
prompt has a copy with edits, as when code is changed, and a text that its prompt does not have.

The model's weights are random, but the output layer has the embeddings of a chain in which each token has one successor, so that
the model writes that chain whatever it attends to: who proposes by the prompt is right between two edits. A step costs what it
costs with any weights. Floor: a step reads all weights once, however many rows it has.

    python benchmarks/speculative_ngram.py FOLDER [--tokens N] [--rounds N] [--busy] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from peers.checkpoint import make_checkpoint
from peers.geometry import VOCABULARY
from results import machine, write_results
from safetensors.torch import load_file, save_file

from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams

CYCLE = 4_000
"""Tokens of the chain."""
EDIT = 14
"""Every so many tokens of the prompt's copy one is another."""
FIRST = 1_000
"""The chain's lowest token."""


def chain() -> list[int]:
    """The text, which begins again after its last token."""
    order = torch.randperm(CYCLE, generator=torch.Generator().manual_seed(4)) + FIRST
    return order.tolist()


def make_model(folder: Path) -> Path:
    """The checkpoint, unless it is there: 1.5 GB."""
    if (folder / "model.safetensors").is_file():
        return folder
    source = make_checkpoint(folder.with_name(f"{folder.name}-source"))
    weights = load_file(source / "model.safetensors")
    embedding = torch.randn(VOCABULARY, 1024, generator=torch.Generator().manual_seed(5)).bfloat16()
    head, text = torch.zeros_like(embedding), chain()
    head[text[1:] + text[:1]] = embedding[text]
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts(tokens: int) -> dict[str, list[int]]:
    """What is written next: of one the prompt has a copy with edits, of the other nothing."""
    text = chain()
    copy = [token if place % EDIT else 500 + place % 400 for place, token in enumerate(text[: tokens + 8])]
    return {"edit": [*copy, 7, text[0]], "random": text[-200:]}


def timed(llm: LLM, prompt: list[int], tokens: int, clock: Callable[[], float]) -> tuple[float, list[int]]:
    """Seconds of the decode steps of one request, and its tokens."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: list[int] = []
    start = 0.0
    for delta in llm.stream(prompt, params):
        if not found:
            start = clock()
        found += delta.token_ids
    return clock() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--busy", action="store_true", help="processor seconds, on a machine that others use too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock = time.process_time if args.busy else time.perf_counter
    folder = str(make_model(args.folder))
    settings = {"max_model_len": 1024, "threads": args.threads, "prefix_cache": False, "max_requests": 8}
    plain = LLM(folder, **settings)
    ngram = LLM(folder, **settings, speculative="ngram", draft_tokens=args.draft_tokens)
    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, prompt in prompts(args.tokens).items():
            texts = []
            for kind, llm in (("plain", plain), ("ngram", ngram)):
                took, found = timed(llm, prompt, args.tokens, clock)
                seconds.setdefault(f"{name} {kind}", []).append(took)
                texts.append(found)
            assert texts[0] == texts[1], name
            assert name == "random" or texts[0][:50] == chain()[1:51], "the model does not write its chain"
    figures = {name: median(values) for name, values in seconds.items()}
    for name in ("edit", "random"):
        figures[f"{name} ratio"] = median(
            one / other for one, other in zip(seconds[f"{name} plain"], seconds[f"{name} ngram"], strict=True)
        )
    figures["rows"] = rows_over_one(plain, clock)
    for name, value in figures.items():
        print(f"{name:<14} {value if isinstance(value, dict) else round(value, 3)}")
    if args.json:
        write_results(args.json, {"machine": machine(), "busy": args.busy, "figures": figures})


def rows_over_one(llm: LLM, clock: Callable[[], float], tokens: int = 24) -> dict[str, float]:
    """A decode step of several rows over a step of one."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: dict[int, list[float]] = {}
    for _ in range(3):
        for rows in (1, 2, 4, 5, 8):
            begun = [[*chain()[30 * row : 30 * row + 8]] for row in range(rows)]
            llm.generate(begun, SamplingParams(max_tokens=1, temperature=0.0))
            start = clock()
            llm.generate(begun, params)
            found.setdefault(rows, []).append((clock() - start) / tokens)
    return {str(rows): round(median(values) / median(found[1]), 3) for rows, values in found.items()}


if __name__ == "__main__":
    main()
