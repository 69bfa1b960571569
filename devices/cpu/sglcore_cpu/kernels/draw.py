"""Sampling by the native kernels: it draws exactly the same tokens as `draw_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.sampling.gumbel_race import RaceTables
from sglcore.sampling.sampler import SamplingState, draw_greedy, draw_rows
from sglcore_cpu.native import TYPES, Engine


class NativeDraw:
    """Sampling on one engine: the object itself is the kernel table's entry `draw`, and its method
    `greedy` the entry of that name. Float16 logits, and logits with a stride in the vocabulary
    dimension, go to torch's reference."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._draw = engine.kernel("draw").bind()

    def __call__(self, logits: Tensor, state: SamplingState, tables: RaceTables) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.draw`: logits float [B, V] -> (tokens int32 [B], bad bool [B]),
        two new tensors. `bad` marks rows with NaN, +inf or nothing but -inf; their token is 0.
        Waits for the result."""
        if logits.dtype not in TYPES or logits.stride(1) != 1:
            return draw_rows(logits, state, tables)
        return self._run(
            logits,
            scale=state.scale.data_ptr(),
            greedy=state.greedy.data_ptr(),
            top_k=_address(state.top_k),
            top_p=_address(state.top_p),
            min_p=_address(state.min_p),
            seed_words=state.seed_words.data_ptr(),
            positions=state.positions.data_ptr(),
            gumbel=tables.gumbel.data_ptr(),
            weight=tables.weight.data_ptr(),
            hashed_ids=tables.hashed_ids.data_ptr(),
        )

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.greedy`: logits float [B, V] -> (tokens int32 [B], bad bool [B]),
        the first largest logit of each row. Waits for the result."""
        if logits.dtype not in TYPES or logits.stride(1) != 1:
            return draw_greedy(logits)
        all_rows = torch.ones(logits.shape[0], dtype=torch.bool)
        zeros = torch.zeros(2 * logits.shape[0], dtype=torch.int32)
        any_row = {name: zeros.data_ptr() for name in ("scale", "seed_words", "positions")}
        none = dict.fromkeys(("top_k", "top_p", "min_p", "gumbel", "weight", "hashed_ids"), 0)
        return self._run(logits, greedy=all_rows.data_ptr(), **any_row, **none)

    def _run(self, logits: Tensor, **state: int) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        tokens = self._engine.empty(rows, dtype=torch.int32)
        bad = self._engine.empty(rows, dtype=torch.bool)
        self._draw(
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            type=TYPES[logits.dtype],
            rows=rows,
            vocab=vocab,
            tokens=tokens.data_ptr(),
            bad=bad.data_ptr(),
            **state,
        )
        return tokens, bad


def _address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()
