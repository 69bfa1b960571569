"""A Llama that adds to each token's embedding an embedding of the token and the one before, from a
table indexed by their hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.models.decoder import LayerState
from sglcore.models.layer_kinds import Build
from sglcore.runtime.forward_batch import ForwardBatch
from tests.checkpoints import llama, save

NAME, ROWS = "BigramLlamaForCausalLM", 41


def pairs_of(tokens: Tensor, before: Tensor) -> Tensor:
    """Return rows of the table; the first token has -1 before it."""
    return (tokens * 31 + before * 7 + 7) % ROWS


class BigramLlama(LlamaForCausalLM):
    """Reads the token before each token."""

    previous_ids = 1

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.pairs = build.at("model").embedding("pairs", ROWS, build.config.hidden_size)

    def embed(self, batch: ForwardBatch) -> LayerState:
        """Return the sum of both embeddings."""
        found, info = super().embed(batch), batch.ngram_embedding_info
        assert info is not None and info.previous_ids is not None
        pairs = self.pairs(pairs_of(batch.input_ids, info.previous_ids[:, 0]))
        return found._replace(hidden=found.hidden + pairs)


class Oracle:
    """Transformers' Llama on the same sums of embeddings."""

    def __init__(self, seed: int = 9) -> None:
        self.llama = llama()
        self.pairs = torch.randn(ROWS, 48, generator=torch.Generator().manual_seed(seed)) * 0.3

    def __call__(self, ids: Tensor) -> Any:
        """Return the logits of ids [1, T]."""
        before = torch.cat((torch.tensor([[-1]]), ids[:, :-1]), dim=1)
        embeds = self.llama.get_input_embeddings()(ids) + self.pairs[pairs_of(ids, before)]
        return self.llama(inputs_embeds=embeds)

    def save(self, folder: Path) -> Path:
        """Save as a checkpoint of that architecture."""
        save(self.llama, folder)
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, "model.pairs.weight": self.pairs}, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}), encoding="utf-8")
        return folder
