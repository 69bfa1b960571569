"""The attention laws on this package's device; a missing or old library is refused with the
reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from sglcore.device.package import resolve
from sglcore.runtime.attention.contract import Unavailable
from sglcore_musa import package
from sglcore_musa.graphs import make_capture  # noqa: F401
from tests.attention.on_packages import *  # noqa: F403
from tests.attention.on_packages import DECODE, EXTEND, HEADS, WINDOW, Placing
from tests.attention.rows import Heads

ATTENTION = ("flash_attention",)
"""The package's own backend; only a few cases test the core's Triton attention here."""


@pytest.mark.parametrize(("name", "heads"), [("flash_attention", Heads(8, 2, 128)), ("triton", WINDOW)])
@pytest.mark.parametrize(("rows", "is_decode"), [(DECODE, True), (EXTEND, False), ([(9, 1), (0, 7)], False)])
def test_wide_heads_and_windows_are_the_dense_oracle(
    placing: Placing, name: str, heads: Heads, rows: Any, is_decode: bool
) -> None:
    placed = placing.place(rows, name, heads, decode=is_decode)
    placed.check(placed.run())


@pytest.mark.parametrize("heads", [HEADS, WINDOW])
def test_a_captured_bucket_of_triton_serves_other_lengths_pages_and_fewer_rows(placing: Placing, heads: Heads) -> None:
    placing.check_captured("triton", heads)


@pytest.fixture
def find() -> Callable[[], Any]:
    """The package's function that looks for the library."""
    return sys.modules[resolve(package.attention["flash_attention"]).__module__].find


def test_a_missing_library_is_refused_naming_both_modules_and_the_remedy(
    find: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn_interface", "mate"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match=r"flash_attn_interface: .*mate: .*pip install mate"):
        find()


def test_a_library_without_pages_is_refused_by_what_it_lacks(
    find: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = ModuleType("older")
    vars(older)["flash_attn_with_kvcache"] = lambda q, k_cache, v_cache, cache_seqlens, softmax_scale, causal: None
    monkeypatch.setitem(sys.modules, "flash_attn_interface", older)
    monkeypatch.setitem(sys.modules, "mate", None)
    with pytest.raises(Unavailable, match="lacks cu_seqlens_q, max_seqlen_q, page_table, softcap, window_size"):
        find()


def test_the_second_module_serves_where_the_first_is_missing(
    find: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert callable(find())
