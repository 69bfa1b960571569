"""Placement and acceptance of draft tokens by the native kernels; they run on the calling thread,
except for very many draft tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.native import Engine


class Proposals:
    """Implements the kernel table's entries that verification steps use by methods of the same
    names, on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._reference = KernelTable()
        self._place, self._accept = (engine.kernel(name).bind() for name in ("place_proposals", "accept_proposals"))

    @implements()
    def place_proposals(
        self,
        last: Tensor,
        lengths: Tensor,
        proposals: Tensor,
        slots: Tensor,
        limits: Tensor,
        nodes: Tensor | None,
        ids: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        owners: Tensor,
    ) -> None:
        """Implement `KernelTable.place_proposals`: write the tokens that a verification step runs
        to `ids`, `positions`, `seq_lens` and `owners` [B * N], for B requests at request slots
        `slots` with N tokens each (the last token and N - 1 draft tokens), from the tables by slot
        `last`, `lengths` and `proposals`. A token past its request's `limits` (KV slots) or `nodes`
        (None: no such limit) gets position 0 and owner 0. Tensors that are not contiguous int32 go
        to the reference."""
        given = (
            last,
            lengths,
            proposals,
            slots,
            limits,
            *(() if nodes is None else (nodes,)),
            ids,
            positions,
            seq_lens,
            owners,
        )
        if not _are_plain(given):
            self._reference.place_proposals(
                last, lengths, proposals, slots, limits, nodes, ids, positions, seq_lens, owners
            )
            return
        requests = slots.shape[0]
        self._place(
            last=last.data_ptr(),
            lengths=lengths.data_ptr(),
            proposals=proposals.data_ptr(),
            proposals_stride=proposals.shape[1],
            slots=slots.data_ptr(),
            limits=limits.data_ptr(),
            nodes=0 if nodes is None else nodes.data_ptr(),
            ids=ids.data_ptr(),
            positions=positions.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            owners=owners.data_ptr(),
            requests=requests,
            width=ids.shape[0] // max(requests, 1),
        )

    @implements()
    def accept_proposals(
        self,
        drawn: Tensor,
        owners: Tensor,
        slots: Tensor,
        limits: Tensor,
        last: Tensor,
        lengths: Tensor,
        proposals: Tensor,
        runs: Tensor,
    ) -> None:
        """Implement `KernelTable.accept_proposals`: compare the draft tokens of B requests with
        `drawn` [B * N] up to the first difference; update `last` and `lengths` at their request
        slots, and write runs [4, B]: numbers of accepted and of verified draft tokens, row of the
        last accepted token, new length. Tensors that are not contiguous int32 go to the
        reference."""
        given = drawn, owners, slots, limits, last, lengths, proposals, runs
        if not _are_plain(given):
            self._reference.accept_proposals(*given)
            return
        requests = slots.shape[0]
        self._accept(
            drawn=drawn.data_ptr(),
            owners=owners.data_ptr(),
            slots=slots.data_ptr(),
            limits=limits.data_ptr(),
            last=last.data_ptr(),
            lengths=lengths.data_ptr(),
            proposals=proposals.data_ptr(),
            proposals_stride=proposals.shape[1],
            runs=runs.data_ptr(),
            requests=requests,
            width=drawn.shape[0] // max(requests, 1),
        )


def _are_plain(tensors: tuple[Tensor, ...]) -> bool:
    return all(each.dtype is torch.int32 and each.is_contiguous() for each in tensors)
