"""Names that people bring from other engines, and ours for the same. The only file of the core that may name a maker's
product: nothing asks it which device runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("--model-path",),
        "max_model_len": ("--context-length",),
        "max_requests": ("--max-num-seqs", "--max-running-requests"),
        "max_batch_tokens": ("--max-num-batched-tokens", "--chunked-prefill-size"),
        "page_size": ("--block-size",),
        "kv_cache_memory": ("--kv-cache-memory-bytes",),
        "graph_buckets": ("--cuda-graph-bs",),
        "speculative": ("--speculative-algorithm",),
        "draft_model": ("--speculative-draft-model-path", "--speculative-model"),
        "draft_tokens": ("--speculative-num-steps", "--num-speculative-tokens"),
        "tool_parser": ("--tool-call-parser",),
        "grammar_backend": ("--guided-decoding-backend",),
        "replicas": ("--data-parallel-size", "--dp-size"),
        "cors_origins": ("--allowed-origins",),
        "max_queued_requests": ("--max-queue-length",),
    }
)
"""Setting -> other names of its flag."""

EAGER_FLAGS = ("--enforce-eager", "--disable-cuda-graph")
"""Flags that say "no graphs"."""

GRAPH_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "none": "off",
        "eager": "off",
        "disabled": "off",
        "full_decode_only": "full",
        "full_and_piecewise": "piecewise",
        "cudagraph": "full",
        "cuda-graph": "full",
        "hipgraph": "full",
        "aclgraph": "full",
        "torch.compile": "compiled",
        "inductor": "compiled",
    }
)
"""Words for a graph kind -> ours."""


DRAFTER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "nextn": "mtp",
        "deepseek_mtp": "mtp",
        "draft_model": "standalone",
        "none": "off",
    }
)
"""Words for what proposes tokens -> ours."""

NODES_FLAG = "--speculative-num-draft-tokens"
"""A number of proposals and one more, for the token that they follow."""
SPECULATIVE_FLAG = "--speculative-config"
"""Settings of speculative decoding as one JSON object."""
SPECULATIVE_KEYS: Mapping[str, str] = MappingProxyType(
    {"method": "speculative", "model": "draft_model", "num_speculative_tokens": "draft_tokens"}
)
"""Its keys -> our settings."""


def drafter_name(word: str) -> str:
    """Our word for what proposes tokens; a word that is nobody's alias is returned as it is."""
    return DRAFTER_NAMES.get(word.lower(), word.lower())


def graph_name(word: str) -> str:
    """Our word for a graph kind; a word that is nobody's alias is returned as it is, for the device to judge."""
    return GRAPH_NAMES.get(word.lower(), word)
