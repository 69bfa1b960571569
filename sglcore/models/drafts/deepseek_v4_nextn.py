"""The multi-token prediction (MTP) layer after DeepSeek-V4's last layer.

It predicts a token from the token before and the target's streams of the one before that.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.models.architectures.deepseek.deepseek_v4 import OFFSET, DeepseekV4ForCausalLM
from sglcore.models.decoder import LayerState
from sglcore.models.drafts.eagle import Drafts
from sglcore.models.layer_kinds import Array, Batch, Build

ARCHITECTURE, PART = "DeepseekV4NextN", "mtp.0.e_proj.weight"
"""Its architecture's name, and a tensor that every checkpoint with it has."""


class DeepseekV4NextN(Drafts, DeepseekV4ForCausalLM):
    """The MTP layer: predicts a token from the target's features of token t and the embedding of
    token t + 1. It attends to the sliding window only; embedding and output layer are the target's.
    Features are all streams."""

    def __init__(self, build: Build) -> None:
        """`build.config` is the result of `next_token_config`."""
        super().__init__(build)
        self.aux_layers = (build.config.words["target_layers"],)
        inner, size = build.at("model"), build.config.hidden_size
        self.enorm, self.hnorm = inner.norm("enorm", size, OFFSET), inner.norm("hnorm", size, OFFSET)
        self.e_proj, self.h_proj = inner.linear("e_proj", size, size), inner.linear("h_proj", size, size)

    def _check(self, config: ModelConfig) -> None:
        super()._check(config)
        self.net = self.net.of_next_token

    @classmethod
    def own_name(cls, name: str) -> str:
        """Map names of the first MTP layer, except its embedding and head, to a model's own names,
        all others to `target.*`, which is not read.
        """
        part = re.sub(r"^mtp\.0\.(?!emb\.|head\.)", "", name)
        if part == name:
            return f"target.{name}"
        is_layer = part.startswith(("attn", "ffn", "hc_attn", "hc_ffn"))
        return super().own_name(f"layers.0.{part}" if is_layer else part)

    def __call__(self, batch: Batch) -> Array:
        """Return the draft's own features [T, n * H], all n streams, from which drafting
        continues.
        """
        return self.run_layers(self.join(batch), 0, len(self.layers)).hidden.flatten(1)

    def join(self, batch: Batch) -> LayerState:
        """Return the layer's input, from the embedded tokens and the features of the tokens
        before."""
        size, features = self.config.hidden_size, batch.features
        assert features is not None
        begun = self.hc_head.begin(self.e_proj(self.enorm(self.embed_tokens(batch.input_ids))))
        before = self.h_proj(self.hnorm(features.reshape(-1, size)))
        return LayerState(begun + before.reshape(-1, self.net.streams, size), None, batch)

    def logits(self, hidden: Array) -> Array:
        """Streams [N, n * H] to float32 [N, vocab]."""
        streams = hidden.reshape(-1, self.net.streams, self.config.hidden_size)
        return super().logits(self.norm(self.hc_head.end(streams)))


def next_token_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of `DeepseekV4NextN`, from that of the model in the checkpoint: one
    layer, and the number of the model's layers as the word `target_layers`.
    """
    words, windows = {**config.words, "target_layers": config.num_hidden_layers}, config.sliding_windows[:1]
    return replace(config, architecture=ARCHITECTURE, num_hidden_layers=1, sliding_windows=windows, words=words)
