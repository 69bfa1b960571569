"""FlashMLA's sparse attention for the kernel table's `sparse_mqa`: attention over listed KV entries
in bfloat16.

The library reads one pool per call. With two lists there are two calls; their results are merged
by the log-sum-exp that each call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.table import Limited, Trial
from sglcore_cuda.capability import Capability

try:
    import flash_mla  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: pip install --no-deps sgl-flash-mla") from error

HOPPER, BLACKWELL = 9, 10
"""The supported major compute capabilities."""
HEADS = (64, 128)
SIZES = (512, 576)
VALUES = 512
SHORT = 512
"""Entry size of its newer kernels, on `BLACKWELL`; the older kernels support the other sizes."""
STEP = 128
"""Its kernels process a list in steps of this number of entries."""


def entry(capability: Capability) -> Limited:
    """Return `sparse_mqa` with its limits, for a GPU of this capability, as a candidate for the
    kernel table. Raises `Unavailable` if the library has no kernels for the GPU."""
    major = capability.version[0]
    if major not in (HOPPER, BLACKWELL):
        raise Unavailable(f"it needs a GPU of compute capability 9.0 or 10, this one is {capability}")
    function = partial(sparse_mqa, is_legacy=_chooses_legacy(major))
    return Limited(function, takes, Trial(partial(_try, function)))


def _chooses_legacy(major: int) -> bool | None:
    """Return whether calls for rows of `SHORT` elements take the older of two sets of kernels.

    None: the library has one set, as DeepSeek's own build. Raises `Unavailable` for a build with
    two that lacks the older ones, which all other rows need.
    """
    if "has_legacy" not in vars(flash_mla):
        return None
    if not flash_mla.has_legacy():
        raise Unavailable("it was built without its kernels for rows of 576: pip install --no-deps sgl-flash-mla")
    return major != BLACKWELL


def _try(function: Callable[..., Tensor], q: Tensor, *call: Any) -> Tensor:
    """Run `function` once on the current GPU with one token of zeros, over a list with one entry of
    zeros and padding, and return the result; heads, row size and dtype are those of q, the value
    size that of the call. It raises what the library raises."""
    queries = torch.zeros(1, *q.shape[1:], dtype=q.dtype, device="cuda")
    lists = torch.full((1, STEP + 1), -1, dtype=torch.int32, device="cuda")
    lists[0, 0] = 0
    rows = queries[:, 0].contiguous()
    return function(queries, rows, lists, None, None, None, 1.0, call[-2], None)


def takes(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: Tensor | None,
    more_chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    codec: None,
) -> str:
    """Return why `sparse_mqa` refuses these dtypes, heads or entry sizes; empty if it takes the
    call (see `Limited`)."""
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (q, rows, more_rows) if x is not None)
    if list(dtypes) != ["bfloat16"]:
        return f"it takes queries and rows in bfloat16, not in {' and '.join(dtypes)}"
    heads, size = q.shape[1:]
    if heads not in HEADS:
        return f"it takes {HEADS[0]} or {HEADS[1]} heads, not {heads}"
    if size not in SIZES or value_size != VALUES:
        return f"it takes rows of 512 or 576 elements with values of {VALUES}, not {size} with values of {value_size}"
    return ""


def sparse_mqa(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: Tensor | None,
    more_chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    value_size: int,
    codec: RowCodec | None,
    *,
    is_legacy: bool | None,
) -> Tensor:
    """Implements `KernelTable.sparse_mqa`: q [T, H, D] over the rows listed in chosen [T, W], and
    in `more_chosen` of `more_rows` unless None -> [T, H, 512]. `is_legacy`: rows of `SHORT`
    elements take the older kernels, as all other rows do; None: the library has one set. `codec` is
    not read: rows are plain bfloat16. Launches depend only on sizes, so it can be captured; does
    not wait."""
    if not q.shape[0]:
        return q.new_empty(0, q.shape[1], value_size)
    named = {} if is_legacy is None else {"use_legacy": is_legacy or q.shape[2] != SHORT}

    def attend(pool: Tensor, lists: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        found, _, sums = flash_mla.flash_mla_sparse_fwd(
            q.contiguous(),
            pool.unsqueeze(1),
            _whole(lists),
            scale,
            value_size,
            attn_sink=sink,
            topk_length=_lengths(lists),
            **named,
        )
        return found, sums

    if more_rows is None or more_chosen is None or not more_chosen.shape[1]:
        return attend(rows, chosen, sinks)[0]
    return _merged(attend(rows, chosen, None), attend(more_rows, more_chosen, None), sinks)


def _whole(lists: Tensor) -> Tensor:
    """Return lists int32 [T, W] as contiguous int32 [T, 1, W'], padded at the end with -1 until W'
    is a multiple of 128, at least 128."""
    width = lists.shape[1]
    missing = max(STEP, -(-width // STEP) * STEP) - width
    return F.pad(lists, (0, missing), value=-1).unsqueeze(1) if missing else lists.contiguous().unsqueeze(1)


def _lengths(lists: Tensor) -> Tensor | None:
    """Return int32 [T]: the number of entries of each list that are not padding (-1), at least 1.

    None if the lists fit into one step of 128: then no whole step can be padding.
    """
    return (lists >= 0).sum(1, dtype=torch.int32).clamp(min=1) if lists.shape[1] > STEP else None


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], sinks: Tensor | None) -> Tensor:
    """Merge the results of two lists, each (result [T, H, V], log-sum-exp float32 [T, H]), by their
    shares of all weights, sinks [H] included; return [T, H, V] in the memory of the first result.
    An empty list has log-sum-exp +inf and the result 0."""
    sums = torch.stack((one[1], other[1]))
    sums = sums.masked_fill(sums == torch.inf, -torch.inf)
    total = torch.logsumexp(sums, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    # Without selected entries and sinks, both shares are exp(-inf - 0).
    shares = torch.exp(sums - total.masked_fill(total == -torch.inf, 0)).unsqueeze(-1)
    return one[0].mul_(shares[0]).add_(other[0].mul_(shares[1]))
