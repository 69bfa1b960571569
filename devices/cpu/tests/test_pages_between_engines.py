"""KV pages of 8 bits go between engines unchanged: a page is contiguous bytes, scales included."""

from __future__ import annotations

import pytest

from sglcore.engine.start import embedded_model
from tests.laws.engine import random_prompts
from tests.pages.pair import Pair, Single, check_same

pytestmark = pytest.mark.needs("graphs.native")


def test_texts_by_pages_of_8_bits_are_those_of_one_engine() -> None:
    settings = {"kv_cache_dtype": "int8", "graph": "native", "max_model_len": 128}
    alone = Single(embedded_model(), prefix_cache=False, **settings)
    with Pair(embedded_model(), **settings) as pair:
        for engine in (pair.decode, alone):
            for place, prompt in enumerate(random_prompts(3, (5, 17, 30))):
                engine.add(f"r{place}", prompt)
        assert "int8" in str(pair.decode.transfer._layout)
        check_same(pair.run(), alone.run())
    alone.engine.close()
