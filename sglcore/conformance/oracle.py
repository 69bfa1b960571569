"""An oracle's log-probabilities of a text, and the comparison of a device's results with them. The
kit's own oracle is the reference device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.prompts import FIRST_TOKEN, VOCAB
from sglcore.conformance.law import LawBroken
from sglcore.conformance.session import Result
from sglcore.worker.model_worker import TokenLogprobs

Scores = NDArray[np.float32]


class Oracle(Protocol):
    """Knows the correct distributions over the next token."""

    def logprobs(self, ids: Sequence[int]) -> Scores:
        """Return log-probabilities float32 [len(ids), vocab], by token id; row i is of the token
        after ids[i]. Waits."""
        ...


class ReferenceOracle:
    """The reference's distributions over the next token, from one prefill for each text; kept,
    because laws request texts again. `harness` is the started reference."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self._known: dict[tuple[int, ...], Scores] = {}

    def logprobs(self, ids: Sequence[int]) -> Scores:
        """Return log-probabilities float32 [len(ids), vocab], by token id; row i is of the token
        after ids[i]. The first call for a text runs the reference and waits; the array is shared by
        later calls."""
        key = tuple(ids)
        if key not in self._known:
            result = self.harness.run([[*ids, FIRST_TOKEN]], 1, score_prompts=True)[0]
            self._known[key] = np.concatenate([_dense(found) for found in result.prompt_scores])
        return self._known[key]


def _dense(found: TokenLogprobs) -> Scores:
    """Return log-probabilities float32 [N, vocab] by token id, from a record of N tokens that lists
    every alternative."""
    out = np.full((len(found.chosen), VOCAB), -np.inf, np.float32)
    np.put_along_axis(out, found.top_ids.astype(np.int64), found.top_logprobs, axis=1)
    return out


def check_results(results: Sequence[Result], oracle: Oracle, tolerance: float) -> float:
    """Check that every log-probability is the oracle's for the same text, and that each greedy
    token is at most twice the tolerance below the oracle's best. `tolerance`: in nats.

    Returns the largest difference. Raises LawBroken with the first divergent token, and with the
    margin of the oracle's two best tokens.
    """
    worst = 0.0
    for number, result in enumerate(results):
        expected = oracle.logprobs(result.prompt + result.tokens)
        for place, found, row in _scored(result, expected):
            error = _difference(found, row, result, place)
            worst = max(worst, error)
            if not error <= tolerance:
                raise LawBroken(_divergence(f"request {number}", result, place, found, row, error, tolerance))
        if result.greedy:
            _check_greedy(number, result, expected, tolerance)
    return worst


def _scored(result: Result, expected: Scores) -> Iterator[tuple[int, TokenLogprobs, Scores]]:
    """Yield (position of the token in the text, the device's record of it, the oracle's
    log-probabilities [vocab]) for each scored prompt token and each output token of a result."""
    start = len(result.prompt)
    place = 1
    for found in result.prompt_scores:
        for row in range(len(found.chosen)):
            yield place, _row(found, row), expected[place - 1]
            place += 1
    for place, found in enumerate(result.scores, start):
        yield place, found, expected[place - 1]


def _row(found: TokenLogprobs, row: int) -> TokenLogprobs:
    rows = slice(row, row + 1)
    return TokenLogprobs(found.chosen[rows], found.ranks[rows], found.top_ids[rows], found.top_logprobs[rows])


def _difference(found: TokenLogprobs, row: Scores, result: Result, place: int) -> float:
    """Return the largest difference in nats over the chosen token and the likeliest 8 alternatives
    that the device shows; infinity if one is NaN or infinite."""
    token = (result.prompt + result.tokens)[place]
    shown = found.top_ids[0][:8]
    pairs = np.abs(np.append(found.top_logprobs[0][: len(shown)] - row[shown], found.chosen[0] - row[token]))
    return float(pairs.max()) if np.isfinite(pairs).all() else float("inf")


def _divergence(
    who: str, result: Result, place: int, found: TokenLogprobs, row: Scores, error: float, bound: float
) -> str:
    token = (result.prompt + result.tokens)[place]
    order = np.argsort(-row, kind="stable")[:2]
    margin = float(row[order[0]] - row[order[1]])
    part = "prompt" if place < len(result.prompt) else "output"
    return (
        f"{who}: the first divergent token is number {place} of the text ({part}, id {token}): log-probability "
        f"{float(found.chosen[0]):.5f}, the oracle says {float(row[token]):.5f}; largest difference {error:.3g} "
        f"where {bound:g} is allowed; the oracle's two best are {order.tolist()}, {margin:.3g} apart"
    )


def _check_greedy(number: int, result: Result, expected: Scores, tolerance: float) -> None:
    for index, token in enumerate(result.tokens):
        row = expected[len(result.prompt) + index - 1]
        below = float(row.max() - row[token])
        if below > 2 * tolerance:
            raise LawBroken(
                f"request {number}: greedy token {index} is {token}, {below:.3g} below the oracle's best "
                f"{int(row.argmax())}, where {2 * tolerance:g} is allowed"
            )
