"""The configuration: every argument is read once, here, into the frozen record of the engine or of
the server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from sglcore.config.draft_kinds import DRAFT_KINDS, IN_TREES, sources_text
from sglcore.config.kv_memory import KV_MEMORY, KV_MEMORY_HELP
from sglcore.config.server_config import ServerConfig, read_keys
from sglcore.config.settings import PREFIX, check_values, memory_bytes, resolve, setting

__all__ = [
    "PREFIX",
    "EngineConfig",
    "config_of_plain",
    "memory_bytes",
    "plain_config",
    "resolve_config",
    "resolve_server_config",
]

MOST_DRAFTS = 32
MOST_BEAMS = 16
"""Maximum number of draft tokens per step (MOST_DRAFTS) and per position of a draft tree
(MOST_BEAMS).

Each draft token adds a row per request to every step, its graphs and its logits. At an acceptance
rate of 0.9, all 32 are accepted in one step of 29, and 32 give at most 4 % more tokens than 24.
"""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of the engine; `resolve_config` makes it. None: the default that the help
    of the setting names, or a value that start-up chooses and explains in the ledger.

    Memory sizes are in bytes, per device. Each setting's own text is its `help`. Raises ConfigError
    when it is made with a value that is out of range or not one of the setting's choices.
    """

    model: str | None = setting(
        None,
        "Checkpoint folder, GGUF file, or Hugging Face model, which is downloaded: owner/name, or owner/name:quant"
        " for a GGUF file. Default: the embedded model.",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a Hugging Face model; default: main. No effect on local models and on --draft-model.",
    )
    hf_token: str | None = setting(
        None, "Hugging Face access token; default: HF_TOKEN, or the one of `hf auth login`.", is_secret=True
    )
    device: str | None = setting(
        None,
        "Device to run on, NAME or NAME:INDEX (sglcore devices lists the names; INDEX from 0). --tp and --replicas"
        " take devices from this one on. Default: the best one found.",
    )
    tp: int = setting(
        1,
        "Tensor parallel size: the number of devices that share every layer, one process per device. An error on"
        " models that cannot be divided so, and if there are fewer devices. Default: 1.",
        least=1,
    )
    nodes: int = setting(
        1,
        "Number of hosts that run one model, each with tp / nodes devices. Must divide tp;"
        " default: 1, or as many as a launcher started. Start this command on each host, or once"
        " if Ray starts the others (see --leader).",
        least=1,
    )
    node_rank: int | None = setting(
        None,
        "Rank of this host, from 0, where host 0 runs the server. Needs --nodes above 1 and --leader HOST:PORT."
        " Default: what the launcher says.",
        least=0,
    )
    leader: str | None = setting(
        None,
        "HOST:PORT on which host 0 waits for the others; needs --node-rank, unless a launcher such as torchrun"
        " starts the hosts. Or ray, or ray:ADDRESS of a cluster: Ray starts the other hosts. Needs --nodes above 1,"
        " except with a launcher and HOST:PORT. Default: what the launcher says; without one, Ray if it is installed.",
    )
    join_timeout: float = setting(
        300.0,
        "Seconds that hosts wait for each other at start-up; then it fails. No effect on one host. Default: 300.",
        least=1,
    )
    dp: int = setting(
        1,
        "Data parallel attention size: the devices of tp form this many groups, each with its own requests and KV"
        " cache. Must divide tp; default: 1. An error with --hisparse, --draft-width above 1, and some kinds of"
        " --speculative.",
        least=1,
    )
    ep: int = setting(
        1,
        "Expert parallel size: the number of devices that whole experts are spread over; must divide tp and the"
        " number of experts. Default: 1, which splits every expert. Above 1: an error on models without experts and"
        " on GGUF files.",
        least=1,
    )
    expert_dispatch: str = setting(
        "auto",
        "All-to-all of expert parallelism: ragged (only the tokens that there are), fixed (padded to a fixed"
        " number), one that the device offers, or auto (default: the device's, else ragged). No effect without --ep"
        " above 1.",
    )
    model_impl: str = setting(
        "auto",
        "Model implementation: native (sglcore), transformers, or auto (default: native if the architecture has"
        " one). transformers: an error with --tp above 1, on GGUF files and on devices without torch.",
        choices=("auto", "native", "transformers"),
    )
    trust_remote_code: bool = setting(
        False,
        "Allow Python code from the checkpoint folder to run if no other implementation serves the model. Default:"
        " off, which refuses such a model.",
    )
    skip_tokenizer: bool = setting(
        False,
        "Load no tokenizer: prompts and answers are token ids; requests that need text are refused. An error with"
        " --chat-template. Default: off.",
    )
    task: str = setting(
        "auto",
        "Task of the model: generate (text), embed (one vector per prompt), or auto"
        " (default: what the checkpoint is made for).",
        choices=("auto", "generate", "embed"),
    )
    dtype: str = setting(
        "auto",
        "Data type of weights and activations: auto (default: the checkpoint's, or another that the device prefers"
        " or needs), float32, bfloat16, float16 or float64. An error if the device does not compute in it.",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
    )
    max_model_len: int | None = setting(
        None,
        "Maximum number of tokens of a request, prompt and answer. Default: the checkpoint's context length, or less"
        " if the KV cache is too small. A given number above either is an error.",
        least=1,
    )
    max_requests: int = setting(
        256,
        "Maximum number of running requests, in each group with --dp and in each replica; fewer if memory is short,"
        " also if a number is given. Default: 256; in sglcore generate and chat, 1.",
        least=1,
    )
    max_batch_tokens: int = setting(
        2048,
        "Maximum number of tokens in one step, draft tokens not counted. Longer prompts are prefilled in chunks (a"
        " few models need whole prompts); longer texts to embed are refused. Default: 2048.",
        least=1,
    )
    page_size: int | None = setting(
        None,
        "Tokens per page of the KV cache; default: the device's, or a multiple of it that the model needs. An error"
        " if the model or the attention backend cannot use it.",
        least=1,
    )
    kv_cache_memory: int | None = setting(
        None,
        "Maximum size of the KV cache per device in bytes, such as 512M or 4G (powers of 1024); an error if less is"
        " free. Less is taken if all running requests at full length need less. Default: what --memory-fraction"
        " leaves, or most of the free memory (half of it on cpu).",
        least=1,
        is_memory=True,
    )
    memory_fraction: float | None = setting(
        None,
        "Fraction of the device's whole memory, such as 0.9, that weights, KV cache and everything else on it, other"
        " processes too, may use; it sizes the KV cache. No effect with --kv-cache-memory. Default: as"
        " --kv-cache-memory says.",
        least=0,
        most=1,
    )
    snapshot_memory: int | None = setting(
        None,
        "Memory per device, in bytes such as 1G, reserved for saved states of recurrent layers, from which"
        " prefix-cache hits and preempted requests continue; in addition to --kv-cache-memory. An error if less is"
        " free. No effect on models without recurrent layers, and with --no-prefix-cache. Default: 4 states for each"
        " running request, or less in little memory.",
        is_memory=True,
        least=0,
    )
    kv_memory: str = setting("auto", KV_MEMORY_HELP, choices=KV_MEMORY)
    kv_cache_dtype: str = setting(
        "auto",
        "Data type of the KV cache: auto (default: the model's), fp8 (an error on models without latent attention),"
        " or one that the device offers, such as int8 (an error on models with it, and if the device does not offer"
        " it).",
    )
    hisparse: str | None = setting(
        None,
        "Offload the KV cache of sparse attention to host memory; the device keeps the"
        " entries used last: on, auto (if it is predicted to pay), off (default), a JSON object such as"
        ' {"device_buffer_size": 4096}, or a file that contains one. Except with auto, an error on models without'
        " sparse attention, and on devices that cannot read host memory.",
    )
    attention_backend: str | None = setting(
        None,
        "Attention backend, one that the device offers; an error if it does not fit the model. Default: the device's"
        " first that fits.",
    )
    graph: str = setting(
        "auto",
        "Graph capture: full, breakable, piecewise, native, compiled (each an error if the device does not offer"
        " it), off, or auto (default: the device's choice). If the model, the attention backend or several ranks do"
        " not allow it, steps run without graphs.",
    )
    graph_buckets: tuple[int, ...] = setting(
        (),
        "Batch size, in requests, of a decode graph; may be repeated. Larger batches run without a graph. No effect"
        " without graphs. Default: the powers of two up to max_requests, and max_requests, but at most 256 for stream"
        " capture and 64 otherwise.",
    )
    graph_token_buckets: tuple[int, ...] = setting(
        (),
        "Number of prompt tokens in a prefill graph; may be repeated. No effect if the graph capture does not"
        " include prefill. Default: powers of two from 16 up to the tokens of a step, and values between them.",
    )
    overlap: bool | None = setting(
        None,
        "Schedule the next step while the current one runs on the device. Stays off where device or speculation do"
        " not allow it. Default: on if the device runs ahead of the host.",
    )
    prompt_slices: str = setting(
        "off",
        "Layered prefill: run prompts a few layers at a time between decode steps. auto chooses slices that decoding"
        " hardly notices, a number sets tokens x layers per slice, off (default) prefills in chunks. No effect with"
        " --dp above 1, or speculation; turns --speculative auto off.",
    )
    prompt_lane: str = setting(
        "auto",
        "How layered prefill shares the device with decoding: partition (its own part of the compute units),"
        " priority (a stream of lower priority), interleave (between decode steps), or auto (default: the first that"
        " the device can). One that it cannot becomes the next. No effect without --prompt-slices.",
        choices=("auto", "partition", "priority", "interleave"),
    )
    two_batch_overlap: str = setting(
        "off",
        "Run a batch as two micro-batches, so that one computes while the other communicates: on, off (default), or"
        " auto (on if it is measured to be faster at start-up; off with --tp 1). No effect with --hisparse.",
        choices=("off", "on", "auto"),
    )
    prefix_cache: bool = setting(
        True,
        "Reuse the KV cache of prompts that start alike; --speculative suffix needs it. Default: on, but off for"
        " models with recurrent layers if no saved state fits (see --snapshot-memory).",
    )
    strict: bool = setting(
        False,
        "Refuse to start if any choice is a downgrade of what was requested or of what the checkpoint offers, such"
        " as a shorter context. Default: off, which starts and reports it.",
    )
    threads: int | None = setting(
        None,
        "Threads per rank of a model that runs on the processor, at most its cores. No effect on other devices."
        " Default: one per physical core, 1 for a small model.",
        least=1,
    )
    poison: bool = setting(
        False, "Debugging: overwrite the input buffers before each step to detect stale reads. Default: off."
    )
    eager_input_no_copy: bool = setting(
        False,
        "Without graphs, run on inputs that are on the device without copying them to the"
        " static buffers. Default: off.",
    )
    quantize: str = setting(
        "auto",
        "Weights of linear layers at load: auto (default) keeps the checkpoint's form; int8 or int4 quantizes those"
        " that are not quantized, but no experts (an error on devices that cannot); none dequantizes. With quantized"
        " weights some devices also round activations; with none they do not.",
        choices=("auto", "none", "int8", "int4"),
    )
    speculative: str | None = setting(
        None,
        "Speculative decoding; the text stays the same if --speculative-verify is coupled. Drafts"
        f" come from {sources_text()}, off, or auto (what the checkpoint brings, if it is measured"
        " to be faster at start-up; off with --tp above 1, --prompt-slices or --hisparse)."
        " A kind that the model, the device or another flag rules out is an error."
        " Default: the kind of --draft-model, else off; in sglcore serve, auto for a checkpoint"
        " with a draft folder.",
        choices=("auto", "off", *DRAFT_KINDS),
    )
    draft_model: str | None = setting(
        None,
        "Draft model: a folder, also one inside the model's, or a Hugging Face name. Turns speculation on, without a"
        " measurement; an error with --speculative ngram, suffix or off. Default: the one in the checkpoint.",
    )
    draft_tokens: int | None = setting(
        None,
        f"Number of draft tokens per step, at most {MOST_DRAFTS} (in a draft tree"
        f" {MOST_DRAFTS - 1}); an error if the draft model allows fewer. No effect without"
        " speculation. Default with --draft-width above 1, which drafts a tree: 7. Default"
        " otherwise: 0 to 4, whichever is measured to be fastest while requests run; but always 4"
        " with --speculative-verify rejection or block, or with --tp above 1 and --dp 1.",
        least=1,
        most=MOST_DRAFTS,
    )
    draft_width: int = setting(
        1,
        f"Number of draft tokens per position, at most {MOST_BEAMS}; default: 1. More than 1 drafts"
        " a tree, whose --draft-tokens most likely nodes are verified: an error with other kinds than"
        f" {', '.join(IN_TREES[:-1])} and {IN_TREES[-1]}, with --speculative-verify rejection or"
        " block, and on models with sliding windows, latent attention or recurrent layers. If the"
        " attention backend cannot verify trees, 1 is used.",
        least=1,
        most=MOST_BEAMS,
    )
    draft_depth: int | None = setting(
        None,
        "Maximum depth of a draft tree, in tokens, at most --draft-tokens. Needs --draft-width above 1. Default: 5,"
        " or less with few --draft-tokens or a large --draft-width.",
        least=1,
        most=MOST_DRAFTS,
    )
    speculative_verify: str = setting(
        "coupled",
        "Acceptance rule of draft tokens: coupled (default: same text as without speculation), or the same"
        " probability distribution only: rejection (token by token) or block (whole draft at once). No effect without"
        " speculation.",
        choices=("coupled", "rejection", "block"),
    )
    kernels: str = setting(
        "auto",
        'Kernel table, one that the device offers (else an error); "reference" uses the slow'
        " reference kernels, to compare results. Default: auto, the device's choice.",
    )
    generation_config: str = setting(
        "auto",
        "Sampling parameters for requests that set none: auto (default: generation_config.json of the checkpoint) or"
        " none (temperature 1, no cut-offs). No effect in sglcore generate and bench offline.",
        choices=("auto", "none"),
    )
    grammar_backend: str = setting(
        "auto",
        "Library for structured output: auto (default: llguidance, or off if it cannot be used), llguidance,"
        " xgrammar or off, which refuses requests for structured output.",
        choices=("auto", "llguidance", "xgrammar", "off"),
    )
    shadow: int = setting(
        0,
        "Debugging: also run every Nth graph replay eagerly and compare the results; 0 (default) is never. No effect"
        " without graphs.",
        least=0,
    )
    system_root: str | None = setting(None, "Directory in which hardware probes look for system files; default: /.")
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Where each value that is no default came from, by the setting's name: "argument" or the
    environment variable."""

    def __post_init__(self) -> None:
        check_values(self)


def resolve_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Return the engine's configuration from explicit arguments and `SGLCORE_*` variables.
    Arguments win; an argument that is None and an empty variable count as not given.

    Raises ConfigError for unknown names, for values of the wrong kind, and for values out of range,
    and says what is known or wanted. Variables of the server are allowed and not read.
    """
    return resolve(EngineConfig, given, environ, ServerConfig)


def resolve_server_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Return the server's configuration from explicit arguments and `SGLCORE_*` variables;
    arguments win, and None and an empty variable count as not given. Variables of the engine are
    allowed and not read.

    The keys in the file `api_key_file` are read now and appended to `api_key`. Raises ConfigError
    for unknown names and for values that cannot be used, and if that file has no key or cannot be
    read.
    """
    config: ServerConfig = resolve(ServerConfig, given, environ, EngineConfig)
    if config.api_key_file is None:
        return config
    return replace(config, api_key=(*config.api_key, *read_keys(config.api_key_file)))


def plain_config(config: EngineConfig) -> dict[str, Any]:
    """Return all fields by name, `sources` and secrets included, as values that `json.dumps` can
    write, for another process; `config_of_plain` reads them. Tuples stay tuples."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {**values, "sources": dict(config.sources)}


def config_of_plain(values: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that `plain_config` encoded in the parent process; lists become
    tuples again. No environment variable is read."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    sources = MappingProxyType(dict(values["sources"]))
    return EngineConfig(**{**values, **lists, "sources": sources})
