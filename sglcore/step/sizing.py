"""How many pages fit: from what the device says is free, what the model needs per token, and what was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.ledger import DecisionLedger, Row

GIB = 1 << 30


def size_text(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of device memory: `available` is what may still be taken; `evidence` says where the figures come from."""

    total: int
    available: int
    evidence: str
    default_share: float = 0.85


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """The sizes every pool and table is made with."""

    page_size: int
    num_pages: int
    max_model_len: int
    max_requests: int


def size_pools(
    config: EngineConfig,
    *,
    context_len: int,
    bytes_per_cell: int,
    page_size: int,
    budget: MemoryBudget,
    ledger: DecisionLedger,
) -> MemorySizes:
    """Choose the number of pages and the context. `context_len` is the model's own; a request of the chosen
    `max_model_len` always fits. Raises ConfigError where what was asked for can not be held."""
    asked = config.max_model_len
    max_model_len = asked or context_len
    page_bytes = page_size * max(bytes_per_cell, 1)
    useful = config.max_requests * -(-max_model_len // page_size)
    given = config.kv_cache_memory
    allowed = given if given is not None else int(budget.available * budget.default_share)
    if given is not None and given > budget.available:
        raise ConfigError(
            f"kv_cache_memory is {size_text(given)}, {size_text(budget.available)} are available",
            remedy="ask for less, or leave it out",
        )
    num_pages = min(useful, allowed // page_bytes)
    needed = -(-max_model_len // page_size)
    if num_pages < needed:
        max_model_len = _shorter_context(config, num_pages * page_size, max_model_len, needed * page_bytes, ledger)
        num_pages = -(-max_model_len // page_size)
        useful = config.max_requests * num_pages
    what = f"{num_pages} pages of {page_size} tokens, {size_text(num_pages * page_bytes)}"
    reason = f"{budget.evidence}; {config.max_requests} requests of {max_model_len} tokens need {useful} pages"
    asked_text = f"{size_text(given)}" if given is not None else "auto"
    ledger.record(Row("kv cache", asked_text, what, reason, "set kv_cache_memory"))
    return MemorySizes(page_size, num_pages, max_model_len, _fewer_requests(config, num_pages, ledger))


def _fewer_requests(config: EngineConfig, num_pages: int, ledger: DecisionLedger) -> int:
    """The requests that can run at a time: each holds at least one page."""
    asked = config.max_requests
    if asked <= num_pages:
        return asked
    reason = f"each holds at least one of {num_pages} pages"
    was_asked = "max_requests" in config.sources
    ledger.record(
        Row("requests", str(asked), str(num_pages), reason, "raise kv_cache_memory, or lower max_requests", was_asked)
    )
    return num_pages


def _shorter_context(config: EngineConfig, tokens: int, wanted: int, needed_bytes: int, ledger: DecisionLedger) -> int:
    """The context that fits when the whole one does not; an explicit context is never shortened."""
    if config.max_model_len is not None or tokens < 1:
        raise ConfigError(
            f"the KV memory holds {tokens} tokens, one request of {wanted} tokens needs {size_text(needed_bytes)}",
            remedy="lower max_model_len or raise kv_cache_memory",
        )
    ledger.record(
        Row(
            "context",
            str(wanted),
            str(tokens),
            f"the KV memory holds {tokens} tokens",
            f"free memory, or set kv_cache_memory to at least {needed_bytes} bytes",
            downgrade=True,
        )
    )
    return tokens
