"""The batched sampler on MLX: logits in, tokens out, the same as `sglcore/sampling/sampler.py` token for token.

Host flags decide which code runs, never values of arrays: nothing is evaluated, so all of it can be compiled.
"""

from dataclasses import dataclass

import mlx.core as mx

from sglcore_mlx.sampling.cutoffs import keep_min_p, keep_prefix
from sglcore_mlx.sampling.logprobs import Logprobs, logprobs_of
from sglcore_mlx.sampling.processors import apply_bias, apply_mask, apply_penalties
from sglcore_mlx.sampling.race import RaceTables, draw_race, first_argmax, gaps_below_best, make_race_tables, row_keys
from sglcore_mlx.sampling.state import SamplingState

EXPONENT = 0x7F800000
"""The exponent bits of a float32: all ones in NaN and the infinities."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """token_ids int32[B]; bad_rows bool[B]: logits held NaN, +inf or nothing else than -inf, and the token is 0."""

    token_ids: mx.array
    bad_rows: mx.array
    logprobs: Logprobs | None = None


class Sampler:
    """Draws tokens for one vocabulary. Holds constants only, so one serves any number of batches."""

    def __init__(self, vocab_size: int) -> None:
        """Makes the tables of a vocabulary, 1..2**22 - 1 tokens. Raises ConfigError beyond."""
        self.vocab_size = vocab_size
        self.tables = make_race_tables(vocab_size)

    def sample(self, logits: mx.array, state: SamplingState) -> SampledTokens:
        """Draw one token per row of logits float[B, V]. Nothing is evaluated; works inside `mx.compile`."""
        processed = self.process(logits, state)
        best = mx.max(processed, axis=-1)
        drawn = self._draw(processed, best, state)
        bad = (best.view(mx.int32) & EXPONENT) == EXPONENT
        tokens = mx.where(bad, 0, drawn)
        top_n = state.needs.top_logprobs
        return SampledTokens(tokens, bad, None if top_n is None else logprobs_of(logits, tokens, top_n))

    def process(self, logits: mx.array, state: SamplingState) -> mx.array:
        """float32[B, V] of logits float[B, V] after penalties, bias with bans, and mask."""
        logits = logits.astype(mx.float32)
        if state.penalties is not None:
            logits = apply_penalties(logits, state.penalties, state.positions)
        if state.bias is not None:
            logits = apply_bias(logits, state.bias, state.positions)
        if state.allowed is not None:
            logits = apply_mask(logits, state.allowed)
        return logits

    def candidate_gaps(self, logits: mx.array, best: mx.array, state: SamplingState) -> mx.array:
        """As the function of this name, with this sampler's tables."""
        return candidate_gaps(logits, best, state, self.tables)

    def _draw(self, logits: mx.array, best: mx.array, state: SamplingState) -> mx.array:
        """int32[B]; any token in bad rows."""
        if state.needs.all_greedy:
            return first_argmax(logits)
        keys = row_keys(state.seed_words, state.positions)
        drawn = draw_race(self.candidate_gaps(logits, best, state), keys, self.tables)
        return mx.where(state.greedy, first_argmax(logits), drawn) if state.needs.any_greedy else drawn


def candidate_gaps(logits: mx.array, best: mx.array, state: SamplingState, tables: RaceTables) -> mx.array:
    """Gaps int32[B, V] after temperature and cut-offs; LIMIT = no candidate. logits float32[B, V], best float32[B]."""
    gaps = gaps_below_best(logits, best, state.scale)
    if state.top_k is not None or state.top_p is not None:
        gaps = keep_prefix(gaps, state.top_k, state.top_p, tables)
    if state.min_p is not None:
        gaps = keep_min_p(gaps, state.min_p)
    return gaps
