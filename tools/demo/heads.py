"""The draft heads of the demo model, EAGLE-3 and one MTP layer: parameter names as published;
training unrolls them as drafting runs them.

Position i of a head takes the pair (token i + 1, feature of position i) and predicts token i + 2.
At depth 0 the feature is the target's; at depth j it is the output of depth j - 1 at position i - 1
(EAGLE-3, arXiv 2503.01840, section 3.2).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.demo.model import MLP, Decoder, DemoConfig, DemoModel, RMSNorm, rotate, save_weights

AUX_LAYERS = (1, 3, 5)
"""EAGLE-3 reads the residual stream before these layers; published files name the layers before:
the outputs of 0, 2 and 4."""
DRAFT = "draft"
"""The folder of the EAGLE-3 head within the model's folder."""
KEPT_BITS = 4
"""Significant bits of a head's shipped weights; the others of bfloat16's eight are zero, so that a
wheel compresses well."""

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [rows, heads, length, head_dim] of the depths so far, depth 0 first."""
Turns = tuple[Tensor, Tensor]
"""Cosines and sines [length, head_dim / 2] of the positions."""


def delayed(x: Tensor, cells: int, dim: int = -2) -> Tensor:
    """Shift x by `cells` positions to later positions along `dim`; the first ones become zero."""
    length = x.shape[dim]
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, cells)), x.narrow(dim, 0, length - cells)), dim)


def unrolled_attention(q: Tensor, memory: Memory) -> Tensor:
    """Attention at depth j = len(memory) - 1. Position i attends to depth 0 up to position i - j,
    then to depth m at position i - j + m for m = 1..j, as drafting does. q and the result: [rows,
    heads, length, head_dim]; positions before j are undefined."""
    depth, length = len(memory) - 1, q.shape[2]
    (first_k, first_v), *later = memory
    late = [(delayed(k, depth - m), delayed(v, depth - m)) for m, (k, v) in enumerate(later, 1)]
    is_seen = torch.ones(length, length, dtype=torch.bool).tril(-depth)
    scores = (q @ first_k.mT).masked_fill(~is_seen, float("-inf"))
    scores = torch.cat((scores, *((q * k).sum(-1, keepdim=True) for k, _ in late)), -1)
    weights = (scores.float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ first_v
    for m, (_, v) in enumerate(late):
        mixed = mixed + weights[..., length + m, None] * v
    return mixed


class UnrolledAttention(nn.Module):
    """Attention of one layer over all depths, with an input of any width."""

    def __init__(self, config: DemoConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, turns: Turns, memory: Memory) -> Tensor:
        """x: [rows, length, width]; appends this depth's keys and values to `memory`."""
        rows, length, _ = x.shape
        group = self.config.heads // self.config.kv_heads
        q, k, v = (
            projection(x).view(rows, length, -1, self.config.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k = rotate(k, *turns).repeat_interleave(group, dim=1)
        memory.append((k, v.repeat_interleave(group, dim=1)))
        mixed = unrolled_attention(rotate(q, *turns), memory)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class HeadLayer(nn.Module):
    """A decoder layer with unrolled attention, which reads a separate input."""

    def __init__(self, config: DemoConfig, width: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.self_attn = UnrolledAttention(config, width)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def take(self, weights: dict[str, Tensor]) -> None:
        """Load a decoder layer's weights; MLP matrices are cut to this layer's sizes."""
        own = self.mlp.state_dict(prefix="mlp.")
        cut = {name: weights[name][: each.shape[0], : each.shape[1]] for name, each in own.items()}
        self.load_state_dict(weights | cut, strict=False)

    def decode(self, x: Tensor, attended: Tensor, turns: Turns, memory: Memory) -> Tensor:
        """Run the layer. x: residual stream [rows, length, hidden]; attended: input of attention
        [rows, length, width]."""
        x = x + self.self_attn(attended, turns, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(HeadLayer):
    """EAGLE-3's layer: attention reads the concatenation of token embedding and feature."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__(config, 2 * config.hidden)
        self.hidden_norm = RMSNorm(config.hidden, config.eps)


class Head(nn.Module):
    """The interface of heads in training. `ids` int64[V_d]: the target's token ids of the draft
    vocabulary."""

    ids: Tensor

    def features(self, target: Decoder, streams: list[Tensor]) -> Tensor:
        """Return the features that the head reads from the target: [rows, length, F]."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """Project the target's features to recurrent ones: [rows, length, hidden]."""
        raise NotImplementedError

    def forward(self, embedded: Tensor, feature: Tensor, turns: Turns, memory: Memory) -> Tensor:
        """Return the recurrent feature of the next depth; all are [rows, length, hidden]."""
        raise NotImplementedError

    def logits(self, recurrent: Tensor, target: Decoder) -> Tensor:
        """Return logits [rows, length, V_d] over the draft vocabulary."""
        raise NotImplementedError

    def begin(self, target: Decoder) -> None:
        """Initialise the weights, as a rule from the target's last layer."""
        raise NotImplementedError

    def drafts(self, target: Decoder, ids: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        """Return draft logits of each depth, as `unroll` does."""
        return unroll(self, target, ids, features, depths)


class Eagle3(Head):
    """The EAGLE-3 head with its own draft vocabulary."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DemoConfig, ids: Tensor) -> None:
        """`ids`: ascending int64[V_d]."""
        super().__init__()
        self.register_buffer("ids", ids, persistent=False)
        self.fc = nn.Linear(len(AUX_LAYERS) * config.hidden, config.hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, len(ids), bias=False)
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))

    def features(self, target: Decoder, streams: list[Tensor]) -> Tensor:
        return torch.cat([streams[layer] for layer in AUX_LAYERS], -1)

    def project(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, embedded: Tensor, feature: Tensor, turns: Turns, memory: Memory) -> Tensor:
        layer = self.midlayer
        attended = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)
        return layer.decode(feature, attended, turns, memory)

    def logits(self, recurrent: Tensor, target: Decoder) -> Tensor:
        return self.lm_head(self.norm(recurrent))

    @torch.no_grad()
    def begin(self, target: Decoder) -> None:
        weights = dict(target.layers[-1].state_dict())
        for name in ("q", "k", "v"):
            name = f"self_attn.{name}_proj.weight"
            weights[name] = torch.cat((weights[name], weights[name]), 1) / 2
        self.midlayer.take(weights)
        nn.init.normal_(self.fc.weight, std=0.01)
        self.fc.weight[:, -len(self.fc.weight) :] += torch.eye(len(self.fc.weight))
        self.norm.load_state_dict(target.norm.state_dict())
        self.lm_head.weight.copy_(target.embed_tokens.weight[self.ids])


class SharedHead(nn.Module):
    """The norm before the target's output layer."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden, config.eps)


class NextToken(HeadLayer, Head):
    """One MTP layer as in DeepSeek-V3 (arXiv 2412.19437, section 2.2); it uses the target's
    embedding and output layer."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__(config, config.hidden)
        self.register_buffer("ids", torch.arange(config.vocab_size), persistent=False)
        self.enorm = RMSNorm(config.hidden, config.eps)
        self.hnorm = RMSNorm(config.hidden, config.eps)
        self.eh_proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.shared_head = SharedHead(config)

    def features(self, target: Decoder, streams: list[Tensor]) -> Tensor:
        return target.norm(streams[-1])

    def project(self, features: Tensor) -> Tensor:
        return features

    def forward(self, embedded: Tensor, feature: Tensor, turns: Turns, memory: Memory) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(feature)), -1))
        return self.shared_head.norm(self.decode(x, self.input_layernorm(x), turns, memory))

    def logits(self, recurrent: Tensor, target: Decoder) -> Tensor:
        return F.linear(recurrent, target.embed_tokens.weight)

    @torch.no_grad()
    def begin(self, target: Decoder) -> None:
        self.take(dict(target.layers[-1].state_dict()))
        self.shared_head.norm.load_state_dict(target.norm.state_dict())
        nn.init.normal_(self.eh_proj.weight, std=0.01)
        self.eh_proj.weight[:, len(self.eh_proj.weight) :] += torch.eye(len(self.eh_proj.weight))


@torch.no_grad()
def read(head: Head, target: Decoder, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Run the target on ids int64[rows, length]; returns the features that the head reads [rows,
    length, F] and the target's logits [rows, length, V]."""
    streams = target.streams(ids)
    return head.features(target, streams), F.linear(target.norm(streams[-1]), target.embed_tokens.weight)


def unroll(head: Head, target: Decoder, ids: Tensor, features: Tensor, depths: int) -> list[Tensor]:
    """Return draft logits [rows, length - 1, V_d] of each depth for ids int64[rows, length] and the
    target's features [rows, length, F]. Position i predicts token i + 2; at depth j the positions
    before j are undefined."""
    embedded = target.embed_tokens(ids[:, 1:]).to(features.dtype)
    length = embedded.shape[1]
    turns = target.cosine[:length].to(features.dtype), target.sine[:length].to(features.dtype)
    memory: Memory = []
    recurrent = head.project(features[:, :-1])
    found = []
    for depth in range(depths):
        recurrent = head(embedded, delayed(recurrent, 1) if depth else recurrent, turns, memory)
        found.append(head.logits(recurrent, target))
    return found


def shortened(weight: Tensor) -> Tensor:
    """Round to the nearest bfloat16 with `KEPT_BITS` significant bits."""
    fraction, exponent = torch.frexp(weight.detach().float())
    return torch.ldexp((fraction * 2**KEPT_BITS).round(), exponent - KEPT_BITS).to(torch.bfloat16)


def published(head: Head) -> dict[str, Tensor]:
    """Return the tensors of a head as they are shipped."""
    return {name: shortened(value) if value.is_floating_point() else value for name, value in head.state_dict().items()}


def save_eagle3(head: Eagle3, folder: Path) -> None:
    """Write config.json and model.safetensors of an EAGLE-3 head in the published format below the
    model's folder."""
    base = json.loads((folder / "config.json").read_text())
    taken = ("model_type", "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    taken += ("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "attention_bias", "mlp_bias")
    config = {name: base[name] for name in (*taken, "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": head.midlayer.mlp.gate_proj.out_features,
        "draft_vocab_size": len(head.ids),
        "target_hidden_size": base["hidden_size"],
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in AUX_LAYERS],
            "use_aux_hidden_state": True,
        },
    }
    (folder / DRAFT).mkdir(exist_ok=True)
    (folder / DRAFT / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_weights(published(head), folder / DRAFT)


def save_next_token(head: NextToken, folder: Path) -> None:
    """Add the layer to the target's weight file, after its last layer, and set
    num_nextn_predict_layers in its config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2) + "\n")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    own = {prefix + name: value for name, value in published(head).items()}
    kept = {name: value for name, value in load_file(folder / "model.safetensors").items() if name not in own}
    save_weights(kept | own, folder)


def load_eagle3(folder: Path) -> Eagle3:
    """Load the shipped head of the model in `folder`, in float32. Raises RuntimeError if names or
    shapes are not as published."""
    config = json.loads((folder / DRAFT / "config.json").read_text())
    weights = load_file(folder / DRAFT / "model.safetensors")
    shape = DemoConfig(vocab_size=config["vocab_size"], intermediate=config["intermediate_size"])
    head = Eagle3(shape, weights["d2t"] + torch.arange(config["draft_vocab_size"]))
    head.load_state_dict(weights)
    return head


def load_next_token(folder: Path) -> NextToken:
    """Load the MTP layer after the model's last layer, like `load_eagle3`."""
    config = json.loads((folder / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    weights = load_file(folder / "model.safetensors")
    head = NextToken(DemoConfig(vocab_size=config["vocab_size"]))
    head.load_state_dict(
        {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    )
    return head


def load_target(folder: Path) -> Decoder:
    """Load the demo model in float32, without its MTP layer."""
    weights = load_file(folder / "model.safetensors")
    model = DemoModel(DemoConfig(vocab_size=len(weights["model.embed_tokens.weight"])))
    model.load_state_dict({name: weights[name].float() for name in model.state_dict()})
    return model.model.requires_grad_(False)
