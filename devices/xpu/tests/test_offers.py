"""The README's table of what vllm-xpu-kernels offers, held against the parameters of its wheel,
which are stored here."""

from __future__ import annotations

import json
from pathlib import Path

from sglcore_xpu import package
from tests.kernels.library_offers import check_parameters, check_served, check_used, offers_of

HERE = Path(__file__).parent
STORED = json.loads((HERE / "xpu_kernels_offers.json").read_text())["functions"]
OFFERS = offers_of(HERE.parent / "README.md")


def test_rows_have_the_published_parameters_and_name_what_exists() -> None:
    published = {name.rpartition(".")[2]: parameters for name, parameters in STORED.items()}
    check_parameters(OFFERS, published)
    check_served(OFFERS, package)
    assert OFFERS.keys() == published.keys()


def test_no_function_is_used_and_none_is_imported() -> None:
    check_used(OFFERS, ())
    sources = (HERE.parent / "sglcore_xpu").rglob("*.py")
    assert not any("vllm_xpu_kernels" in source.read_text(encoding="utf-8") for source in sources)
