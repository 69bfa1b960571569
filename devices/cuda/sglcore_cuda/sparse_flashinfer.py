"""FlashInfer's choice of the largest scores for the kernel table's `index_top_k`. What it chooses
it gives in no order, so its places in the text say which."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.kernels.table import Limited
from sglcore_cuda.capability import Capability

UPGRADE = "pip install -U 'sglcore-cuda[flashinfer]'"
try:
    import flashinfer  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: {UPGRADE}") from error

MAJORS = (8, 9, 10)
"""The major compute capabilities of GPUs that have the 128 KiB of shared memory which its kernel
takes: those with minor 0 of the first."""
MOST = 2048
"""Scores that its kernel chooses at most where a graph may hold it."""
LARGEST_PAGE = 1 << 30
SMALLER_PLACE = 1
"""Its `TopKTieBreak`: of equals at the bound the first."""
NEEDED = frozenset({"row_to_batch", "tie_break", "dsa_graph_safe", "page_size", "out_raw_indices"})


def entry(capability: Capability) -> Limited:
    """`index_top_k` on a GPU of this capability; raises `Unavailable` for others, and of a library
    that is too old."""
    major, minor = capability.version
    if major not in MAJORS or (major == MAJORS[0] and minor):
        raise Unavailable(f"it is for GPUs of compute capability 8.0, 9.0 and 10, this one is {capability}")
    known = vars(flashinfer).get("top_k_page_table_transform")
    missing = sorted(NEEDED - (inspect.signature(known).parameters.keys() if known is not None else set()))
    if missing:
        raise Unavailable(f"its top_k_page_table_transform has no {', '.join(missing)}: {UPGRADE}")
    return Limited(index_top_k, takes)


def takes(logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int) -> str:
    """As `Limited` says: by pages and how many are chosen."""
    if rows_per_page > LARGEST_PAGE or rows_per_page & (rows_per_page - 1):
        return f"it takes pages of 1, 2, 4, ... rows, not of {rows_per_page}"
    return "" if k <= MOST else f"it chooses {MOST} rows at most, not {k}"


def index_top_k(logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int) -> Tensor:
    """As the table says. Sizes alone decide what is launched, so a graph may hold it; waits for
    nothing."""
    places = torch.empty(logits.shape[0], k, dtype=torch.int32, device=logits.device)
    if not logits.shape[0]:
        return places
    found = flashinfer.top_k_page_table_transform(
        logits,
        table,
        lens,
        k,
        row_to_batch=token_slots,
        tie_break=SMALLER_PLACE,
        dsa_graph_safe=True,
        page_size=rows_per_page,
        out_raw_indices=places,
    )
    last = torch.iinfo(torch.int32).max
    return found.gather(1, places.masked_fill(places < 0, last).argsort(dim=1))
