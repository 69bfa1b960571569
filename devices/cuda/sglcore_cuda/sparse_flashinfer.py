"""FlashInfer's top-k for the kernel table's `index_top_k`. Its results are unordered, so they are
sorted by their positions in the text."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.kernels.table import Limited, Trial
from sglcore_cuda.capability import Capability

UPGRADE = "pip install -U 'sglcore-cuda[flashinfer]'"
try:
    import flashinfer  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: {UPGRADE}") from error

MAJORS = (8, 9, 10)
"""Major compute capabilities of GPUs with the 128 KiB of shared memory that its kernel needs; of
8.x only 8.0."""
MOST = 2048
"""The largest k of its capturable kernel."""
LARGEST_PAGE = 1 << 30
SMALLER_PLACE = 1
"""Its `TopKTieBreak`: among equal scores at the threshold, take the first."""
NEEDED = frozenset({"row_to_batch", "tie_break", "dsa_graph_safe", "page_size", "out_raw_indices"})


def entry(capability: Capability) -> Limited:
    """Return `index_top_k` with its limits, for a GPU of this capability, as a candidate for the
    kernel table. Raises `Unavailable` for GPUs that MAJORS excludes, and for a library without the
    parameters that are needed."""
    major, minor = capability.version
    if major not in MAJORS or (major == MAJORS[0] and minor):
        raise Unavailable(f"it needs a GPU of compute capability 8.0, 9.0 or 10, this one is {capability}")
    known = vars(flashinfer).get("top_k_page_table_transform")
    missing = sorted(NEEDED - (inspect.signature(known).parameters.keys() if known is not None else set()))
    if missing:
        raise Unavailable(f"its top_k_page_table_transform has no {', '.join(missing)}: {UPGRADE}")
    return Limited(index_top_k, takes, Trial(_try))


def _try(logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int) -> Tensor:
    """Run `index_top_k` once on the current GPU, choosing from one entry of one token, and return
    the result; only page size and k are those of the call. It raises what the library raises."""
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    return index_top_k(torch.zeros(1, 1, device="cuda"), one, one.view(1, 1), one - 1, rows_per_page, k)


def takes(logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int) -> str:
    """Return why `index_top_k` refuses this page size or k; empty if it takes the call (see
    `Limited`)."""
    if rows_per_page > LARGEST_PAGE or rows_per_page & (rows_per_page - 1):
        return f"it takes pages of 1, 2, 4, ... rows, not of {rows_per_page}"
    return "" if k <= MOST else f"it chooses {MOST} rows at most, not {k}"


def index_top_k(logits: Tensor, lens: Tensor, table: Tensor, token_slots: Tensor, rows_per_page: int, k: int) -> Tensor:
    """Implements `KernelTable.index_top_k`: return int32 [T, k], the pool rows of the k largest of
    the first lens[t] scores of logits [T, W], in text order, -1 at the end where there are fewer.
    Launches depend only on sizes, so it can be captured; does not wait."""
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
