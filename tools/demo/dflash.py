"""The DFlash head of the demo model (arXiv 2602.06036): one forward fills in the mask tokens after
a root token, from the target's features before the root. Parameter names as published.

A block's rows attend to each other and to keys and values injected for the positions before its
root. Row j predicts the token j positions after the root.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.demo.heads import Head, delayed, published
from tools.demo.model import Decoder, DemoConfig, Layer, RMSNorm, rotate, save_weights

FOLDER = "dflash"
"""The folder of the head within the model's folder."""
SIZE = 8
"""Tokens of a block, including the root."""
MASK = "<|pad|>"
"""The mask token; it does not occur in texts."""
READ_LAYERS = (2, 4, 6)
"""The head reads the residual stream before these layers (6: after the last layer). Files name the
layers before: the outputs of 1, 3 and 5."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `SIZE` rows. `roots` int64[rows, blocks]: position of each block's first token.
    Rotary cosines and sines: `own_turns` [rows, 1, blocks * SIZE, head_dim / 2] of the blocks'
    rows, `turns` [length, head_dim / 2] of the injected positions."""

    roots: Tensor
    own_turns: tuple[Tensor, Tensor]
    turns: tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """Attention of the blocks' queries over injected keys and values and the blocks' own rows, with
    q and k norms per head."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)

    def heads(self, x: Tensor) -> Tensor:
        """Reshape [rows, T, n * head_dim] to [rows, n, T, head_dim]."""
        return x.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)

    def keys_and_values(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [rows, heads, T, head_dim], of x [rows, T, hidden]."""
        group = self.config.heads // self.config.kv_heads
        k = rotate(self.k_norm(self.heads(self.k_proj(x))), *turns)
        return k.repeat_interleave(group, 1), self.heads(self.v_proj(x)).repeat_interleave(group, 1)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        """x: [rows, blocks * SIZE, hidden]; context: [rows, length, hidden]."""
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), *blocks.own_turns)
        (k, v), (own_k, own_v) = self.keys_and_values(context, blocks.turns), self.keys_and_values(x, blocks.own_turns)
        q, own_k, own_v = (each.unflatten(2, (-1, SIZE)) for each in (q, own_k, own_v))
        length = context.shape[1]
        is_seen = torch.arange(length) < blocks.roots[:, None, :, None, None]
        far = (q.flatten(2, 3) @ k.mT).unflatten(2, (-1, SIZE)).masked_fill(~is_seen, float("-inf"))
        scores = torch.cat((far, q @ own_k.mT), -1)
        weights = (scores.float() * self.config.head_dim**-0.5).softmax(-1).to(v.dtype)
        mixed = weights[..., :length].flatten(2, 3) @ v + (weights[..., length:] @ own_v).flatten(2, 3)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class DFlash(Head):
    """The DFlash head; it uses the target's embedding and output layer."""

    def __init__(self, config: DemoConfig, mask: int) -> None:
        """`config` has the head's own layers and feed-forward width; `mask`: the id of `MASK`."""
        super().__init__()
        self.config, self.mask = config, mask
        self.register_buffer("ids", torch.arange(config.vocab_size), persistent=False)
        self.fc = nn.Linear(len(READ_LAYERS) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RMSNorm(config.hidden, config.eps)
        self.layers = nn.ModuleList(Layer(config, BlockAttention(config)) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def features(self, target: Decoder, streams: list[Tensor]) -> Tensor:
        return torch.cat([streams[layer] for layer in READ_LAYERS], -1)

    def project(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def logits(self, recurrent: Tensor, target: Decoder) -> Tensor:
        return F.linear(self.norm(recurrent), target.embed_tokens.weight)

    def blocks(self, target: Decoder, ids: Tensor, features: Tensor, roots: Tensor) -> Tensor:
        """Return logits [rows, blocks, SIZE - 1, V] of the tokens after roots int64[rows, blocks]
        (at least 1) in ids int64[rows, length], given the target's features [rows, length, F]."""
        dtype, (rows, count) = features.dtype, roots.shape
        places = (roots[..., None] + torch.arange(SIZE)).flatten(1)
        own_turns = target.cosine[places][:, None].to(dtype), target.sine[places][:, None].to(dtype)
        turns = target.cosine[: ids.shape[1]].to(dtype), target.sine[: ids.shape[1]].to(dtype)
        made = torch.full((rows, count, SIZE), self.mask)
        made[..., 0] = ids.gather(1, roots)
        x, context = target.embed_tokens(made).flatten(1, 2).to(dtype), self.project(features)
        for layer in self.layers:
            x = layer(x, context, Blocks(roots, own_turns, turns))
        return self.logits(x.unflatten(1, (count, SIZE))[:, :, 1:], target)

    def drafts(self, target: Decoder, ids: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        roots = torch.arange(1, ids.shape[1]).expand(len(ids), -1)
        made = self.blocks(target, ids, features, roots)
        return [delayed(made[:, :, depth], depth) for depth in range(depths)]

    @torch.no_grad()
    def begin(self, target: Decoder) -> None:
        """Initialise with noise: mask tokens differ from the inputs of the target's layers."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.01 if is_last else 0.03)
        self.norm.load_state_dict(target.norm.state_dict())


def save_dflash(head: DFlash, folder: Path) -> None:
    """Write config.json and model.safetensors in the published format below the model's folder."""
    base = json.loads((folder / "config.json").read_text())
    taken = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    taken += ("max_position_embeddings", "rms_norm_eps", "rope_theta", "attention_bias")
    config = {name: base[name] for name in (*taken, "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")}
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": head.config.layers,
        "intermediate_size": head.config.intermediate,
        "tie_word_embeddings": True,
        "block_size": SIZE,
        "num_target_layers": base["num_hidden_layers"],
        "dflash_config": {"mask_token_id": head.mask, "target_layer_ids": [layer - 1 for layer in READ_LAYERS]},
    }
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_weights(published(head), folder / FOLDER)


def load_dflash(folder: Path) -> DFlash:
    """Load the shipped head of the model in `folder`, in float32. Raises RuntimeError if names or
    shapes are not as published."""
    config = json.loads((folder / FOLDER / "config.json").read_text())
    shape = DemoConfig(
        config["vocab_size"], layers=config["num_hidden_layers"], intermediate=config["intermediate_size"]
    )
    head = DFlash(shape, config["dflash_config"]["mask_token_id"])
    head.load_state_dict(load_file(folder / FOLDER / "model.safetensors"))
    return head
