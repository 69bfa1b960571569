"""The weights of a GGUF file as sources, with a checkpoint's names, order of rows, and one tensor
for each expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.checkpoint.gguf_architectures import ARCHITECTURES, architecture_name
from sglcore.checkpoint.gguf_config import LONG_FACTORS, ROPE_FACTORS, checkpoint_name
from sglcore.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from sglcore.checkpoint.model_config import ModelConfig
from sglcore.core.errors import CheckpointError
from sglcore.models.weights.gguf_blocks import BlockWeight
from sglcore.models.weights.quantized_weight import Stored, fill, pieces
from sglcore.models.weights.safetensors_file import read_into
from sglcore.models.weights.weight_sources import CountBytes, Source, check_missing, check_unknown

PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""The types that are not quantised."""

ONE_ROW = ".shared_expert_gate.weight"
"""A matrix with one row, which files store as a vector."""


@dataclass(frozen=True, slots=True)
class GgufSource:
    """The `Source` of a tensor in the open `file`, or of one expert's part of it, from byte `start`
    with `shape`.

    `paired_heads`: the number of heads in the rows if rotated pairs are neighbours; else 0.
    """

    file: FileIO
    path: Path
    tensor: GgufTensor
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    paired_heads: int = 0

    @property
    def form(self) -> str | None:
        """The quantised type; None for a plain one."""
        return None if self.tensor.type in PLAIN else self.tensor.type

    def copy(self, target: Tensor, report: CountBytes) -> None:
        """Fill `target`, a tensor of this shape on any device, cast to its dtype; call `report`
        with the bytes read.

        A plain tensor is read some rows at a time; a quantised one, or one with `paired_heads`, is
        read whole and reported once.
        """
        if self.form is not None:
            fill(self.stored(report), target)
            return
        rows = target.shape[0] if target.dim() > 1 or self.paired_heads else 1
        columns = target.numel() // rows
        flat = target.view(rows, columns)
        whole = [slice(0, rows)] if self.paired_heads else pieces((rows, columns))
        for piece in whole:
            flat[piece].copy_(self._rows(piece, rows).view(PLAIN[self.tensor.type]).view(-1, columns))
            report(self.num_bytes // rows * (piece.stop - piece.start))

    def stored(self, report: CountBytes) -> Stored:
        """Read the blocks to the host. Only if `form` is not None."""
        data = self._rows(slice(0, self.shape[0]), self.shape[0])
        report(self.num_bytes)
        return BlockWeight(data, self.tensor.type, self.shape[1])

    def _rows(self, rows: slice, count: int) -> Tensor:
        """Read some of the tensor's `count` rows to the host, uint8 [rows, bytes of a row], in a
        checkpoint's order. Raises `CheckpointError` if the file ends before.
        """
        size = self.num_bytes // count
        data = torch.empty(rows.stop - rows.start, size, dtype=torch.uint8)
        self.file.seek(self.start + rows.start * size)
        if not read_into(self.file, data.view(-1)):
            raise CheckpointError(f"{self.path} ends inside {self.tensor.name!r}", remedy="download it again")
        return data if not self.paired_heads else _halves(data, self.paired_heads)


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of heads: neighbouring rows that form a rotated pair become half a head
    apart.
    """
    return rows.unflatten(0, (heads, rows.shape[0] // heads // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def gguf_sources(
    file: FileIO, path: Path, config: ModelConfig, targets: Mapping[str, tuple[int, ...]]
) -> dict[str, Source]:
    """Return the source of each target (name to shape) in an open file, in the file's order. Raises
    `CheckpointError` for missing, unknown and wrongly shaped tensors."""
    found: dict[str, Source] = {}
    unknown: list[str] = []
    header = read_header(path)
    for tensor in header.tensors.values():
        name = checkpoint_name(header, tensor.name)
        parts = dict(_parts(file, path, header, config, tensor, name)) if name else {}
        if not parts.keys() <= targets.keys() or (not parts and tensor.name not in (ROPE_FACTORS, *LONG_FACTORS)):
            unknown.append(tensor.name)
            continue
        for part, source in parts.items():
            found[part] = _checked(source, targets[part])
    check_missing(targets, found, [path.name])
    check_unknown(unknown)
    return found


def _parts(
    file: FileIO, path: Path, header: GgufHeader, config: ModelConfig, tensor: GgufTensor, name: str
) -> Iterator[tuple[str, GgufSource]]:
    """Yield `name` and the source of the tensor; for a `name` with "{}", the name and the source of
    each expert's part.
    """
    size = tensor.end - tensor.start
    if "{}" not in name:
        heads = _paired_heads(header, config, name)
        shape = (1, *tensor.shape) if name.endswith(ONE_ROW) else tensor.shape
        yield name, GgufSource(file, path, tensor, tensor.start, size, shape, heads)
        return
    experts = tensor.shape[0]
    for expert in range(experts):
        start = tensor.start + expert * (size // experts)
        yield name.format(expert), GgufSource(file, path, tensor, start, size // experts, tensor.shape[1:])


def _paired_heads(header: GgufHeader, config: ModelConfig, name: str) -> int:
    if not ARCHITECTURES[architecture_name(header)].is_paired:
        return 0
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def _checked(source: GgufSource, shape: tuple[int, ...]) -> GgufSource:
    if source.shape != shape:
        raise CheckpointError(
            f"{source.tensor.name!r} in {source.path.name} has the shape {list(source.shape)}",
            wanted=f"{list(shape)} as its metadata implies",
            remedy="download it again",
        )
    return source
