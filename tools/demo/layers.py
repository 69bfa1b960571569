"""The draft head of several MTP layers (arXiv 2412.19437, section 2.2); each drafts one token.
Parameter names as published: layers after the model's last one, in a separate file.

Position i of layer j (from 0) takes token i + 1 + j and the output of layer j - 1 at position i
(layer 0: the target's hidden state); it predicts token i + 2 + j.
"""

import json
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.demo.heads import Head, NextToken, delayed, published
from tools.demo.model import Decoder, DemoConfig, save_weights

FOLDER = "mtp-layers"
"""The folder of the head within the model's folder."""


class NextTokenLayers(Head):
    """The MTP layers; they use the target's embedding and output layer."""

    def __init__(self, config: DemoConfig) -> None:
        """`config` has the head's own layers and feed-forward width."""
        super().__init__()
        self.config = config
        self.register_buffer("ids", torch.arange(config.vocab_size), persistent=False)
        self.layers = nn.ModuleList(NextToken(config) for _ in range(config.layers))

    @property
    def each(self) -> list[NextToken]:
        """The layers, in order."""
        return [cast("NextToken", layer) for layer in self.layers]

    def features(self, target: Decoder, streams: list[Tensor]) -> Tensor:
        return target.norm(streams[-1])

    def drafts(self, target: Decoder, ids: Tensor, features: Tensor, depths: int) -> list[Tensor]:
        embedded = target.embed_tokens(ids[:, 1:]).to(features.dtype)
        length = embedded.shape[1]
        turns = target.cosine[:length].to(features.dtype), target.sine[:length].to(features.dtype)
        made, found = features[:, :-1], []
        for depth, layer in enumerate(self.each[:depths]):
            # The last positions wrap around to wrong tokens; their predictions are not used.
            made = layer(embedded.roll(-depth, 1), made, turns, [])
            found.append(delayed(layer.logits(made, target), depth))
        return found

    def begin(self, target: Decoder) -> None:
        for layer in self.each:
            layer.begin(target)


def save_layers(head: NextTokenLayers, folder: Path) -> None:
    """Write config.json and model.safetensors below the model's folder: a checkpoint in the model's
    format with these layers only."""
    base = json.loads((folder / "config.json").read_text())
    own = {"intermediate_size": head.config.intermediate, "num_nextn_predict_layers": head.config.layers}
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / "config.json").write_text(json.dumps(base | own, indent=2) + "\n")
    first = base["num_hidden_layers"]
    weights = {}
    for name, value in published(head).items():
        index, _, rest = name.removeprefix("layers.").partition(".")
        weights[f"model.layers.{first + int(index)}.{rest}"] = value
    save_weights(weights, folder / FOLDER)


def load_layers(folder: Path) -> NextTokenLayers:
    """Load the shipped head of the model in `folder`, in float32. Raises RuntimeError if names or
    shapes are not as published."""
    config = json.loads((folder / FOLDER / "config.json").read_text())
    count, first = config["num_nextn_predict_layers"], config["num_hidden_layers"]
    head = NextTokenLayers(DemoConfig(config["vocab_size"], layers=count, intermediate=config["intermediate_size"]))
    weights = {}
    for name, value in load_file(folder / FOLDER / "model.safetensors").items():
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        weights[f"layers.{int(index) - first}.{rest}"] = value
    head.load_state_dict(weights)
    return head
