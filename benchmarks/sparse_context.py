"""DeepSeek-V4's attention compared with dense attention on the CPU, by context length: time of a
decode step, and of a prompt.

Both models are random, with about 0.3 billion weights in bfloat16 and equal numbers of layers and
heads, head size and experts per token. The dense model is a Qwen 3 MoE with `--kv-heads` KV heads.

    python benchmarks/sparse_context.py [--short 2048] [--long 32768] [--dense-long 16384]
        [--prompt 8192] [--busy] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from results import machine, write_results

from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import start
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop

STEPS, WARM = 24, 4
LAYERS, VOCAB = 10, 16000
SHARED: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "head_dim": 128,
    "num_experts_per_tok": 2,
}
KINDS = ("heavily_compressed_attention", "compressed_sparse_attention")
SPARSE: Mapping[str, Any] = {
    **SHARED,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "n_routed_experts": 16,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 256,
    "layer_types": ["heavily_compressed_attention"] * 2 + [KINDS[layer % 2] for layer in range(LAYERS - 2)],
    "mlp_layer_types": ["hash_moe"] + ["moe"] * (LAYERS - 1),
}


def write_sparse(folder: Path, context: int) -> int:
    """Write the sparse model, with compression ratios, window and streams of the published models;
    returns its number of weights."""
    config = transformers.DeepseekV4Config(**SPARSE, max_position_embeddings=context)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(VOCAB, 16).argsort(1)[:, : table.shape[1]])
    return _save(model, folder)


def write_dense(folder: Path, context: int, kv_heads: int) -> int:
    """Write the dense model; returns its number of weights. It uses the same number of experts per
    token; it has no shared expert, so its experts are wider instead."""
    given = {**SHARED, "moe_intermediate_size": 768, "num_experts": 12, "num_key_value_heads": kv_heads}
    config = transformers.Qwen3MoeConfig(**given, max_position_embeddings=context)
    return _save(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


def _save(model: Any, folder: Path) -> int:
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Served:
    """A worker and its scheduler, for one request at a time."""

    def __init__(self, folder: Path, context: int, is_busy: bool) -> None:
        """`is_busy`: measure CPU time of one thread, as `--busy` says."""
        given = {
            "model": str(folder),
            "device": "cpu",
            "max_requests": 1,
            "max_model_len": context,
            "dtype": "bfloat16",
        }
        given |= {"threads": 1} if is_busy else {}
        self._clock = time.process_time if is_busy else time.perf_counter
        self.worker: Any = start(resolve_config({**given, "kv_cache_memory": 2 << 30}, {})).worker
        self.loop = Loop(Scheduler(self.worker.limits, prefix_cache=False), self.worker, overlap=False)

    def run(self, length: int) -> tuple[float, float]:
        """Return seconds to the first token of a random prompt, and the median of a decode step."""
        prompt = np.random.default_rng(length).integers(3, VOCAB, length).astype(np.int32)
        params = SamplingParams(temperature=0.0, max_tokens=1 + WARM + STEPS, ignore_eos=True)
        request = Request(f"{length}", prompt, params)
        self.loop.scheduler.add(request)
        begun = self._clock()
        while not request.output_ids:
            self.loop.step()
        first, times = self._clock() - begun, []
        while self.loop.has_work:
            begun = self._clock()
            self.loop.step()
            times.append(self._clock() - begun)
        return first, median(times[WARM:])


def measure(folder: Path, lengths: Sequence[int], context: int, is_busy: bool) -> dict[str, Any]:
    """Return milliseconds of a decode step and seconds of the prompt, by prompt length."""
    served, found = Served(folder, context, is_busy), {}
    served.run(256)
    for length in lengths:
        first, step = served.run(length)
        found[str(length)] = {"prompt_s": round(first, 2), "step_ms": round(1e3 * step, 2)}
        print(f"{folder.name:8} {length:6} tokens: prompt {first:8.2f} s, step {1e3 * step:8.2f} ms", flush=True)
    served.worker.close()
    return found


def main() -> None:
    """Measure, print, and with `--json` write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("short", 2048), ("long", 32768), ("dense-long", 16384), ("prompt", 8192), ("kv-heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--busy", action="store_true", help="processor seconds of one thread, where others use the machine"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    context = options.long + 1024
    with tempfile.TemporaryDirectory() as name:
        sparse, dense = Path(name) / "sparse", Path(name) / "dense"
        weights = write_sparse(sparse, context), write_dense(dense, context, options.kv_heads)
        ours = measure(sparse, (options.short, options.prompt, options.long), context, options.busy)
        theirs = measure(dense, (options.short, options.prompt, options.dense_long), context, options.busy)
    short, prompt = str(options.short), str(options.prompt)
    grows = ours[str(options.long)]["step_ms"] / ours[short]["step_ms"]
    dense_grows = theirs[str(options.dense_long)]["step_ms"] / theirs[short]["step_ms"]
    faster = theirs[prompt]["prompt_s"] / ours[prompt]["prompt_s"]
    print(f"step at {options.long} over {short}: {grows:.2f} (dense at {options.dense_long}: {dense_grows:.2f})")
    print(f"prompt of {prompt}: dense takes {faster:.2f} times as long")
    if options.json:
        numbers = {
            "step_grows": round(grows, 3),
            "dense_step_grows": round(dense_grows, 3),
            "prompt_times": round(faster, 3),
        }
        write_results(
            options.json, {"machine": machine(), "weights": weights, "sparse": ours, "dense": theirs, **numbers}
        )


if __name__ == "__main__":
    main()
