"""Draft trees by the native kernels; they run on the calling thread, except for very many
requests."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.native import Engine


class Trees:
    """Implements the kernel table's entries for draft trees by methods of the same names, on one
    engine. Results are written to arguments. Tensors that the kernels do not read (other dtypes,
    gaps) go to the reference."""

    def __init__(self, engine: Engine) -> None:
        self._reference = KernelTable()
        names = "tree_expand", "tree_build", "tree_place", "tree_walk"
        self._expand, self._build, self._place, self._walk = (engine.kernel(name).bind() for name in names)

    @implements()
    def tree_expand(
        self,
        tokens: Tensor,
        scores: Tensor,
        parents: Tensor | None,
        chances: Tensor | None,
        first: int,
        records: Tensor,
        sums: Tensor,
        beams: Tensor,
        reached: Tensor,
    ) -> None:
        """Implement `KernelTable.tree_expand`: record the candidates `tokens` and `scores` [B *
        beams, w] of one depth in `records` and `sums` from number `first` on, and write the w best
        of each request to `beams` int32 [3, B, w] (token, the beam it grew from, its record) and
        their sums to `reached`. `chances`: sums of the beams so far, added to the scores. `parents`
        and `chances` None: all candidates follow the root."""
        before = () if parents is None or chances is None else (parents, chances)
        if not _has_rows(tokens, scores) or not _is_whole(*before, records, sums, beams, reached):
            self._reference.tree_expand(tokens, scores, parents, chances, first, records, sums, beams, reached)
            return
        requests, width = reached.shape
        self._expand(
            tokens=tokens.data_ptr(),
            tokens_stride=tokens.stride(0),
            scores=scores.data_ptr(),
            scores_stride=scores.stride(0),
            parents=before[0].data_ptr() if before else 0,
            chances=before[1].data_ptr() if before else 0,
            first=first,
            records=records.data_ptr(),
            sums=sums.data_ptr(),
            beams=beams.data_ptr(),
            reached=reached.data_ptr(),
            requests=requests,
            leaders=tokens.shape[0] // max(requests, 1) * width,
            width=width,
            most=sums.shape[1],
        )

    @implements()
    def tree_build(self, records: Tensor, sums: Tensor, depths: Tensor, tree: Tensor) -> None:
        """Implement `KernelTable.tree_build`: write the N - 1 records with the largest sums, in the
        order of records, to `tree` int32 [3, B, N - 1] as nodes: token (-1: its sum is -inf),
        parent's node (0: the root), depth."""
        if not _is_whole(records, sums, depths, tree):
            self._reference.tree_build(records, sums, depths, tree)
            return
        requests, most = sums.shape
        self._build(
            records=records.data_ptr(),
            sums=sums.data_ptr(),
            depths=depths.data_ptr(),
            tree=tree.data_ptr(),
            requests=requests,
            most=most,
            nodes=tree.shape[2],
        )

    @implements()
    def tree_place(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, slots: Tensor, trees: Tensor, proposals: Tensor
    ) -> None:
        """Implement `KernelTable.tree_place`: store the trees that `tree_build` wrote (tokens,
        parents, depths [B, N - 1]) at their request slots `slots` [B]: tokens in `proposals` [S, N
        - 1], and in `trees` [4, S, N] each node's parent, depth minus number, ancestors as bits,
        and visibility mask."""
        if not _has_rows(tokens, parents, depths) or not _is_whole(slots, trees, proposals):
            self._reference.tree_place(tokens, parents, depths, slots, trees, proposals)
            return
        self._place(
            tokens=tokens.data_ptr(),
            tokens_stride=tokens.stride(0),
            parents=parents.data_ptr(),
            parents_stride=parents.stride(0),
            depths=depths.data_ptr(),
            depths_stride=depths.stride(0),
            slots=slots.data_ptr(),
            trees=trees.data_ptr(),
            table=trees.stride(0),
            proposals=proposals.data_ptr(),
            requests=slots.shape[0],
            nodes=trees.shape[2],
        )

    @implements()
    def tree_walk(
        self,
        drawn: Tensor,
        owners: Tensor,
        slots: Tensor,
        limits: Tensor,
        trees: Tensor,
        last: Tensor,
        lengths: Tensor,
        proposals: Tensor,
        path: Tensor,
        runs: Tensor,
    ) -> None:
        """Implement `KernelTable.tree_walk`: find the accepted path of each tree, the nodes equal
        to the tokens `drawn` after their parents. Update `last` and `lengths` at the request slots,
        and write the path's nodes, root first, to `path` int32 [B, steps], and to runs int32 [4,
        B]: numbers of accepted and of verified draft tokens, index of the last node in `path`, new
        length."""
        given = drawn, owners, slots, limits, trees, last, lengths, proposals, path, runs
        if not _is_whole(*given):
            self._reference.tree_walk(*given)
            return
        requests, steps = path.shape
        self._walk(
            drawn=drawn.data_ptr(),
            owners=owners.data_ptr(),
            slots=slots.data_ptr(),
            limits=limits.data_ptr(),
            trees=trees.data_ptr(),
            table=trees.stride(0),
            most=trees.shape[2],
            last=last.data_ptr(),
            lengths=lengths.data_ptr(),
            proposals=proposals.data_ptr(),
            proposals_stride=proposals.shape[1],
            path=path.data_ptr(),
            runs=runs.data_ptr(),
            requests=requests,
            width=drawn.shape[0] // max(requests, 1),
            steps=steps,
        )


_TYPES = torch.int32, torch.float32


def _has_rows(*tensors: Tensor) -> bool:
    """Return whether all tensors are int32 or float32 with contiguous rows, at any row stride; for
    tensors of 2 dimensions."""
    return all(each.dtype in _TYPES and (each.stride(1) == 1 or each.shape[1] == 1) for each in tensors)


def _is_whole(*tensors: Tensor) -> bool:
    """Return whether the tensors are contiguous int32 or float32."""
    return all(each.dtype in _TYPES and each.is_contiguous() for each in tensors)
