"""Parts for laws of two-batch overlap: collectives in flight, models that use them, and steps of
every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import read_config
from sglcore.models.single_steps import Steps
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.overlap.micro_batches import Halves
from sglcore.runtime.parallel.expert_dispatch import RaggedDispatcher
from sglcore.runtime.parallel.process_group import Group
from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.step.micro_batch_cut import CutTerms, Staggers
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.topology import Communication, Place, Topology

BOUND = 3.6e-14
"""Tolerance of hidden states in float64."""
STEPS: tuple[tuple[dict[int, list[int]], ForwardMode], ...] = (
    ({1: [3, 9, 4, 4, 11, 5, 6], 2: [8, 2]}, ForwardMode.EXTEND),
    ({3: [7], 1: [1, 2], 2: [5, 5, 31]}, ForwardMode.MIXED),
    ({1: [6], 2: [40], 3: [12]}, ForwardMode.DECODE),
    ({3: [9, 8, 7, 6, 5, 4, 3, 2, 1]}, ForwardMode.EXTEND),
    ({2: [30], 3: [14]}, ForwardMode.DECODE),
)
"""Prefill steps, a mixed step of chunks and single tokens, and decode steps."""


class Reused(RuntimeError):
    """A buffer was written while a collective used it."""


class InFlight:
    """An all-reduce in flight: its tensor holds NaN until `wait`, and must not be written
    before."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._sum = x, x.clone()
        x.fill_(torch.nan)

    def wait(self) -> None:
        if not self._x.isnan().all():
            raise Reused("a buffer was written while a sum was under way in it")
        self._x.copy_(self._sum)


class StandIn(Group):
    """A group of one rank with all-reduces that are in flight until they are waited for."""

    def __init__(self) -> None:
        none: Any = None
        super().__init__(none, 0, 1, none)
        self.sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        run: Any = lambda later: InFlight(x) if later else None  # noqa: E731
        return self._run(run, x)


def stand_in_groups() -> Groups:
    place, group = Place(0, Topology(1), "", 0, 1), StandIn()
    return Groups(group, place, Communication("gloo"), group, group, RaggedDispatcher, 0)


def loaded(folder: Path, groups: Groups, dtype: torch.dtype = torch.float64) -> Any:
    return load_model(folder, read_config(folder), kernels=KernelTable(), device="cpu", dtype=dtype, groups=groups)


class Cuts(Halves):
    """Cuts each batch after the fraction `part` of its tokens, even inside a request; decode
    batches between requests."""

    part = 0.5

    def cut_of(self, batch: ForwardBatch) -> int | None:
        return round(self.part * batch.num_tokens)


def like(backend: AttentionBackend[Any]) -> AttentionBackend[Any]:
    """Make another backend over the same pools."""
    return type(backend)(backend.shape, backend.req_to_token_pool, backend.token_to_kv_pool, backend.kernels)


def poisoned(model: Any) -> Steps:
    """Fill the KV pool of a model with NaN, so that reads of unwritten KV slots show."""
    steps, cells = Steps(model), 0
    for pair in steps.runner.attn_backend.token_to_kv_pool.__dict__.values():
        for storage in _tensors(pair):
            storage.fill_(torch.nan)
            cells += 1
    assert cells
    return steps


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def in_halves(model: Any, stagger: int, part: float, make: Callable[..., Halves] = Cuts) -> Steps:
    """Make steps that run as two micro-batches."""
    steps = poisoned(model)
    backend = steps.runner.attn_backend
    steps.runner.halves = halves = make((backend, like(backend)), CutTerms(staggers=Staggers(stagger, stagger)))
    halves.__class__ = type("CutsHere", (type(halves),), {"part": part})
    return steps


def all_steps(steps: Steps) -> list[Tensor]:
    """Return the hidden states of each of `STEPS`, run one after the other."""
    found = []
    for tokens, mode in STEPS:
        if mode is ForwardMode.DECODE:
            for slot, ids in tokens.items():
                steps.runner.token_table.last[slot] = ids[0]
        found.append(steps.hidden(tokens, mode))
    return found


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference; NaN counts as infinity."""
    return max(float((one - other).abs().nan_to_num(torch.inf).max()) for one, other in zip(found, wanted, strict=True))


def halves_of(steps: Steps) -> Halves:
    """Return what runs the micro-batches of `in_halves`."""
    found = steps.runner.halves
    assert isinstance(found, Halves)
    return found
