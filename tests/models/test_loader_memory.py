"""Peak memory of loading: the weights, and little more."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import warm

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}

LOAD_AND_MEASURE = """
import sys, torch
from sglcore.models.weights import model_loader, safetensors_file
from sglcore.checkpoint.model_config import read_config
from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.runtime.kernels.table import KernelTable

def kilobytes(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

if sys.argv[3] == "keep":
    kept, read_into = [], safetensors_file.SafetensorsFile._read_into
    safetensors_file.SafetensorsFile._read_into = lambda file, piece, entry: (
        kept.append(piece), read_into(file, piece, entry)
    )
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = kilobytes("VmHWM")
model = model_loader.load_model(
    sys.argv[1], read_config(sys.argv[1]), kernels=KernelTable(), device="cpu", dtype=getattr(torch, sys.argv[2])
)
print((kilobytes("VmHWM") - before) * 1024 / sum(weight.nbytes for weight in model.weights.parameters))
"""


def write_checkpoint(folder: Path, layers: int) -> Path:
    """Write bfloat16 weights: 67 MB of embeddings and 33 MB per layer. Half of a layer is one
    tensor once fused."""
    (folder / "config.json").write_text(json.dumps({**SIZES, "num_hidden_layers": layers}))
    tensors = {"model.embed_tokens.weight": (32768, 1024), "model.norm.weight": (1024,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{name}_proj.weight": (1024, 1024) for name in "qkvo"}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": (4096, 1024) for name in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = (1024, 4096)
        tensors |= {f"{prefix}{name}_layernorm.weight": (1024,) for name in ("input", "post_attention")}
    save_file({n: torch.ones(s, dtype=torch.bfloat16) for n, s in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of about 200 MB."""
    return write_checkpoint(tmp_path_factory.mktemp("large"), 4)


def peak_over_weights(folder: Path, dtype: str, pieces: str = "drop") -> float:
    """Peak memory of loading as a multiple of the weights, measured in a process of its own.
    `pieces="keep"` holds on to all loaded pieces."""
    return float(measured(LOAD_AND_MEASURE, folder, dtype, pieces))


def measured(script: str, folder: Path, *words: str) -> str:
    """The output of a script run on a checkpoint in its own process."""
    ran = warm.run(("-c", script, str(folder), *words), folder, os.environ)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


needs_counter = pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's peak-memory counter")


@needs_counter
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_takes_little_more_than_the_weights(folder, dtype: str) -> None:
    assert 0.95 < peak_over_weights(folder, dtype) < 1.15


@needs_counter
def test_pieces_that_are_kept_would_be_noticed(folder) -> None:
    assert peak_over_weights(folder, "float32", pieces="keep") > 1.3
