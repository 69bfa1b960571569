"""XTC, exclude top choices: with a probability, a draw leaves out its likeliest tokens but the least likely of them.

The coin is a function of (seed, sample index, position). No host reads.
"""

import torch
from torch import Tensor

from sglcore.sampling.cutoffs import token_weights, weight_of_share
from sglcore.sampling.noise import LIMIT
from sglcore.sampling.race import RaceTables, coins
from sglcore.sampling.state import Exclusion


def left_out(gaps: Tensor, xtc: Exclusion[Tensor], keys: Tensor, tables: RaceTables) -> Tensor:
    """bool[M, V]: what a draw under keys int32[M, 2] leaves out of gaps int32[M, V], in which LIMIT is no candidate."""
    return top_tokens(gaps, xtc.share, tables) & (coins(keys) < xtc.chance)[:, None]


def top_tokens(gaps: Tensor, share: Tensor, tables: RaceTables) -> Tensor:
    """bool[M, V]: the candidates with at least share int32[M] / 2**24 of the row's weight, but the least likely of them: of
    those equally far behind, that of the highest id."""
    weights = token_weights(gaps, tables.weight)
    least = weight_of_share(weights, share, tables.is_narrow)
    top = (weights >= least[:, None]) & (gaps < LIMIT)
    last = torch.where(top, gaps, -1).amax(-1, keepdim=True)
    kept = torch.where(top & (gaps == last), tables.ids, -1).amax(-1, keepdim=True)
    return top & (tables.ids != kept)
