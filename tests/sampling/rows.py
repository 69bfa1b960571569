"""Helpers that draw tokens in tests."""

from collections.abc import Sequence

import torch

from sglcore.conformance.inputs.sampling_state import make_penalties, make_state
from sglcore.sampling.gumbel_race import draw_race, row_keys
from sglcore.sampling.noise import fixed_min_p
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.sampling.sampler import Sampler, SamplingState, candidate_gaps
from sglcore.sampling.state import SampledTokens


def staged(rows: Sequence[tuple], positions: Sequence[int] | torch.Tensor, **parts) -> SamplingState:
    """The state of rows (params, seed[, sample_index, ...]) at these positions."""
    return make_state(SamplingBatch.from_params(rows), torch.as_tensor(positions, dtype=torch.int32), **parts)


def drawn(logits: torch.Tensor, rows: Sequence[tuple], positions: Sequence[int], **parts) -> SampledTokens:
    """One draw per row on the CPU."""
    return Sampler(logits.shape[1], "cpu").sample(logits, staged(rows, positions, **parts))


def many_draws(logits: Sequence[float], params: SamplingParams, count: int, seed: int = 1) -> torch.Tensor:
    """int64[count]: one row drawn at positions 0..count-1. All draws are races over the row's gaps;
    the first 2000 are also whole samples, which must be equal."""
    sampler, row = Sampler(len(logits), "cpu"), torch.tensor([list(logits)], dtype=torch.float32)
    state = staged([(params, seed)], [0])
    gaps = candidate_gaps(row, row.amax(-1), state, sampler.tables)
    parts = []
    for positions in torch.arange(count, dtype=torch.int32).split(10000):
        keys = row_keys(state.seed_words.expand(len(positions), 2), positions)
        parts.append(draw_race(gaps.expand(len(positions), -1), keys, sampler.tables))
    tokens, first = torch.cat(parts), torch.arange(2000, dtype=torch.int32)
    whole = sampler.sample(row.expand(2000, -1), staged([(params, seed)] * 2000, first)).token_ids
    assert torch.equal(tokens[:2000], whole[:count])
    return tokens.long()


def with_history(rows: Sequence[tuple], history: Sequence[Sequence[int]], vocab_size: int, all_rows: bool = True):
    """The penalty state of rows with the tokens `history` so far (prompt lengths come from the
    rows)."""
    batch = SamplingBatch.from_params(rows)
    width = max(len(tokens) for tokens in history)
    table = torch.tensor([list(tokens) + [-7] * (width - len(tokens)) for tokens in history], dtype=torch.int32)
    lengths = torch.tensor([len(tokens) for tokens in history], dtype=torch.int32)
    if not all_rows:
        chosen = torch.as_tensor(batch.penalty_rows()).long()
        table, lengths = table[chosen], lengths[chosen]
    return make_penalties(batch, table, lengths, vocab_size, all_rows)


def signed_zeros(block: int) -> tuple[torch.Tensor, SamplingState]:
    """Two greedy rows and a sampled one. Zeros of both signs are equally good, and the first must
    win; the last zero is alone in a kernel block."""
    logits = torch.full((3, block + 1), -1.0)
    logits[:, 5], logits[:, 9], logits[:, block] = -0.0, 0.0, 0.0
    return logits, staged([(SamplingParams(temperature=each), 4) for each in (0.0, 0.0, 1.0)], range(3))


def at_min_p() -> tuple[torch.Tensor, SamplingState]:
    """The second token has the largest gap that min_p keeps; the third token's gap rounds to it."""
    edge = fixed_min_p(0.2)
    row = torch.tensor([0.0, -edge / 65536, -(edge + 0.375) / 65536, -30.0])
    return row.repeat(40, 1), staged([(SamplingParams(temperature=1.0, min_p=0.2), 5)] * 40, range(40))
