"""The checkpoint of the comparison: random weights in the geometry of Qwen3-0.6B, in the Hugging
Face layout.

python -m benchmarks.peers.checkpoint FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .geometry import CONFIG, VOCABULARY, tensors
from .vocabulary import write_tokenizer

SEED = 20_260
SCALE = 0.02


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint unless it exists; returns its folder. 1.2 GB, about twenty seconds."""
    weights = folder / "model.safetensors"
    if not weights.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", CONFIG)
        _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
        write_tokenizer(folder, VOCABULARY)
        _write_weights(weights)
    return folder


def _write_weights(file: Path) -> None:
    """Write Gaussian matrices and norm weights of one; the complete file is renamed at the end."""
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(SEED)
    made = {}
    for name, shape in tensors():
        matrix = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=source) * SCALE
        made[name] = matrix.bfloat16()
    part = file.with_suffix(".part")
    save_file(made, part, metadata={"format": "pt"})
    os.replace(part, file)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(make_checkpoint(Path(sys.argv[1])))
