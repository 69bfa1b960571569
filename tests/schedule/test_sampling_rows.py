"""Sampling rows follow their requests through joins, leaves and reorders."""

from __future__ import annotations

from random import Random

import numpy as np

from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch, SamplingRow
from sglcore.schedule.request import Request, State
from sglcore.schedule.sampling_rows import SamplingRows


def make_request(index: int) -> Request:
    """A request with sampling parameters unlike all others."""
    params = SamplingParams(temperature=0.5 + index, logit_bias={index: 1.0}, min_tokens=index % 2, logprobs=index % 3)
    prompt = np.arange(index + 1, dtype=np.int32)
    return Request(f"r{index}", prompt, params, seed=index, sample_index=index, stop_ids=frozenset((index, 7)))


def make_fresh(requests: list[Request]) -> SamplingBatch:
    """The same rows made from scratch."""
    rows = []
    for index in [int(request.rid[1:]) for request in requests]:
        request = make_request(index)
        banned = tuple(request.stop_ids) if index % 2 else ()
        rows.append(SamplingRow(request.params, index, index, index + 1, banned))
    return SamplingBatch.from_rows(rows)


def test_any_sequence_of_batches_equals_batches_made_afresh() -> None:
    rnd, rows, made = Random(3), SamplingRows(), 0
    alive: list[Request] = []
    for _ in range(200):
        for _ in range(rnd.randint(0, 3)):
            alive.append(make_request(made))
            made += 1
        while len(alive) > 8:
            alive.pop(rnd.randrange(len(alive))).state = State.FINISHED
        batch = rnd.sample(alive, rnd.randint(1, len(alive))) if alive else []
        got, wanted = rows(batch), make_fresh(batch)
        for name in SamplingBatch.__slots__:
            assert (getattr(got, name) == getattr(wanted, name)).all(), name
    assert len(rows._pool) < 150
