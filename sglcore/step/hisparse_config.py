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

from sglcore.core.errors import ConfigError
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.swap_counts import SwapCounts

A = TypeVar("A")

MOST_THREADS = 1024
WANTED = 'on, auto, a JSON object such as {"device_buffer_size": 4096}, or a file that holds one'
REMEDY = "set --hisparse on for the defaults"


@dataclass(frozen=True, slots=True)
class HiSparseConfig:
    """Configuration of HiSparse.

    `device_buffer_size`: KV entries of each request and layer that stay on the device (None: twice
    the number that a token of the model reads). `host_to_device_ratio`: the host holds at most this
    many times the pages that the device would hold without HiSparse. `prompt_buffer_size`: tokens
    of the one prompt in chunks whose entries stay on the device until its last chunk (None: a
    request of the maximum length). `unused`: keys that were given and have no effect here.

    `is_auto`: HiSparse is used only if it is predicted to pay (`step/hisparse_choice.py`), for
    requests of `request_tokens` tokens (None: of the maximum length) and this `hit_rate` with twice
    the entries that a token reads (None: an assumed one).
    """

    device_buffer_size: int | None = None
    host_to_device_ratio: float = 2.0
    prompt_buffer_size: int | None = None
    unused: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    is_auto: bool = False
    request_tokens: int | None = None
    hit_rate: float | None = None

    def buffer_rows(self, top_k: int, most: int = 1) -> int:
        """Return the number of KV entries per request and layer that stay on the device, for a
        model whose tokens read `top_k`, in steps with at most `most` tokens of a request. Raises
        ConfigError if the configured number is smaller than what such a step reads.
        """
        if self.device_buffer_size is None:
            return max(2, most) * top_k
        whose = "a token of this model reads" if most == 1 else f"{most} tokens, which a step verifies, read"
        _check_size(self.device_buffer_size, top_k * most, whose)
        return self.device_buffer_size

    def held_tokens(self, longest: int) -> int:
        """Return the tokens of the longest prompt whose entries stay on the device between its
        chunks, for requests of at most `longest` tokens.
        """
        return longest if self.prompt_buffer_size is None else min(longest, self.prompt_buffer_size)


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

    def chosen(self, lens: NDArray[np.int32]) -> int:
        """Return the number of entries that all indexers choose for rows of these lengths."""
        return len(self.layers) * int(np.minimum(lens // self.ratio, self.top_k).sum())

    def stored(self, batch: ScheduleBatch) -> int:
        """Return the bytes, over all layers, of the entries that the tokens of a step complete."""
        rows = int((batch.seq_lens // self.ratio - batch.prefix_lens // self.ratio).sum())
        return sum(self.layers) * rows * self.row_bytes

    def staged(self, rows: int) -> int:
        """Return the bytes that a prefill step copies from the host, `rows` entries per layer."""
        return sum(self.layers) * rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class StepSwaps(Generic[A]):
    """Swap counts of one step: `chosen` entries, `staged` and `stored` bytes, as the methods of
    `SwapSizes` define them. `missed` int32 [indexers], in an array of the worker's library: entries
    of each indexer that had to come from the host; None in a step without decode rows. A step that
    verifies draft tokens, of which only the device knows the rows, has two more: the entries that
    each indexer chose, and those that were completed.
    """

    sizes: SwapSizes
    chosen: int
    staged: int
    stored: int
    missed: A | None = None

    @classmethod
    def of(cls, sizes: SwapSizes, batch: ScheduleBatch, staged: int, decodes: int, missed: A | None) -> StepSwaps[A]:
        """Make the counts of a host batch. Its first `decodes` rows decode, and `missed` entries
        (None: no row decodes); for the others it copied `staged` entries per layer. The arrays of
        the batch are not kept.
        """
        chosen = sizes.chosen(batch.seq_lens[:decodes])
        return cls(sizes, chosen, sizes.staged(staged), sizes.stored(batch), missed)

    def counts(self, missed: NDArray[np.int32] | None) -> SwapCounts:
        """Return the counts of the step for its result, from the host copy of `missed`."""
        layers, chosen, stored = self.sizes.layers, self.chosen, self.stored
        found = [0] * len(layers) if missed is None else missed.tolist()
        if len(found) > len(layers):
            *found, of_each, completed = found
            chosen, stored = of_each * len(layers), sum(layers) * completed * self.sizes.row_bytes
        loads = sum(count * readers for count, readers in zip(found, layers, strict=True))
        loaded = self.staged + loads * self.sizes.row_bytes
        return SwapCounts(chosen, chosen - sum(found), loaded, stored, int(loaded > 0))


def parse_hisparse_config(asked: str | None) -> HiSparseConfig | None:
    """Parse a JSON object or the name of a file with one; "on" selects the defaults, "auto" is an
    object with the key `auto`. None and "off" return None. Raises ConfigError.

    `device_buffer_size`, `host_to_device_ratio` and `prompt_buffer_size` take effect, with a true
    `auto` also `request_tokens` and `hit_rate`. `top_k`
    belongs to the model and is only compared with the size; `swap_in_block_size`, a thread count,
    belongs to the kernel launch. These two and all other keys are `unused`.
    """
    if asked is None or asked.strip() == "off":
        return None
    words: dict[str, dict[str, Any]] = {"on": {}, "auto": {"auto": True}}
    given = words.get(asked.strip()) or ({} if asked.strip() in words else _object(asked))
    size, ratio = given.pop("device_buffer_size", None), given.pop("host_to_device_ratio", 2)
    if size is not None:
        size = _count(size, "device_buffer_size")
        _check_size(size, _count(given.get("top_k", 1), "top_k"), "top_k is")
    _count(given.get("top_k", 1), "top_k")
    _count(given.get("swap_in_block_size", 1), "swap_in_block_size", MOST_THREADS)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 1 <= ratio < math.inf:
        raise _error("host_to_device_ratio", ratio, "a number of at least 1")
    held = given.pop("prompt_buffer_size", None)
    if held is not None:
        held = _count(held, "prompt_buffer_size", least=0)
    return HiSparseConfig(size, float(ratio), held, **_auto(given), unused=MappingProxyType(given))


def _auto(given: dict[str, Any]) -> dict[str, Any]:
    """Take the keys of auto out of `given` and return them as fields."""
    is_auto = given.pop("auto", False)
    if not isinstance(is_auto, bool):
        raise _error("auto", is_auto, "true or false")
    if not is_auto:
        return {}
    tokens, rate = given.pop("request_tokens", None), given.pop("hit_rate", None)
    if tokens is not None:
        tokens = _count(tokens, "request_tokens")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1):
        raise _error("hit_rate", rate, "a number from 0 to 1")
    return {"is_auto": True, "request_tokens": tokens, "hit_rate": rate}


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


def _count(value: object, name: str, most: int | None = None, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise _error(name, value, f"a whole number {wanted}")
    return value


def _check_size(size: int, top_k: int, whose: str) -> None:
    if size < top_k:
        raise _error("device_buffer_size", size, f"at least {top_k}: {whose} {top_k}")


def _error(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} of hisparse is {json.dumps(value)[:80]}", wanted=wanted, remedy=REMEDY)
