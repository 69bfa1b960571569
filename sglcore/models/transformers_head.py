"""What a causal class of transformers does behind its decoder: its output layer by the engine's kernels, the rest by the class,
or nothing where there is no rest."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sglcore.layers.build import Build
from sglcore.layers.linear import Head
from sglcore.models.transformers_layers import Rows


class PackedHead(nn.Module):
    """The output layer, with a weight of its own or that of the embedding `tied`."""

    def __init__(self, own: nn.Linear, name: str, tied: Rows | None) -> None:
        super().__init__()
        self.name, self.tied = name, tied
        self.is_read = False
        self._own = (own,)  # out of the reach of who looks for modules
        self.logits: Callable[[Tensor], Tensor] | None = None
        """[N, H] to float32 [N, vocab]."""

    @property
    def weight(self) -> Tensor:
        """For shapes alone: who reads it computes with it by another way, which `is_read` tells."""
        self.is_read = True
        return self.own.weight

    @property
    def is_elsewhere(self) -> bool:
        """Whether something else has computed with the weight."""
        return self.is_read or (self.tied is not None and self.tied.is_read)

    @property
    def own(self) -> nn.Linear:
        """The layer that it stands for."""
        return self._own[0]

    def place(self, build: Build) -> None:
        """Declare the weight, and choose the kernel."""
        rows, size = self.own.weight.shape
        self.logits = Head(
            build.at(*self.name.split(".")), rows, size, None if self.tied is None else self.tied.place(build)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[1, N, H] to [1, N, vocab] in the model's dtype."""
        return self.own(x) if self.logits is None else self.logits(x[0])[None].to(x.dtype)


class _HandedOn:
    """A decoder's output of which only the hidden states are there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _Decoded(nn.Module):
    """Stands where the decoder was: it hands on what it is given as the decoder's output, and has the decoder's attributes."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._stood_here = (decoder,)  # no module of this one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stood_here[0], name) if not name.startswith("_") else super().__getattr__(name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **others: Any) -> _HandedOn:
        """[1, N, H]."""
        return _HandedOn(inputs_embeds)

    @property
    def decoder(self) -> _Decoded:
        """Some classes call a part of what stood here."""
        return self


def head_of(model: PreTrainedModel) -> PreTrainedModel:
    """All that the causal class does behind its decoder."""
    head = copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Decoded(model.base_model)}
    return head


def is_output_layer(model: PreTrainedModel, layer: PackedHead) -> bool:
    """Whether nothing comes between the decoder and the output layer, nor behind that."""
    found = _Given()
    head = head_of(model)
    head._modules = {name: found if each is layer else each for name, each in head._modules.items()}
    hidden = torch.randn(1, 2, layer.own.in_features, generator=torch.Generator().manual_seed(0))
    try:
        logits = head(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError):
        return False
    return found.given is not None and torch.equal(found.given, hidden) and torch.equal(logits, found.logits)


class _Given(nn.Module):
    """In place of an output layer: it keeps what it is given, and gives logits that any scale or cap would change."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self.logits = torch.linspace(-100.0, 100.0, 14).view(1, 2, 7)

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, 2, H] to [1, 2, 7]."""
        self.given = hidden
        return self.logits
