"""Decode and prefill speed of a model with random weights on a device, compared with its memory
bandwidth and with transformers.

The lower bound of a decode step is the time to read its weights once at the speed of a plain copy,
measured on the same device in the same run. It leaves out the KV cache, which matters at larger
batches. The peer is transformers' `generate` with sdpa and a dynamic cache, on the same weights in
the same process.

    python benchmarks/device_decode.py [--device NAME] [--geometry 0.6B|8B] [--batches 1,32]
        [--graph off] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from made_models import DEMO
from results import machine, write_results
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sglcore import LLM, SamplingParams

GEOMETRIES: Mapping[str, Mapping[str, int | bool]] = {
    "0.1B": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Qwen3's sizes and a smaller one; the head size is 128, the vocabulary size 151,936."""
PROMPT, TOKENS, LONG = 128, 128, 2048


def make(folder: Path, geometry: str, device: str, context: int = 8192) -> int:
    """Write a checkpoint of random bf16 weights, drawn on `device`, with a context of `context`
    tokens; returns the bytes of weights that a decode step reads."""
    config = AutoConfig.for_model(
        "qwen3", vocab_size=151936, head_dim=128, max_position_embeddings=context, **GEOMETRIES[geometry]
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()}
    is_tied = config.tie_word_embeddings
    shapes = {name: shape for name, shape in shapes.items() if not (is_tied and name == "lm_head.weight")}
    generator = torch.Generator(device).manual_seed(0)
    index, read = {}, 0
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * 0.02
        weight = (drawn + 1 if "norm" in name else drawn).to(torch.bfloat16)
        file = f"model-{number:05}.safetensors"
        save_file({name: weight.cpu()}, folder / file)
        index[name] = file
        read += weight.nbytes if is_tied or "embed" not in name else 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return read


def copy_speed(device: str) -> float:
    """Return bytes per second, read plus written, of a plain copy of 2 GiB (256 MiB on the CPU)."""
    size = (1 << 28) if device == "cpu" else (1 << 31)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size / best


def wait(device: str) -> None:
    """Wait until the device has finished all its work."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def prompts(batch: int, length: int) -> list[list[int]]:
    """Return random token ids, int [batch][length], so that prompts have no common prefix."""
    draw = np.random.default_rng(batch * 10_007 + length)
    return [list(map(int, row)) for row in draw.integers(10, 150_000, (batch, length))]


def decode(llm: LLM, batch: int) -> float:
    """Return decode tokens per second of `batch` requests, from the step after which each has a
    token to the one in which the first request ends."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = [llm.engine.add(ids, params) for ids in prompts(batch, PROMPT)]
    while not all(output.outputs[0].token_ids for output in outputs):
        llm.engine.step()
    had, begin = sum(len(output.outputs[0].token_ids) for output in outputs), time.perf_counter()
    while not any(output.finished for output in outputs):
        llm.engine.step()
    now, seconds = sum(len(output.outputs[0].token_ids) for output in outputs), time.perf_counter() - begin
    while not all(output.finished for output in outputs):
        llm.engine.step()
    return (now - had) / seconds


def prefill(llm: LLM, seed: int) -> float:
    """Return prompt tokens per second of one prompt of `LONG` tokens."""
    begin = time.perf_counter()
    output = llm.engine.add(prompts(seed, LONG)[-1], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while not output.finished:
        llm.engine.step()
    return LONG / (time.perf_counter() - begin)


def peer_speeds(folder: Path, device: str, batches: Sequence[int]) -> dict[str, float]:
    """Return transformers' decode tokens per second at each batch size, and its prompt tokens per
    second."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}

    def seconds(ids: torch.Tensor, tokens: int) -> float:
        wait(device)
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
        wait(device)
        return time.perf_counter() - begin

    for batch in batches:
        ids = torch.tensor(prompts(batch, PROMPT), device=device)
        seconds(ids, 2)
        first = seconds(ids, 1)
        found[str(batch)] = batch * 47 / (seconds(ids, 48) - first)
    ids = torch.tensor(prompts(3, LONG)[-1:], device=device)
    seconds(ids, 1)
    found["prefill"] = LONG / seconds(ids, 1)
    return found


def our_speeds(llm: LLM, batches: Sequence[int]) -> dict[str, float]:
    """Return the best of three decodes at each batch size (the first warms up), and of three long
    prompts."""
    found = {str(batch): max(decode(llm, batch) for _ in range(3)) for batch in batches}
    return found | {"prefill": max(prefill(llm, seed) for seed in (5, 6, 7))}


def main() -> None:
    """Measure, print a row for each batch size, write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    parser.add_argument("--geometry", default="0.6B", choices=GEOMETRIES)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--graph", default="auto")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    transformers.logging.disable_progress_bar()
    batches = [int(word) for word in chosen.batches.split(",")]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator.type if accelerator and chosen.device != "cpu" else "cpu"
        read, speed = make(folder, chosen.geometry, device), copy_speed(device)
        begin = time.perf_counter()
        llm = LLM(str(folder), device=chosen.device, graph=chosen.graph, max_requests=max(batches), max_model_len=4096)
        ready = time.perf_counter() - begin
        ours = our_speeds(llm, batches)
        ledger = {row.topic: f"{row.effective}: {row.reason}" for row in llm.ledger.rows}
        llm.started.worker.close()
        peer = peer_speeds(folder, device, batches) if chosen.peer else {}
    floor = speed / read
    for name, value in ours.items():
        share = f"{value / floor:7.3f} of the floor" if name == "1" else ""
        print(
            f"{name:>8}  {value:10.0f} tokens/s  {value / peer.get(name, float('nan')):6.2f} of transformers  {share}"
        )
    content = {"machine": machine(), "device": device, "geometry": chosen.geometry, "graph": chosen.graph}
    content |= {
        "ready_seconds": ready,
        "copy_bytes_a_second": speed,
        "weight_bytes": read,
        "floor_steps_a_second": floor,
    }
    content |= {"ours": ours, "transformers": peer, "ledger": ledger}
    if device != "cpu":
        content["hardware"] = torch.get_device_module(device).get_device_name()
    if chosen.json:
        write_results(chosen.json, content)


if __name__ == "__main__":
    main()
