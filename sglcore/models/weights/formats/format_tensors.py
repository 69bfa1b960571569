"""Common parts of all formats: a layer's tensors with checked types and shapes, and unpacking of
small integers from words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore.checkpoint.quantization_config import Scheme
from sglcore.core.errors import CheckpointError
from sglcore.models.weights.quantized_weight import Stored

WORDS = (torch.int32,)
BYTES = (torch.int8,)
WHOLE = (torch.int32, torch.int64)
"""Types of indices and sizes, which no kernel reads."""
ZEROS = (torch.int8, torch.int32)
"""Types of zeros that are not packed in words."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The stored tensors of a linear layer: functions that read them, by suffix. `rows` (outputs)
    and `columns` (inputs) are those of its unpacked weight; `module` is its name, for errors."""

    module: str
    rows: int
    columns: int
    scheme: Scheme
    stored: Mapping[str, Callable[[], Tensor]]

    def has(self, suffix: str) -> bool:
        """Return whether the checkpoint has the layer's tensor with this suffix."""
        return suffix in self.stored

    def read(self, suffix: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """Read a tensor to the host. Raises `CheckpointError` unless it has one of the types and
        one of the shapes, and KeyError if the checkpoint lacks it."""
        tensor = self.stored[suffix]()
        if tensor.dtype not in dtypes:
            raise self._misfit(f"{suffix}' has the type {_text(tensor.dtype)}", [_text(dtype) for dtype in dtypes])
        if tuple(tensor.shape) not in shapes:
            raise self._misfit(f"{suffix}' has the shape {list(tensor.shape)}", [str(list(shape)) for shape in shapes])
        return tensor

    def _misfit(self, found: str, wanted: Sequence[str]) -> CheckpointError:
        return CheckpointError(
            f"'{self.module}.{found}",
            wanted=f"{' or '.join(wanted)} for {self.scheme.text}",
            remedy="check that config.json belongs to these weights",
        )

    @property
    def group(self) -> int:
        """The number of columns that share a scale. Raises `CheckpointError` if it does not divide
        the weight's columns."""
        size = self.scheme.block[1] or self.columns
        if self.columns % size:
            raise CheckpointError(
                f"'{self.module}' has {self.columns} input features",
                wanted=f"a multiple of its group of {size}",
                remedy="check that config.json belongs to these weights",
            )
        return size

    def scales(self, suffix: str, dtypes: Sequence[torch.dtype] = FLOATS) -> Tensor:
        """Read scales as float32 [rows, groups], from one for the tensor, one for each row, or one
        for each group of each row."""
        groups = self.columns // self.group
        if self.scheme.block[0] is None:
            return self.read(suffix, dtypes, (), (1,), (1, 1)).float().reshape(1, 1).expand(self.rows, 1).contiguous()
        shapes = [(self.rows, groups)] if groups > 1 else [(self.rows, 1), (self.rows,)]
        return self.read(suffix, dtypes, *shapes).float().reshape(self.rows, groups)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Format:
    """A format: the suffixes that each of its layers has (`needs`), those that some have
    (`may_have`), and the function that reads a weight to the host."""

    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    read: Callable[[LayerTensors], Stored]


def small_integers(words: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Unpack integers of 2, 4 or 8 bits from int32 words [a, b] to uint8, lowest bits first, along
    dimension `dim`, 0 or -1, which becomes 32 / bits times longer."""
    if dim == 0:
        return small_integers(words.T.contiguous(), bits).T
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    found = torch.empty(*packed.shape, 8 // bits, dtype=torch.uint8)
    for place in range(8 // bits):
        torch.bitwise_and(packed >> (place * bits), mask, out=found[..., place])
    return found.flatten(1)
