"""A compact Llama for training, with the parameter names of published checkpoints and the files of
transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The shape of the model."""

    vocab_size: int
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 768
    max_positions: int = 1024
    rope_theta: float = 10000.0
    eps: float = 1e-5


class RMSNorm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size], any dtype; the mean is taken in float32."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary embedding to x [rows, heads, length, head_dim]; element i is paired with
    i + head_dim / 2, as in the published Llama checkpoints."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """x: [rows, length, hidden]."""
        rows, length, _ = x.shape
        size, group = self.config.head_dim, self.config.heads // self.config.kv_heads
        q = rotate(self.q_proj(x).view(rows, length, -1, size).transpose(1, 2), cosine, sine)
        k = rotate(self.k_proj(x).view(rows, length, -1, size).transpose(1, 2), cosine, sine)
        v = self.v_proj(x).view(rows, length, -1, size).transpose(1, 2)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, length, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer with the given attention module (None: causal)."""

    def __init__(self, config: DemoConfig, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = Attention(config) if attention is None else attention
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        """x: [rows, length, hidden]; `given`: further arguments of the attention, such as cosine
        and sine."""
        x = x + self.self_attn(self.input_layernorm(x), *given)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        speeds = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(config.max_positions)[:, None] * speeds
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def streams(self, ids: Tensor) -> list[Tensor]:
        """Return the residual stream [rows, length, hidden] before each layer and after the last;
        ids: [rows, length] int64."""
        x = self.embed_tokens(ids).to(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        )
        length = ids.shape[1]
        cosine, sine = self.cosine[:length].to(x.dtype), self.sine[:length].to(x.dtype)
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1], cosine, sine))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        """Return hidden states [rows, length, hidden] of ids [rows, length] int64."""
        return self.norm(self.streams(ids)[-1])


class DemoModel(nn.Module):
    """The model with its tied output head."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.03 / (2 * config.layers) ** 0.5 if is_last else 0.03)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [rows, length, vocabulary] of ids [rows, length] int64."""
        return F.linear(self.model(ids), self.model.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats over targets that are not -100; a scalar."""
        return F.cross_entropy(self(ids).flatten(0, 1).float(), targets.flatten())


def transformers_config(config: DemoConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """Return config.json as transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special_ids(tokenizer),
    }


def special_ids(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the token ids that begin, end and pad a text."""
    names = {"bos_token_id": "<|bos|>", "eos_token_id": "<|end|>", "pad_token_id": "<|pad|>"}
    return {name: tokenizer.token_to_id(token) for name, token in names.items()}


def save_model(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(transformers_config(model.config, tokenizer), indent=2) + "\n")
    generation = {**special_ids(tokenizer), "do_sample": False, "max_new_tokens": 256}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_weights({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}, folder)


def save_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write model.safetensors; the old file is replaced atomically."""
    new = folder / "model.safetensors.new"
    save_file({name: value.contiguous() for name, value in weights.items()}, new, metadata={"format": "pt"})
    new.chmod(0o644)
    new.replace(folder / "model.safetensors")
