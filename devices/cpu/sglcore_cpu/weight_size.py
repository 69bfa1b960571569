"""How much memory a checkpoint's weights take once they are loaded, estimated from the headers of
its files alone.

Near, not exact: padding of panels is left out, and so are layers whose parts are widened to be
joined.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.dtype import HALF
from sglcore.checkpoint.gguf import GgufTensor, read_header
from sglcore.checkpoint.gguf_config import EMBEDDING, HEAD
from sglcore.checkpoint.quantization import NONE, Quantization, Scheme, read_quantization
from sglcore.checkpoint.safetensors_header import PLAIN_BYTES, Entry, read_entries
from sglcore.device.config import EngineConfig
from sglcore_cpu.choice import NAMES, NATIVE

SHARE_OF_BF16 = MappingProxyType({"int8": 0.55, "int4": 0.35})
"""What quantising on load leaves of 16 bits: codes with their scales, and what stays as it is."""

GGUF_PLAIN = ("F32", "F16", "BF16")
GGUF_BITS = MappingProxyType({"Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 5.0, "Q6_K": 8.5, "Q8_0": 8.5})
"""Bits of a packed weight with its scales and zeros, by type; the other types take `WIDEST`."""
WIDEST = 9.0

CODES = ("qweight", "weight_packed", "weight")
"""Last parts of the names of a quantised layer's values; the other tensors of it are small."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How weights are kept: bytes of a `plain` element, and of one of a matrix that is `rounded` on
    load; `codes`: whether the integers of a quantised layer stay as they are."""

    plain: int
    rounded: float
    codes: bool

    @classmethod
    def of(cls, asked: EngineConfig, stored: str) -> Kept:
        """Of a checkpoint whose own dtype is `stored`. Only the native kernels read integers."""
        plain = 2 if (stored if asked.dtype == "auto" else asked.dtype) in HALF else 4
        rounded = 2 * SHARE_OF_BF16[asked.quantize] if asked.quantize in SHARE_OF_BF16 else plain
        reads = asked.kernels in ("auto", NATIVE, *NAMES) and asked.graph != "compiled"
        return cls(plain, rounded, reads and asked.quantize != NONE)

    def values(self, count: float, may_round: bool) -> float:
        """Bytes of values that are not kept as integers."""
        return count * (self.rounded if may_round else self.plain)


def folder_bytes(files: Sequence[Path], raw: Mapping[str, Any], asked: EngineConfig) -> int:
    """Of safetensors files whose `config.json` is `raw`; raises `CheckpointError` for a damaged
    one."""
    quantization = read_quantization(raw)
    kept = Kept.of(asked, str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."))
    entries = [entry for file in files for entry in read_entries(file)]
    out_of_order = _OutOfOrder(raw, frozenset(entry.name for entry in entries))
    return int(sum(_entry_bytes(entry, kept, quantization, out_of_order) for entry in entries))


def gguf_bytes(file: Path, asked: EngineConfig) -> int:
    """Of a GGUF file; raises `CheckpointError` for a damaged one."""
    tensors = read_header(file).tensors
    is_wide = all(tensor.type == "F32" for tensor in tensors.values() if len(tensor.shape) > 1)
    kept = Kept.of(asked, "float32" if is_wide else "bfloat16")
    return int(sum(_tensor_bytes(tensor, kept, HEAD not in tensors) for tensor in tensors.values()))


@dataclass(frozen=True, slots=True)
class _OutOfOrder:
    """Which layers have columns whose groups are not in order: packed integers can not be those."""

    raw: Mapping[str, Any]
    names: Collection[str]

    def has(self, module: str, scheme: Scheme) -> bool:
        """GPTQ's files always have the groups of columns, and its settings say whether they mean
        anything."""
        if scheme.kind != "gptq":
            return f"{module}.weight_g_idx" in self.names
        return bool(_settings(self.raw).get("desc_act")) and scheme.block[1] is not None


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("quantization_config", raw.get("compression_config", {}))


def _entry_bytes(entry: Entry, kept: Kept, quantization: Quantization | None, out_of_order: _OutOfOrder) -> float:
    module, _, part = entry.name.rpartition(".")
    size, is_expert = entry.num_bytes, ".experts." in entry.name
    if entry.dtype in PLAIN_BYTES:
        is_weight = quantization is None or part in ("weight", "bias")
        return kept.values(math.prod(entry.shape), len(entry.shape) == 2 and not is_expert) if is_weight else size
    scheme = quantization.scheme(module) if quantization is not None and part in CODES else None
    if scheme is None:
        return size
    count = size * 8 / scheme.bits
    if scheme.kind == "float8" or is_expert or not kept.codes or out_of_order.has(module, scheme):
        return kept.values(count, not is_expert)
    return count * max(scheme.bits, 4) / 8


def _tensor_bytes(tensor: GgufTensor, kept: Kept, is_tied: bool) -> float:
    """Experts are tensors of three dimensions; they and an embedding that is nothing else are kept
    as values."""
    count, is_matrix = math.prod(tensor.shape), len(tensor.shape) == 2
    if tensor.type in GGUF_PLAIN:
        return kept.values(count, is_matrix)
    if not is_matrix or (tensor.name == EMBEDDING and not is_tied):
        return count * kept.plain
    return count * GGUF_BITS.get(tensor.type, WIDEST) / 8 if kept.codes else kept.values(count, True)
