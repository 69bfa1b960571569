"""Rotary embedding, KV stores, casts, embedding and routing of the native kernels match the
reference and write nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded, guarded_copy
from sglcore.conformance.inputs import kernel_inputs
from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.experts import Experts
from sglcore_cpu.kernels.operations import Operations
from sglcore_cpu.native import Engine

REFERENCE = KernelTable()
EXAMPLES = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CELLS, POSITIONS = 90, 50
FLOATS = st.sampled_from([torch.float32, torch.bfloat16])
INTEGERS = st.sampled_from([torch.int32, torch.int64])
TOKENS = st.sampled_from([0, 1, 3, 40])

HEADS = st.fixed_dictionaries(
    {
        "tokens": TOKENS,
        "dtype": FLOATS,
        "stored": FLOATS,
        "heads": st.sampled_from([(1, 1), (4, 2), (6, 1)]),
        "sizes": st.sampled_from([(8, 8), (64, 64), (128, 128), (64, 32), (80, 20), (18, 6)]),
        "offset": st.integers(0, 9),
        "gap": st.sampled_from([0, 8, 13]),
        "index": INTEGERS,
        "seed": st.integers(0, 1 << 20),
    }
)


class Heads:
    """The inputs of a case: q, k and v as views of guarded rows; positions, angles, caches and KV
    slots."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.generator = torch.Generator().manual_seed(case["seed"])
        (heads, kv_heads), (size, rotated) = case["heads"], case["sizes"]
        tokens, self.size, self._dtype = case["tokens"], size, case["dtype"]
        widths = [heads * size, kv_heads * size, kv_heads * size]
        self.qkv, check = guarded_copy(self.values(tokens, sum(widths)), case["offset"], case["gap"])
        self.q, self.k, self.v = self.qkv.split(widths, dim=-1)
        angles = torch.rand(POSITIONS, rotated // 2, generator=self.generator) * 7
        self.angles = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=self.generator).to(case["index"])
        self.cells = torch.randperm(CELLS, generator=self.generator)[:tokens].to(case["index"])
        made = [guarded_copy(torch.zeros(CELLS, kv_heads, size, dtype=case["stored"]), case["offset"]) for _ in "kv"]
        self.caches = made[0][0], made[1][0]
        self._checks = [check, *(each for _, each in made)]

    def values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self._dtype)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        return self.q, self.k, self.v, self.positions, self.angles, self.size

    def expect_same(self, found: Tensor, expected: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
        """Check that the rotated queries and the caches are equal to the expected ones, and that
        the guards are intact."""
        for mine, its in ((found, expected), *zip(self.caches, wanted, strict=True)):
            assert mine.dtype == its.dtype and mine.shape == its.shape
            assert torch.equal(mine, its)
        for check in self._checks:
            check()


def empty_like(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return caches of zeros for the reference."""
    return torch.zeros_like(heads.caches[0]), torch.zeros_like(heads.caches[1])


@EXAMPLES
@given(case=HEADS)
def test_rotary_is_the_reference_to_the_bit(engine: Engine, case: dict[str, Any]) -> None:
    heads = Heads(case)
    given_of = heads.q, heads.k, heads.positions, heads.angles, heads.size
    before = heads.qkv.clone()
    with GuardedResults():
        found = Operations(engine).rotary(*given_of)
        for mine, expected in zip(found, REFERENCE.rotary(*given_of), strict=True):
            assert torch.equal(mine, expected)
    assert torch.equal(heads.qkv, before)


@EXAMPLES
@given(case=HEADS)
def test_rotary_and_store_is_the_reference_to_the_bit(engine: Engine, case: dict[str, Any]) -> None:
    heads = Heads(case)
    wanted = empty_like(heads)
    expected = reference_kernels.rotary_and_store(*heads.arguments, *wanted, heads.cells)
    with GuardedResults():
        found = Operations(engine).rotary_and_store(*heads.arguments, *heads.caches, heads.cells)
        heads.expect_same(found, expected, wanted)


@EXAMPLES
@given(case=HEADS)
def test_norms_before_the_rotation_are_the_reference(engine: Engine, case: dict[str, Any]) -> None:
    heads = Heads(case)
    norms = heads.values(heads.size), heads.values(heads.size), 1e-6
    wanted = empty_like(heads)
    expected = reference_kernels.norm_rotary_and_store(*heads.arguments, *wanted, heads.cells, *norms)
    with GuardedResults():
        found = Operations(engine).norm_rotary_and_store(*heads.arguments, *heads.caches, heads.cells, *norms)
        pairs = ((found, expected), *zip(heads.caches, wanted, strict=True))
        for mine, its in pairs:
            coarse = torch.bfloat16 in (case["dtype"], mine.dtype)
            # The rotation can cancel values, so a rounding step of the norm in bfloat16 is compared
            # with the largest value.
            bound = 2**-6 if coarse else 4e-6
            torch.testing.assert_close(
                mine, its, rtol=bound, atol=bound * max(1.0, float(its.abs().amax()) if its.numel() else 1.0)
            )
    heads.expect_same(found, found, heads.caches)


def test_padding_rows_may_all_name_cell_0(engine: Engine) -> None:
    heads = Heads(
        {"tokens": 600, "dtype": torch.float32, "stored": torch.float32, "heads": (4, 2), "sizes": (64, 64)}
        | {"offset": 0, "gap": 0, "index": torch.int64, "seed": 1}
    )
    cells = torch.zeros(600, dtype=torch.int64)
    cells[:80] = torch.arange(1, 81)
    wanted = empty_like(heads)
    expected = reference_kernels.rotary_and_store(*heads.arguments, *wanted, cells)
    found = Operations(engine).rotary_and_store(*heads.arguments, *heads.caches, cells)
    assert torch.equal(found, expected)
    for mine, its in zip(heads.caches, wanted, strict=True):
        assert torch.equal(mine[1:], its[1:])


@EXAMPLES
@given(case=HEADS)
def test_store_kv_is_the_reference(engine: Engine, case: dict[str, Any]) -> None:
    heads = Heads(case)
    shape = (len(heads.positions), *heads.caches[0].shape[1:])
    key, value = heads.k.unflatten(1, shape[1:]), heads.v.unflatten(1, shape[1:])
    wanted = empty_like(heads)
    REFERENCE.store_kv(key, value, *wanted, heads.cells.long())
    Operations(engine).store_kv(key, value, *heads.caches, heads.cells)
    heads.expect_same(heads.q, heads.q, wanted)


@pytest.mark.parametrize("stored", [torch.int8, torch.float16])
def test_caches_of_other_types_are_filled_by_torch(engine: Engine, stored: torch.dtype) -> None:
    key, value = torch.arange(24.0).view(3, 2, 4), torch.arange(24.0).view(3, 2, 4) + 1
    k, v, k_wanted, v_wanted = (torch.zeros(9, 2, 4, dtype=stored) for _ in range(4))
    cells = torch.tensor([4, 8, 1])
    Operations(engine).store_kv(key, value, k, v, cells)
    REFERENCE.store_kv(key, value, k_wanted, v_wanted, cells)
    assert torch.equal(k, k_wanted) and torch.equal(v, v_wanted)


@EXAMPLES
@given(
    rows=TOKENS,
    width=st.sampled_from([1, 16, 33, 257]),
    types=st.tuples(FLOATS, FLOATS),
    offset=st.integers(0, 9),
    gap=st.integers(0, 5),
)
def test_cast_is_torchs(
    engine: Engine, rows: int, width: int, types: tuple[torch.dtype, torch.dtype], offset: int, gap: int
) -> None:
    plain = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width)) * 3
    x, check = guarded_copy(plain.to(types[0]), offset, gap)
    with GuardedResults():
        found = Operations(engine).cast(x, types[1])
        assert found.is_contiguous() and torch.equal(found, x.to(types[1]))
    check()


@EXAMPLES
@given(
    tokens=TOKENS,
    width=st.sampled_from([1, 7, 64, 900]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
    index=INTEGERS,
    offset=st.integers(0, 9),
)
def test_embedding_is_rows_of_the_weight(
    engine: Engine, tokens: int, width: int, dtype: torch.dtype, index: torch.dtype, offset: int
) -> None:
    generator = torch.Generator().manual_seed(tokens + width)
    weight, check = guarded_copy(torch.randint(-99, 99, (31, width), generator=generator).to(dtype), offset)
    ids = torch.randint(0, 31, (tokens,), generator=generator).to(index)
    with GuardedResults():
        found = Operations(engine).embedding(ids, weight)
        assert found.dtype == dtype and torch.equal(found, weight[ids.long()])
    check()


@EXAMPLES
@given(tokens=st.sampled_from([0, 1, 5, 5000]), page_size=st.sampled_from([1, 3, 16]), index=INTEGERS)
def test_cache_locations_are_the_reference(engine: Engine, tokens: int, page_size: int, index: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    table = torch.randint(0, 9999, (6, 11), generator=generator, dtype=torch.int32)[:, 1:]
    slots = torch.randint(0, 6, (tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 10 * page_size, (tokens,), generator=generator, dtype=torch.int32)
    expected = torch.empty(tokens, dtype=index)
    REFERENCE.cache_locations(table.contiguous(), slots, positions, page_size, expected)
    out, check = guarded((tokens,), index, 3)
    Operations(engine).cache_locations(table, slots, positions, page_size, out)
    check()
    assert torch.equal(out, expected)


@EXAMPLES
@given(
    tokens=TOKENS,
    sizes=st.sampled_from([(1, 1), (8, 2), (60, 4), (128, 8), (128, 128), (33, 33)]),
    dtype=FLOATS,
    normalize=st.booleans(),
    gap=st.integers(0, 5),
    scale=st.sampled_from([0.1, 4.0, 90.0]),
)
def test_routing_is_the_reference(
    engine: Engine, tokens: int, sizes: tuple[int, int], dtype: torch.dtype, normalize: bool, gap: int, scale: float
) -> None:
    experts, k = sizes
    generator = torch.Generator().manual_seed(tokens + experts)
    logits, check = guarded_copy((torch.randn(tokens, experts, generator=generator) * scale).to(dtype), gap, gap)
    with GuardedResults():
        weights, ids = Experts(engine).top_k_routing(logits, k, normalize)
        expected, _ = REFERENCE.top_k_routing(logits, k, normalize)
        bound = 2**-7 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(weights, expected, rtol=bound, atol=1e-7)
        # Experts are in descending order of the logits; among equal ones the lower index first.
        assert torch.equal(ids, torch.sort(logits, dim=-1, descending=True, stable=True)[1][:, :k])
    check()


ROUTINGS: dict[str, Callable[[Draw, int, bool], Inputs]] = {
    "sigmoid_routing": kernel_inputs.sigmoid_routing,
    "sqrtsoftplus_routing": kernel_inputs.sqrtsoftplus_routing,
    "hash_routing": kernel_inputs.hash_routing,
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_scored_routing_is_the_reference(engine: Engine, name: str) -> None:
    for tokens, dtype in ((0, torch.float32), (5, torch.bfloat16), (70, torch.float32)):
        for logits, *rest in ROUTINGS[name](Draw(tokens, dtype), tokens, False):
            for scale in (1.0, 20.0):
                held, check = guarded_copy(logits * scale, 3, 5)
                with GuardedResults():
                    weights, ids = getattr(Experts(engine), name)(held, *rest)
                    expected, wanted = getattr(REFERENCE, name)(logits * scale, *rest)
                    bound = 2**-7 if dtype is torch.bfloat16 else 1e-5
                    torch.testing.assert_close(weights, expected, rtol=bound, atol=1e-7)
                    assert scale > 1 or torch.equal(ids, wanted.long())
                check()


def test_routing_of_what_is_no_number_names_experts(engine: Engine) -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0], [-torch.inf, -torch.inf, -torch.inf], [-torch.inf, 3.0, torch.nan]])
    weights, ids = Experts(engine).top_k_routing(logits, 2, True)
    assert weights.isnan().all()
    assert all(0 <= a < 3 and 0 <= b < 3 and a != b for a, b in ids.tolist())
