"""The inputs of compressed blocks are kept in a ring, which is just long enough for steps that take
back their last tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.checkpoint.compressed_config import Compression
from sglcore.runtime.attention.backend_selection import shape_of
from sglcore.runtime.attention.sparse.compressed import DeepseekV4AttnBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.deepseek_v4_rows import DeepSeekV4TokenToKVPool, ring_size
from sglcore.runtime.memory.kv_rows import RowCounts
from sglcore.runtime.memory.pools import ReqToTokenPool
from sglcore.worker.schedule_batch import ForwardMode
from tests.runtime.sparse_tiny import SparseModel
from tests.runtime.tiny import assert_close, ints, random_tokens

SIZE, LENGTH, SLOT = 32, 38, 1
KINDS = (Compression(4, True), Compression(8, False))


class Text:
    """One request: its tokens are fed in steps, and a later step may overwrite the last ones."""

    def __init__(self, compression: Compression, ring: int) -> None:
        self.model = SparseModel((compression,))
        (layer,) = self.model.layers
        layer.rows = MappingProxyType(
            {name: replace(kept, ring=ring) if kept.ring else kept for name, kept in layer.rows.items()}
        )
        table = ReqToTokenPool(SLOT, LENGTH + 16, SIZE, "cpu")
        table.page_table[SLOT, :2] = torch.tensor([2, 1])
        pool = DeepSeekV4TokenToKVPool([layer.rows], SIZE, RowCounts(2, slots=SLOT), "cpu", poison=True)
        self.backend = DeepseekV4AttnBackend(shape_of([layer], False), table, pool, KernelTable())

    def feed(self, first: int, tokens: list[int]) -> Tensor:
        """Run tokens at the positions from `first` on; return their hidden states."""
        count, places = len(tokens), torch.arange(first, first + len(tokens), dtype=torch.int32)
        table = self.backend.req_to_token_pool.page_table[SLOT]
        one: Any = {name: torch.tensor([value], dtype=torch.int32) for name, value in _lengths(first, count).items()}
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            num_tokens=count,
            req_pool_indices=torch.tensor([SLOT], dtype=torch.int32),
            input_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=places,
            out_cache_loc=(table[places // SIZE] * SIZE + places % SIZE).long(),
            seq_lens_cpu=ints([first + count]),
            extend_seq_lens_cpu=ints([count]),
            **one,
        )
        batch.mark_forward_metadata_ready(self.backend.plan(batch))
        with torch.inference_mode(), forward_context(ForwardContext(self.backend, batch, self.model.layers)):
            return self.model(batch)


def _lengths(first: int, count: int) -> dict[str, int]:
    return {
        "seq_lens": first + count,
        "extend_prefix_lens": first,
        "extend_seq_lens": count,
        "extend_start_loc": 0,
    }


def verify(compression: Compression, ring: int, drafts: int, seed: int) -> None:
    """Run steps of `drafts` tokens; in each, a random number of tokens (at least 1) continues the
    text, and the next step overwrites the rest. The kept hidden states must equal the oracle's for
    the text alone."""
    rng, text = random.Random(seed), random_tokens(seed, LENGTH)
    site = Text(compression, ring)
    wanted, place = site.model.dense(text), rng.randrange(1, 12)
    assert_close(site.feed(0, text[:place]), wanted[:place])
    while place < LENGTH - drafts:
        right = 1 if rng.random() < 0.5 else rng.randrange(1, drafts + 1)
        wrong = random_tokens(rng.randrange(1 << 16), drafts - right)
        found = site.feed(place, text[place : place + right] + wrong)
        assert_close(found[:right], wanted[place : place + right])
        place += right


@pytest.mark.parametrize("drafts", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("compression", KINDS)
def test_a_ring_of_the_bound_holds_what_later_steps_read(compression: Compression, drafts: int) -> None:
    for seed in range(4):
        verify(compression, compression.span + drafts - 2, drafts, seed)


@pytest.mark.parametrize("drafts", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("compression", KINDS)
def test_a_ring_that_is_one_shorter_is_caught(compression: Compression, drafts: int) -> None:
    with pytest.raises(AssertionError):
        for seed in range(8):
            verify(compression, compression.span + drafts - 3, drafts, seed)


def test_the_ring_that_layers_have_is_no_shorter_than_that() -> None:
    assert [ring_size(4, 8, drafts) for drafts in (1, 2, 3, 10, 11)] == [8, 8, 16, 16, 32]
    assert [ring_size(128, 128, drafts) for drafts in (1, 2, 3)] == [128, 128, 256]
