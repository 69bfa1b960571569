"""The batched sampler on MLX: from logits to the same tokens as `sglcore/sampling/sampler.py`.

Host flags, never array values, decide which code runs: nothing is evaluated, so all of it can be
compiled.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from sglcore.sampling.noise import CONTENDERS, LIMIT, ONE, OWN, SPREAD
from sglcore.sampling.params_batch import SamplingNeeds
from sglcore.sampling.state import Exclusion, SampledTokens
from sglcore_mlx.sampling.cutoffs import keep_min_p, keep_prefix
from sglcore_mlx.sampling.logprobs import logprobs_of
from sglcore_mlx.sampling.processors import apply_bias, apply_masks, apply_penalties
from sglcore_mlx.sampling.race import (
    RaceTables,
    draw_race,
    first_argmax,
    gaps_below_best,
    make_race_tables,
    race_scores,
    row_keys,
)
from sglcore_mlx.sampling.state import SamplingState, place_state
from sglcore_mlx.sampling.xtc import left_out

EXPONENT = 0x7F800000
"""The exponent bits of a float32: all ones for NaN and infinities."""

Draw = Callable[[mx.array, dict[str, mx.array]], tuple[mx.array, mx.array]]
"""`draw(logits float32[B, V], rows) -> (tokens int32[B], bad rows bool[B])`: `draw_rows` with bound
`needs` and `tables`."""


class Sampler:
    """Samples tokens of one vocabulary. It holds only constants and compiled functions, nothing of
    a request."""

    def __init__(self, vocab_size: int, *, compiled: bool = False) -> None:
        """Make the tables of a vocabulary, 1..2**22 - 1 tokens. Raises ConfigError otherwise.

        With `compiled` the draw runs as a few fused kernels, traced once for each kind of batch and
        number of requests; on the CPU MLX calls a C++ compiler, which takes seconds. The tokens are
        the same.
        """
        self.vocab_size = vocab_size
        self.tables = make_race_tables(vocab_size)
        self._compiled: dict[SamplingNeeds, Draw] | None = {} if compiled else None

    def sample(self, logits: mx.array, state: SamplingState) -> SampledTokens[mx.array]:
        """Sample one token for each row of logits float [B, V]; B may be 0. Returns tokens int32
        [B], bad rows bool [B], and log-probabilities if the state needs them (else None), all lazy;
        works inside `mx.compile`."""
        # MLX can not reduce an empty array, and a step may have no request that needs a token.
        tokens, bad = self._draw(logits, state) if logits.shape[0] else (mx.zeros(0, mx.int32), mx.zeros(0, mx.bool_))
        top_n = state.needs.top_logprobs
        return SampledTokens(tokens, bad, None if top_n is None else logprobs_of(logits, tokens, top_n))

    def process(self, logits: mx.array, state: SamplingState) -> mx.array:
        """Return float32 [B, V]: logits float [B, V] after the state's penalties, bias with bans,
        changes of this step, masks, and XTC, in this order; those that are None are left out."""
        logits = logits.astype(mx.float32)
        if state.penalties is not None:
            logits = apply_penalties(logits, state.penalties, state.positions)
        if state.bias is not None:
            logits = apply_bias(logits, state.bias, state.positions)
        if state.changes is not None:
            logits = apply_bias(logits, state.changes, state.positions)
        if state.masks is not None:
            logits = apply_masks(logits, state.masks)
        if state.xtc is not None:
            logits = apply_xtc(logits, state.xtc, state, self.tables)
        return logits

    def probabilities(self, logits: mx.array, state: SamplingState) -> mx.array:
        """Return float32 [B, V]: the probability of each token after temperature and cut-offs,
        under logits float [B, V] that `process` returned. A greedy row has 1 at its token. Bad rows
        are zero."""
        logits = logits.astype(mx.float32)
        best = mx.max(logits, axis=-1)
        gaps = candidate_gaps(logits, best, state, self.tables)
        if state.needs.any_greedy:
            others = (self.tables.ids != first_argmax(logits)[:, None]) & state.greedy[:, None]
            gaps = mx.where(others, LIMIT, gaps)
        gone = (gaps == LIMIT) | is_bad(best)[:, None]
        weights = mx.where(gone, 0.0, mx.exp(gaps.astype(mx.float32) * (-1 / ONE)))
        return weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1.0)

    def draw_by_weight(self, weights: mx.array, seed_words: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Draw one token per row by weights float32 [B, V] of any sum. Returns tokens int32 [B],
        and bool [B] for rows without any weight, which get token 0. The noise is keyed by
        `positions` int32 [B] and seed words int32 [B, 2]."""
        rows = {"positions": positions, "seed_words": seed_words}
        rows |= {"scale": mx.full(positions.shape, float(ONE)), "greedy": mx.zeros(positions.shape, mx.bool_)}
        return self._draw_of(SamplingNeeds(all_greedy=False, any_greedy=False))(mx.log(weights), rows)

    def leaders(self, logits: mx.array, state: SamplingState, count: int) -> tuple[mx.array, mx.array]:
        """Return the first `count` tokens of each row's race, int32 [B, count], and the logarithms
        of the chances that another model with similar logits draws them, float32 [B, count] (-inf:
        no candidate). logits float [B, V] as `process` returns them. A greedy row has no noise."""
        logits = logits.astype(mx.float32)
        if state.needs.any_greedy:
            # A greedy row has no temperature: use 1.
            state = replace(state, scale=mx.where(state.greedy, float(ONE), state.scale))
        gaps = candidate_gaps(logits, mx.max(logits, axis=-1), state, self.tables)
        scores = -gaps
        if not state.needs.all_greedy:
            keys = row_keys(seed_words=state.seed_words, positions=state.positions)
            raced = race_scores(gaps, keys, self.tables.hashed_ids, self.tables.gumbel)
            scores = mx.where(state.greedy[:, None], scores, raced) if state.needs.any_greedy else raced
        nats, own = (mx.where(gaps >= LIMIT, -mx.inf, part.astype(mx.float32) / ONE) for part in (scores, -gaps))
        most = min(max(count, CONTENDERS), self.vocab_size)
        tokens = mx.argpartition(-nats, kth=most - 1, axis=-1)[:, :most]
        order = mx.argsort(-mx.take_along_axis(nats, tokens, axis=-1), axis=-1)
        tokens = mx.take_along_axis(tokens, order, axis=-1)
        first, found = (mx.take_along_axis(part, tokens, axis=-1) for part in (nats, own))
        chances = _chances(first, found - mx.logsumexp(own, axis=-1, keepdims=True))
        return tokens[:, :count].astype(mx.int32), chances[:, :count]

    def _draw(self, logits: mx.array, state: SamplingState) -> tuple[mx.array, mx.array]:
        processed = self.process(logits, state)
        return self._draw_of(state.needs)(processed, state.row_arrays())

    def _draw_of(self, needs: SamplingNeeds) -> Draw:
        """Return the draw function of a kind of batch, compiled unless all rows are greedy or
        compilation is off. Logit processors are not part of it: the history grows with every token,
        and each of its shapes would be compiled anew."""
        needs = replace(needs, any_penalty=False, any_bias=False, any_xtc=False, top_logprobs=None)
        draw = partial(draw_rows, needs, self.tables)
        if self._compiled is None or needs.all_greedy:
            return draw
        if needs not in self._compiled:
            self._compiled[needs] = mx.compile(draw)
        return self._compiled[needs]


