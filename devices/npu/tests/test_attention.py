"""The fused operator equals the dense oracle, and is refused for what the vendor's documentation
excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.attention.backend_selection import AttentionNeeds, select_attention
from sglcore_npu import package
from sglcore_npu.attention_fused import FusedAttention
from tests.attention.on_device import place
from tests.attention.on_packages import EDGES, LONG
from tests.attention.rows import Heads

DEVICE, PAGE = "npu:0", 128
HEADS = Heads(4, 2, 64)
DECODE = [(3, 1), (0, 1), (30, 1), (16, 1)]
EXTEND = [(0, 5), (17, 9), (0, 16), (4, 1)]


@pytest.mark.parametrize("heads", [HEADS, Heads(8, 2, 64), Heads(4, 2, 64, scaling=0.2), Heads(4, 4, 128)])
@pytest.mark.parametrize(("rows", "is_decode"), [(DECODE, True), (EXTEND, False), ([(9, 1), (0, 7)], False)])
def test_it_is_the_dense_oracle(heads: Heads, rows: Any, is_decode: bool) -> None:
    placed = place(rows, FusedAttention, heads, DEVICE, page_size=PAGE, decode=is_decode)
    placed.check(placed.run())


def test_bfloat16_is_served() -> None:
    placed = place(EXTEND, FusedAttention, HEADS, DEVICE, torch.bfloat16, page_size=PAGE)
    placed.check(placed.run())


def test_lines_beyond_the_real_ones_change_nothing_and_come_out_as_zero() -> None:
    placed = place(EXTEND, FusedAttention, HEADS, DEVICE, page_size=PAGE)
    count = placed.batch.num_tokens
    q, k, v = (torch.cat((part, part.new_full((3, part.shape[1]), 7.0))) for part in placed.inputs)
    assert placed.batch.out_cache_loc is not None
    placed.batch.out_cache_loc = torch.cat((placed.batch.out_cache_loc, placed.batch.out_cache_loc.new_zeros(3)))
    found = placed.run(q, k, v)
    placed.check(found[:count])
    assert not found[count:].any()


@pytest.mark.parametrize("edge", EDGES)
def test_rows_on_either_side_of_pages_and_blocks_are_whole(edge: int) -> None:
    for seed, longest in enumerate((edge, edge + 1)):
        lengths = range(longest - 2, longest + 1)
        for new, is_decode in ((1, True), (2, False)):
            rows = [(length - new, new) for length in lengths]
            placed = place(
                rows, FusedAttention, HEADS, DEVICE, page_size=PAGE, decode=is_decode, seed=seed, context=LONG
            )
            placed.check(placed.run())


def needs(**changes: Any) -> AttentionNeeds:
    """Return the needs of a plain model, with changes."""
    plain = {"head_dims": (128,), "page_size": PAGE, "dtype": "bfloat16", "features": frozenset({"capture"})}
    return AttentionNeeds(**{**plain, "index_dtype": "int32", **changes})


def chosen(wanted: AttentionNeeds) -> tuple[str, str]:
    """Return the selected candidate, and the reason."""
    ledger = DecisionLedger()
    select_attention(package.attention, wanted, None, package.name, ledger)
    return ledger.rows[-1].effective, ledger.rows[-1].reason


def test_a_plain_model_gets_the_fused_operator() -> None:
    assert chosen(needs())[0] == "fused"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "dtype float32"),
        ({"page_size": 16}, "pages of 16"),
        ({"page_size": 256}, "pages of 256"),
        ({"head_dims": (80,)}, "heads of 80"),
        ({"features": frozenset({"sliding_window"})}, "it lacks sliding_window"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_the_reason_and_gathered_serves_it(
    changes: dict[str, Any], reason: str
) -> None:
    name, why = chosen(needs(**changes))
    assert name == "gathered" and f"fused refused: {reason}" in why
