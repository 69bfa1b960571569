"""Runs the package's calls on the Meta kernels of the real torch_npu: result shapes, or errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionShape
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from sglcore.worker.schedule_batch import ForwardMode
from sglcore_npu import attention_fused, kernels, sparse

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 128


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Make a tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attend(lengths: list[int] | None) -> Tensor:
    """Attend with three requests of `lengths` new tokens, or of one each."""
    seq_lens = np.array([5, 130, 40], np.int32)
    tokens = sum(lengths) if lengths else len(seq_lens)
    layer = Attention(0, HEADS, KV_HEADS, DIM)
    table = ReqToTokenPool(8, 512, PAGE, "meta")
    cells = MHATokenToKVPool(16, PAGE, ((KV_HEADS, DIM),), torch.bfloat16, "meta")
    shape = AttentionShape(HEADS, ((KV_HEADS, DIM),))
    backend = attention_fused.FusedAttention(shape, table, cells, KernelTable())
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND if lengths else ForwardMode.DECODE,
        batch_size=len(seq_lens),
        num_tokens=tokens,
        req_pool_indices=empty(len(seq_lens), dtype=torch.int32),
        seq_lens=empty(len(seq_lens), dtype=torch.int32),
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=np.array(lengths, np.int32) if lengths else None,
        out_cache_loc=empty(tokens, dtype=torch.int32),
    )
    batch.mark_forward_metadata_ready(backend.plan(batch))
    q, k, v = (empty(tokens, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return backend.forward(q, k, v, layer, batch)


def store() -> None:
    """Store keys and values in the KV cache."""
    cache = empty(256, KV_HEADS, DIM)
    rows = empty(5, KV_HEADS, DIM)
    kernels.store_kv(rows, rows, cache, cache, empty(5, dtype=torch.int32))


def attend_chosen() -> Tensor:
    """Attend with seven tokens over eleven latent entries each."""
    rows, chosen = empty(9 * PAGE, 576), empty(7, 11, dtype=torch.int32)
    return sparse.sparse_mqa(empty(7, HEADS, 576), rows, chosen, None, None, None, 0.1, 512, None)


CALLS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("decode", lambda: attend(None)),
    ("extend", lambda: attend([1, 30, 2])),
    ("rms_norm", lambda: kernels.rms_norm(empty(5, 64), empty(64), 1e-6)),
    ("add_rms_norm", lambda: kernels.add_rms_norm(empty(5, 64), empty(5, 64), empty(64), 1e-6)),
    ("silu_and_mul", lambda: kernels.silu_and_mul(empty(5, 64))),
    (
        "rotary",
        lambda: kernels.rotary(
            empty(5, HEADS * DIM),
            empty(5, KV_HEADS * DIM),
            empty(5, dtype=torch.int32),
            empty(64, DIM, dtype=torch.float32),
            DIM,
        ),
    ),
    ("store_kv", store),
    ("sparse_mqa", attend_chosen),
    ("pack_linear", lambda: kernels.pack_linear(empty(1024, 1024))),
)


def answer() -> dict[str, Any]:
    """Return the shapes of each call's results, or the text of its error."""
    # Without a device torch.npu can not answer whether a stream is capturing.
    attention_fused.npu = lambda: _NotCapturing
    return {name: _shapes(call) for name, call in CALLS}


class _NotCapturing:
    @staticmethod
    def is_current_stream_capturing() -> bool:
        return False


def _shapes(call: Callable[[], Any]) -> Any:
    try:
        result = call()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return str(error).splitlines()[0]
    if isinstance(result, Tensor):
        return list(result.shape)
    return result if result is None else [list(part.shape) for part in result]
