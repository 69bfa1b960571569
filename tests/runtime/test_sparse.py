"""Attention over windows and blocks: pages, chunks, batches and graphs change no number."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.sparse_tiny import HEAVY, LAYERS, SLIDING, SPARSE, WINDOW, SparseDesk, make_sparse
from tests.runtime.test_windows import script
from tests.runtime.tiny import SHARED, STAGED, assert_close, random_tokens


@pytest.mark.parametrize("layers", [(SLIDING,), (HEAVY,), (SPARSE,), LAYERS])
def test_one_text_at_once_is_what_the_formulas_give(layers: Any) -> None:
    site = make_sparse(layers)
    tokens = random_tokens(1, 9)
    batch = site.runner.init_batch(SparseDesk(site, WINDOW).extend({3: tokens}))
    assert_close(site.runner.forward(batch)[0], site.model.dense(tokens))


@pytest.mark.parametrize("buckets", [(), (1, 4)])
@pytest.mark.parametrize("facts", [SHARED, STAGED])
def test_every_token_is_what_the_whole_text_gives(facts: Any, buckets: Any) -> None:
    script(make_sparse(facts=facts, buckets=buckets), WINDOW, SparseDesk)
