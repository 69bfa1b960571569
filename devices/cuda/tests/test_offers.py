"""The README's table of what libraries offer, held against their published parameters, which are
stored here with their versions."""

from __future__ import annotations

import json
from pathlib import Path

from sglcore_cuda import package
from tests.kernels.library_offers import check_parameters, check_served, check_used, offers_of

HERE = Path(__file__).parent
STORED = json.loads((HERE / "library_offers.json").read_text())
OFFERS = offers_of(HERE.parent / "README.md")
CALLED = {
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper",
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper",
    "flashinfer.top_k_page_table_transform",
    "flash_attn_interface.flash_attn_with_kvcache",
    "flash_mla.flash_mla_sparse_fwd",
}


def test_rows_have_the_published_parameters_and_name_what_exists() -> None:
    check_parameters(OFFERS, STORED["functions"])
    check_served(OFFERS, package)
    assert OFFERS.keys() == STORED["functions"].keys()
    assert {name.partition(".")[0] for name in OFFERS} == STORED["libraries"].keys()


def test_the_functions_that_are_used_are_those_that_are_called() -> None:
    check_used(OFFERS, CALLED)
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (HERE.parent / "sglcore_cuda").glob("*.py"))
    for name in CALLED:
        assert name.rpartition(".")[2] in sources
