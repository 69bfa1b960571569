"""HiSparse configuration and counts: the KV cache of sparse attention is in host memory, and the
device keeps the most recently used entries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch
from sglcore.device.errors import ConfigError
from sglcore.device.swap_counts import SwapCounts

A = TypeVar("A")

MOST_THREADS = 1024
WANTED = 'on, a JSON object such as {"device_buffer_size": 4096}, or a file that holds one'
REMEDY = "set --hisparse on for the defaults"


@dataclass(frozen=True, slots=True)
class HiSparseConfig:
    """Configuration of HiSparse.

    `device_buffer_size`: KV entries of each request and layer that stay on the device (None: twice
    the number that a token of the model reads). `host_to_device_ratio`: the host holds at most this
    many times the pages that the device would hold without HiSparse. `unused`: keys that were given
    and have no effect here.
    """

    device_buffer_size: int | None = None
    host_to_device_ratio: float = 2.0
    unused: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def buffer_rows(self, top_k: int) -> int:
        """Return the number of KV entries per request and layer that stay on the device, if a token
        of the model reads `top_k`. Raises ConfigError if the configured number is smaller than
        `top_k`.
        """
        if self.device_buffer_size is None:
            return 2 * top_k
        _check_size(self.device_buffer_size, top_k, "a token of this model reads")
        return self.device_buffer_size


@dataclass(frozen=True, slots=True)
class SwapSizes:
    """Sizes of KV entries in host memory.

    `row_bytes`: bytes of an entry. `ratio`: tokens per entry. `top_k`: maximum entries that a token
    reads. `page_size`: tokens per page. `layers`: for each indexer, the number of layers that read
    its choice.
    """

    row_bytes: int
    ratio: int
    top_k: int
    page_size: int
    layers: tuple[int, ...]

    def chosen(self, batch: ScheduleBatch) -> int:
        """Return the number of entries that all indexers choose in a decode step."""
        return len(self.layers) * int(np.minimum(batch.seq_lens // self.ratio, self.top_k).sum())

    def stored(self, batch: ScheduleBatch) -> int:
        """Return the bytes, over all layers, of the entries that the tokens of a step complete."""
        rows = int((batch.seq_lens // self.ratio - batch.prefix_lens // self.ratio).sum())
        return sum(self.layers) * rows * self.row_bytes

    def staged(self, batch: ScheduleBatch) -> int:
        """Return the bytes, over all layers, of all pages of the requests in a prefill step."""
        pages = int((-(-batch.seq_lens // self.page_size)).sum())
        return sum(self.layers) * pages * (self.page_size // self.ratio) * self.row_bytes


@dataclass(frozen=True, slots=True)
class StepSwaps(Generic[A]):
    """Swap counts of one step: `chosen` entries, `staged` and `stored` bytes, as the methods of
    `SwapSizes` define them. `missed` int32 [indexers], in an array of the worker's library: entries
    of each indexer that had to come from the host; None in a prefill step.
    """

    sizes: SwapSizes
    chosen: int
    staged: int
    stored: int
    missed: A | None = None

    @classmethod
    def of(cls, sizes: SwapSizes, batch: ScheduleBatch, missed: A | None) -> StepSwaps[A]:
        """Make the counts of a host batch; `missed` None: it is a prefill step, and not a decode
        step. The arrays of the batch are not kept.
        """
        if missed is None:
            return cls(sizes, 0, sizes.staged(batch), sizes.stored(batch))
        return cls(sizes, sizes.chosen(batch), 0, sizes.stored(batch), missed)

    def counts(self, missed: NDArray[np.int32] | None) -> SwapCounts:
        """Return the counts of the step for its result, from the host copy of `missed`; None: a
        prefill step."""
        found = [0] * len(self.sizes.layers) if missed is None else missed.tolist()
        loads = sum(count * layers for count, layers in zip(found, self.sizes.layers, strict=True))
        loaded = self.staged + loads * self.sizes.row_bytes
        return SwapCounts(self.chosen, self.chosen - sum(found), loaded, self.stored, int(loaded > 0))


def parse_hisparse_config(asked: str | None) -> HiSparseConfig | None:
    """Parse a JSON object or the name of a file with one; "on" selects the defaults. None and "off"
    return None. Raises ConfigError.

    `device_buffer_size` and `host_to_device_ratio` take effect. `top_k` belongs to the model and is
    only compared with the size; `swap_in_block_size`, a thread count, belongs to the kernel launch.
    These two and all other keys are `unused`.
    """
    if asked is None or asked.strip() == "off":
        return None
    given = {} if asked.strip() == "on" else _object(asked)
    size, ratio = given.pop("device_buffer_size", None), given.pop("host_to_device_ratio", 2)
    if size is not None:
        size = _count(size, "device_buffer_size")
        _check_size(size, _count(given.get("top_k", 1), "top_k"), "top_k is")
    _count(given.get("top_k", 1), "top_k")
    _count(given.get("swap_in_block_size", 1), "swap_in_block_size", MOST_THREADS)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 1 <= ratio < math.inf:
        raise _error("host_to_device_ratio", ratio, "a number of at least 1")
    return HiSparseConfig(size, float(ratio), MappingProxyType(given))


def _object(asked: str) -> dict[str, Any]:
    text, where = asked, "hisparse"
    if not asked.lstrip().startswith(("{", "[", '"')):
        where = f"hisparse's file {asked}"
        try:
            text = Path(asked).expanduser().read_text()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", wanted=WANTED, remedy=REMEDY) from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", wanted=WANTED, remedy=REMEDY) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {json.dumps(found)[:80]}", wanted=WANTED, remedy=REMEDY)
    return found


def _count(value: object, name: str, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        raise _error(
            name, value, "a whole number of at least 1" if most is None else f"a whole number from 1 to {most}"
        )
    return value


def _check_size(size: int, top_k: int, whose: str) -> None:
    if size < top_k:
        raise _error("device_buffer_size", size, f"at least {top_k}: {whose} {top_k}")


def _error(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} of hisparse is {json.dumps(value)[:80]}", wanted=wanted, remedy=REMEDY)
