"""The masks of a request under a grammar: for its next token, and for those after proposals that the grammar allows."""

from __future__ import annotations

from sglcore.schedule.request import Ints, Request


def fill_along(request: Request, words: Ints) -> int:
    """How many masks were written to words int32[N, ceil(V / 32)]: one for the token after all that was emitted, and one after
    each of `drafts` up to the first that ends the output or that the grammar forbids. The matcher is left as it was."""
    matcher = request.matcher
    assert matcher is not None
    matcher.fill(words[0])
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
    if is_changed:
        matcher.rollback(accepted)
    return filled


def _allows(mask: Ints, token: int) -> bool:
    return 0 <= token < 32 * len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)
