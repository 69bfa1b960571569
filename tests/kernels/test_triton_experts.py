"""Routing and experts in Triton equal the reference for any routing, and touch nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.triton import LaunchConfig, Tuning, experts, routing
from sglcore.runtime.kernels.triton.tuning import MoeTile
from tests.kernels.guards import Guards, mutated
from tests.kernels.test_grouped_moe import EXPERTS, parts
from tests.kernels.test_reference_kernels import random

TILES = (MoeTile(1, 16, 16, 64, LaunchConfig()), MoeTile(1 << 31, 32, 64, 128, LaunchConfig()))
SMALL = Tuning(elements=64, moe=TILES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def close(found: Tensor, wanted: Tensor) -> None:
    """Compare with an error relative to the largest element: a sum of products with random signs
    may be small and have a large relative error."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if wanted.numel():
        bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(wanted.dtype, 1e-6)
        largest = float(wanted.float().abs().max())
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=max(bound * largest, 1e-12))


def moe(module: ModuleType, guards: Guards, tokens: int, choices: int, dtype: torch.dtype) -> None:
    hidden, weights, ids, w13, w2 = parts(tokens, choices, dtype)
    wide = torch.full((tokens, hidden.shape[1] + 3), torch.nan, dtype=dtype)
    wide[:, 1:-2] = hidden
    rows = guards.place(wide)[:, 1:-2]
    for index_dtype in (torch.int32, torch.int64):
        given = [guards.place(part) for part in (weights, ids.to(index_dtype), w13, w2)]
        close(module.moe(rows, *given, SMALL), reference_kernels.moe(hidden, weights, ids, w13, w2))
    b13, b2 = random(*w13.shape[:2], dtype=dtype, seed=8), random(*w2.shape[:2], dtype=dtype, seed=9)
    biased = [guards.place(part) for part in (weights, ids, w13, b13, w2, b2)]
    wanted = reference_kernels.clamped_moe(hidden, weights, ids, w13, b13, w2, b2, 1.702, 0.9)
    close(module.clamped_moe(rows, *biased, 1.702, 0.9, SMALL), wanted)
    mxfp4(module, guards, weights, ids, dtype)


