"""Estimate the memory of a checkpoint's loaded weights from the headers of its files.

The estimate leaves out the padding of panels, and layers that are dequantised because their parts
can not be joined as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.dtype import HALF
from sglcore.checkpoint.gguf_config import EMBEDDING, HEAD
from sglcore.checkpoint.gguf_header import GgufTensor, read_header
from sglcore.checkpoint.quantization_config import NONE, Quantization, Scheme, read_quantization
from sglcore.checkpoint.safetensors_header import PLAIN_BYTES, Entry, read_entries
from sglcore.config.engine_config import EngineConfig
from sglcore_cpu.choice import NAMES, NATIVE

SHARE_OF_BF16 = MappingProxyType({"int8": 0.55, "int4": 0.35})
"""Size after quantisation on load, relative to 16 bits: codes, scales, and tensors that are not
quantised."""

GGUF_PLAIN = ("F32", "F16", "BF16")
GGUF_BITS = MappingProxyType({"Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 5.0, "Q6_K": 8.5, "Q8_0": 8.5})
"""Bits per value of a packed weight, scales and zeros included, by GGUF type; other types take
`WIDEST`."""
WIDEST = 9.0

CODES = ("qweight", "weight_packed", "weight")
"""Last name parts of the tensors that hold a quantised layer's codes; its other tensors are
small."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How loaded weights are stored. `plain`: bytes per element. `rounded`: bytes per element of a
    matrix that may be quantised on load. `codes`: whether integer codes of a quantised layer stay
    integers."""

    plain: int
    rounded: float
    codes: bool

    @classmethod
    def of(cls, asked: EngineConfig, stored: str) -> Kept:
        """Return how a checkpoint with the dtype `stored` (such as "bfloat16") is kept under the
        configuration `asked`. Codes stay integers only with the native kernels, which read them,
        and without `--quantize none`."""
        plain = 2 if (stored if asked.dtype == "auto" else asked.dtype) in HALF else 4
        rounded = 2 * SHARE_OF_BF16[asked.quantize] if asked.quantize in SHARE_OF_BF16 else plain
        reads = asked.kernels in ("auto", NATIVE, *NAMES) and asked.graph != "compiled"
        return cls(plain, rounded, reads and asked.quantize != NONE)

    def values(self, count: float, may_round: bool) -> float:
        """Return the bytes of `count` values that are not kept as integer codes. `may_round`: they
        belong to a matrix that is quantised on load if the configuration asks for it."""
        return count * (self.rounded if may_round else self.plain)


def folder_bytes(files: Sequence[Path], raw: Mapping[str, Any], asked: EngineConfig) -> int:
    """Estimate the memory in bytes that the weights of safetensors files take once loaded with the
    configuration `asked`, without tensor parallelism. `raw`: their `config.json`. Reads headers
    only; raises `CheckpointError` for a damaged file."""
    quantization = read_quantization(raw)
    kept = Kept.of(asked, str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."))
    entries = [entry for file in files for entry in read_entries(file)]
    out_of_order = _OutOfOrder(raw, frozenset(entry.name for entry in entries))
    return int(sum(_entry_bytes(entry, kept, quantization, out_of_order) for entry in entries))


def gguf_bytes(file: Path, asked: EngineConfig) -> int:
    """Estimate the memory in bytes that the weights of a GGUF file take once loaded with the
    configuration `asked`, without tensor parallelism. Reads the header only; raises
    `CheckpointError` for a damaged file."""
    tensors = read_header(file).tensors
    is_wide = all(tensor.type == "F32" for tensor in tensors.values() if len(tensor.shape) > 1)
    kept = Kept.of(asked, "float32" if is_wide else "bfloat16")
    return int(sum(_tensor_bytes(tensor, kept, HEAD not in tensors) for tensor in tensors.values()))


@dataclass(frozen=True, slots=True)
class _OutOfOrder:
    """Finds the layers with reordered columns (act-order), which can not stay packed integers.
    `raw`: the checkpoint's `config.json`; `names`: the names of all its tensors."""

    raw: Mapping[str, Any]
    names: Collection[str]

    def has(self, module: str, scheme: Scheme) -> bool:
        """Return whether the columns of the layer `module` are reordered. GPTQ files always contain
        `g_idx`, so there the setting `desc_act` decides, and only for a weight with groups; in
        other formats the tensor `weight_g_idx` exists only then."""
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
    """Return the bytes of a loaded tensor. Experts (three dimensions), and an embedding that is not
    also the head (`is_tied` False), are not kept as integer codes."""
    count, is_matrix = math.prod(tensor.shape), len(tensor.shape) == 2
    if tensor.type in GGUF_PLAIN:
        return kept.values(count, is_matrix)
    if not is_matrix or (tensor.name == EMBEDDING and not is_tied):
        return count * kept.plain
    return count * GGUF_BITS.get(tensor.type, WIDEST) / 8 if kept.codes else kept.values(count, True)
