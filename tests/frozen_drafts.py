"""Tiny random drafts without a KV cache, in Gemma 4's format, and their draft tokens by
transformers' layers over the KV cache of transformers' target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, Gemma4AssistantConfig, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantMaskedEmbedder

from tests.checkpoints import Oracle
from tests.drafts import randomized

WINDOW = 9
KINDS = ("sliding_attention", "full_attention")


class Shared(Gemma4TextConfig):
    """All layers take keys and values from elsewhere; the library's own class refuses a model in
    which no layer computes any."""

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        return ["reuse"] * self.num_hidden_layers


def kept_of(target: Oracle, ids: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the target's hidden states of ids int [L] after its last norm, [L, H], and keys and
    values of its last layer of each kind, [1, heads, L, head_dim]."""
    if target.config.model_type == "gemma4_text":
        found = target.model(ids[None], return_shared_kv_states=True)
        return found.last_hidden_state[0], dict(found.shared_kv_states)
    cache: Any = DynamicCache()
    found = target.model(ids[None], past_key_values=cache, use_cache=True)
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    return found.last_hidden_state[0], {
        kind: (layer.keys, layer.values) for kind, layer in zip(kinds, cache.layers, strict=True)
    }


class DenseFrozen(nn.Module):
    """The draft; the target that it reads is not among its parameters."""

    target: Any

    def __init__(self, target: Oracle, sizes: dict[str, int], kinds: Sequence[str], groups: int = 0) -> None:
        """`sizes`: the head sizes of layers with and without a window; `groups`: the number of
        vocabulary groups, 0 for none."""
        super().__init__()
        self.__dict__["target"] = target
        own = target.config
        self.words: dict[str, Any] = {
            "vocab_size": own.vocab_size,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": 4,
            "num_key_value_heads": own.num_key_value_heads,
            **sizes,
            "layer_types": list(kinds),
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "max_position_embeddings": 64,
            "num_kv_shared_layers": len(kinds),
        }
        self.wide, self.size = own.hidden_size, 24
        self.model: Any = Gemma4TextModel(Shared(**self.words))
        self.pre_projection = nn.Linear(2 * self.wide, self.size, bias=False)
        self.post_projection = nn.Linear(self.size, self.wide, bias=False)
        text = {**self.words, "model_type": "gemma4_text"}
        self.config = Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=self.wide,
            architectures=["Gemma4AssistantForCausalLM"],
            use_ordered_embeddings=groups > 0,
            num_centroids=groups or 2048,
            centroid_intermediate_top_k=max(groups // 3, 1),
        )
        if groups:
            self.masked_embedding = Gemma4AssistantMaskedEmbedder(self.config)
            self.masked_embedding.token_ordering.copy_(torch.randperm(own.vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [1, size] to [1, vocab]; tokens that the draft leaves out get -inf. The library gives
        these the minimum, which no other token has."""
        weight = self.model.embed_tokens.weight
        if not self.config.use_ordered_embeddings:
            return hidden @ weight.T
        found = self.masked_embedding(hidden[None], weight)[0]
        return found.masked_fill(found == found.min(), -torch.inf)

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], root: int, path: Sequence[int]) -> Tensor:
        """Return log-probabilities [len(path) + 1, vocab] after tokens with KV entries and a root
        without one, and after each draft token of a path."""
        hidden, kept = kept_of(self.target, torch.tensor(tokens))
        recurrent, place, found = hidden[-1:], torch.tensor([[len(tokens) - 1]]), []
        if "sliding_attention" in kept:
            keys, values = kept["sliding_attention"]
            kept["sliding_attention"] = keys[:, :, -WINDOW:], values[:, :, -WINDOW:]
        for token in (root, *path):
            embedded = self.target.model.embed_tokens(torch.tensor([token]))
            joined = self.pre_projection(torch.cat([embedded, recurrent], -1))
            given = {"shared_kv_states": kept, "attention_mask": dict.fromkeys(KINDS), "use_cache": False}
            own = self.model(inputs_embeds=joined[None], position_ids=place, **given).last_hidden_state[0]
            found.append(torch.log_softmax(self.logits(own), -1)[0])
            recurrent = self.post_projection(own)
        return torch.stack(found)


def frozen(
    target: Oracle, folder: Path, kinds: Sequence[str], head_dim: int, global_head_dim: int, groups: int = 0
) -> DenseFrozen:
    """Make a draft in `folder` with layers of these kinds."""
    torch.manual_seed(1)
    sizes = {"head_dim": head_dim, "global_head_dim": global_head_dim}
    made = randomized(DenseFrozen(target, sizes, kinds, groups))
    for place, layer in enumerate(made.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * place)
        # Small scores, so that rounding of the target's keys does not change them much.
        layer.self_attn.q_norm.weight.data.mul_(0.4)
    folder.mkdir(exist_ok=True)
    made.config.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, folder / "model.safetensors")
    return made
