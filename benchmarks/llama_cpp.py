"""Each family with a file here beside llama.cpp, where that has the architecture and its file can be written, in one run.

    python -m benchmarks.llama_cpp PYTHON [FAMILY ...] [--rounds 3] [--out benchmarks/results/llama_cpp.json]

PYTHON is that of an environment with llama-cpp-python, such as `benchmarks.peers.install` makes. Models are those of
`native_families.py`: about 100 million random weights, all matrices in bfloat16 either way. Decode is milliseconds a step at 1 and
8 requests, behind a prompt of 16 tokens, with as many threads as there are processors; the engines take turns, and the one that does
not run is held still. `times ours` is how many times our time llama.cpp takes. The first greedy tokens tell whether both
compute the same model.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.made_models import BASE, make_model
from benchmarks.native_families import FAMILIES
from benchmarks.peers.child import Child, ChildError
from benchmarks.results import machine, write_results
from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from tests.models.gguf_checkpoints import write

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3_text": "gemma3",
        "phi3": "phi3",
        "glm4": "glm4",
        "granite": "granite",
        "olmo2": "olmo2",
        "mixtral": "llama",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
    }
)
"""llama.cpp's names of the families whose files are written here."""
PROMPT, NEW, CHECKED, LIMIT = 16, 49, 8, 300.0
VOCABULARY = BASE["vocab_size"]


def main() -> None:
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path)
    parser.add_argument("families", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for kind in asked.families:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = _family(kind, Path(folder), asked.python, asked.rounds)
        print(kind, found[kind], flush=True)
    if asked.out is not None:
        told = {"machine": machine(), "dtype": "bfloat16", "median of": asked.rounds, "families": found}
        write_results(asked.out, told)


def _family(kind: str, folder: Path, python: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step of both, and their ratio."""
    make_model(folder, kind, FAMILIES[kind])
    file = _write(kind, folder)
    job = {"model": str(file), "format": "bf16", "threads": os.cpu_count(), "cache_tokens": 1024}
    child = Child(python, "llama_cpp", {**job, "vocabulary": VOCABULARY}, folder / "llama_cpp.log")
    engine = LLM(model=str(folder), device="cpu", dtype="bfloat16", max_model_len=1024, max_requests=8)
    try:
        tokens = child.wait_ready(LIMIT)[2]
        found = {f"decode {requests}": _rounds(engine, child, requests, rounds) for requests in (1, 8)}
        return found | {"first tokens": [_first_tokens(engine), list(tokens)]}
    except ChildError as error:
        return {"refused": f"{error}; {_last_words(folder / 'llama_cpp.log')}"}
    finally:
        child.close()
        engine.close()


def _write(kind: str, folder: Path) -> Path:
    """The model as a file of llama.cpp, without a tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    architecture = ARCHITECTURES[kind]
    words = {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": VOCABULARY}
    return write(model, folder / "model.gguf", architecture, lambda name: "BF16", tokenizer=words)


def _rounds(engine: LLM, child: Child, requests: int, rounds: int) -> dict[str, float]:
    ours, theirs = [], []
    for number in range(rounds + 1):
        ours.append(_decode(engine, requests))
        question = {"kind": "decode", "seed": number, "batch": requests, "prompt": PROMPT, "new": NEW, "prefix": 0}
        answer = child.ask(question, LIMIT)
        theirs.append(answer["seconds"] / answer["tokens"] * requests * 1e3)
    # What comes first finds cold caches.
    ratio = median(their / own for own, their in zip(ours[1:], theirs[1:], strict=True))
    return {
        "ours": round(median(ours[1:]), 3),
        "llama.cpp": round(median(theirs[1:]), 3),
        "times ours": round(ratio, 2),
    }


def _decode(engine: LLM, requests: int) -> float:
    """Milliseconds of a step, from the one in which every request has a token."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    outputs = [engine.engine.add(list(range(5 + each, 5 + each + PROMPT)), params) for each in range(requests)]
    while min(len(each.outputs[0].token_ids) for each in outputs) < 1:
        engine.engine.step()
    before = len(outputs[0].outputs[0].token_ids)
    begin = time.perf_counter()
    while engine.engine.has_work:
        engine.engine.step()
    return (time.perf_counter() - begin) / (NEW - before) * 1e3


def _first_tokens(engine: LLM) -> list[int]:
    """After the prompt that llama.cpp's runner begins with."""
    source = random.Random(0)
    prompt = [source.randrange(2, VOCABULARY) for _ in range(PROMPT)]
    params = SamplingParams(temperature=0.0, max_tokens=CHECKED, ignore_eos=True)
    return list(engine.generate([prompt], params)[0].outputs[0].token_ids)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
    return lines[-1][:200] if lines else ""


if __name__ == "__main__":
    main()
