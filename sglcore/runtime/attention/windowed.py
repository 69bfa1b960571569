"""Attention of models that free the KV pages outside the sliding window.

Sliding-window layers have one backend, the other layers another. Attention depends only on
differences of positions. In a sliding-window layer a request can therefore begin at the first page
that it still has: these layers see fewer tokens, and have a page table and KV slots of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglcore.runtime.attention.contract import (
    AttentionBackend,
    AttentionFacts,
    AttentionPlan,
    AttentionShape,
    Bucket,
    HostUpdate,
)
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.batch_field import Split, specs

if TYPE_CHECKING:
    from collections.abc import Collection

    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.memory.pools import KVPool, ReqToTokenPool, TokenToKVPool


@dataclass(slots=True)
class WindowedPlan(AttentionPlan):
    """The plans of both backends, and the batch as sliding-window layers see it.

    `full` is None if every layer has a window; `view` is None in a captured plan before its first
    `refresh`.
    """

    full: AttentionPlan | None
    window: AttentionPlan
    view: ForwardBatch | None = None


class WindowedAttention(AttentionBackend[WindowedPlan]):
    """The backend of models with a pool of window pages: it calls one backend for sliding-window
    layers and another for the rest.

    It has only the features that both have.
    """

    def __init__(
        self,
        shape: AttentionShape,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: KVPool,
        window: AttentionBackend[Any],
        full: AttentionBackend[Any] | None,
        windowed: Collection[int],
    ) -> None:
        """`window` attends in the layers with ids in `windowed`, with a page table and a pool of
        its own.

        `full` attends in the other layers, over the table and the pool given here (None: there are
        no other layers). `shape` is the shape of the whole model.
        """
        self.window, self.full, self._windowed = window, full, frozenset(windowed)
        self.facts = _common([part.facts for part in self.parts], token_to_kv_pool.layout)
        super().__init__(shape, req_to_token_pool, token_to_kv_pool, window.kernels, window.hisparse)
        self.takes_stored = all(part.takes_stored for part in self.parts)

    @property
    def parts(self) -> tuple[AttentionBackend[Any], ...]:
        """The backend of full-attention layers, if any, and that of sliding-window layers."""
        return (self.window,) if self.full is None else (self.full, self.window)

    @property
    def generation(self) -> int:
        """The sum of both pools' generations; neither ever decreases."""
        return self.token_to_kv_pool.generation + self.window.generation

    def cells_of(self, layer: Attention, batch: ForwardBatch) -> tuple[TokenToKVPool, Tensor | None]:
        """Implements `AttentionBackend.cells_of`: pool and KV slots of windows for sliding-window
        layers.
        """
        if layer.layer_id in self._windowed:
            return self.window.token_to_kv_pool, batch.window_cache_loc
        return super().cells_of(layer, batch)

    def rows_of(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Implements `AttentionBackend.rows_of`: the pairs (tensor, rows written) of the
        full-attention backend, if any, then of the window backend."""
        return [rows for part in self.parts for rows in part.rows_of(batch)]

    def plan(self, batch: ForwardBatch) -> WindowedPlan:
        """Implements `AttentionBackend.plan` by a plan of each backend."""
        view = window_view(batch)
        full = None if self.full is None else self.full.plan(batch)
        return WindowedPlan(self, self.generation, full, self.window.plan(view), view)

    def capture_plan(self, bucket: Bucket) -> WindowedPlan:
        """Implements `AttentionBackend.capture_plan` by a plan of each backend."""
        full = None if self.full is None else self.full.capture_plan(bucket)
        return WindowedPlan(self, self.generation, full, self.window.capture_plan(bucket))

    def refresh(self, plan: WindowedPlan, batch: ForwardBatch) -> HostUpdate | None:
        """Implements `AttentionBackend.refresh` for both plans. Raises TypeError if both return a
        graph update: a replay takes one.
        """
        plan.view = window_view(batch)
        update = self.window.refresh(plan.window, plan.view)
        if self.full is None or plan.full is None:
            return update
        of_full = self.full.refresh(plan.full, batch)
        if update is not None and of_full is not None:
            raise TypeError(f"{type(self.full).__name__} and {type(self.window).__name__} both update a captured graph")
        return update or of_full

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: WindowedPlan) -> Tensor:
        """Implements `AttentionBackend.attend` by the backend of the layer's kind: q [T, heads *
        head_dim] to the same shape.
        """
        if layer.layer_id in self._windowed:
            assert plan.view is not None
            return self.window.attend(q, layer, plan.view, plan.window)
        assert self.full is not None
        return self.full.attend(q, layer, batch, plan.full)


def window_view(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch as sliding-window layers see it.

    Tokens before the first window page are left out: each field has the value that it declares as
    `in_window`. Shares tensors and has no plan.
    """
    assert batch.window_seq_lens is not None and batch.window_positions is not None
    return _view_maker(type(batch))(batch)


@cache
def _view_maker(batch_type: type[ForwardBatch]) -> Callable[[ForwardBatch], ForwardBatch]:
    """Return the function that makes the view of a batch of this type. It is generated and compiled
    like the methods of a dataclass, because a view is made at every step.
    """
    declared = specs(batch_type)
    only_here = {spec.in_window for spec in declared}
    functions = {spec.name: spec.in_window for spec in declared if callable(spec.in_window)}
    values = list[str]()
    for spec in declared:
        if spec.split is Split.FRESH or spec.name in only_here:
            values.append("None")
        elif spec.name in functions:
            values.append(f"{spec.name}(batch)")
        else:
            values.append(f"batch.{spec.in_window or spec.name}")
    scope: dict[str, Any] = {"batch_type": batch_type, **functions}
    exec(f"def view(batch):\n return batch_type({', '.join(values)})", scope)
    return scope["view"]


def _common(facts: list[AttentionFacts], layout: str) -> AttentionFacts:
    """Return facts for pools of one layout, with the features that all backends have.

    `takes_stored` and `takes_bounds` if all have it, `needs_host_lengths` if one does,
    `masks_bounds` if none needs exact lengths. Other fields do not restrict: each backend was
    selected for its own layers.
    """
    features = frozenset.intersection(*(each.features for each in facts))
    return AttentionFacts(
        features=features,
        takes_stored=all(each.takes_stored for each in facts),
        layouts=(layout,),
        needs_host_lengths=any(each.needs_host_lengths for each in facts),
        masks_bounds=not any(each.needs_exact_lengths for each in facts),
        takes_bounds=all(each.takes_bounds for each in facts),
    )