def draw_rows(
    needs: SamplingNeeds, tables: RaceTables, logits: mx.array, rows: dict[str, mx.array]
) -> tuple[mx.array, mx.array]:
    """Return drawn tokens int32 [B], and bad rows bool [B] (best logit not finite; token 0), from
    processed logits float32 [B, V], B at least 1. `rows`: the result of `SamplingState.row_arrays`,
    a dictionary because a compiled function can not take a state; `needs`: without logit
    processors."""
    state = place_state(needs, rows["positions"], rows)
    best = mx.max(logits, axis=-1)
    bad = is_bad(best)
    drawn = first_argmax(logits) if needs.all_greedy else _race(logits, best, state, tables)
    return mx.where(bad, 0, drawn), bad


def _race(logits: mx.array, best: mx.array, state: SamplingState, tables: RaceTables) -> mx.array:
    """Return int32 [B]: the tokens of sampled and greedy rows; arbitrary tokens in bad rows.
    `best`: the row maxima of logits."""
    keys = row_keys(state.seed_words, state.positions)
    raced = draw_race(candidate_gaps(logits, best, state, tables), keys, tables)
    return mx.where(state.greedy, first_argmax(logits), raced) if state.needs.any_greedy else raced


def candidate_gaps(logits: mx.array, best: mx.array, state: SamplingState, tables: RaceTables) -> mx.array:
    """Return gaps int32 [B, V] after temperature and cut-offs (top-k, top-p, min-p); LIMIT = no
    candidate. logits float32 [B, V], best float32 [B] their row maxima."""
    gaps = gaps_below_best(logits, best, state.scale)
    if state.top_k is not None or state.top_p is not None:
        gaps = keep_prefix(gaps, state.top_k, state.top_p, tables)
    if state.min_p is not None:
        gaps = keep_min_p(gaps, state.min_p)
    return gaps


def is_bad(best: mx.array) -> mx.array:
    """Return bool [B]: whether best float32 [B] is NaN or infinite."""
    return (best.view(mx.int32) & EXPONENT) == EXPONENT


def _chances(nats: mx.array, own: mx.array) -> mx.array:
    """Return float32 [B, c]: `sampler.chances`, from the scores of c contenders in descending order
    and the logarithms of their probabilities."""
    marks = OWN * own - SPREAD * mx.sqrt(nats[:, :1] - nats)
    marks = mx.where(mx.isnan(marks), -mx.inf, marks)
    shares = marks - mx.logsumexp(marks, axis=-1, keepdims=True)
    return mx.where(mx.isnan(shares), -mx.inf, shares)


def apply_xtc(logits: mx.array, xtc: Exclusion[mx.array], state: SamplingState, tables: RaceTables) -> mx.array:
    """Return logits float32 [B, V] after XTC: in the rows that `xtc` lists, all tokens except the
    remaining candidates become -inf. `state`: the state of all rows."""
    own = {name: mx.take(getattr(state, name), xtc.rows, axis=0) for name in ("positions", "seed_words", "scale")}
    narrowed = replace(state, **own, top_k=xtc.top_k, top_p=xtc.top_p, min_p=xtc.min_p)
    chosen = mx.take(logits, xtc.rows, axis=0)
    best = mx.max(chosen, axis=-1)
    gaps = candidate_gaps(chosen, best, narrowed, tables)
    dropped = left_out(gaps, xtc, row_keys(narrowed.seed_words, narrowed.positions), tables) | (gaps == LIMIT)
    # If `best` is not finite, the gaps are arbitrary; such a row has no candidates.
    kept = mx.where(dropped | is_bad(best)[:, None], -float("inf"), chosen)
    return mx.put_along_axis(logits, mx.broadcast_to(xtc.rows[:, None], kept.shape), kept, axis=0)
