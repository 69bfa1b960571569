"""Shadow mode: replays are compared with eager forwards at the stated rate, and the comparison has
no side effects."""

from __future__ import annotations

import pytest
import torch

from sglcore.runtime.graphs.shadow_mode import TOLERANCE, Shadow, ShadowMismatch
from tests.runtime.graphs.test_graph_full import StalePlan, decode
from tests.runtime.graphs.test_graph_prompts import prompts, skips_calls
from tests.runtime.recording import make_graph_site

SIZES = (3, 1, 4, 2, 6, 5, 6)


@pytest.mark.parametrize(("every", "compared"), [(1, 7), (2, 3), (3, 2), (8, 0)])
def test_every_nth_replay_is_compared(every: int, compared: int) -> None:
    made = make_graph_site(shadow=every)
    decode(made, SIZES)
    assert made.graphs.shadow is not None
    assert (made.graphs.shadow.replays, made.graphs.shadow.compared) == (7, compared)


def test_prompts_are_compared_too() -> None:
    made = make_graph_site("breakable", shadow=1)
    prompts(made)
    assert made.graphs.shadow is not None and made.graphs.shadow.compared == 7


@pytest.mark.parametrize("kind", ["full", "breakable", "piecewise"])
def test_a_comparison_changes_no_bit_of_what_follows(kind: str) -> None:
    with_it, without = make_graph_site(kind, shadow=1, poison=True), make_graph_site(kind, poison=True)
    found = [decode(made, SIZES) if kind == "full" else prompts(made) for made in (with_it, without)]
    for (one, path), (other, _) in zip(*found, strict=True):
        assert path.startswith(kind)
        assert torch.equal(one, other)
    for layer in range(2):
        for one, other in zip(with_it.site.cells.kv(layer), without.site.cells.kv(layer), strict=True):
            assert torch.equal(one, other)


def test_a_stale_plan_is_caught_and_named() -> None:
    made = make_graph_site(attention=StalePlan, shadow=1)
    with pytest.raises(
        ShadowMismatch, match=r"the replay of full:4 differs .* first in row 0 of 3, by at most .*shadow=0"
    ):
        decode(made, (3,))


def test_a_call_that_was_left_out_is_caught() -> None:
    made = make_graph_site("breakable", shadow=2)
    skips_calls(made)
    with pytest.raises(ShadowMismatch, match="the replay of breakable:4"):
        prompts(made)


def test_the_first_differing_row_and_the_largest_error_are_told() -> None:
    eager = torch.ones(4, 3)
    replayed = eager.clone()
    replayed[2, 1], replayed[3, 0] = 1.5, -2.0
    with pytest.raises(ShadowMismatch, match="first in row 2 of 4, by at most 3 "):
        Shadow(1).compare("full:4", replayed, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_order_of_sums_is_no_mismatch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(6, 300, dtype=torch.float64), torch.randn(300, 40, dtype=torch.float64)
    whole = (left.to(dtype) @ right.to(dtype)).to(dtype)
    halves = left[:, :150].to(dtype) @ right[:150].to(dtype) + left[:, 150:].to(dtype) @ right[150:].to(dtype)
    Shadow(1).compare("full:6", halves, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tenth_of_the_largest_value_is_a_mismatch(dtype: torch.dtype) -> None:
    eager = torch.ones(2, 4, dtype=dtype)
    replayed = eager.clone()
    replayed[1, 0] = 1.1
    with pytest.raises(ShadowMismatch, match="row 1"):
        Shadow(1).compare("full:2", replayed, eager)


def test_what_the_message_calls_allowed_is_allowed() -> None:
    eager = torch.zeros(1, 2)
    allowed = TOLERANCE[eager.dtype] * (eager + 1e-3)
    Shadow(1).compare("full:1", allowed, eager)
    with pytest.raises(ShadowMismatch):
        Shadow(1).compare("full:1", allowed * 1.01, eager)


def test_nan_equals_nan_and_nothing_else() -> None:
    eager = torch.tensor([[1.0, torch.nan]])
    Shadow(1).compare("full:1", eager.clone(), eager)
    with pytest.raises(ShadowMismatch):
        Shadow(1).compare("full:1", torch.tensor([[torch.nan, torch.nan]]), eager)
    with pytest.raises(ShadowMismatch):
        Shadow(1).compare("full:1", torch.ones(1, 2), eager)


def test_a_rate_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Shadow(0)
