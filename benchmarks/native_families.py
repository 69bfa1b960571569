"""Each family with a file here at about 100 million weights: by that file, by transformers' class on the engine, by plain
`generate`, and by llama.cpp where that has the architecture and its file can be written, in one run.

    python -m benchmarks.native_families [FAMILY ...] [--rounds 3] [--llama-cpp PYTHON] [--out benchmarks/results/native_families.json]

PYTHON is that of an environment with llama-cpp-python, such as `benchmarks.peers.install` makes. Decode is milliseconds a step at 1
and 8 requests in bfloat16, behind a prompt of 16 tokens, on one processor, in processor time: what else runs on the machine hardly
counts. The ways take turns, and their median is told, without the first, which finds cold caches. A way that refuses a family has its
reason instead of figures. `same first tokens` tells whether llama.cpp computes the same model.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.made_models import BASE, make_model
from benchmarks.peers.child import Child, ChildError
from benchmarks.results import machine, write_results
from benchmarks.transformers_form import by_generate, settings_of
from sglcore.device.errors import ConfigError
from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from tests.models.gguf_checkpoints import write

NATIVE, FORM, GENERATE, LLAMA = "native recorded", "transformers recorded", "generate", "llama.cpp"
PROMPT, NEW, CHECKED, LIMIT = 16, 33, 8, 300.0
WINDOW = {"sliding_window": 512}
# llama.cpp's files do not say by what queries are scaled; it takes the heads' size.
SCALED = {**WINDOW, "query_pre_attn_scalar": BASE["head_dim"]}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "num_hidden_layers": 10}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 384}
ROUTED = {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 192, "num_hidden_layers": 10}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
}
SPACE = {"mamba_n_heads": 24, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 128}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 4}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "mistral": WINDOW,
        "qwen2": {},
        "qwen3": {},
        "gemma": {},
        "gemma2": SCALED,
        "gemma3_text": SCALED,
        "glm": {},
        "glm4": {},
        "phi3": {},
        "granite": {},
        "olmo2": {},
        "olmo3": WINDOW,
        "gpt_oss": {**ROUTED, **WINDOW},
        "mixtral": ROUTED,
        "granitemoe": ROUTED,
        "qwen2_moe": SHARED,
        "qwen3_moe": EXPERTS,
        "glm4_moe": {**EXPERTS, "n_routed_experts": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "qwen3_next": {**SHARED, **DELTA, "num_hidden_layers": 12},
        "qwen3_5_text": DELTA,
        "qwen3_5_moe_text": {**SHARED, **DELTA, "num_hidden_layers": 12},
        "granitemoehybrid": {
            **SPACE,
            **ROUTED,
            "shared_intermediate_size": 512,
            "layer_types": (["linear_attention"] * 4 + ["full_attention"]) * 2,
        },
        "lfm2": CONVOLUTIONS,
        "lfm2_moe": {**EXPERTS, **CONVOLUTIONS, "num_hidden_layers": 12, "num_dense_layers": 2},
        "nemotron_h": {
            "mamba_num_heads": 24,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"] * 6,
        },
    }
)
"""By transformers' type, what differs from `BASE`."""


LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
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
"""llama.cpp's architectures of the families whose files can be written here."""

Decode = Callable[[int, int], float]
"""Of so many requests, and a seed: milliseconds of a step."""


def main() -> None:
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--out")
    asked = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in asked.families:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = _family(kind, Path(folder), asked.rounds, asked.llama_cpp)
        print(kind, found[kind], flush=True)
    if asked.out is not None:
        told = {"machine": machine(), "dtype": "bfloat16", "processors": 1, "median of": asked.rounds}
        write_results(asked.out, {**told, "families": found})


