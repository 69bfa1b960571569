"""Translates a GGUF file's metadata to a `config.json`, and its tensor names to those of the
safetensors checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.gguf_architectures import ARCHITECTURES, COMMON, SPARSE_LLAMA, architecture_name
from sglcore.checkpoint.gguf_header import REMEDY, GgufHeader
from sglcore.core.errors import CheckpointError

LARGEST = 1 << 24
"""Upper bound of counts; a larger one means a damaged file."""

EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")

_OUTER: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
CONTROL = 3
"""The type of tokens that never occur in text."""

TOKENS = "tokenizer.ggml.tokens"
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>")
"""Control tokens that end a text, in addition to the metadata's. Early files name only one of two,
and chats end with the other."""

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get


def checkpoint_name(header: GgufHeader, name: str) -> str | None:
    """Return the name in a checkpoint of the GGUF tensor `name`; None if the checkpoint has no such
    tensor. A tensor with all experts of a layer gives a name with "{}" for the expert's number. The
    architecture must be in `ARCHITECTURES`."""
    block = _BLOCK.fullmatch(name)
    parts = {**COMMON, **ARCHITECTURES[architecture_name(header)].parts}
    if block is not None and block[2] in parts:
        return f"model.layers.{block[1]}.{parts[block[2]]}.{block[3]}"
    outer, _, kind = name.rpartition(".")
    return f"{_OUTER[outer]}.{kind}" if outer in _OUTER else None


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the content of a `config.json` for the file's metadata and tensors. Raises
    `CheckpointError` for an unsupported architecture, and for missing or impossible values."""
    kind, name = architecture_name(header), header.need("general.architecture", str)
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has the architecture {name!r}",
            wanted=f"one of {', '.join(name for name in ARCHITECTURES if name != SPARSE_LLAMA)}",
            remedy="choose another model",
        )
    if EMBEDDING not in header.tensors:
        raise CheckpointError(f"{header.path} has no {EMBEDDING!r}", wanted="a whole model", remedy=REMEDY)

    def number(key: str, default: int | None = None) -> int:
        return _count(header, f"{name}.{key}", default)

    heads, hidden, layers = number("attention.head_count"), number("embedding_length"), number("block_count")
    head_dim = number("attention.key_length", hidden // heads)
    if head_dim < 1:
        found = f"{header.path} gives {hidden} elements to {heads} heads"
        raise CheckpointError(found, wanted="at least one element per head", remedy=REMEDY)
    _check_sizes(header, hidden, layers)
    own = ARCHITECTURES[kind]
    config = {
        "architectures": [own.name],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": number("feed_forward_length", 0),
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": header.need(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(header, name, head_dim),
        "tie_word_embeddings": HEAD not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "sliding_window": None,
        "dtype": _dtype(header),
        **{
            word: _number(header, f"{name}.{key}")
            for key, word in own.words.items()
            if f"{name}.{key}" in header.metadata
        },
    }
    config["sliding_window"] = config["sliding_window"] or None
    return {**config, **own.more(header, config)}


def _count(header: GgufHeader, key: str, default: int | None = None) -> int:
    """Return the metadata's number `key`, from 1 to `LARGEST`; if it is missing, `default` (None:
    it is required). Raises `CheckpointError` for any other value."""
    if default is not None and key not in header.metadata:
        return default
    found = header.need(key, int)
    if not 1 <= found <= LARGEST:
        raise CheckpointError(f"{header.path} says {key} = {found}", wanted=f"1 to {LARGEST}", remedy=REMEDY)
    return found


def _number(header: GgufHeader, key: str) -> float:
    """Return the metadata's number `key`, which must exist, from 0 to `LARGEST`. Raises
    `CheckpointError` for any other value."""
    found = header.metadata[key]
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= LARGEST:
        raise CheckpointError(f"{header.path} says {key} = {found!r:.60}", wanted=f"0 to {LARGEST}", remedy=REMEDY)
    return found


def _check_sizes(header: GgufHeader, hidden: int, layers: int) -> None:
    """Raise `CheckpointError` unless the file has the tensors of `layers` blocks, and embeddings
    with `hidden` columns: memory depends on these two numbers most."""
    blocks = {block[1] for tensor in header.tensors if (block := _BLOCK.fullmatch(tensor))}
    shape = header.tensors[EMBEDDING].shape
    if len(blocks) != layers or len(shape) != 2 or shape[1] != hidden:
        raise CheckpointError(
            f"{header.path} has the tensors of {len(blocks)} blocks and embeddings of the shape {list(shape)}",
            wanted=f"{layers} blocks and embeddings of {hidden} columns, as its metadata says",
            remedy=REMEDY,
        )


def token_id(header: GgufHeader, name: str, count: int = LARGEST) -> int | None:
    """Return the id of a special token, such as "eos" or "bos", in a vocabulary of `count` tokens;
    None if the metadata names none. Raises `CheckpointError` for an id outside the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = header.metadata.get(key)
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < count):
        raise CheckpointError(f"{header.path} says {key} = {found!r:.60}", wanted=f"0 to {count - 1}", remedy=REMEDY)
    return found


def end_tokens(header: GgufHeader) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text: those that the metadata names, and the usual
    ones among the vocabulary's control tokens. Raises `CheckpointError` for an id outside the
    vocabulary."""
    embedding = header.tensors.get(EMBEDDING)
    count = embedding.shape[0] if embedding is not None and embedding.shape else LARGEST
    named = (token_id(header, name, count) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys([*(token for token in named if token is not None), *_usual_ends(header)]))


def _usual_ends(header: GgufHeader) -> list[int]:
    """Return the ids of the vocabulary's control tokens that are in `_ENDS`; empty if the file does
    not say which tokens are control tokens."""
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or CONTROL not in kinds:
        return []
    tokens = header.some_texts(TOKENS, [place for place, kind in enumerate(kinds) if kind == CONTROL])
    return [place for place, token in tokens.items() if token in _ENDS]


def _dtype(header: GgufHeader) -> str:
    """Return "float32", "float16" or "bfloat16": the type of the file's matrices if all have the
    same plain type. Quantised or mixed weights are computed in bfloat16."""
    kinds = {tensor.type for name, tensor in header.tensors.items() if len(tensor.shape) > 1}
    return _PLAIN(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope(header: GgufHeader, name: str, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of a `config.json`. `name` is the architecture's name in the
    metadata. A tensor with a factor for each frequency becomes longrope with attention factor 1;
    two such tensors are longrope's own long and short factors. Raises `CheckpointError` for a
    scaling other than none, linear and yarn."""
    get, base_key = header.metadata.get, f"{name}.rope.freq_base"
    base = header.need(base_key, float) if base_key in header.metadata else 10000.0
    rotated = _count(header, f"{name}.rope.dimension_count", head_dim)
    found: dict[str, Any] = {"rope_theta": base, "rope_type": "default", "partial_rotary_factor": rotated / head_dim}
    is_long = all(factors in header.tensors for factors in LONG_FACTORS)
    kind = "none" if is_long else get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{header.path} scales positions by {kind!r}", wanted="none, linear or yarn")
    if kind != "none":
        found |= {"rope_type": kind, "factor": float(header.need(f"{name}.rope.scaling.factor", float))}
    key = f"{name}.rope.scaling.original_context_length"
    if get(key):
        found["original_max_position_embeddings"] = _count(header, key)
    if is_long:
        long, short = (list(header.floats(factors)) for factors in LONG_FACTORS)
        found |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if ROPE_FACTORS in header.tensors:
        factors = list(header.floats(ROPE_FACTORS))
        found |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return found
