"""Names from other engines, and our names for the same things. The only file of the core that may
name a vendor's product: no code uses it to find out which device runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sglcore.core.errors import ConfigError

FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp": ("--tensor-parallel-size", "--tp-size", "-tp"),
        "nodes": ("--nnodes",),
        "leader": ("--dist-init-addr",),
        "ep": ("--expert-parallel-size", "--ep-size", "-ep"),
        "model": ("--model-path", "-m", "--hf-repo", "-hf"),
        "hf_token": ("-hft",),
        "max_model_len": ("--context-length", "--ctx-size", "-c"),
        "max_requests": ("--max-num-seqs", "--max-running-requests", "--parallel", "-np"),
        "max_batch_tokens": ("--max-num-batched-tokens", "--chunked-prefill-size", "--batch-size", "-b"),
        "page_size": ("--block-size",),
        "prefix_cache": ("--enable-prefix-caching",),
        "kv_cache_memory": ("--kv-cache-memory-bytes",),
        "memory_fraction": ("--gpu-memory-utilization", "--mem-fraction-static"),
        "hisparse": ("--hisparse-config",),
        "graph_buckets": ("--cuda-graph-bs",),
        "threads": ("-t",),
        "speculative": ("--speculative-algorithm",),
        "draft_model": ("--speculative-draft-model-path", "--speculative-model", "--model-draft", "-md"),
        "draft_width": ("--speculative-eagle-topk",),
        "draft_tokens": ("--speculative-num-steps", "--num-speculative-tokens"),
        "served_model_name": ("--alias", "-a"),
        "chat_template": ("--chat-template-file",),
        "tool_parser": ("--tool-call-parser",),
        "skip_tokenizer": ("--skip-tokenizer-init",),
        "grammar_backend": ("--guided-decoding-backend",),
        "step_timeout": ("--watchdog-timeout",),
        "role": ("--disaggregation-mode",),
        "replicas": ("--data-parallel-size", "--dp-size", "-dp"),
        "cors_origins": ("--allowed-origins",),
        "ssl_certfile": ("--ssl-cert-file",),
        "ssl_keyfile": ("--ssl-key-file",),
        "sse_keep_alive": ("--sse-ping-interval",),
        "max_queued_requests": ("--max-queue-length",),
    }
)
"""Names of settings -> other names of their flags."""

CONSTANTS: Mapping[tuple[str, object], tuple[str, ...]] = MappingProxyType(
    {
        ("graph", "off"): ("--enforce-eager", "--disable-cuda-graph"),
        ("task", "embed"): ("--is-embedding", "--embedding", "--embeddings"),
        ("prefix_cache", False): ("--disable-radix-cache",),
        ("hisparse", "on"): ("--enable-hisparse",),
        ("overlap", False): ("--disable-overlap-schedule",),
        ("overlap", True): ("--async-scheduling",),
    }
)
"""A setting and its value -> flags without an argument that mean it."""

ALWAYS = (
    "--enable-chunked-prefill",
    "--enable-auto-tool-choice",
    "--jinja",
    "--enable-metrics",
    "--enable-return-hidden-states",
    "--disable-log-requests",
)
"""Flags of other engines that are accepted without effect, because what they switch on is always
on."""

_MEMORY = "--kv-cache-memory SIZE sets the size of the KV cache, and nothing is offloaded"
_DEVICES = "--tp N divides each layer among N devices; --replicas N runs N whole models"
_QUANTIZED = "the checkpoint says how it is quantised; --quantize int8 or int4 rounds one that is not"
_LORA = "merge the adapter into the checkpoint"
_IN_FOLDER = "the model's own is read: put it into a folder with the weights"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("--max-total-tokens", "--cpu-offload-gb", "--swap-space"), _MEMORY),
        **dict.fromkeys(("--split-mode", "-sm"), _DEVICES),
        **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "-pp", "--tensor-split", "-ts"), _DEVICES),
        **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl"), _DEVICES),
        **dict.fromkeys(
            ("--master-addr", "--master-port", "--headless"), "--leader HOST:PORT names host 0 on every host"
        ),
        "--quantization": _QUANTIZED,
        **dict.fromkeys(("--enable-lora", "--lora-modules", "--lora-paths", "--lora"), _LORA),
        **dict.fromkeys(("--tokenizer", "--tokenizer-path"), _IN_FOLDER),
        **dict.fromkeys(("--download-dir", "--load-format"), "HF_HUB_CACHE names the folder of downloaded files"),
        **dict.fromkeys(("--hf-file", "-hff"), "name the model as owner/name:QUANT"),
        **dict.fromkeys(("--ubatch-size", "-ub"), "--max-batch-tokens N is one for both"),
        **dict.fromkeys(
            ("--flash-attn", "-fa"), "--attention-backend NAME; by default, the fastest one that can run the model"
        ),
        **dict.fromkeys(("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"), "--kv-cache-dtype NAME is one for both"),
        **dict.fromkeys(
            ("--n-predict", "-n"), "each request sets max_tokens, and `generate` and `chat` have --max-tokens"
        ),
        **dict.fromkeys(
            ("--kv-transfer-config", "--disaggregation-bootstrap-port", "--disaggregation-transfer-backend"),
            "--role prompt --pages-address HOST:PORT, and --role decode --peers HOST:PORT",
        ),
        "--mmproj": "sglcore reads only text",
    }
)
"""Flags of other engines without an equal setting of ours -> what to do instead, for the error."""

DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
)
"""Other names of element types, in lower case -> our names."""

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
"""Other names of graph kinds, in lower case -> our names."""


DRAFTER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "nextn": "mtp",
        "deepseek_mtp": "mtp",
        "frozen_kv_mtp": "frozen-mtp",
        "draft_model": "standalone",
        "none": "off",
    }
)
"""Other names of kinds of drafts, in lower case -> our names."""

ROLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "prompt",
        "kv_producer": "prompt",
        "kv_consumer": "decode",
        "kv_both": "both",
        "null": "both",
        "none": "both",
    }
)
"""Other names of roles in disaggregation, in lower case -> our names."""

NODES_FLAG = "--speculative-num-draft-tokens"
"""A flag of other engines for the number of draft tokens plus one: the token before them counts."""
SPECULATIVE_FLAG = "--speculative-config"
"""A flag of other engines for settings of speculative decoding, as one JSON object."""
SPECULATIVE_KEYS: Mapping[str, str] = MappingProxyType(
    {"method": "speculative", "model": "draft_model", "num_speculative_tokens": "draft_tokens"}
)
"""Keys of the JSON object of SPECULATIVE_FLAG -> our settings."""


def drafter_name(word: str) -> str:
    """Return our name of a kind of drafts for `word`, in any case; a word that is no alias is
    returned in lower case, unchecked."""
    return DRAFTER_NAMES.get(word.lower(), word.lower())


def role_name(word: str) -> str:
    """Return our name of a role in disaggregation for `word`, in any case; a word that is no alias
    is returned in lower case, unchecked."""
    return ROLE_NAMES.get(word.lower(), word.lower())


def graph_name(word: str) -> str:
    """Return our name of a graph kind for `word`, in any case; a word that is no alias is returned
    unchanged, for the device to check."""
    return GRAPH_NAMES.get(word.lower(), word)


def dtype_name(word: str) -> str:
    """Return our name of an element type for `word`, in any case; a word that is no alias is
    returned unchanged, unchecked."""
    return DTYPE_NAMES.get(word.lower(), word)


def refuse(words: Sequence[str]) -> None:
    """Raise ConfigError, with what to do instead, for the first word of a command line that is a
    flag in REFUSED, with or without "=VALUE". Words after "--" are not checked."""
    for word in words[: words.index("--")] if "--" in words else words:
        if (remedy := REFUSED.get(word.partition("=")[0])) is not None:
            raise ConfigError(f"{word.partition('=')[0]} is no flag of sglcore", remedy=remedy)
