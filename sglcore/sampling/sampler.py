"""The batched sampler: processed logits in, tokens out, the same on every device and in every
batch.

Host flags select the code that runs, never device values: there are no host reads, so a graph can
capture all of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from sglcore.sampling.cutoffs import STEPS, keep_min_p_, keep_top_k_, keep_top_p_
from sglcore.sampling.gumbel_race import RaceTables, draw_race, gaps_below_best, make_race_tables, race_scores, row_keys
from sglcore.sampling.logprobs import logprobs_of
from sglcore.sampling.noise import CONTENDERS, LIMIT, ONE, OWN, SPREAD
from sglcore.sampling.params_batch import SamplingNeeds
from sglcore.sampling.processors import (
    PenaltyState,
    apply_bias_,
    apply_masks_,
    apply_penalties_,
)
from sglcore.sampling.state import Bias, Exclusion, SampledTokens, place_exclusion
from sglcore.sampling.state import SamplingState as OfAnyLibrary
from sglcore.sampling.xtc import left_out


class SamplingState(OfAnyLibrary[Tensor, PenaltyState]):
    """`state.SamplingState` in torch tensors: the inputs of one sampling call, on the device."""

    __slots__ = ()


def place_state(needs: SamplingNeeds, positions: Tensor, parts: Mapping[str, Tensor]) -> SamplingState:
    """Make the state from `parts`, the device's views of `state_arrays`, for positions int32[B].
    Flags may arrive as int32. The caller adds penalties, masks and changes.
    """
    bias = None
    if needs.any_bias:
        bias = Bias(*(parts[f"bias_{name}"] for name in ("rows", "ids", "values", "until")))
    return SamplingState(
        needs,
        positions,
        parts["seed_words"],
        parts["scale"],
        parts["greedy"].bool(),
        parts.get("top_k"),
        parts.get("top_p"),
        parts.get("min_p"),
        bias=bias,
        xtc=place_exclusion(needs, parts),
    )


Draw = Callable[[Tensor, SamplingState, RaceTables], tuple[Tensor, Tensor]]
"""`draw(logits float[B, V], state, tables) -> (tokens int32[B], bad bool[B])`: the draw after all
processing of the logits.
"""

Greedy = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`greedy(logits float[B, V]) -> (tokens int32[B], bad bool[B])`: the draw when every row is
greedy.
"""

BLOCK_ELEMENTS = 1 << 16
"""Number of logits that `draw_rows` processes at a time: about the size of a CPU cache."""


