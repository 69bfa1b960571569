"""Log-probabilities in the forms of OpenAI's APIs: records of completions and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.token_text import TokenTexts

LEAST = -9999.0
"""The lowest log-probability that is sent; it stands for a probability of zero, because JSON has no
infinity."""


class CompletionLogprobs:
    """Makes the log-probability records of one choice of a completion; in a stream one for each
    part, whose offsets continue."""

    def __init__(self, texts: TokenTexts, *, offset: int = 0, shows_special: bool = False) -> None:
        """`offset`: characters of the choice's text before the first token; `shows_special`: the
        text contains special tokens, so that they count in offsets."""
        self._texts = texts
        self._offset = offset
        self._shows_special = shows_special

    def record(self, ids: Sequence[int], found: Sequence[TokenLogprob | None], wanted: int) -> dict[str, list[Any]]:
        """Return four lists with an entry for each of the tokens `ids`: tokens (text),
        token_logprobs, top_logprobs (text -> log-probability of the `wanted` most likely tokens and
        the chosen one) and text_offset (in characters). `found` has one record for each token; None
        for the first token of a prompt, which nothing predicts: its log-probabilities are None."""
        return {
            "tokens": [self._texts.text(token_id) for token_id in ids],
            "token_logprobs": [None if item is None else finite(item.logprob) for item in found],
            "top_logprobs": [None if item is None else self._top(item, wanted) for item in found],
            "text_offset": [self._take(token_id) for token_id in ids],
        }

    def _top(self, item: TokenLogprob, wanted: int) -> dict[str, float]:
        top = {self._texts.text(token_id): finite(value) for token_id, value in item.top[:wanted]}
        top.setdefault(self._texts.text(item.token_id), finite(item.logprob))
        return top

    def _take(self, token_id: int) -> int:
        before = self._offset
        if self._shows_special or not self._texts.is_special(token_id):
            # A character counts at its first byte; UTF-8 marks all other bytes.
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._texts.data(token_id))
        return before


def chat_logprobs(texts: TokenTexts, found: Sequence[TokenLogprob], wanted: int) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice, `{"content": [...], "refusal": None}`: each token's
    text, bytes (a list of numbers), log-probability, and `top_logprobs`, the `wanted` most likely
    tokens in the same form."""
    return {
        "content": [
            {
                **_one(texts, item.token_id, item.logprob),
                "top_logprobs": [_one(texts, token_id, value) for token_id, value in item.top[:wanted]],
            }
            for item in found
        ],
        "refusal": None,
    }


def prompt_scores(texts: TokenTexts, found: Sequence[TokenLogprob | None], wanted: int) -> list[Any]:
    """Return a prompt's log-probabilities in vLLM's form: for each token a map from the ids, as
    text, of the token and of the `wanted` most likely ones to `logprob`, `rank` (from 1) and
    `decoded_token`. An item of `found` that is None, for the first token, stays None."""
    return [None if item is None else _scores(texts, item, wanted) for item in found]


def finite(value: float) -> float:
    """Return a log-probability, or LEAST (-9999.0) if it is lower or not a number, so that JSON can
    represent it."""
    return value if value > LEAST else LEAST


def _one(texts: TokenTexts, token_id: int, value: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": finite(value), "bytes": list(texts.data(token_id))}


def _scores(texts: TokenTexts, item: TokenLogprob, wanted: int) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for rank, (token_id, value) in enumerate(item.top[:wanted], 1):
        scores[str(token_id)] = {"logprob": finite(value), "rank": rank, "decoded_token": texts.text(token_id)}
    chosen = {"logprob": finite(item.logprob), "rank": item.rank, "decoded_token": texts.text(item.token_id)}
    return {str(item.token_id): chosen, **scores}
