"""Small GGUF files, written by the gguf package, and the dense model that equals each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that the gguf package can quantise to."""

NONE: Mapping[str, Any] = MappingProxyType({})

SUPER = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Types that the gguf package can only read, with the offsets of their float16 scales in a block;
tests use random blocks."""

ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def gguf_name(name: str, arch: str) -> str:
    """The gguf package's name of a parameter; an architecture that we do not support gets a Llama's
    names."""
    found, layer = None, next((int(part) for part in name.split(".") if part.isdigit()), 0)
    for each in (arch, "llama"):
        names = gguf.get_tensor_name_map(ARCHITECTURES[each], layer + 1)
        found = found or names.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def random_blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes] of random blocks with values of the usual size of weights."""
    elements, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for place in SUPER[kind]:
        halves = rng.uniform(2e-5, 2e-4, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def quantised(weight: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A weight's data in a type, and the float32 values that the gguf package reads from it."""
    number = GGMLQuantizationType[kind]
    data = random_blocks(kind, weight.shape, rng) if kind in SUPER else gguf.quants.quantize(weight, number)
    return data, gguf.quants.dequantize(data, number).reshape(weight.shape)


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in the order of llama.cpp's rotary embedding: element i next to element i +
    half a head."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def unpaired(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `paired`."""
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def add_metadata(writer: GGUFWriter, config: Any, tokenizer: Mapping[str, Any]) -> None:
    """Write the metadata that llama.cpp's converter writes for a model."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    full = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    words = config.to_dict()
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if words.get(name) is not None:
            add(words[name])
    if words.get("sliding_window") and words.get("use_sliding_window", True):
        writer.add_sliding_window(words["sliding_window"])
    for key, value in tokenizer.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)


def write(
    oracle: Any,
    file: Path,
    arch: str,
    kind: Callable[[str], str | None],
    *,
    tokenizer: Mapping[str, Any] = NONE,
    extra: Mapping[str, np.ndarray] = NONE,
    change: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write a model's GGUF file and set the oracle's weights to the quantised values. `kind(name)`
    is the type of each matrix (None: F32).

    `extra` are additional tensors; `change` may add or damage metadata.
    """
    writer, rng = GGUFWriter(file, arch), np.random.default_rng(5)
    add_metadata(writer, oracle.config, tokenizer)
    change(writer)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            _add(writer, name, parameter, kind(name) if parameter.dim() > 1 else None, arch, oracle.config, rng)
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(
    writer: GGUFWriter, name: str, parameter: torch.Tensor, kind: str | None, arch: str, config: Any, rng: Any
) -> None:
    if ".experts." in name:
        _add_experts(writer, name, parameter, kind, rng)
        return
    values = parameter.numpy()
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if name.endswith("shared_expert_gate.weight"):
        values = values[0]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
    is_paired = heads and arch in ("llama", "granite")
    data, meant = _stored(paired(values, heads) if is_paired else values, kind if values.ndim > 1 else None, rng)
    number = None if kind is None or values.ndim < 2 else GGMLQuantizationType[kind]
    writer.add_tensor(gguf_name(name, arch), data, raw_dtype=number)
    if kind is not None and values.ndim > 1:
        meant = unpaired(meant, heads) if is_paired else meant
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(meant)))


def _add_experts(writer: GGUFWriter, name: str, parameter: torch.Tensor, kind: str | None, rng: Any) -> None:
    """Write the fused weights of all experts, with gate and up separate."""
    layer = name.split(".")[2]
    parts = {"ffn_down_exps": parameter}
    if "gate_up" in name:
        half = parameter.shape[1] // 2
        parts = {"ffn_gate_exps": parameter[:, :half], "ffn_up_exps": parameter[:, half:]}
    for part, view in parts.items():
        flat = np.ascontiguousarray(view.numpy()).reshape(-1, view.shape[2])
        data, meant = _stored(flat, kind, rng)
        shaped = data.reshape(view.shape[0], view.shape[1], -1)
        number = None if kind is None else GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.{layer}.{part}.weight", shaped, raw_dtype=number)
        view.copy_(torch.from_numpy(meant).view(view.shape))


def _stored(values: np.ndarray, kind: str | None, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    if kind is None:
        return np.ascontiguousarray(values), values
    if kind in ("F16", "BF16"):
        data = gguf.quants.quantize(np.ascontiguousarray(values), GGMLQuantizationType[kind])
        return data, gguf.quants.dequantize(data, GGMLQuantizationType[kind]).reshape(values.shape)
    return quantised(np.ascontiguousarray(values), kind, rng)
