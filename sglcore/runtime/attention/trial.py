"""Try an attention backend that calls a vendor's library, before a model is given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.core.errors import SglcoreError, one_line
from sglcore.runtime.attention.contract import AttentionBackend, Bucket
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.worker.schedule_batch import ForwardMode

TOKENS = 2
"""Tokens of the prompt that is tried."""


def failure_of(
    make: Callable[[], AttentionBackend[Any]],
    layers: Sequence[Attention],
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    is_captured: bool,
) -> str:
    """Return how the backend that `make` returns fails with one decode row and one short prompt in
    the padding page, in each kind of layer of a model in `dtype`; empty if it does not fail.

    `index_dtype`: the type of KV slot indices. `is_captured`: also make and refresh a plan for
    capture. Waits for the device. Raises SglcoreError and torch.OutOfMemoryError, which are
    no failure of the library.
    """
    try:
        with torch.inference_mode():
            backend = make()
            for batch in _batches(backend, index_dtype):
                _attend(backend, batch, layers, dtype)
            if is_captured:
                (decode, _) = _batches(backend, index_dtype)
                backend.refresh(backend.capture_plan(Bucket(1, 1)), decode)
    except (SglcoreError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return f"its first call failed: {one_line(error)}"
    return ""


def _batches(backend: AttentionBackend[Any], index_dtype: torch.dtype) -> tuple[ForwardBatch, ForwardBatch]:
    """Return a decode step of one token and a prompt of `TOKENS`, both of the padding slot 0."""
    device = backend.req_to_token_pool.page_table.device

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    decode = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=1,
        num_tokens=1,
        req_pool_indices=ints(0),
        seq_lens=ints(1),
        input_ids=ints(0),
        positions=ints(0),
        out_cache_loc=ints(0, dtype=index_dtype),
        num_token_non_padded=ints(1),
        seq_lens_cpu=np.ones(1, np.int32),
    )
    places = tuple(range(TOKENS))
    slots = [place % backend.token_to_kv_pool.page_size for place in places]
    prompt = replace(
        decode,
        forward_mode=ForwardMode.EXTEND,
        num_tokens=TOKENS,
        seq_lens=ints(TOKENS),
        input_ids=ints(*(0 for _ in places)),
        positions=ints(*places),
        out_cache_loc=ints(*slots, dtype=index_dtype),
        num_token_non_padded=ints(TOKENS),
        extend_prefix_lens=ints(0),
        extend_seq_lens=ints(TOKENS),
        extend_start_loc=ints(0),
        seq_lens_cpu=np.full(1, TOKENS, np.int32),
        extend_prefix_lens_cpu=np.zeros(1, np.int32),
        extend_seq_lens_cpu=np.full(1, TOKENS, np.int32),
    )
    return decode, prompt


def _attend(
    backend: AttentionBackend[Any], batch: ForwardBatch, layers: Sequence[Attention], dtype: torch.dtype
) -> None:
    """Plan the batch and attend with zeros in a layer of each kind; wait for the results."""
    batch.mark_forward_metadata_ready(backend.plan(batch))
    kinds = {
        (each.num_heads, each.num_kv_heads, each.head_dim, each.sliding_window, each.softcap): each for each in layers
    }
    for layer in kinds.values():
        parts = (layer.num_heads, *(() if layer.is_frozen else (layer.num_kv_heads,) * 2))
        zeros = [
            torch.zeros(batch.num_tokens, heads * layer.head_dim, dtype=dtype, device=batch.seq_lens.device)
            for heads in parts
        ]
        key, value = zeros[1:] or (None, None)
        backend.forward(zeros[0], key, value, layer, batch).cpu()
