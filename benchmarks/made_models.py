"""Models with random weights for benchmarks: any transformers model type, at a size for a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

DEMO = Path(__file__).resolve().parents[1] / "sglcore" / "assets" / "demo"
"""The embedded model; the models get its tokenizer."""
BASE: Mapping[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A Llama of 100 million weights."""


def make_model(folder: Path, kind: str, sizes: Mapping[str, Any], max_shard_size: str = "50GB") -> int:
    """Save a model of transformers' type `kind` in bfloat16, with `BASE` overridden by `sizes`;
    returns its number of weights."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return sum(parameter.numel() for parameter in model.parameters())
