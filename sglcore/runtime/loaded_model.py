"""The interface of a loaded model that bring-up uses, in addition to what the runner calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.states import KeepsState
from sglcore.runtime.model_runner import Model

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`."""


class LinearLayer(Protocol):
    """A linear layer of a loaded model; its `weight` has the form that the kernels read."""

    weight: Tensor


class Weights(Protocol):
    """The weights of a loaded model, as bring-up reads them."""

    @property
    def linears(self) -> Sequence[LinearLayer]:
        """The layers that may keep their weights in a form of the device's own."""
        ...

    @property
    def parameters(self) -> Sequence[Tensor]:
        """All weights of this rank."""
        ...


class LoadedModel(Model, Protocol):
    """A model with its weights on the device, as bring-up uses it. Called with a batch, it returns
    hidden states [T, H] (`Model.__call__`).

    `dtype` is the dtype that it computes in, `kernels` the table of the functions that it calls.
    """

    config: ModelConfig
    dtype: torch.dtype
    kernels: KernelTable
    weights: Weights

    @property
    def state_layers(self) -> Sequence[KeepsState]:
        """The layers that keep a recurrent state for each request, indexed by their id."""
        ...

    @property
    def calls_library(self) -> bool:
        """True if the model also calls torch operations that are not in the kernel table."""
        ...

    @property
    def reads_history(self) -> bool:
        """True if the output for a token depends on the input ids before it (n-gram embeddings)."""
        ...

    @property
    def previous_ids(self) -> int:
        """How many input ids before each token its output depends on."""
        ...

    @property
    def against_norm_inputs(self) -> str:
        """Why `with_norm_inputs` raises; empty if it does not."""
        ...

    @property
    def feature_size(self) -> int:
        """Elements per token of the features that a layer passes to the next one."""
        ...

    @property
    def sliced_layers(self) -> int:
        """Number of layers if a forward can run in slices of layers; 0: it runs whole only.

        Slices are `embed`, `run_layers` and `finish`.
        """
        ...

    def classify(self, pooled: Tensor) -> Tensor:
        """Return [B, labels] for pooled hidden states [B, H]."""
        ...


def row_sizes(model: LoadedModel) -> dict[str, Any]:
    """Return the fields of `Limits` about rows of numbers that enter or leave a model: labels,
    embeddings of prompts, and hidden states."""
    config, pooling = model.config, model.config.pooling
    return {
        "num_labels": 0 if pooling is None else pooling.labels,
        "embed_size": config.hidden_size if pooling is None else 0,
        "hidden_size": 0 if config.is_encoder else config.hidden_size,
        "gives_norm_inputs": not (config.is_encoder or model.against_norm_inputs),
    }
