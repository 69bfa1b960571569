"""The Triton kernels of norms, activation, rotary, KV slots and draft tokens equal the reference
and touch nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.conformance.inputs import kernel_inputs_hisparse, kernel_inputs_speculative
from sglcore.conformance.inputs.kernel_inputs import Draw
from sglcore.runtime.kernels import reference_hisparse, reference_kernels, reference_speculative, reference_trees
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.kernels.triton import (
    LaunchConfig,
    Tuning,
    activation,
    cells,
    draft_trees,
    draft_verification,
    norm_kernels,
    rotation,
    triton_kernels,
)
from sglcore.runtime.kernels.triton.sparse import hisparse
from tests.kernels.guards import Guards, mutated
from tests.kernels.test_reference_kernels import cache, random

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TOKENS = pytest.mark.parametrize("tokens", [0, 1, 7])
SMALL = Tuning(elements=64)
"""Gives several programs even for small tensors."""

Law = Callable[[ModuleType, Guards, int, torch.dtype], None]


def close(found: Tensor, wanted: Tensor) -> None:
    """Compare float32 within 1e-5, and narrower floats within two of their steps."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    narrow = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(wanted.dtype, 1e-5)
    torch.testing.assert_close(found, wanted, rtol=narrow, atol=1e-5)


def columns(guards: Guards, tokens: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the middle columns of a wider tensor; its other columns are NaN."""
    wide = torch.full((tokens, size + 5), torch.nan, dtype=dtype)
    wide[:, 2 : 2 + size] = random(tokens, size, dtype=dtype, seed=seed)
    return guards.place(wide)[:, 2 : 2 + size]


def rms_norm(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    x, weight = columns(guards, tokens, 24, dtype), guards.place(random(24, dtype=dtype, seed=1))
    wide = guards.place(random(24, seed=2))
    close(kernels.rms_norm(x, weight, 1e-5, SMALL), reference_kernels.rms_norm(x, weight, 1e-5))
    close(kernels.rms_norm(x, wide, 1e-5, SMALL), reference_kernels.rms_norm(x, wide, 1e-5))
    heads = columns(guards, tokens, 36, dtype).view(tokens, 3, 12)
    close(kernels.rms_norm(heads, weight[:12], 0.0, SMALL), reference_kernels.rms_norm(heads, weight[:12], 0.0))


def add_rms_norm(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    x, residual = columns(guards, tokens, 24, dtype), columns(guards, tokens, 24, dtype, seed=1)
    weight = guards.place(random(24, dtype=dtype, seed=2))
    wanted = reference_kernels.add_rms_norm(x, residual, weight, 1e-5)
    for found, want in zip(kernels.add_rms_norm(x, residual, weight, 1e-5, SMALL), wanted, strict=True):
        close(found, want)


def gated(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    for size in (5, 100):
        x = columns(guards, tokens, 2 * size, dtype)
        close(kernels.silu_and_mul(x, SMALL), reference_kernels.silu_and_mul(x))
        close(kernels.gelu_tanh_and_mul(x, SMALL), reference_kernels.gelu_tanh_and_mul(x))


def rotary(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    q, k = columns(guards, tokens, 6 * 12, dtype).split([48, 24], dim=-1)
    positions = guards.place(torch.tensor([3, 0, 9, 9, 1, 2, 31][:tokens], dtype=torch.int32))
    for rotated in (12, 8, 6):
        table = guards.place(cache(32, rotated))
        found = kernels.rotary(q, k, positions, table, 12, SMALL)
        for part, want in zip(found, reference_kernels.rotary(q, k, positions, table, 12), strict=True):
            close(part, want)


def store_kv(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    key, value = (columns(guards, tokens, 6, dtype, seed).view(tokens, 2, 3) for seed in (0, 1))
    where = torch.tensor([11, 4, 9, 0, 7, 2, 1][:tokens], dtype=torch.int64)
    for index_dtype in (torch.int32, torch.int64):
        found = [guards.place(torch.full((12, 2, 3), 5.0, dtype=torch.bfloat16)) for _ in range(2)]
        wanted = [part.clone() for part in found]
        kernels.store_kv(key, value, found[0], found[1], guards.place(where.to(index_dtype)), SMALL)
        reference_kernels.store_kv(key, value, wanted[0], wanted[1], where)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def cache_locations(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    table = guards.place(torch.randint(1, 99, (4, 5), dtype=torch.int32))
    slots = guards.place(torch.tensor([1, 3, 0, 2, 2, 1, 3][:tokens], dtype=torch.int32))
    positions = guards.place(torch.tensor([0, 14, 0, 3, 2, 7, 9][:tokens], dtype=torch.int32))
    for index_dtype in (torch.int32, torch.int64):
        found, wanted = guards.empty(tokens, dtype=index_dtype), torch.zeros(tokens, dtype=index_dtype)
        kernels.cache_locations(table, slots, positions, 3, found, SMALL)
        reference_kernels.cache_locations(table, slots, positions, 3, wanted)
        assert torch.equal(found, wanted)


def verification(entry: str, kernels: ModuleType, guards: Guards, tokens: int) -> None:
    """For every call of the kit, each tensor afterwards equals the reference's."""
    in_place(kernel_inputs_speculative, reference_speculative, entry, kernels, guards, tokens)


def in_place(
    inputs: ModuleType, wanted: ModuleType, entry: str, kernels: ModuleType, guards: Guards, tokens: int
) -> None:
    for args in getattr(inputs, entry)(Draw(tokens, torch.float32), tokens, False):
        found = [guards.place(arg) if isinstance(arg, Tensor) else arg for arg in args]
        getattr(kernels, entry)(*found, SMALL)
        getattr(wanted, entry)(*args)
        assert all(torch.equal(*pair) for pair in zip(found, args, strict=True) if isinstance(pair[0], Tensor))


def place_proposals(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    verification("place_proposals", kernels, guards, tokens)


def accept_proposals(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    verification("accept_proposals", kernels, guards, tokens)


def tree_walk(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    verification("tree_walk", kernels, guards, tokens)


def tree_expand(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    in_place(kernel_inputs_speculative, reference_trees, "tree_expand", kernels, guards, tokens)


def tree_build(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    in_place(kernel_inputs_speculative, reference_trees, "tree_build", kernels, guards, tokens)


def tree_place(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    in_place(kernel_inputs_speculative, reference_trees, "tree_place", kernels, guards, tokens)


def swap_in(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    in_place(kernel_inputs_hisparse, reference_hisparse, "swap_in", kernels, guards, tokens)


def copy_rows(kernels: ModuleType, guards: Guards, tokens: int, dtype: torch.dtype) -> None:
    in_place(kernel_inputs_hisparse, reference_hisparse, "copy_rows", kernels, guards, tokens)


LAWS: tuple[tuple[ModuleType, Law], ...] = (
    (norm_kernels, rms_norm),
    (norm_kernels, add_rms_norm),
    (activation, gated),
    (rotation, rotary),
    (cells, store_kv),
    (cells, cache_locations),
    (draft_verification, place_proposals),
    (draft_verification, accept_proposals),
    (draft_verification, tree_walk),
    (draft_trees, tree_expand),
    (draft_trees, tree_build),
    (draft_trees, tree_place),
    (hisparse, swap_in),
    (hisparse, copy_rows),
)


@DTYPES
@TOKENS
@pytest.mark.parametrize(("module", "law"), LAWS, ids=[law.__name__ for _, law in LAWS])
def test_a_kernel_gives_what_the_reference_gives_within_its_bounds(
    module: ModuleType, law: Law, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    law(module, guards, tokens, dtype)
    guards.check()


MUTANTS: tuple[tuple[ModuleType, Law, str, str], ...] = (
    (norm_kernels, rms_norm, "row < rows", "row <= rows"),
    (norm_kernels, rms_norm, "column < SIZE", "column <= SIZE"),
    (norm_kernels, rms_norm, "(row % INNER) * inner_stride", "0"),
    (norm_kernels, add_rms_norm, "row < rows", "row <= rows"),
    (norm_kernels, add_rms_norm, "wide * wide", "added * added"),
    (activation, gated, "row < rows", "row <= rows"),
    (activation, gated, "column < SIZE", "column <= SIZE"),
    (activation, gated, "place + SIZE", "place + SIZE - 1"),
    (activation, gated, "0.044715", "0.44715"),
    (rotation, rotary, "column < HALF", "column <= HALF"),
    (rotation, rotary, "token < tokens", "token <= tokens"),
    (rotation, rotary, "column < DIM", "column <= DIM"),
    (cells, store_kv, "row < tokens", "row <= tokens"),
    (cells, store_kv, "column < WIDTH", "column <= WIDTH"),
    (cells, cache_locations, "token < tokens", "token <= tokens"),
    (cells, cache_locations, "position % PAGE", "position"),
    (draft_verification, place_proposals, "node < width", "node <= width"),
    (draft_verification, place_proposals, "place < tl.load(limits + row)", "place <= tl.load(limits + row)"),
    (draft_verification, place_proposals, "usable & (node < tl.load(nodes + row))", "usable"),
    (draft_verification, place_proposals, "tl.maximum(proposed, 0)", "proposed"),
    (draft_verification, place_proposals, "tl.where(usable, slot, 0)", "slot"),
    (draft_verification, place_proposals, "slot * proposals_stride", "slot * width"),
    (draft_verification, accept_proposals, "place < width - 1", "place < width"),
    (
        draft_verification,
        accept_proposals,
        "tl.min(tl.where(is_right, NODES, place), axis=0)",
        "tl.sum(is_right.to(tl.int32), axis=0)",
    ),
    (draft_verification, accept_proposals, "is_right = usable & ", "is_right = "),
    (draft_verification, accept_proposals, "(usable & (proposed >= 0))", "usable"),
    (draft_verification, accept_proposals, "tl.maximum(tl.load(limits + row), before)", "tl.load(limits + row)"),
    (draft_verification, accept_proposals, "tl.load(drawn + first + accepted)", "tl.load(drawn + first)"),
    (draft_verification, tree_walk, "inside, is_node = node < width", "inside, is_node = node <= width"),
    (
        draft_verification,
        tree_walk,
        "is_right = usable & (tl.load(drawn + first + parent",
        "is_right = (tl.load(drawn + first + parent",
    ),
    (draft_verification, tree_walk, "drawn + first + parent", "drawn + first + node"),
    (draft_verification, tree_walk, "(ancestors & wrong) == 0", "(1 << node & wrong) == 0"),
    (draft_verification, tree_walk, "tl.where(place <= accepted, own, place)", "own"),
    (draft_verification, tree_walk, "mask=place < steps", "mask=place <= steps"),
    (draft_verification, tree_walk, "row * steps + accepted", "row * width + accepted + 1"),
    (draft_verification, tree_walk, "is_node & usable & (proposed >= 0)", "usable & (proposed >= -1)"),
    (draft_verification, tree_walk, "tl.load(drawn + first + end)", "tl.load(drawn + first + accepted)"),
    (draft_verification, tree_walk, "held + table", "held"),
    (draft_trees, tree_expand, "inside = place < leaders", "inside = place <= leaders"),
    (draft_trees, tree_expand, "row * (leaders // width) + place // width", "row * width + place // width"),
    (draft_trees, tree_expand, "scores + beam * scores_stride", "scores + beam * tokens_stride - beam"),
    (draft_trees, tree_expand, "score += tl.load(chances + beam, mask=inside, other=0.0)", "pass"),
    (draft_trees, tree_expand, "sums + row * most + first + place", "sums + row * most + place"),
    (
        draft_trees,
        tree_expand,
        "tl.where(left & (score == best), place, LEADERS)",
        "tl.where(score == best, place, LEADERS)",
    ),
    (draft_trees, tree_expand, "chosen // width", "chosen % width"),
    (draft_trees, tree_expand, "chosen + first)", "chosen)"),
    (draft_trees, tree_expand, "tl.min(tl.where(left", "tl.max(tl.where(left"),
    (draft_trees, tree_build, "inside = place < most", "inside = place <= most"),
    (draft_trees, tree_build, 'tl.where(total == float("-inf"), -1, ', 'tl.where(total == float("inf"), -1, '),
    (draft_trees, tree_build, "tl.where(left & (total == best), place, RECORDS)", "tl.where(left, place, RECORDS)"),
    (draft_trees, tree_build, "kept & (place <= above)", "place <= above"),
    (draft_trees, tree_build, "place <= above", "place < above"),
    (draft_trees, tree_build, "held + requests * most", "held"),
    (
        draft_trees,
        tree_place,
        "is_node = node < nodes, (node > 0) & (node < nodes)",
        "is_node = node < nodes, node < nodes",
    ),
    (draft_trees, tree_place, "inside, is_node = node < nodes", "inside, is_node = node <= nodes"),
    (draft_trees, tree_place, "tl.static_range(ROUNDS)", "tl.static_range(ROUNDS - 1)"),
    (draft_trees, tree_place, "ancestors = ancestors | ", "ancestors = "),
    (draft_trees, tree_place, "row * depths_stride", "row * parents_stride"),
    (draft_trees, tree_place, "depth - node", "depth"),
    (draft_trees, tree_place, "((1 << above) - 1)", "(1 << above)"),
    (draft_trees, tree_place, "slot * (nodes - 1) + node - 1", "slot * nodes + node - 1"),
    (hisparse, swap_in, "== ids)", ">= 0)"),
    (hisparse, swap_in, "tl.where(slot > 0, tl.load(chosen", "tl.where(slot >= 0, tl.load(chosen"),
    (hisparse, swap_in, "free - missed + rank, rank - missed", "rank, rank"),
    (hisparse, swap_in, "free + hits", "hits"),
    (hisparse, swap_in, "tl.where(is_real, at, -1)", "at"),
    (hisparse, swap_in, "tl.store(places + ids, place, mask=is_miss)", "tl.store(places + ids, place, mask=is_hit)"),
    (hisparse, swap_in, "lane >= missed", "lane > missed"),
    (hisparse, copy_rows, "column < SIZE", "column <= SIZE"),
    (hisparse, copy_rows, "[:, None] & (column < SIZE)", "[:, None] & (column < SIZE - 1)"),
    (hisparse, copy_rows, "loads + span + request", "loads + request"),
)


@pytest.mark.parametrize(
    ("module", "law", "old", "new"), MUTANTS, ids=lambda value: str(getattr(value, "__name__", value))
)
def test_a_defect_is_caught(
    module: ModuleType, law: Law, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(module, tmp_path, old, new)
    with pytest.raises(AssertionError):
        law(defect, guards, 7, torch.float32)
        guards.check()


def test_narrow_floats_are_rounded_to_even_in_the_interpreter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter itself truncates bfloat16, which would show in the norm of values between two
    steps."""
    x = random(5, 48, dtype=torch.bfloat16)
    weight = random(48, dtype=torch.bfloat16, seed=1)
    for gain in (weight, random(48, seed=2)):
        assert torch.equal(norm_kernels.rms_norm(x, gain, 1e-5), reference_kernels.rms_norm(x, gain, 1e-5))
    total = (x.float() + x.roll(1).float()).bfloat16()
    assert torch.equal(norm_kernels.add_rms_norm(x.clone(), x.roll(1), weight, 1e-5)[1], total)


def test_the_table_replaces_what_has_a_kernel_and_says_so() -> None:
    table, plain = triton_kernels(SMALL), KernelTable()
    own = {name for name, origin in table.origin.items() if origin != plain.origin.get(name)}
    assert own == {
        *(
            "rms_norm",
            "add_rms_norm",
            "rotary",
            "silu_and_mul",
            "gelu_tanh_and_mul",
            "top_k_routing",
            "moe",
            "clamped_moe",
            "mxfp4_moe",
        ),
        *("store_kv", "cache_locations", "draw", "rotary_and_store", "place_proposals", "accept_proposals"),
        *("tree_walk", "tree_expand", "tree_build", "tree_place", "swap_in", "copy_rows"),
        *("limited_moe", "limited_silu_and_mul", "sqrtsoftplus_routing", "hash_routing"),
        *("hc_pre", "hc_post", "hc_head", "rope_tail", "norm_rope_store", "index_key_store"),
        *("window_rows", "block_rows", "compress_plan"),
        *("causal_conv", "gated_delta_rule", "selective_scan", "gated_rms_norm"),
        *("sparse_mqa", "paged_mqa", "index_logits", "index_top_k", "compress", "grouped_linear"),
    }
    assert table.origin["rms_norm"] == "sglcore.runtime.kernels.triton.norm_kernels:rms_norm"


@pytest.mark.parametrize("lanes", [32, 64])
def test_a_program_has_as_many_threads_whatever_the_width_of_a_warp(lanes: int) -> None:
    tuning = Tuning(lanes=lanes)
    assert tuning.options(tuning.rms_norm)["num_warps"] * lanes == tuning.rms_norm.threads
    assert tuning.options(LaunchConfig(256, lanes=16)) == {"num_warps": 16, "num_stages": 2}


def test_a_compiler_sees_plain_operations() -> None:
    table, plain = triton_kernels(), KernelTable()
    x, weight = random(3, 16), random(16, seed=1)

    def step(entries: partial[Tensor] | Callable[..., Tensor], x: Tensor) -> Tensor:
        return table.silu_and_mul(entries(x, weight, 1e-5))

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(table.rms_norm, x), step(plain.rms_norm, x))
