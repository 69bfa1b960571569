"""Reads experts stored in MXFP4, for kernels that do not read that format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from sglcore.checkpoint.parallel.expert_parts import GROUP
from sglcore.checkpoint.safetensors_header import Entry
from sglcore.core.errors import CheckpointError
from sglcore.layers.rank_part import Cut
from sglcore.models.weights.quantized_weight import Stored
from sglcore.models.weights.safetensors_file import SafetensorsFile
from sglcore.runtime.kernels.mxfp4 import dequantized

PARTS = ("blocks", "scales")


class Place(Protocol):
    """A tensor in an open file, such as `weight_sources.PlainSource`."""

    @property
    def file(self) -> SafetensorsFile:
        """The file."""
        ...

    @property
    def entry(self) -> Entry:
        """Its entry in the file."""
        ...


@dataclass(frozen=True, slots=True)
class Mxfp4Source:
    """The `weight_sources.Source` of the weight [experts, inputs, outputs] of all experts of a
    layer, stored in MXFP4.

    - `blocks`: uint8 [experts, outputs, inputs / 32, 16], two codes in a byte, the lower four bits
      first.
    - `scales`: uint8 [experts, outputs, inputs / 32].
    - `cut`: the part of inputs or outputs that a rank holds.
    """

    blocks: Place
    scales: Place
    cut: Cut | None = None
    form: str = "4-bit floats in groups of 32"

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return self.blocks.entry.num_bytes + self.scales.entry.num_bytes

    def copy(self, target: Tensor, report: Callable[[int], None]) -> None:
        """Read both tensors whole, dequantise into `target`, one expert at a time, and report all
        bytes at the end. Exact in bfloat16 and float32, and in float16 within its range of
        exponents."""
        blocks, scales = (place.file.read(place.entry) for place in (self.blocks, self.scales))
        cut = None if self.cut is None else replace(self.cut, dim=self.cut.dim - 1)
        for expert, part in enumerate(target):
            whole = dequantized(blocks[expert], scales[expert]).T
            if cut is None:
                part.copy_(whole)
            else:
                cut.copy(whole, part)
        report(self.num_bytes)

    def stored(self, report: Callable[[int], None]) -> Stored:
        """Raise TypeError: the weight holds all experts, and is not a linear layer's."""
        raise TypeError(f"{self.blocks.entry.name!r} holds all experts")


def mxfp4_source(
    name: str, shape: tuple[int, ...], places: Mapping[str, Place], cut: Cut | None = None
) -> Mxfp4Source | None:
    """Return the source of a weight that is stored in MXFP4; `shape` is that of the whole weight.
    None if it is not stored so. Raises `CheckpointError` for other shapes, or if one of its two
    tensors is missing."""
    parts = [f"{name}_{part}" for part in PARTS]
    absent = [part for part in parts if part not in places]
    if len(shape) != 3 or len(absent) == len(parts):
        return None
    if absent:
        raise CheckpointError(
            f"{absent[0]!r} is not in the checkpoint, which has the other part of {name!r}",
            remedy="check config.json, or download it again",
        )
    blocks, scales = (places[part] for part in parts)
    experts, inputs, outputs = shape
    groups = (experts, outputs, inputs // GROUP)
    for place, wanted in ((blocks, (*groups, GROUP // 2)), (scales, groups)):
        if place.entry.shape != wanted or place.entry.dtype != "U8" or inputs % GROUP:
            raise CheckpointError(
                f"{place.entry.name!r} in {place.file.path.name} is {place.entry.dtype} {list(place.entry.shape)}",
                wanted=f"U8 {list(wanted)} as config.json implies",
                remedy="check that config.json belongs to these weights",
            )
    return Mxfp4Source(blocks, scales, cut)
