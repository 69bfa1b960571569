"""Mutants of devices that behave differently from their facts.

Facts that no device may have at all are in `mutants_package.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.conformance.mutant import Change, Mutant, become, in_runtime
from sglcore.conformance.mutants.mutants_worker import Changed
from sglcore.device.facts import Facts
from sglcore.runtime.kernels.table import KernelTable
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch


def coarse(table: KernelTable) -> KernelTable:
    """Return a table with norms that keep three bits of every 16-bit result, as on a chip that has
    no such type; wider results stay."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _coarse(table.rms_norm(x, weight, eps))

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = table.add_rms_norm(x, residual, weight, eps)
        return _coarse(normed), total

    return table.replace(rms_norm=rms_norm, add_rms_norm=add_rms_norm)


def _coarse(x: Tensor) -> Tensor:
    if x.itemsize > 2:
        return x
    fraction, exponent = x.float().frexp()
    return ((fraction * 8).round() / 8).ldexp(exponent).to(x.dtype)


def widens_ids(table: KernelTable) -> KernelTable:
    """Return a table with an embedding that converts its ids to 64 bits first."""
    return table.replace(embedding=lambda ids, weight: table.embedding(ids.long(), weight))


def sums_wide(runner: Any) -> Any:
    """Make a runner add in 64 bits when it samples with top-p, in place, and return it."""
    runner.is_narrow = False
    return runner


def says_narrow(facts: Facts) -> Facts:
    """Return the facts with `index_dtype` "int32"."""
    return replace(facts, index_dtype="int32")


def late_copies(runner: Any) -> Any:
    """Make the decode inputs of a runner late, in place, and return it: each copy to the device has
    what the host held at the copy before."""
    before: list[NDArray[Any]] = []

    def subclass(base: Any) -> type:
        class LateCopies(base):
            __slots__ = ()

            def commit(self) -> None:
                now = self._host.copy()
                before.append(now)
                self._host[:] = before[max(len(before) - 2, 0)]
                super().commit()
                if not self.shares_memory:
                    self._host[:] = now

        return LateCopies

    become(runner.decode_registry.block, subclass)
    return runner


def _batches(change: Change) -> Change:
    """Return a change of a runner, in place: the host lengths (`seq_lens_cpu`) of each batch that
    it prepares become `change(batch)`."""

    def subclass(base: Any) -> type:
        class Staged(base):
            __slots__ = ()

            def init_batch(self, *given: Any) -> Any:
                staged = super().init_batch(*given)
                staged.seq_lens_cpu = change(staged)
                return staged

        return Staged

    return lambda runner: become(runner, subclass)


def reads_lengths(backend: Any) -> Any:
    """Make an attention backend read lengths on the host when it refreshes a plan for a graph
    replay (it fails without them), while its facts say that it does not; in place. Return it."""

    backend.facts = replace(backend.facts, needs_host_lengths=False)

    def subclass(base: Any) -> type:
        class ReadsLengths(base):
            __slots__ = ()

            def refresh(self, plan: Any, batch: Any) -> Any:
                assert batch.seq_lens_cpu.min() > 0
                return super().refresh(plan, batch)

        return ReadsLengths

    return become(backend, subclass)


def reads_a_copy(table: KernelTable) -> KernelTable:
    """Return a table with a `copy_rows` that reads zeros in place of rows in host memory, as if
    these had not been written yet."""
    before: list[Tensor] = []

    def copy_rows(source: Tensor, target: Tensor, loads: Tensor, counts: Tensor) -> None:
        if source.is_cpu:
            before.append(torch.zeros_like(source, pin_memory=source.is_pinned()))
            source = before[-1]
        table.copy_rows(source, target, loads, counts)

    return table.replace(copy_rows=copy_rows)


class RefusesMixed(Changed):
    """A worker that fails for a step with both prefill and decode requests."""

    def change(self, batch: ScheduleBatch) -> None:
        """Raise RuntimeError for a batch of mode MIXED; leave others as they are."""
        if batch.forward_mode is ForwardMode.MIXED:
            raise RuntimeError("this device runs prompts alone")


COARSE = in_runtime("coarse", "It declares 16-bit dtypes, but keeps three bits of their values.", kernels=coarse)
WIDENS_IDS = in_runtime(
    "wide ids", "Its indices have 32 bits, but a kernel gets 64-bit ids.", says_narrow, kernels=widens_ids
)
SUMS_WIDE = in_runtime(
    "wide sums", "Its integers have 32 bits, but top-p adds in 64 bits.", says_narrow, runner=sums_wide
)
LATE_COPIES = in_runtime(
    "late copies", "Copies are declared to be ordered with the work of a stream, but arrive late.", runner=late_copies
)
LOSES_LENGTHS = in_runtime(
    "loses lengths",
    "Lengths must be on the host, but batches have none there.",
    lambda facts: replace(facts, needs_host_lengths=True),
    runner=_batches(lambda staged: None),
)
OLD_LENGTHS = in_runtime(
    "old lengths",
    "Lengths must be on the host, but the lengths there are from the previous step.",
    lambda facts: replace(facts, needs_host_lengths=True),
    runner=_batches(lambda staged: staged.seq_lens_cpu - 1),
)
READS_A_COPY = in_runtime(
    "reads a copy",
    "Kernels are declared to reach pinned memory, but read old values from it.",
    lambda facts: replace(facts, reaches_pinned_memory=True),
    kernels=reads_a_copy,
)
READS_LENGTHS = in_runtime(
    "reads lengths",
    "Lengths need not be on the host, but attention reads them there.",
    lambda facts: replace(facts, needs_host_lengths=False),
    attention=reads_lengths,
)
REFUSES_MIXED = Mutant(
    name="refuses mixed",
    says="Mixed batches are allowed, but fail.",
    steps=MappingProxyType({"worker": RefusesMixed}),
    needs=frozenset({"mixed_batches"}),
)
