"""FlashInfer 0.7.2: top-k of scores as a CPU reference with the real signature.

Sources of the preconditions: flashinfer/topk.py and csrc/topk.cu (flashinfer-ai/flashinfer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglcore_sim.vendors.paged import require, together

CALL = "flashinfer.top_k_page_table_transform"
SCORES = (torch.float32, torch.float16, torch.bfloat16)
MOST_CHOSEN = 2048


def top_k_page_table_transform(
    sim: Any,
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """Return the cache rows of the k largest scores of each row, int32 [rows, k], filled up with
    -1. `input` [rows, N] has the scores; only the first `lengths[row]` of a row are read. A
    position's cache row is its page in `src_page_table` (by row, or by `row_to_batch`) times
    `page_size` plus its place in the page. The library leaves the order open; here the last
    position comes first. Among equal scores at the limit the last positions are taken, or the first
    if `tie_break` is 1; `deterministic` is ignored. `out` is written and returned;
    `out_raw_indices` gets the positions. Wrong arguments raise ValueError, and so does a `k` above
    2048 with `dsa_graph_safe`; row starts raise NotImplementedError."""
    if row_starts is not None or page_table_row_starts is not None:
        raise NotImplementedError("this reference takes whole rows only")
    rows = len(input)
    out = torch.empty(rows, k, dtype=torch.int32, device=input.device) if out is None else out
    outs = [x for x in (out, out_raw_indices) if x is not None]
    ints = [x for x in (src_page_table, lengths, row_to_batch) if x is not None]
    wanted = {
        "everything on one device": together(input, *ints, *outs),
        "scores in float32 or half precision": input.dtype in SCORES and input.dim() == 2,
        "tables, lengths and rows of int32": all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in ints),
        "lengths and batches [rows]": all(x.shape == (rows,) for x in ints[1:]),
        "a table for each row, or for each batch": row_to_batch is not None or len(src_page_table) == rows,
        "contiguous int32 outputs [rows, k]": all(
            x.dtype == torch.int32 and x.shape == (rows, k) and x.is_contiguous() for x in outs
        ),
        "scores side by side": input.stride(-1) == 1,
        "pages of a power of two": 0 < page_size <= 1 << 30 and not page_size & (page_size - 1),
        f"a k of 1 to {MOST_CHOSEN} in a graph": k > 0 and (not dsa_graph_safe or k <= MOST_CHOSEN),
        "128 KiB of shared memory, in a graph": not dsa_graph_safe or _has_wide_shared_memory(sim),
    }
    require(CALL, wanted, ValueError)

    def kernel() -> None:
        scores, table, lens = (sim.host_view(x) for x in (input, src_page_table, lengths))
        owners = torch.arange(rows) if row_to_batch is None else sim.host_view(row_to_batch)
        for row in range(rows):
            places = _largest(scores[row, : int(lens[row])].float(), k, tie_break).flip(0)
            pages = table[int(owners[row]), places // page_size]
            found = pages * page_size + places % page_size
            for view, part in zip(outs, (found, places), strict=False):
                sim.host_view(view)[row] = -1
                sim.host_view(view)[row, : len(places)] = part.int()

    sim.launch(CALL, kernel, reads=[input, *ints], writes=outs)
    return out


def _largest(scores: Tensor, k: int, tie_break: int) -> Tensor:
    """Return the positions of the k largest of `scores` [N], ascending; all N if k is larger. Among
    equal scores at the limit the last positions are taken, or the first if `tie_break` is 1."""
    if tie_break == 1:
        return scores.sort(descending=True, stable=True)[1][:k].sort()[0]
    return (len(scores) - 1 - scores.flip(0).sort(descending=True, stable=True)[1][:k]).sort()[0]


def _has_wide_shared_memory(sim: Any) -> bool:
    return sim.kind.properties["shared_memory_per_multiprocessor"] >= 128 << 10
