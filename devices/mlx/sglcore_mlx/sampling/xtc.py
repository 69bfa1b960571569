"""XTC on MLX, as in `sglcore/sampling/xtc.py`. Pure functions of arrays."""

import mlx.core as mx

from sglcore.sampling.noise import LIMIT
from sglcore.sampling.state import Exclusion
from sglcore_mlx.sampling.cutoffs import token_weights, weight_of_share
from sglcore_mlx.sampling.race import RaceTables, coins


def left_out(gaps: mx.array, xtc: Exclusion[mx.array], keys: mx.array, tables: RaceTables) -> mx.array:
    """Return bool [M, V]: the tokens that XTC excludes from a draw with keys uint32 [M, 2]; gaps
    int32 [M, V], LIMIT = no candidate. A row excludes nothing unless its random number is below
    `xtc.chance`."""
    return top_tokens(gaps, xtc.share, tables) & (coins(keys) < xtc.chance)[:, None]


def top_tokens(gaps: mx.array, share: mx.array, tables: RaceTables) -> mx.array:
    """Return bool[M, V]: the candidates with at least share int32[M] / 2**24 of the row's weight,
    except the least likely of them (among equals, the one with the highest id)."""
    weights = token_weights(gaps, tables.weight)
    top = (weights.astype(mx.int64) >= weight_of_share(weights, share)[:, None]) & (gaps < LIMIT)
    last = mx.max(mx.where(top, gaps, -1), axis=-1, keepdims=True)
    kept = mx.max(mx.where(top & (gaps == last), tables.ids, -1), axis=-1, keepdims=True)
    return top & (tables.ids != kept)
