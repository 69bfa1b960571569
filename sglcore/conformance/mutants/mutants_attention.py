"""Broken attention, for any backend: each defect changes its inputs or its outputs. A defect is a
function from a backend's class to a subclass, or from a backend to its replacement; its docstring
is the text of its `Mutant`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.conformance.mutant import Mutant, become, in_runtime, words_of
from sglcore.runtime.attention.contract import AttentionPlan, HostUpdate
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.forward_batch import ForwardBatch


def shortened(batch: ForwardBatch) -> ForwardBatch:
    """Return a copy of the batch with `seq_lens`, the number of KV slots that each row sees, one
    lower but at least 1, on the device and on the host."""
    assert batch.seq_lens_cpu is not None
    return replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=1), seq_lens_cpu=(batch.seq_lens_cpu - 1).clip(min=1))


def one_key_too_few(base: Any) -> type:
    """A decoding row does not see the token that it has just stored."""

    class OneKeyTooFew(base):
        __slots__ = ()

        def plan(self, batch: ForwardBatch) -> AttentionPlan:
            return super().plan(shortened(batch) if batch.extend_seq_lens_cpu is None else batch)

        def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: Any) -> Tensor:
            return super().attend(q, layer, shortened(batch) if batch.extend_seq_lens_cpu is None else batch, plan)

    return OneKeyTooFew


def with_layer(base: Any, **changes: Any) -> type:
    """Return a subclass of the backend class `base` that attends with `changes` to the attributes
    of a copy of each layer."""

    class WithLayer(base):
        __slots__ = ()

        def attend(self, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
            changed = copy(layer)
            for name, value in changes.items():
                setattr(changed, name, value)
            return super().attend(q, changed, batch, plan)

    return WithLayer


def another_scale(base: Any) -> type:
    """The scale of the layer is not used."""
    return with_layer(base, scaling=1.0)


def sees_every_branch(base: Any) -> type:
    """The visibility mask of draft trees is not used."""

    class SeesEveryBranch(base):
        __slots__ = ()

        def plan(self, batch: ForwardBatch) -> AttentionPlan:
            return super().plan(replace(batch, visible=None))

        def refresh(self, plan: Any, batch: ForwardBatch) -> HostUpdate | None:
            return super().refresh(plan, replace(batch, visible=None))

        def attend(self, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
            return super().attend(q, layer, replace(batch, visible=None), plan)

    return SeesEveryBranch


def forgets_softcap(base: Any) -> type:
    """The softcap of the layer is not used."""
    return with_layer(base, softcap=None)


def forgets_sinks(base: Any) -> type:
    """The sinks of the layer are not used."""
    return with_layer(base, sinks=None)


def values_of_the_row_before(base: Any) -> type:
    """A token's value is that of the row before."""

    class ValuesOfTheRowBefore(base):
        __slots__ = ()

        def attend(self, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
            pool, cells = self.token_to_kv_pool, batch.out_cache_loc
            keys, values = pool.read_cells(layer.layer_id, cells)
            pool.write_cells(layer.layer_id, cells, keys, values.roll(1, 0))
            return super().attend(q, layer, batch, plan)

    return ValuesOfTheRowBefore


def writes_another_page(base: Any) -> type:
    """The last row is also stored one page further, in a page of another request."""

    class WritesAnotherPage(base):
        __slots__ = ()

        def attend(self, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
            out = super().attend(q, layer, batch, plan)
            pool, cell = self.token_to_kv_pool, batch.out_cache_loc[-1:]
            beside = (cell + pool.page_size) % pool.num_cells
            pool.write_cells(layer.layer_id, beside, *pool.read_cells(layer.layer_id, cell))
            return out

    return WritesAnotherPage


def reads_page_zero(base: Any) -> type:
    """The contents of page 0 are multiplied by 0 and added."""

    class ReadsPageZero(base):
        __slots__ = ()

        def attend(self, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
            keys, _ = self.token_to_kv_pool.read_cells(layer.layer_id, batch.out_cache_loc.new_zeros(1))
            return super().attend(q, layer, batch, plan) + 0 * keys.to(q.dtype).mean()

    return ReadsPageZero


def forgets_lengths(base: Any) -> type:
    """A captured plan keeps the lengths of its capture, when every row had one token."""

    class ForgetsLengths(base):
        __slots__ = ()

        def refresh(self, plan: AttentionPlan, batch: ForwardBatch) -> HostUpdate | None:
            batch.seq_lens.fill_(1)
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = np.ones_like(batch.seq_lens_cpu)
            return super().refresh(plan, batch)

    return ForgetsLengths


def believes_bounds(base: Any) -> type:
    """A decode step sees as many tokens as the host says, which may be an upper bound."""

    class BelievesBounds(base):
        __slots__ = ()

        def plan(self, batch: ForwardBatch) -> AttentionPlan:
            return super().plan(_as_on_host(batch))

        def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: Any) -> Tensor:
            return super().attend(q, layer, _as_on_host(batch), plan)

    return BelievesBounds


def _as_on_host(batch: ForwardBatch) -> ForwardBatch:
    """Return a decode batch with the host's lengths also on the device; another batch, or one
    without lengths on the host, is returned as it is."""
    host = batch.seq_lens_cpu
    if host is None or batch.extend_seq_lens_cpu is not None:
        return batch
    given = batch.seq_lens.clone()
    given[: len(host)] = torch.from_numpy(host).to(given.device)
    return replace(batch, seq_lens=given)


class HalfScores(ReferenceAttention):
    """The reference's attention, but scores that it computes itself (for softcap or sinks) are
    rounded to 16 bits."""

    def scores(self, q: Tensor, k: Tensor, layer: Any) -> Tensor:
        """Return the reference's scores as float32, but rounded to the dtype of `q` if that has 16
        bits, otherwise to bfloat16."""
        return super().scores(q, k, layer).to(q.dtype if q.dtype.itemsize == 2 else torch.bfloat16).float()


def half_scores(backend: Any) -> Any:
    """Scores are computed in half precision if a layer has a softcap or sinks."""
    return HalfScores(backend.shape, backend.req_to_token_pool, backend.token_to_kv_pool, backend.kernels)


class Boasts(ReferenceAttention):
    """The reference's attention with facts that name a dtype that does not exist. Only its
    declaration is read."""

    facts = replace(ReferenceAttention.facts, dtypes=("float32", "banana"))


def powers_of_two(base: Any) -> type:
    """It declares every head size, but computes only powers of two correctly."""

    class PowersOfTwo(base):
        __slots__ = ()

        def attend(self, q: Tensor, layer: Any, batch: Any, plan: Any) -> Tensor:
            out = super().attend(q, layer, batch, plan)
            return out if layer.head_dim & (layer.head_dim - 1) == 0 else out.roll(1, -1)

    return PowersOfTwo


def taken_for_cells(base: Any) -> type:
    """Return a subclass of the pool class `base` that gives its storage out as cell-major (one row
    for each KV slot), whatever its layout is."""

    class TakenForCells(base):
        def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
            keys, values = super().kv(layer_id)
            shape = self.num_cells, keys.shape[1], keys.shape[-1]
            return keys.view(shape), values.view(shape)

        def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.kv(layer_id)
            return keys.index_select(0, cells), values.index_select(0, cells)

    return TakenForCells


def takes_all_for_cells(backend: Any) -> Any:
    """It declares every layout, but reads all as cell-major."""
    backend.token_to_kv_pool = become(copy(backend.token_to_kv_pool), taken_for_cells)
    return backend


def _without_host_lengths(backend: Any) -> Any:
    """Make the backend's facts say that it does not need exact lengths on the host, in place, and
    return it."""
    backend.facts = replace(backend.facts, needs_host_lengths=False)
    return backend


def _mutant(subclass: Callable[[Any], type]) -> Mutant:
    def change(backend: Any) -> Any:
        return become(backend, subclass)

    return in_runtime(*words_of(subclass), attention=change)


BELIEVES_BOUNDS = in_runtime(
    *words_of(believes_bounds),
    lambda facts: replace(facts, needs_host_lengths=False),
    attention=lambda backend: become(_without_host_lengths(backend), believes_bounds),
)
FORGETS_LENGTHS = _mutant(forgets_lengths)
POWERS_OF_TWO = _mutant(powers_of_two)
TAKES_ALL_FOR_CELLS = in_runtime(*words_of(takes_all_for_cells), attention=takes_all_for_cells)
HALF_SCORES = in_runtime(*words_of(half_scores), attention=half_scores)
FORGETS_EXTRAS = (_mutant(forgets_softcap), _mutant(forgets_sinks), _mutant(sees_every_branch))
MUTANTS: tuple[Mutant, ...] = (
    _mutant(one_key_too_few),
    _mutant(another_scale),
    _mutant(values_of_the_row_before),
    _mutant(writes_another_page),
    _mutant(reads_page_zero),
    FORGETS_LENGTHS,
)
