"""DeepSeek-V4's compressor on GPUs with waves of 64: the core's kernels
(`runtime.kernels.triton.sparse.compressor`), launched with tiles of one wave. Nothing else differs.

A block of 128 tokens, with 512 channels in float32, is read in tiles of tokens times channels. Of
the core's tile, 128 x 16, each row is half a cache line, and its sums go through two waves and
local memory. Compiled with Triton 3.9 for bfloat16 inputs:

| tile, threads | channels in a row | registers gfx942, gfx950 | barriers | local memory, bytes |
|---|---|---|---|---|
| 128 x 16, 128 | 64 bytes | 68, 66 | 15 | 512 |
| 8 x 128, 64 | 512 bytes | 104, 108 | none | 256 |

A tile of 8 x 256 in 128 threads has 14 barriers and 120 registers; one of 4 x 256 in 64 threads has
95, but halves the number of programs of a block, of which a decode step has few. Blocks of 4 tokens
sum up 8, so that they take the same tile once. No kernel spills. No speed was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglcore.runtime.kernels.row_codec import E4M3FN
from sglcore_hip.capability import Capability

if TYPE_CHECKING:
    from sglcore.runtime.kernels.triton import Tuning


@dataclass(frozen=True, slots=True)
class CompressorHip:
    """The tile of the compressor's programs, which are one wave each, and the float format of its
    rows in 8 bits: `tokens` of a block are added up at a time, `channels` of each.
    """

    tokens: int
    channels: int
    wave_size: int
    float8: str

    @classmethod
    def of(cls, capability: Capability) -> CompressorHip:
        """Return the compressor of a GPU: each lane has two channels."""
        return cls(8, 2 * capability.wave_size, capability.wave_size, capability.float8 or E4M3FN)

    def tuned(self, launches: Tuning) -> Tuning:
        """Return the launches with those of the compressor."""
        from sglcore.runtime.kernels.triton import LaunchConfig

        return replace(
            launches,
            compress_tokens=self.tokens,
            compress_elements=self.tokens * self.channels,
            compress=LaunchConfig(self.wave_size, 1),
        )

    def __str__(self) -> str:
        tile = f"{self.tokens} tokens x {self.channels} channels in a wave of {self.wave_size}"
        return f"{type(self).__name__}: {tile}, rows in 8 bits are {self.float8}"