def mxfp4(module: ModuleType, guards: Guards, weights: Tensor, ids: Tensor, dtype: torch.dtype) -> None:
    """Random MXFP4 codes; their rows consist of whole groups of 32."""
    source, (width, size) = torch.Generator().manual_seed(12), (64, 32)
    packed: list[Tensor] = []
    for outputs, inputs in ((2 * size, width), (width, size)):
        shape = (EXPERTS, outputs, inputs // 32)
        packed.append(torch.randint(0, 256, (*shape, 16), generator=source, dtype=torch.uint8))
        packed.append(torch.randint(121, 126, shape, generator=source, dtype=torch.uint8))
        packed.append(random(EXPERTS, outputs, dtype=dtype, seed=outputs))
    given: list[Any] = [random(len(ids), width, dtype=dtype), weights, ids, *packed]
    placed = [guards.place(part) for part in given]
    settings: list[Any] = [1.702, 0.9]
    close(module.mxfp4_moe(*placed, *settings, SMALL), reference_kernels.mxfp4_moe(*given, *settings))


@DTYPES
@pytest.mark.parametrize(("tokens", "choices"), [(0, 2), (1, 3), (9, 3), (40, 1)])
def test_experts_give_what_the_reference_gives_within_their_bounds(
    tokens: int, choices: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    moe(experts, guards, tokens, choices, dtype)
    guards.check()


def test_a_choice_without_an_expert_adds_nothing_whatever_its_row_contains() -> None:
    hidden, weights, ids, w13, w2 = parts(5, 2)
    hidden[3], ids[3], weights[3] = torch.nan, -1, torch.nan
    ids[1, 0], weights[1, 0] = -1, torch.inf
    found = experts.moe(hidden, weights, ids, w13, w2, SMALL)
    assert torch.equal(found[3], torch.zeros_like(found[3]))
    close(found, reference_kernels.moe(hidden, weights, ids, w13, w2))


def test_padding_rows_change_nothing() -> None:
    hidden, weights, ids, w13, w2 = parts(5, 2)
    more = 4
    padded = (
        torch.cat([hidden, torch.full((more, hidden.shape[1]), torch.nan)]),
        torch.cat([weights, torch.full((more, 2), torch.nan)]),
        torch.cat([ids, torch.full((more, 2), -1)]),
    )
    found = experts.moe(padded[0], padded[1], padded[2], w13, w2, SMALL)
    close(found[:5], experts.moe(hidden, weights, ids, w13, w2, SMALL))
    assert torch.equal(found[5:], torch.zeros_like(found[5:]))


@pytest.mark.parametrize("only", [0, EXPERTS - 1])
def test_one_expert_may_get_every_token(only: int) -> None:
    hidden, weights, ids, w13, w2 = parts(40, 1)
    ids = torch.full_like(ids, only)
    close(experts.moe(hidden, weights, ids, w13, w2, SMALL), reference_kernels.moe(hidden, weights, ids, w13, w2))


@pytest.mark.parametrize("is_any", [True, False])
def test_nobody_may_be_chosen_at_all(is_any: bool) -> None:
    hidden, weights, ids, w13, w2 = parts(3, 2)
    ids = torch.where(torch.tensor(is_any), ids, -1)
    close(experts.moe(hidden, weights, ids, w13, w2, SMALL), reference_kernels.moe(hidden, weights, ids, w13, w2))


def test_to_a_compiler_the_experts_are_one_operation() -> None:
    def run(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return experts.moe(hidden, weights, ids, w13, w2, SMALL)

    compiled, values = torch.compile(run, fullgraph=True, backend="eager"), parts(5, 2)
    assert torch.equal(compiled(*values), run(*values))


def top_k(module: ModuleType, guards: Guards, dtype: torch.dtype) -> None:
    logits = guards.place(torch.cat([random(9, 21, dtype=dtype), torch.zeros(9, 3, dtype=dtype)], dim=1))[:, :21]
    for normalize in (True, False):
        weights, ids = module.top_k_routing(logits, 4, normalize, SMALL)
        wanted, wanted_ids = reference_kernels.top_k_routing(logits, 4, normalize)
        assert torch.equal(ids, wanted_ids) and ids.dtype == torch.int32
        torch.testing.assert_close(weights, wanted, rtol=2**-8 if dtype != torch.float32 else 1e-5, atol=1e-6)


@DTYPES
def test_routing_gives_what_the_reference_gives_within_its_bounds(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    top_k(routing, guards, dtype)
    weights, ids = routing.top_k_routing(torch.empty(0, 5), 2, True, SMALL)
    assert weights.shape == ids.shape == (0, 2)
    guards.check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_experts_of_a_row_of_garbage_exist_and_differ(value: float) -> None:
    _, ids = routing.top_k_routing(torch.full((2, 6), value), 3, True, SMALL)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_equal_probabilities_go_by_the_lower_expert() -> None:
    assert routing.top_k_routing(torch.zeros(1, 6), 3, True, SMALL)[1].tolist() == [[0, 1, 2]]


MUTANTS = (
    ("choice < choices", "choice <= choices"),
    ("mask=rest < after * ROWS", "mask=rest < 0"),
    ("(counts + ROWS - 1) // ROWS", "counts // ROWS"),
    ("first * ROWS", "first * ROWS + 1"),
    ("choice // CHOICES", "choice"),
    ("column * 2 if CLAMPED", "column if CLAMPED"),
    ("bias + 1", "bias"),
    ("-alpha * gate", "-gate"),
    ("tl.maximum(rounded(up, dtype), -limit)", "rounded(up, dtype)"),
    ("b2 + expert * HIDDEN", "b2"),
    ("depth % 2 * 4", "(1 - depth % 2) * 4"),
    ("depth // 32", "depth // 64"),
    ("code >= 8", "code >= 16"),
    ("weight + apart * HIDDEN", "weight"),
    ("first + apart", "first"),
    ("line_of = expert * HIDDEN + column", "line_of = column"),
    ("power == 0", "power < 0"),
    ("column < HIDDEN", "column <= HIDDEN"),
    ("token < tokens", "token <= tokens"),
    (">= 0\n", ">= -1\n"),
    ("(chosen == expert).to", "(chosen >= expert).to"),
)


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_a_defect_of_the_experts_is_caught(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    # An operation can be registered once in a process, so the mutant's has another name.
    defect = mutated(experts, tmp_path, old, new, (("sglcore::triton_moe", f"sglcore::mutant_{abs(hash(old + new))}"),))
    with pytest.raises(AssertionError):
        moe(defect, guards, 9, 3, torch.float32)
        guards.check()


@pytest.mark.parametrize(("old", "new"), [("row < rows", "row <= rows"), ("expert < EXPERTS", "expert <= EXPERTS")])
def test_a_defect_of_the_routing_is_caught(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)
    with pytest.raises(AssertionError):
        top_k(mutated(routing, tmp_path, old, new), guards, torch.float32)
        guards.check()
