"""The reference of the vendor's FlashAttention refuses what the library refuses, so tests on the
simulator detect such calls of this package."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.attention.preconditions import FLASH_ATTENTION, Calls, Wrong, flash_attention

pytestmark = pytest.mark.needs("simulator")

WRONGS = (
    *(wrong for wrong in FLASH_ATTENTION if wrong.argument != "v_cache" or "shape" not in wrong.says),
    Wrong("pages", lambda _: (32, 64, 64), "pages of"),
    Wrong("pages", lambda _: (16, 60, 60), "heads of whole 8ths"),
    Wrong("pages", lambda _: (16, 64, 32), "values of the shape of keys"),
)


def calls() -> Calls:
    """Return the calls, with the additional argument `pages`: (tokens, key head size, value head
    size)."""
    library = importlib.import_module("mate")
    modules = [importlib.import_module(f"sglcore_sim.vendors.{name}") for name in ("paged", "torch_musa_ops")]

    def call(pages: tuple[int, int, int], **given: object) -> torch.Tensor:
        size, dim, values = pages
        cut = {"q": given["q"][..., :dim]}  # pyright: ignore[reportIndexIssue]
        for name, width in (("k_cache", dim), ("v_cache", values)):
            cells = given[name]
            assert isinstance(cells, torch.Tensor)
            cut[name] = cells.reshape(-1, size, *cells.shape[2:])[..., :width] if size != 16 else cells[..., :width]
        return library.flash_attn_with_kvcache(**{**given, **cut})

    made = flash_attention(call, torch.device("musa:0"), modules)
    return Calls(call, {**made.given, "pages": (16, 64, 64)}, WRONGS, modules)


@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.says)
def test_flash_attention_refuses(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    calls().check_refused(wrong, monkeypatch)


def test_every_precondition_is_violated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls().check_covered(monkeypatch)