def _family(kind: str, folder: Path, rounds: int, llama: Path | None) -> dict[str, Any]:
    """Milliseconds of each way, and how many times native's they are."""
    weights = make_model(folder, kind, FAMILIES[kind])
    told: dict[str, Any] = {"million weights": round(weights / 1e6)}
    ways: dict[str, Decode] = {}
    with ExitStack() as stack:
        for way in (NATIVE, FORM, GENERATE, *([LLAMA] if llama is not None and kind in LLAMA_NAMES else [])):
            try:
                ways[way] = stack.enter_context(_opened(way, kind, folder, llama, told))
            except (ConfigError, ChildError) as error:
                told.setdefault("refused", {})[way] = str(error)
        taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for requests in (1, 8):
            for seed in range(rounds + 1):
                for way, decode in ways.items():
                    taken[way][f"decode {requests}"].append(decode(requests, seed))
    best = {way: {name: median(each[1:]) for name, each in of.items()} for way, of in taken.items()}
    times = {way: {name: round(each / best[NATIVE][name], 2) for name, each in of.items()} for way, of in best.items()}
    rounded = {way: {name: round(each, 3) for name, each in of.items()} for way, of in best.items()}
    return {**told, "ms": rounded, "times native": {way: each for way, each in times.items() if way != NATIVE}}


@contextmanager
def _opened(way: str, kind: str, folder: Path, llama: Path | None, told: dict[str, Any]) -> Iterator[Decode]:
    """One way, ready to decode."""
    if way == GENERATE:
        yield _of_generate(folder)
    elif way == LLAMA:
        assert llama is not None
        job = {"model": str(_gguf(kind, folder)), "format": "bf16", "threads": 1, "cache_tokens": 1024}
        child = Child(llama, "llama_cpp", {**job, "vocabulary": BASE["vocab_size"]}, folder / "llama_cpp.log")
        try:
            told["same first tokens"] = list(child.wait_ready(LIMIT)[2]) == told.pop("first tokens")
            yield _of_child(child)
        finally:
            child.close()
    else:
        with LLM(**settings_of(way, folder, "bfloat16")) as engine:
            if way == NATIVE and kind in LLAMA_NAMES and llama is not None:
                told["first tokens"] = _first_tokens(engine)
            yield _of_engine(engine)


def _of_engine(engine: LLM) -> Decode:
    def decode(requests: int, seed: int) -> float:
        """From the step in which every request has a token."""
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        outputs = [engine.engine.add(list(range(5 + each, 5 + each + PROMPT)), params) for each in range(requests)]
        while min(len(each.outputs[0].token_ids) for each in outputs) < 1:
            engine.engine.step()
        before = len(outputs[0].outputs[0].token_ids)
        begin = time.process_time()
        while engine.engine.has_work:
            engine.engine.step()
        return (time.process_time() - begin) / (NEW - before) * 1e3

    return decode


def _of_generate(folder: Path) -> Decode:
    run = by_generate(folder, "bfloat16")

    def timed(requests: int, tokens: int) -> float:
        begin = time.process_time()
        run([[5] * PROMPT] * requests, tokens)
        return time.process_time() - begin

    # The first token takes the prompt.
    return lambda requests, seed: (timed(requests, NEW) - timed(requests, 1)) / (NEW - 1) * 1e3


def _of_child(child: Child) -> Decode:
    def decode(requests: int, seed: int) -> float:
        question = {"kind": "decode", "seed": seed, "batch": requests, "prompt": PROMPT, "new": NEW, "prefix": 0}
        answer = child.ask(question, LIMIT)
        return answer["seconds"] / answer["tokens"] * requests * 1e3

    return decode


def _gguf(kind: str, folder: Path) -> Path:
    """The model as a file of llama.cpp, without a tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name = LLAMA_NAMES[kind]
    words = {"tokenizer.ggml.model": "no_vocab", f"{name}.vocab_size": BASE["vocab_size"]}
    return write(model, folder / "model.gguf", name, lambda weight: "BF16", tokenizer=words)


def _first_tokens(engine: LLM) -> list[int]:
    """Behind the prompt that llama.cpp's runner begins with."""
    source = random.Random(0)
    prompt = [source.randrange(2, BASE["vocab_size"]) for _ in range(PROMPT)]
    params = SamplingParams(temperature=0.0, max_tokens=CHECKED, ignore_eos=True)
    return list(engine.generate([prompt], params)[0].outputs[0].token_ids)


if __name__ == "__main__":
    main()
