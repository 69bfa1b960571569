"""The native mixture of experts matches the reference, reads chosen experts only, and writes
nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded_copy
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.experts import Experts
from sglcore_cpu.native import Engine

REFERENCE = KernelTable()
EXAMPLES = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CASES = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([0, 1, 3, 9, 70]),
        "experts": st.sampled_from([(1, 1), (5, 2), (8, 4), (40, 3)]),
        "sizes": st.sampled_from([(64, 32), (128, 96), (30, 17), (33, 1), (256, 48)]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "index": st.sampled_from([torch.int32, torch.int64]),
        "offset": st.integers(0, 9),
        "gap": st.sampled_from([0, 3, 16]),
        "absent": st.sampled_from([0.0, 0.4, 1.0]),
        "entry": st.sampled_from(["moe", "limited_moe", "clamped_moe", "relu2_moe"]),
        "seed": st.integers(0, 1 << 20),
    }
)


NUMBERS: Mapping[str, tuple[float, ...]] = MappingProxyType({"limited_moe": (0.3,), "clamped_moe": (1.702, 0.9)})
"""Arguments that follow the tensors of a call."""


def entry_of(kernels: Experts | KernelTable, name: str) -> Callable[..., Tensor]:
    """Return the entry of that name."""
    every = {
        "moe": kernels.moe,
        "limited_moe": kernels.limited_moe,
        "clamped_moe": kernels.clamped_moe,
        "relu2_moe": kernels.relu2_moe,
    }
    return every[name]


class Mixture:
    """The arguments of one call in guarded memory; experts that were not chosen hold NaN."""

    def __init__(self, case: dict[str, Any]) -> None:
        generator = torch.Generator().manual_seed(case["seed"])
        (experts, k), (size, inner), tokens = case["experts"], case["sizes"], case["tokens"]

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case["dtype"])

        ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
        ids[torch.rand(tokens, k, generator=generator) < case["absent"]] = -1
        rows = inner if case["entry"] == "relu2_moe" else 2 * inner
        w13, w2 = values(experts, rows, size) * 0.2, values(experts, size, inner) * 0.2
        biased = case["entry"] == "clamped_moe"
        experts_own = (w13, values(experts, rows), w2, values(experts, size)) if biased else (w13, w2)
        self.plain = values(tokens, size), values(tokens, k).abs(), ids, *experts_own
        unchosen = torch.ones(experts, dtype=torch.bool)
        unchosen[ids[ids >= 0]] = False
        poisoned = [part.clone() for part in experts_own]
        for part in poisoned:
            part[unchosen] = torch.nan
        weights = torch.where(ids < 0, torch.nan, self.plain[1])
        parts = [guarded_copy(self.plain[0], case["offset"], case["gap"])]
        parts += [guarded_copy(part, case["offset"]) for part in (weights, ids.to(case["index"]), *poisoned)]
        self.given = tuple(part for part, _ in parts)
        self.checks = [check for _, check in parts]


@EXAMPLES
@given(case=CASES)
def test_moe_is_the_reference(engine: Engine, case: dict[str, Any]) -> None:
    mixture, numbers = Mixture(case), NUMBERS.get(case["entry"], ())
    bound = 2**-6 if case["dtype"] is torch.bfloat16 else 1e-5
    with GuardedResults():
        found = entry_of(Experts(engine), case["entry"])(*mixture.given, *numbers)
        expected = entry_of(REFERENCE, case["entry"])(*mixture.plain, *numbers)
        largest = max(1.0, float(expected.abs().amax())) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * largest)
    for check in mixture.checks:
        check()


def test_experts_are_added_in_ascending_order(engine: Engine) -> None:
    """In bfloat16 1 + 2^-8 + 2^-8 is 1 if added from the left, and 1 + 2^-7 from the right."""
    scale = torch.tensor([2**-8, 2**-8, 1.0]).to(torch.bfloat16)
    hidden = torch.full((1, 2), 64.0, dtype=torch.bfloat16)
    w13 = torch.full((3, 2, 2), 1 / 128, dtype=torch.bfloat16)
    w13[:, 0] = 0.5
    w2 = torch.full((3, 2, 1), 1 / 64, dtype=torch.bfloat16)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        ids = torch.tensor([order])
        weights = scale[order][None]
        expected = REFERENCE.moe(hidden, weights, ids, w13, w2)
        assert torch.equal(Experts(engine).moe(hidden, weights, ids, w13, w2), expected)
        assert float(expected[0, 0]) == 1 + 2**-7
        late = REFERENCE.moe(hidden, scale.flip(0)[order][None], ids, w13, w2)
        assert torch.equal(Experts(engine).moe(hidden, scale.flip(0)[order][None], ids, w13, w2), late)
        assert float(late[0, 0]) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_and_strided_weights_go_to_torch(engine: Engine, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(3, n, generator=generator).to(dtype) for n in (8, 2))
    w13 = torch.randn(8, 6, 4, generator=generator).to(dtype).permute(2, 1, 0)
    w2 = torch.randn(4, 8, 3, generator=generator).to(dtype)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1]])
    found = Experts(engine).moe(hidden, weights, ids, w13, w2)
    torch.testing.assert_close(found, REFERENCE.moe(hidden, weights, ids, w13, w2), rtol=1e-2, atol=1e-2)
