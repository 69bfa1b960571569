"""Facts about a model from its checkpoint's files, for lists of models. No decision uses them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.checkpoint_files import checkpoint_files, read_json
from sglcore.checkpoint.gguf_config import gguf_config
from sglcore.checkpoint.gguf_header import is_gguf, read_header
from sglcore.checkpoint.safetensors_header import PLAIN_BYTES, read_entries
from sglcore.engine.checkpoint_digest import digest_of

_SIZES = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "vocab_size": "vocab_size",
    }
)
"""Sizes of a configuration -> their GGUF names."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts about a model, which `read_card` reads from its files without loading them: file
    format, family, precision, bytes, parameters, time of the last change, digest, and sizes of its
    layers."""

    format: str
    """safetensors or gguf."""
    family: str
    """`model_type` of the configuration, or `general.architecture` of a GGUF file."""
    precision: str
    """The quantisation method, or the type with the most bytes of weights, as the files name it:
    BF16, Q4_K."""
    num_bytes: int
    """Bytes of the weight files."""
    parameters: int | None
    """Number of elements of all tensors; None if a stored element contains several weights."""
    modified: float
    """Time of the last change of a weight file, in seconds since 1970."""
    digest: str
    """64 hexadecimal digits that identify the configuration and the weights."""
    sizes: Mapping[str, int]
    """Sizes by GGUF names: `block_count`, `embedding_length` and others."""


def read_card(path: Path) -> ModelCard:
    """Read the card of a checkpoint folder or GGUF file, from headers and samples of the files.

    Raises ConfigError and CheckpointError.
    """
    return _of_file(path) if is_gguf(path) else _of_folder(path)


def _of_file(path: Path) -> ModelCard:
    header = read_header(path)
    tensors = header.tensors.values()
    return ModelCard(
        "gguf",
        header.need("general.architecture", str),
        _most((tensor.type, tensor.end - tensor.start) for tensor in tensors),
        path.stat().st_size,
        sum(math.prod(tensor.shape) for tensor in tensors),
        path.stat().st_mtime,
        digest_of(path),
        _sizes(gguf_config(header)),
    )


def _of_folder(folder: Path) -> ModelCard:
    raw, files = read_json(folder / "config.json"), checkpoint_files(folder)
    entries = [entry for file in files for entry in read_entries(file)]
    is_plain = all(entry.dtype in PLAIN_BYTES for entry in entries)
    method = (raw.get("quantization_config") or {}).get("quant_method")
    stored = [file.stat() for file in files]
    return ModelCard(
        "safetensors",
        str(raw.get("model_type") or ""),
        method if isinstance(method, str) else _most((entry.dtype, entry.num_bytes) for entry in entries),
        sum(each.st_size for each in stored),
        sum(math.prod(entry.shape) for entry in entries) if is_plain else None,
        max(each.st_mtime for each in stored),
        digest_of(folder),
        _sizes({**raw, **(raw.get("text_config") or {})}),
    )


def _most(found: Any) -> str:
    """Return the type with the most bytes in total, from pairs (type, bytes); empty if there are
    none."""
    counts = Counter[str]()
    for kind, size in found:
        counts[kind] += size
    return max(counts, key=lambda kind: counts[kind], default="")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    return {ours: config[name] for name, ours in _SIZES.items() if isinstance(config.get(name), int)}
