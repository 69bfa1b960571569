"""Sampling parameters of the rows of a batch as host arrays, cheap to select from and append to.

One declaration per field yields selection, appending and the forward-only copy. No tensor library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from sglcore.sampling import noise
from sglcore.sampling.params import SamplingParams
from sglcore.worker.schedule_batch import offsets_of


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sample of one request: its parameters, and what the parameters alone do not contain."""

    params: SamplingParams
    seed: int
    """Resolved seed, 0..2**64-1 (params.seed or fresh_seed())."""
    sample_index: int = 0
    """Which of the request's n samples this row is."""
    prompt_len: int = 0
    """Prompt length in tokens, which is also the position of the first sampled token."""
    banned_early: tuple[int, ...] = ()
    """Ids that cannot be sampled before params.min_tokens: end of sequence and stop ids."""


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which code a batch runs: host values only, hashable, so they can key a captured graph."""

    all_greedy: bool = True
    """All rows are greedy."""
    any_greedy: bool = True
    """Some row is greedy, or there is no row."""
    any_top_k: bool = False
    """Some row without XTC has a top_k."""
    any_top_p: bool = False
    """Some row without XTC has a top_p."""
    any_min_p: bool = False
    """Some row without XTC has a min_p."""
    any_penalty: bool = False
    """Some row has a penalty."""
    any_bias: bool = False
    """Some row has a logit bias or a banned token."""
    top_logprobs: int | None = None
    """The most alternatives that a row requests. None: no row requests log-probabilities."""
    any_xtc: bool = False
    """Some row has XTC."""

    @property
    def any_cutoff(self) -> bool:
        """Whether a sampled row without XTC limits its candidates."""
        return self.any_top_k or self.any_top_p or self.any_min_p


def _row_field(dtype: Any) -> Any:
    """Declare a field with one value per row, of a numpy dtype."""
    return field(metadata={"kind": "row", "dtype": dtype})


def _entry_field(dtype: Any) -> Any:
    """Declare a field with one value per bias entry; the entries of row r are
    bias_offsets[r]..bias_offsets[r+1]-1.
    """
    return field(metadata={"kind": "entry", "dtype": dtype})


def _offset_field() -> Any:
    """Declare the field with the R + 1 offsets of the rows into the fields of entries."""
    return field(metadata={"kind": "offsets", "dtype": np.int32})


@dataclass(slots=True, eq=False)
class SamplingBatch:
    """The sampling parameters of R rows, as host arrays. Greedy rows hold neutral cut-offs, so
    `needs` names only work that can change a token.
    """

    scale: np.ndarray = _row_field(np.float32)
    """float32[R]: 2**16 / temperature; 1 for greedy rows."""
    greedy: np.ndarray = _row_field(np.bool_)
    """bool[R]: the row is greedy."""
    top_k: np.ndarray = _row_field(np.int32)
    """int32[R]: tokens kept; `noise.OFF`: all."""
    top_p: np.ndarray = _row_field(np.int32)
    """int32[R], in units of 2**-24."""
    min_p: np.ndarray = _row_field(np.int32)
    """int32[R]: the largest gap kept, in 2**-16 nat."""
    xtc_chance: np.ndarray = _row_field(np.int32)
    """int32[R]: probability that a draw drops its top tokens (XTC), in units of 2**-24. 0:
    never."""
    xtc_share: np.ndarray = _row_field(np.int32)
    """int32[R]: share of the weight from which a token is a top token (XTC), in units of 2**-24."""
    seed_words: np.ndarray = _row_field(np.int32)
    """int32[R, 2]: seed and sample index, mixed. The position is added on the device."""
    repetition: np.ndarray = _row_field(np.float32)
    """float32[R]: the repetition penalty. 1: none."""
    presence: np.ndarray = _row_field(np.float32)
    """float32[R]: the presence penalty. 0: none."""
    frequency: np.ndarray = _row_field(np.float32)
    """float32[R]: the frequency penalty. 0: none."""
    prompt_len: np.ndarray = _row_field(np.int32)
    """int32[R]: tokens of the prompt."""
    top_logprobs: np.ndarray = _row_field(np.int32)
    """int32[R]: requested alternatives. -1: no log-probabilities."""
    bias_offsets: np.ndarray = _offset_field()
    """int32[R + 1]: where each row's entries begin in the next three."""
    bias_ids: np.ndarray = _entry_field(np.int32)
    """int32[E]: the token of each entry."""
    bias_values: np.ndarray = _entry_field(np.float32)
    """float32[E]: value to add to its logit; -inf bans it."""
    bias_until: np.ndarray = _entry_field(np.int32)
    """int32[E]: the entry is active while the drawn token's position is below this: `noise.OFF` for
    a bias, the end of the ban for min_tokens."""

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow], stream: int = 0) -> "SamplingBatch":
        """Make the arrays of these rows, about 5 us each. Build once per request, then select and
        append. `stream` separates independent uses of one seed (0: the target model's draw).
        """
        values = [_row_values(row) for row in rows]
        arrays = {
            name: np.array([row[name] for row in values], _FIELDS[name].metadata["dtype"]) for name in _VALUE_NAMES
        }
        seeds = np.array([row.seed for row in rows], np.uint64)
        indices = np.array([row.sample_index for row in rows], np.uint64)
        entries = [_bias_entries(row) for row in rows]
        flat = [entry for row_entries in entries for entry in row_entries]
        return cls(
            **arrays,
            seed_words=noise.seed_words(seeds, indices, stream),
            bias_offsets=offsets_of([len(row_entries) for row_entries in entries]),
            bias_ids=np.array([entry[0] for entry in flat], np.int32),
            bias_values=np.array([entry[1] for entry in flat], np.float32),
            bias_until=np.array([entry[2] for entry in flat], np.int32),
        )

    @classmethod
    def from_params(cls, rows: Sequence[tuple], stream: int = 0) -> "SamplingBatch":
        """Make the arrays, as `from_rows` does, of tuples (params, seed[, sample_index[,
        prompt_len[, banned_early]]]).
        """
        return cls.from_rows([SamplingRow(*row) for row in rows], stream)

    def __len__(self) -> int:
        return len(self.scale)

    @property
    def needs(self) -> SamplingNeeds:
        """The flags of this batch, computed from its arrays in a few microseconds."""
        tops = int(self.top_logprobs.max(initial=-1))
        return SamplingNeeds(
            all_greedy=bool(self.greedy.all()),
            any_greedy=bool(self.greedy.any()) or not len(self),
            any_top_k=bool(((self.top_k != noise.OFF) & (self.xtc_chance == 0)).any()),
            any_top_p=bool(((self.top_p != noise.TOP_P_OFF) & (self.xtc_chance == 0)).any()),
            any_min_p=bool(((self.min_p != noise.OFF) & (self.xtc_chance == 0)).any()),
            any_xtc=bool(self.xtc_chance.any()),
            any_penalty=bool(len(self.penalty_rows())),
            any_bias=bool(len(self.bias_ids)),
            top_logprobs=None if tops < 0 else tops,
        )

    def penalty_rows(self) -> np.ndarray:
        """Return int32: the indices of the rows with a repetition, presence or frequency penalty,
        ascending.
        """
        active = (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)
        return np.flatnonzero(active).astype(np.int32)

    def xtc_rows(self) -> np.ndarray:
        """Return int32: the indices of the rows with XTC, ascending."""
        return np.flatnonzero(self.xtc_chance).astype(np.int32)

    def select(self, rows: Sequence[int] | np.ndarray) -> "SamplingBatch":
        """Return a new batch of these rows, in this order; rows may repeat. It shares no memory
        with this one.
        """
        index = np.asarray(rows, np.int64)
        counts = np.diff(self.bias_offsets)[index]
        offsets = offsets_of(counts)
        starts = np.repeat(self.bias_offsets[:-1][index] - offsets[:-1], counts)
        entries = starts + np.arange(offsets[-1])
        taken = {}
        for name, item in _FIELDS.items():
            if item.metadata["kind"] != "offsets":
                taken[name] = getattr(self, name)[index if item.metadata["kind"] == "row" else entries]
        return SamplingBatch(**taken, bias_offsets=offsets)

    def append(self, rows: Sequence[SamplingRow]) -> "SamplingBatch":
        """Return a new batch: this one's rows, then `rows`, with stream 0 (the target model's draw,
        see `noise.seed_words`).
        """
        batches = (self, SamplingBatch.from_rows(rows))
        joined = {
            name: np.concatenate([getattr(batch, name) for batch in batches])
            for name in _FIELDS
            if name != "bias_offsets"
        }
        counts = np.concatenate([np.diff(batch.bias_offsets) for batch in batches])
        return SamplingBatch(**joined, bias_offsets=offsets_of(counts))

    def copy_for_forward(self) -> "SamplingBatch":
        """Return a batch with the same rows for one forward, which later changes of this batch do
        not reach. No array is copied.

        Both batches share their arrays, which become read-only; `select` and `append` make new
        ones.
        """
        values = _reader(type(self))(self)
        if self.scale.flags.writeable:
            for value in values:
                value.setflags(write=False)
        return type(self)(*values)

    def bias_rows(self) -> np.ndarray:
        """Return int32: the row of every bias entry."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.bias_offsets))


_FIELDS = MappingProxyType({item.name: item for item in fields(SamplingBatch)})
_VALUE_NAMES = tuple(name for name, item in _FIELDS.items() if item.metadata["kind"] == "row" and name != "seed_words")


@cache
def _reader(kind: type) -> "attrgetter[tuple]":
    return attrgetter(*(item.name for item in fields(kind)))


def _row_values(row: SamplingRow) -> dict[str, Any]:
    """Return a row's values for the fields with one value per row, by field name; without
    `seed_words`.
    """
    params = row.params
    greedy = params.is_greedy
    return {
        "scale": 1.0 if greedy else noise.fixed_scale(params.temperature),
        "greedy": greedy,
        "top_k": noise.OFF if greedy or params.top_k <= 0 else params.top_k,
        "top_p": noise.TOP_P_OFF if greedy else noise.fixed_top_p(params.top_p),
        "min_p": noise.OFF if greedy else noise.fixed_min_p(params.min_p),
        "xtc_chance": noise.fixed_share(params.xtc_probability) if params.excludes_top else 0,
        "xtc_share": noise.fixed_share(params.xtc_threshold),
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "prompt_len": row.prompt_len,
        "top_logprobs": -1 if params.logprobs is None else params.logprobs,
    }


def _bias_entries(row: SamplingRow) -> list[tuple[int, float, int]]:
    """Return (id, value, until) of one row: its biases, then -inf for its early bans, if it has
    `min_tokens`. An entry is active at positions below `until`.
    """
    entries = [(token, value, noise.OFF) for token, value in row.params.logit_bias.items()]
    if row.params.min_tokens > 0:
        until = row.prompt_len + row.params.min_tokens
        entries += [(token, -np.inf, until) for token in sorted(set(row.banned_early))]
    return entries
