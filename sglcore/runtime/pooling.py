"""Pooling: one vector per request from its hidden states, as `checkpoint/pooling_config.py`
describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.checkpoint.pooling_config import Pooling
from sglcore.runtime.staging import StagedArrays
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.step.emitting_rows import plan_rows
from sglcore.step.pooling_rows import pooled_rows
from sglcore.step.step_output import StepOutput
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch

Rows = Mapping[str, Tensor]
"""The arrays that `pooled_rows` returns, by name, on the device."""


class Pooler:
    """A callable from the hidden states of a step to one embedding, or the scores of the labels,
    per request.
    """

    def __init__(self, pooling: Pooling, classify: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """`classify` is the model's classification head, which computes in `dtype`.

        It is called only if the pooling has labels.
        """
        self._pooling, self._classify, self._dtype = pooling, classify, dtype

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Pool hidden [T, H] to float32 [B, len(modes) * H], or to float32 [B, labels].

        Queues work only; does not wait.
        """
        pooled = torch.cat([POOLS[mode](hidden, rows) for mode in self._pooling.modes], dim=-1)
        if self._pooling.labels:
            pooled = self._classify(pooled.to(self._dtype)).float()
        if self._pooling.is_sigmoid:
            pooled = pooled.sigmoid()
        return torch.nn.functional.normalize(pooled, dim=-1) if self._pooling.is_normalized else pooled


def _first(hidden: Tensor, rows: Rows) -> Tensor:
    return hidden.index_select(0, rows["first"]).float()


def _last(hidden: Tensor, rows: Rows) -> Tensor:
    return hidden.index_select(0, rows["last"]).float()


def _sums(hidden: Tensor, rows: Rows) -> Tensor:
    sums = torch.zeros(len(rows["first"]), hidden.shape[1], dtype=torch.float32, device=hidden.device)
    return sums.index_add_(0, rows["owners"], hidden.float())


def _mean(hidden: Tensor, rows: Rows) -> Tensor:
    return _sums(hidden, rows) / rows["lengths"][:, None]


def _root_mean(hidden: Tensor, rows: Rows) -> Tensor:
    return _sums(hidden, rows) / rows["lengths"][:, None].float().sqrt()


def _weighted_mean(hidden: Tensor, rows: Rows) -> Tensor:
    lengths = rows["lengths"][:, None].float()
    return _sums(hidden.float() * rows["weights"][:, None], rows) / (lengths * (lengths + 1) / 2)


def _largest(hidden: Tensor, rows: Rows) -> Tensor:
    found = torch.full((len(rows["first"]), hidden.shape[1]), -torch.inf, dtype=torch.float32, device=hidden.device)
    return found.index_reduce_(0, rows["owners"], hidden.float(), "amax")


POOLS: Mapping[str, Callable[[Tensor, Rows], Tensor]] = MappingProxyType(
    {
        "cls": _first,
        "max": _largest,
        "mean": _mean,
        "mean_sqrt_len_tokens": _root_mean,
        "weightedmean": _weighted_mean,
        "lasttoken": _last,
    }
)
"""Pooling functions by mode: hidden [T, H] to float32 [B, H]."""


class EmbeddingSteps:
    """The `StepKind` of steps that return one vector per prompt."""

    def __init__(self, pooler: Pooler) -> None:
        self.pooler = pooler

    def start(self, worker: TpModelWorker, batch: ScheduleBatch) -> Ticket | None:
        """Queue one forward of whole prompts and the pooling of each request's hidden states;
        return the step's ticket.

        None for a batch of another mode, which is not run here. Does not wait.
        """
        if batch.forward_mode is not ForwardMode.EMBED:
            return None
        arrays = StagedArrays(pooled_rows(batch))
        staged = worker.runner.init_batch(batch, arrays)
        hidden, path = worker.runner.forward(staged)
        embeddings = self.pooler(hidden, arrays.arrived)
        return worker.issue(batch, staged, arrays, StepOutput(plan_rows(batch), path, embeddings=embeddings))
