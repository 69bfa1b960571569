"""Grouped experts equal the reference, and can be traced by compilers."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sglcore.runtime.kernels.grouped_moe import grouped_moe
from sglcore.runtime.kernels.reference_kernels import moe

HIDDEN, SIZE, EXPERTS = 24, 16, 6


def parts(tokens: int, choices: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Return hidden, weights, ids, w13 and w2. Expert 2 is never chosen; its ids become -1 (no
    expert)."""
    print(f"seed {seed}")
    random = torch.Generator().manual_seed(seed)
    sizes = ((tokens, HIDDEN), (tokens, choices), (EXPERTS, 2 * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE))
    hidden, weights, w13, w2 = (torch.randn(size, generator=random).to(dtype) for size in sizes)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=random)[:choices] for _ in range(tokens)] or [torch.zeros(choices)]
    )
    ids = ids[:tokens].long()
    return [hidden, weights, torch.where(ids == 2, -1, ids), w13, w2]


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_experts_give_what_the_reference_gives(dtype, tokens: int, choices: int) -> None:
    values = parts(tokens, choices, dtype)
    wide = dtype == torch.bfloat16
    torch.testing.assert_close(
        grouped_moe(*values), moe(*values), rtol=3e-2 if wide else 1e-5, atol=0.3 if wide else 1e-4
    )


def test_a_row_without_experts_is_zero_whatever_it_contains() -> None:
    hidden, weights, ids, w13, w2 = parts(5, 2)
    hidden[3], ids[3] = float("nan"), -1
    got = grouped_moe(hidden, weights, ids, w13, w2)
    assert torch.equal(got[3], torch.zeros(HIDDEN))
    torch.testing.assert_close(got, moe(hidden, weights, ids, w13, w2), rtol=1e-5, atol=1e-4)


def test_experts_taken_in_the_wrong_order_would_be_noticed() -> None:
    hidden, weights, ids, w13, w2 = parts(5, 2)
    assert not torch.allclose(grouped_moe(hidden, weights, ids, w13.flip(0), w2), moe(hidden, weights, ids, w13, w2))


def test_one_trace_serves_every_routing_and_number_of_tokens() -> None:
    first, second = parts(5, 2, torch.bfloat16), parts(9, 2, torch.bfloat16, seed=1)
    compiled = torch.compile(grouped_moe, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*first), grouped_moe(*first))
    traced = make_fx(grouped_moe, tracing_mode="symbolic")(*first)
    assert torch.equal(traced(*second), grouped_moe(*second))
