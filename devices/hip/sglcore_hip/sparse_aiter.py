"""AITER's attention over listed rows of one pool, for the kernel table's `sparse_mqa`, in half
precision. `DeepseekV4HipRadixBackend` makes such calls.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.kernels.table import Limited, Trial
from sglcore_hip.capability import WIDE_WAVE, Capability

INSTALL = "build AITER from its repository (github.com/ROCm/aiter), which its wheels on the package index precede"
try:
    import aiter.ops.triton.attention.pa_decode_sparse  # pyright: ignore[reportMissingImports]
except (ImportError, OSError) as error:
    raise Unavailable(f"{error}: {INSTALL}") from error

SIZE = 512
"""Elements of a row, which are all values. Its kernels for gfx950 are written for this size."""
WIDEST = 2048
"""Entries of the longest list. Its kernels read the padding of a list too. Chosen, not measured."""
NEEDED = frozenset({"has_invalid"})
"""Versions without this parameter give NaN for a part of a list that has only padding."""
DTYPES = (torch.float16, torch.bfloat16)
ADDRESSED = 1 << 31
"""Its kernels number the elements of a pool by int32."""


def entry(capability: Capability) -> Limited:
    """Return `sparse_mqa` for a GPU of this capability. Raises `Unavailable` for other GPUs, and
    for a library that is too old.
    """
    if capability.wave_size != WIDE_WAVE:
        raise Unavailable(f"it needs waves of {WIDE_WAVE}, this GPU has waves of {capability.wave_size}")
    known = vars(aiter.ops.triton.attention.pa_decode_sparse).get("pa_decode_sparse")
    missing = sorted(NEEDED - (inspect.signature(known).parameters.keys() if known is not None else set()))
    if missing:
        raise Unavailable(f"its pa_decode_sparse has no {', '.join(missing)}: {INSTALL}")
    return Limited(sparse_mqa, takes, Trial(_try))


def _try(q: Tensor, rows: Tensor, *call: Any) -> Tensor:
    """Attend with one token of zeros to one row of ones among padding. Raises RuntimeError unless
    row and sink have equal shares.
    """
    queries = torch.zeros(1, *q.shape[1:], dtype=q.dtype, device="cuda")
    sinks = torch.zeros(q.shape[1], device="cuda")
    lists = torch.full((1, 1 + WIDEST // 4), -1, dtype=torch.int32, device="cuda")
    lists[0, 0] = 0
    found = sparse_mqa(queries, torch.ones_like(queries[:, 0]), lists, None, None, sinks, 1.0, SIZE, None)
    if not (found == 0.5).all():
        raise RuntimeError("a row and a sink with equal scores do not have equal shares")
    return found


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
    """Return why `sparse_mqa` refuses these dtypes or sizes; empty if it takes the call (see
    `Limited`)."""
    if more_rows is not None or sinks is None:
        return "it takes one list of one pool, and sinks"
    if q.dtype not in DTYPES or rows.dtype != q.dtype:
        dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in (q, rows))
        return f"it takes queries and rows in one half precision, not in {' and '.join(dtypes)}"
    if q.shape[2] != SIZE or value_size != SIZE:
        return f"it takes rows of {SIZE} elements that are all values, not {q.shape[2]} with values of {value_size}"
    width = chosen.shape[1]
    return "" if width <= WIDEST else f"it reads the padding of lists too, and takes {WIDEST} entries, not {width}"


def sparse_mqa(
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    more_rows: None,
    more_chosen: None,
    sinks: Tensor,
    scale: float,
    value_size: int,
    codec: None,
) -> Tensor:
    """Implements `KernelTable.sparse_mqa`. Launches depend only on sizes, so it can be captured;
    does not wait. Raises ConfigError for a pool with more elements than the library can number.
    """
    tokens, width = chosen.shape
    if not tokens or not width:
        return q.new_zeros(tokens, q.shape[1], value_size)
    if rows.shape[0] * rows.stride(0) >= ADDRESSED:
        raise ConfigError(
            f"a layer's pool has {rows.shape[0]} rows of {rows.stride(0)} elements, and AITER numbers {ADDRESSED}",
            remedy="--attention-backend compressed, or a smaller --kv-cache-memory",
        )
    starts = torch.arange(0, tokens * width + 1, width, dtype=torch.int32, device=q.device)
    return aiter.ops.triton.attention.pa_decode_sparse.pa_decode_sparse(
        q.contiguous(), rows, chosen.reshape(-1), starts, sinks, scale
    )
