"""Rows of draft trees, where some earlier tokens are hidden, equal torch's own attention over the
visible tokens; hidden KV slots enter no sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglcore.runtime.attention import gathered, reference
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.attention.reference import ReferenceAttention
from tests.attention.rows import CONTEXT, Case, Heads, make_case
from tests.attention.test_gathered import fixed

ROWS = ((0, 1), (9, 1), (30, 1), (31, 1), (32, 1), (CONTEXT - 1, 1))
HEADS = (Heads(), Heads(6, 2, 16, softcap=0.7), Heads(6, 2, 16, has_sinks=True))


def words(seed: int, count: int) -> torch.Tensor:
    """Random visibility words; the top bit is set, so each row sees its own token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 0, (count,), generator=generator, dtype=torch.int32)


def tree_case(heads: Heads, page_size: int, kind: Any, seed: int = 0) -> Case:
    """Make rows that see about half of the tokens before their own."""
    case = make_case(ROWS, heads, page_size, seed, decode=True, kind=kind)
    case.batch.visible = words(seed, len(ROWS))
    return case


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", [ReferenceAttention, GatheredAttention])
def test_rows_see_what_their_words_say(kind: Any, page_size: int, heads: Heads) -> None:
    case = tree_case(heads, page_size, kind)
    torch.testing.assert_close(case.run(), case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_of_captured_steps_do_too(page_size: int, heads: Heads) -> None:
    case = tree_case(heads, page_size, GatheredAttention)
    torch.testing.assert_close(fixed(case), case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("programs", [1, 1000])
def test_rows_in_triton_do_too(programs: int, heads: Heads) -> None:
    pytest.importorskip("triton", reason="needs the library triton")
    from sglcore.runtime.attention.triton import TritonAttention
    from sglcore.runtime.kernels.triton import Tuning

    class Split(TritonAttention):
        def make_tuning(self) -> Tuning:
            return Tuning(programs=programs, decode_tokens=16)

    case = tree_case(heads, 4, Split)
    torch.testing.assert_close(case.run(), case.dense(), rtol=1e-5, atol=1e-5)


def spoil(case: Case) -> None:
    """Overwrite the hidden KV slots with NaN."""
    assert case.batch.visible is not None
    pool = case.backend.token_to_kv_pool
    for cells, word in zip(case.cells, case.batch.visible.tolist(), strict=True):
        hidden = [back for back in range(1, min(32, len(cells))) if not word >> (31 - back) & 1]
        none = torch.full((len(hidden), case.layer.num_kv_heads, case.layer.head_dim), torch.nan)
        pool.write_cells(0, cells[[len(cells) - 1 - back for back in hidden]], none, none)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kind", ["reference", "gathered", "captured", "triton"])
def test_cells_that_rows_do_not_see_may_have_no_numbers(kind: str, heads: Heads) -> None:
    made: Any = ReferenceAttention if kind == "reference" else GatheredAttention
    if kind == "triton":
        pytest.importorskip("triton", reason="needs the library triton")
        from sglcore.runtime.attention.triton import TritonAttention as made
    case = tree_case(heads, 4, made)
    spoil(case)
    found = fixed(case) if kind == "captured" else case.run()
    torch.testing.assert_close(found, case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [reference, gathered])
def test_a_word_that_is_read_one_off_shows(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = reference.is_seen
    monkeypatch.setattr(module, "is_seen", lambda word, back: kept(word, back + 1))
    case = tree_case(Heads(), 4, GatheredAttention)
    found = case.run() if module is reference else fixed(case)
    assert not torch.allclose(found, case.dense(), rtol=1e-3, atol=1e-3)
