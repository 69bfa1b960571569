"""Token masks and logit additions of requests with a grammar: for the next token, and for the token
after each draft token that the grammar allows.
"""

from __future__ import annotations

import numpy as np

from sglcore.schedule.request import Floats, Ints, Request
from sglcore.worker.schedule_batch import ScheduleBatch

Change = tuple[Ints, Floats]
"""Token ids, and the value to add to the logit of each."""


def fill_along(request: Request, words: Ints, changes: list[Change]) -> int:
    """Write masks into `words` int32[N, ceil(V / 32)] and return how many.

    The first mask is for the token after all emitted tokens. One more follows after each of the
    request's `drafts`, up to the first draft token that ends the output or that the grammar
    forbids. If the request changes logits, `changes` receives the additions for each mask. The
    matcher's state is restored.
    """
    matcher = request.matcher
    assert matcher is not None
    matcher.fill(words[0])
    if request.change is not None:
        changes.append(request.change.change())
    filled, accepted, is_changed = 1, 0, False
    for mask, following, draft in zip(words, words[1:], request.drafts, strict=False):
        if draft in request.stop_ids or not _allows(mask, draft):
            break
        is_changed = True
        if not matcher.accept(draft):
            break
        accepted += 1
        matcher.fill(following)
        if matcher.error:
            break
        filled += 1
        if request.change is not None:
            changes.append(request.change.change())
    if is_changed:
        matcher.rollback(accepted)
    return filled


def _allows(mask: Ints, token: int) -> bool:
    return 0 <= token < 32 * len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def add_changes(batch: ScheduleBatch, rows: list[int], changes: list[list[Change]]) -> None:
    """Set the fields of the batch for logit additions: `changes[i][k]` is for the token of row
    `rows[i]` after k draft tokens. The fields are None if there are no additions.
    """
    each = [
        (row, node, *added)
        for row, own in zip(rows, changes, strict=True)
        for node, added in enumerate(own)
        if len(added[0])
    ]
    batch.change_rows = batch.change_nodes = batch.change_ids = batch.change_values = None
    if not each:
        return
    counts = [len(ids) for _, _, ids, _ in each]
    batch.change_rows, batch.change_nodes = (
        np.repeat(np.array([entry[column] for entry in each], dtype=np.int32), counts) for column in (0, 1)
    )
    batch.change_ids = np.concatenate([ids for _, _, ids, _ in each])
    batch.change_values = np.concatenate([values for _, _, _, values in each])
