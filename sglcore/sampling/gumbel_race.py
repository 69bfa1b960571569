"""The integer Gumbel race in torch: fixed-point gaps, keyed noise, and the draw. Elementwise, no
host reads.

Another tensor library needs only these operations: int32 xor, and, shift, wrapping multiply; int to
float32; reinterpretation of float32 as int32; a gather of 16384 entries; and a maximum.
`reference_sampler.py` is the same in plain integers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore.sampling import noise
from sglcore.sampling.noise import FOLD, GUMBEL_SIZE, INTERPOLATION_BITS, LIMIT

MAX_VOCAB = 1 << 22


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@dataclass(frozen=True, slots=True)
class RaceTables:
    """Device constants of one vocabulary: `gumbel` int32[2, 16384], `weight` int32[2, 8193], `ids`
    and `hashed_ids` int32[V]. `is_narrow`: the device has no 64-bit integers.
    """

    gumbel: Tensor
    weight: Tensor
    ids: Tensor
    hashed_ids: Tensor
    is_narrow: bool = False

    @property
    def race(self) -> tuple[Tensor, Tensor]:
        """The arguments of `race_scores`: hashed ids and noise table."""
        return self.hashed_ids, self.gumbel


def make_race_tables(vocab_size: int, device: torch.device | str, is_narrow: bool = False) -> RaceTables:
    """Allocate the tables of a vocabulary on a device. Raises ValueError unless `vocab_size` is in
    1..2**22.
    """
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"found a vocabulary of {vocab_size} tokens, wanted 1..{MAX_VOCAB}; check vocab_size")
    tables = noise.noise_tables()
    return RaceTables(
        torch.tensor(tables.gumbel, device=device),
        torch.tensor(tables.weight, device=device),
        torch.arange(vocab_size, dtype=torch.int32, device=device),
        torch.tensor(noise.hashed_ids(vocab_size), device=device),
        is_narrow,
    )


def row_keys(seed_words: Tensor, positions: Tensor) -> Tensor:
    """Return the key words int32[B, 2] of one draw per row, from seed words int32[B, 2] and
    positions int32[B].
    """
    first = _mix32_(positions * _signed(noise.POSITION_FACTOR) + seed_words[:, 0])
    second = _mix32_(seed_words[:, 1] + first).bitwise_or_(1)
    return torch.stack([first, second], dim=1)


def gaps_below_best(logits: Tensor, best: Tensor, scale: Tensor) -> Tensor:
    """Return gaps int32[B, V] in 2**-16 nat, LIMIT for tokens that are no candidates; logits
    float32[B, V], best float32[B] (the largest logit of each row) and scale float32[B]
    (`noise.fixed_scale`).

    One subtraction and one multiplication, each rounded once, so every IEEE device gets the same
    integers. A row without a finite best logit has no candidates.
    """
    gaps = best[:, None] - logits
    gaps.mul_(scale[:, None]).round_()
    gaps.nan_to_num_(nan=LIMIT, posinf=LIMIT, neginf=LIMIT).clamp_(max=LIMIT)
    return gaps.to(torch.int32)


def gumbel_noise(keys: Tensor, hashed_ids: Tensor, table: Tensor) -> Tensor:
    """Return keyed Gumbel noise int32[B, V] in 2**-16 nat; keys int32[B, 2], hashed_ids int32[V] or
    int32[B, V], `table` is `RaceTables.gumbel`.
    """
    words = hashed_ids ^ keys[:, :1]
    scratch = torch.empty_like(words)
    _hash_(words, keys, scratch).bitwise_or_(1)
    # As a signed number the word is the distance from the nearer end of (0, 1), so its float
    # exponent is the octave of the tail. Negative words move down by 32 octaves, so that exponent
    # and mantissa alone are the index.
    ends = torch.nn.functional.leaky_relu_(words.to(torch.float32), negative_slope=-FOLD)
    bits = ends.view(torch.int32)
    torch.bitwise_right_shift(bits, INTERPOLATION_BITS, out=scratch)
    index = scratch.bitwise_and_(GUMBEL_SIZE - 1).view(-1)
    fraction = bits.bitwise_and_((1 << INTERPOLATION_BITS) - 1)
    drawn = table[1].index_select(0, index).view(fraction.shape)
    drawn.mul_(fraction).bitwise_right_shift_(INTERPOLATION_BITS)
    return drawn.add_(table[0].index_select(0, index).view(fraction.shape))


def coins(keys: Tensor) -> Tensor:
    """Return int32[B]: one uniform number in 0..2**24-1 for each draw under keys int32[B, 2],
    independent of the draw's noise.
    """
    words = keys[:, :1] ^ _signed(noise.mix32((noise.COIN_ID + noise.ID_OFFSET) & noise.WORD))
    _hash_(words, keys, torch.empty_like(words))
    return (words[:, 0] >> (32 - noise.SHARE_BITS)).bitwise_and_((1 << noise.SHARE_BITS) - 1)


def race_scores(gaps: Tensor, keys: Tensor, hashed_ids: Tensor, table: Tensor) -> Tensor:
    """Return noise - gap, int32[B, V]. A drafter races on its own gaps with the target model's keys
    and hashed ids.
    """
    return gumbel_noise(keys, hashed_ids, table).sub_(gaps)


def lowest_argmax(scores: Tensor, ids: Tensor) -> Tensor:
    """Return int32[B]: the index of the first maximum of scores int32[B, V]; `ids` int32[V] are
    0..V-1. Computed by arithmetic, because argmax breaks ties differently on each device.

    Two scores of a row must differ by less than 2**31.
    """
    behind = scores.amax(-1, keepdim=True) - scores
    return torch.add(ids, behind.clamp_(max=1), alpha=MAX_VOCAB).amin(-1)


def draw_race(gaps: Tensor, keys: Tensor, tables: RaceTables) -> Tensor:
    """Return the drawn token int32[B] for rows of gaps int32[B, V] under keys int32[B, 2]."""
    return lowest_argmax(race_scores(gaps, keys, *tables.race), tables.ids)


def _fold_(words: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """Compute words ^= words >>> shift on int32 words, in place, and return them; `scratch`, of
    their shape, is overwritten. int32 has only the arithmetic shift, so copies of the sign bit are
    masked off.
    """
    torch.bitwise_right_shift(words, shift, out=scratch)
    return words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _hash_(words: Tensor, keys: Tensor, scratch: Tensor) -> Tensor:
    """Replace hashed ids int32[B, V], already combined with the first key word, in place by their
    hashes under keys int32[B, 2], and return them. `scratch`, of the same shape, is overwritten.
    """
    _fold_(words, 16, scratch).mul_(keys[:, 1:])
    _fold_(words, 15, scratch).mul_(_signed(noise.MIX_2))
    return _fold_(words, 16, scratch)


def _mix32_(words: Tensor) -> Tensor:
    scratch = torch.empty_like(words)
    _fold_(words, 16, scratch).mul_(_signed(noise.MIX_1))
    _fold_(words, 15, scratch).mul_(_signed(noise.MIX_2))
    return _fold_(words, 16, scratch)
