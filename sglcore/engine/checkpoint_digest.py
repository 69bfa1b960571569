"""Fingerprints of checkpoints, from samples of their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLED_BLOCKS, BLOCK_BYTES = 16, 16 << 10
"""Number of blocks that are read of each file, and bytes of each block."""


def sample_of(file: Path) -> str:
    """Return a SHA-256 hash, 64 hexadecimal digits, of a file's size and of SAMPLED_BLOCKS blocks
    spread over it. Different weights of the same shapes differ everywhere, and reading a large file
    whole takes long."""
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for place in range(SAMPLED_BLOCKS):
            stream.seek(max(size - BLOCK_BYTES, 0) * place // (SAMPLED_BLOCKS - 1))
            found.update(stream.read(BLOCK_BYTES))
    return found.hexdigest()


def identity_of(folder: Path) -> str:
    """Return the first 12 digits of `digest_of`: an identity of the checkpoint's content."""
    return digest_of(folder)[:12]


def digest_of(folder: Path) -> str:
    """Return 64 hexadecimal digits that identify the configuration and weights of a checkpoint
    folder or GGUF file, wherever it is. Samples of `config.json` and of the weight files directly
    in the folder are read; other files do not count."""
    files = sorted(each for each in folder.iterdir() if each.is_file()) if folder.is_dir() else [folder]
    weights = [each for each in files if each.suffix in (".safetensors", ".bin", ".gguf")]
    config = [each for each in files if each.name == "config.json"]
    text = " ".join(sample_of(each) for each in (*config, *weights))
    return hashlib.sha256(text.encode()).hexdigest()
