"""Rotary and store in one launch: the same result as the two reference entries one after the other,
and nothing else is touched."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.triton import Tuning, rotated_store, rotation, triton_kernels
from tests.kernels.guards import Guards, mutated
from tests.kernels.test_reference_kernels import cache, random
from tests.kernels.test_triton_kernels import DTYPES, SMALL, TOKENS, columns

DIM, KV_HEADS, CELLS = 12, 2, 12
INDICES = pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)


def check(
    kernels: ModuleType,
    guards: Guards,
    tokens: int,
    dtype: torch.dtype,
    cells: torch.dtype,
    tuning: Tuning = SMALL,
    heads: int = 4,
) -> None:
    """q and every KV slot except slot 0 are equal bit by bit, for whole and partial rotation and
    caches of three dtypes. The last rows are padding and hold NaN."""
    q, k = columns(guards, tokens, (heads + KV_HEADS) * DIM, dtype).split([heads * DIM, KV_HEADS * DIM], dim=-1)
    v = columns(guards, tokens, KV_HEADS * DIM, dtype, seed=1)
    for part in (q, k, v):
        part[5:] = torch.nan
    positions = guards.place(torch.tensor([3, 0, 9, 9, 31, 0, 0][:tokens], dtype=torch.int32))
    where = guards.place(torch.tensor([11, 4, 9, 7, 1, 0, 0][:tokens], dtype=cells))
    for rotated, held in ((12, dtype), (8, dtype), (6, torch.bfloat16), (6, torch.float32)):
        table = guards.place(cache(32, rotated))
        found = [guards.place(torch.full((CELLS, KV_HEADS, DIM), 5.0, dtype=held)) for _ in range(2)]
        wanted = [part.clone() for part in found]
        given = (q, k, v, positions, table, DIM)
        got = kernels.rotary_and_store(*given, found[0], found[1], where, tuning)
        want = reference_kernels.rotary_and_store(*given, wanted[0], wanted[1], where)
        assert got.dtype == q.dtype and got.is_contiguous() and torch.equal(got[:5], want[:5])
        assert torch.equal(found[0][1:], wanted[0][1:]) and torch.equal(found[1][1:], wanted[1][1:])


@DTYPES
@TOKENS
@INDICES
def test_one_launch_gives_what_the_two_give(
    tokens: int, dtype: torch.dtype, index_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    check(rotated_store, guards, tokens, dtype, index_dtype)
    guards.check()


@pytest.mark.parametrize("heads", [2, 6, 16])
@pytest.mark.parametrize("elements", [1, 16, 4096])
def test_neither_the_size_of_a_program_nor_the_number_of_heads_matters(
    heads: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    check(rotated_store, guards, 7, torch.float32, torch.int64, Tuning(elements=elements), heads)
    guards.check()


MUTANTS: tuple[tuple[ModuleType, str, str], ...] = (
    (rotated_store, "program - q_programs - k_programs", "program - q_programs"),
    (rotated_store, "flat = (program - q_programs) * ROWS", "flat = program * ROWS"),
    (rotated_store, "copy_rest(v, v_cache, cells", "copy_rest(v, v_cache, None"),
    (rotated_store, "copy_rest(v, v_cache, cells", "copy_rest(k, v_cache, cells"),
    (rotated_store, "tokens, v_stride", "tokens, k_stride"),
    (rotated_store, "copy_rest(k, k_cache, cells", "copy_rest(k, k_cache, None"),
    (rotated_store, "        v.stride(0),\n", "        v.shape[1],\n"),
    (rotated_store, "REST=power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0", "REST=0"),
    (rotated_store, "tiles(tokens * k_heads, held)", "tokens * k_heads // held"),
    (rotation, "+ (row_of(token, cells, tokens)", "+ (token"),
    (rotation, "token < tokens", "token <= tokens"),
    (rotation, "column < HALF", "column <= HALF"),
    (rotation, "column < DIM", "column <= DIM"),
    (rotation, "left, right = rounded(left, dtype), rounded(right, dtype)", "pass"),
    (rotation, "narrow(left, out.dtype.element_ty)", "narrow(first, out.dtype.element_ty)"),
)


def broken(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """Return the entry over a defect in its own module or in the module of the rotary."""
    defect = mutated(module, folder, old, new)
    if module is rotated_store:
        return defect
    return mutated(rotated_store, folder, f"from {rotation.__name__} import", f"from {defect.__name__} import")


@pytest.mark.parametrize(("module", "old", "new"), MUTANTS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_defect_is_caught(
    module: ModuleType, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    defect = broken(module, tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(defect, guards, 7, torch.bfloat16, torch.int64)
        guards.check()


def test_a_compiler_sees_plain_operations() -> None:
    q, k, v = random(3, 8 * DIM).split([4 * DIM, 2 * DIM, 2 * DIM], dim=-1)
    positions, cells = torch.arange(3, dtype=torch.int32), torch.tensor([2, 5, 1])
    caches = [torch.zeros(CELLS, KV_HEADS, DIM) for _ in range(4)]
    table = triton_kernels()
    assert table.rotary_and_store is not None
    compiled = torch.compile(table.rotary_and_store, fullgraph=True, backend="eager")
    found = compiled(q, k, v, positions, cache(8, 8), DIM, caches[0], caches[1], cells)
    wanted = reference_kernels.rotary_and_store(q, k, v, positions, cache(8, 8), DIM, caches[2], caches[3], cells)
    assert torch.equal(found, wanted) and torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
