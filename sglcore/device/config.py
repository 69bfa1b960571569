"""The engine's configuration: every raw argument is read once, here, into a frozen record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from sglcore.device.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What was asked for; None means "choose, and say why in the ledger".

    `model` is a checkpoint folder (None: the embedded model). `kv_cache_memory` is in bytes; `max_batch_tokens` bounds
    one step (prompts are cut into chunks of it); `graph` is a graph kind or "off". `poison` fills padding rows with
    garbage, to prove that nothing reads them. `eager_input_no_copy` runs batches that are on the device as they are.
    """

    model: str | None = None
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_requests: int = 256
    max_batch_tokens: int = 2048
    page_size: int | None = None
    kv_cache_memory: int | None = None
    attention_backend: str | None = None
    graph: str = "off"
    graph_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    overlap: bool = True
    prefix_cache: bool = True
    strict: bool = False
    threads: int | None = None
    poison: bool = False
    eager_input_no_copy: bool = False
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_requests", "max_batch_tokens", "page_size", "kv_cache_memory", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1. Give a positive number or leave it out.")


_CASTS = MappingProxyType({"int": int, "int | None": int, "str": str, "str | None": str})


def resolve_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Merge explicit arguments with `SGLCORE_*` variables (arguments win); unknown names and bad values are errors."""
    known = {item.name: str(item.type) for item in fields(EngineConfig) if item.name != "sources"}
    values = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known settings: {', '.join(sorted(known))}.")
    sources = dict.fromkeys(values, "argument")
    for name, kind in known.items():
        variable = f"SGLCORE_{name.upper()}"
        if name not in values and variable in environ:
            values[name] = _parse(variable, environ[variable], kind)
            sources[name] = variable
    return replace(EngineConfig(**values), sources=MappingProxyType(sources))  # pyright: ignore[reportArgumentType]


def _parse(variable: str, text: str, kind: str) -> object:
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{variable} is {text!r}; it must be 0 or 1.")
        return text.lower() in ("1", "true")
    try:
        if kind.startswith("tuple"):
            return tuple(int(part) for part in text.split(","))
        return _CASTS[kind](text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}; it must be of type {kind}.") from None
