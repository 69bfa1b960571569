"""The configuration: every raw argument is read once, here, into the engine's frozen record or the server's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from sglcore.device.server_config import ServerConfig, read_keys
from sglcore.device.settings import PREFIX, check_range, memory_bytes, resolve, setting

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
"""Tokens proposed for a step at most. Each request takes so many rows more of every step, its graphs and its logits; where nine
in ten are right, all of 32 are in one step of 29, and 32 bring no more than 4 % over 24."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What was asked for; None means "choose, and say why in the ledger".

    `kv_cache_memory` is in bytes. `graph_token_buckets` may be none: then they are dense enough that no prompt is padded to
    more than twice its tokens. `poison` proves that nothing reads what an older step left in a buffer.
    """

    model: str | None = setting(
        None,
        "A checkpoint folder, a GGUF file, or a name of Hugging Face's hub: owner/name, or owner/name:quant for GGUF; left out, the"
        " embedded model.",
    )
    revision: str | None = setting(None, "A branch, tag or commit of a model of the hub; left out, main.")
    hf_token: str | None = setting(
        None, "A token for the hub; left out, that of HF_TOKEN or `hf auth login`.", is_secret=True
    )
    device: str | None = setting(None, "The device to run on, NAME or NAME:INDEX; left out, the one that is found.")
    tp: int = setting(
        1, "Devices that hold one model together, each a part of every layer; each has a process of its own.", least=1
    )
    nodes: int = setting(
        1,
        "Hosts that hold one model together, each with tp / nodes of its devices; this command runs on each.",
        least=1,
    )
    node_rank: int | None = setting(None, "Which of the hosts this one is; 0 has the server.", least=0)
    leader: str | None = setting(
        None,
        "Where host 0 listens for the others, HOST:PORT, by an address that they reach; ray, or ray:ADDRESS of a cluster: Ray starts"
        " the others.",
    )
    join_timeout: float = setting(300.0, "Seconds that hosts wait for each other before they give up.", least=1)
    dp: int = setting(
        1,
        "Shards of requests among those devices: each keeps its own requests' cache, and attends to them alone.",
        least=1,
    )
    ep: int = setting(
        1,
        "Devices among which experts are dealt out, each whole on one; 1: each device holds a part of every expert.",
        least=1,
    )
    expert_dispatch: str = setting(
        "auto",
        "What carries rows to their experts: ragged, fixed, one of the device's own, or auto: the device's, else ragged.",
    )
    model_impl: str = setting(
        "auto",
        "native (a file of sglcore), transformers (transformers' own class), or auto: native where there is a file.",
    )
    trust_remote_code: bool = setting(
        False, "Run the code that a checkpoint brings in its folder, where nothing else serves it."
    )
    skip_tokenizer: bool = setting(
        False, "Read no tokenizer: prompts and answers are token ids, and what needs text is refused."
    )
    task: str = setting("auto", "generate (text), embed (a vector for each prompt), or auto: as the checkpoint says.")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16.")
    max_model_len: int | None = setting(None, "Tokens of context; left out, the checkpoint's own.", least=1)
    max_requests: int = setting(256, "Requests that may run at once.", least=1)
    max_batch_tokens: int = setting(2048, "Tokens of one step; longer prompts are cut into chunks of it.", least=1)
    page_size: int | None = setting(None, "Tokens of a page of the KV cache.", least=1)
    kv_cache_memory: int | None = setting(None, "Memory for the KV cache, such as 512M or 4G.", least=1, is_memory=True)
    memory_fraction: float | None = setting(
        None,
        "The part of the device's memory that everything on it, weights and KV cache, may take, such as 0.9; kv_cache_memory counts"
        " first.",
        least=0,
        most=1,
    )
    snapshot_memory: int | None = setting(
        None,
        "Memory for copies of recurrent state, which prefix hits of such models restore, such as 1G.",
        is_memory=True,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of the KV cache: auto (the model's), fp8 where layers keep rows, or one that the device offers, such as int8.",
    )
    hisparse: str | None = setting(
        None,
        "Keep rows of which a model's sparse attention reads few in host memory, and on the device those that were read last: on,"
        ' a JSON object such as {"device_buffer_size": 4096}, or a file that holds one.',
    )
    attention_backend: str | None = setting(None, "An attention backend of the device.")
    graph: str = setting(
        "auto", "A graph kind of the device: full, breakable, piecewise, native, compiled, off or auto."
    )
    graph_buckets: tuple[int, ...] = setting(
        (),
        "Batch sizes of decode graphs; may be given several times. Left out, powers of two up to max_requests, and that: at most"
        " 256 of them where graphs are captured from a stream, 64 elsewhere.",
    )
    graph_token_buckets: tuple[int, ...] = setting((), "Token counts of prefill graphs; may be given several times.")
    overlap: bool | None = setting(None, "Plan a step while the one before is still running.")
    prompt_slices: str = setting(
        "off",
        "Prompts beside running requests by slices of layers, between their steps: auto (slices that a running request hardly feels),"
        " a number of tokens times layers in each, or off: prompts in chunks, in the same steps.",
    )
    prompt_lane: str = setting(
        "auto",
        "How prompts by slices stand beside decode steps: partition (on a part of the device's compute units), priority (on a stream of"
        " their own, behind that of decode steps), interleave (between them), or auto.",
    )
    two_batch_overlap: str = setting(
        "off",
        "Run a batch as two halves, of which one computes where the other waits for other ranks: on, off, or auto: where the start"
        " measures that it is faster.",
    )
    prefix_cache: bool = setting(True, "Share the pages of prompts with a common beginning.")
    strict: bool = setting(False, "Refuse to start with anything less than was asked for.")
    threads: int | None = setting(None, "Threads of the processor device.", least=1)
    poison: bool = setting(
        False, "Overwrite the input buffers before every step, to prove that nothing reads old data."
    )
    eager_input_no_copy: bool = setting(False, "Run batches that are on the device already as they are.")
    quantize: str = setting(
        "auto",
        "Round the weights of linear layers to int8 or int4; auto takes them as the checkpoint has them; none makes plain"
        " weights of codes, whose products round no activations and take more memory.",
    )
    speculative: str | None = setting(
        None,
        "What proposes tokens for the model to verify several at once, which changes no text: ngram (what followed the last tokens"
        " before), suffix (what followed the whole text in the prefix cache, and ngram elsewhere), a model by its kind (eagle, eagle3,"
        " mtp, standalone, dflash, frozen-mtp), off, or auto: what the checkpoint brings, if the start"
        " measures that it is faster.",
    )
    draft_model: str | None = setting(
        None,
        "The model that proposes tokens: a folder, also one in the model's, or a name of the hub; left out, what the model's own brings.",
    )
    draft_tokens: int | None = setting(
        None,
        f"Tokens that are proposed for each step, {MOST_DRAFTS} at most; left out, as many as are measured to be fastest, which may"
        " be none.",
        least=1,
        most=MOST_DRAFTS,
    )
    draft_width: int = setting(
        1,
        "Tokens that are proposed for each place: more than one are the beams of a tree, of which a step verifies the likeliest"
        " --draft-tokens (left out, 7). Of models that propose a token at a time: eagle, eagle3, mtp, standalone, frozen-mtp.",
        least=1,
        most=MOST_BEAMS,
    )
    draft_depth: int | None = setting(
        None,
        "Tokens of a tree one after another at most; left out, 5 or as many as there can be.",
        least=1,
        most=MOST_DRAFTS,
    )
    speculative_verify: str = setting(
        "coupled",
        "How proposals are accepted: coupled (those that are drawn anyway, which changes no text), or with the law of the text"
        " unchanged only: rejection, or block.",
    )
    kernels: str = setting(
        "auto",
        'A kernel table of the device by name; "reference" computes with the reference\'s functions, to compare numbers.',
    )
    generation_config: str = setting(
        "auto", "auto: the checkpoint's own temperature, top_k and the like for requests that name none; or none."
    )
    grammar_backend: str = setting("auto", "What compiles grammars: auto, llguidance or xgrammar.")
    shadow: int = setting(0, "Run every Nth replay of a graph eagerly as well and compare; 0 is never.")
    system_root: str | None = setting(None, "Where probes look for the machine's files.")
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        check_range(self)


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


def plain_config(config: EngineConfig) -> dict[str, Any]:
    """The fields of a configuration as JSON has them, for a process of its own."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    return {**values, "sources": dict(config.sources)}


def config_of_plain(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration that a parent resolved; no variable is read again."""
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    sources = MappingProxyType(dict(values["sources"]))
    return EngineConfig(**{**values, **lists, "sources": sources})
