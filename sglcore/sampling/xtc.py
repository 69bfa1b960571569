"""XTC, exclude top choices: with a given probability, a draw drops the most likely tokens except
the least likely of them.

The coin is a function of (seed, sample index, position). No host reads.
"""

import torch
from torch import Tensor

from sglcore.sampling.cutoffs import token_weights, weight_of_share
from sglcore.sampling.gumbel_race import RaceTables, coins
from sglcore.sampling.noise import LIMIT
from sglcore.sampling.state import Exclusion


def left_out(gaps: Tensor, xtc: Exclusion[Tensor], keys: Tensor, tables: RaceTables) -> Tensor:
    """Return bool[M, V]: the tokens of gaps int32[M, V] that a draw under keys int32[M, 2] drops. A
    gap of LIMIT is no candidate.
    """
    return top_tokens(gaps, xtc.share, tables) & (coins(keys) < xtc.chance)[:, None]


def top_tokens(gaps: Tensor, share: Tensor, tables: RaceTables) -> Tensor:
    """Return bool[M, V]: the candidates with at least share int32[M] / 2**24 of the row's weight,
    except the least likely of them. With equal gaps, the token with the highest id is the least
    likely.
    """
    weights = token_weights(gaps, tables.weight)
    least = weight_of_share(weights, share, tables.is_narrow)
    top = (weights >= least[:, None]) & (gaps < LIMIT)
    last = torch.where(top, gaps, -1).amax(-1, keepdim=True)
    kept = torch.where(top & (gaps == last), tables.ids, -1).amax(-1, keepdim=True)
    return top & (tables.ids != kept)
