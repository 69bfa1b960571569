"""Writes the checkpoint as a GGUF file for llama.cpp; runs in its environment with the package
`gguf`.

    python write_gguf.py CHECKPOINT FILE {bf16,q8_0,q4_0}

Every matrix has the named type, including the tied embedding, so that a step reads the fewest
bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from geometry import CONFIG, HEAD, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants
from vocabulary import SPECIAL, vocabulary

from sglcore.checkpoint.safetensors_header import read_entries

TYPES = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(checkpoint: Path, file: Path, kind: str) -> None:
    """Write the file under a temporary name, then rename it."""
    quantized, file_type = TYPES[kind]
    part = file.with_suffix(".part")
    writer = GGUFWriter(part, "qwen3")
    write_geometry(writer, file_type)
    write_tokenizer(writer)
    for name, values in weights(checkpoint / "model.safetensors"):
        chosen = GGMLQuantizationType.F32 if values.ndim == 1 else quantized
        writer.add_tensor(gguf_name(name), quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, file)


def write_geometry(writer: GGUFWriter, file_type: LlamaFileType) -> None:
    """Write the model's metadata keys."""
    writer.add_name("random weights, geometry of Qwen3-0.6B")
    writer.add_file_type(file_type)
    writer.add_context_length(int(CONFIG["max_position_embeddings"]))  # pyright: ignore
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_vocab_size(VOCABULARY)
    writer.add_rope_freq_base(float(CONFIG["rope_theta"]))  # pyright: ignore
    writer.add_layer_norm_rms_eps(float(CONFIG["rms_norm_eps"]))  # pyright: ignore


def write_tokenizer(writer: GGUFWriter) -> None:
    """Write the checkpoint's generated vocabulary."""
    tokens, merges = vocabulary(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def gguf_name(name: str) -> str:
    """Return the GGUF name of a checkpoint tensor."""
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def weights(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and float32 values of each tensor of a bfloat16 safetensors file."""
    words = np.memmap(file, np.uint8, "r")
    for entry in read_entries(file):
        halves = words[entry.start : entry.end].view(np.uint16).astype(np.uint32) << 16
        yield entry.name, halves.view(np.float32).reshape(entry.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
