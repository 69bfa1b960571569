"""Broken torch devices: defects in the runtime's parts, planted by the bring-up, whatever attention
and graphs a device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglcore.conformance.mutant import become, in_runtime
from sglcore.runtime.buffer_registry import FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable


def pads_nothing(base: Any) -> type:
    """Return a subclass of the buffer registry class `base` in which padding rows keep what an
    older batch left in them."""

    class PadsNothing(base):
        __slots__ = ()

        def fill_from(self, batch: ForwardBatch, ctx: FillContext) -> Any:
            real = FillContext(ctx.raw_bs, ctx.raw_bs, ctx.raw_num_tokens, ctx.raw_num_tokens)
            return super().fill_from(batch, real if ctx.raw_bs else ctx)

    return PadsNothing


def stages_once(base: Any) -> type:
    """Return a subclass of the buffer registry class `base` that uses the request slots of the
    first batch for every batch."""
    first: list[Any] = []

    class StagesOnce(base):
        __slots__ = ()

        def stage_all(self, batch: Any) -> Any:
            found, slots = super().stage_all(batch), self.input_buffer("req_pool_indices").host
            if first:
                slots[:] = first[0]
            first.append(slots.copy())
            return found

    return StagesOnce


def rows_mix(table: KernelTable) -> KernelTable:
    """Return a table with norms that add 0 times the mean of all rows, so that NaN in one row
    reaches the others."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = table.rms_norm(x, weight, eps)
        return normed + 0 * normed.mean(dim=0, keepdim=True)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = table.add_rms_norm(x, residual, weight, eps)
        return normed + 0 * normed.mean(dim=0, keepdim=True), total

    return table.replace(rms_norm=rms_norm, add_rms_norm=add_rms_norm)


def sharing() -> Callable[[Any], Any]:
    """Return a change of attention backends, in place, after which each of them reads the KV pool
    of the one that was changed last."""
    latest: list[Any] = []

    def subclass(base: Any) -> type:
        class ReadsLatest(base):
            __slots__ = ()

            def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any) -> Tensor:
                self.token_to_kv_pool = latest[-1]
                return super().forward(q, k, v, layer, batch)

        return ReadsLatest

    def change(backend: Any) -> Any:
        latest.append(backend.token_to_kv_pool)
        return become(backend, subclass)

    return change


def broken_registries(subclass: Callable[[Any], type]) -> Callable[[Any], Any]:
    """Return a change of a runner, in place, that makes both its buffer registries instances of
    `subclass(their class)`."""

    def change(runner: Any) -> Any:
        for registry in (runner.decode_registry, runner.prefill_registry):
            become(registry, subclass)
        return runner

    return change


PADS_NOTHING = in_runtime(
    "padding not filled",
    "Padding rows keep what an older batch left in them.",
    runner=broken_registries(pads_nothing),
)
STAGES_ONCE = in_runtime(
    "inputs staged once",
    "A field of the first batch is used for every batch.",
    runner=broken_registries(stages_once),
)
ROWS_MIX = in_runtime("rows mix", "Garbage in a padding row reaches the others.", kernels=rows_mix)
SHARES_POOLS = in_runtime(
    "latest pools", "Every runner of the process uses the pools of the one that was made last.", attention=sharing()
)
