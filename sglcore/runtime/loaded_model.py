"""What a start asks of a model beside what its runner does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sglcore.checkpoint.config import ModelConfig
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.states import KeepsState
from sglcore.runtime.model_runner import Model

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`."""


class LinearLayer(Protocol):
    """A linear layer of a loaded model: its `weight` in whatever form the device's kernels read."""

    weight: Tensor


class Weights(Protocol):
    """What a model was loaded with."""

    @property
    def linears(self) -> Sequence[LinearLayer]:
        """The layers whose weights the device may keep in a form of its own."""
        ...


class LoadedModel(Model, Protocol):
    """A model with its weights on the device: what a start asks of it beside what the runner does. Its geometry, what it is
    computed in, the functions it calls, the states that its layers keep, whether it calls torch's own between them, and what was loaded."""

    config: ModelConfig
    dtype: torch.dtype
    kernels: KernelTable
    weights: Weights

    @property
    def state_layers(self) -> Sequence[KeepsState]:
        """The layers that keep a state of each request, indexed by their id."""
        ...

    @property
    def calls_library(self) -> bool:
        """Some of its operations are torch's own, between those of the table."""
        ...

    @property
    def reads_history(self) -> bool:
        """What it makes of a token depends on the ids before it."""
        ...

    @property
    def feature_size(self) -> int:
        """Numbers that one of its layers hands to the next of each token."""
        ...

    @property
    def sliced_layers(self) -> int:
        """A forward may be run by slices of so many layers, as `embed`, `run_layers` and `finish`; 0: it is whole."""
        ...

    def classify(self, pooled: Tensor) -> Tensor:
        """[B, labels] from pooled hidden states [B, H]."""
        ...
