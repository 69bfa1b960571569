"""Checkpoints told apart by a part of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLED_BLOCKS, BLOCK_BYTES = 16, 16 << 10
"""What is read of a file to tell it from another."""


def sample_of(file: Path) -> str:
    """A hash of a file's size and of blocks spread over it: other weights of the same shapes differ
    everywhere, and all of a large file takes long to read."""
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for place in range(SAMPLED_BLOCKS):
            stream.seek(max(size - BLOCK_BYTES, 0) * place // (SAMPLED_BLOCKS - 1))
            found.update(stream.read(BLOCK_BYTES))
    return found.hexdigest()


def identity_of(folder: Path) -> str:
    """12 hexadecimal digits of a checkpoint's configuration and weights, wherever they lie and
    whatever else is there."""
    return digest_of(folder)[:12]


def digest_of(folder: Path) -> str:
    """All 64 of them."""
    files = sorted(each for each in folder.iterdir() if each.is_file()) if folder.is_dir() else [folder]
    weights = [each for each in files if each.suffix in (".safetensors", ".bin", ".gguf")]
    config = [each for each in files if each.name == "config.json"]
    text = " ".join(sample_of(each) for each in (*config, *weights))
    return hashlib.sha256(text.encode()).hexdigest()
