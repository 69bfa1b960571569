"""The rows of a verification: lengths that the host knows before it, and the tokens kept after
it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore.step.verification_rows import accepted_runs, most_lens
from sglcore.worker.model_worker import BatchResult, TokenLogprobs


@pytest.mark.parametrize(("bad", "wanted"), [(2, [False, False]), (0, [True, False]), (5, [False, True])])
def test_only_what_was_accepted_is_kept_with_all_that_is_known_of_it(bad: int, wanted: list[bool]) -> None:
    ids = np.arange(10, 16, dtype=np.int32)
    values = ids[:, None] + np.array([0.0, 0.5], np.float32)
    logprobs = TokenLogprobs(-ids.astype(np.float32), ids * 2, np.stack([ids, ids + 1], 1), values)
    wide = BatchResult(3, np.arange(7, dtype=np.int32), ids, np.arange(6) == bad, logprobs=logprobs)
    found = accepted_runs(wide, np.array([0, 2], np.int32), np.array([2, 2], np.int32))
    assert found.token_offsets.tolist() == [0, 1, 4] and found.token_ids.tolist() == [10, 13, 14, 15]
    assert found.bad_rows.tolist() == wanted and found.proposed is not None and found.logprobs is not None
    kept = found.token_ids
    assert found.logprobs.chosen.tolist() == (-kept).tolist() and found.logprobs.ranks.tolist() == (kept * 2).tolist()
    assert found.logprobs.top_ids.tolist() == [[each, each + 1] for each in kept.tolist()]
    assert found.logprobs.top_logprobs[:, 0].tolist() == kept.tolist()


def test_a_token_to_verify_sees_itself_and_what_its_row_has_at_most() -> None:
    """Up to the row's limit; a row without KV cells counts as having one."""
    batch: Any = SimpleNamespace(prefix_lens=np.array([4, 7, 0], np.int32), cell_limits=np.array([40, 9, 0], np.int32))
    assert most_lens(batch, 3).tolist() == [5, 6, 7, 8, 9, 9, 1, 1, 1]
