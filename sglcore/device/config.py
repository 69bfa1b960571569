"""The configuration: every raw argument is read once, here, into the engine's frozen record or the server's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sglcore.device.server_config import ServerConfig, read_keys
from sglcore.device.settings import PREFIX, memory_bytes, require_at_least, resolve

__all__ = ["PREFIX", "EngineConfig", "memory_bytes", "resolve_config", "resolve_server_config"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What was asked for; None means "choose, and say why in the ledger".

    `model` is a checkpoint folder (None: the embedded model). `kv_cache_memory` is in bytes, or text such as "512M".
    `kv_cache_dtype`: "auto" keeps keys and values in the model's type, another name in one that the device offers.
    `max_batch_tokens` bounds one step: longer prompts are cut into chunks of it. `graph` is a graph kind, "off", or "auto".
    `graph_buckets` are the batch sizes of decode graphs, `graph_token_buckets` the token counts of prefill graphs (none:
    dense enough that no prompt is padded to more than twice its tokens).
    `overlap`: plan a step while the one before is still running. `poison` overwrites the input buffers before every step,
    to prove that nothing reads what an older one left. `eager_input_no_copy` runs batches that are on the device already
    as they are. `quantize` rounds the weights of linear layers as they are loaded: "int8", "int4", or "auto", which takes
    them as the checkpoint has them. `kernels`: "reference" computes with the reference's functions, to compare numbers. `shadow`: every Nth
    replay of a graph also runs eagerly and is compared (0: never). `grammar_backend` compiles the grammars of requests:
    "auto", "off" or a library's name. `system_root` is where probes look for the machine's files; None is `/`.
    """

    model: str | None = None
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_requests: int = 256
    max_batch_tokens: int = 2048
    page_size: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    graph: str = "auto"
    graph_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    graph_token_buckets: tuple[int, ...] = ()
    overlap: bool | None = None
    prefix_cache: bool = True
    strict: bool = False
    threads: int | None = None
    poison: bool = False
    eager_input_no_copy: bool = False
    quantize: str = "auto"
    kernels: str = "auto"
    grammar_backend: str = "auto"
    shadow: int = 0
    system_root: str | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        require_at_least(
            self, 1, "max_model_len", "max_requests", "max_batch_tokens", "page_size", "kv_cache_memory", "threads"
        )


def resolve_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Merge explicit arguments with `SGLCORE_*` variables (arguments win; an empty variable is none).

    Unknown names and values of another kind are errors that say what is known or wanted. Variables of the server are
    known, and not read.
    """
    return resolve(EngineConfig, given, environ, ServerConfig)


def resolve_server_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """The same for the server's settings; variables of the engine are known, and not read.

    The keys of `api_key_file` are read now, and stand behind those of `api_key`.
    """
    config: ServerConfig = resolve(ServerConfig, given, environ, EngineConfig)
    if config.api_key_file is None:
        return config
    return replace(config, api_key=(*config.api_key, *read_keys(config.api_key_file)))