class Sampler:
    """Draws tokens for one vocabulary on one device. It holds constants only, so it serves any
    number of batches.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        block_elements: int = BLOCK_ELEMENTS,
        draw: Draw | None = None,
        greedy: Greedy | None = None,
        is_narrow: bool = False,
    ) -> None:
        """`draw` and `greedy` are the device's own implementations; the default is torch, in blocks
        of `block_elements`. `is_narrow`: the device has no 64-bit integers. None of these changes a
        token.
        """
        self.tables = make_race_tables(vocab_size, device, is_narrow)
        self.vocab_size = vocab_size
        self._draw = partial(draw_rows, block_elements=block_elements) if draw is None else draw
        self._greedy = draw_greedy if greedy is None else greedy

    def sample(self, logits: Tensor, state: SamplingState) -> SampledTokens[Tensor]:
        """Draw one token per row of logits float[B, V], which are not changed. Log-probabilities,
        None unless `state.needs` asks for them, are those of `logits` before any processing. Never
        waits.
        """
        processed = self.process(logits, state)
        if state.needs.all_greedy:
            tokens, bad = self._greedy(processed)
        else:
            tokens, bad = self._draw(processed, state, self.tables)
        top_n = state.needs.top_logprobs
        narrow = self.tables.is_narrow
        logprobs = None if top_n is None else logprobs_of(logits, tokens, top_n, is_narrow=narrow)
        return SampledTokens(tokens, bad, logprobs)

    def decided(self, *found: Tensor) -> tuple[Tensor, ...]:
        """Return the results of a draw that was made without `sample` (tensors of one shape and
        dtype) as all ranks of the model must use them. Here: unchanged, each rank its own.
        """
        return found

    def probabilities(self, logits: Tensor, state: SamplingState) -> Tensor:
        """Return float32[B, V]: the probability of each token after temperature and cut-offs, under
        logits float[B, V] that `process` returned. A greedy row has 1 at its token. Bad rows are
        zero.
        """
        logits = logits.float()
        best, first = logits.max(-1)
        gaps = candidate_gaps(logits, best, state, self.tables)
        if state.needs.any_greedy:
            others = (self.tables.ids != first[:, None]) & state.greedy[:, None]
            gaps = gaps.masked_fill_(others, LIMIT)
        weights = (gaps.float() * -1 / ONE).exp_().masked_fill_(gaps == LIMIT, 0.0)
        return weights.div_(weights.sum(-1, keepdim=True).clamp_(min=1.0))

    def leaders(self, logits: Tensor, state: SamplingState, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` tokens of each row's race on logits float[B, V] that `process`
        returned, and an estimate of their acceptance.

        The race uses the row's noise (a greedy row: none, the most likely tokens). Returns tokens
        int32[B, count] and log chances float32[B, count] (see `chances`) that another model with
        similar logits draws the token; -inf if it is no candidate.
        """
        logits = logits.float()
        if state.needs.any_greedy:
            # A greedy row has no temperature: use 1.
            state = replace(state, scale=state.scale.masked_fill(state.greedy, ONE))
        gaps = candidate_gaps(logits, logits.amax(-1), state, self.tables)
        scores = -gaps
        if not state.needs.all_greedy:
            raced = race_scores(gaps, row_keys(state.seed_words, state.positions), *self.tables.race)
            scores = torch.where(state.greedy[:, None], scores, raced) if state.needs.any_greedy else raced
        nats, own = ((part.float() / ONE).masked_fill_(gaps >= LIMIT, -torch.inf) for part in (scores, -gaps))
        first, tokens = nats.topk(min(max(count, CONTENDERS), self.vocab_size))
        found = chances(first, own.gather(1, tokens) - own.logsumexp(-1, keepdim=True))
        return tokens[:, :count].to(torch.int32), found[:, :count]

    def draw_by_weight(self, weights: Tensor, seed_words: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token per row by weights float32[B, V] of any sum. Returns tokens int32[B], and
        bool[B] for rows without any weight, which get token 0. The noise is keyed by `positions`
        int32[B] and seed words int32[B, 2].
        """
        scale = torch.full_like(weights[:, 0], ONE)
        needs = SamplingNeeds(all_greedy=False, any_greedy=False)
        state = SamplingState(needs, positions, seed_words, scale, torch.zeros_like(scale, dtype=torch.bool))
        return self._draw(weights.log(), state, self.tables)

    def process(self, logits: Tensor, state: SamplingState) -> Tensor:
        """Apply penalties, then bias and early bans, then the additions of this step, then masks,
        then XTC. Returns a new float32[B, V], or `logits` itself if nothing applies.
        """
        if not any((state.penalties, state.bias, state.changes, state.masks, state.xtc)):
            return logits
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if state.penalties is not None:
            apply_penalties_(logits, state.penalties)
        if state.bias is not None:
            apply_bias_(logits, state.bias, state.positions)
        if state.changes is not None:
            apply_bias_(logits, state.changes, state.positions)
        if state.masks is not None:
            apply_masks_(logits, state.masks)
        if state.xtc is not None:
            apply_xtc_(logits, state.xtc, state, self.tables)
        return logits


def chances(nats: Tensor, own: Tensor) -> Tensor:
    """Return float32[B, c]: the log chance that each of c contenders is the drawn token, from
    `nats`, their scores in the race in descending order, and `own`, the logarithms of their
    probabilities, float32[B, c] each. -inf for tokens that are no candidates.
    """
    marks = OWN * own - SPREAD * (nats[:, :1] - nats).sqrt()
    return (marks - marks.logsumexp(-1, keepdim=True)).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def candidate_gaps(logits: Tensor, best: Tensor, state: SamplingState, tables: RaceTables) -> Tensor:
    """Return gaps int32[B, V] after temperature and cut-offs; LIMIT = no candidate. logits
    float32[B, V], best float32[B].
    """
    gaps = gaps_below_best(logits, best, state.scale)
    if state.top_k is not None:
        keep_top_k_(gaps, state.top_k)
    if state.top_p is not None:
        keep_top_p_(gaps, state.top_p, tables.weight, tables.is_narrow)
    if state.min_p is not None:
        keep_min_p_(gaps, state.min_p)
    return gaps


def apply_xtc_(logits: Tensor, xtc: Exclusion[Tensor], state: SamplingState, tables: RaceTables) -> Tensor:
    """Set the logits float32[B, V] of the rows with XTC to -inf, in place, for tokens that the
    rows' cut-offs drop and, if the coin of the draw applies XTC, for those that XTC drops. Returns
    the logits. `state` covers all rows.
    """
    names = ("positions", "seed_words", "scale")
    own = {name: getattr(state, name).index_select(0, xtc.rows) for name in names}
    narrowed = replace(state, **own, top_k=xtc.top_k, top_p=xtc.top_p, min_p=xtc.min_p)
    chosen = logits.index_select(0, xtc.rows)
    gaps = candidate_gaps(chosen, chosen.amax(-1), narrowed, tables)
    dropped = left_out(gaps, xtc, row_keys(narrowed.seed_words, narrowed.positions), tables)
    return logits.index_put_((xtc.rows,), chosen.masked_fill_(dropped | (gaps == LIMIT), -torch.inf))


def draw_rows(
    logits: Tensor, state: SamplingState, tables: RaceTables, block_elements: int = BLOCK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Draw in torch, on any device, from logits float[B, V] after all processing; returns tokens
    int32[B] and bool[B] for bad rows, which get token 0. Works on rows of about `block_elements`
    logits (at least one row) at a time; the block size never changes a token.
    """
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    bad = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    keys = row_keys(state.seed_words, state.positions)
    for rows in _blocks(logits, state.needs, block_elements):
        tokens[rows], bad[rows] = _draw_block(logits[rows].float(), keys[rows], _narrow(state, rows), tables)
    return tokens, bad


def _draw_block(logits: Tensor, keys: Tensor, state: SamplingState, tables: RaceTables) -> tuple[Tensor, Tensor]:
    if state.needs.any_greedy:
        best, first = logits.max(-1)
    else:
        best, first = logits.amax(-1), None
    drawn = draw_race(candidate_gaps(logits, best, state, tables), keys, tables)
    if first is not None:
        drawn = torch.where(state.greedy, first.to(torch.int32), drawn)
    bad = ~best.isfinite()
    return drawn.masked_fill_(bad, 0), bad


def _blocks(logits: Tensor, needs: SamplingNeeds, block_elements: int) -> Iterator[slice]:
    count, vocab_size = logits.shape
    width = max(vocab_size, STEPS) if needs.any_cutoff else vocab_size
    step = max(1, block_elements // width)
    return (slice(start, start + step) for start in range(0, count, step))


def draw_greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each row's first largest logit, tokens int32[B], and bool[B] for bad rows
    (NaN, +inf or only -inf), which get token 0. The torch implementation of `Greedy`.
    """
    tokens = logits.argmax(-1, keepdim=True).to(torch.int32)
    bad = ~logits.gather(1, tokens)[:, 0].isfinite()
    return tokens[:, 0].masked_fill_(bad, 0), bad


def _row_parts(state: SamplingState) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of the fields with one entry per row of the batch."""
    parts = [(item.name, getattr(state, item.name)) for item in fields(state)]
    return [(name, part) for name, part in parts if isinstance(part, Tensor)]


def _narrow(state: SamplingState, rows: slice) -> SamplingState:
    """Return the state of a block of rows as views, without the processors, which have run."""
    return replace(
        state,
        **{name: part[rows] for name, part in _row_parts(state)},
        penalties=None,
        bias=None,
        masks=None,
        xtc=None,
        changes=None,
    )
